"""SWAG: a Gaussian through the iterates of SGD with a constant learning rate."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.linalg import Diagonal, LowRank
from aleator.loop import TRACE_POINTS, Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods import map as map_file
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Gaussian, Point, Posterior

FLOOR = 1e-10  # smallest standard deviation: of a parameter that no gradient ever reached
STUCK = 0.5  # share of parameters without any spread that counts as a run that did not move
BLOCKS = 10  # pieces of the run whose mean log-likelihoods are looked at
TREND = 0.85  # their correlation with time from which they rise: about one in a thousand where they do not
RISE = 1.0  # nats between the two halves of the run that matter
BEFORE = 10  # points of the trace at the mode, before SGD begins
FALL = 4.0  # times the ½ nat a parameter that draws of a posterior lie below its mode: SGD that loses more has left it


class State(NamedTuple):
    """params: the iterate (flat for small models). warmup, optimizer: states of the two optimisers. mean, square: running mean θ̄ of the
    iterates that count and Σ(θ − θ̄)²; deviations (K + 1, …): their last K deviations in a ring, and the place of the next; number: how many
    count so far; step: of this phase."""

    params: Tree
    warmup: Any
    optimizer: Any
    mean: Tree
    square: Tree
    deviations: Tree
    number: Array
    step: Array


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θ) before the step, an estimate from its batch."""

    log_likelihood: Array


def init(key: Key, start: Tree, warmup: Any, optimizer: Any, rank: int) -> State:
    zeros = jax.tree.map(jnp.zeros_like, start)
    ring = jax.tree.map(lambda leaf: jnp.zeros((rank + 1, *leaf.shape), leaf.dtype), start) if rank else ()
    none = jnp.zeros((), jnp.int32)
    return State(start, warmup.init(start), optimizer.init(start), zeros, zeros, ring, none, none)


def step(key: Key, state: State, batch: Batch, target: Any, optimizer: Any, packing: _optimise.Packing, thin: int) -> tuple[State, Info]:
    """One step of SGD, θ ← θ − η∇[−log joint/N]; every `thin` of them θ counts:

    n ← n + 1,  δ = θ − θ̄,  θ̄ ← θ̄ + δ/n,  Σ(θ − θ̄)² ← Σ(θ − θ̄)² + δ(θ − θ̄),  D ← last K of (θ − θ̄).
    """
    moved, info = map_file.step(key, map_file.State(state.params, state.optimizer, ()), batch, target, optimizer, packing, 0.0)
    counts = (state.step + 1) % thin == 0
    number = state.number + counts
    share = jnp.where(counts, 1.0 / jnp.maximum(number, 1), 0.0)
    mean = jax.tree.map(lambda m, p: m + share.astype(p.dtype) * (p - m), state.mean, moved.params)
    add = lambda s, m, new, p: s + jnp.where(counts, (p - m) * (p - new), 0.0)
    square = jax.tree.map(add, state.square, state.mean, mean, moved.params)
    deviations = state.deviations
    if jax.tree.leaves(deviations):
        # Written at every step, in place: the ring has one place more than is read, and moves on only where θ counts.
        put = lambda ring, p, new: ring.at[state.number % ring.shape[0]].set(p - new)
        deviations = jax.tree.map(put, deviations, moved.params, mean)
    state = State(moved.params, state.warmup, moved.optimizer, mean, square, deviations, number, state.step + 1)
    return state, Info(info.log_likelihood)


