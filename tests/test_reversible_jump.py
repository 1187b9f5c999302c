"""Reversible jump: which regressors, how many units (lecture: E5). Truth: enumeration, quadrature, the prior itself, simulated data."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import convergence, selection
from aleator._marginal import log_marginal, moments
from aleator.data import Batch
from aleator.methods import _units as moves
from aleator.methods import reversible_jump as rj
from aleator.methods.reversible_jump import ReversibleJump
from aleator.shallow import Hierarchical, ShallowNet

INCLUSION, SIZE, EVIDENCE = (1.000000, 0.988229, 0.070944), 2.059173, 0.256397


# ---- regressors ----------------------------------------------------------------------------------------------------------------------


def features(x: Any) -> Any:
    return jnp.concatenate([x, jnp.cos(5 * x), jnp.sin(11 * x)], axis=1)


def only(kept: Any) -> Any:
    return lambda x: jnp.concatenate([features(x)[:, j : j + 1] for j in kept], axis=1)


def regression() -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1, 1, 30)
    return x[:, None], x + 0.3 * np.cos(5 * x) + 0.1 * np.sin(37 * x + 1)


def linear(noise: Any = 0.3, **given: Any) -> al.LinearModel:
    return al.LinearModel(features, al.Gaussian(noise), al.Normal(1.0), **given)


def test_patterns_enumerated_exactly() -> None:
    found = selection.enumerate_patterns(linear(), regression())
    np.testing.assert_allclose(found.inclusion, INCLUSION, atol=1e-6)
    assert abs(found.size @ np.arange(4) - SIZE) < 1e-6
    assert abs(found.log_evidence - EVIDENCE) < 1e-6


def test_each_pattern_has_the_evidence_of_its_own_regression() -> None:
    """Blanked columns against the closed form for the regressors that are in, and a prior on the size against the one on patterns."""
    x, y = regression()
    found = selection.enumerate_patterns(linear(), (x, y))
    for pattern, probability in zip(found.included, found.probability, strict=True):
        kept = np.flatnonzero(pattern)
        if kept.size:
            model = al.LinearModel(only(kept), al.Gaussian(0.3), al.Normal(1.0))
            evidence = al.fit(0, model, (x, y), al.Exact()).log_evidence.value
            assert abs(evidence - math.log(8) - found.log_evidence - math.log(probability)) < 1e-9
    binomial = [math.log(math.comb(3, size) / 8) for size in range(4)]
    np.testing.assert_allclose(selection.enumerate_patterns(linear(), (x, y), binomial).probability, found.probability, atol=1e-12)


def test_sampler_finds_the_inclusion_probabilities() -> None:
    x, y = regression()
    fit = al.fit(0, linear(), (x, y), ReversibleJump(num_samples=4000, num_warmup=200))
    drawn = selection.included_draws(fit).astype(float)
    exact = selection.enumerate_patterns(linear(), (x, y))
    for j in (1, 2):
        assert abs(drawn[..., j].mean() - exact.inclusion[j]) < 5 * convergence.mcse(drawn[..., j])
    assert drawn[..., 0].all()  # excluded with probability 1e-13
    size = drawn.sum(axis=-1)
    assert abs(size.mean() - SIZE) < 5 * convergence.mcse(size)
    assert convergence.mcse(size) < 0.02 * 0.4  # so that a pass means something
    # Weights: the average of the conditional means by the exact probabilities of their patterns.
    with jax.enable_x64(True):
        given = selection.problem(linear().bind(x, y[:, None]), Batch(jnp.asarray(x), jnp.asarray(y[:, None])), None)
        means = [selection.mean_weights(given, jnp.asarray(d), jnp.log(jnp.array([0.3])), False)[0] for d in exact.included]
    truth = exact.probability @ np.asarray(means)
    weights = np.asarray(fit.posterior.params["network"]["weight"], float)[:, 0].reshape(4, -1, 3)
    assert np.all(np.abs(weights.mean(axis=(0, 1)) - truth) < 5 * convergence.mcse(weights))
    assert "Converged" in fit.status


def test_selection_with_unknown_noise() -> None:
    """σ is moved with the weights integrated out; scaled weights have the conjugate posterior, whose evidence is known per pattern."""
    x, y = regression()
    noise = al.InverseGamma(3.0, 0.3)
    model = linear(noise, scaled_by_noise=True)
    fit = al.fit(1, model, (x, y), ReversibleJump(num_samples=4000, num_warmup=200))
    drawn = selection.included_draws(fit).astype(float)
    patterns, log_evidence = [], []
    for pattern in range(1, 8):
        kept = np.flatnonzero([(pattern >> j) % 2 for j in range(3)])
        some = al.LinearModel(only(kept), al.Gaussian(noise), al.Normal(1.0), scaled_by_noise=True)
        log_evidence.append(al.fit(0, some, (x, y), al.Exact()).log_evidence.value)
        patterns.append([(pattern >> j) % 2 for j in range(3)])
    weight = np.exp(np.array(log_evidence) - np.max(log_evidence))  # no regressor at all: e^{-13} beside these
    truth = weight @ np.array(patterns) / weight.sum()
    for j in (1, 2):
        assert abs(drawn[..., j].mean() - truth[j]) < 5 * convergence.mcse(drawn[..., j])


# ---- units: the moves one by one -----------------------------------------------------------------------------------------------------


def logistic(x: Any) -> Any:
    return jax.nn.sigmoid(x)


def given_net(rows: int, most: int, r: int, log_size: Any, informative: bool = True) -> moves.Given:
    """A net with an intercept; weightless rows say nothing, so that the posterior is the prior."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, r))
    y = 1.5 * np.tanh(2 * x[:, :1]) + 0.3 * rng.normal(size=(rows, 1))
    root = jnp.full((rows, 1), float(informative))
    full = lambda value: jnp.full((most + 1, 1), value)
    targets = root * y
    square, mass = jnp.sum(targets**2, axis=0), jnp.sum(root)
    return moves.Given(
        jnp.asarray(x),
        root,
        root,
        targets,
        square,
        mass,
        jnp.array([0.25]),
        full(0.2),
        full(0.8),
        jnp.full(r, 0.3),
        1.2 * jnp.eye(r),
        log_size,
    )


