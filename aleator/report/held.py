"""Rows with known targets, made ready to judge a fit by: features, targets, predictions, and whether the fit has seen them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from aleator._columns import missing_in
from aleator._errors import DataError, message
from aleator._random import as_key, seed_of, split
from aleator._typing import KeyLike
from aleator.data import Data, as_data, overlap, unseen
from aleator.predictive import PredictiveViews

MIN_ROWS = 10  # below this nothing here means anything
MAX_ROWS = 2000  # more rows say little more, and cost time
FRESH_ROWS = 20  # rows that the fit has not seen, from which on only they are judged by
SEEN = 0.05  # share of rows seen in training from which on it matters


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """n rows to judge by.

    frame: their columns as the user wrote them (None for arrays). x: as the model takes them. y (n,): in the user's units or names. numbers (n,): row
    numbers of the table, counting from 1. columns: names of the inputs; groups: the columns of x that each of them became. notes: what
    was left out or odd. seen: share of the rows that the fit was trained on. given: rows that were given, before any was left out.
    """

    frame: Any
    x: Any
    y: np.ndarray
    numbers: np.ndarray
    columns: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    seen: float
    given: int
    predictive: PredictiveViews

    @property
    def size(self) -> int:
        """n."""
        return len(self.y)

    @property
    def classes(self) -> bool:
        """Whether the targets are classes."""
        return self.predictive.support in ("label", "binary")


def members(fit: Any) -> dict[str, Any]:
    """The fits behind a prediction, by name: those of a stack, or the one."""
    return dict(fit.fits) if hasattr(fit, "fits") else {type(fit.method).__name__: fit}


def weights(fit: Any) -> dict[str, float]:
    """What each of them counts for; they sum to one."""
    return dict(fit.weights) if hasattr(fit, "fits") else dict.fromkeys(members(fit), 1.0)


def hold(key: KeyLike, fit: Any, data: Any, num_samples: int = 1000, max_rows: int = MAX_ROWS) -> Held:
    """Rows with targets, from a table with the target's column or from (x, y); at most max_rows of them, chosen at random."""
    key_rows, key_predict = split(as_key(key), 2)
    preprocessor = fit.preprocessor if hasattr(fit, "preprocessor") else None
    if hasattr(data, "columns"):
        if preprocessor is None:
            got, do = "a fit of arrays, and a table", "pass the arrays (x, y)"
            raise DataError(message("The fit does not know the columns of a table.", got, "a fit made from a table", do))
        return _from_frame(key_rows, key_predict, fit, data, preprocessor, num_samples, max_rows)
    given = as_data(data)
    if not isinstance(given, Data) or given.y is None:
        raise DataError(message("These are no rows with targets.", type(data).__name__, "a table or (x, y)", "pass held-out (x, y)"))
    x, y = np.asarray(given.x), np.asarray(given.y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(message("There are several targets.", f"y of shape {y.shape}", "one target", "judge one target at a time"))
    fresh, seen, told = _fresh(fit, x, _encoded(fit, y))
    rows = fresh[_chosen(key_rows, len(fresh), max_rows)]
    x, y = x[rows], y[rows]
    predictive = fit.predict(key_predict, x, num_samples)
    wide = x.shape[1] if x.ndim == 2 else 1 if x.ndim == 1 else 0
    names, groups = tuple(f"x{j}" for j in range(wide)), tuple((j,) for j in range(wide))
    return Held(None, x, y, rows + 1, names, groups, (*told, *_thinned(len(fresh), len(rows))), seen, given.num_data, predictive)


def _from_frame(key_rows: Any, key_predict: Any, fit: Any, frame: Any, preprocessor: Any, num_samples: int, max_rows: int) -> Held:
    target = preprocessor.target
    names = [str(name) for name in frame.columns]
    if target not in names:
        got = ", ".join(map(repr, names[:8])) + (" …" if len(names) > 8 else "")
        do = "add the column with the true values, or leave the table out"
        raise DataError(message(f"The table lacks the target {target!r}.", got, repr(target), do))
    frame = frame.set_axis(names, axis=1)
    known = np.flatnonzero(~missing_in(frame[target]))
    notes = [f"{len(frame) - len(known)} of {len(frame)} rows have no value of {target!r}: left out"] if len(known) < len(frame) else []
    _chosen(key_rows, len(known), max_rows)  # refuses too few
    part = frame.iloc[known].reset_index(drop=True)
    x, more = preprocessor.transform(part)
    z = preprocessor.encode_target(part)
    fresh, seen, told = _fresh(fit, x, _encoded(fit, z))
    kept = fresh[_chosen(key_rows, len(fresh), max_rows)]
    notes += [*told, *_thinned(len(fresh), len(kept))]
    part, x, z = part.iloc[kept].reset_index(drop=True), x[kept], z[kept]
    predictive = fit.predict(key_predict, x, num_samples)
    ends = np.cumsum([len(column.feature_names) for column in preprocessor.columns])
    groups = tuple(tuple(range(end - len(c.feature_names), end)) for end, c in zip(ends, preprocessor.columns, strict=True))
    columns = tuple(column.name for column in preprocessor.columns)
    y = preprocessor.invert_target(z)
    return Held(part, x, y, known[kept] + 1, columns, groups, (*notes, *more), seen, len(frame), predictive)


def _chosen(key: Any, number: int, most: int) -> np.ndarray:
    """Row numbers in order: all, or `most` at random."""
    if number < MIN_ROWS:
        got = f"{number} row{'s' * (number != 1)} with a target"
        raise DataError(message("There are too few rows to judge by.", got, f"at least {MIN_ROWS}", "pass more held-out rows"))
    if number <= most:
        return np.arange(number)
    generator = np.random.Generator(np.random.Philox(seed_of(key)))
    return np.sort(generator.choice(number, most, replace=False))


def _thinned(given: int, kept: int) -> tuple[str, ...]:
    return (f"{kept} of {given} rows, chosen at random, are looked at",) if kept < given else ()


def _encoded(fit: Any, y: np.ndarray) -> np.ndarray:
    """Targets as the models saw them."""
    likelihood = getattr(next(iter(members(fit).values())).model, "likelihood", None)
    return y if likelihood is None else likelihood.encode(y, fitting=False)


def _fresh(fit: Any, x: Any, encoded: np.ndarray) -> tuple[np.ndarray, float, tuple[str, ...]]:
    """(rows to judge by, share of them seen in training, what to say): rows that no fit has seen, where they can be told and are enough; else all."""
    shares, new = [], np.ones(len(encoded), bool)
    for one in members(fit).values():
        known, rows = getattr(one, "manifest", {}).get("data", {}).get("sketch"), Data(one._inputs(x), encoded)
        shares.append(overlap(known, rows))
        new &= unseen(known, rows)
    share = max(shares)
    if share > SEEN and new.sum() >= FRESH_ROWS:
        return np.flatnonzero(new), 0.0, (f"about {100 * share:.0f} % of the rows were in training: judged by {new.sum()} that were not",)
    return np.arange(len(encoded)), share, ()
