"""Rows that are gone: their log-likelihood as a second-order Taylor term at the mode they were left at, in the sums of each structure.

log p(old | w, σ) ≈ L − n log κ − ½(κ⁻² − 1)R + κ⁻²(gᵀd − ½dᵀHd), with d = w − w*, κ = σ/σ*, n numbers y and R = Σ((y − f)/σ*)². In w it is the
quadratic of a Laplace; in the noise of one Gaussian target it is exact for a linear model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.likelihoods import Gaussian
from aleator.methods._passes import Plan, Sums
from aleator.methods._whitened import places
from aleator.posterior import Taylor


def begin(start: Any) -> tuple[Tree, Any]:
    """(parameters, what is remembered): of a fit that is to be updated, or of a fresh one, which remembers nothing."""
    return (start[0], start) if isinstance(start, tuple) else (start, ())


def moving_noise(model: Any) -> bool:
    """Whether the old rows say how they depend on the likelihood's parameters. Where they do not, these stay as they are."""
    return isinstance(model.likelihood, Gaussian) and model.targets() == 1


def pinned(params: Tree, memory: tuple[Tree, Taylor], plan: Plan, model: Any) -> Tree:
    """The parameters with everything put back that the old rows have no curvature for."""
    before, term = memory
    index = _index(plan, term)
    if len(index) < plan.layout.size:
        old = _tree.flat(before["network"])
        params = params | {"network": _tree.unflat(old.at[index].set(_tree.flat(params["network"])[index]), params["network"])}
    return params if moving_noise(model) else params | {"likelihood": before["likelihood"]}


def remembered(params: Tree, basis: Any, memory: tuple[Tree, Taylor], plan: Plan, model: Any) -> Sums:
    """What passes over the old rows would have added up at these parameters, as far as the Taylor term tells."""
    term = memory[1]
    value, step, pushed, c = _expand(params, memory, plan, model)
    residual = c * (term.residual - 2.0 * step) if isinstance(model.likelihood, Gaussian) else term.residual
    gradient = jnp.zeros(0, value.dtype)
    if plan.structure == "full":
        gradient = jnp.zeros(plan.layout.size, value.dtype).at[_index(plan, term)].set(c * (term.gradient - pushed))
    return Sums(_curvature(term, c, basis, plan), value, gradient, residual, term.mass)


def eigenvalues(term: Taylor, c: Array, basis: Any, plan: Plan) -> tuple[Array, ...]:
    """The old curvature along new Kronecker eigenvectors, (a, b) a block: the diagonal of it, turned."""
    found = []
    for own, (left, right), (new_left, new_right) in zip(term.curvature[3], term.basis, basis, strict=True):
        found.append(c * (_untangled(left).T @ new_left).T ** 2 @ own @ (right.T @ new_right) ** 2)
    return tuple(found)


def taylor(plan: Plan, state: Any, gradient: Array, rows: int) -> Taylor:
    """What a finished fit keeps of its rows; arrays on the host, in the precision of the fit. gradient (m,): of their log-likelihood."""
    sums, held, basis = state.sums, state.sums.curvature, ()
    if plan.number is not None:
        held, basis = held[0], state.basis
    elif plan.structure in ("kron", "ekfac"):
        held = (*held[0], held[1])
        basis = state.basis if plan.structure == "ekfac" else ()
    elif plan.structure == "lowrank":
        small = np.asarray(state.basis[0]).T @ np.asarray(held)
        held, basis = 0.5 * (small + small.T), state.basis
    dtype = np.asarray(sums.log_likelihood).dtype
    parts = (state.params["likelihood"], sums.log_likelihood, np.asarray(gradient, dtype), sums.residual, sums.mass, held, basis)
    return Taylor(*jax.tree.map(np.asarray, parts), rows=rows)


