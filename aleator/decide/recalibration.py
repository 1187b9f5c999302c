"""Recalibration: what held-out rows say about stated probabilities, as a map Predictive → Predictive (A12).

Classes are recalibrated on the outputs f (class logits), so that every view of the result, mutual information included, is still one of the same draws:

    temperature   f / T                          one number
    vector        a ∘ f + b                      two numbers a class
    isotonic      p_c → g_c(p_c), then each row's logits shifted until its probabilities are the mapped ones
    beta          the same with logit g(p) = a log p − b log(1 − p) + c

Numbers are recalibrated on y: "variance" stretches y around its mean by a factor s; "quantile" replaces the cdf F by R ∘ F.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _outputs, _quadrature, store
from aleator._errors import DataError, MethodError, ModelError, message
from aleator._random import as_key
from aleator._typing import Key, KeyLike
from aleator.data import Data, overlap
from aleator.decide._inputs import numeric, probabilities
from aleator.predictive import Predictive, PredictiveMixture, PredictiveViews

PRIOR_SD = 1.0  # of log a and b in vector scaling, around plain temperature: 2K numbers from few rows need a tether
TOLERANCE = 1e-9  # how close shifted probabilities come to the mapped ones


@dataclasses.dataclass(frozen=True, eq=False)
class Recalibrated:
    """A fit whose predictions pass through a map fitted on held-out rows: `predict(key, x)` as a Fit's."""

    fit: Any
    map: Map

    def predict(self, key: KeyLike, x: Any, num_samples: int = 1000) -> PredictiveViews:
        """The recalibrated predictive distribution of y at the rows of x."""
        return self.map(self.fit.predict(key, x, num_samples))

    def save(self, path: str | os.PathLike) -> None:
        """Write one directory with the fit and the map; `al.load(path)` reads it back, bit for bit."""
        store.save_with(self, path)


def recalibrate(key: KeyLike, fit: Any, data: Any, how: str | None = None, num_samples: int = 1000) -> Recalibrated:
    """Fit a map on held-out (x, y) and put it behind the fit.

    how: "temperature", "vector", "isotonic", "beta" for classes, "variance", "quantile" for numbers; by default the one-parameter one, which cannot
    overfit. Rows the fit was trained on are refused: the model is sure of them, and the map would learn the wrong thing.
    """
    x, y = (data.x, data.y) if isinstance(data, Data) else (data[0], data[1])
    predictive = fit.predict(as_key(key), x, num_samples)
    seen = (
        overlap(getattr(fit, "manifest", {}).get("data", {}).get("sketch"), Data(fit._inputs(x), predictive.encode(y)))
        if hasattr(fit, "_inputs")
        else 0.0
    )
    if seen > 0.5:
        raise DataError(
            message(
                "These rows were used in training.",
                f"{100 * seen:.0f} % of them",
                "held-out rows",
                "split the data first: al.split(key, data, 0.2)",
            )
        )
    return Recalibrated(fit, fit_map(predictive, y, how))


def fit_map(predictive: PredictiveViews, y: Any, how: str | None = None) -> Map:
    """The map that held-out targets y of a predictive call for; see `recalibrate`. Its log score on these rows is never below the identity's."""
    classes = predictive.support in ("label", "binary")
    known = CLASSES if classes else NUMBERS
    how = next(iter(known)) if how is None else how
    if how not in known:
        raise MethodError(message("There is no such recalibration here.", repr(how), f"one of {', '.join(known)}", "pass one of them"))
    if predictive.num_rows < 2:
        raise DataError(message("There are too few rows to recalibrate on.", f"{predictive.num_rows}", "at least 2", "hold out more rows"))
    before = predictive.log_prob(y)
    if not np.all(np.isfinite(before)):
        row = int(np.argmax(~np.isfinite(before)))
        raise DataError(
            message(
                "A held-out target has no density.",
                f"log p(y) = {before[row]} in row {row}",
                "finite numbers",
                "check the predictive and y",
            )
        )
    return known[how](predictive, y)


