"""Mixtures: y ~ Σ_k π_k p(y | θ_k)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from aleator._errors import MethodError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family, add, real_weights
from aleator.latent._model import ConjugateLatent, in_double, no_inputs, observations
from aleator.latent.parts import StudentT, as_part, check_width, emitted
from aleator.latent.weights import Dirichlet, Sticks, gather, log_weights


@dataclasses.dataclass(frozen=True)
class Mixture(ConjugateLatent):
    """z ~ Categorical(π), y | z ~ part z (D2–D5).

    part: "gaussian", "bernoulli", "poisson", "student_t", "categorical", or an object of `al.latent.parts` with its prior. weights:
    `al.latent.Dirichlet(a)`, or `al.latent.Sticks(a)` for a Dirichlet process truncated at num_components.
    """

    num_components: int
    part: Any = "gaussian"
    weights: Any = Dirichlet(1.0)

    num_invariants = 16

    def __post_init__(self) -> None:
        if isinstance(self.num_components, bool) or not isinstance(self.num_components, (int, np.integer)) or self.num_components < 1:
            raise ModelError(
                message("A mixture needs components.", repr(self.num_components), "a whole number ≥ 1", "pass e.g. Mixture(3)")
            )
        if not isinstance(self.weights, (Dirichlet, Sticks)):
            raise ModelError(
                message("These are not weights.", repr(self.weights), "Dirichlet(a) or Sticks(a)", "pass al.latent.Dirichlet(1.0)")
            )
        object.__setattr__(self, "part", as_part(self.part))

    def bind(self, x: Tree, y: Tree) -> Mixture:
        no_inputs(self, x)
        rows = observations(y)
        check_width(rows, self.part.dim)  # of a model that has met data before
        return dataclasses.replace(self, part=self.part.bind(rows))

    def observed(self, y: Any) -> np.ndarray:
        return emitted(self.part, observations(y))

    @property
    def families(self) -> dict[str, Family]:
        return {"weights": self.weights, "parts": self.part}

    def prior_counts(self) -> dict[str, Tree]:
        return {"weights": self.weights.prior(self.num_components), "parts": self.part.prior(self.num_components)}

    def log_joint_terms(self, natural: dict[str, Tree], y: Array) -> Array:
        """log π_k + log p(y | θ_k), or their expectations' counterpart, (n, K)."""
        return log_weights(self.weights, natural["weights"]) + self.part.log_terms(natural["parts"], rows_of(y))

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        terms = self.log_joint_terms(natural, batch.y)
        totals = logsumexp(terms, axis=-1)
        shares = jnp.exp(terms - totals[:, None]) * real_weights(batch)[:, None]
        return self._counts(shares, rows_of(batch.y), natural), totals

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        key_label, key_scale = jax.random.split(key)
        y = rows_of(batch.y)
        labels = jax.random.categorical(key_label, self.log_joint_terms(natural, y))
        shares = jax.nn.one_hot(labels, self.num_components, dtype=y.dtype) * real_weights(batch)[:, None]
        if not isinstance(self.part, StudentT):
            return self._counts(shares, y, natural)
        u = self.part.draw_scales(key_scale, natural["parts"], y, labels)
        df = self.part.counts(shares, y, natural["parts"])["df"]
        parts = super(StudentT, self.part).counts(shares * u[:, None], y) | {"df": df}
        return {"weights": gather(self.weights, jnp.sum(shares, axis=0)), "parts": parts}

    def collapsed(self, key: Key, params: Tree, batch: Batch) -> Tree:
        """One sweep with θ and π integrated out: labels given θ, then each label in turn from p(z_i | z_{−i}, y), then θ given them.

        p(z_i = k | z_{−i}, y) ∝ exp[A(η + T(y_i, k)) − A(η)], η with the counts of all other rows.
        """
        if isinstance(self.part, StudentT) or getattr(self.part, "covariance", "") == "tied":
            raise MethodError(
                message("These parts do not come apart.", repr(self.part), "parts with parameters of their own each", "use collapsed=False")
            )
        key_label, key_sweep, key_params = jax.random.split(key, 3)
        y, weight = rows_of(batch.y), real_weights(batch)
        labels = jax.random.categorical(key_label, self.log_joint_terms(self.natural(params), y)).astype(jnp.int32)
        one_hot = lambda label: jax.nn.one_hot(label, self.num_components, dtype=y.dtype)
        counts = add(self.prior_counts(), self._counts(one_hot(labels) * weight[:, None], y, {"parts": None}))
        own = lambda part: jax.vmap(lambda member: self.part.log_partition(jax.tree.map(lambda leaf: leaf[None], member)))(part)

        def move(i: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
            counts, labels = carry
            row = jax.lax.dynamic_slice_in_dim(y, i, 1)
            each = self.part.counts(jnp.full((1, self.num_components), weight[i]), row)  # T(y_i), once a member
            share = one_hot(labels[i])
            spread = lambda share: jax.tree.map(lambda leaf: leaf * share.reshape(-1, *[1] * (leaf.ndim - 1)), each)
            weights = lambda share: gather(self.weights, share * weight[i])
            counts = jax.tree.map(jnp.subtract, counts, {"weights": weights(share), "parts": spread(share)})
            gains = own(add(counts["parts"], each)) - own(counts["parts"])
            table = jax.vmap(lambda share: self.weights.log_partition(add(counts["weights"], weights(share))))(jnp.eye(self.num_components))
            label = jax.random.categorical(jax.random.fold_in(key_sweep, i), gains + table).astype(jnp.int32)
            share = one_hot(label)
            return add(counts, {"weights": weights(share), "parts": spread(share)}), labels.at[i].set(label)

        counts, _ = jax.lax.fori_loop(0, len(y), move, (counts, labels))
        return self.draw(key_params, counts)

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """log p(y | θ) at some of the rows."""
        y = rows_of(batch.y)
        picked = y[np.linspace(0, len(y) - 1, self.num_invariants).astype(np.int32)]
        return logsumexp(self.log_joint_terms(self.natural(params), picked), axis=-1)

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """Rows drawn far apart (k-means++, Arthur and Vassilvitskii 2007) are the centres; every row goes to the nearest."""
        y = rows_of(batch.y)
        filled = jnp.where(jnp.isfinite(y), y, jnp.nanmean(jnp.where(jnp.isfinite(y), y, jnp.nan), axis=0))
        filled = jnp.where(jnp.isfinite(filled), filled, 0.0)
        spread = jnp.std(filled, axis=0)
        shares = jax.nn.one_hot(
            nearest(key, filled / jnp.where(spread > 0, spread, 1.0), self.num_components), self.num_components, dtype=y.dtype
        )
        shares = shares * real_weights(batch)[:, None]
        # A Student-t counts rows by their scale given t; before there is a t, rows count whole.
        base = super(StudentT, self.part) if isinstance(self.part, StudentT) else self.part
        return {"weights": gather(self.weights, jnp.sum(shares, axis=0)), "parts": base.counts(shares, y)}

    def _counts(self, shares: Array, y: Array, natural: dict[str, Tree]) -> dict[str, Tree]:
        return {"weights": gather(self.weights, jnp.sum(shares, axis=0)), "parts": self.part.counts(shares, y, natural["parts"])}

    # ---- questions, at one parameter tree ----

    @in_double
    def responsibilities(self, params: Tree, y: Array) -> Array:
        """p(z = k | y, θ), (n, K)."""
        return jax.nn.softmax(self.log_joint_terms(self.natural(params), jnp.asarray(y)), axis=-1)

    @in_double
    def simulate(self, key: Key, params: Tree, num_samples: int) -> tuple[Array, Array]:
        """Ancestral: labels z (n,), then y (n, d)."""
        key_label, key_part = jax.random.split(key)
        logs = log_weights(self.weights, self.weights.natural(params["weights"]))
        labels = jax.random.categorical(key_label, logs, shape=(num_samples,))
        return labels, self.part.simulate(key_part, params["parts"], labels)

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        """Weights and part parameters by name, in y's units."""
        logs = log_weights(self.weights, self.weights.natural(params["weights"]))
        return {"weights": jnp.exp(logs)} | self.part.constrain(params["parts"])


def rows_of(y: Array) -> Array:
    """(n,) and (n, d) alike as (n, d)."""
    y = jnp.asarray(y)
    return y[:, None] if y.ndim == 1 else y


def nearest(key: Key, y: Array, num: int) -> Array:
    """The number of the nearest of `num` centres chosen by k-means++, for every row; (n,)."""
    key_first, key_rest = jax.random.split(key)
    first = y[jax.random.randint(key_first, (), 0, len(y))]
    start = jnp.sum((y - first) ** 2, axis=-1), jnp.zeros(len(y), jnp.int32)

    def one(carry: tuple[Array, Array], item: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        distance, label = carry
        number, k = item
        # All rows are at distance zero once every distinct one is a centre: then any row will do.
        logits = jnp.where(jnp.any(distance > 0), jnp.log(distance), 0.0)
        new = jnp.sum((y - y[jax.random.categorical(k, logits)]) ** 2, axis=-1)
        return (jnp.minimum(distance, new), jnp.where(new < distance, number, label)), None

    (_, label), _ = jax.lax.scan(one, start, (jnp.arange(1, num, dtype=jnp.int32), jax.random.split(key_rest, num)[1:]))
    return label
