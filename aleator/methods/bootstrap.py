"""BayesianBootstrap: any method run several times on randomly weighted data."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from aleator._errors import MethodError, message
from aleator.loop import Algorithm
from aleator.methods._method import Card, Method, check_positive
from aleator.methods.ensemble import Ensemble
from aleator.methods.map import MAP


@dataclasses.dataclass(frozen=True)
class BayesianBootstrap(Method):
    """θₘ = argmax log p(θ) + Σᵢ wₘᵢ·log p(yᵢ | xᵢ, θ), wₘ ~ N·Dirichlet(1, …, 1): one weight vector over the N rows for each member.

    With a flat prior these are draws of the parameter that fits the unknown distribution of the data best, whatever it is: Rubin's
    posterior for it puts Dirichlet weights on the rows seen, and the model needs not be true. With any other prior the members are draws
    of a penalised fit. base: any method, MAP above all; other bases give a mixture of their posteriors. Weights of the data multiply
    these; held-out rows have weight 0 and the others share their number. Rows drawn with replacement: `al.Ensemble(base, bootstrap=True)`.
    """

    base: Method = dataclasses.field(default_factory=MAP)
    num_members: int = 20

    card: ClassVar[Card] = Card(
        name="BayesianBootstrap",
        summary="Uncertainty from the data alone: refits under random weights of the rows, honest where the model is wrong.",
        model_class="whatever the base method takes, with rows that are independent",
        criterion="the base method's, with a weighted log-likelihood per member",
        search="independent runs of the base method, one weight vector each",
        cost="num_members times the base, about half of that in time on two cores",
        needs="data in memory, a sum over rows, and a base method that runs once",
        references=(
            "Rubin, The Bayesian bootstrap, 1981",
            "Newton and Raftery, Approximate Bayesian inference with the weighted likelihood bootstrap, 1994",
            "Lyddon, Holmes and Walker, General Bayesian updating and the loss-likelihood bootstrap, 2019",
        ),
    )
    bootstrap: ClassVar[str] = "bayesian"

    def __post_init__(self) -> None:
        check_positive(self, "num_members", whole=True)
        if not isinstance(self.base, Method):
            raise MethodError(
                message(
                    "A bootstrap needs a method to repeat.",
                    repr(self.base),
                    "a method such as al.MAP()",
                    "pass BayesianBootstrap(al.MAP(), 20)",
                )
            )

    @property
    def holdout(self) -> float:  # type: ignore[override]
        return self.base.holdout

    def build(self, target: Any) -> Algorithm:
        if target.model is None or not target.model.minibatch:
            got = "a bare log density" if target.model is None else "a log-likelihood that is no sum over rows"
            raise MethodError(
                message("There are no rows to weigh.", got, "a model with independent rows", "use al.Ensemble(base) for restarts")
            )
        algorithm = Ensemble(self.base, self.num_members).build(target)
        departure = "each member maximises a weighted log-likelihood with the whole prior: a bootstrap, not draws of the model's posterior"
        return dataclasses.replace(algorithm, notes=algorithm.notes | {"departures": [*algorithm.notes.get("departures", []), departure]})
