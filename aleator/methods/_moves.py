"""What samplers that build on others share: windows of warm-up for slow chains, the path from a reference to the target, moves of a kernel
whose density has changed under it, and proposals from the first two moments of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hmc
from aleator.methods._chains import Density, Layout, Stats

EDGES = (0.05, 0.1, 0.2, 0.4, 0.9)  # of warm-up: where windows begin and end
DENSE = 200  # parameters up to which metric="auto" learns a full covariance
MOMENT_DRAWS = 4000  # draws of a fit from which a proposal's moments are taken


def windows(num_warmup: int) -> hmc.Schedule:
    """Windows for chains that need many steps to forget where they were: moments are gathered afresh in each, the last one is half of
    warm-up, the scale alone follows after it."""
    edges = [int(edge * num_warmup) for edge in EDGES]
    number = np.arange(num_warmup)
    return hmc.Schedule((number >= edges[0]) & (number < edges[-1]), np.isin(number, [edge - 1 for edge in edges[1:] if edge > edges[0]]))


def kind_of(metric: str, size: int) -> str:
    """ "auto" → "dense" for few parameters, "diagonal" for many.

    >>> kind_of("auto", 10), kind_of("auto", 10_000)
    ('dense', 'diagonal')
    """
    return metric if metric != "auto" else "dense" if size <= DENSE else "diagonal"


def check_metric(method: Any) -> None:
    allowed = ("auto", "dense", "diagonal", "identity")
    if method.metric not in allowed:
        raise MethodError(message("Unknown metric.", repr(method.metric), f"one of {allowed}", "choose one of them"))


def check_share(method: Any, *names: str) -> None:
    """Refuse hyper-parameters that are not strictly between 0 and 1; None passes."""
    for name in names:
        value = getattr(method, name)
        if value is not None and not (isinstance(value, float) and 0.0 < value < 1.0):
            raise MethodError(
                message(f"{type(method).__name__}.{name} cannot be used.", repr(value), "a number between 0 and 1", f"pass e.g. {name}=0.5")
            )


def spread(metric: hmc.Metric, z: Array) -> Array:
    """Noise z (D,) with the covariance of the metric: L z."""
    return metric.scale * z if metric.factor is None else metric.factor @ z


def covariance_metric(moments: hmc.Moments, metric: hmc.Metric) -> hmc.Metric:
    """A metric from the moments of positions alone, shrunk towards its own diagonal by D + 5 pseudo-draws; the old one where the chain
    has not moved."""
    n = jnp.maximum(moments.count, 2).astype(moments.mean.dtype)
    covariance = moments.square / (n - 1.0)
    if metric.factor is None:
        scale = jnp.sqrt(covariance)
        return metric._replace(scale=jnp.where(scale > 0.0, scale, metric.scale))
    factor = shrunk_factor(covariance, n)
    good = jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.diagonal(factor) > 0.0)
    return metric._replace(factor=jnp.where(good, factor, metric.factor))


def shrunk_factor(covariance: Array, n: Any) -> Array:
    """Cholesky factor (D, D) of a covariance estimated from n draws, shrunk towards its diagonal."""
    keep = n / (n + covariance.shape[0] + 5.0)
    return jnp.linalg.cholesky(keep * covariance + (1.0 - keep) * jnp.diag(jnp.diagonal(covariance)))


def refresh(state: Any, position: Array, density: Density) -> Any:
    """A kernel's state moved to a position, or under a density, that it did not choose: `log_density` and `gradient` are worked out again,
    what warm-up has learned stays. A sampler whose state wraps another's keeps that one as `core`."""
    if "core" in state._fields:
        return state._replace(core=refresh(state.core, position, density))
    if "gradient" in state._fields:
        value, gradient = density.value_and_grad(position)
        return state._replace(position=position, log_density=value, gradient=gradient)
    if "log_density" in state._fields:
        return state._replace(position=position, log_density=density.value(position))
    return state._replace(position=position)


def repeat(
    key: Key, step: Callable[[Key, Any, Density], tuple[Any, Stats]], state: Any, density: Density, number: int
) -> tuple[Any, Stats]:
    """So many transitions as one: evaluations are summed, acceptances averaged, the rest is the last one's."""
    if number == 1:
        return step(key, state, density)
    key_first, key_others = jax.random.split(key)

    def again(i: Array, carry: tuple[Any, Stats]) -> tuple[Any, Stats]:
        state, before = carry
        state, now = step(jax.random.fold_in(key_others, i), state, density)
        sums = {name: getattr(before, name) + getattr(now, name) for name in ("acceptance", "evaluations", "outside", "undefined")}
        return state, now._replace(diverging=before.diverging | now.diverging, **sums)

    state, now = jax.lax.fori_loop(1, number, again, step(key_first, state, density))
    return state, now._replace(acceptance=now.acceptance / number)


