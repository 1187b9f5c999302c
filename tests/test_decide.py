"""Calibration, recalibration, conformal regions, strange rows, acquisition, decisions: oracles, exact coverage, error messages."""

from __future__ import annotations

import importlib
import itertools
import types

import jax
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

import aleator as al
from aleator import criteria
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, ModelError, StoreError
from aleator.data import Data, overlap, sketch
from aleator.decide import acquisition, calibration, conformal, ood, recalibration
from aleator.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from aleator.predictive import Outputs, Predictive, mix

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state


def softmax(z):
    z = np.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


def classifier(n, k, sharp=1.0, seed=0, draws=4):
    """A predictive whose logits are `sharp` times the true ones, and labels from the true ones."""
    rng = np.random.default_rng(seed)
    f = 1.5 * rng.normal(size=(n, k))
    y = np.array([rng.choice(k, p=p) for p in softmax(f)])
    noisy = sharp * f + 0.2 * rng.normal(size=(draws, n, k))
    return Predictive(Outputs(draws=noisy), Categorical(k), squeeze=True), y


def normal(mean, std, scale=0.5):
    """Gaussian predictive of total standard deviation `std`, as outputs in closed form."""
    mean, std = np.broadcast_arrays(np.asarray(mean, float), np.asarray(std, float))
    return Predictive(
        Outputs(mean=mean[:, None], variance=(std**2 - scale**2)[:, None], extra={"scale": np.array([scale])}),
        Gaussian(scale),
        squeeze=True,
    )


# ---- scores -------------------------------------------------------------------------------------------------------------------------


def test_auroc_is_that_of_two_gaussians():
    scores = np.concatenate([RNG.normal(size=20_000), RNG.normal(1, 1, 20_000)])
    positive = np.arange(40_000) >= 20_000
    found = criteria.auroc(scores, positive)
    assert abs(found.value - 0.760250) < 5 * found.stderr
    assert found.stderr < 0.003
    rounded = scores.round(1)  # ties
    assert criteria.auroc(rounded, positive).value == pytest.approx(metrics.roc_auc_score(positive, rounded))
    assert criteria.aupr(rounded, positive).value == pytest.approx(metrics.average_precision_score(positive, rounded))
    # DeLong's error is that of repeated samples.
    values = [criteria.auroc(np.concatenate([RNG.normal(size=40), RNG.normal(1, 1, 60)]), np.arange(100) >= 40) for _ in range(400)]
    assert np.mean([v.stderr for v in values]) == pytest.approx(np.std([v.value for v in values]), rel=0.15)
    with pytest.raises(DataError, match="both kinds"):
        criteria.auroc([1.0, 2.0], [True, True])


def test_selective_risk_by_hand():
    loss, unsure = np.array([0.0, 1.0, 1.0, 0.0]), np.array([0.1, 0.9, 0.4, 0.2])
    coverage, risk = criteria.risk_coverage(loss, unsure)
    np.testing.assert_allclose(coverage, [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(risk, [0, 0, 1 / 3, 0.5])
    assert criteria.aurc(loss, unsure).value == pytest.approx(risk.mean())
    _, flat = criteria.risk_coverage(loss, np.zeros(4))  # nothing is known: the risk is the mean loss at every coverage
    np.testing.assert_allclose(flat, 0.5)
    assert criteria.aurc(loss, np.zeros(4)).value == pytest.approx(0.5)


def test_energy_score_is_the_crps_in_one_dimension_and_proper():
    pred, y = normal(np.zeros(200), np.ones(200)), RNG.normal(size=200)
    score = criteria.energy_score(0, pred, y, 2000)
    difference = criteria.energy_score(1, pred, y, 2000).rows - criteria.crps(pred, y).rows
    assert abs(difference.mean()) < 5 * difference.std() / np.sqrt(200) + 1e-12
    wide = criteria.energy_score(2, normal(np.zeros(200), 3 * np.ones(200)), y, 2000)
    assert wide.value > score.value
    gap = criteria.paired(wide, score)
    assert criteria.p_value(gap) < 1e-6
    assert criteria.p_value(criteria.paired(score, score)) == 1.0


def test_top_k_shares_ties():
    pred = Predictive(Outputs(draws=np.zeros((1, 5, 4))), Categorical(4), squeeze=True)
    assert criteria.top_k(pred, np.arange(5) % 4, k=2).value == pytest.approx(0.5)
    sure, y = classifier(300, 5)
    assert criteria.top_k(sure, y, 2).value == pytest.approx(metrics.top_k_accuracy_score(y, sure.probs, k=2))
    assert criteria.top_k(sure, y, 1).value == criteria.accuracy(sure, y).value
    with pytest.raises(DataError, match="1 to 5"):
        criteria.top_k(sure, y, 6)


# ---- calibration --------------------------------------------------------------------------------------------------------------------


def test_ece_of_a_calibrated_classifier_is_its_known_noise():
    errors = []
    for _ in range(200):
        sure = RNG.uniform(0.5, 1, 10_000)
        errors.append(calibration.ece(np.stack([sure, 1 - sure], 1), RNG.random(10_000) > sure))
    assert np.mean(errors) == pytest.approx(0.0089, abs=5 * np.std(errors) / np.sqrt(200) + 5e-5)  # the value is known to four digits
    assert np.max(errors) < 0.0176 * 1.2


def test_calibration_test_rejects_at_its_nominal_rate_only():
    p_values = []
    for seed in range(300):
        sure = RNG.uniform(0.5, 1, 200)
        p_values.append(
            calibration.calibration_test(seed, np.stack([sure, 1 - sure], 1), RNG.random(200) > sure, num_simulations=99).p_value
        )
    rejected = np.sum(np.array(p_values) <= 0.05)
    assert rejected <= stats.binom.ppf(1 - 1e-5, 300, 0.05)
    assert rejected >= stats.binom.ppf(1e-5, 300, 0.05)
    pred, y = classifier(1000, 3, sharp=2.5)
    assert calibration.calibration_test(0, pred, y).p_value == pytest.approx(1 / 1001)


def test_pit_is_uniform_for_numbers_and_counts_and_the_test_sees_what_is_wrong():
    y = RNG.normal(size=1000)
    right, wrong = normal(np.zeros(1000), np.ones(1000)), normal(np.zeros(1000), 0.7 * np.ones(1000))
    assert stats.kstest(calibration.pit(0, right, y).ravel(), "uniform").pvalue > 1e-4
    assert calibration.calibration_test(1, right, y).p_value > 1e-3
    assert calibration.calibration_test(1, wrong, y).p_value < 0.01
    counts = Predictive(Outputs(draws=np.full((1, 1000, 1), np.log(2.5))), Poisson(), squeeze=True)
    values = calibration.pit(2, counts, RNG.poisson(2.5, 1000)).ravel()
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    curve = calibration.quantile_reliability(3, right, y)
    assert np.mean((curve.observed >= curve.lower) & (curve.observed <= curve.upper)) > 0.7
    assert calibration.sharpness(right)["std"] == pytest.approx(1.0)
    assert calibration._pit_distance(np.array([0.5])) == pytest.approx(0.25)  # ∫ |1{u ≥ ½} − u| du


@pytest.mark.parametrize("bins", ["width", "mass"])
def test_reliability_by_hand(bins):
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]])
    curve = calibration.reliability(probs, [0, 1, 0, 0], num_bins=2 if bins == "mass" else 10, bins=bins)
    np.testing.assert_allclose(curve.stated, [0.6, 0.9])
    np.testing.assert_allclose(curve.observed, [0.5, 0.5])
    assert curve.size.tolist() == [2, 2]
    assert calibration.ece(probs, [0, 1, 0, 0], 10) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    assert calibration.ece(probs, [0, 1, 0, 0], 10, kind="classwise") == pytest.approx(0.25 * 0.6 + 0.25 * 0.4 + 0.5 * 0.4)


