"""Snapshot: several modes from one run, by a learning rate that falls and starts again."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods import map as map_file
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Draws, Point, Posterior


class State(NamedTuple):
    """params (flat for small models), the optimiser's state, and the number of steps made."""

    params: Tree
    optimizer: Any
    step: Array


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θ) before the step, an estimate from its batch."""

    log_likelihood: Array


def init(key: Key, start: Tree, optimizer: Any) -> State:
    return State(start, optimizer.init(start), jnp.zeros((), jnp.int32))


def step(key: Key, state: State, batch: Batch | None, target: Any, optimizer: Any, packing: _optimise.Packing) -> tuple[State, Info]:
    """A step of MAP at the learning rate of this place in the cycle."""
    moved, info = map_file.step(key, map_file.State(state.params, state.optimizer, ()), batch, target, optimizer, packing, 0.0)
    return State(moved.params, moved.optimizer, state.step + 1), Info(info.log_likelihood)


@dataclasses.dataclass(frozen=True)
class Snapshot(Method):
    """q(θ) = (1/C) Σ_c δ(θ − θ_c): the ends of C = num_cycles descents in one run of num_steps (Huang et al. 2017).

    The learning rate is η/2·(1 + cos(π·u)), u ∈ [0, 1) the place within the cycle: it falls to nothing, where the parameters are kept, and
    jumps back to η = learning_rate, which throws them out of that mode. optimizer: a name or a function of the learning rate.
    discard: how many of the first cycles are not kept. batch_size, clip: as in `al.MAP`.
    """

    num_steps: int = 5000
    num_cycles: int = 5
    discard: int = 0
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Any = "adam"
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="Snapshot",
        summary="An ensemble for the price of one run: its members are less apart than those of independent runs.",
        model_class="any model with a differentiable log joint",
        criterion="log joint density (penalised likelihood), at the end of each cycle",
        search="gradient ascent with a cyclical cosine learning rate, restarted warm",
        cost="one gradient per step; one copy of the parameters for each cycle",
        needs="cycles long enough to reach a mode, and a learning rate that leaves it again",
        references=("Huang et al., Snapshot ensembles: train 1, get M for free, 2017",),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "num_cycles", "batch_size", whole=True)
        check_positive(self, "learning_rate", "clip")
        if isinstance(self.discard, bool) or not isinstance(self.discard, int) or not 0 <= self.discard < self.num_cycles:
            raise MethodError(
                message(
                    "Nothing would be kept.",
                    f"discard={self.discard!r} of {self.num_cycles} cycles",
                    "0 ≤ discard < num_cycles",
                    "lower it",
                )
            )
        if self.num_cycles > self.num_steps:
            raise MethodError(
                message(
                    "The cycles have no steps.",
                    f"{self.num_cycles} cycles in {self.num_steps} steps",
                    "num_cycles ≤ num_steps",
                    "raise num_steps to some hundreds a cycle",
                )
            )
        if self.optimizer == "lbfgs" or not (isinstance(self.optimizer, str) or _is_factory(self.optimizer)):
            raise MethodError(
                message(
                    "The learning rate of this optimiser cannot be set.",
                    repr(self.optimizer),
                    "a name such as 'adam' or 'sgd', or a function of the learning rate",
                    "pass e.g. optimizer=optax.adamw",
                )
            )
        _optimizer(self)

    def build(self, target: Any) -> Algorithm:
        optimizer = _optimizer(self)
        packing = _optimise.packing(jax.eval_shape(target.init, jax.random.key(0)))
        position = lambda state: packing.unpack(state.params)

        def keep(state: State, info: Info) -> tuple[Tree, Array]:
            begun, before = (number * self.num_cycles // self.num_steps for number in (state.step, state.step - 1))
            return position(state), (begun > before) & (begun > self.discard)

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            return Point(position(state)) if kept is None else Draws(jax.tree.map(jnp.asarray, kept))

        batches = None if target.model is None else "full" if self.batch_size is None else "random"
        one_step = lambda key, state, batch: step(key, state, batch, target, optimizer, packing)
        return Algorithm(
            init=lambda key, start: init(key, packing.pack(start), optimizer),
            phases=(Phase("Snapshot", one_step, self.num_steps, batches, self.batch_size),),
            position=position,
            finish=finish,
            keep=keep,
            watch="log_likelihood",
        )


def cyclical(learning_rate: float, num_steps: int, num_cycles: int) -> Callable[[Any], Array]:
    """η/2·(1 + cos(π·u)) with u the place of a step within its cycle."""
    return lambda number: 0.5 * learning_rate * (1.0 + jnp.cos(jnp.pi * ((number * num_cycles) % num_steps) / num_steps))


def _optimizer(method: Snapshot) -> Any:
    rate = cyclical(method.learning_rate, method.num_steps, method.num_cycles)
    return _optimise.optimizer(
        types.SimpleNamespace(
            optimizer=method.optimizer, schedule="constant", learning_rate=rate, num_steps=method.num_steps, clip=method.clip
        )
    )


def _is_factory(choice: Any) -> bool:
    import optax

    return callable(choice) and not isinstance(choice, optax.GradientTransformation)
