"""What an inference network may say of z given y: q(z | y), from outputs h of the encoder and noise e ~ N(0, I).

Each has num_outputs(d), init(key, d) → parameters of its own, draw(params, h, e) → (z, log q(z)), and log_prob(params, h, z), or None where
z ↦ e has no closed form. Shapes: h (…, num_outputs), e and z (…, d).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def standard_normal(z: Array) -> Array:
    """log N(z | 0, I), summed over the last axis."""
    return jnp.sum(-0.5 * z**2 - HALF_LOG_2PI, axis=-1)


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """z = μ + σ·e, h = (μ, log σ)."""

    closed = True

    def num_outputs(self, d: int) -> int:
        return 2 * d

    def init(self, key: Key, d: int) -> Tree:
        return {}

    def draw(self, params: Tree, h: Array, e: Array) -> tuple[Array, Array]:
        mean, log_scale = jnp.split(h, 2, axis=-1)
        return mean + jnp.exp(log_scale) * e, standard_normal(e) - jnp.sum(log_scale, axis=-1)

    def log_prob(self, params: Tree, h: Array, z: Array) -> Array:
        mean, log_scale = jnp.split(h, 2, axis=-1)
        return standard_normal((z - mean) * jnp.exp(-log_scale)) - jnp.sum(log_scale, axis=-1)

    def divergence(self, h: Array) -> Array:
        """KL(q ‖ N(0, I)) by dimension, (…, d)."""
        mean, log_scale = jnp.split(h, 2, axis=-1)
        return 0.5 * (mean**2 + jnp.exp(2.0 * log_scale) - 1.0) - log_scale


@dataclasses.dataclass(frozen=True)
class Full:
    """z = μ + L e, L lower with diagonal σ: all correlations; h = (μ, log σ, what is below the diagonal)."""

    closed = True

    def num_outputs(self, d: int) -> int:
        return 2 * d + d * (d - 1) // 2

    def init(self, key: Key, d: int) -> Tree:
        return {}

    def draw(self, params: Tree, h: Array, e: Array) -> tuple[Array, Array]:
        mean, log_scale, factor = self._parts(h, e.shape[-1])
        return mean + jnp.einsum("...ij,...j->...i", factor, e), standard_normal(e) - jnp.sum(log_scale, axis=-1)

    def log_prob(self, params: Tree, h: Array, z: Array) -> Array:
        mean, log_scale, factor = self._parts(h, z.shape[-1])
        factor = jnp.broadcast_to(factor, (*z.shape, z.shape[-1]))
        e = solve_triangular(factor, (z - mean)[..., None], lower=True)[..., 0]
        return standard_normal(e) - jnp.sum(log_scale, axis=-1)

    @staticmethod
    def _parts(h: Array, d: int) -> tuple[Array, Array, Array]:
        mean, log_scale, below = h[..., :d], h[..., d : 2 * d], h[..., 2 * d :]
        rows, columns = (index.astype(np.int32) for index in np.tril_indices(d, -1))
        factor = (jnp.exp(log_scale)[..., None] * jnp.eye(d, dtype=h.dtype)).at[..., rows, columns].set(below)
        return mean, log_scale, factor


@dataclasses.dataclass(frozen=True)
class Coupling:
    """A diagonal Gaussian bent by affine coupling layers: one half of z shifts and scales the other by a small network that also sees a
    context of the encoder; halves alternate. h = (μ, log σ, context)."""

    num_layers: int = 4
    hidden: int = 64
    context: int = 32

    closed = True

    def num_outputs(self, d: int) -> int:
        return 2 * d + self.context

    def init(self, key: Key, d: int) -> Tree:
        size = d + self.context
        first = lambda k: jax.random.normal(k, (size, self.hidden)) / math.sqrt(size)
        layer = lambda k: {
            "in": first(k),
            "bias": jnp.zeros(self.hidden),
            "out": jnp.zeros((self.hidden, 2 * d)),
            "shift": jnp.zeros(2 * d),
        }
        return {f"layer{i}": layer(k) for i, k in enumerate(jax.random.split(key, self.num_layers))}  # begins as the identity

    def draw(self, params: Tree, h: Array, e: Array) -> tuple[Array, Array]:
        d = e.shape[-1]
        z, log_q = Diagonal().draw({}, h[..., : 2 * d], e)
        for i in range(self.num_layers):
            shift, log_scale = self._bend(params[f"layer{i}"], z, h[..., 2 * d :], i)
            z, log_q = z * jnp.exp(log_scale) + shift, log_q - jnp.sum(log_scale, axis=-1)
        return z, log_q

    def log_prob(self, params: Tree, h: Array, z: Array) -> Array:
        d, total = z.shape[-1], 0.0
        for i in reversed(range(self.num_layers)):
            # What decides the bend is the half that the layer leaves alone: the same before and after it.
            shift, log_scale = self._bend(params[f"layer{i}"], z, h[..., 2 * d :], i)
            z, total = (z - shift) * jnp.exp(-log_scale), total - jnp.sum(log_scale, axis=-1)
        return Diagonal().log_prob({}, h[..., : 2 * d], z) + total

    def _bend(self, layer: Tree, z: Array, context: Array, number: int) -> tuple[Array, Array]:
        d = z.shape[-1]
        kept = jnp.asarray((np.arange(d) + number) % 2 == 0, z.dtype)
        return self._network(layer, z * kept, context, 1.0 - kept, d)

    @staticmethod
    def _network(layer: Tree, seen: Array, context: Array, moved: Array, d: int) -> tuple[Array, Array]:
        inputs = jnp.concatenate([seen, jnp.broadcast_to(context, (*seen.shape[:-1], context.shape[-1]))], axis=-1)
        out = jnp.tanh(inputs @ layer["in"] + layer["bias"]) @ layer["out"] + layer["shift"]
        return moved * out[..., :d], moved * jnp.tanh(out[..., d:])  # scales within e^±1 a layer


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Inverse autoregressive flow (Kingma et al. 2016): z_i ← σ_i z_i + (1 − σ_i) m_i, with m and σ from z_{<i} and a context of the encoder,
    the order reversed between layers. Draws are as fast as a network; the density of a given z is not closed. h = (μ, log σ, context)."""

    num_layers: int = 2
    hidden: int = 128
    context: int = 32

    closed = False

    def num_outputs(self, d: int) -> int:
        return 2 * d + self.context

    def init(self, key: Key, d: int) -> Tree:
        def layer(k: Key) -> Tree:
            key_z, key_h = jax.random.split(k)
            inner = jax.random.normal(key_z, (d, self.hidden)) / math.sqrt(d)
            outer = jax.random.normal(key_h, (self.context, self.hidden)) / math.sqrt(self.context)
            return {
                "in": inner,
                "context": outer,
                "bias": jnp.zeros(self.hidden),
                "out": jnp.zeros((self.hidden, 2 * d)),
                "shift": jnp.zeros(2 * d),
            }

        return {f"layer{i}": layer(k) for i, k in enumerate(jax.random.split(key, self.num_layers))}

    def draw(self, params: Tree, h: Array, e: Array) -> tuple[Array, Array]:
        d = e.shape[-1]
        z, log_q = Diagonal().draw({}, h[..., : 2 * d], e)
        masks = _autoregressive_masks(d, self.hidden)
        for i in range(self.num_layers):
            layer, z = params[f"layer{i}"], z[..., ::-1]
            hidden = jnp.tanh(z @ (layer["in"] * masks[0]) + h[..., 2 * d :] @ layer["context"] + layer["bias"])
            out = hidden @ (layer["out"] * masks[1]) + layer["shift"]
            log_gate = jax.nn.log_sigmoid(out[..., d:] + 2.0)  # begins by keeping most of z
            gate = jnp.exp(log_gate)
            z, log_q = gate * z + (1.0 - gate) * out[..., :d], log_q - jnp.sum(log_gate, axis=-1)
        return z, log_q

    def log_prob(self, params: Tree, h: Array, z: Array) -> None:
        return None


POSTERIORS = {"diagonal": Diagonal, "full": Full, "coupling": Coupling, "autoregressive": Autoregressive}


def as_posterior(given: Any) -> Any:
    """A q(z | y) by its name, or as it is."""
    if isinstance(given, str) and given in POSTERIORS:
        return POSTERIORS[given]()
    if not isinstance(given, tuple(POSTERIORS.values())):
        raise ModelError(message("This is not a q(z | y).", repr(given), f"one of {list(POSTERIORS)}", "choose one of them"))
    return given


def _autoregressive_masks(d: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden unit j sees inputs < degree_j, output i sees units of degree ≤ i (Germain et al. 2015): output i depends on inputs < i only."""
    degrees = np.arange(hidden) % max(d - 1, 1) + 1
    into = (np.arange(d)[:, None] < degrees).astype(np.float32)
    out = (degrees[:, None] <= np.arange(d)).astype(np.float32)
    return into, np.concatenate([out, out], axis=1)