class Flags(NamedTuple):
    """What the chains do: moves used (births, splits, units), and, for mutations, which terms of the ratios are kept."""

    births: bool = True
    splits: bool = True
    units: bool = True
    jacobian: bool = True
    hastings: bool = True
    borders: bool = True


SLOTS, CHAINS, SWEEPS, WARMUP = 4, 200, 300, 40


@functools.cache
def chains() -> Any:
    """run(key, given, flags) → m along CHAINS chains, compiled once for all tests: mutations are switches inside."""

    def ratio(given: Any, number: Any, chosen: Any, average: Any, flags: Flags, kept: Any) -> Any:
        log_size = given.log_size[jnp.minimum(number + 1, SLOTS)] - given.log_size[number]
        right = jnp.log(1.0 - moves.up_probability(number + 1, SLOTS)) - jnp.log(moves.up_probability(number, SLOTS))
        value = kept(given, number, chosen, average) - jnp.where(flags.borders, 0.0, right)
        return jnp.where(flags.hastings, value, log_size + average)

    def chain(key: Any, given: moves.Given, flags: Flags) -> Any:
        key_jumps, key_units = jax.random.split(key)
        units = moves.assemble(given, logistic, jnp.zeros((SLOTS, 1)), jnp.arange(SLOTS) < 1)

        def step(units: moves.Units, noise: Any) -> tuple[moves.Units, Any]:
            units = moves.choose(flags.births, moves.birth_death(noise[0], given, logistic, units)[0], units)
            units = moves.choose(flags.splits, moves.split_merge(noise[0], given, logistic, units)[0], units)
            moved, _ = moves.move_units(jax.random.fold_in(key_units, noise[1]), given, logistic, units, 1)
            units = moves.choose(flags.units, moved, units)
            return units, jnp.sum(units.active)

        total = SWEEPS + WARMUP
        return jax.lax.scan(step, units, (moves.draw_noise(key_jumps, total, SLOTS, 1, 4), jnp.arange(total)))[1][WARMUP:]

    def run(key: Any, given: moves.Given, flags: Flags) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            kept, jacobian = moves.birth_ratio, moves.log_jacobian
            patch.setattr(moves, "birth_ratio", lambda *args: ratio(*args, flags, kept))
            patch.setattr(moves, "log_jacobian", lambda r: jnp.where(flags.jacobian, jacobian(r), 0.0))
            return jax.vmap(chain, in_axes=(0, None, None))(jax.random.split(key, CHAINS), given, flags)

    return jax.jit(run)


