"""Linear dynamics and structural series against the dense joint Gaussian and quadrature (D6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.convergence import mcse
from aleator.latent._conjugate import add, inner
from aleator.latent.linear_dynamics import Effects, Level, LinearDynamics, Seasonal, Structural, Trend

IDS = np.array([0, 0, 0, 0, 7, 3, 3])  # sequences of four rows, of one, of two
BEGINS = np.array([True, False, False, False, True, True, False])
K = 2


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def batch(y, x=None):
    return al.Data(x, np.asarray(y, float)).batch()


def rows(noise):
    y = np.random.default_rng(0).normal(size=(7, 2)) * [1.0, 5.0] + [0.0, 3.0]
    y[1] = np.nan
    if noise == "diagonal":
        y[5, 0] = np.nan
    return y


def dense(model, natural, y, there):
    """log ∫ exp⟨T(y, z), t⟩ dz over all states at once, from the block-tridiagonal precision; y in the model's units, `there`: what is seen."""
    total, length = jnp.zeros(()), len(y)
    precision, linear = jnp.zeros((length, K, length, K)), jnp.zeros((length, K))
    first, moves, emits = natural["initial"], jax.tree.map(lambda leaf: leaf[0], natural["dynamics"]), natural["emission"]
    for t in range(length):
        if BEGINS[t]:
            precision = precision.at[t, :, t].add(-2.0 * first["square"][0])
            linear = linear.at[t].add(first["sum"][0])
            total += first["number"][0] + first["df"][0]
        else:
            precision = precision.at[t, :, t].add(-2.0 * moves["square"])
            precision = precision.at[t - 1, :, t - 1].add(-2.0 * moves["gram"])
            precision = precision.at[t, :, t - 1].add(-moves["cross"]).at[t - 1, :, t].add(-moves["cross"].T)
            total += moves["df"]
        total -= 0.5 * K * np.log(2 * np.pi)
        groups = [[i] for i in range(2) if there[t, i]] if model.noise == "diagonal" else [[0, 1]] if there[t].all() else []
        for group in groups:
            member, seen = (group[0] if model.noise == "diagonal" else 0), y[t, np.array(group)]
            precision = precision.at[t, :, t].add(-2.0 * emits["gram"][member])
            linear = linear.at[t].add(seen @ emits["cross"][member])
            total += seen @ emits["square"][member] @ seen + emits["df"][member] - 0.5 * len(group) * np.log(2 * np.pi)
            total -= np.sum(np.log(np.asarray(model.scale)[group]))
    matrix, vector = precision.reshape(length * K, -1), linear.ravel()
    solved = jnp.linalg.solve(matrix, vector)
    value = total + 0.5 * vector @ solved - 0.5 * jnp.linalg.slogdet(matrix)[1] + 0.5 * length * K * np.log(2 * np.pi)
    return value, (solved.reshape(length, K), jnp.linalg.inv(matrix).reshape(length, K, length, K))


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_filter_and_smoother_agree_with_the_dense_gaussian(noise):
    """log p(y), and expected counts as its gradient in t: at one θ, and at expectations, where F and H are spread around their means."""
    y = rows(noise)
    model, data = LinearDynamics(K, noise).bind(IDS, y), batch(y, IDS)

    @jax.jit
    def run(key):
        params = model.sample_prior(key)
        inside = model.laid(data)[1]
        first = model.natural(params)
        counts = add(model.prior_counts(), model.e_step(first, data)[0])
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, model.expected(counts))
        oracle = jax.value_and_grad(lambda t: dense(model, t, inside, np.isfinite(y)), has_aux=True)
        short = model.log_likelihood(params, batch(y[:4], IDS[:4]))
        return params, jax.lax.map(lambda t: (model.e_step(t, data), oracle(t)), both), short

    params, ((found, terms), ((value, (mean, covariance)), slope)), short = run(jax.random.key(0))
    np.testing.assert_allclose(np.sum(terms, axis=1), value, atol=1e-8)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-8, atol=1e-8)
    # At one θ: smoothed moments and rows as conditionals.
    mean, covariance = np.asarray(mean[0]), np.asarray(covariance[0])
    smoothed, passed = model.smooth(params, y, IDS), model.filter(params, y, IDS)
    np.testing.assert_allclose(smoothed.mean, mean, atol=1e-8)
    for t in range(7):
        np.testing.assert_allclose(smoothed.covariance[t], covariance[t, :, t], atol=1e-8)
        if t + 1 < 7 and not BEGINS[t + 1]:
            np.testing.assert_allclose(smoothed.lagged[t], covariance[t + 1, :, t], atol=1e-8)
    np.testing.assert_allclose(passed.log_terms[:4], short, atol=1e-10)
    np.testing.assert_allclose(passed.log_terms, terms[0], atol=1e-8)
    assert passed.log_terms[1] == 0.0  # nothing seen, nothing said
    number = 4000
    drawn = np.asarray(model.sample_states(jax.random.key(1), params, y, number, IDS))
    wanted = np.stack([covariance[t, :, t] for t in range(7)])
    error = np.sqrt(np.diagonal(wanted, axis1=1, axis2=2) / number)
    assert np.all(np.abs(drawn.mean(axis=0) - mean) < 5 * error)
    pair = np.mean((drawn[:, 1] - mean[1])[:, :, None] * (drawn[:, 0] - mean[0])[:, None, :], axis=0)
    size = np.sqrt((np.outer(np.diag(wanted[1]), np.diag(wanted[0])) + covariance[1, :, 0] ** 2) / number)
    assert np.all(np.abs(pair - covariance[1, :, 0]) < 5 * size)


