"""Is this row like the data? Scores from predictions and from the network's last features, with a threshold of known false-alarm rate (A13).

Every score is higher for stranger rows. The threshold is the conformal quantile of the scores of held-out rows, so that a row like them is flagged with
probability at most `false_alarm`, whatever the score. How many strange rows are caught depends on the score, and on them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _outputs, _tree, posterior, sites, store
from aleator._cache import cached
from aleator._errors import DataError, MethodError, ModelError, message
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.decide._inputs import between, columns
from aleator.decide.conformal import conformal_quantile
from aleator.predictive import Predictive, PredictiveMixture, PredictiveViews

NUM_SAMPLES = 200
NUM_NEIGHBOURS = 20
MAX_NEIGHBOURS_ROWS = 20_000  # training rows kept to look for neighbours among
WIDE = 1024  # inputs of a layer whose covariance is estimated; wider ones are averaged over positions
MEMBERS = 5  # networks of a posterior whose features are looked at


class Shift(NamedTuple):
    """Do the scores of a batch come from another distribution than those of the held-out rows? Kolmogorov–Smirnov statistic, its p-value,
    and the probability that a row of the batch scores above a held-out one (½: no difference)."""

    statistic: float
    p_value: float
    auroc: float


@dataclasses.dataclass(frozen=True)
class FromPredictions:
    """A score in `SCORES` of predictions by num_samples draws."""

    score: str
    num_samples: int

    def __call__(self, key: Key, fit: Any, x: Any) -> np.ndarray:
        return SCORES[self.score](fit.predict(key, x, self.num_samples))


@dataclasses.dataclass(frozen=True, eq=False)
class FromFeatures:
    """A score in `FEATURE_SCORES`, averaged over a few networks of the posterior, the same at training rows and later: features of other weights would be
    on other axes. weights: their parameters, leaves (members, …) in the order of the model's; learnt: for each what the score keeps of training features."""

    score: str
    weights: tuple[np.ndarray, ...]
    learnt: tuple[Any, ...]

    def __call__(self, key: Key, fit: Any, x: Any) -> np.ndarray:
        members = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(fit.model.init, jax.random.key(0))), self.weights)
        _, rate, every = FEATURE_SCORES[self.score]
        return np.mean([rate(state, rows) for state, rows in zip(self.learnt, _at(fit, members, x, every), strict=True)], axis=0)


Rate = FromPredictions | FromFeatures


@dataclasses.dataclass(frozen=True, eq=False)
class Detector:
    """`score(key, x)` (rows,), higher is stranger; `flag(key, x)` (rows,) booleans; `shift(key, x)` for a whole batch.

    name: of the score; threshold: flagged above it; reference (n,): sorted scores of held-out rows; false_alarm: the rate asked for.
    """

    fit: Any
    name: str
    threshold: float
    reference: np.ndarray
    false_alarm: float
    rate: Rate

    def score(self, key: KeyLike, x: Any) -> np.ndarray:
        """How strange each row is, (rows,)."""
        return self.rate(as_key(key), self.fit, x)

    def save(self, path: str | os.PathLike) -> None:
        """Write one directory with the fit and what was learnt beside it; `al.load(path)` reads it back, bit for bit."""
        store.save_with(self, path)

    def flag(self, key: KeyLike, x: Any) -> np.ndarray:
        """Which rows are stranger than all but `false_alarm` of the held-out ones, (rows,)."""
        return self.score(key, x) > self.threshold

    def p_value(self, key: KeyLike, x: Any) -> np.ndarray:
        """Conformal p-value of each row, (1 + #{held-out ≥ score})/(n + 1): at most u with probability at most u for rows like the held-out ones."""
        above = len(self.reference) - np.searchsorted(self.reference, self.score(key, x), side="left")
        return (1 + above) / (1 + len(self.reference))

    def shift(self, key: KeyLike, x: Any) -> Shift:
        """A two-sample test on the scores of a batch."""
        from scipy.stats import ks_2samp

        from aleator.criteria import auroc

        scores = self.score(key, x)
        test = ks_2samp(scores, self.reference)
        both = np.concatenate([scores, self.reference])
        return Shift(float(test.statistic), float(test.pvalue), auroc(both, np.arange(len(both)) < len(scores)).value)


