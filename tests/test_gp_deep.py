"""Deep Gaussian processes: their bound where it is known, draws of layers; random features as weights of linear models and networks."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import gp
from aleator.gp.weighted import weighted_terms

RNG = np.random.default_rng(2)
X = np.sort(RNG.uniform(-1, 1, (40, 1)), axis=0)
Y = np.sign(X[:, 0]) + 0.05 * RNG.standard_normal(40)
KERNEL = gp.RBF(0.5, 1.2)


def batch() -> al.Batch:
    return al.Data(X, Y[:, None], None).batch()


def test_one_layer_has_the_collapsed_bound_at_its_best_q() -> None:
    sparse = gp.SparseGP(KERNEL, inducing=X[::5], likelihood=al.Gaussian(0.3)).bind(X, Y[:, None])
    closed = al.fit(0, sparse, (X, Y), gp.Evidence())
    model = gp.DeepGP(KERNEL, (), 8, al.Gaussian(0.3)).bind(X, Y[:, None])
    with jax.enable_x64(True):
        params = model.start(jax.random.key(0))
        spread = closed.posterior.spread[0]
        lower = np.linalg.cholesky(spread @ np.swapaxes(spread, 1, 2))
        params["layers"]["0"] |= {"location": jnp.asarray(closed.posterior.location[0]), "spread": jnp.asarray(lower)}
        params["layers"]["0"]["process"]["inducing"] = jnp.asarray(X[::5])
        terms, divergence = jax.jit(model.bound_terms)(jax.random.key(1), params, batch())
        np.testing.assert_allclose(float(jnp.sum(terms) - divergence), closed.log_evidence.value, rtol=1e-7)


def test_two_layers_are_a_nested_integral() -> None:
    """E over the first layer by quadrature, against draws; joint draws of functions have the same marginals."""
    model = gp.DeepGP(KERNEL, (1,), 6, al.Gaussian(0.3)).bind(X, Y[:, None])
    at, size = X[:3], 20_000
    with jax.enable_x64(True):
        params = model.start(jax.random.key(0))
        for i, part in params["layers"].items():
            part["location"] = 0.5 * jax.random.normal(jax.random.key(int(i) + 1), part["location"].shape)
            part["spread"] = 0.4 * jnp.eye(6)[None]
        moments = lambda i, f: gp.sparse.sparse_moments(
            model.layers[i],
            params["layers"][str(i)]["process"],
            params["layers"][str(i)]["location"],
            params["layers"][str(i)]["spread"],
            f,
        )

        @jax.jit
        def truth() -> tuple:
            mean, variance = moments(0, jnp.asarray(at))
            nodes, weights = np.polynomial.hermite_e.hermegauss(60)
            f = mean + jnp.sqrt(variance) * nodes  # (3, 60)
            last, spread = moments(1, f.reshape(-1, 1))
            last, spread, weights = last.reshape(3, 60), spread.reshape(3, 60), weights / weights.sum()
            first = last @ weights
            return first, (spread + last**2) @ weights - first**2

        mean, variance = (np.asarray(part) for part in truth())
        posterior = gp.Layered(al.posterior.Point(jax.tree.map(np.asarray, params)))
        for name in ("outputs", "functions"):
            draws = getattr(posterior, name)(jax.random.key(7), model, at, size).draws[..., 0]
            assert np.all(np.abs(draws.mean(0) - mean) < 5 * np.sqrt(variance / size)), name
            fourth = np.mean((draws - mean) ** 4, axis=0)
            assert np.all(np.abs(draws.var(0) - variance) < 5 * np.sqrt((fourth - variance**2) / size)), name
    layers = posterior.layers(jax.random.key(8), model, at, 5)
    assert [layer.shape for layer in layers] == [(5, 3, 1), (5, 3, 1)]


ROWS = al.Data(np.array([[0.5], [-1.2]]), np.array([[0.4], [1.5]]), None).batch()
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def linear(two_layers: bool) -> tuple[gp.DeepGP, dict]:
    """f = a·x + b·w, inducing inputs at the unit vectors, so that whitened values are (a, b) themselves; then c·f; noise 0.6."""
    layer = lambda places: gp.SparseGP(gp.Linear(1.0), len(places), gp.Zero(), al.Gaussian(1.0), False, places, 1)
    layers = (layer(np.eye(2)), layer(np.ones((1, 1)))) if two_layers else (layer(np.eye(2)),)
    layers = tuple(part.bind(np.asarray(part.inducing), np.zeros((len(part.inducing), 1))) for part in layers)
    model = gp.DeepGP(gp.Linear(1.0), (1,) if two_layers else (), 2, al.Gaussian(0.6), layers, num_latent=1)
    model = model.bind(np.asarray(ROWS.x), np.asarray(ROWS.y))
    params = jax.tree.map(jnp.asarray, model.start(jax.random.key(0)))
    params["layers"]["0"] |= {"location": jnp.array([[0.8, -1.1]]), "spread": jnp.array([[[0.3, 0.0], [0.2, 0.7]]])}
    if two_layers:
        params["layers"]["1"] |= {"location": jnp.array([[0.9]]), "spread": jnp.array([[[0.2]]])}
    params["latent"] = {"location": jnp.array([[0.3], [-0.5]]), "log_scale": jnp.array([[-0.4], [0.2]]), "weight": jnp.zeros((1, 1))}
    return model, params


def quadrature(params: dict, two_layers: bool, number: int) -> np.ndarray:
    """The bound's terms by the definition: over a, b where they are drawn, and over `number` ≤ 2 draws of w."""
    location, spread = (np.asarray(params["layers"]["0"][name])[0] for name in ("location", "spread"))
    normals = np.stack(np.meshgrid(*[NODES] * 2, indexing="ij"), axis=-1).reshape(-1, 2) if two_layers else np.zeros((1, 2))
    outer = np.outer(WEIGHTS, WEIGHTS).ravel() if two_layers else np.ones(1)
    slopes = location + normals @ spread.T
    terms = []
    for i in range(2):
        x, y = float(ROWS.x[i, 0]), float(ROWS.y[i, 0])
        middle, scale = float(params["latent"]["location"][i, 0]), float(np.exp(params["latent"]["log_scale"][i, 0]))
        w = middle + scale * NODES
        f = slopes[:, :1] * x + slopes[:, 1:] * w
        at = np.stack([np.full_like(w, x), w], axis=1)
        mean, variance = (0.9 * f, 0.04 * f**2) if two_layers else (f, np.sum((at @ spread) ** 2, axis=1))
        log = -0.5 * ((y - mean) ** 2 + variance) / 0.36 - np.log(0.6) - 0.5 * np.log(2 * np.pi)
        log = log + 0.5 * NODES**2 - 0.5 * w**2 + np.log(scale)
        if number == 1:
            terms.append(outer @ (log @ WEIGHTS))
        else:
            both = np.logaddexp(log[:, :, None], log[:, None, :]) - np.log(2)
            terms.append(outer @ np.einsum("fij,i,j->f", both, WEIGHTS, WEIGHTS))
    return np.array(terms)


