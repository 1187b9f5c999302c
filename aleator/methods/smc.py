"""SMC: a cloud of particles carried from the prior to the posterior; the log evidence comes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import convergence
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _chains as chains
from aleator.methods import _hamiltonian as hmc
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._moves import along, check_share, halves, has_reference, log_mean, shrunk_factor, spread
from aleator.methods.random_walk import best_step
from aleator.methods.tempering import pooled
from aleator.posterior import Draws, Posterior, Score

BLOCK = 1024  # particles evaluated at once
HALVINGS = 50  # of the interval in which the next β is sought
MOVES = ("random_walk", "hmc")
RHAT = 1.05  # particles of independent runs differ more than this: the runs do not agree


class State(NamedTuple):
    """particles (P, D). reference, rest (P,): r and ℓ of each. beta: where on the path. log_evidence: log Ẑ so far. variance: Σ of the
    squared relative errors of its factors. log_step: of the moves. acceptance: of the last ones. evaluations, outside, undefined: so far.
    ancestors (P,): which of the first particles each descends from. metric: of the moves, from the cloud. moves: left in this stage.
    arrived: at β = 1, with all moves made."""

    particles: Array
    reference: Array
    rest: Array
    beta: Array
    log_evidence: Array
    variance: Array
    log_step: Array
    acceptance: Array
    evaluations: Array
    outside: Array
    undefined: Array
    ancestors: Array
    metric: hmc.Metric
    moves: Array
    arrived: Array


class Info(NamedTuple):
    """Of one move of all particles, as in State."""

    log_evidence: Array
    beta: Array
    acceptance: Array


def next_beta(beta: Array, rest: Array, wanted: float) -> Array:
    """The β ≤ 1 at which the weights e^{(β′ − β)ℓ} have an effective sample size of `wanted`·P, by bisection; 1 where they keep more."""
    size = lambda new: effective(jnp.where(jnp.isneginf(rest), -jnp.inf, (new - beta) * rest)) / len(rest)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        enough = size(middle) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    one = jnp.ones_like(beta)
    # Where too many particles are at ℓ = −∞ no β > 0 keeps the size: the smallest step there is leaves them behind.
    _, high = jax.lax.fori_loop(0, HALVINGS, halve, (beta, one))
    return jnp.where(size(one) >= wanted, one, jnp.maximum(high, beta + jnp.finfo(beta.dtype).eps))


def effective(log_weights: Array) -> Array:
    """(Σw)²/Σw²."""
    return jnp.exp(2.0 * jax.nn.logsumexp(log_weights) - jax.nn.logsumexp(2.0 * log_weights))


def systematic(key: Key, log_weights: Array) -> Array:
    """P row numbers, each expected P·w times and there within one of it: one uniform number for all."""
    size = len(log_weights)
    cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (jnp.arange(size) + jax.random.uniform(key, (), log_weights.dtype)) / size
    return jnp.minimum(jnp.searchsorted(cumulative, points * cumulative[-1], side="right"), size - 1)


def spread_of(particles: Array, log_weights: Array, dense: bool) -> hmc.Metric:
    """The covariance of weighted particles as a metric."""
    weight = jax.nn.softmax(log_weights)
    centred = particles - weight @ particles
    variance = weight @ centred**2
    scale = jnp.where(variance > 0.0, jnp.sqrt(variance), 1.0)
    if not dense:
        return hmc.Metric(scale)
    factor = shrunk_factor((weight[:, None] * centred).T @ centred, effective(log_weights))
    good = jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.diagonal(factor) > 0.0)
    return hmc.Metric(scale, factor=jnp.where(good, factor, jnp.diag(scale)))


@dataclasses.dataclass(frozen=True)
class SMC(Method):
    """Adaptive tempered sequential Monte Carlo over π_β ∝ p(θ)·p(D|θ)^β, β from 0 to 1.

    Each stage takes the next β at which the weights keep an effective sample size of ess·num_particles, resamples (systematic), and moves
    every particle num_moves times by a random walk ("random_walk") or by trajectories of num_leapfrog steps ("hmc") in the covariance of
    the cloud, the step size following the acceptance. log p(D) is the sum of the logarithms of the mean weights. num_runs independent
    runs give its standard error; their particles are the draws, weighted by the runs' evidence. num_moves=None: 4·D, from 10 to 100, for
    random walks, 4 for trajectories. max_stages: after so many it gives up.
    """

    num_particles: int = 1000
    num_runs: int = 8
    ess: float = 0.5
    move: str = "random_walk"
    num_moves: int | None = None
    num_leapfrog: int = 8
    max_stages: int = 200
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="SMC",
        summary="Posterior draws and the log evidence at once, with a standard error; several modes are no obstacle.",
        model_class="any model one can draw from the prior of; up to some 100 parameters (more with hmc moves)",
        criterion="the exact posterior and evidence, as the number of particles grows",
        search="weighting, resampling and moving particles along a path of powers of the likelihood",
        cost="num_runs × num_particles × num_moves densities per stage, some 10 to 30 stages, stacked",
        needs="draws from the prior (or from a bare density's reference), all the data in memory",
        references=(
            "Del Moral, Doucet and Jasra, Sequential Monte Carlo samplers, 2006",
            "Jasra, Stephens, Doucet and Tsagaris, Inference for Lévy-driven stochastic volatility models via adaptive SMC, 2011",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_particles", "num_runs", "num_moves", "num_leapfrog", "max_stages", whole=True)
        check_share(self, "ess")
        if self.move not in MOVES:
            raise MethodError(message("Unknown move.", repr(self.move), f"one of {MOVES}", "choose one of them"))
        chains.check_precision(self)

    def build(self, target: Any) -> Algorithm:
        if not has_reference(target):
            target.log_prior(None)  # says what is missing
        x64, layout = chains.prepare(self, target)
        size, number = len(layout.names), self.num_particles
        dense = 4 * size <= number
        walking = self.move == "random_walk"
        num_moves = self.num_moves or (int(np.clip(4 * size, 10, 100)) if walking else 4)
        batches = None if target.model is None else "full"

        def evaluate(batch: Batch | None) -> Callable[[Array], tuple[Array, Array]]:
            """(P, D) → r and ℓ (P,), NaN kept for counting."""
            return _mapped(halves(target, layout, chains.bind(target, layout, batch)), number)

        def init(key: Key, params: Tree) -> State:
            kind = layout.ravel(params).dtype
            zero, none, each = jnp.zeros((), kind), jnp.zeros((), jnp.int32), jnp.zeros(number, kind)
            metric = hmc.Metric(jnp.ones(size, kind), factor=jnp.eye(size, dtype=kind) if dense else None)
            first = zero + np.log(best_step(size) if walking else 0.5 / size**0.25)
            cloud = jnp.zeros((number, size), kind)
            return State(
                cloud, each, each, zero, zero, zero, first, zero, none, none, none, jnp.arange(number), metric, none, jnp.asarray(False)
            )

        def start(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            draw = lambda k: layout.ravel(target.sample_prior(k)).astype(state.particles.dtype)
            particles = jax.vmap(draw)(jax.random.split(key, number))
            reference, rest = evaluate(batch)(particles)
            state = state._replace(
                particles=particles,
                reference=reference,
                rest=chains.safe(rest),
                evaluations=state.evaluations + number,
                **chains.count_bad(rest),
            )
            return state, Info(state.log_evidence, state.beta, state.acceptance)

        def step(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            """One move of all particles, unless they have arrived."""
            state = jax.lax.cond(state.arrived, lambda: state, lambda: moved(key, state, batch))
            return state, Info(state.log_evidence, state.beta, state.acceptance)

        def moved(key: Key, state: State, batch: Batch | None) -> State:
            """Before the first move of a stage the particles are weighted and resampled."""
            key_resample, key_move = jax.random.split(key)
            begin = lambda: stage(key_resample, state, self.ess, dense)._replace(moves=jnp.asarray(num_moves, jnp.int32))
            state = jax.lax.cond(state.moves == 0, begin, lambda: state)
            if walking:
                state = walk(key_move, state, evaluate(batch))
            else:
                split = halves(target, layout, chains.bind(target, layout, batch))
                state = trajectory(key_move, state, split, self.num_leapfrog)
            left = state.moves - 1
            return state._replace(moves=left, arrived=(state.beta >= 1.0) & (left == 0))

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            values, errors = np.asarray(state.log_evidence, np.float64), np.sqrt(np.asarray(state.variance, np.float64))
            share = np.exp(values - values.max())
            weights = np.repeat(share / share.sum() / number, number)
            evidence = pooled([Score(v, e, "estimate") for v, e in zip(values, errors, strict=True)]) if target.temperature == 1.0 else None
            return Draws(layout.unravel_all(np.asarray(state.particles)), weights, evidence)

        return Algorithm(
            init=init,
            phases=(Phase("prior", start, 1, batches), Phase("tempering", step, self.max_stages * num_moves, batches)),
            position=lambda state: jax.vmap(layout.unravel)(state.particles),
            finish=finish,
            done=lambda state: state.arrived,
            members=self.num_runs,
            apart=True,
            watch="log_evidence",
            verdict=lambda result: verdict(result, self, target.temperature),
            x64=x64,
            notes={"departures": chains.tempered(target)},
        )


def stage(key: Key, state: State, wanted: float, dense: bool) -> State:
    """The next β: weights, evidence, the cloud's covariance, resampling."""
    number = len(state.rest)
    beta = next_beta(state.beta, state.rest, wanted)
    log_weights = jnp.where(jnp.isneginf(state.rest), -jnp.inf, (beta - state.beta) * state.rest)
    chosen = systematic(key, log_weights)
    return state._replace(
        particles=state.particles[chosen],
        reference=state.reference[chosen],
        rest=state.rest[chosen],
        ancestors=state.ancestors[chosen],
        beta=beta,
        log_evidence=state.log_evidence + log_mean(log_weights),
        # Var(w̄)/w̄² = (P/ESS − 1)/P.
        variance=state.variance + (number / effective(log_weights) - 1.0) / number,
        metric=spread_of(state.particles, log_weights, dense),
    )


