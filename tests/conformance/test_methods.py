"""What every method must do, generated from the registry: a method that is not in the table fails the first test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import loop
from aleator.model import signature
from aleator.posterior import _pieces
from aleator.target import Target
from tests.interrupted import dies_after

from . import cases

# Runs here are too short to be healthy; what is asked of them does not depend on it.
pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")
METHOD = pytest.mark.parametrize(("method", "model"), cases.METHOD_CASES)
# These rest on machinery that another row asks about (chains on hmc, stochastic gradients on sgld, members on ensemble): some questions are put to them by
# `make test-long` only. Compilation is what the suite's time goes into.
SIBLINGS = {
    "nuts", "random_walk", "independence", "slice", "elliptical_slice", "mala", "gibbs", "parallel_tempering", "microcanonical", "chees",
    "marginal_gibbs", "reversible_jump", "sghmc", "sgnht", "underdamped", "hyper_ensemble", "bayesian_bootstrap", "repulsive_ensemble", "snapshot",
    "concrete_dropout", "variational_dropout", "nested",
}  # fmt: skip


def sparing() -> list:
    """Every method once, siblings as long tests."""
    found, seen = [], set()
    for case in cases.METHOD_CASES:
        long = case[0] in seen or case[0] in SIBLINGS
        found.append(pytest.param(*case, marks=[pytest.mark.long] if long else []))
        seen.add(case[0])
    return found


SPARING = pytest.mark.parametrize(("method", "model"), sparing())


def fitted(method: str, model: str, key: int = 0, y_shape: str = "flat", **options) -> al.Fit:
    x, y = cases.regression()
    y = y if y_shape == "flat" else y[:, None]
    # The driver is chosen by the clock where it may: on a busy machine two fits could differ in their last bits, and the second compile.
    return al.fit(key, cases.MODELS[model](), (x, y), cases.METHODS[method][0], **{"progress": False, "driver": "loop"} | options)


def leaves(fit: al.Fit) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(fit.sample(7, 3))]


def assert_same(a: al.Fit, b: al.Fit) -> None:
    """Bit for bit."""
    for left, right in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)


def test_every_registered_method_is_in_the_table() -> None:
    assert set(cases.METHODS) | set(cases.GENERATIVE) == set(al.METHODS)


@pytest.mark.parametrize("name", al.METHODS)
def test_card_is_complete(name: str) -> None:
    card = al.METHODS[name].card
    assert all(len(part) > 10 for part in card[1:7]) and card.name and card.references


@METHOD
def test_predicts_the_right_shapes(method: str, model: str) -> None:
    x, y = cases.regression()
    flat, column = fitted(method, model), fitted(method, model, y_shape="column")
    a, b = flat.predict(1, x), column.predict(1, x)
    assert a.mean.shape == (cases.N,) and b.mean.shape == (cases.N, 1)
    np.testing.assert_array_equal(a.mean, b.mean[:, 0])
    assert a.log_prob(y).shape == (cases.N,)
    np.testing.assert_array_equal(a.log_prob(y), a.log_prob(y[:, None]))


@METHOD
def test_variance_is_aleatoric_plus_epistemic(method: str, model: str) -> None:
    predictive = fitted(method, model).predict(1, cases.regression()[0])
    np.testing.assert_allclose(predictive.variance, predictive.aleatoric + predictive.epistemic, rtol=1e-6)
    assert (predictive.aleatoric > 0).all() and (predictive.epistemic >= 0).all()


@METHOD
def test_same_key_same_posterior_other_key_other_or_exact(method: str, model: str) -> None:
    assert_same(fitted(method, model, 0), fitted(method, model, 0))
    if method not in ("exact", "expectation_propagation"):
        assert any((a != b).any() for a, b in zip(leaves(fitted(method, model, 0)), leaves(fitted(method, model, 1)), strict=True))


@METHOD
def test_second_fit_compiles_nothing(method: str, model: str) -> None:
    fitted(method, model, 0).predict(0, cases.regression()[0])
    compiled: list[str] = []

    def listener(event: str, duration: float, **kwargs: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        fitted(method, model, 0).predict(0, cases.regression()[0])
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


@SPARING
def test_float64_when_enabled(method: str, model: str) -> None:
    x, y = cases.regression()
    with jax.enable_x64(True):
        fit = al.fit(0, cases.MODELS[model](), (x.astype(np.float64), y), cases.METHODS[method][0], progress=False)
        assert {leaf.dtype for leaf in leaves(fit)} == {np.dtype(np.float64)}
        double = fit.predict(0, x).mean
    single = fitted(method, model).predict(0, x).mean
    assert np.isfinite(double).all() and double.shape == single.shape
    if method == "exact":
        np.testing.assert_allclose(double, single, rtol=1e-10)


@SPARING
def test_steps_run_under_jit_and_vmap(method: str, model: str) -> None:
    """The bare contract: init and step are pure and can be mapped over keys and states."""
    x, y = cases.regression()
    bound = cases.MODELS[model]().bind(x, y[:, None])
    chosen = cases.METHODS[method][0]
    algorithm = getattr(chosen, "base", chosen).build(Target(bound, cases.N, signature=signature(x)))
    with jax.enable_x64(algorithm.x64):
        batch = al.Data(x, y[:, None]).batch()
        start = bound.init(jax.random.key(0))
        if algorithm.starts is not None:
            start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (algorithm.starts, *leaf.shape)), start)
        keys = jax.random.split(jax.random.key(1), 2)
        states = jax.vmap(lambda key: algorithm.init(key, start))(jax.random.split(jax.random.key(2), 2))
        # The same keys twice, on purpose: the two ways must agree.
        mapped, _ = jax.jit(jax.vmap(algorithm.phases[0].step, in_axes=(0, 0, None)))(jax.random.clone(keys), states, batch)
        alone, _ = jax.jit(algorithm.phases[0].step)(keys[0], jax.tree.map(lambda leaf: leaf[0], states), batch)
    for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6)


@METHOD
def test_saved_and_loaded_predicts_the_same_bits(method: str, model: str, tmp_path) -> None:
    x, _ = cases.regression()
    fit = fitted(method, model)
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit")
    np.testing.assert_array_equal(fit.predict(3, x).mean, again.predict(3, x).mean)
    np.testing.assert_array_equal(fit.predict(3, x).variance, again.predict(3, x).variance)
    assert_same(fit, again)
    assert again.method == fit.method or method == "gibbs"  # whose conditionals are the user's code
    assert again.status == fit.status and again.log_evidence == fit.log_evidence


@METHOD
@pytest.mark.parametrize("saves", [pytest.param(1, marks=pytest.mark.long), 2])
def test_resume_gives_the_same_bits(method: str, model: str, saves: int, tmp_path, monkeypatch) -> None:
    """Stopped right after checkpoint number `saves`, then resumed."""
    monkeypatch.setattr(loop, "FIRST_CHUNK", 7)
    monkeypatch.setattr(loop, "MAX_CHUNK", 25)
    whole = fitted(method, model)
    with dies_after(saves, surely=False):  # a run with a single chunk saves less often than it is asked to die
        fitted(method, model, checkpoint=tmp_path, checkpoint_every=0.0)
    resumed = fitted(method, model, checkpoint=tmp_path, checkpoint_every=0.0, resume=True)
    assert_same(whole, resumed)
    assert resumed.manifest["steps"] == whole.manifest["steps"]
    for name, trace in whole.info.items():
        np.testing.assert_array_equal(trace, resumed.info[name])


@METHOD
def test_chunked_prediction_equals_unchunked(method: str, model: str, monkeypatch) -> None:
    x, _ = cases.regression()
    fit = fitted(method, model)
    whole = fit.predict(5, x)
    monkeypatch.setattr(_pieces, "BYTE_BUDGET", 2000)
    pieces = fit.predict(5, x)
    np.testing.assert_allclose(whole.mean, pieces.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole.variance, pieces.variance, rtol=1e-5, atol=1e-6)


@METHOD
def test_keys_are_used_once(method: str, model: str) -> None:
    """The checker is on in every test (conftest.py). Switched on by its context manager it would compile all programs once more."""
    assert jax.config.jax_debug_key_reuse
    fitted(method, model, key=11).predict(12, cases.regression()[0])


@pytest.mark.parametrize(("method", "model"), [("exact", "linear"), ("map", "linear"), ("map", "network")])
def test_one_member_ensemble_equals_its_member(method: str, model: str) -> None:
    """From the same start on all rows, so that nothing but the combinator differs."""
    x, y = cases.regression()
    start = None if method == "exact" else cases.MODELS[model]().bind(x, y[:, None]).init(jax.random.key(3))
    base = al.Exact() if method == "exact" else al.MAP(num_steps=cases.STEPS)
    alone = al.fit(0, cases.MODELS[model](), (x, y), base, init=start).predict(1, x)
    one = al.fit(0, cases.MODELS[model](), (x, y), al.Ensemble(base, 1), init=start).predict(1, x)
    np.testing.assert_allclose(alone.mean, one.mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone.variance, one.variance, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, None])
def test_batch_size_does_not_change_the_exact_posterior(batch_size: int | None) -> None:
    x, y = cases.regression()
    whole = al.fit(0, cases.linear_model(), (x, y), al.Exact())
    parts = al.fit(0, cases.linear_model(), (x, y), al.Exact(batch_size=batch_size))
    np.testing.assert_allclose(parts.posterior.mean, whole.posterior.mean, rtol=1e-11)
    np.testing.assert_allclose(parts.log_evidence.value, whole.log_evidence.value, rtol=1e-12)


@pytest.mark.parametrize("batch_size", [1, 7, None])
@pytest.mark.parametrize("members", [None, 2])
def test_batch_size_does_not_change_the_mode(batch_size: int | None, members: int | None) -> None:
    """MAP of a linear-Gaussian model is the exact mean, whatever the batches: N/n and the prior are in the right place."""
    x, y = cases.regression()
    exact = al.fit(0, cases.linear_model(), (x, y), al.Exact())
    method = al.MAP(num_steps=4000, batch_size=batch_size, learning_rate=0.02)
    method = method if members is None else al.Ensemble(method, members)
    fit = al.fit(1, cases.linear_model(), (x, y), method)
    weights = jnp.atleast_3d(fit.sample(0, 2)["network"]["weight"])
    sd = np.sqrt(np.diagonal(exact.posterior.operator.covariance(), axis1=1, axis2=2))
    assert np.max(np.abs(weights - exact.posterior.mean) / sd) < (0.02 if batch_size is None else 0.35)
