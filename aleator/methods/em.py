"""Expectation maximisation: hidden variables summed out, then the parameters at the mode given their expected counts."""

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
from aleator.latent._model import ConjugateLatent
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Point

ROUNDING = 1e-9  # share of the objective by which it may fall without being said to


class Ascent(NamedTuple):
    """How the climb goes. value: the objective before the last step, nats. gain: over the one before. fall: the largest loss so far.
    number: of steps."""

    value: Array
    gain: Array
    fall: Array
    number: Array


class State(NamedTuple):
    params: Tree
    ascent: Ascent


class Info(NamedTuple):
    """objective: Σ log p(y | θ) + log p(θ) before the step, nats (higher is better)."""

    objective: Array


def begin() -> Ascent:
    infinity = jnp.asarray(jnp.inf, jnp.result_type(float))  # weakly typed, it would make the driver compile the climb twice
    return Ascent(-infinity, infinity, jnp.zeros(()), jnp.zeros((), jnp.int32))


def climbed(ascent: Ascent, value: Array) -> Ascent:
    """One more value of an objective that must not fall."""
    gain = value - ascent.value
    return Ascent(value, gain, jnp.maximum(ascent.fall, jnp.where(ascent.number > 0, -gain, 0.0)), ascent.number + 1)


def step(state: State, batch: Batch, target: Any) -> tuple[State, Info]:
    """θ ← argmax ⟨η₀ + E[T(y, z) | θ], t(θ)⟩: the objective cannot fall."""
    model = target.model
    counts, terms = model.e_step(model.natural(state.params), batch)
    objective = target.total(terms, batch) + model.penalty(state.params)
    return State(model.mode(add(model.prior_counts(), counts)), climbed(state.ascent, objective)), Info(objective)


@dataclasses.dataclass(frozen=True)
class EM(Method):
    """argmax log p(y | θ) + log p(θ) by expectation maximisation, in the coordinates of the model's conjugate families (D5).

    num_restarts: independent starts, of which the best is kept. It stops where a step gains less than `tolerance` nats a row, after
    num_steps at the latest. Priors are pseudo-counts, so that no component can collapse on a point.
    """

    num_steps: int = 1000
    num_restarts: int = 5
    tolerance: float = 1e-7

    card: ClassVar[Card] = Card(
        name="Expectation maximisation",
        summary="Sum the hidden variables out, maximise given the expected counts, repeat: never a step down.",
        model_class="models of al.latent whose hidden variables sum out",
        criterion="log joint density of the parameters, hidden variables summed out",
        search="coordinate ascent on a bound that touches the objective, from several starts",
        cost="one pass over the data a step and start",
        needs="a conjugate latent-variable model; all the data in memory",
        references=(
            "Dempster, Laird and Rubin, Maximum likelihood from incomplete data via the EM algorithm, 1977",
            "Neal and Hinton, A view of the EM algorithm that justifies incremental, sparse, and other variants, 1998",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "num_restarts", whole=True)
        check_positive(self, "tolerance")

    def build(self, target: Any) -> Algorithm:
        model = check_conjugate(self, target)

        def seed(key: Key, state: State, batch: Batch) -> tuple[State, Info]:
            return State(model.mode(add(model.prior_counts(), model.seed(key, batch))), begin()), Info(jnp.zeros(()))

        def finish(key: Key, states: State, kept: Any) -> Point:
            return Point(_tree.take(jax.tree.map(np.asarray, states.params), best(states.ascent)))

        return Algorithm(
            init=lambda key, start: State(start, begin()),
            phases=(
                Phase("seed", seed, 1, "full"),
                Phase("climb", lambda key, state, batch: step(state, batch, target), self.num_steps, "full"),
            ),
            preliminary=1,
            blank=True,
            position=lambda state: state.params,
            finish=finish,
            done=lambda state: converged(state.ascent, self.tolerance * target.num_data),
            members=self.num_restarts,
            watch="objective",
            verdict=lambda result: verdict(result.state.ascent, self.tolerance * target.num_data, "objective"),
            x64=True,
        )


def check_conjugate(method: Any, target: Any) -> ConjugateLatent:
    name = type(method).__name__
    if not isinstance(target.model, ConjugateLatent):
        got = "a bare density" if target.model is None else type(target.model).__name__
        raise MethodError(
            message(
                f"{name} needs hidden variables that sum out.", got, "a model of al.latent such as Mixture", "use al.MAP or al.Variational"
            )
        )
    if target.temperature != 1.0:
        raise MethodError(message(f"{name} knows no temperature.", target.temperature, "temperature=1", "drop it"))
    return target.model


def converged(ascent: Ascent, tolerance: float) -> Array:
    return (ascent.number > 1) & (ascent.gain < tolerance)


def best(ascent: Ascent) -> int:
    """Which restart ended highest."""
    return int(np.argmax(np.nan_to_num(np.asarray(ascent.value), nan=-np.inf)))


def verdict(ascent: Ascent, tolerance: float, name: str) -> tuple[str, bool]:
    """A sentence on the climb of the best restart, and whether it went as it must."""
    chosen = best(ascent)
    values, falls, gains = (np.atleast_1d(np.asarray(leaf)) for leaf in (ascent.value, ascent.fall, ascent.gain))
    value, number = values[chosen], int(np.atleast_1d(np.asarray(ascent.number))[chosen])
    if falls[chosen] > ROUNDING * max(1.0, abs(value)):
        return (
            f"The {name} fell by {falls[chosen]:.3g} nats in a step that cannot lower it: check the scale of the data for rounding.",
            False,
        )
    if gains[chosen] >= tolerance:
        return f"Still improving after {number} steps ({gains[chosen]:.2g} nats a step): raise num_steps.", False
    same = int(np.sum(values > value - 1e-3 * max(1.0, abs(value))))
    starts = f"; {same} of {len(values)} starts ended within .1 % of the best" if len(values) > 1 else ""
    return f"Converged: {name} {value:.4f} nats after {number} steps, never falling{starts}.", True
