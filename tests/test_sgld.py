"""Samplers with stochastic gradients on Gaussians, where their bias is known: closed forms, gradient noise, control variates."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import brentq

import aleator as al
from aleator.data import Data
from aleator.methods import _stochastic, sghmc, underdamped
from aleator.methods._stochastic import Dynamics
from aleator.methods.sgld import SGLD
from aleator.target import Target

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")

WIDTH = 100  # coordinates, all independent
ONE = {"num_search": 0, "num_chains": 2}


def sgld_variance(lam: Any, h: float, noise: float = 0.0) -> Any:
    return (h + h**2 * noise**2 / 4) / (1 - (1 - h / (2 * lam)) ** 2)


def sghmc_variance(lam: Any, h: float, friction: float, noise: float = 0.0) -> Any:
    k, rest = h / (2 * lam), 2 - friction
    return (friction * h + h**2 * noise**2 / 4) * rest / (friction * k * (2 * rest - k))


def stationary(method: Any, lam: float, h: float, noise: float = 0.0) -> float:
    return covariance(method.dynamics(), lam, h, noise)[0, 0]


def covariance(dynamics: Any, lam: float, h: float, noise: float = 0.0) -> np.ndarray:
    """The stationary covariance of (θ, v) under a method's own moves on U = θ²/2λ with gradient noise: the matrix of the linear recursion is read
    off by moving unit vectors without noise, its noise by moving with and without, and the discrete Lyapunov equation does the rest."""
    with jax.enable_x64(True):
        zero = jnp.zeros(())
        momentum = jax.tree.leaves(dynamics.init(zero)) != []
        key = jax.random.key(0)

        def move(theta: float, v: float, kick: float, heat: float) -> np.ndarray:
            inner = jnp.asarray(v) if momentum else ()
            theta = jnp.asarray(theta)
            gradient = theta / lam + kick
            theta, inner = dynamics.move(jax.random.clone(key), theta, inner, gradient, jnp.asarray(h), jnp.asarray(0.0), heat)
            return np.array([theta, inner if momentum else 0.0], float)

        matrix = np.stack([move(1.0, 0.0, 0.0, 0.0), move(0.0, 1.0, 0.0, 0.0) * momentum], axis=1)
        injected = move(0.0, 0.0, 0.0, 1.0) / float(_stochastic.normals(key, zero))
        kicked = noise * move(0.0, 0.0, 1.0, 0.0)
        return solve_discrete_lyapunov(matrix, np.outer(injected, injected) + np.outer(kicked, kicked))


def test_the_closed_forms_are_those_of_the_moves() -> None:
    """To rounding: no Monte Carlo error, so the smallest step size is told from exact sampling."""
    known = [(1, 0, 0.01, 1.002506), (1, 0, 0.1, 1.025641), (1, 0, 0.5, 1.142857), (3, 0.1, 1.0, 3.280909), (1, 0.1, 1.0, 1.336667)]
    for lam, noise, h, value in known:
        np.testing.assert_allclose(stationary(SGLD(), lam, h, noise), value, atol=6e-7)
        np.testing.assert_allclose(stationary(al.SGHMC(friction=1.0), lam, h, noise), value, atol=6e-7)
    for friction in (0.05, 0.3, 0.9):
        for lam, noise, h, _ in known:
            found = stationary(al.SGHMC(friction=friction), lam, h, noise)
            np.testing.assert_allclose(found, sghmc_variance(lam, h, friction, noise), rtol=1e-12)
            np.testing.assert_allclose(stationary(al.Underdamped(friction=friction), lam, h), lam, rtol=1e-12)
        np.testing.assert_allclose(sghmc_variance(2.0, 0.4, friction), 2.0 / (1 - 0.4 / (8 * (2 - friction))), rtol=1e-12)
    np.testing.assert_allclose(stationary(al.Underdamped(friction=0.3), 1.0, 7.9), 1.0, rtol=1e-9)  # up to its limit 8λ


def test_the_momentum_samplers_hold_on_to_less_noise_than_they_get() -> None:
    """With gradient noise BAOAB is off as SGHMC is: by about hν²/4 of the share that friction replaces."""
    for friction in (0.1, 0.5):
        gain = stationary(al.Underdamped(friction=friction), 1.0, 0.01, 3.0) - 1.0
        np.testing.assert_allclose(gain, 0.01 * 9 / 4 / friction, rtol=0.6)


def variances(draws: np.ndarray) -> tuple[float, float]:
    """Mean over the coordinates of their variances about zero, and its standard error: coordinates are independent."""
    each = np.mean(np.square(np.asarray(draws, np.float64)), axis=0)
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(each.size))


@pytest.mark.parametrize(
    ("method", "h", "closed"),
    [
        (al.SGLD, 0.5, lambda lam: sgld_variance(lam, 0.5)),
        (al.SGHMC, 0.5, lambda lam: sghmc_variance(lam, 0.5, 0.1)),
        (al.Underdamped, 1.0, lambda lam: lam),
        (al.SGNHT, 0.1, lambda lam: lam),
    ],
)
def test_draws_have_the_variance_of_the_closed_form(method: Any, h: float, closed: Any) -> None:
    lam = np.repeat([1.0, 3.0], WIDTH)
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p["x"] ** 2 / lam), {"x": jnp.zeros(2 * WIDTH)})
    fit = al.fit(1, target, None, method(h, num_samples=600, num_warmup=300, thin=20, **ONE), progress=False)
    draws = np.asarray(fit.posterior.params["x"])
    for scale, part in ((1.0, draws[:, :WIDTH]), (3.0, draws[:, WIDTH:])):
        value, error = variances(part)
        assert abs(value - closed(scale)) < 5 * error and error < 0.015 * scale
    health = fit.manifest["health"]
    # E[θ·∇U] = E[θ²]/λ: the mean over coordinates of the ratio of the variances.
    expected = 0.5 * (closed(1.0) + closed(3.0) / 3.0)
    assert abs(health["configurational_temperature"] - expected) < 5 * max(health["configurational_temperature_error"], 2e-3)
    if method is not al.SGLD:
        assert abs(health["kinetic_temperature"] - 1.0) < 0.1


# ---- mini-batches -----------------------------------------------------------------------------------------------------------------

ROWS, BATCH = 200, 10


def mean_model(num_rows: int = ROWS, spread: float = np.sqrt(BATCH)) -> tuple[al.BNN, tuple[np.ndarray, np.ndarray]]:
    """θ (D,) with y ~ N(θ, ROWS) and a flat prior: U has curvature 1 in each of D coordinates, mode 0. The rows have mean zero and standard deviation `spread`, so
    that independent batches of BATCH rows give gradients of standard deviation spread/√BATCH."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(num_rows, WIDTH))
    y = (y - y.mean(axis=0)) / y.std(axis=0) * spread
    function = lambda params, x: jnp.broadcast_to(params["theta"], (x.shape[0], WIDTH))
    network = (function, {"theta": jnp.zeros(WIDTH)})
    return al.BNN(network, al.Gaussian(float(np.sqrt(ROWS))), al.Normal(1e3)), (np.zeros((num_rows, 1), np.float32), y.astype(np.float32))


