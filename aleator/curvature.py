"""Curvature of the log-likelihood in the weights of any network: Jacobians, Gauss–Newton, Fisher and Hessian, by sites or by rows.

The generalised Gauss–Newton matrix is G = Σᵢ JᵢᵀΛᵢJᵢ with Jᵢ (k, P) the Jacobian of the outputs at row i and Λᵢ the Fisher information of the
likelihood in its outputs; with a root Λ = RRᵀ it is a sum of squares of the gradients JᵢᵀR. Weights are numbered along the flattened leaves
of the network. At a site the gradient of one output is aᵀg, summed over the positions and steps that share the weight, with a the inputs of the
map and g the cotangents of its outputs: both are recorded in one pass through the network, so that nothing of size rows × outputs × weights
is ever formed unless it is asked for. The inputs of a look-up are rows of the identity; each group of a convolution is a map of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._cache import cached
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.data import Batch
from aleator.model import random_rows, rows_of

LOOKUP = 1024  # rows of a table up to which look-ups have Kronecker factors
GROUPS = 64  # of a convolution up to which each has factors of its own


class Block(NamedTuple):
    """One weight with its bias, as a matrix (a, b): a inputs (the last of them the constant 1 where there is a bias), b outputs.

    names: the equations that use it. numbers (a, b): where its entries are among the flattened weights. constant: what the network
    multiplies the weight by. positions: how often one row uses it. group: (which, of how many) of a convolution.
    """

    names: tuple[str, ...]
    numbers: np.ndarray
    bias: bool
    constant: float
    positions: int
    group: tuple[int, int] = (0, 1)


class Layout(NamedTuple):
    """How the chosen weights are covered. size: P, of all weights. blocks: matrices at sites. rest: numbers of the other chosen ones.
    direct: there is one block, and its outputs are the network's own."""

    size: int
    blocks: tuple[Block, ...]
    rest: np.ndarray
    direct: bool


class Taps(NamedTuple):
    """One pass through a network. outputs (n, k); inputs: by block, (n, positions, a); pull(cotangents (r, n, k)) → by block (r, n, positions, b)."""

    outputs: Array
    inputs: tuple[Array, ...]
    pull: Callable[[Array], tuple[Array, ...]]


# ---- where the weights are ----------------------------------------------------------------------------------------------------------


def offsets(weights: Tree) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Path → (number of its first entry, shape)."""
    leaves = jax.tree.leaves(weights)
    starts = np.cumsum([0] + [int(np.prod(leaf.shape)) for leaf in leaves])
    return {path: (int(start), tuple(leaf.shape)) for path, start, leaf in zip(_tree.paths(weights), starts, leaves, strict=False)}


@cached
def layout(model: Any, signature: Any, chosen: tuple[str, ...] | None = None) -> Layout:
    """Blocks for the weights under `chosen` paths (None: all) of a model's network at inputs of this signature."""
    weights = jax.eval_shape(lambda: model.weights(model.init(jax.random.key(0))))
    where = offsets(weights)
    size = sum(int(np.prod(shape)) for _, shape in where.values())
    paths = set(where) if chosen is None else set(chosen)
    rows = rows_of(signature)
    apply = lambda w, x, key: model.apply(w, x, key)
    found = sites.find(apply, weights, rows)
    index = _indices(apply, weights, rows)
    blocks, covered = [], set()
    for path in dict.fromkeys(site.path for site in found.sites):
        own = [site for site in found.sites if site.path == path]
        found_blocks = _blocks(own, index, where) if path in paths else []
        biases = {site.bias_path for site in own}
        if not found_blocks or not biases <= paths | {None}:
            continue
        blocks += found_blocks
        covered |= {path} | (biases - {None})
    numbers = [np.arange(start, start + int(np.prod(shape))) for path, (start, shape) in where.items() if path in paths - covered]
    plan = Layout(size, tuple(blocks), np.concatenate([np.zeros(0, int), *numbers]).astype(np.int32), False)
    return plan._replace(direct=_is_direct(model, weights, rows, plan))