def monthly(length=60):
    """A rising series with a season, an input, and gaps."""
    rng = np.random.default_rng(3)
    t = np.arange(length)
    x = rng.normal(size=(length, 1))
    y = 300 + 0.2 * t + 3 * np.sin(2 * np.pi * t / 4) + 2 * x[:, 0] + 0.5 * rng.normal(size=length)
    y[[5, 17]] = np.nan
    return x, y


def test_structural_series_agree_with_the_dense_gaussian():
    x, y = monthly(20)
    model = Structural((Trend(), Seasonal(4), Effects())).bind(x, y)
    params, data = {"precisions": jnp.array([1.0, 3.0, 5.0, 4.0])}, batch(y, x)
    system = model.system(params, data.x)
    f, q, h = (np.asarray(leaf) for leaf in (system.dynamics, system.drift, system.emission[:, 0]))
    assert model.names == ("noise", "trend", "slope", "seasonal") and f.shape == (6, 6)
    covariance = np.zeros((20, 6, 20, 6))
    now = np.asarray(system.covariance)
    for s in range(20):
        now = now if s == 0 else f @ now @ f.T + q
        ahead = now
        for t in range(s, 20):
            ahead = ahead if t == s else f @ ahead
            covariance[t, :, s], covariance[s, :, t] = ahead, ahead.T
    joint = np.einsum("tk,tksl,sl->ts", h, covariance, h) + float(system.noise[0, 0]) * np.eye(20)
    seen = np.isfinite(y)
    values, small = ((y - model.centre[0]) / model.scale[0])[seen], joint[np.ix_(seen, seen)]
    solved = np.linalg.solve(small, values)
    expected = -0.5 * (values @ solved + np.linalg.slogdet(2 * np.pi * small)[1]) - seen.sum() * np.log(model.scale[0])
    terms, slope = jax.jit(lambda p: (model.log_likelihood(p, data), jax.grad(lambda q: jnp.sum(model.log_likelihood(q, data)))(p)))(params)
    assert abs(float(jnp.sum(terms)) - expected) < 1e-8
    cross = np.einsum("tksl,sl->tks", covariance, h)[:, :, seen]
    np.testing.assert_allclose(model.smooth(params, y, x).mean, cross @ solved, atol=1e-7)
    counts, _ = jax.jit(model.e_step)(model.natural(params), data)
    fisher = jax.grad(lambda p: inner(counts, model.natural(p)))(params)
    np.testing.assert_allclose(slope["precisions"], fisher["precisions"], atol=1e-7)
    parts = model.decompose(params, y, x)
    np.testing.assert_allclose(
        sum(mean for mean, _ in parts.values()), model.centre[0] + model.scale[0] * np.sum(h * (cross @ solved), axis=1), rtol=1e-9
    )


CASES = {
    "linear": lambda: (LinearDynamics(3), np.repeat([0, 1], [59, 1]), np.cumsum(np.random.default_rng(1).normal(size=(60, 2)), axis=0)),
    "structural": lambda: (Structural((Trend(), Seasonal(4), Effects(0.01))), *monthly()),
}


