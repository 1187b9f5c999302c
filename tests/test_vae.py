"""Autoencoders against linear decoders, whose evidence is a Gaussian density, and flows against their Jacobians."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.latent import VAE, Levels, Symbols, posteriors
from aleator.methods.amortised import terms
from aleator.posterior import Point

NOISE, D, K = 0.5, 4, 2
WEIGHT = np.random.default_rng(0).normal(size=(K, D)).astype(np.float32)
BIAS = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
ROWS = (np.random.default_rng(1).normal(size=(40, K)) @ WEIGHT + BIAS + NOISE * np.random.default_rng(2).normal(size=(40, D))).astype(
    np.float32
)


def linear(posterior: str = "full", layers: Any = K) -> tuple[VAE, Any]:
    """y = zW + b + ε with an encoder that is the exact posterior N(M⁻¹W(y − b), σ²M⁻¹), M = WWᵀ + σ²I, where q can be."""
    model = VAE(layers, (), (), al.Gaussian(NOISE), posterior).bind(None, ROWS)
    params = model.init(jax.random.key(0))
    params["decoder0"]["layer0"] = {"weight": jnp.asarray(WEIGHT), "bias": jnp.asarray(BIAS)}
    covariance = np.linalg.inv(WEIGHT @ WEIGHT.T / NOISE**2 + np.eye(K))
    gain = covariance @ WEIGHT / NOISE**2
    factor = np.linalg.cholesky(covariance)
    rest = np.r_[np.log(np.diagonal(factor)), factor[np.tril_indices(K, -1)]]
    rest = rest if posterior == "full" else rest[:K]
    weight = np.concatenate([gain.T, np.zeros((D, len(rest)))], axis=1)
    params["encoder0"]["layer0"] = {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.asarray(np.r_[-gain @ BIAS, rest], jnp.float32)}
    return model, params


A, S = np.array([[0.8, -0.6]], np.float32), 0.7


def two_layers() -> tuple[VAE, Any]:
    """z₂ ~ N(0, 1), z₁ = z₂A + N(0, s²), y = z₁W + b + ε: a Gaussian again."""
    model, params = linear("diagonal", (K, 1))
    layer = lambda weight, bias: {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    params["decoder1"]["layer0"] = layer(np.concatenate([A, np.zeros((1, K))], axis=1), [0, 0, np.log(S), np.log(S)])
    params["encoder1"]["layer0"] = layer([[0.4, 0.0], [-0.3, 0.0]], [0.0, 0.0])
    return model, params


def exact(y: np.ndarray, hidden: np.ndarray | None = None) -> np.ndarray:
    """hidden: covariance of z₁, I by default."""
    from scipy.stats import multivariate_normal

    inner = np.eye(K) if hidden is None else hidden
    return multivariate_normal(BIAS, WEIGHT.T @ inner @ WEIGHT + NOISE**2 * np.eye(D)).logpdf(y)


def as_fit(model: VAE, params: Any) -> Any:
    """A fit by hand: what the questions ask of one."""
    return SimpleNamespace(model=model, posterior=Point(params))


class TestLinearDecoder:
    def test_an_exact_encoder_makes_every_weight_the_evidence(self) -> None:
        model, params = linear()
        weights = model.weights(jax.random.key(1), params, al.Batch(None, jnp.asarray(ROWS)), 3)
        got = np.asarray(weights.data + weights.prior - weights.posterior)
        np.testing.assert_allclose(got, np.tile(exact(ROWS), (3, 1)), atol=2e-4)

    def test_importance_weights_rise_to_the_evidence_and_stop_there(self) -> None:
        model, params = linear("diagonal")
        runs = {k: np.stack([model.log_prob(seed, params, ROWS, k).mean() for seed in range(8)]) for k in (1, 10, 1000)}
        means = [runs[k].mean() for k in runs]
        assert means[0] < means[1] < means[2]
        truth = exact(ROWS).mean()
        for k, values in runs.items():
            assert values.mean() < truth + 5 * values.std() / np.sqrt(8), k
        assert means[2] == pytest.approx(truth, abs=5 * runs[1000].std() / np.sqrt(8) + 2e-3)

    def test_two_layers(self) -> None:
        model, params = two_layers()
        truth = exact(ROWS, A.T @ A + S**2 * np.eye(K))
        runs = np.stack([model.log_prob(seed, params, ROWS, 4000) for seed in range(8)])
        error = runs.std(axis=0) / np.sqrt(8)
        assert np.all(np.abs(runs.mean(axis=0) - truth) < 6 * error + 2e-3)

    def test_sticking_the_landing_has_no_variance_at_an_exact_encoder(self) -> None:
        model, params = linear()
        slopes = {name: encoder_gradients(model, params, al.Amortised(estimator=name), 20) for name in ("elbo", "stl")}
        assert np.abs(slopes["stl"]).max() < 2e-3
        assert np.abs(slopes["elbo"]).max() > 0.05

    def test_doubly_reparameterised_gradients_are_unbiased(self) -> None:
        """The gradients of both networks agree in mean with those of the bound itself, and the encoder's vary less."""
        model, params = linear("diagonal")
        params["encoder0"]["layer0"]["bias"] = params["encoder0"]["layer0"]["bias"] + 0.3
        for network in ("encoder0", "decoder0"):
            plain, doubly = (
                encoder_gradients(model, params, al.Amortised(estimator=name, num_importance=4), 3000, network) for name in ("iwae", "dreg")
            )
            error = np.sqrt((plain.var(axis=0) + doubly.var(axis=0)) / 3000)
            assert np.all(np.abs(plain.mean(axis=0) - doubly.mean(axis=0)) < 5 * error + 1e-6), network
            if network == "encoder0":
                assert doubly.var(axis=0).sum() < 0.7 * plain.var(axis=0).sum()

    def test_training_finds_what_generated_the_data(self) -> None:
        y = np.concatenate([ROWS + 0.1 * shift for shift in range(3)])
        fit = al.fit(0, VAE(K, (), (), al.Gaussian(NOISE)), y, al.Amortised(num_steps=1500, batch_size=20, learning_rate=1e-2))
        params = fit.posterior.params
        scores = fit.model.log_prob(1, params, y, 200)
        assert scores.mean() > exact(y).mean() - 0.05  # maximum likelihood is at least as good as the truth
        assert fit.model.encode(params, y)[0].shape == (120, K)
        assert fit.model.decode(params, np.zeros((3, K))).shape == (3, D)
        error = np.mean((fit.model.reconstruct(2, params, y) - y) ** 2)
        assert error < 2 * NOISE**2
        drawn = fit.model.simulate(3, params, 4000)[1]
        np.testing.assert_allclose(drawn.mean(axis=0), y.mean(axis=0), atol=5 * y.std() / np.sqrt(120))


