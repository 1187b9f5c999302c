"""Exact processes by conjugate gradients, against the factor; noise that differs between rows; several outputs in long form."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import gp

RNG = np.random.default_rng(7)
X = RNG.uniform(-2, 2, (60, 2))
Y = np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] + 0.1 * RNG.standard_normal(60)
NEW = RNG.uniform(-2, 2, (5, 2))
FIXED = gp.GP(gp.RBF((0.5, 0.9), 1.2), gp.Zero(), al.Gaussian(0.2))


def value_and_slope(model: gp.GP, params: dict) -> tuple:
    return jax.jit(jax.value_and_grad(model.log_evidence))(params, jnp.asarray(X), jnp.asarray(Y[:, None]))


def test_evidence_and_slopes_without_a_factor_are_those_with_one() -> None:
    """A preconditioner of full rank leaves nothing to the probes; one of two thirds leaves an error that is known; blocks change nothing."""
    exact = gp.GP(gp.RBF()).bind(X, Y[:, None])
    with jax.enable_x64(True):
        params = exact.start(jax.random.key(0)) | {"likelihood": {"log_scale": jnp.array([-2.0])}}
        params["kernel"]["log_length"] = jnp.log(jnp.array([0.5, 0.9]))
        value, slope = value_and_slope(exact, params)
        full = dataclasses.replace(exact, solver=gp.Iterative(60, 2, 80, 1e-10))
        same = value_and_slope(full, params)
        np.testing.assert_allclose(same[0], value, rtol=1e-7)
        jax.tree.map(lambda ours, truth: np.testing.assert_allclose(ours, truth, rtol=1e-5, atol=1e-5), same[1], slope)
        some = dataclasses.replace(exact, solver=gp.Iterative(40, 64, 80, 1e-8))
        estimate, error = jax.jit(some.estimate)(params, X, Y[:, None])
        assert 0 < error < 0.5 and abs(estimate - value) < 4 * error
        ours = value_and_slope(some, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1.0), ours[1], slope)
        blocks = dataclasses.replace(some, solver=dataclasses.replace(some.solver, byte_budget=7 * 8 * 60))
        again = value_and_slope(blocks, params)
        np.testing.assert_allclose(again[0], ours[0], rtol=1e-9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), again[1], ours[1])


def test_predictions_without_a_factor() -> None:
    exact = al.fit(0, FIXED, (X, Y), gp.Evidence())
    other = al.fit(0, dataclasses.replace(FIXED, solver=gp.Iterative(40, 64, 80, 1e-8)), (X, Y), gp.Evidence())
    assert (
        other.log_evidence.kind == "estimate" and abs(other.log_evidence.value - exact.log_evidence.value) < 4 * other.log_evidence.stderr
    )
    for ours, truth in zip(other.joint(0, NEW), exact.joint(0, NEW), strict=True):
        np.testing.assert_allclose(ours, truth, atol=1e-6)
    rough = dataclasses.replace(exact.model, solver=gp.Iterative(1, 4, 4, 1e-10))
    with pytest.warns(al.HealthWarning, match="relative residual"):
        wide = gp.Conditioned(exact.posterior.base, X, Y[:, None]).outputs(jax.random.key(0), rough, NEW, 1)
    assert np.all(wide.variance[:, 0] >= exact.predict(0, NEW).epistemic)  # stopped early: too wide, never too narrow
    with pytest.raises(al.MethodError, match="factor"):
        gp.leave_one_out(other)
    with pytest.raises(al.ModelError, match="factor"):
        al.fit(0, other.model, (X, Y), al.MAP(num_steps=2))


def test_many_rows_take_conjugate_gradients_by_themselves() -> None:
    assert gp.GP(gp.RBF()).iterative(10_000) is None
    assert gp.GP(gp.RBF()).iterative(10_001) == gp.Iterative()


def test_duplicates_without_a_factor() -> None:
    """Five copies of each row, constant targets, with and without noise: the preconditioner has a floor, the process has none."""
    x, y = np.repeat(X[:4], 5, axis=0), np.ones((20, 1))
    model = gp.GP(gp.RBF(1.0, 1.0), gp.Zero(), solver=gp.Iterative(30, 4, 60)).bind(x, y)
    for noise in (1e-9, 0.2):
        params = {"kernel": {}, "mean": {}, "likelihood": {"log_scale": np.log([noise])}}
        outputs = gp.Conditioned(al.posterior.Point(params), x, y).outputs(jax.random.key(0), model, x, 1)
        assert np.all(np.isfinite(outputs.variance))
        np.testing.assert_allclose(outputs.mean, 1.0, atol=0.1)


# ---- noise that differs between rows ---------------------------------------------------------------------------------------------------


def test_known_noise_is_a_diagonal() -> None:
    errors = RNG.uniform(0.05, 0.8, 60)
    x, new = np.column_stack([X, errors]), np.column_stack([NEW, np.full(5, 0.3)])
    model = gp.GP(gp.RBF((0.5, 0.9), 1.2), gp.Zero(), al.HeteroscedasticGaussian(), noise=gp.KnownNoise())
    fit = al.fit(0, model, (x, Y), gp.Evidence())
    k = lambda a, b: 1.44 * np.exp(-0.5 * np.sum(((a[:, None] - b[None]) / [0.5, 0.9]) ** 2, -1))
    matrix = k(X, X) + np.diag(errors**2)
    density = -0.5 * Y @ np.linalg.solve(matrix, Y) - 0.5 * np.linalg.slogdet(matrix)[1] - 30 * np.log(2 * np.pi)
    np.testing.assert_allclose(fit.log_evidence.value, density, rtol=1e-9)
    predictive = fit.predict(0, new)
    variance = 1.44 - np.sum(k(X, NEW) * np.linalg.solve(matrix, k(X, NEW)), axis=0)
    np.testing.assert_allclose(predictive.mean, k(NEW, X) @ np.linalg.solve(matrix, Y), rtol=1e-6)
    np.testing.assert_allclose(predictive.variance, variance + 0.09, rtol=1e-5)
    np.testing.assert_allclose(predictive.epistemic, variance, rtol=1e-5)
    assert fit.functions(0, new, 3).shape == (3, 5)
    with pytest.raises(al.DataError, match="standard deviations"):
        al.fit(0, model, (X[:, 0], Y), gp.Evidence())


def test_noise_that_grows_is_found() -> None:
    """σ(x) = 0.05 + 0.4·x on (0, 1): learned within a third of it, and worth many nats over one σ."""
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(0, 1, 150))
    sigma = 0.05 + 0.4 * x
    y = np.sin(6 * x) + sigma * rng.standard_normal(150)
    one = al.fit(0, gp.GP(gp.RBF(), gp.Zero()), (x, y), gp.Evidence(num_restarts=1))
    model = gp.GP(gp.RBF(), gp.Zero(), al.HeteroscedasticGaussian(), noise=gp.NoiseProcess(num_inducing=6))
    fit = al.fit(0, model, (x, y), gp.Evidence(num_restarts=1))
    assert fit.log_evidence.value > one.log_evidence.value + 10
    found = np.sqrt(fit.predict(0, x).aleatoric)
    assert np.max(np.abs(np.log(found / sigma))) < 0.5 and np.mean(np.abs(np.log(found / sigma))) < 0.25


def test_outputs_in_long_form() -> None:
    """With correlation 0 they are processes apart; a missing entry is left out; each may have its own noise."""
    both = np.stack([Y, np.cos(X[:, 1])], axis=1)[:12]
    both[3, 1] = np.nan
    x, y = gp.long_form(X[:12], both)
    assert x.shape == (23, 3) and not np.any((x[:, 2] == 1) & np.all(x[:, :2] == X[3], axis=1))
    kernel = gp.RBF((0.5, 0.9), 1.2, columns=(0, 1)) * gp.Categorical(2, column=2)
    noise = gp.NoiseProcess(gp.Categorical(2, column=2, scale=1.0), 2, inducing=((0.0, 0.0, 0.0), (0.0, 0.0, 1.0)))
    model = gp.GP(kernel, gp.Zero(), al.HeteroscedasticGaussian(), noise=noise).bind(x, y[:, None])
    with jax.enable_x64(True):
        params = model.start(jax.random.key(0))
        params["kernel"]["1"]["logit"] = jnp.asarray(-40.0)
        params["noise"]["values"] = jnp.array([[0.4, -1.0]])
        together = float(model.log_evidence(params, x, y[:, None]))
        scales = np.sqrt(np.asarray(model.noise_variance(params, x))[0])
    apart = 0.0
    for level in (0, 1):
        rows = x[:, 2] == level
        assert np.ptp(scales[rows]) < 1e-12
        one = gp.GP(gp.RBF((0.5, 0.9), 1.2), gp.Zero(), al.Gaussian(float(scales[rows][0])))
        apart += al.fit(0, one, (x[rows, :2], y[rows]), gp.Evidence()).log_evidence.value
    assert scales[x[:, 2] == 0][0] != scales[x[:, 2] == 1][0]
    np.testing.assert_allclose(together, apart, rtol=1e-9)


def test_noise_and_likelihood_belong_together() -> None:
    with pytest.raises(al.ModelError, match="belong together"):
        gp.GP(gp.RBF(), likelihood=al.HeteroscedasticGaussian())
    with pytest.raises(al.ModelError, match="belong together"):
        gp.GP(gp.RBF(), noise=gp.KnownNoise())
