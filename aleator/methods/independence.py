"""Independence: Metropolis–Hastings whose proposals do not depend on where the chain is."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hmc
from aleator.methods import random_walk as walk
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, safe, stats
from aleator.methods._method import Card
from aleator.methods._moves import Proposal, draw, frozen_moments, log_prob, proposal_of, shrunk_factor, windows

MINIMUM = 100  # steps from which a proposal can be learned


class State(NamedTuple):
    """position (D,), log_density: where the chain is. proposal: g. ready: g is in use; until then a random walk with the state `walk`
    explores, and `moments` gathers what g is made of (both None where g was given)."""

    position: Array
    log_density: Array
    proposal: Proposal
    ready: Array
    walk: walk.State | None
    moments: hmc.Moments | None


def independent(key: Key, state: State, density: Density, df: float) -> tuple[State, Stats]:
    """q′ ~ g, accepted with min(1, π(q′)g(q) / π(q)g(q′))."""
    key_move, key_accept = jax.random.split(key)
    proposal = draw(key_move, state.proposal, df)
    value = density.value(proposal)
    hastings = log_prob(state.proposal, state.position, df) - log_prob(state.proposal, proposal, df)
    ratio = safe(safe(value) - state.log_density + hastings)
    taken = jnp.log(jax.random.uniform(key_accept, (), ratio.dtype)) < ratio
    log_density = jnp.where(taken, value, state.log_density)
    state = state._replace(position=jnp.where(taken, proposal, state.position), log_density=log_density)
    return state, stats(log_density, jnp.exp(jnp.minimum(ratio, 0.0)), 1, **count_bad(value))


def step(key: Key, state: State, density: Density, df: float) -> tuple[State, Stats]:
    """A draw of g; while g is still being learned, a step of the random walk."""
    if state.walk is None:
        return independent(key, state, density, df)

    def walking() -> tuple[State, Stats]:
        # The walk's own place is the chain's: g is not used before the walk has ended.
        inner, now = walk.step(key, state.walk, density)
        return state._replace(position=inner.position, log_density=inner.log_density, walk=inner), now

    return jax.lax.cond(state.ready, lambda: independent(key, state, density, df), walking)


@dataclasses.dataclass(frozen=True)
class Independence(Sampler):
    """Independence Metropolis–Hastings with a Student-t proposal of `df` degrees of freedom (∞: Gaussian).

    proposal: a Fit of the same model (of al.Variational, al.NUTS, …), or (mean (D,), covariance (D, D)) over the flattened parameters;
    None learns both from a random walk in the second half of warm-up. Uniformly ergodic where π/g is bounded, which heavy tails of g
    help; it sticks where g is too light.
    """

    num_samples: int = 2000
    num_warmup: int = 5000
    num_chains: int = 4
    thin: int = 1
    proposal: Any = None
    df: float = 5.0
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Independence",
        summary="Corrects an approximation into an exact answer: draws of it, accepted or refused.",
        model_class="any log density of some 20 parameters with a good approximation at hand",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="draws of a fixed Student-t distribution, accepted or refused",
        cost="one density over all the data per step",
        needs="a proposal that covers the posterior, or a warm-up that finds one; no gradients",
        references=(
            "Tierney, Markov chains for exploring posterior distributions, 1994",
            "Mengersen and Tweedie, Rates of convergence of the Hastings and Metropolis algorithms, 1996",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        object.__setattr__(self, "proposal", frozen_moments(self.proposal))
        if not self.df > 0.0:
            raise MethodError(message("The degrees of freedom must be positive.", self.df, "a number > 0", "pass e.g. df=5.0"))
        if self.proposal is None and self.num_warmup < MINIMUM:
            raise MethodError(
                message(
                    "Without warm-up a proposal cannot be learned.",
                    f"num_warmup={self.num_warmup}",
                    f"proposal=…, or at least {MINIMUM} steps",
                    "pass proposal=fit, or num_warmup=5000",
                )
            )

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        size, learning = len(layout.names), self.proposal is None
        settings = walk.Settings("dense", None, 0.44 if size == 1 else 0.234, windows(self.num_warmup))
        given = None if learning else proposal_of(self.proposal, layout, self)

        def init(key: Key, position: Array, density: Density) -> State:
            proposal = Proposal(position, jnp.eye(size, dtype=position.dtype)) if learning else given
            inner = walk.begin(position, density, settings) if learning else None
            moments = hmc.moments(position, "dense") if learning else None
            return State(position, density.value(position), proposal, jnp.asarray(not learning), inner, moments)

        def adapt(state: State, now: Stats, number: Array) -> State:
            if not learning:
                return state
            gather = lambda: hmc.collect(state.moments, state.position, state.position)
            moments = jax.lax.cond(number >= self.num_warmup // 2, gather, lambda: state.moments)
            return state._replace(walk=walk.adapt(state.walk, now.acceptance, number, settings), moments=moments)

        def settle(state: State) -> State:
            if not learning:
                return state
            n = jnp.maximum(state.moments.count, 2).astype(state.position.dtype)
            factor = shrunk_factor(state.moments.square / (n - 1.0), n)
            # A walk that never moved leaves no covariance: a unit one lets the verdict speak.
            factor = jnp.where(
                jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.diagonal(factor) > 0.0), factor, jnp.eye(size, dtype=factor.dtype)
            )
            return state._replace(proposal=Proposal(state.moments.mean, factor), ready=jnp.asarray(True))

        return Kernel(init=init, step=lambda key, state, density: step(key, state, density, float(self.df)), adapt=adapt, settle=settle)
