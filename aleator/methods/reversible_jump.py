"""Reversible jump: the number of hidden units, or the set of regressors, is itself unknown and sampled with the rest (E5)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree, convergence, selection
from aleator._errors import MethodError, message
from aleator._marginal import Conditional, Moments, border, condition, draw, gain, log_marginal_at, solve
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.hyperpriors import Hyperprior, InverseGamma
from aleator.loop import Algorithm
from aleator.methods._chains import ChainMethod, Stats, check_target, num_functions, reference, stats
from aleator.methods._method import Card, check_positive
from aleator.methods.marginal_gibbs import fixed_scales, gammas, hierarchy_given, rows_of
from aleator.model import LinearModel
from aleator.networks._network import activation
from aleator.posterior import Draws
from aleator.shallow import Hierarchical, ShallowNet, pack, unpack

CANDIDATES = 16  # units offered at a birth
INFORMED = 0.5  # power of the likelihood ratio in the choice of who dies


class State(NamedTuple):
    """params: of the model, with β = 0 and γ = 0 in empty slots (weights = 0 for excluded regressors). active (M,): the mask.
    stats (their log_density is log p(D | γ, m, ν)), functions (F,), number: as for all chains."""

    params: Tree
    active: Array
    stats: Stats
    functions: Array
    number: Array


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


# ---- hyper-parameters and whole sweeps -----------------------------------------------------------------------------------------------


def given_by(model: ShallowNet, batch: Batch, params: Tree, log_size: Array) -> Given:
    """Data in the net's units, and the prior at the hyper-parameters of `params`."""
    rows = rows_of(model, batch)
    root = rows.root[:, None]
    design = root * rows.x if model.linear_term else jnp.zeros((len(rows.x), 0))
    noise = jnp.broadcast_to(model.likelihood.constrain(params["likelihood"])["scale"] ** 2, (model.targets(),)).astype(rows.y.dtype)
    return Given(rows.x, root, design, rows.y, rows.square, rows.mass, noise, *prior_at(model, params["prior"]), log_size)


def prior_at(model: ShallowNet, hyper: dict) -> tuple[Array, Array, Array, Array]:
    """(loc, variance (P, K) of the coefficients, mean (r,) and Cholesky factor (r, r) of the covariance of γ)."""
    size, k, linear = model.size(), model.targets(), model.size() * model.linear_term
    full = lambda top, below: jnp.concatenate([jnp.broadcast_to(top, (model.units, k)), jnp.broadcast_to(below, (linear, k))])
    if isinstance(model.prior, Hierarchical):
        loc, variance = full(hyper["mu_beta"], 0.0), full(jnp.exp(2.0 * hyper["log_sigma_beta"]), model.prior.A_linear)
        # S_γ = L⁻ᵀL⁻¹: an upper factor; a lower one is needed for triangular solves.
        inverse = solve_triangular(unpack(hyper["factor_gamma"]), jnp.eye(size), lower=True)
        return loc, variance, hyper["mu_gamma"], jnp.linalg.cholesky(inverse.T @ inverse)
    loc, scale = float(model.prior.loc), fixed_scales(model)  # type: ignore[attr-defined]
    variance = full(scale["beta"] ** 2, scale.get("linear", 1.0) ** 2)
    return full(loc, loc), variance, jnp.full(size, loc), scale["gamma"] * jnp.eye(size)


def gamma_shapes(model: ShallowNet, number: Array, mass: Array) -> tuple[Array, ...]:
    """Shapes of the gamma conditionals given m = `number`: of σ⁻² (K,), of σ_β⁻² (K,), and half the degrees of the χ² of S_γ⁻¹ (r,); empty
    where there is nothing to draw."""
    k, size = model.targets(), model.size()
    noise, prior = model.likelihood.scale, model.prior  # type: ignore[attr-defined]
    first = jnp.full(k if isinstance(noise, InverseGamma) else 0, getattr(noise, "concentration", 0.0) + 0.5 * mass)
    if not isinstance(prior, Hierarchical):
        return first, jnp.zeros(0), jnp.zeros(0)
    constants = prior.constants(model.units, size)
    return first, jnp.full(k, 0.5 * (constants.c_beta + number)), 0.5 * (constants.c_gamma + number - jnp.arange(size))


