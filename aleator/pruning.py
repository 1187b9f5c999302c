"""Pruning: from a fit whose noise says which weights matter to a network that holds only those, and proof that it is the same function."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.model import random_rows
from aleator.networks.pruned import Narrow, Pruned, PrunedSite, spread
from aleator.posterior import GaussianDropout, Point
from aleator.priors import Normal

TOLERANCE = 1e-4  # largest change of an output allowed, relative to the largest output: rounding of sums in another order
ROUNDING = 1e-5  # the same for one step on the way
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
    operands, full = _fold_constants(base.apply, whole.operands, whole.weights, x, chosen)
    operands, full = _drop_unread(base.apply, operands, full, x, chosen)
    cut, narrow = _narrowed(base.apply, _Cut(operands, full, chosen), x)
    parts = tuple(_part(site, cut.operands[site.name]) for site in cut.chosen)
    kept = {part.name: _values(part, cut.operands[part.name], site) for part, site in zip(parts, cut.chosen, strict=True)}
    gone = {site.path for site in chosen}
    rest = {path: leaf for path, leaf in zip(_tree.paths(cut.weights), jax.tree.leaves(cut.weights), strict=True) if path not in gone}
    network = Pruned(base, parts, {"kept": kept, "rest": rest}, narrow)
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
    parts = {part.name: part for part in network.parts}
    found = lambda tree: [site for site in sites.find(network.base.apply, tree, x).sites if site.name in parts]
    full = network.unpruned(masked)
    chosen, small = found(full), found(network.narrowed(masked))
    cuts = {(cut.path, cut.axis): cut.units for cut in network.narrow}
    operands = {}
    for site, cut in zip(chosen, small, strict=True):
        kernel = _uncut(cut, parts[site.name], masked["kept"][site.name])
        for axes, leaf_axes in ((site.weight_unit_axes, site.leaf_axes), (site.weight_out_axes, site.out_axes)):
            if len(axes) == len(leaf_axes) == 1 and (units := cuts.get((site.path, leaf_axes[0]))) is not None:
                kernel = np.asarray(spread(kernel, units, axes[0], site.weight_shape[axes[0]]))
        operands[site.name] = kernel
    return _Whole(network.base, full, masked, chosen, operands)


def _prunable(site: sites.Site) -> bool:
    """One equation, with the same kernel at every step where it is inside a scan."""
    return site.equations == 1 and site.place.count("scan") == int(site.shared_steps)


def _record(key: Any, site: sites.Site, inputs: Array, operands: sites.Operands, compute: Any) -> tuple[Array, Array]:
    return sites.identity(key, site, inputs, operands, compute)[0], operands.weight[0]


def _masked(weights: Tree, masks: dict[str, np.ndarray]) -> Tree:
    return _replaced(weights, {path: _leaf(weights, path) * mask for path, mask in masks.items()})


def _leaf(tree: Tree, path: str) -> Array:
    return dict(zip(_tree.paths(tree), jax.tree.leaves(tree), strict=True))[path]


def _replaced(tree: Tree, leaves: Mapping[str, Array]) -> Tree:
    """The tree with other leaves at these paths."""
    named = zip(_tree.paths(tree), jax.tree.leaves(tree), strict=True)
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves.get(path, leaf) for path, leaf in named])


def _with(kernels: dict[str, Array], record: Any = lambda site, inputs: None) -> Any:
    """A handler that applies these kernels in the place of a network's own. record(site, inputs) → what is noted of a site."""

    def handler(key: Any, site: sites.Site, inputs: Array, given: sites.Operands, compute: Any) -> tuple[Array, Any]:
        weights = sites.Operands((kernels.get(site.name, given.weight[0]),), given.bias)
        return sites.identity(key, site, inputs, weights, compute)[0], record(site, inputs)

    return handler


def _folds(site: sites.Site) -> bool:
    """A map whose bias can take what constant units give it: behind another map, one axis of units, the same at every step."""
    return (
        site.bias_path is not None and not site.first and not site.shared_steps and len(site.weight_unit_axes) == len(site.unit_axes) == 1
    )


def _fold_constants(
    apply: Any, operands: dict[str, np.ndarray], weights: Tree, x: Tree, chosen: list[sites.Site]
) -> tuple[dict[str, np.ndarray], Tree]:
    """What a map reads from units that nothing feeds any more joins its bias: they say the same whatever x is.

    Such a unit is one whose value stays the same over rows and positions with the weights as they are, and also with all biases at zero and
    all weights that are left replaced by positive or by negative random numbers, which would wake a unit that merely sleeps. A fold is kept
    only where the outputs stay the same up to rounding.
    """
    # Rows of integers may all be the same here, so nothing can be concluded from what does not vary with them.
    readers = {} if not jnp.issubdtype(x.dtype, jnp.floating) else {site.name: site for site in chosen if _folds(site)}

    @jax.jit
    def run(kernels: dict[str, Array], tree: Tree) -> tuple[Tree, dict[str, tuple[Array, Array]]]:
        def ends(site: sites.Site, inputs: Array) -> tuple[Array, Array] | None:
            over = tuple(axis for axis in range(inputs.ndim) if axis not in site.unit_axes)
            return (jnp.min(inputs, axis=over), jnp.max(inputs, axis=over)) if site.name in readers else None

        return sites.replay(None, apply, tree, x, _with(kernels, ends))

    paths = {site.bias_path for site in chosen if site.bias_path is not None}
    biases = {path: jnp.zeros_like(_leaf(weights, path)) for path in paths}
    rng = np.random.default_rng(0)
    for name, site in readers.items():
        before, seen = run(operands, weights)
        shaken = {each: (k != 0) * np.abs(rng.normal(size=k.shape)).astype(k.dtype) for each, k in operands.items()}
        bare = _replaced(weights, biases)
        awake = [run({each: sign * k for each, k in shaken.items()}, bare)[1] for sign in (1.0, -1.0)]
        still = np.all([np.asarray(ends[name][0] == ends[name][1]) for ends in (seen, *awake)], axis=0)
        kernel, units, outs = operands[name], site.weight_unit_axes[0], site.weight_out_axes
        across = lambda values: values.reshape([-1 if axis == units else 1 for axis in range(kernel.ndim)])  # noqa: B023
        if not np.any(kernel * across(still)):
            continue
        bias = _leaf(weights, str(site.bias_path))
        shift = np.sum(kernel * across(np.where(still, seen[name][0], 0.0)), axis=tuple(a for a in range(kernel.ndim) if a not in outs))
        if shift.size != bias.size:
            continue
        trial = operands | {name: kernel * across(~still)}
        moved = _replaced(weights, {str(site.bias_path): bias + shift.reshape(bias.shape)})
        after = run(trial, moved)[0]
        if float(jnp.max(jnp.abs(after - before))) <= ROUNDING * float(jnp.max(jnp.abs(before))):
            operands, weights = trial, moved
    return operands, weights


