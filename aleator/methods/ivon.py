"""IVON: mean-field variational inference by natural gradients, at the cost of Adam."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.linalg import Diagonal
from aleator.loop import Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.noise import normal_tree
from aleator.posterior import Gaussian
from aleator.priors import Normal


class State(NamedTuple):
    """mean m, momentum g and curvature h, each like the parameters (one flat vector for small models); step: how many were made."""

    mean: Tree
    momentum: Tree
    curvature: Tree
    step: Array


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θ) at the step's draws."""

    log_likelihood: Array


class Problem(NamedTuple):
    """What a step needs of the target. number: N, at least 1. decay, centre: δ = 1/(N s²) and m₀ of a Normal prior, one number per leaf, 0
    where the prior is part of the loss instead. extra: params → the part of the log prior that is in the loss."""

    target: Any
    number: int
    decay: Tree
    centre: Tree
    extra: Callable[[Tree], Array]
    packing: _optimise.Packing


def init(key: Key, start: Tree, problem: Problem, method: IVON) -> State:
    packed = problem.packing.pack(start)
    fill = lambda value: jax.tree.map(lambda leaf: jnp.full_like(leaf, value), packed)
    return State(packed, fill(0.0), fill(method.hess_init), jnp.zeros((), jnp.int32))


def step(key: Key, state: State, batch: Batch | None, problem: Problem, method: IVON, rate: Callable) -> tuple[State, Info]:
    """With loss ℓ = −(log-likelihood + extra)/N and θ = m + σz, σ² = T/(N(h + δ)):

    ĝ = ∇ℓ(θ),  ĥ = ĝ·z/σ (its mean is E ∇²ℓ, by Price's theorem),  g ← β₁g + (1 − β₁)ĝ,
    h ← β₂h + (1 − β₂)ĥ + ½(1 − β₂)²(h − ĥ)²/(h + δ), which keeps h + δ positive,
    m ← m − η·(g/(1 − β₁ᵗ) + δ(m − m₀))/(h + δ), each entry of the step within ±η·clip_radius.
    """
    target, b1, b2 = problem.target, method.beta1, method.beta2
    like = problem.packing.unpack(state.mean)
    decay, centre = (_spread(values, like, problem.packing) for values in (problem.decay, problem.centre))
    scale = jax.tree.map(lambda h, d: jnp.sqrt(target.temperature / (problem.number * (h + d))), state.curvature, decay)

    def loss(params: Tree, network_key: Key | None) -> tuple[Array, Array]:
        data = target.parts(params, batch, network_key)[1]
        return -(data + problem.extra(params)) / problem.number, data

    def one(pair: Key) -> tuple[Tree, Tree, Array]:
        key_noise, key_network = jax.random.split(pair)
        z = normal_tree(key_noise, state.mean)
        theta = problem.packing.unpack(jax.tree.map(lambda m, s, e: m + s * e, state.mean, scale, z))
        gradient, data = jax.grad(loss, has_aux=True)(theta, key_network if target.stochastic else None)
        gradient = problem.packing.pack(gradient)
        return gradient, jax.tree.map(lambda g, e, s: g * e / s, gradient, z, scale), data

    if method.num_draws == 1:
        gradient, curvature, data = one(key)
    else:
        many = jax.vmap(one)(jax.random.split(key, method.num_draws))
        gradient, curvature, data = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), many)
    momentum = jax.tree.map(lambda g, new: b1 * g + (1 - b1) * new, state.momentum, gradient)
    curved = lambda h, new, d: b2 * h + (1 - b2) * new + 0.5 * (1 - b2) ** 2 * (h - new) ** 2 / (h + d)
    curvature = jax.tree.map(curved, state.curvature, curvature, decay)
    bias, eta = (1.0 - b1 ** (state.step + 1) if method.debias else 1.0), rate(state.step)

    def move(m: Array, g: Array, h: Array, d: Array, m0: Array) -> Array:
        direction = (g / bias + d * (m - m0)) / (h + d)
        return m - eta * (direction if method.clip_radius is None else jnp.clip(direction, -method.clip_radius, method.clip_radius))

    mean = jax.tree.map(move, state.mean, momentum, curvature, decay, centre)
    return State(mean, momentum, curvature, state.step + 1), Info(data)


