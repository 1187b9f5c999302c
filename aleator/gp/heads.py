"""A Gaussian process on top of any network: random features of its outputs, weights by Laplace (SNGP, Liu et al. 2020).

`sngp` is a network with bounded maps, then φ(h)·W, φ random Fourier features of what it puts out and W ~ N(0, 1): given h a Gaussian process. Trained by al.MAP
and followed by al.Laplace on the last layer, which is exact in W for Gaussian noise, it knows inputs whose features are far from all of the training
set, for the price of one trained network.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.gp.random_features import check_features, frequencies, waves_of
from aleator.hyperpriors import positive_number
from aleator.likelihoods import Likelihood
from aleator.model import BNN
from aleator.networks._network import Wrapper, as_network
from aleator.networks.spectral import SpectralNorm
from aleator.priors import Normal, Prior


@dataclasses.dataclass(frozen=True)
class RandomHead(Wrapper):
    """scale·φ(h/length)·W for the outputs h (n, d) of a network, each divided by √d so that `length` means the same for any d; W (num_features, out_size)."""

    network: Any
    out_size: int = 1
    num_features: int = 512
    length: float = 1.0
    scale: float = 1.0
    kernel: str = "rbf"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", as_network(self.network))
        check_features(self.num_features, self.kernel)
        positive_number("RandomHead", "length", self.length)
        positive_number("RandomHead", "scale", self.scale)

    @property
    def params(self) -> Tree:
        """Where a fit of somebody's own network starts: its weights, and nothing at the head; None for a built-in one."""
        given = getattr(self.network, "params", None)
        shape = (self.out_size, self.num_features) if self.fan_axes == "first" else (self.num_features, self.out_size)
        return None if given is None else {"network": given, "head": {"weight": jnp.zeros(shape)}}

    def init(self, key: Key) -> Tree:
        key_network, key_head = jax.random.split(key)
        weight = jax.random.normal(key_head, (self.num_features, self.out_size))
        return {"network": self.network.init(key_network), "head": {"weight": weight.T if self.fan_axes == "first" else weight}}

    def features(self, params: Tree, x: Tree, key: Key | None = None) -> Array:
        """scale·φ(h/length), (n, num_features)."""
        h = self.network.apply(params["network"], x, key)
        if getattr(h, "ndim", 0) != 2:
            raise ModelError(
                message("RandomHead needs a network with flat outputs.", getattr(h, "shape", type(h)), "(n, d)", "flatten them")
            )
        waves = frequencies(h.shape[1], self.num_features // 2, self.kernel, True, self.seed)
        return self.scale * waves_of(h / (self.length * h.shape[1] ** 0.5), waves)

    def apply(self, params: Tree, x: Tree, key: Key | None = None) -> Array:
        weight = params["head"]["weight"]
        return self.features(params, x, key) @ (weight.T if self.fan_axes == "first" else weight)

    def rebuild(self, params: Tree) -> Tree:
        return {"network": self.network.rebuild(params["network"]), "head": params["head"]}


def sngp(
    network: Any,
    likelihood: Likelihood,
    out_size: int = 1,
    num_features: int = 512,
    length: float = 1.0,
    bound: float | None = 0.95,
    prior: Prior | None = None,
) -> BNN:
    """A BNN whose last layer is a process of the network's outputs, taken as features; bound=None leaves the maps of the network as they are.

    Fit it with `al.Laplace("full", "last_layer", base=al.MAP(…))`. prior: of all weights, N(0, 1) at the head unless it says otherwise.
    """
    inner = as_network(network) if bound is None else SpectralNorm(network, bound)
    return BNN(RandomHead(inner, out_size, num_features, length), likelihood, Normal(1.0) if prior is None else prior)
