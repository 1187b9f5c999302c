"""What a component emits: conjugate families of observations, shared by mixtures, hidden Markov models and single conjugate pairs.

Observations are rows y (n, d); a part has K members (components, states). Missing entries are NaN where `missing` says so: they count for
nothing. Each class is one family: its prior in the user's words, pseudo-counts η inside (`aleator.latent._conjugate`).
"""

from __future__ import annotations

from typing import Any

from aleator._errors import ModelError, message
from aleator.latent.parts._part import (
    LOG_2PI,
    Part,
    check_binary,
    check_counts,
    check_finite,
    check_labels,
    check_values,
    check_width,
    emitted,
    moments,
    spread_out,
)
from aleator.latent.parts.discrete import Bernoulli, Categorical, Poisson
from aleator.latent.parts.gaussian import COVARIANCES, Gaussian, StudentT
from aleator.latent.parts.known_gaussian import KnownGaussian

PARTS: dict[str, type[Part]] = {
    "gaussian": Gaussian,
    "known_gaussian": KnownGaussian,
    "student_t": StudentT,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "categorical": Categorical,
}


def as_part(given: Any) -> Part:
    """A part by its name, or as it is."""
    if isinstance(given, str) and given in PARTS:
        return PARTS[given]()
    if not isinstance(given, Part):
        raise ModelError(
            message("This is not a part.", repr(given), f"one of {list(PARTS)} or an object of al.latent.parts", "pass e.g. 'gaussian'")
        )
    return given


__all__ = [
    "COVARIANCES",
    "LOG_2PI",
    "PARTS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "KnownGaussian",
    "Part",
    "Poisson",
    "StudentT",
    "as_part",
    "check_binary",
    "check_counts",
    "check_finite",
    "check_labels",
    "check_values",
    "check_width",
    "emitted",
    "moments",
    "spread_out",
]
