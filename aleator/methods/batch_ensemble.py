"""BatchEnsemble: members that share their weights up to a rank-one factor each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _noisy, _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.noise import normal_tree
from aleator.posterior import Posterior, RankOne, effective

BASE = 256  # whole numbers up to this are exact in half precision of either kind


class State(NamedTuple):
    """params: {"shared": one leaf each, () for own ones; "left", "right", "own": with the members first}, flat for small models."""

    params: Tree
    optimizer: Any


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θₘ) before the step, the mean over members."""

    log_likelihood: Array


class Plan(NamedTuple):
    """What is shared. template: shapes of the model's parameters; shared: as in `RankOne`; axes: of each rank-one leaf those that number its
    input and its output units; paths: of these leaves within the network."""

    template: Tree
    shared: tuple[str, ...]
    axes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    paths: tuple[str, ...]


def init(key: Key, start: Tree, plan: Plan, method: BatchEnsemble) -> Tree:
    """r, s ~ N(1, spread²); everything else where the start has it."""
    leaves = jax.tree.leaves(start)
    ones = [leaf for leaf, kind in zip(leaves, plan.shared, strict=True) if kind == "rank_one"]
    sides = tuple(zip(*plan.axes, strict=True))
    template = tuple(tuple(_factor_like(leaf, axes, method.num_members) for leaf, axes in zip(ones, side, strict=True)) for side in sides)
    # A map without such units has nothing to tell apart: its factor stays 1.
    shift = lambda noise, axes: 1.0 + (method.spread if axes else 0.0) * noise
    left, right = (
        tuple(shift(noise, axes) for noise, axes in zip(drawn, side, strict=True))
        for drawn, side in zip(normal_tree(key, template), sides, strict=True)
    )
    copies = lambda leaf: jnp.broadcast_to(leaf, (method.num_members, *leaf.shape))
    return {
        "shared": tuple(() if kind == "own" else leaf for leaf, kind in zip(leaves, plan.shared, strict=True)),
        "left": left,
        "right": right,
        "own": tuple(copies(leaf) for leaf, kind in zip(leaves, plan.shared, strict=True) if kind == "own"),
    }


def step(key: Key, state: State, batch: Batch, target: Any, plan: Plan, optimizer: Any, packing: _optimise.Packing) -> tuple[State, Info]:
    """Ascend (1/M) Σₘ log joint(θₘ)/N: every member sees the batch, in one product with the shared weights."""
    import optax

    def loss(tree: Tree) -> tuple[Array, Array]:
        factors = (tree["left"], tree["right"], tree["own"])
        keys = jax.random.split(key, tree["left"][0].shape[0])

        def data(k: Key, left: tuple, right: tuple, own: tuple) -> Array:
            # W stays shared and out of the map over members: r and s meet the inputs and outputs instead.
            bare = _joined(tree["shared"], own, plan)
            apply = lambda weights, x, network_key: replayed(target.model.apply, weights, x, left, right, plan, network_key)
            return target.total(target.log_likelihood(bare, batch, k if target.stochastic else None, apply), batch)

        def prior(parts: tuple) -> Array:
            left, right, own = parts
            return target.log_prior(effective(_joined(tree["shared"], own, plan), left, right, own, plan.shared))

        fitted = jnp.mean(jax.vmap(data)(keys, *factors))
        # One member's weights at a time, there and back again.
        penalty = jnp.mean(jax.lax.map(jax.checkpoint(prior), factors))
        return -(penalty + fitted) / (max(target.num_data, 1) * target.temperature), fitted

    gradient, fitted = jax.grad(loss, has_aux=True)(packing.unpack(state.params))
    updates, optimizer_state = optimizer.update(packing.pack(gradient), state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state), Info(fitted)


