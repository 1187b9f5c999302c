"""Noise that differs between rows: known, or a smooth function of x learned with the rest. Beside al.HeteroscedasticGaussian in a `gp.GP`.

The likelihood reads σ(x) = min_scale + softplus(raw(x)); a noise says what raw(x) is. Given its parameters raw(x) is known, so that functions still integrate out in
closed form; the parameters are hyper-parameters like others, maximised by gp.Evidence (the most likely noise of Kersting et al. 2007) or sampled by al.NUTS.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.features import columns as as_columns
from aleator.gp._factor import factor
from aleator.gp.kernels import RBF, Kernel
from aleator.hyperpriors import LogNormal
from aleator.likelihoods import HeteroscedasticGaussian


class Noise(abc.ABC):
    """raw(params, x, k) → (n, k), and the parameters it takes."""

    def bind(self, x: Tree) -> Noise:
        return self

    def inputs(self, x: Tree) -> Tree:
        """What kernel and mean see of x."""
        return x

    def start(self, key: Key, k: int) -> Tree:
        return {}

    def sample(self, key: Key, k: int) -> Tree:
        return {}

    def log_prior(self, params: Tree) -> Array:
        return jnp.zeros(())

    @abc.abstractmethod
    def raw(self, params: Tree, x: Tree, k: int, likelihood: HeteroscedasticGaussian) -> Array: ...


@dataclasses.dataclass(frozen=True)
class KnownNoise(Noise):
    """The standard deviation of each row's noise stands in a column of x, as measurements that come with their errors have it; kernel and mean see the other columns.
    It must be above the likelihood's min_scale."""

    column: int = -1

    def bind(self, x: Tree) -> Noise:
        if np.ndim(x) != 2 or np.shape(x)[1] < 2 or not np.all(np.asarray(x)[:, self.column] > 0):
            got = f"x of shape {np.shape(x)}" if np.ndim(x) != 2 or np.shape(x)[1] < 2 else "numbers ≤ 0 in it"
            raise DataError(
                message("KnownNoise reads standard deviations from a column of x.", got, "(n, D + 1), that column > 0", "put them there")
            )
        return self

    def inputs(self, x: Tree) -> Tree:
        return jnp.delete(x, self.column, axis=1)

    def raw(self, params: Tree, x: Tree, k: int, likelihood: HeteroscedasticGaussian) -> Array:
        above = jnp.maximum(x[:, self.column] - likelihood.min_scale, 1e-300)
        return jnp.broadcast_to((above + jnp.log(-jnp.expm1(-above)))[:, None], (len(above), k))  # log(eˢ − 1), for small s too


@dataclasses.dataclass(frozen=True)
class NoiseProcess(Noise):
    """raw(x) = level + a(x)·v, v ~ N(0, I): a process with this kernel through `num_inducing` of the inputs, a(x) = C⁻¹k(z, x), CCᵀ = K(z, z); for each target column its
    own v. With gp.Linear() the logarithm of the noise is near linear in x, with gp.Categorical each level has a noise of its own."""

    kernel: Kernel = RBF(scale=LogNormal(0.0, 0.5))
    num_inducing: int = 20
    level: float = -1.0
    level_sd: float = 1.5
    inducing: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel) or self.num_inducing < 1:
            got = f"{self.kernel!r}, {self.num_inducing}"
            raise ModelError(message("A noise process needs a kernel and inducing inputs.", got, "e.g. al.gp.RBF(), 20", "pass such"))

    def bind(self, x: Tree) -> Noise:
        from aleator.gp.sparse import _as_tuple, greedy

        kernel = self.kernel.bind(x)
        places = self.inducing
        if places is None:
            places = _as_tuple(np.asarray(greedy(kernel, np.asarray(x, np.float64), self.num_inducing)))
        return dataclasses.replace(self, kernel=kernel, inducing=places, num_inducing=len(places))

    def start(self, key: Key, k: int) -> Tree:
        return {"kernel": self.kernel.median(key), "level": jnp.full((k,), self.level), "values": jnp.zeros((k, self.num_inducing))}

    def sample(self, key: Key, k: int) -> Tree:
        key_kernel, key_level, key_values = jax.random.split(key, 3)
        level = self.level + self.level_sd * jax.random.normal(key_level, (k,))
        return {"kernel": self.kernel.sample(key_kernel), "level": level, "values": jax.random.normal(key_values, (k, self.num_inducing))}

    def log_prior(self, params: Tree) -> Array:
        level, values = (params["level"] - self.level) / self.level_sd, params["values"]
        squares = jnp.sum(level**2) + jnp.sum(values**2)
        constant = level.size * math.log(self.level_sd) + 0.5 * (level.size + values.size) * math.log(2 * math.pi)
        return self.kernel.log_prior(params["kernel"]) - 0.5 * squares - constant

    def raw(self, params: Tree, x: Tree, k: int, likelihood: HeteroscedasticGaussian) -> Array:
        z = jnp.asarray(self.inducing, jnp.result_type(float))
        lower, _ = factor(self.kernel(params["kernel"], z, z))
        a = solve_triangular(lower, self.kernel(params["kernel"], z, x), lower=True)
        return params["level"] + a.T @ params["values"].T


def long_form(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Several outputs as one: x (n, D), y (n, k) → x with the number of the output as a last column (m, D + 1), y (m,), entries that are NaN left out. For
    `gp.RBF(columns=…) * gp.Categorical(k, column=D)`, outputs that inform each other (the coregionalised process)."""
    x, y = np.asarray(as_columns(np.asarray(x, np.float64))), np.asarray(y, np.float64)
    if y.ndim != 2 or len(x) != len(y):
        raise DataError(
            message("Outputs do not match inputs.", f"x {x.shape}, y {y.shape}", "(n, D) and (n, k)", "one row of y a row of x")
        )
    rows, outputs = np.nonzero(~np.isnan(y))
    return np.column_stack([x[rows], outputs]), y[rows, outputs]


def check_noise(noise: Any, likelihood: Any) -> None:
    """Noise that differs between rows, and the likelihood that has it, come together."""
    if (noise is None) == isinstance(likelihood, HeteroscedasticGaussian) or not isinstance(noise, Noise | None):
        raise ModelError(
            message(
                "Noise and likelihood do not belong together.",
                f"noise={noise!r}, likelihood={likelihood!r}",
                "al.HeteroscedasticGaussian() with noise=al.gp.NoiseProcess() or al.gp.KnownNoise(), al.Gaussian() without",
                "pass both, or neither",
            )
        )
