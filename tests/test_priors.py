"""Priors against SciPy, patterns, fan-in scaling, hierarchical scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats as st

import aleator as al

WEIGHTS = {"a": {"weight": np.linspace(-1, 1, 6).reshape(3, 2), "bias": np.array([0.3, -0.2])}, "b": {"weight": np.ones((2, 1))}}
FANS = {"a": {"weight": 3, "bias": 1}, "b": {"weight": 2}}
WEIGHTS = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), WEIGHTS)
FLAT = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(WEIGHTS)])


@pytest.mark.parametrize(
    ("prior", "reference"),
    [
        (al.Normal(0.7, loc=0.1), st.norm(0.1, 0.7)),
        (al.priors.Laplace(0.7, loc=0.1), st.laplace(0.1, 0.7)),
        (al.priors.StudentT(3.0, 0.7, loc=0.1), st.t(3.0, 0.1, 0.7)),
        (al.priors.from_distribution(dist.Cauchy(0.1, 0.7)), st.cauchy(0.1, 0.7)),
        (al.priors.from_distribution(dist.Logistic(0.1, 0.7)), st.logistic(0.1, 0.7)),
    ],
)
def test_densities_and_draws_are_scipys(prior, reference) -> None:
    np.testing.assert_allclose(prior.log_prob(WEIGHTS, {}, FANS), reference.logpdf(FLAT).sum(), rtol=1e-5)
    draws = jax.vmap(lambda key: prior.sample(key, WEIGHTS, FANS)[0])(jax.random.split(jax.random.key(0), 2000))
    assert st.kstest(np.asarray(draws["a"]["bias"]).ravel(), reference.cdf).pvalue > 1e-4


def test_scales_by_layer_and_fan_in() -> None:
    prior = al.Normal({"a.bias": 3.0, "a": 2.0, "*": 1.0}, scaling="fan_in")
    scales = prior.scales(WEIGHTS, FANS)
    assert scales == {"a": {"weight": pytest.approx(2 / 3**0.5), "bias": 3.0}, "b": {"weight": pytest.approx(1 / 2**0.5)}}
    parts = (
        st.norm(0, 2 / 3**0.5).logpdf(np.ravel(WEIGHTS["a"]["weight"])).sum() + st.norm(0, 3.0).logpdf(np.ravel(WEIGHTS["a"]["bias"])).sum()
    )
    parts += st.norm(0, 1 / 2**0.5).logpdf(np.ravel(WEIGHTS["b"]["weight"])).sum()
    np.testing.assert_allclose(prior.log_prob(WEIGHTS, {}, FANS), parts, rtol=1e-5)


@pytest.mark.parametrize("per", ["leaf", "layer", "global"])
def test_hierarchical_groups_and_forms(per: str) -> None:
    """Centred and non-centred forms are the same density after the change of variables w = s·z."""
    centred, free = (al.priors.Hierarchical(al.HalfNormal(1.0), per=per, scaling="fan_in", centred=c) for c in (True, False))
    hyper = centred.init(WEIGHTS, FANS)
    assert len(hyper["log_scale"]) == {"leaf": 3, "layer": 2, "global": 1}[per]
    hyper = jax.tree.map(lambda u: u + 0.4, hyper)
    raw = free.raw(WEIGHTS, hyper, FANS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), free.weights(raw, hyper, FANS), WEIGHTS)
    scales = jax.tree.leaves(free._scales(WEIGHTS, hyper, FANS))
    jacobian = sum(leaf.size * float(jnp.log(s)) for leaf, s in zip(jax.tree.leaves(WEIGHTS), scales, strict=True))
    np.testing.assert_allclose(free.log_prob(raw, hyper, FANS), centred.log_prob(WEIGHTS, hyper, FANS) + jacobian, rtol=1e-5)


def test_hierarchical_scales_are_learned() -> None:
    """Small true weights pull the inferred scale below that of large ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 20)).astype(np.float32)
    found = []
    for size in (0.05, 3.0):
        y = x @ (size * rng.normal(size=20)) + 0.1 * rng.normal(size=300)
        model = al.LinearModel(
            al.features.Identity(bias=False), al.Gaussian(0.1), al.priors.Hierarchical(al.LogNormal(0.0, 2.0), per="global")
        )
        fit = al.fit(0, model, (x, y), al.MAP(num_steps=3000, learning_rate=0.05))
        found.append(float(fit.posterior.params["prior"]["log_scale"]["global"]))
    assert found[0] < found[1] - 0.5


def test_what_cannot_be_a_prior() -> None:
    with pytest.raises(al.ModelError, match="real line"):
        al.priors.from_distribution(dist.Gamma(1.0, 1.0))
    with pytest.raises(al.ModelError, match="scalar"):
        al.priors.from_distribution(dist.Normal(np.zeros(2), 1.0))
    with pytest.raises(al.ModelError, match="degrees of freedom"):
        al.priors.StudentT(0.0)
    with pytest.raises(al.ModelError, match="per="):
        al.priors.Hierarchical(per="unit")
    with pytest.raises(al.ModelError, match="scaling"):
        al.Normal(1.0, scaling="fan_out")
