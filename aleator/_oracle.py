"""The gold standard: a posterior sampled until its functions have converged, and how far any other fit is from it."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator import _tree, convergence
from aleator._errors import HealthWarning, MethodError, message
from aleator._fit import Fit, fit
from aleator._random import as_key, split
from aleator._typing import KeyLike, Tree
from aleator.methods import HMC, MAP
from aleator.posterior import Draws
from aleator.predictive import Predictive

FIRST = 250  # draws per chain of the first round; each round after it takes twice as many
WANTED_ESS = 400.0  # effective draws of every function at the reference inputs
GRID = 129  # points of y per row at which densities are compared
WITHIN = 0.2  # predictive standard deviations by which means may differ and still agree


class Distance(NamedTuple):
    """agreement: share of rows with the same most probable class (regression: means within 0.2 predictive standard deviations), ↑.
    total_variation: mean ½∫|p − q|, between 0 and 1, ↓. wasserstein: mean W₁ in units of y (of probability, for classes), ↓.
    log_predictive: mean E_oracle[log p_oracle − log p_fit] in nats per row, at the targets where given, ↓."""

    agreement: float
    total_variation: float
    wasserstein: float
    log_predictive: float


class Fidelity(NamedTuple):
    """distance: from the fit to the oracle. floor: between the two halves of the oracle's chains: what a perfect fit would show."""

    distance: Distance
    floor: Distance

    def __str__(self) -> str:
        rows = zip(Distance._fields, ("↑", "↓", "↓", "↓"), self.distance, self.floor, strict=True)
        lines = [
            f"{name.replace('_', ' '):<16} {sign} {value:9.4f}   (oracle against itself {floor:.4f})" for name, sign, value, floor in rows
        ]
        return "\n".join(lines)


def oracle(
    key: KeyLike, model: Any, data: Any, budget: float = 600.0, num_chains: int = 4, method: Any = None, progress: bool | None = None
) -> Fit:
    """A Fit by long Hamiltonian chains from several MAP starts, accepted when functions agree: R-hat < 1.05 and 400 effective draws of
    each function at the data and beyond. budget: seconds; rounds double in length until they pass or the budget is spent, which the
    status then says. method: another sampler with num_samples and num_warmup."""
    if not budget > 0:
        raise MethodError(message("An oracle needs time.", f"budget={budget}", "seconds > 0", "pass e.g. budget=600.0"))
    began = time.monotonic()
    key = as_key(key)
    key_start, key = split(key, 2)
    sampler = HMC(num_chains=num_chains) if method is None else method
    starts = _starts(key_start, model, data, sampler.num_chains)
    number, done = FIRST, None
    while True:
        key_round, key = split(key, 2)
        clock = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            sampler = dataclasses.replace(sampler, num_samples=number, num_warmup=min(number, 1000))
            done = fit(key_round, model, data, sampler, init=starts, progress=progress)
        health = done.manifest["health"]
        good = health["rhat"] < convergence.RHAT_FUNCTIONS and min(health["ess_bulk"], health["ess_tail"]) >= WANTED_ESS
        took, spent = time.monotonic() - clock, time.monotonic() - began
        if good or spent + 2.0 * took > budget:
            break
        # Each chain goes on from its own last draw.
        draws: Any = done.posterior
        starts = Draws(_tree.take(draws.params, slice(number - 1, None, number)), num_chains=sampler.num_chains)
        number *= 2
    what = f"R-hat {health['rhat']:.3f} and {min(health['ess_bulk'], health['ess_tail']):.0f} effective draws of every function"
    if good:
        return dataclasses.replace(done, status=f"Oracle: converged in function space, {what} ({spent:.0f} s).")
    status = (
        f"Not an oracle: {what} after {spent:.0f} s; R-hat < {convergence.RHAT_FUNCTIONS} and {WANTED_ESS:.0f} are wanted: raise budget."
    )
    warnings.warn(status, HealthWarning, stacklevel=2)
    return dataclasses.replace(done, status=status)


def fidelity(fitted: Fit, reference: Fit, x: Any, y: Any = None, key: KeyLike = 0) -> Fidelity:
    """How far a fit's predictions at the rows of x are from the oracle's, beside the distance between the oracle's own halves.

    y: targets at which the log predictive densities are compared; without them the comparison is in expectation under the oracle.
    """
    if not isinstance(reference.posterior, Draws):
        raise MethodError(
            message(
                "The reference has no draws to split.",
                type(reference.posterior).__name__,
                "a fit by al.oracle or a sampler",
                "pass al.oracle(key, model, data)",
            )
        )
    key_fit, key_reference, key_a, key_b = split(as_key(key), 4)
    truth = reference.predict(key_reference, x)
    halves = [dataclasses.replace(reference, posterior=part) for part in _halves(reference.posterior)]
    first, second = halves[0].predict(key_a, x), halves[1].predict(key_b, x)
    return Fidelity(_distance(truth, fitted.predict(key_fit, x), y), _distance(first, second, y))


