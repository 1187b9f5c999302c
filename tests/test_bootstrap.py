"""The Bayesian bootstrap: weights reach every kind of batch, members are weighted least squares, moments are Rubin's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator._fit import _rows
from aleator._random import as_key, split
from aleator.data import Data
from aleator.methods.bootstrap import BayesianBootstrap
from aleator.methods.hyper_ensemble import HyperEnsemble, Stretched, greedy
from tests.conformance import cases

X, Y = cases.regression()
FLAT = al.LinearModel(al.features.Identity(), al.Gaussian(0.3), al.Normal(1e4))


def weights_of(key: int, method: Any, data: Any = (X, Y)) -> np.ndarray:
    """The row weights that al.fit(key, …) gives to each member, (members, N)."""
    return _rows(split(as_key(key), 4)[1], method, Data(*data), None)[1]


def least_squares(phi: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(ΦᵀWΦ)⁻¹ΦᵀWy in float64."""
    phi = phi.astype(np.float64)
    return np.linalg.solve(phi.T @ (weight[:, None] * phi), phi.T @ (weight * y))


def features(x: np.ndarray) -> np.ndarray:
    return np.asarray(al.features.Identity()(x))


@pytest.mark.parametrize("parallel", ["vmap", "threads", "sequential"])
@pytest.mark.parametrize("driver", ["loop", "step"])
def test_members_are_weighted_least_squares_with_their_own_weights(driver: str, parallel: str) -> None:
    method = BayesianBootstrap(al.MAP(num_steps=40, optimizer="lbfgs"), 4)
    fit = al.fit(0, FLAT, (X, Y), method, driver=driver, parallel=parallel)
    expected = np.stack([least_squares(features(X), Y, w) for w in weights_of(0, method)])
    np.testing.assert_allclose(fit.posterior.params["network"]["weight"][:, 0], expected, atol=2e-4)
    assert np.ptp(expected, axis=0).min() > 0.01  # the weights matter at this tolerance


def test_weights_of_the_data_multiply() -> None:
    given = np.random.default_rng(1).uniform(0.1, 3.0, cases.N)
    method = BayesianBootstrap(al.MAP(num_steps=40, optimizer="lbfgs"), 2)
    fit = al.fit(0, FLAT, (X, Y, given), method)
    expected = np.stack([least_squares(features(X), Y, given * w) for w in weights_of(0, method)])
    np.testing.assert_allclose(fit.posterior.params["network"]["weight"][:, 0], expected, atol=2e-4)


def test_exact_base_is_a_mixture_of_exact_weighted_posteriors() -> None:
    """Rows reach the sums of a "once" phase with their weights: Σ⁻¹ = ΦᵀWΦ/σ² + I/s²."""
    method = BayesianBootstrap(al.Exact(batch_size=7), 3)
    fit = al.fit(0, cases.linear_model(), (X, Y), method)
    phi = features(X).astype(np.float64)
    for part, w in zip(fit.posterior.components, weights_of(0, method), strict=True):
        precision = phi.T @ (w[:, None] * phi) / 0.09 + np.eye(phi.shape[1])
        np.testing.assert_allclose(part.mean[0], np.linalg.solve(precision, phi.T @ (w * Y) / 0.09), rtol=1e-9)


def test_mini_batches_reach_the_same_members() -> None:
    """The mean over an epoch of batches is the weighted sum over all rows: MAP by mini-batches ends near the same solutions."""
    method = BayesianBootstrap(al.MAP(num_steps=4000, batch_size=8, learning_rate=0.02), 3)
    fit = al.fit(0, FLAT, (X, Y), method)
    weights = weights_of(0, method)
    expected = np.stack([least_squares(features(X), Y, w) for w in weights])
    plain = least_squares(features(X), Y, np.ones(cases.N))
    off = np.abs(fit.posterior.params["network"]["weight"][:, 0] - expected).max()
    assert off < 0.2 * np.abs(expected - plain).max()


def test_weights_are_dirichlet_times_the_number_of_rows() -> None:
    """E w = 1, Var w = (N − 1)/(N + 1), Cov = −1/(N + 1), Σ w = N exactly."""
    count = 4000
    weights = weights_of(3, BayesianBootstrap(al.MAP(), count), (X[:10], Y[:10]))
    n = 10
    np.testing.assert_allclose(weights.sum(axis=1), n, rtol=1e-12)
    variance = (n - 1) / (n + 1)
    assert (np.abs(weights.mean(axis=0) - 1.0) < 5 * np.sqrt(variance / count)).all()
    centred = weights - 1.0
    for i, j, expected in ((0, 0, variance), (0, 1, -1 / (n + 1)), (4, 7, -1 / (n + 1))):
        products = centred[:, i] * centred[:, j]
        assert abs(products.mean() - expected) < 5 * products.std() / np.sqrt(count)