def detector(
    key: KeyLike,
    fit: Any,
    held: Any,
    score: str = "entropy",
    train: Any = None,
    false_alarm: float = 0.05,
    num_samples: int = NUM_SAMPLES,
) -> Detector:
    """A detector of rows unlike the data.

    held: inputs of rows like the training data that were not in it; they set the threshold. score: from predictions "entropy", "mutual_information",
    "max_prob" (1 − the largest), "variance" (epistemic, summed over targets), "energy" (−log Σ exp logits); from the inputs of the network's last
    linear map, fitted on train = (x, y): "mahalanobis" (nearest class, shared covariance), "relative_mahalanobis" (less that of all classes together),
    "density" (−log density of class Gaussians), "knn" (distance to the k-th neighbour, directions only); from the inputs of every linear map, x included,
    "layers" (log Mahalanobis distances, each standardised on training rows, added up): what a classifier has learnt to ignore is gone from its last layer.
    """
    between(false_alarm, "false_alarm")
    key_train, key_held = jax.random.split(as_key(key))
    if score in SCORES:
        rate: Rate = FromPredictions(score, num_samples)
    elif score in FEATURE_SCORES:
        rate = _learnt(key_train, fit, train, score)
    else:
        known = ", ".join([*SCORES, *FEATURE_SCORES])
        raise MethodError(message("There is no such score.", repr(score), f"one of {known}", "pass one of them"))
    seen = rate(key_held, fit, held)
    if not np.all(np.isfinite(seen)):
        raise DataError(
            message(
                "A score is not finite.",
                f"{seen[~np.isfinite(seen)][0]} in row {int(np.argmin(np.isfinite(seen)))}",
                "numbers",
                "check the fit",
            )
        )
    return Detector(fit, score, float(conformal_quantile(seen[:, None], 1 - false_alarm)[0]), np.sort(seen), false_alarm, rate)


# ------------------------------------------------------------------------------------------------------------ from predictions


def entropy(predictive: PredictiveViews) -> np.ndarray:
    """Predictive entropy, nats, summed over target columns."""
    return np.asarray(predictive.entropy).reshape(predictive.num_rows, -1).sum(axis=1)


def mutual_information(predictive: PredictiveViews) -> np.ndarray:
    """What a label would tell about f, nats, summed over target columns."""
    return np.asarray(predictive.mutual_information).reshape(predictive.num_rows, -1).sum(axis=1)


def max_prob(predictive: PredictiveViews) -> np.ndarray:
    """One minus the probability of the most probable class."""
    return 1 - np.asarray(predictive.probs).reshape(predictive.num_rows, -1, np.shape(predictive.probs)[-1]).max(axis=-1).mean(axis=1)


def variance(predictive: PredictiveViews) -> np.ndarray:
    """Epistemic variance, summed over targets (or classes): noise in y does not make a row strange."""
    return columns(predictive, predictive.epistemic).sum(axis=1)


def energy(predictive: PredictiveViews) -> np.ndarray:
    """−log Σ_c exp f_c, averaged over draws of the logits; −log(1 + exp f) for binary targets."""
    if isinstance(predictive, PredictiveMixture):
        return np.asarray(sum(w * energy(m) for m, w in zip(predictive.members, predictive.weights, strict=True)))
    if not isinstance(predictive, Predictive) or predictive.support not in ("label", "binary"):
        raise ModelError(
            message("There is no energy here.", f"{predictive.support} targets", "class logits", "use 'entropy' or 'variance'")
        )
    with jax.enable_x64(True):
        logits, log_weights, _ = _outputs.as_draws(predictive.likelihood, predictive.outputs, _outputs.FEW_NODES)
        summed = jnp.sum(jax.nn.softplus(logits), -1) if predictive.support == "binary" else jax.nn.logsumexp(logits, axis=-1)
        return -np.asarray(_outputs.average(log_weights, summed))


SCORES: dict[str, Callable[[PredictiveViews], np.ndarray]] = {
    function.__name__: function for function in (entropy, mutual_information, max_prob, variance, energy)
}


# ---------------------------------------------------------------------------------------------------------------- from features


def features(key: KeyLike, fit: Any, x: Any, num_draws: int = 1) -> np.ndarray:
    """Inputs of the network's last linear map at the rows of x, for draws of the weights: (num_draws, rows, m); positions are averaged."""
    return np.stack([rows for (rows,) in _at(fit, _members(as_key(key), fit, num_draws), x)])


