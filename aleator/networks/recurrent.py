"""Recurrent networks on sequences (n, T, d): GRU and LSTM, one scan a layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aleator._typing import Array, Key, Tree
from aleator.networks._sequence import check_sequence, check_sequence_sizes, look_up, table_init
from aleator.networks.mlp import check_sizes, dense, dense_init


@dataclasses.dataclass(frozen=True)
class GRU:
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

    in_size: int | None
    hidden: tuple[int, ...]
    out_size: int
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        _store(self)

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Parameters whose rows are picked one at a time: their fan-in is 1."""
        return ("tokens",) if self.vocabulary else ()

    def init(self, key: Key) -> Tree:
        return _init(key, self, gates=3)

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """States of the last layer after the last step, (n, hidden[-1])."""

        def one(layer: Tree, state: Array, inputs: Array) -> tuple[Array, Array]:
            reset, update, candidate = jnp.split(inputs, 3, axis=-1)
            reset_too, update_too, candidate_too = jnp.split(state @ layer["state"]["weight"], 3, axis=-1)
            keep = jax.nn.sigmoid(update + update_too)
            new = jnp.tanh(candidate + jax.nn.sigmoid(reset + reset_too) * candidate_too)
            new = keep * state + (1.0 - keep) * new
            return new, new

        return _run(self, params, x, one, states=1)

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["output"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class LSTM:
    """Long short-term memory (Hochreiter and Schmidhuber, 1997): x (n, T, in_size) → (n, out_size), from the state after the last step.

    i, f, g, o = x_t W + h_{t−1} V + b in four parts;  c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g),  h_t = σ(o) ⊙ tanh(c_t),  h₀ = c₀ = 0;
    outputs = h_T Wᵒ + bᵒ.

    Arguments and starts are those of `GRU`, except that the biases of the forget gates f start from 1, so that memory lasts.

    >>> net = LSTM(in_size=3, hidden=(5, 5), out_size=2)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((4, 7, 3))).shape
    (4, 2)
    """

    in_size: int | None
    hidden: tuple[int, ...]
    out_size: int
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        _store(self)

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Parameters whose rows are picked one at a time: their fan-in is 1."""
        return ("tokens",) if self.vocabulary else ()

    def init(self, key: Key) -> Tree:
        params = _init(key, self, gates=4)
        for number, width in enumerate(self.hidden):
            layer = params[f"layer{number}"]["input"]
            layer["bias"] = layer["bias"].at[width : 2 * width].set(1.0)
        return params

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """States of the last layer after the last step, (n, hidden[-1])."""

        def one(layer: Tree, carry: tuple[Array, Array], inputs: Array) -> tuple[tuple[Array, Array], Array]:
            state, memory = carry
            enter, forget, new, leave = jnp.split(inputs + state @ layer["state"]["weight"], 4, axis=-1)
            memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
            state = jax.nn.sigmoid(leave) * jnp.tanh(memory)
            return (state, memory), state

        return _run(self, params, x, one, states=2)

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["output"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


def _store(net: GRU | LSTM) -> None:
    hidden = (net.hidden,) if isinstance(net.hidden, int) else tuple(int(width) for width in net.hidden)
    object.__setattr__(net, "hidden", hidden)
    check_sequence_sizes(type(net).__name__, net.in_size, net.vocabulary)
    check_sizes(type(net).__name__, *(hidden or (0,)), net.out_size)


def _init(key: Key, net: GRU | LSTM, gates: int) -> Tree:
    key_tokens, key_output, key_layers = jax.random.split(key, 3)
    params: Tree = {} if net.vocabulary is None else {"tokens": table_init(key_tokens, net.vocabulary, net.hidden[0])}
    width = net.in_size or net.hidden[0]
    for number, hidden in enumerate(net.hidden):
        key_input, key_state = jax.random.split(jax.random.fold_in(key_layers, number))
        state = dense_init(key_state, hidden, gates * hidden)
        params[f"layer{number}"] = {"input": dense_init(key_input, width, gates * hidden), "state": {"weight": state["weight"]}}
        width = hidden
    return {**params, "output": dense_init(key_output, width, net.out_size)}


def _run(net: GRU | LSTM, params: Tree, x: Array, one: Any, states: int) -> Array:
    """The state of the last layer after the last step. What comes from the inputs is one product for all steps, outside the scan."""
    check_sequence(type(net).__name__, x, net.in_size)
    real: Array | None = None
    if net.vocabulary is not None:
        x, real = look_up(params["tokens"], x)
    state: Any = None
    for number, width in enumerate(net.hidden):
        layer = params[f"layer{number}"]
        blank = jnp.zeros((x.shape[0], width), x.dtype)
        begin = blank if states == 1 else (blank,) * states

        def step(carry: Any, item: tuple[Array, Array | None], layer: Tree = layer) -> tuple[Any, Array]:
            inputs, here = item
            new, out = one(layer, carry, inputs)
            if here is not None:
                new = jax.tree.map(lambda fresh, old: jnp.where(here[:, None], fresh, old), new, carry)
            return new, out

        steps = (jnp.swapaxes(dense(layer["input"], x), 0, 1), None if real is None else real.T)
        state, out = lax.scan(step, begin, steps)
        x = jnp.swapaxes(out, 0, 1)
    return state if states == 1 else state[0]
