"""Gradient estimators on the lecture's example, L = E[w + w²] = μ + σ² + μ²: no bias, and the variance that the algebra gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aleator import gradients
from aleator._errors import MethodError

MU, SIGMA = 0.7, 0.6
EXACT = (1 + 2 * MU, 2 * SIGMA)
REPEATS = 200_000
# f(μ + σε) = A + Bε + Cε².
A, B, C = MU + MU**2, SIGMA * (1 + 2 * MU), SIGMA**2


def example(w):
    return w + w**2


def closed_form(estimator: str, num_draws: int, baseline: bool, antithetic: bool) -> tuple[float, float]:
    """Variances of the estimates of ∂L/∂μ and ∂L/∂σ, from Eε² = 1, Eε⁴ = 3, Eε⁶ = 15, Eε⁸ = 105.

    pathwise: f′ = (1 + 2μ) + 2σε, and f′ε. score: fε/σ has second moment (A² + 3B² + 15C² + 6AC)/σ², f(ε² − 1)/σ has
    (2A² + 10B² + 78C² + 20AC)/σ². A pair ±ε keeps the even terms only and counts as one draw of two. With the baseline the estimate is
    the sample covariance of f and the score s, whose variance for n draws is μ₂₂/n − (n − 2)/(n(n − 1)) cov² + var f · var s/(n(n − 1)).
    """
    if estimator == "pathwise":
        if antithetic:
            return 0.0, 8 * SIGMA**2 / (num_draws / 2)
        return 4 * SIGMA**2 / num_draws, ((1 + 2 * MU) ** 2 + 8 * SIGMA**2) / num_draws
    if baseline:  # Ef = A + C, so the constant of f − Ef is −C
        n, var_f = num_draws, B**2 + 2 * C**2
        sample = lambda m22, var_s, cov: m22 / n - (n - 2) / (n * (n - 1)) * cov**2 + var_f * var_s / (n * (n - 1))
        return (
            sample((3 * B**2 + 10 * C**2) / SIGMA**2, 1 / SIGMA**2, EXACT[0]),
            sample((10 * B**2 + 60 * C**2) / SIGMA**2, 2 / SIGMA**2, EXACT[1]),
        )
    if antithetic:
        pairs = num_draws / 2
        return 2 * B**2 / SIGMA**2 / pairs, (2 * A**2 + 74 * C**2 + 20 * A * C) / SIGMA**2 / pairs
    return (
        (A**2 + 2 * B**2 + 15 * C**2 + 6 * A * C) / SIGMA**2 / num_draws,
        (2 * A**2 + 10 * B**2 + 74 * C**2 + 20 * A * C) / SIGMA**2 / num_draws,
    )


CASES = [
    ("pathwise", 1, False, False),
    ("pathwise", 5, False, False),
    ("pathwise", 4, False, True),
    ("score", 1, False, False),
    ("score", 5, False, False),
    ("score", 2, False, True),
    ("score", 2, True, False),
    ("score", 5, True, False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unbiased_with_the_variance_of_the_closed_form(case):
    found = gradients.variance(0, example, MU, SIGMA, *case, repeats=REPEATS)
    for i in range(2):
        # The last digits: an antithetic pair has variance 0 and is exact but for float32.
        assert abs(found.mean[i] - EXACT[i]) <= 5 * found.mean_stderr[i] + 1e-6
        assert abs(found.variance[i] - closed_form(*case)[i]) <= 5 * found.variance_stderr[i] + 1e-10
        # The standard errors are small enough for this to mean something.
        assert found.variance_stderr[i] <= 0.05 * found.variance[i] + 1e-10


def test_the_baseline_leaves_out_the_whole_antithetic_pair():
    # Leaving out one draw only would let f(μ − σε) into the baseline of ε: the estimate of ∂L/∂σ would be off by −2σ/(num_draws − 1).
    found = gradients.variance(1, example, MU, SIGMA, "score", 4, True, True, repeats=REPEATS)
    for i in range(2):
        assert abs(found.mean[i] - EXACT[i]) <= 5 * found.mean_stderr[i]
    assert 10 * found.mean_stderr[1] < 2 * SIGMA / 3
    plain = gradients.variance(2, example, MU, SIGMA, "score", 4, False, True, repeats=REPEATS)
    assert found.variance[1] < 0.7 * plain.variance[1]


def test_pathwise_is_the_quieter_one_here_and_a_baseline_helps():
    variances = {case: np.array(closed_form(*case)) for case in (CASES[1], CASES[4], CASES[7])}
    pathwise, score, with_baseline = variances.values()
    assert np.all(pathwise < with_baseline)
    assert np.all(with_baseline < score)


def test_a_constant_added_to_f_hurts_the_score_function_only_without_a_baseline():
    shifted = lambda w: example(w) + 1000.0
    key = 3
    plain = gradients.estimate(key, example, MU, SIGMA, "score", 64, True)
    moved = gradients.estimate(key, shifted, MU, SIGMA, "score", 64, True)
    np.testing.assert_allclose(moved, plain, rtol=1e-3)  # float32 holds f to 6e-5 beside 1000
    loud = gradients.variance(4, shifted, MU, SIGMA, "score", 64, repeats=400)
    assert loud.variance[0] > 1e3 * closed_form("score", 64, False, False)[0]


@pytest.mark.parametrize(("estimator", "baseline"), [("pathwise", False), ("score", False), ("score", True)])
def test_any_tree(estimator, baseline):
    """f = Σ cᵢ wᵢ² + a w₁ … with exact gradients 2cμ (+ a) and 2cσ, leaves of several shapes."""
    mean = {"a": {"weight": jnp.array([[0.3, -0.2], [0.5, 0.1]])}, "b": [jnp.array(0.4), jnp.array([-0.6])]}
    scale = {"a": {"weight": jnp.array([[0.5, 0.9], [0.7, 1.1]])}, "b": [jnp.array(0.8), jnp.array([0.3])]}
    function = lambda w: jnp.sum(w["a"]["weight"] ** 2) + 0.5 * w["b"][0] - jnp.sum(w["b"][1] ** 2)
    exact_mean = {"a": {"weight": 2 * mean["a"]["weight"]}, "b": [jnp.array(0.5), -2 * mean["b"][1]]}
    exact_scale = {"a": {"weight": 2 * scale["a"]["weight"]}, "b": [jnp.array(0.0), -2 * scale["b"][1]]}
    found = gradients.variance(5, function, mean, scale, estimator, 8, baseline, repeats=5000, batch_size=512)
    assert jax.tree.structure(found.mean) == jax.tree.structure((exact_mean, exact_scale))
    for got, error, exact in zip(*map(jax.tree.leaves, (found.mean, found.mean_stderr, (exact_mean, exact_scale))), strict=True):
        assert got.shape == exact.shape
        assert np.all(np.abs(got - exact) <= 5 * error + 1e-6)
    one = gradients.estimate(6, function, mean, 0.5, estimator, 8, baseline)
    assert jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, (mean, mean))


def test_a_step_function_has_a_score_gradient_but_no_path():
    # L = P(w > 0) = Φ(μ/σ): ∂L/∂μ = φ(μ/σ)/σ, ∂L/∂σ = −μ φ(μ/σ)/σ².
    step = lambda w: w > 0
    exact = np.array([1.0, -MU / SIGMA]) * stats.norm.pdf(MU / SIGMA) / SIGMA
    found = gradients.variance(7, step, MU, SIGMA, "score", 16, True, repeats=5000)
    for i in range(2):
        assert abs(found.mean[i] - exact[i]) <= 5 * found.mean_stderr[i]
        assert 5 * found.mean_stderr[i] < abs(exact[i]) / 4
    assert [float(g) for g in gradients.estimate(8, step, MU, SIGMA, "pathwise", 16)] == [0.0, 0.0]


def test_one_estimate_by_hand():
    """The same draws put through the formulas directly."""
    slopes = gradients.estimate(9, lambda w: 3.0 * w, MU, SIGMA, "pathwise", 6)
    assert float(slopes[0]) == pytest.approx(3.0)
    mean_noise = float(slopes[1]) / 3.0  # ∂L/∂σ = 3 · mean of ε
    score = gradients.estimate(9, lambda w: 1.0, MU, SIGMA, "score", 6)
    assert float(score[0]) == pytest.approx(mean_noise / SIGMA, rel=1e-5)
    assert gradients.estimate(9, lambda w: 1.0, MU, SIGMA, "score", 6, True)[0] == pytest.approx(0.0, abs=1e-6)


def test_works_inside_compiled_code_and_in_double_precision():
    compiled = jax.jit(lambda key, m, s: gradients.estimate(key, example, m, s, "score", 8, True))
    np.testing.assert_allclose(
        compiled(jax.random.key(1), MU, SIGMA), gradients.estimate(1, example, MU, SIGMA, "score", 8, True), rtol=1e-4
    )
    with jax.enable_x64(True):
        assert gradients.estimate(1, example, np.float64(MU), np.float64(SIGMA))[0].dtype == jnp.float64


def test_the_standard_error_of_a_variance():
    # Of R normal numbers: √(2/(R − 1)) v.
    values = np.random.default_rng(0).normal(scale=3.0, size=200_000)
    mean, mean_stderr, var, var_stderr = gradients._moments(values)
    assert mean == pytest.approx(values.mean())
    assert mean_stderr == pytest.approx(stats.sem(values))
    assert var == pytest.approx(values.var(ddof=1))
    # The fourth moment is itself uncertain: Var ε⁴ = 96, so m₄ − v² = 2 ± √(96/R) in units of v², and half of it after the root.
    assert var_stderr == pytest.approx(9 * np.sqrt(2 / 200_000), rel=5 * 0.25 * np.sqrt(96 / 200_000))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"estimator": "scores"}, r"did you mean 'score'"),
        ({"num_draws": 0}, "num_draws=0"),
        ({"num_draws": 3, "antithetic": True}, "even number"),
        ({"estimator": "score", "baseline": True}, "num_draws ≥ 2"),
        ({"estimator": "score", "baseline": True, "antithetic": True, "num_draws": 2}, "num_draws ≥ 4"),
        ({"baseline": True, "num_draws": 4}, "Only the score function"),
        ({"scale": 0.0}, "not positive"),
        ({"scale": np.nan}, "not positive"),
        ({"scale": np.ones(3)}, "another shape"),
        ({"scale": {"a": 1.0}}, "not a tree like mean"),
        ({"function": lambda w: w * jnp.ones(2)}, "must return a number"),
    ],
)
def test_what_does_not_work_is_refused(arguments, match):
    arguments = {"function": example, "mean": MU, "scale": SIGMA} | arguments
    for call in (gradients.estimate, gradients.variance):
        with pytest.raises(MethodError, match=match):
            call(0, **arguments)


def test_a_variance_needs_repeats():
    with pytest.raises(MethodError, match="repeats=3"):
        gradients.variance(0, example, MU, SIGMA, repeats=3)
