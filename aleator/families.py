"""Families of approximating distributions q, for variational inference.

A family sees the random leaves as a tuple of arrays ("parts"): the leaves themselves, or all of them in one flat vector of size D where
`flat` is True. Its variational parameters φ are a plain tree ("q"). Scales are held as logarithms, σ = exp(ρ), so that entropies are sums
of ρ and no step takes a logarithm over the weights. Relative factors (a unit triangle times σ, and so on) keep all entries of φ of order
one, whatever the scale of the weights.

    init(key, parts, scale) → q           spread `scale` around the parts
    noise(key, q) → z                     standard normals; −z is the antithetic draw
    draw(q, z, stratum) → parts           θ = g(φ, z), differentiable in φ; strata: a mixture's components, 1 elsewhere
    log_weights(q) → (strata,)            log probabilities of the strata
    log_prob(q, parts), entropy(q), marginals(q) → (means, variances); the last two None where not closed
    operator(q)                           Σ as in `aleator.linalg` for a single Gaussian, else None
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree, linalg
from aleator._errors import MethodError, message, nearest
from aleator._typing import Array, Key, Tree
from aleator.noise import normal, normal_tree

LOG_2PI = float(np.log(2 * np.pi))
Parts = tuple[Array, ...]


class Family(abc.ABC):
    """What variational inference asks of a family; see the module's docstring."""

    flat: ClassVar[bool | None] = True
    strata: int = 1

    @abc.abstractmethod
    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        """φ with spread `scale` around the parts."""

    @abc.abstractmethod
    def noise(self, key: Key, q: Tree) -> Tree:
        """The standard normals of one draw."""

    @abc.abstractmethod
    def draw(self, q: Tree, z: Tree, stratum: Any = 0) -> Parts:
        """θ = g(φ, z)."""

    @abc.abstractmethod
    def log_prob(self, q: Tree, parts: Parts) -> Array:
        """log q(θ), a scalar."""

    def log_weights(self, q: Tree) -> Array:
        return jnp.zeros((1,))

    def entropy(self, q: Tree) -> Array | None:
        return None

    def marginals(self, q: Tree) -> tuple[Parts, Parts] | None:
        return None

    def operator(self, q: Tree) -> Any:
        return None

    def centre(self, q: Tree) -> Parts:
        """A point in the middle of q."""
        return q["mean"]

    def sample(self, key: Key, q: Tree) -> Parts:
        """One draw from q."""
        if self.strata == 1:
            return self.draw(q, self.noise(key, q))
        key_which, key_noise = jax.random.split(key)
        return self.draw(q, self.noise(key_noise, q), jax.random.categorical(key_which, self.log_weights(q)))


@dataclasses.dataclass(frozen=True)
class MeanField(Family):
    """q = Π N(μ, σ²), all weights independent. φ: mean and rho = log σ, each like the parts."""

    flat: ClassVar[bool | None] = None

    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        return {"mean": parts, "rho": tuple(jnp.full_like(part, np.log(scale)) for part in parts)}

    def noise(self, key: Key, q: Tree) -> Tree:
        return normal_tree(key, q["mean"])

    def draw(self, q: Tree, z: Tree, stratum: Any = 0) -> Parts:
        return jax.tree.map(lambda m, r, e: m + jnp.exp(r) * e, q["mean"], q["rho"], z)

    def log_prob(self, q: Tree, parts: Parts) -> Array:
        term = lambda m, r, w: jnp.sum(-0.5 * ((w - m) * jnp.exp(-r)) ** 2 - r) - 0.5 * w.size * LOG_2PI
        return _tree.sum_leaves(jax.tree.map(term, q["mean"], q["rho"], parts))

    def entropy(self, q: Tree) -> Array:
        return _tree.sum_leaves(q["rho"]) + 0.5 * _tree.size(q["rho"]) * (1.0 + LOG_2PI)

    def marginals(self, q: Tree) -> tuple[Parts, Parts]:
        # exp(ρ)² and not exp(2ρ): a step that also needs σ takes one exponential per weight, not two.
        return q["mean"], tuple(jnp.square(jnp.exp(rho)) for rho in q["rho"])

    def operator(self, q: Tree) -> linalg.Diagonal:
        return linalg.Diagonal(jnp.exp(_ravel(q["rho"])))


