"""A11: prior predictive simulation, functional prior matching, width scaling and sensitivity, each against a closed form."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _tree, elicit, plots
from aleator.elicit import matching
from aleator.elicit._dials import dials, log_density
from aleator.hyperpriors import Gamma

FREQUENCIES = np.array([0.5, 1.0, 1.5])


def waves(x):
    """cos ωx, sin ωx: with weights N(0, s²) a stationary Gaussian process, k(r) = s² Σ cos ωr."""
    phase = jnp.reshape(x, (-1, 1)) * jnp.asarray(FREQUENCIES, x.dtype)
    return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=1)


def within(value, truth, stderr):
    np.testing.assert_array_less(np.abs(np.asarray(value) - truth), 5 * np.asarray(stderr))


# ---------------------------------------------------------------------------------------------------------- simulation


def test_prior_draws_have_the_size_and_wiggliness_of_their_process() -> None:
    """Rice: √(mean ω²)/π crossings a unit length; E|f′| = s√(2 Σω²/π); y ~ N(0, 3s² + σ²)."""
    s, noise, length, number = 0.8, 0.5, 6.0, 4000
    x = np.linspace(0, length, 241)
    drawn = elicit.simulate(0, al.LinearModel(waves, al.Gaussian(noise), al.Normal(s)), x, number, bounds=(-2.0, 2.0))
    summary = drawn.summary()
    crossings, slope = summary["crossings of 0"], summary["mean |slope|"]
    within(crossings.mean, length * np.sqrt(np.mean(FREQUENCIES**2)) / np.pi, crossings.stderr)
    within(slope.mean, s * np.sqrt(2 * np.sum(FREQUENCIES**2) / np.pi), slope.stderr)
    outside = summary["y outside the bounds"]
    tail = 2 * (1 - _phi(2.0 / np.sqrt(3 * s**2 + noise**2)))
    within(outside.mean, tail, outside.stderr)
    variance = np.var(drawn.functions, axis=0)
    within(variance, 3 * s**2, np.sqrt(2 / number) * 3 * s**2)
    assert np.all(drawn.ranges >= 0) and drawn.summary()["functions that leave the bounds"].mean > tail
    assert "y per x" in str(drawn) and "bounds -2 … 2" in str(drawn)
    order = np.random.default_rng(0).permutation(len(x))
    shuffled = dataclasses.replace(drawn, x=x[order], functions=drawn.functions[:, order])
    np.testing.assert_allclose(shuffled.slopes, drawn.slopes)


def test_programs_and_classes_have_prior_draws() -> None:
    import numpyro
    import numpyro.distributions as dist

    def line(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)

    x = np.linspace(-1, 1, 5)
    drawn = elicit.simulate(0, al.from_numpyro(line), x, 500)
    within(drawn.functions[:, -1].var(), 4.0, 4.0 * np.sqrt(2 / 500))
    assert drawn.y.shape == (500, 5)
    classes = al.BNN(al.networks.MLP(1, (4,), 3), al.Categorical(3), al.Normal(3.0))
    labels = elicit.simulate(1, classes, x[:, None], 50, bounds=(0.05, 0.95))
    assert labels.functions.shape == (50, 5, 3) and labels.y.shape == (50, 5) and labels.level == 0.5
    np.testing.assert_allclose(labels.functions.sum(-1), 1.0, rtol=1e-5)
    assert "y outside" not in str(labels)


@pytest.mark.parametrize("width", [8, 128])
def test_width_scaled_priors_keep_the_size_of_functions(width: int) -> None:
    """Relu, s/√fan-in: Var f = s²(v/2 + 1), v = s²(‖x‖²/3 + 1), at every width."""
    s, x, number = 1.2, np.array([[1.0, -2.0, 0.5], [0.0, 0.3, 2.0]], np.float32), 6000
    net = al.BNN(al.networks.MLP(3, (width,), 1, "relu"), al.Gaussian(0.1), al.Normal(s, scaling="fan_in"))
    squares = elicit.simulate(2, net, x, number).functions ** 2
    truth = s**2 * (0.5 * s**2 * (np.sum(x**2, axis=1) / 3 + 1) + 1)
    within(squares.mean(0), truth, squares.std(0) / np.sqrt(number))


# ------------------------------------------------------------------------------------------------------------ distances


def test_mmd_is_that_of_two_gaussians() -> None:
    """For N(0, A), N(0, B) and width h: |I + 2A/h²|^−½ + |I + 2B/h²|^−½ − 2|I + (A + B)/h²|^−½."""
    rng = np.random.default_rng(0)
    root_a, root_b = rng.normal(size=(2, 4, 4))
    widths = np.array([1.0, 9.0])
    det = lambda m: np.mean([np.linalg.det(np.eye(4) + m / h) ** -0.5 for h in widths])
    a, b = root_a @ root_a.T, root_b @ root_b.T
    truth = det(2 * a) + det(2 * b) - 2 * det(a + b)
    draws = rng.normal(size=(2, 200, 60, 4))
    each = np.asarray(
        jax.vmap(lambda u, v: matching.mmd(u, v, jnp.asarray(widths)))(jnp.asarray(draws[0] @ root_a.T), jnp.asarray(draws[1] @ root_b.T))
    )
    within(each.mean(), truth, each.std() / np.sqrt(len(each)))


def test_sliced_distance_is_that_of_two_scales() -> None:
    """N(0, c²A) against N(0, A): (c − 1)² tr(A)/d, times the mean square of expected normal order statistics of half a sample."""
    rng = np.random.default_rng(1)
    half, c, d = 40, 1.5, 3
    root = rng.normal(size=(d, d))
    directions = rng.normal(size=(500, d))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    spread = np.mean(np.sum((directions @ root) ** 2, axis=1))
    statistics = np.sort(rng.normal(size=(40_000, half)), axis=1).mean(axis=0)
    truth = (c - 1) ** 2 * spread * np.mean(statistics**2)
    draws = rng.normal(size=(2, 400, 2 * half, d)) @ root.T
    each = np.asarray(
        jax.vmap(lambda u, v: matching.sliced(u, v, jnp.asarray(directions)))(jnp.asarray(c * draws[0]), jnp.asarray(draws[1]))
    )
    within(each.mean(), truth, each.std() / np.sqrt(len(each)))


@pytest.mark.parametrize("kind", ["wasserstein", "mmd"])
def test_a_known_scale_is_recovered(kind: str) -> None:
    """The features' own process with scale 1.7 is the target; four runs from 0.3 scatter around it, and fresh draws agree with it."""
    x, model = np.linspace(-3, 3, 15), al.LinearModel(waves, al.Gaussian(0.1), al.Normal(0.3))
    kernel = lambda a, b: 1.7**2 * waves(a) @ waves(b).T
    runs = [elicit.match(seed, model, kernel, x, kind, num_steps=250, batch_size=128, num_samples=2000) for seed in range(4)]
    scales = np.array([run.scales_after[0] for run in runs])
    error = scales.std(ddof=1) / 2
    within(scales.mean(), 1.7, error)
    assert error < 0.03
    for run, scale in zip(runs, scales, strict=True):
        assert run.model.prior.scale == (("weight", pytest.approx(scale)),)
        assert run.significance > 5
        within(run.after.value, 0.0, run.after.stderr)
        assert run.trace.shape == (250,) and run.path.shape == (250, 1)
    if kind == "mmd":
        same = elicit.distance(7, dataclasses.replace(model, prior=al.Normal(1.7)), kernel, x, kind, num_samples=2000)
        within(same.value, 0.0, same.stderr)


