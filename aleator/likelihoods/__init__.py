"""Likelihoods: how a network's outputs f become a distribution of y.

Shapes: `outputs` (n, num_outputs(k)), canonical targets (n, k) (class labels (n,) int32), `extra` the constrained learned parameters, e.g.
`{"scale": (k,)}`. Everything returns one number per example or per entry: sums over the data, N/n and temperature belong to the target.
All methods but `encode` are pure and work under jit, vmap over a leading axis of draws, and grad, in float32 and float64.
"""

from aleator.likelihoods._likelihood import LEARNED, Extra, Likelihood, Positive
from aleator.likelihoods.counts import NegativeBinomial, Poisson
from aleator.likelihoods.labels import Bernoulli, Categorical
from aleator.likelihoods.real import Gaussian, HeteroscedasticGaussian, StudentT

__all__ = [
    "LEARNED",
    "Bernoulli",
    "Categorical",
    "Extra",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NegativeBinomial",
    "Poisson",
    "Positive",
    "StudentT",
]
