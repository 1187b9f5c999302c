"""auto(): several methods within a budget of time, from cheap to dear, compared on rows they have not seen, and stacked.

What comes back predicts as a Fit does, and says in a table what was tried, how it did, what was left out and why.
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
from typing import Any

import jax
import numpy as np

from aleator import store
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, StoreError, message
from aleator._files import write_atomic
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


@dataclasses.dataclass(frozen=True)
class Entry:
    """One method: its mean held-out log score with its standard error (nats per row, higher is better), p-value of calibration, seconds, weight, and
    what is to be said about it. A method that was left out has no numbers."""

    name: str
    score: float = float("nan")
    stderr: float = float("nan")
    calibration: float = float("nan")
    seconds: float = 0.0
    weight: float = 0.0
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Auto:
    """Fits to all rows with stacking weights; `predict(key, x)` mixes them. entries: everything that was tried; stacked: held-out log score of the mixture
    (value, standard error), optimistic by the few weights that were fitted to it; manifest: what is to be kept with it; print it for the table."""

    fits: dict[str, Fit]
    weights: dict[str, float]
    entries: tuple[Entry, ...]
    stacked: tuple[float, float]
    seconds: float
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)

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
        document = {
            "names": list(self.fits),
            "weights": self.weights,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "stacked": list(self.stacked),
            "seconds": self.seconds,
            "manifest": self.manifest,
        }
        write_atomic(directory / store.AUTO_NAME, json.dumps(document, indent=1).encode())

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
    def told(cls, document: dict[str, Any], fits: dict[str, Fit] | None = None) -> Auto:
        """From what `read` returns; without fits it prints its table and predicts nothing."""
        entries = tuple(Entry(**entry) for entry in document["entries"])
        return cls(fits or {}, document["weights"], entries, tuple(document["stacked"]), document["seconds"], document["manifest"])

    @classmethod
    def load(cls, path: str | os.PathLike) -> Auto:
        """Read one back; see `al.load`."""
        document = cls.read(path)
        return cls.told(document, {name: store.load(Path(path) / f"fit-{place}") for place, name in enumerate(document["names"])})

    def predict(self, key: KeyLike, x: Any, num_samples: int = 1000) -> PredictiveViews:
        """The mixed predictive distribution of y at the rows of x."""
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

    def __str__(self) -> str:
        width = max(6, *(len(e.name) for e in self.entries))
        lines = [f"{'method':<{width}}  log score [nats/row, ↑]  calibrated, p  seconds  weight  note"]
        for e in self.entries:
            score = f"{e.score:.3f} ± {e.stderr:.3f}" if np.isfinite(e.score) else "–"
            p = f"{e.calibration:.3f}" if np.isfinite(e.calibration) else "–"
            lines.append(f"{e.name:<{width}}  {score:>23}  {p:>13}  {e.seconds:>7.1f}  {e.weight:>6.2f}  {e.note}".rstrip())
        return "\n".join([*lines, self.status])


def auto(
    key: KeyLike,
    model: Any,
    data: Any,
    budget: str | float = "10m",
    methods: Mapping[str, Any] | None = None,
    report: Callable[[Entry], None] | None = None,
    **options: Any,
) -> Auto:
    """Run methods from cheap to dear within the budget, compare them on held-out rows, stack them, and fit the ones that count to all rows.

    budget: seconds, or "90s", "10m", "1h". methods: by name, each a Method or (model, Method) to bring a model of its own; chosen from the model by default. A
    method is left out once what it still needs, judged by its folds so far, does not fit what is left of the budget; the first is run whatever it takes. One that fails is left out, one that ends unhealthy is told of. report:
    called with every Entry. options go to `al.fit`.
    """
    limit = seconds_of(budget)
    rows = as_data(data)
    if not isinstance(rows, Data) or rows.num_data < 10:
        got = f"{rows.num_data} rows" if isinstance(rows, Data) else "a stream"
        raise DataError(message("There are too few rows to choose by.", got, "at least 10 rows in memory", "call al.fit with one method"))
    began = time.monotonic()
    key_folds, key_run = split(as_key(key), 2)
    parts = folds(key_folds, rows.num_data, NUM_FOLDS)[: NUM_FOLDS if rows.num_data <= FEW_ROWS else 1]
    held = np.concatenate([test for _, test in parts])
    candidates = default_methods(model, rows) if methods is None else dict(methods)
    entries: list[Entry] = []
    tables: dict[str, np.ndarray] = {}
    for number, (name, given) in enumerate(candidates.items()):
        own, method = given if isinstance(given, tuple) else (model, given)
        if not isinstance(method, Method):
            raise MethodError(message(f"{name!r} is not a method.", repr(method), "e.g. al.MAP()", "pass methods={'map': al.MAP()}"))
        left = limit - (time.monotonic() - began) if tables or number else float("inf")  # the first is run whatever it takes
        entry, terms = _try(jax.random.fold_in(key_run, number), name, own, method, rows, parts, left, options)
        if terms is not None:
            tables[name] = terms
        entries.append(entry)
        if report is not None:
            report(entry)
    if not tables:
        raise AleatorError(
            message(
                "No method came through.",
                "; ".join(f"{e.name}: {e.note}" for e in entries),
                "one healthy fit",
                "raise the budget, or call al.fit",
            )
        )
    names = list(tables)
    table = np.stack([tables[name] for name in names], axis=1)
    weights = stacking_weights(table)
    weights = np.where(weights < DROP, 0.0, weights) / np.sum(weights[weights >= DROP])
    peak = table.max(axis=1)
    mixed = peak + np.log(np.exp(table - peak[:, None]) @ weights)
    shares = {name: float(w) for name, w in zip(names, weights, strict=True) if w > 0}
    fits = {}
    for place, name in enumerate(shares):
        given = candidates[name]
        own, method = given if isinstance(given, tuple) else (model, given)
        fits[name], _ = _quietly(jax.random.fold_in(key_run, len(candidates) + place), own, rows, method, options)
    entries = [dataclasses.replace(e, weight=shares.get(e.name, 0.0)) for e in entries]
    error = float(mixed.std(ddof=1) / np.sqrt(len(held)))
    return Auto(fits, shares, tuple(entries), (float(mixed.mean()), error), time.monotonic() - began)


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


def _try(
    key: Key, name: str, model: Any, method: Method, rows: Data, parts: list, left: float, options: dict
) -> tuple[Entry, np.ndarray | None]:
    """One method on every fold: its entry, and the log densities of the held-out rows (None where it was left out)."""
    began = time.monotonic()
    if left <= 0:
        return Entry(name, note="left out: the budget is used"), None
    terms, notes, values, spent = [], [], [], 0.0
    keys = jax.random.split(key, 3 * len(parts))
    for number, (train, test) in enumerate(parts):
        held = rows.take(test)
        try:
            one, said = _quietly(keys[3 * number], model, rows.take(train), method, options)
            predictive = one.predict(keys[3 * number + 1], held.x, NUM_SAMPLES)
            density = predictive.log_prob(held.y)
        except AleatorError as error:
            return Entry(name, seconds=time.monotonic() - began, note=f"left out: {str(error).split('. ')[0]}"), None
        if not np.all(np.isfinite(density)):
            return Entry(name, seconds=time.monotonic() - began, note="left out: a held-out row has no density under it"), None
        terms.append(density)
        notes += said
        values.append(calibration_test(keys[3 * number + 2], predictive, held.y, num_simulations=199).p_value)
        spent, before = time.monotonic() - began, spent
        # The first fold compiles, so that only later ones tell what a fold costs; the fit to all rows costs one more.
        expected = (spent - before) * (len(parts) - number) if number or len(parts) == 1 else 0.0
        if expected > left - spent:
            return Entry(name, seconds=spent, note=f"left out: {spent + expected:.0f} s expected, {max(left, 0):.0f} s left"), None
    every = np.concatenate(terms)
    stderr = float(every.std(ddof=1) / np.sqrt(len(every)))
    # p-values of several folds: the smallest, times how many there are (Bonferroni).
    calibrated = min(1.0, min(values) * len(values))
    return Entry(name, float(every.mean()), stderr, calibrated, time.monotonic() - began, note=notes[0] if notes else ""), every


def _quietly(key: Key, model: Any, rows: Data, method: Method, options: dict) -> tuple[Fit, list[str]]:
    """A fit, and what it warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HealthWarning)
        one = fit(key, model, rows, method, **options)
    return one, [str(w.message).split(". ")[0] for w in caught if issubclass(w.category, HealthWarning)]