@dataclasses.dataclass(frozen=True)
class FullRank(Family):
    """q = N(μ, L Lᵀ), L = diag(e^ρ)(I + A) with A strictly lower triangular. φ: mean (D,), rho (D,), lower (D, D)."""

    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        (flat,) = parts
        return {"mean": parts, "rho": jnp.full_like(flat, np.log(scale)), "lower": jnp.zeros((flat.size, flat.size), flat.dtype)}

    def noise(self, key: Key, q: Tree) -> Array:
        return normal(key, q["rho"].shape, q["rho"].dtype)

    def draw(self, q: Tree, z: Array, stratum: Any = 0) -> Parts:
        return (q["mean"][0] + _factor(q) @ z,)

    def log_prob(self, q: Tree, parts: Parts) -> Array:
        # L⁻¹r = (I + A)⁻¹ diag(e^−ρ) r: a solve with a unit triangle.
        z = solve_triangular(_unit(q["lower"]), (parts[0] - q["mean"][0]) * jnp.exp(-q["rho"]), lower=True, unit_diagonal=True)
        return -0.5 * jnp.sum(z**2) - jnp.sum(q["rho"]) - 0.5 * z.size * LOG_2PI

    def entropy(self, q: Tree) -> Array:
        return jnp.sum(q["rho"]) + 0.5 * q["rho"].size * (1.0 + LOG_2PI)

    def marginals(self, q: Tree) -> tuple[Parts, Parts]:
        return q["mean"], (jnp.sum(_factor(q) ** 2, axis=1),)

    def operator(self, q: Tree) -> linalg.LowerTriangular:
        return linalg.LowerTriangular(_factor(q))


@dataclasses.dataclass(frozen=True)
class LowRank(Family):
    """q = N(μ, S(I + B Bᵀ)S), S = diag(e^ρ), B (D, rank): memory linear in D. φ: mean, rho (D,), spread B."""

    rank: int = 2

    def __post_init__(self) -> None:
        _check_whole(self, "rank")

    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        (flat,) = parts
        # B = 0 would stay there: by symmetry its gradient vanishes.
        start = 0.1 * jax.random.normal(key, (flat.size, self.rank), flat.dtype)
        return {"mean": parts, "rho": jnp.full_like(flat, np.log(scale)), "spread": start}

    def noise(self, key: Key, q: Tree) -> Array:
        return normal(key, (q["spread"].shape[0] + self.rank,), q["rho"].dtype)

    def draw(self, q: Tree, z: Array, stratum: Any = 0) -> Parts:
        size = q["rho"].shape[0]
        return (q["mean"][0] + jnp.exp(q["rho"]) * (z[:size] + q["spread"] @ z[size:]),)

    def log_prob(self, q: Tree, parts: Parts) -> Array:
        """By Woodbury: rᵀ(I + BBᵀ)⁻¹r = |r|² − |C⁻¹Bᵀr|² with C Cᵀ = I + BᵀB."""
        r = (parts[0] - q["mean"][0]) * jnp.exp(-q["rho"])
        small = _capacitance(q["spread"])
        inner = solve_triangular(small, q["spread"].T @ r, lower=True)
        return -0.5 * (jnp.sum(r**2) - jnp.sum(inner**2)) - self._half_logdet(q, small) - 0.5 * r.size * LOG_2PI

    def entropy(self, q: Tree) -> Array:
        return self._half_logdet(q, _capacitance(q["spread"])) + 0.5 * q["rho"].size * (1.0 + LOG_2PI)

    def marginals(self, q: Tree) -> tuple[Parts, Parts]:
        return q["mean"], (jnp.exp(2.0 * q["rho"]) * (1.0 + jnp.sum(q["spread"] ** 2, axis=1)),)

    def operator(self, q: Tree) -> linalg.LowRank:
        scale = jnp.exp(q["rho"])
        return linalg.LowRank(scale, scale[:, None] * q["spread"])

    @staticmethod
    def _half_logdet(q: Tree, small: Array) -> Array:
        return jnp.sum(q["rho"]) + jnp.sum(jnp.log(jnp.diagonal(small)))