def test_a_network_comes_closer_to_a_process_and_the_new_prior_says_so() -> None:
    """The held-out distance falls by many errors, and the model returned has the distance that was reported."""
    x = np.linspace(-2, 2, 9)[:, None]
    prior = al.priors.Hierarchical(al.LogNormal(1.0, 1.0), scaling="fan_in")
    net = al.BNN(al.networks.MLP(1, (16,), 1, "tanh"), al.Gaussian(0.1), prior)
    target = elicit.matern(1.5, 2.0, 2.5)
    found = elicit.match(0, net, target, x, num_steps=200, batch_size=128, num_samples=4000)
    assert found.significance > 5 and found.after.value < 0.7 * found.before.value
    again = elicit.distance(1, found.model, target, x, num_samples=4000)
    within(again.value, found.after.value, np.hypot(again.stderr, found.after.stderr))
    assert found.names == ("scale.loc", "scale.scale") and all(name in str(found) for name in found.names)
    assert found.model.prior.scale == al.LogNormal(*found.scales_after)


PRIORS = {
    "normal": al.Normal({"layer0": 0.7, "*": 2.0}, scaling="fan_in"),
    "shifted": al.priors.Laplace(0.5, loc=1.0),
    "mixture": al.priors.ScaleMixture(1.0, 0.1, 0.5),
    "lognormal": al.priors.Hierarchical(al.LogNormal(0.2, 0.8), "leaf"),
    "halfnormal": al.priors.Hierarchical(al.HalfNormal(2.0), "unit", centred=True),
    "gamma": al.priors.Hierarchical(Gamma(2.0, 3.0), "global"),
    "horseshoe": al.priors.Horseshoe(al.HalfCauchy(0.3), slab=2.0),
    "slab": al.priors.Horseshoe(al.HalfNormal(0.3), slab=al.InverseGamma(2.0, 8.0)),
}


