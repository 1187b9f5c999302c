"""Shallow nets with a hierarchical prior (E1, E2): y = x'a + Σⱼ βⱼ ψ(x'γⱼ) + ε, x with a leading 1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.hyperpriors import InverseGamma, positive_number
from aleator.likelihoods import Gaussian, Likelihood
from aleator.model import Supervised
from aleator.networks._network import activation
from aleator.priors import Normal, Prior

LOG_2PI = math.log(2.0 * math.pi)


@dataclasses.dataclass(frozen=True)
class Hierarchical(Prior):
    """The prior of deck 004, for γ (m, d), β (m, k) and the linear term (d, k), d = 1 + number of inputs; each output has its own μ_β, σ_β:

    βⱼ ~ N(μ_β, σ_β²), μ_β ~ N(a_beta, A_beta), σ_β⁻² ~ Gamma(c_beta/2, c_beta·C_beta/2);
    γⱼ ~ N(μ_γ, S_γ), μ_γ ~ N(a_gamma, A_gamma), S_γ⁻¹ ~ Wishart(c_gamma, (c_gamma·C_gamma)⁻¹), so that C are prior guesses of σ_β² and S_γ,
    worth c units each; a ~ N(0, A_linear). Matrices may be one number, a diagonal or nested rows; the bias comes first.

    None stands for what suits inputs and targets of unit scale: A_beta = 4/m², C_beta = 10/m (the function keeps its size as m grows),
    C_gamma = diag(4, 9/inputs, …), c_gamma = d + 2. Hyper-parameters are inferred as mu_beta, log σ_β, mu_gamma and the lower Cholesky
    factor of S_γ⁻¹ by rows, its diagonal as logs; densities over them include the Jacobian.
    """

    a_beta: float = 0.0
    A_beta: float | None = None
    c_beta: float = 4.0
    C_beta: float | None = None
    a_gamma: Any = 0.0
    A_gamma: Any = 1.0
    c_gamma: float | None = None
    C_gamma: Any = None
    A_linear: float = 4.0

    def __post_init__(self) -> None:
        for name in ("A_beta", "c_beta", "C_beta", "c_gamma", "A_linear"):
            if getattr(self, name) is not None:
                positive_number("Hierarchical", name, getattr(self, name))
        for name in ("a_gamma", "A_gamma", "C_gamma"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, float):
                object.__setattr__(self, name, _nested(value))

    def constants(self, units: int, size: int) -> Constants:
        """All numbers of the prior for m = `units` and d = `size`, checked."""
        default = np.diag([4.0] + [9.0 / max(size - 1, 1)] * (size - 1))
        guess = default if self.C_gamma is None else _matrix("C_gamma", self.C_gamma, size)
        degrees = size + 2.0 if self.c_gamma is None else float(self.c_gamma)
        if not degrees > size - 1:
            raise ModelError(
                message("Hierarchical(c_gamma=…) is improper.", degrees, f"more than {size - 1} for {size - 1} inputs", "leave c_gamma out")
            )
        return Constants(
            a_beta=float(self.a_beta),
            A_beta=4.0 / units**2 if self.A_beta is None else self.A_beta,
            c_beta=float(self.c_beta),
            C_beta=10.0 / units if self.C_beta is None else self.C_beta,
            a_gamma=_vector("a_gamma", self.a_gamma, size),
            A_gamma=_matrix("A_gamma", self.A_gamma, size),
            c_gamma=degrees,
            C_gamma=guess,
        )

    def init(self, weights: Tree, fan_in: Tree) -> dict:
        (units, size), k = weights["gamma"].shape, weights["beta"].shape[1]
        prior = self.constants(units, size)
        return {
            "mu_beta": jnp.full((k,), prior.a_beta),
            "log_sigma_beta": jnp.full((k,), 0.5 * math.log(prior.C_beta)),
            "mu_gamma": jnp.asarray(prior.a_gamma),
            "factor_gamma": pack(jnp.asarray(np.linalg.cholesky(np.linalg.inv(prior.C_gamma)))),
        }

    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        gamma, beta = raw["gamma"], raw["beta"]
        prior = self.constants(*gamma.shape)
        dtype = gamma.dtype
        factor = unpack(hyper["factor_gamma"])
        top = log_normal(hyper["mu_beta"], prior.a_beta, math.sqrt(prior.A_beta))
        top += InverseGamma(prior.c_beta / 2, prior.c_beta * prior.C_beta / 2).log_prob_unconstrained(hyper["log_sigma_beta"])
        root = np.linalg.inv(np.linalg.cholesky(prior.A_gamma))
        top = jnp.sum(top) + _log_normals(hyper["mu_gamma"] - jnp.asarray(prior.a_gamma, dtype), jnp.asarray(root.T, dtype))
        top += log_wishart(factor, prior.c_gamma, prior.c_gamma * prior.C_gamma)
        below = jnp.sum(log_normal(beta, hyper["mu_beta"], jnp.exp(hyper["log_sigma_beta"])))
        below += jnp.sum(_log_normals(gamma - hyper["mu_gamma"], factor))
        return top + below + (jnp.sum(log_normal(raw["linear"], 0.0, math.sqrt(self.A_linear))) if "linear" in raw else 0.0)

    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        (units, size), k = weights["gamma"].shape, weights["beta"].shape[1]
        prior = self.constants(units, size)
        keys = jax.random.split(key, 7)
        mu_beta = prior.a_beta + math.sqrt(prior.A_beta) * jax.random.normal(keys[0], (k,))
        spread = InverseGamma(prior.c_beta / 2, prior.c_beta * prior.C_beta / 2)
        log_sigma_beta = spread.sample_unconstrained(keys[1], (k,))
        mu_gamma = jnp.asarray(prior.a_gamma) + jnp.asarray(np.linalg.cholesky(prior.A_gamma)) @ jax.random.normal(keys[2], (size,))
        chi = 2.0 * jax.random.gamma(keys[3], jnp.asarray((prior.c_gamma - np.arange(size)) / 2))
        factor = wishart_factor(chi, jax.random.normal(keys[4], (size, size)), jnp.asarray(prior.c_gamma * prior.C_gamma))
        key_gamma, key_linear = jax.random.split(keys[5])
        drawn = {
            "gamma": mu_gamma + spread_rows(factor, jax.random.normal(key_gamma, (units, size))),
            "beta": mu_beta + jnp.exp(log_sigma_beta) * jax.random.normal(keys[6], (units, k)),
        }
        if "linear" in weights:
            drawn["linear"] = math.sqrt(self.A_linear) * jax.random.normal(key_linear, (size, k))
        hyper = {"mu_beta": mu_beta, "log_sigma_beta": log_sigma_beta, "mu_gamma": mu_gamma, "factor_gamma": pack(factor)}
        return drawn, hyper

    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return raw

    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return weights


@dataclasses.dataclass(frozen=True, eq=False)
class Constants:
    """The numbers of a `Hierarchical` prior for one net: a_gamma (d,), A_gamma and C_gamma (d, d), the rest scalars."""

    a_beta: float
    A_beta: float
    c_beta: float
    C_beta: float
    a_gamma: np.ndarray
    A_gamma: np.ndarray
    c_gamma: float
    C_gamma: np.ndarray


@dataclasses.dataclass(frozen=True)
class ShallowNet(Supervised):
    """y = x'a·[linear_term] + Σⱼ βⱼ ψ(x'γⱼ) + σε with m = `units` hidden units; x (n, D) gets a leading 1, so γⱼ has its bias first.

    prior: `Hierarchical`, or `al.Normal({"gamma": …, "beta": …})` for fixed hyper-parameters (weight decay, E1). The noise is
    σ⁻² ~ Gamma(s/2, sS/2), that is Gaussian(InverseGamma(s/2, sS/2)), or fixed, Gaussian(σ).

    scaled=True: all numbers of the prior and of the noise, and the parameters themselves, are in units of the data. When the net meets
    its data it looks at them once and keeps means and standard deviations of the columns of x and y (x_loc, x_scale, y_loc, y_scale), and
    models (y − y_loc)/y_scale given (x − x_loc)/x_scale; predictions are in the units of y. scaled=False takes x and y as they are.

    >>> net = ShallowNet(4).bind(np.ones((5, 2)), np.arange(5.0)[:, None])
    >>> net.outputs(net.init(jax.random.key(0)), np.ones((3, 2))).shape
    (3, 1)
    """

    units: int
    activation: str = "logistic"
    linear_term: bool = False
    prior: Prior = Hierarchical()
    likelihood: Likelihood = Gaussian(InverseGamma(1.0, 0.05))
    scaled: bool = True
    num_targets: int | None = None
    num_inputs: int | None = None
    x_loc: tuple[float, ...] | None = None
    x_scale: tuple[float, ...] | None = None
    y_loc: tuple[float, ...] | None = None
    y_scale: tuple[float, ...] | None = None

    stochastic = False

    def __post_init__(self) -> None:
        if isinstance(self.units, bool) or not isinstance(self.units, int) or self.units < 1:
            raise ModelError(message("ShallowNet(units=…) cannot be used.", repr(self.units), "a whole number ≥ 1", "pass e.g. units=10"))
        activation(self.activation)
        if not isinstance(self.prior, (Hierarchical, Normal)):
            raise ModelError(
                message(
                    "ShallowNet takes no such prior.",
                    repr(self.prior),
                    "al.shallow.Hierarchical() or al.Normal(…)",
                    "use al.BNN(al.networks.Shallow(…), prior=…) for other priors",
                )
            )
        if not isinstance(self.likelihood, Gaussian):
            raise ModelError(
                message("ShallowNet has Gaussian noise.", repr(self.likelihood), "al.Gaussian(…)", "use al.BNN for other noise")
            )

    def bind(self, x: Any, y: Any) -> ShallowNet:
        if y is None:
            raise DataError(message("A supervised model needs targets.", "y=None", "y of shape (N,) or (N, k)", "pass (x, y)"))
        if not hasattr(x, "ndim") or x.ndim not in (1, 2):
            raise DataError(
                message("ShallowNet needs a table of numbers.", f"{getattr(x, 'shape', type(x).__name__)}", "x (N, D)", "flatten x")
            )
        x, y = (np.asarray(value, np.float64).reshape(len(value), -1) for value in (x, y))
        if self.num_inputs not in (None, x.shape[1]) or (self.x_scale is not None and self.num_targets != y.shape[1]):
            raise ModelError(
                message(
                    "This net has met other data.",
                    f"{x.shape[1]} inputs and {y.shape[1]} targets",
                    f"{self.num_inputs} and {self.num_targets}",
                    "start from ShallowNet(units, …)",
                )
            )
        sized = dataclasses.replace(self, num_inputs=x.shape[1], num_targets=y.shape[1])
        if isinstance(self.prior, Hierarchical):
            self.prior.constants(self.units, x.shape[1] + 1)
        if self.x_scale is not None:
            return sized
        if not self.scaled:
            zeros, ones = lambda n: (0.0,) * n, lambda n: (1.0,) * n
            n, k = x.shape[1], y.shape[1]
            return dataclasses.replace(sized, x_loc=zeros(n), x_scale=ones(n), y_loc=zeros(k), y_scale=ones(k))
        (x_loc, x_scale), (y_loc, y_scale) = _spread(x), _spread(y)
        return dataclasses.replace(sized, x_loc=x_loc, x_scale=x_scale, y_loc=y_loc, y_scale=y_scale)

    def init_weights(self, key: Key) -> Tree:
        """γ ~ N(0, diag(4, 9/D, …)), β ~ N(0, 1/m), linear term 0."""
        size, k = self.size(), self.targets()
        key_gamma, key_beta = jax.random.split(key)
        scale = jnp.asarray([2.0] + [3.0 / math.sqrt(max(size - 1, 1))] * (size - 1))
        weights = {
            "gamma": scale * jax.random.normal(key_gamma, (self.units, size)),
            "beta": jax.random.normal(key_beta, (self.units, k)) / math.sqrt(self.units),
        }
        return weights | ({"linear": jnp.zeros((size, k))} if self.linear_term else {})

    def start(self, key: Key) -> Tree:
        return self.init(key)

    def size(self) -> int:
        """d = 1 + number of inputs; known once the net has met data."""
        if self.num_inputs is None:
            raise ModelError(message("The model has not met data yet.", "num_inputs=None", "the number of inputs", "call model.bind(x, y)"))
        return self.num_inputs + 1

    def inputs(self, x: Array) -> Array:
        """x (n, D) in the net's units with a leading 1, (n, d)."""
        x = jnp.asarray(x).reshape(len(x), -1)
        if x.shape[1] != self.size() - 1:
            raise ModelError(message("ShallowNet cannot take this x.", f"{x.shape[1]} inputs", self.size() - 1, "pass the same features"))
        x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
        x = (x - jnp.asarray(self.x_loc, x.dtype)) / jnp.asarray(self.x_scale, x.dtype)
        return jnp.concatenate([jnp.ones((len(x), 1), x.dtype), x], axis=1)

    def targets_of(self, y: Array) -> Array:
        """y (n, k) in the net's units."""
        y = jnp.asarray(y)
        return (y - jnp.asarray(self.y_loc, y.dtype)) / jnp.asarray(self.y_scale, y.dtype)

    def apply(self, weights: Tree, x: Tree, key: Key | None = None) -> Tree:
        rows = self.inputs(x)
        out = activation(self.activation)(rows @ weights["gamma"].T) @ weights["beta"]
        out = out + rows @ weights["linear"] if self.linear_term else out
        return jnp.asarray(self.y_loc, out.dtype) + jnp.asarray(self.y_scale, out.dtype) * out

    def extra(self, params: Tree) -> dict:
        scale = self.likelihood.constrain(params["likelihood"])["scale"]
        return {"scale": scale * jnp.asarray(self.y_scale, scale.dtype)}

    def fan_in(self, weights: Tree) -> Tree:
        return {name: leaf.shape[1] if name == "gamma" else leaf.shape[0] for name, leaf in weights.items()}

    def rescale(self, weights: Tree, extra: dict) -> Tree:
        return weights