def test_debiased_error_does_not_grow_with_bins():
    found = {n: [] for n in (15, 200)}
    for _ in range(50):
        sure = RNG.uniform(0.5, 1, 2000)
        probs, y = np.stack([sure, 1 - sure], 1), RNG.random(2000) > sure
        for n in found:
            found[n].append((calibration.ece(probs, y, n, debiased=True), calibration.ece(probs, y, n)))
    plain = {n: np.mean([pair[1] for pair in pairs]) for n, pairs in found.items()}
    debiased = {n: np.mean([pair[0] for pair in pairs]) for n, pairs in found.items()}
    assert plain[200] > 2 * plain[15]
    assert debiased[200] < plain[200] / 2


def test_bad_probabilities_are_named():
    with pytest.raises(DataError, match="sum to one"):
        calibration.ece([[0.5, 0.4]], [0])
    with pytest.raises(DataError, match="row 1"):
        calibration.ece([[0.5, 0.5], [np.nan, 0.5]], [0, 1])
    with pytest.raises(DataError, match="class numbers"):
        calibration.ece([[0.5, 0.5]], [2])
    with pytest.raises(ModelError, match="numeric"):
        calibration.pit(0, classifier(5, 2)[0], np.zeros(5))


# ---- recalibration ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["temperature", "vector", "isotonic", "beta"])
@pytest.mark.parametrize("kind", ["draws", "binary"])
def test_recalibration_of_classes(how, kind):
    if kind == "draws":
        pred, y = classifier(1500, 3, sharp=2.5, seed=1)
        new, y_new = classifier(1500, 3, sharp=2.5, seed=2)
    else:
        rng = np.random.default_rng(3)
        f = rng.normal(size=(2, 1500, 1))
        pred, new = (Predictive(Outputs(mean=3 * g, variance=np.full((1500, 1), 0.5)), Bernoulli(), squeeze=True) for g in f)
        y, y_new = (rng.random(1500) < 1 / (1 + np.exp(-g[:, 0])) for g in f)
    found = recalibration.fit_map(pred, y, how)
    better = found(new)
    gap = better.log_prob(y_new) - new.log_prob(y_new)
    assert gap.mean() > 3 * gap.std() / np.sqrt(len(gap))
    assert calibration.ece(better, y_new) < 0.5 * calibration.ece(new, y_new)
    np.testing.assert_allclose(better.probs.sum(-1), 1, atol=1e-9)
    assert np.all(better.mutual_information >= 0)
    if how in ("isotonic", "beta"):
        np.testing.assert_allclose(better.probs, found.target(new.probs), atol=1e-7)  # the logits were shifted to exactly these
    if how == "temperature" and kind == "draws":
        assert found.temperature == pytest.approx(2.5, rel=0.15)


def test_calibrated_predictions_are_left_alone():
    pred, y = classifier(3000, 3, seed=4)
    assert recalibration.fit_map(pred, y).temperature == pytest.approx(1.0, abs=0.12)
    both = mix([pred, pred], [0.3, 0.7])
    assert recalibration.fit_map(both, y)(both).log_prob(y).mean() >= both.log_prob(y).mean()


def test_variance_and_quantile_recalibration():
    y, y_new = 2 * RNG.normal(size=(2, 2000))
    pred = normal(np.zeros(2000), np.ones(2000))
    stretch = recalibration.fit_map(pred, y, "variance")
    assert stretch.factor[0] == pytest.approx(np.sqrt(np.mean(y**2)), rel=1e-2)  # its maximum-likelihood value
    for found in (stretch, recalibration.fit_map(pred, y, "quantile")):
        better = found(pred)
        assert better.log_prob(y_new).mean() > pred.log_prob(y_new).mean()
        assert calibration.calibration_test(0, better, y_new).p_value > 1e-3
        few = better.rows(slice(0, 3))
        level, values = np.array([0.2, 0.7]), few.quantile(np.array([0.2, 0.7]))
        np.testing.assert_allclose(np.stack([few.cdf(v) for v in values]), np.broadcast_to(level[:, None], (2, 3)), atol=1e-8)
        np.testing.assert_allclose(
            few.mutual_information, pred.rows(slice(0, 3)).mutual_information, atol=1e-5
        )  # invariant under rising maps
        drawn = few.sample(7, 4000)
        assert np.all(np.abs(drawn.mean(0) - few.mean) < 5 * few.std / np.sqrt(4000))
        assert drawn.std(0) == pytest.approx(few.std, rel=0.1)
        np.testing.assert_allclose(few.variance, few.aleatoric + few.epistemic)
    with pytest.raises(ModelError, match="stretched"):
        recalibration.fit_map(Predictive(Outputs(draws=np.zeros((1, 5, 1))), Poisson(), squeeze=True), np.ones(5), "variance")
    with pytest.raises(MethodError, match="one of variance, quantile"):
        recalibration.fit_map(pred, y, "temperature")


def test_training_rows_are_refused():
    x = RNG.normal(size=(60, 1))
    y = x[:, 0] + 0.3 * RNG.normal(size=60)
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.1), al.Normal(1.0))
    fit = al.fit(0, model, (x[:40], y[:40]), al.Exact())
    with pytest.raises(DataError, match="used in training"):
        al.decide.recalibrate(1, fit, (x[:40], y[:40]))
    better = al.decide.recalibrate(1, fit, (x[40:], y[40:]))
    assert better.map.factor[0] > 1.5  # the stated noise is a third of the true one
    assert better.predict(2, x[:3]).std.shape == (3,)


