"""Laplace: exact where the log joint is quadratic, known values where it is not, one answer however the data are cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.methods import _whitened
from aleator.posterior.linearised import Linearised, _linked
from tests.conformance import cases

QUICK = al.MAP(num_steps=400)
XS = np.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0])
YS = np.array([-1.2, -0.9, -0.6, 0.5, 1.0, 1.1])


def linear(noise: Any = 0.3, prior: float = 1.5) -> al.LinearModel:
    return al.LinearModel(al.features.Polynomial(3), noise if isinstance(noise, al.Gaussian) else al.Gaussian(noise), al.Normal(prior))


def curve(seed: int = 0, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1.0, 1.0, n)
    return x, np.sin(2.0 * x) + 0.1 * np.random.default_rng(seed).normal(size=n)


def classes(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    return x, (np.stack([2 * x[:, 0], x[:, 1], -x[:, 2]], axis=1) + rng.gumbel(size=(n, 3))).argmax(axis=1)


def classifier() -> al.BNN:
    return al.BNN(al.networks.MLP(3, (5,), 3, activation="tanh"), al.Categorical(3), al.Normal(1.0))


@pytest.fixture(scope="module")
def mode() -> al.Fit:
    return al.fit(0, classifier(), classes(), al.MAP(num_steps=800), progress=False)


# ---- exact oracles --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight() -> tuple[al.Fit, al.Fit]:
    """The exact posterior of a linear model, and its full Laplace."""
    return tuple(al.fit(0, linear(), curve(), method, progress=False) for method in (al.Exact(), al.Laplace("full", base=QUICK)))  # type: ignore[return-value]


def test_a_linear_model_is_exact(straight: tuple[al.Fit, al.Fit]) -> None:
    exact, laplace = straight
    at = np.linspace(-2.0, 2.0, 9)
    assert abs(laplace.log_evidence.value - exact.log_evidence.value) < 1e-8
    for name in ("mean", "variance", "epistemic"):
        np.testing.assert_allclose(getattr(laplace.predict(1, at), name), getattr(exact.predict(1, at), name), rtol=1e-8, atol=1e-9)


def test_the_joint_covariance_of_a_linear_model_is_exact(straight: tuple[al.Fit, al.Fit]) -> None:
    exact, laplace = straight
    at = np.linspace(-2.0, 2.0, 5)
    for got, want in zip(laplace.joint(1, at), exact.joint(1, at), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9)
    mean, covariance = exact.joint(1, at)
    predicted = exact.predict(1, at)
    np.testing.assert_allclose(mean[:, 0], predicted.mean, atol=1e-12)
    np.testing.assert_allclose(np.diagonal(covariance[:, 0, :, 0]), predicted.epistemic, rtol=1e-9)
    # Neighbours move together, and draws of whole functions show it.
    drawn = exact.functions(2, at, num_samples=4000)
    np.testing.assert_allclose(np.cov(drawn.T), covariance[:, 0, :, 0], atol=5 * covariance.max() / np.sqrt(4000))


def test_the_joint_covariance_of_a_network_agrees_with_its_rows_and_its_draws(mode: al.Fit) -> None:
    fit = al.fit(0, classifier(), classes(), al.Laplace("kron"), init=mode.posterior.params, progress=False)
    x = classes()[0][:3]
    mean, covariance = fit.joint(1, x)
    row_mean, row_covariance = fit.posterior.moments(fit.model, x)
    np.testing.assert_allclose(mean, row_mean, atol=1e-5)
    for i in range(3):
        np.testing.assert_allclose(covariance[i, :, i, :], row_covariance[i], rtol=1e-3, atol=1e-5)
    drawn = np.asarray(fit.posterior.functions(jax.random.key(2), fit.model, x, 4000).draws).reshape(4000, -1)
    np.testing.assert_allclose(
        np.cov(drawn.T), covariance.reshape(9, 9), atol=5 * np.diagonal(covariance.reshape(9, 9)).max() * np.sqrt(2 / 4000)
    )
    with pytest.raises(al.ModelError, match="fewer rows"):
        fit.joint(1, np.zeros((5000, 3), np.float32))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_one_layer_with_one_output_is_a_kronecker_product(straight: tuple[al.Fit, al.Fit], structure: str) -> None:
    exact, full = straight
    fit = al.fit(0, linear(), curve(), al.Laplace(structure), init=full.posterior.mean, progress=False)
    at = np.linspace(-2.0, 2.0, 9)
    assert abs(fit.log_evidence.value - exact.log_evidence.value) < 1e-3  # the network itself runs in single precision here
    np.testing.assert_allclose(fit.predict(1, at).variance, exact.predict(1, at).variance, rtol=1e-4)


def test_a_low_rank_of_all_directions_is_full(straight: tuple[al.Fit, al.Fit]) -> None:
    exact, full = straight
    fit = al.fit(0, linear(), curve(), al.Laplace("lowrank", rank=4), init=full.posterior.mean, progress=False)
    at = np.linspace(-2.0, 2.0, 9)
    np.testing.assert_allclose(fit.predict(1, at).variance, exact.predict(1, at).variance, rtol=1e-3)


@pytest.fixture(scope="module")
def best() -> tuple[float, float, float]:
    """Prior scale and noise at which al.Exact has the largest evidence, and that evidence."""
    from scipy.optimize import minimize

    def evidence(logs: np.ndarray) -> float:
        prior, noise = np.exp(logs)
        return -al.fit(0, linear(float(noise), float(prior)), curve(), al.Exact(), progress=False).log_evidence.value

    found = minimize(evidence, np.log([1.2, 0.09]), method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-7})
    return (*np.exp(found.x), -found.fun)


def found(fit: al.Fit) -> list[float]:
    return [1.5 / np.sqrt(fit.posterior.tuned["prior_factor"][0]), np.exp(fit.posterior.mean["likelihood"]["log_scale"][0])]


def test_tuning_finds_the_maximum_of_the_exact_evidence(best: tuple[float, float, float]) -> None:
    """Prior and noise set after the fit, with the mode that belongs to them."""
    fit = al.fit(0, linear(al.Gaussian()), curve(), al.Laplace("full", tune="prior", tune_noise=True, base=QUICK), progress=False)
    np.testing.assert_allclose(found(fit), best[:2], rtol=1e-3)
    assert abs(fit.log_evidence.value - best[2]) < 1e-6
    prior, noise = (float(value) for value in found(fit))
    exact = al.fit(0, linear(noise, prior), curve(), al.Exact(), progress=False)
    at = np.linspace(-2.0, 2.0, 9)
    np.testing.assert_allclose(fit.predict(1, at).mean, exact.predict(1, at).mean, rtol=1e-5, atol=1e-6)


def test_a_condensed_spectrum_climbs_the_same_way() -> None:
    """40,000 eigenvalues over 18 orders of magnitude, zeros among them, in two groups: slopes in prior and noise factors of few means."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random(40_000) < 0.3, 0.0, np.exp(rng.uniform(-30.0, 12.0, 40_000)))
    member = rng.integers(0, 2, 40_000).astype(np.int32)
    counts = np.bincount(member).astype(float)
    with jax.enable_x64(True):
        whole = _whitened.Spectrum(values, member, counts, 0.3 * counts)
        few = _whitened.condense(whole)
        assert len(few.values) < 10_000 and few.times.sum() == 40_000
        data = _whitened.Data(np.float64(-50.0), np.float64(900.0), np.float64(1000.0), np.ones(2))
        slope = jax.jit(jax.grad(_whitened.log_evidence))
        for prior, noise in (([0.0, 0.0], 0.0), ([-3.0, 4.0], 0.5)):
            at = {"prior": np.array(prior), "noise": np.array(noise)}
            for name in at:
                np.testing.assert_allclose(slope(at, few, data)[name], slope(at, whole, data)[name], rtol=2e-5)
    small = whole._replace(values=values[:100], member=member[:100])
    assert _whitened.condense(small) is small


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_factors_learned_during_the_training(best: tuple[float, float, float], structure: str) -> None:
    """The same maximum, with mode and prior found together."""
    base = al.MAP(num_steps=3000, learning_rate=0.03)
    method = al.Laplace(structure, tune="prior", tune_noise=True, num_rounds=8, base=base)
    fit = al.fit(0, linear(al.Gaussian()), curve(), method, progress=False)
    np.testing.assert_allclose(found(fit), best[:2], rtol=2e-3)
    assert abs(fit.log_evidence.value - best[2]) < 1e-3


