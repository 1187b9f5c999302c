"""What samplers with stochastic gradients share: batches, estimates of the gradient and of its noise, the step size, kept draws.

U(θ) = −log joint. Every sampler is written for one pair of numbers: a step size h, so that one step moves θ by −(h/2)∇U, and the share of
momentum lost per step. A sampler gives its `Dynamics`; everything else is here. Parameters travel packed (`_optimise.packing`).
"""

from __future__ import annotations

import abc
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, convergence
from aleator._errors import MethodError, message, nearest
from aleator._feed import Rows, batch_at
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _chains, _kfac, _optimise
from aleator.methods import map as map_file
from aleator.methods._method import Method, check_positive
from aleator.methods.cyclical import Cyclical, Timetable, timetable
from aleator.posterior import Draws, Posterior

LOOK_EVERY = 20  # steps between looks at the noise of the gradient, the metric and the temperatures
MEMORY = 0.01  # weight of the newest look in a running mean, once it has seen so many that this is more than its share
FULL_ROWS = 4096  # rows at once while a gradient over all of them is taken
CURVATURE_ROWS = 1024  # rows whose Hessian sets the step size
POWER_STEPS = 30  # of the power iteration for its largest eigenvalue
RMS_FLOOR = 1e-2  # smallest root mean square of a gradient the metric divides by, relative to their mean
HALF_FULL = 0.5  # share of the injected noise that the gradient's may make up at an automatic step size
KFAC_ROWS = 256  # rows behind one look at Kronecker factors
KFAC_EVERY = 100  # steps of warm-up between them
LEVEL_BATCHES = 8  # that this is estimated from
HOT = 0.1  # deviation of a temperature from one that is worth a word, where it is also five standard errors
SAMPLING = ("independent", "shuffled", "stratified")
CONTROL = (None, "mode", "svrg")
PRECONDITIONERS = (None, "rmsprop", "kfac")


class Dynamics(NamedTuple):
    """One sampler on a packed tree. init(params) → inner state.

    move(key, params, inner, gradient, size, excess, heat) → (params, inner). size: h·G of each leaf. excess: ¼(hG)²V of each leaf, the
    variance that the noise of the gradient adds to a step by itself, to be taken off the injected one. heat: 1 where noise is injected.
    kinetic(inner, size) → temperature of the momenta, or None without momenta.
    """

    init: Callable[[Tree], Any]
    move: Callable[..., tuple[Tree, Any]]
    kinetic: Callable[[Any, Tree], Array] | None = None


class Anchor(NamedTuple):
    """params: the point θ̂ around which gradients are taken. total: −Σ ∇log p(yᵢ|xᵢ,θ̂)/temperature over all rows. Both packed."""

    params: Tree
    total: Tree


class Watch(NamedTuple):
    """Over the looks at sampling steps, scalars: how many, mean of the configurational temperature (θ − c)·∇U/D and of its square, mean of
    the kinetic temperature and of its square, mean share of the injected noise that the gradient's noise makes up."""

    count: Array
    virial: Array
    virial_square: Array
    kinetic: Array
    kinetic_square: Array
    noise: Array