@pytest.mark.parametrize("two_layers", [False, True])
def test_the_importance_weighted_bound_is_its_integral(two_layers: bool) -> None:
    """20,000 draws against quadrature, within 5 standard errors: one and two draws of w, which must share one function; two are better than one."""
    size = 20_000
    with jax.enable_x64(True):
        model, params = linear(two_layers)
        for number in (1, 2):
            each = jax.jit(lambda key, number=number: model.bound_terms(key, params, ROWS, 1, number)[0])
            draws = np.asarray(jax.lax.map(each, jax.random.split(jax.random.key(number), size), batch_size=1000))
            truth = quadrature(params, two_layers, number)
            assert np.all(np.abs(draws.mean(0) - truth) < 5 * draws.std(0) / size**0.5), (number, draws.mean(0), truth)
    assert np.all(quadrature(params, two_layers, 2) > quadrature(params, two_layers, 1) + 0.02)


def test_the_bound_is_the_evidence_where_q_is_the_posterior() -> None:
    """Known slopes: y = a·x + b·w + noise is Gaussian, and so is w given y; with that q(w) every draw has the same weight, and the bound is log N(y; a·x, b² + σ²)."""
    with jax.enable_x64(True):
        model, params = linear(False)
        a, b = params["layers"]["0"]["location"][0]
        params["layers"]["0"]["spread"] = jnp.zeros((1, 2, 2))
        variance = 0.36 / (0.36 + b**2)
        slope = b / (0.36 + b**2)  # w given y: partly by the row, partly by the slope of all
        params["latent"] = {
            "location": -slope * a * ROWS.x,
            "log_scale": jnp.full((2, 1), 0.5 * jnp.log(variance)),
            "weight": slope[None, None],
        }
        truth = -0.5 * (ROWS.y - a * ROWS.x)[:, 0] ** 2 / (b**2 + 0.36) - 0.5 * jnp.log(2 * jnp.pi * (b**2 + 0.36))
        for number in (1, 3):
            np.testing.assert_allclose(weighted_terms(jax.random.key(number), model, params, ROWS, 2, number), truth, rtol=1e-9)


