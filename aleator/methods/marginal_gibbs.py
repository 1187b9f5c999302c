"""MarginalGibbs: shallow nets sampled unit by unit with the output weights integrated out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _marginal as marginal
from aleator import _tree, convergence
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.hyperpriors import InverseGamma
from aleator.loop import Algorithm
from aleator.methods import _chains as chains
from aleator.methods._method import Card, check_positive
from aleator.networks._network import activation
from aleator.posterior import Draws, Posterior
from aleator.shallow import Hierarchical, ShallowNet, log_normal, pack, spread_rows, unpack, wishart_factor

TARGET_ACCEPTANCE = 0.3  # of the random walk: near the best for a handful of dimensions
UNROLL = 8  # tries compiled in a row: a loop of small operations costs as much as they do


class Values(NamedTuple):
    """One draw, on its own scale and in the net's units. gamma (m, d); beta (q + m, k), the linear term's q rows (d or none) first; noise
    σ² (k,); mu_beta and var_beta (k,); mu_gamma (d,); factor (d, d): lower, of S_γ⁻¹."""

    gamma: Array
    beta: Array
    noise: Array
    mu_beta: Array
    var_beta: Array
    mu_gamma: Array
    factor: Array


class Rows(NamedTuple):
    """The data as the sampler needs them. x (N, d) with its leading 1; y (N, k) times root (N,) = √weight; mass Σ weight;
    square yᵀWy (k,)."""

    x: Array
    y: Array
    root: Array
    mass: Array
    square: Array


class State(NamedTuple):
    """values: the draw. position (D,): its parameters, flat. log_scale (m,): of each unit's random walk, relative to S_γ. stats and
    functions as in other samplers. number: of the sweep, negative until warm-up is over."""

    values: Values
    position: Array
    log_scale: Array
    stats: chains.Stats
    functions: Array
    number: Array


def init(key: Key, params: Tree, net: ShallowNet, layout: chains.Layout, num_warmup: int) -> State:
    """The values of a parameter tree; proposals start at 2.4/√d of S_γ's scale, cut by √m."""
    values = values_of(net, _tree.as_float64(params))
    scale = jnp.full((net.units,), math.log(2.4 / math.sqrt(net.size() * net.units)))
    now = chains.stats(jnp.zeros((), values.gamma.dtype))
    return State(values, layout.ravel(params), scale, now, jnp.zeros(layout.num_functions), jnp.asarray(-num_warmup, jnp.int32))


def step(
    key: Key, state: State, batch: Batch, net: ShallowNet, layout: chains.Layout, num_warmup: int, settings: Settings
) -> tuple[State, chains.Stats]:
    """One sweep, then the numbers about it. The random walk learns its scale from its acceptance while warm-up lasts."""
    rows = rows_of(net, batch)
    values, accepted = sweep(key, state.values, rows, net, state.log_scale, settings)
    # Robbins–Monro with steps n^−0.6: sums diverge, squares do not.
    rate = (state.number + num_warmup + 1.0) ** -0.6
    log_scale = jnp.where(state.number < 0, state.log_scale + rate * (accepted - TARGET_ACCEPTANCE), state.log_scale)
    params = params_of(net, values)
    log_density = net.log_prior(params) + log_likelihood(net, values, rows)
    now = chains.stats(log_density, jnp.mean(accepted), net.units * settings.tries, **chains.count_bad(log_density))
    functions = jnp.ravel(net.outputs(params, chains.reference(batch.x))) if len(state.functions) else state.functions
    return State(values, layout.ravel(params), log_scale, now, functions.astype(state.functions.dtype), state.number + 1), now


class Settings(NamedTuple):
    """tries: proposals per unit and sweep. jump: share of them drawn from N(μ_γ, S_γ) instead of near the unit. hastings: whether the
    ratio g(γ)/g(γ̃) enters, which only tests switch off."""

    tries: int = 8
    jump: float = 0.1
    hastings: bool = True


def sweep(key: Key, values: Values, rows: Rows, net: ShallowNet, log_scale: Array, settings: Settings) -> tuple[Values, Array]:
    """γ₁, …, γ_m | ν with β integrated out; then β | γ, ν; then ν | β, γ. In this order β belongs to the new γ when ν is drawn from it.
    Returns the acceptance probability of each unit's walk, (m,), too."""
    key_units, key_beta, key_hyper = jax.random.split(key, 3)
    gamma, now, design, accepted = move_units(key_units, values, rows, net, log_scale, settings)
    values = values._replace(gamma=gamma, beta=marginal.draw(key_beta, now))
    return draw_hyper(key_hyper, values, design, rows, net), accepted


