"""Dropout: dropout training as variational inference, T stochastic passes as its predictions."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator import sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.methods import _noisy
from aleator.methods._method import Card
from aleator.noise import masked
from aleator.posterior import Masked, Passes


@dataclasses.dataclass(frozen=True)
class Dropout(_noisy.NoisyMethod):
    """q(W) = M·diag(z)/(1 − p), z ~ Bernoulli(1 − p) on the units feeding each linear map of any network (inverted dropout, E[z/(1−p)] = 1).

    The objective is Σ log p(y|x, W) + E_q[log p(W)] + Σ K·H(p): with prior N(0, s²) the weight decay ‖M‖²/(2s²(1 − p)), that is
    λ = σ²/(s²N(1 − p)) in units of the squared error, never typed in. rate: one p, or {site pattern: p}. placement: "inputs" (units
    feeding every map, x included) or "hidden" (all but x). existing=True uses the network's own dropout layers instead. log_evidence is
    the bound up to a constant shared by all rates of one network (kind "relative"): `al.choose` picks a rate by it, or by held-out data.
    """

    rate: Any = 0.1
    placement: str = "hidden"
    existing: bool = False
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None
    num_evidence: int = 32

    card: ClassVar[Card] = Card(
        name="Dropout",
        summary="Dropout left on at test time: a posterior over networks with units missing.",
        model_class="any network with linear maps, or one with dropout layers of its own",
        criterion="evidence lower bound for a Bernoulli family, up to a constant in the rate",
        search="stochastic gradient ascent with one mask per example and step",
        cost="a MAP step; one pass per draw at prediction",
        needs="a network; a rate in (0, 1), fixed beforehand or chosen by al.choose",
        references=("Gal and Ghahramani, Dropout as a Bayesian approximation, 2016",),
    )

    def __post_init__(self) -> None:
        self.check()
        given = dict(self.rate) if isinstance(self.rate, Mapping) or _is_pairs(self.rate) else self.rate
        for value in given.values() if isinstance(given, dict) else (given,):
            check_rate(value)
        object.__setattr__(self, "rate", tuple((str(k), float(v)) for k, v in given.items()) if isinstance(given, dict) else float(given))
        check_placement(self.placement)

    def noise(self, target: Any) -> _noisy.Noise:
        if self.existing:
            return _own_layers(target)
        chosen = droppable(target, self.placement, "Dropout")
        rates = {site.name: self._rate(site) for site in chosen}

        def handler(key: Key, params: Tree, noise: Tree) -> tuple[Any, tuple, tuple]:
            return masked(key, rates), (), ()

        return _noisy.Noise(
            init=lambda params: {},
            handler=handler,
            kl=lambda params, noise: bernoulli_kl(target, params, chosen, [rates[site.name] for site in chosen]),
            posterior=lambda params, noise: masked_posterior(target, params, chosen, jnp.asarray([rates[s.name] for s in chosen])),
            notes={"sites": site_notes(target, chosen)},
        )

    def _rate(self, site: sites.Site) -> float:
        if not isinstance(self.rate, tuple):
            return self.rate
        fits = [rate for pattern, rate in self.rate if fnmatch.fnmatch(site.name, pattern) or site.name.startswith(pattern + ".")]
        if not fits:
            raise MethodError(
                message("No rate for a site.", site.name, f"patterns covering it, not {dict(self.rate)}", "add '*' for the rest")
            )
        return fits[0]


def _is_pairs(rate: Any) -> bool:
    """The form in which a mapping of rates is kept: hashable, and as files give it back."""
    return isinstance(rate, (tuple, list)) and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in rate)


def check_rate(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not 0.0 < value < 1.0:
        raise MethodError(
            message("A dropout rate is a probability of dropping.", repr(value), "a number strictly between 0 and 1", "pass e.g. rate=0.1")
        )


def check_placement(placement: str) -> None:
    if placement not in ("inputs", "hidden"):
        raise MethodError(message("Unknown placement of dropout.", repr(placement), "'inputs' or 'hidden'", "choose one of them"))


def droppable(target: Any, placement: str, method: str) -> list[sites.Site]:
    """Sites whose input units can be dropped: a mask on the weight's own axes, used by one equation."""
    found = _noisy.find_sites(target, method)
    chosen = [s for s in found.sites if s.leaf_axes and s.equations == 1 and not (placement == "hidden" and s.first)]
    if not chosen:
        raise MethodError(
            message(
                f"{method} finds no units to drop.",
                f"sites {[s.name for s in found.sites]} with placement={placement!r}",
                "a dense map or an ungrouped convolution" + (" behind the first layer" if placement == "hidden" else ""),
                "use placement='inputs'" if placement == "hidden" else "use al.Variational() for this network",
            )
        )
    return chosen


