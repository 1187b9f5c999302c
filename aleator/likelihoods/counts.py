"""Likelihoods of counts, exact in float32.

log Γ differences cancel: at y = 10⁴ in float32 the textbook formula is wrong in the second decimal. Loader's saddle-point form (Fast and
accurate computation of binomial probabilities, 2000) sums only small terms, and takes any real y ≥ 0.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Array, Key
from aleator.likelihoods._likelihood import LEARNED, Extra, Likelihood, Positive, check_positive, match, matrix
from aleator.likelihoods._targets import encode_counts

LARGEST = 2**31 - 1


class _Count(Likelihood):
    """Counts with mean e^f whose law given f is a NumPyro distribution with batch shape (n, k)."""

    support: ClassVar[str] = "count"

    @abc.abstractmethod
    def distribution(self, outputs: jax.Array, extra: Extra) -> Any:
        """p(y | f, extra)."""

    def encode(self, y: Any, fitting: bool = True) -> np.ndarray:
        return encode_counts(y, type(self).__name__)

    def mean(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        return jnp.exp(matrix(self, outputs))

    def sample(self, key: Key, outputs: jax.Array, extra: Extra) -> jax.Array:
        """Counts beyond int32 are its largest: they would wrap around to negative ones, and an infinite rate is drawn as 0 by JAX."""
        drawn = self.distribution(outputs, extra).sample(_threefry(key))
        return jnp.where(jnp.isinf(self.mean(outputs, extra)), LARGEST, jnp.clip(drawn, 0, LARGEST)).astype(jnp.int32)

    def cdf(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        y = jnp.floor(jnp.asarray(match(self, outputs, y), outputs.dtype))
        return jnp.where(y < 0, 0.0, self.distribution(outputs, extra).cdf(jnp.maximum(y, 0.0)))


@dataclasses.dataclass(frozen=True)
class Poisson(_Count):
    """Counts with mean e^f: log p = y f − e^f − log y!. f is the log rate."""

    def distribution(self, outputs: jax.Array, extra: Extra) -> Any:
        """Poisson(e^f) with batch shape (n, k)."""
        import numpyro.distributions as dist

        return dist.Poisson(jnp.exp(matrix(self, outputs)))

    def log_terms(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        return _poisson_log_pmf(outputs, match(self, outputs, y))

    def variance(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        return jnp.exp(matrix(self, outputs))

    def entropy(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        mean = jnp.exp(matrix(self, outputs))
        return _count_entropy(lambda y: _poisson_log_pmf(outputs[..., None], y), mean, jnp.sqrt(mean))


@dataclasses.dataclass(frozen=True)
class NegativeBinomial(_Count):
    """Over-dispersed counts: mean μ = e^f, variance μ + μ²/r; the concentration r is fixed, or learned under its prior.

    p(y) = Γ(y+r)/(Γ(r) y!) · (r/(r+μ))^r (μ/(r+μ))^y; r → ∞ gives Poisson(μ).
    """

    concentration: Positive = LEARNED

    def __post_init__(self) -> None:
        check_positive("NegativeBinomial", "concentration", self.concentration)

    def positive(self) -> dict[str, Positive]:
        return {"concentration": self.concentration}

    def distribution(self, outputs: jax.Array, extra: Extra) -> Any:
        """NegativeBinomial2(e^f, r) with batch shape (n, k)."""
        import numpyro.distributions as dist

        return dist.NegativeBinomial2(jnp.exp(matrix(self, outputs)), extra["concentration"])

    def log_terms(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        return _negative_binomial_log_pmf(outputs, jnp.asarray(extra["concentration"]), match(self, outputs, y))

    def variance(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        mean = jnp.exp(matrix(self, outputs))
        return mean + mean**2 / extra["concentration"]

    def entropy(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        mean, r = jnp.exp(matrix(self, outputs)), jnp.broadcast_to(extra["concentration"], outputs.shape)
        return _count_entropy(lambda y: _negative_binomial_log_pmf(outputs[..., None], r[..., None], y), mean, jnp.sqrt(mean + mean**2 / r))


def _threefry(key: Key) -> Key:
    """JAX's Poisson sampler exists for threefry keys only; other generators seed one with 64 of their bits."""
    if jax.random.key_impl(key) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


