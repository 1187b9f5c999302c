"""Questions to ask of a fitted model of y, whatever the method: densities, simulations, components with their labels resolved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import ModelError, message
from aleator._random import as_key
from aleator._typing import KeyLike, Tree
from aleator.latent._model import Latent
from aleator.latent.mixture import Mixture
from aleator.latent.vae import VAE

NUM_SAMPLES = 400  # posterior draws asked by default


def log_prob(key: KeyLike, fit: Any, y: Any, num_samples: int = NUM_SAMPLES, x: Any = None) -> np.ndarray:
    """log p(y | data) of each row: log of the mean over posterior draws of p(y | θ), in nats; (n,). For an autoencoder num_samples is the number
    of importance-weighted draws of z, and x what it is conditioned on; for a sequence there is one number, of all its rows, and x are the ids or
    inputs of the fit."""
    model = model_of(fit)
    if isinstance(model, VAE):  # importance weights in place of a sum
        key_params, key_weights = jax.random.split(as_key(key))
        return model.log_prob(key_weights, one_draw(key_params, fit), y, num_samples, x)
    with jax.enable_x64(True):
        model, batch = model.about(x, y)
        terms = _terms(model)(draws(key, fit, num_samples), batch)
        if not model.minibatch:  # rows of a sequence hang together: one density for all of them
            terms = jnp.sum(terms, axis=1, keepdims=True)
        return np.asarray(jax.scipy.special.logsumexp(terms, axis=0) - np.log(terms.shape[0]))


def simulate(key: KeyLike, fit: Any, num_samples: int) -> np.ndarray:
    """New rows of y, each from a posterior draw of its own; (num_samples, d)."""
    key_params, key_rows = jax.random.split(as_key(key))
    model = model_of(fit)
    if isinstance(model, VAE) and type(fit.posterior).__name__ == "Point":  # all rows through the decoder at once
        return model.simulate(key_rows, one_draw(key_params, fit), num_samples)[1]
    params = draws(key_params, fit, num_samples, spread=True)
    keys = jax.random.split(key_rows, _tree.rows(params))
    if isinstance(model, VAE):
        drawn = jax.vmap(lambda k, p: model.ancestral(k, p, None, 1)[1])(keys, params)
        return np.asarray(drawn).reshape(-1, *model.y_shape)
    with jax.enable_x64(True):
        drawn = jax.vmap(lambda k, p: _rows(model.simulate(k, p, 1)))(keys, params)
        return np.asarray(drawn[:, 0])


@dataclasses.dataclass(frozen=True, eq=False)
class Components:
    """A mixture's components over posterior draws, with the labels of all draws resolved (Stephens, 2000), largest weight first.

    draws: parameters by name, (S, K, …), in y's units. responsibilities (n, K): P(z = k | y, data) of the rows given. swapped: share of the
    draws whose labels had to be changed.
    """

    draws: dict[str, np.ndarray]
    responsibilities: np.ndarray
    swapped: float

    def mean(self, name: str) -> np.ndarray:
        return self.draws[name].mean(axis=0)

    def std(self, name: str) -> np.ndarray:
        """Posterior standard deviation: the error bar of `mean`."""
        return self.draws[name].std(axis=0)

    @property
    def labels(self) -> np.ndarray:
        """The most probable component of each row, (n,)."""
        return self.responsibilities.argmax(axis=1)

    def __repr__(self) -> str:
        lines = [f"{self.draws['weights'].shape[1]} components, {self.draws['weights'].shape[0]} draws, {self.swapped:.0%} relabelled"]
        for k in range(self.draws["weights"].shape[1]):
            cells = [f"weight {self.mean('weights')[k]:.3f} ± {self.std('weights')[k]:.3f}"]
            for name in self.draws:
                if name != "weights" and self.draws[name].ndim == 3:
                    mean, std = self.mean(name)[k], self.std(name)[k]
                    shown = ", ".join(f"{m:.3g} ± {s:.2g}" for m, s in list(zip(mean, std, strict=True))[:4])
                    cells.append(f"{name} {shown}{', …' if len(mean) > 4 else ''}")
            lines.append(f"  {k}: " + "; ".join(cells))
        return "\n".join(lines)


def components(key: KeyLike, fit: Any, y: Any, num_samples: int = NUM_SAMPLES) -> Components:
    """The components of a fitted `Mixture`, comparable across draws: every draw's labels are permuted to agree with the mean
    responsibilities of all on the rows of y, by the assignment problem, until none changes."""
    model = model_of(fit)
    if not isinstance(model, Mixture):
        raise ModelError(message("Only mixtures have components.", type(model).__name__, "a fit of al.latent.Mixture", "fit a Mixture"))
    y = model.observed(y)
    params = draws(key, fit, num_samples)
    with jax.enable_x64(True):
        shares = np.asarray(jax.jit(jax.vmap(lambda p: model.responsibilities(p, y)))(params))
        named = jax.tree.map(np.asarray, jax.jit(jax.vmap(model.constrain))(params))
    orders = _resolve(shares)
    shares = np.take_along_axis(shares, orders[:, None, :], axis=2)
    named = {name: np.stack([value[order] for value, order in zip(values, orders, strict=True)]) for name, values in named.items()}
    by_weight = np.argsort(-named["weights"].mean(axis=0))
    swapped = float(np.mean(np.any(orders != orders[0], axis=1)))
    return Components({name: value[:, by_weight] for name, value in named.items()}, shares.mean(axis=0)[:, by_weight], swapped)


def _resolve(shares: np.ndarray, num_rounds: int = 20) -> np.ndarray:
    """Permutations (S, K) that bring responsibilities (S, n, K) into agreement: minimise Σ KL(shares_s permuted ‖ their mean)."""
    from scipy.optimize import linear_sum_assignment

    orders = np.tile(np.arange(shares.shape[2]), (len(shares), 1))
    mean = shares[0]
    for number in range(num_rounds):
        cost = -np.einsum("snk,nj->sjk", shares, np.log(mean + 1e-12))
        new = np.stack([linear_sum_assignment(one)[1] for one in cost])
        if number and np.array_equal(new, orders):
            break
        orders = new
        mean = np.take_along_axis(shares, orders[:, None, :], axis=2).mean(axis=0)
    return orders


def model_of(fit: Any) -> Any:
    """The model of y that was fitted."""
    if not isinstance(getattr(fit, "model", None), Latent):
        raise ModelError(
            message(
                "This is a question to a model of y.", type(getattr(fit, "model", fit)).__name__, "a fit of al.latent", "use fit.predict"
            )
        )
    return fit.model


def draws(key: KeyLike, fit: Any, num_samples: int, spread: bool = False) -> Tree:
    """Posterior draws, leaves (S, …): those a chain kept, evenly thinned to S ≤ num_samples, or fresh ones. spread: exactly num_samples."""
    kept = getattr(fit.posterior, "num_chains", None)
    params = fit.posterior.params if kept is not None and fit.posterior.weights is None and not spread else None
    if params is None:
        single = not spread and type(fit.posterior).__name__ == "Point"
        with jax.enable_x64(True):
            return fit.posterior.sample(as_key(key), 1 if single else num_samples)
    size = _tree.rows(params)
    return _tree.take(params, np.linspace(0, size - 1, min(num_samples, size)).astype(np.int32))


def one_draw(key: KeyLike, fit: Any) -> Tree:
    """One parameter tree: the fit's own, or a draw of its posterior."""
    return _tree.take(draws(key, fit, 1), 0)


@functools.lru_cache(maxsize=16)
def _terms(model: Any) -> Callable:
    return jax.jit(lambda params, batch: jax.lax.map(lambda p: model.log_likelihood(p, batch), params))


def _rows(drawn: Any) -> Any:
    """y of a simulation that may come with its hidden variables before it."""
    return drawn[-1] if isinstance(drawn, tuple) else drawn
