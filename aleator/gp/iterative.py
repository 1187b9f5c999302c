"""Exact processes without a factor: conjugate gradients, stochastic log-determinants and traces, for more rows than n² numbers allow.

With A = K + D, D the noise, and a preconditioner P = LLᵀ + D from the leading rows L of a pivoted Cholesky factorisation, A is met in products only, computed in
blocks of rows. One run of conjugate gradients on the residual and on probes z ~ N(0, P) gives α = A⁻¹r, the w = A⁻¹z, and the tridiagonal matrices T of
Lanczos, from which (Gardner et al. 2018; Wang et al. 2019)

    log|A| ≈ log|P| + mean z·P⁻¹z (log T)₁₁        tr(A⁻¹dA) ≈ tr(P⁻¹dA) + mean (w − P⁻¹z)·dA P⁻¹z.

The better P, the less the probes have to add, to the value and to its derivative alike; what they leave is reported as a standard error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.gp._factor import factor, pivoted

FLOOR = 1e-6  # of the preconditioner's noise, relative to the mean prior variance: A may have less, P must be safe to invert


@dataclasses.dataclass(frozen=True)
class Iterative:
    """How a process without a factor is solved. rank: of the preconditioner; num_probes: Gaussian vectors behind log-determinant and trace, drawn from `seed` and the
    same at every evaluation, so that a search climbs one function; num_steps: of conjugate gradients at most; tolerance: of their residuals, relative to the
    right-hand sides; byte_budget: for pieces of the covariance, which is held whole where it fits."""

    rank: int = 500
    num_probes: int = 16
    num_steps: int = 200
    tolerance: float = 1e-4
    byte_budget: int = 2**28
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "num_probes", "num_steps", "byte_budget", "tolerance"):
            if not getattr(self, name) > 0:
                raise MethodError(message(f"Iterative.{name} cannot be used.", getattr(self, name), "a number > 0", "leave it out"))


class Split(NamedTuple):
    """P = LLᵀ + D: low (n, r), noise (n,), lower: the factor of I + LᵀD⁻¹L."""

    low: Array
    noise: Array
    lower: Array

    def solve(self, right: Array) -> Array:
        """P⁻¹ right, (n, m)."""
        scaled = right / self.noise[:, None]
        return scaled - (self.low / self.noise[:, None]) @ cho_solve((self.lower, True), self.low.T @ scaled)

    def logdet(self) -> Array:
        return jnp.sum(jnp.log(self.noise)) + 2.0 * jnp.sum(jnp.log(jnp.diag(self.lower)))

    def sample(self, key: Any, number: int) -> Array:
        """Draws of N(0, P), (n, number)."""
        key_low, key_noise = jax.random.split(key)
        common = self.low @ jax.random.normal(key_low, (self.low.shape[1], number))
        return common + jnp.sqrt(self.noise)[:, None] * jax.random.normal(key_noise, (len(self.noise), number))


class Gradients(NamedTuple):
    """solution (n, m) of A·solution = right; residual (m,): what is left, relative to right; diagonal, beside (steps, m): T of each column, cut off by ones and zeros
    where it stopped."""

    solution: Array
    residual: Array
    diagonal: Array
    beside: Array


def precondition(kernel: Any, params: Tree, x: Tree, noise: Array, rank: int) -> Split:
    low = pivoted(kernel, params, x, min(rank, len(noise)))[0].T
    safe = jnp.maximum(noise, FLOOR * jnp.mean(kernel.diag(params, x)))
    lower, _ = factor(jnp.eye(low.shape[1]) + low.T @ (low / safe[:, None]))
    return Split(low, safe, lower)


def products(kernel: Any, params: Tree, x: Tree, noise: Array, budget: int) -> Callable[[Array], Array]:
    """right (n, m) → (K + D)·right, K held where it fits, else computed again in blocks of rows at each product and each derivative of one."""
    n = len(noise)
    if 8 * n**2 <= budget:
        held = kernel(params, x, x)
        return lambda right: held @ right + noise[:, None] * right
    size = max(1, budget // (8 * n))
    number = -(-n // size)
    size = -(-n // number)
    index = jnp.minimum(jnp.arange(number * size), n - 1).reshape(number, size)  # the last block is filled up with a row that is cut off

    def apply(right: Array) -> Array:
        block = jax.checkpoint(lambda rows: kernel(params, _tree.take(x, rows), x) @ right)
        return jax.lax.map(block, index).reshape(number * size, -1)[:n] + noise[:, None] * right

    return apply


def conjugate(apply: Callable[[Array], Array], split: Split, right: Array, tolerance: float, num_steps: int) -> Gradients:
    """Preconditioned conjugate gradients on all columns of right at once, each until its residual is small."""
    size = jnp.linalg.norm(right, axis=0)
    left = lambda residual: jnp.linalg.norm(residual, axis=0) / jnp.where(size > 0, size, 1.0)
    solved = split.solve(right)
    square = jnp.sum(right * solved, axis=0)
    empty = jnp.zeros((num_steps, right.shape[1]))

    def running(state: tuple) -> Array:
        return (state[0] < num_steps) & jnp.any(left(state[2]) > tolerance)

    def step(state: tuple) -> tuple:
        i, solution, residual, direction, square, shares, turns = state
        active = left(residual) > tolerance
        image = apply(direction)
        share = jnp.where(active, square / jnp.where(active, jnp.sum(direction * image, axis=0), 1.0), 0.0)
        solution, residual = solution + share * direction, residual - share * image
        solved = split.solve(residual)
        new = jnp.sum(residual * solved, axis=0)
        turn = jnp.where(active, new / jnp.where(active, square, 1.0), 0.0)
        direction = jnp.where(active, solved + turn * direction, direction)
        return i + 1, solution, residual, direction, jnp.where(active, new, square), shares.at[i].set(share), turns.at[i].set(turn)

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(right), right, solved, square, empty, empty)
    _, solution, residual, _, _, shares, turns = jax.lax.while_loop(running, step, start)
    # T of Lanczos from the coefficients of the gradients: T_ii = 1/αᵢ + βᵢ₋₁/αᵢ₋₁, T_i,i+1 = √βᵢ/αᵢ.
    used = shares > 0
    inverse = jnp.where(used, 1.0 / jnp.where(used, shares, 1.0), 0.0)
    before = jnp.concatenate([jnp.zeros_like(turns[:1]), (turns * inverse)[:-1]])
    follows = jnp.concatenate([used[1:], jnp.zeros_like(used[:1])])
    return Gradients(solution, left(residual), jnp.where(used, inverse + before, 1.0), jnp.where(follows, jnp.sqrt(turns) * inverse, 0.0))


def log_quadratic(diagonal: Array, beside: Array) -> Array:
    """(log T)₁₁ of each column's tridiagonal T, (m,): Gaussian quadrature of log over the spectrum the column sees."""

    def one(diagonal: Array, beside: Array) -> Array:
        matrix = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
        values, vectors = jnp.linalg.eigh(matrix)
        return jnp.sum(vectors[0] ** 2 * jnp.log(jnp.maximum(values, 1e-300)))

    return jax.vmap(one, 1)(diagonal, beside)


