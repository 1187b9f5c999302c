"""Kept values of a run: in memory, or in append-only files beside the checkpoint once they have been written there.

Each part is what one chunk kept. A checkpoint names how many parts belong to it, so that a part written before a kill but not yet named is
simply written again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from aleator import _files

MEMORY_BYTES = 2**30  # kept values beyond this stay on disk, where there is a directory for them


class Kept:
    """A list of parts, each a tree of arrays with `axis` numbering the kept values. directory: where parts go when saved, or None."""

    def __init__(self, axis: int, directory: Path | None):
        self.axis, self.directory = axis, directory
        self.parts: list[Any] = []  # a tree, or the path of one
        self.structure: Any = None
        self.bytes = 0

    def append(self, part: Any) -> None:
        leaves, self.structure = jax.tree.flatten(part)
        self.bytes += sum(leaf.nbytes for leaf in leaves)
        self.parts.append(leaves)

    def save(self) -> int:
        """Write the parts that are still in memory; how many there are in all."""
        for number, part in enumerate(self.parts):
            if not isinstance(part, Path):
                path = self._path(number)
                _files.write_atomic(path, _files.pack({f"{i:05d}": leaf for i, leaf in enumerate(part)}, {}))
                self.parts[number] = path
        return len(self.parts)

    def load(self, count: int, structure: Any) -> None:
        """Take up the first `count` parts of an earlier run."""
        self.structure = structure
        self.parts = [self._path(number) for number in range(count)]
        self.bytes = sum(path.stat().st_size for path in self.parts)

    def clear(self) -> None:
        """Remove the parts of another run from the directory."""
        if self.directory is not None and self.directory.is_dir():
            for path in self.directory.glob("kept-*.safetensors"):
                path.unlink()

    def join(self) -> Any:
        """All kept values as one tree; memory-mapped from the directory where they are many."""
        if not self.parts:
            return None
        first = self._read(self.parts[0])
        on_disk = self.directory is not None and self.bytes > MEMORY_BYTES
        if not on_disk:
            every = [self._read(part) for part in self.parts]
            return jax.tree.unflatten(self.structure, [np.concatenate(leaves, axis=self.axis) for leaves in zip(*every, strict=True)])
        total = sum(self._read(part)[0].shape[self.axis] for part in self.parts)
        shapes = [(*leaf.shape[: self.axis], total, *leaf.shape[self.axis + 1 :]) for leaf in first]
        files = [
            np.memmap(self.directory / f"draws-{i:05d}.bin", leaf.dtype, "w+", shape=shape if math.prod(shape) else (1,))  # type: ignore[operator]
            for i, (leaf, shape) in enumerate(zip(first, shapes, strict=True))
        ]
        start = 0
        for part in self.parts:
            leaves = self._read(part)
            stop = start + leaves[0].shape[self.axis]
            for file, leaf, shape in zip(files, leaves, shapes, strict=True):
                if math.prod(shape):
                    file[(slice(None),) * self.axis + (slice(start, stop),)] = leaf
            start = stop
        whole = [file if math.prod(shape) else np.zeros(shape, file.dtype) for file, shape in zip(files, shapes, strict=True)]
        return jax.tree.unflatten(self.structure, whole)

    def _path(self, number: int) -> Path:
        return Path(self.directory) / f"kept-{number:06d}.safetensors"  # type: ignore[arg-type]

    def _read(self, part: Any) -> list[np.ndarray]:
        if not isinstance(part, Path):
            return part
        arrays, _ = _files.unpack(part.read_bytes(), str(part))
        return [arrays[name] for name in sorted(arrays)]
