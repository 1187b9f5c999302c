"""Passes over the data that add up curvature: what is decided before them, and what one batch adds."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.data import Batch
from aleator.likelihoods import Gaussian

SMALL = 2000  # parameters up to which a full Laplace runs in double precision and polishes its mode
OVERSAMPLE = 10  # directions beside the wanted ones in the search for the leading eigenvectors
COPIES = 9  # in double precision that the largest matrix takes while it is whitened and decomposed, measured at 5,000 × 5,000
MAX_ROWS = 2048  # in one batch of a pass
PASS_BYTES = 2**26  # of gradients and inputs alive at once in a pass over the data


class Plan(NamedTuple):
    """What is done to a target. index: numbers of the weights that get a distribution. layout: of these, in blocks. paths: their leaves. number: of
    weights to choose among them (a subnetwork), or None."""

    structure: str
    kind: str
    reduce: bool
    index: np.ndarray
    layout: curvature.Layout
    paths: tuple[str, ...] | None
    rank: int
    polish: bool
    number: int | None


class Sums(NamedTuple):
    """What passes over the data add up. curvature: as the structure has it. log_likelihood; gradient (P,) of it, where the structure is full;
    residual: Σ ((y − f)/σ)², where there is a Gaussian noise; mass: Σ weights."""

    curvature: Any
    log_likelihood: Array
    gradient: Array
    residual: Array
    mass: Array


def make_plan(method: Any, target: Any, kind: str) -> Plan:
    model = target.model
    number = getattr(method.subset, "size", None)
    paths = curvature.choose(model, target.signature, "all" if number is not None else method.subset)
    layout = curvature.layout(model, target.signature, paths)
    index = np.sort(np.concatenate([layout.rest, *(block.numbers.ravel() for block in layout.blocks)]))
    if number is not None and (method.structure != "full" or number > len(index)):
        raise MethodError(
            message(
                "A subnetwork has a full Laplace over its weights.",
                f"structure={method.structure!r}, {number} of {len(index)} weights",
                f"structure='full' and at most {len(index)} weights",
                "pass Laplace('full', subset=al.Subnetwork(n))",
            )
        )
    polish = method.structure == "full" and number is None and len(index) <= SMALL and method.subset == "all" and kind == "ggn"
    return Plan(method.structure, kind, method.reduce, index, layout, paths, method.rank, polish, number)


def empty(plan: Plan, dtype: Any) -> Any:
    """The zero curvature."""
    m, blocks = len(plan.index), plan.layout.blocks
    zero = lambda *shape: jnp.zeros(shape, dtype)
    if plan.number is not None:
        return zero(plan.number, plan.number), zero(plan.layout.size)
    if plan.structure == "full":
        return zero(m, m)
    if plan.structure == "diag":
        return zero(plan.layout.size)
    if plan.structure == "lowrank":
        return zero(m, min(m, plan.rank + OVERSAMPLE))
    sides = curvature.Factors(
        tuple(zero(b.numbers.shape[0], b.numbers.shape[0]) for b in blocks),
        tuple(zero(b.numbers.shape[1], b.numbers.shape[1]) for b in blocks),
        zero(len(plan.layout.rest)),
    )
    eigenvalues = tuple(zero(*b.numbers.shape) for b in blocks) if plan.structure == "ekfac" else ()
    return sides, eigenvalues


def add(sums: Sums, params: Tree, basis: Any, batch: Batch, model: Any, plan: Plan, second: bool = False) -> Sums:
    """One batch more. second: the second pass of ekfac, along the eigenvectors that the first one gave, or over a subnetwork."""
    if sums.log_likelihood.dtype == jnp.float64:  # before anything is computed from them
        batch = dataclasses.replace(batch, x=_tree.as_float64(batch.x), y=_tree.as_float64(batch.y))
    weights, extra = model.weights(params), model.extra(params)
    held = sums.curvature
    seen = None if plan.structure == "lowrank" else curvature.tap(model, weights, batch.x, plan.layout)
    if plan.number is not None and second:
        held = (held[0] + curvature.dense(model, weights, batch, extra, plan.layout, plan.kind, basis, seen), held[1])
    elif plan.number is not None:
        held = (held[0], held[1] + curvature.diagonal(model, weights, batch, extra, plan.layout, plan.kind, seen))
    elif plan.structure == "full":
        held = held + curvature.dense(model, weights, batch, extra, plan.layout, plan.kind, seen=seen)
    elif plan.structure == "diag":
        held = held + curvature.diagonal(model, weights, batch, extra, plan.layout, plan.kind, seen)
    elif plan.structure == "lowrank":
        scale = basis[1]
        turned = curvature.product(model, weights, batch, extra, plan.index, plan.kind, scale[:, None] * basis[0])
        held = held + scale[:, None] * turned
    elif second:
        eigenvalues, _ = curvature.corrected(model, weights, batch, extra, plan.layout, plan.kind, basis, seen)
        held = (held[0], jax.tree.map(jnp.add, held[1], eigenvalues))
    else:
        now = curvature.factors(model, weights, batch, extra, plan.layout, plan.kind, plan.reduce, seen)
        held = (jax.tree.map(jnp.add, held[0], now), held[1])
    if second:
        return sums._replace(curvature=held)
    fit_of = lambda outputs: batch.weighted_sum(model.likelihood.log_prob(outputs, batch.y, extra))
    outputs = model.apply(weights, batch.x, None) if seen is None else seen.outputs
    value, gradient, residual = fit_of(outputs), sums.gradient, sums.residual
    if plan.structure == "full":
        gradient = gradient + _tree.flat(jax.grad(lambda w: fit_of(model.apply(w, batch.x, None)))(weights))
    if isinstance(model.likelihood, Gaussian):
        residual = residual + batch.weighted_sum(jnp.sum(((batch.y - outputs) / extra["scale"]) ** 2, axis=1))
    mass = sums.mass + jnp.sum(curvature.row_weights(batch, value.dtype))
    return Sums(held, sums.log_likelihood + value, gradient, residual, mass)


def num_bytes(plan: Plan) -> int:
    """What the curvature takes, with the copies that its factorisation needs, in double precision."""
    m, blocks = len(plan.index), plan.layout.blocks
    sides = sum(b.numbers.shape[0] ** 2 + b.numbers.shape[1] ** 2 + b.numbers.size for b in blocks)
    numbers = {"full": m**2, "diag": m, "lowrank": m * (plan.rank + OVERSAMPLE), "kron": sides, "ekfac": 2 * sides}[plan.structure]
    return 8 * COPIES * (numbers if plan.number is None else plan.number**2 + m)


def check_bytes(needed: int, method: Any, what: str) -> None:
    if needed > method.byte_budget:
        raise MethodError(
            message(
                "This Laplace does not fit into its memory.",
                f"{needed / 2**30:.2f} GiB for {what}",
                f"at most byte_budget = {method.byte_budget / 2**30:.2f} GiB",
                "use structure='kron' or 'diag', subset='last_layer', or raise byte_budget",
            )
        )


def rows_per_batch(plan: Plan, target: Any) -> int:
    """Rows whose inputs, cotangents and gradients take about PASS_BYTES."""
    outputs = target.model.likelihood.num_outputs(target.model.targets())
    per_row = curvature.numbers_per_row(plan.layout, outputs, plan.structure != "full" or (plan.layout.direct and plan.kind == "ggn"))
    if plan.structure == "lowrank":
        per_row += outputs * (plan.rank + OVERSAMPLE)
    rows = int(np.clip(PASS_BYTES // (8 * max(per_row, 1)), 1, MAX_ROWS))
    return -(-target.num_data // -(-target.num_data // rows))  # batches of one size: little is filled up
