"""Sites: the linear maps inside any network, found in its jaxpr and replayed with each of them handed to a function of ours.

A site is an equation that applies a parameter leaf to something computed from x: a matrix product, a convolution, a row look-up. A leaf is
followed from the parameter tree to the equation through reshapes, transposes, casts, slices, scatters into constants and multiplication by
constants, so the user's code is never touched. Leaves that are used in any other way (or not at all) have no site; methods treat them in weight space.

`find` lists the sites; `replay` runs the network with `handler(key, site, inputs, weights, compute) → (outputs, record)` in the place of
each. Records are returned, stacked along scans. With a handler that returns `compute(inputs, …)` the network comes out as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from aleator import _tree
from aleator._equations import (
    Pending,
    Weight,
    bind,
    describe,
    first_row,
    follow,
    grown_axis,
    is_bias,
    is_key,
    leaf_axes_of,
    moved,
    noise_order,
    rows_behind,
)
from aleator._typing import Array, Key, Tree

FROM_X, FROM_PARAMS = 1, 2  # what a value of the network depends on
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


class Site(NamedTuple):
    """One equation that applies one weight.

    path: of the weight leaf; bias_path: of the leaf added to its outputs, if any. kind: "dense", "conv" or "embedding". Axes and shapes are
    of the arrays the handler sees: unit_axes are the axes of the inputs that are units feeding the map (contracted ones, channels),
    output_axes the axes of the outputs that are the units it feeds; leaf_axes, out_axes: the axes of the leaf that number the same two;
    weight_unit_axes, weight_out_axes: those of the weight as the equation uses it.
    example_axis, output_example_axis: where the rows of x went (None: nowhere). positions: how often one example uses the weight
    (pixels, scan steps, several equations): 1 means that noise on the outputs can stand for noise on the weights exactly. equations: how
    many of them use the leaf; shared_steps: the steps of a scan use the same values. first: the inputs are computed from x alone, no
    parameter before. place: number of the equation, within nested ones. groups: of a convolution. lengths: of the scans around it.
    """

    name: str
    path: str
    bias_path: str | None
    kind: str
    leaf_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    unit_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    leaf_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    weight_unit_axes: tuple[int, ...]
    weight_out_axes: tuple[int, ...]
    example_axis: int | None
    output_example_axis: int | None
    positions: int
    equations: int
    shared_steps: bool
    first: bool
    place: tuple
    groups: int = 1
    lengths: tuple[int, ...] = ()

    def input_noise_shape(self, inputs: Array) -> tuple[int, ...]:
        """Shape of one number per unit and example, to broadcast against the inputs."""
        keep = set(self.unit_axes) | (set() if self.example_axis is None else {self.example_axis})
        return tuple(size if axis in keep else 1 for axis, size in enumerate(inputs.shape))

    def output_noise_shape(self, outputs: Array) -> tuple[int, ...]:
        """Shape of one number per output unit and example."""
        keep = set(self.output_axes) | (set() if self.output_example_axis is None else {self.output_example_axis})
        return tuple(size if axis in keep else 1 for axis, size in enumerate(outputs.shape))

    def input_order(self) -> tuple[int, ...]:
        """Axes of the inputs in the order noise is drawn: rows, positions, units. A network's own layout then cannot change its noise."""
        return noise_order(len(self.input_shape), self.unit_axes, self.example_axis)

    def output_order(self) -> tuple[int, ...]:
        """The same for the outputs."""
        return noise_order(len(self.output_shape), self.output_axes, self.output_example_axis)

    def square(self, inputs: Array) -> Array:
        """What the inputs become where variances are propagated: their squares; indices stay as they are."""
        return inputs if self.kind == "embedding" else jnp.square(inputs)

    @property
    def num_units(self) -> int:
        """Number of units feeding the map."""
        return int(np.prod([self.leaf_shape[axis] for axis in self.leaf_axes])) if self.leaf_axes else 1


