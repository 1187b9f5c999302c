"""Files that are whole or absent: atomic writes, trees of arrays as safetensors with a checksum. No pickle anywhere."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import StoreError, message
from aleator._typing import Tree


def write_atomic(path: Path, content: bytes) -> None:
    """Write beside, flush to disk, rename over: a reader (or a resume after a kill) sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def digest(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def pack(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> bytes:
    """Named arrays and a JSON-able dict as one safetensors file, with a checksum over both."""
    from safetensors.numpy import save

    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    text = json.dumps(meta)
    return save(arrays, {"meta": text, "checksum": checksum(arrays, text)})


def unpack(content: bytes, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `pack`; refuses truncated, altered or foreign files."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        text, stored = header["meta"], header["checksum"]
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise StoreError(
            message(
                f"{name} cannot be read.",
                f"{type(error).__name__}: {error}",
                "a file written by aleator",
                "restore it from a copy, or fit again",
            )
        ) from error
    if checksum(arrays, text) != stored:
        raise StoreError(
            message(
                f"{name} was altered.",
                "contents that do not match their checksum",
                "the bytes as written",
                "restore it from a copy, or fit again",
            )
        )
    return arrays, json.loads(text)


def checksum(arrays: dict[str, np.ndarray], text: str) -> str:
    """SHA-256 over named arrays and a text, whatever the order of the names (safetensors itself does not fix it)."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        sha.update(f"{name}|{arrays[name].dtype}|{arrays[name].shape}|".encode())
        sha.update(np.asarray(arrays[name], order="C").tobytes())
    return sha.hexdigest()


def flatten(tree: Tree, prefix: str = "") -> dict[str, np.ndarray]:
    """Leaves by path, as NumPy arrays; typed random keys as their data."""
    named = {}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        value = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        named[f"{prefix}{number:05d}:{_tree.path_str(path)}"] = np.asarray(value)
    return named


def unflatten(template: Tree, named: dict[str, np.ndarray], prefix: str = "", leading: int | None = None) -> Tree:
    """Put leaves written by `flatten` back into the structure of `template` (arrays or shapes), bit for bit.

    leading: number of extra leading axes the stored leaves have over the template's (None: shapes are not compared).
    """
    leaves = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(template)):
        name = f"{prefix}{number:05d}:{_tree.path_str(path)}"
        if name not in named:
            raise StoreError(
                message(
                    "The stored arrays do not fit this structure.",
                    f"no array {name!r}",
                    "the arrays of the same model and method",
                    "load with the network it was fitted with",
                )
            )
        value = named[name]
        if leading is not None and not _is_key(leaf) and value.shape[leading:] != tuple(leaf.shape):
            raise StoreError(
                message(
                    f"Array {_tree.path_str(path)} has another shape.",
                    f"stored {value.shape[leading:]}",
                    f"{tuple(leaf.shape)}",
                    "load with the network it was fitted with",
                )
            )
        leaves.append(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else value)
    extra = sum(name.startswith(prefix) for name in named) - len(leaves)
    if extra:
        raise StoreError(
            message(
                "The stored arrays do not fit this structure.",
                f"{extra} arrays too many",
                f"{len(leaves)} arrays",
                "load with the network it was fitted with",
            )
        )
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
