"""Random features: stationary processes as linear models (Rahimi and Recht 2007), deep ones as networks (Cutajar et al. 2017).

k(x − x′) = E[cos(ω·(x − x′))] over the kernel's spectral density: with m frequencies, φ(x) = (cos ω·x, sin ω·x)/√m gives φ(x)·φ(x′) → k/scale², and a
linear model of them with prior N(0, scale²) is the process. So `al.LinearModel(gp.RandomFourier(…))` with al.Exact is a GP in O(N m²), and a network whose layers are such
models, `al.BNN(gp.RandomDeep(…))`, is a deep GP to which every method for BNNs applies.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.features import columns
from aleator.hyperpriors import positive_number

ORDERS = {"rbf": np.inf, "matern12": 0.5, "matern32": 1.5, "matern52": 2.5}


@dataclasses.dataclass(frozen=True)
class RandomFourier:
    """scale·(cos ωx, sin ωx)/√m for m = num_features/2 frequencies of a kernel: "rbf" or "matern12", "matern32", "matern52"; length: one number, or one a column.

    orthogonal: frequencies at right angles to each other, in blocks of D, which lowers the variance (Yu et al. 2016). Weights of prior N(0, 1).
    """

    num_features: int = 200
    length: float | tuple[float, ...] = 1.0
    scale: float = 1.0
    kernel: str = "rbf"
    orthogonal: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_features(self.num_features, self.kernel)
        positive_number("RandomFourier", "scale", self.scale)

    def __call__(self, x: Array) -> Array:
        x = columns(x)
        waves = frequencies(x.shape[1], self.num_features // 2, self.kernel, self.orthogonal, self.seed)
        return self.scale * waves_of(x / jnp.asarray(self.length, x.dtype), waves)


@dataclasses.dataclass(frozen=True)
class RandomDeep:
    """h⁰ = x, hˡ = [hˡ⁻¹ +] Σ φ(hˡ⁻¹/length) Wˡ, outputs the last: a deep GP by random features as a network; x (n, in_size) → (n, out_size).

    Frequencies are fixed by `seed`, the weights W are what a BNN infers: with al.Normal(1.0) each layer is a process of unit scale. skip: inner layers add to their
    inputs (which must be of one size), so that many layers do not forget them.
    """

    in_size: int
    hidden: tuple[int, ...] = (2,)
    out_size: int = 1
    num_features: int = 100
    length: float = 1.0
    kernel: str = "rbf"
    skip: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", (self.hidden,) if isinstance(self.hidden, int) else tuple(self.hidden))
        check_features(self.num_features, self.kernel)
        positive_number("RandomDeep", "length", self.length)

    def _sizes(self) -> tuple[int, ...]:
        return (self.in_size, *self.hidden, self.out_size)

    def init(self, key: Key) -> Tree:
        sizes = self._sizes()
        keys = jax.random.split(key, len(sizes) - 1)
        return {f"layer{i}": {"weight": jax.random.normal(keys[i], (self.num_features, sizes[i + 1]))} for i in range(len(keys))}

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        h = columns(x)
        for i in range(len(self.hidden) + 1):
            waves = frequencies(h.shape[1], self.num_features // 2, self.kernel, True, self.seed + i)
            new = waves_of(h / self.length, waves) @ params[f"layer{i}"]["weight"]
            keep = self.skip and i < len(self.hidden) and new.shape[1] == h.shape[1]
            h = h + new if keep else new
        return h

    def rebuild(self, params: Tree) -> Tree:
        return params


def waves_of(x: Array, waves: Array) -> Array:
    """(cos ωx, sin ωx)/√m, (n, 2m)."""
    angles = x @ jnp.asarray(waves.T, x.dtype)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1) / len(waves) ** 0.5


@cached
def frequencies(size: int, number: int, kernel: str, orthogonal: bool, seed: int) -> np.ndarray:
    """ω (number, size) of a kernel of unit length: normals for the RBF, Student-t with 2·order degrees of freedom for a Matérn."""
    generator = np.random.default_rng([seed, size])
    blocks = -(-number // size)
    if orthogonal:
        turned = [np.linalg.qr(generator.standard_normal((size, size)))[0].T for _ in range(blocks)]
        lengths = np.sqrt(generator.chisquare(size, (blocks * size, 1)))
        waves = (np.concatenate(turned) * lengths)[:number]
    else:
        waves = generator.standard_normal((number, size))
    order = ORDERS[kernel]
    return waves if np.isinf(order) else waves / np.sqrt(generator.chisquare(2 * order, (number, 1)) / (2 * order))


def check_features(number: int, kernel: str) -> None:
    if number < 2 or number % 2:
        raise ModelError(message("Random features come in pairs.", f"num_features={number}", "an even number ≥ 2", "pass e.g. 200"))
    if kernel not in ORDERS:
        raise ModelError(message("Unknown kernel for random features.", repr(kernel), f"one of {sorted(ORDERS)}", "choose one of them"))
