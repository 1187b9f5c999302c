"""WAIC and PSIS-LOO: how well a fit would predict a new row, from the draws that are there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, convergence
from aleator._cache import cached
from aleator._errors import DataError, HealthWarning, MethodError, message
from aleator._fit import Fit
from aleator._random import as_key
from aleator._typing import Key, KeyLike
from aleator.evidence._problem import check_rows, check_whole, problem
from aleator.posterior import Draws, Passes, Point, Score, at_once, row_bytes

MIN_DRAWS = 100
PARETO = 0.7  # k̂ above this: leaving the row out changes the posterior too much
WAIC_VARIANCE = 0.4  # posterior variance of a row's log-likelihood above which WAIC is not trusted


class Pointwise(Score):
    """A Score that is a sum over rows: Σᵢ log p(yᵢ | rows other than i), estimated, in nats; higher is better. stderr: √(N·Var), for new
    rows of the same kind. It is no log evidence, and `al.compare` does not rank one against the other.

    terms (N,): the rows' own. effective: effective number of parameters. pareto_k (N,): of each row's weights, None for WAIC.
    """

    terms: np.ndarray
    effective: float
    pareto_k: np.ndarray | None

    def __new__(cls, terms: np.ndarray, kind: str, effective: float, pareto_k: np.ndarray | None = None) -> Pointwise:
        spread = float(np.sqrt(len(terms)) * terms.std(ddof=1)) if len(terms) > 1 else float("nan")
        self = super().__new__(cls, float(terms.sum()), spread, kind)
        self.terms, self.effective, self.pareto_k = terms, effective, pareto_k
        return self

    def __reduce__(self) -> tuple:
        return type(self), (self.terms, self.kind, self.effective, self.pareto_k)


def waic(key: KeyLike, fit: Fit, data: Any, num_samples: int = 4000) -> Pointwise:
    """Σᵢ log E[p(yᵢ|θ)] − Var[log p(yᵢ|θ)] over posterior draws (Watanabe 2010). kind "waic"."""
    terms, _ = log_likelihoods(key, fit, data, num_samples)
    variance = terms.var(axis=0, ddof=1)
    high = int(np.sum(variance > WAIC_VARIANCE))
    if high:
        warnings.warn(
            f"WAIC is not reliable: at {high} of {len(variance)} rows the log-likelihood varies by more than {WAIC_VARIANCE}; use loo.",
            HealthWarning,
            stacklevel=2,
        )
    fitted = np.logaddexp.reduce(terms, axis=0) - np.log(len(terms))
    return Pointwise(fitted - variance, "waic", float(variance.sum()))


def loo(key: KeyLike, fit: Fit, data: Any, num_samples: int = 4000) -> Pointwise:
    """Σᵢ log p(yᵢ | D without i): row i is left out by weights 1/p(yᵢ|θ), their tail smoothed by a generalised Pareto distribution
    (Vehtari, Gelman and Gabry 2017; ArviZ). kind "loo". k̂ > 0.7 at a row is warned about: fit without that row instead."""
    import arviz

    terms, num_chains = log_likelihoods(key, fit, data, num_samples)
    likelihood = np.exp(terms - terms.max(axis=0)).reshape(num_chains, -1, terms.shape[1])
    sizes = convergence.ess(likelihood) / len(terms) if isinstance(fit.posterior, Draws) else np.ones(1)
    relative = float(np.clip(np.nanmean(np.where(np.isnan(sizes), 1.0, sizes)), 1e-3, 1.0))
    log_weights, k = arviz.psislw(-terms.T, reff=relative)
    values = np.logaddexp.reduce(np.asarray(log_weights) + terms.T, axis=1)
    k = np.asarray(k)
    high = np.flatnonzero(k > PARETO)
    if high.size:
        rows = ", ".join(map(str, high[:5])) + (", …" if high.size > 5 else "")
        warnings.warn(
            f"Leave-one-out is not reliable at {high.size} of {len(k)} rows (Pareto k̂ up to {k.max():.2f}, below {PARETO} is wanted; rows {rows}): "
            "fit without them and score them, or use cross-validation (al.folds).",
            HealthWarning,
            stacklevel=2,
        )
    fitted = np.logaddexp.reduce(terms, axis=0) - np.log(len(terms))
    return Pointwise(values, "loo", float(np.sum(fitted - values)), k)


def log_likelihoods(key: KeyLike, fit: Fit, data: Any, num_samples: int = 4000) -> tuple[np.ndarray, int]:
    """log p(yᵢ|θ_s) in float64, (S, N), and the number of chains the draws are of. All draws of a fit that keeps them; else num_samples."""
    check_whole(num_samples=num_samples)
    if fit.model is None:
        raise MethodError(
            message("A bare log density has no rows.", "a fit without a model", "a model with data", "use al.BNN, al.LinearModel, …")
        )
    given = problem(fit, data, False, "This score")
    check_rows(fit, given.batch)
    if not fit.model.minibatch or given.batch.weight is not None:  # type: ignore[union-attr]
        wrong = "rows with weights" if fit.model.minibatch else f"a {type(fit.model).__name__}, whose rows depend on each other"
        raise DataError(message("Rows cannot be left out one by one.", wrong, "independent rows of weight one", "compare by evidence"))
    params, num_chains = _draws(as_key(key), fit, num_samples)
    number = _tree.rows(params)
    if number < MIN_DRAWS:
        raise MethodError(message("Too few draws.", f"{number}", f"at least {MIN_DRAWS}", "fit again with a larger num_samples"))
    per_draw = 2 * given.batch.size * row_bytes(fit.model, given.batch.x) + 8 * len(given.layout.names)  # type: ignore[union-attr]
    block = at_once(per_draw, number)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), params)
        terms = np.asarray(_terms(given.target)(wide, given.batch, block))
    if not np.all(np.isfinite(terms)):
        row = int(np.argwhere(~np.isfinite(terms))[0, 1])
        raise DataError(
            message("A row has no finite log-likelihood.", f"row {row}", "finite numbers", "check y, or pass the data of the fit")
        )
    return terms, num_chains


@cached
def _terms(target: Any) -> Callable:
    """(S, N) in blocks of draws."""
    run = lambda params, batch, block: jax.lax.map(lambda p: target.log_likelihood(p, batch), params, batch_size=block)
    return jax.jit(run, static_argnums=2)


def _draws(key: Key, fit: Fit, num_samples: int) -> tuple[Any, int]:
    posterior = fit.posterior
    if isinstance(posterior, (Point, Passes)):
        raise MethodError(
            message(
                "This fit has no draws of parameters.",
                f"a {type(posterior).__name__} by {type(fit.method).__name__}",
                "a posterior over parameters",
                "fit it by e.g. al.NUTS() or al.Variational()",
            )
        )
    if isinstance(posterior, Draws) and posterior.weights is None:
        return posterior.params, posterior.num_chains
    with jax.enable_x64(True):
        return posterior.sample(key, num_samples), 1


__all__ = ["Pointwise", "log_likelihoods", "loo", "waic"]
