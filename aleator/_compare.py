"""Comparing models by evidence and other scores, and averaging over models (A2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from aleator._errors import AleatorError, message
from aleator._random import as_key
from aleator._typing import KeyLike
from aleator.posterior import Score

KINDS = ("exact", "estimate", "lower bound", "upper bound", "relative")  # of log evidences, the most telling first
PREDICTIVE = ("loo", "waic")  # sums of log predictive densities over rows: another quantity


class Row(NamedTuple):
    """One score of one model. label: the road it came by."""

    model: str
    label: str
    score: Score


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of several models on the same data.

    log_evidence, stderr (m,), nats, higher is better; kinds: those by which models are ranked, or each model's first where none is
    common to all; prior and posterior over models (m,); `log_bayes_factor(a, b)`; rows: every score given; print it for the table.
    posterior is None where evidences of different kinds cannot be ranked against each other, and for predictive scores (loo, waic), which
    are no log evidences; these have a `best` all the same.
    """

    names: tuple[str, ...]
    log_evidence: np.ndarray
    stderr: np.ndarray
    kinds: tuple[str, ...]
    prior: np.ndarray
    posterior: np.ndarray | None
    note: str
    rows: tuple[Row, ...] = ()
    by: str = ""

    def log_bayes_factor(self, a: str, b: str) -> float:
        """log p(D|a) − log p(D|b), in nats; refused across kinds."""
        i, j = self.names.index(a), self.names.index(b)
        if self.kinds[i] != self.kinds[j] or self.kinds[i] in PREDICTIVE:
            raise AleatorError(
                message(
                    "These evidences cannot be subtracted.",
                    f"{self.kinds[i]} and {self.kinds[j]}",
                    "log evidences of the same kind",
                    "compare fits whose evidence is of one kind",
                )
            )
        return float(self.log_evidence[i] - self.log_evidence[j])

    @property
    def best(self) -> str:
        """Name of the most probable model a posteriori; by a predictive score, of the one that predicts best."""
        if self.posterior is not None:
            return self.names[int(np.argmax(self.posterior))]
        if len(set(self.kinds)) == 1 and self.kinds[0] in PREDICTIVE and self.by:
            return self.names[int(np.argmax(self.log_evidence))]
        raise AleatorError(
            message("There is no ranking.", self.note, "evidences of one kind", "compare fits whose evidence is of one kind")
        )

    def __str__(self) -> str:
        several = len(self.rows) > len(self.names)
        width = max(5, *(len(name) for name in self.names))
        road = max([4, *(len(row.label) for row in self.rows)]) if several else -2
        what = "log evidence [nats, ↑]" if all(row.score.kind not in PREDICTIVE for row in self.rows) else "score [nats, ↑]"
        head = f"{'model':<{width}}  " + (f"{'road':<{road}}  " if several else "")
        lines = [f"{head}{what:>22}  {'kind':<12}  prior  p(M|D)  vs best [nats]"]
        ranked = self._ranked()
        for row in self.rows:
            i, score = self.names.index(row.model), row.score
            value = f"{score.value:.3f}" + (f" ± {score.stderr:.3f}" if score.stderr else "")
            used = row is ranked[i]
            chance = "–" if self.posterior is None or not used else f"{self.posterior[i]:.4f}"
            apart = f"{score.value - np.max(self.log_evidence):.3f}" if used else "–"
            lead = f"{row.model:<{width}}  " + (f"{row.label:<{road}}  " if several else "")
            lines.append(f"{lead}{value:>22}  {score.kind:<12}  {self.prior[i]:.3f}  {chance:>6}  {apart:>14}")
        return "\n".join(lines + ([self.note] if self.note else []))

    def _ranked(self) -> list[Row | None]:
        """The row of each model that the ranking is by; without one, each model's first where there is one score a model."""
        own = [[row for row in self.rows if row.model == name] for name in self.names]
        if self.by:
            return [next(row for row in rows if f"{row.label}, {row.score.kind}" == self.by or row.score.kind == self.by) for rows in own]
        return [rows[0] if len(rows) == 1 else None for rows in own]


