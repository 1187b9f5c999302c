"""Aleator: Bayesian deep learning for Python on JAX. Any network, many ways of inference, one road from data to decision."""

from aleator import criteria, features, hyperpriors, networks, posterior, priors
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, ModelError, NonFiniteError, StoreError
from aleator._version import __version__
from aleator.compare import Average, Comparison, average, compare
from aleator.data import Batch, Data, Standardiser, Stream, folds, split
from aleator.divergences import kl
from aleator.fit import Fit, fit
from aleator.hyperpriors import HalfCauchy, HalfNormal, InverseGamma, LogNormal
from aleator.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, NegativeBinomial, Poisson, StudentT
from aleator.loop import Options
from aleator.methods import MAP, METHODS, Ensemble, Exact, Method
from aleator.model import BNN, LinearModel, Model
from aleator.networks import as_network
from aleator.posterior import Score
from aleator.predictive import Predictive
from aleator.priors import Normal
from aleator.programs import from_numpyro
from aleator.store import load
from aleator.target import Target, target_from_log_density

__all__ = [
    "BNN",
    "MAP",
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
    "LinearModel",
    "LogNormal",
    "Method",
    "MethodError",
    "Model",
    "ModelError",
    "NegativeBinomial",
    "NonFiniteError",
    "Normal",
    "Options",
    "Poisson",
    "Predictive",
    "Score",
    "Standardiser",
    "StoreError",
    "Stream",
    "StudentT",
    "Target",
    "__version__",
    "as_network",
    "average",
    "compare",
    "criteria",
    "features",
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
