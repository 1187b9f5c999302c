"""Questions to a fitted Gaussian process beyond prediction: leave-one-out, more rows under the same hyper-parameters, draws of the prior."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import HealthWarning, MethodError, message
from aleator._random import as_key
from aleator._typing import KeyLike, Tree
from aleator.data import Data, as_data, check_arrays
from aleator.gp.conditioned import Conditioned, root
from aleator.gp.sparse import Inducing, Left, greedy
from aleator.posterior import Point, check_joint

FEW, CHEAP = 20, 1000  # rows below which nothing can be judged, and above which a fit does not look a second time by itself


class LeaveOneOut(NamedTuple):
    """Predictions of each target from all others, (n, k): mean and variance of y, and log p(yᵢ | y without i)."""

    mean: np.ndarray
    variance: np.ndarray
    log_density: np.ndarray


def leave_one_out(fit: Any) -> LeaveOneOut:
    """All n leave-one-out predictions from one inverse A⁻¹ = (K + σ²I)⁻¹, hyper-parameters as they are:

    μᵢ = yᵢ − [A⁻¹(y − m)]ᵢ/[A⁻¹]ᵢᵢ,  σᵢ² = 1/[A⁻¹]ᵢᵢ.
    """
    posterior, model = _point(fit, "Leave-one-out"), fit.model
    solved = posterior.solved(model)
    from scipy.linalg import lapack

    diagonals = []
    for lower in np.asarray(solved.lower):
        inverse, _ = lapack.dtrtri(lower, lower=1)
        diagonals.append(np.sum(inverse**2, axis=0))
    diagonal = np.broadcast_to(np.stack(diagonals, axis=1), posterior.y.shape)
    weights = np.asarray(solved.weights)
    weights = weights[0] if len(weights) == 1 else weights[:, :, 0].T
    away, variance = weights / diagonal, 1.0 / diagonal
    return LeaveOneOut(posterior.y - away, variance, -0.5 * (away**2 / variance + np.log(2 * np.pi * variance)))


def extend(fit: Any, data: Any, num_inducing: int = 0) -> Any:
    """A Fit with more rows under the same hyper-parameters: the factor grows by the new rows, O(n²m) for m of them; `fit.update(data)` learns the
    hyper-parameters again.

    A sparse fit forgets its rows, and this is its `fit.update(data)`; num_inducing: so many of the new rows become inducing inputs first, those where the variance that the old ones leave is
    largest. For Gaussian noise the result is what fitting all rows under these hyper-parameters gives, exactly."""
    if isinstance(fit.posterior, Inducing):
        return (_grow(fit, as_data(data), num_inducing) if num_inducing else fit).update(data)
    posterior, model = _point(fit, "extend"), fit.model
    given: Any = as_data(data)
    more = Data(given.x, model.likelihood.encode(given.y, fitting=False), None)
    both = posterior.joined(more)
    from scipy.linalg import solve_triangular

    from aleator.linalg import cholesky

    old, n = posterior.solved(model), len(posterior.y)
    with jax.enable_x64(True):
        matrix = np.asarray(model.covariance(posterior.params, jax.tree.map(jnp.asarray, both.x)))
        residual = np.asarray(model.residual(posterior.params, jax.tree.map(jnp.asarray, both.x), both.y))
    lower = np.zeros_like(matrix)
    lower[:, :n, :n] = old.lower
    for g, block in enumerate(matrix):
        lower[g, n:, :n] = solve_triangular(old.lower[g], block[:n, n:], lower=True).T
        lower[g, n:, n:], _ = cholesky(block[n:, n:] - lower[g, n:, :n] @ lower[g, n:, :n].T, "covariance of the new targets")
    halves = np.stack([solve_triangular(c, r, lower=True) for c, r in zip(lower, residual, strict=True)])
    weights = np.stack([solve_triangular(c, h, lower=True, trans=1) for c, h in zip(lower, halves, strict=True)])
    logdet = halves.shape[2] * np.sum(np.log(np.diagonal(lower, axis1=1, axis2=2)))
    value = float(-0.5 * np.sum(halves**2) - logdet - 0.5 * halves.size * np.log(2 * np.pi))
    score = None if fit.log_evidence is None else fit.log_evidence._replace(value=value)
    grown = Conditioned(posterior.base, both.x, np.asarray(both.y), score)
    grown._kept[model] = type(old)(lower, weights)
    manifest = fit.manifest | {"data": fit.manifest["data"] | {"num_data": len(both.y)}}
    return dataclasses.replace(fit, posterior=grown, manifest=manifest)


def _grow(fit: Any, given: Any, number: int) -> Any:
    """The same q(f) through more inducing inputs: in whitened values the new ones are N(0, I) beside the old, as their prior is."""
    posterior, model = fit.posterior, fit.model
    if model.learn_inducing and not isinstance(posterior.base, Point):
        raise MethodError(message("Each draw has inducing inputs of its own.", "draws", "one set of them", "fit with learn_inducing=False"))
    params = posterior.base.params if isinstance(posterior.base, Point) else _tree.take(posterior.base.params, 0)
    with jax.enable_x64(True):
        old = np.asarray(model.places(params))
        more = greedy(Left(model), np.asarray(given.x, float), number, jax.tree.map(jnp.asarray, params))
    places = np.concatenate([old, more])
    grown = dataclasses.replace(model, inducing=places, num_inducing=len(places))
    base = posterior.base
    if model.learn_inducing:
        base = dataclasses.replace(base, params=base.params | {"inducing": places})
    size, location = len(more), np.pad(posterior.location, ((0, 0), (0, 0), (0, len(more))))
    spread = np.pad(posterior.spread, ((0, 0), (0, 0), (0, size), (0, size)))
    spread[..., -size:, -size:] = np.eye(size)
    return dataclasses.replace(fit, model=grown, posterior=dataclasses.replace(posterior, base=base, location=location, spread=spread))


class Overfit(NamedTuple):
    """evidence: log p(y | x, θ*)/n of the rows fitted, held_out: mean log density of the rows left out given them, both in nats a row; stderr: of held_out."""

    evidence: float
    held_out: float
    stderr: float


def overfitting(key: KeyLike, fit: Any, share: float = 0.2) -> Overfit:
    """Whether hyper-parameters were fitted to the noise: the model is fitted again to all but a share of its rows, drawn by `key`, and scored on those.

    The evidence of n rows is a sum of n predictions, each of a row from those before; a model that is right predicts new rows from all n at least as well. Where the
    evidence a row is above that by more than three of the standard errors that the model's own predictions lead to expect, a HealthWarning says so. Deep kernels
    with many weights and few rows do this (Ober et al. 2021): where hyper-parameters are more than half as many as rows, a fit of up to a thousand rows looks by itself.
    """
    result, told = _judge(key, fit, share)
    if told is not None:
        warnings.warn(told, HealthWarning, stacklevel=2)
    return result


def second_look(key: KeyLike, fit: Any) -> tuple[str | None, bool]:
    """What a fit says about its hyper-parameters by itself, and whether they can be trusted: nothing where they are few."""
    posterior = fit.posterior
    if not isinstance(posterior.base, Point) or fit.log_evidence is None:
        return None, True
    learned, number = sum(np.size(leaf) for leaf in jax.tree.leaves(posterior.params)), len(posterior.y)
    if 2 * learned <= number or number < FEW:
        return None, True
    if number > CHEAP:
        return f"{learned} hyper-parameters for {number} rows: see whether they overfit by gp.overfitting(key, fit).", True
    told = _judge(key, fit, 0.2)[1]
    return told, told is None


def _judge(key: KeyLike, fit: Any, share: float) -> tuple[Overfit, str | None]:
    posterior = fit.posterior
    if not isinstance(posterior, Conditioned) or fit.log_evidence is None:
        raise MethodError(
            message("Overfitting is judged by evidence.", type(posterior).__name__, "a fit of al.gp.GP by gp.Evidence", "fit it so")
        )
    from aleator._fit import _fit  # lazily: one floor up

    number = len(posterior.y)
    key_rows, key_fit = jax.random.split(as_key(key))
    order = np.asarray(jax.random.permutation(key_rows, number))
    size = int(np.clip(round(share * number), 2, number - 1))
    out, kept = order[:size], order[size:]
    rows = lambda index: jax.tree.map(lambda leaf: leaf[index], posterior.x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)  # the first fit has said what there is to say
        again = _fit(key_fit, fit.model, (rows(kept), posterior.y[kept]), fit.method, look=False)
    predictive = again.predict(0, rows(out))
    scores = np.asarray(predictive.log_prob(posterior.y[out]))
    # If the model is right, a score −½ log 2πv − ½ z² has variance ½, and what the log of its variances adds.
    expected = np.sqrt((0.5 + np.var(0.5 * np.log(predictive.variance))) / len(scores))
    assert again.log_evidence is not None  # the same method as of the fit above, which has one
    result = Overfit(again.log_evidence.value / len(kept), float(scores.mean()), float(scores.std(ddof=1) / len(scores) ** 0.5))
    if result.evidence <= result.held_out + 3 * expected:
        return result, None
    return result, (
        f"The evidence promises {result.evidence:.2f} nats a row, rows left out score {result.held_out:.2f} ± {result.stderr:.2f}: the hyper-parameters are "
        "overfitted. Use fewer features, a tighter prior, or sample them."
    )


def prior_functions(key: KeyLike, model: Any, x: Any, num_samples: int = 20, params: Tree = None) -> np.ndarray:
    """Draws of f from the prior at the rows of x, (num_samples, rows, k): hyper-parameters as given (without a leading axis), else drawn with each."""
    x = check_arrays(x, "x")
    model = model if model.num_targets is not None else model.bind(x, np.zeros((_tree.rows(x), 1)))
    check_joint(_tree.rows(x))
    k = model.targets()

    def one(key: Any) -> Any:
        key_params, key_f = jax.random.split(key)
        drawn = model.sample_prior(key_params) if params is None else jax.tree.map(jnp.asarray, params)
        rows = _tree.as_float64(jax.tree.map(jnp.asarray, x))
        rows = model.inputs(rows) if hasattr(model, "inputs") else rows
        half = root(model.kernel(drawn["kernel"], rows, rows))
        return half @ jax.random.normal(key_f, (half.shape[1], k)) + model.mean(drawn["mean"], rows, k)

    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(as_key(key), num_samples)))


def _point(fit: Any, what: str) -> Conditioned:
    posterior = fit.posterior
    if type(posterior) is not Conditioned or not isinstance(posterior.base, Point):
        raise MethodError(
            message(
                f"{what} needs one set of hyper-parameters.",
                type(getattr(posterior, "base", posterior)).__name__,
                "a fit of al.gp.GP by al.gp.Evidence() or al.MAP()",
                "fit it that way",
            )
        )
    if fit.model.iterative(len(posterior.y)) is not None:
        raise MethodError(
            message(f"{what} needs a factor.", "a fit by conjugate gradients", "at most 10⁴ rows, solver=None", "fit.update(data)")
        )
    return posterior