def test_a_sketch_tells_rows_of_the_data_from_others():
    x = RNG.normal(size=(5000, 3)).astype(np.float32)
    known = sketch(Data(x, None))
    assert len(known) == 256
    assert overlap(known, Data(x[:2000], None)) == 1.0
    assert overlap(known, Data(x + 1, None)) == 0.0
    half = np.concatenate([x[:1000], x[:1000] + 1])
    assert 0.3 < overlap(known, Data(half, None)) < 0.7
    few = Data(np.array([[0.0], [1.0]] * 50), None)
    assert overlap(sketch(few), few) == 0.0  # repeated rows: it cannot be told


# ---- conformal ----------------------------------------------------------------------------------------------------------------------


def test_split_conformal_covers_within_the_exact_band():
    """The number covered of m new rows is beta-binomial: its quantiles bound the total over 1,000 splits."""
    n, m, level, place = 99, 50, 0.9, 90
    covered = []
    held, new = normal(np.zeros(n), np.ones(n)), normal(np.zeros(m), np.ones(m))
    for _ in range(1000):
        y = RNG.standard_t(3, size=n + m)  # nothing like the predictive
        lower, upper = conformal.calibrate(0, held, y[:n], level, "absolute").interval(new)
        covered.append(np.sum((y[n:] >= lower) & (y[n:] <= upper)))
    law = stats.betabinom(m, place, n + 1 - place)
    assert abs(np.mean(covered) - law.mean()) < 5 * law.std() / np.sqrt(1000)
    assert np.std(covered) == pytest.approx(law.std(), rel=0.15)


@pytest.mark.parametrize("score", ["adaptive", "probability"])
def test_conformal_sets_cover_whatever_the_model(score):
    pred, y = classifier(8000, 5, sharp=4.0, seed=9)
    found = conformal.calibrate(0, pred.rows(slice(0, 4000)), y[:4000], 0.8, score)
    sets = found.sets(1, pred.rows(slice(4000, None)))
    hit = sets[np.arange(4000), y[4000:]]
    assert abs(hit.mean() - 0.8) < 5 * np.sqrt(0.16 / 4000 * 2)
    penalised = conformal.calibrate(0, pred.rows(slice(0, 4000)), y[:4000], 0.8, "adaptive", penalty=0.05, free=1)
    smaller = penalised.sets(1, pred.rows(slice(4000, None)))
    assert abs(smaller[np.arange(4000), y[4000:]].mean() - 0.8) < 5 * np.sqrt(0.16 / 4000 * 2)
    if score == "adaptive":
        assert smaller.sum(1).max() <= sets.sum(1).max()


@pytest.mark.parametrize("score", ["normalised", "absolute", "quantile"])
def test_conformal_intervals_in_groups(score):
    groups = RNG.integers(0, 2, 6000)
    std = np.where(groups == 1, 3.0, 1.0)
    y, pred = std * RNG.normal(size=6000), normal(np.zeros(6000), np.ones(6000))
    found = conformal.calibrate(0, pred.rows(slice(0, 3000)), y[:3000], 0.9, score, groups=groups[:3000])
    lower, upper = found.interval(pred.rows(slice(3000, None)), groups[3000:])
    for group in (0, 1):
        inside = ((y >= np.concatenate([y[:3000], lower])) & (y <= np.concatenate([y[:3000], upper])))[3000:][groups[3000:] == group]
        assert abs(inside.mean() - 0.9) < 5 * np.sqrt(0.09 / 1500 * 2)
    with pytest.raises(DataError, match="groups"):
        found.interval(pred.rows(slice(3000, None)))
    with pytest.warns(HealthWarning, match="At least 9"):
        everything = conformal.calibrate(0, pred.rows(slice(0, 5)), y[:5], 0.9)
    assert np.all(np.isinf(everything.interval(pred.rows(slice(0, 2)))[1]))
    with pytest.raises(MethodError, match="intervals"):
        found.sets(0, classifier(3, 2)[0])


def test_adaptive_intervals_follow_drift():
    n = 10_000
    y = RNG.normal(size=n) * np.linspace(1, 6, n)  # the predictive stays at 1
    pred = normal(np.zeros(n), np.ones(n))
    lower, upper, state = conformal.adaptive(pred, y, conformal.Adaptive(0.9))
    inside = (y >= lower) & (y <= upper)
    assert abs(inside.mean() - 0.9) < 0.01
    assert abs(inside[-2000:].mean() - 0.9) < 0.02
    fixed = conformal.calibrate(0, pred.rows(slice(0, 1000)), y[:1000])
    low, high = fixed.interval(pred)
    assert ((y >= low) & (y <= high))[1000:].mean() < 0.7  # what adapting is for
    assert len(state.scores) == state.window


def test_jackknife_plus_uses_every_row():
    x = RNG.uniform(-1, 1, size=(120, 1))
    y = x[:, 0] + 0.3 * RNG.normal(size=120)
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.05), al.Normal(1.0))  # badly overconfident
    found = conformal.jackknife_plus(0, model, (x[:60], y[:60]), al.Exact(), num_folds=5, level=0.8)
    lower, upper = found.interval(1, x[60:])
    assert sum(len(r) for r in found.residuals) == 60
    covered = np.mean((y[60:] >= lower) & (y[60:] <= upper))
    assert stats.binom.ppf(1e-4, 60, 0.8) / 60 - 0.1 < covered < 0.97
    plain = al.fit(0, model, (x[:60], y[:60]), al.Exact()).predict(1, x[60:]).interval(0.8)
    assert np.mean((y[60:] >= plain[0]) & (y[60:] <= plain[1])) < 0.4


# ---- out of distribution ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_classes():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal([-2, 0], 0.5, (150, 2)), rng.normal([2, 0], 0.5, (150, 2))]).astype(np.float32)
    y = np.repeat([0, 1], 150)
    order = rng.permutation(300)
    model = al.BNN(al.networks.MLP(2, (16,), 2, activation="tanh"), al.Categorical(2), al.Normal(1.0))
    fit = al.fit(0, model, (x[order[:200]], y[order[:200]]), al.Ensemble(al.MAP(num_steps=300), 4))
    return fit, x[order], y[order]


@pytest.mark.parametrize("score", [*ood.SCORES, *ood.FEATURE_SCORES])
def test_every_score_keeps_its_false_alarms_and_sees_far_rows(two_classes, score):
    fit, x, y = two_classes
    found = ood.detector(1, fit, x[200:], score, train=(x[:200], y[:200]), false_alarm=0.1)
    assert np.mean(found.flag(2, x[200:])) <= 0.1
    far = np.stack([np.linspace(-0.5, 0.5, 40), np.full(40, 9.0)], 1).astype(np.float32)
    if score not in (
        "energy",
        "knn",
        "relative_mahalanobis",
    ):  # bounded features and logits far away along the boundary say little to these
        assert np.mean(found.flag(3, far)) > 0.5
        shift = found.shift(4, far)
        assert shift.p_value < 1e-6
        assert shift.auroc > 0.8
    assert np.all((found.p_value(5, far) > 0) & (found.p_value(6, far) <= 1))


