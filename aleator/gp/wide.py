"""Networks of infinite width as kernels (A9): the prior over functions (NNGP), gradient descent's tangent kernel (NTK), and both measured on finite nets.

Dense layers with weights N(0, σ_w²/fan-in) and biases N(0, σ_b²). With K⁰ = σ_b² + σ_w² x·x′/d and (u, v) ~ N(0, Kˡ⁻¹) at two inputs,

    Kˡ = σ_b² + σ_w² E[φ(u)φ(v)]        Θˡ = Kˡ + σ_w² E[φ′(u)φ′(v)]·Θˡ⁻¹,  Θ⁰ = K⁰

for each of `depth` hidden layers (Neal 1996; Lee et al. 2018; Jacot et al. 2018). residual: each layer adds to what it is given. layer_norm: what enters φ is
divided by its standard deviation over the units, which in the limit is √K(x, x).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import check_arrays
from aleator.gp._expectations import alone, pair
from aleator.gp._expectations import arc_cosine as arc_cosine
from aleator.gp._kernel import Kernel, Number, Table, check_columns, check_numbers
from aleator.gp.means import Zero
from aleator.gp.process import GP
from aleator.hyperpriors import LogNormal
from aleator.likelihoods import Gaussian, Positive
from aleator.model import BNN
from aleator.networks import MLP, as_network
from aleator.networks._network import activation as activation_of
from aleator.networks._network import fan_in
from aleator.posterior import BYTE_BUDGET
from aleator.priors import Normal

# ---- dense networks ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dense(Table):
    """What NNGP and NTK share: `depth` hidden layers of infinite width, σ_w `weight`, σ_b `bias` (0 for none), each a number, a prior, or a tuple with one
    number a layer, the output's last."""

    depth: int = 1
    activation: str = "relu"
    weight: Positive | tuple[float, ...] = LogNormal(0.5 * math.log(2.0), 0.5)
    bias: Positive | tuple[float, ...] = LogNormal(-1.0, 1.0)
    residual: bool = False
    layer_norm: bool = False
    columns: tuple[int, ...] | None = None
    in_size: int | None = None

    def __post_init__(self) -> None:
        activation_of(self.activation)
        check_columns(self)
        if self.bias != 0:
            check_numbers(self, "bias")
        check_numbers(self, "weight")
        for name in ("weight", "bias"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.depth + 1:
                raise ModelError(
                    message(
                        f"{name} does not fit the depth.", f"{len(value)} numbers", f"{self.depth + 1}", "one a layer, the output's last"
                    )
                )

    def numbers(self) -> dict[str, Number]:
        shape = lambda value: (self.depth + 1,) if isinstance(value, tuple) else ()
        return {"weight": Number(self.weight, shape(self.weight)), "bias": Number(self.bias, shape(self.bias))}

    def _scales(self, params: Tree) -> list[tuple[Array, Array]]:
        """(σ_w², σ_b²) of each layer."""
        both = [jnp.broadcast_to(self.value(params, name) ** 2, (self.depth + 1,)) for name in ("weight", "bias")]
        return [(both[0][i], both[1][i]) for i in range(self.depth + 1)]

    def recursion(self, params: Tree, x1: Tree, x2: Tree, slopes: bool) -> tuple[Array, Array]:
        """K and Θ (0 without `slopes`) of the outputs, (n, m)."""
        a, b = self.pick(x1), self.pick(x2)
        scales, size = self._scales(params), a.shape[1]
        square = lambda x: jnp.sum(x**2, axis=1) / size
        (weight, bias), *rest = scales
        cross = bias + weight * (a @ b.T) / size
        first, second = bias + weight * square(a), bias + weight * square(b)
        tangent = cross
        for weight, bias in rest:
            given = (first, second, cross, tangent)
            if self.layer_norm:
                spread = jnp.sqrt(first)[:, None] * jnp.sqrt(second)[None]
                cross, tangent = cross / spread, tangent / spread
                first, second = jnp.ones_like(first), jnp.ones_like(second)
            value, slope = pair(self.activation, first[:, None], second[None], cross, slopes)
            cross = bias + weight * value
            tangent = cross + weight * slope * tangent if slopes else jnp.zeros(())
            first, second = (bias + weight * alone(self.activation, each)[0] for each in (first, second))
            if self.residual:
                first, second, cross, tangent = first + given[0], second + given[1], cross + given[2], tangent + given[3]
        return cross, tangent

    def own(self, params: Tree, x: Tree) -> tuple[Array, Array]:
        """K(x, x) and Θ(x, x), (n,)."""
        a = self.pick(x)
        (weight, bias), *rest = self._scales(params)
        value = bias + weight * jnp.sum(a**2, axis=1) / a.shape[1]
        tangent = value
        for weight, bias in rest:
            given = (value, tangent)
            if self.layer_norm:
                value, tangent = jnp.ones_like(value), tangent / value
            mean, slope = alone(self.activation, value)
            value = bias + weight * mean
            tangent = value + weight * slope * tangent
            if self.residual:
                value, tangent = value + given[0], tangent + given[1]
        return value, tangent


@dataclasses.dataclass(frozen=True)
class NNGP(Dense):
    """The prior over functions of an infinitely wide network, exactly: a BNN of this depth, as a kernel; its σ_w and σ_b are learned by evidence."""

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.recursion(params, x1, x2, False)[0]

    def diag(self, params: Tree, x: Tree) -> Array:
        return self.own(params, x)[0]


@dataclasses.dataclass(frozen=True)
class NTK(Dense):
    """The kernel of gradient descent on an infinitely wide network, all layers trained. As a prior of a process it is not that of the network: σ of
    predictions means what the kernel says, not what an ensemble of trained nets would show."""

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.recursion(params, x1, x2, True)[1]

    def diag(self, params: Tree, x: Tree) -> Array:
        return self.own(params, x)[1]


# ---- convolutional networks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Convolutional(Kernel):
    """What ConvNNGP and ConvNTK share: `depth` layers of window × window convolutions (zero padding) with infinitely many channels, then a dense output over all places,
    or over their mean with pooling=True. x (n, H, W, C). Without pooling only equal places of two images meet, (n, m, H, W) numbers; with it all pairs
    of places do, (n, m, HW, HW): for small images (Novak et al. 2019)."""

    depth: int = 2
    window: int = 3
    activation: str = "relu"
    weight: Positive = LogNormal(0.5 * math.log(2.0), 0.5)
    bias: Positive = LogNormal(-1.0, 1.0)
    pooling: bool = False

    def __post_init__(self) -> None:
        activation_of(self.activation)
        check_numbers(self, "weight", *(("bias",) if self.bias != 0 else ()))
        if self.window < 1 or self.window % 2 == 0:
            raise ModelError(message("The window must be odd.", self.window, "1, 3, 5, …", "pass window=3"))

    def numbers(self) -> dict[str, Number]:
        return {"weight": Number(self.weight), "bias": Number(self.bias)}

    def bind(self, x: Tree) -> Kernel:
        if len(x.shape) != 4:
            raise ModelError(
                message(f"{type(self).__name__} takes images.", f"x of shape {x.shape}", "(n, H, W, C)", "add a last axis for one channel")
            )
        return self

    def recursion(self, params: Tree, x1: Tree, x2: Tree, slopes: bool) -> tuple[Array, Array]:
        """K and Θ (0 without `slopes`) of the outputs, (n, m)."""
        weight, bias = self.value(params, "weight") ** 2, self.value(params, "bias") ** 2
        a, b = (x.astype(jnp.result_type(float)) for x in (x1, x2))
        channels = a.shape[-1]
        first, second = (jnp.sum(x**2, axis=-1) / channels for x in (a, b))
        cross = jnp.einsum("nhwc,mijc->nmhwij" if self.pooling else "nhwc,mhwc->nmhw", a, b) / channels
        lift = (
            (lambda q: q[:, None, :, :, None, None], lambda q: q[None, :, None, None])
            if self.pooling
            else (lambda q: q[:, None], lambda q: q[None])
        )
        tangent: Any = jnp.zeros(())  # of what the layers so far put out, before the next mean over places
        for layer in range(self.depth + 1):
            if layer:
                value, slope = pair(self.activation, lift[0](first), lift[1](second), cross, slopes)
                first, second = (alone(self.activation, each)[0] for each in (first, second))
                cross, tangent = value, slope * tangent if slopes else tangent
            if layer < self.depth:
                mean = self._window(tangent) if slopes and layer else tangent
                first, second, cross = (bias + weight * self._window(each) for each in (first, second, cross))
                tangent = cross + weight * mean if slopes else tangent
        over = lambda value: jnp.mean(value, axis=tuple(range(2, value.ndim)))
        output = bias + weight * over(cross)
        return output, output + weight * over(tangent) if slopes else tangent

    def own(self, params: Tree, x: Tree, slopes: bool) -> Array:
        """K(x, x), or Θ(x, x), (n,): one image at a time, where its places meet each other."""
        if self.pooling or slopes:
            return jax.lax.map(lambda row: self.recursion(params, row[None], row[None], slopes)[int(slopes)][0, 0], x)
        weight, bias = self.value(params, "weight") ** 2, self.value(params, "bias") ** 2
        value = jnp.sum(x.astype(jnp.result_type(float)) ** 2, axis=-1) / x.shape[-1]
        for layer in range(self.depth + 1):
            value = alone(self.activation, value)[0] if layer else value
            value = bias + weight * self._window(value) if layer < self.depth else value
        return bias + weight * jnp.mean(value, axis=(1, 2))

    def _window(self, value: Array) -> Array:
        """The mean over a window around each place, outside counting as 0; over both places alike for (…, H, W, H, W)."""
        reach, axes = self.window // 2, 4 if value.ndim == 6 else 2
        total = jnp.zeros_like(value)
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                moved = value
                for axis, by in zip(range(value.ndim - axes, value.ndim), (down, right) * (axes // 2), strict=True):
                    moved = _shift(moved, by, axis)
                total = total + moved
        return total / self.window**2


@dataclasses.dataclass(frozen=True)
class ConvNNGP(Convolutional):
    """The prior over functions of a convolutional network with infinitely many channels."""

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.recursion(params, x1, x2, False)[0]

    def diag(self, params: Tree, x: Tree) -> Array:
        return self.own(params, x, False)


@dataclasses.dataclass(frozen=True)
class ConvNTK(Convolutional):
    """The kernel of gradient descent on it, all layers trained (Arora et al. 2019)."""

    def __call__(self, params: Tree, x1: Tree, x2: Tree) -> Array:
        return self.recursion(params, x1, x2, True)[1]

    def diag(self, params: Tree, x: Tree) -> Array:
        return self.own(params, x, True)


def _shift(value: Array, by: int, axis: int) -> Array:
    """value moved by some places along an axis, zeros coming in."""
    if by == 0:
        return value
    widths = [(0, 0)] * value.ndim
    widths[axis] = (by, 0) if by > 0 else (0, -by)
    start = 0 if by > 0 else -by
    return jax.lax.slice_in_dim(jnp.pad(value, widths), start, start + value.shape[axis], axis=axis)


# ---- finite networks -----------------------------------------------------------------------------------------------------------------


def limit_of(model: BNN, tangent: bool = False) -> GP:
    """The Gaussian process an MLP's prior tends to as its hidden layers grow: same depth, activation, prior scales and noise. tangent: with the NTK.

    Needs al.Normal(…, scaling="fan_in"): with a fixed scale of the weights functions grow without bound as layers widen, and there is no limit.
    """
    network, prior = getattr(model, "network", None), getattr(model, "prior", None)
    if (
        not isinstance(network, MLP)
        or type(prior) is not Normal
        or prior.scaling != "fan_in"
        or prior.loc != 0
        or not isinstance(model.likelihood, Gaussian)
    ):
        got = f"{type(network).__name__} with {prior!r} and {type(getattr(model, 'likelihood', None)).__name__}"
        raise ModelError(
            message(
                "The limit of this model is not known here.",
                got,
                'an al.networks.MLP with al.Normal(…, scaling="fan_in") and al.Gaussian',
                "scale the prior by fan-in, or measure empirical_nngp(key, model, x)",
            )
        )
    template = jax.eval_shape(network.init, jax.random.key(0))
    unit = prior.scales(template, jax.tree.map(lambda leaf: 1, template))
    layers = [unit[f"layer{i}"] for i in range(len(network.hidden) + 1)]
    weight, bias = (tuple(layer[name] for layer in layers) for name in ("weight", "bias"))
    kernel = (NTK if tangent else NNGP)(len(network.hidden), network.activation, weight, bias)
    return GP(kernel, Zero(), model.likelihood)


def empirical_nngp(key: KeyLike, model: BNN, x1: Any, x2: Any = None, num_samples: int = 1000) -> np.ndarray:
    """E[f(x)f(x′)] over draws of any model's prior, averaged over its outputs: (n, m), by Monte Carlo, `num_samples` networks a few at a time."""
    x1 = check_arrays(x1, "x1")
    both = x1 if x2 is None else jax.tree.map(lambda a, b: np.concatenate([a, b]), x1, check_arrays(x2, "x2"))
    n = _tree.rows(x1)

    def one(total: Any, key: Key) -> tuple[Any, None]:
        f = model.outputs(model.sample_prior(key), both, None)
        return total + (f[:n] @ (f if x2 is None else f[n:]).T) / f.shape[1], None

    @jax.jit
    def run(keys: Key) -> Array:
        m = n if x2 is None else _tree.rows(both) - n
        return jax.lax.scan(one, jnp.zeros((n, m)), keys)[0] / len(keys)

    both = jax.tree.map(jnp.asarray, both)
    return np.asarray(run(jax.random.split(as_key(key), num_samples)))


def empirical_ntk(network: Any, params: Tree, x1: Any, x2: Any = None, scales: Tree = None) -> np.ndarray:
    """Σ_p ∂f(x)/∂w_p·∂f(x′)/∂w_p of any network at its weights: (n, m) for one output, (n, m, k, k) for k.

    One row of x2 at a time: back through the network to a gradient, and forward with it over all rows of x1; the Jacobian, rows × weights, is never held.
    scales: a factor of each weight's slope, a tree of numbers; for an al.BNN the prior's scales (so that it has a limit as width grows), for a
    network 1.
    """
    if isinstance(network, BNN):
        model, network = network, network.network
        prior: Any = model.prior
        scales = prior.scales(params, fan_in(network, params)) if scales is None and hasattr(prior, "scales") else scales
    network = as_network(network)
    scales = jax.tree.map(lambda leaf: 1.0, params) if scales is None else scales
    x1 = jax.tree.map(jnp.asarray, check_arrays(x1, "x1"))
    x2 = x1 if x2 is None else jax.tree.map(jnp.asarray, check_arrays(x2, "x2"))
    out = jax.eval_shape(lambda w, x: network.apply(w, x, None), params, x1).shape[1]
    rows = max(1, min(_tree.rows(x1), BYTE_BUDGET // max(1, 4 * _per_row(network, params, x1))))

    @jax.jit
    def column(params: Tree, x1: Tree, row: Tree) -> Array:
        """Θ(x1, row), (n, k, k)."""
        at = lambda x: lambda w: network.apply(w, x, None)
        back = jax.vjp(at(jax.tree.map(lambda leaf: leaf[None], row)), params)[1]

        def one(unit: Array) -> Array:
            slope = jax.tree.map(lambda leaf, scale: leaf * scale**2, back(unit[None])[0], scales)
            return jax.jvp(at(x1), (params,), (slope,))[1]

        return jax.lax.map(one, jnp.eye(out)).transpose(1, 2, 0)

    pieces = []
    for first in range(0, _tree.rows(x1), rows):
        part = _tree.take(x1, slice(first, first + rows))
        pieces.append(np.stack([np.asarray(column(params, part, _tree.take(x2, j))) for j in range(_tree.rows(x2))], axis=1))
    kernel = np.concatenate(pieces)
    return kernel[:, :, 0, 0] if out == 1 else kernel


def _per_row(network: Any, params: Tree, x: Tree) -> int:
    """Numbers computed between one row and its outputs, about."""
    shapes = jax.make_jaxpr(lambda w, rows: network.apply(w, rows, None))(params, _tree.take(x, slice(0, 1))).jaxpr.eqns
    return sum(int(np.prod(v.aval.shape)) for eqn in shapes for v in eqn.outvars if hasattr(v.aval, "shape"))


def distance(draws: Any, kernel: Any) -> float:
    """2-Wasserstein distance between N(0, second moment of draws) and N(0, kernel): how far a network's functions (S, rows) are from their limit's."""
    draws = np.asarray(draws, np.float64)
    first, second = draws.T @ draws / len(draws), np.asarray(kernel, np.float64)
    half = _power_half(second)
    return float(np.sqrt(max(np.trace(first) + np.trace(second) - 2 * np.trace(_power_half(half @ first @ half)), 0.0)))


def _power_half(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
