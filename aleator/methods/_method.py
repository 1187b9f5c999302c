"""What every method is: frozen hyper-parameters, a card, and `build(target) → Algorithm`."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

from aleator._errors import MethodError, message, nearest
from aleator.loop import Algorithm


class Card(NamedTuple):
    """The lectures' checklist (D14) for one method: what it models, by what criterion, how it searches, what it costs."""

    name: str
    summary: str
    model_class: str
    criterion: str
    search: str
    cost: str
    needs: str
    references: tuple[str, ...]


class Method(abc.ABC):
    """Base of all methods. Subclasses are frozen dataclasses: one file each, in the order State, Info, init, step, method, helpers.

    weighs: rows enter through weighted sums alone, so that a row twice at half the weight is that row.
    """

    card: ClassVar[Card]
    weighs: ClassVar[bool] = True
    holdout: Any = 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown hyper-parameters with the nearest known name, before the dataclass says it less helpfully."""
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                raise MethodError(
                    message(
                        f"{cls.__name__} has no hyper-parameter of this name.",
                        repr(name) + nearest(name, known),
                        f"one of {known}",
                        "check the spelling",
                    )
                )
        return super().__new__(cls)

    @abc.abstractmethod
    def build(self, target: Any) -> Algorithm:
        """The algorithm for one target; raises MethodError where the method does not apply."""


def check_positive(method: Any, *names: str, whole: bool = False) -> None:
    """Refuse hyper-parameters that are not positive (whole) numbers; None passes."""
    for name in names:
        value = getattr(method, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and value > 0 and (not whole or int(value) == value)):
            expected = "a whole number ≥ 1" if whole else "a number > 0"
            raise MethodError(
                message(
                    f"{type(method).__name__}.{name} cannot be used.", repr(value), expected, f"pass e.g. {name}={1 if whole else 0.01}"
                )
            )
