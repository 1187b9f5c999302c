"""Curvature in units of the prior's scales: factors of the prior's precision shift its eigenvalues, so that evidence and covariance for any
of them are cheap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._cache import cached
from aleator._typing import Array, Tree
from aleator.linalg import Blocks, Complement, Diagonal, KroneckerEigen, Root, cholesky
from aleator.methods._passes import Plan, Sums

MANY_VALUES = 8192  # eigenvalues a group beyond which a search is made on fewer of them
NOTHING = 1e-9  # what eigenvalues must exceed not to be put together with 0, in units of the prior's precision
WITHIN = 0.01  # of each other are the values that are put together


class Spectrum(NamedTuple):
    """What the evidence needs of the curvature H in units of the prior's scales. values (v,): its eigenvalues; member (v,): the group of each.
    counts (G,): weights of each group; square (G,): Σ (w/s)² over them. turned (v,): z = w/s along the eigenvectors, where H is known in
    full: then the mode can follow its prior; pulled (v,): the slope of the log-likelihood along them. matrix (m, m): H itself in the place of `values` where
    groups do not share its eigenvectors; member, turned and pulled then are of the weights. times (v,): how often each value is there, where many were put together."""

    values: Array
    member: Array
    counts: Array
    square: Array
    turned: Array | None = None
    pulled: Array | None = None
    matrix: Array | None = None
    times: Array | None = None


def condense(spectrum: Spectrum) -> Spectrum:
    """About the same spectrum with few values, so that a step of a search costs as much for millions of weights as for thousands: values
    within 1 % of each other, and of one group, become their mean. The slope of Σ log(λ + τ) in log τ changes by some 10⁻⁵ of itself."""
    values, member = spectrum.values, np.asarray(spectrum.member)
    number = len(spectrum.counts)
    if spectrum.turned is not None or len(values) < MANY_VALUES * number:
        return spectrum
    place = (np.log(np.maximum(values, NOTHING) / NOTHING) / WITHIN).astype(np.int64) * number + member
    times = np.bincount(place)
    used = np.flatnonzero(times)
    means = np.bincount(place, values)[used] / times[used]
    size = -(-len(used) // 1024) * 1024  # one compiled search for spectra of about one size
    pad = lambda array: np.concatenate([array, np.zeros(size - len(used), array.dtype)])
    return spectrum._replace(values=pad(means), member=pad(used % number).astype(np.int32), times=pad(times[used].astype(float)))


class Whitened(NamedTuple):
    """The curvature in units of the prior's scales, ready for any prior factors. operator(τ (G,), c) → (c·H + diag τ)⁻¹ in the weights' own
    units; follow(τ, c) (m,): how far the mode moves, in units of the prior's scales, where H is known in full."""

    spectrum: Spectrum
    operator: Callable[[np.ndarray, float], Any]
    follow: Callable[[np.ndarray, float], np.ndarray] | None = None


def groups(method: Any, plan: Plan, model: Any, index: np.ndarray) -> np.ndarray:
    """Which factor of the prior's precision each of these weights has: all the same, one a block or leaf, or its own."""
    if method.tune == "parameter":
        return np.arange(len(index))
    if method.tune != "layer":
        return np.zeros(len(index), int)
    if plan.structure in ("kron", "ekfac"):
        layers = _layers(plan)
        of = np.full(plan.layout.size, len(set(layers)))
        for layer, block in zip(layers, plan.layout.blocks, strict=True):
            of[block.numbers] = layer
        return of[index]
    template = jax.eval_shape(lambda: model.weights(model.init(jax.random.key(0))))
    bounds = np.array([start for start, _ in curvature.offsets(template).values()])
    return np.unique(np.searchsorted(bounds, index, side="right"), return_inverse=True)[1]


def _layers(plan: Plan) -> list[int]:
    """The layer of each block: the groups of a convolution are one."""
    names = list(dict.fromkeys(block.names for block in plan.layout.blocks))
    return [names.index(block.names) for block in plan.layout.blocks]


def by_group(group: np.ndarray, values: Array) -> Array:
    """Sums over the members of each group, (G,)."""
    size = int(group.max(initial=0)) + 1
    return np.bincount(group, values, size) if isinstance(values, np.ndarray) else jnp.zeros(size, values.dtype).at[group].add(values)