class State(NamedTuple):
    """params, inner: position and what the dynamics carry. search: optimiser of the search for a start, or (). anchor: an Anchor, or ().
    spread: V, the variance of each gradient entry, or (). metric: G, or a _kfac.Metric, or (). square: the running mean of squared gradients
    behind a diagonal G.
    centre: c of the configurational temperature. size: h. rows: inputs at which functions are compared, or (). number: of the step,
    negative until warm-up is over. looks: how many there have been. now: Info of the last step."""

    params: Tree
    inner: Any
    search: Any
    anchor: Any
    spread: Any
    metric: Any
    square: Any
    centre: Tree
    watch: Watch
    size: Array
    rows: Any
    number: Array
    looks: Array
    now: Info


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θ) before the step, an estimate from its batch. step_size: h of this step."""

    log_likelihood: Array
    step_size: Array


class StochasticMethod(Method):
    """Base of the samplers with stochastic gradients. A subclass gives its dynamics; the fields are described in `al.SGLD`."""

    step_size: Any
    num_samples: int
    num_warmup: int
    num_chains: int
    thin: int
    batch_size: int | None
    preconditioner: str | None
    schedule: str
    cycles: Any
    control_variates: str | None
    sampling: str
    correct_noise: bool
    bias: float
    num_search: int
    search_rate: float
    storage: str
    precision: str
    bias_factor: ClassVar[float] = 1.0  # what the largest step of SGLD is multiplied with
    room: ClassVar[float] = 1.0  # variance that a step injects, in units of h

    @abc.abstractmethod
    def dynamics(self) -> Dynamics:
        """The moves of this sampler."""

    def largest_step(self, curvature: Array) -> Array:
        """h at which the variance in the stiffest direction, where U has this curvature, is off by the share `bias`: for SGLD and
        variance λ = 1/curvature that is h/4λ/(1 − h/4λ)."""
        return 4.0 * self.bias / (1.0 + self.bias) * self.bias_factor / curvature

    def check(self) -> None:
        name = type(self).__name__
        check_positive(self, "num_samples", "num_chains", "thin", "batch_size", whole=True)
        check_positive(self, "bias", "search_rate")
        if self.step_size != "auto":
            check_positive(self, "step_size")
        for field in ("num_warmup", "num_search"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise MethodError(message(f"{name}.{field} cannot be used.", repr(value), "a whole number ≥ 0", f"pass e.g. {field}=1000"))
        choices = {"sampling": SAMPLING, "control_variates": CONTROL, "preconditioner": PRECONDITIONERS, "storage": _chains.STORAGE}
        for field, allowed in choices.items():
            value = getattr(self, field)
            if value not in allowed:
                near = nearest(str(value), [choice for choice in allowed if choice])
                raise MethodError(message(f"Unknown {field}.", repr(value) + near, f"one of {allowed}", "choose one of them"))
        _chains.check_precision(self)
        if self.cycles is not None and not isinstance(self.cycles, Cyclical):
            object.__setattr__(self, "cycles", Cyclical(self.cycles))
        if self.preconditioner and (self.step_size == "auto" or not self.num_warmup):
            got = f"step_size={self.step_size!r}, num_warmup={self.num_warmup}"
            expected = "a number for step_size, and a warm-up to learn the preconditioner in"
            raise MethodError(message("The preconditioner cannot be learned.", got, expected, "pass e.g. step_size=1e-4, num_warmup=1000"))
        if self.control_variates and (self.sampling == "shuffled" or self.batch_size is None):
            got = f"sampling={self.sampling!r}, batch_size={self.batch_size}"
            expected = "independent or stratified mini-batches of data in memory"
            raise MethodError(message("Control variates do not apply.", got, expected, "pass sampling='independent' and a batch_size"))
        self.timetable()

    def timetable(self) -> Timetable:
        return timetable(self.num_samples, self.thin, self.schedule, self.cycles)

    def departures(self, noisy: bool) -> list[str]:
        """Everything by which the draws differ from those of the posterior, by name. noisy: gradients come from mini-batches."""
        found = ["no Metropolis test: the step size leaves a bias"]
        if noisy and not self.corrects():
            found.append("the noise of mini-batch gradients heats the chain and is not corrected for")
        if self.cycles is not None and self.cycles.explore:
            found.append("cycles explore without noise")
        return found

    def corrects(self) -> bool:
        """Only independent batches have noise that is white: that of shuffled epochs cancels within each of them."""
        return self.correct_noise and self.sampling == "independent" and self.batch_size is not None and self.batch_size > 1

    def build(self, target: Any) -> Algorithm:
        return _build(self, target)


def _build(method: StochasticMethod, target: Any) -> Algorithm:
    x64, layout = _chains.prepare(method, target)
    _check_data(method, target)
    with jax.enable_x64(x64 or jax.config.read("jax_enable_x64")):
        template = jax.eval_shape(target.init, jax.random.key(0))
    packing, table, dynamics = _optimise.packing(template), method.timetable(), method.dynamics()
    feed = None if target.model is None else "random" if method.sampling == "shuffled" and method.batch_size is not None else "full"
    drawn = feed == "full" and method.batch_size is not None and method.batch_size < target.num_data
    size = _tree.size(template)
    # Draws of their own batches need nothing from outside between two kept ones: one step of the driver makes `thin` of ours, and
    # parameters are written to its buffers once.
    stride = method.thin if feed != "random" else 1
    warmup = -(-method.num_warmup // stride)
    noisy = target.model is not None and method.batch_size is not None and method.batch_size > 1
    plan = _kfac.layout(target) if method.preconditioner == "kfac" else None
    optimizer = _search(method) if method.num_search else None
    chosen = target.rows(2 * min(_chains.REFERENCE_ROWS, max(target.num_data, 1))) if layout.num_functions else ()

    def init(key: Key, start: Tree) -> State:
        params = packing.pack(start)
        real = jax.tree.leaves(params)[0].dtype
        zeros, none = jax.tree.map(jnp.zeros_like, params), jnp.zeros((), real)
        fixed = method.step_size if method.step_size != "auto" else 0.0
        return State(
            params=params,
            inner=dynamics.init(params),
            search=optimizer.init(params) if optimizer else (),
            anchor=Anchor(params, zeros) if method.control_variates else (),
            spread=zeros if noisy else (),
            metric=_kfac.init(start, plan) if plan else jax.tree.map(jnp.ones_like, params) if method.preconditioner else (),
            square=zeros if method.preconditioner == "rmsprop" else (),
            centre=params,
            watch=Watch(*(none for _ in Watch._fields)),
            size=jnp.asarray(fixed, real),
            rows=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), chosen),
            number=jnp.asarray(-warmup * stride, jnp.int32),
            looks=jnp.zeros((), jnp.int32),
            now=Info(none, none),
        )

    def search(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
        inner = map_file.State(state.params, state.search, ())
        moved, info = map_file.step(key, inner, batch, target, optimizer, packing, 0.0)
        return state._replace(params=moved.params, search=moved.optimizer), Info(info.log_likelihood, state.size)

    def start(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
        """Everything that is set once, where the chain begins: reference rows, the anchor, the step size."""
        key_size, key_look = jax.random.split(key)
        if chosen != ():
            rows = jax.tree.map(lambda leaf, like: jnp.resize(leaf, like.shape), _chains.reference(batch.x), state.rows)  # type: ignore[union-attr]
            state = state._replace(rows=rows)
        if method.control_variates:
            state = state._replace(anchor=Anchor(state.params, full_gradient(state.params, batch, target, packing)))
        if method.step_size == "auto":
            key_rows, key_noise = jax.random.split(key_size)
            some = draw(key_rows, batch, CURVATURE_ROWS, "independent") if drawn and target.num_data > CURVATURE_ROWS else batch
            largest = method.largest_step(curvature(state.params, some, target, packing))
            if noisy:
                largest = jnp.minimum(largest, 4.0 * HALF_FULL * method.room / (level(key_noise, state, batch) + 1e-30))
            state = state._replace(size=largest.astype(state.size.dtype))
        if plan:
            key_look, key_factors = jax.random.split(key_look)
            state = factors(key_factors, state, batch)
        # Looked at before the first move, so that a start that does not work is told from a step that explodes.
        rows = draw(key_look, batch, method.batch_size, "independent") if drawn else batch
        value = target.parts(packing.unpack(state.params), rows)[1].astype(state.size.dtype)
        return state._replace(centre=state.params), Info(value, state.size)

    def factors(key: Key, state: State, data: Any) -> State:
        """A look at the Kronecker factors. In new coordinates V is estimated from the beginning."""
        rows = draw(key, data, KFAC_ROWS, "independent") if drawn and target.num_data > KFAC_ROWS else data
        metric = _kfac.refresh(state.metric, packing.unpack(state.params), rows, target, plan)  # type: ignore[arg-type]
        return state._replace(metric=metric, looks=jnp.zeros_like(state.looks))

    def turned(state: State) -> Callable[[Tree], Tree]:
        """G^{½} on packed trees, where the sampler moves in coordinates of its own."""
        return (lambda tree: packing.pack(_kfac.shape(state.metric, packing.unpack(tree), plan))) if plan else (lambda tree: tree)

    def level(key: Key, state: State, data: Any) -> Array:
        """The mean of V over all entries, from a few batches."""

        def one(k: Key) -> Array:
            batch = draw(k, data, method.batch_size, method.sampling) if drawn else data
            gradient = estimate(state.params, batch, state.anchor, target, packing)[1]
            found, _ = halves(state.params, gradient, batch, state.anchor, target, packing, method.sampling == "shuffled")
            return _tree.sum_leaves(found) / size

        return jnp.mean(jax.lax.map(one, jax.random.split(key, LEVEL_BATCHES)))

    def step(key: Key, state: State, data: Batch | None) -> tuple[State, Info]:
        """One step: a batch, its gradient, the move; every few steps a look at the noise."""
        key_rows, key_noise = jax.random.split(key)
        number = state.number + 1
        if plan:
            key_rows, key_factors = jax.random.split(key_rows)
            due = (number % KFAC_EVERY == 0) & (number <= 0)
            before = state
            state = jax.lax.cond(due, lambda: factors(key_factors, before, data), lambda: before)
        batch = draw(key_rows, data, method.batch_size, method.sampling) if drawn else data
        if method.control_variates == "svrg":
            every = -(-target.num_data // method.batch_size)  # type: ignore[operator]
            fresh = lambda: Anchor(state.params, full_gradient(state.params, data, target, packing))
            state = state._replace(anchor=jax.lax.cond(number % every == 0, fresh, lambda: state.anchor))
        data_term, gradient = estimate(state.params, batch, state.anchor, target, packing)
        now = state.size * table.factor(number)
        metric = state.metric if method.preconditioner == "rmsprop" else jax.tree.map(lambda _: 1.0, state.params)
        scale = jax.tree.map(lambda g: now * g, metric)
        spread = state.spread if noisy and method.corrects() else jax.tree.map(lambda _: 0.0, state.params)
        excess = jax.tree.map(lambda s, v: 0.25 * s**2 * v, scale, spread)
        turn, origin = turned(state), jax.tree.map(jnp.zeros_like, state.params) if plan else state.params
        params, inner = dynamics.move(key_noise, origin, state.inner, turn(gradient), scale, excess, table.heat(number))
        params = jax.tree.map(jnp.add, state.params, turn(params)) if plan else params
        seen = state._replace(params=params, inner=inner, number=number, now=Info(data_term.astype(now.dtype), now))

        def look() -> tuple[Any, ...]:
            return observe(state, number, gradient, batch, scale, dynamics, target, packing, method.sampling == "shuffled", turn)

        same = (state.spread, state.metric, state.square, state.centre, state.watch, state.looks)
        parts = jax.lax.cond(number % LOOK_EVERY == 0, look, lambda: same)
        seen = seen._replace(**dict(zip(("spread", "metric", "square", "centre", "watch", "looks"), parts, strict=True)))
        return seen, seen.now

    def several(key: Key, state: State, data: Batch | None) -> tuple[State, Info]:
        one = lambda i, carry: step(jax.random.fold_in(key, i), carry, data)[0]
        state = jax.lax.fori_loop(0, stride, one, state) if stride > 1 else step(key, state, data)[0]
        return state, state.now

    def keep(state: State, info: Info) -> tuple[Any, Array]:
        tree = packing.unpack(state.params)
        tree = tree if method.storage == "auto" else jax.tree.map(lambda leaf: leaf.astype(method.storage), tree)
        return {"params": tree, "now": state.now}, table.wanted(state.number)

    def position(state: State) -> Tree:
        return packing.unpack(state.params)

    def finish(key: Key, state: State, kept: Any) -> Posterior:
        if kept is None:  # stopped before the first draw
            return Draws(jax.tree.map(np.asarray, jax.vmap(position)(state)), num_chains=method.num_chains)
        weights = None
        if method.schedule == "polynomial":
            weights = np.asarray(kept["now"].step_size, np.float64).reshape(-1)
            weights = weights / weights.sum()
        join = lambda leaf: np.asarray(leaf).reshape(-1, *np.shape(leaf)[2:])
        return Draws(jax.tree.map(join, kept["params"]), weights, num_chains=method.num_chains)

    outputs = jax.jit(lambda draws, rows: jax.lax.map(lambda p: _tree.flat(target.outputs(p, rows)), draws))

    def verdict(result: Any) -> tuple[str, bool, dict[str, Any]]:
        return _verdict(result, method, layout, outputs, x64, size)

    phases = []
    if method.num_search:
        kind = None if target.model is None else "full" if method.batch_size is None else "random"
        phases.append(Phase("search", search, method.num_search, kind, method.batch_size))
    phases.append(Phase("start", start, 1, feed, method.batch_size))
    if method.num_warmup:
        phases.append(Phase("warm-up", several, warmup, feed, method.batch_size))
    phases.append(Phase("sampling", several, table.total // stride, feed, method.batch_size))
    return Algorithm(
        init=init,
        phases=tuple(phases),
        position=position,
        finish=finish,
        keep=keep,
        members=method.num_chains,
        preliminary=int(method.num_search > 0),
        apart=True,  # looks and refreshed anchors are conditionals, which stacked chains would all pay for
        watch="log_likelihood",
        verdict=verdict,
        x64=x64,
        notes={"departures": method.departures(drawn or feed == "random") + _chains.tempered(target)},
    )


def normals(key: Key, like: Tree) -> Tree:
    """Independent standard normals like a packed tree. They are read once, so the compiler may fuse the generator into the move that reads
    them; elsewhere `aleator.noise.normal` keeps it from being run several times over."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])


