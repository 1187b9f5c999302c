"""PBP: probabilistic backpropagation, assumed-density filtering of a ReLU network row by row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.hyperpriors import InverseGamma
from aleator.likelihoods import LEARNED, Gaussian
from aleator.linalg import Diagonal
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._moments import gamma_update, normal_log_density, rectified
from aleator.model import BNN
from aleator.networks import MLP
from aleator.posterior import Gaussian as GaussianPosterior
from aleator.priors import Hierarchical, Normal

SMALLEST = 1e-100  # a variance below this is no variance: the update is undone
LARGEST = 1e6  # a cavity variance beyond this is no cavity: its prior factor waits, as published


class Noise(NamedTuple):
    """Gamma(shape, rate) of each target column's noise precision, (k,)."""

    shape: Array
    rate: Array


class Sites(NamedTuple):
    """The prior factors' shares of q: precision and shift of each weight (D,), shape and rate that each gave to the weights' precision λ."""

    precision: Array
    shift: Array
    shape: Array
    rate: Array


class State(NamedTuple):
    """q: mean and variance of each weight (trees like the network's), Gammas of the noise precisions and of λ (scalars shape, rate).

    seen: rows taken in so far; undone: the share of weight updates undone in all of them.
    """

    mean: Tree
    variance: Tree
    noise: Noise
    shape: Array
    rate: Array
    sites: Sites
    seen: Array
    undone: Array


class Info(NamedTuple):
    """log_z: log predictive density of the row (mean over the batch's rows) just before it was taken in."""

    log_z: Array


class Setting(NamedTuple):
    """What steps need to know. widths: 1/√(fan-in + 1) of each weight, flat (D,). known: the noise's scale is given, not learned."""

    num_layers: int
    num_data: int
    widths: np.ndarray
    known: bool


def init(key: Key, start: Tree, setting: Setting, shapes: Tree, noise: tuple[float, float], weights: tuple[float, float], k: int) -> State:
    """The prior taken in: N(0, c²β/(α − 1)) for each weight, c² = 1/(fan-in + 1). Means are moved to c²·N(0, 1): at 0 all units of a layer
    would stay equal for ever."""
    shape, rate = weights
    square, zeros = jnp.asarray(setting.widths**2), jnp.zeros(len(setting.widths))
    sites = Sites(jnp.full_like(zeros, (shape - 1.0) / rate), zeros, zeros, zeros)
    return State(
        _tree.unflat(square * jax.random.normal(key, zeros.shape), shapes),
        _tree.unflat(square * rate / (shape - 1.0), shapes),
        Noise(jnp.full((k,), noise[0]), jnp.full((k,), noise[1])),
        jnp.asarray(shape),
        jnp.asarray(rate),
        sites,
        jnp.zeros((), jnp.int32),
        jnp.zeros(()),
    )


def step(key: Key, state: State, batch: Batch, setting: Setting) -> tuple[State, Info]:
    """Take in the rows of a batch one after the other; after each pass through the data refine the prior's factors once."""
    if batch.weight is not None:
        raise MethodError(
            message("PBP takes rows one by one and knows no weights.", "data with weights", "(x, y)", "repeat the rows, or use al.MAP()")
        )

    def one(state: State, row: tuple[Array, Array, Array]) -> tuple[State, Array]:
        x, y, real = row
        moved, log_z = absorb(state, x, y, setting)
        due = (moved.seen % setting.num_data == 0) & real
        moved = jax.lax.cond(due, lambda s: refine(s, setting), lambda s: s, moved)
        return jax.tree.map(lambda new, old: jnp.where(real, new, old), moved, state), jnp.where(real, log_z, 0.0)

    x, y = (jnp.asarray(leaf, jnp.float64) for leaf in (batch.x, batch.y))
    real = jnp.ones(len(y), bool) if batch.index is None else batch.index >= 0
    state, log_z = jax.lax.scan(one, state, (x, y, real))
    return state, Info(jnp.sum(log_z) / jnp.maximum(jnp.sum(real), 1))


