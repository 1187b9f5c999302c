"""What a kernel is: a covariance function k(x, x′) with hyper-parameters, composed by + and *."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.features import columns as as_columns
from aleator.hyperpriors import Hyperprior, LogNormal, positive_number
from aleator.likelihoods import Positive

SCALE = LogNormal(0.0, 1.5)  # of the functions, for targets near unit scale
WEAK = LogNormal(0.0, 1.5)
SCATTER = 0.5  # starts lie this share of a prior draw away from the prior's median


class Number(NamedTuple):
    """A hyper-parameter: its prior (or its fixed value), shape, and whether it is positive, u = log value. Real ones have u = value, with a
    `LogNormal`'s N(loc, scale²) read as a prior of u itself."""

    prior: Any
    shape: tuple[int, ...] = ()
    positive: bool = True


class Kernel(abc.ABC):
    """What a Gaussian process asks of a kernel. Subclasses are frozen dataclasses that name their numbers and their parts."""

    def numbers(self) -> dict[str, Number]:
        """The kernel's own hyper-parameters by name."""
        return {}

    def parts(self) -> dict[str, Kernel]:
        """Kernels inside this one, by name."""
        return {}

    def bind(self, x: Tree) -> Kernel:
        """The kernel for inputs like x (arrays, or their shapes)."""
        return self

    @abc.abstractmethod
    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        """k(x1, x2), (n, m)."""

    @abc.abstractmethod
    def diag(self, params: Tree, x: Tree) -> Array:
        """k(x, x) of each row with itself, (n,)."""

    # ---- hyper-parameters, written once ----

    def learned(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """(prior, shape) of each learned number, by its name in the tree."""
        named = {(f"log_{name}" if number.positive else name): number for name, number in self.numbers().items()}
        return {name: (number.prior, number.shape) for name, number in named.items() if isinstance(number.prior, Hyperprior)}

    def median(self, key: Key) -> Tree:
        """Where a single fit starts: the prior medians."""
        own = {name: jnp.full(shape, prior.initial()) for name, (prior, shape) in self.learned().items()}
        return own | self._each(key, lambda part, k: part.median(k))

    def init(self, key: Key) -> Tree:
        """A start of its own for each key: halfway between the prior's median and a draw of it."""
        key_own, key_parts = jax.random.split(key)
        own = {name: jnp.full(shape, prior.initial()) for name, (prior, shape) in self.learned().items()}
        drawn = self._draw(key_own)
        return {name: u + SCATTER * (drawn[name] - u) for name, u in own.items()} | self._each(key_parts, lambda part, k: part.init(k))

    def sample(self, key: Key) -> Tree:
        """A draw of the hyper-parameters from their prior."""
        key_own, key_parts = jax.random.split(key)
        return self._draw(key_own) | self._each(key_parts, lambda part, k: part.sample(k))

    def log_prior(self, params: Tree) -> Array:
        """log p(u) of all hyper-parameters, a scalar."""
        own = [jnp.sum(prior.log_prob_unconstrained(params[name])) for name, (prior, _) in self.learned().items()]
        return sum([*own, *(part.log_prior(params[name]) for name, part in self.parts().items())], jnp.zeros(()))

    def value(self, params: Tree, name: str) -> Array:
        """A hyper-parameter on its own scale, learned or fixed."""
        number = self.numbers()[name]
        if not isinstance(number.prior, Hyperprior):
            return jnp.broadcast_to(jnp.asarray(number.prior, jnp.result_type(float)), number.shape)
        return jnp.exp(params[f"log_{name}"]) if number.positive else params[name]

    def _draw(self, key: Key) -> dict[str, Array]:
        learned = self.learned()
        keys = jax.random.split(key, max(len(learned), 1))
        return {name: prior.sample_unconstrained(keys[i], shape) for i, (name, (prior, shape)) in enumerate(learned.items())}

    def _each(self, key: Key, function: Callable[[Kernel, Key], Tree]) -> dict[str, Tree]:
        parts = self.parts()
        keys = jax.random.split(key, max(len(parts), 1))
        return {name: function(part, keys[i]) for i, (name, part) in enumerate(parts.items())}

    # ---- composition ----

    def __add__(self, other: Any) -> Kernel:
        return Sum((*_terms(self, Sum), *_terms(_as_kernel(other), Sum)))

    def __radd__(self, other: Any) -> Kernel:
        return _as_kernel(other) + self

    def __mul__(self, other: Any) -> Kernel:
        return Product((*_terms(self, Product), *_terms(_as_kernel(other), Product)))

    def __rmul__(self, other: Any) -> Kernel:
        return self * other


@dataclasses.dataclass(frozen=True)
class Sum(Kernel):
    """k₁ + k₂ + …: f = f₁ + f₂ + …"""

    terms: tuple[Kernel, ...]

    def parts(self) -> dict[str, Kernel]:
        return {str(i): term for i, term in enumerate(self.terms)}

    def bind(self, x: Tree) -> Kernel:
        return Sum(tuple(term.bind(x) for term in self.terms))

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return functools.reduce(jnp.add, [term(params[name], x1, x2) for name, term in self.parts().items()])

    def diag(self, params: Tree, x: Tree) -> Array:
        return functools.reduce(jnp.add, [term.diag(params[name], x) for name, term in self.parts().items()])


@dataclasses.dataclass(frozen=True)
class Product(Kernel):
    """k₁·k₂·…; scales left at their default are learned in the first factor only."""

    terms: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        first, *rest = self.terms
        unit = lambda term: dataclasses.replace(term, scale=1.0) if getattr(term, "scale", None) is SCALE else term
        object.__setattr__(self, "terms", (first, *(unit(term) for term in rest)))

    def parts(self) -> dict[str, Kernel]:
        return {str(i): term for i, term in enumerate(self.terms)}

    def bind(self, x: Tree) -> Kernel:
        return Product(tuple(term.bind(x) for term in self.terms))

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return functools.reduce(jnp.multiply, [term(params[name], x1, x2) for name, term in self.parts().items()])

    def diag(self, params: Tree, x: Tree) -> Array:
        return functools.reduce(jnp.multiply, [term.diag(params[name], x) for name, term in self.parts().items()])


@dataclasses.dataclass(frozen=True)
class Bias(Kernel):
    """scale²: an unknown level."""

    scale: Positive = SCALE

    def __post_init__(self) -> None:
        check_numbers(self, "scale")

    def numbers(self) -> dict[str, Number]:
        return {"scale": Number(self.scale)}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return jnp.broadcast_to(self.value(params, "scale") ** 2, (rows_of(x1), rows_of(x2)))

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.broadcast_to(self.value(params, "scale") ** 2, (rows_of(x),))


class Table(Kernel):
    """A kernel of inputs (n,) or (n, D), or of some of their columns."""

    columns: tuple[int, ...] | None
    in_size: int | None

    def bind(self, x: Tree) -> Kernel:
        if self.in_size is not None:
            return self
        shape = np.shape(x) if not hasattr(x, "shape") else x.shape
        if len(shape) not in (1, 2):
            raise ModelError(
                message(
                    f"{type(self).__name__} takes a table.", f"x of shape {shape}", "(n,) or (n, D)", "flatten the rows, or use gp.Deep"
                )
            )
        width = shape[1] if len(shape) == 2 else 1
        if self.columns is not None and not all(0 <= column < width for column in self.columns):
            raise ModelError(
                message(f"{type(self).__name__} names columns that are not there.", self.columns, f"0 … {width - 1}", "count from 0")
            )
        return dataclasses.replace(self, in_size=width if self.columns is None else len(self.columns))  # type: ignore[type-var]

    def pick(self, x: Tree) -> Array:
        """The kernel's columns of x, (n, D)."""
        table = jnp.asarray(as_columns(x), jnp.result_type(float))
        return table if self.columns is None else table[:, jnp.asarray(self.columns)]

    def size(self) -> int:
        if self.in_size is None:
            raise ModelError(message("The kernel has not met data yet.", "in_size=None", "the number of columns", "call kernel.bind(x)"))
        return self.in_size


def check_columns(kernel: Any) -> None:
    if kernel.columns is not None:
        given = (kernel.columns,) if isinstance(kernel.columns, int) else tuple(int(column) for column in kernel.columns)
        object.__setattr__(kernel, "columns", given)


def check_numbers(kernel: Any, *names: str) -> None:
    for name in names:
        value = getattr(kernel, name)
        if value is not None and not isinstance(value, (Hyperprior, tuple)):
            positive_number(type(kernel).__name__, name, value)


def rows_of(x: Tree) -> int:
    return int(jax.tree.leaves(x)[0].shape[0])


def _terms(kernel: Kernel, kind: type) -> tuple[Kernel, ...]:
    return kernel.terms if isinstance(kernel, kind) else (kernel,)  # type: ignore[attr-defined]


def _as_kernel(value: Any) -> Kernel:
    """A kernel, or a positive number v as the constant kernel v."""
    if isinstance(value, Kernel):
        return value
    positive_number("Kernel", "factor", value)
    return Bias(math.sqrt(float(value)))
