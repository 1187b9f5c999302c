"""Exact against closed forms, enumeration by another road, and quadrature."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import scipy.stats as st

import aleator as al
from aleator.tables import Preprocessor

RNG = np.random.default_rng(0)


def normal_mean() -> tuple[np.ndarray, np.ndarray]:
    """Ten numbers with Σ = 7 and Σ² = 9."""
    z = RNG.normal(size=10)
    z = z - z.mean()
    return np.ones(10), 0.7 + z * np.sqrt((9 - 4.9) / np.sum(z**2))


def test_normal_mean_to_eight_digits() -> None:
    model = al.LinearModel(al.features.Polynomial(0), al.Gaussian(2.0**0.5), al.Normal(1.0))
    fit = al.fit(0, model, normal_mean(), al.Exact())
    assert abs(fit.posterior.mean.item() - 7 / 12) < 1e-8
    assert abs(fit.posterior.operator.covariance().item() - 1 / 6) < 1e-8
    assert abs(fit.log_evidence.value + 14.780168) < 5e-7
    assert fit.log_evidence.kind == "exact" and fit.log_evidence.stderr == 0.0


def design(n: int = 30, k: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = RNG.normal(size=n)
    phi = np.stack([np.ones(n), x, x**2, x**3], axis=1)
    return x, phi, phi @ RNG.normal(size=(4, k)) + 0.5 * RNG.normal(size=(n, k))


def test_known_noise_against_the_joint_gaussian() -> None:
    """Evidence as the density of y ~ N(m₀Φ1, σ²I + s²ΦΦᵀ), mean and covariance by conditioning it."""
    x, phi, y = design()
    sigma, scale, loc = 0.5, 1.3, 0.2
    model = al.LinearModel(al.features.Polynomial(3), al.Gaussian(sigma), al.Normal(scale, loc=loc))
    fit = al.fit(0, model, (x, y), al.Exact(batch_size=7))
    cov = sigma**2 * np.eye(30) + scale**2 * phi @ phi.T
    gain = scale**2 * phi.T @ np.linalg.inv(cov)
    prior_mean = phi @ np.full(4, loc)
    evidence = sum(st.multivariate_normal(prior_mean, cov).logpdf(y[:, j]) for j in range(2))
    assert abs(fit.log_evidence.value - evidence) < 1e-8
    np.testing.assert_allclose(fit.posterior.mean, (loc + gain @ (y - prior_mean[:, None])).T, atol=1e-8)
    expected = scale**2 * np.eye(4) - gain @ phi * scale**2
    np.testing.assert_allclose(fit.posterior.operator.covariance(), np.stack([expected] * 2), atol=1e-8)
    new = np.array([-1.0, 0.3, 5.0])
    rows = np.stack([np.ones(3), new, new**2, new**3], axis=1)
    predictive = fit.predict(0, new)
    np.testing.assert_allclose(predictive.epistemic[:, 0], np.sum(rows @ expected * rows, axis=1), rtol=1e-8)
    np.testing.assert_allclose(predictive.aleatoric, sigma**2, rtol=1e-12)


def test_unknown_noise_against_quadrature() -> None:
    """Evidence ∫ N(y; 0, σ²(I + s²ΦΦᵀ)) InvGamma(σ²; a, b) dσ² and the predictive, on a fine grid of σ²."""
    x, phi, y = design(k=1)
    a, b, scale = 2.0, 0.7, 1.5
    model = al.LinearModel(al.features.Polynomial(3), al.Gaussian(al.InverseGamma(a, b)), al.Normal(scale), scaled_by_noise=True)
    fit = al.fit(0, model, (x, y[:, 0]), al.Exact())
    log_s2 = np.linspace(-8, 6, 4001)
    s2 = np.exp(log_s2)
    base = np.eye(30) + scale**2 * phi @ phi.T
    quad, logdet = y[:, 0] @ np.linalg.solve(base, y[:, 0]), np.linalg.slogdet(base)[1]
    log_joint = -15 * np.log(2 * np.pi * s2) - 0.5 * logdet - 0.5 * quad / s2 + st.invgamma(a, scale=b).logpdf(s2) + log_s2
    evidence = np.log(np.trapezoid(np.exp(log_joint - log_joint.max()), log_s2)) + log_joint.max()
    assert abs(fit.log_evidence.value - evidence) < 1e-8
    weight = np.exp(log_joint - log_joint.max())
    weight /= weight.sum()
    precision = phi.T @ phi + np.eye(4) / scale**2
    mean = np.linalg.solve(precision, phi.T @ y[:, 0])
    row = np.array([1.0, 0.4, 0.16, 0.064])
    spread = np.sqrt(s2 * (1 + row @ np.linalg.solve(precision, row)))
    target = 0.9
    density = np.sum(weight * st.norm(row @ mean, spread).pdf(target))
    assert abs(fit.predict(0, np.array([0.4])).log_prob(np.array([target])).item() - np.log(density)) < 1e-6


def test_unknown_noise_draws_agree_with_its_own_moments() -> None:
    """Draws in the model's parameters, pushed through the model, give the Student-t predictive: 5 standard errors (p ≈ 6e-7 each)."""
    x, _, y = design(k=2)
    model = al.LinearModel(al.features.Polynomial(3), al.Gaussian(al.InverseGamma(3.0, 1.0)), al.Normal(1.0), scaled_by_noise=True)
    fit = al.fit(0, model, (x, y), al.Exact())
    draws = fit.sample(1, 20_000)
    sigma = np.exp(draws["likelihood"]["log_scale"])
    weights = draws["network"]["weight"] * sigma[..., None]
    row = np.array([1.0, 0.4, 0.16, 0.064])
    predictive = fit.predict(0, np.array([0.4]))
    outputs = weights @ row
    for j in range(2):
        se = outputs[:, j].std() / np.sqrt(20_000)
        assert abs(outputs[:, j].mean() - predictive.mean[0, j]) < 5 * se
        square = (outputs[:, j] - outputs[:, j].mean()) ** 2
        assert abs(square.mean() - predictive.epistemic[0, j]) < 5 * square.std() / np.sqrt(20_000)
        assert abs((sigma[:, j] ** 2).mean() - predictive.aleatoric[0, j]) < 5 * (sigma[:, j] ** 2).std() / np.sqrt(20_000)