def compare(fits: Mapping[str, Any] | Sequence[Any], prior: Sequence[float] | None = None) -> Comparison:
    """Evidence table, posterior over models p(M|D) ∝ p(M)·p(D|M), Bayes factors.

    fits: a dict by name, or a sequence; each model is a Fit, a Score, or several of them (a list, a dict by road, an `evidence.Sandwich`).
    Models are ranked by one road that all of them have, the first of the most telling kind: exact, estimate, lower bound, upper bound, loo, waic.
    Different kinds are never ranked against each other: where no kind is common to all, the table is given and the posterior is
    not. A lower bound above another model's upper bound is told.
    """
    named = dict(fits) if isinstance(fits, Mapping) else {f"{i}: {_label(fit)}": fit for i, fit in enumerate(fits)}
    if not named:
        raise AleatorError(message("There is nothing to compare.", "0 fits", "at least one", "pass {'name': fit, …}"))
    own = [_rows(name, given) for name, given in named.items()]
    sizes = {size for given in named.values() for size in _sizes(given)}
    if len(sizes) > 1:
        raise AleatorError(
            message("These fits saw different data.", f"N in {sorted(sizes)}", "the same rows", "fit all models to the same data")
        )
    weights = np.full(len(named), 1.0 / len(named)) if prior is None else np.asarray(prior, float)
    if weights.shape != (len(named),) or (weights < 0).any() or not weights.sum() > 0:
        raise AleatorError(
            message("The prior over models does not fit.", prior, f"{len(named)} non-negative numbers", "pass one weight per fit")
        )
    weights = weights / weights.sum()
    chosen, by = _common(own)
    values, kinds = np.array([row.score.value for row in chosen]), tuple(row.score.kind for row in chosen)
    posterior = None
    if by and kinds[0] not in (*PREDICTIVE, "relative"):
        with np.errstate(divide="ignore"):
            logits = values + np.log(weights)
        posterior = np.exp(logits - logits.max())
        posterior = posterior / posterior.sum()
    notes = [_note(own, chosen, by), _certain(own)]
    rows = tuple(row for rows in own for row in rows)
    errors = np.array([row.score.stderr for row in chosen])
    return Comparison(tuple(named), values, errors, kinds, weights, posterior, "\n".join(filter(None, notes)), rows, by)


def _rows(name: str, given: Any, label: str | None = None) -> list[Row]:
    """All scores of one model. A Score is a tuple itself, so it comes first."""
    if isinstance(given, Score):
        return [Row(name, given.kind if label is None else label, given)]
    if isinstance(given, Mapping):
        found = [row for road, one in given.items() for row in _rows(name, one, str(road))]
    elif isinstance(given, (tuple, list)):
        found = [row for one in given for row in _rows(name, one, label)]
    elif not hasattr(given, "log_evidence"):
        raise AleatorError(
            message(f"{name!r} is not a score.", type(given).__name__, "a Fit, a Score, or several of them", "pass fit or fit.log_evidence")
        )
    elif given.log_evidence is None:
        raise AleatorError(
            message(
                f"Fit {name!r} has no evidence.",
                f"method {type(given.method).__name__}",
                "a method that gives one, such as al.Exact",
                "leave it out, or score it by al.evidence.loo or held-out log score",
            )
        )
    else:
        return [Row(name, type(given.method).__name__ if label is None else label, given.log_evidence)]
    if not found:
        raise AleatorError(message(f"{name!r} has no score.", "none", "at least one", "pass a Fit or a Score"))
    return found


def _sizes(given: Any) -> list[int]:
    """How many rows each fit, or each sum over rows, has seen."""
    if isinstance(given, Score):
        return [len(given.terms)] if hasattr(given, "terms") else []
    if isinstance(given, (Mapping, tuple, list)):
        return [size for one in (given.values() if isinstance(given, Mapping) else given) for size in _sizes(one)]
    return [given.manifest["data"]["num_data"]]


def _common(own: list[list[Row]]) -> tuple[list[Row], str]:
    """One row of each model by which they are ranked, and what it is ("road, kind", or "kind" where the roads differ); or the first of each, and ""."""
    for kind in (*KINDS, *PREDICTIVE):
        of_kind = [[row for row in rows if row.score.kind == kind] for rows in own]
        if not all(of_kind):
            continue
        for label in (row.label for row in of_kind[0]):
            same = [next((row for row in rows if row.label == label), None) for rows in of_kind]
            if all(same):
                return same, f"{label}, {kind}"  # type: ignore[return-value]
        return [rows[0] for rows in of_kind], kind
    return [rows[0] for rows in own], ""