@pytest.fixture(scope="module")
def shapes():
    net = al.networks.MLP(2, (3,), 1)
    template = jax.eval_shape(net.init, jax.random.key(0))
    return template, al.BNN(net).fan_in(template)


@pytest.mark.parametrize("name", list(PRIORS))
def test_turned_dials_draw_from_the_prior_they_rebuild(name: str, shapes) -> None:
    """The same weights from the same key, by the path that gradients take and by the new prior's own sampler; and every dial does something."""
    template, fans = shapes
    turned = dials(PRIORS[name], template, fans, "layer" if name == "normal" else "given")
    values = np.linspace(0.6, -0.4, len(turned.names)) if len(turned.names) > 1 else np.array([0.5])
    new = turned.rebuild(values)
    raw, hyper = new.sample(jax.random.key(1), template, fans)
    expected = new.weights(raw, hyper, fans)
    flat = lambda v: _tree.flat(turned.weights(v, jax.random.key(1)))
    np.testing.assert_allclose(flat(jnp.asarray(values, jnp.float32)), _tree.flat(expected), rtol=2e-5)
    for direction in np.eye(len(values), dtype=np.float32):
        slope = jax.jvp(flat, (jnp.asarray(values, jnp.float32),), (jnp.asarray(direction),))[1]
        assert np.all(np.isfinite(slope)) and np.any(slope != 0)
    assert len(turned.read(values)) == len(turned.names) and np.all(turned.read(values) != turned.read(0 * values))


@pytest.mark.parametrize("name", list(PRIORS))
def test_the_density_under_a_factor_is_that_of_the_scaled_prior(name: str, shapes) -> None:
    template, fans = shapes
    prior, rng = PRIORS[name], np.random.default_rng(0)
    with jax.enable_x64(True):
        random = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape))
        raw = jax.tree.map(random, template)
        hyper = jax.tree.map(random, prior.init(template, fans))
        got, plain = (log_density(prior, raw, hyper, fans, log_factor) for log_factor in (np.log(1.7), 0.0))
        np.testing.assert_allclose(got, elicit.scaled(prior, 1.7).log_prob(raw, hyper, fans), rtol=1e-12)
        np.testing.assert_allclose(plain, prior.log_prob(raw, hyper, fans), rtol=1e-12)
        assert abs(got - plain) > 1e-3


# ---------------------------------------------------------------------------------------------------------- sensitivity


