"""Outputs f(x) of a posterior, and the compiled statistics of y given them.

Each compiled function takes (likelihood, outputs, [y], nodes) in the model's units, computes in float64, and sees the likelihood only
through its methods.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, logsumexp

from aleator._errors import ModelError
from aleator._typing import Array, Key, Tree
from aleator.likelihoods import Likelihood

BLOCK = 64  # values of y per row handled at once; keeps memory at BLOCK · draws · columns numbers a row
FEW_NODES, MANY_NODES = 64, 2048


@functools.partial(jax.tree_util.register_dataclass, data_fields=["draws", "weights", "mean", "variance", "df", "extra"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outputs:
    """A distribution over the outputs f at some rows: draws, or independent Gaussians.

    draws: tree with leaves (S, rows, ...), usually one array (S, rows, outputs); `weights` (S,), None for equal.
    Gaussian: `mean`, `variance` (rows, outputs) of f; `df` (k,) when a conjugate noise variance was integrated out, so that
    y ~ t_df(mean, variance + scale²).
    extra: the likelihood's constrained parameters drawn jointly with f: leaves (S, ...) for draws, (...) for Gaussian. A leaf of shape ()
    is shared by all draws.
    """

    draws: Tree = None
    weights: Array | None = None
    mean: Array | None = None
    variance: Array | None = None
    df: Array | None = None
    extra: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def gaussian(self) -> bool:
        """True for Gaussian outputs, False for draws."""
        return self.mean is not None

    @property
    def num_rows(self) -> int:
        """Number of rows the outputs are given at."""
        if self.gaussian:
            return int(np.shape(self.mean)[0])  # type: ignore[arg-type]
        return next(int(leaf.shape[1]) for leaf in jax.tree.leaves(self.draws) if np.ndim(leaf) > 1)

    @property
    def num_draws(self) -> int:
        """Number of draws S; 1 for Gaussian outputs."""
        return 1 if self.gaussian else int(jax.tree.leaves(self.draws)[0].shape[0])

    def rows(self, index: slice) -> Outputs:
        """The same distribution at some of the rows."""
        if self.gaussian:
            return dataclasses.replace(self, mean=self.mean[index], variance=self.variance[index])  # type: ignore[index]
        total = self.num_rows

        def per_row(leaf: Array) -> Array:
            return leaf[:, index] if np.ndim(leaf) > 1 and leaf.shape[1] == total else leaf

        draws = jax.tree.map(per_row, self.draws)
        return dataclasses.replace(self, draws=rebatch(draws, total, len(range(total)[index])))


def rebatch(tree: Tree, old: int, new: int) -> Tree:
    """NumPyro distributions in a tree keep their batch shape beside their arrays: after rows were taken or joined, set it from `old` to
    `new` rows, inside nested distributions too. Other trees come back as they are."""

    def is_distribution(node: Any) -> bool:
        return hasattr(node, "_batch_shape")

    def fix(node: Any) -> Any:
        if not is_distribution(node):
            return node
        node = copy.copy(node)
        if node._batch_shape[:1] == (old,):
            node._batch_shape = (new, *node._batch_shape[1:])
        for name, child in vars(node).items():
            if is_distribution(child):
                setattr(node, name, fix(child))
        return node

    return jax.tree.map(fix, tree, is_leaf=is_distribution)


def run(function: Callable[..., Any], predictive: Any, *args: np.ndarray, nodes: int | None = None) -> Any:
    """Call a compiled primitive in float64 and bring the result to the host. `nodes` overrides the number that densities need: averages
    of functions of f that are smooth whatever the noise take few."""
    with jax.enable_x64(True):
        nodes = predictive._nodes() if nodes is None else nodes
        return jax.tree.map(np.asarray, function(predictive.likelihood, predictive.outputs, *args, nodes=nodes))


_compiled = functools.partial(jax.jit, static_argnums=(0,), static_argnames=("nodes",))


def columns_of(likelihood: Likelihood) -> int:
    """Network outputs per target column, when columns have outputs of their own; 0 when they share them (class logits)."""
    one = likelihood.num_outputs(1)
    return one if likelihood.num_outputs(2) == 2 * one else 0


def closed(likelihood: Likelihood, outputs: Outputs) -> bool:
    """True when the Gaussian outputs integrate in closed form; told from shapes alone."""
    if outputs.mean is None:
        return False
    one = jax.ShapeDtypeStruct((1, np.shape(outputs.mean)[1]), float)
    told = lambda *args: None if likelihood.marginal(*args) is None else 0
    found = jax.eval_shape(told, one, one, outputs.extra)
    return found is not None


def double(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf, tree)


def as_draws(likelihood: Likelihood, outputs: Outputs, nodes: int) -> tuple[Tree, jax.Array, Tree]:
    """(draws (S, rows, ...), log weights (S,), extra (S, ...)): the draws themselves, or quadrature nodes of the Gaussian.

    An equally spaced rule over ±12 (many nodes: ±7.5) standard deviations for one output, whose error falls exponentially with the number of nodes however
    wide f is (Gauss–Hermite's does not); Gauss–Hermite with 32 × 32 nodes for two (columns are independent, so they may share nodes: every
    use is per column); for outputs shared between columns, such as class
    logits, a fixed shifted Sobol set of 1024 points, which is not exact (error about 1e-3) but the same at every call.
    """
    if not outputs.gaussian:
        draws, extra = double(outputs.draws), double(outputs.extra)
        num = jax.tree.leaves(draws)[0].shape[0]
        extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num,)) if jnp.ndim(leaf) == 0 else leaf, extra)
        weights = jnp.full((num,), 1 / num) if outputs.weights is None else double(jnp.asarray(outputs.weights))
        return draws, jnp.log(weights / jnp.sum(weights)), extra
    mean, std, extra = double(outputs.mean), jnp.sqrt(double(outputs.variance)), double(outputs.extra)
    per_column = columns_of(likelihood)
    if per_column == 1:
        # Rates grow as e^f, so that their squares live several standard deviations out: few nodes reach farther.
        points = (np.linspace(-7.5, 7.5, nodes) if nodes > FEW_NODES else np.linspace(-12.0, 12.0, 161))[:, None]
        weights = np.exp(-0.5 * points[:, 0] ** 2)
    elif per_column == 2:
        x, w = np.polynomial.hermite_e.hermegauss(min(nodes, FEW_NODES // per_column))
        points = np.stack(np.meshgrid(*[x] * per_column, indexing="ij"), axis=-1).reshape(-1, per_column)
        weights = np.prod(np.stack(np.meshgrid(*[w] * per_column, indexing="ij"), axis=-1), axis=-1).ravel()
    else:
        from scipy.special import ndtri
        from scipy.stats import qmc

        per_column = mean.shape[1]
        shift = np.random.default_rng(0).random(per_column)  # one fixed random shift keeps the points off 0 and 1
        points = ndtri((qmc.Sobol(per_column, scramble=False).random_base2(10) + shift) % 1)
        weights = np.ones(len(points))
    points = np.repeat(points, mean.shape[1] // per_column, axis=1)  # layout: first outputs of all columns, then second outputs
    extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(points), *jnp.shape(leaf))), extra)
    return mean + std * jnp.asarray(points)[:, None, :], jnp.log(jnp.asarray(weights / weights.sum())), extra


def average(log_weights: jax.Array, values: jax.Array) -> jax.Array:
    """Σ_s w_s values_s; a draw of weight 0 takes no part even where it is infinite."""
    weights = jnp.exp(log_weights).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * values, 0.0), axis=0)


def student_factor(outputs: Outputs) -> Any:
    """E[σ²]/scale² = df/(df − 2) when the noise variance was integrated out, infinite for df ≤ 2."""
    if outputs.df is None:
        return 1.0
    df = double(jnp.asarray(outputs.df))
    return jnp.where(df > 2, df / jnp.maximum(df - 2, 1e-300), jnp.inf)


@_compiled
def moments(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)
    means = jax.vmap(likelihood.mean)(f, extra)
    mean = average(log_weights, means)
    factor = student_factor(outputs)
    return (
        mean,
        factor * average(log_weights, jax.vmap(likelihood.variance)(f, extra)),
        factor * average(log_weights, (means - mean) ** 2),
    )


@_compiled
def conditional_means(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> jax.Array:
    f, _, extra = as_draws(likelihood, outputs, nodes)
    return jax.vmap(likelihood.mean)(f, extra)


def marginal(likelihood: Likelihood, outputs: Outputs) -> Any:
    if not outputs.gaussian:
        return None
    df = None if outputs.df is None else double(jnp.asarray(outputs.df))
    return likelihood.marginal(double(outputs.mean), double(outputs.variance), double(outputs.extra), df)


def over_values(at: Callable[[jax.Array], jax.Array], y: jax.Array) -> jax.Array:
    """`at` for each of m stacked values of y, 64 at a time; the last block is padded, so that its body is compiled once."""
    m = y.shape[0]
    if m <= BLOCK:
        return jax.vmap(at)(y)
    blocks = jnp.concatenate([y, jnp.repeat(y[-1:], -m % BLOCK, axis=0)]).reshape(-1, BLOCK, *y.shape[1:])
    values = jax.lax.map(jax.vmap(at), blocks)
    return values.reshape(-1, *values.shape[2:])[:m]


@_compiled
def log_joint(likelihood: Likelihood, outputs: Outputs, y: jax.Array, *, nodes: int) -> jax.Array:
    if outputs.gaussian and (columns_of(likelihood) or marginal(likelihood, outputs) is not None):
        return jnp.sum(log_columns(likelihood, outputs, y[None], nodes=nodes)[0], axis=-1)  # independent columns
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)
    terms = jax.vmap(likelihood.log_prob, (0, None, 0))(f, y, extra)
    return logsumexp(terms + log_weights[:, None], axis=0)


@_compiled
def log_columns(likelihood: Likelihood, outputs: Outputs, y: jax.Array, *, nodes: int) -> jax.Array:
    distribution = marginal(likelihood, outputs)
    if distribution is not None:
        return over_values(distribution.log_prob, y)
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)

    def at(value: jax.Array) -> jax.Array:
        return logsumexp(jax.vmap(likelihood.log_terms, (0, None, 0))(f, value, extra) + log_weights[:, None, None], axis=0)

    return over_values(at, y)


@_compiled
def cdf(likelihood: Likelihood, outputs: Outputs, y: jax.Array, *, nodes: int) -> jax.Array:
    distribution = marginal(likelihood, outputs)
    if distribution is not None:
        return over_values(distribution.cdf, y)
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)
    return over_values(lambda value: average(log_weights, jax.vmap(likelihood.cdf, (0, None, 0))(f, value, extra)), y)


@_compiled
def expected_entropy(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> jax.Array:
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)
    entropy = average(log_weights, jax.vmap(likelihood.entropy)(f, extra))
    if outputs.df is None:
        return entropy
    # σ² ~ InverseGamma(df/2, df/2 · scale²): ½ E[log σ²] replaces ½ log scale².
    half = 0.5 * double(jnp.asarray(outputs.df))
    return entropy + 0.5 * (jnp.log(half) - digamma(half))


@_compiled
def cloud(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Centres and spreads of components; the spread is that of a Gaussian with the same entropy, finite for every tail."""
    if marginal(likelihood, outputs) is not None:
        mean, aleatoric, epistemic = moments(likelihood, dataclasses.replace(outputs, df=None), nodes=nodes)
        return mean[None], jnp.sqrt(aleatoric + epistemic)[None], jnp.ones(1)
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)
    try:
        spread = jnp.exp(jax.vmap(likelihood.entropy)(f, extra) - 0.5 * np.log(2 * np.pi * np.e))
    except (ModelError, NotImplementedError):  # a program's distribution may have no entropy in closed form
        spread = jnp.sqrt(jax.vmap(likelihood.variance)(f, extra))
    return jax.vmap(likelihood.mean)(f, extra), spread, jnp.exp(log_weights)


