"""The general samplers against moments known in closed form; several modes, cliffs, corners that are not a number, discrete blocks."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import digamma, gammaln, logsumexp, polygamma

import aleator as al
from aleator import convergence
from aleator.methods import _moves, tempering
from aleator.methods.elliptical_slice import EllipticalSlice
from aleator.methods.gibbs import Gibbs
from aleator.methods.independence import Independence
from aleator.methods.mala import MALA
from aleator.methods.random_walk import RandomWalk
from aleator.methods.slice import Slice
from aleator.methods.tempering import ParallelTempering

from .conformance import cases

X, Y = cases.regression()


def chains_of(fit: al.Fit, quantity: Any) -> np.ndarray:
    """A quantity of every draw, (chains, n, Q)."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), fit.posterior.params)
    values = np.stack([np.asarray(value) for value in quantity(params)], axis=-1)
    return values.reshape(fit.posterior.num_chains, -1, values.shape[-1])


def assert_means(fit: al.Fit, quantity: Any, exact: Any) -> None:
    """Within 5 Monte Carlo standard errors."""
    draws = chains_of(fit, quantity)
    z = (draws.mean(axis=(0, 1)) - np.asarray(exact)) / convergence.mcse(draws)
    assert np.max(np.abs(z)) < 5.0, f"{z} standard errors from {exact}"


# ---- a bent, skewed target: u = log Gamma(3), v | u ~ N(u², 1) ------------------------------------------------------------------------


def bent(p: dict) -> jax.Array:
    return 3.0 * p["u"] - jnp.exp(p["u"]) - 0.5 * (p["v"] - p["u"] ** 2) ** 2


class Reference:
    """u ~ N(1, 1), v ~ N(1, 2²)."""

    def log_prob(self, p: dict) -> jax.Array:
        return -0.5 * (p["u"] - 1.0) ** 2 - 0.125 * (p["v"] - 1.0) ** 2 - float(np.log(4.0 * np.pi))

    def sample(self, key: jax.Array) -> dict:
        key_u, key_v = jax.random.split(key)
        return {"u": 1.0 + jax.random.normal(key_u), "v": 1.0 + 2.0 * jax.random.normal(key_v)}


START = {"u": 1.0, "v": 1.0}
BENT = al.target_from_log_density(bent, START, Reference())
SQUARE = float(polygamma(1, 3) + digamma(3) ** 2)
BENT_MEANS = (float(digamma(3)), SQUARE, SQUARE, 1.0)
BENT_QUANTITIES = lambda p: (p["u"], p["u"] ** 2, p["v"], (p["v"] - p["u"] ** 2) ** 2)
PROPOSAL = (np.array([0.9, 1.2]), np.array([[0.4, 0.4], [0.4, 2.2]]))


def draw_v(key: jax.Array, p: dict, data: Any) -> jax.Array:
    return p["u"] ** 2 + jax.random.normal(key, (), p["u"].dtype)


