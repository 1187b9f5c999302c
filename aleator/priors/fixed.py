"""Independent priors with fixed scales."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.priors._prior import Prior, check_scaling, match


class Fixed(Prior):
    """Independent location–scale priors with fixed scales: p(w) = Π f((w − loc)/s)/s."""

    loc: float
    scale: Any
    scaling: str

    @abc.abstractmethod
    def _log_density(self, z: Array) -> Array:
        """log f(z), elementwise."""

    @abc.abstractmethod
    def _draw(self, key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        """Draws from f."""

    def init(self, weights: Tree, fan_in: Tree) -> dict:
        self.scales(weights, fan_in)
        return {}

    def scales(self, weights: Tree, fan_in: Tree) -> Tree:
        """The prior scale s of each leaf, as a tree of floats."""
        names = _tree.paths(weights)
        values = [self.scale] * len(names) if isinstance(self.scale, float) else match(self.scale, names)
        if self.scaling == "fan_in":
            values = [value / np.sqrt(fan) for value, fan in zip(values, jax.tree.leaves(fan_in), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(weights), [float(value) for value in values])

    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        terms = [
            jnp.sum(self._log_density((leaf - self.loc) / scale)) - leaf.size * np.log(scale)
            for leaf, scale in zip(jax.tree.leaves(raw), jax.tree.leaves(self.scales(raw, fan_in)), strict=True)
        ]
        return sum(terms[1:], start=terms[0])

    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        leaves, structure = jax.tree.flatten(weights)
        scales = jax.tree.leaves(self.scales(weights, fan_in))
        keys = jax.random.split(key, len(leaves))
        drawn = [self.loc + s * self._draw(k, leaf.shape, leaf.dtype) for k, leaf, s in zip(keys, leaves, scales, strict=True)]
        return jax.tree.unflatten(structure, drawn), {}

    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return raw

    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return weights


@dataclasses.dataclass(frozen=True)
class Normal(Fixed):
    """w ~ N(loc, s²). `scale` is one number, or a mapping from path patterns to numbers (per layer).

    scaling="fan_in" divides the scale of each weight by √fan-in (biases keep it), so that functions keep their size as width grows.

    >>> Normal({"*.weight": 1.0, "*.bias": 0.5}).scale
    (('*.weight', 1.0), ('*.bias', 0.5))
    """

    scale: Any = 1.0
    loc: float = 0.0
    scaling: str = "none"

    def __post_init__(self) -> None:
        _freeze_scale(self)

    def _log_density(self, z: Array) -> Array:
        return -0.5 * z**2 - 0.5 * np.log(2 * np.pi).item()

    def expected_log_prob(self, mean: Tree, variance: Tree, hyper: dict, fan_in: Tree) -> Array:
        """log p(mean) − Σ variance/(2s²)."""
        spread = jax.tree.map(lambda v, s: jnp.sum(v) / (2.0 * s**2), variance, self.scales(mean, fan_in))
        return self.log_prob(mean, hyper, fan_in) - _tree.sum_leaves(spread)

    def _draw(self, key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.normal(key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Laplace(Fixed):
    """w ~ Laplace(loc, s): density exp(−|w − loc|/s)/(2s)."""

    scale: Any = 1.0
    loc: float = 0.0
    scaling: str = "none"

    def __post_init__(self) -> None:
        _freeze_scale(self)

    def _log_density(self, z: Array) -> Array:
        return -jnp.abs(z) - np.log(2.0).item()

    def _draw(self, key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.laplace(key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class StudentT(Fixed):
    """w ~ t_df(loc, s): heavy tails, variance s²·df/(df − 2) for df > 2."""

    df: float = 4.0
    scale: Any = 1.0
    loc: float = 0.0
    scaling: str = "none"

    def __post_init__(self) -> None:
        if not self.df > 0:
            raise ModelError(message("StudentT needs degrees of freedom.", f"df={self.df}", "df > 0", "pass e.g. df=4.0"))
        _freeze_scale(self)

    def _log_density(self, z: Array) -> Array:
        from jax.scipy.stats import t

        return t.logpdf(z, self.df)

    def _draw(self, key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.t(key, self.df, shape, dtype)


@dataclasses.dataclass(frozen=True)
class ScaleMixture(Fixed):
    """w ~ share·N(loc, s²) + (1 − share)·N(loc, (narrow·s)²): a spike for weights that are not needed, a slab for those that are
    (Blundell et al. 2015). Idle weights fall into the spike, where they disturb nobody; under one Gaussian they keep its whole width.

    Variational methods give each weight a probability of being in the slab as part of q, which has its optimum in closed form: the bound
    then is of the weights and their components jointly, and still a bound.
    """

    scale: Any = 1.0
    narrow: float = 0.01
    share: float = 0.5
    loc: float = 0.0
    scaling: str = "none"

    def __post_init__(self) -> None:
        for name in ("narrow", "share"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value < 1.0):
                raise ModelError(
                    message(f"ScaleMixture({name}=…) cannot be used.", repr(value), "a number between 0 and 1", f"pass e.g. {name}=0.1")
                )
        _freeze_scale(self)

    def _log_density(self, z: Array) -> Array:
        return self._join(-0.5 * z**2, -0.5 * (z / self.narrow) ** 2)

    def _join(self, wide: Array, spike: Array) -> Array:
        """log(share·e^wide + (1 − share)/narrow·e^spike)/√2π from the two exponents."""
        shares = np.log(self.share).item(), (np.log1p(-self.share) - np.log(self.narrow)).item()
        return jnp.logaddexp(wide + shares[0], spike + shares[1]) - 0.5 * np.log(2 * np.pi).item()

    def expected_log_prob(self, mean: Tree, variance: Tree, hyper: dict, fan_in: Tree) -> Array:
        """Σ log Σ_k π_k exp E[log N_k(w)] ≤ E[log p(w)]: the expectation over weights and components under their best joint q."""

        def leaf(m: Array, v: Array, s: float) -> Array:
            square = ((m - self.loc) ** 2 + v) / s**2
            return jnp.sum(self._join(-0.5 * square, -0.5 * square / self.narrow**2)) - m.size * np.log(s).item()

        return _tree.sum_leaves(jax.tree.map(leaf, mean, variance, self.scales(mean, fan_in)))

    def _draw(self, key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        key_component, key_draw = jax.random.split(key)
        wide = jax.random.bernoulli(key_component, self.share, shape)
        return jnp.where(wide, 1.0, self.narrow).astype(dtype) * jax.random.normal(key_draw, shape, dtype)


@dataclasses.dataclass(frozen=True)
class FromDistribution(Fixed):
    """Every weight independently from a real-valued NumPyro distribution, named so that it can be saved."""

    name: str
    parameters: tuple[tuple[str, float], ...]
    loc: float = dataclasses.field(default=0.0, init=False)
    scale: float = dataclasses.field(default=1.0, init=False)
    scaling: str = dataclasses.field(default="none", init=False)

    def _distribution(self) -> Any:
        import numpyro.distributions as dist

        return getattr(dist, self.name)(**dict(self.parameters))

    def _log_density(self, z: Array) -> Array:
        return self._distribution().log_prob(z)

    def _draw(self, key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.asarray(self._distribution().sample(key, shape), dtype)


def from_distribution(distribution: Any) -> FromDistribution:
    """A prior from a scalar NumPyro distribution on the whole real line.

    >>> import numpyro.distributions as dist
    >>> from_distribution(dist.Cauchy(0.0, 2.0)).parameters
    (('loc', 0.0), ('scale', 2.0))
    """
    import numpyro.distributions as dist

    name = type(distribution).__name__
    known = getattr(dist, name, None) is type(distribution)
    if not known or distribution.batch_shape != () or distribution.event_shape != () or distribution.support is not dist.constraints.real:
        raise ModelError(
            message(
                "This distribution cannot be a prior on weights.",
                f"{name} with batch shape {getattr(distribution, 'batch_shape', '?')} and support {getattr(distribution, 'support', '?')}",
                "a scalar distribution of numpyro.distributions on the real line",
                "pass e.g. numpyro.distributions.Cauchy(0.0, 1.0)",
            )
        )
    return FromDistribution(name, tuple((p, float(getattr(distribution, p))) for p in distribution.arg_constraints))


def _freeze_scale(prior: Any) -> None:
    """Normalise `scale` to a float or a tuple of (pattern, float), and check it."""
    check_scaling(prior.scaling)
    scale = prior.scale
    if isinstance(scale, Mapping):
        scale = tuple((str(pattern), value) for pattern, value in scale.items())
    pairs = scale if isinstance(scale, (tuple, list)) else (("*", scale),)
    for pattern, value in pairs:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)) or not np.isfinite(value) or value <= 0:
            raise ModelError(
                message("A prior scale must be positive.", f"{value!r} for {pattern!r}", "a finite number > 0", "pass e.g. al.Normal(1.0)")
            )
    frozen = tuple((pattern, float(value)) for pattern, value in pairs) if isinstance(scale, (tuple, list)) else float(scale)
    object.__setattr__(prior, "scale", frozen)
    object.__setattr__(prior, "loc", float(prior.loc))
