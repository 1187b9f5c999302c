"""The road from a table to a Fit, shared by the verbs that fit: one seed for everything random, splitting, choosing by evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import aleator as al
from aleator import _random

HELD_OUT = 0.2  # share of rows kept for the printed score
FEW_ROWS = 20  # below this many rows nothing is held out for it


def fit(
    key: Any, candidates: Sequence[Any], x: np.ndarray, y: np.ndarray, chosen: al.Method, preprocessor: Any = None, **run: Any
) -> al.Fit:
    """Fit every candidate and keep the one with the highest evidence; the preprocessor travels with it."""
    if len(candidates) > 1:
        run = {name: value for name, value in run.items() if name not in ("checkpoint", "checkpoint_every", "resume")}
    keys_of_fits = [key] if len(candidates) == 1 else _random.split(_random.as_key(key), len(candidates))
    fits = [al.fit(key_fit, model, (x, y), chosen, **run) for key_fit, model in zip(keys_of_fits, candidates, strict=True)]
    best = fits[0] if len(fits) == 1 else max(fits, key=lambda one: one.log_evidence.value)  # type: ignore[union-attr]
    return dataclasses.replace(best, preprocessor=preprocessor)


def keys(seed: int) -> tuple[Any, Any, int]:
    """(key of the fit, key of predictions, host seed of the split): one seed, three independent uses."""
    key_fit, key_predict, key_split = _random.split(_random.as_key(seed), 3)
    return key_fit, key_predict, _random.seed_of(key_split)


def split(seed: int, num_rows: int, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (train, held out). With labels each class gives its share, and keeps at least one row for training."""
    generator = np.random.Generator(np.random.Philox(seed))
    order = generator.permutation(num_rows)
    if labels is None:
        held = order[: round(HELD_OUT * num_rows)]
    else:
        groups = [order[labels[order] == label] for label in np.unique(labels)]
        held = np.concatenate([group[: min(round(HELD_OUT * len(group)), len(group) - 1)] for group in groups])
    train = np.setdiff1d(np.arange(num_rows), held)
    return train, np.sort(held)


def with_record(fit: al.Fit, record: dict[str, Any]) -> al.Fit:
    """The same fit with more in its manifest."""
    return dataclasses.replace(fit, manifest=fit.manifest | record)
