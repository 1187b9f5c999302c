"""What a step of variational inference draws, and what the draws say: one function per estimator of the gradient.

A `Plan` is a method made concrete for one target; `_plan.py` makes it, `variational.py` ascends the bound with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import noise, sites
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.families import Family
from aleator.methods import _optimise


class Terms(NamedTuple):
    """What one draw gives. log_q is None where the entropy is used in closed form."""

    data: Array
    prior: Array
    log_q: Array | None


class Layout(NamedTuple):
    """Which leaves are in q (chosen, one flag a leaf), and the ways between the parameter tree and (parts for the family, other leaves)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    chosen: tuple[bool, ...]
    structure: Any
    flat: bool

    def split(self, params: Tree) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        leaves = jax.tree.leaves(params)
        picked = tuple(leaf for leaf, take in zip(leaves, self.chosen, strict=True) if take)
        rest = tuple(leaf for leaf, take in zip(leaves, self.chosen, strict=True) if not take)
        return ((jnp.concatenate([jnp.ravel(leaf) for leaf in picked]),) if self.flat else picked), rest

    def leaves(self, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        """One array per chosen leaf."""
        if not self.flat:
            return parts
        shapes = [shape for shape, take in zip(self.shapes, self.chosen, strict=True) if take]
        bounds = np.cumsum([0] + [int(np.prod(shape)) for shape in shapes])
        return tuple(parts[0][a:b].reshape(shape) for a, b, shape in zip(bounds[:-1], bounds[1:], shapes, strict=True))

    def join(self, parts: tuple[Array, ...], rest: tuple[Array, ...]) -> Tree:
        first, second = iter(self.leaves(parts)), iter(rest)
        return jax.tree.unflatten(self.structure, [next(first) if take else next(second) for take in self.chosen])

    def spread(self, parts: tuple[Array, ...], rest: tuple[Array, ...]) -> Tree:
        """Like `join`, with zeros for the leaves that are not random."""
        return self.join(parts, tuple(jnp.zeros_like(leaf) for leaf in rest))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A method made concrete for one target. local: names of the leaves whose noise is drawn at sites; found: the network's sites."""

    method: Any
    target: Any
    family: Family
    layout: Layout
    packing: _optimise.Packing
    estimator: str
    closed_prior: bool
    closed_entropy: bool
    local: frozenset[str]
    moments: bool

    @property
    def doubly(self) -> bool:
        """Whether the gradient of a Rényi bound is doubly reparameterised: only φ is trained, and draws are not stratified."""
        renyi = self.method.divergence not in ("elbo", "forward_kl")
        return renyi and self.family.strata == 1 and (all(self.layout.chosen) or self.method.rest == "fixed")

    def unpack(self, state: Any) -> tuple[Tree, tuple[Array, ...]]:
        """(φ, point parameters) of a state of the method."""
        moved = self.packing.unpack(state.moved)
        return moved["q"], (moved["rest"] if self.method.rest == "joint" else state.fixed)


def draws(key: Key, q: Tree, rest: tuple[Array, ...], batch: Batch | None, plan: Plan) -> tuple[Array, Terms]:
    """Log weights (M,) and terms (M,) of M = num_draws × strata draws; scalars in place of (1,) for a single one."""
    family, number = plan.family, plan.method.num_draws
    one = lambda k, z, stratum: _terms(k, z, stratum, q, rest, batch, plan)
    key_noise, key_rest = jax.random.split(key)
    if plan.estimator == "score":
        # Draws from the mixture itself: their density is all that the estimator uses.
        parts = jax.vmap(lambda k: family.sample(k, q))(jax.random.split(key_noise, number))
        terms = jax.vmap(one, in_axes=(0, 0, None))(jax.random.split(key_rest, number), jax.lax.stop_gradient(parts), 0)
        return jnp.full((number,), -np.log(number)), terms
    total = number * family.strata
    if total == 1:
        return jnp.zeros(()), one(key_rest, None if plan.local or plan.estimator == "analytic" else family.noise(key_noise, q), 0)
    strata = np.tile(np.arange(family.strata), number)
    if plan.local or plan.estimator == "analytic":
        noises = None
        del key_noise
    else:
        fresh = total // 2 if plan.method.antithetic else total
        noises = jax.vmap(lambda k: family.noise(k, q))(jax.random.split(key_noise, fresh))
        if plan.method.antithetic:
            noises = jax.tree.map(lambda z: jnp.concatenate([z, -z]), noises)
    log_weight = jnp.tile(family.log_weights(q), number) - np.log(number)
    return log_weight, jax.vmap(one, in_axes=(0, None if noises is None else 0, 0))(jax.random.split(key_rest, total), noises, strata)


def closed_kl(q: Tree, rest: tuple[Array, ...], plan: Plan) -> Array:
    """−E log p(θ) − H(q), with parameters of the likelihood and the prior's scales at q's centre. For the log."""
    means, variances = plan.family.marginals(q)
    centre = plan.layout.join(plan.family.centre(q), rest)
    prior = plan.target.expected_log_prior(plan.layout.join(means, rest), plan.layout.spread(variances, rest), centre)
    return -prior - plan.family.entropy(q)


def _terms(key: Key, z: Tree, stratum: Any, q: Tree, rest: tuple[Array, ...], batch: Batch | None, plan: Plan) -> Terms:
    """Data, prior and log q of one draw. z: the family's noise, or for the score function the draw itself."""
    family, target, layout = plan.family, plan.target, plan.layout
    key_sites, key_network, key_prior = jax.random.split(key, 3)
    key_network = key_network if target.stochastic else None
    parts = None
    if plan.local:
        params, data = _at_sites(key_sites, key_network, q, rest, batch, plan)
    elif plan.estimator == "analytic":
        params, data = _expected(key_sites, key_network, q, rest, batch, plan)
    else:
        parts = z if plan.estimator == "score" else family.draw(q, z, stratum)
        if plan.method.divergence == "forward_kl":
            parts = jax.lax.stop_gradient(parts)
        params = layout.join(parts, rest)
        prior, data = target.parts(params, batch, key_network)
    if plan.closed_prior:
        means, variances = family.marginals(q)
        prior = target.expected_log_prior(layout.join(means, rest), layout.spread(variances, rest), params)
    elif parts is None:
        # Noise was drawn elsewhere than on the weights: the prior needs a draw of its own.
        prior = target.log_prior(layout.join(family.draw(q, family.noise(key_prior, q)), rest))
    if plan.closed_entropy and plan.estimator != "score":
        return Terms(data, prior, None)
    return Terms(data, prior, family.log_prob(jax.lax.stop_gradient(q) if plan.estimator == "stl" or plan.doubly else q, parts))


def _at_sites(key: Key, key_network: Key | None, q: Tree, rest: tuple[Array, ...], batch: Batch, plan: Plan) -> tuple[Tree, Array]:
    """Noise on the outputs of the sites; leaves without one are drawn. Returns (parameters: means at sites, draws elsewhere; data)."""
    model, layout = plan.target.model, plan.layout
    names = [name for name, take in zip(layout.names, layout.chosen, strict=True) if take]
    key_weights, key_sites = jax.random.split(key)
    keys = jax.random.split(key_weights, len(names))
    means, scales = layout.leaves(q["mean"]), [jnp.exp(rho) for rho in layout.leaves(q["rho"])]
    flip = plan.estimator == "flipout"
    drawn, companions = [], []
    for k, name, mean, scale in zip(keys, names, means, scales, strict=True):
        here = name in plan.local
        shift = scale * noise.normal(k, mean.shape, mean.dtype) if flip or not here else None
        drawn.append(mean if here else mean + shift)
        companions.append((shift if flip else scale) if here else jnp.zeros_like(mean))
    join = lambda leaves, others: jax.tree.unflatten(layout.structure, _interleave(layout.chosen, leaves, others))
    params = join(drawn, rest)
    # The prior's rescaling of weights is linear, so standard deviations and perturbations go through it as the means do.
    companion = model.weights({**params, "network": join(companions, [jnp.zeros_like(leaf) for leaf in rest])["network"]})
    companion = companion if flip else jax.tree.map(jnp.square, companion)
    handle = noise.flipout if flip else noise.local

    def handler(k: Key, site: sites.Site, inputs: Array, weights: sites.Operands, compute: Callable) -> tuple[Array, Any]:
        # A weight that is not random must not meet √0, whose slope is infinite.
        chosen = handle if f"network.{site.path}" in plan.local else sites.identity
        return chosen(k, site, inputs, weights, compute)

    def apply(weights: Tree, x: Tree, k: Key | None) -> Tree:
        return sites.replay(key_sites, model.apply, weights, x, handler, (companion,), (1 if flip else 2,), k)[0]

    return params, plan.target.parts(params, batch, key_network, apply)[1]


def _expected(key: Key, key_network: Key | None, q: Tree, rest: tuple[Array, ...], batch: Batch, plan: Plan) -> tuple[Tree, Array]:
    """E log N(y; f, σ²) = log N(y; E f, σ²) − ½ Σ Var f/σ²: network weights at their means, other leaves of q drawn."""
    target, layout = plan.target, plan.layout
    drawn = layout.join(plan.family.draw(q, plan.family.noise(key, q)), rest)
    centre = layout.join(plan.family.centre(q), rest)
    params = {**drawn, "network": centre["network"]}
    variance = output_variance(q, rest, params, batch.x, plan)
    log_density = target.parts(params, batch, key_network)[1]
    scale = target.model.extra(params)["scale"]
    spread = target.total(jnp.sum(variance / scale**2, axis=-1), batch)
    return params, log_density - 0.5 * spread


def output_variance(q: Tree, rest: tuple[Array, ...], params: Tree, x: Tree, plan: Plan) -> Array:
    """Var f(x) under q where f is linear in q's network weights, (n, k): at the one site, or column by column of a factor of Σ."""
    model, layout = plan.target.model, plan.layout
    if plan.moments:
        scales = layout.spread(tuple(jnp.exp(rho) for rho in q["rho"]), rest)
        companion = jax.tree.map(jnp.square, model.weights({**params, "network": scales["network"]}))
        _, records = sites.replay(None, model.apply, model.weights(params), x, noise.moments, (companion,), (2,))
        return next(reversed(records.values()))
    operator = plan.family.operator(q)

    def slope(z: Array) -> Array:
        shift = operator.sqrt_matvec(z)
        parts = (shift,) if layout.flat else _cut(shift, [leaf.shape for leaf in q["mean"]])
        direction = {**jax.tree.map(jnp.zeros_like, params), "network": layout.spread(parts, rest)["network"]}
        return jax.jvp(lambda p: model.outputs(p, x), (params,), (direction,))[1]

    dtype = jax.tree.leaves(q["mean"])[0].dtype
    total = lambda carry, z: (carry + slope(z) ** 2, None)
    zero = jnp.zeros(jax.eval_shape(lambda: model.outputs(params, x)).shape, dtype)
    return jax.lax.scan(total, zero, jnp.eye(operator.num_noise, dtype=dtype))[0]


def score_surrogate(values: Array, log_q: Array, ramp: Any, entropy: Array | None) -> Array:
    """Σ (f − mean of the others)·log q/S, f held fixed; f's own gradient (point parameters) and what is closed are added as they are."""
    number = values.shape[0]
    total = values if entropy is not None else values - ramp * log_q
    fixed = jax.lax.stop_gradient(total)
    fixed = fixed - jnp.mean(fixed)  # large values would lose the digits that matter; no difference changes
    advantage = fixed * (number / (number - 1))
    surrogate = jnp.mean(advantage * log_q) + jnp.mean(values)
    return surrogate if entropy is None else surrogate + ramp * entropy


def _interleave(chosen: Sequence[bool], first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    a, b = iter(first), iter(second)
    return [next(a) if take else next(b) for take in chosen]


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    bounds = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return tuple(part.reshape(shape) for part, shape in zip(jnp.split(flat, bounds), shapes, strict=True))
