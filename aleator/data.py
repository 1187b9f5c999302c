"""Data on its way to a model: arrays, batches, streams, splits, the standardiser.

Nothing here changes values behind the user's back. `as_data` checks and wraps; `Standardiser` is applied only where a caller asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import DataError, message
from aleator._random import as_key, seed_of
from aleator._typing import Array, KeyLike, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Some rows of the data.

    x, y: trees with leading axis n (y may be None). weight (n,): importance of each row, None for all ones.
    index (n,): row numbers, −1 marks padding. `padded` is static: False promises that no row is padding, so that n costs nothing.
    """

    x: Tree
    y: Tree
    weight: Array | None = None
    index: Array | None = None
    padded: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def size(self) -> Any:
        """Number of real rows n: never Σ weight."""
        if self.padded:
            return jnp.sum(self.index >= 0)
        return _tree.rows(self.y if self.x is None else self.x)

    def weighted_sum(self, values: Array) -> Array:
        """Σᵢ weightᵢ·valuesᵢ over real rows; values (n,)."""
        if self.padded:
            # `where` and not a product: padding may hold values whose log-likelihood is not finite.
            values = jnp.where(self.index >= 0, values, 0.0)
        return jnp.sum(values if self.weight is None else values * self.weight)


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Arrays in memory, checked. x: tree (N, …) or None, y: tree (N, …) or None, weight: (N,) or None."""

    x: Tree
    y: Tree
    weight: np.ndarray | None = None

    @property
    def num_data(self) -> int:
        return _tree.rows(self.y if self.x is None else self.x)

    def take(self, rows: np.ndarray) -> Data:
        """The given rows, as new Data."""
        pick = lambda leaf: np.asarray(leaf)[rows]
        return Data(jax.tree.map(pick, self.x), jax.tree.map(pick, self.y), None if self.weight is None else self.weight[rows])

    def repeated(self, size: int) -> Data:
        """The same data in `size` ≥ N rows: rows repeated in turn, each sharing its weight among its copies, so that Σ weight·log p is unchanged.

        >>> Data(None, np.array([5.0, 6.0, 7.0])).repeated(4).weight
        array([0.5, 1. , 1. , 0.5])
        """
        index = np.arange(size) % self.num_data
        weight = np.ones(self.num_data) if self.weight is None else self.weight
        return dataclasses.replace(self.take(index), weight=(weight / np.bincount(index))[index])

    def batch(self) -> Batch:
        """All rows as one Batch on the device."""
        return Batch(
            *jax.tree.map(jnp.asarray, (self.x, self.y, self.weight)), index=jnp.asarray(np.arange(self.num_data))
        )  # by NumPy: nothing to compile


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Data that does not fit in memory.

    make(epoch, start) returns an iterator over batches (x, y) or (x, y, weight) of that epoch, beginning at batch number `start`,
    so that an interrupted run continues where it stopped. num_data = N is asked once, here. All batches but an epoch's last have
    the same number of rows; a shorter one is padded and counts as what it is.
    """

    make: Callable[[int, int], Iterator[tuple]]
    num_data: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_data, (int, np.integer)) or self.num_data < 1:
            raise DataError(
                message("A Stream needs N.", f"num_data={self.num_data!r}", "a positive int", "pass the number of rows of one epoch")
            )


@dataclasses.dataclass(frozen=True)
class Standardiser:
    """z = (x − loc) / scale per column, undone exactly. Columns without spread get scale 1.

    >>> s = Standardiser.fit(np.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> s.apply(np.array([[2.0, 5.0]])).tolist(), s.invert(np.array([[0.0, 0.0]])).tolist()
    ([[0.0, 0.0]], [[2.0, 5.0]])
    """

    loc: tuple[float, ...]
    scale: tuple[float, ...]

    @classmethod
    def fit(cls, x: Array) -> Standardiser:
        x = np.asarray(x, np.float64)
        loc, scale = x.mean(0), x.std(0)
        # A constant column's mean and standard deviation are off by rounding; its value itself is not.
        constant = np.all(x == x[:1], axis=0)
        loc, scale = np.where(constant, x[0], loc), np.where(constant, 1.0, scale)
        return cls(tuple(np.atleast_1d(loc).tolist()), tuple(np.atleast_1d(scale).tolist()))

    def apply(self, x: Array) -> np.ndarray:
        return (np.asarray(x, np.float64) - np.asarray(self.loc)) / np.asarray(self.scale)

    def invert(self, z: Array) -> np.ndarray:
        return np.asarray(self.loc) + np.asarray(self.scale) * np.asarray(z, np.float64)


