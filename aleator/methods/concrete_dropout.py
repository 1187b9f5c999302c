"""ConcreteDropout: dropout whose rates are learned, one per site."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Key, Tree
from aleator.methods import _noisy
from aleator.methods._method import Card, check_positive
from aleator.methods.dropout import bernoulli_kl, check_placement, check_rate, droppable, masked_posterior, site_notes
from aleator.noise import masked


@dataclasses.dataclass(frozen=True)
class ConcreteDropout(_noisy.NoisyMethod):
    """Dropout with rates p_s learned per site by ascending the same bound, through relaxed masks z = 1 − sigmoid((logit p + logit u)/t).

    The entropy terms K·H(p_s) push towards p = ½ and the data away from it, so rates fall as N grows. rate: where they start; relaxation:
    t, the temperature of the relaxed Bernoulli. The posterior uses hard masks.
    """

    rate: float = 0.1
    placement: str = "inputs"
    relaxation: float = 0.1
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None
    num_evidence: int = 32

    card: ClassVar[Card] = Card(
        name="ConcreteDropout",
        summary="Dropout that learns how much of each layer to drop.",
        model_class="any network with linear maps",
        criterion="evidence lower bound for a Bernoulli family, up to a constant",
        search="stochastic gradient ascent in weights and rates, through relaxed masks",
        cost="a MAP step; one pass per draw at prediction",
        needs="a network; no rate to choose",
        references=("Gal, Hron and Kendall, Concrete dropout, 2017",),
    )

    def __post_init__(self) -> None:
        self.check()
        check_rate(self.rate)
        check_placement(self.placement)
        check_positive(self, "relaxation")
        if self.relaxation > 1.0:
            raise MethodError(
                message("The relaxation is too soft.", self.relaxation, "a temperature in (0, 1]", "use relaxation=0.1, the usual value")
            )

    def noise(self, target: Any) -> _noisy.Noise:
        chosen = droppable(target, self.placement, "ConcreteDropout")
        logit = float(jnp.log(self.rate) - jnp.log1p(-self.rate))
        rates = lambda noise: [jax.nn.sigmoid(noise[site.name]) for site in chosen]

        def handler(key: Key, params: Tree, noise: Tree) -> tuple[Any, tuple, tuple]:
            return masked(key, dict(zip([s.name for s in chosen], rates(noise), strict=True)), self.relaxation), (), ()

        return _noisy.Noise(
            init=lambda params: {site.name: jnp.full((), logit, jax.tree.leaves(params)[0].dtype) for site in chosen},
            handler=handler,
            kl=lambda params, noise: bernoulli_kl(target, params, chosen, rates(noise)),
            posterior=lambda params, noise: masked_posterior(target, params, chosen, jnp.stack(rates(noise))),
            notes={"sites": site_notes(target, chosen)},
        )
