"""Thermodynamic integration: the log evidence as an integral of mean log-likelihoods along the path from the prior."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._cache import cached
from aleator._errors import HealthWarning, MethodError, message
from aleator._random import as_key, noise_key, split
from aleator._typing import Array, Key, KeyLike
from aleator.data import Batch
from aleator.evidence._path import Cloud, Ladder, Path, cloud_at, ladder, moved, moves_of, pilot, prior_draws
from aleator.evidence._problem import check_whole, problem, split_of
from aleator.methods import smc
from aleator.posterior import Score

CRUDE = 0.1  # nats of quadrature error that are told


def thermodynamic(
    key: KeyLike,
    model: Any,
    data: Any = None,
    *,
    num_levels: int = 40,
    num_particles: int = 500,
    num_moves: int = 4,
    num_runs: int = 8,
    num_leapfrog: int = 8,
) -> Score:
    """log p(D) = ∫₀¹ E_β[log p(D|θ)] dβ, by cubics through the means and their slopes dE_β[ℓ]/dβ = Var_β[ℓ] at num_levels values of β.

    At each level particles are resampled and moved num_moves times; num_runs independent runs give the standard error, to which an
    estimate of the quadrature's error is added: a 15th of the change when every second level is left out.
    """
    check_whole(num_levels=num_levels, num_particles=num_particles, num_moves=num_moves, num_runs=num_runs, num_leapfrog=num_leapfrog)
    if num_runs < 2 or num_levels < 4:
        raise MethodError(
            message(
                "Too little to judge the error by.",
                f"num_runs={num_runs}, num_levels={num_levels}",
                "num_runs ≥ 2 and num_levels ≥ 4",
                "raise them",
            )
        )
    key_pilot, key_run = split(as_key(key), 2)
    given = problem(model, data, True, "Thermodynamic integration")
    path = pilot(key_pilot, given, num_leapfrog)
    if path.lost:
        raise MethodError(
            message(
                "Thermodynamic integration has no finite integrand here.",
                f"a likelihood of zero at {path.lost:.1%} of the prior draws",
                "a likelihood that is positive wherever the prior is",
                "use al.SMC() or ais(…, bound=False)",
            )
        )
    levels = ladder(path, num_levels + num_levels % 2)
    with jax.enable_x64(True):
        run = _means(given.target, num_particles, num_moves, num_leapfrog)
        moments = run(jax.random.split(key_run, num_runs), moves_of(path), levels, given.batch)
    mean, variance = (np.asarray(part) for part in moments)
    betas = np.append(0.0, levels.beta)
    values = cubic(betas, mean, variance)
    coarse = cubic(betas[::2], mean[:, ::2], variance[:, ::2])
    quadrature = abs(float(np.mean(values - coarse))) / 15.0
    if quadrature > CRUDE:
        warnings.warn(
            f"The levels are too few: the integral is off by about {quadrature:.2f} nats; raise num_levels.", HealthWarning, stacklevel=2
        )
    return Score(float(values.mean()), float(np.hypot(values.std(ddof=1) / np.sqrt(num_runs), quadrature)), "estimate")


def cubic(betas: np.ndarray, mean: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """∫ over β of the cubics with these values and slopes at betas (…, L): trapezia with the correction −h²(s₊ − s)/12."""
    width = np.diff(betas)
    return np.sum(0.5 * width * (mean[..., 1:] + mean[..., :-1]) - width**2 / 12.0 * np.diff(slope, axis=-1), axis=-1)


@cached
def _means(target: Any, number: int, num_moves: int, num_leapfrog: int) -> Callable:
    """Means and variances (R, L + 1) of ℓ at β = 0 and at every level, one run after the other."""

    def one(key: Key, path: Path, levels: Ladder, batch: Batch | None) -> tuple[Array, Array]:
        key_start, key_run = jax.random.split(noise_key(key))
        both = split_of(target, batch)

        def level(cloud: Cloud, now: tuple[Key, Ladder]) -> tuple[Cloud, tuple[Array, Array]]:
            k, at = now
            key_resample, key_moves = jax.random.split(k)
            chosen = smc.systematic(key_resample, at.delta * cloud.rest)
            cloud = jax.tree.map(lambda leaf: leaf[chosen], cloud)

            def move(cloud: Cloud, k: Key) -> tuple[Cloud, Array]:
                cloud = moved(k, cloud, path, at, both, num_leapfrog)
                return cloud, cloud.rest

            cloud, rest = jax.lax.scan(move, cloud, jax.random.split(key_moves, num_moves))
            return cloud, (jnp.mean(rest), jnp.var(rest))

        first = cloud_at(prior_draws(key_start, target, number), both)
        _, (mean, variance) = jax.lax.scan(level, first, (jax.random.split(key_run, len(levels.beta)), levels))
        return jnp.append(jnp.mean(first.rest), mean), jnp.append(jnp.var(first.rest), variance)

    return jax.jit(lambda keys, path, levels, batch: jax.lax.map(lambda k: one(k, path, levels, batch), keys))


__all__ = ["thermodynamic"]
