"""Expectation propagation against quadrature, the exact linear posterior, and a literal one-row-at-a-time implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st

import aleator as al
from aleator import loop
from aleator.methods import _moments
from aleator.methods import expectation_propagation as ep
from aleator.methods.expectation_propagation import ExpectationPropagation
from aleator.target import Target
from tests.interrupted import dies_after

RNG = np.random.default_rng(0)
X, T = np.array([-2, -1, 0, 0.5, 1, 2.0]), np.array([0, 0, 1, 0, 1, 1])  # the two-weight logistic regression of the targets
LOG_LINK = {"logit": lambda z: -np.logaddexp(0, -z), "probit": st.norm.logcdf}
LINKS = pytest.mark.parametrize("link", ["logit", "probit"])


def model(link: str = "logit", scale: float = 2.0) -> al.LinearModel:
    return al.LinearModel(al.features.Identity(), al.Bernoulli(link), al.Normal(scale))


def tilted_by_sum(link: str, mean: float, variance: float, sign: float) -> tuple[float, float, float]:
    """log Z, mean and variance of t(s·f)·N(f; mean, variance) on an equally spaced grid, whose error falls exponentially."""
    centre, width = sign * mean, np.sqrt(variance)
    offset, space = np.linspace(-12 * width, 12 * width + max(-centre, 0.0) + 10.0, 8_001, retstep=True)
    log_density = LOG_LINK[link](centre + offset) + st.norm.logpdf(offset, 0.0, width)
    top = log_density.max()
    weight = np.exp(log_density - top)
    log_z = top + np.log(weight.sum() * space)
    weight /= weight.sum()
    average = weight @ offset
    return log_z, sign * (centre + average), weight @ (offset - average) ** 2


@LINKS
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_tilted_moments_against_a_fine_sum(link: str, sign: float) -> None:
    site = {"logit": _moments.tilted_logistic, "probit": _moments.tilted_probit}[link]
    mean, variance = (grid.ravel() for grid in np.meshgrid([-40.0, -6.0, -1.0, 0.0, 0.3, 5.0, 30.0], [0.01, 0.5, 4.0, 100.0, 2500.0]))
    with jax.enable_x64(True):
        found = jax.tree.map(np.asarray, jax.jit(site)(jnp.asarray(mean), jnp.asarray(variance), jnp.full(len(mean), sign)))
    expected = np.array([tilted_by_sum(link, m, v, sign) for m, v in zip(mean, variance, strict=True)])
    spread = np.sqrt(expected[:, 2])
    np.testing.assert_allclose(found.log_z, expected[:, 0], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose((mean + variance * found.slope - expected[:, 1]) / spread, 0.0, atol=1e-8)
    np.testing.assert_allclose(variance * (1 - variance * found.curvature) / expected[:, 2], 1.0, atol=1e-8)


def test_tilted_logistic_survives_far_tails() -> None:
    with jax.enable_x64(True):
        mean, variance = jnp.array([-1e4, 1e4, -1e3, 0.0]), jnp.array([1.0, 1.0, 1e6, 1e-12])
        found = jax.tree.map(np.asarray, jax.jit(_moments.tilted_logistic)(mean, variance, jnp.ones(4)))
    np.testing.assert_allclose(found.log_z[:2], [-1e4 + 0.5, 0.0], rtol=1e-12)  # E eᶠ = e^{m + v/2} where σ(f) = eᶠ
    np.testing.assert_allclose(found.slope[:2], [1.0, 0.0], atol=1e-12)
    assert all(np.isfinite(part).all() for part in found)
    assert (1 - np.asarray(variance) * found.curvature > 0).all()


def sequential(link: str, phi: np.ndarray, t: np.ndarray, scale: float, sweeps: int = 40) -> tuple[float, np.ndarray, np.ndarray]:
    """Textbook EP: one site after the other, dense matrices inverted anew each time, moments by plain sums, evidence from the definition
    log ∫ prior·Π (scale of site i)·t̃ᵢ, the scales s.t. each site has its tilted normaliser."""
    n, p = phi.shape
    tau, nu, log_scale = np.zeros(n), np.zeros(n), np.zeros(n)
    prior = np.eye(p) / scale**2
    for _ in range(sweeps):
        for i in range(n):
            cavity_precision = prior + (phi.T * tau) @ phi - tau[i] * np.outer(phi[i], phi[i])
            cavity_mean = np.linalg.solve(cavity_precision, phi.T @ nu - nu[i] * phi[i])
            m, v = phi[i] @ cavity_mean, phi[i] @ np.linalg.solve(cavity_precision, phi[i])
            log_z, mean, variance = tilted_by_sum(link, m, v, 2.0 * t[i] - 1.0)
            tau[i], nu[i] = 1 / variance - 1 / v, mean / variance - m / v
            # ∫ N(f; m, v)·exp(c + νf − ½τf²) df = Z
            log_scale[i] = log_z - (0.5 * mean**2 / variance + 0.5 * np.log(variance) - 0.5 * m**2 / v - 0.5 * np.log(v))
    precision = prior + (phi.T * tau) @ phi
    mean = np.linalg.solve(precision, phi.T @ nu)
    half_logdet = 0.5 * (np.linalg.slogdet(prior)[1] - np.linalg.slogdet(precision)[1])
    return log_scale.sum() + half_logdet + 0.5 * mean @ precision @ mean, mean, np.linalg.inv(precision)


@LINKS
def test_same_fixed_point_as_one_row_at_a_time(link: str) -> None:
    fit = al.fit(0, model(link), (X, T), ExpectationPropagation())
    evidence, mean, covariance = sequential(link, np.stack([np.ones(6), X], axis=1), T, 2.0)
    assert abs(fit.log_evidence.value - evidence) < 1e-7 and fit.log_evidence.kind == "estimate"
    np.testing.assert_allclose(fit.posterior.mean[0], mean, atol=1e-7)
    np.testing.assert_allclose(fit.posterior.operator.covariance()[0], covariance, atol=1e-7)
    assert fit.status.startswith("Converged") and (fit.info["residual"][-1] < 1e-8).all()


def grid_posterior(link: str) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Log evidence, mean, covariance and P(y = 1 | x = 3) of the two-weight model on a grid (lecture: A3)."""
    axis = np.linspace(-16, 16, 1201)
    a, b = np.meshgrid(axis, axis, indexing="ij")
    log_joint = st.norm.logpdf(a, 0, 2) + st.norm.logpdf(b, 0, 2)
    log_joint += sum(LOG_LINK[link]((a + b * x) * (2 * t - 1)) for x, t in zip(X, T, strict=True))
    weight = np.exp(log_joint)
    evidence = np.log(weight.sum() * (axis[1] - axis[0]) ** 2)
    weight /= weight.sum()
    mean = np.array([(weight * a).sum(), (weight * b).sum()])
    moved = np.stack([a - mean[0], b - mean[1]]).reshape(2, -1)
    return evidence, mean, (moved * weight.ravel()) @ moved.T, (weight * np.exp(LOG_LINK[link](a + 3 * b))).sum()