def _drop_unread(
    apply: Any, operands: dict[str, np.ndarray], weights: Tree, x: Tree, chosen: list[sites.Site]
) -> tuple[dict[str, np.ndarray], Tree]:
    """Remove what feeds units that nobody reads, from the last map backwards: kernels, and biases among the weights.

    Which map reads a unit is guessed from consecutive sizes (a flattened convolution has several entries a channel, in one of two orders)
    and the guess is kept only where the outputs do not change at all.
    """
    run = jax.jit(lambda kernels, tree: sites.replay(None, apply, tree, x, _with(kernels))[0])
    before = run(operands, weights)
    for site, after in list(itertools.pairwise(chosen))[::-1]:
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
            smaller = weights
            if site.bias_path is not None and (bias := _leaf(weights, site.bias_path)).size == channels:
                smaller = _replaced(weights, {site.bias_path: bias * alive.reshape(bias.shape)})
            if bool(jnp.array_equal(run(trial, smaller), before)):
                operands, weights = trial, smaller
                break
    return operands, weights


class _Cut(NamedTuple):
    """Kernels and parameters of a network, and its sites with the shapes they have there."""

    operands: dict[str, np.ndarray]
    weights: Tree
    chosen: list[sites.Site]


def _narrowed(apply: Any, whole: _Cut, x: Tree) -> tuple[_Cut, tuple[Narrow, ...]]:
    """The same code on narrower layers: units that nobody reads leave the leaf that feeds them, its bias and the leaf that would read them.

    As in `_drop_unread` the map after is taken for the reader. A network whose code fixes its widths refuses the narrower leaves, one in
    which somebody else reads the units (a skip, a norm) refuses them or says something else: those pairs stay as wide as they were.
    """
    run = jax.jit(lambda kernels, tree: sites.replay(None, apply, tree, x, _with(kernels))[0])
    before = run(whole.operands, whole.weights)
    narrow: list[Narrow] = []
    for site, after in itertools.pairwise(whole.chosen):
        if not len(site.weight_out_axes) == len(site.out_axes) == len(after.weight_unit_axes) == len(after.leaf_axes) == 1:
            continue
        out, unit = site.weight_out_axes[0], after.weight_unit_axes[0]
        reader = whole.operands[after.name]
        read, channels = np.any(reader != 0, axis=tuple(a for a in range(reader.ndim) if a != unit)), whole.operands[site.name].shape[out]
        if len(read) % channels:
            continue
        numbers = np.arange(len(read))
        for channel in (numbers % channels, numbers // (len(read) // channels)):  # channels last, channels first
            alive = np.unique(channel[read]) if read.any() else np.zeros(1, int)
            if len(alive) == channels:
                continue
            units = np.flatnonzero(np.isin(channel, alive))
            cuts = [Narrow(site.path, site.out_axes[0], alive), Narrow(after.path, after.leaf_axes[0], units)]
            if site.bias_path is not None:
                bias = _leaf(whole.weights, site.bias_path)
                cuts += [Narrow(site.bias_path, axis, alive) for axis in range(bias.ndim) if bias.shape[axis] == bias.size == channels]
            kernels = {site.name: np.take(whole.operands[site.name], alive, out), after.name: np.take(reader, units, unit)}
            leaves = {cut.path: jnp.take(_leaf(whole.weights, cut.path), cut.units, cut.axis) for cut in cuts}
            trial = _Cut(whole.operands | kernels, _replaced(whole.weights, leaves), whole.chosen)
            try:  # tracing runs the network's own code, which may refuse in any way; what goes wrong later is no refusal and is not hidden
                shape = jax.eval_shape(run, trial.operands, trial.weights).shape
            except Exception:
                continue
            if shape != before.shape:
                continue
            said = run(trial.operands, trial.weights)
            if float(jnp.max(jnp.abs(said - before))) <= ROUNDING * float(jnp.max(jnp.abs(before))):
                whole, narrow = trial, narrow + cuts
                break
    found = {site.name: site for site in sites.find(apply, whole.weights, x).sites}
    return whole._replace(chosen=[found[site.name] for site in whole.chosen]), tuple(narrow)


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
