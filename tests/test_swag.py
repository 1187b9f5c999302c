"""SWAG: moments equal their definitions, the stationary covariance of SGD is the known one; snapshots come at the ends of cycles."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aleator as al
from aleator import loop
from aleator.data import Data
from aleator.linalg import Diagonal, LowRank
from aleator.methods import _optimise
from aleator.methods.snapshot import Snapshot, cyclical
from aleator.methods.swag import SWAG, posterior
from aleator.target import Target
from tests.conformance import cases
from tests.interrupted import dies_after

X, Y = cases.regression()
SHORT = SWAG(num_steps=60, num_warmup=30, batch_size=8, thin=3, rank=5)


def leaves(fit: al.Fit) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(fit.sample(0, 2))]


def covariance(operator: Any, size: int) -> np.ndarray:
    """S Sᵀ from the columns of the operator's square root."""
    root = np.stack([np.asarray(operator.sqrt_matvec(column)) for column in jnp.eye(operator.num_noise)], axis=1).astype(np.float64)
    assert root.shape[0] == size
    return root @ root.T


def by_hand(method: SWAG, flat_size: int, monkeypatch: Any) -> tuple[np.ndarray, Any]:
    """All iterates (steps, D) of the SGD phase, one step at a time, and the posterior made of its last state."""
    monkeypatch.setattr(_optimise, "FLAT_SIZE", flat_size)
    target = Target(cases.network_model().bind(X, Y[:, None]), cases.N)
    algorithm = method.build(target)
    state = algorithm.init(jax.random.key(0), target.init(jax.random.key(1)))
    data, rng, path = Data(X, Y[:, None]), np.random.default_rng(0), []
    step = jax.jit(algorithm.phases[-1].step)
    for key in jax.random.split(jax.random.key(2), method.num_steps):
        state, _ = step(key, state, data.take(rng.choice(cases.N, 8, replace=False)).batch())
        path.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(algorithm.position(state))]).astype(np.float64))
    return np.stack(path), algorithm.finish(jax.random.key(3), state, None)


@pytest.mark.parametrize("flat_size", [0, 100_000], ids=["tree", "flat"])
@pytest.mark.parametrize(("steps", "thin", "rank"), [(60, 3, 5), (37, 1, 36), (50, 7, 3)])
def test_moments_equal_their_definitions(steps: int, thin: int, rank: int, flat_size: int, monkeypatch) -> None:
    """θ̄ = Σθ/T, Σ_diag = Σθ²/T − θ̄², D the last K of θᵢ − θ̄ᵢ with running means; Σ = ½Σ_diag + ½DDᵀ/(K − 1)."""
    method = SWAG(num_steps=steps, num_warmup=0, batch_size=8, thin=thin, rank=rank, learning_rate=0.02)
    path, q = by_hand(method, flat_size, monkeypatch)
    counted = path[thin - 1 :: thin][: steps // thin]
    mean = counted.mean(axis=0)
    running = np.cumsum(counted, axis=0) / np.arange(1, len(counted) + 1)[:, None]
    deviations = (counted - running)[-rank:].T
    variance = (counted**2).mean(axis=0) - mean**2
    expected = 0.5 * np.diag(variance) + 0.5 * deviations @ deviations.T / (rank - 1)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(q.mean)])
    np.testing.assert_allclose(flat, mean, atol=1e-6)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected))) + 1e-12
    np.testing.assert_allclose(covariance(q.operator, len(mean)) / scale, expected / scale, atol=2e-3)
    assert isinstance(q.operator, LowRank) and q.operator.factor.shape == (len(mean), rank)
    assert np.isfinite(q.operator.logdet()) and all(q.chosen)


def test_diagonal_structure_has_the_whole_variance(monkeypatch) -> None:
    path, q = by_hand(SWAG(num_steps=40, num_warmup=0, batch_size=8, thin=2, structure="diagonal", learning_rate=0.02), 0, monkeypatch)
    assert isinstance(q.operator, Diagonal)
    np.testing.assert_allclose(q.operator.diagonal(), path[1::2].var(axis=0), rtol=2e-3, atol=1e-12)


