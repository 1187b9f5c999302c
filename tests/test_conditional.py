"""Conditional sampling against conditional densities in closed form: what is missing given what is seen, and y given x."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.latent import VAE, FactorModel, Mixture, parts
from aleator.posterior import Point

NUM = 4000
RNG = np.random.default_rng(0)
MIXED = np.concatenate([RNG.normal(size=(60, 3)) @ RNG.normal(size=(3, 3)) + shift for shift in ([0, 0, 0], [2.0, -1.0, 1.0])])
NAN = np.nan


def as_fit(model: Any, params: Any) -> Any:
    """A fit by hand: what the questions ask of one."""
    return SimpleNamespace(model=model, posterior=Point(params))


def somewhere(model: Any, y: np.ndarray) -> tuple[Any, dict[str, np.ndarray]]:
    """Parameters near the data, and their names."""
    model = model.bind(None, y)
    with jax.enable_x64(True):
        params = jax.jit(model.first)(jax.random.key(0), al.Batch(None, jnp.asarray(y)))
        return as_fit(model, params), jax.tree.map(np.asarray, jax.jit(model.constrain)(params))


def check(drawn: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Draws (S, m) have these moments within 5 standard errors of each."""
    error = drawn.std(axis=0) / np.sqrt(len(drawn))
    assert np.all(np.abs(drawn.mean(axis=0) - mean) < 5 * error)
    products = (drawn - mean)[:, :, None] * (drawn - mean)[:, None, :]
    error = products.std(axis=0) / np.sqrt(len(drawn))
    assert np.all(np.abs(products.mean(axis=0) - covariance) < 5 * error)


