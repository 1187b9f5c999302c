"""A transformer encoder on sequences (n, T, d) or tokens (n, T)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aleator._errors import ModelError, message, nearest
from aleator._typing import Array, Key, Tree
from aleator.networks._network import activation
from aleator.networks._sequence import check_sequence, check_sequence_sizes, look_up, table_init
from aleator.networks.mlp import check_sizes, dense, dense_init

POSITIONS = ("learned", "sinusoidal", None)
WAVELENGTH = 10_000.0  # the longest of the sinusoids, in steps over 2π (Vaswani et al., 2017)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A transformer encoder that normalises first (Vaswani et al., 2017; Xiong et al., 2020): x (n, T, in_size), T ≤ length → (n, out_size).

    h = x Wᵉ + bᵉ + positions;  `depth` times  h ← h + attention(norm(h)), h ← h + ψ(norm(h) W¹ + b¹) W² + b²;
    outputs = mean over the steps of norm(h), through Wᵒ + bᵒ.

    attention: `heads` of them, each softmax(q kᵀ/√(width/heads)) v with q, k, v dense in its inputs, side by side through one more dense
    map. hidden: units of the dense part (None: 4·width). positions: "learned", one vector a step; "sinusoidal", fixed waves; None, for sets.
    With in_size=None and a vocabulary, x holds tokens (n, T), each looked up as a vector; −1 marks steps that are not there, which nobody
    attends to and the mean leaves out. Matrices start from N(0, 1/fan-in), those before a relu-like ψ from N(0, 2/fan-in), learned
    positions and tokens from N(0, I), gains from 1, biases from 0.

    >>> net = Transformer(in_size=3, length=7, out_size=2, width=8, depth=1, heads=2)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((4, 7, 3))).shape
    (4, 2)
    """

    in_size: int | None
    length: int
    out_size: int
    width: int = 64
    depth: int = 2
    heads: int = 4
    hidden: int | None = None
    positions: str | None = "learned"
    vocabulary: int | None = None
    activation: str = "gelu"

    def __post_init__(self) -> None:
        check_sequence_sizes("Transformer", self.in_size, self.vocabulary)
        check_sizes("Transformer", self.length, self.out_size, self.width, self.depth, self.heads, self.hidden or 4 * self.width)
        activation(self.activation)
        if self.width % self.heads:
            raise ModelError(
                message("The heads cannot share the width.", f"width={self.width}, heads={self.heads}", "a multiple", "pass e.g. heads=1")
            )
        if self.positions not in POSITIONS:
            near = nearest(str(self.positions), [p for p in POSITIONS if p])
            raise ModelError(message("Unknown positions.", repr(self.positions) + near, f"one of {POSITIONS}", "choose one of them"))

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Parameters whose rows are picked one at a time: their fan-in is 1."""
        return ("tokens", "positions")

    def init(self, key: Key) -> Tree:
        key_input, key_positions, key_output, key_blocks = jax.random.split(key, 4)
        params: Tree = {}
        if self.vocabulary is None:
            params["input"] = dense_init(key_input, self.in_size or 0, self.width)
        else:
            params["tokens"] = table_init(key_input, self.vocabulary, self.width)
        if self.positions == "learned":
            params["positions"] = table_init(key_positions, self.length, self.width)
        hidden = self.hidden or 4 * self.width
        gain = 2.0 if self.activation in ("relu", "gelu", "silu", "elu", "leaky_relu") else 1.0
        for number in range(self.depth):
            keys = jax.random.split(jax.random.fold_in(key_blocks, number), 6)
            square = {name: dense_init(k, self.width, self.width) for name, k in zip(("query", "key", "value", "mix"), keys, strict=False)}
            params[f"block{number}"] = {
                "norm1": _norm_init(self.width),
                **square,
                "norm2": _norm_init(self.width),
                "dense1": dense_init(keys[4], self.width, hidden, gain),
                "dense2": dense_init(keys[5], hidden, self.width),
            }
        return {**params, "norm": _norm_init(self.width), "output": dense_init(key_output, self.width, self.out_size)}

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """The last block normalised and averaged over the steps, (n, width)."""
        check_sequence("Transformer", x, self.in_size, self.length)
        psi, steps = activation(self.activation), x.shape[1]
        real: Array | None = None
        if self.vocabulary is None:
            h = dense(params["input"], x)
        else:
            h, real = look_up(params["tokens"], x)
        if self.positions == "learned":
            h = h + params["positions"]["weight"][:steps]
        elif self.positions == "sinusoidal":
            h = h + sinusoids(steps, self.width).astype(h.dtype)
        for number in range(self.depth):
            block = params[f"block{number}"]
            h = h + self._attend(block, layer_norm(h, block["norm1"]), real)
            h = h + dense(block["dense2"], psi(dense(block["dense1"], layer_norm(h, block["norm2"]))))
        h = layer_norm(h, params["norm"])
        if real is None:
            return jnp.mean(h, axis=1)
        return jnp.sum(jnp.where(real[..., None], h, 0.0), axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)[:, None]

    def _attend(self, block: Tree, h: Array, real: Array | None) -> Array:
        """Every head's mixture of the values, side by side, through one dense map; (n, T, width)."""
        n, steps, width = h.shape
        split = lambda name: dense(block[name], h).reshape(n, steps, self.heads, width // self.heads)
        scores = jnp.einsum("nthd,nshd->nhts", split("query"), split("key")) / (width // self.heads) ** 0.5
        if real is not None:
            scores = jnp.where(real[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("nhts,nshd->nthd", jax.nn.softmax(scores, axis=-1), split("value"))
        return dense(block["mix"], mixed.reshape(n, steps, width))

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["output"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


def layer_norm(x: Array, layer: Tree, epsilon: float = 1e-5) -> Array:
    """(x − mean)/√(variance + ε)·scale + bias over the last axis.

    >>> layer_norm(jnp.array([1.0, 3.0]), {"scale": jnp.ones(2), "bias": jnp.zeros(2)}).round(3).tolist()
    [-1.0, 1.0]
    """
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon) * layer["scale"] + layer["bias"]


def sinusoids(steps: int, width: int) -> Array:
    """(steps, width): sin(t·ω_j) in even columns, cos(t·ω_j) in odd ones, ω_j = WAVELENGTH^(−2j/width)."""
    angle = np.arange(steps)[:, None] * WAVELENGTH ** (-2.0 * (np.arange(width) // 2) / width)
    return jnp.asarray(np.where(np.arange(width) % 2 == 0, np.sin(angle), np.cos(angle)), jnp.float32)


def _norm_init(width: int) -> Tree:
    return {"scale": jnp.ones((width,)), "bias": jnp.zeros((width,))}