def walk(key: Key, state: State, evaluate: Callable[[Array], tuple[Array, Array]]) -> State:
    """One random-walk step of every particle at the current β."""
    key_noise, key_accept = jax.random.split(key)
    noise = jax.random.normal(key_noise, state.particles.shape, state.particles.dtype)
    proposals = state.particles + jnp.exp(state.log_step) * jax.vmap(lambda z: spread(state.metric, z))(noise)
    reference, rest = evaluate(proposals)
    value = reference + state.beta * rest
    ratio = chains.safe(value) - (state.reference + state.beta * state.rest)
    wanted = 0.44 if state.particles.shape[1] == 1 else 0.234
    return _taken(key_accept, state, proposals, reference, rest, ratio, value, wanted, 1)


def trajectory(key: Key, state: State, split: Callable, num_leapfrog: int) -> State:
    """One Hamiltonian trajectory of every particle at the current β, of a random length up to num_leapfrog steps of a common size."""
    key_momentum, key_length, key_accept = jax.random.split(key, 3)

    def value(q: Array) -> Array:
        reference, rest = split(q)
        return along(reference, rest, state.beta)

    density = chains.Density(value, jax.value_and_grad(value), split, lambda q: q)
    metric = state.metric
    length = jax.random.randint(key_length, (), num_leapfrog // 2 + 1, num_leapfrog + 1)

    def one(inputs: tuple[Key, Array]) -> tuple[Array, Array, Array, Array, Array]:
        k, position = inputs
        momentum = hmc.draw_momentum(k, metric)
        log_density, gradient = density.value_and_grad(position)
        energy = hmc.kinetic(metric, momentum) - log_density
        first = hmc.Phase(position, momentum, log_density, gradient)
        there = jax.lax.fori_loop(0, length, lambda _, at: hmc.leapfrog(density, metric, jnp.exp(state.log_step), at), first)
        ratio = energy - (hmc.kinetic(metric, there.momentum) - there.log_density)
        return (there.position, *split(there.position), ratio, there.log_density)

    number = len(state.particles)
    keys = jax.random.split(key_momentum, number)
    proposals, reference, rest, ratio, values = _mapped(one, number)((keys, state.particles))
    return _taken(key_accept, state, proposals, reference, rest, chains.safe(ratio), values, 0.8, length + 1)


def _mapped(function: Callable, number: int) -> Callable:
    """Over so many particles: all at once, or in blocks where there are many."""
    return jax.vmap(function) if number <= BLOCK else lambda inputs: jax.lax.map(function, inputs, batch_size=BLOCK)


def _taken(
    key: Key, state: State, proposals: Array, reference: Array, rest: Array, ratio: Array, value: Array, wanted: float, evaluations: Any
) -> State:
    """The particles after accepting with e^ratio; the common step follows the mean acceptance."""
    take = jnp.log(jax.random.uniform(key, ratio.shape, ratio.dtype)) < ratio
    acceptance = jnp.mean(jnp.exp(jnp.minimum(ratio, 0.0)))
    bad = chains.count_bad(value)
    return state._replace(
        particles=jnp.where(take[:, None], proposals, state.particles),
        reference=jnp.where(take, reference, state.reference),
        rest=jnp.where(take, rest, state.rest),
        acceptance=acceptance,
        log_step=state.log_step + 0.5 * (acceptance - wanted),
        evaluations=state.evaluations + len(take) * jnp.asarray(evaluations, jnp.int32),
        outside=state.outside + bad["outside"],
        undefined=state.undefined + bad["undefined"],
    )


def verdict(result: Any, method: SMC, temperature: float) -> tuple[str, bool, dict[str, Any]]:
    """Did all runs arrive, and do they agree?"""
    state = result.state
    beta, values = np.asarray(state.beta), np.asarray(state.log_evidence, np.float64)
    particles = np.asarray(state.particles, np.float64)
    families = np.mean([len(np.unique(row)) for row in np.asarray(state.ancestors)]) / method.num_particles
    health = {
        "rhat": float(np.nanmax(convergence.rhat(particles))) if len(values) > 1 else np.nan,
        "log_evidence_runs": [float(value) for value in values],
        "acceptance": float(np.mean(state.acceptance)),
        "families": float(families),
        "evaluations": int(np.sum(np.asarray(state.evaluations, np.int64))),
        "outside": int(np.sum(state.outside)),
        "undefined": int(np.sum(state.undefined)),
        "draws": particles.shape[0] * particles.shape[1],
    }
    if beta.min() < 1.0:
        return f"Stopped at β = {beta.min():.3g} after {method.max_stages} stages: raise max_stages, or tighten the prior.", False, health
    if health["undefined"]:
        share = health["undefined"] / max(1, health["evaluations"])
        sentence = (
            f"The log density was NaN at {health['undefined']} of {health['evaluations']} evaluations ({share:.1%}): these points were treated "
            "as impossible; guard the log, root or division that fails there."
        )
        return sentence, False, health
    constant = chains.constant(temperature)
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if health["rhat"] > RHAT or spread > 1.0:
        return (
            f"The runs do not agree: R-hat {health['rhat']:.3f}, {constant} differing by {spread:.2f} nats: raise num_particles or num_moves.",
            False,
            health,
        )
    sentence = (
        f"Complete: {constant} {values.mean():.3f}, runs differing by {spread:.3f} nats, acceptance {health['acceptance']:.2f}, "
        f"{families:.0%} of the first particles have descendants."
    )
    return sentence, True, health