@dataclasses.dataclass(frozen=True)
class BatchEnsemble(Method):
    """q(θ) = (1/M) Σₘ δ(θ − θₘ) with weights W ∘ (rₘ sₘᵀ): M = num_members networks around one W, for hardly more memory than one.

    (W ∘ r sᵀ)x = s ∘ W(r ∘ x), so that all members share one large product on any network whose linear maps are found (`al.sites`).
    Vectors (biases, gains, likelihood parameters) are each member's own; weights without a site are shared by all. Each member is fitted
    to all rows under the model's prior for its own weights W ∘ (rₘ sₘᵀ). spread: standard deviation of r and s around 1 at the start;
    members differ by nothing else then. Other settings as in `al.MAP`.
    """

    num_members: int = 4
    spread: float = 0.5
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="BatchEnsemble",
        summary="An ensemble in the memory of one network: shared weights, with one number per unit and member around them.",
        model_class="any network with linear maps",
        criterion="mean log joint density of the members",
        search="stochastic or full-batch gradient ascent, all members in one product",
        cost="num_members forward and backward passes per step; one copy of the weights and two vectors a map and member",
        needs="a network with a matrix product, convolution or look-up that applies a parameter",
        references=(
            "Wen, Tran and Ba, BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning, 2020",
            "Dusenberry et al., Efficient and scalable Bayesian neural nets with rank-1 factors, 2020",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_members", "num_steps", "batch_size", whole=True)
        check_positive(self, "learning_rate", "spread", "clip")
        _optimise.check_optimizer(self)

    def build(self, target: Any) -> Algorithm:
        plan, optimizer = make_plan(target), _optimise.optimizer(self)
        packing = _optimise.packing(jax.eval_shape(lambda k, start: init(k, start, plan, self), jax.random.key(0), plan.template))

        def start(key: Key, params: Tree) -> State:
            packed = packing.pack(init(key, params, plan, self))
            return State(packed, optimizer.init(packed))

        def posterior(state: State) -> RankOne:
            tree = packing.unpack(state.params)
            mean = tuple(jnp.mean(leaf, axis=0) for leaf in tree["own"])
            return RankOne(_joined(tree["shared"], mean, plan), tree["left"], tree["right"], tree["own"], plan.shared)

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            return posterior(state)

        one_step = lambda key, state, batch: step(key, state, batch, target, plan, optimizer, packing)
        batches = "full" if self.batch_size is None else "random"
        return Algorithm(
            init=start,
            phases=(Phase("BatchEnsemble", one_step, self.num_steps, batches, self.batch_size),),
            position=lambda state: posterior(state).member(0),
            finish=finish,
            watch="log_likelihood",
            notes=_notes(target, plan, self.num_members),
        )


def make_plan(target: Any) -> Plan:
    """Which leaves are rank-one around a shared weight, which are each member's own, and which are shared by all."""
    found = _noisy.find_sites(target, "BatchEnsemble")
    template = jax.eval_shape(target.init, jax.random.key(0))
    axes: dict[str, set] = {}
    for site in found.sites:
        axes.setdefault(site.path, set()).add((site.leaf_axes, site.out_axes))
    biases = {site.bias_path for site in found.sites}
    # A weight that is cut up differently by several equations has no units of its own.
    ranked = {_noisy.full_path(path): next(iter(pairs)) for path, pairs in axes.items() if len(pairs) == 1 and any(next(iter(pairs)))}
    vectors = {_noisy.full_path(path) for path in biases if path is not None}
    names = _tree.paths(template)
    small = [len(leaf.shape) < 2 for leaf in jax.tree.leaves(template)]
    shared = tuple(
        "rank_one" if name in ranked else "own" if name in vectors or less else "all" for name, less in zip(names, small, strict=True)
    )
    if "rank_one" not in shared:
        raise MethodError(
            message(
                "No weight of the network has units of its own.",
                f"sites {[site.name for site in found.sites]}",
                "a dense map, a convolution or a look-up applied to one parameter",
                "use al.Ensemble(al.MAP(), 5)",
            )
        )
    chosen = [name for name, kind in zip(names, shared, strict=True) if kind == "rank_one"]
    inside = tuple(name.removeprefix("network").removeprefix(".") for name in chosen)
    return Plan(template, shared, tuple(ranked[name] for name in chosen), inside)


def replayed(apply: Callable, weights: Tree, x: Tree, left: tuple, right: tuple, plan: Plan, key: Key | None = None) -> Tree:
    """The network with W ∘ (r sᵀ) at its sites, where r meets the inputs and s the outputs.

    What goes the way of the weights is not r and s but the numbers of the units: gradients then go straight to r and s, and nothing of a
    weight's size is made for a member.
    """
    leaves, structure = jax.tree.flatten(weights)
    paths = _tree.paths(weights)
    factors = {path: (r, s, axes) for path, r, s, axes in zip(plan.paths, left, right, plan.axes, strict=True)}
    count = max(_num_digits(factor.size) for r, s, _ in factors.values() for factor in (r, s))

    def companion(side: int, digit: int) -> Tree:
        def one(path: str, leaf: Array) -> Array:
            if path not in factors:
                return jnp.broadcast_to(jnp.zeros((), leaf.dtype), leaf.shape)
            like = factors[path][side]
            numbers = jnp.arange(like.size, dtype=jnp.int32).reshape(like.shape) // BASE**digit % BASE
            return jnp.broadcast_to(numbers.astype(leaf.dtype), leaf.shape)

        return jax.tree.unflatten(structure, [one(path, leaf) for path, leaf in zip(paths, leaves, strict=True)])

    def handler(k: Any, site: sites.Site, inputs: Array, operands: sites.Operands, compute: Callable) -> tuple[Array, None]:
        offset = None if operands.bias is None else operands.bias[0]
        if site.path not in factors:
            return compute(inputs, operands.weight[0], offset), None
        weight, *digits = operands.weight
        r, s, _ = factors[site.path]
        if site.leaf_axes:
            inputs = inputs * _placed(r, digits[:count], site.weight_unit_axes, site.unit_axes, inputs)
        out = compute(inputs, weight)
        if site.out_axes:
            out = out * _placed(s, digits[count:], site.weight_out_axes, site.output_axes, out)
        return out if offset is None else out + offset, None

    companions = [companion(side, digit) for side in (0, 1) for digit in range(count)]
    return sites.replay(None, apply, weights, x, handler, companions, (0,) * len(companions), key)[0]


def _num_digits(size: int) -> int:
    """Digits in which numbers below `size` are written: each is exact in every floating type, whatever a network casts its weights to."""
    return next(count for count in range(1, 5) if size <= BASE**count)


def _placed(factor: Array, digits: list[Array], axes: tuple[int, ...], places: tuple[int, ...], like: Array) -> Array:
    """r or s where its units are in an array like `like`: digits of the units' numbers vary along `axes` of a weight, which are `places`
    there."""
    order, pairs = sorted(axes), sorted(zip(places, axes, strict=True))
    shape = [1] * like.ndim
    for place, axis in pairs:
        shape[place] = digits[0].shape[axis]

    def along(array: Array) -> Array:
        cut = [size if axis in axes else 1 for axis, size in enumerate(array.shape)]
        values = jax.lax.slice(array, [0] * array.ndim, cut).reshape([array.shape[axis] for axis in order])
        return jnp.transpose(values, [order.index(axis) for _, axis in pairs]).reshape(shape).astype(jnp.int32)

    numbers = sum((along(digit) * BASE**i for i, digit in enumerate(digits[1:], start=1)), start=along(digits[0]))
    return jnp.ravel(factor)[numbers].astype(like.dtype)


def _factor_like(leaf: Array, axes: tuple[int, ...], members: int) -> Any:
    """Shape of r or s of all members for one leaf."""
    return jax.ShapeDtypeStruct((members, *(size if axis in axes else 1 for axis, size in enumerate(leaf.shape))), leaf.dtype)


def _joined(shared: tuple, own: tuple[Array, ...], plan: Plan) -> Tree:
    """Shared leaves and one member's own ones as a parameter tree of the model."""
    others = iter(own)
    leaves = [next(others) if kind == "own" else leaf for leaf, kind in zip(shared, plan.shared, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(plan.template), leaves)


def _notes(target: Any, plan: Plan, members: int) -> dict[str, Any]:
    said = {"rank_one": "shared, rank-one factor per member", "own": "one per member", "all": "shared by all members"}
    by_path = dict(zip(_tree.paths(plan.template), plan.shared, strict=True))
    sizes = {"rank_one": 0, "own": 0, "all": 0}
    for leaf, kind in zip(jax.tree.leaves(plan.template), plan.shared, strict=True):
        sizes[kind] += _tree.nbytes(leaf)
    ones = [leaf for leaf, kind in zip(jax.tree.leaves(plan.template), plan.shared, strict=True) if kind == "rank_one"]
    units = sum(
        (int(np.prod([leaf.shape[a] for a in ins])) + int(np.prod([leaf.shape[a] for a in outs]))) * np.dtype(leaf.dtype).itemsize
        for leaf, (ins, outs) in zip(ones, plan.axes, strict=True)
    )
    return {
        "sites": _noisy.treatments(target, lambda path: said[by_path[path]]),
        "memory": {
            "posterior_bytes": sum(sizes.values()) + members * (sizes["own"] + units),
            "bytes_of_as_many_copies": members * sum(sizes.values()),
        },
    }