def draw_gammas(key: Key, shapes: tuple[Array, ...]) -> list[Array]:
    """log of Gamma(shape, 1) draws, all in one call."""
    sizes = np.cumsum([len(shape) for shape in shapes])
    together = jnp.concatenate(shapes)
    return jnp.split(jnp.log(gammas(key, together)) if len(together) else together, sizes[:-1])


def move_hyper(key: Key, model: ShallowNet, hyper: dict, gamma: Array, beta: Array, active: Array, spreads: Array, degrees: Array) -> dict:
    """ν | β, γ from its conditionals (`hierarchy_given`), over the active units only. spreads (K,) and degrees
    (r,): logs of the standard gamma draws for them."""
    if not isinstance(model.prior, Hierarchical):
        return hyper
    k, size = beta.shape[1], gamma.shape[1]
    z = jax.random.normal(key, (k + size + size**2,), gamma.dtype)
    var_beta, factor = jnp.exp(2.0 * hyper["log_sigma_beta"]), unpack(hyper["factor_gamma"])
    constants = model.prior.constants(*gamma.shape)
    moved = hierarchy_given(z, jnp.exp(spreads), jnp.exp(degrees), constants, gamma, beta, active, var_beta, factor)
    return {
        "mu_beta": moved["mu_beta"],
        "log_sigma_beta": 0.5 * jnp.log(moved["var_beta"]),
        "mu_gamma": moved["mu_gamma"],
        "factor_gamma": pack(moved["factor"]),
    }


def move_noise(key: Key, prior: Any, raw: dict, square: Array, mass: Array, level: Array) -> dict:
    """σ | residuals, square (K,) their sum of squares: inverse gamma from level = log of a standard gamma draw, or random-walk steps on
    log σ for other priors."""
    if not isinstance(prior, Hyperprior):
        return raw
    if isinstance(prior, InverseGamma):
        return {"log_scale": 0.5 * (jnp.log(prior.rate + 0.5 * square) - level)}
    width = 2.4 / jnp.sqrt(2.0 * (mass + 1.0))
    log_density = lambda u: prior.log_prob_unconstrained(u) - mass * u - 0.5 * square * jnp.exp(-2.0 * u)

    def one(now: Array, key: Key) -> tuple[Array, None]:
        key_step, key_accept = jax.random.split(key)
        then = now + width * jax.random.normal(key_step, now.shape, now.dtype)
        accept = jnp.log(jax.random.uniform(key_accept, now.shape, now.dtype)) < log_density(then) - log_density(now)
        return jnp.where(accept, then, now), None

    return {"log_scale": selection.repeat(one, raw["log_scale"], key, 3)[0]}


def sweep(key: Key, model: ShallowNet, batch: Batch, params: Tree, active: Array, log_size: Array, jumps: int, tries: int) -> tuple:
    """One sweep: `jumps` births or deaths and as many splits or merges, every γ_j, all with the coefficients integrated out; then the
    coefficients; then σ and ν from their conditionals. → (params, active, log p(D | γ, m, ν), acceptance of γ, acceptance of jumps)."""
    key_jumps, key_units, key_beta, key_gammas, key_noise, key_hyper = jax.random.split(key, 6)
    psi = activation(model.activation)
    given = given_by(model, batch, params, log_size)
    units = assemble(given, psi, params["network"]["gamma"], active)

    def jump(units: Units, noise: Noise) -> tuple[Units, Array]:
        units, births = birth_death(noise, given, psi, units)
        units, splits = split_merge(noise, given, psi, units)
        return units, 0.5 * (births + splits)

    units, jumped = jax.lax.scan(jump, units, draw_noise(key_jumps, jumps, *units.gamma.shape))
    units, acceptance = move_units(key_units, given, psi, units, tries)
    coefficients = draw_coefficients(key_beta, given, units)
    hidden = len(units.active)
    network = {"gamma": units.gamma, "beta": jnp.where(units.active[:, None], coefficients[:hidden], 0.0)}
    network |= {"linear": coefficients[hidden:]} if model.linear_term else {}
    square = jnp.sum((given.targets - units.columns @ coefficients) ** 2, axis=0)
    level, spreads, degrees = draw_gammas(key_gammas, gamma_shapes(model, jnp.sum(units.active), given.mass))
    moved = {
        "network": network,
        "likelihood": move_noise(key_noise, model.likelihood.scale, params["likelihood"], square, given.mass, level),  # type: ignore[attr-defined]
        "prior": move_hyper(key_hyper, model, params["prior"], units.gamma, network["beta"], units.active, spreads, degrees),
    }
    return moved, units.active, units.log_marginal, acceptance, jnp.mean(jumped)


