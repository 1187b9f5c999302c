"""An adversarial generator, beside the models with a density: rows that a critic cannot tell from the data (E9; Goodfellow et al. 2014)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, message
from aleator._random import as_key, noise_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.networks import MLP

AVERAGE = 0.999  # of the generator's weights, a step: the game circles around its end, the average lies in the middle


class State(NamedTuple):
    """generator, critic: parameters, and their optimisers' states; average: the generator's parameters, averaged over steps."""

    generator: Tree
    critic: Tree
    moments: tuple[Any, Any]
    average: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Generator:
    """y = G(z), z ~ N(0, I). It has no density: nothing here can say how probable a row is. losses (num_steps, 2): the critic's and its own."""

    network: MLP
    params: Tree
    centre: np.ndarray
    scale: np.ndarray
    shape: tuple[int, ...]
    losses: np.ndarray

    def decode(self, z: Any) -> np.ndarray:
        """G(z) in y's shape; z (n, d)."""
        rows = np.asarray(self.network.apply(self.params, jnp.asarray(z, jnp.float32)))
        return (rows * self.scale + self.centre).reshape(-1, *self.shape)

    def simulate(self, key: KeyLike, num_samples: int) -> np.ndarray:
        """New rows, (num_samples, …)."""
        return self.decode(jax.random.normal(as_key(key), (num_samples, self.network.in_size)))


def adversarial(
    key: KeyLike,
    y: Any,
    latent_dim: int = 8,
    *,
    generator: tuple[int, ...] = (64, 64),
    critic: tuple[int, ...] = (64, 64),
    num_steps: int = 5000,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    penalty: float = 1.0,
) -> Generator:
    """A generator trained against a critic D on rows y (N, …), taken in units of their mean and spread.

    D minimises E softplus(−D(y)) + E softplus(D(G(z))) + ½·penalty·E‖∇D(y)‖² and G minimises E softplus(−D(G(z))), in turn. The penalty on the
    gradient at the data makes the game converge (Mescheder, Geiger and Nowozin 2018).
    """
    y = np.asarray(y, np.float32)
    if y.ndim < 2 or len(y) < 2 or not np.isfinite(y).all():
        raise DataError(message("A generator learns from rows.", f"y of shape {y.shape}", "(N, D) or (N, …), finite", "check y"))
    rows = y.reshape(len(y), -1)
    centre, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    made = MLP(latent_dim, generator, rows.shape[1]), MLP(rows.shape[1], critic, 1)
    game = Game(*made, batch_size, learning_rate, penalty)
    key_init, key_run = jax.random.split(as_key(key))
    state, losses = jax.jit(game.play, static_argnums=3)(key_run, game.init(key_init), jnp.asarray((rows - centre) / scale), num_steps)
    return Generator(made[0], state.average, centre, scale, y.shape[1:], np.asarray(losses))


@dataclasses.dataclass(frozen=True)
class Game:
    """The two networks and how they are trained."""

    generator: MLP
    critic: MLP
    batch_size: int
    learning_rate: float
    penalty: float

    def _optimizer(self) -> Any:
        import optax

        return optax.adam(self.learning_rate, b1=0.5)

    def init(self, key: Key) -> State:
        key_generator, key_critic = jax.random.split(key)
        generator, critic = self.generator.init(key_generator), self.critic.init(key_critic)
        optimizer = self._optimizer()
        return State(generator, critic, (optimizer.init(generator), optimizer.init(critic)), generator)

    def step(self, key: Key, state: State, rows: Array) -> tuple[State, Array]:
        """The critic moves, then the generator."""
        import optax

        key_rows, key_critic, key_generator = jax.random.split(key, 3)
        real = rows[jax.random.randint(key_rows, (self.batch_size,), 0, len(rows))]
        made = lambda params, k: self.generator.apply(params, jax.random.normal(k, (self.batch_size, self.generator.in_size)))
        judge = lambda params, y: self.critic.apply(params, y)[:, 0]

        def critic_loss(params: Tree) -> Array:
            slope = jax.grad(lambda y: jnp.sum(judge(params, y)))(real)
            told = jax.nn.softplus(-judge(params, real)) + jax.nn.softplus(judge(params, made(state.generator, key_critic)))
            return jnp.mean(told + 0.5 * self.penalty * jnp.sum(slope**2, axis=-1))

        optimizer = self._optimizer()
        loss_critic, slope = jax.value_and_grad(critic_loss)(state.critic)
        change, moments_critic = optimizer.update(slope, state.moments[1])
        critic = optax.apply_updates(state.critic, change)

        def generator_loss(params: Tree) -> Array:
            return jnp.mean(jax.nn.softplus(-judge(critic, made(params, key_generator))))

        loss_generator, slope = jax.value_and_grad(generator_loss)(state.generator)
        change, moments_generator = optimizer.update(slope, state.moments[0])
        generator = optax.apply_updates(state.generator, change)
        average = jax.tree.map(lambda old, new: AVERAGE * old + (1.0 - AVERAGE) * new, state.average, generator)
        return State(generator, critic, (moments_generator, moments_critic), average), jnp.stack([loss_critic, loss_generator])

    def play(self, key: Key, state: State, rows: Array, num_steps: int) -> tuple[State, Array]:
        return jax.lax.scan(lambda s, k: self.step(k, s, rows), state, jax.random.split(noise_key(key), num_steps))
