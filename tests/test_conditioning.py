"""p(X | Z) of a joint: Gaussians against the precision's block, tables against enumeration, weights against closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from aleator._errors import DataError, HealthWarning
from aleator.decide import conditioning

NAN = float("nan")


@pytest.fixture(scope="module")
def joint():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    mean, covariance = rng.normal(size=5), root @ root.T + 0.1 * np.eye(5)
    return mean, covariance, rng.multivariate_normal(mean, covariance, 40_000)


def test_gaussian_is_the_block_of_the_precision(joint):
    """Marginalise column 4 first, then Λ_ww⁻¹ and μ_w − Λ_ww⁻¹ Λ_wz (z − μ_z): another road to the same numbers."""
    mean, covariance, _ = joint
    given, wanted, seen = np.array([NAN, 0.7, NAN, -1.0, NAN]), [0, 2], [1, 3]
    kept = wanted + seen
    precision = np.linalg.inv(covariance[np.ix_(kept, kept)])
    spread = np.linalg.inv(precision[:2, :2])
    centre = mean[wanted] - spread @ precision[:2, 2:] @ (given[seen] - mean[seen])
    found = conditioning.gaussian(mean, covariance, given, wanted)
    np.testing.assert_allclose(found[0], centre, rtol=1e-9)
    np.testing.assert_allclose(found[1], spread, rtol=1e-9)
    np.testing.assert_array_equal(conditioning.gaussian(mean, covariance, [NAN] * 5)[1], covariance)


def test_a_mixture_is_the_ratio_of_its_densities(joint):
    """p(x_w | z) = p(x_w, z)/p(z), both mixtures of marginal Gaussians as scipy has them."""
    mean, covariance, _ = joint
    weights, means, covariances = np.array([0.2, 0.5, 0.3]), mean + 2 * np.eye(5)[:3], covariance * np.array([1.0, 2.0, 0.5])[:, None, None]
    given, wanted, seen = np.array([NAN, 0.7, NAN, -1.0, NAN]), [2, 0], [1, 3]
    density = lambda at, columns, w, m, c: sum(
        share * stats.multivariate_normal.pdf(at, mu[columns], sigma[np.ix_(columns, columns)])
        for share, mu, sigma in zip(w, m, c, strict=True)
    )
    found = conditioning.mixture(weights, means, covariances, given, wanted)
    assert found[1].shape == (3, 2) and found[0].sum() == pytest.approx(1.0)
    for x in np.random.default_rng(3).normal(size=(5, 2)):
        both = density(np.r_[x, given[seen]], wanted + seen, weights, means, covariances)
        expected = both / density(given[seen], seen, weights, means, covariances)
        assert density(x, [0, 1], *found) == pytest.approx(expected, rel=1e-9)
    assert conditioning.mixture([0.0, 1.0, 0.0], means, covariances, given)[0].tolist() == [0.0, 1.0, 0.0]


def test_draws_of_a_gaussian_are_conditioned_exactly(joint):
    """Up to the draws, five standard errors: one failure in 10⁵ runs."""
    mean, covariance, draws = joint
    given = np.array([NAN, mean[1] + 1.0, NAN, NAN, NAN])
    centre, spread = conditioning.gaussian(mean, covariance, given, [0, 2])
    found = conditioning.from_draws(draws, given, [0, 2])
    error = np.sqrt(np.diag(spread) / found.ess)
    assert np.all(np.abs(found.mean() - centre) < 5 * error)
    np.testing.assert_allclose(found.variance(), np.diag(spread), rtol=5 * np.sqrt(2 / found.ess))
    np.testing.assert_allclose(found.quantile(0.5)[0], centre, atol=float(np.max(6.3 * error)))
    assert found.sample(0, 7).shape == (7, 2)
    tight = 2 * draws[:, :1] + 0.1 * np.random.default_rng(1).normal(
        size=(len(draws), 1)
    )  # a kernel alone would widen this by its own width
    found = conditioning.from_draws(np.hstack([draws[:, :1], tight]), [mean[0], NAN])
    np.testing.assert_allclose(found.variance(), 0.01, rtol=5 * np.sqrt(2 / found.ess))


def test_whole_numbers_are_enumerated():
    """Every row of a table of labels once, each as often as its count says: shares are exact."""
    counts = dict(zip(itertools.product(range(2), repeat=3), [3, 1, 4, 1, 5, 9, 2, 6], strict=True))
    table = np.repeat(np.array(list(counts)), list(counts.values()), axis=0)
    with pytest.warns(HealthWarning, match="18 effective of 31"):
        found = conditioning.from_draws(table, [NAN, 0, NAN], [0])
    assert found.ess == pytest.approx(18)
    assert found.mean()[0] == pytest.approx(14 / 18)


def test_weights_are_bayes_theorem():
    """x ~ N(0, 1), z | x ~ N(x, ½²): x | z in closed form and log p(z) = log N(z; 0, 1.25), from the prior and from another proposal."""
    rng = np.random.default_rng(1)
    z, variance = 0.8, 1 / (1 + 4)
    exact = -0.5 * np.log(2 * np.pi * 1.25) - 0.5 * z**2 / 1.25
    likelihood = lambda d: -0.5 * ((z - d["x"]) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi))
    prior = {"x": rng.normal(size=20_000), "unused": rng.normal(size=(20_000, 2))}
    other = {"x": rng.standard_t(5, size=20_000)}
    for found in (
        conditioning.reweighted(prior, likelihood),
        conditioning.reweighted(other, lambda d: likelihood(d) + stats.norm.logpdf(d["x"]), lambda d: stats.t.logpdf(d["x"], 5)),
    ):
        error = np.sqrt(variance / found.ess)
        assert abs(found.mean()["x"] - 4 * variance * z) < 5 * error
        assert abs(found.variance()["x"] / variance - 1) < 5 * np.sqrt(2 / found.ess)
        assert abs(found.log_evidence.value - exact) < 5 * found.log_evidence.stderr
        assert found.log_evidence.stderr < 0.02
    assert found.mean(lambda d: d["x"] ** 2) == pytest.approx(variance + (4 * variance * z) ** 2, abs=0.05)


def test_what_cannot_be_trusted_or_used_is_told(joint):
    mean, covariance, draws = joint
    with pytest.warns(HealthWarning, match="effective of 1000"):
        conditioning.reweighted(draws[:1000], lambda d: -0.5 * np.sum((d - 9.0) ** 2, axis=1) / 0.01)
    for call, text in (
        (lambda: conditioning.gaussian(mean, covariance, [NAN] * 4), "cannot be conditioned on"),
        (lambda: conditioning.gaussian(mean, covariance[:3], [NAN] * 5), "no covariance"),
        (lambda: conditioning.gaussian(mean, covariance, [1.0] * 5), "nothing to ask for"),
        (lambda: conditioning.mixture([0.5], [mean], [covariance], [NAN] * 5), "no mixture"),
        (lambda: conditioning.from_draws(draws, [1.0, NAN, NAN, NAN, NAN], [0]), "not given"),
        (lambda: conditioning.from_draws(np.ones((9, 2)), [3.0, NAN]), "No draw agrees"),
        (lambda: conditioning.reweighted(draws, lambda d: d), "cannot be used"),
        (lambda: conditioning.reweighted(draws, np.full(len(draws), -np.inf)), "No draw agrees"),
    ):
        with pytest.raises(DataError, match=text):
            call()


def test_a_matrix_with_a_negative_eigenvalue_is_no_covariance():
    """The variance left was −3."""
    for ask in (conditioning.gaussian, lambda mean, matrix, given: conditioning.mixture([1.0], [mean], [matrix], given)):
        with pytest.raises(DataError, match="an eigenvalue of -1"):
            ask([0.0, 1.0], [[1.0, 2.0], [2.0, 1.0]], [NAN, 1.0])
    mean, covariance = conditioning.gaussian([0.0, 1.0], [[1.0, 1.0], [1.0, 1.0]], [NAN, 2.0])  # singular is one
    np.testing.assert_allclose([mean[0], covariance[0, 0]], [1.0, 0.0], atol=1e-6)
