"""HMC: Hamiltonian Monte Carlo with trajectories of a random length about a learned one."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hamiltonian
from aleator.methods import _length
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, stats
from aleator.methods._method import Card, check_positive


class State(NamedTuple):
    """core: position, step size, metric and their adaptation. length: of the trajectories, and its adaptation."""

    core: hamiltonian.State
    length: _length.Length

    @property
    def position(self) -> Array:
        return self.core.position


def init(key: Key, position: Array, density: Density, settings: hamiltonian.Settings) -> State:
    core = hamiltonian.begin(key, position, density, settings)
    return State(core, _length.begin(core.step, _length.summary(density, core.metric.scale)(position)))


def step(key: Key, state: State, density: Density, num_leapfrog: int | None, limit: int) -> tuple[State, Stats]:
    """One transition: momentum drawn afresh, leapfrog steps over a random length up to τ (or num_leapfrog of them), accepted with
    probability min(1, e^{−ΔH})."""
    core = state.core
    key_momentum, key_length, key_accept = jax.random.split(key, 3)
    momentum = hamiltonian.draw_momentum(key_momentum, core.metric)
    energy = hamiltonian.kinetic(core.metric, momentum) - core.log_density
    number = _length.draw(key_length, state.length, core.step, limit) if num_leapfrog is None else jnp.asarray(num_leapfrog, jnp.int32)
    start = hamiltonian.Phase(core.position, momentum, core.log_density, core.gradient)
    gain = lambda at: energy - (hamiltonian.kinetic(core.metric, at.momentum) - at.log_density)

    move = lambda at: hamiltonian.leapfrog(density, core.metric, core.step, at)
    taken, end, diverging = hamiltonian.travel(move, lambda at: ~(gain(at) > -hamiltonian.DIVERGENCE), start, number)
    moved, acceptance, accepted = hamiltonian.metropolis(key_accept, core, end, gain(end))
    moved = hamiltonian.observe(moved, diverging, end.position)
    length = state.length
    if num_leapfrog is None:
        velocity = hamiltonian.velocity(core.metric, end.momentum)
        summarise = _length.summary(density, core.metric.scale)
        length, after = _length.follow(length, summarise, end.position, velocity, number * core.step, acceptance)
        length = length._replace(summary=jnp.where(accepted, after, length.summary))
    return State(moved, length), stats(
        moved.log_density,
        acceptance,
        taken,
        energy=energy,
        diverging=diverging,
        **count_bad(end.log_density),
    )


@dataclasses.dataclass(frozen=True)
class HMC(Sampler):
    """Hamiltonian Monte Carlo (E8). num_leapfrog=None learns the trajectory length during warm-up, so that functions at the data jump far
    for few gradients; a number fixes it.

    Warm-up adapts the step size to `target_acceptance` (0.65 costs the fewest gradients per effective draw in high dimension) and the metric
    ("diagonal", "dense", "low_rank", "identity") in windows.
    """

    num_samples: int = 1000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    num_leapfrog: int | None = None
    metric: str = "diagonal"
    target_acceptance: float = 0.65
    max_leapfrog: int = 1000
    step_size: float | None = None
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="HMC",
        summary="Exact sampling along Hamiltonian trajectories of a learned length: few gradients per effective draw on networks.",
        model_class="any differentiable log density, up to some 10⁵ parameters",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="Hamiltonian trajectories of random length about a tuned one, with a Metropolis test",
        cost="some 10 to 500 gradients over all the data per draw",
        needs="gradients, all the data in memory, unconstrained parameters",
        references=(
            "Neal, MCMC using Hamiltonian dynamics, 2011",
            "Beskos, Pillai, Roberts, Sanz-Serna and Stuart, Optimal tuning of the hybrid Monte Carlo algorithm, 2013",
            "Hoffman, Radul and Sountsov, An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte Carlo, 2021",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        hamiltonian.check(self)
        check_positive(self, "num_leapfrog", "max_leapfrog", whole=True)

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        settings = hamiltonian.settings(self)

        def adapt(state: State, now: Stats, number: Array) -> State:
            core = hamiltonian.adapt(state.core, now.acceptance, number, settings)
            return State(core, _length.adapt(state.length, core.step, number, settings.schedule.collect, self.max_leapfrog))

        return Kernel(
            init=lambda key, position, density: init(key, position, density, settings),
            step=lambda key, state, density: step(key, state, density, self.num_leapfrog, self.max_leapfrog),
            adapt=adapt,
            settle=lambda state: State(hamiltonian.settle(state.core, settings), _length.settle(state.length)),
        )
