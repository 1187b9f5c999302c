"""Hidden Markov models against enumeration of all paths (D6)."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import aleator as al
from aleator.convergence import mcse
from aleator.latent import parts
from aleator.latent._conjugate import add, inner
from aleator.latent.autoregressive import Autoregressive
from aleator.latent.hmm import HMM
from aleator.latent.weights import Dirichlet

IDS = np.array([0, 0, 0, 7, 3, 3])  # sequences of three rows, of one, of two
BEGINS = np.array([True, False, False, True, True, False])


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def batch(y, x=None):
    y = np.asarray(y, float)
    return al.Data(x, y).batch()


def paths(num_states, length):
    return np.array(list(itertools.product(range(num_states), repeat=length)))


def path_terms(log_initial, log_transition, terms, begins, z):
    """log weight of every path, (S^T,)."""
    total = np.zeros(len(z))
    for t in range(z.shape[1]):
        total += log_initial[z[:, t]] if begins[t] else log_transition[z[:, t - 1], z[:, t]]
        total += terms[t][z[:, t]]
    return total


@pytest.mark.parametrize("normalised", [True, False])
def test_every_pass_agrees_with_enumeration(normalised):
    # The logs of coordinate ascent are expectations: their exponentials sum to less than one.
    model = HMM(3, "categorical").bind(IDS, np.array([0, 2, np.nan, 1, 1, 0]))
    params = model.sample_prior(jax.random.key(0))
    natural = (
        model.natural(params) if normalised else model.expected(add(model.prior_counts(), jax.tree.map(jnp.exp, model.natural(params))))
    )
    data = batch([0, 2, np.nan, 1, 1, 0], IDS)
    logs = np.asarray(natural["initial"]), np.asarray(natural["transition"])
    terms = np.asarray(model.emissions(natural, data.y[:, None]))
    assert np.all(terms[2] == 0.0)
    z = paths(3, 6)
    weights = path_terms(*logs, terms, BEGINS, z)
    total = logsumexp(weights)
    shares = np.exp(weights - total)
    smoothed = np.stack([shares @ (z == k) for k in range(3)], axis=1)
    pairs = np.zeros((3, 3))
    for t in np.flatnonzero(~BEGINS):
        np.add.at(pairs, (z[:, t - 1], z[:, t]), shares)
    steps = []  # log p(y_≤t), rows of later steps left out
    for t in range(1, 7):
        short = paths(3, t)
        steps.append(logsumexp(path_terms(*logs, terms[:t], BEGINS[:t], short)))
    if not normalised:
        assert np.exp(logs[1]).sum(axis=1).max() < 0.99
    for parallel in (False, True):
        counts, rows = jax.jit(dataclasses.replace(model, parallel=parallel).e_step)(natural, data)
        np.testing.assert_allclose(np.cumsum(rows), steps, rtol=1e-12)
        np.testing.assert_allclose(counts["transition"], pairs, atol=1e-13)
        np.testing.assert_allclose(counts["initial"], smoothed[BEGINS].sum(axis=0), atol=1e-13)
        labels = np.array([0, 2, -1, 1, 1, 0])
        np.testing.assert_allclose(
            counts["parts"]["labels"], np.stack([smoothed[labels == c].sum(axis=0) for c in range(3)], axis=1), atol=1e-13
        )
    if normalised:
        np.testing.assert_allclose(model.smooth(params, data.y, IDS), smoothed, atol=1e-13)
        best, value = model.viterbi(params, data.y, IDS)
        assert np.array_equal(best, z[np.argmax(weights)]) and abs(float(value) - weights.max()) < 1e-12
        passed = model.filter(params, data.y, IDS)
        last = path_terms(*logs, terms[:2], BEGINS[:2], paths(3, 2))
        np.testing.assert_allclose(
            passed.filtered[1], [np.exp(logsumexp(last[paths(3, 2)[:, 1] == k]) - logsumexp(last)) for k in range(3)], rtol=1e-12
        )
        np.testing.assert_allclose(np.sum(passed.predicted, axis=1), 1.0, rtol=1e-12)
        number = 20000
        drawn = np.asarray(model.sample_paths(jax.random.key(1), params, data.y, number, IDS))
        code = lambda path: path @ 3 ** np.arange(6)
        share = np.bincount(code(drawn), minlength=729)[code(z)] / number
        assert np.all(np.abs(share - shares) < 5 * np.sqrt(shares * (1 - shares) / number) + 5 / number)


def exact_evidence(model, y, x=None):
    """log p(y) with parameters and paths summed out, by enumeration of paths; and the paths' weights with their counts."""
    data = batch(y, x)
    prior = model.prior_counts()
    z = paths(model.num_states, len(y))
    begins = np.arange(len(y)) == 0
    total = lambda counts: sum(family.log_partition(counts[name]) for name, family in model.families.items())
    complete = jax.vmap(lambda path: model._complete(path, jnp.asarray(begins), data.y[:, None]))(jnp.asarray(z, jnp.int32))
    logs = np.asarray(jax.vmap(lambda counts: total(add(prior, counts)) - total(prior))(complete))
    return logs, complete


