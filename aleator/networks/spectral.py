"""Spectral normalisation of any network: no linear map of it stretches more than a bound, so that inputs far apart can be told from outputs that are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import sites
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.networks._network import Wrapper, as_network


@dataclasses.dataclass(frozen=True)
class SpectralNorm(Wrapper):
    """The network with each weight W of a linear map in the place of W·min(1, bound/‖W‖₂) (Miyato et al. 2018; Liu et al. 2020).

    ‖W‖₂ by num_steps power iterations from a fixed start at each evaluation: nothing is carried along, and what is too little in the norm is too little in the
    bound. Filters count as matrices with one row an input of the window. Maps are found in the network's equations, whoever wrote it; weights that meet no linear
    map are left as they are. Together with skip connections this bounds distances between features from both sides.

    >>> from aleator.networks import MLP
    >>> net = SpectralNorm(MLP(2, (4,), 1), bound=0.5)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((3, 2))).shape
    (3, 1)
    """

    network: Any
    bound: float = 0.95
    num_steps: int = 15

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", as_network(self.network))
        if not self.bound > 0 or self.num_steps < 1:
            got = f"bound={self.bound}, num_steps={self.num_steps}"
            raise ModelError(message("SpectralNorm cannot use this.", got, "bound > 0, num_steps ≥ 1", "pass e.g. 0.95, 15"))

    @property
    def params(self) -> Tree:
        return getattr(self.network, "params", None)

    def init(self, key: Key) -> Tree:
        return self.network.init(key)

    def rebuild(self, params: Tree) -> Any:
        """The network with its own weights, which are not normalised."""
        return self.network.rebuild(params)

    def apply(self, params: Tree, x: Tree, key: Key | None = None) -> Tree:
        def handler(_: Any, site: sites.Site, inputs: Array, weights: sites.Operands, compute: Any) -> tuple[Array, None]:
            weight, bias = weights.weight[0], None if weights.bias is None else weights.bias[0]
            if site.kind == "embedding":
                return compute(inputs, weight, bias), None
            norm = spectral_norm(weight, site.weight_out_axes, self.num_steps)
            return compute(inputs, weight * jnp.minimum(1.0, self.bound / jnp.maximum(norm, 1e-12)), bias), None

        return sites.replay(None, self.network.apply, params, x, handler, network_key=key)[0]


def spectral_norm(weight: Array, out_axes: tuple[int, ...], num_steps: int) -> Array:
    """‖W‖₂ of a weight seen as a matrix from all other axes to `out_axes`; its derivative is uvᵀ, that of the norm itself."""
    outputs = int(np.prod([weight.shape[axis] for axis in out_axes]))
    matrix = jnp.moveaxis(weight, out_axes, tuple(range(-len(out_axes), 0))).reshape(-1, outputs) if out_axes else weight.reshape(-1, 1)
    fixed = jax.lax.stop_gradient(matrix)
    unit = lambda v: v / jnp.maximum(jnp.linalg.norm(v), 1e-12)
    start = unit(jnp.asarray(np.random.default_rng(0).standard_normal(fixed.shape[1]), fixed.dtype))
    right = jax.lax.fori_loop(0, num_steps, lambda i, v: unit(fixed.T @ (fixed @ v)), start)
    left = unit(fixed @ right)
    return left @ matrix @ right
