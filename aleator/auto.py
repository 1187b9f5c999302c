"""auto(): several methods within a budget of time, from cheap to dear, compared on rows they have not seen, and stacked.

What comes back predicts as a Fit does, and says in a table what was tried, how it did, what was left out and why. Methods are told apart by paired
differences of the log density of the same held-out rows.
"""

from __future__ import annotations

import dataclasses
import json
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
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, StoreError, message
from aleator._files import pack, unpack, write_atomic
from aleator._random import as_key, split
from aleator._typing import Key, KeyLike
from aleator.compare import stacking_weights
from aleator.data import Data, as_data, folds
from aleator.decide.calibration import calibration_test
from aleator.fit import Fit, fit
from aleator.methods import MAP, NUTS, SWAG, Ensemble, Exact, Laplace, Method, Variational
from aleator.model import LinearModel
from aleator.predictive import PredictiveViews, mix

FEW_ROWS = 3000  # up to here every row is held out once, in five folds; beyond, one fifth of the rows is held out
NUM_FOLDS = 5
NUM_SAMPLES = 200
SMALL = 2**24  # rows × parameters up to which a Markov chain over all weights is tried
DROP = 1e-3  # members of less weight are not fitted to all rows
LEVEL = 0.9  # of the intervals and sets whose coverage is told
APART = 2.0  # standard errors from which on a difference is called one
HELD_OUT = "held-out.safetensors"  # the log densities of held-out rows, beside auto.json


