"""Kernels of infinitely wide networks: known numbers, quadrature, and finite networks on their way there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import gp
from aleator.gp import wide
from aleator.gp._expectations import alone, pair

X = np.random.default_rng(5).standard_normal((4, 3))


def test_arc_cosine_kernel() -> None:
    with jax.enable_x64(True):
        values = wide.arc_cosine(jnp.cos(jnp.deg2rad(jnp.array([0.0, 60.0, 90.0]))))
        correlations = []
        for depth in (1, 2, 3):
            kernel = wide.NNGP(depth, weight=2**0.5, bias=0.0).bind(np.eye(2))
            matrix = kernel({}, np.eye(2), np.eye(2))
            correlations.append(float(matrix[0, 1] / matrix[0, 0]))
    np.testing.assert_allclose(values, [0.5, 0.304499, 0.159155], atol=5e-7)
    np.testing.assert_allclose(correlations, [0.318310, 0.493731, 0.604826], atol=5e-7)


CROSS = np.array([-0.6, 0.1, 0.9])  # beside variances 1.3 and 0.7


def test_expectations_of_a_relu_are_integrals() -> None:
    """φ(r·t) = r·φ(t): the radius integrates to E r² = 2, the angle by 10⁵ nodes."""
    angle = (np.arange(100_000) + 0.5) * 2 * np.pi / 100_000
    for activation, leak in (("relu", 0.0), ("leaky_relu", 0.01)):
        with jax.enable_x64(True):
            value, slope = pair(activation, jnp.full(3, 1.3), jnp.full(3, 0.7), jnp.asarray(CROSS))
            own = alone(activation, jnp.asarray([1.3]))
        phi, step = lambda t, leak=leak: np.where(t > 0, t, leak * t), lambda t, leak=leak: np.where(t > 0, 1.0, leak)
        for i, c in enumerate(CROSS / np.sqrt(0.91)):
            u, v = np.sqrt(1.3) * np.cos(angle), np.sqrt(0.7) * (c * np.cos(angle) + np.sqrt(1 - c**2) * np.sin(angle))
            np.testing.assert_allclose(value[i], 2 * np.mean(phi(u) * phi(v)), atol=1e-8)
            np.testing.assert_allclose(slope[i], np.mean(step(u) * step(v)), atol=4e-5)  # a step may lie within one node of its place
        np.testing.assert_allclose(own, [[2 * np.mean(phi(u) ** 2)], [np.mean(step(u) ** 2)]], atol=4e-5)


@pytest.mark.parametrize("activation", ["erf", "tanh", "gelu", "logistic", "silu", "sin"])
def test_expectations_of_smooth_activations_are_integrals(activation: str) -> None:
    nodes = np.linspace(-9, 9, 400)
    weights = np.exp(-0.5 * nodes**2) / np.exp(-0.5 * nodes**2).sum()
    phi = al.networks._network.activation(activation)
    with jax.enable_x64(True):
        value, slope = pair(activation, jnp.full(3, 1.3), jnp.full(3, 0.7), jnp.asarray(CROSS))
        own = alone(activation, jnp.asarray([1.3]))
        both = jax.jit(lambda t: (phi(t), jax.jvp(phi, (t,), (jnp.ones_like(t),))[1]))
        for i, c in enumerate(CROSS / np.sqrt(0.91)):
            u = both(np.sqrt(1.3) * nodes)
            v = both(np.sqrt(0.7) * (c * nodes[:, None] + np.sqrt(1 - c**2) * nodes))
            np.testing.assert_allclose(value[i], weights @ (u[0][:, None] * v[0]) @ weights, atol=1e-7)
            np.testing.assert_allclose(slope[i], weights @ (u[1][:, None] * v[1]) @ weights, atol=1e-7)
        np.testing.assert_allclose(own[0][0], weights @ u[0] ** 2, atol=1e-7)
        np.testing.assert_allclose(own[1][0], weights @ u[1] ** 2, atol=1e-7)


@pytest.mark.parametrize(("activation", "accuracy"), [("tanh", 1e-8), ("logistic", 1e-9), ("gelu", 2e-4)])
def test_expectations_of_steep_activations(activation: str, accuracy: float) -> None:
    """Standard deviations of 8 and 5, where a tanh is nearly a step, against 700 × 700 nodes; values relative to the largest. A matrix is symmetric to the last bit, its diagonal is the
    variances, and none of its eigenvalues is negative."""
    nodes = np.linspace(-9, 9, 700)
    weights = np.exp(-0.5 * nodes**2) / np.exp(-0.5 * nodes**2).sum()
    phi = al.networks._network.activation(activation)
    cosines = np.array([-0.95, -0.3, 0.5, 0.9, 0.99])
    with jax.enable_x64(True):
        both = jax.jit(lambda t: (phi(t), jax.jvp(phi, (t,), (jnp.ones_like(t),))[1]))
        ours = np.stack(jax.jit(functools.partial(pair, activation))(jnp.full(5, 64.0), jnp.full(5, 25.0), jnp.asarray(40 * cosines)))
        for i, c in enumerate(cosines):
            s, d = np.sqrt((1 + c) / 2) * nodes[:, None], np.sqrt((1 - c) / 2) * nodes
            u, v = both(8 * (s + d)), both(5 * (s - d))
            truth = [weights @ np.asarray(left * right) @ weights for left, right in zip(u, v, strict=True)]
            top = [np.sqrt(weights @ (weights @ np.asarray(part) ** 2)) for part in (u[0], u[1])]
            assert np.all(np.abs(ours[:, i] - truth) < accuracy * np.maximum(np.square(top), 1e-2)), (c, ours[:, i], truth)
        x = 6 * np.concatenate([X, X + 0.01, -X])
        kernel = wide.NTK(2, activation, 3.0, 0.1).bind(x)
        matrix = np.asarray(jax.jit(kernel.__call__)({}, x, x))
        np.testing.assert_allclose(np.diag(matrix), np.asarray(kernel.diag({}, x)), rtol=1e-9)
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-13)
    assert np.linalg.eigvalsh(matrix).min() > -1e-12 * matrix.max()


WIDTH, NETS = 1024, 24


def finite(key: jax.Array, depth: int, residual: bool, layer_norm: bool) -> jax.Array:
    """The second moment of the units that a layer of a finite tanh net feeds its outputs with, σ_w = 1.2, σ_b = 0.3: (rows, rows)."""
    keys = jax.random.split(key, 2 * (depth + 1))
    draw = lambda i, fan: 1.2 * jax.random.normal(keys[2 * i], (fan, WIDTH)) / fan**0.5, 0.3
    layer = lambda i, h: h @ draw[0](i, h.shape[1]) + 0.3 * jax.random.normal(keys[2 * i + 1], (WIDTH,))
    h = layer(0, jnp.asarray(X, jnp.float32))
    for i in range(1, depth + 1):
        z = (h - h.mean(1, keepdims=True)) / h.std(1, keepdims=True) if layer_norm else h
        new = layer(i, jnp.tanh(z))
        h = h + new if residual else new
    return h @ h.T / WIDTH


@pytest.mark.parametrize(("depth", "residual", "layer_norm"), [(2, False, False), (2, True, False), (2, True, True)])
def test_wide_networks_have_the_limits_covariance(depth: int, residual: bool, layer_norm: bool) -> None:
    kernel = wide.NNGP(depth, "tanh", 1.2, 0.3, residual, layer_norm).bind(X)
    with jax.enable_x64(True):
        limit = np.asarray(kernel({}, X, X))
        np.testing.assert_allclose(np.asarray(kernel.diag({}, X)), np.diag(limit), rtol=1e-9)
    run = jax.jit(lambda keys: jax.lax.map(functools.partial(finite, depth=depth, residual=residual, layer_norm=layer_norm), keys))
    nets = np.asarray(run(jax.random.split(jax.random.key(1), NETS)))
    error = nets.std(0, ddof=1) / NETS**0.5
    assert np.all(np.abs(nets.mean(0) - limit) < 5 * error + 5 * limit.max() / WIDTH)  # the bias falls as 1/width


def test_finite_networks_approach_as_one_over_root_width() -> None:
    widths = np.array([16, 128, 1024])
    with jax.enable_x64(True):
        kernel = wide.NNGP(1, "relu", 2**0.5, 0.1).bind(X)
        limit = np.asarray(kernel({}, X, X))
    errors = []
    for width in widths:
        model = al.BNN(al.networks.MLP(3, (int(width),), 1), prior=al.Normal({"*.weight": 2**0.5, "*.bias": 0.1}, scaling="fan_in"))

        def one(key: jax.Array, model: al.BNN = model, width: int = int(width)) -> jax.Array:
            hidden = model.network.hidden_features(model.sample_prior(key)["network"], jnp.asarray(X, jnp.float32))
            return 2.0 * hidden @ hidden.T / width + 0.01  # the covariance of its outputs given its hidden layer

        nets = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 200)))
        errors.append(np.sqrt(np.mean((nets - limit) ** 2)))
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert abs(slope + 0.5) < 0.1


def test_limit_of_a_network() -> None:
    prior = al.Normal({"layer0.weight": 1.5, "layer0.bias": 0.2, "*.weight": 1.1, "*.bias": 0.4}, scaling="fan_in")
    model = al.BNN(al.networks.MLP(3, (512,), 1, "erf"), al.Gaussian(0.1), prior)
    limit = wide.limit_of(model)
    assert limit.likelihood == model.likelihood
    with jax.enable_x64(True):
        kernel = np.asarray(limit.kernel.bind(X)({}, X, X))
    measured = wide.empirical_nngp(0, model, X.astype(np.float32), num_samples=4000)
    spread = np.sqrt((np.outer(np.diag(kernel), np.diag(kernel)) + kernel**2) / 4000)  # of a second moment of Gaussians
    assert np.all(np.abs(measured - kernel) < 5 * spread + 5 * kernel.max() / 512)
    half = wide.empirical_nngp(0, model, X[:2].astype(np.float32), X[2:].astype(np.float32), num_samples=4000)
    np.testing.assert_allclose(half, measured[:2, 2:], rtol=1e-4, atol=1e-5)
    with pytest.raises(al.ModelError, match="fan_in"):
        wide.limit_of(al.BNN(al.networks.MLP(3, (5,), 1)))


def test_tangent_kernel_of_a_wide_network() -> None:
    prior = al.Normal({"*.weight": 2**0.5, "*.bias": 0.1}, scaling="fan_in")
    model = al.BNN(al.networks.MLP(3, (4096, 4096), 1), al.Gaussian(0.1), prior)
    params = model.sample_prior(jax.random.key(4))["network"]
    measured = wide.empirical_ntk(model, params, X.astype(np.float32))
    with jax.enable_x64(True):
        kernel = wide.limit_of(model, tangent=True).kernel.bind(X)
        limit = np.asarray(kernel({}, X, X))
        np.testing.assert_allclose(np.asarray(kernel.diag({}, X)), np.diag(limit), rtol=1e-7)
    assert np.linalg.norm(measured - limit) < 0.05 * np.linalg.norm(limit)


def test_empirical_tangent_kernel_is_a_product_of_jacobians() -> None:
    network = al.networks.MLP(3, (5,), 2, "tanh")
    params = network.init(jax.random.key(0))
    x = X.astype(np.float32)
    rows = jnp.concatenate(
        [leaf.reshape(4, 2, -1) for leaf in jax.tree.leaves(jax.jacobian(lambda w: network.apply(w, x))(params))], axis=2
    )
    np.testing.assert_allclose(
        wide.empirical_ntk(network, params, x, x[:3]), jnp.einsum("nap,mbp->nmab", rows, rows[:3]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("pooling", [False, True])
def test_tangent_kernel_of_a_convolutional_network(pooling: bool) -> None:
    """Ten networks of 128 channels at their prior's draws; weights N(0, 1) times their scales, which the empirical kernel is given. Their mean is the
    limit but for its standard error and a bias of the order 1/channels."""
    images, channels = np.random.default_rng(1).standard_normal((2, 4, 4, 2)).astype(np.float32), 128

    def apply(params: dict, x: jax.Array) -> jax.Array:
        h = x
        for name in ("a", "b"):
            filters = 1.2 / (9 * h.shape[-1]) ** 0.5 * params[name]["w"]
            h = jax.lax.conv_general_dilated(h, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = jnp.tanh(h + 0.3 * params[name]["b"])
        h = h.mean((1, 2)) if pooling else h.reshape(len(x), -1)
        return 1.2 / h.shape[1] ** 0.5 * h @ params["out"]["w"] + 0.3 * params["out"]["b"]

    shapes = {"a": ((3, 3, 2, channels), (channels,)), "b": ((3, 3, channels, channels), (channels,))}
    shapes |= {"out": (((1 if pooling else 16) * channels, 1), (1,))}
    measured = []
    for seed in range(10):
        keys = iter(jax.random.split(jax.random.key(seed), 6))
        params = {name: {"w": jax.random.normal(next(keys), w), "b": jax.random.normal(next(keys), b)} for name, (w, b) in shapes.items()}
        measured.append(np.asarray(wide.empirical_ntk((apply, params), params, images), float))
    error = np.std(measured, axis=0, ddof=1) / len(measured) ** 0.5
    kernel = wide.ConvNTK(2, 3, "tanh", 1.2, 0.3, pooling).bind(images)
    with jax.enable_x64(True):
        limit = np.asarray(kernel({}, images.astype(float), images.astype(float)))
        np.testing.assert_allclose(np.asarray(kernel.diag({}, jnp.asarray(images, float))), np.diag(limit), rtol=1e-7)
    assert (error < 0.05 * np.diag(limit).max()).all()
    assert (np.abs(np.mean(measured, axis=0) - limit) < 4.0 * error + 2.0 / channels * np.abs(limit)).all()


@pytest.mark.parametrize("pooling", [False, True])
def test_convolutional_networks_have_the_limits_covariance(pooling: bool) -> None:
    images, channels = np.random.default_rng(0).standard_normal((3, 4, 5, 2)), 256
    kernel = wide.ConvNNGP(2, 3, "relu", 1.2, 0.3, pooling).bind(images)
    with jax.enable_x64(True):
        limit = np.asarray(kernel({}, images, images))
        np.testing.assert_allclose(np.asarray(kernel.diag({}, jnp.asarray(images))), np.diag(limit), rtol=1e-7)
        np.testing.assert_allclose(np.asarray(kernel({}, images[:2], images[2:])), limit[:2, 2:], rtol=1e-12)

    def one(key: jax.Array) -> jax.Array:
        """The covariance of the outputs given the last hidden layer."""
        h = jnp.asarray(images, jnp.float32)
        for k in jax.random.split(key, 2):
            a, b = jax.random.split(k)
            filters = 1.2 / (9 * h.shape[-1]) ** 0.5 * jax.random.normal(a, (3, 3, h.shape[-1], channels))
            h = jax.lax.conv_general_dilated(h, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = jax.nn.relu(h + 0.3 * jax.random.normal(b, (channels,)))
        h = h.mean((1, 2)) if pooling else h.reshape(3, -1)
        return 1.44 * h @ h.T / h.shape[1] + 0.09

    nets = np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(3), 40)))
    assert np.all(np.abs(nets.mean(0) - limit) < 5 * nets.std(0, ddof=1) / 40**0.5 + 5 * limit.max() / channels)


def test_prior_scales_are_tuned_by_evidence() -> None:
    x = np.linspace(-2, 2, 25)[:, None]
    fit = al.fit(0, gp.GP(wide.NNGP(2, "relu"), gp.Zero()), (x, np.sin(2 * x[:, 0])), gp.Evidence(num_restarts=1))
    fixed = gp.GP(wide.NNGP(2, "relu", 1.0, 0.1), gp.Zero(), al.Gaussian(0.1)).bind(x, x)
    with jax.enable_x64(True):
        assert fit.log_evidence.value > float(jax.jit(fixed.log_evidence)(fixed.start(jax.random.key(0)), x, np.sin(2 * x)))
    assert np.abs(fit.predict(1, x).mean - np.sin(2 * x[:, 0])).max() < 0.1


def test_matrices_are_computed_in_blocks() -> None:
    kernel = wide.NNGP(2, weight=1.3, bias=0.2)
    whole = gp.matrix(kernel, {}, X)
    np.testing.assert_array_equal(gp.matrix(kernel, {}, X, block=3), gp.matrix(kernel, {}, X, block=3).T)
    np.testing.assert_allclose(gp.matrix(kernel, {}, X, block=3), whole, rtol=1e-12)
    np.testing.assert_allclose(gp.matrix(kernel, {}, X, X[:3], block=2, dtype=np.float32), whole[:, :3], rtol=1e-5)