@dataclasses.dataclass(frozen=True)
class SWAG(Method):
    """q = N(θ̄, ½Σ_diag + ½DDᵀ/(K − 1)): moments of T = num_steps // thin iterates of SGD after a run to the mode (Maddox et al. 2019).

    θ̄ is their mean, Σ_diag their variances, D (size, K) the last K = rank deviations from the running mean. structure="diagonal" leaves D
    out: q = N(θ̄, Σ_diag). num_warmup steps of Adam with a cosine schedule at warmup_rate lead to the mode; with init= they are left
    out. The spread of the iterates is that of the posterior only by the choice of learning_rate η: around a mode with Hessian NA and gradients
    of −log joint/N with covariance C per batch, AΣ + ΣA = ηC, so that tr Σ is right for η ≈ 2·size/(N tr C) (Mandt et al. 2017); larger is
    wider, and η must stay below 2/λ_max(A). Rows come without replacement within an epoch, which calms the path over longer times than
    that: choose a thin that is no multiple of N/batch_size, since at the ends of epochs the noise has cancelled. optimizer, schedule, clip: as in `al.MAP`, for the steps that count. Several modes:
    `al.Ensemble(al.SWAG(), 5)`.
    """

    num_steps: int = 2000
    num_warmup: int = 2000
    batch_size: int = 32
    learning_rate: float = 1e-3
    warmup_rate: float = 1e-2
    thin: int = 19
    rank: int = 20
    structure: str = "low_rank"
    optimizer: Any = "sgd"
    schedule: str = "constant"
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="SWAG",
        summary="The mean and spread of SGD's own path around a mode, as a Gaussian: a posterior for the price of some more training.",
        model_class="any model with a differentiable log joint and more than one row",
        criterion="moments of the stationary distribution of SGD",
        search="stochastic gradient descent with a constant learning rate, after Adam",
        cost="one gradient per step; rank + 6 copies of the parameters",
        needs="mini-batches, and a learning rate at which SGD neither stops nor leaves the mode",
        references=(
            "Maddox et al., A simple baseline for Bayesian uncertainty in deep learning, 2019",
            "Mandt, Hoffman and Blei, Stochastic gradient descent as approximate Bayesian inference, 2017",
            "Wilson and Izmailov, Bayesian deep learning and a probabilistic perspective of generalization, 2020 (several modes)",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "thin", "rank", whole=True)
        check_positive(self, "learning_rate", "warmup_rate", "clip")
        if isinstance(self.num_warmup, bool) or not isinstance(self.num_warmup, int) or self.num_warmup < 0:
            raise MethodError(
                message("SWAG.num_warmup cannot be used.", repr(self.num_warmup), "a whole number ≥ 0", "pass 0 together with init=fit")
            )
        if self.batch_size is None:
            raise MethodError(
                message(
                    "SWAG lives on the noise of mini-batches.",
                    "batch_size=None",
                    "a number of rows well below N",
                    "pass e.g. batch_size=32, or N/10 for small data",
                )
            )
        check_positive(self, "batch_size", whole=True)
        if self.structure not in ("low_rank", "diagonal"):
            raise MethodError(message("Unknown structure.", repr(self.structure), "'low_rank' or 'diagonal'", "choose one of them"))
        least = self.rank + 1 if self.structure == "low_rank" else 2
        if self.num_steps // self.thin < least or (self.structure == "low_rank" and self.rank < 2):
            raise MethodError(
                message(
                    "There are too few iterates for this rank.",
                    f"num_steps // thin = {self.num_steps // self.thin}, rank={self.rank}",
                    "2 ≤ rank < num_steps // thin",
                    f"pass num_steps={self.thin * 5 * max(self.rank, 2)}, or a smaller thin or rank",
                )
            )
        _optimise.check_optimizer(self)

    def build(self, target: Any) -> Algorithm:
        if target.model is None or self.batch_size >= target.num_data > 1:
            got = "a bare log density" if target.model is None else f"batch_size={self.batch_size} of {target.num_data} rows"
            raise MethodError(
                message(
                    "SWAG lives on the noise of mini-batches.",
                    got,
                    "data, and batches of fewer rows than there are",
                    "lower batch_size" if target.model is not None else "use a sampler such as al.NUTS()",
                )
            )
        optimizer, warmup = _optimise.optimizer(self), _warmup(self)
        packing = _optimise.packing(jax.eval_shape(target.init, jax.random.key(0)))
        rank = self.rank if self.structure == "low_rank" else 0

        def approach(key: Key, state: State, batch: Batch) -> tuple[State, Info]:
            moved, info = map_file.step(key, map_file.State(state.params, state.warmup, ()), batch, target, warmup, packing, 0.0)
            return state._replace(params=moved.params, warmup=moved.optimizer), Info(info.log_likelihood)

        def collect(key: Key, state: State, batch: Batch) -> tuple[State, Info]:
            return step(key, state, batch, target, optimizer, packing, self.thin)

        phases = [Phase("MAP", approach, self.num_warmup, "random", self.batch_size)] if self.num_warmup else []
        phases.append(Phase("SWAG", collect, self.num_steps, "random", self.batch_size))
        return Algorithm(
            init=lambda key, start: init(key, packing.pack(start), warmup, optimizer, rank),
            phases=tuple(phases),
            position=lambda state: packing.unpack(state.params),
            finish=lambda key, state, kept: posterior(state, packing),
            watch="log_likelihood",
            preliminary=len(phases) - 1,
            verdict=lambda result: _verdict(result, self.num_steps),
        )


