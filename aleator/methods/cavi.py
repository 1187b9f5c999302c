"""Coordinate-ascent variational inference: q(z) and q(θ) in turn, each at its optimum given the other; stochastic on mini-batches."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent._conjugate import add
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Card, Method, check_positive
from aleator.methods.em import Ascent, begin, best, check_conjugate, climbed, converged, verdict
from aleator.posterior import Posterior, Score


class State(NamedTuple):
    """params: where q(z) is first taken. counts: η of q(θ) = p(θ | η). terms: Σ log normalisers of the rows met so far, in the closing pass."""

    params: Tree
    counts: Tree
    ascent: Ascent
    terms: Array


class Info(NamedTuple):
    """bound = data − complexity, nats (higher is better). data: Σ E_q[log p(y, z | θ) − log q(z)]. complexity: KL(q(θ) ‖ p(θ))."""

    bound: Array
    data: Array
    complexity: Array


def step(state: State, batch: Batch, target: Any, rate: Array | None) -> tuple[State, Info]:
    """η ← η₀ + E_q[T(y, z)], q(z) ∝ exp⟨T(y, z), E_q[t(θ)]⟩; a part `rate` of the way where rows are a sample (Hoffman et al. 2013)."""
    model = target.model
    counts, terms = model.e_step(model.expected(state.counts), batch)
    data, complexity = target.total(terms, batch), model.divergence(state.counts)
    scale = target.num_data / batch.size
    goal = add(model.prior_counts(), jax.tree.map(lambda leaf: scale * leaf, counts))
    moved = goal if rate is None else jax.tree.map(lambda old, new: (1.0 - rate) * old + rate * new, state.counts, goal)
    bound = data - complexity
    return state._replace(counts=moved, ascent=climbed(state.ascent, bound)), Info(bound, data, complexity)


def close(state: State, batch: Batch, target: Any) -> tuple[State, Info]:
    """The bound at the last q(θ), each row once: mini-batches only estimate it."""
    model = target.model
    _, terms = model.e_step(model.expected(state.counts), batch)
    total, complexity = state.terms + batch.weighted_sum(terms), model.divergence(state.counts)
    bound = total - complexity
    return state._replace(terms=total, ascent=state.ascent._replace(value=bound)), Info(bound, total, complexity)


@dataclasses.dataclass(frozen=True)
class CAVI(Method):
    """q(z) q(θ) by coordinate ascent on the evidence lower bound: for conjugate models every update is closed form (D3, D5).

    Full batches climb without ever falling, until a step gains less than `tolerance` nats a row, from num_restarts starts of which the best
    bound is kept. With batch_size, or on a stream, it is stochastic variational inference: steps of rate (t + delay)^(−forgetting) along the
    natural gradient for num_steps, then one pass for the bound.
    """

    num_steps: int = 1000
    num_restarts: int = 5
    tolerance: float = 1e-7
    batch_size: int | None = None
    delay: float = 1.0
    forgetting: float = 0.7

    card: ClassVar[Card] = Card(
        name="Coordinate-ascent variational inference",
        summary="Beliefs about labels and parameters in turn, each exact given the other; the bound never falls.",
        model_class="models of al.latent with conjugate families",
        criterion="evidence lower bound, q(z) q(θ)",
        search="coordinate ascent; natural-gradient steps on mini-batches",
        cost="one pass over the data a step and start; a mini-batch a step in the stochastic form",
        needs="a conjugate latent-variable model",
        references=(
            "Attias, A variational Bayesian framework for graphical models, 1999",
            "Blei, Kucukelbir and McAuliffe, Variational inference: a review for statisticians, 2017",
            "Hoffman, Blei, Wang and Paisley, Stochastic variational inference, 2013",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "num_restarts", "batch_size", whole=True)
        check_positive(self, "tolerance", "delay")
        if not 0.5 < self.forgetting <= 1.0:
            raise MethodError(message("Such steps do not settle.", f"forgetting={self.forgetting}", "½ < forgetting ≤ 1", "use e.g. 0.7"))

    def build(self, target: Any) -> Algorithm:
        model = check_conjugate(self, target)
        stochastic, slack = self.batch_size is not None, self.tolerance * target.num_data
        batches = "random" if stochastic else "full"

        def init(key: Key, start: Tree) -> State:
            return State(start, model.prior_counts(), begin(), jnp.zeros(()))

        def seed(key: Key, state: State, batch: Batch) -> tuple[State, Info]:
            return state._replace(params=model.mode(add(model.prior_counts(), model.seed(key, batch)))), Info(*jnp.zeros(3))

        def first(key: Key, state: State, batch: Batch) -> tuple[State, Info]:
            """q(θ) from q(z) at one parameter tree: equal counts for all would be a saddle that coordinate ascent never leaves."""
            counts = model.begin(state.params, batch, target.num_data / batch.size)
            return state._replace(counts=add(model.prior_counts(), counts)), Info(*jnp.zeros(3))

        def climb(key: Key, state: State, batch: Batch) -> tuple[State, Info]:
            rate = (state.ascent.number + 1.0 + self.delay) ** -self.forgetting if stochastic else None
            return step(state, batch, target, rate)

        def finish(key: Key, states: State, kept: Any) -> Posterior:
            chosen = best(states.ascent)
            value = float(np.asarray(states.ascent.value)[chosen])
            counts = jax.tree.map(np.asarray, _tree.take(states.counts, chosen))
            return model.posterior(counts, Score(value, 0.0, "lower bound"))

        steps = (("seed", seed, 1), ("first", first, 1), ("climb", climb, self.num_steps))
        phases = [Phase(name, one, number, batches, self.batch_size) for name, one, number in steps]
        if stochastic:
            phases.append(Phase("bound", lambda key, state, batch: close(state, batch, target), None, "once", self.batch_size))
        return Algorithm(
            init=init,
            phases=tuple(phases),
            preliminary=1,
            blank=True,
            position=lambda state: state.counts,
            finish=finish,
            done=None if stochastic else lambda state: converged(state.ascent, slack),
            members=self.num_restarts,
            watch="bound",
            verdict=None if stochastic else lambda result: verdict(result.state.ascent, slack, "bound"),
            x64=True,
        )
