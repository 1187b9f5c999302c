"""Acting on predictions: the action of highest expected utility, risk aversion, deferral, and what information is worth (E12).

    a*(x) = argmax_a R[u(a, y)],   y ~ p(y | x)

with R the expectation or a risk measure. Expectations are sums over scenarios of y that represent the predictive: every class with its probability, points
at equal quantiles of every Gaussian component, whole numbers with theirs; draws, by a key, only where several target columns are needed together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _outputs, _tree
from aleator._errors import DataError, MethodError, message
from aleator._random import as_key, split
from aleator._typing import Key, KeyLike
from aleator.decide._inputs import between
from aleator.predictive import Predictive, PredictiveViews

SCENARIOS = 4096  # of a real target: the error of an expectation falls as their inverse
LEVELS = 256  # quantiles, where a real predictive is no mixture of Gaussians
DEFER = "defer"


class Scenarios(NamedTuple):
    """Values of y (S, rows) or (S, rows, k), by name for named classes, and their probabilities (S, rows)."""

    y: np.ndarray
    weight: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """action (rows,): the best of `actions` for each row, or "defer"; number (rows,): its place, −1 for deferring; value (rows,): its utility (a certainty
    equivalent under risk aversion), in the utility's units; table (actions, rows): of all; regret (rows,): best less second best."""

    action: list
    number: np.ndarray
    value: np.ndarray
    table: np.ndarray
    actions: tuple

    @property
    def regret(self) -> np.ndarray:
        """How much the second-best action would lose, (rows,); 0 where there is only one."""
        ordered = np.sort(self.table, axis=0)
        return ordered[-1] - ordered[-2] if len(ordered) > 1 else np.zeros(self.table.shape[1])


