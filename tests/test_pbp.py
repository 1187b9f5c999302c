"""Probabilistic backpropagation: its moments against quadrature and simulation, its updates against exact and literal ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from scipy.special import gammaln

import aleator as al
from aleator import loop
from aleator.methods import pbp
from aleator.methods._moments import gamma_update, rectified
from aleator.methods.pbp import PBP
from aleator.target import Target

RNG = np.random.default_rng(0)


def problem(n: int = 60, d: int = 3, noise: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """A kinked function of standardised inputs that no line fits."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(n, d))
    return x.astype(np.float32), (np.abs(x[:, 0]) - 0.8 + 0.5 * x[:, 1] + noise * rng.normal(size=n)).astype(np.float32)


def network(hidden: tuple[int, ...] = (6,), out: int = 1, likelihood: al.Gaussian | None = None) -> al.BNN:
    return al.BNN(al.networks.MLP(3, hidden, out), al.Gaussian() if likelihood is None else likelihood)


def started(model: al.BNN, num_data: int = 60, method: PBP | None = None) -> tuple[loop.Algorithm, pbp.State, pbp.Setting]:
    """The algorithm, its first state, and its setting; call within float64."""
    x, y = problem()
    bound = model.bind(x, np.zeros((len(y), model.network.out_size)))
    method = PBP() if method is None else method
    algorithm = method.build(Target(bound, num_data))
    state = algorithm.init(jax.random.key(0), None)
    widths = np.concatenate(
        [
            np.full(leaf.size, (model.network.init(jax.random.key(0))[name]["weight"].shape[0] + 1.0) ** -0.5)
            for name, layer in state.mean.items()
            for leaf in jax.tree.leaves(layer)
        ]
    )
    return algorithm, state, pbp.Setting(len(model.network.hidden) + 1, num_data, widths, isinstance(model.likelihood.scale, float))


# ---- moments ----------------------------------------------------------------------------------------------------------------------


def test_rectified_moments_against_quadrature() -> None:
    """∫₀^∞ uᵏ N(u; m, v) du by Gauss–Legendre on the part of ±12 standard deviations above 0."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    mean, variance = (grid.ravel() for grid in np.meshgrid([-6.0, -2.0, -0.3, 0.0, 0.5, 3.0, 9.0], [1e-4, 0.3, 1.0, 25.0]))
    expected = []
    for m, v in zip(mean, variance, strict=True):
        low, high = max(0.0, m - 12 * np.sqrt(v)), max(0.0, m + 12 * np.sqrt(v))
        u = 0.5 * (high + low) + 0.5 * (high - low) * nodes
        mass = 0.5 * (high - low) * weights * st.norm.pdf(u, m, np.sqrt(v))
        first = mass @ u
        expected.append((first, mass @ (u - first) ** 2 + first**2 * st.norm.cdf(0, m, np.sqrt(v))))
    with jax.enable_x64(True):
        found = np.stack(jax.jit(rectified)(jnp.asarray(mean), jnp.asarray(variance)), axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def test_rectified_moments_at_their_ends() -> None:
    """Surely on: the Gaussian's own moments, without cancellation; surely off: nothing, with finite slopes either way."""
    with jax.enable_x64(True):
        mean, variance = jnp.array([1e4, 40.0, -60.0]), jnp.array([1e-6, 1.0, 1.0])
        m, v = jax.jit(rectified)(mean, variance)
        slopes = jax.jit(jax.jacobian(rectified, argnums=(0, 1)))(mean, variance)
    np.testing.assert_allclose(m, [1e4, 40.0, 0.0], rtol=1e-14)
    np.testing.assert_allclose(v, [1e-6, 1.0, 0.0], rtol=1e-14)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_gamma_update_is_exact_for_a_conjugate_factor() -> None:
    """The factor γ^½ e^{−cγ} takes Gamma(α, β) to Gamma(α + ½, β + c)."""
    a, b, c = np.array([1.5, 6.0, 4e6]), np.array([0.3, 6.0, 1e6]), np.array([0.02, 1.7, 0.4])
    log_z = lambda a: gammaln(a + 0.5) - gammaln(a) + a * np.log(b) - (a + 0.5) * np.log(b + c)
    # From one Z to the next without log Γ of millions: Z(α + 1)/Z(α) = (α + ½)/α·β/(β + c).
    step = lambda a: np.log1p(0.5 / a) + np.log(b / (b + c))
    with jax.enable_x64(True):
        shape, rate = gamma_update(*(jnp.asarray(v) for v in (a, b, log_z(a), log_z(a) + step(a), log_z(a) + step(a) + step(a + 1))))
    np.testing.assert_allclose(shape[:2], a[:2] + 0.5, rtol=1e-10)
    np.testing.assert_allclose(rate[:2], b[:2] + c[:2], rtol=1e-10)
    np.testing.assert_allclose(shape[2] / rate[2], (a[2] + 0.5) / (b[2] + c[2]), rtol=1e-9)  # the mean keeps its digits at any size


