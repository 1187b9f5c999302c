"""q(θ_d) of each document given the topics: Blei, Ng and Jordan's fixed point and bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aleator._typing import Array
from aleator.latent.lda._special import expected_log, gammaln

GROUP = 16  # documents of like length whose beliefs are found together: their rows of the topics fit into a cache
LEVELS = 5  # lengths to which groups are cut
LOOSE, TIGHT = (3e-4, 100), (1e-8, 1000)  # (tolerance, most iterations) of the beliefs about one document
TINY = 1e-100  # no word has probability zero: logarithms stay finite
FLOOR = -80.0  # of E[log θ] while iterating: its exponential must not be zero in single precision


class Found(NamedTuple):
    """Beliefs about documents. gamma (n, K), terms (n,): bounds, counts (K, V): of the topics, () where not wanted."""

    gamma: Array
    terms: Array
    counts: Array


def beliefs(
    topics: Array, prior: tuple[Array, Array], word: Array | None, count: Array, effort: tuple[float, int], weight: Array | None = None
) -> Found:
    """γ and bounds of all documents and, with `weight`, Σ_d weight_d n_dw φ_dwk.

    topics: E[log β], (K, V). prior: α and log Γ(Σα) − Σ log Γ(α). word, count (n, L): as in `documents`; word None: counts of
    all words (n, V). effort: (tolerance, most iterations) of γ.
    """
    top = jax.lax.stop_gradient(jnp.max(topics, axis=0))  # words that are rare in every topic must not underflow
    rows = jnp.exp(topics - top).T  # (V, K)
    if word is None:
        gamma = _fixed_point(rows, count, prior[0], effort)
        terms, shares, ratio = _bound(rows, count, gamma, prior)
        counts = jnp.zeros(()) if weight is None else (rows * ((ratio * weight[:, None]).T @ shares)).T
        return Found(gamma, terms + count @ top, counts)
    gamma, terms, table = _in_groups(rows, prior, word, count, effort, weight)
    return Found(gamma, terms + jnp.sum(count * top[word], axis=-1), table if weight is None else (rows * table).T)


def _in_groups(
    rows: Array, prior: tuple[Array, Array], word: Array, count: Array, effort: tuple[float, int], weight: Array | None
) -> tuple[Array, Array, Array]:
    """(γ, bounds, Σ_d weight_d n_dw φ_dwk / rows), documents of like length together: each group is cut to the shortest length that holds it."""
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
    return gamma.reshape(-1, gamma.shape[-1])[:n][back], terms.reshape(-1)[:n][back], table


def _fixed_point(local: Array, count: Array, alpha: Array, effort: tuple[float, int]) -> Array:
    """γ = α + Σ_w n_w φ_w, iterated from α + n/K; local: exp E[log β], relative to the largest of each word, of each row's words
    (n, L, K), or of all words (V, K)."""
    tolerance, most = effort
    dtype = local.dtype if tolerance < 1e-5 else jnp.float32  # rounding stays below what is asked for
    local, count, alpha = (jax.lax.stop_gradient(leaf).astype(dtype) for leaf in (local, count, alpha))
    total = jnp.sum(count, axis=-1, keepdims=True)

    def step(carry: Any) -> Any:
        gamma, number, _ = carry
        shares = jnp.exp(jnp.maximum(expected_log(gamma), FLOOR))
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
    logs = expected_log(gamma)
    shares = jnp.exp(logs)
    mixed = _mix(shares, local) + TINY
    own = jnp.sum(gammaln(gamma), axis=-1) - gammaln(jnp.sum(gamma, axis=-1))
    divergence = jnp.sum((gamma - alpha) * logs, axis=-1) - own - level
    return jnp.sum(count * jnp.log(mixed), axis=-1) - divergence, shares, count / mixed


def _mix(shares: Array, local: Array) -> Array:
    """Σ_k shares_nk local_nlk, (n, L)."""
    return shares @ local.T if local.ndim == 2 else jnp.einsum("nk,nlk->nl", shares, local)


def _spread(ratio: Array, local: Array) -> Array:
    """Σ_l ratio_nl local_nlk, (n, K)."""
    return ratio @ local if local.ndim == 2 else jnp.einsum("nl,nlk->nk", ratio, local)
