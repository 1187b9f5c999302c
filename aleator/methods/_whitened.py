"""Curvature in units of the prior's scales: factors of the prior's precision shift its eigenvalues, so that evidence and covariance for any
of them are cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._typing import Array, Tree
from aleator.linalg import Blocks, Complement, Diagonal, KroneckerEigen, Root, cholesky
from aleator.methods._passes import Plan, Sums


class Whitened(NamedTuple):
    """The curvature in units of the prior's scales, ready for any prior factor. group: of each weight. square (G,): Σ (w/s)² by group.
    logdet(τ (G,), c) = log |c·H + diag τ|; operator(τ, c) → its inverse in the weights' own units. solve(τ, c, b) = (c·H + diag τ)⁻¹b, where H
    is known in full: then the mode can follow its prior."""

    group: np.ndarray
    square: Array
    logdet: Callable[[Array, Array], Array]
    operator: Callable[[Array, Any], Any]
    solve: Callable[[Array, Array, Array], Array] | None = None


def groups(method: Any, plan: Plan, model: Any, index: np.ndarray) -> np.ndarray:
    """Which factor of the prior's precision each of these weights has: all the same, one a block or leaf, or its own."""
    if method.tune == "parameter":
        return np.arange(len(index))
    if method.tune != "layer":
        return np.zeros(len(index), int)
    if plan.structure in ("kron", "ekfac"):
        of = np.full(plan.layout.size, len(plan.layout.blocks))
        for number, block in enumerate(plan.layout.blocks):
            of[block.numbers] = number
        return of[index]
    template = jax.eval_shape(lambda: model.weights(model.init(jax.random.key(0))))
    bounds = np.array([start for start, _ in curvature.offsets(template).values()])
    return np.unique(np.searchsorted(bounds, index, side="right"), return_inverse=True)[1]


def by_group(group: np.ndarray, values: Array) -> Array:
    """Sums over the members of each group, (G,)."""
    return jnp.zeros(int(group.max(initial=0)) + 1, values.dtype).at[group].add(values)


def whiten(method: Any, plan: Plan, sums: Sums, basis: Any, index: np.ndarray, weights: Array, scale: Array, model: Any) -> Whitened:
    """For sums over all rows, weights w (m,) less the prior's mean and its scales (m,)."""
    m, group = len(index), groups(method, plan, model, index)
    if plan.structure in ("kron", "ekfac"):
        return _whiten_blocks(method, plan, sums, basis, weights, scale, index, group)
    square = by_group(group, (weights / scale) ** 2)
    if plan.structure == "diag":
        inside = jnp.maximum(sums.curvature[index], 0.0) * scale**2
        return Whitened(
            group,
            square,
            lambda tau, c: jnp.sum(jnp.log(c * inside + tau[group])),
            lambda tau, c: Diagonal(scale / jnp.sqrt(c * inside + tau[group])),
        )
    if plan.structure == "lowrank":
        # Q spans what the last pass was made of: eigenvectors of QᵀHQ, turned back.
        vectors = jnp.asarray(basis[0], sums.curvature.dtype)
        small = vectors.T @ sums.curvature
        values, turned = jnp.linalg.eigh(0.5 * (small + small.T))
        values, vectors = jnp.maximum(values[::-1][: plan.rank], 0.0), vectors @ turned[:, ::-1][:, : plan.rank]
        return Whitened(
            group,
            square,
            lambda tau, c: m * jnp.log(tau[0]) + jnp.sum(jnp.log1p(c * values / tau[0])),
            lambda tau, c: Complement(scale / jnp.sqrt(tau[0]), vectors, c * values / (c * values + tau[0])),
        )
    held = sums.curvature[0] if plan.number is not None else sums.curvature
    inside = scale[:, None] * 0.5 * (held + held.T) * scale
    if group.max(initial=0) == 0:
        values, vectors = jnp.linalg.eigh(inside)
        values = jnp.maximum(values, 0.0)

        def dense(tau: Array, c: Any) -> Root:
            spread = 1.0 / jnp.sqrt(c * values + tau[0])
            return Root(scale[:, None] * vectors * spread, 2.0 * jnp.sum(jnp.log(scale)) + 2.0 * jnp.sum(jnp.log(spread)))

        solve = lambda tau, c, b: vectors @ ((vectors.T @ b) / (c * values + tau[0]))
        return Whitened(group, square, lambda tau, c: jnp.sum(jnp.log(c * values + tau[0])), dense, solve)

    def factored(tau: Array, c: Any) -> Root:
        from scipy.linalg import solve_triangular

        factor, _ = cholesky(np.asarray(whole(tau, c)), "Laplace precision")
        root = np.asarray(scale)[:, None] * solve_triangular(factor, np.eye(m), lower=True).T
        return Root(root, 2.0 * np.sum(np.log(scale)) - 2.0 * np.sum(np.log(np.diagonal(factor))))

    whole = lambda tau, c: c * inside + jnp.diag(tau[group])
    solve = lambda tau, c, b: jnp.linalg.solve(whole(tau, c), b)
    return Whitened(group, square, lambda tau, c: jnp.linalg.slogdet(whole(tau, c))[1], factored, solve)


