"""Kronecker-factored preconditioning of samplers: coordinates in which the posterior of a network is about round.

For a weight matrix with inputs a and cotangents g of its outputs, K-FAC takes the curvature of −log joint to be A ⊗ B + τI with A = E[aaᵀ],
B = N·E[ggᵀ] and τ the prior's. With A = U diag(α) Uᵀ and B = V diag(β) Vᵀ the metric is G = (A ⊗ B + τI)⁻¹, and its symmetric root

G^{½}X = U[(UᵀXV) ⊘ (αβᵀ + τ)^{½}]Vᵀ

costs four small products. A sampler that moves φ = G^{−½}θ by its own rules, with gradients G^{½}∇U, leaves the posterior of θ where it is
for any frozen G: noise is shaped by the root of the inverse factors, and no product of all weights with all weights is formed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.data import Batch
from aleator.methods._whitened import positive, prior_curvature

MEMORY = 0.1  # weight of the newest factors in their running mean, once there have been so many that this is more than their share


class Metric(NamedTuple):
    """inputs, outputs: A and B of each block, running means. rest, other: curvatures of the weights outside blocks and of the parameters outside
    the network, likewise. count: of refreshes. left, right, root: U, V and (αβᵀ + τ)^{−½} of each block, of the last refresh; rest_root,
    other_root: the same of the others."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    rest: Array
    other: Array
    count: Array
    left: tuple[Array, ...]
    right: tuple[Array, ...]
    root: tuple[Array, ...]
    rest_root: Array
    other_root: Array


def layout(target: Any) -> curvature.Layout:
    """Where the Kronecker blocks are; refuses models whose weights are not parameters themselves."""
    model = target.model
    if not (hasattr(model, "weights") and hasattr(model, "apply") and hasattr(model.likelihood, "information_root")):
        got = "a bare log density" if model is None else type(model).__name__
        raise MethodError(
            message("K-FAC needs a network and its likelihood.", got, "al.BNN or al.LinearModel", "pass preconditioner='rmsprop'")
        )
    template = jax.eval_shape(target.init, jax.random.key(0))
    weights = jax.eval_shape(model.weights, template)
    shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
    if jax.tree.leaves(template["prior"]) or shapes(weights) != shapes(template["network"]):
        got = f"{model.prior!r}"[:80]
        raise MethodError(
            message(
                "K-FAC needs the weights themselves as parameters.", got, "a prior without scales of its own", "use e.g. al.Normal(1.0)"
            )
        )
    return curvature.layout(model, target.signature)


def init(params: Tree, plan: curvature.Layout) -> Metric:
    """The identity, before anything was seen."""
    dtype = _tree.first_dtype(params)
    sizes = [block.numbers.shape for block in plan.blocks]
    zeros, eyes = (lambda n: jnp.zeros((n, n), dtype)), (lambda n: jnp.eye(n, dtype=dtype))
    num_other = _tree.size(params) - plan.size
    return Metric(
        inputs=tuple(zeros(a) for a, _ in sizes),
        outputs=tuple(zeros(b) for _, b in sizes),
        rest=jnp.zeros(len(plan.rest), dtype),
        other=jnp.zeros(num_other, dtype),
        count=jnp.zeros((), jnp.int32),
        left=tuple(eyes(a) for a, _ in sizes),
        right=tuple(eyes(b) for _, b in sizes),
        root=tuple(jnp.ones(size, dtype) for size in sizes),
        rest_root=jnp.ones(len(plan.rest), dtype),
        other_root=jnp.ones(num_other, dtype),
    )


def refresh(metric: Metric, params: Tree, batch: Batch, target: Any, plan: curvature.Layout) -> Metric:
    """Factors of one batch blended into the running ones, and their roots."""
    model, weights = target.model, params["network"]
    share = jnp.maximum(1.0 / (metric.count + 1), MEMORY).astype(metric.rest.dtype)
    blend = lambda old, new: old + share * (new.astype(old.dtype) - old)
    count = batch.size
    whole = target.num_data / (count * target.temperature)
    found = curvature.factors(model, weights, batch, model.extra(params), plan, "ggn", False)
    inputs = tuple(
        blend(old, new / (count * block.positions)) for old, new, block in zip(metric.inputs, found.inputs, plan.blocks, strict=True)
    )
    outputs = tuple(blend(old, new * whole) for old, new in zip(metric.outputs, found.outputs, strict=True))
    rest = blend(metric.rest, found.rest * whole)
    other = blend(metric.other, _other(params, batch, target) * whole)
    prior = positive(prior_curvature(target, params, np.arange(plan.size))[0], 1.0) / target.temperature
    left, right, root = [], [], []
    for a, b, block in zip(inputs, outputs, plan.blocks, strict=True):
        (alpha, u), (beta, v) = jnp.linalg.eigh(a), jnp.linalg.eigh(b)
        tau = jnp.mean(prior[block.numbers])
        left.append(u)
        right.append(v)
        root.append(jax.lax.rsqrt(jnp.maximum(alpha, 0.0)[:, None] * jnp.maximum(beta, 0.0) + tau).astype(a.dtype))
    return Metric(
        inputs,
        outputs,
        rest,
        other,
        metric.count + 1,
        tuple(left),
        tuple(right),
        tuple(root),
        jax.lax.rsqrt(rest + prior[plan.rest]).astype(rest.dtype),
        jax.lax.rsqrt(other + 1.0 / target.temperature).astype(other.dtype),
    )


def shape(metric: Metric, tree: Tree, plan: curvature.Layout) -> Tree:
    """G^{½} of a tree like the parameters."""
    vector = _tree.flat(tree["network"])
    out = vector
    for block, u, v, root in zip(plan.blocks, metric.left, metric.right, metric.root, strict=True):
        part = u @ ((u.T @ vector[block.numbers] @ v) * root) @ v.T
        out = out.at[block.numbers.ravel()].set(part.ravel())
    if len(plan.rest):
        out = out.at[plan.rest].set(vector[plan.rest] * metric.rest_root)
    others = {name: part for name, part in tree.items() if name != "network"}
    if jax.tree.leaves(others):
        others = _tree.unflat(_tree.flat(others) * metric.other_root, others)
    return {**others, "network": _tree.unflat(out, tree["network"])}


def _other(params: Tree, batch: Batch, target: Any) -> Array:
    """Σᵢ (∂log p(yᵢ|xᵢ,θ)/∂s)² for the parameters s outside the network (noise scales): few, so forward derivatives are cheap."""
    others = {name: part for name, part in params.items() if name != "network"}
    if not jax.tree.leaves(others):
        return jnp.zeros(0)
    terms = lambda vector: target.log_likelihood({**params, **_tree.unflat(vector, others)}, batch)
    slopes = jax.jacfwd(terms)(_tree.flat(others))
    return jax.vmap(batch.weighted_sum, in_axes=1)(slopes**2)
