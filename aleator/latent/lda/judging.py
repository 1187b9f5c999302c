"""How good topics are: perplexity of held-out words, coherence."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import DataError, ModelError, message
from aleator._random import as_key, seed_of
from aleator._typing import Array, KeyLike
from aleator.latent._model import Conjugate, in_double
from aleator.latent.lda._beliefs import TIGHT, TINY
from aleator.latent.lda.corpus import check_documents, documents
from aleator.latent.lda.families import Proportions
from aleator.latent.lda.model import LDA
from aleator.posterior import Draws


@in_double
def topics_of(fit: Any) -> np.ndarray:
    """Posterior mean topics (K, V) of a fit whose topics keep their names: a point or one q. Of draws, the last: others may swap them."""
    return _each_topics(fit, 1)[-1][0]


def _each_topics(fit: Any, num_samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(topics (K, V), α (K,)), of a q once, at its mean; of draws, up to num_samples of them, spread evenly."""
    model, posterior = fit.model, fit.posterior
    if isinstance(posterior, Conjugate):
        alpha = np.asarray(posterior.counts["topics"]) + 1.0
        shares = np.exp(Proportions(model.alpha).mode(posterior.counts["alpha"])) if model.learn_alpha else np.asarray(model.alpha)
        return [(alpha / alpha.sum(axis=1, keepdims=True), np.asarray(shares))]
    params = posterior.params
    if not isinstance(posterior, Draws):
        params = jax.tree.map(lambda leaf: leaf[None], params)
    total = _tree.rows(params)
    named = [model.constrain(_tree.take(params, int(i))) for i in np.unique(np.linspace(0, total - 1, min(num_samples, total)).round())]
    return [(np.asarray(one["topics"]), np.asarray(one["alpha"])) for one in named]


def halves(key: KeyLike, y: Any, fraction: float = 0.5) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The words of every document dealt at random: about `fraction` to be seen, the others to be predicted."""
    if not 0.0 < fraction < 1.0:
        raise DataError(message("Nothing would be left on one side.", f"fraction={fraction}", "0 < fraction < 1", "use e.g. 0.5"))
    y = documents(y)
    generator = np.random.Generator(np.random.Philox(seed_of(as_key(key))))
    count = np.asarray(y["count"])
    seen = generator.binomial(count.astype(np.int64), fraction).astype(np.float32)
    return {"word": y["word"], "count": seen}, {"word": y["word"], "count": count - seen}


@in_double
def perplexity(key: KeyLike, fit: Any, y: Any, fraction: float = 0.5, num_samples: int = 20) -> float:
    """exp(−log p per word) of the second half of each document given its first: document completion.

    The words of every document are dealt at random, `fraction` of them to be seen. Given topics β (their posterior mean, or each of
    num_samples draws), θ̂_d is the mean of q(θ_d) given the words seen; a held-out word has probability Σ_k θ̂_dk β_kw, averaged over
    draws. Low is good; V is that of a uniform guess. fit: of an LDA, or (topics (K, V), alpha) as found elsewhere.
    """
    seen, held = halves(key, y, fraction)
    given = (
        [(np.asarray(fit[0]), np.asarray(fit[1]))]
        if isinstance(fit, tuple) and not hasattr(fit, "posterior")
        else _each_topics(fit, num_samples)
    )
    words = given[0][0].shape[1]
    check_documents(y if isinstance(y, dict) else documents(y), words)
    if not held["count"].any():
        raise DataError(
            message("There is no word to predict.", "no held-out word", "documents of some length", "lower fraction, or use more documents")
        )
    total = np.mean([np.asarray(_completion(jnp.asarray(topics), jnp.asarray(alpha), seen, held)) for topics, alpha in given], axis=0)
    return float(np.exp(-np.sum(held["count"] * np.log(total + TINY)) / np.sum(held["count"], dtype=np.float64)))


def _completion(topics: Array, alpha: Array, seen: dict[str, Any], held: dict[str, Any]) -> Array:
    """p(word | words seen) for every entry, (n, L)."""
    num, words = topics.shape
    model = LDA(num, tuple(np.broadcast_to(np.asarray(alpha, float), (num,)).tolist()), num_words=words)
    return _compiled_completion(model)(topics, jax.tree.map(jnp.asarray, seen), jnp.asarray(held["word"]))


@functools.lru_cache(maxsize=8)
def _compiled_completion(model: LDA) -> Any:
    def run(topics: Array, seen: dict[str, Array], word: Array) -> Array:
        gamma = model._beliefs({"topics": jnp.log(topics + TINY)}, seen, (1e-6, TIGHT[1])).gamma
        theta = gamma / jnp.sum(gamma, axis=-1, keepdims=True)
        return jax.lax.map(lambda item: topics.T[item[1]] @ item[0], (theta, word))

    return jax.jit(run)


def top_words(topics: Any, vocabulary: Sequence[str] | None = None, num: int = 10) -> list[list[Any]]:
    """The `num` most probable words of each topic, by name (or number). topics: (K, V), or a fit."""
    topics = np.asarray(topics_of(topics) if hasattr(topics, "posterior") else topics)
    best = np.argsort(-topics, axis=1, kind="stable")[:, :num]
    return [[int(w) if vocabulary is None else str(vocabulary[w]) for w in row] for row in best]


def coherence(topics: Any, y: Any, measure: str = "npmi", num: int = 10) -> np.ndarray:
    """How often the `num` top words of each topic meet in the documents y; (K,), higher is better.

    "npmi": mean over pairs of log[p(i, j) / p(i)p(j)] / −log p(i, j) ∈ [−1, 1], −1 for words that never meet (Lau et al., 2014);
    "umass": mean over pairs i > j of log[(D(i, j) + 1) / D(j)], j the more probable in the topic (Mimno et al., 2011). p and D are shares
    and numbers of documents in which words occur; words that occur in none are left out.
    """
    if measure not in ("npmi", "umass"):
        raise ModelError(message("Unknown measure.", repr(measure), "'npmi' or 'umass'", "choose one of them"))
    y = documents(y)
    count = np.asarray(y["count"])
    row, place = np.nonzero(count)
    words, size = np.asarray(y["word"])[row, place], len(count)
    scores = []
    for best in top_words(topics, None, num):
        occurs = np.zeros((size, len(best)), bool)
        for number, word in enumerate(best):
            occurs[row[words == word], number] = True
        scores.append(_coherence(occurs[:, occurs.any(axis=0)].astype(float), measure))
    return np.asarray(scores)


def _coherence(occurs: np.ndarray, measure: str) -> float:
    both = occurs.T @ occurs
    alone, (first, second) = np.diagonal(both), np.triu_indices(len(both), 1)
    if not len(first):
        return math.nan
    together = both[first, second]
    if measure == "umass":
        return float(np.mean(np.log((together + 1.0) / alone[first])))
    share = together / len(occurs)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.log(share * len(occurs) ** 2 / (alone[first] * alone[second])) / -np.log(share)
    return float(np.mean(np.where(together == 0, -1.0, np.where(share == 1.0, 1.0, value))))
