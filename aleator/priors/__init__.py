"""Priors over the parameter tree of a network.

A prior sees the network's parameters w (a tree), their fan-ins (a tree of ints: 1 for biases and gains) and its own
hyper-parameters h (a dict of unconstrained reals, {} when it has none). What is inferred is (raw, h); the weights are
w = weights(raw, h). Only a non-centred hierarchical prior makes a difference between raw and w.
"""

from aleator.priors._prior import Prior
from aleator.priors.fixed import Fixed, FromDistribution, Laplace, Normal, ScaleMixture, StudentT, from_distribution
from aleator.priors.scaled import Group, Hierarchical, Horseshoe, centre

__all__ = [
    "Fixed",
    "FromDistribution",
    "Group",
    "Hierarchical",
    "Horseshoe",
    "Laplace",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentT",
    "centre",
    "from_distribution",
]
