"""Functional prior matching: scales of a network's prior tuned until its functions look like those of a target (Tran et al. 2022).

Weights mean nothing to a person, functions do. The target is a Gaussian process, or anything that functions can be drawn from; the distance
is between two sets of draws, and its gradient goes through the draws to the scales.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._cache import cached
from aleator._errors import MethodError, ModelError, message
from aleator._random import as_key, noise_key, split
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import check_arrays
from aleator.elicit._dials import Dials, dials
from aleator.elicit.simulated import prepared
from aleator.evidence._problem import check_whole
from aleator.explain._shared import table
from aleator.hyperpriors import positive_number
from aleator.model import Supervised

KINDS = ("wasserstein", "mmd")
NUM_BLOCKS = 20  # independent estimates of a distance, whose scatter is its error
NUM_DIRECTIONS = 64
NUM_PAIRS = 500  # functions of the target whose median distance is the unit of the kernels
WIDTHS = 4.0 ** np.arange(-1, 4)  # squared widths of the kernels, in medians of ‖f − f′‖² between functions of the target
NEGATIVE = 1e-6  # of the largest eigenvalue: below minus this a matrix is no covariance
MEMORY = 0.9  # of Adam for squared gradients: at a bad start they are orders of magnitude larger than all that follow
AVERAGED = 0.25  # share of the steps, the last ones, whose numbers are averaged


class State(NamedTuple):
    """values (P,): the dials. optimiser: of Adam."""

    values: Array
    optimiser: Any


class Info(NamedTuple):
    """distance: this step's own estimate, before it. values (P,): after it."""

    distance: Array
    values: Array


class Distance(NamedTuple):
    """A squared distance between prior functions and the target's, zero in expectation when they agree (so that it may come out below
    zero), and its Monte Carlo error. kind: "wasserstein" (in units of f²) or "mmd" (no unit)."""

    value: float
    stderr: float
    kind: str

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.stderr:.1g}" + (" [f²]" if self.kind == "wasserstein" else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Matched:
    """A model whose prior was tuned. before, after: distances on draws that the tuning has not seen. trace (num_steps,): the distance at
    each step. names, scales_before, scales_after (P,): the numbers tuned, in the prior's own units; path (num_steps, P): on their way, as log
    factors (shifts, for the location of a log-normal). Print it for the table."""

    model: Any
    before: Distance
    after: Distance
    trace: np.ndarray
    names: tuple[str, ...]
    scales_before: np.ndarray
    scales_after: np.ndarray
    path: np.ndarray

    @property
    def significance(self) -> float:
        """By how many standard errors the distance on fresh draws has fallen."""
        return (self.before.value - self.after.value) / max(float(np.hypot(self.before.stderr, self.after.stderr)), 1e-300)

    def __str__(self) -> str:
        rows = [(name, f"{a:.4g}", f"{b:.4g}") for name, a, b in zip(self.names, self.scales_before, self.scales_after, strict=True)]
        rows.append((f"squared {self.before.kind} distance", str(self.before), str(self.after)))
        return table(("prior", "before", "after"), rows)


