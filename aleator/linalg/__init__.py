"""Linear operators and the one safe factorisation."""

from aleator.linalg.dense import DensePrecision, cholesky
from aleator.linalg.operators import Blocks, Complement, Diagonal, Embedded, KroneckerBlocks, KroneckerEigen, LowerTriangular, LowRank, Root

__all__ = [
    "Blocks",
    "Complement",
    "DensePrecision",
    "Diagonal",
    "Embedded",
    "KroneckerBlocks",
    "KroneckerEigen",
    "LowRank",
    "LowerTriangular",
    "Root",
    "cholesky",
]
