"""VariationalDropout: Gaussian multiplicative noise with learned rates under the log-uniform prior."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.divergences import kl_log_uniform
from aleator.methods import _noisy
from aleator.methods._method import Card
from aleator.noise import local
from aleator.posterior import GaussianDropout
from aleator.priors import Hierarchical

PRIOR = "weights at sites have the log-uniform prior p(|w|) ∝ 1/|w|, improper, in place of the model's"


@dataclasses.dataclass(frozen=True)
class VariationalDropout(_noisy.NoisyMethod):
    """q(w) = N(θ, αθ²) with α learned per layer, unit or weight, prior p(log|w|) ∝ 1: KL depends on α alone (C3, C5).

    per: "layer" (one α a site), "unit" (one per input unit) or "weight". initial_log_alpha: where log α starts. max_log_alpha bounds it:
    0 (α ≤ 1) is the range in which the usual training stays at one mode; `SparseDropout` lifts it. Noise is drawn at the outputs of each
    linear map (local reparameterisation). Parameters without a site keep the model's prior and are points.
    """

    per: str = "layer"
    initial_log_alpha: float = -3.0
    max_log_alpha: float = 0.0
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-3
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None
    kl_warmup: int = 0

    card: ClassVar[Card] = Card(
        name="VariationalDropout",
        summary="Gaussian dropout with learned rates: multiplicative noise as inference.",
        model_class="any network with linear maps",
        criterion="evidence lower bound under the log-uniform prior (improper: no evidence)",
        search="stochastic gradient ascent with local reparameterisation",
        cost="two products per linear map",
        needs="a network; nothing to choose beforehand",
        references=("Kingma, Salimans and Welling, Variational dropout and the local reparameterization trick, 2015",),
    )

    def __post_init__(self) -> None:
        self.check()
        if self.per not in ("layer", "unit", "weight"):
            raise MethodError(message("Unknown grouping of rates.", f"per={self.per!r}", "'layer', 'unit' or 'weight'", "choose one"))
        check_log_alpha(self.initial_log_alpha)
        check_log_alpha(self.max_log_alpha)
        if self.initial_log_alpha >= self.max_log_alpha:
            raise MethodError(
                message(
                    "log α would start beyond its bound.",
                    f"initial_log_alpha={self.initial_log_alpha}, max_log_alpha={self.max_log_alpha}",
                    "a start below the bound",
                    "start near -3",
                )
            )

    def noise(self, target: Any) -> _noisy.Noise:
        kernels = kernel_sites(target, "VariationalDropout")

        def shape(site: sites.Site) -> tuple[int, ...]:
            kept = {"layer": (), "unit": site.leaf_axes, "weight": range(len(site.leaf_shape))}[self.per]
            return tuple(size if axis in kept else 1 for axis, size in enumerate(site.leaf_shape))

        # A smooth bound: log α = m − softplus(m − u) has a slope everywhere, so that a rate at its bound can come back.
        bounded = lambda noise, site: self.max_log_alpha - jax.nn.softplus(self.max_log_alpha - noise[site.path])
        start = self.max_log_alpha - float(np.log(np.expm1(self.max_log_alpha - self.initial_log_alpha)))

        def variances(params: Tree, noise: Tree) -> dict[str, Array]:
            values = by_path(params["network"])
            return {site.path: jnp.exp(bounded(noise, site)) * values[site.path] ** 2 for site in kernels}

        def kl(params: Tree, noise: Tree) -> Array:
            total = sum(
                jnp.sum(kl_log_uniform(bounded(noise, site))) * (np.prod(site.leaf_shape) / np.prod(shape(site))) for site in kernels
            )
            return total - rest_log_prior(target, params, kernels) / target.temperature

        return _noisy.Noise(
            init=lambda params: {s.path: jnp.full(shape(s), start, jax.tree.leaves(params)[0].dtype) for s in kernels},
            handler=lambda key, params, noise: local_noise(target, params, variances(params, noise)),
            kl=kl,
            posterior=lambda params, noise: gaussian_dropout(target, params, {s.path: bounded(noise, s) for s in kernels}),
            notes={"sites": noise_notes(target, kernels), "departures": [PRIOR]},
        )


def check_log_alpha(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -30.0 <= value <= 30.0:
        raise MethodError(
            message("log α would leave the range of the arithmetic.", repr(value), "a number between -30 and 30", "start near -3")
        )


def kernel_sites(target: Any, method: str) -> list[sites.Site]:
    """One site per weight leaf: several uses of a leaf share its noise parameters."""
    prior = getattr(target.model, "prior", None)
    if isinstance(prior, Hierarchical) and prior.centred:
        # The weights' own prior is replaced, and with it all that would tell its scales anything.
        raise MethodError(
            message(
                f"{method} brings its own prior on the weights.",
                "a centred hierarchical prior",
                "a prior whose scales are not learned from the weights",
                "use al.Normal(1.0)",
            )
        )
    return list({site.path: site for site in _noisy.find_sites(target, method).sites}.values())


def by_path(tree: Tree) -> dict[str, Array]:
    return dict(zip(_tree.paths(tree), jax.tree.leaves(tree), strict=True))


def local_noise(target: Any, params: Tree, variances: dict[str, Array]) -> tuple[Any, tuple, tuple]:
    """The local handler with its companion: variances of the site weights, 0 elsewhere, on the scale of the network's weights."""
    paths = _tree.paths(params["network"])
    leaves, structure = jax.tree.flatten(params["network"])
    given = [variances.get(path, jnp.zeros_like(leaf)) for path, leaf in zip(paths, leaves, strict=True)]
    # Priors that rescale do it linearly: a standard deviation goes the way of a weight.
    scales = target.model.weights({**params, "network": jax.tree.unflatten(structure, [jnp.ones_like(leaf) for leaf in leaves])})
    return local, (jax.tree.map(lambda v, s: v * s**2, jax.tree.unflatten(structure, given), scales),), (2,)


def rest_log_prior(target: Any, params: Tree, kernels: list[sites.Site]) -> Array:
    """log p of everything but the site weights: theirs is replaced, so they enter as constants."""
    replaced = {site.path for site in kernels}
    paths = _tree.paths(params["network"])
    leaves, structure = jax.tree.flatten(params["network"])
    fixed = [jnp.zeros_like(leaf) if path in replaced else leaf for path, leaf in zip(paths, leaves, strict=True)]
    return target.log_prior({**params, "network": jax.tree.unflatten(structure, fixed)})


def gaussian_dropout(
    target: Any, params: Tree, log_alpha: dict[str, Array], log_variance: dict[str, Array] | None = None
) -> GaussianDropout:
    paths = _noisy.all_paths(target)
    full = lambda values: {_noisy.full_path(path): value for path, value in values.items()}
    ordered = lambda values: tuple(full(values)[path] for path in paths if path in full(values))
    chosen = tuple(path in full(log_alpha) for path in paths)
    return GaussianDropout(params, ordered(log_alpha), chosen, None if log_variance is None else ordered(log_variance))


def noise_notes(target: Any, kernels: list[sites.Site]) -> list[dict[str, Any]]:
    """Which parameters are noisy and how well the noise stands for theirs, for the manifest."""
    named = {_noisy.full_path(site.path): site.positions for site in kernels}

    def treat(path: str) -> str:
        if path not in named:
            return "point"
        return "local, exact" if named[path] == 1 else f"local, approximate: used at {named[path]} positions of a row"

    return _noisy.treatments(target, treat)
