"""Every likelihood, network and prior with two reference methods."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import aleator as al

from . import cases

METHODS = pytest.mark.parametrize("method", cases.REFERENCE_METHODS)


def check(fit: al.Fit, x: np.ndarray, y: np.ndarray, tmp_path, **loading) -> None:
    """Finite, decomposed, scored, saved and loaded."""
    predictive = fit.predict(1, x)
    scores = predictive.log_prob(y)
    assert scores.shape == (cases.N,) and np.isfinite(scores).all()
    np.testing.assert_allclose(predictive.variance, predictive.aleatoric + predictive.epistemic, rtol=1e-5, atol=1e-7)
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit", **loading).predict(1, x)
    np.testing.assert_array_equal(predictive.mean, again.mean)
    np.testing.assert_array_equal(scores, again.log_prob(y))


@METHODS
@pytest.mark.parametrize("name", cases.LIKELIHOODS)
def test_likelihood(method: str, name: str, tmp_path) -> None:
    case = cases.LIKELIHOODS[name]
    x, _ = cases.regression()
    model = al.BNN(al.networks.MLP(cases.D, (8,), case.out_size), case.likelihood)
    fit = al.fit(0, model, (x, case.y), cases.REFERENCE_METHODS[method])
    check(fit, x, case.y, tmp_path)
    assert (
        fit.info["log_likelihood"].mean(axis=tuple(range(fit.info["log_likelihood"].ndim - 1)))[-5:].mean()
        > fit.info["log_likelihood"][..., 0].mean()
    )


@METHODS
@pytest.mark.parametrize("name", cases.NETWORKS)
def test_network(method: str, name: str, tmp_path) -> None:
    case = cases.NETWORKS[name]
    network = case.make()
    y = cases.regression()[1] if case.classes is None else np.arange(cases.N) % case.classes
    likelihood = al.Gaussian() if case.classes is None else al.Categorical(case.classes)
    chosen = cases.REFERENCE_METHODS[method] if case.classes is None else al.MAP(num_steps=4, batch_size=8)
    chosen = chosen if case.classes is None or method == "map" else al.Ensemble(chosen, 2)
    fit = al.fit(0, al.BNN(network, likelihood), (case.x, y), chosen)
    own = name in ("equinox", "nnx", "function")
    check(fit, case.x, y, tmp_path, **({"network": network} if own else {}))
    if method == "ensemble":
        # Members must not have started from the same place.
        assert all(np.ptp(np.asarray(leaf), axis=0).max() > 0 for leaf in jax.tree.leaves(fit.posterior.params) if leaf.ndim > 2)


@METHODS
@pytest.mark.parametrize("name", cases.PRIORS)
def test_prior(method: str, name: str, tmp_path) -> None:
    x, y = cases.regression()
    model = al.BNN(al.networks.MLP(cases.D, (8,), 1), al.Gaussian(), cases.PRIORS[name])
    check(al.fit(0, model, (x, y), cases.REFERENCE_METHODS[method]), x, y, tmp_path)


@pytest.mark.parametrize("name", cases.PRIORS)
def test_prior_samples_match_its_density(name: str) -> None:
    """E[∇log p(θ)·θ] = −dim for any density that vanishes at infinity (integration by parts): samples and density must agree."""
    model = al.BNN(al.networks.MLP(2, (3,), 1), al.Gaussian(), cases.PRIORS[name])
    draws = jax.vmap(model.sample_prior)(jax.random.split(jax.random.key(0), 20_000))
    virial = lambda p: sum(jax.tree.leaves(jax.tree.map(lambda g, v: (g * v).sum(), jax.grad(model.log_prior)(p), p)))
    values = np.asarray(jax.vmap(virial)(draws))
    dim = sum(leaf.size for leaf in jax.tree.leaves(model.init(jax.random.key(0))))
    assert abs(values.mean() + dim) < 5 * values.std() / np.sqrt(len(values))
