"""Choosing a prior with open eyes (A11): what it says about functions, making it say what is meant, and how much that matters.

simulate     functions and data drawn from the prior, with numbers on their size, range and wiggliness.
match        tune the scales of a network's prior until its functions look like draws of a target, such as a Gaussian process.
distance     how far prior functions are from the target's, with an error.
sensitivity  how predictions and evidence change when the prior is made narrower or wider.
"""

from aleator.elicit._dials import scaled
from aleator.elicit.kernels import matern, periodic, rbf
from aleator.elicit.matching import Distance, Matched, distance, match
from aleator.elicit.simulated import Simulated, simulate
from aleator.elicit.strength import Sensitivity, Slope, sensitivity

__all__ = [
    "Distance",
    "Matched",
    "Sensitivity",
    "Simulated",
    "Slope",
    "distance",
    "match",
    "matern",
    "periodic",
    "rbf",
    "scaled",
    "sensitivity",
    "simulate",
]