SAMPLERS = {
    "random walk": RandomWalk(num_samples=4000, num_warmup=2000, thin=5),
    "independence": Independence(proposal=PROPOSAL, num_samples=6000, num_warmup=100, df=4.0),
    "independence, learned": Independence(num_samples=6000, num_warmup=2000),
    "slice": Slice(num_samples=4000, num_warmup=300),
    "slice, random directions": Slice(num_samples=4000, num_warmup=500, directions="random"),
    "elliptical slice": EllipticalSlice(num_samples=6000, num_warmup=100, thin=2),
    "mala": MALA(num_samples=4000, num_warmup=1000, thin=5),
    "gibbs": Gibbs({"v": draw_v}, rest=MALA(), num_samples=4000, num_warmup=1000, num_moves=3),
    "tempering": ParallelTempering(num_samples=3000, num_warmup=1000, num_levels=4, num_moves=3),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_moments_of_a_bent_target(name: str) -> None:
    fit = al.fit(1, BENT, None, SAMPLERS[name], progress=False)
    assert fit.status.startswith("Converged")
    assert_means(fit, BENT_QUANTITIES, BENT_MEANS)


def test_the_walk_learns_the_scale_and_the_correlation() -> None:
    """A Gaussian with standard deviations 0.001 and 1000 and correlation 0.9: acceptance near the one wanted, ESS as for a round one
    (a random walk in two dimensions needs some 10 steps a draw; without the covariance it would never cross)."""
    scale = np.array([1e-3, 1e3])
    covariance = np.outer(scale, scale) * [[1.0, 0.9], [0.9, 1.0]]
    precision = np.linalg.inv(covariance)
    target = al.target_from_log_density(lambda q: -0.5 * q @ jnp.asarray(precision) @ q, np.zeros(2))
    fit = al.fit(0, target, None, RandomWalk(num_samples=2000, num_warmup=8000), progress=False)
    draws = np.asarray(fit.posterior.params, np.float64).reshape(4, -1, 2)
    assert 0.15 < fit.manifest["health"]["acceptance"] < 0.35 and convergence.ess(draws).min() > 2000
    # Sampling error of a variance from n draws is √(2/n) of it.
    n = convergence.ess(draws**2).min()
    np.testing.assert_allclose(np.cov(draws.reshape(-1, 2).T) / covariance, 1.0, atol=5.0 * np.sqrt(2.0 / n) / 0.9)


# ---- models ----------------------------------------------------------------------------------------------------------------------------


def test_elliptical_slices_find_the_exact_posterior() -> None:
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact()).posterior
    fit = al.fit(0, cases.linear_model(), (X, Y), EllipticalSlice(num_samples=3000, thin=3), progress=False)
    assert_means(fit, lambda p: tuple(p["network"]["weight"][:, 0].T), exact.mean[0])
    second = np.diag(exact.operator.covariance()[0]) + exact.mean[0] ** 2
    assert_means(fit, lambda p: tuple(p["network"]["weight"][:, 0].T ** 2), second)


def test_which_priors_are_gaussian_is_found_by_trying() -> None:
    def found(likelihood: Any, prior: Any) -> tuple[dict[str, bool], np.ndarray, np.ndarray]:
        model = al.BNN(al.networks.MLP(cases.D, (2,), 1), likelihood, prior).bind(X, Y[:, None])
        from aleator.methods._chains import flat_layout
        from aleator.target import Target

        target = Target(model, cases.N)
        layout = flat_layout(target)
        ellipse = _gaussian(target, layout)
        return dict(zip(layout.names, np.asarray(ellipse.gaussian, bool), strict=True)), np.asarray(ellipse.loc), np.asarray(ellipse.scale)

    flags, loc, scale = found(al.Gaussian(al.LogNormal(0.5, 0.7)), al.Normal({"layer0": 2.0, "*": 0.5}, loc=0.1))
    assert all(flags.values())
    by_name = dict(zip(flags, zip(loc, scale, strict=True), strict=True))
    np.testing.assert_allclose(by_name["likelihood.log_scale[0]"], (0.5, 0.7), rtol=1e-3)
    np.testing.assert_allclose([v for n, v in by_name.items() if "layer0" in n], [(0.1, 2.0)] * 8, rtol=1e-3)
    flags, *_ = found(al.Gaussian(al.HalfNormal(1.0)), al.priors.Hierarchical())
    assert {name.split(".")[0] for name, flag in flags.items() if not flag} == {"likelihood", "prior"}
    for prior in (al.priors.Laplace(1.0), al.priors.StudentT(30.0), al.priors.Hierarchical(centred=True)):
        flags, *_ = found(al.Gaussian(al.LogNormal()), prior)
        assert not any(flag for name, flag in flags.items() if name.startswith("network"))


def _gaussian(target: Any, layout: Any) -> Any:
    from aleator.methods.elliptical_slice import gaussian_prior

    return gaussian_prior(target, layout)


