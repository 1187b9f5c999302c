"""Scores of predictions against targets: each a mean over rows with its standard error, and paired differences of two.

Every score keeps its contribution of each row, whose mean is the value; comparing two models on the same rows is then a paired test.
Several target columns are averaged (the log score is joint over them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._quadrature import integration_rule
from aleator._typing import KeyLike
from aleator.predictive import PredictiveViews


class Score(NamedTuple):
    """value = mean of `rows`; stderr = std(rows)/√n (NaN for one row); unit of the value; `rows` (n,) the contribution of each row."""

    value: float
    stderr: float
    name: str
    higher_is_better: bool
    unit: str
    rows: np.ndarray


def log_score(predictive: PredictiveViews, y: Any) -> Score:
    """Mean log predictive density (1/n) Σ log p(yᵢ | xᵢ), in nats per row and in the data's own units."""
    return _score(predictive.log_prob(y), "log score", True, "nats")


def rmse(predictive: PredictiveViews, y: Any) -> Score:
    """Root mean squared error of the predictive mean.

    Rows are linearised, rmse + (eᵢ² − mse)/(2 rmse): their mean is the rmse and their spread gives its standard error (delta method).
    """
    squared = np.mean(_errors(predictive, y, "rmse") ** 2, axis=1)
    value = np.sqrt(np.mean(squared))
    return _score(value + (squared - value**2) / (2 * value) if value > 0 else squared, "rmse", False, "units of y")


def mae(predictive: PredictiveViews, y: Any) -> Score:
    """Mean absolute error of the predictive median, the point that minimises it."""
    _numeric(predictive, "mae")
    median = predictive.quantile(0.5).reshape(predictive.num_rows, -1)
    return _score(np.mean(np.abs(median - predictive.encode(y)), axis=1), "mae", False, "units of y")


def accuracy(predictive: PredictiveViews, y: Any) -> Score:
    """Share of rows whose most probable class is the right one; with several binary columns, share of right entries."""
    probs, numbers = _classes(predictive, y, "accuracy")
    return _score(np.mean(np.argmax(probs, axis=-1) == numbers, axis=1), "accuracy", True, "share")


def brier(predictive: PredictiveViews, y: Any) -> Score:
    """Brier's score Σ_c (p_c − 1{y = c})² over classes, 0 to 2; for binary targets (p − y)², 0 to 1."""
    probs, numbers = _classes(predictive, y, "brier")
    squared = np.sum((probs - (numbers[..., None] == np.arange(probs.shape[-1]))) ** 2, axis=-1)
    return _score(np.mean(squared, axis=1) * (0.5 if predictive.support == "binary" else 1.0), "brier", False, "squared probability")


def crps(predictive: PredictiveViews, y: Any) -> Score:
    """Continuous ranked probability score ∫ (F(t) − 1{y ≤ t})² dt, the sum over whole t for counts; in the units of y.

    Mixtures of Gaussians in closed form (Grimit et al. 2006): Σ w_s A(y − μ_s, σ_s²) − ½ ΣΣ w_s w_r A(μ_s − μ_r, σ_s² + σ_r²) with
    A(m, v) = 2√v φ(m/√v) + m (2Φ(m/√v) − 1). Everything else by integrating the exact cdf on both sides of y.

    >>> from aleator.likelihoods import Gaussian
    >>> from aleator.predictive import Outputs, Predictive
    >>> standard = Predictive(Outputs(draws=np.zeros((1, 1, 1)), extra={"scale": np.ones(1)}), Gaussian(1.0), squeeze=True)
    >>> round(crps(standard, [0.0]).value, 6)
    0.233695
    """
    _numeric(predictive, "crps")
    values = predictive.encode(y).astype(float)
    return _score(np.mean(predictive._by_rows(_crps, values, many=64, panels=64), axis=1), "crps", False, "units of y")


def coverage(predictive: PredictiveViews, y: Any, level: float = 0.9) -> Score:
    """Share of targets inside the central interval of probability `level`; calibrated predictions give `level`."""
    lower, upper, values = _interval(predictive, y, level, "coverage")
    return _score(np.mean((values >= lower) & (values <= upper), axis=1), f"coverage {level:g}", True, "share")


