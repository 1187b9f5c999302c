"""Covariance functions k(x, x′) → (n, n′) of Gaussian processes, for `match`; any function like them will do.

x (n,) or (n, D). `scale` is the standard deviation of the functions, `length` the distance over which they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array
from aleator.features import columns
from aleator.hyperpriors import positive_number

Kernel = Callable[[Any, Any], Array]


def rbf(length: float = 1.0, scale: float = 1.0) -> Kernel:
    """scale²·exp(−r²/(2·length²)): infinitely smooth.

    >>> float(rbf(2.0, 3.0)(np.array([0.0]), np.array([0.0]))[0, 0])
    9.0
    """
    _check("rbf", length=length, scale=scale)
    return lambda a, b: scale**2 * jnp.exp(-0.5 * _squares(a, b) / length**2)


def matern(length: float = 1.0, scale: float = 1.0, order: float = 1.5) -> Kernel:
    """scale²·p(r)·exp(−√(2·order)·r/length): rough paths for order ½, once differentiable for 1½, twice for 2½."""
    _check("matern", length=length, scale=scale)
    if order not in (0.5, 1.5, 2.5):
        raise ModelError(message("Unknown order of a Matérn kernel.", order, "0.5, 1.5 or 2.5", "pass e.g. order=1.5"))

    def kernel(a: Any, b: Any) -> Array:
        r = jnp.sqrt(2 * order * _squares(a, b)) / length
        polynomial = 1.0 + (order > 1) * r + (order > 2) * r**2 / 3.0
        return scale**2 * polynomial * jnp.exp(-r)

    return kernel


def periodic(period: float = 1.0, length: float = 1.0, scale: float = 1.0) -> Kernel:
    """scale²·exp(−2 Σ sin²(π(x − x′)/period)/length²): functions that repeat themselves."""
    _check("periodic", period=period, length=length, scale=scale)

    def kernel(a: Any, b: Any) -> Array:
        a, b = columns(jnp.asarray(a)), columns(jnp.asarray(b))
        waves = jnp.sin(np.pi * (a[:, None] - b[None]) / period) ** 2
        return scale**2 * jnp.exp(-2.0 * jnp.sum(waves, axis=-1) / length**2)

    return kernel


def _squares(a: Any, b: Any) -> Array:
    """‖x − x′‖², (n, n′)."""
    a, b = columns(jnp.asarray(a)), columns(jnp.asarray(b))
    return jnp.sum((a[:, None] - b[None]) ** 2, axis=-1)


def _check(owner: str, **given: float) -> None:
    for name, value in given.items():
        positive_number(owner, name, value)
