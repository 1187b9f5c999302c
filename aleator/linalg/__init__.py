"""Linear operators and the one safe factorisation."""

from aleator.linalg.dense import DensePrecision, cholesky
from aleator.linalg.operators import Diagonal, KroneckerBlocks, LowerTriangular, LowRank

__all__ = ["DensePrecision", "Diagonal", "KroneckerBlocks", "LowRank", "LowerTriangular", "cholesky"]