def test_two_weights() -> None:
    """y = w₂ tanh(w₁x) + ε: −0.755555 at one of two equal modes, by the exact Hessian; both together −0.062408 (exact: 0.003250)."""
    network = (lambda p, x: p["b"] * jnp.tanh(p["a"] * x), {"a": jnp.ones(()), "b": jnp.ones(())})
    model = al.BNN(network, al.Gaussian(0.2), al.Normal(1.0))
    fit = al.fit(0, model, (XS[:, None], YS), al.Laplace("full", curvature="hessian", base=QUICK), progress=False)
    assert abs(fit.log_evidence.value - -0.755555) < 1e-6
    assert abs(fit.log_evidence.value + np.log(2.0) - -0.062408) < 1e-6


def test_a_bare_density() -> None:
    """A Gaussian of known covariance: mean, covariance and normalising constant come back."""
    matrix = np.array([[2.0, 0.7], [0.7, 1.0]])
    target = al.target_from_log_density(lambda q: -0.5 * (q - 1.0) @ jnp.asarray(matrix, q.dtype) @ (q - 1.0), np.zeros(2))
    fit = al.fit(0, target, None, al.Laplace("full", base=QUICK), progress=False)
    operator = jax.tree.map(jnp.asarray, fit.posterior.operator)
    np.testing.assert_allclose(np.asarray(operator.factor) @ np.asarray(operator.factor).T, np.linalg.inv(matrix), rtol=1e-6)
    np.testing.assert_allclose(fit.posterior.mean, [1.0, 1.0], rtol=1e-6)
    assert abs(fit.log_evidence.value - (np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(matrix)[1])) < 1e-8


