"""What each column is worth: permutation importance of the log score with standard errors, and effects with bands.

importance_j = (1/n) Σ_i [log p(y_i | x_i) − log p(y_i | x_i with column j of another row)], nats per row: what the predictions lose when
the column tells nothing. Its standard error is that of the per-row differences, so that what makes a row hard for both cancels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aleator._errors import AleatorError
from aleator._random import as_key, seed_of, split
from aleator._typing import KeyLike
from aleator.report.held import Held, members

ROWS = 200  # that columns are permuted on
REPEATS = 4
NUM_SAMPLES = 100
MOST_COLUMNS = 60  # looked at; more are left to the reader's patience, and told of
EFFECT_ROWS, EFFECT_DRAWS = 100, 100
LEVEL = 0.9


class Importance(NamedTuple):
    """value ± stderr in nats per row, higher matters more."""

    name: str
    value: float
    stderr: float


class Effect(NamedTuple):
    """Average change of the prediction with one standard deviation more of a numeric column (in units of y, or of probability), and the
    `LEVEL` interval of its posterior; positive: P(effect > 0)."""

    name: str
    value: float
    lower: float
    upper: float
    positive: float


def importances(key: KeyLike, fit: Any, held: Held, repeats: int = REPEATS) -> tuple[Importance, ...]:
    """Every column by itself, the largest first."""
    key_rows, key_predict = split(as_key(key), 2)
    generator = np.random.Generator(np.random.Philox(seed_of(key_rows)))
    x = np.asarray(held.x, np.float64)
    if x.ndim > 2 or not held.columns:
        return ()
    some = np.sort(generator.permutation(held.size)[:ROWS])
    x, y = x.reshape(held.size, -1)[some], held.y[some]
    keys = split(key_predict, min(len(held.columns), MOST_COLUMNS))
    found = []
    for key_column, name, group in zip(keys, held.columns, held.groups, strict=False):
        others = [_shuffled(generator, len(x)) for _ in range(repeats)]
        copies = [x.copy() for _ in others]
        for copy, order in zip(copies, others, strict=True):
            copy[:, list(group)] = x[order][:, list(group)]
        # One prediction of all: the same posterior draws meet a row as it is and as changed.
        rows = np.concatenate([x, *copies]).reshape(-1, *np.shape(held.x)[1:])
        terms = fit.predict(key_column, rows, NUM_SAMPLES).log_prob(np.tile(y, repeats + 1)).reshape(repeats + 1, -1)
        lost = terms[0] - terms[1:].mean(axis=0)
        found.append(Importance(name, float(lost.mean()), float(lost.std(ddof=1) / np.sqrt(len(lost)))))
    return tuple(sorted(found, key=lambda one: -one.value))


def _shuffled(generator: np.random.Generator, number: int) -> np.ndarray:
    """Another row for every row: a random cycle."""
    order = generator.permutation(number)
    other = np.empty(number, np.int64)
    other[order] = np.roll(order, 1)
    return other


def effects(key: KeyLike, fit: Any, held: Held) -> tuple[Effect, ...]:
    """Effects of numeric columns of a table, the largest first; none for several classes, stacks, and models without a differentiable mean."""
    from aleator import explain

    fits = list(members(fit).values())
    scaler = getattr(fit, "preprocessor", None)
    binary = held.classes and len(held.predictive.labels or (0, 1)) == 2
    if len(fits) > 1 or scaler is None or (held.classes and not binary):
        return ()
    chosen = [(c.name, group[0]) for c, group in zip(scaler.columns, held.groups, strict=True) if c.kind in ("numeric", "date")]
    if not chosen or len(scaler.feature_names) > MOST_COLUMNS:
        return ()
    try:
        found = explain.inputs(as_key(key), fits[0], held.x[:EFFECT_ROWS], num_samples=EFFECT_DRAWS, num_points=2)
    except (AleatorError, AttributeError, NotImplementedError):  # a process, or a program: no such derivatives
        return ()
    slopes = found.slopes[:, :, -1]
    tails = np.quantile(slopes, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], axis=0)
    rows = [
        Effect(name, float(slopes[:, j].mean()), float(tails[0, j]), float(tails[1, j]), float(np.mean(slopes[:, j] > 0)))
        for name, j in chosen
    ]
    return tuple(sorted(rows, key=lambda one: -abs(one.value)))