def _is_direct(model: Any, weights: Tree, rows: Tree, plan: Layout) -> bool:
    """Whether a cotangent of the network's outputs is that of the only block: tried with random numbers."""
    if len(plan.blocks) != 1 or plan.blocks[0].positions != 1 or len(plan.rest):
        return False
    key_weights, key_x, key_push = jax.random.split(jax.random.key(0), 3)

    def back(w: Tree, x: Tree) -> tuple[Array, Array]:
        seen = tap(model, w, x, plan)
        push = jax.random.normal(key_push, (1, *seen.outputs.shape), seen.outputs.dtype)
        return push[0], seen.pull(push)[0][0, :, 0]

    push, pulled = jax.jit(back)(random_rows(key_weights, weights), random_rows(key_x, rows))
    return push.shape == pulled.shape and bool(jnp.array_equal(push, pulled))


def _indices(apply: Callable, weights: Tree, rows: Tree) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """For each equation: which entries of its leaf its weight is made of, the constant they are multiplied by, and the same for its bias.

    Numbers are sent along the way of the weights, so that any transposition, reshape or slice of the network's is followed.
    """

    def run(zeros: Tree, x: Tree) -> dict:
        number = jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), zeros)
        ones = jax.tree.map(jnp.ones_like, zeros)

        def note(key: Any, site: sites.Site, inputs: Array, operands: sites.Operands, compute: Callable) -> tuple[Array, Any]:
            out = compute(inputs, operands.weight[0], None if operands.bias is None else operands.bias[0])
            return out, (operands.weight[1:], None if operands.bias is None else operands.bias[1])

        return sites.replay(None, apply, zeros, x, note, companions=(number, ones), powers=(0, 1))[1]

    with jax.enable_x64(True):  # numbers beyond 2²⁴ are not whole in single precision
        blank = lambda tree: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype if leaf.dtype.kind != "f" else np.float64), tree)
        records = jax.jit(run)(blank(weights), blank(rows))
    tidy: dict[str, Any] = {}
    for name, ((number, ones), bias) in records.items():
        tidy[name] = (
            np.rint(np.asarray(number)).astype(int),
            np.asarray(ones),
            None if bias is None else np.rint(np.asarray(bias)).astype(int),
        )
    return tidy


def _blocks(own: list[sites.Site], index: dict[str, Any], where: dict[str, Any]) -> list[Block]:
    """The block of one leaf, or one for each group of a convolution; none where its uses do not make one matrix: slices, a weight a scan
    step, different readings, tables of more than LOOKUP rows."""
    matrices, constants = [], []
    for site in own:
        if site.example_axis is None or site.output_example_axis is None or site.name not in index or site.groups > GROUPS:
            return []
        number, constant, bias = (_one_step(record, len(site.lengths)) for record in index[site.name])
        start, shape = where[site.path]
        if number is None or number.size != int(np.prod(shape)) or np.ptp(constant) != 0.0 or constant.flat[0] == 0.0:
            return []
        if site.kind == "embedding" and (len(_inputs_of(site)) != 1 or site.weight_shape[_inputs_of(site)[0]] > LOOKUP):
            return []
        matrix = start + np.transpose(number, (*_inputs_of(site), *site.weight_out_axes)).reshape(-1, _num_outputs(site))
        if site.bias_path is not None:
            first, bias_shape = where[site.bias_path]
            if bias is None or bias.size != int(np.prod(bias_shape)) or bias.size != matrix.shape[1]:
                return []
            matrix = np.concatenate([matrix, first + bias.reshape(1, -1)])
        matrices.append(matrix)
        constants.append(float(constant.flat[0]))
    same = all(m.shape == matrices[0].shape and np.array_equal(m, matrices[0]) for m in matrices) and len(set(constants)) == 1
    if not same or len({(site.bias_path, site.groups) for site in own}) > 1:
        return []
    names, groups = tuple(site.name for site in own), own[0].groups
    parts = np.split(matrices[0].astype(np.int32), groups, axis=1)
    return [Block(names, part, own[0].bias_path is not None, constants[0], own[0].positions, (g, groups)) for g, part in enumerate(parts)]


