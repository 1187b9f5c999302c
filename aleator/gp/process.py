"""GP: a Gaussian process with Gaussian noise as a model whose parameters are the hyper-parameters; functions are integrated out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree
from aleator._cache import cached
from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch, Data
from aleator.gp import iterative
from aleator.gp._factor import factor, log_normal
from aleator.gp.conditioned import Conditioned
from aleator.gp.iterative import Iterative
from aleator.gp.kernels import Kernel
from aleator.gp.means import Constant, Mean
from aleator.gp.noises import Noise, check_noise
from aleator.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from aleator.loop import Algorithm
from aleator.model import rows_of, signature
from aleator.posterior import Point, Posterior, Score

MOST = 10_000  # rows that are factorised; above, conjugate gradients


@dataclasses.dataclass(frozen=True)
class GP:
    """y = f(x) + σε, f ~ GP(m, k): exact, by factorising K + σ²I (n³/3 operations, 8n² bytes: to about 10⁴ rows).

    Parameters are the hyper-parameters {"kernel", "mean", "likelihood"}, on the real line under weak priors, so that lengths cannot run off; x and y near
    unit scale are assumed, as tables make them. Any method that takes a full batch infers them: `gp.Evidence()` maximises evidence times prior, al.NUTS
    samples. Columns of y are independent given kernel and mean parameters, each with its own σ where that is learned; for outputs that inform each other
    see `gp.long_form`.

    noise: with al.HeteroscedasticGaussian(), what σ(x) is: gp.KnownNoise(column) or gp.NoiseProcess(). solver: gp.Iterative() for conjugate gradients in
    the place of the factor; taken by itself above 10⁴ rows.

    >>> import aleator as al
    >>> x = np.linspace(0, 1, 20)
    >>> model = GP(al.gp.RBF(0.3, 1.0), al.gp.Zero(), al.Gaussian(0.1))
    >>> params = model.bind(x, x[:, None]).init(jax.random.key(0))
    >>> params
    {'kernel': {}, 'mean': {}, 'likelihood': {}}
    """

    kernel: Kernel
    mean: Mean = Constant()
    likelihood: Likelihood = Gaussian()
    num_targets: int | None = None
    noise: Noise | None = None
    solver: Iterative | None = None

    minibatch = False
    stochastic = False
    double = True  # chains run in float64,
    always_double = True  # and so does everything else

    def __post_init__(self) -> None:
        check_process(self)
        if not isinstance(self.likelihood, Gaussian | HeteroscedasticGaussian):
            raise ModelError(
                message(
                    "GP integrates functions out under Gaussian noise only.",
                    repr(self.likelihood),
                    "al.Gaussian, or al.HeteroscedasticGaussian with noise=…",
                    "use al.gp.SparseGP for other likelihoods",
                )
            )
        check_noise(self.noise, self.likelihood)

    def bind(self, x: Tree, y: Tree) -> GP:
        if x is None or y is None:
            raise DataError(message("A Gaussian process needs inputs and targets.", "x or y is None", "(x, y)", "pass both"))
        model = self if self.noise is None else dataclasses.replace(self, noise=self.noise.bind(x))
        return _bound(model, signature(x), int(np.shape(y)[1]) if np.ndim(y) == 2 else 1)

    def targets(self) -> int:
        if self.num_targets is None:
            raise ModelError(
                message("The model has not met data yet.", "num_targets=None", "the number of columns", "call model.bind(x, y)")
            )
        return self.num_targets

    # ---- hyper-parameters ----

    def start(self, key: Key) -> Tree:
        k, own = self.targets(), {}
        if self.noise is not None:
            key, key_noise = jax.random.split(key)
            own = {"noise": self.noise.start(key_noise, k)}
        return {"kernel": self.kernel.median(key), "mean": self.mean.init(k), "likelihood": self.likelihood.init_extra(k)} | own

    def init(self, key: Key) -> Tree:
        return self.start(key) | {"kernel": self.kernel.init(jax.random.clone(key))}

    def sample_prior(self, key: Key) -> Tree:
        k, own = self.targets(), {}
        if self.noise is not None:
            key, key_own = jax.random.split(key)
            own = {"noise": self.noise.sample(key_own, k)}
        key_kernel, key_mean, key_noise = jax.random.split(key, 3)
        return own | {
            "kernel": self.kernel.sample(key_kernel),
            "mean": self.mean.sample(key_mean, k),
            "likelihood": self.likelihood.sample_extra(key_noise, k),
        }

    def log_prior(self, params: Tree) -> Array:
        kernel, mean = self.kernel.log_prior(params["kernel"]), self.mean.log_prior(params["mean"])
        noise = 0.0 if self.noise is None else self.noise.log_prior(params["noise"])
        return kernel + mean + noise + self.likelihood.log_prior_extra(params["likelihood"])

    def extra(self, params: Tree) -> dict:
        return self.likelihood.constrain(params["likelihood"])

    # ---- the process ----

    def inputs(self, x: Tree) -> Tree:
        """x as kernel and mean see it, in double precision."""
        x = _tree.as_float64(jax.tree.map(jnp.asarray, x))
        return x if self.noise is None else self.noise.inputs(x)

    def raw(self, params: Tree, x: Tree) -> Array:
        """The likelihood's raw scales at each row, (n, k), or (n, 0) where noise is the same for all."""
        x, likelihood = _tree.as_float64(jax.tree.map(jnp.asarray, x)), self.likelihood
        if self.noise is None or not isinstance(likelihood, HeteroscedasticGaussian):
            return jnp.zeros((_tree.rows(x), 0))
        return self.noise.raw(params["noise"], x, self.targets(), likelihood)

    def noise_variance(self, params: Tree, x: Tree) -> Array:
        """σ² of each row, (g, n): one set for all columns of y where they share it (g = 1), else one each."""
        if isinstance(self.likelihood, HeteroscedasticGaussian):
            return (self.likelihood.min_scale + jax.nn.softplus(self.raw(params, x).T)) ** 2
        scale = jnp.atleast_1d(self.extra(params)["scale"])[:, None]
        return jnp.broadcast_to(scale**2, (len(scale), _tree.rows(x)))

    def covariance(self, params: Tree, x: Tree) -> Array:
        """K + σ²I, (g, n, n): one for all columns of y where they share σ (g = 1), else one each."""
        noise, x = self.noise_variance(params, x), self.inputs(x)
        return self.kernel(params["kernel"], x, x) + noise[:, :, None] * jnp.eye(_tree.rows(x))

    def residual(self, params: Tree, x: Tree, y: Array) -> Array:
        """y − m(x), (g, n, k/g): beside the covariance that is theirs."""
        k = self.targets()
        away = _tree.as_float64(jnp.asarray(y)) - self.mean(params["mean"], self.inputs(x), k)
        shared = self.noise is None and jnp.size(self.extra(params)["scale"]) == 1
        return away[None] if shared else away.T[:, :, None]

    def iterative(self, num_rows: int) -> Iterative | None:
        """How so many rows are solved where not by a factor."""
        return self.solver if self.solver is not None or num_rows <= MOST else Iterative()

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(yᵢ | y₁ … yᵢ₋₁), (n,), from the rows of C⁻¹(y − m), C Cᵀ = K + σ²I: their sum is the evidence."""
        if batch.weight is not None:
            raise DataError(
                message("A Gaussian process takes no weights of rows.", "weights", "(x, y)", "use al.gp.KnownNoise, or drop the weights")
            )
        if self.iterative(_tree.rows(batch.x)) is not None:
            raise ModelError(
                message(
                    "log p(yᵢ | y<ᵢ) needs a factor.",
                    f"{_tree.rows(batch.x)} rows solved iteratively",
                    "gp.Evidence",
                    "use it, or gp.SparseGP",
                )
            )

        def terms(matrix: Array, residual: Array) -> Array:
            lower, _ = factor(matrix)
            z = solve_triangular(lower, residual, lower=True)
            return -0.5 * jnp.sum(z**2, axis=1) - z.shape[1] * (jnp.log(jnp.diag(lower)) + 0.5 * math.log(2 * math.pi))

        return jnp.sum(jax.vmap(terms)(self.covariance(params, batch.x), self.residual(params, batch.x, batch.y)), axis=0)

    def log_evidence(self, params: Tree, x: Tree, y: Array) -> Array:
        """log p(y | θ), functions integrated out: a scalar whose derivative costs one inverse."""
        if self.iterative(_tree.rows(x)) is not None:
            return self.estimate(params, x, y)[0]
        return jnp.sum(jax.vmap(log_normal)(self.covariance(params, x), self.residual(params, x, y)))

    def estimate(self, params: Tree, x: Tree, y: Array) -> tuple[Array, Array]:
        """The same without a factor, and its standard error."""
        solver: Any = self.iterative(_tree.rows(x)) or Iterative()
        one = lambda noise, residual: iterative.log_normal(solver, self.kernel, params["kernel"], self.inputs(x), noise, residual)
        value, error = jax.vmap(one)(self.noise_variance(params, x), self.residual(params, x, y))
        return jnp.sum(value), jnp.sqrt(jnp.sum(error**2))

    def condition(self, posterior: Posterior, data: Any) -> Conditioned:
        """The posterior over functions, given one over hyper-parameters and the data: what a Fit predicts with."""
        if not isinstance(data, Data):
            raise DataError(message("A Gaussian process keeps its rows.", type(data).__name__, "data in memory", "pass (x, y)"))
        x, y, score = jax.tree.map(np.asarray, data.x), np.asarray(data.y, np.float64), posterior.log_evidence
        if self.iterative(len(y)) is not None and isinstance(posterior, Point):
            with jax.enable_x64(True):
                value, error = _estimate(self)(posterior.params, x, y)
            score = Score(float(value), float(error), "estimate")
        return Conditioned(posterior, x, y, score)

    def closed_form(self, target: Any) -> Algorithm:
        """What al.Exact does with this model: the closed form given hyper-parameters, these by maximum evidence."""
        from aleator.gp.evidence import Evidence

        return Evidence().build(target)

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> NoReturn:
        raise ModelError(
            message(
                "Hyper-parameters alone do not make a function.",
                "model.outputs",
                "a posterior over functions",
                "use fit.predict(key, x), fit.functions(key, x), or al.gp.prior_functions(key, model, x)",
            )
        )


def check_process(model: Any) -> None:
    """Refuse parts that are not what they should be."""
    if not isinstance(model.kernel, Kernel):
        raise ModelError(message("This is not a kernel.", repr(model.kernel), "an object such as al.gp.RBF()", "see al.gp"))
    if not isinstance(model.mean, Mean):
        raise ModelError(message("This is not a mean.", repr(model.mean), "al.gp.Zero(), al.gp.Constant(), al.gp.Fixed(f)", "pass one"))
    if not isinstance(model.likelihood, Likelihood):
        raise ModelError(message("This is not a likelihood.", repr(model.likelihood), "an object such as al.Gaussian()", "call it"))


@cached
def _estimate(model: GP) -> Callable:
    return jax.jit(model.estimate)


@cached
def _bound(model: GP, shapes: Any, k: int) -> GP:
    rows = rows_of(shapes)
    rows = rows if model.noise is None else jax.eval_shape(model.noise.inputs, rows)
    model = dataclasses.replace(model, kernel=model.kernel.bind(rows), num_targets=k)
    shape = jax.eval_shape(lambda key, x: model.kernel(model.kernel.init(key), x, x), jax.random.key(0), rows).shape
    if shape != (2, 2):
        raise ModelError(message("The kernel has a wrong shape.", f"{shape} for 2 rows", "(2, 2)", "return one number a pair of rows"))
    return model
