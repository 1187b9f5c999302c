"""Curvature in units of the prior's scales: factors of the prior's precision shift its eigenvalues, so that evidence and covariance for any
of them are cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import curvature
from aleator._typing import Array, Tree
from aleator.linalg import Blocks, Complement, Diagonal, KroneckerEigen, Root, cholesky
from aleator.methods._passes import Plan, Sums


class Whitened(NamedTuple):
    """The curvature in units of the prior's scales, ready for any prior factor. group: of each weight. square (G,): Σ (w/s)² by group.
    logdet(τ (G,), c) = log |c·H + diag τ|; operator(τ, c) → its inverse in the weights' own units. solve(τ, c, b) = (c·H + diag τ)⁻¹b, where H
    is known in full: then the mode can follow its prior."""

    group: np.ndarray
    square: np.ndarray
    logdet: Callable[[Array, Array], Array]
    operator: Callable[[np.ndarray, float], Any]
    solve: Callable[[Array, Array, Array], Array] | None = None


def whiten(
    method: Any, plan: Plan, sums: Sums, basis: Any, index: np.ndarray, weights: np.ndarray, scale: np.ndarray, model: Any
) -> Whitened:
    m = len(index)
    template = jax.eval_shape(lambda: model.weights(model.init(jax.random.key(0))))
    bounds = np.array([start for start, _ in curvature.offsets(template).values()])
    leaf = np.searchsorted(bounds, index, side="right") - 1
    layers = np.unique(leaf, return_inverse=True)[1]
    if plan.structure in ("kron", "ekfac"):
        return _whiten_blocks(method, plan, sums, basis, weights, scale, index)
    group = {"none": np.zeros(m, int), "prior": np.zeros(m, int), "layer": layers, "parameter": np.arange(m)}[method.tune]
    square = np.bincount(group, (weights / scale) ** 2)
    if plan.structure == "diag":
        inside = np.maximum(sums.curvature[index], 0.0) * scale**2
        return Whitened(
            group,
            square,
            lambda tau, c: jnp.sum(jnp.log(c * inside + tau[group])),
            lambda tau, c: Diagonal(scale / np.sqrt(c * inside + tau[group])),
        )
    if plan.structure == "lowrank":
        # Q spans what the last pass was made of: eigenvectors of QᵀHQ, turned back.
        vectors = np.asarray(basis[0], np.float64)
        small = vectors.T @ sums.curvature
        values, turned = np.linalg.eigh(0.5 * (small + small.T))
        order = np.argsort(values)[::-1][: plan.rank]
        values, vectors = np.maximum(values[order], 0.0), vectors @ turned[:, order]
        return Whitened(
            group,
            square,
            lambda tau, c: m * jnp.log(tau[0]) + jnp.sum(jnp.log1p(c * values / tau[0])),
            lambda tau, c: Complement(scale / np.sqrt(tau[0]), vectors, c * values / (c * values + tau[0])),
        )
    held = sums.curvature[0] if plan.number is not None else sums.curvature
    inside = scale[:, None] * 0.5 * (held + held.T) * scale
    if group.max(initial=0) == 0:
        values, vectors = np.linalg.eigh(inside)
        values = np.maximum(values, 0.0)

        def dense(tau: np.ndarray, c: float) -> Root:
            spread = 1.0 / np.sqrt(c * values + tau[0])
            return Root(scale[:, None] * vectors * spread, 2.0 * np.sum(np.log(scale)) + 2.0 * np.sum(np.log(spread)))

        solve = lambda tau, c, b: vectors @ ((vectors.T @ b) / (c * values + tau[0]))
        return Whitened(group, square, lambda tau, c: jnp.sum(jnp.log(c * values + tau[0])), dense, solve)

    def factored(tau: np.ndarray, c: float) -> Root:
        factor, _ = cholesky(c * inside + np.diag(tau[group]), "Laplace precision")
        from scipy.linalg import solve_triangular

        root = scale[:, None] * solve_triangular(factor, np.eye(m), lower=True).T
        return Root(root, 2.0 * np.sum(np.log(scale)) - 2.0 * np.sum(np.log(np.diagonal(factor))))

    whole = lambda tau, c: c * inside + jnp.diag(tau[group])
    solve = lambda tau, c, b: jnp.linalg.solve(whole(tau, c), b)
    return Whitened(group, square, lambda tau, c: jnp.linalg.slogdet(whole(tau, c))[1], factored, solve)


def tune(
    method: Any, target: Any, plan: Plan, sums: Sums, white: Whitened, z: np.ndarray, precision: np.ndarray, log_prior: float
) -> tuple[np.ndarray, float, np.ndarray, float]:
    """(prior factors τ (G,), noise factor κ, how far the mode moves with them (m,), log evidence).

    With z = w/s: log p(D|θ*) + Σ ½(m log τ − τ Σz²) − ½ log |H/κ² + τ| + ½ bᵀ(H/κ² + τ)⁻¹b, where b = z/κ² − τz is the slope at the old
    mode: a prior or noise other than that of the training has another mode, which the last term takes into account. It is left out where
    H is not known in full.
    """
    import optax

    counts = np.bincount(white.group).astype(np.float64)
    rows = float(sums.mass) * target.model.targets()

    slope = lambda tau, noise: (noise**-2 - tau[white.group]) * z

    def log_evidence(logs: dict) -> Array:
        tau, noise = jnp.exp(logs["prior"]), jnp.exp(logs["noise"])
        data = sums.log_likelihood - rows * logs["noise"] - 0.5 * sums.residual * (noise**-2 - 1.0)
        value = data + 0.5 * jnp.sum(counts * logs["prior"] - tau * white.square) - 0.5 * white.logdet(tau, noise**-2)
        return value if white.solve is None else value + 0.5 * slope(tau, noise) @ white.solve(tau, noise**-2, slope(tau, noise))

    logs = {"prior": np.zeros(len(counts)), "noise": np.zeros(())}
    free = {"prior": float(method.tune != "none"), "noise": float(method.tune_noise)}
    with jax.enable_x64(True):
        if any(free.values()):
            optimizer = optax.adam(optax.cosine_decay_schedule(0.3, method.num_tune_steps))

            def step(carry: tuple, _: None) -> tuple:
                at, state = carry
                uphill = jax.grad(log_evidence)(at)
                updates, state = optimizer.update(jax.tree.map(lambda g, on: -g * on, uphill, free), state)
                return (optax.apply_updates(at, updates), state), None

            run = jax.jit(lambda at: jax.lax.scan(step, (at, optimizer.init(at)), None, method.num_tune_steps)[0][0])
            logs = jax.tree.map(np.asarray, run(jax.tree.map(jnp.asarray, logs)))
        value = float(log_evidence(jax.tree.map(jnp.asarray, logs)))
        tau, noise = np.exp(logs["prior"]), float(np.exp(logs["noise"]))
        moves = white.solve is not None and any(free.values())
        shift = np.asarray(white.solve(tau, noise**-2, slope(tau, noise))) if moves else np.zeros(len(z))  # type: ignore[misc]
    # For priors that are not Gaussian, the density at the mode is not that of the Gaussian with its curvature.
    if len(precision) == plan.layout.size:
        gaussian = 0.5 * np.sum(np.log(precision)) - 0.5 * len(precision) * np.log(2 * np.pi) - 0.5 * float(np.sum(white.square))
        value += log_prior - gaussian
    return tau, noise, shift, value


def prior_curvature(target: Any, params: Tree, index: np.ndarray) -> tuple[Array, Array]:
    """(−∂²log p(w)/∂w², ∂log p(w)/∂w) for the weights with these numbers, (m,) each; priors here are products over weights."""
    log_prior = lambda network: target.log_prior(params | {"network": network})
    slope, change = jax.jvp(jax.grad(log_prior), (params["network"],), (jax.tree.map(jnp.ones_like, params["network"]),))
    return -curvature.flat(change)[index], curvature.flat(slope)[index]


def proper(precision: np.ndarray, target: Any, index: np.ndarray) -> tuple[np.ndarray, int]:
    """Prior precisions, and how many had to be replaced: where the log prior does not curve down at the mode (flat or heavy tails), the
    spread of the prior's own draws stands in."""
    bad = ~(np.isfinite(precision) & (precision > 0.0))
    if not bad.any():
        return precision, 0
    draws = jax.vmap(lambda key: curvature.flat(target.sample_prior(key)["network"]))(jax.random.split(jax.random.key(0), 256))
    spread = np.asarray(jnp.median(jnp.abs(draws - jnp.median(draws, axis=0)), axis=0))[index] * 1.4826
    return np.where(bad, 1.0 / np.maximum(spread, 1e-6) ** 2, precision), int(bad.sum())


