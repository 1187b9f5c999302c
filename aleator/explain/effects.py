"""How E[y | x] changes with each input: average derivatives and partial dependence, with bands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _functions
from aleator._cache import cached
from aleator._errors import DataError, message
from aleator._fit import Fit
from aleator._random import as_key
from aleator._typing import Array, KeyLike
from aleator.explain._shared import LEVEL, NUM_SAMPLES, named, stderr, table, tails


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """The effect of each of D inputs, in units of y (per unit of the input, as the model sees it). S posterior draws; k targets (classes).

    slopes (S, D, k): average over rows of ∂E[y | x]/∂x_j. sizes (S, D, k): root mean square of the same, which does not cancel where an
    effect changes sign. grids (D, G) and curves (S, D, G, k): partial dependence, the mean of E[y | x] over rows with x_j set to the grid's
    value. Print it for the table.
    """

    names: tuple[str, ...]
    slopes: np.ndarray
    sizes: np.ndarray
    grids: np.ndarray
    curves: np.ndarray
    num_chains: int = 1

    def interval(self, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
        """Central intervals of the average derivatives: lower, upper (D, k)."""
        lower, upper = np.quantile(self.slopes, tails(level), axis=0)
        return lower, upper

    def band(self, name: str | int, level: float = LEVEL, target: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Partial dependence on one input: grid, mean, lower and upper, each (G,)."""
        j = self.names.index(name) if isinstance(name, str) else int(name)
        curves = self.curves[:, j, :, target]
        lower, upper = np.quantile(curves, tails(level), axis=0)
        return self.grids[j], curves.mean(axis=0), lower, upper

    @property
    def stderr(self) -> np.ndarray:
        """Monte Carlo standard errors of the mean slopes, (D, k)."""
        return stderr(self.slopes, self.num_chains)

    @property
    def positive(self) -> np.ndarray:
        """P(average derivative > 0 | D), (D, k)."""
        return np.mean(self.slopes > 0, axis=0)

    def __str__(self) -> str:
        return self.table()

    def table(self, level: float = LEVEL) -> str:
        """One line for each input and target."""
        (lower, upper), mean, sizes = self.interval(level), self.slopes.mean(0), self.sizes.mean(0)
        k = mean.shape[1]
        head = ("input", "average derivative", f"{100 * level:g} % interval", "P(> 0)", "r.m.s. derivative")
        rows = [
            (
                self.names[j] + (f" → y{c}" if k > 1 else ""),
                f"{mean[j, c]:.3g} ± {self.stderr[j, c]:.1g}",
                f"{lower[j, c]:.3g} … {upper[j, c]:.3g}",
                f"{self.positive[j, c]:.3f}",
                f"{sizes[j, c]:.3g} ± {self.sizes[:, j, c].std():.1g}",
            )
            for j in range(len(self.names))
            for c in range(k)
        ]
        return table(head, rows)


def inputs(
    key: KeyLike, fit: Fit, x: Any, names: Sequence[str] | None = None, num_samples: int = NUM_SAMPLES, num_points: int = 21
) -> Inputs:
    """Posterior of average derivatives and partial dependence of each input, over the rows of x (n, D).

    Derivatives are those of E[y | x]: for class labels of the probabilities. A point estimate has no spread, and its bands are lines.
    Partial dependence averages over the rows as they are: where inputs go together it looks at combinations that do not occur.
    """
    key, x = as_key(key), _matrix(fit, x)
    names = named(names, x.shape[-1] if x.ndim == 2 else 1)
    flat = x.ndim == 1
    x = np.asarray(x, np.float32 if x.dtype.itemsize < 8 else np.float64).reshape(len(x), -1)
    grids = np.linspace(x.min(0), x.max(0), num_points, axis=1)
    functions = _functions.draw(key, fit, num_samples, ordered=True)
    slopes, sizes, curves = _effects(fit.model, functions.drawn, flat)(functions.given, jnp.asarray(x), jnp.asarray(grids))
    loc, scale = _units(fit)
    as64 = lambda values: np.asarray(values, np.float64)
    return Inputs(names, as64(slopes) * scale, as64(sizes) * scale, grids, loc + scale * as64(curves), functions.num_chains)


@cached
def _effects(model: Any, drawn: bool, flat: bool) -> Callable:
    """(given, x (n, D), grids (D, G)) → slopes (S, D, k), sizes (S, D, k), curves (S, D, G, k), one draw at a time."""
    outputs = _functions.evaluator(model, drawn)

    def mean(given: Any, x: Array) -> Array:
        return model.likelihood.mean(*outputs(given, x[:, 0] if flat else x))

    def one(given: Any, x: Array, grids: Array) -> tuple[Array, Array, Array]:
        row = lambda values: mean(given, values[None])[0]
        slopes = jax.vmap(jax.jacrev(row))(x)  # (n, k, D)
        at = lambda j, value: jnp.mean(mean(given, jnp.asarray(x).at[:, j].set(value)), axis=0)
        curves = jax.lax.map(lambda item: jax.vmap(lambda value: at(item[0], value))(item[1]), (jnp.arange(x.shape[1]), grids))
        return jnp.mean(slopes, axis=0).T, jnp.sqrt(jnp.mean(slopes**2, axis=0)).T, curves

    def every(given: Any, x: Array, grids: Array) -> tuple[Array, Array, Array]:
        if drawn:
            return jax.lax.map(lambda g: one(g, x, grids), given)
        posterior, keys = given
        return jax.lax.map(lambda k: one((posterior, k), x, grids), keys)

    return jax.jit(every)


def _matrix(fit: Fit, x: Any) -> np.ndarray:
    x = fit._inputs(x)
    if not hasattr(x, "ndim") or x.ndim > 2:
        raise DataError(
            message("Inputs are columns of a table.", f"{getattr(x, 'shape', type(x).__name__)}", "x of shape (n, D)", "pass a table")
        )
    return np.asarray(x)


def _units(fit: Fit) -> tuple[Any, Any]:
    """y = loc + scale·z of a fit made from a table of numbers."""
    scaler = fit.preprocessor
    return (scaler.y_loc, scaler.y_scale) if scaler is not None and scaler.task == "regression" else (0.0, 1.0)
