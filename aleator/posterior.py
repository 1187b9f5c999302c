"""Posteriors: few kinds for many methods. The one required skill is a distribution over the outputs f(x).

`outputs(key, model, x, num_samples)` → Outputs. Weight draws are made once and then applied to all rows, in pieces that fit a byte
budget: how rows are cut cannot change which functions were drawn.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.linalg import DensePrecision

BYTE_BUDGET = 256 * 2**20  # bytes of outputs and activations (estimated) alive at once while predicting
ACTIVATION_FACTOR = 64  # activations per input entry assumed by that estimate


class Score(NamedTuple):
    """A log evidence in nats. kind: "exact", "lower bound", "upper bound" or "estimate"; stderr 0 for exact ones."""

    value: float
    stderr: float
    kind: str


class Posterior(abc.ABC):
    """What a Fit asks of a posterior."""

    log_evidence: Score | None

    @abc.abstractmethod
    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """The distribution of f at the rows of x."""

    @abc.abstractmethod
    def sample(self, key: Key, num_samples: int) -> Tree:
        """Parameter draws, leaves (num_samples, …)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Point(Posterior):
    """All mass on one parameter tree (MAP)."""

    params: Tree
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return _draw_outputs(model, jax.tree.map(lambda leaf: leaf[None], self.params), x, None)

    def sample(self, key: Key, num_samples: int) -> Tree:
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], num_samples, axis=0), self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class Draws(Posterior):
    """Parameter draws, leaves (S, …), with weights (S,) summing to one, or None for equal ones. All are used at every prediction."""

    params: Tree
    weights: np.ndarray | None = None
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return _draw_outputs(model, self.params, x, self.weights)

    def sample(self, key: Key, num_samples: int) -> Tree:
        chosen = jax.random.choice(
            key, _tree.rows(self.params), (num_samples,), p=None if self.weights is None else jnp.asarray(self.weights)
        )
        return _tree.take(self.params, chosen)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearGaussian(Posterior):
    """The exact posterior of a `LinearModel`, in float64.

    mean (k, p) and operator (k blocks of p × p): wⱼ ~ N(meanⱼ, Σⱼ), noise scale (k,) known; or, with concentration a and rate b (k,):
    σⱼ² ~ InvGamma(a, bⱼ), wⱼ | σⱼ ~ N(meanⱼ, σⱼ²Σⱼ), so that outputs and y are Student-t with 2a degrees of freedom.
    stats: the sufficient statistics, kept so that more data can be added.
    """

    mean: np.ndarray
    operator: DensePrecision
    scale: np.ndarray | None
    concentration: np.ndarray | None
    rate: np.ndarray | None
    stats: Tree
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            features = _by_rows(_features(model), x, lambda rows: rows * self.operator.size * 8)
        mean = features @ self.mean.T
        if self.scale is not None:
            return Outputs(mean=mean, variance=self.operator.quadratic(features), extra={"scale": self.scale})
        variance = self.operator.quadratic(features) * (self.rate / self.concentration)
        return Outputs(mean=mean, variance=variance, df=2.0 * self.concentration, extra={"scale": np.sqrt(self.rate / self.concentration)})

    def sample(self, key: Key, num_samples: int) -> Tree:
        """Draws in the model's own parameters; with unknown noise the weights are in units of it, as `scaled_by_noise` has them."""
        key_noise, key_weights = jax.random.split(key)
        with jax.enable_x64(True):
            z = np.asarray(jax.random.normal(key_weights, (num_samples, *self.mean.shape), jnp.float64))
            spread = self.operator.sqrt_matvec(z)
            if self.scale is not None:
                return {"network": {"weight": self.mean + spread}, "likelihood": {}, "prior": {}}
            gamma = np.asarray(jax.random.gamma(key_noise, self.concentration, (num_samples, *self.rate.shape), jnp.float64))
        sigma = np.sqrt(self.rate / gamma)
        return {"network": {"weight": self.mean / sigma[..., None] + spread}, "likelihood": {"log_scale": np.log(sigma)}, "prior": {}}


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Posterior):
    """A weighted mixture of posteriors over the same parameters; num_samples is shared among the components."""

    components: tuple[Posterior, ...]
    weights: np.ndarray | None = None
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        keys = jax.random.split(key, len(self.components))
        share = max(1, num_samples // len(self.components))
        draws = [component.sample(k, share) for component, k in zip(self.components, keys, strict=True)]
        params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *draws)
        weights = None if self.weights is None else np.repeat(np.asarray(self.weights) / share, share)
        return _draw_outputs(model, params, x, weights)

    def sample(self, key: Key, num_samples: int) -> Tree:
        key_which, key_draw = jax.random.split(key)
        weights = None if self.weights is None else jnp.asarray(self.weights)
        which = np.asarray(jax.random.choice(key_which, len(self.components), (num_samples,), p=weights))
        draws = _tree.stack(
            [c.sample(k, num_samples) for c, k in zip(self.components, jax.random.split(key_draw, len(self.components)), strict=True)]
        )
        return jax.tree.map(lambda leaf: leaf[which, np.arange(num_samples)], draws)


