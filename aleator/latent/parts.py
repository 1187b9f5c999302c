"""What a component emits: conjugate families of observations, shared by mixtures, hidden Markov models and single conjugate pairs.

Observations are rows y (n, d); a part has K members (components, states). Missing entries are NaN where `missing` says so: they count for
nothing. Each file-level class is one family: its prior in the user's words, pseudo-counts η inside (`aleator.latent._conjugate`).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln, multigammaln

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import Family, log_beta
from aleator.latent.weights import Dirichlet, check_concentration

COVARIANCES = ("full", "tied", "diagonal", "spherical")
LOG_2PI = math.log(2.0 * math.pi)
WITHIN = 0.25  # prior spread within a member, as a share of that of all rows


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
        centre, scale = _moments(y)
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
        if self.covariance == "diagonal":
            shape, rate = 0.5 * (df + 1.0), 0.5 * (square - total**2 / number)
            return jnp.sum(0.5 * (LOG_2PI - jnp.log(number)) + gammaln(shape) - shape * jnp.log(rate))
        shape, rate = 0.5 * (df - d) + 1.0, 0.5 * (square - jnp.sum(total**2, axis=-1) / number)
        return jnp.sum(0.5 * d * (LOG_2PI - jnp.log(number)) + gammaln(shape) - shape * jnp.log(rate))

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
        factor = _factor(params)
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
        d = params["log_diagonal"].shape[-1]  # Λ = LLᵀ: |dΛ/dL| = 2ᵈ Π L_ii^{d−i+1}, and L_ii = exp(log_diagonal)
        powers = d + 1.0 - np.arange(d)
        return jnp.sum(params["log_diagonal"] * powers) + params["log_diagonal"].size * math.log(2.0)

    def mode(self, counts: Tree) -> Tree:
        """μ = sum/number, Λ = df·scatter⁻¹, scatter = square − sum sumᵀ/number."""
        number, total, square, df = counts["number"], counts["sum"], counts["square"], counts["df"]
        if self.covariance == "diagonal":
            return {"mean": total / number, "log_precision": jnp.log(df) - jnp.log(square - total**2 / number)}
        mean = total / number[:, None]
        if self.covariance == "spherical":
            return {"mean": mean, "log_precision": jnp.log(df) - jnp.log(square - jnp.sum(total**2, axis=-1) / number)}
        scatter = square - _outer(total, number, shared=self.covariance == "tied")
        return {"mean": mean} | _lower(jnp.linalg.inv(scatter) * df[..., None, None])

    def draw(self, key: Key, counts: Tree) -> Tree:
        number, total, square, df = counts["number"], counts["sum"], counts["square"], counts["df"]
        key_precision, key_mean = jax.random.split(key)
        d = total.shape[-1]
        noise = jax.random.normal(key_mean, total.shape)
        if self.covariance in ("diagonal", "spherical"):
            if self.covariance == "diagonal":
                shape, rate = 0.5 * (df + 1.0), 0.5 * (square - total**2 / number)
                log_precision = jax.random.loggamma(key_precision, shape) - jnp.log(rate)
                return {"mean": total / number + noise * jnp.exp(-0.5 * log_precision) / jnp.sqrt(number), "log_precision": log_precision}
            shape, rate = 0.5 * (df - d) + 1.0, 0.5 * (square - jnp.sum(total**2, axis=-1) / number)
            log_precision = jax.random.loggamma(key_precision, shape) - jnp.log(rate)
            mean = total / number[:, None] + noise * (jnp.exp(-0.5 * log_precision) / jnp.sqrt(number))[:, None]
            return {"mean": mean, "log_precision": log_precision}
        tied = self.covariance == "tied"
        nu = df - total.shape[0] + d + 1.0 if tied else df + d
        scatter = square - _outer(total, number, shared=tied)
        # Bartlett: Λ = R⁻ᵀ A Aᵀ R⁻¹ with scatter = R Rᵀ, A lower, A_ii² ~ χ²(ν − i), A_ij ~ N(0, 1).
        key_diagonal, key_lower = jax.random.split(key_precision)
        chi2 = 2.0 * jax.random.gamma(key_diagonal, 0.5 * (nu[..., None] - jnp.arange(d)))
        bartlett = jnp.tril(jax.random.normal(key_lower, scatter.shape), -1) + jnp.sqrt(chi2)[..., None] * jnp.eye(d)
        upper = jnp.linalg.cholesky(jnp.linalg.inv(scatter)) @ bartlett
        precision = upper @ jnp.swapaxes(upper, -1, -2)
        root = jnp.linalg.cholesky(precision)
        root = jnp.broadcast_to(root, (total.shape[0], d, d)) if tied else root
        spread = solve_triangular(root, noise[..., None], lower=True, trans=1)[..., 0]
        return {"mean": total / number[:, None] + spread / jnp.sqrt(number)[:, None]} | _lower(precision)

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
        factor = _factor(params)
        inverse = solve_triangular(factor, jnp.broadcast_to(jnp.eye(d), factor.shape), lower=True)
        return {"mean": mean, "covariance": jnp.broadcast_to(jnp.swapaxes(inverse, -1, -2) @ inverse, (num, d, d))}


@dataclasses.dataclass(frozen=True)
class KnownGaussian(Part):
    """y ~ N(μ, σ²I) with σ known, μ ~ N(mean, prior_scale²I), in the coordinates μ. t = (−½‖μ‖²/σ², μ/σ²), counts "number", "sum".

    centres: a prior mean for each member, relative to `mean`, where they are not to be exchangeable.
    """

    scale: float = 1.0
    prior_scale: float = 1.0
    mean: float = 0.0
    centres: tuple[float, ...] = ()
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.scale)
        check_concentration(self.prior_scale)

    def bind(self, y: np.ndarray) -> KnownGaussian:
        check_finite(y, missing=True)
        return dataclasses.replace(self, dim=y.shape[1])

    def prior(self, num: int) -> Tree:
        if self.centres and len(self.centres) != num:
            raise ModelError(
                message("Centres and members do not match.", f"{len(self.centres)} centres", f"{num}", "pass one centre a member")
            )
        number = jnp.full((num, self.dim), (self.scale / self.prior_scale) ** 2)
        return {"number": number, "sum": number * jnp.asarray(self.centres)[:, None] if self.centres else jnp.zeros((num, self.dim))}

    def log_partition(self, counts: Tree) -> Array:
        number, total = counts["number"], counts["sum"]
        return jnp.sum(0.5 * (LOG_2PI + 2.0 * math.log(self.scale) - jnp.log(number)) + 0.5 * total**2 / (number * self.scale**2))

    def natural(self, params: Tree) -> Tree:
        return {"number": -0.5 * (params["mean"] / self.scale) ** 2, "sum": params["mean"] / self.scale**2}

    def log_jacobian(self, params: Tree) -> Array:
        return jnp.zeros(())

    def mode(self, counts: Tree) -> Tree:
        return {"mean": counts["sum"] / counts["number"]}

    def draw(self, key: Key, counts: Tree) -> Tree:
        noise = jax.random.normal(key, counts["sum"].shape)
        return {"mean": counts["sum"] / counts["number"] + self.scale * noise / jnp.sqrt(counts["number"])}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        seen = jnp.isfinite(y)
        y, ones = jnp.where(seen, y - self.mean, 0.0), seen.astype(y.dtype)
        base = -0.5 * jnp.sum((y / self.scale) ** 2 + ones * (LOG_2PI + 2.0 * math.log(self.scale)), axis=-1, keepdims=True)
        return base + ones @ natural["number"].T + y @ natural["sum"].T

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        seen = jnp.isfinite(y)
        return {"number": shares.T @ seen.astype(shares.dtype), "sum": shares.T @ jnp.where(seen, y - self.mean, 0.0)}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        mean = self.constrain(params)["mean"][labels]
        return mean + self.scale * jax.random.normal(key, mean.shape)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"mean": params["mean"] + self.mean}


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


@dataclasses.dataclass(frozen=True)
class Bernoulli(Part):
    """y ∈ {0, 1}ᵈ, independent given the member: y_j ~ Bernoulli(p_j), p_j ~ Beta(a, b), in the coordinates p. t = (log p, log(1 − p))."""

    a: float = 1.0
    b: float = 1.0
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.a)
        check_concentration(self.b)

    def bind(self, y: np.ndarray) -> Bernoulli:
        check_finite(y, missing=True)
        check_values(y, (y == 0) | (y == 1), "zeros and ones", "code the two outcomes as 0 and 1")
        return dataclasses.replace(self, dim=y.shape[1])

    def prior(self, num: int) -> Tree:
        return {"ones": jnp.full((num, self.dim), self.a - 1.0), "zeros": jnp.full((num, self.dim), self.b - 1.0)}

    def log_partition(self, counts: Tree) -> Array:
        return jnp.sum(log_beta(counts["ones"] + 1.0, counts["zeros"] + 1.0))

    def natural(self, params: Tree) -> Tree:
        return {"ones": jax.nn.log_sigmoid(params["logit"]), "zeros": jax.nn.log_sigmoid(-params["logit"])}

    def log_jacobian(self, params: Tree) -> Array:
        natural = self.natural(params)
        return jnp.sum(natural["ones"] + natural["zeros"])

    def mode(self, counts: Tree) -> Tree:
        small = 1e-10  # the mode may lie on the border, where the logit is infinite
        return {"logit": jnp.log(jnp.maximum(counts["ones"], small)) - jnp.log(jnp.maximum(counts["zeros"], small))}

    def draw(self, key: Key, counts: Tree) -> Tree:
        key_ones, key_zeros = jax.random.split(key)
        return {"logit": jax.random.loggamma(key_ones, counts["ones"] + 1.0) - jax.random.loggamma(key_zeros, counts["zeros"] + 1.0)}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        ones, zeros = (y == 1).astype(natural["ones"].dtype), (y == 0).astype(natural["ones"].dtype)
        return ones @ natural["ones"].T + zeros @ natural["zeros"].T

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        return {"ones": shares.T @ (y == 1).astype(shares.dtype), "zeros": shares.T @ (y == 0).astype(shares.dtype)}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        p = self.constrain(params)["probability"][labels]
        return (jax.random.uniform(key, p.shape) < p).astype(p.dtype)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"probability": jax.nn.sigmoid(params["logit"])}


@dataclasses.dataclass(frozen=True)
class Poisson(Part):
    """y ∈ {0, 1, …}ᵈ, y_j ~ Poisson(λ_j), λ_j ~ Gamma(shape, rate), in the coordinates λ. t = (log λ, −λ), counts "sum", "number".

    rate None: from the data at `bind`, so that the prior mean shape/rate is their mean.
    """

    shape: float = 1.0
    rate: Any = None
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.shape)

    def bind(self, y: np.ndarray) -> Poisson:
        check_finite(y, missing=True)
        check_values(y, (y >= 0) & (y == np.floor(y)), "whole numbers ≥ 0", "pass counts, not rates")
        if self.rate is not None:
            rate = np.broadcast_to(np.asarray(self.rate, float), (y.shape[1],))
            if not np.all(rate > 0):
                raise ModelError(message("The prior of the rates is improper.", f"rate={self.rate}", "rate > 0", "pass e.g. rate=1.0"))
        else:
            mean = np.nansum(y, axis=0) / np.maximum(np.isfinite(y).sum(axis=0), 1)
            rate = self.shape / np.where(mean > 0, mean, 1.0)
        return dataclasses.replace(self, rate=tuple(rate.tolist()), dim=y.shape[1])

    def prior(self, num: int) -> Tree:
        return {"sum": jnp.full((num, self.dim), self.shape - 1.0), "number": jnp.broadcast_to(jnp.asarray(self.rate), (num, self.dim))}

    def log_partition(self, counts: Tree) -> Array:
        return jnp.sum(gammaln(counts["sum"] + 1.0) - (counts["sum"] + 1.0) * jnp.log(counts["number"]))

    def natural(self, params: Tree) -> Tree:
        return {"sum": params["log_rate"], "number": -jnp.exp(params["log_rate"])}

    def log_jacobian(self, params: Tree) -> Array:
        return jnp.sum(params["log_rate"])

    def mode(self, counts: Tree) -> Tree:
        return {"log_rate": jnp.log(jnp.maximum(counts["sum"], 1e-10)) - jnp.log(counts["number"])}

    def draw(self, key: Key, counts: Tree) -> Tree:
        return {"log_rate": jax.random.loggamma(key, counts["sum"] + 1.0) - jnp.log(counts["number"])}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        seen = jnp.isfinite(y)
        y, ones = jnp.where(seen, y, 0.0), seen.astype(natural["sum"].dtype)
        return y @ natural["sum"].T + ones @ natural["number"].T - jnp.sum(gammaln(y + 1.0), axis=-1, keepdims=True)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        seen = jnp.isfinite(y)
        return {"sum": shares.T @ jnp.where(seen, y, 0.0), "number": shares.T @ seen.astype(shares.dtype)}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        return jax.random.poisson(key, self.constrain(params)["rate"][labels]).astype(params["log_rate"].dtype)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"rate": jnp.exp(params["log_rate"])}


@dataclasses.dataclass(frozen=True)
class Categorical(Part):
    """One label y ∈ {0 … C−1} a row, y ~ Categorical(π), π ~ Dirichlet(concentration). t = log π; NaN is a missing label."""

    concentration: float = 1.0
    num_classes: int | None = None
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.concentration)

    @property
    def family(self) -> Dirichlet:
        return Dirichlet(self.concentration)

    def bind(self, y: np.ndarray) -> Categorical:
        check_finite(y, missing=True)
        if y.shape[1] != 1:
            raise DataError(message("Labels come one a row.", f"{y.shape[1]} columns", "one column", "pass y of shape (N,)"))
        limit = math.inf if self.num_classes is None else self.num_classes
        expected = "whole numbers ≥ 0" + ("" if self.num_classes is None else f" and < {self.num_classes}")
        check_values(y, (y >= 0) & (y == np.floor(y)) & (y < limit), expected, "code labels as 0, 1, …")
        seen = y[np.isfinite(y)]
        num_classes = self.num_classes or (int(seen.max()) + 1 if seen.size else 1)
        return dataclasses.replace(self, num_classes=num_classes, dim=1)

    def prior(self, num: int) -> Tree:
        return {"labels": self.family.prior(self.num_classes, (num,))}  # type: ignore[arg-type]

    def log_partition(self, counts: Tree) -> Array:
        return self.family.log_partition(counts["labels"])

    def natural(self, params: Tree) -> Tree:
        return {"labels": self.family.natural(params["ratio"])}

    def log_jacobian(self, params: Tree) -> Array:
        return self.family.log_jacobian(params["ratio"])

    def mode(self, counts: Tree) -> Tree:
        return {"ratio": self.family.mode(counts["labels"])}

    def draw(self, key: Key, counts: Tree) -> Tree:
        return {"ratio": self.family.draw(key, counts["labels"])}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        table = natural["labels"].T  # (C, K)
        label = jnp.where(jnp.isfinite(y[:, 0]), y[:, 0], 0).astype(jnp.int32)
        return jnp.where(jnp.isfinite(y), table[label], 0.0)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        label = jnp.where(jnp.isfinite(y[:, 0]), y[:, 0], self.num_classes).astype(jnp.int32)  # missing: beyond the last, dropped
        return {"labels": jax.ops.segment_sum(shares, label, num_segments=self.num_classes + 1)[:-1].T}  # type: ignore[operator]

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        logs = self.natural(params)["labels"]
        return jax.random.categorical(key, logs[labels])[:, None].astype(logs.dtype)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"probability": jnp.exp(self.natural(params)["labels"])}


PARTS: dict[str, type[Part]] = {
    "gaussian": Gaussian,
    "known_gaussian": KnownGaussian,
    "student_t": StudentT,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "categorical": Categorical,
}


def as_part(given: Any) -> Part:
    """A part by its name, or as it is."""
    if isinstance(given, str) and given in PARTS:
        return PARTS[given]()
    if not isinstance(given, Part):
        raise ModelError(
            message("This is not a part.", repr(given), f"one of {list(PARTS)} or an object of al.latent.parts", "pass e.g. 'gaussian'")
        )
    return given


def check_finite(y: np.ndarray, missing: bool) -> None:
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


def _moments(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of what is there of each column; 0 where there is nothing."""
    seen = np.isfinite(y)
    number, filled = np.maximum(seen.sum(axis=0), 1), np.where(seen, y, 0.0)
    mean = filled.sum(axis=0) / number
    return mean, np.sqrt((np.where(seen, filled - mean, 0.0) ** 2).sum(axis=0) / number)


