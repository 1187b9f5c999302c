"""Ensemble: any method run several times from its own starts, mixed with equal weights."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Key
from aleator.loop import Algorithm
from aleator.methods._method import Card, Method, check_positive
from aleator.methods.map import MAP
from aleator.posterior import Posterior, mixture


@dataclasses.dataclass(frozen=True)
class Ensemble(Method):
    """q(θ) = (1/M) Σₘ qₘ(θ), member m fitted by `base` from its own initialisation, batches and held-out rows.

    With a heteroscedastic or classification likelihood over MAP this is the deep ensemble of Lakshminarayanan et al. (2017).
    bootstrap=True gives each member N rows drawn with replacement. Members run stacked and on all cores.
    """

    base: Method = dataclasses.field(default_factory=MAP)
    num_members: int = 5
    bootstrap: bool = False

    card: ClassVar[Card] = Card(
        name="Ensemble",
        summary="Several modes instead of one; disagreement between members is the epistemic part.",
        model_class="whatever the base method takes",
        criterion="the base method's, per member",
        search="independent restarts of the base method",
        cost="num_members times the base, about half of that in time on two cores",
        needs="a base method that runs once",
        references=(
            "Lakshminarayanan, Pritzel and Blundell, Simple and scalable predictive uncertainty estimation using deep ensembles, 2017",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_members", whole=True)
        if not isinstance(self.base, Method):
            raise MethodError(
                message("An ensemble needs a method to repeat.", repr(self.base), "a method such as al.MAP()", "pass Ensemble(al.MAP(), 5)")
            )

    @property
    def holdout(self) -> float:  # type: ignore[override]
        return self.base.holdout

    def build(self, target: Any) -> Algorithm:
        inner = self.base.build(target)
        if inner.members is not None:
            raise MethodError(
                message(
                    "The base already runs several members.",
                    repr(self.base),
                    "a method that runs once",
                    "raise its own number of members or chains",
                )
            )

        def finish(key: Key, states: Any, kept: Any) -> Posterior:
            keys = jax.random.split(key, self.num_members)
            pick = lambda tree, m: None if tree is None else _tree.take(tree, m)
            return mixture([inner.finish(keys[m], pick(states, m), pick(kept, m)) for m in range(self.num_members)])

        return dataclasses.replace(inner, members=self.num_members, bootstrap=self.bootstrap, finish=finish)
