"""aleator/plots: what is drawn is what was computed; looks are judged by eye on docs/images/demo.png."""

import types
from statistics import NormalDist

import jax
import numpy as np
import pytest
from matplotlib.colors import to_rgb

import aleator as al
from aleator import plots
from aleator._errors import DataError
from aleator._outputs import Outputs
from aleator.decide import active, calibration, utility
from aleator.predictive import Predictive

X = np.array([2.0, 0.0, 1.0])  # out of order on purpose


@pytest.fixture
def predictive():
    """Two functions at three places: mean, aleatoric and epistemic variance are (0, 2, 4), 1 and 4."""
    means = np.array([[2.0, 0.0, 1.0], [6.0, 4.0, 5.0]])[:, :, None] - 2.0
    return Predictive(Outputs(draws=means, extra={"scale": np.ones(2)}), al.Gaussian(1.0), squeeze=True)


@pytest.fixture(scope="module")
def linear_fit():
    x = np.linspace(-1.0, 1.0, 30)[:, None]
    model = al.LinearModel(al.features.Polynomial(1), al.Gaussian(al.InverseGamma(2.0, 0.1)), al.Normal(3.0), scaled_by_noise=True)
    return al.fit(0, model, (x, 1.0 + 2.0 * x[:, 0]), al.Exact())


def band(collection):
    """(lower, upper) at 0, 1, 2 of a filled band."""
    points = collection.get_paths()[0].vertices
    return np.array([[points[points[:, 0] == at, 1].min(), points[points[:, 0] == at, 1].max()] for at in (0.0, 1.0, 2.0)]).T


def test_regression_draws_nested_bands_of_the_right_width(predictive):
    ax = plots.regression(None, X[:, None], predictive, data=(X, [1.0, 2.0, 3.0]), draws=predictive.draws, level=0.8)
    total, epistemic = ax.collections[0], ax.collections[1]
    z = NormalDist().inv_cdf(0.9)
    mean = np.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(band(total), [mean - z * np.sqrt(5.0), mean + z * np.sqrt(5.0)])
    np.testing.assert_allclose(band(epistemic), [mean - z * 2.0, mean + z * 2.0])
    assert epistemic.get_zorder() > total.get_zorder()
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_allclose(lines["mean"].get_xydata(), np.column_stack([mean, mean]))
    np.testing.assert_allclose(lines["functions drawn"].get_ydata(), [-2.0, -1.0, 0.0])
    np.testing.assert_allclose(ax.collections[2].get_offsets(), np.column_stack([X, [1.0, 2.0, 3.0]]))
    labels = ax.get_legend_handles_labels()[1]
    assert [label for label in labels if "80 %" in label] == labels[:2]
    assert "aleatoric" in labels[0]
    assert "epistemic" in labels[1]


def test_uncertainty_draws_both_parts_in_their_colours(predictive):
    ax = plots.uncertainty(None, X, predictive)
    epistemic, aleatoric = ax.lines
    np.testing.assert_allclose(epistemic.get_ydata(), 2.0)
    np.testing.assert_allclose(aleatoric.get_ydata(), 1.0)
    assert (epistemic.get_color(), aleatoric.get_color()) == (plots.EPISTEMIC, plots.ALEATORIC)
    assert ax.get_ylim()[0] == 0.0


def test_functions_are_joint_over_rows_and_follow_the_posterior(linear_fit):
    grid = np.linspace(-1.0, 1.0, 5)[:, None]
    curves = linear_fit.functions(0, grid, 4000)
    assert curves.shape == (4000, 5)
    np.testing.assert_allclose(np.diff(curves, n=2, axis=1), 0.0, atol=1e-9)  # every draw is a straight line
    predicted = linear_fit.predict(1, grid)
    np.testing.assert_allclose(curves.mean(axis=0), predicted.mean, atol=5 * np.sqrt(predicted.epistemic.max() / 4000))
    np.testing.assert_allclose(curves.var(axis=0), predicted.epistemic, rtol=0.15)
    ax = plots.function_draws(None, 0, linear_fit, grid, 3)
    assert len(ax.lines) == 3


