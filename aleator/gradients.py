"""Monte Carlo gradients of an expectation under a Gaussian: the pathwise and the score-function estimator.

    L(μ, σ) = E f(w),    w = μ + σε,    ε ~ N(0, I),    f: a tree of arrays → a number

    pathwise   ∂L/∂μ = E f′(w),              ∂L/∂σ = E f′(w) ε              needs a differentiable f
    score      ∂L/∂μ = E (f(w) − b) ε/σ,     ∂L/∂σ = E (f(w) − b) (ε² − 1)/σ    needs only values of f

Both are unbiased where they apply. The score function pays with variance: it grows with the size of f (not only with its slope), with 1/σ²,
and with the number of weights. A baseline b that does not depend on ε takes the size of f out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message, nearest
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree

ESTIMATORS = ("pathwise", "score")


class Moments(NamedTuple):
    """Mean and variance of an estimator over repeats, and their standard errors. Each is a pair of trees: for ∂L/∂μ and for ∂L/∂σ."""

    mean: tuple[Tree, Tree]
    mean_stderr: tuple[Tree, Tree]
    variance: tuple[Tree, Tree]
    variance_stderr: tuple[Tree, Tree]


def estimate(
    key: KeyLike,
    function: Callable[[Tree], Array],
    mean: Tree,
    scale: Tree,
    estimator: str = "pathwise",
    num_draws: int = 1,
    baseline: bool = False,
    antithetic: bool = False,
) -> tuple[Tree, Tree]:
    """One estimate (∂L/∂μ, ∂L/∂σ) of L = E f(μ + σε), averaged over num_draws draws; two trees like `mean`.

    function maps a tree like `mean` to a scalar, in JAX. scale is a tree like `mean` (same shapes), or one number for all entries.

    estimator="score" also works where f has jumps. "pathwise" does not: it sees the slope between the jumps only, which for a step function
    is 0 everywhere, and says so without an error. Use it for f that are continuous, with a derivative almost everywhere.

    baseline (score only) subtracts from each f(wᵢ) the mean of f over the *other* draws, which is independent of wᵢ and so adds no bias:
    the estimate becomes the sample covariance of f and the score. It needs two draws or more.

    antithetic draws ε in pairs ±ε (an even num_draws). The other half of a pair is no longer independent, so the baseline leaves out the
    whole pair, and needs two pairs or more.

    >>> grad_mean, grad_scale = estimate(0, lambda w: w + w**2, 0.5, 1.0, num_draws=2, antithetic=True)
    >>> float(grad_mean)  # exactly 1 + 2μ: a pair of draws cancels the noise of a linear slope
    2.0
    """
    mean, scale = _check(function, mean, scale, estimator, num_draws, baseline, antithetic)
    return _estimate(as_key(key), function, mean, scale, estimator, num_draws, baseline, antithetic)


def variance(
    key: KeyLike,
    function: Callable[[Tree], Array],
    mean: Tree,
    scale: Tree,
    estimator: str = "pathwise",
    num_draws: int = 1,
    baseline: bool = False,
    antithetic: bool = False,
    repeats: int = 1000,
    batch_size: int = 1000,
) -> Moments:
    """Mean and variance of `estimate` over independent repeats, with standard errors; NumPy trees in float64.

    The standard error of the variance is √[(m₄ − v² (R − 3)/(R − 1))/R] with m₄ the fourth central moment and R repeats.
    batch_size: how many repeats are worked on at once (memory: batch_size · num_draws weights, and R gradients).
    """
    if not repeats >= 4:
        raise MethodError(message("Too few repeats for a variance.", f"repeats={repeats}", "4 or more", "pass e.g. repeats=1000"))
    mean, scale = _check(function, mean, scale, estimator, num_draws, baseline, antithetic)
    once = lambda k: _estimate(k, function, mean, scale, estimator, num_draws, baseline, antithetic)
    many = jax.jit(lambda keys: jax.lax.map(once, keys, batch_size=min(batch_size, repeats)))(jax.random.split(as_key(key), repeats))
    moments = [_moments(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(many)]
    return Moments(*(jax.tree.unflatten(jax.tree.structure(many), [leaf[i] for leaf in moments]) for i in range(4)))


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(R, …) → mean, its standard error, variance, its standard error, each of the trailing shape."""
    repeats = len(values)
    mean, var = values.mean(axis=0), values.var(axis=0, ddof=1)
    fourth = np.mean((values - mean) ** 4, axis=0)
    spread = np.maximum(fourth - var**2 * (repeats - 3) / (repeats - 1), 0.0)  # ≥ 0 but for rounding
    return mean, np.sqrt(var / repeats), var, np.sqrt(spread / repeats)