def _one_step(record: Any, depth: int) -> Any:
    """What all steps of the scans around a site have in common; None where they differ."""
    for _ in range(depth):
        if record is None or not np.all(record == record[:1]):
            return None
        record = record[0]
    return record


def _inputs_of(site: sites.Site) -> tuple[int, ...]:
    """Axes of the weight that number the inputs of its matrix: units in the order of the inputs' axes, then (convolutions) the window."""
    if site.kind == "dense":
        return site.weight_unit_axes
    # Of a convolution channels and places of the window, of a table its rows.
    return tuple(axis for axis in range(len(site.weight_shape)) if axis not in site.weight_out_axes)


def _num_outputs(site: sites.Site) -> int:
    return int(np.prod([site.weight_shape[axis] for axis in site.weight_out_axes])) if site.weight_out_axes else 1


# ---- one pass through the network ---------------------------------------------------------------------------------------------------


def tap(model: Any, weights: Tree, x: Tree, plan: Layout) -> Taps:
    """Run the network once, noting the inputs of every block and keeping the way back to the outputs of its maps."""
    apply = lambda w, rows, key: model.apply(w, rows, key)
    named: dict[str, list[int]] = {}
    for number, block in enumerate(plan.blocks):
        for name in block.names:
            named.setdefault(name, []).append(number)
    shapes = {site.name: site for site in sites.find(apply, weights, x).sites if site.name in named}
    num_rows = _tree.rows(x)
    dtype = jnp.result_type(*jax.tree.leaves(weights))
    zeros = {name: jnp.zeros((*site.lengths, *site.output_shape), dtype) for name, site in shapes.items()}

    def run(pushes: dict) -> tuple[Array, dict]:
        def note(key: Any, site: sites.Site, inputs: Array, operands: sites.Operands, compute: Callable) -> tuple[Array, Any]:
            out = compute(inputs, operands.weight[0], None if operands.bias is None else operands.bias[0])
            if site.name not in named:
                return out, None
            return out + pushes[site.name][operands.steps], _patches(site, inputs, operands.weight[0], compute, num_rows)

        return sites.replay(None, apply, weights, x, note)

    outputs, pull, records = jax.vjp(run, zeros, has_aux=True)

    def back(cotangents: Array) -> tuple[Array, ...]:
        cotangents_by_site = jax.vmap(lambda c: pull(c)[0])(cotangents)
        parts: list[list[Array]] = [[] for _ in plan.blocks]
        for name, value in cotangents_by_site.items():
            depth = len(shapes[name].lengths)
            # Scan steps count among the positions, after the rows.
            rows_first, *others = (1 + depth + axis for axis in shapes[name].output_order())
            value = jnp.transpose(value, (0, rows_first, *range(1, 1 + depth), *others))
            value = value.reshape(len(value), num_rows, -1, len(named[name]) * plan.blocks[named[name][0]].numbers.shape[1])
            for number, part in zip(named[name], jnp.split(value, len(named[name]), axis=3), strict=True):
                parts[number].append(part)
        return tuple(jnp.concatenate(part, axis=2) for part in parts)

    def inputs_of(block: Block) -> Array:
        seen = [_stepwise(records[name], len(shapes[name].lengths)) for name in block.names]
        rows = block.constant * jnp.split(jnp.concatenate(seen, axis=1), block.group[1], axis=2)[block.group[0]]
        return jnp.concatenate([rows, jnp.ones((*rows.shape[:2], 1), rows.dtype)], axis=2) if block.bias else rows

    return Taps(outputs, tuple(inputs_of(block) for block in plan.blocks), back)


def _stepwise(seen: Array, depth: int) -> Array:
    """(steps, …, n, positions, a) → (n, steps · positions, a)."""
    return jnp.moveaxis(seen, depth, 0).reshape(seen.shape[depth], -1, seen.shape[-1])


