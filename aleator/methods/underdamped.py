"""Underdamped: Langevin dynamics with momentum by a symmetric splitting, exact for Gaussians at any stable step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from aleator._typing import Array, Key, Tree
from aleator.methods import sghmc
from aleator.methods._method import Card
from aleator.methods._stochastic import Dynamics, normals


def move(
    key: Key, params: Tree, inner: Tree, gradient: Tree, size: Tree, excess: Tree, heat: Any, friction: Any, gain: float
) -> tuple[Tree, Tree]:
    """One turn of BAOAB, begun at the kick so that it takes one gradient: with c = 1 − α,

    B: v ← v − (h/2)G∇U(θ),  A: θ ← θ + v/2,  O: v ← cv + √(a·hG/2 − c²·¼(hG)²V)·ξ,  A: θ ← θ + v/2,

    gain a = 1 − c² for all but a thermostat.

    The positions are those of BAOAB (Leimkuhler and Matthews 2013). On a Gaussian of variance λ their stationary variance is λ exactly
    while h < 8λ.
    """
    keep = 1.0 - friction

    def turn(p: Array, v: Array, g: Array, h: Array, e: Array, z: Array) -> tuple[Array, Array]:
        kicked = v - 0.5 * h * g
        after = keep * kicked + jnp.sqrt(heat * jnp.maximum(0.5 * gain * h - keep**2 * e, 0.0)) * z
        return p + 0.5 * (kicked + after), after

    both = jax.tree.map(turn, params, inner, gradient, size, excess, normals(key, params))
    pick = lambda which: jax.tree.map(lambda _, pair: pair[which], params, both)
    return pick(0), pick(1)


def exact_gain(friction: float) -> float:
    """1 − c²: the noise that keeps momenta of variance hG/2 as they are."""
    return 1.0 - (1.0 - friction) ** 2


@dataclasses.dataclass(frozen=True)
class Underdamped(sghmc.Momentum):
    """Underdamped Langevin dynamics with mini-batch gradients, by the splitting BAOAB: kick, half a drift, momentum partly refreshed, half
    a drift. One gradient a step, as SGHMC, and a far smaller bias: none at all on Gaussians with exact gradients.

    friction: α in (0, 1], the share of momentum lost per step. Everything else: see `al.SGLD`.
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
        name="Underdamped",
        summary="Langevin dynamics with momentum by a symmetric splitting: the smallest bias of the stochastic-gradient samplers.",
        model_class="any model with a differentiable log joint, of any size",
        criterion="stationary distribution of BAOAB: exact positions for Gaussians, off by a share of the order of the step size squared elsewhere",
        search="mini-batch gradients with momentum, friction and injected noise",
        cost="one mini-batch gradient and one draw of noise per step; one more copy of the parameters",
        needs="a step size small against the narrowest direction of the posterior",
        references=(
            "Leimkuhler and Matthews, Rational construction of stochastic numerical methods for molecular sampling, 2013",
            "Leimkuhler and Shang, Adaptive thermostats for noisy gradient systems, 2016",
        ),
    )

    def __post_init__(self) -> None:
        self.check()

    def dynamics(self) -> Dynamics:
        return Dynamics(sghmc.init, functools.partial(move, friction=self.friction, gain=exact_gain(self.friction)), sghmc.kinetic)
