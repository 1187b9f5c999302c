"""What functions of this package accept: a predictive or plain arrays, checked once."""

from __future__ import annotations

from typing import Any

import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator.predictive import PredictiveViews

TOLERANCE = 1e-4  # how far from one probabilities may sum: float32 softmax over a thousand classes is within it


def probabilities(given: Any, ndim: int = 2) -> np.ndarray:
    """Class probabilities (…, K) in float64, of `ndim` axes: those of a predictive, or an array that is one."""
    if isinstance(given, PredictiveViews):
        values = np.asarray(given.probs, float)
        if values.ndim != ndim:
            raise ModelError(message("There are several target columns.", f"{values.shape[1]} of them", "one", "pass one at a time"))
    else:
        values = np.asarray(given, float)
        values = np.stack([1 - values, values], axis=-1) if values.ndim == ndim - 1 else values
    if values.ndim != ndim or not values.size:
        raise DataError(
            message("These are no class probabilities.", f"shape {values.shape}", f"{ndim} axes, the last over classes", "reshape")
        )
    total = values.sum(axis=-1)
    if not np.all(np.isfinite(values)) or np.any(values < -TOLERANCE) or np.any(np.abs(total - 1) > TOLERANCE):
        row = int(np.argmax(~np.isfinite(total) | (np.abs(total - 1) > TOLERANCE) | np.any(values < -TOLERANCE, axis=-1)))
        got = f"{np.round(values.reshape(-1, values.shape[-1])[row], 6)} in row {row}"
        raise DataError(message("These are no class probabilities.", got, "numbers from 0 to 1 that sum to one", "normalise each row"))
    values = np.maximum(values, 0.0)
    return values / values.sum(axis=-1, keepdims=True)


def classes(given: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, K) and class numbers (n,); y by name where a predictive has names."""
    probs = probabilities(given)
    numbers = given.encode(y).reshape(-1) if isinstance(given, PredictiveViews) else np.asarray(y).reshape(-1)
    if (
        numbers.dtype.kind not in "biuf"
        or numbers.shape != (len(probs),)
        or np.any(numbers != np.floor(numbers))
        or numbers.min() < 0
        or numbers.max() >= probs.shape[1]
    ):
        got = f"y of shape {np.shape(y)}, {numbers.dtype}"
        raise DataError(
            message("y does not match the predictions.", got, f"{len(probs)} class numbers below {probs.shape[1]}", "encode the classes")
        )
    return probs, numbers.astype(np.int64)


def numeric(predictive: Any, what: str) -> None:
    """Refuse what has no order: class labels, and things that are no predictive."""
    if not isinstance(predictive, PredictiveViews):
        raise ModelError(message(f"{what} needs a predictive.", type(predictive).__name__, "what fit.predict returns", "pass it"))
    if predictive.support not in ("real", "count"):
        raise ModelError(
            message(f"{what} needs numeric targets.", f"{predictive.support} targets", "real or count targets", "use class functions")
        )


def columns(predictive: PredictiveViews, values: np.ndarray) -> np.ndarray:
    """(rows, k) whatever the user's y looked like."""
    return np.asarray(values, float).reshape(predictive.num_rows, -1)


def between(value: float, name: str, low: float = 0.0, high: float = 1.0) -> float:
    """A number strictly inside (low, high)."""
    if not low < value < high:
        raise DataError(
            message(f"{name} cannot be used.", f"{value!r}", f"a number strictly between {low:g} and {high:g}", "pass e.g. 0.9")
        )
    return float(value)
