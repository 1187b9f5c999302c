"""Keys: what the user may pass, and the fast generator used inside steps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import AleatorError, message
from aleator._quick import quick
from aleator._typing import Key, KeyLike


def as_key(key: KeyLike) -> Key:
    """A typed JAX key from an int, a typed key, or a legacy `uint32[2]` key.

    >>> as_key(0).dtype == jax.random.key(0).dtype
    True
    """
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return jax.random.key(int(key))
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if isinstance(key, (jax.Array, np.ndarray)) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(key))
    shape = getattr(key, "shape", None)
    what = type(key).__name__ + (f" of shape {shape}, dtype {getattr(key, 'dtype', '?')}" if shape is not None else f" {key!r}")
    raise AleatorError(
        message(
            "The first argument must be a random key.",
            what,
            "an int seed or a single jax.random.key",
            "pass e.g. 0 or jax.random.key(0) first",
        )
    )


def noise_key(key: Key) -> Key:
    """The same randomness on the `philox2x32` generator, about twice as fast on CPU."""
    return jax.random.key(jax.random.bits(key, dtype=jnp.uint32), impl="philox2x32")


def fold(key: Key, number: Any) -> Key:
    """`fold_in(key, number)` for the step number ≥ 0 of a compiled loop, bit for bit. The key is made to depend on the number, by a zero that
    XLA does not see through: it would otherwise take the generator's ten round keys out of the loop, each a kernel to compile."""
    zero = (jnp.asarray(number, jnp.int32) >> 31).astype(jnp.uint32)
    return jax.random.fold_in(jax.random.wrap_key_data(jax.random.key_data(key) ^ zero, impl=jax.random.key_impl(key)), number)


@functools.partial(quick, static_argnums=1)
def split(key: Key, num: int) -> tuple[Key, ...]:
    """`num` keys as a tuple, in one compiled call (unpacking an array of keys compiles once more per key)."""
    return tuple(jax.random.split(key, num))


def seed_of(key: Key) -> int:
    """A 64-bit host seed that depends on the whole key; feeds NumPy generators for batch orders."""
    words = np.asarray(jax.random.key_data(key)).astype(np.uint32).ravel()
    return int(np.random.SeedSequence(words.tolist()).generate_state(1, np.uint64)[0])


def seeds_of(key: Key, num: int) -> list[int]:
    """`num` independent host seeds."""
    return [int(seed) for seed in np.random.SeedSequence(seed_of(key)).generate_state(num, np.uint64)]
