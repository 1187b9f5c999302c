"""The dropout family: bounds against closed forms and enumeration, draws against functions, one posterior whatever the framework."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator._errors import MethodError, ModelError
from aleator.methods import _noisy
from aleator.methods.dropout import bernoulli_kl, droppable
from aleator.model import signature
from aleator.posterior import GaussianDropout, Masked, Passes
from aleator.target import Target

N, D = 40, 3
FAMILY = [al.Dropout, al.ConcreteDropout, al.VariationalDropout, al.SparseDropout]


def data(seed: int = 0, n: int = N, weights: tuple[float, ...] = (1.0, -0.5, 0.3), noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, len(weights))).astype(np.float32)
    return x, (x @ np.asarray(weights) + noise * rng.normal(size=n)).astype(np.float32)


def model(prior: Any = None, hidden: tuple[int, ...] = (4,), noise: float | None = 0.3, network: Any = None) -> al.BNN:
    network = al.networks.MLP(D, hidden, 1, activation="tanh") if network is None else network
    return al.BNN(network, al.Gaussian() if noise is None else al.Gaussian(noise), al.Normal(1.0) if prior is None else prior)


def target(bnn: Any) -> Target:
    x, y = data()
    return Target(bnn.bind(x, y[:, None]), N, signature=signature(x))


def entropy(p: float) -> float:
    return -p * np.log(p) - (1 - p) * np.log(1 - p)


# ---- the bound of dropout ------------------------------------------------------------------------------------------------------------


def masks_of(sizes: list[int], rates: list[float]) -> Any:
    """All masks of all units with their probabilities."""
    for bits in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        parts = np.split(np.asarray(bits, np.float32), np.cumsum(sizes)[:-1])
        weight = np.prod([np.prod(np.where(part == 1, 1 - p, p)) for part, p in zip(parts, rates, strict=True)])
        yield weight, [part / (1 - p) for part, p in zip(parts, rates, strict=True)]


@pytest.mark.parametrize(("rates", "scale"), [((0.1, 0.1), 1.0), ((0.2, 0.6), 0.5)])
def test_bound_with_a_normal_prior_is_weight_decay_less_entropy(rates: tuple[float, float], scale: float) -> None:
    """KL = Σ ‖M‖²/(2s²(1−p)) + (biases)²/(2s²) + (number of parameters)·log(s√2π) − Σ K·H(p)."""
    bound = target(model(al.Normal(scale)))
    chosen = droppable(bound, "inputs", "Dropout")
    params = jax.tree.map(lambda leaf: leaf + 0.3, bound.init(jax.random.key(0)))
    net = params["network"]
    decay = sum(float(jnp.sum(net[f"layer{i}"]["weight"] ** 2)) / (2 * scale**2 * (1 - p)) for i, p in enumerate(rates))
    decay += sum(float(jnp.sum(net[f"layer{i}"]["bias"] ** 2)) for i in range(2)) / (2 * scale**2)
    count = sum(leaf.size for leaf in jax.tree.leaves(net))
    expected = decay + count * np.log(scale * np.sqrt(2 * np.pi)) - D * entropy(rates[0]) - 4 * entropy(rates[1])
    np.testing.assert_allclose(bernoulli_kl(bound, params, chosen, list(rates)), expected, rtol=1e-5)


def test_weight_decay_is_the_lectures_lambda() -> None:
    """−(σ²/N)·∇KL/2… in units of the mean squared error: ∇ of λ‖M‖² with λ = σ²/(s²N(1−p)), for 1/N·Σ(y−f)² + λ‖M‖²."""
    sigma, scale, p = 0.3, 0.7, 0.25
    bound = target(model(al.Normal(scale), noise=sigma))
    chosen = droppable(bound, "inputs", "Dropout")
    params = bound.init(jax.random.key(1))
    slope = jax.grad(lambda q: bernoulli_kl(bound, q, chosen, [p, p]))(params)["network"]["layer0"]["weight"]
    lam = sigma**2 / (scale**2 * N * (1 - p))
    # log-likelihood = −N/(2σ²)·(mean squared error) + …, so the bound divided by −N/(2σ²) has the decay 2σ²/N·KL.
    np.testing.assert_allclose(2 * sigma**2 / N * slope, lam * 2 * params["network"]["layer0"]["weight"], rtol=1e-5)


@pytest.mark.parametrize("prior", [al.priors.Laplace(0.7), al.priors.StudentT(3.0), al.Normal(0.6)])
def test_bound_with_any_prior_equals_enumeration_over_masks(prior: Any) -> None:
    bound = target(model(prior, hidden=(3,)))
    chosen = droppable(bound, "inputs", "Dropout")
    params, rates = jax.tree.map(lambda leaf: leaf + 0.2, bound.init(jax.random.key(2))), [0.3, 0.15]
    net = params["network"]

    def log_prior(a: Any, b: Any) -> Any:
        layers = {
            f"layer{i}": {"weight": net[f"layer{i}"]["weight"] * z[:, None], "bias": net[f"layer{i}"]["bias"]} for i, z in enumerate((a, b))
        }
        return bound.log_prior({**params, "network": layers})

    weights, masks = zip(*masks_of([D, 3], rates), strict=True)
    values = jax.vmap(log_prior)(*(jnp.asarray(np.stack(part)) for part in zip(*masks, strict=True)))
    expected = -float(np.sum(np.asarray(weights) * np.asarray(values))) - D * entropy(rates[0]) - 3 * entropy(rates[1])
    np.testing.assert_allclose(bernoulli_kl(bound, params, chosen, rates), expected, rtol=2e-5)


def test_predictive_mean_equals_enumeration_over_masks() -> None:
    x, y = data()
    fit = al.fit(0, model(hidden=(3,)), (x, y), al.Dropout({"layer0": 0.2, "*": 0.4}, placement="inputs", num_steps=100, num_evidence=2))
    net = fit.posterior.params["network"]
    first, second = net["layer0"], net["layer1"]
    function = lambda a, b: (jnp.tanh((x * a) @ first["weight"] + first["bias"]) * b) @ second["weight"] + second["bias"]
    np.testing.assert_allclose(fit.posterior.rates, [0.2, 0.4], rtol=1e-6)
    weights, masks = zip(*masks_of([D, 3], [0.2, 0.4]), strict=True)
    outputs = np.asarray(jax.vmap(function)(*(jnp.asarray(np.stack(part)) for part in zip(*masks, strict=True))))[..., 0]
    mean = np.einsum("m,mn->n", weights, outputs)
    variance = np.einsum("m,mn->n", weights, (outputs - mean) ** 2)
    fourth = np.einsum("m,mn->n", weights, (outputs - mean) ** 4)
    count = 4000
    predictive = fit.predict(1, x, num_samples=count)
    assert (np.abs(predictive.mean - mean) < 5 * np.sqrt(variance / count)).all()
    assert (np.abs(predictive.epistemic - variance) < 5 * np.sqrt((fourth - variance**2) / count)).all()


# ---- draws --------------------------------------------------------------------------------------------------------------------------


def test_draws_are_functions_with_one_mask_for_all_inputs() -> None:
    x, y = data()
    fit = al.fit(0, model(hidden=(6,)), (x, y), al.Dropout(0.5, placement="inputs", num_steps=20, num_evidence=0))
    assert isinstance(fit.posterior, Masked) and fit.log_evidence is None
    draws = fit.sample(3, 400)["network"]
    kernel = np.asarray(fit.posterior.params["network"]["layer1"]["weight"])
    factor = np.asarray(draws["layer1"]["weight"]) / kernel
    assert set(np.unique(factor.round(5))) == {0.0, 2.0}  # a unit is there, doubled, or not there
    assert abs(factor.mean() - 1.0) < 5 * 1.0 / np.sqrt(factor.size)
    first = np.asarray(draws["layer0"]["weight"]) / np.asarray(fit.posterior.params["network"]["layer0"]["weight"])
    np.testing.assert_allclose(first, np.broadcast_to(first[..., :1], first.shape), rtol=1e-5)  # whole input units
    np.testing.assert_array_equal(draws["layer0"]["bias"][0], draws["layer0"]["bias"][1])
    # The draws used at prediction are those of the weights, and equal rows get equal outputs within a draw.
    same = np.repeat(x[:1], 5, axis=0)
    outputs = fit.posterior.outputs(jax.random.key(4), fit.model, same, 50).draws
    weights = fit.posterior.sample(jax.random.key(4), 50)
    by_weights = jax.vmap(lambda p: fit.model.outputs(p, same))(weights)
    np.testing.assert_allclose(outputs, by_weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs, np.broadcast_to(outputs[:, :1], outputs.shape), rtol=1e-5, atol=1e-6)
    assert len(np.unique(outputs[:, 0])) > 10


def test_predictive_moments_are_those_of_the_passes() -> None:
    """B11: mean of T passes, and variance = σ² + their variance."""
    x, y = data()
    fit = al.fit(0, model(noise=0.3), (x, y), al.Dropout(0.2, num_steps=50, num_evidence=3))
    predictive = fit.predict(5, x, num_samples=30)
    draws = predictive.draws
    np.testing.assert_allclose(predictive.mean, draws.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(predictive.epistemic, draws.var(axis=0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(predictive.variance, 0.3**2 + draws.var(axis=0), rtol=1e-5)
    assert fit.log_evidence.kind == "relative" and np.isfinite(fit.log_evidence.value)


def test_stacked_layers_have_masks_of_their_own() -> None:
    stack = {"w": 0.5 * jax.random.normal(jax.random.key(0), (4, D, D)), "v": jnp.ones((D, 1))}
    run = lambda p, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["w"])[0] @ p["v"]
    x, y = data()
    fit = al.fit(0, model(network=(run, stack)), (x, y), al.Dropout(0.5, num_steps=5, placement="inputs", num_evidence=0))
    draws = np.asarray(fit.sample(0, 200)["network"]["w"]) / np.asarray(fit.posterior.params["network"]["w"])
    kept = draws[..., 0] / 2  # (200, 4, D)
    assert set(np.unique(kept.round(4))) == {0.0, 1.0}
    correlation = np.corrcoef(kept.reshape(200, -1).T) - np.eye(4 * D)
    assert np.abs(correlation).max() < 5 / np.sqrt(200)


def test_weights_cut_from_a_flat_vector_are_not_dropped_entry_by_entry() -> None:
    run = lambda p, x: jnp.tanh(x @ p["w"].reshape(D, 4)) @ p["v"]
    bnn = model(network=(run, {"w": jnp.ones(4 * D), "v": jnp.ones((4, 1))}))
    assert [site.name for site in droppable(target(bnn), "inputs", "Dropout")] == ["v"]


# ---- errors -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, float("nan"), float("inf"), True, "0.1", None, (0.1, 0.2), {"*": 0.0}, {"*": "a"}])
def test_rates_outside_the_open_interval_are_refused(rate: Any) -> None:
    with pytest.raises(MethodError, match="strictly between 0 and 1"):
        al.Dropout(rate)


def test_other_settings_are_refused() -> None:
    for make in (al.Dropout, al.ConcreteDropout):
        with pytest.raises(MethodError, match="placement"):
            make(placement="outputs")
    for method in (al.Dropout, al.ConcreteDropout):
        for count in (-1, True, 2.5):
            with pytest.raises(MethodError, match="num_evidence"):
                method(num_evidence=count)
    with pytest.raises(MethodError, match="rate"):
        al.ConcreteDropout(rate=1.0)
    with pytest.raises(MethodError, match="relaxation"):
        al.ConcreteDropout(relaxation=2.0)
    with pytest.raises(MethodError, match="grouping"):
        al.VariationalDropout(per="row")
    with pytest.raises(MethodError, match="log α"):
        al.VariationalDropout(initial_log_alpha=100.0)
    with pytest.raises(MethodError, match="beyond its bound"):
        al.VariationalDropout(initial_log_alpha=1.0)
    with pytest.raises(MethodError, match="log α"):
        al.SparseDropout(initial_log_variance=float("nan"))
    with pytest.raises(MethodError, match="group"):
        al.SparseDropout(group="layer")
    with pytest.raises(MethodError, match="kl_warmup"):
        al.SparseDropout(kl_warmup=-5)


def test_a_rate_for_every_site_or_an_error() -> None:
    assert hash(al.Dropout({"layer0": 0.1})) == hash(al.Dropout((("layer0", 0.1),)))
    with pytest.raises(MethodError, match=r"layer1\.weight"):
        al.Dropout({"layer0": 0.1}, placement="inputs").build(target(model()))


@pytest.mark.parametrize("method", FAMILY)
def test_a_network_without_sites_is_refused(method: Any) -> None:
    network = (lambda p, x: jnp.sum(x * jnp.tanh(p["w"]), axis=1, keepdims=True), {"w": jnp.ones(D)})
    with pytest.raises(MethodError, match="nowhere to put its noise"):
        method().build(target(model(network=network)))
    density = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p["a"] ** 2), {"a": jnp.zeros(2)})
    with pytest.raises(MethodError, match="needs a network"):
        method().build(density)


def test_a_single_layer_has_nothing_hidden_to_drop() -> None:
    with pytest.raises(MethodError, match="placement='inputs'"):
        al.Dropout(0.1).build(target(model(hidden=())))


def test_integer_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="floating-point"):
        model(network=(lambda p, x: x @ p["w"], {"w": jnp.ones((D, 1), jnp.int32)}))


# ---- the network's own layers -------------------------------------------------------------------------------------------------------


def equinox_dropout() -> Any:
    import equinox as eqx

    class Net(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear
        drop: eqx.nn.Dropout

        def __init__(self) -> None:
            self.a, self.b = eqx.nn.Linear(D, 20, key=jax.random.key(0)), eqx.nn.Linear(20, 1, key=jax.random.key(1))
            self.drop = eqx.nn.Dropout(0.5)

        def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
            return self.b(self.drop(jnp.tanh(self.a(x)), key=key))

    return Net()


def nnx_dropout() -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a, self.b, self.drop = nnx.Linear(D, 20, rngs=rngs), nnx.Linear(20, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(self.drop(jnp.tanh(self.a(x))))

    return Net(nnx.Rngs(0))


@pytest.mark.parametrize("make", [equinox_dropout, nnx_dropout])
def test_existing_layers_give_functions(make: Any) -> None:
    x, y = data()
    fit = al.fit(0, model(network=make()), (x, y), al.Dropout(existing=True, num_steps=5, num_evidence=2))
    assert isinstance(fit.posterior, Passes) and "not known" in fit.manifest["departures"][0]
    same = np.concatenate([x[:1], x[:1], x[1:3]])
    draws = fit.predict(1, same, num_samples=20).draws
    np.testing.assert_allclose(draws[:, 0], draws[:, 1], rtol=1e-5, atol=1e-6)
    assert len(np.unique(draws[:, 0].round(5))) == 20
    # One mask for different rows as well: a draw is a function of x, whatever rows it is asked for together with.
    alone = fit.posterior.function(jax.random.key(2), fit.model, jnp.asarray(x[5:6]))[0]
    among = fit.posterior.function(jax.random.key(2), fit.model, jnp.asarray(x))[0]
    np.testing.assert_allclose(alone[0], among[5], rtol=1e-5, atol=1e-6)


def test_existing_without_any_is_refused() -> None:
    with pytest.raises(MethodError, match="no dropout layers"):
        al.Dropout(existing=True).build(target(model()))


# ---- one posterior, whatever the framework ------------------------------------------------------------------------------------------

WIDTH = 6


def frameworks() -> dict[str, tuple[Any, Any]]:
    """One MLP three times, with the way to read its kernels in one layout (inputs, outputs)."""
    import equinox as eqx
    from flax import nnx

    module = eqx.nn.MLP(D, 1, WIDTH, 1, activation=jnp.tanh, key=jax.random.key(0))
    kernels = [(layer.weight.T, layer.bias) for layer in module.layers]

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(D, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(jnp.tanh(self.first(x)))

    net = Net(nnx.Rngs(0))
    for layer, (weight, bias) in zip((net.first, net.second), kernels, strict=True):
        layer.kernel[...], layer.bias[...] = weight, bias
    params = {"w": kernels[0][0], "a": kernels[0][1], "v": kernels[1][0], "c": kernels[1][1]}
    left = {"w": kernels[0][0].T, "a": kernels[0][1], "v": kernels[1][0].T, "c": kernels[1][1]}
    turned = lambda p, x: (p["v"] @ jnp.tanh(p["w"] @ x.T + p["a"][:, None]) + p["c"][:, None]).T
    return {
        "equinox": (module, lambda p: [p.layers[0].weight.T, p.layers[1].weight.T, p.layers[0].bias]),
        "nnx": (net, lambda p: [p["first"]["kernel"], p["second"]["kernel"], p["first"]["bias"]]),
        "function": ((lambda p, x: jnp.tanh(x @ p["w"] + p["a"]) @ p["v"] + p["c"], params), lambda p: [p["w"], p["v"], p["a"]]),
        "function, turned": ((turned, left), lambda p: [p["w"].T, p["v"].T, p["a"]]),
    }


@pytest.mark.parametrize(
    "method",
    [
        al.Dropout(0.3, placement="inputs", num_steps=30, num_evidence=0),
        al.VariationalDropout(num_steps=30, learning_rate=1e-2),
        al.SparseDropout(num_steps=30, batch_size=None, learning_rate=1e-2, initial_log_variance=-4.0),
    ],
    ids=lambda method: type(method).__name__,
)
def test_same_seed_same_posterior_in_every_framework(method: Any) -> None:
    x, y = data()
    fits = {}
    for name, (network, read) in frameworks().items():
        posterior = al.fit(0, model(network=network), (x, y), method).posterior
        fits[name] = read(posterior.params["network"])
        if isinstance(posterior, Masked):
            fits[name] = [*fits[name], jnp.sort(posterior.rates)]
    for name, values in fits.items():
        for value, expected in zip(values, fits["function"], strict=True):
            # Adam turns rounding of a gradient into up to a step of that share: 30 steps of 1e-2 at relative 1e-4.
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=2e-4, err_msg=name)


# ---- learned rates ------------------------------------------------------------------------------------------------------------------


def test_concrete_rates_are_learned_and_fall_with_more_data() -> None:
    """At the optimum logit p ≈ −N·m²x̄²/(2σ²) for a unit of weight m: near ½ with few rows, small with many."""
    rates = {}
    for n in (10, 200):
        x, y = data(n=n, noise=2.0)
        method = al.ConcreteDropout(0.2, num_steps=400, num_evidence=0, learning_rate=3e-2)
        fit = al.fit(0, model(hidden=(), noise=2.0), (x, y), method)
        rates[n] = float(fit.posterior.rates[0])
        assert 0.0 < rates[n] < 1.0
    assert rates[200] < 0.1 < 0.2 < rates[10]


def test_concrete_rates_receive_a_gradient() -> None:
    bound = target(model())
    noise = al.ConcreteDropout(0.3).noise(bound)
    params = bound.init(jax.random.key(0))
    x, y = data()
    batch = al.Data(x, y[:, None]).batch()

    def loss(rates: Any) -> Any:
        apply = _noisy._replayed(jax.random.key(1), bound, noise, {"model": params, "noise": rates})
        return jnp.sum(bound.log_likelihood(params, batch, None, apply))

    start = noise.init(params)
    slopes = [jax.grad(loss)(start), jax.grad(lambda rates: noise.kl(params, rates))(start)]
    assert all(np.isfinite(leaf) and leaf != 0 for tree in slopes for leaf in jax.tree.leaves(tree))


# ---- Gaussian dropout ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["layer", "unit", "weight"])
def test_log_uniform_kl_depends_on_alpha_alone(per: str) -> None:
    from aleator.divergences import kl_log_uniform

    bound = target(model(al.Normal(1.0)))
    noise = al.VariationalDropout(per=per).noise(bound)
    params = bound.init(jax.random.key(0))
    other = {**params, "network": {k: layer | {"weight": 7.0 * layer["weight"]} for k, layer in params["network"].items()}}
    start = noise.init(params)
    assert {leaf.size for leaf in jax.tree.leaves(start)} == {"layer": {1}, "unit": {D, 4}, "weight": {4 * D, 4}}[per]
    np.testing.assert_allclose(noise.kl(params, start), noise.kl(other, start), rtol=1e-6)
    # The same α everywhere: the KL of one weight times their number, and the prior of the biases.
    point = -float(bound.log_prior({**params, "network": jax.tree.map(jnp.zeros_like, params["network"])}))
    np.testing.assert_allclose(noise.kl(params, start), (4 * D + 4) * kl_log_uniform(-3.0) + point, rtol=1e-5)


def test_alpha_stays_within_its_bound() -> None:
    x, y = data(weights=(0.0, 0.0, 0.0), noise=1.0)  # pure noise: every weight wants to go
    fit = al.fit(0, model(noise=1.0), (x, y), al.VariationalDropout(num_steps=300, learning_rate=5e-2, max_log_alpha=-0.5))
    assert isinstance(fit.posterior, GaussianDropout)
    assert -3.0 < max(float(leaf.max()) for leaf in fit.posterior.log_alpha) < -0.5


def test_alpha_can_leave_its_bound_again() -> None:
    bound = target(model())
    noise = al.VariationalDropout(max_log_alpha=-0.5).noise(bound)
    params = bound.init(jax.random.key(0))
    beyond = jax.tree.map(lambda leaf: jnp.full_like(leaf, 2.0), noise.init(params))
    assert max(float(leaf.max()) for leaf in noise.posterior(params, beyond).log_alpha) < -0.5
    assert all(float(jnp.abs(slope).min()) > 0 for slope in jax.tree.leaves(jax.grad(lambda n: noise.kl(params, n))(beyond)))


@pytest.mark.parametrize("method", [al.VariationalDropout(num_steps=2), al.SparseDropout(num_steps=2, batch_size=None)])
def test_a_prior_that_learns_from_the_weights_it_lost_is_refused(method: al.Method) -> None:
    x, y = data(weights=(1.0, 0.0, 0.0), noise=1.0)
    net = al.networks.MLP(x.shape[1], (4,), 1)
    with pytest.raises(al.MethodError, match="its own prior"):
        al.fit(0, al.BNN(net, al.Gaussian(), al.priors.Hierarchical(centred=True)), (x, y), method)


def test_gaussian_draws_have_the_moments_of_q() -> None:
    theta, count = jnp.asarray([[1.0, -2.0], [0.5, 0.0]]), 20_000
    alpha = GaussianDropout({"w": theta}, (jnp.full((1, 1), np.log(0.3)),), (True,))
    draws = np.asarray(alpha.sample(jax.random.key(0), count)["w"])
    variance = 0.3 * np.asarray(theta) ** 2
    assert (np.abs(draws.mean(0) - theta) <= 5 * np.sqrt(variance / count)).all()
    assert (np.abs(draws.var(0) - variance) <= 5 * variance * np.sqrt(2 / count) + 1e-12).all()
    # With σ² given, it is the spread, also at θ = 0 and beyond the bound on α.
    sigma = GaussianDropout({"w": theta}, (jnp.full((2, 1), 20.0),), (True,), (jnp.asarray([[-1.0], [1.0]]),))
    spread = np.asarray(sigma.sample(jax.random.key(1), count)["w"]).var(0)
    expected = np.exp([[-1.0, -1.0], [1.0, 1.0]])
    assert (np.abs(spread - expected) < 5 * expected * np.sqrt(2 / count)).all()


@pytest.mark.parametrize("group", ["weight", "unit"])
def test_sparse_posterior_is_the_q_that_was_trained(group: str) -> None:
    """Its variances are σ², one per weight or per unit, and its α = σ²/θ², with the mean of θ² over a group."""
    x, y = data()
    fit = al.fit(0, model(), (x, y), al.SparseDropout(group=group, num_steps=10, batch_size=None, initial_log_variance=-2.0))
    theta = np.asarray(fit.posterior.params["network"]["layer0"]["weight"])
    log_variance, log_alpha = (np.asarray(part[0]) for part in (fit.posterior.log_variance, fit.posterior.log_alpha))
    assert log_variance.shape == ((D, 4) if group == "weight" else (D, 1))
    square = theta**2 if group == "weight" else (theta**2).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(log_alpha, log_variance - np.log(square), rtol=1e-4, atol=1e-4)
    count = 4000
    spread = np.asarray(fit.sample(0, count)["network"]["layer0"]["weight"]).var(axis=0)
    assert (np.abs(spread / np.exp(log_variance) - 1) < 5 * np.sqrt(2 / count)).all()


def test_noise_moves_at_its_own_speed() -> None:
    """Adam's first step is the learning rate for every number: θ moves by it, log σ² by noise_speed times it."""
    x, y = data()
    method = al.SparseDropout(
        num_steps=1, batch_size=None, learning_rate=1e-3, schedule="constant", initial_log_variance=-2.0, noise_speed=7.0
    )
    start = target(model()).init(jax.random.key(0))
    fit = al.fit(0, model(), (x, y), method, init=start)
    moved = np.concatenate([np.ravel(part) + 2.0 for part in fit.posterior.log_variance])
    np.testing.assert_allclose(np.abs(moved), 7e-3, rtol=1e-2)
    theta = np.asarray(fit.posterior.params["network"]["layer0"]["weight"] - start["network"]["layer0"]["weight"])
    np.testing.assert_allclose(np.abs(theta), 1e-3, rtol=1e-2)
    with pytest.raises(MethodError, match="noise_speed"):
        al.SparseDropout(noise_speed=0.0)


