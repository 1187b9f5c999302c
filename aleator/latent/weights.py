"""Distributions over a finite set: Dirichlet, and the sticks of a truncated Dirichlet process."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import Family, log_beta


@dataclasses.dataclass(frozen=True)
class Dirichlet(Family):
    """Rows π (…, K) ~ Dirichlet(a, …, a) in the coordinates π₁ … π_{K−1}: t(π) = log π, η = a − 1. Parameters: log(π_k / π_K), (…, K − 1).

    concentration: a > 0; a ≥ 1 where modes are wanted (EM), since below it they lie on the border.
    """

    concentration: float = 1.0

    def __post_init__(self) -> None:
        check_concentration(self.concentration)

    def prior(self, num: int, rows: tuple[int, ...] = ()) -> Tree:
        return jnp.full((*rows, num), self.concentration - 1.0)

    def log_partition(self, counts: Array) -> Array:
        alpha = counts + 1.0
        return jnp.sum(jnp.sum(gammaln(alpha), axis=-1) - gammaln(jnp.sum(alpha, axis=-1)))

    def expected(self, counts: Array) -> Array:
        alpha = counts + 1.0
        digamma = jax.scipy.special.digamma
        return digamma(alpha) - digamma(jnp.sum(alpha, axis=-1, keepdims=True))

    def natural(self, params: Array) -> Array:
        return jax.nn.log_softmax(
            jnp.concatenate([params, jnp.zeros_like(params[..., :1])] if params.shape[-1] else [_one(params)], axis=-1)
        )

    def log_jacobian(self, params: Array) -> Array:
        return jnp.sum(self.natural(params))

    def mode(self, counts: Array) -> Array:
        return _ratios(jnp.log(_above(counts)))

    def draw(self, key: Key, counts: Array) -> Array:
        # Logs of gammas and not their ratios: small concentrations underflow to weights that are all zero.
        return _ratios(jax.random.loggamma(key, counts + 1.0))


@dataclasses.dataclass(frozen=True)
class Sticks(Family):
    """π_k = v_k Π_{j<k}(1 − v_j), v_k ~ Beta(1, a), v_K = 1: a Dirichlet process truncated at K. Coordinates v; t = (log v, log(1 − v)),
    η = (N_k, a − 1 + Σ_{j>k} N_j). Parameters: logit v, (K − 1,).

    concentration: a > 0, about how many components N rows make: a log(1 + N/a).
    """

    concentration: float = 1.0

    def __post_init__(self) -> None:
        check_concentration(self.concentration)

    def prior(self, num: int) -> Tree:
        return jnp.stack([jnp.zeros(num - 1), jnp.full(num - 1, self.concentration - 1.0)])

    def gather(self, counts: Array) -> Array:
        """Counts of the components (K,) → of the sticks (2, K − 1)."""
        later = jnp.cumsum(counts[::-1])[::-1]
        return jnp.stack([counts[:-1], later[1:]])

    def spread(self, natural: Array) -> Array:
        """(log v, log(1 − v)), or expectations of them → log π, (K,)."""
        before = jnp.concatenate([jnp.zeros(1), jnp.cumsum(natural[1])])
        return before + jnp.concatenate([natural[0], jnp.zeros(1)])

    def log_partition(self, counts: Array) -> Array:
        return jnp.sum(log_beta(counts[0] + 1.0, counts[1] + 1.0))

    def natural(self, params: Array) -> Array:
        return jnp.stack([jax.nn.log_sigmoid(params), jax.nn.log_sigmoid(-params)])

    def log_jacobian(self, params: Array) -> Array:
        return jnp.sum(self.natural(params))

    def mode(self, counts: Array) -> Array:
        return jnp.log(_above(counts[0])) - jnp.log(_above(counts[1]))

    def draw(self, key: Key, counts: Array) -> Array:
        first, second = jax.random.loggamma(key, counts + 1.0)
        return first - second


def log_weights(family: Any, natural: Tree) -> Array:
    """log π (K,) of either family, from t or its expectation."""
    return family.spread(natural) if isinstance(family, Sticks) else natural


def gather(family: Any, counts: Array) -> Tree:
    """Counts of the components (K,) in the structure of η."""
    return family.gather(counts) if isinstance(family, Sticks) else counts


def check_concentration(value: Any) -> None:
    if not (isinstance(value, (int, float)) and value > 0):
        raise ModelError(message("A concentration must be positive.", repr(value), "a number > 0", "pass e.g. concentration=1.0"))


def _ratios(logs: Array) -> Array:
    return logs[..., :-1] - logs[..., -1:]


def _above(counts: Array) -> Array:
    """Counts whose logarithm is finite: an empty component keeps a weight, one that nobody will notice."""
    return jnp.maximum(counts, 1e-10)


def _one(params: Array) -> Array:
    return jnp.zeros((*params.shape[:-1], 1), params.dtype)
