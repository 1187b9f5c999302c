"""Comparing fits by evidence, and averaging over models (A2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from aleator._errors import AleatorError, message
from aleator._random import as_key
from aleator._typing import KeyLike


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Evidence of several models on the same data.

    log_evidence, stderr (m,), nats, higher is better; kinds; prior and posterior over models (m,); `log_bayes_factor(a, b)`; print it for
    the table. posterior is None where evidences of different kinds cannot be ranked against each other.
    """

    names: tuple[str, ...]
    log_evidence: np.ndarray
    stderr: np.ndarray
    kinds: tuple[str, ...]
    prior: np.ndarray
    posterior: np.ndarray | None
    note: str

    def log_bayes_factor(self, a: str, b: str) -> float:
        """log p(D|a) − log p(D|b), in nats; refused across kinds."""
        i, j = self.names.index(a), self.names.index(b)
        if self.kinds[i] != self.kinds[j]:
            raise AleatorError(
                message(
                    "These evidences cannot be subtracted.",
                    f"{self.kinds[i]} and {self.kinds[j]}",
                    "the same kind",
                    "compare fits whose evidence is of one kind",
                )
            )
        return float(self.log_evidence[i] - self.log_evidence[j])

    @property
    def best(self) -> str:
        """Name of the most probable model a posteriori."""
        if self.posterior is None:
            raise AleatorError(
                message("There is no ranking.", self.note, "evidences of one kind", "compare fits whose evidence is of one kind")
            )
        return self.names[int(np.argmax(self.posterior))]

    def __str__(self) -> str:
        width = max(5, *(len(name) for name in self.names))
        head = f"{'model':<{width}}  log evidence [nats, ↑]  kind          prior  p(M|D)  vs best [nats]"
        top = np.max(self.log_evidence)
        lines = []
        for i, name in enumerate(self.names):
            value = f"{self.log_evidence[i]:.3f}" + (f" ± {self.stderr[i]:.3f}" if self.stderr[i] else "")
            chance = "   –" if self.posterior is None else f"{self.posterior[i]:.4f}"
            lines.append(
                f"{name:<{width}}  {value:>22}  {self.kinds[i]:<12}  {self.prior[i]:.3f}  {chance:>6}  {self.log_evidence[i] - top:>14.3f}"
            )
        return "\n".join([head, *lines] + ([self.note] if self.note else []))


def compare(fits: Mapping[str, Any] | Sequence[Any], prior: Sequence[float] | None = None) -> Comparison:
    """Evidence table, posterior over models p(M|D) ∝ p(M)·p(D|M), Bayes factors.

    fits: a dict by name, or a sequence. Exact evidences, bounds and estimates are never ranked against each other: with mixed kinds the
    table is given and the posterior is not.
    """
    named = dict(fits) if isinstance(fits, Mapping) else {f"{i}: {_label(fit)}": fit for i, fit in enumerate(fits)}
    if not named:
        raise AleatorError(message("There is nothing to compare.", "0 fits", "at least one", "pass {'name': fit, …}"))
    for name, fit in named.items():
        if fit.log_evidence is None:
            raise AleatorError(
                message(
                    f"Fit {name!r} has no evidence.",
                    f"method {type(fit.method).__name__}",
                    "a method that gives one, such as al.Exact",
                    "leave it out, or compare by held-out log score",
                )
            )
    sizes = {fit.manifest["data"]["num_data"] for fit in named.values()}
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
    scores = [fit.log_evidence for fit in named.values()]
    values, kinds = np.array([s.value for s in scores]), tuple(s.kind for s in scores)
    note = ""
    posterior = None
    if len(set(kinds)) == 1:
        with np.errstate(divide="ignore"):
            logits = values + np.log(weights)
        posterior = np.exp(logits - logits.max())
        posterior = posterior / posterior.sum()
        if kinds[0] == "relative":
            posterior = None
            note = (
                "Not ranked: these bounds hold up to a constant of each network. Use al.choose for settings of one method on one network."
            )
        if kinds[0].endswith("bound"):
            note = f"These are {kinds[0]}s: their differences are not Bayes factors unless the gaps are equal."
    else:
        note = f"Not ranked: the evidences are of different kinds ({', '.join(sorted(set(kinds)))})."
    return Comparison(tuple(named), values, np.array([s.stderr for s in scores]), kinds, weights, posterior, note)


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
    from aleator.data import Data, as_data
    from aleator.fit import fit

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
    return f"{type(fit.model).__name__} by {type(fit.method).__name__}"


__all__ = ["Average", "Choice", "Comparison", "average", "choose", "compare"]
