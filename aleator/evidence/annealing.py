"""Annealed importance sampling: the evidence between a stochastic lower and a stochastic upper bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._cache import cached
from aleator._errors import DataError, HealthWarning, MethodError, message
from aleator._random import as_key, noise_key, split
from aleator._typing import Array, Key, KeyLike
from aleator.data import Batch
from aleator.diagnostics import pareto_k
from aleator.evidence._path import Cloud, Ladder, Path, backwards, cloud_at, ladder, moved, moves_of, pilot, prior_draws
from aleator.evidence._problem import Problem, check_whole, flat, problem, split_of
from aleator.posterior import Draws, Posterior, Score

PARETO = 0.7  # k̂ above this: the mean weight cannot be trusted


class Sandwich(NamedTuple):
    """log p(D) between two stochastic bounds, nats."""

    lower: Score
    upper: Score

    @property
    def width(self) -> float:
        return self.upper.value - self.lower.value


def ais(
    key: KeyLike,
    model: Any,
    data: Any = None,
    *,
    num_steps: int = 200,
    num_particles: int = 1000,
    num_leapfrog: int = 8,
    posterior_draws: Any = None,
    exact: bool = False,
    bound: bool = True,
) -> Score:
    """Annealed importance sampling (Neal 2001): log w = Σ_j (β_j − β_{j−1})·log p(D|θ_{j−1}), θ moved between by Hamiltonian trajectories.

    Forward, from the prior: E[w] = p(D), so that E[log w] ≤ log p(D); the mean of log w is a "lower bound". Backward, from
    posterior_draws (a Fit, a Posterior, or a tree with leading axis): E[1/w] = 1/p(D), E[log w] ≥ log p(D); the mean of log w is an "upper bound",
    but only where the draws are exact: those of `al.Exact`, or others with exact=True (the parameters that simulated the data, an
    enumeration, a grid). Draws of Markov chains give an "estimate". bound=False: log of the mean weight (or minus that of its inverse), an
    "estimate" whose error is its standard error. Both gaps shrink as num_steps grows, about as 1/num_steps.
    """
    check_whole(num_steps=num_steps, num_particles=num_particles, num_leapfrog=num_leapfrog)
    key_pilot, key_draws, key_run = split(as_key(key), 3)
    given = problem(model, data, True, "Annealed importance sampling")
    start, exact = _starts(key_draws, given, posterior_draws, num_particles, exact)
    path = pilot(key_pilot, given, num_leapfrog)
    log_weights = anneal(key_run, given, path, num_steps, num_leapfrog, start, num_particles)
    if posterior_draws is None:
        return _score(log_weights, "lower bound" if bound else "estimate", bound)
    return _score(log_weights, "upper bound" if bound and exact else "estimate", bound, backward=True)


def sandwich(
    key: KeyLike,
    model: Any,
    data: Any = None,
    posterior_draws: Any = None,
    *,
    num_steps: int = 200,
    num_particles: int = 1000,
    num_leapfrog: int = 8,
    exact: bool = False,
) -> Sandwich:
    """Both bounds of `ais`, forward and backward along the same path (bidirectional Monte Carlo; Grosse, Ghahramani and Adams 2015)."""
    check_whole(num_steps=num_steps, num_particles=num_particles, num_leapfrog=num_leapfrog)
    key_pilot, key_draws, key_up, key_down = split(as_key(key), 4)
    given = problem(model, data, True, "A sandwich")
    start, exact = _starts(key_draws, given, posterior_draws, num_particles, exact)
    if not exact:
        raise MethodError(
            message(
                "The upper bound needs exact posterior draws.",
                type(posterior_draws).__name__,
                "a fit by al.Exact, or exact draws with exact=True",
                "use ais(…, posterior_draws=…) for an estimate",
            )
        )
    path = pilot(key_pilot, given, num_leapfrog)
    up = anneal(key_up, given, path, num_steps, num_leapfrog, None, num_particles)
    down = anneal(key_down, given, path, num_steps, num_leapfrog, start, num_particles)
    return Sandwich(_score(up, "lower bound", True), _score(down, "upper bound", True, backward=True))


def anneal(
    key: Key, given: Problem, path: Path, num_steps: int, num_leapfrog: int, start: np.ndarray | None, num_particles: int
) -> np.ndarray:
    """Log weights (P,) of particles annealed from the prior, or from `start` (P, D) backwards."""
    steps = ladder(path, num_steps)
    with jax.enable_x64(True):
        key_start, key_run = split(key, 2)
        if start is None:
            begin = _prior(given.target, num_particles)(key_start)
        else:
            begin, steps = jnp.asarray(start), backwards(steps)
        return np.asarray(_annealed(given.target, num_leapfrog)(key_run, begin, moves_of(path), steps, given.batch))


@cached
def _prior(target: Any, number: int) -> Callable:
    return jax.jit(lambda key: prior_draws(noise_key(key), target, number))


@cached
def _annealed(target: Any, num_leapfrog: int) -> Callable:
    """All temperatures in one compiled loop, all particles side by side."""

    def run(key: Key, start: Array, path: Path, steps: Ladder, batch: Batch | None) -> Array:
        both = split_of(target, batch)

        def step(carry: tuple[Cloud, Any], now: tuple[Key, Ladder]) -> tuple[tuple[Cloud, Any], None]:
            (cloud, log_weights), (k, at) = carry, now
            log_weights = log_weights + jnp.where(at.delta == 0.0, 0.0, at.delta * cloud.rest)
            return (moved(k, cloud, path, at, both, num_leapfrog), log_weights), None

        carry = (cloud_at(start, both), jnp.zeros(len(start), start.dtype))
        (_, log_weights), _ = jax.lax.scan(step, carry, (jax.random.split(noise_key(key), len(steps.beta)), steps))
        return log_weights

    return jax.jit(run)


def _score(log_weights: np.ndarray, kind: str, bound: bool, backward: bool = False) -> Score:
    """The mean log weight, or the log of the mean weight (of its inverse, backward), with its standard error."""
    number = len(log_weights)
    if bound:
        if not np.all(np.isfinite(log_weights)):
            share = 1.0 - np.mean(np.isfinite(log_weights))
            warnings.warn(
                f"The bound is empty: {share:.1%} of the particles met a log-likelihood of −∞; use bound=False, or al.SMC().",
                HealthWarning,
                stacklevel=3,
            )
            return Score(float("-inf"), 0.0, kind)
        return Score(float(log_weights.mean()), float(log_weights.std(ddof=1) / np.sqrt(number)) if number > 1 else 0.0, kind)
    sign = -1.0 if backward else 1.0
    log_ratios = sign * log_weights
    k = pareto_k(log_ratios)
    if k > PARETO:
        warnings.warn(
            f"The weights have a heavy tail (Pareto k̂ {k:.2f}, below {PARETO} is wanted): raise num_steps.", HealthWarning, stacklevel=3
        )
    ratios = np.exp(log_ratios - log_ratios.max())
    error = ratios.std(ddof=1) / ratios.mean() / np.sqrt(number) if number > 1 else float("inf")
    return Score(float(sign * (log_ratios.max() + np.log(ratios.mean()))), float(error), kind)


def _starts(key: Key, given: Problem, source: Any, number: int, exact: bool) -> tuple[np.ndarray | None, bool]:
    """Posterior draws (P, D) to go backwards from, and whether they are exact."""
    if source is None:
        return None, False
    posterior = getattr(source, "posterior", source)
    if isinstance(posterior, Posterior):
        evidence = posterior.log_evidence
        exact = exact or (evidence is not None and evidence.kind == "exact")
        if isinstance(posterior, Draws) and posterior.weights is None:
            drawn = posterior.params
        else:
            with jax.enable_x64(True):
                drawn = posterior.sample(key, number)
    else:
        drawn = source
    positions = flat(given.layout, drawn)
    if len(positions) < number:
        raise DataError(
            message("Too few posterior draws.", f"{len(positions)}", f"num_particles={number}", "pass more, or lower num_particles")
        )
    # Evenly spread over the chains they come from.
    return positions[np.linspace(0, len(positions) - 1, number).astype(int)], exact


__all__ = ["Sandwich", "ais", "sandwich"]
