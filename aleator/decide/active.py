"""Active learning: fit, look for the rows worth labelling, have them labelled, fit again (B14).

    history = al.active.loop(key, model, method, pool, oracle, batch=10, budget=200)

The oracle is an array of all labels, a function of row numbers, or the path of a CSV file that a person fills in between calls.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator import _tree, criteria, store
from aleator._errors import DataError, MethodError, StoreError, message
from aleator._files import digest, write_atomic
from aleator._fit import Fit, fit
from aleator._random import as_key, seed_of, split
from aleator._typing import Key, KeyLike, Tree
from aleator.data import Data, check_arrays
from aleator.decide import acquisition as _acquisition
from aleator.decide._oracle import oracle_of
from aleator.decide.acquisition import (
    Batch,
    bald,
    batch_bald,
    batch_gains,
    diverse,
    entropy,
    epig,
    joint_information,
    mean_std,
    top,
    variance_reduction,
    variation_ratio,
)
from aleator.model import BNN, LinearModel

NUM_SAMPLES = 100  # functions drawn to judge the pool by
POOL = 10_000  # rows of a larger pool looked at in a round, drawn at random
FEWEST = 32  # rows a fit of the loop sees at least; beyond, the next power of two
TARGETS = 500  # rows of the pool that stand for all predictions in "epig" and "variance_reduction"
CLASSES = ("batch_bald", "bald", "entropy", "variation_ratio", "mean_std", "epig", "diverse", "random")
NUMBERS = ("variance", "variance_reduction", "epig", "random")


class Round(NamedTuple):
    """One round: how many labels the fit had, its held-out scores by name (value, standard error, higher is better), seconds."""

    num_labels: int
    scores: dict[str, tuple[float, float, bool]]
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """index (n,): labelled rows in the order they were asked for; y: their labels; rounds; fit: of all of them; status: a sentence.

    waiting: row numbers that a person was asked to label, when the loop stopped for that.
    """

    index: np.ndarray
    y: np.ndarray
    rounds: tuple[Round, ...]
    fit: Fit | None
    status: str
    waiting: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of labels, values and standard errors of one score, (rounds,) each."""
        if not self.rounds or name not in self.rounds[0].scores:
            known = list(self.rounds[0].scores) if self.rounds else []
            raise DataError(message("There is no such curve.", repr(name), f"one of {known}", "pass test=(x, y) to the loop"))
        values = np.array([r.scores[name] for r in self.rounds])
        return np.array([r.num_labels for r in self.rounds]), values[:, 0], values[:, 1]

    def labels_to(self, name: str, level: float) -> int | None:
        """Labels at the first round whose score reaches `level`; None where none does."""
        numbers, values, _ = self.curve(name)
        reached = values >= level if self.rounds[0].scores[name][2] else values <= level
        return int(numbers[np.argmax(reached)]) if reached.any() else None


def choose(
    key: KeyLike,
    fitted: Fit,
    pool: Any,
    num: int,
    acquisition: str | Callable | None = None,
    excluded: Any = (),
    num_samples: int = NUM_SAMPLES,
    max_rows: int = POOL,
) -> Batch:
    """`num` rows of the pool worth labelling, never one of `excluded`. Of a pool with more rows than max_rows that many are looked at, drawn at random.

    acquisition, classes: "batch_bald" (default), "bald", "entropy", "variation_ratio", "mean_std", "epig", "diverse", "random"; numbers: "variance" (default:
    epistemic), "variance_reduction" (ALC), "epig", "random", where every further row is judged as if those before it were labelled; or a function (key, fit, x, num) → row numbers, given only rows that may be chosen.
    """
    x = check_arrays(pool, "pool")
    rows = _tree.rows(x)
    allowed = np.setdiff1d(np.arange(rows), _acquisition.row_numbers(excluded, rows))
    _acquisition.check_batch(num, len(allowed))
    key_pool, key_draws, key_pick, key_kind = split(as_key(key), 4)
    size = min(rows, max(max_rows, num))
    if len(allowed) > size:
        allowed = np.sort(_generator(key_pool).choice(allowed, size, replace=False))
    # Rows that may not be chosen fill up to one size, which does not change from round to round: predictions are compiled once.
    shown = np.concatenate([allowed, np.setdiff1d(np.arange(rows), allowed)[: size - len(allowed)]])
    part = jax.tree.map(lambda leaf: np.asarray(leaf)[shown], x)
    if callable(acquisition):
        picked = np.asarray(acquisition(key_pick, fitted, jax.tree.map(lambda leaf: leaf[: len(allowed)], part), num), np.int64)
        if picked.shape != (num,) or len(np.unique(picked)) < num or picked.min() < 0 or picked.max() >= len(allowed):
            raise MethodError(
                message(
                    "The acquisition did not choose a batch.",
                    f"{picked}",
                    f"{num} different rows below {len(allowed)}",
                    "return row numbers",
                )
            )
        return Batch(allowed[picked], np.full(num, np.nan))
    kind = fitted.predict(key_kind, jax.tree.map(lambda leaf: leaf[:1], part), 2).support
    known = CLASSES if kind in ("label", "binary") else NUMBERS
    name = known[0] if acquisition is None else acquisition
    if name not in known:
        raise MethodError(message("There is no such acquisition here.", repr(name), f"one of {', '.join(known)}", "pass one of them"))
    batch = _pick(name, key_draws, key_pick, fitted, part, len(allowed), num, num_samples, kind)
    return Batch(allowed[batch.rows], batch.value)


