"""The posterior over functions of a Gaussian process: hyper-parameters from any method, and the data they were inferred from.

Given θ, with A = K(X, X) + σ²I and α = A⁻¹(y − m(X)):

    E f(x) = m(x) + k(x, X)α        Cov f(x, x′) = k(x, x′) − k(x, X)A⁻¹k(X, x′)

in closed form. Where θ itself is uncertain, f is a mixture over draws of θ.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree
from aleator._cache import cached
from aleator._errors import DataError, HealthWarning, message
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.data import Data
from aleator.gp import iterative
from aleator.gp._factor import factor
from aleator.linalg import cholesky
from aleator.posterior import Draws, Point, Posterior, Score, by_rows, check_joint

MAX_FACTORS = 100  # draws of hyper-parameters a prediction uses at most: each costs a factorisation


class Solved(NamedTuple):
    """C (g, n, n) and α (g, n, k/g) for one θ; C is (g, 0, 0) where there is no factor (gp.Iterative)."""

    lower: Array
    weights: Array


@dataclasses.dataclass(frozen=True, eq=False)
class Conditioned(Posterior):
    """f | x, y under a posterior `base` over hyper-parameters. x: the inputs, y (n, k) the targets."""

    base: Any
    x: Tree
    y: np.ndarray
    log_evidence: Score | None = None

    @property
    def num_chains(self) -> int:
        return getattr(self.base, "num_chains", 1)

    @property
    def params(self) -> Tree:
        """The hyper-parameters, where the posterior has them as a point or as draws."""
        return self.base.params

    def sample(self, key: Key, num_samples: int) -> Tree:
        """Draws of the hyper-parameters."""
        with jax.enable_x64(True):
            return self.base.sample(key, num_samples)

    def joined(self, more: Data) -> Data:
        """The data of this posterior and more of it, as a fit takes them."""
        if not isinstance(more, Data):
            raise DataError(message("A Gaussian process keeps its rows.", type(more).__name__, "data in memory", "pass (x, y)"))
        y = np.asarray(more.y)
        both = np.concatenate([self.y, y.reshape(len(y), -1)])
        x = jax.tree.map(lambda old, new: np.concatenate([old, np.asarray(new)]), self.x, more.x)
        return Data(x, both[:, 0] if y.ndim == 1 else both, None)

    def second_look(self, key: Key, fit: Any) -> tuple[str | None, bool]:
        """Doubts about the hyper-parameters of a finished fit, as a sentence, and whether there are none."""
        from aleator.gp.questions import second_look

        return second_look(key, fit)

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            if isinstance(self.base, Point):
                solved = self.solved(model)
                compute = _moments(model)
                piece = lambda rows: compute(self.base.params, self.x, solved, rows)
                mean, variance = by_rows(piece, x, lambda rows: (24 if solved.lower.size else 48) * rows * len(self.y) * len(solved.lower))
                extra = jax.tree.map(np.asarray, model.extra(jax.tree.map(jnp.asarray, self.base.params)))
                return Outputs(mean=mean, variance=np.maximum(variance, 0.0), extra=extra)
            key_params, key_f = jax.random.split(key)
            params, each = self._draws(key_params, num_samples)
            moments = _mixture(model)
            piece = lambda rows: moments(params, self.x, self.y, rows)
            mean, variance = by_rows(piece, x, lambda rows: 24 * rows * len(self.y), axis=1)
            z = np.asarray(jax.random.normal(key_f, (len(mean), each, *mean.shape[1:])))
            draws = mean[:, None] + np.sqrt(np.maximum(variance, 0.0))[:, None] * z
            return _spread(model, params, draws)

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """Draws of f jointly at all rows: exact for each θ, from the eigenvalues of its covariance, so that no jitter is needed."""
        with jax.enable_x64(True):
            key_params, key_f = jax.random.split(key)
            params, each = self._draws(key_params, num_samples)
            x = jax.tree.map(jnp.asarray, x)
            check_joint(_tree.rows(x))
            keys = jax.random.split(key_f, 1 if isinstance(self.base, Point) else _tree.rows(params))  # a point may hold nothing
            draws = np.asarray(_paths(model, each)(keys, params, self.x, self.y, x))
            return _spread(model, params, draws)

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(self.base, Point):
            return super().joint(key, model, x, num_samples)
        with jax.enable_x64(True):
            rows, k = _tree.rows(x), model.likelihood.num_outputs(model.targets())
            check_joint(rows * k)
            mean, each = _joint(model)(self.base.params, self.x, self.solved(model), jax.tree.map(jnp.asarray, x))
            covariance = np.zeros((rows, k, rows, k))
            covariance[:, np.arange(k), :, np.arange(k)] = np.asarray(each)
            return np.asarray(mean), covariance

    def solved(self, model: Any) -> Solved:
        """The factor and weights at a point θ, through the one safe factorisation on the host; made once."""
        if model not in self._kept and model.iterative(len(self.y)) is not None:
            with jax.enable_x64(True):
                solved, residual = _without_factor(model)(self.base.params, self.x, self.y)
            if residual > 10 * model.iterative(len(self.y)).tolerance:
                warnings.warn(
                    f"Conjugate gradients stopped with a relative residual of {residual:.1e}: raise Iterative.num_steps or rank.",
                    HealthWarning,
                    stacklevel=2,
                )
            self._kept.clear()
            self._kept[model] = solved
        if model not in self._kept:
            with jax.enable_x64(True):
                matrix, residual = _matrices(model)(self.base.params, self.x, self.y)
            lower, _ = cholesky(np.asarray(matrix), "covariance of the targets")
            from scipy.linalg import cho_solve

            weights = np.stack([cho_solve((c, True), r) for c, r in zip(lower, np.asarray(residual), strict=True)])
            self._kept.clear()
            self._kept[model] = Solved(lower, weights)
        return self._kept[model]

    @functools.cached_property
    def _kept(self) -> dict[Any, Solved]:
        return {}

    def _draws(self, key: Key, num_samples: int) -> tuple[Tree, int]:
        """Draws of θ, and how many of f each of them stands for."""
        if isinstance(self.base, Point):
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], self.base.params), num_samples
        size = min(num_samples, MAX_FACTORS)
        if isinstance(self.base, Draws) and self.base.weights is None:
            every = _tree.rows(self.base.params)
            size = min(size, every)
            params = _tree.take(self.base.params, np.linspace(0, every - 1, size).round().astype(np.int32))
        else:
            params = self.base.sample(key, size)
        return jax.tree.map(jnp.asarray, params), max(1, num_samples // size)


def _spread(model: Any, params: Tree, draws: np.ndarray) -> Outputs:
    """draws (θ, f, rows, k) as Outputs, the likelihood parameters beside each."""
    extra = jax.tree.map(np.asarray, extras(model, params, len(draws)))
    repeated = jax.tree.map(lambda leaf: np.repeat(leaf, draws.shape[1], axis=0), extra)
    return Outputs(draws=draws.reshape(-1, *draws.shape[2:]), extra=repeated)


def solve(model: Any, params: Tree, x: Tree, y: Array) -> Solved:
    """The same inside compiled code."""

    def one(matrix: Array, residual: Array) -> Solved:
        lower, _ = factor(matrix)
        return Solved(lower, _twice(lower, residual))

    if model.iterative(_tree.rows(x)) is not None:
        return without_factor(model, params, x, y)[0]
    return jax.vmap(one)(model.covariance(params, x), model.residual(params, x, y))


def without_factor(model: Any, params: Tree, x: Tree, y: Array) -> tuple[Solved, Array]:
    """α by conjugate gradients, and the largest relative residual left."""
    one = lambda noise, right: iterative.solve(model.iterative(len(y)), model.kernel, params["kernel"], model.inputs(x), noise, right)
    weights, residual = jax.vmap(one)(model.noise_variance(params, x), model.residual(params, x, y))
    return Solved(jnp.zeros((len(weights), 0, 0)), weights), jnp.max(residual)


def _twice(lower: Array, right: Array) -> Array:
    return solve_triangular(lower, solve_triangular(lower, right, lower=True), lower=True, trans=1)


def _sides(model: Any, params: Tree, train: Tree, solved: Solved, cross: Array) -> tuple[Array, Array]:
    """U, V (g, n, rows) with UᵀV = k(x, X)A⁻¹k(X, x): equal halves from the factor, else k(X, x) itself and its solution."""
    if solved.lower.shape[1]:
        half = jax.vmap(lambda lower: solve_triangular(lower, cross, lower=True))(solved.lower)
        return half, half
    solver, seen = model.iterative(len(cross)), model.inputs(train)
    one = lambda noise: iterative.solve(solver, model.kernel, params["kernel"], seen, noise, cross)[0]
    return jnp.broadcast_to(cross, (len(solved.lower), *cross.shape)), jax.vmap(one)(model.noise_variance(params, train))


def moments(model: Any, params: Tree, train: Tree, solved: Solved, x: Tree) -> tuple[Array, Array]:
    """Mean and variance of the outputs at each row, (rows, o): of f, and where noise differs between rows its raw scale, which is known."""
    seen, k = model.inputs(x), model.targets()
    cross = model.kernel(params["kernel"], model.inputs(train), seen)
    left, right = _sides(model, params, train, solved, cross)
    variance = model.kernel.diag(params["kernel"], seen) - jnp.sum(left * right, axis=1)
    mean = jnp.einsum("nr,gnk->grk", cross, solved.weights)
    raw = model.raw(params, x)
    variance = jnp.broadcast_to(variance.T, (len(raw), k))
    return jnp.concatenate([_columns(model, params, seen, mean), raw], axis=1), jnp.concatenate([variance, jnp.zeros_like(raw)], axis=1)


def joint(model: Any, params: Tree, train: Tree, solved: Solved, x: Tree) -> tuple[Array, Array]:
    """Mean (rows, o) and covariance (o, rows, rows) of the outputs over all rows, column by column."""
    seen, k = model.inputs(x), model.targets()
    cross = model.kernel(params["kernel"], model.inputs(train), seen)
    left, right = _sides(model, params, train, solved, cross)
    covariance = model.kernel(params["kernel"], seen, seen) - jnp.einsum("gnr,gns->grs", left, right)
    covariance = jnp.broadcast_to(0.5 * (covariance + covariance.transpose(0, 2, 1)), (k, *covariance.shape[1:]))
    mean, raw = jnp.einsum("nr,gnk->grk", cross, solved.weights), model.raw(params, x)
    nothing = jnp.zeros((raw.shape[1], *covariance.shape[1:]))
    return jnp.concatenate([_columns(model, params, seen, mean), raw], axis=1), jnp.concatenate([covariance, nothing])


def _columns(model: Any, params: Tree, x: Tree, mean: Array) -> Array:
    """(g, rows, k/g) → (rows, k), with the mean function."""
    away = mean[0] if len(mean) == 1 else mean[:, :, 0].T
    return away + model.mean(params["mean"], x, model.targets())


def root(covariance: Array) -> Array:
    """R with RRᵀ = covariance (n, n), from its eigenvalues: negative ones are rounding, and count as 0."""
    values, vectors = jnp.linalg.eigh(covariance)
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))


@cached
def _matrices(model: Any) -> Callable:
    return jax.jit(lambda params, x, y: (model.covariance(params, x), model.residual(params, x, y)))


@cached
def _without_factor(model: Any) -> Callable:
    return jax.jit(functools.partial(without_factor, model))


@cached
def _moments(model: Any) -> Callable:
    return jax.jit(functools.partial(moments, model))


@cached
def _joint(model: Any) -> Callable:
    return jax.jit(functools.partial(joint, model))


def extras(model: Any, params: Tree, number: int) -> dict:
    """The likelihood's parameters under each of `number` draws of θ, which may hold none."""
    return _extras(model)(jnp.arange(number), params)


@cached
def _extras(model: Any) -> Callable:
    return jax.jit(jax.vmap(lambda number, params: model.extra(params)))


@cached
def _mixture(model: Any) -> Callable:
    """Moments under every draw of θ, (S, rows, k), a factorisation at a time."""

    def compute(params: Tree, train: Tree, y: Array, x: Tree) -> tuple[Array, Array]:
        return jax.lax.map(lambda p: moments(model, p, train, solve(model, p, train, y), x), params)  # draws of something: never empty

    return jax.jit(compute)


@cached
def _paths(model: Any, each: int) -> Callable:
    def compute(keys: Key, params: Tree, train: Tree, y: Array, x: Tree) -> Array:
        def one(args: tuple) -> Array:
            key, p = args
            mean, covariance = joint(model, p, train, solve(model, p, train, y), x)
            z = jax.random.normal(key, (each, *mean.shape))
            return mean + jnp.einsum("kij,sjk->sik", jax.vmap(root)(covariance), z)

        return jax.lax.map(one, (keys, params))

    return jax.jit(compute)