# ---- densities and draws ------------------------------------------------------------------------------------------------------------


def log_normal(value: Array, loc: Any, scale: Any) -> Array:
    """log N(value; loc, scale²), elementwise."""
    return -0.5 * ((value - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * LOG_2PI


def _log_normals(deviation: Array, factor: Array) -> Array:
    """log N(deviation; 0, (LLᵀ)⁻¹) of rows (…, d), L = factor (its diagonal positive, not necessarily triangular on one given side)."""
    half = deviation @ factor
    return jnp.sum(jnp.log(jnp.diagonal(factor))) - 0.5 * jnp.sum(half**2, axis=-1) - 0.5 * deviation.shape[-1] * LOG_2PI


def log_wishart(factor: Array, degrees: float, inverse: np.ndarray) -> Array:
    """log p(u) for the packed factor u of Λ = LLᵀ ~ Wishart(degrees, inverse⁻¹), the Jacobian of u → Λ included: 2^d Π L_ii^{d−i+2}."""
    from scipy.special import multigammaln

    size = len(inverse)
    log_diagonal = jnp.log(jnp.diagonal(factor))
    constant = 0.5 * degrees * (np.linalg.slogdet(inverse)[1] - size * math.log(2.0)) - multigammaln(0.5 * degrees, size)
    trace = jnp.sum((jnp.asarray(np.linalg.cholesky(inverse).T, factor.dtype) @ factor) ** 2)
    jacobian = size * math.log(2.0) + jnp.sum(jnp.arange(size + 1, 1, -1) * log_diagonal)
    return constant + (degrees - size - 1.0) * jnp.sum(log_diagonal) - 0.5 * trace + jacobian


def wishart_factor(chi: Array, z: Array, inverse: Array) -> Array:
    """Lower L of Λ = LLᵀ ~ Wishart(ν, B⁻¹), B = `inverse`, by Bartlett: chi (d,) ~ χ²_{ν−i}, i = 0, 1, …, z (d, d) standard normals.

    With B = UUᵀ, U upper triangular (a Cholesky factor of B read backwards), L = U⁻ᵀA is lower for the lower Bartlett factor A.
    """
    upper = jnp.linalg.cholesky(inverse[::-1, ::-1])[::-1, ::-1]
    bartlett = jnp.tril(z, -1) + jnp.diag(jnp.sqrt(chi))
    return jax.scipy.linalg.solve_triangular(upper.T, bartlett, lower=True)


def spread_rows(factor: Array, z: Array) -> Array:
    """Rows z (…, d) ~ N(0, I) → N(0, (LLᵀ)⁻¹): L⁻ᵀz for each."""
    return jax.scipy.linalg.solve_triangular(factor, z.reshape(-1, z.shape[-1]).T, lower=True, trans=1).T.reshape(z.shape)


def pack(factor: Array) -> Array:
    """The lower triangle by rows, (d(d+1)/2,), its diagonal as logs."""
    size = factor.shape[-1]
    logs = jnp.where(jnp.eye(size, dtype=bool), jnp.log(jnp.where(jnp.eye(size, dtype=bool), factor, 1.0)), factor)
    return logs[..., *np.tril_indices(size)]


def unpack(packed: Array) -> Array:
    """The inverse of `pack`, (d, d)."""
    size = int((math.isqrt(8 * packed.shape[-1] + 1) - 1) / 2)
    full = jnp.zeros((*packed.shape[:-1], size, size), packed.dtype).at[..., *np.tril_indices(size)].set(packed)
    return jnp.where(jnp.eye(size, dtype=bool), jnp.exp(full), full)


def _spread(values: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and standard deviations of columns; 1 where a column does not vary."""
    scale = values.std(axis=0)
    return tuple(values.mean(axis=0).tolist()), tuple(np.where(scale > 0, scale, 1.0).tolist())


def _nested(value: Any) -> Any:
    array = np.asarray(value, np.float64)
    return float(array) if array.ndim == 0 else tuple(tuple(row) if isinstance(row, list) else row for row in array.tolist())


def _vector(name: str, value: Any, size: int) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != size):
        raise ModelError(message(f"Hierarchical({name}=…) does not fit.", f"shape {array.shape}", f"a number or ({size},)", "bias first"))
    return np.broadcast_to(array, (size,)).copy()


def _matrix(name: str, value: Any, size: int) -> np.ndarray:
    """A positive definite (size, size) matrix from a number, a diagonal or nested rows."""
    array = np.asarray(value, np.float64)
    full = np.diag(np.broadcast_to(array, (size,))) if array.ndim == 0 or array.shape == (size,) else array
    if full.shape != (size, size) or not np.allclose(full, full.T) or not np.all(np.linalg.eigvalsh(full) > 0):
        expected = f"a positive number, ({size},) or a positive definite ({size}, {size}) matrix"
        raise ModelError(
            message(f"Hierarchical({name}=…) does not fit.", f"{value!r}", expected, "one entry for the bias, then the inputs")
        )
    return full
