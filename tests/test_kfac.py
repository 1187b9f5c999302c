"""K-FAC preconditioning: exact where the posterior is Gaussian, and far faster than plain steps where it is long and narrow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import convergence
from aleator.data import Data
from aleator.methods import _kfac
from aleator.target import Target
from tests.conformance import cases

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")

SIGMA, H = 0.5, 0.2


@pytest.fixture(scope="module")
def narrow() -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """A linear regression whose posterior is 100 times longer than wide, its data, exact mean and covariance."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    x = (rng.normal(size=(60, 3)) * [3.0, 1.0, 0.03] @ turn).astype(np.float32)
    y = (x @ rng.normal(size=3) + SIGMA * rng.normal(size=60)).astype(np.float32)
    model = al.LinearModel(al.features.Identity(bias=False), al.Gaussian(SIGMA), al.Normal(1.0))
    covariance = np.linalg.inv(x.T.astype(float) @ x / SIGMA**2 + np.eye(3))
    return model, (x, y), covariance @ x.T @ y / SIGMA**2, covariance


def weights(fit: Any, chains: int = 2) -> np.ndarray:
    return np.asarray(fit.posterior.params["network"]["weight"], np.float64).reshape(chains, -1, 3)


@pytest.fixture(scope="module")
def shaped(narrow: Any) -> np.ndarray:
    model, data, _, _ = narrow
    method = al.SGLD(H, 1500, 200, 2, thin=20, batch_size=None, num_search=0, preconditioner="kfac")
    return weights(al.fit(0, model, data, method, progress=False))


def test_the_stationary_covariance_is_that_of_the_closed_form(narrow: Any, shaped: np.ndarray) -> None:
    """G is the posterior covariance itself, so that draws have Σ/(1 − h/4) in every direction. A draw keeps (1 − h/2)²⁰ = 12 % of the one before:
    3,000 of them are worth 2,400, whose variances are known to 3 %."""
    _, _, mean, covariance = narrow
    flat = shaped.reshape(-1, 3)
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    found = root @ np.cov(flat.T) @ root.T * (1 - H / 4)
    assert np.abs(found - np.eye(3)).max() < 5 * np.sqrt(2 / 2400)
    assert np.abs(root @ (flat.mean(axis=0) - mean)).max() < 5 / np.sqrt(2000)


def test_it_mixes_faster_than_plain_steps(narrow: Any, shaped: np.ndarray) -> None:
    """The plain chain takes steps for the narrow direction: (100)² times too small for the long one."""
    model, data, _, covariance = narrow
    method = al.SGLD(num_samples=1500, num_warmup=200, num_chains=2, thin=20, batch_size=None, num_search=0)
    plain = weights(al.fit(0, model, data, method, progress=False))
    long = np.linalg.eigh(covariance)[1][:, -1]
    assert convergence.ess(shaped @ long) > 20 * convergence.ess(plain @ long)


@pytest.mark.parametrize("correct", [False, True])
def test_gradient_noise_is_corrected_in_the_new_coordinates(narrow: Any, correct: bool) -> None:
    """There it has variance of about N/n = 30 in every direction: h·30/4 = 37 % more variance than without it, unless it is taken off."""
    model, data, _, covariance = narrow
    method = al.SGLD(0.05, 600, 600, 2, thin=60, batch_size=2, num_search=0, preconditioner="kfac", correct_noise=correct)
    fit = al.fit(1, model, data, method, progress=False)
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    variance = np.mean(np.var(weights(fit).reshape(-1, 3) @ root.T, axis=0))
    assert fit.manifest["health"]["gradient_noise"] == pytest.approx(0.37, abs=0.15)
    # 1,200 draws at 22 % correlation in three directions: 2.5 %.
    assert abs(variance - 1.0) < 0.12 if correct else variance > 1.2


def test_the_root_is_that_of_the_dense_curvature() -> None:
    """On one layer with a learned noise scale: G^{½}G^{½}(H·v) = v for the exact curvature H; the noise scale by its empirical Fisher."""
    x, y = cases.regression()
    model = al.LinearModel(al.features.Identity(), al.Gaussian(), al.Normal(2.0)).bind(x, y[:, None])
    target = Target(model, cases.N, signature=al.model.signature(x))
    params = target.init(jax.random.key(0))
    plan, batch = _kfac.layout(target), Data(x, y[:, None]).batch()
    metric = jax.jit(lambda p: _kfac.refresh(_kfac.init(p, plan), p, batch, target, plan))(params)
    scale = float(np.exp(params["likelihood"]["log_scale"].ravel()[0]))
    design = np.concatenate([np.ones((cases.N, 1)), x], axis=1)
    curvature = design.T @ design / scale**2 + np.eye(4) / 4
    vector = np.arange(1.0, 5.0)
    tree = jax.tree.map(jnp.zeros_like, params)
    tree["network"] = jax.tree.map(lambda leaf: jnp.asarray(curvature @ vector, leaf.dtype).reshape(leaf.shape), tree["network"])
    back = _kfac.shape(metric, _kfac.shape(metric, tree, plan), plan)
    np.testing.assert_allclose(np.ravel(jax.tree.leaves(back["network"])[0]), vector, rtol=1e-3)
    residual = y - np.asarray(model.outputs(params, x)).ravel()
    fisher = np.sum((residual**2 / scale**2 - 1) ** 2)
    np.testing.assert_allclose(metric.other_root, (fisher + 1) ** -0.5, rtol=1e-4)


def test_networks_with_momentum_and_what_is_refused() -> None:
    x, y = cases.regression()
    method = al.SGHMC(0.02, 0.2, 300, 400, 2, thin=5, batch_size=20, num_search=200, preconditioner="kfac")
    fit = al.fit(0, cases.network_model(), (x, y), method, progress=False)
    assert np.sqrt(np.mean((fit.predict(1, x).mean - y) ** 2)) < 0.5
    # Over twelve keys 1.033 ± 0.037 (sd); after 200 steps of warm-up and 60 draws, 1.128 ± 0.067: momenta had not settled.
    assert abs(fit.manifest["health"]["kinetic_temperature"] - 1.0) < 0.15
    hierarchical = al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(), al.priors.Hierarchical())
    for target, data in ((hierarchical, (x, y)), (al.target_from_log_density(lambda p: -jnp.sum(p**2), jnp.zeros(2)), None)):
        with pytest.raises(al.MethodError, match="K-FAC needs"):
            al.fit(0, target, data, method, progress=False)
