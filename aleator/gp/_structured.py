"""Kernels with a structure: regimes, levels, learned features, a function of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.features import columns as as_columns
from aleator.gp._kernel import SCALE, WEAK, Kernel, Number, check_numbers, rows_of
from aleator.hyperpriors import LogNormal, positive_number
from aleator.likelihoods import Positive
from aleator.networks import as_network
from aleator.networks._network import fan_in
from aleator.priors import Normal, Prior


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
        check_numbers(self, "width")

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
        check_numbers(self, "scale")

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
        if out.shape != (rows_of(x1), rows_of(x2)):
            raise ModelError(
                message(
                    "A custom kernel has a wrong shape.", out.shape, f"({rows_of(x1)}, {rows_of(x2)})", "return one number a pair of rows"
                )
            )
        return out

    def diag(self, params: Tree, x: Tree) -> Array:
        one = lambda row: self(params, *[jax.tree.map(lambda leaf: leaf[None], row)] * 2)[0, 0]
        return jax.vmap(one)(x)
