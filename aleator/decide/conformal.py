"""Conformal prediction: intervals and sets that hold the truth with a chosen probability whatever the model, as long as rows are exchangeable.

A score says how badly y fits the prediction. With the scores s₁, …, sₙ of held-out rows, the region {y : s(y) ≤ q} with q the ⌈(n + 1)·level⌉-th smallest of
them holds a new y with probability between `level` and level + 1/(n + 1). Good predictions make it small; bad ones only make it large.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from aleator._errors import DataError, HealthWarning, MethodError, message
from aleator._random import as_key
from aleator._typing import KeyLike
from aleator.data import Data, as_data, folds
from aleator.decide._inputs import between, classes, columns, numeric, probabilities
from aleator.predictive import PredictiveViews

REGRESSION = ("normalised", "absolute", "quantile")
CLASSIFICATION = ("adaptive", "probability")


@dataclasses.dataclass(frozen=True, eq=False)
class Conformal:
    """Regions calibrated on held-out rows: `interval(predictive)` for numbers, `sets(key, predictive)` for classes.

    level; score: what was calibrated; threshold: q, one number a target column, for each group (one group unless Mondrian); num_rows: how many rows calibrated it.
    """

    level: float
    score: str
    threshold: dict[Any, np.ndarray]
    num_rows: int
    penalty: float = 0.0
    free: int = 0

    def interval(self, predictive: PredictiveViews, groups: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper) in y's shape; infinite where a group had too few rows for the level."""
        if self.score not in REGRESSION:
            raise MethodError(message("These are sets of classes.", self.score, "a calibration on numbers", "call sets(key, predictive)"))
        numeric(predictive, "interval")
        q = self._threshold(predictive.num_rows, groups)
        lower, upper = _base_interval(predictive, self.score, self.level)
        scale = _scale(predictive, self.score)
        return predictive._shape(lower - q * scale), predictive._shape(upper + q * scale)

    def sets(self, key: KeyLike, predictive: Any, groups: Any = None) -> np.ndarray:
        """(rows, K) booleans: which classes are in the set. The key splits ties of the adaptive score, which makes coverage exact."""
        if self.score not in CLASSIFICATION:
            raise MethodError(message("These are intervals.", self.score, "a calibration on classes", "call interval(predictive)"))
        probs = probabilities(predictive)
        scores = _class_scores(key, probs, self.score, self.penalty, self.free)
        return scores <= self._threshold(len(probs), groups)

    def _threshold(self, num_rows: int, groups: Any) -> np.ndarray:
        """(rows, k)."""
        if groups is None:
            if set(self.threshold) != {None}:
                raise DataError(
                    message("Which groups are these rows in?", "no groups", f"one of {list(self.threshold)} a row", "pass groups=")
                )
            return np.broadcast_to(self.threshold[None], (num_rows, len(self.threshold[None])))
        names = np.asarray(groups).ravel().tolist()
        unknown = sorted({str(name) for name in names if name not in self.threshold})
        if unknown or len(names) != num_rows:
            got = f"{len(names)} rows, unknown groups {unknown}"
            raise DataError(
                message(
                    "These groups were not calibrated.",
                    got,
                    f"{num_rows} rows of {list(self.threshold)}",
                    "calibrate on rows of every group",
                )
            )
        return np.stack([self.threshold[name] for name in names])


def calibrate(
    key: KeyLike,
    predictive: Any,
    y: Any,
    level: float = 0.9,
    score: str | None = None,
    groups: Any = None,
    penalty: float = 0.0,
    free: int = 0,
) -> Conformal:
    """Split conformal: thresholds from held-out rows that the model has not seen.

    Numbers: score "normalised" |y − mean|/std (default: wide where the model is unsure), "absolute" |y − mean|, "quantile" (CQR) the distance
    outside the predictive interval of this level. Classes: "adaptive" (APS: the probability of classes at least as probable, randomised by the key;
    with `penalty` per class beyond the first `free`, RAPS), "probability" 1 − p(y). groups (rows,): Mondrian, the guarantee holds inside every group.
    """
    between(level, "level")
    numbers = isinstance(predictive, PredictiveViews) and predictive.support in ("real", "count")
    known = REGRESSION if numbers else CLASSIFICATION
    score = known[0] if score is None else score
    if score not in known:
        raise MethodError(message("There is no such score here.", repr(score), f"one of {', '.join(known)}", "pass one of them"))
    if numbers:
        seen = _number_scores(predictive, y, score, level)
    else:
        probs, truth = classes(predictive, y)
        seen = _class_scores(key, probs, score, penalty, free)[np.arange(len(probs)), truth][:, None]
    names = [None] * len(seen) if groups is None else np.asarray(groups).ravel().tolist()
    if len(names) != len(seen):
        raise DataError(message("The groups do not match the rows.", f"{len(names)} groups", f"{len(seen)} rows", "pass one group a row"))
    rows: dict[Any, list[int]] = {}
    for number, name in enumerate(names):
        rows.setdefault(name, []).append(number)
    threshold = {name: conformal_quantile(seen[index], level) for name, index in rows.items()}
    few = [name for name, q in threshold.items() if not np.all(np.isfinite(q))]
    if few:
        needed = int(np.ceil(level / (1 - level) - 1e-9))
        where = "" if groups is None else f" in groups {few}"
        warnings.warn(
            f"Too few rows{where} for level {level:g}: regions are everything. At least {needed} are needed.", HealthWarning, stacklevel=2
        )
    return Conformal(level, score, threshold, len(seen), penalty, free)