def test_features_are_the_inputs_of_the_last_layer(two_classes):
    fit, x, _ = two_classes
    found = ood.features(jax.random.key(3), fit, x[:5], 2)
    drawn = fit.posterior.sample(jax.random.key(3), 2)["network"]
    first = jax.tree.leaves(drawn["layers"][0] if "layers" in drawn else drawn)[0]
    assert found.shape == (2, 5, 16)
    assert np.all(np.abs(found) <= 1)
    assert first.shape[0] == 2
    with pytest.raises(DataError, match="training features"):
        ood.detector(0, fit, x[:5], "knn")
    with pytest.raises(MethodError, match="no such score"):
        ood.detector(0, fit, x[:5], "nonsense")


# ---- acquisition --------------------------------------------------------------------------------------------------------------------


def test_information_of_two_models_that_disagree():
    draws = np.array([[[0.9, 0.1]] * 2, [[0.1, 0.9]] * 2])
    assert acquisition.bald(draws)[0] == pytest.approx(0.368064, abs=5e-7)
    assert acquisition.joint_information(draws) == pytest.approx(0.514375, abs=5e-7)
    np.testing.assert_allclose(acquisition.batch_bald(0, draws, 2).value, [0.368064, 0.514375], atol=1e-6)


def test_batch_bald_is_the_greedy_batch():
    draws = softmax(2 * RNG.normal(size=(15, 12, 3)))
    chosen: list[int] = []
    for _ in range(4):
        chosen.append(max((acquisition.joint_information(draws[:, [*chosen, j]]), j) for j in range(12) if j not in chosen)[1])
    found = acquisition.batch_bald(0, draws, 4)
    assert found.rows.tolist() == chosen
    assert found.value[-1] == pytest.approx(acquisition.joint_information(draws[:, chosen]), abs=1e-5)
    repeated = np.concatenate([draws[:, :1]] * 5 + [draws[:, 1:2]], axis=1)  # five copies: only one of them is worth much
    assert 5 in acquisition.batch_bald(0, repeated, 2).rows


def test_drawn_labels_estimate_the_joint_information(monkeypatch):
    draws = softmax(2 * RNG.normal(size=(15, 6, 3)))
    exact, information = acquisition.batch_bald(0, draws, 6), acquisition.joint_information(draws)
    assert exact.value[-1] == pytest.approx(information, abs=1e-4)
    monkeypatch.setattr(acquisition, "MAX_CONFIGURATIONS", 3)
    assert acquisition.batch_bald(0, draws, 6).value[-1] == pytest.approx(information, abs=0.02)


def test_information_is_between_zero_and_entropy():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        draws = softmax(rng.exponential(3) * rng.normal(size=((1, 4, 7)[seed % 3], 20, (2, 5)[seed % 2])))
        information, total = acquisition.bald(draws), acquisition.entropy(draws)
        assert np.all(information >= 0)
        assert np.all(information <= total + 1e-12)
        np.testing.assert_allclose(total, stats.entropy(draws.mean(0), axis=-1), atol=1e-12)
        pred = Predictive(Outputs(draws=np.log(draws)), Categorical(draws.shape[-1]), squeeze=True)
        np.testing.assert_allclose(pred.mutual_information, information, atol=1e-9)


def test_epig_by_enumeration_and_in_closed_form():
    pool, targets = softmax(RNG.normal(size=(2, 30, 4, 3)))
    expected = []
    for row in range(4):
        gains = []
        for t in range(4):
            joint = np.einsum("sa,sb->ab", pool[:, row], targets[:, t]) / 30
            gains.append(stats.entropy(joint.sum(0)) + stats.entropy(joint.sum(1)) - stats.entropy(joint.ravel()))
        expected.append(np.mean(gains))
    np.testing.assert_allclose(acquisition.epig(pool, targets), expected, atol=1e-12)
    draws = RNG.normal(size=(40_000, 1))
    other = 0.8 * draws + 0.6 * RNG.normal(size=(40_000, 1))
    assert acquisition.epig(draws, other)[0] == pytest.approx(-0.5 * np.log(1 - 0.64), rel=0.03)


def test_variance_reduction_is_what_labelling_does():
    """Closed form: the epistemic variance after `fit.update` with the row is the one promised, and the best row is the most uncertain one."""
    x = np.linspace(-1, 1, 8)
    model = al.LinearModel(al.features.Polynomial(2), al.Gaussian(0.3), al.Normal(1.0))
    fit = al.fit(0, model, (x, np.sin(x)), al.Exact())
    candidates = np.array([-2.0, 0.0, 1.5, 2.5])
    before = fit.predict(1, candidates).epistemic
    mean, covariance = fit.joint(1, candidates)
    exact = np.mean(covariance[:, 0, :, 0] ** 2, axis=1) / (np.diag(covariance[:, 0, :, 0]) + 0.09)
    draws = fit.functions(2, candidates, 20_000)
    np.testing.assert_allclose(acquisition.variance_reduction(draws, 0.09, draws), exact, rtol=0.06)
    for row, promised in enumerate(exact):
        after = fit.update((candidates[row : row + 1], np.array([0.7]))).predict(1, candidates).epistemic
        assert np.mean(before - after) == pytest.approx(promised, rel=1e-6)
    assert al.active.choose(3, fit, candidates, 1).rows[0] == np.argmax(before)
    for name in ("variance_reduction", "epig"):
        assert al.active.choose(3, fit, candidates, 1, name, num_samples=4000).rows[0] == np.argmax(exact)
    c = covariance[:, 0, :, 0]
    information = np.mean(-0.5 * np.log1p(-(c**2) / np.outer(np.diag(c) + 0.09, np.diag(c) + 0.09)), axis=1)
    np.testing.assert_allclose(acquisition.epig(draws, draws, 0.09, 0.09), information, rtol=0.06)
    assert np.argmax(exact) == np.argmax(before)
    assert mean.shape == (4, 1)


def exact_draws(covariance, num=40):
    """Draws (num, d) whose sample covariance is the given one to rounding, and whose mean is zero."""
    plain = RNG.normal(size=(num, len(covariance)))
    basis, _ = np.linalg.qr(plain - plain.mean(axis=0))
    return np.sqrt(num - 1) * basis @ np.linalg.cholesky(covariance).T


@pytest.fixture(scope="module")
def curve():
    x = np.linspace(-1, 1, 8)
    model = al.LinearModel(al.features.RBF(np.linspace(-2, 3, 12), width=0.5), al.Gaussian(0.3), al.Normal(1.0))
    candidates = np.linspace(-2, 3, 9)
    fit = al.fit(0, model, (x, np.sin(x)), al.Exact())
    return fit, candidates, fit.joint(1, candidates)[1][:, 0, :, 0]