def whiten(method: Any, plan: Plan, sums: Sums, basis: Any, index: np.ndarray, weights: Array, scale: Array, model: Any) -> Whitened:
    """For sums over all rows, weights w (m,) less the prior's mean and its scales (m,): NumPy arrays after a fit (nothing to compile), or
    traced ones during it, where only the spectrum is of use."""
    m, group = len(index), groups(method, plan, model, index)
    xp: Any = np if isinstance(scale, np.ndarray) else jnp
    counts = np.bincount(group).astype(float)
    if plan.structure in ("kron", "ekfac"):
        return _whiten_blocks(plan, sums, basis, weights, scale, index, counts, xp)
    square = by_group(group, (weights / scale) ** 2)
    if plan.structure == "diag":
        inside = xp.maximum(sums.curvature[index], 0.0) * scale**2
        return Whitened(Spectrum(inside, group, counts, square), lambda tau, c: Diagonal(scale / np.sqrt(c * inside + tau[group])))
    if plan.structure == "lowrank":
        # Q spans what the last pass was made of: eigenvectors of QᵀHQ, turned back.
        vectors = xp.asarray(basis[0], sums.curvature.dtype)
        small = vectors.T @ sums.curvature
        values, turned = xp.linalg.eigh(0.5 * (small + small.T))
        values, vectors = xp.maximum(values[::-1][: plan.rank], 0.0), vectors @ turned[:, ::-1][:, : plan.rank]
        return Whitened(
            Spectrum(xp.concatenate([values, xp.zeros(m - len(values), values.dtype)]), group, counts, square),
            lambda tau, c: Complement(scale / np.sqrt(tau[0]), vectors, c * values / (c * values + tau[0])),
        )
    held = sums.curvature[0] if plan.number is not None else sums.curvature
    inside, z, pull = scale[:, None] * (0.5 * (held + held.T)) * scale, weights / scale, scale * sums.gradient[index]
    whole = lambda tau, c: c * inside + np.diag(tau[group])
    several = Whitened(
        Spectrum(xp.zeros(0, z.dtype), group, counts, square, z, pull, inside),
        lambda tau, c: _inverse_root(cholesky(whole(tau, c), "Laplace precision")[0], scale),
        lambda tau, c: np.linalg.solve(whole(tau, c), c * pull - tau[group] * z),
    )
    if len(counts) > 1:
        return several
    if xp is np and method.tune == "none" and not method.tune_noise:
        try:
            factor = np.linalg.cholesky(inside + np.eye(m))
        except np.linalg.LinAlgError:  # sums in single precision can have negative eigenvalues: they are set to 0 below
            pass
        else:  # the factors stay at τ = c, where the squared pivots less one have the determinant that the eigenvalues would have
            pivots = np.diagonal(factor) ** 2 - 1.0
            return Whitened(Spectrum(pivots, group, counts, square), lambda tau, c: _inverse_root(np.sqrt(c) * factor, scale))
    values, vectors = xp.linalg.eigh(inside)
    values = xp.maximum(values, 0.0)

    def dense(tau: np.ndarray, c: float) -> Root:
        spread = 1.0 / np.sqrt(c * values + tau[0])
        return Root(scale[:, None] * vectors * spread, 2.0 * np.sum(np.log(scale)) + 2.0 * np.sum(np.log(spread)))

    turned, pulled = vectors.T @ z, vectors.T @ pull
    follow = lambda tau, c: vectors @ ((c * pulled - tau[0] * turned) / (c * values + tau[0]))
    return Whitened(Spectrum(values, group, counts, square, turned, pulled), dense, follow)


def _inverse_root(factor: np.ndarray, scale: np.ndarray) -> Root:
    """S (CCᵀ)⁻¹ S for S = diag(scale) and a lower triangular C, as a root."""
    from scipy.linalg.lapack import dtrtri

    root = scale[:, None] * dtrtri(factor, lower=1)[0].T
    return Root(root, 2.0 * np.sum(np.log(scale)) - 2.0 * np.sum(np.log(np.diagonal(factor))))


class Data(NamedTuple):
    """What the evidence needs of the data: log p(D|θ*), N · targets, Σ ((y − f)/σ)²; and the factors τ₀ (G,) the mode was trained under."""

    log_likelihood: Array
    rows: Array
    residual: Array
    trained: Array


def data_of(target: Any, sums: Sums, trained: Array) -> Data:
    return Data(sums.log_likelihood, sums.mass * target.model.targets(), sums.residual, trained)


