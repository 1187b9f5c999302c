"""Likelihoods and scale priors against scipy, enumeration and quadrature; shapes and bad targets at the door."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import integrate, stats

from aleator._errors import DataError, ModelError
from aleator.hyperpriors import Gamma, HalfCauchy, HalfNormal, InverseGamma, LogNormal
from aleator.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, NegativeBinomial, Poisson, StudentT

PRIORS = [
    (LogNormal(0.3, 1.5), stats.lognorm(1.5, scale=np.exp(0.3)), 1.0),
    (HalfNormal(0.7), stats.halfnorm(scale=0.7), 1.0),
    (HalfCauchy(2.0), stats.halfcauchy(scale=2.0), 1.0),
    (Gamma(2.5, 3.0), stats.gamma(2.5, scale=1 / 3.0), 1.0),
    (InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0), 2.0),  # stated on σ² = e^{2u}
]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("prior", "reference", "power"), PRIORS)
def test_hyperprior_density_is_that_of_log_sigma(prior, reference, power):
    u = np.linspace(-3, 2, 11)
    expected = reference.logpdf(np.exp(power * u)) + np.log(power) + power * u
    with jax.enable_x64(True):
        np.testing.assert_allclose(prior.log_prob_unconstrained(u), expected, rtol=1e-10, atol=1e-12)
        total, _ = integrate.quad(
            lambda v: float(np.exp(prior.log_prob_unconstrained(np.float64(v)))), -40, 40, points=[-3, 0, 3], limit=200
        )
        named = prior.distribution().log_prob(jnp.exp(power * u)) + np.log(power) + power * u
    assert total == pytest.approx(1.0, abs=1e-7)
    np.testing.assert_allclose(named, expected, rtol=1e-8, atol=1e-10)
    assert np.exp(power * prior.initial()) == pytest.approx(reference.median(), rel=1e-6)


@pytest.mark.parametrize(("prior", "reference", "power"), PRIORS)
def test_hyperprior_draws_follow_their_density(prior, reference, power):
    draws = np.asarray(prior.sample_unconstrained(jax.random.key(3), (4000,)), float)
    # One fixed seed; the bound is far in the tail (p = 1e-4) of the Kolmogorov–Smirnov statistic.
    assert stats.kstest(np.exp(power * draws), reference.cdf).pvalue > 1e-4


def test_hyperpriors_in_float32_survive_extreme_scales():
    for prior, _, _ in PRIORS[:1] + PRIORS[2:3]:
        value, slope = jax.value_and_grad(lambda u, prior=prior: prior.log_prob_unconstrained(u))(jnp.float32(120.0))
        assert np.isfinite(value)
        assert np.isfinite(slope)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogNormal(0.0, 0.0),
        lambda: HalfNormal(-1.0),
        lambda: Gamma(1.0, float("nan")),
        lambda: LogNormal("a"),
        lambda: HalfCauchy(True),
    ],
)
def test_hyperpriors_refuse_bad_parameters(make):
    with pytest.raises(ModelError, match=r"Got: .* Expected: .* Do this: "):
        make()


def test_hyperparameters_are_plain_and_hashable():
    for thing in (Gaussian(), Gaussian(0.5), StudentT(3.0), NegativeBinomial(Gamma(2.0, 1.0)), Categorical(3), HeteroscedasticGaussian()):
        assert hash(thing) == hash(dataclasses.replace(thing))
        assert dataclasses.replace(thing) == thing
    assert Gaussian() != Gaussian(1.0)


# ------------------------------------------------------------------------------------------------------------------ against scipy

N, K = 6, 2
F = RNG.normal(size=(N, K))
SCALE = np.array([0.4, 1.7])
CONCENTRATION = np.array([0.8, 5.0])
REAL = RNG.normal(size=(N, K))
COUNT = RNG.poisson(4.0, (N, K)).astype(np.int32)
COUNT[0] = 0  # has a branch of its own
BINARY = RNG.integers(0, 2, (N, K)).astype(np.int32)
RAW = RNG.normal(size=(N, K))
RATE = CONCENTRATION / (CONCENTRATION + np.exp(F))
CASES = {
    "gaussian": (Gaussian(), F, REAL, {"scale": SCALE}, stats.norm(F, SCALE)),
    "heteroscedastic": (HeteroscedasticGaussian(), np.hstack([F, RAW]), REAL, {}, stats.norm(F, 1e-3 + np.log1p(np.exp(RAW)))),
    "student": (StudentT(), F, REAL, {"scale": SCALE}, stats.t(4.0, F, SCALE)),
    "student 3": (StudentT(3.0), F, REAL, {"scale": SCALE}, stats.t(3.0, F, SCALE)),
    "student 2.5": (StudentT(2.5), F, REAL, {"scale": SCALE}, stats.t(2.5, F, SCALE)),
    "bernoulli": (Bernoulli(), F, BINARY, {}, stats.bernoulli(1 / (1 + np.exp(-F)))),
    "bernoulli, probit": (Bernoulli("probit"), F, BINARY, {}, stats.bernoulli(stats.norm.cdf(F))),
    "poisson": (Poisson(), F, COUNT, {}, stats.poisson(np.exp(F))),
    "negative binomial": (NegativeBinomial(), F, COUNT, {"concentration": CONCENTRATION}, stats.nbinom(CONCENTRATION, RATE)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("x64", [False, True])
def test_every_method_against_scipy(name, x64):
    likelihood, f, y, extra, reference = CASES[name]
    tolerance = {"rtol": 1e-8, "atol": 1e-10} if x64 else {"rtol": 2e-5, "atol": 2e-5}
    with jax.enable_x64(x64):
        f, extra = jnp.asarray(f), jax.tree.map(jnp.asarray, extra)
        log_pdf = reference.logpmf(y) if likelihood.support in ("count", "binary") else reference.logpdf(y)
        compiled = jax.jit(lambda f, y, extra: [getattr(likelihood, part)(f, *(y,) * targets, extra) for part, targets in parts])
        parts = (("log_prob", 1), ("log_terms", 1), ("cdf", 1), ("mean", 0), ("variance", 0), ("entropy", 0))
        value, terms, cdf, mean, variance, entropy = compiled(f, y, extra)
        assert value.shape == (N,)
        assert value.dtype == f.dtype
        np.testing.assert_allclose(value, log_pdf.sum(1), **tolerance)
        np.testing.assert_allclose(terms, log_pdf, **tolerance)
        np.testing.assert_allclose(mean, reference.mean(), **tolerance)
        np.testing.assert_allclose(variance, reference.var(), **tolerance)
        np.testing.assert_allclose(cdf, reference.cdf(y), **tolerance)
        if likelihood.support != "count":  # counts have a test of their own
            np.testing.assert_allclose(entropy, reference.entropy(), **tolerance)
        assert jax.eval_shape(likelihood.sample, jax.random.key(0), f, extra).shape == (N, K)
        assert f.shape[1] == likelihood.num_outputs(K)


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_draws_equals_a_loop_and_gradients_are_finite(name):
    likelihood, f, y, extra, _ = CASES[name]
    draws = np.stack([f, f + 0.3, f - 1.0]).astype(np.float32)
    extras = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf, 3 * leaf]).astype(np.float32), extra)
    every = jax.jit(jax.vmap(likelihood.log_prob, (0, None, 0)))(draws, y, extras)
    single = jax.jit(likelihood.log_prob)
    for i in range(3):
        one = single(draws[i], y, jax.tree.map(lambda leaf, i=i: leaf[i], extras))
        np.testing.assert_allclose(every[i], one, rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda f, e: likelihood.log_prob(f, y, e).sum(), (0, 1)))(
        draws[0], jax.tree.map(lambda leaf: leaf[0], extras)
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", ["poisson", "negative binomial"])
def test_gradients_of_counts_match_differences(name):
    likelihood, f, y, extra, _ = CASES[name]
    with jax.enable_x64(True):
        density = jax.jit(lambda f, e: likelihood.log_prob(f, y, e).sum())
        check_grads(density, (jnp.asarray(f), jax.tree.map(jnp.asarray, extra)), order=1, rtol=1e-4, atol=1e-4)


def test_count_densities_stay_exact_in_float32():
    mean = np.array([1e-6, 0.3, 9.0, 10.0, 64.0, 1e3, 1e4])[:, None]
    y = np.round(mean + np.sqrt(mean)).astype(np.int32)
    f = jnp.asarray(np.log(mean), jnp.float32)
    mean = np.exp(np.asarray(f, float))  # the mean that float32 can say
    np.testing.assert_allclose(jax.jit(Poisson().log_prob)(f, y, {}), stats.poisson.logpmf(y, mean)[:, 0], rtol=2e-5, atol=1e-4)
    negative_binomial = jax.jit(NegativeBinomial().log_prob)
    for r in (0.05, 2.0, 9.99, 10.01, 1e4):
        value = negative_binomial(f, y, {"concentration": jnp.float32(r)})
        np.testing.assert_allclose(value, stats.nbinom.logpmf(y, r, r / (r + mean))[:, 0], rtol=2e-5, atol=1e-4)
    # A log rate far below float32's smallest exp must not turn a possible count into −∞ · 0.
    assert Poisson().log_prob(jnp.full((1, 1), -200.0), np.ones((1, 1), np.int32), {})[0] == pytest.approx(-200.0)


def test_count_entropies_against_enumeration():
    mean = np.array([1e-3, 0.7, 12.0, 62.0, 75.0, 300.0, 3000.0])[:, None]
    grid = np.arange(40_000)
    with jax.enable_x64(True):
        entropy = jax.jit(Poisson().entropy)(jnp.log(mean), {})
        negative_binomial = jax.jit(NegativeBinomial().entropy)
        expected = [
            -np.sum(stats.poisson.pmf(grid, m) * stats.poisson.logpmf(grid, m), where=stats.poisson.pmf(grid, m) > 0) for m in mean[:, 0]
        ]
        np.testing.assert_allclose(entropy[:, 0], expected, rtol=0, atol=2e-6)
        for r in (0.1, 1.0, 30.0):
            entropy = negative_binomial(jnp.log(mean[:-1]), {"concentration": jnp.asarray(r)})
            p = [stats.nbinom.pmf(grid, r, r / (r + m)) for m in mean[:-1, 0]]
            expected = [-np.sum(q * np.log(np.where(q > 0, q, 1.0))) for q in p]
            np.testing.assert_allclose(entropy[:, 0], expected, rtol=0, atol=5e-6)


def test_bernoulli_and_categorical_survive_extreme_logits_in_float32():
    f = jnp.array([[-200.0], [-60.0], [0.0], [60.0], [200.0]], jnp.float32)
    entropy = np.asarray(Bernoulli().entropy(f, {}))[:, 0]
    assert np.all(np.isfinite(entropy))
    assert np.all(entropy >= 0)
    assert entropy[2] == pytest.approx(np.log(2))
    assert entropy[1] == pytest.approx(61 * np.exp(-60), rel=1e-4)
    assert Bernoulli().variance(f, {})[3, 0] == pytest.approx(np.exp(-60), rel=1e-4)
    tails = jnp.array([[-12.0], [12.0], [-1e4]], jnp.float32)  # Φ(−12) is 1.8e-33: p (1 − p) would be 0 on one side
    probit = Bernoulli("probit")
    np.testing.assert_allclose(probit.variance(tails, {})[:2, 0], stats.norm.cdf(-12), rtol=1e-4)
    np.testing.assert_allclose(probit.log_prob(tails, jnp.ones((3, 1), jnp.int32), {})[0], stats.norm.logcdf(-12), rtol=1e-5)
    slope = jax.grad(lambda f: probit.log_prob(f, jnp.ones((3, 1), jnp.int32), {}).sum())(tails)
    assert np.all(np.isfinite(slope))
    with pytest.raises(ModelError, match="'logit' or 'probit'"):
        Bernoulli("cloglog")
    f = jnp.array([[1000.0, 0.0, -1000.0], [1e4, 1e4, 1e4]], jnp.float32)
    entropy = Categorical(3).entropy(f, {})
    np.testing.assert_allclose(entropy, [0.0, np.log(3)], atol=1e-6)


def test_categorical_against_enumeration():
    logits = RNG.normal(size=(5, 3))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([0, 1, 2, 1, 0], np.int32)
    likelihood = Categorical(3)
    with jax.enable_x64(True):
        compiled = jax.jit(
            lambda f: (likelihood.log_prob(f, y, {}), likelihood.mean(f, {}), likelihood.variance(f, {}), likelihood.entropy(f, {}))
        )
        log_prob, mean, variance, entropy = compiled(logits)
    np.testing.assert_allclose(log_prob, np.log(probs[np.arange(5), y]), rtol=1e-12)
    np.testing.assert_allclose(mean, probs, rtol=1e-12)
    np.testing.assert_allclose(variance, probs * (1 - probs), rtol=1e-12)
    np.testing.assert_allclose(entropy, -(probs * np.log(probs)).sum(1), rtol=1e-12)
    assert likelihood.sample(jax.random.key(0), jnp.asarray(logits), {}).shape == (5,)
    assert likelihood.num_outputs(1) == 3


@pytest.mark.parametrize(
    ("name", "impl"),
    [("student", "threefry2x32"), ("poisson", "threefry2x32"), ("poisson", "philox2x32"), ("negative binomial", "threefry2x32")],
)
def test_samples_follow_the_distribution_whatever_the_generator(name, impl):
    likelihood, f, _, extra, _ = CASES[name]
    n = 100_000
    outputs = jnp.tile(jnp.asarray(f[:1], jnp.float32), (n, 1))
    y = np.asarray(jax.jit(likelihood.sample)(jax.random.key(5, impl=impl), outputs, extra))
    at = np.quantile(y, [0.1, 0.5, 0.9], axis=0)  # (3, K)
    kind = {
        "student": stats.t(4.0, f[0], SCALE),
        "poisson": stats.poisson(np.exp(f[0])),
        "negative binomial": stats.nbinom(CONCENTRATION, RATE[0]),
    }
    cdf = kind[name].cdf(at)
    share = np.mean(y[None] <= at[:, None], axis=1)
    # Six binomial standard errors: a false alarm in fewer than one of ten million seeds.
    assert np.all(np.abs(share - cdf) < 6 * np.sqrt(cdf * (1 - cdf) / n))


# -------------------------------------------------------------------------------------------------------------- learned parameters


def test_extra_parameters_round_trip():
    for likelihood, name in ((Gaussian(), "scale"), (StudentT(), "scale"), (NegativeBinomial(), "concentration")):
        raw = likelihood.init_extra(3)
        assert {key: leaf.shape for key, leaf in raw.items()} == {f"log_{name}": (3,)}
        np.testing.assert_allclose(likelihood.constrain(raw)[name], np.ones(3))  # the median of LogNormal(0, 1.5)
        drawn = likelihood.sample_extra(jax.random.key(1), 3)
        assert np.all(likelihood.constrain(drawn)[name] > 0)
        assert likelihood.log_prior_extra(drawn) == pytest.approx(
            stats.norm(0, 1.5).logpdf(np.asarray(drawn[f"log_{name}"])).sum(), rel=1e-5
        )
    fixed = Gaussian(0.5)
    assert fixed.init_extra(2) == {}
    assert fixed.sample_extra(jax.random.key(2), 2) == {}
    assert float(fixed.log_prior_extra({})) == 0.0
    assert float(fixed.constrain({})["scale"]) == 0.5
    assert Bernoulli().constrain({}) == {}


@pytest.mark.parametrize("make", [lambda: Gaussian(0.0), lambda: Gaussian("learned"), lambda: StudentT(df=-1.0), lambda: Categorical(1)])
def test_likelihoods_refuse_bad_hyperparameters(make):
    with pytest.raises(ModelError, match=r"Got: .* Expected: .* Do this: "):
        make()


def test_marginals_over_gaussian_outputs():
    mean, variance = jnp.array([[0.5, -1.0]]), jnp.array([[0.3, 2.0]])
    marginal = Gaussian().marginal(mean, variance, {"scale": jnp.asarray(SCALE)})
    np.testing.assert_allclose(marginal.variance, variance + SCALE**2, rtol=1e-6)
    student = Gaussian().marginal(mean, variance, {"scale": jnp.asarray(SCALE)}, df=jnp.array([5.0, 7.0]))
    expected = stats.t([5.0, 7.0], mean, np.sqrt(variance + SCALE**2)).logpdf(0.2)
    np.testing.assert_allclose(student.log_prob(0.2), expected, rtol=1e-5)
    for likelihood in (StudentT(), Bernoulli(), Categorical(2), Poisson(), NegativeBinomial()):
        assert likelihood.marginal(mean, variance, {}) is None
    # Heteroscedastic: the raw scale by quadrature, against adaptive quadrature.
    both = HeteroscedasticGaussian().marginal(jnp.array([[0.5, -1.0]]), jnp.array([[0.3, 0.8]]), {})

    def integrand(raw):
        return stats.norm.pdf(1.1, 0.5, np.sqrt(0.3 + (1e-3 + np.log1p(np.exp(raw))) ** 2)) * stats.norm.pdf(raw, -1.0, np.sqrt(0.8))

    assert float(np.exp(both.log_prob(1.1))[0, 0]) == pytest.approx(integrate.quad(integrand, -10, 10)[0], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------------ shapes at the door


@pytest.mark.parametrize("name", CASES)
def test_targets_never_broadcast(name):
    likelihood, f, y, extra, _ = CASES[name]
    for wrong in (y[:, 0], y[:, :1], y[:-1], y[None], np.zeros((N, 0))):
        with pytest.raises(ModelError, match="Expected"):
            jax.eval_shape(likelihood.log_prob, jnp.asarray(f), wrong, extra)
    single = jnp.asarray(f[:, 0])
    with pytest.raises(ModelError, match="one row per example"):
        likelihood.log_prob(single, y, extra)


def test_categorical_refuses_wrong_widths_and_label_shapes():
    logits = jnp.zeros((4, 3))
    with pytest.raises(ModelError, match=r"outputs of shape \(4, 3\).*out_size=5"):
        Categorical(5).log_prob(logits, np.zeros(4, np.int32), {})
    for wrong in (np.zeros((4, 1), np.int32), np.zeros(3, np.int32), np.zeros(4, np.float32)):
        with pytest.raises(ModelError, match="Labels do not match"):
            Categorical(3).log_prob(logits, wrong, {})
    with pytest.raises(ModelError, match="no order"):
        Categorical(3).cdf(logits, np.zeros(4, np.int32), {})


def test_wrong_number_of_outputs_names_both_and_the_cure():
    with pytest.raises(ModelError, match=r"Got: outputs of shape \(4, 1\) for y of shape \(4, 1\)\. Expected: \(n, 2\).*out_size=2"):
        HeteroscedasticGaussian().log_prob(jnp.zeros((4, 1)), jnp.zeros((4, 1)), {})
    with pytest.raises(ModelError, match="an even number"):
        HeteroscedasticGaussian().mean(jnp.zeros((4, 3)), {})


def test_encode_gives_the_canonical_form():
    y = np.array([1.0, 2.0, 3.0], np.float32)
    for likelihood in (Gaussian(), HeteroscedasticGaussian(), StudentT()):
        np.testing.assert_array_equal(likelihood.encode(y), y[:, None])
        np.testing.assert_array_equal(likelihood.encode(y[:, None]), y[:, None])
        assert likelihood.encode(y).dtype == np.float32
        assert likelihood.encode([1, 2, 3]).dtype == np.float64
        assert likelihood.encode(np.zeros((3, 2))).shape == (3, 2)
    assert Categorical(3).encode(np.array([[0], [2]])).shape == (2,)
    assert Categorical(2).encode(np.array([True, False])).dtype == np.int32
    assert Bernoulli().encode([True, False]).tolist() == [[1], [0]]
    assert Bernoulli().encode(np.array([[0, 1], [1, 0]])).shape == (2, 2)
    for likelihood in (Poisson(), NegativeBinomial()):
        assert likelihood.encode(np.array([0.0, 3.0])).tolist() == [[0], [3]]
        assert likelihood.encode(np.array([0, 3], np.uint8)).dtype == np.int32


@pytest.mark.parametrize(
    ("likelihood", "y", "match"),
    [
        (Gaussian(), [1.0, np.nan, np.inf], r"2 NaN or infinite entries, the first in row 1"),
        (Gaussian(), np.array(["a", "b"], object), "dtype object"),
        (Gaussian(), np.array([1 + 2j]), "not numeric"),
        (Gaussian(), [], "empty"),
        (Gaussian(), np.zeros((2, 2, 2)), r"\(n,\) or \(n, k\)"),
        (Gaussian(), 3.0, r"\(n,\) or \(n, k\)"),
        (Categorical(3), np.array([0.0, 1.0]), r"y\.astype\(int\)"),
        (Categorical(3), [0, 1, 3, 3], r"label 3 in row 2 \(2 such entries\).*0…2"),
        (Categorical(3), [0, -1], "label -1 in row 1"),
        (Categorical(3), np.eye(3, dtype=int), r"y\.argmax\(1\)"),
        (Categorical(3), [2, 2, 2], "only one class in y"),
        (Categorical(3), ["a", "b"], "np.unique"),
        (Bernoulli(), [0.0, 1.0], r"y\.astype\(int\)"),
        (Bernoulli(), [0, 2], "label 2 in row 1"),
        (Bernoulli(), [1, 1], "only one class in y"),
        (Bernoulli(), [[0, 1], [1, 1]], "column 1"),
        (Poisson(), [1, -2], r"\[-2\] in row 1"),
        (Poisson(), [1.5], "whole numbers"),
        (NegativeBinomial(), np.array([2**40]), "too large"),
    ],
)
def test_bad_targets_are_refused_by_name(likelihood, y, match):
    with pytest.raises(DataError, match=match):
        likelihood.encode(y)


def test_a_single_class_may_be_scored():
    assert Categorical(3).encode([2, 2], fitting=False).tolist() == [2, 2]
    assert Bernoulli().encode([1], fitting=False).tolist() == [[1]]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(2.0)])
def test_counts_too_large_to_hold_are_not_negative(likelihood, double):
    """Rates of e²⁵ and beyond come from a rate that is uncertain on the log scale; their counts are many, not few."""
    with jax.enable_x64(double):
        extra = likelihood.constrain({})
        for f in (25.0, 44.0, 60.0, 800.0):
            draw = jax.jit(lambda key, outputs: likelihood.sample(key, outputs, extra))
            drawn = np.asarray(draw(jax.random.key(0), jnp.full((50, 1), f)))
            assert drawn.dtype == np.int32 and drawn.min() > 0 and np.median(drawn) == 2**31 - 1
