"""IVON: the mean-field optimum where it is known, positive curvature, and where the prior goes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import aleator as al

from .conformance import cases

X, Y = cases.regression()


@pytest.mark.parametrize("batch_size", [None, 8])
def test_finds_the_mean_field_optimum(batch_size: int | None) -> None:
    """Means exact, variances 1/diag(Λ). h averages 1/(1 − β₂) = 1000 steps of 8 draws of H·z², whose relative error is √(2/(2·1000·8)) ≈ 1.1 %
    (more with batches); means move with the noise of the last steps, which the cosine takes to zero."""
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact()).posterior
    diagonal = np.diag(np.linalg.inv(exact.operator.covariance()[0]))
    fit = al.fit(0, cases.linear_model(), (X, Y), al.IVON(num_steps=8000, num_draws=8, batch_size=batch_size, hess_init=10.0))
    ratio = np.asarray(fit.posterior.operator.scale, float) ** 2 * diagonal
    np.testing.assert_allclose(ratio, 1.0, atol=0.06 if batch_size is None else 0.15)
    error = (np.asarray(fit.posterior.mean["network"]["weight"]) - exact.mean) * np.sqrt(diagonal)
    assert np.max(np.abs(error)) < (0.1 if batch_size is None else 0.4)
    assert fit.manifest["prior"].startswith("Normal prior")


def test_other_priors_are_in_the_loss() -> None:
    """A Laplace prior pulls small weights to zero; without δ the curvature alone keeps the scales finite."""
    x = np.column_stack([X, np.zeros(len(X), np.float32)])
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.3), al.priors.Laplace(0.1))
    fit = al.fit(0, model, (x, Y), al.IVON(num_steps=3000, hess_init=10.0))
    weights, scale = np.asarray(fit.posterior.mean["network"]["weight"])[0], np.asarray(fit.posterior.operator.scale)
    assert np.all(np.isfinite(scale)) and np.all(scale > 0)
    assert abs(weights[-1]) < 0.1 and "in the loss" in fit.manifest["prior"]


def test_networks_with_learned_noise_and_temperature() -> None:
    warm = al.fit(0, cases.network_model(), (X, Y), al.IVON(num_steps=2000, hess_init=5.0))
    predictive = warm.predict(1, X)
    assert np.sqrt(np.mean((predictive.mean - Y) ** 2)) < 0.6 * np.std(Y)
    assert np.all(np.asarray(predictive.epistemic) > 0)
    cold = al.fit(0, cases.network_model(), (X, Y), al.IVON(num_steps=5), temperature=0.1)
    assert "temperature 0.1" in cold.manifest["departures"][0]


def test_curvature_stays_positive() -> None:
    """Where the loss is concave at the start. At the optimum 1/σ² is the mean curvature, E[12a² − 4] = 12(m² + σ²) − 4; h averages 1000
    draws of it, each with a relative spread of order one."""
    target = al.target_from_log_density(lambda p: -((p["a"] ** 2 - 1.0) ** 2), {"a": 0.0})
    fit = al.fit(0, target, None, al.IVON(num_steps=3000, hess_init=0.1, clip_radius=1.0))
    mean, scale = float(fit.posterior.mean["a"]), float(fit.posterior.operator.scale[0])
    assert abs((12 * (mean**2 + scale**2) - 4) * scale**2 - 1) < 0.3


def test_flat_and_tree_parameters_give_the_same_steps(monkeypatch) -> None:
    from aleator.methods import _optimise

    monkeypatch.setattr(_optimise, "FLAT_SIZE", 0)
    target = al.Target(cases.network_model().bind(X, Y[:, None]), cases.N)
    algorithm = al.IVON().build(target)
    state = algorithm.init(jax.random.key(0), target.init(jax.random.key(1)))
    assert isinstance(state.mean, dict)
    after, _ = jax.jit(algorithm.phases[0].step)(jax.random.key(2), state, al.Data(X, Y[:, None]).batch())
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert len(algorithm.finish(jax.random.key(3), after, None).operator.scale) == sum(leaf.size for leaf in jax.tree.leaves(state.mean))


@pytest.mark.parametrize("settings", [{"beta1": 1.0}, {"beta2": -0.1}, {"hess_init": 0.0}, {"clip_radius": -1.0}, {"schedule": "cosin"}])
def test_settings_that_do_not_work(settings: dict) -> None:
    with pytest.raises(al.MethodError):
        al.IVON(**settings)
