"""Scores against scikit-learn, closed forms and sampling identities."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, stats
from sklearn import metrics

from aleator import criteria
from aleator._errors import DataError, ModelError
from aleator.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from aleator.predictive import Outputs, Predictive, mix

RNG = np.random.default_rng(2)
S, N = 3, 6
F = RNG.normal(size=(S, N, 1))
SCALE = RNG.uniform(0.3, 1.2, (S, 1))
Y = RNG.normal(size=N)
PRED = Predictive(Outputs(draws=F, extra={"scale": SCALE}), Gaussian(), squeeze=True)


def test_values_are_means_of_rows_with_their_standard_errors():
    score = criteria.log_score(PRED, Y)
    np.testing.assert_allclose(score.rows, PRED.log_prob(Y))
    assert score.value == pytest.approx(np.mean(score.rows))
    assert score.stderr == pytest.approx(stats.sem(score.rows))
    assert (score.name, score.higher_is_better, score.unit) == ("log score", True, "nats")
    one = criteria.log_score(PRED.rows(slice(0, 1)), Y[:1])
    assert np.isfinite(one.value)
    assert np.isnan(one.stderr)


def test_errors_of_point_predictions():
    score = criteria.rmse(PRED, Y[:, None])
    squared = (PRED.mean - Y) ** 2
    assert score.value == pytest.approx(metrics.root_mean_squared_error(Y, PRED.mean))
    assert score.stderr == pytest.approx(stats.sem(squared) / (2 * score.value))  # delta method
    assert criteria.rmse(PRED, PRED.mean).value == 0.0
    assert criteria.mae(PRED, Y).value == pytest.approx(metrics.mean_absolute_error(Y, PRED.quantile(0.5)))


def test_class_scores():
    f = RNG.normal(size=(S, N, 3))
    pred = Predictive(Outputs(draws=f), Categorical(3), labels=("a", "b", "c"), squeeze=True)
    numbers = np.array([0, 1, 2, 0, 1, 1])
    names = np.array(["a", "b", "c"])[numbers]
    assert criteria.accuracy(pred, names).value == pytest.approx(metrics.accuracy_score(numbers, pred.probs.argmax(1)))
    assert criteria.log_score(pred, names).value == pytest.approx(-metrics.log_loss(numbers, pred.probs))
    assert criteria.brier(pred, names).value == pytest.approx(np.mean(np.sum((pred.probs - np.eye(3)[numbers]) ** 2, axis=1)))
    binary = Predictive(Outputs(draws=F), Bernoulli(), squeeze=True)
    y = np.array([0, 1, 1, 0, 0, 1])
    assert criteria.brier(binary, y).value == pytest.approx(metrics.brier_score_loss(y, binary.mean))
    assert criteria.accuracy(binary, y).value == pytest.approx(np.mean((binary.mean > 0.5) == y))
    both = Predictive(Outputs(draws=np.concatenate([F, -F], axis=-1)), Bernoulli())
    assert criteria.accuracy(both, np.stack([y, 1 - y], axis=1)).value == pytest.approx(criteria.accuracy(binary, y).value)


def test_crps_of_the_standard_gaussian_at_zero():
    standard = Predictive(Outputs(mean=np.zeros((1, 1)), variance=np.full((1, 1), 0.75), extra={"scale": np.array([0.5])}), Gaussian())
    assert criteria.crps(standard, [0.0]).value == pytest.approx(0.233695, abs=1e-6)
    assert criteria.crps(standard, [1.3]).value == pytest.approx(
        1.3 * (2 * stats.norm.cdf(1.3) - 1) + 2 * stats.norm.pdf(1.3) - np.pi**-0.5
    )


def test_crps_of_a_point_mass_is_the_distance():
    """Two equal point masses at 0 and 1, by hand: at ½ both steps are ½ away, at 1 the score is ∫₀¹ ¼ dt."""
    sure = Predictive(Outputs(draws=np.array([[[0.0]], [[1.0]]]), extra={"scale": np.zeros(2)}), Gaussian(), squeeze=True)
    assert criteria.crps(sure, [0.5]).value == pytest.approx(0.25)
    assert criteria.crps(sure, [1.0]).value == pytest.approx(0.25)
    assert criteria.crps(sure, [-2.0]).value == pytest.approx(2.25)


def test_crps_of_mixtures_against_its_integral():
    weights = np.array([0.2, 0.5, 0.3])
    pred = Predictive(Outputs(draws=F, weights=weights, extra={"scale": SCALE}), Gaussian(), squeeze=True)

    def exact(cdf, y):
        return (
            integrate.quad(lambda t: cdf(t) ** 2, -30, y, limit=300)[0] + integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, 30, limit=300)[0]
        )

    expected = [exact(lambda t, i=i: weights @ stats.norm.cdf(t, F[:, i, 0], SCALE[:, 0]), Y[i]) for i in range(N)]
    np.testing.assert_allclose(criteria.crps(pred, Y).rows, expected, rtol=1e-8)
    # The other route: the same cdf through the integration rule, here for Student-t components.
    student = Predictive(Outputs(draws=F, weights=weights, extra={"scale": SCALE}), StudentT(8.0), squeeze=True)
    expected = [exact(lambda t, i=i: weights @ stats.t.cdf(t, 8.0, F[:, i, 0], SCALE[:, 0]), Y[i]) for i in range(N)]
    np.testing.assert_allclose(criteria.crps(student, Y).rows, expected, rtol=1e-6)
    mixed = mix([pred, student], [0.5, 0.5])
    assert np.all(criteria.crps(mixed, Y).rows < np.maximum(criteria.crps(pred, Y).rows, criteria.crps(student, Y).rows) + 1e-12)


@pytest.mark.parametrize("shift", [1.0, 9.0], ids=["few", "thousands"])
def test_crps_of_counts_by_enumeration(shift):
    f = 0.1 * F + shift
    pred = Predictive(Outputs(draws=f), Poisson(), squeeze=True)
    y = RNG.poisson(np.exp(f[0, :, 0]))
    t = np.arange(int(np.exp(shift) * 2 + 50))[:, None, None]
    cdf = stats.poisson.cdf(t, np.exp(f[..., 0])).mean(1)
    np.testing.assert_allclose(criteria.crps(pred, y).rows, np.sum((cdf - (t[:, 0] >= y)) ** 2, axis=0), rtol=1e-5)


def test_coverage_and_interval_score():
    lower, upper = PRED.interval(0.8)
    inside = (lower <= Y) & (upper >= Y)
    assert criteria.coverage(PRED, Y, 0.8).value == pytest.approx(inside.mean())
    score = criteria.interval_score(PRED, Y, 0.8)
    expected = upper - lower + 10 * np.where(lower > Y, lower - Y, 0) + 10 * np.where(upper < Y, Y - upper, 0)
    np.testing.assert_allclose(score.rows, expected, rtol=1e-10)
    # Targets from the predictive itself are covered as promised: six standard errors over 6 × 500 targets.
    drawn = PRED.sample(0, 500)
    assert abs(np.mean((lower <= drawn) & (drawn <= upper)) - 0.8) < 6 * np.sqrt(0.16 / drawn.size)


def test_paired_differences():
    other = Predictive(Outputs(draws=F + 0.1, extra={"scale": SCALE}), Gaussian(), squeeze=True)
    first, second = criteria.rmse(PRED, Y), criteria.rmse(other, Y)
    difference = criteria.paired(first, second)
    assert difference.value == pytest.approx(first.value - second.value)
    assert difference.stderr == pytest.approx(stats.sem(first.rows - second.rows))
    assert criteria.paired(first, first)[:2] == (0.0, 0.0)
    with pytest.raises(DataError, match="cannot be paired"):
        criteria.paired(first, criteria.mae(PRED, Y))
    with pytest.raises(DataError, match="cannot be paired"):
        criteria.paired(first, criteria.rmse(PRED.rows(slice(0, 2)), Y[:2]))


def test_scores_refuse_the_wrong_kind_of_target():
    binary = Predictive(Outputs(draws=F), Bernoulli(), squeeze=True)
    for score in (criteria.rmse, criteria.mae, criteria.crps, criteria.coverage, criteria.interval_score):
        with pytest.raises(ModelError, match="numeric targets"):
            score(binary, np.array([0, 1, 1, 0, 0, 1]))
    for score in (criteria.accuracy, criteria.brier):
        with pytest.raises(ModelError, match="class targets"):
            score(PRED, Y)
    with pytest.raises(DataError, match="6 rows"):
        criteria.rmse(PRED, Y[:-1])


def test_several_columns_are_averaged():
    both = Predictive(Outputs(draws=np.concatenate([F, 2 * F], axis=-1), extra={"scale": np.repeat(SCALE, 2, axis=1)}), Gaussian())
    y = np.stack([Y, -Y], axis=1)
    apart = [Predictive(Outputs(draws=c * F, extra={"scale": SCALE}), Gaussian(), squeeze=True) for c in (1, 2)]
    expected = np.mean([criteria.crps(one, target).value for one, target in zip(apart, y.T, strict=True)])
    assert criteria.crps(both, y).value == pytest.approx(expected)


@pytest.mark.parametrize("positive", [[0.0, np.nan, 1.0], ["no", "yes", "no"], [1, 2, 1]])
def test_flags_that_are_neither_yes_nor_no_are_refused(positive):
    """Every one of them counted as positive but for zeros."""
    for score in (criteria.auroc, criteria.aupr):
        with pytest.raises(DataError, match="zeros and ones"):
            score([1.0, 2.0, 3.0], positive)
