"""Stein discrepancies and particles: both vanish, or come to rest, on the density they are given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import stein

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")


def test_the_stein_kernel_is_its_definition() -> None:
    """u(θ, θ′) = tr over the operators applied to both arguments of k, here by automatic differentiation."""
    rng = np.random.default_rng(0)
    draws, scores = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    with jax.enable_x64(True):
        k = lambda a, b: (1.0 + jnp.sum((a - b) ** 2)) ** -0.5

        def u(i: int, j: int) -> float:
            a, b = jnp.asarray(draws[i]), jnp.asarray(draws[j])
            mixed = jnp.trace(jax.jacfwd(jax.grad(k, 0), 1)(a, b))
            return float(scores[i] @ scores[j] * k(a, b) + scores[i] @ jax.grad(k, 1)(a, b) + scores[j] @ jax.grad(k, 0)(a, b) + mixed)

        expected = np.array([[u(i, j) for j in range(4)] for i in range(4)])
    np.testing.assert_allclose(stein.stein_kernel(draws, scores), expected, rtol=1e-10)


def test_the_discrepancy_knows_draws_from_the_density_from_others() -> None:
    """Exact draws are not told apart at the usual level over 20 sets; draws a tenth too wide, or shifted by 0.2, always are."""
    rng = np.random.default_rng(1)
    values = []
    for seed in range(20):
        x = rng.normal(size=(400, 2))
        exact = stein.discrepancy(seed, x, -x, scale=1.0, num_bootstrap=200)
        values.append((exact.squared, exact.p_value))
    squared, p = np.array(values).T
    assert abs(squared.mean()) < 5 * squared.std() / np.sqrt(20)  # unbiased
    assert np.sum(p < 0.05) <= 5  # 5 or fewer of 20 at 5 %: all but 3 in 10,000 times
    for change in (lambda x: 1.25 * x, lambda x: 0.75 * x, lambda x: x + 0.3):
        x = change(rng.normal(size=(800, 2)))
        found = stein.discrepancy(0, x, -x, scale=1.0, num_bootstrap=200)
        assert found.p_value < 0.02 and found.squared > 3 * found.stderr


def test_scores_and_temperature_of_a_fit_show_the_bias_of_its_step() -> None:
    """SGLD on a Gaussian at h = 0.5: variance 1/(1 − h/4) = 1.142857, and so is the temperature."""
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p["x"] ** 2), {"x": jnp.zeros(20)})
    method = al.SGLD(0.5, num_samples=400, num_warmup=50, thin=20, num_search=0, num_chains=2)
    fit = al.fit(0, target, None, method, progress=False)
    draws, scores = stein.scores(fit, target=target)
    np.testing.assert_allclose(scores, -draws, rtol=1e-6)
    found = stein.configurational_temperature(draws, scores)
    assert abs(found.value - 1 / (1 - 0.125)) < 5 * found.stderr and found.stderr < 0.02
    x, y = np.linspace(-1, 1, 20), np.linspace(-1, 1, 20)
    model = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.5), al.Normal(1.0))
    chain = al.fit(0, model, (x, y), al.SVGD(10, num_steps=20), progress=False)
    draws, scores = stein.scores(chain, (x, y))
    exact = al.fit(0, model, (x, y), al.Exact())
    mean, operator = np.ravel(exact.posterior.mean), exact.posterior.operator
    precision = np.linalg.inv(np.asarray(operator.covariance()).reshape(2, 2))
    np.testing.assert_allclose(scores, -(draws - mean) @ precision, rtol=1e-4, atol=1e-4)
    with pytest.raises(al.MethodError, match="target"):
        stein.scores(fit)


GAUSSIAN = (np.array([1.0, -2.0]), np.array([[1.0, 0.6], [0.6, 0.8]]))


def gaussian_target() -> Any:
    mean, precision = GAUSSIAN[0], np.linalg.inv(GAUSSIAN[1])
    density = lambda p: -0.5 * (p - mean) @ jnp.asarray(precision, p.dtype) @ (p - mean)
    return al.target_from_log_density(density, jnp.zeros(2))


@pytest.mark.parametrize("bandwidth", ["median", "learned"])
def test_svgd_comes_to_rest_on_a_gaussian(bandwidth: str) -> None:
    fit = al.fit(0, gaussian_target(), None, al.SVGD(60, num_steps=1500, learning_rate=0.05, bandwidth=bandwidth), progress=False)
    x = np.asarray(fit.posterior.params, np.float64)
    assert x.shape == (60, 2)
    np.testing.assert_allclose(x.mean(axis=0), GAUSSIAN[0], atol=0.05)
    np.testing.assert_allclose(np.cov(x.T, bias=True), GAUSSIAN[1], atol=0.12)


def test_one_particle_is_a_mode() -> None:
    fit = al.fit(0, gaussian_target(), None, al.SVGD(1, num_steps=800, learning_rate=0.05), progress=False)
    np.testing.assert_allclose(np.asarray(fit.posterior.params)[0], GAUSSIAN[0], atol=1e-2)


@pytest.mark.parametrize("space", ["weights", "function"])
def test_a_repulsive_ensemble_spreads_as_the_posterior_does(space: str) -> None:
    """A line through the origin: one weight, so that the functions at the rows are as the weight. The flow comes to rest where the members'
    kernel density has the posterior's score: their variance is that of the posterior less that of the kernel, ℓ²/2."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 1)).astype(np.float32)
    y = (0.7 * x[:, 0] + 0.5 * rng.normal(size=30)).astype(np.float32)
    model = al.BNN((lambda p, x: x * p["w"], {"w": jnp.zeros(1)}), al.Gaussian(0.5), al.Normal(1.0))
    variance = 1.0 / (1.0 + np.sum(x**2) / 0.25)
    mean = variance * np.sum(x[:, 0] * y) / 0.25
    start = {"network": {"w": jnp.linspace(-1.0, 1.0, 40)[:, None]}, "likelihood": {}, "prior": {}}
    method = al.RepulsiveEnsemble(40, num_steps=1500, learning_rate=0.01, space=space)
    fit = al.fit(0, model, (x, y), method, init=al.posterior.Draws(start), progress=False)
    w = np.asarray(fit.posterior.params["network"]["w"], np.float64)[:, 0]
    assert abs(w.mean() - mean) < 0.05 * np.sqrt(variance)
    width = np.square(fit.info["bandwidth"][-1]) / (1.0 if space == "weights" else np.sum(x**2))
    np.testing.assert_allclose(w.var(), variance - 0.5 * width, rtol=0.1)  # up to the edges of 40 members