@pytest.mark.parametrize("noise", [al.Gaussian(0.4), al.Gaussian(al.InverseGamma(1.0, 1.0))])
def test_update_equals_fitting_all_at_once(noise: al.Gaussian, tmp_path) -> None:
    x, _, y = design()
    model = al.LinearModel(al.features.Polynomial(3), noise, al.Normal(1.0), scaled_by_noise=not isinstance(noise.scale, float))
    whole = al.fit(0, model, (x, y), al.Exact())
    some = al.fit(0, model, (x[:11], y[:11]), al.Exact())
    some.save(tmp_path / "fit")
    for first in (some, al.load(tmp_path / "fit")):
        grown = first.update((x[11:20], y[11:20])).update((x[20:], y[20:]))
        np.testing.assert_allclose(grown.posterior.mean, whole.posterior.mean, atol=1e-10)
        np.testing.assert_allclose(grown.posterior.operator.covariance(), whole.posterior.operator.covariance(), atol=1e-10)
        assert abs(grown.log_evidence.value - whole.log_evidence.value) < 1e-9
        assert grown.manifest["data"]["num_data"] == 30
    assert some.manifest["data"]["num_data"] == 11


def test_update_of_a_fit_made_from_a_table(tmp_path) -> None:
    """It takes rows of the table, keeps columns and units as learned, and is the fit to all rows in those units."""
    x, _, y = design(k=1)
    frame = pd.DataFrame({"kind": np.where(x > 0, "a", "b"), "size": 3 * x + 1, "price": 100 + 20 * y[:, 0]})
    preprocessor, z, t = Preprocessor.fit(frame[:20], "price", "regression")
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.4), al.Normal(1.0))
    some = dataclasses.replace(al.fit(0, model, (z, t), al.Exact()), preprocessor=preprocessor)
    some = dataclasses.replace(some, manifest=some.manifest | {"table": {"target": "price"}})
    grown = some.update(frame[20:])
    grown.save(tmp_path / "fit")
    whole = al.fit(0, model, (preprocessor.transform(frame)[0], preprocessor.encode_target(frame)), al.Exact())
    whole = dataclasses.replace(whole, preprocessor=preprocessor)
    for one in (grown, al.load(tmp_path / "fit")):
        assert one.preprocessor == preprocessor and one.manifest["table"] == {"target": "price"}
        predicted, expected = one.predict(1, frame[:5]), whole.predict(1, frame[:5])
        np.testing.assert_allclose(predicted.mean, expected.mean, rtol=1e-9)
        np.testing.assert_allclose(predicted.variance, expected.variance, rtol=1e-9)
    arrays = some.update((preprocessor.transform(frame[20:])[0], preprocessor.encode_target(frame[20:])))
    np.testing.assert_array_equal(arrays.posterior.mean, grown.posterior.mean)
    with pytest.warns(al.HealthWarning, match="unseen in training"):
        some.update(frame[20:].assign(kind="c"))
    with pytest.raises(al.DataError, match="lacks the target"):
        some.update(frame[20:].drop(columns="price"))


