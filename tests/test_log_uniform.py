"""KL of N(θ, αθ²) against the log-uniform prior: exact values, numerical integration, Dawson's function, both precisions, the far ends."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

from aleator.divergences import kl_log_uniform

ALPHAS = np.array([0.05, 0.1, 0.5, 1.0, 2.0, 10.0, 20.0])
EXACT = np.array([2.10572, 1.72414, 0.73944, 0.42669, 0.23048, 0.04918, 0.02479])


def by_integration(alpha: float, theta: float = 1.0) -> float:
    """E_q log q(w) − E_q log p(w) with p(w) = 1/|w|, plus the constant that makes it 0 at α → ∞, ½ (γ + log 2) + ½ log 2πe."""
    scale = np.sqrt(alpha) * abs(theta)
    q = stats.norm(theta, scale)
    inner = lambda w: q.pdf(w) * np.log(abs(w))
    log_w = 0.0
    # The logarithm has its pole at 0: quadrature with 0 as an end point, on pieces the size of q.
    cuts = np.unique([theta - 12 * scale, theta - 2 * scale, theta, theta + 2 * scale, theta + 12 * scale, 0.0])
    for a, b in itertools.pairwise(cuts):
        log_w += integrate.quad(inner, a, b, epsabs=1e-12, epsrel=1e-11, limit=200)[0]
    return -q.entropy() + log_w + 0.5 * (np.euler_gamma + np.log(2)) + 0.5 * np.log(2 * np.pi * np.e)


def reference(log_alpha: np.ndarray) -> np.ndarray:
    """2 ∫₀ᵘ D by SciPy's adaptive quadrature up to u = 50, and the asymptotic series of D, D ≈ 1/2v + 1/4v³ + 3/8v⁵, beyond."""
    us = np.exp(-0.5 * (log_alpha + np.log(2)))
    beyond = lambda v: np.log(v) - 1 / (4 * v**2) - 3 / (16 * v**4)
    parts = [integrate.quad(special.dawsn, a, b, epsabs=0, epsrel=1e-13)[0] for a, b in ((0, 2), (2, 8), (8, 50))]
    out = []
    for u in us:
        if u > 50:
            out.append(2 * sum(parts) + beyond(u) - beyond(50.0))
        else:
            cuts = [c for c in (0.0, 2.0, 8.0) if c < u] + [u]
            pieces = itertools.pairwise(cuts)
            out.append(2 * sum(integrate.quad(special.dawsn, a, b, epsabs=0, epsrel=1e-13)[0] for a, b in pieces))
    return np.array(out)


def slope(log_alpha: np.ndarray) -> np.ndarray:
    u = np.exp(-0.5 * (log_alpha + np.log(2)))
    return -u * special.dawsn(u)


def three_constants(log_alpha: np.ndarray) -> np.ndarray:
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    return -(k1 * special.expit(k2 + k3 * log_alpha) - 0.5 * np.log1p(np.exp(-log_alpha)) - k1)


# 401 points over the whole range, and a fine net where the curve bends and fits oscillate.
GRID = np.unique(np.concatenate([np.linspace(-80, 80, 401), np.linspace(-8, 4, 241)]))
TRUTH = reference(GRID)


def test_known_values():
    np.testing.assert_allclose(kl_log_uniform(np.log(ALPHAS)), EXACT, atol=0.5e-5, rtol=0)


@pytest.mark.parametrize("alpha", [0.01, *ALPHAS, 300.0])
def test_against_integration_of_the_definition_at_any_theta(alpha):
    integrals = [by_integration(alpha, theta) for theta in (0.03, 1.0, -7.0)]
    np.testing.assert_allclose(integrals, integrals[0], atol=1e-9)  # independent of θ
    with jax.enable_x64(True):
        assert float(kl_log_uniform(jnp.log(alpha))) == pytest.approx(integrals[1], rel=1e-8, abs=1e-9)


def test_the_reference_is_the_definition():
    np.testing.assert_allclose(reference(np.log(ALPHAS)), [by_integration(alpha) for alpha in ALPHAS], atol=1e-9)


def test_float32_within_a_millionth():
    points = GRID.astype(np.float32)  # all of them differ a little from GRID, and that is not the function's error
    truth = reference(points.astype(float))
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(kl_log_uniform)))(points)
    assert value.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(value, truth, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, slope(points.astype(float)), rtol=1e-6, atol=1e-7)


