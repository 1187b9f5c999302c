"""Gaussian processes against literal dense formulas, scikit-learn and tinygp; what a fit of one can do; awkward data."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import aleator as al
from aleator import gp

RNG = np.random.default_rng(7)
X = RNG.uniform(-2, 2, (30, 2))
Y = np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] + 0.1 * RNG.standard_normal(30)
NEW = RNG.uniform(-2, 2, (6, 2))


@pytest.fixture(scope="module")
def fitted() -> al.Fit:
    return al.fit(0, gp.GP(gp.RBF()), (X, Y), gp.Evidence(num_restarts=2))


def dense(params: dict, x: np.ndarray, y: np.ndarray) -> jax.Array:
    """log N(y; c, K + σ²I) as it is printed: an RBF with ARD, an inverse, a determinant."""
    z = x / jnp.exp(params["kernel"]["log_length"])
    squares = jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1)[None] - 2 * z @ z.T
    cov = jnp.exp(2 * params["kernel"]["log_scale"]) * jnp.exp(-0.5 * squares) + jnp.exp(2 * params["likelihood"]["log_scale"]) * jnp.eye(
        len(x)
    )
    away = y - params["mean"]["level"]
    return -0.5 * away @ jnp.linalg.inv(cov) @ away - 0.5 * jnp.linalg.slogdet(cov)[1] - 0.5 * len(x) * jnp.log(2 * jnp.pi)


def test_evidence_and_its_derivatives_are_those_of_the_dense_formula() -> None:
    model = gp.GP(gp.RBF()).bind(X, Y[:, None])
    with jax.enable_x64(True):
        params = model.sample_prior(jax.random.key(3))
        batch, short = al.Data(X, Y[:, None], None).batch(), al.Data(X[:11], Y[:11, None], None).batch()
        flat, unflat = ravel_pytree(params)
        terms = jax.jit(lambda u, batch: model.log_likelihood(unflat(u), batch))
        compute = lambda function: jax.jit(lambda u: (function(u), jax.grad(function)(u)))(flat)
        truth = compute(lambda u: dense(unflat(u), X, Y))
        np.testing.assert_allclose(terms(flat, batch)[:11], terms(flat, short), rtol=1e-9)  # the chain rule, row by row
        for ours in (lambda u: model.log_evidence(unflat(u), X, Y[:, None]), lambda u: jnp.sum(terms(u, batch))):
            value, gradient = compute(ours)
            np.testing.assert_allclose(value, truth[0], rtol=1e-10)
            np.testing.assert_allclose(gradient, truth[1], rtol=1e-8, atol=1e-8)
            tangent = jax.jit(lambda u, ours=ours: jax.jvp(ours, (u,), (jnp.ones_like(u),))[1])(flat)
            np.testing.assert_allclose(tangent, jnp.sum(truth[1]), rtol=1e-8)


def test_predictions_are_those_of_the_dense_formula(fitted: al.Fit) -> None:
    params = fitted.posterior.params
    length, scale = np.exp(params["kernel"]["log_length"]), np.exp(params["kernel"]["log_scale"])
    level, noise = params["mean"]["level"][0], np.exp(params["likelihood"]["log_scale"][0])
    k = lambda a, b: scale**2 * np.exp(-0.5 * np.sum(((a[:, None] - b[None]) / length) ** 2, -1))
    inverse = np.linalg.inv(k(X, X) + noise**2 * np.eye(len(X)))
    mean = level + k(NEW, X) @ inverse @ (Y - level)
    covariance = k(NEW, NEW) - k(NEW, X) @ inverse @ k(X, NEW)
    joint = fitted.joint(0, NEW)
    np.testing.assert_allclose(joint[0][:, 0], mean, rtol=1e-8)
    np.testing.assert_allclose(joint[1][:, 0, :, 0], covariance, rtol=1e-7, atol=1e-9)
    predictive = fitted.predict(1, NEW)
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(predictive.std, np.sqrt(np.diag(covariance) + noise**2), rtol=1e-7)


def test_the_same_kernel_in_scikit_learn(fitted: al.Fit) -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(1.5) * RBF([0.7, 1.9]) + WhiteKernel(0.04)
    theirs = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit(X, Y)
    ours = al.fit(0, gp.GP(gp.RBF((0.7, 1.9), 1.5**0.5), gp.Zero(), al.Gaussian(0.2)), (X, Y), gp.Evidence())
    assert ours.log_evidence.kind == "exact"
    np.testing.assert_allclose(ours.log_evidence.value, theirs.log_marginal_likelihood_value_, rtol=1e-10)
    mean, std = theirs.predict(NEW, return_std=True)
    predictive = ours.predict(1, NEW)
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(predictive.std, std, rtol=1e-8)


def test_hyper_parameters_are_at_the_top(fitted: al.Fit) -> None:
    """No direction is left to climb, and scipy's own search from there finds nothing better."""
    from scipy.optimize import minimize

    model, params = fitted.model, fitted.posterior.params
    with jax.enable_x64(True):
        flat, unflat = ravel_pytree(jax.tree.map(jnp.asarray, params))
        loss = jax.jit(jax.value_and_grad(lambda u: -model.log_evidence(unflat(u), X, Y[:, None]) - model.log_prior(unflat(u))))
        value, gradient = loss(flat)
        better = minimize(lambda u: tuple(map(np.asarray, loss(u))), np.asarray(flat), jac=True, method="L-BFGS-B")
        evidence = float(model.log_evidence(params, X, Y[:, None]))
    assert np.abs(gradient).max() < 0.05  # a gain of 1e-4 nats is at most g²/(2·curvature)
    assert better.fun > float(value) - 1e-3
    np.testing.assert_allclose(fitted.log_evidence.value, evidence, atol=1e-3)
    assert "starts agree" in fitted.status