class TestAnnealed:
    @pytest.mark.parametrize("start", ["prior", "encoder"])
    def test_weights_average_to_the_evidence_in_both_directions(self, start: str) -> None:
        """E[w] = p(y) upwards and E[1/w] = 1/p(y) downwards, so that the truth lies between the means of their logs."""
        model, params = linear("diagonal") if start == "prior" else two_layers()
        params["encoder0"]["layer0"]["bias"] = params["encoder0"]["layer0"]["bias"] + 0.4  # leaves room between q and the posterior
        found = al.latent.sandwich(1, as_fit(model, params), 600, num_steps=60, num_chains=8, start=start)
        truth = exact(found.y, None if start == "prior" else A.T @ A + S**2 * np.eye(K))
        for ratios in (np.exp(found.lower - truth), np.exp(truth - found.upper)):
            error = ratios.std(ddof=1) / np.sqrt(len(ratios))
            assert error < 0.02
            assert abs(ratios.mean() - 1.0) < 5 * error
        below, above = found.lower - truth, found.upper - truth
        assert below.mean() < 2 * below.std() / np.sqrt(600)
        assert above.mean() > -2 * above.std() / np.sqrt(600)
        assert 0.005 < found.width < 0.1

    def test_more_temperatures_leave_less_to_doubt(self) -> None:
        model, params = linear("diagonal")
        fit = as_fit(model, params)
        np.testing.assert_allclose(al.latent.ais(0, fit, ROWS, num_steps=300, start="prior"), exact(ROWS), atol=0.25)
        assert al.latent.sandwich(0, fit, 100, num_steps=300, start="prior").width < 0.05

    def test_what_cannot_be_annealed_is_refused(self) -> None:
        model = VAE(K, (), (), al.Gaussian(NOISE), "autoregressive").bind(None, ROWS)
        with pytest.raises(al.ModelError, match="closed density"):
            al.latent.ais(0, as_fit(model, model.init(jax.random.key(0))), ROWS)
        with pytest.raises(al.ModelError, match="autoencoder"):
            al.latent.ais(0, SimpleNamespace(model=al.latent.Mixture(2)), ROWS)


def encoder_gradients(model: Any, params: Any, method: Any, num: int, network: str = "encoder0") -> np.ndarray:
    batch = al.Batch(None, jnp.asarray(ROWS[:5]))

    def one(key: Any) -> Any:
        slope = jax.grad(lambda p: jnp.mean(terms(key, p, batch, model, method, 1.0)[0]))(params)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(slope[network])])

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), num)))


