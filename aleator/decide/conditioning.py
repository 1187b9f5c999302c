"""Conditioning a joint distribution on a part of it, p(X | Z) with Y marginalised (C10).

A Gaussian and a mixture of Gaussians are conditioned exactly. Draws are conditioned by weights: `reweighted` where p(z | draw) or a joint density is known (importance
sampling), `from_draws` where there are draws of everything and nothing else (a kernel around z). Models with hidden variables have
`al.latent.conditional`. Weights that rest on few draws warn.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from aleator import _tree
from aleator._errors import DataError, HealthWarning, message
from aleator._random import as_key
from aleator._typing import KeyLike, Tree
from aleator.diagnostics import pareto_k
from aleator.linalg.dense import cholesky
from aleator.posterior import Score

FEW = 100  # effective draws below which a warning is given
PARETO = 0.7  # k̂ above this: the largest weights decide, and more draws may not help


@dataclasses.dataclass(frozen=True, eq=False)
class Conditional:
    """Weighted draws of p(x | z): draws, leaves (S, …); weights (S,), which sum to one.

    ess: 1/Σ weight², how many equal draws they are worth; pareto_k: of the weights' tail; log_evidence: log p(z) where the densities give it.
    """

    draws: Tree
    weights: np.ndarray
    ess: float
    pareto_k: float
    log_evidence: Score | None = None

    def mean(self, function: Callable[[Tree], Any] = lambda draws: draws) -> Tree:
        """Σ weight·function(draw): of the draws themselves, or of anything that maps them to leaves (S, …)."""
        return jax.tree.map(lambda leaf: np.tensordot(self.weights, np.asarray(leaf, float), 1), function(self.draws))

    def variance(self) -> Tree:
        """Σ weight·(draw − mean)², leaf by leaf."""
        middle = self.mean()
        return jax.tree.map(lambda leaf, m: np.tensordot(self.weights, (np.asarray(leaf, float) - m) ** 2, 1), self.draws, middle)

    def quantile(self, levels: Any) -> Tree:
        """Of every entry by itself; leaves (levels, …)."""

        def one(leaf: Any) -> np.ndarray:
            flat = np.asarray(leaf, float).reshape(len(self.weights), -1)
            order = np.argsort(flat, axis=0)
            mass = np.cumsum(self.weights[order], axis=0)
            place = np.stack([np.sum(mass < level - 1e-12, axis=0) for level in np.atleast_1d(levels)])
            found = np.take_along_axis(np.take_along_axis(flat, order, axis=0), np.minimum(place, len(flat) - 1), axis=0)
            return found.reshape(-1, *np.shape(leaf)[1:])

        return jax.tree.map(one, self.draws)

    def sample(self, key: KeyLike, num_samples: int) -> Tree:
        """Equal draws, resampled by weight."""
        chosen = np.asarray(jax.random.choice(as_key(key), len(self.weights), (num_samples,), p=np.asarray(self.weights, np.float32)))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], self.draws)


def gaussian(mean: Any, covariance: Any, given: Any, wanted: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean (m,) and covariance (m, m) of p(x_wanted | z) for a joint Gaussian; given (d,): z where it is known, NaN elsewhere.

    μ_w + Σ_wz Σ_zz⁻¹ (z − μ_z) and Σ_ww − Σ_wz Σ_zz⁻¹ Σ_zw; columns neither given nor wanted are marginalised by leaving them out. wanted: column
    numbers, all that are not given by default.

    >>> gaussian([0.0, 0.0], [[1.0, 0.5], [0.5, 1.0]], [float("nan"), 2.0])
    (array([1.]), array([[0.75]]))
    """
    centre, spread, _ = _conditioned(mean, covariance, given, wanted)
    return centre, spread