def test_propagated_moments_of_one_hidden_layer_are_exact() -> None:
    """Hidden units are independent given x, so only deeper networks are approximated: 200,000 networks drawn, 5 standard errors."""
    with jax.enable_x64(True):
        _, state, setting = started(network((6,), 2))
        mean = jax.tree.map(lambda leaf: leaf + 0.3, state.mean)
        x = jnp.array([0.7, -1.2, 0.4])
        m, v = (np.asarray(part) for part in pbp.propagate(mean, state.variance, x, setting.num_layers))
        leaves, structure = jax.tree.flatten(mean)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noise = jax.tree.unflatten(structure, [jax.random.normal(k, (200_000, *leaf.shape)) for k, leaf in zip(keys, leaves, strict=True)])
        draws = jax.tree.map(lambda mu, s, z: mu + jnp.sqrt(s) * z, mean, state.variance, noise)
        f = np.asarray(jax.jit(jax.vmap(lambda w: network((6,), 2).network.apply(w, x[None])[0]))(draws))
    error = f.std(0) / np.sqrt(len(f))
    assert (np.abs(f.mean(0) - m) < 5 * error).all()
    square = (f - f.mean(0)) ** 2
    assert (np.abs(square.mean(0) - v) < 5 * square.std(0) / np.sqrt(len(f))).all()
    assert (error < 0.01 * np.sqrt(v)).all()


# ---- updates ----------------------------------------------------------------------------------------------------------------------


def test_the_prior_is_the_published_one() -> None:
    """Weights N(0, β/((α − 1)(fan-in + 1))), means moved by N(0, 1)/(fan-in + 1), all precisions Gamma(6, 6)."""
    with jax.enable_x64(True):
        _, state, _ = started(network((400,)))
    for name, fan in (("layer0", 3), ("layer1", 400)):
        np.testing.assert_allclose(state.variance[name]["weight"], 1.2 / (fan + 1), rtol=1e-12)
        np.testing.assert_allclose(state.variance[name]["bias"], 1.2 / (fan + 1), rtol=1e-12)
        z = np.asarray(state.mean[name]["weight"]).ravel() * (fan + 1)
        assert abs(np.mean(z**2) - 1) < 5 * np.sqrt(2 / len(z)) and abs(z.mean()) < 5 / np.sqrt(len(z))
    assert float(state.shape) == float(state.rate) == float(state.noise.shape[0]) == float(state.noise.rate[0]) == 6.0


def test_first_row_of_a_linear_network_is_the_exact_update() -> None:
    """Known noise, no hidden layer: mean and marginal variances of the exact Bayesian linear update."""
    sigma, x, y = 0.3, np.array([0.5, -1.0, 2.0]), 0.7
    with jax.enable_x64(True):
        _, state, setting = started(network((), likelihood=al.Gaussian(sigma)))
        moved, log_z = jax.jit(lambda s: pbp.absorb(s, jnp.asarray(x), jnp.asarray([y]), setting))(state)
    flat = lambda tree: np.r_[np.ravel(tree["layer0"]["weight"]), tree["layer0"]["bias"]]
    row, m, v = np.r_[x, 1.0], flat(state.mean), flat(state.variance)
    total = row**2 @ v + sigma**2
    np.testing.assert_allclose(flat(moved.mean), m + v * row * (y - row @ m) / total, rtol=1e-12)
    np.testing.assert_allclose(flat(moved.variance), v - (v * row) ** 2 / total, rtol=1e-12)
    assert float(log_z) == pytest.approx(st.norm.logpdf(y, row @ m, np.sqrt(total)), rel=1e-12)
    assert float(moved.noise.shape[0]) == float(state.noise.shape[0])  # known noise is not learned


