"""Do stated probabilities come true? Curves with the bands that a calibrated prediction would stay in, errors, and tests (A12).

A calibrated classifier is right in a share c of the rows it is sure of with confidence c; a calibrated regression has P(F(y) ≤ u) = u. On n
rows both hold up to sampling error only, so every number here comes with what perfect calibration would give on the same rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from aleator._errors import DataError, message
from aleator._random import as_key, seed_of
from aleator._typing import KeyLike
from aleator.decide._inputs import between, classes, columns, numeric
from aleator.predictive import PredictiveViews

SIMULATIONS = 1000


class Reliability(NamedTuple):
    """Stated against observed: `stated` (b,) mean of what was predicted in each bin, `observed` (b,) how often it came true, `size` (b,) rows;
    lower, upper (b,): where a calibrated prediction's `observed` would lie with probability `level`."""

    stated: np.ndarray
    observed: np.ndarray
    size: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    level: float


class Test(NamedTuple):
    """statistic; `null`, its mean under perfect calibration of the same predictions, and `critical`, its 95 % point there; p_value."""

    statistic: float
    null: float
    critical: float
    p_value: float
    name: str

    def __str__(self) -> str:
        verdict = "no sign of miscalibration" if self.p_value > 0.05 else "not calibrated"
        return f"{self.name} {self.statistic:.4f} (calibrated: {self.null:.4f} on average, 95 % below {self.critical:.4f}), p = {self.p_value:.3g}: {verdict}"


def reliability(predictive: Any, y: Any, num_bins: int = 15, bins: str = "width", label: Any = None, level: float = 0.95) -> Reliability:
    """Confidence of the most probable class against how often it is right; with `label`, the probability of that class.

    predictive: class probabilities (n, K) or a Predictive. bins: "width" (equal width) or "mass" (equal counts). Empty bins are left out.
    """
    probs, numbers = classes(predictive, y)
    stated, came_true = _events(probs, numbers, None if label is None else _class_of(predictive, label, probs.shape[1]))
    return _curve(stated, came_true, _bins(stated, num_bins, bins), level)


def quantile_reliability(key: KeyLike, predictive: PredictiveViews, y: Any, num_levels: int = 19, level: float = 0.95) -> Reliability:
    """Share of targets below the u-quantile, at u = 1/(L+1), …, L/(L+1). The key splits ties of counts."""
    from scipy.stats import binom

    values = pit(key, predictive, y).ravel()
    stated = np.arange(1, num_levels + 1) / (num_levels + 1)
    observed = np.mean(values[:, None] <= stated, axis=0)
    tail, n = 0.5 - between(level, "level") / 2, len(values)
    lower, upper = (binom.ppf(q, n, stated) / n for q in (tail, 1 - tail))
    return Reliability(stated, observed, np.full(num_levels, n), lower, upper, level)


def ece(predictive: Any, y: Any, num_bins: int = 15, bins: str = "width", kind: str = "top", debiased: bool = False) -> float:
    """Expected calibration error Σ_b (n_b/n) |observed_b − stated_b|, a share; lower is better, and never 0 on a finite sample.

    kind: "top" (the most probable class) or "classwise" (mean over classes of each class's own error). debiased: the ℓ₂ form √max(Σ_b (n_b/n)
    [(observed_b − stated_b)² − observed_b (1 − observed_b)/(n_b − 1)], 0), whose expectation does not grow with the number of bins. What
    is left of it by chance: see `calibration_test`.
    """
    probs, numbers = classes(predictive, y)
    return _calibration_error(probs, numbers, _statistic(num_bins, bins, kind, debiased))


def calibration_test(
    key: KeyLike,
    predictive: Any,
    y: Any,
    num_bins: int = 15,
    bins: str = "width",
    kind: str = "top",
    num_simulations: int = SIMULATIONS,
) -> Test:
    """Is the calibration error more than chance? p = (1 + #{simulated ≥ seen})/(1 + B), exact at every n and at every level.

    The null draws each row's y from the row's own predictive, so that it holds whatever the bins and however small the sample. Classes: the
    ece. Numbers: the mean distance ∫ |share of F(y) ≤ u − u| du of the PIT values from uniform ones.
    """
    generator = np.random.Generator(np.random.Philox(seed_of(as_key(key))))
    if isinstance(predictive, PredictiveViews) and predictive.support in ("real", "count"):
        key_pit, _ = jax.random.split(as_key(key))
        values = pit(key_pit, predictive, y).ravel()
        statistic, name = _pit_distance(values), "distance of PIT values from uniform"
        simulated = np.array([_pit_distance(generator.random(len(values))) for _ in range(num_simulations)])
    else:
        probs, numbers = classes(predictive, y)
        measure = _statistic(num_bins, bins, kind, False)
        name = "classwise ece" if kind == "classwise" else "ece"
        statistic = _calibration_error(probs, numbers, measure)
        edges = np.cumsum(probs, axis=1)
        draws = (np.argmax(edges >= generator.random((len(probs), 1)) * edges[:, -1:], axis=1) for _ in range(num_simulations))
        simulated = np.array([_calibration_error(probs, drawn, measure) for drawn in draws])
    # A hair below: values that are equal but for rounding count as reached.
    reached = np.sum(simulated >= statistic - 1e-12)
    return Test(statistic, float(simulated.mean()), float(np.quantile(simulated, 0.95)), float((1 + reached) / (1 + num_simulations)), name)


