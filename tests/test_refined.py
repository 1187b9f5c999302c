"""The variationally inferred sampler: bounds that are bounds, gaps that close, and funnels and modes that the start alone misses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")

SETTINGS = {"num_steps": 800, "num_start": 600, "num_draws": 8, "learning_rate": 0.02, "num_samples": 4000, "initial_scale": 0.5}


def linear_gaussian() -> tuple[Any, float, np.ndarray, np.ndarray]:
    """log p(D, w) of a regression whose inputs are correlated, its evidence, mean and covariance."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)) @ np.array([[1.0, 0.9, 0.8], [0.0, 0.4, 0.2], [0.0, 0.0, 0.3]])
    y = x @ np.array([1.0, -0.5, 0.5]) + 0.7 * rng.normal(size=20)
    precision = np.eye(3) + x.T @ x / 0.49
    covariance = np.linalg.inv(precision)
    mean = covariance @ x.T @ y / 0.49
    marginal = x @ x.T + 0.49 * np.eye(20)
    evidence = -0.5 * (y @ np.linalg.solve(marginal, y) + np.linalg.slogdet(marginal)[1] + 20 * np.log(2 * np.pi))

    def density(w: Any) -> Any:
        residual = jnp.asarray(y, w.dtype) - jnp.asarray(x, w.dtype) @ w
        return -0.5 * jnp.sum(residual**2) / 0.49 - 10 * np.log(2 * np.pi * 0.49) - 0.5 * jnp.sum(w**2) - 1.5 * np.log(2 * np.pi)

    return al.target_from_log_density(density, jnp.zeros(3)), float(evidence), mean, covariance


def test_every_bound_is_below_the_evidence_and_the_gap_closes() -> None:
    """Mean field is short by ½ log(Π Λᵢᵢ/|Λ|) = 2.37 nats, exactly. Refinement is never above the evidence; Langevin steps close the gap as T
    grows, in training or at the end only; gradient steps on a Gaussian close it nearly all by themselves."""
    target, evidence, mean, covariance = linear_gaussian()
    precision = np.linalg.inv(covariance)
    gap = 0.5 * (np.sum(np.log(np.diag(precision))) - np.linalg.slogdet(precision)[1])
    short, fits = {}, {}
    for kind, steps, final in (
        ("langevin", 1, None),
        ("langevin", 5, None),
        ("langevin", 5, 50),
        ("langevin", 25, None),
        ("particle", 3, None),
    ):
        fit = al.fit(0, target, None, al.Refined(kind, steps, num_final=final, **SETTINGS), progress=False)
        score = fit.log_evidence
        assert score.kind == "lower bound" and score.value < evidence + 5 * score.stderr
        short[kind, steps, final], fits[kind, steps, final] = evidence - score.value, fit
    one, five, stretched, many = (short["langevin", *at] for at in ((1, None), (5, None), (5, 50), (25, None)))
    assert gap > one + 0.2 and one > five + 0.2 and five > many + 0.2 and five > stretched + 0.2
    assert many < 0.2 * gap and short["particle", 3, None] < 0.05
    fit = fits["langevin", 25, None]
    draws, sd = np.asarray(fit.posterior.params), np.sqrt(np.diag(covariance))
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 0.15 * sd) and np.all(draws.std(axis=0) > 0.7 * sd)
    # E[w] = p(D): the weights of the draws are unbiased for the evidence itself.
    assert abs(fit.manifest["health"]["weighted_log_evidence"] - evidence) < 0.1


def test_the_cheap_form_is_never_reported_as_evidence() -> None:
    """Its score goes above the exact evidence: contraction is not paid for. That is why it is none."""
    target, evidence, _, _ = linear_gaussian()
    fit = al.fit(0, target, None, al.Refined("approximate", 5, **SETTINGS | {"step_size": 0.3}), progress=False)
    assert fit.log_evidence is None and any("no bound" in departure for departure in fit.manifest["departures"])
    assert fit.manifest["health"]["log_weight"] > evidence + 0.5


def test_a_refinement_that_folds_reports_nothing() -> None:
    target, _, _, _ = linear_gaussian()
    method = al.Refined("particle", 2, num_steps=1, step_size=50.0, initial_scale=1.0, num_samples=50)
    with pytest.warns(al.HealthWarning, match="folds"):
        fit = al.fit(0, target, None, method, progress=False)
    assert fit.log_evidence is None


def funnel(p: Any) -> Any:
    """v ~ N(0, 3²), x | v ~ N(0, e^v): log Z = 0."""
    v, x = p[0], p[1:]
    return -0.5 * (v / 3) ** 2 - np.log(3) - 0.5 * jnp.sum(x**2) * jnp.exp(-v) - 0.5 * x.size * v - 0.5 * p.size * np.log(2 * np.pi)


def two_modes(p: Any) -> Any:
    """½N(−1.5, 0.6²) + ½N(1.5, 0.6²) in each of two coordinates: log Z = 0."""
    one = lambda centre: -0.5 * ((p - centre) / 0.6) ** 2 - np.log(0.6) - 0.5 * np.log(2 * np.pi)
    return jnp.sum(jnp.logaddexp(one(-1.5), one(1.5)) - np.log(2.0))


@pytest.mark.long
@pytest.mark.parametrize(("density", "size", "margin"), [(funnel, 3, 0.2), (two_modes, 2, 0.3)])
def test_refined_beats_unrefined(density: Any, size: int, margin: float) -> None:
    target = al.target_from_log_density(density, jnp.full(size, 0.1))
    score = {}
    for steps in (0, 10):
        score[steps] = al.fit(0, target, None, al.Refined(num_refine=steps, **SETTINGS), progress=False).log_evidence
        assert score[steps].value < 5 * score[steps].stderr
    assert score[10].value > score[0].value + margin


def test_wrong_settings_are_refused() -> None:
    for settings in ({"kind": "flow"}, {"num_refine": -1}, {"num_refine": 0, "num_final": 3}, {"optimizer": "lbfgs"}, {"step_size": 0.0}):
        with pytest.raises(al.MethodError, match="Do this"):
            al.Refined(**settings)
    wide = al.target_from_log_density(lambda p: -0.5 * jnp.sum(p**2), jnp.zeros(300))
    with pytest.raises(al.MethodError, match="determinant"):
        al.fit(0, wide, None, al.Refined("particle"))
