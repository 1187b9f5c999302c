"""Gibbs: blocks of parameters drawn from their conditionals, given by the user; any kernel for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, stats
from aleator.methods._method import Card, check_positive
from aleator.methods._moves import refresh, repeat
from aleator.methods.elliptical_slice import EllipticalSlice
from aleator.posterior import Posterior


class State(NamedTuple):
    """position (D,): all parameters. rest: the state of the kernel for the coordinates of no block, None where there are none."""

    position: Array
    rest: Any


class Block(NamedTuple):
    """path: of a leaf or sub-tree. draw(key, params, data) → its new value. leaves: their numbers. where: their flat coordinates."""

    path: str
    draw: Callable[[Key, Tree, Batch | None], Tree]
    leaves: tuple[int, ...]
    where: np.ndarray


def sweep(key: Key, position: Array, blocks: list[Block], params_of: Callable[[Array], Tree], data: Batch | None) -> Array:
    """Each block in turn from its conditional given all the others."""
    for block, k in zip(blocks, jax.random.split(key, max(len(blocks), 1)), strict=False):
        drawn = jax.tree.leaves(block.draw(k, params_of(position), data))
        position = position.at[block.where].set(jnp.concatenate([jnp.ravel(leaf).astype(position.dtype) for leaf in drawn]))
    return position


def conditional(density: Density, position: Array, free: np.ndarray) -> Density:
    """The density of the coordinates `free`, the others held where they are."""
    whole = lambda part: position.at[free].set(part)
    value = lambda part: density.value(whole(part))
    return Density(
        value,
        jax.value_and_grad(value),
        lambda part: density.parts(whole(part)),
        lambda part: density.functions(whole(part)),
        density.batch,
    )


@dataclasses.dataclass(frozen=True)
class Gibbs(Sampler):
    """Gibbs sampling by blocks (D13).

    blocks: None for a model that knows its own conditionals (al.latent: hidden variables given parameters, then parameters given them), else
    {path: conditional}, path naming a leaf or a sub-tree of the parameters ("z", "network.layer0"), conditional(key, params,
    data) → a draw of it from its distribution given all else; data is the Batch (data.x, data.y), None for a bare density. They are drawn
    in the order given, then `rest` (a sampler such as RandomWalk or NUTS) moves the remaining coordinates num_moves times given the
    blocks. Leaves that were given as integers stay integers in conditionals, density and draws; only blocks can move them: this is data
    augmentation.
    """

    blocks: Any = None
    rest: Any = None
    num_samples: int = 2000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    num_moves: int = 1
    collapsed: bool = False
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Gibbs",
        summary="Where conditionals are known, draw from them; move the rest by any other sampler.",
        model_class="any log density, with discrete parameters too, whose blocks have tractable conditionals",
        criterion="invariance of the posterior: exact as the number of draws grows, if the conditionals are right",
        search="one block after the other from its distribution given the rest",
        cost="the user's conditionals, plus the sampler of the rest",
        needs="conditionals by block; all the data in memory",
        references=(
            "Geman and Geman, Stochastic relaxation, Gibbs distributions, and the Bayesian restoration of images, 1984",
            "Tanner and Wong, The calculation of posterior distributions by data augmentation, 1987",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        check_positive(self, "num_moves", whole=True)
        pairs = tuple(self.blocks.items()) if isinstance(self.blocks, Mapping) else self.blocks
        good = pairs is None or (
            isinstance(pairs, tuple) and pairs and all(len(pair) == 2 and isinstance(pair[0], str) and callable(pair[1]) for pair in pairs)
        )
        if not good:
            raise MethodError(
                message(
                    "These are not blocks.", repr(self.blocks), "{path: conditional(key, params, data)}", "pass e.g. Gibbs({'z': draw_z})"
                )
            )
        object.__setattr__(self, "blocks", pairs)
        if self.rest is not None and (not isinstance(self.rest, Sampler) or isinstance(self.rest, (Gibbs, EllipticalSlice))):
            raise MethodError(
                message(
                    "This cannot move the rest.",
                    repr(self.rest),
                    "a sampler such as RandomWalk, Slice, MALA or NUTS",
                    "pass rest=RandomWalk()",
                )
            )

    def build(self, target: Any) -> Algorithm:
        """As every sampler, with whole numbers where they were given."""
        whole = _whole_numbers(target)
        algorithm = super().build(_as_given(target, whole))

        def finish(key: Key, state: Any, kept: Any) -> Posterior:
            draws = algorithm.finish(key, state, kept)
            return dataclasses.replace(draws, params=_integers(draws.params, whole))

        return dataclasses.replace(algorithm, finish=finish)

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        self._check_conditionals(target)
        blocks, whole = self._blocks(target), _whole_numbers(target)
        free = np.setdiff1d(np.arange(len(layout.names)), np.concatenate([block.where for block in blocks]))
        params_of = lambda q: _integers(layout.unravel(q), whole)
        inner = None
        if free.size:
            part = layout._replace(names=[layout.names[i] for i in free])
            inner = dataclasses.replace(self.rest, num_warmup=self.num_warmup).kernel(target, part)

        def init(key: Key, position: Array, density: Density) -> State:
            """The blocks are drawn at once: where they start is of no consequence, and may not even be possible."""
            key_blocks, key_rest = jax.random.split(key)
            if density.batch is not None or target.model is None:  # else only shapes are asked for, and conditionals may need the data
                if self.blocks is None:
                    key_first, key_blocks = jax.random.split(key_blocks)
                    position = layout.ravel(target.model.first(key_first, density.batch))
                position = sweep(key_blocks, position, blocks, params_of, density.batch)
            return State(position, None if inner is None else inner.init(key_rest, position[free], conditional(density, position, free)))

        def step(key: Key, state: State, density: Density) -> tuple[State, Stats]:
            key_blocks, key_rest = jax.random.split(key)
            position = sweep(key_blocks, state.position, blocks, params_of, density.batch)
            if inner is None:
                return State(position, None), stats(density.value(position))
            given = conditional(density, position, free)
            moving, now = repeat(key_rest, inner.step, refresh(state.rest, position[free], given), given, self.num_moves)
            return State(position.at[free].set(moving.position), moving), now

        if inner is None:
            return Kernel(init=init, step=step)
        adapt = lambda state, now, number: state._replace(rest=inner.adapt(state.rest, now, number))
        return Kernel(init=init, step=step, adapt=adapt, settle=lambda state: state._replace(rest=inner.settle(state.rest)))

    def _blocks(self, target: Any) -> list[Block]:
        """The blocks with their places among the leaves; what no block and no sampler moves is refused."""
        template = jax.eval_shape(target.init, jax.random.key(0))
        paths, leaves = _tree.paths(template), jax.tree.leaves(template)
        bounds = np.cumsum([0] + [int(np.prod(leaf.shape)) for leaf in leaves])
        if self.blocks is None:
            own = getattr(target.model, "collapsed" if self.collapsed else "gibbs", None)
            if own is None:
                got = f"blocks=None{', collapsed=True' * self.collapsed} for " + (
                    "a bare density" if target.model is None else type(target.model).__name__
                )
                raise MethodError(
                    message("Gibbs needs conditionals.", got, "{path: conditional}", "pass blocks, or use a model of al.latent")
                )
            return [Block("", own, tuple(range(len(leaves))), np.arange(bounds[-1]))]
        blocks, taken = [], set()
        for path, draw in self.blocks:
            numbers = tuple(i for i, p in enumerate(paths) if p == path or p.startswith(path + "."))
            if not numbers or taken & set(numbers):
                raise MethodError(
                    message(
                        "A block does not fit the parameters.",
                        repr(path),
                        f"disjoint paths among {paths}",
                        "check its spelling and overlaps",
                    )
                )
            taken |= set(numbers)
            blocks.append(Block(path, draw, numbers, np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in numbers])))
        left = [p for i, p in enumerate(paths) if i not in taken]
        discrete = [p for p in left if p in _whole_numbers(target)]
        if (left and self.rest is None) or discrete:
            raise MethodError(
                message(
                    "Some parameters would never move.",
                    ", ".join(discrete or left),
                    "a conditional for every discrete leaf, and rest=… for the others",
                    "add a block, or pass rest=RandomWalk()",
                )
            )
        return blocks

    def _check_conditionals(self, target: Any) -> None:
        """Where they can be traced without data, conditionals must return the shapes of their block."""
        if target.model is not None:
            return
        template = _integers(jax.eval_shape(target.init, jax.random.key(0)), _whole_numbers(target))
        leaves = jax.tree.leaves(template)
        for block in self._blocks(target):
            got = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda p, b=block: b.draw(jax.random.key(0), p, None), template))]
            wanted = [leaves[i].shape for i in block.leaves]
            if got != wanted:
                raise MethodError(
                    message(
                        f"The conditional of {block.path!r} returns wrong shapes.", got, wanted, "return a new value of the whole block"
                    )
                )


def _whole_numbers(target: Any) -> frozenset[str]:
    """Paths of the leaves that a bare density was given as integers."""
    given = getattr(target, "params0", {})
    paths, leaves = _tree.paths(given), jax.tree.leaves(given)
    return frozenset(p for p, leaf in zip(paths, leaves, strict=True) if np.asarray(leaf).dtype.kind in "iub")


def _integers(params: Tree, whole: frozenset[str]) -> Tree:
    """Leaves with these paths as int32; arrays, NumPy arrays and shapes alike."""
    if not whole:
        return params

    def cast(path: Any, leaf: Any) -> Any:
        if _tree.path_str(path) not in whole:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.int32)
        return np.rint(leaf).astype(np.int32) if isinstance(leaf, np.ndarray) else jnp.rint(leaf).astype(jnp.int32)

    return jax.tree_util.tree_map_with_path(cast, params)


def _as_given(target: Any, whole: frozenset[str]) -> Any:
    """The target whose density sees integers where integers were given."""
    if not whole:
        return target
    return dataclasses.replace(target, density=lambda params: target.density(_integers(params, whole)))