def test_kernels_are_those_of_tinygp() -> None:
    tiny = pytest.importorskip("tinygp").kernels
    a, b = X[:5], NEW
    line, other = X[:5, 0], NEW[:, 0]
    with jax.enable_x64(True):
        for ours, theirs, one in (
            (gp.RBF(0.8, 1.3, ard=False), 1.69 * tiny.ExpSquared(0.8, distance=tiny.L2Distance()), False),
            (gp.Matern12(0.8, 1.3), 1.69 * tiny.Exp(0.8), True),
            (gp.Matern32(0.8, 1.3, ard=False), 1.69 * tiny.Matern32(0.8, distance=tiny.L2Distance()), False),
            (gp.Matern52(0.8, 1.3, ard=False), 1.69 * tiny.Matern52(0.8, distance=tiny.L2Distance()), False),
            (gp.RationalQuadratic(0.8, 1.3, mixture=0.6), 1.69 * tiny.RationalQuadratic(scale=0.8, alpha=0.6), True),
            (gp.Periodic(0.9, 0.7, 1.3), 1.69 * tiny.ExpSineSquared(scale=0.9, gamma=2 / 0.7**2), True),
            (gp.Linear(1.3), 1.69 * tiny.Polynomial(order=1.0), False),
            (
                gp.RBF(0.8, 1.3) * gp.Periodic(0.9, 0.7) + 2.0,
                1.69 * tiny.ExpSquared(0.8) * tiny.ExpSineSquared(scale=0.9, gamma=2 / 0.49) + 2.0,
                True,
            ),
        ):
            first, second = (line, other) if one else (a, b)
            bound = ours.bind(first)
            params = bound.median(jax.random.key(0))
            np.testing.assert_allclose(
                bound(params, first, second), theirs(jnp.asarray(first), jnp.asarray(second)), rtol=1e-9, err_msg=str(ours)
            )
            np.testing.assert_allclose(bound.diag(params, first), jnp.diag(bound(params, first, first)), rtol=1e-12)


