"""Errors that say what came, what was expected and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class AleatorError(ValueError):
    """Base of every error raised on purpose; a `ValueError`, so that generic handlers work."""


class DataError(AleatorError):
    """The data cannot be used as given."""


class ModelError(AleatorError):
    """The network, likelihood, prior and data do not fit together."""


class MethodError(AleatorError):
    """The method cannot be applied to this target, or its hyper-parameters are wrong."""


class StoreError(AleatorError):
    """A saved directory or checkpoint is unreadable, altered, or from a later version."""


class NonFiniteError(AleatorError):
    """A computation left the finite numbers. `fit` holds the last good state, where there is one.

    result and at_start are the driver's: what it had, and whether the very first step failed.
    """

    fit: Any = None
    result: Any = None
    at_start: bool = False


class HealthWarning(UserWarning):
    """A fit ended in a state that should not be trusted without a look."""


def message(what: str, got: Any, expected: Any, do: str) -> str:
    """The house form: a sentence, then got / expected / do this.

    >>> print(message("y does not match x.", "9 targets", "10 targets", "pass one target per row"))
    y does not match x. Got: 9 targets. Expected: 10 targets. Do this: pass one target per row.
    """
    return f"{what} Got: {got}. Expected: {expected}. Do this: {do}."


def nearest(name: str, known: Iterable[str]) -> str:
    """A ' (did you mean …?)' for the closest known name, or nothing.

    >>> nearest("learning_rat", ["learning_rate", "num_steps"])
    " (did you mean 'learning_rate'?)"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
