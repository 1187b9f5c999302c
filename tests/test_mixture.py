"""Conjugate families, pairs and mixtures against quadrature, enumeration and simulation."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.latent import Dirichlet, Mixture, Pair, Sticks, parts
from aleator.latent._conjugate import add, inner

EIGHT = np.array([-2.1, -1.7, -1.9, -2.4, 1.8, 2.2, 2.0, 1.5])
TWO = Mixture(2, parts.KnownGaussian(1.0, 3.0))
EVIDENCE = -17.355332  # of EIGHT under TWO, by enumeration (targets.md)


def rows(seed: int, kind: str, num: int = 30) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "bernoulli":
        return (rng.random((num, 2)) < [0.3, 0.8]).astype(float)
    if kind == "poisson":
        return rng.poisson([1.0, 4.0], (num, 2)).astype(float)
    if kind == "categorical":
        return rng.integers(0, 3, (num, 1)).astype(float)
    return rng.normal([1.0, -2.0], [0.5, 2.0], (num, 2))


FAMILIES = {
    **{f"gaussian-{c}": ("gaussian", parts.Gaussian(c)) for c in parts.COVARIANCES},
    **{name: (name, parts.as_part(name)) for name in ("known_gaussian", "bernoulli", "poisson", "categorical")},
}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> Any:
    """A part with its prior counts and those of a posterior for three members, each with ten of thirty rows."""
    kind, part = FAMILIES[request.param]
    y = rows(0, kind)
    part = part.bind(y)
    with jax.enable_x64(True):
        prior = part.prior(3)
        return part, prior, add(prior, part.counts(jnp.repeat(jnp.eye(3), 10, axis=0), jnp.asarray(y)))


class TestFamilies:
    def test_expected_statistics_are_those_of_draws(self, family: Any) -> None:
        part, _, counts = family
        with jax.enable_x64(True):
            draws = jax.jit(jax.vmap(lambda k: part.natural(part.draw(k, counts))))(jax.random.split(jax.random.key(1), 4000))
            for got, want in zip(jax.tree.leaves(draws), jax.tree.leaves(jax.jit(part.expected)(counts)), strict=True):
                error = np.std(got, axis=0) / np.sqrt(len(got))
                assert np.all(np.abs(np.mean(got, axis=0) - want) < 5 * error + 1e-12)

    def test_divergence_is_the_mean_log_ratio(self, family: Any) -> None:
        part, prior, counts = family
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a, b: 0.5 * (a + b), prior, counts)

            def ratio_at(key: Any) -> Any:
                params = part.draw(key, counts)
                return part.log_density(params, counts) - part.log_density(params, wide)

            ratio = np.asarray(jax.jit(jax.vmap(ratio_at))(jax.random.split(jax.random.key(2), 4000)))
            assert abs(ratio.mean() - float(jax.jit(part.divergence)(counts, wide))) < 5 * ratio.std() / np.sqrt(len(ratio))

    def test_mode_is_stationary(self, family: Any) -> None:
        part, _, counts = family
        with jax.enable_x64(True):
            slope = jax.jit(lambda c: jax.grad(lambda p: inner(c, part.natural(p)))(part.mode(c)))(counts)
        assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(jax.tree.map(np.asarray, slope))) < 1e-8

    def test_terms_are_counts_times_statistics(self, family: Any) -> None:
        """Σ shares·log p(y | θ) = ⟨counts, t(θ)⟩ + Σ shares·log h(y)."""
        part, prior, _ = family
        y = rows(3, "gaussian" if isinstance(part, (parts.Gaussian, parts.KnownGaussian)) else type(part).__name__.lower(), 12)
        with jax.enable_x64(True):
            shares = jax.random.uniform(jax.random.key(5), (12, 3))

            def both(y: Any) -> Any:
                natural = part.natural(part.draw(jax.random.key(4), add(prior, part.counts(jnp.ones((12, 3)) / 3, y))))
                base = part.log_terms(jax.tree.map(jnp.zeros_like, natural), y)
                return jnp.sum(shares * (part.log_terms(natural, y) - base)), inner(part.counts(shares, y), natural)

            left, right = jax.jit(both)(jnp.asarray(y))
            assert float(left) == pytest.approx(float(right), abs=1e-9)

    @pytest.mark.parametrize("covariance", ["full", "tied"])
    def test_jacobian_of_precisions(self, covariance: str) -> None:
        part = parts.Gaussian(covariance).bind(np.random.default_rng(0).normal(size=(9, 3)))
        with jax.enable_x64(True):
            params = part.draw(jax.random.key(0), part.prior(1))

            leaves = jax.tree.leaves({k: v for k, v in params.items() if k != "mean"})
            whole = lambda flat: _precision(part, flat, params)
            flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
            _, logdet = np.linalg.slogdet(jax.jacfwd(whole)(flat))
            assert logdet == pytest.approx(float(part.log_jacobian(params)), abs=1e-8)

    def test_gaussian_log_density_against_scipy(self) -> None:
        from scipy.stats import multivariate_normal

        part = parts.Gaussian().bind(rows(0, "gaussian"))
        with jax.enable_x64(True):
            params = part.draw(jax.random.key(3), part.prior(2))
            named = part.constrain(params)
            got = part.log_terms(part.natural(params), jnp.asarray(rows(1, "gaussian")))
        want = [multivariate_normal(named["mean"][k], named["covariance"][k]).logpdf(rows(1, "gaussian")) for k in range(2)]
        np.testing.assert_allclose(got, np.stack(want, axis=1), atol=1e-8)


def _precision(part: Any, flat: Any, params: Any) -> Any:
    """Λ's lower triangle from the unconstrained parameters other than the mean, which changes by the identity."""
    d = 3
    shapes = {k: v.shape for k, v in params.items() if k != "mean"}
    given, at = {"mean": params["mean"]}, 0
    for name in sorted(shapes):
        size = int(np.prod(shapes[name]))
        given[name] = flat[at : at + size].reshape(shapes[name])
        at += size
    return (-2.0 * part.natural(given)["square"]).reshape(d, d)[np.tril_indices(d)]