def test_the_exact_evidence_bounds_coordinate_ascent():
    y = np.array([0, 0, 1, 1, 1])
    model = HMM(2, "categorical", Dirichlet(1.5), Dirichlet(2.0)).bind(None, y)
    logs, _ = exact_evidence(model, y)
    evidence = logsumexp(logs)
    # By hand: the path 00111 with both parts.
    from scipy.special import gammaln

    beta = lambda a, n: gammaln(2 * a) - gammaln(2 * a + sum(n)) + sum(gammaln(a + k) - gammaln(a) for k in n)
    z = paths(2, 5)
    hand = beta(1.5, (1, 0)) + beta(2.0, (1, 1)) + beta(2.0, (0, 2)) + beta(1.0, (2, 0)) + beta(1.0, (0, 3))
    assert abs(logs[np.flatnonzero((z == y).all(axis=1))[0]] - hand) < 1e-12
    data = batch(y)

    def step(counts, _):
        new, rows = model.e_step(model.expected(counts), data)
        return add(model.prior_counts(), new), jnp.sum(rows) - model.divergence(counts)

    first = add(model.prior_counts(), model.seed(jax.random.key(0), data))
    bounds = np.asarray(jax.jit(lambda c: jax.lax.scan(step, c, None, length=60))(first)[1])
    assert np.all(np.diff(bounds) > -1e-12) and bounds[0] < bounds[-1] < evidence
    # With one state nothing is hidden, and the bound is the evidence.
    single = HMM(1, "categorical").bind(None, y)
    counts = add(
        single.prior_counts(), {"initial": jnp.ones(1), "transition": jnp.full((1, 1), 4.0), "parts": {"labels": jnp.array([[2.0, 3.0]])}}
    )
    bound = jax.jit(lambda c: jnp.sum(single.e_step(single.expected(c), data)[1]) - single.divergence(c))(counts)
    assert abs(float(bound) - beta(1.0, (2, 3))) < 1e-10


def test_gibbs_draws_from_the_exact_posterior():
    y = np.array([0, 0, 1, 1, 1])
    model = HMM(2, "categorical", Dirichlet(1.5), Dirichlet(2.0)).bind(None, y)
    logs, complete = exact_evidence(model, y)
    shares = np.exp(logs - logsumexp(logs))
    pairs = np.asarray(add(model.prior_counts()["transition"], complete["transition"])) + 1.0
    stay = shares @ np.trace(pairs / pairs.sum(axis=-1, keepdims=True), axis1=1, axis2=2)  # E[A₁₁ + A₂₂ | y]
    labels = np.asarray(complete["parts"]["labels"]) + 1.0
    # E[p₀p₁] of a Beta(a, b) is ab / ((a + b)(a + b + 1)).
    n = labels.sum(axis=-1)
    purity = shares @ np.sum(labels[..., 0] * labels[..., 1] / (n * (n + 1.0)), axis=1)
    data = batch(y)

    @jax.jit
    def chain(key):
        key_start, key_run = jax.random.split(key)

        def one(params, k):
            new = model.gibbs(k, params, data)
            named = model.constrain(new)
            return new, jnp.array([jnp.trace(named["transition"]), jnp.sum(named["probability"][:, 0] * named["probability"][:, 1])])

        return jax.lax.scan(one, model.sample_prior(key_start), jax.random.split(key_run, 20000))[1][100:]

    draws = np.asarray(chain(jax.random.key(3)))[None]
    errors = mcse(draws)
    assert np.all(np.abs(draws.mean(axis=(0, 1)) - [stay, purity]) < 5 * errors) and errors.max() < 0.01