@dataclasses.dataclass(frozen=True)
class MatrixNormal(Family):
    """W = M + A Z Bᵀ per matrix, A = diag(e^α)(I + lower) over its rows and B likewise over its columns; vectors are mean-field.

    A leaf of more than two axes is the matrix (all axes but the last, last). φ: mean and, per leaf, the logarithms and lower triangles.
    """

    flat: ClassVar[bool | None] = False

    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        blocks: list[Any] = []
        for part in parts:
            if part.ndim < 2:
                blocks.append({"rho": jnp.full_like(part, np.log(scale))})
                continue
            a, b = part.size // part.shape[-1], part.shape[-1]
            zeros = lambda *shape, dtype=part.dtype: jnp.zeros(shape, dtype)
            rows = {"rho": jnp.full((a,), np.log(scale), part.dtype), "lower": zeros(a, a)}
            blocks.append({"rows": rows, "columns": {"rho": zeros(b), "lower": zeros(b, b)}})
        return {"mean": parts, "blocks": tuple(blocks)}

    def noise(self, key: Key, q: Tree) -> Tree:
        return normal_tree(key, q["mean"])

    def draw(self, q: Tree, z: Tree, stratum: Any = 0) -> Parts:
        out = []
        for mean, block, e in zip(q["mean"], q["blocks"], z, strict=True):
            if "rho" in block:
                out.append(mean + jnp.exp(block["rho"]) * e)
            else:
                matrix = _factor(block["rows"]) @ e.reshape(-1, e.shape[-1]) @ _factor(block["columns"]).T
                out.append(mean + matrix.reshape(mean.shape))
        return tuple(out)

    def log_prob(self, q: Tree, parts: Parts) -> Array:
        total = jnp.zeros(())
        for mean, block, part in zip(q["mean"], q["blocks"], parts, strict=True):
            r = part - mean
            if "rho" in block:
                z = r * jnp.exp(-block["rho"])
            else:
                rows, columns = block["rows"], block["columns"]
                r = r.reshape(-1, r.shape[-1]) * jnp.exp(-rows["rho"])[:, None] * jnp.exp(-columns["rho"])
                z = solve_triangular(_unit(rows["lower"]), r, lower=True, unit_diagonal=True)
                z = solve_triangular(_unit(columns["lower"]), z.T, lower=True, unit_diagonal=True)
            total = total - 0.5 * jnp.sum(z**2)
        return total - self._half_logdet(q) - 0.5 * _tree.size(parts) * LOG_2PI

    def entropy(self, q: Tree) -> Array:
        return self._half_logdet(q) + 0.5 * _tree.size(q["mean"]) * (1.0 + LOG_2PI)

    def marginals(self, q: Tree) -> tuple[Parts, Parts]:
        square = lambda side: jnp.sum(_factor(side) ** 2, axis=1)
        variances = [
            jnp.exp(2.0 * block["rho"]) if "rho" in block else jnp.outer(square(block["rows"]), square(block["columns"]))
            for block in q["blocks"]
        ]
        return q["mean"], tuple(v.reshape(m.shape) for v, m in zip(variances, q["mean"], strict=True))

    def operator(self, q: Tree) -> linalg.KroneckerBlocks:
        vector = lambda block: "rho" in block
        rows = tuple(jnp.exp(block["rho"]).reshape(-1) if vector(block) else _factor(block["rows"]) for block in q["blocks"])
        return linalg.KroneckerBlocks(rows, tuple(None if vector(block) else _factor(block["columns"]) for block in q["blocks"]))

    @staticmethod
    def _half_logdet(q: Tree) -> Array:
        total = jnp.zeros(())
        for block in q["blocks"]:
            if "rho" in block:
                total = total + jnp.sum(block["rho"])
            else:
                rows, columns = block["rows"]["rho"], block["columns"]["rho"]
                total = total + columns.size * jnp.sum(rows) + rows.size * jnp.sum(columns)
        return total