def sizes(given: moves.Given, flags: Flags, seed: int = 0) -> np.ndarray:
    return np.asarray(chains()(jax.random.key(seed), given, Flags(*map(jnp.asarray, flags))))


def worst(number: np.ndarray, truth: np.ndarray) -> float:
    """The largest |error| of P(m = ·) in Monte Carlo standard errors, over sizes seen and expected at least once in a thousand."""
    shares = [(np.mean(number == m), convergence.mcse((number == m).astype(float)), p) for m, p in enumerate(truth) if p > 1e-3]
    return max(abs(share - p) / error if error > 0 else np.inf for share, error, p in shares)


@pytest.fixture
def doubles() -> Any:
    with jax.enable_x64(True):
        yield


PRIOR = np.array([0.1, 0.3, 0.2, 0.25, 0.15])  # no pattern that a wrong ratio could hide behind
ROWS = 15


def without_data(flags: Flags) -> float:
    """The distance of m from its prior where the data say nothing; without births a chain stays at m ≥ 1."""
    given = given_net(ROWS, SLOTS, 1, jnp.log(PRIOR), informative=False)
    truth = PRIOR if flags.births else PRIOR * (np.arange(5) > 0)
    return worst(sizes(given, flags), truth / truth.sum())


@pytest.mark.parametrize("flags", [Flags(splits=False, units=False), Flags(births=False), Flags()], ids=["births", "splits", "all"])
def test_without_data_the_size_has_its_prior(flags: Flags, doubles: Any) -> None:
    assert without_data(flags) < 5


@pytest.mark.parametrize("wrong", [{"jacobian": False}, {"hastings": False}, {"borders": False}], ids=str)
def test_a_wrong_ratio_is_seen(wrong: dict[str, bool], doubles: Any) -> None:
    assert without_data(Flags(**wrong)) > 8


def test_size_against_quadrature(doubles: Any) -> None:
    """P(m | D) for m ≤ 2 and one input weight per unit, by integrals over grids of γ: informed births and deaths, candidates, splits."""
    prior = np.array([0.5, 0.3, 0.2, 0.0, 0.0])
    given = given_net(ROWS, SLOTS, 1, jnp.log(prior))
    grid = np.linspace(-7.0, 8.0, 201)
    weight = np.exp(-0.5 * ((grid - 0.3) / 1.2) ** 2)
    weight /= weight.sum()

    def evidence(gamma: Any) -> Any:
        columns = jnp.concatenate([moves.activate(given, logistic, gamma), given.design], axis=1)
        return log_marginal(moments(columns, given.targets), given.noise, 0.2, 0.8)

    one = np.asarray(jax.jit(jax.vmap(lambda g: evidence(g[None, None])))(grid))
    pairs = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2, 1)
    two = np.asarray(jax.jit(lambda all_: jax.lax.map(evidence, all_, batch_size=2048))(pairs))
    log_z = [float(evidence(jnp.zeros((0, 1)))), np.log(np.exp(one - one.max()) @ weight) + one.max()]
    log_z.append(np.log(np.exp(two - two.max()) @ np.outer(weight, weight).ravel()) + two.max())
    truth = np.exp(np.array(log_z) - max(log_z)) * prior[:3]
    truth /= truth.sum()
    assert 0.05 < truth[1] < 0.95
    for flags in (Flags(), Flags(splits=False)):
        number = sizes(given, flags)
        assert number.max() == 2
        assert worst(number, truth) < 5


