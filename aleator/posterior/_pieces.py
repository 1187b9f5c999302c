"""Predictions in pieces of rows and of draws that fit a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._typing import Tree
from aleator.model import rows_of, signature

BYTE_BUDGET = 256 * 2**20  # bytes of weights and activations (estimated) alive at once while predicting


def row_bytes(model: Any, x: Tree) -> int:
    """Bytes of everything computed between one row of x and its outputs: an upper bound on what a row keeps alive."""
    return 1 if x is None else _row_bytes(model, signature(x))


@cached
def _row_bytes(model: Any, shapes: Any) -> int:
    params = jax.eval_shape(model.init, jax.random.key(0))
    try:
        two, three = (jax.make_jaxpr(lambda p, rows: model.outputs(p, rows, None))(params, rows_of(shapes, n)).jaxpr.eqns for n in (2, 3))
    except TypeError:  # a model whose outputs are not arrays
        return 64 * sum(int(np.prod(shape)) * 4 for shape, _ in shapes[1])
    total = lambda eqns: sum(int(np.prod(v.aval.shape)) * 4 for eqn in eqns for v in eqn.outvars if hasattr(v.aval, "shape"))
    return max(1, total(three) - total(two))


def at_once(cost: int, most: int) -> int:
    """How many draws that take `cost` bytes each fit the budget together: at least one, at most `most`."""
    return int(np.clip(BYTE_BUDGET // max(1, cost), 1, most))


def check_joint(size: int) -> None:
    """Refuse a joint covariance that does not fit the budget for predictions."""
    if 8 * size**2 > BYTE_BUDGET:
        most = int((BYTE_BUDGET / 8) ** 0.5)
        raise ModelError(
            message(
                "The joint covariance is too large.",
                f"{size} rows × outputs, {8 * size**2 / 2**30:.1f} GiB",
                f"at most {most}",
                "ask for fewer rows at a time",
            )
        )


def by_rows(function: Callable, x: Tree, cost: Callable[[int], int], axis: int = 0, budget: int | None = None, whole: bool = False) -> Tree:
    """function(x) in pieces of rows whose estimated cost in bytes fits the budget, put together on the host.

    axis: that of the rows in what function returns. With `whole` it returns (per row, the same whatever the rows); the latter is not joined.
    """
    budget = BYTE_BUDGET if budget is None else budget
    if x is None:
        return jax.tree.map(np.asarray, function(None))
    num_rows = _tree.rows(x)
    step = num_rows
    while step > 1 and cost(step) > budget:
        step = -(-step // 2)
    if step == num_rows:
        return jax.tree.map(np.asarray, function(jax.tree.map(jnp.asarray, x)))
    pieces = []
    for first in range(0, num_rows, step):
        # The last piece is filled up with repeated rows, so that all pieces share one compiled call.
        index = np.minimum(np.arange(first, first + step), num_rows - 1)
        real = min(step, num_rows - first)
        cut = (slice(None),) * axis + (slice(real),)
        out = function(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), x))  # noqa: B023
        if whole:
            out, same = out
        pieces.append(jax.tree.map(lambda leaf: np.asarray(leaf)[cut], out))  # noqa: B023
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=axis), *pieces)
    return (joined, jax.tree.map(np.asarray, same)) if whole else joined
