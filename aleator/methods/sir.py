"""SIR: sampling–importance–resampling; draws from the prior or an approximation, weighted, and drawn again by weight."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.diagnostics import pareto_k
from aleator.loop import Algorithm, Phase
from aleator.methods import _chains as chains
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._moves import draw, frozen_moments, halves, has_reference, log_prob, proposal_of
from aleator.posterior import Draws, Posterior, Score

BLOCK = 256  # proposals in one step
PARETO = 0.7  # k̂ above this: the weights cannot be trusted


class State(NamedTuple):
    """positions (B, D), log_ratio (B,): the last proposals and their log weights. outside, undefined: evaluations so far."""

    positions: Array
    log_ratio: Array
    outside: Array
    undefined: Array


class Info(NamedTuple):
    """largest: of the last log weights; −∞ is possible, so nothing watches it."""

    largest: Array


@dataclasses.dataclass(frozen=True)
class SIR(Method):
    """Sampling–importance–resampling (D13): num_proposals draws θ ~ g with weights p(θ)p(D|θ)/g(θ), then num_samples of them by weight.

    proposal: None for the prior (weights are then the likelihood); a Fit of the same model, or (mean, covariance), for a Student-t with
    `df` degrees of freedom with its moments. The mean weight estimates p(D). k̂ of the weights' tail says whether any of it can be
    trusted.
    """

    num_proposals: int = 20_000
    num_samples: int = 2000
    proposal: Any = None
    df: float = 5.0
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="SIR",
        summary="The quickest exact answer where an approximation is already good, with a number that says when it is not.",
        model_class="models of few parameters, or with a good approximation at hand",
        criterion="the exact posterior and evidence, as the number of proposals grows",
        search="none: independent draws, weighted and drawn again",
        cost="num_proposals densities over all the data, in blocks",
        needs="draws from the prior, or a fit that covers the posterior; all the data in memory",
        references=(
            "Rubin, Using the SIR algorithm to simulate posterior distributions, 1988",
            "Vehtari, Simpson, Gelman, Yao and Gabry, Pareto smoothed importance sampling, 2024",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_proposals", "num_samples", whole=True)
        chains.check_precision(self)
        object.__setattr__(self, "proposal", frozen_moments(self.proposal))
        if not self.df > 0.0:
            raise MethodError(message("The degrees of freedom must be positive.", self.df, "a number > 0", "pass e.g. df=5.0"))

    def build(self, target: Any) -> Algorithm:
        if self.proposal is None and not has_reference(target):
            target.log_prior(None)  # says what is missing
        x64, layout = chains.prepare(self, target)
        with jax.enable_x64(x64 or jax.config.read("jax_enable_x64")):
            given = None if self.proposal is None else proposal_of(self.proposal, layout, self)
        size, block, df = len(layout.names), min(BLOCK, self.num_proposals), float(self.df)

        def init(key: Key, params: Tree) -> State:
            kind, none = layout.ravel(params).dtype, jnp.zeros((), jnp.int32)
            return State(jnp.zeros((block, size), kind), jnp.zeros(block, kind), none, none)

        def step(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            density = chains.bind(target, layout, batch)
            kind = state.positions.dtype

            def one(k: Key) -> tuple[Array, Array]:
                if given is None:
                    position = layout.ravel(target.sample_prior(k)).astype(kind)
                    return position, halves(target, layout, density)(position)[1].astype(kind)
                position = draw(k, given, df)
                return position, (density.value(position) - log_prob(given, position, df)).astype(kind)

            positions, log_ratio = jax.vmap(one)(jax.random.split(key, block))
            bad = chains.count_bad(log_ratio)
            log_ratio = chains.safe(log_ratio)
            counts = {"outside": state.outside + bad["outside"], "undefined": state.undefined + bad["undefined"]}
            return State(positions, log_ratio, **counts), Info(jnp.max(log_ratio))

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            positions, log_ratio = self._all(kept)
            weights = np.exp(log_ratio - log_ratio.max())
            evidence = None
            if target.temperature == 1.0:
                error = weights.std(ddof=1) / weights.mean() / np.sqrt(len(weights))
                evidence = Score(float(log_ratio.max() + np.log(weights.mean())), float(error), "estimate")
            generator = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
            # Systematic: each proposal as often as expected, within one; then shuffled.
            points = (np.arange(self.num_samples) + generator.uniform()) / self.num_samples
            chosen = np.searchsorted(np.cumsum(weights / weights.sum()), points).clip(max=len(weights) - 1)
            return Draws(layout.unravel_all(positions[generator.permutation(chosen)]), log_evidence=evidence)

        num_steps = -(-self.num_proposals // block)
        return Algorithm(
            init=init,
            phases=(Phase("proposals", step, num_steps, None if target.model is None else "full"),),
            position=lambda state: jax.vmap(layout.unravel)(state.positions),
            finish=finish,
            keep=lambda state, info: ((state.positions, state.log_ratio), jnp.asarray(True)),
            verdict=lambda result: self._verdict(result),
            x64=x64,
            notes={"departures": chains.tempered(target)},
        )

    def _all(self, kept: Any) -> tuple[np.ndarray, np.ndarray]:
        """Proposals (num_proposals, D) and their log weights, of all steps."""
        positions, log_ratio = (np.asarray(part) for part in kept)
        positions, log_ratio = positions.reshape(-1, positions.shape[-1]), log_ratio.ravel().astype(np.float64)
        positions, log_ratio = positions[: self.num_proposals], log_ratio[: self.num_proposals]
        if not np.any(np.isfinite(log_ratio)):
            raise MethodError(
                message(
                    "No proposal has a positive density.",
                    f"{len(log_ratio)} weights of zero",
                    "some draws inside the support",
                    "check the model, or pass proposal=fit",
                )
            )
        return positions, log_ratio

    def _verdict(self, result: Any) -> tuple[str, bool, dict[str, Any]]:
        _, log_ratio = self._all(result.kept)
        weights = np.exp(log_ratio - log_ratio.max())
        size, k = float(weights.sum() ** 2 / np.sum(weights**2)), pareto_k(log_ratio)
        undefined = int(result.state.undefined)
        health = {"pareto_k": k, "ess": size, "outside": int(result.state.outside), "undefined": undefined, "evaluations": len(log_ratio)}
        if undefined:
            sentence = (
                f"The log density was NaN at {undefined} of {len(log_ratio)} proposals ({undefined / len(log_ratio):.1%}): these were treated as "
                "impossible; guard the log, root or division that fails there."
            )
            return sentence, False, health
        if not k < PARETO:
            sentence = (
                f"The weights have a heavy tail (Pareto k̂ {k:.2f}, below {PARETO} is wanted; {size:.0f} effective of {len(log_ratio)}): "
                "draws and evidence cannot be trusted; pass proposal=fit of a better approximation, or use SMC."
            )
            return sentence, False, health
        return f"Complete: Pareto k̂ {k:.2f}, {size:.0f} effective of {len(log_ratio)} proposals.", True, health