def _pick(name: str, key_draws: Key, key_pick: Key, fitted: Fit, x: Tree, rows: int, num: int, num_samples: int, kind: str) -> Batch:
    """A batch of the first `rows` rows of x."""
    if name == "random":
        return top(key_pick, np.zeros(rows), num)
    draws = fitted.functions(key_draws, x, num_samples)[:, :rows]
    if name == "batch_bald":
        return batch_bald(key_pick, draws, num)
    if name == "diverse":
        from aleator.decide.ood import features

        key_features, key_seed = split(key_pick, 2)
        mean = np.mean(draws, axis=0)
        return diverse(key_seed, mean, features(key_features, fitted, x)[0, :rows], num)
    key_top, key_targets, key_noise = split(key_pick, 3)
    if name in _acquisition.SINGLE:
        return top(key_top, _acquisition.SINGLE[name](draws), num)
    targets = _generator(key_targets).choice(rows, min(TARGETS, rows), replace=False)
    if kind in ("label", "binary"):
        return top(key_top, epig(draws, draws[:, targets]), num)
    noise = np.asarray(fitted.predict(key_noise, x, num_samples).aleatoric, float)[:rows].reshape(draws.shape[1:])
    return batch_gains(key_top, draws, noise, _gain(name, noise, targets), num)


def _generator(key: Key) -> np.random.Generator:
    """Numbers of unlabelled rows change from round to round: drawn on the host, where no shape is compiled."""
    return np.random.Generator(np.random.Philox(seed_of(key)))


