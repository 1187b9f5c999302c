"""A network with weights taken out: what is left of each linear map is stored as its non-zero entries and applied without dead units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._typing import Array, Key, Tree


@dataclasses.dataclass(frozen=True, eq=False)
class PrunedSite:
    """What is left of one linear map: units kept on both sides, and where the non-zero weights lie between them.

    inputs, outputs: numbers of the units kept along one axis (None: all, or more than one axis). shape: of the kernel between them, as the
    equation uses it; index: flat positions of the non-zero entries in it. in_axis, out_axis: of the arrays the map takes and gives.
    """

    name: str
    inputs: np.ndarray | None
    outputs: np.ndarray | None
    shape: tuple[int, ...]
    index: np.ndarray
    in_axis: int
    out_axis: int

    def kernel(self, values: Array) -> Array:
        """The kernel between the units kept, from its non-zero entries."""
        flat = jnp.zeros(int(np.prod(self.shape)), values.dtype).at[self.index].set(values, unique_indices=True)
        return flat.reshape(self.shape)

    def nbytes(self) -> int:
        """Bytes of the indices, in the smallest integers that hold them."""
        return smallest(self.index) + smallest(self.inputs) + smallest(self.outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Narrow:
    """A leaf of which only these units along one axis are left."""

    path: str
    axis: int
    units: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Pruned:
    """A network as a function of the weights it kept: params = {"kept": {site: values (nnz,)}, "rest": {path: leaf}}.

    Where the network's own code runs on narrower layers too, its leaves are cut (narrow) and everything between two maps, pooling and
    activations, runs on the units that are left; elsewhere a map's outputs are put back among zeros. parts number units after the cut.
    """

    base: Any
    parts: tuple[PrunedSite, ...]
    params: Tree
    narrow: tuple[Narrow, ...] = ()

    def init(self, key: Key) -> Tree:
        """The values it was made with: a pruned network has no fresh start."""
        return jax.tree.map(jnp.asarray, self.params)

    def apply(self, params: Tree, x: Tree, key: Key | None = None) -> Tree:
        return sites.replay(None, self.base.apply, self.narrowed(params), x, self._handler(params["kept"]), network_key=key)[0]

    def narrowed(self, params: Tree) -> Tree:
        """Parameters of the network this one was made from, cut, with zeros for all weights of the pruned maps."""

        def leaf(path: str, whole: jax.ShapeDtypeStruct) -> Array:
            if path in params["rest"]:
                return params["rest"][path]
            shape = list(whole.shape)
            for cut in self.narrow:
                if cut.path == path:
                    shape[cut.axis] = len(cut.units)
            return jnp.zeros(shape, whole.dtype)

        return self._tree(leaf)

    def unpruned(self, params: Tree) -> Tree:
        """The same uncut, with zeros for what is gone."""

        def leaf(path: str, whole: jax.ShapeDtypeStruct) -> Array:
            if path not in params["rest"]:
                return jnp.zeros(whole.shape, whole.dtype)
            found = jnp.asarray(params["rest"][path])
            for cut in self.narrow:
                if cut.path == path:
                    found = spread(found, cut.units, cut.axis, whole.shape[cut.axis])
            return found

        return self._tree(leaf)

    def _tree(self, leaf: Callable[[str, jax.ShapeDtypeStruct], Array]) -> Tree:
        template = jax.eval_shape(self.base.init, jax.random.key(0))
        leaves = [leaf(path, whole) for path, whole in zip(_tree.paths(template), jax.tree.leaves(template), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def rebuild(self, params: Tree) -> Tree:
        return params

    def nbytes(self) -> int:
        """Bytes of what must be stored: values and positions of the weights kept, and the other parameters."""
        return (
            _tree.nbytes(jax.tree.map(jnp.asarray, self.params))
            + sum(part.nbytes() for part in self.parts)
            + sum(smallest(cut.units) for cut in self.narrow)
        )

    def _handler(self, kept: dict[str, Array]) -> Callable:
        parts = {part.name: part for part in self.parts}

        def handler(key: Any, site: sites.Site, inputs: Array, weights: sites.Operands, compute: Callable) -> tuple[Array, None]:
            if site.name not in parts:
                return sites.identity(key, site, inputs, weights, compute)
            part = parts[site.name]
            if part.inputs is not None:
                inputs = jnp.take(inputs, part.inputs, axis=part.in_axis)
            out = compute(inputs, part.kernel(kept[site.name]))
            if part.outputs is not None:
                out = spread(out, part.outputs, part.out_axis, site.output_shape[part.out_axis])
            return out if weights.bias is None else out + weights.bias[0], None

        return handler


def spread(values: Array, units: np.ndarray, axis: int, size: int) -> jax.Array:
    """Values at these of `size` units along an axis, zeros at the others."""
    shape = (*values.shape[:axis], size, *values.shape[axis + 1 :])
    return jnp.zeros(shape, values.dtype).at[(slice(None),) * axis + (units,)].set(values, unique_indices=True)


def smallest(numbers: np.ndarray | None) -> int:
    """Bytes of whole numbers in the smallest integers that hold them."""
    return 0 if numbers is None else numbers.size * np.min_scalar_type(int(numbers.max(initial=0))).itemsize