def _patches(site: sites.Site, inputs: Array, weight: Array, compute: Callable, num_rows: int) -> Array:
    """What the rows of the map's matrix are multiplied with, (n, positions, a); of all groups one after the other."""
    axes = _inputs_of(site)
    number = int(np.prod([weight.shape[axis] for axis in axes]))
    if site.kind == "dense":
        return jnp.transpose(inputs, site.input_order()).reshape(num_rows, -1, number)
    if site.kind == "embedding":  # a table of its own row numbers says which row is used
        rows = jnp.arange(number, dtype=weight.dtype).reshape([number if axis in axes else 1 for axis in range(weight.ndim)])
        used = jnp.transpose(compute(inputs, jnp.broadcast_to(rows, weight.shape)), site.output_order())
        return jax.nn.one_hot(used.reshape(num_rows, -1, _num_outputs(site))[:, :, 0].astype(jnp.int32), number, dtype=weight.dtype)
    # A kernel that passes every place of its window on to a channel of its own gives the patches in the network's own layout.
    unit = jnp.eye(number, dtype=weight.dtype).reshape(*(weight.shape[axis] for axis in axes), number)
    unit = jnp.concatenate([unit] * site.groups, axis=-1)
    seen = compute(inputs, jnp.moveaxis(unit, -1, site.weight_out_axes[0]))
    return jnp.transpose(seen, site.output_order()).reshape(num_rows, -1, site.groups * number)


def numbers_per_row(plan: Layout, outputs: int, blocks: bool = True) -> int:
    """How many numbers a row keeps alive in a pass: inputs and cotangents of every block, Jacobians of the rest; where the block's outputs are
    the network's own, no cotangents. blocks=False: the Jacobian of all weights as well, its parts and its product with a root."""
    if plan.direct:
        return outputs * (plan.blocks[0].numbers.shape[0] + outputs)
    own = sum(b.positions * (b.numbers.shape[0] + outputs * b.numbers.shape[1]) for b in plan.blocks)
    own += sum(outputs * b.numbers.size for b in plan.blocks if b.positions > 1)
    own += outputs * (len(plan.rest) + outputs)
    return own if blocks else own + 3 * outputs * (len(plan.rest) + sum(b.numbers.size for b in plan.blocks))


def gradients(inputs: Array, cotangents: Array) -> Array:
    """(r, n, a, b): gradients of r functions of each row in one block."""
    return jnp.einsum("nta,rntb->rnab", inputs, cotangents)


def jacobian(model: Any, weights: Tree, x: Tree, plan: Layout, seen: Taps | None = None) -> tuple[Array, Array]:
    """(f (n, k), ∂f/∂w (n, k, m)) for the weights of the plan in the order of their numbers, by one backward pass an output."""
    seen = tap(model, weights, x, plan) if seen is None else seen
    n, k = seen.outputs.shape
    eye = jnp.broadcast_to(jnp.eye(k, dtype=seen.outputs.dtype)[:, None, :], (k, n, k))
    parts: list[Any] = [jnp.swapaxes(gradients(a, g), 0, 1).reshape(n, k, -1) for a, g in zip(seen.inputs, seen.pull(eye), strict=True)]
    parts += [_rest_jacobian(model, weights, x, plan)] if len(plan.rest) else []
    return seen.outputs, jnp.concatenate(parts, axis=2)[:, :, order(plan)]


def order(plan: Layout) -> np.ndarray:
    """(m,): which entry of all blocks one after the other, the rest last, is the first, second, … by its number."""
    return np.argsort(np.concatenate([*(block.numbers.ravel() for block in plan.blocks), plan.rest]), kind="stable").astype(np.int32)


