"""What the driver compiles: pure functions built from an Algorithm, one executable per phase, kind of batches and shape."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._feed import batch_at, prepare
from aleator._quick import quick, wide
from aleator._random import fold, noise_key
from aleator._typing import Array, Key, Tree


def per_member(function: Callable, stacked: bool) -> Callable:
    """The function itself, or mapped over the leading member axis."""
    return jax.vmap(function) if stacked else function


@functools.lru_cache(maxsize=256)
def compiled_init(algorithm: Any, groups: tuple[range, ...]) -> Callable:
    """init(key_init, key_steps, starts) → (states, step keys), one of each per group of members, in one call; states get strong types, as
    steps return them."""

    def start(key_init: Key, key_steps: Key, starts: Tree) -> tuple[list[Any], list[Key]]:
        number = algorithm.members or 1
        keys = jax.vmap(noise_key)(jax.random.split(key_steps, number))
        if algorithm.members is None:
            state = algorithm.init(key_init, starts)
        else:
            state = jax.vmap(algorithm.init)(jax.random.split(key_init, number), starts)
        state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
        return [state] if algorithm.members is None else [share(state, g) for g in groups], [share(keys, g) for g in groups]

    return quick(start)


def share(tree: Tree, group: range) -> Tree:
    """A group's part of what all members have: one member alone has no leading axis, so that it runs exactly as it would by itself."""
    return jax.tree.map(lambda leaf: leaf[group.start] if len(group) == 1 else leaf[group.start : group.stop], tree)


@functools.lru_cache(maxsize=256)
def compiled_position(algorithm: Any, stacked: bool) -> Callable:
    """position(state), or of all members of a group."""
    return quick(per_member(algorithm.position, stacked))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("scalars", "rest"), meta_fields=("structure", "kinds"))
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree whose scalars travel together, one vector per dtype: every array that a loop writes is a kernel to compile.

    kinds: for each leaf of `structure` the dtype of a scalar, or None for an array of `rest`.
    """

    scalars: dict[str, Array]
    rest: list[Array]
    structure: Any
    kinds: tuple[str | None, ...]


def pack(tree: Any) -> Packed:
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]  # `keep` may answer a plain True
    kinds = tuple(None if leaf.ndim else str(leaf.dtype) for leaf in leaves)
    of = lambda kind: [leaf for leaf, own in zip(leaves, kinds, strict=True) if own == kind]
    return Packed({kind: jnp.stack(of(kind)) for kind in sorted({k for k in kinds if k})}, of(None), structure, kinds)


def unpack(packed: Packed) -> Any:
    """The tree, leaves with the leading axes that the packed ones have got since, on the host."""
    columns = {kind: iter(np.moveaxis(np.asarray(array), -1, 0)) for kind, array in packed.scalars.items()}
    rest = iter(packed.rest)
    return jax.tree.unflatten(packed.structure, [np.asarray(next(rest if kind is None else columns[kind])) for kind in packed.kinds])


@functools.lru_cache(maxsize=256)
def compiled(algorithm: Any, step: Callable, kind: str, driver: str, stacked: bool, fed: bool, brief: bool = False) -> Callable:
    """advance(state, key, first, count, data, feed, capacity) → (state, infos, kept, ran): `count` steps, or the `ran` that it took until
    `done`, compiled once per shape; phases with the same step share it."""

    @jax.jit  # traced once, for its shapes and for the loop
    def one_step(state: Any, key: Key, first: Any, i: Any, data: Any, feed: Any) -> tuple[Any, Packed]:
        state, info = step(fold(key, first + i), state, batch_at(kind, data, feed, i))
        return state, pack((info, None if algorithm.keep is None else algorithm.keep(state, info)))

    def chunk(state: Any, key: Key, first: Any, count: Any, data: Any, feed: Any, capacity: int) -> tuple[Any, Packed, Array]:
        data = prepare(kind, data, feed)
        none = jnp.zeros((), jnp.int32)
        _, out = jax.eval_shape(one_step, state, key, first, none, data, feed)
        buffers = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), out)

        def going(carry: Any) -> Array:
            i, state, _ = carry
            # A frozen member under vmap keeps its state: while_loop selects per member.
            return (i < count) if algorithm.done is None else (i < count) & ~algorithm.done(state)

        def body(carry: Any) -> Any:
            i, state, buffers = carry
            state, out = one_step(state, key, first, i, data, feed)
            return i + 1, state, jax.tree.map(lambda buffer, value: buffer.at[i].set(value), buffers, out)

        ran, state, buffers = jax.lax.while_loop(going, body, (none, state, buffers))
        return state, buffers, ran

    axes = (0, 0, None, None, None, 0 if fed else None)
    if driver == "loop":

        def mapped(state: Any, key: Key, first: Any, count: Any, data: Any, feed: Any, capacity: int) -> tuple[Any, ...]:
            return jax.vmap(functools.partial(chunk, capacity=capacity), in_axes=axes)(state, key, first, count, data, feed)

        loop = (quick if brief else wide)(mapped if stacked else chunk, static_argnums=6)

        def compiled_chunk(*args: Any) -> tuple[Any, Any, Any, Array]:
            state, buffers, ran = jax.block_until_ready(loop(*args))
            return (state, *unpack(buffers), ran)

        return compiled_chunk

    prepared = wide(
        jax.vmap(lambda d, f: prepare(kind, d, f), in_axes=(None, 0 if fed else None))
        if stacked and kind == "full" and fed
        else lambda d, f: prepare(kind, d, f)
    )
    data_axis = 0 if kind == "full" and fed else None

    def member_step(state: Any, *rest: Any) -> tuple[Any, Packed]:
        new, out = one_step(state, *rest)
        if algorithm.done is not None:
            over = algorithm.done(state)
            new = jax.tree.map(lambda old, moved: jnp.where(over, old, moved), state, new)
        return new, out

    single = wide(jax.vmap(member_step, in_axes=(0, 0, None, None, data_axis, 0 if fed else None)) if stacked else one_step)

    def python_chunk(state: Any, key: Key, first: int, count: int, data: Any, feed: Any, capacity: int) -> tuple[Any, Any, Any, int]:
        data = prepared(data, feed)
        outs = []
        for i in range(count):
            state, out = single(state, key, first, i, data, feed)
            outs.append(out)
            if algorithm.done is not None and bool(jnp.all(per_member(algorithm.done, stacked)(state))):
                break
        axis, count = 1 if stacked else 0, len(outs)
        shape = lambda leaf: (*leaf.shape[:axis], capacity - count, *leaf.shape[axis + 1 :])
        pad = lambda leaf: np.concatenate([leaf, np.zeros(shape(leaf), leaf.dtype)], axis)
        outs = jax.device_get(outs)  # on the host, where nothing is compiled
        return (state, *unpack(jax.tree.map(lambda *leaves: pad(np.stack(leaves, axis)), *outs)), count)

    return python_chunk


@functools.lru_cache(maxsize=256)
def compiled_check(algorithm: Any) -> Callable:
    def check(state: Any, held: Any, stacked: bool) -> Any:
        return per_member(algorithm.check, stacked)(state, held)

    return jax.jit(check, static_argnames="stacked")
