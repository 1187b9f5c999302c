"""Observations that are zeros and ones, counts, or labels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.latent._conjugate import log_beta
from aleator.latent.parts._part import Part, check_binary, check_counts, check_finite, check_labels
from aleator.latent.weights import Dirichlet, check_concentration


@dataclasses.dataclass(frozen=True)
class Bernoulli(Part):
    """y ∈ {0, 1}ᵈ, independent given the member: y_j ~ Bernoulli(p_j), p_j ~ Beta(a, b), in the coordinates p. t = (log p, log(1 − p))."""

    a: float = 1.0
    b: float = 1.0
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.a)
        check_concentration(self.b)

    def bind(self, y: np.ndarray) -> Bernoulli:
        check_finite(y, missing=True)
        check_binary(y)
        return dataclasses.replace(self, dim=y.shape[1])

    def prior(self, num: int) -> Tree:
        return {"ones": jnp.full((num, self.dim), self.a - 1.0), "zeros": jnp.full((num, self.dim), self.b - 1.0)}

    def log_partition(self, counts: Tree) -> Array:
        return jnp.sum(log_beta(counts["ones"] + 1.0, counts["zeros"] + 1.0))

    def natural(self, params: Tree) -> Tree:
        return {"ones": jax.nn.log_sigmoid(params["logit"]), "zeros": jax.nn.log_sigmoid(-params["logit"])}

    def log_jacobian(self, params: Tree) -> Array:
        natural = self.natural(params)
        return jnp.sum(natural["ones"] + natural["zeros"])

    def mode(self, counts: Tree) -> Tree:
        small = 1e-10  # the mode may lie on the border, where the logit is infinite
        return {"logit": jnp.log(jnp.maximum(counts["ones"], small)) - jnp.log(jnp.maximum(counts["zeros"], small))}

    def draw(self, key: Key, counts: Tree) -> Tree:
        key_ones, key_zeros = jax.random.split(key)
        return {"logit": jax.random.loggamma(key_ones, counts["ones"] + 1.0) - jax.random.loggamma(key_zeros, counts["zeros"] + 1.0)}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        ones, zeros = (y == 1).astype(natural["ones"].dtype), (y == 0).astype(natural["ones"].dtype)
        return ones @ natural["ones"].T + zeros @ natural["zeros"].T

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        return {"ones": shares.T @ (y == 1).astype(shares.dtype), "zeros": shares.T @ (y == 0).astype(shares.dtype)}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        p = self.constrain(params)["probability"][labels]
        return (jax.random.uniform(key, p.shape) < p).astype(p.dtype)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"probability": jax.nn.sigmoid(params["logit"])}


@dataclasses.dataclass(frozen=True)
class Poisson(Part):
    """y ∈ {0, 1, …}ᵈ, y_j ~ Poisson(λ_j), λ_j ~ Gamma(shape, rate), in the coordinates λ. t = (log λ, −λ), counts "sum", "number".

    rate None: from the data at `bind`, so that the prior mean shape/rate is their mean.
    """

    shape: float = 1.0
    rate: Any = None
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.shape)

    def bind(self, y: np.ndarray) -> Poisson:
        check_finite(y, missing=True)
        check_counts(y)
        if self.rate is not None:
            rate = np.broadcast_to(np.asarray(self.rate, float), (y.shape[1],))
            if not np.all(rate > 0):
                raise ModelError(message("The prior of the rates is improper.", f"rate={self.rate}", "rate > 0", "pass e.g. rate=1.0"))
        else:
            mean = np.nansum(y, axis=0) / np.maximum(np.isfinite(y).sum(axis=0), 1)
            rate = self.shape / np.where(mean > 0, mean, 1.0)
        return dataclasses.replace(self, rate=tuple(rate.tolist()), dim=y.shape[1])

    def prior(self, num: int) -> Tree:
        return {"sum": jnp.full((num, self.dim), self.shape - 1.0), "number": jnp.broadcast_to(jnp.asarray(self.rate), (num, self.dim))}

    def log_partition(self, counts: Tree) -> Array:
        return jnp.sum(gammaln(counts["sum"] + 1.0) - (counts["sum"] + 1.0) * jnp.log(counts["number"]))

    def natural(self, params: Tree) -> Tree:
        return {"sum": params["log_rate"], "number": -jnp.exp(params["log_rate"])}

    def log_jacobian(self, params: Tree) -> Array:
        return jnp.sum(params["log_rate"])

    def mode(self, counts: Tree) -> Tree:
        return {"log_rate": jnp.log(jnp.maximum(counts["sum"], 1e-10)) - jnp.log(counts["number"])}

    def draw(self, key: Key, counts: Tree) -> Tree:
        return {"log_rate": jax.random.loggamma(key, counts["sum"] + 1.0) - jnp.log(counts["number"])}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        seen = jnp.isfinite(y)
        y, ones = jnp.where(seen, y, 0.0), seen.astype(natural["sum"].dtype)
        return y @ natural["sum"].T + ones @ natural["number"].T - jnp.sum(gammaln(y + 1.0), axis=-1, keepdims=True)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        seen = jnp.isfinite(y)
        return {"sum": shares.T @ jnp.where(seen, y, 0.0), "number": shares.T @ seen.astype(shares.dtype)}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        return jax.random.poisson(key, self.constrain(params)["rate"][labels]).astype(params["log_rate"].dtype)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"rate": jnp.exp(params["log_rate"])}


@dataclasses.dataclass(frozen=True)
class Categorical(Part):
    """One label y ∈ {0 … C−1} a row, y ~ Categorical(π), π ~ Dirichlet(concentration). t = log π; NaN is a missing label."""

    concentration: float = 1.0
    num_classes: int | None = None
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.concentration)

    @property
    def family(self) -> Dirichlet:
        return Dirichlet(self.concentration)

    def bind(self, y: np.ndarray) -> Categorical:
        check_finite(y, missing=True)
        if y.shape[1] != 1:
            raise DataError(message("Labels come one a row.", f"{y.shape[1]} columns", "one column", "pass y of shape (N,)"))
        check_labels(y, self.num_classes)
        seen = y[np.isfinite(y)]
        num_classes = self.num_classes or (int(seen.max()) + 1 if seen.size else 1)
        return dataclasses.replace(self, num_classes=num_classes, dim=1)

    def prior(self, num: int) -> Tree:
        return {"labels": self.family.prior(self.num_classes, (num,))}  # type: ignore[arg-type]

    def log_partition(self, counts: Tree) -> Array:
        return self.family.log_partition(counts["labels"])

    def natural(self, params: Tree) -> Tree:
        return {"labels": self.family.natural(params["ratio"])}

    def log_jacobian(self, params: Tree) -> Array:
        return self.family.log_jacobian(params["ratio"])

    def mode(self, counts: Tree) -> Tree:
        return {"ratio": self.family.mode(counts["labels"])}

    def draw(self, key: Key, counts: Tree) -> Tree:
        return {"ratio": self.family.draw(key, counts["labels"])}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        table = natural["labels"].T  # (C, K)
        label = jnp.where(jnp.isfinite(y[:, 0]), y[:, 0], 0).astype(jnp.int32)
        return jnp.where(jnp.isfinite(y), table[label], 0.0)

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        label = jnp.where(jnp.isfinite(y[:, 0]), y[:, 0], self.num_classes).astype(jnp.int32)  # missing: beyond the last, dropped
        return {"labels": jax.ops.segment_sum(shares, label, num_segments=self.num_classes + 1)[:-1].T}  # type: ignore[operator]

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        logs = self.natural(params)["labels"]
        return jax.random.categorical(key, logs[labels])[:, None].astype(logs.dtype)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"probability": jnp.exp(self.natural(params)["labels"])}
