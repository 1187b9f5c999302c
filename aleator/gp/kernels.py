"""Covariance functions k(x, x′) with hyper-parameters, composed by + and *.

A kernel is a frozen, hashable description; its hyper-parameters are a tree on the real line: {"log_length": (D,), "log_scale": ()} and the like. A
field that is a number is fixed; one that is a hyperprior is learned under it. `kernel(params, x1, x2)` → (n, m), `kernel.diag(params, x)` → (n,).
In a sum each term keeps its own `scale`; in a product only the first factor's, the others' would say the same thing twice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Tree
from aleator.gp._kernel import Bias, Kernel, Number, Product, Sum, Table, rows_of
from aleator.gp._structured import Categorical, Changepoint, Custom, Deep
from aleator.gp._tables import (
    RBF,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    SpectralMixture,
    Stationary,
    squares,
)

__all__ = [
    "Bias",
    "Categorical",
    "Changepoint",
    "Custom",
    "Deep",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Number",
    "Periodic",
    "Product",
    "RBF",
    "RationalQuadratic",
    "SpectralMixture",
    "Stationary",
    "Sum",
    "Table",
    "matrix",
    "squares",
]


def matrix(kernel: Kernel, params: Tree, x1: Any, x2: Any = None, dtype: Any = np.float64, block: int = 2048) -> np.ndarray:
    """k(x1, x2) on the host, (n, m), computed block by block in `dtype` and put together there: for kernels whose intermediates would not fit at once.
    With x2=None only the blocks on and below the diagonal are computed."""
    same = x2 is None
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        cast = lambda x: jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), x)
        x1, params = cast(x1), cast(params)
        x2, kernel = x1 if same else cast(x2), kernel.bind(x1)
        compute = jax.jit(lambda params, a, b: kernel(params, a, b))
        out = np.empty((rows_of(x1), rows_of(x2)), dtype)
        take = lambda x, first: jax.tree.map(lambda leaf: leaf[first : first + block], x)
        for i in range(0, len(out), block):
            for j in range(0, i + 1 if same else out.shape[1], block):
                piece = np.asarray(compute(params, take(x1, i), take(x2, j)))
                out[i : i + block, j : j + block] = piece
                if same and i != j:
                    out[j : j + block, i : i + block] = piece.T
    return out