@_compiled
def normal_components(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    distribution = marginal(likelihood, outputs)
    if distribution is not None:  # a Normal, or a mixture of Normals over the nodes of the raw scale
        component = getattr(distribution, "component_distribution", None)
        if component is None:
            return jnp.ones(1), distribution.mean[None], jnp.sqrt(distribution.variance)[None]
        means, stds = jnp.broadcast_to(component.loc, component.batch_shape), jnp.broadcast_to(component.scale, component.batch_shape)
        return distribution.mixing_distribution.probs[0, 0], jnp.moveaxis(means, -1, 0), jnp.moveaxis(stds, -1, 0)
    f, log_weights, extra = as_draws(likelihood, outputs, nodes)
    return jnp.exp(log_weights), jax.vmap(likelihood.mean)(f, extra), jnp.sqrt(jax.vmap(likelihood.variance)(f, extra))


@functools.partial(jax.jit, static_argnums=(0,))
def narrowness(likelihood: Likelihood, outputs: Outputs) -> jax.Array:
    """Largest std(f) / (width of p(y | f) as a function of f), width = std(y | f) / |dE[y | f]/df|, at the mean and 2 std around."""
    mean, std, extra = double(outputs.mean), jnp.sqrt(double(outputs.variance)), double(outputs.extra)
    ratios = []
    for shift in (-2.0, 0.0, 2.0):
        f = mean + shift * std
        slope = jax.jvp(lambda at: likelihood.mean(at, extra), (f,), (jnp.ones_like(f),))[1]
        noise = likelihood.variance(f, extra)
        # Infinite variance (heavy tails) says nothing about the width of the peak: the entropy does.
        power = jnp.exp(2 * likelihood.entropy(f, extra) - np.log(2 * np.pi * np.e))
        ratios.append(jnp.max(std * jnp.abs(slope) / jnp.sqrt(jnp.maximum(jnp.where(jnp.isfinite(noise), noise, power), 1e-300))))
    return jnp.max(jnp.stack(ratios))


def draw_outputs(key: Key, outputs: Outputs, num_samples: int) -> tuple[Tree, Tree]:
    """num_samples outputs f and extra: whole draws by weight (all rows of one function), or from the Gaussian, each row by itself."""
    key_f, key_noise = jax.random.split(key)
    if not outputs.gaussian:
        f, extra = double(outputs.draws), double(outputs.extra)
        num = outputs.num_draws
        weights = None if outputs.weights is None else jnp.asarray(outputs.weights) / jnp.sum(jnp.asarray(outputs.weights))
        index = jax.random.choice(key_f, num, (num_samples,), p=weights)
        extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num,)) if jnp.ndim(leaf) == 0 else leaf, extra)
        return jax.tree.map(lambda leaf: leaf[index], f), jax.tree.map(lambda leaf: leaf[index], extra)
    mean, std, extra = double(outputs.mean), jnp.sqrt(double(outputs.variance)), double(outputs.extra)
    extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_samples, *jnp.shape(leaf))), extra)
    if outputs.df is not None:
        # σ²/scale² = df/χ²_df, one for each sample and column, scales f and the noise alike.
        df = jnp.broadcast_to(double(jnp.asarray(outputs.df)), mean.shape[1:])
        ratio = jnp.sqrt(0.5 * df / jax.random.gamma(key_noise, 0.5 * df, (num_samples, *df.shape)))
        std = std * ratio[:, None]
        extra = {**extra, "scale": jnp.broadcast_to(extra["scale"].reshape(num_samples, -1), ratio.shape) * ratio}
    return mean + std * jax.random.normal(key_f, (num_samples, *mean.shape)), extra


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("num_samples",))
def sample_means(likelihood: Likelihood, outputs: Outputs, key: Key, *, num_samples: int) -> jax.Array:
    f, extra = draw_outputs(key, outputs, num_samples)
    return jax.vmap(likelihood.mean)(f, extra)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("num_samples",))
def sample_targets(likelihood: Likelihood, outputs: Outputs, key: Key, *, num_samples: int) -> jax.Array:
    key_outputs, key_y = jax.random.split(key)
    f, extra = draw_outputs(key_outputs, outputs, num_samples)
    return jax.vmap(likelihood.sample)(jax.random.split(key_y, num_samples), f, extra)
