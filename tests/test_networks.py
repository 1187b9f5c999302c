"""Adapters: the same network in three frameworks is the same network here."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aleator as al
from aleator.networks._network import fan_in
from tests.conformance import cases

X, Y = cases.regression()
W, B = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32), np.arange(8, dtype=np.float32) / 10
V, C = np.random.default_rng(1).normal(size=(8, 1)).astype(np.float32), np.ones(1, np.float32)


def as_function():
    params = {"a": {"kernel": jnp.asarray(W), "bias": jnp.asarray(B)}, "b": {"kernel": jnp.asarray(V), "bias": jnp.asarray(C)}}
    return lambda p, x: jnp.tanh(x @ p["a"]["kernel"] + p["a"]["bias"]) @ p["b"]["kernel"] + p["b"]["bias"], params


def as_equinox():
    net = eqx.nn.MLP(3, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    where = lambda m: [m.layers[0].weight, m.layers[0].bias, m.layers[1].weight, m.layers[1].bias]
    return eqx.tree_at(where, net, [jnp.asarray(W.T), jnp.asarray(B), jnp.asarray(V.T), jnp.asarray(C)])


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.a, self.b = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.a.kernel[...], self.a.bias[...] = jnp.asarray(W), jnp.asarray(B)
        self.b.kernel[...], self.b.bias[...] = jnp.asarray(V), jnp.asarray(C)

    def __call__(self, x):
        return self.b(self.drop(jnp.tanh(self.a(x))))


MAKERS = {"function": as_function, "equinox": as_equinox, "nnx": lambda: Net(nnx.Rngs(0))}


@pytest.mark.parametrize("name", MAKERS)
def test_outputs_and_fan_in_agree_with_numpy(name: str) -> None:
    network = al.as_network(MAKERS[name]())
    np.testing.assert_allclose(network.apply(network.params, X), np.tanh(X @ W + B) @ V + C, rtol=1e-5, atol=1e-5)
    assert sorted(jax.tree.leaves(fan_in(network, network.params))) == [1, 1, 3, 8]


@pytest.mark.parametrize("scaling", ["none", "fan_in"])
def test_one_network_three_frameworks_one_mode(scaling: str) -> None:
    predictions = [
        al.fit(0, al.BNN(make(), prior=al.Normal(1.0, scaling=scaling)), (X, Y), al.MAP(num_steps=100)).predict(0, X).mean
        for make in MAKERS.values()
    ]
    np.testing.assert_allclose(predictions[0], predictions[1], atol=1e-3)
    np.testing.assert_allclose(predictions[0], predictions[2], atol=1e-3)


@pytest.mark.parametrize("name", MAKERS)
def test_a_fit_starts_from_the_given_parameters(name: str) -> None:
    model = al.BNN(MAKERS[name]()).bind(X, Y[:, None])
    start = model.outputs(model.start(jax.random.key(5)), X)
    np.testing.assert_allclose(start, np.tanh(X @ W + B) @ V + C, rtol=1e-5, atol=1e-5)
    fresh = model.outputs(model.init(jax.random.key(5)), X)
    assert np.abs(np.asarray(fresh) - np.asarray(start)).max() > 0.1


@pytest.mark.parametrize("name", MAKERS)
def test_rebuild_gives_back_the_users_kind(name: str) -> None:
    network = al.as_network(MAKERS[name]())
    doubled = jax.tree.map(lambda leaf: 2 * leaf, network.params)
    rebuilt = network.rebuild(doubled)
    expected = network.apply(doubled, X)
    if name == "function":
        rebuilt_out = as_function()[0](rebuilt, X)
    else:
        rebuilt_out = jax.vmap(rebuilt)(X) if name == "equinox" else rebuilt(X)
    np.testing.assert_allclose(rebuilt_out, expected, rtol=1e-5, atol=1e-5)


def test_makers_are_used_for_fresh_starts() -> None:
    made = al.as_network(as_equinox(), init=lambda key: eqx.nn.MLP(3, 1, 8, 1, activation=jnp.tanh, key=key))
    a, b = made.init(jax.random.key(0)), made.init(jax.random.key(1))
    assert (np.asarray(a.layers[0].bias) != np.asarray(b.layers[0].bias)).any()
    nets = al.as_network(Net(nnx.Rngs(0)), init=lambda key: Net(nnx.Rngs(key)))
    assert jax.tree.structure(nets.init(jax.random.key(0))) == jax.tree.structure(nets.params)
    functions = al.as_network(as_function(), init=lambda key: jax.tree.map(lambda p: p + 1, as_function()[1]))
    np.testing.assert_allclose(functions.init(jax.random.key(0))["b"]["bias"], C + 1)


def test_dropout_layers_need_a_key_and_nothing_is_mutated() -> None:
    module = Net(nnx.Rngs(0), rate=0.5)
    network = al.as_network(module)
    assert network.stochastic
    silent = network.apply(network.params, X)
    np.testing.assert_array_equal(silent, network.apply(network.params, X))
    noisy = [np.asarray(network.apply(network.params, X, jax.random.key(seed))) for seed in (0, 1)]
    assert (noisy[0] != noisy[1]).any() and (noisy[0] != np.asarray(silent)).any()
    np.testing.assert_array_equal(noisy[0], network.apply(network.params, X, jax.random.key(0)))
    fit = al.fit(0, al.BNN(module), (X, Y), al.MAP(num_steps=10))
    np.testing.assert_array_equal(fit.predict(0, X).mean, fit.predict(1, X).mean)


class EquinoxDropout(eqx.Module):
    layer: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __call__(self, x, key=None):
        return self.layer(self.drop(x, key=key))


def test_equinox_dropout() -> None:
    module = EquinoxDropout(eqx.nn.Linear(3, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.5))
    network = al.as_network(module)
    assert network.stochastic
    silent = np.asarray(network.apply(network.params, X))
    noisy = np.asarray(network.apply(network.params, X, jax.random.key(0)))
    assert (silent != noisy).any()
    al.fit(0, al.BNN(module), (X, Y), al.MAP(num_steps=5, batch_size=8))


def test_mlp_sizes_and_activations_are_checked() -> None:
    with pytest.raises(al.ModelError, match="positive sizes"):
        al.networks.MLP(0, (3,), 1)
    with pytest.raises(al.ModelError, match="tanh"):
        al.networks.MLP(3, (3,), 1, activation="tanhh")
    with pytest.raises(al.ModelError, match=r"x\[:, None\]"):
        al.fit(0, al.BNN(al.networks.MLP(1, (3,), 1)), (X[:, 0], Y), al.MAP(num_steps=2))
    assert al.networks.MLP(3, 5, 1).hidden == (5,)


def test_shallow_net_is_the_decks_formula() -> None:
    """y = Σ βⱼ ψ(x'γⱼ), without biases."""
    net = al.networks.Shallow(3, 4, bias=False)
    params = net.init(jax.random.key(0))
    gamma, beta = np.asarray(params["hidden"]["weight"]), np.asarray(params["output"]["weight"])
    np.testing.assert_allclose(net.apply(params, X), (1 / (1 + np.exp(-X @ gamma))) @ beta, rtol=1e-5, atol=1e-5)
    assert "bias" not in params["hidden"] and "bias" not in params["output"]
