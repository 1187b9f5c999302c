"""Linear regression on hidden units with the output weights integrated out: p(y | H), one column of H at a time.

y = Hβ + ε, ε ~ N(0, σ²), β ~ N(b₀, diag v), for each of k outputs on its own; H (N, p) is shared. With A = HᵀH/σ² + V⁻¹ = LLᵀ,
b = Hᵀy/σ² + V⁻¹b₀ and u = L⁻¹b:

    log p(y | H) = −½[N log 2πσ² + log|V| + log|A| + yᵀy/σ² + b₀ᵀV⁻¹b₀ − uᵀu],      β | y ~ N(L⁻ᵀu, A⁻¹).

This is Lemma 2.1 of deck 004 with the (2π)^{m/2} it drops: harmless at fixed m, a factor 2.507 per unit when m is random. Only L and u are
carried; a column is taken out by a positive rank-one update of L and put in by a bordered row, each O(p²) and never a downdate.

Shapes: gram (p, p), cross (p, k), square (k,); noise σ² (k,); mean b₀ and variance v (p, k) or broadcastable. Padded columns: `blank`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from aleator._typing import Array, Key


class Moments(NamedTuple):
    """All that the posterior of β needs of the data: gram HᵀWH (p, p), cross HᵀWy (p, k), square yᵀWy (k,), mass ΣW, W = diag(weight)."""

    gram: Array
    cross: Array
    square: Array
    mass: Array


class Conditional(NamedTuple):
    """β | H, y for each output: factor L (k, p, p), lower, with LLᵀ = A; half u (k, p) = L⁻¹b."""

    factor: Array
    half: Array


class Border(NamedTuple):
    """One more column at the end of L: its row w (k, p), pivot s (k,) = the Schur complement, and lift t (k,), so that the new row of L is
    (w, √s) and the new entry of u is t/√s."""

    row: Array
    pivot: Array
    lift: Array


def moments(design: Array, y: Array, weight: Array | None = None) -> Moments:
    """Of a design H (N, p) and targets (N, k); O(N p²)."""
    weighted = design if weight is None else design * weight[:, None]
    mass = jnp.asarray(len(y), design.dtype) if weight is None else jnp.sum(weight)
    square = jnp.sum(y**2 if weight is None else y**2 * weight[:, None], axis=0)
    return Moments(weighted.T @ design, weighted.T @ y, square, mass)


def blank(mask: Array, stats: Moments, mean: Array, variance: Array) -> tuple[Moments, Array, Array]:
    """Columns with mask (p,) False neither explain y nor cost anything: zero in the moments, b₀ = 0, v = 1, so that A has a unit row there
    and log|V|, log|A| and u get nothing from it. Their β is a standard normal draw: multiply it by the mask."""
    keep = mask[:, None]
    k = stats.cross.shape[1]
    stats = stats._replace(gram=jnp.where(keep & mask, stats.gram, 0.0), cross=jnp.where(keep, stats.cross, 0.0))
    full = lambda value: jnp.broadcast_to(value, (len(mask), k))
    return stats, jnp.where(keep, full(mean), 0.0), jnp.where(keep, full(variance), 1.0)


def condition(stats: Moments, noise: Array, mean: Array, variance: Array) -> Conditional:
    """The posterior of β from scratch, O(k p³)."""
    p, k = stats.cross.shape
    mean, variance = (jnp.broadcast_to(value, (p, k)) for value in (mean, variance))
    right = (stats.cross / noise + mean / variance).T
    precision = stats.gram / noise[:, None, None] + jax.vmap(jnp.diag)(1.0 / variance.T)
    factor = jnp.linalg.cholesky(precision, symmetrize_input=False)
    return Conditional(factor, solve(factor, right))


def log_marginal(stats: Moments, noise: Array, mean: Array, variance: Array) -> Array:
    """log p(y | H), summed over the k outputs: the lemma. A scalar, O(k p³)."""
    return log_marginal_at(condition(stats, noise, mean, variance), stats, noise, mean, variance)


def log_marginal_at(now: Conditional, stats: Moments, noise: Array, mean: Array, variance: Array) -> Array:
    """log p(y | H) from a factor at hand, O(k p)."""
    p, k = stats.cross.shape
    mean, variance = (jnp.broadcast_to(value, (p, k)) for value in (mean, variance))
    prior = jnp.sum(jnp.log(variance) + mean**2 / variance)
    data = jnp.sum(stats.mass * jnp.log(2.0 * math.pi * noise) + stats.square / noise)
    return -0.5 * (data + prior) - 0.5 * 2.0 * log_diagonal(now.factor) + 0.5 * jnp.sum(now.half**2)


def draw(key: Key, now: Conditional) -> Array:
    """β | H, y, (p, k): L⁻ᵀ(u + z), z ~ N(0, I)."""
    return draw_from(jax.random.normal(key, now.half.shape, now.half.dtype), now)


def draw_from(z: Array, now: Conditional) -> Array:
    """The same from given standard normals z (k, p); z = 0 gives the posterior mean."""
    return solve(now.factor, now.half + z, transposed=True).T


# ---- one column at a time -----------------------------------------------------------------------------------------------------------


def border(now: Conditional, along: Array, own: Array, cross: Array, noise: Array, mean: Array, variance: Array) -> Border:
    """What a new last column h would add: along = Hᵀh (p,), own = hᵀh, cross = hᵀy (k,); its b₀ and v (k,) or scalars. O(k p²).

    s = hᵀh/σ² + 1/v − wᵀw is at least 1/v (a Schur complement), and is kept there when h is nearly a mixture of the other columns.
    """
    row = solve(now.factor, along[None, :] / noise[:, None])
    pivot = jnp.maximum(own / noise + 1.0 / variance - jnp.sum(row**2, axis=1), 1.0 / variance)
    lift = cross / noise + mean / variance - jnp.sum(row * now.half, axis=1)
    return Border(row, pivot, lift)


def gain(new: Border, mean: Array, variance: Array) -> Array:
    """log p(y | H, h) − log p(y | H) = ½ Σ_outputs [t²/s − log s − log v − b₀²/v]: a scalar. With `blank`'s v = 1 and h = 0: zero."""
    return 0.5 * jnp.sum(new.lift**2 / new.pivot - jnp.log(new.pivot) - jnp.log(variance) - mean**2 / variance)


