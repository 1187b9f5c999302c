"""Covariance operators over a flat vector of size D: what a Gaussian posterior must know of its Σ.

Each has num_noise, sqrt_matvec(z) with z (num_noise,) ~ N(0, I) ↦ (D,) ~ N(0, Σ), diagonal() the marginal variances (D,), and logdet() =
log |Σ|. They are pytrees, work inside compiled code, and keep the dtype of their arrays.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Diagonal:
    """Σ = diag(scale²); scale (D,) > 0."""

    scale: Array

    @property
    def num_noise(self) -> int:
        return self.scale.shape[0]

    def sqrt_matvec(self, z: Array) -> Array:
        return self.scale * z

    def diagonal(self) -> Array:
        return self.scale**2

    def logdet(self) -> Array:
        return 2.0 * jnp.sum(jnp.log(self.scale))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LowerTriangular:
    """Σ = L Lᵀ; factor L (D, D), lower triangular with a positive diagonal."""

    factor: Array

    @property
    def num_noise(self) -> int:
        return self.factor.shape[0]

    def sqrt_matvec(self, z: Array) -> Array:
        return jnp.asarray(self.factor) @ z

    def diagonal(self) -> Array:
        return jnp.sum(jnp.asarray(self.factor) ** 2, axis=1)

    def logdet(self) -> Array:
        return 2.0 * jnp.sum(jnp.log(jnp.diagonal(self.factor)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """Σ = diag(scale²) + F Fᵀ; scale (D,) > 0, factor F (D, r): memory linear in D."""

    scale: Array
    factor: Array

    @property
    def num_noise(self) -> int:
        return self.factor.shape[0] + self.factor.shape[1]

    def sqrt_matvec(self, z: Array) -> Array:
        size = self.scale.shape[0]
        return self.scale * z[:size] + jnp.asarray(self.factor) @ z[size:]

    def diagonal(self) -> Array:
        return self.scale**2 + jnp.sum(jnp.asarray(self.factor) ** 2, axis=1)

    def logdet(self) -> Array:
        """log |diag(s²)| + log |I + Fᵀ diag(s⁻²) F|, the matrix determinant lemma."""
        whitened = self.factor / self.scale[:, None]
        small = jnp.eye(whitened.shape[1], dtype=whitened.dtype) + whitened.T @ whitened
        return 2.0 * (jnp.sum(jnp.log(self.scale)) + jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(small)))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KroneckerBlocks:
    """One block a leaf: for matrices Σ = (A Aᵀ) ⊗ (B Bᵀ) over the rows of W (a, b), so that A Z Bᵀ is a draw; diag(s²) for vectors.

    rows, columns: for a matrix block its lower triangular A (a, a) and B (b, b); for a vector its scales s (d,) in rows and None in
    columns.
    """

    rows: tuple[Array, ...]
    columns: tuple[Array | None, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(np.prod(_block_shape(a, b))) for a, b in zip(self.rows, self.columns, strict=True))

    @property
    def num_noise(self) -> int:
        return sum(self.sizes)

    def sqrt_matvec(self, z: Array) -> Array:
        parts = jnp.split(z, np.cumsum(self.sizes)[:-1])
        return jnp.concatenate([self._spread(a, b, part) for a, b, part in zip(self.rows, self.columns, parts, strict=True)])

    def diagonal(self) -> Array:
        square = lambda factor: jnp.sum(jnp.asarray(factor) ** 2, axis=1)
        blocks = [a**2 if b is None else jnp.outer(square(a), square(b)).reshape(-1) for a, b in zip(self.rows, self.columns, strict=True)]
        return jnp.concatenate(blocks)

    def logdet(self) -> Array:
        total = lambda values: 2.0 * jnp.sum(jnp.log(values))
        blocks = [
            total(a) if b is None else b.shape[0] * total(jnp.diagonal(a)) + a.shape[0] * total(jnp.diagonal(b))
            for a, b in zip(self.rows, self.columns, strict=True)
        ]
        return sum(blocks[1:], start=blocks[0])

    @staticmethod
    def _spread(a: Array, b: Array | None, z: Array) -> Array:
        if b is None:
            return a * z
        return (jnp.asarray(a) @ z.reshape(a.shape[0], b.shape[0]) @ jnp.asarray(b).T).reshape(-1)


def _block_shape(a: Array, b: Array | None) -> tuple[int, ...]:
    return a.shape if b is None else (a.shape[0], b.shape[0])
