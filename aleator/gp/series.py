"""SeriesGP: Gaussian processes over one input (time) with Markov kernels, in O(N): the Kalman filter and smoother in the place of an N × N matrix.

A Matérn process of order ½, 1½, 2½ is the first coordinate of a linear stochastic differential equation of 1, 2, 3 states (Hartikainen and Särkkä 2010): between
times that are dt apart the state moves by A(dt) with noise P∞ − A P∞ Aᵀ. Sums of such processes stack their states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag

from aleator._cache import cached
from aleator._errors import DataError, ModelError, message
from aleator._outputs import Outputs
from aleator._typing import Array, Key, Tree
from aleator.data import Batch, Data
from aleator.gp.conditioned import Conditioned, extras
from aleator.gp.kernels import Matern12, Matern32, Matern52, Sum
from aleator.gp.process import GP
from aleator.posterior import Point, Posterior

MARKOV = (Matern12, Matern32, Matern52)


class Filtered(NamedTuple):
    """At each time: mean (T, d) and covariance (T, d, d) of the state given what was seen so far, the same before the time itself, A of the step to it, and
    log p(y | what was seen before), 0 where nothing is seen."""

    mean: Array
    covariance: Array
    mean_before: Array
    covariance_before: Array
    move: Array
    term: Array


@dataclasses.dataclass(frozen=True)
class SeriesGP(GP):
    """As `gp.GP`, for x (N,) or (N, 1) in any order and a kernel that is a Matérn or a sum of them: evidence, gradients and predictions in O(N), memory too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [type(term).__name__ for term in _terms(self.kernel) if not isinstance(term, MARKOV)]
        if wrong:
            raise ModelError(
                message(
                    "A series needs Markov kernels.", wrong, "gp.Matern12, Matern32, Matern52 and their sums", "use al.gp.GP for others"
                )
            )

    def bind(self, x: Tree, y: Tree) -> SeriesGP:
        shape = np.shape(x)
        if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1):
            raise DataError(message("A series has one input.", f"x of shape {shape}", "(N,) or (N, 1)", "use al.gp.GP for several"))
        bound: Any = super().bind(x, y)
        return bound

    def states(self, params: Tree) -> tuple[Callable[[Array], Array], Array, Array]:
        """A(dt), P∞ and H of the process: f = H·state."""
        parts = [_states(term, part) for term, part in _terms(self.kernel, params["kernel"])]
        move = lambda dt: block_diag(*(part[0](dt) for part in parts))
        first = [jnp.eye(len(part[1]))[0] for part in parts]
        return move, block_diag(*(part[1] for part in parts)), jnp.concatenate(first)

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(yᵢ | all y before in time), (n,)."""
        if batch.weight is not None:
            raise DataError(
                message("A Gaussian process takes no weights of rows.", "weights", "(x, y)", "repeat rows, or drop the weights")
            )
        time = _time(batch.x)
        order = jnp.argsort(time)
        terms = self._filter(params, time[order], self._away(params, batch.x, batch.y)[order], jnp.ones(len(time), bool)).term
        return jnp.sum(terms, axis=0)[jnp.argsort(order)]

    def log_evidence(self, params: Tree, x: Tree, y: Array) -> Array:
        time = _time(x)
        order = jnp.argsort(time)
        return jnp.sum(self._filter(params, time[order], self._away(params, x, y)[order], jnp.ones(len(time), bool)).term)

    def condition(self, posterior: Posterior, data: Any) -> Smoothed:
        if not isinstance(data, Data):
            raise DataError(message("A Gaussian process keeps its rows.", type(data).__name__, "data in memory", "pass (x, y)"))
        return Smoothed(posterior, np.asarray(data.x), np.asarray(data.y, np.float64), posterior.log_evidence)

    def smooth(self, params: Tree, time: Array, away: Array, seen: Array) -> tuple[Array, Array]:
        """Mean and variance of f − m at sorted times given all that is seen, (T, k)."""
        filtered = self._filter(params, time, away, seen)
        _, _, out = self.states(params)

        def back(carry: tuple, now: tuple) -> tuple:
            mean, covariance = carry
            at, spread, before, spread_before, move = now
            size = len(out)
            ridge = 1e-14 * jnp.trace(spread_before) * jnp.eye(size)
            gain = jnp.linalg.solve(spread_before + ridge, move @ spread).T
            new = at + gain @ (mean - before), spread + gain @ (covariance - spread_before) @ gain.T
            return new, (out @ new[0], out @ new[1] @ out)

        def one(f: Filtered) -> tuple[Array, Array]:
            last = f.mean[-1], f.covariance[-1]
            # The step from time t to t + 1 is described at t + 1.
            steps = (f.mean[:-1], f.covariance[:-1], f.mean_before[1:], f.covariance_before[1:], f.move[1:])
            moments: Any = jax.lax.scan(back, last, steps, reverse=True)[1]
            return jnp.append(moments[0], out @ last[0]), jnp.append(moments[1], out @ last[1] @ out)

        mean, variance = jax.vmap(one)(filtered)
        return mean.T, variance.T

    def simulate(self, key: Key, params: Tree, time: Array) -> Array:
        """A draw of f − m at sorted times from the prior, (T, k)."""
        move, stationary, out = self.states(params)
        size, k = len(out), self.targets()
        noise = jax.random.normal(key, (len(time), size, k))

        def step(state: Array, now: tuple) -> tuple[Array, Array]:
            dt, z = now
            a = move(dt)
            state = a @ state + _root(stationary - a @ stationary @ a.T) @ z
            return state, out @ state

        begin = _root(stationary) @ noise[0]
        rest = jax.lax.scan(step, begin, (jnp.diff(time), noise[1:]))[1]
        return jnp.concatenate([(out @ begin)[None], rest])

    def _away(self, params: Tree, x: Tree, y: Array) -> Array:
        return jnp.asarray(y, jnp.result_type(float)) - self.mean(params["mean"], x, self.targets())

    def _filter(self, params: Tree, time: Array, away: Array, seen: Array) -> Filtered:
        """The Kalman filter over sorted times, for each column of y; leaves (k, T, …)."""
        move, stationary, out = self.states(params)
        noise = jnp.broadcast_to(self.extra(params)["scale"], (self.targets(),)) ** 2
        gaps = jnp.diff(time, prepend=time[:1])  # before the first time the state is stationary, as it is at it

        def one(y: Array, variance: Array) -> Filtered:
            def step(carry: tuple, now: tuple) -> tuple:
                dt, value, here = now
                a = move(dt)
                mean = a @ carry[0]
                covariance = a @ (carry[1] - stationary) @ a.T + stationary
                cross = covariance @ out
                total, error = out @ cross + variance, value - out @ mean
                gain = jnp.where(here, cross / total, 0.0)
                term = jnp.where(here, -0.5 * (error**2 / total + jnp.log(2 * math.pi * total)), 0.0)
                after, spread = mean + gain * error, covariance - jnp.outer(gain, cross)
                return (after, 0.5 * (spread + spread.T)), Filtered(after, spread, mean, covariance, a, term)

            return jax.lax.scan(step, (jnp.zeros(len(out)), stationary), (gaps, y, seen))[1]

        return jax.vmap(one, in_axes=(1, 0))(away, noise)


@dataclasses.dataclass(frozen=True, eq=False)
class Smoothed(Conditioned):
    """f | x, y of a series: new times join the old ones as unseen, and one pass forth and back serves all of them."""

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            key_params, key_f = jax.random.split(key)
            params, each = self._draws(key_params, num_samples)
            number = len(jax.tree.leaves(params)[0]) if jax.tree.leaves(params) else 1
            time, away_rows, order, seen = self._union(x)
            compute = _smoothed(model)
            settings = (jnp.arange(number), params)
            mean, variance = (np.asarray(part)[:, len(self.y) :] for part in compute(settings, time, self.y, order, seen, away_rows))
            variance = np.maximum(variance, 0.0)
            extra = jax.tree.map(np.asarray, extras(model, params, number))
            if isinstance(self.base, Point):
                return Outputs(mean=mean[0], variance=variance[0], extra=jax.tree.map(lambda leaf: leaf[0], extra))
            z = np.asarray(jax.random.normal(key_f, (number, each, *mean.shape[1:])))
            draws = (mean[:, None] + np.sqrt(variance)[:, None] * z).reshape(-1, *mean.shape[1:])
            return Outputs(draws=draws, extra=jax.tree.map(lambda leaf: np.repeat(leaf, each, axis=0), extra))

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """Matheron's rule: a draw of the prior at all times, plus the mean of what the data say about the difference; O(N) a draw, exact."""
        with jax.enable_x64(True):
            key_params, key_f = jax.random.split(key)
            params, each = self._draws(key_params, num_samples)
            number = len(jax.tree.leaves(params)[0]) if jax.tree.leaves(params) else 1
            time, rows, order, seen = self._union(x)
            keys = jax.random.split(key_f, (number, each))
            draws = np.asarray(_pathwise(model)((keys, params), time, self.y, order, seen, rows))[:, :, len(self.y) :]
            extra = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), each, axis=0), extras(model, params, number))
            return Outputs(draws=draws.reshape(-1, *draws.shape[2:]), extra=extra)

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        return Posterior.joint(self, key, model, x, num_samples)

    def _union(self, x: Tree) -> tuple[Array, Array, Array, Array]:
        """All times as given (old, then new), the rows, the order that sorts them, and which are seen, in that order."""
        rows = jnp.concatenate([jnp.asarray(np.asarray(part, np.float64).reshape(len(part), -1)) for part in (self.x, x)])
        time = rows[:, 0]
        order = jnp.argsort(time)
        return time[order], rows, order, (order < len(self.y))