def pit(key: KeyLike, predictive: PredictiveViews, y: Any) -> np.ndarray:
    """Probability integral transform F(y), (rows, k): uniform when calibrated. Counts draw uniformly from [F(y − 1), F(y)], by the key."""
    numeric(predictive, "pit")
    values = columns(predictive, predictive.cdf(y))
    if predictive.support == "real":
        return values
    counts = predictive.encode(y)
    below = np.where(counts > 0, columns(predictive, predictive.cdf(np.maximum(counts - 1, 0))), 0.0)
    return below + (values - below) * np.asarray(jax.random.uniform(as_key(key), values.shape), float)


def sharpness(predictive: PredictiveViews, level: float = 0.9) -> dict[str, float]:
    """How narrow predictions are, in the units of y: mean standard deviation and mean width of the central interval. Lower is sharper, and
    better only among calibrated predictions."""
    numeric(predictive, "sharpness")
    lower, upper = predictive.interval(level)
    return {"std": float(np.mean(predictive.std)), f"width {level:g}": float(np.mean(upper - lower))}


def _class_of(predictive: Any, label: Any, num_classes: int) -> int:
    names = list(getattr(predictive, "labels", None) or range(num_classes))
    if label not in names:
        raise DataError(message("There is no such class.", repr(label), f"one of {names}", "pass one of them"))
    return names.index(label)


def _events(probs: np.ndarray, numbers: np.ndarray, label: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Stated probability and whether it came true, (n,) each."""
    if label is None:
        top = np.argmax(probs, axis=1)
        return probs[np.arange(len(probs)), top], top == numbers
    return probs[:, label], numbers == label


def _bins(stated: np.ndarray, num_bins: int, bins: str) -> np.ndarray:
    """Bin number of each row."""
    if num_bins < 1 or bins not in ("width", "mass"):
        got = f"num_bins={num_bins}, bins={bins!r}"
        raise DataError(message("These bins cannot be made.", got, "at least one bin, 'width' or 'mass'", "pass e.g. 15, 'mass'"))
    if bins == "width":
        # Bins are open below and closed above, so that a confidence of exactly one is in the last.
        return np.clip(np.ceil(stated * num_bins).astype(np.int64) - 1, 0, num_bins - 1)
    # Equal values must share a bin: the bin of each value is that of its first occurrence in the order.
    first = np.searchsorted(np.sort(stated), stated, side="left")
    return first * num_bins // len(stated)


def _sums(stated: np.ndarray, came_true: np.ndarray, numbers: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.bincount(numbers, weights, num_bins) for weights in (None, stated, came_true.astype(float)))  # type: ignore[return-value]


def _curve(stated: np.ndarray, came_true: np.ndarray, numbers: np.ndarray, level: float) -> Reliability:
    from scipy.stats import binom

    count, total, hits = _sums(stated, came_true, numbers, int(numbers.max()) + 1)
    some = count > 0
    count, mean, observed = count[some].astype(np.int64), (total / np.maximum(count, 1))[some], (hits / np.maximum(count, 1))[some]
    tail = 0.5 - between(level, "level") / 2
    lower, upper = (binom.ppf(q, count, np.clip(mean, 0, 1)) / count for q in (tail, 1 - tail))
    return Reliability(mean, observed, count, lower, upper, level)


def _statistic(num_bins: int, bins: str, kind: str, debiased: bool) -> tuple:
    if kind not in ("top", "classwise"):
        raise DataError(message("There is no such calibration error.", f"kind={kind!r}", "'top' or 'classwise'", "pass one of them"))
    return num_bins, bins, kind, debiased


def _calibration_error(probs: np.ndarray, numbers: np.ndarray, measure: tuple) -> float:
    num_bins, bins, kind, debiased = measure
    labels = (None,) if kind == "top" else range(probs.shape[1])
    errors = []
    for label in labels:
        stated, came_true = _events(probs, numbers, label)
        count, total, hits = _sums(stated, came_true, _bins(stated, num_bins, bins), num_bins)
        n = np.maximum(count, 1)
        if debiased:
            share = hits / n
            noise = np.where(count > 1, share * (1 - share) / np.maximum(count - 1, 1), 0.0)
            errors.append(np.sqrt(max(np.sum(count * (((hits - total) / n) ** 2 - noise)) / len(probs), 0.0)))
        else:
            errors.append(np.sum(np.abs(hits - total)) / len(probs))
    return float(np.mean(errors))


def _pit_distance(values: np.ndarray) -> float:
    """∫₀¹ |F̂(u) − u| du, exactly: F̂ is constant between the sorted values."""
    edges = np.concatenate([[0.0], np.sort(values), [1.0]])
    share = np.arange(len(values) + 1) / len(values)
    low, high = edges[:-1] - share, edges[1:] - share  # u − F̂ runs from low to high on each piece
    crossing = (low < 0) & (high > 0)
    return float(np.sum(np.where(crossing, 0.5 * (low**2 + high**2), 0.5 * np.abs(high**2 - low**2))))
