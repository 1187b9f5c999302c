"""Pruning: from a fit whose noise says which weights matter to a network that holds only those, and proof that it is the same function."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.model import random_rows
from aleator.networks.pruned import Pruned, PrunedSite
from aleator.posterior import GaussianDropout, Point
from aleator.priors import Normal

TOLERANCE = 1e-4  # largest change of an output allowed, relative to the largest output: rounding of sums in another order
ROWS = 256  # rows on which the two networks are compared and timed


def prune(fit: Any, threshold: float) -> Any:
    """A Fit of the network without the weights whose log α exceeds the threshold; see `Fit.prune`."""
    if not isinstance(fit.posterior, GaussianDropout):
        raise MethodError(
            message(
                "This posterior does not say which weights can go.",
                type(fit.posterior).__name__,
                "one with a noise rate per weight",
                "fit with al.SparseDropout()",
            )
        )
    model = fit.model
    if not hasattr(model, "network"):
        raise MethodError(message("There is no network to prune.", type(model).__name__, "al.BNN", "wrap the basis as a network"))
    params = jax.tree.map(jnp.asarray, fit.posterior.params)
    weights, x = model.weights(params), _rows(fit.manifest["data"])
    masks = {path.removeprefix("network.") if path != "network" else "": m for path, m in fit.posterior.masks(threshold).items()}
    whole = (_reopened if isinstance(model.network, Pruned) else _opened)(model.network, weights, masks, x)
    chosen, base = whole.chosen, whole.base
    if not chosen:
        raise MethodError(
            message(
                "No map of this network can be made smaller.",
                "weights used by several maps or stacked along a scan",
                "a weight with one map of its own",
                "use fit.posterior.masks() to see what could go",
            )
        )
    operands, full = _drop_unread(base.apply, whole.operands, whole.weights, x, chosen)
    parts = tuple(_part(site, operands[site.name]) for site in chosen)
    kept = {part.name: _values(part, operands[part.name], site) for part, site in zip(parts, chosen, strict=True)}
    gone = {site.path for site in chosen}
    rest = {path: leaf for path, leaf in zip(_tree.paths(full), jax.tree.leaves(full), strict=True) if path not in gone}
    network = Pruned(base, parts, {"kept": kept, "rest": rest})
    prior = model.prior if isinstance(model.prior, Normal) and isinstance(model.prior.scale, float) else Normal(1.0)
    small = dataclasses.replace(model, network=network, prior=prior)
    report = _report(model, whole.masked, base, full, network, x) | _counts(chosen, kept)
    point = Point({"network": network.params, "likelihood": params["likelihood"], "prior": {}})
    status = (
        f"Pruned at log α > {threshold:g}: {report['compression']:.0f} times fewer weights; outputs agree to {report['difference']:.1e}."
    )
    return type(fit)(
        small, fit.method, point, fit.info, status, fit.manifest | {"pruning": report | {"threshold": threshold, "prior": repr(prior)}}
    )


class _Whole(NamedTuple):
    """A network before it is cut. base: the network without any pruning; weights: its own parameters; chosen: its sites that can be made
    smaller; operands: their kernels between all units, zero where a weight goes. masked: the parameters of the fitted network, likewise."""

    base: Any
    weights: Tree
    masked: Tree
    chosen: list[sites.Site]
    operands: dict[str, np.ndarray]


def _opened(network: Any, weights: Tree, masks: dict[str, np.ndarray], x: Tree) -> _Whole:
    found = sites.find(network.apply, weights, x)
    chosen = [site for site in found.sites if site.path in masks and _prunable(site)]
    masked = _masked(weights, {site.path: masks[site.path] for site in chosen})
    _, records = sites.replay(None, network.apply, masked, x, _record)
    operands = {site.name: np.asarray(records[site.name][0] if site.shared_steps else records[site.name]) for site in chosen}
    return _Whole(network, masked, masked, chosen, operands)


def _reopened(network: Pruned, weights: Tree, masks: dict[str, np.ndarray], x: Tree) -> _Whole:
    """The network that a pruned one was made from, so that a second pruning is one pruning of the first network."""
    masked = _masked(weights, {path: mask for path, mask in masks.items() if path.startswith("kept.")})
    full, parts = network.unpruned(masked), {part.name: part for part in network.parts}
    chosen = [site for site in sites.find(network.base.apply, full, x).sites if site.name in parts]
    operands = {site.name: _uncut(site, parts[site.name], masked["kept"][site.name]) for site in chosen}
    return _Whole(network.base, full, masked, chosen, operands)


def _prunable(site: sites.Site) -> bool:
    """One equation, with the same kernel at every step where it is inside a scan."""
    return site.equations == 1 and site.place.count("scan") == int(site.shared_steps)


def _record(key: Any, site: sites.Site, inputs: Array, operands: sites.Operands, compute: Any) -> tuple[Array, Array]:
    return sites.identity(key, site, inputs, operands, compute)[0], operands.weight[0]


def _masked(weights: Tree, masks: dict[str, np.ndarray]) -> Tree:
    leaves = [
        leaf * masks[path] if path in masks else leaf for path, leaf in zip(_tree.paths(weights), jax.tree.leaves(weights), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def _drop_unread(
    apply: Any, operands: dict[str, np.ndarray], weights: Tree, x: Tree, chosen: list[sites.Site]
) -> tuple[dict[str, np.ndarray], Tree]:
    """Remove what feeds units that nobody reads, from the last map backwards: kernels, and biases among the weights.

    Which map reads a unit is guessed from consecutive sizes (a flattened convolution has several entries a channel, in one of two orders)
    and the guess is kept only where the outputs do not change at all.
    """

    @jax.jit
    def run(operands: dict[str, Array], weights: Tree) -> Tree:
        def handler(key: Any, site: sites.Site, inputs: Array, given: sites.Operands, compute: Any) -> tuple[Array, None]:
            kernel = operands.get(site.name, given.weight[0])
            return sites.identity(key, site, inputs, sites.Operands((kernel,), given.bias), compute)

        return sites.replay(None, apply, weights, x, handler)[0]

    before = run(operands, weights)
    for site, after in list(itertools.pairwise(chosen))[::-1]:
        leaves = dict(zip(_tree.paths(weights), jax.tree.leaves(weights), strict=True))
        if len(site.weight_out_axes) != 1 or not after.weight_unit_axes:
            continue
        reader, kernel, axis = operands[after.name], operands[site.name], site.weight_out_axes[0]
        read = np.any(reader != 0, axis=tuple(a for a in range(reader.ndim) if a not in after.weight_unit_axes)).ravel()
        channels = kernel.shape[axis]
        if len(read) % channels:
            continue
        guesses = (read.reshape(-1, channels).any(axis=0), read.reshape(channels, -1).any(axis=1))
        for alive in sorted(guesses, key=np.sum):  # the one that removes more first: removing nothing is always right
            trial = operands | {site.name: kernel * alive.reshape([channels if a == axis else 1 for a in range(kernel.ndim)])}
            tree = dict(leaves)
            if site.bias_path is not None and leaves[site.bias_path].size == channels:
                tree[site.bias_path] = leaves[site.bias_path] * alive.reshape(leaves[site.bias_path].shape)
            smaller = jax.tree.unflatten(jax.tree.structure(weights), list(tree.values()))
            if bool(jnp.array_equal(run(trial, smaller), before)):
                operands, weights = trial, smaller
                break
    return operands, weights


def _part(site: sites.Site, operand: np.ndarray) -> PrunedSite:
    keep_in = keep_out = None
    if len(site.weight_unit_axes) == 1 and len(site.unit_axes) == 1:
        axis = site.weight_unit_axes[0]
        keep_in = _alive(operand, axis)
    if len(site.weight_out_axes) == 1 and len(site.output_axes) == 1:
        keep_out = _alive(operand, site.weight_out_axes[0])
    small = _cut(operand, site, keep_in, keep_out)
    return PrunedSite(
        name=site.name,
        inputs=keep_in,
        outputs=keep_out,
        shape=small.shape,
        index=np.flatnonzero(small.ravel()),
        in_axis=site.unit_axes[0] if site.unit_axes else 0,
        out_axis=site.output_axes[0] if site.output_axes else 0,
    )


def _alive(operand: np.ndarray, axis: int) -> np.ndarray | None:
    """Units with a weight left, at least one; None if that is all of them."""
    alive = np.flatnonzero(np.any(operand != 0, axis=tuple(a for a in range(operand.ndim) if a != axis)))
    alive = alive if alive.size else np.zeros(1, int)
    return None if alive.size == operand.shape[axis] else alive


def _cut(operand: np.ndarray, site: sites.Site, keep_in: np.ndarray | None, keep_out: np.ndarray | None) -> np.ndarray:
    if keep_in is not None:
        operand = np.take(operand, keep_in, axis=site.weight_unit_axes[0])
    return operand if keep_out is None else np.take(operand, keep_out, axis=site.weight_out_axes[0])


def _uncut(site: sites.Site, part: PrunedSite, values: Array) -> np.ndarray:
    """The kernel between all units, from what an earlier pruning left of it."""
    at = [np.arange(size) for size in site.weight_shape]
    if part.inputs is not None:
        at[site.weight_unit_axes[0]] = part.inputs
    if part.outputs is not None:
        at[site.weight_out_axes[0]] = part.outputs
    kernel = np.zeros(site.weight_shape, values.dtype)
    kernel[np.ix_(*at)] = part.kernel(values)
    return kernel


def _values(part: PrunedSite, operand: np.ndarray, site: sites.Site) -> jax.Array:
    return jnp.asarray(_cut(operand, site, part.inputs, part.outputs).ravel()[part.index])


def _rows(shapes: dict[str, Any]) -> jax.Array:
    """Rows to compare two networks on."""
    if shapes["x_shape"] is None or len(shapes["x_shape"]) != 1:
        raise MethodError(message("Pruning needs one array of inputs.", "x of another structure", "a single array", "wrap the network"))
    shape = (ROWS, *shapes["x_shape"][0])
    return random_rows(jax.random.key(0), jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(shapes.get("x_dtype", ["float32"])[0])))


def _report(model: Any, masked: Tree, base: Any, full: Tree, network: Pruned, x: Array) -> dict[str, Any]:
    """Bytes and seconds per batch of the whole and the pruned network, and the largest difference of outputs to those of the model with its
    weights masked, relative to the largest output."""
    old = jax.jit(lambda weights, rows: base.apply(weights, rows, None))
    new = jax.jit(lambda weights, rows: network.apply(weights, rows, None))
    a, b = jax.jit(lambda weights, rows: model.apply(weights, rows, None))(masked, x), new(network.params, x)
    difference = float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(a)), 1e-30))
    if not difference <= TOLERANCE:
        raise MethodError(
            message(
                "The pruned network is another function.",
                f"outputs differ by {difference:.1e} of the largest",
                f"at most {TOLERANCE:.0e}",
                "report this network: its maps were not understood",
            )
        )

    def best(function: Any, weights: Tree) -> float:
        times = []
        for _ in range(7):
            clock = time.perf_counter()
            jax.block_until_ready(function(weights, x))
            times.append(time.perf_counter() - clock)
        return min(times)

    return {
        "difference": difference,
        "rows": ROWS,
        "seconds_before": best(old, full),
        "seconds_after": best(new, network.params),
        "bytes_before": _tree.nbytes(full),
        "bytes_after": network.nbytes(),
    }


def _counts(chosen: list[sites.Site], kept: dict[str, jax.Array]) -> dict[str, Any]:
    sizes = {site.name: int(np.prod(site.leaf_shape)) for site in chosen}
    left = {name: int(values.size) for name, values in kept.items()}
    return {
        "weights": sum(sizes.values()),
        "nonzero": sum(left.values()),
        "compression": sum(sizes.values()) / max(1, sum(left.values())),
        "sparsity": {name: 1.0 - left[name] / sizes[name] for name in sizes},
    }