@cached
def _smoothed(model: SeriesGP) -> Callable:
    def compute(settings: tuple, time: Array, y: Array, order: Array, seen: Array, rows: Array) -> tuple[Array, Array]:
        def one(setting: tuple) -> tuple[Array, Array]:
            params = setting[1]
            level = model.mean(params["mean"], rows, model.targets())
            away = jnp.zeros_like(level).at[: len(y)].set(y - level[: len(y)])
            mean, variance = model.smooth(params, time, away[order], seen)
            back = jnp.argsort(order)
            return mean[back] + level, variance[back]

        return jax.lax.map(one, settings)

    return jax.jit(compute)


@cached
def _pathwise(model: SeriesGP) -> Callable:
    def compute(settings: tuple, time: Array, y: Array, order: Array, seen: Array, rows: Array) -> Array:
        def one(setting: tuple) -> Array:
            keys, params = setting
            level, back = model.mean(params["mean"], rows, model.targets()), jnp.argsort(order)
            noise = jnp.broadcast_to(model.extra(params)["scale"], (model.targets(),))

            def path(key: Key) -> Array:
                key_f, key_noise = jax.random.split(key)
                f = model.simulate(key_f, params, time)
                target = jnp.zeros_like(level).at[: len(y)].set(y - level[: len(y)])[order]
                missed = target - f - noise * jax.random.normal(key_noise, f.shape)
                return (f + model.smooth(params, time, missed, seen)[0])[back] + level

            return jax.lax.map(path, keys)

        return jax.lax.map(one, settings)

    return jax.jit(compute)