def absorb(state: State, x: Array, y: Array, setting: Setting) -> tuple[State, Array]:
    """One row. With log Z = Σⱼ log N(yⱼ; mⱼ, vⱼ + β/(α − 1)), m and v the output's propagated moments, for every weight

    m ← m + v·∂log Z/∂m, v ← v − v²[(∂log Z/∂m)² − 2·∂log Z/∂v]: the moments of q·p(y | x, w) where it is Gaussian in the output.
    An update that leaves no positive variance is undone. The noise's Gamma follows from log Z at α, α + 1 and α + 2.
    """

    def log_z(mean: Tree, variance: Tree) -> tuple[Array, tuple[Array, Array]]:
        m, v = propagate(mean, variance, x, setting.num_layers)
        return jnp.sum(normal_log_density(y - m, v + noise_variance(state.noise))), (m, v)

    (value, (m, v)), (d_mean, d_variance) = jax.value_and_grad(log_z, argnums=(0, 1), has_aux=True)(state.mean, state.variance)
    new = jax.tree.map(lambda s, g, h: s - s**2 * (g**2 - 2.0 * h), state.variance, d_mean, d_variance)
    moved = jax.tree.map(lambda mu, s, g: mu + s * g, state.mean, state.variance, d_mean)
    good = jax.tree.map(lambda mu, s: jnp.isfinite(mu) & jnp.isfinite(s) & (s > SMALLEST), moved, new)
    choose = lambda values, old: jax.tree.map(jnp.where, good, values, old)
    undone = _tree.sum_leaves(jax.tree.map(jnp.logical_not, good)) / len(setting.widths)
    noise = state.noise
    if not setting.known:
        parts = [normal_log_density(y - m, v + noise.rate / (noise.shape + shift)) for shift in (-1.0, 0.0, 1.0)]
        shape, rate = gamma_update(noise.shape, noise.rate, *parts)
        proper = jnp.isfinite(shape) & jnp.isfinite(rate) & (shape > 1.0) & (rate > 0.0)
        noise = Noise(jnp.where(proper, shape, noise.shape), jnp.where(proper, rate, noise.rate))
    seen = state.seen + 1
    return state._replace(
        mean=choose(moved, state.mean),
        variance=choose(new, state.variance),
        noise=noise,
        seen=seen,
        undone=state.undone + (undone - state.undone) / seen,
    ), value


def propagate(mean: Tree, variance: Tree, x: Array, num_layers: int) -> tuple[Array, Array]:
    """Moments of the output at one row x (d,), layer by layer: for u = zW + b with independent entries of z, W and b

    E u = E z·E W + E b, Var u = (E z)²·Var W + Var z·((E W)² + Var W) + Var b, each u taken as Gaussian and then rectified.
    """
    m, v = x, jnp.zeros_like(x)
    for i in range(num_layers):
        mu, s = mean[f"layer{i}"], variance[f"layer{i}"]
        spread = m**2 @ s["weight"] + v @ (mu["weight"] ** 2 + s["weight"]) + s["bias"]
        m = m @ mu["weight"] + mu["bias"]
        m, v = (m, spread) if i == num_layers - 1 else rectified(m, spread)
    return m, v


def refine(state: State, setting: Setting) -> State:
    """One sweep of expectation propagation over the factors N(w | 0, c²/λ), one weight after the other as all of them share λ.

    Each factor's share is taken out of q(w)·Gamma(λ), and the factor put back by the moments of N(m; 0, v + β/(α − 1)), in units of c. A
    factor whose cavity or new moments are improper keeps the share it had.
    """
    widths = jnp.asarray(setting.widths)

    def one(gamma: tuple[Array, Array], entry: tuple[Array, Array, Sites]) -> tuple[tuple[Array, Array], tuple[Array, Array, Sites]]:
        (shape, rate), (m, v, site) = gamma, entry
        precision, cavity_shape, cavity_rate = 1.0 / v - site.precision, shape - site.shape, rate - site.rate
        sound = (precision > 1.0 / LARGEST) & (cavity_shape > 1.0) & (cavity_rate > 0.0)
        cavity = 1.0 / jnp.where(sound, precision, 1.0)
        a, b = jnp.where(sound, cavity_shape, 2.0), jnp.where(sound, cavity_rate, 1.0)
        centre = cavity * (m / v - site.shift)
        totals = [cavity + b / (a + shift) for shift in (-1.0, 0.0, 1.0)]
        new_shape, new_rate = gamma_update(a, b, *(normal_log_density(centre, total) for total in totals))
        # Σ = v₋ + β/(α − 1): m = m₋·(1 − v₋/Σ), v = v₋(1 − v₋/Σ).
        left = 1.0 - cavity / totals[0]
        new_m, new_v = centre * left, cavity * left
        finite = jnp.isfinite(new_m) & jnp.isfinite(new_v) & jnp.isfinite(new_shape) & jnp.isfinite(new_rate)
        sound &= finite & (new_v > SMALLEST) & (new_shape > 1.0) & (new_rate > 0.0)
        fresh = Sites(1.0 / new_v - precision, new_m / new_v - centre * precision, new_shape - cavity_shape, new_rate - cavity_rate)
        pick = lambda new, old: jnp.where(sound, new, old)
        return (pick(new_shape, shape), pick(new_rate, rate)), (pick(new_m, m), pick(new_v, v), jax.tree.map(pick, fresh, site))

    entries = (_tree.flat(state.mean) / widths, _tree.flat(state.variance) / widths**2, state.sites)
    (shape, rate), (m, v, sites) = jax.lax.scan(one, (state.shape, state.rate), entries)
    mean, variance = _tree.unflat(m * widths, state.mean), _tree.unflat(v * widths**2, state.mean)
    return state._replace(mean=mean, variance=variance, shape=shape, rate=rate, sites=sites)