def match(
    key: KeyLike,
    model: Any,
    target: Any,
    x: Any,
    kind: str = "wasserstein",
    per: str = "leaf",
    num_steps: int = 500,
    batch_size: int = 256,
    learning_rate: float = 0.1,
    num_samples: int = 8000,
) -> Matched:
    """Tune the scales of the model's prior so that its outputs f at the rows of x are distributed like the target's.

    target: a covariance function k(x, x′) → (n, n′) of a Gaussian process of mean zero (`rbf`, `matern`, `periodic` or your own, with two
    arguments); or a sampler key → (n,) or (n, outputs), one function at the rows of x (one argument); or a model, whose prior functions are
    meant. Outputs are independent under a kernel; for classes they are the logits. Tens of rows over the region of interest are enough.

    kind: "wasserstein", the sliced 2-Wasserstein distance, or "mmd", the maximum mean discrepancy with Gaussian kernels, which is bounded
    and suits heavy tails, but sees little of functions that are orders of magnitude too large. per: which scales of a fixed prior are tuned
    by themselves: "leaf" (every array), "layer", "global" (one factor for all) or "given" (each number that the prior was given). Of
    `Hierarchical` the numbers of its prior on scales are tuned, of `Horseshoe` also the biases' scale and the slab.

    Each step draws batch_size fresh functions of either kind and follows the gradient of the distance in the logs of the numbers (Adam,
    with a cosine decay); the result is the mean of the last quarter. num_samples: fresh draws for the distances before and after.

    >>> import aleator as al
    >>> model = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.1), al.Normal(0.3))
    >>> line = lambda x, z: 4.0 + 4.0 * x[:, None] * z[None, :]                 # intercept and slope N(0, 2²)
    >>> found = match(0, model, line, np.linspace(-1, 1, 8), num_steps=200)
    >>> bool(abs(found.model.prior.scale[0][1] - 2.0) < 0.1), found.significance > 10
    (True, True)
    """
    check_whole(num_steps=num_steps, batch_size=batch_size, num_samples=num_samples)
    positive_number("match", "learning_rate", learning_rate)
    if batch_size < 4 or num_samples < 4 * NUM_BLOCKS:
        got = f"batch_size={batch_size}, num_samples={num_samples}"
        raise MethodError(message("These are too few functions.", got, f"at least 4 and {4 * NUM_BLOCKS}", "leave them as they are"))
    x = check_arrays(x, "x")
    model = prepared(model, x)
    tuned = _dials(model, per)
    goal = _goal(target, x, model)
    key_before, key_run, key_after = split(as_key(key), 3)
    inputs = jax.tree.map(jnp.asarray, x)
    widths = _widths(goal.draw, kind)(inputs, goal.root)
    start = jnp.zeros(len(tuned.names))
    held = lambda k, values: _measure(model, per, goal.draw, kind)(k, values, inputs, goal.root, widths, num_samples // NUM_BLOCKS)
    before = held(key_before, start)
    run = _tuner(model, per, goal.draw, kind, num_steps, batch_size, float(learning_rate))
    info = jax.tree.map(np.asarray, run(key_run, start, inputs, goal.root, widths))
    path = np.asarray(info.values, np.float64)
    if not np.all(np.isfinite(path)) or not np.all(np.isfinite(info.distance)):
        step = int(np.argmax(~np.isfinite(info.distance) | ~np.isfinite(path).all(axis=1)))
        got = f"a distance of {info.distance[step]} at step {step}"
        raise MethodError(message("The tuning left the finite numbers.", got, "finite ones", "use a smaller learning_rate or start scale"))
    values = path[-max(1, int(AVERAGED * num_steps)) :].mean(axis=0)
    after = held(key_after, jnp.asarray(values, start.dtype))
    return Matched(
        dataclasses.replace(model, prior=tuned.rebuild(values)),
        _estimate(before, kind),
        _estimate(after, kind),
        np.asarray(info.distance, np.float64),
        tuned.names,
        tuned.read(np.zeros(len(values))),
        tuned.read(values),
        path,
    )


def distance(key: KeyLike, model: Any, target: Any, x: Any, kind: str = "wasserstein", num_samples: int = 8000) -> Distance:
    """How far the prior functions of any model are from the target's at the rows of x, as `match` measures it.

    Both distances are zero in expectation when the distributions agree, whatever the number of draws. Twenty independent blocks of
    num_samples/20 draws are compared, and their scatter is the error.
    """
    check_whole(num_samples=num_samples)
    x = check_arrays(x, "x")
    model = prepared(model, x)
    goal = _goal(target, x, model)
    inputs = jax.tree.map(jnp.asarray, x)
    widths = _widths(goal.draw, kind)(inputs, goal.root)
    measured = _measure(model, None, goal.draw, kind)(
        as_key(key), jnp.zeros(0), inputs, goal.root, widths, max(4, num_samples // NUM_BLOCKS)
    )
    return _estimate(measured, kind)


def sliced(a: Array, b: Array, directions: Array) -> Array:
    """Squared sliced Wasserstein distance between rows of a and b (S, d), without the bias of finite samples.

    W₂² on a line is the L² distance of quantile functions. With both sets cut in halves, ½W(a₁,b₁) + ½W(a₂,b₂) − ½W(a₁,a₂) − ½W(b₁,b₂) is
    an unbiased estimate of the squared distance between expected sample quantiles, averaged over `directions` (L, d) of unit length.
    """
    a1, a2, b1, b2 = (jnp.sort(half @ directions.T, axis=0) for set_ in (a, b) for half in _halves(set_))
    w = lambda u, v: 0.5 * jnp.mean((u - v) ** 2)
    return w(a1, b1) + w(a2, b2) - w(a1, a2) - w(b1, b2)


def mmd(a: Array, b: Array, widths: Array) -> Array:
    """Squared maximum mean discrepancy, unbiased: E k(a,a′) + E k(b,b′) − 2 E k(a,b) over different rows of a and b (S, d), with
    k(u, v) = mean over h² in widths of exp(−‖u − v‖²/(2h²))."""

    def kernel(u: Array, v: Array) -> Array:
        squares = jnp.sum(u**2, axis=1)[:, None] + jnp.sum(v**2, axis=1)[None] - 2.0 * u @ v.T
        squares = jnp.maximum(squares, 0.0)
        return jnp.mean(jnp.exp(-0.5 * squares[..., None] / widths), axis=-1)

    def among(u: Array) -> Array:
        k = kernel(u, u)
        return (jnp.sum(k) - jnp.trace(k)) / (len(u) * (len(u) - 1))

    return among(a) + among(b) - 2.0 * jnp.mean(kernel(a, b))


class _Goal(NamedTuple):
    """draw(key, x, root) → one function of the target, (n, outputs). root (n, r): of its covariance, empty where it has none."""

    draw: Callable
    root: Array


def _goal(target: Any, x: Tree, model: Any) -> _Goal:
    own = jax.eval_shape(_own(model), jnp.zeros(0), jax.random.key(0), x)
    if len(own.shape) != 2:
        raise ModelError(message("Functions of this model cannot be compared.", f"outputs {own.shape}", "(n, outputs)", "flatten outputs"))
    if hasattr(target, "sample_prior"):
        return _Goal(_checked(_from_model(prepared(target, x)), x, own.shape), jnp.zeros((own.shape[0], 0)))
    arguments = inspect.signature(target).parameters.values() if callable(target) else ()
    needed = [p for p in arguments if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) == 1:
        return _Goal(_checked(_from_sampler(target), x, own.shape), jnp.zeros((own.shape[0], 0)))
    if len(needed) == 2:
        return _Goal(_from_kernel(own.shape[1]), _root(target, x))
    expected = "k(x, x′) with two arguments, key → function with one, or a model"
    raise ModelError(message("This is no target.", repr(target), expected, "pass e.g. elicit.rbf(1.0)"))


def _checked(draw: Callable, x: Tree, shape: tuple[int, ...]) -> Callable:
    got = jax.eval_shape(draw, jax.random.key(0), x, None).shape
    if got != shape:
        raise ModelError(message("The target does not fit the model.", f"functions of shape {got}", f"{shape}", "draw at the rows of x"))
    return draw


def _root(kernel: Callable, x: Tree) -> Array:
    """R with RRᵀ = k(x, x), from eigenvalues: smooth kernels are singular to working precision."""
    rows = _tree.rows(x)
    with jax.enable_x64(True):
        points = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), x)
        covariance = np.asarray(kernel(points, points), np.float64)
    if covariance.shape != (rows, rows) or not np.all(np.isfinite(covariance)):
        raise ModelError(message("The kernel does not fit x.", f"shape {covariance.shape}", f"finite ({rows}, {rows})", "check k(x, x′)"))
    values, vectors = np.linalg.eigh(0.5 * (covariance + covariance.T))
    if np.abs(covariance - covariance.T).max() > NEGATIVE * np.abs(values).max() or values[0] < -NEGATIVE * values[-1] or values[-1] <= 0:
        got = f"eigenvalues {values[0]:.3g} … {values[-1]:.3g}, asymmetry {np.abs(covariance - covariance.T).max():.2g}"
        raise ModelError(message("This is no covariance function.", got, "symmetric and positive semi-definite", "check k(x, x′)"))
    return jnp.asarray(vectors * np.sqrt(np.maximum(values, 0.0)), jnp.result_type(float))


