"""NUTS: Hamiltonian Monte Carlo that chooses its own trajectory length, doubling until it turns back."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._random import fold
from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hamiltonian
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, stats
from aleator.methods._method import Card, check_positive


class Leaf(NamedTuple):
    """The part of a subtree built so far. at: its last point. position, log_density, gradient: its proposal. log_weight: log Σ e^{−ΔH}.
    total: Σ momentum. momenta, totals (depth + 1, D): checkpoints for the turning tests of its own subtrees. accepted: Σ min(1, e^{−ΔH})."""

    at: hamiltonian.Phase
    position: Array
    log_density: Array
    gradient: Array
    log_weight: Array
    total: Array
    momenta: Array
    totals: Array
    number: Array
    turning: Array
    diverging: Array
    accepted: Array
    outside: Array
    undefined: Array


class Chance(NamedTuple):
    """The random numbers of one doubling. right: its direction. bound: log of a uniform number, for taking its proposal. key: of its leaves."""

    right: Array
    bound: Array
    key: Key


class Tree(NamedTuple):
    """The whole trajectory: its two ends, its proposal, its weight and what happened in it; lost: its newest point; chance: of the next
    doubling, drawn beforehand, for XLA copies whatever is computed inside into each of the many places that use it."""

    left: hamiltonian.Phase
    right: hamiltonian.Phase
    position: Array
    log_density: Array
    gradient: Array
    log_weight: Array
    total: Array
    depth: Array
    going: Array
    diverging: Array
    accepted: Array
    evaluations: Array
    outside: Array
    undefined: Array
    lost: Array
    chance: Chance


def chance(key: Key, depth: Array, dtype: Any) -> Chance:
    key_way, key_leaves, key_take = jax.random.split(fold(key, depth), 3)
    right = jax.random.bits(key_way, dtype=jnp.uint32) % 2 == 0
    return Chance(right, jnp.log(jax.random.uniform(key_take, (), dtype)), key_leaves)


def turning(metric: hamiltonian.Metric, first: Array, last: Array, total: Array) -> Array:
    """Whether a trajectory with these end momenta and sum of momenta turns back: ρᵀM⁻¹p ≤ 0 at either end, ρ taken between the ends."""
    between = hamiltonian.velocity(metric, total - 0.5 * (first + last))
    return (jnp.dot(between, first) <= 0.0) | (jnp.dot(between, last) <= 0.0)


def subtree(
    key: Key, density: Density, state: hamiltonian.State, start: hamiltonian.Phase, direction: Array, depth: Array, energy: Array, size: int
) -> Leaf:
    """2^depth leapfrog steps from one end, stopped where they diverge or a subtree turns back.

    Iterative: point number n closes the subtrees whose first points are at the checkpoints between the number of ones in n/2 and that
    minus the number of trailing ones of n; all are tested at once, (size + 1, D).
    """
    zero = jnp.zeros((), start.log_density.dtype)
    blank = jnp.zeros((size + 1, len(start.position)), start.position.dtype)
    none = jnp.zeros((), jnp.int32)
    no = jnp.zeros((), bool)
    first = Leaf(
        start,
        start.position,
        start.log_density,
        start.gradient,
        zero - jnp.inf,
        jnp.zeros_like(start.position),
        blank,
        blank,
        none,
        no,
        no,
        zero,
        none,
        none,
    )
    step = direction * state.step
    wanted = 2**depth

    def going(leaf: Leaf) -> Array:
        return (leaf.number < wanted) & ~leaf.turning & ~leaf.diverging

    def body(leaf: Leaf) -> Leaf:
        at = hamiltonian.leapfrog(density, state.metric, step, leaf.at)
        change = energy - (hamiltonian.kinetic(state.metric, at.momentum) - at.log_density)
        known = jnp.isfinite(change)
        change = jnp.where(known, change, -jnp.inf)
        log_weight = jnp.logaddexp(leaf.log_weight, change)
        take = jnp.log(jax.random.uniform(fold(key, leaf.number), (), change.dtype)) < change - log_weight
        pick = lambda new, old: jnp.where(take, new, old)
        total = leaf.total + at.momentum
        n = leaf.number
        # Point n is stored when even; when odd it closes subtrees whose first points are stored.
        highest = jax.lax.population_count(n >> 1)
        trailing = jax.lax.population_count(n & ~(n + 1))
        even = n % 2 == 0
        slot = jnp.where(even, highest, size)  # the spare row: written in place, never read
        momenta = jax.lax.dynamic_update_index_in_dim(leaf.momenta, at.momentum, slot, 0)
        totals = jax.lax.dynamic_update_index_in_dim(leaf.totals, total, slot, 0)
        row = jnp.arange(size + 1)
        closes = ~even & (row <= highest) & (row > highest - trailing)
        between = total - totals + 0.5 * (momenta - at.momentum)
        fast = jax.vmap(lambda p: hamiltonian.velocity(state.metric, p))(between)
        turned = jnp.any(closes & ((jnp.sum(fast * momenta, axis=1) <= 0.0) | (fast @ at.momentum <= 0.0)))
        return Leaf(
            at=at,
            position=pick(at.position, leaf.position),
            log_density=pick(at.log_density, leaf.log_density),
            gradient=pick(at.gradient, leaf.gradient),
            log_weight=log_weight,
            total=total,
            momenta=momenta,
            totals=totals,
            number=n + 1,
            turning=turned,
            diverging=change < -hamiltonian.DIVERGENCE,
            accepted=leaf.accepted + jnp.minimum(1.0, jnp.exp(change)),
            outside=leaf.outside + jnp.isneginf(at.log_density),
            undefined=leaf.undefined + jnp.isnan(at.log_density) + jnp.isposinf(at.log_density),
        )

    return jax.lax.while_loop(going, body, first)


def step(key: Key, state: hamiltonian.State, density: Density, max_depth: int) -> tuple[hamiltonian.State, Stats]:
    """One transition: trajectories double in a random direction; within a subtree points are drawn by weight, between the old and the
    new half with the bias towards the new one that keeps the target invariant (Betancourt 2017)."""
    key_momentum, key_tree = jax.random.split(key)
    momentum = hamiltonian.draw_momentum(key_momentum, state.metric)
    energy = hamiltonian.kinetic(state.metric, momentum) - state.log_density
    start = hamiltonian.Phase(state.position, momentum, state.log_density, state.gradient)
    zero, none, no = jnp.zeros_like(energy), jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    tree = Tree(
        start,
        start,
        state.position,
        state.log_density,
        state.gradient,
        zero,
        momentum,
        none,
        ~no,
        no,
        zero,
        none,
        none,
        none,
        state.position,
        chance(key_tree, none, energy.dtype),
    )

    def double(tree: Tree) -> Tree:
        right = tree.chance.right
        choose = lambda a, b: jax.tree.map(lambda x, y: jnp.where(right, x, y), a, b)
        direction = jnp.where(right, 1.0, -1.0).astype(energy.dtype)
        leaf = subtree(tree.chance.key, density, state, choose(tree.right, tree.left), direction, tree.depth, energy, max_depth)
        whole = ~(leaf.turning | leaf.diverging)
        take = whole & (tree.chance.bound < leaf.log_weight - tree.log_weight)
        pick = lambda new, old: jnp.where(take, new, old)
        left_end, right_end = choose((tree.left, leaf.at), (leaf.at, tree.right))
        total = tree.total + leaf.total
        turned = turning(state.metric, left_end.momentum, right_end.momentum, total)
        return Tree(
            left=left_end,
            right=right_end,
            position=pick(leaf.position, tree.position),
            log_density=pick(leaf.log_density, tree.log_density),
            gradient=pick(leaf.gradient, tree.gradient),
            log_weight=jnp.logaddexp(tree.log_weight, leaf.log_weight),
            total=total,
            depth=tree.depth + 1,
            going=whole & ~turned,
            diverging=leaf.diverging,
            accepted=tree.accepted + leaf.accepted,
            evaluations=tree.evaluations + leaf.number,
            outside=tree.outside + leaf.outside,
            undefined=tree.undefined + leaf.undefined,
            lost=leaf.at.position,
            chance=chance(key_tree, tree.depth + 1, energy.dtype),
        )

    tree = jax.lax.while_loop(lambda tree: tree.going & (tree.depth < max_depth), double, tree)
    state = state._replace(position=tree.position, log_density=tree.log_density, gradient=tree.gradient)
    return hamiltonian.observe(state, tree.diverging, tree.lost), stats(
        tree.log_density,
        tree.accepted / tree.evaluations,
        tree.evaluations,
        energy=energy,
        depth=tree.depth,
        diverging=tree.diverging,
        outside=tree.outside,
        undefined=tree.undefined,
    )


@dataclasses.dataclass(frozen=True)
class NUTS(Sampler):
    """The no-U-turn sampler (E8) with multinomial sampling along the trajectory.

    Warm-up adapts the step size to `target_acceptance` and the metric ("diagonal", "dense", "low_rank", "identity") in windows.
    max_depth: at most 2^max_depth − 1 gradients a draw. num_samples draws are kept per chain, one in every `thin` transitions.
    """

    num_samples: int = 1000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    metric: str = "diagonal"
    target_acceptance: float = 0.8
    max_depth: int = 10
    step_size: float | None = None
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="NUTS",
        summary="The standard exact sampler: draws from the posterior itself, with checks that say when it has not.",
        model_class="any differentiable log density, up to some 10⁵ parameters",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="Hamiltonian trajectories that stop where they turn back",
        cost="some 10 to 1,000 gradients over all the data per draw",
        needs="gradients, all the data in memory, unconstrained parameters",
        references=(
            "Hoffman and Gelman, The No-U-Turn sampler, 2014",
            "Betancourt, A conceptual introduction to Hamiltonian Monte Carlo, 2017",
            "Phan, Pradhan and Jankowiak, Composable effects for flexible and accelerated probabilistic programming in NumPyro, 2019",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        hamiltonian.check(self)
        check_positive(self, "max_depth", whole=True)

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        settings = hamiltonian.settings(self)
        return Kernel(
            init=lambda key, position, density: hamiltonian.begin(key, position, density, settings),
            step=lambda key, state, density: step(key, state, density, self.max_depth),
            adapt=lambda state, now, number: hamiltonian.adapt(state, now.acceptance, number, settings),
            settle=lambda state: hamiltonian.settle(state, settings),
        )
