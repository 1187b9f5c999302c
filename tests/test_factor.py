"""Factor models: against closed forms, quadrature, and the promise that no step lowers its bound."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.special import expit, gammaln, log_expit, log_softmax, logsumexp
from scipy.stats import multivariate_normal, norm

import aleator as al
from aleator.data import Data
from aleator.latent._conjugate import add
from aleator.latent.factor import Columns, FactorModel


def truth(d: int = 5, q: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Loadings (d, q) and means (d,)."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(d, q)), 3.0 * rng.normal(size=d)


def gaussian(n: int = 80, d: int = 5) -> np.ndarray:
    rng = np.random.default_rng(0)
    loadings, mean = truth(d)
    return rng.normal(size=(n, 2)) @ loadings.T + 0.3 * rng.normal(size=(n, d)) + mean


def holes(y: np.ndarray) -> np.ndarray:
    gone = np.random.default_rng(1).random(y.shape) < 0.2
    gone[3] = True  # a row of which nothing is left
    return np.where(gone, np.nan, y)


def bound_model(model: FactorModel, y: np.ndarray) -> tuple[FactorModel, dict]:
    model = model.bind(None, y)
    with jax.enable_x64(True):
        params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    params["columns"]["weights"] = 8.0 * params["columns"]["weights"]
    return model, params


def test_probabilistic_pca_is_the_closed_form_gaussian() -> None:
    y = gaussian()
    model = FactorModel(2, noise="isotropic").bind(None, y)
    params = model.maximum_likelihood(y)
    named = jax.tree.map(np.asarray, model.constrain(params))
    w, variance = named["loadings"], named["noise"] ** 2
    total = w @ w.T + variance * np.eye(5)
    np.testing.assert_allclose(model.log_prob(params, y), multivariate_normal(named["mean"], total).logpdf(y), rtol=0, atol=1e-10)
    inner = np.linalg.inv(np.eye(2) + w.T @ w / variance)
    mean, spread = model.encode(params, y)
    np.testing.assert_allclose(mean, (y - named["mean"]) @ w @ inner / variance, rtol=0, atol=1e-10)
    np.testing.assert_allclose(spread, np.broadcast_to(inner, spread.shape), rtol=0, atol=1e-12)
    # The covariance of a maximum keeps the q leading eigenvalues, and no gradient is left.
    values = np.linalg.eigvalsh(np.cov(y.T, bias=True))
    np.testing.assert_allclose(np.linalg.eigvalsh(total)[-2:], values[-2:], rtol=1e-10)
    with jax.enable_x64(True):
        slope = jax.grad(lambda p: jnp.sum(model.log_likelihood(p, Data(None, y).batch())))(jax.tree.map(jnp.asarray, params))
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(slope)) < 1e-8


@pytest.mark.parametrize("noise", ["isotropic", "diagonal"])
def test_missing_entries_are_summed_out(noise: str) -> None:
    y = holes(gaussian(20))
    model, params = bound_model(FactorModel(2, noise=noise), y)
    named = jax.tree.map(np.asarray, model.constrain(params))
    total = named["loadings"] @ named["loadings"].T + np.eye(5) * named["noise"] ** 2
    seen = np.isfinite(y)
    value = np.asarray(model.log_prob(params, y))
    for row, there, got in zip(y, seen, value, strict=True):
        want = multivariate_normal(named["mean"][there], total[np.ix_(there, there)]).logpdf(row[there]) if there.any() else 0.0
        assert abs(got - want) < 1e-9
    mean, spread = model.encode(params, y)
    np.testing.assert_allclose(mean[3], 0.0, atol=1e-12)
    np.testing.assert_allclose(spread[3], np.eye(2), atol=1e-12)


@pytest.mark.parametrize("columns", [Columns((0.5, 2.0), (1.0, 3.0), shared=True), Columns((0.5, 2.0), (1.0, 3.0))], ids=["shared", "own"])
def test_columns_are_a_conjugate_family(columns: Columns) -> None:
    """exp⟨η, t⟩ integrates to exp A(η): E[t] by the gradient is E[t] by draws, and the mode is where the density is highest."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(6, 2))
    y = rng.normal(size=(6, 2))
    with jax.enable_x64(True):
        counts = columns.prior(2)
        data = {"cross": jnp.asarray(y.T @ u), "square": jnp.asarray(np.stack([u.T @ u] * 2))}
        if not columns.known:
            energy, number = jnp.asarray((y**2).sum(0)), jnp.full(2, 6.0)
            data |= {"energy": energy.sum() if columns.shared else energy, "number": number.sum() if columns.shared else number}
        counts = add(counts, data)
        draws = jax.vmap(lambda k: columns.natural(columns.draw(k, counts)))(jax.random.split(jax.random.key(0), 20_000))
        for want, got in zip(jax.tree.leaves(columns.expected(counts)), jax.tree.leaves(draws), strict=True):
            error = np.std(np.asarray(got), axis=0) / np.sqrt(20_000)
            assert np.all(np.abs(np.asarray(got).mean(0) - want) < 5 * error)
        best = columns.mode(counts)
        at = lambda params: columns.log_density(params, counts)
        assert all(np.abs(np.asarray(leaf)).max() < 1e-8 for leaf in jax.tree.leaves(jax.grad(at)(best)))


