"""Convolutional networks on images (n, h, w, c): LeNet-5 twice, VGG-like stacks, CIFAR residual networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aleator._errors import ModelError, message, nearest
from aleator._typing import Array, Key, Tree
from aleator.networks._conv import conv2d
from aleator.networks._network import activation, check_input
from aleator.networks.mlp import check_sizes, dense, dense_init

# max ψ(h) = ψ(max h) for these, so ψ may follow the pooling, on a quarter of the numbers.
MONOTONE = ("relu", "tanh", "logistic", "softplus", "elu", "leaky_relu", "erf", "identity")
RELU_LIKE = ("relu", "gelu", "silu", "elu", "leaky_relu")


@dataclasses.dataclass(frozen=True)
class LeNet5:
    """LeNet-5 of LeCun et al. (1998) with max pooling: x (n, 28, 28, 1) → (n, 10), 61,706 parameters.

    | layer | output | parameters |
    |---|---|---|
    | conv1 5×5 SAME, ψ, pool 2 | 14 × 14 × 6 | 156 |
    | conv2 5×5 VALID, ψ, pool 2 | 5 × 5 × 16 | 2,416 |
    | dense1, ψ | 120 | 48,120 |
    | dense2, ψ | 84 | 10,164 |
    | dense3 | 10 | 850 |

    Weights start from N(0, 2/fan-in) for relu-like ψ, N(0, 1/fan-in) otherwise; biases from 0. Other image sizes change dense1 only.

    >>> net = LeNet5()
    >>> params = jax.eval_shape(net.init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params)), jax.eval_shape(net.apply, params, jnp.ones((2, 28, 28, 1))).shape
    (61706, (2, 10))
    """

    in_shape: tuple[int, int, int] = (28, 28, 1)
    out_size: int = 10
    activation: str = "relu"

    def __post_init__(self) -> None:
        _store_shape("LeNet5", self)
        check_sizes("LeNet5", self.out_size)
        activation(self.activation)
        _check_room("LeNet5", self.in_shape, self._grid)

    @property
    def _grid(self) -> tuple[int, int]:
        return tuple((size // 2 - 4) // 2 for size in self.in_shape[:2])  # type: ignore[return-value]

    def init(self, key: Key) -> Tree:
        keys = jax.random.split(key, 5)
        gain = 2.0 if self.activation in RELU_LIKE else 1.0
        flat = self._grid[0] * self._grid[1] * 16
        return {
            "conv1": conv_init(keys[0], 5, self.in_shape[2], 6, gain),
            "conv2": conv_init(keys[1], 5, 6, 16, gain),
            "dense1": dense_init(keys[2], flat, 120, gain),
            "dense2": dense_init(keys[3], 120, 84, gain),
            "dense3": dense_init(keys[4], 84, self.out_size),
        }

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """Activations of the last hidden layer, (n, 84)."""
        check_input("LeNet5", x, self.in_shape)
        psi = activation(self.activation)
        x = _pooled(conv(params["conv1"], x), self.activation)
        x = _pooled(conv(params["conv2"], x, padding="VALID"), self.activation)
        x = psi(dense(params["dense1"], x.reshape(x.shape[0], -1)))
        return psi(dense(params["dense2"], x))

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["dense3"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class LeNet5Caffe:
    """The wider LeNet-5 of the Caffe examples, the usual network of pruning papers: x (n, 28, 28, 1) → (n, 10), 431,080 parameters.

    | layer | output | parameters |
    |---|---|---|
    | conv1 5×5 VALID, pool 2 | 12 × 12 × 20 | 520 |
    | conv2 5×5 VALID, pool 2 | 4 × 4 × 50 | 25,050 |
    | dense1, relu | 500 | 400,500 |
    | dense2 | 10 | 5,010 |

    There is no nonlinearity after the convolutions but the pooling, as in the original. Weights start from N(0, 1/fan-in), those
    before the relu from N(0, 2/fan-in); biases from 0.

    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(LeNet5Caffe().init, jax.random.key(0))))
    431080
    """

    in_shape: tuple[int, int, int] = (28, 28, 1)
    out_size: int = 10

    def __post_init__(self) -> None:
        _store_shape("LeNet5Caffe", self)
        check_sizes("LeNet5Caffe", self.out_size)
        _check_room("LeNet5Caffe", self.in_shape, self._grid)

    @property
    def _grid(self) -> tuple[int, int]:
        return tuple(((size - 4) // 2 - 4) // 2 for size in self.in_shape[:2])  # type: ignore[return-value]

    def init(self, key: Key) -> Tree:
        keys = jax.random.split(key, 4)
        return {
            "conv1": conv_init(keys[0], 5, self.in_shape[2], 20),
            "conv2": conv_init(keys[1], 5, 20, 50),
            "dense1": dense_init(keys[2], self._grid[0] * self._grid[1] * 50, 500, 2.0),
            "dense2": dense_init(keys[3], 500, self.out_size),
        }

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """Activations of the hidden dense layer, (n, 500)."""
        check_input("LeNet5Caffe", x, self.in_shape)
        x = max_pool(conv(params["conv1"], x, padding="VALID"))
        x = max_pool(conv(params["conv2"], x, padding="VALID"))
        return jax.nn.relu(dense(params["dense1"], x.reshape(x.shape[0], -1)))

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["dense2"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class VGG:
    """Blocks of 3×3 convolutions, each block ended by a 2×2 max pooling, then dense layers: x (n, *in_shape) → (n, out_size).

    With the defaults, x (n, 32, 32, 3) → (n, 10), 550,570 parameters (without norm):

    | layer | output |
    |---|---|
    | block1: conv 32, conv 32, pool 2 | 16 × 16 × 32 |
    | block2: conv 64, conv 64, pool 2 | 8 × 8 × 64 |
    | block3: conv 128, conv 128, pool 2 | 4 × 4 × 128 |
    | dense1, relu | 128 |
    | dense2 | 10 |

    norm: "group" (group normalisation over the largest number of groups ≤ 8 that divides the channels, or over `groups`, then relu),
    "frn" (filter response normalisation and its thresholded unit) or None (a bias, then relu). No batch statistics: one image's
    outputs never depend on another's, which a likelihood over independent rows needs. Weights start from N(0, 2/fan-in), biases from
    0, norm gains from 1.

    >>> net = VGG(widths=((4,), (8,)), dense=(5,), norm="frn")
    >>> jax.eval_shape(lambda key, x: net.apply(net.init(key), x), jax.random.key(0), jnp.ones((2, 32, 32, 3))).shape
    (2, 10)
    """

    in_shape: tuple[int, int, int] = (32, 32, 3)
    out_size: int = 10
    widths: tuple[tuple[int, ...], ...] = ((32, 32), (64, 64), (128, 128))
    dense: tuple[int, ...] = (128,)
    norm: str | None = "group"
    groups: int | None = None

    def __post_init__(self) -> None:
        _store_shape("VGG", self)
        object.__setattr__(self, "widths", tuple(tuple(int(width) for width in block) for block in self.widths))
        object.__setattr__(self, "dense", tuple(int(width) for width in self.dense))
        check_sizes("VGG", *(width for block in self.widths for width in block), *self.dense, self.out_size)
        _check_norm("VGG", self.norm, ("group", "frn", None), self.groups, [width for block in self.widths for width in block])
        _check_room("VGG", self.in_shape, self._grid)

    @property
    def _grid(self) -> tuple[int, int]:
        return tuple(size >> len(self.widths) for size in self.in_shape[:2])  # type: ignore[return-value]

    def _convs(self) -> Iterator[tuple[str, int, int, bool]]:
        """(name, channels in, channels out, whether it ends its block)."""
        channels = self.in_shape[2]
        for i, block in enumerate(self.widths):
            for j, width in enumerate(block):
                yield f"conv{i + 1}_{j + 1}", channels, width, j == len(block) - 1
                channels = width

    def init(self, key: Key) -> Tree:
        keys = iter(jax.random.split(key, sum(map(len, self.widths)) + len(self.dense) + 1))
        params = {}
        for name, channels, width, _ in self._convs():
            params[name] = conv_init(next(keys), 3, channels, width, 2.0, bias=self.norm is None)
            if self.norm is not None:
                params[name.replace("conv", "norm")] = norm_init(self.norm, width)
        channels = [width for *_, width, _ in self._convs()][-1] if any(self.widths) else self.in_shape[2]
        sizes = (self._grid[0] * self._grid[1] * channels, *self.dense, self.out_size)
        gains = [2.0] * len(self.dense) + [1.0]
        for i, gain in enumerate(gains):
            params[f"dense{i + 1}"] = dense_init(next(keys), sizes[i], sizes[i + 1], gain)
        return params

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """Activations of the last hidden layer, (n, dense[-1])."""
        check_input("VGG", x, self.in_shape)
        for name, _, _, last in self._convs():
            x = conv(params[name], x)
            if self.norm is not None:
                x = normalise(self.norm, params[name.replace("conv", "norm")], x, self.groups)
            x = max_pool(x) if last else x
            x = threshold(self.norm, params.get(name.replace("conv", "norm")), x)
        x = x.reshape(x.shape[0], -1)
        for i in range(len(self.dense)):
            x = jax.nn.relu(dense(params[f"dense{i + 1}"], x))
        return x

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params[f"dense{len(self.dense) + 1}"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


@dataclasses.dataclass(frozen=True)
class ResNet:
    """The CIFAR residual networks of He et al. (2016), depth = 6m + 2: x (n, *in_shape) → (n, out_size).

    A 3×3 convolution, three stages of m blocks, the mean over the image, one dense layer. A block is
    h + norm(conv(ψ(norm(conv(h))))), then ψ; the first block of stages 2 and 3 halves the image (stride 2) and doubles the channels,
    and its shortcut is a strided 1×1 convolution. With the defaults, x (n, 32, 32, 3) → (n, 10), 272,282 parameters ("group"):

    | layer | output |
    |---|---|
    | stem | 32 × 32 × 16 |
    | stage 1, m blocks | 32 × 32 × 16 |
    | stage 2, m blocks | 16 × 16 × 32 |
    | stage 3, m blocks | 8 × 8 × 64 |
    | mean, dense | 10 |

    norm: "group" with ψ = relu, or "frn" with ψ the thresholded unit max(·, τ); neither mixes images. Weights start from
    N(0, 2/fan-in), gains from 1, biases and thresholds from 0.

    >>> net = ResNet(in_shape=(8, 8, 3), depth=8, width=4)
    >>> jax.eval_shape(lambda key, x: net.apply(net.init(key), x), jax.random.key(0), jnp.ones((2, 8, 8, 3))).shape
    (2, 10)
    """

    in_shape: tuple[int, int, int] = (32, 32, 3)
    out_size: int = 10
    depth: int = 20
    width: int = 16
    norm: str = "group"
    groups: int | None = None

    def __post_init__(self) -> None:
        _store_shape("ResNet", self)
        check_sizes("ResNet", self.depth, self.width, self.out_size)
        if self.depth < 8 or self.depth % 6 != 2:
            raise ModelError(message("ResNet cannot have this depth.", self.depth, "6m + 2: 8, 14, 20, 32, 44, 56, …", "pass depth=20"))
        _check_norm("ResNet", self.norm, ("group", "frn"), self.groups, [self.width, 2 * self.width, 4 * self.width])

    def _blocks(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, channels in, channels out, stride)."""
        channels = self.width
        for stage in range(3):
            for block in range((self.depth - 2) // 6):
                width = self.width << stage
                yield f"stage{stage + 1}_block{block + 1}", channels, width, 2 if width != channels else 1
                channels = width

    def init(self, key: Key) -> Tree:
        key_stem, key_dense, key_blocks = jax.random.split(key, 3)
        params = {"stem": conv_init(key_stem, 3, self.in_shape[2], self.width, 2.0, bias=False), "norm": norm_init(self.norm, self.width)}
        for i, (name, channels, width, stride) in enumerate(self._blocks()):
            first, second, shortcut = jax.random.split(jax.random.fold_in(key_blocks, i), 3)
            params[name] = {
                "conv1": conv_init(first, 3, channels, width, 2.0, bias=False),
                "norm1": norm_init(self.norm, width),
                "conv2": conv_init(second, 3, width, width, 2.0, bias=False),
                "norm2": norm_init(self.norm, width),
            }
            if stride > 1:
                params[name]["shortcut"] = conv_init(shortcut, 1, channels, width, 1.0, bias=False)
        return {**params, "dense": dense_init(key_dense, 4 * self.width, self.out_size)}

    def hidden_features(self, params: Tree, x: Array) -> Array:
        """The last stage averaged over the image, (n, 4·width)."""
        check_input("ResNet", x, self.in_shape)
        x = threshold(self.norm, params["norm"], normalise(self.norm, params["norm"], conv(params["stem"], x), self.groups))
        for name, _, _, stride in self._blocks():
            block = params[name]
            h = normalise(self.norm, block["norm1"], conv(block["conv1"], x, stride), self.groups)
            h = conv(block["conv2"], threshold(self.norm, block["norm1"], h))
            h = normalise(self.norm, block["norm2"], h, self.groups)
            x = threshold(self.norm, block["norm2"], h + (conv(block["shortcut"], x, stride) if stride > 1 else x))
        return jnp.mean(x, axis=(1, 2))

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        return dense(params["dense"], self.hidden_features(params, x))

    def rebuild(self, params: Tree) -> Tree:
        return params


def conv(layer: Tree, x: Array, stride: int = 1, padding: str = "SAME") -> Array:
    """x ∗ W + b, without b where the layer has none; W (kh, kw, c, out)."""
    out = conv2d(x, layer["weight"], stride, padding)
    return out + layer["bias"] if "bias" in layer else out


def conv_init(key: Key, kernel: int, channels: int, out: int, gain: float = 1.0, bias: bool = True) -> Tree:
    """W ~ N(0, gain/fan_in) of shape (kernel, kernel, channels, out), b = 0."""
    weight = jax.random.normal(key, (kernel, kernel, channels, out)) * (gain / (kernel * kernel * channels)) ** 0.5
    return {"weight": weight, "bias": jnp.zeros((out,))} if bias else {"weight": weight}


def max_pool(x: Array, size: int = 2) -> jax.Array:
    """The largest value of each size × size block: (n, h, w, c) → (n, ⌊h/size⌋, ⌊w/size⌋, c).

    The derivative goes to the first of equal values. Rows and columns that fill no block are left out.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1)).ravel().tolist()
    [5.0, 7.0, 13.0, 15.0]
    """
    n, h, w, c = x.shape
    if min(h, w) < size:
        raise ModelError(
            message("The image is smaller than a pooling block.", f"{h} by {w}", f"at least {size} by {size}", "pool less often")
        )
    return _pool(x[:, : h // size * size, : w // size * size].reshape(n, h // size, size, w // size, size, c))


@jax.custom_jvp
def _pool(blocks: Array) -> jax.Array:
    """(n, h, s, w, s, c) → (n, h, w, c)."""
    best = blocks[:, :, 0, :, 0]
    for t in range(1, blocks.shape[2] ** 2):
        best = jnp.maximum(best, blocks[:, :, t // blocks.shape[2], :, t % blocks.shape[2]])
    return best


@_pool.defjvp
def _pool_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[jax.Array, jax.Array]:
    # The winner's index is a residual of a byte per block, and the tangent a masked sum, whose transpose is one fused select.
    (blocks,), (dot,) = primals, tangents
    size = blocks.shape[2]
    best = blocks[:, :, 0, :, 0]
    winner = jnp.zeros(best.shape, jnp.int8)
    for t in range(1, size**2):
        other = blocks[:, :, t // size, :, t % size]
        winner = jnp.where(other > best, jnp.int8(t), winner)
        best = jnp.maximum(best, other)
    order = lax.broadcasted_iota(jnp.int8, blocks.shape, 2) * jnp.int8(size) + lax.broadcasted_iota(jnp.int8, blocks.shape, 4)
    chosen = order == winner[:, :, None, :, None]
    return best, jnp.sum(jnp.where(chosen, dot, jnp.zeros_like(dot)), axis=(2, 4))


def group_norm(x: Array, scale: Array, bias: Array, groups: int, epsilon: float = 1e-5) -> jax.Array:
    """(x − mean)/√(variance + ε)·scale + bias, moments over one image and one group of channels; x (n, h, w, c), scale, bias (c,).

    >>> float(jnp.std(group_norm(jnp.arange(32.0).reshape(1, 2, 2, 8), jnp.ones(8), jnp.zeros(8), 2))) > 0.99
    True
    """
    n, h, w, c = x.shape
    blocks = x.reshape(n, h * w, groups, c // groups)
    mean = jnp.mean(blocks, axis=(1, 3), keepdims=True)
    variance = jnp.mean((blocks - mean) ** 2, axis=(1, 3), keepdims=True)
    return ((blocks - mean) * lax.rsqrt(variance + epsilon)).reshape(x.shape) * scale + bias


def filter_response_norm(x: Array, scale: Array, bias: Array, epsilon: float = 1e-6) -> jax.Array:
    """x/√(ν² + ε)·scale + bias, ν² the mean of x² over one image's channel (Singh & Krishnan, 2020); x (n, h, w, c), scale, bias (c,).

    >>> filter_response_norm(jnp.full((1, 2, 2, 1), 3.0), jnp.ones(1), jnp.zeros(1)).ravel().round(3).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return x * lax.rsqrt(jnp.mean(x * x, axis=(1, 2), keepdims=True) + epsilon) * scale + bias


def norm_init(norm: str, channels: int) -> Tree:
    """Gains 1, offsets 0, and for "frn" thresholds 0."""
    layer = {"scale": jnp.ones((channels,)), "bias": jnp.zeros((channels,))}
    return {**layer, "threshold": jnp.zeros((channels,))} if norm == "frn" else layer


def normalise(norm: str, layer: Tree, x: Array, groups: int | None = None) -> jax.Array:
    """The named normalisation with the layer's gain and offset."""
    if norm == "frn":
        return filter_response_norm(x, layer["scale"], layer["bias"])
    return group_norm(x, layer["scale"], layer["bias"], groups or default_groups(x.shape[-1]))


def threshold(norm: str | None, layer: Tree | None, x: Array) -> jax.Array:
    """The nonlinearity that goes with a normalisation: max(x, τ) for "frn", relu otherwise."""
    return jnp.maximum(x, layer["threshold"]) if norm == "frn" and layer is not None else jax.nn.relu(x)


def default_groups(channels: int) -> int:
    """The largest divisor of the number of channels up to 8.

    >>> default_groups(64), default_groups(20), default_groups(7)
    (8, 5, 7)
    """
    return max(g for g in range(1, 9) if channels % g == 0)


def _pooled(x: Array, name: str) -> jax.Array:
    """ψ, then pooling, in the cheaper order."""
    psi: Callable[[Array], Array] = activation(name)
    return psi(max_pool(x)) if name in MONOTONE else max_pool(psi(x))


def _store_shape(name: str, net: LeNet5 | LeNet5Caffe | VGG | ResNet) -> None:
    shape = tuple(int(size) for size in np.atleast_1d(net.in_shape))
    if len(shape) != 3:
        raise ModelError(
            message(f"{name} takes images.", f"in_shape={net.in_shape}", "(height, width, channels)", "pass e.g. in_shape=(28, 28, 1)")
        )
    check_sizes(name, *shape)
    object.__setattr__(net, "in_shape", shape)


def _check_room(name: str, shape: tuple[int, int, int], grid: tuple[int, int]) -> None:
    if min(grid) < 1:
        raise ModelError(
            message(
                f"The images are too small for {name}.",
                f"in_shape={shape}",
                "an image left after the last pooling",
                "use larger images or fewer blocks",
            )
        )


def _check_norm(name: str, norm: str | None, known: tuple[str | None, ...], groups: int | None, channels: list[int]) -> None:
    if norm not in known:
        hint = nearest(str(norm), [k for k in known if k is not None])
        raise ModelError(message(f"{name} does not know this norm.", repr(norm) + hint, f"one of {known}", "choose one of them"))
    if groups is not None and any(width % groups for width in channels):
        raise ModelError(
            message(f"{name} cannot split its channels.", f"groups={groups}, channels {channels}", "a common divisor", "leave groups=None")
        )
