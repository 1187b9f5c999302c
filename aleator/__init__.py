"""Aleator: Bayesian deep learning for Python on JAX. Any network, many ways of inference, one road from data to decision."""

from aleator import convergence, criteria, families, features, gradients, hyperpriors, networks, posterior, priors, sites
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, ModelError, NonFiniteError, StoreError
from aleator._oracle import fidelity, oracle
from aleator._version import __version__
from aleator.compare import Average, Choice, Comparison, average, choose, compare
from aleator.data import Batch, Data, Standardiser, Stream, folds, split
from aleator.divergences import kl, kl_log_uniform
from aleator.fit import Fit, fit
from aleator.hyperpriors import HalfCauchy, HalfNormal, InverseGamma, LogNormal
from aleator.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, NegativeBinomial, Poisson, StudentT
from aleator.loop import Options
from aleator.methods import (
    HMC,
    IVON,
    MAP,
    METHODS,
    NUTS,
    ConcreteDropout,
    Dropout,
    Ensemble,
    Exact,
    Method,
    Microcanonical,
    Renyi,
    SparseDropout,
    Variational,
    VariationalDropout,
)
from aleator.model import BNN, LinearModel, Model
from aleator.networks import as_network
from aleator.posterior import Score
from aleator.predictive import Predictive
from aleator.priors import Normal
from aleator.programs import from_numpyro
from aleator.store import load
from aleator.target import Target, target_from_log_density

__all__ = [
    "Choice",
    "choose",
    "kl_log_uniform",
    "gradients",
    "sites",
    "VariationalDropout",
    "SparseDropout",
    "Dropout",
    "ConcreteDropout",
    "BNN",
    "MAP",
    "HMC",
    "NUTS",
    "METHODS",
    "AleatorError",
    "Average",
    "Batch",
    "Bernoulli",
    "Categorical",
    "Comparison",
    "Data",
    "DataError",
    "Ensemble",
    "Exact",
    "Fit",
    "Gaussian",
    "HalfCauchy",
    "HalfNormal",
    "HealthWarning",
    "HeteroscedasticGaussian",
    "InverseGamma",
    "IVON",
    "LinearModel",
    "LogNormal",
    "Method",
    "MethodError",
    "Microcanonical",
    "Model",
    "ModelError",
    "NegativeBinomial",
    "NonFiniteError",
    "Normal",
    "Options",
    "Poisson",
    "Predictive",
    "Renyi",
    "Score",
    "Standardiser",
    "StoreError",
    "Stream",
    "StudentT",
    "Target",
    "Variational",
    "__version__",
    "as_network",
    "average",
    "compare",
    "convergence",
    "criteria",
    "families",
    "features",
    "fidelity",
    "oracle",
    "fit",
    "folds",
    "from_numpyro",
    "hyperpriors",
    "kl",
    "load",
    "networks",
    "posterior",
    "priors",
    "split",
    "target_from_log_density",
]
