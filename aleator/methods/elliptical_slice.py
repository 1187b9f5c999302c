"""EllipticalSlice: moves along ellipses of a Gaussian prior, without a step size and without rejections."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import MethodError, message
from aleator._typing import Array, Key
from aleator.methods import slice as line
from aleator.methods._chains import Density, Kernel, Layout, Sampler, Stats, count_bad, safe, stats
from aleator.methods._method import Card
from aleator.methods._moves import has_reference

MAX_LINES = 50  # coordinates without a Gaussian prior that are worth a slice of their own each
TRIALS = 8  # points at which the prior is tried
TOLERANCE = 1e-4  # relative; single precision leaves some 1e-6


class State(NamedTuple):
    """position (D,), log_density: where the chain is. width, change: of the slices of coordinates whose prior is not Gaussian, (D,)."""

    position: Array
    log_density: Array
    width: Array
    change: Array


class Ellipse(NamedTuple):
    """The prior N(loc, scale²) of the coordinates with gaussian = 1, each (D,)."""

    gaussian: Array
    loc: Array
    scale: Array


class _Arc(NamedTuple):
    low: Array
    high: Array
    position: Array
    log_density: Array
    number: Array
    found: Array
    outside: Array
    undefined: Array


def step(key: Key, state: State, density: Density, ellipse: Ellipse) -> tuple[State, Stats]:
    """q(θ) = m + (q − m)cos θ + ν sin θ, ν ~ N(0, S): all have the prior of q, so the likelihood alone decides. θ from the full circle,
    the arc shrinking towards 0 until L(q(θ)) is above a height under L(q) (Murray, Adams and MacKay 2010)."""
    key_noise, key_height, key_angle, key_shrink = jax.random.split(key, 4)
    kind = state.log_density.dtype
    centred = ellipse.gaussian * (state.position - ellipse.loc)
    noise = ellipse.gaussian * ellipse.scale * jax.random.normal(key_noise, state.position.shape, kind)
    # The log joint without the Gaussian part: the log-likelihood, and the prior of the other coordinates, which do not move here.
    rest = lambda position, value: value + 0.5 * jnp.sum(ellipse.gaussian * ((position - ellipse.loc) / ellipse.scale) ** 2)
    height = rest(state.position, state.log_density) + jnp.log(jax.random.uniform(key_height, (), kind))
    angle = jax.random.uniform(key_angle, (), kind, maxval=2.0 * np.pi)

    def tried(low: Array, high: Array, angle: Array, number: Array, outside: Array, undefined: Array) -> _Arc:
        position = state.position - centred + centred * jnp.cos(angle) + noise * jnp.sin(angle)
        value = density.value(position)
        bad = count_bad(value)
        found = safe(rest(position, value)) > height
        low, high = jnp.where(angle < 0.0, angle, low), jnp.where(angle < 0.0, high, angle)
        return _Arc(low, high, position, value, number + 1, found, outside + bad["outside"], undefined + bad["undefined"])

    def shrink(arc: _Arc) -> _Arc:
        angle = arc.low + (arc.high - arc.low) * jax.random.uniform(jax.random.fold_in(key_shrink, arc.number), (), kind)
        return tried(arc.low, arc.high, angle, arc.number, arc.outside, arc.undefined)

    none = jnp.zeros((), jnp.int32)
    first = tried(angle - 2.0 * np.pi, angle, angle, none, none, none)
    arc = jax.lax.while_loop(lambda arc: ~arc.found & (arc.number < line.MAX_SHRINKS), shrink, first)
    state = state._replace(
        position=jnp.where(arc.found, arc.position, state.position), log_density=jnp.where(arc.found, arc.log_density, state.log_density)
    )
    return state, stats(state.log_density, 1.0, arc.number, outside=arc.outside, undefined=arc.undefined)


@dataclasses.dataclass(frozen=True)
class EllipticalSlice(Sampler):
    """Elliptical slice sampling: for parameters with a fixed Gaussian prior (al.Normal; the raw weights of a non-centred al.Hierarchical;
    NumPyro sites with fixed normal priors; the reference of a bare density).

    Which coordinates these are is found by trying the prior. The others, such as scales, are moved by univariate slices in between, as
    long as there are at most 50 of them. Best where the likelihood says little beyond the prior.
    """

    num_samples: int = 2000
    num_warmup: int = 500
    num_chains: int = 4
    thin: int = 5
    storage: str = "auto"
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Elliptical slice",
        summary="For Gaussian priors: no step size, no gradients, and every move is taken.",
        model_class="models whose weights have a fixed Gaussian prior",
        criterion="invariance of the posterior: exact as the number of draws grows",
        search="ellipses through the current point and a draw from the prior",
        cost="some 5 to 10 densities over all the data per step, more where the likelihood is much narrower than the prior",
        needs="a Gaussian prior, all the data in memory; no gradients",
        references=("Murray, Adams and MacKay, Elliptical slice sampling, 2010",),
    )

    def __post_init__(self) -> None:
        self.check()

    def kernel(self, target: Any, layout: Layout) -> Kernel:
        ellipse = gaussian_prior(target, layout)
        lines = np.flatnonzero(~np.asarray(ellipse.gaussian, bool))

        def init(key: Key, position: Array, density: Density) -> State:
            return State(position, density.value(position), jnp.ones_like(position), jnp.zeros_like(position))

        def both(key: Key, state: State, density: Density) -> tuple[State, Stats]:
            key_ellipse, key_lines = jax.random.split(key)
            state, now = step(key_ellipse, state, density, ellipse)
            if not lines.size:
                return state, now
            blank = line.State(state.position, state.log_density, state.width, None, None, state.change)  # type: ignore[arg-type]
            swept, then = line.sweep(key_lines, blank, density, 50, jnp.asarray(lines))
            state = State(swept.position, swept.log_density, swept.width, swept.change)
            total = {name: getattr(now, name) + getattr(then, name) for name in ("evaluations", "outside", "undefined")}
            return state, then._replace(**total)

        def adapt(state: State, now: Stats, number: Array) -> State:
            return state._replace(width=line.widen(state.width, state.change, number))

        return Kernel(init=init, step=both, adapt=adapt)


def gaussian_prior(target: Any, layout: Layout) -> Ellipse:
    """Coordinates whose log prior has the slope −(q − m)/s², whatever the others are; m and s from two points, tried at six more.

    A wrong m or s would cost speed, never exactness: the likelihood is what remains of the joint without this Gaussian.
    """
    if not has_reference(target):
        raise MethodError(
            message(
                "Elliptical slice sampling needs a Gaussian prior.",
                "a bare log density",
                "a model with a Gaussian prior",
                "pass al.target_from_log_density(fn, params0, reference=…) with a Gaussian reference, or use Slice",
            )
        )
    key_start, key_points = jax.random.split(jax.random.key(0))
    slope = jax.jit(jax.vmap(jax.grad(lambda q: target.log_prior(layout.unravel(q)))))
    start = layout.ravel(target.init(key_start))
    size = len(start)
    points = start + jax.random.normal(key_points, (TRIALS, size), start.dtype) * jnp.linspace(0.5, 3.0, TRIALS, dtype=start.dtype)[:, None]
    q, g = np.asarray(points, np.float64), np.asarray(slope(points), np.float64)
    with np.errstate(all="ignore"):
        # The two points of each coordinate that lie farthest apart.
        low, high = q.argmin(axis=0), q.argmax(axis=0)
        each = np.arange(size)
        precision = -(g[high, each] - g[low, each]) / (q[high, each] - q[low, each])
        loc = q[low, each] + g[low, each] / precision
        error = np.abs(g + precision * (q - loc)).max(axis=0)
        gaussian = (precision > 0.0) & (error < TOLERANCE * np.abs(g).max(axis=0)) & np.isfinite(loc)
        scale = np.sqrt(target.temperature / precision)
    names = [layout.names[i] for i in np.flatnonzero(~gaussian)]
    if not gaussian.any() or len(names) > MAX_LINES:
        raise MethodError(
            message(
                "Elliptical slice sampling needs a Gaussian prior.",
                f"another prior on {len(names)} of {size} parameters ({', '.join(names[:3])}…)",
                f"fixed Gaussian priors on all but at most {MAX_LINES}",
                "use al.Normal, or Hierarchical(centred=False), or another sampler",
            )
        )
    kind = start.dtype
    fill = lambda values, other: jnp.asarray(np.where(gaussian, values, other), kind)
    return Ellipse(jnp.asarray(gaussian, kind), fill(loc, 0.0), fill(scale, 1.0))
