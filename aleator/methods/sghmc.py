"""SGHMC: Hamiltonian dynamics with friction and mini-batch gradients, which momentum averages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.methods._method import Card
from aleator.methods._stochastic import Dynamics, StochasticMethod, normals


def init(params: Tree) -> Tree:
    """The momentum, in units of a step of θ: v = εp with ε² = h/2. At rest."""
    return jax.tree.map(jnp.zeros_like, params)


def move(key: Key, params: Tree, inner: Tree, gradient: Tree, size: Tree, excess: Tree, heat: Any, friction: float) -> tuple[Tree, Tree]:
    """v ← (1 − α)v − (h/2)G∇U + √(αhG − ¼(hG)²V)·ξ,  θ ← θ + v.

    On a Gaussian of variance λ the positions are an autoregression of order two, whose stationary variance is
    λ/(1 − h/(4λ(2 − α))), and (αh + h²ν²/4)(2 − α)/(αk(2(2 − α) − k)), k = h/2λ, with gradient noise ν² that is not corrected for.
    α = 1 is SGLD.
    """

    def push(v: Array, g: Array, h: Array, e: Array, z: Array) -> Array:
        return (1.0 - friction) * v - 0.5 * h * g + jnp.sqrt(heat * jnp.maximum(friction * h - e, 0.0)) * z

    velocity = jax.tree.map(push, inner, gradient, size, excess, normals(key, params))
    return jax.tree.map(jnp.add, params, velocity), velocity


def kinetic(velocity: Tree, size: Tree) -> Array:
    """The mean of v²/(hG/2): the temperature of momenta of variance hG/2 each."""
    return _tree.sum_leaves(jax.tree.map(lambda v, h: v**2 / jnp.maximum(0.5 * h, 1e-30), velocity, size)) / _tree.size(velocity)


class Momentum(StochasticMethod):
    """Base of the samplers with momentum. friction: α in (0, 1], the share of it lost per step."""

    friction: float

    def check(self) -> None:
        if not (isinstance(self.friction, (int, float)) and not isinstance(self.friction, bool) and 0.0 < self.friction <= 1.0):
            name = type(self).__name__
            expected = "the share of momentum lost per step, in (0, 1]"
            raise MethodError(message(f"{name}.friction cannot be used.", repr(self.friction), expected, "pass e.g. friction=0.1"))
        super().check()

    @property
    def bias_factor(self) -> float:  # type: ignore[override]
        return 2.0 - self.friction

    @property
    def room(self) -> float:  # type: ignore[override]
        return self.friction


@dataclasses.dataclass(frozen=True)
class SGHMC(Momentum):
    """Stochastic-gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014): v ← (1 − α)v − (h/2)∇̂U + √(αh)·ξ, θ ← θ + v.

    friction: α in (0, 1], the share of momentum lost per step; 1 is SGLD with the same step_size. Momentum carries θ some h/α·|∇U|/2 a step,
    so that h should be smaller than for SGLD where α is small. The draws of a Gaussian of variance λ have variance λ/(1 − h/(4λ(2 − α))).
    Everything else: see `al.SGLD`.
    """

    step_size: Any = "auto"
    friction: float = 0.1
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
    correct_noise: bool = True
    bias: float = 0.05
    num_search: int = 1000
    search_rate: float = 1e-2
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="SGHMC",
        summary="Langevin dynamics with momentum: travels further for each mini-batch gradient than SGLD.",
        model_class="any model with a differentiable log joint, of any size",
        criterion="stationary distribution of discretised underdamped Langevin dynamics: off by a share of the order of the step size",
        search="mini-batch gradients with momentum, friction and injected noise",
        cost="one mini-batch gradient and one draw of noise per step; one more copy of the parameters",
        needs="a step size small against the narrowest direction of the posterior",
        references=(
            "Chen, Fox and Guestrin, Stochastic gradient Hamiltonian Monte Carlo, 2014",
            "Zhang et al., Cyclical stochastic gradient MCMC for Bayesian deep learning, 2020",
        ),
    )

    def __post_init__(self) -> None:
        self.check()

    def dynamics(self) -> Dynamics:
        # Noise αh against a loss of 1 − (1 − α)² leaves free momenta with variance h/(2 − α), not h/2.
        temperature = lambda velocity, size: (1.0 - 0.5 * self.friction) * kinetic(velocity, size)
        return Dynamics(init, functools.partial(move, friction=self.friction), temperature)