@pytest.mark.parametrize("family", ["bernoulli", "poisson", "categorical"])
def test_bounds_are_at_their_maximum_and_below_the_integral(family: str) -> None:
    """One factor: ∫ p(y | z) N(z) dz by quadrature, and the best q(z) = N(m, s²) by a search that knows nothing of the model's updates."""
    y = np.array(
        [[0.0, 1.0, 1.0], [1.0, np.nan, 0.0], [np.nan, np.nan, np.nan], [2.0, 0.0, 2.0] if family != "bernoulli" else [1.0, 1.0, 1.0]]
    )
    model, params = bound_model(FactorModel(1, family), y)
    named = jax.tree.map(np.asarray, model.constrain(params))
    w, offset = named["loadings"][..., 0], named["mean"]
    label = np.nan_to_num(y).astype(int)

    def density(z: float, n: int) -> float:
        eta = w * z + offset
        if family == "bernoulli":
            logs = log_expit(np.where(y[n] == 1, eta, -eta))
        elif family == "poisson":
            logs = y[n] * eta - np.exp(eta) - gammaln(y[n] + 1.0)
        else:
            logs = np.take_along_axis(log_softmax(eta, axis=1), label[n][:, None], 1)[:, 0]
        return float(np.exp(logs[np.isfinite(y[n])].sum()) * norm.pdf(z))

    def bound(q: np.ndarray, n: int) -> float:
        """E_q of a lower bound on log p(y | z), less KL(q ‖ N(0, 1)), in closed form."""
        mean, variance = q[0], np.exp(2.0 * q[1])
        m, v = w * mean + offset, w**2 * variance
        if family == "bernoulli":
            xi = np.sqrt(m**2 + v)  # where the quadratic bound is highest, its quadratic part vanishes on average
            terms = log_expit(xi) + 0.5 * (np.where(y[n] == 1, m, -m) - xi)
        elif family == "poisson":
            terms = y[n] * m - np.exp(m + 0.5 * v) - gammaln(y[n] + 1.0)
        else:
            terms = np.take_along_axis(m, label[n][:, None], 1)[:, 0] - logsumexp(m + 0.5 * v, axis=1)
        return float(terms[np.isfinite(y[n])].sum() - 0.5 * (variance + mean**2 - 1.0) + q[1])

    value = np.asarray(model.log_prob(params, y))
    exact = np.log([quad(density, -10, 10, args=(n,), epsabs=1e-12)[0] for n in range(4)])
    best = [-minimize(lambda q, n: -bound(q, n), np.zeros(2), args=(n,), tol=1e-10).fun for n in range(4)]
    np.testing.assert_allclose(value, best, rtol=0, atol=1e-7)
    assert np.all(value <= exact + 1e-9) and abs(value[2]) < 1e-9  # nothing seen, nothing learned
    with jax.enable_x64(True):  # the gradient of the bound, its optimum moving along: by finite differences
        batch = Data(None, y).batch()
        total = jax.jit(lambda w: jnp.sum(model.log_likelihood({"columns": {"weights": w}}, batch)))
        at = jnp.asarray(params["columns"]["weights"])
        way = jnp.asarray(np.random.default_rng(0).normal(size=at.shape))
        numeric = (total(at + 1e-5 * way) - total(at - 1e-5 * way)) / 2e-5
        assert abs(float(jnp.vdot(jax.grad(total)(at), way) - numeric)) < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        FactorModel(2, noise="isotropic"),
        FactorModel(2, "bernoulli", ard=True),
    ],
    ids=["ppca", "bernoulli"],
)
def test_no_step_lowers_the_bound(model: FactorModel) -> None:
    y = holes(gaussian(40))
    y = np.where(np.isnan(y), y, y > np.nanmean(y, axis=0)) if model.family == "bernoulli" else y
    for method, name in ((al.EM(num_steps=30, num_restarts=1), "objective"), (al.CAVI(num_steps=30, num_restarts=1), "bound")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", al.HealthWarning)  # so few steps do not converge
            fit = al.fit(0, model, y, method)
        trace = fit.info[name].ravel()
        trace = trace[trace != 0.0]  # steps that only look for a start have no value
        rounding = np.finfo(np.float32).eps * np.abs(trace).max()  # of the trace; the status judges in double precision
        assert "fell" not in fit.status and np.diff(trace).min() >= -rounding and trace[-1] > trace[0] + 1.0
    # The bound is one: below the log evidence, which importance sampling from q bounds from below in turn, on average.
    if model.family == "gaussian" and not model.ard:
        with jax.enable_x64(True):
            bound_to, batch = fit.model, Data(None, y).batch()
            draws = jax.tree.map(jnp.asarray, fit.sample(1, 2000))
            counts = jax.tree.map(jnp.asarray, fit.posterior.counts)
            own = lambda p: bound_to.columns.log_prior(p["columns"], counts["columns"])
            logs = np.asarray(jax.lax.map(lambda p: jnp.sum(bound_to.log_likelihood(p, batch)) + bound_to.log_prior(p) - own(p), draws))
        assert fit.log_evidence.value < logs.mean() < logsumexp(logs) - np.log(2000)  # z integrated out: closer than q(z) q(θ)


def test_relevance_finds_the_number_of_factors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(0, FactorModel(5, noise="isotropic", ard=True), gaussian(200, d=8), al.CAVI(num_steps=200, num_restarts=1))
    assert "fell" not in fit.status
    shares = fit.model.relevance(fit)
    assert shares[1] > 0.05 and shares[2] < 0.005


def test_imputations_are_as_good_as_with_known_parameters_and_calibrated() -> None:
    whole = gaussian(150)
    y = holes(whole)
    fit = al.fit(0, FactorModel(2, noise="isotropic"), y, al.CAVI(num_restarts=1))
    draws = fit.model.impute(1, fit, y, num_samples=400)
    gone = np.isnan(y)
    assert np.array_equal(draws[:, ~gone], np.broadcast_to(y[~gone], (400, int((~gone).sum()))))
    loadings, mean = truth()
    total, oracle = loadings @ loadings.T + 0.09 * np.eye(5), np.where(gone, mean, y)
    for row, there in zip(oracle, ~gone, strict=True):
        row[~there] += total[np.ix_(~there, there)] @ np.linalg.solve(total[np.ix_(there, there)], row[there] - mean[there])
    error = lambda guess: float(np.sqrt(np.mean((guess - whole)[gone] ** 2)))
    assert error(draws.mean(0)) < 1.1 * error(oracle)
    low, high = np.quantile(draws[:, gone], [0.05, 0.95], axis=0)
    inside = np.mean((low < whole[gone]) & (whole[gone] < high))
    assert abs(inside - 0.9) < 5 * np.sqrt(0.09 / gone.sum())


@pytest.mark.parametrize("family", ["poisson", "categorical"])
def test_families_without_closed_steps_are_fitted_by_gradients(family: str) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(60, 1))
    eta = z @ np.array([[1.5, -1.5, 1.0, 1.0]])
    y = rng.poisson(np.exp(eta)).astype(float) if family == "poisson" else (rng.random(eta.shape) < expit(2 * eta)).astype(float)
    y[0, 0] = np.nan
    fit = al.fit(0, FactorModel(1, family), y, al.MAP(num_steps=150))
    score, _ = fit.model.encode(fit.posterior.params, y)
    assert abs(np.corrcoef(np.asarray(score)[:, 0], z[:, 0])[0, 1]) > 0.7
    draws = fit.model.impute(1, fit, y, num_samples=10)
    assert np.isfinite(draws).all() and np.all(draws[:, 0, 0] == np.floor(draws[:, 0, 0]))
    with pytest.raises(al.ModelError, match="no closed maximisation step"):
        al.fit(0, FactorModel(1, family), y, al.EM(num_steps=2))