KERNELS = {
    "ard": gp.RBF(columns=1) + gp.Matern32(columns=(0,)) * gp.Periodic(columns=0) + gp.Bias(),
    "spectral": gp.SpectralMixture(2),
    "change": gp.Changepoint(gp.RBF(), gp.Linear(ard=True) + gp.Bias()),
    "levels": gp.RBF(columns=0) * gp.Categorical(3, column=2),
    "ranked": gp.Categorical(3, column=2, rank=1) * gp.RBF(columns=(0, 1)),
    "deep": gp.Deep(al.networks.MLP(3, (4,), 2, "tanh"), gp.RBF()),
    "custom": gp.Custom(lambda v, a, b: v["size"] * jnp.minimum(jnp.abs(a[:, :1]), jnp.abs(b[:, :1]).T), {"size": al.LogNormal()}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_a_covariance(name: str) -> None:
    x = np.concatenate([X[:12], np.arange(12.0)[:, None] % 3], axis=1)
    kernel = KERNELS[name].bind(x)
    assert hash(kernel) == hash(KERNELS[name].bind(x))

    @jax.jit
    def compute(key: jax.Array) -> tuple:
        params = kernel.sample(key)
        slope = jax.grad(lambda p: jnp.sum(kernel(p, x, x)))(params)
        return params, kernel(params, x, x), kernel.diag(params, x), kernel.log_prior(params), slope

    with jax.enable_x64(True):
        params, matrix, diagonal, log_prior, slope = jax.tree.map(np.asarray, compute(jax.random.key(1)))
        assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(kernel.init, jax.random.key(2)))
        assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(kernel.median, jax.random.key(2)))
    np.testing.assert_allclose(diagonal, np.diag(matrix), rtol=1e-12)
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-12)
    assert np.linalg.eigvalsh(matrix).min() > -1e-10 * np.trace(matrix)
    assert np.isfinite(log_prior)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slope))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(slope)) > 0


@pytest.mark.parametrize("kernel", [gp.Matern12, gp.Matern32, gp.Matern52])
def test_compiled_covariances_are_those_computed_eagerly(kernel: type) -> None:
    """Together with the factorisation that follows: a fusion once lost the select that made √0 of the diagonal."""
    model = gp.GP(kernel(0.7, 1.1), gp.Zero(), al.Gaussian(0.3)).bind(X[:, 0], Y[:, None])
    with jax.enable_x64(True):
        params = model.start(jax.random.key(0))
        both = jax.jit(lambda x: (model.covariance(params, x), model.log_evidence(params, x, Y[:, None])))(X[:, 0])
        np.testing.assert_allclose(np.diag(both[0][0]), 1.21 + 0.09, rtol=1e-12)
        np.testing.assert_allclose(both[1], jnp.sum(model.log_likelihood(params, al.Data(X[:, 0], Y[:, None], None).batch())), rtol=1e-9)


def test_a_product_learns_one_scale() -> None:
    product = (gp.RBF() * gp.Periodic()).bind(X)
    assert "log_scale" in product.median(jax.random.key(0))["0"] and "log_scale" not in product.median(jax.random.key(0))["1"]


def test_leave_one_out_is_what_leaving_out_gives(fitted: al.Fit) -> None:
    all_at_once = gp.leave_one_out(fitted)
    for i in (0, 17):
        rest = np.delete(np.arange(len(X)), i)
        one = gp.Conditioned(fitted.posterior.base, X[rest], Y[rest, None])
        mean, covariance = one.joint(jax.random.key(0), fitted.model, X[i : i + 1], 1)
        noise = np.exp(2 * fitted.posterior.params["likelihood"]["log_scale"][0])
        np.testing.assert_allclose(all_at_once.mean[i, 0], mean[0, 0], rtol=1e-8)
        np.testing.assert_allclose(all_at_once.variance[i, 0], covariance[0, 0, 0, 0] + noise, rtol=1e-8)
        gauss = -0.5 * ((Y[i] - mean[0, 0]) ** 2 / all_at_once.variance[i, 0] + np.log(2 * np.pi * all_at_once.variance[i, 0]))
        np.testing.assert_allclose(all_at_once.log_density[i, 0], gauss, rtol=1e-7)


def test_more_rows(fitted: al.Fit) -> None:
    """extend: the factor of all rows, grown; update: hyper-parameters learned again from all of them."""
    more = (NEW, np.sin(2 * NEW[:, 0]) + 0.3 * NEW[:, 1])
    grown = gp.extend(fitted, more)
    fresh = gp.Conditioned(fitted.posterior.base, np.concatenate([X, NEW]), np.concatenate([Y, more[1]])[:, None])
    at = X[:4] + 0.1
    for ours, truth in zip(grown.joint(0, at), fresh.joint(jax.random.key(0), fitted.model, at, 1), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=1e-7, atol=1e-10)
    with jax.enable_x64(True):
        evidence = float(fitted.model.log_evidence(fitted.posterior.params, fresh.x, fresh.y))
    np.testing.assert_allclose(grown.log_evidence.value, evidence, rtol=1e-8)
    updated = fitted.update(more)
    assert updated.manifest["data"]["num_data"] == 36 and grown.manifest["data"]["num_data"] == 36
    assert updated.log_evidence.value > evidence  # the best for all rows is better there than the best for some


