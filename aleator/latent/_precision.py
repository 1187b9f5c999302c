"""Precision matrices Λ = LLᵀ: their unconstrained parameters, their inverses, draws of them from a Wishart."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator._typing import Array, Key, Tree


def factor_of(params: Tree) -> Array:
    """L, lower, from the logs of its diagonal and what is below it, row by row."""
    d = params["log_diagonal"].shape[-1]
    rows, columns = np.tril_indices(d, -1)
    diagonal = jnp.exp(params["log_diagonal"])[..., None] * jnp.eye(d)
    return diagonal.at[..., rows.astype(np.int32), columns.astype(np.int32)].set(params["lower"])


def parameters_of(precision: Array) -> Tree:
    """The unconstrained parameters of Λ: the inverse of `factor_of`, squared."""
    factor = jnp.linalg.cholesky(symmetric(precision))
    rows, columns = np.tril_indices(factor.shape[-1], -1)
    diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
    return {"log_diagonal": jnp.log(diagonal), "lower": factor[..., rows.astype(np.int32), columns.astype(np.int32)]}


def log_jacobian(params: Tree) -> Array:
    """log |dΛ / d params|, summed over members: |dΛ/dL| = 2ᵈ Π L_ii^{d−i+1}, and L_ii = exp(log_diagonal)."""
    d = params["log_diagonal"].shape[-1]
    return jnp.sum(params["log_diagonal"] * (d + 1.0 - np.arange(d))) + params["log_diagonal"].size * math.log(2.0)


def inverse_of(factor: Array) -> Array:
    """(LLᵀ)⁻¹."""
    half = solve_triangular(factor, jnp.broadcast_to(jnp.eye(factor.shape[-1]), factor.shape), lower=True)
    return jnp.swapaxes(half, -1, -2) @ half


def symmetric(matrix: Array) -> Array:
    """What rounding has left unsymmetric, made symmetric."""
    return 0.5 * (matrix + jnp.swapaxes(matrix, -1, -2))


def draw_wishart(key_diagonal: Key, key_lower: Key, nu: Array, scatter: Array) -> Array:
    """Λ ~ Wishart(ν, scatter⁻¹). Bartlett: Λ = R⁻ᵀ A Aᵀ R⁻¹ with scatter = R Rᵀ, A lower, A_ii² ~ χ²(ν − i), A_ij ~ N(0, 1)."""
    d = scatter.shape[-1]
    chi2 = 2.0 * jax.random.gamma(key_diagonal, 0.5 * (nu[..., None] - jnp.arange(d)))
    bartlett = jnp.tril(jax.random.normal(key_lower, scatter.shape), -1) + jnp.sqrt(chi2)[..., None] * jnp.eye(d)
    upper = jnp.linalg.cholesky(jnp.linalg.inv(scatter)) @ bartlett
    return upper @ jnp.swapaxes(upper, -1, -2)
