"""All methods: a row of METHODS gives one its name on the command line and its place in the conformance suite."""

from aleator.methods._method import Card, Method
from aleator.methods.amortised import Amortised
from aleator.methods.batch_ensemble import BatchEnsemble
from aleator.methods.bootstrap import BayesianBootstrap
from aleator.methods.cavi import CAVI
from aleator.methods.chees import ChEES
from aleator.methods.concrete_dropout import ConcreteDropout
from aleator.methods.cyclical import Cyclical
from aleator.methods.dropout import Dropout
from aleator.methods.elliptical_slice import EllipticalSlice
from aleator.methods.em import EM
from aleator.methods.ensemble import Ensemble
from aleator.methods.exact import Exact
from aleator.methods.expectation_propagation import ExpectationPropagation
from aleator.methods.gibbs import Gibbs
from aleator.methods.hmc import HMC
from aleator.methods.hyper_ensemble import HyperEnsemble
from aleator.methods.independence import Independence
from aleator.methods.ivon import IVON
from aleator.methods.laplace import Laplace, Subnetwork
from aleator.methods.mala import MALA
from aleator.methods.map import MAP
from aleator.methods.marginal_gibbs import MarginalGibbs
from aleator.methods.microcanonical import Microcanonical
from aleator.methods.nested import Nested
from aleator.methods.nuts import NUTS
from aleator.methods.pbp import PBP
from aleator.methods.random_walk import RandomWalk
from aleator.methods.refined import Refined
from aleator.methods.repulsive import RepulsiveEnsemble
from aleator.methods.reversible_jump import ReversibleJump
from aleator.methods.sghmc import SGHMC
from aleator.methods.sgld import SGLD
from aleator.methods.sgnht import SGNHT
from aleator.methods.sir import SIR
from aleator.methods.slice import Slice
from aleator.methods.smc import SMC
from aleator.methods.snapshot import Snapshot
from aleator.methods.sparse_dropout import SparseDropout
from aleator.methods.svgd import SVGD
from aleator.methods.swag import SWAG
from aleator.methods.tempering import ParallelTempering
from aleator.methods.underdamped import Underdamped
from aleator.methods.variational import Renyi, Variational
from aleator.methods.variational_dropout import VariationalDropout

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "laplace": Laplace,
    "map": MAP,
    "ensemble": Ensemble,
    "variational": Variational,
    "ivon": IVON,
    "dropout": Dropout,
    "concrete_dropout": ConcreteDropout,
    "variational_dropout": VariationalDropout,
    "sparse_dropout": SparseDropout,
    "hmc": HMC,
    "nuts": NUTS,
    "microcanonical": Microcanonical,
    "chees": ChEES,
    "marginal_gibbs": MarginalGibbs,
    "reversible_jump": ReversibleJump,
    "sir": SIR,
    "smc": SMC,
    "parallel_tempering": ParallelTempering,
    "gibbs": Gibbs,
    "mala": MALA,
    "elliptical_slice": EllipticalSlice,
    "slice": Slice,
    "independence": Independence,
    "random_walk": RandomWalk,
    "swag": SWAG,
    "snapshot": Snapshot,
    "bayesian_bootstrap": BayesianBootstrap,
    "batch_ensemble": BatchEnsemble,
    "hyper_ensemble": HyperEnsemble,
    "expectation_propagation": ExpectationPropagation,
    "pbp": PBP,
    "nested": Nested,
    "em": EM,
    "cavi": CAVI,
    "amortised": Amortised,
    "sgld": SGLD,
    "sghmc": SGHMC,
    "sgnht": SGNHT,
    "underdamped": Underdamped,
    "svgd": SVGD,
    "repulsive_ensemble": RepulsiveEnsemble,
    "refined": Refined,
}

__all__ = [
    "Cyclical",
    "Refined",
    "RepulsiveEnsemble",
    "SVGD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "Underdamped",
    "Amortised",
    "CAVI",
    "EM",
    "SWAG",
    "Snapshot",
    "BayesianBootstrap",
    "BatchEnsemble",
    "HyperEnsemble",
    "ExpectationPropagation",
    "PBP",
    "Nested",
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
    "Card",
    "ChEES",
    "ConcreteDropout",
    "Dropout",
    "EllipticalSlice",
    "Ensemble",
    "Exact",
    "Gibbs",
    "Independence",
    "MarginalGibbs",
    "Method",
    "Microcanonical",
    "ParallelTempering",
    "RandomWalk",
    "Renyi",
    "ReversibleJump",
    "Slice",
    "SparseDropout",
    "Variational",
    "VariationalDropout",
]
