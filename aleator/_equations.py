"""Equations of a jaxpr as `sites` sees them: what follows a weight, what applies it, and which axes are whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from aleator._typing import Array, Key

FOLLOWED = {
    "reshape",
    "transpose",
    "convert_element_type",
    "slice",
    "dynamic_slice",
    "squeeze",
    "broadcast_in_dim",
    "expand_dims",
    "rev",
    "copy",
    "split",
    "reduce_precision",
    "gather",
}
CASTS = {"convert_element_type", "reduce_precision"}  # of those, the ones that leave every entry in its place


class Weight(NamedTuple):
    """A parameter leaf on its way to an equation: its arrays now (value, *companions), and the steps that made them from the leaf."""

    leaf: int
    arrays: tuple[Array, ...]
    chain: tuple[Callable, ...] = ()
    times: int = 1  # how many scan steps use the same values


class Pending(NamedTuple):
    """Outputs of a site not asked for yet: a bias may still join. after: layout changes since the equation."""

    inputs: Array
    weight: Weight
    compute: Callable
    facts: dict[str, Any]
    after: tuple[Callable, ...] = ()
    key: Key | None = None


def bind(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Evaluate one equation as it stands."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def follow(eqn: JaxprEqn, values: list[Any], at: int, powers: tuple[int, ...]) -> list[Weight] | None:
    """A weight after an equation that only changes its layout, puts it among constants or multiplies it by one; None for any other."""
    name, weight = eqn.primitive.name, values[at]
    if name == "scatter" and at == 2 and eqn.params["unique_indices"]:
        # The entries around the weight are known: companions (variances, perturbations) are zero there.
        around = [values[0]] + [jnp.zeros_like(values[0])] * (len(weight.arrays) - 1)
        made = [bind(eqn, [base, values[1], array]) for base, array in zip(around, weight.arrays, strict=True)]
        return [weight._replace(arrays=tuple(out for (out,) in made), chain=(*weight.chain, scattered))]

    def through(array: Array, power: int = 1) -> list[Array]:
        if power == 0 and name in CASTS:  # numbers of entries are not values: rounding would make them others
            return [array]
        operands = list(values)
        operands[at] = array
        if name in ("mul", "div", "neg") and power != 1:
            if name == "neg":
                return [array if power % 2 == 0 else -array]
            operands[1 - at] = jnp.asarray(values[1 - at]) ** power
        return bind(eqn, operands)

    if name in FOLLOWED and at == 0:
        step = lambda leaf, number: through(leaf)[number]
    elif name in ("mul", "neg") or (name == "div" and at == 0):
        step = lambda leaf, number: leaf if name == "neg" else jnp.broadcast_to(leaf, eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
    else:
        return None
    made = [through(array, power) for array, power in zip(weight.arrays, powers, strict=True)]
    if name in CASTS:
        return [weight._replace(arrays=tuple(out for (out,) in made))]
    return [
        weight._replace(arrays=tuple(outs[number] for outs in made), chain=(*weight.chain, lambda leaf, number=number: step(leaf, number)))
        for number in range(len(eqn.outvars))
    ]


def describe(eqn: JaxprEqn, values: list[Any], at: int) -> dict[str, Any] | None:
    """Kind and axes of a linear map whose weight is operand `at`; None where the equation is not one."""
    name, other = eqn.primitive.name, 1 - at
    if name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        ndims = [len(np.shape(v.arrays[0] if isinstance(v, Weight) else v)) for v in values]
        taken = [set(contracted[i]) | set(batch[i]) for i in (0, 1)]
        free = [[d for d in range(ndims[i]) if d not in taken[i]] for i in (0, 1)]
        first = len(batch[0])
        spans = {0: range(first, first + len(free[0])), 1: range(first + len(free[0]), first + len(free[0]) + len(free[1]))}
        shared = tuple(range(first))
        return {
            "kind": "dense",
            "input": other,
            "unit_axes": tuple(contracted[other]) + tuple(batch[other]),
            "weight_units": tuple(contracted[at]) + tuple(batch[at]),
            "output_axes": tuple(spans[at]) + shared,
            "weight_outs": tuple(free[at]) + tuple(batch[at]),
        }
    if name == "conv_general_dilated" and at == 1:
        numbers = eqn.params["dimension_numbers"]
        if eqn.params["batch_group_count"] != 1:
            return None
        alone = eqn.params["feature_group_count"] == 1  # the kernel of a grouped convolution has no axis for all input channels
        return {
            "kind": "conv",
            "input": 0,
            "unit_axes": (numbers.lhs_spec[1],) if alone else (),
            "weight_units": (numbers.rhs_spec[1],) if alone else (),
            "output_axes": (numbers.out_spec[1],),
            "weight_outs": (numbers.rhs_spec[0],),
            "groups": eqn.params["feature_group_count"],
        }
    if name == "conv2d" and at == 1 and len(np.shape(values[0])) == 4:
        alone = eqn.params["geometry"].groups == 1
        units = {"unit_axes": (3,), "weight_units": (2,)} if alone else {"unit_axes": (), "weight_units": ()}
        return {"kind": "conv", "input": 0, "output_axes": (3,), "weight_outs": (3,), "groups": eqn.params["geometry"].groups} | units
    if name == "gather" and at == 0:
        numbers = eqn.params["dimension_numbers"]
        shape, sizes = np.shape(values[0].arrays[0]), eqn.params["slice_sizes"]
        whole = tuple(d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims)
        if getattr(numbers, "operand_batching_dims", ()) or any(sizes[d] != shape[d] for d in whole):
            return None
        return {
            "kind": "embedding",
            "input": 1,
            "unit_axes": (),
            "weight_units": (),
            "output_axes": tuple(numbers.offset_dims),
            "weight_outs": whole,
        }
    return None


def is_bias(bias: Weight, pending: Pending) -> bool:
    """A bias varies over output units alone: it has extent 1 along every other axis."""
    array = np.shape(bias.arrays[0])
    out = pending.facts["output_shape"]
    if len(array) != len(out):
        return False
    return all(size == 1 or (axis in pending.facts["output_axes"] and size == out[axis]) for axis, size in enumerate(array))


def moved(facts: dict[str, Any], eqn: JaxprEqn) -> dict[str, Any]:
    """Output axes and shape after a transpose."""
    permutation = tuple(int(p) for p in eqn.params["permutation"])
    return {
        "output_axes": tuple(permutation.index(axis) for axis in facts["output_axes"]),
        "output_shape": tuple(facts["output_shape"][p] for p in permutation),
    }


def grown_axis(shape: tuple[int, ...], longer: tuple[int, ...] | None) -> int | None:
    """The one axis whose extent grew with the number of rows."""
    if longer is None or len(shape) != len(longer):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(shape, longer, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 else None


def rows_behind(size: int, longer: int) -> int:
    """Rows n behind an axis of n·k entries, given that n + 1 rows make (n + 1)·k."""
    return size // (longer - size) if longer > size else 1


def leaf_axes_of(facts: dict[str, Any], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of the leaf that number the map's input and output units: the leaf's entries are numbered and sent down the same way.

    The steps of a scan over stacked weights have units of their own, so the stacked axis counts among them. () where no axes of the leaf
    number the units and nothing else (a kernel cut out of a flat vector, or one whose entries were put where they belong).
    """
    if scattered in facts["chain"]:
        return (), ()
    if not facts["chain"]:
        return tuple(sorted(facts["weight_units"])), tuple(sorted(facts["weight_outs"]))
    labels = _sent(facts["chain"], shape)
    last = _sent([_last_row if step is first_row else step for step in facts["chain"]], shape)
    stacked = set(_varying(np.stack([labels, last]), (0,), shape))

    def numbering(axes: tuple[int, ...]) -> tuple[int, ...]:
        found = set(_varying(labels, axes, shape))
        others = set(_varying(labels, tuple(axis for axis in range(labels.ndim) if axis not in axes), shape))
        return tuple(sorted(found | stacked)) if found and not (found | stacked) & others else ()

    return numbering(facts["weight_units"]), numbering(facts["weight_outs"])


