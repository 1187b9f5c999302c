"""Covariance operators over a flat vector of size D: what a Gaussian posterior must know of its Σ.

Each has num_noise, sqrt_matvec(z) with z (num_noise,) ~ N(0, I) ↦ (D,) ~ N(0, Σ), diagonal() the marginal variances (D,), and logdet() =
log |Σ|. Those of curvature also have matvec(v) = Σv, solve(v) = Σ⁻¹v and sandwich(J) = JΣJᵀ for J (…, k, D). They are pytrees, work
inside compiled code, and keep the dtype of their arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Diagonal:
    """Σ = diag(scale²); scale (D,) > 0."""

    scale: Array

    @property
    def num_noise(self) -> int:
        return self.scale.shape[0]

    def sqrt_matvec(self, z: Array) -> Array:
        return self.scale * z

    def diagonal(self) -> Array:
        return self.scale**2

    def logdet(self) -> Array:
        return 2.0 * jnp.sum(jnp.log(self.scale))

    def matvec(self, v: Array) -> Array:
        return self.scale**2 * v

    def solve(self, v: Array) -> Array:
        return v / self.scale**2

    def sandwich(self, jacobian: Array) -> Array:
        half = jacobian * self.scale
        return half @ jnp.swapaxes(half, -1, -2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LowerTriangular:
    """Σ = L Lᵀ; factor L (D, D), lower triangular with a positive diagonal."""

    factor: Array

    @property
    def num_noise(self) -> int:
        return self.factor.shape[0]

    def sqrt_matvec(self, z: Array) -> Array:
        return jnp.asarray(self.factor) @ z

    def diagonal(self) -> Array:
        return jnp.sum(jnp.asarray(self.factor) ** 2, axis=1)

    def logdet(self) -> Array:
        return 2.0 * jnp.sum(jnp.log(jnp.diagonal(self.factor)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """Σ = diag(scale²) + F Fᵀ; scale (D,) > 0, factor F (D, r): memory linear in D."""

    scale: Array
    factor: Array

    @property
    def num_noise(self) -> int:
        return self.factor.shape[0] + self.factor.shape[1]

    def sqrt_matvec(self, z: Array) -> Array:
        size = self.scale.shape[0]
        return self.scale * z[:size] + jnp.asarray(self.factor) @ z[size:]

    def diagonal(self) -> Array:
        return self.scale**2 + jnp.sum(jnp.asarray(self.factor) ** 2, axis=1)

    def logdet(self) -> Array:
        """log |diag(s²)| + log |I + Fᵀ diag(s⁻²) F|, the matrix determinant lemma."""
        whitened = self.factor / self.scale[:, None]
        small = jnp.eye(whitened.shape[1], dtype=whitened.dtype) + whitened.T @ whitened
        return 2.0 * (jnp.sum(jnp.log(self.scale)) + jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(small)))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KroneckerBlocks:
    """One block a leaf: for matrices Σ = (A Aᵀ) ⊗ (B Bᵀ) over the rows of W (a, b), so that A Z Bᵀ is a draw; diag(s²) for vectors.

    rows, columns: for a matrix block its lower triangular A (a, a) and B (b, b); for a vector its scales s (d,) in rows and None in
    columns.
    """

    rows: tuple[Array, ...]
    columns: tuple[Array | None, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(np.prod(_block_shape(a, b))) for a, b in zip(self.rows, self.columns, strict=True))

    @property
    def num_noise(self) -> int:
        return sum(self.sizes)

    def sqrt_matvec(self, z: Array) -> Array:
        parts = jnp.split(z, np.cumsum(self.sizes)[:-1])
        return jnp.concatenate([self._spread(a, b, part) for a, b, part in zip(self.rows, self.columns, parts, strict=True)])

    def diagonal(self) -> Array:
        square = lambda factor: jnp.sum(jnp.asarray(factor) ** 2, axis=1)
        blocks = [a**2 if b is None else jnp.outer(square(a), square(b)).reshape(-1) for a, b in zip(self.rows, self.columns, strict=True)]
        return jnp.concatenate(blocks)

    def logdet(self) -> Array:
        total = lambda values: 2.0 * jnp.sum(jnp.log(values))
        blocks = [
            total(a) if b is None else b.shape[0] * total(jnp.diagonal(a)) + a.shape[0] * total(jnp.diagonal(b))
            for a, b in zip(self.rows, self.columns, strict=True)
        ]
        return sum(blocks[1:], start=blocks[0])

    @staticmethod
    def _spread(a: Array, b: Array | None, z: Array) -> Array:
        if b is None:
            return a * z
        return (jnp.asarray(a) @ z.reshape(a.shape[0], b.shape[0]) @ jnp.asarray(b).T).reshape(-1)


def _block_shape(a: Array, b: Array | None) -> tuple[int, ...]:
    return a.shape if b is None else (a.shape[0], b.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """Σ = F Fᵀ for any square factor F (D, D); log_det is log |Σ|, known to whoever made F."""

    factor: Array
    log_det: Array

    @property
    def num_noise(self) -> int:
        return self.factor.shape[1]

    def sqrt_matvec(self, z: Array) -> Array:
        return jnp.asarray(self.factor) @ z

    def diagonal(self) -> Array:
        return jnp.sum(jnp.asarray(self.factor) ** 2, axis=1)

    def logdet(self) -> Array:
        return jnp.asarray(self.log_det)

    def matvec(self, v: Array) -> Array:
        return jnp.asarray(self.factor) @ (jnp.asarray(self.factor).T @ v)

    def solve(self, v: Array) -> Array:
        return jnp.linalg.solve(jnp.asarray(self.factor).T, jnp.linalg.solve(jnp.asarray(self.factor), v))

    def sandwich(self, jacobian: Array) -> Array:
        half = jacobian @ jnp.asarray(self.factor)
        return half @ jnp.swapaxes(half, -1, -2)

    def rows(self, inputs: Array, places: np.ndarray, variance: bool = False) -> Array:
        """(n, b, b) of the outputs aᵀW of a matrix whose entries (a, b) have these places in the vector, inputs (n, a); variance: (n, b). Through
        the covariances of pairs of outputs, a × a each: n·a² numbers a pair and not n·(a·b)² an output."""
        factor = jnp.asarray(self.factor)[jnp.swapaxes(jnp.asarray(places), 0, 1)]  # (b, a, D)
        if variance:
            own = factor @ jnp.swapaxes(factor, 1, 2)
            return jax.lax.map(lambda square: jnp.sum((inputs @ square) * inputs, axis=1), own).T
        across = lambda one: jnp.einsum("iq,djq->jdi", one, factor).reshape(inputs.shape[1], -1)  # of one output with all, (a, b·a)
        by_output = lambda one: jnp.einsum("ndi,ni->nd", (inputs @ across(one)).reshape(len(inputs), len(factor), -1), inputs)
        return jnp.swapaxes(jax.lax.map(by_output, factor), 0, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Complement:
    """Σ = S(I − U diag(shrink) Uᵀ)S: a prior of scales S = diag(scale) that data have narrowed along r directions only.

    scale (D,) > 0; vectors U (D, r) orthonormal; shrink (r,) in [0, 1).
    """

    scale: Array
    vectors: Array
    shrink: Array

    @property
    def num_noise(self) -> int:
        return self.scale.shape[0]

    def sqrt_matvec(self, z: Array) -> Array:
        """S(I − U(1 − √(1 − shrink))Uᵀ)z."""
        return self.scale * self._spread(z, 1.0 - jnp.sqrt(1.0 - self.shrink))

    def diagonal(self) -> Array:
        return self.scale**2 * (1.0 - jnp.asarray(self.vectors) ** 2 @ self.shrink)

    def logdet(self) -> Array:
        return 2.0 * jnp.sum(jnp.log(self.scale)) + jnp.sum(jnp.log1p(-self.shrink))

    def matvec(self, v: Array) -> Array:
        return self.scale * self._spread(self.scale * v, self.shrink)

    def solve(self, v: Array) -> Array:
        return self._spread(v / self.scale, -self.shrink / (1.0 - self.shrink)) / self.scale

    def sandwich(self, jacobian: Array) -> Array:
        scaled = jacobian * self.scale
        inside = scaled @ jnp.asarray(self.vectors)
        return scaled @ jnp.swapaxes(scaled, -1, -2) - (inside * self.shrink) @ jnp.swapaxes(inside, -1, -2)

    def _spread(self, z: Array, less: Array) -> Array:
        vectors = jnp.asarray(self.vectors)
        return z - vectors @ (less * (vectors.T @ z))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KroneckerEigen:
    """Over a matrix W (a, b), row by row: vec Σ = (R U ⊗ V) diag(variance) (R U ⊗ V)ᵀ with R = diag(scale).

    left U (a, a) and right V (b, b) orthonormal, variance (a, b) > 0, scale (a,) > 0 of the rows.
    """

    left: Array
    right: Array
    variance: Array
    scale: Array

    @property
    def num_noise(self) -> int:
        return int(np.prod(self.variance.shape))

    def sqrt_matvec(self, z: Array) -> Array:
        return self._out(jnp.sqrt(self.variance) * z.reshape(self.variance.shape))

    def diagonal(self) -> Array:
        spread = jnp.asarray(self.left) ** 2 @ self.variance @ (jnp.asarray(self.right) ** 2).T
        return (self.scale[:, None] ** 2 * spread).reshape(-1)

    def logdet(self) -> Array:
        return jnp.sum(jnp.log(self.variance)) + 2.0 * self.variance.shape[1] * jnp.sum(jnp.log(self.scale))

    def matvec(self, v: Array) -> Array:
        return self._out(self.variance * self._in(self.scale[:, None] * v.reshape(self.variance.shape)))

    def solve(self, v: Array) -> Array:
        inner = self._in(v.reshape(self.variance.shape) / self.scale[:, None]) / self.variance
        return ((jnp.asarray(self.left) @ inner @ jnp.asarray(self.right).T) / self.scale[:, None]).reshape(-1)

    def sandwich(self, jacobian: Array) -> Array:
        """For gradients (…, k, a·b)."""
        grads = jacobian.reshape(*jacobian.shape[:-1], *self.variance.shape)
        inner = jnp.asarray(self.left).T @ (self.scale[:, None] * grads) @ jnp.asarray(self.right) * jnp.sqrt(self.variance)
        flat = inner.reshape(*inner.shape[:-2], -1)
        return flat @ jnp.swapaxes(flat, -1, -2)

    def shared(self, inputs: Array, cotangents: Array, variance: bool = False) -> Array:
        """(n, k, k) where the gradient of output c at row n is Σₜ of outer products of inputs (n, t, a) and cotangents (k, n, t, b), over the
        positions t that share the matrix; variance: its diagonal alone, (n, k). With one position it is Σᵢⱼ ãᵢ² g̃ⱼg̃ⱼ′ vᵢⱼ, without ever forming
        k × a × b numbers."""
        left, right, (a, b) = self.scale[:, None] * jnp.asarray(self.left), jnp.asarray(self.right), self.variance.shape
        (k, _, positions, _) = cotangents.shape
        if positions == 1:
            spread, turned = (inputs[:, 0] @ left) ** 2 @ self.variance, cotangents[:, :, 0] @ right
            return jnp.sum(turned**2 * spread, axis=2).T if variance else jnp.einsum("cnj,nj,dnj->ncd", turned, spread, turned)
        product = lambda x, g: jnp.einsum("nta,cntb->ncab", x, g)
        if positions * (a * a + k * b * b) < k * a * b * (a + b):  # turning the two sides is less work than turning the gradients
            grads: Any = product(inputs @ left, cotangents @ right)
        else:
            grads = left.T @ product(inputs, cotangents) @ right
        if variance:
            return jnp.sum(grads**2 * self.variance, axis=(2, 3))
        flat = (grads * jnp.sqrt(self.variance)).reshape(*grads.shape[:2], -1)
        return flat @ jnp.swapaxes(flat, 1, 2)

    def rows(self, inputs: Array, many: bool = False) -> Array:
        """The same where the outputs of the matrix are the functions themselves: (n, b, b), or variances (n, b) where there are many."""
        spread = ((self.scale * inputs) @ jnp.asarray(self.left)) ** 2 @ self.variance
        right = jnp.asarray(self.right)
        return spread @ (right**2).T if many else jnp.einsum("cj,nj,dj->ncd", right, spread, right)

    def _in(self, w: Array) -> Array:
        return jnp.asarray(self.left).T @ w @ jnp.asarray(self.right)

    def _out(self, w: Array) -> Array:
        return (self.scale[:, None] * (jnp.asarray(self.left) @ w @ jnp.asarray(self.right).T)).reshape(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Independent blocks: operator i lives on the coordinates index[i] of a vector of size D; together they cover it once."""

    operators: tuple[Any, ...]
    index: tuple[Array, ...]

    @property
    def size(self) -> int:
        return sum(len(index) for index in self.index)

    @property
    def num_noise(self) -> int:
        return sum(operator.num_noise for operator in self.operators)

    def sqrt_matvec(self, z: Array) -> Array:
        parts = jnp.split(z, np.cumsum([operator.num_noise for operator in self.operators])[:-1])
        return self._scatter([operator.sqrt_matvec(part) for operator, part in zip(self.operators, parts, strict=True)])

    def diagonal(self) -> Array:
        return self._scatter([operator.diagonal() for operator in self.operators])

    def logdet(self) -> Array:
        return _total([operator.logdet() for operator in self.operators])

    def matvec(self, v: Array) -> Array:
        return self._scatter([operator.matvec(v[index]) for operator, index in zip(self.operators, self.index, strict=True)])

    def solve(self, v: Array) -> Array:
        return self._scatter([operator.solve(v[index]) for operator, index in zip(self.operators, self.index, strict=True)])

    def sandwich(self, jacobian: Array) -> Array:
        return _total([operator.sandwich(jacobian[..., index]) for operator, index in zip(self.operators, self.index, strict=True)])

    def _scatter(self, parts: list[Array]) -> Array:
        out = jnp.zeros(self.size, parts[0].dtype)
        for part, index in zip(parts, self.index, strict=True):
            out = out.at[index].set(part)
        return out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Embedded:
    """An operator on the coordinates `index` of a vector like `blank` (D zeros); the other coordinates do not vary."""

    inner: Any
    index: Array
    blank: Array

    @property
    def num_noise(self) -> int:
        return self.inner.num_noise

    def sqrt_matvec(self, z: Array) -> Array:
        return self._put(self.inner.sqrt_matvec(z))

    def diagonal(self) -> Array:
        return self._put(self.inner.diagonal())

    def logdet(self) -> Array:
        """log |Σ| on the coordinates that vary."""
        return self.inner.logdet()

    def matvec(self, v: Array) -> Array:
        return self._put(self.inner.matvec(v[self.index]))

    def sandwich(self, jacobian: Array) -> Array:
        return self.inner.sandwich(jacobian[..., self.index])

    def _put(self, part: Array) -> Array:
        return jnp.asarray(self.blank).at[self.index].set(part.astype(self.blank.dtype))


def _total(parts: list[Array]) -> Array:
    return sum(parts[1:], start=parts[0])
