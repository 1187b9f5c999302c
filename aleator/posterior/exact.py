"""The exact posterior of a linear model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._cache import cached
from aleator._outputs import Outputs
from aleator._typing import Key, Tree
from aleator.linalg import DensePrecision
from aleator.posterior._pieces import by_rows, check_joint
from aleator.posterior._posterior import Posterior, Score


@dataclasses.dataclass(frozen=True, eq=False)
class LinearGaussian(Posterior):
    """The exact posterior of a `LinearModel`, in float64.

    mean (k, p) and operator (k blocks of p × p): wⱼ ~ N(meanⱼ, Σⱼ), noise scale (k,) known; or, with concentration a and rate b (k,):
    σⱼ² ~ InvGamma(a, bⱼ), wⱼ | σⱼ ~ N(meanⱼ, σⱼ²Σⱼ), so that outputs and y are Student-t with 2a degrees of freedom.
    stats: the sufficient statistics, kept so that more data can be added.
    """

    mean: np.ndarray
    operator: DensePrecision
    scale: np.ndarray | None
    concentration: np.ndarray | None
    rate: np.ndarray | None
    stats: Tree
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            features = by_rows(_features(model), x, lambda rows: rows * self.operator.size * 8)
        mean = features @ self.mean.T
        if self.scale is not None:
            return Outputs(mean=mean, variance=self.operator.quadratic(features), extra={"scale": self.scale})
        variance = self.operator.quadratic(features) * (self.rate / self.concentration)
        return Outputs(mean=mean, variance=variance, df=2.0 * self.concentration, extra={"scale": np.sqrt(self.rate / self.concentration)})

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """ΦM and ΦΣΦᵀ for each output; with unknown noise Σ is that of a Student-t, infinite where its degrees of freedom are 2 or fewer."""
        with jax.enable_x64(True):
            features = by_rows(_features(model), x, lambda rows: rows * self.operator.size * 8)
        rows, k = len(features), len(self.mean)
        check_joint(rows * k)
        scale = np.ones(k) if self.scale is not None else self.rate / np.maximum(self.concentration - 1.0, 0.0)
        each = np.einsum(
            "np,kpq,mq,k->knm",
            features,
            np.broadcast_to(self.operator.covariance(), (k, *self.operator.covariance().shape[1:])),
            features,
            scale,
        )
        covariance = np.zeros((rows, k, rows, k))
        covariance[:, np.arange(k), :, np.arange(k)] = each
        return features @ self.mean.T, covariance

    def sample(self, key: Key, num_samples: int) -> Tree:
        """Draws in the model's own parameters; with unknown noise the weights are in units of it, as `scaled_by_noise` has them."""
        key_noise, key_weights = jax.random.split(key)
        with jax.enable_x64(True):
            z = np.asarray(jax.random.normal(key_weights, (num_samples, *self.mean.shape), jnp.float64))
            spread = self.operator.sqrt_matvec(z)
            if self.scale is not None:
                return {"network": {"weight": self.mean + spread}, "likelihood": {}, "prior": {}}
            gamma = np.asarray(jax.random.gamma(key_noise, self.concentration, (num_samples, *self.rate.shape), jnp.float64))
        sigma = np.sqrt(self.rate / gamma)
        return {"network": {"weight": self.mean / sigma[..., None] + spread}, "likelihood": {"log_scale": np.log(sigma)}, "prior": {}}


@cached
def _features(model: Any) -> Callable:
    """Φ(x) in double precision, for the exact posterior."""
    return jax.jit(lambda x: model.features(_tree.as_float64(x)))
