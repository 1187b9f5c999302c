"""Noise on weights or in passes as a posterior."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._typing import Array, Key, Tree
from aleator.noise import keep
from aleator.posterior._posterior import Score
from aleator.posterior._sampled import Sampled, sampled


@sampled(("params", "rates"), ("axes",))
@dataclasses.dataclass(frozen=True, eq=False)
class Masked(Sampled):
    """W = M·diag(z)/(1 − p), z ~ Bernoulli(1 − p): dropout as a posterior over weights (B8), one mask per draw for all inputs (B12).

    params: the weights M and everything else, at their point. axes: for each leaf the axes that number its input units, () where nothing
    is dropped. rates: p of each leaf with axes, in order.
    """

    params: Tree
    rates: Array
    axes: tuple[tuple[int, ...], ...]
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        leaves, structure = jax.tree.flatten(self.params)
        dropped = [i for i, axes in enumerate(self.axes) if axes]
        for number, (i, k) in enumerate(zip(dropped, jax.random.split(key, max(len(dropped), 1)), strict=False)):
            shape = tuple(size if axis in self.axes[i] else 1 for axis, size in enumerate(leaves[i].shape))
            rate = self.rates[number]
            leaves[i] = leaves[i] * (keep(k, rate, shape, leaves[i].dtype) / (1.0 - rate).astype(leaves[i].dtype))
        return jax.tree.unflatten(structure, leaves)


@sampled(("params",))
@dataclasses.dataclass(frozen=True, eq=False)
class Passes(Sampled):
    """Stochastic passes through a network with randomness of its own (its dropout layers): one seed per draw, shared by all inputs."""

    params: Tree
    log_evidence: Score | None = None

    def function(self, key: Key, model: Any, x: Tree) -> tuple[Tree, dict]:
        # Row by row under one key: the network draws the same noise for every row, whatever its own batch conventions.
        row = lambda one: jax.tree.map(lambda out: out[0], model.outputs(self.params, jax.tree.map(lambda leaf: leaf[None], one), key))
        return jax.vmap(row)(x), model.extra(self.params)

    def sample(self, key: Key, num_samples: int) -> Tree:
        """The weights, repeated: they are not random here, the passes are."""
        return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], num_samples, axis=0), self.params)


@sampled(("params", "log_alpha", "log_variance"), ("chosen",))
@dataclasses.dataclass(frozen=True, eq=False)
class GaussianDropout(Sampled):
    """w ~ N(θ, αθ²) on the leaves with chosen[i] = True, the others at their point (C3). log_alpha: log α of each chosen leaf, in order,
    broadcastable to it. log_variance: log σ² in the same way, where it is the parameter and α follows from it: w ~ N(θ, σ²), which also
    holds for α bounded or shared by a group."""

    params: Tree
    log_alpha: tuple[Array, ...]
    chosen: tuple[bool, ...]
    log_variance: tuple[Array, ...] | None = None
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        leaves, structure = jax.tree.flatten(self.params)
        places = [i for i, take in enumerate(self.chosen) if take]
        additive = self.log_variance is not None
        halves = [jnp.exp(0.5 * value) for value in (self.log_variance if self.log_variance is not None else self.log_alpha)]
        for i, half, k in zip(places, halves, jax.random.split(key, max(len(places), 1)), strict=False):
            noise = jax.random.normal(k, leaves[i].shape, leaves[i].dtype)
            leaves[i] = leaves[i] + (half if additive else half * leaves[i]) * noise
        return jax.tree.unflatten(structure, leaves)

    def sparsity(self, threshold: float = 3.0) -> dict[str, float]:
        """Share of each noisy leaf's weights with log α > threshold: those that are all noise and can go (C6)."""
        return {path: float(1.0 - mask.mean()) for path, mask in self.masks(threshold).items()}

    def compression(self, threshold: float = 3.0) -> float:
        """|W| / |W≠0| over the noisy leaves."""
        masks = self.masks(threshold).values()
        return sum(mask.size for mask in masks) / max(1, sum(int(mask.sum()) for mask in masks))

    def masks(self, threshold: float = 3.0) -> dict[str, np.ndarray]:
        """True where a weight stays (log α ≤ threshold), by path."""
        leaves, paths = jax.tree.leaves(self.params), _tree.paths(self.params)
        places = [i for i, take in enumerate(self.chosen) if take]
        return {
            paths[i]: np.broadcast_to(np.asarray(log_alpha) <= threshold, leaves[i].shape)
            for i, log_alpha in zip(places, self.log_alpha, strict=True)
        }
