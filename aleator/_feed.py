"""How batches reach a compiled chunk: the host prepares a feed, pure functions pick batch i out of it inside the loop.

Kinds of feed: "none", "full" (all rows, or a member's own rows, every step), "random" and "once" (row numbers into arrays on the
device), "stream" (stacked batches from the user's iterator). Data are arguments of the compiled call, never constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator import _tree
from aleator._errors import DataError, message
from aleator._typing import Array
from aleator.data import Batch, BatchOrder, Data, Stream

REPEATS = 3  # batches equal to the one before, in a row, that are no accident
REPEAT_ROWS = 8  # rows a batch must have for that: four kinds of row would repeat so once in 10¹⁴
ONCE_ROWS = 4096  # rows per step of a "once" phase that does not say


class Rows(NamedTuple):
    """What a chunk is told about data in memory. index: row numbers, (n,) at every step or (steps, n); None for all rows at every step.
    weight (N,): what a member multiplies the weight of each row with, or None."""

    index: Array | None
    weight: Array | None


def prepare(kind: str, data: Batch | None, feed: Any) -> Batch | None:
    """Work done once per chunk: a member that sees all of its rows at every step gathers and weighs them before the loop."""
    if kind != "full" or data is None:
        return data
    if feed.index is not None:
        return _gather(data, feed.index, feed.weight)
    return dataclasses.replace(data, weight=_product(data.weight, feed.weight))


def batch_at(kind: str, data: Batch | None, feed: Any, i: Any) -> Batch | None:
    """Batch number i of the chunk."""
    if kind == "none":
        return None
    if kind == "full":
        return data
    if kind == "stream":
        return _tree.take(feed, i)
    return _gather(data, feed.index[i], feed.weight, padded=kind == "once")


def _gather(data: Batch, index: Any, weight: Array | None, padded: bool = False) -> Batch:
    # Row numbers come from our own order and are in range; only padding (−1) needs clipping.
    pick = lambda leaf: leaf.at[index].get(mode="clip" if padded else "promise_in_bounds")
    x, y, given, own = jax.tree.map(pick, (data.x, data.y, data.weight, weight))
    return Batch(x, y, _product(given, own), index, padded)


def _product(given: Array | None, own: Array | None) -> Array | None:
    """The weights of the data times those of a member; None stands for ones."""
    return given if own is None else own if given is None else given * own


class ArrayFeed:
    """Row numbers for data in memory. rows: (members, n) or (n,), the rows each member may see; None for all. weights: (members, N) or
    (N,), what multiplies the weight of each row; None for nothing."""

    def __init__(
        self,
        data: Data,
        batches: str,
        batch_size: int | None,
        seeds: list[int],
        rows: np.ndarray | None,
        stacked: bool,
        weights: np.ndarray | None = None,
    ):
        self.kind = batches
        self.seeds, self.stacked = seeds, stacked
        self.rows, self.weights = (array if array is None or stacked else array[None] for array in (rows, weights))
        self.num_rows = data.num_data if rows is None else rows.shape[-1]
        self.batch_size = min(batch_size or ONCE_ROWS, self.num_rows)
        self.num_steps = -(-self.num_rows // self.batch_size)
        self.bytes_per_step = 4 * self.batch_size if batches != "full" else 0
        self.position = [0, 0]

    def chunk(self, members: range, step: int, count: int, capacity: int) -> Rows:
        """Row numbers for `count` steps from `step` on, padded to `capacity`: (members, capacity, batch_size) int32; weights (members, N)."""
        if self.kind == "full":
            parts = None if self.rows is None else [self.rows[m].astype(np.int32) for m in members]
        else:
            parts = [np.zeros((capacity, self.batch_size), np.int32) for _ in members]
            for part, member in zip(parts, members, strict=True):
                part[:count] = self._order(member, step, count)
        own = None if self.weights is None else [self.weights[m] for m in members]
        return Rows(*(array if array is None else np.stack(array) if self.stacked else array[0] for array in (parts, own)))

    def _order(self, member: int, step: int, count: int) -> np.ndarray:
        if self.kind == "once":
            index = np.arange(step * self.batch_size, (step + count) * self.batch_size)
            index = np.where(index < self.num_rows, index, -1).reshape(count, self.batch_size)
            return index if self.rows is None else np.where(index >= 0, self.rows[member][index], -1)
        index = BatchOrder(self.seeds[member], self.num_rows, self.batch_size).rows(step, count)
        return index if self.rows is None else self.rows[member][index]


class StreamFeed:
    """Batches from a Stream, stacked; all members see the same ones. position = [epoch, batch] is where a resume continues."""

    kind = "stream"

    def __init__(self, stream: Stream, convert: Callable[[tuple], tuple], position: list[int]):
        self.stream, self.convert, self.position = stream, convert, position
        first = self._convert(next(iter(stream.make(0, 0)), None))
        self.batch_size = _tree.rows(first[1] if first[0] is None else first[0])
        self.template = first
        self.bytes_per_step = _tree.nbytes(jax.tree.map(np.asarray, first))
        self.num_steps = -(-stream.num_data // self.batch_size)
        self.iterator: Any = None
        self.seen = position[1] * self.batch_size  # all batches but an epoch's last have that many rows
        self.last: Any = None
        self.repeats = 0

    def chunk(self, members: range, step: int, count: int, capacity: int) -> Batch:
        """The next `count` batches, stacked and padded to `capacity`."""
        batches = [self._next() for _ in range(count)]
        batches += [batches[-1]] * (capacity - count)
        return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    def _convert(self, item: Any) -> tuple:
        if item is None:
            raise DataError(
                message(
                    "The stream is empty.",
                    f"no batch in epoch {self.position[0]}",
                    "at least one batch per epoch",
                    "let make(epoch, start) return a new iterator over (x, y) each time it is called",
                )
            )
        if not isinstance(item, tuple) or len(item) not in (2, 3):
            raise DataError(
                message("The stream yields something else.", type(item).__name__, "(x, y) or (x, y, weight)", "yield tuples of arrays")
            )
        x, y, *rest = self.convert(item)
        return x, y, (np.asarray(rest[0], np.float32) if rest else None)

    def _next(self) -> Batch:
        if self.iterator is None:
            self.iterator = iter(self.stream.make(*self.position))
        item = next(self.iterator, None)
        if item is None:
            self._end_of_epoch()
            return self._next()
        self.position[1] += 1
        x, y, weight = self._convert(item)
        n = _tree.rows(y if x is None else x)
        if n > self.batch_size:
            raise DataError(
                message(
                    "The stream's batches grow.", f"{n} rows", f"at most {self.batch_size}, as in the first", "yield batches of one size"
                )
            )
        self._watch(x, y, n)
        index = np.full(self.batch_size, -1, np.int32)
        index[:n] = np.arange(n)
        pad = lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], self.batch_size - n, axis=0)]) if n < self.batch_size else leaf
        x, y, weight = jax.tree.map(lambda leaf: pad(np.asarray(leaf)), (x, y, weight))
        return Batch(x, y, weight, index, padded=True)

    def _watch(self, x: Any, y: Any, n: int) -> None:
        """Refuse an epoch that goes on beyond N, and a stream that yields one batch over and over."""
        self.seen += n
        epoch = self.position[0]
        if self.seen > self.stream.num_data:
            raise DataError(
                message(
                    "The stream goes on beyond its end.",
                    f"{self.seen} rows in epoch {epoch}, so far",
                    f"num_data={self.stream.num_data}",
                    "end the iterator after one epoch, begin it at batch `start`, or pass the true number of rows",
                )
            )
        now, before = jax.tree.leaves((x, y)), self.last
        same = before is not None and n >= REPEAT_ROWS and all(np.array_equal(a, b) for a, b in zip(now, before, strict=True))
        varied = same and any(not np.array_equal(leaf, np.broadcast_to(leaf[:1], np.shape(leaf))) for leaf in now)
        self.last, self.repeats = now, self.repeats + 1 if varied else 0
        if self.repeats >= REPEATS:
            raise DataError(
                message(
                    "The stream repeats itself.",
                    f"{REPEATS + 1} equal batches in a row, up to batch {self.position[1] - 1} of epoch {epoch}",
                    "every row once an epoch",
                    "let make(epoch, start) go on to the next rows, and copy arrays it fills again",
                )
            )

    def _end_of_epoch(self) -> None:
        if self.position[1] == 0:
            self._convert(None)
        if self.seen != self.stream.num_data:
            raise DataError(
                message(
                    "The stream's length is not what it said.",
                    f"{self.seen} rows in epoch {self.position[0]}",
                    f"num_data={self.stream.num_data}",
                    "pass the true number of rows, find out why the epoch ends early, or let make return a new iterator each time",
                )
            )
        self.position[:] = [self.position[0] + 1, 0]
        self.iterator, self.seen = None, 0


class NoFeed:
    """For phases that take no data."""

    kind = "none"
    bytes_per_step = 0
    num_steps = 0

    def __init__(self) -> None:
        self.position = [0, 0]

    def chunk(self, members: range, step: int, count: int, capacity: int) -> None:
        return None
