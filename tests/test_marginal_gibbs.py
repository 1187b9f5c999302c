"""MarginalGibbs: its conditionals, its invariance (Geweke, simulation-based calibration), and mutations of it that must be caught."""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _marginal as marginal
from aleator import convergence
from aleator._errors import MethodError
from aleator.data import Batch
from aleator.hyperpriors import InverseGamma
from aleator.methods import marginal_gibbs as gibbs
from aleator.methods.marginal_gibbs import MarginalGibbs, Settings
from aleator.shallow import Hierarchical, ShallowNet

CHI_SQUARED = 43.82  # χ²₁₉ at 0.999
THIN = 8  # sweeps between draws of simulation-based calibration


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


NOISE = InverseGamma(5.0, 1.0)
FOUR = Settings(tries=4)


def bound(net: ShallowNet, x, k: int = 1) -> ShallowNet:
    return net.bind(np.asarray(x), np.zeros((len(x), k)))


def rows_of(net, x, y, weight=None):
    return gibbs.rows_of(net, Batch(jnp.asarray(x), jnp.asarray(y), None if weight is None else jnp.asarray(weight)))


def plain(units: int = 3, noise=NOISE, **more) -> ShallowNet:
    """Fixed hyper-parameters and data as they are: nothing in the model depends on the data."""
    prior = al.Normal({"gamma": 2.0, "beta": 1.0} | ({"linear": 0.7} if more.get("linear_term") else {}))
    return ShallowNet(units, prior=prior, likelihood=al.Gaussian(noise), scaled=False, **more)


# --------------------------------------------------------------------------------------------------------- parts of a sweep


@pytest.mark.parametrize("linear_term", [False, True])
def test_after_the_moves_the_factor_is_that_of_the_new_units(linear_term, x64):
    """The ring ends where it began: its factor after m removals and borders is the one computed from scratch, two outputs, weighted rows."""
    rng = np.random.default_rng(0)
    x, y, weight = rng.normal(size=(40, 2)), rng.normal(size=(40, 2)), rng.uniform(0.5, 2.0, 40)
    net = bound(plain(5, linear_term=linear_term), x, k=2)
    values = gibbs.values_of(net, jax.jit(net.sample_prior)(jax.random.key(0)))._replace(noise=jnp.array([0.1, 0.3]))
    rows = rows_of(net, x, y, weight)
    move = jax.jit(lambda key: gibbs.move_units(key, values, rows, net, jnp.zeros(5), Settings(tries=3)))
    gamma, now, design, accepted = move(jax.random.key(1))
    assert np.any(gamma != values.gamma) and np.any(gamma == values.gamma) and np.all((accepted > 0) & (accepted <= 1))
    psi = lambda g: 1 / (1 + np.exp(-np.c_[np.ones(40), x] @ np.asarray(g).T))
    full = np.c_[np.c_[np.ones(40), x][:, : 3 * linear_term], psi(gamma)]
    np.testing.assert_allclose(design.T, full * np.sqrt(weight)[:, None], atol=1e-12)
    expected = marginal.condition(marginal.moments(full, y, weight), values.noise, *gibbs.prior_of_beta(values, net))
    np.testing.assert_allclose(now.factor, expected.factor, atol=1e-9)
    np.testing.assert_allclose(now.half, expected.half, atol=1e-9)


def test_the_log_likelihood_is_the_models(x64):
    rng = np.random.default_rng(1)
    x, y, weight = rng.normal(3.0, 5.0, size=(30, 2)), rng.normal(100.0, 7.0, size=(30, 2)), rng.uniform(0.5, 2.0, 30)
    net = ShallowNet(4, linear_term=True).bind(x, y)
    params = jax.jit(net.sample_prior)(jax.random.key(0))
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), index=jnp.arange(30))
    found = gibbs.log_likelihood(net, gibbs.values_of(net, params), gibbs.rows_of(net, batch))
    np.testing.assert_allclose(found, batch.weighted_sum(net.log_likelihood(params, batch)), rtol=1e-10)


@pytest.mark.parametrize("net", [ShallowNet(3, linear_term=True), plain(3), plain(2, noise=0.3, linear_term=True)])
def test_values_and_parameters_are_inverses(net, x64):
    net = bound(net, np.random.default_rng(0).normal(size=(10, 2)), k=2)
    params = jax.jit(net.sample_prior)(jax.random.key(0))
    back = gibbs.params_of(net, gibbs.values_of(net, params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), params, back)


