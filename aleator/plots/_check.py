"""Pictures that judge a fit: predictions against the truth, the parts of the uncertainty over rows, what columns are worth, traces of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aleator._errors import DataError, message
from aleator.loop import TRACE_POINTS
from aleator.plots._decide import DASHES, SERIES
from aleator.plots._road import ALEATORIC, DATA, EPISTEMIC, EPISTEMIC_FILL, MEAN, _clean, axes

# What a run follows, the most telling first.
TRACES = ("elbo", "bound", "log_joint", "log_density", "log_likelihood", "loss", "energy")
LONGEST = 18  # characters of a name beside an axis
NUMBERED = 10  # classes up to which the cells of a confusion matrix carry numbers


def truth(predictive: Any, y: Any, level: float = 0.9, max_rows: int = 300, ax: Any = None) -> Any:
    """Predictions against what was true: numbers as mean and interval on the diagonal, classes as a matrix of shares.

    predictive: a Predictive of n rows; y (n,): their targets, in its units or names. More than max_rows numbers are drawn as that many, evenly
    spread over the sorted truth. In the matrix a row is a true class and its cells are how often each class was the most probable one.
    """
    ax = axes(ax)
    if predictive.support in ("label", "binary"):
        return _confusion(predictive, y, ax)
    y, mean = np.asarray(y, np.float64).reshape(predictive.num_rows, -1), np.asarray(predictive.mean, np.float64)
    if y.shape[1] != 1:
        raise DataError(message("This draws one target.", f"y of shape {y.shape}", "(rows,)", "draw one target column at a time"))
    lower, upper = (np.asarray(bound, np.float64).reshape(-1) for bound in predictive.interval(level))
    y, mean = y[:, 0], mean.reshape(-1)
    shown = np.argsort(y, kind="stable")[np.linspace(0, len(y) - 1, min(len(y), max_rows)).round().astype(int)]
    y, mean, lower, upper = y[shown], mean[shown], lower[shown], upper[shown]
    ends = min(y.min(), mean.min()), max(y.max(), mean.max())
    inside = (y >= lower) & (y <= upper)
    ax.plot(ends, ends, color=DATA, linewidth=1, linestyle=(0, (4, 2)), label="right", zorder=2)
    ax.vlines(y, lower, upper, color=EPISTEMIC_FILL, linewidth=1.0, label=f"{100 * level:g} % interval", zorder=1)
    for chosen, colour, marker, label in ((inside, EPISTEMIC, "o", "truth inside"), (~inside, "#D55E00", "D", "truth outside")):
        if chosen.any():
            ax.plot(y[chosen], mean[chosen], marker, color=colour, markersize=3.2, markeredgewidth=0, label=label, zorder=3)
    ax.set(xlabel="true", ylabel="predicted")
    _clean(ax)
    return ax


def _confusion(predictive: Any, y: Any, ax: Any) -> Any:
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    probs = np.asarray(predictive.probs, np.float64)
    names = [named(label) for label in (predictive.labels or range(probs.shape[1]))]
    true, size = np.asarray(predictive.encode(y)).reshape(-1).astype(int), probs.shape[1]
    counts = np.zeros((size, size))
    np.add.at(counts, (true, probs.argmax(axis=1)), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    places = [(i, j) for i in range(size) for j in range(size)]
    # Opacity and not a scale of colours: cells let the page through, whatever its colour.
    cells = PatchCollection([Rectangle((j - 0.48, i - 0.48), 0.96, 0.96) for i, j in places], linewidth=0)
    cells.set_facecolor([(*to_rgb(EPISTEMIC), 0.04 + 0.96 * shares[i, j]) for i, j in places])
    ax.add_collection(cells)
    for i, j in places if size <= NUMBERED else ():
        if counts[i, j]:
            ax.text(j, i, f"{counts[i, j]:.0f}", ha="center", va="center", color="white" if shares[i, j] > 0.5 else MEAN, fontsize=8)
    step = max(1, size // 20)
    ax.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xlabel="most probable class", ylabel="true class", aspect="equal")
    turned = {"rotation": 90} if size > 4 or max(map(len, names)) > 8 else {}
    ax.set_xticks(range(0, size, step), names[::step], fontsize=8 if size <= NUMBERED else 7, **turned)
    ax.set_yticks(range(0, size, step), names[::step], fontsize=8 if size <= NUMBERED else 7)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def split(predictive: Any, num_bins: int = 40, ax: Any = None) -> Any:
    """Both parts of the uncertainty on top of each other, rows from the surest to the least sure, averaged in groups of neighbours.

    Variances for numbers (they add), expected entropy and mutual information in nats for classes (they add too).
    """
    rows = predictive.num_rows
    classes = predictive.support in ("label", "binary")
    views = (predictive.aleatoric_entropy, predictive.mutual_information) if classes else (predictive.aleatoric, predictive.epistemic)
    aleatoric, epistemic = (np.asarray(view, np.float64).reshape(rows, -1).sum(axis=1) for view in views)
    order = np.argsort(aleatoric + epistemic, kind="stable")
    groups = np.array_split(order, min(num_bins, rows))
    edges = np.concatenate([[0.0], np.cumsum([len(group) for group in groups]) / rows])
    low, high = (np.array([values[group].mean() for group in groups]) for values in (aleatoric, epistemic))
    ax = axes(ax)
    ax.stairs(low, edges, fill=True, color=ALEATORIC, label="aleatoric: stays")
    ax.stairs(low + high, edges, baseline=low, fill=True, color=EPISTEMIC, label="epistemic: shrinks with more rows")
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="share of rows, the surest first", ylabel="uncertainty [nats]" if classes else "variance")
    _clean(ax)
    return ax


def relevance(found: Sequence[Any], most: int = 15, unit: str = "nats per row lost without it", ax: Any = None) -> Any:
    """What columns are worth, as bars with ± 2 standard errors. found: (name, value, stderr) each, the largest first; `most` of them are drawn."""
    chosen = list(found)[:most]
    if not chosen:
        raise DataError(message("There is nothing to draw.", "no columns", "(name, value, standard error) rows", "pass at least one"))
    ax = axes(ax)
    places, values, errors = range(len(chosen)), [one[1] for one in chosen], [2 * one[2] for one in chosen]
    ax.barh(places, values, height=0.62, color=EPISTEMIC_FILL, zorder=1)
    ax.errorbar(values, places, xerr=errors, fmt="o", color=EPISTEMIC, markersize=3.5, linewidth=1.4, zorder=2)
    return _named_rows(ax, chosen, unit)


def effects(found: Sequence[Any], most: int = 15, unit: str = "change of the prediction with 1 sd more", ax: Any = None) -> Any:
    """Effects as dots with intervals. found: (name, value, lower, upper, …) each, the largest first; `most` of them are drawn."""
    chosen = list(found)[:most]
    if not chosen:
        raise DataError(message("There is nothing to draw.", "no effects", "(name, value, lower, upper) rows", "pass at least one"))
    ax = axes(ax)
    places = range(len(chosen))
    ax.hlines(places, [one[2] for one in chosen], [one[3] for one in chosen], color=EPISTEMIC, linewidth=1.8)
    ax.plot([one[1] for one in chosen], places, "o", color=EPISTEMIC, markersize=5)
    return _named_rows(ax, chosen, unit)


def _named_rows(ax: Any, chosen: Sequence[Any], label: str) -> Any:
    ax.axvline(0.0, color=DATA, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    ax.set_yticks(range(len(chosen)), [named(one[0]) for one in chosen], fontsize=8)
    ax.set_ylim(len(chosen) - 0.4, -0.6)
    ax.set_xlabel(label)
    _clean(ax)
    return ax


def traces(fit: Any, name: str | None = None, ax: Any = None) -> Any:
    """How a run went: one of the traces of fit.info over its steps, a line for each chain or member; by default the bound, density or likelihood.

    The axis leaves out how far off the first tenth was, which would flatten all that follows.
    """
    name = trace_name(fit.info) if name is None else name
    if name is None or name not in fit.info:
        raise DataError(message("There is no such trace.", repr(name), f"one of {sorted(fit.info)}", "pass one of them"))
    lines = np.atleast_2d(np.asarray(fit.info[name], np.float64))
    steps = np.arange(lines.shape[1]) * max(1, int(fit.manifest.get("steps") or 0) // TRACE_POINTS)
    if (last := main_steps(fit.method)) is not None:  # what comes after are passes that count other things
        lines, steps = lines[:, steps < last], steps[steps < last]
    ax = axes(ax)
    for number, line in enumerate(lines[: len(SERIES)]):
        label = "" if len(lines) == 1 else f"{number + 1} of {len(lines)}"
        ax.plot(steps, line, color=SERIES[number], linestyle=DASHES[number], linewidth=1.1, label=label or "_")
    late = lines[:, lines.shape[1] // 10 :]
    late = late[np.isfinite(late)]
    if late.size and late.max() > late.min():
        margin = 0.05 * (late.max() - late.min())
        ax.set_ylim(late.min() - margin, late.max() + margin)
    ax.set(xlabel="step", ylabel=name.replace("_", " "))
    _clean(ax)
    return ax


def main_steps(method: Any) -> int | None:
    """Steps of the search itself, without what is done with its result; None where the method does not say."""
    while getattr(method, "base", None) is not None:
        method = method.base
    steps = getattr(method, "num_steps", None)
    return steps if isinstance(steps, int) and steps > 1 else None


def trace_name(info: dict[str, Any]) -> str | None:
    """The trace that says most about a run; None where nothing varies."""
    moving = [name for name, values in info.items() if np.size(values) > 1 and np.nanmin(values) < np.nanmax(values)]
    return next((name for name in (*TRACES, *moving) if name in moving), None)


def named(name: Any, longest: int = LONGEST) -> str:
    """A name as matplotlib shows it unchanged: cut where long, its dollar signs no formula."""
    text = " ".join(str(name).split()) or "(empty)"
    return (text if len(text) <= longest else text[: longest - 1] + "…").replace("$", r"\$")