def test_moments_are_rubins() -> None:
    """For the mean of y the bootstrap's draws have mean ȳ and variance Σ(y − ȳ)²/N/(N + 1)."""
    y, count = Y.astype(np.float64), 400
    model = al.LinearModel(lambda x: jnp.ones_like(x[:, :1]), al.Gaussian(1.0), al.Normal(1e4))
    fit = al.fit(0, model, (X, Y), BayesianBootstrap(al.MAP(num_steps=10, optimizer="lbfgs"), count), parallel="vmap")
    draws = np.asarray(fit.posterior.params["network"]["weight"])[:, 0, 0].astype(np.float64)
    variance = y.var() / (len(y) + 1)
    assert abs(draws.mean() - y.mean()) < 5 * np.sqrt(variance / count)
    squares = (draws - y.mean()) ** 2
    assert abs(squares.mean() - variance) < 5 * squares.std() / np.sqrt(count)


def test_held_out_rows_have_no_weight() -> None:
    method = BayesianBootstrap(al.MAP(num_steps=60, holdout=0.25, check_every=20), 3)
    rows, weights, held = _rows(as_key(0), method, Data(X, Y[:, None]), None)
    assert rows.shape == (3, 30) and weights.shape == (3, 40) and held.y.shape == (3, 10, 1)
    for m in range(3):
        out = np.setdiff1d(np.arange(40), rows[m])
        assert (weights[m][out] == 0).all() and (weights[m][rows[m]] > 0).all()
        np.testing.assert_allclose(weights[m].sum(), 30, rtol=1e-12)
        np.testing.assert_array_equal(held.y[m, :, 0], Y[out])
    fit = al.fit(0, cases.network_model(), (X, Y), method)
    assert np.isfinite(fit.predict(0, X).mean).all()


def test_plain_bootstrap_is_unchanged() -> None:
    rows, weights, held = _rows(as_key(0), al.Ensemble(al.MAP(), 2, bootstrap=True), Data(X, Y), None)
    assert weights is None and held is None and rows.shape == (2, 40) and len(np.unique(rows[0])) < 40


def test_what_cannot_be_weighed_is_refused() -> None:
    density = al.target_from_log_density(lambda p: -(p**2), 1.0)
    with pytest.raises(al.MethodError, match="no rows to weigh"):
        al.fit(0, density, None, BayesianBootstrap(al.MAP(num_steps=2), 2))
    stream = al.Stream(lambda epoch, start: iter([(X, Y)][start:]), 40)
    with pytest.raises(al.MethodError, match="rows cannot be split"):
        al.fit(0, cases.linear_model(), stream, BayesianBootstrap(al.MAP(num_steps=2, batch_size=40), 2))
    with pytest.raises(al.MethodError, match="already runs several"):
        al.fit(0, cases.linear_model(), (X, Y), BayesianBootstrap(al.Ensemble(al.MAP(num_steps=2), 2), 2))
    with pytest.raises(al.MethodError, match="a method to repeat"):
        BayesianBootstrap("map")
    with pytest.raises(al.MethodError, match="num_members"):
        BayesianBootstrap(al.MAP(), 0)


def test_it_says_what_it_is() -> None:
    fit = al.fit(0, cases.linear_model(), (X, Y), BayesianBootstrap(al.MAP(num_steps=30), 2))
    assert "weighted log-likelihood" in fit.manifest["departures"][0]
    assert jax.tree.leaves(fit.sample(0, 3))[0].shape == (3, 1, 4)


# ---- ensembles over prior scales ----------------------------------------------------------------------------------------------------


def test_a_stretched_prior_is_the_prior_with_other_scales() -> None:
    template = {"a": jnp.asarray([0.3, -1.0]), "b": jnp.asarray([[2.0]])}
    fans = {"a": 1, "b": 2}
    for prior, wide in (
        (al.Normal({"a": 0.5, "b": 2.0}, loc=0.2), al.Normal({"a": 1.5, "b": 6.0}, loc=0.2)),
        (al.priors.Laplace(0.7, scaling="fan_in"), al.priors.Laplace(2.1, scaling="fan_in")),
        (al.priors.StudentT(4.0, 0.7), al.priors.StudentT(4.0, 2.1)),
    ):
        hyper = {"log_factor": jnp.log(3.0)}
        value, slope = jax.value_and_grad(lambda raw, h, p=prior: Stretched(p).log_prob(raw, h, fans), argnums=(0, 1))(template, hyper)
        np.testing.assert_allclose(value, wide.log_prob(template, {}, fans), rtol=1e-5)
        expected = jax.grad(lambda raw, p=wide: p.log_prob(raw, {}, fans))(template)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), slope[0], expected)
        assert slope[1]["log_factor"] == 0.0


