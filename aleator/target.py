"""The target: all that an algorithm may see of a model and its data.

log_joint = [log prior + β·(N/n)·Σ weight·log likelihood] / temperature, over unconstrained parameters. This is the only place where
N/n, weights and the temperature enter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.model import rows_of


@dataclasses.dataclass(frozen=True)
class Target:
    """A model bound to N rows of data. temperature ≠ 1 is a departure from Bayes (a cold or warm posterior) and recorded as such.

    signature: structure, row shapes and dtypes of x, for methods that must look inside the network before the first batch.
    """

    model: Any
    num_data: int
    temperature: float = 1.0
    signature: Any = None

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    @property
    def stochastic(self) -> bool:
        return self.model.stochastic

    def log_joint(self, params: Tree, batch: Batch | None, key: Key | None = None, beta: Any = 1.0, apply: Callable | None = None) -> Array:
        """[log p(θ) + β·(N/n)·Σᵢ weightᵢ·log p(yᵢ|xᵢ,θ)] / temperature: a scalar, unbiased under any mini-batching."""
        prior, data = self.parts(params, batch, key, apply)
        return (prior + beta * data) / self.temperature

    def parts(self, params: Tree, batch: Batch | None, key: Key | None = None, apply: Callable | None = None) -> tuple[Array, Array]:
        """(log p(θ), (N/n)·Σᵢ weightᵢ·log p(yᵢ|xᵢ,θ)): the two halves of the log joint, untempered."""
        return self.model.log_prior(params), self.total(self.model.log_likelihood(params, batch, key, apply), batch)

    def total(self, terms: Array, batch: Batch) -> Array:
        """(N/n)·Σᵢ weightᵢ·termsᵢ: what terms (n,) of one batch say about the sum over all rows."""
        return batch.weighted_sum(terms) * (self.num_data / batch.size)

    def log_prior(self, params: Tree) -> Array:
        return self.model.log_prior(params)

    def expected_log_prior(self, mean: Tree, variance: Tree, draw: Tree) -> Array | None:
        """E[log p(θ)] under independent marginals N(mean, variance), or None where it has no closed form; see the model's."""
        expected = getattr(self.model, "expected_log_prior", None)
        return None if expected is None else expected(mean, variance, draw)

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Callable | None = None) -> Array:
        """Per-example terms, (n,)."""
        return self.model.log_likelihood(params, batch, key, apply)

    def rows(self, num_rows: int = 2) -> Tree:
        """Shapes and dtypes of a batch of x: enough to trace the network. None where x is None or unknown."""
        return None if self.signature is None else rows_of(self.signature, num_rows)

    def outputs(self, params: Tree, x: Tree, key: Key | None = None) -> Tree:
        return self.model.outputs(params, x, key)

    def init(self, key: Key) -> Tree:
        """Fresh parameters."""
        return self.model.init(key)

    def start(self, key: Key) -> Tree:
        """Where one run begins: parameters that came with the model, else fresh ones."""
        return self.model.start(key)

    def sample_prior(self, key: Key) -> Tree:
        return self.model.sample_prior(key)


@dataclasses.dataclass(frozen=True, eq=False)
class DensityTarget:
    """A bare log density over a parameter tree: same face, no data. With a reference, β anneals from it to the density."""

    density: Callable[[Tree], Array]
    params0: Tree
    reference: Any = None
    temperature: float = 1.0
    model: Any = None
    num_data: int = 0
    stochastic: bool = False

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def log_joint(
        self, params: Tree, batch: Batch | None = None, key: Key | None = None, beta: Any = 1.0, apply: Callable | None = None
    ) -> Array:
        value = self.density(params)
        if not (isinstance(beta, float) and beta == 1.0):
            value = beta * value + (1.0 - beta) * self.log_prior(params)
        return value / self.temperature

    def parts(self, params: Tree, batch: Batch | None = None, key: Key | None = None, apply: Callable | None = None) -> tuple[Array, Array]:
        """(0, log density): a bare density is not split."""
        return jnp.zeros(()), self.density(params)

    def log_prior(self, params: Tree) -> Array:
        return self._reference("log_prob")(params)

    def sample_prior(self, key: Key) -> Tree:
        return self._reference("sample")(key)

    def expected_log_prior(self, mean: Tree, variance: Tree, draw: Tree) -> None:
        return None

    def rows(self, num_rows: int = 2) -> None:
        return None

    def init(self, key: Key) -> Tree:
        """The given start, scattered by N(0, 0.1²) so that chains and members begin apart."""
        leaves, structure = jax.tree.flatten(self.start(key))
        keys = jax.random.split(key, max(len(leaves), 1))
        return jax.tree.unflatten(
            structure, [leaf + 0.1 * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=False)]
        )

    def start(self, key: Key) -> Tree:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(float)), self.params0)

    def _reference(self, name: str) -> Callable:
        if self.reference is None:
            raise MethodError(
                message(
                    "This method needs a reference distribution.",
                    "reference=None",
                    "an object with log_prob(params) and sample(key)",
                    "pass al.target_from_log_density(fn, params0, reference=…)",
                )
            )
        return getattr(self.reference, name)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise MethodError(
            message("The temperature must be positive.", temperature, "a number > 0", "use temperature=1.0 for the Bayesian posterior")
        )


def target_from_log_density(
    density: Callable[[Tree], Array], params0: Tree, reference: Any = None, temperature: float = 1.0
) -> DensityTarget:
    """A target from any log density fn(params) → scalar on unconstrained params; `al.fit(key, target, None, method)` takes it.

    reference: object with log_prob(params) and sample(key), for methods that anneal or need draws to start from.
    """
    if not callable(density):
        raise MethodError(
            message(
                "A log density must be a function.", type(density).__name__, "params → scalar", "pass target_from_log_density(fn, params0)"
            )
        )
    whole = lambda leaf: np.asarray(leaf).dtype.kind in "iub"
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf) if whole(leaf) else jnp.asarray(leaf, jnp.result_type(float)), params0)
    shape = jax.eval_shape(lambda params: density(params), start)  # a trace of its own, so that JAX keeps none of its constants
    if getattr(shape, "shape", None) != ():
        raise MethodError(message("A log density must return one number.", f"{shape}", "a scalar", "sum the log density over its terms"))
    return DensityTarget(density, params0, reference, temperature)