def test_gains_and_deaths_are_ratios_of_marginal_likelihoods(doubles: Any) -> None:
    given = given_net(12, 4, 2, jnp.log(PRIOR))
    gamma = jax.random.normal(jax.random.key(0), (4, 2))
    active = jnp.array([True, False, True, True])
    units = moves.assemble(given, logistic, gamma, active)
    now, value = moves.conditional(given, units.gram, units.cross)
    without = [moves.assemble(given, logistic, gamma, active.at[j].set(False)).log_marginal for j in range(4)]
    expected = jax.nn.log_softmax(jnp.where(active, moves.INFORMED * (jnp.stack(without) - value), -jnp.inf))
    np.testing.assert_allclose(moves.log_death(given, now, active), expected, atol=1e-9)
    tried = jax.random.normal(jax.random.key(1), (5, 2))
    added = [moves.assemble(given, logistic, gamma.at[1].set(g), active.at[1].set(True)).log_marginal - value for g in tried]
    np.testing.assert_allclose(moves.gains(given, now, units.columns, moves.activate(given, logistic, tried), 1), added, atol=1e-9)


# ---- whole sweeps --------------------------------------------------------------------------------------------------------------------


def model_of(hierarchical: bool, targets: int = 1) -> ShallowNet:
    """Fixed hyper-parameters or their prior, none scaled by the data."""
    prior = Hierarchical(A_beta=0.25, C_beta=1.0, A_gamma=0.5, C_gamma=2.0) if hierarchical else al.Normal({"gamma": 1.5, "*": 0.8})
    likelihood = al.Gaussian(al.InverseGamma(4.0, 0.5))
    net = ShallowNet(3, linear_term=True, prior=prior, likelihood=likelihood, scaled=False)
    return net.bind(np.zeros((2, 1)), np.zeros((2, targets)))


LOG_SIZE = np.log([0.3, 0.3, 0.25, 0.15])


def draw_prior(key: Any, model: ShallowNet) -> tuple[Any, Any]:
    key_params, key_size = jax.random.split(key)
    active = jnp.arange(model.units) < jax.random.categorical(key_size, jnp.asarray(LOG_SIZE))
    params = model.sample_prior(key_params)
    blank = lambda leaf: jnp.where(active[:, None], leaf, 0.0)
    network = params["network"]
    return params | {"network": network | {"gamma": blank(network["gamma"]), "beta": blank(network["beta"])}}, active


def quantities(model: ShallowNet, params: Any, active: Any) -> Any:
    """Functions at five inputs and what is behind them: first and second moments. arcsinh: γ has the heavy tails of its hyper-prior."""
    outputs = jnp.ravel(model.outputs(params, jnp.linspace(-2.0, 2.0, 5)[:, None]))
    gamma, beta = params["network"]["gamma"], params["network"]["beta"]
    some = [outputs, params["likelihood"]["log_scale"], jnp.sum(gamma, axis=0), jnp.sum(beta, axis=0), jnp.sum(gamma**2, axis=0)]
    some += [jnp.sum(active)[None].astype(float), *(jnp.ravel(leaf) for leaf in jax.tree.leaves(params["prior"]))]
    first = jnp.arcsinh(jnp.concatenate(some))
    return jnp.concatenate([first, first**2, jnp.arcsinh(jnp.sum(beta**2, axis=0))])


class Tools(NamedTuple):
    """Compiled once for one model and number of chains. start(key) → (params, active) from the prior; simulate(key, params, widen) → y with
    noise × widen; step(key, params, active, y, shrink) → (params, active), one sweep of a sampler that believes in prior sds × shrink;
    describe(params, active) → (chains, Q); judge(params, y) → (chains, 7): five predictions, noise, log-likelihood."""

    start: Any
    simulate: Any
    step: Any
    describe: Any
    judge: Any


