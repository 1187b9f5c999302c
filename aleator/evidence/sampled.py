"""The evidence that comes with a method's draws."""

from __future__ import annotations

from typing import Any

from aleator._fit import fit
from aleator._typing import KeyLike
from aleator.evidence._problem import problem
from aleator.methods import SMC
from aleator.methods.nested import Nested
from aleator.posterior import Score


def smc(key: KeyLike, model: Any, data: Any = None, **settings: Any) -> Score:
    """Sequential Monte Carlo, in float64: the log evidence of `al.SMC(**settings)`."""
    return _of(key, model, data, SMC(**({"precision": "float64"} | settings)))


def nested(key: KeyLike, model: Any, data: Any = None, **settings: Any) -> Score:
    """Nested sampling, in float64, for small models: the log evidence of `al.Nested(**settings)`."""
    return _of(key, model, data, Nested(**settings))


def _of(key: KeyLike, model: Any, data: Any, method: Any) -> Score:
    problem(model, data, True, type(method).__name__)
    return fit(key, model, data, method, progress=False).log_evidence  # type: ignore[return-value]


__all__ = ["nested", "smc"]