def log_evidence(logs: dict, spectrum: Spectrum, data: Data) -> Array:
    """Of log factors {"prior": log τ (G,), "noise": log κ}, but for the prior's own constants.

    With z = w/s: log p(D|θ*) + Σ ½(m log τ − τ Σz²) − ½ log |H/κ² + τ| + ½ bᵀ(H/κ² + τ)⁻¹b, where b = g/κ² − τz is the slope of the log joint, g
    that of the log-likelihood: another prior or noise has another mode, which the last term takes into account. It is left out where H is not
    known in full. At a mode trained under factors τ₀, g = τ₀z; but a search ends near it, and what is left of τ₀z where H is 0 would let the
    last term grow as κ⁻⁴. g itself has no part there.
    """
    tau, noise = jnp.exp(logs["prior"]), jnp.exp(logs["noise"])
    c = noise**-2
    value = data.log_likelihood - data.rows * logs["noise"] - 0.5 * data.residual * (c - 1.0)
    value = value + 0.5 * jnp.sum(spectrum.counts * logs["prior"] - tau * spectrum.square)
    slope = None if spectrum.turned is None else c * spectrum.pulled - tau[spectrum.member] * spectrum.turned
    if spectrum.matrix is not None:
        factor = jnp.linalg.cholesky(c * spectrum.matrix + jnp.diag(tau[spectrum.member]))
        half = jax.scipy.linalg.solve_triangular(factor, slope, lower=True)
        return value - jnp.sum(jnp.log(jnp.diagonal(factor))) + 0.5 * half @ half
    total = c * spectrum.values + tau[spectrum.member]
    logs_of = jnp.log(total) if spectrum.times is None else spectrum.times * jnp.log(total)
    return value - 0.5 * jnp.sum(logs_of) + (0.0 if slope is None else 0.5 * jnp.sum(slope**2 / total))


def climb(log_evidence: Callable, logs: dict, free: dict, num_steps: int, rate: float) -> dict:
    """Adam on the log factors that are free."""
    import optax

    optimizer = optax.adam(optax.cosine_decay_schedule(rate, num_steps))

    def step(carry: tuple, _: None) -> tuple:
        at, state = carry
        updates, state = optimizer.update(jax.tree.map(lambda g, on: -g * on, jax.grad(log_evidence)(at), free), state)
        return (optax.apply_updates(at, updates), state), None

    return jax.lax.scan(step, (logs, optimizer.init(logs)), None, num_steps)[0][0]


def free_factors(method: Any) -> dict:
    return {"prior": float(method.tune != "none"), "noise": float(method.tune_noise)}


@functools.partial(jax.jit, static_argnames=("free", "num_steps"))
def _search(logs: dict, spectrum: Spectrum, data: Data, free: tuple[tuple[str, float], ...], num_steps: int) -> dict:
    """The best log factors, compiled once per shape of the spectrum."""
    return climb(lambda at: log_evidence(at, spectrum, data), logs, dict(free), num_steps, 0.3)


_evidence_at = jax.jit(log_evidence)


def tune(
    method: Any, plan: Plan, white: Whitened, data: Data, precision: np.ndarray, log_prior: float, searching: bool
) -> tuple[np.ndarray, float, np.ndarray, float]:
    """(prior factors τ (G,), noise factor κ, how far the mode moves with them (m,), log evidence). searching: look for the factors, and not
    only for the evidence of those that the mode was trained under."""
    free = free_factors(method)
    searching = searching and any(free.values())
    logs = {"prior": np.log(data.trained), "noise": np.zeros(())}
    if searching:
        logs = _search(logs, condense(white.spectrum), data, tuple(free.items()), method.num_tune_steps)
    tau, noise, value = np.exp(np.asarray(logs["prior"])), float(np.exp(logs["noise"])), float(_evidence_at(logs, white.spectrum, data))
    shift = np.zeros(len(precision))
    if white.follow is not None and searching:
        shift = white.follow(tau, noise**-2)
    # For priors that are not Gaussian, the density at the mode is not that of the Gaussian with its curvature.
    if len(precision) == plan.layout.size:
        gaussian = 0.5 * np.sum(np.log(precision)) - 0.5 * len(precision) * np.log(2 * np.pi) - 0.5 * float(np.sum(white.spectrum.square))
        value += log_prior - gaussian
    return tau, noise, shift, value


def prior_curvature(target: Any, params: Tree, index: np.ndarray) -> tuple[Array, Array]:
    """(−∂²log p(w)/∂w², ∂log p(w)/∂w) for the weights with these numbers, (m,) each; priors here are products over weights."""
    log_prior = lambda network: target.log_prior(params | {"network": network})
    slope, change = jax.jvp(jax.grad(log_prior), (params["network"],), (jax.tree.map(jnp.ones_like, params["network"]),))
    return -_tree.flat(change)[index], _tree.flat(slope)[index]


