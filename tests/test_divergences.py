"""KL divergences: the identities of the lectures, closed forms against quadrature and Monte Carlo, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, stats

from aleator._errors import ModelError
from aleator.divergences import kl

RNG = np.random.default_rng(3)
D = 4


def covariance(d: int = D) -> np.ndarray:
    root = RNG.normal(size=(d, d))
    return root @ root.T + 0.3 * np.eye(d)


MEAN_Q, MEAN_P = RNG.normal(size=D), RNG.normal(size=D)
VAR_Q, VAR_P = RNG.uniform(0.2, 3, D), RNG.uniform(0.2, 3, D)
COV_Q, COV_P = covariance(), covariance()
DISCRETE = ([1 / 8, 3 / 8, 4 / 8], [3 / 8, 4 / 8, 1 / 8])
PAIRS = [
    ((0.3, 0.5), (-1.0, 2.0)),
    ((MEAN_Q, VAR_Q), (MEAN_P, VAR_P)),
    ((MEAN_Q, COV_Q), (MEAN_P, COV_P)),
    DISCRETE,
]
IDS = ["scalar", "diagonal", "full", "discrete"]


@pytest.mark.parametrize(("q", "p"), PAIRS, ids=IDS)
def test_positive_zero_only_when_equal_and_not_symmetric(q, p):
    assert kl(q, p) > 0
    assert kl(q, q) == pytest.approx(0.0, abs=1e-12)
    assert kl(q, q) >= 0
    assert abs(kl(q, p) - kl(p, q)) > 1e-3
    assert isinstance(kl(q, p), float)


def test_discrete_by_its_definition():
    q, p = np.array(DISCRETE)
    assert kl(q, p) == pytest.approx(np.sum(q * np.log(q / p)), rel=1e-12)
    assert kl([0.0, 1.0], [0.5, 0.5]) == pytest.approx(np.log(2))  # q_k = 0 is ignored
    assert kl([0.5, 0.5], [0.0, 1.0]) == float("inf")  # q_k > 0 needs p_k > 0
    assert kl([0.5, 0.5, 0.0], [0.25, 0.75, 0.0]) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))


def test_scalar_gaussian_by_the_formula_and_by_quadrature():
    (m0, v0), (m1, v1) = PAIRS[0]
    assert kl((m0, v0), (m1, v1)) == pytest.approx(0.5 * (v0 / v1 + (m1 - m0) ** 2 / v1 - 1 + np.log(v1 / v0)), rel=1e-12)
    q, p = stats.norm(m0, np.sqrt(v0)), stats.norm(m1, np.sqrt(v1))
    assert kl((m0, v0), (m1, v1)) == pytest.approx(integrate.quad(lambda x: q.pdf(x) * (q.logpdf(x) - p.logpdf(x)), -12, 12)[0], rel=1e-8)


def test_diagonal_is_the_sum_of_scalars_and_full_contains_it():
    scalars = sum(kl((a, b), (c, d)) for a, b, c, d in zip(MEAN_Q, VAR_Q, MEAN_P, VAR_P, strict=True))
    assert kl((MEAN_Q, VAR_Q), (MEAN_P, VAR_P)) == pytest.approx(scalars, rel=1e-12)
    assert kl((MEAN_Q, np.diag(VAR_Q)), (MEAN_P, np.diag(VAR_P))) == pytest.approx(scalars, rel=1e-10)
    assert kl((MEAN_Q, VAR_Q), (MEAN_P, np.diag(VAR_P))) == pytest.approx(scalars, rel=1e-10)


def test_full_gaussian_by_the_formula_and_by_monte_carlo():
    inverse = np.linalg.inv(COV_P)
    shift = MEAN_P - MEAN_Q
    logs = np.linalg.slogdet(COV_P)[1] - np.linalg.slogdet(COV_Q)[1]
    exact = 0.5 * (np.trace(inverse @ COV_Q) + shift @ inverse @ shift - D + logs)
    assert kl((MEAN_Q, COV_Q), (MEAN_P, COV_P)) == pytest.approx(exact, rel=1e-10)
    q, p = stats.multivariate_normal(MEAN_Q, COV_Q), stats.multivariate_normal(MEAN_P, COV_P)
    x = q.rvs(20_000, random_state=0)
    ratios = q.logpdf(x) - p.logpdf(x)
    assert abs(ratios.mean() - exact) < 5 * stats.sem(ratios)


def test_invariant_under_affine_maps_of_both():
    a, b = RNG.normal(size=(D, D)) + 2 * np.eye(D), RNG.normal(size=D)
    mapped = [(a @ m + b, a @ c @ a.T) for m, c in ((MEAN_Q, COV_Q), (MEAN_P, COV_P))]
    assert kl(*mapped) == pytest.approx(kl((MEAN_Q, COV_Q), (MEAN_P, COV_P)), rel=1e-8)
    assert kl((3 * 0.3 + 1, 9 * 0.5), (3 * -1.0 + 1, 9 * 2.0)) == pytest.approx(kl(*PAIRS[0]), rel=1e-12)


def test_additive_over_independent_parts_and_the_chain_rule():
    joint = (np.concatenate([MEAN_Q, [0.3]]), np.block([[COV_Q, np.zeros((D, 1))], [np.zeros((1, D)), 0.5]]))
    other = (np.concatenate([MEAN_P, [-1.0]]), np.block([[COV_P, np.zeros((D, 1))], [np.zeros((1, D)), 2.0]]))
    assert kl(joint, other) == pytest.approx(kl((MEAN_Q, COV_Q), (MEAN_P, COV_P)) + kl(*PAIRS[0]), rel=1e-10)
    q, p = (np.outer(first, second).ravel() for first, second in ((DISCRETE[0], [0.2, 0.8]), (DISCRETE[1], [0.6, 0.4])))
    assert kl(q, p) == pytest.approx(kl(*DISCRETE) + kl([0.2, 0.8], [0.6, 0.4]), rel=1e-12)
    # KL(q(a, b), p(a, b)) = KL(q(a), p(a)) + E_q KL(q(b | a), p(b | a)) for dependent tables.
    q, p = (RNG.dirichlet(np.ones(6)).reshape(2, 3) for _ in range(2))
    conditional = sum(q[i].sum() * kl(q[i] / q[i].sum(), p[i] / p[i].sum()) for i in range(2))
    assert kl(q.ravel(), p.ravel()) == pytest.approx(kl(q.sum(1), p.sum(1)) + conditional, rel=1e-12)


def test_close_distributions_keep_their_digits():
    # ½ (δ/2)² to leading order in the log variance: the textbook formula loses all digits here.
    assert kl((0.0, 1.0 + 1e-7), (0.0, 1.0)) == pytest.approx(0.25e-14, rel=1e-5, abs=0)
    assert kl((1e-9, 1.0), (0.0, 1.0)) == pytest.approx(0.5e-18, rel=1e-9, abs=0)


def test_numpyro_distributions():
    import numpyro.distributions as dist

    q, p = dist.Normal(MEAN_Q, np.sqrt(VAR_Q)), dist.Normal(MEAN_P, np.sqrt(VAR_P))
    each = kl(q, p)
    assert each.shape == (D,)
    np.testing.assert_allclose(each, dist.kl_divergence(q, p), rtol=1e-4)
    together = kl(q.to_event(1), p.to_event(1))
    assert together == pytest.approx(each.sum(), rel=1e-6)
    assert kl(q.to_event(1), (MEAN_P, VAR_P)) == pytest.approx(together, rel=1e-5)
    assert kl(dist.Normal(0.3, np.sqrt(0.5)), (-1.0, 2.0)) == pytest.approx(kl(*PAIRS[0]), rel=1e-5)
    wide = dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1)
    np.testing.assert_allclose(kl(wide, (np.ones(2), np.ones(2))), np.ones(3), rtol=1e-6)
    full = kl(dist.MultivariateNormal(MEAN_Q, covariance_matrix=COV_Q), dist.MultivariateNormal(MEAN_P, covariance_matrix=COV_P))
    assert full == pytest.approx(kl((MEAN_Q, COV_Q), (MEAN_P, COV_P)), rel=1e-4)
    q, p = (dist.Categorical(probs=np.array(side)) for side in DISCRETE)
    assert kl(q, p) == pytest.approx(kl(*DISCRETE), rel=1e-5)
    assert kl(dist.Bernoulli(logits=0.4), dist.Bernoulli(probs=0.2)) == pytest.approx(
        kl([1 - 1 / (1 + np.exp(-0.4)), 1 / (1 + np.exp(-0.4))], [0.8, 0.2]), rel=1e-5
    )
    with pytest.raises(ModelError, match="a Gamma of event shape"):
        kl(dist.Gamma(1.0, 1.0), dist.Gamma(1.0, 1.0))
    with pytest.raises(ModelError, match="batch shapes"):
        kl(dist.Normal(np.zeros(2), 1.0), dist.Normal(np.zeros(3), 1.0))


@pytest.mark.parametrize(
    ("q", "p", "match"),
    [
        ((np.zeros(2), np.ones((2, 2))), (np.zeros(2), np.eye(2)), "covariance of q is singular"),
        ((np.zeros(2), np.eye(2)), (np.zeros(2), np.diag([1.0, -1.0])), "covariance of p is singular"),
        ((np.zeros(2), np.array([[1.0, 0.5], [0.0, 1.0]])), (np.zeros(2), np.eye(2)), "symmetric"),
        ((0.0, 0.0), (0.0, 1.0), "positive variances"),
        ((np.zeros(2), 1.0), (np.zeros(2), np.ones(2)), "match their shapes"),
        ((np.zeros(2), np.eye(3)), (np.zeros(2), np.eye(2)), "match their shapes"),
        ([0.5, 0.6], [0.5, 0.5], "sum 1.1"),
        ([1.5, -0.5], [0.5, 0.5], "probability vector"),
        ([0.5, 0.5], [0.2, 0.3, 0.5], "different spaces"),
        ((0.0, 1.0), [0.5, 0.5], "different spaces"),
        ((np.zeros(2), np.ones(2)), (np.zeros(3), np.ones(3)), "different spaces"),
        ((0.0, 1.0, 2.0), (0.0, 1.0), "a tuple of 3"),
        (np.eye(2), np.eye(2), "1-D probability vector"),
        ("normal", (0.0, 1.0), "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused(q, p, match):
    with pytest.raises(ModelError, match=match):
        kl(q, p)