# --------------------------------------------------------------------------------------------------------------------- on outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Affine:
    """Logits f → slope ∘ f + shift; a temperature T is the slope 1/T."""

    slope: np.ndarray
    shift: np.ndarray

    @property
    def temperature(self) -> float:
        """1/slope, where there is one."""
        if np.size(self.slope) > 1:
            raise ModelError(message("There is no single temperature.", f"{np.size(self.slope)} slopes", "one", "use slope and shift"))
        return float(1 / self.slope[0])

    def __call__(self, predictive: PredictiveViews) -> PredictiveViews:
        return _on_outputs(predictive, lambda f: self.slope * f + self.shift, lambda v: self.slope**2 * v)


@dataclasses.dataclass(frozen=True, eq=False)
class Lines:
    """Points (p, g(p)), joined by lines and level beyond the ends."""

    p: np.ndarray
    mapped: np.ndarray

    def __call__(self, q: np.ndarray) -> np.ndarray:
        return np.interp(q, self.p, self.mapped)


@dataclasses.dataclass(frozen=True, eq=False)
class BetaCurve:
    """logit g(p) = a log p − b log(1 − p) + c, weights = (a, b, c)."""

    weights: np.ndarray

    @staticmethod
    def features(q: np.ndarray) -> np.ndarray:
        q = np.clip(q, 1e-12, 1 - 1e-12)
        return np.stack([np.log(q), -np.log1p(-q), np.ones_like(q)], axis=-1)

    def __call__(self, q: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        return expit(self.features(q) @ self.weights)


@dataclasses.dataclass(frozen=True, eq=False)
class Probabilities:
    """Each class's probability through a curve of its own, then normalised; logits are shifted row by row to get there."""

    curves: tuple[Lines | BetaCurve, ...]

    def __call__(self, predictive: PredictiveViews) -> PredictiveViews:
        probs = probabilities(predictive)
        return _shifted(predictive, self.target(probs))

    def target(self, probs: np.ndarray) -> np.ndarray:
        """(n, K) → (n, K): two classes share one curve, that of the second."""
        if len(self.curves) == 1:
            mapped = self.curves[0](probs[:, 1])
            return np.stack([1 - mapped, mapped], axis=-1)
        mapped = np.stack([curve(column) for curve, column in zip(self.curves, probs.T, strict=True)], axis=-1)
        return mapped / mapped.sum(axis=-1, keepdims=True)


def _temperature(predictive: PredictiveViews, y: Any) -> Affine:
    from scipy.optimize import minimize_scalar

    make = lambda log_t: Affine(np.array([np.exp(-log_t)]), np.zeros(1))
    found = minimize_scalar(
        lambda log_t: -np.mean(make(log_t)(predictive).log_prob(y)), bounds=(-5.0, 5.0), method="bounded", options={"xatol": 1e-4}
    )
    better = -found.fun >= np.mean(predictive.log_prob(y))
    return make(found.x if better else 0.0)


def _vector(predictive: PredictiveViews, y: Any) -> Affine:
    """Maximum a posteriori of (log a, b) around plain temperature."""
    from scipy.optimize import minimize

    start, width = _temperature(predictive, y), _num_outputs(predictive)
    names = predictive.encode(y)

    @jax.jit
    def loss(z: jax.Array) -> jax.Array:
        slope, shift = start.slope * jnp.exp(z[:width]), z[width:]
        moved = _on_outputs(predictive, lambda f: slope * f + shift, lambda v: slope**2 * v)
        return -jnp.sum(_traced_log_prob(moved, names)) + 0.5 * jnp.sum((z / PRIOR_SD) ** 2)

    with jax.enable_x64(True):
        gradient = jax.jit(jax.value_and_grad(loss))
        found = minimize(
            lambda z: tuple(np.asarray(v, float) for v in gradient(jnp.asarray(z))), np.zeros(2 * width), jac=True, method="L-BFGS-B"
        )
    fitted = Affine(start.slope * np.exp(found.x[:width]), found.x[width:])
    return (
        fitted
        if np.mean(fitted(predictive).log_prob(y)) >= np.mean(start(predictive).log_prob(y))
        else Affine(start.slope * np.ones(width), np.zeros(width))
    )


def _isotonic(predictive: PredictiveViews, y: Any) -> Probabilities:
    return Probabilities(_curves(predictive, y, _isotonic_curve))


def _beta(predictive: PredictiveViews, y: Any) -> Probabilities:
    return Probabilities(_curves(predictive, y, _beta_curve))


def _curves(predictive: PredictiveViews, y: Any, make: Callable[[np.ndarray, np.ndarray], Any]) -> tuple[Any, ...]:
    probs, numbers = probabilities(predictive), predictive.encode(y).reshape(-1)
    if probs.shape[1] == 2:
        return (make(probs[:, 1], numbers == 1),)
    return tuple(make(probs[:, c], numbers == c) for c in range(probs.shape[1]))


def _isotonic_curve(p: np.ndarray, came_true: np.ndarray) -> Lines:
    """Least squares among rising curves, joined by lines; kept off 0 and 1 by the rule of succession, so that no event becomes impossible."""
    from sklearn.isotonic import IsotonicRegression

    edge = 1 / (len(p) + 2)
    fitted = IsotonicRegression(y_min=edge, y_max=1 - edge, out_of_bounds="clip").fit(p, came_true.astype(float))
    return Lines(np.asarray(fitted.X_thresholds_, float), np.asarray(fitted.y_thresholds_, float))


def _beta_curve(p: np.ndarray, came_true: np.ndarray) -> BetaCurve:
    """With a, b ≥ 0 by maximum likelihood (Kull et al. 2017); a weak pull to the identity keeps separable data finite."""
    from scipy.optimize import minimize
    from scipy.special import expit

    table, identity = BetaCurve.features(p), np.array([1.0, 1.0, 0.0])

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = table @ w
        value = np.sum(np.logaddexp(0, z) - came_true * z) + 0.5 * 1e-2 * np.sum((w - identity) ** 2)
        return float(value), table.T @ (expit(z) - came_true) + 1e-2 * (w - identity)

    return BetaCurve(minimize(loss, identity, jac=True, method="L-BFGS-B", bounds=[(0, None), (0, None), (None, None)]).x)


def _on_outputs(predictive: Any, mean: Callable, variance: Callable) -> Any:
    """The predictive with f mapped: draws and means by `mean`, variances by `variance`; members of a mixture alike."""
    if isinstance(predictive, PredictiveMixture):
        return dataclasses.replace(predictive, members=tuple(_on_outputs(member, mean, variance) for member in predictive.members))
    if not isinstance(predictive, Predictive):
        raise ModelError(message("The logits are gone.", type(predictive).__name__, "what fit.predict returns", "recalibrate once"))
    outputs = predictive.outputs
    changed = {"mean": mean(outputs.mean), "variance": variance(outputs.variance)} if outputs.gaussian else {"draws": mean(outputs.draws)}
    return dataclasses.replace(predictive, outputs=dataclasses.replace(outputs, **changed))


def _num_outputs(predictive: Any) -> int:
    first: Any = predictive.members[0] if isinstance(predictive, PredictiveMixture) else predictive
    return int(np.shape(first.outputs.mean if first.outputs.gaussian else first.outputs.draws)[-1])


def _traced_log_prob(predictive: Any, y: np.ndarray) -> jax.Array:
    """log p(y) as a function that can be differentiated."""
    if isinstance(predictive, PredictiveMixture):
        terms = [np.log(w) + _traced_log_prob(m, y) for m, w in zip(predictive.members, predictive.weights, strict=True) if w > 0]
        return jax.nn.logsumexp(jnp.stack(terms), axis=0)
    return _outputs.log_joint(predictive.likelihood, predictive.outputs, jnp.asarray(y), nodes=_outputs.FEW_NODES)


def _shifted(predictive: PredictiveViews, target: np.ndarray) -> PredictiveViews:
    """Logits plus a constant for each row and class, such that the probabilities are `target`, by Newton steps on the logarithm.

    E_f[p_c (1 − p_c)], the aleatoric variance, is ∂p̄_c/∂shift_c; with K classes moving at once (K − 1)/K of the step is taken.
    """
    binary = predictive.support == "binary"
    wanted = target[:, 1:] if binary else target
    share = 1.0 if binary else (wanted.shape[1] - 1) / wanted.shape[1]
    shift = np.zeros(wanted.shape)
    for _ in range(200):
        moved = _on_outputs(predictive, lambda f: f + shift, lambda v: v)  # noqa: B023
        now, slope = (np.asarray(view, float).reshape(wanted.shape) for view in (moved.mean, moved.aleatoric))
        if np.max(np.abs(now - wanted)) < TOLERANCE:
            break
        step = (
            np.log(wanted / np.maximum(now, 1e-300)) * now / np.maximum(slope, 1e-300)
            if not binary
            else (wanted - now) / np.maximum(slope, 1e-300)
        )
        shift = shift + share * np.clip(step, -2.0, 2.0)
    return moved


# ------------------------------------------------------------------------------------------------------------------------- on y


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """y → mean + factor · (y − mean), factor (k,)."""

    factor: np.ndarray

    def __call__(self, predictive: PredictiveViews) -> PredictiveViews:
        return Stretched(predictive, np.asarray(predictive.mean, float).reshape(predictive.num_rows, -1), self.factor)


@dataclasses.dataclass(frozen=True, eq=False)
class Warp:
    """F → R ∘ F with R piecewise linear through (levels, shares), from (0, 0) to (1, 1)."""

    levels: np.ndarray
    shares: np.ndarray

    def __call__(self, predictive: PredictiveViews) -> PredictiveViews:
        return Warped(predictive, self.levels, self.shares)


def _variance(predictive: PredictiveViews, y: Any) -> Stretch:
    from scipy.optimize import minimize

    numeric(predictive, "variance scaling")
    if predictive.support != "real":
        raise ModelError(message("Counts cannot be stretched.", "count targets", "real targets", "use how='quantile'"))
    width = predictive.num_columns
    loss = lambda z: -float(np.mean(Stretch(np.exp(z))(predictive).log_prob(y)))
    found = minimize(loss, np.zeros(width), method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-9})
    return Stretch(np.exp(found.x) if found.fun <= loss(np.zeros(width)) else np.ones(width))


