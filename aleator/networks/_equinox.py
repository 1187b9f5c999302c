"""Adapter for Equinox modules, which act on one example and carry their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._typing import Key, Tree
from aleator.networks._network import UserNetwork, check_params


def from_equinox(module: Any, init: Callable[[Key], Any] | None = None) -> UserNetwork:
    """Split a module into its inexact arrays and the rest; `apply` maps it over the batch.

    With key=None the module runs in inference mode (dropout off); with a key each example gets its own.
    """
    layers = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, (eqx.nn.StateIndex, eqx.nn.Dropout)))
    if any(isinstance(layer, eqx.nn.StateIndex) for layer in layers):
        raise ModelError(
            message(
                f"{type(module).__name__} updates state while it runs.",
                "a stateful layer such as equinox.nn.BatchNorm",
                "a network that is a pure function of its parameters",
                "use GroupNorm or LayerNorm, or fold the trained batch statistics into the layer before",
            )
        )
    params, static = eqx.partition(module, eqx.is_inexact_array)
    silent = eqx.nn.inference_mode(static)
    stochastic = any(isinstance(layer, eqx.nn.Dropout) and not layer.inference for layer in layers)
    takes_key = "key" in inspect.signature(type(module).__call__).parameters

    def apply(params: Tree, x: Any, key: Key | None) -> Any:
        if key is None:
            return jax.vmap(eqx.combine(params, silent))(x)
        called = eqx.combine(params, static)
        if not takes_key:
            return jax.vmap(called)(x)
        return jax.vmap(lambda row, k: called(row, key=k))(x, jax.random.split(key, _tree.rows(x)))

    make = None if init is None else lambda key: eqx.filter(init(key), eqx.is_inexact_array)
    return UserNetwork(
        "equinox",
        apply,
        check_params(params, "Equinox"),
        "first",
        make,
        lambda params: eqx.combine(params, static),
        stochastic and takes_key,
    )