def test_elliptical_slices_refuse_other_priors() -> None:
    model = al.BNN(al.networks.MLP(cases.D, (20,), 1), al.Gaussian(), al.priors.Laplace(1.0))
    with pytest.raises(al.MethodError, match=r"network\.layer0.*Normal"):
        al.fit(0, model, (X, Y), EllipticalSlice(), progress=False)
    with pytest.raises(al.MethodError, match="reference"):
        al.fit(0, al.target_from_log_density(bent, START), None, EllipticalSlice(), progress=False)


def test_an_independence_proposal_from_a_fit() -> None:
    exact = al.fit(0, cases.linear_model(), (X, Y), al.Exact())
    method = Independence(proposal=exact, num_samples=1000, num_warmup=0)
    fit = al.fit(0, cases.linear_model(), (X, Y), method, progress=False)
    # Student-t with 5 degrees of freedom against the Gaussian it was made from, in 4 dimensions: some 0.8.
    assert fit.manifest["health"]["acceptance"] > 0.6
    assert_means(fit, lambda p: tuple(p["network"]["weight"][:, 0].T), exact.posterior.mean[0])
    with pytest.raises(al.MethodError, match="4 parameters"):
        al.fit(0, BENT, None, method, progress=False)


# ---- several modes ---------------------------------------------------------------------------------------------------------------------


def two_modes(p: dict) -> jax.Array:
    """0.8 N(−5, ½²) + 0.2 N(5, ½²)."""
    return jnp.logaddexp(jnp.log(0.8) - 2.0 * (p["a"] + 5.0) ** 2, jnp.log(0.2) - 2.0 * (p["a"] - 5.0) ** 2)


def test_tempering_weighs_modes_that_a_walk_never_leaves() -> None:
    target = al.target_from_log_density(two_modes, {"a": 0.0})
    negative = lambda p: (p["a"] < 0.0,)
    fit = al.fit(2, target, None, ParallelTempering(num_samples=3000, num_warmup=1000), progress=False)
    assert convergence.ess(chains_of(fit, negative).astype(float))[0] > 300
    assert_means(fit, lambda p: ((p["a"] < 0.0).astype(float),), [0.8])
    with warnings.catch_warnings():  # it says that the chains disagree, unless all began on the same side
        warnings.simplefilter("ignore", al.HealthWarning)
        walk = al.fit(2, target, None, RandomWalk(num_samples=500, num_warmup=1000), progress=False)
    assert set(chains_of(walk, negative).mean(axis=1).ravel()) <= {0.0, 1.0}


def test_a_ladder_is_moved_to_equal_refusals() -> None:
    betas, refused = jnp.array([0.0, 0.1, 0.5, 1.0]), jnp.array([60.0, 30.0, 10.0])
    moved = np.asarray(tempering.place(betas, refused, jnp.full(3, 100.0)))
    # Refusals cumulate to 0.6, 0.9, 1.0: thirds are at 1/3 and 2/3 of 1.
    np.testing.assert_allclose(moved, [0.0, 0.1 * (1 / 3) / 0.6, 0.1 + 0.4 * (2 / 3 - 0.6) / 0.3, 1.0], rtol=1e-5)


# ---- data augmentation ------------------------------------------------------------------------------------------------------------------

POINTS = np.array([-2.1, -1.7, -1.9, -2.4, 1.8, 2.2, 2.0, 1.5])


def allocated(p: dict) -> jax.Array:
    """Two unit-variance components: means N(0, 9), weight of the second Beta(1, 1) through its logit, allocations z."""
    z = p["z"].astype(jnp.int32)
    ones = jnp.sum(z)
    weight = (1.0 + ones) * jax.nn.log_sigmoid(p["logit"]) + (1.0 + len(POINTS) - ones) * jax.nn.log_sigmoid(-p["logit"])
    return weight - 0.5 * jnp.sum((jnp.asarray(POINTS) - p["mean"][z]) ** 2) - jnp.sum(p["mean"] ** 2) / 18.0


