"""The checks of an audit, each a traffic light with its reason and the numbers behind it.

Posterior predictive checks: y_rep drawn at the held rows, T(y) against T(y_rep); p = 2·min(P(T_rep ≤ T), P(T_rep ≥ T)), ties counted half on
both sides. Several p-values are judged together by the smallest times their number (Bonferroni).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import aleator as al
from aleator._errors import AleatorError, HealthWarning
from aleator._random import as_key, seed_of, split
from aleator._typing import KeyLike
from aleator.decide.calibration import calibration_test
from aleator.report.document import p_text
from aleator.report.facts import divide, member
from aleator.report.held import Held, hold, members, weights
from aleator.report.strange import strangeness

ORDER = ("grey", "green", "amber", "red")
LEVEL = 0.9
DOUBT, REJECT = 0.02, 0.001  # p-values: below the first look at it, at the second (the least that 999 simulations can tell) it is wrong
REPLICATES = 400
SHIFT = (0.25, 1.0)  # predictive standard deviations that the mean may move by when the prior is halved or doubled
APART = (0.1, 0.25)  # mean total variation distance to the oracle, beyond the oracle's own
SEEN = 0.05  # share of rows known from training, from which on rows do not count as held out


class Light(NamedTuple):
    """One check: green, amber, red, or grey where it could not be made."""

    name: str
    light: str
    why: str
    numbers: dict[str, Any]


def overall(lights: list[Light]) -> str:
    """The worst of them; grey only where all are."""
    return max((one.light for one in lights), key=ORDER.index)


def audit(key: KeyLike, fit: Any, frame: Any, seconds: float, rows: int) -> list[Light]:
    """All checks that can be made. frame: a table with the target, or None; seconds: for the oracle, 0 leaves it out."""
    key_held, key_test, key_check, key_strange, key_oracle, key_prior = split(as_key(key), 6)
    found = [convergence(fit)]
    held = None if frame is None else hold(key_held, fit, frame)
    if held is None:
        found += [stored_calibration(fit), Light("predictive checks", "grey", "They need rows with a target: pass --data.", {})]
    else:
        found += [calibration(key_test, fit, held), predictive_checks(key_check, held), unlike(key_strange, fit, held)]
    if seconds > 0:
        found.append(fidelity(key_oracle, fit, held, seconds, rows))
    found.append(prior(key_prior, fit, held))
    return found


def convergence(fit: Any) -> Light:
    """What each fit found out about itself; one of little weight counts for little."""
    judged = [member(name, one, weights(fit)[name]) for name, one in members(fit).items()]
    lights = ["amber" if one.light == "red" and one.weight < 0.1 else one.light for one in judged]
    why = " ".join(f"{one.name}: {one.status}" if len(judged) > 1 else one.status for one in judged)
    numbers = {one.name: {"light": one.light, "weight": one.weight, "status": one.status, **one.numbers} for one in judged}
    return Light("convergence", max(lights, key=ORDER.index), why, numbers)


def by_p(p: float) -> str:
    return "red" if p <= REJECT else "amber" if p < DOUBT else "green"


def stored_calibration(fit: Any) -> Light:
    """Coverage as measured when the fit was made, on rows unseen then."""
    scores = fit.manifest.get("held_out_scores") or {}
    name = next((name for name in scores if "coverage" in name), None)
    if name is None or scores[name]["stderr"] is None:
        return Light("calibration", "grey", "No coverage was measured when it was made: pass --data.", {})
    value, error = scores[name]["value"], scores[name]["stderr"]
    z = abs(value - 100 * LEVEL) / max(error, 1e-9)
    p = math.erfc(z / math.sqrt(2.0))
    return Light(
        "calibration", by_p(p), f"{name}: {value:.1f} ± {error:.1f} % on rows unseen when it was made ({p_text(p)}).", scores[name]
    )


def calibration(key: KeyLike, fit: Any, held: Held) -> Light:
    """The test of calibration and the coverage of 90 % intervals or sets; rows that were in training make it amber at best."""
    p = float(calibration_test(key, held.predictive, held.y, num_simulations=999).p_value)
    inside = covered(held)
    share, error = float(inside.mean()), float(inside.std(ddof=1) / np.sqrt(held.size))
    what = "sets" if held.classes else "intervals"
    score = held.predictive.log_prob(held.y)
    numbers = {
        "p_value": p,
        "coverage": share,
        "coverage_stderr": error,
        "rows": held.size,
        "seen": held.seen,
        "log_score": float(score.mean()),
        "log_score_stderr": float(score.std(ddof=1) / np.sqrt(held.size)),
    }
    why = f"90 % {what} hold {100 * share:.1f} ± {100 * error:.1f} % of {held.size} rows; test of calibration {p_text(p)}."
    light = by_p(p)
    if held.seen > SEEN:
        light, why = (
            max(light, "amber", key=ORDER.index),
            f"{why} But about {100 * held.seen:.0f} % of the rows were in training: use others.",
        )
    return Light("calibration", light, why, numbers)


def covered(held: Held) -> np.ndarray:
    """How far each row is inside its 90 % interval or (randomised) set, (n,)."""
    if held.classes:
        from aleator._auto import in_set

        return in_set(held.predictive.probs, held.predictive.encode(held.y))
    lower, upper = held.predictive.interval(LEVEL)
    return ((held.y >= lower) & (held.y <= upper)).astype(float)


def predictive_checks(key: KeyLike, held: Held) -> Light:
    """Statistics of the targets against those of targets drawn from the predictions of the same rows."""
    drawn = np.asarray(held.predictive.sample(key, REPLICATES))
    statistics: dict[str, Callable[..., Any]]
    if held.classes:
        labels = held.predictive.labels or tuple(range(np.asarray(held.predictive.probs).shape[1]))
        statistics = {f"share of {label}": (lambda v, label=label: np.mean(v == label, axis=-1)) for label in labels[:20]}
    else:
        statistics = {
            "mean": lambda v: np.mean(v, axis=-1),
            "standard deviation": lambda v: np.std(v, axis=-1),
            "smallest": lambda v: np.min(v, axis=-1),
            "largest": lambda v: np.max(v, axis=-1),
            "skewness": _skewness,
        }
    values = {}
    for name, statistic in statistics.items():
        true, rep = statistic(np.asarray(held.y)), statistic(drawn)
        below, same = float(np.sum(rep < true)), float(np.sum(rep == true))
        low = (below + 0.5 * same + 0.5) / (REPLICATES + 1)
        values[name] = float(min(1.0, 2 * min(low, 1 - low)))
    worst = min(values, key=lambda name: values[name])
    p = min(1.0, values[worst] * len(values))
    # Simulation cannot tell smaller p-values apart: red asks for the smallest possible one.
    light = "red" if values[worst] <= 2 / (REPLICATES + 1) and p < DOUBT else by_p(p)
    why = f"Targets drawn from the predictions look like the targets: {', '.join(statistics)}." if light == "green" else ""
    why = (
        why
        or f"The {worst} of the targets is unlike that of targets drawn from the predictions ({p_text(p)}, all {len(values)} checks counted)."
    )
    return Light("predictive checks", light, why, values)


def _skewness(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean(axis=-1, keepdims=True)
    return np.mean(centred**3, axis=-1) / np.maximum(np.mean(centred**2, axis=-1), 1e-300) ** 1.5


def unlike(key: KeyLike, fit: Any, held: Held) -> Light:
    """Rows and columns unlike the training data."""
    found = strangeness(key, fit, held, divide(held).share)
    outside = [row for row in found.rows if "unusually unsure" not in row.why or ";" in row.why]
    share = len(outside) / held.size
    light = "red" if share > 0.2 else "amber" if found.moved or share > 0.01 else "green"
    parts = [
        f"{len(outside)} of {held.size} rows have values far outside of training" + (f" (such as: {outside[0].why})" if outside else "")
    ]
    parts.append(
        "columns moved: " + ", ".join(f"{m.name} by {m.shift:+.2f} sd" for m in found.moved[:5]) if found.moved else "no column moved"
    )
    return Light("rows like training", light, "; ".join(parts) + ".", {"outside": share, "moved": [m._asdict() for m in found.moved]})


def fidelity(key: KeyLike, fit: Any, held: Held | None, seconds: float, rows: int) -> Light:
    """The heaviest fit's method against long Hamiltonian chains, both on the same small subsample of the held rows."""
    name = "fidelity"
    if held is None:
        return Light(name, "grey", "The comparison with a long Markov chain needs rows with a target: pass --data.", {})
    share = weights(fit)
    which = max(share, key=lambda one: share[one])
    one = members(fit)[which]
    if not isinstance(one.model, (al.BNN, al.LinearModel)):
        return Light(name, "grey", f"{which} is exact given its hyper-parameters: no chain to compare it with.", {})
    key_rows, key_fit, key_oracle, key_compare = split(as_key(key), 4)
    order = np.random.Generator(np.random.Philox(seed_of(key_rows))).permutation(held.size)
    some, others = order[: min(rows, held.size // 2)], order[held.size // 2 :][:rows]
    y = fit.preprocessor.encode_target(held.frame)
    small = dataclasses.replace(one, preprocessor=None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            method = _smaller(one.method, len(some))
            mine = al.fit(key_fit, small.model, (held.x[some], y[some]), method, progress=False)
            truth = al.oracle(key_oracle, small.model, (held.x[some], y[some]), budget=seconds, progress=False)
            found = al.fidelity(mine, truth, held.x[others], y[others], key=key_compare)
    except (AleatorError, NotImplementedError) as error:
        return Light(name, "grey", f"The comparison could not be made: {str(error).split('. ')[0]}.", {})
    distance, floor = found.distance.total_variation, found.floor.total_variation
    numbers = {"distance": found.distance._asdict(), "floor": found.floor._asdict(), "rows": len(some), "oracle": truth.status}
    if truth.status.startswith("Not an oracle"):
        return Light(name, "grey", f"The chain did not converge in {seconds:.0f} s: {truth.status}", numbers)
    beyond = distance - floor
    light = "red" if beyond > APART[1] else "amber" if beyond > APART[0] else "green"
    words = f"{which} on {len(some)} rows differs from a converged chain by {distance:.2f} in total variation on average (the chain from itself by {floor:.2f})"
    if light == "red" and isinstance(one.method, (al.Ensemble, al.MAP)):
        light, words = "amber", f"{words}: {type(one.method).__name__} does not approximate the posterior, it is judged by its calibration"
    return Light(name, light, words + ".", numbers)


def _smaller(method: Any, rows: int) -> Any:
    """The method with batches that fit into fewer rows."""
    changes: dict[str, Any] = {}
    if getattr(method, "batch_size", None) and method.batch_size > rows:
        changes["batch_size"] = None if isinstance(method, (al.MAP, al.Dropout, al.Variational)) else rows
    if isinstance(getattr(method, "base", None), al.Method):
        changes["base"] = _smaller(method.base, rows)
    return dataclasses.replace(method, **changes) if changes else method


def prior(key: KeyLike, fit: Any, held: Held | None) -> Light:
    """How far predictions move when the prior scale is halved or doubled; by reweighting draws, so that nothing is fitted again."""
    name, share = "prior", weights(fit)
    which = max(share, key=lambda one: share[one])
    one = dataclasses.replace(members(fit)[which], preprocessor=None)
    if held is not None:
        x = held.x[:50]
    else:
        x = np.random.Generator(np.random.Philox(seed_of(as_key(key)))).normal(size=(50, *one.manifest["data"]["x_shape"][0]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            found = al.elicit.sensitivity(key, one, x, num_samples=1000)
    except (AleatorError, NotImplementedError, AttributeError) as error:
        return Light(name, "grey", f"Not judged for {which}: {str(error).split('. ')[0]}.", {})
    moved = np.abs(found.shift) / found.std[found.base]
    per = {f"x{factor:g}": float(np.max(moved[i])) for i, factor in enumerate(found.factors) if i != found.base}
    numbers: dict[str, Any] = {"largest_shift_sd": per, "pareto_k": None if found.pareto_k is None else found.pareto_k.tolist()}
    if found.pareto_k is not None and np.max(found.pareto_k) > 0.7:
        if found.slope is None:
            return Light(name, "grey", f"The posteriors of {which} under other priors hardly overlap: not judged.", numbers)
        worst = float(np.max(np.abs(found.slope.mean) / found.std[found.base])) * math.log(2.0)
        how = "per doubling of the prior scale, by its slope"
    else:
        worst, how = max(per.values()), "when the prior scale is halved or doubled"
    light = "red" if worst > SHIFT[1] else "amber" if worst > SHIFT[0] else "green"
    where = "" if held is not None else " (at standard normal inputs)"
    numbers["worst"] = worst
    return Light(name, light, f"Predictions of {which} move by at most {worst:.2f} predictive sd {how}{where}.", numbers)