@dataclasses.dataclass(frozen=True)
class Risk:
    """How a distribution of utilities becomes one number; see `expected`, `cvar`, `mean_variance`, `exponential`."""

    name: str
    parameter: float = 0.0

    def __call__(self, utility: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """(S, rows) → (rows,)."""
        mean = np.sum(weight * utility, axis=0)
        if self.name == "expected":
            return mean
        if self.name == "mean_variance":
            return mean - 0.5 * self.parameter * np.sum(weight * (utility - mean) ** 2, axis=0)
        if self.name == "exponential":
            low = utility.min(axis=0)
            return low - np.log(np.sum(weight * np.exp(-self.parameter * (utility - low)), axis=0)) / self.parameter
        order = np.argsort(utility, axis=0)
        utility, weight = np.take_along_axis(utility, order, axis=0), np.take_along_axis(weight, order, axis=0)
        before = np.cumsum(weight, axis=0) - weight
        kept = np.clip(self.parameter - before, 0.0, weight)  # the worst outcomes, the last of them in part
        return np.sum(kept * utility, axis=0) / np.sum(kept, axis=0)


expected = Risk("expected")


def cvar(share: float) -> Risk:
    """Conditional value at risk: the mean of the worst `share` of outcomes."""
    return Risk("cvar", between(share, "share", 0.0, 1.0 + 1e-12))


def mean_variance(aversion: float) -> Risk:
    """E[u] − ½ aversion Var[u]."""
    return Risk("mean_variance", _positive(aversion))


def exponential(aversion: float) -> Risk:
    """The certainty equivalent −(1/a) log E[exp(−a u)] of constant absolute risk aversion a."""
    return Risk("exponential", _positive(aversion))


def scenarios(predictive: PredictiveViews, key: KeyLike | None = None, num: int = SCENARIOS) -> Scenarios:
    """Values of y with probabilities that represent the predictive, row by row.

    Classes and counts: all of them. Mixtures of Gaussians: points at equal quantiles of every component. Other real targets: at equal quantiles. Several
    real columns: draws by the key, each of all columns together.
    """
    if not isinstance(predictive, PredictiveViews):
        raise MethodError(message("A decision needs a predictive.", type(predictive).__name__, "what fit.predict returns", "pass it"))
    rows = predictive.num_rows
    if predictive.support in ("label", "binary"):
        probs = np.asarray(predictive.probs, float)
        if probs.ndim == 2:
            values = np.arange(probs.shape[1]) if predictive.labels is None else np.asarray(predictive.labels)
            return Scenarios(np.repeat(values[:, None], rows, axis=1), _finite(probs.T, "probabilities"))
    elif predictive.num_columns == 1:
        if predictive.support == "count":
            counted = _counts(predictive)
            if counted is not None:
                return counted
        elif (components := predictive.gaussian_components()) is not None:
            return _normals(*components, num)
        levels = (np.arange(LEVELS) + 0.5) / LEVELS
        points = np.asarray(predictive.quantile(levels), float).reshape(LEVELS, rows)
        return Scenarios(_finite(points, "quantiles"), np.full((LEVELS, rows), 1 / LEVELS))
    if key is None:
        got = f"{predictive.num_columns} target columns and no key"
        raise MethodError(message("Several targets are drawn together.", got, "a key", "pass key="))
    drawn = predictive.sample(as_key(key), num)
    return Scenarios(_finite(np.asarray(drawn, float), "draws"), np.full((num, rows), 1 / num))


def best_action(
    predictive: PredictiveViews,
    utility: Callable[[Any, np.ndarray], Any],
    actions: Sequence[Any],
    risk: Risk = expected,
    defer: float | np.ndarray | None = None,
    key: KeyLike | None = None,
) -> Decision:
    """The best of `actions` for each row.

    utility(action, y): any function; y is (S, rows) (class names where there are some) or (S, rows, k), the result broadcasts against
    (S, rows). defer: the utility of not deciding (the cost of a person, with a minus), a number or one a row. key: only for several targets.

    >>> from aleator.likelihoods import Gaussian
    >>> from aleator.predictive import Outputs, Predictive
    >>> demand = Predictive(Outputs(draws=np.full((1, 1, 1), 100.0), extra={"scale": np.full(1, 20.0)}), Gaussian(), squeeze=True)
    >>> profit = lambda order, y: 5 * np.minimum(order, y) - 3 * order
    >>> best_action(demand, profit, range(60, 141)).action
    [95]
    """
    actions = _some(actions)
    cases = scenarios(predictive, key)
    rows = predictive.num_rows
    table = np.stack([risk(_utility(utility, action, cases), cases.weight) for action in actions])
    number, value = np.argmax(table, axis=0), np.max(table, axis=0)
    if defer is not None:
        waiting = np.broadcast_to(np.asarray(defer, float), (rows,))
        if np.any(np.isnan(waiting)):
            raise DataError(message("The utility of deferring is not a number.", "NaN", "numbers", "fix defer"))
        number, value = np.where(waiting > value, -1, number), np.maximum(value, waiting)
    return Decision([DEFER if n < 0 else actions[n] for n in number], number, value, table, actions)


def realised(decision: Decision, utility: Callable[[Any, np.ndarray], Any], y: Any, defer: float | np.ndarray | None = None) -> np.ndarray:
    """What the decisions earned once y was known, (rows,)."""
    truth = np.asarray(y)
    truth = truth[:, 0] if truth.ndim == 2 and truth.shape[1] == 1 else truth  # one target is (S, rows) to a utility, however y was shaped
    if truth.ndim == 0 or len(truth) != len(decision.number):
        got, wanted = f"y of shape {truth.shape}", f"{len(decision.number)} rows"
        raise DataError(message("y does not match the decisions.", got, wanted, "pass the truth of the rows decided on"))
    cases = Scenarios(truth[None], np.ones((1, len(truth))))
    every = np.stack([_utility(utility, action, cases)[0] for action in decision.actions])
    earned = every[np.maximum(decision.number, 0), np.arange(len(truth))]
    if np.any(decision.number < 0):
        if defer is None:
            raise MethodError(message("Some decisions were deferred.", "defer=None", "the utility of deferring", "pass the same defer"))
        earned = np.where(decision.number < 0, np.broadcast_to(np.asarray(defer, float), earned.shape), earned)
    return earned


def plug_in(predictive: PredictiveViews, utility: Callable[[Any, np.ndarray], Any], actions: Sequence[Any]) -> Decision:
    """What one would do believing the point prediction (mean, or the most probable class) to be the truth: what using the posterior is compared with."""
    actions = _some(actions)
    if predictive.support in ("label", "binary"):
        top = np.argmax(np.asarray(predictive.probs), axis=-1)
        point = (top if predictive.labels is None else np.asarray(predictive.labels)[top])[None]
    else:
        point = np.asarray(predictive.mean, float)[None]
        point = point.reshape(1, -1) if predictive.num_columns == 1 else point  # as scenarios of one target are
    cases = Scenarios(point, np.ones((1, predictive.num_rows)))
    table = np.stack([_utility(utility, action, cases)[0] for action in actions])
    number = np.argmax(table, axis=0)
    return Decision([actions[n] for n in number], number, table.max(axis=0), table, actions)


# ------------------------------------------------------------------------------------------------------------ value of information


def value_of_knowing(
    predictive: PredictiveViews, utility: Callable[[Any, np.ndarray], Any], actions: Sequence[Any], key: KeyLike | None = None
) -> np.ndarray:
    """Expected value of perfect information, E_y[max_a u(a, y)] − max_a E_y[u(a, y)] ≥ 0, (rows,): the most that a test revealing y may cost."""
    actions, cases = _some(actions), scenarios(predictive, key)
    every = np.stack([_utility(utility, action, cases) for action in actions])
    return np.sum(cases.weight * every.max(axis=0), axis=0) - np.max(np.sum(cases.weight * every, axis=1), axis=0)


def value_of_model(
    key: KeyLike, predictive: Predictive, utility: Callable[[Any, np.ndarray], Any], actions: Sequence[Any], num_samples: int = 200
) -> np.ndarray:
    """E_f[max_a E_y[u | f]] − max_a E_y[u], (rows,): what knowing f, as unlimited data would tell it, is worth. The rest of `value_of_knowing`
    is noise that no data removes. From draws of f."""
    key_f, key_table = split(as_key(key), 2)
    with jax.enable_x64(True):
        f, extra = jax.tree.map(np.asarray, _outputs.draw_outputs(key_f, predictive.outputs, num_samples))
    drawn = dataclasses.replace(predictive, outputs=_outputs.Outputs(draws=f, extra=extra))
    every = _by_draw(drawn, utility, actions, key_table)
    return every.max(axis=1).mean(axis=0) - every.mean(axis=0).max(axis=0)


def value_of_label(
    key: KeyLike,
    fit: Any,
    candidates: Any,
    x: Any,
    utility: Callable[[Any, np.ndarray], Any],
    actions: Sequence[Any],
    num_samples: int = 1000,
    num_labels: int = 500,
) -> np.ndarray:
    """Expected value of sample information: how much the decisions at the rows of x gain, on average, from one label at each candidate, (candidates,).

    One-step look-ahead: a label y_c is drawn from its predictive, the posterior draws are weighted by p(y_c | f_c), the decisions are made again. Compare
    with what a label costs: label while the best value is above it, then act. Estimated from joint draws of f; resampled gains are ≥ 0 up to their noise.
    """
    key_f, key_labels, key_pick, key_table = split(as_key(key), 4)
    inputs, rows = fit._inputs(candidates), fit._inputs(x)
    num_candidates = _tree.rows(inputs)
    together = jax.tree.map(lambda a, b: np.concatenate([np.asarray(a), np.asarray(b)]), inputs, rows)
    outputs = fit.posterior.functions(key_f, fit.model, together, num_samples)
    table = _by_draw(fit._predictive(outputs).rows(slice(num_candidates, None)), utility, actions, key_table)
    likelihood = fit.model.likelihood
    with jax.enable_x64(True):
        draws, _, extra = _outputs.as_draws(likelihood, outputs, _outputs.FEW_NODES)
        at = draws[:, :num_candidates]
        # Draws are taken in turn, in a random order: fewer repeats than at random.
        source = jax.random.permutation(key_pick, num_samples)[jnp.arange(num_labels) % num_samples]
        labels = jax.vmap(likelihood.sample)(
            jax.random.split(key_labels, num_labels), at[source], jax.tree.map(lambda leaf: leaf[source], extra)
        )
        gained = np.empty(num_candidates)
        for c in range(num_candidates):
            terms = jax.vmap(lambda y: jax.vmap(likelihood.log_prob, (0, None, 0))(at[:, c : c + 1], y[c : c + 1], extra))(labels)  # noqa: B023
            weights = np.asarray(jax.nn.softmax(terms[..., 0], axis=1))  # (labels, draws)
            after = (weights @ table.reshape(num_samples, -1)).reshape(num_labels, *table.shape[1:])
            # The same labels' average is today's table, so that their noise cancels and a gain is never negative.
            gained[c] = after.max(axis=1).sum(axis=-1).mean() - after.mean(axis=0).max(axis=0).sum()
    return gained


def _by_draw(predictive: Predictive, utility: Callable, actions: Sequence[Any], key: Key) -> np.ndarray:
    """Expected utility of every action at every row under every draw of f: (draws, actions, rows)."""
    actions = _some(actions)
    num = max(64, SCENARIOS // predictive.outputs.num_draws)
    components = predictive.gaussian_components() if predictive.support == "real" else None
    if components is not None and predictive.num_columns == 1:
        _, means, stds = components
        cases = (_normals(np.ones(1), means[s : s + 1], stds[s : s + 1], num) for s in range(len(means)))
    else:
        cases = (scenarios(_one_draw(predictive, s), jax.random.fold_in(key, s), num) for s in range(predictive.outputs.num_draws))
    return np.stack([np.stack([np.sum(c.weight * _utility(utility, action, c), axis=0) for action in actions]) for c in cases])


def _one_draw(predictive: Predictive, number: int) -> Predictive:
    take = lambda leaf: np.asarray(leaf)[number : number + 1] if np.ndim(leaf) else leaf
    outputs = predictive.outputs
    return dataclasses.replace(
        predictive, outputs=_outputs.Outputs(draws=jax.tree.map(take, outputs.draws), extra=jax.tree.map(take, outputs.extra))
    )


# -------------------------------------------------------------------------------------------------------------------------- helpers


def _normals(weights: np.ndarray, means: np.ndarray, stds: np.ndarray, num: int) -> Scenarios:
    """About `num` points at equal quantiles of Gaussian components; weights (C,), means and stds (C, rows, 1)."""
    from scipy.special import ndtri

    points = max(1, -(-num // len(weights)))
    z = ndtri((np.arange(points) + 0.5) / points)
    values = (means[:, None, :, 0] + stds[:, None, :, 0] * z[:, None]).reshape(-1, means.shape[1])
    return Scenarios(_finite(values, "a predictive"), np.repeat(np.repeat(weights, points)[:, None] / points, means.shape[1], axis=1))


def _counts(predictive: PredictiveViews) -> Scenarios | None:
    """Whole numbers up to where all but 1e-9 of the mass is; None when these are too many."""
    top = int(np.max(predictive.quantile(1 - 1e-9))) + 1
    if top > 2 * SCENARIOS:
        return None
    values = np.arange(top)
    weight = np.exp(predictive._log_columns(np.broadcast_to(values[:, None, None], (top, predictive.num_rows, 1)).copy()))[..., 0]
    return Scenarios(np.repeat(values[:, None], predictive.num_rows, axis=1), weight / weight.sum(axis=0))


def _utility(utility: Callable, action: Any, cases: Scenarios) -> np.ndarray:
    values = np.asarray(utility(action, cases.y), float)
    if np.any(np.isnan(values)):
        raise DataError(message("The utility is not a number.", f"NaN for action {action!r}", "numbers", "check utility(action, y)"))
    try:
        return np.broadcast_to(values, cases.weight.shape)
    except ValueError:
        got, wanted = f"shape {values.shape} for y of shape {cases.y.shape}", f"{cases.weight.shape}, or what broadcasts to it"
        raise DataError(message("The utility has another shape.", got, wanted, "return one number a scenario and row")) from None


def _some(actions: Sequence[Any]) -> tuple:
    actions = tuple(actions)
    if not actions:
        raise MethodError(message("There is nothing to choose.", "no actions", "at least one", "pass a sequence of actions"))
    return actions


def _finite(values: np.ndarray, what: str) -> np.ndarray:
    if np.any(np.isnan(values)):
        raise DataError(
            message(f"There is NaN in {what}.", f"{int(np.isnan(values).sum())} values", "numbers", "check the fit and its inputs")
        )
    return values


def _positive(value: float) -> float:
    if not value > 0:
        raise MethodError(
            message("Risk aversion must be positive.", f"{value!r}", "a number above 0", "pass e.g. 1.0, or al.decide.expected")
        )
    return float(value)
