"""Covariance functions k(x, x′) → (n, n′) of Gaussian processes, for `match`; any function like them will do.

x (n,) or (n, D). `scale` is the standard deviation of the functions, `length` the distance over which they change. They are the kernels of `al.gp` with all
numbers given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from aleator import gp
from aleator._errors import ModelError, message
from aleator._typing import Array
from aleator.features import columns

Kernel = Callable[[Any, Any], Array]
ORDERS: dict[float, Any] = {0.5: gp.Matern12, 1.5: gp.Matern32, 2.5: gp.Matern52}


def rbf(length: float = 1.0, scale: float = 1.0) -> Kernel:
    """scale²·exp(−r²/(2·length²)): infinitely smooth.

    >>> import numpy as np
    >>> float(rbf(2.0, 3.0)(np.array([0.0]), np.array([0.0]))[0, 0])
    9.0
    """
    return _given(gp.RBF(length, scale))


def matern(length: float = 1.0, scale: float = 1.0, order: float = 1.5) -> Kernel:
    """scale²·p(r)·exp(−√(2·order)·r/length): rough paths for order ½, once differentiable for 1½, twice for 2½."""
    if order not in ORDERS:
        raise ModelError(message("Unknown order of a Matérn kernel.", order, "0.5, 1.5 or 2.5", "pass e.g. order=1.5"))
    return _given(ORDERS[order](length, scale))


def periodic(period: float = 1.0, length: float = 1.0, scale: float = 1.0) -> Kernel:
    """scale²·exp(−2 Σ sin²(π(x − x′)/period)/length²): functions that repeat themselves."""
    return _given(gp.Periodic(period, length, scale))


def _given(kernel: gp.kernels.Kernel) -> Kernel:
    """A kernel without anything to learn, as a function of two tables."""

    def values(a: Any, b: Any) -> Array:
        a, b = columns(jnp.asarray(a)), columns(jnp.asarray(b))
        return kernel.bind(a)({}, a, b)

    return values