def test_weights_count_rows() -> None:
    """A row of weight 2 is the same as the row twice."""
    x, _, y = design()
    model = al.LinearModel(al.features.Polynomial(3), al.Gaussian(0.4), al.Normal(1.0))
    weighted = al.fit(0, model, (x, y, np.r_[np.full(10, 2.0), np.ones(20)]), al.Exact())
    doubled = al.fit(0, model, (np.r_[x, x[:10]], np.r_[y, y[:10]]), al.Exact())
    np.testing.assert_allclose(weighted.posterior.mean, doubled.posterior.mean, atol=1e-10)
    assert abs(weighted.log_evidence.value - doubled.log_evidence.value) < 1e-9


def test_evidence_picks_order_two() -> None:
    """y = .5 − x + x² + noise .3, n = 50: order 2 of 0…8 in at least 95 of 100 seeds (98 expected)."""
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-2, 2, 50)
        y = 0.5 - x + x**2 + 0.3 * rng.normal(size=50)
        fits = {
            str(order): al.fit(0, al.LinearModel(al.features.Polynomial(order), al.Gaussian(0.3), al.Normal(1.0)), (x, y), al.Exact())
            for order in range(9)
        }
        hits += al.compare(fits).best == "2"
    assert hits >= 95


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (al.BNN(al.networks.MLP(1, (3,), 1)), "a BNN"),
        (al.LinearModel(al.features.Polynomial(1), al.Gaussian(1.0), al.priors.Laplace(1.0)), "prior Laplace"),
        (al.LinearModel(al.features.Polynomial(1), al.Gaussian(), al.Normal(1.0)), "likelihood Gaussian"),
        (al.LinearModel(al.features.Polynomial(1), al.Gaussian(al.InverseGamma(1.0, 1.0)), al.Normal(1.0)), "scaled_by_noise=False"),
        (al.LinearModel(al.features.Polynomial(1), al.Poisson(), al.Normal(1.0)), "Poisson"),
    ],
)
def test_models_without_a_closed_form_are_refused(model, said: str) -> None:
    x = np.linspace(0, 1, 5)[:, None]
    with pytest.raises(al.MethodError, match=said):
        al.fit(0, model, (x, np.arange(5)), al.Exact())


def test_cold_posteriors_are_not_exact() -> None:
    with pytest.raises(al.MethodError, match="temperature"):
        al.fit(0, al.LinearModel(al.features.Identity(), al.Gaussian(1.0)), design()[::2], al.Exact(), temperature=0.5)


def test_duplicated_features_are_handled_and_reported() -> None:
    """Without a jitter the precision is singular to rounding; the prior keeps it proper."""
    x = np.linspace(0, 1, 20)
    model = al.LinearModel(lambda x: np.ones(1) * 1e6 * x[:, None] ** np.zeros(3), al.Gaussian(1e-3), al.Normal(1e3))
    with pytest.warns(al.HealthWarning, match="nearly singular"):
        fit = al.fit(0, model, (x, x), al.Exact())
    assert np.isfinite(fit.log_evidence.value)
