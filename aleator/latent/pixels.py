"""Likelihoods of many whole-valued columns at once: levels of grey, and symbols of a string."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key


@dataclasses.dataclass(frozen=True)
class Levels:
    """y ∈ {0 … num_levels − 1}ᵏ: a logistic variable rounded to levels (Kingma et al. 2016). Outputs (n, 2k): centres and log scales, with the
    levels on [−½, ½]. The first and last level take the tails."""

    num_levels: int = 256

    def __post_init__(self) -> None:
        _check_number(self.num_levels, 2)

    def num_outputs(self, k: int) -> int:
        return 2 * k

    def encode(self, y: np.ndarray) -> np.ndarray:
        return _whole(y, self.num_levels)

    def log_prob(self, outputs: Array, y: Array, extra: dict) -> Array:
        centre, log_scale = self._parts(outputs)
        step, value = 1.0 / self.num_levels, (y + 0.5) / self.num_levels - 0.5
        upper = (value + 0.5 * step - centre) * jnp.exp(-log_scale)
        lower = (value - 0.5 * step - centre) * jnp.exp(-log_scale)
        # log(σ(b) − σ(a)) = log σ(b) + log σ(−a) + log(1 − e^{a−b}): no cancellation in either tail.
        inside = jax.nn.log_sigmoid(upper) + jax.nn.log_sigmoid(-lower) + jnp.log1p(-jnp.exp(lower - upper))
        first, last = jax.nn.log_sigmoid(upper), jax.nn.log_sigmoid(-lower)
        return jnp.sum(jnp.where(y <= 0, first, jnp.where(y >= self.num_levels - 1, last, inside)), axis=-1)

    def mean(self, outputs: Array, extra: dict) -> Array:
        """The centre, in levels."""
        return jnp.clip((self._parts(outputs)[0] + 0.5) * self.num_levels - 0.5, 0.0, self.num_levels - 1.0)

    def sample(self, key: Key, outputs: Array, extra: dict) -> Array:
        centre, log_scale = self._parts(outputs)
        value = centre + jnp.exp(log_scale) * jax.random.logistic(key, centre.shape)
        return jnp.clip(jnp.floor((value + 0.5) * self.num_levels), 0, self.num_levels - 1)

    @staticmethod
    def _parts(outputs: Array) -> tuple[Array, Array]:
        centre, raw = jnp.split(outputs, 2, axis=-1)
        return centre, jnp.clip(raw - 2.0, -7.0, 4.0)  # begins at a tenth of the range; below e⁻⁷ levels are certain anyway


@dataclasses.dataclass(frozen=True)
class Symbols:
    """y ∈ {0 … num_symbols − 1}ᵏ, each column its own softmax: strings, one-hot pixels. Outputs (n, k·num_symbols)."""

    num_symbols: int

    def __post_init__(self) -> None:
        _check_number(self.num_symbols, 2)

    def num_outputs(self, k: int) -> int:
        return k * self.num_symbols

    def encode(self, y: np.ndarray) -> np.ndarray:
        return _whole(y, self.num_symbols)

    def log_prob(self, outputs: Array, y: Array, extra: dict) -> Array:
        logs = self._logs(outputs)
        return jnp.sum(jnp.take_along_axis(logs, y.astype(jnp.int32)[..., None], axis=-1)[..., 0], axis=-1)

    def mean(self, outputs: Array, extra: dict) -> Array:
        """The most probable symbol of each column."""
        return jnp.argmax(self._logs(outputs), axis=-1).astype(outputs.dtype)

    def sample(self, key: Key, outputs: Array, extra: dict) -> Array:
        return jax.random.categorical(key, self._logs(outputs)).astype(outputs.dtype)

    def _logs(self, outputs: Array) -> Array:
        return jax.nn.log_softmax(outputs.reshape(*outputs.shape[:-1], -1, self.num_symbols), axis=-1)


def _whole(y: np.ndarray, limit: int) -> np.ndarray:
    bad = ~((y >= 0) & (y < limit) & (y == np.floor(y)))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            message(
                "y holds values outside the levels.",
                f"{y[where]:g} at index {where}",
                f"whole numbers 0 … {limit - 1}",
                "rescale or recode y",
            )
        )
    return y


def _check_number(value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ModelError(message("This many levels make no sense.", repr(value), f"a whole number ≥ {least}", "pass e.g. 256"))