def move_units(
    key: Key, values: Values, rows: Rows, net: ShallowNet, log_scale: Array, settings: Settings
) -> tuple[Array, marginal.Conditional, Array, Array]:
    """For each unit: γ̃ⱼ ~ g, accepted with p(D|γ̃,ν) p(γ̃ⱼ|ν) g(γⱼ|γ̃ⱼ) / p(D|γ,ν) p(γⱼ|ν) g(γ̃ⱼ|γⱼ), β integrated out.

    The factor of A holds the units in a ring: the unit whose turn it is comes first, is taken out, and goes back in at the end, so a try
    costs O(N m + m²), a sweep O(N m² + m³). Returns γ, the conditional of β, the design (q + m, N) and acceptance probabilities (m,).
    """
    psi = activation(net.activation)
    (m, d), q, tries = values.gamma.shape, net.size() * net.linear_term, settings.tries
    dtype = values.gamma.dtype
    key_step, key_take, key_jump = jax.random.split(key, 3)
    z = jax.random.normal(key_step, (m, tries, d), dtype)
    levels = jnp.log(jax.random.uniform(key_take, (m, tries), dtype))
    jumps = jax.random.uniform(key_jump, (m, tries), dtype) < settings.jump
    steps = spread_rows(values.factor, z)
    mean, variance = prior_of_beta(values, net)

    columns = lambda gamma: psi(gamma @ rows.x.T) * rows.root  # (…, d) → (…, N)
    linear = (rows.x.T * rows.root)[:q]
    design = jnp.concatenate([linear, columns(values.gamma)])
    stats = marginal.Moments(design @ design.T, design @ rows.y, rows.square, rows.mass)
    whole = marginal.condition(stats, values.noise, mean, variance)
    log_prior = lambda gamma: -0.5 * jnp.sum(((gamma - values.mu_gamma) @ values.factor) ** 2)

    def visit(j: Array, carry: tuple) -> tuple:
        gammas, design, now, accepted = carry
        left = marginal.remove(now, q)
        own_mean, own_variance = mean[q], variance[q]

        def weigh(h: Array) -> tuple[marginal.Border, Array]:
            """The border of column h (N,) against the others in ring order, and log p(D | …) up to what they give."""
            along = design @ h
            others = jnp.concatenate([along[:q], jnp.roll(along[q:], -(j + 1))[:-1]])
            new = marginal.border(left, others, h @ h, h @ rows.y, values.noise, own_mean, own_variance)
            return new, marginal.gain(new, own_mean, own_variance)

        def attempt(t: Array, carry: tuple) -> tuple:
            (gamma, h, new, worth), total, walks = carry
            jump, step = jumps[j, t], steps[j, t]
            tried = jnp.where(jump, values.mu_gamma + step, gamma + jnp.exp(log_scale[j]) * step)
            h_tried = columns(tried)
            new_tried, worth_tried = weigh(h_tried)
            before, after = log_prior(gamma), log_prior(tried)
            # The walk is symmetric; a jump is proposed from the prior itself: g(γ)/g(γ̃) = p(γ)/p(γ̃).
            proposal = jnp.where(jump & settings.hastings, before - after, 0.0)
            ratio = worth_tried + after - worth - before + proposal
            ratio = jnp.where(jnp.isnan(ratio), -jnp.inf, ratio)
            kept = (gamma, h, new, worth)
            kept = jax.tree.map(lambda new, old: jnp.where(levels[j, t] < ratio, new, old), (tried, h_tried, new_tried, worth_tried), kept)
            return kept, total + jnp.where(jump, 0.0, jnp.minimum(1.0, jnp.exp(ratio))), walks + jnp.where(jump, 0.0, 1.0)

        h, zero = design[q + j], jnp.zeros((), dtype)
        first = ((gammas[j], h, *weigh(h)), zero, zero)
        (gamma, h, new, _), total, walks = jax.lax.fori_loop(0, tries, attempt, first, unroll=min(tries, UNROLL))
        share = jnp.where(walks > 0, total / jnp.maximum(walks, 1.0), TARGET_ACCEPTANCE)  # jumps teach nothing
        return gammas.at[j].set(gamma), design.at[q + j].set(h), marginal.append(left, new), accepted.at[j].set(share)

    gamma, design, now, accepted = jax.lax.fori_loop(0, m, visit, (values.gamma, design, whole, jnp.zeros(m, dtype)))
    return gamma, now, design, accepted


