"""Models with hidden variables: what the rest of the library asks of them.

Observations are `batch.y`; there are no inputs (x is None). A conjugate model sums its hidden variables out exactly given the natural
statistics t of its parameters (`aleator.latent._conjugate`), so that five functions serve every method:

    e_step(t, batch) → Σₙ E[T(yₙ, zₙ)], log Σ_z exp⟨T(yₙ, z), t⟩        with t = t(θ) in EM, t = E_q[t(θ)] in coordinate ascent
    draw_step(key, t, batch) → Σₙ T(yₙ, zₙ), z drawn                       Gibbs
    mode(η), expected(η), draw(key, η) of p(θ | η)                         M step; coordinate ascent; Gibbs
    seed(key, batch) → counts to begin with

Maximum likelihood, coordinate ascent, stochastic variational inference, Gibbs, and every gradient method (through `log_likelihood`) follow.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family, add, inner
from aleator.posterior import Sampled, Score, sampled


class Latent(abc.ABC):
    """Base of models of y alone. Parameters are unconstrained; densities run in double precision."""

    likelihood = None
    minibatch = True
    stochastic = False
    generative = True  # data is y, and a bare array will do
    double = True  # chains run in float64
    num_invariants = 0  # how many numbers `invariants` gives

    @abc.abstractmethod
    def bind(self, x: Tree, y: Tree) -> Any:
        """The model for these observations, checked."""

    def start(self, key: Key) -> Tree:
        return self.init(key)

    def init(self, key: Key) -> Tree:
        return self.sample_prior(key)

    @abc.abstractmethod
    def sample_prior(self, key: Key) -> Tree: ...

    @abc.abstractmethod
    def log_prior(self, params: Tree) -> Array: ...

    @abc.abstractmethod
    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array: ...

    def extra(self, params: Tree) -> dict:
        return {}

    def observed(self, y: Any) -> Any:
        """The rows a question is about, checked as those of the fit were."""
        return observations(y)

    def about(self, x: Any, y: Any) -> tuple[Any, Batch]:
        """The model for the rows a question is about, and these rows."""
        no_inputs(self, x)
        return self, Batch(None, jax.tree.map(jnp.asarray, self.observed(y)))

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """Numbers that do not change when components swap their labels: what chains are compared by, (num_invariants,)."""
        return jnp.zeros(0)

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> NoReturn:
        raise ModelError(
            message(
                f"{type(self).__name__} has no inputs to predict from.",
                "x",
                "questions about y and its hidden variables",
                "use al.latent.log_prob(key, fit, y), al.latent.simulate(key, fit, n) or the model's own functions of fit.sample(key, n)",
            )
        )


class ConjugateLatent(Latent):
    """A model whose parameters are members of conjugate families, by name, and whose hidden variables sum out given their statistics."""

    exact = False  # whether there are no hidden variables at all, so that al.Exact applies

    @property
    @abc.abstractmethod
    def families(self) -> dict[str, Family]:
        """The conjugate families of the parameter tree, by its top-level names."""

    @abc.abstractmethod
    def prior_counts(self) -> dict[str, Tree]:
        """η₀, by the same names."""

    @abc.abstractmethod
    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        """Expected counts, weighted and summed over rows, and the log normaliser of each row, (n,)."""

    @abc.abstractmethod
    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        """Counts with the hidden variables drawn given t."""

    @abc.abstractmethod
    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """Counts of a rough first assignment of the rows."""

    # ---- parameters: family by family ----

    def natural(self, params: Tree) -> dict[str, Tree]:
        return {name: family.natural(params[name]) for name, family in self.families.items()}

    def expected(self, counts: dict[str, Tree]) -> dict[str, Tree]:
        return {name: family.expected(counts[name]) for name, family in self.families.items()}

    def mode(self, counts: dict[str, Tree]) -> Tree:
        """argmax ⟨η, t(θ)⟩: the M step at η = η₀ + expected counts."""
        return {name: family.mode(counts[name]) for name, family in self.families.items()}

    def draw(self, key: Key, counts: dict[str, Tree]) -> Tree:
        keys = jax.random.split(key, len(self.families))
        return {name: family.draw(k, counts[name]) for k, (name, family) in zip(keys, self.families.items(), strict=True)}

    def divergence(self, counts: dict[str, Tree]) -> Array:
        """KL(p(θ | η) ‖ prior): the complexity half of the bound, nats."""
        prior = self.prior_counts()
        return sum((family.divergence(counts[name], prior[name]) for name, family in self.families.items()), jnp.zeros(()))

    def penalty(self, params: Tree) -> Array:
        """log p(θ) in the families' own coordinates, without the Jacobian of the unconstrained ones: what EM climbs beside the data."""
        prior = self.prior_counts()
        return sum((family.log_density(params[name], prior[name]) for name, family in self.families.items()), jnp.zeros(()))

    def sample_prior(self, key: Key) -> Tree:
        return self.draw(key, self.prior_counts())

    def log_prior(self, params: Tree) -> Array:
        prior = self.prior_counts()
        return sum((family.log_prior(params[name], prior[name]) for name, family in self.families.items()), jnp.zeros(()))

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(yₙ | θ), hidden variables summed out; (n,)."""
        return self.e_step(self.natural(params), batch)[1]

    def gibbs(self, key: Key, params: Tree, batch: Batch) -> Tree:
        """One sweep: hidden variables given θ, then θ given them."""
        key_hidden, key_params = jax.random.split(key)
        counts = self.draw_step(key_hidden, self.natural(params), batch)
        return self.draw(key_params, add(self.prior_counts(), counts))

    def begin(self, params: Tree, batch: Batch, scale: Any) -> dict[str, Tree]:
        """Counts with which coordinate ascent begins at a parameter tree: those expected there. scale: rows in all for one of the batch."""
        return jax.tree.map(lambda leaf: scale * leaf, self.e_step(self.natural(params), batch)[0])

    def first(self, key: Key, batch: Batch) -> Tree:
        """Parameters to begin a chain with: drawn given a rough assignment of the rows."""
        key_seed, key_params = jax.random.split(key)
        return self.draw(key_params, add(self.prior_counts(), self.seed(key_seed, batch)))

    def posterior(self, counts: dict[str, Tree], log_evidence: Score | None) -> Conjugate:
        return Conjugate(counts, self, log_evidence=log_evidence)

    def complete_log_joint(self, params: Tree, counts: dict[str, Tree]) -> Array:
        """⟨T(y, z), t(θ)⟩ + log p(θ): the complete-data log joint up to log h(y), in the families' coordinates."""
        return inner(counts, self.natural(params)) + self.penalty(params)


