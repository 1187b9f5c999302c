"""Recurrent networks on sequences (n, T, d): GRU and LSTM, one scan a layer."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from aleator._typing import Array, Key, Tree
from aleator.networks._sequence import check_sequence, check_sequence_sizes, look_up, table_init
from aleator.networks.mlp import check_sizes, dense, dense_init


@dataclasses.dataclass(frozen=True)
class _Recurrent(abc.ABC):
    """Layers of cells, each read by the one above after every step, and a linear map of the last one's state after the last step."""

    in_size: int | None
    hidden: tuple[int, ...]
    out_size: int
    vocabulary: int | None = None

    gates: ClassVar[int]  # parts into which a cell splits what comes in
    states: ClassVar[int]  # arrays (n, width) that a cell carries from step to step, the first of which is its output

    @abc.abstractmethod
    def _step(self, inputs: Array, recurrent: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """The carry after one step. inputs: x_t W + b, recurrent: h_{t−1} V, each (n, gates·width)."""

    def __post_init__(self) -> None:
        name, hidden = type(self).__name__, (self.hidden,) if isinstance(self.hidden, int) else tuple(int(width) for width in self.hidden)
        object.__setattr__(self, "hidden", hidden)
        check_sequence_sizes(name, self.in_size, self.vocabulary)
        check_sizes(name, *(hidden or (0,)), self.out_size)

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Parameters whose rows are picked one at a time: their fan-in is 1."""
        return ("tokens",) if self.vocabulary else ()

    def init(self, key: Key) -> Tree:
        key_tokens, key_output, key_layers = jax.random.split(key, 3)
        params: Tree = {} if self.vocabulary is None else {"tokens": table_init(key_tokens, self.vocabulary, self.hidden[0])}
        width = self.in_size or self.hidden[0]
        for number, hidden in enumerate(self.hidden):
            key_input, key_state = jax.random.split(jax.random.fold_in(key_layers, number))
            state = dense_init(key_state, hidden, self.gates * hidden)
            params[f"layer{number}"] = {"input": dense_init(key_input, width, self.gates * hidden), "state": {"weight": state["weight"]}}
            width = hidden
        return {**params, "output": dense_init(key_output, width, self.out_size)}

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """States of the last layer after the last step, (n, hidden[-1])."""
        check_sequence(type(self).__name__, x, self.in_size)
        real: Array | None = None
        if self.vocabulary is not None:
            x, real = look_up(params["tokens"], x)
        carry: tuple[Array, ...] = ()
        for number, width in enumerate(self.hidden):
            layer = params[f"layer{number}"]

            def step(carry: Any, item: tuple[Array, Array | None], layer: Tree = layer) -> tuple[Any, Array]:
                inputs, here = item
                new = self._step(inputs, carry[0] @ layer["state"]["weight"], carry)
                out = new[0]
                if here is not None:
                    new = jax.tree.map(lambda fresh, old: jnp.where(here[:, None], fresh, old), new, carry)
                return new, out

            # What comes from the inputs is one product for all steps, outside the scan.
            steps = (jnp.swapaxes(dense(layer["input"], x), 0, 1), None if real is None else real.T)
            carry, out = lax.scan(step, (jnp.zeros((x.shape[0], width), x.dtype),) * self.states, steps)
            x = jnp.swapaxes(out, 0, 1)
        return carry[0]

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["output"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class GRU(_Recurrent):
    """Gated recurrent units (Cho et al., 2014): x (n, T, in_size) → (n, out_size), from the state after the last step.

    r, u, c = x_t W + b in three parts, r′, u′, c′ = h_{t−1} V likewise;  ρ = σ(r + r′), υ = σ(u + u′),
    h_t = υ ⊙ h_{t−1} + (1 − υ) ⊙ tanh(c + ρ ⊙ c′),  h₀ = 0;  outputs = h_T Wᵒ + bᵒ.

    hidden: width of each layer; a layer reads the states of the one below. With in_size=None and a vocabulary, x holds tokens (n, T), each
    looked up as a vector of `hidden[0]` numbers; at −1 a sequence has ended, and states stay as they are.
    Matrices start from N(0, 1/fan-in), biases from 0, vectors of tokens from N(0, I).

    >>> net = GRU(in_size=3, hidden=(5,), out_size=2)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((4, 7, 3))).shape
    (4, 2)
    """

    gates: ClassVar[int] = 3
    states: ClassVar[int] = 1

    def _step(self, inputs: Array, recurrent: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        reset, update, candidate = jnp.split(inputs, 3, axis=-1)
        reset_too, update_too, candidate_too = jnp.split(recurrent, 3, axis=-1)
        keep = jax.nn.sigmoid(update + update_too)
        new = jnp.tanh(candidate + jax.nn.sigmoid(reset + reset_too) * candidate_too)
        return (keep * carry[0] + (1.0 - keep) * new,)


@dataclasses.dataclass(frozen=True)
class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997): x (n, T, in_size) → (n, out_size), from the state after the last step.

    i, f, g, o = x_t W + h_{t−1} V + b in four parts;  c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g),  h_t = σ(o) ⊙ tanh(c_t),  h₀ = c₀ = 0;
    outputs = h_T Wᵒ + bᵒ.

    Arguments and starts are those of `GRU`, except that the biases of the forget gates f start from 1, so that memory lasts.

    >>> net = LSTM(in_size=3, hidden=(5, 5), out_size=2)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((4, 7, 3))).shape
    (4, 2)
    """

    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2

    def init(self, key: Key) -> Tree:
        params = super().init(key)
        for number, width in enumerate(self.hidden):
            layer = params[f"layer{number}"]["input"]
            layer["bias"] = layer["bias"].at[width : 2 * width].set(1.0)
        return params

    def _step(self, inputs: Array, recurrent: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        enter, forget, new, leave = jnp.split(inputs + recurrent, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * carry[1] + jax.nn.sigmoid(enter) * jnp.tanh(new)
        return jax.nn.sigmoid(leave) * jnp.tanh(memory), memory
