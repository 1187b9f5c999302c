"""SparseDropout: one dropout rate per weight, unbounded, so that useless weights are found out and removed."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator import sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Tree
from aleator.divergences import kl_log_uniform
from aleator.methods import _noisy
from aleator.methods._method import Card
from aleator.methods.variational_dropout import (
    PRIOR,
    by_path,
    check_log_alpha,
    gaussian_dropout,
    kernel_sites,
    local_noise,
    noise_notes,
    rest_log_prior,
)

LIMIT = 20.0  # |log α| beyond which nothing changes: the KL is flat to 1e-9 and e^20 times a tiny θ² is still a number


@dataclasses.dataclass(frozen=True)
class SparseDropout(_noisy.NoisyMethod):
    """q(w) = N(θ, σ²) per weight with α = σ²/θ² free to grow (C6); log-uniform prior. α → ∞ means that the weight is pure noise: prune it.

    The noise is additive, w = θ + σε with log σ² as the parameter: the gradient of θ no longer carries ε√α, which is what made large α
    unlearnable (C7). initial_log_variance: log σ² at the start. kl_warmup: steps over which the KL is ramped up from 0; without it, units
    that have not learned anything yet can be pruned at once (a departure from the bound while it lasts, recorded). group="unit" gives one
    σ² and one decision to all weights leaving an input unit: α = σ²·m/Σθ² over its m weights. noise_speed: log σ² moves this many times as
    far in a step as θ; Adam's steps are of the size of its rate, and log σ² has a way of ten to go where weights have a tenth.
    `fit.posterior.sparsity()` per site; `fit.prune(3.0)` gives the smaller network.
    """

    group: str = "weight"
    initial_log_variance: float = -10.0
    num_steps: int = 20_000
    batch_size: int | None = 128
    learning_rate: float = 1e-3
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None
    kl_warmup: int = 0
    noise_speed: float = 1.0

    card: ClassVar[Card] = Card(
        name="SparseDropout",
        summary="Finds the weights a network can do without, by giving each its own noise.",
        model_class="any network with linear maps",
        criterion="evidence lower bound under the log-uniform prior (improper: no evidence)",
        search="stochastic gradient ascent with local reparameterisation and additive noise",
        cost="two products per linear map, two numbers per weight",
        needs="a network and enough steps for the noise to grow",
        references=("Molchanov, Ashukha and Vetrov, Variational dropout sparsifies deep neural networks, 2017",),
    )

    def __post_init__(self) -> None:
        self.check()
        check_log_alpha(self.initial_log_variance)
        if self.group not in ("weight", "unit"):
            raise MethodError(message("Unknown group of weights.", repr(self.group), "'weight' or 'unit'", "choose one of them"))

    def noise(self, target: Any) -> _noisy.Noise:
        kernels = kernel_sites(target, "SparseDropout")

        def shape(site: sites.Site) -> tuple[int, ...]:
            kept = site.leaf_axes if self.group == "unit" and site.leaf_axes else range(len(site.leaf_shape))
            return tuple(size if axis in kept else 1 for axis, size in enumerate(site.leaf_shape))

        def square(site: sites.Site, theta: Array) -> Array:
            """θ², or its mean over a group."""
            over = tuple(axis for axis, (a, b) in enumerate(zip(shape(site), site.leaf_shape, strict=True)) if a != b)
            return jnp.mean(theta**2, axis=over, keepdims=True) if over else theta**2

        def log_alpha(params: Tree, noise: Tree) -> dict[str, Array]:
            values = by_path(params["network"])
            raw = {s.path: noise[s.path] - jnp.log(square(s, values[s.path]) + 1e-16) for s in kernels}
            return {path: jnp.clip(value, -LIMIT, LIMIT) for path, value in raw.items()}

        def variances(noise: Tree) -> dict[str, Array]:
            return {s.path: jnp.broadcast_to(jnp.exp(noise[s.path]), s.leaf_shape) for s in kernels}

        def kl(params: Tree, noise: Tree) -> Array:
            alphas = log_alpha(params, noise)
            total = sum(jnp.sum(kl_log_uniform(alphas[s.path])) * (np.prod(s.leaf_shape) / np.prod(shape(s))) for s in kernels)
            return total - rest_log_prior(target, params, kernels) / target.temperature

        def init(params: Tree) -> Tree:
            dtype = jax.tree.leaves(params)[0].dtype
            return {s.path: jnp.full(shape(s), self.initial_log_variance, dtype) for s in kernels}

        return _noisy.Noise(
            init=init,
            handler=lambda key, params, noise: local_noise(target, params, variances(noise)),
            kl=kl,
            posterior=lambda params, noise: gaussian_dropout(
                target, params, log_alpha(params, noise), {s.path: noise[s.path] for s in kernels}
            ),
            notes={"sites": noise_notes(target, kernels), "departures": [PRIOR]},
        )