def _members(key: Key, fit: Any, num_draws: int) -> Tree:
    """Weights of a few networks of the posterior."""
    if not hasattr(fit.model, "apply") or not hasattr(fit.model, "weights"):
        raise ModelError(message("There are no features here.", type(fit.model).__name__, "an al.BNN", "use a score from predictions"))
    return fit.posterior.sample(key, num_draws)


def _at(fit: Any, members: Tree, x: Any, every: bool = False) -> list[tuple[np.ndarray, ...]]:
    """For each member the inputs (rows, m) of the last linear map, or of every one."""
    x, evaluate = fit._inputs(x), _features(fit.model, every)
    each = [
        posterior.by_rows(lambda rows: evaluate(_tree.take(members, number), rows), x, lambda n: n * posterior.row_bytes(fit.model, x))  # noqa: B023
        for number in range(_tree.rows(members))
    ]
    return [tuple(rows.astype(np.float64) for rows in layers) for layers in each]


@cached
def _features(model: Any, every: bool) -> Callable:
    """(params, x) → inputs of the last linear map, positions averaged; or of every one, flattened where that is at most `WIDE`: a tuple of (rows, m)."""

    def evaluate(params: Tree, x: Tree) -> tuple[Array, ...]:
        weights = model.weights(params)
        found = [site for site in sites.find(model.apply, weights, x).sites if site.example_axis is not None]
        if not found:
            raise ModelError(message("There are no features here.", "no linear map in the network", "one", "use a score from predictions"))
        chosen = found if every else found[-1:]

        def note(key: Any, site: sites.Site, inputs: Array, operands: sites.Operands, compute: Callable) -> tuple[Array, Any]:
            out = compute(inputs, operands.weight[0], None if operands.bias is None else operands.bias[0])
            return out, inputs if any(site.name == one.name for one in chosen) else None

        _, records = sites.replay(None, model.apply, weights, x, note)

        def rows_of(site: sites.Site) -> Array:
            seen = records[site.name]
            rows = jnp.transpose(seen, site.input_order())
            rows = rows.reshape(rows.shape[0], -1, int(np.prod([seen.shape[axis] for axis in site.unit_axes])))
            return rows.reshape(len(rows), -1) if every and rows[0].size <= WIDE else jnp.mean(rows, axis=1)

        return tuple(rows_of(site) for site in chosen)

    return jax.jit(evaluate)


def _learnt(key: Key, fit: Any, train: Any, score: str) -> FromFeatures:
    if train is None:
        raise DataError(message(f"{score!r} looks at training features.", "train=None", "train=(x, y)", "pass the training data"))
    x, y = (train.x, train.y) if hasattr(train, "x") else (train[0], train[1])
    key_members, key_kind = jax.random.split(key)
    members = _members(key_members, fit, 1 if isinstance(fit.posterior, posterior.Point) else MEMBERS)
    groups = _groups(fit.predict(key_kind, jax.tree.map(lambda leaf: leaf[:1], x), 2), y)
    learn, _, every = FEATURE_SCORES[score]
    learnt = tuple(learn(rows, groups) for rows in _at(fit, members, x, every))
    return FromFeatures(score, tuple(np.asarray(leaf) for leaf in jax.tree.leaves(members)), learnt)


def _groups(predictive: Any, y: Any) -> np.ndarray | None:
    """Class numbers of training rows; None for numeric targets, which make one group."""
    if y is None or predictive.support not in ("label", "binary"):
        return None
    values = np.asarray(y)
    return np.unique(values.reshape(len(values), -1)[:, 0], return_inverse=True)[1] if values.ndim == 1 or values.shape[1] == 1 else None


def _whitener(centred: np.ndarray) -> np.ndarray:
    """L⁻¹ with L Lᵀ the shrunk covariance (Ledoit and Wolf), (m, m)."""
    from sklearn.covariance import ledoit_wolf

    covariance = ledoit_wolf(centred, assume_centered=True)[0] + 1e-9 * (np.mean(centred**2) + 1e-300) * np.eye(centred.shape[1])
    return np.linalg.inv(np.linalg.cholesky(covariance))