@pytest.fixture(scope="module")
def line():
    """Features, targets, places to predict, and the exact fit; with the closed forms as functions of log c."""
    rng = np.random.default_rng(0)
    x, places, noise = np.linspace(-1, 1, 20), np.array([0.0, 1.0, 1.6]), 0.4
    y = np.sin(3 * x) + noise * rng.normal(size=20)
    power = lambda t: t[:, None] ** np.arange(4)

    def closed(log_factor):
        prior = np.exp(2 * log_factor)
        k = prior * power(x) @ power(x).T + noise**2 * np.eye(20)
        cross = prior * power(places) @ power(x).T
        variance = prior * np.sum(power(places) ** 2, axis=1) + noise**2 - np.sum(cross * np.linalg.solve(k, cross.T).T, axis=1)
        logdet = np.linalg.slogdet(2 * np.pi * k)[1]
        return cross @ np.linalg.solve(k, y), np.sqrt(variance), -0.5 * y @ np.linalg.solve(k, y) - 0.5 * logdet

    model = al.LinearModel(al.features.Polynomial(3), al.Gaussian(noise), al.Normal(1.0))
    return al.fit(0, model, (x, y), al.Exact()), (x, y), places, closed


def test_refitting_gives_the_closed_form_under_each_prior(line) -> None:
    fit, data, places, closed = line
    found = elicit.sensitivity(0, fit, places, data, factors=(2.0, 0.5))
    np.testing.assert_array_equal(found.factors, [0.5, 1.0, 2.0])
    for i, factor in enumerate(found.factors):
        mean, std, evidence = closed(np.log(factor))
        np.testing.assert_allclose(found.mean[i], mean, rtol=1e-8)
        np.testing.assert_allclose(found.std[i], std, rtol=1e-8)
        np.testing.assert_allclose(found.log_evidence[i], evidence - closed(0.0)[2], atol=1e-8)
    assert found.kind == "exact, fitted again" and not np.any(found.shift_stderr) and "±" not in str(found)


def test_reweighting_and_slopes_agree_with_the_closed_form(line) -> None:
    fit, _, places, closed = line
    found = elicit.sensitivity(0, fit, places, factors=(0.7, 1.4), num_samples=40_000)
    base = closed(0.0)
    for i, factor in enumerate(found.factors):
        mean, std, evidence = closed(np.log(factor))
        within(found.mean[i], mean, found.mean_stderr[i])
        within(found.std[i], std, found.std_stderr[i])
        if factor != 1.0:
            within(found.log_evidence[i], evidence - base[2], found.log_evidence_stderr[i])
            within(found.shift[i], mean - base[0], found.shift_stderr[i])
            # Draws shared by both priors: the shift is known better than either mean.
            assert np.all(found.shift_stderr[i] < np.hypot(found.mean_stderr[i], found.mean_stderr[1]))
            assert found.pareto_k[i] < 0.7
    high, low = closed(1e-5), closed(-1e-5)
    slope = [(a - b) / 2e-5 for a, b in zip(high, low, strict=True)]
    within(found.slope.mean, slope[0], found.slope.mean_stderr)
    within(found.slope.std, slope[1], found.slope.std_stderr)
    within(found.slope.log_evidence, slope[2], found.slope.log_evidence_stderr)
    # Precise enough to tell a factor of two.
    assert found.slope.log_evidence_stderr < 0.1 * abs(slope[2]) and found.slope.std_stderr[2] < 0.1 * abs(slope[1][2])
    assert "per doubling" in str(found)


def test_weights_that_cannot_be_trusted_are_warned_about(line) -> None:
    fit, _, places, _ = line
    with pytest.warns(al.HealthWarning, match="× 0.05"):
        found = elicit.sensitivity(0, fit, places, factors=(0.05,), num_samples=1000)
    assert found.pareto_k[0] > 0.7 and " !" in str(found)