class TestPairs:
    """D1: exact posteriors, evidences and predictions, all at once or one by one."""

    def test_seven_of_ten(self) -> None:
        y = np.array([1, 1, 0, 1, 0, 1, 1, 0, 1, 1])
        fit = al.fit(0, Pair("bernoulli"), y, al.Exact())
        assert fit.log_evidence.value == pytest.approx(-7.185387, abs=5e-7)
        step_by_step = al.fit(0, Pair("bernoulli"), y[:1], al.Exact())
        for flip in y[1:]:
            step_by_step = step_by_step.update(np.array([flip]))
        assert step_by_step.log_evidence.value == pytest.approx(fit.log_evidence.value, abs=1e-10)
        np.testing.assert_allclose(fit.model.log_predictive(fit.posterior.counts, [1.0, 0.0]), np.log([8 / 12, 4 / 12]), atol=1e-12)

    @pytest.mark.parametrize("name", ["gaussian", "known_gaussian", "poisson", "categorical"])
    def test_evidence_is_the_product_of_predictions(self, name: str) -> None:
        y = rows(5, name, 8)
        model = Pair(name).bind(None, y)
        fit = al.fit(0, model, y, al.Exact(batch_size=3))
        total, counts = 0.0, None
        with jax.enable_x64(True):
            counts = model.prior_counts()
            for row in y:
                total += float(model.log_predictive(counts, row[None])[0])
                counts = add(counts, {"part": model.part.counts(jnp.ones((1, 1)), jnp.asarray(row[None]))})
        assert fit.log_evidence.value == pytest.approx(total, abs=1e-8)

    def test_normal_with_unknown_variance_predicts_a_student(self) -> None:
        from scipy.stats import t

        y = np.array([0.3, 1.2, -0.4, 2.2, 0.9])
        model = Pair(parts.Gaussian(mean=0.5, strength=2.0, df=3.0, spread=1.5))
        fit = al.fit(0, model, y, al.Exact())
        kappa, nu, n = 2.0, 3.0, len(y)
        m = (kappa * 0.5 + y.sum()) / (kappa + n)
        psi = 3.0 * 1.5**2 + ((y - 0.5) ** 2).sum() - (kappa + n) * (m - 0.5) ** 2
        want = t.logpdf([0.0, 2.0], nu + n, loc=m, scale=np.sqrt(psi / (nu + n) * (1 + 1 / (kappa + n))))
        np.testing.assert_allclose(fit.model.log_predictive(fit.posterior.counts, [0.0, 2.0]), want, atol=1e-10)

    def test_simulation_and_densities_agree_with_the_prediction(self) -> None:
        fit = al.fit(0, Pair("bernoulli"), np.array([1, 1, 0]), al.Exact())
        drawn = al.latent.simulate(1, fit, 4000)
        assert abs(drawn.mean() - 0.6) < 5 * np.sqrt(0.24 / 4000)
        got = np.exp(al.latent.log_prob(2, fit, [1.0], num_samples=4000)[0])
        assert abs(got - 0.6) < 5 * np.sqrt(0.6 * 0.4 / 6 / 4000)  # sd of a Beta(3, 2) draw


