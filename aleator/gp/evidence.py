"""Evidence: hyper-parameters of a Gaussian process by maximum evidence (type-II maximum likelihood), from several starts."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.loop import Algorithm, Phase, Result
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Point, Score


class State(NamedTuple):
    """Where one start is. params: the hyper-parameters, one vector; value: log p(y | θ) + log p(θ) there, evidence: its first part; direction, size: the
    next try is params + size·direction; slope: the gradient along it; memory: that of L-BFGS; still: accepted steps in a row that gained less than the
    tolerance."""

    params: Array
    value: Array
    evidence: Array
    direction: Array
    size: Array
    slope: Array
    memory: Any
    still: Array


class Info(NamedTuple):
    """log_joint: log p(y | θ) + log p(θ) where the start has come to."""

    log_joint: Array


def init(key: Key, start: Array, lbfgs: Any) -> State:
    """The first try is the start itself."""
    zero, low = jnp.zeros(()), jnp.asarray(jnp.finfo(start.dtype).min)
    return State(start, low, low, jnp.zeros_like(start), jnp.ones(()), zero, lbfgs.init(start), jnp.zeros((), jnp.int32))


def step(key: Key, state: State, batch: Any, model: Any, lbfgs: Any, template: Tree, tolerance: float) -> tuple[State, Info]:
    """One evaluation: the try is accepted where it climbs by a part of what its slope promises (Armijo) and gives the next direction; else it is made
    shorter. One evaluation a step keeps the compiled step small, and starts that run together in step."""

    def log_joint(flat: Array) -> tuple[Array, Array]:
        params = _tree.unflat(flat, template)
        evidence = model.log_evidence(params, batch.x, batch.y)
        return evidence + model.log_prior(params), evidence

    new = state.params + state.size * state.direction
    (value, evidence), gradient = jax.value_and_grad(log_joint, has_aux=True)(new)
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    gain = value - state.value
    good = finite & (gain >= 1e-4 * state.size * state.slope)
    gradient = jnp.where(finite, gradient, 0.0)
    direction, memory = lbfgs.update(-gradient, state.memory, new)
    direction = -direction
    uphill = jnp.vdot(direction, gradient)
    direction, uphill = jnp.where(uphill > 0, direction, gradient), jnp.where(uphill > 0, uphill, jnp.vdot(gradient, gradient))
    # Hyper-parameters are logarithms: no step goes farther than LONGEST in any of them.
    accepted = State(
        new,
        value,
        evidence,
        direction,
        jnp.minimum(1.0, LONGEST / jnp.maximum(jnp.max(jnp.abs(direction)), 1e-300)),
        uphill,
        memory,
        jnp.where(gain < tolerance, state.still + 1, 0),
    )
    # The parabola through value and slope here and the value there has its top at this share of the step.
    share = jnp.where(finite, 0.5 * state.size * state.slope / jnp.maximum(state.size * state.slope - gain, 1e-300), 0.1)
    size = state.size * jnp.clip(share, 0.1, 0.5)
    # Where even the shortest step does not climb, or the start itself cannot be factorised, there is nothing more to do.
    stuck = size * jnp.max(jnp.abs(state.direction)) < 1e-9
    shorter = state._replace(size=size, still=jnp.where(stuck, STILL, state.still))
    state = jax.tree.map(lambda yes, no: jnp.where(good, yes, no), accepted, shorter)
    return state, Info(state.value)


@dataclasses.dataclass(frozen=True)
class Evidence(Method):
    """θ* = argmax log p(y | θ) + log p(θ) by L-BFGS in float64, the best of num_restarts starts; f given θ* in closed form.

    The log evidence reported is log p(y | θ*): exact given θ*, an estimate (too high, by what the choice of θ* is worth) of the model's. A start stops
    when three steps in a row gain less than `tolerance` nats; num_steps: evaluations at most.
    """

    num_restarts: int = 4
    num_steps: int = 500
    tolerance: float = 1e-4

    card: ClassVar[Card] = Card(
        name="Evidence",
        summary="Hyper-parameters of a Gaussian process where their evidence is greatest, functions in closed form.",
        model_class="Gaussian processes whose functions integrate out: al.gp.GP, al.gp.SparseGP with Gaussian noise",
        criterion="log p(y | hyper-parameters) + log prior",
        search="L-BFGS, one evaluation a step, several starts",
        cost="per step and start one factorisation and one inverse of the covariance, O(N³); O(N M²) for sparse ones",
        needs="a model with log_evidence(params, x, y): al.gp.GP, al.gp.SparseGP",
        references=("Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, §5.4",),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_restarts", "num_steps", whole=True)
        check_positive(self, "tolerance")

    def build(self, target: Any) -> Algorithm:
        import optax

        model = target.model
        if not hasattr(model, "log_evidence") or target.temperature != 1.0:
            wrong = f"temperature {target.temperature}" if hasattr(model, "log_evidence") else f"a {type(model).__name__}"
            raise MethodError(message("Evidence has no function to integrate out.", wrong, self.card.needs, "use al.MAP() or al.Laplace()"))
        lbfgs, template = optax.scale_by_lbfgs(), jax.eval_shape(target.init, jax.random.key(0))

        def finish(key: Key, states: State, kept: Any) -> Point:
            best = int(np.argmax(np.asarray(states.value)))
            with jax.enable_x64(True):
                params = jax.tree.map(np.asarray, _tree.unflat(states.params[best], template))
            return Point(params, Score(float(states.evidence[best]), 0.0, getattr(model, "evidence_kind", "estimate")))

        def verdict(result: Result) -> tuple[str, bool]:
            values, still = np.asarray(result.state.value), np.asarray(result.state.still)
            best = int(np.argmax(values))
            agree = int(np.sum(values > values[best] - 0.1))
            told = f"log evidence {float(result.state.evidence[best]):.4g}; {agree} of {len(values)} starts agree on it within 0.1 nats."
            if still[best] >= STILL:
                return f"Converged: {told}", True
            return f"Not converged after {result.steps} steps: {told} Raise num_steps.", False

        if not jax.tree.leaves(template):
            return _nothing_to_learn(model)
        return Algorithm(
            init=lambda key, start: init(key, _tree.flat(start), lbfgs),
            phases=(
                Phase(
                    "Evidence",
                    lambda key, state, batch: step(key, state, batch, model, lbfgs, template, self.tolerance),
                    self.num_steps,
                ),
            ),
            position=lambda state: _tree.unflat(state.params, template),
            finish=finish,
            done=lambda state: state.still >= STILL,
            members=self.num_restarts,
            apart=True,
            watch="log_joint",
            verdict=verdict,
            x64=True,
        )


STILL = 3  # small gains in a row that end a start
LONGEST = 2.0  # of a step, in any one hyper-parameter


def _nothing_to_learn(model: Any) -> Algorithm:
    """All hyper-parameters are fixed: the evidence is computed once, and is exact."""

    def step(key: Key, state: Array, batch: Any) -> tuple[Array, Info]:
        value = model.log_evidence(EMPTY, batch.x, batch.y)
        return value, Info(value)

    EMPTY = jax.tree.map(np.asarray, model.start(jax.random.key(0)))
    return Algorithm(
        init=lambda key, start: jnp.zeros(()),
        phases=(Phase("Evidence", step, 1),),
        position=lambda state: EMPTY,
        finish=lambda key, state, kept: Point(EMPTY, Score(float(state), 0.0, getattr(model, "evidence_kind", "exact"))),
        watch="log_joint",
        verdict=lambda result: ("Complete: functions and evidence in closed form.", True),
        x64=True,
    )