def conformal_quantile(scores: np.ndarray, level: float) -> np.ndarray:
    """The ⌈(n + 1)·level⌉-th smallest of (n, k) scores, per column; infinite when that is beyond the n-th."""
    scores = np.asarray(scores, float)
    if np.any(np.isnan(scores)):
        raise DataError(
            message(
                "A score is not a number.",
                f"NaN in row {int(np.argmax(np.isnan(scores).any(axis=1)))}",
                "numbers",
                "check the predictive and y",
            )
        )
    place = int(np.ceil((len(scores) + 1) * level - 1e-9))
    return np.full(scores.shape[1], np.inf) if place > len(scores) else np.sort(scores, axis=0)[place - 1]


# ------------------------------------------------------------------------------------------------------------- folds and ensembles


@dataclasses.dataclass(frozen=True, eq=False)
class JackknifePlus:
    """CV+: one fit a fold, and the residual of each training row under the fit that has not seen it. `interval(key, x)` covers with probability at
    least 1 − 2α, α = 1 − level, and in practice about 1 − α; no rows are lost to calibration."""

    fits: tuple[Any, ...]
    residuals: tuple[np.ndarray, ...]
    level: float
    normalised: bool

    def interval(self, key: KeyLike, x: Any, num_samples: int = 1000) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper) in y's shape: quantiles over rows i of μ₋ᵢ(x) ∓ Rᵢ, times the local standard deviation where normalised."""
        lows, highs, last = [], [], None
        for fit, residual, k in zip(self.fits, self.residuals, jax.random.split(as_key(key), len(self.fits)), strict=True):
            last = fit.predict(k, x, num_samples)
            mean, scale = columns(last, last.mean), _scale(last, "normalised" if self.normalised else "absolute")
            lows.append(mean - residual[:, None] * scale)
            highs.append(mean + residual[:, None] * scale)
        every = np.concatenate([-np.concatenate(lows), np.concatenate(highs)], axis=-1)
        n, width = every.shape[0], every.shape[2] // 2
        place = int(np.ceil((n + 1) * self.level - 1e-9))
        ends = np.full(every.shape[1:], np.inf) if place > n else np.sort(every, axis=0)[place - 1]
        return last._shape(-ends[:, :width]), last._shape(ends[:, width:])  # type: ignore[union-attr]


def jackknife_plus(
    key: KeyLike, model: Any, data: Any, method: Any, num_folds: int = 10, level: float = 0.9, normalised: bool = True, **options: Any
) -> JackknifePlus:
    """Fit `num_folds` times, each without one fold, and keep every row's residual under the fit that has not seen it."""
    from aleator._fit import fit

    between(level, "level")
    rows = as_data(data)
    if not isinstance(rows, Data) or rows.num_data < num_folds or num_folds < 2:
        got = f"{getattr(rows, 'num_data', 'a stream')} rows, {num_folds} folds"
        raise DataError(message("The rows cannot be folded.", got, "data in memory, at least one row a fold, two folds", "use fewer folds"))
    key_folds, *keys = jax.random.split(as_key(key), 1 + 2 * num_folds)
    fits, residuals = [], []
    for number, (train, test) in enumerate(folds(key_folds, rows.num_data, num_folds)):
        one, held = fit(keys[2 * number], model, rows.take(train), method, **options), rows.take(test)
        predictive = one.predict(keys[2 * number + 1], held.x)
        fits.append(one)
        residuals.append(_number_scores(predictive, held.y, "normalised" if normalised else "absolute", level))
    return JackknifePlus(tuple(fits), tuple(residuals), level, normalised)


