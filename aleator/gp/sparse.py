"""SparseGP: a Gaussian process seen through M inducing values u = f(z), O(N M²) instead of O(N³), with any likelihood.

Values are whitened, u = m(z) + C v with C Cᵀ = K(z, z), so that the prior of v is N(0, I). With a(x) = C⁻¹k(z, x) and q(v) = N(μ, S),

    E f(x) = m(x) + a(x)ᵀμ        Var f(x) = k(x, x) − a(x)ᵀa(x) + a(x)ᵀS a(x).

Under Gaussian noise the best q is known and leaves the collapsed bound of Titsias (2009), climbed by `gp.Evidence`; any other likelihood, mini-batches and
streams go by `gp.SVGP`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree
from aleator._cache import cached
from aleator._errors import DataError, MethodError, ModelError, message
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.data import Data
from aleator.gp._factor import factor, pivoted, whiten
from aleator.gp.conditioned import extras, root
from aleator.gp.kernels import Kernel
from aleator.gp.means import Mean, Zero
from aleator.gp.process import check_process
from aleator.likelihoods import Gaussian, Likelihood
from aleator.loop import Algorithm
from aleator.posterior import Draws, Point, Posterior, Score, by_rows, check_joint

MAX_CANDIDATES = 10_000  # rows among which inducing inputs are chosen
UNSEEN = 0.8  # share of the prior variance at new rows that inducing inputs may leave open before an update says so
FEWEST = 5.0  # draws of hyper-parameters that must still count after an update


@dataclasses.dataclass(frozen=True)
class SparseGP:
    """f ~ GP(m, k), y ~ likelihood(f), through M inducing inputs z.

    z are chosen among the rows of x, one by one where the variance left by those before is largest (under the prior medians of the kernel), or given by
    `inducing`; learn_inducing moves them with the hyper-parameters. Outputs of the likelihood are independent processes with one kernel.
    """

    kernel: Kernel
    num_inducing: int = 100
    mean: Mean = Zero()
    likelihood: Likelihood = Gaussian()
    learn_inducing: bool = False
    inducing: Any = None
    num_targets: int | None = None

    minibatch = False  # the collapsed bound is not a sum over rows; gp.SVGP has one that is
    stochastic = False
    double = True
    always_double = True
    evidence_kind = "lower bound"

    def __post_init__(self) -> None:
        check_process(self)
        if self.num_inducing < 1:
            raise ModelError(message("A sparse process needs inducing inputs.", self.num_inducing, "an int ≥ 1", "pass num_inducing=100"))
        if self.inducing is not None and not isinstance(self.inducing, tuple):
            object.__setattr__(self, "inducing", _as_tuple(np.asarray(self.inducing, float)))

    def bind(self, x: Tree, y: Tree) -> SparseGP:
        if x is None or y is None or not hasattr(x, "shape"):
            raise DataError(
                message("A sparse process needs inputs and targets.", "x or y is None, or x a tree", "arrays (x, y)", "pass both")
            )
        model = dataclasses.replace(self, kernel=self.kernel.bind(x), num_targets=int(np.shape(y)[1]) if np.ndim(y) == 2 else 1)
        if self.inducing is None:
            model = dataclasses.replace(model, inducing=_as_tuple(greedy(model.kernel, np.asarray(x), self.num_inducing)))
        return dataclasses.replace(model, num_inducing=len(model.inducing))

    def targets(self) -> int:
        if self.num_targets is None:
            raise ModelError(
                message("The model has not met data yet.", "num_targets=None", "the number of columns", "call model.bind(x, y)")
            )
        return self.num_targets

    def num_processes(self) -> int:
        return self.likelihood.num_outputs(self.targets())

    # ---- hyper-parameters ----

    def start(self, key: Key) -> Tree:
        moved = {"inducing": jnp.asarray(self.inducing)} if self.learn_inducing else {}
        extra = self.likelihood.init_extra(self.targets())
        return {"kernel": self.kernel.median(key), "mean": self.mean.init(self.num_processes()), "likelihood": extra} | moved

    def init(self, key: Key) -> Tree:
        return self.start(key) | {"kernel": self.kernel.init(jax.random.clone(key))}

    def sample_prior(self, key: Key) -> Tree:
        key_start, key_kernel, key_mean, key_noise = jax.random.split(key, 4)
        return self.start(key_start) | {
            "kernel": self.kernel.sample(key_kernel),
            "mean": self.mean.sample(key_mean, self.num_processes()),
            "likelihood": self.likelihood.sample_extra(key_noise, self.targets()),
        }

    def log_prior(self, params: Tree) -> Array:
        """Of kernel, mean and likelihood; learned inducing inputs are no part of the model but of the approximation, and have none."""
        kernel, mean = self.kernel.log_prior(params["kernel"]), self.mean.log_prior(params["mean"])
        return kernel + mean + self.likelihood.log_prior_extra(params["likelihood"])

    def extra(self, params: Tree) -> dict:
        return self.likelihood.constrain(params["likelihood"])

    def places(self, params: Tree) -> Array:
        """z, (M, …)."""
        return params["inducing"] if self.learn_inducing else jnp.asarray(self.inducing, jnp.result_type(float))

    # ---- the process ----

    def project(self, params: Tree, x: Tree) -> Array:
        """a(x) = C⁻¹k(z, x), (M, n)."""
        z, kernel = self.places(params), params["kernel"]
        return whiten(self.kernel(kernel, z, z), self.kernel(kernel, z, _tree.as_float64(x)))[0]

    def offset(self, params: Tree, x: Tree) -> Array:
        return self.mean(params["mean"], _tree.as_float64(x), self.num_processes())

    def collapsed(self, params: Tree, x: Tree, y: Array) -> tuple[Array, Array, Array]:
        """The bound log N(y; m, Q + σ²I) − tr(K − Q)/2σ² summed over columns, and the best q: μ (k, M), R (k, M, M) with S = RRᵀ."""
        self._gaussian()
        a, k = self.project(params, x), self.targets()
        noise = jnp.broadcast_to(self.extra(params)["scale"], (k,)) ** 2
        away = _tree.as_float64(jnp.asarray(y)) - self.offset(params, x)
        rest = jnp.sum(self.kernel.diag(params["kernel"], _tree.as_float64(x))) - jnp.sum(a**2)
        gram, cross = a @ a.T, a @ away
        n = a.shape[1]

        def one(variance: Array, cross: Array, square: Array) -> tuple[Array, Array, Array]:
            lower, _ = factor(jnp.eye(len(gram)) + gram / variance)
            half = solve_triangular(lower, cross, lower=True) / variance
            spread = solve_triangular(lower, jnp.eye(len(gram)), lower=True).T
            bound = -0.5 * n * jnp.log(2 * math.pi * variance) - jnp.sum(jnp.log(jnp.diag(lower))) - 0.5 * (square + rest) / variance
            return bound + 0.5 * jnp.sum(half**2), spread @ half, spread

        bounds, location, spread = jax.vmap(one)(noise, cross.T, jnp.sum(away**2, axis=0))
        return jnp.sum(bounds), location, spread

    def log_evidence(self, params: Tree, x: Tree, y: Array) -> Array:
        """The collapsed bound: at most log p(y | θ), equal to it where z holds all rows."""
        return self.collapsed(params, x, y)[0]

    def log_likelihood(self, params: Tree, batch: Any, key: Key | None = None, apply: Any = None) -> Array:
        """The collapsed bound in equal shares, (n,)."""
        if batch.weight is not None:
            raise DataError(message("The collapsed bound takes no weights of rows.", "weights", "(x, y)", "use al.gp.SVGP, which does"))
        bound = self.log_evidence(params, batch.x, batch.y)
        return jnp.full(batch.index.shape, bound / batch.index.shape[0])

    def condition(self, posterior: Posterior, data: Any) -> Posterior:
        if isinstance(posterior, Inducing):
            return posterior
        if not isinstance(data, Data):
            raise DataError(message("The collapsed bound needs all rows.", type(data).__name__, "data in memory", "use al.gp.SVGP"))
        if not isinstance(posterior, (Point, Draws)):
            raise MethodError(
                message("This posterior cannot be conditioned.", type(posterior).__name__, "a point or draws", "use gp.Evidence")
            )
        with jax.enable_x64(True):
            params = (
                jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], posterior.params) if isinstance(posterior, Point) else posterior.params
            )
            number = jnp.arange(1 if isinstance(posterior, Point) else _tree.rows(params))
            _, location, spread = _collapse(self)(number, params, jax.tree.map(jnp.asarray, data.x), jnp.asarray(data.y))
            return Inducing(posterior, np.asarray(location), np.asarray(spread), posterior.log_evidence)

    def closed_form(self, target: Any) -> Algorithm:
        from aleator.gp.evidence import Evidence

        return Evidence().build(target)

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> NoReturn:
        raise ModelError(
            message(
                "Hyper-parameters alone do not make a function.", "model.outputs", "a posterior over functions", "use fit.predict(key, x)"
            )
        )

    def _gaussian(self) -> None:
        if not isinstance(self.likelihood, Gaussian):
            raise ModelError(
                message("The collapsed bound needs Gaussian noise.", repr(self.likelihood), "al.Gaussian", "fit it with al.gp.SVGP()")
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Inducing(Posterior):
    """f through q(v) at the inducing inputs, for each of S settings of the hyper-parameters in `base`: location (S, o, M), spread (S, o, M, M), its root."""

    base: Any
    location: np.ndarray
    spread: np.ndarray
    log_evidence: Score | None = None

    @property
    def params(self) -> Tree:
        return self.base.params

    def sample(self, key: Key, num_samples: int) -> Tree:
        """Draws of the hyper-parameters."""
        with jax.enable_x64(True):
            return self.base.sample(key, num_samples)

    def absorbed(self, model: Any, more: Data) -> tuple[Inducing, str, bool]:
        """This posterior with more rows taken in, hyper-parameters and inducing inputs as they are and the rows before not needed: a sentence on it, and whether it can be
        trusted. Exact for Gaussian noise; for other likelihoods q(v) so far stands in the place of the prior. Draws of hyper-parameters are weighed by how well they foresaw the rows."""
        from aleator.gp.svgp import absorb

        with jax.enable_x64(True):
            x, y = jax.tree.map(jnp.asarray, more.x), jnp.asarray(more.y)
            weight = jnp.ones(len(y)) if more.weight is None else jnp.asarray(more.weight, float)
            found = absorb(model)(self._stacked(), jnp.asarray(self.location), jnp.asarray(self.spread), x, y, weight)
            location, spread, gain, left = (np.asarray(part) for part in found)
        before = getattr(self.base, "weights", None)
        log_weights = gain + (np.log(np.maximum(before, 1e-300)) if before is not None else -np.log(len(gain)))
        together = float(np.logaddexp.reduce(log_weights))
        base, score, told = self.base, self.log_evidence, f"Updated: {len(y)} more rows under the hyper-parameters of before."
        if score is not None:
            score = Score(score.value + together, score.stderr, score.kind if isinstance(model.likelihood, Gaussian) else "estimate")
        healthy = True
        if not isinstance(base, Point):
            weights = np.exp(log_weights - together)
            base, effective = dataclasses.replace(base, weights=weights), 1.0 / np.sum(weights**2)
            if effective < FEWEST:
                told, healthy = f"{told} Only {effective:.1f} of {len(gain)} draws of them foresaw these rows: fit all rows again.", False
        if left.mean() > UNSEEN:
            told += f" The inducing inputs explain {100 * (1 - left.mean()):.0f} % of the prior variance there: gp.extend(fit, data, num_inducing) adds some."
            healthy = False
        return Inducing(base, location, spread, score), told, healthy

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            params = self._stacked()
            compute = _sparse_moments(model)
            cost = lambda rows: 32 * rows * self.location.shape[2] * self.location.shape[1]
            mean, variance = by_rows(lambda rows: compute(params, self.location, self.spread, rows), x, cost, axis=1)
            variance = np.maximum(variance, 0.0)
            extra = jax.tree.map(np.asarray, extras(model, params, len(self.location)))
            if len(mean) == 1 and self._normal(model):
                return Outputs(mean=mean[0], variance=variance[0], extra=jax.tree.map(lambda leaf: leaf[0], extra))
            each = max(1, num_samples // len(mean))
            z = np.asarray(jax.random.normal(key, (len(mean), each, *mean.shape[1:])))
            draws = mean[:, None] + np.sqrt(variance)[:, None] * z
            repeated = jax.tree.map(lambda leaf: np.repeat(leaf, each, axis=0), extra)
            return Outputs(draws=draws.reshape(-1, *mean.shape[1:]), extra=repeated, weights=self._weights(each))

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            check_joint(_tree.rows(x))
            params = self._stacked()
            each = max(1, num_samples // len(self.location))
            keys = jax.random.split(key, len(self.location))
            draws = np.asarray(_sparse_paths(model, each)(keys, params, self.location, self.spread, jax.tree.map(jnp.asarray, x)))
            extra = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), each, axis=0), extras(model, params, len(self.location)))
            return Outputs(draws=draws.reshape(-1, *draws.shape[2:]), extra=extra, weights=self._weights(each))

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        if len(self.location) > 1:
            return super().joint(key, model, x, num_samples)
        with jax.enable_x64(True):
            rows, size = _tree.rows(x), self.location.shape[1]
            check_joint(rows * size)
            first = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], tree)
            mean, each = _sparse_joint(model)(
                first(self._stacked()), first(self.location), first(self.spread), jax.tree.map(jnp.asarray, x)
            )
            covariance = np.zeros((rows, size, rows, size))
            covariance[:, np.arange(size), :, np.arange(size)] = np.asarray(each)
            return np.asarray(mean), covariance

    def _stacked(self) -> Tree:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None] if isinstance(self.base, Point) else jnp.asarray(leaf), self.base.params)

    def _weights(self, each: int) -> np.ndarray | None:
        weights = getattr(self.base, "weights", None)
        return None if weights is None else np.repeat(np.asarray(weights) / each, each)

    def _normal(self, model: Any) -> bool:
        """Whether the predictive can take f as Gaussians: columns that do not share outputs."""
        return model.likelihood.support != "label"


def greedy(kernel: Kernel | Left, x: np.ndarray, number: int, params: Tree = None) -> np.ndarray:
    """`number` of the rows of x, each where the variance that those before leave is largest: a pivoted Cholesky factorisation, O(N M²)."""
    if len(x) > MAX_CANDIDATES:
        x = x[np.random.default_rng(0).choice(len(x), MAX_CANDIDATES, replace=False)]
    number = min(number, len(np.unique(x, axis=0)))
    with jax.enable_x64(True):
        params = kernel.median(jax.random.key(0)) if params is None else params  # type: ignore[union-attr]
        return x[np.asarray(_pivots(kernel, number)(params, jnp.asarray(x)))]


@dataclasses.dataclass(frozen=True)
class Left:
    """The covariance that the inducing inputs of a model leave, k(x, x′) − a(x)·a(x′), as far as `greedy` asks."""

    model: SparseGP

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.model.kernel(params["kernel"], x1, x2) - self.model.project(params, x1).T @ self.model.project(params, x2)

    def diag(self, params: Tree, x: Tree) -> Array:
        return self.model.kernel.diag(params["kernel"], x) - jnp.sum(self.model.project(params, x) ** 2, axis=0)


@cached
def _pivots(kernel: Kernel | Left, number: int) -> Callable:
    return jax.jit(lambda params, x: pivoted(kernel, params, x, number)[1])


def sparse_moments(model: Any, params: Tree, location: Array, spread: Array | None, x: Tree) -> tuple[Array, Array]:
    """Mean and variance of f at each row, (rows, o); without a spread v is known to be `location`."""
    a = model.project(params, x)
    prior = model.kernel.diag(params["kernel"], _tree.as_float64(x)) - jnp.sum(a**2, axis=0)
    mean = a.T @ location.T + model.offset(params, x)
    if spread is None:
        return mean, jnp.broadcast_to(prior[:, None], mean.shape)
    variance = jax.vmap(lambda r: jnp.sum((r.T @ a) ** 2, axis=0))(spread)
    return mean, (prior + variance).T


def sparse_joint(model: Any, params: Tree, location: Array, spread: Array | None, x: Tree) -> tuple[Array, Array]:
    """Mean (rows, o) and covariance (o, rows, rows)."""
    a, rows = model.project(params, x), _tree.as_float64(x)
    prior = model.kernel(params["kernel"], rows, rows) - a.T @ a
    mean = a.T @ location.T + model.offset(params, x)
    if spread is None:
        return mean, jnp.broadcast_to(prior, (len(location), *prior.shape))
    halves = jax.vmap(lambda r: r.T @ a)(spread)
    return mean, prior + jax.vmap(lambda half: half.T @ half)(halves)


def _as_tuple(values: np.ndarray) -> tuple:
    return tuple(_as_tuple(row) for row in values) if values.ndim > 1 else tuple(values.tolist())


@cached
def _collapse(model: Any) -> Callable:
    return jax.jit(lambda number, params, x, y: jax.lax.map(lambda p: model.collapsed(p[1], x, y), (number, params)))


@cached
def _sparse_moments(model: Any) -> Callable:
    return jax.jit(
        lambda params, location, spread, x: jax.lax.map(lambda s: sparse_moments(model, s[0], s[1], s[2], x), (params, location, spread))
    )


@cached
def _sparse_joint(model: Any) -> Callable:
    return jax.jit(functools.partial(sparse_joint, model))


@cached
def _sparse_paths(model: Any, each: int) -> Callable:
    def compute(keys: Key, params: Tree, location: Array, spread: Array, x: Tree) -> Array:
        def one(args: tuple) -> Array:
            key, params, location, spread = args
            mean, covariance = sparse_joint(model, params, location, spread, x)
            return mean + jnp.einsum("kij,sjk->sik", jax.vmap(root)(covariance), jax.random.normal(key, (each, *mean.shape)))

        return jax.lax.map(one, (keys, params, location, spread))

    return jax.jit(compute)