@cached
def _from_kernel(outputs: int) -> Callable:
    """Outputs are independent."""
    return lambda key, x, root: root @ jax.random.normal(key, (root.shape[1], outputs), root.dtype)


@cached
def _from_sampler(sampler: Callable) -> Callable:
    def draw(key: Key, x: Tree, root: Any) -> Array:
        drawn = jnp.asarray(sampler(key))
        return drawn[:, None] if drawn.ndim == 1 else drawn

    return draw


@cached
def _from_model(model: Any) -> Callable:
    return lambda key, x, root: _own(model)(jnp.zeros(0), key, x)


def _dials(model: Any, per: str) -> Dials:
    if not isinstance(model, Supervised):
        raise ModelError(
            message(
                f"The prior of a {type(model).__name__} cannot be tuned here.",
                "a model without scales over weights",
                "al.BNN, al.LinearModel",
                "measure it with elicit.distance, and change it by hand",
            )
        )
    template = jax.eval_shape(model.init_weights, jax.random.key(0))
    return dials(model.prior, template, model.fan_in(template), per)


def _own(model: Any, tuned: Dials | None = None) -> Callable[[Array, Key, Tree], Array]:
    """(values, key, x) → one function of the model's prior, (n, outputs): under turned dials, or as it is."""

    def draw(values: Array, key: Key, x: Tree) -> Array:
        key_weights, key_extra, key_network = jax.random.split(key, 3)
        noise = key_network if model.stochastic else None
        if tuned is None:
            outputs = model.outputs(model.sample_prior(key_weights), x, noise)
            if not hasattr(outputs, "ndim"):  # a program's outputs are distributions of y
                outputs = model.likelihood.mean(outputs, {})
            return outputs
        extra = model.extra({"likelihood": model.likelihood.sample_extra(key_extra, model.targets())})
        return model.apply(model.rescale(tuned.weights(values, key_weights), extra), x, noise)

    return draw