def given(mean: np.ndarray, covariance: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Moments of the missing entries of a Gaussian row, the squared distance of those seen, and log |Σ_ss|."""
    seen = np.isfinite(row)
    within, across = covariance[np.ix_(seen, seen)], covariance[np.ix_(~seen, seen)]
    gap = row[seen] - mean[seen]
    gain = across @ np.linalg.inv(within) if seen.any() else np.zeros((int((~seen).sum()), 0))
    distance = float(gap @ np.linalg.solve(within, gap)) if seen.any() else 0.0
    return mean[~seen] + gain @ gap, covariance[np.ix_(~seen, ~seen)] - gain @ across.T, distance, float(np.linalg.slogdet(within)[1])


class TestMixture:
    @pytest.mark.parametrize("part", ["full", "student_t"])
    def test_moments_of_what_is_missing(self, part: str) -> None:
        from scipy.special import gammaln, softmax

        freedom = 5.0
        model = Mixture(2, parts.Gaussian() if part == "full" else parts.StudentT(freedom=freedom))
        fit, named = somewhere(model, MIXED)
        rows = np.array([[0.3, NAN, NAN], [NAN, -0.5, 1.5], [NAN, NAN, NAN], [1.0, 2.0, 3.0]])
        drawn = al.latent.conditional(1, fit, rows, NUM)
        assert drawn.shape == (NUM, 4, 3)
        np.testing.assert_array_equal(drawn[:, 3], np.tile(rows[3], (NUM, 1)))
        for number, row in enumerate(rows[:2]):
            size = np.isfinite(row).sum()
            each = [given(m, c, row) for m, c in zip(named["mean"], named["covariance"], strict=True)]
            distance, logdet = (np.array([one[i] for one in each]) for i in (2, 3))
            if part == "full":
                level, spread = -0.5 * (distance + logdet), np.ones(2)
            else:
                level = gammaln(0.5 * (freedom + size)) - 0.5 * logdet - 0.5 * (freedom + size) * np.log1p(distance / freedom)
                spread = (freedom + distance) / (freedom + size - 2.0)  # covariance of a t with freedom + size degrees
            share = softmax(np.log(named["weights"]) + level)
            mean = sum(s * one[0] for s, one in zip(share, each, strict=True))
            covariance = sum(
                s * (v * one[1] + np.outer(one[0] - mean, one[0] - mean)) for s, v, one in zip(share, spread, each, strict=True)
            )
            check(drawn[:, number][:, ~np.isfinite(row)], mean, covariance)
        mean = named["weights"] @ named["mean"]
        np.testing.assert_array_less(np.abs(drawn[:, 2].mean(axis=0) - mean), 5 * drawn[:, 2].std(axis=0) / np.sqrt(NUM))

    def test_binary_columns(self) -> None:
        y = (MIXED > 0.5).astype(float)
        fit, named = somewhere(Mixture(2, "bernoulli"), y)
        p = named["probability"]
        share = named["weights"] * p[:, 0] * (1 - p[:, 1])
        truth = share @ p[:, 2] / share.sum()
        drawn = al.latent.conditional(1, fit, np.array([[1.0, 0.0, NAN]]), NUM)[:, 0, 2]
        assert abs(drawn.mean() - truth) < 5 * np.sqrt(truth * (1 - truth) / NUM)

    def test_parameters_are_drawn_too(self) -> None:
        """With few rows the predictive given a part is wider than at any one parameter tree: conjugate pair, closed form a t."""
        model = Mixture(1, parts.Gaussian("full", mean=0.0, strength=1.0, df=6.0, spread=1.0)).bind(None, MIXED[:4])
        with jax.enable_x64(True):  # one component: the posterior is its prior and all rows
            seed = jax.jit(model.seed)(jax.random.key(0), al.Batch(None, jnp.asarray(MIXED[:4])))
            counts = jax.tree.map(jnp.add, model.prior_counts(), seed)
        fit = SimpleNamespace(model=model, posterior=model.posterior(counts, None))
        drawn = al.latent.conditional(1, fit, np.array([[NAN, NAN, NAN]]), NUM)[:, 0]
        counts = counts["parts"]
        number, df = float(counts["number"][0]), float(counts["df"][0]) + 3
        mean = np.asarray(counts["sum"][0]) / number
        scatter = np.asarray(counts["square"][0]) - number * np.outer(mean, mean)
        check(drawn, mean, scatter * (1 + 1 / number) / (df - 4))


def test_probabilistic_pca() -> None:
    model = FactorModel(1, noise="isotropic").bind(None, MIXED)
    fit = as_fit(model, model.maximum_likelihood(MIXED))
    named = jax.tree.map(np.asarray, model.constrain(fit.posterior.params))
    covariance = named["loadings"] @ named["loadings"].T + np.eye(3) * named["noise"] ** 2
    row = np.array([NAN, -0.5, NAN])
    check(al.latent.conditional(1, fit, row[None], NUM)[:, 0][:, [0, 2]], *given(named["mean"], covariance, row)[:2])


class TestAutoencoder:
    """y = zW + b + ε, with an encoder that is only about right."""

    WEIGHT = np.array([[1.0, -0.5, 0.8, 0.0], [0.3, 0.9, -0.2, 1.1]], np.float32)
    BIAS = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
    NOISE = 0.6

    def fitted(self) -> Any:
        model = VAE(2, (), (), al.Gaussian(self.NOISE)).bind(None, np.zeros((3, 4)))
        params = model.init(jax.random.key(0))
        spread = np.linalg.inv(self.WEIGHT @ self.WEIGHT.T / self.NOISE**2 + np.eye(2))
        gain = 0.9 * spread @ self.WEIGHT / self.NOISE**2
        params["decoder0"]["layer0"] = {"weight": jnp.asarray(self.WEIGHT), "bias": jnp.asarray(self.BIAS)}
        params["encoder0"]["layer0"] = {
            "weight": jnp.asarray(np.c_[gain.T, np.zeros((4, 2))], jnp.float32),
            "bias": jnp.asarray(np.r_[-gain @ self.BIAS, np.log(1.2 * np.sqrt(np.diagonal(spread)))], jnp.float32),
        }
        return as_fit(model, params)

    def test_what_is_missing_has_the_moments_of_the_closed_form(self) -> None:
        rows = np.array([[NAN, NAN, 0.7, 3.0], [1.5, NAN, NAN, NAN], [0.1, 0.2, 0.3, 0.4]])
        drawn = al.latent.conditional(0, self.fitted(), rows, NUM, num_sweeps=60)
        np.testing.assert_array_equal(drawn[:, 2], np.tile(rows[2].astype(np.float32), (NUM, 1)))
        covariance = self.WEIGHT.T @ self.WEIGHT + self.NOISE**2 * np.eye(4)
        for number in (0, 1):
            mean, spread, _, _ = given(self.BIAS, covariance, rows[number])
            check(drawn[:, number][:, ~np.isfinite(rows[number])], mean, spread)

    def test_what_cannot_be_completed_is_refused(self) -> None:
        model = VAE(2, (), (), al.Gaussian(1.0), "autoregressive").bind(None, np.zeros((3, 4)))
        with pytest.raises(al.ModelError, match="closed density"):
            al.latent.conditional(0, as_fit(model, model.init(jax.random.key(0))), np.zeros((1, 4)))
        with pytest.raises(al.ModelError, match="complete rows"):
            al.latent.conditional(0, SimpleNamespace(model=al.latent.HMM(2)), np.zeros((1, 4)))
        bound = Mixture(2).bind(None, MIXED)
        with pytest.raises(al.DataError, match="columns"):
            al.latent.conditional(0, as_fit(bound, {}), np.zeros((1, 4)))


class TestGivenInputs:
    """z | x ~ N(xP + p, s²), y | z, x ~ N(zW + xV + b, σ²): p(y | x) is Gaussian."""

    P, OFFSET, S = np.array([[0.7, -0.4], [0.2, 0.5], [0.0, 1.0]]), np.array([0.3, -0.2]), np.array([0.6, 0.9])
    W, V = np.array([[1.0, -0.5], [0.3, 0.9]]), np.array([[0.5, 0.1], [-1.0, 0.4], [0.0, 0.7]])
    BIAS, NOISE = np.array([1.0, -1.0]), 0.5
    X = np.random.default_rng(3).normal(size=(30, 3))

    def fitted(self) -> Any:
        model = VAE(2, (), (), al.Gaussian(self.NOISE)).bind(self.X, np.zeros((30, 2)))
        params = model.init(jax.random.key(0))
        layer = lambda weight, bias: {"layer0": {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}}
        params["prior"] = layer(np.c_[self.P, np.zeros((3, 2))], np.r_[self.OFFSET, np.log(self.S)])
        params["decoder0"] = layer(np.r_[self.W, self.V], self.BIAS)
        # The posterior's mean without its correlation: linear in y, x.
        spread = np.linalg.inv(self.W @ self.W.T / self.NOISE**2 + np.diag(self.S**-2))
        on_y, on_prior = self.W.T @ spread / self.NOISE**2, np.diag(self.S**-2) @ spread
        on_x, rest = self.P @ on_prior - self.V @ on_y, self.OFFSET @ on_prior - self.BIAS @ on_y
        params["encoder0"] = layer(np.c_[np.r_[on_y, on_x], np.zeros((5, 2))], np.r_[rest, np.log(np.sqrt(np.diagonal(spread)))])
        return as_fit(model, params)

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        mean = (self.X @ self.P + self.OFFSET) @ self.W + self.X @ self.V + self.BIAS
        return mean, self.W.T @ np.diag(self.S**2) @ self.W + self.NOISE**2 * np.eye(2)

    def test_density_given_x(self) -> None:
        from scipy.stats import multivariate_normal

        fit, (mean, covariance) = self.fitted(), self.moments()
        y = mean + np.random.default_rng(4).normal(size=(30, 2))
        truth = multivariate_normal([0, 0], covariance).logpdf(y - mean)
        runs = np.stack([al.latent.log_prob(seed, fit, y, 2000, x=self.X) for seed in range(8)])
        assert np.all(np.abs(runs.mean(axis=0) - truth) < 6 * runs.std(axis=0) / np.sqrt(8) + 2e-3)
        found = al.latent.sandwich(0, fit, x=np.tile(self.X, (10, 1)), num_steps=20, num_chains=4)
        truth = multivariate_normal([0, 0], covariance).logpdf(found.y - np.tile(mean, (10, 1)))
        for ratios in (np.exp(found.lower - truth), np.exp(truth - found.upper)):
            assert abs(ratios.mean() - 1.0) < 5 * ratios.std() / np.sqrt(300)

    def test_draws_given_x_and_a_part_of_y(self) -> None:
        fit, (mean, covariance) = self.fitted(), self.moments()
        _, drawn = fit.model.simulate(0, fit.posterior.params, 2000, x=self.X[:2])
        for row in (0, 1):
            check(drawn[:, row], mean[row], covariance)
        row = np.array([0.4, NAN])
        got = al.latent.conditional(0, fit, row[None], 2000, x=self.X[:1], num_sweeps=40)[:, 0, 1:]
        check(got, *given(mean[0], covariance, row)[:2])

    def test_training_comes_as_near_as_the_truth(self) -> None:
        from scipy.stats import multivariate_normal

        rng = np.random.default_rng(5)
        x = rng.normal(size=(600, 3))
        z = x @ self.P + self.OFFSET + self.S * rng.normal(size=(600, 2))
        y = z @ self.W + x @ self.V + self.BIAS + self.NOISE * rng.normal(size=(600, 2))
        fit = al.fit(0, VAE(2, (), (), al.Gaussian(self.NOISE), "full"), (x, y), al.Amortised(2000, 50, 1e-2))
        mean = (x @ self.P + self.OFFSET) @ self.W + x @ self.V + self.BIAS
        truth = multivariate_normal([0, 0], self.moments()[1]).logpdf(y - mean)
        found = al.latent.log_prob(1, fit, y, 500, x=x)
        assert found.mean() > truth.mean() - 0.03
