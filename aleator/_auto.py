"""auto(): several methods within a budget of time, from cheap to dear, compared on rows they have not seen, and stacked.

What comes back predicts as a Fit does, and says in a table what was tried, how it did, what was left out and why. Methods are told apart by paired
differences of the log density of the same held-out rows.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator import criteria, store
from aleator._compare import stacking_weights
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, StoreError, message
from aleator._files import pack, unpack, write_atomic
from aleator._fit import Fit, fit
from aleator._random import as_key, split
from aleator._stacked import LEVEL, Auto, Entry, in_set
from aleator._typing import Key, KeyLike
from aleator.data import Data, as_data, folds
from aleator.decide.calibration import calibration_test
from aleator.methods import MAP, NUTS, SWAG, Ensemble, Exact, Laplace, Method, Variational
from aleator.model import LinearModel
from aleator.predictive import PredictiveViews

FEW_ROWS = 3000  # up to here every row is held out once, in five folds; beyond, one fifth of the rows is held out
NUM_FOLDS = 5
NUM_SAMPLES = 200
SMALL = 2**24  # rows × parameters up to which a Markov chain over all weights is tried
DROP = 1e-3  # members of less weight are not fitted to all rows
MOST = 10**7  # numbers of a method kept to tell the coverage of the mixture


def auto(
    key: KeyLike,
    model: Any,
    data: Any,
    budget: str | float = "10m",
    methods: Mapping[str, Any] | None = None,
    report: Callable[[Entry], None] | None = None,
    *,
    unit: float = 1.0,
    compare_only: bool = False,
    watch: Callable[[str, float], None] | None = None,
    checkpoint: str | os.PathLike | None = None,
    resume: bool = False,
    **options: Any,
) -> Auto:
    """Run methods from cheap to dear within the budget, compare them on held-out rows, stack them, and fit the ones that count to all rows.

    budget: seconds, or "90s", "10m", "1h", for everything. methods: by name, each a Method or (model, Method) to bring a model of its own; chosen from the model by default. A
    method is left out once what it still needs, judged by its folds so far, does not fit what is left of the budget; the first is run whatever it takes. One that fails is left out, one that ends unhealthy is told of. report:
    called with every Entry. unit: what y was divided by; scores are told in the units before that. compare_only: nothing is kept; methods that give an evidence are
    fitted to all rows for it. watch(words, seconds used): called whenever something begins. checkpoint: a directory where every finished method is written;
    resume: go on from there. options go to `al.fit`.
    """
    limit = seconds_of(budget)
    rows = as_data(data)
    if not isinstance(rows, Data) or rows.num_data < 10:
        got = f"{rows.num_data} rows" if isinstance(rows, Data) else "a stream"
        raise DataError(message("There are too few rows to choose by.", got, "at least 10 rows in memory", "call al.fit with one method"))
    key_folds, key_run = split(as_key(key), 2)
    parts = _parts(key_folds, rows.num_data)
    candidates = {
        name: given if isinstance(given, tuple) else (model, given)
        for name, given in (default_methods(model, rows) if methods is None else methods).items()
    }
    for name, (_, method) in candidates.items():
        if not isinstance(method, Method):
            raise MethodError(message(f"{name!r} is not a method.", repr(method), "e.g. al.MAP()", "pass methods={'map': al.MAP()}"))
    keys = [jax.random.fold_in(key_run, number) for number in range(2 * len(candidates))]
    saved = _Saved(checkpoint, resume)
    entries: list[Entry] = []
    held_out: dict[str, np.ndarray] = {}
    again: dict[str, float] = {}  # seconds that fitting each to all rows will take
    gives: set[str] = set()  # which give an evidence
    beside: dict[str, np.ndarray | None] = {}  # what else is known of their predictions of held-out rows
    began = time.monotonic()
    for number, (name, (own, method)) in enumerate(candidates.items()):
        clock = _Clock(began - saved.seconds, limit - sum(again.values()) if held_out or number else float("inf"), watch)
        identity = store.identity(keys[number], own, method, rows, unit) if saved.directory is not None else ""
        tried = saved.read(number, identity)
        if tried is None:
            tried = _try(keys[number], name, own, method, rows, parts, unit, clock, options)
            saved.write(number, identity, tried)
        if tried.density is not None:
            held_out[name], again[name], beside[name] = tried.density, tried.fold_seconds, tried.beside
            gives |= {name} if tried.gives_evidence else set()
        entries.append(tried.entry)
        if report is not None:
            report(tried.entry)
    if not held_out:
        raise AleatorError(
            message(
                "No method came through.",
                "; ".join(f"{e.name}: {e.note}" for e in entries),
                "one healthy fit",
                "raise the budget, or call al.fit",
            )
        )
    shares, mixed = _stacked(held_out, [len(test) for _, test in parts])
    clock = _Clock(began - saved.seconds, limit, watch)
    fits, evidences = {}, {}
    for number, (name, (own, method)) in enumerate(candidates.items()):
        if name in gives if compare_only else name in shares:
            clock.say(f"{name}, all rows")
            one, _ = _quietly(keys[len(candidates) + number], own, rows, method, options)
            evidences[name] = one.log_evidence
            if not compare_only:
                fits[name] = one
    told = lambda score: {} if score is None else {"evidence": float(score.value), "evidence_kind": score.kind}
    done = tuple(dataclasses.replace(e, weight=shares.get(e.name, 0.0), **told(evidences.get(e.name))) for e in entries)
    seconds = time.monotonic() - began + saved.seconds
    order = np.concatenate([test for _, test in parts])
    metric = next(e.metric for e in entries if e.metric)
    whole = _whole(shares, mixed, beside, np.asarray(rows.y)[order], metric, unit, seconds)
    return Auto(fits, shares, done, (whole.score, whole.stderr), seconds, held_out=held_out, whole=whole)


def default_methods(model: Any, rows: Data) -> dict[str, Any]:
    """Methods that suit the model and the size of the data, from cheap to dear."""
    if isinstance(model, LinearModel):
        return {"exact": Exact(), "laplace": Laplace("full"), "nuts": NUTS(num_samples=500, num_warmup=500, num_chains=2)}
    batch = None if rows.num_data <= 1000 else 256
    steps = 2000 if batch is None else int(np.clip(50 * rows.num_data // batch, 2000, 20_000))
    point = MAP(num_steps=steps, batch_size=batch, holdout=0.1, check_every=20, patience=10, clip=1.0)
    plain = MAP(num_steps=steps, batch_size=batch, clip=1.0)
    found: dict[str, Any] = {
        "map": point,
        "laplace": Laplace("kron", base=plain),
        "ensemble": Ensemble(point, 5),
        "swag": SWAG(num_steps=steps, num_warmup=steps // 2, batch_size=batch or max(2, rows.num_data // 10)),
        "variational": Variational(num_steps=2 * steps, batch_size=batch),
    }
    bound = model.bind(rows.x, model.likelihood.encode(rows.y))
    size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(jax.eval_shape(bound.init, jax.random.key(0))))
    if size * rows.num_data <= SMALL:
        found["nuts"] = NUTS(num_samples=200, num_warmup=300, num_chains=2, max_depth=7)
    return found


def seconds_of(budget: str | float) -> float:
    """Seconds of "90s", "10m", "1h", "1h30m", or of a number.

    >>> seconds_of("1h30m")
    5400.0
    """
    if isinstance(budget, (int, float)) and budget > 0:
        return float(budget)
    found = re.fullmatch(r"\s*(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m)?\s*(?:(\d+(?:\.\d+)?)s?)?\s*", str(budget))
    total = sum(float(part) * unit for part, unit in zip(found.groups(), (3600, 60, 1), strict=True) if part) if found else 0.0
    if not total > 0:
        raise MethodError(message("This is no budget of time.", repr(budget), "such as '10m', '90s', '1h' or seconds", "pass one of them"))
    return float(total)


class _Tried(NamedTuple):
    """One method tried: its entry, the log densities of the held-out rows (None where it was left out), seconds of the last fold; beside: see `_beside`."""

    entry: Entry
    density: np.ndarray | None = None
    fold_seconds: float = 0.0
    gives_evidence: bool = False
    beside: np.ndarray | None = None


class _Clock(NamedTuple):
    """began: when the budget began to be used; limit: how much of it this method may use; watch: who is told."""

    began: float
    limit: float
    watch: Callable[[str, float], None] | None

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - self.began)

    def say(self, words: str) -> None:
        if self.watch is not None:
            self.watch(words, time.monotonic() - self.began)


def _parts(key: Key, num_data: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) row numbers of each fold. All train on equally many rows, at most one less than they could: another shape would be compiled again."""
    parts = folds(key, num_data, NUM_FOLDS)[: NUM_FOLDS if num_data <= FEW_ROWS else 1]
    smallest = min(len(train) for train, _ in parts)
    return [(train[:smallest], test) for train, test in parts]