@pytest.mark.parametrize(("correct", "friction"), [(False, 1.0), (True, 1.0), (True, 0.2)])
def test_gradient_noise_heats_the_chain_unless_it_is_corrected_for(correct: bool, friction: float) -> None:
    """ν = 1, h = 0.5: without correction (h + h²/4)/(1 − (1 − h/2)²) = 1.2857; with it the value for exact gradients."""
    model, data = mean_model()
    h = 0.5
    settings = {"num_samples": 300, "num_warmup": 400, "thin": 10, "batch_size": BATCH, **ONE}
    method = SGLD(h, correct_noise=correct, **settings) if friction == 1.0 else al.SGHMC(h, friction, correct_noise=correct, **settings)
    fit = al.fit(2, model, data, method, progress=False)
    value, error = variances(fit.posterior.params["network"]["theta"])
    expected = sghmc_variance(1.0, h, friction, 0.0 if correct else 1.0)
    assert abs(value - expected) < 5 * error + 0.004 * correct  # V is an estimate: its own error is about a hundredth of 0.14
    assert abs(fit.manifest["health"]["gradient_noise"] * friction - h / 4) < 0.05 * h / 4
    assert any("not corrected" in departure for departure in fit.manifest["departures"]) == (not correct)


def test_the_thermostat_needs_no_estimate() -> None:
    """Gradient noise ν = 3 at h = 0.02 adds 23 % to the variance at this friction. The thermostat raises its friction until momenta have
    variance h/2; what is left is the variance of θ at that friction, 1.03."""
    model, data = mean_model(spread=3.0 * np.sqrt(BATCH))
    h, friction, settings = 0.02, 0.2, {"num_samples": 600, "num_warmup": 1500, "thin": 20, "batch_size": BATCH, **ONE}
    fit = al.fit(3, model, data, al.SGNHT(h, friction, **settings), progress=False)
    value, error = variances(fit.posterior.params["network"]["theta"])
    gain = underdamped.exact_gain(friction)
    at = lambda alpha: covariance(Dynamics(sghmc.init, functools.partial(underdamped.move, friction=alpha, gain=gain)), 1.0, h, 3.0)
    alpha = brentq(lambda a: at(a)[1, 1] - h / 2, 0.1, 0.6, xtol=1e-5)
    assert at(friction)[0, 0] > 1.2 and at(alpha)[0, 0] < 1.05
    assert abs(value - at(alpha)[0, 0]) < 5 * error and error < 0.02
    assert abs(fit.manifest["health"]["kinetic_temperature"] - 1.0) < 0.01


