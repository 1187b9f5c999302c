"""What Hamiltonian samplers share: metrics, the leapfrog step, and adaptation of step size and metric during warm-up.

H(q, p) = −log π(q) + ½ pᵀM⁻¹p. The metric M⁻¹ is an estimate of the posterior covariance: diagonal s², dense LLᵀ, or low rank
D(I + V(Λ − I)Vᵀ)D, so that transitions see a posterior of about unit scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods._chains import Density
from aleator.methods._method import check_positive

METRICS = ("identity", "diagonal", "dense", "low_rank")
RANK = 16  # directions of a low-rank metric
RECENT = 128  # draws they are estimated from
DIVERGENCE = 1000.0  # nats of energy error at which a trajectory is given up


class Phase(NamedTuple):
    """A point of phase space. position, momentum, gradient (D,); log_density scalar."""

    position: Array
    momentum: Array
    log_density: Array
    gradient: Array


class Metric(NamedTuple):
    """M⁻¹ = diag(scale)·(I + V(Λ − I)Vᵀ)·diag(scale), or LLᵀ where a factor is given. scale (D,); factor (D, D) or None; vectors (D, R)
    and values (R,) or None."""

    scale: Array
    factor: Array | None = None
    vectors: Array | None = None
    values: Array | None = None


class Averaging(NamedTuple):
    """Dual averaging of log ε (Nesterov; Hoffman and Gelman 2014) towards an acceptance statistic."""

    log_step: Array
    log_average: Array
    error: Array
    centre: Array
    count: Array


class Moments(NamedTuple):
    """Running means and sums of squares of positions and gradients; for a dense metric the position's is (D, D); for a low-rank one the
    last positions and gradients are kept, (K, D)."""

    count: Array
    mean: Array
    square: Array
    mean_gradient: Array
    square_gradient: Array
    recent: Array
    recent_gradient: Array


class Schedule(NamedTuple):
    """Windows of warm-up, one flag a step: collect (moments are gathered) and update (the metric is renewed and moments start afresh)."""

    collect: np.ndarray
    update: np.ndarray


def velocity(metric: Metric, momentum: Array) -> Array:
    """M⁻¹p."""
    if metric.factor is not None:
        return metric.factor @ (metric.factor.T @ momentum)
    if metric.vectors is not None:
        inner = metric.scale * momentum
        inner = inner + metric.vectors @ ((metric.values - 1.0) * (metric.vectors.T @ inner))
        return metric.scale * inner
    return metric.scale**2 * momentum


def draw_momentum(key: Key, metric: Metric) -> Array:
    """p ~ N(0, M)."""
    z = jax.random.normal(key, metric.scale.shape, metric.scale.dtype)
    if metric.factor is not None:
        return jax.scipy.linalg.solve_triangular(metric.factor.T, z, lower=False)
    if metric.vectors is not None:
        z = z + metric.vectors @ ((1.0 / jnp.sqrt(metric.values) - 1.0) * (metric.vectors.T @ z))
    return z / metric.scale


def kinetic(metric: Metric, momentum: Array) -> Array:
    """½ pᵀM⁻¹p."""
    return 0.5 * jnp.dot(momentum, velocity(metric, momentum))


def leapfrog(density: Density, metric: Metric, step: Array, at: Phase) -> Phase:
    """One leapfrog step of signed size `step`."""
    momentum = at.momentum + 0.5 * step * at.gradient
    position = at.position + step * velocity(metric, momentum)
    log_density, gradient = density.value_and_grad(position)
    return Phase(position, momentum + 0.5 * step * gradient, log_density, gradient)


def travel(move: Callable[[Any], Any], given_up: Callable[[Any], Array], start: Any, number: Array) -> tuple[Array, Any, Array]:
    """`number` moves from a start, fewer where a trajectory is given up: (moves taken, end, whether it was given up)."""

    def body(carry: tuple) -> tuple:
        i, at, _ = carry
        at = move(at)
        return i + 1, at, given_up(at)

    going = lambda carry: (carry[0] < number) & ~carry[2]
    return jax.lax.while_loop(going, body, (jnp.zeros((), jnp.int32), start, jnp.zeros((), bool)))


def metropolis(key: Key, state: State, end: Any, change: Array) -> tuple[State, Array, Array]:
    """The chain moved to `end` (position, log_density, gradient) with probability min(1, e^change), which is returned too, and whether.

    A change that is not finite has no way back, so there is no way there.
    """
    change = jnp.where(jnp.isfinite(change), change, -jnp.inf)
    taken = jnp.log(jax.random.uniform(key, (), change.dtype)) < change
    pick = lambda new, old: jnp.where(taken, new, old)
    moved = state._replace(
        position=pick(end.position, state.position),
        log_density=pick(end.log_density, state.log_density),
        gradient=pick(end.gradient, state.gradient),
    )
    return moved, jnp.exp(jnp.minimum(change, 0.0)), taken


def first_step(
    key: Key, density: Density, metric: Metric, position: Array, log_density: Array, gradient: Array, guess: float = 0.1
) -> Array:
    """A step size at which one leapfrog step changes the acceptance across 0.8: doubled or halved from the guess."""
    momentum = draw_momentum(key, metric)
    start = Phase(position, momentum, log_density, gradient)
    energy = kinetic(metric, momentum) - log_density

    def body(carry: tuple) -> tuple:
        step, up, _, count = carry
        there = leapfrog(density, metric, step, start)
        change = energy - (kinetic(metric, there.momentum) - there.log_density)
        good = jnp.where(jnp.isfinite(change), change, -jnp.inf) > np.log(0.8)
        up = jnp.where(count == 0, good, up)  # the first look gives the direction
        found = good != up
        return jnp.where(found, step, step * jnp.where(up, 2.0, 0.5).astype(step.dtype)), up, found, count + 1

    no, none = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
    # One gradient in the program, not one a place that asks: a network's is most of what compiles.
    return jax.lax.while_loop(lambda carry: ~carry[2] & (carry[3] < 60), body, (jnp.asarray(guess, position.dtype), no, no, none))[0]


def averaging(step: Array) -> Averaging:
    """Fresh dual averaging around a step size: it first tries ten times as much."""
    log_step = jnp.log(step)
    zero = jnp.zeros_like(log_step)
    return Averaging(log_step, zero, zero, log_step + np.log(10.0), jnp.zeros((), jnp.int32))


def average(state: Averaging, acceptance: Array, wanted: float) -> Averaging:
    """One update after a transition with this acceptance statistic (γ = 0.05, t₀ = 10, κ = 0.75)."""
    count = state.count + 1
    t = count.astype(state.log_step.dtype)
    error = state.error + (wanted - acceptance - state.error) / (t + 10.0)
    log_step = state.centre - jnp.sqrt(t) / 0.05 * error
    weight = t**-0.75
    return Averaging(log_step, weight * log_step + (1.0 - weight) * state.log_average, error, state.centre, count)


def schedule(num_warmup: int) -> Schedule:
    """Stan's windows: 15 % to find the bulk, then windows of doubling length for the metric, then 10 % for the last step size."""
    number = np.arange(num_warmup)
    if num_warmup < 20:
        return Schedule(np.zeros(num_warmup, bool), np.zeros(num_warmup, bool))
    first, last, base = (75, 50, 25) if num_warmup >= 150 else (int(0.15 * num_warmup), int(0.1 * num_warmup), 0)
    end = num_warmup - last
    base = base or end - first
    ends, position = [], first
    while position < end:
        position += base
        base *= 2
        if position + base > end:
            position = end
        ends.append(position - 1)
    update = np.isin(number, ends)
    return Schedule((number >= first) & (number < end), update)


