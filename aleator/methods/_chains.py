"""What Markov chain methods share: flat positions, a warm-up and a sampling phase, kept draws, and a verdict on them.

A sampler gives a `Kernel` for one target; everything else is here. Positions are flat vectors (D,), so that a transition is a handful of
fused operations whatever the network looks like.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, convergence
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Method, check_positive
from aleator.posterior import Draws, Posterior

REFERENCE_ROWS = 16  # rows of the data, and as many points beyond them, at which functions are compared
PRECISIONS = ("auto", "float32", "float64")
STORAGE = ("auto", "float16", "float32", "float64")


class Density(NamedTuple):
    """The log density of a flat position and its gradient, with the data bound. value(q) → scalar; value_and_grad(q) → (scalar, (D,));
    parts(q) → (log prior, log likelihood); functions(q) → (F,): outputs of the model at reference inputs, none where there is no model.
    batch: the data themselves, None where there are none and while only shapes are asked for."""

    value: Callable[[Array], Array]
    value_and_grad: Callable[[Array], tuple[Array, Array]]
    parts: Callable[[Array], tuple[Array, Array]]
    functions: Callable[[Array], Array]
    batch: Batch | None = None


class Stats(NamedTuple):
    """Of one transition. log_density: at the new position, nats. acceptance: probability of the proposal. energy: −log joint of position
    and momentum, 0 for samplers without one. evaluations: of the log density or its gradient. depth: of the tree, 0 elsewhere.
    diverging: the integrator left its level set. outside, undefined: evaluations at −∞ and at NaN."""

    log_density: Array
    acceptance: Array
    energy: Array
    evaluations: Array
    depth: Array
    diverging: Array
    outside: Array
    undefined: Array


class Kernel(NamedTuple):
    """A sampler made concrete for positions (D,).

    init(key, position, density) → state, which has a `position`. step(key, state, density) → (state, Stats).
    adapt(state, stats, number) → state: after warm-up step `number` = 0, 1, … (traced). settle(state) → state: when warm-up ends.
    """

    init: Callable[[Key, Array, Density], Any]
    step: Callable[[Key, Any, Density], tuple[Any, Stats]]
    adapt: Callable[[Any, Stats, Array], Any] = lambda state, stats, number: state
    settle: Callable[[Any], Any] = lambda state: state


class State(NamedTuple):
    """position (D,). kernel: the sampler's own state. stats: of the last transition. functions (F,): at the reference inputs. number: of the step, negative
    until warm-up is over."""

    position: Array
    kernel: Any
    stats: Stats
    functions: Array
    number: Array


def stats(log_density: Array, acceptance: Any = 1.0, evaluations: Any = 1, **given: Any) -> Stats:
    """Stats with the usual defaults, in the dtypes that a compiled loop needs."""
    real, flag, whole = jnp.asarray(log_density).dtype, jnp.bool_, jnp.int32
    kinds = {"energy": real, "depth": whole, "diverging": flag, "outside": whole, "undefined": whole}
    rest = {name: jnp.asarray(given.pop(name, 0), kind) for name, kind in kinds.items()}
    assert not given, given
    return Stats(log_density=log_density, acceptance=jnp.asarray(acceptance, real), evaluations=jnp.asarray(evaluations, whole), **rest)


def count_bad(log_density: Array) -> dict[str, Array]:
    """{"outside", "undefined"}: how many of these log densities are −∞ and NaN (or +∞)."""
    finite = jnp.isfinite(log_density)
    below = jnp.isneginf(log_density)
    return {"outside": jnp.sum(below).astype(jnp.int32), "undefined": jnp.sum(~finite & ~below).astype(jnp.int32)}


def safe(log_density: Array) -> Array:
    """NaN and +∞ count as −∞: such a point is never accepted."""
    return jnp.where(jnp.isfinite(log_density), log_density, -jnp.inf)


class ChainMethod(Method):
    """What all Markov chain methods are asked. num_samples draws are kept per chain, one in every `thin` steps, in the precision `storage`
    ("auto": that of the run; "float16" halves the memory).

    precision: "auto" runs networks in float32 and bare densities and programs in float64; or "float32", "float64".
    """

    num_samples: int
    num_warmup: int
    num_chains: int
    thin: int
    storage: str
    precision: str
    driver: ClassVar[str] = "loop"  # a transition is a loop itself: nothing is gained outside another
    uneven: ClassVar[bool] = True  # chains do different amounts of work per step: on CPU they run side by side, not stacked
    minimum_warmup: ClassVar[int] = 0

    def check(self) -> None:
        check_positive(self, "num_samples", "num_chains", "thin", whole=True)
        if isinstance(self.num_warmup, bool) or not isinstance(self.num_warmup, int) or self.num_warmup < self.minimum_warmup:
            expected = f"a whole number ≥ {self.minimum_warmup}"
            raise MethodError(
                message(f"{type(self).__name__}.num_warmup cannot be used.", repr(self.num_warmup), expected, "pass e.g. num_warmup=1000")
            )
        check_precision(self)
        if self.storage not in STORAGE:
            raise MethodError(message("Unknown storage.", repr(self.storage), f"one of {STORAGE}", "choose one of them"))

    def departures(self) -> list[str]:
        """Everything by which the draws differ from those of the posterior, by name."""
        return []

    def kept(self, position: Array, functions: Array, now: Stats, number: Array) -> tuple[dict[str, Any], Array]:
        """What a step leaves, and whether it is wanted: not during warm-up, and one in every `thin` after it."""
        position = position if self.storage == "auto" else position.astype(self.storage)
        return {"position": position, "functions": functions, "stats": now}, (number > 0) & (number % self.thin == 0)

    def phases(self, step: Callable, batches: str | None, start: Callable | None = None) -> tuple[Phase, ...]:
        """One step for warm-up and sampling: the state knows where the first ends, and the second costs no second compilation."""
        before = [] if start is None else [Phase("start", start, 1, batches, brief=True)]
        warm = [Phase("warm-up", step, self.num_warmup, batches)] if self.num_warmup else []
        return (*before, *warm, Phase("sampling", step, self.num_samples * self.thin, batches))


class Sampler(ChainMethod):
    """Base of the samplers that move one flat position at a time: a subclass gives the kernel."""

    @abc.abstractmethod
    def kernel(self, target: Any, layout: Layout) -> Kernel:
        """The transition for one target; raises MethodError where the sampler does not apply."""

    def build(self, target: Any) -> Algorithm:
        x64, layout = prepare(self, target)
        with jax.enable_x64(x64 or jax.config.read("jax_enable_x64")):
            kernel = self.kernel(target, layout)
        batches = None if target.model is None else "full"

        def init(key: Key, params: Tree) -> State:
            """Shapes only: the density needs the data, which the first phase brings."""
            position = layout.ravel(params)
            blank = jax.eval_shape(lambda q: kernel.init(jax.random.key(0), q, _nowhere(layout)), position)
            blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank)
            functions = jnp.zeros(layout.num_functions, position.dtype)
            number = jnp.asarray(-self.num_warmup, jnp.int32)
            return State(position, blank, stats(jnp.zeros((), position.dtype)), functions, number)

        def start(key: Key, state: State, batch: Batch | None) -> tuple[State, Stats]:
            density = bind(target, layout, batch)
            inner = kernel.init(key, state.position, density)
            now = stats(density.value(inner.position))
            return state._replace(position=inner.position, kernel=inner, stats=now), now

        def step(key: Key, state: State, batch: Batch | None) -> tuple[State, Stats]:
            density = bind(target, layout, batch)
            inner, now = kernel.step(key, state.kernel, density)
            number = state.number + 1
            if self.num_warmup:
                adapt = lambda: kernel.adapt(inner, now, state.number + self.num_warmup)
                inner = jax.lax.cond(state.number < 0, adapt, lambda: inner)
                inner = jax.lax.cond(number == 0, lambda: kernel.settle(inner), lambda: inner)
            return State(inner.position, inner, now, density.functions(inner.position), number), now

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            return Draws(layout.unravel_all(kept["position"]), num_chains=self.num_chains)

        return Algorithm(
            init=init,
            phases=self.phases(step, batches, start),
            position=lambda state: layout.unravel(state.position),
            finish=finish,
            keep=lambda state, info: self.kept(state.position, state.functions, state.stats, state.number),
            members=self.num_chains,
            apart=self.uneven,
            driver=self.driver,
            watch="log_density",
            verdict=lambda result: convergence.verdict(result, self, layout.names, target.model is not None),
            x64=x64,
            notes={"departures": self.departures() + tempered(target)},
        )


def prepare(method: Any, target: Any) -> tuple[bool, Layout]:
    """Whether a method with a `precision` runs in double precision on this target, and the layout of positions in it."""
    check_target(method, target)
    x64 = method.precision == "float64" or (method.precision == "auto" and doubles(target))
    with jax.enable_x64(x64 or jax.config.read("jax_enable_x64")):
        return x64, flat_layout(target)


def check_precision(method: Any) -> None:
    if method.precision not in PRECISIONS:
        raise MethodError(message("Unknown precision.", repr(method.precision), f"one of {PRECISIONS}", "choose one of them"))


def tempered(target: Any) -> list[str]:
    """The temperature as a departure from Bayes, where it is one."""
    return [f"temperature {target.temperature}"] if target.temperature != 1.0 else []


def constant(temperature: float) -> str:
    """What the normalising constant of the density is called."""
    return "log evidence" if temperature == 1.0 else f"log normalising constant at temperature {temperature:g}"


class Layout(NamedTuple):
    """Between parameter trees and flat vectors. names: of the coordinates, "path[index]". num_functions: length F of `functions`, 0 where
    there is no model whose rows stand alone."""

    ravel: Callable[[Tree], Array]
    unravel: Callable[[Array], Tree]
    unravel_all: Callable[[np.ndarray], Tree]
    num_functions: int
    names: list[str]


def flat_layout(target: Any) -> Layout:
    """The layout of a target's parameters, all real numbers."""
    template = jax.eval_shape(target.init, jax.random.key(0))
    leaves, structure = jax.tree.flatten(template)
    sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
    bounds = np.cumsum([0, *sizes])
    parts = list(zip(bounds[:-1], bounds[1:], leaves, strict=True))
    paths = _tree.paths(template)
    names = [
        f"{p}[{','.join(map(str, i))}]" if leaf.shape else p for p, leaf in zip(paths, leaves, strict=True) for i in np.ndindex(leaf.shape)
    ]
    return Layout(
        ravel=lambda tree: _tree.flat(tree).astype(jnp.result_type(float)),
        unravel=lambda q: jax.tree.unflatten(structure, [q[a:b].reshape(leaf.shape) for a, b, leaf in parts]),
        unravel_all=lambda draws: jax.tree.unflatten(
            structure, [draws[..., a:b].reshape(int(np.prod(draws.shape[:-1])), *leaf.shape) for a, b, leaf in parts]
        ),
        num_functions=num_functions(target),
        names=names,
    )


