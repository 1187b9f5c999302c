"""Posteriors that are a list: one parameter tree, draws of it, a mixture of other posteriors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._outputs import Outputs
from aleator._quick import quick
from aleator._typing import Key, Tree
from aleator.posterior._posterior import Posterior, Score, draw_outputs
from aleator.posterior._sampled import Sampled


@dataclasses.dataclass(frozen=True, eq=False)
class Point(Posterior):
    """All mass on one parameter tree (MAP)."""

    params: Tree
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return draw_outputs(model, _lifted(self.params), x, None)

    def sample(self, key: Key, num_samples: int) -> Tree:
        repeat = lambda leaf: (np if isinstance(leaf, np.ndarray) else jnp).repeat(leaf[None], num_samples, axis=0)
        return jax.tree.map(repeat, self.params)  # host arrays stay on the host, in their own precision


@dataclasses.dataclass(frozen=True, eq=False)
class Draws(Posterior):
    """Parameter draws, leaves (S, …), with weights (S,) summing to one, or None for equal ones. All are used at every prediction.

    num_chains: the draws are those of so many Markov chains, one after the other."""

    params: Tree
    weights: np.ndarray | None = None
    log_evidence: Score | None = None
    num_chains: int = 1

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return draw_outputs(model, self.params, x, self.weights)

    def sample(self, key: Key, num_samples: int) -> Tree:
        chosen = jax.random.choice(
            key, _tree.rows(self.params), (num_samples,), p=None if self.weights is None else jnp.asarray(self.weights)
        )
        return _tree.take(self.params, chosen)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Posterior):
    """A weighted mixture of posteriors over the same parameters; num_samples is shared among the components."""

    components: tuple[Posterior, ...]
    weights: np.ndarray | None = None
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        keys = jax.random.split(key, len(self.components))
        share = max(1, num_samples // len(self.components))
        weights = None if self.weights is None else np.repeat(np.asarray(self.weights) / share, share)
        if all(isinstance(component, Sampled) for component in self.components):
            parts = [component.functions(k, model, x, share) for component, k in zip(self.components, keys, strict=True)]
            join = lambda *leaves: np.concatenate(leaves)
            return Outputs(
                draws=jax.tree.map(join, *[p.draws for p in parts]), weights=weights, extra=jax.tree.map(join, *[p.extra for p in parts])
            )
        draws = [component.sample(k, share) for component, k in zip(self.components, keys, strict=True)]
        params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *draws)
        return draw_outputs(model, params, x, weights)

    def sample(self, key: Key, num_samples: int) -> Tree:
        key_which, key_draw = jax.random.split(key)
        weights = None if self.weights is None else jnp.asarray(self.weights)
        which = np.asarray(jax.random.choice(key_which, len(self.components), (num_samples,), p=weights))
        draws = _tree.stack(
            [c.sample(k, num_samples) for c, k in zip(self.components, jax.random.split(key_draw, len(self.components)), strict=True)]
        )
        return jax.tree.map(lambda leaf: leaf[which, np.arange(num_samples)], draws)


def mixture(posteriors: list[Any], weights: np.ndarray | None = None) -> Posterior:
    """Points and draws of equal number join into Draws; other kinds into a Mixture."""
    if not posteriors:
        raise ModelError(message("There is nothing to mix.", "0 posteriors", "at least one", "pass the members' posteriors"))
    if len(posteriors) == 1:
        return posteriors[0]
    if all(isinstance(p, Point) for p in posteriors):
        return Draws(_tree.stack([p.params for p in posteriors]), weights)
    if (
        all(isinstance(p, Draws) and p.weights is None for p in posteriors)
        and weights is None
        and len({_tree.rows(p.params) for p in posteriors}) == 1
    ):
        return Draws(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[p.params for p in posteriors]))
    return Mixture(tuple(posteriors), weights)


_lifted = quick(lambda params: jax.tree.map(lambda leaf: leaf[None], params))