def _note(own: list[list[Row]], chosen: list[Row], by: str) -> str:
    """What the reader must know about the ranking."""
    if not by:
        kinds = sorted({row.score.kind for rows in own for row in rows})
        return f"Not ranked: the evidences are of different kinds ({', '.join(kinds)})."
    kind, several = chosen[0].score.kind, any(len(rows) > 1 for rows in own)
    ranked = f"Ranked by: {by}. " if several and len(own) > 1 else ""
    if kind == "relative":
        return "Not ranked: these bounds hold up to a constant of each network. Use al.choose for settings of one method on one network."
    if kind.endswith("bound"):
        return f"{ranked}These are {kind}s: their differences are not Bayes factors unless the gaps are equal."
    if kind in PREDICTIVE:
        return f"{ranked}{_differences_of_rows(chosen)}".strip()
    return ranked.strip()


def _differences_of_rows(chosen: list[Row]) -> str:
    """Each model's distance from the best predictor, with the standard error of the difference, which is over the rows they share."""
    best = max(chosen, key=lambda row: row.score.value)
    told = []
    for row in chosen:
        if row is not best and hasattr(row.score, "terms") and hasattr(best.score, "terms"):
            gap = row.score.terms - best.score.terms  # type: ignore[attr-defined]
            told.append(f"{row.model} is {-gap.sum():.3f} ± {np.sqrt(len(gap)) * gap.std(ddof=1):.3f} nats below {best.model}")
    said = "This is predictive density over the rows, no log evidence: there are no Bayes factors."
    return "; ".join(told) + (". " if told else "") + said