def _sent(chain: Sequence[Callable], shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of the leaf's entries, as the equation meets them."""
    with jax.ensure_compile_time_eval():
        labels: Any = jnp.arange(int(np.prod(shape)), dtype=jnp.int32).reshape(shape)
        for step in chain:
            labels = step(labels)
        return np.asarray(labels)


def first_row(leaf: Array) -> Array:
    return leaf[0]


def scattered(leaf: Array) -> Array:
    """A step after which the entries of a leaf number nothing but themselves."""
    return leaf


def _last_row(leaf: Array) -> Array:
    return leaf[-1]


def _varying(labels: np.ndarray, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of the leaf along which the position within `axes` of the operand changes."""
    moves = set()
    for axis in axes:
        if labels.shape[axis] > 1:
            first = np.stack(np.unravel_index(np.take(labels, [0], axis).ravel(), shape))
            for other in (1, labels.shape[axis] - 1):
                now = np.stack(np.unravel_index(np.take(labels, [other], axis).ravel(), shape))
                moves |= set(np.flatnonzero((first != now).any(axis=1)).tolist())
    return tuple(sorted(moves))


def noise_order(ndim: int, units: tuple[int, ...], example: int | None) -> tuple[int, ...]:
    """Axes as: rows, positions, units."""
    first = () if example is None or example in units else (example,)
    return (*first, *(axis for axis in range(ndim) if axis not in units and axis not in first), *units)


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
