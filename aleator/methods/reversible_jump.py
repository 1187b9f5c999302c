"""Reversible jump: the number of hidden units, or the set of regressors, is itself unknown and sampled with the rest (E5)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree, convergence, selection
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.hyperpriors import Hyperprior, InverseGamma
from aleator.loop import Algorithm
from aleator.methods._chains import ChainMethod, Stats, check_target, num_functions, reference, stats
from aleator.methods._method import Card, check_positive
from aleator.methods._units import Given, Noise, Units, assemble, birth_death, draw_coefficients, draw_noise, move_units, split_merge
from aleator.methods.marginal_gibbs import fixed_scales, gammas, hierarchy_given, rows_of
from aleator.model import LinearModel
from aleator.networks._network import activation
from aleator.posterior import Draws
from aleator.shallow import Hierarchical, ShallowNet, pack, unpack


class State(NamedTuple):
    """params: of the model, with β = 0 and γ = 0 in empty slots (weights = 0 for excluded regressors). active (M,): the mask.
    stats (their log_density is log p(D | γ, m, ν)), functions (F,), number: as for all chains."""

    params: Tree
    active: Array
    stats: Stats
    functions: Array
    number: Array


# ---- hyper-parameters and whole sweeps -----------------------------------------------------------------------------------------------


def given_by(model: ShallowNet, batch: Batch, params: Tree, log_size: Array) -> Given:
    """Data in the net's units, and the prior at the hyper-parameters of `params`."""
    rows = rows_of(model, batch)
    root = rows.root[:, None]
    design = root * rows.x if model.linear_term else jnp.zeros((len(rows.x), 0))
    noise = jnp.broadcast_to(model.likelihood.constrain(params["likelihood"])["scale"] ** 2, (model.targets(),)).astype(rows.y.dtype)
    return Given(rows.x, root, design, rows.y, rows.square, rows.mass, noise, *prior_at(model, params["prior"]), log_size)


def prior_at(model: ShallowNet, hyper: dict) -> tuple[Array, Array, Array, Array]:
    """(loc, variance (P, K) of the coefficients, mean (r,) and Cholesky factor (r, r) of the covariance of γ)."""
    size, k, linear = model.size(), model.targets(), model.size() * model.linear_term
    full = lambda top, below: jnp.concatenate([jnp.broadcast_to(top, (model.units, k)), jnp.broadcast_to(below, (linear, k))])
    if isinstance(model.prior, Hierarchical):
        loc, variance = full(hyper["mu_beta"], 0.0), full(jnp.exp(2.0 * hyper["log_sigma_beta"]), model.prior.A_linear)
        # S_γ = L⁻ᵀL⁻¹: an upper factor; a lower one is needed for triangular solves.
        inverse = solve_triangular(unpack(hyper["factor_gamma"]), jnp.eye(size), lower=True)
        return loc, variance, hyper["mu_gamma"], jnp.linalg.cholesky(inverse.T @ inverse)
    loc, scale = float(model.prior.loc), fixed_scales(model)  # type: ignore[attr-defined]
    variance = full(scale["beta"] ** 2, scale.get("linear", 1.0) ** 2)
    return full(loc, loc), variance, jnp.full(size, loc), scale["gamma"] * jnp.eye(size)


def gamma_shapes(model: ShallowNet, number: Array, mass: Array) -> tuple[Array, ...]:
    """Shapes of the gamma conditionals given m = `number`: of σ⁻² (K,), of σ_β⁻² (K,), and half the degrees of the χ² of S_γ⁻¹ (r,); empty
    where there is nothing to draw."""
    k, size = model.targets(), model.size()
    noise, prior = model.likelihood.scale, model.prior  # type: ignore[attr-defined]
    first = jnp.full(k if isinstance(noise, InverseGamma) else 0, getattr(noise, "concentration", 0.0) + 0.5 * mass)
    if not isinstance(prior, Hierarchical):
        return first, jnp.zeros(0), jnp.zeros(0)
    constants = prior.constants(model.units, size)
    return first, jnp.full(k, 0.5 * (constants.c_beta + number)), 0.5 * (constants.c_gamma + number - jnp.arange(size))


