"""Moves of the units of a shallow net whose number is unknown: each unit by itself, births and deaths, splits and merges.

Output weights are integrated out throughout: a move is judged by p(D | γ) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from aleator._marginal import Conditional, Moments, border, condition, draw, gain, log_marginal_at, solve
from aleator._typing import Array, Key

CANDIDATES = 16  # units offered at a birth
INFORMED = 0.5  # power of the likelihood ratio in the choice of who dies


class Given(NamedTuple):
    """All that moves of the units condition on: N rows, r inputs (with the one), K outputs, M unit slots, L linear columns, P = M + L.

    inputs (N, r); root (N, 1): of the rows' weights; design (N, L) and targets (N, K) times it; square, mass: as in `Moments`. noise (K,):
    variances. loc, variance (P, K): prior of the coefficients. centre (r,), factor (r, r): γ ~ N(centre, factor factorᵀ).
    log_size (M + 1,): log prior of m.
    """

    inputs: Array
    root: Array
    design: Array
    targets: Array
    square: Array
    mass: Array
    noise: Array
    loc: Array
    variance: Array
    centre: Array
    factor: Array
    log_size: Array


class Units(NamedTuple):
    """gamma (M, r), active (M,); columns (N, P): of the units (zero where inactive), then the linear ones; gram, cross: columnsᵀcolumns
    and columnsᵀtargets; log_marginal: log p(D | γ, m, ν)."""

    gamma: Array
    active: Array
    columns: Array
    gram: Array
    cross: Array
    log_marginal: Array


def activate(given: Given, psi: Callable, gamma: Array) -> Array:
    """Columns (N, n) of units γ (n, r)."""
    return given.root * psi(given.inputs @ gamma.T)


def with_column(units: Units, given: Given, slot: Array, column: Array) -> tuple[Array, Array, Array]:
    """(columns, gram, cross) with one column replaced."""
    columns = units.columns.at[:, slot].set(column)
    row = columns.T @ column
    return columns, units.gram.at[slot, :].set(row).at[:, slot].set(row), units.cross.at[slot].set(column @ given.targets)


def conditional(given: Given, gram: Array, cross: Array) -> tuple[Conditional, Array]:
    """The coefficients given γ, m and ν, and log p(D | γ, m, ν). An inactive unit's column is zero: it keeps its prior, which cancels."""
    stats = Moments(gram, cross, given.square, given.mass)
    now = condition(stats, given.noise, given.loc, given.variance)
    return now, log_marginal_at(now, stats, given.noise, given.loc, given.variance)


def gains(given: Given, base: Conditional, columns: Array, new: Array, slot: Array) -> Array:
    """log p(D | with h)/p(D | without) for each of n columns h, new (N, n), beside `columns` (N, P), in which `slot` is empty; (n,)."""
    loc, variance = given.loc[slot], given.variance[slot]

    def one(along: Array, own: Array, cross: Array) -> Array:
        return gain(border(base, along, own, cross, given.noise, loc, variance), loc, variance)

    return jax.vmap(one, in_axes=(1, 0, 1))(columns.T @ new, jnp.sum(new**2, axis=0), given.targets.T @ new)


def log_prior_gamma(given: Given, gamma: Array) -> Array:
    """log N(γ; centre, factor factorᵀ) for γ (…, r), all constants included: they do not cancel when m changes."""
    scaled = solve_triangular(given.factor, (gamma - given.centre).reshape(-1, gamma.shape[-1]).T, lower=True)
    log_det = jnp.sum(jnp.log(jnp.diagonal(given.factor)))
    value = -0.5 * jnp.sum(scaled**2, axis=0) - log_det - 0.5 * gamma.shape[-1] * math.log(2.0 * math.pi)
    return value.reshape(gamma.shape[:-1])