def _certain(own: list[list[Row]]) -> str:
    """Pairs whose order the bounds decide, three standard errors allowed for."""
    low = [
        max((r.score.value - 3 * r.score.stderr for r in rows if r.score.kind in ("lower bound", "exact")), default=-np.inf) for rows in own
    ]
    high = [
        min((r.score.value + 3 * r.score.stderr for r in rows if r.score.kind in ("upper bound", "exact")), default=np.inf) for rows in own
    ]
    bounded = [any(r.score.kind.endswith("bound") for r in rows) for rows in own]
    pairs = [(i, j) for i in range(len(own)) for j in range(len(own)) if i != j and low[i] > high[j] and (bounded[i] or bounded[j])]
    return "\n".join(
        f"By its bounds {own[i][0].model} is above {own[j][0].model}, by at least {low[i] - high[j]:.3f} nats." for i, j in pairs
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Average:
    """Several fits with weights: predictions are mixtures over models, p(y|x) = Σₘ wₘ pₘ(y|x)."""

    fits: tuple[Any, ...]
    weights: np.ndarray

    def predict(self, key: KeyLike, x: Any, num_samples: int = 1000) -> Any:
        """The mixed Predictive at the rows of x."""
        from aleator import predictive

        keys = jax.random.split(as_key(key), len(self.fits))
        return predictive.mix([fit.predict(k, x, num_samples) for fit, k in zip(self.fits, keys, strict=True)], self.weights)


def average(fits: Mapping[str, Any] | Sequence[Any], weights: Sequence[float] | Comparison | None = None) -> Average:
    """Average over models: by given weights, by a Comparison's posterior, or (None) by `compare(fits)`."""
    members = tuple(fits.values() if isinstance(fits, Mapping) else fits)
    if weights is None:
        weights = compare(fits)
    if isinstance(weights, Comparison):
        if weights.posterior is None:
            raise AleatorError(
                message("These fits cannot be weighed by evidence.", weights.note, "evidences of one kind", "pass the weights yourself")
            )
        weights = weights.posterior
    values = np.asarray(weights, float)
    if not members or values.shape != (len(members),) or (values < 0).any() or not values.sum() > 0:
        raise AleatorError(
            message("The weights do not fit the fits.", f"{values}", f"{len(members)} non-negative numbers", "pass one weight per fit")
        )
    return Average(members, values / values.sum())


def stack(key: KeyLike, fits: Mapping[str, Any] | Sequence[Any], data: Any, num_samples: int = 200, by: str = "stacking") -> Average:
    """Average over fits with the weights that predict held-out (x, y) best (Yao et al. 2018); by="pseudo_bma" for pseudo-BMA+ weights.

    Stacking needs no model to be true, and gives weight to fits that complement each other; evidence weights pick one.
    """
    members = tuple(fits.values() if isinstance(fits, Mapping) else fits)
    if not members or by not in ("stacking", "pseudo_bma"):
        raise AleatorError(
            message("There is nothing to stack.", f"{len(members)} fits, by={by!r}", "fits, and 'stacking' or 'pseudo_bma'", "fix it")
        )
    key_weights, *keys = jax.random.split(as_key(key), 1 + len(members))
    x, y = (data.x, data.y) if hasattr(data, "x") else (data[0], data[1])
    terms = np.stack([fit.predict(k, x, num_samples).log_prob(y) for fit, k in zip(members, keys, strict=True)], axis=1)
    return Average(members, stacking_weights(terms) if by == "stacking" else pseudo_bma_weights(key_weights, terms))


def stacking_weights(log_probs: Any) -> np.ndarray:
    """argmax_w Σᵢ log Σₘ wₘ pₘ(yᵢ) over the simplex; log_probs (rows, models).

    The objective is concave; each step w ← w · meanᵢ(pₘ(yᵢ)/Σ w p) raises it, and a few hundred Newton-like (SQUAREM) jumps over such steps reach it.

    >>> stacking_weights(np.log([[0.5, 0.1], [0.5, 0.1]])).round(6)
    array([1., 0.])
    """
    terms = _log_prob_table(log_probs)
    ratios = np.exp(terms - terms.max(axis=1, keepdims=True))
    climb = lambda w: w * np.mean(ratios / (ratios @ w)[:, None], axis=0)
    value = lambda w: np.mean(np.log(np.maximum(ratios @ w, 1e-300)))
    weights = np.full(terms.shape[1], 1 / terms.shape[1])
    for _ in range(1000):
        first = climb(weights)
        second = climb(first)
        step, bend = first - weights, second - 2 * first + weights
        length = max(1.0, np.linalg.norm(step) / max(np.linalg.norm(bend), 1e-300))
        # A weight at zero could never grow again, so that no jump takes more than nine tenths of one.
        jump = np.maximum(weights + 2 * length * step + length**2 * bend, 0.1 * second)
        jump = jump / jump.sum()
        weights = jump if value(jump) >= value(second) else second
        if np.max(np.mean(ratios / (ratios @ weights)[:, None], axis=0)) < 1 + 1e-10:  # the optimality condition
            break
    return np.where(weights < 1e-12, 0.0, weights) / np.sum(weights[weights >= 1e-12])


def pseudo_bma_weights(key: KeyLike, log_probs: Any, num_bootstraps: int = 1000) -> np.ndarray:
    """Pseudo-BMA+: softmax of the total log predictive density, averaged over Bayesian bootstraps of the rows, so that few rows do not decide."""
    terms = _log_prob_table(log_probs)
    rows = np.asarray(jax.random.exponential(as_key(key), (num_bootstraps, len(terms))), float)
    totals = len(terms) * (rows / rows.sum(axis=1, keepdims=True)) @ terms
    chances = np.exp(totals - totals.max(axis=1, keepdims=True))
    return np.mean(chances / chances.sum(axis=1, keepdims=True), axis=0)


def _log_prob_table(log_probs: Any) -> np.ndarray:
    terms = np.asarray(log_probs, float)
    if terms.ndim != 2 or not terms.size or np.any(np.isnan(terms)) or np.any(np.all(np.isneginf(terms), axis=1)):
        got = f"shape {terms.shape}, {int(np.isnan(terms).sum())} NaN"
        raise AleatorError(
            message(
                "These densities cannot be stacked.", got, "(rows, models) log densities, one finite in each row", "check the predictives"
            )
        )
    return terms


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The best of several methods on one model: `fit`, with all candidates' scores (higher is better) and standard errors; print it for
    the table. by: what the score is, in nats (the whole data for a bound, per row for held-out data)."""

    fit: Any
    candidates: tuple[Any, ...]
    scores: np.ndarray
    stderr: np.ndarray
    by: str

    @property
    def best(self) -> Any:
        """The winning method."""
        return self.candidates[int(np.argmax(self.scores))]

    def __str__(self) -> str:
        labels = [_differences(candidate, self.candidates) for candidate in self.candidates]
        width = max(9, *(len(label) for label in labels))
        unit = "bound [nats, ↑]" if self.by == "elbo" else "held-out log predictive [nats per row, ↑]"
        mark = lambda i: "  ← chosen" if i == int(np.argmax(self.scores)) else ""
        rows = [f"{label:<{width}}  {self.scores[i]:>10.4g} ± {self.stderr[i]:.2g}{mark(i)}" for i, label in enumerate(labels)]
        return "\n".join([f"{'candidate':<{width}}  {unit}", *rows])


def choose(
    key: KeyLike,
    model: Any,
    data: Any,
    candidates: Sequence[Any],
    by: str = "elbo",
    validation: Any = None,
    holdout: float = 0.1,
    num_samples: int = 200,
    **options: Any,
) -> Choice:
    """Fit one model by each candidate method and keep the best (B9: the dropout rate over a grid).

    by="elbo": the fit's own bound on the log evidence. by="validation": mean log predictive density of held-out rows, those given or a
    fraction `holdout`; the winner is then fitted again to all rows. options go to `al.fit`.
    """
    from aleator._fit import fit
    from aleator.data import Data, as_data

    if not candidates or by not in ("elbo", "validation"):
        raise AleatorError(
            message(
                "There is nothing to choose by.",
                f"{len(candidates)} candidates, by={by!r}",
                "methods, and 'elbo' or 'validation'",
                "fix it",
            )
        )
    keys = list(jax.random.split(as_key(key), 2 * len(candidates) + 2))
    rows, held, whole = data, validation, None
    if by == "validation" and validation is None:
        whole = as_data(data)
        if not isinstance(whole, Data) or whole.num_data < 2:
            raise AleatorError(message("The rows cannot be split.", type(data).__name__, "data in memory", "pass validation=(x, y)"))
        order = np.asarray(jax.random.permutation(keys[-1], whole.num_data))
        cut = min(max(1, round(holdout * whole.num_data)), whole.num_data - 1)
        rows, test = whole.take(np.sort(order[cut:])), whole.take(np.sort(order[:cut]))
        held = (test.x, test.y)
    fits = [fit(k, model, rows, method, **options) for k, method in zip(keys, candidates, strict=False)]
    scores, errors = [], []
    for k, result in zip(keys[len(candidates) :], fits, strict=False):
        if by == "elbo":
            if result.log_evidence is None:
                raise AleatorError(
                    message(
                        f"{type(result.method).__name__} gives no bound.",
                        "log_evidence=None",
                        "num_evidence > 0 and temperature 1",
                        "choose by='validation'",
                    )
                )
            scores.append(result.log_evidence.value)
            errors.append(result.log_evidence.stderr)
        else:
            terms = np.asarray(result.predict(k, held[0], num_samples).log_prob(held[1]))
            scores.append(float(terms.mean()))
            errors.append(float(terms.std(ddof=1) / np.sqrt(len(terms))) if len(terms) > 1 else float("nan"))
    winner = int(np.argmax(scores))
    chosen = fits[winner] if whole is None else fit(keys[-2], model, data, candidates[winner], **options)
    return Choice(chosen, tuple(candidates), np.array(scores), np.array(errors), by)


def _differences(candidate: Any, candidates: Sequence[Any]) -> str:
    """The settings in which a candidate differs from the others."""
    fields = [f.name for f in dataclasses.fields(candidate)] if len({type(c) for c in candidates}) == 1 else []
    told = [n for n in fields if len({repr(getattr(c, n)) for c in candidates}) > 1]
    return ", ".join(f"{n}={getattr(candidate, n)}" for n in told) or type(candidate).__name__


def _label(fit: Any) -> str:
    if not hasattr(fit, "method"):
        return "scores"
    return f"{type(fit.model).__name__} by {type(fit.method).__name__}"


__all__ = ["Average", "Choice", "Comparison", "Row", "average", "choose", "compare", "pseudo_bma_weights", "stack", "stacking_weights"]
