"""GP: a Gaussian process with Gaussian noise as a model whose parameters are the hyper-parameters; functions are integrated out."""

from __future__ import annotations

import dataclasses
import math
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
from aleator.gp._factor import factor, log_normal
from aleator.gp.conditioned import Conditioned
from aleator.gp.kernels import Kernel
from aleator.gp.means import Constant, Mean
from aleator.likelihoods import Gaussian, Likelihood
from aleator.loop import Algorithm
from aleator.model import rows_of, signature
from aleator.posterior import Posterior


@dataclasses.dataclass(frozen=True)
class GP:
    """y = f(x) + σε, f ~ GP(m, k): exact, by factorising K + σ²I (n³/3 operations, 8n² bytes: to about 10⁴ rows).

    Parameters are the hyper-parameters {"kernel", "mean", "likelihood"}, on the real line under weak priors, so that lengths cannot run off; x and y near
    unit scale are assumed, as tables make them. Any method that takes a full batch infers them: `gp.Evidence()` maximises evidence times prior, al.NUTS
    samples. Columns of y are independent given kernel and mean parameters, each with its own σ where that is learned; for outputs that inform each other
    see `gp.Categorical`.

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

    minibatch = False
    stochastic = False
    double = True  # chains run in float64,
    always_double = True  # and so does everything else

    def __post_init__(self) -> None:
        check_process(self)
        if not isinstance(self.likelihood, Gaussian):
            raise ModelError(
                message(
                    "GP integrates functions out under Gaussian noise only.",
                    repr(self.likelihood),
                    "al.Gaussian",
                    "use al.gp.SparseGP for other likelihoods",
                )
            )

    def bind(self, x: Tree, y: Tree) -> GP:
        if x is None or y is None:
            raise DataError(message("A Gaussian process needs inputs and targets.", "x or y is None", "(x, y)", "pass both"))
        return _bound(self, signature(x), int(np.shape(y)[1]) if np.ndim(y) == 2 else 1)

    def targets(self) -> int:
        if self.num_targets is None:
            raise ModelError(
                message("The model has not met data yet.", "num_targets=None", "the number of columns", "call model.bind(x, y)")
            )
        return self.num_targets

    # ---- hyper-parameters ----

    def start(self, key: Key) -> Tree:
        k = self.targets()
        return {"kernel": self.kernel.median(key), "mean": self.mean.init(k), "likelihood": self.likelihood.init_extra(k)}

    def init(self, key: Key) -> Tree:
        return self.start(key) | {"kernel": self.kernel.init(jax.random.clone(key))}

    def sample_prior(self, key: Key) -> Tree:
        (key_kernel, key_mean, key_noise), k = jax.random.split(key, 3), self.targets()
        return {
            "kernel": self.kernel.sample(key_kernel),
            "mean": self.mean.sample(key_mean, k),
            "likelihood": self.likelihood.sample_extra(key_noise, k),
        }

    def log_prior(self, params: Tree) -> Array:
        kernel, mean = self.kernel.log_prior(params["kernel"]), self.mean.log_prior(params["mean"])
        return kernel + mean + self.likelihood.log_prior_extra(params["likelihood"])

    def extra(self, params: Tree) -> dict:
        return self.likelihood.constrain(params["likelihood"])

    # ---- the process ----

    def covariance(self, params: Tree, x: Tree) -> Array:
        """K + σ²I, (g, n, n): one for all columns of y where they share σ (g = 1), else one each."""
        noise = jnp.atleast_1d(self.extra(params)["scale"]) ** 2
        x = _tree.as_float64(x)
        return self.kernel(params["kernel"], x, x) + noise[:, None, None] * jnp.eye(_tree.rows(x))

    def residual(self, params: Tree, x: Tree, y: Array) -> Array:
        """y − m(x), (g, n, k/g): beside the covariance that is theirs."""
        k, noise = self.targets(), jnp.atleast_1d(self.extra(params)["scale"])
        away = _tree.as_float64(jnp.asarray(y)) - self.mean(params["mean"], _tree.as_float64(x), k)
        return away[None] if len(noise) == 1 else away.T[:, :, None]

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(yᵢ | y₁ … yᵢ₋₁), (n,), from the rows of C⁻¹(y − m), C Cᵀ = K + σ²I: their sum is the evidence."""
        if batch.weight is not None:
            raise DataError(
                message("A Gaussian process takes no weights of rows.", "weights", "(x, y)", "repeat rows, or drop the weights")
            )

        def terms(matrix: Array, residual: Array) -> Array:
            lower, _ = factor(matrix)
            z = solve_triangular(lower, residual, lower=True)
            return -0.5 * jnp.sum(z**2, axis=1) - z.shape[1] * (jnp.log(jnp.diag(lower)) + 0.5 * math.log(2 * math.pi))

        return jnp.sum(jax.vmap(terms)(self.covariance(params, batch.x), self.residual(params, batch.x, batch.y)), axis=0)

    def log_evidence(self, params: Tree, x: Tree, y: Array) -> Array:
        """log p(y | θ), functions integrated out: a scalar whose derivative costs one inverse."""
        return jnp.sum(jax.vmap(log_normal)(self.covariance(params, x), self.residual(params, x, y)))

    def condition(self, posterior: Posterior, data: Any) -> Conditioned:
        """The posterior over functions, given one over hyper-parameters and the data: what a Fit predicts with."""
        if not isinstance(data, Data):
            raise DataError(message("A Gaussian process keeps its rows.", type(data).__name__, "data in memory", "pass (x, y)"))
        return Conditioned(posterior, jax.tree.map(np.asarray, data.x), np.asarray(data.y, np.float64), posterior.log_evidence)

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
def _bound(model: GP, shapes: Any, k: int) -> GP:
    rows = rows_of(shapes)
    model = dataclasses.replace(model, kernel=model.kernel.bind(rows), num_targets=k)
    shape = jax.eval_shape(lambda key, x: model.kernel(model.kernel.init(key), x, x), jax.random.key(0), rows).shape
    if shape != (2, 2):
        raise ModelError(message("The kernel has a wrong shape.", f"{shape} for 2 rows", "(2, 2)", "return one number a pair of rows"))
    return model
