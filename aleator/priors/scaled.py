"""Priors whose scales are parameters too."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.hyperpriors import HalfCauchy, HalfNormal, Hyperprior, positive_number
from aleator.priors._prior import Prior, check_scaling, match

GROUPINGS = ("leaf", "layer", "global", "input", "unit")
MANY = 10  # weights of a group below which it is never centred: they say too little about their scale
INFORMED = 0.5  # share of a group's prior variance that the data must have removed for it to be centred


class Group(NamedTuple):
    """The scales that one leaf has. name: of the group, shared by the leaves that share one scale. shape: of the scales. view: the same with
    axes of length one, to broadcast against the leaf."""

    name: str
    shape: tuple[int, ...] = ()
    view: tuple[int, ...] = ()


class _Scaled(Prior):
    """w = s·z with unknown scales s(h), z ~ N(0, 1): what hierarchical priors share. Leaves are centred (raw = w) or not (raw = z)."""

    @abc.abstractmethod
    def log_scales(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        """log s of each leaf, in a shape that broadcasts against it."""

    @abc.abstractmethod
    def log_hyper(self, hyper: dict) -> Array:
        """log p(h), with the Jacobian of σ = eᵘ."""

    @abc.abstractmethod
    def sample_hyper(self, key: Key, weights: Tree, fan_in: Tree) -> dict:
        """A draw of h."""

    @abc.abstractmethod
    def _centred(self, weights: Tree, fan_in: Tree) -> Tree:
        """A bool for each leaf."""

    def _raw_log_scales(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        """log s of raw itself: 0 where it is z."""
        logs = self.log_scales(raw, hyper, fan_in)
        return jax.tree.map(lambda u, flag: u if flag else jnp.zeros((), u.dtype), logs, self._centred(raw, fan_in))

    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        def log_normal(w: Array, u: Array) -> Array:
            return jnp.sum(-0.5 * (w * jnp.exp(-u)) ** 2 - 0.5 * np.log(2 * np.pi).item()) - (w.size // u.size) * jnp.sum(u)

        return self.log_hyper(hyper) + _tree.sum_leaves(jax.tree.map(log_normal, raw, self._raw_log_scales(raw, hyper, fan_in)))

    def expected_log_prob(self, mean: Tree, variance: Tree, hyper: dict, fan_in: Tree) -> Array:
        """log p(mean, h) − Σ variance/(2s²), with s = 1 where raw is z."""
        spread = jax.tree.map(lambda v, u: 0.5 * jnp.sum(v * jnp.exp(-2.0 * u)), variance, self._raw_log_scales(mean, hyper, fan_in))
        return self.log_prob(mean, hyper, fan_in) - _tree.sum_leaves(spread)

    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        key_hyper, key_raw = jax.random.split(key)
        hyper = self.sample_hyper(key_hyper, weights, fan_in)
        leaves, structure = jax.tree.flatten(weights)
        keys = jax.random.split(key_raw, len(leaves))
        z = jax.tree.unflatten(structure, [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])
        logs = self._raw_log_scales(z, hyper, fan_in)
        return jax.tree.map(lambda value, u: value * jnp.exp(u).astype(value.dtype), z, logs), hyper

    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return self._multiply(raw, hyper, fan_in, 1.0)

    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return self._multiply(weights, hyper, fan_in, -1.0)

    def _multiply(self, tree: Tree, hyper: dict, fan_in: Tree, power: float) -> Tree:
        times = lambda value, u, flag: value if flag else value * jnp.exp(power * u).astype(value.dtype)
        return jax.tree.map(times, tree, self.log_scales(tree, hyper, fan_in), self._centred(tree, fan_in))


@dataclasses.dataclass(frozen=True)
class Hierarchical(_Scaled):
    """w ~ N(0, s_g²) with unknown scales s_g ~ `scale`, one per group; log s_g is inferred with the weights.

    per: "leaf" (each array), "layer" (arrays that share all but the last part of their path), "global"; "input": one scale for each input
    unit of each weight matrix, over its outgoing weights (automatic relevance determination on the first matrix); "unit": one for each
    output unit, over its incoming weights. Leaves with fewer than two axes (biases, gains) have one scale each under the last two. A
    mapping from path patterns mixes them: {"layer0.weight": "input", "*": "layer"} is relevance determination of the inputs alone.

    order: which axis of a weight is its input. "in_out" (last axis output: built-in networks, Flax, plain JAX) or "out_in" (first axis
    output: Equinox, PyTorch, `LinearModel`); "auto" reads it off the fan-ins, which needs one matrix that is not square.
    scaling="fan_in" puts s_g/√fan-in on weights.

    centred=False (default) infers z with w = s·z, which keeps the joint density bounded at s → 0, where the centred form has a pole that
    MAP runs into; it suits weights that the data say little about, as nearly all weights of a network are. centred=True infers w. A tuple
    of group names centres those groups only. "auto" starts as False and lets `centre(key, fit)` choose for each group from a first fit.
    """

    scale: Hyperprior = HalfNormal(1.0)
    per: Any = "layer"
    scaling: str = "none"
    centred: Any = False
    order: str = "auto"

    def __post_init__(self) -> None:
        _freeze_grouping(self, "per", GROUPINGS)
        check_scaling(self.scaling)
        _check_order(self.order)
        if isinstance(self.centred, (list, tuple)):
            object.__setattr__(self, "centred", tuple(str(name) for name in self.centred))
        elif self.centred not in (True, False, "auto"):
            expected = "True, False, 'auto' or names of groups"
            raise ModelError(message("Unknown form of a hierarchical prior.", f"centred={self.centred!r}", expected, "leave centred=False"))
        _check_hyperprior("Hierarchical", "scale", self.scale)

    def groups(self, weights: Tree, fan_in: Tree) -> list[Group]:
        """The group of each leaf."""
        return _groups(weights, fan_in, self.per, self.order)

    def log_scales(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        groups = self.groups(weights, fan_in)
        return _unflatten(
            weights,
            [
                hyper["log_scale"][g.name].reshape(g.view) - half
                for g, half in zip(groups, _half_log_fan(fan_in, self.scaling), strict=True)
            ],
        )

    def log_hyper(self, hyper: dict) -> Array:
        return sum(jnp.sum(self.scale.log_prob_unconstrained(u)) for u in hyper["log_scale"].values())  # type: ignore[return-value]

    def init(self, weights: Tree, fan_in: Tree) -> dict:
        dtype = jax.tree.leaves(weights)[0].dtype
        groups = self.groups(weights, fan_in)
        if isinstance(self.centred, tuple) and (unknown := set(self.centred) - {g.name for g in groups}):
            known = sorted({g.name for g in groups})
            raise ModelError(message("There is no such group to centre.", sorted(unknown), f"some of {known}", "name groups as listed"))
        return {"log_scale": {g.name: jnp.full(g.shape, self.scale.initial(), dtype) for g in groups}}

    def sample_hyper(self, key: Key, weights: Tree, fan_in: Tree) -> dict:
        dtype = jax.tree.leaves(weights)[0].dtype
        shapes = {g.name: g.shape for g in self.groups(weights, fan_in)}
        keys = jax.random.split(key, len(shapes))
        return {
            "log_scale": {
                name: self.scale.sample_unconstrained(k, shape).astype(dtype) for (name, shape), k in zip(shapes.items(), keys, strict=True)
            }
        }

    def _centred(self, weights: Tree, fan_in: Tree) -> Tree:
        if isinstance(self.centred, tuple):
            return _unflatten(weights, [g.name in self.centred for g in self.groups(weights, fan_in)])
        return jax.tree.map(lambda _: self.centred is True, weights)


@dataclasses.dataclass(frozen=True)
class Horseshoe(_Scaled):
    """w = τ·λ·z, z ~ N(0, 1), λ ~ HalfCauchy(1), τ ~ `scale`: most weights near zero, the others left alone. Always non-centred.

    local: what has its own λ: "weight" (every entry), "input" (the weights that leave one input unit of a matrix) or "unit" (those that
    enter one output unit). per: what shares one τ, "global", "layer" or "leaf". Leaves with fewer than two axes are N(0, bias²).
    slab: None for the plain horseshoe; a number c, or a prior on c such as InverseGamma(2, 8), for the regularised one, in which
    λ² is replaced by c²λ²/(c² + τ²λ²), so that no weight escapes far beyond c (Piironen and Vehtari 2017: with p₀ of D weights expected to
    matter, a good scale of τ is p₀/(D − p₀)·σ/√N). order, scaling: as in `Hierarchical`.
    """

    scale: Hyperprior = HalfCauchy(1.0)
    local: Any = "weight"
    per: Any = "global"
    slab: Any = None
    bias: float = 1.0
    scaling: str = "none"
    order: str = "auto"

    def __post_init__(self) -> None:
        _freeze_grouping(self, "local", ("weight", "input", "unit"))
        _freeze_grouping(self, "per", ("leaf", "layer", "global"))
        check_scaling(self.scaling)
        _check_order(self.order)
        _check_hyperprior("Horseshoe", "scale", self.scale)
        positive_number("Horseshoe", "bias", self.bias)
        if self.slab is not None and not isinstance(self.slab, Hyperprior):
            positive_number("Horseshoe", "slab", self.slab)

    def _parts(self, weights: Tree, fan_in: Tree) -> list[tuple[str, Group, Group] | None]:
        """(path, group of τ, group of λ) of each leaf that is shrunk, None for the others."""
        paths, leaves = _tree.paths(weights), jax.tree.leaves(weights)
        tau, local = _groups(weights, fan_in, self.per, self.order), _groups(weights, fan_in, self.local, self.order)
        return [(p, t, g) if len(leaf.shape) > 1 else None for p, leaf, t, g in zip(paths, leaves, tau, local, strict=True)]

    def log_scales(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        slab = hyper["log_slab"] if isinstance(self.slab, Hyperprior) else None if self.slab is None else np.log(self.slab).item()

        def one(part: tuple[str, Group, Group] | None, half: float) -> Array:
            if part is None:
                return jnp.asarray(np.log(self.bias).item(), jax.tree.leaves(hyper)[0].dtype)
            path, tau, local = part
            v = hyper["log_tau"][tau.name] + hyper["log_lambda"][path].reshape(local.view) - half
            # τλ̃ = τλ/√(1 + (τλ/c)²), on the log scale.
            return v if slab is None else v - 0.5 * jax.nn.softplus(2.0 * (v - slab))

        halves = _half_log_fan(fan_in, self.scaling)
        return _unflatten(weights, [one(part, half) for part, half in zip(self._parts(weights, fan_in), halves, strict=True)])

    def log_hyper(self, hyper: dict) -> Array:
        total: Any = sum(jnp.sum(self.scale.log_prob_unconstrained(u)) for u in hyper["log_tau"].values())
        total = total + sum(jnp.sum(HalfCauchy(1.0).log_prob_unconstrained(u)) for u in hyper["log_lambda"].values())
        return total + self.slab.log_prob_unconstrained(hyper["log_slab"]) if isinstance(self.slab, Hyperprior) else total

    def init(self, weights: Tree, fan_in: Tree) -> dict:
        return self._hyper(weights, fan_in, lambda prior, shape: jnp.full(shape, prior.initial()))

    def sample_hyper(self, key: Key, weights: Tree, fan_in: Tree) -> dict:
        keys = iter(jax.random.split(key, 1 + 2 * len(jax.tree.leaves(weights))))
        return self._hyper(weights, fan_in, lambda prior, shape: prior.sample_unconstrained(next(keys), shape))

    def _hyper(self, weights: Tree, fan_in: Tree, value: Callable[[Hyperprior, tuple[int, ...]], Array]) -> dict:
        dtype = jax.tree.leaves(weights)[0].dtype
        parts = [part for part in self._parts(weights, fan_in) if part is not None]
        if not parts:
            raise ModelError(
                message(
                    "There is nothing to shrink.", "no leaf with two axes", "a weight matrix", "use al.Normal or al.priors.Hierarchical"
                )
            )
        hyper: dict[str, Any] = {
            "log_tau": {name: value(self.scale, ()).astype(dtype) for name in dict.fromkeys(tau.name for _, tau, _ in parts)},
            "log_lambda": {path: value(HalfCauchy(1.0), local.shape).astype(dtype) for path, _, local in parts},
        }
        return hyper | ({"log_slab": value(self.slab, ()).astype(dtype)} if isinstance(self.slab, Hyperprior) else {})

    def _centred(self, weights: Tree, fan_in: Tree) -> Tree:
        return jax.tree.map(lambda _: False, weights)


def centre(key: Key, fit: Any, num_samples: int = 200) -> Hierarchical:
    """The prior of a fit's model with the form of each group chosen: centred where it has at least 10 weights whose variance the data have
    brought below half of s², 1 − Σ Var(w | D)/Σ E[s² | D] > ½ over the group; non-centred elsewhere.

    For a prior with centred="auto". The fit should be one with a spread (al.Variational, a sampler). Modes that differ by a permutation of
    units look like variance, so that they count against centring: the error is on the safe side.
    """
    model = fit.model
    prior = model.prior
    if not isinstance(prior, Hierarchical) or prior.centred != "auto":
        raise ModelError(
            message("There is no form to choose.", repr(prior), "al.priors.Hierarchical(centred='auto')", "ask for it in the prior")
        )
    draws = jax.tree.map(jnp.asarray, fit.sample(key, num_samples))
    fans = model.fan_in(_tree.take(draws["network"], 0))
    weights = jax.vmap(lambda raw, hyper: prior.weights(raw, hyper, fans))(draws["network"], draws["prior"])
    squares = jax.vmap(lambda raw, hyper: jax.tree.map(lambda u: jnp.exp(2.0 * u), prior.log_scales(raw, hyper, fans)))(
        draws["network"], draws["prior"]
    )
    left: dict[str, list[float]] = {}
    groups = prior.groups(_tree.take(draws["network"], 0), fans)
    for group, w, square in zip(groups, jax.tree.leaves(weights), jax.tree.leaves(squares), strict=True):
        size = w[0].size
        sums = (float(jnp.sum(jnp.var(w, axis=0))), float(jnp.sum(jnp.mean(square, axis=0))) * (size // square[0].size), size)
        left[group.name] = [a + b for a, b in zip(left.get(group.name, [0.0, 0.0, 0]), sums, strict=True)]
    chosen = tuple(name for name, (spread, square, size) in left.items() if size >= MANY and 1.0 - spread / square > INFORMED)
    return dataclasses.replace(prior, centred=chosen)


def _groups(weights: Tree, fan_in: Tree, per: Any, order: str) -> list[Group]:
    """The group of each leaf under `per`, a name or (pattern, name) pairs."""
    names, leaves = _tree.paths(weights), jax.tree.leaves(weights)
    kinds = [per] * len(names) if isinstance(per, str) else match(per, names)
    first = _output_first(leaves, jax.tree.leaves(fan_in), order) if {"input", "unit"} & set(kinds) else False

    def one(name: str, kind: str, shape: tuple[int, ...]) -> Group:
        if kind == "global":
            return Group("global")
        if kind == "layer":
            return Group(name.rpartition(".")[0] or name)
        if kind == "weight":
            return Group(name, shape, shape)
        if kind == "leaf" or len(shape) < 2:
            return Group(name)
        # (…, in, out), or (out, in, …) as Equinox and PyTorch have it: positions of a kernel share the scale of their channel.
        axis = {"input": 1 if first else len(shape) - 2, "unit": 0 if first else len(shape) - 1}[kind]
        return Group(name, (shape[axis],), tuple(size if i == axis else 1 for i, size in enumerate(shape)))

    return [one(name, kind, tuple(leaf.shape)) for name, kind, leaf in zip(names, kinds, leaves, strict=True)]


def _output_first(leaves: list[Any], fans: list[int], order: str) -> bool:
    """Whether weights are (out, in, …) rather than (…, in, out): as told, or from the fan-in of any matrix that is not square."""
    if order != "auto":
        return order == "out_in"
    found = set()
    for leaf, fan in zip(leaves, fans, strict=True):
        last, first = int(np.prod(leaf.shape[:-1])), int(np.prod(leaf.shape[1:]))
        if len(leaf.shape) > 1 and last != first:
            found.add(fan == first)
    if len(found) != 1:
        got = "weights in both orders" if found else f"only square or one-dimensional arrays, {[tuple(leaf.shape) for leaf in leaves]}"
        raise ModelError(
            message(
                "The input axes of the weights cannot be told.",
                got,
                "order='in_out' (Flax, plain JAX, built-in networks) or order='out_in' (Equinox, PyTorch)",
                "pass one of them to the prior",
            )
        )
    return found.pop()


def _unflatten(like: Tree, leaves: list[Any]) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _half_log_fan(fan_in: Tree, scaling: str) -> list[float]:
    """log √fan-in of each leaf, or zeros."""
    return [0.5 * np.log(fan).item() if scaling == "fan_in" else 0.0 for fan in jax.tree.leaves(fan_in)]


def _freeze_grouping(prior: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Normalise a grouping to one of the allowed names or a tuple of (pattern, name)."""
    value = getattr(prior, name)
    pairs = tuple((str(p), v) for p, v in value.items()) if isinstance(value, Mapping) else value
    pairs = tuple(map(tuple, pairs)) if isinstance(pairs, (list, tuple)) else pairs
    kinds = [kind for _, kind in pairs] if isinstance(pairs, tuple) else [pairs]
    if not kinds or any(kind not in allowed for kind in kinds):
        expected = f"one of {allowed}, or a mapping from path patterns to them"
        raise ModelError(message("Unknown grouping of scales.", f"{name}={value!r}", expected, "choose one of them"))
    object.__setattr__(prior, name, pairs)


def _check_order(order: str) -> None:
    if order not in ("auto", "in_out", "out_in"):
        raise ModelError(message("Unknown order of axes.", f"order={order!r}", "'auto', 'in_out' or 'out_in'", "leave order='auto'"))


def _check_hyperprior(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, Hyperprior):
        raise ModelError(
            message(f"{owner}({name}=…) cannot be used.", repr(value), "a prior on a scale, such as al.HalfNormal(1.0)", "pass one of them")
        )
