"""SGLD: Langevin dynamics with mini-batch gradients. One gradient and one draw of noise a step, and no test."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from aleator._typing import Array, Key, Tree
from aleator.methods._method import Card
from aleator.methods._stochastic import Dynamics, StochasticMethod, normals


def init(params: Tree) -> tuple[()]:
    return ()


def move(key: Key, params: Tree, inner: tuple[()], gradient: Tree, size: Tree, excess: Tree, heat: Any) -> tuple[Tree, tuple[()]]:
    """θ ← θ − (h/2)G∇U + √(hG − ¼(hG)²V)·ξ, ξ ~ N(0, I).

    On a Gaussian of variance λ with gradient noise of variance ν² that is not corrected for (V = 0), the stationary variance is
    (h + h²ν²/4)/(1 − (1 − h/2λ)²): for ν = 0, λ/(1 − h/4λ).
    """

    def one(p: Array, g: Array, h: Array, e: Array, z: Array) -> Array:
        return p - 0.5 * h * g + jnp.sqrt(heat * jnp.maximum(h - e, 0.0)) * z

    return jax.tree.map(one, params, gradient, size, excess, normals(key, params)), ()


@dataclasses.dataclass(frozen=True)
class SGLD(StochasticMethod):
    """Stochastic-gradient Langevin dynamics, θ ← θ − (h/2)∇̂U + √h·ξ with U = −log joint (Welling and Teh 2011). There is no Metropolis test:
    on a Gaussian of variance λ the draws have variance λ/(1 − h/4λ).

    step_size: h, or "auto": h such that the variance in the stiffest direction is off by the share `bias`, with the largest eigenvalue of
    the Hessian found by power iteration where the chain begins. The noise of mini-batch gradients has variance V per entry, estimated as
    the chain runs from halves of batches, and ¼h²V is taken off the injected variance h (correct_noise; for independent batches, whose
    noise is white); manifest["health"]["gradient_noise"] is the mean share of it, hV/4, which must stay below 1, and below ½ where
    the step size is automatic.

    num_chains chains keep num_samples draws each, one in every `thin` steps, after num_warmup steps. Before, num_search steps of Adam at
    search_rate look for a mode; with init= (a MAP fit, an ensemble with one member for each chain) they are left out.
    schedule: "constant", or "polynomial", h·(1 + t/τ)^−⅓ with draws weighted by their step size; cycles: al.Cyclical(…), or their number.

    sampling: how rows come into a batch, "independent" (with replacement), "stratified" (one from each of batch_size blocks of
    neighbouring rows) or "shuffled" (epochs; what a Stream needs). batch_size=None takes all rows at every step.
    control_variates: "mode" takes gradients relative to those at the start, ∇U(θ̂) + (N/n)Σ(∇uᵢ(θ) − ∇uᵢ(θ̂)), with far less noise near θ̂ for
    two gradients a step; "svrg" moves θ̂ to the chain once an epoch, for posteriors that do not stay near one mode.
    preconditioner: "rmsprop" gives each parameter its own step h·G, G ∝ 1/rms of its gradient with mean 1, learned during warm-up and then
    frozen, so that no correction term is missing (Li et al. 2016 leave one out). "kfac" moves in coordinates in which the posterior of a
    network is about round, by Kronecker factors of its curvature that are looked at every 100 steps of warm-up and then frozen; h is then in units
    of posterior variances (0.1 is off by some 3 %), for al.BNN and al.LinearModel with priors that have no parameters.
    storage and precision: as in `al.HMC`.
    """

    step_size: Any = "auto"
    num_samples: int = 1000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 10
    batch_size: int | None = 32
    preconditioner: str | None = None
    schedule: str = "constant"
    cycles: Any = None
    control_variates: str | None = None
    sampling: str = "independent"
    correct_noise: bool = True
    bias: float = 0.05
    num_search: int = 1000
    search_rate: float = 1e-2
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="SGLD",
        summary="Gradient steps with noise of the right size: a posterior sample for the price of training, with a known bias.",
        model_class="any model with a differentiable log joint, of any size",
        criterion="stationary distribution of a discretised Langevin diffusion: off by a share of the order of the step size",
        search="mini-batch gradients with injected noise",
        cost="one mini-batch gradient and one draw of noise per step (two gradients with control variates)",
        needs="a step size small against the narrowest direction of the posterior",
        references=(
            "Welling and Teh, Bayesian learning via stochastic gradient Langevin dynamics, 2011",
            "Baker, Fearnhead, Fox and Nemeth, Control variates for stochastic gradient MCMC, 2019",
            "Dubey et al., Variance reduction in stochastic gradient Langevin dynamics, 2016",
            "Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature, 2015",
            "Li, Chen, Carlson and Carin, Preconditioned stochastic gradient Langevin dynamics, 2016",
            "Vollmer, Zygalakis and Teh, Exploration of the (non-)asymptotic bias and variance of SGLD, 2016",
        ),
    )

    def __post_init__(self) -> None:
        self.check()

    def dynamics(self) -> Dynamics:
        return Dynamics(init, move)