@dataclasses.dataclass(frozen=True)
class IVON(Method):
    """q = N(m, T/(N(h + δ))), independent entries, by the improved variational online Newton method (Shen et al. 2024).

    The curvature h of the loss is learned from the gradients at draws of q, so a step costs one gradient, and the means move by h⁻¹ as in
    Newton's method. δ = 1/(N s²) is the precision of a Normal prior on the network's weights. Every other prior is put into the loss, with
    δ = 0 (noted in manifest["prior"]); so are the priors of likelihood parameters. hess_init: h at the start; large is cautious. beta2: how
    slowly h follows, in about 1/(1 − beta2) steps. clip_radius: the largest entry of a Newton step. batch_size, schedule: as in `al.MAP`.
    """

    num_steps: int = 4000
    batch_size: int | None = None
    learning_rate: float = 0.1
    schedule: str = "cosine"
    num_draws: int = 1
    beta1: float = 0.9
    beta2: float = 0.999
    hess_init: float = 1.0
    clip_radius: float | None = None
    debias: bool = True

    card: ClassVar[Card] = Card(
        name="IVON",
        summary="Mean-field uncertainty for large networks at the price of an Adam run.",
        model_class="any model with a differentiable log-likelihood",
        criterion="evidence lower bound of independent Gaussians",
        search="natural gradients with a running estimate of the curvature",
        cost="one gradient per step and draw; three copies of the parameters",
        needs="a log joint that is finite at draws around the start; a Normal prior for the exact weight decay",
        references=("Shen et al., Variational learning is effective for large deep networks, 2024",),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "num_draws", whole=True)
        check_positive(self, "learning_rate", "hess_init", "clip_radius")
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0):
            got = f"beta1={self.beta1}, beta2={self.beta2}"
            raise MethodError(message("IVON averages need weights below one.", got, "0 ≤ beta < 1", "pass e.g. beta1=0.9, beta2=0.999"))
        _optimise.schedule(self)

    def build(self, target: Any) -> Algorithm:
        made = _optimise.schedule(self)
        rate = made if callable(made) else (lambda number: made)
        problem, said = _problem(target)
        position = lambda state: problem.packing.unpack(state.mean)
        batches = None if target.model is None else "full" if self.batch_size is None else "random"
        one_step = lambda key, state, batch: step(key, state, batch, problem, self, rate)
        cold = target.temperature
        return Algorithm(
            init=lambda key, start: init(key, start, problem, self),
            phases=(Phase("IVON", one_step, self.num_steps, batches, self.batch_size),),
            position=position,
            finish=lambda key, state, kept: _posterior(state, problem),
            watch="log_likelihood",
            notes={"prior": said, "departures": [] if cold == 1.0 else [f"temperature {cold}: q approximates the posterior raised to 1/T"]},
        )


def _problem(target: Any) -> tuple[Problem, str]:
    """Which part of the prior is weight decay and which is in the loss."""
    template = jax.eval_shape(target.init, jax.random.key(0))
    number, packing = max(target.num_data, 1), _optimise.packing(template)
    zeros = jax.tree.map(lambda leaf: 0.0, template)
    prior = getattr(target.model, "prior", None)
    if isinstance(prior, Normal) and isinstance(template, dict) and "network" in template:
        scales = prior.scales(template["network"], target.model.fan_in(template["network"]))
        decay = {**zeros, "network": jax.tree.map(lambda s: 1.0 / (number * s**2), scales)}
        centre = {**zeros, "network": jax.tree.map(lambda s: float(prior.loc), scales)}
        extra = lambda params: target.model.likelihood.log_prior_extra(params["likelihood"])
        return Problem(target, number, decay, centre, extra, packing), "Normal prior of the weights as weight decay"
    # A bare density has no prior apart from itself.
    extra = target.log_prior if target.model is not None else (lambda params: jnp.zeros(()))
    return Problem(target, number, zeros, zeros, extra, packing), "prior in the loss: its curvature is estimated with the likelihood's"


def _spread(values: Tree, like: Tree, packing: _optimise.Packing) -> Tree:
    """One number per leaf → arrays as the state has them."""
    return packing.pack(jax.tree.map(lambda leaf, value: jnp.full_like(leaf, value), like, values))


def _posterior(state: State, problem: Problem) -> Gaussian:
    mean = problem.packing.unpack(state.mean)
    decay = _spread(problem.decay, mean, problem.packing)
    precision = jax.tree.map(lambda h, d: problem.number * (h + d) / problem.target.temperature, state.curvature, decay)
    scale = jnp.concatenate([jnp.ravel(leaf) ** -0.5 for leaf in jax.tree.leaves(problem.packing.unpack(precision))])
    return Gaussian(mean, Diagonal(scale), (True,) * len(jax.tree.leaves(mean)))
