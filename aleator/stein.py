"""Draws against a density whose gradient is known: kernel Stein discrepancy and temperatures.

Both see the bias of samplers without a Metropolis test, which agreement between chains cannot. They need the scores ∇log π(θ) at the draws
over all the data, and no normaliser.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, convergence
from aleator._cache import cached
from aleator._errors import MethodError, message
from aleator._fit import Fit
from aleator._random import as_key, seed_of
from aleator._typing import Array, KeyLike
from aleator.evidence._problem import layout_of, problem
from aleator.posterior import Draws

MAX_DRAWS = 1000  # pairs grow with the square of the draws
BLOCK = 64  # scores taken at once
POWER = -0.5  # of the inverse multiquadric: slow enough tails to notice draws that are missing


class Discrepancy(NamedTuple):
    """squared: an unbiased estimate of KSD², 0 for draws of π, on the scale of one score squared. stderr: its standard error where the draws
    differ from π. p_value: the share of bootstrapped values, under the hypothesis that they are draws of π, that are larger. num_draws: used."""

    squared: float
    stderr: float
    p_value: float
    num_draws: int


class Temperature(NamedTuple):
    """value: −E[(θ − θ̄)·∇log π(θ)]/D, 1 for draws of π, and its Monte Carlo standard error."""

    value: float
    stderr: float


def discrepancy(key: KeyLike, draws: Any, scores: Any, *, scale: Any = None, num_bootstrap: int = 500) -> Discrepancy:
    """The kernel Stein discrepancy of draws (S, D) with scores (S, D): KSD² = E u(θ, θ′) over pairs,

    u = s·s′k + s·∂k/∂θ′ + s′·∂k/∂θ + Σ ∂²k/∂θⱼ∂θⱼ′,   k = (1 + |θ − θ′|²)^−½,

    zero only for draws of π (Gorham and Mackey 2017). scale: what each coordinate is divided by first, scores multiplied; None for the standard
    deviations of the draws times √D. At most MAX_DRAWS draws are used, evenly spaced, which should be nearly independent: the bootstrap
    (Liu, Lee and Jordan 2016; multinomial weights) takes them as such.
    """
    draws, scores = np.asarray(draws, np.float64), np.asarray(scores, np.float64)
    if draws.ndim != 2 or draws.shape != scores.shape or len(draws) < 4:
        got = f"draws {draws.shape}, scores {scores.shape}"
        raise MethodError(message("The discrepancy needs one score a draw.", got, "both (S, D), S ≥ 4", "pass al.stein.scores(fit, data)"))
    chosen = np.unique(np.linspace(0, len(draws) - 1, min(len(draws), MAX_DRAWS)).astype(int))
    draws, scores = draws[chosen], scores[chosen]
    scale = draws.std(axis=0) * np.sqrt(draws.shape[1]) if scale is None else np.broadcast_to(scale, draws.shape[1])
    scale = np.where(np.asarray(scale) > 0, scale, 1.0)
    pairs = stein_kernel(draws / scale, scores * scale)
    np.fill_diagonal(pairs, 0.0)
    size = len(pairs)
    value = pairs.sum() / (size * (size - 1))
    means = pairs.sum(axis=1) / (size - 1)
    generator = np.random.default_rng(seed_of(as_key(key)))
    weights = generator.multinomial(size, np.full(size, 1.0 / size), num_bootstrap) / size - 1.0 / size
    under = np.einsum("bi,ij,bj->b", weights, pairs, weights, optimize=True)
    return Discrepancy(
        float(value), float(2.0 * means.std(ddof=1) / np.sqrt(size)), float((1 + np.sum(under >= value)) / (1 + num_bootstrap)), size
    )


def stein_kernel(draws: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """u(θᵢ, θⱼ), (S, S), for k = (1 + |θ − θ′|²)^β."""
    square = np.sum(draws**2, axis=1)
    distance = np.maximum(square[:, None] + square[None] - 2.0 * draws @ draws.T, 0.0)
    base = 1.0 + distance
    kernel, first, second = base**POWER, POWER * base ** (POWER - 1), POWER * (POWER - 1) * base ** (POWER - 2)
    # ∂k/∂θ = 2k′(θ − θ′) = −∂k/∂θ′, so the middle terms are 2k′·(s′ − s)·(θ − θ′).
    own = np.sum(scores * draws, axis=1)
    cross = scores @ draws.T  # sᵢ·θⱼ
    middle = cross.T - own[None] - own[:, None] + cross
    return (scores @ scores.T) * kernel + 2.0 * first * middle - 2.0 * draws.shape[1] * first - 4.0 * second * distance


def configurational_temperature(draws: Any, scores: Any) -> Temperature:
    """−E[(θ − θ̄)·∇log π(θ)]/D over draws (chains, n, D) or (S, D): above 1 they are too wide, below 1 too narrow."""
    draws, scores = (np.asarray(array, np.float64) for array in (draws, scores))
    draws, scores = (array if array.ndim == 3 else array[None] for array in (draws, scores))
    number = draws.shape[0] * draws.shape[1]
    each = -np.mean((draws - draws.mean(axis=(0, 1))) * scores, axis=2)
    return Temperature(float(each.mean() * number / (number - 1)), float(convergence.mcse(each)))


def scores(fit: Fit, data: Any = None, *, target: Any = None, max_draws: int = MAX_DRAWS) -> tuple[np.ndarray, np.ndarray]:
    """Draws (S, D) of a fit that holds draws, evenly thinned to max_draws, and ∇log π at them over all of the data. A bare density also
    needs target, as it was fitted."""
    if not isinstance(fit.posterior, Draws):
        kind = type(fit.posterior).__name__
        raise MethodError(
            message("These are no draws.", f"a {kind}", "the fit of a sampler", "pass al.stein.discrepancy its draws and scores")
        )
    if fit.model is None and target is None:
        raise MethodError(
            message("The density of this fit is not known.", "a fit without a model", "its target", "pass target=, as it was fitted")
        )
    given = problem(fit.model if target is None else target, data, False, "A Stein discrepancy")
    total = _tree.rows(fit.posterior.params)
    rows = np.unique(np.linspace(0, total - 1, min(total, max_draws)).astype(int))
    with jax.enable_x64(True):
        layout = layout_of(given.target)
        draws = jax.jit(jax.vmap(layout.ravel))(
            jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[rows], jnp.float64), fit.posterior.params)
        )
        found = _scores(given.target)(draws, given.batch)
    return np.asarray(draws), np.asarray(found)


@cached
def _scores(target: Any) -> Any:
    layout = layout_of(target)
    gradient = lambda q, batch: jax.grad(lambda flat: target.log_joint(layout.unravel(flat), batch))(q)

    def run(draws: Array, batch: Any) -> Array:
        return jax.lax.map(lambda q: gradient(q, batch), draws, batch_size=BLOCK)

    return jax.jit(run)
