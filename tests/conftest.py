"""The climate of the tests. Warnings are errors (pyproject.toml); random keys may be used once.

Implicit rank promotion stays allowed: a bias added to a batch, `(n, k) + (k,)`, is how layers and distributions are written here and in
the libraries below. That targets of shape (N,) and (N, 1) cannot broadcast is tested where it matters, at the door.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Before anything draws: no window may be asked for, here or in a process that a test starts.
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import pytest

STATISTICAL = Path(__file__).parent / "statistical"
MOST_MAPPINGS = 45_000
LOOK_EVERY = 5.0  # seconds between two looks at the mappings, of which a process makes some hundred in a second
# Minutes each: with these first, no worker is left with one of them while the other has nothing to do.
FIRST = ("calibration", "estimators", "methods", "variational", "mixture", "laplace", "dropout", "curvature", "parts", "vae", "vae_uses")
looked = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/statistical is `long`, without having to say so in every file; the slowest files come first."""
    for item in items:
        if STATISTICAL in item.path.parents:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in FIRST)


@pytest.fixture(autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Every compiled program keeps some memory mappings, of which Linux gives a process 65,530: past that XLA crashes. A worker that has run
    hundreds of tests gets there, so that old programs are let go in time."""
    yield
    global looked
    if time.monotonic() - looked < LOOK_EVERY:
        return
    looked, maps = time.monotonic(), Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _keys_are_used_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's checker raises `KeyReuseError` when a typed key is consumed twice, on the host or inside compiled code.

    A test that repeats a run to compare the two passes int seeds, or `jax.random.clone(key)`, or is marked `reuses_keys`.
    """
    before = jax.config.jax_debug_key_reuse
    jax.config.update("jax_debug_key_reuse", request.node.get_closest_marker("reuses_keys") is None)
    try:
        yield
    finally:
        jax.config.update("jax_debug_key_reuse", before)
