"""All methods. One line here gives a method its public name, its command-line name and its place in the conformance suite."""

from aleator.methods._method import Card, Method
from aleator.methods.concrete_dropout import ConcreteDropout
from aleator.methods.dropout import Dropout
from aleator.methods.ensemble import Ensemble
from aleator.methods.exact import Exact
from aleator.methods.hmc import HMC
from aleator.methods.ivon import IVON
from aleator.methods.map import MAP
from aleator.methods.microcanonical import Microcanonical
from aleator.methods.nuts import NUTS
from aleator.methods.sparse_dropout import SparseDropout
from aleator.methods.variational import Renyi, Variational
from aleator.methods.variational_dropout import VariationalDropout

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
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
}

__all__ = [
    "HMC",
    "IVON",
    "MAP",
    "METHODS",
    "NUTS",
    "Card",
    "ConcreteDropout",
    "Dropout",
    "Ensemble",
    "Exact",
    "Method",
    "Microcanonical",
    "Renyi",
    "SparseDropout",
    "Variational",
    "VariationalDropout",
]
