"""Noise at sites: moments against the exact laws, at five standard errors of the Monte Carlo mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aleator import noise, sites

S = 4000


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def conv(p: Any, x: jax.Array, key: Any = None) -> jax.Array:
    return jax.lax.conv_general_dilated(x, p["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + p["b"]


NETWORKS: dict[str, tuple[Callable, dict[str, Any], Any]] = {
    "dense": (lambda p, x, key=None: x @ p["w"] + p["b"], {"w": (4, 2), "b": (2,)}, lambda: normal(1, 3, 4)),
    "left": (lambda p, x, key=None: (p["w"] @ x.T + p["b"][:, None]).T, {"w": (2, 4), "b": (2,)}, lambda: normal(1, 3, 4)),
    "halved": (lambda p, x, key=None: x @ (p["w"] * -0.5), {"w": (4, 2)}, lambda: normal(1, 3, 4)),
    "conv": (conv, {"w": (2, 2, 2, 3), "b": (3,)}, lambda: normal(1, 2, 3, 3, 2)),
    "embedding": (lambda p, x, key=None: p["w"][x], {"w": (5, 2)}, lambda: jnp.asarray([0, 3, 3])),
}


def made(name: str) -> tuple[Callable, Any, Any, Any, jax.Array]:
    """(network, weights, variances, x, exact variances of the outputs): the outputs are linear in the weights."""
    apply, shapes, rows = NETWORKS[name]
    tree = {leaf: normal(2 + i, *shape) for i, (leaf, shape) in enumerate(shapes.items())}
    variance = {leaf: jnp.exp(normal(5 + i, *shape)) for i, (leaf, shape) in enumerate(shapes.items())}
    x = rows()
    jacobian = jax.jacobian(lambda p: apply(p, x))(tree)
    out = apply(tree, x)
    total = sum(jnp.sum((jacobian[leaf] ** 2 * variance[leaf]).reshape(*out.shape, -1), axis=-1) for leaf in tree)
    return apply, tree, variance, x, total


def draws(seed: int, apply: Callable, tree: Any, x: Any, handler: Any, companion: Any, power: int) -> np.ndarray:
    one = lambda key: sites.replay(key, apply, tree, x, handler, (companion,), (power,))[0]
    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), S)))


def assert_normal_moments(sample: np.ndarray, mean: Any, variance: Any) -> None:
    """Mean within 5·σ/√S, variance within 5·σ²·√(2/S)."""
    error = (sample.mean(axis=0) - np.asarray(mean)) / np.sqrt(np.asarray(variance) / S)
    assert np.abs(error).max() < 5.0
    spread = (sample.var(axis=0) / np.asarray(variance) - 1.0) / np.sqrt(2.0 / S)
    assert np.abs(spread).max() < 5.0


@pytest.mark.parametrize("name", NETWORKS)
def test_local_reparameterisation_has_the_exact_marginals(name: str) -> None:
    apply, tree, variance, x, total = made(name)
    sample = draws(0, apply, tree, x, noise.local, variance, 2)
    assert_normal_moments(sample, apply(tree, x), total)
    flat = sample.reshape(S, -1)
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    assert np.abs(correlation).max() < 5.0 / np.sqrt(S)  # rows, units and positions are independent


@pytest.mark.parametrize("name", NETWORKS)
def test_moments_are_the_exact_ones(name: str) -> None:
    apply, tree, variance, x, total = made(name)
    out, records = sites.replay(None, apply, tree, x, noise.moments, (variance,), (2,))
    np.testing.assert_array_equal(out, apply(tree, x))
    np.testing.assert_allclose(records["w"], total, rtol=2e-5)


def test_local_noise_of_zeros_has_finite_slopes() -> None:
    apply, tree, variance, _, _ = made("dense")
    loss = lambda v, x: jnp.sum(sites.replay(jax.random.key(0), apply, tree, x, noise.local, (v,), (2,))[0] ** 2)
    no_bias = variance | {"b": jnp.zeros(2)}
    slopes = jax.grad(loss, argnums=(0, 1))(no_bias, jnp.zeros((3, 4)))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("name", ["left", "halved", "conv", "embedding"])
def test_flipout_has_the_right_mean_and_variance(name: str) -> None:
    apply, tree, variance, x, total = made(name)

    def one(key: Any) -> Any:
        key_shift, key_sites = jax.random.split(key)
        shift = jax.tree.map(lambda z, v: z * jnp.sqrt(v), noise.normal_tree(key_shift, tree), variance)
        return sites.replay(key_sites, apply, tree, x, noise.flipout, (shift,), (1,))[0]

    sample = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), S)))
    # At one position each output is N(mean, variance): the signs do not change the law of a symmetric perturbation.
    assert_normal_moments(sample, apply(tree, x), total)
    rows = (sample - np.asarray(apply(tree, x))).reshape(S, x.shape[0], -1)
    product = rows[:, 0] * rows[:, 1]
    assert (np.abs(product.mean(axis=0)) < 5.0 * product.std(axis=0) / np.sqrt(S)).all()


def test_flipout_gives_equal_rows_noise_of_their_own() -> None:
    apply, tree, variance, x, _ = made("dense")
    same = jnp.repeat(x[:1], 3, axis=0)
    sample = draws(2, apply, tree, same, noise.flipout, jax.tree.map(jnp.sqrt, variance), 1) - np.asarray(apply(tree, same))
    correlation = np.corrcoef(sample[:, :, 0].T)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 5.0 / np.sqrt(S)


# ---- masks --------------------------------------------------------------------------------------------------------------------------


def masked_draws(seed: int, apply: Callable, tree: Any, x: Any, rates: dict[str, float], count: int = S) -> np.ndarray:
    def one(key: Any) -> Any:
        key_root, key_sites = jax.random.split(key)
        return sites.replay(key_sites, apply, tree, x, noise.masked(key_root, rates))[0]

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), count)))


def test_masked_inputs_have_the_right_moments() -> None:
    """y = (x ⊙ z/(1−p))·W: E y = x·W, Var y = p/(1−p)·x²·W²; rows independent; the bias is left alone."""
    apply, tree, _, x, _ = made("dense")
    p = 0.3
    sample = masked_draws(0, apply, tree, x, {"w": p})
    mean, variance = np.asarray(apply(tree, x)), np.asarray(p / (1 - p) * x**2 @ tree["w"] ** 2)
    assert (np.abs(sample.mean(axis=0) - mean) < 5 * np.sqrt(variance / S)).all()
    squares = (sample - mean) ** 2
    assert (np.abs(squares.mean(axis=0) - variance) < 5 * squares.std(axis=0) / np.sqrt(S)).all()
    product = (sample - mean)[:, 0] * (sample - mean)[:, 1]
    assert (np.abs(product.mean(axis=0)) < 5 * product.std(axis=0) / np.sqrt(S)).all()


def test_sites_without_a_rate_are_left_alone() -> None:
    apply, tree, _, x, _ = made("dense")
    np.testing.assert_array_equal(masked_draws(0, apply, tree, x, {}, 2)[0], apply(tree, x))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_one_mask_per_row_at_all_positions(layout: str) -> None:
    """A 1×1 convolution of ones: whatever is dropped is dropped at every pixel of a row, and rows differ."""
    channels = layout.index("C")
    shape = [4, 5, 5, 5]
    shape[channels] = 30
    run = lambda p, x, key=None: jax.lax.conv_general_dilated(x, p["w"], (1, 1), "VALID", dimension_numbers=(layout, "HWIO", layout))
    out = np.moveaxis(masked_draws(0, run, {"w": normal(0, 1, 1, 30, 2)}, jnp.ones(shape), {"w": 0.5}, 1)[0], channels, -1)
    np.testing.assert_allclose(out, np.broadcast_to(out[:, :1, :1], out.shape), rtol=1e-4, atol=1e-5)
    assert len(np.unique(out[:, 0, 0, 0].round(3))) == 4


def test_one_mask_at_all_steps_of_a_scan_and_one_per_layer_of_a_stack() -> None:
    def recurrent(p: Any, x: jax.Array, key: Any = None) -> jax.Array:
        return jnp.swapaxes(jax.lax.scan(lambda c, row: (c, row @ p["w"]), 0.0, jnp.swapaxes(x, 0, 1))[1], 0, 1)

    def stacked(p: Any, x: jax.Array, key: Any = None) -> jax.Array:
        return jnp.swapaxes(jax.lax.scan(lambda c, w: (c, c @ w), x, p["w"])[1], 0, 1)

    kernel = normal(0, 20, 2)
    steps = masked_draws(0, recurrent, {"w": kernel}, jnp.ones((3, 6, 20)), {"w": 0.5}, 1)[0]
    np.testing.assert_allclose(steps, np.broadcast_to(steps[:, :1], steps.shape), rtol=1e-5)
    assert len(np.unique(steps[:, 0, 0])) == 3
    layers = masked_draws(0, stacked, {"w": jnp.stack([kernel] * 4)}, jnp.ones((3, 20)), {"w": 0.5}, 1)[0]
    assert len(np.unique(layers[:, :, 0])) == 12


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9, 0.999])
def test_keep_keeps_with_probability_one_minus_rate(rate: float) -> None:
    count = 200_000
    kept = noise.keep(jax.random.key(0), rate, (count,), jnp.float32)
    assert set(np.unique(kept)) <= {0.0, 1.0} and kept.dtype == jnp.float32
    assert abs(float(kept.mean()) - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8])
def test_concrete_masks_round_to_bernoulli_ones(rate: float) -> None:
    """z > ½ exactly where the hard mask would keep, so P(z > ½) = 1 − p; and z falls in p."""
    count = 100_000
    z = noise.concrete(jax.random.key(0), jnp.asarray(rate), (count,), jnp.float32, 0.1)
    assert abs(float((z > 0.5).mean()) - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / count)
    slope = jax.grad(lambda p: jnp.mean(noise.concrete(jax.random.key(1), p, (1000,), jnp.float32, 0.1)))(jnp.asarray(rate))
    assert np.isfinite(slope) and slope < 0


def test_normal_tree() -> None:
    tree = {"a": jnp.zeros((3, 4)), "b": [jnp.zeros(5, jnp.float16)]}
    drawn = noise.normal_tree(jax.random.key(0), tree)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drawn) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert float(drawn["a"][0, 0]) != float(drawn["b"][0][0]) and noise.normal_tree(jax.random.key(0), {}) == {}