def moments(position: Array, kind: str, recent: int = 0) -> Moments:
    """Empty moments for a metric of this kind."""
    zero = jnp.zeros_like(position)
    square = jnp.zeros((len(position), len(position)), position.dtype) if kind == "dense" else zero
    none = jnp.zeros((recent if kind == "low_rank" else 0, len(position)), position.dtype)
    return Moments(jnp.zeros((), jnp.int32), zero, square, zero, zero, none, none)


def collect(state: Moments, position: Array, gradient: Array) -> Moments:
    """Welford's update."""
    count = state.count + 1
    shift, shift_gradient = position - state.mean, gradient - state.mean_gradient
    mean, mean_gradient = state.mean + shift / count, state.mean_gradient + shift_gradient / count
    outer = jnp.outer(shift, position - mean) if state.square.ndim == 2 else shift * (position - mean)
    recent, recent_gradient = state.recent, state.recent_gradient
    if recent.shape[0]:
        slot = state.count % recent.shape[0]
        recent, recent_gradient = recent.at[slot].set(position), recent_gradient.at[slot].set(gradient)
    return Moments(
        count,
        mean,
        state.square + outer,
        mean_gradient,
        state.square_gradient + shift_gradient * (gradient - mean_gradient),
        recent,
        recent_gradient,
    )