def enumerate_labels() -> tuple[float, np.ndarray]:
    """log p(y) of EIGHT under TWO, and P(z_i = z_0 | y), over all 2⁸ assignments."""
    model = TWO.bind(None, EIGHT)
    with jax.enable_x64(True):
        prior = model.prior_counts()
        base = float(jnp.sum(model.part.log_terms(jax.tree.map(jnp.zeros_like, model.part.prior(2)), jnp.asarray(EIGHT[:, None]))[:, 0]))

        def one(labels: Any) -> Any:
            shares = jax.nn.one_hot(labels, 2, dtype=jnp.float64)
            counts = {"weights": shares.sum(axis=0), "parts": model.part.counts(shares, jnp.asarray(EIGHT[:, None]))}
            counts = add(prior, counts)
            change = [f.log_partition(counts[n]) - f.log_partition(prior[n]) for n, f in model.families.items()]
            return sum(change) + base

        labels = np.array(list(itertools.product([0, 1], repeat=8)))
        logs = np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(labels)))
    log_evidence = float(np.logaddexp.reduce(logs))
    return log_evidence, np.exp(logs - log_evidence) @ (labels == labels[:, :1])


class TestMixture:
    def test_enumeration_gives_the_stated_evidence(self) -> None:
        assert enumerate_labels()[0] == pytest.approx(EVIDENCE, abs=5e-7)

    def test_coordinate_ascent_is_a_lower_bound(self) -> None:
        fit = al.fit(0, TWO, EIGHT, al.CAVI())
        assert fit.log_evidence.kind == "lower bound"
        # One of two equal modes: the bound is below the evidence by at least log 2, and not by much more here.
        assert -0.1 < fit.log_evidence.value + np.log(2) - EVIDENCE < 0.0

    @pytest.mark.parametrize("collapsed", [False, True])
    def test_gibbs_finds_who_belongs_together(self, collapsed: bool) -> None:
        fit = al.fit(3, TWO, EIGHT, al.Gibbs(num_samples=2000, num_warmup=100, num_chains=2, collapsed=collapsed))
        with jax.enable_x64(True):
            shares = np.asarray(jax.jit(jax.vmap(lambda p: fit.model.responsibilities(p, EIGHT)))(fit.posterior.params))
        together = np.einsum("sk,snk->sn", shares[:, 0], shares)
        together[:, 0] = 1.0
        want = enumerate_labels()[1]
        for i in range(1, 8):
            chains = together[:, i].reshape(2, -1)
            assert abs(together[:, i].mean() - want[i]) < 5 * al.convergence.mcse(chains)

    @pytest.mark.parametrize(
        "name",
        [
            "full",
            "bernoulli",
            "student_t",
            "sticks",
            *(pytest.param(n, marks=pytest.mark.long) for n in ("tied", "diagonal", "spherical", "poisson")),
        ],
    )
    def test_no_step_lowers_the_bound(self, name: str) -> None:
        kind = name if name in ("bernoulli", "poisson") else "gaussian"
        y = np.concatenate([rows(1, kind), rows(2, kind)[:, ::-1]])
        part = (
            parts.as_part(name) if name in ("bernoulli", "poisson", "student_t") else parts.Gaussian("full" if name == "sticks" else name)
        )
        model = Mixture(3, part, Sticks(1.0) if name == "sticks" else Dirichlet(1.0))
        for method, field in ((al.EM(num_restarts=2, num_steps=60), "objective"), (al.CAVI(num_restarts=2, num_steps=60), "bound")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", al.HealthWarning)  # not all have converged after 60 steps
                fit = al.fit(0, model, y, method)
            skip = 1 if field == "objective" else 2  # seeds have no value
            trace = fit.info[field][..., skip:]
            assert np.isfinite(trace).sum() >= 4
            assert not np.any(np.diff(trace, axis=-1) < -1e-9 * np.abs(trace[..., 1:]))  # NaN once a start is done

    def test_em_ends_where_the_gradient_is_zero(self) -> None:
        y = np.concatenate([rows(1, "gaussian"), 3.0 + rows(2, "gaussian")])
        fit = al.fit(0, Mixture(2), y, al.EM(tolerance=1e-13))
        model = fit.model
        with jax.enable_x64(True):
            batch = al.Batch(None, jnp.asarray(y))
            objective = lambda p: jnp.sum(model.log_likelihood(p, batch)) + model.penalty(p)
            slope = jax.jit(jax.grad(objective))(jax.tree.map(jnp.asarray, fit.posterior.params))
            assert max(float(np.abs(np.asarray(leaf)).max()) for leaf in jax.tree.leaves(slope)) < 1e-3

    def test_stochastic_steps_come_close_to_the_bound(self) -> None:
        y = np.concatenate([rows(1, "gaussian", 200), 6.0 + rows(2, "gaussian", 200)])
        whole = al.fit(0, Mixture(2), y, al.CAVI()).log_evidence.value
        some = al.fit(0, Mixture(2), y, al.CAVI(batch_size=40, num_steps=500)).log_evidence.value
        assert whole - 2.0 < some < whole + 1e-6

    def test_a_dirichlet_process_leaves_components_empty(self) -> None:
        y = np.concatenate([rows(1, "gaussian", 60) - 6.0, rows(2, "gaussian", 60) + 6.0])
        fit = al.fit(0, Mixture(8, parts.Gaussian(), Sticks(1.0)), y, al.CAVI())
        weights = al.latent.components(1, fit, y).mean("weights")
        assert np.sum(weights > 0.05) == 2

    def test_labels_are_resolved_whatever_the_chain_did(self) -> None:
        fit = al.fit(3, TWO, EIGHT, al.Gibbs(num_samples=500, num_warmup=100, num_chains=4))
        found = al.latent.components(0, fit, EIGHT)
        assert found.swapped > 0.05
        assert sorted(np.round(found.mean("mean")[:, 0])) == [-2.0, 2.0]
        assert np.all(found.std("mean") < 1.0)
        assert "relabelled" in repr(found)
        assert len(set(found.labels[:4])) == len(set(found.labels[4:])) == 1

    def test_nuts_and_gibbs_agree_on_the_density(self) -> None:
        points = np.array([-2.0, 0.0, 2.0])
        nuts = al.fit(0, TWO, EIGHT, al.NUTS(num_samples=500, num_warmup=500))
        gibbs = al.fit(0, TWO, EIGHT, al.Gibbs(num_samples=2000, num_warmup=100))
        first, second = (np.exp(al.latent.log_prob(0, fit, points, num_samples=2000)) for fit in (nuts, gibbs))
        # Posterior sd of p(y) at these points is about .03; both chains have over 300 effective draws.
        np.testing.assert_allclose(first, second, atol=5 * 0.03 * np.sqrt(2 / 300))

    def test_the_evidence_by_smc(self) -> None:
        fit = al.fit(0, TWO, EIGHT, al.SMC(num_particles=1000))
        assert abs(fit.log_evidence.value - EVIDENCE) < 3 * fit.log_evidence.stderr + 0.02

    def test_saved_and_loaded(self, tmp_path: Any) -> None:
        fit = al.fit(0, Mixture(3, "poisson"), rows(0, "poisson"), al.CAVI(num_restarts=1))
        fit.save(tmp_path / "fit")
        again = al.load(tmp_path / "fit")
        assert again.model == fit.model
        np.testing.assert_array_equal(al.latent.simulate(1, fit, 5), al.latent.simulate(1, again, 5))

    def test_rows_count_by_their_weight(self) -> None:
        y = rows(0, "gaussian", 20)
        weight = np.r_[np.full(10, 2.0), np.zeros(10)]
        weighted = al.fit(0, Mixture(1, parts.Gaussian(mean=0.0, spread=1.0)), (None, y, weight), al.CAVI())
        doubled = al.fit(0, Mixture(1, parts.Gaussian(mean=0.0, spread=1.0)), np.tile(y[:10], (2, 1)), al.CAVI())
        np.testing.assert_allclose(weighted.posterior.counts["parts"]["square"], doubled.posterior.counts["parts"]["square"], rtol=1e-12)


class TestHardData:
    @pytest.mark.parametrize("y", [np.array([1.5]), np.ones(6), np.array([0.0, 1.0])], ids=["one row", "identical", "K > N"])
    @pytest.mark.parametrize("method", [al.EM(num_steps=50), al.CAVI(num_steps=50), al.Gibbs(num_samples=20, num_warmup=5)])
    def test_little_data_gives_finite_answers(self, y: np.ndarray, method: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", al.HealthWarning)
            fit = al.fit(0, Mixture(3, parts.Gaussian("diagonal")), y, method)
        assert np.isfinite(al.latent.log_prob(0, fit, y)).all()

    def test_missing_entries_count_for_nothing(self) -> None:
        y = rows(0, "gaussian")
        holes = np.vstack([y, [[np.nan, np.nan]]])
        part = parts.Gaussian("diagonal", mean=0.0, spread=1.0)
        whole, with_hole = (al.fit(0, Mixture(1, part), rows, al.CAVI(num_restarts=1)) for rows in (y, holes))
        assert with_hole.log_evidence.value == pytest.approx(whole.log_evidence.value, abs=1e-9)
        with pytest.raises(al.DataError, match="diagonal"):
            al.fit(0, Mixture(1, "gaussian"), holes, al.EM())

    @pytest.mark.parametrize(
        ("part", "y", "expected"),
        [
            ("poisson", [1.0, -1.0], "whole numbers"),
            ("poisson", [1.0, 0.5], "whole numbers"),
            ("bernoulli", [0.0, 2.0], "zeros and ones"),
            ("categorical", [0.0, 1.5], "whole numbers"),
            ("gaussian", [0.0, np.inf], "finite"),
            ("gaussian", ["a", "b"], "numeric|numbers"),
        ],
    )
    def test_values_no_part_can_emit(self, part: str, y: list, expected: str) -> None:
        with pytest.raises(al.DataError, match=expected):
            al.fit(0, Mixture(2, part), np.array(y), al.EM())

    def test_what_does_not_fit_is_refused_by_name(self) -> None:
        with pytest.raises(al.DataError, match="no inputs"):
            al.fit(0, Mixture(2), (EIGHT, EIGHT), al.EM())
        with pytest.raises(al.ModelError, match="whole number"):
            Mixture(0)
        with pytest.raises(al.ModelError, match="one of"):
            Mixture(2, "gamma")
        with pytest.raises(al.ModelError, match="conjugate"):
            Pair("student_t")
        with pytest.raises(al.MethodError, match="sum out"):
            al.fit(0, al.LinearModel(al.features.Polynomial(1)), (np.arange(3.0), np.arange(3.0)), al.EM())
        fit = al.fit(0, Mixture(1), EIGHT, al.EM(num_restarts=1))
        with pytest.raises(al.ModelError, match="log_prob"):
            fit.predict(0, EIGHT)
        with pytest.raises(al.MethodError, match="come apart"):
            al.fit(0, Mixture(2, parts.Gaussian("tied")), EIGHT, al.Gibbs(collapsed=True))

    @pytest.mark.parametrize(
        ("part", "wrong"),
        [
            ("bernoulli", [[0.5, 1.0]]),
            ("poisson", [[-1.0, 2.0]]),
            ("poisson", [[1.5, 2.0]]),
            ("categorical", [[3.0]]),
            ("categorical", [[-1.0]]),
        ],
    )
    def test_questions_about_rows_the_parts_cannot_emit_are_refused(self, part, wrong):
        """They were counted as missing, or as the nearest label, in silence."""
        fit = al.fit(0, Mixture(2, part), rows(0, part), al.EM(num_restarts=1, num_steps=500))
        for ask in (al.latent.log_prob, al.latent.components, al.latent.conditional):
            with pytest.raises(al.DataError, match="cannot emit"):
                ask(1, fit, np.array(wrong))

    @pytest.mark.parametrize("covariance", parts.COVARIANCES)
    def test_questions_about_other_columns_are_refused(self, covariance):
        """One column was broadcast to all of the fit's."""
        fit = al.fit(0, Mixture(1, parts.Gaussian(covariance)), np.random.default_rng(0).normal(size=(9, 3)), al.EM(num_restarts=1))
        for ask in (al.latent.log_prob, al.latent.components):
            with pytest.raises(al.DataError, match="1 columns"):
                ask(1, fit, np.zeros(4))

    def test_an_update_with_other_columns_is_refused(self):
        fit = al.fit(0, Pair("bernoulli"), np.array([1.0, 0.0]), al.Exact())
        with pytest.raises(al.DataError, match="2 columns"):
            fit.update(np.array([[1.0, 0.0]]))