def evidence_of(target: Any, sums: Sums, white: Whitened, z: Array, trained: Array) -> tuple[Callable, Callable]:
    """(log evidence of log factors {"prior": log τ (G,), "noise": log κ}, slope(τ, κ) of the log joint at the mode).

    With z = w/s: log p(D|θ*) + Σ ½(m log τ − τ Σz²) − ½ log |H/κ² + τ| + ½ bᵀ(H/κ² + τ)⁻¹b, where b = τ₀z/κ² − τz is the slope at the mode that
    was trained under τ₀: another prior or noise has another mode, which the last term takes into account. It is left out where H is not
    known in full.
    """
    counts = np.bincount(white.group)
    rows = sums.mass * target.model.targets()
    slope = lambda tau, noise: (trained[white.group] * noise**-2 - tau[white.group]) * z

    def log_evidence(logs: dict) -> Array:
        tau, noise = jnp.exp(logs["prior"]), jnp.exp(logs["noise"])
        data = sums.log_likelihood - rows * logs["noise"] - 0.5 * sums.residual * (noise**-2 - 1.0)
        value = data + 0.5 * jnp.sum(counts * logs["prior"] - tau * white.square) - 0.5 * white.logdet(tau, noise**-2)
        return value if white.solve is None else value + 0.5 * slope(tau, noise) @ white.solve(tau, noise**-2, slope(tau, noise))

    return log_evidence, slope


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


def tune(
    method: Any, target: Any, plan: Plan, sums: Sums, white: Whitened, z: Array, precision: Array, log_prior: float, trained: Array | None
) -> tuple[Array, float, np.ndarray, float]:
    """(prior factors τ (G,), noise factor κ, how far the mode moves with them (m,), log evidence). trained: factors that were found during
    the training and are kept; None to look for them now."""
    number = len(white.square)
    start = jnp.ones(number) if trained is None else jnp.asarray(trained, float)
    log_evidence, slope = evidence_of(target, sums, white, z, start)
    logs = {"prior": jnp.log(start), "noise": jnp.zeros(())}
    free = free_factors(method)
    searching = trained is None and any(free.values())
    if searching:
        logs = jax.jit(lambda at: climb(log_evidence, at, free, method.num_tune_steps, 0.3))(logs)
    value = float(log_evidence(logs))
    tau, noise = jnp.exp(logs["prior"]), float(jnp.exp(logs["noise"]))
    shift = np.zeros(len(z)) if white.solve is None or not searching else np.asarray(white.solve(tau, noise**-2, slope(tau, noise)))
    # For priors that are not Gaussian, the density at the mode is not that of the Gaussian with its curvature.
    if len(precision) == plan.layout.size:
        gaussian = 0.5 * np.sum(np.log(precision)) - 0.5 * len(precision) * np.log(2 * np.pi) - 0.5 * float(jnp.sum(white.square))
        value += log_prior - gaussian
    return tau, noise, shift, value