@pytest.mark.parametrize("start", [-30.0, 30.0])
def test_extreme_noise_and_zero_weights_keep_the_bound_finite(start: float) -> None:
    bound = target(model())
    noise = al.SparseDropout(initial_log_variance=start).noise(bound)
    params = jax.tree.map(jnp.zeros_like, bound.init(jax.random.key(0)))
    x, y = data()
    batch = al.Data(x, y[:, None]).batch()

    def loss(tree: Any) -> Any:
        apply = _noisy._replayed(jax.random.key(1), bound, noise, tree)
        return noise.kl(tree["model"], tree["noise"]) - jnp.sum(bound.log_likelihood(tree["model"], batch, None, apply))

    value, slope = jax.value_and_grad(loss)({"model": params, "noise": noise.init(params)})
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))
    posterior = noise.posterior(params, noise.init(params))
    assert all(np.isfinite(leaf).all() for leaf in posterior.log_alpha) and np.isfinite(posterior.compression())


def clean(truth: tuple[float, ...], n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Data whose least-squares fit is the truth itself: residuals orthogonal to inputs and intercept."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, len(truth)))
    basis, _ = np.linalg.qr(np.column_stack([x, np.ones(n)]))
    noise = rng.normal(size=n)
    return x.astype(np.float32), (x @ np.asarray(truth) + 0.3 * (noise - basis @ (basis.T @ noise))).astype(np.float32)


def test_sparse_dropout_finds_the_irrelevant_inputs() -> None:
    truth = (1.0, 0.0, -1.0, 0.0)
    network = al.networks.MLP(4, (), 1)
    method = al.SparseDropout(num_steps=2000, batch_size=None, learning_rate=2e-2)
    posterior = al.fit(0, model(network=network), clean(truth), method).posterior
    log_alpha = np.asarray(posterior.log_alpha[0])[:, 0]
    np.testing.assert_array_equal(log_alpha > 3.0, np.asarray(truth) == 0.0)
    (mask,) = posterior.masks(3.0).values()
    np.testing.assert_array_equal(mask[:, 0], np.asarray(truth) != 0.0)
    assert posterior.sparsity() == {"network.layer0.weight": 0.5} and posterior.compression() == 2.0
    assert posterior.compression(threshold=100.0) == 1.0 and posterior.sparsity(-100.0) == {"network.layer0.weight": 1.0}


def test_group_decisions_are_whole_units() -> None:
    x, y = clean((1.0, 0.0, -1.0))
    method = al.SparseDropout(group="unit", num_steps=2000, batch_size=None, learning_rate=2e-2)
    fit = al.fit(0, al.BNN(al.networks.MLP(D, (), 2), al.Gaussian(0.3)), (x, np.stack([y, -y], axis=1)), method)
    (mask,) = fit.posterior.masks().values()
    np.testing.assert_array_equal(mask, [[True, True], [False, False], [True, True]])


def test_warmup_and_prior_are_named_as_departures() -> None:
    x, y = data()
    fit = al.fit(0, model(), (x, y), al.SparseDropout(num_steps=10, batch_size=None, kl_warmup=5))
    assert any("ramped" in text for text in fit.manifest["departures"]) and any("log-uniform" in t for t in fit.manifest["departures"])
    assert fit.log_evidence is None
    assert [row["treatment"] for row in fit.manifest["sites"]] == ["point", "local, exact", "point", "local, exact"]
