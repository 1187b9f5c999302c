"""Processes over time in O(N): the same answers as the N × N matrix."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import aleator as al
from aleator import gp

RNG = np.random.default_rng(4)
T = np.concatenate([RNG.uniform(0, 6, 18), [3.0, 3.0]])  # in no order, with a tie
Y = np.sin(2 * T) + 0.2 * RNG.standard_normal(20)
NEW = np.array([-0.5, 1.234, 3.0, 7.0])


@pytest.mark.parametrize("kernel", [gp.Matern12(0.7, 1.1), gp.Matern32(0.7, 1.1) + gp.Matern52(2.0, 0.8)], ids=["one", "sum"])
def test_the_same_as_the_matrix(kernel: gp.Kernel) -> None:
    parts = (kernel, gp.Fixed(lambda x: 0.1 * x.reshape(len(x))), al.Gaussian(0.3))
    dense, series = (al.fit(0, model(*parts), (T, Y), gp.Evidence()) for model in (gp.GP, gp.SeriesGP))
    np.testing.assert_allclose(series.log_evidence.value, dense.log_evidence.value, rtol=1e-9)
    ours, truth = series.predict(0, NEW), dense.predict(0, NEW)
    np.testing.assert_allclose(ours.mean, truth.mean, rtol=1e-7)
    np.testing.assert_allclose(ours.std, truth.std, rtol=1e-7)
    mean, covariance = dense.joint(0, NEW)
    draws = series.functions(1, NEW, 4000)
    covariance = covariance[:, 0, :, 0]
    assert np.all(np.abs(draws.mean(0) - mean[:, 0]) < 5 * np.sqrt(np.diag(covariance) / 4000))
    spread = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / 4000)
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5 * spread)


def test_gradients_and_terms_are_those_of_the_matrix() -> None:
    dense, series = (model(gp.Matern52(), gp.Zero()).bind(T, Y[:, None]) for model in (gp.GP, gp.SeriesGP))
    with jax.enable_x64(True):
        params = series.sample_prior(jax.random.key(3))
        value, gradient = jax.jit(jax.value_and_grad(lambda p: series.log_evidence(p, T, Y[:, None])))(params)
        truth, slope = jax.jit(jax.value_and_grad(lambda p: dense.log_evidence(p, T, Y[:, None])))(params)
        np.testing.assert_allclose(value, truth, rtol=1e-9)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        order = np.argsort(T, kind="stable")
        in_time = jax.jit(lambda p: dense.log_likelihood(p, al.Data(T[order], Y[order, None], None).batch()))(params)
        ours = jax.jit(lambda p: series.log_likelihood(p, al.Data(T, Y[:, None], None).batch()))(params)
        np.testing.assert_allclose(ours[order], in_time, rtol=1e-8)


def test_what_is_no_series_is_refused() -> None:
    with pytest.raises(al.ModelError, match="Markov"):
        gp.SeriesGP(gp.RBF())
    with pytest.raises(al.DataError, match="one input"):
        al.fit(0, gp.SeriesGP(gp.Matern32()), (np.ones((5, 2)), np.arange(5.0)), gp.Evidence())