def test_gradients_and_noise_update_are_literal() -> None:
    """∂log Z by central differences of a separate log Z, the Gamma by the published formulas."""
    x, y = np.array([0.5, -1.0, 2.0]), np.array([0.9])
    with jax.enable_x64(True):
        _, state, setting = started(network((4, 3)))
        state = state._replace(mean=jax.tree.map(lambda leaf: leaf + 0.2, state.mean))
        moved, value = jax.jit(lambda s: pbp.absorb(s, jnp.asarray(x), jnp.asarray(y), setting))(state)
        moments = jax.jit(lambda m, v: pbp.propagate(m, v, jnp.asarray(x), setting.num_layers))

        def log_z(mean, variance, shape=6.0):
            m, v = moments(mean, variance)
            return float(st.norm.logpdf(y[0], m[0], np.sqrt(v[0] + 6.0 / (shape - 1.0))))

        def slope(which: str, layer: str, index: tuple[int, int]) -> float:
            ends = []
            for sign in (1.0, -1.0):
                trees = {"mean": state.mean, "variance": state.variance}
                bumped = trees[which][layer]["weight"].at[index].add(sign * 1e-5)
                trees[which] = {**trees[which], layer: {**trees[which][layer], "weight": bumped}}
                ends.append(log_z(**trees))
            return (ends[0] - ends[1]) / 2e-5

        for layer, index in (("layer0", (1, 2)), ("layer1", (3, 0)), ("layer2", (2, 0))):
            g, h = slope("mean", layer, index), slope("variance", layer, index)
            v = float(state.variance[layer]["weight"][index])
            step = float((moved.mean[layer]["weight"] - state.mean[layer]["weight"])[index])
            assert step == pytest.approx(v * g, rel=1e-6, abs=1e-10)
            assert float(moved.variance[layer]["weight"][index]) == pytest.approx(v - v**2 * (g**2 - 2 * h), rel=1e-7)
        z, z1, z2 = (np.exp(log_z(state.mean, state.variance, shape)) for shape in (6.0, 7.0, 8.0))
    assert float(value) == pytest.approx(np.log(z), rel=1e-12)
    assert float(moved.noise.shape[0]) == pytest.approx(1 / (z * z2 / z1**2 * 7 / 6 - 1), rel=1e-10)
    assert float(moved.noise.rate[0]) == pytest.approx(1 / (z2 / z1 * 7 / 6 - z1 / z * 6 / 6), rel=1e-10)


def test_refinement_of_the_prior_is_the_literal_sweep() -> None:
    """A plain loop over the weights in the published units, sites kept as natural parameters."""
    x, y = problem()
    with jax.enable_x64(True):
        _, state, setting = started(network((4,)), num_data=20)
        run = jax.jit(lambda s, rows: jax.lax.scan(lambda c, r: (pbp.absorb(c, r[0], r[1], setting)[0], None), s, rows)[0])
        state = run(state, (jnp.asarray(x[:20], jnp.float64), jnp.asarray(y[:20, None], jnp.float64)))
        state = jax.jit(lambda s: pbp.refine(s, setting))(state)  # so that the sites are no longer the first ones
        state = run(state, (jnp.asarray(x[:20], jnp.float64), jnp.asarray(y[:20, None], jnp.float64)))
        refined = jax.jit(lambda s: pbp.refine(s, setting))(state)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    m, v = flat(state.mean) / setting.widths, flat(state.variance) / setting.widths**2
    a, b, sites, skipped = float(state.shape), float(state.rate), np.stack(state.sites), 0
    for i in range(len(m)):
        if 1 / v[i] - sites[0, i] <= 1e-6 or a - sites[2, i] <= 1 or b - sites[3, i] <= 0:
            skipped += 1
            continue
        v_cavity = 1 / (1 / v[i] - sites[0, i])
        m_cavity, a_cavity, b_cavity = v_cavity * (m[i] / v[i] - sites[1, i]), a - sites[2, i], b - sites[3, i]
        z, z1, z2 = (st.norm.pdf(m_cavity, 0, np.sqrt(v_cavity + b_cavity / (a_cavity + s))) for s in (-1, 0, 1))
        total = v_cavity + b_cavity / (a_cavity - 1)
        first, second = -m_cavity / total, -0.5 / total + 0.5 * m_cavity**2 / total**2  # ∂log Z/∂m, ∂log Z/∂v
        m[i], v[i] = m_cavity + v_cavity * first, v_cavity - v_cavity**2 * (first**2 - 2 * second)
        a = 1 / (z * z2 / z1**2 * (a_cavity + 1) / a_cavity - 1)
        b = 1 / (z2 / z1 * (a_cavity + 1) / b_cavity - z1 / z * a_cavity / b_cavity)
        sites[:, i] = 1 / v[i] - 1 / v_cavity, m[i] / v[i] - m_cavity / v_cavity, a - a_cavity, b - b_cavity
    assert 0 < skipped < 5  # a cavity without a variance is met, and left alone
    np.testing.assert_allclose(flat(refined.mean), m * setting.widths, rtol=1e-8)
    np.testing.assert_allclose(flat(refined.variance), v * setting.widths**2, rtol=1e-8)
    np.testing.assert_allclose([float(refined.shape), float(refined.rate)], [a, b], rtol=1e-8)
    np.testing.assert_allclose(np.stack(refined.sites), sites, rtol=1e-5, atol=1e-8)
    # λ's Gamma is its prior and what the factors gave to it.
    assert float(refined.shape) == pytest.approx(6.0 + sites[2].sum(), rel=1e-9)


