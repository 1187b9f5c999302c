"""The one driver: runs any Algorithm in compiled chunks and does everything else on the host between them.

Progress, non-finite checks, early stopping, checkpoints and resume live here, once. A chunk is a `while_loop` whose number of steps is
an argument, so one executable serves every chunk length and the cut into chunks cannot change a bit of the result. Every random number
of step t comes from fold_in(key, t), and every mini-batch from (seed, epoch): a run resumed after a kill repeats what it would have done.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _files, _tree
from aleator._chunks import compiled, compiled_check, compiled_init, compiled_position, per_member, share
from aleator._errors import MethodError, NonFiniteError, StoreError, message
from aleator._feed import ArrayFeed, NoFeed, StreamFeed
from aleator._kept import Kept
from aleator._progress import Progress
from aleator._random import seeds_of, split
from aleator._typing import Array, Key, Tree
from aleator.data import Batch, Data, Stream

MAX_CHUNK = 4096  # steps in one compiled call at most
FEED_BYTES = 64 * 2**20  # bytes of batches or kept values held by one chunk
FIRST_CHUNK = 16  # steps before the first look at the clock
CHUNK_SECONDS = 0.5  # how often the host wants to look
HEAVY_SECONDS = 0.02  # a step this long may run faster outside the compiled loop: measured once
TRACE_POINTS = 1000  # length of the trace kept of each info field
SMALL_MEMBER = 20_000  # members up to this many parameters are faster stacked than one by one on CPU
CHECKPOINT = "checkpoint.safetensors"


class Phase(NamedTuple):
    """step(key, state, batch) → (state, info), num_steps times.

    batches: "full" (all rows every step), "random" (mini-batches of batch_size), "once" (each row exactly once, in order; num_steps is
    worked out), or None (no data). info is a NamedTuple of scalars. brief: it is over so soon that compiling it is most of its time.
    """

    name: str
    step: Callable[[Key, Any, Batch | None], tuple[Any, Any]]
    num_steps: int | None
    batches: str | None = "full"
    batch_size: int | None = None
    brief: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """A method made concrete for one target: pure functions, and what the driver must know about them.

    init(key, start) → state. position(state) → the parameters to judge. keep(state, info) → (value, wanted). done(state) → bool.
    check(state, held) → state, every check_every steps, on data held out. finish(key, states, kept) → Posterior.
    members: run that many copies, each with its own key, start and rows; states and kept then have a leading axis.
    watch: the info field that must stay finite. verdict(result) → (sentence, healthy), where the general one does not fit.
    starts: how many starting points `init` takes, stacked, where that is not one a member (chains that move together). preliminary: how many of the first phases only look for a start; they are left out where one is given. blank: these make the start themselves, so that any parameters will do before them. apart: members differ in work per step, so on CPU each runs by itself, on as many threads as there are cores. driver: how steps run where it is known beforehand: "loop" for steps that are loops themselves, which gain nothing outside another. x64: run in float64 throughout. notes: what the manifest should say of this run (departures from Bayes, treatment of the weights). keep builds its value from the state alone: a resume asks it for the structure without an info. choose(states, held) → (Posterior, notes for the manifest), in the place of `finish` where there are held-out rows.
    """

    init: Callable[[Key, Tree], Any]
    phases: tuple[Phase, ...]
    position: Callable[[Any], Tree]
    finish: Callable[[Key, Any, Any], Any]
    keep: Callable[[Any, Any], tuple[Any, Array]] | None = None
    done: Callable[[Any], Array] | None = None
    check: Callable[[Any, Batch], Any] | None = None
    check_every: int = 100
    members: int | None = None
    starts: int | None = None
    bootstrap: bool = False
    preliminary: int = 0
    blank: bool = False
    apart: bool = False
    watch: str | None = None
    verdict: Callable[[Any], tuple[str, bool]] | None = None
    driver: str = "auto"
    x64: bool = False
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    choose: Callable[[Any, Batch], tuple[Any, dict[str, Any]]] | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: nothing here changes the posterior beyond rounding.

    progress: True, False or None (only in a terminal). checkpoint: a directory, written every checkpoint_every seconds; resume: continue
    from it. driver: "auto", "loop" (compiled loop) or "step" (one compiled step at a time). parallel: how members run, "auto", "vmap"
    (all stacked), "threads" (one by one, on as many host threads as cores) or "sequential".
    """

    progress: bool | None = None
    checkpoint: str | os.PathLike | None = None
    checkpoint_every: float = 30.0
    resume: bool = False
    driver: str = "auto"
    parallel: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("driver", ("auto", "loop", "step")), ("parallel", ("auto", "vmap", "threads", "sequential"))):
            if getattr(self, name) not in allowed:
                raise MethodError(message(f"Unknown {name}.", repr(getattr(self, name)), f"one of {allowed}", "choose one of them"))
        if self.resume and self.checkpoint is None:
            raise MethodError(
                message(
                    "There is nothing to resume from.",
                    "resume=True without a directory",
                    "checkpoint=DIR",
                    "pass the directory of the interrupted run",
                )
            )