@pytest.mark.parametrize("name", CASES)
def test_no_step_lowers_objective_or_bound(name):
    model, x, y = CASES[name]()
    model, data = model.bind(x, y), batch(y, x)

    def em(params, _):
        counts, terms = model.e_step(model.natural(params), data)
        return model.mode(add(model.prior_counts(), counts)), jnp.sum(terms) + model.penalty(params)

    def cavi(counts, _):
        new, terms = model.e_step(model.expected(counts), data)
        return add(model.prior_counts(), new), jnp.sum(terms) - model.divergence(counts)

    @jax.jit
    def run(key):
        key_seed, key_gibbs = jax.random.split(key)
        counts = add(model.prior_counts(), model.seed(key_seed, data))
        climbs = jax.lax.scan(em, model.mode(counts), None, length=30)[1], jax.lax.scan(cavi, counts, None, length=30)[1]
        return climbs, model.gibbs(key_gibbs, model.mode(counts), data)

    climbs, drawn = run(jax.random.key(2))
    for values in map(np.asarray, climbs):
        assert np.isfinite(values).all() and values[-1] > values[0]
        assert np.all(np.diff(values) > -1e-9 * np.abs(values[-1]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(drawn))


def test_gibbs_and_the_bound_against_quadrature():
    """A level with two unknown variances: posterior means of log λ and the evidence on a grid."""
    y = np.cumsum(np.random.default_rng(0).normal(size=12))
    model, data = Structural(Level(0.5)).bind(None, y), batch(y)
    joint = lambda p: model.log_prior({"precisions": p}) + jnp.sum(model.log_likelihood({"precisions": p}, data))
    axis = np.linspace(-5.0, 9.0, 81)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    logs = np.asarray(jax.jit(lambda g: jax.lax.map(joint, g, batch_size=81))(jnp.asarray(grid)))
    weights = np.exp(logs - logs.max())
    evidence = logs.max() + np.log(weights.sum() * (axis[1] - axis[0]) ** 2)
    exact = weights @ grid / weights.sum()

    def cavi(counts, _):
        new, terms = model.e_step(model.expected(counts), data)
        return add(model.prior_counts(), new), jnp.sum(terms) - model.divergence(counts)

    @jax.jit
    def run(key):
        sweep = lambda params, k: (model.gibbs(k, params, data),) * 2
        keys = jax.random.split(key, 6001)
        draws = jax.lax.scan(sweep, model.sample_prior(keys[0]), keys[1:])[1]["precisions"][500:]
        return draws, jax.lax.scan(cavi, model.prior_counts(), None, length=40)[1]

    draws, bounds = run(jax.random.key(1))
    draws = np.asarray(draws)[None]
    assert np.all(np.abs(draws.mean(axis=(0, 1)) - exact) < 5 * mcse(draws)) and mcse(draws).max() < 0.1
    assert bounds[0] < bounds[-1] < evidence


def test_forecasts_are_draws_of_the_predictive():
    y = np.cumsum(np.random.default_rng(0).normal(size=40)) + 10
    model = Structural(Trend()).bind(None, y)
    params, number = {"precisions": jnp.array([2.0, 3.0, 6.0])}, 4000
    draws = {"precisions": jnp.broadcast_to(params["precisions"], (number, 3))}
    forecast = model.forecast(jax.random.key(0), draws, y, horizon=3)
    # Missing rows at the end are the same question, asked of the filter.
    passed = model.filter(params, np.concatenate([y, np.full(3, np.nan)]))
    mean = model.centre[0] + model.scale[0] * np.asarray(passed.mean)[-3:, 0]
    std = model.scale[0] * np.sqrt(np.asarray(passed.covariance)[-3:, 0, 0] + np.exp(-2.0))
    assert forecast.paths.shape == (number, 3)
    assert np.all(np.abs(forecast.mean - mean) < 5 * std / np.sqrt(number))
    assert np.all(np.abs(forecast.std / std - 1) < 5 / np.sqrt(2 * number))


def test_dynamics_are_found():
    """A noisy rotation: EM finds the eigenvalues of F, through al.fit and from several sequences."""
    rng = np.random.default_rng(0)
    angle = 2 * np.pi / 12
    f = 0.98 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    z = np.zeros((400, 2))
    for t in range(1, 400):
        z[t] = f @ z[t - 1] + 0.3 * rng.normal(size=2) if t != 200 else rng.normal(size=2)
    y = z @ rng.normal(size=(2, 3)) + 0.3 * rng.normal(size=(400, 3))
    y[rng.random(y.shape) < 0.05] = np.nan
    ids = np.repeat([1, 2], 200)
    fit = al.fit(0, LinearDynamics(2), (ids, y), al.EM(num_steps=200, num_restarts=1, tolerance=1e-4))
    params = jax.tree.map(lambda leaf: leaf[0], fit.sample(jax.random.key(0), 1))
    with jax.enable_x64(False):  # questions are asked from outside
        values = np.linalg.eigvals(np.asarray(fit.model.constrain(params)["dynamics"], float))
    assert np.all(np.abs(np.abs(np.angle(values)) - angle) < 0.03) and np.all(np.abs(np.abs(values) - 0.98) < 0.03)


def test_odd_data_has_sane_answers_and_errors_say_what_is_wrong():
    for odd in (np.array([1.0]), np.ones((3, 2))):  # one row; identical points, more states than rows
        model = LinearDynamics(4).bind(None, odd)

        @jax.jit
        def steps(data, model=model):
            counts = add(model.prior_counts(), model.seed(jax.random.key(0), data))
            both = jax.tree.map(lambda *leaves: jnp.stack(leaves), model.natural(model.mode(counts)), model.expected(counts))
            return jax.lax.map(lambda natural: model.e_step(natural, data), both)

        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(steps(batch(odd))))
    for build, wrong in [
        (lambda: LinearDynamics(2).bind(None, np.full(3, np.nan)), "Every row is missing"),
        (lambda: LinearDynamics(2, "full").bind(None, np.array([[1.0, np.nan], [0.0, 1.0]])), "cannot be used"),
        (lambda: Structural(Level()).bind(None, np.ones((3, 2))), "one column"),
        (lambda: Structural((Level(), Effects())).bind(None, np.ones(3)), "do not agree"),
        (lambda: Structural(Level()).bind(None, np.arange(3.0)).laid(al.Data(None, np.arange(3.0), np.ones(3)).batch()), "no weights"),
    ]:
        with pytest.raises(al.DataError, match=wrong):
            build()
    for build in (
        lambda: LinearDynamics(0),
        lambda: LinearDynamics(2, "banded"),
        lambda: Seasonal(1),
        lambda: Structural(()),
        lambda: Structural("x"),
    ):
        with pytest.raises(al.ModelError):
            build()


