"""Refinement of hidden variables row by row: the encoder's q(z | y) is the start, T Langevin steps with reverse kernels follow.

With the encoder's N(μ(y), diag σ(y)²) for q₀ and log p(y, z) for the density, `refined.langevin` gives each row a weight w with E[w] = p(y), so that
E[log w] ≤ log p(y) for every row, whatever the step sizes are. T = 0 is the evidence lower bound of the encoder alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.latent.posteriors import Diagonal
from aleator.latent.vae import VAE
from aleator.methods import refined


def check(model: Any) -> None:
    """Refuse what has no diagonal start for one vector z a row."""
    if not isinstance(model, VAE) or not isinstance(model.posterior, Diagonal) or len(model.latent_dim) != 1 or model.x_size:
        got = repr(model)[:80]
        expected = "al.latent.VAE with one layer of z, a diagonal q and no x"
        raise MethodError(message("Rows of this model cannot be refined.", got, expected, "use estimator='iwae', or al.latent.log_prob"))


def begin(num_refine: int, step_size: float, dtype: Any) -> Tree:
    """Parameters of the path before training: equal steps η, β rising evenly."""
    return {"log_step": jnp.full((num_refine,), np.log(step_size), dtype), "anneal": jnp.zeros((num_refine,), dtype)}


def log_weights(key: Key, params: Tree, shown: Array, model: VAE, along: Tree, num: int) -> Array:
    """log w of `num` refined draws of z for each row of y (n, D), (num, n). along: `begin`, trained or not."""
    mean, rho = jnp.split(model.encoded(params, 0, shown, None), 2, axis=-1)
    steps = refined.path({**along, "mean": mean}, along["log_step"].shape[0])

    def one(k: Key, m: Array, r: Array, y: Array) -> Array:
        def density(z: Array) -> Array:
            hidden = (z[None, None],)
            return (model.log_shown(params, hidden, y[None], None) + model.log_hidden(params, hidden, None))[0, 0]

        return refined.langevin(k, {"mean": m, "rho": r}, density, steps)[1]

    keys = jax.random.split(key, (num, shown.shape[0]))
    return jax.vmap(lambda row_keys: jax.vmap(one)(row_keys, mean, rho, shown))(keys)
