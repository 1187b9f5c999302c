"""ParallelTempering: replicas between the prior and the posterior that exchange places, for posteriors with several modes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import convergence
from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.loop import Algorithm
from aleator.methods import _chains as chains
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, safe
from aleator.methods._method import Card, check_positive
from aleator.methods._moves import along, halves, has_reference, refresh, repeat, windows
from aleator.methods.elliptical_slice import EllipticalSlice
from aleator.methods.gibbs import Gibbs
from aleator.methods.random_walk import RandomWalk
from aleator.posterior import Posterior, Score

HOTTEST = 0.02  # β of the hottest replica where there is no reference to begin from
POWER = 4  # the first ladder is (r/(R − 1))⁴: most of the change happens near the prior


class State(NamedTuple):
    """position (D,): the cold replica's. inner: states of the kernels, one per level, leading axis R, hottest first. betas (R,): the
    ladder, ascending. rest (R,): ℓ of each level. last: each level's Stats. refused, tried (R − 1,): exchanges of neighbours since the
    ladder was last moved. number: of the step."""

    position: Array
    inner: Any
    betas: Array
    rest: Array
    last: Stats
    refused: Array
    tried: Array
    number: Array


def exchange(key: Key, betas: Array, rest: Array, number: Array) -> tuple[Array, Array, Array]:
    """Exchanges of neighbouring levels, even pairs in even steps and odd ones in odd steps (which drifts up and down the ladder and does
    not diffuse), each with min(1, e^{(β_{r+1} − β_r)(ℓ_r − ℓ_{r+1})}). Returns (which level each takes its replica from (R,), the
    probabilities (R − 1,), which pairs were tried)."""
    levels = jnp.arange(len(betas))
    probability = jnp.exp(jnp.minimum(jnp.diff(betas) * (rest[:-1] - rest[1:]), 0.0))
    probability = jnp.where(jnp.isnan(probability), 0.0, probability)
    tried = levels[:-1] % 2 == number % 2
    swap = tried & (jax.random.uniform(key, probability.shape, probability.dtype) < probability)
    up, down = jnp.append(swap, False), jnp.append(False, swap)
    return levels + up - down, probability, tried


def place(betas: Array, refused: Array, tried: Array) -> Array:
    """A ladder of equally refused neighbours: β at equal steps of the cumulative refusal, which is interpolated between the levels
    (Syed et al. 2022). The ends stay."""
    share = jnp.maximum(refused / jnp.maximum(tried, 1.0), 1e-3)
    barrier = jnp.append(0.0, jnp.cumsum(share))
    inner = jnp.interp(jnp.linspace(0.0, 1.0, len(betas)) * barrier[-1], barrier, betas).astype(betas.dtype)
    return inner.at[0].set(betas[0]).at[-1].set(betas[-1])


def stepping_stones(betas: np.ndarray, rest: np.ndarray) -> Score:
    """log Z = Σ_r log E_r[e^{(β_{r+1} − β_r)ℓ}], rest (chains, n, R); the standard error from the spread and autocorrelation of each
    stone's weights (Xie et al. 2011)."""
    log_weights = np.diff(betas) * rest[..., :-1].astype(np.float64)
    top = log_weights.max(axis=(0, 1))
    weights = np.exp(log_weights - top)
    mean = weights.mean(axis=(0, 1))
    error = convergence.mcse(weights) / mean
    return Score(float(np.sum(top + np.log(mean))), float(np.sqrt(np.nansum(error**2))), "estimate")


