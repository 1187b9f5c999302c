"""Linear regressions with unknown noise as a conjugate family, and the autoregressive emission made of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import multigammaln

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import Family
from aleator.latent._precision import draw_wishart, factor_of, inverse_of, log_jacobian, parameters_of
from aleator.latent.parts import LOG_2PI, Part, check_finite, moments
from aleator.latent.weights import check_concentration


class Regression(Family):
    """y = Wφ + ε, ε ~ N(0, Λ⁻¹), with W | Λ ~ MN(M, Λ⁻¹, K⁻¹), Λ ~ Wishart(ν, Ψ⁻¹): the matrix-normal–Wishart family, in (W, Λ).

    t = (−½WᵀΛW, ΛW, −½Λ, ½log|Λ|) with counts "gram" Σφφᵀ (…, q, q), "cross" Σyφᵀ (…, d, q), "square" Σyyᵀ (…, d, d) and "df" Σ1 (…).
    Parameters: "weights" (…, d, q) and the Cholesky factor of Λ. Members are on the first axis.
    """

    def log_partition(self, counts: Tree) -> Array:
        d, q = counts["cross"].shape[-2:]
        root, scatter = self._solved(counts)[1:]
        nu = counts["df"] + d + 1.0 - q
        within = 0.5 * d * (q * LOG_2PI - _logdet(root))
        logdet = _logdet(jnp.linalg.cholesky(scatter))
        return jnp.sum(within + 0.5 * nu * d * math.log(2.0) + multigammaln(0.5 * nu, d) - 0.5 * nu * logdet)

    def natural(self, params: Tree) -> Tree:
        factor = factor_of(params)
        half = jnp.swapaxes(factor, -1, -2) @ params["weights"]
        return {
            "gram": -0.5 * jnp.swapaxes(half, -1, -2) @ half,
            "cross": factor @ half,
            "square": -0.5 * factor @ jnp.swapaxes(factor, -1, -2),
            "df": jnp.sum(params["log_diagonal"], axis=-1),
        }

    def log_jacobian(self, params: Tree) -> Array:
        return log_jacobian(params)

    def mode(self, counts: Tree) -> Tree:
        """W = cross·gram⁻¹, Λ = df·scatter⁻¹, scatter = square − cross·gram⁻¹·crossᵀ."""
        weights, _, scatter = self._solved(counts)
        return {"weights": weights} | parameters_of(jnp.linalg.inv(scatter) * counts["df"][..., None, None])

    def draw(self, key: Key, counts: Tree) -> Tree:
        key_diagonal, key_lower, key_weights = jax.random.split(key, 3)
        weights, root, scatter = self._solved(counts)
        d, q = weights.shape[-2:]
        nu = counts["df"] + d + 1.0 - q
        factor = jnp.linalg.cholesky(draw_wishart(key_diagonal, key_lower, nu, scatter))
        # W = M + Λ^{−T/2} Z K^{−1/2}
        noise = jax.random.normal(key_weights, weights.shape)
        left = solve_triangular(factor, noise, lower=True, trans=1)
        spread = jnp.swapaxes(solve_triangular(root, jnp.swapaxes(left, -1, -2), lower=True, trans=1), -1, -2)
        return {"weights": weights + spread} | parameters_of(factor @ jnp.swapaxes(factor, -1, -2))

    def _solved(self, counts: Tree) -> tuple[Array, Array, Array]:
        """W = cross·gram⁻¹, the Cholesky factor of gram, and the scatter left."""
        root = jnp.linalg.cholesky(counts["gram"])
        weights = jnp.swapaxes(cho_solve((root, True), jnp.swapaxes(counts["cross"], -1, -2)), -1, -2)
        scatter = counts["square"] - weights @ jnp.swapaxes(counts["cross"], -1, -2)
        return weights, root, 0.5 * (scatter + jnp.swapaxes(scatter, -1, -2))


def pseudo_counts(mean: Array, strength: Array, squares: Array, df: float) -> Tree:
    """η₀ of one member: W ~ MN(mean (d, q), ·, diag(strength)⁻¹), Λ ~ Wishart(df, diag(squares)⁻¹)."""
    d, q = mean.shape
    gram = jnp.diag(strength)
    return {"gram": gram, "cross": mean @ gram, "square": jnp.diag(squares) + mean @ gram @ mean.T, "df": jnp.asarray(df - d - 1.0 + q)}


@dataclasses.dataclass(frozen=True)
class Autoregressive(Regression, Part):
    """y_t = A₁y_{t−1} + … + A_p y_{t−p} + b + ε, ε ~ N(0, Λ⁻¹), each state with its own A, b and Λ: for `HMM`, which lays the past beside
    every row.

    lags: p. persistence: prior mean of the diagonal of A₁. strength: of the prior of (A, b), in rows; df: ν; spread: prior standard
    deviation √(Ψ/ν) of ε, a number or d of them. What is None comes from the data at `bind`: spread from the residuals of one autoregression
    for all rows; df is d + 2. Rows whose past is not known (the first p of a sequence, those after a missing row) are conditioned on: they say
    nothing about the states.
    y is taken relative to `centre`, the mean of the data.
    """

    lags: int = 1
    persistence: float = 0.0
    strength: float = 0.01
    df: float | None = None
    spread: Any = None
    centre: Any = None
    scale: Any = None
    dim: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lags, bool) or not isinstance(self.lags, (int, np.integer)) or self.lags < 1:
            raise ModelError(message("An autoregression needs a past.", f"lags={self.lags!r}", "a whole number ≥ 1", "pass e.g. lags=1"))
        check_concentration(self.strength)

    def bind(self, y: np.ndarray) -> Autoregressive:
        """y: rows beside their past, as `lagged` lays them."""
        d = y.shape[1] // (1 + self.lags)
        whole = y[np.isfinite(y).all(axis=1)]
        check_finite(y[:, :d], missing=True)
        if not len(whole):
            got = f"no row with the {self.lags} before it"
            raise DataError(message("There is nothing to regress on its past.", got, "at least one", "use longer sequences or fewer lags"))
        centre, scale = moments(y[:, :d])
        largest = scale.max()
        scale = np.maximum(scale, 1e-6 * largest if largest > 0 else 1.0)
        inputs = np.column_stack([whole[:, d:] - np.tile(centre, self.lags), np.ones(len(whole))])
        targets = whole[:, :d] - centre
        left = targets - inputs @ np.linalg.lstsq(inputs, targets, rcond=None)[0]
        spread = (
            np.sqrt(np.sum(left**2, axis=0) / max(len(whole) - inputs.shape[1], 1))
            if self.spread is None
            else np.asarray(self.spread, float)
        )
        spread = np.maximum(np.broadcast_to(spread, (d,)), 1e-6 * scale)
        df = float(self.df) if self.df is not None else d + 2.0
        if not (df > d and np.all(spread > 0)):
            got = f"df={df}, spread={spread.tolist()}"
            raise ModelError(message("The prior of the noise has no mode.", got, f"df > {d} and spread > 0", "raise df or spread"))
        found: Any = {"spread": tuple(spread.tolist()), "centre": tuple(centre.tolist()), "scale": tuple(scale.tolist())}
        return dataclasses.replace(self, df=df, dim=d, **found)

    def prior(self, num: int) -> Tree:
        d: Any = self.dim
        mean = jnp.zeros((d, d * self.lags + 1)).at[:, :d].set(self.persistence * jnp.eye(d))
        squares = jnp.concatenate([jnp.tile(jnp.asarray(self.scale) ** 2, self.lags), jnp.ones(1)])
        one = pseudo_counts(mean, self.strength * squares, self.df * jnp.asarray(self.spread) ** 2, self.df)  # type: ignore[operator, arg-type]
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), one)

    def lagged(self, y: Array, begins: Array) -> Array:
        """Each row with its past: (y_t, y_{t−1}, …, y_{t−p}), (n, d(1 + p)); NaN where the past is before the sequence's begin."""
        columns, ages = [y], jnp.arange(len(y)) - jax.lax.cummax(jnp.where(begins, jnp.arange(len(y)), 0))
        for lag in range(1, self.lags + 1):
            columns.append(jnp.where((ages >= lag)[:, None], jnp.roll(y, lag, axis=0), jnp.nan))
        return jnp.concatenate(columns, axis=1)

    def log_terms(self, natural: Tree, y: Array) -> Array:
        known, targets, inputs = self._split(y)
        over = lambda table: (
            jnp.sum((inputs @ table["gram"]) * inputs, axis=-1)
            + jnp.sum((targets @ table["cross"]) * inputs, axis=-1)
            + jnp.sum((targets @ table["square"]) * targets, axis=-1)
        )
        terms = jax.lax.map(over, {name: natural[name] for name in ("gram", "cross", "square")}).T + natural["df"]
        return jnp.where(known[:, None], terms - 0.5 * targets.shape[1] * LOG_2PI, 0.0)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        known, targets, inputs = self._split(y)
        shares = jnp.where(known[:, None], shares, 0.0)

        def one(share: Array) -> Tree:
            heavy = inputs * share[:, None]
            return {
                "gram": heavy.T @ inputs,
                "cross": targets.T @ heavy,
                "square": (targets * share[:, None]).T @ targets,
                "df": jnp.sum(share),
            }

        return jax.lax.map(one, shares.T)

    def simulate(self, key: Key, params: Tree, labels: Array, past: Array | None = None) -> Array:
        """y (n, d) along the states `labels`, after the rows `past` (lags, d), the latest last; without them after rows at the centre."""
        centre = jnp.asarray(self.centre)
        d, named = len(self.centre), self.constrain(params)
        roots, weights = jnp.linalg.cholesky(named["covariance"]), params["weights"]
        window = jnp.zeros((self.lags, d)) if past is None else (jnp.asarray(past) - centre)[::-1]

        def one(window: Any, item: Any) -> tuple[Any, Any]:
            label, noise = item
            y = weights[label] @ jnp.concatenate([window.ravel(), jnp.ones(1)]) + roots[label] @ noise
            return jnp.concatenate([y[None], window[:-1]]), y

        return centre + jax.lax.scan(one, window, (labels, jax.random.normal(key, (len(labels), d))))[1]

    def constrain(self, params: Tree) -> dict[str, Array]:
        """A (K, p, d, d), b (K, d) and the covariance of ε (K, d, d), in y's units."""
        weights, centre = params["weights"], jnp.asarray(self.centre)
        num, d, _ = weights.shape
        matrices = jnp.swapaxes(weights[..., :-1].reshape(num, d, self.lags, d), 1, 2)
        offset = weights[..., -1] + centre - jnp.einsum("kpij,j->ki", matrices, centre)
        return {"weights": matrices, "offset": offset, "covariance": inverse_of(factor_of(params))}

    def _split(self, y: Array) -> tuple[Array, Array, Array]:
        """Which rows are known with their past, y_t − centre, and (past − centre, 1); zeros where they are not."""
        d, centre = len(self.centre), jnp.asarray(self.centre)
        known = jnp.all(jnp.isfinite(y), axis=1)
        filled = jnp.where(known[:, None], y - jnp.tile(centre, 1 + self.lags), 0.0)
        return known, filled[:, :d], jnp.concatenate([filled[:, d:], known[:, None].astype(y.dtype)], axis=1)


def _logdet(root: Array) -> Array:
    """log|A| from its Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)
