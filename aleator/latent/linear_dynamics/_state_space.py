"""What follows from a linear Gaussian system whatever its matrices mean: likelihood, states, forecasts."""

from __future__ import annotations

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, message
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._model import ConjugateLatent, in_double, observations
from aleator.latent.hmm import asked, check_weights, double, host, sequence_begins
from aleator.latent.linear_dynamics._kalman import Kalman, Smoothed, System, draw_states, kalman, root, smooth, walk
from aleator.latent.mixture import rows_of
from aleator.latent.parts import check_width


class StateSpace(ConjugateLatent):
    """A model that is a `System` at each parameter tree; inside, y has mean 0 and standard deviation 1: y = centre + scale·(model's units)."""

    minibatch = False
    num_invariants = 16
    centre: Any
    scale: Any

    @abc.abstractmethod
    def system(self, params: Tree, x: Any = None) -> System:
        """The matrices of the model at one parameter tree."""

    def laid(self, batch: Batch) -> tuple[Array, Array]:
        """Where sequences begin, and y in the model's units (T, d)."""
        check_weights(batch)
        centre, scale = self.scale_of()
        y = (rows_of(batch.y) - centre) / scale
        return sequence_begins(self._ids(batch.x), len(y)), y

    def _ids(self, x: Any) -> Any:
        """What tells the sequences in x apart; None for one sequence."""
        return x

    def scale_of(self) -> tuple[Array, Array]:
        """(centre, scale), each (d,)."""
        return jnp.asarray(self.centre), jnp.asarray(self.scale)

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(y_t | y_<t, θ), states summed out, in y's units; (T,)."""
        begins, y = self.laid(batch)
        return kalman(self.system(params, batch.x), y, begins).log_terms - self._units(y)

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """log p(y_t | y_<t, θ) at some of the rows."""
        terms = self.log_likelihood(params, batch)
        return terms[np.linspace(0, len(terms) - 1, self.num_invariants).astype(np.int32)]

    def _units(self, y: Array) -> Array:
        """The log of the volume a unit of the model has in y's units, for what is seen of each row."""
        return jnp.isfinite(y) @ jnp.log(self.scale_of()[1])

    # ---- questions, at one parameter tree ----

    @in_double
    def filter(self, params: Tree, y: Any, x: Any = None) -> Kalman:
        """Mean and covariance of z_t given y_<t and given y_≤t, and log p(y_t | y_<t)."""
        return host(_filter(self, double(params), self._asked(x, y)))

    @in_double
    def smooth(self, params: Tree, y: Any, x: Any = None) -> Smoothed:
        """Mean (T, K) and covariance (T, K, K) of z_t given all of y."""
        return host(smooth_at(self, double(params), self._asked(x, y)))

    @in_double
    def sample_states(self, key: KeyLike, params: Tree, y: Any, num_samples: int, x: Any = None) -> Array:
        """Paths from p(z | y), (num_samples, T, K)."""
        return host(_sample_states(self, jax.random.split(as_key(key), num_samples), double(params), self._asked(x, y)))

    @in_double
    def simulate(self, key: KeyLike, params: Tree, num_steps: int, x: Any = None) -> tuple[Array, Array]:
        """One sequence by ancestral sampling: z (T, K), y (T, d)."""
        return host(_simulate(self, num_steps, as_key(key), double(params), None if x is None else jnp.asarray(x)))

    @in_double
    def forecast(
        self, key: KeyLike, draws: Tree, y: Any, horizon: int, x: Any = None, future: Any = None, units: str = "units of the series"
    ) -> Any:
        """Simulated futures of the (last) sequence in y, one for each parameter tree stacked in `draws` (`fit.sample(key, n)`): an
        `al.series.Forecast` with paths (n, horizon), or (n, horizon, d) where y has several columns. future: inputs of the steps to come."""
        from aleator.series import Forecast

        draws = double(draws)
        keys = jax.random.split(as_key(key), len(jax.tree.leaves(draws)[0]))
        paths = np.asarray(_futures(self, horizon, keys, draws, self._asked(x, y), self._future(future, horizon)))
        return Forecast(paths[..., 0] if paths.shape[-1] == 1 else paths, units)

    def observed(self, y: Any) -> np.ndarray:
        rows = observations(y)
        check_width(rows, len(self.centre))
        return rows

    def about(self, x: Any, y: Any) -> tuple[StateSpace, Batch]:
        return self, self._asked(x, y)

    def _asked(self, x: Any, y: Any) -> Batch:
        return asked(self, x, y)

    def _future(self, future: Any, horizon: int) -> Array | None:
        if future is not None:
            raise DataError(message("The model has no inputs.", "future=…", "None", "drop them"))
        return None


# Compiled once a model and shape, however often they are asked.


@functools.partial(jax.jit, static_argnums=0)
def _filter(model: StateSpace, params: Tree, batch: Batch) -> Kalman:
    begins, y = model.laid(batch)
    passed = kalman(model.system(params, batch.x), y, begins)
    return passed._replace(log_terms=passed.log_terms - model._units(y))


@functools.partial(jax.jit, static_argnums=0)
def smooth_at(model: StateSpace, params: Tree, batch: Batch) -> Smoothed:
    begins, y = model.laid(batch)
    system = model.system(params, batch.x)
    return smooth(system, kalman(system, y, begins), begins)


@functools.partial(jax.jit, static_argnums=0)
def _sample_states(model: StateSpace, keys: Array, params: Tree, batch: Batch) -> Array:
    begins, y = model.laid(batch)
    system = model.system(params, batch.x)
    return jax.vmap(lambda key: draw_states(key, system, y, begins))(keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _simulate(model: StateSpace, num_steps: int, key: Key, params: Tree, x: Array | None) -> tuple[Array, Array]:
    key_path, key_noise = jax.random.split(key)
    system = model.system(params, x)
    path = walk(key_path, system, jnp.arange(num_steps) == 0)
    return path, _emit(key_noise, model, system, path)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _futures(model: StateSpace, horizon: int, keys: Array, draws: Tree, batch: Batch, future: Array | None) -> Array:
    begins, y = model.laid(batch)

    def one(item: tuple[Key, Tree]) -> Array:
        key, params = item
        key_now, key_path, key_noise = jax.random.split(key, 3)
        passed = kalman(model.system(params, batch.x), y, begins)
        now = passed.mean[-1] + root(passed.covariance[-1]) @ jax.random.normal(key_now, passed.mean[-1].shape)
        system = model.system(params, future)
        return _emit(key_noise, model, system, walk(key_path, system, jnp.zeros(horizon, bool), now))

    return jax.lax.map(one, (keys, draws))


def _emit(key: Key, model: StateSpace, system: System, path: Array) -> Array:
    """y (T, d) in its own units along a path of states."""
    centre, scale = model.scale_of()
    noise = jax.random.normal(key, (len(path), len(system.noise))) @ root(system.noise).T
    return centre + scale * (jnp.einsum("...ij,...j->...i", system.emission, path) + noise)
