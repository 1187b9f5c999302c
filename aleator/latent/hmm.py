"""Hidden Markov models: z_t | z_{t−1} ~ Categorical(A[z_{t−1}]), y_t | z_t ~ part z_t."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family
from aleator.latent._model import ConjugateLatent, in_double, observations
from aleator.latent.autoregressive import Autoregressive
from aleator.latent.mixture import nearest, rows_of
from aleator.latent.parts import Part, StudentT, as_part, check_finite, check_width, emitted
from aleator.latent.weights import Dirichlet

TINY = 1e-300  # probabilities below are taken for it: logarithms stay finite, and their gradients


class Filtered(NamedTuple):
    """The forward pass. predicted: p(z_t | y_<t), up to scale for expected logs. filtered: p(z_t | y_≤t). Both (T, S). log_terms:
    log p(y_t | y_<t), (T,)."""

    predicted: Array
    filtered: Array
    log_terms: Array


def forward(log_initial: Array, log_transition: Array, terms: Array, begins: Array) -> Filtered:
    """Filter by one step after the other. log_initial (S,), log_transition (S, S), terms log p(y_t | z_t) (T, S), begins (T,): whether a
    sequence begins here. Probabilities are scaled to one at every step, emissions enter in logarithms: nothing under- or overflows.
    """
    initial, transition = jnp.exp(log_initial), jnp.exp(log_transition)

    def one(before: Any, item: Any) -> tuple[Any, Any]:
        term, begin = item
        predicted = jnp.maximum(jnp.where(begin, initial, before @ transition), TINY)
        now, total = _scaled(jnp.log(predicted) + term)
        return now, (predicted, now, total)

    return Filtered(*jax.lax.scan(one, initial, (terms, begins))[1])


def forward_parallel(log_initial: Array, log_transition: Array, terms: Array, begins: Array) -> Filtered:
    """As `forward` by an associative scan: depth log T, work T·S³. An element is the matrix p(z_t, y_{s…t} | z_{s−1}) with its rows scaled to
    one, and the logs of their scales."""
    initial, transition = jnp.exp(log_initial), jnp.exp(log_transition)

    def scaled(logs: Array) -> tuple[Array, Array]:
        now, total = jax.vmap(jax.vmap(_scaled))(logs)
        return now, total

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (a, log_a), (b, log_b) = left, right
        most = jnp.max(log_b, axis=-1, keepdims=True)
        product = jnp.maximum((a * jnp.exp(log_b - most)[:, None, :]) @ b, TINY)
        size = jnp.sum(product, axis=-1)
        return product / size[..., None], log_a + jnp.log(size) + most

    first = jnp.where(begins[:, None, None], log_initial, log_transition)
    filtered = jax.lax.associative_scan(join, scaled(first + terms[:, None, :]))[0][:, 0]
    before = jnp.concatenate([initial[None], filtered[:-1]])
    predicted = jnp.maximum(jnp.where(begins[:, None], initial, before @ transition), TINY)
    return Filtered(predicted, filtered, jax.vmap(_scaled)(jnp.log(predicted) + terms)[1])


def backward(passed: Filtered, log_transition: Array, begins: Array) -> Array:
    """p(z_t | y), (T, S), from the last step to the first: Σ_j p(z_t | y_≤t) A[z_t, j] p(z_{t+1} = j | y) / p(z_{t+1} = j | y_≤t)."""
    transition, last = jnp.exp(log_transition), ends(begins)

    def one(after: Any, item: Any) -> tuple[Any, Any]:
        filtered, predicted, end = item
        now = filtered * jnp.where(end, 1.0, transition @ after)
        return now / predicted, now

    return jax.lax.scan(one, passed.filtered[-1], (passed.filtered, passed.predicted, last), reverse=True)[1]


def backward_parallel(passed: Filtered, log_transition: Array, begins: Array) -> Array:
    """As `backward` by an associative scan over the matrices p(z_t | z_{t+1}, y_≤t)."""
    back = _backwards(passed, jnp.exp(log_transition), begins)
    return jax.lax.associative_scan(lambda later, earlier: later @ earlier, back, reverse=True)[:, 0]


def viterbi(log_initial: Array, log_transition: Array, terms: Array, begins: Array) -> tuple[Array, Array]:
    """argmax_z log p(z, y) (T,), and its value."""

    def one(before: Any, item: Any) -> tuple[Any, Any]:
        term, begin = item
        routes = before[:, None] + jnp.where(begin, log_initial, log_transition)  # a new sequence continues the best end of the one before
        return jnp.max(routes, axis=0) + term, jnp.argmax(routes, axis=0).astype(jnp.int32)

    final, pointers = jax.lax.scan(one, jnp.zeros_like(log_initial), (terms, begins))
    last = jnp.argmax(final).astype(jnp.int32)
    back: Any = lambda state, pointer: (pointer[state], pointer[state])
    before = jax.lax.scan(back, last, pointers, reverse=True)[1]
    return jnp.concatenate([before[1:], last[None]]), jnp.max(final)


def draw_path(key: Key, passed: Filtered, log_transition: Array, begins: Array) -> Array:
    """z ~ p(z | y), (T,): forward filtering, backward sampling."""
    noise = jax.random.gumbel(key, passed.filtered.shape)
    logs = jnp.log(jnp.maximum(passed.filtered, TINY))

    def one(after: Any, item: Any) -> tuple[Any, Any]:
        log_now, gumbel, end = item
        state = jnp.argmax(log_now + jnp.where(end, 0.0, log_transition[:, after]) + gumbel).astype(jnp.int32)
        return state, state

    return jax.lax.scan(one, jnp.zeros((), jnp.int32), (logs, noise, ends(begins)), reverse=True)[1]


@dataclasses.dataclass(frozen=True)
class HMM(ConjugateLatent):
    """z_1 ~ Categorical(π), z_t | z_{t−1} ~ Categorical(A[z_{t−1}]), y_t | z_t ~ part z_t (D6).

    part: "categorical", "gaussian", "poisson", "bernoulli", "student_t", "autoregressive", or an object of `al.latent.parts` with its prior.
    initial, transition: Dirichlet priors of π and of each row of A; stickiness: pseudo-counts more for staying.
    Data: y (T,) or (T, d), rows in the order of time; several sequences one after the other, (ids, y) with whole numbers ids (T,) that change
    where a sequence begins. Rows that are all NaN are missing (single entries where the part allows it). parallel: associative scans, for
    machines with many cores.
    """

    num_states: int
    part: Any = "gaussian"
    initial: Any = Dirichlet(1.0)
    transition: Any = Dirichlet(1.0)
    stickiness: float = 0.0
    parallel: bool = False

    minibatch = False
    num_invariants = 16

    def __post_init__(self) -> None:
        if isinstance(self.num_states, bool) or not isinstance(self.num_states, (int, np.integer)) or self.num_states < 1:
            raise ModelError(message("A chain needs states.", repr(self.num_states), "a whole number ≥ 1", "pass e.g. HMM(3)"))
        for name in ("initial", "transition"):
            if not isinstance(getattr(self, name), Dirichlet):
                got = f"{name}={getattr(self, name)!r}"
                raise ModelError(message("These are not probabilities of states.", got, "Dirichlet(a)", "pass al.latent.Dirichlet(1.0)"))
        if not self.stickiness >= 0:
            raise ModelError(
                message("Pseudo-counts are not negative.", f"stickiness={self.stickiness!r}", "a number ≥ 0", "pass e.g. 10.0")
            )
        object.__setattr__(self, "part", Autoregressive() if self.part == "autoregressive" else as_part(self.part))

    def bind(self, x: Tree, y: Tree) -> HMM:
        rows = observations(y)
        begins = check_sequences(x, len(rows))
        if isinstance(self.part, Autoregressive):
            with jax.enable_x64(True):
                rows = np.asarray(self.part.lagged(jnp.asarray(rows), jnp.asarray(begins)))
        seen = check_seen(rows)
        return dataclasses.replace(self, part=self.part.bind(rows[seen]))

    def observed(self, y: Any) -> np.ndarray:
        rows = observations(y)
        if isinstance(self.part, Autoregressive):  # too few rows for a fit of their own may still be asked about
            check_width(rows, self.part.dim)
            check_finite(rows, missing=True)
        else:
            emitted(self.part, rows[~np.isnan(rows).all(axis=1)])
        return rows

    def about(self, x: Any, y: Any) -> tuple[HMM, Batch]:
        return self, asked(self, x, y)

    @property
    def families(self) -> dict[str, Family]:
        return {"initial": self.initial, "transition": self.transition, "parts": self.part}

    def prior_counts(self) -> dict[str, Tree]:
        num = self.num_states
        transition = self.transition.prior(num, (num,)) + self.stickiness * jnp.eye(num)
        return {"initial": self.initial.prior(num), "transition": transition, "parts": self.part.prior(num)}

    def emissions(self, natural: dict[str, Tree], y: Array) -> Array:
        """log p(y_t | z_t), or its counterpart in expectations, (T, S); 0 for rows that are missing. y: as `_laid` lays them."""
        seen, filled = _filled(self.part, y)
        return jnp.where(seen[:, None], self.part.log_terms(natural["parts"], filled), 0.0)

    def passed(self, natural: dict[str, Tree], batch: Batch) -> tuple[Filtered, Array, Array]:
        """The forward pass, where sequences begin, and the rows as the part wants them."""
        begins, y = self._laid(batch)
        run = forward_parallel if self.parallel else forward
        return run(natural["initial"], natural["transition"], self.emissions(natural, y), begins), begins, y

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        passed, begins, y = self.passed(natural, batch)
        smoothed = (backward_parallel if self.parallel else backward)(passed, natural["transition"], begins)
        # Σ_t p(z_{t−1} = i, z_t = j | y) = A_ij Σ_t p(i | y_≤t−1) p(j | y) / p(j | y_≤t−1): one product of matrices for all steps.
        later = jnp.where(begins[1:, None], 0.0, smoothed[1:] / passed.predicted[1:])
        counts = {
            "initial": jnp.sum(jnp.where(begins[:, None], smoothed, 0.0), axis=0),
            "transition": jnp.exp(natural["transition"]) * (passed.filtered[:-1].T @ later),
            "parts": self._part_counts(smoothed, y, natural["parts"]),
        }
        return counts, passed.log_terms

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(y_t | y_<t, θ), states summed out; (T,)."""
        return self.passed(self.natural(params), batch)[0].log_terms

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        key_path, key_scale = jax.random.split(key)
        passed, begins, y = self.passed(natural, batch)
        path = draw_path(key_path, passed, natural["transition"], begins)
        return self._complete(path, begins, y, natural["parts"], key_scale)

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """Rows go to the nearest of centres far apart, as in a mixture; the path through them is counted."""
        begins, y = self._laid(batch)
        seen = jnp.isfinite(y)
        filled = jnp.where(seen, y, jnp.sum(jnp.where(seen, y, 0.0), axis=0) / jnp.maximum(jnp.sum(seen, axis=0), 1))
        spread = jnp.std(filled, axis=0)
        path = nearest(key, filled / jnp.where(spread > 0, spread, 1.0), self.num_states)
        return self._complete(path, begins, y)

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """log p(y_t | y_<t, θ) at some of the rows."""
        terms = self.log_likelihood(params, batch)
        return terms[np.linspace(0, len(terms) - 1, self.num_invariants).astype(np.int32)]

    def _laid(self, batch: Batch) -> tuple[Array, Array]:
        """Where sequences begin (T,), and the rows, beside their past where the part asks for it."""
        check_weights(batch)
        y = rows_of(batch.y)
        y = y.astype(jnp.result_type(float)) if not jnp.issubdtype(y.dtype, jnp.floating) else y
        begins = sequence_begins(batch.x, len(y))
        return begins, self.part.lagged(y, begins) if isinstance(self.part, Autoregressive) else y

    def _complete(self, path: Array, begins: Array, y: Array, natural: Tree = None, key: Key | None = None) -> dict[str, Tree]:
        """Counts of one path (T,). natural, key: to draw the scales of Student-t rows; without them rows count whole."""
        shares = jax.nn.one_hot(path, self.num_states, dtype=y.dtype)
        pairs = jnp.where(begins[1:, None], 0.0, shares[1:])
        if isinstance(self.part, StudentT):
            seen, filled = _filled(self.part, y)
            kept = jnp.where(seen[:, None], shares, 0.0)
            u = jnp.ones(len(y)) if key is None else self.part.draw_scales(key, natural, filled, path)
            df = super(StudentT, self.part).counts(kept, filled)["df"]
            parts = super(StudentT, self.part).counts(kept * u[:, None], filled) | {"df": df}
        else:
            parts = self._part_counts(shares, y, natural)
        return {
            "initial": jnp.sum(jnp.where(begins[:, None], shares, 0.0), axis=0),
            "transition": shares[:-1].T @ pairs,
            "parts": parts,
        }

    def _part_counts(self, shares: Array, y: Array, natural: Tree) -> Tree:
        seen, filled = _filled(self.part, y)
        return self.part.counts(jnp.where(seen[:, None], shares, 0.0), filled, natural)

    # ---- questions, at one parameter tree ----

    @in_double
    def filter(self, params: Tree, y: Any, x: Any = None) -> Filtered:
        """p(z_t | y_<t), p(z_t | y_≤t) and log p(y_t | y_<t)."""
        return host(_filter(self, double(params), asked(self, x, y)))

    @in_double
    def smooth(self, params: Tree, y: Any, x: Any = None) -> Array:
        """p(z_t | y), (T, S)."""
        return host(_smooth(self, double(params), asked(self, x, y)))

    @in_double
    def viterbi(self, params: Tree, y: Any, x: Any = None) -> tuple[Array, Array]:
        """The most probable path (T,) and log p(path, y)."""
        return host(_viterbi(self, double(params), asked(self, x, y)))

    @in_double
    def sample_paths(self, key: KeyLike, params: Tree, y: Any, num_samples: int, x: Any = None) -> Array:
        """Paths from p(z | y), (num_samples, T)."""
        return host(_sample_paths(self, jax.random.split(as_key(key), num_samples), double(params), asked(self, x, y)))

    @in_double
    def simulate(self, key: KeyLike, params: Tree, num_steps: int) -> tuple[Array, Array]:
        """One sequence by ancestral sampling: states z (T,), then y (T, d)."""
        return host(_simulate(self, num_steps, as_key(key), double(params)))

    @in_double
    def forecast(self, key: KeyLike, draws: Tree, y: Any, horizon: int, x: Any = None, units: str = "units of the series") -> Any:
        """Simulated futures of the (last) sequence in y, one for each parameter tree stacked in `draws` (`fit.sample(key, n)`): an
        `al.series.Forecast` with paths (n, horizon), or (n, horizon, d) where y has several columns."""
        from aleator.series import Forecast

        batch, draws = asked(self, x, y), double(draws)
        if isinstance(self.part, Autoregressive):
            begins, lags = check_sequences(x, len(batch.y)), self.part.lags
            own = len(begins) - int(np.flatnonzero(begins)[-1])  # rows of the last sequence: the past is not that of the one before
            if own < lags:
                raise DataError(message("The past is not known.", f"{own} rows of the last sequence", f"{lags}, one a lag", "pass more"))
            if not bool(jnp.all(jnp.isfinite(rows_of(batch.y)[-lags:]))):
                raise DataError(message("The past is not known.", "NaN among the last rows", "values", "forecast from an earlier row"))
        keys = jax.random.split(as_key(key), len(jax.tree.leaves(draws)[0]))
        paths = np.asarray(_futures(self, horizon, keys, draws, batch))
        return Forecast(paths[..., 0] if paths.shape[-1] == 1 else paths, units)

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        """initial (S,), transition (S, S) and the part's parameters by name, in y's units."""
        params = double(params)
        natural = {name: self.families[name].natural(params[name]) for name in ("initial", "transition")}
        return host({name: jnp.exp(logs) for name, logs in natural.items()} | self.part.constrain(params["parts"]))


