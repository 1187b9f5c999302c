"""Draws of a process as functions (pathwise conditioning): made once, evaluated at any rows at any time.

Matheron's rule turns a draw of the prior into one of the posterior,

    f(x) = g(x) + k(x, X)(K + σ²I)⁻¹(y − g(X) − σε),   g ~ GP(m, k),  ε ~ N(0, I),

with g a sum of random features (Wilson et al. 2020), so that a draw costs O(features + n) a row and is the same function wherever it is asked, where `fit.functions` draws the values at its rows jointly, O(rows³).
Its mean over draws is the posterior mean exactly; its covariance is right up to the features' error, which falls as 1/√num_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._random import as_key, seeds_of
from aleator._typing import Array, KeyLike, Tree
from aleator.data import check_arrays
from aleator.gp.conditioned import _twice
from aleator.gp.kernels import RBF, Matern12, Matern32, Matern52
from aleator.gp.questions import _point
from aleator.gp.random_features import check_features, frequencies, waves_of

SPECTRA: dict[type, str] = {RBF: "rbf", Matern12: "matern12", Matern32: "matern32", Matern52: "matern52"}


def paths(key: KeyLike, fit: Any, num_samples: int = 20, num_features: int = 2000) -> Callable[[Any], np.ndarray]:
    """num_samples draws of f given the data of a fit: a function of x (rows, …) with values (num_samples, rows, k), in the units of the y it was fitted to.

    For an exact process with one set of hyper-parameters and a stationary kernel: al.gp.RBF, Matern12, Matern32, Matern52.
    """
    posterior, model = _point(fit, "A draw as a function"), fit.model
    if type(model.kernel) not in SPECTRA:
        names = ", ".join(kind.__name__ for kind in SPECTRA)
        raise ModelError(message("The kernel has no random features here.", repr(model.kernel), names, "use fit.functions(key, x)"))
    check_features(num_features, SPECTRA[type(model.kernel)])
    key_waves, key_weights, key_noise = jax.random.split(as_key(key), 3)
    waves = frequencies(model.kernel.size(), num_features // 2, SPECTRA[type(model.kernel)], True, seeds_of(key_waves, 1)[0])
    with jax.enable_x64(True):
        weights = jax.random.normal(key_weights, (num_samples, num_features, model.targets()))
        noise = jax.random.normal(key_noise, (num_samples, *posterior.y.shape))
        update = _update(model)(posterior.params, waves, weights, noise, posterior.x, posterior.y, posterior.solved(model).lower)

    def evaluate(x: Any) -> np.ndarray:
        x = check_arrays(x, "x")
        with jax.enable_x64(True):
            return np.asarray(_evaluate(model)(posterior.params, waves, weights, update, posterior.x, jax.tree.map(jnp.asarray, x)))

    return evaluate


def _prior(model: Any, params: Tree, waves: Any, weights: Array, x: Tree) -> Array:
    """g(x) − m(x), (S, n, k)."""
    kernel = params["kernel"]
    rows = model.kernel.pick(model.inputs(x)) / model.kernel.value(kernel, "length")
    return model.kernel.value(kernel, "scale") * jnp.einsum("nf,sfk->snk", waves_of(rows, waves), weights)


@cached
def _update(model: Any) -> Callable:
    def compute(params: Tree, waves: Array, weights: Array, noise: Array, x: Tree, y: Array, lower: Array) -> Array:
        """(K + σ²I)⁻¹(y − g(X) − σε), (S, n, k)."""
        away = jnp.asarray(y) - model.mean(params["mean"], model.inputs(x), model.targets()) - _prior(model, params, waves, weights, x)
        scale = jnp.sqrt(model.noise_variance(params, x)).T  # (n, 1) or (n, k)
        right = away - scale * noise
        columns = [_twice(lower[min(j, len(lower) - 1)], right[..., j].T).T for j in range(right.shape[-1])]
        return jnp.stack(columns, axis=-1)

    return jax.jit(compute)


@cached
def _evaluate(model: Any) -> Callable:
    def compute(params: Tree, waves: Array, weights: Array, update: Array, train: Tree, x: Tree) -> Array:
        seen = model.inputs(x)
        cross = model.kernel(params["kernel"], model.inputs(train), seen)
        level = model.mean(params["mean"], seen, model.targets())
        return level + _prior(model, params, waves, weights, x) + jnp.einsum("nr,snk->srk", cross, update)

    return jax.jit(compute)