def bind(target: Any, layout: Layout, batch: Batch | None) -> Density:
    """The target's density on flat positions, for one batch (all the data)."""
    value = lambda q: target.log_joint(layout.unravel(q), batch)
    functions = lambda q: jnp.zeros(0, q.dtype)
    if getattr(target.model, "num_invariants", 0):
        functions = lambda q: target.model.invariants(layout.unravel(q), batch).astype(q.dtype)
    elif layout.num_functions:
        rows = reference(batch.x)  # type: ignore[union-attr]
        functions = lambda q: _flat(target.outputs(layout.unravel(q), rows)).astype(q.dtype)
    return Density(value, jax.value_and_grad(value), lambda q: target.parts(layout.unravel(q), batch), functions, batch)


def reference(x: Tree) -> Tree:
    """Rows at which functions are compared: some of the data, and as many points beyond them, 2x − x̄."""

    def pick(leaf: Array) -> Array:
        some = leaf[np.linspace(0, leaf.shape[0] - 1, min(REFERENCE_ROWS, leaf.shape[0])).astype(int)]
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.concatenate([some, some])
        return jnp.concatenate([some, 2.0 * some - jnp.mean(leaf, axis=0)])

    return jax.tree.map(pick, x)


def check_target(method: Any, target: Any) -> None:
    """Chains need all the data at every step and the same density at every evaluation."""
    if target.stochastic:
        raise MethodError(
            message(
                f"{type(method).__name__} needs a density that does not change between evaluations.",
                "a network with randomness of its own",
                "a deterministic network",
                "switch its dropout layers off, or use al.Dropout(existing=True)",
            )
        )


