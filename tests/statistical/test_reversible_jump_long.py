"""Reversible jump at length: calibration on 1000 data sets, Geweke's test, mutations, and the number of units recovered (lecture: E5)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import aleator as al
from aleator import selection
from aleator.methods import reversible_jump as rj
from aleator.methods.reversible_jump import ReversibleJump
from tests.test_reversible_jump import NET, calibration, geweke, linear, model_of, regression, steps, tools

CHI2 = 43.82  # χ²₁₉ at 0.999


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def test_calibration() -> None:
    """Ranks of five predictions, the noise sd and the log-likelihood: 1000 data sets of 20 points × 99 draws, lag-1 correlation < 0.05."""
    ranks, lag = calibration(tools(model_of(False), 1000, 20), 99, 12, 100)
    assert lag < 0.05
    assert np.max(ranks) < CHI2


@pytest.mark.parametrize("wrong", [{"shrink": 0.5}, {"widen": 1.25}], ids=str)
def test_calibration_sees(wrong: dict[str, float]) -> None:
    assert np.max(calibration(tools(model_of(False), 1000, 20), 99, 4, 100, **wrong)[0]) > CHI2


@pytest.mark.parametrize("hierarchical", [False, True])
def test_geweke(hierarchical: bool) -> None:
    model = model_of(hierarchical, targets=1 + hierarchical)
    assert geweke(model, 10_000, 30) < 4
    assert geweke(model, 10_000, 30, widen=1.05) > 5


def test_three_units_are_recovered() -> None:
    """The posterior mode of m is the truth in at least 8 of 10 data sets."""
    right = 0
    for seed in range(10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", al.HealthWarning)
            fit = al.fit(seed, NET, steps(seed), ReversibleJump(num_samples=1000, num_warmup=500))
        right += int(np.argmax(rj.units(fit)) == 3)
    assert right >= 8


def test_chains_repeat_however_they_run() -> None:
    """Stacked or one by one, the chains are the same numbers to rounding over the first draws."""
    method = ReversibleJump(num_samples=5, num_warmup=0, storage="float64")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        again = [al.fit(5, NET, steps(0), method, parallel=parallel) for parallel in ("vmap", "sequential")]
    first, second = (np.asarray(fit.posterior.params["network"]["beta"]) for fit in again)
    np.testing.assert_allclose(first, second, atol=1e-8)


def test_several_targets_share_their_regressors() -> None:
    x, y = regression()
    fit = al.fit(2, linear(), (x, np.stack([y, -y], axis=1)), ReversibleJump(num_samples=2000, num_warmup=100))
    assert fit.predict(0, x).mean.shape == (30, 2)
    assert selection.inclusion(fit)[1] > 0.99  # twice the evidence of one target