def _try(key: Key, name: str, model: Any, method: Method, rows: Data, parts: list, unit: float, clock: _Clock, options: dict) -> _Tried:
    """One method on every fold."""
    began = time.monotonic()
    gone = lambda why: _Tried(Entry(name, seconds=time.monotonic() - began, note=f"left out: {why}"))
    left = clock.left
    if left <= 0:
        return gone("the budget is used")
    densities, notes, values, seconds, covered, second, metric = [], [], [], [], [], [], ""
    known: list[np.ndarray | None] = []
    keys = jax.random.split(key, 3 * len(parts))
    for number, (train, test) in enumerate(parts):
        clock.say(f"{name}, fold {number + 1} of {len(parts)}")
        held, start = rows.take(test), time.monotonic()
        try:
            one, said = _quietly(keys[3 * number], model, rows.take(train), method, options)
            predictive = one.predict(keys[3 * number + 1], held.x, NUM_SAMPLES)
            density = np.asarray(predictive.log_prob(held.y), float) - np.log(unit)
        except AleatorError as error:
            return gone(str(error).split(". ")[0])
        if not np.all(np.isfinite(density)):
            return gone("a held-out row has no density under it")
        densities.append(density)
        notes += said
        values.append(calibration_test(keys[3 * number + 2], predictive, held.y, num_simulations=199).p_value)
        metric, loss, inside = _row_scores(predictive, held.y)
        second.append(loss)
        covered.append(inside)
        known.append(_beside(predictive, held.y))
        seconds.append(time.monotonic() - start)
        # The first fold compiles, so that only later ones tell what a fold costs; the fit to all rows costs one more.
        expected = seconds[-1] * (len(parts) - number) if number or len(parts) == 1 else 0.0
        spent = time.monotonic() - began
        if expected > left - spent:
            return gone(f"{spent + expected:.0f} s expected, {max(left, 0):.0f} s left")
    every, (value, spread) = np.concatenate(densities), _second(metric, np.concatenate(second), unit)
    mean, stderr = _mean(every)
    share, share_error = _mean(np.concatenate(covered))
    # p-values of several folds: the smallest, times how many there are (Bonferroni).
    calibrated = min(1.0, min(values) * len(values))
    numbers = (
        mean,
        stderr,
        calibrated,
        time.monotonic() - began,
        0.0,
        notes[0] if notes else "",
        metric,
        value,
        spread,
        share,
        share_error,
    )
    beside = None if any(part is None for part in known) else np.concatenate([part for part in known if part is not None])
    return _Tried(Entry(name, *numbers), every, seconds[-1], one.log_evidence is not None, beside)


