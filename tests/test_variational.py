"""Variational inference: exact answers where they are known, unbiased gradients everywhere, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import diagnostics
from aleator.data import Data
from aleator.methods import variational
from aleator.methods._plan import make_plan
from aleator.model import signature

from .conformance import cases

X, Y = cases.regression()
LOGISTIC_X, LOGISTIC_T = np.array([-2, -1, 0, 0.5, 1, 2], np.float32)[:, None], np.array([0, 0, 1, 0, 1, 1])
LOGISTIC_EVIDENCE = -3.996067


@pytest.fixture(scope="module")
def exact() -> al.Fit:
    return al.fit(0, cases.linear_model(), (X, Y), al.Exact())


def precise(**settings) -> al.Variational:
    """Sticking the landing on all rows with a decaying rate: its noise vanishes at the optimum of a family that holds the posterior."""
    return al.Variational(**({"estimator": "stl", "num_steps": 3000, "num_draws": 4, "learning_rate": 0.02} | settings))


def covariance(fit: al.Fit) -> np.ndarray:
    operator = fit.posterior.operator
    root = np.asarray(jax.vmap(operator.sqrt_matvec)(jnp.eye(operator.num_noise)), float)
    return root.T @ root


def weights(fit: al.Fit) -> np.ndarray:
    return np.asarray(fit.posterior.mean["network"]["weight"], float)


# ---- the linear-Gaussian model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["full_rank", al.families.LowRank(3), "matrix_normal"])
def test_families_that_hold_the_posterior_find_it(family, exact: al.Fit) -> None:
    """One row of weights, four of them: a matrix normal is then as rich as the full covariance, and so is rank 3 plus a diagonal."""
    fit = al.fit(0, cases.linear_model(), (X, Y), precise(family=family))
    sigma = exact.posterior.operator.covariance()[0]
    np.testing.assert_allclose(weights(fit), exact.posterior.mean, atol=1e-3 * np.abs(exact.posterior.mean).max())
    tolerance = 1e-3 if family == "full_rank" else 2e-2
    np.testing.assert_allclose(covariance(fit), sigma, atol=tolerance * np.abs(sigma).max())
    assert fit.log_evidence.kind == "lower bound"
    assert abs(fit.log_evidence.value - exact.log_evidence.value) < 1e-3 + 5 * fit.log_evidence.stderr
    assert fit.log_evidence.stderr < 1e-2 and "k̂" in fit.status
    if family == "full_rank":
        assert abs(fit.log_evidence.value - exact.log_evidence.value) < 1e-3


def test_mean_field_optimum(exact: al.Fit) -> None:
    """Means are exact and variances 1/diag(Λ); the bound is ½ log |diag(Λ)Σ| nats below the evidence."""
    fit = al.fit(
        0, cases.linear_model(), (X, Y), al.Variational(estimator="analytic", num_steps=1500, learning_rate=0.03, num_evidence=4000)
    )
    sigma = exact.posterior.operator.covariance()[0]
    diagonal = np.diag(np.linalg.inv(sigma))
    np.testing.assert_allclose(np.asarray(fit.posterior.operator.scale) ** 2, 1 / diagonal, rtol=1e-3)
    np.testing.assert_allclose(weights(fit), exact.posterior.mean, atol=1e-3)
    gap = 0.5 * np.linalg.slogdet(np.diag(diagonal) @ sigma)[1]
    assert abs(exact.log_evidence.value - gap - fit.log_evidence.value) < 5 * fit.log_evidence.stderr
    assert fit.log_evidence.stderr < gap / 5
    assert {row["treatment"] for row in fit.manifest["sites"]} == {"in closed form"}


@pytest.mark.parametrize("batch_size", [1, 7, None])
def test_batch_size_does_not_change_the_optimum(batch_size: int | None, exact: al.Fit) -> None:
    """N/n is in the right place: means and scales agree with the optimum to the noise of the last steps (cosine to zero)."""
    fit = al.fit(1, cases.linear_model(), (X, Y), al.Variational(num_steps=6000, batch_size=batch_size, learning_rate=0.01, num_evidence=0))
    sigma = exact.posterior.operator.covariance()[0]
    scale = np.diag(np.linalg.inv(sigma)) ** -0.5
    assert np.max(np.abs(weights(fit) - exact.posterior.mean) / scale) < (0.1 if batch_size is None else 0.5)
    np.testing.assert_allclose(np.log(np.asarray(fit.posterior.operator.scale) / scale), 0.0, atol=0.1)
    assert fit.log_evidence is None


def test_data_term_and_kl_are_logged_apart(exact: al.Fit) -> None:
    fit = al.fit(0, cases.linear_model(), (X, Y), precise(family="full_rank", num_steps=1000))
    bound = fit.info["log_likelihood"] - fit.info["kl"]
    assert abs(bound[900:1000].mean() - exact.log_evidence.value) < 0.05
    assert (fit.info["kl"][100:] > 0).mean() > 0.9


# ---- gradients --------------------------------------------------------------------------------------------------------------------


def gradients(method: al.Variational, model, x, y, seed: int, number: int = 3000, scale: float = 0.3, num_data: int = 50) -> np.ndarray:
    """Many gradients of the objective at one point, (number, size of φ)."""
    bound = model.bind(x, y)
    target = al.Target(bound, num_data, 1.0, signature(x))
    plan, _ = make_plan(method, target)
    start = bound.init(jax.random.key(0))
    parts, rest = plan.layout.split(start)
    q = plan.family.init(jax.random.key(7), parts, scale)
    batch = Data(x, y).batch()
    slope = jax.grad(lambda q, key: variational.objective(key, q, rest, batch, plan)[0])
    one = lambda key: jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(slope(q, key))])
    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=250))(jax.random.split(jax.random.key(seed), number)), float)


ESTIMATORS = {
    "antithetic": {"estimator": "weight", "num_draws": 2, "antithetic": True},
    "local": {"estimator": "local"},
    "flipout": {"estimator": "flipout", "num_draws": 2},
    "stl": {"estimator": "stl"},
    "score": {"estimator": "score", "num_draws": 8},
    "renyi, 1": {"divergence": al.Renyi(1.0 - 1e-3), "num_draws": 2},
}


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return gradients(al.Variational(estimator="weight"), small(), X[:6], Y[:6, None], 0)


def small() -> al.BNN:
    return al.BNN(al.networks.MLP(3, (2,), 1, activation="tanh"), al.Gaussian(0.5), al.Normal(1.0))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_all_estimators_have_the_same_mean(name: str, reference: np.ndarray) -> None:
    """A network of one hidden layer uses each weight once per row, so local reparameterisation is exact too."""
    ours = gradients(al.Variational(**ESTIMATORS[name]), small(), X[:6], Y[:6, None], 1)
    error = np.hypot(ours.std(0), reference.std(0)) / np.sqrt(len(ours))
    assert np.all(np.abs(ours.mean(0) - reference.mean(0)) < 5 * error + 1e-4 * np.abs(reference.mean(0)))
    if name == "local":
        assert ours.var(0).sum() < 0.5 * reference.var(0).sum()


@pytest.mark.parametrize("family", ["full_rank", al.families.MixtureOfGaussians(2), al.families.Flow(2, 4), "matrix_normal"])
def test_sticking_the_landing_is_unbiased_for_every_family(family) -> None:
    model, x, y = cases.linear_model(), X[:6], Y[:6, None]
    a = gradients(al.Variational(family=family, estimator="weight"), model, x, y, 2)
    b = gradients(al.Variational(family=family, estimator="stl"), model, x, y, 3)
    error = np.hypot(a.std(0), b.std(0)) / np.sqrt(len(a))
    assert np.all(np.abs(a.mean(0) - b.mean(0)) < 5 * error + 1e-5)


def test_doubly_reparameterised_gradient_is_that_of_the_bound(monkeypatch) -> None:
    """Against the plain gradient, at a narrow q whose draws all have a share in the bound."""
    model, x, y = cases.linear_model(), X[:6], Y[:6, None]
    method = al.Variational(divergence=al.Renyi(0.3), num_draws=3)
    doubly = gradients(method, model, x, y, 4, scale=0.05, num_data=6)
    monkeypatch.setattr(variational.Plan, "doubly", False)
    plain = gradients(method, model, x, y, 5, scale=0.05, num_data=6)
    error = np.hypot(doubly.std(0), plain.std(0)) / np.sqrt(len(plain))
    assert np.all(np.abs(doubly.mean(0) - plain.mean(0)) < 5 * error)


# ---- other models -----------------------------------------------------------------------------------------------------------------


def logistic_model() -> al.LinearModel:
    return al.LinearModel(al.features.Identity(), al.Bernoulli(), al.Normal(2.0))


def test_logistic_bound_and_the_flow_that_closes_it() -> None:
    common = {"initial_scale": 0.5, "num_steps": 1200, "num_draws": 8, "learning_rate": 0.02, "num_evidence": 20_000}
    gaussian = al.fit(0, logistic_model(), (LOGISTIC_X, LOGISTIC_T), precise(family="full_rank", **common)).log_evidence
    flow = al.fit(0, logistic_model(), (LOGISTIC_X, LOGISTIC_T), precise(family=al.families.Flow(2, 8), **common))
    gap = LOGISTIC_EVIDENCE - gaussian.value
    assert 5 * gaussian.stderr < gap < 0.1
    closed = LOGISTIC_EVIDENCE - flow.log_evidence.value
    assert -5 * flow.log_evidence.stderr < closed < 0.5 * gap
    draws = flow.sample(3, 5)["network"]["weight"]
    assert draws.shape == (5, 1, 2)


def test_importance_weighted_estimate_is_the_evidence() -> None:
    method = al.Variational(
        family="full_rank", divergence="importance_weighted", num_draws=16, initial_scale=0.5, num_steps=800, num_evidence=200_000
    )
    fit = al.fit(0, logistic_model(), (LOGISTIC_X, LOGISTIC_T), method)
    weighted = float(fit.status.split("log evidence ")[1].split(",")[0])
    assert abs(weighted - LOGISTIC_EVIDENCE) < 5 / np.sqrt(200_000)  # relative weights have a standard deviation below 1
    assert any("Rényi" in line or "importance" in line for line in fit.manifest["departures"])


def test_forward_kl_matches_the_moments(exact: al.Fit) -> None:
    """Mean-field by forward KL has the posterior's own marginal variances, which the ELBO's are below."""
    method = al.Variational(divergence="forward_kl", num_draws=256, num_steps=1500, learning_rate=0.02, initial_scale=0.1)
    fit = al.fit(0, cases.linear_model(), (X, Y), method)
    np.testing.assert_allclose(np.asarray(fit.posterior.operator.scale) ** 2, np.diag(exact.posterior.operator.covariance()[0]), rtol=0.05)


def test_program_with_a_constrained_parameter() -> None:
    """ADVI: 7 heads in 10 under a flat prior, on the logit scale; the evidence is B(8, 4) = 1/1320."""
    import numpyro
    import numpyro.distributions as dist

    def coin(x, y=None):
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        with numpyro.plate("flips", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(p), obs=y)

    flips = np.array([1, 1, 1, 0, 1, 0, 1, 1, 0, 1])
    fit = al.fit(0, al.from_numpyro(coin), (np.zeros((10, 1)), flips), precise(num_steps=1500, initial_scale=0.5, num_evidence=4000))
    u = np.linspace(-8, 8, 4001)
    log_joint = -8 * np.logaddexp(0, -u) - 4 * np.logaddexp(0, u)  # with the Jacobian p(1 − p)

    def bound(m: float, s: float) -> float:
        q = np.exp(-0.5 * ((u - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))
        return np.trapezoid(q * log_joint, u) + np.log(s) + 0.5 * (1 + np.log(2 * np.pi))

    from scipy.optimize import minimize

    best = minimize(lambda v: -bound(v[0], np.exp(v[1])), [0.5, -0.5])
    assert abs(float(fit.posterior.mean["p"]) - best.x[0]) < 0.01
    assert abs(np.log(float(fit.posterior.operator.scale[0])) - best.x[1]) < 0.01
    assert abs(fit.log_evidence.value + best.fun) < 5 * fit.log_evidence.stderr + 1e-4
    assert fit.log_evidence.value < np.log(1 / 1320) + 5 * fit.log_evidence.stderr


def test_bare_density() -> None:
    target = al.target_from_log_density(
        lambda p: -0.5 * ((p["a"] - 1.0) / 2.0) ** 2 - 0.5 * jnp.sum(p["b"] ** 2), {"a": 0.0, "b": np.zeros(2)}
    )
    fit = al.fit(0, target, None, precise(num_steps=1500, initial_scale=1.0, num_evidence=100))
    assert abs(float(fit.posterior.mean["a"]) - 1.0) < 1e-2
    np.testing.assert_allclose(fit.posterior.operator.scale, [2.0, 1.0, 1.0], rtol=1e-2)
    assert abs(fit.log_evidence.value - (np.log(2.0) + 1.5 * np.log(2 * np.pi))) < 1e-2


def test_learned_noise_and_hierarchical_scales_are_in_q() -> None:
    model = al.BNN(al.networks.MLP(3, (4,), 1, activation="tanh"), al.Gaussian(), al.priors.Hierarchical())
    fit = al.fit(0, model, (X, Y), al.Variational(num_steps=300))
    variance = fit.posterior.variance()
    assert all(np.all(np.asarray(leaf) > 0) for leaf in jax.tree.leaves(variance)) and jax.tree.leaves(variance["prior"])
    kinds = {row["path"]: row["treatment"] for row in fit.manifest["sites"]}
    assert kinds["network.layer0.weight"] == "local, exact"
    assert all(kind.startswith("weight space") for path, kind in kinds.items() if not path.startswith("network"))
    point = al.fit(0, model, (X, Y), al.Variational(num_steps=50, over="network.*"))
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(point.posterior.variance()["prior"]))
    assert np.ptp(np.asarray(point.sample(1, 50)["likelihood"]["log_scale"])) == 0


def test_noise_by_maximum_likelihood(exact: al.Fit) -> None:
    """With σ a point parameter under mean-field weights: σ² = [Σ (y − f)² + Σ Var f]/N, up to its weak prior."""
    fit = al.fit(
        0,
        al.LinearModel(al.features.Identity(), al.Gaussian(), al.Normal(1.0)),
        (X, Y),
        al.Variational(estimator="analytic", over="network.*", num_steps=2500, learning_rate=0.02),
    )
    phi = np.column_stack([np.ones(len(X)), X]).astype(float)
    spread = phi**2 @ np.asarray(fit.posterior.operator.scale, float) ** 2
    expected = np.mean((Y - phi @ weights(fit)[0]) ** 2 + spread)
    sigma = float(np.exp(fit.posterior.mean["likelihood"]["log_scale"])[0])
    assert abs(sigma**2 / expected - 1) < 0.1  # the prior on σ is worth about one of the 40 rows


def test_last_layer_over_a_mode_and_its_analytic_bound() -> None:
    model = al.BNN(al.networks.MLP(3, (6,), 1, activation="tanh"), al.Gaussian(0.3), al.Normal(1.0))
    mode = al.fit(0, model, (X, Y), al.MAP(num_steps=500))
    fits = {
        name: al.fit(
            1, model, (X, Y), al.Variational(estimator=name, over="last_layer", rest="fixed", num_steps=1500, num_evidence=500), init=mode
        )
        for name in ("analytic", "local")
    }
    for fit in fits.values():
        np.testing.assert_array_equal(
            fit.posterior.mean["network"]["layer0"]["weight"], mode.posterior.params["network"]["layer0"]["weight"]
        )
        assert fit.posterior.chosen == (False, False, True, True)
    a, b = (fits[name].log_evidence for name in ("analytic", "local"))
    assert abs(a.value - b.value) < 5 * np.hypot(a.stderr, b.stderr) + 0.1
    full = al.fit(
        1,
        model,
        (X, Y),
        al.Variational(family="full_rank", estimator="analytic", over="last_layer", rest="fixed", num_steps=1500),
        init=mode,
    ).log_evidence
    assert full.value > a.value - 5 * np.hypot(a.stderr, full.stderr)


def step_network() -> tuple:
    """Outputs without a slope: the sign of a sum, and a shift that is rounded."""
    start = {"w": jnp.asarray([0.1, -0.1]), "b": jnp.zeros(())}
    return lambda p, x: (jnp.sign(x @ p["w"]) + jnp.round(p["b"]))[:, None], start


def test_score_function_fits_a_network_without_gradients() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = np.sign(x @ [1.0, 0.5]).astype(np.float32)
    model = al.BNN(step_network(), al.Gaussian(0.5), al.Normal(1.0))
    with pytest.raises(al.MethodError, match="estimator='score'"):
        al.fit(0, model, (x, y), al.Variational(num_steps=5))
    method = al.Variational(estimator="score", num_draws=32, num_steps=1500, learning_rate=0.03, initial_scale=0.5)
    fit = al.fit(0, model, (x, y), method)
    predictive = fit.predict(1, x)
    assert np.mean(np.sign(predictive.mean) == y) > 0.9
    assert fit.info["log_likelihood"][-200:].mean() > fit.info["log_likelihood"][:50].mean() + 50


def test_priors_without_a_closed_form_use_a_draw() -> None:
    """Under a Laplace prior the local estimator draws weights for the prior: same bound as in weight space."""
    model = al.BNN(al.networks.MLP(3, (2,), 1, activation="tanh"), al.Gaussian(0.5), al.priors.Laplace(0.02))
    a = gradients(al.Variational(estimator="weight"), model, X[:6], Y[:6, None], 2, num_data=6)
    b = gradients(al.Variational(estimator="local"), model, X[:6], Y[:6, None], 3, num_data=6)
    error = np.hypot(a.std(0), b.std(0)) / np.sqrt(len(a))
    assert np.all(np.abs(a.mean(0) - b.mean(0)) < 5 * error)


# ---- what is recorded, saved, refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["full_rank", "matrix_normal", al.families.LowRank(2), al.families.MixtureOfGaussians(2), al.families.Flow(2, 4)], ids=repr
)
def test_every_family_saves_and_loads_the_same_bits(family, tmp_path) -> None:
    fit = al.fit(0, cases.linear_model(), (X, Y), al.Variational(family=family, num_steps=20, num_evidence=8))
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit")
    np.testing.assert_array_equal(fit.predict(3, X, 20).mean, again.predict(3, X, 20).mean)
    assert again.log_evidence == fit.log_evidence and again.method == fit.method


def test_departures_from_bayes_are_named() -> None:
    plain = al.fit(0, cases.linear_model(), (X, Y), al.Variational(num_steps=5))
    assert plain.manifest["departures"] == []
    fit = al.fit(0, cases.linear_model(), (X, Y), al.Variational(num_steps=5, kl_warmup=3), temperature=0.5)
    assert fit.log_evidence is None
    assert any("temperature 0.5" in line for line in fit.manifest["departures"])
    assert any("warm-up" in line for line in fit.manifest["departures"])


def test_temperature_narrows_q(exact: al.Fit) -> None:
    method = al.Variational(estimator="analytic", num_steps=1500, learning_rate=0.03)
    fit = al.fit(0, cases.linear_model(), (X, Y), method, temperature=0.25)
    diagonal = np.diag(np.linalg.inv(exact.posterior.operator.covariance()[0]))
    np.testing.assert_allclose(np.asarray(fit.posterior.operator.scale) ** 2 * diagonal, 0.25, rtol=1e-2)


def test_warm_up_begins_with_the_data_alone() -> None:
    target = al.Target(cases.linear_model().bind(X, Y[:, None]), cases.N, 1.0, signature(X))
    plan, _ = make_plan(al.Variational(estimator="analytic", kl_warmup=10), target)
    parts, rest = plan.layout.split(target.init(jax.random.key(0)))
    q, batch = plan.family.init(jax.random.key(1), parts, 0.3), Data(X, Y[:, None]).batch()
    value = lambda number: [float(v) for v in variational.objective(jax.random.key(2), q, rest, batch, plan, number)]
    for number, ramp in ((0, 0.1), (4, 0.5), (9, 1.0), (50, 1.0)):
        total, data, kl = value(number)
        assert total == pytest.approx(data - ramp * kl, rel=1e-5)


def test_convolutions_are_named_approximate() -> None:
    x = np.zeros((20, 28, 28, 1), np.float32)
    model = al.BNN(al.networks.LeNet5(out_size=3), al.Categorical(3)).bind(x, np.arange(20) % 3)
    notes = al.Variational().build(al.Target(model, 20, 1.0, signature(x))).notes
    kinds = [row["treatment"] for row in notes["sites"]]
    assert any(kind.startswith("local, approximate: used at") for kind in kinds) and "local, exact" in kinds


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"family": "meanfield"}, "mean_field"),
        ({"estimator": "locl"}, "local"),
        ({"estimator": "score"}, "num_draws ≥ 2"),
        ({"estimator": "local", "antithetic": True, "num_draws": 2}, "pairs"),
        ({"antithetic": True}, "even num_draws"),
        ({"divergence": "reverse"}, "Unknown divergence"),
        ({"divergence": al.Renyi(0.5)}, "num_draws ≥ 2"),
        ({"divergence": al.Renyi(0.5), "num_draws": 4, "estimator": "local"}, "draws of weights"),
        ({"rest": "frozen"}, "joint"),
        ({"kl_warmup": -1}, "kl_warmup"),
        ({"initial_scale": 0.0}, "initial_scale"),
        ({"optimizer": "lbfgs"}, "L-BFGS"),
        ({"num_drawz": 2}, "num_draws"),
    ],
)
def test_settings_that_do_not_work(settings: dict, said: str) -> None:
    with pytest.raises(al.MethodError, match=said):
        al.Variational(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"over": "network.layer9.*"}, "layer0.weight"),
        ({"family": "full_rank", "estimator": "local"}, "family='mean_field'"),
        ({"estimator": "analytic"}, "not linear"),
        ({"over": "likelihood.*", "estimator": "local"}, "no site"),
    ],
)
def test_targets_that_do_not_fit(settings: dict, said: str) -> None:
    with pytest.raises(al.MethodError, match=said):
        al.fit(0, cases.network_model(), (X, Y), al.Variational(num_steps=2, **settings))


def test_a_network_without_sites() -> None:
    network = (lambda p, x: jnp.tanh(x[:, :1] - p["shift"]) * jnp.exp(p["log"]), {"shift": jnp.zeros(1), "log": jnp.zeros(1)})
    model = al.BNN(network, al.Gaussian(0.3), al.Normal(1.0))
    with pytest.raises(al.MethodError, match="no site"):
        al.fit(0, model, (X, Y), al.Variational(num_steps=2, estimator="local"))
    fit = al.fit(0, model, (X, Y), al.Variational(num_steps=20))
    assert fit.manifest["estimator"] == "weight"


def test_pareto_shape_of_known_tails() -> None:
    """w = u^(−k) has a Pareto tail of shape k; the fit is shrunk towards ½ by ten of its 95 tail draws."""
    rng = np.random.default_rng(0)
    for k in (0.2, 0.5, 0.9):
        found = np.mean([diagnostics.pareto_k(-k * np.log(rng.uniform(size=1000))) for _ in range(50)])
        assert abs(found - (95 * k + 5) / 105) < 0.1
    assert diagnostics.pareto_k(np.zeros(100)) == -np.inf