def test_functions_are_in_the_units_of_the_table(linear_fit):
    import dataclasses
    import types

    scaled = dataclasses.replace(linear_fit, preprocessor=types.SimpleNamespace(task="regression", y_loc=10.0, y_scale=2.0))
    grid = np.linspace(-1.0, 1.0, 5)[:, None]
    np.testing.assert_allclose(scaled.functions(0, grid, 3), 10.0 + 2.0 * linear_fit.functions(0, grid, 3))


def test_functions_of_an_ensemble_are_its_members():
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    model = al.BNN(al.networks.MLP(1, (3,), 2), al.HeteroscedasticGaussian(), al.Normal(1.0))
    fit = al.fit(0, model, (x, x[:, 0]), al.Ensemble(al.MAP(num_steps=5), 2))
    members = fit.predict(1, x).draws
    for curve in fit.functions(2, x, 6):
        assert min(np.abs(curve - member).max() for member in members) < 1e-4


def test_evidence_draws_gaps_and_marks_the_best(tmp_path):
    x = np.linspace(-1.0, 1.0, 30)
    fits = {
        f"order {order}": al.fit(0, al.LinearModel(al.features.Polynomial(order), al.Gaussian(0.1), al.Normal(1.0)), (x, x), al.Exact())
        for order in (0, 1, 2)
    }
    comparison = al.compare(fits)
    ax = plots.evidence(comparison)
    bars = ax.containers[0].patches
    np.testing.assert_allclose([bar.get_width() for bar in bars], comparison.log_evidence - comparison.log_evidence.max())
    (mark,) = ax.lines
    assert (mark.get_xdata()[0], list(fits)[int(mark.get_ydata()[0])]) == (0.0, comparison.best)
    assert [text.get_color() == plots.HIGHLIGHT for text in ax.texts] == [name == comparison.best for name in fits]
    assert "p < 0.001" in ax.texts[0].get_text()
    assert ax.get_xscale() == "symlog"  # order 0 is hundreds of nats away
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"{name} (exact)" for name in fits]
    path = plots.save(ax, tmp_path / "new" / "evidence.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plots.save(ax, tmp_path / "evidence.svg").stat().st_size > 0


def test_a_picture_is_the_same_bytes_every_time(predictive, tmp_path):
    first, second = (plots.save(plots.regression(None, X, predictive), tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second


def test_what_cannot_be_drawn_is_refused(predictive, linear_fit):
    import dataclasses

    with pytest.raises(al.DataError, match="A curve needs one input"):
        plots.regression(None, np.zeros((3, 2)), predictive)
    with pytest.raises(al.DataError, match="level=90"):
        plots.regression(None, X, predictive, level=90)
    wide = Predictive(Outputs(draws=np.zeros((2, 3, 2)), extra={"scale": np.ones((2, 2))}), al.Gaussian(1.0))
    with pytest.raises(al.DataError, match="A band needs one target"):
        plots.regression(None, X, wide)
    with pytest.raises(al.MethodError, match="bare log density"):
        dataclasses.replace(linear_fit, model=None).functions(0, X[:, None])


@pytest.fixture(scope="module")
def variational_fit():
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    model = al.BNN(al.networks.MLP(1, (3,), 1, "tanh"), al.Gaussian(0.2), al.Normal(1.0))
    return al.fit(0, model, (x, x[:, 0]), al.Variational(num_steps=40, num_evidence=4))


def test_functions_draws_bands_and_curves_of_a_fit(variational_fit):
    grid = np.linspace(-1.0, 1.0, 7)[:, None]
    ax = plots.functions(0, variational_fit, grid, data=(X, X), num_draws=5)
    assert len(ax.lines) == 5 + 1
    key_bands, key_curves = jax.random.split(jax.random.key(0), 2)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), variational_fit.functions(key_curves, grid, 5)[1])
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), variational_fit.predict(key_bands, grid).mean)