def test_draws_as_functions(fitted: al.Fit) -> None:
    """Matheron's rule: the posterior mean within 5 standard errors, its covariance but for the features' error; one function, whatever the rows it is asked at."""
    mean, covariance = fitted.joint(0, NEW)
    mean, covariance, size = mean[:, 0], covariance[:, 0, :, 0], 4000
    drawn = gp.paths(0, fitted, size, 4000)
    values = drawn(NEW)[..., 0]
    assert np.all(np.abs(values.mean(0) - mean) < 5 * np.sqrt(np.diag(covariance) / size) + 1e-3)
    assert np.abs(np.cov(values.T) - covariance).max() < 0.1 * covariance.max()
    np.testing.assert_allclose(np.concatenate([drawn(NEW[:2]), drawn(NEW[2:])], axis=1)[..., 0], values, rtol=1e-9, atol=1e-9)
    with pytest.raises(al.ModelError, match="random features"):
        gp.paths(0, dataclasses.replace(fitted, model=dataclasses.replace(fitted.model, kernel=gp.Linear())))


def test_draws_of_functions_have_the_joint_covariance(fitted: al.Fit) -> None:
    mean, covariance = fitted.joint(0, NEW)
    mean, covariance = mean[:, 0], covariance[:, 0, :, 0]
    draws = fitted.functions(1, NEW, 4000)
    error = np.sqrt(np.diag(covariance) / 4000)
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * error)
    spread = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / 4000)  # of a covariance of Gaussians
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5 * spread)


def test_two_columns_are_two_processes() -> None:
    both = np.stack([Y, np.cos(X[:, 1])], axis=1)
    model = gp.GP(gp.RBF(1.0, 1.0), gp.Zero(), al.Gaussian())
    params = {"kernel": {}, "mean": {}, "likelihood": {"log_scale": np.log([0.3, 0.1])}}
    together = gp.Conditioned(al.posterior.Point(params), X, both)
    mean, covariance = together.joint(jax.random.key(0), model.bind(X, both), NEW, 1)
    for column, noise in enumerate((0.3, 0.1)):
        alone = al.fit(0, gp.GP(gp.RBF(1.0, 1.0), gp.Zero(), al.Gaussian(noise)), (X, both[:, column]), gp.Evidence())
        one_mean, one = alone.joint(0, NEW)
        np.testing.assert_allclose(mean[:, column], one_mean[:, 0], rtol=1e-9)
        np.testing.assert_allclose(covariance[:, column, :, column], one[:, 0, :, 0], rtol=1e-8, atol=1e-12)
    assert np.all(covariance[:, 0, :, 1] == 0)


def test_uncertain_hyper_parameters_make_a_mixture(fitted: al.Fit) -> None:
    """Draws of θ: the mean is the average of the means, the variance has both parts."""
    point = jax.tree.map(np.asarray, fitted.posterior.params)
    params = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 0.5]), point)
    mixed = gp.Conditioned(al.posterior.Draws(params), X, Y[:, None])
    parts = [gp.Conditioned(al.posterior.Point(jax.tree.map(lambda leaf: leaf[i], params)), X, Y[:, None]) for i in range(2)]  # noqa: B023
    ends = [part.joint(jax.random.key(0), fitted.model, NEW, 1) for part in parts]
    mean = np.mean([end[0][:, 0] for end in ends], axis=0)
    variance = np.mean([np.diag(end[1][:, 0, :, 0]) + (end[0][:, 0] - mean) ** 2 for end in ends], axis=0)
    for draws in (
        mixed.outputs(jax.random.key(1), fitted.model, NEW, 8000).draws[..., 0],
        mixed.functions(jax.random.key(2), fitted.model, NEW, 8000).draws[..., 0],
    ):
        assert np.all(np.abs(draws.mean(0) - mean) < 5 * np.sqrt(variance / 8000))
        fourth = np.mean((draws - mean) ** 4, axis=0)
        assert np.all(np.abs(np.var(draws, axis=0) - variance) < 5 * np.sqrt((fourth - variance**2) / 8000))
    assert jax.tree.leaves(mixed.sample(jax.random.key(3), 7))[0].shape[0] == 7


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.repeat(X[:2], 4, axis=0), np.repeat(Y[:2], 4)),
        (X[:8], np.full(8, 3.0)),
        (X[:8], X[:8, 0] ** 2),
        (1e3 * X[:8], np.sin(X[:8, 0])),
        (np.zeros((1, 2)), np.ones(1)),
    ],
    ids=["duplicates", "constant", "no noise", "another scale", "one row"],
)
def test_awkward_data_are_survived(x: np.ndarray, y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)  # the jitter is reported
        fit = al.fit(0, gp.GP(gp.RBF()), (x, y), gp.Evidence(num_restarts=2))
        predictive = fit.predict(1, x)
    assert np.isfinite(fit.log_evidence.value)
    assert np.all(np.isfinite(predictive.mean)) and np.all(predictive.std > 0)
    if np.ptp(x) < 100:
        assert np.abs(predictive.mean - y).max() < (1.0 if len(y) == 1 else 0.2)


