"""Helpers on plain trees: paths, sizes, stacking, finite checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Tree


def paths(tree: Tree) -> list[str]:
    """One readable path per leaf, in flattening order.

    >>> paths({"a": {"b": 1.0}, "c": [2.0, 3.0]})
    ['a.b', 'c.0', 'c.1']
    """
    return [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def path_str(path: Sequence[Any]) -> str:
    """`('a', 0)`-like key paths as `a.0`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def size(tree: Tree) -> int:
    """Number of scalars in a tree.

    >>> size({"w": np.zeros((2, 3)), "b": np.zeros(3)})
    9
    """
    return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Bytes held by the arrays of a tree."""
    return sum(int(np.prod(np.shape(leaf))) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def rows(tree: Tree) -> int:
    """Length of the leading axis shared by all leaves."""
    return int(jax.tree.leaves(tree)[0].shape[0])


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of equal structure → one tree with a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def take(tree: Tree, index: Any) -> Tree:
    """Index the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def as_float64(tree: Tree) -> Tree:
    """Floating leaves in double precision (inside an x64 context); others unchanged."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def flat(tree: Tree) -> jax.Array:
    """All leaves as one vector, in the order of the tree."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def unflat(vector: Any, like: Tree) -> Tree:
    """The inverse: a tree with the structure and shapes of `like`, in the vector's dtype."""
    leaves, structure = jax.tree.flatten(like)
    parts = jnp.split(vector, np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])[:-1])
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])


def first_dtype(tree: Tree) -> Any:
    """The dtype of the first floating-point leaf, float32 where there is none."""
    return next((leaf.dtype for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)), jnp.dtype(jnp.float32))


def sum_leaves(tree: Tree) -> jax.Array:
    """Σ over all entries of all leaves, as a scalar."""
    leaves = [jnp.sum(leaf) for leaf in jax.tree.leaves(tree)]
    return sum(leaves[1:], start=leaves[0]) if leaves else jnp.zeros(())


def first_nonfinite(tree: Tree) -> str | None:
    """Path of the first leaf holding a NaN or infinity (on the host), or None."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.all(np.isfinite(np.asarray(leaf))):
            return path_str(path)
    return None
