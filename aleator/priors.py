"""Priors over the parameter tree of a network.

A prior sees the network's parameters w (a tree), their fan-ins (a tree of ints: 1 for biases and gains) and its own
hyper-parameters h (a dict of unconstrained reals, {} when it has none). What is inferred is (raw, h); the weights are
w = weights(raw, h). Only a non-centred hierarchical prior makes a difference between raw and w.
"""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.hyperpriors import HalfNormal, Hyperprior


class Prior(abc.ABC):
    """What a model asks of a prior."""

    @abc.abstractmethod
    def init(self, weights: Tree, fan_in: Tree) -> dict:
        """Starting value of the hyper-parameters h."""

    @abc.abstractmethod
    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        """log p(raw, h), a scalar, over unconstrained h with the Jacobian."""

    def expected_log_prob(self, mean: Tree, variance: Tree, hyper: dict, fan_in: Tree) -> Array | None:
        """E[log p(raw, h)] over independent raw ~ (mean, variance), in closed form where log p is quadratic; None elsewhere."""
        return None

    @abc.abstractmethod
    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        """A draw (raw, h); `weights` gives structure, shapes and dtypes only."""

    @abc.abstractmethod
    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        """raw → w, as the network uses them."""

    @abc.abstractmethod
    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        """The inverse of `weights`."""


class _Fixed(Prior):
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
        values = [self.scale] * len(names) if isinstance(self.scale, float) else _match(self.scale, names)
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
class Normal(_Fixed):
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
class Laplace(_Fixed):
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
class StudentT(_Fixed):
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
class FromDistribution(_Fixed):
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


@dataclasses.dataclass(frozen=True)
class Hierarchical(Prior):
    """w ~ N(0, s_g²) with unknown scales s_g ~ `scale`, one per group; log s_g is inferred with the weights.

    per: "leaf" (each array), "layer" (arrays that share all but the last part of their path), or "global".
    scaling="fan_in" puts s_g/√fan-in on weights. centred=False (default) infers z with w = s·z, which keeps the joint density
    bounded at s → 0, where the centred form has a pole that MAP runs into.
    """

    scale: Hyperprior = HalfNormal(1.0)
    per: str = "layer"
    scaling: str = "none"
    centred: bool = False

    def __post_init__(self) -> None:
        if self.per not in ("leaf", "layer", "global"):
            raise ModelError(
                message("Unknown grouping of scales.", f"per={self.per!r}", "'leaf', 'layer' or 'global'", "choose one of them")
            )
        _check_scaling(self.scaling)

    def _groups(self, weights: Tree) -> list[str]:
        names = _tree.paths(weights)
        if self.per == "global":
            return ["global"] * len(names)
        return names if self.per == "leaf" else [name.rpartition(".")[0] or name for name in names]

    def _scales(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        fans = jax.tree.leaves(fan_in) if self.scaling == "fan_in" else [1] * len(jax.tree.leaves(weights))
        values = [jnp.exp(hyper["log_scale"][g]) / np.sqrt(fan).item() for g, fan in zip(self._groups(weights), fans, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(weights), values)

    def init(self, weights: Tree, fan_in: Tree) -> dict:
        dtype = jax.tree.leaves(weights)[0].dtype
        return {"log_scale": {group: jnp.asarray(self.scale.initial(), dtype) for group in dict.fromkeys(self._groups(weights))}}

    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        total = sum(self.scale.log_prob_unconstrained(u) for u in hyper["log_scale"].values())
        scales = self._scales(raw, hyper, fan_in) if self.centred else jax.tree.map(lambda _: jnp.ones(()), raw)
        log_normal = lambda w, s: jnp.sum(-0.5 * (w / s) ** 2 - 0.5 * np.log(2 * np.pi).item()) - w.size * jnp.log(s)
        return total + _tree.sum_leaves(jax.tree.map(log_normal, raw, scales))

    def expected_log_prob(self, mean: Tree, variance: Tree, hyper: dict, fan_in: Tree) -> Array:
        """log p(mean, h) − Σ variance/(2s²), with s = 1 for the non-centred form."""
        scales = self._scales(mean, hyper, fan_in) if self.centred else jax.tree.map(lambda _: 1.0, mean)
        spread = jax.tree.map(lambda v, s: jnp.sum(v) / (2.0 * s**2), variance, scales)
        return self.log_prob(mean, hyper, fan_in) - _tree.sum_leaves(spread)

    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        key_scale, key_raw = jax.random.split(key)
        groups = list(dict.fromkeys(self._groups(weights)))
        hyper = {
            "log_scale": {
                g: self.scale.sample_unconstrained(k, ()) for g, k in zip(groups, jax.random.split(key_scale, len(groups)), strict=True)
            }
        }
        leaves, structure = jax.tree.flatten(weights)
        standard = [
            jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(jax.random.split(key_raw, len(leaves)), leaves, strict=True)
        ]
        raw = jax.tree.unflatten(structure, standard)
        return (jax.tree.map(jnp.multiply, raw, self._scales(raw, hyper, fan_in)) if self.centred else raw), hyper

    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return raw if self.centred else jax.tree.map(jnp.multiply, raw, self._scales(raw, hyper, fan_in))

    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return weights if self.centred else jax.tree.map(jnp.divide, weights, self._scales(weights, hyper, fan_in))


def _freeze_scale(prior: Any) -> None:
    """Normalise `scale` to a float or a tuple of (pattern, float), and check it."""
    _check_scaling(prior.scaling)
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


def _check_scaling(scaling: str) -> None:
    if scaling not in ("none", "fan_in"):
        raise ModelError(message("Unknown scaling of a prior.", repr(scaling), "'none' or 'fan_in'", "choose one of them"))


def _match(pairs: tuple[tuple[str, float], ...], names: list[str]) -> list[float]:
    """For each path the scale of the first pattern that fits (a pattern is a glob, or a prefix of the path)."""
    fits = lambda name, pattern: fnmatch.fnmatch(name, pattern) or name == pattern or name.startswith(pattern + ".")
    unused = [pattern for pattern, _ in pairs if not any(fits(name, pattern) for name in names)]
    values = [next((value for pattern, value in pairs if fits(name, pattern)), None) for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if unused or missing:
        got = f"patterns {unused} that fit nothing" if unused else f"no scale for {missing}"
        raise ModelError(
            message(
                "The prior's scales do not fit the network.", got, f"patterns covering {names}", "add a pattern, or '*' last for the rest"
            )
        )
    return [float(value) for value in values if value is not None]
