"""Latent Dirichlet allocation: documents are mixtures of topics, topics are distributions over words."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from aleator import _tree
from aleator._errors import DataError, ModelError, message
from aleator._random import as_key, seed_of, split
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family, real_weights
from aleator.latent._model import Conjugate, ConjugateLatent, in_double, no_inputs
from aleator.latent.weights import Dirichlet, check_concentration
from aleator.posterior import Draws

GROUP = 16  # documents of like length whose beliefs are found together: their rows of the topics fit into a cache
LEVELS = 5  # lengths to which groups are cut
LOOSE, TIGHT = (3e-4, 100), (1e-8, 1000)  # (tolerance, most iterations) of the beliefs about one document
TINY = 1e-100  # no word has probability zero: logarithms stay finite
FLOOR = -80.0  # of E[log θ] while iterating: its exponential must not be zero in single precision


@dataclasses.dataclass(frozen=True)
class Topics(Dirichlet):
    """K rows β_k ~ Dirichlet(concentration) over V words, as `Dirichlet`, with ψ and log Γ that vectorise: the tables are large."""

    def log_partition(self, counts: Array) -> Array:
        alpha = counts + 1.0
        return jnp.sum(jnp.sum(_gammaln(alpha), axis=-1) - _gammaln(jnp.sum(alpha, axis=-1)))

    def expected(self, counts: Array) -> Array:
        alpha = counts + 1.0
        return _digamma(alpha) - _digamma(jnp.sum(alpha, axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Proportions(Family):
    """One Dirichlet's parameters α (K,), known only as a point: t(α) = (α, log Γ(Σα) − Σ log Γ(α)), counts "log" Σ_d log θ_d and "number".

    exp⟨η, t(α)⟩ is the Dirichlet's conjugate prior. It has no closed integral, so that densities here are up to a constant; its mode is
    found by Newton's method (Minka, 2000), whose Hessian is diagonal plus rank one.
    """

    alpha: tuple[float, ...]
    strength: float = 1.0  # pseudo-documents of the prior, as drawn from `alpha` on average

    def prior(self, num: int) -> Tree:
        alpha = jnp.asarray(self.alpha)
        return {"log": self.strength * (_digamma(alpha) - _digamma(jnp.sum(alpha))), "number": jnp.asarray(float(self.strength))}

    def log_partition(self, counts: Tree) -> Array:
        return jnp.zeros(())

    def natural(self, params: Array) -> Tree:
        alpha = jnp.exp(params)
        return {"log": alpha, "number": _gammaln(jnp.sum(alpha)) - jnp.sum(_gammaln(alpha))}

    def log_jacobian(self, params: Array) -> Array:
        return jnp.sum(params)

    def expected(self, counts: Tree) -> Tree:
        return self.natural(self.mode(counts))

    def divergence(self, counts: Tree, other: Tree) -> Array:
        """−log p(α) up to a constant, at the mode: what a point costs."""
        natural = self.expected(counts)
        return -(jnp.sum(other["log"] * natural["log"]) + other["number"] * natural["number"])

    def mode(self, counts: Tree) -> Array:
        mean_log = counts["log"] / counts["number"]
        trigamma = jax.vmap(jax.grad(_digamma))

        def one(_: int, logs: Array) -> Array:
            # Newton in α, taken in log α so that it stays positive: α_new = α exp(step/α), steps bounded.
            alpha = jnp.exp(logs)
            total = jnp.sum(alpha)
            slope = _digamma(total) - _digamma(alpha) + mean_log
            curve, shared = -trigamma(alpha), jax.grad(_digamma)(total)
            offset = jnp.sum(slope / curve) / (1.0 / shared + jnp.sum(1.0 / curve))
            return logs + jnp.clip(-(slope - offset) / curve / alpha, -1.0, 1.0)

        return jax.lax.fori_loop(0, 50, one, jnp.log(jnp.asarray(self.alpha)))

    def draw(self, key: Key, counts: Tree) -> Array:
        return self.mode(counts)


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
            counts["alpha"] = {"log": weight @ _mean_log(found.gamma), "number": jnp.sum(weight)}
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
        return counts | {"alpha": {"log": number * (_digamma(alpha) - _digamma(jnp.sum(alpha))), "number": number}}

    # ---- beliefs about documents ----

    def _effort(self, batch: Batch) -> tuple[float, int]:
        """(tolerance, most iterations) of γ: tight where every step meets all documents, since there the bound is compared."""
        if self.tolerance is not None:
            return self.tolerance, TIGHT[1]
        return TIGHT if not batch.padded and _tree.rows(batch.y) == self.num_documents else LOOSE

    def _beliefs(self, natural: dict[str, Tree], y: Tree, effort: tuple[float, int], weight: Array | None = None) -> Found:
        """γ, bounds and, with `weight`, Σ_d weight_d n_dw φ_dwk: documents of like length together."""
        known = natural.get("alpha")
        given = {"log": jnp.asarray(self.alpha)} if known is None else known
        level = _gammaln(jnp.sum(given["log"])) - jnp.sum(_gammaln(given["log"])) if known is None else known["number"]
        prior = given["log"], level
        word, count = _entries(y)
        top = jax.lax.stop_gradient(jnp.max(natural["topics"], axis=0))  # words that are rare in every topic must not underflow
        rows = jnp.exp(natural["topics"] - top).T  # (V, K)
        if word is None:
            gamma = _fixed_point(rows, count, prior[0], effort)
            terms, shares, ratio = _bound(rows, count, gamma, prior)
            terms = terms + count @ top
            counts = jnp.zeros(()) if weight is None else (rows * ((ratio * weight[:, None]).T @ shares)).T
            return Found(gamma, terms, counts)
        n, length = word.shape
        scale = jnp.zeros(n) if weight is None else weight
        pad = -n % GROUP
        order = jnp.argsort(jnp.sum(count > 0, axis=-1)) if length > 8 * LEVELS else jnp.arange(n)
        last = jnp.max(jnp.where(count > 0, jnp.arange(1, length + 1), 0), axis=-1)
        cut = lambda leaf: jnp.pad(leaf[order], ((0, pad), *((0, 0),) * (leaf.ndim - 1))).reshape(-1, GROUP, *leaf.shape[1:])
        lengths = sorted({-(-length * i // (8 * LEVELS)) * 8 for i in range(1, LEVELS)} | {length}) if length > 8 * LEVELS else [length]

        def group(table: Any, item: Any) -> tuple[Any, tuple[Array, Array]]:
            word, count, scale, last = item

            def of(length: int) -> Any:
                def found(table: Any) -> tuple[Any, Array, Array]:
                    local, number = rows[word[:, :length]], count[:, :length]
                    gamma = _fixed_point(local, number, prior[0], effort)
                    terms, shares, ratio = _bound(local, number, gamma, prior)
                    if weight is not None:
                        add = (ratio * scale[:, None])[..., None] * shares[:, None, :]
                        table = table.at[word[:, :length]].add(add)
                    return table, gamma, terms

                return found

            chosen = jnp.searchsorted(jnp.asarray(lengths), jnp.max(last))
            table, gamma, terms = jax.lax.switch(chosen, [of(size) for size in lengths], table) if len(lengths) > 1 else of(length)(table)
            return table, (gamma, terms)

        table = jnp.zeros(rows.shape if weight is not None else ())
        table, (gamma, terms) = jax.lax.scan(group, table, tuple(cut(leaf) for leaf in (word, count, scale, last)))
        back = jnp.argsort(order)
        gamma, terms = gamma.reshape(-1, self.num_topics)[:n][back], terms.reshape(-1)[:n][back]
        return Found(gamma, terms + jnp.sum(count * top[word], axis=-1), (rows * table).T if weight is not None else table)

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


class Found(NamedTuple):
    """Beliefs about documents. gamma (n, K), terms (n,): bounds, counts (K, V): of the topics, () where not wanted."""

    gamma: Array
    terms: Array
    counts: Array


def _fixed_point(local: Array, count: Array, alpha: Array, effort: tuple[float, int]) -> Array:
    """γ = α + Σ_w n_w φ_w, iterated from α + n/K; local: exp E[log β], relative to the largest of each word, of each row's words
    (n, L, K), or of all words (V, K)."""
    tolerance, most = effort
    dtype = local.dtype if tolerance < 1e-5 else jnp.float32  # rounding stays below what is asked for
    local, count, alpha = (jax.lax.stop_gradient(leaf).astype(dtype) for leaf in (local, count, alpha))
    total = jnp.sum(count, axis=-1, keepdims=True)

    def step(carry: Any) -> Any:
        gamma, number, _ = carry
        shares = jnp.exp(jnp.maximum(_mean_log(gamma), FLOOR))
        new = alpha + shares * _spread(count / _mix(shares, local), local)
        gap = jnp.max(jnp.sum(jnp.abs(new - gamma), axis=-1) / jnp.sum(new, axis=-1))
        return new, number + 1, gap

    going = lambda carry: (carry[1] < most) & (carry[2] > tolerance)
    start = jnp.broadcast_to(alpha + total / alpha.shape[0], (count.shape[0], alpha.shape[0]))
    gamma, _, _ = jax.lax.while_loop(going, step, (start, jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, dtype)))
    return gamma.astype(jnp.result_type(float))


def _bound(local: Array, count: Array, gamma: Array, prior: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """(bound (n,), exp E[log θ] (n, K), n_w / Σ_k of the word's terms (n, L)), q(z) at its optimum given γ."""
    alpha, level = prior
    mean_log = _mean_log(gamma)
    shares = jnp.exp(mean_log)
    mixed = _mix(shares, local) + TINY
    own = jnp.sum(_gammaln(gamma), axis=-1) - _gammaln(jnp.sum(gamma, axis=-1))
    divergence = jnp.sum((gamma - alpha) * mean_log, axis=-1) - own - level
    return jnp.sum(count * jnp.log(mixed), axis=-1) - divergence, shares, count / mixed


def _mix(shares: Array, local: Array) -> Array:
    """Σ_k shares_nk local_nlk, (n, L)."""
    return shares @ local.T if local.ndim == 2 else jnp.einsum("nk,nlk->nl", shares, local)


def _spread(ratio: Array, local: Array) -> Array:
    """Σ_l ratio_nl local_nlk, (n, K)."""
    return ratio @ local if local.ndim == 2 else jnp.einsum("nl,nlk->nk", ratio, local)


def _mean_log(gamma: Array) -> Array:
    """E[log θ] under Dirichlet(γ)."""
    return _digamma(gamma) - _digamma(jnp.sum(gamma, axis=-1, keepdims=True))


def _shifted(x: Array) -> tuple[Array, Array, Array]:
    """(x(x+1)…(x+7), its logarithmic derivative Σ 1/(x+i), x + 8): below, only an asymptotic series at x + 8 is left."""
    product, derivative = jnp.ones_like(x), jnp.zeros_like(x)
    for i in range(8):
        derivative, product = derivative * (x + i) + product, product * (x + i)
    return product, derivative / product, x + 8.0


def _digamma(x: Array) -> Array:
    """ψ(x) for 0 < x, to 1e-14 of its size in double precision; branch-free, an order of magnitude faster than the general one."""
    _, below, y = _shifted(x)
    r = 1.0 / (y * y)
    series = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * 691 / 32760)))))
    return jnp.log(y) - 0.5 / y - series - below


