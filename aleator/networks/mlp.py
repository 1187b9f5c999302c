"""Dense networks: the multi-layer perceptron and the shallow net of deck 004."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.networks._network import activation, check_input


@dataclasses.dataclass(frozen=True)
class MLP:
    """h⁰ = x, hˡ = ψ(hˡ⁻¹ Wˡ + bˡ), outputs = hᴸ⁻¹ Wᴸ + bᴸ; x (n, in_size) → (n, out_size).

    Weights start from N(0, 2/fan-in) for relu-like activations, N(0, 1/fan-in) otherwise; biases from 0.

    >>> net = MLP(in_size=3, hidden=(5,), out_size=2)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((4, 3))).shape
    (4, 2)
    """

    in_size: int
    hidden: tuple[int, ...]
    out_size: int
    activation: str = "relu"

    def __post_init__(self) -> None:
        hidden = (self.hidden,) if isinstance(self.hidden, int) else tuple(int(width) for width in self.hidden)
        object.__setattr__(self, "hidden", hidden)
        check_sizes("MLP", self.in_size, *hidden, self.out_size)
        activation(self.activation)

    def init(self, key: Key) -> Tree:
        sizes = (self.in_size, *self.hidden, self.out_size)
        keys = jax.random.split(key, len(sizes) - 1)
        gain = 2.0 if self.activation in ("relu", "gelu", "silu", "elu", "leaky_relu") else 1.0
        gains = [gain] * len(self.hidden) + [1.0]
        return {f"layer{i}": dense_init(keys[i], sizes[i], sizes[i + 1], gains[i]) for i in range(len(keys))}

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """Activations of the last hidden layer, (n, hidden[-1])."""
        check_input("MLP", x, (self.in_size,))
        psi = activation(self.activation)
        for i in range(len(self.hidden)):
            x = psi(dense(params[f"layer{i}"], x))
        return x

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params[f"layer{len(self.hidden)}"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class Shallow:
    """y = Σⱼ βⱼ ψ(x'γⱼ + cⱼ): the shallow logistic net of deck 004 (E1); x (n, in_size) → (n, out_size).

    bias=False drops c, as the deck prints it (put a 1 among the inputs). γ and c start from N(0, 1), β from N(0, 1/units).
    """

    in_size: int
    units: int
    out_size: int = 1
    activation: str = "logistic"
    bias: bool = True

    def __post_init__(self) -> None:
        check_sizes("Shallow", self.in_size, self.units, self.out_size)
        activation(self.activation)

    def init(self, key: Key) -> Tree:
        key_gamma, key_bias, key_beta = jax.random.split(key, 3)
        hidden = {"weight": jax.random.normal(key_gamma, (self.in_size, self.units))}
        if self.bias:
            hidden["bias"] = jax.random.normal(key_bias, (self.units,))
        return {"hidden": hidden, "output": {"weight": jax.random.normal(key_beta, (self.units, self.out_size)) / self.units**0.5}}

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """ψ(x'γⱼ + cⱼ), (n, units)."""
        check_input("Shallow", x, (self.in_size,))
        return activation(self.activation)(dense(params["hidden"], x))

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["output"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


def dense(layer: Tree, x: Array) -> Array:
    """x W + b, without b where the layer has none."""
    out = x @ layer["weight"]
    return out + layer["bias"] if "bias" in layer else out


def dense_init(key: Key, fan_in: int, fan_out: int, gain: float = 1.0) -> Tree:
    """W ~ N(0, gain/fan_in), b = 0."""
    return {"weight": jax.random.normal(key, (fan_in, fan_out)) * (gain / fan_in) ** 0.5, "bias": jnp.zeros((fan_out,))}


def check_sizes(name: str, *sizes: int) -> None:
    """Refuse widths that are not positive ints."""
    if any(isinstance(size, bool) or int(size) != size or size < 1 for size in sizes):
        raise ModelError(message(f"{name} needs positive sizes.", sizes, "ints ≥ 1", "pass e.g. in_size=13, hidden=(50,), out_size=1"))