def draw_gammas(key: Key, shapes: tuple[Array, ...]) -> list[Array]:
    """log of Gamma(shape, 1) draws, all in one call."""
    sizes = np.cumsum([len(shape) for shape in shapes])
    together = jnp.concatenate(shapes)
    return jnp.split(jnp.log(gammas(key, together)) if len(together) else together, sizes[:-1])


def move_hyper(key: Key, model: ShallowNet, hyper: dict, gamma: Array, beta: Array, active: Array, spreads: Array, degrees: Array) -> dict:
    """ν | β, γ from its conditionals (`hierarchy_given`), over the active units only. spreads (K,) and degrees
    (r,): logs of the standard gamma draws for them."""
    if not isinstance(model.prior, Hierarchical):
        return hyper
    k, size = beta.shape[1], gamma.shape[1]
    z = jax.random.normal(key, (k + size + size**2,), gamma.dtype)
    var_beta, factor = jnp.exp(2.0 * hyper["log_sigma_beta"]), unpack(hyper["factor_gamma"])
    constants = model.prior.constants(*gamma.shape)
    moved = hierarchy_given(z, jnp.exp(spreads), jnp.exp(degrees), constants, gamma, beta, active, var_beta, factor)
    return {
        "mu_beta": moved["mu_beta"],
        "log_sigma_beta": 0.5 * jnp.log(moved["var_beta"]),
        "mu_gamma": moved["mu_gamma"],
        "factor_gamma": pack(moved["factor"]),
    }


def move_noise(key: Key, prior: Any, raw: dict, square: Array, mass: Array, level: Array) -> dict:
    """σ | residuals, square (K,) their sum of squares: inverse gamma from level = log of a standard gamma draw, or random-walk steps on
    log σ for other priors."""
    if not isinstance(prior, Hyperprior):
        return raw
    if isinstance(prior, InverseGamma):
        return {"log_scale": 0.5 * (jnp.log(prior.rate + 0.5 * square) - level)}
    width = 2.4 / jnp.sqrt(2.0 * (mass + 1.0))
    log_density = lambda u: prior.log_prob_unconstrained(u) - mass * u - 0.5 * square * jnp.exp(-2.0 * u)

    def one(now: Array, key: Key) -> tuple[Array, None]:
        key_step, key_accept = jax.random.split(key)
        then = now + width * jax.random.normal(key_step, now.shape, now.dtype)
        accept = jnp.log(jax.random.uniform(key_accept, now.shape, now.dtype)) < log_density(then) - log_density(now)
        return jnp.where(accept, then, now), None

    return {"log_scale": selection.repeat(one, raw["log_scale"], key, 3)[0]}


def sweep(key: Key, model: ShallowNet, batch: Batch, params: Tree, active: Array, log_size: Array, jumps: int, tries: int) -> tuple:
    """One sweep: `jumps` births or deaths and as many splits or merges, every γ_j, all with the coefficients integrated out; then the
    coefficients; then σ and ν from their conditionals. → (params, active, log p(D | γ, m, ν), acceptance of γ, acceptance of jumps)."""
    key_jumps, key_units, key_beta, key_gammas, key_noise, key_hyper = jax.random.split(key, 6)
    psi = activation(model.activation)
    given = given_by(model, batch, params, log_size)
    units = assemble(given, psi, params["network"]["gamma"], active)

    def jump(units: Units, noise: Noise) -> tuple[Units, Array]:
        units, births = birth_death(noise, given, psi, units)
        units, splits = split_merge(noise, given, psi, units)
        return units, 0.5 * (births + splits)

    units, jumped = jax.lax.scan(jump, units, draw_noise(key_jumps, jumps, *units.gamma.shape))
    units, acceptance = move_units(key_units, given, psi, units, tries)
    coefficients = draw_coefficients(key_beta, given, units)
    hidden = len(units.active)
    network = {"gamma": units.gamma, "beta": jnp.where(units.active[:, None], coefficients[:hidden], 0.0)}
    network |= {"linear": coefficients[hidden:]} if model.linear_term else {}
    square = jnp.sum((given.targets - units.columns @ coefficients) ** 2, axis=0)
    level, spreads, degrees = draw_gammas(key_gammas, gamma_shapes(model, jnp.sum(units.active), given.mass))
    moved = {
        "network": network,
        "likelihood": move_noise(key_noise, model.likelihood.scale, params["likelihood"], square, given.mass, level),  # type: ignore[attr-defined]
        "prior": move_hyper(key_hyper, model, params["prior"], units.gamma, network["beta"], units.active, spreads, degrees),
    }
    return moved, units.active, units.log_marginal, acceptance, jnp.mean(jumped)


