"""Microcanonical: Langevin dynamics of fixed speed, with or without a Metropolis test.

The velocity u is a unit vector; the gradient only turns it, so that steep walls do not speed the particle up. In the limit of small steps
the position visits π; with the test (adjusted=True, the default) it does so at any step size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hamiltonian
from aleator.methods import _length
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, stats
from aleator.methods._method import Card, check_positive

ENERGY_VARIANCE = 5e-4  # of the energy error per step and dimension that unadjusted steps are tuned to


class Phase(NamedTuple):
    """position, unit velocity u and gradient (D,), log_density; error: energy error since the start."""

    position: Array
    velocity: Array
    log_density: Array
    gradient: Array
    error: Array


class State(NamedTuple):
    """core: position, step size, metric and their adaptation. velocity (D,): kept between unadjusted steps. length: of trajectories (the
    decoherence length where unadjusted)."""

    core: hamiltonian.State
    velocity: Array
    length: _length.Length

    @property
    def position(self) -> Array:
        return self.core.position


def turn(velocity: Array, gradient: Array, step: Array) -> tuple[Array, Array]:
    """The exact flow of u under a constant gradient for a time `step`, and its change of kinetic energy.

    With e = ∇/|∇|, c = e·u, δ = step·|∇|/(D − 1): u ← (u + e(sinh δ + c(cosh δ − 1)))/(cosh δ + c sinh δ); ΔK = (D − 1)·log(cosh δ + c sinh δ).
    Written in e^{−2|δ|}, which cannot overflow.
    """
    size = velocity.shape[0]
    norm = jnp.sqrt(jnp.sum(gradient**2) + 1e-30)
    along = jnp.dot(gradient, velocity) / norm
    delta = step * norm / (size - 1)
    zeta = jnp.exp(-delta)
    turned = gradient / norm * ((1.0 - zeta) * (1.0 + zeta + along * (1.0 - zeta))) + 2.0 * zeta * velocity
    # log(cosh δ + c sinh δ) = δ − log 2 + log(1 + c + (1 − c)e^{−2δ}).
    kinetic = (delta - np.log(2.0) + jnp.log(1.0 + along + (1.0 - along) * zeta**2)) * (size - 1)
    return turned / jnp.sqrt(jnp.sum(turned**2) + 1e-30), kinetic


def leapfrog(density: Density, scale: Array, step: Array, at: Phase) -> Phase:
    """Half a turn, a move along u, half a turn; in coordinates where the posterior has about unit scale."""
    velocity, first = turn(at.velocity, at.gradient * scale, 0.5 * step)
    position = at.position + step * scale * velocity
    log_density, gradient = density.value_and_grad(position)
    velocity, second = turn(velocity, gradient * scale, 0.5 * step)
    return Phase(position, velocity, log_density, gradient, at.error + first + second - (log_density - at.log_density))


def direction(key: Key, like: Array) -> Array:
    """Uniform on the unit sphere."""
    z = jax.random.normal(key, like.shape, like.dtype)
    return z / jnp.sqrt(jnp.sum(z**2))


def refresh(key: Key, velocity: Array, step: Array, length: Array) -> Array:
    """u ← (u + νz)/|u + νz| with ν² = (e^{2ε/L} − 1)/D: the direction is forgotten over a length L."""
    noise = jnp.sqrt(jnp.expm1(2.0 * step / length) / velocity.shape[0])
    moved = velocity + noise * jax.random.normal(key, velocity.shape, velocity.dtype)
    return moved / jnp.sqrt(jnp.sum(moved**2))


def init(key: Key, position: Array, density: Density, settings: hamiltonian.Settings) -> State:
    """The step size begins where a Hamiltonian one would, in units of a unit speed: times √D."""
    key_step, key_velocity = jax.random.split(key)
    core = hamiltonian.begin(key_step, position, density, settings)
    if settings.step_size is None:
        step = core.step * np.sqrt(len(position)).item()
        core = core._replace(step=step, averaging=hamiltonian.averaging(step))
    summary = _length.summary(density, core.metric.scale)(position)
    return State(core, direction(key_velocity, position), _length.begin(core.step, summary))


def step_adjusted(key: Key, state: State, density: Density, limit: int) -> tuple[State, Stats]:
    """A trajectory from a fresh direction, accepted with probability min(1, e^{−ΔE})."""
    core = state.core
    key_velocity, key_length, key_accept = jax.random.split(key, 3)
    number = _length.draw(key_length, state.length, core.step, limit)
    start = Phase(core.position, direction(key_velocity, core.position), core.log_density, core.gradient, jnp.zeros_like(core.log_density))

    move = lambda at: leapfrog(density, core.metric.scale, core.step, at)
    taken, end, diverging = hamiltonian.travel(move, lambda at: ~(at.error < hamiltonian.DIVERGENCE), start, number)
    moved, acceptance, accepted = hamiltonian.metropolis(key_accept, core, end, -end.error)
    moved = hamiltonian.observe(moved, diverging, end.position)
    summarise = _length.summary(density, core.metric.scale)
    speed = core.metric.scale * end.velocity
    length, after = _length.follow(state.length, summarise, end.position, speed, number * core.step, acceptance)
    length = length._replace(summary=jnp.where(accepted, after, length.summary))
    return State(moved, end.velocity, length), stats(
        moved.log_density, acceptance, taken, diverging=diverging, **count_bad(end.log_density)
    )


def step_unadjusted(key: Key, state: State, density: Density, number: int) -> tuple[State, Stats]:
    """`number` leapfrog steps, the direction partly refreshed before each; no test, so the step size leaves a bias."""
    core = state.core
    length = jnp.exp(state.length.log_length)

    def body(i: Any, carry: tuple) -> tuple:
        at, squares = carry
        velocity = refresh(jax.random.fold_in(key, i), at.velocity, core.step, length)
        new = leapfrog(density, core.metric.scale, core.step, at._replace(velocity=velocity, error=jnp.zeros_like(at.error)))
        # A step into nowhere is not taken: the particle turns round and its step counts as a large error.
        good = jnp.isfinite(new.error) & jnp.isfinite(new.log_density)
        new = jax.tree.map(
            lambda a, b: jnp.where(good, a, b), new, at._replace(velocity=-at.velocity, error=jnp.asarray(jnp.inf, at.error.dtype))
        )
        return new, squares + jnp.where(good, new.error**2, 1e3 * len(at.position))

    start = Phase(core.position, state.velocity, core.log_density, core.gradient, jnp.zeros_like(core.log_density))
    end, squares = jax.lax.fori_loop(0, number, body, (start, jnp.zeros_like(core.log_density)))
    moved = core._replace(position=end.position, log_density=end.log_density, gradient=end.gradient)
    moved = hamiltonian.observe(moved, ~jnp.isfinite(end.error), end.position)
    share = squares / (number * len(core.position) * ENERGY_VARIANCE)
    # Seen as an acceptance of one half where the error is as wanted, so that the step size adapts by the same rule.
    acceptance, lost = 1.0 / (1.0 + share), ~jnp.isfinite(end.error)
    return State(moved, end.velocity, state.length), stats(
        moved.log_density, acceptance, number, diverging=lost, **count_bad(end.log_density)
    )


@dataclasses.dataclass(frozen=True)
class Microcanonical(Sampler):
    """Microcanonical Langevin Monte Carlo. adjusted=True (default): trajectories of a learned length with a Metropolis test, exact.
    adjusted=False: no test; num_leapfrog steps make one transition, with a bias that shrinks with the step size, recorded as a departure.

    Warm-up adapts the step size (to `target_acceptance`, or to the energy error where unadjusted), the length and a diagonal metric.
    """

    num_samples: int = 1000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    adjusted: bool = True
    num_leapfrog: int = 10
    metric: str = "diagonal"
    target_acceptance: float = 0.9
    max_leapfrog: int = 1000
    step_size: float | None = None
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Microcanonical",
        summary="Dynamics of fixed speed that stay stable where gradients are steep; exact with its Metropolis test.",
        model_class="any differentiable log density with two parameters or more",
        criterion="invariance of the posterior (adjusted), up to the error of the step size (unadjusted)",
        search="isokinetic trajectories from random directions",
        cost="some 10 to 500 gradients over all the data per draw",
        needs="gradients, all the data in memory, unconstrained parameters",
        references=(
            "Robnik, De Luca, Silverstein and Seljak, Microcanonical Hamiltonian Monte Carlo, 2023",
            "Robnik, Cohn-Gordon and Seljak, Metropolis adjusted microcanonical Hamiltonian Monte Carlo, 2025",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        hamiltonian.check(self, ("identity", "diagonal"))
        check_positive(self, "num_leapfrog", "max_leapfrog", whole=True)

    def departures(self) -> list[str]:
        return [] if self.adjusted else ["no Metropolis test: the step size leaves a bias"]

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        if len(layout.names) < 2:
            raise MethodError(
                message("One parameter has no direction to turn to.", "1 parameter", "2 or more", "use al.HMC, al.NUTS or al.Slice")
            )
        settings = hamiltonian.settings(self)
        if not self.adjusted:
            settings = settings._replace(wanted=0.5)

        def adapt(state: State, now: Stats, number: Array) -> State:
            core = hamiltonian.adapt(state.core, now.acceptance, number, settings)
            if self.adjusted:
                return state._replace(
                    core=core, length=_length.adapt(state.length, core.step, number, settings.schedule.collect, self.max_leapfrog)
                )
            # In coordinates of unit scale a direction is forgotten over the size of the typical set.
            log_length = jnp.full_like(core.step, 0.5 * np.log(len(core.position)))
            return state._replace(core=core, length=state.length._replace(log_length=log_length, log_average=log_length))

        step = step_adjusted if self.adjusted else step_unadjusted
        return Kernel(
            init=lambda key, position, density: init(key, position, density, settings),
            step=lambda key, state, density: step(key, state, density, self.max_leapfrog if self.adjusted else self.num_leapfrog),
            adapt=adapt,
            settle=lambda state: state._replace(core=hamiltonian.settle(state.core, settings), length=_length.settle(state.length)),
        )
