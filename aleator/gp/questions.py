"""Questions to a fitted Gaussian process beyond prediction: leave-one-out, more rows under the same hyper-parameters, draws of the prior."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._random import as_key
from aleator._typing import KeyLike, Tree
from aleator.data import Data, as_data, check_arrays
from aleator.gp.conditioned import Conditioned, root
from aleator.posterior import Point, check_joint


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


def extend(fit: Any, data: Any) -> Any:
    """A Fit with more rows under the same hyper-parameters: the factor grows by the new rows, O(n²m) for m of them; `fit.update(data)` learns the
    hyper-parameters again."""
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
    return posterior