def interval_score(predictive: PredictiveViews, y: Any, level: float = 0.9) -> Score:
    """Winkler's score of the central interval [l, u], α = 1 − level: (u − l) + (2/α) (l − y)₊ + (2/α) (y − u)₊."""
    lower, upper, values = _interval(predictive, y, level, "interval_score")
    missed = np.maximum(lower - values, 0) + np.maximum(values - upper, 0)
    return _score(np.mean(upper - lower + 2 / (1 - level) * missed, axis=1), f"interval score {level:g}", False, "units of y")


def top_k(predictive: PredictiveViews, y: Any, k: int = 5) -> Score:
    """Share of rows whose class is among the k most probable ones."""
    probs, numbers = _classes(predictive, y, "top_k")
    if not 1 <= k <= probs.shape[-1]:
        raise DataError(message("top_k cannot be computed.", f"k={k}", f"1 to {probs.shape[-1]} classes", "pass a smaller k"))
    own = np.take_along_axis(probs, numbers[..., None].astype(np.int64), axis=-1)
    # Ties share what is left of the k places, so that a constant prediction scores k/K and not 0 or 1.
    above, ties = np.sum(probs > own, axis=-1), np.sum(probs == own, axis=-1)
    return _score(np.mean(np.clip((k - above) / ties, 0, 1), axis=1), f"top-{k} accuracy", True, "share")


def energy_score(key: KeyLike, predictive: PredictiveViews, y: Any, num_samples: int = 512) -> Score:
    """E‖Y − y‖ − ½ E‖Y − Y′‖ with Y, Y′ drawn from the predictive, jointly over target columns; the crps for one column.

    From num_samples draws of Y; Y′ is the next draw (cyclically), so both expectations are unbiased and the cost is linear in draws.
    """
    _numeric(predictive, "energy_score")
    drawn = predictive.sample(key, num_samples).reshape(num_samples, predictive.num_rows, -1).astype(float)
    values = predictive.encode(y).astype(float)
    away = np.mean(np.linalg.norm(drawn - values, axis=-1), axis=0)
    within = np.mean(np.linalg.norm(drawn - np.roll(drawn, 1, axis=0), axis=-1), axis=0)
    return _score(away - 0.5 * within, "energy score", False, "units of y")


def auroc(scores: Any, positive: Any) -> Score:
    """P(score of a positive > score of a negative) + ½ P(equal): the area under the ROC curve.

    scores (n,): higher should mean positive; positive (n,): booleans. Rows are the value plus DeLong's influence of each row, so that the
    standard error is DeLong's and two detectors on the same rows are compared by `paired`.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]).value
    0.75
    """
    values, flags = _labelled(scores, positive, "auroc")
    ranks, own = _ranks(values), {flag: _ranks(values[flags == flag]) for flag in (True, False)}
    counts = {flag: int(np.sum(flags == flag)) for flag in (True, False)}
    # How much of the other side lies below each score: (rank among all − rank among its own) / the other side's size.
    below = np.empty(len(values))
    for flag in (True, False):
        below[flags == flag] = (ranks[flags == flag] - own[flag]) / counts[not flag]
    placed = np.where(flags, below, 1 - below)
    value = float(np.mean(placed[flags]))
    influence = np.where(flags, (placed - value) * len(values) / counts[True], (placed - value) * len(values) / counts[False])
    return _score(value + influence, "auroc", True, "probability")


def aupr(scores: Any, positive: Any) -> Score:
    """Average precision: the mean, over positives, of the share of positives among the rows scored at least as high.

    Higher is better; a constant score gives the share of positives. The standard error takes the precisions as independent.
    """
    values, flags = _labelled(scores, positive, "aupr")
    order = np.argsort(-values, kind="stable")
    ends = np.searchsorted(-values[order], -values, side="right")  # rows scored at least as high
    precision = np.cumsum(flags[order])[ends - 1] / ends
    return _score(precision[flags], "aupr", True, "precision")


