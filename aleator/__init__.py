"""Aleator: Bayesian deep learning for Python on JAX. Any network, many ways of inference, one road from data to decision."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from aleator._version import __version__

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` below imports a name when it is first asked for
    from aleator import (
        convergence,
        criteria,
        curvature,
        decide,
        elicit,
        evidence,
        explain,
        families,
        features,
        gp,
        gradients,
        hyperpriors,
        latent,
        linalg,
        networks,
        posterior,
        priors,
        selection,
        series,
        shallow,
        sites,
        stein,
    )
    from aleator._auto import Auto, auto
    from aleator._compare import Average, Choice, Comparison, average, choose, compare, stack
    from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, ModelError, NonFiniteError, StoreError
    from aleator._fit import Fit, fit
    from aleator._oracle import fidelity, oracle
    from aleator.data import Batch, Data, Standardiser, Stream, folds, split
    from aleator.decide import active
    from aleator.divergences import kl, kl_log_uniform
    from aleator.hyperpriors import HalfCauchy, HalfNormal, InverseGamma, LogNormal
    from aleator.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, NegativeBinomial, Poisson, StudentT
    from aleator.loop import Options
    from aleator.methods import (
        CAVI,
        EM,
        HMC,
        IVON,
        MALA,
        MAP,
        METHODS,
        NUTS,
        PBP,
        SGHMC,
        SGLD,
        SGNHT,
        SIR,
        SMC,
        SVGD,
        SWAG,
        Amortised,
        BatchEnsemble,
        BayesianBootstrap,
        ChEES,
        ConcreteDropout,
        Cyclical,
        Dropout,
        EllipticalSlice,
        Ensemble,
        Exact,
        ExpectationPropagation,
        Gibbs,
        HyperEnsemble,
        Independence,
        Laplace,
        MarginalGibbs,
        Method,
        Microcanonical,
        Nested,
        ParallelTempering,
        RandomWalk,
        Refined,
        Renyi,
        RepulsiveEnsemble,
        ReversibleJump,
        Slice,
        Snapshot,
        SparseDropout,
        Subnetwork,
        Underdamped,
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
    "Cyclical",
    "Refined",
    "RepulsiveEnsemble",
    "SVGD",
    "stein",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "Underdamped",
    "Amortised",
    "CAVI",
    "EM",
    "latent",
    "SWAG",
    "Snapshot",
    "BayesianBootstrap",
    "BatchEnsemble",
    "HyperEnsemble",
    "ExpectationPropagation",
    "PBP",
    "Nested",
    "evidence",
    "linalg",
    "curvature",
    "BNN",
    "HMC",
    "IVON",
    "MALA",
    "MAP",
    "Laplace",
    "Subnetwork",
    "METHODS",
    "NUTS",
    "SIR",
    "SMC",
    "AleatorError",
    "Auto",
    "Average",
    "active",
    "auto",
    "decide",
    "stack",
    "Batch",
    "Bernoulli",
    "Categorical",
    "ChEES",
    "Choice",
    "Comparison",
    "ConcreteDropout",
    "Data",
    "DataError",
    "Dropout",
    "EllipticalSlice",
    "Ensemble",
    "Exact",
    "Fit",
    "Gaussian",
    "Gibbs",
    "HalfCauchy",
    "HalfNormal",
    "HealthWarning",
    "HeteroscedasticGaussian",
    "Independence",
    "InverseGamma",
    "LinearModel",
    "LogNormal",
    "MarginalGibbs",
    "Method",
    "MethodError",
    "Microcanonical",
    "Model",
    "ModelError",
    "NegativeBinomial",
    "NonFiniteError",
    "Normal",
    "Options",
    "ParallelTempering",
    "Poisson",
    "Predictive",
    "RandomWalk",
    "Renyi",
    "ReversibleJump",
    "Score",
    "Slice",
    "SparseDropout",
    "Standardiser",
    "StoreError",
    "Stream",
    "StudentT",
    "Target",
    "Variational",
    "VariationalDropout",
    "__version__",
    "as_network",
    "average",
    "choose",
    "compare",
    "convergence",
    "criteria",
    "elicit",
    "explain",
    "families",
    "features",
    "fidelity",
    "fit",
    "folds",
    "from_numpyro",
    "gp",
    "gradients",
    "hyperpriors",
    "kl",
    "kl_log_uniform",
    "load",
    "networks",
    "oracle",
    "posterior",
    "priors",
    "selection",
    "series",
    "shallow",
    "sites",
    "split",
    "target_from_log_density",
]

# Where each name comes from. None of them is also the name of a module of this package: importing that would put the module in the name's place.
_HOMES = {
    "_auto": "Auto auto",
    "_compare": "Average Choice Comparison average choose compare stack",
    "_errors": "AleatorError DataError HealthWarning MethodError ModelError NonFiniteError StoreError",
    "_fit": "Fit fit",
    "_oracle": "fidelity oracle",
    "data": "Batch Data Standardiser Stream folds split",
    "decide": "active",
    "divergences": "kl kl_log_uniform",
    "hyperpriors": "HalfCauchy HalfNormal InverseGamma LogNormal",
    "likelihoods": "Bernoulli Categorical Gaussian HeteroscedasticGaussian NegativeBinomial Poisson StudentT",
    "loop": "Options",
    "methods": (
        "CAVI EM HMC IVON MALA MAP METHODS NUTS PBP SGHMC SGLD SGNHT SIR SMC SVGD SWAG Amortised BatchEnsemble BayesianBootstrap ChEES "
        "ConcreteDropout Cyclical Dropout EllipticalSlice Ensemble Exact ExpectationPropagation Gibbs HyperEnsemble Independence "
        "Laplace MarginalGibbs Method Microcanonical Nested ParallelTempering RandomWalk Refined Renyi RepulsiveEnsemble "
        "ReversibleJump Slice Snapshot SparseDropout Subnetwork Underdamped Variational VariationalDropout"
    ),
    "model": "BNN LinearModel Model",
    "networks": "as_network",
    "posterior": "Score",
    "predictive": "Predictive",
    "priors": "Normal",
    "programs": "from_numpyro",
    "store": "load",
    "target": "Target target_from_log_density",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker that saw this would take any name for right

    def __getattr__(name: str) -> Any:
        """A public name or a module of the package, imported now. `import aleator` alone imports neither JAX nor NumPy."""
        if name in _HOME:
            return globals().setdefault(name, getattr(importlib.import_module(f"aleator.{_HOME[name]}"), name))
        if not name.startswith("__") and importlib.util.find_spec(f"aleator.{name}") is not None:
            return importlib.import_module(f"aleator.{name}")
        raise AttributeError(f"module 'aleator' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") or f"aleator.{name}" in sys.modules)})
