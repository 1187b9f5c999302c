"""Semi-parametric regression: a linear part and a network part, in any framework. Lecture row E7."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import explain
from aleator.networks.partial import Partial


def data(n: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """y = 1.5 x₀ + 0·x₁ + sin 2x₂ + ε."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    return x, (1.5 * x[:, 0] + np.sin(2 * x[:, 2]) + 0.2 * rng.normal(size=n)).astype(np.float32)


def _equinox():
    import equinox as eqx

    return eqx.nn.MLP(1, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))


NETWORKS = {
    "mlp": lambda: al.networks.MLP(1, (8,), 1, "tanh"),
    "equinox": _equinox,
    "function": lambda: (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"],
        {"w": jnp.ones((1, 8)), "b": jnp.arange(8.0), "v": jnp.ones((8, 1))},
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_outputs_are_the_sum_of_the_parts(kind: str) -> None:
    net = Partial(NETWORKS[kind](), linear=(0, 1), rest=(2,))
    params = net.init(jax.random.key(0))
    first = net.fan_axes == "first"
    beta = np.array([[2.0], [-1.0]], np.float32)
    params["linear"]["weight"] = jnp.asarray(beta.T if first else beta)
    x, _ = data(10)
    expected = x[:, :2] @ beta + np.asarray(net.network.apply(params["network"], x[:, 2:]))
    np.testing.assert_allclose(net.apply(params, x), expected, rtol=1e-5, atol=1e-6)
    model = al.BNN(net, al.Gaussian(), al.Normal({"linear": 10.0, "network": 1.0}))
    fans = model.fan_in(params)
    assert fans["linear"]["weight"] == 2
    scales = model.prior.scales(params, fans)
    assert scales["linear"]["weight"] == 10.0 and set(jax.tree.leaves(scales["network"])) == {1.0}
    assert al.priors.Hierarchical(per="input").init(params, fans)["log_scale"]["linear.weight"].shape == (2,)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_linear_part_is_recovered(kind: str) -> None:
    """β within 5 posterior standard deviations and small, for a mean-field posterior; β₁ = 0 is not ruled out, β₀ = 0 is."""
    model = al.BNN(Partial(NETWORKS[kind](), (0, 1), (2,)), al.Gaussian(), al.Normal({"linear*": 10.0, "*": 1.0}))
    fit = al.fit(0, model, data(), al.Variational(num_steps=2000, learning_rate=0.02, num_evidence=0))
    draws = fit.sample(1, 500)["network"]
    beta = np.asarray(draws["linear"]["weight"]).reshape(500, 2)
    assert np.all(np.abs(beta.mean(0) - [1.5, 0.0]) < 5 * beta.std(0)) and np.all(beta.std(0) < 0.05)
    matters = [explain.savage_dickey(2, fit, j) for j in (0, 1)]
    assert matters[0].probability() > 0.999 and matters[1].probability() < 0.2
    rows, y = data(100, seed=1)
    assert np.sqrt(np.mean((fit.predict(3, rows).mean - y) ** 2)) < 0.3


def test_exact_oracle_of_the_linear_part() -> None:
    """With a network that is linear too, the sum is a linear model, whose posterior is known: draws of NUTS against it."""
    x, y = data(60)
    flat = (lambda p, rows: rows @ p["w"], {"w": jnp.zeros((1, 1))})
    net = Partial(flat, (0, 1), (2,))
    fit = al.fit(0, al.BNN(net, al.Gaussian(0.5), al.Normal({"linear": 3.0, "network": 0.7})), (x, y), _nuts())
    precision = x.astype(float).T @ x / 0.25 + np.diag([1 / 9, 1 / 9, 1 / 0.49])
    covariance = np.linalg.inv(precision)
    mean = covariance @ x.T @ y / 0.25
    from aleator.convergence import mcse

    draws = fit.posterior.params["network"]
    values = np.concatenate([np.asarray(draws["linear"]["weight"])[..., 0], np.asarray(draws["network"]["w"])[..., 0]], axis=1)
    chains = values.reshape(fit.posterior.num_chains, -1, 3).astype(np.float64)
    assert np.all(np.abs(chains.mean((0, 1)) - mean) < 5 * mcse(chains))
    squares = (chains - mean) ** 2
    assert np.all(np.abs(squares.mean((0, 1)) - np.diagonal(covariance)) < 5 * mcse(squares))


def _nuts():
    from aleator.methods.nuts import NUTS

    return NUTS(num_samples=500, num_warmup=300, num_chains=2)


def test_columns_are_checked() -> None:
    net = al.networks.MLP(1, (4,), 1)
    for linear in ((), (0, 0), (-1,), (0.5,), (True,)):
        with pytest.raises(al.ModelError, match="column numbers"):
            Partial(net, linear)
    with pytest.raises(al.ModelError, match=r"\(n, 4\) or wider"):
        al.fit(0, al.BNN(Partial(net, (3,), (0,))), data(10), al.MAP(num_steps=1))
    assert Partial(net, 0, 1).linear == (0,) and Partial(net, 0, 1).outputs == 1
    assert hash(Partial(net, 0)) == hash(Partial(net, (0,)))
    wide = Partial(al.networks.MLP(1, (4,), 2), (0, 1), (2,))
    assert wide.init(jax.random.key(0))["linear"]["weight"].shape == (2, 2)