def prior_curvature(target: Any, params: Tree, index: np.ndarray) -> tuple[Array, Array]:
    """(−∂²log p(w)/∂w², ∂log p(w)/∂w) for the weights with these numbers, (m,) each; priors here are products over weights."""
    log_prior = lambda network: target.log_prior(params | {"network": network})
    slope, change = jax.jvp(jax.grad(log_prior), (params["network"],), (jax.tree.map(jnp.ones_like, params["network"]),))
    return -_tree.flat(change)[index], _tree.flat(slope)[index]


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
    place = np.zeros(size, np.int32)
    place[index] = np.arange(len(index))
    return jnp.exp(jnp.mean(jnp.log(scale[place[block.numbers]]), axis=1))


def _whiten_blocks(
    method: Any, plan: Plan, sums: Sums, basis: Any, weights: Array, scale: Array, index: np.ndarray, group: np.ndarray
) -> Whitened:
    """One Kronecker product a block, eigen-decomposed; a diagonal for the rest."""
    size = int(group.max(initial=0)) + 1
    sides, corrected = sums.curvature
    place = np.zeros(plan.layout.size, np.int32)
    place[index] = np.arange(len(index))
    lefts, rights, values, scales, members = [], [], [], [], []
    for number, block in enumerate(plan.layout.blocks):
        rows = row_scales(scale, block, plan.layout.size, index)
        positions = 1 if plan.reduce else block.positions
        if plan.structure == "ekfac":
            left, right = basis[number][0] / rows[:, None], jnp.asarray(basis[number][1])
            own = corrected[number]
        else:
            a, left = jnp.linalg.eigh(rows[:, None] * sides.inputs[number] * rows)
            b, right = jnp.linalg.eigh(sides.outputs[number])
            own = jnp.outer(jnp.maximum(a, 0.0), jnp.maximum(b, 0.0)) / (sums.mass * positions)
        for part, item in (
            (lefts, left),
            (rights, right),
            (values, jnp.maximum(own, 0.0)),
            (scales, rows),
            (members, place[block.numbers.ravel()]),
        ):
            part.append(item)
    rest = place[plan.layout.rest]
    rest_values = jnp.maximum(sides.rest, 0.0) * scale[rest] ** 2
    of = lambda number: min(number, size - 1)  # one factor for all, or one a block and one for the rest

    def logdet(tau: Array, c: Array) -> Array:
        total = jnp.zeros(())
        for number, own in enumerate(values):
            total = total + jnp.sum(jnp.log(c * own + tau[of(number)]))
        return total + (jnp.sum(jnp.log(c * rest_values + tau[of(len(values))])) if len(rest) else 0.0)

    def operator(tau: Array, c: Any) -> Blocks:
        parts: list[Any] = [
            KroneckerEigen(left, right, 1.0 / (c * own + tau[of(number)]), rows)
            for number, (left, right, own, rows) in enumerate(zip(lefts, rights, values, scales, strict=True))
        ]
        where = list(members)
        if len(rest):
            parts.append(Diagonal(scale[rest] / jnp.sqrt(c * rest_values + tau[of(len(values))])))
            where.append(rest)
        return Blocks(tuple(parts), tuple(where))

    whole = jnp.zeros(len(index), scale.dtype).at[rest].set(scale[rest])
    for own, rows, block in zip(members, scales, plan.layout.blocks, strict=True):
        whole = whole.at[own].set(jnp.repeat(rows, block.numbers.shape[1]))
    return Whitened(group, by_group(group, (weights / whole) ** 2), logdet, operator)
