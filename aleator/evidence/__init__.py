"""The log evidence by every road, and predictive scores beside it: each is a `Score` with its kind and standard error.

`ais`, `sandwich`, `thermodynamic`, `smc` and `nested` start from the prior of a model with data, or from a target with a reference;
`bridge`, `waic` and `loo` from a fit, `refined_bound` from a fitted autoencoder. Exact evidences, Laplace's and bounds of variational methods come with their fits
(`fit.log_evidence`). `al.compare` puts them side by side.
"""

from aleator.evidence.annealing import Sandwich, ais, sandwich
from aleator.evidence.bridging import bridge
from aleator.evidence.predictive import Pointwise, log_likelihoods, loo, waic
from aleator.evidence.refined import refined_bound
from aleator.evidence.sampled import nested, smc
from aleator.evidence.thermodynamics import thermodynamic

__all__ = [
    "Pointwise",
    "Sandwich",
    "ais",
    "bridge",
    "log_likelihoods",
    "loo",
    "nested",
    "refined_bound",
    "sandwich",
    "smc",
    "thermodynamic",
    "waic",
]
