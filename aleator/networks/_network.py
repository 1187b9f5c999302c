"""What a network is to the library: pure functions of a parameter tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree


@runtime_checkable
class Network(Protocol):
    """init(key) → params; apply(params, x, key=None) → outputs, batch in, batch out, pure. Frozen and hashable."""

    def init(self, key: Key) -> Tree: ...

    def apply(self, params: Tree, x: Tree, key: Key | None = None) -> Tree: ...


@dataclasses.dataclass(frozen=True, eq=False)
class UserNetwork:
    """Somebody's own network, reduced to pure functions.

    function(params, x, key) → outputs. params: the values it came with (where a single fit starts). fan_axes: whether the fan-in of a
    leaf with two or more axes is over all axes but the "first" (Equinox, PyTorch order) or all but the "last" (JAX order).
    """

    framework: str
    function: Callable[[Tree, Tree, Key | None], Tree]
    params: Tree
    fan_axes: str
    make: Callable[[Key], Tree] | None = None
    rebuilder: Callable[[Tree], Any] | None = None
    stochastic: bool = False

    def init(self, key: Key) -> Tree:
        """Fresh parameters: from the maker where one was given, else each array of two or more axes is redrawn with its own
        mean and standard deviation, and biases and gains are kept."""
        if self.make is not None:
            return self.make(key)
        leaves, structure = jax.tree.flatten(self.params)
        keys = jax.random.split(key, max(len(leaves), 1))
        redraw = lambda k, leaf: leaf if leaf.ndim < 2 else jnp.mean(leaf) + jnp.std(leaf) * jax.random.normal(k, leaf.shape, leaf.dtype)
        return jax.tree.unflatten(structure, [redraw(k, leaf) for k, leaf in zip(keys, leaves, strict=False)])

    def apply(self, params: Tree, x: Tree, key: Key | None = None) -> Tree:
        return self.function(params, _as_precise(params, x), key)

    def rebuild(self, params: Tree) -> Any:
        """The user's own kind of object with these parameters (the parameters themselves for a plain function)."""
        return params if self.rebuilder is None else self.rebuilder(params)


def _as_precise(params: Tree, x: Tree) -> Tree:
    """x in single or double precision, as the parameters are: some methods hold these in float64, and convolutions do not take both."""
    precisions = (jnp.float32, jnp.float64)
    floats = [leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    own = jnp.result_type(*floats) if floats else None
    other = lambda leaf: own in precisions and jnp.result_type(leaf) in precisions and jnp.result_type(leaf) != own
    return jax.tree.map(lambda leaf: leaf.astype(own) if other(leaf) else leaf, x)


def as_network(obj: Any, init: Callable[[Key], Any] | None = None) -> Any:
    """Reduce an Equinox module, a Flax NNX module, or a pair (function, params) to a Network.

    A built-in network is returned as it is. `init(key)`, optional, makes a fresh object of the same kind; ensembles use it to start
    their members apart. Mutable state such as batch statistics is frozen where the module itself is in evaluation mode, and
    refused otherwise.
    """
    if isinstance(obj, UserNetwork) or (
        dataclasses.is_dataclass(obj) and isinstance(obj, Network) and type(obj).__module__.startswith("aleator.")
    ):
        return obj
    if isinstance(obj, tuple) and len(obj) == 2 and callable(obj[0]):
        from aleator.networks._function import from_function

        return from_function(*obj, init=init)
    ancestors = {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(obj).__mro__}
    if "equinox.Module" in ancestors:
        from aleator.networks._equinox import from_equinox

        return from_equinox(obj, init=init)
    if "flax.Module" in ancestors:
        from aleator.networks._nnx import from_nnx

        return from_nnx(obj, init=init)
    if isinstance(obj, Network) and not isinstance(obj, type):
        return obj
    raise ModelError(
        message(
            "This is not a network.",
            type(obj).__name__,
            "an aleator network, an Equinox or NNX module, or (function, params)",
            "pass e.g. al.networks.MLP(...) or (apply, params)",
        )
    )


class Wrapper:
    """What a network made of another, its `network`, takes over from it."""

    network: Any

    @property
    def fan_axes(self) -> str:
        return getattr(self.network, "fan_axes", "last")

    @property
    def stochastic(self) -> bool:
        return getattr(self.network, "stochastic", False)


def check_params(params: Tree, framework: str) -> Tree:
    """Refuse parameter trees that cannot be inferred: empty, or with leaves that are not floating-point arrays."""
    if not jax.tree.leaves(params):
        raise ModelError(
            message(
                f"The {framework} network has no parameters.",
                "0 arrays",
                "at least one floating-point array",
                "check which arrays are trainable",
            )
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not isinstance(leaf, (jax.Array, np.ndarray)) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            what = getattr(leaf, "dtype", type(leaf).__name__)
            raise ModelError(
                message(
                    f"Parameter {_tree.path_str(path)} cannot be inferred.",
                    what,
                    "a floating-point array",
                    "keep constants and integers out of the parameter tree",
                )
            )
    return jax.tree.map(jnp.asarray, params)


def fan_in(network: Any, params: Tree) -> Tree:
    """Number of inputs feeding each entry of each leaf; 1 for biases, gains and scalars, and for tables whose rows are looked up."""
    first = getattr(network, "fan_axes", "last") == "first"
    count = lambda leaf: 1 if len(leaf.shape) < 2 else int(np.prod(leaf.shape[1:] if first else leaf.shape[:-1]))
    fans, tables = jax.tree.map(count, params), set(getattr(network, "looked_up", ()))
    return {name: jax.tree.map(lambda _: 1, fan) if name in tables else fan for name, fan in fans.items()} if tables else fans


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "erf": jax.scipy.special.erf,
    "sin": jnp.sin,
    "identity": lambda x: x,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The elementwise function of that name."""
    if name not in ACTIVATIONS:
        from aleator._errors import nearest

        raise ModelError(
            message(
                "Unknown activation.", repr(name) + nearest(str(name), ACTIVATIONS), f"one of {sorted(ACTIVATIONS)}", "choose one of them"
            )
        )
    return ACTIVATIONS[name]


def check_input(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Refuse a batch whose rows do not have the shape the network was built for."""
    if tuple(x.shape[1:]) != tuple(shape) or x.ndim != len(shape) + 1:
        expected = "(n, " + ", ".join(map(str, shape)) + ")"
        hint = (
            "pass x[:, None] for one input"
            if x.ndim == 1 and shape == (1,)
            else "check the number of features, or rebuild the network with the right size"
        )
        raise ModelError(message(f"{name} cannot take this x.", f"shape {tuple(x.shape)}", expected, hint))
