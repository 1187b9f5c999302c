"""Posteriors that make their draws as they are needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from aleator import _tree
from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._outputs import Outputs
from aleator._random import noise_key
from aleator._typing import Key, Tree
from aleator.posterior._pieces import at_once, by_rows, row_bytes
from aleator.posterior._posterior import Posterior, Score


class Sampled(Posterior):
    """A posterior that makes its draws as they are needed. Subclasses are frozen dataclasses and pytrees (`sampled`).

    A draw is a function: `function(key, model, x)` is one draw's outputs at all rows of x and its likelihood parameters, so that one
    key is one function whatever the rows. Where a draw is a parameter tree, `draw(key)` gives it.
    """

    log_evidence: Score | None

    def draw(self, key: Key) -> Tree:
        """One parameter tree; the key is on the fast generator."""
        raise ModelError(
            message(
                f"{type(self).__name__} has no draws of weights.",
                "noise that is not a function of the weights alone",
                "draws of functions",
                "use fit.functions(key, x) or fit.predict(key, x)",
            )
        )

    def function(self, key: Key, model: Any, x: Tree) -> tuple[Tree, dict]:
        params = self.draw(key)
        return model.outputs(params, x, None), model.extra(params)

    def sample(self, key: Key, num_samples: int) -> Tree:
        return _draws(num_samples)(self.bare(), key)

    def bare(self) -> Any:
        """What of it compiled code needs: another evidence must not compile it again."""
        return dataclasses.replace(self, log_evidence=None)  # type: ignore[type-var]

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return self.functions(key, model, x, num_samples)

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        bare = self.bare()
        per_draw, per_row = 2 * _tree.nbytes(bare), row_bytes(model, x)
        cost = lambda rows: per_draw + rows * per_row
        keys = jax.random.split(key, num_samples)

        def piece(rows: Tree) -> tuple[Tree, dict]:
            count = 1 if rows is None else _tree.rows(rows)
            # All pieces of rows meet the same functions: the same keys, on purpose.
            return _functions(model)(bare, jax.random.clone(keys), rows, at_once(cost(count), num_samples))

        draws, extra = by_rows(piece, x, cost, axis=1, whole=True)
        return Outputs(draws=draws, extra=extra)


def sampled(data_fields: tuple[str, ...], meta_fields: tuple[str, ...] = ()) -> Callable[[type], type]:
    """Make a Sampled subclass a pytree: arrays in data_fields, hashable settings in meta_fields."""
    return lambda cls: jax.tree_util.register_dataclass(cls, list(data_fields), [*meta_fields, "log_evidence"])


@cached
def _functions(model: Any) -> Callable:
    """Outputs and likelihood parameters of one function per key; `block` of them at a time."""

    def evaluate(posterior: Any, keys: Key, x: Tree, block: int) -> tuple[Tree, dict]:
        one = lambda key: posterior.function(noise_key(key), model, x)
        return jax.vmap(one)(keys) if block >= len(keys) else jax.lax.map(one, keys, batch_size=block)

    return jax.jit(evaluate, static_argnums=3)


@functools.lru_cache(maxsize=64)
def _draws(num_samples: int) -> Callable:
    return jax.jit(lambda posterior, key: jax.lax.map(lambda k: posterior.draw(noise_key(k)), jax.random.split(key, num_samples)))
