"""Explanations against closed forms: derivatives, partial dependence, Bayes factors, contributions of units. Lecture row E4."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import explain

SIGMA = 0.5


def regression(n: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three inputs, of which the first two matter."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)) + np.array([1.0, 0.0, 0.0])
    return x, 0.8 * x[:, 0] - 0.3 * x[:, 1] + SIGMA * rng.normal(size=n)


def linear(scale: float = 1.0, **given) -> al.LinearModel:
    return al.LinearModel(al.features.Identity(), al.Gaussian(SIGMA), al.Normal(scale), **given)


def with_draws(fit: al.Fit, num_samples: int, key: int = 5) -> al.Fit:
    """The same fit, with draws of its posterior in the place of the closed form."""
    draws = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), fit.sample(key, num_samples))
    return dataclasses.replace(fit, posterior=al.posterior.Draws(draws))


def test_slopes_and_bands_of_a_linear_model() -> None:
    """Slopes are the coefficients, partial dependence a line through the means of the others: both exactly Gaussian."""
    x, y = regression()
    fit = al.fit(0, linear(), (x, y), al.Exact())
    n = 4000
    found = explain.inputs(1, fit, x, names=("a", "b", "c"), num_samples=n, num_points=5)
    mean, covariance = fit.posterior.mean[0], fit.posterior.operator.covariance()[0]
    sd = np.sqrt(np.diagonal(covariance))
    assert np.all(np.abs(found.slopes.mean(0)[:, 0] - mean[1:]) < 5 * sd[1:] / np.sqrt(n))
    np.testing.assert_allclose(found.stderr[:, 0], sd[1:] / np.sqrt(n), rtol=0.25)  # an ESS is itself an estimate
    assert np.all(np.abs(found.slopes.std(0)[:, 0] - sd[1:]) < 5 * sd[1:] / np.sqrt(2 * n))
    np.testing.assert_allclose(found.sizes, np.abs(found.slopes), rtol=1e-4)
    from scipy.stats import norm

    assert np.all(np.abs(found.positive[:, 0] - norm.cdf(mean[1:] / sd[1:])) < 5 * 0.5 / np.sqrt(n))
    grid, middle, lower, upper = found.band("b", level=0.8)
    np.testing.assert_allclose(grid, np.linspace(x[:, 1].min(), x[:, 1].max(), 5))
    for v, m, a, b in zip(grid, middle, lower, upper, strict=True):
        at = np.array([1.0, x[:, 0].mean(), v, x[:, 2].mean()])
        spread = np.sqrt(at @ covariance @ at)
        assert abs(m - at @ mean) < 5 * spread / np.sqrt(n)
        # The error of a quantile is √(q(1−q)/n)/density.
        error = spread * np.sqrt(0.09 / n) / norm.pdf(norm.ppf(0.9))
        assert abs(a - (at @ mean + norm.ppf(0.1) * spread)) < 5 * error
        assert abs(b - (at @ mean + norm.ppf(0.9) * spread)) < 5 * error
    text = found.table(0.8)
    assert "80 % interval" in text and text.splitlines()[1].startswith("a")


def test_an_effect_that_changes_sign_has_a_size_and_no_slope() -> None:
    x = np.linspace(-1, 1, 41)
    model = al.LinearModel(al.features.Polynomial(2), al.Gaussian(0.1), al.Normal(1.0))
    fit = al.fit(0, model, (x, x**2), al.Exact())
    found = explain.inputs(1, fit, x, num_samples=400)
    assert abs(found.slopes.mean()) < 0.05
    weight = fit.posterior.mean[0, 2]
    np.testing.assert_allclose(found.sizes.mean(), 2 * weight * np.sqrt(np.mean(x**2)), rtol=0.05)


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_network_slopes_are_finite_differences(kind: str) -> None:
    x, y = regression()
    x = x.astype(np.float32)
    if kind == "classes":
        y = np.digitize(y, [0.0, 1.0])
    likelihood, out = (al.Gaussian(), 1) if kind == "regression" else (al.Categorical(3), 3)
    fit = al.fit(0, al.BNN(al.networks.MLP(3, (6,), out, "tanh"), likelihood), (x, y), al.MAP(num_steps=200))
    found = explain.inputs(1, fit, x, num_samples=2, num_points=3)
    f = lambda rows: fit.predict(2, rows).mean.reshape(len(x), -1)
    h = 1e-2
    for j in range(3):
        shift = h * np.eye(3, dtype=np.float32)[j]
        difference = (f(x + shift) - f(x - shift)) / (2 * h)
        # float32 outputs of size 1 over 2h, and the h² of the centred difference.
        np.testing.assert_allclose(found.slopes[0, j], difference.mean(0), atol=2e-3)
        np.testing.assert_allclose(found.sizes[0, j], np.sqrt((difference**2).mean(0)), atol=2e-3)
        held = np.where(np.arange(3) == j, found.grids[j, 1].astype(np.float32), x)
        np.testing.assert_allclose(found.curves[0, j, 1], f(held).mean(0), atol=1e-5)
    assert found.slopes.shape == (2, 3, out) and np.all(found.stderr == 0)


def test_passes_of_a_networks_own_dropout_have_a_spread() -> None:
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 2)
    layers = [eqx.nn.Linear(3, 16, key=keys[0]), eqx.nn.Lambda(jax.nn.tanh), eqx.nn.Dropout(0.3), eqx.nn.Linear(16, 1, key=keys[1])]
    x, y = regression()
    fit = al.fit(0, al.BNN(eqx.nn.Sequential(layers)), (x, y), al.Dropout(existing=True, num_steps=50, num_evidence=0))
    found = explain.inputs(1, fit, x, num_samples=20, num_points=3)
    assert np.all(found.slopes.std(0) > 1e-3)
    with pytest.raises(al.ModelError, match="no hidden units"):
        explain.units(1, fit, x)


@pytest.mark.parametrize("index", [0, 2, [1, 3], [0, 1, 2, 3]])
def test_savage_dickey_is_the_ratio_of_evidences(index) -> None:
    x, y = regression()
    fit = al.fit(0, linear(1.5), (x, y), al.Exact())
    features = np.column_stack([np.ones(len(x)), x])
    keep = np.setdiff1d(np.arange(4), index)
    if len(keep):
        smaller = al.LinearModel(al.features.Identity(bias=False), al.Gaussian(SIGMA), al.Normal(1.5))
        without = al.fit(0, smaller, (features[:, keep], y), al.Exact()).log_evidence.value
    else:
        without = float(np.sum(-0.5 * (y / SIGMA) ** 2 - np.log(SIGMA * np.sqrt(2 * np.pi))))
    found = explain.savage_dickey(1, fit, index)
    assert found.kind == "exact" and found.stderr == 0
    np.testing.assert_allclose(found.log_value, fit.log_evidence.value - without, rtol=1e-9)
    np.testing.assert_allclose(found.probability(0.2), 1 / (1 + 4 * np.exp(-found.log_value)), rtol=1e-12)


def test_savage_dickey_from_draws() -> None:
    """Draws of a Gaussian posterior give the exact value within their error, and the error is about right over repetitions."""
    x, y = regression()
    fit = al.fit(0, linear(), (x, y), al.Exact())
    exact = explain.savage_dickey(1, fit, 2).log_value
    found = [explain.savage_dickey(1, with_draws(fit, 1000, key=key), 2) for key in range(20)]
    values, errors = np.array([f.log_value for f in found]), np.array([f.stderr for f in found])
    assert found[0].kind == "estimate" and np.all(np.abs(values - exact) < 5 * errors)
    # χ²₁₉ of 20 repetitions: within (0.46, 1.78) of its mean with probability .998, for the variance.
    assert 0.4 < values.var(ddof=1) / np.mean(errors**2) < 1.9
    far = explain.savage_dickey(1, with_draws(fit, 1000), 1)
    assert "standard deviations" in far.note


def test_savage_dickey_is_refused_where_it_is_wrong() -> None:
    x, y = regression()
    unknown = al.LinearModel(al.features.Identity(), al.Gaussian(al.InverseGamma(2.0, 1.0)), al.Normal(1.0), scaled_by_noise=True)
    with pytest.raises(al.ModelError, match="units of the noise"):
        explain.savage_dickey(1, al.fit(0, unknown, (x, y), al.Exact()), 1)
    shared = al.LinearModel(al.features.Identity(), al.Gaussian(SIGMA), al.priors.Hierarchical())
    with pytest.raises(al.ModelError, match="fixed scales"):
        explain.savage_dickey(1, al.fit(0, shared, (x, y), al.MAP(num_steps=2)), 1)
    fit = al.fit(0, linear(), (x, y), al.Exact())
    with pytest.raises(al.ModelError, match="below 4"):
        explain.savage_dickey(1, fit, 4)
    with pytest.raises(al.MethodError, match="no spread"):
        explain.savage_dickey(1, al.fit(0, linear(), (x, y), al.MAP(num_steps=2)), 1)


def test_variable_selection_over_all_subsets() -> None:
    """30 points, regressors x, cos 5x, sin 11x: inclusion probabilities and expected size known to six digits."""
    t = np.linspace(-1, 1, 30)
    x = np.column_stack([t, np.cos(5 * t), np.sin(11 * t)])
    y = t + 0.3 * np.cos(5 * t) + 0.1 * np.sin(37 * t + 1)
    model = al.LinearModel(al.features.Identity(bias=False), al.Gaussian(0.3), al.Normal(1.0))
    found = explain.relevance(0, model, (x, y), al.Exact(), names=("x", "cos 5x", "sin 11x"))
    np.testing.assert_allclose(found.probability, [1.000000, 0.988229, 0.070944], atol=6e-7)
    np.testing.assert_allclose(found.expected_size, 2.059173, atol=6e-7)
    assert found.subsets.shape == (8, 3) and abs(found.weights.sum() - 1) < 1e-12
    assert "all subsets" in str(found) and "cos 5x" in str(found)
    # A prior other than ½ moves the odds of every subset.
    rare = explain.relevance(0, model, (x, y), al.Exact(), prior=[0.5, 0.5, 0.1])
    odds = lambda p: p / (1 - p)
    assert odds(rare.probability[2]) < odds(found.probability[2]) / 8


def test_one_at_a_time_and_groups() -> None:
    x, y = regression()
    full = al.fit(0, linear(), (x, y), al.Exact()).log_evidence.value
    without = [al.fit(0, linear(), (np.delete(x, columns, axis=1), y), al.Exact()).log_evidence.value for columns in ([0], [1, 2])]
    found = explain.relevance(0, linear(), (x, y), al.Exact(), groups=[[0], [1, 2]], search="one")
    np.testing.assert_allclose(found.log_bayes_factor, full - np.array(without), rtol=1e-9)
    assert found.names == ("x0", "x1,x2") and found.subsets is None and found.kind == "exact"
    with pytest.raises(al.MethodError, match="search='all'"):
        _ = found.expected_size


def test_bounds_are_named_as_such() -> None:
    """For a network: the input that matters is found, with an error bar, and the note says what bounds are."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=60)
    model = al.BNN(al.networks.MLP(2, (6,), 1, "tanh"), al.Gaussian(0.2))
    found = explain.relevance(0, model, (x, y), al.Variational(num_steps=1500, learning_rate=0.02), num_starts=2)
    assert found.kind == "lower bound" and "gaps" in found.note and np.all(found.stderr > 0)
    assert found.log_bayes_factor[0] > 20 and found.log_bayes_factor[1] < 0 and "2 starts" in found.note
    assert "±" in str(found)


