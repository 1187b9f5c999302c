"""Prior predictive simulation: what a model says before it has seen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._cache import cached
from aleator._errors import DataError, message
from aleator._fit import Fit
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import check_arrays
from aleator.evidence._problem import check_whole
from aleator.explain._shared import LEVEL, table, tails
from aleator.model import BNN, LinearModel
from aleator.posterior import at_once, row_bytes
from aleator.programs import ProgramModel


class Quantity(NamedTuple):
    """A number that each function (or data set) drawn has: its mean over draws with the Monte Carlo error, median, and central range."""

    mean: float
    stderr: float
    low: float
    median: float
    high: float
    unit: str


@dataclasses.dataclass(frozen=True, eq=False)
class Simulated:
    """S functions and data sets drawn from a prior at the rows of x. Print it for the table.

    functions (S, rows): E[y | x, θ]; (S, rows, k) for several targets, class probabilities (S, rows, K) for labels. y: as the data would
    be, (S, rows) or (S, rows, k). bounds: what the user thinks plausible. level: whose crossings are counted.
    """

    x: Tree
    functions: np.ndarray
    y: np.ndarray
    bounds: tuple[float, float] | None
    level: float
    support: str

    @property
    def ranges(self) -> np.ndarray:
        """max − min over x of each function, (S,); the mean over columns where there are several."""
        return self._columns(np.ptp(self._along(), axis=1))

    @property
    def slopes(self) -> np.ndarray:
        """Mean of |Δf|/‖Δx‖ over neighbouring rows, (S,): in order of x where it has one column, else in the order given."""
        _, steps = _path(self.x)
        return self._columns(np.mean(np.abs(np.diff(self._along(), axis=1)) / steps[:, None], axis=1))

    @property
    def crossings(self) -> np.ndarray:
        """How often each function crosses `level` on its way along x, (S,)."""
        above = self._along() > self.level
        return self._columns(np.sum(above[:, 1:] != above[:, :-1], axis=1))

    @property
    def outside(self) -> np.ndarray:
        """Share of rows at which each function is outside the bounds, (S,)."""
        return _outside(self.functions, self.bounds)

    @property
    def y_outside(self) -> np.ndarray:
        """Share of values of y outside the bounds in each data set, (S,)."""
        return _outside(self.y, self.bounds)

    def summary(self, level: float = LEVEL) -> dict[str, Quantity]:
        """Mean, Monte Carlo error, median and central range over draws of each quantity, with its unit."""
        values = {"range of a function over x": (self.ranges, "y"), "mean |slope|": (self.slopes, "y per x")}
        values["root mean square of a function"] = self._columns(np.sqrt(np.mean(self._along() ** 2, axis=1))), "y"
        values[f"crossings of {self.level:g}"] = self.crossings, "number"
        if self.bounds is not None:
            values["functions that leave the bounds"] = (self.outside > 0).astype(float), "share"
            if self.support != "label":
                values["y outside the bounds"] = self.y_outside, "share"
        return {name: _quantity(v, level, unit) for name, (v, unit) in values.items()}

    def __str__(self) -> str:
        percent = f"{100 * LEVEL:g} % of draws"
        rows = [
            (name, q.unit, f"{q.mean:.3g} ± {q.stderr:.1g}", "" if q.unit == "share" else f"{q.median:.3g}", _span(q))
            for name, q in self.summary().items()
        ]
        lines = [table(("quantity", "unit", "mean ± error", "median", percent), rows)]
        if self.bounds is not None:
            lines.append(f"bounds {self.bounds[0]:g} … {self.bounds[1]:g}")
        return "\n".join([*lines, f"{len(self.functions)} draws from the prior at {self.functions.shape[1]} rows of x"])

    def _along(self) -> np.ndarray:
        """(S, rows, k) in the order of the path."""
        order, _ = _path(self.x)
        return self.functions.reshape(*self.functions.shape[:2], -1)[:, order]

    def _columns(self, values: np.ndarray) -> np.ndarray:
        return values.mean(axis=-1)


def simulate(
    key: KeyLike, model: Any, x: Any, num_samples: int = 1000, bounds: tuple[float, float] | None = None, level: float | None = None
) -> Simulated:
    """Draw functions and data from the prior of a model at the rows of x: θ ~ p(θ), f = E[y | x, θ], y ~ p(y | x, θ).

    model: any; one that has met its data (a Fit's, or after model.bind(x, y)) is used as it is. bounds: (low, high) that functions and
    data would hardly leave; the share of those that do is reported. level: its crossings measure wiggliness (default 0, ½ for
    probabilities): for a stationary process of unit length scale, L/π of them over a length of L.

    >>> import aleator as al
    >>> net = al.BNN(al.networks.MLP(1, (20,), 1), al.Gaussian(0.1), al.Normal(1.0))
    >>> drawn = simulate(0, net, np.linspace(-1, 1, 15)[:, None], num_samples=50, bounds=(-2, 2))
    >>> drawn.functions.shape, drawn.y.shape
    ((50, 15), (50, 15))
    """
    check_whole(num_samples=num_samples)
    x = check_arrays(x, "x")
    model = prepared(model, x)
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise DataError(message("These are no bounds.", bounds, "(low, high) with low < high", "pass e.g. bounds=(-3, 3)"))
    rows = _tree.rows(x)
    block = at_once(rows * row_bytes(model, x), num_samples)
    functions, y = _draws(model)(as_key(key), jax.tree.map(jnp.asarray, x), num_samples, block)
    functions, y = np.asarray(functions, np.float64), np.asarray(y)
    support = model.likelihood.support
    if not np.all(np.isfinite(functions)):
        share = np.mean(~np.isfinite(functions).all(axis=tuple(range(1, functions.ndim))))
        raise DataError(
            message("Some functions of this prior are not finite.", f"{100 * share:.3g} % of draws", "finite numbers", "use smaller scales")
        )
    if support != "label" and functions.ndim == 3 and functions.shape[2] == 1:
        functions, y = functions[..., 0], y.reshape(functions.shape[:2])
    centre = (0.0 if support in ("real", "count") else 0.5) if level is None else float(level)
    limits = None if bounds is None else (float(bounds[0]), float(bounds[1]))
    return Simulated(x, functions, y, limits, centre, support)


def prepared(model: Any, x: Tree) -> Any:
    """The model with its shapes known: those of the data it met, else of x and as many target columns as it can tell."""
    model = model.model if isinstance(model, Fit) else model
    if isinstance(model, (BNN, LinearModel)):
        return model.bind(x, np.zeros((_tree.rows(x), model.num_targets or 1)))
    if isinstance(model, ProgramModel):
        return model if model.shapes is not None else model.bind(x, np.zeros(_tree.rows(x)))
    if not hasattr(model, "sample_prior") or getattr(model, "likelihood", None) is None:
        raise DataError(message("This has no prior to draw from.", type(model).__name__, "a model", "pass al.BNN, al.LinearModel, …"))
    return model


@cached
def _draws(model: Any) -> Callable:
    """(key, x, S, block) → E[y | x, θ] and y, (S, rows, k) each."""

    def one(key: Key, x: Tree) -> tuple[Array, Array]:
        key_params, key_network, key_y = jax.random.split(key, 3)
        params = model.sample_prior(key_params)
        outputs, extra = model.outputs(params, x, key_network if model.stochastic else None), model.extra(params)
        return model.likelihood.mean(outputs, extra), model.likelihood.sample(key_y, outputs, extra)

    def run(key: Key, x: Tree, number: int, block: int) -> tuple[Array, Array]:
        return jax.lax.map(lambda k: one(k, x), jax.random.split(key, number), batch_size=block)

    return jax.jit(run, static_argnums=(2, 3))


def _path(x: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Order of the rows and distances between neighbours; rows that coincide are passed over."""
    flat = np.concatenate([np.asarray(leaf, np.float64).reshape(_tree.rows(x), -1) for leaf in jax.tree.leaves(x)], axis=1)
    order = np.argsort(flat[:, 0], kind="stable") if flat.shape[1] == 1 else np.arange(len(flat))
    keep = np.append(True, np.linalg.norm(np.diff(flat[order], axis=0), axis=1) > 0)
    order = order[keep]
    if len(order) < 2:
        raise DataError(message("A function needs places to be looked at.", f"{len(order)} row", "two different rows of x", "pass a grid"))
    return order, np.linalg.norm(np.diff(flat[order], axis=0), axis=1)


def _outside(values: np.ndarray, bounds: tuple[float, float] | None) -> np.ndarray:
    if bounds is None:
        raise DataError(message("There are no bounds.", "bounds=None", "(low, high)", "pass bounds to simulate"))
    return np.mean((values < bounds[0]) | (values > bounds[1]), axis=tuple(range(1, values.ndim)))


def _quantity(values: np.ndarray, level: float, unit: str) -> Quantity:
    low, median, high = np.quantile(values, [tails(level)[0], 0.5, tails(level)[1]])
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return Quantity(float(values.mean()), float(error), float(low), float(median), float(high), unit)


def _span(quantity: Quantity) -> str:
    return "" if quantity.unit == "share" else f"{quantity.low:.3g} … {quantity.high:.3g}"