def draw_z(key: jax.Array, p: dict, data: Any) -> jax.Array:
    odds = p["logit"] - 0.5 * (POINTS - p["mean"][1]) ** 2 + 0.5 * (POINTS - p["mean"][0]) ** 2
    return jax.random.bernoulli(key, jax.nn.sigmoid(odds)).astype(jnp.int32)


def draw_mean(key: jax.Array, p: dict, data: Any) -> jax.Array:
    assert p["z"].dtype == jnp.int32
    member = jnp.stack([1 - p["z"], p["z"]]).astype(p["mean"].dtype)
    variance = 1.0 / (member.sum(axis=1) + 1.0 / 9.0)
    return variance * (member @ POINTS) + jnp.sqrt(variance) * jax.random.normal(key, (2,), variance.dtype)


def draw_logit(key: jax.Array, p: dict, data: Any) -> jax.Array:
    key_a, key_b = jax.random.split(key)
    ones = jnp.sum(p["z"])
    return jax.random.loggamma(key_a, 1.0 + ones) - jax.random.loggamma(key_b, 1.0 + len(POINTS) - ones)


def together() -> float:
    """P(first two allocated alike), over all 2⁸ allocations, each with its means and weight integrated out."""
    logs, alike = [], []
    for z in itertools.product((0, 1), repeat=len(POINTS)):
        ones, total = sum(z), 0.0
        total += gammaln(1 + ones) + gammaln(1 + len(POINTS) - ones)
        for k in (0, 1):
            x = POINTS[np.array(z) == k]
            precision = len(x) + 1.0 / 9.0
            total += 0.5 * (x.sum() ** 2 / precision - np.log(9.0 * precision)) - 0.5 * np.sum(x**2)
        logs.append(total)
        alike.append(z[0] == z[1])
    return float(np.sum(np.exp(np.array(logs) - logsumexp(logs))[alike]))


ALLOCATED = al.target_from_log_density(allocated, {"z": np.zeros(8, int), "mean": np.array([-1.0, 1.0]), "logit": 0.0})


@pytest.mark.parametrize("how", ["all blocks", "allocations only"])
def test_gibbs_with_discrete_allocations(how: str) -> None:
    exact = together()
    assert abs(exact - 0.987604) < 1e-6
    blocks = {"z": draw_z} if how == "allocations only" else {"z": draw_z, "mean": draw_mean, "logit": draw_logit}
    method = Gibbs(blocks, rest=RandomWalk() if how == "allocations only" else None, num_samples=5000, num_moves=3, num_warmup=1000)
    fit = al.fit(0, ALLOCATED, None, method, progress=False)
    assert fit.posterior.params["z"].dtype == np.int32
    assert_means(fit, lambda p: ((p["z"][:, 0] == p["z"][:, 1]).astype(float), (p["z"].sum(axis=1) - 4.0) ** 2), [exact, _spread()])


def _spread() -> float:
    """E[(number in the second − 4)²], by the same enumeration."""
    logs, values = [], []
    for z in itertools.product((0, 1), repeat=len(POINTS)):
        ones = sum(z)
        total = gammaln(1 + ones) + gammaln(1 + len(POINTS) - ones)
        for k in (0, 1):
            x = POINTS[np.array(z) == k]
            total += 0.5 * x.sum() ** 2 / (len(x) + 1.0 / 9.0) - 0.5 * np.log(len(x) + 1.0 / 9.0)
        logs.append(total)
        values.append((ones - 4.0) ** 2)
    return float(np.exp(np.array(logs) - logsumexp(logs)) @ np.array(values))