@functools.cache
def tools(model: ShallowNet, number: int, points: int = 8) -> Tools:
    x = jnp.linspace(-2.0, 2.0, points)[:, None]

    def simulate(key: Any, params: Any, widen: Any) -> Any:
        mean = model.outputs(params, x)
        return mean + widen * model.extra(params)["scale"] * jax.random.normal(key, mean.shape)

    def step(key: Any, params: Any, active: Any, y: Any, shrink: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            kept = rj.prior_at

            def scaled(*args: Any) -> Any:
                loc, variance, centre, factor = kept(*args)
                return loc, variance * shrink**2, centre, factor * shrink

            patch.setattr(rj, "prior_at", scaled)
            return rj.sweep(key, model, Batch(x, y), params, active, jnp.asarray(LOG_SIZE), 1, 1)[:2]

    def judge(params: Any, y: Any) -> Any:
        outputs = jnp.ravel(model.outputs(params, jnp.linspace(-2.5, 2.5, 5)[:, None]))
        return jnp.concatenate([outputs, params["likelihood"]["log_scale"], jnp.sum(model.log_likelihood(params, Batch(x, y)))[None]])

    spread = lambda one, axes: jax.jit(lambda key, *rest: jax.vmap(one, in_axes=axes)(jax.random.split(key, number), *rest))
    return Tools(
        start=spread(lambda key: draw_prior(key, model), 0),
        simulate=spread(simulate, (0, 0, None)),
        step=spread(step, (0, 0, 0, 0, None)),
        describe=jax.jit(jax.vmap(lambda params, active: quantities(model, params, active))),
        judge=jax.jit(jax.vmap(judge)),
    )


def geweke(model: ShallowNet, number: int, steps: int, shrink: float = 1.0, widen: float = 1.0) -> float:
    """Geweke's joint test with independent chains: θ from the prior, then (y | θ; one sweep) repeated must leave the prior as it is.

    The largest |z| over all quantities. shrink: prior sds that the sampler believes in × this; widen: noise of the data × this.
    """
    run = tools(model, number)
    params, active = run.start(jax.random.key(0))
    fresh = np.concatenate([run.describe(*run.start(jax.random.key(1 + i))) for i in range(10)])
    for i in range(steps):
        y = run.simulate(jax.random.key(1000 + i), params, widen)
        params, active = run.step(jax.random.key(2000 + i), params, active, y, shrink)
    end = np.asarray(run.describe(params, active))
    error = np.sqrt(end.var(axis=0) / len(end) + fresh.var(axis=0) / len(fresh))
    return float(np.max(np.abs(end.mean(axis=0) - fresh.mean(axis=0)) / error))


def calibration(run: Tools, draws: int, thin: int, warmup: int, shrink: float = 1.0, widen: float = 1.0) -> tuple[np.ndarray, float]:
    """χ²₁₉ of the ranks of five predictions, the noise and the log-likelihood of the truth among `draws` draws, one data set a
    chain; and the largest lag-1 autocorrelation of these draws."""
    truth, _ = run.start(jax.random.key(0))
    y = run.simulate(jax.random.key(1), truth, widen)
    true, found = np.asarray(run.judge(truth, y)), []
    params, active = run.start(jax.random.key(2))
    for i in range(warmup + thin * draws):
        params, active = run.step(jax.random.key(1000 + i), params, active, y, shrink)
        if i >= warmup and (i - warmup) % thin == thin - 1:
            found.append(run.judge(params, y))
    values = np.asarray(found)  # (draws, data sets, 7)
    ranks = np.sum(values < true, axis=0)
    counts = np.stack([np.bincount(rank * 20 // (draws + 1), minlength=20) for rank in ranks.T])
    expected = len(true) / 20
    centred = values - values.mean(axis=0)
    # With the mean of only so many draws taken out, independent ones have −1/draws.
    lag = np.mean(centred[1:] * centred[:-1], axis=(0, 1)) / np.mean(centred**2, axis=(0, 1)) + 1.0 / draws
    return np.sum((counts - expected) ** 2, axis=1) / expected, float(np.max(lag))


def test_geweke_with_hyper_priors_and_two_outputs(doubles: Any) -> None:
    assert geweke(model_of(True, targets=2), 400, 15) < 4


def test_geweke_and_calibration_with_fixed_hyper_parameters(doubles: Any) -> None:
    """Short versions, and what they must see: halved prior sds, noise × 1.25. The long ones have 1000 data sets and 99 draws."""
    model = model_of(False)
    assert geweke(model, 400, 15) < 4
    assert geweke(model, 400, 15, shrink=0.5) > 10
    assert geweke(model, 400, 15, widen=1.25) > 10
    run = tools(model, 400)
    ranks, lag = calibration(run, 19, 10, 20)
    assert lag < 0.05
    assert np.max(ranks) < 43.82
    assert np.max(calibration(run, 19, 6, 20, shrink=0.5)[0]) > 43.82


# ---- through fit ---------------------------------------------------------------------------------------------------------------------


def steps(seed: int, rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Three steps, far apart, on a line: the truth has three units."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, rows)
    step = lambda at: 1.0 / (1.0 + np.exp(-6.0 * (x - at)))
    return x[:, None], 0.3 * x + 2 * step(-1.2) - 3 * step(0.0) + 2.5 * step(1.2) + 0.1 * rng.normal(size=rows)


WIDE = Hierarchical(C_beta=4.0, C_gamma=(50.0, 36.0))
NET = ShallowNet(6, linear_term=True, prior=WIDE, likelihood=al.Gaussian(al.InverseGamma(1.0, 0.01)), scaled=False)


@pytest.fixture(scope="module")
def fitted() -> al.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        return al.fit(0, NET, steps(0), ReversibleJump(num_samples=400, num_warmup=300))


def test_fit_has_everything(fitted: al.Fit) -> None:
    probability = rj.units(fitted)
    assert probability.shape == (7,)
    assert abs(probability.sum() - 1) < 1e-12
    assert probability[3] == probability.max()
    x, y = steps(1)
    assert np.mean((fitted.predict(0, x).mean - y) ** 2) < 0.04
    network, active = fitted.posterior.params["network"], rj.active_draws(fitted)
    flat = active.reshape(-1, 6)
    assert np.all(network["gamma"][~flat] == 0)
    assert np.all(network["beta"][~flat] == 0)
    assert np.all(np.diff(flat.astype(int), axis=1) <= 0)  # active ones first
    three = rj.of_size(fitted, 3)
    assert three["gamma"].shape[1:] == (3, 2)
    assert np.all(np.diff(three["gamma"][:, :, 1], axis=1) >= 0)
    assert fitted.manifest["health"]["sizes"][3] == (flat.sum(axis=1) == 3).sum()


def test_priors_on_the_size() -> None:
    np.testing.assert_allclose(np.exp(rj.log_sizes(None, 3, 0.4)), [0.6, 0.24, 0.096, 0.064])
    np.testing.assert_allclose(rj.log_sizes(lambda m: -2.0 * m, 3, 0.5), rj.log_sizes((0, -2, -4, -6), 3, 0.5))
    for wrong in ((0.0, 0.0), (math.nan,) * 4, (-math.inf,) * 4):
        with pytest.raises(al.MethodError, match="log probabilities"):
            rj.log_sizes(wrong, 3, 0.5)


def test_refusals() -> None:
    x, y = regression()
    with pytest.raises(al.MethodError, match="temperature"):
        al.fit(0, linear(), (x, y), ReversibleJump(), temperature=0.5)
    with pytest.raises(al.MethodError, match="cannot be selected"):
        al.fit(0, al.BNN(al.networks.MLP(1, (4,), 1)), (x, y), ReversibleJump())
    with pytest.raises(al.MethodError, match="alpha"):
        ReversibleJump(alpha=1.0)
    with pytest.raises(al.MethodError, match="num_warmup"):
        ReversibleJump(num_warmup=-1)
    with pytest.raises(al.MethodError, match="random number of units"):
        rj.units(al.fit(0, linear(), (x, y), al.Exact()))
