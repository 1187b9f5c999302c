"""aleator/_auto.py and _stacked.py: paired verdicts, sets of classes, interruption, comparing without keeping, the mixture as a whole."""

import dataclasses
import importlib
import json

import numpy as np
import pytest

import aleator as al
from aleator._compare import stacking_weights
from aleator._errors import MethodError, StoreError
from aleator._stacked import Auto, Entry, in_set

auto_module = importlib.import_module("aleator._auto")  # al.auto is the function

RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def line():
    x = RNG.uniform(-2, 2, size=(40, 1))
    y = np.sin(2 * x[:, 0]) + 0.1 * RNG.normal(size=40)
    make = lambda degree: al.LinearModel(al.features.Polynomial(degree), al.Gaussian(0.1), al.Normal(1.0))
    return x, y, {name: (make(degree), al.Exact()) for name, degree in (("one", 1), ("three", 3), ("five", 5))}


def made(densities, seconds):
    """An Auto of given log densities, without fits."""
    entries = tuple(Entry(name, float(np.mean(d)), 0.1, seconds=seconds[name]) for name, d in densities.items())
    return Auto({}, {next(iter(densities)): 1.0}, entries, (0.0, 0.0), 1.0, held_out=densities)


def test_the_verdict_is_by_paired_differences():
    common = RNG.normal(0.0, 5.0, 400)  # what makes a row hard for everyone: the scores themselves overlap widely
    found = made(
        {"good": common, "same": common + 0.01 * RNG.normal(size=400), "bad": common - 0.2 + 0.1 * RNG.normal(size=400)},
        {"good": 9.0, "same": 1.0, "bad": 0.1},
    )
    gap = found.held_out["good"] - found.held_out["bad"]
    assert found.difference("good", "bad") == pytest.approx((gap.mean(), gap.std(ddof=1) / 20))
    assert "good and same cannot be told apart" in found.verdict or "same and good cannot be told apart" in found.verdict
    best = found.best
    assert f"worse than {best}: bad by {found.difference(best, 'bad')[0]:.3f}" in found.verdict
    assert found.verdict.endswith("Take same: the quickest of the best.")
    assert made({"a": common, "b": common - 1.0 - 0.1 * RNG.random(400)}, {"a": 1.0, "b": 1.0}).verdict.startswith(
        "a is the best; worse than a: b by 1.0"
    )
    assert "nothing to compare" in made({"a": common}, {"a": 1.0}).verdict


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_sets_of_classes_hold_their_probability_exactly(level):
    """Under y ~ p the chance of being in the set is the level for every p, ties and certainties too: Σ_k p_k · in_set(p, k) = level."""
    probs = np.concatenate([RNG.dirichlet(np.full(4, 0.5), 50), [[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.4, 0.4, 0.1, 0.1]]])
    chance = np.stack([in_set(probs, np.full(len(probs), k), level) for k in range(4)], axis=1)
    np.testing.assert_allclose(np.sum(probs * chance, axis=1), level, atol=1e-12)
    assert np.all((chance >= 0) & (chance <= 1))


def test_the_stack_is_scored_on_rows_its_weights_have_not_seen():
    """By hand, fold by fold; two methods that miss different rows are mixed."""
    easy = np.tile([True, True, False, False], 10)
    table = {"a": np.where(easy, -0.1, -3.0), "b": np.where(easy, -3.0, -0.1), "bad": np.full(40, -9.0)}
    shares, mixed = auto_module._stacked(table, [15, 10, 15])
    assert shares == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-6)
    columns, expected = np.stack(list(table.values()), axis=1), []
    for low, high in ((0, 15), (15, 25), (25, 40)):
        weights = stacking_weights(np.delete(columns, slice(low, high), axis=0))
        expected.append(np.log(np.exp(columns[low:high]) @ weights))
    np.testing.assert_allclose(mixed, np.concatenate(expected), atol=1e-6)


@pytest.mark.parametrize("sizes", [[20, 20, 20], [60]])
def test_weights_that_only_fit_one_row_are_not_taken(sizes):
    """`other` is worse everywhere but at one row that `best` misses: plain stacking would pay for it on every other row."""
    best, other = -1 + 0.1 * RNG.normal(size=60), -2 + 0.1 * RNG.normal(size=60)
    best[7], other[7] = -9.0, -2.0
    plain = stacking_weights(np.stack([best, other], axis=1))
    assert plain[1] > 0.001
    shares, mixed = auto_module._stacked({"best": best, "other": other}, sizes)
    assert shares == {"best": 1.0}
    np.testing.assert_array_equal(mixed, best)


