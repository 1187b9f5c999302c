"""Functions drawn from a posterior, to be evaluated inside compiled code: for forecasts and explanations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._random import noise_key
from aleator._typing import Array, Key, Tree
from aleator.posterior import Draws, Sampled


class Functions(NamedTuple):
    """S functions. given: parameter draws, leaves (S, …), or (posterior, key data (S, …)) where noise is not a function of the weights alone.
    drawn: which of the two. number: S. num_chains: the draws are those of so many chains, one after the other."""

    given: Any
    drawn: bool
    number: int
    num_chains: int

    @property
    def axes(self) -> Any:
        """Of `given`, for vmap over functions."""
        return 0 if self.drawn else (None, 0)


def draw(key: Key, fit: Any, num_samples: int, ordered: bool = False) -> Functions:
    """num_samples functions of a fit. ordered: where the posterior is a set of draws, take them as they are, at most num_samples at even
    distances, so that autocorrelation can still be seen; else each is drawn anew."""
    posterior = fit.posterior
    if isinstance(posterior, Sampled) and type(posterior).draw is Sampled.draw:
        bare = dataclasses.replace(posterior, log_evidence=None)  # type: ignore[type-var]
        return Functions((bare, jax.random.key_data(jax.random.split(key, num_samples))), False, num_samples, 1)
    if ordered and isinstance(posterior, Draws) and posterior.weights is None:
        total, chains = _tree.rows(posterior.params), posterior.num_chains
        index = np.arange(total).reshape(chains, -1)[:, :: -(-total // num_samples)].ravel()
        return Functions(jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], posterior.params), True, len(index), chains)
    return Functions(jax.tree.map(jnp.asarray, posterior.sample(key, num_samples)), True, num_samples, 1)


def evaluator(model: Any, drawn: bool) -> Callable[[Any, Tree], tuple[Tree, dict]]:
    """(one of `given`, x) → outputs f(x) and the likelihood's parameters, the same function at every call."""

    def outputs(given: Any, x: Array) -> tuple[Tree, dict]:
        if drawn:
            return model.outputs(given, x, None), model.extra(given)
        posterior, key = given
        return posterior.function(noise_key(jax.random.wrap_key_data(key)), model, x)

    return outputs
