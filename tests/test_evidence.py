"""The log evidence by every road, against quadrature, enumeration and closed forms; and standard errors that mean what they say."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import evidence as ev
from aleator.evidence import _path, annealing, bridging, thermodynamics
from aleator.evidence._problem import problem
from aleator.methods import nested

from .conformance import cases
from .test_smc import MIXTURE, MIXTURE_EVIDENCE, POINTS

TANH = np.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0])[:, None], np.array([-1.2, -0.9, -0.6, 0.5, 1.0, 1.1])
TANH_EVIDENCE = 0.003250
LINE = np.linspace(-1.0, 1.0, 8), 0.3 + np.linspace(-1.0, 1.0, 8) + 0.4 * np.random.default_rng(1).normal(size=8)
CLASSES = np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), np.array([0, 0, 1, 0, 1, 1])
CLASSES_EVIDENCE = -3.996067


def tanh_net() -> al.BNN:
    """y = w₂·tanh(w₁·x) + ε: two modes, mirror images of each other."""
    return al.BNN((_tanh, {"w1": np.zeros(()), "w2": np.zeros(())}), al.Gaussian(0.2), al.Normal(1.0))


def _tanh(p: dict, x: jax.Array) -> jax.Array:
    return p["w2"] * jnp.tanh(p["w1"] * x)


NET = tanh_net()
LINEAR = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.4), al.Normal(1.0))
LOGISTIC = al.LinearModel(al.features.Polynomial(1), al.Bernoulli(), al.Normal(2.0))


@pytest.fixture(scope="module")
def line() -> al.Fit:
    return al.fit(0, LINEAR, LINE, al.Exact())


@pytest.fixture(scope="module")
def replicas() -> al.Fit:
    """Draws from both modes of the net."""
    method = al.ParallelTempering(num_samples=1000, num_warmup=1000, num_levels=6, num_moves=5)
    return al.fit(0, NET, TANH, method, progress=False)


@pytest.fixture(scope="module")
def walks(line: al.Fit) -> al.Fit:
    """Four chains on the line that are exact and remember: correlation 0.8 from draw to draw."""
    scale = np.linalg.cholesky(line.posterior.operator.covariance()[0])
    weight = line.posterior.mean[0] + remembering(np.random.default_rng(0), 0.8, (4, 2000, 2)) @ scale.T
    params = {"network": {"weight": weight.reshape(-1, 1, 2)}, "likelihood": {}, "prior": {}}
    return dataclasses.replace(line, method=al.RandomWalk(), posterior=al.posterior.Draws(params, num_chains=4))


def remembering(rng: np.random.Generator, correlation: float, shape: tuple[int, ...]) -> np.ndarray:
    """Stationary chains (chains, n, …) of standard normals."""
    from scipy.signal import lfilter

    noise = rng.normal(size=shape) * np.sqrt(1.0 - correlation**2)
    noise[:, 0] /= np.sqrt(1.0 - correlation**2)
    return lfilter([1.0], [1.0, -correlation], noise, axis=1)


def posterior_grid() -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """(w₁, w₂) on a grid, flat, and p(w₁, w₂, D) times the cell."""
    grid = np.linspace(-6.0, 6.0, 1201)
    w1, w2 = np.meshgrid(grid, grid, indexing="ij")
    log_joint = -0.5 * (w1**2 + w2**2) - np.log(2 * np.pi)
    for x, y in zip(TANH[0][:, 0], TANH[1], strict=True):
        log_joint = log_joint - 0.5 * ((y - w2 * np.tanh(w1 * x)) / 0.2) ** 2 - np.log(0.2 * np.sqrt(2 * np.pi))
    mass = np.exp(log_joint.ravel()) * (grid[1] - grid[0]) ** 2
    return (w1.ravel(), w2.ravel()), mass


def test_the_number_all_roads_must_meet() -> None:
    np.testing.assert_allclose(np.log(posterior_grid()[1].sum()), TANH_EVIDENCE, atol=1e-6)


ROADS = {
    "annealed importance sampling": (lambda: ev.ais(1, NET, TANH, bound=False), 0.02),
    "sequential Monte Carlo": (lambda: ev.smc(1, NET, TANH), 0.05),
    "nested sampling": (lambda: ev.nested(1, NET, TANH), 0.08),
    "thermodynamic integration": (lambda: ev.thermodynamic(1, NET, TANH), 0.02),
}


@pytest.mark.parametrize("road", ROADS)
def test_every_road_leads_to_the_evidence_of_a_small_net(road: str) -> None:
    run, small = ROADS[road]
    score = run()
    assert score.kind == "estimate" and 0.0 < score.stderr < small
    assert abs(score.value - TANH_EVIDENCE) < 3.0 * score.stderr


def test_bridge_sampling_of_a_small_net(replicas: al.Fit) -> None:
    score = ev.bridge(1, replicas, TANH)
    assert score.kind == "estimate" and score.stderr < 0.08
    assert abs(score.value - TANH_EVIDENCE) < 3.0 * score.stderr


def mixture_draws(rng: np.random.Generator, number: int) -> tuple[float, dict]:
    """Exact draws by enumeration of the 2⁸ allocations, and log p(D)."""
    from scipy.special import betaln

    second = (np.arange(2 ** len(POINTS))[:, None] >> np.arange(len(POINTS))) & 1

    def component(of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count, total, square = of.sum(axis=1), of @ POINTS, of @ POINTS**2
        variance = 1.0 / (count + 1.0 / 9.0)
        log_marginal = -0.5 * count * np.log(2 * np.pi) + 0.5 * np.log(variance / 9.0) - 0.5 * (square - variance * total**2)
        return log_marginal, variance * total, np.sqrt(variance)

    n1, n2 = len(POINTS) - second.sum(axis=1), second.sum(axis=1)
    (m0, loc0, scale0), (m1, loc1, scale1) = component(1 - second), component(second)
    joint = betaln(1 + n2, 1 + n1) + m0 + m1
    total = float(np.logaddexp.reduce(joint))
    i = rng.choice(len(joint), number, p=np.exp(joint - total))
    mean = np.stack([rng.normal(loc0[i], scale0[i]), rng.normal(loc1[i], scale1[i])], axis=1)
    weight = rng.beta(1 + n2[i], 1 + n1[i])
    return total, {"mean": mean, "logit": np.log(weight) - np.log1p(-weight)}


def logistic_draws(rng: np.random.Generator, number: int) -> tuple[float, dict]:
    """Exact draws by a grid of cells of 0.02, uniform within each (off by h²/24 of the density's curvature), and log p(D)."""
    h = 0.02
    grid = np.arange(-14.0, 14.0, h) + h / 2
    a, b = np.meshgrid(grid, grid, indexing="ij")
    joint = -(a**2 + b**2) / 8.0 - np.log(8.0 * np.pi)
    for x, t in zip(*CLASSES, strict=True):
        joint = joint - np.logaddexp(0.0, -(2 * t - 1) * (a + b * x))
    total = float(np.logaddexp.reduce(joint.ravel()) + 2 * np.log(h))
    p = np.exp(joint.ravel() - total)
    i = rng.choice(p.size, number, p=p / p.sum())
    weight = np.stack([a.ravel()[i], b.ravel()[i]], axis=1) + h * (rng.uniform(size=(number, 2)) - 0.5)
    return total, {"network": {"weight": weight[:, None]}, "likelihood": {}, "prior": {}}


def check_sandwich(found: ev.Sandwich, exact: float) -> None:
    assert found.lower.kind == "lower bound" and found.upper.kind == "upper bound"
    assert found.lower.value < exact < found.upper.value
    assert 0.0 < found.width < 0.2
    # The gaps are no accident of the noise: each is seen at two standard errors at least.
    assert exact - found.lower.value > 2.0 * found.lower.stderr and found.upper.value - exact > 2.0 * found.upper.stderr


def test_a_sandwich_around_the_evidence_of_a_line(line: al.Fit) -> None:
    check_sandwich(ev.sandwich(0, LINEAR, LINE, line, num_steps=100, num_particles=500), line.log_evidence.value)


def test_a_sandwich_around_the_evidence_of_a_mixture() -> None:
    exact, draws = mixture_draws(np.random.default_rng(0), 500)
    np.testing.assert_allclose(exact, MIXTURE_EVIDENCE, atol=1e-6)
    check_sandwich(ev.sandwich(0, MIXTURE, None, draws, num_steps=250, num_particles=500, exact=True), exact)


def test_a_sandwich_around_the_evidence_of_a_logistic_model() -> None:
    exact, draws = logistic_draws(np.random.default_rng(0), 500)
    np.testing.assert_allclose(exact, CLASSES_EVIDENCE, atol=1e-6)
    check_sandwich(ev.sandwich(0, LOGISTIC, CLASSES, draws, num_steps=50, num_particles=500, exact=True), exact)


# ---- what the errors mean -----------------------------------------------------------------------------------------------------------


def check_honest(z: np.ndarray) -> None:
    """Σz² of so many standardised errors is χ²: within its 1e-5 quantiles; and their mean is zero within 5 standard errors."""
    from scipy.stats import chi2

    low, high = chi2.ppf([1e-5, 1 - 1e-5], len(z))
    assert low < np.sum(z**2) < high
    assert abs(z.mean()) < 5.0 / np.sqrt(len(z))


def test_annealed_weights_are_unbiased_and_their_error_honest(line: al.Fit) -> None:
    """Each group of 250 particles is a run of its own, there and back."""
    exact = line.log_evidence.value
    given = problem(LINEAR, LINE, True, "")
    path = _path.pilot(jax.random.key(0), given, 8)
    for backward in (False, True):
        groups = []
        for seed in range(6):
            draws = np.asarray(line.sample(seed, 500)["network"]["weight"])[:, 0] if backward else None
            log_weights = annealing.anneal(jax.random.key(100 + seed), given, path, 100, 8, draws, 500)
            assert log_weights.dtype == np.float64
            groups += [annealing._score(group, "estimate", False, backward) for group in log_weights.reshape(2, 250)]
        check_honest(np.array([(score.value - exact) / score.stderr for score in groups]))


def test_the_ladder_there_and_back() -> None:
    path = _path.Path(np.array([0.0, 0.1, 0.4, 1.0]), None, None)
    up = _path.ladder(path, 6)
    np.testing.assert_allclose(up.beta, [0.05, 0.1, 0.25, 0.4, 0.7, 1.0])
    np.testing.assert_array_equal(up.stage, [0, 0, 1, 1, 2, 2])
    down = _path.backwards(up)
    np.testing.assert_allclose(down.delta, up.delta[::-1])
    # Each way, a weight of β₊ − β is followed by a move at the end the particle has come to.
    np.testing.assert_allclose(down.beta, [0.7, 0.4, 0.25, 0.1, 0.05, 0.0])
    np.testing.assert_array_equal(down.stage, [2, 1, 1, 0, 0, 0])


def test_cubics_integrate_a_gaussian_path() -> None:
    """ℓ = −½aθ², θ ~ N(0, 1/(1 + aβ)): log Z = −½log(1 + a); the error falls with the fourth power of the levels."""
    a, errors = 20.0, []
    for number in (20, 40):
        betas = np.linspace(0.0, 1.0, number + 1)
        mean, slope = -0.5 * a / (1 + a * betas), 0.5 * a**2 / (1 + a * betas) ** 2
        errors.append(abs(thermodynamics.cubic(betas, mean, slope) + 0.5 * np.log1p(a)))
    assert errors[1] < 2e-3 and 8.0 < errors[0] / errors[1] < 32.0


def test_the_error_of_a_bridge_counts_autocorrelation() -> None:
    """p = 3·N(0, 1) from chains with correlation 0.95, g = N(1, 0.4²), too narrow, so that the chains' part of the error rules: log 3."""
    rng, z = np.random.default_rng(0), []
    ratio = lambda q: np.log(3.0) - 0.5 * q**2 + 0.5 * ((q - 1.0) / 0.4) ** 2 + np.log(0.4)
    for _ in range(60):
        found = bridging.iterate(ratio(remembering(rng, 0.95, (4, 1000))), ratio(rng.normal(1.0, 0.4, 20_000)))
        z.append((found.log_r - np.log(3.0)) / found.stderr)
    check_honest(np.array(z))


def test_bridge_from_exact_draws_chains_and_a_proposal(line: al.Fit, walks: al.Fit) -> None:
    exact = line.log_evidence.value
    for score in (
        ev.bridge(0, line, LINE),
        ev.bridge(1, walks, LINE),
        ev.bridge(2, walks, LINE, proposal=line, df=5.0, num_proposals=3000),
    ):
        assert score.stderr < 0.02 and abs(score.value - exact) < 4.0 * score.stderr


def test_bridge_for_a_bare_density_needs_no_reference() -> None:
    """Z = 7 of an unnormalised correlated Gaussian."""
    cov = np.array([[2.0, 0.8], [0.8, 1.0]])
    precision, constant = np.linalg.inv(cov), np.log(7.0) - 0.5 * np.linalg.slogdet(2 * np.pi * cov)[1]
    target = al.target_from_log_density(lambda p: constant - 0.5 * p["a"] @ jnp.asarray(precision) @ p["a"], {"a": np.zeros(2)})
    draws = np.random.default_rng(0).multivariate_normal(np.zeros(2), cov, 4000)
    chains = al.posterior.Draws({"a": draws}, num_chains=4)
    fit = al.Fit(None, al.RandomWalk(), chains, {}, "", {"data": {"num_data": 0}, "temperature": 1.0})
    with pytest.raises(al.MethodError, match="target="):
        ev.bridge(0, fit)
    score = ev.bridge(0, fit, target=target)
    assert score.stderr < 0.02 and abs(score.value - np.log(7.0)) < 4.0 * score.stderr


def test_volumes_of_nested_sampling() -> None:
    """Ideal runs: X shrinks by Beta(n, 1) factors, L(X) = exp(−X²/(2s²)), so that Z = s·√(π/2)·erf(1/(s√2))."""
    from scipy.special import erf

    rng, s, number, delete, z = np.random.default_rng(0), 0.01, 100, 10, []
    exact = np.log(s * np.sqrt(np.pi / 2) * erf(1 / (s * np.sqrt(2))))
    among = np.concatenate([np.tile(number - np.arange(delete), 120), number - np.arange(number)])
    for _ in range(60):
        volume = np.exp(np.cumsum(np.log(rng.uniform(size=len(among))) / among))
        score, weights = nested.integrate(rng, -0.5 * (volume / s) ** 2, number, delete)
        np.testing.assert_allclose(weights.sum(), 1.0)
        z.append((score.value - exact) / score.stderr)
    check_honest(np.array(z))


def test_draws_of_nested_sampling() -> None:
    """Against quadrature, in both modes."""
    fit = al.fit(1, NET, TANH, nested.Nested(), progress=False)
    assert fit.status.startswith("Complete")
    weights, (w1, w2) = fit.posterior.weights, (np.asarray(fit.posterior.params["network"][name]) for name in ("w1", "w2"))
    size = 1.0 / np.sum(weights**2)
    grid, mass = posterior_grid()
    mass = mass / mass.sum()
    mean, second = mass @ (grid[0] * grid[1]), mass @ (grid[0] * grid[1]) ** 2
    assert size > 400 and abs(weights @ (w1 * w2) - mean) < 5.0 * np.sqrt((second - mean**2) / size)
    # Once the modes are apart, the share of one is a random walk: of N points, an e-fold of volume adds 2·¼/N; four of them here.
    assert abs(weights @ (w1 > 0) - 0.5) < 5.0 * 0.5 * np.sqrt(9.0 / 1000.0)


def test_the_verdict_of_nested_sampling() -> None:
    """One run that arrived, one that did not, and likelihoods of zero."""
    method, live = nested.Nested(num_live=10, num_runs=2), SimpleNamespace(position=np.zeros((2, 10, 1)), loglikelihood=np.zeros((2, 10)))
    kept = np.zeros((2, 3, 1, 1)), -np.ones((2, 3, 1)), np.array([[1, 2, 3], [1, 2, 0]])
    state = lambda **given: SimpleNamespace(
        **{"live": SimpleNamespace(particles=live), "arrived": np.ones(2, bool), "outside": np.zeros(2), "log_volume": -np.ones(2)} | given
    )
    said = lambda **given: method._verdict(SimpleNamespace(state=state(**given), kept=kept), 1, 1.0)[:2]
    assert said()[1]
    assert not said(arrived=np.array([True, False]))[1] and "tolerance" in said(arrived=np.array([True, False]))[0]
    assert not said(outside=np.array([0, 2]))[1] and "likelihood is zero at 10.0%" in said(outside=np.array([0, 2]))[0]
    assert not said(log_volume=np.array([-1.0, -151.0]))[1] and "improper" in said(log_volume=np.array([-1.0, -151.0]))[0]
    assert [len(nested._collect(state(), kept, run)[1]) for run in (0, 1)] == [13, 12]


# ---- predictive scores --------------------------------------------------------------------------------------------------------------


def left_out(phi: np.ndarray, y: np.ndarray, noise: float) -> np.ndarray:
    """log p(yᵢ | the other rows) under unit-normal weights, (N,)."""
    out = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        covariance = np.linalg.inv(phi[rest].T @ phi[rest] / noise**2 + np.eye(phi.shape[1]))
        mean, variance = phi[i] @ covariance @ phi[rest].T @ y[rest] / noise**2, phi[i] @ covariance @ phi[i] + noise**2
        out.append(-0.5 * (y[i] - mean) ** 2 / variance - 0.5 * np.log(2 * np.pi * variance))
    return np.array(out)


def test_leave_one_out_is_that_of_the_linear_model(line: al.Fit) -> None:
    x, y = cases.regression()
    fit = al.fit(0, cases.linear_model(), (x, y), al.Exact())
    exact = left_out(np.asarray(al.features.Identity()(x), float), y.astype(float), 0.3)
    found = [ev.loo(key, fit, (x, y)) for key in range(8)]
    terms = np.stack([score.terms for score in found])
    error = terms.std(axis=0, ddof=1) / np.sqrt(8)
    # Student-t with 7 degrees of freedom, 40 rows: 8 standard errors. Smoothing biases a little.
    assert np.max(np.abs(terms.mean(axis=0) - exact) / (error + 0.002)) < 8.0
    assert np.abs(terms - exact).max() < 0.1
    score = found[0]
    assert score.kind == "loo" and score.value == pytest.approx(score.terms.sum())
    np.testing.assert_allclose(score.stderr, np.sqrt(len(y)) * score.terms.std(ddof=1))
    assert 2.0 < score.effective < 6.0 and score.pareto_k.shape == (40,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        other = ev.waic(0, fit, (x, y))
    assert other.kind == "waic" and abs(other.value - exact.sum()) < 0.5
    again = pickle.loads(pickle.dumps(score))
    assert again == score and np.array_equal(again.terms, score.terms)


def test_leave_one_out_from_chains_counts_their_efficiency(walks: al.Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    import arviz

    seen, smooth = [], arviz.psislw
    monkeypatch.setattr(arviz, "psislw", lambda terms, reff: seen.append(reff) or smooth(terms, reff=reff))
    phi = np.stack([np.ones(8), LINE[0]], axis=1)
    np.testing.assert_allclose(ev.loo(0, walks, LINE).value, left_out(phi, LINE[1], 0.4).sum(), atol=0.15)
    assert 0.1 < seen[0] < 0.5
    terms, num_chains = ev.log_likelihoods(0, walks, LINE)
    assert terms.shape == (8000, 8) and terms.dtype == np.float64 and num_chains == 4


def test_a_row_that_cannot_be_left_out_is_told() -> None:
    x, y = LINE[0], LINE[1].copy()
    y[0] += 6.0
    fit = al.fit(0, LINEAR, (x, y), al.Exact())
    with pytest.warns(al.HealthWarning, match="rows 0"):
        score = ev.loo(0, fit, (x, y))
    assert score.pareto_k[0] > 0.7
    with pytest.warns(al.HealthWarning, match="WAIC is not reliable"):
        ev.waic(0, fit, (x, y))


# ---- side by side -------------------------------------------------------------------------------------------------------------------


def test_scores_side_by_side(line: al.Fit) -> None:
    score = al.Score
    flat = {"AIS": score(-9.0, 0.1, "lower bound"), "SMC": score(-8.9, 0.02, "estimate")}
    steep = {"AIS": score(-7.2, 0.1, "lower bound"), "SMC": score(-7.0, 0.02, "estimate"), "fit": line}
    result = al.compare({"flat": flat, "steep": steep}, [0.5, 0.5])
    assert result.by == "SMC, estimate" and result.kinds == ("estimate", "estimate") and result.best == "steep"
    np.testing.assert_allclose(result.posterior[1], 1.0 / (1.0 + np.exp(-1.9)))
    text = str(result)
    assert len(result.rows) == 5 and text.count("\n") == 6 and "Ranked by: SMC, estimate." in text
    assert "log evidence [nats, ↑]" in text and "road" in text and "lower bound" in text
    # Only the rows that are ranked have a place in the ranking.
    assert [line.split()[-1] for line in text.splitlines()[1:6]] == ["–", "-1.900", "–", "0.000", "–"]


def test_a_bound_is_never_ranked_above_an_estimate() -> None:
    high, low = al.Score(-5.0, 0.1, "lower bound"), al.Score(-6.0, 0.1, "estimate")
    result = al.compare({"a": [high], "b": low})
    assert result.posterior is None and "Not ranked" in str(result)
    with pytest.raises(al.AleatorError, match="no ranking"):
        _ = result.best
    above = al.compare({"a": high, "b": al.Score(-6.0, 0.1, "upper bound")})
    assert above.posterior is None and "By its bounds a is above b, by at least 0.400 nats." in str(above)
    sandwich = ev.Sandwich(al.Score(-5.0, 0.01, "lower bound"), al.Score(-4.9, 0.01, "upper bound"))
    both = al.compare({"a": sandwich, "b": ev.Sandwich(*(s._replace(value=s.value - 1.0) for s in sandwich))})
    assert both.best == "a" and "not Bayes factors" in str(both) and "By its bounds a is above b" in str(both)


def test_predictive_scores_are_no_evidence(line: al.Fit) -> None:
    constant = al.fit(0, al.LinearModel(al.features.Polynomial(0), al.Gaussian(0.4), al.Normal(1.0)), LINE, al.Exact())
    scores = {"line": ev.loo(0, line, LINE), "constant": ev.loo(1, constant, LINE)}
    result = al.compare(scores)
    gap = scores["constant"].terms - scores["line"].terms
    assert result.best == "line" and result.posterior is None
    assert f"constant is {-gap.sum():.3f} ± {np.sqrt(8) * gap.std(ddof=1):.3f} nats below line" in str(result)
    with pytest.raises(al.AleatorError, match="cannot be subtracted"):
        result.log_bayes_factor("line", "constant")
    with pytest.raises(al.AleatorError, match="cannot be weighed"):
        al.average({"line": line, "constant": constant}, result)
    mixed = al.compare({"line": scores["line"], "constant": constant})
    assert mixed.posterior is None and "Not ranked" in str(mixed) and "score [nats, ↑]" in str(mixed)
    with pytest.raises(al.AleatorError, match="different data"):
        al.compare({"a": scores["line"], "b": al.fit(0, LINEAR, (LINE[0][:5], LINE[1][:5]), al.Exact())})
    for wrong in ([], "text"):
        with pytest.raises(al.AleatorError, match="score"):
            al.compare({"a": wrong})


# ---- troubles -----------------------------------------------------------------------------------------------------------------------


def test_roads_that_are_closed_say_why(line: al.Fit, replicas: al.Fit) -> None:
    bare = al.target_from_log_density(lambda p: -0.5 * p["a"] ** 2, {"a": 0.0})
    for road in (ev.ais, ev.thermodynamic, ev.nested, ev.smc):
        with pytest.raises(al.MethodError, match="reference"):
            road(0, bare)
    point = al.fit(0, LINEAR, LINE, al.MAP(num_steps=20, batch_size=None))
    few = al.fit(0, LINEAR, LINE, al.Ensemble(al.MAP(num_steps=20, batch_size=None), 3))
    for fit, match in ((point, "no posterior draws"), (few, "no posterior draws")):
        with pytest.raises(al.MethodError, match=match):
            ev.bridge(0, fit, LINE)
    for road in (ev.loo, ev.waic):
        with pytest.raises(al.MethodError, match="no draws"):
            road(0, point, LINE)
        with pytest.raises(al.MethodError, match="Too few draws"):
            road(0, few, LINE)
        with pytest.raises(al.DataError, match="weights"):
            road(0, line, (*LINE, np.full(8, 2.0)))
    with pytest.raises(al.MethodError, match="temperature"):
        ev.bridge(0, dataclasses.replace(replicas, manifest=replicas.manifest | {"temperature": 0.5}), TANH)
    with pytest.warns(al.HealthWarning, match="depart from the posterior"):
        ev.bridge(0, dataclasses.replace(replicas, manifest=replicas.manifest | {"departures": ["no refusals"]}), TANH)
    with pytest.raises(al.DataError, match="data of the fit"):
        ev.loo(0, line, (LINE[0][:4], LINE[1][:4]))
    with pytest.raises(al.MethodError, match="exact posterior draws"):
        ev.sandwich(0, NET, TANH, replicas)
    with pytest.raises(al.DataError, match="Too few posterior draws"):
        ev.ais(0, LINEAR, LINE, posterior_draws=line.sample(0, 10), exact=True)
    with pytest.raises(al.DataError, match="do not fit the model"):
        ev.ais(0, LINEAR, LINE, posterior_draws={"a": np.zeros((1000, 5))})
    with pytest.raises(al.MethodError, match="num_steps"):
        ev.ais(0, LINEAR, LINE, num_steps=0)
    with pytest.raises(al.DataError, match="in memory"):
        ev.ais(0, LINEAR, al.Stream(lambda epoch, start: iter([LINE]), 8))
    with pytest.raises(al.MethodError, match="live points"):
        nested.Nested(num_live=5)


def test_draws_that_are_not_exact_give_an_estimate(line: al.Fit) -> None:
    draws, few = line.sample(0, 500), {"num_steps": 100, "num_particles": 500}
    assert ev.ais(0, LINEAR, LINE, **few, posterior_draws=draws).kind == "estimate"
    upper = ev.ais(0, LINEAR, LINE, **few, posterior_draws=draws, exact=True)
    assert upper.kind == "upper bound" and upper.value > line.log_evidence.value
    assert ev.ais(0, LINEAR, LINE, **few).kind == "lower bound"


def test_chains_in_different_modes_are_told(replicas: al.Fit) -> None:
    """The same draws, mirrored so that each chain stays in one mode."""
    params = replicas.posterior.params
    side = np.repeat([1.0, 1.0, -1.0, -1.0], 1000) * np.sign(params["network"]["w1"])
    mirrored = {**params, "network": {name: leaf * side for name, leaf in params["network"].items()}}
    stuck = dataclasses.replace(replicas, posterior=dataclasses.replace(replicas.posterior, params=mirrored))
    with pytest.warns(al.HealthWarning, match="do not agree"):
        ev.bridge(0, stuck, TANH)


class Box:
    """A prior half of which the density excludes."""

    log_prob = staticmethod(lambda p: -0.5 * p["a"] ** 2 - 0.5 * jnp.log(2 * jnp.pi))
    sample = staticmethod(lambda key: {"a": jax.random.normal(key)})


def test_a_likelihood_of_zero_is_told() -> None:
    half: Any = al.target_from_log_density(lambda p: jnp.where(p["a"] > 0.0, Box.log_prob(p), -jnp.inf), {"a": 1.0}, Box())
    with pytest.warns(al.HealthWarning, match="bound is empty"):
        assert ev.ais(0, half, num_steps=5, num_particles=500).value == -np.inf
    estimate = ev.ais(0, half, num_steps=5, num_particles=500, bound=False)
    assert abs(estimate.value - np.log(0.5)) < 4.0 * estimate.stderr
    with pytest.raises(al.MethodError, match="finite integrand"):
        ev.thermodynamic(0, half)
