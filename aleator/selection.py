"""Which regressors does a linear model need? The posterior over the 2^p inclusion patterns, weights integrated out.

y = Σ_j d_j w_j φ_j(x) + ε, d ∈ {0, 1}^p, w_j ~ N(m₀, s²), ε ~ N(0, σ²). Given d and σ the weights integrate out in closed form, so a
pattern has a marginal likelihood p(D | d, σ), and patterns can be enumerated (`enumerate_patterns`) or visited (`sweep`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._marginal import Conditional, Moments, blank, condition, draw, draw_from, log_marginal_at, moments
from aleator._typing import Array, Key
from aleator.data import Batch, as_data
from aleator.hyperpriors import Hyperprior
from aleator.likelihoods import Gaussian
from aleator.model import LinearModel
from aleator.priors import Normal

MAX_ENUMERATED = 20  # regressors whose 2^p patterns are still enumerated


class Problem(NamedTuple):
    """stats: of all p regressors and k targets. loc m₀, scale s: of the weights. log_prior (p + 1,): log probability of one pattern by
    its size."""

    stats: Moments
    loc: Array
    scale: Array
    log_prior: Array


class Patterns(NamedTuple):
    """All patterns (2^p, p), their posterior probabilities (2^p,), and log p(D), nats."""

    included: np.ndarray
    probability: np.ndarray
    log_evidence: float

    @property
    def inclusion(self) -> np.ndarray:
        """P(d_j = 1 | D), (p,)."""
        return self.probability @ self.included

    @property
    def size(self) -> np.ndarray:
        """P(Σ d = 0, 1, …, p | D), (p + 1,)."""
        return np.bincount(self.included.sum(axis=1), weights=self.probability, minlength=self.included.shape[1] + 1)


def problem(model: Any, batch: Batch, log_size: np.ndarray | None) -> Problem:
    """What the data say, in float64. log_size (p + 1,): log probabilities of the sizes, None for equally likely patterns."""
    p = int(model.num_features)
    stats = moments(model.features(_tree.as_float64(batch.x)), _tree.as_float64(batch.y), batch.weight)
    template = {"weight": np.zeros((model.targets(), p))}
    scale = model.prior.scales(template, model.fan_in(template))["weight"]
    number = np.array([math.comb(p, size) for size in range(p + 1)], np.float64)
    log_prior = np.full(p + 1, -p * math.log(2.0)) if log_size is None else log_size - np.log(number)
    return Problem(stats, jnp.asarray(model.prior.loc), jnp.asarray(scale), jnp.asarray(log_prior))


def posterior(given: Problem, included: Array, log_noise: Array, scaled: bool) -> tuple[Conditional, Array]:
    """The weights given d and σ, and log p(D | d, σ). scaled: the weights are in units of σ, so that y/σ has unit noise."""
    stats, noise, shift = given.stats, jnp.exp(2.0 * log_noise), jnp.zeros(())
    if scaled:
        stats = stats._replace(cross=stats.cross / jnp.sqrt(noise), square=stats.square / noise)
        noise, shift = jnp.ones_like(noise), jnp.asarray(-stats.mass * jnp.sum(log_noise))
    stats, mean, variance = blank(included, stats, given.loc, given.scale**2)
    now = condition(stats, noise, mean, variance)
    return now, log_marginal_at(now, stats, noise, mean, variance) + shift


def log_marginal(given: Problem, included: Array, log_noise: Array, scaled: bool) -> Array:
    """log p(D | d, σ), nats."""
    return posterior(given, included, log_noise, scaled)[1]


def draw_weights(key: Key, given: Problem, included: Array, log_noise: Array, scaled: bool) -> Array:
    """w | d, σ, D, (k, p): exactly zero where excluded."""
    return jnp.where(included, draw(key, posterior(given, included, log_noise, scaled)[0]).T, 0.0)


def mean_weights(given: Problem, included: Array, log_noise: Array, scaled: bool) -> Array:
    """E[w | d, σ, D], (k, p)."""
    now, _ = posterior(given, included, log_noise, scaled)
    return jnp.where(included, draw_from(jnp.zeros_like(now.half), now).T, 0.0)


def sweep(key: Key, given: Problem, included: Array, log_noise: Array, scaled: bool, moves: int) -> tuple[Array, Array, Array]:
    """`moves` Metropolis steps on the pattern, weights integrated out: (d, log p(D | d, σ), mean acceptance).

    Half of them switch a regressor on or off (a birth or a death), half exchange one inside for one outside; both proposals are
    symmetric, so that a step is accepted with p(D | d̃, σ)p(d̃) / p(D | d, σ)p(d).
    """
    p = len(included)

    def score(pattern: Array) -> Array:
        return log_marginal(given, pattern, log_noise, scaled) + given.log_prior[jnp.sum(pattern)]

    def move(carry: tuple[Array, Array], key: Key) -> tuple[tuple[Array, Array], Array]:
        pattern, now = carry
        key_kind, key_in, key_out, key_flip, key_accept = jax.random.split(key, 5)
        pick = lambda k, among: jnp.argmax(jnp.where(among, jax.random.uniform(k, (p,)), -1.0))
        flip = jnp.arange(p) == jax.random.randint(key_flip, (), 0, p)
        exchange = (jnp.arange(p) == pick(key_in, pattern)) | (jnp.arange(p) == pick(key_out, ~pattern))
        possible = jnp.any(pattern) & ~jnp.all(pattern)
        swap = jax.random.bernoulli(key_kind)
        proposal = jnp.where(swap, jnp.where(possible, pattern ^ exchange, pattern), pattern ^ flip)
        then = score(proposal)
        log_ratio = jnp.where(jnp.isnan(then), -jnp.inf, then - now)
        accept = jnp.log(jax.random.uniform(key_accept, (), now.dtype)) < log_ratio
        taken = (jnp.where(accept, proposal, pattern), jnp.where(accept, then, now))
        return taken, jnp.minimum(1.0, jnp.exp(log_ratio))

    (included, now), acceptance = repeat(move, (included, score(included)), key, moves)
    return included, now - given.log_prior[jnp.sum(included)], jnp.mean(acceptance)


def move_noise(
    key: Key, given: Problem, included: Array, log_noise: Array, scaled: bool, prior: Hyperprior, now: Array, moves: int = 2
) -> tuple[Array, Array]:
    """Random-walk steps on log σ, weights integrated out; the step is 2.4 times the spread 1/√(2N) that N residuals leave."""
    width = 2.4 / jnp.sqrt(2.0 * (given.stats.mass + 1.0)) / math.sqrt(len(log_noise))

    def move(carry: tuple[Any, Any], key: Key) -> tuple[tuple[Any, Any], None]:
        at, value = carry
        key_step, key_accept = jax.random.split(key)
        to = at + width * jax.random.normal(key_step, at.shape, at.dtype)
        then = log_marginal(given, included, to, scaled)
        change = then - value + jnp.sum(prior.log_prob_unconstrained(to)) - jnp.sum(prior.log_prob_unconstrained(at))
        accept = jnp.log(jax.random.uniform(key_accept, (), at.dtype)) < change
        return (jnp.where(accept, to, at), jnp.where(accept, then, value)), None

    return repeat(move, (log_noise, now), key, moves)[0]


def repeat(move: Callable, carry: Any, key: Key, number: int) -> tuple[Any, Any]:
    """(carry, stacked outputs) after `number` moves, move(carry, key) → (carry, output); keys are folded in, one for each."""
    return jax.lax.scan(lambda now, i: move(now, jax.random.fold_in(key, i)), carry, jnp.arange(number))


def enumerate_patterns(model: Any, data: Any, log_size: Any = None) -> Patterns:
    """The exact posterior over all 2^p patterns, for a fixed noise scale and p ≤ 20.

    log_size: log probabilities of the sizes 0 … p, each pattern of a size equally likely; None: all patterns equally likely.
    """
    data = as_data(data)
    model = check_selection(model.bind(data.x, model.likelihood.encode(data.y)))
    p = int(model.num_features)
    if isinstance(model.likelihood.scale, Hyperprior) or p > MAX_ENUMERATED:
        got = f"{p} regressors, noise {model.likelihood.scale!r}"
        raise MethodError(
            message(
                "The patterns cannot be enumerated.",
                got,
                f"at most {MAX_ENUMERATED} regressors and a fixed noise scale",
                "use al.ReversibleJump()",
            )
        )
    with jax.enable_x64(True):
        batch = Batch(jnp.asarray(data.x), jnp.asarray(model.likelihood.encode(data.y)), data.weight)
        given = problem(model, batch, None if log_size is None else np.asarray(log_size, float))
        included = (np.arange(2**p)[:, None] >> np.arange(p)) % 2 == 1
        log_noise = jnp.full(model.targets(), math.log(model.likelihood.scale))
        value = jax.jit(lambda all_: jax.lax.map(lambda d: log_marginal(given, d, log_noise, model.scaled_by_noise), all_, batch_size=1024))
        joint = np.asarray(value(included)) + np.asarray(given.log_prior)[included.sum(axis=1)]
    evidence = float(np.logaddexp.reduce(joint))
    return Patterns(included, np.exp(joint - evidence), evidence)


def inclusion(fit: Any) -> np.ndarray:
    """P(d_j = 1 | D), (p,), of a linear model fitted by `ReversibleJump`: the share of draws in which a regressor has a weight."""
    return np.mean(included_draws(fit), axis=(0, 1))


def included_draws(fit: Any) -> np.ndarray:
    """Inclusion patterns of all draws, (chains, n, p)."""
    if not isinstance(fit.model, LinearModel) or not hasattr(fit.posterior, "num_chains"):
        raise MethodError(
            message(
                "This fit has no inclusion patterns.", type(fit.model).__name__, "al.LinearModel fitted by al.ReversibleJump()", "fit it so"
            )
        )
    weights = np.asarray(fit.posterior.params["network"]["weight"])
    return np.any(weights != 0.0, axis=1).reshape(fit.posterior.num_chains, -1, weights.shape[-1])


def check_selection(model: Any) -> Any:
    """Refuse models whose weights do not integrate out."""
    if not isinstance(model, LinearModel):
        wrong = f"a {type(model).__name__}"
    elif not isinstance(model.prior, Normal):
        wrong = f"prior {model.prior!r}"
    elif not isinstance(model.likelihood, Gaussian):
        wrong = f"likelihood {model.likelihood!r}"
    else:
        return model
    raise MethodError(
        message(
            "Regressors cannot be selected in this model.",
            wrong,
            "al.LinearModel with al.Gaussian and al.Normal",
            "change the model, or use al.NUTS()",
        )
    )