@pytest.mark.reuses_keys
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(line, tmp_path):
    x, y, methods = line
    whole = al.auto(0, None, (x, y), 300, methods)

    def stop(words, seconds):
        if words.startswith("five, fold 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        al.auto(0, None, (x, y), 300, methods, watch=stop, checkpoint=tmp_path)
    said = []
    again = al.auto(0, None, (x, y), 300, methods, watch=lambda words, _: said.append(words), checkpoint=tmp_path, resume=True)
    assert not any(words.startswith(("one, fold", "three, fold")) for words in said)  # they were not run again
    assert "five, fold 1 of 5" in said
    for name in methods:
        np.testing.assert_array_equal(again.held_out[name], whole.held_out[name])
    assert again.weights == whole.weights
    assert (again.whole.score, again.whole.second, again.whole.coverage) == (whole.whole.score, whole.whole.second, whole.whole.coverage)
    np.testing.assert_array_equal(again.predict(1, x).mean, whole.predict(1, x).mean)
    with pytest.raises(StoreError, match="another run"):
        al.auto(1, None, (x, y), 300, methods, checkpoint=tmp_path, resume=True)


def test_comparing_keeps_no_fit_but_tells_the_evidence(line, tmp_path):
    x, y, methods = line
    found = al.auto(0, None, (x, y), 300, methods, compare_only=True)
    assert found.fits == {}
    for entry in found.entries:
        exact = al.fit(0, methods[entry.name][0], (x, y), al.Exact()).log_evidence
        assert entry.evidence == pytest.approx(exact.value)
        assert entry.evidence_kind == "exact"
    with pytest.raises(MethodError, match="predicts nothing"):
        found.predict(0, x)


def test_units_and_the_mixture_as_a_whole(line, tmp_path):
    """Scores are told in the units before y was divided; a mixture of one is that one, of several at least as good as each."""
    x, y, methods = line
    alone = al.auto(0, None, (x, y), 300, {"five": methods["five"]}, unit=10.0)
    entry, plain = alone.entries[0], al.auto(0, None, (x, y), 300, {"five": methods["five"]}).entries[0]
    assert (entry.score, entry.second) == pytest.approx((plain.score - np.log(10.0), 10.0 * plain.second))
    whole = alone.whole
    assert (whole.score, whole.second, whole.second_stderr, whole.coverage) == pytest.approx(
        (entry.score, entry.second, entry.second_stderr, entry.coverage)
    )
    mixed = al.auto(0, None, (x, y), 300, {"three": methods["three"], "five": methods["five"]})
    assert mixed.whole.score >= max(e.score for e in mixed.entries) - 1e-9
    mixed.save(tmp_path / "stack")
    loaded = al.load(tmp_path / "stack")
    assert dataclasses.replace(loaded.whole, calibration=0.0) == dataclasses.replace(mixed.whole, calibration=0.0)  # NaN is not NaN
    assert json.loads((tmp_path / "stack" / "auto.json").read_text())["whole"]["metric"] == "RMSE"
    draws = mixed.functions(3, x, 7)
    assert draws.shape == (7, 40)
    np.testing.assert_allclose(mixed.functions(3, x, 400).mean(axis=0), mixed.predict(1, x).mean, atol=0.1)


def test_the_mixture_of_classes_as_a_whole():
    x = RNG.normal(size=(30, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    model = al.BNN(al.networks.MLP(2, (), 2), al.Categorical(2), al.Normal(1.0))
    found = al.auto(0, model, (x, y), 300, {"map": al.MAP(num_steps=30)}, progress=False)
    entry, whole = found.entries[0], found.whole
    assert (whole.score, whole.second, whole.coverage) == pytest.approx((entry.score, entry.second, entry.coverage), rel=1e-5)
    assert whole.metric == "accuracy"


def test_a_stack_saved_before_there_were_checksums_is_read(tmp_path):
    made({"a": RNG.normal(size=9), "b": RNG.normal(size=9)}, {"a": 1.0, "b": 2.0}).save(tmp_path / "now")
    document = Auto.read(tmp_path / "now")
    assert set(document) == set(Auto.KEYS)
    file = tmp_path / "now" / "auto.json"
    file.write_text(json.dumps(document))
    assert Auto.read(tmp_path / "now") == document
    assert al.load(tmp_path / "now").weights == {"a": 1.0}
    for stored in ({"sha256": "0" * 64}, {"sha255": "0" * 64}, {"sha256": None, "more": 1}):
        file.write_text(json.dumps(stored | document))
        with pytest.raises(StoreError, match="checksum"):
            Auto.read(tmp_path / "now")
