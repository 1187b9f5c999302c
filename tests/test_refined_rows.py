"""Refining the hidden variables of an autoencoder: on a linear-Gaussian one, log p(y) is closed and every bound is below it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aleator as al
from aleator.latent.vae import VAE

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")

SIGMA = 0.6
RNG = np.random.default_rng(0)
LOADINGS = np.array([[1.5, 0.2, -0.7, 0.4], [1.2, 0.5, -0.6, -0.3]])  # two directions that are nearly one: codes correlate
Y = (RNG.normal(size=(60, 2)) @ LOADINGS + 0.3 + SIGMA * RNG.normal(size=(60, 4))).astype(np.float32)


def log_marginal(weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """log N(y; b, W'W + σ²I) of each row."""
    covariance = weight.T @ weight + SIGMA**2 * np.eye(4)
    apart = Y.astype(float) - bias
    return -0.5 * (np.sum(apart * np.linalg.solve(covariance, apart.T).T, axis=1) + np.linalg.slogdet(2 * np.pi * covariance)[1])


@pytest.fixture(scope="module")
def model() -> VAE:
    return VAE(2, (), (), al.Gaussian(SIGMA))


def test_every_bound_is_below_the_evidence_and_steps_close_the_gap(model: VAE) -> None:
    """With the exact loadings and the best diagonal encoder, the gap without steps is ½log(ΠΛᵢᵢ/|Λ|) in every row. Means over 60 rows and 100
    draws are known to the error computed from them."""
    fit = al.fit(0, model, Y, al.Amortised(num_steps=1, batch_size=10), progress=False)
    precision = np.eye(2) + LOADINGS @ LOADINGS.T / SIGMA**2
    encoder = LOADINGS.T @ np.linalg.inv(precision) / SIGMA**2
    params = fit.posterior.params
    scales = np.zeros((4, 2))
    params["encoder0"]["layer0"] = {
        "weight": np.concatenate([encoder, scales], axis=1).astype(np.float32),
        "bias": np.concatenate([-0.3 * encoder.sum(axis=0), -0.5 * np.log(np.diag(precision))]).astype(np.float32),
    }
    params["decoder0"]["layer0"] = {"weight": LOADINGS.astype(np.float32), "bias": np.full(4, 0.3, np.float32)}
    exact = log_marginal(LOADINGS, np.full(4, 0.3)).mean()
    short, error = {}, {}
    for steps in (0, 2, 8, 32):
        # Rows four times over: four independent answers from one question.
        bounds = al.evidence.refined_bound(1, fit, np.concatenate([Y] * 4), steps, 0.4, 50).reshape(4, -1).mean(axis=1)
        short[steps], error[steps] = float(exact - np.mean(bounds)), float(np.std(bounds, ddof=1) / 2 + 1e-3)
        assert short[steps] > -5 * error[steps]
    gap = 0.5 * (np.sum(np.log(np.diag(precision))) - np.linalg.slogdet(precision)[1])
    assert short[0] == pytest.approx(gap, abs=float(6 * error[0])) and gap > 0.4
    assert short[0] > 1.2 * short[2] > 1.2**2 * short[8] > 1.2**3 * short[32], short


def test_networks_and_steps_are_trained_together(model: VAE) -> None:
    """What is climbed is a bound for the decoder it ends at, and the sizes of the steps have moved."""
    method = al.Amortised(num_steps=400, batch_size=30, learning_rate=2e-2, estimator="refined", num_refine=3, step_size=0.05, clip=1.0)
    fit = al.fit(0, model, Y, method, progress=False)
    decoder = {name: np.asarray(leaf, float) for name, leaf in fit.posterior.params["decoder0"]["layer0"].items()}
    exact = log_marginal(decoder["weight"], decoder["bias"])
    bound = al.evidence.refined_bound(1, fit, Y, 3, float(fit.info["step_size"][-1]), 100)
    assert exact.mean() - 0.1 < bound.mean() < exact.mean() + 0.02
    assert exact.mean() > log_marginal(np.zeros((2, 4)), Y.mean(axis=0)).mean() + 0.5
    assert fit.info["step_size"][-1] > 0.06


def test_what_cannot_be_refined_is_refused() -> None:
    for model in (VAE(2, (4,), (4,), al.Gaussian(0.5), posterior="full"), VAE((2, 1), (4,), (4,), al.Gaussian(0.5))):
        with pytest.raises(al.MethodError, match="diagonal"):
            al.fit(0, model, Y, al.Amortised(num_steps=2, batch_size=10, estimator="refined"), progress=False)
    wrong: list[dict[str, Any]] = [{"num_refine": 0}, {"step_size": -1.0}, {"estimator": "refined", "warmup": 10}]
    for settings in wrong:
        with pytest.raises(al.MethodError, match="Do this"):
            al.Amortised(**settings)