def _rest_jacobian(model: Any, weights: Tree, x: Tree, plan: Layout) -> Array:
    """(n, k, m) for the weights outside blocks. Only their leaves are differentiated: a backward pass of the whole network by rows and
    outputs would be rows × outputs × weights."""
    leaves, structure = jax.tree.flatten(weights)
    starts = np.cumsum([0] + [leaf.size for leaf in leaves])[:-1]
    chosen = [i for i, leaf in enumerate(leaves) if leaf.size and starts[i] in plan.rest]

    def one(row: Tree) -> Array:
        def outputs(own: list[Array]) -> Array:
            given = iter(own)
            whole = [next(given) if i in chosen else leaf for i, leaf in enumerate(leaves)]
            return model.apply(jax.tree.unflatten(structure, whole), jax.tree.map(lambda leaf: leaf[None], row), None)[0]

        slopes = jax.jacrev(outputs)([leaves[i] for i in chosen])
        return jnp.concatenate([slope.reshape(slope.shape[0], -1) for slope in slopes], axis=1)

    return jax.vmap(one)(x)


def roots(kind: str, model: Any, outputs: Array, batch: Batch, extra: dict) -> Array:
    """Cotangents R (r, n, k) whose squared pull-backs add up to the curvature: roots of the Fisher information ("ggn"), or the gradient of
    the log-likelihood itself ("empirical"). Rows weigh as they do in the likelihood; padding weighs nothing."""
    if kind == "ggn":
        root = jnp.moveaxis(model.likelihood.information_root(outputs, extra), -1, 0)
    else:
        total = lambda f: jnp.sum(model.likelihood.log_prob(f, batch.y, extra))
        root = jax.grad(total)(outputs)[None]
    weight = row_weights(batch, outputs.dtype)
    return jnp.where(weight[:, None] > 0, root, 0.0) * jnp.sqrt(weight)[:, None]


def row_weights(batch: Batch, dtype: Any) -> Array:
    """(n,): weights of the rows, 0 for padding."""
    number = _tree.rows(batch.x)
    weight = jnp.ones(number, dtype) if batch.weight is None else jnp.asarray(batch.weight, dtype)
    return jnp.where(jnp.asarray(batch.index) >= 0, weight, 0.0) if batch.padded else weight


# ---- sums over a batch ----------------------------------------------------------------------------------------------------------------
# seen: the pass through the network at these rows, where the caller has made it already.