def test_gibbs_hands_over_the_data_and_refuses_what_does_not_fit() -> None:
    """A linear model whose weights are drawn from their exact conditional, given σ, by a block that reads the rows; σ by a walk."""
    model = al.LinearModel(al.features.Identity(), al.Gaussian(al.LogNormal(0.0, 1.0)), al.Normal(1.0))

    def draw_weight(key: jax.Array, params: dict, data: Any) -> jax.Array:
        phi = jnp.column_stack([jnp.ones(len(data.y)), data.x])
        noise = jnp.exp(2.0 * params["likelihood"]["log_scale"][0])
        factor = jnp.linalg.cholesky(phi.T @ phi / noise + jnp.eye(phi.shape[1]))
        solve = jax.scipy.linalg.solve_triangular
        mean = solve(factor.T, solve(factor, phi.T @ data.y[:, 0] / noise, lower=True), lower=False)
        return (mean + solve(factor.T, jax.random.normal(key, mean.shape), lower=False))[None]

    gibbs = Gibbs({"network.weight": draw_weight}, rest=RandomWalk(), num_samples=2000, num_warmup=1000, num_moves=5)
    a = chains_of(
        al.fit(0, model, (X, Y), gibbs, progress=False), lambda p: (p["likelihood"]["log_scale"][:, 0], p["network"]["weight"][:, 0, 1])
    )
    b = chains_of(
        al.fit(1, model, (X, Y), MALA(metric="dense"), progress=False),
        lambda p: (p["likelihood"]["log_scale"][:, 0], p["network"]["weight"][:, 0, 1]),
    )
    error = np.hypot(convergence.mcse(a), convergence.mcse(b))
    assert np.max(np.abs(a.mean(axis=(0, 1)) - b.mean(axis=(0, 1))) / error) < 5.0
    with pytest.raises(al.MethodError, match="never move"):
        al.fit(0, BENT, None, Gibbs({"v": draw_v}), progress=False)
    with pytest.raises(al.MethodError, match="'w'"):
        al.fit(0, BENT, None, Gibbs({"w": draw_v}, rest=RandomWalk()), progress=False)
    with pytest.raises(al.MethodError, match="wrong shapes"):
        al.fit(0, BENT, None, Gibbs({"v": lambda k, p, d: jnp.zeros(3)}, rest=RandomWalk()), progress=False)
    with pytest.raises(al.MethodError, match="z"):
        al.fit(0, ALLOCATED, None, Gibbs({"mean": draw_mean}, rest=RandomWalk()), progress=False)


# ---- cliffs and corners ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [RandomWalk(num_samples=3000, num_warmup=1000), Slice(num_samples=4000, num_warmup=300)], ids=["random walk", "slice"]
)
def test_a_discontinuous_density(method: Any) -> None:
    """Density 3 on (0, ½) and 1 on (½, 1.5), in units of one of them: a cliff, and edges beyond which there is nothing, which is said."""

    def steps(p: dict) -> jax.Array:
        inside = (p["a"] > 0.0) & (p["a"] < 1.5)
        return jnp.where(inside, jnp.where(p["a"] < 0.5, jnp.log(3.0), 0.0), -jnp.inf)

    target = al.target_from_log_density(steps, {"a": 0.7})
    fit = al.fit(0, target, None, method, progress=False)  # refusing what lies beyond an edge is exact: said, and no warning
    assert "outside the support" in fit.status
    assert_means(fit, lambda p: ((p["a"] < 0.5).astype(float), p["a"]), [0.6, (3 * 0.125 + 1.0) / 2.5])
    assert fit.manifest["health"]["outside"] > 0


