"""What a model asks of a prior, and what all of them check."""

from __future__ import annotations

import abc
import fnmatch
from typing import Any

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree


class Prior(abc.ABC):
    """What a model asks of a prior."""

    @abc.abstractmethod
    def init(self, weights: Tree, fan_in: Tree) -> dict:
        """Starting value of the hyper-parameters h."""

    @abc.abstractmethod
    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        """log p(raw, h), a scalar, over unconstrained h with the Jacobian."""

    def expected_log_prob(self, mean: Tree, variance: Tree, hyper: dict, fan_in: Tree) -> Array | None:
        """E[log p(raw, h)] over independent raw ~ (mean, variance), in closed form where log p is quadratic; None elsewhere."""
        return None

    @abc.abstractmethod
    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        """A draw (raw, h); `weights` gives structure, shapes and dtypes only."""

    @abc.abstractmethod
    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        """raw → w, as the network uses them."""

    @abc.abstractmethod
    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        """The inverse of `weights`."""


def check_scaling(scaling: str) -> None:
    if scaling not in ("none", "fan_in"):
        raise ModelError(message("Unknown scaling of a prior.", repr(scaling), "'none' or 'fan_in'", "choose one of them"))


def match(pairs: tuple[tuple[str, Any], ...], names: list[str]) -> list[Any]:
    """For each path the value of the first pattern that fits (a pattern is a glob, or a prefix of the path)."""
    fits = lambda name, pattern: fnmatch.fnmatch(name, pattern) or name == pattern or name.startswith(pattern + ".")
    unused = [pattern for pattern, _ in pairs if not any(fits(name, pattern) for name in names)]
    values = [next((value for pattern, value in pairs if fits(name, pattern)), None) for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if unused or missing:
        got = f"patterns {unused} that fit nothing" if unused else f"no scale for {missing}"
        raise ModelError(
            message(
                "The prior's scales do not fit the network.", got, f"patterns covering {names}", "add a pattern, or '*' last for the rest"
            )
        )
    return values
