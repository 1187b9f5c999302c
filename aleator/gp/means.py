"""Mean functions of Gaussian processes: m(x), (n,), with parameters on the real line."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.features import columns
from aleator.hyperpriors import positive_number


class Mean(abc.ABC):
    """init(key, k) → params for k target columns; log_prior(params); __call__(params, x, k) → (n, k)."""

    @abc.abstractmethod
    def sample(self, key: Key, k: int) -> Tree: ...

    def init(self, k: int) -> Tree:
        return {}

    def log_prior(self, params: Tree) -> Array:
        return jnp.zeros(())

    @abc.abstractmethod
    def __call__(self, params: Tree, x: Tree, k: int) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Zero(Mean):
    """m(x) = 0."""

    def sample(self, key: Key, k: int) -> Tree:
        return {}

    def __call__(self, params: Tree, x: Tree, k: int) -> Array:
        return jnp.zeros((_rows(x), k))


@dataclasses.dataclass(frozen=True)
class Constant(Mean):
    """m(x) = c, one for each target column, c ~ N(0, scale²)."""

    scale: float = 10.0

    def __post_init__(self) -> None:
        positive_number("Constant", "scale", self.scale)

    def init(self, k: int) -> Tree:
        return {"level": jnp.zeros(k)}

    def sample(self, key: Key, k: int) -> Tree:
        return {"level": self.scale * jax.random.normal(key, (k,))}

    def log_prior(self, params: Tree) -> Array:
        return jnp.sum(-0.5 * (params["level"] / self.scale) ** 2 - math.log(self.scale) - 0.5 * math.log(2 * math.pi))

    def __call__(self, params: Tree, x: Tree, k: int) -> Array:
        return jnp.broadcast_to(params["level"], (_rows(x), k))


@dataclasses.dataclass(frozen=True)
class Fixed(Mean):
    """m(x) = function(x), known: (n,) or (n, k)."""

    function: Callable[[Tree], Array]

    def sample(self, key: Key, k: int) -> Tree:
        return {}

    def __call__(self, params: Tree, x: Tree, k: int) -> Array:
        out = jnp.asarray(self.function(x))
        out = out[:, None] if out.ndim == 1 else out
        if out.ndim != 2 or out.shape[0] != _rows(x) or out.shape[1] not in (1, k):
            raise ModelError(message("The mean has a wrong shape.", out.shape, f"({_rows(x)},) or ({_rows(x)}, {k})", "return one a row"))
        return jnp.broadcast_to(out, (_rows(x), k))


@dataclasses.dataclass(frozen=True)
class Projection(Mean):
    """m(x) = x·matrix, a fixed linear map (D, k): the skip connection of deep processes."""

    matrix: tuple

    def sample(self, key: Key, k: int) -> Tree:
        return {}

    def __call__(self, params: Tree, x: Tree, k: int) -> Array:
        return columns(x) @ jnp.asarray(self.matrix, jnp.result_type(float))


def _rows(x: Tree) -> int:
    return int(jax.tree.leaves(x)[0].shape[0])
