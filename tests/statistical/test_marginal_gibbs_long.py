"""MarginalGibbs, the long versions: Geweke with 10⁶ sweeps, and simulation-based calibration with 1000 data sets × 99 draws."""

from __future__ import annotations

import numpy as np
import pytest

from tests import test_marginal_gibbs as short
from tests.test_marginal_gibbs import x64  # noqa: F401


@pytest.mark.parametrize("case", short.CASES)
def test_geweke(case, x64):  # noqa: F811
    make, k = short.CASES[case]
    z = short.geweke(short.bound(make(), short.GEWEKE_X, k), 500, 2000, seed=1)
    assert np.max(np.abs(z)) < 4, z


def test_ranks_are_uniform(x64):  # noqa: F811
    chi, lag = short.calibration(1000, short.THIN, seed=1)
    assert np.max(chi) < short.CHI_SQUARED, chi
    assert lag < 0.05


@pytest.mark.parametrize("how", [short.NOISE_25, short.HALVED], ids=["noise × 1.25", "halved prior sd"])
def test_ranks_catch(how, x64):  # noqa: F811
    chi, _ = short.calibration(1000, short.THIN, how, seed=1)
    assert np.max(chi) > short.CHI_SQUARED, chi
