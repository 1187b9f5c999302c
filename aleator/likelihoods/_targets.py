"""Targets at the door: what a user passes as y, in canonical form, or a `DataError` that says what is wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from aleator._errors import DataError, message


def _columns(y: Any, advice: str) -> np.ndarray:
    """y as a numeric (n, k) array, n ≥ 1; (n,) becomes (n, 1)."""
    values = np.asarray(y)
    if values.dtype.kind not in "biuf":
        raise DataError(message("y is not numeric.", f"dtype {values.dtype}", "numbers", advice))
    if values.ndim not in (1, 2):
        raise DataError(message("y has the wrong shape.", f"{values.shape}", "(n,) or (n, k)", "pass one row per example"))
    if values.size == 0:
        raise DataError(message("y is empty.", f"shape {values.shape}", "at least one row and one column", "pass some data"))
    if values.dtype.kind == "f" and not np.all(np.isfinite(values)):
        bad = ~np.isfinite(values)
        row = int(np.argwhere(bad)[0][0])
        count = f"{int(bad.sum())} NaN or infinite entr{'y' if bad.sum() == 1 else 'ies'}, the first in row {row}"
        raise DataError(message("y has missing or infinite values.", count, "finite numbers", "drop or repair these rows"))
    return values[:, None] if values.ndim == 1 else values


def encode_real(y: Any) -> np.ndarray:
    values = _columns(y, "convert with y.astype(float), after encoding or dropping text and missing entries")
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32 if values.dtype == np.float16 else np.float64)


def encode_integers(y: Any, owner: str, do: str) -> np.ndarray:
    values = _columns(y, "number the labels first, e.g. classes, y = np.unique(y, return_inverse=True)")
    if values.dtype.kind == "f":
        raise DataError(
            message(f"{owner} labels must be integers.", f"dtype {values.dtype}, e.g. {values.flat[0]!r}", "integers 0, 1, …", f"pass {do}")
        )
    return values.astype(np.int32) if values.dtype.kind == "b" or np.can_cast(values.dtype, np.int32) else _narrow(values, owner)


def encode_counts(y: Any, owner: str) -> np.ndarray:
    """(n, k) int32; whole-number floats are taken, as tables often hold counts that way."""
    values = _columns(y, "convert with y.astype(int)")
    if values.dtype.kind == "f" and np.any(values != np.floor(values)):
        row = int(np.argwhere(values != np.floor(values))[0][0])
        got = f"{values[row].tolist()} in row {row}"
        raise DataError(message(f"{owner} targets must be counts.", got, "whole numbers ≥ 0", "use Gaussian() for real targets"))
    if values.min() < 0:
        row = int(np.argwhere(values < 0)[0][0])
        raise DataError(message(f"{owner} targets must be counts.", f"{values[row].tolist()} in row {row}", "whole numbers ≥ 0", "check y"))
    return _narrow(values, owner)


def _narrow(values: np.ndarray, owner: str) -> np.ndarray:
    limit = np.iinfo(np.int32)
    if values.max() > limit.max or values.min() < limit.min:
        row = int(np.argwhere((values > limit.max) | (values < limit.min))[0][0])
        raise DataError(
            message(f"{owner} targets are too large.", f"{values[row].max()} in row {row}", "32-bit integers", "rescale or bin y")
        )
    return values.astype(np.int32)


def check_range(values: np.ndarray, num_classes: int, owner: str, do: str) -> None:
    outside = (values < 0) | (values >= num_classes)
    if outside.any():
        row, column = (int(i) for i in np.argwhere(outside)[0])
        got = f"label {values[row, column]} in row {row} ({int(outside.sum())} such entries)"
        raise DataError(message(f"{owner} labels are out of range.", got, f"integers 0…{num_classes - 1}", do))


def check_several_classes(labels: np.ndarray, owner: str) -> None:
    if np.all(labels == labels[0]):
        got = f"{len(labels)} row{'s' if len(labels) > 1 else ''}, all of class {labels[0]}"
        raise DataError(message(f"There is only one class in y ({owner}).", got, "at least two classes", "add rows of another class"))