def test_functions_that_are_equal_are_pushed_apart_in_function_space_only() -> None:
    """Members that differ by the order of their hidden units are far apart in weights and the same function."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 1)).astype(np.float32)
    y = np.tanh(2 * x[:, 0]).astype(np.float32)
    model = al.BNN(al.networks.MLP(1, (10,), 1, activation="tanh"), al.Gaussian(0.3), al.Normal(1.0))
    spread = {}
    for space in ("weights", "function"):
        fit = al.fit(0, model, (x, y), al.RepulsiveEnsemble(8, num_steps=800, space=space), progress=False)
        spread[space] = fit.predict(1, np.linspace(2, 4, 9, dtype=np.float32)[:, None]).epistemic.mean()
    ensemble = al.fit(0, model, (x, y), al.Ensemble(al.MAP(num_steps=800), 8), progress=False)
    apart = ensemble.predict(1, np.linspace(2, 4, 9, dtype=np.float32)[:, None]).epistemic.mean()
    assert spread["function"] > 2.0 * apart and spread["function"] > 1.2 * spread["weights"]


def test_wrong_particles_are_refused() -> None:
    wrong = [
        (al.SVGD, {"bandwidth": "mean"}),
        (al.SVGD, {"bandwidth": -1.0}),
        (al.SVGD, {"space": "outputs"}),
        (al.SVGD, {"space": "function", "bandwidth": "learned"}),
        (al.SVGD, {"optimizer": "lbfgs"}),
        (al.RepulsiveEnsemble, {"bandwidth": "learned"}),
        (al.RepulsiveEnsemble, {"num_particles": 0}),
    ]
    for method, settings in wrong:
        with pytest.raises(al.MethodError, match="Do this"):
            method(**settings)
    with pytest.raises(al.MethodError, match="no functions"):
        al.fit(0, gaussian_target(), None, al.RepulsiveEnsemble())