def draw_hyper(key: Key, values: Values, design: Array, rows: Rows, net: ShallowNet) -> Values:
    """ν | β, γ, y: noise and spreads are gamma, means normal, S_γ⁻¹ Wishart; what the model fixes stays."""
    (m, d), k = values.gamma.shape, values.noise.shape[0]
    q = len(values.beta) - m
    dtype = values.gamma.dtype
    key_gamma, key_normal = jax.random.split(key)
    likelihood: Any = net.likelihood
    prior: Any = net.prior
    noise = likelihood.scale
    learned, hierarchy = isinstance(noise, InverseGamma), isinstance(prior, Hierarchical)
    # Shapes of all gamma draws are known beforehand: one call.
    beta, gamma = values.beta[q:], values.gamma
    shapes = [jnp.full((k,), noise.concentration) + 0.5 * rows.mass] if learned else []
    if hierarchy:
        c = prior.constants(m, d)
        shapes += [jnp.full((k,), 0.5 * (c.c_beta + m)), jnp.asarray(0.5 * (c.c_gamma + m - np.arange(d)))]
    if not shapes:
        return values
    drawn = gammas(key_gamma, jnp.concatenate(shapes).astype(dtype))
    if learned:
        residual = rows.y - design.T @ values.beta
        rate = noise.rate + 0.5 * jnp.sum(residual**2, axis=0)
        values = values._replace(noise=rate / drawn[:k])
        drawn = drawn[k:]
    if not hierarchy:
        return values
    z = jax.random.normal(key_normal, (k + d + d * d,), dtype)
    return values._replace(**hierarchy_given(z, drawn[:k], drawn[k:], c, gamma, beta, jnp.ones(m, bool), values.var_beta, values.factor))


def hierarchy_given(
    z: Array, spreads: Array, degrees: Array, prior: Any, gamma: Array, beta: Array, active: Array, var_beta: Array, factor: Array
) -> dict[str, Array]:
    """μ_β, σ_β², μ_γ and the factor of S_γ⁻¹ given the active units' β (m, k) and γ (m, d), in turn from their conditionals: normal, inverse
    gamma, normal, Wishart. z (k + d + d²,) standard normals; spreads (k,) and degrees (d,): standard gamma draws of the shapes
    ½(c_b + number) and ½(c_γ + number − i)."""
    d, k, number, kept = gamma.shape[1], beta.shape[1], jnp.sum(active).astype(gamma.dtype), active[:, None]
    precision = 1.0 / prior.A_beta + number / var_beta
    total = jnp.sum(jnp.where(kept, beta, 0.0), axis=0)
    mu_beta = (prior.a_beta / prior.A_beta + total / var_beta) / precision + z[:k] / jnp.sqrt(precision)
    square = jnp.sum(jnp.where(kept, (beta - mu_beta) ** 2, 0.0), axis=0)
    inverse = np.linalg.inv(prior.A_gamma)
    inner = factor @ factor.T
    right = jnp.asarray(inverse @ prior.a_gamma) + inner @ jnp.sum(jnp.where(kept, gamma, 0.0), axis=0)
    lower = jnp.linalg.cholesky(jnp.asarray(inverse) + number * inner)
    mu_gamma = marginal.solve(lower, marginal.solve(lower, right) + z[k : k + d], transposed=True)
    away = jnp.where(kept, gamma - mu_gamma, 0.0)
    scatter = jnp.asarray(prior.c_gamma * prior.C_gamma) + away.T @ away
    return {
        "mu_beta": mu_beta,
        "var_beta": 0.5 * (prior.c_beta * prior.C_beta + square) / spreads,
        "mu_gamma": mu_gamma,
        "factor": wishart_factor(2.0 * degrees, z[k + d :].reshape(d, d), scatter),
    }


