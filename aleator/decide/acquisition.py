"""Which rows to label next: scores of single rows, and batches whose rows tell different things (B14).

Draws of class probabilities are (S, rows, K), each draw one function at all rows, so that rows can be looked at together; draws of means of numeric
targets are (S, rows). Everything is in nats and higher means more worth labelling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, MethodError, message
from aleator._quadrature import discrete_entropy
from aleator._random import as_key, seed_of, split
from aleator._typing import KeyLike
from aleator.decide._inputs import probabilities

MAX_CONFIGURATIONS = 10_000  # joint labellings of the batch so far that are enumerated
DRAWN_CONFIGURATIONS = 4096  # drawn beyond that, the same for all candidates
CANDIDATES = 256  # rows looked at together


class Batch(NamedTuple):
    """rows (b,): in the order they were chosen; value (b,): the criterion after each, nats where it is an information."""

    rows: np.ndarray
    value: np.ndarray


def entropy(draws: Any) -> np.ndarray:
    """H[y], (rows,)."""
    return discrete_entropy(probabilities(draws, 3).mean(axis=0))


def bald(draws: Any) -> np.ndarray:
    """I[y; θ] = H[y] − E_θ H[y | θ], (rows,).

    >>> round(float(bald([[[0.9, 0.1]], [[0.1, 0.9]]])[0]), 6)
    0.368064
    """
    probs = probabilities(draws, 3)
    return np.maximum(discrete_entropy(probs.mean(axis=0)) - discrete_entropy(probs).mean(axis=0), 0.0)


def variation_ratio(draws: Any) -> np.ndarray:
    """1 − max_c p(c), (rows,)."""
    return 1 - probabilities(draws, 3).mean(axis=0).max(axis=-1)


def mean_std(draws: Any) -> np.ndarray:
    """Mean over classes of the standard deviation of p(c | θ) over θ, (rows,)."""
    return probabilities(draws, 3).std(axis=0).mean(axis=-1)


def epig(draws: Any, targets: Any, noise: Any = 0.0, target_noise: Any = 0.0) -> np.ndarray:
    """Expected predictive information gain: the mean over target rows of I[y; y*], (rows,): what a label tells about the predictions that matter.

    Classes: p(y, y*) is the mean over draws of the product. Numbers, draws of f (S, rows) and (S, t): −½ log(1 − ρ²) with ρ the correlation of labels, whose
    variances are those of f plus `noise` and `target_noise` (a number, or one a row); exact for Gaussian f up to the draws.
    """
    pool, wanted = np.asarray(draws, float), np.asarray(targets, float)
    if pool.ndim == 2:
        pool, wanted = _centred(pool), _centred(wanted)
        count = len(pool) - 1
        spread = np.sum(pool**2, axis=0) / count + np.asarray(noise, float)
        target_spread = np.sum(wanted**2, axis=0) / count + np.asarray(target_noise, float)
        square = (pool.T @ wanted / count) ** 2 / np.maximum(spread[:, None] * target_spread, 1e-300)
        return np.mean(-0.5 * np.log1p(-np.minimum(square, 1 - 1e-12)), axis=1)
    pool, wanted = probabilities(pool, 3), probabilities(wanted, 3)
    num, rows, classes = pool.shape
    other, apart = wanted.reshape(num, -1), discrete_entropy(wanted.mean(axis=0)).mean()
    gains = np.empty(rows)
    step = max(1, 2**23 // (classes * other.shape[1]))
    for start in range(0, rows, step):
        part = pool[:, start : start + step]
        joint = np.einsum("src,st->rct", part, other, optimize=True).reshape(part.shape[1], classes, -1, classes) / num
        together = -np.sum(np.where(joint > 0, joint * np.log(np.where(joint > 0, joint, 1.0)), 0.0), axis=(1, 3)).mean(axis=1)
        gains[start : start + step] = discrete_entropy(part.mean(axis=0)) + apart - together
    return np.maximum(gains, 0.0)


def variance_reduction(draws: Any, noise: Any, targets: Any) -> np.ndarray:
    """How much labelling a row lowers the mean variance over target rows (ALC, Cohn): mean_t Cov(f, f_t)²/(Var f + σ²), (rows,).

    draws (S, rows), targets (S, t): draws of f at candidates and at the rows that matter; noise: σ² of a label, a number or (rows,). Exact
    for Gaussian f up to the draws.
    """
    pool, wanted = _centred(draws), _centred(targets)
    covariance = pool.T @ wanted / (len(pool) - 1)
    return np.mean(covariance**2, axis=1) / (np.sum(pool**2, axis=0) / (len(pool) - 1) + np.asarray(noise, float))


def conditioned(draws: Any, row: int, noise: Any) -> np.ndarray:
    """Centred draws of f, (S, rows) or (S, rows, k), as they would spread once a row was labelled with noise σ² (k,): their covariance is the Gaussian's

        Cov(f, f') − Cov(f, f_r) Cov(f_r, f')/(Var f_r + σ²)

    whatever the label. With g the draws at the row, u = g/|g| and ρ = Var f_r/(Var f_r + σ²), that is (I − (1 − √(1 − ρ)) uuᵀ) times the draws: no
    covariance of the pool is ever formed. The targets of a row are labelled together, one after the other.

    >>> twice = conditioned(np.array([[1.0, 1.0], [-1.0, -1.0]]), 0, 2.0)  # two rows that tell the same, of variance 2
    >>> np.var(twice, axis=0, ddof=1).round(6)
    array([1., 1.])
    """
    values = np.array(draws, float)
    left = values.reshape(len(values), values.shape[1], -1)
    for column, level in enumerate(np.broadcast_to(np.asarray(noise, float), left.shape[2:])):
        own = left[:, row, column]
        size = own @ own
        if size > 0:
            shrink = 1 - np.sqrt(1 - size / (size + (len(left) - 1) * level))
            left = left - shrink * np.multiply.outer(own / size, np.tensordot(own, left, 1))
    return left.reshape(values.shape)


def batch_gains(key: KeyLike, draws: Any, noise: Any, score: Callable[[np.ndarray], np.ndarray], num: int, excluded: Any = ()) -> Batch:
    """A batch for numeric targets, greedily: the row of the highest score(centred draws) → (rows,), then the same with the draws `conditioned` on it, so that
    rows that tell the same are not taken twice. draws (S, rows) or (S, rows, k); noise: σ² of a label, (rows,) or (rows, k). value: each row's score when it was chosen.
    """
    values = np.asarray(draws, float)
    taken = list(row_numbers(excluded, values.shape[1]))
    left = _centred(values.reshape(len(values), -1)).reshape(values.shape)
    check_batch(num, values.shape[1] - len(set(taken)))
    chosen: list[int] = []
    found: list[float] = []
    for one in split(as_key(key), num):
        best = top(one, score(left), 1, taken)
        row = int(best.rows[0])
        chosen, found, taken = [*chosen, row], [*found, float(best.value[0])], [*taken, row]
        left = conditioned(left, row, np.asarray(noise, float)[row])
    return Batch(np.array(chosen), np.array(found))


def joint_information(draws: Any) -> float:
    """I[y₁, …, y_b; θ] of all rows together, by enumerating their K^b joint labels.

    >>> twice = [[[0.9, 0.1]] * 2, [[0.1, 0.9]] * 2]
    >>> round(joint_information(twice), 6)
    0.514375
    """
    probs = probabilities(draws, 3)
    num, rows, classes = probs.shape
    if classes**rows > MAX_CONFIGURATIONS * classes:
        raise DataError(
            message("There are too many joint labels.", f"{classes}^{rows}", f"at most {MAX_CONFIGURATIONS * classes}", "use fewer rows")
        )
    joint = np.ones((1, num))
    for row in range(rows):
        joint = (joint[:, None, :] * probs[:, row].T[None]).reshape(-1, num)
    return float(discrete_entropy(joint.mean(axis=1)) - discrete_entropy(probs).mean(axis=0).sum())


def batch_bald(key: KeyLike, draws: Any, num: int, excluded: Any = ()) -> Batch:
    """A batch chosen greedily for I[y₁, …, y_b; θ] (Kirsch et al. 2019): rows that tell the same thing are not taken twice.

    The gain of a row is averaged over all labels of the batch so far while there are at most `MAX_CONFIGURATIONS`, over drawn ones beyond. A row's gain never grows as the batch does (submodularity), so its last gain is a bound: rows are tried from the highest bound
    down and the search ends when the best gain is above every bound left. That gives the greedy batch itself at a fraction of its cost.
    """
    probs = probabilities(draws, 3)
    size, rows, _ = probs.shape
    generator = np.random.Generator(np.random.Philox(seed_of(as_key(key))))
    allowed = np.setdiff1d(np.arange(rows), row_numbers(excluded, rows))
    check_batch(num, len(allowed))
    known = discrete_entropy(probs)  # H[y | θ_s], (S, rows)
    bound = np.full(rows, -np.inf)
    bound[allowed] = (discrete_entropy(probs.mean(axis=0)) - known.mean(axis=0))[allowed]
    labels = _Labels(np.ones((1, size)), np.ones(1))
    chosen: list[int] = []
    values: list[float] = []
    for _ in range(num):
        fresh = np.zeros(rows, bool)
        while not fresh[np.argmax(bound)]:
            stale = np.where(fresh, -np.inf, bound)
            ahead = np.argpartition(-stale, min(CANDIDATES, rows) - 1)[:CANDIDATES]
            ahead = ahead[stale[ahead] > -np.inf]
            # What is known given θ is averaged over the same labels, so that a gain is never negative and labels' noise cancels.
            given = labels.chance @ labels.ratio / size @ known[:, ahead]
            bound[ahead] = np.maximum(_conditional_entropies(labels, probs, ahead) - given, 0.0)
            fresh[ahead] = True
        best = int(np.argmax(bound))
        chosen.append(best)
        values.append((values[-1] if values else 0.0) + float(bound[best]))
        bound[best] = -np.inf
        labels = _extend(generator, labels, probs[:, chosen])
    return Batch(np.array(chosen), np.array(values))


class _Labels(NamedTuple):
    """Joint labels c of the batch so far: ratio (J, S) = p(c | θ_s)/p(c), chance (J,) their shares in an average over c."""

    ratio: np.ndarray
    chance: np.ndarray


def _conditional_entropies(labels: _Labels, probs: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """E_c H[y | c] for each candidate, (c,): p(y | c) = (1/S) Σ_s p(y | θ_s) p(c | θ_s)/p(c). Candidates are filled up to one size: one compilation."""
    full = np.concatenate([ahead, np.full(CANDIDATES - len(ahead), ahead[0])])
    return np.asarray(
        _averaged_entropy(labels.ratio.astype(np.float32), labels.chance.astype(np.float32), probs[:, full].astype(np.float32))
    )[: len(ahead)]


@jax.jit
def _averaged_entropy(ratio: jax.Array, chance: jax.Array, candidates: jax.Array) -> jax.Array:
    size, rows, classes = candidates.shape
    given = ratio @ candidates.reshape(size, -1) / size
    return -(chance @ jnp.where(given > 0, given * jnp.log(given), 0.0)).reshape(rows, classes).sum(axis=1)


def _extend(generator: np.random.Generator, labels: _Labels, batch: np.ndarray) -> _Labels:
    """Labels of the batch with its newest row: all of them, or drawn ones with equal shares."""
    size, rows, classes = batch.shape
    if classes**rows <= MAX_CONFIGURATIONS:
        joint = (labels.chance[:, None, None] * labels.ratio[:, None, :] * batch[:, -1].T[None]).reshape(-1, size)
        chance = joint.mean(axis=1)
        return _Labels(joint / np.maximum(chance, 1e-300)[:, None], chance)
    source = np.arange(DRAWN_CONFIGURATIONS) % size
    edges = np.cumsum(batch, axis=-1)[source]  # (J, rows, K)
    drawn = np.argmax(edges >= generator.random((len(source), rows, 1)) * edges[..., -1:], axis=-1)
    joint = np.zeros((len(source), size))
    for row in range(rows):
        joint += np.log(np.maximum(batch[:, row].T[drawn[:, row]], 1e-300))
    joint = np.exp(joint - joint.max(axis=1, keepdims=True))
    return _Labels(joint / joint.mean(axis=1, keepdims=True), np.full(len(source), 1 / len(source)))


def diverse(key: KeyLike, probs: Any, embedding: Any, num: int, excluded: Any = ()) -> Batch:
    """Far apart and unsure at once (BADGE, Ash et al. 2020): k-means++ seeding on gradients (p − 1{y = ŷ}) ⊗ embedding, ŷ the likeliest class.

    Distances of such outer products factorise, so that they are never formed. value: squared distance to the nearest one chosen before.
    """
    p, features = probabilities(probs), np.asarray(embedding, float)
    generator = np.random.Generator(np.random.Philox(seed_of(as_key(key))))
    allowed = np.setdiff1d(np.arange(len(p)), row_numbers(excluded, len(p)))
    check_batch(num, len(allowed))
    error = p - np.eye(p.shape[1])[np.argmax(p, axis=1)]
    norms = np.sum(error**2, axis=1) * np.sum(features**2, axis=1)
    nearest = np.where(np.isin(np.arange(len(p)), allowed), norms, 0.0)
    chosen: list[int] = []
    values: list[float] = []
    for place in range(num):
        free = allowed[~np.isin(allowed, chosen)]
        mass = nearest[free]
        pick = free[np.argmax(mass)] if place == 0 else _weighted(generator, free, mass)
        values.append(float(nearest[pick]))
        chosen.append(int(pick))
        apart = norms + norms[pick] - 2 * (error @ error[pick]) * (features @ features[pick])
        nearest = np.minimum(nearest, np.maximum(apart, 0.0)) if place else np.maximum(apart, 0.0)
    return Batch(np.array(chosen), np.array(values))


def top(key: KeyLike, scores: Any, num: int, excluded: Any = ()) -> Batch:
    """The rows of the highest scores, ties broken at random."""
    values = np.asarray(scores, float)
    if values.ndim != 1 or np.any(np.isnan(values)):
        raise DataError(
            message(
                "These are no scores.",
                f"shape {values.shape}, {int(np.isnan(values).sum())} NaN",
                "(rows,) numbers",
                "check the predictive",
            )
        )
    allowed = np.setdiff1d(np.arange(len(values)), row_numbers(excluded, len(values)))
    check_batch(num, len(allowed))
    tie = np.random.Generator(np.random.Philox(seed_of(as_key(key)))).permutation(len(values))
    order = allowed[np.lexsort((tie[allowed], -values[allowed]))][:num]
    return Batch(order, values[order])


def _weighted(generator: np.random.Generator, rows: np.ndarray, mass: np.ndarray) -> int:
    return int(generator.choice(rows, p=mass / mass.sum()) if mass.sum() > 0 else generator.choice(rows))


def row_numbers(excluded: Any, rows: int) -> np.ndarray:
    """Numbers of the rows not to choose: as given, or where a mask (rows,) is true, which would otherwise pass for the rows 0 and 1."""
    given = np.asarray(excluded)
    if given.dtype == bool and given.shape == (rows,):
        return np.flatnonzero(given)
    numbers = np.asarray(excluded, np.int64).ravel()
    if given.dtype == bool or np.any(numbers != given.ravel()) or np.any((numbers < 0) | (numbers >= rows)):
        got = f"{given.dtype} of shape {given.shape}"
        raise DataError(
            message("These rows cannot be excluded.", got, f"row numbers below {rows}, or a mask ({rows},)", "pass the labelled rows")
        )
    return numbers


def check_batch(num: int, left: int) -> None:
    if not 1 <= num <= left:
        raise MethodError(
            message("The batch does not fit the pool.", f"{num} rows asked for", f"1 to {left} unlabelled rows", "ask for fewer")
        )


def _centred(draws: Any) -> np.ndarray:
    values = np.asarray(draws, float)
    if values.ndim != 2 or len(values) < 2 or not np.all(np.isfinite(values)):
        raise DataError(
            message("These are no draws of f.", f"shape {values.shape}", "finite (draws ≥ 2, rows)", "pass fit.functions(key, x)")
        )
    return values - values.mean(axis=0)


SINGLE: dict[str, Callable[[Any], np.ndarray]] = {f.__name__: f for f in (bald, entropy, variation_ratio, mean_std)}
