"""Conjugate exponential families, written once.

A family has natural statistics t(θ) and a table of pseudo-counts η of the same structure, so that

    p(θ | η) = exp(⟨η, t(θ)⟩ − A(η)),      p(y | θ) = h(y) exp⟨T(y), t(θ)⟩,      p(θ | η, y) = p(θ | η + T(y)).

A(η) = log ∫ exp⟨η, t(θ)⟩ dθ is all that inference needs: expectations E[t] = ∇A, the divergence between two members, evidences
log p(y) = A(η + T(y)) − A(η) + log h(y), and the mode argmax ⟨η, t(θ)⟩ are the same few lines for every family here. Densities are with
respect to the coordinates each family names; its parameters are unconstrained, with the log Jacobian to those coordinates beside them.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from aleator import _tree
from aleator._typing import Array, Key, Tree


class Family(abc.ABC):
    """p(θ | η) for stacked members: every leaf of η, t and the parameters has the members on its first axis (unless they share it)."""

    @abc.abstractmethod
    def prior(self, num: int) -> Tree:
        """Pseudo-counts η₀ of `num` members."""

    @abc.abstractmethod
    def log_partition(self, counts: Tree) -> Array:
        """A(η), a scalar: summed over members."""

    @abc.abstractmethod
    def natural(self, params: Tree) -> Tree:
        """t(θ) at unconstrained parameters; the structure of η."""

    @abc.abstractmethod
    def log_jacobian(self, params: Tree) -> Array:
        """log |dθ / d params|, a scalar."""

    @abc.abstractmethod
    def mode(self, counts: Tree) -> Tree:
        """argmax ⟨η, t(θ)⟩, as unconstrained parameters."""

    @abc.abstractmethod
    def draw(self, key: Key, counts: Tree) -> Tree:
        """θ ~ p(θ | η), as unconstrained parameters."""

    def expected(self, counts: Tree) -> Tree:
        """E[t(θ)] under η: the gradient of A."""
        return jax.grad(self.log_partition)(counts)

    def log_density(self, params: Tree, counts: Tree) -> Array:
        """log p(θ | η) in the family's own coordinates."""
        return inner(counts, self.natural(params)) - self.log_partition(counts)

    def log_prior(self, params: Tree, counts: Tree) -> Array:
        """log p(params | η): with the Jacobian, a density over the unconstrained parameters."""
        return self.log_density(params, counts) + self.log_jacobian(params)

    def divergence(self, counts: Tree, other: Tree) -> Array:
        """KL(p(θ | η) ‖ p(θ | η′)) = ⟨η − η′, E[t]⟩ − A(η) + A(η′), in nats."""
        gap = jax.tree.map(jnp.subtract, counts, other)
        return inner(gap, self.expected(counts)) - self.log_partition(counts) + self.log_partition(other)


def inner(left: Tree, right: Tree) -> Array:
    """⟨a, b⟩: products summed over all leaves."""
    return _tree.sum_leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), left, right))


def log_beta(a: Array, b: Array) -> Array:
    """log B(a, b). JAX's own betaln is off by 1e-6 in double precision (0.10)."""
    return gammaln(a) + gammaln(b) - gammaln(a + b)


def add(left: Tree, right: Tree) -> Tree:
    """Pseudo-counts and counts together."""
    return jax.tree.map(jnp.add, left, right)


def real_weights(batch: Any) -> Array:
    """The weight of each row, 0 for padding; (n,)."""
    rows = _tree.rows(batch.y)
    weight = jnp.ones(rows) if batch.weight is None else batch.weight
    return jnp.where(batch.index >= 0, weight, 0.0) if batch.padded else weight
