"""fit.update of Laplace fits: all rows at once where nothing is approximated, the stated objective where something is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _tree, curvature
from aleator.data import Data

QUICK = al.MAP(num_steps=400)
AT = np.linspace(-2.0, 2.0, 9)


def linear(noise: Any = 0.3) -> al.LinearModel:
    return al.LinearModel(al.features.Polynomial(3), al.Gaussian() if noise is None else al.Gaussian(noise), al.Normal(1.5))


def curve(n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).uniform(-1.0, 1.0, n)
    return x, np.sin(2.0 * x) + 0.1 * np.random.default_rng(0).normal(size=n)


def cut(data: tuple, first: int, last: int) -> tuple:
    return tuple(part[first:last] for part in data)


@pytest.fixture(scope="module")
def began() -> al.Fit:
    return al.fit(0, linear(), cut(curve(), 0, 12), al.Laplace("full", base=QUICK), progress=False)


def test_a_linear_model_is_that_of_all_rows(began: al.Fit, tmp_path: Path) -> None:
    """In two steps, the second of a fit that was saved and loaded: exact posterior and evidence of all 30 rows."""
    began.update(cut(curve(), 12, 13)).save(tmp_path / "fit")
    fit = al.load(tmp_path / "fit").update(cut(curve(), 13, 30))
    exact = al.fit(0, linear(), curve(), al.Exact(), progress=False)
    assert abs(fit.log_evidence.value - exact.log_evidence.value) < 1e-8
    for name in ("mean", "variance", "epistemic"):
        np.testing.assert_allclose(getattr(fit.predict(1, AT), name), getattr(exact.predict(1, AT), name), rtol=1e-8, atol=1e-9)
    assert fit.manifest["data"]["num_data"] == 30 and "17 rows to N = 30" in fit.status


def test_noise_and_prior_are_tuned_on_all_rows() -> None:
    """The noise of the old rows stays free: tuning after an update finds what tuning on all rows finds."""
    method = al.Laplace("full", tune="prior", tune_noise=True, base=QUICK)
    fits = [al.fit(0, linear(None), part, method, progress=False) for part in (curve(), cut(curve(), 0, 20))]
    updated = fits[1].update(cut(curve(), 20, 30))
    assert abs(updated.log_evidence.value - fits[0].log_evidence.value) < 1e-5
    np.testing.assert_allclose(updated.posterior.tuned["prior_factor"], fits[0].posterior.tuned["prior_factor"], rtol=1e-3)
    np.testing.assert_allclose(updated.predict(1, AT).variance, fits[0].predict(1, AT).variance, rtol=1e-3)
    assert abs(fits[1].log_evidence.value - fits[0].log_evidence.value) > 1.0


def task(seed: int = 0, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)).astype(np.float32)
    return x, (np.stack([2 * x[:, 0], x[:, 1], -x[:, 1]], axis=1) + rng.gumbel(size=(n, 3))).argmax(axis=1)


def classifier(hidden: tuple[int, ...] = (3,)) -> al.BNN:
    return al.BNN(al.networks.MLP(2, hidden, 3, activation="tanh"), al.Categorical(3), al.Normal(1.0))


def lines() -> tuple[al.BNN, tuple[np.ndarray, np.ndarray]]:
    """Two noisy outputs of a linear layer: every curvature is the same at all weights."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 2)).astype(np.float32) @ np.array([[1.0, 0.7], [0.0, 0.6]], np.float32)
    y = (x @ rng.normal(size=(2, 2)) + 0.3 + 0.4 * rng.normal(size=(40, 2))).astype(np.float32)
    return al.BNN(al.networks.MLP(2, (), 2), al.Gaussian(0.4), al.Normal(1.0)), (x, y)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "lowrank"])