@sampled(("counts", "stats"), ("model",))
@dataclasses.dataclass(frozen=True, eq=False)
class Conjugate(Sampled):
    """q(θ) = p(θ | counts), a product of the model's conjugate families. stats: what `fit.update` goes on from, where the posterior is exact."""

    counts: Tree
    model: Any
    stats: Any = None
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        return self.model.draw(key, jax.tree.map(jnp.asarray, self.counts))

    def sample(self, key: Key, num_samples: int) -> Tree:
        with jax.enable_x64(True):
            return super().sample(key, num_samples)


def in_double(function: Callable) -> Callable:
    """A question asked of a model from outside a fit: its parameters are in double precision, whatever the global flag."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with jax.enable_x64(True):
            return function(*args, **options)

    return call


def no_inputs(model: Any, x: Any) -> None:
    """Refuse x where it would be passed over in silence."""
    if x is not None:
        name = type(model).__name__
        raise DataError(
            message(f"{name} takes no inputs.", "x", "y alone", "pass al.fit(key, model, y, method), columns of x among those of y")
        )


def observations(y: Any) -> np.ndarray:
    """y as (N, d) doubles; NaN passes, the parts judge it."""
    if y is None:
        raise DataError(
            message("There is nothing to observe.", "y=None", "y of shape (N,) or (N, d)", "pass al.fit(key, model, y, method)")
        )
    y = np.asarray(y)
    if y.dtype.kind not in "fiub" or y.ndim not in (1, 2) or y.size == 0:
        got = f"dtype {y.dtype}, shape {y.shape}"
        raise DataError(message("y cannot be observed.", got, "numbers of shape (N,) or (N, d), N ≥ 1", "encode strings, flatten images"))
    return y.astype(np.float64).reshape(len(y), -1)