def test_bounds_of_a_full_model_that_got_stuck_are_improved(monkeypatch) -> None:
    """A full model whose first fit is worse than a smaller one begins again where that one ended."""
    x, y = regression()
    seen = []

    def pretend(key, model, data, method, init=None):
        full = np.all(data.x.any(axis=0))
        seen.append((full, init))
        value = {(True, False): -100.0, (False, False): -1e9, (False, True): -50.0, (True, True): -45.0}[(bool(full), init is not None)]
        return type("Pretended", (), {"log_evidence": al.Score(value, 0.1, "lower bound")})()

    monkeypatch.setattr(explain.needed, "fit_model", pretend)
    found = explain.relevance(0, linear(), (x, y), None, num_starts=2)
    np.testing.assert_allclose(found.log_bayes_factor, 5.0)
    assert [full for full, _ in seen] == [True, True, False, False, False, True, True, True]


def shallow(draws: int = 50) -> tuple[al.Fit, np.ndarray, dict]:
    """A shallow net whose third unit has next to no output weight, with draws around it."""
    x = np.linspace(-2, 2, 30).astype(np.float32)[:, None]
    net = al.networks.Shallow(1, 3, activation="tanh")
    model = al.BNN(net, al.Gaussian(0.5))
    fit = al.fit(0, model, (x, np.sin(x[:, 0])), al.MAP(num_steps=2))
    rng = np.random.default_rng(0)
    weights = {
        "hidden": {"weight": np.array([[1.0, -2.0, 0.5]]), "bias": np.array([0.2, 0.1, 0.0])},
        "output": {"weight": np.array([[1.0], [0.7], [1e-3]])},
    }
    moved = jax.tree.map(lambda leaf: (leaf * (1 + 0.05 * rng.normal(size=(draws, *leaf.shape)))).astype(np.float32), weights)
    return dataclasses.replace(fit, posterior=al.posterior.Draws({"network": moved, "likelihood": {}, "prior": {}})), x, moved