CASES = {
    "student_t": lambda rng: (HMM(2, parts.StudentT()), np.where(np.arange(60) // 7 % 2, 1.5, -1.5) + rng.standard_t(3, 60)),
    "autoregressive": lambda rng: (HMM(2, Autoregressive(lags=2)), np.cumsum(rng.normal(size=(60, 2)), axis=0)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_step_lowers_objective_or_bound(name):
    model, y = CASES[name](np.random.default_rng(1))
    y[10], x = np.nan, np.repeat([0, 1, 2], [30, 29, 1])
    model, data = model.bind(x, y), batch(y, x)

    def em(params, _):
        counts, rows = model.e_step(model.natural(params), data)
        return model.mode(add(model.prior_counts(), counts)), jnp.sum(rows) + model.penalty(params)

    def cavi(counts, _):
        new, rows = model.e_step(model.expected(counts), data)
        return add(model.prior_counts(), new), jnp.sum(rows) - model.divergence(counts)

    # Fisher: ∇ log p(y | θ) = ∇ ⟨E[T(y, z)], t(θ)⟩, for the derivative through the filter. The scales of Student-t rows are part of z.
    def gradients(params):
        counts, _ = model.e_step(model.natural(params), data)
        return jax.grad(lambda p: jnp.sum(model.log_likelihood(p, data)))(params), jax.grad(lambda p: inner(counts, model.natural(p)))(
            params
        )

    @jax.jit
    def run(key):
        key_seed, key_gibbs = jax.random.split(key)
        counts = add(model.prior_counts(), model.seed(key_seed, data))
        first = model.mode(counts)
        climbs = jax.lax.scan(em, first, None, length=25)[1], jax.lax.scan(cavi, counts, None, length=25)[1]
        return climbs, gradients(first), model.gibbs(key_gibbs, first, data)

    climbs, (direct, fisher), drawn = run(jax.random.key(2))
    for values in map(np.asarray, climbs):
        assert np.isfinite(values).all() and values[-1] > values[0]
        assert np.all(np.diff(values) > -1e-9 * np.abs(values[-1]))
    for left, right in zip(jax.tree.leaves(direct), jax.tree.leaves(fisher), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-8, atol=1e-8)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(drawn))


def test_regressions_on_the_past_are_conjugate():
    """One more row: A(η + T) − A(η) + log h is the Student-t of textbook regression. Draws have the moments ∇A. The mode is stationary."""
    from scipy.stats import multivariate_t

    rng = np.random.default_rng(0)
    y = rng.normal(size=(12, 2))
    model = HMM(1, Autoregressive()).bind(None, y)
    part = model.part
    rows = part.lagged(jnp.asarray(y), jnp.arange(12) == 0)

    @jax.jit
    def run(keys):
        old = add(part.prior(1), part.counts(jnp.ones((11, 1)), rows[:-1]))
        new = add(old, part.counts(jnp.ones((1, 1)), rows[-1:]))
        gain, draws = part.log_partition(new) - part.log_partition(old), jax.vmap(lambda key: part.natural(part.draw(key, new)))(keys)
        params = part.mode(new)
        return old, gain, draws, part.expected(new), params, jax.grad(lambda p: inner(new, part.natural(p)))(params)

    old, gain, draws, expectations, params, slope = run(jax.random.split(jax.random.key(0), 20000))
    d, q = old["cross"].shape[1:]
    phi = np.append(y[-2] - np.asarray(part.centre), 1.0)
    k, w = np.asarray(old["gram"][0]), np.asarray(old["cross"][0] @ np.linalg.inv(old["gram"][0]))
    scatter, nu = np.asarray(old["square"][0]) - w @ np.asarray(old["cross"][0]).T, float(old["df"][0]) + d + 1 - q
    shape = scatter * (1 + phi @ np.linalg.solve(k, phi)) / (nu - d + 1)
    expected = multivariate_t(w @ phi, shape, nu - d + 1).logpdf(y[-1] - np.asarray(part.centre))
    assert abs(float(gain) - d / 2 * np.log(2 * np.pi) - expected) < 1e-10
    assert float(old["df"][0]) == part.df - d - 1 + q + 10  # the first row has no past, the second to the eleventh have
    for name, exact in expectations.items():
        error = np.std(draws[name], axis=0) / np.sqrt(20000)
        assert np.all(np.abs(np.mean(draws[name], axis=0) - exact) < 5 * error), name
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(slope)) < 1e-9
    # Simulation follows the equation in y's units.
    named, path = part.constrain(params), jnp.zeros(4000, jnp.int32)
    series = np.asarray(jax.jit(part.simulate)(jax.random.key(1), params, path, past=y[-1:]))
    past = np.concatenate([y[-1:], series[:-1]])
    left = series - past @ np.asarray(named["weights"])[0, 0].T - np.asarray(named["offset"])[0]
    covariance = np.asarray(named["covariance"])[0]
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2)
    assert np.all(np.abs(left.mean(axis=0)) < 5 * np.sqrt(np.diag(covariance) / 4000))
    assert np.all(np.abs(np.cov(left.T) - covariance) < 5 * scale / np.sqrt(4000))


def test_far_apart_emissions_neither_under_nor_overflow():
    y = np.concatenate([np.full(500, -1e3), np.full(500, 1e3), np.full(500, -1e3)])
    y[500] = 0.0  # far from both, equally: either state will do
    model = HMM(2, parts.KnownGaussian(scale=1.0, prior_scale=1e3)).bind(None, y)
    params = {"initial": jnp.zeros(1), "transition": jnp.array([[5.0], [-5.0]]), "parts": {"mean": jnp.array([[-1e3], [1e3]])}}
    logs = np.log([1 / (1 + np.exp(5.0)), 1 - 1 / (1 + np.exp(5.0))])
    expected = 2 * logs[0] + 1497 * logs[1] - 750 * np.log(2 * np.pi) - 0.5e6
    slope = jax.jit(jax.grad(lambda p: jnp.sum(model.log_likelihood(p, batch(y)))))(params)
    for parallel in (False, True):
        value = jnp.sum(jax.jit(dataclasses.replace(model, parallel=parallel).log_likelihood)(params, batch(y)))
        # Rows are rounded at the size of y² = 10⁶.
        assert abs(float(value) - expected) < 1500 * 2e6 * np.finfo(float).eps
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))