@dataclasses.dataclass(frozen=True)
class MixtureOfGaussians(Family):
    """q = Σₖ πₖ Π N(μₖ, σₖ²): several mean-field Gaussians. Draws are stratified: every component is drawn from and weighted by πₖ, so
    that the weights have exact gradients. φ: logits (K,), mean and rho (K, D)."""

    num_components: int = 3

    def __post_init__(self) -> None:
        _check_whole(self, "num_components")

    @property
    def strata(self) -> int:  # type: ignore[override]
        return self.num_components

    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        (flat,) = parts
        # The components must begin apart: equal ones have equal gradients.
        mean = flat + max(scale, 0.1) * jax.random.normal(key, (self.num_components, flat.size), flat.dtype)
        return {"logits": jnp.zeros((self.num_components,), flat.dtype), "mean": mean, "rho": jnp.full_like(mean, np.log(scale))}

    def noise(self, key: Key, q: Tree) -> Array:
        return normal(key, q["mean"].shape[1:], q["mean"].dtype)

    def draw(self, q: Tree, z: Array, stratum: Any = 0) -> Parts:
        return (q["mean"][stratum] + jnp.exp(q["rho"][stratum]) * z,)

    def log_weights(self, q: Tree) -> Array:
        return jax.nn.log_softmax(q["logits"])

    def log_prob(self, q: Tree, parts: Parts) -> Array:
        each = jnp.sum(-0.5 * ((parts[0] - q["mean"]) * jnp.exp(-q["rho"])) ** 2 - q["rho"], axis=1) - 0.5 * parts[0].size * LOG_2PI
        return jax.nn.logsumexp(self.log_weights(q) + each)

    def marginals(self, q: Tree) -> tuple[Parts, Parts]:
        weight = jax.nn.softmax(q["logits"])
        mean = weight @ q["mean"]
        return (mean,), (weight @ (jnp.exp(2.0 * q["rho"]) + (q["mean"] - mean) ** 2),)

    def centre(self, q: Tree) -> Parts:
        return (jax.nn.softmax(q["logits"]) @ q["mean"],)


