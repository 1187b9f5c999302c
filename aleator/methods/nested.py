"""Nested: nested sampling with slice moves; the log evidence and posterior draws of small models, by BlackJAX."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _chains as chains
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._moves import halves, has_reference
from aleator.methods.tempering import pooled
from aleator.posterior import Draws, Posterior, Score

VOLUMES = 500  # simulated sequences of prior volumes, for the standard error
NUM_STEPS = 100_000  # deletions after which a run is given up, in units of num_delete


class State(NamedTuple):
    """live: BlackJAX's state of the N live points. dead (K, D), log_likelihood (K,): the points deleted last, ascending. log_volume:
    log X, what is left of the prior. log_evidence: log Ẑ of the deleted points. number: of the step, 0 before the first deletion.
    outside: live points at ℓ = −∞ at the start. arrived: what is left no longer matters."""

    live: Any
    dead: Array
    log_likelihood: Array
    log_volume: Array
    log_evidence: Array
    number: Array
    outside: Array
    arrived: Array


def deepest(size: int) -> float:
    """The log volume of the prior below which nothing is searched: e⁻⁵⁰ of it a parameter is far more than data ever rule out."""
    return -100.0 - 50.0 * size


class Info(NamedTuple):
    """log_volume: log X. level: ℓ of the lowest live point; −∞ is possible, so nothing watches it."""

    log_volume: Array
    level: Array


@dataclasses.dataclass(frozen=True)
class Nested(Method):
    """Nested sampling (Skilling 2006): p(D) = ∫₀¹ L(X) dX over the prior mass X with a likelihood above L.

    Of num_live points, the num_delete lowest (None: a tenth) are deleted together and replaced by points above them, found by num_moves
    slice moves (None: 3·D, at least 10) from survivors along directions shaped by the live points' covariance. Each deletion among n
    points shrinks X by a Beta(n, 1) factor. A run ends when the live points can add at most the share `tolerance`. Deleted points,
    weighted, are the draws. num_runs independent runs: the standard error is the larger of what the simulated volumes and the runs say.
    """

    num_live: int = 250
    num_delete: int | None = None
    num_moves: int | None = None
    num_runs: int = 4
    tolerance: float = 1e-3
    precision: str = "float64"

    card: ClassVar[Card] = Card(
        name="Nested sampling",
        summary="Evidence and draws of small models; phase transitions and several modes are no obstacle.",
        model_class="models of up to some 20 parameters that one can draw from the prior of",
        criterion="the exact posterior and evidence, as the number of live points grows",
        search="live points drawn from the prior above a rising likelihood, by slice moves",
        cost="num_runs × num_live × (information + D) × num_moves × about 8 densities",
        needs="draws from the prior (or from a bare density's reference), a likelihood without plateaus, all the data in memory",
        references=(
            "Skilling, Nested sampling for general Bayesian computation, 2006",
            "Yallup, Kroupa and Handley, Nested slice sampling, 2026",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_live", "num_delete", "num_moves", "num_runs", whole=True)
        check_positive(self, "tolerance")
        chains.check_precision(self)
        if self.num_live < 10 or (self.num_delete is not None and self.num_delete > self.num_live // 2):
            raise MethodError(
                message(
                    "Too few live points.",
                    f"num_live={self.num_live}, num_delete={self.num_delete}",
                    "num_live ≥ 10 and num_delete ≤ num_live/2",
                    "raise num_live",
                )
            )

    def build(self, target: Any) -> Algorithm:
        if not has_reference(target):
            target.log_prior(None)  # says what is missing
        nss = _sampler()
        x64, layout = chains.prepare(self, target)
        size, number = len(layout.names), self.num_live
        delete = self.num_delete or max(1, number // 10)
        num_moves = self.num_moves or max(10, 3 * size)
        batches = None if target.model is None else "full"

        def algorithm(batch: Batch | None, shapes: bool = False) -> Any:
            """BlackJAX's sampler on flat positions; with `shapes` on a density that only has the right ones."""
            both = (lambda q: (jnp.sum(q), jnp.sum(q))) if shapes else halves(target, layout, chains.bind(target, layout, batch))
            prior, likelihood = lambda q: chains.safe(both(q)[0]), lambda q: chains.safe(both(q)[1])
            return nss(prior, likelihood, num_inner_steps=num_moves, num_delete=delete)

        def init(key: Key, params: Tree) -> State:
            points = jnp.zeros((number, size), layout.ravel(params).dtype)
            live = jax.eval_shape(lambda q: algorithm(None, shapes=True).init(q), points)
            live = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), live)
            zero, none = jnp.zeros((), points.dtype), jnp.zeros((), jnp.int32)
            return State(live, points[:delete], points[:delete, 0], zero, zero, none, none, jnp.asarray(False))

        def start(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            draw = lambda k: layout.ravel(target.sample_prior(k)).astype(state.dead.dtype)
            live = algorithm(batch).init(jax.vmap(draw)(jax.random.split(key, number)))
            outside = jnp.sum(jnp.isneginf(live.particles.loglikelihood)).astype(jnp.int32)
            live = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), live, state.live)
            state = state._replace(live=live, outside=outside, log_evidence=jnp.full_like(state.log_evidence, -jnp.inf))
            return state, Info(state.log_volume, jnp.min(live.particles.loglikelihood))

        def step(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            state = jax.lax.cond(
                state.arrived, lambda: state._replace(number=jnp.zeros_like(state.number)), lambda: deleted(key, state, batch)
            )
            return state, Info(state.log_volume, state.log_likelihood[-1])

        def deleted(key: Key, state: State, batch: Batch | None) -> State:
            # A plain key: inside, one is carried through a mapped loop, which JAX's checker of typed keys takes for a second use.
            live, info = algorithm(batch).step(jax.random.bits(key, (2,), jnp.uint32), state.live)
            order = jnp.argsort(info.particles.loglikelihood)
            dead, level = info.particles.position[order], info.particles.loglikelihood[order]
            # Expected log volumes within the batch: the i-th of it is deleted among N − i points.
            shrink = -jnp.cumsum(1.0 / (number - jnp.arange(delete))).astype(level.dtype)
            before = state.log_volume + jnp.append(0.0, shrink[:-1]).astype(level.dtype)
            after = state.log_volume + shrink
            pieces = level + before + jnp.log(-jnp.expm1(after - before))
            evidence = jnp.logaddexp(state.log_evidence, jax.nn.logsumexp(pieces))
            rest = jnp.max(live.particles.loglikelihood) + after[-1]
            # At least one more step than none: a likelihood of −∞ everywhere must not look like an end.
            arrived = (rest - jnp.logaddexp(evidence, rest) < np.log(self.tolerance)) | (after[-1] < deepest(size))
            return state._replace(
                live=live,
                dead=dead,
                log_likelihood=level,
                log_volume=after[-1],
                log_evidence=evidence,
                number=state.number + 1,
                arrived=arrived,
            )

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            runs = [_collect(state, kept, run) for run in range(self.num_runs)]
            generator = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
            scores, weights = zip(*(integrate(generator, level, number, delete) for _, level in runs), strict=True)
            values = np.array([score.value for score in scores])
            share = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
            joined = np.concatenate([part * w for part, w in zip(weights, share, strict=True)])
            evidence = pooled(list(scores)) if target.temperature == 1.0 else None
            return Draws(layout.unravel_all(np.concatenate([points for points, _ in runs])), joined / joined.sum(), evidence)

        return Algorithm(
            init=init,
            phases=(Phase("prior", start, 1, batches), Phase("deleting", step, NUM_STEPS, batches)),
            position=lambda state: jax.vmap(layout.unravel)(state.live.particles.position),
            finish=finish,
            # Runs end at different steps, and what is wanted is decided for all: those with number 0 are left out later.
            keep=lambda state, info: ((state.dead, state.log_likelihood, state.number), jnp.asarray(True)),
            done=lambda state: state.arrived,
            members=self.num_runs,
            apart=True,
            verdict=lambda result: self._verdict(result, delete, target.temperature),
            x64=x64,
            notes={"departures": chains.tempered(target)},
        )

    def _verdict(self, result: Any, delete: int, temperature: float) -> tuple[str, bool, dict[str, Any]]:
        """Did all runs arrive, do they agree, and are there plateaus?"""
        state = result.state
        runs = [_collect(state, result.kept, run)[1] for run in range(self.num_runs)]
        generator = np.random.default_rng(0)
        values = np.array([integrate(generator, level, self.num_live, delete)[0] for level in runs])[:, :2].astype(float)
        outside = int(np.sum(state.outside))
        health = {"log_evidence_runs": values[:, 0].tolist(), "outside": outside, "log_volume": float(np.max(state.log_volume))}
        if not np.all(state.arrived):
            return f"Stopped after {NUM_STEPS} steps: the live points still count; raise tolerance, or use al.SMC().", False, health
        if (depth := float(np.min(state.log_volume))) < deepest(state.live.particles.position.shape[-1]):
            said = (
                f"The likelihood still rises where e^{depth:.0f} of the prior is left: its integral may be infinite, the density improper; "
                "give it a proper prior, or a reference with wider tails."
            )
            return said, False, health
        if outside:
            said = f"The likelihood is zero at {outside / (self.num_live * self.num_runs):.1%} of the prior draws: the prior volumes are off; use al.SMC()."
            return said, False, health
        spread = float(values[:, 0].std(ddof=1)) if len(values) > 1 else 0.0
        told = float(np.sqrt(np.mean(values[:, 1] ** 2)))
        if spread > 3.0 * told + 0.1:
            return f"The runs differ by {spread:.2f} nats where {told:.2f} are expected: raise num_moves or num_live.", False, health
        said = f"Complete: {chains.constant(temperature)} {values[:, 0].mean():.3f}, runs differing by {spread:.3f} nats ({told:.3f} expected)."
        return said, True, health


def integrate(generator: np.random.Generator, level: np.ndarray, number: int, delete: int) -> tuple[Score, np.ndarray]:
    """log Z and its standard error from the log-likelihoods of deleted points in batches, then of the live ones (N,), ascending; and the
    points' posterior weights.

    Volumes are simulated: log X falls by −log(u)/n at a deletion among n points, n = N, N − 1, … within a batch, N, …, 1 at the end. A
    point stands for half of the volume on either side of it.
    """
    batches = (len(level) - number) // delete
    among = np.concatenate([np.tile(number - np.arange(delete), batches), number - np.arange(number)])
    log_volume = np.cumsum(np.log(generator.uniform(size=(VOLUMES, len(level)))) / among, axis=1)
    start, end = np.zeros((VOLUMES, 1)), np.full((VOLUMES, 1), -np.inf)
    outer, inner = np.concatenate([start, log_volume[:, :-1]], axis=1), np.concatenate([log_volume[:, 1:], end], axis=1)
    terms = level + outer + np.log(-0.5 * np.expm1(inner - outer))
    values = np.logaddexp.reduce(terms, axis=1)
    weights = np.exp(terms - values[:, None]).mean(axis=0)
    return Score(float(values.mean()), float(values.std(ddof=1)), "estimate"), weights


def _collect(state: State, kept: Any, run: int) -> tuple[np.ndarray, np.ndarray]:
    """All points of one run, deleted ones first, and their log-likelihoods, as they were deleted."""
    dead, level, number = (np.asarray(part[run]) for part in kept)
    dead, level = dead[number > 0], level[number > 0]
    live, last = np.asarray(state.live.particles.position[run]), np.asarray(state.live.particles.loglikelihood[run])
    order = np.argsort(last)
    points = np.concatenate([dead.reshape(-1, live.shape[1]), live[order]])
    return points, np.concatenate([level.ravel(), last[order]]).astype(np.float64)


def _sampler() -> Any:
    """BlackJAX's nested slice sampler."""
    import blackjax

    if not hasattr(blackjax, "nss"):
        raise MethodError(
            message(
                "Nested sampling needs a later BlackJAX.",
                f"version {getattr(blackjax, '__version__', '?')}",
                "1.6 or later",
                "pip install -U blackjax, or use al.SMC()",
            )
        )
    return blackjax.nss


__all__ = ["Nested", "integrate"]
