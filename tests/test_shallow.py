"""Shallow nets: the closed-form p(D | γ) and its one-column updates, the hierarchical prior, and the net under general methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _marginal as marginal
from aleator._errors import ModelError
from aleator.hyperpriors import InverseGamma
from aleator.shallow import Hierarchical, ShallowNet, pack, unpack, wishart_factor

# ------------------------------------------------------------------------------------------------------------- the lemma (E2)


def problem(seed: int, n: int = 30, p: int = 5, k: int = 2):
    rng = np.random.default_rng(seed)
    design, y = 1 / (1 + np.exp(-3 * rng.normal(size=(n, p)))), rng.normal(size=(n, k))
    noise, mean, variance = rng.uniform(0.05, 0.5, k), rng.normal(size=(p, k)), rng.uniform(0.2, 3.0, (p, k))
    return design, y, noise, mean, variance


def brute(design, y, noise, mean, variance, weight=None):
    """log N(y; Hb₀, σ²W⁻¹ + HVHᵀ), over outputs: N×N, no algebra shared with the library."""
    from scipy.stats import multivariate_normal

    spread = np.eye(len(y)) if weight is None else np.diag(1 / weight)
    return sum(
        multivariate_normal(design @ mean[:, c], noise[c] * spread + design @ np.diag(variance[:, c]) @ design.T).logpdf(y[:, c])
        for c in range(y.shape[1])
    )


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("seed", range(3))
def test_the_lemma_is_the_multivariate_normal_density(seed, x64):  # lecture: E2
    design, y, noise, mean, variance = problem(seed)
    value = marginal.log_marginal(marginal.moments(design, y), noise, mean, variance)
    np.testing.assert_allclose(value, brute(design, y, noise, mean, variance), rtol=0, atol=1e-9)


def test_the_lemma_holds_with_no_data_and_with_one_unit(x64):
    design, y, noise, mean, variance = problem(3, n=1, p=1, k=1)
    value = marginal.log_marginal(marginal.moments(design, y), noise, mean, variance)
    np.testing.assert_allclose(value, brute(design, y, noise, mean, variance), rtol=0, atol=1e-9)
    none = marginal.log_marginal(marginal.moments(design[:0], y[:0]), noise, mean, variance)
    np.testing.assert_allclose(none, 0.0, atol=1e-9)


def test_weights_of_rows_count_as_repetitions(x64):
    design, y, noise, mean, variance = problem(4)
    weight = np.random.default_rng(0).integers(1, 4, len(y)).astype(float)
    rows = np.repeat(np.arange(len(y)), weight.astype(int))
    weighted = marginal.log_marginal(marginal.moments(design, y, weight), noise, mean, variance)
    np.testing.assert_allclose(weighted, brute(design[rows], y[rows], noise, mean, variance), rtol=0, atol=1e-9)


def test_blank_columns_cost_and_explain_nothing(x64):
    design, y, noise, mean, variance = problem(5)
    mask = np.array([True, False, True, True, False])
    args = marginal.blank(mask, marginal.moments(design, y), mean, variance)
    value = marginal.log_marginal(args[0], noise, *args[1:])
    np.testing.assert_allclose(value, brute(design[:, mask], y, noise, mean[mask], variance[mask]), rtol=0, atol=1e-9)


def test_the_posterior_of_beta_has_its_closed_form_mean_and_covariance(x64):
    design, y, noise, mean, variance = problem(6)
    now = marginal.condition(marginal.moments(design, y), noise, mean, variance)
    for c in range(2):
        precision = design.T @ design / noise[c] + np.diag(1 / variance[:, c])
        expected = np.linalg.solve(precision, design.T @ y[:, c] / noise[c] + mean[:, c] / variance[:, c])
        np.testing.assert_allclose(marginal.draw_from(np.zeros((2, 5)), now)[:, c], expected, atol=1e-10)
        # β is affine in z: unit vectors give the columns of a root of the covariance.
        z = np.zeros((5, 2, 5))
        z[:, c] = np.eye(5)
        root = np.stack([marginal.draw_from(one, now)[:, c] - expected for one in z], axis=1)
        np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), atol=1e-10)


def test_draws_of_beta_are_standard_normal_in_the_whitened_space(x64):
    design, y, noise, mean, variance = problem(7)
    now = marginal.condition(marginal.moments(design, y), noise, mean, variance)
    draws = jax.vmap(lambda key: marginal.draw(key, now))(jax.random.split(jax.random.key(0), 20_000))
    white = np.einsum("kji,sjk->ski", now.factor, draws) - now.half
    assert np.max(np.abs(white.mean(axis=0))) < 5 / np.sqrt(20_000)
    assert np.max(np.abs((white**2).mean(axis=0) - 1)) < 5 * np.sqrt(2 / 20_000)


# ------------------------------------------------------------------------------------------------------- one column at a time


def test_a_column_at_the_end_is_worth_its_gain(x64):
    design, y, noise, mean, variance = problem(8)
    before = marginal.condition(marginal.moments(design[:, :4], y), noise, mean[:4], variance[:4])
    h = design[:, 4]
    new = marginal.border(before, design[:, :4].T @ h, h @ h, h @ y, noise, mean[4], variance[4])
    expected = brute(design, y, noise, mean, variance) - brute(design[:, :4], y, noise, mean[:4], variance[:4])
    np.testing.assert_allclose(marginal.gain(new, mean[4], variance[4]), expected, rtol=0, atol=1e-9)
    whole = marginal.condition(marginal.moments(design, y), noise, mean, variance)
    after = marginal.append(before, new)
    np.testing.assert_allclose(after.factor, whole.factor, atol=1e-10)
    np.testing.assert_allclose(after.half, whole.half, atol=1e-10)


@pytest.mark.parametrize("at", range(5))
def test_a_column_taken_out_leaves_the_posterior_of_the_others(at, x64):
    design, y, noise, mean, variance = problem(9)
    whole = marginal.condition(marginal.moments(design, y), noise, mean, variance)
    rest = np.delete(np.arange(5), at)
    expected = marginal.condition(marginal.moments(design[:, rest], y), noise, mean[rest], variance[rest])
    found = marginal.remove(whole, at)
    np.testing.assert_allclose(found.factor, expected.factor, atol=1e-10)
    np.testing.assert_allclose(found.half, expected.half, atol=1e-10)
    # In its place: the others as before, the slot blank, and its rebirth worth what the death cost.
    hollow = jax.jit(marginal.empty)(whole, at)
    np.testing.assert_allclose(hollow.factor[:, rest][:, :, rest], expected.factor, atol=1e-10)
    np.testing.assert_allclose(hollow.half[:, rest], expected.half, atol=1e-10)
    np.testing.assert_array_equal(hollow.factor[:, at], np.eye(5)[[at, at]])
    np.testing.assert_array_equal(hollow.half[:, at], 0.0)
    h = design[:, at]
    new = marginal.border(hollow, np.where(np.arange(5) == at, 0.0, design.T @ h), h @ h, h @ y, noise, mean[at], variance[at])
    lost = brute(design, y, noise, mean, variance) - brute(design[:, rest], y, noise, mean[rest], variance[rest])
    np.testing.assert_allclose(marginal.gain(new, mean[at], variance[at]), lost, rtol=0, atol=1e-9)


def test_a_thousand_replacements_do_not_lose_digits(x64):
    """Columns are replaced one after the other on a badly conditioned design (nearly equal units, noise 10⁻³)."""
    rng = np.random.default_rng(10)
    x = np.linspace(-1, 1, 100)
    column = lambda: 1 / (1 + np.exp(-x * rng.normal(2.0, 0.3) - 0.1 * rng.normal()))
    design, y, noise = np.stack([column() for _ in range(6)], axis=1), np.sin(3 * x)[:, None], np.array([1e-3])
    now = marginal.condition(marginal.moments(design, y), noise, 0.0, 25.0)

    @jax.jit
    def replace(now, rest, h):
        left = marginal.remove(now, 0)
        return marginal.append(left, marginal.border(left, rest.T @ h, h @ h, h @ y, noise, 0.0, 25.0))

    for _ in range(1000):
        h = column()
        now = replace(now, design[:, 1:], h)
        design = np.concatenate([design[:, 1:], h[:, None]], axis=1)
    stats = marginal.moments(design, y)
    found = marginal.log_marginal_at(now, stats, noise, 0.0, 25.0)
    expected = brute(design, y, noise, np.zeros((6, 1)), np.full((6, 1), 25.0))
    assert np.linalg.cond(np.asarray(stats.gram) / noise + np.eye(6) / 25) > 1e6
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_repeated_column_keeps_its_pivot(x64):
    """The Schur complement of a column that is already there is 1/v plus what rounding makes of zero: never below 1/v."""
    design, y, noise, mean, variance = problem(11, p=2)
    noise = noise * 1e-12
    now = marginal.condition(marginal.moments(design, y), noise, mean, variance * 1e6)
    h = design[:, 0]
    new = marginal.border(now, design.T @ h, h @ h, h @ y, noise, mean[0], variance[0] * 1e6)
    assert np.all(new.pivot >= 1 / (variance[0] * 1e6)) and np.isfinite(marginal.gain(new, mean[0], variance[0]))


def test_gradients_of_the_lemma_are_finite(x64):
    design, y, noise, mean, variance = problem(12)
    slope = jax.grad(lambda d: marginal.log_marginal(marginal.moments(d, y), noise, mean, variance))(jnp.asarray(design))
    assert np.all(np.isfinite(slope))


# ------------------------------------------------------------------------------------------------------------------ the prior


def hierarchical() -> Hierarchical:
    return Hierarchical(
        a_beta=0.3, A_beta=0.5, c_beta=5.0, C_beta=0.7, a_gamma=(0.2, -0.4, 1.0), A_gamma=(0.6, 1.0, 2.0), c_gamma=6.0, C_gamma=SPREAD
    )


SPREAD = ((1.0, 0.3, 0.0), (0.3, 2.0, -0.5), (0.0, -0.5, 1.5))
NET = ShallowNet(4, linear_term=True, prior=hierarchical(), likelihood=al.Gaussian(InverseGamma(2.0, 0.6)), scaled=False)


def bound(net: ShallowNet, k: int = 2) -> ShallowNet:
    return net.bind(np.zeros((5, 2)), np.zeros((5, k)))


def test_the_prior_is_the_one_of_the_deck(x64):  # lecture: E2
    """Every factor from SciPy on its own scale; Jacobians of log σ, log σ_β and the packed factor by automatic differentiation."""
    from scipy import stats

    net = bound(NET)
    params = jax.jit(net.sample_prior)(jax.random.key(0))
    weights, hyper, log_scale = params["network"], params["prior"], params["likelihood"]["log_scale"]
    precision = lambda packed: unpack(packed) @ unpack(packed).T
    var_beta, spread = np.exp(2 * hyper["log_sigma_beta"]), np.linalg.inv(precision(hyper["factor_gamma"]))
    total = stats.norm(0.3, np.sqrt(0.5)).logpdf(hyper["mu_beta"]).sum()
    total += stats.gamma(2.5, scale=1 / (2.5 * 0.7)).logpdf(1 / var_beta).sum()
    total += stats.gamma(2.0, scale=1 / 0.6).logpdf(np.exp(-2 * log_scale)).sum()
    total += stats.multivariate_normal([0.2, -0.4, 1.0], np.diag([0.6, 1.0, 2.0])).logpdf(hyper["mu_gamma"])
    total += stats.wishart(6.0, np.linalg.inv(6.0 * np.array(SPREAD))).logpdf(precision(hyper["factor_gamma"]))
    total += sum(stats.norm(hyper["mu_beta"], np.sqrt(var_beta)).logpdf(row).sum() for row in weights["beta"])
    total += sum(stats.multivariate_normal(hyper["mu_gamma"], spread).logpdf(row) for row in weights["gamma"])
    total += stats.norm(0.0, 2.0).logpdf(weights["linear"]).sum()
    for u in (*hyper["log_sigma_beta"], *log_scale):
        total += np.log(abs(jax.grad(lambda v: jnp.exp(-2 * v))(u)))
    jacobian = jax.jacobian(lambda packed: precision(packed)[np.tril_indices(3)])(hyper["factor_gamma"])
    total += np.linalg.slogdet(jacobian)[1]
    np.testing.assert_allclose(net.log_prior(params), total, rtol=1e-10)


@pytest.mark.parametrize("net", [NET, ShallowNet(3)], ids=["all given", "defaults"])
def test_prior_draws_have_the_prior_density(net, x64):
    """E[∂ᵢ log p] = 0 and E[uᵢ ∂ᵢ log p] = −1 for every coordinate, over draws of `sample_prior`: any wrong scale, location or Jacobian
    in either breaks one of them."""
    net = bound(net)
    draws = jax.jit(jax.vmap(net.sample_prior))(jax.random.split(jax.random.key(1), 20_000))
    slopes = jax.jit(jax.vmap(jax.grad(net.log_prior)))(draws)
    for u, slope in zip(jax.tree.leaves(draws), jax.tree.leaves(slopes), strict=True):
        for value, expected in ((slope, 0.0), (u * slope, -1.0)):
            error = np.std(value, axis=0) / np.sqrt(20_000)
            assert np.all(np.abs(np.mean(value, axis=0) - expected) < 5 * error)


def test_wishart_factors_have_the_wisharts_moments(x64):
    """E Λ = νB⁻¹ and Var Λ_ij = ν(W_ij² + W_ii W_jj), W = B⁻¹."""
    inverse, degrees = 6.0 * np.array(SPREAD), 7.5
    key_chi, key_z = jax.random.split(jax.random.key(2))
    chi = 2 * jax.random.gamma(key_chi, (degrees - np.arange(3)) / 2, (40_000, 3))
    factor = jax.vmap(lambda c, z: wishart_factor(c, z, jnp.asarray(inverse)))(chi, jax.random.normal(key_z, (40_000, 3, 3)))
    assert np.all(np.triu(factor, 1) == 0)
    draws = np.asarray(factor @ np.swapaxes(factor, 1, 2))
    w = np.linalg.inv(inverse)
    variance = degrees * (w**2 + np.outer(np.diag(w), np.diag(w)))
    assert np.all(np.abs(draws.mean(axis=0) - degrees * w) < 5 * np.sqrt(variance / 40_000))
    error = np.std((draws - degrees * w) ** 2, axis=0) / np.sqrt(40_000)
    assert np.all(np.abs(draws.var(axis=0) - variance) < 5 * error)


def test_packing_is_undone_by_unpacking():
    factor = jnp.array([[2.0, 0.0], [-1.0, 0.5]])
    np.testing.assert_allclose(pack(factor), [np.log(2.0), -1.0, np.log(0.5)], rtol=1e-6)
    np.testing.assert_allclose(unpack(pack(factor)), factor, rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- the network


def test_outputs_are_those_of_the_formula_in_the_units_of_the_data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(50.0, 9.0, size=(30, 2)), rng.normal(-4.0, 3.0, size=(30, 2))
    net = ShallowNet(3, linear_term=True).bind(x, y)
    params = jax.jit(net.sample_prior)(jax.random.key(0))
    weights = params["network"]
    z = np.c_[np.ones(30), (x - x.mean(axis=0)) / x.std(axis=0)]
    f = z @ weights["linear"] + 1 / (1 + np.exp(-z @ weights["gamma"].T)) @ weights["beta"]
    np.testing.assert_allclose(net.outputs(params, x), y.mean(axis=0) + y.std(axis=0) * f, rtol=2e-4, atol=2e-3)
    np.testing.assert_allclose(net.extra(params)["scale"], y.std(axis=0) * np.exp(params["likelihood"]["log_scale"]), rtol=1e-5)


def test_a_net_that_has_met_data_keeps_its_units():
    x, y = np.arange(10.0)[:, None], np.arange(10.0)[:, None]
    net = ShallowNet(3).bind(x, y)
    assert net.bind(100 * x, y) == net and hash(net) == hash(net.bind(x, 7 * y))
    assert ShallowNet(3, scaled=False).bind(x, y).x_scale == (1.0,)
    with pytest.raises(ModelError, match="met other data"):
        net.bind(np.ones((10, 2)), y)


def test_constant_columns_do_no_harm():
    net = ShallowNet(2).bind(np.ones((5, 2)), np.zeros((5, 1)))
    assert np.all(np.isfinite(net.outputs(net.init(jax.random.key(0)), np.ones((5, 2)))))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ShallowNet(0), "units"),
        (lambda: ShallowNet(2, activation="sigmoidal"), "Unknown activation"),
        (lambda: ShallowNet(2, likelihood=al.Bernoulli()), "Gaussian noise"),
        (lambda: ShallowNet(2, prior="normal"), "no such prior"),
        (lambda: Hierarchical(c_beta=-1.0), "c_beta"),
        (lambda: ShallowNet(2, prior=Hierarchical(c_gamma=1.0)).bind(np.ones((5, 2)), np.ones((5, 1))), "improper"),
        (lambda: ShallowNet(2, prior=Hierarchical(C_gamma=(1.0, 2.0))).bind(np.ones((5, 2)), np.ones((5, 1))), "C_gamma"),
        (lambda: ShallowNet(2, prior=Hierarchical(a_gamma=(1.0, 2.0))).bind(np.ones((5, 2)), np.ones((5, 1))), "a_gamma"),
        (lambda: ShallowNet(2).bind(np.ones((5, 2, 2)), np.ones((5, 1))), "table of numbers"),
        (lambda: ShallowNet(2).init(jax.random.key(0)), "not met data"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, match):
    with pytest.raises(al.AleatorError, match=match):
        make()


def test_weight_decay_is_the_map_of_a_normal_prior():  # lecture: E1
    """With fixed noise and a normal prior the mode minimises Σ(y − f)² + λ₁Σβ² + λ₂Σγ², λ = σ²/s²; gradients vanish at the fit."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, size=(40, 1))
    y = np.tanh(2 * x[:, 0]) + 0.1 * rng.normal(size=40)
    net = ShallowNet(2, prior=al.Normal({"gamma": 2.0, "beta": 1.5}), likelihood=al.Gaussian(0.2), scaled=False)
    fit = al.fit(0, net, (x, y), al.MAP(num_steps=4000, learning_rate=0.01))
    weights = fit.posterior.params["network"]

    def objective(w):
        f = jax.nn.sigmoid(jnp.asarray(np.c_[np.ones(40), x]) @ w["gamma"].T) @ w["beta"]
        decay = 0.2**2 / 1.5**2 * jnp.sum(w["beta"] ** 2) + 0.2**2 / 2.0**2 * jnp.sum(w["gamma"] ** 2)
        return jnp.sum((y - f[:, 0]) ** 2) + decay

    start = net.bind(x, y[:, None]).init(jax.random.key(5))["network"]
    size = lambda w: float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(objective)(w)))))
    assert size(weights) < 1e-2 * size(start)
    assert np.sqrt(np.mean((fit.predict(1, x).mean - np.tanh(2 * x[:, 0])) ** 2)) < 0.1
