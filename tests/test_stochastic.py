"""What the samplers with stochastic gradients share: schedules, batches, the step size, starts, and what is caught."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.data import Data
from aleator.methods import _optimise, _stochastic
from aleator.methods.cyclical import Cyclical, timetable
from aleator.target import Target
from tests.conformance import cases

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")

X, Y = cases.regression()
SHORT = {"num_samples": 20, "num_warmup": 20, "num_chains": 2, "thin": 2, "batch_size": 8, "num_search": 0}


def test_the_timetable_of_cycles() -> None:
    """20 draws, thin 3, 4 cycles, half of each explores: 5·3 steps that sample after 15 that do not, in each of 4 cycles."""
    table = timetable(20, 3, "constant", Cyclical(4, 0.5))
    number = np.arange(-3, table.total + 1)
    factor, heat, wanted = (np.asarray(jax.vmap(part)(jnp.asarray(number))) for part in (table.factor, table.heat, table.wanted))
    assert table.total == 4 * 30 and wanted.sum() == 20
    steps = number[wanted]
    np.testing.assert_array_equal(steps.reshape(4, 5), 15 + 3 * np.arange(1, 6) + 30 * np.arange(4)[:, None])
    np.testing.assert_array_equal(heat[number > 0], np.tile(np.repeat([0.0, 1.0], 15), 4))
    assert (heat[number <= 0] == 1).all() and (factor[number <= 0] == 1).all()  # warm-up
    np.testing.assert_allclose(factor[number > 0], np.tile(0.5 * (1 + np.cos(np.pi * np.arange(30) / 30)), 4), atol=1e-6)


def test_draws_are_kept_where_the_cycle_samples_and_noise_comes_only_there() -> None:
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p**2), jnp.full(3, 2.0))
    method = al.SGLD(0.1, 10, 0, 1, thin=1, cycles=Cyclical(2, 0.8), num_search=0)
    fit = al.fit(0, target, None, method, progress=False)
    assert fit.posterior.params.shape == (10, 3)
    step_size = fit.info["step_size"][0, 1:]  # the first is a look at the start
    assert len(step_size) == 50 and step_size[0] == pytest.approx(0.1) and step_size[25] == pytest.approx(0.1)
    value = fit.info["log_likelihood"][0, 1:]
    assert (np.diff(value[:20]) > 0).all()  # without noise every step climbs
    assert not (np.diff(value[20:25]) > 0).all()


def test_a_falling_step_size_weighs_the_draws() -> None:
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p**2), jnp.zeros(2))
    fit = al.fit(0, target, None, al.SGLD(0.3, 50, 10, 2, thin=1, schedule="polynomial", num_search=0), progress=False)
    weights = fit.posterior.weights
    assert weights.sum() == pytest.approx(1.0) and weights.shape == (100,)
    np.testing.assert_allclose(weights[49] / weights[0], ((1 + 50 / 5) / (1 + 1 / 5)) ** (-1 / 3), rtol=1e-5)
    np.testing.assert_array_equal(weights[:50], weights[50:])


@pytest.mark.parametrize("sampling", ["independent", "stratified"])
def test_batches_give_every_row_the_same_chance(sampling: str) -> None:
    data = Data(np.arange(23, dtype=np.float32)[:, None], np.zeros((23, 1), np.float32)).batch()
    keys = jax.random.split(jax.random.key(0), 6000)
    rows = np.asarray(jax.jit(jax.vmap(lambda key: _stochastic.draw(key, data, 5, sampling).index))(keys))
    count = np.bincount(rows.ravel(), minlength=23)
    expected = rows.size / 23
    assert rows.shape == (6000, 5) and len(count) == 23
    assert np.all(np.abs(count - expected) < 5 * np.sqrt(expected))
    distinct = np.array([len(set(row)) for row in rows])
    assert (distinct == 5).all() if sampling == "stratified" else (distinct < 5).any()


@pytest.mark.parametrize("anchored", [False, True])
def test_the_noise_of_the_gradient_is_estimated_without_bias(anchored: bool) -> None:
    """The mean of m/(n − m)·(g − g_half)² over many batches is the variance of g over many batches, for an odd n too."""
    target = Target(cases.network_model().bind(X, Y[:, None]), cases.N)
    params = target.init(jax.random.key(0))
    packing = _optimise.packing(params)
    data, here = Data(X, Y[:, None]).batch(), packing.pack(params)
    there = here + 0.05
    anchor = _stochastic.Anchor(there, _stochastic.full_gradient(there, data, target, packing)) if anchored else ()

    @jax.jit
    def one(key: Any) -> Any:
        batch = _stochastic.draw(key, data, 7, "independent")
        half = _stochastic.first_half(batch)
        g, part = (_stochastic.estimate(here, rows, anchor, target, packing)[1] for rows in (batch, half))
        return g, half.size / (batch.size - half.size) * (g - part) ** 2

    g, square = (
        np.asarray(leaf, np.float64)
        for leaf in jax.lax.map(one, jax.random.split(jax.random.key(1, impl="philox2x32"), 10_000), batch_size=500)
    )
    exact = np.asarray(_stochastic.estimate(here, data, (), target, packing)[1], np.float64)
    assert np.all(np.abs(g.mean(axis=0) - exact) < 5 * g.std(axis=0) / np.sqrt(len(g)) + 1e-4)
    error = np.hypot(square.std(axis=0), ((g - g.mean(axis=0)) ** 2).std(axis=0)) / np.sqrt(len(g))
    assert np.all(np.abs(square.mean(axis=0) - g.var(axis=0)) < 5 * error + 1e-9)
    assert np.all(error < 0.2 * g.var(axis=0) + 1e-9)


def test_the_step_size_meets_the_bias_it_is_asked_for() -> None:
    """Curvature 4 in the stiffest direction: h = 4·b/((1 + b)·4), and the variance there is off by b."""
    scale = jnp.array([0.5, 1.0, 2.0])
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum((p / scale) ** 2), jnp.zeros(3))
    fit = al.fit(0, target, None, al.SGLD(num_samples=4, num_warmup=0, num_chains=1, num_search=0, bias=0.2), progress=False)
    h = fit.manifest["health"]["step_size"]
    assert h == pytest.approx(0.8 / 1.2 / 4, rel=1e-4)
    assert 0.25 / (1 - h / (4 * 0.25)) == pytest.approx(1.2 * 0.25, rel=1e-4)
    h = float(al.SGHMC(bias=0.2, friction=0.4).largest_step(4.0))
    assert 0.25 / (1 - h / (4 * 0.25 * 1.6)) == pytest.approx(1.2 * 0.25, rel=1e-6)


def test_the_preconditioner_is_learned_in_warm_up_and_frozen() -> None:
    """Two directions whose scales differ by a hundred: gradients of root mean square 1/σ give them steps of about 0.02h and 1.98h, so that
    the wide one forgets itself in some 500 steps: 160 independent draws, whose standard deviation is known to 6 %."""
    scale = np.array([0.1, 10.0])
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum((p / scale) ** 2), jnp.asarray(scale))
    method = al.SGLD(0.2, 2000, 2000, 2, thin=20, num_search=0, preconditioner="rmsprop")
    fit = al.fit(0, target, None, method, progress=False)
    spread = np.asarray(fit.posterior.params).std(axis=0)
    np.testing.assert_allclose(spread, scale, rtol=0.25)


def test_starts_from_a_mode_and_from_an_ensemble() -> None:
    model = cases.network_model()
    members = al.fit(0, model, (X, Y), al.Ensemble(al.MAP(num_steps=200), 2), progress=False)
    method = al.SGHMC(1e-7, 0.1, **SHORT)
    fit = al.fit(1, model, (X, Y), method, init=members, progress=False)
    first = np.asarray(jax.tree.leaves(fit.posterior.params["network"])[0]).reshape(2, 20, -1)
    start = np.asarray(jax.tree.leaves(members.sample(0, 2)["network"])[0])
    for chain in range(2):
        near = [
            np.abs(first[chain, 0] - leaf.ravel()).max() for leaf in np.asarray(jax.tree.leaves(members.posterior.params["network"])[0])
        ]
        assert min(near) < 0.05 and near.index(min(near)) == chain
    assert start.shape[0] == 2 and fit.manifest["steps"] == 1 + 10 + 20  # two of ours make one of the driver's
    searched = al.fit(1, model, (X, Y), al.SGLD(1e-7, **SHORT | {"num_search": 300}), progress=False)
    assert searched.manifest["steps"] == 300 + 1 + 10 + 20
    assert searched.info["log_likelihood"][:, -1].mean() > searched.info["log_likelihood"][:, 0].mean() + 10


def test_a_stream_needs_shuffled_batches() -> None:
    def make(epoch: int, start: int) -> Any:
        order = np.random.default_rng(epoch).permutation(cases.N).reshape(5, 8)
        return ((X[rows], Y[rows]) for rows in order[start:])

    stream = al.Stream(make, cases.N)
    fit = al.fit(0, cases.network_model(), stream, al.SGHMC(1e-4, 0.1, sampling="shuffled", **SHORT), progress=False)
    assert fit.predict(1, X).mean.shape == (cases.N,)
    assert fit.manifest["health"]["gradient_noise"] > 0
    assert any("not corrected" in departure for departure in fit.manifest["departures"])
    with pytest.raises(al.MethodError, match="Stream"):
        al.fit(0, cases.network_model(), stream, al.SGHMC(1e-4, 0.1, **SHORT), progress=False)
    wrong = al.Stream(make, cases.N + 8)
    with pytest.raises(al.DataError, match="num_data"):
        al.fit(0, cases.network_model(), wrong, al.SGHMC(1e-4, 0.1, sampling="shuffled", **SHORT), progress=False)


def test_a_step_that_explodes_is_named() -> None:
    target = al.target_from_log_density(lambda p: -0.25 * jnp.sum(p**4), jnp.full(2, 3.0))
    with pytest.raises(al.NonFiniteError, match="lower learning_rate or step_size") as caught:
        al.fit(0, target, None, al.SGLD(1.0, 100, 0, 2, num_search=0), progress=False)
    assert np.isfinite(np.asarray(caught.value.fit.posterior.params)).all()


def test_the_chain_that_diverges_is_named() -> None:
    """Two chains from two of these places: a step that is right near 0 throws the one at 30 out."""
    target = al.target_from_log_density(lambda p: -0.25 * jnp.sum(p**4), jnp.zeros(2))
    begin = al.fit(0, target, None, al.SGLD(1e-9, 8, 0, 2, thin=1, num_search=0), progress=False)
    begin.posterior.params[:] = np.repeat([[0.0, 0.0], [30.0, 30.0]], 8, axis=0)
    with pytest.raises(al.NonFiniteError, match=r"in run [01] of 0 to 1"):
        al.fit(0, target, None, al.SGLD(0.05, 100, 0, 2, num_search=0), init=begin, progress=False)


def test_what_is_too_hot_is_said() -> None:
    """A step near the limit of stability, and a gradient noise that no injected noise can make room for."""
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p**2), jnp.zeros(50))
    with pytest.warns(al.HealthWarning, match="configurational temperature"):
        al.fit(0, target, None, al.SGLD(1.5, 200, 50, 2, num_search=0), progress=False)
    x = np.zeros((200, 1), np.float32)
    y = np.random.default_rng(0).normal(size=200).astype(np.float32)
    model = al.BNN((lambda p, x: jnp.broadcast_to(p["m"], (x.shape[0], 1)), {"m": jnp.zeros(1)}), al.Gaussian(1.0), al.Normal(10.0))
    with pytest.warns(al.HealthWarning, match="noise of the gradient"):
        al.fit(0, model, (x, y), al.SGLD(0.005, 200, 200, 2, thin=1, batch_size=2, num_search=0), progress=False)


def test_wrong_settings_are_refused() -> None:
    wrong = [
        {"step_size": 0.0},
        {"step_size": "best"},
        {"thin": 0},
        {"sampling": "shuffle"},
        {"schedule": "cosine"},
        {"schedule": "polynomial", "cycles": 3},
        {"preconditioner": "adam"},
        {"preconditioner": "rmsprop"},
        {"control_variates": "mean"},
        {"control_variates": "mode", "sampling": "shuffled"},
        {"num_warmup": -1},
        {"storage": "int8"},
        {"cycles": 0},
    ]
    for settings in wrong:
        with pytest.raises(al.MethodError, match="Do this"):
            al.SGLD(**settings)
    for method in (al.SGHMC, al.SGNHT, al.Underdamped):
        with pytest.raises(al.MethodError, match="friction"):
            method(friction=1.5)
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p**2), jnp.zeros(2))
    with pytest.raises(al.MethodError, match="no rows"):
        al.fit(0, target, None, al.SGLD(control_variates="mode"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = al.fit(0, cases.network_model(), (X, Y), al.SGLD(1e-4, storage="float16", **SHORT), progress=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.posterior.params)} == {np.dtype(np.float16)}
