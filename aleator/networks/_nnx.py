"""Adapter for Flax NNX modules, which act on a batch and may carry batch statistics and random streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aleator._errors import ModelError, message
from aleator._typing import Key, Tree
from aleator.networks._network import UserNetwork, check_params


def from_nnx(module: Any, init: Callable[[Key], Any] | None = None) -> UserNetwork:
    """Split a module into Params, random streams and the rest; `apply` merges a fresh copy, so nothing is mutated.

    With key=None the copy runs in evaluation mode; with a key its random streams are reseeded from it.
    """
    parts = [part for _, part in nnx.iter_modules(module)]
    if any(isinstance(part, nnx.BatchNorm) and not part.use_running_average for part in parts):
        raise ModelError(
            message(
                f"{type(module).__name__} updates batch statistics while it runs.",
                "flax.nnx.BatchNorm in training mode",
                "a network that is a pure function of its parameters",
                "train it first and call module.eval() to freeze its statistics, or use GroupNorm or LayerNorm",
            )
        )
    stochastic = any(isinstance(part, nnx.Dropout) and not part.deterministic and part.rate > 0 for part in parts)
    graph, params, random, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    leaves, streams = jax.tree.flatten(random)

    def merge(params: Tree, random: Any) -> Any:
        filled = nnx.State(jax.tree.map(lambda old, new: old.replace(new), _variables(nnx_params), params, is_leaf=_is_variable))
        return nnx.merge(graph, filled, random, rest, copy=True)

    def apply(params: Tree, x: Any, key: Key | None) -> Any:
        if key is None:
            merged = merge(params, random)
            merged.eval()
            return merged(x)
        keys = iter(jax.random.split(key, max(len(leaves), 1)))
        fresh = [next(keys) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf) for leaf in leaves]
        return merge(params, jax.tree.unflatten(streams, fresh))(x)

    nnx_params = params
    make = None if init is None else lambda key: nnx.to_pure_dict(nnx.state(init(key), nnx.Param))
    pure = check_params(nnx.to_pure_dict(params), "NNX")
    return UserNetwork("nnx", apply, pure, "last", make, lambda params: merge(params, random), stochastic)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _variables(state: Any) -> Any:
    """The state as nested dicts with Variables as leaves."""
    return state.raw_mapping if hasattr(state, "raw_mapping") else dict(state)