def logistic(num_rows: int, width: int) -> tuple[Any, Data, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, width)).astype(np.float32)
    y = (rng.uniform(size=num_rows) < 1 / (1 + np.exp(-x @ rng.normal(size=width) / np.sqrt(width)))).astype(np.int32)
    model = al.LinearModel(al.features.Identity(), al.Bernoulli(), al.Normal(1.0))
    return model, Data(x, y[:, None]), Target(model.bind(x, y[:, None]), num_rows)


def test_control_variates_lower_the_variance_of_the_gradient() -> None:
    """Logistic regression, N = 1e5, d = 50, batches of 1 %: at a draw of the posterior, a tenth of the variance or less, without bias."""
    model, data, target = logistic(100_000, 50)
    packing = _stochastic._optimise.packing(jax.eval_shape(target.init, jax.random.key(0)))
    mode = al.fit(0, model, (data.x, data.y), al.MAP(num_steps=150, optimizer="lbfgs"), progress=False).posterior.params
    batch = data.batch()
    flat = lambda tree: np.asarray(jax.vmap(lambda t: _stochastic._tree.flat(t))(tree), np.float64)
    # The posterior of this many rows is Gaussian with about the inverse of the Fisher information as covariance, some 1/(N·0.2).
    # The anchor is a little off the mode, so that its full gradient matters.
    here = jax.tree.map(lambda leaf: leaf + jax.random.normal(jax.random.key(5), leaf.shape) / np.sqrt(0.2e5), packing.pack(mode))
    params = jax.tree.map(lambda leaf: leaf + 0.01, packing.pack(mode))

    @jax.jit
    def gradients(keys: Any, anchor: Any, batch: Any) -> Any:
        one = lambda key: _stochastic.estimate(here, _stochastic.draw(key, batch, 1000, "independent"), anchor, target, packing)[1]
        return jax.lax.map(one, keys)

    total = jax.jit(lambda p, b: _stochastic.full_gradient(p, b, target, packing))(params, batch)
    exact = flat(jax.tree.map(lambda leaf: leaf[None], _stochastic.estimate(here, batch, (), target, packing)[1]))[0]
    keys = jax.random.split(jax.random.key(6, impl="philox2x32"), 200)
    plain = flat(gradients(keys, (), batch))
    around = flat(gradients(jax.random.clone(keys), _stochastic.Anchor(params, total), batch))
    for found in (plain, around):
        assert np.all(
            np.abs(found.mean(axis=0) - exact) < 5 * found.std(axis=0) / np.sqrt(len(keys)) + 0.1
        )  # a sum of 100,000 rows in single precision
    assert np.mean(plain.var(axis=0)) > 10 * np.mean(around.var(axis=0))


@pytest.mark.parametrize("kind", ["mode", "svrg"])
def test_control_variates_leave_the_posterior_where_it_is(kind: str) -> None:
    model, data, _ = logistic(2000, 3)
    truth = al.fit(0, model, (data.x, data.y), al.NUTS(num_samples=500, num_warmup=300, num_chains=2), progress=False)
    settings = {"num_samples": 1000, "num_warmup": 200, "thin": 10, "batch_size": 100, "num_chains": 2, "num_search": 300}
    fit = al.fit(1, model, (data.x, data.y), al.Underdamped(control_variates=kind, friction=0.2, **settings), progress=False)
    plain = al.fit(1, model, (data.x, data.y), al.Underdamped(friction=0.2, **settings), progress=False)
    noise = lambda result: result.manifest["health"]["gradient_noise"] / result.manifest["health"]["step_size"]
    assert noise(fit) < 0.1 * noise(plain) and plain.manifest["health"]["gradient_noise"] < 0.8
    pick = lambda result: np.asarray(result.posterior.params["network"]["weight"], np.float64).reshape(2, -1, 4)
    a, b = pick(truth), pick(fit)
    error = np.hypot(al.convergence.mcse(a), al.convergence.mcse(b))
    assert np.all(np.abs(a.mean(axis=(0, 1)) - b.mean(axis=(0, 1))) < 5 * error)
    assert np.all(error < 0.1 * a.std(axis=(0, 1)))
    np.testing.assert_allclose(b.std(axis=(0, 1)), a.std(axis=(0, 1)), rtol=0.15)