def test_stationary_covariance_of_sgd_on_a_quadratic() -> None:
    """Two means under N(θ, σ²I): ∇ = (θ − y)/σ² with noise of constant covariance C = Cov(y)/σ⁴ at batches of one row, A = I/σ². Then
    Σ = (I − ηA)Σ(I − ηA) + η²C, here Σ = η²C/(1 − ρ²) with ρ = 1 − η/σ² (Mandt et al. 2017: ηC/2A for small η). Rows come twice at
    most, so that drawing them without replacement does not show."""
    n, eta, sigma, steps = 20_000, 0.05, 0.8, 30_000
    rng = np.random.default_rng(0)
    y = (rng.normal(size=(n, 2)) @ np.array([[1.0, 0.5], [0.0, 0.7]])).astype(np.float32)
    model = al.LinearModel(lambda x: jnp.ones_like(x[:, :1]), al.Gaussian(sigma), al.Normal(1e4))
    method = SWAG(num_steps=steps, num_warmup=100, batch_size=1, learning_rate=eta, thin=1, rank=4000)
    fit = al.fit(0, model, (np.zeros((n, 1), np.float32), y), method)
    rho = 1.0 - eta / sigma**2
    expected = eta**2 * np.cov(y.T.astype(np.float64)) / sigma**4 / (1.0 - rho**2)
    operator = fit.posterior.operator
    # An AR(1) path: its squares have autocorrelation ρ², so that T of them are worth T(1 − ρ²)/(1 + ρ²).
    error = lambda t: np.sqrt(2.0 * (1.0 + rho**2) / (1.0 - rho**2) / t)
    diagonal = 2.0 * np.asarray(operator.scale, np.float64) ** 2
    assert (np.abs(diagonal / np.diag(expected) - 1.0) < 5 * error(steps)).all()
    last = 2.0 * np.asarray(operator.factor, np.float64) @ np.asarray(operator.factor, np.float64).T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert (np.abs(last - expected) / scale < 5 * error(4000)).all()
    mean = np.asarray(fit.posterior.mean["network"]["weight"])[:, 0]
    assert (np.abs(mean - y.mean(axis=0)) < 5 * np.sqrt(np.diag(expected) * (1 + rho) / (1 - rho) / steps)).all()
    assert abs(expected[0, 1]) / scale[0, 1] > 5 * error(4000)  # the correlation is seen


@pytest.mark.parametrize("num_warmup", [0, 500])
def test_it_begins_at_a_given_fit(num_warmup: int) -> None:
    point = al.fit(0, cases.linear_model(), (X, Y), al.MAP(num_steps=30, optimizer="lbfgs"))
    method = SWAG(num_steps=100, num_warmup=num_warmup, batch_size=8, learning_rate=1e-4, thin=5, rank=5)
    fit = al.fit(1, cases.linear_model(), (X, Y), method, init=point)
    np.testing.assert_allclose(fit.posterior.mean["network"]["weight"], point.posterior.params["network"]["weight"], atol=5e-3)
    assert fit.manifest["steps"] == 100


def test_warm_up_reaches_the_mode_first() -> None:
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact())
    fit = al.fit(0, cases.linear_model(), (X, Y), SWAG(num_warmup=1500, num_steps=600, batch_size=8, thin=7, rank=10, warmup_rate=0.05))
    sd = np.sqrt(np.diagonal(exact.posterior.operator.covariance()[0]))
    assert (np.abs(fit.posterior.mean["network"]["weight"][0] - exact.posterior.mean[0]) / sd < 0.5).all()
    assert fit.manifest["steps"] == 2100


