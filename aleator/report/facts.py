"""Everything a report says, as plain numbers and words, before anything is drawn or written.

What needs no data comes from the fit itself: how its table was read, its model, method, health and stored scores. The rest is measured on
rows with known targets (`held`), honest where the fit has not seen them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator._errors import AleatorError
from aleator._random import as_key, split
from aleator._typing import KeyLike
from aleator.decide.calibration import Reliability, Test, calibration_test, quantile_reliability, reliability
from aleator.report.document import cell, number, some
from aleator.report.held import Held, hold, members, weights
from aleator.report.relevance import Effect, Importance, effects, importances
from aleator.report.strange import Strangeness, strangeness

LEVEL = 0.9
SHOWN = 8  # rows in the tables of single rows
SETTLED = ("Converged", "Complete", "Chains agree", "Oracle:", "PBP", "Annealed")
UNFINISHED = ("Still improving",)


class Column(NamedTuple):
    """One column of the table. missing: values missing in the rows looked at, None where only the training is known and had some."""

    name: str
    kind: str
    missing: str
    values: str


class Member(NamedTuple):
    """One fit: of a stack, or the only one. chosen: the Method; light: green, amber or red; numbers: the health figures behind it; traces (m, t) by name."""

    name: str
    weight: float
    model: str
    num_parameters: int | None
    method: str
    chosen: Any
    card: Any
    status: str
    light: str
    numbers: dict[str, Any]
    traces: dict[str, np.ndarray]
    steps: int | None
    seconds: float | None
    evidence: Any
    temperature: float
    created: str
    versions: dict[str, str]


class Row(NamedTuple):
    """One row of the table as it is shown: its number, what is said about it by name, and its values."""

    number: int
    said: tuple[str, ...]
    values: tuple[str, ...]


class Split(NamedTuple):
    """Uncertainty of each row, (n,): aleatoric and epistemic variance (numbers), or expected entropy and mutual information (classes, nats).
    share ± stderr: of the epistemic part in the total."""

    aleatoric: np.ndarray
    epistemic: np.ndarray
    share: float
    stderr: float
    unit: str


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
    """What the held rows say. scores: lines of `cli._scores`; uncertain and surprising: rows under the heads given."""

    held: Held
    scores: tuple[Any, ...]
    curve: Reliability
    test: Test
    split: Split
    columns: tuple[str, ...]
    uncertain_head: tuple[str, ...]
    uncertain: tuple[Row, ...]
    surprising_head: tuple[str, ...]
    surprising: tuple[Row, ...]
    strange: Strangeness
    importances: tuple[Importance, ...]
    effects: tuple[Effect, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """Everything known. task: "regression" or "classification"; table: what `aleator fit` wrote about its table; stored: held-out scores of that
    time, by name; entries: what a stack tried (`auto.Entry`)."""

    name: str
    target: str
    task: str
    labels: tuple[Any, ...]
    num_data: int
    table: dict[str, Any]
    notes: tuple[str, ...]
    columns: tuple[Column, ...]
    target_values: str
    members: tuple[Member, ...]
    entries: tuple[Any, ...]
    status: str
    stored: dict[str, dict[str, Any]]
    judged: Judged | None


def collect(key: KeyLike, fit: Any, data: Any = None, name: str = "") -> Facts:
    """All facts of a Fit or a stack; those about predictions from data: a table with the target, or (x, y)."""
    key_held, key_judge = split(as_key(key), 2)
    held = None if data is None else hold(key_held, fit, data)
    scaler = getattr(fit, "preprocessor", None)
    fits, counts = members(fit), weights(fit)
    first = next(iter(fits.values()))
    support = getattr(getattr(first.model, "likelihood", None), "support", "real")
    task = scaler.task if scaler is not None else ("classification" if support in ("label", "binary") else "regression")
    target = scaler.target if scaler is not None else "y"
    labels = tuple(scaler.labels) if scaler is not None else ()
    return Facts(
        name,
        target,
        task,
        labels,
        first.manifest["data"]["num_data"],
        dict(fit.manifest.get("table") or {}),
        () if scaler is None else tuple(scaler.notes),
        _columns(scaler, held),
        _target_values(scaler, held, task),
        tuple(member(name, one, counts[name]) for name, one in fits.items()),
        tuple(getattr(fit, "entries", ())),
        fit.status,
        dict(fit.manifest.get("held_out_scores") or {}),
        None if held is None else judge(key_judge, fit, held, task, target),
    )


def member(name: str, fit: Any, weight: float = 1.0) -> Member:
    """What one fit says about itself."""
    manifest = fit.manifest
    return Member(
        name,
        weight,
        repr(fit.model),
        num_parameters(fit),
        repr(fit.method),
        fit.method,
        fit.method.card,
        fit.status,
        health_light(fit),
        dict(manifest.get("health") or {}),
        {trace: np.atleast_2d(np.asarray(values, np.float64)) for trace, values in fit.info.items()},
        manifest.get("steps"),
        manifest.get("seconds"),
        fit.log_evidence,
        manifest.get("temperature", 1.0),
        manifest.get("created", ""),
        dict(manifest.get("versions") or {}),
    )


def num_parameters(fit: Any) -> int | None:
    """Numbers the posterior is over; None where the model cannot tell without its data."""
    try:
        shapes = jax.eval_shape(fit.model.init, jax.random.key(0))
    except (AleatorError, AttributeError, TypeError, ValueError):
        return None
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def health_light(fit: Any) -> str:
    """green, amber or red: what the fit found out about itself when it ended."""
    healthy = fit.manifest.get("healthy")
    if healthy is False:
        return "red"
    if fit.status.startswith(SETTLED):
        return "green"
    if healthy or fit.status.startswith(UNFINISHED) or "correct, but slow" in fit.status:
        return "amber"
    return "red"


def judge(key: KeyLike, fit: Any, held: Held, task: str, target: str) -> Judged:
    """The predictions of the held rows against their targets."""
    from aleator.cli._scores import scores

    key_curve, key_test, key_strange, key_columns, key_effects = split(as_key(key), 5)
    predictive, y = held.predictive, held.y
    curve = reliability(predictive, y) if held.classes else quantile_reliability(key_curve, predictive, y)
    divided = divide(held)
    uncertain_head, uncertain = _uncertain(held, divided)
    surprising_head, surprising = _surprising(held)
    return Judged(
        held,
        tuple(scores(predictive, y, task, target, LEVEL)),
        curve,
        calibration_test(key_test, predictive, y),
        divided,
        _shown_columns(held),
        uncertain_head,
        uncertain,
        surprising_head,
        surprising,
        strangeness(key_strange, fit, held, divided.share),
        importances(key_columns, fit, held),
        effects(key_effects, fit, held),
    )


def divide(held: Held) -> Split:
    """The two parts of the uncertainty of each row, and the share of the second with its standard error (a ratio of means, linearised)."""
    flat = lambda values: np.asarray(values, np.float64).reshape(held.size, -1).sum(axis=1)
    if held.classes:
        aleatoric, epistemic, unit = flat(held.predictive.aleatoric_entropy), flat(held.predictive.mutual_information), "nats"
    else:
        aleatoric, epistemic, unit = flat(held.predictive.aleatoric), flat(held.predictive.epistemic), "squared units"
    total = aleatoric + epistemic
    epistemic = np.where(epistemic < 1e-9 * total, 0.0, epistemic)  # rounding
    if not np.all(np.isfinite(total)) or total.mean() <= 0:
        return Split(aleatoric, epistemic, float("nan"), float("nan"), unit)
    share = epistemic.mean() / total.mean()
    error = np.std(epistemic - share * total, ddof=1) / np.sqrt(held.size) / total.mean()
    return Split(aleatoric, epistemic, float(share), float(error), unit)


# ---- rows -------------------------------------------------------------------------------------------------------------------------


def predicted(held: Held) -> tuple[str, ...]:
    """The prediction of each row in words: mean and its interval, or the class and its probability."""
    if held.classes:
        probs = np.asarray(held.predictive.probs, np.float64)
        labels = held.predictive.labels or tuple(range(probs.shape[1]))
        return tuple(f"{labels[int(row.argmax())]} ({100 * row.max():.0f} %)" for row in probs)
    mean, (lower, upper) = held.predictive.mean, held.predictive.interval(LEVEL)
    return tuple(f"{number(m)} ({number(a)} … {number(b)})" for m, a, b in zip(mean, lower, upper, strict=True))


def _uncertain(held: Held, divided: Split) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """Rows of the largest total uncertainty: the prediction, what was true, and both parts, as standard deviations or nats."""
    order = np.argsort(-(divided.aleatoric + divided.epistemic), kind="stable")[:SHOWN]
    size = (lambda v: v) if held.classes else np.sqrt
    unit = " [nats]" if held.classes else " sd"
    words, parts = predicted(held), (size(divided.aleatoric), size(divided.epistemic))
    say = lambda i: (words[i], number(held.y[i]) if not held.classes else str(held.y[i]), number(parts[0][i]), number(parts[1][i]))
    return ("predicted", "true", f"aleatoric{unit}", f"epistemic{unit}"), tuple(_row(held, int(i), say(i)) for i in order)


def _surprising(held: Held) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """Rows whose truth was least expected: by the probability of something as far out (numbers), or of the true class."""
    if held.classes:
        chance, what = np.exp(held.predictive.log_prob(held.y)), "probability of the truth"
    else:
        below = np.asarray(held.predictive.cdf(held.y), np.float64).reshape(held.size)
        chance, what = 2 * np.minimum(below, 1 - below), "probability of as far out"
    order = np.argsort(chance, kind="stable")[:SHOWN]
    words = predicted(held)
    say = lambda i: (words[i], number(held.y[i]) if not held.classes else str(held.y[i]), number(chance[i], 2))
    return ("predicted", "true", what), tuple(_row(held, int(i), say(i)) for i in order)


def _shown_columns(held: Held, most: int = 6) -> tuple[str, ...]:
    return held.columns[:most]


def _row(held: Held, place: int, said: tuple[str, ...]) -> Row:
    return Row(int(held.numbers[place]), said, row_values(held, place))


def row_values(held: Held, place: int) -> tuple[str, ...]:
    """The first columns of a row, as the user wrote them."""
    names = _shown_columns(held)
    if held.frame is not None:
        return tuple(cell(held.frame[name].iloc[place]) for name in names)
    flat = np.asarray(held.x).reshape(held.size, -1)
    return tuple(cell(float(flat[place, j])) for j in range(len(names)))


# ---- columns ----------------------------------------------------------------------------------------------------------------------


def _columns(scaler: Any, held: Held | None) -> tuple[Column, ...]:
    """Each column: of the rows given, or as the training left it behind."""
    if scaler is None:
        return ()
    found = []
    for column in scaler.columns:
        if held is None:
            missing = "some in training" if column.missing else "none in training"
            found.append(Column(column.name, column.kind, missing, _trained(column)))
            continue
        series = held.frame[column.name] if held.frame is not None else None
        gone = "–" if series is None else f"{int(series.isna().sum())} of {held.size}"
        found.append(Column(column.name, column.kind, gone, _trained(column)))
    return tuple(found)


def _trained(column: Any) -> str:
    """What training found in a column."""
    if column.kind == "numeric":
        return f"mean {number(column.loc)}, sd {number(column.scale)}"
    if column.kind == "date":
        day = lambda value: str(np.datetime64("1970-01-01") + np.timedelta64(round(value), "D"))
        return f"mean {day(column.loc)}, sd {number(column.scale)} days"
    if column.kind == "categorical":
        rest = f", {column.pooled} more pooled" if column.pooled else ""
        return f"{len(column.levels)} levels: {some(column.levels)}{rest}"
    return {"boolean": "true or false", "presence": "only whether it is there"}.get(column.kind, "")


def _target_values(scaler: Any, held: Held | None, task: str) -> str:
    """The target's distribution in a sentence."""
    parts = []
    if scaler is not None and task == "regression":
        parts.append(f"in training: mean {number(scaler.y_loc)}, sd {number(scaler.y_scale)}")
    elif scaler is not None:
        parts.append(f"{len(scaler.labels)} classes: {some(scaler.labels, 10)}")
    if held is not None and task == "regression":
        low, middle, high = np.quantile(np.asarray(held.y, np.float64), [0.0, 0.5, 1.0])
        told = f"mean {number(np.mean(held.y))}, sd {number(np.std(held.y, ddof=1))}, median {number(middle)}, between {number(low)} and {number(high)}"
        parts.append(f"in the {held.size} rows looked at: {told}")
    elif held is not None:
        values, counts = np.unique(held.y.astype(str), return_counts=True)
        most = np.argsort(-counts, kind="stable")
        parts.append(f"in the {held.size} rows looked at: {some([f'{values[i]} {100 * counts[i] / held.size:.0f} %' for i in most], 10)}")
    return "; ".join(parts)