@dataclasses.dataclass(frozen=True)
class Entry:
    """One method on held-out rows. score: mean log density with its standard error (nats per row, higher is better). second: RMSE or accuracy, see `metric`. coverage: share
    of rows inside their 90 % interval, or set of classes. calibration: p-value. evidence (nats, of y as the models saw it) with its kind: of the fit to all
    rows, where the method gives one. seconds of all folds, stacking weight, and what is to be said about it. A method that was left out has no numbers."""

    name: str
    score: float = float("nan")
    stderr: float = float("nan")
    calibration: float = float("nan")
    seconds: float = 0.0
    weight: float = 0.0
    note: str = ""
    metric: str = ""
    second: float = float("nan")
    second_stderr: float = float("nan")
    coverage: float = float("nan")
    coverage_stderr: float = float("nan")
    evidence: float | None = None
    evidence_kind: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Auto:
    """Fits to all rows with stacking weights; `predict(key, x)` mixes them. entries: everything that was tried; stacked: held-out log score of the mixture
    (value, standard error), optimistic by the few weights that were fitted to it; manifest: what is to be kept with it; held_out: log densities of the held-out
    rows by method, (rows,) each, rows in the same order; print it for the table."""

    fits: dict[str, Fit]
    weights: dict[str, float]
    entries: tuple[Entry, ...]
    stacked: tuple[float, float]
    seconds: float
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    held_out: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def preprocessor(self) -> Any:
        """How a table became arrays, when it did: the same for all fits."""
        return next(iter(self.fits.values())).preprocessor

    @property
    def method(self) -> dict[str, Method]:
        """The methods that count, by name."""
        return {name: one.method for name, one in self.fits.items()}

    @property
    def model(self) -> dict[str, Any]:
        """Their models, by name."""
        return {name: one.model for name, one in self.fits.items()}

    @property
    def log_evidence(self) -> None:
        """None: a stack has no evidence."""

    def with_preprocessor(self, preprocessor: Any) -> Auto:
        """The same, made from a table."""
        return dataclasses.replace(
            self, fits={name: dataclasses.replace(one, preprocessor=preprocessor) for name, one in self.fits.items()}
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write one directory with a fit each and auto.json; `al.load(path)` reads it back."""
        directory = Path(path)
        if directory.exists() and (not directory.is_dir() or (any(directory.iterdir()) and not (directory / store.AUTO_NAME).exists())):
            raise StoreError(
                message("The directory holds something else.", str(directory), "a new or empty directory", "choose another path")
            )
        for place, one in enumerate(self.fits.values()):
            one.save(directory / f"fit-{place}")
        write_atomic(directory / HELD_OUT, pack(self.held_out, {}))
        write_atomic(directory / store.AUTO_NAME, json.dumps(self.to_json(), indent=1).encode())

    def to_json(self) -> dict[str, Any]:
        """What auto.json holds: everything but the fits and the densities."""
        return {
            "names": list(self.fits),
            "weights": self.weights,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "stacked": list(self.stacked),
            "seconds": self.seconds,
            "manifest": self.manifest,
        }

    @staticmethod
    def read(path: str | os.PathLike) -> dict[str, Any]:
        """auto.json as it is."""
        try:
            document = json.loads((Path(path) / store.AUTO_NAME).read_text())
            Auto.told(document)
            return document
        except (KeyError, TypeError, ValueError) as error:
            got = f"{type(error).__name__}: {error}"
            raise StoreError(message(f"{path} cannot be understood.", got, "what al.auto saved", "fit again")) from error

    @classmethod
    def told(cls, document: dict[str, Any], fits: dict[str, Fit] | None = None, held_out: dict[str, np.ndarray] | None = None) -> Auto:
        """From what `read` returns; without fits it prints its table and predicts nothing."""
        entries = tuple(Entry(**entry) for entry in document["entries"])
        rest = document["weights"], entries, tuple(document["stacked"]), document["seconds"], document["manifest"]
        return cls(fits or {}, *rest, held_out or {})

    @classmethod
    def load(cls, path: str | os.PathLike) -> Auto:
        """Read one back; see `al.load`."""
        document, file = cls.read(path), Path(path) / HELD_OUT
        held_out = unpack(file.read_bytes(), str(file))[0] if file.exists() else {}
        return cls.told(document, {name: store.load(Path(path) / f"fit-{place}") for place, name in enumerate(document["names"])}, held_out)

    def predict(self, key: KeyLike, x: Any, num_samples: int = 1000) -> PredictiveViews:
        """The mixed predictive distribution of y at the rows of x."""
        if not self.fits:
            raise MethodError(
                message("This compares and predicts nothing.", "no fits", "al.auto without compare_only", "fit the one you choose")
            )
        keys = jax.random.split(as_key(key), len(self.fits))
        parts = [one.predict(k, x, num_samples) for one, k in zip(self.fits.values(), keys, strict=True)]
        return parts[0] if len(parts) == 1 else mix(parts, [self.weights[name] for name in self.fits])

    @property
    def best(self) -> str:
        """Name of the method with the highest held-out log score."""
        return max((e for e in self.entries if np.isfinite(e.score)), key=lambda e: e.score).name

    @property
    def status(self) -> str:
        """What was chosen, in a sentence."""
        shares = ", ".join(f"{name} {weight:.2f}" for name, weight in sorted(self.weights.items(), key=lambda item: -item[1]))
        return (
            f"Stacked {shares}: {self.stacked[0]:.3f} ± {self.stacked[1]:.3f} nats per held-out row; the best single method is {self.best}."
        )

    def difference(self, first: str, second: str) -> tuple[float, float]:
        """Mean log density of `first` minus that of `second` over the same held-out rows, nats per row, and its (paired) standard error."""
        gap = self.held_out[first] - self.held_out[second]
        return float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap)))

    @property
    def verdict(self) -> str:
        """Which methods cannot be told apart from the best, which are worse and by how much, and which to take: the quickest of the best."""
        seconds = {e.name: e.seconds for e in self.entries if e.name in self.held_out}
        if len(seconds) < 2:
            return f"Only {self.best} came through: there is nothing to compare it with."
        gaps = {name: self.difference(self.best, name) for name in seconds if name != self.best}
        gaps = dict(sorted(gaps.items(), key=lambda item: item[1][0]))
        equal = [name for name, (gap, error) in gaps.items() if gap <= APART * error]
        said = lambda names: ", ".join(f"{name} by {gaps[name][0]:.3f} ± {gaps[name][1]:.3f}" for name in names)
        quickest = min([self.best, *equal], key=lambda name: seconds[name])
        if equal:
            few = ", ".join(f"{gaps[name][0]:.3f} ± {gaps[name][1]:.3f}" for name in equal)
            words = f"{_joined([self.best, *equal])} cannot be told apart (difference{'s' * (len(equal) > 1)} {few} nats per row)"
        else:
            words = f"{self.best} is the best"
        worse = [name for name in gaps if name not in equal]
        if worse:
            words += f"; worse than {self.best}: {said(worse)}" + ("" if equal else " nats per row")
        return f"{words}. Take {quickest}{': the quickest of the best' if equal else ''}."

    def __str__(self) -> str:
        width = max(6, *(len(e.name) for e in self.entries))
        metric = next((e.metric for e in self.entries if e.metric), "")
        told = any(e.evidence is not None for e in self.entries)
        evidence = f"  {'evidence [nats]':>25}" if told else ""
        head = f"{'method':<{width}}  log score [nats/row, ↑]  {METRICS.get(metric, metric):>17}  90 % covers [%]  calibrated, p"
        lines = [f"{head}{evidence}  seconds  weight  note"]
        for e in self.entries:
            part = lambda value, error, factor=1.0, digits=3: (
                f"{factor * value:.{digits}f} ± {factor * error:.{digits}f}" if np.isfinite(value) else "–"
            )
            p = f"{e.calibration:.3f}" if np.isfinite(e.calibration) else "–"
            share = 100.0 if metric == "accuracy" else 1.0
            cells = f"{part(e.score, e.stderr):>23}  {part(e.second, e.second_stderr, share, 1 if share > 1 else 3):>17}"
            cells += f"  {part(e.coverage, e.coverage_stderr, 100.0, 1):>15}  {p:>13}"
            if told:
                cells += f"  {'–' if e.evidence is None else f'{e.evidence:.1f} ({e.evidence_kind})':>25}"
            lines.append(f"{e.name:<{width}}  {cells}  {e.seconds:>7.1f}  {e.weight:>6.2f}  {e.note}".rstrip())
        return "\n".join([*lines, self.status])


METRICS = {"accuracy": "accuracy [%, ↑]", "RMSE": "RMSE [y, ↓]"}


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
    began = time.monotonic()
    for number, (name, (own, method)) in enumerate(candidates.items()):
        clock = _Clock(began - saved.seconds, limit - sum(again.values()) if held_out or number else float("inf"), watch)
        identity = store.identity(keys[number], own, method, rows, unit) if saved.directory is not None else ""
        tried = saved.read(number, identity)
        if tried is None:
            tried = _try(keys[number], name, own, method, rows, parts, unit, clock, options)
            saved.write(number, identity, tried)
        if tried.density is not None:
            held_out[name], again[name] = tried.density, tried.fold_seconds
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
    shares, mixed = _stacked(held_out)
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
    error = float(mixed.std(ddof=1) / np.sqrt(len(mixed)))
    return Auto(fits, shares, done, (float(mixed.mean()), error), time.monotonic() - began + saved.seconds, held_out=held_out)


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
    """One method tried: its entry, the log densities of the held-out rows (None where it was left out), seconds of the last fold."""

    entry: Entry
    density: np.ndarray | None = None
    fold_seconds: float = 0.0
    gives_evidence: bool = False


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
    return _Tried(Entry(name, *numbers), every, seconds[-1], one.log_evidence is not None)


def _row_scores(predictive: PredictiveViews, y: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """("accuracy" or "RMSE", hits or squared errors (n,), how far each row is inside its 90 % interval or set (n,))."""
    if predictive.support not in ("label", "binary"):
        errors = predictive.mean.reshape(predictive.num_rows, -1) - predictive.encode(y)
        return "RMSE", np.mean(errors**2, axis=1), criteria.coverage(predictive, y, LEVEL).rows
    return "accuracy", criteria.accuracy(predictive, y).rows, in_set(predictive.probs, predictive.encode(y))


def in_set(probs: Any, numbers: Any, level: float = LEVEL) -> np.ndarray:
    """How probable it is that a row's class is in its set of probability `level`, (n,): the mean is `level` for calibrated predictions.

    probs (n, K) or (n, columns, K); numbers (n,) or (n, columns): the classes. The set has the most probable ones; the last one is in it by chance, so that
    the set's probability is `level` and not more.

    >>> in_set([[0.6, 0.3, 0.1], [0.95, 0.04, 0.01]], [1, 0]).round(6)
    array([1.      , 0.947368])
    """
    probs, numbers = np.asarray(probs, float), np.asarray(numbers).reshape(len(probs), -1).astype(np.int64)
    probs = probs.reshape(len(probs), numbers.shape[1], -1)
    own = np.take_along_axis(probs, numbers[..., None], axis=-1)
    above = np.sum(np.where(probs > own, probs, 0.0), axis=-1)
    tied = np.sum(np.where(probs == own, probs, 0.0), axis=-1)
    return np.mean(np.clip((level - above) / np.maximum(tied, 1e-300), 0.0, 1.0), axis=1)


def _mean(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _second(metric: str, rows: np.ndarray, unit: float) -> tuple[float, float]:
    """Accuracy, or the root of the mean squared error (its standard error by the delta method), with standard error."""
    value, error = _mean(rows)
    if metric == "accuracy" or value == 0:
        return value, error
    return unit * float(np.sqrt(value)), unit * error / (2 * float(np.sqrt(value)))


def _stacked(held_out: dict[str, np.ndarray]) -> tuple[dict[str, float], np.ndarray]:
    """Weights of the methods that count, and the log densities of the mixture (rows,)."""
    table = np.stack(list(held_out.values()), axis=1)
    weights = stacking_weights(table)
    weights = np.where(weights < DROP, 0.0, weights) / np.sum(weights[weights >= DROP])
    peak = table.max(axis=1)
    mixed = peak + np.log(np.exp(table - peak[:, None]) @ weights)
    return {name: float(w) for name, w in zip(held_out, weights, strict=True) if w > 0}, mixed


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
        if meta["identity"] != identity:
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
        return _Tried(entry, arrays["density"], meta["fold_seconds"], meta["gives_evidence"])

    def write(self, number: int, identity: str, tried: _Tried) -> None:
        if self.directory is not None and tried.density is not None:  # what was left out may have its turn again
            meta = {
                "identity": identity,
                "entry": dataclasses.asdict(tried.entry),
                "fold_seconds": tried.fold_seconds,
                "gives_evidence": tried.gives_evidence,
            }
            write_atomic(self.directory / f"method-{number}.safetensors", pack({"density": tried.density}, meta))


def remove_checkpoint(directory: Path) -> None:
    """Only what `auto` wrote there."""
    for path in directory.glob("method-*.safetensors"):
        path.unlink()


def _joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _quietly(key: Key, model: Any, rows: Data, method: Method, options: dict) -> tuple[Fit, list[str]]:
    """A fit, and what it warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HealthWarning)
        one = fit(key, model, rows, method, **options)
    return one, [str(w.message).split(". ")[0] for w in caught if issubclass(w.category, HealthWarning)]
