"""The posterior over functions of a deep Gaussian process: draws through its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._cache import cached
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.gp.conditioned import extras
from aleator.posterior import Draws, Point, Posterior, Score, check_joint


@dataclasses.dataclass(frozen=True, eq=False)
class Layered(Posterior):
    """f of a deep process: draws through the layers. base: a Point with all its parameters, or draws of them."""

    base: Any
    log_evidence: Score | None = None

    @property
    def params(self) -> Tree:
        return self.base.params

    def sample(self, key: Key, num_samples: int) -> Tree:
        return self.base.sample(key, num_samples)

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """Rows apart: each drawn through all layers, the last layer from its Gaussian."""
        with jax.enable_x64(True):
            key_params, key_f = jax.random.split(key)
            params = self._params(key_params, num_samples)
            size = max(layer.num_inducing * layer.num_processes() for layer in model.layers)
            step = max(1, (64 * 2**20) // (8 * size))
            pieces = []
            for number, first in enumerate(range(0, _tree.rows(x), step)):
                keys = jax.random.split(jax.random.fold_in(key_f, number), num_samples)
                rows = jnp.asarray(np.asarray(x)[first : first + step])
                pieces.append(np.asarray(_marginal_draws(model)(keys, params, rows)))
            return Outputs(draws=np.concatenate(pieces, axis=1), extra=self._extra(model, params, num_samples))

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            key_params, key_f = jax.random.split(key)
            params = self._params(key_params, num_samples)
            draws = self._layers(key_f, model, params, x, num_samples)[-1]
            return Outputs(draws=draws, extra=self._extra(model, params, num_samples))

    def layers(self, key: Key, model: Any, x: Tree, num_samples: int) -> list[np.ndarray]:
        """Draws of every layer as functions of x, [(num_samples, rows, o₁), …], each jointly over all rows."""
        with jax.enable_x64(True):
            key_params, key_f = jax.random.split(key)
            return self._layers(key_f, model, self._params(key_params, num_samples), x, num_samples)

    def _layers(self, key: Key, model: Any, params: Tree, x: Tree, num_samples: int) -> list[np.ndarray]:
        check_joint(_tree.rows(x))
        return [np.asarray(part) for part in _layer_draws(model)(jax.random.split(key, num_samples), params, jnp.asarray(x))]

    def _params(self, key: Key, num_samples: int) -> Tree:
        """One set of parameters for each draw of f: a leading axis of num_samples, or of 1 where all are the same."""
        if isinstance(self.base, Point):
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], self.base.params)
        if isinstance(self.base, Draws) and self.base.weights is None:
            chosen = np.linspace(0, _tree.rows(self.base.params) - 1, num_samples).round().astype(np.int32)
            return jax.tree.map(jnp.asarray, _tree.take(self.base.params, chosen))
        return jax.tree.map(jnp.asarray, self.base.sample(key, num_samples))

    def _extra(self, model: Any, params: Tree, num_samples: int) -> dict:
        each = extras(model, params, _tree.rows(params))
        return jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (num_samples, *leaf.shape[1:])), each)


@cached
def _marginal_draws(model: Any) -> Callable:
    def one(key: Key, params: Tree, x: Array) -> Array:
        key_inner, key_last = jax.random.split(key)
        mean, variance = model.moments(key_inner, params, x)
        return mean + jnp.sqrt(variance) * jax.random.normal(key_last, mean.shape)

    return jax.jit(lambda keys, params, x: _each(keys, params, lambda key, p: one(key, p, x)))


@cached
def _layer_draws(model: Any) -> Callable:
    return jax.jit(lambda keys, params, x: _each(keys, params, lambda key, p: model.function(key, p, x)))


def _each(keys: Key, params: Tree, function: Callable) -> Any:
    """function(key, params) for every key, with its own set of parameters where there is one each."""
    if _tree.rows(params) == len(keys):
        return jax.lax.map(lambda both: function(*both), (keys, params))
    return jax.lax.map(lambda key: function(key, _tree.take(params, 0)), keys)