def as_data(data: Any, missing: bool = False) -> Data | Stream:
    """Check and wrap what the user passed: (x, y), (x, y, weight), Data or Stream. Values are kept as given. missing: y may hold NaN."""
    if isinstance(data, Stream):
        return data
    if isinstance(data, Data):
        x, y, weight = data.x, data.y, data.weight
    elif isinstance(data, (tuple, list)) and len(data) in (2, 3):
        x, y, *rest = data
        weight = rest[0] if rest else None
    else:
        got = type(data).__name__ + (f" of length {len(data)}" if isinstance(data, (tuple, list)) else "")
        raise DataError(
            message(
                "The data has a wrong form.", got, "(x, y), (x, y, weight), al.Data or al.Stream", "pass al.fit(key, model, (x, y), method)"
            )
        )
    x, y = check_arrays(x, "x"), check_arrays(y, "y", missing)
    if x is None and y is None:
        raise DataError(
            message("There is no data.", "x=None and y=None", "at least one of them", "pass (x, y), or None for a target without data")
        )
    lengths = {name: _tree.rows(tree) for name, tree in (("x", x), ("y", y)) if tree is not None}
    if weight is not None:
        weight = np.asarray(check_arrays(weight, "weight"), np.float64)
        if weight.ndim != 1 or (weight < 0).any() or not weight.any():
            raise DataError(
                message(
                    "The weights cannot be used.",
                    f"shape {weight.shape}, minimum {weight.min():g}",
                    "shape (N,), none negative, not all zero",
                    "pass one weight per row",
                )
            )
        lengths["weight"] = len(weight)
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{n} rows in {name}" for name, n in lengths.items())
        raise DataError(
            message("The data does not line up.", got, "the same number everywhere", "pass one target (and weight) per row of x")
        )
    return Data(x, y, weight)


def check_arrays(tree: Tree, name: str, missing: bool = False) -> Tree:
    """Arrays with a leading axis, numeric, non-empty and finite (or NaN, with `missing`); pandas objects become NumPy arrays. Values are not
    changed."""
    if tree is None:
        return None
    if hasattr(tree, "to_numpy"):
        tree = tree.to_numpy()
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda t: isinstance(t, list))
    checked = [_check_array(leaf, f"{name}.{_tree.path_str(path)}" if path else name, missing) for path, leaf in leaves]
    if not checked:
        raise DataError(message(f"{name} is empty.", "no arrays", "at least one array", f"pass {name} as an array of shape (N, …)"))
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=lambda t: isinstance(t, list)), checked)


def _check_array(leaf: Any, name: str, missing: bool) -> Array:
    if not isinstance(leaf, (np.ndarray, jax.Array)):
        try:
            leaf = np.asarray(leaf)
        except ValueError as error:
            raise DataError(
                message(f"{name} is not an array.", f"ragged {type(leaf).__name__}", "rows of equal length", "pass a NumPy or JAX array")
            ) from error
    if leaf.dtype.kind not in "fiub" and not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise DataError(
            message(
                f"{name} is not numeric.",
                f"dtype {leaf.dtype}",
                "float, int or bool",
                "encode strings and objects as numbers, or use `aleator fit` on the table",
            )
        )
    if leaf.ndim == 0:
        raise DataError(message(f"{name} has no rows.", "a single number", "shape (N, …)", "put the rows on the first axis"))
    if leaf.size == 0:
        raise DataError(message(f"{name} is empty.", f"shape {leaf.shape}", "at least one row and column", "check how the data was read"))
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        bad = np.isinf(np.asarray(leaf)) if missing else ~np.isfinite(np.asarray(leaf))
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                message(
                    f"{name} holds {int(bad.sum())} values that are not finite.",
                    f"{float(np.asarray(leaf)[where])} at index {where}",
                    "finite numbers",
                    f"drop or impute rows {np.unique(np.argwhere(bad)[:, 0])[:5].tolist()} (first five); `aleator fit` imputes tables",
                )
            )
    return leaf


def split(key: KeyLike, data: Data, fraction: float) -> tuple[Data, Data]:
    """Random split into (rest, held out); the held-out part has round(fraction·N) rows, at least one, at most N − 1."""
    num_data = data.num_data
    if not 0.0 < fraction < 1.0 or num_data < 2:
        raise DataError(
            message(
                "The data cannot be split.",
                f"fraction {fraction} of {num_data} rows",
                "0 < fraction < 1 and N ≥ 2",
                "use more rows or no held-out part",
            )
        )
    held = min(max(round(fraction * num_data), 1), num_data - 1)
    order = np.random.Generator(np.random.Philox(seed_of(as_key(key)))).permutation(num_data)
    return data.take(np.sort(order[held:])), data.take(np.sort(order[:held]))