def log_normal(solver: Iterative, kernel: Any, params: Tree, x: Tree, noise: Array, residual: Array) -> tuple[Array, Array]:
    """Σⱼ log N(residualⱼ; 0, K + D) over columns (n, k), estimated, and its standard error from the probes.

    The first derivative is ½ α·dA α − α·dr − (k/2) tr(A⁻¹dA); there is no second one.
    """
    still = jax.lax.stop_gradient((params, noise, residual))
    split = precondition(kernel, still[0], x, still[1], solver.rank)
    probes = split.sample(jax.random.key(solver.seed), solver.num_probes)
    n, k = residual.shape
    apply = products(kernel, still[0], x, still[1], solver.byte_budget)
    found = conjugate(apply, split, jnp.concatenate([still[2], probes], axis=1), solver.tolerance, solver.num_steps)
    weights, images = found.solution[:, :k], found.solution[:, k:]
    white = split.solve(probes)
    each = jnp.sum(probes * white, axis=0) * log_quadratic(found.diagonal[:, k:], found.beside[:, k:])
    logdet = split.logdet() + jnp.mean(each)
    error = 0.5 * k * jnp.std(each, ddof=1) / solver.num_probes**0.5 if solver.num_probes > 1 else jnp.zeros(())
    value = -0.5 * jnp.sum(still[2] * weights) - 0.5 * k * logdet - 0.5 * n * k * math.log(2 * math.pi)
    # A function that is only differentiated. tr(P⁻¹dA) = Σ dAᵢᵢ/dᵢ − tr(GᵀdA G), G = D⁻¹L C⁻ᵀ, is exact and is most of it.
    half = solve_triangular(split.lower, (split.low / split.noise[:, None]).T, lower=True).T
    sides = jnp.concatenate([weights, k * half, -k / solver.num_probes * (images - white)], axis=1)
    sides, right, weights, safe = jax.lax.stop_gradient((sides, jnp.concatenate([weights, half, white], axis=1), weights, split.noise))
    own = jnp.sum((kernel.diag(params, x) + noise) / safe)
    product = jnp.vdot(sides, products(kernel, params, x, noise, solver.byte_budget)(right))
    slope = 0.5 * (product - k * own) - jnp.vdot(weights, residual)
    return jax.lax.stop_gradient(value) + slope - jax.lax.stop_gradient(slope), jax.lax.stop_gradient(error)


def solve(solver: Iterative, kernel: Any, params: Tree, x: Tree, noise: Array, right: Array) -> tuple[Array, Array]:
    """A⁻¹ right (n, m) and the residuals (m,). Started at 0, right·solution is never above right·A⁻¹right: variances come out too large, not too small."""
    split = precondition(kernel, params, x, noise, solver.rank)
    found = conjugate(products(kernel, params, x, noise, solver.byte_budget), split, right, solver.tolerance, solver.num_steps)
    return found.solution, found.residual