def _starts(key: Any, model: Any, data: Any, num_chains: int) -> Any:
    """One short MAP run per chain, from its own initialisation: chains begin in different basins."""
    from aleator.methods import Ensemble

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)
        members: Any = fit(key, model, data, Ensemble(MAP(num_steps=500, batch_size=None, learning_rate=1e-2), num_chains), progress=False)
    return Draws(members.posterior.params, num_chains=num_chains)


def _halves(posterior: Draws) -> list[Draws]:
    """Chains one half each; the two halves of a single chain."""
    number = _tree.rows(posterior.params)
    middle = number // 2 if posterior.num_chains % 2 else number // posterior.num_chains * (posterior.num_chains // 2)
    cut: list[Tree] = [
        jax.tree.map(lambda leaf, part=part: leaf[part], posterior.params) for part in (slice(None, middle), slice(middle, None))
    ]
    return [Draws(part) for part in cut]


def _distance(truth: Predictive, other: Predictive, y: Any) -> Distance:
    if (truth.support, truth.num_columns) != (other.support, other.num_columns):
        got, wanted = (f"{each.support} targets in {each.num_columns} column{'s' * (each.num_columns != 1)}" for each in (other, truth))
        raise MethodError(message("The fit and the reference predict different things.", got, wanted, "fit both to the same target"))
    parts = _classes(truth, other) if truth.support in ("label", "binary") else _densities(truth, other)
    distance = Distance(*(float(part) for part in parts))
    if y is None:
        return distance
    return distance._replace(log_predictive=float(np.mean(np.asarray(truth.log_prob(y)) - np.asarray(other.log_prob(y)))))


def _classes(truth: Predictive, other: Predictive) -> tuple[Any, ...]:
    p, q = np.asarray(truth.probs, np.float64), np.asarray(other.probs, np.float64)
    change = np.abs(p - q)
    gain = p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300)))
    spread = [_spread(predictive) for predictive in (truth, other)]
    moved = change.mean() if spread[0] is None or spread[1] is None else np.abs(spread[0] - spread[1]).mean()
    return np.mean(p.argmax(-1) == q.argmax(-1)), 0.5 * change.sum(axis=-1).mean(), moved, gain.sum(axis=-1).mean()


def _spread(predictive: Predictive) -> np.ndarray | None:
    """Quantiles over posterior draws of each row's class probabilities, (levels, rows, classes): what W₁ compares. None where outputs are
    not draws."""
    if predictive.outputs.draws is None:
        return None
    return np.quantile(np.asarray(predictive.draws, np.float64), np.linspace(0.01, 0.99, 99), axis=0)


def _densities(truth: Predictive, other: Predictive) -> tuple[Any, ...]:
    """The same for numbers y, column by column: densities on a grid of ±8 predictive standard deviations about each row's mean, counts on
    all whole numbers in that range."""
    mean, spread = truth.encode(truth.mean), np.asarray(truth.std, np.float64).reshape(truth.num_rows, -1)
    agreement = np.mean(np.abs(other.encode(other.mean) - mean) < WITHIN * spread)
    if truth.support == "count":
        top = int(np.ceil((mean + 8.0 * spread).max()))
        grid, width = [np.full_like(mean, value) for value in range(min(top, 10 * GRID) + 1)], np.ones_like(mean)
    else:
        units = np.linspace(-8.0, 8.0, GRID)
        grid, width = [mean + z * spread for z in units], (units[1] - units[0]) * spread
    log_p, log_q = (np.stack([_at(which, "_log_columns", values) for values in grid]) for which in (truth, other))
    cdf_p, cdf_q = (np.stack([_at(which, "_cdf", values) for values in grid]) for which in (truth, other))
    p = np.exp(log_p)
    variation = 0.5 * np.abs(p - np.exp(log_q)).sum(axis=0) * width
    gain = np.where(p > 1e-12, p * (log_p - log_q), 0.0).sum(axis=0) * width
    return agreement, variation.mean(), (np.abs(cdf_p - cdf_q).sum(axis=0) * width).mean(), gain.mean()


def _at(predictive: Predictive, view: str, values: np.ndarray) -> np.ndarray:
    """A view of each column by itself at one value per row and column, (rows, k)."""
    return np.asarray(predictive._by_rows(lambda part, some: getattr(part, view)(some[None])[0], values), np.float64)
