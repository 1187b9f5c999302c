"""MAP: optimisers and schedules reach the closed-form mode; smoothing moves against the likelihood."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aleator as al
from aleator.methods import _optimise
from aleator.methods import map as map_file
from tests.conformance import cases

X, Y = cases.regression()


@pytest.fixture(scope="module")
def exact() -> al.Fit:
    return al.fit(0, cases.linear_model(), (X, Y), al.Exact())


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (al.MAP(num_steps=30, optimizer="lbfgs"), 1e-3),
        (al.MAP(num_steps=2000, learning_rate=0.05), 1e-3),
        (al.MAP(num_steps=2000, learning_rate=0.05, schedule="warmup_cosine", clip=10.0), 1e-3),
        (al.MAP(num_steps=3000, optimizer=optax.adam(1e-2)), 2e-3),
        (al.MAP(num_steps=1500, optimizer=lambda rate: optax.sgd(rate, momentum=0.9), learning_rate=0.01), 2e-3),
        (al.MAP(num_steps=2000, optimizer="adabelief", learning_rate=0.05), 2e-3),
    ],
    ids=["lbfgs", "adam", "warmup and clip", "optax object", "factory", "adabelief"],
)
def test_every_optimiser_finds_the_ridge_solution(method: al.MAP, tolerance: float, exact: al.Fit) -> None:
    """The mode of a linear-Gaussian posterior is ridge regression with λ = σ²/s²: weight decay implied by prior and N."""
    fit = al.fit(0, cases.linear_model(), (X, Y), method)
    np.testing.assert_allclose(fit.posterior.params["network"]["weight"], exact.posterior.mean, atol=tolerance)


def test_flat_and_tree_parameters_give_the_same_steps(monkeypatch) -> None:
    method = al.MAP(num_steps=25, batch_size=8)
    flat = al.fit(0, cases.network_model(), (X, Y), method).predict(0, X).mean
    monkeypatch.setattr(_optimise, "FLAT_SIZE", 0)
    target = al.Target(cases.network_model().bind(X, Y[:, None]), cases.N)
    assert isinstance(method.build(target).init(jax.random.key(0), target.init(jax.random.key(1))).params, dict)
    tree = al.fit(0, cases.network_model(), (X, Y), al.MAP(num_steps=25, batch_size=8, patience=11)).predict(0, X).mean
    np.testing.assert_allclose(flat, tree, atol=1e-4)


def test_smoothing_moves_each_row_against_its_likelihood() -> None:
    model = cases.network_model().bind(X, Y[:, None])
    target, batch = al.Target(model, cases.N), al.Data(X, Y[:, None]).batch()
    params = model.init(jax.random.key(0))
    moved = map_file._smoothed(params, batch, target, None, 0.01)
    np.testing.assert_allclose(np.abs(moved.x - batch.x), 0.01, atol=1e-6)
    assert (target.log_likelihood(params, moved) < target.log_likelihood(params, batch)).mean() > 0.95


def test_smoothing_flattens_the_fit() -> None:
    """Trained against perturbations of ε, the mean must change less over ε than without."""
    plain, smooth = (
        al.fit(0, cases.network_model(), (X, Y), al.MAP(num_steps=800, learning_rate=0.02, adversarial=e)).predict(0, X).draws[0]
        for e in (0.0, 0.5)
    )
    assert np.std(smooth) < np.std(plain)


def test_weights_enter_the_objective() -> None:
    heavy = al.fit(0, cases.linear_model(), (X, Y, np.r_[np.full(20, 2.0), np.ones(20)]), al.MAP(num_steps=30, optimizer="lbfgs"))
    twice = al.fit(0, cases.linear_model(), (np.r_[X, X[:20]], np.r_[Y, Y[:20]]), al.MAP(num_steps=30, optimizer="lbfgs"))
    np.testing.assert_allclose(heavy.posterior.params["network"]["weight"], twice.posterior.params["network"]["weight"], atol=1e-3)


def test_init_takes_an_earlier_fit_or_parameters(exact: al.Fit) -> None:
    first = al.fit(0, cases.network_model(), (X, Y), al.MAP(num_steps=300))
    more = al.fit(1, cases.network_model(), (X, Y), al.MAP(num_steps=1, learning_rate=1e-6), init=first)
    np.testing.assert_allclose(more.predict(0, X).mean, first.predict(0, X).mean, atol=1e-4)
    given = al.fit(1, cases.network_model(), (X, Y), al.MAP(num_steps=1, learning_rate=1e-6), init=first.posterior.params)
    np.testing.assert_allclose(given.predict(0, X).mean, first.predict(0, X).mean, atol=1e-4)
    members = al.fit(1, cases.network_model(), (X, Y), al.Ensemble(al.MAP(num_steps=1, learning_rate=1e-6), 2), init=first)
    np.testing.assert_allclose(members.predict(0, X).mean, first.predict(0, X).mean, atol=1e-4)


def test_a_bare_density_is_maximised() -> None:
    target = al.target_from_log_density(lambda p: -jnp.sum((p["a"] - jnp.arange(3)) ** 2) - p["b"] ** 2, {"a": np.ones(3), "b": 2.0})
    for method in (al.MAP(num_steps=500, learning_rate=0.1), al.Ensemble(al.MAP(num_steps=500, learning_rate=0.1), 2)):
        draws = al.fit(0, target, None, method).sample(0, 4)
        np.testing.assert_allclose(draws["a"], np.tile(np.arange(3.0), (4, 1)), atol=1e-2)
    with pytest.raises(al.MethodError, match="no data to hold out"):
        al.fit(0, target, None, al.MAP(num_steps=5, holdout=0.1))
    with pytest.raises(al.MethodError, match="reference"):
        target.log_prior({"a": np.ones(3), "b": 2.0})
    with pytest.raises(al.DataError, match="takes no data"):
        al.fit(0, target, (X, Y), al.MAP(num_steps=5))
    with pytest.raises(al.MethodError, match="one number"):
        al.target_from_log_density(lambda p: p, np.ones(3))
    with pytest.raises(al.MethodError, match="must be a function"):
        al.target_from_log_density(3.0, np.ones(3))


def test_the_reference_anneals() -> None:
    class Reference:
        def log_prob(self, params):
            return -0.5 * jnp.sum(params**2)

        def sample(self, key):
            return jax.random.normal(key, (2,))

    target = al.target_from_log_density(lambda p: -2.0 * jnp.sum(p**2), np.ones(2), reference=Reference())
    point = jnp.array([1.0, 2.0])
    for beta, expected in ((1.0, -10.0), (0.0, -2.5), (0.5, -6.25)):
        np.testing.assert_allclose(target.log_joint(point, beta=jnp.asarray(beta)), expected)
    assert target.sample_prior(jax.random.key(0)).shape == (2,)


def test_ensembles_of_ensembles_are_refused() -> None:
    with pytest.raises(al.MethodError, match="already runs several"):
        al.fit(0, cases.network_model(), (X, Y), al.Ensemble(al.Ensemble(al.MAP(num_steps=2), 2), 2))
    with pytest.raises(al.MethodError, match="a method to repeat"):
        al.Ensemble("map", 2)
    with pytest.raises(al.MethodError, match="num_members"):
        al.Ensemble(al.MAP(), 0)


def test_ensemble_of_exact_is_a_mixture() -> None:
    fit = al.fit(0, cases.linear_model(), (X, Y), al.Ensemble(al.Exact(), 3, bootstrap=True))
    assert isinstance(fit.posterior, al.posterior.Mixture)
    predictive = fit.predict(0, X, num_samples=300)
    np.testing.assert_allclose(predictive.variance, predictive.aleatoric + predictive.epistemic, rtol=1e-5)
    assert fit.sample(0, 5)["network"]["weight"].shape == (5, 1, 4)


def test_a_run_shorter_than_a_look_is_looked_at_once() -> None:
    """With fewer steps than check_every the end is what was seen, and not the start."""
    x, y = cases.regression()
    method = al.MAP(num_steps=30, holdout=0.2, check_every=100)
    fit = al.fit(0, cases.network_model(), (x, y), method, progress=False)
    whole = al.fit(0, cases.network_model(), (x, y), al.MAP(num_steps=30, holdout=0.2, check_every=30), progress=False)
    np.testing.assert_array_equal(fit.predict(1, x).mean, whole.predict(1, x).mean)
