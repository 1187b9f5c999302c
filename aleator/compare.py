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


def _label(fit: Any) -> str:
    return f"{type(fit.model).__name__} by {type(fit.method).__name__}"


__all__ = ["Average", "Comparison", "average", "compare"]
