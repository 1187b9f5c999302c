"""Factorisation of covariance matrices inside compiled steps: the ladder of `aleator.linalg.cholesky`, differentiable in both modes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from aleator import _tree
from aleator._typing import Array, Tree
from aleator.linalg.dense import MAX_JITTER

FIRST_JITTER = 1e-14  # relative to the mean diagonal, as in `aleator.linalg.cholesky`


@jax.custom_jvp
def factor(matrix: Array) -> tuple[Array, Array]:
    """Lower C with C Cᵀ = matrix + jitter·I, and the jitter: 0 where that will do, else from 1e-14 of the mean diagonal tenfold up to 1e-6 of
    it. NaN past that: the driver stops at numbers that are not finite and says so. One factorisation where nothing is wrong."""
    size = matrix.shape[-1]
    level = jnp.trace(matrix) / size

    def fails(state: tuple) -> Array:
        relative, lower = state
        return ~jnp.all(jnp.isfinite(lower)) & (relative < 0.5 * MAX_JITTER)

    def more(state: tuple) -> tuple:
        relative = jnp.maximum(10.0 * state[0], FIRST_JITTER)
        return relative, jnp.linalg.cholesky(matrix + relative * level * jnp.eye(size, dtype=matrix.dtype))

    relative, lower = jax.lax.while_loop(fails, more, (jnp.zeros((), matrix.dtype), jnp.linalg.cholesky(matrix)))
    return lower, relative * level


@factor.defjvp
def _factor_jvp(primals: tuple, tangents: tuple) -> tuple:
    """dC = C Φ(C⁻¹ dA C⁻ᵀ), Φ the lower half with half the diagonal. The jitter counts as a constant."""
    lower, jitter = factor(*primals)
    change = 0.5 * (tangents[0] + tangents[0].T)
    middle = solve_triangular(lower, solve_triangular(lower, change, lower=True).T, lower=True)
    half = jnp.tril(middle) - 0.5 * jnp.diag(jnp.diag(middle))
    return (lower, jitter), (lower @ half, jnp.zeros_like(jitter))


@jax.custom_jvp
def log_normal(matrix: Array, residual: Array) -> Array:
    """Σⱼ log N(residualⱼ; 0, matrix) over the columns of residual (n, k).

    The derivative is ½ tr[(Σⱼ αⱼαⱼᵀ − k·A⁻¹) dA] − Σⱼ αⱼᵀdrⱼ: one factorisation and one inverse, where differentiating the factor itself costs
    several more products.
    """
    return _density(factor(matrix)[0], residual)


@log_normal.defjvp
def _log_normal_jvp(primals: tuple, tangents: tuple) -> tuple:
    matrix, residual = primals
    lower, _ = factor(matrix)
    inverse = inverse_of(lower)
    weights = inverse @ residual
    slope = 0.5 * (weights @ weights.T - residual.shape[1] * inverse)
    return _density(lower, residual), jnp.vdot(slope, tangents[0]) - jnp.vdot(weights, tangents[1])


@jax.custom_jvp
def whiten(matrix: Array, right: Array) -> tuple[Array, Array]:
    """C⁻¹ right for C Cᵀ = matrix, (m, n), and the jitter. The derivative is C⁻¹ dR − Φ(C⁻¹ dA C⁻ᵀ) C⁻¹R: dC itself is not needed, nor what it costs to go through it. All by products
    with C⁻¹, which for hundreds of rows are two to three times as fast as solving with C."""
    lower, jitter = factor(matrix)
    return _inverse(lower) @ right, jitter


@whiten.defjvp
def _whiten_jvp(primals: tuple, tangents: tuple) -> tuple:
    lower, jitter = factor(primals[0])
    inverse = _inverse(lower)
    white = inverse @ primals[1]
    middle = inverse @ (0.5 * (tangents[0] + tangents[0].T)) @ inverse.T
    half = jnp.tril(middle) - 0.5 * jnp.diag(jnp.diag(middle))
    return (white, jitter), (inverse @ tangents[1] - half @ white, jnp.zeros_like(jitter))


SMALL = 256  # rows up to which a triangle is treated as a square


def inverse_of(lower: Array) -> Array:
    """(C Cᵀ)⁻¹, by halves: the zeros of triangles are not multiplied, 4n³/3 operations in the place of 3n³."""
    return _gram(_inverse(lower))


def _inverse(lower: Array) -> Array:
    """C⁻¹ of a lower triangle: [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹BA⁻¹, D⁻¹]]."""
    n = lower.shape[-1]
    if n <= SMALL:
        return solve_triangular(lower, jnp.eye(n, dtype=lower.dtype), lower=True)
    k = n // 2
    first, second = _inverse(lower[:k, :k]), _inverse(lower[k:, k:])
    return jnp.block([[first, jnp.zeros((k, n - k), lower.dtype)], [-second @ (lower[k:, :k] @ first), second]])


def _gram(half: Array) -> Array:
    """HᵀH of a lower triangle."""
    n = half.shape[-1]
    if n <= SMALL:
        return half.T @ half
    k = n // 2
    below = half[k:, :k]
    beside = half[k:, k:].T @ below
    return jnp.block([[_gram(half[:k, :k]) + below.T @ below, beside.T], [beside, _gram(half[k:, k:])]])


def _density(lower: Array, residual: Array) -> Array:
    z = solve_triangular(lower, residual, lower=True)
    n, k = residual.shape
    return -0.5 * jnp.sum(z**2) - k * jnp.sum(jnp.log(jnp.diag(lower))) - 0.5 * n * k * math.log(2 * math.pi)


def pivoted(kernel: Any, params: Tree, x: Tree, number: int) -> tuple[Array, Array]:
    """The first `number` rows R (number, n) of a pivoted Cholesky factorisation, RᵀR ≈ K(x, x), each where the variance that those before leave is largest,
    and which rows of x they are: O(n·number²), K itself is never formed. Rows are 0 where nothing is left."""
    x = _tree.as_float64(x)
    variance = kernel.diag(params, x)
    least = 1e-14 * jnp.max(variance)

    def body(i: Array, state: tuple) -> tuple:
        left, rows, chosen, taken = state
        best = jnp.argmax(left)
        enough = left[best] > least
        pivot = jnp.sqrt(jnp.where(enough, left[best], 1.0))
        row = (kernel(params, _tree.take(x, best[None]), x)[0] - rows[:, best] @ rows) / pivot
        row = jnp.where(
            enough, jnp.where(taken, 0.0, row).at[best].set(pivot), 0.0
        )  # rows chosen before have nothing left, whatever rounding says
        taken = taken.at[best].set(True)
        return jnp.where(taken, -1.0, jnp.maximum(left - row**2, 0.0)), rows.at[i].set(row), chosen.at[i].set(best.astype(jnp.int32)), taken

    size = len(variance)
    start = (variance, jnp.zeros((number, size)), jnp.zeros(number, jnp.int32), jnp.zeros(size, bool))
    _, rows, chosen, _ = jax.lax.fori_loop(0, number, body, start)
    return rows, chosen
