"""Collapsed Gibbs: draws of the topics of words, proportions and topics summed out."""

from __future__ import annotations

import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._random import as_key, split
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.latent.lda.corpus import documents
from aleator.latent.lda.families import Topics
from aleator.latent.lda.model import LDA
from aleator.posterior import Draws


class Corpus(NamedTuple):
    """Word by word. doc, word: (T,) int32."""

    doc: Array
    word: Array


class Tables(NamedTuple):
    """Where the words are. z (T,): topics. by_doc (N, K), by_word (V, K), by_topic (K,): counts of them."""

    z: Any
    by_doc: Any
    by_word: Any
    by_topic: Any


class TopicChains(NamedTuple):
    """What collapsed Gibbs leaves: a model and posterior draws of its parameters, to be used as a Fit; log_joint (chains, samples):
    log p(w, z) of the draws, nats; proportions (chains, samples, N, K): E[θ_d | z]."""

    model: LDA
    posterior: Draws
    log_joint: np.ndarray
    proportions: np.ndarray


def collapsed_gibbs(
    key: KeyLike, model: LDA, y: Any, num_samples: int = 20, num_warmup: int = 200, num_chains: int = 2, thin: int = 10
) -> TopicChains:
    """Draws of the topics by Gibbs over z alone, proportions and topics summed out (Griffiths and Steyvers, 2004):

        p(z_i = k | z_−i, w) ∝ (n_dk + α_k)(n_wk + c) / (n_k + Vc),      counts without word i,

    then β_k | z ~ Dirichlet(n_k· + c). One compiled sweep over all words a step; chains run side by side. α stays as given.
    """
    for name, value, least in (
        ("num_samples", num_samples, 1),
        ("num_warmup", num_warmup, 0),
        ("num_chains", num_chains, 1),
        ("thin", thin, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ModelError(message(f"{name} cannot be used.", repr(value), f"a whole number ≥ {least}", f"pass e.g. {name}=10"))
    y = documents(y, num_words=model.num_words)
    model = dataclasses.replace(model, learn_alpha=False).bind(None, y)
    count = np.asarray(y["count"]).astype(np.int64)
    row, place = np.nonzero(count)
    repeat = lambda values: np.repeat(values, count[row, place]).astype(np.int32)
    corpus = Corpus(repeat(row), repeat(np.asarray(y["word"])[row, place]))

    def chain(key: Key) -> Any:
        with jax.enable_x64(True):  # local to the thread
            return jax.tree.map(
                np.asarray, _chain(model, num_samples, num_warmup, thin, len(count))(key, jax.tree.map(jnp.asarray, corpus))
            )

    with ThreadPoolExecutor() as pool:
        params, joints, proportions = _tree.stack(list(pool.map(chain, split(as_key(key), num_chains))))
    flat = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), params)
    return TopicChains(model, Draws(flat, num_chains=num_chains), np.asarray(joints), np.asarray(proportions))


@functools.lru_cache(maxsize=8)
def _chain(model: LDA, num_samples: int, num_warmup: int, thin: int, num_docs: int) -> Any:
    alpha, flat, words, num = np.asarray(model.alpha), model.concentration, model.num_words, model.num_topics

    def sweep(tables: Tables, key: Key, corpus: Corpus) -> Tables:
        uniform = jax.random.uniform(key, corpus.doc.shape)

        def one(i: Array, tables: Tables) -> Tables:
            d, w, old = corpus.doc[i], corpus.word[i], tables.z[i]
            by_doc, by_word, by_topic = (
                tables.by_doc.at[d, old].add(-1.0),
                tables.by_word.at[w, old].add(-1.0),
                tables.by_topic.at[old].add(-1.0),
            )
            mass = jnp.cumsum((by_doc[d] + alpha) * (by_word[w] + flat) / (by_topic + words * flat))
            new = jnp.minimum(jnp.sum(mass <= uniform[i] * mass[-1]), num - 1).astype(jnp.int32)
            return Tables(tables.z.at[i].set(new), by_doc.at[d, new].add(1.0), by_word.at[w, new].add(1.0), by_topic.at[new].add(1.0))

        return jax.lax.fori_loop(0, len(corpus.doc), one, tables)

    def joint(tables: Tables) -> Array:
        """log p(w, z): two Dirichlet–multinomials."""
        docs = gammaln(tables.by_doc + alpha).sum() - gammaln(tables.by_doc.sum(1) + alpha.sum()).sum()
        docs += num_docs * (math.lgamma(alpha.sum()) - sum(map(math.lgamma, alpha)))
        topics = gammaln(tables.by_word + flat).sum() - gammaln(tables.by_topic + words * flat).sum()
        return docs + topics + num * (math.lgamma(words * flat) - words * math.lgamma(flat))

    def run(key: Key, corpus: Corpus) -> tuple[Tree, Array, Array]:
        key_start, key_warm, key_samples = jax.random.split(key, 3)
        z = jax.random.randint(key_start, corpus.doc.shape, 0, num, jnp.int32)
        zeros = lambda *shape: jnp.zeros(shape)
        by_topic = zeros(num).at[z].add(1.0)
        tables = Tables(z, zeros(num_docs, num).at[corpus.doc, z].add(1.0), zeros(words, num).at[corpus.word, z].add(1.0), by_topic)
        tables, _ = jax.lax.scan(
            lambda t, k: (sweep(t, k, corpus), None), tables, jax.random.split(key_warm, max(num_warmup, 1))[:num_warmup]
        )

        def sample(tables: Tables, key: Key) -> tuple[Tables, Any]:
            key_sweeps, key_topics = jax.random.split(key)
            tables, _ = jax.lax.scan(lambda t, k: (sweep(t, k, corpus), None), tables, jax.random.split(key_sweeps, thin))
            params = {"topics": Topics(1.0).draw(key_topics, tables.by_word.T + flat - 1.0)}
            shares = tables.by_doc + alpha
            return tables, (params, joint(tables), shares / jnp.sum(shares, axis=-1, keepdims=True))

        return jax.lax.scan(sample, tables, jax.random.split(key_samples, num_samples))[1]

    return jax.jit(run)
