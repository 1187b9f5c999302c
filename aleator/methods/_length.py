"""How long a trajectory should be: learned in warm-up, so that functions jump far for few gradients.

The criterion is the expected squared jump of functions at the reference inputs, E|s′ − s|², divided by τᶜ, the price of gradients. Its slope
in log τ at one transition of length t, weighted by the acceptance, is 2t⟨s′ − s, ds′/dt⟩ − c|s′ − s|², up to its scale; Adam follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Array, Key
from aleator.methods._chains import Density

RATE = 0.1  # first learning rate of log τ, and weight of the newest in its running mean
FALL = 100.0  # learning steps after which both begin to fall as an inverse root: one transition says little, and noise must not add up
FIRST = 32.0  # steps, at most, before the length is learned
LEAST = 8.0  # and the fewest that can be learned: to a chain still on its way everything looks too long
PRICE = 0.5  # c: 1 pays for gradients alone, 0 for draws alone


class Length(NamedTuple):
    """log_length: log τ, the longest a trajectory may be. log_average: its running mean. slope, square: Adam's averages. summary (F,): the
    functions at the present position. last: the slope at the last transition."""

    log_length: Array
    log_average: Array
    slope: Array
    square: Array
    summary: Array
    last: Array


def begin(step: Array, summary: Array) -> Length:
    zero = jnp.zeros_like(step)
    log_length = jnp.log(step * FIRST)
    return Length(log_length, log_length, zero, zero, summary, zero)


def draw(key: Key, length: Length, step: Array, limit: int) -> Array:
    """How many steps to take: a length uniform up to τ, in steps."""
    share = jax.random.uniform(key, (), step.dtype)
    return jnp.clip(jnp.ceil(share * jnp.exp(length.log_length) / step), 1, limit).astype(jnp.int32)


def follow(
    length: Length, summarise: Callable[[Array], Array], position: Array, velocity: Array, time: Array, acceptance: Array
) -> tuple[Length, Array]:
    """The slope at a transition that ends at `position` with this velocity after this time; and the functions there."""
    after, drift = jax.jvp(summarise, (position,), (velocity,))
    jump = after - length.summary
    slope = 2.0 * time * jnp.dot(jump, drift) - PRICE * jnp.dot(jump, jump)
    return length._replace(last=jnp.where(jnp.isfinite(slope) & (acceptance > 0), acceptance * slope, 0.0)), after


def adapt(length: Length, step: Array, number: Array, collecting: np.ndarray, limit: int) -> Length:
    """After warm-up step `number`. Until the windows begin there is nothing to learn: the length is a fixed number of steps."""
    learned = np.cumsum(np.cumsum(collecting) > 0)
    early, rate = jnp.asarray(learned == 0)[number], jnp.asarray(RATE / np.sqrt(1.0 + learned / FALL), step.dtype)[number]
    slope, square = 0.9 * length.slope + 0.1 * length.last, 0.95 * length.square + 0.05 * length.last**2
    shortest = jnp.log(step)
    moved = length.log_length + rate * slope / (jnp.sqrt(square) + 1e-30)
    log_length = jnp.where(early, shortest + np.log(FIRST), jnp.clip(moved, shortest + np.log(LEAST), shortest + np.log(limit)))
    return length._replace(
        log_length=log_length,
        log_average=jnp.where(early, log_length, length.log_average + rate * (log_length - length.log_average)),
        slope=jnp.where(early, 0.0, slope),
        square=jnp.where(early, jnp.maximum(square, length.last**2), square),
    )


def settle(length: Length) -> Length:
    return length._replace(log_length=length.log_average)


def summary(density: Density, scale: Array) -> Callable[[Array], Array]:
    """What should move: functions at the reference inputs, or positions in units of their scale where there are none."""

    def of(position: Array) -> Array:
        functions = density.functions(position)
        return functions if functions.shape[0] else position / scale

    return of
