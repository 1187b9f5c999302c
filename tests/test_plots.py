"""aleator/plots.py: what is drawn is what was computed; looks are judged by eye on docs/images/demo.png."""

from statistics import NormalDist

import numpy as np
import pytest

import aleator as al
from aleator import plots
from aleator._outputs import Outputs
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