def test_conditioned_draws_have_the_covariance_after_a_label(curve):
    """The exact posterior of a linear model, updated with one and with two labels."""
    fit, candidates, before = curve
    draws, labelled = exact_draws(before), fit
    for row in (8, 2):
        draws = acquisition.conditioned(draws, row, 0.09)
        labelled = labelled.update((candidates[row : row + 1], np.array([0.7])))
        np.testing.assert_allclose(np.cov(draws.T), labelled.joint(1, candidates)[1][:, 0, :, 0], atol=1e-9)
        np.testing.assert_allclose(draws.mean(axis=0), 0, atol=1e-12)


def test_several_targets_are_labelled_together():
    """Closed form: all targets of a row at once, by one 2 × 2 solve."""
    root = RNG.normal(size=(6, 6))
    covariance, noise = root @ root.T + np.eye(6), np.array([0.5, 2.0])
    draws = acquisition.conditioned(exact_draws(covariance).reshape(-1, 3, 2), 1, noise)
    cross = covariance[:, 2:4]
    after = covariance - cross @ np.linalg.solve(covariance[2:4, 2:4] + np.diag(noise), cross.T)
    np.testing.assert_allclose(np.cov(draws.reshape(-1, 6).T), after, atol=1e-9)
    batch = acquisition.batch_gains(
        0, exact_draws(covariance).reshape(-1, 3, 2), np.tile(noise, (3, 1)), lambda f: f.var(axis=0).sum(axis=1), 3
    )
    assert sorted(batch.rows) == [0, 1, 2]
    with pytest.raises(MethodError, match="1 to 3 unlabelled"):
        acquisition.batch_gains(0, np.ones((4, 3)), np.ones(3), lambda f: f.var(axis=0), 4)


@pytest.mark.parametrize("name", ["variance", "variance_reduction", "epig"])
def test_batches_of_numbers_are_the_greedy_ones_in_closed_form(curve, name, monkeypatch):
    """Each row is the best given labels of those before it; neighbours that tell the same do not come together."""
    fit, candidates, covariance = curve
    monkeypatch.setattr(al.Fit, "functions", lambda *_: exact_draws(covariance))
    batch = al.active.choose(3, fit, candidates, 4, name)
    expected, values = [], []
    for _ in range(4):
        spread = np.diag(covariance)
        scores = {
            "variance": spread,
            "variance_reduction": np.mean(covariance**2, axis=1) / (spread + 0.09),
            "epig": np.mean(-0.5 * np.log1p(-(covariance**2) / np.outer(spread + 0.09, spread + 0.09)), axis=1),
        }[name].copy()
        scores[expected] = -np.inf
        row = int(np.argmax(scores))
        expected, values = [*expected, row], [*values, scores[row]]
        covariance = covariance - np.outer(covariance[:, row], covariance[row]) / (spread[row] + 0.09)
    assert batch.rows.tolist() == expected
    np.testing.assert_allclose(batch.value, values, rtol=1e-6)


@pytest.mark.parametrize("name", [*al.active.CLASSES])
def test_every_acquisition_chooses_new_rows(two_classes, name):
    fit, x, _ = two_classes
    pool = np.concatenate([x[:20], np.zeros((20, 2), np.float32)])  # twenty equal rows: ties
    labelled = np.arange(0, 40, 2)
    found = al.active.choose(1, fit, pool, 5, name, labelled, num_samples=8).rows
    assert len(set(found.tolist())) == 5
    assert not set(found.tolist()) & set(labelled.tolist())
    with pytest.raises(MethodError, match="1 to 20 unlabelled"):
        al.active.choose(1, fit, pool, 21, name, labelled)


def test_diverse_batches_are_spread():
    probs = np.full((30, 2), 0.5)
    embedding = np.repeat(np.eye(3), 10, axis=0) + 0.01 * RNG.normal(size=(30, 3))
    found = acquisition.diverse(0, probs, embedding, 3).rows // 10
    assert sorted(found.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("how", ["temperature", "vector", "isotonic", "beta"])
def test_recalibrated_fits_are_saved_bit_for_bit(two_classes, tmp_path, how):
    fit, x, y = two_classes
    found = al.decide.recalibrate(0, fit, (x[200:], y[200:]), how)
    found.save(tmp_path / "it")
    again = al.load(tmp_path / "it")
    assert type(again.map) is type(found.map)
    np.testing.assert_array_equal(again.predict(1, x[:20]).probs, found.predict(1, x[:20]).probs)
    with pytest.raises(StoreError, match="holds something else"):
        found.save(tmp_path)


@pytest.mark.reuses_keys
@pytest.mark.parametrize("score", ["mutual_information", "density", "knn", "layers"])
def test_detectors_are_saved_bit_for_bit(two_classes, tmp_path, score):
    fit, x, y = two_classes
    found = ood.detector(1, fit, x[200:], score, train=(x[:200], y[:200]))
    found.save(tmp_path)
    again = al.load(tmp_path)
    assert (again.threshold, again.name, again.false_alarm) == (found.threshold, found.name, found.false_alarm)
    np.testing.assert_array_equal(again.reference, found.reference)
    np.testing.assert_array_equal(again.score(2, x[:30]), found.score(2, x[:30]))
    np.testing.assert_array_equal(again.p_value(2, x[:30]), found.p_value(2, x[:30]))
    changed = next(tmp_path.glob("arrays-*.safetensors"))
    content = changed.read_bytes()
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match="altered"):
        al.load(tmp_path)


def test_the_score_of_all_layers_is_the_sum_of_standardised_log_distances(two_classes):
    """Against the formula, for the layer that needs no network: x itself."""
    fit, x, y = two_classes
    train, groups = x[:200].astype(float), y[:200]
    found = ood.detector(1, fit, x[200:], "layers", train=(x[:200], y[:200]))
    means, whitener, centre, spread = found.rate.learnt[0][0]
    np.testing.assert_allclose(means, [train[groups == c].mean(axis=0) for c in (0, 1)], atol=1e-12)
    apart = np.min([np.sum(((train - mean) @ whitener.T) ** 2, axis=1) for mean in means], axis=0)
    np.testing.assert_allclose([centre, spread], [np.log(apart).mean(), np.log(apart).std()], rtol=1e-9)
    assert [len(state[0][0]) for state in found.rate.learnt[0]] == [2, 16]
    members = jax.tree.unflatten(jax.tree.structure(fit.posterior.params), found.rate.weights)
    by_hand = [
        sum((np.log(np.min([np.sum(((rows - m) @ w.T) ** 2, axis=1) for m in means], axis=0)) - a) / b for (means, w, a, b), rows in pairs)
        for pairs in (
            zip(state, seen, strict=True) for state, seen in zip(found.rate.learnt, ood._at(fit, members, x[:9], True), strict=True)
        )
    ]
    np.testing.assert_allclose(found.score(2, x[:9]), np.mean(by_hand, axis=0), rtol=1e-6)


