"""Sparse Gaussian processes: the collapsed bound against its formula, natural gradients against the closed form, other likelihoods against quadrature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aleator as al
from aleator import gp
from aleator.gp import svgp
from aleator.gp._factor import inverse_of, whiten
from aleator.target import Target

RNG = np.random.default_rng(11)
X = RNG.uniform(-2, 2, (24, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * RNG.standard_normal(24)
Z = X[::4] + 0.1
KERNEL = gp.RBF((0.7, 1.3), 1.2)


def test_collapsed_bound_is_titsias_formula() -> None:
    model = gp.SparseGP(KERNEL, inducing=Z, likelihood=al.Gaussian(0.3)).bind(X, Y[:, None])
    k = lambda a, b: 1.44 * np.exp(-0.5 * np.sum(((a[:, None] - b[None]) / [0.7, 1.3]) ** 2, -1))
    low = k(X, Z) @ np.linalg.solve(k(Z, Z), k(Z, X))
    covariance = low + 0.09 * np.eye(24)
    density = -0.5 * Y @ np.linalg.solve(covariance, Y) - 0.5 * np.linalg.slogdet(covariance)[1] - 12 * np.log(2 * np.pi)
    bound = density - 0.5 * np.trace(k(X, X) - low) / 0.09
    fit = al.fit(0, model, (X, Y), gp.Evidence())
    assert fit.log_evidence.kind == "lower bound"
    np.testing.assert_allclose(fit.log_evidence.value, bound, rtol=1e-9)
    # The best q(u): precision K⁻¹ + K⁻¹K(z, X)K(X, z)K⁻¹/σ², carried to new inputs.
    new = X[:3] - 0.2
    inner = np.linalg.inv(k(Z, Z) + k(Z, X) @ k(X, Z) / 0.09)
    mean = k(new, Z) @ inner @ k(Z, X) @ Y / 0.09
    spread = k(new, new) - k(new, Z) @ np.linalg.solve(k(Z, Z), k(Z, new)) + k(new, Z) @ inner @ k(Z, new)
    ours = fit.joint(0, new)
    np.testing.assert_allclose(ours[0][:, 0], mean, rtol=1e-7)
    np.testing.assert_allclose(ours[1][:, 0, :, 0], spread, rtol=1e-6, atol=1e-9)
    predictive = fit.predict(0, new)
    np.testing.assert_allclose(predictive.std, np.sqrt(np.diag(spread) + 0.09), rtol=1e-7)
    draws = fit.functions(1, new, 4000)
    assert np.all(np.abs(np.cov(draws.T) - spread) < 5 * np.sqrt((np.outer(np.diag(spread), np.diag(spread)) + spread**2) / 4000))


@pytest.fixture(scope="module")
def exact() -> al.Fit:
    return al.fit(0, gp.GP(KERNEL, gp.Zero(), al.Gaussian(0.3)), (X, Y), gp.Evidence())


def test_all_rows_inducing_is_the_exact_process(exact: al.Fit) -> None:
    sparse = al.fit(0, gp.SparseGP(KERNEL, 24, likelihood=al.Gaussian(0.3)), (X, Y), gp.Evidence())
    np.testing.assert_allclose(sparse.log_evidence.value, exact.log_evidence.value, rtol=1e-6)
    np.testing.assert_allclose(sparse.joint(0, Z)[1], exact.joint(0, Z)[1], atol=1e-6)
    fewer = al.fit(0, gp.SparseGP(KERNEL, 5, likelihood=al.Gaussian(0.3)), (X, Y), gp.Evidence())
    assert fewer.log_evidence.value < exact.log_evidence.value - 0.1


def test_one_natural_step_of_length_one_is_the_closed_form() -> None:
    model = gp.SparseGP(KERNEL, inducing=Z, likelihood=al.Gaussian(0.3))
    closed = al.fit(0, model, (X, Y), gp.Evidence()).posterior
    one = al.fit(0, model, (X, Y), gp.SVGP(num_steps=1, batch_size=None, learning_rate=0.0, natural_rate=1.0)).posterior
    np.testing.assert_allclose(one.location, closed.location, rtol=1e-7, atol=1e-9)
    square = lambda root: root @ np.swapaxes(root, -1, -2)
    np.testing.assert_allclose(square(one.spread), square(closed.spread), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("likelihood", [al.Gaussian(), al.Poisson()], ids=["gaussian", "poisson"])
def test_a_step_follows_the_slope_of_the_bound(likelihood: al.Likelihood) -> None:
    """Hyper-parameters after one step, against Adam on the bound as it is written down, from a q(v) of no special shape."""
    y = np.abs(Y).round()[:, None] if isinstance(likelihood, al.Poisson) else Y[:, None]
    model = gp.SparseGP(gp.RBF(), inducing=Z, likelihood=likelihood, learn_inducing=True).bind(X, y)
    with jax.enable_x64(True):
        batch, target, optimizer = al.Data(X, y, None).batch(), Target(model, 48), optax.adam(0.1)
        params = model.start(jax.random.key(0))
        root = np.tril(RNG.standard_normal((6, 6)))
        state = svgp.init(jax.random.key(1), params, model, optimizer)
        state = state._replace(shift=jnp.asarray(RNG.standard_normal((1, 6))), precision=jnp.asarray(np.eye(6) + root @ root.T)[None])
        after, info = jax.jit(lambda state: svgp.step(jax.random.key(2), state, batch, target, optimizer, 0.1, 100, True))(state)
        covariance = np.linalg.inv(np.asarray(state.precision[0]))
        location, spread = (covariance @ np.asarray(state.shift[0]))[None], np.linalg.cholesky(covariance)[None]

        def bound(params: dict) -> jax.Array:
            mean, variance = gp.sparse.sparse_moments(model, params, jnp.asarray(location), jnp.asarray(spread), batch.x)
            nodes, weights = np.polynomial.hermite_e.hermegauss(20)
            at = [likelihood.log_prob(mean + jnp.sqrt(variance) * node, batch.y, model.extra(params)) for node in nodes]
            return 2.0 * jnp.sum(jnp.stack(at).T @ (weights / weights.sum()))

        value, slope = jax.jit(jax.value_and_grad(lambda p: bound(p) + model.log_prior(p)))(params)
        moved = optax.apply_updates(params, optimizer.update(jax.tree.map(jnp.negative, slope), state.optimizer, params)[0])
        np.testing.assert_allclose(info.bound, value - model.log_prior(params) - svgp.divergence(location, spread), rtol=1e-9)
        jax.tree.map(lambda ours, truth: np.testing.assert_allclose(ours, truth, rtol=1e-6), after.params, moved)


def test_whitened_values_have_the_slopes_of_their_definition() -> None:
    """C⁻¹R and its gradient, against differentiating through the factor itself."""
    root, right, given = (RNG.standard_normal(shape) for shape in ((5, 5), (5, 3), (5, 3)))
    with jax.enable_x64(True):
        plain = lambda a, r: jnp.sum(given * jnp.linalg.solve(jnp.linalg.cholesky(a), r))
        ours = lambda a, r: jnp.sum(given * whiten(a, r)[0])
        at = jnp.asarray(root @ root.T + np.eye(5)), jnp.asarray(right)
        for mine, truth in zip(
            jax.jit(jax.value_and_grad(ours, (0, 1)))(*at), jax.jit(jax.value_and_grad(plain, (0, 1)))(*at), strict=True
        ):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), mine, truth)


def test_inverses_by_halves() -> None:
    root = RNG.standard_normal((601, 601))
    matrix = root @ root.T / 601 + np.eye(601)
    with jax.enable_x64(True):
        ours = jax.jit(inverse_of)(jnp.asarray(np.linalg.cholesky(matrix)))
    np.testing.assert_allclose(ours, np.linalg.inv(matrix), rtol=1e-9, atol=1e-11)


def test_the_bound_of_a_classifier_is_just_below_its_evidence() -> None:
    """Two points: log Z by quadrature over both values of f; and q is stationary."""
    x, y = np.array([-0.3, 0.4]), np.array([1, 0])
    model = gp.SparseGP(gp.RBF(1.0, 1.5), inducing=x, likelihood=al.Bernoulli())
    fit = al.fit(0, model, (x, y), gp.SVGP(num_steps=200, batch_size=None, learning_rate=0.0, natural_rate=0.8))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    lower = 1.5 * np.linalg.cholesky(np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-12 * np.eye(2))
    f = lower @ np.stack(np.meshgrid(nodes, nodes, indexing="ij")).reshape(2, -1)
    log_z = np.log(np.outer(weights, weights).ravel() / weights.sum() ** 2 @ np.prod(1 / (1 + np.exp(-f * np.array([[1], [-1]]))), axis=0))
    with jax.enable_x64(True):
        bound = fit.model
        location, spread = (jnp.asarray(part[0]) for part in (fit.posterior.location, fit.posterior.spread))

        @jax.jit
        def value(location: jax.Array, spread: jax.Array) -> jax.Array:
            mean, variance = gp.sparse.sparse_moments(bound, fit.posterior.params, location, spread, jnp.asarray(x))
            terms = svgp.expected(jax.random.key(0), bound.likelihood, mean, variance, y[:, None], {})
            return jnp.sum(terms) - svgp.divergence(location, spread)

        top, slopes = jax.value_and_grad(value, (0, 1))(location, spread)
    assert log_z - 0.05 < float(top) < log_z
    assert np.abs(slopes[0]).max() < 1e-4 and np.abs(np.triu(slopes[1])).max() < 1e-4


def test_batches_streams_and_shared_outputs() -> None:
    """Class logits from mini-batches: the bound climbs, the probabilities know the classes; a stream is as good."""
    labels = np.digitize(X[:, 0], [-0.7, 0.7])
    model = gp.SparseGP(gp.RBF(1.0, 3.0), 10, likelihood=al.Categorical(3))
    method = gp.SVGP(num_steps=300, batch_size=8)
    fit = al.fit(0, model, (X, labels), method)
    assert np.mean(fit.info["bound"][-50:]) > np.mean(fit.info["bound"][:5]) + 3
    probabilities = fit.predict(0, X).mean
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-6)
    assert np.mean(probabilities.argmax(1) == labels) > 0.9
    parts = lambda epoch, start: ((X[i : i + 8], labels[i : i + 8]) for i in range(8 * start, 24, 8))
    bound = fit.model  # inducing inputs already chosen: a stream shows one batch only
    streamed = al.fit(0, bound, al.Stream(parts, 24), method)
    assert np.mean(streamed.predict(0, X).mean.argmax(1) == labels) > 0.9


def test_inducing_inputs_are_where_the_variance_is() -> None:
    """A pivoted Cholesky factorisation, step by step; duplicates are not chosen twice."""
    x = np.concatenate([X, X])
    chosen = gp.greedy(KERNEL.bind(X), x, 6)
    k = lambda a, b: 1.44 * np.exp(-0.5 * np.sum(((a[:, None] - b[None]) / [0.7, 1.3]) ** 2, -1))
    for number in range(1, 6):
        z = chosen[:number]
        left = 1.44 - np.sum(k(x, z) * np.linalg.solve(k(z, z), k(z, x)).T, axis=1)
        np.testing.assert_allclose(x[left.argmax()], chosen[number])
    assert len(np.unique(gp.greedy(KERNEL.bind(X), x, 40), axis=0)) == 24


def test_more_rows_are_taken_in_without_those_before() -> None:
    """Exactly what all rows at once give, bound included, for Gaussian noise; for labels close to it, and in two parts like in one."""
    model = gp.SparseGP(KERNEL, inducing=Z, likelihood=al.Gaussian(0.3))
    part, whole = (al.fit(0, model, (X[:n], Y[:n]), gp.Evidence()) for n in (14, 24))
    grown = part.update((X[14:], Y[14:]))
    assert grown.manifest["data"]["num_data"] == 24 and grown.status.startswith("Updated: 10 more rows")
    np.testing.assert_allclose(grown.log_evidence.value, whole.log_evidence.value, rtol=1e-9)
    assert grown.log_evidence.kind == "lower bound"
    for ours, truth in zip(grown.joint(0, X[:3]), whole.joint(0, X[:3]), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=1e-7, atol=1e-9)
    labels = (X[:, 0] > 0).astype(int)
    classes = gp.SparseGP(gp.RBF(1.0, 2.0), inducing=Z, likelihood=al.Bernoulli())
    settled = gp.SVGP(num_steps=100, batch_size=None, learning_rate=0.0, natural_rate=0.5)
    first, all_rows = (al.fit(0, classes, (X[:n], labels[:n]), settled) for n in (14, 24))
    after = first.update((X[14:], labels[14:]))
    truth, before = all_rows.predict(0, X).mean, first.predict(0, X).mean
    assert np.abs(after.predict(0, X).mean - truth).max() < 0.05 < 0.15 < np.abs(before - truth).max()
    assert after.log_evidence.kind == "estimate"


def literal(length: tuple[float, float], size: int) -> float:
    """log p(y) of the first rows by the dense formula."""
    x, y = X[:size], Y[:size]
    covariance = 1.44 * np.exp(-0.5 * np.sum(((x[:, None] - x[None]) / length) ** 2, -1)) + 0.09 * np.eye(size)
    return -0.5 * y @ np.linalg.solve(covariance, y) - 0.5 * np.linalg.slogdet(covariance)[1] - 0.5 * size * np.log(2 * np.pi)


def test_halves_with_all_inducing_inputs_are_the_exact_process(exact: al.Fit) -> None:
    """Inducing inputs at the rows of each half as it comes: posterior and evidence of the exact process of all rows. Far away, without them, the update says what it cannot see."""
    half = al.fit(0, gp.SparseGP(KERNEL, inducing=X[:12], likelihood=al.Gaussian(0.3)), (X[:12], Y[:12]), gp.Evidence())
    full = gp.extend(half, (X[12:], Y[12:]), num_inducing=12)
    assert full.model.num_inducing == 24
    np.testing.assert_allclose(full.log_evidence.value, literal((0.7, 1.3), 24), rtol=1e-7)
    for ours, truth in zip(full.joint(0, Z), exact.joint(0, Z), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=1e-6, atol=1e-7)
    with pytest.warns(al.HealthWarning, match="explain 0 % of the prior variance"):
        half.update((X[12:] + 30, Y[12:]))
    with pytest.raises(al.DataError, match="features"):
        half.update((X[12:, :1], Y[12:]))


def test_draws_of_hyper_parameters_are_weighed_by_the_rows_they_foresaw() -> None:
    """Two lengths: weights after an update are those of Bayes' rule with the exact p(new rows | old rows)."""
    lengths = np.array([[0.7, 1.3], [0.2, 0.4]])
    model = gp.SparseGP(gp.RBF(scale=1.2), inducing=X, likelihood=al.Gaussian(0.3)).bind(X, Y[:, None])
    draws = al.posterior.Draws({"kernel": {"log_length": np.log(lengths)}, "mean": {}, "likelihood": {}})
    first = model.condition(draws, al.Data(X[:20], Y[:20, None], None))
    after, told, healthy = first.absorbed(model, al.Data(X[20:], Y[20:, None], None))
    ratio = np.exp([literal(tuple(length), 24) - literal(tuple(length), 20) for length in lengths])
    np.testing.assert_allclose(after.base.weights, ratio / ratio.sum(), rtol=1e-6)
    assert not healthy and "of 2 draws" in told


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(al.ModelError, match="SVGP"):
        al.fit(0, gp.SparseGP(KERNEL, 4, likelihood=al.Poisson()), (X, np.arange(24)), gp.Evidence())
    with pytest.raises(al.MethodError, match="sparse"):
        al.fit(0, gp.GP(KERNEL), (X, Y), gp.SVGP(batch_size=None))
