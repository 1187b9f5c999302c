"""GRU, LSTM and transformer: equal to references written another way, seen by sites, trained and sampled on arrays and on streams."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import sites
from aleator.networks._network import fan_in

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")

N, T, D = 96, 4, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, T, D)).astype(np.float32)
Y = (X[:, :, 0].sum(axis=1) > 0).astype(int)  # every step counts: a network must carry what it saw
TOKENS = RNG.integers(0, 5, (N, T))

NETS = {
    "gru": al.networks.GRU(D, (6,), 2),
    "lstm": al.networks.LSTM(D, (6,), 2),
    "transformer": al.networks.Transformer(D, T, 2, width=8, depth=1, heads=2, hidden=16),
}
MORE = {
    "gru, two layers, tokens": al.networks.GRU(None, (4, 3), 2, vocabulary=5),
    "lstm, tokens": al.networks.LSTM(None, (4,), 2, vocabulary=5),
    "transformer, waves, tokens": al.networks.Transformer(None, 8, 2, width=4, depth=2, heads=2, positions="sinusoidal", vocabulary=5),
    "transformer, set": al.networks.Transformer(D, T, 2, width=4, depth=1, heads=1, positions=None, activation="relu"),
}


def run(net: Any, params: Any, x: Any) -> Any:
    return jax.jit(net.apply)(params, x)


def drawn(net: Any, seed: int = 0) -> Any:
    """Random parameters, biases and gains too."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0.0, 0.5, leaf.shape).astype(np.float32), jax.eval_shape(net.init, jax.random.key(0)))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_layers_are_equinox_cells_step_by_step(kind: str) -> None:
    make, cell_of = (al.networks.GRU, eqx.nn.GRUCell) if kind == "gru" else (al.networks.LSTM, eqx.nn.LSTMCell)
    net = make(D, (4, 3), 2)
    params = drawn(net)
    sequence = X[0]
    for number, (before, width) in enumerate(((D, 4), (4, 3))):
        layer = params[f"layer{number}"]
        cell = cell_of(before, width, key=jax.random.key(0))
        cell = eqx.tree_at(
            lambda c: (c.weight_ih, c.weight_hh, c.bias),
            cell,
            (layer["input"]["weight"].T, layer["state"]["weight"].T, layer["input"]["bias"]),
        )
        state: Any = jnp.zeros(width)
        if kind == "gru":
            cell = eqx.tree_at(lambda c: c.bias_n, cell, jnp.zeros(width))
        else:
            state = (state, state)
        states = []
        step = eqx.filter_jit(cell)
        for row in sequence:
            state = step(row, state)
            states.append(state if kind == "gru" else state[0])
        sequence = jnp.stack(states)
    expected = sequence[-1] @ params["output"]["weight"] + params["output"]["bias"]
    np.testing.assert_allclose(run(net, params, X)[0], expected, atol=2e-6)


@pytest.mark.parametrize("heads", [1, 2])
def test_the_transformer_is_its_equation_one_row_and_head_at_a_time(heads: int) -> None:
    net = al.networks.Transformer(D, T, 2, width=4, depth=2, heads=heads, hidden=5, activation="tanh")
    params = drawn(net)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    lin = lambda layer, h: h @ layer["weight"] + layer["bias"]
    norm = lambda layer, h: (h - h.mean(1)[:, None]) / np.sqrt(h.var(1)[:, None] + 1e-5) * layer["scale"] + layer["bias"]
    out = []
    for row in X[:3].astype(np.float64):
        h = lin(p["input"], row) + p["positions"]["weight"]
        for block in (p["block0"], p["block1"]):
            inner, parts = norm(block["norm1"], h), []
            for part in np.split(np.arange(4), heads):
                q, k, v = (lin(block[name], inner)[:, part] for name in ("query", "key", "value"))
                weight = np.exp(q @ k.T / np.sqrt(len(part)))
                parts.append(weight / weight.sum(1)[:, None] @ v)
            h = h + lin(block["mix"], np.concatenate(parts, axis=1))
            h = h + lin(block["dense2"], np.tanh(lin(block["dense1"], norm(block["norm2"], h))))
        out.append(lin(p["output"], norm(p["norm"], h).mean(0)))
    np.testing.assert_allclose(run(net, params, X[:3]), out, atol=2e-5)


def test_waves_have_the_published_form() -> None:
    from aleator.networks.transformer import sinusoids

    waves = np.asarray(sinusoids(7, 6))
    for j in range(3):
        np.testing.assert_allclose(waves[:, 2 * j], np.sin(np.arange(7) / 10000 ** (2 * j / 6)), atol=1e-6)
        np.testing.assert_allclose(waves[:, 2 * j + 1], np.cos(np.arange(7) / 10000 ** (2 * j / 6)), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MORE if "tokens" in name])
