"""Sequential Monte Carlo and sampling–importance–resampling: evidence known to many digits, posteriors known exactly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.methods import smc
from aleator.methods.sir import SIR
from aleator.methods.smc import SMC
from aleator.methods.tempering import ParallelTempering, pooled, stepping_stones

from .conformance import cases

X, Y = cases.regression()

SCHOOLS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]), np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
POINTS = np.array([-2.1, -1.7, -1.9, -2.4, 1.8, 2.2, 2.0, 1.5])
MIXTURE_EVIDENCE, SCHOOLS_EVIDENCE = -17.355332, -31.311349
LOG_2PI = float(np.log(2.0 * np.pi))


def normal(x: Any, loc: Any, scale: Any) -> jax.Array:
    return -0.5 * ((x - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * LOG_2PI


class Mixture:
    """Its prior: means N(0, 9), weight of the second component uniform, through its logit."""

    def log_prob(self, p: dict) -> jax.Array:
        return jnp.sum(normal(p["mean"], 0.0, 3.0)) + jax.nn.log_sigmoid(p["logit"]) + jax.nn.log_sigmoid(-p["logit"])

    def sample(self, key: jax.Array) -> dict:
        key_mean, key_weight = jax.random.split(key)
        return {"mean": 3.0 * jax.random.normal(key_mean, (2,)), "logit": jax.random.logistic(key_weight, ())}


def mixture(p: dict) -> jax.Array:
    first = jax.nn.log_sigmoid(-p["logit"]) + normal(jnp.asarray(POINTS), p["mean"][0], 1.0)
    second = jax.nn.log_sigmoid(p["logit"]) + normal(jnp.asarray(POINTS), p["mean"][1], 1.0)
    return Mixture().log_prob(p) + jnp.sum(jnp.logaddexp(first, second))


MIXTURE = al.target_from_log_density(mixture, {"mean": np.zeros(2), "logit": 0.0}, Mixture())


def eight_schools(x: Any, y: Any = None) -> None:
    import numpyro
    import numpyro.distributions as dist

    mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", x.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * effect, x[:, 0]), obs=y)


def test_the_evidence_of_eight_schools() -> None:
    """Non-centred: θ = μ + τη. The number is that of μ ~ N(0, 5²), τ ~ half-Cauchy(5)."""
    from scipy import integrate, stats

    y, sigma = SCHOOLS
    given = lambda mu, t: (
        np.exp(stats.norm.logpdf(y, mu, np.hypot(sigma, 5.0 * np.tan(t))).sum() + stats.norm.logpdf(mu, 0.0, 5.0)) * 2 / np.pi
    )
    value, _ = integrate.dblquad(given, 0.0, np.pi / 2, -60.0, 60.0, epsabs=0.0, epsrel=1e-5)
    assert abs(np.log(value) - SCHOOLS_EVIDENCE) < 1e-5
    fit = al.fit(0, al.from_numpyro(eight_schools), (sigma[:, None], y), SMC(num_particles=500), progress=False)
    score = fit.log_evidence
    assert score.kind == "estimate" and score.stderr < 0.05
    assert abs(score.value - SCHOOLS_EVIDENCE) < 3.0 * score.stderr


@pytest.mark.parametrize("move", ["random_walk", "hmc"])
def test_the_evidence_of_a_mixture_with_two_modes(move: str) -> None:
    fit = al.fit(1, MIXTURE, None, SMC(num_particles=1000, move=move), progress=False)
    assert fit.log_evidence.stderr < 0.05 and fit.status.startswith("Complete")
    assert abs(fit.log_evidence.value - MIXTURE_EVIDENCE) < 3.0 * fit.log_evidence.stderr
    # The two labellings are equally probable: P(mean₀ < mean₁) = ½, its error from the spread over runs.
    params, weights = fit.posterior.params, fit.posterior.weights
    below = (np.asarray(params["mean"])[:, 0] < np.asarray(params["mean"])[:, 1]).reshape(8, -1).mean(axis=1)
    assert abs(below.mean() - 0.5) < 5.0 * below.std(ddof=1) / np.sqrt(8)
    assert abs(weights.sum() - 1.0) < 1e-6


@pytest.mark.parametrize(
    "method",
    [
        SMC(num_particles=500),
        SMC(num_particles=500, move="hmc"),
        ParallelTempering(num_samples=2000, num_warmup=1000, num_levels=6),
    ],
    ids=["smc", "smc, hmc", "tempering"],
)
def test_evidence_and_posterior_of_a_linear_model(method: Any) -> None:
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact())
    fit = al.fit(0, cases.linear_model(), (X, Y), method, progress=False)
    assert fit.log_evidence.kind == "estimate" and fit.log_evidence.stderr < 0.2
    assert abs(fit.log_evidence.value - exact.log_evidence.value) < 5.0 * fit.log_evidence.stderr
    weight = np.asarray(fit.posterior.params["network"]["weight"], np.float64)[:, 0]
    groups = weight.reshape(8 if isinstance(method, SMC) else 4 * 5, -1, weight.shape[-1]).mean(axis=1)
    error = groups.std(axis=0, ddof=1) / np.sqrt(len(groups))
    assert np.max(np.abs(groups.mean(axis=0) - exact.posterior.mean[0]) / error) < 5.0
    spread = np.cov(weight.T, aweights=fit.posterior.weights)
    np.testing.assert_allclose(np.sqrt(np.diag(spread) / np.diag(exact.posterior.operator.covariance()[0])), 1.0, atol=0.1)


def test_importance_resampling_from_a_fit_and_from_the_prior() -> None:
    """From a fit the weights of an exact proposal are those of a Student-t; from the prior they are the likelihood."""
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact())
    fit = al.fit(0, cases.linear_model(), (X, Y), SIR(10_000, 5000, proposal=exact), progress=False)
    assert fit.manifest["health"]["pareto_k"] < 0.5 and fit.log_evidence.stderr < 0.02
    assert abs(fit.log_evidence.value - exact.log_evidence.value) < 5.0 * fit.log_evidence.stderr
    weight = np.asarray(fit.posterior.params["network"]["weight"], np.float64)[:, 0]
    size = fit.manifest["health"]["ess"]
    z = (weight.mean(axis=0) - exact.posterior.mean[0]) / np.sqrt(np.diag(exact.posterior.operator.covariance()[0]) * (1 / size + 1 / 5000))
    assert np.max(np.abs(z)) < 5.0
    prior = al.fit(0, MIXTURE, None, SIR(40_000), progress=False)
    assert abs(prior.log_evidence.value - MIXTURE_EVIDENCE) < 5.0 * prior.log_evidence.stderr < 0.5


def test_a_proposal_that_misses_the_posterior_is_not_trusted() -> None:
    target = al.target_from_log_density(lambda p: -0.5 * p["a"] @ p["a"], {"a": np.zeros(4)})
    with pytest.warns(al.HealthWarning, match="heavy tail"):
        fit = al.fit(0, target, None, SIR(4000, proposal=(3.0 * np.ones(4), 0.05 * np.eye(4)), df=float("inf")), progress=False)
    assert fit.manifest["health"]["pareto_k"] > 0.7


@pytest.mark.parametrize("method", [SMC(num_particles=100, num_runs=2), SIR(1000)], ids=["smc", "sir"])
def test_troubles_are_named(method: Any) -> None:
    with pytest.raises(al.MethodError, match="reference"):
        al.fit(0, al.target_from_log_density(lambda p: -0.5 * p["a"] ** 2, {"a": 0.0}), None, method, progress=False)

    class Unit:
        log_prob = staticmethod(lambda p: normal(p["a"], 0.0, 1.0))
        sample = staticmethod(lambda key: {"a": jax.random.normal(key)})

    corner = lambda p: 2.0 * normal(p["a"], 0.0, 1.0) + 0.0 * jnp.log(1.0 - p["a"])
    with pytest.warns(al.HealthWarning, match="NaN"):
        fit = al.fit(0, al.target_from_log_density(corner, {"a": 0.0}, Unit()), None, method, progress=False)
    assert np.max(fit.posterior.params["a"]) < 1.0 and fit.manifest["health"]["undefined"] > 0


def test_a_warmer_posterior_has_no_evidence() -> None:
    methods = SMC(num_particles=100, num_runs=2), al.Nested(num_live=100, num_runs=2)
    for method in methods:
        fit = al.fit(0, cases.linear_model(), (X, Y), method, temperature=2.0, progress=False)
        assert fit.log_evidence is None and "log normalising constant at temperature 2" in fit.status and "evidence" not in fit.status


def test_nested_sampling_of_an_improper_density_ends() -> None:
    """Its likelihood rises for ever, faster than the mass of the reference falls."""

    class Wide:
        log_prob = staticmethod(lambda q: -0.5 * q**2 / 9.0 - np.log(3.0 * np.sqrt(2.0 * np.pi)))
        sample = staticmethod(lambda key: 3.0 * jax.random.normal(key, (), np.float64))

    target = al.target_from_log_density(lambda q: 0.5 * q, np.zeros(()), reference=Wide())
    with pytest.warns(al.HealthWarning, match="may be infinite, the density improper"):
        al.fit(0, target, None, al.Nested(num_live=20, num_delete=5, num_runs=1), progress=False)


def test_too_few_stages_are_not_called_complete() -> None:
    with pytest.warns(al.HealthWarning, match="max_stages"):
        al.fit(0, cases.linear_model(), (X, Y), SMC(num_particles=100, num_runs=2, max_stages=1), progress=False)


def test_wrong_settings_are_named() -> None:
    for make, match in ((lambda: SMC(ess=2.0), "ess"), (lambda: SMC(move="jump"), "move"), (lambda: SIR(df=0.0), "degrees")):
        with pytest.raises(al.MethodError, match=match):
            make()


def test_the_next_beta_keeps_the_size_wanted() -> None:
    rest = -(jnp.linspace(0.0, 40.0, 500) ** 1.3)
    beta = smc.next_beta(jnp.asarray(0.1), rest, 0.5)
    assert 0.1 < beta < 1.0
    np.testing.assert_allclose(smc.effective((beta - 0.1) * rest) / 500, 0.5, rtol=1e-3)
    assert smc.next_beta(jnp.asarray(0.1), 1e-3 * rest, 0.5) == 1.0
    lost = smc.next_beta(jnp.asarray(0.0), jnp.where(jnp.arange(500) % 10 == 0, rest, -jnp.inf), 0.5)
    assert 0.0 < lost < 1e-5  # nine in ten are impossible at any β > 0: the smallest step there is


@pytest.mark.parametrize("number", [7, 100])
def test_systematic_resampling_is_within_one_of_what_is_expected(number: int) -> None:
    log_weights = jax.random.normal(jax.random.key(0), (number,))
    expected = number * np.asarray(jax.nn.softmax(log_weights))
    counts = np.stack(
        [np.bincount(np.asarray(smc.systematic(k, log_weights)), minlength=number) for k in jax.random.split(jax.random.key(1), 300)]
    )
    assert np.all(np.abs(counts - expected) < 1.0 + 1e-4)
    # A count is a Bernoulli variable above its floor: its mean over 300 draws errs by at most ½/√300.
    assert np.max(np.abs(counts.mean(axis=0) - expected)) < 5.0 * 0.5 / np.sqrt(300)


def test_stepping_stones_and_pooling() -> None:
    """ℓ ~ N(βs², s²) at β is the path of a Gaussian: log Z = ½s²."""
    rng = np.random.default_rng(0)
    betas = np.linspace(0.0, 1.0, 5)
    scores = [stepping_stones(betas, (2.0 * rng.normal(size=(2, 2000, 5)) + 4.0 * betas).astype(np.float32)) for _ in range(4)]
    score = pooled(scores)
    assert abs(score.value - 2.0) < 5.0 * score.stderr < 0.1
    # The mean is on the scale of Z.
    both = pooled([al.posterior.Score(0.0, 0.1, "estimate"), al.posterior.Score(float(np.log(3.0)), 0.1, "estimate")])
    np.testing.assert_allclose(both.value, np.log(2.0))
    np.testing.assert_allclose(both.stderr, np.sqrt(2.0) / 2.0 / np.sqrt(2.0))
