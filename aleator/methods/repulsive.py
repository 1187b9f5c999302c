"""RepulsiveEnsemble: a deep ensemble whose members push each other apart, so that they become draws of the posterior."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from aleator._typing import Key
from aleator.loop import Algorithm
from aleator.methods import svgd
from aleator.methods._method import Card, Method


def step(key: Key, state: svgd.State, joint: svgd.Joint, optimizer: Any, bandwidth: Any, space: str) -> tuple[svgd.State, svgd.Info]:
    """θᵢ ← θᵢ + update(∇log π(θᵢ) − Jᵢᵀ∇log Σⱼ k(pᵢ, pⱼ)): a gradient flow of the KL divergence in the space of distributions, with the
    particles' density replaced by a kernel density in the space p of the kernel."""
    import optax

    data, scores = joint.gradients(state.params)
    points = joint.features(state.params)
    square = svgd.distances(points)
    width = svgd.squared_width(square, bandwidth)
    moved = scores + joint.pull(state.params, svgd.repulsion(points, width))
    updates, optimizer_state = optimizer.update(-moved, state.optimizer, state.params)
    info = svgd.Info(jnp.mean(data), jnp.sqrt(width), jnp.sqrt(jnp.mean(square)))
    return svgd.State(optax.apply_updates(state.params, updates), optimizer_state, state.log_bandwidth), info


@dataclasses.dataclass(frozen=True)
class RepulsiveEnsemble(Method):
    """A repulsive deep ensemble (D'Angelo and Fortuin 2021): members θᵢ climb the log joint and repel one another by a kernel between their
    weights (space="weights") or between their outputs at the rows of the batch (space="function", the default: networks that are equal up to
    the order of their units count as equal).

    bandwidth: ℓ of k = exp(−|p − p′|²/ℓ²), "median" of the distances at every step, or a number. The members are taken as draws with equal weights. The
    other arguments are as in `al.MAP`.
    """

    num_particles: int = 10
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    bandwidth: Any = "median"
    space: str = "function"
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="RepulsiveEnsemble",
        summary="A deep ensemble with repulsion: its members spread over the posterior instead of falling into the same functions.",
        model_class="networks, and any differentiable log joint with space='weights'",
        criterion="KL divergence of the members' kernel density to the posterior",
        search="gradient ascent of all members at once, with repulsion",
        cost="one gradient per member and step (and one pass back for the repulsion); as many copies of the parameters",
        needs="members whose functions differ at the rows of the batches",
        references=("D'Angelo and Fortuin, Repulsive deep ensembles are Bayesian, 2021",),
    )

    def __post_init__(self) -> None:
        svgd.check(self)

    def build(self, target: Any) -> Algorithm:
        return svgd.build(self, target, step)
