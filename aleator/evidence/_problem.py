"""What every road to the evidence starts from: a target, its data and flat positions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._cache import cached
from aleator._errors import DataError, MethodError, message
from aleator._fit import Fit, _bind
from aleator._typing import Array, Tree
from aleator.data import Batch, Data
from aleator.methods import _chains as chains
from aleator.methods._moves import halves, has_reference
from aleator.target import DensityTarget, Target


class Problem(NamedTuple):
    """target: at temperature 1. layout: between parameter trees and flat positions (D,). batch: all rows, floats in float64, on the host;
    None for a bare density."""

    target: Any
    layout: chains.Layout
    batch: Batch | None

    @property
    def size(self) -> int:
        """D, the number of parameters."""
        return len(self.layout.names)


def problem(model: Any, data: Any, annealed: bool, who: str) -> Problem:
    """A model with data, or a target, made ready. annealed: the road begins at the prior, so that there must be one."""
    if isinstance(model, Fit):
        model = model.model
    model, rows, _, _, signature = _bind(model, data)
    if rows is not None and not isinstance(rows, Data):
        raise DataError(message(f"{who} needs all rows at once.", type(rows).__name__, "data in memory", "pass (x, y), or al.Data"))
    target = model if rows is None else Target(model, rows.num_data, 1.0, signature)
    if target.temperature != 1.0:
        raise MethodError(
            message("A tempered density has no evidence.", f"temperature {target.temperature}", "temperature 1", "drop the temperature")
        )
    if annealed and not has_reference(target):
        target.log_prior(None)  # says what is missing
    if target.stochastic:
        raise MethodError(
            message(
                f"{who} needs a density that does not change between evaluations.",
                "a network with randomness of its own",
                "a deterministic network",
                "switch its dropout layers off",
            )
        )
    if isinstance(target, DensityTarget) and not chains.doubles(target):
        raise MethodError(
            message(
                "This density does not run in double precision.",
                "arrays of single precision inside it",
                "a function that follows the precision of its argument",
                "convert constants inside the function, jnp.asarray(constant)",
            )
        )
    return Problem(target, layout_of(target), None if rows is None else _double(rows))


def split_of(target: Any, batch: Batch | None) -> Callable[[Array], tuple[Array, Array]]:
    """q → (r, ℓ): log prior (or reference) and log-likelihood (or what is left of a bare density)."""
    layout = layout_of(target)
    return halves(target, layout, chains.bind(target, layout, batch))


@cached
def layout_of(target: Any) -> chains.Layout:
    """The same for equal targets, so that what is compiled for one serves the next call."""
    with jax.enable_x64(True):
        return chains.flat_layout(target)


def flat(layout: chains.Layout, params: Tree) -> np.ndarray:
    """Draws with leading axis S as positions (S, D), float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    rows = leaves[0].shape[0] if leaves and leaves[0].ndim else 0
    if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in leaves):
        raise DataError(message("These are not draws.", "leaves of different length", "one leading axis S for all leaves", "stack them"))
    positions = np.concatenate([leaf.reshape(rows, -1) for leaf in leaves], axis=1)
    if positions.shape[1] != len(layout.names) or not np.all(np.isfinite(positions)):
        got = f"{positions.shape[1]} parameters, {'all' if np.all(np.isfinite(positions)) else 'not all'} finite"
        raise DataError(
            message("The draws do not fit the model.", got, f"{len(layout.names)} finite numbers each", "pass draws of the same model")
        )
    return positions


def check_rows(fit: Fit, rows: Batch | None) -> None:
    """The data must be those of the fit."""
    before = fit.manifest["data"]["num_data"]
    if rows is not None and rows.size != before:
        raise DataError(
            message("This is not the data of the fit.", f"{rows.size} rows", f"{before} rows", "pass the data it was fitted to")
        )


def check_whole(**given: Any) -> None:
    """Refuse settings that are not whole numbers ≥ 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise MethodError(message(f"{name} cannot be used.", repr(value), "a whole number ≥ 1", f"pass e.g. {name}=100"))


def _double(rows: Data) -> Batch:
    """All rows as a batch, floating leaves in float64; whole numbers stay."""
    kind = lambda leaf: np.float64 if jnp.issubdtype(np.asarray(leaf).dtype, jnp.floating) else None
    cast = lambda leaf: np.asarray(leaf, kind(leaf))
    weight = None if rows.weight is None else np.asarray(rows.weight, np.float64)
    return Batch(jax.tree.map(cast, rows.x), jax.tree.map(cast, rows.y), weight, np.arange(rows.num_data))


__all__ = ["Problem", "check_rows", "check_whole", "flat", "layout_of", "problem", "split_of"]