def test_updates_without_a_positive_variance_are_undone() -> None:
    """A row far from what a confident network says, with hidden units at the edge: some weights would get negative variances."""
    with jax.enable_x64(True):
        _, state, setting = started(network((6,), likelihood=al.Gaussian(0.01)))
        state = state._replace(variance=jax.tree.map(lambda leaf: 0.05 * leaf, state.variance))
        x, y = jnp.array([1.0, -2.0, 0.5]), jnp.array([6.0])

        def raw(mean, variance):
            m, v = pbp.propagate(mean, variance, x, setting.num_layers)
            return jnp.sum(-0.5 * (y - m) ** 2 / (v + 1e-4) - 0.5 * jnp.log(v + 1e-4))

        g, h = jax.jit(jax.grad(raw, argnums=(0, 1)))(state.mean, state.variance)
        bad = jax.tree.map(lambda v, a, b: v - v**2 * (a**2 - 2 * b) <= 0, state.variance, g, h)
        moved, _ = jax.jit(lambda s: pbp.absorb(s, x, y, setting))(state)
    count = sum(int(leaf.sum()) for leaf in jax.tree.leaves(bad))
    assert 0 < count < len(setting.widths)
    assert float(moved.undone) == pytest.approx(count / len(setting.widths), rel=1e-12)
    for before, after in ((state.mean, moved.mean), (state.variance, moved.variance)):
        same = jax.tree.map(lambda old, new: old == new, before, after)
        assert all(np.asarray(s)[np.asarray(b)].all() for s, b in zip(jax.tree.leaves(same), jax.tree.leaves(bad), strict=True))
        assert not all(np.asarray(s).all() for s in jax.tree.leaves(same))
    assert all((np.asarray(leaf) > 0).all() for leaf in jax.tree.leaves(moved.variance))


def test_padding_is_no_row_and_passes_end_with_a_refinement() -> None:
    x, y = problem(8)
    with jax.enable_x64(True):
        algorithm, state, _ = started(network((4,)), num_data=8)
        step = jax.jit(algorithm.phases[0].step)
        batch = lambda rows, index, padded: al.data.Batch(
            jnp.asarray(x[rows]), jnp.asarray(y[rows, None]), None, jnp.asarray(index), padded
        )
        key = jax.random.key(0)
        whole, _ = step(key, state, batch(np.arange(8), np.arange(8), False))
        first, _ = step(jax.random.clone(key), state, batch(np.arange(5), np.arange(5), True))
        assert int(first.seen) == 5 and float(first.shape) == 6.0
        parts, _ = step(jax.random.clone(key), first, batch(np.array([5, 6, 7, 7, 7]), np.array([0, 1, 2, -1, -1]), True))
    assert int(parts.seen) == 8 and float(parts.shape) != 6.0
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# ---- fits -------------------------------------------------------------------------------------------------------------------------


