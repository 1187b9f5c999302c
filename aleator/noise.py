"""Noise at the sites of a network: the handlers that make any network random, one per estimator.

All draw from the key they are given, which inside steps is on the fast `philox2x32` generator. Companions (see `sites.replay`) carry what
belongs to a weight besides its mean: variances with power 2, perturbations with power 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._typing import Array, Key, Tree
from aleator.sites import Operands, Site

SMALL = 100_000  # up to this many numbers are drawn in one call
TINY = 1e-30  # keeps √variance differentiable where a unit receives nothing but zeros


def normal(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
    """Standard normals that are computed once.

    The compiler fuses a generator into every reader of its numbers, forward and backward, and so runs it several times over (eight times,
    behind a pooled convolution). The outcome of a conditional is a buffer that nothing is fused into. Its branches must differ to stay
    apart: one gives z and the other −z, which has the same distribution, and half of the keys go each way.
    """
    key_side, key_draw = jax.random.split(key)
    even = jax.random.bits(key_side, dtype=jnp.uint32) % 2 == 0
    make = lambda words: jax.random.normal(jax.random.wrap_key_data(words, impl=jax.random.key_impl(key)), shape, dtype)
    return jax.lax.cond(even, make, lambda words: -make(words), jax.random.key_data(key_draw))


def normal_tree(key: Key, like: Tree) -> Tree:
    """Independent standard normals shaped like a tree; in one call where it is small, since a generator's start costs more than its
    numbers."""
    leaves, structure = jax.tree.flatten(like)
    if not leaves:
        return like
    if len(leaves) > 1 and _tree.size(leaves) <= SMALL and len({leaf.dtype for leaf in leaves}) == 1:
        cuts = [int(cut) for cut in np.cumsum([leaf.size for leaf in leaves])[:-1]]
        drawn = jnp.split(normal(key, (_tree.size(leaves),), leaves[0].dtype), cuts)
        return jax.tree.unflatten(structure, [z.reshape(leaf.shape) for z, leaf in zip(drawn, leaves, strict=True)])
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])


def local(key: Key, site: Site, inputs: Array, weights: Operands, compute: Callable) -> tuple[Array, None]:
    """Local reparameterisation: outputs ~ N(x·μ + μ_b, x²·σ² + σ_b²), drawn per example. companions: (σ²,), powers (2,).

    The marginals of outputs are exact. Their joint law is exact for a weight used once per example; at several positions the noise is
    drawn independently per position, which is an approximation.
    """
    mean, variance = _moments(site, inputs, weights, compute)
    noise = _ordered(lambda shape: normal(key, shape, mean.dtype), mean.shape, site.output_order())
    return mean + jnp.sqrt(variance + TINY) * noise, None


def moments(key: Key | None, site: Site, inputs: Array, weights: Operands, compute: Callable) -> tuple[Array, Array]:
    """Mean outputs, with their variances under independent weights as the record: rows first, units last. companions: (σ²,), powers (2,)."""
    mean, variance = _moments(site, inputs, weights, compute)
    return mean, jnp.transpose(variance, site.output_order())


def flipout(key: Key, site: Site, inputs: Array, weights: Operands, compute: Callable) -> tuple[Array, None]:
    """Flipout: y = x·W + s ⊙ ((x ⊙ r)·ΔW) with random signs r (per example and input unit), s (per example and output unit), so that one
    perturbation ΔW serves the batch with nearly independent noise per example. companions: (ΔW,), powers (1,)."""
    key_in, key_out = jax.random.split(key)
    offset, shift = (None, None) if weights.bias is None else weights.bias
    mean = compute(inputs, weights.weight[0], offset)
    turned = inputs
    if site.kind != "embedding":
        turned = inputs * _ordered(lambda s: _signs(key_in, s, inputs.dtype), site.input_noise_shape(inputs), site.input_order())
    noise = compute(turned, weights.weight[1], shift)
    return mean + noise * _ordered(lambda s: _signs(key_out, s, noise.dtype), site.output_noise_shape(noise), site.output_order()), None


def masked(root: Key, rates: Mapping[str, Any], relax: float | None = None) -> Callable:
    """Inverted dropout on the units feeding each site named in `rates`: x ⊙ z/(1 − p), one z per unit and example, so that an example
    sees one function at all its positions and scan steps. relax: temperature of the concrete relaxation, which makes z differentiable
    in p."""
    own = dict(zip(rates, jax.random.split(root, max(len(rates), 1)), strict=False))

    def handler(key: Key, site: Site, inputs: Array, weights: Operands, compute: Callable) -> tuple[Array, None]:
        offset = None if weights.bias is None else weights.bias[0]
        if site.name not in rates:
            return compute(inputs, weights.weight[0], offset), None
        rate = rates[site.name]
        key = jax.random.clone(own[site.name]) if site.shared_steps else key
        draw = lambda s: keep(key, rate, s, inputs.dtype) if relax is None else concrete(key, rate, s, inputs.dtype, relax)
        kept = _ordered(draw, site.input_noise_shape(inputs), site.input_order())
        return compute(inputs * (kept / (1.0 - rate)), weights.weight[0], offset), None

    return handler


def keep(key: Key, rate: Array | float, shape: tuple[int, ...], dtype: Any) -> Array:
    """z ~ Bernoulli(1 − rate), as numbers."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    threshold = jnp.asarray(jnp.asarray(rate, jnp.float32) * 4294967040.0, jnp.uint32)  # the largest float32 below 2³²
    return (bits >= threshold).astype(dtype)


def concrete(key: Key, rate: Array, shape: tuple[int, ...], dtype: Any, temperature: float) -> Array:
    """z = 1 − sigmoid((logit p + logit u)/t), u uniform: a relaxed Bernoulli(1 − p), differentiable in p."""
    noise = jax.random.logistic(key, shape, dtype)
    return jax.nn.sigmoid(-(jnp.log(rate) - jnp.log1p(-rate) + noise) / temperature)


def _moments(site: Site, inputs: Array, weights: Operands, compute: Callable) -> tuple[Array, Array]:
    (offset, spread) = (None, None) if weights.bias is None else weights.bias
    return compute(inputs, weights.weight[0], offset), compute(site.square(inputs), weights.weight[1], spread)


def _ordered(draw: Callable[[tuple[int, ...]], Array], shape: tuple[int, ...], order: tuple[int, ...]) -> Array:
    """Noise of this shape, drawn with its axes in the given order: rows first, so that the layout inside a network does not matter."""
    return jnp.transpose(draw(tuple(shape[axis] for axis in order)), tuple(int(axis) for axis in np.argsort(order)))


def _signs(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
    return 1.0 - 2.0 * jax.random.bernoulli(key, 0.5, shape).astype(dtype)