@pytest.mark.parametrize(
    ("mean", "variance", "exact", "rule"),
    [(1, 1, 0.696735, 0.700014), (1, 4, 0.647726, 0.651056), (2, 9, 0.717424, 0.718946), (-3, 25, 0.286044, 0.286564)],
)
def test_logits_of_two_classes(mean: float, variance: float, exact: float, rule: float) -> None:
    """E σ(f), f ~ N(m, v): by quadrature, and by the probit rule σ(m/√(1 + πv/8))."""
    model = al.BNN((lambda p, x: p["w"] * jnp.ones_like(x), {"w": jnp.zeros(())}), al.Bernoulli(), al.Normal(1.0), num_targets=1)
    for link, wanted in (("monte_carlo", exact), ("probit", rule)):
        operator = al.linalg.Diagonal(np.array([np.sqrt(variance)]))
        params = {"network": {"w": np.asarray(float(mean))}, "likelihood": {}, "prior": {}}
        posterior = Linearised(params, operator, np.zeros(1, np.int32), np.zeros(1), {}, None, link, True)
        outputs = posterior.outputs(jax.random.key(0), model, np.zeros((1, 1)), 10)
        chance = al.predictive.Predictive(outputs=outputs, likelihood=model.likelihood, squeeze=True).mean
        assert abs(float(np.ravel(chance)[0]) - wanted) < 2e-6