def _gammaln(x: Array) -> Array:
    """log Γ(x) for 0 < x by Stirling's series at x + 8."""
    product, _, y = _shifted(x)
    r = 1.0 / (y * y)
    series = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r * (1 / 1188 - r * 691 / 360360))))) / y
    return (y - 0.5) * jnp.log(y) - y + 0.5 * math.log(2.0 * math.pi) + series - jnp.log(product)


# ---- documents ----


def documents(source: Any, num_words: int | None = None, length: int | None = None) -> dict[str, np.ndarray]:
    """Documents as rows: {"word": (N, L) int32, "count": (N, L) float32}, each row's different words and how often, padded with count 0.

    source: a SciPy sparse matrix or an array of counts (N, V), or a list of documents, each a list of word numbers; or rows made before.
    num_words: V, to check word numbers against. length: L, at least the most different words of one document (None: that); batches of a
    stream must agree on it.

    >>> rows = documents([[2, 0, 2], []])
    >>> rows["word"].tolist(), rows["count"].tolist()
    ([[0, 2], [0, 0]], [[1.0, 2.0], [0.0, 0.0]])
    """
    if isinstance(source, dict):
        return source
    if hasattr(source, "tocsr"):
        table = source.tocsr().copy()
        table.sum_duplicates()
        table.eliminate_zeros()
        bounds, words, counts = table.indptr, table.indices, np.asarray(table.data, np.float64)
        _check_counts(counts)
        width = table.shape[1]
    elif isinstance(source, (np.ndarray, jax.Array)):
        dense = np.asarray(source)
        if dense.ndim != 2 or dense.dtype.kind not in "fiub":
            got = f"shape {dense.shape}, dtype {dense.dtype}"
            raise DataError(
                message("These are not documents.", got, "counts of shape (N, V)", "pass one row a document, one column a word")
            )
        _check_counts(dense)
        row, words = np.nonzero(dense)
        counts, bounds, width = dense[row, words], np.searchsorted(row, np.arange(len(dense) + 1)), dense.shape[1]
    else:
        parts = [_unique(document, number) for number, document in enumerate(source)]
        bounds = np.cumsum([0] + [len(words) for words, _ in parts])
        words = np.concatenate([words for words, _ in parts]) if parts else np.zeros(0, np.int32)
        counts = np.concatenate([numbers for _, numbers in parts]) if parts else np.zeros(0)
        width = int(words.max()) + 1 if words.size else 0
    if len(bounds) < 2:
        raise DataError(message("There are no documents.", "nothing", "at least one", "check how the corpus was read"))
    if num_words is not None and (width > num_words if not words.size else words.max() >= num_words):
        raise DataError(
            message(
                "A word is not in the vocabulary.",
                f"number {int(words.max())}",
                f"0 … {num_words - 1}",
                "raise num_words, or drop the word",
            )
        )
    lengths = np.diff(bounds)
    longest = max(int(lengths.max()), 1)
    if length is not None and longest > length:
        raise DataError(message("A document is too long.", f"{longest} different words", f"at most length={length}", "raise length"))
    shape = (len(lengths), longest if length is None else length)
    place = np.arange(shape[1]) < lengths[:, None]
    word, count = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    word[place], count[place] = words, counts
    return {"word": word, "count": count}