def test_every_structure_adds_up_its_own_curvature(structure: str) -> None:
    """At a linear layer: the posterior covariance is that of all rows, and the mode solves the normal equations of prior, new rows and
    the old rows' quadratic, which for the diagonal is not that of all rows."""
    model, data = lines()
    base = al.MAP(num_steps=1500, learning_rate=0.02)
    method = al.Laplace(structure, rank=6, base=base)
    first = al.fit(0, model, cut(data, 0, 25), method, progress=False)
    both, whole = first.update(cut(data, 25, 40)), al.fit(0, model, data, method, progress=False)
    covariance = [np.asarray(jax.vmap(f.posterior.operator.matvec)(jnp.eye(6))) for f in (both, whole)]
    np.testing.assert_allclose(covariance[0], covariance[1], rtol=2e-3, atol=1e-5)
    plan = curvature.layout(model.bind(data[0], data[1]), al.model.signature(data[0]))

    def matrix(part: tuple) -> np.ndarray:
        batch = Data(*part).batch()
        return np.asarray(curvature.dense(first.model, first.posterior.mean["network"], batch, {"scale": jnp.asarray(0.4)}, plan, "ggn"))

    old, new = matrix(cut(data, 0, 25)), matrix(cut(data, 25, 40))
    old = np.diag(np.diag(old)) if structure == "diag" else old
    apply = lambda w, x: first.model.apply(_tree.unflat(w, first.posterior.mean["network"]), x, None)
    weights = _tree.flat(first.posterior.mean["network"])
    score = jax.grad(lambda w: -0.5 * jnp.sum((apply(w, data[0][25:]) - data[1][25:]) ** 2) / 0.4**2)(jnp.zeros(6))
    want = np.linalg.solve(old + new + np.eye(6), old @ weights + np.asarray(score) + np.asarray(weights))  # g = w* at the first mode
    np.testing.assert_allclose(_tree.flat(both.posterior.mean["network"]), want, atol=2e-3)
    if structure != "diag":
        np.testing.assert_allclose(both.log_evidence.value, whole.log_evidence.value, atol=2e-3)


@pytest.fixture(scope="module")
def network() -> al.Fit:
    return al.fit(0, classifier(), task(), al.Laplace("full", base=al.MAP(num_steps=3000)), progress=False)


def test_a_network_ends_at_the_mode_of_what_is_remembered(network: al.Fit) -> None:
    """∇[log prior + quadratic of the old rows + log-likelihood of the new] = 0, written down from its definition. The new rows are of one
    class alone."""
    x, y = task(seed=1)
    new = x[y == 0], y[y == 0]
    fit = network.update(new)
    model, like = network.model, network.posterior.mean["network"]
    with jax.enable_x64(True):
        at = lambda w: model.apply(_tree.unflat(w, like), jnp.asarray(task()[0], jnp.float64), None)
        old = jnp.asarray(_tree.flat(like))
        log_likelihood = lambda w, x, y: jnp.sum(jax.nn.log_softmax(model.apply(_tree.unflat(w, like), x, None))[jnp.arange(len(y)), y])
        slopes, p = jax.jacrev(at)(old), jax.nn.softmax(at(old))
        information = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
        ggn = jnp.einsum("nip,nij,njq->pq", slopes, information, slopes)
        gradient = jax.grad(log_likelihood)(old, jnp.asarray(task()[0], jnp.float64), task()[1])
        objective = lambda w: (
            -0.5 * w @ w
            + gradient @ (w - old)
            - 0.5 * (w - old) @ ggn @ (w - old)
            + log_likelihood(w, jnp.asarray(new[0], jnp.float64), new[1])
        )
        moved = jnp.asarray(_tree.flat(fit.posterior.mean["network"]))
        slope = jax.grad(objective)
        assert jnp.linalg.norm(slope(moved)) < 1e-2 < 0.1 * jnp.linalg.norm(slope(old))


LEARNED = al.Laplace("kron", subset="last_layer", tune="prior", num_rounds=2, base=al.MAP(num_steps=200))


@pytest.mark.parametrize("method", [LEARNED, al.Laplace("full", subset=al.Subnetwork(7), base=QUICK)])
def test_weights_without_curvature_stay(method: al.Laplace) -> None:
    """Those of a subnetwork are the ones that were chosen first; factors of the prior are learned anew in training."""
    first = al.fit(0, classifier(), task(), method, progress=False)
    then = first.update(task(seed=1))
    a, b = (np.asarray(_tree.flat(f.posterior.mean["network"])) for f in (first, then))
    np.testing.assert_array_equal(first.posterior.index, then.posterior.index)
    moved = np.zeros(len(a), bool)
    moved[np.asarray(first.posterior.index)] = True
    assert np.all(a[~moved] == b[~moved]) and np.all(a[moved] != b[moved])
    assert np.isfinite(then.log_evidence.value) and then.manifest["data"]["num_data"] == 120
    spread = [f.posterior.operator.diagonal() * f.posterior.tuned["prior_factor"][0] for f in (first, then)]
    assert np.mean(spread[1] / spread[0]) < 0.9  # in units of the prior, twice the rows tell more


def test_what_keeps_nothing_cannot_be_updated() -> None:
    fit = al.fit(0, linear(), curve(), al.Laplace("full", curvature="hessian", base=QUICK), progress=False)
    with pytest.raises(al.MethodError, match="Gauss–Newton"):
        fit.update(curve())