def _terms(kernel: Any, params: Tree = None) -> list:
    """The kernel's terms; beside their parameters, where these are given."""
    terms = kernel.terms if isinstance(kernel, Sum) else (kernel,)
    if params is None:
        return list(terms)
    return list(zip(terms, [params[str(i)] for i in range(len(terms))] if isinstance(kernel, Sum) else [params], strict=True))


def _states(kernel: Any, params: Tree) -> tuple[Callable[[Array], Array], Array]:
    """A(dt) and P∞ of one Matérn kernel."""
    variance, length = kernel.value(params, "scale") ** 2, jnp.reshape(kernel.value(params, "length"), ())
    if isinstance(kernel, Matern12):
        return (lambda dt: jnp.exp(-dt / length)[None, None]), variance[None, None]
    if isinstance(kernel, Matern32):
        rate = math.sqrt(3.0) / length

        def move(dt: Array) -> Array:
            return jnp.exp(-rate * dt) * jnp.array([[1 + rate * dt, dt], [-(rate**2) * dt, 1 - rate * dt]])

        return move, jnp.diag(jnp.stack([variance, rate**2 * variance]))
    rate = math.sqrt(5.0) / length
    middle = rate**2 * variance / 3.0

    def move_smooth(dt: Array) -> Array:
        u = rate * dt
        rows = [
            [1 + u + u**2 / 2, dt * (1 + u), dt**2 / 2],
            [-rate * u**2 / 2, 1 + u - u**2, dt * (1 - u / 2)],
            [rate**2 * u * (u / 2 - 1), rate * u * (u - 3), 1 - 2 * u + u**2 / 2],
        ]
        return jnp.exp(-u) * jnp.array(rows)

    zero = jnp.zeros_like(variance)
    return move_smooth, jnp.array([[variance, zero, -middle], [zero, middle, zero], [-middle, zero, rate**4 * variance]])


def _root(matrix: Array) -> Array:
    values, vectors = jnp.linalg.eigh(matrix)
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))


def _time(x: Tree) -> Array:
    return jnp.asarray(x, jnp.result_type(float)).reshape(len(x))
