"""SVGD: particles that follow the gradient of the density together and push each other apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _chains, _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Draws, Posterior

SPACES = ("weights", "function")
LEARNING = 0.05  # step of the logarithm of a learned bandwidth
REACH = 4.0  # how far log ℓ² may go from that of the median
TINY = 1e-12


class State(NamedTuple):
    """params (K, D): the particles. optimizer: its state. log_bandwidth: log ℓ², where it is learned."""

    params: Array
    optimizer: Any
    log_bandwidth: Array


class Info(NamedTuple):
    """log_likelihood: mean over the particles of (N/n)·Σ log p(yᵢ|xᵢ,θ) before the step. bandwidth: ℓ. distance: root mean square distance
    of the particles, in the space of the kernel."""

    log_likelihood: Array
    bandwidth: Array
    distance: Array


class Joint(NamedTuple):
    """The particles' density for one batch, on flat positions. gradients(params (K, D)) → (log-likelihoods (K,), scores (K, D)).
    features(params (K, D)) → (K, F): where the kernel looks, and pull(params, gradient (K, F)) → (K, D), its transposed Jacobian."""

    gradients: Callable[[Array], tuple[Array, Array]]
    features: Callable[[Array], Array]
    pull: Callable[[Array, Array], Array]


def distances(points: Array) -> Array:
    """|pᵢ − pⱼ|², (K, K)."""
    square = jnp.sum(points**2, axis=1)
    return jnp.maximum(square[:, None] + square[None] - 2.0 * points @ points.T, 0.0)


def median_bandwidth(square: Array) -> Array:
    """ℓ² = med|pᵢ − pⱼ|²/log(K + 1), so that Σⱼ k(pᵢ, pⱼ) is about K/(K + 1)."""
    return jnp.median(square) / math.log(square.shape[0] + 1.0) + TINY


def direction(points: Array, scores: Array, bandwidth: Array) -> Array:
    """φᵢ = (1/K)Σⱼ [k(pⱼ, pᵢ)sⱼ + ∇ⱼk(pⱼ, pᵢ)], k = exp(−|p − p′|²/ℓ²)."""
    kernel = jnp.exp(-distances(points) / bandwidth)
    number = points.shape[0]
    # ∇ⱼk(pⱼ, pᵢ) = (2/ℓ²)(pᵢ − pⱼ)k: away from the others.
    apart = 2.0 / bandwidth * (points * jnp.sum(kernel, axis=1, keepdims=True) - kernel @ points)
    return (kernel @ scores + apart) / number


def fit_of(points: Array, log_bandwidth: Array) -> Array:
    """The mean log density of each particle under the kernel density through the others, (1/K)Σᵢ log Σ_{j≠i} k(pᵢ, pⱼ)/((K − 1)(πℓ²)^{F/2}):
    a learned bandwidth climbs it."""
    number, size = points.shape
    exponent = -distances(points) / jnp.exp(log_bandwidth) - 1e30 * jnp.eye(number)
    return jnp.mean(jax.nn.logsumexp(exponent, axis=1)) - 0.5 * size * log_bandwidth


def step(key: Key, state: State, joint: Joint, optimizer: Any, bandwidth: Any, space: str) -> tuple[State, Info]:
    """θᵢ ← θᵢ + update(φᵢ).

    In weight space p = θ. In function space p = f(θ) at the rows of the batch. Scores of other particles mean nothing to one whose units
    are in another order, so each follows its own, weighted by Σⱼk/K as above, and the repulsion comes back through the network: up to that
    factor the step of `al.RepulsiveEnsemble`.
    """
    import optax

    data, scores = joint.gradients(state.params)
    points = joint.features(state.params)
    square = distances(points)
    log_bandwidth = state.log_bandwidth
    if bandwidth == "learned":
        slope = jax.grad(fit_of, argnums=1)(points, log_bandwidth)
        middle = jnp.log(median_bandwidth(square))
        log_bandwidth = jnp.clip(log_bandwidth + LEARNING * jnp.sign(slope), middle - REACH, middle + REACH)
        width = jnp.exp(log_bandwidth)
    else:
        width = squared_width(square, bandwidth)
    if space == "weights":
        moved = direction(points, scores, width)
    else:
        share = jnp.mean(jnp.exp(-square / width), axis=1, keepdims=True)
        moved = share * (scores + joint.pull(state.params, repulsion(points, width)))
    updates, optimizer_state = optimizer.update(-moved, state.optimizer, state.params)
    info = Info(jnp.mean(data), jnp.sqrt(width), jnp.sqrt(jnp.mean(square)))
    return State(optax.apply_updates(state.params, updates), optimizer_state, log_bandwidth), info


def squared_width(square: Array, bandwidth: Any) -> Array:
    """ℓ² of the kernel: from the median of the squared distances, or as given."""
    return median_bandwidth(square) if bandwidth == "median" else jnp.asarray(bandwidth**2, square.dtype)


def repulsion(points: Array, bandwidth: Array) -> Array:
    """−∇ᵢ log Σⱼ k(pᵢ, pⱼ): the score of a kernel density through the particles, turned round. (K, F)."""
    kernel = jnp.exp(-distances(points) / bandwidth)
    total = jnp.sum(kernel, axis=1, keepdims=True)
    return 2.0 / bandwidth * (points - kernel @ points / total)


@dataclasses.dataclass(frozen=True)
class SVGD(Method):
    """Stein variational gradient descent (Liu and Wang 2016): K = num_particles particles move by the φ that lowers KL(q, posterior) fastest
    among the functions of a kernel, φ(θ) = E_q[k(θ′, θ)∇log π(θ′) + ∇k(θ′, θ)].

    bandwidth: ℓ of k = exp(−|θ − θ′|²/ℓ²), "median" (of the distances, at every step), "learned" (the kernel density
    through the particles that fits them best, each left out in turn), or a
    number. space: "weights", or "function", where the kernel compares outputs at the rows of the batch, which no symmetry of the weights can
    fool. One particle is MAP. The particles of a wide posterior in many dimensions are too close together: SVGD with fewer particles than
    parameters underestimates variances. The other arguments are as in `al.MAP`.
    """

    num_particles: int = 20
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    bandwidth: Any = "median"
    space: str = "weights"
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="SVGD",
        summary="A set of particles that share the work of covering the posterior: an ensemble whose members keep apart.",
        model_class="any model with a differentiable log joint",
        criterion="Stein's operator under a kernel: the particles' KL divergence falls as fast as the kernel allows",
        search="gradients of the log joint, smoothed over the particles, plus repulsion",
        cost="one gradient per particle and step, and K² distances; K copies of the parameters",
        needs="more particles than directions that matter, or a kernel between functions",
        references=(
            "Liu and Wang, Stein variational gradient descent, 2016",
            "Wang et al., Function space particle optimization for Bayesian neural networks, 2019",
        ),
    )

    def __post_init__(self) -> None:
        check(self)

    def build(self, target: Any) -> Algorithm:
        return build(self, target, step)


def check(method: Any) -> None:
    """Refuse what neither kind of particles can use."""
    check_positive(method, "num_particles", "num_steps", "batch_size", whole=True)
    check_positive(method, "learning_rate", "clip")
    named = ("median", "learned") if isinstance(method, SVGD) else ("median",)
    if method.bandwidth not in named:
        if isinstance(method.bandwidth, str):
            raise MethodError(message("Unknown bandwidth.", repr(method.bandwidth), f"one of {named}, or a number > 0", "choose one"))
        check_positive(method, "bandwidth")
    if method.space not in SPACES:
        raise MethodError(message("Unknown space.", repr(method.space), f"one of {SPACES}", "choose one of them"))
    if method.space == "function" and method.bandwidth == "learned":
        raise MethodError(message("No bandwidth to learn here.", "'learned' in function space", "'median' or a number", "choose one"))
    if method.optimizer == "lbfgs":
        raise MethodError(message("Particles have no objective to search along.", "'lbfgs'", "'adam' or 'sgd'", "use 'adam'"))
    _optimise.check_optimizer(method)


def build(method: Any, target: Any, step: Callable) -> Algorithm:
    """The algorithm of particles that move together: one state holds all of them."""
    _chains.check_target(method, target)
    if method.space == "function" and (target.model is None or target.rows() is None or not getattr(target.model, "minibatch", True)):
        raise MethodError(message("There are no functions to compare.", "a density without inputs", "a network", "pass space='weights'"))
    layout, optimizer = _chains.flat_layout(target), _optimise.optimizer(method)

    def joint_of(batch: Batch | None) -> Joint:
        def one(flat: Array) -> tuple[Array, Array]:
            prior, data = target.parts(layout.unravel(flat), batch)
            return (prior + data) / target.temperature, data

        def gradients(params: Array) -> tuple[Array, Array]:
            scores, data = jax.vmap(jax.grad(one, has_aux=True))(params)
            return data, scores

        if method.space == "weights":
            return Joint(gradients, lambda params: params, lambda params, gradient: gradient)
        function = lambda flat: _tree.flat(target.outputs(layout.unravel(flat), batch.x))  # type: ignore[union-attr]
        pull = lambda params, gradient: jax.vmap(lambda p, g: jax.vjp(function, p)[1](g)[0])(params, gradient)
        return Joint(gradients, jax.vmap(function), pull)

    def init(key: Key, starts: Tree) -> State:
        params = jax.vmap(layout.ravel)(starts)
        width = jnp.log(median_bandwidth(distances(params)))
        return State(params, optimizer.init(params), width)

    def one_step(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
        return step(key, state, joint_of(batch), optimizer, method.bandwidth, method.space)

    def finish(key: Key, state: State, kept: Any) -> Posterior:
        return Draws(layout.unravel_all(np.asarray(state.params)))

    batches = None if target.model is None else "full" if method.batch_size is None else "random"
    return Algorithm(
        init=init,
        phases=(Phase(type(method).__name__, one_step, method.num_steps, batches, method.batch_size),),
        position=lambda state: layout.unravel(state.params[0]),
        finish=finish,
        starts=method.num_particles,
        watch="log_likelihood",
        verdict=lambda result: _verdict(result, method),
        notes={"departures": _chains.tempered(target)},
    )


def _verdict(result: Any, method: Any) -> tuple[str, bool, dict[str, float]]:
    distance, width = (float(result.traces[name][-1]) for name in ("distance", "bandwidth"))
    health = {"distance": distance, "bandwidth": width}
    if method.num_particles > 1 and not distance > 1e-3 * max(float(result.traces["distance"][0]), TINY):
        return "The particles have collapsed onto one another: raise the bandwidth or lower learning_rate.", False, health
    return f"Complete: {result.steps} steps, particles {distance:.3g} apart (root mean square).", True, health