@LINKS
def test_close_to_the_true_posterior_and_closer_than_laplace(link: str) -> None:
    """EP's own error on six rows: 0.02 (logit) and 0.03 (probit) nats of evidence, 0.01 standard deviations of mean."""
    evidence, mean, covariance, chance = grid_posterior(link)
    if link == "logit":
        assert abs(evidence + 3.996067) < 1e-6
    fit = al.fit(0, model(link), (X, T), ExpectationPropagation())
    phi, w = np.stack([np.ones(6), X], axis=1), np.zeros(2)
    log_joint = lambda w: LOG_LINK[link](phi @ w * (2 * T - 1)).sum() + st.norm.logpdf(w, 0, 2).sum()
    for _ in range(50):  # the mode by Newton's method on differences, for Laplace's approximation
        steps = 1e-4 * np.eye(2)
        slope = np.array([(log_joint(w + e) - log_joint(w - e)) / 2e-4 for e in steps])
        hessian = np.array(
            [
                [(log_joint(w + e + f) - log_joint(w + e - f) - log_joint(w - e + f) + log_joint(w - e - f)) / 4e-8 for f in steps]
                for e in steps
            ]
        )
        w = w - np.linalg.solve(hessian, slope)
    laplace = log_joint(w) + np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(-hessian)[1]
    spread = np.sqrt(np.diagonal(covariance))
    error, laplace_error = np.abs(fit.posterior.mean[0] - mean) / spread, np.abs(w - mean) / spread
    assert abs(fit.log_evidence.value - evidence) < {"logit": 0.022, "probit": 0.03}[link] < abs(laplace - evidence)
    assert error.max() < 0.01 < 0.1 < laplace_error.max()
    np.testing.assert_allclose(fit.posterior.operator.covariance()[0], covariance, atol=0.11)
    assert abs(fit.predict(0, np.array([3.0])).probs[0, 1] - chance) < 0.0125


