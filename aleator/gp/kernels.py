"""Covariance functions k(x, x′) with hyper-parameters, composed by + and *.

A kernel is a frozen, hashable description; its hyper-parameters are a tree on the real line: {"log_length": (D,), "log_scale": ()} and the like. A
field that is a number is fixed; one that is a hyperprior is learned under it. `kernel(params, x1, x2)` → (n, m), `kernel.diag(params, x)` → (n,).
In a sum each term keeps its own `scale`; in a product only the first factor's, the others' would say the same thing twice.
"""

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
from aleator.networks import as_network
from aleator.networks._network import fan_in
from aleator.priors import Normal, Prior

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


def _check_columns(kernel: Any) -> None:
    if kernel.columns is not None:
        given = (kernel.columns,) if isinstance(kernel.columns, int) else tuple(int(column) for column in kernel.columns)
        object.__setattr__(kernel, "columns", given)


def _check_numbers(kernel: Any, *names: str) -> None:
    for name in names:
        value = getattr(kernel, name)
        if value is not None and not isinstance(value, (Hyperprior, tuple)):
            positive_number(type(kernel).__name__, name, value)


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
        _check_numbers(self, "length", "scale")
        _check_columns(self)

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
        _check_numbers(self, "period", "length", "scale")
        _check_columns(self)

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
        _check_numbers(self, "scale")
        _check_columns(self)

    def numbers(self) -> dict[str, Number]:
        return {"scale": Number(self.scale, (self.size(),) if self.ard or isinstance(self.scale, tuple) else ())}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        scale = self.value(params, "scale")
        return (self.pick(x1) * scale) @ (self.pick(x2) * scale).T

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.sum((self.pick(x) * self.value(params, "scale")) ** 2, axis=1)


@dataclasses.dataclass(frozen=True)
class Bias(Kernel):
    """scale²: an unknown level."""

    scale: Positive = SCALE

    def __post_init__(self) -> None:
        _check_numbers(self, "scale")

    def numbers(self) -> dict[str, Number]:
        return {"scale": Number(self.scale)}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return jnp.broadcast_to(self.value(params, "scale") ** 2, (_rows(x1), _rows(x2)))

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.broadcast_to(self.value(params, "scale") ** 2, (_rows(x),))


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
        _check_numbers(self, "frequency", "width", "weight")
        _check_columns(self)

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


@dataclasses.dataclass(frozen=True)
class Changepoint(Kernel):
    """(1 − s)(1 − s′)·before + s s′·after, s = 1/(1 + e^{−(x − location)/width}) of one column: two regimes, independent of each other. The location is
    learned under N(location, location_sd²), or fixed for location_sd=0."""

    before: Kernel
    after: Kernel
    location: float = 0.0
    location_sd: float = 1.0
    width: Positive = LogNormal(-2.0, 1.0)
    column: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, "width")

    def numbers(self) -> dict[str, Number]:
        where = LogNormal(self.location, self.location_sd) if self.location_sd else self.location
        return {"location": Number(where, (), False), "width": Number(self.width)}

    def parts(self) -> dict[str, Kernel]:
        return {"before": self.before, "after": self.after}

    def bind(self, x: Tree) -> Kernel:
        return dataclasses.replace(self, before=self.before.bind(x), after=self.after.bind(x))

    def _share(self, params: Tree, x: Tree) -> Array:
        return jax.nn.sigmoid((as_columns(x)[:, self.column] - self.value(params, "location")) / self.value(params, "width"))

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        s, t = self._share(params, x1), self._share(params, x2)
        first = (1 - s)[:, None] * (1 - t)[None] * self.before(params["before"], x1, x2)
        return first + s[:, None] * t[None] * self.after(params["after"], x1, x2)

    def diag(self, params: Tree, x: Tree) -> Array:
        s = self._share(params, x)
        return (1 - s) ** 2 * self.before.diag(params["before"], x) + s**2 * self.after.diag(params["after"], x)


@dataclasses.dataclass(frozen=True)
class Categorical(Kernel):
    """B[a, b] for a column that holds levels 0 … num_levels − 1. rank=0: scale²·(ρ + (1 − ρ)·[a = b]), all levels alike with correlation 0 < ρ < 1; rank r:
    B = WWᵀ + diag(v²), W (levels, r). Times a kernel of other columns this is the coregionalised process of several outputs, in long form."""

    num_levels: int
    column: int = 0
    rank: int = 0
    scale: Positive = SCALE

    def __post_init__(self) -> None:
        positive_number("Categorical", "num_levels", self.num_levels)
        _check_numbers(self, "scale")

    def numbers(self) -> dict[str, Number]:
        unit = LogNormal(0.0, 1.0)
        if self.rank == 0:
            return {"scale": Number(self.scale), "logit": Number(LogNormal(0.0, 1.5), (), False)}
        return {
            "scale": Number(self.scale),
            "mixing": Number(unit, (self.num_levels, self.rank), False),
            "own": Number(WEAK, (self.num_levels,)),
        }

    def median(self, key: Key) -> Tree:
        return self.init(key) if self.rank else super().median(key)  # W = 0 is a saddle point

    def matrix(self, params: Tree) -> Array:
        """B, (levels, levels)."""
        if self.rank == 0:
            rho = jax.nn.sigmoid(self.value(params, "logit"))
            inner: Any = rho + (1 - rho) * jnp.eye(self.num_levels)
        else:
            mixing = self.value(params, "mixing")
            inner = mixing @ mixing.T + jnp.diag(self.value(params, "own") ** 2)
        return self.value(params, "scale") ** 2 * inner

    def _levels(self, x: Tree) -> Array:
        return as_columns(x)[:, self.column].astype(jnp.int32)

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.matrix(params)[self._levels(x1)][:, self._levels(x2)]

    def diag(self, params: Tree, x: Tree) -> Array:
        return jnp.diag(self.matrix(params))[self._levels(x)]