class TestPosteriors:
    @pytest.mark.parametrize("name", list(posteriors.POSTERIORS))
    def test_density_of_draws_is_that_of_the_change_of_variables(self, name: str) -> None:
        d, q = 3, posteriors.as_posterior(name)
        rng = np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        params = jax.tree.map(lambda leaf: leaf + 0.3 * normal(*leaf.shape), q.init(jax.random.key(0), d))  # flows begin as the identity
        h, e = 0.5 * normal(q.num_outputs(d)), normal(d)
        z, log_q = q.draw(params, h, e)
        _, logdet = np.linalg.slogdet(np.asarray(jax.jacfwd(lambda noise: q.draw(params, h, noise)[0])(e), np.float64))
        assert float(log_q) == pytest.approx(float(posteriors.standard_normal(e)) - logdet, abs=1e-4)
        if q.closed:
            assert float(q.log_prob(params, h, z)) == pytest.approx(float(log_q), abs=1e-4)

    def test_divergence_by_dimension(self) -> None:
        h = jnp.asarray([0.5, -1.0, 0.2, -0.7])
        want = [0.5 * (m**2 + np.exp(2 * r) - 1 - 2 * r) for m, r in ((0.5, 0.2), (-1.0, -0.7))]
        np.testing.assert_allclose(posteriors.Diagonal().divergence(h), want, rtol=1e-6)


class TestPixels:
    @pytest.mark.parametrize("likelihood", [Levels(8), Symbols(8)])
    def test_probabilities_sum_to_one_and_are_those_of_draws(self, likelihood: Any) -> None:
        outputs = jax.random.normal(jax.random.key(0), (1, likelihood.num_outputs(1)))
        levels = jnp.arange(8.0)[:, None]
        probs = np.exp(np.asarray(likelihood.log_prob(jnp.repeat(outputs, 8, axis=0), levels, {})))
        assert probs.sum() == pytest.approx(1.0, abs=1e-5)
        drawn = np.asarray(likelihood.sample(jax.random.key(1), jnp.repeat(outputs, 8000, axis=0), {})).ravel()
        share = np.bincount(drawn.astype(int), minlength=8) / 8000
        assert np.all(np.abs(share - probs) < 5 * np.sqrt(probs / 8000) + 1e-3)

    def test_values_outside_are_refused(self) -> None:
        with pytest.raises(al.DataError, match="0 … 3"):
            al.fit(0, VAE(1, likelihood=Levels(4)), np.array([[0.0, 4.0], [1.0, 2.0]]), al.Amortised())


class TestUse:
    def test_conditional_saved_and_loaded(self, tmp_path: Any) -> None:
        model = VAE(2, (8,), (8,), al.Gaussian(NOISE))
        fit = al.fit(0, model, (ROWS[:, :1], ROWS[:, 1:]), al.Amortised(num_steps=20, batch_size=10, warmup=10))
        fit.save(tmp_path / "fit")
        again = al.load(tmp_path / "fit")
        ask = lambda f: f.model.log_prob(1, f.posterior.params, ROWS[:7, 1:], 20, x=ROWS[:7, :1])
        np.testing.assert_array_equal(ask(fit), ask(again))
        assert fit.model.simulate(0, fit.posterior.params, 3, x=ROWS[:5, :1])[1].shape == (3, 5, 3)
        with pytest.raises(al.ModelError, match="x"):
            fit.model.log_prob(1, fit.posterior.params, ROWS[:, 1:], 20)

    def test_images_binarised_through_a_network_of_ones_own(self) -> None:
        images = np.random.default_rng(0).uniform(size=(30, 4, 4)).astype(np.float32)
        weight = {"w": jnp.zeros((16, 4))}
        encoder = (lambda params, x, key=None: x.reshape(x.shape[0], -1) @ params["w"], weight)
        fit = al.fit(0, VAE(2, encoder, (8,), binarise=True), images, al.Amortised(num_steps=30, batch_size=10, free_bits=0.05))
        assert fit.model.reconstruct(0, fit.posterior.params, np.round(images)).shape == (30, 4, 4)
        assert fit.model.log_prob(0, fit.posterior.params, np.round(images), 10).max() < 0

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(al.ModelError, match="dimensions"):
            VAE(0)
        with pytest.raises(al.ModelError, match="one of"):
            VAE(2, posterior="planar")
        with pytest.raises(al.MethodError, match="closed density"):
            al.fit(0, VAE(2, posterior="autoregressive"), ROWS > 0, al.Amortised(estimator="dreg", batch_size=None))
        with pytest.raises(al.MethodError, match="inference network"):
            al.fit(0, al.latent.Mixture(2), ROWS, al.Amortised(batch_size=None))
        with pytest.raises(al.DataError, match=r"\[0, 1\]"):
            al.fit(0, VAE(2, binarise=True), ROWS, al.Amortised(batch_size=None))
        with pytest.raises(al.DataError, match="binarise=True"):
            al.fit(0, VAE(2), np.full((3, 2), 0.5), al.Amortised(batch_size=None))
        with pytest.raises(al.DataError, match="rows"):
            al.fit(0, VAE(2), ROWS[:, 0], al.Amortised())
        with pytest.raises(al.MethodError, match="ELBO"):
            al.Amortised(estimator="iwae", free_bits=0.1)