def _stirling_error(x: jax.Array) -> jax.Array:
    """log Γ(x+1) − B(x) with B(x) = (x + ½) log x − x + ½ log 2π, for x > 0.

    Series from 10 on; below, log Γ(x+1) = log Γ(x+11) − log Π_{i ≤ 10} (x+i). Its gradient needs no digamma, which costs 1 µs an entry.
    """

    def main(z: jax.Array) -> jax.Array:
        return (z + 0.5) * jnp.log(z) - z + 0.5 * math.log(2 * math.pi)

    def series(z: jax.Array) -> jax.Array:
        square = 1 / z**2
        return (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188)))) / z

    small = jnp.minimum(x, 10.0)
    product = math.prod(((small + i) for i in range(2, 11)), start=small + 1.0)
    shifted = main(small + 10.0) + series(small + 10.0) - jnp.log(product) - main(small)
    return jnp.where(x < 10.0, shifted, series(jnp.maximum(x, 10.0)))


def _deviance(x: jax.Array, log_ratio: jax.Array) -> jax.Array:
    """x log(x/m) + m − x with log_ratio = log(m/x): x (eᵈ − 1 − d)."""
    return x * (jnp.expm1(log_ratio) - log_ratio)


def _poisson_log_pmf(log_rate: jax.Array, y: Array) -> jax.Array:
    y = jnp.asarray(y, log_rate.dtype)
    safe = jnp.where(y > 0, y, 1.0)  # keeps log 0 out of the gradient of the other branch
    saddle = -_stirling_error(safe) - _deviance(safe, log_rate - jnp.log(safe)) - 0.5 * jnp.log(2 * math.pi * safe)
    return jnp.where(y > 0, saddle, -jnp.exp(log_rate))


def _negative_binomial_log_pmf(log_mean: jax.Array, r: jax.Array, y: Array) -> jax.Array:
    y = jnp.asarray(y, log_mean.dtype)
    r = r.astype(log_mean.dtype)
    safe = jnp.where(y > 0, y, 1.0)
    log_total = jnp.logaddexp(jnp.log(r), log_mean)  # log(r + μ)
    ratio = jnp.log(r + safe) - log_total
    saddle = (
        _stirling_error(r + safe)
        - _stirling_error(r)
        - _stirling_error(safe)
        - _deviance(r, ratio)
        - _deviance(safe, ratio + log_mean - jnp.log(safe))
        + 0.5 * (jnp.log(r) - jnp.log(r + safe) - jnp.log(2 * math.pi * safe))
    )
    return jnp.where(y > 0, saddle, -r * jax.nn.softplus(log_mean - jnp.log(r)))


_EXACT = 64  # counts below this are summed one by one
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_STEPS = np.array(
    [-12, -9, -7, -5.5, -4.5, -3.5, -2.8, -2.1, -1.4, -0.7, 0, 0.7, 1.4, 2.1, 2.8, 3.5, 4.5, 5.5, 7, 9, 12, 17, 25, 40, 65, 110]
)


def _count_entropy(log_pmf: Callable[[jax.Array], jax.Array], mean: jax.Array, std: jax.Array) -> jax.Array:
    """−Σ_y p(y) log p(y), (n, k), for unimodal counts.

    Exact below 64; beyond, Σ_{y ≥ a} g(y) = ∫_{a−½}^∞ g + g′(a−½)/24 + O(g‴) by Gauss–Legendre on panels around the mean and
    geometrically spaced towards it, good to about 1e-6.
    """
    dtype = mean.dtype
    start = jnp.asarray(_EXACT - 0.5, dtype)
    around = jnp.maximum(mean[..., None] + std[..., None] * jnp.asarray(_STEPS, dtype), start)
    middle = jnp.maximum(mean, start)[..., None]
    towards = start * (middle / start) ** jnp.linspace(0, 1, 9, dtype=dtype)
    edges = jnp.sort(jnp.concatenate([towards, around], axis=-1), axis=-1)
    half = 0.5 * jnp.diff(edges)[..., None]
    nodes = (0.5 * (edges[..., 1:] + edges[..., :-1])[..., None] + half * jnp.asarray(_NODES, dtype)).reshape(*mean.shape, -1)
    weights = (half * jnp.asarray(_WEIGHTS, dtype)).reshape(nodes.shape)
    # One evaluation for both parts: the density is compiled once.
    head = jnp.broadcast_to(jnp.arange(_EXACT + 1, dtype=dtype), (*mean.shape, _EXACT + 1))
    log_p = log_pmf(jnp.concatenate([head, nodes], axis=-1))
    terms = jnp.where(log_p > -80.0, -jnp.exp(log_p) * log_p, 0.0)
    low, high, tail = terms[..., :_EXACT], terms[..., _EXACT - 1 : _EXACT + 1], terms[..., _EXACT + 1 :]
    return jnp.sum(low, axis=-1) + jnp.sum(tail * weights, axis=-1) + (high[..., 1] - high[..., 0]) / 24
