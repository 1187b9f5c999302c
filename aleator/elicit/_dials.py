"""What can be turned on a prior: the numbers behind its scales, and densities under all scales times a factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.hyperpriors import Gamma, HalfCauchy, HalfNormal, Hyperprior, InverseGamma, LogNormal, positive_number
from aleator.priors import Fixed, FromDistribution, Hierarchical, Horseshoe
from aleator.priors._prior import match

PER = ("given", "global", "layer", "leaf")


@dataclasses.dataclass(frozen=True, eq=False)
class Dials:
    """The numbers v (P,) of a prior that may be tuned; v = 0 is the prior as it is.

    weights(v, key) is a draw of the network's weights, differentiable in v, the same as the rebuilt prior makes from this key; rebuild(v) the
    prior; read(v) each number in its own unit.
    """

    names: tuple[str, ...]
    weights: Callable[[Any, Key], Tree]
    rebuild: Callable[[np.ndarray], Any]
    read: Callable[[np.ndarray], np.ndarray]


def dials(prior: Any, template: Tree, fan_in: Tree, per: str) -> Dials:
    """per: which scales of a fixed prior share a factor; the numbers of a hierarchical one are those of its priors on scales."""
    if per not in PER:
        raise ModelError(message("Unknown grouping of scales.", f"per={per!r}", f"one of {PER}", "leave per='leaf'"))
    if isinstance(prior, Hierarchical):
        return _of_hierarchical(prior, template, fan_in)
    if isinstance(prior, Horseshoe):
        return _of_horseshoe(prior, template, fan_in)
    if isinstance(prior, Fixed) and not isinstance(prior, FromDistribution):
        return _of_fixed(prior, template, fan_in, per)
    raise _no_scales(prior)


def scaled(prior: Any, factor: float) -> Any:
    """The prior with its scale times `factor`: all scales of a fixed one; those of the prior on scales for a hierarchical one; that of τ
    for a horseshoe.

    >>> from aleator.priors import Normal
    >>> scaled(Normal({"*.weight": 1.0, "*.bias": 0.5}), 2.0).scale
    (('*.weight', 2.0), ('*.bias', 1.0))
    """
    positive_number("scaled", "factor", factor)
    if isinstance(prior, (Hierarchical, Horseshoe)):
        rebuild = _family(prior.scale)[3]
        return dataclasses.replace(prior, scale=rebuild(np.array([np.log(factor), 0.0])))
    if isinstance(prior, Fixed) and not isinstance(prior, FromDistribution):
        scale = prior.scale * factor if isinstance(prior.scale, float) else tuple((name, value * factor) for name, value in prior.scale)
        return dataclasses.replace(prior, scale=scale)  # type: ignore[type-var]
    raise _no_scales(prior)


def log_density(prior: Any, raw: Tree, hyper: dict, fan_in: Tree, log_factor: Any) -> Array:
    """log p(raw, h) under `scaled(prior, e^log_factor)`, up to nothing, differentiable in log_factor.

    Fixed scales: p_c(w) = c^(−size)·p(m + (w − m)/c). Learned ones: only log p(h) changes, by a shift of u = log σ.
    """
    if isinstance(prior, Fixed):
        shrunk = jax.tree.map(lambda leaf: prior.loc + (leaf - prior.loc) * jnp.exp(-log_factor), raw)
        return prior.log_prob(shrunk, hyper, fan_in) - _tree.size(raw) * log_factor
    name = "log_scale" if isinstance(prior, Hierarchical) else "log_tau"
    shifted = {**hyper, name: jax.tree.map(lambda u: u - log_factor, hyper[name])}
    return prior.log_prob(raw, hyper, fan_in) - prior.log_hyper(hyper) + prior.log_hyper(shifted)


def _no_scales(prior: Any) -> ModelError:
    return ModelError(
        message(
            "This prior has no scales to change.",
            repr(prior),
            "al.Normal, al.priors.Laplace, StudentT, ScaleMixture, Hierarchical or Horseshoe",
            "state the prior by one of them",
        )
    )


def _of_fixed(prior: Any, template: Tree, fan_in: Tree, per: str) -> Dials:
    paths, structure = _tree.paths(template), jax.tree.structure(template)
    single = isinstance(prior.scale, float)
    own = [prior.scale] * len(paths) if single else match(prior.scale, paths)
    if per == "given":
        groups = ["scale"] * len(paths) if single else match(tuple((name, name) for name, _ in prior.scale), paths)
    else:
        groups = [{"global": "scale", "layer": path.rpartition(".")[0] or path, "leaf": path}[per] for path in paths]
    names = tuple(dict.fromkeys(groups))
    number = [names.index(group) for group in groups]

    def weights(v: Any, key: Key) -> Tree:
        drawn = prior.sample(key, template, fan_in)[0]
        factors = jax.tree.unflatten(structure, [jnp.exp(v[i]) for i in number])
        return jax.tree.map(lambda w, c: prior.loc + c.astype(w.dtype) * (w - prior.loc), drawn, factors)

    def rebuild(v: np.ndarray) -> Any:
        factors = np.exp(v)
        if per in ("given", "global"):
            chosen = {name: factors[i].item() for i, name in enumerate(names)}
            of = lambda name: chosen["scale"] if per == "global" else chosen.get(name, 1.0)
            scale: Any = prior.scale * chosen["scale"] if single else tuple((name, value * of(name)) for name, value in prior.scale)
        else:
            scale = tuple((path, value * factors[i].item()) for path, value, i in zip(paths, own, number, strict=True))
        return dataclasses.replace(prior, scale=scale)

    def read(v: np.ndarray) -> np.ndarray:
        """Scales; where a group has several, their geometric mean."""
        centres = [np.exp(np.mean([np.log(s) for s, i in zip(own, number, strict=True) if i == j])) for j in range(len(names))]
        return np.array(centres) * np.exp(v)

    return Dials(names, weights, rebuild, read)


def _of_hierarchical(prior: Hierarchical, template: Tree, fan_in: Tree) -> Dials:
    fields, values, draw, rebuild = _family(prior.scale)
    shapes = {g.name: g.shape for g in prior.groups(template, fan_in)}

    def weights(v: Any, key: Key) -> Tree:
        key_hyper, key_weights = jax.random.split(key)
        keys = jax.random.split(key_hyper, len(shapes))
        hyper = {"log_scale": {name: draw(v, k, shape) for (name, shape), k in zip(shapes.items(), keys, strict=True)}}
        return _normals(key_weights, template, prior.log_scales(template, hyper, fan_in))

    names = tuple(f"scale.{field}" for field in fields)
    return Dials(names, weights, lambda v: dataclasses.replace(prior, scale=rebuild(v)), lambda v: values(rebuild(v)))


def _of_horseshoe(prior: Horseshoe, template: Tree, fan_in: Tree) -> Dials:
    """v: the numbers of τ's prior, then log factors of the biases' scale and of the slab (or the numbers of its prior)."""
    fields, values, draw, rebuild = _family(prior.scale)
    flat = any(len(leaf.shape) < 2 for leaf in jax.tree.leaves(template))
    learned = isinstance(prior.slab, Hyperprior)
    slab: Any = _family(prior.slab) if learned else (() if prior.slab is None else ("",), None, None, None)
    slab_fields, slab_values, slab_draw, slab_rebuild = slab
    first, second = len(fields), len(fields) + flat
    # With a prior on it the slab is read from h, where it may be traced.
    opened = dataclasses.replace(prior, slab=LogNormal()) if slab_fields else prior

    def weights(v: Any, key: Key) -> Tree:
        key_hyper, key_weights = jax.random.split(key)
        keys = iter(jax.random.split(key_hyper, 1 + 2 * len(jax.tree.leaves(template))))

        def value(of: Hyperprior, shape: tuple[int, ...]) -> Array:
            if of is opened.scale:
                return draw(v, next(keys), shape)
            if of is opened.slab:
                return slab_draw(v[second:], next(keys), shape) if learned else np.log(prior.slab).item() + v[second]
            return of.sample_unconstrained(next(keys), shape)

        hyper = opened._hyper(template, fan_in, value)
        drawn = _normals(key_weights, template, opened.log_scales(template, hyper, fan_in))
        return jax.tree.map(lambda w: w * jnp.exp(v[first]).astype(w.dtype) if w.ndim < 2 else w, drawn) if flat else drawn

    def turned(v: np.ndarray) -> Horseshoe:
        changed: dict[str, Any] = {"scale": rebuild(v)}
        changed |= {"bias": prior.bias * np.exp(v[first]).item()} if flat else {}
        if slab_fields:
            changed["slab"] = slab_rebuild(v[second:]) if learned else prior.slab * np.exp(v[second]).item()
        return dataclasses.replace(prior, **changed)

    def read(v: np.ndarray) -> np.ndarray:
        new = turned(v)
        last = [] if not slab_fields else slab_values(new.slab) if learned else [new.slab]
        return np.array([*values(new.scale), *([new.bias] if flat else []), *last])

    slabs = tuple(f"slab.{field}" if field else "slab" for field in slab_fields)
    names = (*(f"scale.{field}" for field in fields), *(("bias",) if flat else ()), *slabs)
    return Dials(names, weights, turned, read)


def _family(prior: Any) -> tuple[tuple[str, ...], Callable, Callable, Callable]:
    """Of a prior on a scale: names of its numbers, their values, draws of u = log σ as a differentiable function of v, and the prior for v.

    v[0] shifts u, which every family here has a number for; v[1] is the log factor of a second number where there is one.
    """
    if isinstance(prior, LogNormal):
        return (
            ("loc", "scale"),
            lambda p: np.array([p.loc, p.scale]),
            lambda v, key, shape: prior.loc + v[0] + prior.scale * jnp.exp(v[1]) * jax.random.normal(key, shape),
            lambda v: LogNormal(float(prior.loc + v[0]), float(prior.scale * np.exp(v[1]))),
        )
    if isinstance(prior, (HalfNormal, HalfCauchy)):
        return (
            ("scale",),
            lambda p: np.array([p.scale]),
            lambda v, key, shape: v[0] + prior.sample_unconstrained(key, shape),
            lambda v: dataclasses.replace(prior, scale=float(prior.scale * np.exp(v[0]))),
        )
    if isinstance(prior, (Gamma, InverseGamma)):
        # σ = g/b, and σ² = b/g: g a standard gamma variable, whose gradient in the concentration is implicit.
        power = 1.0 if isinstance(prior, Gamma) else -0.5
        a, b = prior.concentration, prior.rate
        return (
            ("concentration", "rate"),
            lambda p: np.array([p.concentration, p.rate]),
            lambda v, key, shape: v[0] + power * (jax.random.loggamma(key, a * jnp.exp(v[1]), shape) - np.log(b).item()),
            lambda v: dataclasses.replace(prior, concentration=float(a * np.exp(v[1])), rate=float(b * np.exp(-v[0] / power))),
        )
    raise _no_scales(prior)


def _normals(key: Key, template: Tree, log_scales: Tree) -> Tree:
    """w = e^u·z, z ~ N(0, 1)."""
    leaves, structure = jax.tree.flatten(template)
    keys = jax.random.split(key, len(leaves))
    z = jax.tree.unflatten(structure, [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])
    return jax.tree.map(lambda value, u: value * jnp.exp(u).astype(value.dtype), z, log_scales)