def mixture(weights: Any, means: Any, covariances: Any, given: Any, wanted: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights (K,), means (K, m) and covariances (K, m, m) of p(x_wanted | z) for a joint mixture Σ πₖ N(μₖ, Σₖ) of K Gaussians, itself one.

    Each part is conditioned as `gaussian` does it, and the weights follow what is seen: πₖ·N(z; μₖ, Σₖ)/Σⱼ πⱼ·N(z; μⱼ, Σⱼ).

    >>> two = np.eye(2)[None].repeat(2, axis=0)
    >>> weights, means, _ = mixture([0.5, 0.5], [[-1.0, -1.0], [1.0, 1.0]], two, [float("nan"), 1.0])
    >>> weights.round(4), means[:, 0]
    (array([0.1192, 0.8808]), array([-1.,  1.]))
    """
    shares = np.asarray(weights, float)
    if shares.shape != (len(means),) or len(covariances) != len(shares) or np.any(~(shares >= 0)) or not abs(shares.sum() - 1) < 1e-6:
        got = f"{len(means)} means, {len(covariances)} covariances, weights {shares}"
        raise DataError(
            message("This is no mixture.", got, "one weight, mean and covariance a part, weights that sum to one", "check the joint")
        )
    parts = [_conditioned(mean, covariance, given, wanted) for mean, covariance in zip(means, covariances, strict=True)]
    with np.errstate(divide="ignore"):
        logs = np.log(shares) + np.array([part[2] for part in parts])
    chances = np.exp(logs - logs.max())
    return chances / chances.sum(), np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts])


def _conditioned(mean: Any, covariance: Any, given: Any, wanted: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and covariance of what is wanted, and log N(z; μ_z, Σ_zz)."""
    from scipy.linalg import solve_triangular

    mean, covariance = np.asarray(mean, float), np.asarray(covariance, float)
    if covariance.shape != (len(mean), len(mean)) or not np.allclose(covariance, covariance.T):
        raise DataError(
            message("This is no covariance.", f"shape {covariance.shape}", f"symmetric ({len(mean)}, {len(mean)})", "check the joint")
        )
    smallest, largest = np.linalg.eigvalsh(covariance)[[0, -1]]
    if smallest < -1e-8 * abs(largest):  # rounding aside: a part of it may still have a factor, and the rest a negative variance
        got = f"an eigenvalue of {smallest:.3g}"
        raise DataError(message("This is no covariance.", got, "none below zero", "check the joint"))
    z, seen, wanted = _asked(given, len(mean), wanted)
    if not len(seen):
        return mean[wanted], covariance[np.ix_(wanted, wanted)], 0.0
    factor, _ = cholesky(covariance[np.ix_(seen, seen)], "covariance of what is given")
    both = np.column_stack([z - mean[seen], covariance[np.ix_(seen, wanted)]])
    whitened = solve_triangular(factor, both, lower=True)
    shift, cross = whitened[:, 0], whitened[:, 1:]
    density = -0.5 * float(shift @ shift) - float(np.sum(np.log(np.diag(factor)))) - 0.5 * len(z) * float(np.log(2 * np.pi))
    return mean[wanted] + cross.T @ shift, covariance[np.ix_(wanted, wanted)] - cross.T @ cross, density


def reweighted(draws: Tree, log_density: Any, log_proposal: Any = 0.0) -> Conditional:
    """p(x, y | z) by importance weights exp(log_density − log_proposal); marginalise Y by looking at X alone.

    draws: leaves (S, …). Draws of the joint's own p(x, y): log_density is log p(z | x, y) at each of them, and log_proposal is left out. Draws of
    any q(x, y): log_density is log p(x, y, z), log_proposal log q. Both are arrays (S,) or functions of the draws. log_evidence is log p(z), an estimate.

    >>> draws = np.random.default_rng(0).normal(size=20_000)  # x ~ N(0, 1), z = x + N(0, 1): x | z = 1 is N(½, ½)
    >>> found = reweighted(draws, lambda x: -0.5 * (1.0 - x) ** 2 - 0.5 * np.log(2 * np.pi))
    >>> found.mean().round(1), found.variance().round(1)
    (np.float64(0.5), np.float64(0.5))
    """
    number = _tree.rows(draws)
    above, below = (np.asarray(part(draws) if callable(part) else part, float) for part in (log_density, log_proposal))
    logs = np.broadcast_to(above - below, (number,)) if np.ndim(above - below) <= 1 else above - below
    if logs.shape != (number,) or np.any(np.isnan(logs)) or np.any(logs == np.inf):
        raise DataError(
            message(
                "These weights cannot be used.",
                f"shape {logs.shape}, {int(np.isnan(logs).sum())} NaN",
                f"({number},) log densities below infinity",
                "return one log density a draw",
            )
        )
    _possible(logs)
    ratios = np.exp(logs - logs.max())
    evidence = float(logs.max() + np.log(ratios.mean()))
    stderr = float(ratios.std() / ratios.mean() / np.sqrt(number))
    return _conditional(draws, logs, Score(evidence, stderr, "estimate"))


def from_draws(draws: Any, given: Any, wanted: Any = None) -> Conditional:
    """p(x_wanted | z) from draws (S, d) of the joint alone; given (d,): z where it is known, NaN elsewhere.

    Columns of whole numbers must equal z. Of the others nearby draws count, weights N(z_s; z, h²Σ) with Silverman's h = (4/((k + 2)·S))^(1/(k + 4)) for k such
    columns, and real wanted columns move along a line to where z is, x_s − Bᵀ(z_s − z), B by weighted least squares (Beaumont et al. 2002): exact for Gaussians at
    any h, an approximation of order h² else. Columns neither given nor wanted are marginalised by leaving them out.
    """
    from scipy.linalg import solve_triangular

    table = np.asarray(draws, float)
    if table.ndim != 2 or len(table) < 2 or not np.all(np.isfinite(table)):
        raise DataError(message("These are no draws.", f"shape {table.shape}", "finite (draws ≥ 2, columns)", "pass draws of all columns"))
    z, seen, wanted = _asked(given, table.shape[1], wanted)
    whole = np.all(table == np.round(table), axis=0)
    logs = np.where(np.all(table[:, seen[whole[seen]]] == z[whole[seen]], axis=1), 0.0, -np.inf)
    _possible(logs)
    near, moved = seen[~whole[seen]], table[:, wanted].copy()
    if len(near):
        same = np.isfinite(logs)
        apart = table[:, near] - z[~whole[seen]]
        covariance = np.atleast_2d(np.cov(apart[same].T)) if same.sum() > len(near) else np.diag(np.var(apart, axis=0))
        factor, _ = cholesky(covariance, "covariance of what is given")
        width = (4 / ((len(near) + 2) * same.sum())) ** (1 / (len(near) + 4))
        logs = logs - 0.5 * np.sum(solve_triangular(factor, apart.T, lower=True) ** 2, axis=0) / width**2
        weight = np.exp(logs - logs.max())
        design = np.column_stack([np.ones(len(table)), apart])
        real = ~whole[wanted]
        root = np.sqrt(weight)[:, None]
        slope = np.linalg.lstsq(root * design, root * moved[:, real], rcond=None)[0][1:]
        moved[:, real] -= apart @ slope
    return _conditional(moved, logs, None)


def _asked(given: Any, width: int, wanted: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(z, its columns, the columns wanted)."""
    values = np.asarray(given, float)
    if values.shape != (width,) or np.any(np.isinf(values)):
        raise DataError(
            message("This cannot be conditioned on.", f"shape {values.shape}", f"({width},), NaN where nothing is given", "fill in NaN")
        )
    seen = np.flatnonzero(np.isfinite(values))
    columns = np.flatnonzero(np.isnan(values)) if wanted is None else np.atleast_1d(np.asarray(wanted, np.int64))
    if not len(columns) or np.any(np.isin(columns, seen)) or columns.min() < 0 or columns.max() >= width:
        raise DataError(message("There is nothing to ask for.", f"wanted={columns}", f"columns below {width} that are not given", "fix it"))
    return values[seen], seen, columns


def _possible(logs: np.ndarray) -> None:
    if not np.any(np.isfinite(logs)):
        raise DataError(
            message("No draw agrees with what is given.", "all weights zero", "at least one draw", "draw more, or from nearer by")
        )


def _conditional(draws: Tree, logs: np.ndarray, evidence: Score | None) -> Conditional:
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    ess, k = float(1 / np.sum(weights**2)), pareto_k(logs[np.isfinite(logs)])
    heavy = k > PARETO and evidence is not None  # a kernel's weights are bounded
    if ess < FEW or heavy:
        tail = f", Pareto k̂ {k:.2f}" if heavy else ""
        warnings.warn(
            f"Few draws agree with what is given: {ess:.0f} effective of {len(weights)}{tail}. Draw more, or from a proposal nearer to it.",
            HealthWarning,
            stacklevel=3,
        )
    return Conditional(draws, weights, ess, k, evidence)
