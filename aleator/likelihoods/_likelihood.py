"""What every likelihood is: p(y | f, extra), with the checks of shapes that all of them share."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Key
from aleator.hyperpriors import Hyperprior, LogNormal, positive_number

Positive = float | Hyperprior  # a fixed positive number, or learned under this prior
Extra = Any  # a mapping from parameter names to arrays
LEARNED = LogNormal()  # the default prior of learned scales: log σ ~ N(0, 1.5²)


class Likelihood(abc.ABC):
    """p(y | f, extra). Concrete classes are final: none derives from another.

    `support` is "real", "count", "binary" or "label" and tells the predictive how to sum, invert and score.
    """

    support: ClassVar[str]

    def positive(self) -> dict[str, Positive]:
        """The positive parameters by name: a number is fixed, a `Hyperprior` is learned as `log_<name>` of shape (k,). None by default."""
        return {}

    def num_outputs(self, k: int) -> int:
        """How many network outputs k target columns need: one each by default."""
        return k

    @abc.abstractmethod
    def encode(self, y: Any, fitting: bool = True) -> np.ndarray:
        """Targets in canonical form (n, k), labels (n,) int32; (n,) and (n, 1) mean the same.

        Raises `DataError` for anything that cannot be used. `fitting=False` (scoring) allows a single class.
        """

    @abc.abstractmethod
    def log_terms(self, outputs: Any, y: Array, extra: Extra) -> Any:
        """log p of each entry of y given f, (n, k); (n, 1) for labels. Raises `ModelError` at trace time when shapes do not match, so
        that nothing broadcasts."""

    @abc.abstractmethod
    def mean(self, outputs: Any, extra: Extra) -> Any:
        """E[y | f], (n, k); class probabilities (n, K) for labels."""

    @abc.abstractmethod
    def variance(self, outputs: Any, extra: Extra) -> Any:
        """Var[y | f], (n, k); p(1 − p) of each class, (n, K), for labels."""

    @abc.abstractmethod
    def entropy(self, outputs: Any, extra: Extra) -> Any:
        """H[y | f] in nats, (n, k); (n,) for labels."""

    @abc.abstractmethod
    def sample(self, key: Key, outputs: Any, extra: Extra) -> Any:
        """One draw of y in canonical form."""

    @abc.abstractmethod
    def cdf(self, outputs: Any, y: Array, extra: Extra) -> Any:
        """P(Y ≤ y | f), (n, k)."""

    def marginal(self, mean: jax.Array, variance: jax.Array, extra: Extra, df: Array | None = None) -> Any:
        """∫ p(y | f) N(f; mean, variance) df as a NumPyro distribution where it has a closed form; None, as by default, where it has not."""
        return None

    def log_prob(self, outputs: Any, y: Array, extra: Extra) -> jax.Array:
        """log p(y | f), summed over target columns: (n,)."""
        return jnp.sum(self.log_terms(outputs, y, extra), axis=-1)

    def information_root(self, outputs: Any, extra: Extra) -> jax.Array:
        """R (n, o, r) with RRᵀ the Fisher information of f in y. By default (dE[y|f]/df)²/Var[y|f] of each output, which is exact for
        families with one natural parameter and one output a column."""
        f = matrix(self, outputs)
        slope = jax.jvp(lambda at: self.mean(at, extra), (f,), (jnp.ones_like(f),))[1]
        variance = self.variance(f, extra)
        root = jnp.where(variance > 0, jnp.abs(slope) / jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
        return root[:, :, None] * jnp.eye(f.shape[1], dtype=f.dtype)

    def total_information(self, outputs: Any, extra: Extra, weight: Array) -> jax.Array:
        """Σₙ weightₙ·(Fisher information at row n), (o, o)."""
        root = self.information_root(outputs, extra)
        return jnp.einsum("n,nor,npr->op", weight, root, root)

    # Learned parameters, written once: raw = {"log_<name>": (k,)} on the real line.

    def _learned(self) -> dict[str, Hyperprior]:
        return {f"log_{name}": prior for name, prior in self.positive().items() if isinstance(prior, Hyperprior)}

    def init_extra(self, k: int) -> dict[str, jax.Array]:
        """Unconstrained starting values: the prior's median for each learned parameter."""
        return {name: jnp.full((k,), prior.initial()) for name, prior in self._learned().items()}

    def log_prior_extra(self, raw: Extra) -> jax.Array:
        """Σ log p(u) over the unconstrained parameters, Jacobian included: a scalar, 0 when there are none."""
        terms = (jnp.sum(prior.log_prob_unconstrained(raw[name])) for name, prior in self._learned().items())
        return sum(terms, start=jnp.asarray(0.0))

    def sample_extra(self, key: Key, k: int) -> dict[str, jax.Array]:
        """A draw of the unconstrained parameters from their prior."""
        learned = self._learned()
        keys = jax.random.split(key, max(len(learned), 1))
        return {name: prior.sample_unconstrained(keys[i], (k,)) for i, (name, prior) in enumerate(learned.items())}

    def constrain(self, raw: Extra) -> dict[str, jax.Array]:
        """The positive parameters: exp(log_<name>), (k,), when learned; the number itself, shape (), when fixed."""
        return {
            name: jnp.exp(raw[f"log_{name}"]) if isinstance(value, Hyperprior) else jnp.asarray(value)
            for name, value in self.positive().items()
        }


def check_positive(owner: str, name: str, value: Any) -> None:
    """Refuse what is neither a finite positive number nor a prior to learn one under."""
    if isinstance(value, Hyperprior):
        return
    try:
        positive_number(owner, name, value)
    except ModelError:
        expected = "a finite positive number (fixed) or a hyperprior (learned)"
        raise ModelError(
            message(f"{owner}({name}=…) cannot be used.", repr(value), expected, f"pass e.g. {name}=1.0 or {name}=LogNormal()")
        ) from None


def matrix(likelihood: Likelihood, outputs: jax.Array) -> jax.Array:
    """outputs, once it is certain that they are (n, num_outputs)."""
    if jnp.ndim(outputs) != 2:
        raise ModelError(
            message(
                f"{type(likelihood).__name__} needs network outputs with one row per example.",
                f"outputs of shape {jnp.shape(outputs)}",
                "(n, num_outputs)",
                "return a two-dimensional array from the network, (n, 1) for a single output",
            )
        )
    return outputs


def match(likelihood: Likelihood, outputs: jax.Array, y: Array) -> Array:
    """y, once it is certain that y (n, k) meets outputs (n, num_outputs(k)): nothing may broadcast."""
    n, size = matrix(likelihood, outputs).shape
    name = type(likelihood).__name__
    if jnp.ndim(y) != 2 or y.shape[0] != n:
        raise ModelError(
            message(
                f"Targets do not match the network's outputs under {name}.",
                f"outputs {outputs.shape}, y {jnp.shape(y)}",
                f"y of shape ({n}, k)",
                "pass y through likelihood.encode first, one row per example",
            )
        )
    expected = likelihood.num_outputs(y.shape[1])
    if size != expected:
        raise ModelError(
            message(
                f"The network returns the wrong number of outputs for {name}.",
                f"outputs of shape {outputs.shape} for y of shape {y.shape}",
                f"(n, {expected})",
                f"give the network out_size={expected}",
            )
        )
    return y
