"""What is random and how: decided once per target, before variational inference takes its first step."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._errors import MethodError, message
from aleator._quick import quick
from aleator._typing import Array, Key, Tree
from aleator.families import Family, MeanField, as_family
from aleator.likelihoods import Gaussian as GaussianLikelihood
from aleator.methods import _optimise
from aleator.methods._estimators import Layout, Plan, output_variance
from aleator.model import random_rows

LINEAR = 1e-3  # relative difference that counts as a curve when linearity is tested in float32


def make_plan(method: Any, target: Any) -> tuple[Plan, list[dict[str, Any]]]:
    """The plan for a `Variational` and a target, and how each parameter is treated; raises MethodError where they do not go together."""
    family = as_family(method.family)
    template = jax.eval_shape(target.init, jax.random.key(0))
    names = tuple(_tree.paths(template))
    network = isinstance(template, dict) and "network" in template and hasattr(target.model, "apply")
    found = _find(target, template) if network and target.rows() is not None else None
    chosen = _chosen(method.over, names, found)
    shapes = tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(template))
    layout = Layout(names, shapes, chosen, jax.tree.structure(template), family.flat is True)
    estimator, local = _estimator(method, family, layout, found)
    if network and target.rows() is not None and estimator != "score" and method.divergence != "forward_kl":
        _check_differentiable(target, template)
    outside = any(take and not name.startswith("network.") for name, take in zip(names, chosen, strict=True))
    parts = jax.eval_shape(lambda: layout.split(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), template)))
    q = jax.eval_shape(lambda p: family.init(jax.random.key(0), p, 1.0), parts[0])
    packing = _optimise.packing({"q": q, "rest": parts[1] if method.rest == "joint" else ()})
    elbo = method.divergence == "elbo"
    closed_prior = (
        elbo and estimator != "stl" and _closed_prior(target, family, layout, q, parts[1]) and (estimator != "score" or not outside)
    )
    closed_entropy = elbo and estimator != "stl" and jax.eval_shape(family.entropy, q) is not None
    if (local or estimator == "analytic") and not closed_entropy:  # families of these estimators have one
        raise AssertionError(f"{family} has no entropy")
    plan = Plan(method, target, family, layout, packing, estimator, closed_prior, closed_entropy, local, False)
    if estimator == "analytic":
        plan = _check_analytic(plan, outside)
    return plan, _treatments(layout, plan, found)


def _find(target: Any, template: Tree) -> sites.Found:
    weights = jax.eval_shape(target.model.weights, template)
    key = jax.random.key(0) if target.stochastic else None
    return sites.find(target.model.apply, weights, target.rows(), key)


def _chosen(over: Any, names: tuple[str, ...], found: sites.Found | None) -> tuple[bool, ...]:
    """One flag a leaf: is it in q?"""
    if over == "all":
        return (True,) * len(names)
    if over == "last_layer":
        if found is None or not found.sites:
            got = "no site" if found is not None else "a target without a network"
            raise MethodError(message("There is no last layer.", got, "a network with a site", "pass over= patterns of paths"))
        last = found.sites[-1]
        patterns: tuple[str, ...] = tuple(f"network.{path}" for path in (last.path, last.bias_path) if path is not None)
    else:
        patterns = (over,) if isinstance(over, str) else tuple(over)
    fits = lambda name, pattern: fnmatch.fnmatch(name, pattern) or name == pattern or name.startswith(pattern + ".")
    unused = [pattern for pattern in patterns if not any(fits(name, pattern) for name in names)]
    if unused or not patterns:
        raise MethodError(
            message(
                "over= names no parameters.", f"{unused or patterns}", f"patterns of {list(names)}, 'all' or 'last_layer'", "check them"
            )
        )
    return tuple(any(fits(name, pattern) for pattern in patterns) for name in names)


def _estimator(method: Any, family: Family, layout: Layout, found: sites.Found | None) -> tuple[str, frozenset[str]]:
    """The estimator that "auto" stands for, and the leaves whose noise is drawn at sites."""
    chosen = {name for name, take in zip(layout.names, layout.chosen, strict=True) if take}
    wanted, local = method.estimator, frozenset()
    if found is not None:
        here = [site for site in found.sites if f"network.{site.path}" in chosen]
        paths = {site.path for site in here} | {site.bias_path for site in here if site.bias_path is not None}
        local = frozenset(f"network.{path}" for path in paths) & frozenset(chosen)
    possible = isinstance(family, MeanField) and local and method.divergence == "elbo" and not method.antithetic
    if wanted == "auto":
        return ("local", local) if possible else ("weight", frozenset())
    if wanted not in ("local", "flipout"):
        return wanted, frozenset()
    if not isinstance(family, MeanField):
        got = f"family={method.family!r} with estimator={wanted!r}"
        raise MethodError(message("Noise at sites needs independent weights.", got, "family='mean_field'", "use estimator='weight'"))
    if not local:
        reasons = "no network, or one that takes no x" if found is None else f"no site among them: {found.rest or 'not in over='}"
        raise MethodError(
            message("There is no site to put noise on.", reasons, "a dense, convolution or embedding", "use estimator='weight'")
        )
    return wanted, local


def _closed_prior(target: Any, family: Family, layout: Layout, q: Tree, rest: Tree) -> bool:
    """Whether the target has E log p(θ) in closed form under the family's marginals."""
    if jax.eval_shape(family.marginals, q) is None:
        return False

    def ask(q: Tree, rest: Tree) -> Any:
        means, variances = family.marginals(q)
        mean = layout.join(means, rest)
        return target.expected_log_prior(mean, layout.spread(variances, rest), mean)

    return jax.eval_shape(ask, q, rest) is not None