@dataclasses.dataclass(frozen=True)
class PBP(Method):
    """q(w, γ, λ) = Π N(w; m, v)·Π Gamma(γ)·Gamma(λ) for a ReLU network, y ~ N(f, 1/γ), w ~ N(0, 1/(λ(fan-in + 1))), by probabilistic
    backpropagation (Hernández-Lobato and Adams 2015): the network's moments are propagated forwards, the gradients of log Z backwards.

    No learning rate and no prior scale to tune: noise_shape, noise_rate and weight_shape, weight_rate are the Gamma priors of γ and λ, as
    published. They stand in the place of the model's prior and of a learned noise's default prior; a Gaussian(InverseGamma(a, b)) noise is
    Gamma(a, b) on γ and is taken as such, and a fixed scale is kept. num_epochs: passes through the data, one row at a time in random
    order. Predictions use the noise variance E[1/γ] = β/(α − 1). Standardise x and y.
    """

    num_epochs: int = 40
    noise_shape: float = 6.0
    noise_rate: float = 6.0
    weight_shape: float = 6.0
    weight_rate: float = 6.0

    weighs: ClassVar[bool] = False  # weights are refused
    card: ClassVar[Card] = Card(
        name="Probabilistic backpropagation",
        summary="A Bayesian network without a learning rate: one pass of exact moments forwards and backwards for each row.",
        model_class="fully connected ReLU networks with Gaussian noise of one scale a column, and Gamma priors on both precisions",
        criterion="local moment matching, one row at a time",
        search="assumed-density filtering, with expectation propagation for the prior's factors after each pass",
        cost="two forward passes and a backward one for each row and epoch, in sequence; six numbers a weight",
        needs="al.BNN of al.networks.MLP with activation='relu' and al.Gaussian noise; standardised x and y",
        references=("Hernández-Lobato and Adams, Probabilistic backpropagation for scalable learning of Bayesian neural networks, 2015",),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_epochs", whole=True)
        check_positive(self, "noise_shape", "noise_rate", "weight_shape", "weight_rate")
        for name in ("noise_shape", "weight_shape"):
            if not getattr(self, name) > 1.0:
                got = f"{name}={getattr(self, name)}"
                raise MethodError(message("PBP needs a finite prior variance.", got, f"{name} > 1", f"pass e.g. {name}=6.0"))

    def build(self, target: Any) -> Algorithm:
        model = target.model
        noise = _check(model, target.temperature, (self.noise_shape, self.noise_rate))
        shapes = jax.eval_shape(model.network.init, jax.random.key(0))
        widths = np.concatenate(
            [
                np.full(int(np.prod(leaf.shape)), 1.0 / math.sqrt(shapes[path[0].key]["weight"].shape[0] + 1.0))
                for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
            ]
        )
        known = isinstance(model.likelihood.scale, (float, int))
        setting = Setting(len(model.network.hidden) + 1, target.num_data, widths, known)
        gammas = (noise, (self.weight_shape, self.weight_rate))
        return Algorithm(
            init=lambda key, start: init(key, start, setting, shapes, *gammas, model.targets()),
            phases=(
                Phase("PBP", lambda key, state, batch: step(key, state, batch, setting), self.num_epochs * target.num_data, "random", 1),
            ),
            position=lambda state: (state.mean, state.variance, state.noise),
            finish=lambda key, state, kept: _posterior(jax.tree.map(np.asarray, state), setting),
            done=lambda state: state.seen >= self.num_epochs * target.num_data,  # a stream's batches have more than one row
            watch="log_z",
            verdict=lambda result: _verdict(result, setting),
            x64=True,
            notes={"prior": _describe(*gammas, known)},
        )


def noise_variance(noise: Noise) -> Array:
    """E[1/γ] = β/(α − 1), (k,)."""
    return noise.rate / (noise.shape - 1.0)


def _check(model: Any, temperature: float, default: tuple[float, float]) -> tuple[float, float]:
    """Shape and rate of the noise precision's Gamma; (2, σ²), whose E[1/γ] is σ², where σ is known. Refuses what PBP cannot propagate, by
    name."""
    likelihood = getattr(model, "likelihood", None)
    network, prior = getattr(model, "network", None), getattr(model, "prior", None)
    if not isinstance(model, BNN) or not isinstance(network, MLP):
        wrong = f"a {type(model).__name__}" + (f" of {type(network).__name__}" if network is not None else "")
    elif network.hidden and network.activation != "relu":
        wrong = f"activation {network.activation!r}"
    elif not isinstance(likelihood, Gaussian):
        wrong = f"likelihood {likelihood!r}"
    elif not isinstance(prior, (Normal, Hierarchical)) or getattr(prior, "loc", 0.0) != 0.0:
        wrong = f"prior {prior!r}, where PBP has its own Gaussian one"
    elif temperature != 1.0:
        wrong = f"temperature {temperature}"
    elif isinstance(likelihood.scale, (float, int)):
        return 2.0, float(likelihood.scale) ** 2
    elif isinstance(likelihood.scale, InverseGamma) and likelihood.scale.concentration > 1.0:
        return likelihood.scale.concentration, likelihood.scale.rate
    elif likelihood.scale == LEARNED:
        return default
    else:
        wrong = f"noise prior {likelihood.scale!r}: use the default or InverseGamma(a, b) with a > 1"
    raise MethodError(
        message("PBP cannot propagate through this.", wrong, PBP.card.needs, "change the model, or use al.Variational() or al.MAP()")
    )


def _describe(noise: tuple[float, float], weights: tuple[float, float], known: bool) -> str:
    gamma = lambda pair: f"Gamma({pair[0]:g}, {pair[1]:g})"
    scale = f"noise scale {math.sqrt(noise[1]):g}" if known else f"noise precision ~ {gamma(noise)}"
    return f"the method's own: weights ~ N(0, 1/(λ(fan-in + 1))), λ ~ {gamma(weights)}; {scale}"


def _posterior(state: State, setting: Setting) -> GaussianPosterior:
    """Independent Gaussian weights; the noise, where it was learned, at the scale √(β/(α − 1))."""
    log_scale = 0.5 * np.log(noise_variance(state.noise))
    mean = {"network": state.mean, "likelihood": {} if setting.known else {"log_scale": log_scale}, "prior": {}}
    chosen = tuple(path.startswith("network") for path in _tree.paths(mean))
    spread = np.concatenate([np.sqrt(leaf).ravel() for leaf in jax.tree.leaves(state.variance)])
    return GaussianPosterior(mean, Diagonal(spread), chosen)


def _verdict(result: Any, setting: Setting) -> tuple[str, bool]:
    state = result.state
    if setting.num_data == 1:
        return "Only one row of data: the posterior is mostly the prior; add rows before trusting it.", False
    undone = float(np.mean(state.undone))
    scale = np.sqrt(np.mean(noise_variance(state.noise)))
    sentence = (
        f"Complete: {int(state.seen) / setting.num_data:.3g} passes, noise scale {scale:.3g}, {100 * undone:.2g} % of the updates undone."
    )
    if undone > 0.1:
        return f"{sentence} Many updates found no Gaussian: standardise x and y, or use a smaller network.", False
    return sentence, True
