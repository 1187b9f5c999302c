"""Filtering, smoothing and simulating z_t = F z_{t−1} + q_t, y_t = H z_t + r_t at given matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from aleator._typing import Array, Key
from aleator.latent._precision import symmetric
from aleator.latent.hmm import ends
from aleator.latent.parts import LOG_2PI


class System(NamedTuple):
    """z_1 ~ N(mean, covariance), z_t = dynamics z_{t−1} + N(0, drift), y_t = emission z_t + N(0, noise). emission (d, K), or (T, d, K)."""

    mean: Array
    covariance: Array
    dynamics: Array
    drift: Array
    emission: Array
    noise: Array


class Kalman(NamedTuple):
    """The forward pass. mean, covariance: of z_t | y_≤t, (T, K) and (T, K, K); predicted_…: of z_t | y_<t. log_terms: log p(y_t | y_<t), (T,)."""

    predicted_mean: Array
    predicted_covariance: Array
    mean: Array
    covariance: Array
    log_terms: Array


class Smoothed(NamedTuple):
    """mean, covariance: of z_t | y. lagged: Cov(z_{t+1}, z_t | y), (T, K, K), 0 at the end of a sequence."""

    mean: Array
    covariance: Array
    lagged: Array


def kalman(system: System, y: Array, begins: Array, bend: Array | None = None) -> Kalman:
    """Filter y (T, d), NaN where missing; covariances in Joseph's form stay positive. bend (T, K, K): further factors exp(−½zᵀSz) of each z_t,
    the spread of F and H around their means in coordinate ascent (Barber and Chiappa 2006)."""
    num, eye = len(system.mean), jnp.eye(len(system.mean))
    steady = system.emission.ndim == 2

    def one(before: Any, item: Any) -> tuple[Any, Kalman]:
        row, begin, emission, curvature = item
        emission = system.emission if emission is None else emission
        mean = jnp.where(begin, system.mean, system.dynamics @ before[0])
        spread = jnp.where(begin, system.covariance, system.dynamics @ before[1] @ system.dynamics.T + system.drift)
        seen = jnp.isfinite(row)
        emission = jnp.where(seen[:, None], emission, 0.0)
        noise: Any = jnp.where(seen[:, None] & seen, system.noise, jnp.eye(len(row)))
        left = jnp.where(seen, jnp.where(seen, row, 0.0) - emission @ mean, 0.0)
        root = jnp.linalg.cholesky(emission @ spread @ emission.T + noise)
        gain = cho_solve((root, True), emission @ spread).T
        scaled = solve_triangular(root, left, lower=True)
        term = -0.5 * (jnp.sum(scaled**2) + jnp.sum(seen) * LOG_2PI) - jnp.sum(jnp.log(jnp.diagonal(root)))
        rest = eye - gain @ emission
        now, covariance = mean + gain @ left, rest @ spread @ rest.T + gain @ noise @ gain.T
        if curvature is not None:
            bent = eye + covariance @ curvature
            shrunk = jnp.linalg.solve(bent, jnp.concatenate([now[:, None], covariance], axis=1))
            term = term - 0.5 * jnp.linalg.slogdet(bent)[1] - 0.5 * now @ curvature @ shrunk[:, 0]
            now, covariance = shrunk[:, 0], symmetric(shrunk[:, 1:])
        return (now, covariance), Kalman(mean, spread, now, covariance, term)

    start = jnp.zeros(num), jnp.zeros((num, num))
    return jax.lax.scan(one, start, (y, begins, None if steady else system.emission, bend))[1]


def smooth(system: System, passed: Kalman, begins: Array) -> Smoothed:
    """Rauch, Tung and Striebel's backward pass, its covariances as sums of squares."""
    eye = jnp.eye(len(system.mean))
    later = jax.tree.map(lambda leaf: jnp.concatenate([leaf[1:], leaf[-1:]]), (passed.predicted_mean, passed.predicted_covariance))

    def one(after: Any, item: Any) -> tuple[Any, Smoothed]:
        mean, covariance, ahead, spread, end = item
        root = jnp.linalg.cholesky(spread)
        gain = jnp.where(end, 0.0, cho_solve((root, True), system.dynamics @ covariance).T)
        rest = eye - gain @ system.dynamics
        now = mean + gain @ (after[0] - ahead)
        whole = rest @ covariance @ rest.T + gain @ (after[1] + system.drift) @ gain.T
        return (now, whole), Smoothed(now, whole, after[1] @ gain.T)

    start = passed.mean[-1], passed.covariance[-1]
    return jax.lax.scan(one, start, (passed.mean, passed.covariance, *later, ends(begins)), reverse=True)[1]


def draw_states(key: Key, system: System, y: Array, begins: Array) -> Array:
    """z ~ p(z | y), (T, K): a simulated path, corrected by smoothing what y differs from its own observations (Durbin and Koopman 2002)."""
    key_path, key_noise = jax.random.split(key)
    path = walk(key_path, system, begins)
    emitted = jnp.einsum("...ij,...j->...i", system.emission, path) + jax.random.normal(key_noise, y.shape) @ root(system.noise).T
    centred = system._replace(mean=jnp.zeros_like(system.mean))
    return path + smooth(centred, kalman(centred, y - emitted, begins), begins).mean


def walk(key: Key, system: System, begins: Array, state: Array | None = None) -> Array:
    """A path of the states, (T, K), from the first ones or from `state`."""
    noise = jax.random.normal(key, (len(begins), len(system.mean)))
    first, drift = root(system.covariance), root(system.drift)

    def one(state: Any, item: Any) -> tuple[Any, Any]:
        begin, noise = item
        new = jnp.where(begin, system.mean + first @ noise, system.dynamics @ state + drift @ noise)
        return new, new

    return jax.lax.scan(one, jnp.zeros_like(system.mean) if state is None else state, (begins, noise))[1]


def certain(path: Array) -> Smoothed:
    """A path that is known, as if smoothed: without spread."""
    nothing = jnp.zeros((*path.shape, path.shape[-1]))
    return Smoothed(path, nothing, nothing)


def root(covariance: Array) -> Array:
    """A with AAᵀ = covariance, singular ones too."""
    values, vectors = jnp.linalg.eigh(covariance)
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))