def estimate(state: Moments, metric: Metric) -> Metric:
    """A metric from moments.

    Diagonal: s² = sd(q)/sd(∇log π), the geometric mean of the posterior variance and the inverse Fisher information, exact for a diagonal
    Gaussian from very few draws. Dense: the covariance, shrunk towards its diagonal by 5 pseudo-draws as in Stan.
    """
    n = jnp.maximum(state.count, 2).astype(state.mean.dtype)
    if metric.factor is not None:
        covariance = state.square / (n - 1.0)
        mixed = (n / (n + 5.0)) * covariance + 1e-3 * (5.0 / (n + 5.0)) * jnp.eye(len(state.mean), dtype=state.mean.dtype)
        factor = jnp.linalg.cholesky(mixed)
        good = jnp.all(jnp.isfinite(factor))
        return metric._replace(factor=jnp.where(good, factor, metric.factor))
    variance, information = state.square / (n - 1.0), state.square_gradient / (n - 1.0)
    scale = jnp.sqrt(jnp.sqrt(variance / information))
    good = jnp.isfinite(scale) & (scale > 1e-10) & (scale < 1e10)
    scale = jnp.where(good, scale, metric.scale)
    if metric.vectors is None:
        return metric._replace(scale=scale)
    return _low_rank(state, scale, metric)


def new_metric(kind: str, position: Array, rank: int = 0) -> Metric:
    """The unit metric, with the parts that its kind will learn."""
    one = jnp.ones_like(position)
    if kind == "dense":
        return Metric(one, factor=jnp.eye(len(position), dtype=position.dtype))
    if kind == "low_rank":
        return Metric(one, vectors=jnp.eye(len(position), rank, dtype=position.dtype), values=jnp.ones(rank, position.dtype))
    return Metric(one)


def _low_rank(state: Moments, scale: Array, metric: Metric) -> Metric:
    """Directions in which the scaled posterior is longest or shortest: eigenvectors of the covariance of the last draws, after scaling,
    whose eigenvalues are farthest from one on the log scale."""
    draws = (state.recent - state.mean) / scale
    kept = jnp.minimum(state.count, draws.shape[0]).astype(scale.dtype)
    draws = jnp.where((jnp.arange(draws.shape[0]) < state.count)[:, None], draws, 0.0) / jnp.sqrt(jnp.maximum(kept - 1.0, 1.0))
    _, singular, right = jnp.linalg.svd(draws, full_matrices=False)
    rank = metric.values.shape[0]  # type: ignore[union-attr]
    # Only the longest directions: the shortest of so few draws are noise. Shrunk towards one.
    values = (kept * singular[:rank] ** 2 + 5.0) / (kept + 5.0)
    good = jnp.all(jnp.isfinite(right)) & jnp.all(jnp.isfinite(values))
    vectors = jnp.where(good, right[:rank].T, metric.vectors)
    values = jnp.where(good, jnp.maximum(values, 1.0), metric.values)
    return metric._replace(scale=scale, vectors=vectors, values=values)


# ---- warm-up, as all of them do it ------------------------------------------------------------------------------------------------


class Watch(NamedTuple):
    """What is seen of the density on the way, (D,) each. mean, mean_gradient, cross: of positions, gradients, and Σ(q − q̄)(g − ḡ), whose
    mean is −1 for a proper, continuous density. lost: mean of the points at which trajectories were given up, num_lost of them."""

    count: Array
    mean: Array
    mean_gradient: Array
    cross: Array
    lost: Array
    num_lost: Array