def bernoulli_kl(target: Any, params: Tree, chosen: list[sites.Site], rates: list[Any]) -> Array:
    """−E_q[log p(W)] − Σ K·H(p) with K the number of units dropped: the KL up to a constant that no rate changes (B8).

    E log p(W) is closed for Gaussian priors (mean M, variance M²p/(1−p)), and for any other as (1−p)·log p(M/(1−p)) + p·log p(0), leaf by
    leaf.
    """
    by_path = {_noisy.full_path(site.path): rate for site, rate in zip(chosen, rates, strict=True)}
    paths = _noisy.all_paths(target)
    leaves, structure = jax.tree.flatten(params)
    rebuild = lambda values: jax.tree.unflatten(structure, values)
    spread = [
        leaf**2 * (by_path[p] / (1.0 - by_path[p])) if p in by_path else jnp.zeros_like(leaf) for p, leaf in zip(paths, leaves, strict=True)
    ]
    prior = target.expected_log_prior(params, rebuild(spread), params)
    if prior is None:
        off = [jnp.zeros_like(leaf) if p in by_path else leaf for p, leaf in zip(paths, leaves, strict=True)]
        base = prior = target.log_prior(rebuild(off))
        for i, path in enumerate(paths):
            if path in by_path:
                on = [leaves[i] / (1.0 - by_path[path]) if j == i else leaf for j, leaf in enumerate(off)]
                prior = prior + (1.0 - by_path[path]) * (target.log_prior(rebuild(on)) - base)
    entropy = sum(site.num_units * _entropy(rate) for site, rate in zip(chosen, rates, strict=True))
    return -prior / target.temperature - entropy


def masked_posterior(target: Any, params: Tree, chosen: list[sites.Site], rates: Array) -> Masked:
    paths = _noisy.all_paths(target)
    axes = {_noisy.full_path(site.path): site.leaf_axes for site in chosen}
    order = [[_noisy.full_path(s.path) for s in chosen].index(path) for path in paths if path in axes]
    return Masked(params, rates[jnp.asarray(order)], tuple(axes.get(path, ()) for path in paths))


def site_notes(target: Any, chosen: list[sites.Site]) -> list[dict[str, Any]]:
    """Which parameters lose units, for the manifest."""
    by_path = {_noisy.full_path(site.path): site for site in chosen}
    return _noisy.treatments(target, lambda path: f"units dropped ({by_path[path].num_units})" if path in by_path else "point")


def _entropy(rate: Any) -> Array:
    """H(p) in nats."""
    return -(rate * jnp.log(rate) + (1.0 - rate) * jnp.log1p(-rate))


def _own_layers(target: Any) -> _noisy.Noise:
    """The network's own dropout: a key switches it on, in training and at prediction."""
    if not target.stochastic:
        raise MethodError(
            message(
                "The network has no dropout layers of its own.",
                "a network that ignores its key",
                "layers such as equinox.nn.Dropout or flax.nnx.Dropout in training mode",
                "drop existing=True: dropout is put on the sites of any network",
            )
        )
    return _noisy.Noise(
        init=lambda params: {},
        handler=lambda key, params, noise: (key, (), ()),
        kl=lambda params, noise: -target.log_prior(params) / target.temperature,
        posterior=lambda params, noise: Passes(params),
        notes={"departures": ["rates of the network's own dropout layers are not known: the prior is taken at the weights themselves"]},
    )