def _unique(document: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    words = np.asarray(document)
    if words.size and (words.ndim != 1 or words.dtype.kind not in "iu" or words.min() < 0):
        raise DataError(
            message(f"Document {number} is not a list of word numbers.", repr(document)[:60], "whole numbers ≥ 0", "number the words first")
        )
    return np.unique(words.astype(np.int64), return_counts=True)


def _check_counts(counts: np.ndarray) -> None:
    bad = ~(np.isfinite(counts) & (counts >= 0) & (counts == np.floor(counts)))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            message(
                "Words are counted in whole numbers.",
                f"{float(counts[where]):g} at index {where}",
                "whole numbers ≥ 0",
                "pass counts, not shares",
            )
        )


def check_documents(y: Any, num_words: int | None) -> int:
    """Refuse what is not rows of documents; the largest word number + 1 otherwise."""
    dense = not isinstance(y, dict)
    if (dense and np.ndim(y) != 2) or (not dense and (set(y) != {"word", "count"} or np.shape(y["word"]) != np.shape(y["count"]))):
        got = "no y" if y is None else f"shape {np.shape(y)}" if dense else str({name: np.shape(leaf) for name, leaf in y.items()})
        raise DataError(
            message(
                "These are not documents.",
                got,
                '{"word": (N, L), "count": (N, L)} or counts (N, V)',
                "make them with al.latent.documents(…)",
            )
        )
    counts = np.asarray(y if dense else y["count"])
    _check_counts(counts)
    if not counts.any():
        raise DataError(
            message("No document has a word.", f"{len(counts)} empty documents", "at least one word", "check how the corpus was read")
        )
    if dense:
        size = counts.shape[1]
    else:
        word = np.asarray(y["word"])
        if word.dtype.kind not in "iu" or word.min() < 0:
            got = f"dtype {word.dtype}, smallest {word.min()}"
            raise DataError(message("Words are numbered.", got, "whole numbers ≥ 0", "make them with al.latent.documents(…)"))
        size = int(word[counts > 0].max()) + 1
    if num_words is not None and size > num_words:
        raise DataError(
            message("A word is not in the vocabulary.", f"number {size - 1}", f"0 … {num_words - 1}", "raise num_words, or drop the word")
        )
    return size


def _entries(y: Tree) -> tuple[Array | None, Array]:
    """(word numbers, counts) of rows; (None, counts of all words) of a matrix."""
    if isinstance(y, dict):
        return y["word"], y["count"].astype(jnp.result_type(float))
    return None, jnp.asarray(y).astype(jnp.result_type(float))


# ---- collapsed Gibbs ----


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


# ---- judging topics ----


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
