"""Dense symmetric positive definite operators, in float64, through one safe factorisation."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np

from aleator._errors import HealthWarning, ModelError, message
from aleator._typing import Array

MAX_JITTER = 1e-6  # relative to the mean diagonal; beyond this the matrix is not the one that was asked about


def cholesky(matrix: Array, name: str = "matrix") -> tuple[np.ndarray, float]:
    """Lower factor C with C Cᵀ = matrix + jitter·I, and the jitter used (0 almost always). Batched over leading axes, float64.

    The jitter starts at 1e-14 of the mean diagonal, grows tenfold up to 1e-6 of it, and is reported; past that the matrix is refused
    by name rather than silently changed.
    """
    matrix = np.asarray(matrix, np.float64)
    if not np.all(np.isfinite(matrix)):
        raise ModelError(
            message(f"The {name} is not finite.", "NaN or infinite entries", "finite numbers", "check the scale of the inputs")
        )
    size = matrix.shape[-1]
    level = np.mean(np.diagonal(matrix, axis1=-2, axis2=-1))
    for relative in (0.0, *10.0 ** np.arange(-14, np.log10(MAX_JITTER) + 0.5)):
        jitter = float(relative * level)
        try:
            factor = np.linalg.cholesky(matrix + jitter * np.eye(size))
        except np.linalg.LinAlgError:
            continue
        if jitter > 0:
            warnings.warn(f"The {name} was nearly singular: {jitter:.1e} was added to its diagonal.", HealthWarning, stacklevel=2)
        return factor, jitter
    smallest = float(np.min(np.linalg.eigvalsh(matrix)))
    raise ModelError(
        message(
            f"The {name} is not positive definite.",
            f"smallest eigenvalue {smallest:.3g}",
            "all positive",
            "remove duplicated or constant features, or give the weights a proper prior",
        )
    )


@dataclasses.dataclass(frozen=True, eq=False)
class DensePrecision:
    """A batch of Gaussians' covariances Σ = (C Cᵀ)⁻¹, held as the Cholesky factor C of the precision: (…, p, p) lower triangular."""

    factor: np.ndarray

    @property
    def size(self) -> int:
        return self.factor.shape[-1]

    def covariance(self) -> np.ndarray:
        """Σ, (…, p, p)."""
        inverse = self._solve(np.broadcast_to(np.eye(self.size), self.factor.shape))
        return np.swapaxes(inverse, -1, -2) @ inverse

    def sqrt_matvec(self, z: Array) -> np.ndarray:
        """C⁻ᵀ z: standard normals → draws with covariance Σ; z (draws, …, p), with the batch axes of the factor between."""
        z = np.asarray(z, np.float64)
        columns = np.moveaxis(z.reshape(len(z), -1, self.size), 0, -1)
        return np.moveaxis(self._solve(columns, transposed=True), -1, 0).reshape(z.shape)

    def quadratic(self, phi: Array) -> np.ndarray:
        """φᵀΣφ for each row of phi (n, p) and each Gaussian of the batch: (n, …)."""
        phi = np.asarray(phi, np.float64)
        return np.sum(self._solve(np.broadcast_to(phi.T, (*self.factor.shape[:-2], *phi.T.shape))) ** 2, axis=-2).T

    def logdet(self) -> np.ndarray:
        """log |Σ|, per Gaussian."""
        return -2.0 * np.sum(np.log(np.diagonal(self.factor, axis1=-2, axis2=-1)), axis=-1)

    def _solve(self, right: np.ndarray, transposed: bool = False) -> np.ndarray:
        """C⁻¹ right, or C⁻ᵀ right; right (…, p, m) with the batch axes of the factor in front."""
        from scipy.linalg import solve_triangular

        factors, rights = self.factor.reshape(-1, self.size, self.size), right.reshape(-1, *right.shape[-2:])
        solved = [solve_triangular(c, r, lower=True, trans=1 if transposed else 0) for c, r in zip(factors, rights, strict=True)]
        return np.stack(solved).reshape(right.shape)
