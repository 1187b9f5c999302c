"""Lower bounds on log p(y) of each row under an autoencoder, by refining the encoder's draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._random import as_key
from aleator._typing import KeyLike
from aleator.latent.questions import model_of, one_draw
from aleator.latent.vae import by_pieces
from aleator.methods import _refined_rows

ROWS_AT_ONCE = 4096  # rows times draws


def refined_bound(key: KeyLike, fit: Any, y: Any, num_refine: int = 5, step_size: float = 0.1, num_samples: int = 20) -> np.ndarray:
    """A lower bound in expectation on log p(y) of each row, (n,), nats: the encoder's draws of z refined by num_refine Langevin steps.

    E[log p(y, z_T) − log q(z₀) + Σ_t log B_t(z_{t−1}|z_t) − log F_t(z_t|z_{t−1})] ≤ log p(y), averaged over num_samples draws. step_size: η, in units of
    the encoder's variances; what `al.Amortised` has learned is fit.info["step_size"][-1]. num_refine=0 is the encoder's own bound. y is taken as it is:
    binarise it first.
    """
    model = model_of(fit)
    _refined_rows.check(model)
    key_params, key_rows = jax.random.split(as_key(key))
    params, (shown, _) = one_draw(key_params, fit), model.asked(y, None)
    along = _refined_rows.begin(num_refine, step_size, jnp.float32)
    ask = jax.jit(lambda k, rows: jnp.mean(_refined_rows.log_weights(k, params, rows, model, along, num_samples), axis=0))
    return by_pieces(key_rows, ask, shown, max(1, ROWS_AT_ONCE // num_samples))