def _row_scores(predictive: PredictiveViews, y: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """("accuracy" or "RMSE", hits or squared errors (n,), how far each row is inside its 90 % interval or set (n,))."""
    if predictive.support not in ("label", "binary"):
        errors = predictive.mean.reshape(predictive.num_rows, -1) - predictive.encode(y)
        return "RMSE", np.mean(errors**2, axis=1), criteria.coverage(predictive, y, LEVEL).rows
    return "accuracy", criteria.accuracy(predictive, y).rows, in_set(predictive.probs, predictive.encode(y))


def _beside(predictive: PredictiveViews, y: Any) -> np.ndarray | None:
    """What a mixture's coverage and second score are computed from: class probabilities (n, K), or mean and P(Y ≤ y), (n, 2); None for several targets."""
    if predictive.support in ("label", "binary"):
        probs = np.asarray(predictive.probs, np.float32)
        return probs if probs.ndim == 2 and probs.size <= MOST else None
    cdf = np.asarray(predictive.cdf(y), float).reshape(predictive.num_rows, -1)
    return np.concatenate([predictive.mean.reshape(cdf.shape), cdf], axis=1) if cdf.shape[1] == 1 and predictive.support == "real" else None


def _whole(shares: dict[str, float], mixed: np.ndarray, beside: dict, y: np.ndarray, metric: str, unit: float, seconds: float) -> Entry:
    """The mixture as an Entry: mixtures have mixed probabilities, means and distribution functions."""
    found = Entry("stacked", *_mean(mixed), seconds=seconds, weight=1.0)
    parts = [(weight, beside[name]) for name, weight in shares.items()]
    if any(part is None for _, part in parts):
        return found
    table = np.sum([weight * part for weight, part in parts], axis=0)
    if metric == "RMSE":
        rows, covered = (table[:, 0] - y.reshape(-1)) ** 2, (np.abs(table[:, 1] - 0.5) <= LEVEL / 2).astype(float)
    else:
        numbers: np.ndarray = y.reshape(-1).astype(np.int64)
        rows, covered = (table.argmax(axis=1) == numbers).astype(float), in_set(table, numbers)
    (value, error), (share, share_error) = _second(metric, rows, unit), _mean(covered)
    return dataclasses.replace(found, metric=metric, second=value, second_stderr=error, coverage=share, coverage_stderr=share_error)


def _mean(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _second(metric: str, rows: np.ndarray, unit: float) -> tuple[float, float]:
    """Accuracy, or the root of the mean squared error (its standard error by the delta method), with standard error."""
    value, error = _mean(rows)
    if metric == "accuracy" or value == 0:
        return value, error
    return unit * float(np.sqrt(value)), unit * error / (2 * float(np.sqrt(value)))


def _stacked(held_out: dict[str, np.ndarray], sizes: list[int]) -> tuple[dict[str, float], np.ndarray]:
    """Weights of the methods that count, and log densities (rows,) of the mixture; sizes: of the folds, whose rows follow each other.

    A fold's rows are mixed by weights fitted to the other folds, so that the score is of rows that the weights have not seen. Where that does not beat the best method
    alone, the best alone is taken: weights fitted to few rows, or to a row or two that one method misses, give away more than they insure.
    """
    table = np.stack(list(held_out.values()), axis=1)
    # One fold alone is divided, for there to be other rows.
    edges = np.cumsum(sizes)[:-1] if len(sizes) > 1 else np.arange(1, NUM_FOLDS) * len(table) // NUM_FOLDS
    groups = np.split(np.arange(len(table)), edges)
    unseen = np.concatenate([_mixed(table[rows], _weights(np.delete(table, rows, axis=0))) for rows in groups])
    best = int(np.argmax(table.mean(axis=0)))
    if unseen.mean() <= table[:, best].mean():
        return {list(held_out)[best]: 1.0}, table[:, best]
    return {name: float(w) for name, w in zip(held_out, _weights(table), strict=True) if w > 0}, unseen


def _weights(table: np.ndarray) -> np.ndarray:
    weights = stacking_weights(table)
    return np.where(weights < DROP, 0.0, weights) / np.sum(weights[weights >= DROP])


def _mixed(table: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """log Σₘ wₘ pₘ, (rows,). Weights may lack the one method that gives a row any density: the smallest number stands for none."""
    peak = table.max(axis=1)
    return peak + np.log(np.maximum(np.exp(table - peak[:, None]) @ weights, np.finfo(float).tiny))


class _Saved:
    """Finished methods in a directory, one file each; `seconds` is what they took of the budget."""

    def __init__(self, directory: str | os.PathLike | None, resume: bool):
        self.directory, self.resume, self.seconds = None if directory is None else Path(directory), resume, 0.0
        if self.directory is not None and not resume:
            remove_checkpoint(self.directory)

    def read(self, number: int, identity: str) -> _Tried | None:
        path = None if self.directory is None else self.directory / f"method-{number}.safetensors"
        if path is None or not self.resume or not path.exists():
            return None
        arrays, meta = unpack(path.read_bytes(), str(path))
        if meta.get("identity") != identity:
            raise StoreError(
                message(
                    "This directory holds another run.",
                    str(self.directory),
                    "the same data, methods and seed",
                    "repeat the options of the interrupted run, or start anew without resume",
                )
            )
        entry = Entry(**meta["entry"])
        self.seconds += entry.seconds
        return _Tried(entry, arrays["density"], meta["fold_seconds"], meta["gives_evidence"], arrays.get("beside"))

    def write(self, number: int, identity: str, tried: _Tried) -> None:
        if self.directory is not None and tried.density is not None:  # what was left out may have its turn again
            meta = {
                "identity": identity,
                "entry": dataclasses.asdict(tried.entry),
                "fold_seconds": tried.fold_seconds,
                "gives_evidence": tried.gives_evidence,
            }
            arrays = {"density": tried.density} | ({} if tried.beside is None else {"beside": tried.beside})
            write_atomic(self.directory / f"method-{number}.safetensors", pack(arrays, meta))


def remove_checkpoint(directory: Path) -> None:
    """Only what `auto` wrote there."""
    for path in directory.glob("method-*.safetensors"):
        path.unlink()


def _quietly(key: Key, model: Any, rows: Data, method: Method, options: dict) -> tuple[Fit, list[str]]:
    """A fit, and what it warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HealthWarning)
        one = fit(key, model, rows, method, **options)
    return one, [str(w.message).split(". ")[0] for w in caught if issubclass(w.category, HealthWarning)]


__all__ = ["Auto", "Entry", "auto", "default_methods", "in_set", "remove_checkpoint", "seconds_of"]
