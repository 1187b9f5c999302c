"""ChEES: many chains that move together and tune one trajectory length between them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import convergence
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm
from aleator.methods import _chains as chains
from aleator.methods import _hamiltonian as hamiltonian
from aleator.methods import _length
from aleator.methods._method import Card, check_positive
from aleator.posterior import Draws, Posterior

RATE = 0.025  # learning rate of the log trajectory length
FIRST = 10.0  # steps in a trajectory at the start


class State(NamedTuple):
    """positions, gradients (C, D), log_densities (C,): the chains. summaries (C, F): their functions. step, log_length: shared. scale (D,):
    of the positions. averaging: of the step size. log_average, slope, square: of the length. stats: of the last transition, (C,) each.
    number: of the step, negative until warm-up is over."""

    positions: Array
    log_densities: Array
    gradients: Array
    summaries: Array
    step: Array
    log_length: Array
    log_average: Array
    slope: Array
    square: Array
    scale: Array
    averaging: hamiltonian.Averaging
    stats: chains.Stats
    number: Array


def step(key: Key, state: State, density: chains.Density, limit: int) -> tuple[State, Array]:
    """All chains take the same number of leapfrog steps from momenta of their own; and the slope of the criterion in log τ.

    ChEES: ¼E[(|s′ − m|² − |s − m|²)²] with m the mean over chains, whose slope at a trajectory of length t is
    t·(|s′ − m′|² − |s − m|²)·⟨s′ − m′, ds′/dt⟩, averaged by acceptance.
    """
    key_momentum, key_length, key_accept = jax.random.split(key, 3)
    count = state.positions.shape[0]
    metric = hamiltonian.Metric(state.scale)
    share = jax.random.uniform(key_length, (), state.step.dtype)
    number = jnp.clip(jnp.ceil(share * jnp.exp(state.log_length) / state.step), 1, limit).astype(jnp.int32)
    momenta = jax.vmap(lambda k: hamiltonian.draw_momentum(k, metric))(jax.random.split(key_momentum, count))
    start = hamiltonian.Phase(state.positions, momenta, state.log_densities, state.gradients)
    energy = jax.vmap(lambda p: hamiltonian.kinetic(metric, p))(momenta) - state.log_densities
    move = jax.vmap(lambda at: hamiltonian.leapfrog(density, metric, state.step, at))
    end = jax.lax.fori_loop(0, number, lambda i, at: move(at), start)
    change = energy - (jax.vmap(lambda p: hamiltonian.kinetic(metric, p))(end.momentum) - end.log_density)
    change = jnp.where(jnp.isfinite(change), change, -jnp.inf)
    acceptance = jnp.minimum(1.0, jnp.exp(change))
    accept = jnp.log(jax.random.uniform(key_accept, (count,), change.dtype)) < change
    pick = lambda new, old: jnp.where(accept.reshape(count, *(1,) * (new.ndim - 1)), new, old)
    velocity = jax.vmap(lambda p: hamiltonian.velocity(metric, p))(end.momentum)
    summarise = _length.summary(density, state.scale)
    after, drift = jax.vmap(lambda q, v: jax.jvp(summarise, (q,), (v,)))(end.position, velocity)
    weight = acceptance * jnp.all(jnp.isfinite(after), axis=1)
    after = jnp.where((weight > 0)[:, None], after, state.summaries)
    drift = jnp.where((weight > 0)[:, None], drift, 0.0)
    centre = jnp.sum(weight[:, None] * after, axis=0) / jnp.maximum(jnp.sum(weight), 1e-6)
    off, was = after - centre, state.summaries - jnp.mean(state.summaries, axis=0)
    slope = number * state.step * (jnp.sum(off**2, axis=1) - jnp.sum(was**2, axis=1)) * jnp.sum(off * drift, axis=1)
    slope = jnp.sum(weight * jnp.where(jnp.isfinite(slope), slope, 0.0)) / jnp.maximum(jnp.sum(weight), 1e-6)
    bad = end.log_density
    now = jax.vmap(chains.stats)(pick(bad, state.log_densities), acceptance, jnp.broadcast_to(number, (count,)))._replace(
        energy=energy,
        diverging=~(change > -hamiltonian.DIVERGENCE),
        outside=jnp.isneginf(bad).astype(jnp.int32),
        undefined=(jnp.isnan(bad) | jnp.isposinf(bad)).astype(jnp.int32),
    )
    moved = state._replace(
        positions=pick(end.position, state.positions),
        log_densities=pick(end.log_density, state.log_densities),
        gradients=pick(end.gradient, state.gradients),
        summaries=pick(after, state.summaries),
        stats=now,
    )
    return moved, slope


def adapt(state: State, slope: Array, wanted: float, number: Array, last: int, limit: int) -> State:
    """After warm-up step `number`: the step size follows the harmonic mean of the acceptance, which no stuck chain can hide in; the length
    follows the slope; the scale is that of the chains, as long as the length has time to follow it."""
    accepted = 1.0 / jnp.mean(1.0 / jnp.maximum(state.stats.acceptance, 1e-3))
    following = hamiltonian.average(state.averaging, accepted, wanted)
    slow, square = 0.9 * state.slope + 0.1 * slope, 0.95 * state.square + 0.05 * slope**2
    t = (number + 1).astype(slow.dtype)
    moved = state.log_length + RATE * (slow / (1.0 - 0.9**t)) / (jnp.sqrt(square / (1.0 - 0.95**t)) + 1e-30)
    shortest = following.log_step
    log_length = jnp.clip(moved, shortest, shortest + np.log(limit))
    spread = jnp.std(state.positions, axis=0)
    spread = jnp.where(jnp.isfinite(spread) & (spread > 1e-10), spread, state.scale)
    # Every tenth step, and not in the last third: the step size must see a scale that stays.
    scale = jnp.where((number % 10 == 9) & (number < last), spread, state.scale)
    return state._replace(
        averaging=following,
        step=jnp.exp(following.log_step),
        log_length=log_length,
        log_average=state.log_average + jnp.maximum(1.0 / t, 0.02) * (log_length - state.log_average),
        slope=slow,
        square=square,
        scale=scale,
    )


@dataclasses.dataclass(frozen=True)
class ChEES(chains.ChainMethod):
    """Many short Hamiltonian chains in one compiled step, for accelerators and cheap densities: step size, scale and trajectory length are
    shared and tuned from all chains at once, so that few warm-up steps do.

    The length maximises the change of the squared distance of functions from their mean (ChEES), in function space for networks.
    """

    num_samples: int = 250
    num_warmup: int = 500
    num_chains: int = 64
    thin: int = 1
    target_acceptance: float = 0.65
    max_leapfrog: int = 1000
    step_size: float | None = None
    metric: str = "diagonal"
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="ChEES",
        summary="Many chains side by side that learn from each other: short warm-up, made for wide hardware.",
        model_class="any differentiable log density",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="Hamiltonian trajectories of one random length for all chains, with a Metropolis test each",
        cost="num_chains gradients over all the data per leapfrog step, in one batch",
        needs="gradients, all the data in memory, unconstrained parameters, several chains",
        references=(
            "Hoffman, Radul and Sountsov, An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte Carlo, 2021",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        hamiltonian.check(self, ("diagonal", "identity"))
        check_positive(self, "max_leapfrog", whole=True)

    def build(self, target: Any) -> Algorithm:
        x64, layout = chains.prepare(self, target)
        batches = None if target.model is None else "full"
        scaled = self.metric == "diagonal"

        def init(key: Key, params: Tree) -> State:
            positions = jax.vmap(layout.ravel)(params)
            count, real = positions.shape[0], positions.dtype
            zero, none = jnp.zeros((), real), jnp.zeros(count, real)
            summaries = jnp.zeros((count, layout.num_functions or positions.shape[1]), real)
            start = jnp.asarray(self.step_size or 0.1, real)
            return State(
                positions,
                none,
                jnp.zeros_like(positions),
                summaries,
                start,
                zero,
                zero,
                zero,
                zero,
                jnp.ones_like(positions[0]),
                hamiltonian.averaging(start),
                jax.vmap(chains.stats)(none),
                jnp.asarray(-self.num_warmup, jnp.int32),
            )

        def begin(key: Key, state: State, batch: Batch | None) -> tuple[State, Any]:
            density = chains.bind(target, layout, batch)
            log_densities, gradients = jax.vmap(density.value_and_grad)(state.positions)
            metric = hamiltonian.Metric(state.scale)
            size = state.step
            if self.step_size is None:
                keys = jax.random.split(key, state.positions.shape[0])
                # The smallest of the chains' own: a step that suits the worst of them cannot freeze it.
                find = lambda k, *at: hamiltonian.first_step(k, density, metric, *at)
                size = jnp.min(jax.vmap(find)(keys, state.positions, log_densities, gradients))
            length = jnp.log(FIRST * size)
            now = jax.vmap(chains.stats)(log_densities)
            summaries = jax.vmap(_length.summary(density, state.scale))(state.positions)
            ready = state._replace(
                log_densities=log_densities,
                gradients=gradients,
                summaries=summaries,
                step=size,
                averaging=hamiltonian.averaging(size),
                log_length=length,
                log_average=length,
                stats=now,
            )
            return ready, _info(now)

        def advance(key: Key, state: State, batch: Batch | None) -> tuple[State, Any]:
            density = chains.bind(target, layout, batch)
            number = state.number
            state, slope = step(key, state, density, self.max_leapfrog)

            def tune() -> State:
                found = adapt(state, slope, self.target_acceptance, number + self.num_warmup, 2 * self.num_warmup // 3, self.max_leapfrog)
                found = found if self.step_size is None else found._replace(step=state.step)
                return found if scaled else found._replace(scale=state.scale)

            state = jax.lax.cond(number < 0, tune, lambda: state)
            final = state._replace(log_length=state.log_average)
            final = final if self.step_size is not None else final._replace(step=jnp.exp(state.averaging.log_average))
            state = jax.tree.map(lambda a, b: jnp.where(number + 1 == 0, a, b), final, state)
            return state._replace(number=number + 1), _info(state.stats)

        def keep(state: State, info: Any) -> tuple[dict[str, Any], Array]:
            functions = state.summaries if layout.num_functions else state.summaries[:, :0]
            return self.kept(state.positions, functions, state.stats, state.number)

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            return Draws(layout.unravel_all(np.swapaxes(kept["position"], 0, 1)), num_chains=self.num_chains)

        def verdict(result: Any) -> tuple[str, bool, dict[str, Any]]:
            by_chain = jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1), result.kept)
            return convergence.verdict(result._replace(kept=by_chain), self, layout.names, target.model is not None)

        return Algorithm(
            init=init,
            phases=self.phases(advance, batches, begin),
            position=lambda state: layout.unravel(state.positions[0]),
            finish=finish,
            keep=keep,
            starts=self.num_chains,
            driver=self.driver,
            watch="log_density",
            verdict=verdict,
            x64=x64,
            notes={"departures": chains.tempered(target)},
        )


class Info(NamedTuple):
    """log_density: the lowest of the chains', nats. acceptance: their mean. evaluations: gradients, over all chains."""

    log_density: Array
    acceptance: Array
    evaluations: Array


def _info(now: chains.Stats) -> Info:
    return Info(jnp.min(now.log_density), jnp.mean(now.acceptance), jnp.sum(now.evaluations))
