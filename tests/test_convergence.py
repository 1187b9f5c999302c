"""R-hat, effective sample sizes and verdicts: against ArviZ, against processes with known autocorrelation, and on chains that are ill."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import convergence
from aleator.methods._chains import Stats
from aleator.methods._hamiltonian import Watch


def autoregressive(phi: float, chains: int = 4, n: int = 4000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(chains, n, 3)) * np.sqrt(1 - phi**2)
    draws = np.empty_like(noise)
    draws[:, 0] = rng.normal(size=(chains, 3))
    for t in range(1, n):
        draws[:, t] = phi * draws[:, t - 1] + noise[:, t]
    return draws


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9, -0.4])
def test_effective_draws_of_an_autoregression(phi: float) -> None:
    """n(1 − φ)/(1 + φ) for the mean; its estimate is good to some 5 % at these lengths."""
    draws = autoregressive(phi)
    np.testing.assert_allclose(convergence.ess(draws), 16_000 * (1 - phi) / (1 + phi), rtol=0.15)


def test_many_chains_of_few_draws() -> None:
    """Too short to be split, so judged whole, without a warning of NumPy's: independent draws agree, chains apart do not."""
    draws = np.random.default_rng(0).normal(size=(64, 3, 5))
    assert np.all(convergence.rhat(draws) < 1.2)
    assert np.all(convergence.rhat(draws + 3.0 * np.arange(64)[:, None, None]) > 2.0)
    assert np.all(np.isnan(convergence.rhat(draws[:, :1]))) and np.all(np.isnan(convergence.rhat(draws[:1, :3])))


@pytest.mark.parametrize("name", ["rhat", "ess_bulk", "ess_tail", "mcse"])
def test_agrees_with_arviz(name: str) -> None:
    import arviz

    draws = autoregressive(0.7, n=500) + 0.05 * np.arange(4)[:, None, None]
    mine = getattr(convergence, name)(draws)
    for i in range(3):
        one = draws[..., i]
        theirs = {
            "rhat": lambda a: arviz.rhat(a, method="rank"),
            "ess_bulk": lambda a: arviz.ess(a, method="bulk"),
            "ess_tail": lambda a: arviz.ess(a, method="tail"),
            "mcse": lambda a: arviz.mcse(a, method="mean"),
        }[name](one)
        np.testing.assert_allclose(mine[i], float(np.asarray(theirs)), rtol=0.02 if name == "ess_tail" else 1e-6)


def test_rhat_sees_chains_apart_and_chains_of_different_width() -> None:
    draws = np.random.default_rng(0).normal(size=(4, 1000, 2))
    assert np.all(convergence.rhat(draws) < 1.01)
    apart = draws + np.array([0, 0, 0, 2.0])[:, None, None]
    wide = draws * np.array([1, 1, 1, 4.0])[:, None, None]
    assert np.all(convergence.rhat(apart) > 1.1) and np.all(convergence.rhat(wide) > 1.1)


def test_energy_of_independent_and_of_slow_chains() -> None:
    rng = np.random.default_rng(0)
    np.testing.assert_allclose(convergence.ebfmi(rng.normal(size=(2, 5000))), 2.0, rtol=0.1)
    assert np.all(convergence.ebfmi(np.cumsum(rng.normal(size=(2, 5000)), axis=1)) < 0.3)


# ---- densities that are ill: named, never silent --------------------------------------------------------------------------------------


