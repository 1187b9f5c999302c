"""Bridge sampling: the evidence from posterior draws that are there already, and draws of a proposal that overlaps them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, convergence
from aleator._cache import cached
from aleator._errors import HealthWarning, MethodError, message
from aleator._fit import Fit
from aleator._random import as_key, split
from aleator._typing import Array, KeyLike
from aleator.data import Batch
from aleator.evidence._problem import check_rows, check_whole, flat, layout_of, problem
from aleator.methods import Exact, ReversibleJump
from aleator.methods import _chains as chains
from aleator.methods._moves import Proposal, draw, frozen_moments, log_prob, proposal_of
from aleator.posterior import Draws, Score

BLOCK = 1024  # densities evaluated at once
MAX_ITERATIONS = 1000
TOLERANCE = 1e-10  # change of log r at which the iteration has settled
RHAT = 1.05  # chains that differ more in their parameters do not share their modes
MIN_DRAWS = 100
EXACT_DRAWS = 4000  # of a posterior that makes its draws as they are needed
FAR = 0.5  # nats of standard error above which the estimate says little


class Bridged(NamedTuple):
    """log_r: log of the ratio of normalisers, with its relative standard error; iterations: until it settled."""

    log_r: float
    stderr: float
    iterations: int


def bridge(
    key: KeyLike,
    fit: Fit,
    data: Any = None,
    *,
    target: Any = None,
    proposal: Any = None,
    df: float = float("inf"),
    num_proposals: int | None = None,
) -> Score:
    """The optimal bridge of Meng and Wong (1996) between posterior draws θ ~ p(θ|D) and draws of a proposal g:

    p(D) = E_g[p(θ)p(D|θ)·h(θ)] / E_post[g(θ)·h(θ)],  h ∝ 1/(s₁·p(θ)p(D|θ) + s₂·p(D)·g(θ)),

    iterated to its fixed point, s₁ counting effective draws. fit: Markov chains, or al.Exact, on `data`; for a bare density also
    pass target. proposal: None for the Gaussian (df: Student-t) with the moments of each chain's first half, the other half being
    the draws; or a Fit or (mean, covariance), and all draws are used. num_proposals: as many as draws. The standard error counts the autocorrelation of the
    chains (Frühwirth-Schnatter 2004); what no chain has seen, such as a second mode, it cannot count.
    """
    key_exact, key_draw = split(as_key(key), 2)
    if fit.model is None and target is None:
        raise MethodError(
            message("The density of this fit is not known.", "a fit without a model", "its target", "pass target=, as it was fitted")
        )
    given = problem(fit.model if target is None else target, data, False, "Bridge sampling")
    check_rows(fit, given.batch)
    positions = _chains_of(key_exact, fit, given.layout)
    _, n, size = positions.shape
    if proposal is None:
        first, positions = positions[:, : n // 2].reshape(-1, size), positions[:, n // 2 :]
        proposal = first.mean(axis=0), np.atleast_2d(np.cov(first.T))
    if num_proposals is not None:
        check_whole(num_proposals=num_proposals)
    number = positions.shape[0] * positions.shape[1] if num_proposals is None else num_proposals
    with jax.enable_x64(True):
        moments = proposal_of(frozen_moments(proposal), given.layout, Bridge())  # type: ignore[arg-type]
        run = _ratios(given.target, float(df), number)
        mine, other = run(key_draw, moments, jnp.asarray(positions.reshape(-1, size)), given.batch)
        mine, other = np.asarray(mine), np.asarray(other)
    if not np.all(np.isfinite(mine)):
        raise MethodError(
            message(
                "A draw has no density.",
                f"{int(np.sum(~np.isfinite(mine)))} of {mine.size} draws",
                "finite log joints",
                "pass the data of the fit",
            )
        )
    found = iterate(mine.reshape(positions.shape[:2]), np.where(np.isnan(other), -np.inf, other))
    _warn(positions, found)
    return Score(found.log_r, found.stderr, "estimate")


def iterate(mine: np.ndarray, other: np.ndarray) -> Bridged:
    """The fixed point for log ratios log(p(θ)p(D|θ)/g(θ)) of posterior draws (chains, n) and of proposals (M,)."""
    top = float(np.median(mine))
    # Effective draws: the bridge is optimal for independent ones, and valid for any share.
    effective = float(np.nan_to_num(convergence.ess(mine), nan=mine.size)) if mine.size >= 8 else mine.size
    effective = min(effective, mine.size)
    log_s1, log_s2 = np.log(effective / (effective + other.size)), np.log(other.size / (effective + other.size))
    mean = lambda values: np.logaddexp.reduce(values, axis=None) - np.log(values.size)
    numerator = lambda log_r: other - top - np.logaddexp(log_s1 + other - top, log_s2 + log_r)
    denominator = lambda log_r: -np.logaddexp(log_s1 + mine - top, log_s2 + log_r)
    log_r, iterations, change = 0.0, 0, np.inf
    while change >= TOLERANCE and iterations < MAX_ITERATIONS:
        new = float(mean(numerator(log_r)) - mean(denominator(log_r)))
        if not np.isfinite(new):
            raise MethodError(
                message("The proposal misses the posterior.", "no overlap", "draws of each where the other has mass", "pass proposal=fit")
            )
        change, log_r, iterations = abs(new - log_r), new, iterations + 1
    # Relative variances of the two means; the chains' one is stretched by their autocorrelation.
    f1 = np.exp(numerator(log_r) - mean(numerator(log_r)))
    f2 = np.exp(denominator(log_r) - mean(denominator(log_r)))
    error = float(np.nan_to_num(convergence.mcse(f2), nan=0.0)) if f2.size >= 16 else float(f2.std(ddof=1) / np.sqrt(f2.size))
    return Bridged(top + log_r, float(np.hypot(f1.std(ddof=1) / np.sqrt(f1.size), error)), iterations)


@cached
def _ratios(target: Any, df: float, number: int) -> Callable:
    """Log ratios of joint and proposal at posterior draws and at as many new proposals as asked for."""
    layout = layout_of(target)

    def run(key: Any, proposal: Proposal, positions: Array, batch: Batch | None) -> tuple[Array, Array]:
        joint = chains.bind(target, layout, batch).value
        ratio = lambda q: joint(q) - log_prob(proposal, q, df)
        others = jax.vmap(lambda k: draw(k, proposal, df))(jax.random.split(key, number))
        return tuple(jax.lax.map(ratio, points, batch_size=BLOCK) for points in (positions, others))

    return jax.jit(run)


def _chains_of(key: Any, fit: Fit, layout: chains.Layout) -> np.ndarray:
    """Draws of the posterior itself, (chains, n, D); a fit without such draws is refused."""
    posterior, method = fit.posterior, fit.method
    if fit.manifest.get("temperature", 1.0) != 1.0:
        wrong = f"a posterior at temperature {fit.manifest['temperature']}"
    elif isinstance(method, ReversibleJump):
        wrong = "draws of models of different size"
    elif isinstance(method, Exact):
        with jax.enable_x64(True):
            return flat(layout, posterior.sample(key, EXACT_DRAWS))[None]
    elif isinstance(posterior, Draws) and posterior.weights is None and isinstance(method, chains.ChainMethod):
        if _tree.rows(posterior.params) < MIN_DRAWS:
            raise MethodError(
                message("Too few draws.", f"{_tree.rows(posterior.params)}", f"at least {MIN_DRAWS}", "fit again with a larger num_samples")
            )
        if fit.manifest.get("departures"):
            warnings.warn(
                f"The draws depart from the posterior ({', '.join(fit.manifest['departures'])}), and so does the evidence from them.",
                HealthWarning,
                stacklevel=3,
            )
        return flat(layout, posterior.params).reshape(posterior.num_chains, -1, len(layout.names))
    else:
        wrong = f"a {type(posterior).__name__} by {type(method).__name__}" + (
            " with weights" if getattr(posterior, "weights", None) is not None else ""
        )
    raise MethodError(
        message(
            "This fit has no posterior draws to bridge from.",
            wrong,
            "Markov chains, such as al.NUTS()",
            "fit it so, or take fit.log_evidence",
        )
    )


def _warn(positions: np.ndarray, found: Bridged) -> None:
    apart = positions.shape[0] > 1 and float(np.nanmax(convergence.rhat(positions))) > RHAT
    if apart:
        warnings.warn(
            "The chains do not agree on the parameters: there are modes that not all of them have seen, and the evidence lacks those that "
            "none has; use al.ParallelTempering or al.SMC.",
            HealthWarning,
            stacklevel=3,
        )
    if found.iterations == MAX_ITERATIONS or found.stderr > FAR:
        warnings.warn(
            f"The proposal hardly overlaps the posterior (standard error {found.stderr:.2g} nats): pass a better one, proposal=fit.",
            HealthWarning,
            stacklevel=3,
        )


class Bridge:
    """Named in messages about the proposal."""


__all__ = ["bridge"]