def test_latent_inputs_from_mini_batches() -> None:
    """Noise that grows with x: f(x, w) takes it over. The bound climbs, rows keep their q(w), predictions are wider where the data are."""
    rng = np.random.default_rng(1)
    y = 0.3 * np.exp(2 * X[:, 0]) * rng.standard_normal(40)
    method = gp.DSVI(num_steps=300, batch_size=20, learning_rate=0.03, num_importance=5)
    fit = al.fit(0, gp.DeepGP(gp.RBF(1.0), (), 8, num_latent=1), (X, y), method)
    assert np.mean(fit.info["bound"][-20:]) > np.mean(fit.info["bound"][20:40]) + 20
    assert np.ptp(fit.posterior.params["latent"]["location"]) > 0.2
    std = fit.predict(0, np.array([[-0.8], [0.8]]), num_samples=2000).std
    assert std[1] > 1.3 * std[0]
    assert fit.functions(0, X[:4], 3).shape == (3, 4)
    with pytest.raises(al.MethodError, match="num_latent"):
        al.fit(0, gp.DeepGP(), (X, y), gp.DSVI(num_importance=2, batch_size=None))
    with pytest.raises(al.ModelError, match="variational"):
        gp.DeepGP(num_latent=1, sampled=True)


@pytest.mark.long
def test_two_layers_do_better_on_a_step() -> None:
    """A stationary process cannot be flat and jump; a process of a process can."""
    shallow = al.fit(0, gp.SparseGP(gp.RBF(), 12), (X, Y), gp.Evidence(num_restarts=1))
    deep = al.fit(0, gp.DeepGP(gp.RBF(), (1,), 12), (X, Y), gp.DSVI(num_steps=2000, batch_size=None, learning_rate=0.02))
    assert deep.log_evidence.value > shallow.log_evidence.value + 5
    predictive = deep.predict(0, X)
    assert np.sqrt(np.mean((predictive.mean - np.sign(X[:, 0])) ** 2)) < 0.15
    small = al.fit(0, deep.model, (X, Y), gp.DSVI(num_steps=3, batch_size=16))
    assert small.functions(0, X[:4], 6).shape == (6, 4)


def test_sampled_values_have_the_best_q_for_their_density() -> None:
    """One layer and Gaussian noise: log p(v) + E[log p(y | f) | v] is log N(v; μ, S) of the collapsed bound, up to the bound itself."""
    sparse = gp.SparseGP(KERNEL, inducing=X[::5], likelihood=al.Gaussian(0.3)).bind(X, Y[:, None])
    closed = al.fit(0, sparse, (X, Y), gp.Evidence())
    model = gp.DeepGP(KERNEL, (), 8, al.Gaussian(0.3), sampled=True).bind(X, Y[:, None])
    with jax.enable_x64(True):
        layer = gp.SparseGP(KERNEL, inducing=X[::5], mean=model.layers[0].mean, likelihood=al.Gaussian(1.0)).bind(X, Y[:, None])
        model = dataclasses.replace(model, layers=(layer,))
        params = model.start(jax.random.key(0))
        assert "inducing" not in params["layers"]["0"]["process"]
        spread = closed.posterior.spread[0, 0]
        for v in jax.random.normal(jax.random.key(1), (3, 1, 8)):
            params["layers"]["0"]["location"] = v
            ours = model.log_prior(params) + jnp.sum(model.log_likelihood(params, batch()))
            z = jnp.linalg.solve(spread, v[0] - closed.posterior.location[0, 0])
            density = -0.5 * z @ z - jnp.linalg.slogdet(spread)[1] - 4 * jnp.log(2 * jnp.pi)
            np.testing.assert_allclose(ours - density, closed.log_evidence.value, rtol=1e-7)


def test_a_deep_process_by_stochastic_hamiltonian_dynamics() -> None:
    """Inducing values of two layers by SG-HMC: draws of functions that know a line, from mini-batches."""
    y = 1.5 * X[:, 0] + 0.1 * RNG.standard_normal(40)
    model = gp.DeepGP(gp.RBF(1.0, 1.0), (1,), 6, al.Gaussian(0.2), sampled=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)  # two short chains
        fit = al.fit(
            0, model, (X, y), al.SGHMC(num_samples=40, num_warmup=200, num_chains=2, num_search=400, step_size=1e-3, batch_size=20, thin=5)
        )
    assert isinstance(fit.posterior, gp.Layered)
    assert np.corrcoef(fit.predict(0, X).mean, y)[0, 1] > 0.97
    functions = fit.functions(1, X[:4], 6)
    assert functions.shape == (6, 4) and np.ptp(functions, axis=0).min() > 0