def sort_units(network: dict, active: Array) -> dict:
    """The same net with its active units first, by increasing weight of the first input: the draw under an order constraint."""
    order = jnp.argsort(jnp.where(active, network["gamma"][:, min(1, network["gamma"].shape[1] - 1)], jnp.inf))
    return network | {name: network[name][order] for name in ("gamma", "beta")}


@dataclasses.dataclass(frozen=True)
class ReversibleJump(ChainMethod):
    """The posterior over architectures and their weights together (E5), on `al.shallow.ShallowNet` or `al.LinearModel`.

    ShallowNet: y = x'a + Σ_{j≤m} βⱼ ψ(x'γⱼ) + ε with m random, at most the net's `units`. prior: geometric through the indicators,
    P(dⱼ = 1 | dⱼ₋₁ = 1) = alpha, by default; or log probabilities of m = 0, 1, …, as a sequence or a function. Births and deaths, splits and
    merges and the moves of each γⱼ integrate all coefficients out; these, the noise and the hyper-parameters then come from their
    conditionals. A draw is a full parameter tree with β = 0 and γ = 0 in empty slots; `units(fit)` gives P(m | D). Any of m + 1 units may
    be the one that does nothing, which makes p(D | m) fall slowly beyond the truth: P(m | D) depends on alpha, the functions hardly do.

    LinearModel with Gaussian noise and a Normal prior: each regressor is in or out, all 2^p patterns equally likely by default, or prior as
    log probabilities of the number that is in. Weights are 0 where excluded; `al.selection.inclusion(fit)` gives P(in | D).

    jumps: of each kind per sweep. tries: steps of each γⱼ per sweep. ordered: list the units of a draw by increasing weight of the first
    input. num_samples sweeps are kept per chain, one in every `thin`, in the precision `storage`; all runs in float64.
    """

    num_samples: int = 2000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    prior: Any = None
    alpha: float = 0.2
    jumps: int = 2
    tries: int = 2
    ordered: bool = True
    storage: str = "auto"

    precision: ClassVar[str] = "float64"
    card: ClassVar[Card] = Card(
        name="Reversible jump",
        summary="How many hidden units, or which regressors? Samples the architecture together with its weights.",
        model_class="al.shallow.ShallowNet with a random number of units; al.LinearModel with random regressors",
        criterion="invariance of the joint posterior over architectures and weights: exact as the number of draws grows",
        search="births and deaths, splits and merges, with the output weights integrated out",
        cost="O(N m² + m³) per unit and sweep",
        needs="Gaussian noise, all the data in memory",
        references=(
            "Green, Reversible jump Markov chain Monte Carlo computation and Bayesian model determination, 1995",
            "Müller and Ríos Insua, Issues in Bayesian analysis of neural network models, 1998",
            "Ríos Insua and Müller, Feedforward neural networks for nonparametric regression, 1998",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        check_positive(self, "jumps", "tries", whole=True)
        if not 0.0 < self.alpha < 1.0:
            raise MethodError(message("alpha is a probability.", self.alpha, "a number between 0 and 1", "pass e.g. alpha=0.2"))
        if self.prior is not None and not callable(self.prior):
            object.__setattr__(self, "prior", tuple(float(value) for value in self.prior))

    def build(self, target: Any) -> Algorithm:
        check_target(self, target)
        if target.temperature != 1.0:
            raise MethodError(
                message(
                    "ReversibleJump samples the Bayesian posterior only.",
                    f"temperature {target.temperature}",
                    "1.0",
                    "leave temperature out",
                )
            )
        if isinstance(target.model, ShallowNet):
            return self._algorithm(target, *_net(self, target.model))
        return self._algorithm(target, *_regressors(self, selection.check_selection(target.model)))

    def _algorithm(self, target: Any, begin: Callable, advance: Callable, listed: Callable) -> Algorithm:
        """begin(key, params) → (params, active); advance(key, params, active, batch) → (params, active, log marginal, acceptance);
        listed(params, active) → params as they are kept."""
        model = target.model
        size = num_functions(target)

        def init(key: Key, start: Tree) -> State:
            params, active = begin(key, _tree.as_float64(start))
            zero = jnp.zeros(())
            return State(params, active, stats(zero), jnp.zeros(size), jnp.asarray(-self.num_warmup, jnp.int32))

        def step(key: Key, state: State, batch: Batch) -> tuple[State, Stats]:
            params, active, value, acceptance = advance(key, state.params, state.active, batch)
            now = stats(value, acceptance, depth=0)
            functions = jnp.ravel(model.outputs(params, reference(_tree.as_float64(batch.x))))
            return State(params, active, now, functions, state.number + 1), now

        def keep(state: State, info: Any) -> tuple[dict[str, Any], Array]:
            params = listed(state.params, state.active)
            params = params if self.storage == "auto" else jax.tree.map(lambda leaf: leaf.astype(self.storage), params)
            value = {"params": params, "size": jnp.sum(state.active), "functions": state.functions, "stats": state.stats}
            return value, (state.number > 0) & (state.number % self.thin == 0)

        def finish(key: Key, state: State, kept: Any) -> Draws:
            flat = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), kept["params"])
            return Draws(flat, num_chains=self.num_chains)

        return Algorithm(
            init=init,
            phases=self.phases(step, "full"),
            position=lambda state: state.params,
            finish=finish,
            keep=keep,
            members=self.num_chains,
            watch="log_density",
            verdict=lambda result: _verdict(result, self),
            x64=True,
        )


