"""ExpectationPropagation: a Gaussian posterior of a linear model by matching the moments of one row at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.data import Batch
from aleator.likelihoods import Bernoulli, Gaussian
from aleator.linalg import DensePrecision, cholesky
from aleator.loop import Algorithm, Phase
from aleator.methods import exact
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._moments import Tilted, tilted_gaussian, tilted_logistic, tilted_probit
from aleator.model import LinearModel
from aleator.posterior import LinearGaussian, Score
from aleator.priors import Normal

BLOCK = 4096  # rows whose quadrature nodes are alive at once
SLOWEST = 0.02  # smallest share of an update that is ever made


class State(NamedTuple):
    """Site t̃ᵢ(f) ∝ exp(νᵢf − ½τᵢf²) of each row and column: precision τ and shift ν (k, n).

    gram Σ wτφφᵀ (k, p, p) and cross Σ wνφ (k, p) of these sites; log_evidence, residual: of the sites before them; rate: the share of the
    next update that is made.
    """

    precision: Array
    shift: Array
    gram: Array
    cross: Array
    log_evidence: Array
    residual: Array
    rate: Array


class Info(NamedTuple):
    """log_evidence: EP's estimate at the sites of this sweep. residual: largest distance between a row's tilted and Gaussian moments."""

    log_evidence: Array
    residual: Array


def init(key: Key, start: Any, model: LinearModel, num_data: int, damping: float) -> State:
    """Flat sites: the posterior begins as the prior."""
    if isinstance(start, exact.State):
        raise MethodError(
            message(
                "ExpectationPropagation cannot be updated.",
                "rows whose sites were not kept",
                "all rows at once",
                "fit all the data again",
            )
        )
    k, p = model.targets(), model.num_features
    flat = jnp.zeros((k, num_data))
    return State(flat, flat, jnp.zeros((k, p, p)), jnp.zeros((k, p)), jnp.zeros(()), jnp.full((), jnp.inf), jnp.full((), damping))


def step(key: Key, state: State, batch: Batch, model: LinearModel, tilted: Callable[..., Tilted]) -> tuple[State, Info]:
    """One parallel sweep. With q = N(μ, Λ⁻¹), Λ = S⁻¹ + Σ wτφφᵀ, and f = φᵀw under q ~ N(m, s), for every row at once:

    cavity 1/v₋ = 1/s − τ, m₋ = v₋(m/s − ν); tilted moments of p(y | f)·N(m₋, v₋) through a, b of `_moments`;
    τ ← (1 − ρ)τ + ρ·b/(1 − v₋b), ν ← (1 − ρ)ν + ρ·(a + m₋b)/(1 − v₋b), the Gaussian with these moments divided by the cavity.
    The share ρ is halved when the moments move apart and grows again while they approach. A row of weight w counts as w equal rows:
    w equal sites of which the cavity leaves out one.
    """
    phi = model.features(_tree.as_float64(batch.x))
    weight = jnp.ones(len(phi)) if batch.weight is None else batch.weight.astype(jnp.float64)
    prior_precision, prior_mean = _prior(model)
    factor = jnp.linalg.cholesky(state.gram + prior_precision * jnp.eye(phi.shape[1]))
    right = state.cross + prior_precision * prior_mean
    white = jax.vmap(lambda c: jax.scipy.linalg.solve_triangular(c, phi.T, lower=True))(factor)  # C⁻¹φ, (k, p, n)
    white_right = jax.vmap(lambda c, r: jax.scipy.linalg.solve_triangular(c, r, lower=True))(factor, right)  # C⁻¹Λμ, (k, p)
    mean, variance = jnp.einsum("kpn,kp->kn", white, white_right), jnp.sum(white**2, axis=1)
    # A row of weight below one can ask its cavity for more precision than there is: such a row waits, and the fit has not converged.
    keep = 1.0 - state.precision * variance
    proper = keep > 1e-12
    cavity_variance = variance / jnp.where(proper, keep, 1.0)
    cavity_mean = cavity_variance * (mean / variance - state.shift)
    site = _by_blocks(tilted, cavity_mean, cavity_variance, batch.y.T)
    shrink = 1.0 - cavity_variance * site.curvature  # tilted variance / cavity variance
    new_mean, new_variance = cavity_mean + cavity_variance * site.slope, cavity_variance * shrink
    apart = jnp.maximum(jnp.abs(new_mean - mean) / jnp.sqrt(variance), jnp.abs(jnp.log(new_variance / variance)))
    residual = jnp.max(jnp.where(weight > 0, jnp.where(proper, apart, jnp.inf), 0.0))
    # log Z = Φ(q) − Φ(prior) + Σ w[log Zᵢ + Φ(cavity) − Φ(q)], Φ a Gaussian's log normaliser: one-dimensional in the sum.
    normaliser = lambda m, v: 0.5 * (m**2 / v + jnp.log(v))
    terms = site.log_z + normaliser(cavity_mean, cavity_variance) - normaliser(mean, variance)
    log_ratio = 0.5 * jnp.log(prior_precision) * phi.shape[1] - jnp.sum(jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)), axis=1)
    square = prior_precision * prior_mean**2 * phi.shape[1]
    evidence = jnp.sum(terms @ weight + log_ratio + 0.5 * (jnp.sum(white_right**2, axis=1) - square))
    rate = jnp.where(residual > state.residual, jnp.maximum(0.5 * state.rate, SLOWEST), jnp.minimum(1.1 * state.rate, 1.0))
    move = lambda old, new: jnp.where(proper, old + rate * (new - old), old)
    precision = move(state.precision, site.curvature / shrink)
    shift = move(state.shift, (site.slope + cavity_mean * site.curvature) / shrink)
    gram = jnp.einsum("kn,np,nq->kpq", precision * weight, phi, phi)
    return State(precision, shift, gram, (shift * weight) @ phi, evidence, residual, rate), Info(evidence, residual)


@dataclasses.dataclass(frozen=True)
class ExpectationPropagation(Method):
    """q(W) = N, with one Gaussian site a row, p(yᵢ | fᵢ) ≈ t̃ᵢ(fᵢ), each matched to its row in the company of all the others (Minka 2001).

    Far closer than Laplace's approximation for classification, where the posterior is skewed: the mean is a mean and not a mode. Tilted
    moments are closed forms for Bernoulli("probit") and Gaussian(σ) (for which EP is exact), quadrature to 1e-12 for Bernoulli().
    num_steps: sweeps at most. tolerance: the largest distance between tilted and Gaussian moments of any row that counts as converged, in
    standard deviations. damping: the share of the first update that is made; it adapts. Predictions integrate over a Gaussian f(x).
    """

    num_steps: int = 500
    tolerance: float = 1e-8
    damping: float = 0.8

    weighs: ClassVar[bool] = False  # a site of weight ½ has a cavity of its own
    card: ClassVar[Card] = Card(
        name="Expectation propagation",
        summary="The Gaussian with the right moments, row by row: the best of the quick answers for linear classifiers.",
        model_class="linear in the weights, Gaussian prior; binary y by logit or probit, or Gaussian noise of known scale",
        criterion="local moment matching: stationary points of the Bethe free energy",
        search="expectation propagation: damped parallel sweeps over the sites of all rows",
        cost="O(N p² + p³) a sweep, ten to fifty sweeps; O(N + p²) memory",
        needs="al.LinearModel with al.Normal prior and al.Bernoulli() or al.Gaussian of fixed scale; data in memory",
        references=(
            "Minka, Expectation propagation for approximate Bayesian inference, 2001",
            "Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, §3.6",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", whole=True)
        check_positive(self, "tolerance", "damping")
        if self.damping > 1.0:
            raise MethodError(
                message("ExpectationPropagation.damping cannot be used.", self.damping, "0 < damping ≤ 1", "pass damping=0.5")
            )

    def build(self, target: Any) -> Algorithm:
        model = target.model
        _check(model, target.temperature)
        tilted = _tilted(model.likelihood)
        return Algorithm(
            init=lambda key, start: init(key, start, model, target.num_data, self.damping),
            phases=(Phase("EP", lambda key, state, batch: step(key, state, batch, model, tilted), self.num_steps, "full"),),
            position=lambda state: (state.gram, state.cross),
            finish=lambda key, state, kept: _posterior(jax.tree.map(np.asarray, state), model),
            done=lambda state: state.residual < self.tolerance,
            watch="log_evidence",
            verdict=lambda result: _verdict(result, self.tolerance),
            x64=True,
        )


def _check(model: Any, temperature: float) -> None:
    """Refuse what has no scalar sites with known moments, and say which part is in the way."""
    likelihood = getattr(model, "likelihood", None)
    if not isinstance(model, LinearModel):
        wrong = f"a {type(model).__name__}"
    elif not isinstance(model.prior, Normal):
        wrong = f"prior {model.prior!r}"
    elif not (isinstance(likelihood, Bernoulli) or (isinstance(likelihood, Gaussian) and isinstance(likelihood.scale, (float, int)))):
        wrong = f"likelihood {likelihood!r}"
    elif model.scaled_by_noise:
        wrong = "scaled_by_noise=True"
    elif temperature != 1.0:
        wrong = f"temperature {temperature}"
    else:
        return
    raise MethodError(
        message(
            "ExpectationPropagation has no sites for this.",
            wrong,
            ExpectationPropagation.card.needs,
            "change the model, or use al.Variational() or al.NUTS()",
        )
    )


def _tilted(likelihood: Any) -> Callable[..., Tilted]:
    """Tilted moments of p(y | f) under N(mean, variance), elementwise."""
    if isinstance(likelihood, Gaussian):
        return lambda mean, variance, y: tilted_gaussian(mean, variance, y.astype(mean.dtype), jnp.asarray(likelihood.scale, mean.dtype))
    site = tilted_logistic if likelihood.link == "logit" else tilted_probit
    return lambda mean, variance, y: site(mean, variance, 2.0 * y.astype(mean.dtype) - 1.0)


def _by_blocks(tilted: Callable[..., Tilted], mean: Array, variance: Array, y: Array) -> Tilted:
    """The moments of all sites, a block at a time, so that quadrature nodes never exist for all rows together."""
    flat = (mean.ravel(), variance.ravel(), y.ravel())
    found = tilted(*flat) if mean.size <= BLOCK else jax.lax.map(lambda one: tilted(*one), flat, batch_size=BLOCK)
    return Tilted(*(part.reshape(mean.shape) for part in found))


def _prior(model: LinearModel) -> tuple[float, float]:
    """Precision and mean of every weight."""
    prior: Any = model.prior
    shape = jax.ShapeDtypeStruct((model.targets(), model.num_features), np.float64)
    scale = prior.scales({"weight": shape}, {"weight": model.num_features})["weight"]
    return 1.0 / scale**2, float(prior.loc)


def _posterior(state: State, model: LinearModel) -> LinearGaussian:
    """N(Λ⁻¹(Σ wνφ + S⁻¹m₀), Λ⁻¹): the exact posterior of pseudo-data ν/τ with noise variances 1/τ, hence of the same kind."""
    from scipy.linalg import cho_solve

    prior_precision, prior_mean = _prior(model)
    factor, _ = cholesky(state.gram + prior_precision * np.eye(state.cross.shape[1]), "posterior precision")
    right = state.cross + prior_precision * prior_mean
    mean = np.stack([cho_solve((c, True), r) for c, r in zip(factor, right, strict=True)])
    # In units of the noise, as `exact` has its statistics: σ where there is one, 1 for pseudo-data.
    scale = float(model.likelihood.scale) if isinstance(model.likelihood, Gaussian) else 1.0
    square = np.sum(np.divide(state.shift**2, state.precision, out=np.zeros_like(state.shift), where=state.precision > 0), axis=1)
    mass = np.asarray(float(state.precision.shape[1]))
    stats = exact.State(scale**2 * state.gram, scale**2 * state.cross, scale**2 * square, mass)
    return LinearGaussian(
        mean, DensePrecision(factor), np.full(len(mean), scale), None, None, stats, Score(float(state.log_evidence), 0.0, "estimate")
    )


def _verdict(result: Any, tolerance: float) -> tuple[str, bool]:
    residual = float(result.state.residual)
    if residual < tolerance:
        return f"Converged: tilted and Gaussian moments agree to {residual:.1e} after {result.steps} sweeps.", True
    advice = "raise num_steps, lower damping, or standardise the features"
    return (
        f"Not converged: tilted and Gaussian moments differ by {residual:.1e} standard deviations after {result.steps} sweeps: {advice}.",
        False,
    )