def _check_differentiable(target: Any, template: Tree) -> None:
    """Refuse a network whose outputs have no slope anywhere in its weights, at two random starts."""

    def largest(key: Key) -> Array:
        key_init, key_x, key_direction, key_network = jax.random.split(key, 4)
        params, x = target.init(key_init), random_rows(key_x, target.rows())

        def projected(network: Tree) -> Array:
            outputs = target.outputs({**params, "network": network}, x, key_network if target.stochastic else None)
            leaves = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
            keys = jax.random.split(key_direction, max(len(leaves), 1))
            return sum((jnp.sum(leaf * jax.random.normal(k, leaf.shape)) for k, leaf in zip(keys, leaves, strict=False)), jnp.zeros(()))

        slopes = jax.tree.leaves(jax.grad(projected)(params["network"]))
        return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in slopes]))

    if not np.any(np.asarray(quick(jax.vmap(largest))(jax.random.split(jax.random.key(0), 2))) != 0.0):
        raise MethodError(
            message(
                "The network's outputs have no gradient in any weight.",
                "exact zeros at two random starts",
                "a differentiable network",
                "use estimator='score' with num_draws=8 or more, which needs only values",
            )
        )


def _check_analytic(plan: Plan, outside: bool) -> Plan:
    """Refuse what has no closed expected log-likelihood; decide how variances of outputs are had."""
    target, family, layout = plan.target, plan.family, plan.layout
    wrong = None
    if target.model is None or not isinstance(getattr(target.model, "likelihood", None), GaussianLikelihood):
        wrong = f"likelihood {getattr(target.model, 'likelihood', None)!r}"
    elif target.rows() is None:
        wrong = "a model without x"
    elif jax.eval_shape(family.operator, jax.eval_shape(lambda: _random_q(jax.random.key(0), plan)[0])) is None:
        wrong = f"family {plan.method.family!r}"
    elif outside and not isinstance(family, MeanField):
        wrong = f"family {plan.method.family!r} over parameters outside the network"
    elif not _linear(plan):
        wrong = "outputs that are not linear in the weights of q"
    if wrong is not None:
        raise MethodError(
            message(
                "The expected log-likelihood has no closed form here.",
                wrong,
                "al.Gaussian noise and outputs linear in q's weights: al.LinearModel, or over='last_layer'",
                "use estimator='auto'",
            )
        )
    fast = dataclasses.replace(plan, moments=True)
    return fast if isinstance(family, MeanField) and not layout.flat and _moments_agree(plan, fast) else plan