@LINKS
def test_prediction_is_the_integral_over_the_gaussian_output(link: str) -> None:
    fit = al.fit(0, model(link), (X, T), ExpectationPropagation())
    new = np.array([-4.0, 0.2, 3.0])
    phi = np.stack([np.ones(3), new], axis=1)
    m, v = phi @ fit.posterior.mean[0], np.sum(phi @ fit.posterior.operator.covariance()[0] * phi, axis=1)
    expected = [np.exp(tilted_by_sum(link, a, b, 1.0)[0]) for a, b in zip(m, v, strict=True)]
    np.testing.assert_allclose(fit.predict(0, new).probs[:, 1], expected, atol=1e-5)  # 64 Hermite nodes


@pytest.mark.parametrize("weighted", [False, True])
def test_gaussian_sites_make_it_exact(weighted: bool) -> None:
    x = RNG.normal(size=(25, 3))
    y = x @ RNG.normal(size=(3, 2)) + 0.4 * RNG.normal(size=(25, 2))
    weight = (RNG.uniform(0.4, 3.0, 25),) if weighted else ()
    linear = al.LinearModel(al.features.Identity(), al.Gaussian(0.4), al.Normal(1.3, loc=0.2, scaling="fan_in"))
    exact = al.fit(0, linear, (x, y, *weight), al.Exact())
    fit = al.fit(0, linear, (x, y, *weight), ExpectationPropagation(tolerance=1e-11))
    np.testing.assert_allclose(fit.posterior.mean, exact.posterior.mean, atol=1e-9)
    np.testing.assert_allclose(fit.posterior.operator.covariance(), exact.posterior.operator.covariance(), atol=1e-10)
    np.testing.assert_allclose(fit.predict(0, x).variance, exact.predict(0, x).variance, rtol=1e-9)
    assert abs(fit.log_evidence.value - exact.log_evidence.value) < 1e-8


@LINKS
def test_a_row_of_weight_three_is_three_rows(link: str) -> None:
    weight = np.array([1, 3, 1, 2, 1, 0])
    weighted = al.fit(0, model(link), (X, T, weight.astype(float)), ExpectationPropagation())
    repeated = al.fit(0, model(link), (np.repeat(X, weight), np.repeat(T, weight)), ExpectationPropagation())
    np.testing.assert_allclose(weighted.posterior.mean, repeated.posterior.mean, atol=1e-7)
    np.testing.assert_allclose(weighted.log_evidence.value, repeated.log_evidence.value, atol=1e-7)


