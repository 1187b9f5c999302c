"""Simulation-based calibration: parameters from the prior, data from the parameters, a fit to the data; the truth's rank among the draws
is uniform if and only if the whole chain from prior to draws is right (Talts et al. 2018).

Quantities: predictions at five inputs, the noise's standard deviation, the log-likelihood. With 99 independent draws a rank has 100 equally
likely values; 20 bins give χ² with 19 degrees of freedom, above 43.82 with probability 0.001.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator.data import Batch

NUM_DRAWS = 99
LIMIT = 43.82  # χ²₁₉ at 0.999
INPUTS = np.linspace(-1.5, 1.5, 5, dtype=np.float32)[:, None]


def network(prior_scale: float = 1.0) -> al.BNN:
    """A 1-8-1 tanh network with unknown noise."""
    net = al.networks.MLP(1, (8,), 1, activation="tanh")
    return al.BNN(net, al.Gaussian(al.LogNormal(-1.0, 0.4)), al.Normal(prior_scale), num_targets=1)


def ranks(
    model: Any, fitted: Any, method: al.Method, num_sets: int, num_data: int = 20, seed: int = 0, noise: float = 1.0, first: int = 0
) -> np.ndarray:
    """Ranks (num_sets, 7) of the truth of `model` among thinned draws of `method` on `fitted`, which is the same model unless a test breaks
    it. noise: by how much the data's noise is wrong."""
    x = np.random.default_rng(seed).uniform(-2.0, 2.0, size=(num_data, 1)).astype(np.float32)
    quantities = jax.jit(lambda params, y: _quantities(fitted, params, x, y))
    every = jax.jit(jax.vmap(lambda params, y: _quantities(fitted, params, x, y), in_axes=(0, None)))
    simulate = jax.jit(lambda key: _simulate(key, model, x, noise))
    found = []
    for number in range(first, first + num_sets):
        truth, y = simulate(jax.random.key(seed * 1_000_003 + number))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", al.HealthWarning)
            fit = al.fit(number, fitted, (x, np.asarray(y)), method, progress=False, init=_start(model, number, method.num_chains))
        draws = jax.tree.map(lambda leaf: jnp.asarray(leaf[-NUM_DRAWS:]), fit.posterior.params)
        found.append(np.sum(np.asarray(every(draws, y)) < np.asarray(quantities(truth, y)), axis=0))
    return np.stack(found)


def chi_square(ranks: np.ndarray) -> np.ndarray:
    """χ² of 20 bins for each quantity."""
    counts = np.stack([np.histogram(column, bins=20, range=(0, NUM_DRAWS + 1))[0] for column in ranks.T])
    expected = len(ranks) / 20
    return np.sum((counts - expected) ** 2 / expected, axis=1)


def _start(model: Any, number: int, num_chains: int) -> Any:
    """Chains begin at draws of the prior: where they begin must not matter, and this is far from the posterior."""
    keys = jax.random.split(jax.random.key(10_000 + number), num_chains)
    return al.posterior.Draws(jax.vmap(model.sample_prior)(keys), num_chains=num_chains)


def _simulate(key: Any, model: Any, x: np.ndarray, noise: float) -> tuple[Any, Any]:
    key_params, key_data = jax.random.split(key)
    params = model.sample_prior(key_params)
    mean = model.outputs(params, x)
    scale = noise * jnp.reshape(model.extra(params)["scale"], (1, -1))
    return params, mean + scale * jax.random.normal(key_data, mean.shape)


def _quantities(model: Any, params: Any, x: np.ndarray, y: Any) -> Any:
    likelihood = jnp.sum(model.log_likelihood(params, Batch(jnp.asarray(x), y)))
    return jnp.concatenate([jnp.ravel(model.outputs(params, INPUTS)), jnp.ravel(model.extra(params)["scale"])[:1], likelihood[None]])


def geweke(
    forward: Callable[[Any], Any], transition: Callable[[Any, Any], Any], summaries: Callable[[Any], Any], num: int, seed: int = 0
) -> np.ndarray:
    """Geweke's joint test: z-scores between summaries of independent draws of (parameters, data) and of a chain that alternates the
    sampler's transition with new data. forward(key) → joint state; transition(key, state) → joint state; summaries(state) → (Q,)."""
    from aleator import convergence

    key_a, key_b, key_c = jax.random.split(jax.random.key(seed), 3)
    independent = np.asarray(jax.jit(jax.vmap(lambda k: summaries(forward(k))))(jax.random.split(key_a, num)))

    def step(state: Any, key: Any) -> tuple[Any, Any]:
        state = transition(key, state)
        return state, summaries(state)

    chain = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys)[1])(forward(key_b), jax.random.split(key_c, num))
    chain = np.asarray(chain, np.float64)[None]
    error = np.sqrt(independent.var(axis=0, ddof=1) / num + convergence.mcse(chain) ** 2)
    return (independent.mean(axis=0) - chain.mean(axis=(0, 1))) / error