def test_elbo_draws_the_parts_without_the_sums_of_the_evidence(variational_fit):
    ax = plots.elbo(variational_fit)
    data, minus_kl, bound = ax.lines
    assert len(data.get_xdata()) == 40 < len(variational_fit.info["kl"])
    np.testing.assert_array_equal(data.get_xdata(), np.arange(40))
    np.testing.assert_allclose(data.get_ydata(), variational_fit.info["log_likelihood"][:40])
    np.testing.assert_allclose(minus_kl.get_ydata(), -variational_fit.info["kl"][:40])
    total = np.asarray(variational_fit.info["log_likelihood"] - variational_fit.info["kl"], float)
    np.testing.assert_allclose(bound.get_ydata()[30], np.median(total[29:31]))  # 40/20 = 2 points


def test_weights_draws_a_density_per_weight(variational_fit):
    path = "network.layer0.weight"
    ax = plots.weights(3, variational_fit, [(path, (0, 2)), ("network.layer1.bias", (0,))], num_samples=500)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer0.weight[0, 2]", "layer1.bias[0]"]
    values = np.asarray(variational_fit.sample(3, 500)["network"]["layer0"]["weight"][:, 0, 2], float)
    line, dot = ax.lines[:2]
    np.testing.assert_allclose(line.get_xdata(), values.mean() + np.array([-2.0, 2.0]) * values.std())
    np.testing.assert_allclose(dot.get_xdata(), values.mean())
    assert len(ax.patches) == 2
    assert len(plots.weights(3, variational_fit, num_samples=50).patches) == 6  # of ten: 3 + 3 + 3 + 1
    with pytest.raises(al.DataError, match=r"no such parameter.*layer9"):
        plots.weights(3, variational_fit, [("network.layer9.weight", (0,))], num_samples=2)


def noisy(shape, log_alpha):
    import types

    params = {"network": {"map": {"bias": np.zeros(shape[-1]), "weight": np.ones(shape)}}}
    return types.SimpleNamespace(posterior=al.posterior.GaussianDropout(params, (log_alpha,), (False, True)))


def test_alphas_of_a_dense_map_lie_across_and_are_broadcast():
    log_alpha = np.arange(3.0)[:, None] * 4.0  # one per input: 0, 4, 8
    ax = plots.alphas(noisy((3, 2), log_alpha), "map.weight", threshold=5.0)
    image = ax.images[0]
    np.testing.assert_array_equal(image.get_array(), [[0.0, 4.0, 8.0]] * 2)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("input unit", "output unit")
    assert image.get_clim() == (plots.LOW_ALPHA, 5.0)
    assert "33.3 %" in ax.get_title(loc="left")
    assert len(plots.alphas(noisy((3, 2), log_alpha), "network.map.weight").images) == 1
    with pytest.raises(al.DataError, match="no such site"):
        plots.alphas(noisy((3, 2), log_alpha), "map.bias")


def test_alphas_of_kernels_are_tiles():
    kernels = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    image = np.asarray(plots.alphas(noisy(kernels.shape, kernels), "map.weight").images[0].get_array().filled(np.nan))
    assert image.shape == (4 * 3 - 1, 5 * 4 - 1)
    np.testing.assert_array_equal(image[3:5, 8:11], kernels[:, :, 1, 2])
    assert np.isnan(image[2]).all()
    first = kernels[:, :, :1]  # one input channel: five kernels in a square of two by three
    image = np.asarray(plots.alphas(noisy(first.shape, first), "map.weight").images[0].get_array().filled(np.nan))
    assert image.shape == (3 * 3 - 1, 2 * 4 - 1)
    np.testing.assert_array_equal(image[3:5, 4:7], first[:, :, 0, 3])


