"""Non-linear autoregression (E6): a series as a regression on its own past, and forecasts by simulating it forward.

    y_t = f(y_{t−l₁}, …, y_{t−l_p}, u_t) + ε_t

f is any model of the library; u_t are exogenous inputs known at t. A forecast of several steps feeds each simulated value back in, under
one posterior draw per path: p(y_{T+1:T+h} | D) = ∫ Π p(y_{T+i} | past, θ) p(θ | D) dθ, noise and ignorance of θ together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _functions
from aleator._cache import cached
from aleator._errors import DataError, ModelError, message
from aleator._fit import Fit
from aleator._fit import fit as fit_model
from aleator._random import as_key, split
from aleator._typing import Array, Key, KeyLike
from aleator.data import Standardiser
from aleator.predictive import Predictive

NUM_PATHS = 1000
LEVEL = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """Simulated futures. paths (num_samples, horizon), in the series' own units; units: their name, for tables and axes."""

    paths: np.ndarray
    units: str

    @property
    def mean(self) -> np.ndarray:
        """(horizon,)."""
        return self.paths.mean(axis=0)

    @property
    def std(self) -> np.ndarray:
        """(horizon,)."""
        return self.paths.std(axis=0, ddof=1)

    @property
    def stderr(self) -> np.ndarray:
        """Monte Carlo standard error of the mean: std/√num_samples, (horizon,)."""
        return self.std / np.sqrt(len(self.paths))

    def quantile(self, q: float | Sequence[float]) -> np.ndarray:
        """Quantiles of each step: q's shape, then (horizon,)."""
        return np.quantile(self.paths, q, axis=0)

    def interval(self, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
        """The central interval holding each value, by itself, with probability `level`: (lower, upper)."""
        if not 0 < level < 1:
            raise DataError(message("The interval cannot be given.", f"level={level!r}", "a number in (0, 1)", "pass e.g. level=0.9"))
        lower, upper = self.quantile([0.5 - level / 2, 0.5 + level / 2])
        return lower, upper

    def summary(self, level: float = LEVEL) -> str:
        """Mean with its Monte Carlo error, standard deviation and interval of each step, as a table."""
        lower, upper = self.interval(level)
        head = f"{'step':>4}  {'mean ± MC error':>20}  {'std':>9}  {f'{100 * level:g} % interval':>22}   [{self.units}]"
        rows = [
            f"{i + 1:>4}  {m:>11.4g} ± {e:<6.2g}  {s:>9.4g}  {f'{a:.4g} … {b:.4g}':>22}"
            for i, (m, e, s, a, b) in enumerate(zip(self.mean, self.stderr, self.std, lower, upper, strict=True))
        ]
        return "\n".join([head, *rows])

    def __repr__(self) -> str:
        return f"<Forecast of {self.paths.shape[1]} steps by {len(self.paths)} paths, {self.units}>"


@dataclasses.dataclass(frozen=True, eq=False)
class Autoregression:
    """A series as rows for a model. Make it with `autoregression`.

    data: (x, y) as the model sees them: x (T − L, p + m) has the lagged values y_{t−l} in the order of `lags`, then the exogenous columns
    at t; y (T − L,), L the longest lag. Both are standardised by `scaler` (series) and `exogenous_scaler`.
    """

    series: np.ndarray
    lags: tuple[int, ...]
    model: Any
    exogenous: np.ndarray | None
    scaler: Standardiser
    target_scaler: Standardiser
    exogenous_scaler: Standardiser | None
    units: str

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        longest, total = max(self.lags), len(self.series)
        past = self.scaler.apply(self.series)
        columns = [past[longest - lag : total - lag] for lag in self.lags]
        x = np.stack(columns, axis=1)
        if self.exogenous is not None and self.exogenous_scaler is not None:
            x = np.concatenate([x, self.exogenous_scaler.apply(self.exogenous[longest:])], axis=1)
        y = self.series[longest:]
        return x, y if _is_identity(self.target_scaler) else self.target_scaler.apply(y)

    def fit(self, key: KeyLike, method: Any, **options: Any) -> Fit:
        """`al.fit` on the lagged data."""
        return fit_model(key, self.model, self.data, method, **options)

    def predict(self, key: KeyLike, fit: Fit, series: Any = None, exogenous: Any = None, num_samples: int = 1000) -> Predictive:
        """One step ahead, in the series' units: the predictive of y_t given its past, t = L … T − 1.

        series, exogenous: other values to walk through (a stretch held out, with the L values before it); the scalers stay those of the fit.
        """
        rows = self if series is None else self._through(series, exogenous)
        predictive = fit.predict(key, rows.data[0], num_samples)
        if _is_identity(self.target_scaler):
            return predictive
        return dataclasses.replace(predictive, y_loc=np.asarray(self.target_scaler.loc), y_scale=np.asarray(self.target_scaler.scale))

    def _through(self, series: Any, exogenous: Any) -> Autoregression:
        values, longest = _values(series, "series"), max(self.lags)
        if len(values) <= longest:
            raise DataError(
                message(
                    "The series is too short.", f"{len(values)} values", f"more than {longest}, the longest lag", "pass the values before"
                )
            )
        if self.exogenous is None and exogenous is not None:
            raise DataError(message("The model has no exogenous inputs.", "exogenous=…", "None", "pass them to autoregression too"))
        inputs = None if self.exogenous is None else _values(exogenous, "exogenous", columns=True)
        expected = None if self.exogenous is None else (len(values), self.exogenous.shape[1])
        if inputs is not None and inputs.shape != expected:
            raise DataError(message("The exogenous inputs do not line up.", f"shape {inputs.shape}", expected, "pass one row per value"))
        return dataclasses.replace(self, series=values, exogenous=inputs)

    def forecast(
        self,
        key: KeyLike,
        fit: Fit,
        horizon: int,
        num_samples: int = NUM_PATHS,
        exogenous: Any = None,
        history: Any = None,
    ) -> Forecast:
        """Simulate `horizon` steps beyond the series, `num_samples` times; each path has one posterior draw at all its steps.

        exogenous (horizon, m): its values in the steps forecast, where the model has any. history: start after these values in place of
        the series (at least as many as the longest lag).
        """
        for name, value in (("horizon", horizon), ("num_samples", num_samples)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise DataError(message("There is nothing to simulate.", f"{name}={value!r}", "a whole number ≥ 1", f"pass e.g. {name}=10"))
        longest = max(self.lags)
        past = self.series if history is None else _values(history, "history")
        if len(past) < longest:
            raise DataError(
                message("The history is too short.", f"{len(past)} values", f"at least {longest}, the longest lag", "pass more of them")
            )
        future = self._future(exogenous, horizon)
        key_draws, key_noise = split(as_key(key), 2)
        with jax.enable_x64(True):  # exact posteriors are held in double precision, and a long path adds up rounding
            functions = _functions.draw(key_draws, fit, num_samples)
            window = jnp.asarray(self.scaler.apply(past[len(past) - longest :]))
            run = _simulator(fit.model, self.lags, functions.drawn, *_between(self.target_scaler, self.scaler))
            z = run(functions.given, window, jnp.asarray(future), jax.random.split(key_noise, num_samples))
        return Forecast(np.asarray(self.target_scaler.invert(np.asarray(z))), self.units)

    def _future(self, exogenous: Any, horizon: int) -> np.ndarray:
        """Exogenous inputs of the steps to come, standardised, (horizon, m)."""
        if self.exogenous is None or self.exogenous_scaler is None:
            if exogenous is not None:
                raise DataError(message("The model has no exogenous inputs.", "exogenous=…", "None", "pass them to autoregression too"))
            return np.zeros((horizon, 0))
        m = self.exogenous.shape[1]
        if exogenous is None:
            raise DataError(
                message("The forecast needs the exogenous inputs.", "None", f"shape ({horizon}, {m})", "pass their future values")
            )
        values = _values(exogenous, "exogenous", columns=True)
        if values.shape != (horizon, m):
            raise DataError(
                message(
                    "The exogenous inputs do not fit the horizon.", f"shape {values.shape}", f"({horizon}, {m})", "pass one row per step"
                )
            )
        return self.exogenous_scaler.apply(values)


def autoregression(
    series: Any, lags: int | Sequence[int], model: Any, exogenous: Any = None, standardise: bool = True, units: str = "units of the series"
) -> Autoregression:
    """A series (T,) as a regression on its past: lags p means 1 … p, or a list such as [1, 2, 12].

    model: any model with one output per row, and p + m inputs. exogenous (T, m) or (T,): inputs known at the time of each value.
    standardise: the model sees series and exogenous columns with mean 0 and standard deviation 1 (counts as targets stay counts); every
    result is in the series' units. Missing values are refused by their position: a lagged design would silently drop rows around them.

    >>> import aleator as al
    >>> y = np.sin(np.arange(40.0))
    >>> ar = autoregression(y, 2, al.LinearModel(al.features.Identity(), al.Gaussian(0.1)))
    >>> ar.data[0].shape, ar.forecast(1, ar.fit(0, al.Exact()), horizon=3, num_samples=50).paths.shape
    ((38, 2), (50, 3))
    """
    values = _values(series, "series")
    lags = _lags(lags)
    longest = max(lags)
    if len(values) < longest + 2:
        raise DataError(
            message(
                "The series is too short.",
                f"{len(values)} values",
                f"at least {longest + 2} for a longest lag of {longest}",
                "use shorter lags or a longer series",
            )
        )
    if np.all(values == values[0]):
        raise DataError(
            message("The series is constant.", f"{len(values)} times {values[0]:g}", "values that vary", "there is nothing to predict")
        )
    inputs = None
    if exogenous is not None:
        inputs = _values(exogenous, "exogenous", columns=True)
        if len(inputs) != len(values):
            got = f"{len(inputs)} rows for {len(values)} values"
            raise DataError(message("The exogenous inputs do not line up.", got, "one row per value", "pass the rows of the same times"))
    support = _support(model, values, lags, inputs)
    if support not in ("real", "count", "binary"):
        raise ModelError(
            message(
                "This model cannot continue a series.", f"{support} targets", "numbers", "use a Gaussian, Student-t or count likelihood"
            )
        )
    identity = Standardiser((0.0,), (1.0,))
    scaler = Standardiser.fit(values) if standardise else identity
    by_column = None
    if inputs is not None:
        m = inputs.shape[1]
        by_column = Standardiser.fit(inputs) if standardise else Standardiser((0.0,) * m, (1.0,) * m)
    target = scaler if support == "real" else identity
    return Autoregression(values, lags, model, inputs, scaler, target, by_column, units)


def _values(given: Any, name: str, columns: bool = False) -> np.ndarray:
    """Finite float64 numbers, (T,) or (T, m); what is missing is named by its position (and label, where there is one)."""
    labels = getattr(given, "index", None) if hasattr(given, "to_numpy") else None
    try:
        values = np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else given)
        values = values if values.dtype.kind in "iub" else values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(message(f"The {name} is not numeric.", type(given).__name__, "numbers", "convert it to an array")) from error
    if columns and values.ndim == 1:
        values = values[:, None]
    expected = 2 if columns else 1
    if values.ndim != expected or not values.size:
        shape = "(T, m)" if columns else "(T,)"
        raise DataError(message(f"The {name} has a wrong shape.", f"shape {values.shape}", shape, "one value per time, in order"))
    bad = ~np.isfinite(values)
    if bad.any():
        places = np.flatnonzero(bad if values.ndim == 1 else bad.any(axis=1))
        first = int(places[0])
        label = "" if labels is None else f" ({labels[first]})"
        raise DataError(
            message(
                f"The {name} has {len(places)} missing or infinite value{'s' * (len(places) > 1)}.",
                f"{name}[{first}]{label} = {values[first]}" + (f", then positions {places[1:5].tolist()}" if len(places) > 1 else ""),
                "a value at every time",
                "fill the gaps, or take the longest stretch without one",
            )
        )
    return values.astype(np.float64)


def _lags(lags: Any) -> tuple[int, ...]:
    whole = lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1
    chosen = tuple(range(1, int(lags) + 1)) if whole(lags) else tuple(lags) if isinstance(lags, (list, tuple, range, np.ndarray)) else ()
    if not chosen or not all(whole(lag) for lag in chosen) or len(set(chosen)) != len(chosen):
        raise DataError(
            message("These lags cannot be used.", repr(lags), "an int p ≥ 1, or different ints ≥ 1", "pass e.g. lags=2 or lags=[1, 2, 12]")
        )
    return tuple(int(lag) for lag in chosen)


def _support(model: Any, values: np.ndarray, lags: tuple[int, ...], inputs: np.ndarray | None) -> str:
    """The kind of target: from the likelihood, or for a program from a first look at the data."""
    if getattr(model, "likelihood", None) is not None:
        return model.likelihood.support
    longest = max(lags)
    x = np.zeros((len(values) - longest, len(lags) + (0 if inputs is None else inputs.shape[1])))
    return model.bind(x, values[longest:, None]).likelihood.support


def _is_identity(scaler: Standardiser) -> bool:
    return scaler.loc == (0.0,) and scaler.scale == (1.0,)


def _between(first: Standardiser, second: Standardiser) -> tuple[float, float]:
    """(a, b) of z₂ = a + b·z₁: from the units of one scaler to those of the other; exactly (0, 1) where they are the same."""
    if first == second:
        return 0.0, 1.0
    return (first.loc[0] - second.loc[0]) / second.scale[0], first.scale[0] / second.scale[0]


@cached
def _simulator(model: Any, lags: tuple[int, ...], drawn: bool, shift: float, scale: float) -> Callable:
    """All paths in one compiled call: (given, window (L,), future (horizon, m), keys (S,)) → (S, horizon) in the target's units."""
    index = np.asarray([-lag for lag in lags])

    outputs = _functions.evaluator(model, drawn)

    def path(given: Any, window: Array, future: Array, key: Key) -> Array:
        def step(past: Array, item: tuple[Array, Array]) -> tuple[Array, Array]:
            number, outside = item
            x = jnp.concatenate([past[index], outside])[None]
            y = model.likelihood.sample(jax.random.fold_in(key, number), *outputs(given, x))
            value = jnp.ravel(y)[0].astype(past.dtype)
            return jnp.concatenate([past[1:], (shift + scale * value)[None]]), value

        return jax.lax.scan(step, window, (jnp.arange(future.shape[0]), future))[1]

    axes = 0 if drawn else (None, 0)
    return jax.jit(jax.vmap(path, (axes, None, None, 0)))