class Factors(NamedTuple):
    """Kronecker factors of each block and squares of the rest. inputs (a, a): Σ aaᵀ; outputs (b, b): Σ ggᵀ; rest (m,)."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    rest: Array


def factors(
    model: Any, weights: Tree, batch: Batch, extra: dict, plan: Layout, kind: str, reduce: bool, seen: Taps | None = None
) -> Factors:
    """Sums over one batch. Expand (reduce=False): every position counts as a row of its own; exact for one position. Reduce: inputs are
    averaged and cotangents summed over positions first; exact where the network averages over them linearly."""
    seen = tap(model, weights, batch.x, plan) if seen is None else seen
    weight = row_weights(batch, seen.outputs.dtype)
    square = lambda a, b: a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])  # one product, which XLA hands to its fastest kernel
    if plan.direct and kind == "ggn":
        a = seen.inputs[0]
        total = model.likelihood.total_information(jnp.where(weight[:, None] > 0, seen.outputs, 0.0), extra, weight)
        return Factors((square(weight[:, None, None] * a, a),), (total,), jnp.zeros(0, a.dtype))
    cotangents = roots(kind, model, seen.outputs, batch, extra)
    pulled = seen.pull(cotangents)
    inputs, outputs = [], []
    for a, g in zip(seen.inputs, pulled, strict=True):
        if reduce:
            a, g = a.mean(axis=1, keepdims=True), g.sum(axis=2, keepdims=True)
        inputs.append(square(weight[:, None, None] * a, a))
        outputs.append(square(g, g))
    return Factors(tuple(inputs), tuple(outputs), _rest(model, weights, batch, plan, cotangents))


def corrected(
    model: Any,
    weights: Tree,
    batch: Batch,
    extra: dict,
    plan: Layout,
    kind: str,
    bases: tuple[tuple[Array, Array], ...],
    seen: Taps | None = None,
) -> tuple[tuple[Array, ...], Array]:
    """Σ (UᵀGV)² by block (a, b) in the given bases, and the rest: second moments of the gradients along Kronecker eigenvectors."""
    seen = tap(model, weights, batch.x, plan) if seen is None else seen
    cotangents = roots(kind, model, seen.outputs, batch, extra)
    sums = []
    for a, g, (left, right) in zip(seen.inputs, seen.pull(cotangents), bases, strict=True):
        sums.append(_squares(a @ left, g @ right))
    return tuple(sums), _rest(model, weights, batch, plan, cotangents)


def _squares(a: Array, g: Array) -> Array:
    """Σ over rows and roots of the squared gradients of one block, (a, b); without forming them where a map is used once a row."""
    if a.shape[1] == 1:
        return jnp.einsum("na,rnb->ab", a[:, 0] ** 2, g[:, :, 0] ** 2)
    return jnp.sum(gradients(a, g) ** 2, axis=(0, 1))


def diagonal(model: Any, weights: Tree, batch: Batch, extra: dict, plan: Layout, kind: str, seen: Taps | None = None) -> Array:
    """The diagonal of the curvature over one batch, (P,), zero where a weight was not chosen."""
    seen = tap(model, weights, batch.x, plan) if seen is None else seen
    cotangents = roots(kind, model, seen.outputs, batch, extra)
    out = jnp.zeros(plan.size, seen.outputs.dtype)
    for block, a, g in zip(plan.blocks, seen.inputs, seen.pull(cotangents), strict=True):
        out = out.at[block.numbers.ravel()].set(_squares(a, g).ravel())
    return out.at[plan.rest].set(_rest(model, weights, batch, plan, cotangents)) if len(plan.rest) else out


def dense(
    model: Any,
    weights: Tree,
    batch: Batch,
    extra: dict,
    plan: Layout,
    kind: str,
    chosen: Array | None = None,
    seen: Taps | None = None,
) -> Array:
    """The curvature of the plan's weights over one batch, (m, m), or of `chosen` (s,) places among them."""
    seen = tap(model, weights, batch.x, plan) if seen is None else seen
    if plan.direct and kind == "ggn" and chosen is None:
        return _dense_direct(model, batch, extra, plan, seen)
    outputs, slopes = jacobian(model, weights, batch.x, plan, seen)
    root = roots(kind, model, outputs, batch, extra)
    rows = jnp.einsum("rnk,nkp->rnp", root, slopes if chosen is None else slopes[:, :, chosen])
    rows = rows.reshape(-1, rows.shape[2])
    return rows.T @ rows