def test_learns_a_kink_and_its_noise() -> None:
    """Better than any line, noise near the truth, wider away from the data, and noise variance as the method predicts with."""
    x, y = problem(300)
    test_x, test_y = problem(600)
    test_x, test_y = test_x[300:], test_y[300:]
    fit = al.fit(0, network((30,)), (x, y), PBP(20), progress=False)
    predictive = fit.predict(1, test_x)
    linear = al.LinearModel(al.features.Identity(), al.Gaussian(al.InverseGamma(1.0, 1.0)), al.Normal(1.0), scaled_by_noise=True)
    line = al.fit(0, linear, (x, y), al.Exact()).predict(1, test_x)
    assert predictive.log_prob(test_y).mean() > line.log_prob(test_y).mean() + 0.5
    scale = float(np.exp(fit.posterior.mean["likelihood"]["log_scale"][0]))
    assert 0.15 < scale < 0.3
    np.testing.assert_allclose(predictive.aleatoric, scale**2, rtol=1e-6)
    far = fit.predict(1, 6 * test_x[:50])
    assert far.epistemic.mean() > 5 * predictive.epistemic.mean()
    # Draws of the mean-field posterior have the moments that PBP propagates, up to 1,000 draws' error.
    with jax.enable_x64(True):
        variance = jax.tree.map(jnp.asarray, fit.posterior.variance()["network"])
        mean = jax.tree.map(jnp.asarray, fit.posterior.mean["network"])
        m, v = (np.asarray(part) for part in jax.vmap(lambda row: pbp.propagate(mean, variance, row, 2))(jnp.asarray(test_x, jnp.float64)))
    assert np.max(np.abs(predictive.mean - m[:, 0]) / np.sqrt(v[:, 0] / 1000)) < 5
    assert fit.status.startswith("Complete: 20 passes") and "Gamma(6, 6)" in fit.manifest["prior"]


def test_known_noise_two_columns_deep_and_given_gamma() -> None:
    x, y = problem()
    both = np.stack([y, -2 * y], axis=1)
    fit = al.fit(0, network((4, 4), 2, al.Gaussian(0.3)), (x, both), PBP(3), progress=False)
    assert fit.predict(0, x).mean.shape == (60, 2)
    np.testing.assert_allclose(fit.predict(0, x).aleatoric, 0.09, rtol=1e-6)
    learned = al.fit(0, network((5,), 2), (x, both), PBP(3), progress=False)
    assert learned.posterior.mean["likelihood"]["log_scale"].shape == (2,)
    with jax.enable_x64(True):
        algorithm, state, _ = started(network((5,), 1, al.Gaussian(al.InverseGamma(50.0, 5.0))))
    assert float(state.noise.shape[0]) == 50.0 and float(state.noise.rate[0]) == 5.0 and "Gamma(50, 5)" in algorithm.notes["prior"]


def test_a_stream_is_read_for_as_many_passes() -> None:
    x, y = problem(20)
    stream = al.Stream(lambda epoch, start: iter([(x[i : i + 8], y[i : i + 8]) for i in range(8 * start, 20, 8)]), 20)
    fit = al.fit(0, network((4,)), stream, PBP(3), progress=False)
    assert fit.status.startswith("Complete: 3 passes") and fit.manifest["steps"] == 9


def test_one_row_is_said_to_be_one_row() -> None:
    with pytest.warns(al.HealthWarning, match="Only one row"):
        al.fit(0, network((4,)), (np.ones((1, 3)), np.ones(1)), PBP(2), progress=False)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: al.BNN(al.networks.MLP(3, (4,), 1, "tanh")), "activation 'tanh'"),
        (lambda: al.BNN(al.networks.Shallow(3, 4)), "BNN of Shallow"),
        (lambda: al.LinearModel(al.features.Identity()), "a LinearModel"),
        (lambda: al.BNN(al.networks.MLP(3, (4,), 2), al.HeteroscedasticGaussian()), "likelihood Heteroscedastic"),
        (lambda: al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(al.HalfCauchy(1.0))), "noise prior HalfCauchy"),
        (lambda: al.BNN(al.networks.MLP(3, (4,), 1), prior=al.priors.Laplace(1.0)), "prior Laplace"),
    ],
)
def test_refuses_what_it_cannot_propagate(make, cause: str) -> None:
    with pytest.raises(al.MethodError, match=f"{cause}.*Expected: al.BNN"):
        al.fit(0, make(), problem(), PBP())


def test_refuses_weights_a_temperature_and_bad_settings() -> None:
    x, y = problem()
    with pytest.raises(al.MethodError, match="knows no weights"):
        al.fit(0, network(), (x, y, np.ones(60)), PBP())
    with pytest.raises(al.MethodError, match="temperature 2"):
        al.fit(0, network(), (x, y), PBP(), temperature=2.0)
    with pytest.raises(al.MethodError, match="weight_shape > 1"):
        PBP(weight_shape=0.5)
