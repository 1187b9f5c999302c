"""Latent Dirichlet allocation as a model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._random import as_key, split
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family, real_weights
from aleator.latent._model import ConjugateLatent, in_double, no_inputs, observations
from aleator.latent.lda._beliefs import LOOSE, TIGHT, Found, beliefs
from aleator.latent.lda._special import expected_log, gammaln
from aleator.latent.lda.corpus import check_documents, documents, entries
from aleator.latent.lda.families import Proportions, Topics
from aleator.latent.weights import check_concentration


@dataclasses.dataclass(frozen=True)
class LDA(ConjugateLatent):
    """θ_d ~ Dirichlet(α), β_k ~ Dirichlet(concentration); every word of document d: z ~ Categorical(θ_d), w ~ Categorical(β_z) (D6).

    Rows of y are documents: `al.latent.documents(…)` makes them of a sparse matrix or of lists of word numbers; a matrix of counts
    (N, V) will do as it is. alpha: a number or K of them, None for 1/K; learn_alpha: the most probable α, beside the topics.
    concentration: of the topics, None for 1/K; at least 1 where a mode is wanted (al.EM). num_words: V, None for the largest number met + 1.

    Given topics, θ_d and z do not sum out: what stands for log p(w_d | topics) is its variational bound (Blei, Ng and Jordan, 2003)

        Σ_w n_w log Σ_k exp(E[log θ_k] + log β_kw) − KL(Dirichlet(γ) ‖ Dirichlet(α)),     γ_k = α_k + Σ_w n_w φ_wk,

    for words in their order (no multinomial coefficient), γ at its fixed point. tolerance: Σ_k|Δγ_k| / Σ_k γ_k at which that is said to be
    reached; None for 3e-4 in single precision where steps see a sample of the documents, 1e-8 in double precision where they see all, so
    that no step lowers the bound.
    """

    num_topics: int
    alpha: Any = None
    concentration: Any = None
    learn_alpha: bool = False
    num_words: Any = None
    tolerance: float | None = None
    num_documents: int | None = None

    num_invariants = 8

    def __post_init__(self) -> None:
        for name, value in (("num_topics", self.num_topics), ("num_words", self.num_words)):
            if (value is None and name == "num_words") or (
                isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1
            ):
                continue
            raise ModelError(message(f"LDA.{name} cannot be used.", repr(value), "a whole number ≥ 1", "pass e.g. LDA(20)"))
        num = int(self.num_topics)
        alpha = np.full(num, 1.0 / num) if self.alpha is None else np.asarray(self.alpha, float)
        if alpha.shape not in ((), (num,)) or not np.all(alpha > 0):
            raise ModelError(
                message("This is no Dirichlet.", f"alpha={self.alpha}", f"a number > 0 or {num} of them", "pass e.g. alpha=0.1")
            )
        object.__setattr__(self, "alpha", tuple(np.broadcast_to(alpha, (num,)).tolist()))
        object.__setattr__(self, "concentration", 1.0 / num if self.concentration is None else float(self.concentration))
        check_concentration(self.concentration)

    def bind(self, x: Tree, y: Tree) -> LDA:
        no_inputs(self, x)
        largest = check_documents(y, self.num_words)
        num = self.num_words if self.num_words is not None else largest
        return dataclasses.replace(self, num_words=num, num_documents=_tree.rows(y))

    def observed(self, y: Any) -> Any:
        rows = y if isinstance(y, dict) else observations(y)
        if np.any(rows["count"] if isinstance(rows, dict) else rows):  # a document without words says nothing, and is no error here
            check_documents(rows, self.num_words)
        return rows

    def init(self, key: Key) -> Tree:
        """Topics near the uniform one: draws of a prior below 1 are each almost one word, where gradients vanish."""
        topics = 0.1 * jax.random.normal(key, (self.num_topics, self.num_words - 1))
        return {"topics": topics} | ({"alpha": jnp.log(jnp.asarray(self.alpha))} if self.learn_alpha else {})

    @property
    def families(self) -> dict[str, Family]:
        families: dict[str, Family] = {"topics": Topics(self.concentration)}
        return families | {"alpha": Proportions(self.alpha)} if self.learn_alpha else families

    def prior_counts(self) -> dict[str, Tree]:
        counts = {"topics": jnp.full((self.num_topics, self.num_words), self.concentration - 1.0)}
        return counts | {"alpha": Proportions(self.alpha).prior(self.num_topics)} if self.learn_alpha else counts

    def divergence(self, counts: dict[str, Tree]) -> Array:
        """As everywhere, but A(η₀) of the topics in closed form: all its entries are equal."""
        topics, flat, words = Topics(self.concentration), self.concentration, self.num_words
        prior = self.num_topics * (words * math.lgamma(flat) - math.lgamma(words * flat))
        gap = counts["topics"] + 1.0 - flat
        total = jnp.sum(gap * topics.expected(counts["topics"])) - topics.log_partition(counts["topics"]) + prior
        if not self.learn_alpha:
            return total
        return total + Proportions(self.alpha).divergence(counts["alpha"], self.prior_counts()["alpha"])

    def penalty(self, params: Tree) -> Array:
        if self.concentration < 1.0:
            raise ModelError(
                message(
                    "These topics have no most probable value: a Dirichlet below 1 is unbounded at its border.",
                    f"concentration={self.concentration:g}",
                    "concentration ≥ 1 (1 is maximum likelihood)",
                    "pass LDA(…, concentration=1.0), or use al.CAVI",
                )
            )
        return super().penalty(params)

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        weight = real_weights(batch)
        found = self._beliefs(natural, batch.y, self._effort(batch), weight)
        counts: dict[str, Tree] = {"topics": found.counts}
        if self.learn_alpha:
            counts["alpha"] = {"log": weight @ expected_log(found.gamma), "number": jnp.sum(weight)}
        return counts, found.terms

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        raise ModelError(
            message(
                "Topics of words cannot be drawn given the topics alone.",
                "al.Gibbs",
                "proportions beside them",
                "use al.latent.collapsed_gibbs(key, model, y), which sums proportions and topics out",
            )
        )

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """The bound on log p(w_d | topics), (n,). Its gradient is exact: at the fixed point the bound does not move with γ."""
        return self._beliefs(self.natural(params), batch.y, self._effort(batch)).terms

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """The bounds of some of the documents."""
        rows = np.linspace(0, _tree.rows(batch.y) - 1, self.num_invariants).astype(np.int32)
        return self._beliefs(self.natural(params), jax.tree.map(lambda leaf: leaf[rows], batch.y), LOOSE).terms

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """Topics near the uniform one, a little apart: documents then part them, and no word is lost to a topic by an early accident."""
        topics = 100.0 * jnp.exp(0.1 * jax.random.normal(key, (self.num_topics, self.num_words)))
        if not self.learn_alpha:
            return {"topics": topics}
        number = jnp.sum(real_weights(batch))
        return {"topics": topics, "alpha": jax.tree.map(lambda leaf: number * leaf, Proportions(self.alpha).prior(self.num_topics))}

    def begin(self, params: Tree, batch: Batch, scale: Any) -> dict[str, Tree]:
        """Counts of a q(θ) about these topics, worth V words each: in one batch most words do not occur, and would be given up at once."""
        counts = {"topics": self.num_words * jnp.exp(Topics(1.0).natural(params["topics"]))}
        if not self.learn_alpha:
            return counts
        number = jnp.sum(real_weights(batch))
        alpha = jnp.exp(params["alpha"])
        return counts | {"alpha": {"log": number * expected_log(alpha), "number": number}}

    # ---- beliefs about documents ----

    def _effort(self, batch: Batch) -> tuple[float, int]:
        """(tolerance, most iterations) of γ: tight where every step meets all documents, since there the bound is compared."""
        if self.tolerance is not None:
            return self.tolerance, TIGHT[1]
        return TIGHT if not batch.padded and _tree.rows(batch.y) == self.num_documents else LOOSE

    def _beliefs(self, natural: dict[str, Tree], y: Tree, effort: tuple[float, int], weight: Array | None = None) -> Found:
        """`beliefs` at t(θ) or its expectation: of α as given, or as learned."""
        if "alpha" in natural:
            prior = natural["alpha"]["log"], natural["alpha"]["number"]
        else:
            alpha = jnp.asarray(self.alpha)
            prior = alpha, gammaln(jnp.sum(alpha)) - jnp.sum(gammaln(alpha))
        return beliefs(natural["topics"], prior, *entries(y), effort, weight)

    # ---- questions, at one parameter tree ----

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        """topics: β (K, V). alpha: (K,)."""
        alpha = jnp.exp(params["alpha"]) if self.learn_alpha else jnp.asarray(self.alpha)
        return {"topics": jnp.exp(Topics(1.0).natural(params["topics"])), "alpha": alpha}

    @in_double
    def encode(self, params: Tree, y: Any) -> Array:
        """γ of q(θ_d) = Dirichlet(γ_d), (n, K): γ/Σγ are the mean proportions; Σγ says how sure."""
        return self._beliefs(self.natural(jax.tree.map(jnp.asarray, params)), self._given(y), TIGHT).gamma

    @in_double
    def log_prob(self, params: Tree, y: Any) -> Array:
        """A lower bound on log p(w_d | topics), (n,), nats."""
        return self._beliefs(self.natural(jax.tree.map(jnp.asarray, params)), self._given(y), TIGHT).terms

    @in_double
    def simulate(self, key: KeyLike, params: Tree, num_samples: int, length: int = 100) -> tuple[Array, Array]:
        """Ancestral: proportions θ (n, K), then n documents of `length` words each, as word numbers (n, length)."""
        key_share, key_topic, key_word = split(as_key(key), 3)
        named = self.constrain(params)
        theta = jax.random.dirichlet(key_share, named["alpha"], (num_samples,))
        topic = jax.random.categorical(key_topic, jnp.log(theta)[:, None, :], shape=(num_samples, length))
        keys = jax.random.split(key_word, num_samples)
        draw = lambda item: jax.random.categorical(item[0], jnp.log(named["topics"])[item[1]])
        return theta, jax.lax.map(draw, (keys, topic))

    def _given(self, y: Any) -> Tree:
        y = documents(y, num_words=self.num_words)
        check_documents(y, self.num_words)
        return jax.tree.map(jnp.asarray, y)