# Compiled once a model and shape, however often they are asked.


@functools.partial(jax.jit, static_argnums=0)
def _filter(model: HMM, params: Tree, batch: Batch) -> Filtered:
    return model.passed(model.natural(params), batch)[0]


@functools.partial(jax.jit, static_argnums=0)
def _smooth(model: HMM, params: Tree, batch: Batch) -> Array:
    natural = model.natural(params)
    passed, begins, _ = model.passed(natural, batch)
    return (backward_parallel if model.parallel else backward)(passed, natural["transition"], begins)


@functools.partial(jax.jit, static_argnums=0)
def _viterbi(model: HMM, params: Tree, batch: Batch) -> tuple[Array, Array]:
    natural = model.natural(params)
    begins, rows = model._laid(batch)
    return viterbi(natural["initial"], natural["transition"], model.emissions(natural, rows), begins)


@functools.partial(jax.jit, static_argnums=0)
def _sample_paths(model: HMM, keys: Array, params: Tree, batch: Batch) -> Array:
    natural = model.natural(params)
    passed, begins, _ = model.passed(natural, batch)
    return jax.vmap(lambda key: draw_path(key, passed, natural["transition"], begins))(keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _simulate(model: HMM, num_steps: int, key: Key, params: Tree) -> tuple[Array, Array]:
    key_first, key_path, key_part = jax.random.split(key, 3)
    natural = model.natural(params)
    first = jax.random.categorical(key_first, natural["initial"]).astype(jnp.int32)
    path = jnp.concatenate([first[None], _walk(key_path, natural["transition"], first, num_steps - 1)])
    return path, model.part.simulate(key_part, params["parts"], path)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _futures(model: HMM, horizon: int, keys: Array, draws: Tree, batch: Batch) -> Array:
    past = {"past": rows_of(batch.y)[-model.part.lags :]} if isinstance(model.part, Autoregressive) else {}

    def one(item: tuple[Key, Tree]) -> Array:
        key, params = item
        key_now, key_path, key_part = jax.random.split(key, 3)
        natural = model.natural(params)
        now = model.passed(natural, batch)[0].filtered[-1]
        state = jax.random.categorical(key_now, jnp.log(jnp.maximum(now, TINY))).astype(jnp.int32)
        return model.part.simulate(key_part, params["parts"], _walk(key_path, natural["transition"], state, horizon), **past)

    return jax.lax.map(one, (keys, draws))


def check_sequences(x: Any, num_rows: int) -> np.ndarray:
    """Where sequences begin, (T,): x is None, or ids of whole numbers, each sequence in one piece."""
    if x is None:
        return np.arange(num_rows) == 0
    ids = np.asarray(x)
    if ids.shape not in ((num_rows,), (num_rows, 1)) or not np.all(ids == np.floor(ids)):
        got = f"x of shape {ids.shape}, dtype {ids.dtype}"
        raise DataError(
            message("These are not the ids of sequences.", got, f"whole numbers of shape ({num_rows},)", "pass (ids, y), or y alone")
        )
    ids = ids.ravel()
    begins = np.concatenate([[True], ids[1:] != ids[:-1]])
    firsts, times = np.unique(ids[begins], return_counts=True)
    if (times > 1).any():
        raise DataError(
            message("A sequence is in pieces.", f"id {firsts[times > 1][0]} comes back", "each id in one run of rows", "sort the rows")
        )
    return begins


def check_seen(rows: np.ndarray) -> np.ndarray:
    """Which rows have anything observed, (T,)."""
    seen = ~np.isnan(rows).all(axis=1)
    if not seen.any():
        raise DataError(message("Every row is missing.", f"{len(rows)} rows of NaN", "some values", "pass what was observed"))
    return seen


def check_weights(batch: Batch) -> None:
    if batch.weight is not None:
        raise DataError(message("Steps of a sequence have no weights.", "weights", "None", "drop them, or repeat whole sequences"))


def sequence_begins(x: Any, num_rows: int) -> Array:
    """As `check_sequences`, under jit and without the checks."""
    if x is None:
        return jnp.arange(num_rows) == 0
    ids = jnp.ravel(x)
    return jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])


