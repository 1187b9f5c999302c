"""Processes on top of networks: spectral normalisation through sites, the Laplace covariance of random features, deep kernels that overfit."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import gp
from aleator.gp import questions
from aleator.networks.spectral import SpectralNorm, spectral_norm

RNG = np.random.default_rng(4)
X = RNG.uniform(-1, 1, (30, 2)).astype(np.float32)
Y = np.sin(3 * X[:, 0]) + 0.1 * RNG.standard_normal(30)


@pytest.mark.parametrize("shape", [(7, 5), (3, 3, 2, 6)], ids=["dense", "filters"])
def test_norms_are_largest_singular_values(shape: tuple[int, ...]) -> None:
    weight = RNG.standard_normal(shape).astype(np.float32)
    left, values, right = np.linalg.svd(weight.reshape(-1, shape[-1]), full_matrices=False)
    value, slope = jax.value_and_grad(lambda w: spectral_norm(w, (len(shape) - 1,), 100))(weight)
    np.testing.assert_allclose(value, values[0], rtol=1e-5)
    np.testing.assert_allclose(slope, np.outer(left[:, 0], right[0]).reshape(shape), atol=2e-3)


def test_maps_of_any_network_are_bounded() -> None:
    """A small weight stays, a large one is brought to the bound; a function of the user's like a network of ours, its biases untouched."""
    small, large = 0.1 * RNG.standard_normal((2, 4)), 5 * RNG.standard_normal((4, 3))
    params = {"a": jnp.asarray(small, jnp.float32), "b": jnp.asarray(large, jnp.float32), "c": jnp.arange(3.0)}
    function = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"] + p["c"]
    bounded = SpectralNorm((function, params), 0.9, 100)
    truth = function(params | {"b": params["b"] * 0.9 / np.linalg.norm(large, 2)}, X)
    np.testing.assert_allclose(bounded.apply(params, X), truth, rtol=1e-4, atol=1e-5)
    net = al.networks.MLP(2, (6,), 1)
    weights = jax.tree.map(lambda leaf: 10 * leaf, net.init(jax.random.key(0)))
    slopes = jax.vmap(jax.jacobian(lambda row: SpectralNorm(net, 0.9, 100).apply(weights, row[None])[0]))(jnp.asarray(X))
    assert np.linalg.norm(slopes[:, 0], axis=1).max() < 0.9**2 + 1e-3


def test_the_head_is_a_process_of_the_features() -> None:
    """Laplace at the last layer is the exact posterior of its weights: f has the variance of the linear model on the trained features."""
    model = gp.sngp(al.networks.MLP(2, (8,), 4, "tanh"), al.Gaussian(0.1), num_features=40, length=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)  # the features are not at their mode, which the head does not need
        fit = al.fit(0, model, (X, Y), al.Laplace("full", "last_layer", base=al.MAP(num_steps=300)))
    far = np.concatenate([X[:3], 6 + X[:3]])
    trained = jax.tree.map(
        jnp.asarray, fit.posterior.mean["network"] if isinstance(fit.posterior.mean, dict) else fit.posterior.params["network"]
    )
    features = lambda x: np.asarray(model.network.features(trained, jnp.asarray(x)), np.float64)
    covariance = np.linalg.inv(features(X).T @ features(X) / 0.01 + np.eye(40))
    truth = np.sum(features(far) @ covariance * features(far), axis=1)
    np.testing.assert_allclose(fit.predict(0, far).epistemic, truth, rtol=2e-2)


def test_a_deep_kernel_that_overfits_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pure noise: a kernel of sixty weights a feature finds structure in it, and rows left out say that there is none; a plain one does not."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 4)).astype(np.float32), rng.standard_normal(40)
    deep = gp.Deep(al.networks.MLP(4, (30,), 4, "tanh"), gp.RBF(), al.Normal(3.0))
    with pytest.warns(al.HealthWarning, match="overfitted"):
        fit = al.fit(0, gp.GP(deep, gp.Zero()), (x, y), gp.Evidence(num_restarts=1, num_steps=150))
    assert "the hyper-parameters are overfitted" in fit.status and "nats a row" in fit.status
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        plain = al.fit(0, gp.GP(gp.RBF(), gp.Zero()), (x, y), gp.Evidence(num_restarts=1))
    assert "overfitted" not in plain.status
    with pytest.warns(al.HealthWarning, match="overfitted"):
        judged = gp.overfitting(0, fit)
    assert judged.evidence > judged.held_out
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*overfitted.*")
        gp.overfitting(0, plain)
    monkeypatch.setattr(questions, "CHEAP", 30)  # with more rows than are cheap to fit again the sentence is an advice
    told, trusted = questions.second_look(0, fit)
    assert trusted and "hyper-parameters for 40 rows" in told
