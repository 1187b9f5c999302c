"""Basis functions Φ(x) for `LinearModel`: each maps x (n,) or (n, d) to (n, p)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Tree


@dataclasses.dataclass(frozen=True)
class Identity:
    """(1, x₁ … x_d): plain linear regression; without the 1 for bias=False."""

    bias: bool = True

    def __call__(self, x: Array) -> Array:
        x = columns(x)
        return _with_bias(x, self.bias)


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """(1, x, x², … x^order) of each input column.

    >>> Polynomial(2)(jnp.array([2.0, 3.0])).tolist()
    [[1.0, 2.0, 4.0], [1.0, 3.0, 9.0]]
    """

    order: int

    def __post_init__(self) -> None:
        _check_count("Polynomial", "order", self.order, 0)

    def __call__(self, x: Array) -> Array:
        x = columns(x)
        powers = [x**p for p in range(1, self.order + 1)]
        return jnp.concatenate([jnp.ones_like(x[:, :1]), *powers], axis=1)


@dataclasses.dataclass(frozen=True)
class RBF:
    """exp(−‖x − c‖² / (2·width²)) around each centre c; centres (m,) or (m, d)."""

    centres: tuple
    width: float = 1.0
    bias: bool = True

    def __post_init__(self) -> None:
        centres = np.asarray(self.centres, float)
        if centres.ndim not in (1, 2) or centres.size == 0 or not self.width > 0:
            raise ModelError(
                message(
                    "RBF needs centres and a width.",
                    f"shape {centres.shape}, width {self.width}",
                    "centres (m,) or (m, d), width > 0",
                    "pass e.g. np.linspace(-3, 3, 10)",
                )
            )
        object.__setattr__(self, "centres", _as_tuple(centres))

    def __call__(self, x: Array) -> Array:
        x = columns(x)
        centres = columns(jnp.asarray(self.centres, x.dtype))
        if centres.shape[1] != x.shape[1]:
            raise ModelError(
                message(
                    "RBF centres do not fit x.",
                    f"{x.shape[1]} columns in x",
                    f"{centres.shape[1]}",
                    "give centres with one entry per column of x",
                )
            )
        squared = jnp.sum((x[:, None, :] - centres[None, :, :]) ** 2, axis=-1)
        return _with_bias(jnp.exp(-0.5 * squared / self.width**2), self.bias)


@dataclasses.dataclass(frozen=True)
class Fourier:
    """(1, cos(2πjx/period), sin(2πjx/period)) for j = 1 … order, of each input column."""

    order: int
    period: float = 1.0

    def __post_init__(self) -> None:
        _check_count("Fourier", "order", self.order, 1)
        if not self.period > 0:
            raise ModelError(message("Fourier needs a period.", self.period, "a number > 0", "pass the length of one cycle"))

    def __call__(self, x: Array) -> Array:
        x = columns(x)
        angles = [2 * jnp.pi * j * x / self.period for j in range(1, self.order + 1)]
        waves = [wave(angle) for angle in angles for wave in (jnp.cos, jnp.sin)]
        return jnp.concatenate([jnp.ones_like(x[:, :1]), *waves], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    """function(params, x) with params held fixed: any trained body as a basis."""

    function: Callable[[Tree, Array], Array]
    params: Tree
    bias: bool = True

    def __call__(self, x: Array) -> Array:
        return _with_bias(self.function(self.params, x), self.bias)


@dataclasses.dataclass(frozen=True, eq=False)
class LastHidden:
    """Activations of the last hidden layer of a built-in network with fixed weights: `al.features.LastHidden(net, weights)`."""

    network: Any
    params: Tree
    bias: bool = True

    def __post_init__(self) -> None:
        if not hasattr(self.network, "hidden_features"):
            raise ModelError(
                message(
                    "This network does not show its last hidden layer.",
                    type(self.network).__name__,
                    "a built-in network",
                    "use al.features.Frozen(function, params) with your own body",
                )
            )

    def __call__(self, x: Array) -> Array:
        return _with_bias(self.network.hidden_features(self.params, x), self.bias)


def columns(x: Array) -> Array:
    """(n,) → (n, 1); (n, d) as it is; anything else is refused."""
    x = jnp.asarray(x)
    if x.ndim not in (1, 2):
        raise ModelError(
            message(
                "These features take a table.", f"x of shape {x.shape}", "(n,) or (n, d)", "flatten the rows, or use al.features.Frozen"
            )
        )
    return x[:, None] if x.ndim == 1 else x


def _with_bias(features: Array, bias: bool) -> Array:
    return jnp.concatenate([jnp.ones_like(features[:, :1]), features], axis=1) if bias else features


def _check_count(owner: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ModelError(
            message(f"{owner} needs a whole number.", f"{name}={value!r}", f"an int ≥ {least}", f"pass e.g. {name}={max(least, 2)}")
        )


def _as_tuple(values: np.ndarray) -> tuple:
    return tuple(_as_tuple(row) for row in values) if values.ndim > 1 else tuple(values.tolist())