@dataclasses.dataclass(frozen=True)
class ParallelTempering(Sampler):
    """Replica exchange over π_β ∝ p(θ)·p(D|θ)^β, β from 0 (independent draws from the prior) to 1; the draws are those of β = 1.

    within: the sampler that moves each replica, num_moves times between exchanges; all num_levels replicas run stacked. Warm-up moves the
    ladder until neighbours refuse equally often, and tunes each level's sampler. A bare density is tempered from its `reference`, or, if
    it has none, as π^β with β ≥ 0.02. With a prior or reference the log evidence comes with the draws (stepping stones).
    num_chains: independent sets of replicas.
    """

    within: Any = RandomWalk()
    num_samples: int = 2000
    num_warmup: int = 2000
    num_chains: int = 4
    num_levels: int = 8
    num_moves: int = 5
    thin: int = 1
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Parallel tempering",
        summary="For several modes: hot replicas cross between them and hand over what they find.",
        model_class="any log density; most useful with separated modes",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="replicas at all temperatures between prior and posterior, exchanging neighbours",
        cost="num_levels times the sampler within, stacked",
        needs="a prior to begin from, or a bare density that can be flattened; all the data in memory",
        references=(
            "Geyer, Markov chain Monte Carlo maximum likelihood, 1991",
            "Syed, Bouchard-Côté, Deligiannidis and Doucet, Non-reversible parallel tempering, 2022",
            "Xie, Lewis, Fan, Kuo and Chen, Improving marginal likelihood estimation for Bayesian phylogenetic model selection, 2011",
        ),
    )

    def __post_init__(self) -> None:
        self.check()
        check_positive(self, "num_moves", "num_levels", whole=True)
        wrong = not isinstance(self.within, Sampler) or isinstance(self.within, (ParallelTempering, Gibbs, EllipticalSlice))
        if wrong or self.num_levels < 2:
            raise MethodError(
                message(
                    "Parallel tempering cannot be set up.",
                    f"within={self.within!r}, num_levels={self.num_levels}",
                    "a sampler such as RandomWalk, MALA or NUTS, and at least two levels",
                    "pass within=RandomWalk()",
                )
            )

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        inner = dataclasses.replace(self.within, num_warmup=self.num_warmup).kernel(target, layout)
        schedule = windows(self.num_warmup)
        anchored = has_reference(target)
        levels = self.num_levels
        ladder = np.linspace(0.0, 1.0, levels) ** POWER if anchored else np.geomspace(HOTTEST, 1.0, levels)

        def tempered(density: Density, beta: Array) -> Density:
            split = halves(target, layout, density)
            value = lambda q: along(*split(q), beta)
            return Density(value, jax.value_and_grad(value), split, density.functions)

        def init(key: Key, position: Array, density: Density) -> State:
            """Every level where the chain starts, but the hottest at a draw from the prior."""
            betas = jnp.asarray(ladder, position.dtype)
            begin = lambda k, beta: inner.init(k, position, tempered(density, beta))
            states = jax.vmap(begin)(jax.random.split(key, levels), betas)
            rest = jnp.broadcast_to(halves(target, layout, density)(position)[1], (levels,)).astype(position.dtype)
            none = jnp.zeros(levels - 1, position.dtype)
            return State(position, states, betas, rest, jax.vmap(chains.stats)(betas), none, none, jnp.zeros((), jnp.int32))

        def step(key: Key, state: State, density: Density) -> tuple[State, Stats]:
            key_moves, key_prior, key_swap = jax.random.split(key, 3)
            move = lambda k, s, beta: repeat(k, inner.step, s, tempered(density, beta), self.num_moves)
            states, now = jax.vmap(move)(jax.random.split(key_moves, levels), state.inner, state.betas)
            positions = states.position
            if anchored:
                positions = positions.at[0].set(layout.ravel(target.sample_prior(key_prior)).astype(positions.dtype))
            reference, rest = jax.vmap(halves(target, layout, density))(positions)
            # A draw from the prior where the likelihood fails stays where it is: it has no way up.
            rest = safe(rest).astype(positions.dtype)
            source, probability, tried = exchange(key_swap, state.betas, rest, state.number)
            positions, reference, rest = positions[source], reference[source], rest[source]
            log_density = jax.vmap(along)(reference, rest, state.betas).astype(positions.dtype)
            if {"gradient", "core"} & set(states._fields):
                states = jax.vmap(lambda s, q, beta: refresh(s, q, tempered(density, beta)))(states, positions, state.betas)
            else:
                states = states._replace(position=positions, log_density=log_density)
            state = State(
                position=positions[-1],
                inner=states,
                betas=state.betas,
                rest=rest,
                last=now,
                refused=state.refused + jnp.where(tried, 1.0 - probability, 0.0),
                tried=state.tried + tried,
                number=state.number + 1,
            )
            total = {name: jnp.sum(getattr(now, name)).astype(jnp.int32) for name in ("evaluations", "outside", "undefined")}
            cold = jax.tree.map(lambda leaf: leaf[-1], now)
            total["evaluations"] = total["evaluations"] + levels
            return state, cold._replace(log_density=log_density[-1], **total)

        def adapt(state: State, now: Stats, number: Array) -> State:
            """Each level is tuned by its own acceptance; the ladder moves where a window ends."""
            state = state._replace(inner=jax.vmap(lambda s, last: inner.adapt(s, last, number))(state.inner, state.last))
            none = jnp.zeros_like(state.refused)
            move = lambda: state._replace(betas=place(state.betas, state.refused, state.tried), refused=none, tried=none)
            return jax.lax.cond(jnp.asarray(schedule.update)[number], move, lambda: state)

        settle = lambda state: state._replace(inner=jax.vmap(inner.settle)(state.inner))
        return Kernel(init=init, step=step, adapt=adapt, settle=settle)

    def build(self, target: Any) -> Algorithm:
        """As every sampler; where the path begins at a distribution, with the evidence."""
        algorithm = super().build(target)
        if not has_reference(target) or target.temperature != 1.0:
            return algorithm

        def keep(state: chains.State, info: Any) -> tuple[dict[str, Any], Array]:
            value, wanted = algorithm.keep(state, info)  # type: ignore[misc]
            return value | {"rest": state.kernel.rest}, wanted

        def finish(key: Key, state: chains.State, kept: Any) -> Posterior:
            draws = algorithm.finish(key, state, kept)
            betas, rest = np.asarray(state.kernel.betas, np.float64), np.asarray(kept["rest"])
            # Each set of replicas has its own ladder, so its own estimate; together they are a mean on the scale of Z.
            return dataclasses.replace(draws, log_evidence=pooled([stepping_stones(b, r[None]) for b, r in zip(betas, rest, strict=True)]))

        return dataclasses.replace(algorithm, keep=keep, finish=finish)


def pooled(scores: list[Score]) -> Score:
    """The mean of independent estimates of Z, on the log scale; its standard error is the larger of what they say themselves and of how
    they differ."""
    values, errors = (np.array([getattr(score, name) for score in scores]) for name in ("value", "stderr"))
    top = values.max()
    each = np.exp(values - top)
    share = each / each.sum()
    within = float(np.sqrt(np.sum((share * errors) ** 2)))
    between = float(each.std(ddof=1) / each.mean() / np.sqrt(len(each))) if len(each) > 1 else 0.0
    return Score(float(top + np.log(each.mean())), max(within, between), "estimate")
