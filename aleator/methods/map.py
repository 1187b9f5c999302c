"""MAP: the mode of the posterior by stochastic or full-batch gradients."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Point


class State(NamedTuple):
    """params (flat for small models, see `_optimise.packing`) and optimiser state; best: with held-out data a Best, else ()."""

    params: Tree
    optimizer: Any
    best: Any


class Best(NamedTuple):
    """Parameters with the best mean held-out log-likelihood (score) so far, and how many looks ago that was."""

    params: Tree
    score: Array
    checks_since: Array


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θ) before the step, an estimate from its batch."""

    log_likelihood: Array


def init(key: Key, start: Tree, optimizer: Any, early: bool) -> State:
    best = Best(start, jnp.asarray(-jnp.inf), jnp.zeros((), jnp.int32)) if early else ()
    return State(start, optimizer.init(start), best)


def step(
    key: Key, state: State, batch: Batch | None, target: Any, optimizer: Any, packing: _optimise.Packing, adversarial: float
) -> tuple[State, Info]:
    """θ ← θ − update(∇[−log joint / N]): the prior's weight decay is scaled by N because the log joint is."""
    import optax

    key = key if target.stochastic else None

    def loss(params: Tree) -> tuple[Array, Array]:
        prior, data = target.parts(params, batch, key)
        if adversarial:
            data = 0.5 * (data + target.parts(params, _smoothed(params, batch, target, key, adversarial), key)[1])
        return -(prior + data) / (max(target.num_data, 1) * target.temperature), data

    # The log prior's own value is used by nothing but line searches, so XLA drops its sums from every other step. The gradient is taken
    # by leaf and then packed: a gradient through the slices of `unpack` would be a sum of padded vectors.
    (value, data), gradient = jax.value_and_grad(loss, has_aux=True)(packing.unpack(state.params))
    gradient = packing.pack(gradient)
    updates, optimizer_state = optimizer.update(
        gradient, state.optimizer, state.params, value=value, grad=gradient, value_fn=lambda packed: loss(packing.unpack(packed))[0]
    )
    return State(optax.apply_updates(state.params, updates), optimizer_state, state.best), Info(data)


def check(state: State, held: Batch, target: Any, packing: _optimise.Packing) -> State:
    """Remember the parameters with the best mean held-out log-likelihood."""
    score = held.weighted_sum(target.log_likelihood(packing.unpack(state.params), held)) / held.size
    better = score > state.best.score
    keep = lambda new, old: jnp.where(better, new, old)
    best = Best(
        jax.tree.map(keep, state.params, state.best.params),
        keep(score, state.best.score),
        jnp.where(better, 0, state.best.checks_since + 1),
    )
    return state._replace(best=best)


@dataclasses.dataclass(frozen=True)
class MAP(Method):
    """θ* = argmax log p(θ) + Σᵢ log p(yᵢ | xᵢ, θ).

    batch_size None means all rows at every step. optimizer: the name of an optax optimiser, a function learning_rate → optimiser, or an
    optimiser. schedule: "constant", "cosine" (to zero over num_steps) or "warmup_cosine" (5 % warm-up). holdout > 0 sets that fraction of
    the rows aside (or uses `validation=` of `al.fit`), looks at their log-likelihood every check_every steps, stops after `patience` looks
    without improvement and returns the best parameters seen. adversarial ε adds the log-likelihood at x + ε·sign(∂loss/∂x), the smoothing
    of Lakshminarayanan et al. (2017); ε in units of x. clip: largest gradient norm allowed (of the loss per row).
    """

    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Any = "adam"
    schedule: str = "cosine"
    holdout: float = 0.0
    patience: int = 10
    check_every: int = 100
    adversarial: float = 0.0
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="MAP",
        summary="The single most probable parameters: fast, and blind to its own uncertainty.",
        model_class="any model with a differentiable log joint",
        criterion="log joint density (penalised likelihood)",
        search="stochastic or full-batch gradient ascent",
        cost="one gradient per step; one copy of the parameters, plus the optimiser's",
        needs="a log joint that is differentiable and finite at the start",
        references=("Bishop, Pattern Recognition and Machine Learning, 2006, §3.3, §5.5",),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "patience", "check_every", whole=True)
        check_positive(self, "learning_rate", "clip")
        if not 0.0 <= self.holdout < 1.0 or self.adversarial < 0.0:
            got = f"holdout={self.holdout}, adversarial={self.adversarial}"
            raise MethodError(
                message("MAP cannot use these fractions.", got, "0 ≤ holdout < 1 and adversarial ≥ 0", "pass e.g. holdout=0.1")
            )
        _optimise.check_optimizer(self)

    def build(self, target: Any) -> Algorithm:
        optimizer, early = _optimise.optimizer(self), self.holdout > 0
        if early and target.model is None:
            raise MethodError(
                message("A bare log density has no data to hold out.", f"holdout={self.holdout}", "holdout=0", "drop holdout")
            )
        packing = _optimise.packing(jax.eval_shape(target.init, jax.random.key(0)))

        def position(state: State) -> Tree:
            return packing.unpack(state.best.params if early else state.params)

        def one_step(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            return step(key, state, batch, target, optimizer, packing, self.adversarial)

        batches = None if target.model is None else "full" if self.batch_size is None else "random"
        return Algorithm(
            init=lambda key, start: init(key, packing.pack(start), optimizer, early),
            phases=(Phase("MAP", one_step, self.num_steps, batches, self.batch_size),),
            position=position,
            finish=lambda key, state, kept: Point(position(state)),
            done=(lambda state: state.best.checks_since >= self.patience) if early else None,
            check=(lambda state, held: check(state, held, target, packing)) if early else None,
            check_every=min(self.check_every, self.num_steps),  # a short run is looked at once, at its end
            watch="log_likelihood",
        )


def _smoothed(params: Tree, batch: Batch, target: Any, key: Key | None, epsilon: float) -> Batch:
    """The batch moved by ε in the direction in which each row's log-likelihood falls fastest."""
    total = lambda x: jnp.sum(target.log_likelihood(jax.lax.stop_gradient(params), dataclasses.replace(batch, x=x), key))
    direction = jax.tree.map(jnp.sign, jax.grad(total)(batch.x))
    return dataclasses.replace(batch, x=jax.tree.map(lambda x, d: x - epsilon * d, batch.x, direction))
