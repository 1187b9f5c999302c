"""Hamiltonian samplers against densities whose moments are known, and their parts against what they must do."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import convergence
from aleator.methods import _hamiltonian as hamiltonian
from aleator.methods import microcanonical
from aleator.methods._chains import Density

SAMPLERS = {
    "hmc": al.HMC(num_samples=2000, num_warmup=500, num_chains=2),
    "hmc, fixed length": al.HMC(num_samples=2000, num_warmup=500, num_chains=2, num_leapfrog=7),
    "nuts": al.NUTS(num_samples=2000, num_warmup=500, num_chains=2),
    "nuts, dense": al.NUTS(num_samples=2000, num_warmup=500, num_chains=2, metric="dense"),
    "nuts, low rank": al.NUTS(num_samples=2000, num_warmup=500, num_chains=2, metric="low_rank"),
    "microcanonical": al.Microcanonical(num_samples=2000, num_warmup=500, num_chains=2),
    "chees": al.ChEES(num_samples=150, num_warmup=300, num_chains=32),
}


def banana(q: jax.Array) -> jax.Array:
    """x ~ N(0, 1), y | x ~ N(x²/2, 1), z ~ N(0, 100²): E y = ½, E y² = ¾ + 1."""
    return -0.5 * q[0] ** 2 - 0.5 * (q[1] - 0.5 * q[0] ** 2) ** 2 - 0.5 * (q[2] / 100.0) ** 2


def draws(method: al.Method, density: object, size: int, key: int = 0) -> np.ndarray:
    target = al.target_from_log_density(density, np.zeros(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(key, target, None, method, progress=False)
    return np.asarray(fit.posterior.params, np.float64).reshape(method.num_chains, -1, size)


@pytest.mark.parametrize("name", SAMPLERS)
def test_moments_of_a_banana(name: str) -> None:
    """First and second moments within five Monte Carlo standard errors."""
    found = draws(SAMPLERS[name], banana, 3)
    statistics = np.concatenate([found, found**2, found[..., :1] ** 2 * found[..., 1:2]], axis=-1)
    truth = np.array([0.0, 0.5, 0.0, 1.0, 1.75, 100.0**2, 1.5])  # E[x²y] = E[x⁴]/2
    z = (statistics.mean(axis=(0, 1)) - truth) / convergence.mcse(statistics)
    assert np.all(np.abs(z) < 5.0), z
    assert np.all(convergence.ess(found) > 200)


def test_the_non_centred_funnel() -> None:
    """v ~ N(0, 3²), xᵢ = e^{v/2}zᵢ: P(v < −5) = Φ(−5/3) = 0.047790."""
    found = draws(
        al.NUTS(num_samples=2000, num_warmup=300, num_chains=2), lambda q: -0.5 * (q[0] / 3.0) ** 2 - 0.5 * jnp.sum(q[1:] ** 2), 10
    )
    below = (found[..., :1] < -5.0).astype(float)
    assert abs(below.mean() - 0.047790) < 5.0 * convergence.mcse(below)[0]


def test_a_linear_model_against_its_exact_posterior() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.3 * rng.normal(size=40)).astype(np.float32)
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.3), al.Normal(1.0))
    exact = al.fit(0, model, (x, y), al.Exact()).posterior
    fit = al.fit(1, model, (x, y), al.HMC(num_samples=1000, num_warmup=300, num_chains=2), progress=False)
    found = np.asarray(fit.posterior.params["network"]["weight"], np.float64).reshape(2, -1, 4)
    design = np.asarray(model.features(x), np.float64)
    sd = np.sqrt(np.diagonal(np.linalg.inv(design.T @ design / 0.09 + np.eye(4))))
    assert np.all(np.abs(found.mean(axis=(0, 1)) - exact.mean[0]) < 5.0 * convergence.mcse(found))
    np.testing.assert_allclose(
        found.std(axis=(0, 1)), sd, rtol=5.0 * np.max(convergence.mcse((found - found.mean(axis=(0, 1))) ** 2) / (2 * sd**2))
    )


def test_temperature_widens_and_is_a_departure() -> None:
    target = al.target_from_log_density(lambda q: -0.5 * jnp.sum(q**2), np.zeros(2))
    fit = al.fit(0, target, None, al.HMC(num_samples=1000, num_warmup=300, num_chains=2), temperature=4.0, progress=False)
    spread = np.asarray(fit.posterior.params).std(axis=0)
    np.testing.assert_allclose(spread, 2.0, rtol=0.15)
    assert fit.manifest["departures"] == ["temperature 4.0"]


# ---- parts ------------------------------------------------------------------------------------------------------------------------------


def gaussian() -> Density:
    value = lambda q: -0.5 * jnp.sum(q**2 / jnp.array([1.0, 4.0, 0.25]))
    return Density(value, jax.value_and_grad(value), lambda q: (value(q), 0.0), lambda q: jnp.zeros(0))


@pytest.mark.parametrize("kind", ["diagonal", "dense", "low_rank"])
def test_momenta_fit_their_metric(kind: str) -> None:
    """Cov(p) = M: velocities M⁻¹p have covariance M⁻¹."""
    rng = np.random.default_rng(0)
    metric = hamiltonian.new_metric(kind, jnp.zeros(3), 2)._replace(scale=jnp.array([0.5, 2.0, 1.0]))
    if kind == "dense":
        metric = metric._replace(factor=jnp.asarray(np.tril(rng.normal(size=(3, 3))) + 2 * np.eye(3), jnp.float32))
    if kind == "low_rank":
        vectors = np.linalg.qr(rng.normal(size=(3, 2)))[0]
        metric = metric._replace(vectors=jnp.asarray(vectors, jnp.float32), values=jnp.array([4.0, 0.25]))
    inverse = np.asarray(jax.vmap(lambda e: hamiltonian.velocity(metric, e))(jnp.eye(3)))
    momenta = jax.vmap(lambda k: hamiltonian.draw_momentum(k, metric))(jax.random.split(jax.random.key(0), 40_000))
    speeds = np.asarray(jax.vmap(lambda p: hamiltonian.velocity(metric, p))(momenta))
    np.testing.assert_allclose(np.cov(speeds.T), inverse, atol=6.0 * np.max(np.abs(inverse)) * np.sqrt(2 / 40_000))


def test_leapfrog_returns_and_keeps_its_energy() -> None:
    density, metric = gaussian(), hamiltonian.Metric(jnp.array([1.0, 2.0, 0.5]))
    q = jnp.array([0.3, -1.0, 0.2])
    start = hamiltonian.Phase(q, jnp.array([1.0, 0.2, -0.5]), *density.value_and_grad(q))
    energy = lambda at: float(hamiltonian.kinetic(metric, at.momentum) - at.log_density)
    errors = []
    for step in (0.1, 0.05):
        at = start
        for _ in range(int(2.0 / step)):
            at = hamiltonian.leapfrog(density, metric, jnp.asarray(step), at)
        errors.append(abs(energy(at) - energy(start)))
        back = at._replace(momentum=-at.momentum)
        for _ in range(int(2.0 / step)):
            back = hamiltonian.leapfrog(density, metric, jnp.asarray(step), back)
        np.testing.assert_allclose(back.position, start.position, atol=1e-5)
    assert 2.0 < errors[0] / errors[1] < 8.0  # second order


def test_turning_keeps_speed_and_pays_in_energy() -> None:
    """u stays on the unit sphere, −g turns it back, and the energy error of a step is of third order."""
    u = jnp.array([1.0, 2.0, -2.0]) / 3.0
    g = jnp.array([0.5, 5.0, -3.0])
    forth, kinetic = microcanonical.turn(u, g, jnp.asarray(0.3))
    back, paid = microcanonical.turn(-forth, g, jnp.asarray(0.3))
    np.testing.assert_allclose(jnp.linalg.norm(forth), 1.0, rtol=1e-6)
    np.testing.assert_allclose(-back, u, atol=1e-5)
    np.testing.assert_allclose(kinetic, -paid, rtol=1e-4)


def test_windows_cover_warm_up_as_they_should() -> None:
    plan = hamiltonian.schedule(1000)
    assert np.flatnonzero(plan.update).tolist() == [99, 149, 249, 449, 949]
    assert plan.collect[75] and not plan.collect[74] and not plan.collect[950]
    short = hamiltonian.schedule(30)
    assert short.update.sum() == 1 and not hamiltonian.schedule(10).update.any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": "banana"}, "Unknown metric"),
        ({"target_acceptance": 1.5}, "probability"),
        ({"num_warmup": 0}, "step size cannot be found"),
        ({"num_samples": 0}, "num_samples"),
        ({"storage": "int8"}, "Unknown storage"),
        ({"thin": 1.5}, "thin"),
    ],
)
def test_bad_settings_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(al.MethodError, match=said):
        al.NUTS(**settings)


def test_one_parameter_is_too_few_for_directions() -> None:
    with pytest.raises(al.MethodError, match=r"1 parameter.*al\.HMC"):
        draws(al.Microcanonical(num_samples=10, num_warmup=10), lambda q: -0.5 * jnp.sum(q**2), 1)


def test_draws_are_thinned_stored_small_and_kept_by_chain(tmp_path) -> None:
    target = al.target_from_log_density(lambda q: -0.5 * jnp.sum(q**2), np.zeros(2))
    method = al.HMC(num_samples=50, num_warmup=50, num_chains=3, thin=2, storage="float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(0, target, None, method, progress=False, checkpoint=tmp_path / "run", checkpoint_every=0.0)
        plain = al.fit(0, target, None, method, progress=False)
    assert fit.posterior.params.dtype == np.float16 and fit.posterior.params.shape == (150, 2) and fit.posterior.num_chains == 3
    np.testing.assert_array_equal(fit.posterior.params, plain.posterior.params)
    assert list((tmp_path / "run").glob("kept-*.safetensors"))
    fit.save(tmp_path / "fit")
    assert al.load(tmp_path / "fit", template=np.zeros(2)).posterior.num_chains == 3
    data = fit.to_arviz(0)
    assert dict(data["posterior"].sizes)["chain"] == 3


def test_many_draws_are_joined_on_disk(tmp_path, monkeypatch) -> None:
    from aleator import _kept

    monkeypatch.setattr(_kept, "MEMORY_BYTES", 100)
    target = al.target_from_log_density(lambda q: -0.5 * jnp.sum(q**2), np.zeros(2))
    method = al.HMC(num_samples=60, num_warmup=20, num_chains=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        disk = al.fit(0, target, None, method, progress=False, checkpoint=tmp_path, checkpoint_every=0.0)
        plain = al.fit(0, target, None, method, progress=False)
    np.testing.assert_array_equal(disk.posterior.params, plain.posterior.params)
    assert list(tmp_path.glob("draws-*.bin"))


def test_two_chains_are_two_runs() -> None:
    """Each chain alone is what it is beside another: same key, same bits."""
    target = al.target_from_log_density(lambda q: -0.5 * jnp.sum(q**2), np.zeros(2))
    method = al.HMC(num_samples=30, num_warmup=30, num_chains=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        side = al.fit(0, target, None, method, progress=False)
        one = al.fit(0, target, None, method, progress=False, parallel="sequential")
    np.testing.assert_array_equal(side.posterior.params, one.posterior.params)