def test_greedy_picks_equal_brute_force() -> None:
    rng = np.random.default_rng(0)
    terms, weight = rng.normal(size=(6, 15)), rng.uniform(0.5, 2.0, 15)
    picks, scores = greedy(terms, weight, 4)
    chosen: list[int] = []
    for number in range(4):
        values = [np.average(np.log(np.mean(np.exp(terms[[*chosen, m]]), axis=0)), weights=weight) for m in range(6)]
        assert picks[number] == int(np.argmax(values))
        np.testing.assert_allclose(scores[number], max(values), rtol=1e-12)
        chosen.append(picks[number])


def test_members_are_ridge_solutions_under_their_own_prior() -> None:
    """Of a linear-Gaussian model: W = (ΦᵀΦ/σ² + I/(cs)²)⁻¹Φᵀy/σ² on the rows that are not held out, with the c that the fit reports."""
    base = al.MAP(num_steps=60, optimizer="lbfgs", holdout=0.25, check_every=60)
    method = HyperEnsemble(base, 6, 3, low=0.01, high=1.0)
    fit = al.fit(0, cases.linear_model(), (X, Y), method)
    rows, _, held = _rows(split(as_key(0), 4)[1], method, Data(X, Y[:, None]), None)
    assert all((rows[m] == rows[0]).all() for m in range(6)) and held.x.shape == (6, 10, cases.D)
    phi, y = features(X[rows[0]]).astype(np.float64), Y[rows[0]]
    chosen = fit.manifest["chosen"]
    solve = lambda c: np.linalg.solve(phi.T @ phi / 0.09 + np.eye(phi.shape[1]) / c**2, phi.T @ y / 0.09)
    expected = np.stack([solve(c) for c in chosen["prior_scale_factor"]])
    np.testing.assert_allclose(fit.posterior.params["network"]["weight"][:, 0], expected, atol=2e-3)
    assert fit.posterior.params["prior"] == {} and sum(chosen["weight"]) == pytest.approx(1.0)
    factors = np.array(chosen["candidates"]["prior_scale_factor"])
    assert len(np.unique(factors)) == 6 and factors.min() >= 0.01 and factors.max() <= 1.0
    assert np.abs(solve(factors.min()) - solve(factors.max())).max() > 0.01  # the scales matter at this tolerance
    assert chosen["held_out"] >= chosen["held_out_best_member"] - 1e-9 and max(chosen["candidates"]["held_out"]) == pytest.approx(
        chosen["held_out_best_member"]
    )


def test_validation_rows_make_the_choice() -> None:
    """The mixture's score is that of its own predictions on the rows given."""
    x, y = cases.regression(seed=5)
    method = HyperEnsemble(al.MAP(num_steps=100, holdout=0.1, check_every=20), 4, 3)
    fit = al.fit(0, cases.network_model(), (X, Y), method, validation=(x, y))
    assert fit.manifest["chosen"]["held_out"] == pytest.approx(float(fit.predict(0, x).log_prob(y).mean()), abs=1e-4)


def test_hyper_ensembles_refuse_what_they_cannot_vary() -> None:
    with pytest.raises(al.MethodError, match="held-out rows"):
        HyperEnsemble(al.MAP())
    with pytest.raises(al.MethodError, match="held-out rows"):
        HyperEnsemble(al.Exact())
    with pytest.raises(al.MethodError, match="range of prior scales"):
        HyperEnsemble(low=2.0, high=1.0)
    with pytest.raises(al.MethodError, match="num_kept"):
        HyperEnsemble(num_kept=0)
    model = al.BNN(al.networks.MLP(cases.D, (4,), 1), al.Gaussian(), al.priors.Hierarchical())
    with pytest.raises(al.MethodError, match="no prior scales"):
        al.fit(0, model, (X, Y), HyperEnsemble(al.MAP(num_steps=2, holdout=0.1), 2))
    with pytest.raises(al.MethodError, match="no prior scales"):
        al.fit(0, al.target_from_log_density(lambda p: -(p**2), 1.0), None, HyperEnsemble(al.MAP(num_steps=2, holdout=0.1), 2))
