"""RandomWalk: Metropolis–Hastings whose steps take the scale and the covariance of the target during warm-up."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hmc
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, safe, stats
from aleator.methods._method import Card, check_positive
from aleator.methods._moves import check_metric, check_share, covariance_metric, kind_of, spread, windows


class State(NamedTuple):
    """position (D,), log_density: where the chain is. step: s. metric: the covariance LLᵀ of a step. averaging, moments: what warm-up
    learns."""

    position: Array
    log_density: Array
    step: Array
    metric: hmc.Metric
    averaging: hmc.Averaging
    moments: hmc.Moments


class Settings(NamedTuple):
    """kind: of the metric. step_size: fixed, or None to adapt. wanted: acceptance that it is adapted to."""

    kind: str
    step_size: float | None
    wanted: float
    schedule: hmc.Schedule


def begin(position: Array, density: Density, settings: Settings) -> State:
    """The state before warm-up: unit covariance, the step that is best for a Gaussian of this dimension."""
    step = jnp.asarray(best_step(len(position)) if settings.step_size is None else settings.step_size, position.dtype)
    metric, moments = hmc.new_metric(settings.kind, position), hmc.moments(position, settings.kind)
    return State(position, density.value(position), step, metric, fresh(step), moments)


def step(key: Key, state: State, density: Density) -> tuple[State, Stats]:
    """q′ = q + s L z, z ~ N(0, I), accepted with min(1, π(q′)/π(q)): the step is as likely there as back."""
    key_move, key_accept = jax.random.split(key)
    noise = jax.random.normal(key_move, state.position.shape, state.position.dtype)
    proposal = state.position + state.step * spread(state.metric, noise)
    value = density.value(proposal)
    ratio = safe(value) - state.log_density
    taken = jnp.log(jax.random.uniform(key_accept, (), ratio.dtype)) < ratio
    log_density = jnp.where(taken, value, state.log_density)
    state = state._replace(position=jnp.where(taken, proposal, state.position), log_density=log_density)
    return state, stats(log_density, jnp.exp(jnp.minimum(ratio, 0.0)), 1, **count_bad(value))


def adapt(state: State, acceptance: Array, number: Array, settings: Settings) -> State:
    """After warm-up step `number`: s follows the acceptance; where a window ends, the covariance of its draws takes over and s starts
    again from what is best for a Gaussian."""
    if settings.step_size is None:
        following = hmc.average(state.averaging, acceptance, settings.wanted)
        state = state._replace(averaging=following, step=jnp.exp(following.log_step))
    if settings.kind == "identity":
        return state
    gather = lambda: hmc.collect(state.moments, state.position, state.position)
    state = state._replace(moments=jax.lax.cond(jnp.asarray(settings.schedule.collect)[number], gather, lambda: state.moments))

    def renew() -> State:
        metric = covariance_metric(state.moments, state.metric)
        step = jnp.asarray(best_step(len(state.position)), state.step.dtype) if settings.step_size is None else state.step
        return state._replace(metric=metric, moments=hmc.moments(state.position, settings.kind), step=step, averaging=fresh(step))

    return jax.lax.cond(jnp.asarray(settings.schedule.update)[number], renew, lambda: state)


def settle(state: State, settings: Settings) -> State:
    """When warm-up ends: the averaged step."""
    return state if settings.step_size is not None else state._replace(step=jnp.exp(state.averaging.log_average))


@dataclasses.dataclass(frozen=True)
class RandomWalk(Sampler):
    """Random-walk Metropolis–Hastings (A5) on any log density, smooth or not.

    Warm-up adapts the size of the steps to `target_acceptance` (0.44 for one parameter, 0.234 for more) and their covariance ("dense",
    "diagonal", "identity"; "auto" is dense up to 200 parameters) to the draws of windows; neither changes afterwards. num_samples draws
    are kept per chain, one in every `thin` steps.
    """

    num_samples: int = 2000
    num_warmup: int = 5000
    num_chains: int = 4
    thin: int = 10
    metric: str = "auto"
    target_acceptance: float | None = None
    step_size: float | None = None
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Random walk",
        summary="The simplest exact sampler: needs nothing but values of the density, and many of them.",
        model_class="any log density, up to some 50 parameters",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="Gaussian steps with the covariance of the posterior, accepted or refused",
        cost="one density over all the data per step; some 5·D steps per effective draw",
        needs="all the data in memory; no gradients",
        references=(
            "Metropolis et al., Equation of state calculations by fast computing machines, 1953",
            "Haario, Saksman and Tamminen, An adaptive Metropolis algorithm, 2001",
            "Andrieu and Thoms, A tutorial on adaptive MCMC, 2008",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        check_metric(self)
        check_positive(self, "step_size")
        check_share(self, "target_acceptance")
        if self.num_warmup == 0 and self.step_size is None:
            raise MethodError(
                message(
                    "Without warm-up the step size cannot be found.", "num_warmup=0", "step_size=…", "pass step_size, or num_warmup=5000"
                )
            )

    def settings(self, size: int) -> Settings:
        """For a target with so many coordinates."""
        wanted = self.target_acceptance or (0.44 if size == 1 else 0.234)
        return Settings(kind_of(self.metric, size), self.step_size, wanted, windows(self.num_warmup))

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        settings = self.settings(len(layout.names))
        return Kernel(
            init=lambda key, position, density: begin(position, density, settings),
            step=step,
            adapt=lambda state, now, number: adapt(state, now.acceptance, number, settings),
            settle=lambda state: settle(state, settings),
        )


def best_step(size: int) -> float:
    """2.38/√D: the step that mixes fastest on a Gaussian in many dimensions (Roberts, Gelman and Gilks 1997)."""
    return 2.38 / float(np.sqrt(size))


def fresh(step: Array) -> hmc.Averaging:
    """Dual averaging around a step; it begins there, and not ten times farther as trajectories do."""
    begun = hmc.averaging(step)
    return begun._replace(centre=begun.log_step, log_average=begun.log_step)
