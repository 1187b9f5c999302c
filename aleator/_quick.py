"""Programs that run once: compiled for little compile time, since that is all the time they take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

OPTIONS = ({"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}, {"xla_backend_optimization_level": 0})


def quick(function: Callable, **static: Any) -> Callable:
    """`jax.jit(function, **static)` for what is called once a fit: on CPU it compiles three to seven times as fast and runs several times as
    slowly. Inside another compiled function it is the function itself.

    >>> quick(lambda x: x + 1)(1).item()
    2
    """

    @functools.cache
    def compiled() -> Callable:
        return jax.jit(function, compiler_options=options(), **static)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
        if inside:
            return function(*args)
        try:
            return compiled()(*args)
        except ValueError as error:
            if "compiler_options" not in str(error):
                raise
            return function(*args)  # another function is being traced: options are for programs of their own

    return call


@functools.cache
def options() -> dict[str, Any] | None:
    """The first of OPTIONS that this version of XLA knows; None where programs do not run on the CPU."""
    if jax.default_backend() != "cpu":
        return None
    for known in OPTIONS:
        try:
            jax.jit(lambda: 0, compiler_options=known).lower().compile()
        except Exception:  # JAX names none for an unknown option
            continue
        return known
    return None
