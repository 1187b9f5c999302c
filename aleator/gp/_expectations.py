"""What an infinitely wide layer does to a covariance: E[φ(u)φ(v)] and E[φ′(u)φ′(v)] for (u, v) jointly Gaussian around 0.

In closed form where there is one. tanh and the logistic function are mixtures of error functions of many widths, each with its arcsine: exact to 10⁻⁹ however steep. Any other
activation is a series in the correlation ρ of u and v (Mehler),

    E[φ(u)φ(v)] = Σₙ cₙ(q) cₙ(q′) ρⁿ,   cₙ(q) = E[φ(√q z) Hₙ(z)],   z ~ N(0, 1), Hₙ the Hermite polynomials of norm 1,

with coefficients by quadrature in one dimension. Both ways treat u and v alike, and give kernels that are positive whatever is left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Array
from aleator.networks._network import activation as activation_of

LEAKS = {"relu": 0.0, "leaky_relu": 0.01}  # slopes below 0
SIGMOIDS = ("tanh", "logistic")
TERMS, UNROLLED = 128, 16  # of the series, the last with what is left of E[φ²]; and of them in one go
NODES, REACH = 512, 12.0  # equally spaced nodes of a coefficient, and how many standard deviations they span
ROWS = 1024  # whose coefficients are computed together
WIDTHS, LOWEST, HIGHEST = 14, -1.5, 1.1  # of the error functions that make up a tanh: how many, and their logarithms


def pair(activation: str, first: Array, second: Array, cross: Array, slopes: bool = True) -> tuple[Array, Any]:
    """E[φ(u)φ(v)] and E[φ′(u)φ′(v)] for (u, v) ~ N(0, [[first, cross], [cross, second]]), elementwise over arrays that broadcast to `cross`."""
    if activation == "identity":
        return cross, jnp.ones_like(cross)
    if activation == "erf":
        return _arcsine(1.0, 1.0, first, second, cross)
    if activation == "sin":
        plus, minus = (0.5 * jnp.exp(sign * cross - 0.5 * (first + second)) for sign in (1.0, -1.0))
        return plus - minus, plus + minus
    if activation == "tanh":
        return _error_functions(first, second, cross)
    if activation == "logistic":  # ½ + ½ tanh(u/2)
        value, slope = _error_functions(0.25 * first, 0.25 * second, 0.25 * cross)
        return 0.25 + 0.25 * value, slope / 16.0
    size = jnp.sqrt(first * second)
    cosine = jnp.clip(cross / jnp.where(size > 0, size, 1.0), -1.0, 1.0)
    if activation in LEAKS:  # φ(u) = leak·u + (1 − leak)·relu(u)
        leak = LEAKS[activation]
        mixed, rest = leak**2 + leak * (1 - leak), (1 - leak) ** 2
        return mixed * cross + rest * size * arc_cosine(cosine), mixed + rest * half_angle(cosine)
    phi = activation_of(activation)
    series = lambda f: _series(coefficients(f, first), coefficients(f, second), cosine)
    return series(phi), series(_slope(phi)) if slopes else jnp.zeros(())


def alone(activation: str, variance: Array) -> tuple[Array, Array]:
    """E[φ(u)²] and E[φ′(u)²] for u ~ N(0, variance)."""
    if activation in LEAKS:
        half = 0.5 * (1 + LEAKS[activation] ** 2)
        return half * variance, jnp.full_like(variance, half)
    if activation in ("identity", "erf", "sin", *SIGMOIDS):
        return pair(activation, variance, variance, variance)
    phi = activation_of(activation)
    return tuple(jnp.sum(coefficients(f, variance) ** 2, axis=0) for f in (phi, _slope(phi)))  # type: ignore[return-value]


# ---- closed forms --------------------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def arc_cosine(cosine: Array) -> Array:
    """E[relu(u)relu(v)] of unit normals with correlation cos θ: (sin θ + (π − θ)cos θ)/2π; ½ at 0°, .304499 at 60°, .159155 at 90° (Cho and Saul 2009)."""
    return (jnp.sqrt((1.0 - cosine) * (1.0 + cosine)) + (math.pi - jnp.arccos(cosine)) * cosine) / (2.0 * math.pi)


@arc_cosine.defjvp
def _arc_cosine_jvp(primals: tuple, tangents: tuple) -> tuple:
    return arc_cosine(*primals), half_angle(*primals) * tangents[0]


@jax.custom_jvp
def half_angle(cosine: Array) -> Array:
    """P(u > 0, v > 0) = (π − θ)/2π. Its derivative is infinite at θ = 0, where nothing moves θ: it counts as 0 there."""
    return (math.pi - jnp.arccos(cosine)) / (2.0 * math.pi)


@half_angle.defjvp
def _half_angle_jvp(primals: tuple, tangents: tuple) -> tuple:
    sine = jnp.sqrt((1.0 - primals[0]) * (1.0 + primals[0]))
    return half_angle(*primals), jnp.where(sine > 1e-7, tangents[0] / (2.0 * math.pi * jnp.maximum(sine, 1e-7)), 0.0)


def _arcsine(a: Any, b: Any, first: Array, second: Array, cross: Array) -> tuple[Array, Array]:
    """The pair of erf(a·u) and erf(b·v)."""
    left, right, both = 1.0 + 2.0 * a**2 * first, 1.0 + 2.0 * b**2 * second, 2.0 * a * b * cross
    inside = jnp.maximum(left * right - both**2, 1e-300)
    return 2.0 / math.pi * jnp.arcsin(jnp.clip(both / jnp.sqrt(left * right), -1.0, 1.0)), 4.0 / math.pi * a * b / jnp.sqrt(inside)


# ---- tanh as a mixture ---------------------------------------------------------------------------------------------------------------


def _error_functions(first: Array, second: Array, cross: Array) -> tuple[Array, Array]:
    """The pair of tanh, one pair of widths at a time: memory for a few matrices."""
    inverse, weights = _widths()
    index = np.argwhere(np.multiply.outer(weights, weights) > 1e-12)
    listed = (inverse[index[:, 0]], inverse[index[:, 1]], weights[index[:, 0]] * weights[index[:, 1]])

    @jax.checkpoint
    def body(sums: tuple, node: tuple) -> tuple:
        a, b, weight = node
        value, slope = _arcsine(a, b, first, second, cross)
        return (sums[0] + weight * value, sums[1] + weight * slope), None

    zero = jnp.zeros(jnp.broadcast_shapes(first.shape, second.shape, cross.shape), cross.dtype)
    return jax.lax.scan(body, (zero, zero), tuple(jnp.asarray(part, cross.dtype) for part in listed))[0]


@functools.cache
def _widths() -> tuple[np.ndarray, np.ndarray]:
    """tanh(x) = E[erf(x/(√2 K))], K of Kolmogorov's distribution (a logistic variable is 2K times a normal one): 1/(√2 K) and weights at equally spaced log K. The sum differs
    from tanh by at most 2·10⁻⁹."""
    k, j = np.exp(np.linspace(LOWEST, HIGHEST, WIDTHS)), np.arange(1, 30)[:, None]
    above = np.sum(8 * k * (-1.0) ** (j - 1) * j**2 * np.exp(-2 * j**2 * k**2), axis=0)
    rate = (2 * j - 1) ** 2 * np.pi**2 / 8  # the same density, by a series that converges for small k
    below = np.sum(np.sqrt(2 * np.pi) * np.exp(-rate / k**2) * (2 * rate / k**4 - 1 / k**2), axis=0)
    weights = k * np.where(k > 0.6, above, below)
    return 1.0 / (np.sqrt(2) * k), weights / weights.sum()


# ---- a series for any activation -----------------------------------------------------------------------------------------------------


def coefficients(phi: Callable, variance: Array) -> Array:
    """c₀ … of φ(√variance·z), (TERMS, …); the last has the square that all those after it leave of E[φ²], so that ρ = 1 is exact."""
    nodes, weights, basis = (jnp.asarray(part, variance.dtype) for part in _hermite())

    @jax.checkpoint
    def rows(variance: Array) -> Array:
        values = phi(jnp.sqrt(jnp.maximum(variance, 1e-30))[:, None] * nodes)
        found = values @ basis
        left = values**2 @ weights - jnp.sum(found**2, axis=1)
        return jnp.concatenate([found, jnp.sqrt(jnp.maximum(left, 1e-20))[:, None]], axis=1)

    flat = variance.ravel()
    number = -(-len(flat) // ROWS)
    blocks = jnp.pad(flat, (0, number * ROWS - len(flat)), constant_values=1.0).reshape(number, ROWS) if number > 1 else flat[None]
    return jax.lax.map(rows, blocks).reshape(-1, TERMS)[: len(flat)].T.reshape(TERMS, *variance.shape)


def _series(left: Array, right: Array, cosine: Array) -> Array:
    """Σₙ leftₙ rightₙ ρⁿ by Horner's rule, some terms at a time, so that a derivative keeps few matrices."""

    @jax.checkpoint
    def body(total: Array, terms: tuple) -> tuple:
        for i in reversed(range(UNROLLED)):
            total = total * cosine + terms[0][i] * terms[1][i]
        return total, None

    grouped = tuple(part.reshape(-1, UNROLLED, *part.shape[1:]) for part in (left, right))
    zero = jnp.zeros(jnp.broadcast_shapes(left.shape[1:], right.shape[1:], cosine.shape), cosine.dtype)
    return jax.lax.scan(body, zero, grouped, reverse=True)[0]


@functools.cache
def _hermite() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Equally spaced nodes, their weights for N(0, 1), and weights times Hermite polynomials of norm 1, (NODES, TERMS − 1). For smooth functions the error falls exponentially with the
    number of nodes, and unlike that of Gauss–Hermite does not grow with the poles that many activations have off the real line."""
    nodes = np.linspace(-REACH, REACH, NODES)
    half = np.exp(-0.25 * nodes**2)  # one factor here, one at the end: polynomials alone would overflow
    basis = [half, nodes * half]
    for n in range(1, TERMS - 2):
        basis.append((nodes * basis[-1] - n**0.5 * basis[-2]) / (n + 1) ** 0.5)
    weights = half**2 / np.sum(half**2)
    return nodes, weights, np.stack(basis, axis=1) * (half / np.sum(half**2))[:, None]


def _slope(phi: Callable) -> Callable:
    return lambda at: jax.jvp(phi, (at,), (jnp.ones_like(at),))[1]
