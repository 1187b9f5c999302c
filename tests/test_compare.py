"""Model comparison and averaging: exact values by hand, and refusals to mix kinds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import aleator as al

X = np.linspace(-2, 2, 30)
Y = 0.5 - X + X**2 + 0.3 * np.random.default_rng(0).normal(size=30)


@pytest.fixture(scope="module")
def fits() -> dict[str, al.Fit]:
    orders = (1, 2, 3)
    return {
        f"order {p}": al.fit(0, al.LinearModel(al.features.Polynomial(p), al.Gaussian(0.3), al.Normal(1.0)), (X, Y), al.Exact())
        for p in orders
    }


def with_evidence(fit: al.Fit, score: al.Score | None) -> al.Fit:
    return dataclasses.replace(fit, posterior=dataclasses.replace(fit.posterior, log_evidence=score))


def test_posterior_over_models_is_bayes_rule(fits) -> None:
    prior = np.array([0.5, 0.2, 0.3])
    result = al.compare(fits, prior)
    evidence = np.array([fit.log_evidence.value for fit in fits.values()])
    expected = prior * np.exp(evidence - evidence.max())
    np.testing.assert_allclose(result.posterior, expected / expected.sum(), rtol=1e-12)
    assert result.best == "order 2"
    assert abs(result.log_bayes_factor("order 2", "order 3") - (evidence[1] - evidence[2])) < 1e-12
    assert "log evidence [nats, ↑]" in str(result) and "order 3" in str(result)


def test_a_prior_of_zero_rules_a_model_out(fits) -> None:
    assert al.compare(fits, [1, 0, 1]).posterior[1] == 0.0


def test_kinds_are_never_mixed_unnoticed(fits) -> None:
    fit = fits["order 2"]
    mixed = {"exact": fit, "bound": with_evidence(fit, al.Score(-10.0, 0.1, "lower bound"))}
    result = al.compare(mixed)
    assert result.posterior is None and "Not ranked" in str(result)
    with pytest.raises(al.AleatorError, match="cannot be subtracted"):
        result.log_bayes_factor("exact", "bound")
    with pytest.raises(al.AleatorError, match="no ranking"):
        _ = result.best
    with pytest.raises(al.AleatorError, match="cannot be weighed"):
        al.average(mixed)
    bounds = al.compare({name: with_evidence(fit, al.Score(-10.0, 0.1, "lower bound")) for name in "ab"})
    assert "not Bayes factors" in str(bounds) and "± 0.100" in str(bounds)


def test_fits_without_evidence_or_on_other_data_are_refused(fits) -> None:
    with pytest.raises(al.AleatorError, match="has no evidence"):
        al.compare({"a": with_evidence(fits["order 1"], None)})
    other = al.fit(0, fits["order 1"].model, (X[:10], Y[:10]), al.Exact())
    with pytest.raises(al.AleatorError, match="different data"):
        al.compare([fits["order 1"], other])
    with pytest.raises(al.AleatorError, match="nothing to compare"):
        al.compare({})
    with pytest.raises(al.AleatorError, match="prior over models"):
        al.compare(fits, [1, 2])


def test_average_is_the_mixture(fits) -> None:
    weights = np.array([0.2, 0.5, 0.3])
    new = np.array([-3.0, 0.1, 2.5])
    predictive = al.average(fits, weights).predict(0, new)
    parts = [fit.predict(0, new) for fit in fits.values()]
    mean = sum(w * p.mean for w, p in zip(weights, parts, strict=True))
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-10)
    second = sum(w * (p.variance + p.mean**2) for w, p in zip(weights, parts, strict=True))
    np.testing.assert_allclose(predictive.variance, second - mean**2, rtol=1e-8)
    np.testing.assert_allclose(predictive.variance, predictive.aleatoric + predictive.epistemic, rtol=1e-8)
    density = sum(w * np.exp(p.log_prob(np.zeros(3))) for w, p in zip(weights, parts, strict=True))
    np.testing.assert_allclose(predictive.log_prob(np.zeros(3)), np.log(density), rtol=1e-8)
    lower, upper = predictive.interval(0.9)
    np.testing.assert_allclose(predictive.cdf(upper) - predictive.cdf(lower), 0.9, atol=1e-6)


def test_average_by_evidence_is_the_default(fits) -> None:
    np.testing.assert_allclose(al.average(fits).weights, al.compare(fits).posterior)
    np.testing.assert_allclose(al.average(fits, al.compare(fits, [1, 0, 0])).weights, [1, 0, 0])
    with pytest.raises(al.AleatorError, match="weights do not fit"):
        al.average(fits, [1.0])


def noisy_line() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    return x, (x[:, 0] + 0.1 * rng.normal(size=60)).astype(np.float32)


def test_choose_by_bound_takes_the_smaller_rate_on_a_sharp_line() -> None:  # lecture: B9
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.1), al.Normal(1.0))
    candidates = [al.Dropout(rate, placement="inputs", num_steps=200, num_evidence=8) for rate in (0.5, 0.001)]
    choice = al.choose(0, model, noisy_line(), candidates)
    assert choice.best is candidates[1] and choice.fit.method is candidates[1]
    assert choice.scores[1] > choice.scores[0] and "rate=0.001" in str(choice) and "← chosen" in str(choice).splitlines()[2]
    assert choice.fit.log_evidence.kind == "relative"
    ranked = al.compare([choice.fit, choice.fit])
    assert ranked.posterior is None and "constant" in ranked.note


def test_choose_by_held_out_rows_fits_the_winner_to_all_rows() -> None:  # lecture: B9
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.1), al.Normal(1.0))
    x, y = noisy_line()
    candidates = [al.MAP(num_steps=1, learning_rate=1e-4), al.MAP(num_steps=300)]
    choice = al.choose(0, model, (x, y), candidates, by="validation", holdout=0.2)
    assert choice.best is candidates[1] and choice.fit.manifest["data"]["num_data"] == 60
    given = al.choose(0, model, (x, y), candidates, by="validation", validation=(x[:5], y[:5]))
    expected = given.fit.predict(1, x[:5]).log_prob(y[:5]).mean()  # MAP predictions use no randomness
    np.testing.assert_allclose(given.scores[1], expected, rtol=1e-5)


def test_choose_refuses_what_it_cannot_judge() -> None:
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.1), al.Normal(1.0))
    with pytest.raises(al.AleatorError, match="nothing to choose by"):
        al.choose(0, model, noisy_line(), [], by="elbo")
    with pytest.raises(al.AleatorError, match="gives no bound"):
        al.choose(0, model, noisy_line(), [al.MAP(num_steps=2)])