@pytest.mark.filterwarnings("ignore::aleator.HealthWarning")
def test_several_modes_and_resume(tmp_path, monkeypatch) -> None:
    """Multi-SWAG is the ensemble of SWAG: a mixture of its Gaussians; a killed run continues with the same bits."""
    monkeypatch.setattr(loop, "FIRST_CHUNK", 7)
    monkeypatch.setattr(loop, "MAX_CHUNK", 25)
    method = al.Ensemble(SHORT, 3)
    whole = al.fit(0, cases.network_model(), (X, Y), method)
    assert isinstance(whole.posterior, al.posterior.Mixture) and len(whole.posterior.components) == 3
    means = [np.asarray(part.mean["network"]["layer0"]["weight"]) for part in whole.posterior.components]
    assert np.abs(means[0] - means[1]).max() > 0.01
    predictive = whole.predict(1, X, num_samples=300)
    assert predictive.draws.shape[:2] == (300, cases.N) and (predictive.epistemic > 0).all()
    with dies_after(3):
        al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path, checkpoint_every=0.0)
    resumed = al.fit(0, cases.network_model(), (X, Y), method, checkpoint=tmp_path, resume=True)
    assert all(np.array_equal(a, b) for a, b in zip(leaves(whole), leaves(resumed), strict=True))


def test_a_path_that_stands_still_is_named() -> None:
    with pytest.warns(al.HealthWarning, match="never moved"):
        fit = al.fit(0, cases.linear_model(), (X, Y), SWAG(num_steps=60, num_warmup=0, batch_size=8, thin=3, rank=5, learning_rate=1e-30))
    assert np.isfinite(fit.posterior.operator.logdet()) and (fit.posterior.operator.diagonal() > 0).all()


def test_sgd_that_leaves_the_mode_is_named() -> None:
    """Little noise makes steep walls: at a learning rate near 2/λ_max the iterates are thousands of nats below the mode."""
    x = np.linspace(-1, 1, 200)[:, None]
    model = al.BNN(al.networks.MLP(1, (10,), 1, activation="tanh"), al.Gaussian(0.02), al.Normal(1.0))
    run = lambda rate: al.fit(0, model, (x, np.sin(3 * x[:, 0])), SWAG(learning_rate=rate, num_steps=1000, thin=7), progress=False)
    with pytest.warns(al.HealthWarning, match=r"SGD left the mode.*lower learning_rate by a factor"):
        wide = run(3e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)  # of a mode that is still being approached
        narrow = run(1e-6)
    assert "left the mode" not in narrow.status and wide.manifest["health"]["fall"] > 200 > narrow.manifest["health"]["fall"]


def test_drift_is_named() -> None:
    with pytest.warns(al.HealthWarning, match="partly drift"):
        al.fit(0, cases.linear_model(), (X, Y), SWAG(num_steps=200, num_warmup=0, batch_size=20, thin=3, rank=5, learning_rate=3e-4))


def test_one_row_still_has_a_posterior() -> None:
    """One row has no gradient noise: nothing moves but towards the mode, and the fit says so or that it drifts."""
    method = SWAG(num_steps=60, num_warmup=200, batch_size=1, thin=3, rank=5, warmup_rate=0.1, learning_rate=1e-30)
    with pytest.warns(al.HealthWarning):
        fit = al.fit(0, cases.linear_model(), (X[:1], Y[:1]), method)
    assert np.isfinite(fit.predict(0, X[:1]).variance).all()


def test_a_run_cut_short_gives_its_last_iterate() -> None:
    target = Target(cases.network_model().bind(X, Y[:, None]), cases.N)
    state = SHORT.build(target).init(jax.random.key(0), target.init(jax.random.key(1)))
    packing = _optimise.packing(jax.eval_shape(target.init, jax.random.key(0)))
    assert isinstance(posterior(state, packing), al.posterior.Point)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": None}, "noise of mini-batches"),
        ({"rank": 1}, "too few iterates"),
        ({"num_steps": 100, "thin": 10, "rank": 10}, "too few iterates"),
        ({"structure": "full"}, "Unknown structure"),
        ({"num_warmup": -1}, "num_warmup"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"optimizer": "sgdd"}, "Unknown optimiser"),
    ],
)
def test_bad_settings_are_refused(settings: dict, match: str) -> None:
    with pytest.raises(al.MethodError, match=match):
        SWAG(**settings)


