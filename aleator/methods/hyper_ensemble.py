"""HyperEnsemble: members that differ in their start and in the scale of their prior, picked by held-out data."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm
from aleator.methods._method import Card, Method, check_positive
from aleator.methods.map import MAP
from aleator.model import BNN, LinearModel
from aleator.posterior import Draws, Posterior
from aleator.priors import Fixed, Prior


@dataclasses.dataclass(frozen=True)
class Stretched(Prior):
    """A prior with fixed scales, all of them times c: p(w) = c^(−size)·p₀(m + (w − m)/c). log c travels with the parameters, unlearned."""

    prior: Any

    def init(self, weights: Tree, fan_in: Tree) -> dict:
        self.prior.init(weights, fan_in)
        return {"log_factor": jnp.zeros((), jax.tree.leaves(weights)[0].dtype)}

    def log_prob(self, raw: Tree, hyper: dict, fan_in: Tree) -> Array:
        log_factor = jax.lax.stop_gradient(hyper["log_factor"])
        shrunk = jax.tree.map(lambda leaf: self.prior.loc + (leaf - self.prior.loc) * jnp.exp(-log_factor), raw)
        return self.prior.log_prob(shrunk, {}, fan_in) - _tree.size(raw) * log_factor

    def sample(self, key: Key, weights: Tree, fan_in: Tree) -> tuple[Tree, dict]:
        return self.prior.sample(key, weights, fan_in)[0], self.init(weights, fan_in)

    def weights(self, raw: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return raw

    def raw(self, weights: Tree, hyper: dict, fan_in: Tree) -> Tree:
        return weights


@dataclasses.dataclass(frozen=True)
class HyperEnsemble(Method):
    """q(θ) = Σₘ vₘ δ(θ − θₘ), θₘ the MAP under the model's prior with all its scales times cₘ, log cₘ ~ U(log low, log high).

    num_members candidates run, each from its own start with its own c and early stopping; then num_kept picks are made, with replacement,
    each of the candidate that raises the mixture's log predictive density on the held-out rows most; vₘ is the share of m's picks. The
    rows are base.holdout of the data, the same for all, or `validation=` of `al.fit`. manifest["chosen"] has the factors and scores.
    """

    base: Method = dataclasses.field(default_factory=lambda: MAP(holdout=0.1))
    num_members: int = 20
    num_kept: int = 5
    low: float = 0.1
    high: float = 10.0

    card: ClassVar[Card] = Card(
        name="HyperEnsemble",
        summary="An ensemble over how strong the prior is, put together by what predicts held-out rows best.",
        model_class="any network with a prior of fixed scales",
        criterion="log joint per member, held-out log predictive density of the mixture",
        search="random prior scales and starts, gradient ascent, greedy picks with replacement",
        cost="num_members times MAP; predictions by at most num_kept of them",
        needs="held-out rows; a prior whose scales are numbers, not parameters",
        references=(
            "Wenzel et al., Hyperparameter ensembles for robustness and uncertainty quantification, 2020",
            "Caruana et al., Ensemble selection from libraries of models, 2004",
        ),
    )
    chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(self, "num_members", "num_kept", whole=True)
        check_positive(self, "low", "high")
        if self.low > self.high:
            raise MethodError(
                message("The range of prior scales is empty.", f"low={self.low}, high={self.high}", "low ≤ high", "swap them")
            )
        if not isinstance(self.base, MAP) or not self.base.holdout > 0:
            raise MethodError(
                message(
                    "HyperEnsemble picks its members by held-out rows.",
                    repr(self.base),
                    "al.MAP with holdout > 0",
                    "pass HyperEnsemble(al.MAP(holdout=0.1)), with validation= of al.fit to use rows of your own",
                )
            )

    @property
    def holdout(self) -> float:  # type: ignore[override]
        return self.base.holdout

    def build(self, target: Any) -> Algorithm:
        prior = getattr(target.model, "prior", None)
        if not isinstance(prior, Fixed) or not isinstance(target.model, (BNN, LinearModel)):
            raise MethodError(
                message(
                    "There are no prior scales to vary.",
                    repr(prior) if target.model is not None else "a bare log density",
                    "al.BNN or al.LinearModel with a prior of fixed scales, such as al.Normal(1.0)",
                    "use al.Ensemble(base): a hierarchical prior finds its scales by itself",
                )
            )
        stretched = dataclasses.replace(target, model=dataclasses.replace(target.model, prior=Stretched(prior)))
        inner = self.base.build(stretched)
        low, high = float(np.log(self.low)), float(np.log(self.high))

        def init(key: Key, start: Tree) -> Any:
            key_factor, key_start = jax.random.split(key)
            log_factor = jax.random.uniform(key_factor, (), jax.tree.leaves(start)[0].dtype, low, high)
            return inner.init(key_start, {**start, "prior": {"log_factor": log_factor}})

        def candidates(states: Any) -> tuple[Tree, np.ndarray]:
            params = jax.vmap(inner.position)(states)
            return {**params, "prior": {}}, np.exp(np.asarray(params["prior"]["log_factor"], np.float64))

        score = jax.jit(lambda params, batch: jax.lax.map(lambda one: target.log_likelihood(one, batch), params))

        def choose(states: Any, held: Batch) -> tuple[Posterior, dict[str, Any]]:
            params, factors = candidates(states)
            batch = _tree.take(held, 0)
            terms = np.asarray(score(params, batch), np.float64)
            row_weight = np.ones(terms.shape[1]) if batch.weight is None else np.asarray(batch.weight, np.float64)
            picks, scores = greedy(terms, row_weight, self.num_kept)
            which, counts = np.unique(picks, return_counts=True)
            chosen = {
                "prior_scale_factor": factors[which].tolist(),
                "weight": (counts / len(picks)).tolist(),
                "held_out": scores[-1],
                "held_out_best_member": scores[0],
                "candidates": {"prior_scale_factor": factors.tolist(), "held_out": (terms @ row_weight / row_weight.sum()).tolist()},
            }
            weights = None if len(set(counts.tolist())) == 1 else counts / len(picks)
            return Draws(_tree.take(params, jnp.asarray(which)), weights), {"chosen": chosen}

        return dataclasses.replace(
            inner,
            init=init,
            members=self.num_members,
            position=lambda state: {**inner.position(state), "prior": {}},
            finish=lambda key, states, kept: Draws(candidates(states)[0]),
            choose=choose,
        )


def greedy(terms: np.ndarray, row_weight: np.ndarray, num_picks: int) -> tuple[list[int], list[float]]:
    """Candidates picked one after the other, with replacement, each the best addition to the mixture of those before.

    terms (M, n): log p(yᵢ | θₘ). Returned with the mean log density of the mixture after each pick.
    """
    picks: list[int] = []
    scores: list[float] = []
    mixed = np.full(terms.shape[1], -np.inf)
    share = row_weight / row_weight.sum()
    for number in range(num_picks):
        added = np.logaddexp(mixed, terms) - np.log(number + 1)
        means = added @ share
        best = int(np.argmax(np.where(np.isnan(means), -np.inf, means)))
        picks.append(best)
        scores.append(float(means[best]))
        mixed = np.logaddexp(mixed, terms[best])
    return picks, scores