def test_forecasts_are_draws_of_the_predictive():
    rng = np.random.default_rng(0)
    y = np.where(np.arange(55) % 20 < 10, 0.0, 5.0) + rng.normal(size=55)  # ends in the other state than it begins in
    model = HMM(2, parts.KnownGaussian()).bind(None, y)
    params = {"initial": jnp.zeros(1), "transition": jnp.array([[1.0], [-1.5]]), "parts": {"mean": jnp.array([[0.0], [5.0]])}}
    named, number = model.constrain(params), 4000
    draws = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), params)
    forecast = model.forecast(jax.random.key(1), draws, y, horizon=3)
    now = np.asarray(model.filter(params, y).filtered[-1])
    for step in range(3):
        now = now @ np.asarray(named["transition"])
        mean = now @ np.asarray(named["mean"])[:, 0]
        assert abs(forecast.mean[step] - mean) < 5 * forecast.stderr[step]
    z, simulated = model.simulate(jax.random.key(2), params, 7)
    assert forecast.paths.shape == (number, 3) and z.shape == (7,) and simulated.shape == (7, 1)


def test_states_are_found():
    rng = np.random.default_rng(0)
    z = np.cumsum(rng.random(200) < 0.1) % 2
    y = 4.0 * z + rng.normal(size=200)
    y[50:55] = np.nan
    ids = np.repeat([1, 2], 100)
    fit = al.fit(0, HMM(2, parts.KnownGaussian(prior_scale=10.0)), (ids, y), al.EM(num_steps=300, num_restarts=1))
    params = jax.tree.map(lambda leaf: leaf[0], fit.sample(jax.random.key(0), 1))
    with jax.enable_x64(False):  # questions are asked from outside
        path = np.asarray(fit.model.viterbi(params, y, ids)[0])
    assert max(np.mean(path == z), np.mean(path != z)) > 0.95