def _estimate(
    key: Key,
    function: Callable[[Tree], Array],
    mean: Tree,
    scale: Tree,
    estimator: str,
    num_draws: int,
    baseline: bool,
    antithetic: bool,
) -> tuple[Tree, Tree]:
    noise = _noise(key, mean, num_draws, antithetic)
    weights = jax.tree.map(lambda m, s, e: m + s * e, mean, scale, noise)
    if estimator == "pathwise":
        slopes = jax.vmap(jax.grad(lambda w: _as_number(function, w)))(weights)
        return jax.tree.map(lambda g: jnp.mean(g, axis=0), slopes), jax.tree.map(lambda g, e: jnp.mean(g * e, axis=0), slopes, noise)
    values = jax.vmap(lambda w: _as_number(function, w))(weights)
    if baseline:
        values = _leave_out(values, group=2 if antithetic else 1)
    average = lambda score: jnp.tensordot(values.astype(score.dtype), score, axes=1) / num_draws
    return (
        jax.tree.map(lambda e, s: average(e / s), noise, scale),
        jax.tree.map(lambda e, s: average((e**2 - 1) / s), noise, scale),
    )


def _noise(key: Key, mean: Tree, num_draws: int, antithetic: bool) -> Tree:
    """ε, (num_draws, …) per leaf; antithetic: the second half is minus the first."""
    leaves, structure = jax.tree.flatten(mean)
    rows = num_draws // 2 if antithetic else num_draws
    drawn = [jax.random.normal(k, (rows, *m.shape), m.dtype) for k, m in zip(jax.random.split(key, len(leaves)), leaves, strict=True)]
    return jax.tree.unflatten(structure, [jnp.concatenate([e, -e]) if antithetic else e for e in drawn])


def _leave_out(values: Array, group: int) -> Array:
    """f minus the mean of f over the other groups: [Σ over others] = total − own. values: (num_draws,), members of a group n/group apart."""
    table = values.reshape(group, -1)
    # Centred first, which changes no difference: totals of large values would lose the digits that matter.
    table = table - jnp.mean(table)
    others = -jnp.sum(table, axis=0) / (table.size - group)  # the total is 0 now
    return (table - others).reshape(-1)


def _as_number(function: Callable[[Tree], Array], weights: Tree) -> Array:
    """f(w) as a float, so that a function that counts (integers, booleans) works too."""
    value = jnp.asarray(function(weights))
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)


def _check(
    function: Callable[[Tree], Array], mean: Tree, scale: Tree, estimator: str, num_draws: int, baseline: bool, antithetic: bool
) -> tuple[Tree, Tree]:
    """(mean, scale) as trees of floating arrays of the same shapes, or a clear refusal."""
    if estimator not in ESTIMATORS:
        hint = nearest(str(estimator), ESTIMATORS)
        raise MethodError(message("Unknown estimator.", f"{estimator!r}{hint}", f"one of {ESTIMATORS}", "choose one of them"))
    if num_draws < 1 or (antithetic and num_draws % 2):
        expected = "an even number, as draws come in pairs" if antithetic else "1 or more"
        raise MethodError(message("The number of draws does not work.", f"num_draws={num_draws}", expected, "change num_draws"))
    if baseline and estimator == "pathwise":
        raise MethodError(
            message("Only the score function has a baseline.", "estimator='pathwise', baseline=True", "baseline=False", "leave it out")
        )
    if baseline and num_draws < (least := 4 if antithetic else 2):
        raise MethodError(
            message(
                "The baseline is the mean over other draws, and there are none.",
                f"num_draws={num_draws}" + (" in pairs" if antithetic else ""),
                f"num_draws ≥ {least}",
                "take more draws, or baseline=False",
            )
        )
    mean = jax.tree.map(_floating, mean)
    if jax.tree_util.all_leaves([scale]):
        scale = jax.tree.map(lambda _: scale, mean)
    if _tree.paths(scale) != _tree.paths(mean):
        got = f"leaves {_tree.paths(scale)}"
        raise MethodError(message("scale is not a tree like mean.", got, f"leaves {_tree.paths(mean)}", "match them, or pass one number"))
    for path, m, s in zip(_tree.paths(mean), jax.tree.leaves(mean), jax.tree.leaves(scale), strict=True):
        if np.shape(s) not in ((), m.shape):
            raise MethodError(message(f"The scale of {path or 'w'} has another shape.", np.shape(s), m.shape, "pass one scale per entry"))
        if not isinstance(s, jax.core.Tracer) and not (np.all(np.isfinite(s)) and np.all(np.asarray(s) > 0)):
            raise MethodError(message(f"The scale of {path or 'w'} is not positive.", s, "finite numbers > 0", "pass standard deviations"))
    leaves, structure = jax.tree.flatten(mean)
    spread = [jnp.broadcast_to(jnp.asarray(s, m.dtype), m.shape) for m, s in zip(leaves, jax.tree.leaves(scale), strict=True)]
    shape = jax.eval_shape(function, mean)
    if getattr(shape, "shape", None) != ():
        raise MethodError(message("The function must return a number.", f"{shape}", "a scalar", "sum over its entries"))
    return mean, jax.tree.unflatten(structure, spread)


def _floating(leaf: Array) -> Array:
    leaf = jnp.asarray(leaf)
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(float)
