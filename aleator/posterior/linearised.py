"""A Gaussian over weights, seen through the network's first-order expansion: linearised Laplace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._cache import cached
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.linalg import Blocks, Root
from aleator.model import signature
from aleator.posterior._pieces import by_rows, check_joint, row_bytes
from aleator.posterior._posterior import Score
from aleator.posterior._sampled import Sampled, sampled

MANY_OUTPUTS = 64  # outputs beyond which only their variances are kept, not their covariances
MOMENTS_BUDGET = 64 * 2**20  # bytes alive at once where gradients are taken: smaller pieces stay in the caches


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["likelihood", "value", "gradient", "residual", "mass", "curvature", "basis"],
    meta_fields=["rows"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Taylor:
    """The log-likelihood of rows that are gone, to second order around w*: value + gᵀd − ½dᵀHd, d = w − w*.

    likelihood: its parameters then. gradient g (m,). residual: Σ((y − f)/σ)², where there is a Gaussian noise. mass: Σ weights. curvature: H as
    the structure of the fit has it, along `basis` where that is learned. rows: N.
    """

    likelihood: dict[str, Array]
    value: Array
    gradient: Array
    residual: Array
    mass: Array
    curvature: Any
    basis: Any
    rows: int


@sampled(("mean", "operator", "index", "shift", "tuned", "memory"), ("paths", "link", "linear"))
@dataclasses.dataclass(frozen=True, eq=False)
class Linearised(Sampled):
    """w ~ N(w* + shift, Σ) over the weights with numbers `index`, seen through the network linearised at w*: f(x) = f(x, w*) + J(x)(w − w*).

    mean: the parameters at w*. shift (m,): how far a tuned prior or noise moves their mean. operator: Σ (m, m) as in `aleator.linalg`.
    paths: the leaves that vary (None: all of the network). link: how Gaussian class logits become probabilities, "monte_carlo", "probit"
    (logits divided by √(1 + πv/8)) or "bridge" (the Dirichlet whose logits have these moments). linear=False: draws of weights go through
    the network itself. tuned: what the marginal likelihood has set. memory: what is left of the rows, so that more can be added.
    """

    mean: Tree
    operator: Any
    index: Array
    shift: Array
    tuned: dict[str, Array]
    paths: tuple[str, ...] | None
    link: str
    linear: bool
    log_evidence: Score | None = None
    memory: Taylor | None = None

    @property
    def stats(self) -> tuple[Tree, Taylor] | None:
        """What `fit.update` goes on from: the parameters before anything was tuned, and the Taylor term there."""
        return None if self.memory is None else (self.mean | {"likelihood": self.memory.likelihood}, self.memory)

    def bare(self) -> Linearised:
        return dataclasses.replace(self, log_evidence=None, tuned={}, memory=None)

    def draw(self, key: Key) -> Tree:
        network = self.mean["network"]
        vector = _tree.flat(network)
        noise = jax.random.normal(key, (self.operator.num_noise,), vector.dtype)
        moved = vector.at[self.index].add((self.shift + self.operator.sqrt_matvec(noise)).astype(vector.dtype))
        return self.mean | {"network": _tree.unflat(moved, network)}

    def function(self, key: Key, model: Any, x: Tree) -> tuple[Tree, dict]:
        if not self.linear:
            return super().function(key, model, x)
        mean = self.mean["network"]
        step = jax.tree.map(jnp.subtract, self.draw(key)["network"], mean)
        value, change = jax.jvp(lambda weights: model.apply(weights, x, None), (mean,), (step,))
        return value + change, model.extra(self.mean)

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        if not self.linear:
            return self.functions(key, model, x, num_samples)
        likelihood, double = model.likelihood, _tree.first_dtype(self.operator) == np.float64
        with jax.enable_x64(double or jax.config.read("jax_enable_x64")):
            extra = jax.tree.map(np.asarray, model.extra(jax.tree.map(jnp.asarray, self.mean)))
            linked = likelihood.support == "label" or (self.link == "probit" and likelihood.support == "binary")
            mean, spread = self.moments(model, _tree.as_float64(x) if double else x, variance=self.link == "probit" or not linked)
            if linked:
                logits = _linked(jax.random.clone(key), mean, spread, self.link, num_samples)
                return Outputs(draws=logits, extra=jax.tree.map(lambda leaf: np.broadcast_to(leaf, (len(logits), *leaf.shape)), extra))
            variance = spread if spread.ndim == 2 else np.diagonal(spread, axis1=1, axis2=2)
            return Outputs(mean=mean, variance=np.maximum(variance, 0.0), extra=extra)

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """f(x, w*) + J·shift and JΣJᵀ over all rows, one column at a time: back through the network, Σ, and forward; J is never formed."""
        if not self.linear:
            return super().joint(key, model, x, num_samples)
        double = _tree.first_dtype(self.operator) == np.float64
        check_joint(_tree.rows(x) * model.likelihood.num_outputs(model.targets()))
        with jax.enable_x64(double or jax.config.read("jax_enable_x64")):
            mean, covariance = _joint(model)(self.bare(), _tree.as_float64(x) if double else x)
            return np.asarray(mean, np.float64), np.asarray(covariance, np.float64).reshape(*mean.shape, *mean.shape)

    def moments(self, model: Any, x: Tree, variance: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Mean (rows, k) and covariance (rows, k, k) of f at each row; with `variance`, or where there are many outputs, only (rows, k)."""
        bare = self.bare()
        compute, plan = _moments(model, signature(x), self.paths, _kind(self.operator), variance)
        outputs = model.likelihood.num_outputs(model.targets())
        numbers = curvature.numbers_per_row(plan, outputs, isinstance(self.operator, Blocks))
        return by_rows(lambda rows: compute(bare, rows), x, lambda rows: rows * (8 * numbers + row_bytes(model, x)), budget=MOMENTS_BUDGET)