def test_extreme_data_have_answers() -> None:
    constant = gaussian(6)
    constant[:, 2] = 4.0
    for y in (constant, constant[:1]):  # a constant column, K > N; one observation
        fit = al.fit(0, FactorModel(7), y, al.CAVI(num_restarts=1, num_steps=300, tolerance=1e-4))
        assert np.isfinite(fit.log_evidence.value)
        assert np.isfinite(fit.model.log_prob(jax.tree.map(lambda leaf: leaf[0], fit.sample(0, 1)), y)).all()


def test_bad_input_is_refused() -> None:
    y = gaussian(8)
    with pytest.raises(al.DataError, match="zeros and ones"):
        FactorModel(2, "bernoulli").bind(None, y)
    with pytest.raises(al.DataError, match="whole numbers"):
        FactorModel(2, "poisson").bind(None, y)
    with pytest.raises(al.DataError, match="Every entry is missing"):
        FactorModel(2).bind(None, np.full((3, 2), np.nan))
    with pytest.raises(al.ModelError, match="Unknown family"):
        FactorModel(2, "gamma")
    with pytest.raises(al.ModelError, match="needs factors"):
        FactorModel(0)
    with pytest.raises(al.ModelError, match="Only probabilistic PCA"):
        FactorModel(2).bind(None, y).maximum_likelihood(y)
    with pytest.raises(al.DataError, match="Entries are missing"):
        FactorModel(2, noise="isotropic").bind(None, y).maximum_likelihood(holes(y))
    with pytest.raises(al.ModelError, match="cannot be drawn"):
        al.fit(0, FactorModel(1, "bernoulli"), (y > 0).astype(float), al.Gibbs(num_samples=2, num_warmup=1, num_chains=1))


