"""How sequences come into a network: real vectors (n, T, d), or tokens (n, T) looked up in a table, −1 where a sequence has ended."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.networks.mlp import check_sizes


def check_sequence_sizes(name: str, in_size: int | None, vocabulary: int | None) -> None:
    """Exactly one of the two says what a step of a sequence is."""
    if (in_size is None) == (vocabulary is None):
        raise ModelError(
            message(
                f"{name} does not know what a step of a sequence is.",
                f"in_size={in_size}, vocabulary={vocabulary}",
                "one of them, the other None",
                "pass in_size=d for x of shape (n, T, d), or in_size=None, vocabulary=V for tokens 0 … V − 1 of shape (n, T)",
            )
        )
    check_sizes(name, in_size or vocabulary or 0)


def check_sequence(name: str, x: Any, in_size: int | None, length: int | None = None) -> None:
    """Refuse a batch that is not (n, T, in_size), or (n, T) for tokens; length: the largest T."""
    expected = "(n, T)" if in_size is None else f"(n, T, {in_size})"
    if x.ndim != (2 if in_size is None else 3) or (in_size is not None and x.shape[2] != in_size):
        raise ModelError(
            message(f"{name} cannot take this x.", f"shape {tuple(x.shape)}", expected, "put rows first, steps second, features third")
        )
    if length is not None and x.shape[1] > length:
        raise ModelError(message(f"{name} has no positions for this x.", f"T = {x.shape[1]}", f"T ≤ {length}", "pass a larger length"))


def table_init(key: Key, rows: int, width: int) -> Tree:
    """One vector from N(0, I) for each row."""
    return {"weight": jax.random.normal(key, (rows, width))}


def look_up(table: Tree, tokens: Array) -> tuple[Array, Array]:
    """Vectors (n, T, width) and which of them are real (n, T). Tokens may be stored as floats."""
    real = tokens >= 0
    rows = jnp.take(table["weight"], jnp.maximum(tokens, 0).astype(jnp.int32), axis=0, mode="clip")
    return jnp.where(real[..., None], rows, 0.0), real