@cached
def _joint(model: Any) -> Callable:
    def compute(posterior: Any, x: Tree) -> tuple[Array, Array]:
        network = posterior.mean["network"]
        start = _tree.flat(network)
        outputs = lambda part: model.apply(_tree.unflat(start.at[posterior.index].add(part), network), x, None)
        zero = jnp.zeros(posterior.index.shape, start.dtype)
        value, forward = jax.linearize(outputs, zero)
        back = jax.linear_transpose(forward, zero)

        def column(unit: Array) -> Array:
            spread = posterior.operator.matvec(back(unit.reshape(value.shape))[0])
            return forward(spread.astype(start.dtype)).ravel()

        return value + forward(posterior.shift.astype(start.dtype)), jax.lax.map(column, jnp.eye(value.size, dtype=value.dtype))

    return jax.jit(compute)


def _kind(operator: Any) -> str:
    return "blocks" if isinstance(operator, Blocks) else "root" if isinstance(operator, Root) else "other"


@cached
def _moments(model: Any, shapes: Any, paths: tuple[str, ...] | None, kind: str, variance: bool) -> tuple[Callable, curvature.Layout]:
    """Mean and covariance of linearised outputs, compiled once per model and choice of weights; and how these are laid out."""
    plan = curvature.layout(model, shapes, paths)
    many = model.likelihood.num_outputs(model.targets()) > MANY_OUTPUTS
    size = len(plan.rest) + sum(block.numbers.size for block in plan.blocks)

    def moments(posterior: Any, x: Tree) -> tuple[Array, Array]:
        weights, operator = posterior.mean["network"], posterior.operator
        if kind == "blocks":  # never shifted: that needs the curvature in full
            return curvature.function_covariance(model, weights, x, plan, operator, variance, many)
        if kind == "root" and plan.direct and len(posterior.index) == size:
            seen = curvature.tap(model, weights, x, plan)
            rows, places = seen.inputs[0][:, 0], np.argsort(curvature.order(plan)).reshape(plan.blocks[0].numbers.shape)
            return seen.outputs + rows @ posterior.shift[places], operator.rows(rows, places, variance or many)
        mean, slopes = curvature.jacobian(model, weights, x, plan)
        slopes = slopes if len(posterior.index) == size else slopes[:, :, posterior.index]
        spread = operator.sandwich(slopes)
        return mean + slopes @ posterior.shift, jnp.diagonal(spread, axis1=1, axis2=2) if variance or many else spread

    return jax.jit(moments), plan


def _linked(key: Key, mean: np.ndarray, spread: np.ndarray, link: str, num_samples: int) -> np.ndarray:
    """Gaussian logits as draws (S, rows, k): one of them where a closed rule stands for the average."""
    variance = spread if spread.ndim == 2 else np.diagonal(spread, axis1=1, axis2=2)
    if link == "probit":
        return (mean / np.sqrt(1.0 + np.pi / 8.0 * variance))[None]
    if link == "bridge":
        return _bridge(np.asarray(mean, np.float64), np.asarray(spread, np.float64))[None].astype(mean.dtype)
    noise = np.asarray(jax.random.normal(key, (num_samples, *mean.shape), mean.dtype))
    if spread.ndim == 2:
        return mean + np.sqrt(np.maximum(variance, 0.0)) * noise
    values, vectors = np.linalg.eigh(spread)  # of k × k: singular where classes move together
    root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    return mean + np.einsum("nij,snj->sni", root, noise)


def _bridge(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """log α of the Dirichlet whose logits, on the plane Σ f = 0, have these moments (Hobbhahn, Kristiadi and Hennig 2022).

    The rule is made for spreads up to about one and fails for wider ones: means and wide variances are brought to that size first, as its authors
    do in practice.
    """
    k = mean.shape[1]
    if spread.ndim == 2:
        spread = spread[:, :, None] * np.eye(k)
    rows, total, trace = spread.sum(axis=2), spread.sum(axis=(1, 2))[:, None], np.trace(spread, axis1=1, axis2=2)[:, None]
    share = np.where(total > 1e-9 * trace, 1.0 / np.maximum(total, 1e-300), 0.0)  # nothing to take away where f is on the plane already
    mean = mean - rows * mean.sum(axis=1, keepdims=True) * share
    variance = np.maximum(np.diagonal(spread, axis1=1, axis2=2) - rows**2 * share, 1e-12)
    size = np.maximum(variance.mean(axis=1, keepdims=True) / np.sqrt(0.5 * k), 1.0)
    mean, variance = mean / np.sqrt(size), variance / size
    inner = np.exp(mean) / k**2 * np.sum(np.exp(-mean), axis=1, keepdims=True)
    return np.log(np.maximum((1.0 - 2.0 / k + inner) / variance, 1e-300))