def _draw_outputs(model: Any, params: Tree, x: Tree, weights: Array | None) -> Outputs:
    """Outputs of every draw at every row: leaves (S, rows, …)."""
    num_draws = _tree.rows(params)
    params = jax.tree.map(jnp.asarray, params)
    apply = _evaluator(model)
    width = sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(x)) if x is not None else 1
    draws = _by_rows(lambda rows: apply(params, rows), x, lambda rows: num_draws * rows * width * 4 * ACTIVATION_FACTOR, axis=1)
    extra = jax.tree.map(np.asarray, _extras(model)(params))
    return Outputs(draws=draws, weights=None if weights is None else np.asarray(weights), extra=extra)


@cached
def _evaluator(model: Any) -> Callable:
    """outputs(params with leading axis, x), compiled once per model."""
    return jax.jit(lambda params, x: jax.vmap(lambda p: model.outputs(p, x, None))(params))


@cached
def _features(model: Any) -> Callable:
    """Φ(x) in double precision, for the exact posterior."""
    return jax.jit(lambda x: model.features(_tree.as_float64(x)))


@cached
def _extras(model: Any) -> Callable:
    return jax.jit(jax.vmap(model.extra))


def _by_rows(function: Callable, x: Tree, cost: Callable[[int], int], axis: int = 0, budget: int | None = None) -> Tree:
    """function(x) in pieces of rows whose estimated cost in bytes fits the budget, put together on the host."""
    budget = BYTE_BUDGET if budget is None else budget
    if x is None:
        return jax.tree.map(np.asarray, function(None))
    num_rows = _tree.rows(x)
    step = num_rows
    while step > 1 and cost(step) > budget:
        step = -(-step // 2)
    if step == num_rows:
        return jax.tree.map(np.asarray, function(jax.tree.map(jnp.asarray, x)))
    pieces = []
    for first in range(0, num_rows, step):
        # The last piece is filled up with repeated rows, so that all pieces share one compiled call.
        index = np.minimum(np.arange(first, first + step), num_rows - 1)
        real = min(step, num_rows - first)
        cut = (slice(None),) * axis + (slice(real),)
        out = function(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), x))  # noqa: B023
        pieces.append(jax.tree.map(lambda leaf: np.asarray(leaf)[cut], out))  # noqa: B023
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=axis), *pieces)


def mixture(posteriors: list[Any], weights: np.ndarray | None = None) -> Posterior:
    """Points and draws of equal number join into Draws; other kinds into a Mixture."""
    if not posteriors:
        raise ModelError(message("There is nothing to mix.", "0 posteriors", "at least one", "pass the members' posteriors"))
    if len(posteriors) == 1:
        return posteriors[0]
    if all(isinstance(p, Point) for p in posteriors):
        return Draws(_tree.stack([p.params for p in posteriors]), weights)
    if (
        all(isinstance(p, Draws) and p.weights is None for p in posteriors)
        and weights is None
        and len({_tree.rows(p.params) for p in posteriors}) == 1
    ):
        return Draws(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[p.params for p in posteriors]))
    return Mixture(tuple(posteriors), weights)
