"""Cyclical: a step size that falls along a cosine and starts again, for every sampler with stochastic gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from aleator._errors import MethodError, message, nearest
from aleator._typing import Array

SCHEDULES = ("constant", "polynomial")
DECAY = 1.0 / 3.0  # h_t ∝ (1 + t/τ)^(−1/3): the rate at which bias and variance of an average fall together
TURN = 0.1  # τ, as a share of the run


@dataclasses.dataclass(frozen=True)
class Cyclical:
    """C = num_cycles cycles of step size h/2·(1 + cos πu), u ∈ (0, 1] the place within the cycle (Zhang et al. 2020).

    During the first `explore` of a cycle no noise is injected: the large steps are those of an optimiser and lead to another mode. In the
    rest the chain samples, and only there draws are kept: num_samples/num_cycles of them in each cycle, `thin` steps apart, which sets the
    length of the cycles.
    """

    num_cycles: int = 4
    explore: float = 0.5

    def __post_init__(self) -> None:
        whole = isinstance(self.num_cycles, int) and not isinstance(self.num_cycles, bool)
        if not whole or self.num_cycles < 1 or not 0.0 <= self.explore < 1.0:
            got = f"num_cycles={self.num_cycles!r}, explore={self.explore!r}"
            raise MethodError(
                message("These cycles cannot be run.", got, "num_cycles ≥ 1 and 0 ≤ explore < 1", "pass e.g. al.Cyclical(4, 0.5)")
            )


class Timetable(NamedTuple):
    """total: steps after warm-up. factor(number) → what multiplies the step size at step `number` = 1, 2, …; heat(number) → 1.0 where noise
    is injected, 0.0 where not; wanted(number) → whether the draw is kept. Warm-up has numbers below 1: the full step, heat, no draws."""

    total: int
    factor: Callable[[Array], Any]
    heat: Callable[[Array], Any]
    wanted: Callable[[Array], Array]


def timetable(num_samples: int, thin: int, schedule: str, cycles: Cyclical | None) -> Timetable:
    if schedule not in SCHEDULES:
        got = repr(schedule) + nearest(str(schedule), SCHEDULES)
        raise MethodError(message("Unknown schedule.", got, f"one of {SCHEDULES}, or cycles=al.Cyclical(…)", "choose one of them"))
    if cycles is None:
        total = num_samples * thin
        decay = lambda number: (1.0 + jnp.maximum(number, 0) / (TURN * total)) ** -DECAY
        factor = decay if schedule == "polynomial" else lambda number: 1.0
        return Timetable(total, factor, lambda number: 1.0, lambda number: (number > 0) & (number % thin == 0))
    if schedule != "constant":
        raise MethodError(message("Two schedules at once.", f"schedule={schedule!r} with cycles", "one of them", "drop schedule"))
    sampling = -(-num_samples // cycles.num_cycles) * thin
    length = sampling + round(sampling * cycles.explore / (1.0 - cycles.explore) / thin) * thin
    first = length - sampling  # place of the first step that samples

    def cosine(number: Array) -> Array:
        place = jnp.where(number > 0, (number - 1) % length, 0)
        return 0.5 * (1.0 + jnp.cos(jnp.pi * place / length))

    def sampled(number: Array) -> Array:
        return (number <= 0) | ((number - 1) % length >= first)

    def wanted(number: Array) -> Array:
        return (number > 0) & sampled(number) & (((number - 1) % length - first + 1) % thin == 0)

    return Timetable(cycles.num_cycles * length, cosine, lambda number: sampled(number).astype(jnp.result_type(float)), wanted)
