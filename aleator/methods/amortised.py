"""Amortised variational inference: decoder and inference network by stochastic gradients of one bound (Kingma and Welling, 2014)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent.posteriors import Diagonal
from aleator.latent.vae import VAE, log_mean
from aleator.loop import Algorithm, Phase
from aleator.methods import _optimise, _refined_rows
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Point

ESTIMATORS = ("elbo", "iwae", "dreg", "stl", "refined")


class State(NamedTuple):
    """along: step sizes and annealing of the refinement, trained with the networks, or ()."""

    params: Tree
    along: Tree
    optimizer: Any
    number: Array


class Info(NamedTuple):
    """bound: Σ over all rows, estimated from the batch, nats (higher is better); without free bits or warm-up. step_size: mean η of the refinement, 0
    without one."""

    bound: Array
    step_size: Array


def step(key: Key, state: State, batch: Batch, target: Any, method: Amortised, optimizer: Any) -> tuple[State, Info]:
    """Both networks climb the bound together."""
    import optax

    warm = 1.0 if not method.warmup else jnp.minimum(1.0, (state.number + 1.0) / method.warmup)

    def loss(moved: tuple[Tree, Tree]) -> tuple[Array, Array]:
        params, along = moved
        climbed, honest = terms(key, params, batch, target.model, method, warm, along)
        value = target.total(climbed, batch) + target.log_prior(params)
        return -value / target.num_data, target.total(honest, batch)

    moved = (state.params, state.along)
    (_, bound), gradient = jax.value_and_grad(loss, has_aux=True)(moved)
    updates, inner = optimizer.update(gradient, state.optimizer, moved)
    params, along = optax.apply_updates(moved, updates)
    return State(params, along, inner, state.number + 1), Info(bound, jnp.mean(jnp.exp(along["log_step"])) if along else jnp.zeros(()))


def terms(key: Key, params: Tree, batch: Batch, model: VAE, method: Amortised, warm: Any, along: Tree = ()) -> tuple[Array, Array]:
    """What is climbed and the plain bound, of each row, (n,)."""
    if method.estimator == "refined":
        key_shown, key_paths = jax.random.split(key)
        shown, _ = model.shown(key_shown, batch)
        climbed = jnp.mean(_refined_rows.log_weights(key_paths, params, shown, model, along, method.num_importance), axis=0)
        return climbed, jax.lax.stop_gradient(climbed)
    if method.estimator in ("elbo", "iwae"):
        if method.free_bits:
            return _with_free_bits(key, params, batch, model, method, warm)
        weights = model.weights(key, params, batch, method.num_importance)
        logs = weights.data + warm * (weights.prior - weights.posterior)
        pool = log_mean if method.estimator == "iwae" else lambda values: jnp.mean(values, axis=0)
        return pool(logs), jax.lax.stop_gradient(pool(weights.data + weights.prior - weights.posterior))
    # The score of q at its own draws has mean zero and is left out: z alone carries the gradient to the encoder (Roeder et al. 2017).
    key_shown, key_noise = jax.random.split(key)
    shown, x = model.shown(key_shown, batch)
    hidden, _ = model.draw_hidden(params, shown, x, model.noise(key_noise, method.num_importance, shown.shape[0]))
    still = jax.lax.stop_gradient(params)

    def log_weights(params: Tree, hidden: tuple[Array, ...], rest: Any) -> Array:
        still, shown, x, warm = rest
        gap = model.log_hidden(params, hidden, x) - model.log_q(still, shown, x, hidden)
        return model.log_shown(params, hidden, shown, x) + warm * gap

    rest = (still, shown, x, jnp.asarray(warm))
    if method.estimator == "stl":
        climbed = jnp.mean(log_weights(params, hidden, rest), axis=0)
    else:
        climbed = doubly(log_weights)(params, hidden, rest)
    return climbed, jax.lax.stop_gradient(climbed)


def doubly(log_weights: Callable) -> Callable:
    """log mean exp of log_weights(θ, z, rest) (k, n), whose gradient in z is weighted by the squares of the normalised weights and in θ by
    the weights themselves: the doubly reparameterised gradient (Tucker et al. 2019)."""

    @jax.custom_vjp
    def bound(params: Tree, hidden: Tree, rest: Any) -> Array:
        return log_mean(log_weights(params, hidden, rest))

    def forward(params: Tree, hidden: Tree, rest: Any) -> tuple[Array, Any]:
        logs, back = jax.vjp(lambda p, z: log_weights(p, z, rest), params, hidden)
        return log_mean(logs), (back, jax.nn.softmax(logs, axis=0), rest)

    def backward(kept: Any, cotangent: Array) -> tuple:
        back, share, rest = kept
        to_params, to_hidden = back(cotangent * share)
        nothing = jax.tree.map(jnp.zeros_like, rest)
        return to_params, jax.tree.map(lambda leaf: leaf * share[..., None], to_hidden), nothing

    bound.defvjp(forward, backward)
    return bound


def _with_free_bits(key: Key, params: Tree, batch: Batch, model: VAE, method: Amortised, warm: Any) -> tuple[Array, Array]:
    """E log p(y | z) − Σ_j max(free_bits, KL_j), KL_j the batch's mean in dimension j: dimensions may tell that much for nothing."""
    key_shown, key_noise = jax.random.split(key)
    shown, x = model.shown(key_shown, batch)
    hidden, _ = model.draw_hidden(params, shown, x, model.noise(key_noise, method.num_importance, shown.shape[0]))
    data = jnp.mean(model.log_shown(params, hidden, shown, x), axis=0)
    each = model.posterior.divergence(model.encoded(params, 0, shown, x))
    charged = jnp.sum(jnp.maximum(jnp.mean(each, axis=0), method.free_bits))
    return data - warm * charged, jax.lax.stop_gradient(data - jnp.sum(each, axis=-1))