def _compare(model: Any, per: str | None, goal: Callable, kind: str) -> Callable:
    """(key, values, x, root, widths, S) → one estimate of the squared distance from S functions of either kind."""
    if kind not in KINDS:
        raise MethodError(message("Unknown distance.", repr(kind), f"one of {KINDS}", "leave kind='wasserstein'"))
    own = _own(model, None if per is None else _dials(model, per))

    def compare(key: Key, values: Array, x: Tree, root: Array, widths: Array, number: int) -> Array:
        key_own, key_goal, key_directions = jax.random.split(noise_key(key), 3)
        a = jax.vmap(lambda k: own(values, k, x))(jax.random.split(key_own, number))
        b = jax.vmap(lambda k: goal(k, x, root))(jax.random.split(key_goal, number)).astype(a.dtype)
        a, b = a.reshape(number, -1), b.reshape(number, -1)
        if kind == "mmd":
            return mmd(a, b, widths)
        directions = jax.random.normal(key_directions, (NUM_DIRECTIONS, a.shape[1]), a.dtype)
        return sliced(a, b, directions / jnp.linalg.norm(directions, axis=1, keepdims=True))

    return compare


@cached
def _widths(goal: Callable, kind: str) -> Callable:
    """Squared widths of the kernels, from functions of the target alone: the same for every prior that is measured."""

    def widths(x: Tree, root: Array) -> Array:
        # Always the same draws: a distance is comparable with another only under the same kernel.
        drawn = jax.vmap(lambda k: goal(k, x, root))(jax.random.split(jax.random.key(0), 2 * NUM_PAIRS)).reshape(2, NUM_PAIRS, -1)
        return jnp.median(jnp.sum((drawn[0] - drawn[1]) ** 2, axis=1)) * jnp.asarray(WIDTHS, drawn.dtype)

    return jax.jit(widths) if kind == "mmd" else lambda x, root: jnp.ones(1)


@cached
def _measure(model: Any, per: str | None, goal: Callable, kind: str) -> Callable:
    """NUM_BLOCKS independent estimates."""
    compare = _compare(model, per, goal, kind)

    def measure(key: Key, values: Array, x: Tree, root: Array, widths: Array, number: int) -> Array:
        return jax.lax.map(lambda k: compare(k, values, x, root, widths, number), jax.random.split(key, NUM_BLOCKS))

    return jax.jit(measure, static_argnums=5)


@cached
def _tuner(model: Any, per: str, goal: Callable, kind: str, num_steps: int, batch_size: int, learning_rate: float) -> Callable:
    """(key, values, x, root, widths) → Info with leaves (num_steps, …), in one compiled loop."""
    import optax

    compare = _compare(model, per, goal, kind)
    optimiser = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps), b2=MEMORY)

    def tune(key: Key, values: Array, x: Tree, root: Array, widths: Array) -> Info:
        def step(state: State, step_key: Key) -> tuple[State, Info]:
            loss = lambda v: compare(step_key, v, x, root, widths, batch_size)
            value, gradient = jax.value_and_grad(loss)(state.values)
            updates, memory = optimiser.update(gradient, state.optimiser)
            moved = optax.apply_updates(state.values, updates)
            return State(moved, memory), Info(value, moved)

        return jax.lax.scan(step, State(values, optimiser.init(values)), jax.random.split(key, num_steps))[1]

    return jax.jit(tune)


def _halves(values: Array) -> tuple[Array, Array]:
    middle = len(values) // 2
    return values[:middle], values[middle : 2 * middle]


def _estimate(blocks: Any, kind: str) -> Distance:
    blocks = np.asarray(blocks, np.float64)
    return Distance(float(blocks.mean()), float(blocks.std(ddof=1) / np.sqrt(len(blocks))), kind)