def doubles(target: Any) -> bool:
    """Whether the target is a bare density or a model that asks for it, and can be traced in double precision: NumPy arrays that a function has met in
    single precision may stay there (a cache of JAX's), which then does not mix."""
    if target.model is not None:
        return getattr(target.model, "double", False)
    try:
        with jax.enable_x64(True):
            params = jax.eval_shape(target.init, jax.random.key(0))
            jax.eval_shape(jax.value_and_grad(lambda p: target.log_joint(p, None)), params)
    except TypeError:
        return False
    return True


def _flat(outputs: Tree) -> Array:
    leaves = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)]
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


def num_functions(target: Any) -> int:
    if getattr(target.model, "num_invariants", 0):
        return target.model.num_invariants
    rows = None if target.model is None or not target.model.minibatch else target.rows(2 * min(REFERENCE_ROWS, target.num_data))
    if rows is None:
        return 0
    params = jax.eval_shape(target.init, jax.random.key(0))
    try:
        return int(jax.eval_shape(lambda p, x: _flat(target.outputs(p, x)), params, rows).shape[0])
    except (TypeError, ValueError):  # a program whose plate has one size only
        return 0


def _nowhere(layout: Layout) -> Density:
    """A density that only has the right shapes."""
    functions = lambda q: jnp.zeros(layout.num_functions, q.dtype)
    return Density(jnp.sum, lambda q: (jnp.sum(q), q), lambda q: (jnp.sum(q), jnp.sum(q)), functions)