def ends(begins: Array) -> Array:
    """Whether the row is the last of its sequence."""
    return jnp.concatenate([begins[1:], jnp.ones(1, bool)])


def _scaled(logs: Array) -> tuple[Array, Array]:
    """exp(logs) scaled to sum to one, and the log of the sum."""
    most = jax.lax.stop_gradient(jnp.max(logs))
    weights = jnp.exp(logs - most)
    total = jnp.sum(weights)
    return weights / total, most + jnp.log(total)


def _backwards(passed: Filtered, transition: Array, begins: Array) -> Array:
    """p(z_t = i | z_{t+1} = j, y_≤t) as matrices [t, j, i]; at the end of a sequence p(z_t = i | y_≤t) whatever follows."""
    later = jnp.concatenate([passed.predicted[1:], jnp.ones_like(passed.predicted[:1])])
    back = passed.filtered[:, None, :] * transition.T / later[:, :, None]
    return jnp.where(ends(begins)[:, None, None], passed.filtered[:, None, :], back)


def _walk(key: Key, log_transition: Array, state: Array, num_steps: int) -> Array:
    """The next `num_steps` states."""
    noise = jax.random.gumbel(key, (num_steps, len(log_transition)))

    def one(state: Any, gumbel: Any) -> tuple[Any, Any]:
        new = jnp.argmax(log_transition[state] + gumbel).astype(jnp.int32)
        return new, new

    return jax.lax.scan(one, state, noise)[1]


def _filled(part: Part, y: Array) -> tuple[Array, Array]:
    """Which rows have anything observed (T,), and y with zeros in those that do not, for parts that cannot take NaN."""
    seen = ~jnp.all(jnp.isnan(y), axis=1)
    return seen, y if part.missing or isinstance(part, Autoregressive) else jnp.where(seen[:, None], y, 0.0)


def double(params: Tree) -> Tree:
    """Parameters from anywhere, in double precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(float)), params)


def host(tree: Tree) -> Tree:
    """NumPy arrays for answers, since double precision mixes with nothing outside; what is being traced stays so."""
    if isinstance(tree, dict):  # in the order given, which a map over trees would sort
        return {name: host(value) for name, value in tree.items()}
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf), tree)


def asked(model: Any, x: Any, y: Any) -> Batch:
    """What a question is about, checked."""
    rows = model.observed(y)
    check_sequences(x, len(rows))
    return Batch(None if x is None else jnp.asarray(x), jnp.asarray(rows), None, jnp.arange(len(rows)))
