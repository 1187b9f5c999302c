"""Programs compiled for what they are: those that run once for little compile time, those that run for long for speed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

ONCE = ({"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}, {"xla_backend_optimization_level": 0})
# XLA keeps to half of the width of processors with AVX-512, whose first kind slowed down at full width (docs/decisions/0027).
LONG = ({"xla_cpu_prefer_vector_width": 512},)


def quick(function: Callable, **static: Any) -> Callable:
    """`jax.jit(function, **static)` for what is called once a fit: on CPU it compiles three to seven times as fast and runs several times as
    slowly. Inside another compiled function it is the function itself.

    >>> quick(lambda x: x + 1)(1).item()
    2
    """
    return _jit(function, ONCE, static)


def wide(function: Callable, **static: Any) -> Callable:
    """`jax.jit(function, **static)` for what runs for long: on CPU with vectors as wide as the processor has them.

    >>> wide(lambda x: x + 1)(1).item()
    2
    """
    return _jit(function, LONG, static)


def _jit(function: Callable, choices: tuple[dict[str, Any], ...], static: dict[str, Any]) -> Callable:
    @functools.cache
    def compiled() -> Callable:
        return jax.jit(function, compiler_options=options(choices), **static)

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
def _known(choice: tuple[tuple[str, Any], ...]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=dict(choice)).lower().compile()
    except Exception:  # JAX names none for an unknown option
        return False
    return True


def options(choices: tuple[dict[str, Any], ...]) -> dict[str, Any] | None:
    """The first of these that this version of XLA knows; None where programs do not run on the CPU."""
    if jax.default_backend() != "cpu":
        return None
    return next((choice for choice in choices if _known(tuple(choice.items()))), None)