def posterior(state: State, packing: _optimise.Packing) -> Posterior:
    """N(θ̄, Σ) from the moments; the iterate itself where fewer than two have been counted (a run that was stopped)."""
    number = int(state.number)
    if number < 2:
        return Point(packing.unpack(state.params))
    mean = packing.unpack(state.mean)
    chosen = (True,) * len(jax.tree.leaves(mean))
    variance = _tree.flat(state.square) / number
    rings = jax.tree.leaves(state.deviations)
    if not rings:
        return Gaussian(mean, Diagonal(jnp.maximum(jnp.sqrt(variance), FLOOR)), chosen)
    places = rings[0].shape[0]
    last = [(number - 1 - back) % places for back in range(min(number, places - 1))]
    columns = jnp.concatenate([leaf[np.array(last)].reshape(len(last), -1) for leaf in rings], axis=1).T
    factor = columns / np.sqrt(2.0 * (len(last) - 1)).astype(columns.dtype)
    return Gaussian(mean, LowRank(jnp.maximum(jnp.sqrt(0.5 * variance), FLOOR), factor), chosen)


def _warmup(method: SWAG) -> Any:
    """Adam down a cosine to the mode."""
    steps = max(method.num_warmup, 1)
    return _optimise.optimizer(
        types.SimpleNamespace(optimizer="adam", schedule="cosine", learning_rate=method.warmup_rate, num_steps=steps, clip=method.clip)
    )


def _verdict(result: Any, num_steps: int) -> tuple[str, bool, dict[str, float]]:
    """Whether the iterates moved, and moved around rather than away."""
    squares = jax.tree.leaves(result.state.square)
    size = sum(leaf.size for leaf in squares) // max(1, np.size(result.state.number))
    still = sum(int(jnp.sum(leaf <= 0.0)) for leaf in squares) / sum(leaf.size for leaf in squares)
    trace = result.traces["log_likelihood"]
    trace = trace.reshape(-1, trace.shape[-1]).mean(axis=0)
    points = -(-num_steps // max(1, num_steps // TRACE_POINTS))  # of this phase alone
    blocks = np.array([piece.mean() for piece in np.array_split(trace[-points:], BLOCKS)]) if points >= BLOCKS else np.zeros(BLOCKS)
    trend = float(np.corrcoef(np.arange(BLOCKS), blocks)[0, 1]) if np.ptp(blocks) > 0 else 0.0
    rise = float(blocks[BLOCKS // 2 :].mean() - blocks[: BLOCKS // 2].mean())
    before, after = trace[:-points][-BEFORE:], trace[-points:]
    fall = float(before.mean() - after.mean()) if len(before) == BEFORE else 0.0
    noise = float(np.hypot(*(part.std() / np.sqrt(part.size) for part in (before, after)))) if fall else 0.0
    numbers = {"without_spread": still, "trend": trend, "rise": rise, "fall": fall}
    if still > STUCK:
        return f"{still:.0%} of the parameters never moved under SGD: raise learning_rate or num_steps.", False, numbers
    if fall > FALL * 0.5 * size + 4.0 * noise:
        said = f"SGD left the mode: it lies {fall:.3g} nats below it, where draws of a posterior of {size} parameters lie about {0.5 * size:.3g}"
        return f"{said}; lower learning_rate by a factor of {fall / (0.5 * size):.2g} or more.", False, numbers
    if trend > TREND and rise > RISE:
        return "The log-likelihood still rises under SGD: the spread is partly drift; raise num_warmup or num_steps.", False, numbers
    return f"Complete: {result.steps} steps, iterates move around one level of the log-likelihood.", True, numbers