@dataclasses.dataclass(frozen=True)
class Flow(Family):
    """θ = μ + L·T(z), z ~ N(0, I): a full-rank Gaussian whose noise is first bent by T, a stack of layers that begins as the identity.

    A layer shifts and scales one half of the entries by small networks of the other half (affine coupling, halves alternating), then bends
    every entry by sinh(e^δ asinh(z) + ε) (skewness ε, tails δ; Jones and Pewsey 2009). Both have closed inverses and Jacobians. For small
    models: L alone has D²/2 entries.
    """

    num_layers: int = 4
    hidden: int = 16

    def __post_init__(self) -> None:
        _check_whole(self, "num_layers", "hidden")

    def init(self, key: Key, parts: Parts, scale: float) -> Tree:
        (flat,) = parts
        size, dtype, layers = flat.size, flat.dtype, []
        for number, k in enumerate(jax.random.split(key, self.num_layers)):
            kept = int(self._mask(size, number).sum())
            first = jax.random.normal(k, (size, self.hidden), dtype) / np.sqrt(max(kept, 1))
            zeros = lambda *shape: jnp.zeros(shape, dtype)
            layers.append(
                {"in": first, "bias": zeros(self.hidden), "scale": zeros(self.hidden, size), "shift": zeros(self.hidden, size)}
                | {"skew": zeros(size), "tail": zeros(size)}
            )
        return FullRank().init(key, parts, scale) | {"layers": tuple(layers)}

    def noise(self, key: Key, q: Tree) -> Array:
        return normal(key, q["rho"].shape, q["rho"].dtype)

    def draw(self, q: Tree, z: Array, stratum: Any = 0) -> Parts:
        for number, layer in enumerate(q["layers"]):
            mask = self._mask(z.size, number)
            log_scale, shift = self._coupling(layer, z, mask)
            z = jnp.where(mask, z, z * jnp.exp(log_scale) + shift)
            z = jnp.sinh(jnp.exp(layer["tail"]) * jnp.arcsinh(z) + layer["skew"])
        return FullRank().draw(q, z)

    def log_prob(self, q: Tree, parts: Parts) -> Array:
        """The layers undone one by one: log N(z) − Σ log |∂layer|."""
        z = (parts[0] - q["mean"][0]) * jnp.exp(-q["rho"])
        z = solve_triangular(_unit(q["lower"]), z, lower=True, unit_diagonal=True)
        logdet = jnp.sum(q["rho"])
        for number, layer in reversed(list(enumerate(q["layers"]))):
            mask = self._mask(z.size, number)
            bent = jnp.arcsinh(z)
            inner = (bent - layer["skew"]) * jnp.exp(-layer["tail"])
            # d sinh(e^δ asinh(u) + ε)/du = e^δ cosh(e^δ asinh u + ε)/√(1 + u²), with √(1 + u²) = cosh(asinh u).
            logdet = logdet + jnp.sum(layer["tail"] + _log_cosh(bent) - _log_cosh(inner))
            u = jnp.sinh(inner)
            log_scale, shift = self._coupling(layer, u, mask)
            z = jnp.where(mask, u, (u - shift) * jnp.exp(-log_scale))
            logdet = logdet + jnp.sum(log_scale)
        return -0.5 * jnp.sum(z**2) - logdet - 0.5 * z.size * LOG_2PI

    @staticmethod
    def _mask(size: int, number: int) -> np.ndarray:
        """True for the entries that a layer keeps and conditions on."""
        return np.arange(size) % 2 == number % 2

    @staticmethod
    def _coupling(layer: Tree, z: Array, mask: np.ndarray) -> tuple[Array, Array]:
        """Log scales, kept within ±2, and shifts; 0 for the entries kept."""
        hidden = jnp.tanh(jnp.where(mask, z, 0.0) @ layer["in"] + layer["bias"])
        log_scale = 2.0 * jnp.tanh(0.5 * hidden @ layer["scale"])
        return jnp.where(mask, 0.0, log_scale), jnp.where(mask, 0.0, hidden @ layer["shift"])


NAMES: dict[str, Family] = {"mean_field": MeanField(), "full_rank": FullRank(), "matrix_normal": MatrixNormal()}


def as_family(family: Any) -> Family:
    """A name or a Family → the Family.

    >>> as_family("full_rank")
    FullRank()
    """
    if isinstance(family, str) and family in NAMES:
        return NAMES[family]
    if isinstance(family, Family):
        return family
    got = repr(family) + (nearest(family, NAMES) if isinstance(family, str) else "")
    raise MethodError(
        message("Unknown family.", got, f"one of {sorted(NAMES)}, or an object of al.families", "pass e.g. al.families.LowRank(2)")
    )


def _factor(q: Tree) -> Array:
    """L = diag(e^ρ)(I + strictly lower part)."""
    return jnp.exp(q["rho"])[:, None] * _unit(q["lower"])


def _unit(lower: Array) -> Array:
    return jnp.tril(lower, -1) + jnp.eye(lower.shape[0], dtype=lower.dtype)


def _capacitance(spread: Array) -> Array:
    """Cholesky factor of I + BᵀB, (r, r)."""
    return jnp.linalg.cholesky(jnp.eye(spread.shape[1], dtype=spread.dtype) + spread.T @ spread)


def _ravel(parts: Parts) -> Array:
    return jnp.concatenate([jnp.ravel(part) for part in parts])


def _log_cosh(x: Array) -> Array:
    return jnp.logaddexp(x, -x) - float(np.log(2.0))


def _check_whole(family: Any, *names: str) -> None:
    for name in names:
        value = getattr(family, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MethodError(message(f"{type(family).__name__}.{name} cannot be used.", repr(value), "a whole number ≥ 1", "pass e.g. 2"))