def append(now: Conditional, new: Border) -> Conditional:
    """The posterior with the new column last, (k, p + 1, p + 1)."""
    root = jnp.sqrt(new.pivot)
    row = jnp.concatenate([new.row, root[:, None]], axis=1)
    factor = jnp.concatenate([jnp.pad(now.factor, ((0, 0), (0, 0), (0, 1))), row[:, None, :]], axis=1)
    return Conditional(factor, jnp.concatenate([now.half, (new.lift / root)[:, None]], axis=1))


def remove(now: Conditional, at: int) -> Conditional:
    """The posterior without column `at` (a Python int), (k, p − 1, p − 1). O(k p²)."""
    head, tail = slice(None, at), slice(at + 1, None)
    inner, half = jax.vmap(_absorb)(now.factor[:, tail, tail], now.half[:, tail], now.factor[:, tail, at], now.half[:, at])
    above = jnp.pad(now.factor[:, head, head], ((0, 0), (0, 0), (0, inner.shape[1])))
    below = jnp.concatenate([now.factor[:, tail, head], inner], axis=2)
    return Conditional(jnp.concatenate([above, below], axis=1), jnp.concatenate([now.half[:, head], half], axis=1))


def empty(now: Conditional, at: Array) -> Conditional:
    """The posterior with column `at` (may be traced) made blank in its place, shapes unchanged, O(k p²). `gain` of the border of the same
    column against it is what that column was worth: the way to weigh the death of a padded unit, or its rebirth in the empty slot."""

    def one(factor: Array, half: Array) -> tuple[Array, Array]:
        p = len(half)
        own = jnp.arange(p) == at
        x, level = jnp.where(jnp.arange(p) > at, factor[:, at], 0.0), half[at]
        hollow = jnp.where(own[:, None] | own[None, :], jnp.eye(p, dtype=factor.dtype), factor)
        return _absorb(hollow, jnp.where(own, 0.0, half), x, level)

    return Conditional(*jax.vmap(one)(now.factor, now.half))


def _absorb(factor: Array, half: Array, x: Array, level: Array) -> tuple[Array, Array]:
    """L', u' with L'L'ᵀ = LLᵀ + xxᵀ and L'u' = Lu + x·level.

    LLᵀ + xxᵀ = L(I + ppᵀ)Lᵀ with p = L⁻¹x, and the factor K of I + ppᵀ is known: with tᵢ = 1 + Σ_{j≤i} pⱼ², K_ii = √(tᵢ/tᵢ₋₁) and
    K_ij = pᵢ·pⱼ/√(tⱼtⱼ₋₁) below. So L' = LK is one reversed cumulative sum of columns: no loop over them, and only positive sums in t
    (Gill, Golub, Murray and Saunders, Methods for modifying matrix factorizations, 1974).
    """
    p = solve(factor, x)
    t = jnp.cumsum(jnp.concatenate([jnp.ones(1, p.dtype), p**2]))
    before, t = t[:-1], t[1:]
    diagonal, below = jnp.sqrt(t / before), p / jnp.sqrt(t * before)
    after = _beyond(factor * p)
    # u' = K⁻¹(u + p·level) = Kᵀ(I + ppᵀ)⁻¹(u + p·level), where the parts of size |p|² have been cancelled by hand.
    r = half + p * ((level - jnp.dot(p, half)) / (1.0 + jnp.dot(p, p)))
    return jnp.tril(factor * diagonal + after * below), diagonal * r + below * _beyond(p * r)


def _beyond(values: Array) -> Array:
    """Σ_{i>j} values_i along the last axis: not the inclusive sum minus the entry itself, which would cancel."""
    total = jax.lax.cumsum(jnp.asarray(values), axis=values.ndim - 1, reverse=True)
    return jnp.concatenate([total[..., 1:], jnp.zeros_like(total[..., :1])], axis=-1)


def solve(factor: Array, right: Array, transposed: bool = False) -> Array:
    """L⁻¹ right or L⁻ᵀ right for factors (…, p, p) and vectors (…, p)."""
    return solve_triangular(factor, right[..., None], lower=True, trans=1 if transposed else 0)[..., 0]


def log_diagonal(factor: Array) -> Array:
    """Σ log L_ii over all factors: ½ log|A|, summed."""
    return jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)))
