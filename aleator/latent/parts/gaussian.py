"""Gaussian and Student-t observations with unknown mean and covariance."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln, multigammaln

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.latent._precision import draw_wishart, factor_of, inverse_of, log_jacobian, parameters_of
from aleator.latent.parts._part import LOG_2PI, Part, check_finite, moments, spread_out
from aleator.latent.weights import check_concentration

COVARIANCES = ("full", "tied", "diagonal", "spherical")
WITHIN = 0.25  # prior spread within a member, as a share of that of all rows


@dataclasses.dataclass(frozen=True)
class Gaussian(Part):
    """y ~ N(μ, Λ⁻¹), with (μ, Λ) ~ N(μ | m, (κΛ)⁻¹) Wishart(Λ | ν, Ψ⁻¹), in the coordinates (μ, Λ).

    covariance: "full", "tied" (one for all members), "diagonal" or "spherical". mean: m (a number or d of them), strength: κ, in rows;
    df: ν, in rows; spread: prior standard deviation √(Ψ/ν) of y within a member, a number or d of them. What is None comes from the data at
    `bind`: m their mean, spread a quarter of their standard deviations and at least 1e-6 of the largest; strength .01 rows, df d + 2.
    t = (−½μᵀΛμ, Λμ, −½Λ, ½log|Λ|) with counts "number", "sum", "square", "df"; y is taken relative to m, for the sake of rounding.
    """

    covariance: str = "full"
    mean: Any = None
    strength: float = 0.01
    df: float | None = None
    spread: Any = None
    dim: int | None = None

    def __post_init__(self) -> None:
        if self.covariance not in COVARIANCES:
            raise ModelError(message("Unknown covariance.", repr(self.covariance), f"one of {COVARIANCES}", "choose one of them"))
        check_concentration(self.strength)

    @property
    def missing(self) -> bool:  # type: ignore[override]
        return self.covariance == "diagonal"

    def bind(self, y: np.ndarray) -> Gaussian:
        check_finite(y, self.missing)
        d = y.shape[1]
        centre, scale = moments(y)
        loc = centre if self.mean is None else np.broadcast_to(np.asarray(self.mean, float), (d,))
        # The same whatever the number of members: bounds and evidences of models with more and fewer then share one prior.
        scale = spread_out(WITHIN * scale)
        scale = scale if self.spread is None else np.broadcast_to(np.asarray(self.spread, float), (d,))
        df = float(self.df) if self.df is not None else d + 2.0
        least = d + 1 if self.covariance == "spherical" else d
        if not (df > least and np.all(scale > 0)):
            got = f"df={df}, spread={scale.tolist()}"
            raise ModelError(
                message("The prior of the covariances has no mode.", got, f"df > {least} and spread > 0", "raise df or spread")
            )
        mean, spread = tuple(np.asarray(loc, float).tolist()), tuple(np.asarray(scale, float).tolist())
        return dataclasses.replace(self, mean=mean, spread=spread, df=df, dim=d)

    def prior(self, num: int) -> Tree:
        d, df = self.dim, self.df
        squares = df * jnp.asarray(self.spread) ** 2
        zeros = jnp.zeros((num, d))
        if self.covariance == "full":
            ones = jnp.ones(num)
            return {"number": self.strength * ones, "sum": zeros, "square": ones[:, None, None] * jnp.diag(squares), "df": (df - d) * ones}
        if self.covariance == "tied":  # one Wishart beside K means: |Λ| has the K exponents ½ of theirs
            return {
                "number": jnp.full(num, self.strength),
                "sum": zeros,
                "square": jnp.diag(squares),
                "df": jnp.asarray(df - d - 1.0 + num),
            }
        if self.covariance == "diagonal":
            # A Wishart's diagonal entry is Gamma((ν − d + 1)/2): the same marginal spread as in the full case.
            ones = jnp.ones((num, d))
            return {"number": self.strength * ones, "sum": zeros, "square": ones * squares, "df": (df - d) * ones}
        ones = jnp.ones(num)
        return {"number": self.strength * ones, "sum": zeros, "square": ones * jnp.sum(squares), "df": d * (df - d) * ones}

    def log_partition(self, counts: Tree) -> Array:
        number, total, square, df = counts["number"], counts["sum"], counts["square"], counts["df"]
        d = total.shape[-1]
        if self.covariance in ("full", "tied"):
            means = 0.5 * d * (LOG_2PI - jnp.log(number))
            scatter = square - _outer(total, number, shared=self.covariance == "tied")
            nu = df + d if self.covariance == "full" else df - total.shape[0] + d + 1.0
            logdet = 2.0 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(scatter), axis1=-2, axis2=-1)), axis=-1)
            return jnp.sum(means) + jnp.sum(0.5 * nu * d * math.log(2.0) + multigammaln(0.5 * nu, d) - 0.5 * nu * logdet)
        shape, rate = self._gamma(counts)
        columns = 1 if self.covariance == "diagonal" else d  # that share a precision
        return jnp.sum(0.5 * columns * (LOG_2PI - jnp.log(number)) + gammaln(shape) - shape * jnp.log(rate))

    def _gamma(self, counts: Tree) -> tuple[Array, Array]:
        """Shape and rate of the precisions, one a column ("diagonal") or one a member ("spherical")."""
        number, total, square, df = counts["number"], counts["sum"], counts["square"], counts["df"]
        if self.covariance == "diagonal":
            return 0.5 * (df + 1.0), 0.5 * (square - total**2 / number)
        return 0.5 * (df - total.shape[-1]) + 1.0, 0.5 * (square - jnp.sum(total**2, axis=-1) / number)

    def natural(self, params: Tree) -> Tree:
        mean = params["mean"]
        if self.covariance in ("diagonal", "spherical"):
            precision = jnp.exp(params["log_precision"])
            if self.covariance == "diagonal":
                return {
                    "number": -0.5 * precision * mean**2,
                    "sum": precision * mean,
                    "square": -0.5 * precision,
                    "df": 0.5 * params["log_precision"],
                }
            return {
                "number": -0.5 * precision * jnp.sum(mean**2, axis=-1),
                "sum": precision[:, None] * mean,
                "square": -0.5 * precision,
                "df": 0.5 * params["log_precision"],
            }
        factor = factor_of(params)
        half = jnp.einsum("...ij,...i->...j", factor, mean)
        precision = factor @ jnp.swapaxes(factor, -1, -2)
        return {
            "number": -0.5 * jnp.sum(half**2, axis=-1),
            "sum": jnp.einsum("...ij,...j->...i", factor, half),
            "square": -0.5 * precision,
            "df": jnp.sum(params["log_diagonal"], axis=-1),
        }

    def log_jacobian(self, params: Tree) -> Array:
        if "log_precision" in params:
            return jnp.sum(params["log_precision"])
        return log_jacobian(params)

    def mode(self, counts: Tree) -> Tree:
        """μ = sum/number, Λ = df·scatter⁻¹, scatter = square − sum sumᵀ/number."""
        number, total, square, df = counts["number"], counts["sum"], counts["square"], counts["df"]
        if self.covariance == "diagonal":
            return {"mean": total / number, "log_precision": jnp.log(df) - jnp.log(square - total**2 / number)}
        mean = total / number[:, None]
        if self.covariance == "spherical":
            return {"mean": mean, "log_precision": jnp.log(df) - jnp.log(square - jnp.sum(total**2, axis=-1) / number)}
        scatter = square - _outer(total, number, shared=self.covariance == "tied")
        return {"mean": mean} | parameters_of(jnp.linalg.inv(scatter) * df[..., None, None])

    def draw(self, key: Key, counts: Tree) -> Tree:
        number, total, square, df = counts["number"], counts["sum"], counts["square"], counts["df"]
        key_precision, key_mean = jax.random.split(key)
        d = total.shape[-1]
        noise = jax.random.normal(key_mean, total.shape)
        if self.covariance in ("diagonal", "spherical"):
            shape, rate = self._gamma(counts)
            log_precision = jax.random.loggamma(key_precision, shape) - jnp.log(rate)
            if self.covariance == "diagonal":
                mean = total / number + noise * jnp.exp(-0.5 * log_precision) / jnp.sqrt(number)
            else:
                mean = total / number[:, None] + noise * (jnp.exp(-0.5 * log_precision) / jnp.sqrt(number))[:, None]
            return {"mean": mean, "log_precision": log_precision}
        tied = self.covariance == "tied"
        nu = df - total.shape[0] + d + 1.0 if tied else df + d
        scatter = square - _outer(total, number, shared=tied)
        key_diagonal, key_lower = jax.random.split(key_precision)
        precision = draw_wishart(key_diagonal, key_lower, nu, scatter)
        root = jnp.linalg.cholesky(precision)
        root = jnp.broadcast_to(root, (total.shape[0], d, d)) if tied else root
        spread = solve_triangular(root, noise[..., None], lower=True, trans=1)[..., 0]
        return {"mean": total / number[:, None] + spread / jnp.sqrt(number)[:, None]} | parameters_of(precision)

    def log_terms(self, natural: Tree, y: Array) -> Array:
        y = y - jnp.asarray(self.mean)
        if self.covariance == "diagonal":
            seen = jnp.isfinite(y)
            y, ones = jnp.where(seen, y, 0.0), seen.astype(y.dtype)
            flat = ones @ (natural["number"] + natural["df"]).T + y @ natural["sum"].T + (y**2) @ natural["square"].T
            return flat - 0.5 * LOG_2PI * jnp.sum(ones, axis=-1, keepdims=True)
        d = y.shape[-1]
        linear = y @ natural["sum"].T + natural["number"] - 0.5 * d * LOG_2PI
        if self.covariance == "spherical":
            return linear + jnp.sum(y**2, axis=-1, keepdims=True) * natural["square"] + d * natural["df"]
        return linear + natural["df"] + _quadratic(natural["square"], y)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        y = y - jnp.asarray(self.mean)
        if self.covariance == "diagonal":
            seen = jnp.isfinite(y)
            y, number = jnp.where(seen, y, 0.0), shares.T @ seen.astype(y.dtype)
            return {"number": number, "sum": shares.T @ y, "square": shares.T @ y**2, "df": number}
        number, total = jnp.sum(shares, axis=0), shares.T @ y
        if self.covariance == "spherical":
            return {"number": number, "sum": total, "square": shares.T @ jnp.sum(y**2, axis=-1), "df": y.shape[-1] * number}
        if self.covariance == "tied":
            square = (y * jnp.sum(shares, axis=-1, keepdims=True)).T @ y
            return {"number": number, "sum": total, "square": square, "df": jnp.sum(number)}
        square = jax.lax.map(lambda share: (y * share[:, None]).T @ y, shares.T)
        return {"number": number, "sum": total, "square": square, "df": number}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        named = self.constrain(params)
        roots = jnp.linalg.cholesky(named["covariance"])
        noise = jax.random.normal(key, (len(labels), named["mean"].shape[-1]))
        return named["mean"][labels] + jnp.einsum("nij,nj->ni", roots[labels], noise)

    def constrain(self, params: Tree) -> dict[str, Array]:
        mean = params["mean"] + jnp.asarray(self.mean)
        num, d = mean.shape
        if self.covariance == "diagonal":
            return {"mean": mean, "covariance": jnp.exp(-params["log_precision"])[..., None] * jnp.eye(d)}
        if self.covariance == "spherical":
            return {"mean": mean, "covariance": jnp.exp(-params["log_precision"])[:, None, None] * jnp.eye(d)}
        return {"mean": mean, "covariance": jnp.broadcast_to(inverse_of(factor_of(params)), (num, d, d))}


@dataclasses.dataclass(frozen=True)
class StudentT(Gaussian):
    """y ~ t_{freedom}(μ, Λ⁻¹): a Gaussian whose precision is uΛ, u ~ Gamma(freedom/2, freedom/2) a row. Given t, u sums out and E[u] weighs
    the row: outliers count for little. Prior as for `Gaussian`, covariance "full", "tied" or "spherical"."""

    freedom: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_concentration(self.freedom)
        if self.covariance == "diagonal":
            raise ModelError(message("One scale a row needs whole rows.", "'diagonal'", "'full', 'tied' or 'spherical'", "use 'spherical'"))

    def log_terms(self, natural: Tree, y: Array) -> Array:
        """∫ Gamma(u) exp(½d log u + t_df − ½uδ) du, δ = −2(t_number + ⟨y, t_sum⟩ + ⟨yyᵀ, t_square⟩)."""
        d, half = y.shape[-1], 0.5 * self.freedom
        delta, logdet = self._distance(natural, y)
        level = gammaln(half + 0.5 * d) - gammaln(half) - 0.5 * d * (math.log(self.freedom) + math.log(math.pi))
        return level + logdet - (half + 0.5 * d) * jnp.log1p(delta / self.freedom)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        delta, _ = self._distance(natural, y)
        scaled = shares * (self.freedom + y.shape[-1]) / (self.freedom + delta)
        counts = super().counts(scaled, y)
        number = jnp.sum(shares, axis=0)
        df = {"full": number, "tied": jnp.sum(number), "spherical": y.shape[-1] * number}[self.covariance]
        return counts | {"df": df}

    def draw_scales(self, key: Key, natural: Tree, y: Array, labels: Array) -> Array:
        """u | y, label: (n,), for sampling; E[u] in `counts` is its mean."""
        delta = jnp.take_along_axis(self._distance(natural, y)[0], labels[:, None], axis=1)[:, 0]
        return jax.random.gamma(key, 0.5 * (self.freedom + y.shape[-1]), delta.shape) / (0.5 * (self.freedom + delta))

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        key_scale, key_noise = jax.random.split(key)
        centre = self.constrain(params)["mean"][labels]
        u = jax.random.gamma(key_scale, 0.5 * self.freedom, (len(labels), 1)) / (0.5 * self.freedom)
        return centre + (super().simulate(key_noise, params, labels) - centre) / jnp.sqrt(u)

    def _distance(self, natural: Tree, y: Array) -> tuple[Array, Array]:
        d = y.shape[-1]
        logdet = natural["df"] * (d if self.covariance == "spherical" else 1)
        return -2.0 * (super().log_terms(natural, y) + 0.5 * d * LOG_2PI - logdet), logdet


def _outer(total: Array, number: Array, shared: bool) -> Array:
    """Σ sum sumᵀ / number: a member, or over all of them."""
    scaled = total / number[:, None]
    return scaled.T @ total if shared else scaled[:, :, None] * total[:, None, :]


def _quadratic(square: Array, y: Array) -> Array:
    """⟨yyᵀ, S⟩ for S (K, d, d) or (d, d); (n, K) or (n, 1)."""
    if square.ndim == 2:
        return jnp.sum((y @ square) * y, axis=-1, keepdims=True)
    return jax.lax.map(lambda s: jnp.sum((y @ s) * y, axis=-1), square).T
