"""Latent inputs of a deep process and the importance-weighted bound (Salimbeni, Dutordoir, Hensman and Deisenroth 2019).

Each row has an input w ~ N(0, I) that is not observed, so that y given x need be neither Gaussian nor of one mode. Given the functions f of all layers rows are independent, and for K draws of w
from a Gaussian q(w) of the row

    log p(y | x) ≥ E_q(f) Σᵢ E[log (1/K) Σₖ p(yᵢ | f(xᵢ, wₖ)) p(wₖ)/q(wₖ)] − Σ_layers KL(q(v) ‖ N(0, I)),

tighter with every draw, log p(yᵢ | f, xᵢ) for K → ∞ whatever q(w). All K draws of a row go through the *same* function: inner layers are drawn jointly at K inputs. Of the last layer only its marginals are needed,
since E log Σ exp ≥ log Σ exp E keeps a bound.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from aleator import _tree
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.gp.sparse import sparse_moments
from aleator.gp.svgp import expected

JITTER = 1e-8  # relative, of the covariance of a row's K values: two equal draws of w are one


def latent_start(key: Key, num_rows: int, size: int, columns: int, real: bool) -> Tree:
    """q(w) of each row: N(location + y·weight, scale²). Real targets, near unit scale, are the first guess of w: where f begins without w it never comes to need it."""
    weight = jnp.eye(columns, size) if real else jnp.zeros((columns, size))
    return {
        "location": 0.1 * jax.random.normal(key, (num_rows, size)),
        "log_scale": jnp.full((num_rows, size), math.log(0.5) if real else 0.0),
        "weight": weight,
    }


def weighted_terms(key: Key, model: Any, params: Tree, batch: Batch, num_samples: int, num_importance: int) -> Array:
    """log (1/K) Σₖ exp{E[log p(yᵢ | f)] + log p(wₖ) − log q(wₖ)} of each row, (n,), over num_samples draws of the inner layers and of the w."""
    x = _tree.as_float64(jnp.asarray(batch.x)).reshape(_tree.rows(batch.x), -1)
    location, log_scale = (params["latent"][name][batch.index] for name in ("location", "log_scale"))
    location = location + batch.y.astype(location.dtype) @ params["latent"]["weight"]
    shape = (num_importance, *location.shape)

    def one(key: Key) -> Array:
        key_w, key_f, key_last = jax.random.split(key, 3)
        z = jax.random.normal(key_w, shape)
        w = location + jnp.exp(log_scale) * z
        ratio = jnp.sum(0.5 * (z**2 - w**2) + log_scale, axis=-1)
        f: Any = jnp.concatenate([jnp.broadcast_to(x, (num_importance, *x.shape)), w], axis=-1)
        keys = jax.random.split(key_f, len(model.layers))
        for i, layer in enumerate(model.layers[:-1]):
            f = _one_function(keys[i], layer, params["layers"][str(i)], f)
        last = params["layers"][str(len(model.layers) - 1)]
        mean, variance = sparse_moments(model.layers[-1], last["process"], last["location"], jnp.tril(last["spread"]), _flat(f))
        y = _flat(jnp.broadcast_to(batch.y, (num_importance, *batch.y.shape)))
        terms = expected(key_last, model.likelihood, mean, jnp.maximum(variance, 1e-12), y, model.extra(params))
        return jax.nn.logsumexp(terms.reshape(ratio.shape) + ratio, axis=0) - math.log(num_importance)

    return jnp.mean(jax.vmap(one)(jax.random.split(key, num_samples)), axis=0)


def _one_function(key: Key, layer: Any, part: Tree, f: Array) -> Array:
    """A draw of a layer at the K inputs of each row jointly, rows apart: (K, n, d) → (K, n, o)."""
    number, rows, _ = f.shape
    process, spread = part["process"], jnp.tril(part["spread"])
    a = layer.project(process, _flat(f))
    mean = (a.T @ part["location"].T + layer.offset(process, _flat(f))).reshape(number, rows, -1)
    a = a.reshape(-1, number, rows)
    prior = jax.vmap(lambda at: layer.kernel(process["kernel"], at, at), 1)(f) - jnp.einsum("mkn,mln->nkl", a, a)
    halves = jnp.einsum("omp,mkn->opkn", spread, a)
    covariance = prior + jnp.einsum("opkn,opln->onkl", halves, halves)
    level = jnp.mean(jnp.diagonal(covariance, axis1=2, axis2=3), axis=-1)[..., None, None]
    lower = jnp.linalg.cholesky(covariance + (JITTER * level + 1e-12) * jnp.eye(number))
    return mean + jnp.einsum("onkl,lno->kno", lower, jax.random.normal(key, mean.shape))


def _flat(values: Array) -> Array:
    """(K, n, …) → (K·n, …)."""
    return values.reshape(-1, *values.shape[2:])
