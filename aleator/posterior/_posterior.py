"""What every posterior is, and the outputs of parameter draws."""

from __future__ import annotations

import abc
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
from aleator.posterior._pieces import by_rows, check_joint, row_bytes


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

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """Draws of f, each one function at all rows, where `outputs` may know the rows one by one only."""
        with jax.enable_x64(True):  # exact posteriors are held in double precision
            return draw_outputs(model, self.sample(key, num_samples), x, None)

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean (rows, k) and covariance (rows, k, rows, k) of f at all rows together: of draws, unless it is known in closed form."""
        draws = np.asarray(self.functions(key, model, x, num_samples).draws, np.float64)
        if draws.ndim != 3:
            raise ModelError(message("f is no table here.", f"shape {draws.shape[1:]}", "(rows, k)", "use fit.functions(key, x)"))
        check_joint(draws.shape[1] * draws.shape[2])
        flat = (draws - draws.mean(axis=0)).reshape(len(draws), -1)
        return draws.mean(axis=0), (flat.T @ flat / max(len(flat) - 1, 1)).reshape(*draws.shape[1:], *draws.shape[1:])


def draw_outputs(model: Any, params: Tree, x: Tree, weights: Array | None) -> Outputs:
    """Outputs of every draw at every row: leaves (S, rows, …)."""
    num_draws = _tree.rows(params)
    params = jax.tree.map(jnp.asarray, params)
    apply, per_row = _evaluator(model), row_bytes(model, x)
    draws = by_rows(lambda rows: apply(params, rows), x, lambda rows: num_draws * rows * per_row, axis=1)
    extra = jax.tree.map(np.asarray, _extras(model)(params))
    return Outputs(draws=draws, weights=None if weights is None else np.asarray(weights), extra=extra)


@cached
def _evaluator(model: Any) -> Callable:
    """outputs(params with leading axis, x), compiled once per model."""
    return jax.jit(lambda params, x: jax.vmap(lambda p: model.outputs(_computable(p), x, None))(params))


@cached
def _extras(model: Any) -> Callable:
    return jax.jit(jax.vmap(lambda p: model.extra(_computable(p))))


def _computable(params: Tree) -> Tree:
    """Draws stored in half precision are read in single."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf, params)