class Noise(NamedTuple):
    """The randomness of one birth or death and one split or merge. ways (5,), slots (3, M), choice (C,): uniforms. gammas (C + 1, r):
    normals, for C candidates and for one split."""

    ways: Array
    slots: Array
    choice: Array
    gammas: Array


def draw_noise(key: Key, number: int, most: int, r: int, candidates: int = CANDIDATES) -> Noise:
    """For `number` pairs of jumps, stacked. Drawn before the loop over them: inside it, the compiler would make the same numbers anew for
    each of their uses."""
    key_uniform, key_normal = jax.random.split(key)
    parts = jax.random.uniform(key_uniform, (number, 5 + 3 * most + candidates), float)
    ways, slots, choice = jnp.split(parts, [5, 5 + 3 * most], axis=1)
    return Noise(ways, slots.reshape(number, 3, most), choice, jax.random.normal(key_normal, (number, candidates + 1, r), float))


class Point(NamedTuple):
    """One unit as its moves see it, the others fixed: gamma (r,), column (N,), gain over the net without it, log prior, and the Cholesky
    factor (r, r) of the metric that scales its steps."""

    gamma: Array
    column: Array
    gain: Array
    log_prior: Array
    metric: Array


def point(given: Given, psi: Callable, base: Conditional, columns: Array, slot: Array, gamma: Array) -> Point:
    """`gamma` in `slot`, with its metric H = Σ_k E[β_k²] Dᵀ(I − projection on all columns)D/σ_k² + S_γ⁻¹, D = ψ'(x'γ)x: the information
    on γ that the data leave once every coefficient is integrated out."""
    values, slopes = jax.jvp(psi, (given.inputs @ gamma,), (jnp.ones_like(given.inputs[:, 0]),))
    column = given.root[:, 0] * values
    both = jnp.concatenate([column[:, None], given.root * slopes[:, None] * given.inputs], axis=1)
    noise = given.noise[:, None, None]
    inner = solve_triangular(base.factor, columns.T @ both / noise, lower=True)
    left = (both.T @ both) / noise - jnp.swapaxes(inner, 1, 2) @ inner
    precision, loc = 1.0 / given.variance[slot], given.loc[slot]
    schur = jnp.maximum(left[:, 0, 0], 0.0) + precision
    right = (given.targets.T @ column) / given.noise + precision * loc - jnp.einsum("kp,kp->k", inner[:, :, 0], base.half)
    value = 0.5 * jnp.sum(jnp.log(precision) - jnp.log(schur) + right**2 / schur - precision * loc**2)
    square = (right / schur) ** 2 + 1.0 / schur
    across = left[:, 0, 1:]
    information = jnp.einsum("k,kab->ab", square, left[:, 1:, 1:]) - jnp.einsum("k,ka,kb->ab", square / schur, across, across)
    inverse = solve_triangular(given.factor, jnp.eye(len(gamma)), lower=True)
    metric = jnp.linalg.cholesky(information + inverse.T @ inverse)
    return Point(gamma, column, value, log_prior_gamma(given, gamma), metric)