def test_the_jitter_is_reported() -> None:
    x = np.repeat(X[:3], 2, axis=0)
    model = gp.GP(gp.RBF(1.0, 1.0), gp.Zero(), al.Gaussian(1e-9))
    with pytest.warns(al.HealthWarning, match="nearly singular"):
        al.fit(0, model, (x, np.repeat(Y[:3], 2)), gp.Evidence()).predict(0, x)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(al.ModelError, match="SparseGP"):
        gp.GP(gp.RBF(), likelihood=al.Bernoulli())
    with pytest.raises(al.DataError, match="weights"):
        al.fit(0, gp.GP(gp.RBF()), (X, Y, np.ones(30)), al.MAP(num_steps=2))
    with pytest.raises(al.ModelError, match="columns"):
        al.fit(0, gp.GP(gp.RBF(columns=5)), (X, Y), gp.Evidence())
    with pytest.raises(al.MethodError, match="integrate out"):
        al.fit(0, al.BNN(al.networks.MLP(2, (3,), 1)), (X, Y), gp.Evidence())


@dataclasses.dataclass(frozen=True)
class VarianceHalfNormal(al.hyperpriors.HalfNormal):
    """σ² ~ HalfNormal(1), seen through u = log σ: the density of v = 2u, and the log 2 of dv/du."""

    def log_prob_unconstrained(self, u: jax.Array) -> jax.Array:
        return super().log_prob_unconstrained(2 * u) + np.log(2)

    def sample_unconstrained(self, key: jax.Array, shape: tuple = ()) -> jax.Array:
        return super().sample_unconstrained(key, shape) / 2

    def initial(self) -> float:
        return super().initial() / 2


@pytest.mark.long
def test_reference_draws_of_a_gp_regression() -> None:
    """posteriordb gp_pois_regr-gp_regr, 10,000 draws by Stan; its sigma is the noise variance: the covariance adds it unsquared."""
    x = np.arange(-10.0, 11.0, 2.0)
    y = np.array([4.75906, 1.59423, 2.99548, 5.27501, 1.66472, 2.24347, 2.8914, 4.08681, 4.60588, 0.802364, 3.92136])
    model = gp.GP(gp.RBF(al.hyperpriors.Gamma(25.0, 4.0), al.HalfNormal(2.0)), gp.Zero(), al.Gaussian(VarianceHalfNormal(1.0)))
    fit = al.fit(0, model, (x, y), al.NUTS(num_samples=2000, num_warmup=1000, num_chains=4))
    draws = fit.posterior.params
    ours = {
        "rho": np.exp(draws["kernel"]["log_length"][:, 0]),
        "alpha": np.exp(draws["kernel"]["log_scale"]),
        "sigma": np.exp(2 * draws["likelihood"]["log_scale"][:, 0]),
    }
    theirs = {"rho": (6.87434818, 1.26575583), "alpha": (2.44239984, 0.78183267), "sigma": (1.82873107, 0.50501614)}
    for name, (mean, sd) in theirs.items():
        error = float(al.convergence.mcse(np.asarray(ours[name]).reshape(4, -1)))
        assert error < 0.03 * sd, name
        assert abs(ours[name].mean() - mean) < 5 * np.hypot(error, sd / np.sqrt(9848)), name
