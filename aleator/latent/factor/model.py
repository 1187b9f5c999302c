"""The factor model: its priors, its steps for EM, CAVI and Gibbs, and the questions it answers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._random import as_key, split
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family, inner, real_weights
from aleator.latent._model import ConjugateLatent, in_double, no_inputs, observations
from aleator.latent._precision import inverse_of
from aleator.latent.factor._hidden import Hidden, bounded, gaussian, logistic, whiten
from aleator.latent.factor.columns import Columns
from aleator.latent.parts import check_binary, check_counts, check_finite, check_labels, moments, spread_out
from aleator.latent.weights import check_concentration

FAMILIES = ("gaussian", "bernoulli", "poisson", "categorical")
MEAN_STRENGTH = 1e-3  # rows that the prior of the means is worth
RELEVANCE = 1e-3  # shape and rate of the prior of α_k


@dataclasses.dataclass(frozen=True)
class FactorModel(ConjugateLatent):
    """z ~ N(0, I), y_j ~ family with natural parameter w_jᵀz + m_j (D6).

    family: "gaussian" with noise "isotropic" (probabilistic PCA) or "diagonal" (factor analysis): z sums out exactly. "bernoulli": z sums
    out up to the bound of Jaakkola and Jordan, the optimum of which is closed form in turn; al.EM and al.CAVI climb it. "poisson" (log rates)
    and "categorical" (labels 0 … C−1 in every column, C log odds each): a Gaussian q(z) a row at its optimum bounds log p(y | θ), for
    al.MAP and every other method that asks for log_likelihood. Missing entries are NaN and count for nothing, everywhere.

    ard: precision α_k ~ Gamma(1e-3, 1e-3) of every factor's loadings, learned, so that factors nobody needs are switched off (`relevance`).
    strength: precision of the loadings, without ard, in units of the noise's (Gaussian) or of their own.
    """

    num_factors: int
    family: str = "gaussian"
    noise: str = "diagonal"
    ard: bool = False
    strength: Any = None
    num_classes: Any = None
    centre: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    num_rows: int | None = None
    complete: bool = False

    num_invariants = 16

    def __post_init__(self) -> None:
        if isinstance(self.num_factors, bool) or not isinstance(self.num_factors, (int, np.integer)) or self.num_factors < 1:
            raise ModelError(
                message("A factor model needs factors.", repr(self.num_factors), "a whole number ≥ 1", "pass e.g. FactorModel(2)")
            )
        for name, value, allowed in (("family", self.family, FAMILIES), ("noise", self.noise, ("isotropic", "diagonal"))):
            if value not in allowed:
                raise ModelError(message(f"Unknown {name}.", repr(value), f"one of {allowed}", "choose one of them"))
        if self.strength is None:
            object.__setattr__(self, "strength", 0.01 if self.family == "gaussian" else 0.1)
        check_concentration(self.strength)

    def bind(self, x: Tree, y: Tree) -> FactorModel:
        no_inputs(self, x)
        y = observations(y)
        self._check_values(y)
        seen = np.isfinite(y)
        if not seen.any():
            raise DataError(message("Every entry is missing.", f"{y.size} NaN", "at least one value", "check how the data was read"))
        mean, scale = moments(y)
        spread, num_classes = (), self.num_classes
        if self.family == "gaussian":
            centre, spread = mean, tuple(spread_out(scale).tolist())
        elif self.family == "bernoulli":
            centre = np.zeros(y.shape[1])
        elif self.family == "poisson":
            centre = np.log(mean + 0.5 / np.maximum(seen.sum(axis=0), 1))
        else:
            num_classes = self.num_classes or max(int(np.nanmax(y)) + 1, 2)
            shares = (y[:, :, None] == np.arange(num_classes)).sum(axis=0) + 0.5
            centre = np.log(shares / shares.sum(axis=1, keepdims=True)).ravel()
        return dataclasses.replace(
            self, num_classes=num_classes, centre=tuple(centre.tolist()), spread=spread, num_rows=len(y), complete=bool(seen.all())
        )

    @property
    def columns(self) -> Columns:
        precision = (self.strength,) * self.num_factors + (MEAN_STRENGTH if self.family == "gaussian" else 0.1,)
        if self.family != "gaussian":
            return Columns(precision, known=True)
        return Columns(precision, tuple(0.1 * s**2 for s in self.spread), shared=self.noise == "isotropic")

    @property
    def families(self) -> dict[str, Family]:
        return {"columns": self.columns}

    def prior_counts(self) -> dict[str, Tree]:
        """η₀; with ard without the loadings' own precision, which every step counts anew from what is known of α."""
        counts = self.columns.prior(len(self.centre))
        if self.ard:
            counts["square"] = counts["square"] - self._on_loadings(jnp.full(self.num_factors, self.strength))
        return {"columns": counts}

    def _on_loadings(self, precision: Array) -> Array:
        """diag(precision, 0), (p, p)."""
        return jnp.diag(jnp.concatenate([precision, jnp.zeros(1)]))

    # ---- ARD: α_k ~ Gamma(a, a), loadings of factor k ~ N(0, 1/(τα_k)) ----

    def _sizes(self, natural: dict[str, Tree]) -> Array:
        """Σ_j τ_j w_jk² of each factor, or its expectation, (q,)."""
        return -2.0 * jnp.sum(jnp.diagonal(natural["columns"]["square"], axis1=-2, axis2=-1), axis=0)[:-1]

    def _alpha(self, natural: dict[str, Tree]) -> tuple[float, Array]:
        """Shape and rates of α given the loadings."""
        return RELEVANCE + 0.5 * len(self.centre), RELEVANCE + 0.5 * self._sizes(natural)

    def _relevance_term(self, natural: dict[str, Tree]) -> Array:
        """log ∫ p(α) Π_j N(w_j; 0, 1/(τ_j α)) dα less the part that `prior_counts` of strength α = 1 have, over all factors."""
        shape, rate = self._alpha(natural)
        flat = RELEVANCE * math.log(RELEVANCE) - math.lgamma(RELEVANCE) + math.lgamma(shape)
        return jnp.sum(flat - shape * jnp.log(rate))

    def _unit_partition(self) -> Array:
        """A(η₀) with the loadings' precision 1."""
        family = dataclasses.replace(self.columns, precision=(1.0,) * self.num_factors + self.columns.precision[-1:])
        return family.log_partition(family.prior(len(self.centre)))

    def penalty(self, params: Tree) -> Array:
        if not self.ard:
            return super().penalty(params)
        natural = self.natural(params)
        return inner(self.prior_counts(), natural) - self._unit_partition() + self._relevance_term(natural)

    def log_prior(self, params: Tree) -> Array:
        return self.penalty(params) + self.columns.log_jacobian(params["columns"])

    def divergence(self, counts: dict[str, Tree]) -> Array:
        """KL(q(W, τ) q(α) ‖ p), q(α) at its optimum."""
        if not self.ard:
            return super().divergence(counts)
        natural = self.expected(counts)
        gap = jax.tree.map(jnp.subtract, counts, self.prior_counts())
        own = self.columns.log_partition(counts["columns"])
        return inner(gap, natural) - own + self._unit_partition() - self._relevance_term(natural)

    def sample_prior(self, key: Key) -> Tree:
        return {"columns": self.columns.draw(key, self.columns.prior(len(self.centre)))}

    def init(self, key: Key) -> Tree:
        """Small loadings about the mean row: draws of a wide prior overflow exponential families."""
        params = {"weights": 0.1 * jax.random.normal(key, (len(self.centre), self.num_factors + 1))}
        if self.family == "gaussian":
            scale = jnp.asarray(self.spread)
            params = {
                "weights": params["weights"] * scale[:, None],
                "log_precision": -2.0 * jnp.log(jnp.mean(scale) if self.noise == "isotropic" else scale),
            }
        return {"columns": params}

    # ---- hidden variables ----

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        self._check_closed()
        y = self._rows(batch.y)
        found = self._posterior(natural["columns"], y, self.complete)
        spread = inverse_of(found.root)
        outer = spread + found.mean[..., :, None] * found.mean[..., None, :]
        counts = self._counts(found.mean, outer, found.curve, y, real_weights(batch))
        if self.ard:
            shape, rate = self._alpha(natural)
            counts["columns"]["square"] += self._on_loadings(shape / rate) * (batch.size / self.num_rows)
        return counts, found.terms

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        if self.family != "gaussian":
            raise ModelError(
                message(
                    f"Factors of {self.family} data cannot be drawn given the loadings alone.",
                    "al.Gibbs",
                    "family='gaussian'",
                    "use al.CAVI, al.MAP or al.NUTS",
                )
            )
        key_hidden, key_alpha = jax.random.split(key)
        y = self._rows(batch.y)
        found = self._posterior(natural["columns"], y, self.complete)
        z = found.mean + whiten(found.root, jax.random.normal(key_hidden, found.mean.shape))
        counts = self._counts(z, z[:, :, None] * z[:, None, :], found.curve, y, real_weights(batch))
        if self.ard:
            shape, rate = self._alpha(natural)
            counts["columns"]["square"] += self._on_loadings(jax.random.gamma(key_alpha, shape, rate.shape) / rate)
        return counts

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """Scores on the principal axes with a little noise: also where there are more factors than axes. They are turned at random, but for
        ard, which leaves an axis to each factor and would take long to turn back."""
        self._check_closed()
        key_turn, key_noise = jax.random.split(key)
        y = self._rows(batch.y)
        seen = jnp.isfinite(y)
        number = jnp.maximum(jnp.sum(seen, axis=0), 1)
        filled = jnp.where(seen, y, 0.0) - jnp.sum(jnp.where(seen, y, 0.0), axis=0) / number
        filled = jnp.where(seen, filled, 0.0)
        scale = jnp.sqrt(jnp.mean(filled**2, axis=0))
        filled = filled / jnp.where(scale > 0, scale, 1.0)
        q, width = self.num_factors, min(self.num_factors, filled.shape[1])
        values, axes = jnp.linalg.eigh(filled.T @ filled / len(filled))
        scores = filled @ axes[:, ::-1][:, :width] / jnp.sqrt(jnp.maximum(values[::-1][:width], 1e-3))
        noise = jax.random.normal(key_noise, (len(y), q))
        turn = jnp.linalg.qr(jax.random.normal(key_turn, (q, q)))[0]
        z = jnp.pad(scores, ((0, 0), (0, q - width))) + 0.1 * noise
        z = z if self.ard else z @ turn
        curve = jnp.where(seen, 1.0 if self.family == "gaussian" else 0.25, 0.0)
        counts = self._counts(z, z[:, :, None] * z[:, None, :], curve, y, real_weights(batch))
        if self.ard:
            counts["columns"]["square"] += self._on_loadings(jnp.full(q, self.strength))
        return counts

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(yₙ | θ) for Gaussian y, else a lower bound with its exact gradient, (n,)."""
        return self._terms(params, self._rows(batch.y), self.complete).terms

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """log p(y | θ) at some of the rows: factors may turn and change sign."""
        y = self._rows(batch.y)
        return self._terms(params, y[np.linspace(0, len(y) - 1, self.num_invariants).astype(np.int32)], self.complete).terms

    def _check_closed(self) -> None:
        if self.family not in ("gaussian", "bernoulli"):
            raise ModelError(
                message(
                    f"The {self.family} family has no closed maximisation step.",
                    "al.EM or al.CAVI",
                    "a method that takes gradients",
                    "use al.MAP, al.Variational or al.NUTS, which climb the same bound",
                )
            )

    def _rows(self, y: Array) -> Array:
        """(n, d) doubles, relative to the centre where y is Gaussian."""
        y = jnp.asarray(y).astype(jnp.result_type(float))
        y = y[:, None] if y.ndim == 1 else y
        return y - jnp.asarray(self.centre) if self.family == "gaussian" else y

    def _terms(self, params: Tree, y: Array, complete: bool) -> Hidden:
        if self.family in ("gaussian", "bernoulli"):
            return self._posterior(self.columns.natural(params["columns"]), y, complete)
        weights, centre = params["columns"]["weights"], jnp.asarray(self.centre)
        return jax.vmap(lambda row: bounded(weights, centre, row, self.num_classes if self.family == "categorical" else None))(y)

    def _posterior(self, natural: Tree, y: Array, complete: bool) -> Hidden:
        """q(z) given t or its expectation. Gaussian: exact; Bernoulli: with the bound's slopes at their optimum."""
        seen = jnp.isfinite(y)
        if self.family == "gaussian":
            return gaussian(natural, jnp.where(seen, y, 0.0), seen.astype(y.dtype), complete)
        return logistic(natural, jnp.where(seen, y - 0.5, 0.0), seen.astype(y.dtype))

    def _counts(self, z: Array, outer: Array, curve: Array, y: Array, weight: Array) -> dict[str, Tree]:
        """Σₙ E[T(yₙ, z)]: u = (z, 1), with E[zzᵀ] = outer."""
        n, q = z.shape
        seen = jnp.isfinite(y)
        target = jnp.where(seen, y if self.family == "gaussian" else y - 0.5, 0.0) * weight[:, None]
        inputs = jnp.concatenate([z, jnp.ones((n, 1))], axis=1)
        moments = jnp.concatenate(
            [jnp.concatenate([jnp.broadcast_to(outer, (n, q, q)), z[:, :, None]], axis=2), inputs[:, None, :]], axis=1
        )
        scaled = curve * weight[:, None]
        if self.complete and self.family == "gaussian":
            square: Array = jnp.broadcast_to(jnp.einsum("n,nab->ab", weight, moments), (y.shape[1], q + 1, q + 1))
        else:
            square = (scaled.T @ moments.reshape(n, -1)).reshape(-1, q + 1, q + 1)
        counts = {"cross": target.T @ inputs, "square": square}
        if self.family != "gaussian":
            return {"columns": counts}
        energy, number = jnp.sum(target * jnp.where(seen, y, 0.0), axis=0), jnp.sum(scaled, axis=0)
        total = jnp.sum if self.noise == "isotropic" else lambda values: values
        return {"columns": counts | {"energy": total(energy), "number": total(number)}}

    # ---- questions, at one parameter tree ----

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        """loadings (d, q) and mean (d,) of the natural parameters ((d, C, q) and (d, C) of labels); noise: standard deviations, of Gaussian y."""
        w = jnp.asarray(params["columns"]["weights"])
        offset = 0.0 if self.family == "bernoulli" else jnp.asarray(self.centre)
        named: dict[str, Array] = {"loadings": w[:, :-1], "mean": w[:, -1] + offset}
        if self.family == "categorical":
            named = jax.tree.map(lambda leaf: leaf.reshape(-1, self.num_classes, *leaf.shape[1:]), named)
        if self.family == "gaussian":
            named["noise"] = jnp.exp(-0.5 * jnp.asarray(params["columns"]["log_precision"]))
        return named

    @in_double
    def log_prob(self, params: Tree, y: Any) -> Array:
        """log p(yₙ | θ) of what is there of each row, (n,), nats: exact for Gaussian y, a lower bound otherwise."""
        return self._ask(params, y).terms

    @in_double
    def encode(self, params: Tree, y: Any) -> tuple[Array, Array]:
        """p(z | y, θ), or the best Gaussian: means (n, q) and covariances (n, q, q)."""
        found = self._ask(params, y)
        spread = inverse_of(found.root)
        return found.mean, jnp.broadcast_to(spread, (len(found.mean), *spread.shape[-2:]))

    @in_double
    def simulate(self, key: KeyLike, params: Tree, num_samples: int) -> tuple[Array, Array]:
        """Ancestral: z (n, q), then y (n, d)."""
        key_hidden, key_noise = split(as_key(key), 2)
        z = jax.random.normal(key_hidden, (num_samples, self.num_factors))
        return z, self._emit(key_noise, jax.tree.map(jnp.asarray, params), z)

    @in_double
    def relevance(self, fit: Any) -> np.ndarray:
        """Share of each factor in the loadings' squares, of the fit's mean or draws, in falling order, (q,): factors switched off are near 0."""
        if hasattr(fit.posterior, "counts"):
            sizes = self._sizes(self.expected(jax.tree.map(jnp.asarray, fit.posterior.counts)))
        else:
            params = fit.posterior.sample(jax.random.key(0), 1)
            sizes = self._sizes(self.natural(jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], params)))
        return np.sort(np.asarray(sizes / jnp.sum(sizes)))[::-1]

    @in_double
    def impute(self, key: KeyLike, fit: Any, y: Any, num_samples: int = 100) -> np.ndarray:
        """Completions of y (num_samples, n, d): what is there is kept, missing entries are drawn given it: θ from the posterior, z given the
        row, then the entry. Their mean is the imputation, their spread its uncertainty."""
        y = self.observed(y)
        key_params, key_draws = split(as_key(key), 2)
        params = jax.tree.map(jnp.asarray, fit.posterior.sample(key_params, num_samples))

        def one(item: tuple[Key, Tree]) -> Array:
            key, params = item
            key_hidden, key_noise = jax.random.split(key)
            found = self._terms(params, self._rows(y), complete=False)
            z = found.mean + whiten(found.root, jax.random.normal(key_hidden, found.mean.shape))
            return jnp.where(jnp.isfinite(y), y, self._emit(key_noise, params, z))

        return np.asarray(jax.lax.map(one, (jax.random.split(key_draws, num_samples), params)))

    def maximum_likelihood(self, y: Any) -> Tree:
        """Probabilistic PCA's parameters in closed form (Tipping and Bishop, 1999): W = U(Λ − σ²I)^½ of the q largest eigenvalues of the
        covariance (divided by N), σ² the mean of the others."""
        y = observations(y)
        if self.family != "gaussian" or self.noise != "isotropic":
            got = f"family={self.family!r}, noise={self.noise!r}"
            raise ModelError(message("Only probabilistic PCA has a closed form.", got, "'gaussian', 'isotropic'", "use al.EM"))
        if not np.isfinite(y).all():
            raise DataError(
                message("Entries are missing.", f"{int((~np.isfinite(y)).sum())} NaN", "complete rows", "use al.EM, which sums them out")
            )
        q, d = self.num_factors, y.shape[1]
        if q >= d:
            raise ModelError(
                message("There is no noise left to estimate.", f"{q} factors of {d} columns", f"at most {d - 1} factors", "use fewer")
            )
        self._check_columns(y)
        mean = y.mean(axis=0)
        values, axes = np.linalg.eigh((y - mean).T @ (y - mean) / len(y))
        values, axes = values[::-1], axes[:, ::-1]
        variance = values[q:].mean()
        if not variance > 1e-12 * values[0]:
            raise DataError(
                message(
                    "The likelihood has no maximum: the rows lie in a plane of q dimensions.",
                    f"{len(y)} rows",
                    "more rows than factors",
                    "use fewer factors, or al.EM with its prior",
                )
            )
        loadings = axes[:, :q] * np.sqrt(np.maximum(values[:q] - variance, 0.0))
        weights = np.concatenate([loadings, (mean - np.asarray(self.centre))[:, None]], axis=1)
        return {"columns": {"weights": weights, "log_precision": np.asarray(-np.log(variance))}}

    def _emit(self, key: Key, params: Tree, z: Array) -> Array:
        named = self.constrain(params)
        if self.family == "categorical":
            logits = named["mean"] + jnp.einsum("nk,jck->njc", z, named["loadings"])
            return jax.random.categorical(key, logits).astype(logits.dtype)
        natural = named["mean"] + z @ named["loadings"].T
        if self.family == "gaussian":
            return natural + named["noise"] * jax.random.normal(key, natural.shape)
        if self.family == "bernoulli":
            return (jax.random.uniform(key, natural.shape) < jax.nn.sigmoid(natural)).astype(natural.dtype)
        return jax.random.poisson(key, jnp.exp(natural)).astype(natural.dtype)

    def _ask(self, params: Tree, y: Any) -> Hidden:
        y = self.observed(y)
        return self._terms(jax.tree.map(jnp.asarray, params), self._rows(y), complete=bool(np.isfinite(y).all()))

    def observed(self, y: Any) -> np.ndarray:
        y = observations(y)
        self._check_columns(y)
        self._check_values(y)
        return y

    def about(self, x: Any, y: Any) -> tuple[FactorModel, Batch]:
        model, batch = super().about(x, y)
        # Whether entries are missing is a matter of these rows, not of those of the fit.
        return dataclasses.replace(model, complete=bool(np.isfinite(batch.y).all())), batch

    def _check_values(self, y: np.ndarray) -> None:
        check_finite(y, missing=True)
        if self.family == "bernoulli":
            check_binary(y)
        elif self.family == "poisson":
            check_counts(y)
        elif self.family == "categorical":
            check_labels(y, self.num_classes)

    def _check_columns(self, y: np.ndarray) -> None:
        if not self.centre:
            raise ModelError(
                message("The model has not met data.", "no columns", "the model of a fit", "use fit.model, or model.bind(None, y)")
            )
        d = len(self.centre) // (self.num_classes if self.family == "categorical" else 1)
        if y.shape[1] != d:
            raise DataError(message("The columns do not fit the model.", f"{y.shape[1]} columns", f"{d}", "pass the columns of the fit"))
