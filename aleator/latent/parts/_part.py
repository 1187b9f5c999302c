"""What every part is, and the checks and moments of its observations."""

from __future__ import annotations

import abc
import math

import numpy as np

from aleator._errors import DataError, message
from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import Family

LOG_2PI = math.log(2.0 * math.pi)


class Part(Family):
    """A family with observations: T(y), log h(y) and simulation beside the conjugate algebra. missing: whether entries may be NaN."""

    missing = False
    dim: int | None

    @abc.abstractmethod
    def bind(self, y: np.ndarray) -> Part:
        """The part for these columns: checks the values, fills in what the prior leaves to the data."""

    @abc.abstractmethod
    def log_terms(self, natural: Tree, y: Array) -> Array:
        """log h(y) + ⟨T(y), t⟩ for every row and member, (n, K). With t = t(θ): log p(y | θ)."""

    @abc.abstractmethod
    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        """Σₙ shares[n, k]·T(yₙ): in the structure of η. natural: of the same step, for families with a latent scale a row."""

    @abc.abstractmethod
    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        """y (n, d) from the members `labels` (n,)."""

    @abc.abstractmethod
    def constrain(self, params: Tree) -> dict[str, Array]:
        """The parameters by name, in y's units."""


def check_finite(y: np.ndarray, missing: bool) -> None:
    """Refuse infinite values, and NaN where entries may not be missing."""
    bad = np.isinf(y) if missing else ~np.isfinite(y)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        do = "drop or correct these rows" if missing else "drop these rows, or use covariance='diagonal', which passes over missing entries"
        raise DataError(message("y holds values that cannot be used.", f"{y[where]} at index {where}", "finite numbers", do))


def check_values(y: np.ndarray, good: np.ndarray, expected: str, do: str) -> None:
    """Refuse values outside a part's support; NaN passes."""
    bad = ~good & np.isfinite(y)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(message("y holds values the parts cannot emit.", f"{y[where]:g} at index {where}", expected, do))


def check_binary(y: np.ndarray) -> None:
    check_values(y, (y == 0) | (y == 1), "zeros and ones", "code the two outcomes as 0 and 1")


def check_counts(y: np.ndarray) -> None:
    check_values(y, (y >= 0) & (y == np.floor(y)), "whole numbers ≥ 0", "pass counts, not rates")


def check_labels(y: np.ndarray, num_classes: int | None) -> None:
    """num_classes None: not known yet."""
    limit = math.inf if num_classes is None else num_classes
    expected = "whole numbers ≥ 0" + ("" if num_classes is None else f" and < {num_classes}")
    check_values(y, (y >= 0) & (y == np.floor(y)) & (y < limit), expected, "code labels as 0, 1, …")


def emitted(part: Part, y: np.ndarray) -> np.ndarray:
    """Rows that a part bound to other ones is asked about: refused where it cannot have emitted them, for it would count them for others."""
    check_width(y, part.dim)
    part.bind(y)
    return y


def check_width(y: np.ndarray, dim: int | None) -> None:
    """Refuse rows of other columns than the fit's, which would broadcast."""
    if dim is not None and y.shape[1] != dim:
        raise DataError(message("The columns do not fit the model.", f"{y.shape[1]} columns", f"{dim}", "pass the columns of the fit"))


def moments(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of what is there of each column; 0 where there is nothing."""
    seen = np.isfinite(y)
    number, filled = np.maximum(seen.sum(axis=0), 1), np.where(seen, y, 0.0)
    mean = filled.sum(axis=0) / number
    return mean, np.sqrt((np.where(seen, filled - mean, 0.0) ** 2).sum(axis=0) / number)


def spread_out(scale: np.ndarray) -> np.ndarray:
    """Standard deviations to divide by: those of constant columns, or of one row, are a millionth of the largest, or 1."""
    largest = scale.max()
    return np.maximum(scale, 1e-6 * largest if largest > 0 else 1.0)