class Result(NamedTuple):
    """What a run leaves behind: states (stacked for members), kept values, traces by info field, steps done, and how it ran."""

    state: Any
    kept: Any
    traces: dict[str, np.ndarray]
    steps: int
    stopped_early: bool
    plan: dict[str, Any]
    seconds: float


def run(
    key: Key,
    algorithm: Algorithm,
    data: Data | Stream | None,
    starts: Tree,
    options: Options,
    identity: str,
    rows: np.ndarray | None = None,
    held: Batch | None = None,
    convert: Callable[[tuple], tuple] = tuple,
    weights: np.ndarray | None = None,
) -> Result:
    """Run all phases of an algorithm.

    starts: parameters to begin from, stacked for members. rows: row numbers to train on, (members, n) or (n,). held: the Batch for
    `check`, stacked for members. convert: checks and encodes one batch of a Stream. weights: what each member multiplies the weight of
    each row with, (members, N) or (N,). identity: a digest of everything that defines the run; a checkpoint with another one is refused.
    """
    job = _Job(key, algorithm, data, starts, options, identity, rows, held, convert, weights)
    if options.resume:
        job.load()
    else:
        job.kept.clear()
    last_saved, began = time.monotonic(), time.monotonic() - job.seconds
    with Progress(options.progress, sum(phase.num_steps or 1 for phase in algorithm.phases)) as bar:
        while job.phase < len(algorithm.phases):
            feed = job.feed()
            while job.step < job.num_steps(feed) and not job.stopped:
                job.advance(feed)
                job.seconds = time.monotonic() - began
                bar.update(algorithm.phases[job.phase].name, job.total_steps, job.note())
                if options.checkpoint is not None and time.monotonic() - last_saved >= options.checkpoint_every:
                    job.save()
                    last_saved = time.monotonic()
            job.phase, job.step, job.calls = job.phase + 1, 0, 0
            job.stopped = job.stopped and job.phase == len(algorithm.phases)
    if options.checkpoint is not None:
        job.save()
    return job.result()


