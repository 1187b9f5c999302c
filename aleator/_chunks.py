"""What the driver compiles: pure functions built from an Algorithm, one executable per phase, kind of batches and shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aleator._feed import batch_at, prepare
from aleator._random import noise_key
from aleator._typing import Array, Key, Tree


def per_member(function: Callable, stacked: bool) -> Callable:
    """The function itself, or mapped over the leading member axis."""
    return jax.vmap(function) if stacked else function


@functools.lru_cache(maxsize=256)
def compiled_init(algorithm: Any) -> Callable:
    """init(key_init, key_steps, starts) → (state, step keys (members,)), in one call; states get strong types, as steps return them."""

    def start(key_init: Key, key_steps: Key, starts: Tree) -> tuple[Any, Key]:
        number = algorithm.members or 1
        keys = jax.vmap(noise_key)(jax.random.split(key_steps, number))
        if algorithm.members is None:
            state = algorithm.init(key_init, starts)
        else:
            state = jax.vmap(algorithm.init)(jax.random.split(key_init, number), starts)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state), keys

    return jax.jit(start)


@functools.lru_cache(maxsize=256)
def compiled(algorithm: Any, step: Callable, kind: str, driver: str, stacked: bool, fed: bool) -> Callable:
    """advance(state, key, first, count, data, feed, capacity) → (state, infos, kept, ran): `count` steps, or the `ran` that it took until
    `done`, compiled once per shape; phases with the same step share it."""

    def one_step(state: Any, key: Key, number: Any, i: Any, data: Any, feed: Any) -> tuple[Any, Any, Any]:
        state, info = step(jax.random.fold_in(key, number), state, batch_at(kind, data, feed, i))
        return state, info, None if algorithm.keep is None else algorithm.keep(state, info)

    def chunk(state: Any, key: Key, first: Any, count: Any, data: Any, feed: Any, capacity: int) -> tuple[Any, Any, Any, Array]:
        data = prepare(kind, data, feed)
        _, info, kept = jax.eval_shape(one_step, state, key, first, 0, data, feed)
        buffers = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), (info, kept))

        def going(carry: Any) -> Array:
            i, state, _ = carry
            # A frozen member under vmap keeps its state: while_loop selects per member.
            return (i < count) if algorithm.done is None else (i < count) & ~algorithm.done(state)

        def body(carry: Any) -> Any:
            i, state, buffers = carry
            state, *out = one_step(state, key, first + i, i, data, feed)
            return i + 1, state, jax.tree.map(lambda buffer, value: buffer.at[i].set(value), buffers, tuple(out))

        ran, state, (infos, keeps) = jax.lax.while_loop(going, body, (jnp.zeros((), jnp.int32), state, buffers))
        return state, infos, keeps, ran

    axes = (0, 0, None, None, None, 0 if fed else None)
    if driver == "loop":

        def mapped(state: Any, key: Key, first: Any, count: Any, data: Any, feed: Any, capacity: int) -> tuple[Any, ...]:
            return jax.vmap(functools.partial(chunk, capacity=capacity), in_axes=axes)(state, key, first, count, data, feed)

        return jax.jit(mapped if stacked else chunk, static_argnums=6)

    prepared = jax.jit(
        jax.vmap(lambda d, f: prepare(kind, d, f), in_axes=(None, 0 if fed else None))
        if stacked and kind == "full" and fed
        else lambda d, f: prepare(kind, d, f)
    )
    data_axis = 0 if kind == "full" and fed else None

    def member_step(state: Any, *rest: Any) -> tuple[Any, Any, Any]:
        new, info, kept = one_step(state, *rest)
        if algorithm.done is not None:
            over = algorithm.done(state)
            new = jax.tree.map(lambda old, moved: jnp.where(over, old, moved), state, new)
        return new, info, kept

    single = jax.jit(jax.vmap(member_step, in_axes=(0, 0, None, None, data_axis, 0 if fed else None)) if stacked else one_step)

    def python_chunk(state: Any, key: Key, first: int, count: int, data: Any, feed: Any, capacity: int) -> tuple[Any, Any, Any, int]:
        data = prepared(data, feed)
        outs = []
        for i in range(count):
            state, *out = single(state, key, first + i, i, data, feed)
            outs.append(tuple(out))
            if algorithm.done is not None and bool(jnp.all(per_member(algorithm.done, stacked)(state))):
                break
        axis, count = 1 if stacked else 0, len(outs)
        pad = lambda leaf: jnp.concatenate(
            [leaf, jnp.zeros((*leaf.shape[:axis], capacity - count, *leaf.shape[axis + 1 :]), leaf.dtype)], axis
        )
        infos, keeps = jax.tree.map(lambda *leaves: pad(jnp.stack(leaves, axis)), *outs)
        return state, infos, keeps, count

    return python_chunk


@functools.lru_cache(maxsize=256)
def compiled_check(algorithm: Any) -> Callable:
    def check(state: Any, held: Any, stacked: bool) -> Any:
        return per_member(algorithm.check, stacked)(state, held)

    return jax.jit(check, static_argnames="stacked")
