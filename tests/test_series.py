"""Autoregression: the lagged design, forecasts against closed forms, and everything that must be refused. Lecture row E6."""

from __future__ import annotations

import numpy as np
import pytest

import aleator as al
from aleator import series
from aleator.series import autoregression

SIGMA = 0.4


def linear(noise: float = SIGMA, bias: bool = False, scale: float = 1.0) -> al.LinearModel:
    return al.LinearModel(al.features.Identity(bias=bias), al.Gaussian(noise), al.Normal(scale))


def simulate(coefficients: tuple[float, ...], n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    y = np.zeros(n + 50)
    for t in range(len(coefficients), n + 50):
        y[t] = sum(c * y[t - 1 - i] for i, c in enumerate(coefficients)) + SIGMA * rng.normal()
    return y[50:]


def normal_moment(mean: float, variance: float, power: int) -> float:
    """E[φ^power] of φ ~ N(mean, variance): m_k = mean·m_{k−1} + (k − 1)·variance·m_{k−2}."""
    before, now = 0.0, 1.0
    for k in range(1, power + 1):
        before, now = now, mean * now + (k - 1) * variance * before
    return now


def test_design_rows() -> None:
    y, u = np.arange(10.0), 100.0 + np.arange(20.0).reshape(10, 2)
    ar = autoregression(y, [1, 3], linear(), exogenous=u, standardise=False)
    x, target = ar.data
    np.testing.assert_array_equal(target, y[3:])
    np.testing.assert_array_equal(x, np.column_stack([y[2:-1], y[:-3], u[3:]]))
    assert autoregression(y, 3, linear()).lags == (1, 2, 3)
    x, target = autoregression(y, [2], linear(), exogenous=u).data
    np.testing.assert_allclose(x[:, 0] * y.std() + y.mean(), y[:-2])
    np.testing.assert_allclose(x[:, 1:] * u.std(0) + u.mean(0), u[2:])
    np.testing.assert_allclose(target * y.std() + y.mean(), y[2:])


def check_moments(paths: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> None:
    """Means and variances of every step at 5 Monte Carlo standard errors, the latter from the fourth moment."""
    n = len(paths)
    assert np.all(np.abs(paths.mean(0) - mean) < 5 * paths.std(0) / np.sqrt(n))
    squares = (paths - mean) ** 2
    assert np.all(np.abs(squares.mean(0) - variance) < 5 * squares.std(0) / np.sqrt(n))


def test_first_order_is_the_closed_form() -> None:
    """E[y_{T+h}] = y_T E[φʰ], Var = y_T² Var(φʰ) + σ² Σ_{j<h} E[φ²ʲ], φ ~ the exact posterior.

    Ten values, so that φ is uncertain: a new φ at every step would give E[φ]ʰ and E[φ²]ʲ, which are far off.
    """
    y = simulate((0.8,), 10) + 0.0
    y[-1] = 3.0
    ar = autoregression(y, 1, linear(), standardise=False)
    fit = ar.fit(0, al.Exact())
    m, v = float(fit.posterior.mean[0, 0]), float(fit.posterior.operator.covariance()[0, 0, 0])
    horizon = 6
    steps = range(1, horizon + 1)
    mean = np.array([y[-1] * normal_moment(m, v, h) for h in steps])
    noise = np.array([SIGMA**2 * sum(normal_moment(m, v, 2 * j) for j in range(h)) for h in steps])
    variance = np.array([y[-1] ** 2 * normal_moment(m, v, 2 * h) for h in steps]) - mean**2 + noise
    forecast = ar.forecast(1, fit, horizon, num_samples=40_000)
    check_moments(forecast.paths, mean, variance)
    # The test can tell one draw per path from one per step.
    independent = SIGMA**2 * sum((v + m**2) ** j for j in range(horizon)) + y[-1] ** 2 * ((v + m**2) ** horizon - m ** (2 * horizon))
    squares = (forecast.paths[:, -1] - mean[-1]) ** 2
    assert abs(independent - variance[-1]) > 10 * squares.std() / np.sqrt(len(squares))


@pytest.mark.parametrize("standardise", [False, True])
def test_second_order_is_the_closed_form(standardise: bool) -> None:
    """Given φ the moments follow from powers of the companion matrix; the Gaussian over φ is integrated by Gauss–Hermite quadrature."""
    y = 3.0 + 2.0 * simulate((1.2, -0.5), 40, seed=1)
    ar = autoregression(y, 2, linear(), standardise=standardise)
    fit = ar.fit(0, al.Exact())
    centre = fit.posterior.mean[0]
    factor = fit.posterior.operator.sqrt_matvec(np.eye(2)[:, None, :])[:, 0].T
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    horizon, loc, scale = 5, ar.scaler.loc[0], ar.scaler.scale[0]
    start = (y[[-1, -2]] - loc) / scale
    means, squares = np.zeros(horizon), np.zeros(horizon)
    for a, wa in zip(nodes, weights, strict=True):
        for b, wb in zip(nodes, weights, strict=True):
            phi = centre + factor @ np.array([a, b])
            companion, state, spread = np.array([phi, [1.0, 0.0]]), start, np.zeros((2, 2))
            for h in range(horizon):
                state = companion @ state
                spread = companion @ spread @ companion.T + np.diag([SIGMA**2, 0.0])
                means[h] += wa * wb * state[0] / (2 * np.pi)
                squares[h] += wa * wb * (state[0] ** 2 + spread[0, 0]) / (2 * np.pi)
    forecast = ar.forecast(2, fit, horizon, num_samples=40_000)
    check_moments(forecast.paths, loc + scale * means, scale**2 * (squares - means**2))


def test_units_are_undone_exactly() -> None:
    """The same series in other units has the same forecast in other units, path by path."""
    y = simulate((0.9,), 60)
    one, two = (autoregression(s, 2, linear(bias=True)) for s in (y, 500.0 + 30.0 * y))
    a, b = (ar.forecast(1, ar.fit(0, al.Exact()), 8, num_samples=20).paths for ar in (one, two))
    np.testing.assert_allclose(500.0 + 30.0 * a, b, rtol=1e-10)
    predictive = two.predict(3, two.fit(0, al.Exact()))
    np.testing.assert_allclose(500.0 + 30.0 * one.predict(3, one.fit(0, al.Exact())).mean, predictive.mean, rtol=1e-10)
    assert np.corrcoef(predictive.mean, two.series[2:])[0, 1] > 0.5
    # A stretch of the same series is the same rows, under the scalers of the fit.
    part = two.predict(3, two.fit(0, al.Exact()), two.series[40:])
    np.testing.assert_allclose(part.mean, predictive.mean[40:], rtol=1e-10)
    with pytest.raises(al.DataError, match="longest lag"):
        two.predict(3, two.fit(0, al.Exact()), two.series[:2])


def test_exogenous_inputs_move_the_forecast() -> None:
    """y_t = u_t without noise: the forecast is the future of u."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(80, 1))
    ar = autoregression(2.0 + 3.0 * u[:, 0], 1, linear(1e-3), exogenous=u)
    fit = ar.fit(0, al.Exact())
    future = np.array([[0.5], [-1.0], [2.0]])
    np.testing.assert_allclose(ar.forecast(1, fit, 3, exogenous=future).mean, 2.0 + 3.0 * future[:, 0], atol=0.01)
    with pytest.raises(al.DataError, match=r"shape \(3, 1\)"):
        ar.forecast(1, fit, 3)
    with pytest.raises(al.DataError, match=r"\(2, 1\)"):
        ar.forecast(1, fit, 2, exogenous=future)


def _program(x, y=None):
    import numpyro
    import numpyro.distributions as dist

    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * x[:, 0], 0.5), obs=y if y is None else y.reshape(-1))


def _with_dropout():
    import equinox as eqx
    import jax

    keys = jax.random.split(jax.random.key(0), 2)
    layers = [eqx.nn.Linear(2, 16, key=keys[0]), eqx.nn.Lambda(jax.nn.tanh), eqx.nn.Dropout(0.3), eqx.nn.Linear(16, 1, key=keys[1])]
    return al.BNN(eqx.nn.Sequential(layers), al.Gaussian(0.3))


BNN = al.BNN(al.networks.MLP(2, (6,), 1, "tanh"), al.Gaussian())
CASES = {
    "map": (BNN, al.MAP(num_steps=100)),
    "ensemble": (BNN, al.Ensemble(al.MAP(num_steps=100), 3)),
    "variational": (BNN, al.Variational(num_steps=100, num_evidence=0)),
    "dropout": (BNN, al.Dropout(0.1, num_steps=100, num_evidence=0)),
    "own dropout": (_with_dropout, al.Dropout(existing=True, num_steps=100, num_evidence=0)),
    "heteroscedastic": (al.BNN(al.networks.MLP(2, (6,), 2, "tanh"), al.HeteroscedasticGaussian()), al.MAP(num_steps=100)),
    "program": (lambda: al.from_numpyro(_program), al.Variational(num_steps=100, num_evidence=0)),
    "unknown noise": (
        al.LinearModel(al.features.Identity(), al.Gaussian(al.InverseGamma(2.0, 1.0)), al.Normal(1.0), scaled_by_noise=True),
        al.Exact(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_any_model_and_method(name: str) -> None:
    model, method = CASES[name]
    ar = autoregression(simulate((0.7, -0.2), 60), 2, model() if not hasattr(model, "likelihood") else model)
    fit = ar.fit(0, method)
    forecast = ar.forecast(1, fit, 5, num_samples=4000)
    assert forecast.paths.shape == (4000, 5) and np.isfinite(forecast.paths).all()
    # One step ahead by simulation is the predictive distribution.
    many = forecast.paths[:, 0]
    x = ar.scaler.apply(ar.series[-1:-3:-1])[None]
    predictive = fit.predict(3, x, 4000)
    sd = float(predictive.std[0]) * ar.scaler.scale[0]
    expected = ar.scaler.invert(predictive.mean)[0]
    # Both means come from draws; an ensemble's and a point's are exact.
    assert abs(many.mean() - expected) < 5 * np.hypot(many.std(), sd) / np.sqrt(4000)


def test_each_path_is_one_function() -> None:
    """With next to no noise the second step of a path is f(first step) under the draw that made the first: linear, φ = y₁/y₀, y₂ = φy₁."""
    y = simulate((0.8,), 8)
    ar = autoregression(y, 1, linear(1e-6, scale=1.0), standardise=False)
    fit = al.fit(0, linear(SIGMA), ar.data, al.Exact())
    quiet = al.Fit(
        ar.model.bind(*[np.atleast_2d(a).T if a.ndim == 1 else a for a in ar.data]), fit.method, fit.posterior, {}, "", fit.manifest
    )
    paths = ar.forecast(1, quiet, 3, num_samples=50).paths
    phi = paths[:, 0] / y[-1]
    assert phi.std() > 0.05
    np.testing.assert_allclose(paths[:, 1:], y[-1] * phi[:, None] ** np.array([2, 3]), atol=1e-4)


def test_counts_stay_counts() -> None:
    rng = np.random.default_rng(0)
    y = rng.poisson(5.0, 60)
    ar = autoregression(y, 2, al.BNN(al.networks.MLP(2, (4,), 1, "tanh"), al.Poisson()))
    np.testing.assert_array_equal(ar.data[1], y[2:])
    assert abs(ar.data[0].mean()) < 0.2
    fit = ar.fit(0, al.MAP(num_steps=200))
    paths = ar.forecast(1, fit, 2, num_samples=2000).paths
    assert np.all(paths == paths.round()) and paths.min() >= 0
    # The second step has seen the first in the units of the inputs: its mean, given the first, is the network's there.
    given = fit.predict(2, ar.scaler.apply(np.column_stack([paths[:, 0], np.full(2000, y[-1])])))
    residual = paths[:, 1] - given.mean
    assert abs(residual.mean()) < 5 * residual.std() / np.sqrt(2000)
    assert given.mean.std() > 0.1
    # ... and those units are the target's, scaled.
    first, second = al.Standardiser((2.0,), (3.0,)), al.Standardiser((-1.0,), (0.5,))
    a, b = series._between(first, second)
    np.testing.assert_allclose(a + b * np.array([-1.0, 4.0]), second.apply(first.invert(np.array([-1.0, 4.0]))))
    with pytest.raises(al.ModelError, match="label"):
        autoregression(y, 2, al.BNN(al.networks.MLP(2, (4,), 3), al.Categorical(3)))


def test_summary_names_level_and_units() -> None:
    rng = np.random.default_rng(0)
    forecast = series.Forecast(rng.normal(size=(4000, 2)) * [1.0, 2.0], "animals")
    lower, upper = forecast.interval(0.8)
    # The error of a quantile is √(q(1−q)/n)/density.
    density = np.exp(-0.5 * 1.2816**2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(upper - lower, 2 * 1.2816 * np.array([1.0, 2.0]), atol=2 * 5 * 2 * np.sqrt(0.09 / 4000) / density)
    text = forecast.summary(0.8)
    assert "80 % interval" in text and "[animals]" in text and len(text.splitlines()) == 3
    assert "2 steps by 4000 paths" in repr(forecast)
    with pytest.raises(al.DataError, match="level"):
        forecast.interval(1.0)


def test_what_cannot_be_a_series() -> None:
    y = simulate((0.5,), 20)
    gap = y.copy()
    gap[[7, 11]] = np.nan
    with pytest.raises(al.DataError, match=r"series\[7\] = nan, then positions \[11\]"):
        autoregression(gap, 2, linear())
    import pandas as pd

    dated = pd.Series(gap, index=pd.date_range("2020-01-01", periods=20))
    with pytest.raises(al.DataError, match=r"series\[7\] \(2020-01-08"):
        autoregression(dated, 2, linear())
    with pytest.raises(al.DataError, match=r"exogenous\[3\]"):
        autoregression(y, 2, linear(), exogenous=np.where(np.arange(20) == 3, np.inf, 1.0))
    with pytest.raises(al.DataError, match="at least 22"):
        autoregression(y, 20, linear())
    with pytest.raises(al.DataError, match="constant"):
        autoregression(np.full(20, 3.0), 2, linear())
    for lags in (0, -1, [], [1, 1], [1.5], True, "2", [0, 1]):
        with pytest.raises(al.DataError, match="lags"):
            autoregression(y, lags, linear())
    with pytest.raises(al.DataError, match="shape"):
        autoregression(y[:, None], 2, linear())
    with pytest.raises(al.DataError, match="numeric"):
        autoregression(["a", "b", "c", "d"], 1, linear())
    with pytest.raises(al.DataError, match="line up"):
        autoregression(y, 2, linear(), exogenous=y[:-1])
    ar = autoregression(y, 3, linear())
    fit = ar.fit(0, al.Exact())
    with pytest.raises(al.DataError, match="horizon"):
        ar.forecast(1, fit, 0)
    with pytest.raises(al.DataError, match="longest lag"):
        ar.forecast(1, fit, 2, history=y[:2])
    with pytest.raises(al.DataError, match="no exogenous"):
        ar.forecast(1, fit, 2, exogenous=y[:2])
    # A history of the same end is the same forecast.
    np.testing.assert_array_equal(ar.forecast(1, fit, 2, history=y[-3:]).paths, ar.forecast(1, fit, 2).paths)