# ---- gradients --------------------------------------------------------------------------------------------------------------------


def draw(key: Key, data: Any, size: int | None, sampling: str) -> Batch:
    """`size` rows, each a fair draw from all of them: independent, or one from each of `size` strata of neighbours, which begin at a random
    row so that all rows are equally likely."""
    total = int(data.index.shape[0])
    if sampling == "independent":
        index = jax.random.randint(key, (size,), 0, total)
    else:
        bounds = np.arange(size + 1, dtype=np.int64) * total // size  # type: ignore[operator]
        key_first, key_within = jax.random.split(key)
        within = jax.random.randint(key_within, (size,), 0, jnp.asarray(np.diff(bounds), jnp.int32))
        index = (jax.random.randint(key_first, (), 0, total) + jnp.asarray(bounds[:-1], jnp.int32) + within) % total
    return batch_at("random", data, Rows(index.astype(jnp.int32)[None], None), 0)  # type: ignore[return-value]


def first_half(batch: Any) -> Batch:
    """The first ⌊n/2⌋ rows of a batch."""
    rows = int((batch.index if batch.index is not None else jax.tree.leaves(batch.y if batch.x is None else batch.x)[0]).shape[0])
    return jax.tree.map(lambda leaf: leaf[: rows // 2], batch)


def estimate(params: Tree, batch: Batch | None, anchor: Any, target: Any, packing: _optimise.Packing) -> tuple[Array, Tree]:
    """(N/n)·Σ log p(yᵢ|xᵢ,θ) and an unbiased estimate of ∇U(θ), packed: from the batch alone, or around an anchor θ̂,

    ∇U(θ) ≈ −∇log p(θ) − Σ_all ∇log p(yᵢ|xᵢ,θ̂) − (N/n)·Σ_batch [∇log p(yᵢ|xᵢ,θ) − ∇log p(yᵢ|xᵢ,θ̂)].
    """

    def potential(tree: Tree) -> tuple[Array, Array]:
        prior, data = target.parts(tree, batch)
        return -(prior + data) / target.temperature, data

    gradient, data = jax.grad(potential, has_aux=True)(packing.unpack(params))
    gradient = packing.pack(gradient)
    if isinstance(anchor, Anchor):
        there = jax.grad(lambda tree: -target.parts(tree, batch)[1] / target.temperature)(packing.unpack(anchor.params))
        gradient = jax.tree.map(lambda here, at, all_rows: here - at + all_rows, gradient, packing.pack(there), anchor.total)
    return data, gradient


def halves(
    params: Tree,
    gradient: Tree,
    batch: Any,
    anchor: Any,
    target: Any,
    packing: _optimise.Packing,
    shuffled: bool,
    turn: Callable[[Tree], Tree] = lambda tree: tree,
) -> tuple[Tree, Any]:
    """An unbiased estimate of V from one batch, packed, and whether the batch had two halves (a stream's last may not).

    With the gradient g₁ over m of the n rows, (g − g₁)²·m/(n − m) has mean V for independent rows; rows of one epoch are drawn without
    replacement, which lowers V by 1 − n/N. turn: into the coordinates the sampler moves in.
    """
    half = first_half(batch)
    part = estimate(params, half, anchor, target, packing)[1]
    rows, whole = half.size, batch.size
    factor = rows / jnp.maximum(whole - rows, 1) * (1.0 - whole / target.num_data if shuffled else 1.0)
    return jax.tree.map(lambda d: factor * d**2, turn(jax.tree.map(jnp.subtract, gradient, part))), whole > rows


def full_gradient(params: Tree, data: Any, target: Any, packing: _optimise.Packing) -> Tree:
    """−Σ ∇log p(yᵢ|xᵢ,θ)/temperature over all rows, packed, FULL_ROWS at a time."""
    total = int(data.index.shape[0])
    size = min(FULL_ROWS, total)
    blocks = -(-total // size)
    index = np.where((at := np.arange(blocks * size)) < total, at, -1).astype(np.int32).reshape(blocks, size)
    tree = packing.unpack(params)

    def one(number: Any, carry: Tree) -> Tree:
        batch = batch_at("once", data, Rows(jnp.asarray(index), None), number)
        loss = lambda p: -batch.weighted_sum(target.log_likelihood(p, batch)) / target.temperature  # type: ignore[union-attr]
        return jax.tree.map(jnp.add, carry, jax.grad(loss)(tree))

    return packing.pack(jax.lax.fori_loop(0, blocks, one, jax.tree.map(jnp.zeros_like, tree)))


def curvature(params: Tree, batch: Batch | None, target: Any, packing: _optimise.Packing) -> Array:
    """The largest |eigenvalue| of the Hessian of U, by power iteration on products with it."""
    tree = packing.unpack(params)
    slope = jax.grad(lambda p: -target.log_joint(p, batch))
    product = lambda v: jax.jvp(slope, (tree,), (v,))[1]
    norm = lambda v: jnp.sqrt(_tree.sum_leaves(jax.tree.map(jnp.square, v)) + 1e-30)

    def one(_: Any, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        vector, _ = carry
        moved = product(vector)
        length = norm(moved)
        return jax.tree.map(lambda leaf: leaf / length, moved), length

    # A fixed start that is no one's eigenvector: signs of an irregular sequence.
    irregular = lambda leaf: jnp.sin(1.0 + 12.9898 * jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
    begin = jax.tree.map(irregular, tree)
    return jax.lax.fori_loop(0, POWER_STEPS, one, (begin, norm(begin)))[1]


def observe(
    state: State,
    number: Array,
    gradient: Tree,
    batch: Any,
    scale: Tree,
    dynamics: Dynamics,
    target: Any,
    packing: _optimise.Packing,
    shuffled: bool,
    turn: Callable[[Tree], Tree],
) -> tuple[Any, ...]:
    """A look before a step: V from the gradient of half the batch, G from squared gradients (until warm-up ends), and the temperatures."""
    looks = state.looks + 1
    share = jnp.maximum(1.0 / looks, MEMORY).astype(state.size.dtype)
    blend = lambda old, new: old + share * (new - old)
    spread, metric, square = state.spread, state.metric, state.square
    warming = number <= 0
    if jax.tree.leaves(spread):
        fresh, full = halves(state.params, gradient, batch, state.anchor, target, packing, shuffled, turn)
        spread = jax.tree.map(lambda v, new: jnp.where(full, blend(v, new.astype(v.dtype)), v), spread, fresh)
    if jax.tree.leaves(square):
        square = jax.tree.map(lambda s, g: jnp.where(warming, blend(s, g**2), s), square, gradient)
        mean = _tree.sum_leaves(jax.tree.map(jnp.sqrt, square)) / _tree.size(square)
        rough = jax.tree.map(lambda s: 1.0 / (jnp.sqrt(s) + RMS_FLOOR * mean), square)
        level = _tree.sum_leaves(rough) / _tree.size(rough)
        metric = jax.tree.map(lambda r, g: jnp.where(warming, r / level, g), rough, metric)
    centre = jax.tree.map(lambda c, p: jnp.where(warming, p, c), state.centre, state.params)
    watch = state.watch
    count = watch.count + jnp.where(warming, 0.0, 1.0).astype(watch.count.dtype)
    weight = jnp.where(warming, 0.0, 1.0 / jnp.maximum(count, 1.0)).astype(watch.count.dtype)
    running = lambda old, new: old + weight * (jnp.asarray(new, old.dtype) - old)
    size = _tree.size(state.params)
    virial = _tree.sum_leaves(jax.tree.map(lambda p, c, g: (p - c) * g, state.params, centre, gradient)) / size
    kinetic = jnp.ones(()) if dynamics.kinetic is None else dynamics.kinetic(state.inner, scale)
    noise = jnp.zeros(())
    if jax.tree.leaves(spread):
        noise = _tree.sum_leaves(jax.tree.map(lambda s, v: jnp.broadcast_to(0.25 * s, v.shape) * v, scale, spread)) / size
    watch = Watch(
        count,
        running(watch.virial, virial),
        running(watch.virial_square, virial**2),
        running(watch.kinetic, kinetic),
        running(watch.kinetic_square, kinetic**2),
        running(watch.noise, noise),
    )
    return spread, metric, square, centre, watch, looks


# ---- what comes out ---------------------------------------------------------------------------------------------------------------


def _verdict(
    result: Any, method: StochasticMethod, layout: _chains.Layout, outputs: Callable, x64: bool, size: int
) -> tuple[str, bool, dict[str, Any]]:
    """Whether the chains agree (by functions, for networks), and whether they are as warm as they should be."""
    kept, chains = result.kept, method.num_chains
    chosen = np.unique(np.linspace(0, size - 1, min(size, convergence.MAX_QUANTITIES)).astype(int))
    flat = np.concatenate([np.reshape(leaf, (*np.shape(leaf)[:2], -1)) for leaf in jax.tree.leaves(kept["params"])], axis=-1)[..., chosen]
    functions = np.zeros((*flat.shape[:2], 0))
    if layout.num_functions:
        join = lambda leaf, like: jnp.asarray(leaf, like.dtype).reshape(-1, *np.shape(leaf)[2:])
        template = jax.tree.map(
            lambda leaf: leaf if method.storage == "auto" else np.zeros(0, np.float64 if x64 else np.float32), kept["params"]
        )
        drawn = outputs(jax.tree.map(join, kept["params"], template), _tree.take(result.state.rows, 0))
        functions = np.asarray(drawn).reshape(*flat.shape[:2], -1)
        functions = functions[..., :: -(-functions.shape[-1] // convergence.MAX_QUANTITIES)]
    now = kept["now"].log_likelihood
    plain = np.zeros_like(now)
    stats = _chains.Stats(now, plain + 1.0, plain, plain + 1.0, plain, plain, plain, plain)
    seen = result._replace(kept={"position": flat, "functions": functions, "stats": stats}, state=None)
    sentence, healthy, health = convergence.verdict(seen, method, [layout.names[i] for i in chosen], bool(layout.num_functions))
    for name in ("acceptance", "evaluations", "divergences", "outside", "undefined", "saturated", "ebfmi"):
        health.pop(name)
    watch = [np.asarray(part, np.float64) for part in result.state.watch]
    count = watch[0].sum()
    virial, kinetic = _temperature(watch[0], watch[1], watch[2]), _temperature(watch[0], watch[3], watch[4])
    health |= {
        "step_size": float(np.mean(result.state.size)),
        "configurational_temperature": virial[0],
        "configurational_temperature_error": virial[1],
        "kinetic_temperature": kinetic[0] if method.dynamics().kinetic is not None else None,
        "gradient_noise": float(np.average(watch[5], weights=watch[0])) / method.room
        if count and jax.tree.leaves(result.state.spread)
        else None,
        "gradients": int(chains * (method.num_warmup + method.timetable().total)),
    }
    if health["gradient_noise"] is not None and health["gradient_noise"] > 1.0:
        said = (
            f"The noise of the gradient is {health['gradient_noise']:.1f} times what the step injects: the chain is too hot and cannot be "
            "corrected; lower step_size, raise batch_size, or use control_variates."
        )
        return said, False, health
    hot = {"configurational": virial} | ({"kinetic": kinetic} if method.dynamics().kinetic is not None else {})
    for name, (value, error) in hot.items():
        # Cycles end in a mode by design: their kinetic energy lags behind a falling step size.
        if method.cycles is None and abs(value - 1.0) > max(HOT, 5.0 * error):
            said = (
                f"The {name} temperature is {value:.2f} ± {error:.2f} where it should be 1: "
                "the step size is too large for this posterior, or the chain has not settled; lower step_size or raise num_warmup."
            )
            return said, False, health
    return sentence.replace("Converged:", "Chains agree:"), healthy, health


def _temperature(count: np.ndarray, mean: np.ndarray, square: np.ndarray) -> tuple[float, float]:
    """Mean over the chains and its standard error: from the looks within them, or from the chains' differences where these are larger."""
    if not count.sum():
        return float("nan"), float("nan")
    within = np.sqrt(np.mean(np.maximum(square - mean**2, 0.0)) / count.sum())
    between = mean.std(ddof=1) / np.sqrt(len(mean)) if len(mean) > 1 else 0.0
    return float(mean.mean()), float(max(within, between))


def _check_data(method: StochasticMethod, target: Any) -> None:
    if target.model is None:
        if method.control_variates:
            raise MethodError(
                message("A bare log density has no rows.", f"control_variates={method.control_variates!r}", "a model with data", "drop it")
            )
        return
    if method.batch_size is not None and not getattr(target.model, "minibatch", True) and method.batch_size < target.num_data:
        got = f"batch_size={method.batch_size} with a {type(target.model).__name__}, whose rows depend on each other"
        raise MethodError(message("The likelihood is no sum over rows.", got, "all rows at every step", "pass batch_size=None"))


def _search(method: StochasticMethod) -> Any:
    """Adam down a cosine to a mode."""
    return _optimise.optimizer(
        types.SimpleNamespace(optimizer="adam", schedule="cosine", learning_rate=method.search_rate, num_steps=method.num_search, clip=None)
    )