@cached
def prior_at(target: Any) -> Callable[[Tree], tuple[Array, Array, Array, Array]]:
    """(prior curvatures (P,), slopes of the log prior (P,), the weights (P,), log p(w)) at given parameters, compiled once a target."""

    def look(params: Tree) -> tuple[Array, Array, Array, Array]:
        vector, prior = _tree.flat(params["network"]), target.model.prior
        log_prior = prior.log_prob(params["network"], params["prior"], target.model.fan_in(params["network"]))
        return *prior_curvature(target, params, np.arange(vector.size)), vector, log_prior

    return jax.jit(look)


def proper(precision: np.ndarray, target: Any, index: np.ndarray) -> tuple[np.ndarray, int]:
    """Prior precisions, and how many had to be replaced: where the log prior does not curve down at the mode (flat or heavy tails), the
    spread of the prior's own draws stands in."""
    bad = ~(np.isfinite(precision) & (precision > 0.0))
    if not bad.any():
        return precision, 0
    draws = jax.vmap(lambda key: _tree.flat(target.sample_prior(key)["network"]))(jax.random.split(jax.random.key(0), 256))
    spread = np.asarray(jnp.median(jnp.abs(draws - jnp.median(draws, axis=0)), axis=0))[index] * 1.4826
    return np.where(bad, 1.0 / np.maximum(spread, 1e-6) ** 2, precision), int(bad.sum())


def positive(precision: Array, otherwise: Any) -> Array:
    return jnp.where((precision > 0.0) & jnp.isfinite(precision), precision, otherwise)


def row_scales(scale: Array, block: curvature.Block, size: int, index: np.ndarray) -> Array:
    """Prior scales (a,) of the rows of a block: geometric means over its columns, which in most priors are all equal."""
    xp: Any = np if isinstance(scale, np.ndarray) else jnp
    return xp.exp(xp.mean(xp.log(scale[places(size, index)[block.numbers]]), axis=1))


def places(size: int, index: np.ndarray) -> np.ndarray:
    """(P,): where each weight is among those of the index."""
    place = np.zeros(size, np.int32)
    place[index] = np.arange(len(index))
    return place


def _whiten_blocks(
    plan: Plan, sums: Sums, basis: Any, weights: Array, scale: Array, index: np.ndarray, counts: np.ndarray, xp: Any
) -> Whitened:
    """One Kronecker product a block, eigen-decomposed; a diagonal for the rest."""
    sides, corrected = sums.curvature
    place = places(plan.layout.size, index)
    layers = _layers(plan)
    of = lambda number: min((*layers, len(set(layers)))[number], len(counts) - 1)  # one factor for all, or one a layer and one for the rest
    lefts, rights, values, scales, members, groups_of, squares = [], [], [], [], [], [], [xp.zeros((), scale.dtype)] * len(counts)
    for number, block in enumerate(plan.layout.blocks):
        rows = row_scales(scale, block, plan.layout.size, index)
        positions = 1 if plan.reduce else block.positions
        if plan.structure == "ekfac":
            left, right = xp.asarray(basis[number][0]) / rows[:, None], xp.asarray(basis[number][1])
            own = corrected[number]
        else:
            a, left = xp.linalg.eigh(rows[:, None] * sides.inputs[number] * rows)
            b, right = xp.linalg.eigh(sides.outputs[number])
            own = xp.outer(xp.maximum(a, 0.0), xp.maximum(b, 0.0)) / (sums.mass * positions)
        lefts.append(left)
        rights.append(right)
        values.append(xp.maximum(own, 0.0))
        scales.append(rows)
        members.append(place[block.numbers.ravel()])
        groups_of.append(np.full(block.numbers.size, of(number), np.int32))
        squares[of(number)] = squares[of(number)] + xp.sum((weights[place[block.numbers]] / rows[:, None]) ** 2)
    rest = place[plan.layout.rest]
    rest_values = xp.maximum(sides.rest, 0.0) * scale[rest] ** 2
    squares[of(len(values))] = squares[of(len(values))] + xp.sum((weights[rest] / scale[rest]) ** 2)
    groups_of.append(np.full(len(rest), of(len(values)), np.int32))

    def operator(tau: np.ndarray, c: float) -> Blocks:
        parts: list[Any] = [
            KroneckerEigen(left, right, 1.0 / (c * own + tau[of(number)]), rows)
            for number, (left, right, own, rows) in enumerate(zip(lefts, rights, values, scales, strict=True))
        ]
        where = list(members)
        if len(rest):
            parts.append(Diagonal(scale[rest] / np.sqrt(c * rest_values + tau[of(len(values))])))
            where.append(rest)
        return Blocks(tuple(parts), tuple(where))

    every = xp.concatenate([*(own.ravel() for own in values), rest_values])
    return Whitened(Spectrum(every, np.concatenate(groups_of), counts, xp.stack(squares)), operator)