@dataclasses.dataclass(frozen=True)
class Deep(Kernel):
    """kernel(network(x), network(x′)): a kernel of learned features, with any network (Wilson et al. 2016). The network's weights are hyper-parameters under
    `prior`; with many of them and few rows the evidence overfits as any likelihood does: prefer few features, or sample the weights."""

    network: Any
    kernel: Kernel
    prior: Prior = Normal(1.0, scaling="fan_in")

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", as_network(self.network))

    def bind(self, x: Tree) -> Kernel:
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), jnp.float32), x)
        out = jax.eval_shape(lambda w, rows: self.network.apply(w, rows, None), jax.eval_shape(self.network.init, jax.random.key(0)), rows)
        return dataclasses.replace(self, kernel=self.kernel.bind(out))

    def parts(self) -> dict[str, Kernel]:
        return {"kernel": self.kernel}

    def _weights(self, raw: Tree, hyper: Tree) -> Tree:
        return self.prior.weights(raw, hyper, fan_in(self.network, raw))

    def _network(self, weights: Tree) -> dict[str, Tree]:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), weights)
        fans = fan_in(self.network, weights)
        hyper = self.prior.init(weights, fans)
        return {"network": self.prior.raw(weights, hyper, fans), "prior": hyper}

    def median(self, key: Key) -> Tree:
        return self.init(key)

    def init(self, key: Key) -> Tree:
        key_network, key_rest = jax.random.split(key)
        return super().init(key_rest) | self._network(self.network.init(key_network))

    def sample(self, key: Key) -> Tree:
        key_network, key_shape, key_rest = jax.random.split(key, 3)
        template = jax.eval_shape(self.network.init, key_shape)
        raw, hyper = self.prior.sample(key_network, template, fan_in(self.network, template))
        return super().sample(key_rest) | {"network": raw, "prior": hyper}

    def log_prior(self, params: Tree) -> Array:
        return super().log_prior(params) + self.prior.log_prob(params["network"], params["prior"], fan_in(self.network, params["network"]))

    def features(self, params: Tree, x: Tree) -> Array:
        """What the inner kernel sees, (n, features)."""
        return self.network.apply(self._weights(params["network"], params["prior"]), x, None)

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.kernel(params["kernel"], self.features(params, x1), self.features(params, x2))

    def diag(self, params: Tree, x: Tree) -> Array:
        return self.kernel.diag(params["kernel"], self.features(params, x))


@dataclasses.dataclass(frozen=True)
class Custom(Kernel):
    """function(values, x1, x2) → (n, m) with positive hyper-parameters: `given` maps each name to a number (fixed) or a hyperprior (learned), and `values` to
    what they are. A tinygp kernel is one line: Custom(lambda v, a, b: tinygp.kernels.ExpSineSquared(v["period"])(a, b), {"period": al.LogNormal()})."""

    function: Callable[[dict[str, Array], Tree, Tree], Array]
    given: Any = ()

    def __post_init__(self) -> None:
        given = tuple(sorted(self.given.items())) if isinstance(self.given, dict) else tuple(self.given)
        object.__setattr__(self, "given", given)
        if not callable(self.function):
            raise ModelError(
                message("A custom kernel must be a function.", type(self.function).__name__, "(values, x1, x2) → (n, m)", "pass a function")
            )

    def numbers(self) -> dict[str, Number]:
        return {name: Number(prior) for name, prior in self.given}

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        out = self.function({name: self.value(params, name) for name in self.numbers()}, x1, x2)
        if out.shape != (_rows(x1), _rows(x2)):
            raise ModelError(
                message("A custom kernel has a wrong shape.", out.shape, f"({_rows(x1)}, {_rows(x2)})", "return one number a pair of rows")
            )
        return out

    def diag(self, params: Tree, x: Tree) -> Array:
        one = lambda row: self(params, *[jax.tree.map(lambda leaf: leaf[None], row)] * 2)[0, 0]
        return jax.vmap(one)(x)


def matrix(kernel: Kernel, params: Tree, x1: Any, x2: Any = None, dtype: Any = np.float64, block: int = 2048) -> np.ndarray:
    """k(x1, x2) on the host, (n, m), computed block by block in `dtype` and put together there: for kernels whose intermediates would not fit at once.
    With x2=None only the blocks on and below the diagonal are computed."""
    same = x2 is None
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        cast = lambda x: jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), x)
        x1, params = cast(x1), cast(params)
        x2, kernel = x1 if same else cast(x2), kernel.bind(x1)
        compute = jax.jit(lambda params, a, b: kernel(params, a, b))
        out = np.empty((_rows(x1), _rows(x2)), dtype)
        take = lambda x, first: jax.tree.map(lambda leaf: leaf[first : first + block], x)
        for i in range(0, len(out), block):
            for j in range(0, i + 1 if same else out.shape[1], block):
                piece = np.asarray(compute(params, take(x1, i), take(x2, j)))
                out[i : i + block, j : j + block] = piece
                if same and i != j:
                    out[j : j + block, i : i + block] = piece.T
    return out


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


def _rows(x: Tree) -> int:
    return int(jax.tree.leaves(x)[0].shape[0])


def _terms(kernel: Kernel, kind: type) -> tuple[Kernel, ...]:
    return kernel.terms if isinstance(kernel, kind) else (kernel,)  # type: ignore[attr-defined]


def _as_kernel(value: Any) -> Kernel:
    """A kernel, or a positive number v as the constant kernel v."""
    if isinstance(value, Kernel):
        return value
    positive_number("Kernel", "factor", value)
    return Bias(math.sqrt(float(value)))