def risk_coverage(loss: Any, uncertainty: Any) -> tuple[np.ndarray, np.ndarray]:
    """Coverage (n,) and mean loss (n,) of the rows kept when the most uncertain are refused, from one row kept to all.

    Rows of equal uncertainty are kept together in expectation: each counts with their mean loss.
    """
    losses, order, tied = _by_uncertainty(loss, uncertainty)
    return np.arange(1, len(losses) + 1) / len(losses), np.cumsum(tied) / np.arange(1, len(order) + 1)


def aurc(loss: Any, uncertainty: Any) -> Score:
    """Area under the risk–coverage curve: the selective risk averaged over coverages 1/n, 2/n, …, 1. Lower is better.

    (1/n) Σ_i (1/i) Σ_{j ≤ i} loss_(j) = (1/n) Σ_j loss_(j) Σ_{i ≥ j} 1/i: a weighted mean of losses, whose terms are the rows. Their
    standard error takes the order of the rows as given.
    """
    losses, order, tied = _by_uncertainty(loss, uncertainty)
    tail = np.cumsum((1 / np.arange(1, len(order) + 1))[::-1])[::-1]
    rows = np.empty(len(losses))
    rows[order] = tied * tail
    return _score(rows, "aurc", False, "loss")


def paired(first: Score, second: Score) -> Score:
    """first − second on the same rows; the standard error is that of the per-row differences, so shared difficulty cancels."""
    if first.name != second.name or first.rows.shape != second.rows.shape:
        got = f"{first.name} on {len(first.rows)} rows, {second.name} on {len(second.rows)} rows"
        raise DataError(message("These scores cannot be paired.", got, "the same score on the same rows", "score both on the same data"))
    return _score(first.rows - second.rows, first.name, first.higher_is_better, first.unit)


def p_value(difference: Score) -> float:
    """Two-sided p-value of the hypothesis that a difference is zero: Student's t on its rows (1 where all differences are zero)."""
    from scipy.stats import t

    if difference.stderr == 0:
        return 1.0 if difference.value == 0 else 0.0
    return float(2 * t.sf(abs(difference.value) / difference.stderr, len(difference.rows) - 1))


CRITERIA: dict[str, Callable[..., Score]] = {
    function.__name__: function for function in (log_score, rmse, mae, accuracy, brier, crps, coverage, interval_score)
}


def _score(rows: np.ndarray, name: str, higher_is_better: bool, unit: str) -> Score:
    rows = np.asarray(rows, float)
    stderr = float(np.std(rows, ddof=1) / np.sqrt(len(rows))) if len(rows) > 1 else float("nan")
    return Score(float(np.mean(rows)), stderr, name, higher_is_better, unit, rows)


def _numeric(predictive: PredictiveViews, name: str) -> None:
    if predictive.support not in ("real", "count"):
        got = f"{predictive.support} targets"
        raise ModelError(message(f"{name} needs numeric targets.", got, "real or count targets", "use log_score, accuracy or brier"))


def _errors(predictive: PredictiveViews, y: Any, name: str) -> np.ndarray:
    _numeric(predictive, name)
    return predictive.mean.reshape(predictive.num_rows, -1) - predictive.encode(y)