def units(fit: Any) -> np.ndarray:
    """P(m = 0, 1, …, units | D) of a ShallowNet fitted by `ReversibleJump`, (units + 1,)."""
    number = active_draws(fit).sum(axis=-1)
    return np.bincount(number.ravel(), minlength=fit.model.units + 1) / number.size


def active_draws(fit: Any) -> np.ndarray:
    """Which slots hold a unit in each draw, (chains, n, units): those with output weights."""
    if not isinstance(fit.model, ShallowNet) or not isinstance(fit.method, ReversibleJump):
        got = f"{type(fit.model).__name__} by {type(fit.method).__name__}"
        raise MethodError(message("This fit has no random number of units.", got, "ShallowNet by ReversibleJump", "fit it so"))
    beta = np.asarray(fit.posterior.params["network"]["beta"])
    return np.any(beta != 0.0, axis=-1).reshape(fit.posterior.num_chains, -1, beta.shape[1])


def of_size(fit: Any, number: int) -> dict[str, np.ndarray]:
    """{"gamma" (S, m, r), "beta" (S, m, K)}: the units of the S draws with exactly m = `number` of them, in the net's units, sorted by the
    weight of the first input, so that labels mean the same in every draw."""
    active = active_draws(fit).reshape(-1, fit.model.units)
    chosen = np.flatnonzero(active.sum(axis=1) == number)
    network = {name: np.asarray(fit.posterior.params["network"][name])[chosen] for name in ("gamma", "beta")}
    order = np.argsort(np.where(active[chosen], network["gamma"][:, :, 1], np.inf), axis=1)[:, :number, None]
    return {name: np.take_along_axis(leaf, order, axis=1) for name, leaf in network.items()}


def log_sizes(prior: Any, most: int, alpha: float) -> np.ndarray:
    """log p(m) for m = 0 … most, normalised: geometric, P(dⱼ = 1 | dⱼ₋₁ = 1) = alpha, cut at `most`; or as the user gave it."""
    if prior is None:
        values = np.arange(most + 1) * math.log(alpha) + np.where(np.arange(most + 1) < most, math.log1p(-alpha), 0.0)
    elif callable(prior):
        values = np.array([float(prior(m)) for m in range(most + 1)])
    else:
        values = np.asarray(prior, float)
    if values.shape != (most + 1,) or np.any(np.isnan(values)) or not np.any(np.isfinite(values)) or np.any(values == np.inf):
        raise MethodError(
            message(
                "ReversibleJump(prior=…) cannot be used.",
                values.tolist(),
                f"{most + 1} log probabilities, of 0 … {most}",
                "pass one for each size",
            )
        )
    return values - np.logaddexp.reduce(values)