def test_steps_that_are_not_there_change_nothing(name: str) -> None:
    net = MORE[name]
    params = drawn(net)
    ended = np.concatenate([TOKENS, np.full((N, 2), -1)], axis=1)
    np.testing.assert_allclose(run(net, params, ended), run(net, params, TOKENS), atol=2e-6)
    assert np.abs(run(net, params, ended) - run(net, params, np.maximum(ended, 0))).max() > 1e-3
    np.testing.assert_array_equal(run(net, params, TOKENS.astype(np.float32)), run(net, params, TOKENS))


def test_without_positions_the_order_of_the_steps_is_forgotten() -> None:
    forgets, knows = MORE["transformer, set"], NETS["transformer"]
    assert np.abs(run(forgets, drawn(forgets), X) - run(forgets, drawn(forgets), X[:, ::-1])).max() < 1e-5
    assert np.abs(run(knows, drawn(knows), X) - run(knows, drawn(knows), X[:, ::-1])).max() > 1e-2


@pytest.mark.parametrize("name", [*NETS, *MORE])
def test_sites_see_every_matrix_and_replay_value_and_gradient(name: str) -> None:
    net = (NETS | MORE)[name]
    x, params = (TOKENS if "tokens" in name else X)[:4], drawn(net)
    found = sites.find(net.apply, params, x)
    assert not {path for path in found.rest if path.endswith("weight")} - {"positions.weight"}
    assert any("scan" in site.place for site in found.sites) == ("transformer" not in name)
    value = lambda outputs: lambda p: jnp.sum(outputs(p) ** 2)
    replayed = value(lambda p: sites.replay(None, net.apply, p, x, sites.identity)[0])
    ours, theirs = (jax.jit(jax.value_and_grad(f))(params) for f in (replayed, value(lambda p: net.apply(p, x))))
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()) + 1e-6), ours[1], theirs[1])


def test_tables_that_are_looked_up_have_fan_in_one() -> None:
    net = al.networks.Transformer(None, 8, 2, width=4, depth=1, heads=2, vocabulary=5)
    fans = fan_in(net, jax.eval_shape(net.init, jax.random.key(0)))
    assert fans["tokens"] == {"weight": 1} and fans["positions"] == {"weight": 1} and fans["output"]["weight"] == 4


def stream() -> al.Stream:
    def make(epoch: int, start: int) -> Any:
        order = np.random.default_rng(epoch).permutation(N).reshape(-1, 16)
        return ((X[rows], Y[rows]) for rows in order[start:])

    return al.Stream(make, N)


@pytest.mark.parametrize("name", NETS)
def test_trained_by_map_and_sampled_in_cycles(name: str, tmp_path: Any) -> None:
    """On arrays and on a stream; saved and loaded."""
    model = al.BNN(NETS[name], al.Categorical(2), al.Normal(1.0))
    mode = al.fit(0, model, (X, Y), al.MAP(num_steps=300, batch_size=16, learning_rate=2e-2), progress=False)
    assert np.mean(mode.predict(0, X).probs.argmax(-1) == Y) > 0.9
    for data, sampling in (((X, Y), "independent"), (stream(), "shuffled")):
        method = al.SGHMC(1e-3, 0.2, 8, 0, 1, thin=5, batch_size=16, sampling=sampling, num_search=0, cycles=2)
        fit = al.fit(1, model, data, method, init=mode, progress=False)
        probs = fit.predict(0, X).probs
        assert fit.posterior.params["network"]["output"]["bias"].shape == (8, 2)
        assert np.mean(probs.argmax(-1) == Y) > 0.85
        assert np.ptp(np.asarray(fit.posterior.params["network"]["output"]["weight"]), axis=0).min() > 1e-4
    fit.save(tmp_path / "fit")
    np.testing.assert_array_equal(al.load(tmp_path / "fit").predict(0, X).probs, probs)


def test_what_cannot_be_is_refused() -> None:
    wrong = [
        lambda: al.networks.GRU(None, (4,), 1),
        lambda: al.networks.LSTM(3, (4,), 1, vocabulary=5),
        lambda: al.networks.GRU(3, (), 1),
        lambda: al.networks.Transformer(3, 5, 1, width=6, heads=4),
        lambda: al.networks.Transformer(3, 5, 1, positions="sinusoid"),
        lambda: NETS["gru"].apply(NETS["gru"].init(jax.random.key(0)), X[:, :, :1]),
        lambda: NETS["lstm"].apply(NETS["lstm"].init(jax.random.key(0)), X[:, 0]),
        lambda: NETS["transformer"].apply(NETS["transformer"].init(jax.random.key(0)), np.zeros((2, T + 1, D), np.float32)),
    ]
    for make in wrong:
        with pytest.raises(al.ModelError, match="Do this"):
            make()
