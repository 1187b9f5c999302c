"""Exact: the closed-form posterior of a linear model with Gaussian noise, known or unknown."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.data import Batch
from aleator.hyperpriors import InverseGamma
from aleator.latent._conjugate import add, real_weights
from aleator.latent._model import in_double
from aleator.linalg import DensePrecision, cholesky
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Card, Method, check_positive
from aleator.model import LinearModel, conjugate_noise
from aleator.posterior import LinearGaussian, Posterior, Score
from aleator.priors import Normal


class State(NamedTuple):
    """Sufficient statistics: gram Σ wφφᵀ (p, p), cross Σ w yφ (k, p), square Σ w y² (k,), mass Σ w."""

    gram: Array
    cross: Array
    square: Array
    mass: Array


class Info(NamedTuple):
    """mass: total weight of the rows seen so far."""

    mass: Array


def init(key: Key, start: Any, model: LinearModel) -> State:
    """Zero statistics, or those of an earlier fit that is to be updated."""
    if isinstance(start, State):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), start)
    p, k = model.num_features, model.targets()
    return State(jnp.zeros((p, p)), jnp.zeros((k, p)), jnp.zeros((k,)), jnp.zeros(()))


def step(key: Key, state: State, batch: Batch, model: LinearModel) -> tuple[State, Info]:
    """Add one batch. Padding has weight 0 and its features are blanked: 0·∞ must not enter a sum."""
    real = batch.index >= 0
    weight = real * (1.0 if batch.weight is None else batch.weight)
    phi = jnp.where(real[:, None], model.features(_tree.as_float64(batch.x)), 0.0)
    y = jnp.where(real[:, None], _tree.as_float64(batch.y), 0.0)
    weighted = weight[:, None] * phi
    state = State(state.gram + weighted.T @ phi, state.cross + y.T @ weighted, state.square + weight @ y**2, state.mass + jnp.sum(weight))
    return state, Info(state.mass)


@dataclasses.dataclass(frozen=True)
class Exact(Method):
    """p(W | D) in closed form, with the log evidence; rows are read once, in batches of any size, in float64.

    Known noise σ: Λ = ΦᵀΦ/σ² + S⁻¹, covariance Λ⁻¹, mean Λ⁻¹(Φᵀy/σ² + S⁻¹m₀). Unknown noise, W | σ ~ N(m₀, σ²S), σ² ~ InvGamma(a, b):
    Λ = ΦᵀΦ + S⁻¹, aₙ = a + n/2, bₙ = b + ½(yᵀy + m₀ᵀS⁻¹m₀ − mₙᵀΛmₙ), Student-t predictions. `fit.update(more)` gives the posterior of
    all rows together.
    """

    batch_size: int | None = None

    card: ClassVar[Card] = Card(
        name="Exact",
        summary="The closed-form answer where there is one; every other method is measured against it.",
        model_class="linear in the weights, Gaussian prior, Gaussian noise (known, or inverse-gamma variance)",
        criterion="the exact posterior and evidence",
        search="none: linear algebra",
        cost="O(N p² + p³) time, O(p²) memory, one pass over the data",
        needs="al.gp.GP; al.latent.Pair; or al.LinearModel with al.Normal prior and al.Gaussian of fixed scale, or InverseGamma noise with scaled_by_noise=True",
        references=("Bishop, Pattern Recognition and Machine Learning, 2006, §3.3–3.5",),
    )

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", whole=True)

    def build(self, target: Any) -> Algorithm:
        model = target.model
        if hasattr(model, "closed_form"):
            return model.closed_form(target)
        if getattr(model, "exact", False) and target.temperature == 1.0:
            return _conjugate(model, self.batch_size)
        noise = _check(model, target.temperature)
        return Algorithm(
            init=lambda key, start: init(key, start, model),
            phases=(Phase("Exact", lambda key, state, batch: step(key, state, batch, model), None, "once", self.batch_size),),
            position=lambda state: state,
            finish=lambda key, state, kept: _posterior(State(*(np.asarray(s) for s in state)), model, noise),
            watch="mass",
            x64=True,
        )


def _conjugate(model: Any, batch_size: int | None) -> Algorithm:
    """A conjugate pair: η = η₀ + Σ T(y), log p(y) = A(η) − A(η₀) + Σ log h(y); the state is (Σ T, Σ log h, Σ weights)."""

    def init(key: Key, start: Any) -> tuple:
        """Nothing yet, or what an earlier fit that is to be updated has added up."""
        fresh = jax.tree.map(jnp.zeros_like, model.prior_counts()), jnp.zeros(()), jnp.zeros(())
        return jax.tree.map(jnp.asarray, start) if isinstance(start, tuple) else fresh

    def step(key: Key, state: tuple, batch: Batch) -> tuple[tuple, Info]:
        counts, base = model.e_step(model.prior_counts(), batch)[0], model.log_base(batch.y)
        mass = state[2] + jnp.sum(real_weights(batch))
        return (add(state[0], counts), state[1] + batch.weighted_sum(base), mass), Info(mass)

    @in_double
    def finish(key: Key, state: tuple, kept: Any) -> Posterior:
        prior = model.prior_counts()
        counts = add(prior, jax.tree.map(jnp.asarray, state[0]))
        change = sum(float(f.log_partition(counts[name]) - f.log_partition(prior[name])) for name, f in model.families.items())
        stored = jax.tree.map(np.asarray, (counts, state))
        score = Score(change + float(state[1]), 0.0, "exact")
        return dataclasses.replace(model.posterior(stored[0], score), stats=stored[1])

    return Algorithm(
        init=init,
        phases=(Phase("Exact", step, None, "once", batch_size),),
        position=lambda state: state[0],
        finish=finish,
        watch="mass",
        verdict=lambda result: ("Complete: posterior and evidence in closed form.", True),  # of one row too: that is how beliefs begin
        x64=True,
    )


def _check(model: Any, temperature: float) -> float | InverseGamma:
    """Refuse anything without a closed form, and say which part is in the way."""
    noise = conjugate_noise(getattr(model, "likelihood", None))
    if not isinstance(model, LinearModel):
        wrong = f"a {type(model).__name__}"
    elif not isinstance(model.prior, Normal):
        wrong = f"prior {model.prior!r}"
    elif noise is None:
        wrong = f"likelihood {model.likelihood!r}"
    elif isinstance(noise, InverseGamma) != model.scaled_by_noise:
        wrong = f"{model.likelihood!r} with scaled_by_noise={model.scaled_by_noise}"
    elif temperature != 1.0:
        wrong = f"temperature {temperature}"
    else:
        return noise
    raise MethodError(
        message("Exact has no closed form for this.", wrong, Exact.card.needs, "change the model, or use al.MAP() or al.Ensemble()")
    )


def _posterior(stats: State, model: LinearModel, noise: float | InverseGamma) -> LinearGaussian:
    """Solve the normal equations in float64. One Λ per output for known noise, since each may have its own σ."""
    (k, p), n = stats.cross.shape, float(stats.mass)
    prior: Any = model.prior
    scale = prior.scales({"weight": stats.cross}, {"weight": p})["weight"]
    prior_precision, prior_mean = 1.0 / scale**2, np.full(p, prior.loc)
    prior_square = prior_precision * prior_mean @ prior_mean
    known = not isinstance(noise, InverseGamma)
    sigma2 = np.full(k, float(noise) ** 2) if known else np.ones(k)
    precision = stats.gram[None] / sigma2[:, None, None] + prior_precision * np.eye(p)
    factor, _ = cholesky(precision, "posterior precision")
    right = stats.cross / sigma2[:, None] + prior_precision * prior_mean
    mean = np.stack([_solve(c, r) for c, r in zip(factor, right, strict=True)])
    operator = DensePrecision(factor)
    # mᵀΛm = mᵀ(right), and ½log|S⁻¹| − ½log|Λ| is common to both cases.
    fit_square = np.sum(mean * right, axis=1)
    log_ratio = 0.5 * (p * np.log(prior_precision) + operator.logdet())
    if known:
        terms = -0.5 * n * np.log(2 * np.pi * sigma2) + log_ratio - 0.5 * (stats.square / sigma2 + prior_square - fit_square)
        return LinearGaussian(mean, operator, np.sqrt(sigma2), None, None, stats, Score(float(terms.sum()), 0.0, "exact"))
    from scipy.special import gammaln

    a0, b0 = noise.concentration, noise.rate
    a, b = np.full(k, a0 + 0.5 * n), b0 + 0.5 * (stats.square + prior_square - fit_square)
    terms = -0.5 * n * np.log(2 * np.pi) + log_ratio + a0 * np.log(b0) - a * np.log(b) + gammaln(a) - gammaln(a0)
    return LinearGaussian(mean, operator, None, a, b, stats, Score(float(terms.sum()), 0.0, "exact"))


def _solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    from scipy.linalg import cho_solve

    return cho_solve((factor, True), right)