def folds(key: KeyLike, num_data: int, num_folds: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row numbers (train, test) of each fold of a cross-validation; the tests partition 0…N−1."""
    if not 2 <= num_folds <= num_data:
        raise DataError(
            message("The folds do not fit the data.", f"{num_folds} folds of {num_data} rows", "2 ≤ folds ≤ N", "use fewer folds")
        )
    order = np.random.Generator(np.random.Philox(seed_of(as_key(key)))).permutation(num_data)
    parts = np.array_split(order, num_folds)
    return [(np.sort(np.concatenate(parts[:i] + parts[i + 1 :])), np.sort(part)) for i, part in enumerate(parts)]


class BatchOrder:
    """Row numbers of random mini-batches, as one endless concatenation of shuffled epochs.

    Batches are cut across epoch borders, so all have the same size and no padding is needed: a ragged last batch does not exist. Each row
    is equally likely at each place, so every batch gives an unbiased sum. Epochs are shuffled in blocks, block b by Philox(seed, b), so
    any step can be reached directly (resume) and short epochs cost no generator each.
    """

    BLOCK = 1 << 14  # rows shuffled by one generator, or one epoch where that is longer

    def __init__(self, seed: int, num_data: int, batch_size: int):
        self.seed, self.num_data, self.batch_size = seed, num_data, batch_size
        self.epochs = max(1, self.BLOCK // num_data)

    def rows(self, step: int, num_steps: int) -> np.ndarray:
        """Row numbers of `num_steps` batches from `step` on: (num_steps, batch_size) int32."""
        first, last = step * self.batch_size, (step + num_steps) * self.batch_size
        length = self.epochs * self.num_data
        blocks = range(first // length, -(-last // length))
        offset = first - blocks[0] * length
        order = np.concatenate([self._block(number) for number in blocks])
        return order[offset : offset + last - first].reshape(num_steps, self.batch_size)

    def _block(self, number: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, number], np.uint64)))
        epochs = np.tile(np.arange(self.num_data, dtype=np.int32), (self.epochs, 1))
        return generator.permuted(epochs, axis=1, out=epochs).ravel()


SKETCH = 256  # row fingerprints a fit remembers
SKETCH_COLUMNS = 64  # of each array: enough to tell rows apart, cheap for images


def sketch(data: Data) -> list[int] | None:
    """The smallest row fingerprints of the data, sorted, at most `SKETCH`: enough to tell later whether rows were among them.

    A fingerprint is a wrapping 64-bit product of the row's bits (x and y, as float32; of wide rows every so many columns) with fixed odd numbers.
    """
    marks = _fingerprints(data)
    return None if marks is None else np.unique(marks)[:SKETCH].tolist()


def overlap(known: list[int] | None, data: Any) -> float:
    """Share of the rows that were in the data of a sketch, judged by the rows whose fingerprints the sketch would hold; 0 where it cannot be told.

    It cannot where rows repeat by nature (a few categories): an equal row is then no sign of the same row.
    """
    marks = _fingerprints(data) if known and isinstance(data, Data) else None
    if marks is None or not known or len(np.unique(marks)) < 0.9 * len(marks):
        return 0.0
    comparable = marks if len(known) < SKETCH else marks[marks <= known[-1]]
    return float(np.mean(np.isin(comparable, known))) if len(comparable) else 0.0


def unseen(known: list[int] | None, data: Any) -> np.ndarray:
    """Which rows were certainly not in the data of a sketch, (n,) bool: those that it would hold and does not; all False where it cannot be told."""
    marks = _fingerprints(data) if known and isinstance(data, Data) else None
    if marks is None or not known:
        return np.zeros(data.num_data if isinstance(data, Data) else 0, bool)
    return ~np.isin(marks, known) & ((len(known) < SKETCH) | (marks <= known[-1]))


def _fingerprints(data: Data) -> np.ndarray | None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((data.x, data.y))]
    if not leaves or any(not np.issubdtype(leaf.dtype, np.number) and leaf.dtype != bool for leaf in leaves):
        return None
    marks = np.zeros(len(leaves[0]), np.uint64)
    for number, leaf in enumerate(leaves):
        flat = leaf.reshape(len(leaf), -1)
        columns = np.linspace(0, flat.shape[1] - 1, min(flat.shape[1], SKETCH_COLUMNS)).astype(np.int64)
        bits = np.ascontiguousarray(flat[:, columns], np.float32).view(np.uint32)
        factors = np.random.Generator(np.random.Philox(number)).integers(1, 2**63, len(columns), np.uint64) * np.uint64(2) + np.uint64(1)
        marks += np.sum((bits.astype(np.uint64) + np.uint64(1)) * factors, axis=1, dtype=np.uint64)
    return marks ^ (marks >> np.uint64(29))
