"""Slice: draws from under the density, along one line at a time; its only tuning is a width that hardly matters."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods import _hamiltonian as hmc
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, safe, stats
from aleator.methods._method import Card, check_positive
from aleator.methods._moves import check_metric, covariance_metric, kind_of, spread, windows

MAX_SHRINKS = 200  # an interval halved so often is one point in floating point
DIRECTIONS = ("coordinates", "random")


class State(NamedTuple):
    """position (D,), log_density: where the chain is. width: w of each coordinate (D,), or () along random directions. metric, moments:
    the covariance that random directions have, and what it is learned from. change: of log w asked for by the last sweep, as width."""

    position: Array
    log_density: Array
    width: Array
    metric: hmc.Metric
    moments: hmc.Moments
    change: Array


class Line(NamedTuple):
    """What happened along one line: where it ended, steps out, shrinks, and evaluations by kind."""

    position: Array
    log_density: Array
    steps_out: Array
    shrinks: Array
    outside: Array
    undefined: Array


class _Bound(NamedTuple):
    """One end of the interval while it steps out: place, steps left, whether it is still under the density, and counts."""

    place: Array
    left: Array
    inside: Array
    outside: Array
    undefined: Array


class _Interval(NamedTuple):
    low: Array
    high: Array
    place: Array
    value: Array
    number: Array
    found: Array
    outside: Array
    undefined: Array


def along(key: Key, density: Density, position: Array, log_density: Array, direction: Array, width: Array, max_steps: int) -> Line:
    """A new point on {q + t·d}: a height y under π(q), an interval around 0 stepped out by w until both ends are below y (at most
    max_steps of them, shared at random between the ends), then points of it until one is above y, the interval shrinking to each that
    is not (Neal 2003, figures 3 and 5)."""
    key_height, key_place, key_share, key_shrink = jax.random.split(key, 4)
    kind = log_density.dtype
    height = log_density + jnp.log(jax.random.uniform(key_height, (), kind))
    at = lambda t: density.value(position + t * direction)
    low = -width * jax.random.uniform(key_place, (), kind)
    share = jnp.floor(max_steps * jax.random.uniform(key_share, (), kind)).astype(jnp.int32)
    none = jnp.zeros((), jnp.int32)

    def step_out(place: Array, steps: Array, stride: Array) -> _Bound:
        def body(bound: _Bound) -> _Bound:
            value = at(bound.place)
            bad = count_bad(value)
            inside = safe(value) > height
            return _Bound(
                jnp.where(inside, bound.place + stride, bound.place),
                bound.left - inside,
                inside,
                bound.outside + bad["outside"],
                bound.undefined + bad["undefined"],
            )

        return jax.lax.while_loop(lambda bound: bound.inside & (bound.left > 0), body, _Bound(place, steps, jnp.asarray(True), none, none))

    left, right = step_out(low, share, -width), step_out(low + width, max_steps - 1 - share, width)

    def shrink(now: _Interval) -> _Interval:
        place = now.low + (now.high - now.low) * jax.random.uniform(jax.random.fold_in(key_shrink, now.number), (), kind)
        value = at(place)
        bad = count_bad(value)
        return _Interval(
            low=jnp.where(place < 0.0, place, now.low),
            high=jnp.where(place < 0.0, now.high, place),
            place=place,
            value=value,
            number=now.number + 1,
            found=safe(value) > height,
            outside=now.outside + bad["outside"],
            undefined=now.undefined + bad["undefined"],
        )

    first = _Interval(left.place, right.place, jnp.zeros((), kind), log_density, none, jnp.asarray(False), none, none)
    last = jax.lax.while_loop(lambda now: ~now.found & (now.number < MAX_SHRINKS), shrink, first)
    return Line(
        position=jnp.where(last.found, position + last.place * direction, position),
        log_density=jnp.where(last.found, last.value, log_density),
        steps_out=(max_steps - 1) - left.left - right.left,
        shrinks=last.number - 1,
        outside=last.outside + left.outside + right.outside,
        undefined=last.undefined + left.undefined + right.undefined,
    )


def sweep(key: Key, state: State, density: Density, max_steps: int, lines: Array | None) -> tuple[State, Stats]:
    """One line per coordinate: the coordinates `lines`, in random order, or D random directions L u where lines is None."""
    key_order, key_lines = jax.random.split(key)
    size = len(state.position)
    number = size if lines is None else len(lines)
    order = jnp.arange(number) if lines is None else jax.random.permutation(key_order, lines)

    def one(i: Array, carry: tuple) -> tuple:
        position, log_density, change, evaluations, outside, undefined = carry
        key_direction, key_line = jax.random.split(jax.random.fold_in(key_lines, i))
        if lines is None:
            z = jax.random.normal(key_direction, (size,), position.dtype)
            direction, width = spread(state.metric, z / jnp.linalg.norm(z)), state.width
        else:
            direction, width = jnp.zeros(size, position.dtype).at[order[i]].set(1.0), state.width[order[i]]
        line = along(key_line, density, position, log_density, direction, width, max_steps)
        # As many steps out as in: intervals are then about as wide as the slices.
        wish = (line.steps_out - line.shrinks) / (line.steps_out + line.shrinks + 1.0)
        change = change + wish / number if lines is None else change.at[order[i]].add(wish)
        evaluations = evaluations + line.steps_out + line.shrinks + 3
        return line.position, line.log_density, change, evaluations, outside + line.outside, undefined + line.undefined

    none = jnp.zeros((), jnp.int32)
    begun = (state.position, state.log_density, jnp.zeros_like(state.change), none, none, none)
    position, log_density, change, evaluations, outside, undefined = jax.lax.fori_loop(0, number, one, begun)
    state = state._replace(position=position, log_density=log_density, change=change)
    return state, stats(log_density, 1.0, evaluations, outside=outside, undefined=undefined)


def widen(width: Array, change: Array, number: Array) -> Array:
    """w after warm-up step `number`: log w follows the wish of the last sweep, ever more slowly."""
    return width * jnp.exp(change / (1.0 + number.astype(width.dtype)) ** 0.6)


@dataclasses.dataclass(frozen=True)
class Slice(Sampler):
    """Slice sampling by stepping out and shrinkage: exact for any density, smooth or not, and never refusing a move.

    directions: "coordinates" takes each in turn, in random order; "random" takes as many random directions with the covariance that
    warm-up learns (`metric`: "dense", "diagonal", "identity", or "auto"), for correlated targets. Warm-up adapts the widths. One draw is
    one sweep over D lines; max_steps bounds the stepping out.
    """

    num_samples: int = 2000
    num_warmup: int = 1000
    num_chains: int = 4
    thin: int = 1
    directions: str = "coordinates"
    metric: str = "auto"
    width: float = 1.0
    max_steps: int = 50
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Slice",
        summary="Exact draws without gradients and without a step size to get wrong.",
        model_class="any log density, up to some 50 parameters",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="uniform draws from the slice under the density, line by line",
        cost="some 5 to 8 densities over all the data per line, D lines per draw",
        needs="all the data in memory; no gradients",
        references=("Neal, Slice sampling, 2003",),
    )

    def __post_init__(self) -> None:
        self.check()
        check_metric(self)
        check_positive(self, "width")
        check_positive(self, "max_steps", whole=True)
        if self.directions not in DIRECTIONS:
            raise MethodError(message("Unknown directions.", repr(self.directions), f"one of {DIRECTIONS}", "choose one of them"))

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        size, coordinates = len(layout.names), self.directions == "coordinates"
        kind = "identity" if coordinates else kind_of(self.metric, size)
        schedule = windows(self.num_warmup)

        def init(key: Key, position: Array, density: Density) -> State:
            width = jnp.full((size,) if coordinates else (), self.width, position.dtype)
            metric, moments = hmc.new_metric(kind, position), hmc.moments(position, kind)
            return State(position, density.value(position), width, metric, moments, jnp.zeros_like(width))

        def adapt(state: State, now: Stats, number: Array) -> State:
            state = state._replace(width=widen(state.width, state.change, number))
            if kind == "identity":
                return state
            gather = lambda: hmc.collect(state.moments, state.position, state.position)
            state = state._replace(moments=jax.lax.cond(jnp.asarray(schedule.collect)[number], gather, lambda: state.moments))
            renew = lambda: state._replace(
                metric=covariance_metric(state.moments, state.metric),
                moments=hmc.moments(state.position, kind),
                width=jnp.full_like(state.width, 2.0 * size**0.5),
            )
            return jax.lax.cond(jnp.asarray(schedule.update)[number], renew, lambda: state)

        lines = jnp.arange(size) if coordinates else None
        return Kernel(init=init, step=lambda key, state, density: sweep(key, state, density, self.max_steps, lines), adapt=adapt)