@dataclasses.dataclass(frozen=True)
class MarginalGibbs(chains.ChainMethod):
    """The marginalised Gibbs–Metropolis sampler of shallow nets (E2): each unit's γⱼ moves with β integrated out, then β is drawn exactly,
    then the hyper-parameters from their conditionals.

    tries: proposals per unit and sweep, a share `jump` of them from N(μ_γ, S_γ), the others a random walk whose scale is learned in the
    warm-up. num_samples draws are kept per chain, one in every `thin` sweeps. Runs in float64. The deck draws β first, which does not
    leave the posterior invariant: ν would then be drawn from a β that belongs to other units.
    """

    num_samples: int = 2000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    tries: int = 8
    jump: float = 0.1
    storage: str = "auto"

    precision: ClassVar[str] = "float64"
    uneven: ClassVar[bool] = False
    card: ClassVar[Card] = Card(
        name="MarginalGibbs",
        summary="The sampler for shallow nets: exact, without gradients, many times faster than general ones.",
        model_class="al.shallow.ShallowNet: one hidden layer, Gaussian noise, normal or hierarchical prior",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="Metropolis on one hidden unit at a time with all output weights integrated out; exact draws of the rest",
        cost="O(N m² + m³) per sweep over m units",
        needs="ShallowNet with fixed or inverse-gamma noise, all the data in memory",
        references=(
            "Müller and Ríos Insua, Issues in Bayesian analysis of neural network models, 1998",
            "Gallego and Ríos Insua, Current advances in neural networks, 2022",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        check_positive(self, "tries", whole=True)
        if not 0.0 <= self.jump < 1.0:
            raise MethodError(message("jump is a share of the proposals.", self.jump, "a number in [0, 1)", "pass e.g. 0.1"))

    def build(self, target: Any) -> Algorithm:
        net = check_net(self, target)
        settings = Settings(self.tries, self.jump)
        with jax.enable_x64(True):
            layout = chains.flat_layout(target)

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            return Draws(layout.unravel_all(kept["position"]), num_chains=self.num_chains)

        move = lambda key, state, batch: step(key, state, batch, net, layout, self.num_warmup, settings)
        return Algorithm(
            init=lambda key, params: init(key, params, net, layout, self.num_warmup),
            phases=self.phases(move, "full"),
            position=lambda state: layout.unravel(state.position),
            finish=finish,
            keep=lambda state, info: self.kept(state.position, state.functions, state.stats, state.number),
            members=self.num_chains,
            watch="log_density",
            verdict=lambda result: convergence.verdict(result, self, layout.names, True),
            x64=True,
        )


def check_net(method: Any, target: Any) -> ShallowNet:
    """Refuse anything whose output weights cannot be integrated out, and say which part is in the way."""
    net = target.model
    if not isinstance(net, ShallowNet):
        wrong = "a bare log density" if net is None else f"a {type(net).__name__}"
    elif not isinstance(net.likelihood.scale, (int, float, InverseGamma)):  # type: ignore[attr-defined]
        wrong = f"noise {net.likelihood!r}"
    elif target.temperature != 1.0:
        wrong = f"temperature {target.temperature}"
    else:
        return net
    needs = "al.shallow.ShallowNet with fixed or InverseGamma noise at temperature 1"
    raise MethodError(message(f"{type(method).__name__} cannot integrate the weights out.", wrong, needs, "use al.NUTS()"))


def rows_of(net: ShallowNet, batch: Batch) -> Rows:
    """All the data, in the net's units and in double precision."""
    x, y = _tree.as_float64((net.inputs(_tree.as_float64(batch.x)), _tree.as_float64(batch.y)))
    weight = jnp.ones(len(x), x.dtype) if batch.weight is None else batch.weight.astype(x.dtype)
    root = jnp.sqrt(weight)
    y = net.targets_of(y) * root[:, None]
    return Rows(x, y, root, jnp.sum(weight), jnp.sum(y**2, axis=0))


def prior_of_beta(values: Values, net: ShallowNet) -> tuple[Array, Array]:
    """Mean and variance of (linear term, β), (q + m, k) each. In the ring all units share theirs."""
    m, k = net.units, values.noise.shape[0]
    mean, variance = (jnp.broadcast_to(value, (m, k)) for value in (values.mu_beta, values.var_beta))
    if not net.linear_term:
        return mean, variance
    if isinstance(net.prior, Hierarchical):
        loc, spread = 0.0, net.prior.A_linear
    else:
        loc, spread = net.prior.loc, fixed_scales(net)["linear"] ** 2  # type: ignore[attr-defined]
    block = jnp.ones((net.size(), k), mean.dtype)
    return jnp.concatenate([loc * block, mean]), jnp.concatenate([spread * block, variance])


def fixed_scales(net: ShallowNet) -> dict[str, float]:
    """Prior scales of gamma, beta and linear under an `al.Normal` prior."""
    template = jax.eval_shape(net.init_weights, jax.random.key(0))
    return net.prior.scales(template, net.fan_in(template))  # type: ignore[attr-defined]


def values_of(net: ShallowNet, params: Tree) -> Values:
    """A parameter tree of the net as the sampler holds it."""
    weights, hyper = params["network"], params["prior"]
    beta = jnp.concatenate([weights["linear"], weights["beta"]]) if net.linear_term else weights["beta"]
    d, k, dtype = net.size(), beta.shape[1], beta.dtype
    noise = jnp.broadcast_to(net.likelihood.constrain(params["likelihood"])["scale"].astype(dtype) ** 2, (k,))
    if isinstance(net.prior, Hierarchical):
        spread = jnp.exp(2.0 * hyper["log_sigma_beta"])
        return Values(weights["gamma"], beta, noise, hyper["mu_beta"], spread, hyper["mu_gamma"], unpack(hyper["factor_gamma"]))
    scales, loc = fixed_scales(net), net.prior.loc  # type: ignore[attr-defined]
    full = lambda value, shape: jnp.full(shape, value, dtype)
    return Values(
        weights["gamma"], beta, noise, full(loc, k), full(scales["beta"] ** 2, k), full(loc, d), jnp.eye(d, dtype=dtype) / scales["gamma"]
    )


def params_of(net: ShallowNet, values: Values) -> Tree:
    """The inverse of `values_of`."""
    q = len(values.beta) - len(values.gamma)
    network = {"gamma": values.gamma, "beta": values.beta[q:]} | ({"linear": values.beta[:q]} if net.linear_term else {})
    noise = {"log_scale": 0.5 * jnp.log(values.noise)} if isinstance(net.likelihood.scale, InverseGamma) else {}  # type: ignore[attr-defined]
    hyper = {}
    if isinstance(net.prior, Hierarchical):
        hyper = {
            "mu_beta": values.mu_beta,
            "log_sigma_beta": 0.5 * jnp.log(values.var_beta),
            "mu_gamma": values.mu_gamma,
            "factor_gamma": pack(values.factor),
        }
    return {"network": network, "likelihood": noise, "prior": hyper}


def log_likelihood(net: ShallowNet, values: Values, rows: Rows) -> Array:
    """Σ weight·log p(y | x, values), in the units of y."""
    q = len(values.beta) - len(values.gamma)
    hidden = activation(net.activation)(rows.x @ values.gamma.T)
    fitted = (hidden @ values.beta[q:] + rows.x[:, :q] @ values.beta[:q]) * rows.root[:, None]
    residual = jnp.sum(log_normal(rows.y, fitted, jnp.sqrt(values.noise)))
    # √weight·residuals have the right squares, but were normalised as N rows instead of Σ weight.
    missing = (rows.mass - len(rows.y)) * jnp.sum(-0.5 * jnp.log(2.0 * math.pi * values.noise))
    return residual + missing - rows.mass * np.sum(np.log(net.y_scale))


ATTEMPTS = 12  # Marsaglia and Tsang accept at least 95 % of proposals: 0.05¹² = 2·10⁻¹⁶


def gammas(key: Key, shape: Array) -> Array:
    """Gamma(shape, 1) draws, one for each entry of shape (n,), by Marsaglia and Tsang (2000) with all attempts made at once: a rejection
    loop of its own for each entry would cost more than the rest of a sweep. Shapes below 1 are raised by 1 and scaled by U^{1/shape}."""
    key_normal, key_uniform, key_boost = jax.random.split(key, 3)
    raised = jnp.where(shape < 1.0, shape + 1.0, shape)
    z = jax.random.normal(key_normal, (ATTEMPTS, len(shape)), shape.dtype)
    u = jnp.log(jax.random.uniform(key_uniform, (ATTEMPTS, len(shape)), shape.dtype))
    level = raised - 1.0 / 3.0
    v = (1.0 + z / jnp.sqrt(9.0 * level)) ** 3
    good = v > 0.0
    safe = jnp.where(good, v, 1.0)
    good &= u < 0.5 * z**2 + level * (1.0 - safe + jnp.log(safe))
    first = jnp.argmax(good, axis=0)
    drawn = level * jnp.take_along_axis(safe, first[None], axis=0)[0]
    boost = jnp.log1p(-jax.random.uniform(key_boost, shape.shape, shape.dtype)) / shape
    return jnp.where(shape < 1.0, drawn * jnp.exp(boost), drawn)
