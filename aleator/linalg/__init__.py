"""Linear operators and the one safe factorisation."""

from aleator.linalg.dense import DensePrecision, cholesky

__all__ = ["DensePrecision", "cholesky"]
