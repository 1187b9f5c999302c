"""The conjugate family of a factor model: one linear regression a column."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln

from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import Family
from aleator.latent.parts import LOG_2PI


@dataclasses.dataclass(frozen=True)
class Columns(Family):
    """d linear models of one column each, in p inputs u = (z, 1): y_j ~ N(w_jᵀu, 1/τ_j), in the coordinates (w, τ). w_j | τ_j is normal
    with precision τ_j·diag(precision), τ_j ~ Gamma. t = (τw, −½τwwᵀ, −½τ, ½log τ) with counts "cross" Σuy, "square" Σuuᵀ, "energy" Σy²,
    "number". shared: one τ for all columns. known: τ = 1, and counts "cross", "square" alone.
    """

    precision: tuple[float, ...]
    energy: tuple[float, ...] = ()
    shared: bool = False
    known: bool = False

    def prior(self, num: int) -> Tree:
        p = len(self.precision)
        counts = {"cross": jnp.zeros((num, p)), "square": jnp.broadcast_to(jnp.diag(jnp.asarray(self.precision)), (num, p, p))}
        if self.known:
            return counts
        energy = jnp.asarray(self.energy)
        # df = p − 1 leaves τ ~ Gamma(½, ½ energy): a prior worth one row.
        number = jnp.full(num, p - 1.0)
        return counts | (
            {"energy": jnp.mean(energy), "number": num * p - 1.0 + jnp.zeros(())} if self.shared else {"energy": energy, "number": number}
        )

    def log_partition(self, counts: Tree) -> Array:
        p = counts["cross"].shape[1]
        root = jnp.linalg.cholesky(counts["square"])
        half = solve_triangular(root, counts["cross"][..., None], lower=True)[..., 0]
        flat = 0.5 * p * LOG_2PI - jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)
        if self.known:
            return jnp.sum(flat) + 0.5 * jnp.sum(half**2)
        shape, rate = self._gamma(counts, jnp.sum(half**2, axis=-1))
        return jnp.sum(flat) + jnp.sum(gammaln(shape) - shape * jnp.log(rate))

    def _gamma(self, counts: Tree, fitted: Array) -> tuple[Array, Array]:
        """Shape and rate of q(τ); fitted: crossᵀ square⁻¹ cross of each column."""
        d, p = counts["cross"].shape
        if self.shared:
            return 0.5 * (counts["number"] - d * p) + 1.0, 0.5 * (counts["energy"] - jnp.sum(fitted))
        return 0.5 * (counts["number"] - p) + 1.0, 0.5 * (counts["energy"] - fitted)

    def natural(self, params: Tree) -> Tree:
        w = params["weights"]
        if self.known:
            return {"cross": w, "square": -0.5 * w[:, :, None] * w[:, None, :]}
        tau = jnp.exp(params["log_precision"])
        each = jnp.broadcast_to(tau, (len(w),))
        cross = each[:, None] * w
        return {
            "cross": cross,
            "square": -0.5 * cross[:, :, None] * w[:, None, :],
            "energy": -0.5 * tau,
            "number": 0.5 * params["log_precision"],
        }

    def log_jacobian(self, params: Tree) -> Array:
        return jnp.zeros(()) if self.known else jnp.sum(params["log_precision"])

    def mode(self, counts: Tree) -> Tree:
        w = jnp.linalg.solve(counts["square"], counts["cross"][..., None])[..., 0]
        if self.known:
            return {"weights": w}
        fitted = jnp.sum(w * counts["cross"], axis=-1)
        residual = counts["energy"] - (jnp.sum(fitted) if self.shared else fitted)
        return {"weights": w, "log_precision": jnp.log(counts["number"]) - jnp.log(residual)}

    def draw(self, key: Key, counts: Tree) -> Tree:
        key_precision, key_weights = jax.random.split(key)
        root = jnp.linalg.cholesky(counts["square"])
        half = solve_triangular(root, counts["cross"][..., None], lower=True)
        noise = jax.random.normal(key_weights, half.shape)
        if self.known:
            return {"weights": solve_triangular(root, half + noise, lower=True, trans=1)[..., 0]}
        shape, rate = self._gamma(counts, jnp.sum(half[..., 0] ** 2, axis=-1))
        log_precision = jax.random.loggamma(key_precision, shape) - jnp.log(rate)
        scale = jnp.broadcast_to(jnp.exp(-0.5 * log_precision), (len(half),))[:, None, None]
        return {"weights": solve_triangular(root, half + scale * noise, lower=True, trans=1)[..., 0], "log_precision": log_precision}