@pytest.mark.parametrize("noise", ["isotropic", "diagonal"])
def test_rows_with_holes_are_judged_by_what_is_there_also_after_a_fit_to_whole_rows(noise):
    """Missing entries were taken for entries at the mean when the data of the fit had none."""
    y = gaussian()
    fit = al.fit(0, FactorModel(2, noise=noise), y, al.EM(num_steps=2000))
    named = fit.model.constrain(fit.posterior.params)
    loadings, mean = np.asarray(named["loadings"], float), np.asarray(named["mean"], float)
    covariance = loadings @ loadings.T + np.eye(len(mean)) * np.asarray(named["noise"], float) ** 2
    asked = y[:4].copy()
    asked[0, 1], asked[1, :4], asked[2] = np.nan, np.nan, np.nan
    exact = []
    for row in asked:
        seen = np.isfinite(row)
        exact.append(multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(row[seen]) if seen.any() else 0.0)
    np.testing.assert_allclose(al.latent.log_prob(1, fit, asked), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "wrong"), [("bernoulli", 0.5), ("poisson", -1.0), ("categorical", 3.0)])
def test_questions_about_rows_the_family_cannot_emit_are_refused(family, wrong):
    y = np.random.default_rng(0).integers(0, 2 if family == "bernoulli" else 3, (20, 3)).astype(float)
    fit = al.fit(0, FactorModel(1, family), y, al.MAP(num_steps=2))
    asked = np.array([[wrong, 1.0, np.nan]])
    for ask in (
        lambda: al.latent.log_prob(1, fit, asked),
        lambda: al.latent.conditional(1, fit, asked, 2),
        lambda: fit.model.encode(fit.posterior.params, asked),
    ):
        with pytest.raises(al.DataError, match="cannot emit"):
            ask()
