"""Priors on positive scales, seen through u = log σ.

Samplers and optimisers move on the real line, so each prior gives the density of u with the Jacobian of σ = eᵘ included, written in
closed form on the log scale: no overflow where σ itself would leave float32.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Key


def positive_number(owner: str, name: str, value: Any) -> None:
    """Refuse anything but a finite positive Python number, in the house form."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise ModelError(message(f"{owner}({name}=…) cannot be used.", repr(value), "a finite positive number", f"pass e.g. {name}=1.0"))


class Hyperprior(abc.ABC):
    """A prior over a positive scale σ (for `InverseGamma`: stated on σ²), usable on the real line through u = log σ."""

    @abc.abstractmethod
    def distribution(self) -> Any:
        """The NumPyro distribution of σ (of σ² for `InverseGamma`)."""

    @abc.abstractmethod
    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        """log p(u) for u = log σ: log p(σ) + log |dσ/du|, elementwise."""

    @abc.abstractmethod
    def sample_unconstrained(self, key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
        """Draws of u = log σ, of the given shape."""

    @abc.abstractmethod
    def initial(self) -> float:
        """The median of u: a sensible place to start."""


@dataclasses.dataclass(frozen=True)
class LogNormal(Hyperprior):
    """log σ ~ N(loc, scale²).

    >>> LogNormal(0.0, 1.5).initial()
    0.0
    """

    loc: float = 0.0
    scale: float = 1.5

    def __post_init__(self) -> None:
        if isinstance(self.loc, bool) or not isinstance(self.loc, (int, float, np.integer, np.floating)) or not math.isfinite(self.loc):
            raise ModelError(message("LogNormal(loc=…) cannot be used.", repr(self.loc), "a finite number", "pass e.g. loc=0.0"))
        positive_number("LogNormal", "scale", self.scale)

    def distribution(self) -> Any:
        import numpyro.distributions as dist

        return dist.LogNormal(self.loc, self.scale)

    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        """log N(u; loc, scale²)."""
        return -0.5 * ((u - self.loc) / self.scale) ** 2 - math.log(self.scale) - 0.5 * math.log(2 * math.pi)

    def sample_unconstrained(self, key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
        return self.loc + self.scale * jax.random.normal(key, shape)

    def initial(self) -> float:
        return float(self.loc)


@dataclasses.dataclass(frozen=True)
class HalfNormal(Hyperprior):
    """σ = |z|, z ~ N(0, scale²)."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive_number("HalfNormal", "scale", self.scale)

    def distribution(self) -> Any:
        import numpyro.distributions as dist

        return dist.HalfNormal(self.scale)

    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        """½ log(2/π) − log s − e^{2u}/(2s²) + u."""
        return 0.5 * math.log(2 / math.pi) - math.log(self.scale) - 0.5 * jnp.exp(2 * (u - math.log(self.scale))) + u

    def sample_unconstrained(self, key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
        return math.log(self.scale) + jnp.log(jnp.abs(jax.random.normal(key, shape)))

    def initial(self) -> float:
        return math.log(self.scale) + math.log(0.6744897501960817)  # Φ⁻¹(3/4), the median of |z|


@dataclasses.dataclass(frozen=True)
class HalfCauchy(Hyperprior):
    """σ = |z|, z ~ Cauchy(0, scale)."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive_number("HalfCauchy", "scale", self.scale)

    def distribution(self) -> Any:
        import numpyro.distributions as dist

        return dist.HalfCauchy(self.scale)

    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        """log(2/π) + v − log(1 + e^{2v}) with v = u − log s."""
        v = u - math.log(self.scale)
        return math.log(2 / math.pi) + v - jax.nn.softplus(2 * v)

    def sample_unconstrained(self, key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
        return math.log(self.scale) + jnp.log(jnp.abs(jax.random.cauchy(key, shape)))

    def initial(self) -> float:
        return math.log(self.scale)


@dataclasses.dataclass(frozen=True)
class Gamma(Hyperprior):
    """σ ~ Gamma(concentration a, rate b): p(σ) ∝ σ^{a−1} e^{−bσ}."""

    concentration: float
    rate: float

    def __post_init__(self) -> None:
        positive_number("Gamma", "concentration", self.concentration)
        positive_number("Gamma", "rate", self.rate)

    def distribution(self) -> Any:
        import numpyro.distributions as dist

        return dist.Gamma(self.concentration, self.rate)

    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        """a log b − log Γ(a) + a u − b eᵘ."""
        a, v = self.concentration, u + math.log(self.rate)
        return a * v - math.lgamma(a) - jnp.exp(v)

    def sample_unconstrained(self, key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
        return jax.random.loggamma(key, self.concentration, shape) - math.log(self.rate)

    def initial(self) -> float:
        return math.log(_gamma_median(self.concentration)) - math.log(self.rate)


@dataclasses.dataclass(frozen=True)
class InverseGamma(Hyperprior):
    """σ² ~ InverseGamma(concentration a, rate b): a prior on the **variance**, the conjugate one for Gaussian noise.

    p(σ²) ∝ (σ²)^{−a−1} e^{−b/σ²}. `distribution()` is the one of σ²; everything unconstrained is in u = log σ as for the others.
    """

    concentration: float
    rate: float

    def __post_init__(self) -> None:
        positive_number("InverseGamma", "concentration", self.concentration)
        positive_number("InverseGamma", "rate", self.rate)

    def distribution(self) -> Any:
        import numpyro.distributions as dist

        return dist.InverseGamma(self.concentration, self.rate)

    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        """a w − log Γ(a) − eʷ + log 2 with w = log b − 2u; the log 2 + 2u of dσ²/du = 2σ² is inside."""
        a, w = self.concentration, math.log(self.rate) - 2 * u
        return a * w - math.lgamma(a) - jnp.exp(w) + math.log(2)

    def sample_unconstrained(self, key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
        return 0.5 * (math.log(self.rate) - jax.random.loggamma(key, self.concentration, shape))

    def initial(self) -> float:
        return 0.5 * (math.log(self.rate) - math.log(_gamma_median(self.concentration)))


def _gamma_median(concentration: float) -> float:
    from scipy.special import gammaincinv

    # For tiny concentrations the median underflows; the floor keeps the starting point finite.
    return max(float(gammaincinv(concentration, 0.5)), 1e-12)
