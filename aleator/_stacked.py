"""What auto() found: methods with their scores on held-out rows, the fits that count with their weights, the table and the verdict."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from aleator import store
from aleator._errors import MethodError, StoreError, message
from aleator._files import digest, pack, unpack, write_atomic
from aleator._fit import Fit
from aleator._random import as_key, split
from aleator._typing import KeyLike
from aleator.methods import Method
from aleator.predictive import PredictiveViews, mix

LEVEL = 0.9  # of the intervals and sets whose coverage is told
APART = 2.0  # standard errors from which on a difference is called one
HELD_OUT = "held-out.safetensors"  # the log densities of held-out rows, beside auto.json
METRICS = {"accuracy": "accuracy [%, ↑]", "RMSE": "RMSE [y, ↓]"}


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
    (value, standard error), each fold's rows mixed by weights fitted to the others; manifest: what is to be kept with it; held_out: log densities of the held-out
    rows by method, (rows,) each, rows in the same order; whole: the same as an Entry, with RMSE or accuracy and coverage of the mixture; print it for the table."""

    fits: dict[str, Fit]
    weights: dict[str, float]
    entries: tuple[Entry, ...]
    stacked: tuple[float, float]
    seconds: float
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    held_out: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    whole: Entry | None = None

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
        document = self.to_json()
        write_atomic(directory / store.AUTO_NAME, json.dumps({"sha256": _checksum(document), **document}, indent=1).encode())

    KEYS: ClassVar[tuple[str, ...]] = ("names", "weights", "entries", "stacked", "seconds", "manifest", "whole")

    def to_json(self) -> dict[str, Any]:
        """What auto.json holds: everything but the fits and the densities."""
        return {
            "names": list(self.fits),
            "weights": self.weights,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "stacked": list(self.stacked),
            "seconds": self.seconds,
            "manifest": self.manifest,
            "whole": None if self.whole is None else dataclasses.asdict(self.whole),
        }

    @staticmethod
    def read(path: str | os.PathLike) -> dict[str, Any]:
        """auto.json as it is."""
        try:
            document = json.loads((Path(path) / store.AUTO_NAME).read_text())
            stored = document.pop("sha256", None)
            Auto.told(document)
            before = stored is None and set(document) <= set(Auto.KEYS)  # stacks of early versions have no checksum; their fits do
            if not before and stored != _checksum(document):
                raise ValueError("contents that do not match their checksum")
            return document
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            got = f"{type(error).__name__}: {error}"
            raise StoreError(message(f"{path} cannot be understood.", got, "what al.auto saved", "fit again")) from error

    @classmethod
    def told(cls, document: dict[str, Any], fits: dict[str, Fit] | None = None, held_out: dict[str, np.ndarray] | None = None) -> Auto:
        """From what `read` returns; without fits it prints its table and predicts nothing."""
        entries = tuple(Entry(**entry) for entry in document["entries"])
        rest = document["weights"], entries, tuple(document["stacked"]), document["seconds"], document["manifest"]
        whole = document.get("whole")
        return cls(fits or {}, *rest, held_out or {}, None if whole is None else Entry(**whole))

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

    def functions(self, key: KeyLike, x: Any, num_samples: int = 20) -> np.ndarray:
        """Function draws as of a Fit, (num_samples, rows, …): each fit gives its share of them, at least one."""
        shares = np.array([self.weights[name] for name in self.fits])
        counts = np.maximum(1, np.floor(shares * num_samples)).astype(int)
        counts[np.argmax(shares)] += num_samples - counts.sum()
        keys = split(as_key(key), len(self.fits))
        return np.concatenate([f.functions(k, x, int(n)) for f, k, n in zip(self.fits.values(), keys, counts, strict=True) if n > 0])

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
        for e in (*self.entries, *([self.whole] if self.whole is not None and len(self.weights) > 1 else [])):
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


def _checksum(document: dict[str, Any]) -> str:
    return digest(json.dumps(document, sort_keys=True).encode())


def _joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
