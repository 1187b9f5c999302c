"""Semi-parametric regression (E7): a linear part that can be read, and a network for what is left."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.networks._network import Wrapper, as_network


@dataclasses.dataclass(frozen=True)
class Partial(Wrapper):
    """outputs = x_L β + network(x_N); x (n, in_size) → (n, out_size).

    linear: the columns of x that enter β. rest: the columns the network sees, None for all. Weights are {"linear": {"weight": β},
    "network": …}, so that `al.Normal({"linear": 10.0, "network": 1.0})` gives each part its own prior. β (len(linear), out_size) starts at 0;
    the intercept is the network's bias. Where a column is in both parts only the sum is identified by the data, and the priors share it out:
    leave it out of `rest` where β is to be its whole effect.

    >>> import jax
    >>> from aleator.networks import MLP
    >>> net = Partial(MLP(1, (5,), 1), linear=(0, 1), rest=(2,))
    >>> params = net.init(jax.random.key(0))
    >>> params["linear"]["weight"].shape, net.apply(params, jnp.ones((4, 3))).shape
    ((2, 1), (4, 1))
    """

    network: Any
    linear: tuple[int, ...]
    rest: tuple[int, ...] | None = None
    outputs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", as_network(self.network))
        object.__setattr__(self, "linear", _columns("linear", self.linear))
        object.__setattr__(self, "rest", None if self.rest is None else _columns("rest", self.rest))
        if self.outputs is None:
            object.__setattr__(self, "outputs", getattr(self.network, "out_size", 1))

    @property
    def params(self) -> Tree:
        """Where a fit of somebody's own network starts; None for a built-in one, which is initialised afresh."""
        given = getattr(self.network, "params", None)
        return None if given is None else {"linear": self._zeros(), "network": given}

    def init(self, key: Key) -> Tree:
        return {"linear": self._zeros(), "network": self.network.init(key)}

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        width = 1 + max((*self.linear, *(self.rest or ())))
        if x.ndim != 2 or x.shape[1] < width:
            raise ModelError(
                message(
                    "Partial cannot take this x.", f"shape {tuple(x.shape)}", f"(n, {width}) or wider", "check the columns of both parts"
                )
            )
        weight = params["linear"]["weight"]
        seen = x if self.rest is None else x[:, np.asarray(self.rest)]
        return x[:, np.asarray(self.linear)] @ (weight.T if self.fan_axes == "first" else weight) + self.network.apply(
            params["network"], seen, key
        )

    def rebuild(self, params: Tree) -> Tree:
        return {"linear": params["linear"], "network": self.network.rebuild(params["network"])}

    def _zeros(self) -> Tree:
        # β follows the order of the network's weights, so that one rule gives the fan-ins of both.
        shape = (len(self.linear), self.outputs)
        return {"weight": jnp.zeros(shape[::-1] if self.fan_axes == "first" else shape)}


def _columns(name: str, given: Any) -> tuple[int, ...]:
    columns = (given,) if isinstance(given, (int, np.integer)) else tuple(given)
    whole = all(isinstance(c, (int, np.integer)) and not isinstance(c, bool) and c >= 0 for c in columns)
    if not columns or not whole or len(set(columns)) != len(columns):
        raise ModelError(
            message(f"Partial({name}=…) cannot be used.", repr(given), "different column numbers ≥ 0", f"pass e.g. {name}=(0, 1)")
        )
    return tuple(int(c) for c in columns)
