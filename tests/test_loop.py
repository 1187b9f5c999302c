"""The driver: streams, non-finite stops, early stopping, drivers and parallel modes, checkpoints."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import loop
from aleator.data import BatchOrder
from tests.conformance import cases
from tests.interrupted import dies_after

X, Y = cases.regression()


def stream(x: np.ndarray, y: np.ndarray, size: int, num_data: int | None = None) -> al.Stream:
    """Epochs in a fixed shuffled order, beginning at any batch."""

    def make(epoch: int, start: int):
        order = np.random.default_rng(epoch).permutation(len(x))
        for first in range(start * size, len(x), size):
            rows = order[first : first + size]
            yield x[rows], y[rows]

    return al.Stream(make, len(x) if num_data is None else num_data)


def leaves(fit: al.Fit) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(fit.sample(0, 2))]


def same(a: al.Fit, b: al.Fit) -> bool:
    return all(np.array_equal(p, q) for p, q in zip(leaves(a), leaves(b), strict=True))


# ---- batches ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_data", "size"), [(10, 3), (10, 10), (7, 1), (5, 4)])
def test_every_epoch_of_the_batch_order_sees_each_row_once(num_data: int, size: int) -> None:
    order = BatchOrder(3, num_data, size)
    flat = order.rows(0, 20).ravel()
    for epoch in range(len(flat) // num_data):
        assert sorted(flat[epoch * num_data : (epoch + 1) * num_data]) == list(range(num_data))
    np.testing.assert_array_equal(order.rows(0, 20)[7:13], order.rows(7, 6))


def test_batch_order_depends_on_seed_and_epoch() -> None:
    assert (BatchOrder(0, 50, 50).rows(0, 1) != BatchOrder(1, 50, 50).rows(0, 1)).any()
    assert (BatchOrder(0, 50, 50).rows(0, 1) != BatchOrder(0, 50, 50).rows(1, 1)).any()


def test_mini_batch_gradients_are_unbiased() -> None:
    """The mean over one epoch of batches that divide N is the full gradient, with weights too."""
    model = cases.network_model().bind(X, Y[:, None])
    target = al.Target(model, cases.N)
    params = model.init(jax.random.key(0))
    weight = np.random.default_rng(0).uniform(size=cases.N)
    gradient = jax.jit(jax.grad(target.log_joint))
    full = gradient(params, al.Data(X, Y[:, None], weight).batch())
    order = BatchOrder(0, cases.N, 8).rows(0, cases.N // 8)
    parts = [gradient(params, al.Data(X[rows], Y[rows, None], weight[rows]).batch()) for rows in order]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), full, mean)


def test_padding_counts_for_nothing() -> None:
    model = cases.network_model().bind(X, Y[:, None])
    target = al.Target(model, cases.N)
    params = model.init(jax.random.key(0))
    short = al.Batch(jnp.asarray(X[:5]), jnp.asarray(Y[:5, None]))
    index = jnp.array([0, 1, 2, 3, 4, -1, -1])
    junk = np.full((2, cases.D), 1e30, np.float32)
    padded = al.Batch(jnp.concatenate([short.x, junk]), jnp.concatenate([short.y, junk[:, :1]]), None, index, padded=True)
    assert int(padded.size) == short.size == 5
    np.testing.assert_allclose(target.log_joint(params, short), target.log_joint(params, padded), rtol=1e-6)
    gradient = jax.grad(target.log_joint)(params, padded)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


# ---- streams ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 40])
def test_exact_from_a_stream_equals_exact_from_arrays(size: int) -> None:
    arrays = al.fit(0, cases.linear_model(), (X, Y), al.Exact())
    streamed = al.fit(0, cases.linear_model(), stream(X, Y, size), al.Exact())
    np.testing.assert_allclose(arrays.posterior.mean, streamed.posterior.mean, atol=1e-12)
    assert abs(arrays.log_evidence.value - streamed.log_evidence.value) < 1e-9


@pytest.mark.parametrize("members", [None, 2])
def test_map_learns_from_a_stream_and_resumes_on_it(members: int | None, tmp_path, monkeypatch) -> None:
    """Ragged last batches, killed after the second checkpoint, resumed: same bits; and the mode is the exact one."""
    method = al.MAP(num_steps=1500, batch_size=7, learning_rate=0.02)
    method = method if members is None else al.Ensemble(method, members)
    model, data = cases.linear_model(), stream(X, Y, 7)
    whole = al.fit(0, model, data, method)
    exact = al.fit(0, model, (X, Y), al.Exact())
    sd = np.sqrt(np.diagonal(exact.posterior.operator.covariance()[0]))
    assert np.max(np.abs(whole.sample(0, 1)["network"]["weight"][0] - exact.posterior.mean) / sd) < 0.35
    monkeypatch.setattr(loop, "MAX_CHUNK", 400)
    with dies_after(2):
        al.fit(0, model, data, method, checkpoint=tmp_path, checkpoint_every=0.0)
    assert same(whole, al.fit(0, model, data, method, checkpoint=tmp_path, resume=True))


def test_streams_that_lie_are_caught() -> None:
    with pytest.raises(al.DataError, match=r"40 rows in epoch 0.*num_data=50"):
        al.fit(0, cases.linear_model(), stream(X, Y, 10, num_data=50), al.MAP(num_steps=30, batch_size=10))
    with pytest.raises(al.DataError, match="stream is empty"):
        al.fit(0, cases.linear_model(), al.Stream(lambda epoch, start: iter(()), 10), al.MAP(num_steps=3, batch_size=10))
    bad = Y.copy()
    bad[30] = np.nan
    with pytest.raises(al.DataError, match="not finite"):
        al.fit(0, cases.linear_model(), stream(X, bad, 10), al.MAP(num_steps=30, batch_size=10))
    with pytest.raises(al.DataError, match="num_data"):
        al.Stream(lambda epoch, start: iter(()), 0)

    def growing(epoch: int, start: int):
        yield X[:3], Y[:3]
        yield X[:9], Y[:9]

    with pytest.raises(al.DataError, match="batches grow"):
        al.fit(0, cases.linear_model(), al.Stream(growing, 12), al.MAP(num_steps=3, batch_size=3))


def test_streams_that_do_not_stop_repeat_or_end_early_are_caught() -> None:
    def endless(epoch: int, start: int):
        while True:
            yield from ((X[i : i + 10], Y[i : i + 10]) for i in range(0, 40, 10))

    once = iter([(X[i : i + 10], Y[i : i + 10]) for i in range(0, 40, 10)])
    early = lambda epoch, start: ((X[i : i + 10], Y[i : i + 10]) for i in range(0, 40 if epoch == 0 else 20, 10))
    again = lambda epoch, start: ((X[:10], Y[:10]) for _ in range(start, 4))
    deaf = lambda epoch, start: ((X[i : i + 10], Y[i : i + 10]) for i in range(0, 40, 10))
    method = al.MAP(num_steps=30, batch_size=10)
    for make, said in (
        (endless, "50 rows in epoch 0, so far.*num_data=40"),
        (lambda epoch, start: once, "rows in epoch 0.*return a new iterator"),  # what was looked at first is gone
        (early, "20 rows in epoch 1.*ends early"),
        (again, "4 equal batches in a row, up to batch 3 of epoch 0"),
    ):
        with pytest.raises(al.DataError, match=said):
            al.fit(0, cases.linear_model(), al.Stream(make, 40), method, progress=False)
    from aleator._feed import StreamFeed

    feed = StreamFeed(al.Stream(deaf, 40), lambda item: item, [0, 2])  # resumed at batch 2 by a stream that begins at 0 all the same
    with pytest.raises(al.DataError, match="begin it at batch `start`"):
        feed.chunk(range(1), 2, 4, 4)


def test_rows_that_are_all_alike_are_no_repetition() -> None:
    alike = lambda epoch, start: ((np.ones((10, 3), np.float32), np.zeros(10, np.float32)) for _ in range(start, 4))
    al.fit(0, cases.linear_model(), al.Stream(alike, 40), al.MAP(num_steps=12, batch_size=10), progress=False)


def test_methods_that_need_all_rows_refuse_a_stream() -> None:
    with pytest.raises(al.MethodError, match="batch_size"):
        al.fit(0, cases.linear_model(), stream(X, Y, 10), al.MAP(num_steps=3))
    with pytest.raises(al.MethodError, match="validation="):
        al.fit(0, cases.linear_model(), stream(X, Y, 10), al.MAP(num_steps=3, batch_size=10, holdout=0.2))
    fit = al.fit(0, cases.linear_model(), stream(X, Y, 10), al.MAP(num_steps=300, batch_size=10, holdout=0.2), validation=(X, Y))
    assert np.isfinite(fit.predict(0, X).mean).all()


# ---- stopping -----------------------------------------------------------------------------------------------------------------------


class Counter(NamedTuple):
    position: jax.Array


class Seen(NamedTuple):
    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Exploding(al.Method):
    """Counts up; its watched value, and later its position, turn to NaN at a chosen step."""

    at: int = 30

    card = al.MAP.card

    def build(self, target) -> loop.Algorithm:
        def step(key, state, batch):
            value = jnp.where(state.position["a"] >= self.at, jnp.nan, state.position["a"])
            return Counter({"a": state.position["a"] + 1 + 0 * value}), Seen(value)

        return loop.Algorithm(
            init=lambda key, start: Counter({"a": jnp.zeros(())}),
            phases=(loop.Phase("count", step, 100, None),),
            position=lambda state: state.position,
            finish=lambda key, state, kept: al.posterior.Point(state.position),
            watch="value",
        )


@pytest.mark.parametrize("at", [1, 16, 17, 30, 99])
def test_nan_stops_with_step_path_advice_and_the_last_good_state(at: int) -> None:
    target = al.target_from_log_density(lambda p: -(p["a"] ** 2), {"a": 0.0})
    with pytest.raises(al.NonFiniteError, match=rf"Step {at} left.*parameter a.*learning_rate") as caught:
        al.fit(0, target, None, Exploding(at))
    # The state before the bad step; where that opens a chunk (FIRST_CHUNK = 16), the state at which the chunk before it began.
    assert float(caught.value.fit.posterior.params["a"]) == (0.0 if at == loop.FIRST_CHUNK else at - 1)
    assert "Stopped" in caught.value.fit.status


def test_a_diverging_fit_keeps_what_it_had() -> None:
    method = al.MAP(num_steps=200, learning_rate=1e6, optimizer="sgd", schedule="constant")
    with pytest.raises(al.NonFiniteError, match="lower learning_rate") as caught:
        al.fit(0, cases.network_model(), (X, Y), method)
    assert all(np.isfinite(leaf).all() for leaf in leaves(caught.value.fit))


def test_early_stopping_restores_the_best_and_stops() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = rng.normal(size=40)  # nothing to learn: held-out rows must stop it
    model = al.BNN(al.networks.MLP(3, (50,), 1), al.Gaussian(), al.Normal(10.0))
    method = al.MAP(num_steps=5000, learning_rate=0.02, schedule="constant", holdout=0.3, patience=3, check_every=20)
    fit = al.fit(0, model, (x, y), method)
    assert fit.manifest["stopped_early"] and fit.manifest["steps"] < 2000 and "stopped early" in fit.status
    free = al.fit(0, model, (x, y), dataclasses.replace(method, holdout=0.0))
    fresh = rng.normal(size=(500, 3)).astype(np.float32)
    truth = rng.normal(size=500)
    assert fit.predict(0, fresh).log_prob(truth).mean() > free.predict(0, fresh).log_prob(truth).mean()


def test_ensemble_members_stop_by_themselves() -> None:
    method = al.MAP(num_steps=2000, learning_rate=0.05, schedule="constant", holdout=0.3, patience=2, check_every=10)
    model = al.BNN(al.networks.MLP(3, (20,), 1), al.Gaussian(), al.Normal(10.0))
    for parallel in ("vmap", "threads"):
        fit = al.fit(0, model, (X, Y), al.Ensemble(method, 4), parallel=parallel)
        assert fit.manifest["stopped_early"]


# ---- how it runs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", ["vmap", "threads", "sequential"])
def test_parallel_modes_agree(parallel: str) -> None:
    method = al.Ensemble(al.MAP(num_steps=50, batch_size=8), 4)
    auto = al.fit(0, cases.network_model(), (X, Y), method)
    other = al.fit(0, cases.network_model(), (X, Y), method, parallel=parallel)
    for a, b in zip(leaves(auto), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert sum(other.manifest["plan"]["groups"]) == 4


class Count(NamedTuple):
    value: jax.Array


@pytest.mark.parametrize("driver", ["loop", "step"])
def test_members_that_are_done_wait_for_the_others(driver: str) -> None:
    """Two counters to ten, from nought and from seven: each stops at ten, and ten steps have run, not a whole chunk."""
    count = loop.Phase("count", lambda key, state, batch: (state + 1.0, Count(state)), 50, None)
    algorithm = loop.Algorithm(
        init=lambda key, start: start,
        phases=(count,),
        position=lambda state: state,
        finish=lambda key, state, kept: None,
        done=lambda state: state >= 10.0,
        members=2,
    )
    result = loop.run(jax.random.key(0), algorithm, None, jnp.asarray([0.0, 7.0]), loop.Options(driver=driver, parallel="vmap"), "")
    np.testing.assert_array_equal(result.state, [10.0, 10.0])
    assert result.steps == 10
    assert result.traces["value"].shape == (2, 10)


@pytest.mark.parametrize("members", [None, 2])
@pytest.mark.parametrize("batch_size", [None, 8])
def test_drivers_agree(members: int | None, batch_size: int | None) -> None:
    method = al.MAP(num_steps=30, batch_size=batch_size)
    method = method if members is None else al.Ensemble(method, members, bootstrap=True)
    fits = [al.fit(0, cases.network_model(), (X, Y), method, driver=driver, parallel="vmap") for driver in ("loop", "step")]
    for a, b in zip(leaves(fits[0]), leaves(fits[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fits[0].info["log_likelihood"], fits[1].info["log_likelihood"], rtol=1e-3, atol=1e-2)
    assert [fit.manifest["plan"]["driver"] for fit in fits] == ["loop", "step"]


def test_heavy_steps_are_timed_and_the_choice_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(loop, "HEAVY_SECONDS", 0.0)
    fit = al.fit(0, cases.network_model(), (X, Y), al.MAP(num_steps=30))
    assert fit.manifest["plan"]["driver"] in ("loop", "step")


def test_checkpoints_of_another_run_are_refused(tmp_path) -> None:
    method = al.MAP(num_steps=20)
    al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path)
    for key, x, chosen in ((1, X, method), (0, X + 1, method), (0, X, al.MAP(num_steps=21))):
        with pytest.raises(al.StoreError, match="belongs to another run"):
            al.fit(key, cases.network_model(), (x, Y), chosen, checkpoint=tmp_path, resume=True)
    done = al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path, resume=True)
    assert same(done, al.fit(0, cases.network_model(), (X, Y), method))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_checkpoints_are_refused(damage: str, tmp_path) -> None:
    method = al.MAP(num_steps=20)
    al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path)
    path = tmp_path / loop.CHECKPOINT
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes({"cut": bytes(content[: len(content) // 2]), "flip": bytes(content), "empty": b""}[damage])
    with pytest.raises(al.StoreError, match=r"cannot be read|altered"):
        al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path, resume=True)


def test_progress_is_shown_when_asked(capsys, monkeypatch) -> None:
    monkeypatch.setattr("aleator._progress.QUIET_SECONDS", 0.0)
    al.fit(0, cases.network_model(), (X, Y), al.MAP(num_steps=40), progress=True)
    assert "MAP" in capsys.readouterr().err


def test_temperature_scales_the_whole_log_joint() -> None:
    model = cases.linear_model().bind(X, Y[:, None])
    params, batch = model.init(jax.random.key(0)), al.Data(X, Y[:, None]).batch()
    warm, cold = al.Target(model, cases.N), al.Target(model, cases.N, temperature=0.5)
    np.testing.assert_allclose(2 * warm.log_joint(params, batch), cold.log_joint(params, batch), rtol=1e-6)
    np.testing.assert_allclose(warm.log_joint(params, batch, beta=0.0), model.log_prior(params), rtol=1e-6)
    fit = al.fit(0, cases.linear_model(), (X, Y), al.MAP(num_steps=5), temperature=0.5)
    assert fit.manifest["temperature"] == 0.5


def test_a_resume_keeps_the_grouping_of_the_run(tmp_path, monkeypatch) -> None:
    """Begun stacked, resumed where members would run alone: the same bits, since the checkpoint remembers the groups."""
    method = al.Ensemble(al.MAP(num_steps=60, batch_size=8, holdout=0.2, check_every=10, patience=100), 4)
    whole = al.fit(0, cases.network_model(), (X, Y), method, parallel="vmap")
    monkeypatch.setattr(loop, "FIRST_CHUNK", 10)
    monkeypatch.setattr(loop, "MAX_CHUNK", 10)
    with dies_after(1):
        al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path, checkpoint_every=0.0, parallel="vmap")
    resumed = al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path, resume=True, parallel="threads")
    assert same(whole, resumed) and resumed.manifest["plan"]["groups"] == [4]