# ---- from a reference to the target -----------------------------------------------------------------------------------------------


def has_reference(target: Any) -> bool:
    """Whether there is a prior, or a reference, to begin from."""
    return target.model is not None or target.reference is not None


def halves(target: Any, layout: Layout, density: Density) -> Callable[[Array], tuple[Array, Array]]:
    """q → (r, ℓ) with log target = r + ℓ: log prior and log-likelihood; for a bare density its reference and the rest, or (0, all of it)
    without one. r + βℓ is the path from β = 0, the prior, to β = 1."""
    if not has_reference(target):
        return lambda q: (jnp.zeros((), q.dtype), density.value(q))
    if target.model is not None and target.temperature == 1.0:
        return density.parts

    def split(q: Array) -> tuple[Array, Array]:
        reference = target.log_prior(layout.unravel(q))
        return reference, density.value(q) - reference

    return split


def along(reference: Array, rest: Array, beta: Array) -> Array:
    """r + βℓ, where 0·(−∞) = 0."""
    return reference + jnp.where(beta == 0.0, 0.0, beta * rest)


def log_mean(log_values: Array, axis: int = -1) -> Array:
    """log of the mean of exponentials, −∞ where all are zero."""
    return jax.nn.logsumexp(log_values, axis=axis) - float(np.log(log_values.shape[axis]))


# ---- proposals from two moments ---------------------------------------------------------------------------------------------------


class Proposal(NamedTuple):
    """Student-t with `df` degrees of freedom (∞: Gaussian) around mean (D,), scale matrix LLᵀ, factor L (D, D)."""

    mean: Array
    factor: Array


def draw(key: Key, proposal: Proposal, df: float) -> Array:
    """q = m + L z / √(g/df), z ~ N(0, I), g ~ χ²(df)."""
    key_normal, key_tail = jax.random.split(key)
    z = jax.random.normal(key_normal, proposal.mean.shape, proposal.mean.dtype)
    if np.isfinite(df):
        z = z / jnp.sqrt(2.0 / df * jax.random.gamma(key_tail, df / 2, (), z.dtype))
    return proposal.mean + proposal.factor @ z


def log_prob(proposal: Proposal, position: Array, df: float) -> Array:
    """The log density of `draw`, normalised."""
    size = len(proposal.mean)
    z = jax.scipy.linalg.solve_triangular(proposal.factor, position - proposal.mean, lower=True)
    logdet = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(proposal.factor))))
    if not np.isfinite(df):
        return -0.5 * jnp.sum(z**2) - logdet - 0.5 * size * float(np.log(2 * np.pi))
    from scipy.special import gammaln

    constant = float(gammaln((df + size) / 2) - gammaln(df / 2) - 0.5 * size * np.log(df * np.pi))
    return constant - logdet - 0.5 * (df + size) * jnp.log1p(jnp.sum(z**2) / df)


def frozen_moments(proposal: Any) -> tuple | None:
    """A Fit, or (mean (D,), covariance (D, D)), as nested tuples: hashable, and stored with the method."""
    if proposal is None:
        return None
    if hasattr(proposal, "posterior"):
        with jax.enable_x64(True):
            drawn = proposal.posterior.sample(jax.random.key(0), MOMENT_DRAWS)
        flat = np.concatenate([np.asarray(leaf, np.float64).reshape(_tree.rows(drawn), -1) for leaf in jax.tree.leaves(drawn)], axis=1)
        proposal = flat.mean(axis=0), np.atleast_2d(np.cov(flat.T))
    try:
        mean, covariance = (np.asarray(part, np.float64) for part in proposal)
        np.linalg.cholesky(covariance)
        fits = mean.ndim == 1 and covariance.shape == (len(mean), len(mean))
    except (TypeError, ValueError, np.linalg.LinAlgError):
        fits = False
    if not fits:
        raise MethodError(
            message(
                "This is not a proposal.",
                f"{type(proposal).__name__}, or moments that are not positive definite",
                "a Fit, or (mean (D,), covariance (D, D))",
                "pass proposal=fit of e.g. al.Variational(family='full_rank')",
            )
        )
    return tuple(mean.tolist()), tuple(map(tuple, covariance.tolist()))


def proposal_of(moments: tuple, layout: Layout, method: Any) -> Proposal:
    """The proposal of `frozen_moments`, for this target."""
    mean, covariance = np.asarray(moments[0]), np.asarray(moments[1])
    if len(mean) != len(layout.names):
        raise MethodError(
            message(
                f"The proposal of {type(method).__name__} does not fit the target.",
                f"{len(mean)} parameters",
                f"{len(layout.names)} parameters",
                "pass a fit of the same model",
            )
        )
    kind = jnp.result_type(float)
    return Proposal(jnp.asarray(mean, kind), jnp.asarray(np.linalg.cholesky(covariance), kind))
