"""Gaussian observations of known spread."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.latent.parts._part import LOG_2PI, Part, check_finite
from aleator.latent.weights import check_concentration


@dataclasses.dataclass(frozen=True)
class KnownGaussian(Part):
    """y ~ N(μ, σ²I) with σ known, μ ~ N(mean, prior_scale²I), in the coordinates μ. t = (−½‖μ‖²/σ², μ/σ²), counts "number", "sum".

    centres: a prior mean for each member, relative to `mean`, where they are not to be exchangeable.
    """

    scale: float = 1.0
    prior_scale: float = 1.0
    mean: float = 0.0
    centres: tuple[float, ...] = ()
    dim: int | None = None
    missing = True

    def __post_init__(self) -> None:
        check_concentration(self.scale)
        check_concentration(self.prior_scale)

    def bind(self, y: np.ndarray) -> KnownGaussian:
        check_finite(y, missing=True)
        return dataclasses.replace(self, dim=y.shape[1])

    def prior(self, num: int) -> Tree:
        if self.centres and len(self.centres) != num:
            raise ModelError(
                message("Centres and members do not match.", f"{len(self.centres)} centres", f"{num}", "pass one centre a member")
            )
        number = jnp.full((num, self.dim), (self.scale / self.prior_scale) ** 2)
        return {"number": number, "sum": number * jnp.asarray(self.centres)[:, None] if self.centres else jnp.zeros((num, self.dim))}

    def log_partition(self, counts: Tree) -> Array:
        number, total = counts["number"], counts["sum"]
        return jnp.sum(0.5 * (LOG_2PI + 2.0 * math.log(self.scale) - jnp.log(number)) + 0.5 * total**2 / (number * self.scale**2))

    def natural(self, params: Tree) -> Tree:
        return {"number": -0.5 * (params["mean"] / self.scale) ** 2, "sum": params["mean"] / self.scale**2}

    def log_jacobian(self, params: Tree) -> Array:
        return jnp.zeros(())

    def mode(self, counts: Tree) -> Tree:
        return {"mean": counts["sum"] / counts["number"]}

    def draw(self, key: Key, counts: Tree) -> Tree:
        noise = jax.random.normal(key, counts["sum"].shape)
        return {"mean": counts["sum"] / counts["number"] + self.scale * noise / jnp.sqrt(counts["number"])}

    def log_terms(self, natural: Tree, y: Array) -> Array:
        seen = jnp.isfinite(y)
        y, ones = jnp.where(seen, y - self.mean, 0.0), seen.astype(y.dtype)
        base = -0.5 * jnp.sum((y / self.scale) ** 2 + ones * (LOG_2PI + 2.0 * math.log(self.scale)), axis=-1, keepdims=True)
        return base + ones @ natural["number"].T + y @ natural["sum"].T

    def counts(self, shares: Array, y: Array, natural: Tree = None) -> Tree:
        seen = jnp.isfinite(y)
        return {"number": shares.T @ seen.astype(shares.dtype), "sum": shares.T @ jnp.where(seen, y - self.mean, 0.0)}

    def simulate(self, key: Key, params: Tree, labels: Array) -> Array:
        mean = self.constrain(params)["mean"][labels]
        return mean + self.scale * jax.random.normal(key, mean.shape)

    def constrain(self, params: Tree) -> dict[str, Array]:
        return {"mean": params["mean"] + self.mean}
