"""All methods. One line here gives a method its public name, its command-line name and its place in the conformance suite."""

from aleator.methods._method import Card, Method
from aleator.methods.ensemble import Ensemble
from aleator.methods.exact import Exact
from aleator.methods.map import MAP

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "map": MAP,
    "ensemble": Ensemble,
}

__all__ = ["METHODS", "Card", "Ensemble", "Exact", "MAP", "Method"]
