"""MALA: the Metropolis-adjusted Langevin algorithm, a random walk that drifts uphill."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from aleator._typing import Key
from aleator.methods import _hamiltonian as hmc
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, stats
from aleator.methods._method import Card


def step(key: Key, state: hmc.State, density: Density) -> tuple[hmc.State, Stats]:
    """q′ = q + ½ε²M⁻¹∇log π(q) + ε M^{−½}z, accepted with min(1, π(q′)g(q|q′)/π(q)g(q′|q)).

    This is one leapfrog step from a fresh momentum p = M^{½}z: with the momentum p′ it arrives with, g(q′|q) ∝ e^{−½pᵀM⁻¹p} and
    g(q|q′) ∝ e^{−½p′ᵀM⁻¹p′}, so that the Hastings ratio is e^{H(q,p) − H(q′,p′)}.
    """
    key_momentum, key_accept = jax.random.split(key)
    momentum = hmc.draw_momentum(key_momentum, state.metric)
    energy = hmc.kinetic(state.metric, momentum) - state.log_density
    there = hmc.leapfrog(density, state.metric, state.step, hmc.Phase(state.position, momentum, state.log_density, state.gradient))
    ratio = energy - (hmc.kinetic(state.metric, there.momentum) - there.log_density)
    state, acceptance, _ = hmc.metropolis(key_accept, state, there, ratio)
    state = hmc.observe(state, jnp.asarray(False), there.position)
    return state, stats(state.log_density, acceptance, 1, **count_bad(there.log_density))


@dataclasses.dataclass(frozen=True)
class MALA(Sampler):
    """The Metropolis-adjusted Langevin algorithm: one gradient a step, for targets where a trajectory is not worth its price.

    Warm-up adapts the step size to `target_acceptance` (0.574 is best in many dimensions) and the metric ("diagonal", "dense",
    "low_rank", "identity") in windows. num_samples draws are kept per chain, one in every `thin` steps.
    """

    num_samples: int = 2000
    num_warmup: int = 2000
    num_chains: int = 4
    thin: int = 5
    metric: str = "diagonal"
    target_acceptance: float = 0.574
    step_size: float | None = None
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="MALA",
        summary="A random walk that follows the gradient: cheap steps, fewer of them than without it.",
        model_class="any differentiable log density, up to some 1,000 parameters",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="one step of the discretised Langevin diffusion, accepted or refused",
        cost="one gradient over all the data per step; some D^⅓ steps per effective draw at best",
        needs="gradients, all the data in memory, unconstrained parameters",
        references=(
            "Roberts and Tweedie, Exponential convergence of Langevin distributions and their discrete approximations, 1996",
            "Roberts and Rosenthal, Optimal scaling of discrete approximations to Langevin diffusions, 1998",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        hmc.check(self)

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        settings = hmc.settings(self)
        return Kernel(
            init=lambda key, position, density: hmc.begin(key, position, density, settings),
            step=step,
            adapt=lambda state, now, number: hmc.adapt(state, now.acceptance, number, settings),
            settle=lambda state: hmc.settle(state, settings),
        )
