"""What gradient methods share: optimisers by name, learning-rate schedules, and parameters packed into one vector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, StoreError, message, nearest
from aleator._quick import quick
from aleator._typing import Array, Tree

FLAT_SIZE = 100_000  # up to this many parameters one flat vector is faster: few fused updates instead of several per leaf


class Packing(NamedTuple):
    """tree → what the optimiser moves, and back."""

    pack: Callable[[Tree], Tree]
    unpack: Callable[[Tree], Tree]


def packing(template: Tree) -> Packing:
    """pack and unpack: small parameter trees of one dtype travel as one flat vector."""
    leaves, structure = jax.tree.flatten(template)
    if _tree.size(template) > FLAT_SIZE or len({leaf.dtype for leaf in leaves}) > 1 or len(leaves) < 2:
        return Packing(lambda tree: tree, lambda tree: tree)
    bounds = np.cumsum([0] + [int(np.prod(leaf.shape)) for leaf in leaves])

    def unpack(flat: Array) -> Tree:
        parts = [flat[a:b].reshape(leaf.shape) for a, b, leaf in zip(bounds[:-1], bounds[1:], leaves, strict=True)]
        return jax.tree.unflatten(structure, parts)

    return Packing(_tree.flat, quick(unpack))


def schedule(method: Any) -> float | Callable:
    """The learning rate over method.num_steps: a number or a function of the step."""
    import optax

    steps = method.num_steps
    made = {
        "constant": lambda: method.learning_rate,
        "cosine": lambda: optax.cosine_decay_schedule(method.learning_rate, steps),
        "warmup_cosine": lambda: optax.warmup_cosine_decay_schedule(0.0, method.learning_rate, max(1, steps // 20), steps),
    }
    if method.schedule not in made:
        got = repr(method.schedule) + nearest(str(method.schedule), made)
        raise MethodError(
            message("Unknown schedule.", got, f"one of {sorted(made)}", "choose one, or pass an optimizer with its own schedule")
        )
    return made[method.schedule]()


def check_optimizer(method: Any) -> None:
    """Refuse an optimiser that cannot be made. The method of a loaded fit may name one that was not stored: it says so when it is run."""
    with contextlib.suppress(StoreError):
        optimizer(method)


def optimizer(method: Any) -> Any:
    """The optax optimiser that method.optimizer, learning_rate, schedule and clip describe."""
    import optax

    choice, rate = method.optimizer, schedule(method)
    if isinstance(choice, str):
        factory = getattr(optax, choice, None)
        if not callable(factory) or choice.startswith("_"):
            names = ("adam", "adabelief", "adagrad", "lamb", "lbfgs", "lion", "nadam", "novograd", "radam", "rmsprop", "sgd", "yogi")
            raise MethodError(
                message(
                    "Unknown optimiser.", repr(choice) + nearest(choice, names), f"an optax optimiser such as {names}", "check the spelling"
                )
            )
        # L-BFGS finds its own step by line search; a learning rate would only spoil it.
        made = optax.lbfgs() if choice == "lbfgs" else factory(rate)
    elif isinstance(choice, optax.GradientTransformation):
        made = choice
    elif callable(choice):
        made = choice(rate)
    else:
        raise MethodError(
            message(
                "Unknown optimiser.", repr(choice), "a name, a function of the learning rate, or an optax optimiser", "pass e.g. 'adam'"
            )
        )
    parts = [made] if method.clip is None else [optax.clip_by_global_norm(method.clip), made]
    return optax.with_extra_args_support(optax.chain(*parts) if len(parts) > 1 else made)
