"""Kernels of tables: stationary ones, periodic, linear, spectral mixtures."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from aleator._typing import Array, Key, Tree
from aleator.gp._kernel import SCALE, WEAK, Number, Table, check_columns, check_numbers
from aleator.hyperpriors import LogNormal, positive_number
from aleator.likelihoods import Positive


@dataclasses.dataclass(frozen=True)
class Stationary(Table):
    """scale²·g(r), r² = Σ_d (x_d − x′_d)²/length_d². ard: one length a column. Lengths are learned under log length ~ N(½ log D, 1.5²), since distances grow
    as √D, unless a prior, a number or a tuple of them is given."""

    length: Positive | tuple[float, ...] | None = None
    scale: Positive = SCALE
    ard: bool = True
    columns: tuple[int, ...] | None = None
    in_size: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "length", "scale")
        check_columns(self)

    def numbers(self) -> dict[str, Number]:
        shape = (self.size(),) if self.ard or isinstance(self.length, tuple) else ()
        length = LogNormal(0.5 * math.log(self.size()), 1.5) if self.length is None else self.length
        return {"length": Number(length, shape), "scale": Number(self.scale)}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        length = self.value(params, "length")
        return self.value(params, "scale") ** 2 * self.shape(params, squares(self.pick(x1) / length, self.pick(x2) / length))

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.broadcast_to(self.value(params, "scale") ** 2, self.pick(x).shape[:1])

    @abc.abstractmethod
    def shape(self, params: Tree, squared: Array) -> Array:
        """g as a function of r²; 1 at 0."""


@dataclasses.dataclass(frozen=True)
class RBF(Stationary):
    """scale²·exp(−r²/2): infinitely smooth functions."""

    def shape(self, params: Tree, squared: Array) -> Array:
        return jnp.exp(-0.5 * squared)


@dataclasses.dataclass(frozen=True)
class Matern12(Stationary):
    """scale²·exp(−r): rough paths (Ornstein and Uhlenbeck)."""

    def shape(self, params: Tree, squared: Array) -> Array:
        return jnp.exp(-_root(squared))


@dataclasses.dataclass(frozen=True)
class Matern32(Stationary):
    """scale²·(1 + √3 r)·exp(−√3 r): once differentiable."""

    def shape(self, params: Tree, squared: Array) -> Array:
        r = _root(3.0 * squared)
        return (1.0 + r) * jnp.exp(-r)


@dataclasses.dataclass(frozen=True)
class Matern52(Stationary):
    """scale²·(1 + √5 r + 5r²/3)·exp(−√5 r): twice differentiable."""

    def shape(self, params: Tree, squared: Array) -> Array:
        r = _root(5.0 * squared)
        return (1.0 + r + r**2 / 3.0) * jnp.exp(-r)


@dataclasses.dataclass(frozen=True)
class RationalQuadratic(Stationary):
    """scale²·(1 + r²/(2·mixture))^{−mixture}: a mixture of RBFs over many lengths."""

    mixture: Positive = WEAK

    def numbers(self) -> dict[str, Number]:
        return super().numbers() | {"mixture": Number(self.mixture)}

    def shape(self, params: Tree, squared: Array) -> Array:
        mixture = self.value(params, "mixture")
        return jnp.exp(-mixture * jnp.log1p(0.5 * squared / mixture))


@dataclasses.dataclass(frozen=True)
class Periodic(Table):
    """scale²·exp(−2 Σ_d sin²(π(x_d − x′_d)/period)/length_d²): functions that repeat themselves."""

    period: Positive = WEAK
    length: Positive | tuple[float, ...] = WEAK
    scale: Positive = SCALE
    ard: bool = True
    columns: tuple[int, ...] | None = None
    in_size: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "period", "length", "scale")
        check_columns(self)

    def numbers(self) -> dict[str, Number]:
        shape = (self.size(),) if self.ard or isinstance(self.length, tuple) else ()
        return {"period": Number(self.period), "length": Number(self.length, shape), "scale": Number(self.scale)}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        # sin²(π(a − b)/p) = ¼‖(cos, sin)(2πa/p) − (cos, sin)(2πb/p)‖²: distances on a circle.
        period, length = self.value(params, "period"), self.value(params, "length")
        circle = lambda x: jnp.concatenate([jnp.cos(2 * math.pi * x / period) / length, jnp.sin(2 * math.pi * x / period) / length], axis=1)
        return self.value(params, "scale") ** 2 * jnp.exp(-0.5 * squares(circle(self.pick(x1)), circle(self.pick(x2))))

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.broadcast_to(self.value(params, "scale") ** 2, self.pick(x).shape[:1])


@dataclasses.dataclass(frozen=True)
class Linear(Table):
    """Σ_d scale_d²·x_d x′_d: linear functions through 0, one prior standard deviation of the slope a column with ard. Add `Bias()` for the level."""

    scale: Positive | tuple[float, ...] = WEAK
    ard: bool = False
    columns: tuple[int, ...] | None = None
    in_size: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "scale")
        check_columns(self)

    def numbers(self) -> dict[str, Number]:
        return {"scale": Number(self.scale, (self.size(),) if self.ard or isinstance(self.scale, tuple) else ())}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        scale = self.value(params, "scale")
        return (self.pick(x1) * scale) @ (self.pick(x2) * scale).T

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.sum((self.pick(x) * self.value(params, "scale")) ** 2, axis=1)


@dataclasses.dataclass(frozen=True)
class SpectralMixture(Table):
    """Σ_q weight_q²·exp(−2π² Σ_d τ_d² width_qd²)·cos(2π Σ_d τ_d frequency_qd), τ = x − x′ (Wilson and Adams 2013): any stationary kernel, given
    enough components. Its evidence has many modes: use restarts."""

    num_components: int = 4
    frequency: Positive = WEAK
    width: Positive = WEAK
    weight: Positive = SCALE
    columns: tuple[int, ...] | None = None
    in_size: int | None = None

    def __post_init__(self) -> None:
        positive_number("SpectralMixture", "num_components", self.num_components)
        check_numbers(self, "frequency", "width", "weight")
        check_columns(self)

    def numbers(self) -> dict[str, Number]:
        shape = (self.num_components, self.size())
        return {
            "frequency": Number(self.frequency, shape),
            "width": Number(self.width, shape),
            "weight": Number(self.weight, shape[:1]),
        }

    def median(self, key: Key) -> Tree:
        return self.init(key)  # equal components would stay equal

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        a, b = self.pick(x1), self.pick(x2)

        def one(weight: Array, width: Array, frequency: Array) -> Array:
            decay = jnp.exp(-0.5 * squares(2 * math.pi * a * width, 2 * math.pi * b * width))
            wave = jnp.cos(2 * math.pi * ((a @ frequency)[:, None] - (b @ frequency)[None]))
            return weight**2 * decay * wave

        numbers = [self.value(params, name) for name in ("weight", "width", "frequency")]
        return functools.reduce(jnp.add, [one(*(number[q] for number in numbers)) for q in range(self.num_components)])

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.broadcast_to(jnp.sum(self.value(params, "weight") ** 2), self.pick(x).shape[:1])


@jax.custom_jvp
def squares(a: Array, b: Array) -> Array:
    """‖aᵢ − bⱼ‖², (n, m), from differences, exactly 0 for equal rows; its derivative by matrix products, without the (n, m, D) differences."""
    return jnp.sum((a[:, None] - b[None]) ** 2, axis=-1)


@squares.defjvp
def _squares_jvp(primals: tuple, tangents: tuple) -> tuple:
    (a, b), (da, db) = primals, tangents
    own = jnp.sum(a * da, axis=1)[:, None] + jnp.sum(b * db, axis=1)[None]
    return squares(a, b), 2.0 * (own - a @ db.T - da @ b.T)


@jax.custom_jvp
def _root(squared: Array) -> Array:
    """√r², with derivative 0 at 0: where r² = 0 nothing moves it. Not by two `where`s, one inside the root and one around it: the CPU compiler of jaxlib 0.10.2 drops
    the outer one in some fusions, and the diagonal of a Matérn kernel comes out wrong."""
    return jnp.sqrt(squared)


@_root.defjvp
def _root_jvp(primals: tuple, tangents: tuple) -> tuple:
    r = _root(*primals)
    return r, 0.5 * tangents[0] / jnp.maximum(r, 1e-8)  # below, the tangent is rounding