@pytest.mark.parametrize("shape", [0.3, 1.0, 2.5, 100.0])
def test_gamma_draws_are_gamma(shape, x64):
    from scipy import stats

    draws = gibbs.gammas(jax.random.key(0), jnp.full((50_000,), shape))
    assert stats.kstest(np.asarray(draws), stats.gamma(shape).cdf).pvalue > 1e-4


def test_conditionals_of_the_hyperparameters_are_those_of_the_log_joint(x64):
    """At fixed β and γ: σ alone, and (μ_β, σ_β) together, against quadrature of the model's own log joint, Jacobians and all."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(8, 1)), rng.normal(size=(8, 1))
    net = bound(ShallowNet(4, scaled=False, prior=Hierarchical(a_beta=0.5, A_beta=0.3, c_beta=3.0, C_beta=0.8)), x)
    rows, start = rows_of(net, x, y), gibbs.values_of(net, jax.jit(net.sample_prior)(jax.random.key(3)))
    design = jax.nn.sigmoid(rows.x @ start.gamma.T).T

    def joint(log_scale, mu, log_sigma):
        values = start._replace(noise=jnp.exp(2 * log_scale)[None], mu_beta=mu[None], var_beta=jnp.exp(2 * log_sigma)[None])
        return net.log_prior(gibbs.params_of(net, values)) + gibbs.log_likelihood(net, values, rows)

    def chain(key):
        step = lambda values, i: (gibbs.draw_hyper(jax.random.fold_in(key, i), values, design, rows, net),) * 2
        return jax.lax.scan(step, start, jnp.arange(260))[1]

    drawn = jax.tree.map(lambda leaf: leaf[:, 10:], jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(4), 80)))
    one = jnp.linspace(-4.0, 3.0, 1001)
    zero = jnp.zeros(())
    weight = jax.nn.softmax(jax.vmap(lambda u: joint(u, zero, zero))(one))
    for power in (1, 2):
        found = 0.5 * np.log(np.asarray(drawn.noise)[..., 0])
        assert abs((found**power).mean() - weight @ one**power) < 5 * convergence.mcse(found**power)
    mu, log_sigma = (grid.ravel() for grid in jnp.meshgrid(jnp.linspace(-4, 4, 301), jnp.linspace(-3, 3, 301)))
    weight = jax.nn.softmax(jax.vmap(lambda a, b: joint(zero, a, b))(mu, log_sigma))
    found = np.stack([np.asarray(drawn.mu_beta)[..., 0], 0.5 * np.log(np.asarray(drawn.var_beta)[..., 0])], axis=-1)
    for f in (lambda a, b: a, lambda a, b: b, lambda a, b: a**2, lambda a, b: b**2, lambda a, b: a * b):
        values = f(found[..., 0], found[..., 1])
        assert abs(values.mean() - weight @ f(mu, log_sigma)) < 5 * convergence.mcse(values)


# ------------------------------------------------------------------------------------------- one unit, against quadrature


def test_one_unit_agrees_with_quadrature(x64):
    """β integrated by the lemma, (γ₀, γ₁, log σ) on a grid: means of σ, γ₁², f(0.5) to 5 Monte Carlo errors."""
    rng = np.random.default_rng(3)
    x = np.linspace(-2, 2, 12)[:, None]
    y = 1.5 / (1 + np.exp(-2 * x - 0.5)) + 0.3 * rng.normal(size=(12, 1))
    net = bound(plain(1, InverseGamma(3.0, 0.3)), x)
    noise_prior, rows = net.likelihood.scale, rows_of(net, x, y)

    def cell(bias, slope, log_scale):
        column = jax.nn.sigmoid(bias + slope * x[:, 0])
        noise = jnp.exp(2 * log_scale)[None]
        stats = marginal.moments(column[:, None], y)
        now = marginal.condition(stats, noise, 0.0, 1.0)
        weight = marginal.log_marginal(stats, noise, 0.0, 1.0) - (bias**2 + slope**2) / 8 + noise_prior.log_prob_unconstrained(log_scale)
        mean = marginal.draw_from(jnp.zeros((1, 1)), now)[0, 0] * jax.nn.sigmoid(bias + 0.5 * slope)
        return weight, jnp.stack([jnp.exp(log_scale), slope**2, mean])

    axes = (jnp.linspace(-8, 8, 81), jnp.linspace(-8, 8, 81), jnp.linspace(-2.6, 0.6, 41))
    weight, wanted = jax.jit(jax.vmap(cell))(*(axis.ravel() for axis in jnp.meshgrid(*axes)))
    truth = jax.nn.softmax(weight) @ wanted

    draws = run(net, rows, jax.random.key(0), 40, 1600)
    f = np.asarray(draws.beta[..., 0, 0] * jax.nn.sigmoid(draws.gamma[..., 0, 0] + 0.5 * draws.gamma[..., 0, 1]))
    found = np.stack([np.sqrt(np.asarray(draws.noise)[..., 0]), np.asarray(draws.gamma)[..., 0, 1] ** 2, f], axis=-1)[:, 100:]
    assert np.all(np.abs(found.mean(axis=(0, 1)) - truth) < 5 * convergence.mcse(found))
    assert np.all(convergence.mcse(found) < 0.03 * found.std(axis=(0, 1)))


def run(net, rows, key, chains: int, sweeps: int, sweep=gibbs.sweep, settings=FOUR, scale=-0.5):
    """Values (chains, sweeps, …) of chains from the prior, with a fixed proposal scale."""

    def chain(key):
        key_start, key_run = jax.random.split(key)
        values = gibbs.values_of(net, net.sample_prior(key_start))
        step = lambda values, i: (sweep(jax.random.fold_in(key_run, i), values, rows, net, jnp.full(net.units, scale), settings)[0],) * 2
        return jax.lax.scan(step, values, jnp.arange(sweeps))[1]

    return jax.jit(jax.vmap(chain))(jax.random.split(key, chains))


# --------------------------------------------------------------------------------------------------------- the deck's order


def deck_sweep(key, values, rows, net, log_scale, settings):
    """As printed in deck 004: β first, then the units with β integrated out, then ν from the β that belonged to the old units."""
    key_beta, key_units, key_hyper = jax.random.split(key, 3)
    design = jax.nn.sigmoid(rows.x @ values.gamma.T)
    now = marginal.condition(marginal.moments(design, rows.y), values.noise, *gibbs.prior_of_beta(values, net))
    values = values._replace(beta=marginal.draw(key_beta, now))
    gamma, _, design, accepted = gibbs.move_units(key_units, values, rows, net, log_scale, settings)
    return gibbs.draw_hyper(key_hyper, values._replace(gamma=gamma), design, rows, net), accepted


def test_the_decks_order_does_not_leave_the_posterior_invariant(x64):  # lecture: E2
    """Three units, noise sd 0.15 and a little misfit: E[σ | D] is about 0.2; with β stale the residuals, hence σ, are four times that."""
    rng = np.random.default_rng(4)
    x = np.linspace(-2, 2, 30)[:, None]
    y = np.tanh(3 * x) - 1.5 * np.exp(-((x - 1) ** 2)) + 0.15 * rng.normal(size=(30, 1))
    prior = al.Normal({"gamma": 3.0, "beta": 3.0})
    net = bound(ShallowNet(3, prior=prior, likelihood=al.Gaussian(InverseGamma(1.0, 0.02)), scaled=False), x)
    rows = rows_of(net, x, y)
    sigma = lambda sweep: np.sqrt(np.asarray(run(net, rows, jax.random.key(0), 8, 1000, sweep, FOUR).noise)[:, 400:, 0])
    right, wrong = sigma(gibbs.sweep), sigma(deck_sweep)
    assert abs(right.mean() - 0.2) < 0.05
    assert wrong.mean() > 3 * right.mean()


# ---------------------------------------------------------------------------------------------------- mutations of the sampler


class Mutation(NamedTuple):
    """What is wrong with a sampler: noise sd and prior sds (of γ and β) times a factor, and whether the Hastings ratio is there. All may
    be traced, so that right and wrong samplers are one compiled function."""

    noise: float = 1.0
    prior: float = 1.0
    hastings: bool = True


RIGHT = Mutation()
NOISE_5, NOISE_25, HALVED, NO_RATIO = Mutation(noise=1.05), Mutation(noise=1.25), Mutation(prior=0.5), Mutation(hastings=False)
JUMPY = Settings(tries=2, jump=0.5)  # half of the proposals are not symmetric


def mutated(key, values, rows, net, log_scale, settings, how: Mutation) -> gibbs.Values:
    fixed = not isinstance(net.prior, Hierarchical)
    believed = values._replace(factor=values.factor / how.prior, var_beta=values.var_beta * how.prior**2) if fixed else values
    new, _ = gibbs.sweep(key, believed, rows, net, log_scale, settings._replace(hastings=how.hastings))
    new = new._replace(factor=values.factor, var_beta=values.var_beta) if fixed else new
    return new._replace(noise=new.noise * how.noise**2)


# ------------------------------------------------------------------------------------------------- Geweke's joint-distribution test


def quantities(net: ShallowNet, values: gibbs.Values, x: jax.Array) -> jax.Array:
    """Functions of one draw, with light tails: logs of spreads, and squares that notice a wrong width."""
    f = jax.nn.sigmoid(x @ values.gamma.T) @ values.beta[-net.units :]
    inner = values.factor @ values.factor.T
    parts = [
        jnp.log(values.noise),
        jnp.log(jnp.mean((values.beta - values.mu_beta) ** 2, axis=0)),
        jnp.tanh(jnp.mean(values.gamma, axis=0)),
        jnp.log(jnp.mean(values.gamma**2, axis=0)),
        jnp.tanh(f[:3].ravel()),
        jnp.log(jnp.mean(f**2))[None],
    ]
    hyper = [
        values.mu_beta,
        jnp.log(values.var_beta),
        values.mu_gamma,
        values.mu_gamma**2,
        jnp.log(jnp.diagonal(values.factor)),
        inner[1:, 0] / jnp.sqrt(inner[0, 0] * jnp.diagonal(inner)[1:]),
    ]
    return jnp.concatenate(parts + hyper * isinstance(net.prior, Hierarchical))


@functools.cache
def geweke_runs(net: ShallowNet, sweeps: int, settings: Settings):
    """Compiled: chains(keys, starts, mutation) → quantities of the chain that alternates θ | y (one sweep) and y | θ; prior(keys) → draws
    and their quantities. Chains start from the prior, so every state of a correct sampler has exactly the prior distribution."""
    x = GEWEKE_X
    inputs = jnp.asarray(np.c_[np.ones(len(x)), x])

    def prior(key):
        values = gibbs.values_of(net, net.sample_prior(key))
        return values, quantities(net, values, inputs)

    def observe(key, values):
        f = jax.nn.sigmoid(inputs @ values.gamma.T) @ values.beta[-net.units :]
        f = f + inputs @ values.beta[: -net.units] if net.linear_term else f
        return f + jnp.sqrt(values.noise) * jax.random.normal(key, f.shape)

    def chain(key, start, how):
        def step(values, i):
            key_y, key_sweep = jax.random.split(jax.random.fold_in(key, i))
            rows = rows_of(net, x, observe(key_y, values))
            values = mutated(key_sweep, values, rows, net, jnp.full(net.units, -0.3), settings, how)
            return values, quantities(net, values, inputs)

        return jax.lax.scan(step, start, jnp.arange(sweeps))[1]

    return jax.jit(jax.vmap(chain, in_axes=(0, 0, None))), jax.jit(jax.vmap(prior))


def geweke(net: ShallowNet, chains: int, sweeps: int, how: Mutation = RIGHT, settings: Settings = JUMPY, seed: int = 0) -> np.ndarray:
    """z of each quantity: prior draws against the joint chain. Chains are independent, so the error needs no autocorrelations."""
    run_chains, run_prior = geweke_runs(net, sweeps, settings)
    key_chain, key_prior = jax.random.split(jax.random.key(seed))
    draws, prior = run_prior(jax.random.split(key_prior, 20_000))
    starts = jax.tree.map(lambda leaf: leaf[:chains], draws)
    found, prior = np.asarray(run_chains(jax.random.split(key_chain, chains), starts, how)), np.asarray(prior)[chains:]
    error = found.mean(axis=1).std(axis=0, ddof=1) / np.sqrt(chains)
    return (found.mean(axis=(0, 1)) - prior.mean(axis=0)) / np.sqrt(error**2 + prior.var(axis=0) / len(prior))


def hierarchy() -> ShallowNet:
    prior = Hierarchical(
        a_beta=0.3, A_beta=0.5, c_beta=5.0, C_beta=0.7, a_gamma=(0.2, -0.4), A_gamma=0.6, c_gamma=5.0, C_gamma=((1.0, 0.3), (0.3, 2.0))
    )
    return ShallowNet(3, prior=prior, likelihood=al.Gaussian(InverseGamma(4.0, 1.0)), scaled=False)


GEWEKE_X = np.linspace(-2, 2, 6)[:, None]
CASES = {"hierarchy": (hierarchy, 1), "two outputs, linear term": (lambda: plain(2, linear_term=True), 2)}


@pytest.mark.parametrize("case", CASES)
def test_geweke(case, x64):
    make, k = CASES[case]
    z = geweke(bound(make(), GEWEKE_X, k), 100, 200)
    assert np.max(np.abs(z)) < 4, z


@pytest.mark.long
@pytest.mark.parametrize("how", [NOISE_5, NO_RATIO, HALVED], ids=["noise × 1.05", "no Hastings ratio", "halved prior sd"])
def test_geweke_catches(how, x64):
    z = geweke(bound(plain(2, linear_term=True), GEWEKE_X, 2), 100, 200, how)
    assert np.max(np.abs(z)) > 6, z


# ------------------------------------------------------------------------------------------------- simulation-based calibration

SBC_X = np.linspace(-2, 2, 20)[:, None]
SBC_AT = np.array([-2.5, -1.0, 0.0, 1.0, 2.5])[:, None]
SBC_NET = bound(
    ShallowNet(3, prior=al.Normal({"gamma": 2.0, "beta": 1.0}), likelihood=al.Gaussian(InverseGamma(4.0, 1.0)), scaled=False), SBC_X
)


@functools.cache
def calibration_run(net: ShallowNet, thin: int, settings: Settings):
    """Compiled: (keys, mutation) → ranks of the truth among 99 thinned draws, and lag-1 autocorrelations, of seven quantities: five
    predictions, noise sd, log-likelihood. Chains start at the truth, an exact draw of the posterior, and run 10 intervals first."""
    at, inputs = (jnp.asarray(np.c_[np.ones(len(x)), x]) for x in (SBC_AT, SBC_X))

    def looked_at(values, rows):
        f = jax.nn.sigmoid(at @ values.gamma.T) @ values.beta
        return jnp.concatenate([f[:, 0], jnp.sqrt(values.noise), gibbs.log_likelihood(net, values, rows)[None]])

    def one(key, how):
        key_prior, key_data, key_run = jax.random.split(key, 3)
        truth = gibbs.values_of(net, net.sample_prior(key_prior))
        f = jax.nn.sigmoid(inputs @ truth.gamma.T) @ truth.beta
        rows = rows_of(net, SBC_X, f + jnp.sqrt(truth.noise) * jax.random.normal(key_data, f.shape))

        def interval(values, number):
            step = lambda i, values: mutated(jax.random.fold_in(key_run, i), values, rows, net, jnp.zeros(net.units), settings, how)
            values = jax.lax.fori_loop(number * thin, (number + 1) * thin, step, values)
            return values, looked_at(values, rows)

        draws = jax.lax.scan(interval, truth, jnp.arange(109))[1][10:]
        away = draws - draws.mean(axis=0)
        lag = jnp.sum(away[1:] * away[:-1], axis=0) / jnp.sum(away**2, axis=0)
        return jnp.sum(draws < looked_at(truth, rows), axis=0), lag

    return jax.jit(jax.vmap(one, in_axes=(0, None)))


def calibration(num_sets: int, thin: int, how: Mutation = RIGHT, settings: Settings = JUMPY, seed: int = 0) -> tuple[np.ndarray, float]:
    """χ²₁₉ of the ranks of the seven quantities, and the largest mean lag-1 autocorrelation."""
    ranks, lags = calibration_run(SBC_NET, thin, settings)(jax.random.split(jax.random.key(seed), num_sets), how)
    counts = np.stack([np.bincount(np.asarray(column) // 5, minlength=20) for column in ranks.T])
    expected = num_sets / 20
    return np.sum((counts - expected) ** 2 / expected, axis=1), float(np.max(np.mean(lags, axis=0)))


@pytest.mark.long
def test_ranks_are_uniform(x64):
    chi, lag = calibration(100, THIN)
    assert np.max(chi) < CHI_SQUARED, chi
    assert lag < 0.05


@pytest.mark.parametrize("how", [NOISE_25, HALVED], ids=["noise × 1.25", "halved prior sd"])
def test_ranks_catch(how, x64):
    chi, _ = calibration(100, THIN, how)
    assert np.max(chi) > CHI_SQUARED, chi


# ------------------------------------------------------------------------------------------------------------- through the front door


def toy(seed: int = 0, n: int = 60):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=n)


def quick(key, net, data, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        return al.fit(key, net, data, MarginalGibbs(**{"num_samples": 200, "num_warmup": 200, "num_chains": 2, "tries": 2} | more))


def test_a_fit_predicts_several_outputs_with_a_linear_term():
    x, y = toy()
    fit = quick(0, ShallowNet(4, linear_term=True), (x, np.c_[y, 3.0 * x[:, 1]]), num_samples=600)
    test = np.random.default_rng(9).normal(size=(200, 2))
    pred = fit.predict(1, test)
    truth = np.c_[np.sin(2 * test[:, 0]) + test[:, 1], 3.0 * test[:, 1]]
    assert np.all(np.sqrt(np.mean((pred.mean - truth) ** 2, axis=0)) < (0.2, 0.05))
    assert fit.posterior.num_chains == 2 and fit.posterior.params["network"]["linear"].shape == (1200, 3, 2)
    assert fit.manifest["health"]["judged"].startswith("functions") and 0.15 < fit.manifest["health"]["acceptance"] < 0.45


def test_units_of_the_data_do_not_matter(x64):
    """scaled=True: the sampler sees the same numbers for x and y in other units."""
    x, y = toy()
    seen = lambda x, y: gibbs.rows_of(ShallowNet(3).bind(x, y[:, None]), Batch(jnp.asarray(x), jnp.asarray(y[:, None])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), seen(x, y), seen(100 + 50 * x, 1e6 + 1e4 * y))


def test_the_same_key_gives_the_same_draws_and_thinning_keeps_every_so_many():
    data = toy(n=20)
    every = quick(3, ShallowNet(2), data, num_samples=30, thin=1)
    third = quick(3, ShallowNet(2), data, num_samples=10, thin=3)
    # Buffers of other sizes are another program: the same numbers up to its rounding.
    np.testing.assert_allclose(
        every.posterior.params["network"]["gamma"].reshape(2, 30, 2, 3)[:, 2::3],
        third.posterior.params["network"]["gamma"].reshape(2, 10, 2, 3),
        rtol=1e-9,
    )


def test_a_run_resumes_where_it_stopped(tmp_path):
    data = toy(n=20)
    whole = quick(3, ShallowNet(2), data, num_samples=60)
    method = MarginalGibbs(num_samples=60, num_warmup=200, num_chains=2, tries=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        al.fit(3, ShallowNet(2), data, method, checkpoint=tmp_path, checkpoint_every=0.0)
        again = al.fit(3, ShallowNet(2), data, method, checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(whole.posterior.params["network"]["beta"], again.posterior.params["network"]["beta"])


def test_what_cannot_be_integrated_out_is_refused():
    x, y = toy(n=20)
    with pytest.raises(MethodError, match="a BNN"):
        al.fit(0, al.BNN(al.networks.MLP(2, (3,), 1)), (x, y), MarginalGibbs())
    with pytest.raises(MethodError, match="noise Gaussian"):
        al.fit(0, ShallowNet(2, likelihood=al.Gaussian()), (x, y), MarginalGibbs())
    with pytest.raises(MethodError, match=r"temperature 0\.5"):
        al.fit(0, ShallowNet(2), (x, y), MarginalGibbs(), temperature=0.5)
    with pytest.raises(MethodError, match="jump"):
        MarginalGibbs(jump=1.0)
    with pytest.raises(MethodError, match="tries"):
        MarginalGibbs(tries=0)
