"""The path π_β ∝ p(θ)·p(D|θ)^β between prior and posterior: where on it the distribution changes fast, how particles move along it.

A pilot run of sequential Monte Carlo finds both. They are then fixed, so that what is done along the path is not fitted to its own noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._cache import cached
from aleator._errors import MethodError, message
from aleator._random import noise_key
from aleator._typing import Array, Key
from aleator.data import Batch
from aleator.evidence._problem import Problem, layout_of, split_of
from aleator.methods import _chains as chains
from aleator.methods import _hamiltonian as hmc
from aleator.methods import smc
from aleator.methods._moves import along

PILOT = 500  # particles of the pilot
PILOT_MOVES = 4  # of each of them at every stage
PILOT_ESS = 0.9  # effective share of the particles that a stage of the pilot keeps
MAX_STAGES = 400
FIRST_STEP = 0.8  # of the pilot, divided by D^¼
BLOCK = 1024  # particles evaluated at once
SHORTEST = 0.2  # share of the path's step size that a trajectory may have


class Path(NamedTuple):
    """What the pilot found. betas (S + 1,): from 0 to 1, equally far apart in what a step costs. metric, log_step: of
    the moves, leading axis MAX_STAGES, of which S are in use, so that all paths have one shape. lost: share of the prior draws whose
    likelihood is zero."""

    betas: np.ndarray
    metric: hmc.Metric
    log_step: np.ndarray
    lost: float = 0.0


class Ladder(NamedTuple):
    """J steps. delta (J,): change of β that weighs a particle, before it is moved at beta (J,) as in stage (J,) of the path."""

    delta: np.ndarray
    beta: np.ndarray
    stage: np.ndarray


class Cloud(NamedTuple):
    """particles (P, D). reference, rest (P,): r and ℓ of each."""

    particles: Array
    reference: Array
    rest: Array


def pilot(key: Key, given: Problem, num_leapfrog: int) -> Path:
    """A path for this target, by a short run of sequential Monte Carlo with an effective share of 0.9 kept at every stage."""
    with jax.enable_x64(True):
        betas, metric, log_step, number, lost = jax.tree.map(np.asarray, _pilot(given.target, num_leapfrog)(key, given.batch))
    if lost == PILOT:
        raise MethodError(
            message(
                "No draw of the prior has a likelihood.", "log-likelihoods that are all −∞ or NaN", "some draws inside", "check the model"
            )
        )
    number = int(number)
    if not betas[number - 1] >= 1.0:
        raise MethodError(
            message(
                "The path from the prior is too long.",
                f"β = {float(betas[number - 1]):.3g} after {MAX_STAGES} stages",
                "β = 1",
                "tighten the prior, or start from a closer reference (al.target_from_log_density)",
            )
        )
    return Path(np.append(0.0, betas[:number]), metric, log_step, float(lost) / PILOT)


def ladder(path: Path, num_steps: int) -> Ladder:
    """num_steps steps from 0 to 1, equally far apart along the path."""
    place = np.linspace(0.0, len(path.betas) - 1.0, num_steps + 1)
    betas = np.interp(place, np.arange(len(path.betas)), path.betas)
    stage = np.maximum(np.ceil(place - 1e-9).astype(np.int32) - 1, 0)
    return Ladder(np.diff(betas), betas[1:], stage[1:])


def backwards(up: Ladder) -> Ladder:
    """The same steps from 1 to 0: each weighs first and is then moved at the β below it."""
    beta, stage = np.append(0.0, up.beta[:-1]), np.append(up.stage[0], up.stage[:-1])
    return Ladder(up.delta[::-1], beta[::-1], stage[::-1])


def prior_draws(key: Key, target: Any, number: int) -> Array:
    """(number, D)."""
    layout = layout_of(target)
    return jax.vmap(lambda k: layout.ravel(target.sample_prior(k)))(jax.random.split(key, number))


def cloud_at(start: Array, both: Callable) -> Cloud:
    """Particles where they start."""
    reference, rest = _mapped(both, len(start))(start)
    return Cloud(start, reference, chains.safe(rest))


def moved(key: Key, cloud: Cloud, path: Path, at: Ladder, both: Callable, num_leapfrog: int) -> Cloud:
    """One trajectory of every particle at one step's β, with the path's metric.

    In its units a quarter of a turn, π/2, makes the end of a trajectory in a Gaussian independent of where it began. The step is a random
    share of the path's, the same for all: where the posterior is narrower than elsewhere one size alone would leave particles behind.
    """
    key_step, key_momentum, key_accept = jax.random.split(key, 3)
    step = jnp.exp(path.log_step[at.stage]) * jax.random.uniform(key_step, (), minval=SHORTEST)
    length = jnp.clip(jnp.round(0.5 * np.pi / step), 1, num_leapfrog).astype(jnp.int32)
    metric = jax.tree.map(lambda leaf: leaf[at.stage], path.metric)

    def value(q: Array) -> Array:
        reference, rest = both(q)
        return along(reference, rest, at.beta)

    density = chains.Density(value, jax.value_and_grad(value), both, lambda q: q)

    def one(inputs: tuple[Key, Array]) -> tuple[Array, Array, Array, Array]:
        k, position = inputs
        momentum = hmc.draw_momentum(k, metric)
        first = hmc.Phase(position, momentum, *density.value_and_grad(position))
        last = jax.lax.fori_loop(0, length, lambda _, now: hmc.leapfrog(density, metric, step, now), first)
        change = last.log_density - hmc.kinetic(metric, last.momentum) - first.log_density + hmc.kinetic(metric, momentum)
        return (last.position, *both(last.position), change)

    number = len(cloud.particles)
    keys = jax.random.split(key_momentum, number)
    particles, reference, rest, change = _mapped(one, number)((keys, cloud.particles))
    taken = jnp.log(jax.random.uniform(key_accept, (number,))) < chains.safe(change)
    return Cloud(
        jnp.where(taken[:, None], particles, cloud.particles),
        jnp.where(taken, reference, cloud.reference),
        jnp.where(taken, rest, cloud.rest),
    )


def moves_of(path: Path) -> Path:
    """What compiled code needs of a path: its β are in the ladder."""
    return jax.tree.map(jnp.asarray, path._replace(betas=np.zeros(0)))


def _mapped(function: Callable, number: int) -> Callable:
    """Over so many particles: all at once, or in blocks where there are many."""
    return jax.vmap(function) if number <= BLOCK else lambda inputs: jax.lax.map(function, inputs, batch_size=BLOCK)


def _state(cloud: Cloud, metric: hmc.Metric) -> smc.State:
    """The cloud as sequential Monte Carlo begins with it."""
    zero, none = jnp.zeros((), cloud.rest.dtype), jnp.zeros((), jnp.int32)
    return smc.State(
        *cloud,
        beta=zero,
        log_evidence=zero,
        variance=zero,
        log_step=zero + np.log(FIRST_STEP / cloud.particles.shape[1] ** 0.25),
        acceptance=zero,
        evaluations=none,
        outside=none,
        undefined=none,
        ancestors=jnp.arange(len(cloud.rest)),
        metric=metric,
        moves=none,
        arrived=jnp.asarray(False),
    )


@cached
def _pilot(target: Any, num_leapfrog: int) -> Callable:
    """Stages until β = 1, at most MAX_STAGES: β, metric and step size of each, how many, and how many first draws were impossible."""
    size = len(layout_of(target).names)
    dense = 4 * size <= PILOT

    def run(key: Key, batch: Batch | None) -> tuple[Array, hmc.Metric, Array, Array, Array]:
        key_start, key_run = jax.random.split(noise_key(key))
        both = split_of(target, batch)
        start = prior_draws(key_start, target, PILOT)
        metric = hmc.Metric(jnp.ones(size), factor=jnp.eye(size) if dense else None)
        state = _state(cloud_at(start, both), metric)
        lost = jnp.sum(jnp.isneginf(state.rest))
        blank = lambda leaf: jnp.zeros((MAX_STAGES, *jnp.shape(leaf)), leaf.dtype)
        record = (blank(state.beta), jax.tree.map(blank, state.metric), blank(state.log_step))

        def body(carry: tuple) -> tuple:
            number, state, record = carry
            key_stage, key_moves = jax.random.split(jax.random.fold_in(key_run, number))
            state = smc.stage(key_stage, state, PILOT_ESS, dense)
            move = lambda s, k: (smc.trajectory(k, s, both, num_leapfrog), None)
            state, _ = jax.lax.scan(move, state, jax.random.split(key_moves, PILOT_MOVES))
            put = lambda all_, leaf: all_.at[number].set(leaf)
            return number + 1, state, jax.tree.map(put, record, (state.beta, state.metric, state.log_step))

        going = lambda carry: (carry[0] < MAX_STAGES) & (carry[1].beta < 1.0) & (lost < PILOT)
        number, state, record = jax.lax.while_loop(going, body, (jnp.zeros((), jnp.int32), state, record))
        return (*record, number, lost)

    return jax.jit(run)