def test_two_seasons_are_two_parts_of_the_series():
    """The second was written over the first."""
    t = np.arange(40)
    y = np.sin(2 * np.pi * t / 7) + 2 * np.cos(2 * np.pi * t / 4)
    model = Structural((Level(), Seasonal(7), Seasonal(4))).bind(None, y)
    params = model.mode(model.prior_counts())
    found = model.decompose(params, y)
    assert list(found) == ["level", "seasonal", "seasonal2"]
    smoothed = model.smooth(params, y)
    seen = model.centre[0] + model.scale[0] * smoothed.mean @ model.system(params).emission[0]
    np.testing.assert_allclose(sum(mean for mean, _ in found.values()), seen, rtol=1e-6, atol=1e-6)


def test_inputs_of_questions_and_forecasts_have_the_shape_of_the_fit():
    """Two inputs of three steps were read from three of two; one column was broadcast to two; none at all counted as no effects."""
    rng = np.random.default_rng(0)
    x, y, future = rng.normal(size=(20, 2)), rng.normal(size=20), rng.normal(size=(3, 2))
    model = Structural((Level(), Effects())).bind(x, y)
    params = model.mode(model.prior_counts())
    draws = jax.tree.map(lambda leaf: leaf[None], params)
    for ask in (
        lambda: model.forecast(0, draws, y, 3, x=x, future=future.T),
        lambda: model.forecast(0, draws, y, 3, x=x, future=future.ravel()),
        lambda: model.smooth(params, y, x=x[:, :1]),
        lambda: model.smooth(params, y, x=x[:10]),
        lambda: model.simulate(0, params, 4),
        lambda: model.log_likelihood(params, batch(y)),
    ):
        with pytest.raises(al.DataError, match="inputs"):
            ask()
    assert model.forecast(0, draws, y, 1, x=x, future=future[0]).paths.shape == (1, 1)


def test_log_prob_sees_the_inputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 1))
    y = 3.0 * x[:, 0] + 0.1 * rng.normal(size=30)
    fit = al.fit(0, Structural((Level(), Effects())), (x, y), al.EM(num_restarts=1, num_steps=500))
    exact = fit.model.filter(fit.posterior.params, y, x).log_terms.sum()
    np.testing.assert_allclose(al.latent.log_prob(1, fit, y, x=x), [exact], rtol=1e-9)
    with pytest.raises(al.DataError, match="pass x as there"):
        al.latent.log_prob(1, fit, y)


def test_questions_about_other_columns_are_refused():
    """One column was broadcast to all of the fit's."""
    model = LinearDynamics(2).bind(None, np.random.default_rng(0).normal(size=(8, 3)))
    with pytest.raises(al.DataError, match="1 columns"):
        model.filter(model.mode(model.prior_counts()), np.zeros(5))