def move_unit(given: Given, psi: Callable, units: Units, slot: Array, steps: Array, uniforms: Array) -> tuple[Units, Array]:
    """Metropolis steps of γ_j with all coefficients integrated out: (units, mean acceptance), from normals (tries, r) and uniforms
    (tries, 2).

    γ̃ ~ N(γ, c²H(γ)⁻¹), c log-uniform around 2.4/√r, accepted with p(D|γ̃)p(γ̃)g(γ|γ̃) / p(D|γ)p(γ)g(γ̃|γ). The net without the unit is
    factorised once for all tries.
    """
    columns, gram, cross = with_column(units, given, slot, jnp.zeros_like(units.columns[:, 0]))
    base, without = conditional(given, gram, cross)
    at = lambda gamma: point(given, psi, base, columns, slot, gamma)
    r = units.gamma.shape[1]

    def one(now: Point, noise: tuple[Array, Array]) -> tuple[Point, Array]:
        normals, (spread, level) = noise
        width = 2.4 / math.sqrt(r) * jnp.exp(2.0 * spread - 1.5)
        step = width * solve(now.metric, normals, transposed=True)
        then = at(now.gamma + step)
        log_density = lambda p: jnp.sum(jnp.log(jnp.diagonal(p.metric))) - 0.5 * jnp.sum((p.metric.T @ (step / width)) ** 2)
        change = then.gain - now.gain + then.log_prior - now.log_prior + log_density(then) - log_density(now)
        change = jnp.where(jnp.isnan(change), -jnp.inf, change)
        return choose(jnp.log(level) < change, then, now), jnp.minimum(1.0, jnp.exp(change))

    now, acceptance = jax.lax.scan(one, at(units.gamma[slot]), (steps, uniforms))
    columns, gram, cross = with_column(units, given, slot, now.column)
    moved = Units(units.gamma.at[slot].set(now.gamma), units.active, columns, gram, cross, without + now.gain)
    return moved, jnp.mean(acceptance)


def move_units(key: Key, given: Given, psi: Callable, units: Units, tries: int) -> tuple[Units, Array]:
    """Every active unit in turn: (units, mean acceptance)."""
    order = jnp.argsort(~units.active)
    number = jnp.sum(units.active)
    key_steps, key_uniforms = jax.random.split(key)
    dtype, (most, r) = units.gamma.dtype, units.gamma.shape
    # Drawn at once: small calls to the generator cost more than the moves.
    steps, uniforms = jax.random.normal(key_steps, (most, tries, r), dtype), jax.random.uniform(key_uniforms, (most, tries, 2), dtype)

    def body(i: Array, carry: tuple[Units, Array]) -> tuple[Units, Array]:
        units, total = carry
        units, acceptance = move_unit(given, psi, units, order[i], steps[i], uniforms[i])
        return units, total + acceptance

    units, total = jax.lax.fori_loop(0, number, body, (units, jnp.zeros((), units.gamma.dtype)))
    return units, total / jnp.maximum(number, 1)


def up_probability(number: Array, most: int) -> Array:
    """Probability that a birth–death move tries a birth at m = number."""
    return jnp.where(number == 0, 1.0, jnp.where(number == most, 0.0, 0.5))


def split_probability(number: Array, most: int) -> Array:
    """Probability that a split–merge move tries a split at m = number; what is left of one tries a merge, nothing at m = 0."""
    return jnp.where((number == 0) | (number == most), 0.0, jnp.where(number == 1, 1.0, 0.5))


def log_death(given: Given, now: Conditional, active: Array) -> Array:
    """log probability with which each active unit is chosen to die, (M,): the less the data need it the likelier, ∝ (p(D without)/p(D))^½.

    p(D | without j)/p(D) = p(β_j = 0 | D)/p(β_j = 0), the Savage–Dickey ratio: one triangular inverse gives it for all units.
    """
    number = len(active)
    inverse = solve_triangular(now.factor, jnp.broadcast_to(jnp.eye(now.factor.shape[1]), now.factor.shape), lower=True)
    variance = jnp.sum(inverse**2, axis=1)[:, :number]
    mean = jnp.einsum("kpq,kp->kq", inverse, now.half)[:, :number]
    precision, loc = 1.0 / given.variance[:number].T, given.loc[:number].T
    loss = 0.5 * jnp.sum(-jnp.log(variance * precision) - mean**2 / variance + precision * loc**2, axis=0)
    return jax.nn.log_softmax(jnp.where(active, INFORMED * loss, -jnp.inf))


