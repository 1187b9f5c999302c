"""Posteriors over weights from Gaussian noise: a Gaussian, or a flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Array, Key, Tree
from aleator.posterior._posterior import Score
from aleator.posterior._sampled import Sampled, sampled


@sampled(("mean", "operator"), ("chosen",))
@dataclasses.dataclass(frozen=True, eq=False)
class Gaussian(Sampled):
    """θ ~ N(mean, Σ) over the flattened leaves with chosen[i] = True; the others stay at their mean.

    mean: the full parameter tree. operator: Σ as in `aleator.linalg` (num_noise, sqrt_matvec, diagonal, logdet). chosen: one flag a leaf.
    """

    mean: Tree
    operator: Any
    chosen: tuple[bool, ...]
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        dtype = jax.tree.leaves(self.mean)[self.chosen.index(True)].dtype
        spread = self.operator.sqrt_matvec(jax.random.normal(key, (self.operator.num_noise,), dtype))
        return _on_chosen(self.mean, self.chosen, spread, jnp.add)

    def variance(self) -> Tree:
        """Marginal variances, a tree like the mean; 0 for leaves that are not random."""
        nothing = jax.tree.map(jnp.zeros_like, self.mean)
        return _on_chosen(nothing, self.chosen, self.operator.diagonal(), lambda leaf, part: part)


@sampled(("mean", "values"), ("family", "chosen"))
@dataclasses.dataclass(frozen=True, eq=False)
class Transformed(Sampled):
    """θ = g(φ, z), z ~ N(0, I), over the flattened leaves with chosen[i] = True, g a family of `aleator.families` (a flow); the others
    stay at their mean. values: φ."""

    mean: Tree
    values: Tree
    family: Any
    chosen: tuple[bool, ...]
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        (flat,) = self.family.sample(key, jax.tree.map(jnp.asarray, self.values))
        return _on_chosen(self.mean, self.chosen, flat, lambda leaf, part: part)


def _on_chosen(tree: Tree, chosen: tuple[bool, ...], flat: Array, join: Callable[[Array, Array], Array]) -> Tree:
    """join(leaf, its share of the vector `flat`) for the chosen leaves in order, the others as they are."""
    leaves, structure = jax.tree.flatten(tree)
    sizes = [leaf.size for leaf, take in zip(leaves, chosen, strict=True) if take]
    parts = iter(jnp.split(flat, np.cumsum(sizes)[:-1]))
    joined = [join(leaf, next(parts).reshape(leaf.shape)) if take else leaf for leaf, take in zip(leaves, chosen, strict=True)]
    return jax.tree.unflatten(structure, joined)