def sort_units(network: dict, active: Array) -> dict:
    """The same net with its active units first, by increasing weight of the first input: the draw under an order constraint."""
    order = jnp.argsort(jnp.where(active, network["gamma"][:, min(1, network["gamma"].shape[1] - 1)], jnp.inf))
    return network | {name: network[name][order] for name in ("gamma", "beta")}


@dataclasses.dataclass(frozen=True)
class ReversibleJump(ChainMethod):
    """The posterior over architectures and their weights together (E5), on `al.shallow.ShallowNet` or `al.LinearModel`.

    ShallowNet: y = x'a + Σ_{j≤m} βⱼ ψ(x'γⱼ) + ε with m random, at most the net's `units`. prior: geometric through the indicators,
    P(dⱼ = 1 | dⱼ₋₁ = 1) = alpha, by default; or log probabilities of m = 0, 1, …, as a sequence or a function. Births and deaths, splits and
    merges and the moves of each γⱼ integrate all coefficients out; these, the noise and the hyper-parameters then come from their
    conditionals. A draw is a full parameter tree with β = 0 and γ = 0 in empty slots; `units(fit)` gives P(m | D). Any of m + 1 units may
    be the one that does nothing, which makes p(D | m) fall slowly beyond the truth: P(m | D) depends on alpha, the functions hardly do.

    LinearModel with Gaussian noise and a Normal prior: each regressor is in or out, all 2^p patterns equally likely by default, or prior as
    log probabilities of the number that is in. Weights are 0 where excluded; `al.selection.inclusion(fit)` gives P(in | D).

    jumps: of each kind per sweep. tries: steps of each γⱼ per sweep. ordered: list the units of a draw by increasing weight of the first
    input. num_samples sweeps are kept per chain, one in every `thin`, in the precision `storage`; all runs in float64.
    """

    num_samples: int = 2000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    prior: Any = None
    alpha: float = 0.2
    jumps: int = 2
    tries: int = 2
    ordered: bool = True
    storage: str = "auto"

    precision: ClassVar[str] = "float64"
    card: ClassVar[Card] = Card(
        name="Reversible jump",
        summary="How many hidden units, or which regressors? Samples the architecture together with its weights.",
        model_class="al.shallow.ShallowNet with a random number of units; al.LinearModel with random regressors",
        criterion="invariance of the joint posterior over architectures and weights: exact as the number of draws grows",
        search="births and deaths, splits and merges, with the output weights integrated out",
        cost="O(N m² + m³) per unit and sweep",
        needs="Gaussian noise, all the data in memory",
        references=(
            "Green, Reversible jump Markov chain Monte Carlo computation and Bayesian model determination, 1995",
            "Müller and Ríos Insua, Issues in Bayesian analysis of neural network models, 1998",
            "Ríos Insua and Müller, Feedforward neural networks for nonparametric regression, 1998",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        check_positive(self, "jumps", "tries", whole=True)
        if not 0.0 < self.alpha < 1.0:
            raise MethodError(message("alpha is a probability.", self.alpha, "a number between 0 and 1", "pass e.g. alpha=0.2"))
        if self.prior is not None and not callable(self.prior):
            object.__setattr__(self, "prior", tuple(float(value) for value in self.prior))

    def build(self, target: Any) -> Algorithm:
        check_target(self, target)
        if target.temperature != 1.0:
            raise MethodError(
                message(
                    "ReversibleJump samples the Bayesian posterior only.",
                    f"temperature {target.temperature}",
                    "1.0",
                    "leave temperature out",
                )
            )
        if isinstance(target.model, ShallowNet):
            return self._algorithm(target, *_net(self, target.model))
        return self._algorithm(target, *_regressors(self, selection.check_selection(target.model)))

    def _algorithm(self, target: Any, begin: Callable, advance: Callable, listed: Callable) -> Algorithm:
        """begin(key, params) → (params, active); advance(key, params, active, batch) → (params, active, log marginal, acceptance);
        listed(params, active) → params as they are kept."""
        model = target.model
        size = num_functions(target)

        def init(key: Key, start: Tree) -> State:
            params, active = begin(key, _tree.as_float64(start))
            zero = jnp.zeros(())
            return State(params, active, stats(zero), jnp.zeros(size), jnp.asarray(-self.num_warmup, jnp.int32))

        def step(key: Key, state: State, batch: Batch) -> tuple[State, Stats]:
            params, active, value, acceptance = advance(key, state.params, state.active, batch)
            now = stats(value, acceptance, depth=0)
            functions = jnp.ravel(model.outputs(params, reference(_tree.as_float64(batch.x))))
            return State(params, active, now, functions, state.number + 1), now

        def keep(state: State, info: Any) -> tuple[dict[str, Any], Array]:
            params = listed(state.params, state.active)
            params = params if self.storage == "auto" else jax.tree.map(lambda leaf: leaf.astype(self.storage), params)
            value = {"params": params, "size": jnp.sum(state.active), "functions": state.functions, "stats": state.stats}
            return value, (state.number > 0) & (state.number % self.thin == 0)

        def finish(key: Key, state: State, kept: Any) -> Draws:
            flat = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), kept["params"])
            return Draws(flat, num_chains=self.num_chains)

        return Algorithm(
            init=init,
            phases=self.phases(step, "full"),
            position=lambda state: state.params,
            finish=finish,
            keep=keep,
            members=self.num_chains,
            watch="log_density",
            verdict=lambda result: _verdict(result, self),
            x64=True,
        )