class State(NamedTuple):
    """position, gradient (D,), log_density: where the chain is. step: ε in use. metric, averaging, moments: what warm-up learns. watch:
    for the verdict."""

    position: Array
    log_density: Array
    gradient: Array
    step: Array
    metric: Metric
    averaging: Averaging
    moments: Moments
    watch: Watch


class Settings(NamedTuple):
    """metric: its kind. step_size: fixed, or None to adapt. wanted: acceptance that ε is adapted to."""

    metric: str
    step_size: float | None
    wanted: float
    schedule: Schedule


def begin(key: Key, position: Array, density: Density, settings: Settings) -> State:
    """The state before warm-up, with a first step size."""
    metric = new_metric(settings.metric, position, min(RANK, len(position)))
    log_density, gradient = density.value_and_grad(position)
    if settings.step_size is None:
        step = first_step(key, density, metric, position, log_density, gradient)
    else:
        step = jnp.asarray(settings.step_size, position.dtype)
    return State(
        position, log_density, gradient, step, metric, averaging(step), moments(position, settings.metric, RECENT), watch(position)
    )


def watch(position: Array) -> Watch:
    zero, none = jnp.zeros_like(position), jnp.zeros((), jnp.int32)
    return Watch(none, zero, zero, zero, zero, none)


def observe(state: State, diverging: Array, lost: Array) -> State:
    """After a transition: one more position and gradient, and the point where its trajectory was lost, if it was."""
    seen = state.watch
    count = seen.count + 1
    shift, shift_gradient = state.position - seen.mean, state.gradient - seen.mean_gradient
    mean = seen.mean + shift / count
    num_lost = seen.num_lost + diverging
    usable = diverging & jnp.all(jnp.isfinite(lost))
    where = jnp.where(usable, seen.lost + (lost - seen.lost) / jnp.maximum(num_lost, 1), seen.lost)
    new = Watch(
        count, mean, seen.mean_gradient + shift_gradient / count, seen.cross + (state.position - mean) * shift_gradient, where, num_lost
    )
    return state._replace(watch=new)


def adapt(state: State, acceptance: Array, number: Array, settings: Settings) -> State:
    """After warm-up step `number`: the step size follows the acceptance, the metric is renewed where a window ends."""
    if settings.step_size is None:
        following = average(state.averaging, acceptance, settings.wanted)
        state = state._replace(averaging=following, step=jnp.exp(following.log_step))
    if settings.metric == "identity":
        return state
    gather = lambda: collect(state.moments, state.position, state.gradient)
    state = state._replace(moments=jax.lax.cond(jnp.asarray(settings.schedule.collect)[number], gather, lambda: state.moments))

    def renew() -> State:
        fresh = state._replace(metric=estimate(state.moments, state.metric), moments=moments(state.position, settings.metric, RECENT))
        return fresh._replace(averaging=averaging(jnp.exp(state.averaging.log_average))) if settings.step_size is None else fresh

    return jax.lax.cond(jnp.asarray(settings.schedule.update)[number], renew, lambda: state)


def settle(state: State, settings: Settings) -> State:
    """When warm-up ends: the averaged step size, and nothing seen yet."""
    state = state._replace(watch=watch(state.position))
    return state if settings.step_size is not None else state._replace(step=jnp.exp(state.averaging.log_average))


def settings(method: Any) -> Settings:
    """The settings of a method with these fields."""
    return Settings(method.metric, method.step_size, method.target_acceptance, schedule(method.num_warmup))


def check(method: Any, metrics: tuple[str, ...] = METRICS) -> None:
    """Settings that all Hamiltonian samplers have."""
    check_positive(method, "step_size")
    if method.metric not in metrics:
        raise MethodError(message("Unknown metric.", repr(method.metric), f"one of {metrics}", "choose one of them"))
    if not 0.0 < method.target_acceptance < 1.0:
        raise MethodError(
            message("target_acceptance is a probability.", method.target_acceptance, "a number between 0 and 1", "pass e.g. 0.8")
        )
    if method.num_warmup == 0 and method.step_size is None:
        raise MethodError(
            message("Without warm-up the step size cannot be found.", "num_warmup=0", "step_size=…", "pass step_size, or num_warmup=1000")
        )