def run(density: object, start: object, method: object = None) -> al.Fit:
    target = al.target_from_log_density(density, start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        return al.fit(0, target, None, method or al.NUTS(num_samples=200, num_warmup=200, num_chains=2), progress=False)


def test_minus_infinity_at_the_start_is_an_error() -> None:
    with pytest.raises(al.NonFiniteError, match="not finite at the start"):
        run(lambda q: jnp.where(q[0] > 3.0, -(q[0] ** 2), -jnp.inf), np.zeros(1))


def test_nan_in_a_corner_is_named_with_its_place() -> None:
    fit = run(lambda q: -0.5 * jnp.sum(q**2) + 0.0 * jnp.log(q[0] + 1.0), np.zeros(2))
    assert "NaN" in fit.status and "guard" in fit.status and "[0]" in fit.status


def test_an_improper_density_is_named() -> None:
    fit = run(lambda q: -0.5 * q[0] ** 2 + 0.0 * q[1], np.zeros(2))
    assert "improper" in fit.status and "[1]" in fit.status


def test_a_density_that_rises_for_ever_is_named() -> None:
    fit = run(lambda q: 0.1 * q[0] ** 2 - 0.5 * q[1] ** 2, np.zeros(2), al.RandomWalk(num_samples=300, num_warmup=300, num_chains=2))
    assert "run off" in fit.status and "improper" in fit.status


def test_a_short_run_of_a_network_is_not_called_improper() -> None:
    """Its weights have a proper prior and have merely not been everywhere yet: what disagrees is the functions."""
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    model = al.BNN(al.networks.MLP(2, (20,), 1, activation="tanh"), al.Gaussian(0.05), al.Normal(1.0, scaling="fan_in"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(
            0,
            model,
            (x, np.sin(2 * x[:, 0])),
            al.HMC(num_samples=60, num_warmup=60, num_chains=2, num_leapfrog=5, target_acceptance=0.95),
            progress=False,
        )
    assert "do not agree in functions" in fit.status and "improper" not in fit.status


def test_a_constrained_support_is_named() -> None:
    fit = run(lambda q: jnp.where(q[0] > 0, -q[0], -jnp.inf), np.ones(1))
    assert "outside the support" in fit.status and "unconstrained" in fit.status


def test_a_density_that_jumps_is_named() -> None:
    fit = run(
        lambda q: -0.05 * q[0] ** 2 - 0.5 * q[1] ** 2 - jnp.floor(2.0 * jnp.abs(q[0])),
        np.zeros(2),
        al.HMC(num_samples=5000, num_warmup=300, num_chains=2),
    )
    assert "gradient does not belong" in fit.status and "[0]" in fit.status


def centred_funnel(q: jax.Array) -> jax.Array:
    return -0.5 * (q[0] / 3.0) ** 2 - 0.5 * jnp.sum(q[1:] ** 2) * jnp.exp(-q[0]) - 0.5 * 9 * q[0]


def test_the_centred_funnel_is_named_at_every_seed() -> None:
    """Divergences alone miss it at one seed in eight, where no chain comes near the neck; the energy does not."""
    target = al.target_from_log_density(centred_funnel, np.zeros(10))
    for seed in range(10):
        with pytest.warns(al.HealthWarning, match="transitions diverged") as caught:
            al.fit(seed, target, None, al.NUTS(num_samples=400, num_warmup=300, num_chains=2), progress=False)
        assert "non-centred" in str(caught[0].message)


def test_the_energy_names_the_scale_of_a_funnel() -> None:
    """Energy that follows coordinate 1 and hardly changes from draw to draw, with all chains on their own level."""
    rng = np.random.default_rng(0)
    slow = np.cumsum(rng.normal(size=(4, 2_000)), axis=1)
    slow = slow - slow.mean(axis=1, keepdims=True)
    positions = np.stack([rng.normal(size=slow.shape), slow, rng.normal(size=slow.shape)], axis=-1)
    health = {"ebfmi": float(convergence.ebfmi(slow).min()), "divergences": 0, "draws": slow.size}
    said = convergence._funnel(health, positions, SimpleNamespace(energy=2.0 * slow), ["a", "b", "c"])
    assert "goes with b (correlation 1.00)" in said and "0 of 8000 transitions diverged" in said


@pytest.mark.parametrize("network", [True, False])
def test_gradients_are_judged_by_chains_that_have_arrived(network: bool) -> None:
    """A virial of 0 where −1 is right: a broken gradient, or weights of a network whose functions still differ between chains."""
    rng = np.random.default_rng(0)
    shape, zero = (2, 500), np.zeros((2, 500))
    positions, functions = rng.normal(size=(*shape, 3)), rng.normal(size=(*shape, 1)) + np.array([0.0, 9.0])[:, None, None]
    stats = Stats(rng.normal(size=shape), zero + 0.8, rng.normal(size=shape), zero + 10, zero, zero, zero, zero)
    seen = Watch(np.full(2, 5000.0), *(np.zeros((2, 3)) for _ in range(4)), np.zeros(2))
    state = SimpleNamespace(kernel=SimpleNamespace(watch=seen))
    kept = {"position": positions, "functions": functions, "stats": stats}
    said, healthy, _ = convergence.verdict(SimpleNamespace(kept=kept, state=state), al.HMC(), ["a", "b", "c"], network)
    assert not healthy and ("do not agree in functions" if network else "gradient does not belong") in said


def test_a_frozen_chain_is_named() -> None:
    fit = run(
        lambda q: -1e8 * jnp.sum(jnp.floor(jnp.abs(q) * 1e6)),
        np.zeros(2),
        al.NUTS(num_samples=50, num_warmup=0, num_chains=2, step_size=1.0),
    )
    assert "never moved" in fit.status


def test_chains_that_disagree_are_named() -> None:
    bimodal = lambda q: jnp.logaddexp(-0.5 * (q[0] - 20.0) ** 2, -0.5 * (q[0] + 20.0) ** 2)
    target = al.target_from_log_density(bimodal, np.zeros(1))
    starts = al.posterior.Draws(np.array([[-20.0], [20.0]]))
    with pytest.warns(al.HealthWarning, match="do not agree"):
        al.fit(3, target, None, al.NUTS(num_samples=200, num_warmup=200, num_chains=8), init=starts, progress=False)