# ---------------------------------------------------------------------------------------------------------------------- online


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Conformal intervals under drift (Gibbs and Candès 2021): the working level α_t moves against every miss, α ← α + rate (α* − miss).

    The long-run share of misses is within 1/(rate·T) of 1 − level for any sequence, without exchangeability. `scores` are those of the
    last `window` rows; `step` returns a new state.
    """

    level: float = 0.9
    rate: float = 0.02
    window: int = 500
    alpha: float | None = None
    scores: tuple[float, ...] = ()

    def threshold(self) -> float:
        """q of the next row; infinite while nothing, or not enough, is known."""
        alpha = 1 - self.level if self.alpha is None else self.alpha
        if alpha <= 0 or not self.scores:
            return float("inf")
        if alpha >= 1:
            return float("-inf")
        return float(conformal_quantile(np.asarray(self.scores)[:, None], 1 - alpha)[0])

    def step(self, score: float) -> Adaptive:
        """The state after the score of one more row was seen."""
        if np.isnan(score):
            raise DataError(message("A score is not a number.", "NaN", "a number", "check the predictive and y"))
        missed = float(score > self.threshold())
        alpha = 1 - self.level if self.alpha is None else self.alpha
        return dataclasses.replace(
            self, alpha=alpha + self.rate * (1 - self.level - missed), scores=(*self.scores, float(score))[-self.window :]
        )


def adaptive(
    predictives: PredictiveViews | Sequence[PredictiveViews], y: Any, state: Adaptive | None = None
) -> tuple[np.ndarray, np.ndarray, Adaptive]:
    """Rows in order of time: each row's interval made before its y is seen, from the normalised scores so far: (lower, upper, state)."""
    state = Adaptive() if state is None else state
    predictive = predictives if isinstance(predictives, PredictiveViews) else _joined(predictives)
    numeric(predictive, "adaptive intervals")
    mean, scale = columns(predictive, predictive.mean), _scale(predictive, "normalised")
    scores = _number_scores(predictive, y, "normalised", state.level)
    if mean.shape[1] > 1:
        raise MethodError(message("Adaptive intervals take one target.", f"{mean.shape[1]} columns", "one", "follow one column at a time"))
    q = np.empty(len(mean))
    for row, score in enumerate(scores[:, 0]):
        q[row] = state.threshold()
        state = state.step(score)
    half = np.where(np.isinf(q), q, q * scale[:, 0])
    return mean[:, 0] - half, mean[:, 0] + half, state


def _joined(parts: Sequence[Any]) -> PredictiveViews:
    from aleator.predictive import concatenate

    return concatenate(parts)


# --------------------------------------------------------------------------------------------------------------------- scores


def _scale(predictive: PredictiveViews, score: str) -> np.ndarray:
    if score != "normalised":
        return np.ones((predictive.num_rows, 1))
    spread = columns(predictive, predictive.std)
    if not np.all(np.isfinite(spread)) or np.any(spread <= 0):
        raise DataError(
            message(
                "The predictive has no standard deviation.", "0, infinite or NaN", "positive numbers", "use score='absolute' or 'quantile'"
            )
        )
    return spread


def _base_interval(predictive: PredictiveViews, score: str, level: float) -> tuple[np.ndarray, np.ndarray]:
    if score == "quantile":
        lower, upper = predictive.interval(level)
        return columns(predictive, lower), columns(predictive, upper)
    mean = columns(predictive, predictive.mean)
    return mean, mean


def _number_scores(predictive: PredictiveViews, y: Any, score: str, level: float) -> np.ndarray:
    """(rows, k): how far y is outside the base interval, in units of the scale."""
    numeric(predictive, "conformal prediction")
    lower, upper = _base_interval(predictive, score, level)
    values = predictive.encode(y)
    return np.maximum(lower - values, values - upper) / _scale(predictive, score)


def _class_scores(key: KeyLike, probs: np.ndarray, score: str, penalty: float, free: int) -> np.ndarray:
    """(rows, K): the score each class would have if it were the truth."""
    if score == "probability":
        return 1 - probs
    order = np.argsort(-probs, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=1)
    uniform = np.asarray(jax.random.uniform(as_key(key), (len(probs), 1)), float)
    # The mass of more probable classes, and a random part of the class's own: uniform on [0, 1] under a right model.
    reached = np.cumsum(ranked, axis=1) - uniform * ranked
    reached = reached + penalty * np.maximum(np.arange(1, probs.shape[1] + 1) - free, 0)
    scores = np.empty_like(reached)
    np.put_along_axis(scores, order, reached, axis=1)
    return scores