def test_a_hierarchical_prior_is_reweighted_in_its_scale(line) -> None:
    """s ~ HalfNormal(c), w = s·z: p(s | D) on a grid is exact, draws from it stand for four chains, and c = 2 is on the grid as well."""
    fit, data, places, closed = line
    grid = np.linspace(1e-3, 12.0, 4000)
    parts = [closed(np.log(s)) for s in grid]
    means, stds, evidence = (np.array([part[i] for part in parts]) for i in range(3))

    def exact(c):
        log_p = evidence - 0.5 * (grid / c) ** 2 - np.log(c)
        p = np.exp(log_p - log_p.max())
        mean = p @ means / p.sum()
        return p / p.sum(), mean, np.sqrt(p @ (stds**2 + means**2) / p.sum() - mean**2), np.log(p.sum()) + log_p.max()

    rng = np.random.default_rng(3)
    s = rng.choice(grid, 4000, p=exact(1.0)[0])
    power = data[0][:, None] ** np.arange(4)
    factor = np.linalg.cholesky(np.linalg.inv(power.T @ power / 0.4**2 + np.eye(4) / s[:, None, None] ** 2))
    mean = np.einsum("sij,skj,k->si", factor, factor, power.T @ data[1] / 0.4**2)
    w = mean + np.einsum("sij,sj->si", factor, rng.normal(size=(4000, 4)))
    params = {"network": {"weight": (w / s[:, None])[:, None]}, "likelihood": {}, "prior": {"log_scale": {"global": np.log(s)}}}
    model = dataclasses.replace(fit.model, prior=al.priors.Hierarchical(al.HalfNormal(1.0), "global"))
    sampled = dataclasses.replace(fit, model=model, posterior=al.posterior.Draws(params, num_chains=4))
    found = elicit.sensitivity(0, sampled, places, factors=(1.0, 2.0))
    base = exact(1.0)
    for i, c in enumerate((1.0, 2.0)):
        _, mean, std, total = exact(c)
        within(found.mean[i], mean, found.mean_stderr[i])
        within(found.std[i], std, found.std_stderr[i])
    within(found.log_evidence[1], total - base[3], found.log_evidence_stderr[1])
    assert found.pareto_k[1] < 0.7 and found.log_evidence_stderr[1] < 0.05


# ------------------------------------------------------------------------------------------------------------- refusals


def test_refusals_say_what_to_do(line) -> None:
    import numpyro.distributions as dist

    fit, _, places, _ = line
    x = np.linspace(-1, 1, 4)
    model = fit.model
    with pytest.raises(al.ModelError, match="no scales to change"):
        elicit.match(0, dataclasses.replace(model, prior=al.priors.from_distribution(dist.Cauchy(0.0, 1.0))), elicit.rbf(), x)
    with pytest.raises(al.ModelError, match="no covariance function"):
        elicit.match(0, model, lambda a, b: -jnp.eye(len(a)), x)
    with pytest.raises(al.ModelError, match="no target"):
        elicit.match(0, model, lambda a, b, c: a, x)
    with pytest.raises(al.ModelError, match="does not fit the model"):
        elicit.match(0, model, lambda key: jax.random.normal(key, (3,)), x)
    with pytest.raises(al.MethodError, match="Unknown distance"):
        elicit.distance(0, model, elicit.rbf(), x, "kl")
    with pytest.raises(al.ModelError, match="Unknown grouping"):
        elicit.match(0, model, elicit.rbf(), x, per="weight")
    with pytest.raises(al.DataError, match="no bounds"):
        elicit.simulate(0, model, x, bounds=(1.0, -1.0))
    with pytest.raises(al.DataError, match="factors cannot be used"):
        elicit.sensitivity(0, fit, places, factors=(-1.0,))
    point = dataclasses.replace(fit, posterior=al.posterior.Point(model.init(jax.random.key(0))))
    with pytest.raises(al.MethodError, match="no draws to reweight"):
        elicit.sensitivity(0, point, places)
    with pytest.raises(al.ModelError, match="no prior scale"):
        elicit.sensitivity(0, dataclasses.replace(fit, model=None), places)


# ------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_show_draws_bounds_and_every_factor(line) -> None:
    fit, data, _, _ = line
    grid = np.linspace(-1, 1, 11)
    drawn = elicit.simulate(0, fit, grid, 60, bounds=(-4.0, 4.0))
    ax = plots.prior(drawn, num_draws=5, data=data)
    assert len(ax.lines) == 5 + 2 and len(ax.collections) == 3
    found = elicit.sensitivity(0, fit, grid, data)
    ax = plots.sensitivity(found)
    assert ax.get_legend_handles_labels()[1] == [f"prior scale × {c:g}" for c in (0.5, 1, 2)]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), found.mean[0])


def _phi(z: float) -> float:
    from statistics import NormalDist

    return NormalDist().cdf(z)
