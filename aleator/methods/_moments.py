"""Gaussian moments that expectation propagation matches: tilted ones of a site, and those of a rectified Gaussian.

A tilted distribution is t(f)·N(f; m, v)/Z. Everything about it that a Gaussian update needs is log Z and its derivatives in m:
a = ∂ log Z/∂m and b = −∂² log Z/∂m², for then its mean is m + v·a and its variance v − v²·b. All functions are elementwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr

from aleator._typing import Array

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_SPREADS = np.array([-9.0, -7.5, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7.5, 9])  # panels in units of √v around the mode
_BENDS = np.array([-32.0, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32])  # panels in units of the logistic function


class Tilted(NamedTuple):
    """log Z, a = ∂ log Z/∂m, b = −∂² log Z/∂m²."""

    log_z: Array
    slope: Array
    curvature: Array


def tilted_gaussian(mean: Array, variance: Array, y: Array, scale: Array) -> Tilted:
    """t(f) = N(y; f, σ²): Z = N(y; m, v + σ²)."""
    total = variance + scale**2
    return Tilted(normal_log_density(y - mean, total), (y - mean) / total, 1.0 / total)


def tilted_probit(mean: Array, variance: Array, sign: Array) -> Tilted:
    """t(f) = Φ(s·f), s = ±1: Z = Φ(z), z = s·m/√(1 + v); with r = φ(z)/Φ(z), a = s·r/√(1 + v) and b = r(z + r)/(1 + v)."""
    z = sign * mean / jnp.sqrt(1.0 + variance)
    log_z = log_ndtr(z, 10)  # terms of the series below −20: the usual 3 leave 1e-9, which r(z + r) would make 1e-6
    ratio = jnp.exp(-0.5 * z**2 - HALF_LOG_2PI - log_z)
    return Tilted(log_z, sign * ratio / jnp.sqrt(1.0 + variance), ratio * (z + ratio) / (1.0 + variance))


def tilted_logistic(mean: Array, variance: Array, sign: Array) -> Tilted:
    """t(f) = σ(s·f), s = ±1, by quadrature to about 1e-12: a = s·E[σ(−z)] and b = E[σ(z)σ(−z)] − Var[σ(−z)] over the tilted z = s·f.

    The integrand falls at least as fast as N(z*, v) away from its mode z*, so z* ± 9√v holds all of it. Gauss–Legendre with 8 nodes on
    panels that are short against √v and, near 0, against the bend of σ: no width of the Gaussian is too wide, as it is for Hermite nodes.
    """
    centre = sign * mean
    mode, spread = _logistic_mode(centre, variance), jnp.sqrt(variance)
    inner = mode[..., None] + spread[..., None] * _SPREADS
    bends = jnp.clip(jnp.asarray(_BENDS, inner.dtype), inner[..., :1], inner[..., -1:])
    edges = jnp.sort(jnp.concatenate([inner, bends], axis=-1), axis=-1)
    half = 0.5 * jnp.diff(edges, axis=-1)[..., None]
    flat = (*mode.shape, -1)
    nodes = (0.5 * (edges[..., 1:] + edges[..., :-1])[..., None] + half * _NODES).reshape(flat)
    log_gauss = lambda z: -0.5 * (z - centre[..., None]) ** 2 / variance[..., None]
    top = log_gauss(mode[..., None]) - jax.nn.softplus(-mode[..., None])
    # σ(z) = e^{min(z, 0)}/(1 + e^{−|z|}): two exponentials a node in all, and none overflows.
    small = jnp.exp(-jnp.abs(nodes))
    below = nodes < 0
    mass = (half * _WEIGHTS).reshape(flat) * jnp.exp(log_gauss(nodes) + jnp.minimum(nodes, 0.0) - top) / (1.0 + small)
    total = jnp.sum(mass, axis=-1)
    average = lambda values: jnp.sum(mass * values, axis=-1) / total
    fall = jnp.where(below, 1.0, small) / (1.0 + small)
    slope = average(fall)
    curvature = average(small / (1.0 + small) ** 2) - average((fall - slope[..., None]) ** 2)
    return Tilted(jnp.log(total) + top[..., 0] - HALF_LOG_2PI - 0.5 * jnp.log(variance), sign * slope, curvature)


def _logistic_mode(centre: Array, variance: Array) -> Array:
    """The root of z = m + v·σ(−z), in [m, m + v]; bisection, as √v is all the accuracy that panels ask for."""

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        below = middle < centre + variance * jax.nn.sigmoid(-middle)
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = jax.lax.fori_loop(0, 40, halve, (centre, centre + variance))
    return 0.5 * (low + high)


def normal_log_density(deviation: Array, variance: Array) -> Array:
    """log N(deviation; 0, variance)."""
    return -0.5 * deviation**2 / variance - 0.5 * jnp.log(variance) - HALF_LOG_2PI


def rectified(mean: Array, variance: Array) -> tuple[Array, Array]:
    """Mean and variance of max(0, u), u ~ N(m, v), v > 0.

    With α = m/√v, Φ = Φ(α), φ = φ(α), Q = Φ(−α): mean √v(αΦ + φ), variance v[Φ + α²ΦQ − αφ(Φ − Q) − φ²], written so that nothing
    cancels where the unit is surely on (α → ∞: m and v).
    """
    scale = jnp.sqrt(variance)
    alpha = mean / scale
    # One erfc for both tails, each to its last digit. `where` and not abs, whose slope at 0 is 0.
    tail = 0.5 * jax.lax.erfc(jnp.where(alpha > 0, alpha, -alpha) * math.sqrt(0.5))
    on, off = jnp.where(alpha > 0, 1.0 - tail, tail), jnp.where(alpha > 0, tail, 1.0 - tail)
    density = jnp.exp(-0.5 * alpha**2 - HALF_LOG_2PI)
    share = on + alpha**2 * on * off - alpha * density * (on - off) - density**2
    return scale * (alpha * on + density), variance * jnp.maximum(share, 0.0)


def gamma_update(shape: Array, rate: Array, log_z: Array, log_z1: Array, log_z2: Array) -> tuple[Array, Array]:
    """Shape and rate of the Gamma with the mean and the mean square that Gamma(α, β) has after a factor with Z(α, β) was taken in:

    α' = [Z·Z₂/Z₁²·(α + 1)/α − 1]⁻¹, β' = [Z₂/Z₁·(α + 1)/β − Z₁/Z·α/β]⁻¹, Z₁ = Z(α + 1, β), Z₂ = Z(α + 2, β).
    (E[λ] is matched exactly; the second moment instead of E[log λ], which has no closed form.)
    """
    excess = jnp.expm1(log_z + log_z2 - 2.0 * log_z1 + jnp.log1p(1.0 / shape))
    # β' = α'/E[λ] with E[λ] = (α/β)·Z₁/Z: the same number, without the difference of two near equals.
    return 1.0 / excess, rate / (shape * jnp.exp(log_z1 - log_z) * excess)
