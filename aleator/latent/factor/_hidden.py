"""Beliefs about the hidden numbers z of each row, given the loadings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln, logsumexp

from aleator._typing import Array, Tree
from aleator.latent._precision import inverse_of
from aleator.latent.parts import LOG_2PI

LOCAL_STEPS, LOCAL_GAIN = 200, 1e-11  # of the beliefs about one row: most iterations, and the gain in nats at which they end


class Hidden(NamedTuple):
    """q(z) of some rows. mean (n, q), root (n, q, q): of the precision, lower; terms (n,): log normalisers or bounds; curve (n, d): E[ω]
    of each entry where there is one, else 1 where seen and 0 where missing."""

    mean: Array
    root: Array
    terms: Array
    curve: Array


def gaussian(natural: Tree, y: Array, seen: Array, complete: bool) -> Hidden:
    """log ∫ N(z; 0, I) exp⟨T(y, z), t⟩ dz and the integrand's mean and precision I + Σ_j E[τ_j w_j w_jᵀ] over what is seen.

    complete: nothing is missing, so that all rows share one precision."""
    cross, square = natural["cross"], -2.0 * natural["square"]
    d = len(cross)
    level = jnp.broadcast_to(natural["number"], (d,)) - 0.5 * LOG_2PI - 0.5 * square[:, -1, -1]
    energy = jnp.broadcast_to(natural["energy"], (d,))
    linear = y @ cross[:, :-1] - seen @ square[:, :-1, -1]
    base = seen @ level + y**2 @ energy + y @ cross[:, -1]
    summed = jnp.sum(square[:, :-1, :-1], axis=0)[None] if complete else jnp.einsum("nj,jab->nab", seen, square[:, :-1, :-1])
    mean, root, terms = _integrate(summed, linear)
    return Hidden(mean, root, base + terms, seen)


def _integrate(precision: Array, linear: Array) -> tuple[Array, Array, Array]:
    """Mean, root of the precision and log normaliser of N(z; 0, I) exp(linearᵀz − ½zᵀ precision z); precision (n or 1, q, q)."""
    q = linear.shape[-1]
    root = jnp.linalg.cholesky(precision + jnp.eye(q))
    if len(root) == 1:  # shared: one factor for all rows
        half = solve_triangular(root[0], linear.T, lower=True)
        mean, size = solve_triangular(root[0], half, lower=True, trans=1).T, jnp.sum(half**2, axis=0)
    else:
        half = solve_triangular(root, linear[..., None], lower=True)
        mean, size = solve_triangular(root, half, lower=True, trans=1)[..., 0], jnp.sum(half[..., 0] ** 2, axis=-1)
    return mean, root, 0.5 * size - jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)


def logistic(natural: Tree, sign: Array, seen: Array) -> Hidden:
    """The bound log σ(η) ≥ log σ(ξ) + ½(η − ξ) − ½ω(η² − ξ²), ω = tanh(ξ/2)/(2ξ), at ξ² = E[η²], found in turn with q(z)."""
    cross, square = natural["cross"], -2.0 * natural["square"]

    def at(xi: Array, cross: Array, square: Array) -> tuple[Array, Array, Array, Array]:
        omega = seen * _omega(xi)
        linear = sign @ cross[:, :-1] - omega @ square[:, :-1, -1]
        mean, root, terms = _integrate(jnp.einsum("nj,jab->nab", omega, square[:, :-1, :-1]), linear)
        base = sign @ cross[:, -1] - 0.5 * omega @ square[:, -1, -1]
        return mean, root, base + terms + jnp.sum(seen * (jax.nn.log_sigmoid(xi) - 0.5 * xi + 0.5 * _omega(xi) * xi**2), axis=-1), omega

    def step(carry: Any) -> Any:
        xi, value, _, number = carry
        mean, root, terms, _ = at(xi, *jax.lax.stop_gradient((cross, square)))
        inputs = jnp.concatenate([mean, jnp.ones((len(mean), 1))], axis=1)
        fixed = jax.lax.stop_gradient(square)
        second = jnp.einsum("na,jab,nb->nj", inputs, fixed, inputs) + jnp.einsum("nab,jab->nj", inverse_of(root), fixed[:, :-1, :-1])
        return jnp.sqrt(jnp.maximum(second, 0.0)), terms, jnp.max(jnp.abs(terms - value)), number + 1

    going = lambda carry: (carry[2] > LOCAL_GAIN) & (carry[3] < LOCAL_STEPS)
    start = jnp.ones_like(sign), jnp.full(len(sign), -jnp.inf), jnp.asarray(jnp.inf), jnp.zeros((), jnp.int32)
    xi, _, _, _ = jax.lax.while_loop(going, step, start)
    return Hidden(*at(xi, cross, square))


def _omega(xi: Array) -> Array:
    """tanh(ξ/2)/(2ξ), ¼ at 0."""
    small = xi < 1e-4
    return jnp.where(small, 0.25, jnp.tanh(0.5 * xi) / (2.0 * jnp.where(small, 1.0, xi)))


def bounded(weights: Array, centre: Array, row: Array, num_classes: int | None) -> Hidden:
    """E_q[log p(row | z)] − KL(q ‖ N(0, I)) for one row, maximised over Gaussian q(z) = N(mean, precision⁻¹).

    row: counts, or labels of `num_classes` classes; natural parameters are centre + weights·(z, 1). Counts: E[exp η] = exp(m + ½v). Labels: E[log Σ_c exp η_c] ≤ log Σ_c exp(m_c + ½v_c). Natural-gradient steps (Khan and Lin, 2017):
    precision → I − 2 Wᵀ diag(∂f/∂v) W, mean along the gradient in its metric; a step that does not gain is halved.
    """
    q = weights.shape[1] - 1
    seen = jnp.isfinite(row)
    filled = jnp.where(seen, row, 0.0)

    def expected(m: Array, v: Array) -> Array:
        if num_classes is None:
            return jnp.sum(jnp.where(seen, filled * m - jnp.exp(m + 0.5 * v) - gammaln(filled + 1.0), 0.0))
        m, v = m.reshape(-1, num_classes), v.reshape(-1, num_classes)
        chosen = jnp.take_along_axis(m, filled.astype(jnp.int32)[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(seen, chosen - logsumexp(m + 0.5 * v, axis=1), 0.0))

    def moments(w: Array, mean: Array, root: Array) -> tuple[Array, Array]:
        return w[:, :-1] @ mean + w[:, -1] + centre, jnp.sum(solve_triangular(root, w[:, :-1].T, lower=True) ** 2, axis=0)

    def bound(w: Array, mean: Array, precision: Array) -> Array:
        root = jnp.linalg.cholesky(precision)
        trace = jnp.sum(solve_triangular(root, jnp.eye(q), lower=True) ** 2)
        divergence = 0.5 * (trace + mean @ mean - q) + jnp.sum(jnp.log(jnp.diagonal(root)))
        return expected(*moments(w, mean, root)) - divergence

    fixed = jax.lax.stop_gradient(weights)

    def step(carry: Any) -> Any:
        mean, precision, value, rate, gain, number = carry
        slope, curve = jax.grad(expected, (0, 1))(*moments(fixed, mean, jnp.linalg.cholesky(precision)))
        goal = jnp.eye(q) - 2.0 * (fixed[:, :-1].T * curve) @ fixed[:, :-1]
        tried = (1.0 - rate) * precision + rate * goal
        moved = mean + rate * jnp.linalg.solve(tried, fixed[:, :-1].T @ slope - mean)
        new = bound(fixed, moved, tried)
        better = new >= value
        pick = lambda a, b: jnp.where(better, a, b)
        gain = jnp.where(better, new - value, jnp.where(rate < 1e-8, 0.0, jnp.inf))
        return (
            pick(moved, mean),
            pick(tried, precision),
            pick(new, value),
            jnp.where(better, jnp.minimum(2.0 * rate, 1.0), 0.5 * rate),
            gain,
            number + 1,
        )

    going = lambda carry: (carry[4] > LOCAL_GAIN) & (carry[5] < LOCAL_STEPS)
    mean, precision = jnp.zeros(q), jnp.eye(q)
    start = mean, precision, bound(fixed, mean, precision), jnp.asarray(1.0), jnp.asarray(jnp.inf), jnp.zeros((), jnp.int32)
    mean, precision, *_ = jax.lax.while_loop(going, step, start)
    return Hidden(mean, jnp.linalg.cholesky(precision), bound(weights, mean, precision), seen.astype(row.dtype))


def whiten(root: Array, noise: Array) -> Array:
    """L⁻ᵀ noise, (n, q): the spread of N(0, (LLᵀ)⁻¹)."""
    root = jnp.broadcast_to(root, (len(noise), *root.shape[-2:]))
    return solve_triangular(root, noise[..., None], lower=True, trans=1)[..., 0]
