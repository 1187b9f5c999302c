"""Members of an ensemble that share weights up to factors of rank one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aleator import _tree
from aleator._cache import cached
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.posterior._pieces import at_once, by_rows, row_bytes
from aleator.posterior._posterior import Score
from aleator.posterior._sampled import Sampled, sampled


@sampled(("params", "left", "right", "own"), ("shared",))
@dataclasses.dataclass(frozen=True, eq=False)
class RankOne(Sampled):
    """θₘ, m = 1…M, with equal weights: leaves W ∘ (rₘ sₘᵀ) around one shared W, leaves of each member's own, leaves shared as they are.

    params: the shared parameters (means over members where each has its own). shared: for each leaf "rank_one", "own" or "all". left,
    right: r and s of each rank-one leaf in order, (M, …) with extent 1 along the axes they do not number. own: the leaves of that kind,
    (M, …). Memory |W| + M·(units in + units out), not M·|W|; members are put together one by one where they are used.
    """

    params: Tree
    left: tuple[Array, ...]
    right: tuple[Array, ...]
    own: tuple[Array, ...]
    shared: tuple[str, ...]
    log_evidence: Score | None = None

    @property
    def num_members(self) -> int:
        return int((*self.left, *self.own)[0].shape[0])

    def member(self, number: Any) -> Tree:
        """The parameter tree of one member."""
        pick = lambda arrays: tuple(jnp.asarray(array)[number] for array in arrays)
        return effective(self.params, pick(self.left), pick(self.right), pick(self.own), self.shared)

    def draw(self, key: Key) -> Tree:
        return self.member(jax.random.randint(key, (), 0, self.num_members))

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """All members at all rows, each once."""
        bare = self.bare()
        cost = lambda rows: 2 * _tree.nbytes(self.params) + rows * row_bytes(model, x)

        def piece(rows: Tree) -> tuple[Tree, dict]:
            count = 1 if rows is None else _tree.rows(rows)
            return _every_member(model)(bare, rows, at_once(cost(count), self.num_members))

        draws, extra = by_rows(piece, x, cost, axis=1, whole=True)
        return Outputs(draws=draws, extra=extra)


def effective(params: Tree, left: tuple[Array, ...], right: tuple[Array, ...], own: tuple[Array, ...], shared: tuple[str, ...]) -> Tree:
    """One member's parameter tree: W ∘ (r sᵀ) where rank-one, its own leaf where it has one."""
    leaves, structure = jax.tree.flatten(params)
    factors, others = iter(zip(left, right, strict=True)), iter(own)

    def one(leaf: Array, kind: str) -> Array:
        if kind == "rank_one":
            r, s = next(factors)
            return leaf * r * s
        return next(others) if kind == "own" else leaf

    return jax.tree.unflatten(structure, [one(leaf, kind) for leaf, kind in zip(leaves, shared, strict=True)])


@cached
def _every_member(model: Any) -> Callable:
    """Outputs and likelihood parameters of every member, `block` of them at a time."""

    def evaluate(posterior: RankOne, x: Tree, block: int) -> tuple[Tree, dict]:
        def one(number: Array) -> tuple[Tree, dict]:
            params = posterior.member(number)
            return model.outputs(params, x, None), model.extra(params)

        return jax.lax.map(one, jnp.arange(posterior.num_members), batch_size=block)

    return jax.jit(evaluate, static_argnums=2)