class Remembering:
    """A target of new rows that also has the Taylor term of the old ones."""

    def __init__(self, target: Any, memory: tuple[Tree, Taylor], plan: Plan):
        self.target, self.memory, self.plan = target, memory, plan
        self.num_data = target.num_data + memory[1].rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def parts(self, params: Tree, batch: Batch | None, key: Key | None = None, apply: Any = None) -> tuple[Array, Array]:
        params = pinned(params, self.memory, self.plan, self.target.model)
        prior, data = self.target.parts(params, batch, key, apply)
        return prior, data + _expand(params, self.memory, self.plan, self.target.model)[0]

    def log_joint(self, params: Tree, batch: Batch | None, key: Key | None = None, beta: Any = 1.0, apply: Any = None) -> Array:
        prior, data = self.parts(params, batch, key, apply)
        return (prior + beta * data) / self.target.temperature


def _index(plan: Plan, term: Taylor) -> Any:
    """Numbers of the weights that have a distribution: a subnetwork stays the one that was chosen."""
    return plan.index if plan.number is None else term.basis


def _expand(params: Tree, memory: tuple[Tree, Taylor], plan: Plan, model: Any) -> tuple[Array, Array, Array, Array]:
    """(the term's value, gᵀd − ½dᵀHd, Hd (m,), κ⁻²)."""
    before, term = memory
    index = _index(plan, term)
    d = (_tree.flat(params["network"]) - _tree.flat(before["network"]))[index]
    pushed = _product(term, d, plan)
    step = term.gradient @ d - 0.5 * d @ pushed
    log_noise = jnp.zeros((), d.dtype)
    if moving_noise(model) and "log_scale" in params["likelihood"]:
        log_noise = (params["likelihood"]["log_scale"] - before["likelihood"]["log_scale"])[0]
    c = jnp.exp(-2.0 * log_noise)
    value = term.value - term.mass * model.targets() * log_noise - 0.5 * (c - 1.0) * term.residual + c * step
    return value, step, pushed, c


def _product(term: Taylor, d: Array, plan: Plan) -> Array:
    """Hd for d (m,)."""
    held = term.curvature
    if plan.structure == "full":
        return held @ d
    if plan.structure == "diag":
        return held[plan.index] * d
    if plan.structure == "lowrank":
        vectors, scale = term.basis
        return vectors @ (held @ (vectors.T @ (d / scale))) / scale
    inputs, outputs, rest, corrected = held
    place, out = places(plan.layout.size, plan.index), jnp.zeros_like(d)
    for number, block in enumerate(plan.layout.blocks):
        w = d[place[block.numbers]]
        if plan.structure == "ekfac":
            left, right = _untangled(term.basis[number][0]), term.basis[number][1]
            pushed = left @ (corrected[number] * (left.T @ w @ right)) @ right.T
        else:
            pushed = inputs[number] @ w @ outputs[number] / (term.mass * (1 if plan.reduce else block.positions))
        out = out.at[place[block.numbers]].set(pushed)
    chosen = place[plan.layout.rest]
    return out.at[chosen].set(rest * d[chosen])


def _curvature(term: Taylor, c: Array, basis: Any, plan: Plan) -> Any:
    """κ⁻²H as the sums of the structure have it."""
    held = term.curvature
    if plan.number is not None:
        return c * held, jnp.zeros(plan.layout.size, held.dtype)
    if plan.structure in ("full", "diag"):
        return c * held
    if plan.structure == "lowrank":
        vectors, scale = basis
        return c * scale[:, None] * jax.vmap(lambda v: _product(term, v, plan), in_axes=1, out_axes=1)(scale[:, None] * vectors)
    inputs, outputs, rest, _ = held
    sides = curvature.Factors(inputs, tuple(c * side for side in outputs), c * rest)
    return sides, eigenvalues(term, c, basis, plan) if plan.structure == "ekfac" else ()


def _untangled(left: Array) -> Array:
    """S⁻¹U from SU, for orthonormal U and positive diagonal S."""
    return left / jnp.sum(left**2, axis=1, keepdims=True)