def test_logits_of_several_classes() -> None:
    """Against 400,000 draws: Monte Carlo meets the average, and the probit rule is nearer to it than the mode's own probabilities. The bridge is
    right for the logits of a Dirichlet; for others it was seen to be off by up to 0.2."""
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(3, 4))
    soft = lambda logits: np.asarray(jax.nn.softmax(logits, axis=-1))
    for spread in (0.5, 2.0):
        root = spread * (np.eye(4) + 0.1 * rng.normal(size=(3, 4, 4)))
        covariance = root @ np.swapaxes(root, 1, 2)
        truth = soft(mean + np.einsum("nij,snj->sni", root, rng.normal(size=(400_000, 3, 4)))).mean(axis=0)
        drawn = soft(_linked(jax.random.key(0), mean.astype(np.float32), covariance.astype(np.float32), "monte_carlo", 20_000))
        assert np.all(np.abs(drawn.mean(axis=0) - truth) < 5 * drawn.std(axis=0) / np.sqrt(20_000))
        found = soft(_linked(jax.random.key(1), mean, covariance, "probit", 1))[0]
        assert np.abs(found - truth).mean() < np.abs(soft(mean) - truth).mean()
    alpha = np.array([[3.0, 5.0, 9.0, 2.0]])  # logits of a Dirichlet itself: moments of log x − mean(log x), by its Laplace approximation
    variance = 0.5 / alpha + np.sum(1.0 / alpha) / 16.0
    logits = np.log(alpha) - np.log(alpha).mean()
    covariance = np.diag(1.0 / alpha[0]) - (1.0 / alpha[0][:, None] + 1.0 / alpha[0]) / 4.0 + np.sum(1.0 / alpha) / 16.0
    np.testing.assert_allclose(np.diagonal(covariance), variance[0])
    found = soft(_linked(jax.random.key(1), logits, covariance[None], "bridge", 1))[0]
    np.testing.assert_allclose(found, alpha / alpha.sum(), rtol=1e-5)


# ---- one answer ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag", "lowrank"])
def test_batches_do_not_change_the_result(mode: al.Fit, structure: str) -> None:
    x, y = classes()
    fits = [
        al.fit(0, classifier(), (x, y), al.Laplace(structure, batch_size=size, subset="all"), init=mode, progress=False) for size in (60, 7)
    ]
    a, b = (fit.predict(1, x[:10]).probs for fit in fits)
    np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
    assert abs(fits[0].log_evidence.value - fits[1].log_evidence.value) < 0.02


def test_blocks_and_rows_agree_on_functions(mode: al.Fit) -> None:
    """The Kronecker posterior's function covariances by outer products equal JΣJᵀ with everything formed."""
    from aleator import curvature

    x, y = classes()
    fit = al.fit(0, classifier(), (x, y), al.Laplace("kron"), init=mode, progress=False)
    posterior = fit.posterior
    _, spread = posterior.moments(fit.model, x[:6])
    plan = curvature.layout(fit.model, al.model.signature(x), posterior.paths)
    _, jacobian = curvature.jacobian(fit.model, posterior.mean["network"], x[:6], plan)
    formed = jax.tree.map(jnp.asarray, posterior.operator).sandwich(jacobian)
    np.testing.assert_allclose(spread, formed, rtol=1e-3, atol=1e-4)
    draws = fit.functions(2, x[:6], 4000)  # class probabilities of linearised functions
    outputs = posterior.outputs(jax.random.key(3), fit.model, x[:6], 4000).draws
    np.testing.assert_allclose(draws.mean(axis=0), np.asarray(jax.nn.softmax(outputs, -1)).mean(axis=0), atol=0.03)


