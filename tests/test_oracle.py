"""The oracle against an exact posterior, and fidelity against what is known of simple departures."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import numpy as np
import pytest

import aleator as al
from aleator.posterior import Draws, Point


def line(noise: float = 0.5) -> tuple[al.LinearModel, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = np.linspace(-1, 1, 30, dtype=np.float32)
    return al.LinearModel(al.features.Polynomial(1), al.Gaussian(noise), al.Normal(1.0)), (
        x,
        (0.7 * x + noise * rng.normal(size=30)).astype(np.float32),
    )


@pytest.fixture(scope="module")
def gold() -> al.Fit:
    model, data = line()
    return al.oracle(0, model, data, budget=120.0)


def test_the_oracle_finds_the_exact_posterior(gold: al.Fit) -> None:
    assert gold.status.startswith("Oracle")
    model, data = line()
    exact = al.fit(0, model, data, al.Exact())
    found = al.fidelity(exact, gold, data[0])
    # Against the truth the oracle is as close as its halves are to each other, which have half its draws.
    assert found.distance.agreement == 1.0
    assert found.distance.total_variation < 2.0 * found.floor.total_variation + 1e-3
    assert abs(found.distance.log_predictive) < 1e-3


def test_distances_of_a_known_departure(gold: al.Fit) -> None:
    """A point mass in place of the posterior, shifted by δ: W₁ = δ for the same noise, TV = 2Φ(δ/2σ) − 1, KL = δ²/2σ²."""
    from scipy.stats import norm

    _, data = line()
    centre = jax.tree.map(lambda leaf: np.asarray(leaf).mean(axis=0), gold.posterior.params)
    moved = jax.tree.map(np.array, centre)
    moved["network"]["weight"][..., 0] += 0.3
    a = dataclasses.replace(gold, posterior=Draws(jax.tree.map(lambda leaf: leaf[None].repeat(4, axis=0), centre), num_chains=2))
    b = dataclasses.replace(gold, posterior=Point(moved))
    found = al.fidelity(b, a, data[0]).distance
    np.testing.assert_allclose(found.wasserstein, 0.3, rtol=2e-3)
    np.testing.assert_allclose(found.total_variation, 2 * norm.cdf(0.3 / (2 * 0.5)) - 1, rtol=2e-3)
    np.testing.assert_allclose(found.log_predictive, 0.3**2 / (2 * 0.5**2), rtol=2e-3)
    assert found.agreement == 0.0  # 0.3 is more than 0.2 of the predictive standard deviation 0.5


def test_classes_are_compared_by_probability() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).astype(np.float32)
    y = (x[:, 0] + 0.5 * rng.normal(size=30) > 0).astype(int)
    model = al.BNN(al.networks.MLP(2, (), 2), al.Categorical(2), al.Normal(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gold = al.fit(0, model, (x, y), al.HMC(num_samples=300, num_warmup=200, num_chains=2), progress=False)
        point = al.fit(0, model, (x, y), al.MAP(num_steps=500, batch_size=None))
    same, other = al.fidelity(gold, gold, x), al.fidelity(point, gold, x)
    assert same.distance == al.fidelity(gold, gold, x, key=5).distance and same.distance.total_variation == 0.0
    # A point has no spread over draws: it is far in W₁ even where its averages are close.
    assert 2.0 * same.floor.wasserstein < other.distance.wasserstein < 1
    assert "oracle against itself" in str(other)


def test_a_budget_that_is_too_small_is_said() -> None:
    model, data = line()
    with pytest.warns(al.HealthWarning, match="Not an oracle"):
        al.oracle(0, model, data, budget=1e-3)
    with pytest.raises(al.MethodError, match="needs time"):
        al.oracle(0, model, data, budget=0.0)


def test_a_fit_of_another_target_is_refused(gold: al.Fit) -> None:
    x = np.linspace(-1, 1, 30, dtype=np.float32)
    model = al.LinearModel(al.features.Polynomial(1), al.Bernoulli(), al.Normal(1.0))
    other = al.fit(0, model, (x, (x > 0).astype(int)), al.MAP(num_steps=10))
    assert "too few to tell" in other.status
    with pytest.raises(al.MethodError, match=r"predict different things.*binary targets in 1 column.*real targets in 1 column"):
        al.fidelity(other, gold, x)


def test_a_reference_without_draws_is_refused() -> None:
    model, data = line()
    exact = al.fit(0, model, data, al.Exact())
    with pytest.raises(al.MethodError, match="no draws to split"):
        al.fidelity(exact, exact, data[0])