def birth_ratio(given: Given, number: Array, chosen: Array, average: Array) -> Array:
    """log acceptance ratio of a birth from m = number; minus it, of the death back.

    p(m+1)(m+1)!/(p(m)m!) · P(death)·P(this unit)/P(birth) · (1/C) Σ_c p(D|γ_c)/p(D): C candidates come from the prior, one is taken in
    proportion to its likelihood, and a death is judged beside C − 1 fresh candidates. m! because units are a set.
    """
    most = len(given.log_size) - 1
    prior = given.log_size[jnp.minimum(number + 1, most)] - given.log_size[number] + jnp.log(number + 1.0)
    moves = jnp.log(1.0 - up_probability(number + 1, most)) - jnp.log(up_probability(number, most))
    return prior + moves + chosen + average


def birth_death(noise: Noise, given: Given, psi: Callable, units: Units) -> tuple[Units, Array]:
    """One birth or death: (units, probability of acceptance). Both ways share one computation: the net without the unit (`small`) and
    with it (`big`)."""
    most, number = len(units.active), jnp.sum(units.active)
    way, level = noise.ways[:2]
    up = way < up_probability(number, most)
    now, _ = conditional(given, units.gram, units.cross)
    victim = pick(noise.slots[0], log_death(given, now, units.active))
    slot = jnp.where(up, jnp.argmin(units.active), victim)
    small_columns, small_gram, small_cross = with_column(units, given, slot, jnp.zeros_like(units.columns[:, 0]))
    base, small_value = conditional(given, small_gram, small_cross)
    tried = given.centre + noise.gammas[:-1] @ given.factor.T
    tried = jnp.where(up, tried, tried.at[0].set(units.gamma[slot]))
    columns = activate(given, psi, tried)
    value = gains(given, base, small_columns, columns, slot)
    taken = jnp.where(up, pick(noise.choice, value), 0)
    big = with_column(units, given, slot, columns[:, taken])
    big_active = units.active.at[slot].set(True)
    big_factor, big_value = conditional(given, *big[1:])
    average = jax.scipy.special.logsumexp(value) - math.log(len(value))
    ratio = birth_ratio(given, number - ~up, log_death(given, big_factor, big_active)[slot], average)
    ratio = jnp.where(up, ratio, -ratio)
    ratio = jnp.where(jnp.isnan(ratio), -jnp.inf, ratio)
    accept = jnp.log(level) < ratio
    larger = Units(units.gamma.at[slot].set(tried[taken]), big_active, *big, big_value)
    smaller = Units(units.gamma.at[slot].set(0.0), units.active.at[slot].set(False), small_columns, small_gram, small_cross, small_value)
    return choose(accept & up, larger, choose(accept & ~up, smaller, units)), jnp.minimum(1.0, jnp.exp(ratio))


def log_jacobian(r: int) -> float:
    """log |∂(γ + u, γ − u)/∂(γ, u)| = r log 2."""
    return r * math.log(2.0)


def log_pair(given: Given, gamma: Array, active: Array, first: Array, width: Array) -> Array:
    """log probability that a merge whose first unit is `first` takes each of the others, (M,): the nearer the likelier, ∝ N(½(γ_a − γ_b))."""
    apart = solve_triangular(given.factor, 0.5 * (gamma - gamma[first]).T, lower=True)
    near = -0.5 * jnp.sum(apart**2, axis=0) / width**2
    others = active & (jnp.arange(len(active)) != first)
    return jax.nn.log_softmax(jnp.where(others, near, -jnp.inf))


