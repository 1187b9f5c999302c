"""Pruning: the smaller network is the same function as the one with weights set to zero, and it is smaller."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator._errors import MethodError
from aleator.networks._conv import conv2d
from aleator.posterior import Point

D = 5


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def fitted(network: Any, x: np.ndarray, keep: dict[str, Any], prior: Any = None) -> al.Fit:
    """A fit of one step whose log α is set by hand: 10 where keep (broadcast to the leaf) is False, −10 elsewhere; bias values not 0."""
    y = rows(len(x), seed=1)
    method = al.SparseDropout(num_steps=1, batch_size=None)
    fit = al.fit(0, al.BNN(network, al.Gaussian(0.5), al.Normal(1.0) if prior is None else prior), (x, y), method)
    params = jax.tree.map(lambda leaf: leaf + 0.1, fit.posterior.params)
    by_path = fit.posterior.masks().items()
    log_alpha = tuple(
        jnp.where(np.broadcast_to(keep.get(path.removeprefix("network."), True), mask.shape), -10.0, 10.0) for path, mask in by_path
    )
    return dataclasses.replace(fit, posterior=dataclasses.replace(fit.posterior, params=params, log_alpha=log_alpha))  # type: ignore[type-var]


def zeroed(fit: al.Fit, x: Any, threshold: float = 3.0) -> np.ndarray:
    """Outputs with the weights set to zero, by hand."""
    from aleator import _tree

    params, masks = fit.posterior.params, fit.posterior.masks(threshold)
    leaves = [leaf * masks.get(path, 1.0) for path, leaf in zip(_tree.paths(params), jax.tree.leaves(params), strict=True)]
    return np.asarray(fit.model.outputs(jax.tree.unflatten(jax.tree.structure(params), leaves), x))


def outputs(fit: al.Fit, x: Any) -> np.ndarray:
    return np.asarray(fit.model.outputs(fit.posterior.params, x))


def assert_same_function(fit: al.Fit, pruned: al.Fit, x: Any) -> None:
    expected = zeroed(fit, x)
    np.testing.assert_allclose(outputs(pruned, x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def shapes(pruned: al.Fit) -> dict[str, tuple[int, ...]]:
    return {part.name: tuple(part.shape) for part in pruned.model.network.parts}


def mlp_masks() -> dict[str, np.ndarray]:
    """Input 1 read by nobody, hidden unit 2 read by nobody, hidden unit 4 fed by nobody, one lone weight out."""
    first, second = np.ones((D, 6), bool), np.ones((6, 1), bool)
    first[1], first[:, 4], first[0, 0], second[2] = False, False, False, False
    return {"layer0.weight": first, "layer1.weight": second}


@pytest.fixture(scope="module")
def mlp() -> tuple[al.Fit, al.Fit, np.ndarray]:
    x = rows(30, D)
    fit = fitted(al.networks.MLP(D, (6,), 1, activation="tanh"), x, mlp_masks())
    return fit, fit.prune(), x


def test_dead_units_are_removed(mlp: Any) -> None:
    fit, pruned, _ = mlp
    assert isinstance(pruned.posterior, Point)
    # Unit 4 is fed by nobody: what it says, tanh(bias), is a constant and joins the bias of its reader.
    assert shapes(pruned) == {"layer0.weight": (D - 1, 4), "layer1.weight": (4, 1)}
    said = fit.posterior.params["network"]["layer1"]["weight"][4, 0] * np.tanh(fit.posterior.params["network"]["layer0"]["bias"][4])
    bias = pruned.posterior.params["network"]["rest"]
    assert float(bias["layer1.bias"][0] - fit.posterior.params["network"]["layer1"]["bias"][0]) == pytest.approx(float(said), rel=1e-4)
    assert {(cut.path, cut.axis): cut.units.tolist() for cut in pruned.model.network.narrow} == {
        ("layer0.weight", 1): [0, 1, 3, 5],
        ("layer0.bias", 0): [0, 1, 3, 5],
        ("layer1.weight", 0): [0, 1, 3, 5],
    }
    np.testing.assert_array_equal(bias["layer0.bias"], fit.posterior.params["network"]["layer0"]["bias"][np.asarray([0, 1, 3, 5])])
    sizes = jax.tree.map(np.size, pruned.posterior.params["network"]["kept"])
    assert sizes == {"layer0.weight": 4 * 4 - 1, "layer1.weight": 4}
    assert_same_function(fit, pruned, rows(7, D, seed=3))


def test_the_manifest_tells(mlp: Any) -> None:
    _, pruned, _ = mlp
    report = pruned.manifest["pruning"]
    assert report["weights"] == 36 and report["nonzero"] == 19 and report["compression"] == pytest.approx(36 / 19)
    assert report["sparsity"] == {"layer0.weight": pytest.approx(1 - 15 / 30), "layer1.weight": pytest.approx(2 / 6)}
    assert report["threshold"] == 3.0 and report["difference"] <= 1e-5 and report["rows"] == 256
    assert report["bytes_after"] < report["bytes_before"] == 4 * (30 + 6 + 6 + 1)
    assert report["seconds_before"] > 0 and report["seconds_after"] > 0 and "log α > 3" in pruned.status


def test_predictions_survive_saving(mlp: Any, tmp_path: Any) -> None:
    _, pruned, x = mlp
    pruned.save(tmp_path / "pruned")
    again = al.load(tmp_path / "pruned")
    np.testing.assert_array_equal(pruned.predict(0, x).mean, again.predict(0, x).mean)
    assert again.manifest["pruning"] == pruned.manifest["pruning"] and again.status == pruned.status


def test_fine_tuning_keeps_what_is_gone(mlp: Any) -> None:
    _, pruned, x = mlp
    tuned = al.fit(1, pruned.model, (x, rows(len(x), seed=1)), al.MAP(num_steps=50))
    assert jax.tree.map(np.shape, tuned.posterior.params["network"]) == jax.tree.map(np.shape, pruned.posterior.params["network"])
    assert tuned.predict(0, x).log_prob(rows(len(x), seed=1)).mean() > pruned.predict(0, x).log_prob(rows(len(x), seed=1)).mean()
    other = x.copy()
    other[:, 1] += 5.0  # the input nobody reads
    np.testing.assert_array_equal(tuned.predict(0, x).mean, tuned.predict(0, other).mean)


def test_a_unit_that_sleeps_is_not_taken_for_a_constant() -> None:
    """Two relu units at 0 on every row met here: one that nothing feeds, one that a larger input would wake."""
    params = {
        "w": jnp.asarray([[1.0, 2.0, 0.0]]),
        "b": jnp.asarray([-50.0, 0.5, 1.5]),
        "v": jnp.asarray([[1.0], [1.0], [2.0]]),
        "c": jnp.zeros(1),
    }
    run = lambda p, x: jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
    fit = fitted((run, params), rows(8, 1), {"w": np.asarray([[True, True, False]])})
    pruned = fit.prune()
    assert shapes(pruned) == {"w": (1, 2), "v": (2, 1)}
    assert_same_function(fit, pruned, np.asarray([[100.0], [0.3]], np.float32))


def test_a_pruned_network_is_pruned_again(mlp: Any, tmp_path: Any) -> None:
    """Fitted by SparseDropout as any network, cut once more, and counted from the first one."""
    _, pruned, x = mlp
    keep = {"kept.layer0.weight": np.arange(15) != 6, "kept.layer1.weight": np.arange(4) != 0}
    fit = fitted(pruned.model.network, x, keep)
    again = fit.prune()
    network = again.model.network
    assert isinstance(network.base, al.networks.MLP) and again.manifest["pruning"]["weights"] == 36
    # Hidden unit 0 was read by one weight, which goes: so do the three that still fed it, and its bias.
    assert jax.tree.map(np.size, network.params["kept"]) == {"layer0.weight": 15 - 1 - 3, "layer1.weight": 3}
    assert shapes(again) == {"layer0.weight": (D - 1, 3), "layer1.weight": (3, 1)} and network.params["rest"]["layer0.bias"].shape == (3,)
    assert_same_function(fit, again, rows(7, D, seed=3))
    again.save(tmp_path / "again")
    np.testing.assert_array_equal(al.load(tmp_path / "again").predict(0, x).mean, again.predict(0, x).mean)


def test_noise_of_a_pruned_network_is_that_of_the_weights_kept(mlp: Any) -> None:
    """Output variances, layer by layer, are those of the whole network with σ² = 0 where a weight is gone."""
    from aleator import noise, sites

    _, pruned, x = mlp
    network, params = pruned.model.network, pruned.posterior.params["network"]
    spread = jax.tree.map(lambda leaf: jnp.abs(leaf) + 0.5, params)
    _, records = sites.replay(None, network.apply, params, jnp.asarray(x), noise.moments, (spread,), (2,))
    first = np.zeros((D - 1, 4), np.float32)
    first.ravel()[network.parts[0].index] = spread["kept"]["layer0.weight"]
    expected = np.square(np.delete(x, 1, axis=1)) @ first + spread["rest"]["layer0.bias"]
    np.testing.assert_allclose(records["kept.layer0.weight"], expected, rtol=1e-5)
    assert {s.path: s.leaf_axes for s in sites.find(network.apply, params, jnp.asarray(x)).sites} == dict.fromkeys(
        ("kept.layer0.weight", "kept.layer1.weight"), ()
    )


def test_removing_everything_leaves_the_biases(mlp: Any, tmp_path: Any) -> None:
    fit, _, x = mlp
    pruned = fit.prune(-100.0)
    np.testing.assert_allclose(outputs(pruned, x), zeroed(fit, x, -100.0), rtol=1e-6)
    assert np.ptp(outputs(pruned, x)) == 0.0 and pruned.manifest["pruning"]["nonzero"] == 0
    pruned.save(tmp_path / "empty")
    np.testing.assert_array_equal(al.load(tmp_path / "empty").predict(0, x).mean, pruned.predict(0, x).mean)
    tuned = al.fit(1, pruned.model, (x, rows(len(x), seed=1)), al.MAP(num_steps=5))
    assert np.isfinite(tuned.predict(0, x).mean).all()


def test_removing_nothing_is_the_network(mlp: Any) -> None:
    fit, _, x = mlp
    pruned = fit.prune(100.0)
    np.testing.assert_allclose(outputs(pruned, x), np.asarray(fit.model.outputs(fit.posterior.params, x)), rtol=1e-6)
    assert pruned.manifest["pruning"]["compression"] == 1.0


def test_convolutions_run_on_the_channels_that_are_left(tmp_path: Any) -> None:
    """No layer of LeNet-5 is wider than what somebody reads: 3 of 20 channels, 2 of 50 (16 pixels each), 4 of 500 units; then one fewer."""
    shape, x = (28, 28, 1), rows(4, 28, 28, 1)
    second, third, last = np.zeros((20, 50), bool), np.zeros((50, 500), bool), np.zeros((500, 1), bool)
    second[np.ix_([1, 5, 7], [0, 9])], third[np.ix_([0, 9, 11], [3, 4, 100, 499])], last[[3, 4, 100, 499]] = True, True, True
    third[0, 499] = False
    keep = {"conv2.weight": second, "dense1.weight": np.tile(third, (16, 1)), "dense2.weight": last}
    fit = fitted(al.networks.LeNet5Caffe(shape, 1), x, keep)
    pruned = fit.prune()
    network = pruned.model.network
    assert {path: leaf.shape for path, leaf in network.params["rest"].items()} == {
        "conv1.bias": (3,),
        "conv2.bias": (2,),
        "dense1.bias": (4,),
        "dense2.bias": (1,),
    }
    assert shapes(pruned) == {"conv1.weight": (5, 5, 1, 3), "conv2.weight": (5, 5, 3, 2), "dense1.weight": (32, 4), "dense2.weight": (4, 1)}
    widest = max(var.aval.size for eqn in jax.make_jaxpr(network.apply)(network.params, x).eqns for var in eqn.outvars)
    assert widest == 4 * 24 * 24 * 3  # the first convolution's outputs: nothing is put back among zeros
    assert_same_function(fit, pruned, x)
    left = np.asarray(network.parts[1].index) % 2 == 0  # the second channel of the two loses all that feeds it
    once_more = fitted(network, x, {"kept.conv2.weight": left})
    again = once_more.prune()
    assert again.manifest["pruning"]["weights"] == 426_000 and again.model.network.params["rest"]["conv2.bias"].shape == (1,)
    assert_same_function(once_more, again, x)
    again.save(tmp_path / "again")
    np.testing.assert_array_equal(al.load(tmp_path / "again").predict(0, x).mean, again.predict(0, x).mean)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_channels_nobody_reads_are_removed(layout: str) -> None:
    """Convolution, pooling, then a dense layer on the flattened pixels, in either order of flattening."""
    size, channels = 6, 4
    pooled = (size - 2) // 2

    def run(p: Any, x: jax.Array) -> jax.Array:
        if layout == "NHWC":
            h = jax.nn.relu(conv2d(x, p["c"]["w"], padding="VALID") + p["c"]["b"])
            h = h.reshape(len(x), pooled, 2, pooled, 2, channels).max((2, 4))
        else:
            h = jax.lax.conv_general_dilated(x, p["c"]["w"], (1, 1), "VALID", dimension_numbers=("NCHW", "HWIO", "NCHW"))
            h = jax.nn.relu(h + p["c"]["b"][:, None, None]).reshape(len(x), channels, pooled, 2, pooled, 2).max((3, 5))
        return h.reshape(len(x), -1) @ p["d"]["w"] + p["d"]["b"]

    dense = pooled * pooled * channels
    params = {
        "c": {"w": jnp.asarray(rows(3, 3, 2, channels)), "b": jnp.zeros(channels)},
        "d": {"w": jnp.asarray(rows(dense, 1)), "b": jnp.zeros(1)},
    }
    read = np.ones((pooled * pooled, channels), bool)
    read[:, 1] = False
    keep = {"d.w": (read if layout == "NHWC" else read.T).reshape(dense, 1)}
    x = rows(12, size, size, 2) if layout == "NHWC" else rows(12, 2, size, size)
    fit = fitted((run, params), x, keep)
    pruned = fit.prune()
    assert shapes(pruned) == {"c.w": (3, 3, 2, channels - 1), "d.w": (dense * 3 // 4, 1)}
    assert_same_function(fit, pruned, x)


def test_an_equinox_network_is_pruned() -> None:
    import equinox as eqx

    module, x = eqx.nn.MLP(D, 1, 6, 2, key=jax.random.key(0)), rows(10, D)
    masks = mlp_masks()
    fit = fitted(module, x, {"layers.0.weight": masks["layer0.weight"].T, "layers.2.weight": masks["layer1.weight"].T})
    pruned = fit.prune()
    assert shapes(pruned) == {"layers.0.weight": (5, D - 1), "layers.1.weight": (5, 5), "layers.2.weight": (1, 5)}
    assert_same_function(fit, pruned, x)


def test_weights_used_at_every_step_of_a_scan_are_pruned() -> None:
    import equinox as eqx

    class Net(eqx.Module):
        cell: eqx.nn.GRUCell
        o: eqx.nn.Linear

        def __init__(self) -> None:
            self.cell, self.o = eqx.nn.GRUCell(3, 4, key=jax.random.key(0)), eqx.nn.Linear(4, 1, key=jax.random.key(1))

        def __call__(self, xs: jax.Array) -> jax.Array:
            return self.o(jax.lax.scan(lambda c, x: (self.cell(x, c), None), jnp.zeros(4), xs)[0])

    keep = np.ones((12, 3), bool)
    keep[:, 1], keep[3] = False, False
    x = rows(6, 5, 3)
    fit = fitted(Net(), x, {"cell.weight_ih": keep})
    pruned = fit.prune()
    assert shapes(pruned)["cell.weight_ih"] == (11, 2)
    assert_same_function(fit, pruned, x)


def test_stacked_and_tied_weights_are_left_whole() -> None:
    def run(p: Any, x: jax.Array) -> jax.Array:
        h = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["s"])[0]
        return (h @ p["t"]) @ p["t"].T @ p["o"]

    params = {"s": jnp.asarray(rows(3, D, D)), "t": jnp.asarray(rows(D, 4)), "o": jnp.asarray(rows(D, 1))}
    x, gone = rows(8, D), np.asarray([[True], [False], [True], [True], [True]])
    fit = fitted((run, params), x, {"s": False, "t": False, "o": gone})
    pruned = fit.prune()
    assert shapes(pruned) == {"o": (4, 1)}
    expected = run(fit.posterior.params["network"] | {"o": fit.posterior.params["network"]["o"] * gone}, x)
    np.testing.assert_allclose(outputs(pruned, x), expected, rtol=1e-5, atol=1e-5)
    alone = fitted((lambda p, x: (x @ p["t"]) @ p["t"].T[:, :1], {"t": params["t"]}), x, {"t": False})
    with pytest.raises(MethodError, match="made smaller"):
        alone.prune()


def test_a_constant_on_the_way_stays_on_the_way() -> None:
    params = {"w": jnp.asarray(rows(D, 4)), "v": jnp.asarray(rows(1, 4))}
    x = rows(8, D)
    keep = np.ones((D, 4), bool)
    keep[2] = False
    fit = fitted((lambda p, x: jnp.tanh(x @ (p["w"] * 0.3)) @ p["v"].T, params), x, {"w": keep})
    assert_same_function(fit, fit.prune(), x)


def test_priors_that_rescale_are_undone() -> None:
    """The pruned network holds the weights themselves, so nothing rescales them a second time."""
    x = rows(10, D)
    prior = al.priors.Hierarchical(al.HalfCauchy(1.0))
    fit = fitted(al.networks.MLP(D, (6,), 1), x, mlp_masks(), prior)
    assert_same_function(fit, fit.prune(), x)


def test_what_cannot_be_pruned_is_refused() -> None:
    x, y = rows(10, D), rows(10, seed=1)
    with pytest.raises(MethodError, match="which weights can go"):
        al.fit(0, al.BNN(al.networks.MLP(D, (), 1), al.Gaussian(0.5)), (x, y), al.MAP(num_steps=1)).prune()
    linear = al.LinearModel(al.features.Identity(), al.Gaussian(0.5), al.Normal(1.0))
    with pytest.raises(MethodError, match="no network to prune"):
        al.fit(0, linear, (x, y), al.SparseDropout(num_steps=1, batch_size=None)).prune()
