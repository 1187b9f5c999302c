"""One conjugate pair: a family of observations and its prior, no hidden variables (D1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family, add, real_weights
from aleator.latent._model import ConjugateLatent, in_double, no_inputs, observations
from aleator.latent.mixture import rows_of
from aleator.latent.parts import StudentT, as_part, check_width, emitted


@dataclasses.dataclass(frozen=True)
class Pair(ConjugateLatent):
    """y₁ … y_N independent given θ ~ prior: beta–Bernoulli, gamma–Poisson, Dirichlet–multinomial, normal with known or unknown covariance.

    part: as for `Mixture`. `al.Exact()` gives posterior and evidence in closed form, and `fit.update(more)` goes on from them, flip by flip.
    """

    part: Any = "gaussian"

    exact = True  # al.Exact applies

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", as_part(self.part))
        if isinstance(self.part, StudentT):
            raise ModelError(
                message("A Student-t has no conjugate prior.", repr(self.part), "another part", "use Mixture(1, part) with al.Gibbs")
            )

    def bind(self, x: Tree, y: Tree) -> Pair:
        no_inputs(self, x)
        rows = observations(y)
        check_width(rows, self.part.dim)  # of a model that has met data before
        return dataclasses.replace(self, part=self.part.bind(rows))

    def observed(self, y: Any) -> np.ndarray:
        return emitted(self.part, observations(y))

    @property
    def families(self) -> dict[str, Family]:
        return {"part": self.part}

    def prior_counts(self) -> dict[str, Tree]:
        return {"part": self.part.prior(1)}

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        y = rows_of(batch.y)
        return {"part": self.part.counts(real_weights(batch)[:, None], y)}, self.part.log_terms(natural["part"], y)[:, 0]

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        return self.e_step(natural, batch)[0]

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        return self.e_step(self.prior_counts(), batch)[0]

    @in_double
    def log_predictive(self, counts: dict[str, Tree], y: Array) -> Array:
        """log p(y | counts) of each row by itself, θ integrated out: A(η + T(y)) − A(η) + log h(y), (n,)."""
        y = rows_of(y)
        level, log_h = self.part.log_partition(counts["part"]), self.log_base(y)
        one = lambda row: self.part.log_partition(add(counts["part"], self.part.counts(jnp.ones((1, 1)), row[None])))
        return jax.vmap(one)(y) - level + log_h

    def log_base(self, y: Array) -> Array:
        """log h(y), (n,): what is left of log p(y | θ) where t = 0."""
        zero = jax.tree.map(jnp.zeros_like, self.part.prior(1))
        return self.part.log_terms(zero, rows_of(y))[:, 0]

    @in_double
    def simulate(self, key: Key, params: Tree, num_samples: int) -> Array:
        """y (n, d) given θ."""
        return self.part.simulate(key, params["part"], jnp.zeros(num_samples, jnp.int32))

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        return {name: value[0] for name, value in self.part.constrain(params["part"]).items()}