def spread_out(scale: np.ndarray) -> np.ndarray:
    """Standard deviations to divide by: those of constant columns, or of one row, are a millionth of the largest, or 1."""
    largest = scale.max()
    return np.maximum(scale, 1e-6 * largest if largest > 0 else 1.0)


def _outer(total: Array, number: Array, shared: bool) -> Array:
    """Σ sum sumᵀ / number: a member, or over all of them."""
    scaled = total / number[:, None]
    return scaled.T @ total if shared else scaled[:, :, None] * total[:, None, :]


def _quadratic(square: Array, y: Array) -> Array:
    """⟨yyᵀ, S⟩ for S (K, d, d) or (d, d); (n, K) or (n, 1)."""
    if square.ndim == 2:
        return jnp.sum((y @ square) * y, axis=-1, keepdims=True)
    return jax.lax.map(lambda s: jnp.sum((y @ s) * y, axis=-1), square).T


def _factor(params: Tree) -> Array:
    """L, lower, from the logs of its diagonal and what is below it, row by row."""
    d = params["log_diagonal"].shape[-1]
    rows, columns = np.tril_indices(d, -1)
    diagonal = jnp.exp(params["log_diagonal"])[..., None] * jnp.eye(d)
    return diagonal.at[..., rows.astype(np.int32), columns.astype(np.int32)].set(params["lower"])


def _lower(precision: Array) -> Tree:
    """The unconstrained parameters of Λ = LLᵀ."""
    factor = jnp.linalg.cholesky(0.5 * (precision + jnp.swapaxes(precision, -1, -2)))
    rows, columns = np.tril_indices(factor.shape[-1], -1)
    diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
    return {"log_diagonal": jnp.log(diagonal), "lower": factor[..., rows.astype(np.int32), columns.astype(np.int32)]}