def units(fit: Any) -> np.ndarray:
    """P(m = 0, 1, …, units | D) of a ShallowNet fitted by `ReversibleJump`, (units + 1,)."""
    number = active_draws(fit).sum(axis=-1)
    return np.bincount(number.ravel(), minlength=fit.model.units + 1) / number.size


def active_draws(fit: Any) -> np.ndarray:
    """Which slots hold a unit in each draw, (chains, n, units): those with output weights."""
    if not isinstance(fit.model, ShallowNet) or not isinstance(fit.method, ReversibleJump):
        got = f"{type(fit.model).__name__} by {type(fit.method).__name__}"
        raise MethodError(message("This fit has no random number of units.", got, "ShallowNet by ReversibleJump", "fit it so"))
    beta = np.asarray(fit.posterior.params["network"]["beta"])
    return np.any(beta != 0.0, axis=-1).reshape(fit.posterior.num_chains, -1, beta.shape[1])


def of_size(fit: Any, number: int) -> dict[str, np.ndarray]:
    """{"gamma" (S, m, r), "beta" (S, m, K)}: the units of the S draws with exactly m = `number` of them, in the net's units, sorted by the
    weight of the first input, so that labels mean the same in every draw."""
    active = active_draws(fit).reshape(-1, fit.model.units)
    chosen = np.flatnonzero(active.sum(axis=1) == number)
    network = {name: np.asarray(fit.posterior.params["network"][name])[chosen] for name in ("gamma", "beta")}
    order = np.argsort(np.where(active[chosen], network["gamma"][:, :, 1], np.inf), axis=1)[:, :number, None]
    return {name: np.take_along_axis(leaf, order, axis=1) for name, leaf in network.items()}


def log_sizes(prior: Any, most: int, alpha: float) -> np.ndarray:
    """log p(m) for m = 0 … most, normalised: geometric, P(dⱼ = 1 | dⱼ₋₁ = 1) = alpha, cut at `most`; or as the user gave it."""
    if prior is None:
        values = np.arange(most + 1) * math.log(alpha) + np.where(np.arange(most + 1) < most, math.log1p(-alpha), 0.0)
    elif callable(prior):
        values = np.array([float(prior(m)) for m in range(most + 1)])
    else:
        values = np.asarray(prior, float)
    if values.shape != (most + 1,) or np.any(np.isnan(values)) or not np.any(np.isfinite(values)) or np.any(values == np.inf):
        raise MethodError(
            message(
                "ReversibleJump(prior=…) cannot be used.",
                values.tolist(),
                f"{most + 1} log probabilities, of 0 … {most}",
                "pass one for each size",
            )
        )
    return values - np.logaddexp.reduce(values)