def _classes(predictive: PredictiveViews, y: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (rows, columns, classes) and class numbers (rows, columns)."""
    if predictive.support not in ("label", "binary"):
        got = f"{predictive.support} targets"
        raise ModelError(message(f"{name} needs class targets.", got, "Bernoulli or Categorical", "use log_score, rmse or crps"))
    probs, numbers = predictive.probs, predictive.encode(y)
    return (probs[:, None] if probs.ndim == 2 else probs), (numbers[:, None] if numbers.ndim == 1 else numbers)


def _interval(predictive: PredictiveViews, y: Any, level: float, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    _numeric(predictive, name)
    lower, upper = (end.reshape(predictive.num_rows, -1) for end in predictive.interval(level))
    return lower, upper, predictive.encode(y)


def _labelled(scores: Any, positive: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    values, given = np.asarray(scores, float), np.asarray(positive)
    if given.dtype.kind not in "biuf" or np.any((given != 0) & (given != 1)):  # NaN and names would all count as positive
        got = f"{given.dtype} of shape {given.shape}"
        raise DataError(message(f"{name} cannot be computed.", got, "booleans, or zeros and ones", "pass labels == the positive one"))
    flags = given.astype(bool)
    if values.ndim != 1 or values.shape != flags.shape or not np.all(np.isfinite(values)) or flags.all() or not flags.any():
        got = f"scores of shape {values.shape}, {int(flags.sum())} positives of {flags.size}"
        raise DataError(message(f"{name} cannot be computed.", got, "finite (n,) scores and both kinds of rows", "check the scores"))
    return values, flags


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - 0.5 * (counts - 1))[inverse]


def _by_uncertainty(loss: Any, uncertainty: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, the order from certain to uncertain, and in that order each row's loss averaged over its ties."""
    losses, unsure = np.asarray(loss, float), np.asarray(uncertainty, float)
    if losses.ndim != 1 or losses.shape != unsure.shape or not len(losses) or not np.all(np.isfinite(losses)) or np.any(np.isnan(unsure)):
        got = f"losses {losses.shape}, uncertainties {unsure.shape}"
        raise DataError(message("There is no risk–coverage curve.", got, "finite numbers (n,) of both", "pass one of each per row"))
    order = np.argsort(unsure, kind="stable")
    _, inverse = np.unique(unsure[order], return_inverse=True)
    tied = np.bincount(inverse, losses[order]) / np.bincount(inverse)
    return losses, order, tied[inverse]


def _spread(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """E|X| for X ~ N(mean, variance)."""
    from scipy.special import ndtr

    std = np.sqrt(variance)
    z = np.divide(mean, std, out=np.copysign(np.full_like(mean * std, np.inf), mean), where=std > 0)  # a point mass has E|X| = |mean|
    return 2 * std * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi) + mean * (2 * ndtr(z) - 1)


def _crps(part: PredictiveViews, y: np.ndarray) -> np.ndarray:
    """(rows, k)."""
    components = part.gaussian_components()
    if components is not None:
        weights, means, stds = components
        shape = weights[:, None, None]
        away = np.sum(shape * _spread(y - means, stds**2), axis=0)
        # One component against all others at a time keeps memory at draws × rows.
        within = sum(w * np.sum(shape * _spread(m - means, s**2 + stds**2), axis=0) for w, m, s in zip(weights, means, stds, strict=True))
        return away - 0.5 * within
    if part.support == "count":
        exact = _crps_counts(part, y)
        if exact is not None:
            return exact
    nodes, rule = integration_rule(part, 64, split=y)
    below = part._cdf(nodes)
    if part.support == "count":
        # Nodes of wide panels lie between whole numbers, where the cdf is flat: join its steps by lines.
        below = below + (nodes - np.floor(nodes)) * (part._cdf(np.ceil(nodes)) - below)
    # Beyond y the indicator is 1; for counts the node at y itself counts as beyond.
    return np.sum(rule * np.where(nodes >= y, 1 - below, below) ** 2, axis=0)


def _crps_counts(part: PredictiveViews, y: np.ndarray) -> np.ndarray | None:
    """Σ_t (F(t) − 1{y ≤ t})² term by term from the probabilities, much cheaper than cdfs; None when the counts are too many for that."""
    mean, aleatoric, epistemic = part._moments()
    top = np.max(np.maximum(y, mean + 40 * np.sqrt(aleatoric + epistemic))) + 1
    if not top < 2048:
        return None
    t = np.arange(np.ceil(top / 64) * 64).reshape(-1, 1, 1)  # whole blocks, so that few lengths are compiled
    cumulated = np.cumsum(np.exp(part._log_columns(np.broadcast_to(t, (len(t), *y.shape)).copy())), axis=0)
    return np.sum((cumulated - (t >= y)) ** 2, axis=0) if np.all(np.abs(cumulated[-1] - 1) < 1e-9) else None
