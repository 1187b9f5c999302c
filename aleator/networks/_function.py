"""Adapter for plain functions: (function, params) with function(params, x) or function(params, x, key)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from aleator._typing import Key, Tree
from aleator.networks._network import UserNetwork, check_params


def from_function(function: Callable, params: Tree, init: Callable[[Key], Tree] | None = None) -> UserNetwork:
    """A network from a pure function and its parameters. With a third positional argument it is taken to be random, fed by `key`."""
    takes_key = _positional(function) >= 3

    def apply(params: Tree, x: Any, key: Key | None) -> Any:
        return function(params, x, key) if takes_key else function(params, x)

    return UserNetwork("function", apply, check_params(params, "function"), "last", make=init, stochastic=takes_key)


def _positional(function: Callable) -> int:
    """Number of positional arguments; 2 where the signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