def hard(name: str) -> tuple[np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(1)
    line = np.linspace(-2, 2, 200)
    if name == "separable":
        return line, (line > 0).astype(int), 1e4
    if name == "duplicated":
        return np.repeat([0.0, 1.0], 300), np.repeat([0, 1], 300), 10.0
    if name == "one column":
        return np.ones(500), np.r_[np.ones(495, int), np.zeros(5, int)], 10.0
    if name == "raw units":
        x = 1e3 * rng.normal(size=(50, 3))
        return x, (x[:, 0] > 0).astype(int), 1.0
    if name == "wide":
        x = rng.normal(size=(30, 60))
        return x, (x[:, 0] + rng.normal(size=30) > 0).astype(int), 3.0
    x = np.r_[line, 50.0]  # one row far on the wrong side
    return x, np.r_[(line > 0).astype(int), 0], 3.0


@pytest.mark.parametrize(
    ("name", "link"),
    [(name, "logit") for name in ("separable", "duplicated", "one column", "raw units", "wide", "outlier")]
    + [("separable", "probit"), ("duplicated", "probit")],
)
def test_hard_data_converges(name: str, link: str) -> None:
    x, t, scale = hard(name)
    fit = al.fit(0, model(link, scale), (x, t), ExpectationPropagation())
    assert fit.status.startswith("Converged") and np.isfinite(fit.log_evidence.value) and fit.log_evidence.value < 0
    eigenvalues = np.linalg.eigvalsh(fit.posterior.operator.covariance()[0])
    # Data never widen a posterior whose likelihood is log-concave.
    assert (eigenvalues > 0).all() and (eigenvalues <= scale**2 * (1 + 1e-6)).all()


@LINKS
@pytest.mark.parametrize("t", [[1], [0, 0, 0, 0]])
def test_one_row_and_one_class_converge_once_past_the_door(link: str, t: list[int]) -> None:
    """Both are refused with their cause by the likelihood; the algorithm itself has a proper prior and needs no second class. One site is
    exact: log ∫ p(y | f)·N(f; 0, φᵀSφ) df."""
    x = np.linspace(0.5, 2.0, len(t))
    with pytest.raises(al.DataError, match="only one class"):
        al.fit(0, model(link), (x, np.array(t)), ExpectationPropagation())
    y = np.array(t, np.int32)[:, None]
    bound = model(link).bind(x, y)
    algorithm = ExpectationPropagation().build(Target(bound, len(t)))
    result = loop.run(jax.random.key(0), algorithm, al.Data(x, y), bound.init(jax.random.key(1)), loop.Options(progress=False), "")
    assert float(result.state.residual) < 1e-8
    if len(t) == 1:
        evidence, _, _ = tilted_by_sum(link, 0.0, 4.0 * (1 + x[0] ** 2), 1.0)
        assert abs(float(result.state.log_evidence) - evidence) < 1e-7


def test_columns_are_fitted_apart() -> None:
    t = np.stack([T, T[::-1]], axis=1)
    both = al.fit(0, model(), (X, t), ExpectationPropagation())
    apart = [al.fit(0, model(), (X, t[:, j]), ExpectationPropagation()) for j in range(2)]
    np.testing.assert_allclose(both.posterior.mean, np.concatenate([fit.posterior.mean for fit in apart]), atol=1e-7)
    assert abs(both.log_evidence.value - sum(fit.log_evidence.value for fit in apart)) < 1e-7
    assert both.predict(0, X).mean.shape == (6, 2)


def test_blocks_of_rows_change_nothing(monkeypatch) -> None:
    x = RNG.normal(size=(37, 2))
    t = (x[:, 0] + RNG.normal(size=37) > 0).astype(int)
    whole = al.fit(0, model(), (x, t), ExpectationPropagation(tolerance=1e-9))
    monkeypatch.setattr(ep, "BLOCK", 8)
    parts = al.fit(0, model(), (x, t), ExpectationPropagation(tolerance=1.0001e-9))  # another method: not the cached one
    np.testing.assert_allclose(parts.posterior.mean, whole.posterior.mean, atol=1e-9)


def test_too_few_sweeps_are_said_to_be_too_few() -> None:
    with pytest.warns(al.HealthWarning, match="Not converged.*raise num_steps"):
        fit = al.fit(0, model(), (X, T), ExpectationPropagation(num_steps=2))
    assert fit.manifest["steps"] == 2


def test_resume_gives_the_same_bits(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "FIRST_CHUNK", 3)
    monkeypatch.setattr(loop, "MAX_CHUNK", 4)
    whole = al.fit(0, model(), (X, T), ExpectationPropagation())
    with dies_after(1, surely=False):
        al.fit(0, model(), (X, T), ExpectationPropagation(), checkpoint=tmp_path, checkpoint_every=0.0)
    resumed = al.fit(0, model(), (X, T), ExpectationPropagation(), checkpoint=tmp_path, checkpoint_every=0.0, resume=True)
    np.testing.assert_array_equal(resumed.posterior.mean, whole.posterior.mean)
    assert resumed.log_evidence == whole.log_evidence and resumed.manifest["steps"] == whole.manifest["steps"] > 4


def test_saved_and_loaded_predicts_the_same_bits(tmp_path) -> None:
    fit = al.fit(0, model("probit"), (X, T), ExpectationPropagation())
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit")
    np.testing.assert_array_equal(again.predict(0, X).mean, fit.predict(0, X).mean)
    assert again.log_evidence == fit.log_evidence and again.model.likelihood.link == "probit"


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: al.BNN(al.networks.MLP(1, (3,), 1), al.Bernoulli()), "a BNN"),
        (lambda: al.LinearModel(al.features.Identity(), al.Bernoulli(), al.priors.Laplace(1.0)), "prior Laplace"),
        (lambda: al.LinearModel(al.features.Identity(), al.Gaussian(), al.Normal(1.0)), "likelihood Gaussian"),
    ],
)
def test_refuses_what_it_has_no_sites_for(make, cause: str) -> None:
    with pytest.raises(al.MethodError, match=f"{cause}.*Expected: al.LinearModel"):
        al.fit(0, make(), (X[:, None], T), ExpectationPropagation())


def test_refuses_a_temperature_an_update_and_bad_settings() -> None:
    with pytest.raises(al.MethodError, match=r"temperature 0\.5"):
        al.fit(0, model(), (X, T), ExpectationPropagation(), temperature=0.5)
    with pytest.raises(al.MethodError, match="fit all the data again"):
        al.fit(0, model(), (X, T), ExpectationPropagation()).update((X, T))
    with pytest.raises(al.MethodError, match="0 < damping"):
        ExpectationPropagation(damping=1.5)
