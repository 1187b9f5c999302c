"""Rows and columns unlike the training data, by what the fit remembers of it and by how unsure it is.

Three signs, none of which needs the training rows: numbers far from the training mean in training standard deviations, and levels never met; an
epistemic uncertainty above all but 5 % of the other rows (`decide.ood`, threshold from one half of the rows, flags in the other); and
columns whose mean has moved, z = mean/√(variance/n + 1/N) of the standardised values, N rows in training.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from aleator._random import as_key, seed_of, split
from aleator._typing import KeyLike
from aleator.decide import ood
from aleator.report.held import Held, members

FAR = 5.0  # training standard deviations beyond which a number is outside of what the fit knows
FALSE_ALARM = 0.05
NOTHING = 1e-6  # epistemic share below which there is only rounding
MIN_HALF = 20  # rows in each half, for a threshold at 5 %
LEVEL = 0.01  # of the test for moved columns, over all of them together


class Strange(NamedTuple):
    """One flagged row: its place in the held rows, how many rows of the other half are at least as strange (a p-value; NaN where not
    computed), and why."""

    place: int
    p_value: float
    why: str


class Moved(NamedTuple):
    """A column whose mean differs from training, by `shift` training standard deviations; p_value: two-sided, before correction."""

    name: str
    shift: float
    p_value: float


class Strangeness(NamedTuple):
    """rows: flagged ones, those outside the training's range first. moved: columns. score: the name of the detector's score, "" where there were too few rows or nothing epistemic;
    expected: rows it would flag by chance."""

    rows: tuple[Strange, ...]
    moved: tuple[Moved, ...]
    score: str
    expected: float


def strangeness(key: KeyLike, fit: Any, held: Held, share: float) -> Strangeness:
    """Everything that looks unlike the training data; share: of the epistemic part in the uncertainty, without which there is no detector."""
    values = _detector_values(key, fit, held) if share > NOTHING else None
    reasons: dict[int, list[str]] = {}
    far = _outside(fit, held)
    for place, why in far:
        reasons.setdefault(place, []).append(why)
    if values is not None:
        for unsure in np.flatnonzero(values <= FALSE_ALARM):
            reasons.setdefault(int(unsure), []).append("the fit is unusually unsure of it")
    p = lambda place: math.nan if values is None else float(values[place])
    outside = {place for place, _ in far}
    rank = lambda place: (place not in outside, 1.0 if values is None else values[place], place)
    found = tuple(Strange(place, p(place), "; ".join(reasons[place])) for place in sorted(reasons, key=rank))
    score = "" if values is None else _score(held)
    return Strangeness(found, _moved(fit, held), score, FALSE_ALARM * held.size if score else 0.0)


def _score(held: Held) -> str:
    return "mutual_information" if held.classes else "variance"


def _detector_values(key: KeyLike, fit: Any, held: Held) -> np.ndarray | None:
    """Conformal p-value of each row against the other half of the rows, (n,)."""
    if held.size < 2 * MIN_HALF:
        return None
    key_order, *keys = split(as_key(key), 5)
    order = np.random.Generator(np.random.Philox(seed_of(key_order))).permutation(held.size)
    halves = np.array_split(order, 2)
    values = np.empty(held.size)
    for number, (own, other) in enumerate((halves, halves[::-1])):
        made = ood.detector(keys[2 * number], fit, np.asarray(held.x)[other], _score(held), false_alarm=FALSE_ALARM)
        values[own] = made.p_value(keys[2 * number + 1], np.asarray(held.x)[own])
    return values


def _outside(fit: Any, held: Held) -> list[tuple[int, str]]:
    """(row, reason) for numbers far outside and levels unseen in training."""
    scaler = getattr(fit, "preprocessor", None)
    if scaler is None or held.frame is None:
        return []
    found = []
    for column, group in zip(scaler.columns, held.groups, strict=True):
        if column.kind in ("numeric", "date"):
            z = np.asarray(held.x)[:, group[0]]
            found += [(int(i), f"{column.name} is {abs(z[i]):.1f} training sd from its mean") for i in np.flatnonzero(np.abs(z) > FAR)]
        elif column.kind == "categorical" and not column.pooled:
            given = ~held.frame[column.name].isna().to_numpy()
            none = np.asarray(held.x)[:, list(group[: len(column.levels)])].sum(axis=1) == 0
            found += [(int(i), f"{column.name} has a level unseen in training") for i in np.flatnonzero(given & none)]
    return found


def _moved(fit: Any, held: Held) -> tuple[Moved, ...]:
    """Numeric columns whose mean has moved, the surest first; Bonferroni over columns."""
    scaler = getattr(fit, "preprocessor", None)
    if scaler is None:
        return ()
    numeric = [(c.name, group[0]) for c, group in zip(scaler.columns, held.groups, strict=True) if c.kind in ("numeric", "date")]
    trained = max(1, next(iter(members(fit).values())).manifest["data"]["num_data"])
    found = []
    for name, j in numeric:
        z = np.asarray(held.x, np.float64)[:, j]
        error = math.sqrt(z.var(ddof=1) / held.size + 1.0 / trained)
        p = math.erfc(abs(z.mean()) / error / math.sqrt(2.0))
        if p < LEVEL / len(numeric):
            found.append(Moved(name, float(z.mean()), p))
    return tuple(sorted(found, key=lambda one: (one.p_value, -abs(one.shift))))