def _random_q(key: Key, plan: Plan) -> tuple[Tree, tuple[Array, ...], Tree]:
    """Random variational parameters, point parameters and the tree of their centre."""
    key_start, key_family, key_jitter = jax.random.split(key, 3)
    start = plan.target.init(key_start)
    leaves, structure = jax.tree.flatten(start)
    keys = jax.random.split(key_jitter, len(leaves))
    start = jax.tree.unflatten(
        structure, [leaf + jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    )
    parts, rest = plan.layout.split(start)
    q = plan.family.init(key_family, parts, 0.5)
    return q, rest, plan.layout.join(plan.family.centre(q), rest)


def _linear(plan: Plan) -> bool:
    """f(μ + d) + f(μ − d) = 2 f(μ) for a random d over q's network weights, at random rows."""

    def difference(key: Key) -> tuple[Array, Array]:
        key_q, key_d, key_x = jax.random.split(key, 3)
        q, rest, centre = _random_q(key_q, plan)
        moved = plan.layout.join(plan.family.draw(q, plan.family.noise(key_d, q)), rest)["network"]
        x = random_rows(key_x, plan.target.rows())
        at = lambda sign: plan.target.outputs(
            {**centre, "network": jax.tree.map(lambda m, w: m + sign * (w - m), centre["network"], moved)}, x
        )
        up, down, middle = at(1.0), at(-1.0), at(0.0)
        return jnp.max(jnp.abs(up + down - 2 * middle)), jnp.max(jnp.abs(up - down))

    curve, slope = (np.asarray(value) for value in jax.jit(jax.vmap(difference))(jax.random.split(jax.random.key(1), 2)))
    return bool(np.all(curve <= LINEAR * slope))


def _moments_agree(plan: Plan, fast: Plan) -> bool:
    """Whether the variance at the last site is that of the outputs."""
    names = {name for name, take in zip(plan.layout.names, plan.layout.chosen, strict=True) if take and name.startswith("network.")}
    found = _find(plan.target, jax.eval_shape(plan.target.init, jax.random.key(0)))
    last = found.sites[-1] if found.sites else None
    if last is None or not names <= {f"network.{last.path}", f"network.{last.bias_path}"}:
        return False

    def both(key: Key) -> tuple[Array, Array]:
        key_q, key_x = jax.random.split(key)
        q, rest, centre = _random_q(key_q, plan)
        x = random_rows(key_x, plan.target.rows())
        return output_variance(q, rest, centre, x, plan), output_variance(q, rest, centre, x, fast)

    slow, quick = jax.jit(both)(jax.random.key(2))
    return slow.shape == quick.shape and bool(np.allclose(slow, quick, rtol=1e-3))


def _treatments(layout: Layout, plan: Plan, found: sites.Found | None) -> list[dict[str, Any]]:
    """One line per leaf for the manifest."""
    positions: dict[str, int] = {}
    for site in found.sites if found is not None else ():
        for path in (site.path, site.bias_path):
            positions[f"network.{path}"] = max(site.positions, positions.get(f"network.{path}", 0))

    def say(name: str, take: bool) -> str:
        if not take:
            return "point, trained with q" if plan.method.rest == "joint" else "point, fixed"
        if name in plan.local:
            if plan.estimator == "flipout":
                return "flipout"
            number = positions[name]
            return "local, exact" if number == 1 else f"local, approximate: used at {number} positions"
        if plan.local:
            reason = found.rest.get(name.removeprefix("network."), "not a weight of the network") if found is not None else ""
            return f"weight space: {reason}"
        return "in closed form" if plan.estimator == "analytic" and name.startswith("network.") else "weight space"

    return [
        {"path": name, "shape": list(shape), "treatment": say(name, take)}
        for name, shape, take in zip(layout.names, layout.shapes, layout.chosen, strict=True)
    ]