def test_targets_without_batches_are_refused() -> None:
    with pytest.raises(al.MethodError, match="fewer rows than there are"):
        al.fit(0, cases.linear_model(), (X, Y), SWAG(batch_size=40))
    with pytest.raises(al.MethodError, match="bare log density"):
        al.fit(0, al.target_from_log_density(lambda p: -(p**2), 1.0), None, SWAG())


# ---- snapshots ----------------------------------------------------------------------------------------------------------------------


def test_the_learning_rate_falls_and_starts_again() -> None:
    rate = np.asarray(jax.vmap(cyclical(0.3, 100, 4))(jnp.arange(100)))
    expected = 0.15 * (1 + np.cos(np.pi * (np.arange(100) % 25) / 25))
    np.testing.assert_allclose(rate, expected, rtol=1e-5, atol=1e-7)
    uneven = np.asarray(jax.vmap(cyclical(1.0, 10, 3))(jnp.arange(10)))
    assert [i for i in range(1, 10) if uneven[i] > uneven[i - 1]] == [4, 7] and uneven[0] == 1.0


@pytest.mark.parametrize(("steps", "cycles", "discard"), [(60, 3, 0), (50, 7, 2), (20, 20, 0)])
def test_snapshots_are_the_ends_of_cycles(steps: int, cycles: int, discard: int, monkeypatch) -> None:
    """The kept draws equal the iterates of a run by hand, on all rows, at the steps before the learning rate jumps."""
    method = Snapshot(num_steps=steps, num_cycles=cycles, discard=discard, learning_rate=0.05)
    fit = al.fit(
        0, cases.network_model(), (X, Y), method, init=(start := cases.network_model().bind(X, Y[:, None]).init(jax.random.key(3)))
    )
    target = Target(cases.network_model().bind(X, Y[:, None]), cases.N)
    algorithm = method.build(target)
    state, step, batch, path = algorithm.init(jax.random.key(0), start), jax.jit(algorithm.phases[0].step), Data(X, Y[:, None]).batch(), []
    for key in jax.random.split(jax.random.key(1), steps):
        state, _ = step(key, state, batch)
        path.append(np.asarray(algorithm.position(state)["network"]["layer0"]["weight"]))
    ends = [t for t in range(steps) if (t + 1) * cycles // steps > t * cycles // steps][discard:]
    assert len(ends) == cycles - discard and ends[-1] == steps - 1
    np.testing.assert_allclose(fit.posterior.params["network"]["layer0"]["weight"], np.stack([path[t] for t in ends]), atol=2e-4)


def test_cycles_end_at_the_mode_of_a_convex_problem() -> None:
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact())
    fit = al.fit(0, cases.linear_model(), (X, Y), Snapshot(num_steps=2000, num_cycles=4, learning_rate=0.05))
    weights = np.asarray(fit.posterior.params["network"]["weight"])
    assert weights.shape[0] == 4
    np.testing.assert_allclose(weights, np.repeat(exact.posterior.mean[None], 4, axis=0), atol=2e-3)


def test_members_of_one_run_differ_and_ensembles_of_them_join() -> None:
    method = Snapshot(num_steps=600, num_cycles=3, learning_rate=0.1, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(0, cases.network_model(), (X, Y), al.Ensemble(method, 2))
    assert isinstance(fit.posterior, al.posterior.Draws) and fit.posterior.params["network"]["layer0"]["weight"].shape[0] == 6
    assert (fit.predict(0, X).epistemic > 0).all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_cycles": 10, "num_steps": 5}, "no steps"),
        ({"discard": 5}, "Nothing would be kept"),
        ({"optimizer": "lbfgs"}, "cannot be set"),
        ({"optimizer": optax.adam(1e-2)}, "cannot be set"),
        ({"optimizer": "addam"}, "Unknown optimiser"),
        ({"num_cycles": 0}, "num_cycles"),
    ],
)
def test_bad_cycles_are_refused(settings: dict, match: str) -> None:
    with pytest.raises(al.MethodError, match=match):
        Snapshot(**settings)
