"""Several plausible segmentations of one image (D10): a conditional autoencoder on feature maps, and a distance to the annotators.

`segmenter` is a probabilistic U-Net without its U (Kohl et al. 2018): one convolutional pass makes a map of features of the image, z ~ p(z | x)
says which reading of it to draw, and every pixel combines the two. One z decides all pixels together, so that draws are whole drawings.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, message
from aleator._typing import Array, Key, Tree
from aleator.latent.vae import VAE
from aleator.likelihoods import Bernoulli
from aleator.networks._conv import conv2d
from aleator.networks.conv import conv_init


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """Features of every pixel: x (n, h, w, channels) → (n, h, w, widths[-1]), by 3 × 3 convolutions with growing dilation that keep the size."""

    channels: int
    widths: tuple[int, ...] = (16, 16, 8)
    dilations: tuple[int, ...] = (1, 2, 4)

    def init(self, key: Key) -> Tree:
        sizes = (self.channels, *self.widths)
        keys = jax.random.split(key, len(self.widths))
        return {f"layer{i}": conv_init(k, 3, *sizes[i : i + 2], gain=2.0) for i, k in enumerate(keys)}

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        for i, dilation in enumerate(self.dilations):
            layer = params[f"layer{i}"]
            x = jax.nn.relu(conv2d(x, layer["weight"], dilation=dilation) + layer["bias"])
        return x

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class MapEncoder:
    """A map (h, w, channels), flat, → outputs (n, out_size): a convolution, means over blocks × blocks pieces of the image, two dense layers."""

    shape: tuple[int, int, int]
    out_size: int
    width: int = 16
    blocks: int = 4

    def init(self, key: Key) -> Tree:
        key_conv, key_in, key_out = jax.random.split(key, 3)
        pooled = self.blocks**2 * self.width
        return {
            "conv": conv_init(key_conv, 3, self.shape[2], self.width, gain=2.0),
            "in": jax.random.normal(key_in, (pooled, 64)) / math.sqrt(pooled),
            "bias": jnp.zeros(64),
            "out": 0.1 * jax.random.normal(key_out, (64, self.out_size)),
        }

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        h, w, _ = self.shape
        x = x.reshape(-1, *self.shape)
        x = jax.nn.relu(conv2d(x, params["conv"]["weight"]) + params["conv"]["bias"])
        # Pixels beyond the last whole block are left out.
        tall, wide = h // self.blocks, w // self.blocks
        x = x[:, : tall * self.blocks, : wide * self.blocks].reshape(len(x), self.blocks, tall, self.blocks, wide, -1)
        pooled = jnp.mean(x, axis=(2, 4)).reshape(len(x), -1)
        return jnp.tanh(pooled @ params["in"] + params["bias"]) @ params["out"]

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class MapDecoder:
    """z (latent_dim) and a map (h, w, channels), side by side and flat, → a logit a pixel, (n, h·w): 1 × 1 convolutions of both."""

    latent_dim: int
    shape: tuple[int, int, int]
    width: int = 16

    def init(self, key: Key) -> Tree:
        key_z, key_map, key_mid, key_out = jax.random.split(key, 4)
        dense = lambda k, a, b: math.sqrt(2.0 / a) * jax.random.normal(k, (a, b))
        return {
            "z": dense(key_z, self.latent_dim, self.width),
            "map": dense(key_map, self.shape[2], self.width),
            "bias": jnp.zeros(self.width),
            "mid": dense(key_mid, self.width, self.width),
            "mid_bias": jnp.zeros(self.width),
            "out": dense(key_out, self.width, 1),
            "out_bias": jnp.zeros(1),
        }

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        z, features = x[:, : self.latent_dim], x[:, self.latent_dim :].reshape(-1, *self.shape)
        hidden = jax.nn.relu(features @ params["map"] + (z @ params["z"] + params["bias"])[:, None, None, :])
        hidden = jax.nn.relu(hidden @ params["mid"] + params["mid_bias"])
        return (hidden @ params["out"] + params["out_bias"]).reshape(len(x), -1)

    def rebuild(self, params: Tree) -> Tree:
        return params


def segmenter(shape: tuple[int, int, int], latent_dim: int = 4, widths: tuple[int, ...] = (16, 16, 8), blocks: int = 4) -> VAE:
    """p(drawing | image) for images (h, w, channels) and drawings (h, w) of zeros and ones: al.fit(key, segmenter(…), (images, drawings),
    al.Amortised(…)), one row a drawing; then model.simulate(key, params, S, x=images) are S drawings of each."""
    h, w, channels = shape
    features = (h, w, widths[-1])
    return VAE(
        latent_dim,
        encoder=_DrawingEncoder(features, 2 * latent_dim, blocks),
        decoder=MapDecoder(latent_dim, features),
        likelihood=Bernoulli(),
        context=FeatureMap(channels, widths, tuple(2**i for i in range(len(widths)))),
        prior_network=MapEncoder(features, 2 * latent_dim, blocks=blocks),
    )


@dataclasses.dataclass(frozen=True)
class _DrawingEncoder:
    """A drawing (h, w) and a map of the image, side by side and flat, → (μ, log σ) of q(z | drawing, image)."""

    shape: tuple[int, int, int]
    out_size: int
    blocks: int

    @property
    def network(self) -> MapEncoder:
        h, w, channels = self.shape
        return MapEncoder((h, w, channels + 1), self.out_size, blocks=self.blocks)

    def init(self, key: Key) -> Tree:
        return self.network.init(key)

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        h, w, channels = self.shape
        drawing, features = x[:, : h * w].reshape(-1, h, w, 1), x[:, h * w :].reshape(-1, h, w, channels)
        return self.network.apply(params, jnp.concatenate([drawing - 0.5, features], axis=-1))

    def rebuild(self, params: Tree) -> Tree:
        return params


def energy_distance(samples: Any, annotations: Any) -> np.ndarray:
    """Generalised energy distance of each image, (n,), 0 is best: 2E d(S, Y) − E d(S, S′) − E d(Y, Y′), d = 1 − intersection over union.

    samples (S, n, …) and annotations (A, n, …) of zeros and ones. Pairs are of different members, so that the expectation does not depend on how
    many there are, and single estimates may fall below 0; a single drawing counts as one that is always the same.
    """
    s, y = (np.asarray(given) for given in (samples, annotations))
    if s.ndim < 3 or s.shape[1:] != y.shape[1:] or not (np.isin(s, (0, 1)).all() and np.isin(y, (0, 1)).all()):
        raise DataError(
            message(
                "Drawings cannot be compared.",
                f"shapes {s.shape} and {y.shape}",
                "(S, n, …) and (A, n, …) of zeros and ones",
                "threshold probabilities, or draw from them",
            )
        )
    s, y = (np.swapaxes(given.reshape(*given.shape[:2], -1), 0, 1).astype(np.float32) for given in (s, y))
    return 2.0 * _apart(s, y).mean(axis=(1, 2)) - _among(s) - _among(y)


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """1 − |a ∩ b| / |a ∪ b| of all pairs, (n, A, B); 0 for two empty drawings."""
    both = a @ np.swapaxes(b, 1, 2)
    either = a.sum(axis=2)[:, :, None] + b.sum(axis=2)[:, None, :] - both
    return np.where(either > 0, 1.0 - both / np.maximum(either, 1.0), 0.0).astype(np.float64)


def _among(a: np.ndarray) -> np.ndarray:
    """Mean distance of two different members, (n,)."""
    number = a.shape[1]
    return _apart(a, a).sum(axis=(1, 2)) / max(number * (number - 1), 1)