def test_float64_within_1e_8():
    with jax.enable_x64(True):
        value, gradient = jax.jit(jax.vmap(jax.value_and_grad(kl_log_uniform)))(jnp.asarray(GRID))
        assert value.dtype == gradient.dtype == jnp.float64
        np.testing.assert_allclose(value, TRUTH, rtol=1e-8, atol=0)
        np.testing.assert_allclose(gradient, slope(GRID), rtol=1e-8, atol=0)


def test_the_slope_is_that_of_the_values():
    # Central differences: an error h²/6 |KL‴| < 2e-9 and rounding 1e-8 · 1e-3; the two fits of value and slope belong together.
    with jax.enable_x64(True):
        middle, h = jnp.linspace(-8, 4, 49), 1e-4
        differences = (kl_log_uniform(middle + h) - kl_log_uniform(middle - h)) / (2 * h)
        np.testing.assert_allclose(jax.vmap(jax.grad(kl_log_uniform))(middle), differences, atol=1e-7)


def test_second_and_third_derivatives():
    # With D′ = 1 − 2uD and du/d log α = −u/2: KL″ = ½uD + ½u²(1 − 2uD). The third by differences of the second.
    points = np.linspace(-8, 4, 49)
    u = np.exp(-0.5 * (points + np.log(2)))
    dawson = special.dawsn(u)
    with jax.enable_x64(True):
        second = jax.vmap(jax.grad(jax.grad(kl_log_uniform)))(jnp.asarray(points))
        np.testing.assert_allclose(second, 0.5 * u * dawson + 0.5 * u**2 * (1 - 2 * u * dawson), atol=1e-7)
        curve = lambda a: jax.grad(jax.grad(kl_log_uniform))(a)
        third = jax.vmap(jax.grad(curve))(jnp.asarray(points))
        differences = (jax.vmap(curve)(points + 1e-4) - jax.vmap(curve)(points - 1e-4)) / 2e-4
        np.testing.assert_allclose(third, differences, atol=1e-6)
    forwards = jax.jvp(kl_log_uniform, (jnp.asarray(0.3),), (jnp.asarray(2.0),))[1]
    assert float(forwards) == pytest.approx(2 * float(jax.grad(kl_log_uniform)(0.3)), rel=1e-6)


@pytest.mark.parametrize("double", [False, True])
def test_nothing_overflows_at_the_ends(double):
    with jax.enable_x64(double):
        ends = jnp.array([-1e4, -200.0, -100.0, -80.0, 80.0, 100.0, 200.0, 1e4])
        for order in (kl_log_uniform, jax.grad(kl_log_uniform), jax.grad(jax.grad(kl_log_uniform))):
            assert bool(jnp.all(jnp.isfinite(jax.vmap(order)(ends))))
        small, large = ends[:4], ends[4:]
        np.testing.assert_allclose(kl_log_uniform(small), 0.5 * (np.euler_gamma + np.log(2) - np.asarray(small)), rtol=1e-6)
        np.testing.assert_allclose(kl_log_uniform(large), np.exp(-np.asarray(large, float)) / 2, rtol=1e-5, atol=1e-37)


def test_positive_and_falling():
    values = np.asarray(kl_log_uniform(np.linspace(-20, 15, 2001)))
    assert values.min() > 0
    assert np.all(np.diff(values) < 0)


def test_the_usual_three_constants_are_worse():
    worst = lambda values, truth: np.max(np.abs(values - truth))
    middle = np.abs(GRID) <= 10
    usual = worst(three_constants(GRID[middle]), TRUTH[middle])
    ours = worst(
        np.asarray(kl_log_uniform(GRID[middle].astype(np.float32)), float), reference(GRID[middle].astype(np.float32).astype(float))
    )
    assert 1e-3 < usual < 2e-2
    assert ours < 1e-6 * TRUTH[middle].max()


def test_shapes_and_kinds_of_input():
    assert kl_log_uniform(jnp.zeros((2, 3, 1))).shape == (2, 3, 1)
    assert kl_log_uniform(jnp.zeros((0, 4))).shape == (0, 4)
    assert float(kl_log_uniform(0)) == pytest.approx(0.42669, abs=1e-5)
    assert kl_log_uniform(jnp.zeros(3, jnp.bfloat16)).dtype == jnp.bfloat16