def test_the_last_layer_needs_no_backward_pass(mode: al.Fit) -> None:
    """Its Kronecker identity equals the same posterior seen through Jacobians; many outputs give variances alone."""
    from aleator import curvature

    x, y = classes()
    fit = al.fit(0, classifier(), (x, y), al.Laplace("kron", subset="last_layer"), init=mode, progress=False)
    _, spread = fit.posterior.moments(fit.model, x[:6])
    plan = curvature.layout(fit.model, al.model.signature(x), fit.posterior.paths)
    assert plan.direct
    _, jacobian = curvature.jacobian(fit.model, fit.posterior.mean["network"], x[:6], plan)
    np.testing.assert_allclose(spread, jax.tree.map(jnp.asarray, fit.posterior.operator).sandwich(jacobian), rtol=1e-3, atol=1e-4)
    full = al.fit(0, classifier(), (x, y), al.Laplace("full", subset="last_layer"), init=mode, progress=False)
    _, spread_full = full.posterior.moments(full.model, x[:6])
    wanted = jax.tree.map(jnp.asarray, full.posterior.operator).sandwich(jnp.asarray(np.asarray(jacobian), spread_full.dtype))
    np.testing.assert_allclose(spread_full, wanted, rtol=1e-3, atol=1e-4)
    _, alone = full.posterior.moments(full.model, x[:6], variance=True)
    np.testing.assert_allclose(alone, np.diagonal(spread_full, axis1=1, axis2=2), rtol=1e-5, atol=1e-6)
    _, many = curvature.function_covariance(fit.model, fit.posterior.mean["network"], x[:6], plan, fit.posterior.operator, many=True)
    np.testing.assert_allclose(many, np.diagonal(spread, axis1=1, axis2=2), rtol=1e-3, atol=1e-5)


def test_a_subnetwork_is_the_widest_weights(mode: al.Fit) -> None:
    x, y = classes()
    fit = al.fit(0, classifier(), (x, y), al.Laplace("full", subset=al.Subnetwork(6)), init=mode, progress=False)
    diag = al.fit(0, classifier(), (x, y), al.Laplace("diag"), init=mode, progress=False)
    variance = np.asarray(jax.tree.map(jnp.asarray, diag.posterior.operator).diagonal())
    assert set(np.asarray(fit.posterior.index)) == set(np.argsort(variance)[-6:])
    draws = fit.sample(1, 50)["network"]
    still = np.ptp(np.concatenate([np.asarray(leaf).reshape(50, -1) for leaf in jax.tree.leaves(draws)], axis=1), axis=0) == 0.0
    assert still.sum() == len(variance) - 6


def test_sampled_weights_have_the_operator_s_moments(mode: al.Fit) -> None:
    x, y = classes()
    fit = al.fit(0, classifier(), (x, y), al.Laplace("kron", predictive="sampled"), init=mode, progress=False)
    draws = fit.sample(1, 4000)["network"]
    flat = np.concatenate([np.asarray(leaf, np.float64).reshape(4000, -1) for leaf in jax.tree.leaves(draws)], axis=1)
    wanted = np.asarray(jax.tree.map(jnp.asarray, fit.posterior.operator).diagonal(), np.float64)
    assert np.all(np.abs(flat.var(axis=0) / wanted - 1.0) < 5.0 * np.sqrt(2.0 / 4000))


def test_ensembles_mix() -> None:
    x, y = classes()
    fit = al.fit(0, classifier(), (x, y), al.Ensemble(al.Laplace("diag", base=al.MAP(num_steps=60)), 2), progress=False)
    assert fit.predict(1, x[:4], num_samples=100).probs.shape == (4, 3)
    xr, yr = cases.regression()
    fit = al.fit(0, cases.network_model(), (xr, yr), al.Ensemble(al.Laplace("kron", base=al.MAP(num_steps=60)), 2), progress=False)
    assert np.all(fit.predict(1, xr[:4], num_samples=100).epistemic > 0)