def test_gradient_variance_draws_bars_with_ratios():
    ax = plots.gradient_variance({"weight": {"means": 8.0, "scales": 1.0}, "local": {"means": 2.0, "scales": 3.0}})
    widths = [patch.get_x() + patch.get_width() for patch in ax.patches]
    np.testing.assert_allclose(widths, [8.0, 2.0, 1.0, 3.0])
    assert [text.get_text() for text in ax.texts] == ["8", "2   ÷ 4", "1", "3   × 3"]
    assert ax.get_xscale() == "log"
    assert ax.get_legend_handles_labels()[1] == ["means", "scales"]
    for wrong in ({}, {"exact": 0.0}, {"a": {"means": 1.0}, "b": {"scales": 1.0}}):
        with pytest.raises(al.DataError, match="cannot be drawn"):
            plots.gradient_variance(wrong)


def test_pictures_of_fits_without_their_subject_are_refused(linear_fit):
    with pytest.raises(al.DataError, match="no bound to draw"):
        plots.elbo(linear_fit)
    with pytest.raises(al.DataError, match="has no α"):
        plots.alphas(linear_fit, "weight")


# ---- calibration, strange rows, labels, decisions -------------------------------------------------------------------------------------


def test_reliability_and_pit_show_the_band_of_chance():
    curve = calibration.Reliability(*np.array([[0.2, 0.7], [0.3, 0.6], [10, 20], [0.0, 0.5], [0.4, 0.9]]), level=0.95)
    ax = plots.reliability(curve)
    assert ax.get_legend_handles_labels()[1] == ["calibrated", "95 % of calibrated predictions", "observed"]
    np.testing.assert_allclose(ax.collections[-1].get_offsets(), [[0.2, 0.3], [0.7, 0.6]])
    ax = plots.pit(np.random.default_rng(0).random((200, 1)), num_bins=10)
    assert sum(patch.get_height() for patch in ax.patches[1:]) == 200


def test_risk_coverage_ends_at_the_mean_loss():
    losses = np.random.default_rng(0).random(100)
    ax = plots.risk_coverage(losses, {"oracle": losses, "nothing": np.zeros(100)})
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert lines["oracle"][-1] == pytest.approx(losses.mean())
    assert np.all(np.diff(lines["oracle"]) >= 0)
    np.testing.assert_allclose(lines["nothing"], losses.mean())


def test_strangeness_and_roc_state_the_area():
    inside, outside = np.arange(50.0), np.arange(50.0) + 25
    assert "AUROC 0.8" in plots.strangeness(inside, outside, threshold=40.0).get_title()
    ax = plots.roc(inside, {"others": outside, "same": inside})
    caught = ax.lines[0].get_ydata()
    assert caught[0] == 0
    assert caught[-1] == 1
    assert "same, AUROC 0.500" in ax.lines[1].get_label()


def test_learning_curves_fields_and_decisions():
    runs = [
        active.History(
            np.arange(4), np.zeros(4), tuple(active.Round(n, {"accuracy": (a, 0.1, True)}, 0.0) for n, a in enumerate(values)), None, ""
        )
        for values in ((0.5, 0.9), (0.7, 0.9))
    ]
    ax = plots.learning_curves({"bald": runs, "random": runs[0]}, "accuracy")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.6, 0.9])
    with pytest.raises(DataError, match="no curves"):
        plots.learning_curves({}, "accuracy")
    ax = plots.field(np.arange(3), np.arange(2), np.arange(6), data=(np.zeros((2, 2)), [0, 1]))
    assert len(ax.collections) == 3  # the field, two classes
    decision = utility.Decision(["a", "defer"] * 3, np.array([0, -1] * 3), np.zeros(6), np.zeros((1, 6)), ("a",))
    assert [text.get_text() for text in plots.decisions(np.arange(3), np.arange(2), decision).get_legend().get_texts()] == ["a", "defer"]


def _line(rows=40):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 1))
    y = 2 * x[:, 0] + 0.5 * generator.normal(size=rows)
    return x, y, al.fit(0, al.LinearModel(al.features.Identity(), al.Gaussian(0.5), al.Normal(1.0)), (x, y), al.Exact())