# ---- the loop -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, size=(60, 1))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=60)
    return al.LinearModel(al.features.Polynomial(5), al.Gaussian(0.1), al.Normal(1.0)), x, y


@pytest.mark.reuses_keys
def test_loop_resumes_where_it_stopped(pool, tmp_path):
    model, x, y = pool
    settings = {"batch": 6, "initial": 4, "test": (x, y)}
    whole = al.active.loop(0, model, al.Exact(), x, y, budget=16, **settings)
    assert whole.rounds[-1].num_labels == 16
    assert len(set(whole.index.tolist())) == 16
    np.testing.assert_array_equal(whole.y, y[whole.index])
    al.active.loop(0, model, al.Exact(), x, y, budget=10, directory=tmp_path, **settings)
    again = al.active.loop(0, model, al.Exact(), x, y, budget=16, directory=tmp_path, **settings)
    np.testing.assert_array_equal(again.index, whole.index)
    assert again.rounds[-1].scores == whole.rounds[-1].scores
    with pytest.raises(StoreError, match="another loop"):
        al.active.loop(1, model, al.Exact(), x, y, budget=16, directory=tmp_path, **settings)
    assert whole.labels_to("rmse", 1e9) == 4
    assert whole.labels_to("rmse", 0.0) is None
    with pytest.raises(DataError, match="no such curve"):
        whole.curve("accuracy")


@pytest.mark.reuses_keys
def test_loop_with_a_person(pool, tmp_path):
    model, x, y = pool
    sheet = tmp_path / "labels.csv"
    call = lambda: al.active.loop(0, model, al.Exact(), x, sheet, batch=2, budget=6, initial=4)
    first = call()
    assert "Waiting for 4 labels" in first.status
    assert first.fit is None
    rounds = 0
    while "Waiting" in (state := call()).status:
        lines = sheet.read_text().splitlines()
        filled = [
            line if line.split(",")[1] else ",".join([line.split(",")[0], str(y[int(line.split(",")[0])]), *line.split(",")[2:]])
            for line in lines[1:]
        ]
        sheet.write_text("\n".join([lines[0], *filled]) + "\n")
        rounds += 1
    assert rounds == 2
    direct = al.active.loop(0, model, al.Exact(), x, y, batch=2, budget=6, initial=4)
    np.testing.assert_array_equal(state.index, direct.index)
    sheet.write_text("number,answer\n1,2\n")
    with pytest.raises(DataError, match="row and label"):
        call()


def test_loop_ends_with_the_pool_and_beats_random(pool):
    model, x, y = pool
    everything = al.active.loop(0, model, al.Exact(), x[:9], lambda rows: y[rows], batch=4, budget=100, initial=3)
    assert sorted(everything.index.tolist()) == list(range(9))
    assert everything.status == "The whole pool is labelled."
    far = np.concatenate([np.linspace(-0.2, 0.2, 50), np.linspace(-2, 2, 10)])[:, None]  # nearly all of the pool is in the middle
    truth = np.sin(2 * far[:, 0])
    found = al.active.curves(
        0,
        model,
        al.Exact(),
        far,
        truth,
        (np.linspace(-2, 2, 40)[:, None], np.sin(2 * np.linspace(-2, 2, 40))),
        num_runs=2,
        batch=4,
        budget=12,
        initial=4,
    )
    last = {name: np.mean([h.curve("rmse")[1][-1] for h in runs]) for name, runs in found.items()}
    assert last["default"] < 0.5 * last["random"]
    for wrong, text in (
        ({"batch": 0}, "nothing to label"),
        ({"initial": 100}, "cannot begin"),
        ({"initial": [0, 0]}, "different row numbers"),
    ):
        with pytest.raises(AleatorError, match=text):
            al.active.loop(0, model, al.Exact(), x[:9], y[:9], **wrong)
    with pytest.raises(DataError, match="one label a row"):
        al.active.loop(0, model, al.Exact(), x[:9], y[:5])