class _Job:
    """Host-side bookkeeping of one run; everything numerical is in the pure functions below."""

    def __init__(
        self,
        key: Key,
        algorithm: Algorithm,
        data: Any,
        starts: Tree,
        options: Options,
        identity: str,
        rows: Any,
        held: Any,
        convert: Any,
        weights: Any,
    ):
        self.algorithm, self.options, self.identity, self.rows, self.convert = algorithm, options, identity, rows, convert
        self.weights = weights
        self.members = range(algorithm.members or 1)
        self.stacked = algorithm.members is not None
        key_order, key_init, key_steps = split(key, 3)
        self.seeds = seeds_of(key_order, len(self.members))
        parallel = "threads" if algorithm.apart and options.parallel == "auto" and jax.default_backend() == "cpu" else options.parallel
        self.groups = _groups(self.members, parallel, _tree.size(starts) // len(self.members)) if self.stacked else [self.members]
        self.workers = 1 if options.parallel in ("sequential", "vmap") else min(os.cpu_count() or 1, len(self.groups))
        self.source = data
        # Read here: the setting is local to a thread, and chunks run on others.
        self.x64 = algorithm.x64 or jax.config.read("jax_enable_x64")
        with self._precision():
            self.data = data.batch() if isinstance(data, Data) else None
            self.states, self.keys = compiled_init(algorithm, tuple(self.groups))(key_init, key_steps, starts)
        self.previous, self.all_held, self.held = self.states, held, self._deal(held)
        self.phase, self.step, self.total_steps, self.calls, self.seconds = 0, 0, 0, 0, 0.0
        self.count = FIRST_CHUNK
        self.position = [0, 0]
        directory = None if options.checkpoint is None else Path(options.checkpoint)
        self.kept = Kept(1 if self.stacked else 0, directory)
        self.traces: dict[str, list[np.ndarray]] = {}
        self.stopped = False
        self.driver = algorithm.driver if options.driver == "auto" else options.driver

    def _precision(self) -> Any:
        return jax.enable_x64(self.x64)

    def _deal(self, tree: Any) -> list[Any]:
        """Each group's share of a tree with a leading axis of members. By NumPy: eager JAX would compile a program per shape."""
        if not self.stacked or tree is None:
            return [tree] * len(self.groups)
        host = jax.tree.map(np.asarray, tree)
        with self._precision():
            return [jax.tree.map(jnp.asarray, share(host, group)) for group in self.groups]

    def _join(self, parts: list[Any]) -> Any:
        """The inverse of `_deal`, on the host."""
        if not self.stacked:
            return parts[0]
        lifted = [
            part if len(g) > 1 else jax.tree.map(lambda leaf: np.asarray(leaf)[None], part)
            for part, g in zip(parts, self.groups, strict=True)
        ]
        return lifted[0] if len(lifted) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *lifted)

    def _alone(self) -> Any:
        """Shapes of one member's state."""
        return jax.eval_shape(lambda s: _tree.take(s, 0) if self.stacked and len(self.groups[0]) > 1 else s, self.states[0])

    def feed(self) -> Any:
        """The feed of the current phase."""
        phase = self.algorithm.phases[self.phase]
        if phase.batches is None:
            return NoFeed()
        if isinstance(self.source, Stream):
            if phase.batches == "full":
                raise MethodError(
                    message(
                        f"Phase {phase.name!r} needs all rows at every step.",
                        "a Stream",
                        "data in memory, or mini-batches",
                        "set batch_size (any number: the stream's batches are used)",
                    )
                )
            return StreamFeed(self.source, self.convert, self.position)
        return ArrayFeed(self.source, phase.batches, phase.batch_size, self.seeds, self.rows, self.stacked, self.weights)

    def num_steps(self, feed: Any) -> int:
        phase = self.algorithm.phases[self.phase]
        return feed.num_steps if phase.batches == "once" else int(phase.num_steps)

    def note(self) -> str:
        watched = self.traces.get(self.algorithm.watch or "")
        return (
            f"{self.algorithm.watch.replace('_', ' ')} {float(np.mean(watched[-1][..., -1])):.4g}" if watched and watched[-1].size else ""
        )

    # ---- one chunk ----------------------------------------------------------------------------------------------------------------

    def advance(self, feed: Any) -> None:
        """Run one chunk on every group, then look at what came out."""
        total = self.num_steps(feed)
        step = self.algorithm.phases[self.phase].step
        capacity = self._capacity(feed, max([total] + [p.num_steps or 0 for p in self.algorithm.phases if p.step is step]))
        # The first chunk of a phase is short: it may compile, and then one group runs it while the others wait.
        count = min(self.count if self.calls else FIRST_CHUNK, capacity, total - self.step)
        if self.algorithm.check is not None and self.held[0] is not None:
            count = min(count, self.algorithm.check_every - self.step % self.algorithm.check_every)
        feeds = self._feeds(feed, count, capacity)
        if self.driver == "auto" and total > 1:  # one step is over sooner than it is timed
            self.driver = self._choose_driver(feed.kind, feeds, count, capacity)
        clock = time.perf_counter()
        outs = self._call(feed.kind, feeds, count, capacity, self._driver())
        elapsed = time.perf_counter() - clock
        count = max(int(np.max(np.asarray(ran))) for *_, ran in outs)  # fewer than asked for where all are done
        self._check_finite(feed.kind, feeds, capacity, outs, count)
        self.previous, self.states = self.states, [state for state, *_ in outs]
        self._record([_while_running(info, ran) for _, info, _, ran in outs], [kept for _, _, kept, _ in outs], count, total)
        self.step, self.total_steps, self.calls = self.step + count, self.total_steps + count, self.calls + 1
        if self.calls > 1:  # the first call compiles
            self.count = int(np.clip(count * CHUNK_SECONDS / max(elapsed, 1e-6), 1, MAX_CHUNK))
        elif elapsed < CHUNK_SECONDS:
            self.count = MAX_CHUNK
        self._check_held()

    def _feeds(self, feed: Any, count: int, capacity: int) -> list[Callable[[], Any]]:
        """Each group's batches, made when its thread asks for them, so that one group's can be shuffled while another computes.

        A stream is read once and shared; row numbers are each member's own.
        """
        if feed.kind == "stream":
            shared = feed.chunk(self.members, self.step, count, capacity)
            return [lambda: shared] * len(self.groups)

        def make(group: range) -> Any:
            part = feed.chunk(group, self.step, count, capacity)
            return _tree.take(part, 0) if self.stacked and len(group) == 1 else part

        return [functools.cache(functools.partial(make, group)) for group in self.groups]

    def _capacity(self, feed: Any, total: int) -> int:
        kept = 0
        if self.algorithm.keep is not None:
            with self._precision():
                kept = _tree.nbytes(jax.eval_shape(self.algorithm.position, self._alone())) + 1
        per_step = max(1, feed.bytes_per_step * len(self.members), kept)
        return int(np.clip(FEED_BYTES // per_step, 1, min(MAX_CHUNK, total)))

    def _call(self, kind: str, feeds: list[Callable[[], Any]], count: int, capacity: int, driver: str) -> list[Any]:
        def one(number: int) -> Any:
            with self._precision():
                group = self.groups[number]
                stacked = self.stacked and len(group) > 1
                keys = self.keys[number]
                phase = self.algorithm.phases[self.phase]
                advance = compiled(self.algorithm, phase.step, kind, driver, stacked, self._fed_rows(kind), phase.brief)
                # Steps are numbered through all phases: no two of them share their noise.
                out = advance(self.states[number], keys, self.total_steps, count, self.data, feeds[number](), capacity)
                return jax.block_until_ready(out)

        if self.workers == 1:
            return [one(number) for number in range(len(self.groups))]
        first = [one(0)] if self.calls == 0 and self.step == 0 else []  # compile once, not once per thread
        with ThreadPoolExecutor(self.workers) as pool:
            return first + list(pool.map(one, range(len(first), len(self.groups))))

    def _driver(self) -> str:
        return "loop" if self.driver == "auto" else self.driver

    def _fed_rows(self, kind: str) -> bool:
        return kind in ("random", "once") or (kind == "full" and (self.rows is not None or self.weights is not None))

    def _choose_driver(self, kind: str, feeds: list[Callable[[], Any]], count: int, capacity: int) -> str:
        """Heavy steps may run faster outside the compiled loop; both are timed once, on steps that are thrown away."""
        self._call(kind, feeds, 1, capacity, "loop")
        timed = {}
        for driver in ("loop", "step"):
            if driver == "step":
                if timed["loop"] < HEAVY_SECONDS:
                    return "loop"
                self._call(kind, feeds, 1, capacity, driver)
            clock = time.perf_counter()
            self._call(kind, feeds, min(2, count), capacity, driver)
            timed[driver] = (time.perf_counter() - clock) / min(2, count)
        return min(timed, key=timed.get)

    # ---- looking at it ------------------------------------------------------------------------------------------------------------

    def _check_finite(self, kind: str, feeds: list[Callable[[], Any]], capacity: int, outs: list[Any], count: int) -> None:
        """Stop at the first step whose watched number is not finite, with the state before it."""
        if self.algorithm.watch is None:
            return
        watched = np.concatenate([np.asarray(getattr(info, self.algorithm.watch)).reshape(-1, capacity)[:, :count] for _, info, *_ in outs])
        bad = np.flatnonzero(~np.isfinite(watched.sum(axis=0)))
        if not bad.size:
            return
        at = int(bad[0])
        after = self._call(kind, feeds, at + 1, capacity, self._driver())
        positions = [
            compiled_position(self.algorithm, self.stacked and len(g) > 1)(out[0]) for out, g in zip(after, self.groups, strict=True)
        ]
        path = next((p for position in positions if (p := _tree.first_nonfinite(position))), None)
        if at > 0:
            self.states = [state for state, *_ in self._call(kind, feeds, at - 1, capacity, self._driver())]
        else:
            self.states = self.previous
        number, at_start = self.total_steps + at, self.total_steps + at == 0
        self.total_steps += max(at - 1, 0)
        where = f"parameter {path}" if path else f"{self.algorithm.watch} (all parameters are finite)"
        if len(watched) > 1:
            which = ", ".join(
                str(m) for m, value in zip(chain.from_iterable(self.groups), watched[:, at], strict=True) if not np.isfinite(value)
            )
            where += f", in run {which} of 0 to {len(watched) - 1}"
        error = NonFiniteError(
            message(
                f"Step {number} left the finite numbers.",
                where,
                "finite values",
                "lower learning_rate or step_size, standardise x and y, or use float64; the last good state is in error.fit",
            )
        )
        error.result, error.at_start = self.result(), at_start
        raise error

    def _record(self, infos: list[Any], kept: list[Any], count: int, total: int) -> None:
        """Thin the traces by step number, not by chunk, so that they do not depend on how the run was cut."""
        stride = max(1, total // TRACE_POINTS)
        picked = [i for i in range(count) if (self.step + i) % stride == 0]
        joined = self._join(infos)
        if joined is not None:
            for name, value in joined._asdict().items():
                self.traces.setdefault(name, []).append(np.asarray(value)[..., picked])
        if self.algorithm.keep is not None:
            values, wanted = self._join(kept)
            mask = np.asarray(wanted)[..., :count]
            mask = mask[0] if self.stacked else mask
            if mask.any():
                cut = (lambda leaf: np.asarray(leaf)[:, :count][:, mask]) if self.stacked else (lambda leaf: np.asarray(leaf)[:count][mask])
                self.kept.append(jax.tree.map(cut, values))

    def _check_held(self) -> None:
        algorithm = self.algorithm
        if algorithm.check is not None and self.held[0] is not None and self.step % algorithm.check_every == 0:
            check = compiled_check(algorithm)
            with self._precision():
                self.states = [
                    check(state, held, stacked=self.stacked and len(group) > 1)
                    for state, held, group in zip(self.states, self.held, self.groups, strict=True)
                ]
        if algorithm.done is not None:
            with self._precision():
                done = [
                    per_member(algorithm.done, self.stacked and len(g) > 1)(state)
                    for state, g in zip(self.states, self.groups, strict=True)
                ]
            self.stopped = all(bool(np.all(np.asarray(flag))) for flag in done)

    def result(self) -> Result:
        traces = {name: np.concatenate(parts, axis=-1) for name, parts in self.traces.items()}
        plan = {"driver": self._driver(), "groups": [len(group) for group in self.groups]}
        with self._precision():
            state = jax.tree.map(jnp.asarray, self._join(self.states))
            return Result(state, self.kept.join(), traces, self.total_steps, self.stopped, plan, self.seconds)

    # ---- checkpoints --------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        arrays = _files.flatten(self._join(self.states), "state/")
        arrays |= {f"trace/{name}": np.concatenate(parts, axis=-1) for name, parts in self.traces.items()}
        fields = ("identity", "phase", "step", "total_steps", "count", "seconds", "stopped", "position", "driver")
        own = {"schema": 2, "groups": [[g.start, g.stop] for g in self.groups], "kept": self.kept.save()}
        meta = {name: getattr(self, name) for name in fields} | own
        _files.write_atomic(Path(self.options.checkpoint) / CHECKPOINT, _files.pack(arrays, meta))

    def load(self) -> None:
        path = Path(self.options.checkpoint) / CHECKPOINT
        if not path.exists():
            return  # Killed before the first checkpoint: the run starts from its beginning, and is the same run.
        arrays, meta = _files.unpack(path.read_bytes(), str(path))
        if meta.pop("schema") not in (1, 2):  # the first had no parts of its own: no method of its time kept anything
            raise StoreError(
                message(
                    "The checkpoint is from another version.",
                    "an unknown schema",
                    "schema 1 or 2",
                    "finish it with the version that began it",
                )
            )
        if meta["identity"] != self.identity:
            raise StoreError(
                message(
                    "The checkpoint belongs to another run.",
                    "a different key, model, method or data",
                    "the same four",
                    "pass the original ones, or another directory",
                )
            )
        with self._precision():
            part = {name: array for name, array in arrays.items() if name.startswith("state/")}
            state = _files.unflatten(self._join(self.states), part, "state/")
            groups = [range(*bounds) for bounds in meta.pop("groups")]
            if groups != self.groups:  # as they were, whatever machine this is
                keys = jnp.concatenate([jnp.atleast_1d(jax.random.clone(key)) for key in self.keys])
                self.groups, self.keys = groups, [share(keys, group) for group in groups]
                self.held = self._deal(self.all_held)
            self.states = self.previous = self._deal(state) if self.stacked else [jax.tree.map(jnp.asarray, state)]
        count = meta.pop("kept", 0)
        for name, value in meta.items():
            setattr(self, name, value)
        self.traces = {name.removeprefix("trace/"): [array] for name, array in arrays.items() if name.startswith("trace/")}
        self.kept.load(count, self._kept_structure() if count else None)

    def _kept_structure(self) -> Any:
        with self._precision():
            return jax.tree.structure(jax.eval_shape(lambda s: self.algorithm.keep(s, None)[0], self._alone()))


def _groups(members: range, parallel: str, size: int) -> list[range]:
    """Members that run stacked together; groups run on host threads. All groups have the same size, so that one compiled call serves."""
    if parallel == "vmap" or (parallel == "auto" and jax.default_backend() != "cpu"):
        return [members]
    cores = min(os.cpu_count() or 1, len(members))
    alone = parallel in ("threads", "sequential") or size > SMALL_MEMBER or len(members) % cores
    each = 1 if alone else len(members) // cores
    return [range(first, first + each) for first in range(0, len(members), each)]


def _while_running(info: Any, ran: Any) -> Any:
    """Info of the steps a member took; NaN where it was done while others went on."""

    def one(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        over = np.arange(leaf.shape[-1]) >= np.asarray(ran)[..., None]
        return np.where(over, np.nan, leaf) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return jax.tree.map(one, info)