def _net(method: ReversibleJump, model: ShallowNet) -> tuple[Callable, Callable, Callable]:
    log_size = log_sizes(method.prior, model.units, method.alpha)

    def begin(key: Key, params: Tree) -> tuple[Tree, Array]:
        """As many of the given units as the prior says, so that chains begin apart; all of them where some are empty already."""
        given = jnp.any(params["network"]["beta"] != 0.0, axis=1)
        drawn = jnp.arange(model.units) < jax.random.categorical(key, jnp.asarray(log_size))
        active = jnp.where(jnp.all(given), drawn, given)
        blank = lambda leaf: jnp.where(active[:, None], leaf, 0.0)
        return params | {"network": params["network"] | {name: blank(params["network"][name]) for name in ("gamma", "beta")}}, active

    def advance(key: Key, params: Tree, active: Array, batch: Batch) -> tuple:
        params, active, value, acceptance, _ = sweep(key, model, batch, params, active, jnp.asarray(log_size), method.jumps, method.tries)
        return params, active, value, acceptance

    def listed(params: Tree, active: Array) -> Tree:
        return params | {"network": sort_units(params["network"], active)} if method.ordered else params

    return begin, advance, listed


def _regressors(method: ReversibleJump, model: LinearModel) -> tuple[Callable, Callable, Callable]:
    p, learned = model.num_features, isinstance(model.likelihood.scale, Hyperprior)  # type: ignore[attr-defined]
    log_size = None if method.prior is None else log_sizes(method.prior, p, method.alpha)

    def begin(key: Key, params: Tree) -> tuple[Tree, Array]:
        """The given pattern, or a random one where all weights are zero."""
        given = jnp.any(params["network"]["weight"] != 0.0, axis=0)
        number = jax.random.randint(key, (), 0, p + 1) if log_size is None else jax.random.categorical(key, jnp.asarray(log_size))
        return params, jnp.where(jnp.any(given), given, jnp.arange(p) < number)

    def advance(key: Key, params: Tree, active: Array, batch: Batch) -> tuple:
        key_sweep, key_noise, key_weights = jax.random.split(key, 3)
        given = selection.problem(model, batch, log_size)
        scaled, scale = model.scaled_by_noise, model.likelihood.constrain(params["likelihood"])["scale"]
        log_noise = jnp.broadcast_to(jnp.log(scale), (model.targets(),)).astype(given.stats.cross.dtype)
        active, value, acceptance = selection.sweep(key_sweep, given, active, log_noise, scaled, method.jumps * p)
        likelihood = params["likelihood"]
        if learned:
            log_noise, value = selection.move_noise(key_noise, given, active, log_noise, scaled, model.likelihood.scale, value)  # type: ignore[attr-defined]
            likelihood = {"log_scale": log_noise}
        weights = selection.draw_weights(key_weights, given, active, log_noise, scaled)
        return {"network": {"weight": weights}, "likelihood": likelihood, "prior": params["prior"]}, active, value, acceptance

    return begin, advance, lambda params, active: params


def _verdict(result: Any, method: ReversibleJump) -> tuple[str, bool, dict[str, Any]]:
    """Judged by functions and by the size; what never changes (a regressor always in, a fixed noise) is no fault here."""
    kept = result.kept
    functions, size = np.asarray(kept["functions"]), np.asarray(kept["size"], float)[..., None]
    position = np.concatenate([functions, size], axis=-1)
    moved = np.flatnonzero(np.any(np.ptp(position, axis=1) > 0.0, axis=0))
    judged = result._replace(kept={"position": position[..., moved], "functions": position[..., moved], "stats": kept["stats"]})
    names = [f"function[{i}]" if i < functions.shape[-1] else "size" for i in moved]
    sentence, healthy, health = convergence.verdict(judged, method, names, True)
    return sentence, healthy, health | {"sizes": np.bincount(size.astype(int).ravel()).tolist()}