@pytest.mark.parametrize(
    "method",
    [
        RandomWalk(num_samples=300, num_warmup=300),
        MALA(num_samples=300, num_warmup=300),
        Slice(num_samples=300, num_warmup=100),
        EllipticalSlice(num_samples=300, num_warmup=100),
        ParallelTempering(num_samples=300, num_warmup=300, num_levels=3),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_corner_that_is_not_a_number_is_named(method: Any) -> None:
    """N(0, 1) that is NaN above 1: never entered, counted, and said."""

    class Unit:
        log_prob = staticmethod(lambda p: -0.5 * p["a"] ** 2 / 4.0)
        sample = staticmethod(lambda key: {"a": 2.0 * jax.random.normal(key)})

    corner = lambda p: -0.5 * p["a"] ** 2 + 0.0 * jnp.log(1.0 - p["a"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = al.fit(0, al.target_from_log_density(corner, {"a": 0.0}, Unit()), None, method, progress=False)
    assert any("NaN" in str(w.message) for w in caught)
    assert np.max(fit.posterior.params["a"]) < 1.0 and fit.manifest["health"]["undefined"] > 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RandomWalk(metric="round"), "metric"),
        (lambda: RandomWalk(target_acceptance=1.5), "target_acceptance"),
        (lambda: RandomWalk(num_warmup=0), "step_size"),
        (lambda: Independence(num_warmup=10), "proposal"),
        (lambda: Independence(proposal=(np.zeros(2), -np.eye(2))), "positive definite"),
        (lambda: Slice(directions="up"), "directions"),
        (lambda: Slice(width=-1.0), "width"),
        (lambda: Gibbs({}), "blocks"),
        (lambda: Gibbs({"z": 3}), "blocks"),
        (lambda: Gibbs({"z": draw_z}, rest=EllipticalSlice()), "rest"),
        (lambda: ParallelTempering(num_levels=1), "levels"),
        (lambda: ParallelTempering(within=al.MAP()), "within"),
    ],
)
def test_wrong_settings_are_named(make: Any, match: str) -> None:
    with pytest.raises(al.MethodError, match=match):
        make()


def test_student_proposals_are_normalised() -> None:
    """∫ exp(log_prob) over a grid is one, and draws have the covariance Σ·df/(df − 2)."""
    factor = np.linalg.cholesky(np.array([[2.0, 0.5], [0.5, 1.0]]))
    proposal = _moves.Proposal(jnp.array([1.0, -1.0]), jnp.asarray(factor, jnp.float32))
    for df in (8.0, float("inf")):
        axis = np.linspace(-30.0, 30.0, 400)
        grid = jnp.asarray(np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2), jnp.float32)
        mass = (
            np.exp(np.asarray(jax.vmap(lambda q, df=df: _moves.log_prob(proposal, q, df))(grid), np.float64)).sum()
            * (axis[1] - axis[0]) ** 2
        )
        assert abs(mass - 1.0) < 1e-3
        draws = np.asarray(jax.vmap(lambda k, df=df: _moves.draw(k, proposal, df))(jax.random.split(jax.random.key(0), 40_000)), np.float64)
        wider = 1.0 if np.isinf(df) else df / (df - 2.0)
        np.testing.assert_allclose(np.cov(draws.T), wider * factor @ factor.T, rtol=0.1)


def test_the_temperature_of_a_target_is_kept() -> None:
    """log N(0, 1) at temperature 4 is N(0, 4), whether the target says so or the fit; the fit has the last word."""
    density = lambda p: -0.5 * jnp.sum(p**2)
    hot = al.target_from_log_density(density, np.zeros(2), temperature=4.0)
    method = al.NUTS(num_samples=1000, num_warmup=500, num_chains=2)
    spread = lambda fit: float(np.std(np.asarray(fit.posterior.params)))
    own = al.fit(0, hot, None, method, progress=False)
    assert own.manifest["temperature"] == 4.0 and abs(spread(own) - 2.0) < 0.25
    cool = al.fit(0, hot, None, method, temperature=1.0, progress=False)
    assert cool.manifest["temperature"] == 1.0 and abs(spread(cool) - 1.0) < 0.15
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.5), al.Normal(1.0))
    x = np.ones((3, 1), np.float32)
    bound = al.Target(model, 3, temperature=2.0)
    assert al.fit(0, bound, (x, x[:, 0]), al.MAP(num_steps=2), progress=False).manifest["temperature"] == 2.0
    with pytest.raises(al.MethodError, match="temperature must be positive"):
        al.target_from_log_density(density, np.zeros(2), temperature=0.0)
