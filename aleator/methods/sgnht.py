"""SGNHT: a thermostat that finds the friction which balances gradient noise nobody has measured."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator import _tree
from aleator._typing import Array, Key, Tree
from aleator.methods import sghmc, underdamped
from aleator.methods._method import Card, check_positive
from aleator.methods._stochastic import Dynamics


class Momentum(NamedTuple):
    """velocity: v = εp, like the parameters. friction: the thermostat's α."""

    velocity: Tree
    friction: Array


def init(params: Tree, friction: float) -> Momentum:
    velocity = sghmc.init(params)
    return Momentum(velocity, jnp.asarray(friction, _tree.first_dtype(velocity)))


def move(
    key: Key, params: Tree, inner: Momentum, gradient: Tree, size: Tree, excess: Tree, heat: Any, friction: float, coupling: float
) -> tuple[Tree, Momentum]:
    """A turn of BAOAB whose loss of momentum is the thermostat's α and whose noise is that of a = friction, then
    α ← α + coupling·(T − 1) with T the mean of v²/(hG/2).

    The gradient's noise heats v; α rises above a until the kinetic temperature is one again. V is not needed, and not used.
    """
    nothing, gain = jax.tree.map(lambda _: 0.0, params), underdamped.exact_gain(friction)
    params, velocity = underdamped.move(key, params, inner.velocity, gradient, size, nothing, heat, inner.friction, gain)
    temperature = sghmc.kinetic(velocity, size)
    return params, Momentum(velocity, inner.friction + heat * coupling * (temperature - 1.0))


@dataclasses.dataclass(frozen=True)
class SGNHT(sghmc.Momentum):
    """The stochastic-gradient Nosé–Hoover thermostat (Ding et al. 2014), by the splitting of `al.Underdamped`: its friction α follows the
    kinetic temperature T, α ← α + coupling·(T − 1), from the α = friction that the injected noise is made for.

    Noise of the gradient, of whatever size as long as it is white and alike in all directions, only raises α. Everything else: see `al.SGLD`.
    """

    step_size: Any = "auto"
    friction: float = 0.1
    coupling: float = 1e-3
    num_samples: int = 1000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 10
    batch_size: int | None = 32
    preconditioner: str | None = None
    schedule: str = "constant"
    cycles: Any = None
    control_variates: str | None = None
    sampling: str = "independent"
    bias: float = 0.05
    num_search: int = 1000
    search_rate: float = 1e-2
    storage: str = "auto"
    precision: str = "auto"

    correct_noise: ClassVar[bool] = False
    card: ClassVar[Card] = Card(
        name="SGNHT",
        summary="SGHMC with a thermostat: gradient noise of unknown size is balanced by friction that adapts.",
        model_class="any model with a differentiable log joint, of any size",
        criterion="stationary distribution of discretised dynamics with a thermostat: off by a share of the order of the step size",
        search="mini-batch gradients with momentum, adaptive friction and injected noise",
        cost="one mini-batch gradient, one draw of noise and one sum over the momenta per step; one more copy of the parameters",
        needs="many parameters, whose momenta measure the temperature well; gradient noise alike in all directions",
        references=(
            "Ding et al., Bayesian sampling using stochastic gradient thermostats, 2014",
            "Leimkuhler and Shang, Adaptive thermostats for noisy gradient systems, 2016",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "coupling")
        self.check()

    def corrects(self) -> bool:
        """By its friction, whatever the batches."""
        return True

    def dynamics(self) -> Dynamics:
        return Dynamics(
            lambda params: init(params, self.friction),
            functools.partial(move, friction=self.friction, coupling=self.coupling),
            lambda inner, size: sghmc.kinetic(inner.velocity, size),
        )