def _dense_direct(model: Any, batch: Batch, extra: dict, plan: Layout, seen: Taps) -> Array:
    """Σ Λ ⊗ aaᵀ: where the block's outputs are the network's own, k times less work than through Jacobians."""
    a, (inputs, k) = seen.inputs[0][:, 0], plan.blocks[0].numbers.shape
    root = roots("ggn", model, seen.outputs, batch, extra)
    # Pairs (c, c + o) of outputs for one o at a time: Λ is symmetric, so that o ≤ k/2 is enough.
    other = (np.arange(k) + np.arange(k // 2 + 1)[:, None]) % k
    information = lambda d: jnp.einsum("rnc,rnc->nc", root, root[:, :, d])
    pairs = jax.lax.map(lambda d: (information(d)[:, :, None] * a[:, None, :]).reshape(len(a), -1).T @ a, jnp.asarray(other))
    pairs = pairs.reshape(*other.shape, inputs, inputs)
    ahead = (np.arange(k) - np.arange(k)[:, None]) % k  # from c to d
    found = ahead <= k // 2
    offset, first = np.where(found, ahead, -ahead % k), np.where(found, np.arange(k)[:, None], np.arange(k))
    blocks = pairs[offset, first]  # (c, d, i, j): the same for (i, j) and (j, i), as Σ Λ aaᵀ is
    matrix = jnp.transpose(blocks, (2, 0, 3, 1)).reshape(inputs * k, -1)
    return matrix[order(plan)][:, order(plan)]


def product(model: Any, weights: Tree, batch: Batch, extra: dict, index: np.ndarray, kind: str, vectors: Array) -> Array:
    """Curvature times vectors (m, q) over one batch, without forming it: forward, through Λ, and back."""
    vector = _tree.flat(weights)
    apply = lambda part: model.apply(_tree.unflat(vector.at[index].set(part), weights), batch.x, None)
    outputs, forward = jax.linearize(apply, vector[index])
    backward = jax.linear_transpose(forward, vector[index])
    root = roots(kind, model, outputs, batch, extra)

    def one(v: Array) -> Array:
        inner = jnp.einsum("rnk,nk->rn", root, forward(v))
        return backward(jnp.einsum("rnk,rn->nk", root, inner))[0]

    return jax.vmap(one, in_axes=1, out_axes=1)(vectors)


def _rest(model: Any, weights: Tree, batch: Batch, plan: Layout, cotangents: Array) -> Array:
    """Σ of squared gradients for the weights outside blocks, (m,)."""
    if not len(plan.rest):
        return jnp.zeros(0, cotangents.dtype)
    each = jnp.einsum("rnk,nkp->rnp", cotangents, _rest_jacobian(model, weights, batch.x, plan))
    return jnp.sum(each**2, axis=(0, 1))


# ---- functions of the outputs -----------------------------------------------------------------------------------------------------------


def function_covariance(
    model: Any, weights: Tree, x: Tree, plan: Layout, operator: Any, variance: bool = False, many: bool = False
) -> tuple[Array, Array]:
    """(f (n, k), JΣJᵀ (n, k, k)) for Σ in blocks as `plan` has them, the rest last: outer products at sites, never rows × outputs × weights
    where one position uses the weight. variance: its diagonal alone, (n, k); many: that, one output at a time."""
    seen = tap(model, weights, x, plan)
    n, k = seen.outputs.shape
    if plan.direct:
        return seen.outputs, operator.operators[0].rows(seen.inputs[0][:, 0], variance or many)

    def spread(cotangents: Array) -> Array:
        """(n, r, r) of r functions of the outputs, or (n, r)."""
        pulled = zip(operator.operators, seen.inputs, seen.pull(cotangents), strict=False)
        return sum(part.shared(a, g, variance or many) for part, a, g in pulled)

    total: Any = jnp.zeros((n, k) if variance or many else (n, k, k), seen.outputs.dtype)
    if plan.blocks:
        eye = jnp.broadcast_to(jnp.eye(k, dtype=seen.outputs.dtype)[:, None, :], (k, n, k))
        total = jax.lax.map(lambda c: spread(c[None])[:, 0], eye).T if many else spread(eye)
    if len(plan.rest):
        rest = operator.operators[-1].sandwich(_rest_jacobian(model, weights, x, plan))
        total = total + (jnp.diagonal(rest, axis1=1, axis2=2) if variance or many else rest)
    return seen.outputs, total


def choose(model: Any, signature: Any, subset: Any) -> tuple[str, ...] | None:
    """Paths of the chosen leaves: None for "all"; of the last site for "last_layer"; of the given patterns otherwise."""
    import fnmatch

    weights = jax.eval_shape(lambda: model.weights(model.init(jax.random.key(0))))
    paths = _tree.paths(weights)
    if subset == "all":
        return None
    if subset == "last_layer":
        found = sites.find(lambda w, x, key: model.apply(w, x, key), weights, rows_of(signature))
        if not found.sites:
            raise MethodError(
                message("There is no last layer.", "a network without linear maps", "at least one", "use subset='all' or paths of weights")
            )
        last = found.sites[-1]
        return tuple(path for path in paths if path in (last.path, last.bias_path))
    patterns = (subset,) if isinstance(subset, str) else tuple(subset)
    chosen = tuple(path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns))
    if not chosen:
        raise MethodError(
            message("No weights are chosen.", f"subset={subset!r}", f"paths among {paths}", "pass 'all', 'last_layer' or patterns of paths")
        )
    return chosen
