"""Simulation-based calibration at full size: 1,000 data sets × 99 draws a sampler, and the mistakes it must find."""

from __future__ import annotations

import numpy as np
import pytest

import aleator as al

from .. import calibration

pytestmark = pytest.mark.long
SETS = 1000
SAMPLERS = {
    "hmc": al.HMC(num_samples=99, num_warmup=500, num_chains=1, thin=8),
    "nuts": al.NUTS(num_samples=99, num_warmup=500, num_chains=1, thin=6, max_depth=8),
    "chees": al.ChEES(num_samples=3, num_warmup=300, num_chains=33, thin=20),
    "microcanonical": al.Microcanonical(num_samples=99, num_warmup=500, num_chains=1, thin=8),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_are_uniform(name: str) -> None:
    model = calibration.network()
    found = calibration.chi_square(calibration.ranks(model, model, SAMPLERS[name], SETS))
    assert np.all(found < calibration.LIMIT), found


@pytest.mark.parametrize(("wrong", "noise"), [(0.5, 1.0), (1.0, 1.25)], ids=["half the prior", "noise × 1.25"])
def test_mistakes_are_found(wrong: float, noise: float) -> None:
    found = calibration.chi_square(calibration.ranks(calibration.network(), calibration.network(wrong), SAMPLERS["hmc"], SETS, noise=noise))
    assert np.max(found) > calibration.LIMIT