def test_truth_tells_rows_inside_their_interval_from_those_outside():
    x, y, fit = _line()
    pred = fit.predict(1, x)
    ax = plots.truth(pred, y, level=0.5)
    lower, upper = pred.interval(0.5)
    inside = (lower <= y) & (y <= upper)
    drawn = {line.get_label(): line.get_xdata() for line in ax.lines}
    assert sorted(drawn["truth inside"]) == pytest.approx(sorted(y[inside]))
    assert sorted(drawn["truth outside"]) == pytest.approx(sorted(y[~inside]))
    assert len(plots.truth(pred, y, level=0.999, max_rows=7).lines[1].get_xdata()) == 7
    with pytest.raises(al.DataError, match="one target"):
        plots.truth(pred, np.stack([y, y], 1))


def test_truth_of_classes_counts_them():
    probs = np.eye(3)[[0, 0, 1, 2]] * 0.9 + 0.1 / 3
    made = types.SimpleNamespace(support="label", probs=probs, labels=("a", "b", "$c$"), encode=lambda y: np.array([0, 1, 1, 2]))
    ax = plots.truth(made, ["a", "b", "b", "$c$"])
    assert [text.get_text() for text in ax.texts] == ["1", "1", "1", "1"]
    alphas = ax.collections[0].get_facecolor()[:, 3].reshape(3, 3)
    assert alphas == pytest.approx(0.04 + 0.96 * np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b", r"\$c\$"]


def test_split_stacks_both_parts_over_sorted_rows():
    x, _, fit = _line()
    pred = fit.predict(1, np.concatenate([x, [[30.0]]]))
    low, high = plots.split(pred, num_bins=100).patches
    assert low.get_data().values == pytest.approx(np.full(41, 0.25))
    total = np.sort(pred.variance)
    assert high.get_data().values == pytest.approx(total)
    assert (low.get_facecolor()[:3], high.get_facecolor()[:3]) == tuple(map(to_rgb, (plots.ALEATORIC, plots.EPISTEMIC)))


def test_relevance_and_effects_draw_their_rows_and_bands():
    ax = plots.relevance([("a", 2.0, 0.1), ("b" * 30, 1.0, 0.2), ("c", 0.1, 0.1)], most=2)
    assert [bar.get_width() for bar in ax.patches] == [2.0, 1.0]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b" * 17 + "…"]
    band = ax.collections[0].get_segments()
    assert [[point[0] for point in line] for line in band] == [pytest.approx([1.8, 2.2]), pytest.approx([0.6, 1.4])]
    ax = plots.effects([("a", 1.0, 0.5, 1.5, 1.0)])
    assert ax.collections[0].get_segments()[0][:, 0].tolist() == [0.5, 1.5]
    for draw in (plots.relevance, plots.effects):
        with pytest.raises(al.DataError, match="nothing to draw"):
            draw([])


def test_traces_leave_out_what_follows_the_search():
    info = {"log_likelihood": np.concatenate([np.linspace(-5, -1, 20), [0.0, 99.0]]), "flat": np.zeros(22)}
    fit = types.SimpleNamespace(info=info, method=al.MAP(num_steps=20), manifest={"steps": 22})
    (line,) = plots.traces(fit).lines
    assert line.get_xdata().tolist() == list(range(20))
    assert line.get_ydata()[-1] == -1.0
    chains = types.SimpleNamespace(
        info={"log_density": np.random.default_rng(0).normal(size=(2, 50))}, method=al.NUTS(), manifest={"steps": 50}
    )
    assert [line.get_label() for line in plots.traces(chains).lines] == ["1 of 2", "2 of 2"]
    with pytest.raises(al.DataError, match="no such trace"):
        plots.traces(fit, "speed")


def test_curves_take_the_input_as_a_row_or_a_column():
    _, _, fit = _line()
    grid = np.linspace(-1, 1, 5)
    flat, column = (plots.functions(1, fit, x).lines[-1].get_ydata() for x in (grid, grid[:, None]))
    assert flat.tolist() == column.tolist()