class Found(NamedTuple):
    """All sites of a network in the order it runs them, and why each of the other parameters has none."""

    sites: tuple[Site, ...]
    rest: dict[str, str]

    @property
    def paths(self) -> set[str]:
        """Leaves that are handled at sites: weights and the biases fused with them."""
        return {site.path for site in self.sites} | {site.bias_path for site in self.sites if site.bias_path is not None}

    def table(self) -> str:
        """Sites, shapes and positions as text, one line each."""
        rows = [(s.name, s.kind, "×".join(map(str, s.leaf_shape)), f"{s.positions} a row", s.bias_path or "no bias") for s in self.sites]
        rows += [(path, "none", "", "", reason) for path, reason in self.rest.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else []
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


class Operands(NamedTuple):
    """A site's parameters as its equation uses them: (weight, *companions), and the same for a bias or None. steps: which row of their
    inputs the scans around it are at, outermost first."""

    weight: tuple[Array, ...]
    bias: tuple[Array, ...] | None
    steps: tuple[Array, ...] = ()


Handler = Callable[[Any, Site, Array, Operands, Callable], tuple[Array, Any]]


def identity(key: Key | None, site: Site, inputs: Array, weights: Operands, compute: Callable) -> tuple[Array, None]:
    """The handler that changes nothing."""
    return compute(inputs, weights.weight[0], None if weights.bias is None else weights.bias[0]), None


def find(apply: Callable, params: Tree, x: Tree, key: Key | None = None) -> Found:
    """The sites of apply(params, x, key). params, x and key may be shapes (`jax.ShapeDtypeStruct`); nothing is computed."""
    shapes = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)), tree)
    params, x = shapes(params), shapes(x)
    seen = _look(apply, params, x, key)
    if x is None or not jax.tree.leaves(x):
        return seen.found(None)
    longer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] + 1, *leaf.shape[1:]), leaf.dtype), x)
    return seen.found(_look(apply, params, longer, key))


def replay(
    key: Key | None,
    apply: Callable,
    params: Tree,
    x: Tree,
    handler: Handler,
    companions: Sequence[Tree] = (),
    powers: Sequence[int] = (),
    network_key: Key | None = None,
) -> tuple[Tree, dict[str, Any]]:
    """Run apply(params, x, network_key) with every site handed to `handler`; (outputs, records by site name).

    companions: trees like params that go the way of the weights (variances, perturbations); where a weight is multiplied by a constant c,
    companion i is multiplied by c^powers[i]. key: folded with the number of the site (so that it does not matter how the network is
    written) and with the step inside scans; may be None for handlers without randomness. Parameters without a site are used as given.
    """
    found = find(apply, params, x, network_key)
    closed, structure = _trace(apply, params, x, network_key)
    run = _Run(jax.tree.leaves(params), _tree.paths(params), [jax.tree.leaves(tree) for tree in companions], tuple(powers))
    run.handler, run.sites, run.rest = handler, {site.place: site for site in found.sites}, set(found.rest)
    run.numbers = {place: number for number, place in enumerate(run.sites)}
    outputs, records = run.start(closed, x, network_key, key)
    return jax.tree.unflatten(structure, outputs), records


# ---- tracing ----------------------------------------------------------------------------------------------------------------------


def _trace(apply: Callable, params: Tree, x: Tree, key: Key | None) -> tuple[ClosedJaxpr, Any]:
    if key is None:
        closed, out = jax.make_jaxpr(lambda p, rows: apply(p, rows, None), return_shape=True)(params, x)
    else:
        closed, out = jax.make_jaxpr(apply, return_shape=True)(params, x, key)
    return closed, jax.tree.structure(out)


def _look(apply: Callable, params: Tree, x: Tree, key: Key | None) -> _Run:
    """Run abstractly with the identity handler, noting every site met."""
    key = None if key is None else jax.eval_shape(lambda k: k, key)
    closed, _ = _trace(apply, params, x, key)
    run = _Run(jax.tree.leaves(params), _tree.paths(params), [], ())

    def go(leaves: list[Array], rows: Tree, k: Any) -> Any:
        run.leaves = leaves
        return run.start(closed, rows, k, None)[0]

    jax.eval_shape(go, run.leaves, x, key)
    return run


@dataclasses.dataclass
class _Note:
    """What one visit to a site showed."""

    facts: dict[str, Any]
    bias: int | None = None