ODD = {
    "one row": lambda: (HMM(3, parts.KnownGaussian()), np.array([1.0]), None),
    "identical points, a missing one, K > N, a sequence of length one": lambda: (
        HMM(3),
        np.array([[np.nan, np.nan], [1.0, 2.0], [1.0, 2.0]]),
        np.array([0, 0, 5]),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_data_has_sane_answers(name):
    model, y, x = ODD[name]()
    model, data = model.bind(x, y), batch(y, x)

    @jax.jit
    def steps(key):
        counts = add(model.prior_counts(), model.seed(key, data))
        asked = model.natural(model.mode(counts)), model.expected(counts)
        return jax.lax.map(lambda natural: model.e_step(natural, data), jax.tree.map(lambda *leaves: jnp.stack(leaves), *asked))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(steps(jax.random.key(0))))


def test_errors_say_what_is_wrong():
    y = np.arange(4.0)
    for x, values, wrong in [
        (None, np.full(4, np.nan), "Every row is missing"),
        (np.array([0, 1, 0, 0]), y, "in pieces"),
        (np.array([0.5, 1, 1, 1]), y, "not the ids"),
        (None, np.array([[1.0, np.nan], [1.0, 2.0]]), "cannot be used"),
    ]:
        with pytest.raises(al.DataError, match=wrong):
            HMM(2).bind(x, values)
    with pytest.raises(al.DataError, match="cannot emit"):
        HMM(2, "poisson").bind(None, np.array([1.0, -2.0]))
    with pytest.raises(al.DataError, match="no weights"):
        HMM(2).bind(None, y).seed(jax.random.key(0), al.Data(None, y, np.ones(4)).batch())
    with pytest.raises(al.DataError, match="regress on its past"):
        HMM(2, "autoregressive").bind(np.arange(4), y)
    for build in (lambda: HMM(0), lambda: HMM(2, "nothing"), lambda: HMM(2, transition=1.0), lambda: HMM(2, stickiness=-1.0)):
        with pytest.raises(al.ModelError):
            build()


def test_log_prob_of_several_sequences_is_that_of_all_of_them():
    y = np.random.default_rng(0).integers(0, 3, 12)
    ids = np.arange(12) // 4
    fit = al.fit(0, HMM(2, "categorical"), (ids, y), al.EM(num_restarts=1, num_steps=500))
    each = [fit.model.filter(fit.posterior.params, y[ids == i]).log_terms.sum() for i in range(3)]
    np.testing.assert_allclose(al.latent.log_prob(1, fit, y, x=ids), [np.sum(each)], rtol=1e-9)


def test_questions_about_rows_the_states_cannot_emit_are_refused():
    """A label beyond the last was counted as the last."""
    model = HMM(2, "categorical").bind(None, np.array([0, 1, 2, 1]))
    params = model.sample_prior(jax.random.key(0))
    for asked in ([0, 3, 1], [0, -1, 1]):
        with pytest.raises(al.DataError, match="cannot emit"):
            model.filter(params, np.array(asked))
    with pytest.raises(al.DataError, match="2 columns"):
        model.viterbi(params, np.zeros((3, 2)))


def test_a_forecast_does_not_take_the_past_of_the_sequence_before():
    y, ids = np.random.default_rng(0).normal(size=9).cumsum(), np.repeat([0, 1], [8, 1])
    model = HMM(2, Autoregressive(lags=2)).bind(ids, y)
    draws = jax.vmap(model.sample_prior)(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(al.DataError, match="1 rows of the last sequence"):
        model.forecast(1, draws, y, 2, x=ids)
    with pytest.raises(al.DataError, match="1 rows of the last sequence"):
        model.forecast(1, draws, y[:1], 2)
    assert model.forecast(1, draws, y[:8], 2, x=ids[:8]).paths.shape == (3, 2)