def test_contributions_of_units() -> None:
    fit, x, weights = shallow()
    found = explain.units(1, fit, x)
    assert found.path == "output.weight"
    h = np.tanh(x[None] * weights["hidden"]["weight"] + weights["hidden"]["bias"][:, None])  # (S, n, 3)
    parts = h * weights["output"]["weight"][:, None, :, 0]
    expected = parts.std(axis=1) / 0.5
    np.testing.assert_allclose(found.contributions, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(found.probability, [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(found.number, [0, 0, 1, 0])
    assert "needed: 2.00 of 3" in str(found)
    # Labels exchanged at random: by label nothing is certain, by rank everything is as before.
    order = np.array([np.random.default_rng(s).permutation(3) for s in range(50)])
    mixed = {
        "hidden": {
            "weight": np.take_along_axis(weights["hidden"]["weight"], order[:, None], 2),
            "bias": np.take_along_axis(weights["hidden"]["bias"], order, 1),
        },
        "output": {"weight": np.take_along_axis(weights["output"]["weight"], order[..., None], 1)},
    }
    again = explain.units(1, dataclasses.replace(fit, posterior=al.posterior.Draws({"network": mixed, "likelihood": {}, "prior": {}})), x)
    np.testing.assert_allclose(again.ranked, found.ranked, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(again.number, found.number)
    assert np.all((again.probability > 0.4) & (again.probability < 0.95)) and np.all(again.stderr > 0)


def test_units_of_an_equinox_network_and_inner_layers() -> None:
    """The input axis of (out, in) weights is found: the same net in both frameworks, layer by layer."""
    import equinox as eqx

    x, y = regression()
    x = x.astype(np.float32)
    module = eqx.nn.MLP(3, 1, 4, 2, activation=jnp.tanh, key=jax.random.key(0))
    theirs = al.fit(0, al.BNN(module, al.Gaussian(0.3)), (x, y), al.MAP(num_steps=20))
    ours = al.fit(0, al.BNN(al.networks.MLP(3, (4, 4), 1, "tanh"), al.Gaussian(0.3)), (x, y), al.MAP(num_steps=20))
    layers = theirs.posterior.params["network"].layers
    copied = {f"layer{i}": {"weight": layer.weight.T, "bias": layer.bias} for i, layer in enumerate(layers)}
    ours = dataclasses.replace(ours, posterior=al.posterior.Point({**ours.posterior.params, "network": copied}))
    for mine, other in (("layer2.weight", "layers.2.weight"), ("layer1.weight", "layers.1.weight")):
        a, b = explain.units(1, ours, x, mine, num_samples=1), explain.units(1, theirs, x, other, num_samples=1)
        np.testing.assert_allclose(a.contributions, b.contributions, rtol=1e-4)
        assert a.contributions.shape == (1, 4)
    # Unit 2 of the first layer taken out by hand: its row of the weight it feeds.
    cut = {**copied, "layer1": {**copied["layer1"], "weight": copied["layer1"]["weight"].at[2].set(0.0)}}
    change = (ours.model.apply(copied, x) - ours.model.apply(cut, x))[:, 0]
    np.testing.assert_allclose(a.contributions[0, 2], np.std(change) / 0.3, rtol=1e-4)
    assert explain.units(1, theirs, x, num_samples=1).path == "layers.2.weight"
    with pytest.raises(al.ModelError, match=r"layer1\.weight"):
        explain.units(1, ours, x, "layer0.weight")


def test_what_cannot_be_explained() -> None:
    x, y = regression()
    fit = al.fit(0, linear(), (x, y), al.Exact())
    with pytest.raises(al.DataError, match="names"):
        explain.inputs(1, fit, x, names=("a",))
    with pytest.raises(al.DataError, match="level"):
        explain.inputs(1, fit, x, num_samples=10, num_points=2).interval(1.5)
    with pytest.raises(al.MethodError, match="no evidence"):
        explain.relevance(0, linear(), (x, y), al.MAP(num_steps=2))
    for groups in ([[0, 0]], [[3]], [[]], [[0], [0, 1]]):
        with pytest.raises(al.DataError, match="groups"):
            explain.relevance(0, linear(), (x, y), al.Exact(), groups=groups)
    with pytest.raises(al.DataError, match="between 0 and 1"):
        explain.relevance(0, linear(), (x, y), al.Exact(), prior=1.0)
    with pytest.raises(al.MethodError, match="num_starts"):
        explain.relevance(0, linear(), (x, y), al.Exact(), num_starts=0)
    with pytest.raises(al.MethodError, match="search"):
        explain.relevance(0, linear(), (x, y), al.Exact(), search="some")
    with pytest.raises(al.MethodError, match="too many"):
        explain.relevance(0, linear(), (np.zeros((5, 11)), np.zeros(5)), al.Exact(), search="all")
    with pytest.raises(al.ModelError, match="no hidden units"):
        explain.units(1, fit, x)
