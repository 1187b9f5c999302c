"""Whether an input is needed at all: Bayes factors and spike-and-slab probabilities."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator import _functions, _tree
from aleator._errors import DataError, MethodError, ModelError, message
from aleator._fit import Fit
from aleator._fit import fit as fit_model
from aleator._random import as_key, split
from aleator._typing import KeyLike
from aleator.data import Data, as_data
from aleator.explain._shared import named, table
from aleator.methods import Exact
from aleator.model import LinearModel
from aleator.posterior import LinearGaussian
from aleator.priors import Normal

MAX_SUBSETS = 1024  # of inputs, up to which all are compared when the evidence is exact
FAR = 5.0  # standard deviations from zero beyond which a Gaussian tail is an extrapolation


class BayesFactor(NamedTuple):
    """log p(D | with) − log p(D | without), nats; stderr 0 where kind is "exact". note: what to keep in mind."""

    log_value: float
    stderr: float
    kind: str
    note: str = ""

    def probability(self, prior: float = 0.5) -> float:
        """p(with | D) for a prior probability."""
        return float(_logistic(self.log_value + np.log(prior) - np.log1p(-prior)))


def savage_dickey(key: KeyLike, fit: Fit, index: int | Sequence[int], path: str | None = None, num_samples: int = 4000) -> BayesFactor:
    """The Bayes factor for β ≠ 0 of linear coefficients from one fit: p(β = 0) / p(β = 0 | D).

    index: feature numbers of a `LinearModel`, or rows of the weight at `path` (default: the linear part of a `Partial` network), all of
    which are zero under the null. The ratio is the Bayes factor only where the rest of the prior does not depend on β: independent Normal
    priors with fixed scales. It is exact for `al.Exact` with known noise; else the posterior density at 0 is that of a Gaussian with
    the draws' moments, with a jackknife error over twenty blocks, and a note where 0 lies beyond what draws can show. With noise-scaled
    priors σ depends on β = 0 and the ratio is wrong: use `relevance`, which compares evidences.
    """
    chosen = np.atleast_1d(np.asarray(index, int))
    model, posterior = fit.model, fit.posterior
    if not isinstance(getattr(model, "prior", None), Normal) or getattr(model, "scaled_by_noise", False):
        got = "weights in units of the noise" if getattr(model, "scaled_by_noise", False) else repr(getattr(model, "prior", None))
        raise ModelError(
            message(
                "The Savage–Dickey ratio is not a Bayes factor here.",
                got,
                "an independent al.Normal prior with fixed scales",
                "use al.explain.relevance, which compares evidences",
            )
        )
    if isinstance(posterior, LinearGaussian):
        _check_index(chosen, posterior.mean.shape[1])
        scale = model.prior.scales({"weight": posterior.mean}, {"weight": posterior.mean.shape[1]})["weight"]
        null = np.zeros(len(chosen))
        prior = _log_normal(null - model.prior.loc, np.eye(len(chosen)) * scale**2)
        after = [
            _log_normal(null - m[chosen], c[np.ix_(chosen, chosen)])
            for m, c in zip(posterior.mean, posterior.operator.covariance(), strict=True)
        ]
        return BayesFactor(float(sum(prior - a for a in after)), 0.0, "exact")
    return _from_draws(key, fit, chosen, path, num_samples)


def _from_draws(key: KeyLike, fit: Fit, index: np.ndarray, path: str | None, num_samples: int) -> BayesFactor:
    functions = _functions.draw(as_key(key), fit, num_samples, ordered=True)
    model = fit.model
    if not functions.drawn or not hasattr(model, "weights"):
        raise MethodError(
            message("There are no draws of weights.", type(fit.posterior).__name__, "a posterior over weights", "use a sampler")
        )
    weights = jax.vmap(model.weights)(functions.given)
    paths = _tree.paths(weights)
    path = ("linear.weight" if path is None else path) if not isinstance(model, LinearModel) else "weight"
    if path not in paths:
        raise ModelError(message("There is no such weight.", path, f"one of {paths}", "pass the path of a linear coefficient"))
    number = paths.index(path)
    leaf = np.asarray(jax.tree.leaves(weights)[number], np.float64)
    first = isinstance(model, LinearModel) or getattr(getattr(model, "network", None), "fan_axes", "last") == "first"
    values = np.moveaxis(leaf, 2, 1) if first else leaf
    _check_index(index, values.shape[1])
    values = values[:, index].reshape(len(leaf), -1)
    template = _tree.take(weights, 0)
    scale = jax.tree.leaves(model.prior.scales(template, model.fan_in(template)))[number]
    prior = _log_normal(np.full(values.shape[1], -model.prior.loc), np.eye(values.shape[1]) * scale**2)
    density = lambda draws: _log_normal(-draws.mean(0), np.atleast_2d(np.cov(draws.T)))
    blocks = np.array_split(np.arange(len(values)), 20)
    if len(values) < 40 or np.any(values.std(0) == 0):
        raise MethodError(
            message("The posterior has no spread to judge by.", f"{len(values)} draws", "a posterior with variance", "use a sampler or VI")
        )
    left = np.array([density(np.delete(values, block, axis=0)) for block in blocks])
    error = np.sqrt((len(blocks) - 1) * np.mean((left - left.mean()) ** 2))
    distance = np.sqrt(values.mean(0) @ np.linalg.solve(np.atleast_2d(np.cov(values.T)), values.mean(0)))
    note = f"Zero is {distance:.1f} standard deviations away: a Gaussian tail, not draws." if distance > FAR else ""
    return BayesFactor(float(prior - density(values)), float(error), "estimate", note)


@dataclasses.dataclass(frozen=True, eq=False)
class Relevance:
    """Spike-and-slab over inputs: p(z_j = 1 | D), z_j whether input (group) j is in the model.

    probability, log_bayes_factor [nats], stderr of the latter (D,). With subsets (2^D, D) all models were compared: weights (2^D,) are their
    posterior probabilities, and the Bayes factor of an input is averaged over the others. Without, each input was taken out of the full
    model by itself. kind: of the evidences.
    """

    names: tuple[str, ...]
    probability: np.ndarray
    log_bayes_factor: np.ndarray
    stderr: np.ndarray
    kind: str
    note: str
    subsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def expected_size(self) -> float:
        """E[number of inputs | D] = Σ p(z_j = 1 | D), where all subsets were compared."""
        if self.weights is None or self.subsets is None:
            raise MethodError(
                message("Inputs were taken out one at a time.", "no posterior over subsets", "all subsets", "pass search='all'")
            )
        return float(self.weights @ self.subsets.sum(axis=1))

    def __str__(self) -> str:
        head = ("input", "p(needed | D)", "log Bayes factor [nats]")
        error = lambda e: f" ± {e:.2g}" if e else ""
        # The error of a probability: that of the log odds times p(1 − p).
        rows = [
            (name, f"{p:.4f}{error(e * p * (1 - p))}", f"{b:.2f}{error(e)}")
            for name, p, b, e in zip(self.names, self.probability, self.log_bayes_factor, self.stderr, strict=True)
        ]
        how = "all subsets compared" if self.subsets is not None else "each taken out of the full model"
        return "\n".join([table(head, rows), f"{how}; evidences: {self.kind}. {self.note}".rstrip()])


def relevance(
    key: KeyLike,
    model: Any,
    data: Any,
    method: Any,
    groups: Sequence[Sequence[int]] | None = None,
    names: Sequence[str] | None = None,
    prior: float | Sequence[float] = 0.5,
    search: str = "auto",
    num_starts: int = 3,
) -> Relevance:
    """The probability that each input is needed, from the evidence of models with and without it.

    A model without an input is the same model with that column held at 0: the weights that leave it keep their prior, which integrates to
    one, so its evidence is that of the smaller model. groups: columns that go in and out together (default: each by itself). prior: of each
    indicator. method must give a log evidence: al.Exact (exact), a sampler that estimates it, or al.Variational (bounds: differences of
    bounds are not Bayes factors unless their gaps are equal, and the note says so). For bounds the full model is fitted from num_starts
    starts, and the best is where the others begin; stderr is Monte Carlo error only, how far the starts differ is in the note.
    search: "all" compares every subset, 2^groups fits; "one" takes one group out of the full model at a time, groups + 1 fits; "auto" is
    "all" for al.Exact up to ten groups.

    >>> import aleator as al
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(50, 2))
    >>> model = al.LinearModel(al.features.Identity(), al.Gaussian(0.5), al.Normal(1.0))
    >>> found = relevance(0, model, (x, 2 * x[:, 0] + 0.5 * rng.normal(size=50)), al.Exact())
    >>> bool(found.probability[0] > 0.99), bool(found.probability[1] < 0.3)
    (True, True)
    """
    data = as_data(data)
    if not isinstance(data, Data) or not hasattr(data.x, "ndim") or data.x.ndim != 2:
        raise DataError(
            message("Inputs are columns of a table.", type(getattr(data, "x", data)).__name__, "x of shape (n, D)", "pass (x, y)")
        )
    columns = data.x.shape[1]
    given = [[j] for j in range(columns)] if groups is None else groups
    chosen = [tuple(int(c) for c in group) for group in given]
    flat = [c for group in chosen for c in group]
    if not flat or len(set(flat)) != len(flat) or not all(group and min(group) >= 0 and max(group) < columns for group in chosen):
        raise DataError(
            message("These groups of inputs do not fit.", groups, f"disjoint columns below {columns}", "pass e.g. [[0], [1, 2]]")
        )
    names = named(names, len(chosen), [",".join(f"x{c}" for c in group) for group in chosen])
    chances = np.broadcast_to(np.asarray(prior, float), (len(chosen),))
    if not np.all((chances > 0) & (chances < 1)):
        raise DataError(message("The prior of an indicator is a probability.", prior, "strictly between 0 and 1", "pass e.g. prior=0.5"))
    if search not in ("auto", "all", "one"):
        raise MethodError(message("Unknown search.", repr(search), "'auto', 'all' or 'one'", "leave search='auto'"))
    if search == "all" and 2 ** len(chosen) > MAX_SUBSETS:
        raise MethodError(
            message("There are too many subsets.", f"2^{len(chosen)}", f"at most {MAX_SUBSETS} models", "use search='one', or group inputs")
        )
    every = search == "all" or (search == "auto" and isinstance(method, Exact) and 2 ** len(chosen) <= MAX_SUBSETS)
    full = np.ones(len(chosen), bool)
    if every:
        subsets = np.array(list(itertools.product([False, True], repeat=len(chosen))))
    else:
        subsets = np.stack([full, *(full & (np.arange(len(chosen)) != j) for j in range(len(chosen)))])
    if isinstance(num_starts, bool) or not isinstance(num_starts, int) or num_starts < 1:
        raise MethodError(message("num_starts cannot be used.", repr(num_starts), "a whole number ≥ 1", "pass e.g. num_starts=3"))
    scores, note = _evidences(key, model, data, method, chosen, subsets, num_starts)
    kind = scores[0].kind
    values, errors = (np.array([getattr(score, field) for score in scores]) for field in ("value", "stderr"))
    odds = np.log(chances) - np.log1p(-chances)
    if not every:
        factors = values[0] - values[1:]
        return Relevance(names, _logistic(factors + odds), factors, np.hypot(errors[0], errors[1:]), kind, note)
    logits = values + subsets @ odds
    weights = np.exp(logits - np.logaddexp.reduce(logits))
    with np.errstate(divide="ignore"):
        log_odds = np.array([np.logaddexp.reduce(logits[on]) - np.logaddexp.reduce(logits[~on]) for on in subsets.T])
    # First-order error of the log odds: each evidence counts with its share of its side.
    shares = [np.where(on, weights / weights[on].sum(), weights / weights[~on].sum()) for on in subsets.T]
    stderr = np.array([np.sqrt(np.sum((share * errors) ** 2)) for share in shares])
    return Relevance(names, _logistic(log_odds), log_odds - odds, stderr, kind, note, subsets, weights)


def _evidences(
    key: KeyLike, model: Any, data: Data, method: Any, groups: list[tuple[int, ...]], subsets: np.ndarray, num_starts: int
) -> tuple[list[Any], str]:
    """The log evidence of each subset, and a note; all fits share shapes, so they are compiled once.

    Bounds depend on the optimum found. So the full model is fitted from several starts, the others start at its best fit, and it starts
    once more at any of them that beat it: differences are then between neighbouring optima.
    """
    x = np.asarray(data.x)
    keys = iter(split(as_key(key), 2 * len(subsets) + num_starts))

    def attempt(subset: np.ndarray, init: Fit | None = None) -> Fit:
        out = [c for group, kept in zip(groups, subset, strict=True) if not kept for c in group]
        masked = x.copy()
        masked[:, out] = 0
        found = fit_model(next(keys), model, Data(masked, data.y, data.weight), method, init=init)
        if found.log_evidence is None:
            raise MethodError(
                message(
                    f"{type(method).__name__} gives no evidence.",
                    "log_evidence=None",
                    "a method that gives one, such as al.Exact or al.Variational",
                    "choose another method, or use al.explain.inputs",
                )
            )
        return found

    value = lambda found: found.log_evidence.value
    kind = lambda found: found.log_evidence.kind
    whole = np.ones(len(groups), bool)
    best = attempt(whole)
    bounds = "bound" in kind(best)
    starts = [best] + [attempt(whole) for _ in range(num_starts - 1) if bounds]
    best = max(starts, key=value)
    fits = [None if subset.all() else attempt(subset, best if bounds else None) for subset in subsets]
    if bounds:
        again = [attempt(whole, other) for other in fits if other is not None and value(other) > value(best)]
        best = max([best, *again], key=value)
    note = "Differences of bounds are Bayes factors only where their gaps are equal." if bounds else ""
    if bounds and num_starts > 1:
        note += f" {num_starts} starts of the full model differ by {max(map(value, starts)) - min(map(value, starts)):.1f} nats."
    return [(best if found is None else found).log_evidence for found in fits], note


def _check_index(index: np.ndarray, number: int) -> None:
    if not len(index) or len(set(index.tolist())) != len(index) or index.min() < 0 or index.max() >= number:
        raise ModelError(message("There are no such coefficients.", index.tolist(), f"different numbers below {number}", "check the index"))


def _log_normal(difference: np.ndarray, covariance: np.ndarray) -> float:
    """log N(difference; 0, covariance)."""
    factor = np.linalg.cholesky(covariance)
    z = np.linalg.solve(factor, difference)
    return float(-0.5 * z @ z - np.log(np.diagonal(factor)).sum() - 0.5 * len(difference) * np.log(2 * np.pi))


def _logistic(log_odds: Any) -> Any:
    return np.exp(-np.logaddexp(0.0, -np.asarray(log_odds, float)))