def split_merge(noise: Noise, given: Given, psi: Callable, units: Units) -> tuple[Units, Array]:
    """One split γ → γ ± u or merge γ_a, γ_b → ½(γ_a + γ_b): (units, probability of acceptance).

    u ~ N(0, w²S_γ), w log-uniform in (0.02, 1), drawn afresh. A split is accepted with p(D|big)/p(D|small) · p(γ_a)p(γ_b)/p(γ) ·
    p(m+1)(m+1)!/(p(m)m!) · P(merge)P({a, b}) / (P(split)·(1/m)·2q(u)) · 2^r: u and −u give the same pair, hence the 2 beside q.
    """
    most, r = units.gamma.shape
    number = jnp.sum(units.active)
    way, level, spread = noise.ways[2:]
    for_first, for_second = noise.slots[1:]
    up = way < split_probability(number, most)
    possible = jnp.where(up, number < most, number > 1)
    width = jnp.exp(math.log(0.02) * spread)
    first = pick(for_first, jnp.where(units.active, 0.0, -jnp.inf))
    nearest = log_pair(given, units.gamma, units.active, first, width)
    second = jnp.where(up, jnp.argmin(units.active), pick(for_second, nearest))
    drawn = width * given.factor @ noise.gammas[-1]
    mean = jnp.where(up, units.gamma[first], 0.5 * (units.gamma[first] + units.gamma[second]))
    half = jnp.where(up, drawn, 0.5 * (units.gamma[first] - units.gamma[second]))
    both = jnp.stack([mean + half, mean - half])
    big_gamma = units.gamma.at[first].set(both[0]).at[second].set(both[1])
    big_active = units.active.at[second].set(True)
    small_gamma, small_active = units.gamma.at[first].set(mean).at[second].set(0.0), units.active.at[second].set(False)
    other = assemble(given, psi, jnp.where(up, big_gamma, small_gamma), jnp.where(up, big_active, small_active))
    small_number = number - ~up
    scaled = solve(given.factor, half / width)
    log_q = (
        -0.5 * jnp.sum(scaled**2) - jnp.sum(jnp.log(jnp.diagonal(given.factor))) - r * jnp.log(width) - 0.5 * r * math.log(2.0 * math.pi)
    )
    ends, others = jnp.stack([first, second]), jnp.stack([second, first])
    pair = jax.vmap(lambda a, b: log_pair(given, big_gamma, big_active, a, width)[b])(ends, others)
    log_chosen = jnp.logaddexp(pair[0], pair[1]) - jnp.log(small_number + 1.0)
    prior = given.log_size[jnp.minimum(small_number + 1, most)] - given.log_size[small_number] + jnp.log(small_number + 1.0)
    prior = prior + jnp.sum(log_prior_gamma(given, both)) - log_prior_gamma(given, mean)
    moves = jnp.log(1.0 - split_probability(small_number + 1, most)) + log_chosen - jnp.log(split_probability(small_number, most))
    moves = moves + jnp.log(small_number) - math.log(2.0) - log_q
    change = jnp.where(up, other.log_marginal - units.log_marginal, units.log_marginal - other.log_marginal)
    ratio = change + prior + moves + log_jacobian(r)
    ratio = jnp.where(up, ratio, -ratio)
    ratio = jnp.where(jnp.isnan(ratio) | ~possible, -jnp.inf, ratio)
    accept = jnp.log(level) < ratio
    return choose(accept, other, units), jnp.minimum(1.0, jnp.exp(ratio))


def assemble(given: Given, psi: Callable, gamma: Array, active: Array) -> Units:
    """Everything that follows from γ and the mask."""
    hidden = jnp.where(active, activate(given, psi, gamma), 0.0)
    columns = jnp.concatenate([hidden, given.design], axis=1)
    gram, cross = columns.T @ columns, columns.T @ given.targets
    return Units(gamma, active, columns, gram, cross, conditional(given, gram, cross)[1])


def draw_coefficients(key: Key, given: Given, units: Units) -> Array:
    """All coefficients | γ, m, ν, D, (P, K); those of inactive units are draws of their prior."""
    return draw(key, conditional(given, units.gram, units.cross)[0])


def pick(uniforms: Array, logits: Array) -> Array:
    """An index in proportion to exp(logits), by Gumbel's trick; 0 where none is possible."""
    scores = jnp.where(jnp.isnan(logits), -jnp.inf, logits) - jnp.log(-jnp.log(uniforms))
    return jnp.argmax(jnp.where(jnp.isneginf(logits), -jnp.inf, scores))


def choose(flag: Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)