# ---- trouble ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag", "lowrank"])
def test_dead_units_and_duplicated_inputs_keep_their_prior(structure: str) -> None:
    """Where the data say nothing, the variance is the prior's: never zero, never infinite."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(20, 1)), 3, axis=1).astype(np.float32)
    x[:, 2] = 0.0
    model = al.BNN(al.networks.MLP(3, (4,), 1, activation="relu"), al.Gaussian(0.3), al.Normal(1.0))
    start = model.bind(x, x[:, 0]).start(jax.random.key(0))
    start["network"]["layer0"]["bias"] = start["network"]["layer0"]["bias"].at[0].set(-100.0)  # a unit that never fires
    fit = al.fit(0, model, (x, x[:, 0]), al.Laplace(structure, rank=5), init=start, progress=False)
    variance = np.asarray(jax.tree.map(jnp.asarray, fit.posterior.operator).diagonal(), np.float64)
    assert np.all((variance > 0) & (variance < 1.0 + 1e-4))
    unused = np.flatnonzero(np.abs(variance - 1.0) < 1e-4)
    assert len(unused) >= 5  # the third input of every unit, and all of the dead one
    assert np.all(np.isfinite(fit.predict(1, x).variance))


def test_one_row_says_so() -> None:
    with pytest.warns(al.HealthWarning, match="Only one row"):
        fit = al.fit(0, linear(), (np.array([0.5]), np.array([0.3])), al.Laplace("full", base=QUICK), progress=False)
    assert np.isfinite(fit.log_evidence.value)


def test_priors_that_do_not_curve_down_are_replaced() -> None:
    """A Laplace prior is flat beside its peak: its own spread stands in, and the number of weights is told."""
    x, y = cases.regression()
    model = al.BNN(al.networks.MLP(cases.D, (4,), 1, activation="tanh"), al.Gaussian(0.3), al.priors.Laplace(1.0))
    fit = al.fit(0, model, (x, y), al.Laplace("diag", base=QUICK), progress=False)
    assert int(fit.posterior.tuned["replaced"]) == 21
    assert np.all(np.isfinite(fit.predict(1, x).variance))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"structure": "round"}, "structure"),
        ({"structure": "kron", "tune": "parameter"}, "diagonal"),
        ({"structure": "lowrank", "tune": "layer"}, "one prior factor"),
        ({"structure": "kron", "curvature": "hessian"}, "all parameters"),
        ({"base": al.MAP(holdout=0.1)}, "init=fit"),
        ({"link": "identity"}, "link"),
        ({"num_rounds": 3}, "during this training"),
        ({"num_rounds": -1}, "num_rounds"),
    ],
)
def test_bad_settings_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(al.MethodError, match=said):
        al.Laplace(**settings)


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    x, y = cases.regression()
    model = al.BNN(al.networks.MLP(cases.D, (3000,), 1), al.Gaussian(0.3), al.Normal(1.0))
    with pytest.raises(al.MethodError, match=r"15\.09 GiB for full curvature of 15,001 weights"):
        al.fit(0, model, (x, y), al.Laplace("full"), progress=False)
    fit = al.fit(0, cases.network_model(), (x, y), al.Laplace("kron", base=al.MAP(num_steps=20)), progress=False)
    assert fit.manifest["bytes"] == 72 * (4**2 + 8**2 + 32 + 9**2 + 1 + 9)


@pytest.mark.parametrize(
    ("model", "method", "said"),
    [
        (
            lambda: al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(0.3), al.priors.Hierarchical(centred=False)),
            al.Laplace("diag"),
            "centred",
        ),
        (lambda: al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(0.3)), al.Laplace("diag", tune_noise=True), "no noise to tune"),
        (
            lambda: al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(0.3), al.priors.Laplace(1.0)),
            al.Laplace("diag", tune="prior", num_rounds=2),
            "normal prior",
        ),
        (lambda: al.BNN(al.networks.MLP(3, (4,), 1), al.Gaussian(0.3)), al.Laplace("diag", subset=al.Subnetwork(3)), "structure='full'"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: Any, method: Any, said: str) -> None:
    with pytest.raises(al.MethodError, match=said):
        al.fit(0, model(), cases.regression(), method, progress=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_convolutions_of_a_users_network_in_double_precision(dtype: Any) -> None:
    """Full covariances are held in float64, and `lax.conv_general_dilated` takes one type: x follows the weights."""
    import equinox as eqx

    class Net(eqx.Module):
        filter: eqx.nn.Conv2d
        last: eqx.nn.Linear

        def __init__(self) -> None:
            self.filter, self.last = eqx.nn.Conv2d(1, 2, 3, key=jax.random.key(0)), eqx.nn.Linear(2, 1, key=jax.random.key(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(jnp.tanh(self.filter(x)).mean(axis=(1, 2)))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 1, 4, 4)).astype(dtype), rng.normal(size=10)
    for subset in ("all", "last_layer"):
        method = al.Laplace("full", subset=subset, base=al.MAP(num_steps=5))
        fit = al.fit(0, al.BNN(Net(), al.Gaussian(0.5)), (x, y), method, progress=False)
        predictive = fit.predict(1, x[:3])
        assert np.isfinite(predictive.mean).all() and (predictive.epistemic > 0).all()


@pytest.mark.parametrize("layers", [1, 2])
def test_the_evidence_of_other_factors_is_exact_from_anywhere(layers: int) -> None:
    """A linear-Gaussian log joint is its own Taylor term, so that prior factors and noise have their exact evidence wherever it is taken, at
    a mode or not, with more weights than rows."""
    from scipy.stats import multivariate_normal

    rng = np.random.default_rng(0)
    phi, w, sigma, n, m = rng.normal(size=(8, 12)), rng.normal(size=12), 0.5, 8, 12
    y = rng.normal(size=n)
    group = np.arange(m) % layers
    curvature, pull = phi.T @ phi / sigma**2, phi.T @ (y - phi @ w) / sigma**2
    counts, square = np.bincount(group).astype(float), _whitened.by_group(group, w**2)
    spectrum = _whitened.Spectrum(np.zeros(0), group, counts, square, w, pull, curvature)
    if layers == 1:
        values, vectors = np.linalg.eigh(curvature)
        spectrum = _whitened.Spectrum(np.maximum(values, 0), group, counts, square, vectors.T @ w, vectors.T @ pull)
    at = float(multivariate_normal(phi @ w, sigma**2 * np.eye(n)).logpdf(y))
    data = _whitened.Data(at, n, np.sum((y - phi @ w) ** 2) / sigma**2, np.ones(layers))
    for logs in ({"prior": np.zeros(layers), "noise": 0.0}, {"prior": np.linspace(-1.0, 2.0, layers), "noise": -3.0}):
        tau, noise = np.exp(logs["prior"])[group], sigma * np.exp(logs["noise"])
        exact = multivariate_normal(np.zeros(n), phi @ np.diag(1 / tau) @ phi.T + noise**2 * np.eye(n)).logpdf(y)
        with jax.enable_x64(True):
            assert float(_whitened.log_evidence(logs, spectrum, data)) == pytest.approx(exact, rel=1e-9)


def test_factors_found_before_the_mode_are_finite() -> None:
    """Little noise, more weights than rows and a search that is cut short: directions without curvature must not drive the factors off."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    y = np.exp(x[:, 0]) + 0.001 * rng.normal(size=60)
    model = al.BNN(al.networks.MLP(4, (20,), 1, activation="tanh"), al.Gaussian(), al.Normal(1.0, scaling="fan_in"))
    method = al.Laplace("full", tune="layer", tune_noise=True, base=al.MAP(num_steps=1000, learning_rate=5e-3, batch_size=32))
    fit = al.fit(0, model, (x, (y - y.mean()) / y.std()), method, progress=False)
    factors = fit.posterior.tuned["prior_factor"]
    assert np.all(np.isfinite(factors)) and np.all(np.isfinite(fit.predict(0, x).variance)) and np.isfinite(fit.log_evidence.value)
