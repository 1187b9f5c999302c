"""All methods, imported when they are first asked for; METHODS, which imports all of them, is the list with their names on the command line."""

from typing import TYPE_CHECKING

from aleator import _lazy

if TYPE_CHECKING:
    from aleator.methods._table import *  # noqa: F403
else:
    _HOMES = {
        "_table": "METHODS",
        "_method": "Card Method",
        "amortised": "Amortised",
        "batch_ensemble": "BatchEnsemble",
        "bootstrap": "BayesianBootstrap",
        "cavi": "CAVI",
        "chees": "ChEES",
        "concrete_dropout": "ConcreteDropout",
        "cyclical": "Cyclical",
        "dropout": "Dropout",
        "elliptical_slice": "EllipticalSlice",
        "em": "EM",
        "ensemble": "Ensemble",
        "exact": "Exact",
        "expectation_propagation": "ExpectationPropagation",
        "gibbs": "Gibbs",
        "hmc": "HMC",
        "hyper_ensemble": "HyperEnsemble",
        "independence": "Independence",
        "ivon": "IVON",
        "laplace": "Laplace Subnetwork",
        "mala": "MALA",
        "map": "MAP",
        "marginal_gibbs": "MarginalGibbs",
        "microcanonical": "Microcanonical",
        "nested": "Nested",
        "nuts": "NUTS",
        "pbp": "PBP",
        "random_walk": "RandomWalk",
        "refined": "Refined",
        "repulsive": "RepulsiveEnsemble",
        "reversible_jump": "ReversibleJump",
        "sghmc": "SGHMC",
        "sgld": "SGLD",
        "sgnht": "SGNHT",
        "sir": "SIR",
        "slice": "Slice",
        "smc": "SMC",
        "snapshot": "Snapshot",
        "sparse_dropout": "SparseDropout",
        "svgd": "SVGD",
        "swag": "SWAG",
        "tempering": "ParallelTempering",
        "underdamped": "Underdamped",
        "variational": "Renyi Variational",
        "variational_dropout": "VariationalDropout",
    }
    __all__ = " ".join(_HOMES.values()).split()
    __getattr__, __dir__ = _lazy.names(__name__, _HOMES, __all__)