def test_rounds_of_a_loop_share_their_programs(caplog):
    """Nine rounds, 33 to 49 labels, all fitted in 64 rows: the first compiles, the second compiles the acquisition, the rest nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    model = al.BNN(al.networks.MLP(2, (4,), 2), al.Categorical(2), al.Normal(1.0))
    method, compiled = al.Ensemble(al.MAP(num_steps=3, batch_size=8), 2), []
    count = lambda _: compiled.append(sum("Finished XLA compilation" in r.getMessage() for r in caplog.records))
    with jax.log_compiles():
        history = al.active.loop(0, model, method, x, y, 2, 49, initial=33, test=(x, y), num_samples=4, report=count)
    assert len(history.rounds) == 9
    assert compiled[0] > 0
    assert len(set(compiled[1:])) == 1
    assert history.fit.manifest["data"]["num_data"] == 49


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"initial": 5, "budget": 3}, "beyond the budget"), ({"batch": 2.5}, "whole numbers"), ({"scores": ["nothing"]}, "no such score")],
)
def test_a_loop_that_cannot_be_run_as_asked_is_refused(pool, wrong, text):
    """Five labels were asked for with a budget of three, which was then "used"."""
    model, x, y = pool
    with pytest.raises(MethodError, match=text):
        al.active.loop(0, model, al.Exact(), x, y, **{"batch": 2, "budget": 6, "initial": 4, "test": (x, y)} | wrong)


def test_repeated_rows_are_the_same_data():
    """Five rows in 32, in closed form and at the mode of a small network."""
    rng = np.random.default_rng(0)
    rows = al.Data(rng.normal(size=(5, 2)), rng.normal(size=5), np.array([1.0, 2.0, 0.5, 1.0, 1.0]))
    many = rows.repeated(32)
    linear = al.LinearModel(al.features.Identity(), al.Gaussian(al.InverseGamma(1.0, 1.0)), al.Normal(1.0), scaled_by_noise=True)
    one, other = (al.fit(0, linear, data, al.Exact()) for data in (rows, many))
    assert other.log_evidence.value == pytest.approx(one.log_evidence.value, rel=1e-12)
    new = rng.normal(size=(3, 2))
    np.testing.assert_allclose(other.predict(1, new).variance, one.predict(1, new).variance, rtol=1e-10)
    model = al.BNN(al.networks.MLP(2, (3,), 1), al.Gaussian(0.3), al.Normal(1.0))
    one, other = (al.fit(0, model, data, al.MAP(num_steps=20)) for data in (rows, many))
    np.testing.assert_allclose(other.predict(1, new).mean, one.predict(1, new).mean, rtol=1e-3)


# ---- decisions ----------------------------------------------------------------------------------------------------------------------

PROFIT = lambda order, y: 5 * np.minimum(order, y) - 3 * order


def test_newsvendor_in_closed_form():
    demand = normal([100.0, 50.0], [20.0, 5.0], scale=3.0)
    orders = np.linspace(40, 110, 701)
    found = al.decide.best_action(demand, PROFIT, orders)
    np.testing.assert_allclose(found.action, stats.norm.ppf(0.4, [100, 50], [20, 5]), atol=0.1)
    z = stats.norm.ppf(0.4)
    np.testing.assert_allclose(found.value, 2 * np.array([100, 50]) - 5 * stats.norm.pdf(z) * np.array([20, 5]), rtol=2e-4)
    fine = np.linspace(20, 180, 801)
    np.testing.assert_allclose(al.decide.value_of_knowing(demand, PROFIT, fine), 5 * stats.norm.pdf(z) * np.array([20, 5]), rtol=0.02)
    # Knowing f leaves the noise of 3: the rest of the information is in the model.
    within = 5 * stats.norm.pdf(z) * (np.array([20, 5]) - 3.0)
    np.testing.assert_allclose(al.decide.value_of_model(0, demand, PROFIT, np.linspace(0, 200, 81), 400), within, rtol=0.2)
    assert np.all(al.decide.plug_in(demand, PROFIT, orders).action == np.array([100, 50]))
    cautious = al.decide.best_action(demand, PROFIT, orders, al.decide.cvar(0.05))
    assert np.all(np.array(cautious.action) < np.array(found.action))
    assert np.all(found.regret >= 0)


def test_risk_measures_of_a_gaussian():
    money = normal([1.0], [2.0])
    keep = lambda action, y: y
    value = lambda risk: al.decide.best_action(money, keep, [None], risk).value[0]
    assert value(al.decide.expected) == pytest.approx(1.0, abs=1e-6)
    assert value(al.decide.mean_variance(0.5)) == pytest.approx(1.0 - 0.25 * 4, abs=5e-3)
    assert value(al.decide.exponential(0.5)) == pytest.approx(1.0 - 0.25 * 4, abs=5e-3)
    assert value(al.decide.cvar(0.1)) == pytest.approx(1.0 - 2 * stats.norm.pdf(stats.norm.ppf(0.1)) / 0.1, abs=5e-3)


def test_decisions_on_classes_counts_and_other_numbers():
    labels = Predictive(
        Outputs(draws=np.log([[[0.7, 0.2, 0.1], [0.34, 0.33, 0.33]]])), Categorical(3), labels=("a", "b", "c"), squeeze=True
    )
    gain = lambda action, y: np.where(y == action, 1.0, -1.0)
    found = al.decide.best_action(labels, gain, ["a", "b", "c"], defer=0.0)
    assert found.action == ["a", "defer"]
    np.testing.assert_allclose(found.value, [0.4, 0.0], atol=1e-12)
    np.testing.assert_allclose(al.decide.realised(found, gain, np.array(["b", "a"]), defer=0.0), [-1.0, 0.0])
    with pytest.raises(MethodError, match="deferred"):
        al.decide.realised(found, gain, np.array(["b", "a"]))
    np.testing.assert_allclose(al.decide.value_of_knowing(labels, gain, ["a", "b", "c"]), 1 - np.array([0.4, -0.32]), atol=1e-12)
    counts = Predictive(Outputs(draws=np.full((1, 1, 1), np.log(4.0))), Poisson(), squeeze=True)
    stock = al.decide.best_action(counts, PROFIT, range(12))
    assert stock.action == [int(stats.poisson.ppf(0.4, 4.0))]
    heavy = Predictive(Outputs(draws=np.zeros((1, 1, 1)), extra={"scale": np.ones(1), "df": np.full(1, 3.0)}), StudentT(), squeeze=True)
    assert al.decide.best_action(heavy, lambda a, y: -np.abs(a - y), np.linspace(-1, 1, 201)).action[0] == pytest.approx(0.0, abs=0.011)
    two = Predictive(Outputs(draws=np.zeros((1, 2, 2)), extra={"scale": np.ones((1, 2))}), Gaussian())
    with pytest.raises(MethodError, match="key"):
        al.decide.best_action(two, lambda a, y: y.sum(-1), [0])
    assert abs(al.decide.best_action(two, lambda a, y: y.sum(-1), [0], key=0).value[0]) < 5 * np.sqrt(2 / 4096)


def test_bad_decisions_are_named():
    pred = normal([0.0], [1.0])
    with pytest.raises(DataError, match="NaN for action 1"):
        al.decide.best_action(pred, lambda a, y: y * np.nan if a else y, [0, 1])
    with pytest.raises(MethodError, match="no actions"):
        al.decide.best_action(pred, lambda a, y: y, [])
    with pytest.raises(DataError, match="NaN in"):
        al.decide.best_action(normal([np.nan], [1.0]), lambda a, y: y, [0])
    with pytest.raises(MethodError, match="positive"):
        al.decide.exponential(0.0)
    with pytest.raises(MethodError, match="needs a predictive"):
        al.decide.best_action(np.zeros(3), lambda a, y: y, [0])


def test_decisions_are_the_same_however_y_is_shaped():
    """(rows, 1) and (rows,) are one target: `plug_in` and `realised` broke on the first."""
    utility, y = (lambda a, y: -np.abs(a - y)), np.array([0.0, 1.0, 0.2])
    outputs = Outputs(draws=RNG.normal(size=(5, 3, 1)), extra={"scale": np.ones(5)})
    flat, column = (Predictive(outputs, Gaussian(), squeeze=squeeze) for squeeze in (True, False))
    for decide in (al.decide.best_action, al.decide.plug_in):
        one, other = decide(flat, utility, [0.0, 1.0]), decide(column, utility, [0.0, 1.0])
        np.testing.assert_array_equal(one.table, other.table)
        np.testing.assert_array_equal(al.decide.realised(one, utility, y), al.decide.realised(other, utility, y[:, None]))
    with pytest.raises(DataError, match="does not match the decisions"):
        al.decide.realised(al.decide.best_action(flat, utility, [0.0]), utility, y[:1])
    for ask in (al.decide.plug_in, al.decide.value_of_knowing):
        with pytest.raises(MethodError, match="nothing to choose"):
            ask(flat, utility, [])
    with pytest.raises(DataError, match="another shape"):
        al.decide.best_action(flat, lambda a, y: np.stack([y, y], axis=-1), [0.0])


def test_a_mask_of_labelled_rows_excludes_them():
    """It was read as the row numbers 0 and 1."""
    draws, labelled = RNG.dirichlet(np.ones(3), (6, 8)), np.arange(8) > 3
    chosen = [
        acquisition.top(0, np.arange(8.0), 3, labelled),
        acquisition.batch_bald(0, draws, 3, labelled),
        acquisition.diverse(0, draws[0], RNG.normal(size=(8, 2)), 3, labelled),
        acquisition.batch_gains(0, RNG.normal(size=(6, 8)), np.ones(8), lambda f: f.var(axis=0), 3, labelled),
    ]
    for batch in chosen:
        assert batch.rows.max() <= 3
    for wrong in ([-1], [8], [0.5], labelled[:5]):
        with pytest.raises(DataError, match="cannot be excluded"):
            acquisition.top(0, np.arange(8.0), 3, wrong)


def test_classes_that_are_none_are_named():
    probs, y = RNG.dirichlet(np.ones(3), 20), RNG.integers(0, 3, 20)
    with pytest.raises(DataError, match="encode the classes"):
        calibration.ece(probs, np.array(["a", "b", "c"])[y])
    for label in (3, -1, "a"):
        with pytest.raises(DataError, match="no such class"):
            calibration.reliability(probs, y, label=label)
    np.testing.assert_array_equal(calibration.reliability(probs, y, label=2).size.sum(), 20)


LINE = al.LinearModel(al.features.Identity(), al.Gaussian(0.5), al.Normal(1.0))


def test_value_of_a_label_in_closed_form():
    """A label at c moves the mean of f(1) by a Gaussian of known spread, Cov(f(1), f(c))²/(Var f(c) + σ²); acting pays max(0, mean)."""
    x = np.array([[0.5], [-0.5], [0.4]])
    fit = al.fit(0, LINE, (x, np.array([0.1, 0.05, 0.0])), al.Exact())
    candidates = np.array([[3.0], [-1.0], [1.0]])
    mean, covariance = fit.joint(0, np.concatenate([np.array([[1.0]]), candidates]))
    m, c = float(mean[0, 0]), covariance[:, 0, :, 0]
    spread = np.sqrt(c[0, 1:] ** 2 / (np.diag(c)[1:] + 0.25))
    exact = m * stats.norm.cdf(m / spread) + spread * stats.norm.pdf(m / spread) - max(m, 0.0)
    num = 1000
    found = al.decide.value_of_label(1, fit, candidates, np.array([[1.0]]), lambda a, y: a * y, [0, 1], num_samples=num, num_labels=num)
    np.testing.assert_allclose(found, exact, atol=5 * np.max(spread) / np.sqrt(num))
    assert np.argsort(found).tolist() == np.argsort(exact).tolist()


def test_value_of_a_label_of_several_targets():
    """A utility of the first of two independent columns: the second takes part in the draws and changes nothing but their noise."""
    rng = np.random.default_rng(0)
    x = np.array([[0.5], [-0.5], [0.4]])
    y = np.stack([[0.1, 0.05, 0.0], rng.normal(size=3)], axis=-1)
    candidates, rows, num = np.array([[3.0], [-1.0]]), np.array([[1.0]]), 1000
    ask = lambda y, take: al.decide.value_of_label(
        1, al.fit(0, LINE, (x, y), al.Exact()), candidates, rows, lambda a, y: a * take(y), [0, 1], num_samples=num, num_labels=num
    )
    one, two = ask(y[:, 0], lambda y: y), ask(y, lambda y: y[..., 0])
    np.testing.assert_allclose(one, two, rtol=0.2)


# ---- combination --------------------------------------------------------------------------------------------------------------------


def test_stacking_weights_maximise_the_score():
    from scipy.optimize import minimize

    from aleator._compare import pseudo_bma_weights, stacking_weights

    for n, m in ((50, 3), (300, 6), (20, 4)):
        terms = RNG.normal(size=(n, m)) - 2 * RNG.random(m)
        score = lambda w: np.mean(np.log(np.exp(terms) @ w))  # noqa: B023
        found = stacking_weights(terms)
        peer = minimize(
            lambda w: -score(w),  # noqa: B023
            np.full(m, 1 / m),
            method="SLSQP",
            bounds=[(0, 1)] * m,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        )
        assert score(found) >= -peer.fun - 1e-9
        assert found.sum() == pytest.approx(1)
    even = pseudo_bma_weights(0, np.zeros((10, 2)))
    np.testing.assert_allclose(even, 0.5)
    few = np.array([[3.0], [-1.0], [-1.0], [0.5], [-0.5]]) * [1.0, -1.0]  # two nats apart, by one row alone
    plain = 1 / (1 + np.exp(-2 * few[:, 0].sum()))
    assert plain > 0.85
    assert 0.5 < pseudo_bma_weights(0, few)[0] < plain - 0.1  # the bootstrap doubts what one row decides
    with pytest.raises(AleatorError, match="stacked"):
        stacking_weights(np.full((3, 2), np.nan))


def test_stack_prefers_what_predicts(pool):
    model, x, y = pool
    poor = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.1), al.Normal(1.0))
    fits = {"good": al.fit(0, model, (x[:40], y[:40]), al.Exact()), "poor": al.fit(0, poor, (x[:40], y[:40]), al.Exact())}
    found = al.stack(1, fits, (x[40:], y[40:]))
    assert found.weights[0] > 0.95
    assert found.predict(2, x[40:]).log_prob(y[40:]).mean() > -1


def test_auto_stacks_within_its_budget(pool):
    model, x, y = pool
    poor = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.1), al.Normal(1.0))
    seen = []
    found = al.auto(0, model, (x, y), 300, {"good": al.Exact(), "poor": (poor, al.Exact()), "wrong": al.PBP()}, report=seen.append)
    assert found.best == "good"
    assert found.weights["good"] > 0.95
    assert [e.name for e in seen] == ["good", "poor", "wrong"]
    assert seen[2].note.startswith("left out")
    assert found.stacked[0] >= max(e.score for e in found.entries if np.isfinite(e.score)) - 1e-9
    assert "good" in str(found)
    assert found.predict(1, x[:3]).mean.shape == (3,)
    with pytest.raises(MethodError, match="budget"):
        al.auto(0, model, (x, y), "soon")
    with pytest.raises(DataError, match="at least 10"):
        al.auto(0, model, (x[:5], y[:5]))


def test_a_method_beyond_the_budget_is_left_out(pool):
    model, x, y = pool
    module = importlib.import_module("aleator._auto")
    times = itertools.count(0, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(times)))
        found = module.auto(0, model, (x, y), 1500, {"first": al.Exact(), "second": al.Exact(), "third": al.Exact()})
    assert "expected" in found.entries[-1].note or "budget" in found.entries[-1].note
    assert "first" in found.fits
    assert module.seconds_of("1h30m") == 5400
