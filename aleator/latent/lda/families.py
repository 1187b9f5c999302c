"""Conjugate families of the topics and of their proportions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import Family
from aleator.latent.lda._special import digamma, expected_log, gammaln
from aleator.latent.weights import Dirichlet


@dataclasses.dataclass(frozen=True)
class Topics(Dirichlet):
    """K rows β_k ~ Dirichlet(concentration) over V words, as `Dirichlet`, with ψ and log Γ that vectorise: the tables are large."""

    def log_partition(self, counts: Array) -> Array:
        alpha = counts + 1.0
        return jnp.sum(jnp.sum(gammaln(alpha), axis=-1) - gammaln(jnp.sum(alpha, axis=-1)))

    def expected(self, counts: Array) -> Array:
        return expected_log(counts + 1.0)


@dataclasses.dataclass(frozen=True)
class Proportions(Family):
    """One Dirichlet's parameters α (K,), known only as a point: t(α) = (α, log Γ(Σα) − Σ log Γ(α)), counts "log" Σ_d log θ_d and "number".

    exp⟨η, t(α)⟩ is the Dirichlet's conjugate prior. It has no closed integral, so that densities here are up to a constant; its mode is
    found by Newton's method (Minka, 2000), whose Hessian is diagonal plus rank one.
    """

    alpha: tuple[float, ...]
    strength: float = 1.0  # pseudo-documents of the prior, as drawn from `alpha` on average

    def prior(self, num: int) -> Tree:
        alpha = jnp.asarray(self.alpha)
        return {"log": self.strength * expected_log(alpha), "number": jnp.asarray(float(self.strength))}

    def log_partition(self, counts: Tree) -> Array:
        return jnp.zeros(())

    def natural(self, params: Array) -> Tree:
        alpha = jnp.exp(params)
        return {"log": alpha, "number": gammaln(jnp.sum(alpha)) - jnp.sum(gammaln(alpha))}

    def log_jacobian(self, params: Array) -> Array:
        return jnp.sum(params)

    def expected(self, counts: Tree) -> Tree:
        return self.natural(self.mode(counts))

    def divergence(self, counts: Tree, other: Tree) -> Array:
        """−log p(α) up to a constant, at the mode: what a point costs."""
        natural = self.expected(counts)
        return -(jnp.sum(other["log"] * natural["log"]) + other["number"] * natural["number"])

    def mode(self, counts: Tree) -> Array:
        mean_log = counts["log"] / counts["number"]
        trigamma = jax.vmap(jax.grad(digamma))

        def one(_: int, logs: Array) -> Array:
            # Newton in α, taken in log α so that it stays positive: α_new = α exp(step/α), steps bounded.
            alpha = jnp.exp(logs)
            total = jnp.sum(alpha)
            slope = digamma(total) - digamma(alpha) + mean_log
            curve, shared = -trigamma(alpha), jax.grad(digamma)(total)
            offset = jnp.sum(slope / curve) / (1.0 / shared + jnp.sum(1.0 / curve))
            return logs + jnp.clip(-(slope - offset) / curve / alpha, -1.0, 1.0)

        return jax.lax.fori_loop(0, 50, one, jnp.log(jnp.asarray(self.alpha)))

    def draw(self, key: Key, counts: Tree) -> Array:
        return self.mode(counts)
