"""Each kind of bad input has its own message: what came, what was expected, what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from tests.conformance import cases

X, Y = cases.regression()
FAST = al.MAP(num_steps=3)


def mlp(out_size: int = 1, likelihood=None, in_size: int = cases.D) -> al.BNN:
    return al.BNN(al.networks.MLP(in_size, (4,), out_size), likelihood or al.Gaussian())


def poked(array: np.ndarray, value: float) -> np.ndarray:
    array = array.astype(float).copy()
    array.flat[5] = value
    return array


def refused(match: str, *args, error=al.AleatorError, **kwargs) -> None:
    with pytest.raises(error, match=match) as caught:
        al.fit(*args, **kwargs)
    text = str(caught.value)
    assert "Got:" in text and "Expected:" in text and "Do this:" in text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value: float) -> None:
    refused(r"x holds 1 values that are not finite.*index \(1, 2\)", 0, mlp(), (poked(X, value), Y), FAST, error=al.DataError)
    refused(r"y holds 1 values that are not finite.*index \(5,\)", 0, mlp(), (X, poked(Y, value)), FAST, error=al.DataError)


def test_empty_data() -> None:
    refused("x is empty", 0, mlp(), (X[:0], Y[:0]), FAST, error=al.DataError)


def test_one_row_is_fitted_but_not_silently() -> None:
    with pytest.warns(al.HealthWarning, match="Only one row"):
        fit = al.fit(0, mlp(), (X[:1], Y[:1]), FAST)
    assert "add rows" in fit.status
    refused("nothing left to train on", 0, mlp(), (X[:1], Y[:1]), al.MAP(num_steps=3, holdout=0.5), error=al.DataError)


def test_batches_larger_than_the_data() -> None:
    refused("batches are larger than the data.*batch_size=64", 0, mlp(), (X, Y), al.MAP(num_steps=3, batch_size=64), error=al.MethodError)
    refused("batches are larger", 0, mlp(), (X, Y), al.Ensemble(al.MAP(num_steps=3, batch_size=64), 2), error=al.MethodError)


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_outside_the_range(label: int) -> None:
    y = np.arange(cases.N) % 4
    y[3] = label
    refused(str(label), 0, mlp(4, al.Categorical(4)), (X, y), FAST, error=al.DataError)


def test_labels_that_are_floats() -> None:
    refused("astype", 0, mlp(4, al.Categorical(4)), (X, (np.arange(cases.N) % 4).astype(float)), FAST, error=al.DataError)


def test_a_single_class() -> None:
    refused("class", 0, mlp(4, al.Categorical(4)), (X, np.ones(cases.N, int)), FAST, error=al.DataError)


def test_wrong_number_of_features_at_prediction() -> None:
    fit = al.fit(0, mlp(), (X, Y), FAST)
    with pytest.raises(al.DataError, match=r"Got: \(n, 2\). Expected: \(n, 3\)"):
        fit.predict(0, X[:, :2])
    with pytest.raises(al.DataError, match="not finite"):
        fit.predict(0, poked(X, np.nan))


def test_objects_and_strings() -> None:
    refused("x is not numeric.*object", 0, mlp(), (X.astype(object), Y), FAST, error=al.DataError)
    refused("y is not numeric", 0, mlp(), (X, Y.astype(str)), FAST, error=al.DataError)


def test_lengths_that_differ() -> None:
    refused("40 rows in x, 39 rows in y", 0, mlp(), (X, Y[:-1]), FAST, error=al.DataError)
    refused("weight", 0, mlp(), (X, Y, np.ones(3)), FAST, error=al.DataError)
    refused("negative", 0, mlp(), (X, Y, -np.ones(cases.N)), FAST, error=al.DataError)


def test_log_joint_not_finite_at_the_start_names_the_parameter() -> None:
    broken = {"w": jnp.full((cases.D, 1), jnp.nan)}
    refused(r"parameter network\.w", 0, al.BNN((lambda p, x: x @ p["w"], broken)), (X, Y), FAST, error=al.NonFiniteError)
    overflowing = al.BNN((lambda p, x: jnp.exp(1e3 * (1 + x @ p["w"] ** 2)), {"w": jnp.ones((cases.D, 1))}))
    refused(r"log-likelihood .* at row .*network\.w", 0, overflowing, (X, Y), FAST, error=al.NonFiniteError)
    density = al.target_from_log_density(lambda p: jnp.log(p["a"]), {"a": -1.0})
    refused(r"parameter a", 0, density, None, FAST, error=al.NonFiniteError)


def test_wrong_number_of_outputs() -> None:
    refused(r"Got: \(n, 3\). Expected: \(n, 1\). Do this: give the network out_size=1", 0, mlp(3), (X, Y), FAST, error=al.ModelError)
    refused(r"out_size=2", 0, mlp(1, al.HeteroscedasticGaussian()), (X, Y), FAST, error=al.ModelError)
    refused(r"out_size=2", 0, mlp(1), (X, np.stack([Y, Y], 1)), FAST, error=al.ModelError)
    refused(r"do not fit", 0, al.BNN((lambda p, x: (x @ p["w"])[:, 0], {"w": jnp.ones((cases.D, 1))})), (X, Y), FAST, error=al.ModelError)


def test_wrong_number_of_inputs() -> None:
    refused(r"MLP cannot take this x. Got: shape \(2, 3\). Expected: \(n, 5\)", 0, mlp(in_size=5), (X, Y), FAST, error=al.ModelError)


def test_batch_norm() -> None:
    import equinox as eqx
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm, self.out = nnx.BatchNorm(cases.D, rngs=rngs), nnx.Linear(cases.D, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.norm(x))

    with pytest.raises(al.ModelError, match=r"batch statistics.*module\.eval"):
        al.BNN(Net(nnx.Rngs(0)))
    with pytest.raises(al.ModelError, match="GroupNorm"):
        al.BNN(eqx.nn.BatchNorm(cases.D, axis_name="batch", mode="batch"))
    frozen = Net(nnx.Rngs(0))
    frozen.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(frozen, nnx.BatchStat)))
    al.fit(0, al.BNN(frozen), (X, Y), FAST)
    after = nnx.to_pure_dict(nnx.state(frozen, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after))


def test_unknown_hyper_parameters() -> None:
    with pytest.raises(al.MethodError, match=r"'learning_rat' .did you mean 'learning_rate'"):
        al.MAP(learning_rat=0.1)
    with pytest.raises(al.MethodError, match="adam"):
        al.MAP(optimizer="adamm")
    with pytest.raises(al.MethodError, match="cosine"):
        al.MAP(schedule="cosin")
    with pytest.raises(al.MethodError, match="num_steps"):
        al.MAP(num_steps=0)
    with pytest.raises(al.MethodError, match="batch_size"):
        al.MAP(batch_size=2.5)


@pytest.mark.parametrize("key", [None, "0", 1.5, True, np.zeros(3), jax.random.split(jax.random.key(0), 2)])
def test_keys_that_are_not_keys(key) -> None:
    refused("random key", key, mlp(), (X, Y), FAST)


def test_things_that_are_not_methods_models_or_data() -> None:
    refused(r"call it: al.MAP\(\)", 0, mlp(), (X, Y), al.MAP, error=al.MethodError)
    refused("not a model", 0, al.networks.MLP(3, (4,), 1), (X, Y), FAST)
    refused("wrong form", 0, mlp(), X, FAST, error=al.DataError)
    refused("There is no data", 0, mlp(), (None, None), FAST, error=al.DataError)
    with pytest.raises(al.ModelError, match="not a network"):
        al.BNN(3)
    with pytest.raises(al.ModelError, match="not a likelihood"):
        al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian)
    with pytest.raises(al.ModelError, match="not a prior"):
        al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(), 1.0)


def test_parameters_that_cannot_be_inferred() -> None:
    with pytest.raises(al.ModelError, match=r"Parameter n cannot be inferred.*int32"):
        al.BNN((lambda p, x: x, {"n": jnp.arange(3)}))
    with pytest.raises(al.ModelError, match="no parameters"):
        al.BNN((lambda p, x: x, {}))


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, "wide", True])
def test_prior_scales(scale) -> None:
    with pytest.raises(al.ModelError, match="prior scale must be positive"):
        al.Normal(scale)


def test_prior_patterns_must_cover_the_network() -> None:
    x, y = X, Y
    with pytest.raises(al.ModelError, match="no scale for"):
        al.fit(0, al.BNN(al.networks.MLP(3, (4,), 1), prior=al.Normal({"layer0": 1.0})), (x, y), FAST)
    with pytest.raises(al.ModelError, match="fit nothing"):
        al.fit(0, al.BNN(al.networks.MLP(3, (4,), 1), prior=al.Normal({"layer9": 1.0, "*": 1.0})), (x, y), FAST)


def test_validation_data_nobody_looks_at() -> None:
    refused("would not look", 0, mlp(), (X, Y), FAST, validation=(X, Y), error=al.MethodError)


def test_temperature_must_be_positive() -> None:
    refused("temperature", 0, mlp(), (X, Y), FAST, temperature=0.0, error=al.MethodError)


def test_options_are_checked() -> None:
    refused("driver", 0, mlp(), (X, Y), FAST, driver="turbo", error=al.MethodError)
    refused("nothing to resume", 0, mlp(), (X, Y), FAST, resume=True, error=al.MethodError)
