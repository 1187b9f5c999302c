"""Short simulation-based calibration of the general samplers; 1,000 data sets each are in tests/statistical."""

from __future__ import annotations

import numpy as np
import pytest

import aleator as al

from . import calibration

SETS = 60
SAMPLERS = {
    "hmc": al.HMC(num_samples=99, num_warmup=300, num_chains=1, thin=4),
    "nuts": al.NUTS(num_samples=99, num_warmup=300, num_chains=1, thin=3, max_depth=8),
    "chees": al.ChEES(num_samples=3, num_warmup=200, num_chains=33, thin=20),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_are_uniform(name: str) -> None:
    """χ² of 20 bins has 0.1 % of false alarms per quantity; at 60 sets its small counts make it lighter in the tail, not heavier."""
    model = calibration.network()
    found = calibration.chi_square(calibration.ranks(model, model, SAMPLERS[name], SETS))
    assert np.all(found < calibration.LIMIT), found


def test_a_wrong_prior_is_seen() -> None:
    """The same with half the prior's standard deviation: the truth lies outside the draws far too often."""
    found = calibration.chi_square(calibration.ranks(calibration.network(), calibration.network(0.5), SAMPLERS["hmc"], SETS))
    assert np.max(found) > calibration.LIMIT