@dataclasses.dataclass(frozen=True)
class Amortised(Method):
    """Maximise E_q[log p(y, z) − log q(z | y)] over the decoder and the inference network of an autoencoder (D7).

    estimator: "elbo"; "iwae", the importance-weighted bound of num_importance draws (Burda et al. 2016); "dreg", the same bound with doubly
    reparameterised gradients; "stl", the evidence lower bound without the score of q (sticking the landing); "refined", the bound of num_refine
    Langevin steps after the encoder's draw, row by row, through which everything is differentiated (the variationally inferred sampler, see
    `al.Refined`): step_size, in units of the encoder's variances, is where their sizes start, and they are trained too;
    clip=1.0 keeps steps that are too long for an untrained decoder from throwing it off. warmup: steps over which the
    divergence enters, from 0 to its full weight. free_bits: nats a dimension of z may tell before it is charged; "elbo" with a diagonal q.
    """

    num_steps: int = 20_000
    batch_size: int | None = 100
    learning_rate: float = 1e-3
    estimator: str = "elbo"
    num_importance: int = 1
    warmup: int | None = None
    free_bits: float = 0.0
    num_refine: int = 5
    step_size: float = 0.1
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="Amortised variational inference",
        summary="One network learns to infer what another one generates from.",
        model_class="al.latent.VAE: any encoder and decoder",
        criterion="evidence lower bound, or the tighter importance-weighted bound",
        search="stochastic gradients through reparameterised draws",
        cost="one pass through both networks a step and draw",
        needs="a model with an inference network",
        references=(
            "Kingma and Welling, Auto-encoding variational Bayes, 2014",
            "Burda, Grosse and Salakhutdinov, Importance weighted autoencoders, 2016",
            "Roeder, Wu and Duvenaud, Sticking the landing, 2017",
            "Gallego and Ríos Insua, Variationally inferred sampling through a refined bound, 2021",
            "Tucker, Lawson, Gu and Maddison, Doubly reparameterized gradient estimators for Monte Carlo objectives, 2019",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "num_importance", "warmup", "num_refine", whole=True)
        check_positive(self, "learning_rate", "clip", "step_size")
        if self.estimator not in ESTIMATORS:
            raise MethodError(message("Unknown estimator.", repr(self.estimator), f"one of {ESTIMATORS}", "choose one of them"))
        if self.free_bits < 0 or (self.free_bits and self.estimator != "elbo"):
            got = f"free_bits={self.free_bits} with {self.estimator!r}"
            raise MethodError(message("Free bits are a form of the ELBO.", got, "free_bits ≥ 0 with 'elbo'", "use estimator='elbo'"))
        if self.warmup and self.estimator == "refined":
            raise MethodError(message("Refinement has no warm-up.", f"warmup={self.warmup}", "None", "drop it, or use estimator='elbo'"))
        _optimise.check_optimizer(self)

    def build(self, target: Any) -> Algorithm:
        model = target.model
        if not isinstance(model, VAE):
            got = "a bare density" if model is None else type(model).__name__
            raise MethodError(message("Amortised needs an inference network.", got, "al.latent.VAE", "use al.Variational for other models"))
        if self.estimator in ("dreg", "stl") and not model.posterior.closed:
            raise MethodError(
                message(
                    "This q has no closed density at a given z.",
                    repr(model.posterior),
                    "'diagonal', 'full' or 'coupling'",
                    "use 'elbo' or 'iwae'",
                )
            )
        if self.free_bits and not (isinstance(model.posterior, Diagonal) and len(model.latent_dim) == 1 and not model.x_size):
            raise MethodError(
                message("Free bits need the divergence by dimension.", repr(model), "one layer, diagonal q, no x", "use warmup instead")
            )
        along: Tree = ()
        if self.estimator == "refined":
            _refined_rows.check(model)
            along = _refined_rows.begin(self.num_refine, self.step_size, jnp.float32)
        optimizer = _optimise.optimizer(self)
        batches = "full" if self.batch_size is None else "random"
        return Algorithm(
            init=lambda key, start: State(start, along, optimizer.init((start, along)), jnp.zeros((), jnp.int32)),
            phases=(
                Phase(
                    "Amortised",
                    lambda key, state, batch: step(key, state, batch, target, self, optimizer),
                    self.num_steps,
                    batches,
                    self.batch_size,
                ),
            ),
            position=lambda state: state.params,
            finish=lambda key, state, kept: Point(state.params),
            watch="bound",
        )