def _net(method: ReversibleJump, model: ShallowNet) -> tuple[Callable, Callable, Callable]:
    log_size = log_sizes(method.prior, model.units, method.alpha)

    def begin(key: Key, params: Tree) -> tuple[Tree, Array]:
        """As many of the given units as the prior says, so that chains begin apart; all of them where some are empty already."""
        given = jnp.any(params["network"]["beta"] != 0.0, axis=1)
        drawn = jnp.arange(model.units) < jax.random.categorical(key, jnp.asarray(log_size))
        active = jnp.where(jnp.all(given), drawn, given)
        blank = lambda leaf: jnp.where(active[:, None], leaf, 0.0)
        return params | {"network": params["network"] | {name: blank(params["network"][name]) for name in ("gamma", "beta")}}, active

    def advance(key: Key, params: Tree, active: Array, batch: Batch) -> tuple:
        params, active, value, acceptance, _ = sweep(key, model, batch, params, active, jnp.asarray(log_size), method.jumps, method.tries)
        return params, active, value, acceptance

    def listed(params: Tree, active: Array) -> Tree:
        return params | {"network": sort_units(params["network"], active)} if method.ordered else params

    return begin, advance, listed


def _regressors(method: ReversibleJump, model: LinearModel) -> tuple[Callable, Callable, Callable]:
    p, learned = model.num_features, isinstance(model.likelihood.scale, Hyperprior)  # type: ignore[attr-defined]
    log_size = None if method.prior is None else log_sizes(method.prior, p, method.alpha)

    def begin(key: Key, params: Tree) -> tuple[Tree, Array]:
        """The given pattern, or a random one where all weights are zero."""
        given = jnp.any(params["network"]["weight"] != 0.0, axis=0)
        number = jax.random.randint(key, (), 0, p + 1) if log_size is None else jax.random.categorical(key, jnp.asarray(log_size))
        return params, jnp.where(jnp.any(given), given, jnp.arange(p) < number)

    def advance(key: Key, params: Tree, active: Array, batch: Batch) -> tuple:
        key_sweep, key_noise, key_weights = jax.random.split(key, 3)
        given = selection.problem(model, batch, log_size)
        scaled, scale = model.scaled_by_noise, model.likelihood.constrain(params["likelihood"])["scale"]
        log_noise = jnp.broadcast_to(jnp.log(scale), (model.targets(),)).astype(given.stats.cross.dtype)
        active, value, acceptance = selection.sweep(key_sweep, given, active, log_noise, scaled, method.jumps * p)
        likelihood = params["likelihood"]
        if learned:
            log_noise, value = selection.move_noise(key_noise, given, active, log_noise, scaled, model.likelihood.scale, value)  # type: ignore[attr-defined]
            likelihood = {"log_scale": log_noise}
        weights = selection.draw_weights(key_weights, given, active, log_noise, scaled)
        return {"network": {"weight": weights}, "likelihood": likelihood, "prior": params["prior"]}, active, value, acceptance

    return begin, advance, lambda params, active: params


def _verdict(result: Any, method: ReversibleJump) -> tuple[str, bool, dict[str, Any]]:
    """Judged by functions and by the size; what never changes (a regressor always in, a fixed noise) is no fault here."""
    kept = result.kept
    functions, size = np.asarray(kept["functions"]), np.asarray(kept["size"], float)[..., None]
    position = np.concatenate([functions, size], axis=-1)
    moved = np.flatnonzero(np.any(np.ptp(position, axis=1) > 0.0, axis=0))
    judged = result._replace(kept={"position": position[..., moved], "functions": position[..., moved], "stats": kept["stats"]})
    names = [f"function[{i}]" if i < functions.shape[-1] else "size" for i in moved]
    sentence, healthy, health = convergence.verdict(judged, method, names, True)
    return sentence, healthy, health | {"sizes": np.bincount(size.astype(int).ravel()).tolist()}