def _quantile(predictive: PredictiveViews, y: Any) -> Warp:
    """R from the quantiles of the PIT values (Kuleshov et al. 2018), n^(1/3) pieces, shrunk to the identity by one pseudo-row a piece."""
    numeric(predictive, "quantile recalibration")
    if predictive.support != "real" or predictive.num_columns > 1:
        got = f"{predictive.num_columns} {predictive.support} columns"
        raise ModelError(
            message("Quantiles cannot be recalibrated here.", got, "one real target", "use how='variance', or one column at a time")
        )
    values, n = np.sort(predictive.cdf(y).ravel()), predictive.num_rows
    pieces = max(2, round(n ** (1 / 3)))
    levels = np.concatenate([[0.0], np.quantile(values, np.arange(1, pieces) / pieces), [1.0]])
    levels = np.unique(np.clip(levels, 0, 1))
    seen = np.searchsorted(values, levels, side="right") / n
    seen[0], seen[-1] = 0.0, 1.0
    fitted = Warp(levels, (n * seen + pieces * levels) / (n + pieces))
    return (
        fitted
        if np.mean(fitted(predictive).log_prob(y)) >= np.mean(predictive.log_prob(y))
        else Warp(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    )


class _Moved(PredictiveViews):
    """A predictive of a rising function of another one's y, row by row."""

    base: PredictiveViews

    @property
    def squeeze(self) -> bool:  # type: ignore[override]
        return self.base.squeeze

    @property
    def labels(self) -> tuple | None:  # type: ignore[override]
        return self.base.labels

    @property
    def max_bytes(self) -> int:  # type: ignore[override]
        return self.base.max_bytes

    @property
    def support(self) -> str:
        return self.base.support

    @property
    def num_rows(self) -> int:
        return self.base.num_rows

    @property
    def num_columns(self) -> int:
        return self.base.num_columns

    def encode(self, y: Any) -> np.ndarray:
        return self.base.encode(y)


@dataclasses.dataclass(frozen=True, eq=False)
class Stretched(_Moved):
    """y = centre + factor · (z − centre), z from `base`; centre (rows, k), factor (k,)."""

    base: PredictiveViews
    centre: np.ndarray
    factor: np.ndarray

    def rows(self, index: slice) -> Stretched:
        return Stretched(self.base.rows(index), self.centre[index], self.factor)

    def _back(self, y: np.ndarray) -> np.ndarray:
        return self.centre + (y - self.centre) / self.factor

    def _row_bytes(self) -> int:
        return self.base._row_bytes()

    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mean, aleatoric, epistemic = self.base._moments()
        return self.centre + self.factor * (mean - self.centre), self.factor**2 * aleatoric, self.factor**2 * epistemic

    def _log_prob(self, y: np.ndarray) -> np.ndarray:
        return self.base._log_prob(self._back(y)) - np.sum(np.log(self.factor))

    def _log_columns(self, y: np.ndarray) -> np.ndarray:
        return self.base._log_columns(self._back(y)) - np.log(self.factor)

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        return self.base._cdf(self._back(y))

    def _expected_entropy(self) -> np.ndarray:
        return self.base._expected_entropy() + np.log(self.factor)

    def _cloud(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centres, spreads, weights = self.base._cloud()
        return self.centre + self.factor * (centres - self.centre), self.factor * spreads, weights

    def _sample(self, key: Key, num_samples: int) -> np.ndarray:
        return self.centre + self.factor * (self.base._sample(key, num_samples) - self.centre)

    def gaussian_components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        parts = self.base.gaussian_components()
        return None if parts is None else (parts[0], self.centre + self.factor * (parts[1] - self.centre), self.factor * parts[2])


@dataclasses.dataclass(frozen=True, eq=False)
class Warped(_Moved):
    """The cdf R ∘ F. It is that of the rising function F⁻¹ ∘ R⁻¹ ∘ F of the base's y, so mutual information with f is the base's.

    Moments are integrals; their split into aleatoric and epistemic keeps the base's shares.
    """

    base: PredictiveViews
    levels: np.ndarray
    shares: np.ndarray

    def rows(self, index: slice) -> Warped:
        return Warped(self.base.rows(index), self.levels, self.shares)

    def _slope(self, u: np.ndarray) -> np.ndarray:
        piece = np.clip(np.searchsorted(self.levels, u, side="right") - 1, 0, len(self.levels) - 2)
        return (np.diff(self.shares) / np.diff(self.levels))[piece]

    def _row_bytes(self) -> int:
        return 64 * self.base._row_bytes()  # moments integrate over many values of y

    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        nodes, rule = _quadrature.integration_rule(self.base, 64)
        density = rule * np.exp(self._log_columns(nodes))
        mean = np.sum(density * nodes, axis=0)
        variance = np.sum(density * (nodes - mean) ** 2, axis=0)
        _, aleatoric, epistemic = self.base._moments()
        return mean, variance * aleatoric / (aleatoric + epistemic), variance * epistemic / (aleatoric + epistemic)

    def _log_prob(self, y: np.ndarray) -> np.ndarray:
        return self._log_columns(y[None])[0, :, 0]

    def _log_columns(self, y: np.ndarray) -> np.ndarray:
        return self.base._log_columns(y) + np.log(self._slope(self.base._cdf(y)))

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        return np.interp(self.base._cdf(y), self.levels, self.shares)

    def _expected_entropy(self) -> np.ndarray:
        information = _quadrature.entropy(self.base) - self.base._expected_entropy()
        return _quadrature.entropy(self) - information

    def _cloud(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.base._cloud()

    def _sample(self, key: Key, num_samples: int) -> np.ndarray:
        """Uniforms through R⁻¹, then the base's quantiles."""
        uniform = np.asarray(jax.random.uniform(key, (num_samples, self.num_rows, 1)), float)
        wanted = np.clip(np.interp(uniform, self.shares, self.levels), 1e-12, 1 - 1e-12)
        blocks = np.array_split(wanted, max(1, num_samples // _outputs.BLOCK))
        return np.concatenate([self.base._quantile(block) for block in blocks])

    def gaussian_components(self) -> None:
        return None


Map = Affine | Probabilities | Stretch | Warp
CLASSES: dict[str, Callable[[PredictiveViews, Any], Map]] = {
    "temperature": _temperature,
    "vector": _vector,
    "isotonic": _isotonic,
    "beta": _beta,
}
NUMBERS: dict[str, Callable[[PredictiveViews, Any], Map]] = {"variance": _variance, "quantile": _quantile}