def _gain(name: str, noise: np.ndarray, targets: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Centred draws (S, rows) or (S, rows, k) → (rows,): several target columns' gains add up."""

    def one(draws: np.ndarray, own: np.ndarray) -> np.ndarray:
        if name == "variance":
            return np.var(draws, axis=0, ddof=1)
        wanted = draws[:, targets]
        return epig(draws, wanted, own, own[targets]) if name == "epig" else variance_reduction(draws, own, wanted)

    return lambda draws: (
        np.sum([one(draws[..., c], noise[:, c]) for c in range(draws.shape[2])], axis=0) if draws.ndim == 3 else one(draws, noise)
    )


def loop(
    key: KeyLike,
    model: Any,
    method: Any,
    pool: Any,
    oracle: Any,
    batch: int = 10,
    budget: int = 100,
    *,
    acquisition: str | Callable | None = None,
    initial: int | Sequence[int] | np.ndarray = 20,
    test: Any = None,
    scores: Sequence[str] | None = None,
    warm: bool = False,
    num_samples: int = NUM_SAMPLES,
    max_rows: int = POOL,
    directory: str | os.PathLike | None = None,
    report: Callable[[Round], None] | None = None,
    **options: Any,
) -> History:
    """Fit, choose `batch` rows of the pool, have them labelled, until `budget` labels (the first ones included) or the whole pool is used.

    pool: inputs (N, …). oracle: all labels (N,), a function of row numbers, or the path of a CSV file with columns row and label. initial: the rows to begin with, or
    how many to draw at random. test = (x, y): scored after every round. warm: each fit starts from the one before. max_rows: of the pool, looked at in a round. directory: written after every
    round; the same call then goes on where it stopped. report: called with every Round. options go to `al.fit`.

    Fits see their rows repeated up to a power of two, weights shared among copies: the same posterior, and a program compiled once serves all rounds of that size. Not so
    where a method holds rows out or draws them again (holdout, bootstrap), or a model's rows hang together: there each round compiles its own.
    """
    key, x = as_key(key), check_arrays(pool, "pool")
    rows = _tree.rows(x)
    if not all(isinstance(number, (int, np.integer)) and number >= 1 for number in (batch, budget)):
        got = f"batch={batch!r}, budget={budget!r}"
        raise MethodError(message("There is nothing to label.", got, "whole numbers, at least 1 of each", "pass e.g. batch=10, budget=100"))
    ask = oracle_of(oracle, x, rows)
    key_first, key_rounds = split(key, 2)
    first = _first(key_first, initial, rows)
    budget = min(budget, rows)
    if len(first) > budget:  # the first labels are of the budget
        raise MethodError(
            message(
                "The first rows go beyond the budget.",
                f"{len(first)} of them",
                f"at most {budget}",
                "pass fewer as initial, or a larger budget",
            )
        )
    saved = None if directory is None else _Saved(Path(directory), _identity(key, model, method, x, acquisition, batch, first, max_rows))
    index, labels, rounds, fitted = (np.zeros(0, np.int64), [], [], None) if saved is None else saved.read(warm)
    while True:
        wanted, number = _wanted(index, first, rounds), len(rounds)
        key_fit, key_choose, key_score = split(jax.random.fold_in(key_rounds, number), 3)
        if wanted is None:  # everything asked for is labelled and fitted
            if len(index) >= budget:
                done = "The whole pool is labelled." if len(index) == rows else f"The budget of {budget} labels is used."
                return History(index, np.array(labels), tuple(rounds), fitted, done)
            if fitted is None:
                key_last, _, _ = split(jax.random.fold_in(key_rounds, number - 1), 3)  # the last round's fit again, after a restart
                fitted = _fitted(key_last, model, x, index, labels, method, None, options)
            wanted = choose(key_choose, fitted, x, min(batch, budget - len(index)), acquisition, index, num_samples, max_rows).rows
        answers = ask(wanted)
        if answers is None:
            return History(index, np.array(labels), tuple(rounds), fitted, f"Waiting for {len(wanted)} labels in {oracle}.", wanted)
        index, labels = np.concatenate([index, wanted]), labels + list(answers)
        began = time.monotonic()
        fitted = _fitted(key_fit, model, x, index, labels, method, fitted if warm else None, options)
        held = {} if test is None else _scored(key_score, fitted, test, scores, num_samples)
        rounds.append(Round(len(index), held, time.monotonic() - began))
        if report is not None:
            report(rounds[-1])
        if saved is not None:
            saved.write(index, labels, rounds, fitted, warm)


def curves(
    key: KeyLike,
    model: Any,
    method: Any,
    pool: Any,
    oracle: Any,
    test: Any,
    acquisitions: Sequence[str | None] = (None, "random"),
    num_runs: int = 3,
    **settings: Any,
) -> dict[str, list[History]]:
    """The loop with each acquisition, `num_runs` times; run r of every acquisition begins with the same rows. For `al.plots.learning_curves`."""
    keys = jax.random.split(as_key(key), num_runs)
    found: dict[str, list[History]] = {}
    for name in acquisitions:
        runs = [loop(k, model, method, pool, oracle, acquisition=name, test=test, **settings) for k in jax.random.clone(keys)]
        found["default" if name is None else str(name)] = runs
    return found


def _wanted(index: np.ndarray, first: np.ndarray, rounds: list[Round]) -> np.ndarray | None:
    """Rows to begin with that have no label yet; None where they all have."""
    left = first[~np.isin(first, index)]
    return left if len(left) and not rounds else None


def _fitted(key: Key, model: Any, x: Tree, index: np.ndarray, labels: list, method: Any, init: Any, options: dict) -> Fit:
    """A fit to the labelled rows, in as many rows as other rounds have."""
    rows = Data(jax.tree.map(lambda leaf: np.asarray(leaf)[index], x), np.array(labels))
    if (
        not isinstance(model, (BNN, LinearModel))
        or method.holdout
        or getattr(method, "bootstrap", False)
        or not getattr(method, "base", method).weighs
    ):
        return fit(key, model, rows, method, init=init, **options)
    batch_size = getattr(getattr(method, "base", method), "batch_size", None) or 1
    size = max(FEWEST, batch_size, 1 << (len(index) - 1).bit_length())
    found = fit(key, model, rows.repeated(size), method, init=init, **options)
    data = found.manifest["data"] | {"num_data": len(index)}
    return dataclasses.replace(found, manifest=found.manifest | {"data": data})


def _first(key: Key, initial: Any, rows: int) -> np.ndarray:
    if isinstance(initial, (int, np.integer)):
        if not 1 <= initial <= rows:
            raise MethodError(message("The loop cannot begin.", f"initial={initial}", f"1 to {rows} rows", "pass fewer"))
        return np.asarray(jax.random.choice(key, rows, (int(initial),), replace=False)).astype(np.int64)
    index = np.asarray(initial, np.int64)
    if index.ndim != 1 or not len(index) or len(np.unique(index)) < len(index) or index.min() < 0 or index.max() >= rows:
        raise DataError(message("These rows cannot begin.", f"{initial}", f"different row numbers below {rows}", "fix initial"))
    return index


def _scored(key: Key, fitted: Fit, test: Any, names: Sequence[str] | None, num_samples: int) -> dict[str, tuple[float, float, bool]]:
    x, y = (test.x, test.y) if isinstance(test, Data) else (test[0], test[1])
    predictive = fitted.predict(key, x, num_samples)
    if names is None:
        names = ("accuracy", "log_score") if predictive.support in ("label", "binary") else ("rmse", "log_score")
    if unknown := [name for name in names if name not in criteria.CRITERIA]:
        raise MethodError(message("There is no such score.", repr(unknown[0]), f"of {', '.join(criteria.CRITERIA)}", "pass some of them"))
    found = {name: criteria.CRITERIA[name](predictive, y) for name in names}
    return {name: (score.value, score.stderr, score.higher_is_better) for name, score in found.items()}


def _identity(key: Key, model: Any, method: Any, x: Tree, acquisition: Any, batch: int, first: np.ndarray, max_rows: int) -> str:
    run = store.identity(key, model, method, Data(x, None), 1.0)
    return digest(json.dumps([run, str(acquisition), batch, first.tolist(), max_rows]).encode())


class _Saved:
    """The loop's state in a directory: state.json, and the last fit where the next one starts from it."""

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity

    def read(self, warm: bool) -> tuple[np.ndarray, list, list[Round], Fit | None]:
        file = self.path / "state.json"
        if not file.exists():
            return np.zeros(0, np.int64), [], [], None
        state = json.loads(file.read_text())
        if state["identity"] != self.identity:
            raise StoreError(
                message(
                    "This directory holds another loop.",
                    str(self.path),
                    "the same key, model, method, pool and settings",
                    "use another directory, or the same settings",
                )
            )
        rounds = [Round(r[0], {k: tuple(v) for k, v in r[1].items()}, r[2]) for r in state["rounds"]]
        return np.array(state["index"], np.int64), state["labels"], rounds, store.load(self.path / "fit") if warm else None

    def write(self, index: np.ndarray, labels: list, rounds: list[Round], fitted: Fit, warm: bool) -> None:
        if warm:
            fitted.save(self.path / "fit")
        state = {"identity": self.identity, "index": index.tolist(), "labels": [_plain(label) for label in labels], "rounds": rounds}
        write_atomic(self.path / "state.json", json.dumps(state).encode())


def _plain(label: Any) -> Any:
    return label.tolist() if isinstance(label, (np.ndarray, np.generic)) else label


__all__ = [
    "Batch",
    "History",
    "Round",
    "bald",
    "batch_bald",
    "choose",
    "curves",
    "diverse",
    "entropy",
    "epig",
    "joint_information",
    "loop",
    "mean_std",
    "top",
    "variance_reduction",
    "variation_ratio",
]