class _Run:
    """One walk over a jaxpr. All state here is Python's, at tracing time; arrays flow through the walk as arguments and results."""

    def __init__(self, leaves: list[Any], paths: list[str], companions: list[list[Any]], powers: tuple[int, ...]):
        self.leaves, self.paths, self.companions, self.powers = leaves, paths, companions, (1, *powers)
        self.handler: Handler = identity
        self.sites: dict[tuple, Site] | None = None  # None while looking
        self.rest: set[str] = set()
        self.notes: dict[tuple, _Note] = {}
        self.spoiled: dict[int, str] = {}
        self.order: list[tuple] = []
        self.numbers: dict[tuple, int] = {}
        self.scans: tuple[tuple[int, Array], ...] = ()  # (length, step) of the scans around the equation at hand

    def start(self, closed: ClosedJaxpr, x: Tree, network_key: Any, key: Key | None) -> tuple[list[Array], dict[str, Any]]:
        values: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            tracked = self.sites is None or self.paths[i] not in self.rest
            values.append(Weight(i, (leaf, *(tree[i] for tree in self.companions))) if tracked else leaf)
        rows = jax.tree.leaves(x)
        keys = [] if network_key is None else [network_key]
        bits = [FROM_PARAMS] * len(values) + [FROM_X] * (len(rows) + len(keys))
        records: dict[str, Any] = {}
        outs, _ = self.walk(closed.jaxpr, closed.consts, values + rows + keys, bits, (), key, records)
        return [self.plain(out, "an output", records) for out in outs], records

    # ---- the walk -----------------------------------------------------------------------------------------------------------------

    def walk(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: list[Any], bits: list[int], place: tuple, key: Key | None, records: dict
    ) -> tuple[list[Any], list[int]]:
        """Evaluate a jaxpr; values may be arrays, weights on their way, or pending site outputs."""
        env: dict[Any, Any] = {}
        depends: dict[Any, int] = {}
        uses: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if not isinstance(var, Literal):
                    uses[var] = uses.get(var, 0) + 1
        for var in jaxpr.outvars:
            if not isinstance(var, Literal):
                uses[var] = uses.get(var, 0) + 1
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        depends.update(dict.fromkeys(jaxpr.constvars, 0))
        depends.update(zip(jaxpr.invars, bits, strict=True))
        read = lambda var: var.val if isinstance(var, Literal) else env[var]
        bit = lambda var: 0 if isinstance(var, Literal) else depends[var]

        def settle(variables: Sequence[Any]) -> None:
            """Several readers, or one that reads twice, must see one draw."""
            for var in variables:
                if not isinstance(var, Literal) and isinstance(env[var], Pending) and uses[var] > 1:
                    env[var] = self.plain(env[var], "", records)

        for number, eqn in enumerate(jaxpr.eqns):
            settle(eqn.invars)
            values, marks = [read(var) for var in eqn.invars], [bit(var) for var in eqn.invars]
            outs, out_bits = self.equation(eqn, values, marks, (*place, number), key, records)
            env.update(zip(eqn.outvars, outs, strict=True))
            depends.update(zip(eqn.outvars, out_bits, strict=True))
        settle(jaxpr.outvars)
        return [read(var) for var in jaxpr.outvars], [bit(var) for var in jaxpr.outvars]

    def equation(
        self, eqn: JaxprEqn, values: list[Any], bits: list[int], place: tuple, key: Key | None, records: dict
    ) -> tuple[list[Any], list[int]]:
        name, total = eqn.primitive.name, 0
        for mark in bits:
            total |= mark
        same = [total] * len(eqn.outvars)
        weights = [i for i, value in enumerate(values) if isinstance(value, Weight)]
        pending = [i for i, value in enumerate(values) if isinstance(value, Pending)]
        if len(pending) == 1 and not weights and name in ("transpose", "convert_element_type", "copy"):
            value = values[0]
            facts = value.facts | moved(value.facts, eqn) if name == "transpose" else value.facts
            return [value._replace(after=(*value.after, lambda y: bind(eqn, [y])[0]), facts=facts)], same
        if name == "add" and len(pending) == 1 and len(weights) == 1 and is_bias(values[weights[0]], values[pending[0]]):
            return [self.close(values[pending[0]], values[weights[0]], records)], same
        if not weights:
            return bind(eqn, [self.plain(value, "", records) for value in values]), same
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            values = [self.plain(v, "", records) if isinstance(v, Pending) else v for v in values]
            return self.walk(jaxpr, consts, values, bits, place, key, records)
        if name in ("checkpoint", "remat", "remat2"):
            return self.remat(eqn, values, bits, place, key, records)
        if name == "scan":
            return self.scan(eqn, values, bits, place, key, records)
        if len(weights) == 1:
            at = weights[0]
            others = [self.plain(v, "", records) if i != at else v for i, v in enumerate(values)]
            constant = all(mark == 0 for i, mark in enumerate(bits) if i != at)
            followed = follow(eqn, others, at, self.powers) if constant else None
            if followed is not None:
                return followed, same
            described = describe(eqn, others, at) if total & FROM_X else None
            if described is not None:
                return [self.open(eqn, others, at, described, bits, place, key)], same
        return bind(eqn, [self.plain(value, name, records) for value in values]), same

    def plain(self, value: Any, reason: str, records: dict) -> Any:
        """An array, whatever it was: a pending site is asked for its outputs, a weight used elsewhere loses its site."""
        if isinstance(value, Pending):
            return self.close(value, None, records)
        if isinstance(value, Weight):
            self.spoiled.setdefault(value.leaf, f"used by {reason}")
            return value.arrays[0]
        return value

    # ---- sites --------------------------------------------------------------------------------------------------------------------

    def open(
        self, eqn: JaxprEqn, values: list[Any], at: int, described: dict[str, Any], bits: list[int], place: tuple, key: Any
    ) -> Pending:
        weight = values[at]
        facts = described | {
            "leaf": weight.leaf,
            "chain": weight.chain,
            "times": weight.times,
            "input_shape": np.shape(values[described["input"]]),
            "weight_shape": np.shape(weight.arrays[0]),
            "first": not bits[described["input"]] & FROM_PARAMS,
            "place": place,
            "lengths": tuple(length for length, _ in self.scans),
        }

        def compute(inputs: Array, kernel: Array) -> Array:
            operands = list(values)
            operands[described["input"]], operands[at] = inputs, kernel
            return bind(eqn, operands)[0]

        facts["output_shape"] = tuple(eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
        return Pending(values[described["input"]], weight, compute, facts, (), key)

    def close(self, pending: Pending, bias: Weight | None, records: dict) -> Array:
        facts = pending.facts

        def compute(inputs: Array, kernel: Array, offset: Array | None = None) -> Array:
            out = pending.compute(inputs, kernel)
            for step in pending.after:
                out = step(out)
            return out if offset is None else out + offset

        steps = tuple(step for _, step in self.scans)
        weights = Operands(pending.weight.arrays, None if bias is None else bias.arrays, steps)
        if self.sites is None:
            if facts["place"] not in self.notes:
                self.order.append(facts["place"])
            self.notes[facts["place"]] = _Note(facts, None if bias is None else bias.leaf)
            return compute(pending.inputs, weights.weight[0], None if bias is None else weights.bias[0])  # type: ignore[index]
        site = self.sites[facts["place"]]
        key = None if pending.key is None else jax.random.fold_in(pending.key, self.numbers[site.place])
        out, record = self.handler(key, site, pending.inputs, weights, compute)
        if record is not None:
            records[site.name] = record
        return out

    def found(self, longer: _Run | None) -> Found:
        """Sites of the leaves that are used nowhere else, with names, axes and counts filled in."""
        for note in self.notes.values():
            if note.facts["leaf"] in self.spoiled and note.bias is not None:
                self.spoiled.setdefault(note.bias, f"added to outputs of {self.paths[note.facts['leaf']]}, which has no site")
        kept = [place for place in self.order if self.notes[place].facts["leaf"] not in self.spoiled]
        rows: list[tuple] = []
        positions: dict[int, int] = {}
        counts: dict[int, int] = {}
        for place in kept:
            facts = self.notes[place].facts
            other = None if longer is None or place not in longer.notes else longer.notes[place].facts
            axis_in, axis_out = (grown_axis(facts[f], None if other is None else other[f]) for f in ("input_shape", "output_shape"))
            n = 1
            if other is not None and axis_out is not None:
                n = max(1, rows_behind(facts["output_shape"][axis_out], other["output_shape"][axis_out]))
            units = int(np.prod([facts["output_shape"][axis] for axis in facts["output_axes"]]))
            uses = facts["times"] * max(1, int(np.prod(facts["output_shape"])) // max(1, n * units))
            positions[facts["leaf"]] = positions.get(facts["leaf"], 0) + uses
            counts[facts["leaf"]] = counts.get(facts["leaf"], 0) + 1
            rows.append((place, facts, axis_in, axis_out))
        sites: list[Site] = []
        used: dict[int, int] = {}
        covered: set[int] = set()
        for place, facts, axis_in, axis_out in rows:
            leaf = facts["leaf"]
            used[leaf] = used.get(leaf, 0) + 1
            path = self.paths[leaf]
            bias = self.notes[place].bias
            bias = None if bias is None or bias in self.spoiled else bias
            covered |= {leaf} | (set() if bias is None else {bias})
            shape = tuple(self.leaves[leaf].shape)
            leaf_units, leaf_outs = leaf_axes_of(facts, shape)
            sites.append(
                Site(
                    name=path if counts[leaf] == 1 else f"{path}#{used[leaf]}",
                    path=path,
                    bias_path=None if bias is None else self.paths[bias],
                    kind=facts["kind"],
                    leaf_shape=shape,
                    weight_shape=facts["weight_shape"],
                    input_shape=facts["input_shape"],
                    output_shape=facts["output_shape"],
                    unit_axes=facts["unit_axes"],
                    output_axes=facts["output_axes"],
                    leaf_axes=leaf_units,
                    out_axes=leaf_outs,
                    weight_unit_axes=facts["weight_units"],
                    weight_out_axes=facts["weight_outs"],
                    example_axis=axis_in,
                    output_example_axis=axis_out,
                    positions=positions[leaf],
                    equations=counts[leaf],
                    shared_steps=facts["times"] > 1,
                    first=facts["first"],
                    place=place,
                    groups=facts.get("groups", 1),
                    lengths=facts["lengths"],
                )
            )
        rest = {path: self.spoiled.get(i, "not used by a linear map") for i, path in enumerate(self.paths) if i not in covered}
        return Found(tuple(sites), rest)

    # ---- equations with a body ----------------------------------------------------------------------------------------------------

    def remat(
        self, eqn: JaxprEqn, values: list[Any], bits: list[int], place: tuple, key: Any, records: dict
    ) -> tuple[list[Any], list[int]]:
        """The body walked inside a new `jax.checkpoint` with the old policy."""
        values = [self.plain(v, "", records) if isinstance(v, Pending) else v for v in values]
        marks: list[int] = []

        def body(arrays: Any, key: Any) -> tuple[list[Array], dict]:
            own: dict[str, Any] = {}
            args = [v._replace(arrays=a) if isinstance(v, Weight) else a for v, a in zip(values, arrays, strict=True)]
            outs, out_bits = self.walk(eqn.params["jaxpr"], (), args, bits, place, key, own)
            marks[:] = out_bits
            return [self.plain(out, "the result of a checkpointed block", own) for out in outs], own

        arrays = [v.arrays if isinstance(v, Weight) else v for v in values]
        outs, own = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(arrays, key)
        records |= own
        return outs, marks

    def scan(self, eqn: JaxprEqn, values: list[Any], bits: list[int], place: tuple, key: Any, records: dict) -> tuple[list[Any], list[int]]:
        """The scan rebuilt around the walk of its body: keys folded with the step, records stacked."""
        params, total = eqn.params, 0
        for mark in bits:
            total |= mark
        num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
        values = [self.plain(v, "", records) if isinstance(v, Pending) else v for v in values]
        consts, carry, xs = values[:num_consts], values[num_consts : num_consts + num_carry], values[num_consts + num_carry :]
        consts = [v._replace(times=v.times * length) if isinstance(v, Weight) else v for v in consts]
        carry = [self.plain(v, "the carry of a scan", records) for v in carry]
        body_jaxpr = params["jaxpr"]
        inner_bits = bits[:num_consts] + [total] * num_carry + bits[num_consts + num_carry :]
        avals = [var.aval for var in body_jaxpr.jaxpr.outvars]
        cast = lambda value, aval: lax.convert_element_type(value, aval.dtype) if not is_key(aval) else value

        def body(state: Any, sliced: Any) -> Any:
            step, now = state
            own: dict[str, Any] = {}
            rows = [
                v._replace(arrays=a, chain=(*v.chain, first_row)) if isinstance(v, Weight) else a for v, a in zip(xs, sliced, strict=True)
            ]
            inner = None if key is None else jax.random.fold_in(key, step)
            around, self.scans = self.scans, (*self.scans, (length, length - 1 - step if params["reverse"] else step))
            outs, _ = self.walk(body_jaxpr.jaxpr, body_jaxpr.consts, [*consts, *now, *rows], inner_bits, (*place, "scan"), inner, own)
            outs = [cast(self.plain(out, "the result of a scan", own), aval) for out, aval in zip(outs, avals, strict=True)]
            self.scans = around
            return (step + 1, outs[:num_carry]), (outs[num_carry:], own)

        sliced = [v.arrays if isinstance(v, Weight) else v for v in xs]
        first = (jnp.zeros((), jnp.int32), [cast(value, aval) for value, aval in zip(carry, avals[:num_carry], strict=True)])
        (_, last), (ys, own) = lax.scan(body, first, sliced, length=length, reverse=params["reverse"], unroll=params["unroll"])
        records |= own
        return [*last, *ys], [total] * len(eqn.outvars)
