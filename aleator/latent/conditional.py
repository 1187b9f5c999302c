"""Conditional sampling: the rest of a row given a part of it, whichever part (C10, D11).

A model of the joint p(y) answers p(y_missing | y_seen) for every division of the columns. Mixtures and Gaussian factor models do it in closed
form; an autoencoder by Metropolis within Gibbs (Mattei and Frellsen 2018), its inference network proposing z.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln

from aleator._cache import cached
from aleator._errors import DataError, ModelError, message
from aleator._random import as_key, noise_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.latent._model import no_inputs, observations
from aleator.latent.factor import FactorModel
from aleator.latent.mixture import Mixture
from aleator.latent.parts import LOG_2PI, Gaussian, StudentT
from aleator.latent.questions import draws, model_of, one_draw
from aleator.latent.vae import VAE, by_pieces, compiled
from aleator.latent.weights import log_weights

ROWS_AT_ONCE = 4_000  # rows × draws whose chains run side by side
NUMBERS_AT_ONCE = 4_000_000  # of covariances being factorised


def conditional(key: KeyLike, fit: Any, y: Any, num_samples: int = 100, *, x: Any = None, num_sweeps: int = 200) -> np.ndarray:
    """Completions (num_samples, n, …) of y (n, …), in which NaN marks what is missing: what is there is kept, the rest is drawn given it.

    Mixtures and Gaussian factor models: exact, independent draws, parameters from the posterior too. Factor models of counts and labels: z from
    the Gaussian that bounds the row. Autoencoders: every draw is the end of a chain of its own of num_sweeps sweeps, z | y by Metropolis with
    proposals of q(z | y), then the missing entries | z; at one draw of the weights. x: what the autoencoder is conditioned on.
    """
    model = model_of(fit)
    key_params, key_draws = jax.random.split(as_key(key))
    if isinstance(model, VAE):
        return _completed(key_draws, model, one_draw(key_params, fit), y, x, num_samples, num_sweeps)
    no_inputs(model, x)
    y = observations(y)
    if isinstance(model, FactorModel):
        return model.impute(key_draws, fit, y, num_samples)
    if not isinstance(model, Mixture):
        raise ModelError(
            message(
                "This model does not complete rows.",
                type(model).__name__,
                "a fit of Mixture, FactorModel or VAE",
                "use the functions of the model itself: sequences take missing rows as they are",
            )
        )
    if y.shape[1] != model.part.dim or np.isinf(y).any():
        raise DataError(
            message("y does not look like the data of the fit.", y.shape, f"(n, {model.part.dim}), NaN where missing", "check the columns")
        )
    if model.part.missing:
        model.observed(y)
    params = draws(key_params, fit, num_samples)  # one for a point
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params)
        number = len(jax.tree.leaves(params)[0])
        each = -(-num_samples // number)
        drawn = _mixture(model, each)(key_draws, params, jnp.asarray(y))
        return np.asarray(drawn).reshape(-1, *y.shape)[:num_samples]


@cached
def _mixture(model: Mixture, each: int) -> Any:
    """Draws (S, each, n, d) at S parameter trees."""
    draw = _correlated if isinstance(model.part, Gaussian) else _independent

    def run(key: Key, params: Tree, y: Array) -> Array:
        keys = jax.random.split(key, len(jax.tree.leaves(params)[0]))
        return jax.lax.map(lambda item: draw(model, item[0], item[1], y, each), (keys, params))

    return jax.jit(run)


def _independent(model: Mixture, key: Key, params: Tree, y: Array, each: int) -> Array:
    """Columns independent given the label: label | what is seen, then the missing columns from its part."""
    key_label, key_part = jax.random.split(key)
    labels = jax.random.categorical(key_label, model.log_joint_terms(model.natural(params), y), shape=(each, len(y)))
    new = model.part.simulate(key_part, params["parts"], labels.ravel()).reshape(each, *y.shape)
    return jnp.where(jnp.isfinite(y), y, new)


def _correlated(model: Mixture, key: Key, params: Tree, y: Array, each: int) -> Array:
    """Gaussian and Student-t parts: label | y_s, then y_m | y_s, label, by moving a draw ỹ of the whole row: y = ỹ + Σ_{·s} Σ_ss⁻¹ (y_s − ỹ_s).

    A Student-t is a Gaussian given its scale, u | y_s ~ Gamma((ν + d_s)/2, (ν + δ_s)/2)."""
    named = model.part.constrain(params["parts"])
    mean, covariance = named["mean"], named["covariance"]
    num, d = mean.shape
    whole = jnp.linalg.cholesky(covariance)
    logs = log_weights(model.weights, model.weights.natural(params["weights"]))
    freedom = model.part.freedom if isinstance(model.part, StudentT) else None

    def row(item: tuple[Key, Array]) -> Array:
        key, y = item
        key_label, key_noise, key_scale = jax.random.split(key, 3)
        seen = jnp.isfinite(y)
        y = jnp.where(seen, y, 0.0)
        block = jnp.where(seen[:, None] & seen, covariance, jnp.eye(d))  # Σ_ss, and 1 in the place of what is missing
        root = jnp.linalg.cholesky(block)
        half = solve_triangular(root, jnp.where(seen, y - mean, 0.0)[..., None], lower=True)[..., 0]
        distance = jnp.sum(half**2, axis=-1)
        size = jnp.sum(seen)
        level = logs - jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)
        if freedom is None:
            level = level - 0.5 * (distance + size * LOG_2PI)
        else:
            power = 0.5 * (freedom + size)
            level = level + gammaln(power) - 0.5 * size * jnp.log(freedom * jnp.pi) - power * jnp.log1p(distance / freedom)
        label = jax.random.categorical(key_label, level, shape=(each,))
        noise = jnp.einsum("sij,sj->si", whole[label], jax.random.normal(key_noise, (each, d)))
        if freedom is not None:
            u = jax.random.gamma(key_scale, 0.5 * (freedom + size), (each,)) / (0.5 * (freedom + distance[label]))
            noise = noise / jnp.sqrt(u)[:, None]
        drawn = mean[label] + noise
        gap = jnp.where(seen, y - drawn, 0.0)[..., None]
        gap = solve_triangular(root[label], solve_triangular(root[label], gap, lower=True), lower=True, trans=1)[..., 0]
        moved = drawn + jnp.einsum("sij,sj->si", covariance[label], jnp.where(seen, gap, 0.0))
        return jnp.where(seen, y, moved)

    at_once = max(1, NUMBERS_AT_ONCE // ((num + 2 * each) * d**2))
    return jnp.moveaxis(jax.lax.map(row, (jax.random.split(key, len(y)), y), batch_size=min(at_once, len(y))), 0, 1)


def _completed(key: Key, model: VAE, params: Tree, y: Any, x: Any, num_samples: int, num_sweeps: int) -> np.ndarray:
    if not model.posterior.closed:
        raise ModelError(
            message(
                "This q has no closed density at a given z.",
                repr(model.posterior),
                "'diagonal', 'full' or 'coupling'",
                "fit with one of these",
            )
        )
    shown, x = model.asked(y, x)
    ask = compiled(model, _sweeps, num_samples, num_sweeps)
    drawn = by_pieces(key, lambda k, given: ask(k, params, *given), (shown, x), max(1, ROWS_AT_ONCE // num_samples))
    return np.moveaxis(drawn, -1, 1).reshape(num_samples, len(shown), *model.y_shape)  # type: ignore[misc]


def _sweeps(model: VAE, key: Key, params: Tree, shown: Array, x: Any, num_samples: int, num_sweeps: int) -> Array:
    """Ends of num_samples chains a row, (S, D, n). They begin with missing entries from the prior, as if there were nothing else."""
    key_first, key_run = jax.random.split(noise_key(key))
    x = model.seen(params, x)
    n, seen = len(shown), jnp.isfinite(shown)
    filled = jax.vmap(lambda k: model.ancestral(k, params, x, n)[1])(jax.random.split(key_first, num_samples))
    filled = jnp.where(seen, shown, filled)

    def propose(key: Key, filled: Array) -> tuple[tuple[Array, ...], Array]:
        """z from q(z | y) and log p(y, z) − log q(z | y)."""
        hidden, log_q = model.draw_hidden(params, filled, x, model.noise(key, num_samples, n))
        return hidden, log_joint(hidden, filled) - log_q

    def log_joint(hidden: tuple[Array, ...], filled: Array) -> Array:
        return model.log_shown(params, hidden, filled, x) + model.log_hidden(params, hidden, x)

    def emit(key: Key, hidden: tuple[Array, ...]) -> Array:
        outputs = model.decoded(params, 0, hidden[0], x)
        drawn = model.likelihood.sample(key, outputs.reshape(-1, outputs.shape[-1]), model.extra(params))
        return jnp.where(seen, shown, drawn.reshape(num_samples, n, -1))

    def sweep(carry: tuple[tuple[Array, ...], Array], key: Key) -> tuple[tuple[tuple[Array, ...], Array], None]:
        hidden, filled = carry
        key_propose, key_accept, key_emit = jax.random.split(key, 3)
        new, weight = propose(key_propose, filled)
        change = weight - (log_joint(hidden, filled) - model.log_q(params, filled, x, hidden))
        taken = jnp.log(jax.random.uniform(key_accept, change.shape)) < change
        hidden = jax.tree.map(lambda a, b: jnp.where(taken[..., None], a, b), new, hidden)
        return (hidden, emit(key_emit, hidden)), None

    key_start, key_sweeps = jax.random.split(key_run)
    hidden, _ = propose(key_start, filled)
    (_, filled), _ = jax.lax.scan(sweep, (hidden, filled), jax.random.split(key_sweeps, num_sweeps))
    return jnp.moveaxis(filled, 1, 2)