def _means(rows: np.ndarray, groups: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    groups = np.zeros(len(rows), np.int64) if groups is None else groups
    return np.stack([rows[groups == g].mean(axis=0) for g in range(groups.max() + 1)]), groups


def _distances(rows: np.ndarray, means: np.ndarray, whitener: np.ndarray) -> np.ndarray:
    """Squared Mahalanobis distances (rows, means)."""
    a, b = rows @ whitener.T, means @ whitener.T
    return np.maximum(np.sum(a**2, axis=1)[:, None] - 2 * a @ b.T + np.sum(b**2, axis=1), 0.0)


def _last(learn: Callable, rate: Callable) -> tuple[Callable, Callable, bool]:
    """A score of the last layer alone."""
    return lambda layers, groups: learn(layers[0], groups), lambda state, layers: rate(state, layers[0]), False


def _fit_layers(layers: tuple[np.ndarray, ...], groups: np.ndarray | None) -> tuple:
    """(class means, whitener, mean and standard deviation of the log distance) of each layer."""

    def one(rows: np.ndarray) -> tuple:
        means, own = _means(rows, groups)
        state = means, _whitener(rows - means[own])
        logs = _log_distance(state, rows)
        return (*state, float(logs.mean()), float(logs.std()) + 1e-12)

    return tuple(one(rows) for rows in layers)


def _log_distance(state: tuple, rows: np.ndarray) -> np.ndarray:
    return np.log(_distances(rows, state[0], state[1]).min(axis=1) + 1e-12)


def _layers(state: tuple, layers: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.sum([(_log_distance(one, rows) - one[2]) / one[3] for one, rows in zip(state, layers, strict=True)], axis=0)


def _fit_mahalanobis(rows: np.ndarray, groups: np.ndarray | None) -> tuple:
    means, groups = _means(rows, groups)
    return means, _whitener(rows - means[groups]), rows.mean(axis=0, keepdims=True), _whitener(rows - rows.mean(axis=0))


def _mahalanobis(state: tuple, rows: np.ndarray) -> np.ndarray:
    return _distances(rows, state[0], state[1]).min(axis=1)


def _relative_mahalanobis(state: tuple, rows: np.ndarray) -> np.ndarray:
    return _mahalanobis(state, rows) - _distances(rows, state[2], state[3])[:, 0]


def _fit_density(rows: np.ndarray, groups: np.ndarray | None) -> tuple[tuple, ...]:
    means, groups = _means(rows, groups)
    own = [rows[groups == g] - mean for g, mean in enumerate(means)]
    return tuple((mean[None], _whitener(part), len(part) / len(rows)) for mean, part in zip(means, own, strict=True))


def _density(state: tuple[tuple, ...], rows: np.ndarray) -> np.ndarray:
    from scipy.special import logsumexp

    terms = [np.log(share) + np.sum(np.log(np.diag(w))) - 0.5 * _distances(rows, mean, w)[:, 0] for mean, w, share in state]
    return 0.5 * rows.shape[1] * np.log(2 * np.pi) - logsumexp(np.stack(terms), axis=0)


def _directions(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _fit_knn(rows: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    if len(rows) > MAX_NEIGHBOURS_ROWS:
        rows = rows[np.random.default_rng(0).choice(len(rows), MAX_NEIGHBOURS_ROWS, replace=False)]
    return _directions(rows)


def _knn(state: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return neighbour_distance(state, _directions(rows), NUM_NEIGHBOURS)


def neighbour_distance(known: np.ndarray, rows: np.ndarray, place: int) -> np.ndarray:
    """Euclidean distance of each row to its `place`-th nearest known one (1: the nearest), (rows,)."""
    place = min(place, len(known)) - 1
    square = np.sum(known**2, axis=1)
    found = []
    for block in np.array_split(rows, max(1, len(rows) * len(known) // 2**24)):
        apart = np.sum(block**2, axis=1)[:, None] - 2 * block @ known.T + square
        found.append(np.partition(apart, place, axis=1)[:, place])
    return np.sqrt(np.maximum(np.concatenate(found), 0.0))


# name: (learn(layers, groups) → state, rate(state, layers) → (rows,), does it look at every layer?)
FEATURE_SCORES: dict[str, tuple[Callable, Callable, bool]] = {
    "mahalanobis": _last(_fit_mahalanobis, _mahalanobis),
    "relative_mahalanobis": _last(_fit_mahalanobis, _relative_mahalanobis),
    "density": _last(_fit_density, _density),
    "knn": _last(_fit_knn, _knn),
    "layers": (_fit_layers, _layers, True),
}