def positive(precision: Array, otherwise: Any) -> Array:
    return jnp.where((precision > 0.0) & jnp.isfinite(precision), precision, otherwise)


def row_scales(scale: Array, block: curvature.Block, size: int, index: np.ndarray) -> Array:
    """Prior scales (a,) of the rows of a block: geometric means over its columns, which in most priors are all equal."""
    place = np.zeros(size, np.int32)
    place[index] = np.arange(len(index))
    return jnp.exp(jnp.mean(jnp.log(scale[place[block.numbers]]), axis=1))


def _whiten_blocks(method: Any, plan: Plan, sums: Sums, basis: Any, weights: np.ndarray, scale: np.ndarray, index: np.ndarray) -> Whitened:
    """One Kronecker product a block, eigen-decomposed; a diagonal for the rest."""
    sides, corrected = sums.curvature
    place = np.zeros(plan.layout.size, np.int32)
    place[index] = np.arange(len(index))
    lefts, rights, values, scales, members = [], [], [], [], []
    for number, block in enumerate(plan.layout.blocks):
        rows = np.asarray(row_scales(scale, block, plan.layout.size, index))
        a, left = np.linalg.eigh(rows[:, None] * sides.inputs[number] * rows)
        b, right = np.linalg.eigh(sides.outputs[number])
        positions = 1 if plan.reduce else block.positions
        if plan.structure == "ekfac":
            left, right = np.asarray(basis[number][0], np.float64) / rows[:, None], np.asarray(basis[number][1], np.float64)
            own = corrected[number]
        else:
            own = np.outer(np.maximum(a, 0.0), np.maximum(b, 0.0)) / max(sums.mass * positions, 1e-300)
        for part, item in (
            (lefts, left),
            (rights, right),
            (values, np.maximum(own, 0.0)),
            (scales, rows),
            (members, place[block.numbers.ravel()]),
        ):
            part.append(item)
    rest = place[plan.layout.rest]
    rest_values = np.maximum(sides.rest, 0.0) * scale[rest] ** 2
    per_layer = method.tune == "layer"
    group = np.zeros(len(index), int)
    for number, own in enumerate(members):
        group[own] = number if per_layer else 0
    group[rest] = len(members) if per_layer and len(rest) else 0
    of = lambda number: number if per_layer else 0

    def logdet(tau: Array, c: Array) -> Array:
        total = jnp.zeros(())
        for number, own in enumerate(values):
            total = total + jnp.sum(jnp.log(c * own + tau[of(number)]))
        return total + (jnp.sum(jnp.log(c * rest_values + tau[of(len(values))])) if len(rest) else 0.0)

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

    whole = np.empty(len(index))
    for own, rows, block in zip(members, scales, plan.layout.blocks, strict=True):
        whole[own] = np.repeat(rows, block.numbers.shape[1])
    whole[rest] = scale[rest]
    return Whitened(group, np.bincount(group, (weights / whole) ** 2), logdet, operator)