def test_inner_means() -> None:
    wide_x = RNG.standard_normal((30, 3))
    model = gp.DeepGP(gp.RBF(), (3, 2, 4), 5).bind(wide_x, np.zeros((30, 1)))
    matrices = [np.asarray(layer.mean.matrix) for layer in model.layers]
    assert [matrix.shape for matrix in matrices] == [(3, 3), (3, 2), (2, 4), (4, 1)]
    np.testing.assert_array_equal(matrices[0], np.eye(3))
    np.testing.assert_allclose(matrices[1].T @ matrices[1], np.eye(2), atol=1e-12)
    np.testing.assert_array_equal(matrices[3], 0)
    with pytest.raises(al.MethodError, match="deep"):
        al.fit(0, gp.GP(gp.RBF()), (X, Y), gp.DSVI(batch_size=None))


@pytest.mark.parametrize("kernel", ["rbf", "matern32"])
def test_random_features_are_the_kernel_on_average(kernel: str) -> None:
    """φ(x)·φ(x′) is a mean of m cosines: each within 5 standard errors; the linear model is the process with that very kernel."""
    x = RNG.uniform(-1, 1, (12, 2))
    features = gp.RandomFourier(2000, (0.7, 1.1), 1.3, kernel, orthogonal=False)
    ours = {"rbf": gp.RBF, "matern32": gp.Matern32}[kernel]((0.7, 1.1), 1.3).bind(x)
    with jax.enable_x64(True):
        truth, approximate = np.asarray(ours({}, x, x)), np.asarray(features(x) @ features(x).T)
        assert np.all(np.abs(approximate - truth) < 5 * 1.69 / np.sqrt(2 * 1000) + 1e-12)
    y = np.sin(3 * x[:, 0])
    small = gp.RandomFourier(20, 0.8, kernel=kernel)
    weights = al.fit(0, al.LinearModel(small, al.Gaussian(0.2)), (x, y), al.Exact())
    process = gp.GP(gp.Custom(lambda values, a, b: small(a) @ small(b).T), gp.Zero(), al.Gaussian(0.2))
    functions = al.fit(0, process, (x, y), gp.Evidence())
    np.testing.assert_allclose(weights.log_evidence.value, functions.log_evidence.value, rtol=1e-9)
    np.testing.assert_allclose(weights.predict(0, x[:3] + 0.1).std, functions.predict(0, x[:3] + 0.1).std, rtol=1e-7)


def test_orthogonal_frequencies_are_better() -> None:
    x = RNG.uniform(-1, 1, (10, 6))
    truth = np.exp(-0.5 * np.sum((x[:, None] - x[None]) ** 2, -1))

    def error(orthogonal: bool) -> float:
        waves = [gp.random_features.frequencies(6, 30, "rbf", orthogonal, seed) for seed in range(100)]
        features = [np.concatenate([np.cos(x @ w.T), np.sin(x @ w.T)], axis=1) / 30**0.5 for w in waves]
        return float(np.mean([(f @ f.T - truth) ** 2 for f in features]))

    assert error(True) < 0.8 * error(False)  # about a third at this size; 100 seeds leave a tenth of noise


def test_a_deep_process_of_random_features_is_a_network() -> None:
    x = RNG.uniform(-1, 1, (6, 2)).astype(np.float32)
    one = al.BNN(gp.RandomDeep(2, (), 1, 400, 0.8), al.Gaussian(0.1), al.Normal(1.0))
    measured = gp.wide.empirical_nngp(0, one, x, num_samples=4000)
    waves = gp.random_features.frequencies(2, 200, "rbf", True, 0)
    features = np.asarray(gp.random_features.waves_of(x / 0.8, waves))
    truth = features @ features.T
    assert np.all(np.abs(measured - truth) < 5 * np.sqrt((np.outer(np.diag(truth), np.diag(truth)) + truth**2) / 4000))
    deep = al.BNN(gp.RandomDeep(2, (2,), 1, 20, 0.8), al.Gaussian(0.1), al.Normal(1.0))
    fit = al.fit(0, deep, (x, np.sin(x[:, 0])), al.MAP(num_steps=50))
    assert fit.predict(0, x).mean.shape == (6,)
