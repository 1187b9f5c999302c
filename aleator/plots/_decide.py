"""Pictures of calibration, strange rows, labels and decisions; each with the band that chance would stay in, or error bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aleator._errors import DataError, message
from aleator.plots._road import ALEATORIC, DATA, EPISTEMIC, EPISTEMIC_FILL, HIGHLIGHT, MEAN, _clean, axes

# Okabe and Ito again, for several things of equal rank.
SERIES = (EPISTEMIC, "#D55E00", HIGHLIGHT, "#CC79A7", ALEATORIC, "#56B4E9", MEAN)
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), "-", (0, (5, 1.5)), (0, (1, 1.2)))


def reliability(curve: Any, ax: Any = None) -> Any:
    """Stated against observed probability of a `calibration.Reliability`, with the band a calibrated prediction would stay in; dots grow with the rows behind them."""
    ax = axes(ax)
    ax.plot([0, 1], [0, 1], color=DATA, linewidth=1, linestyle=(0, (4, 2)), label="calibrated", zorder=2)
    ax.fill_between(
        curve.stated,
        curve.lower,
        curve.upper,
        color=EPISTEMIC_FILL,
        linewidth=0,
        label=f"{100 * curve.level:g} % of calibrated predictions",
        zorder=1,
    )
    counts = np.asarray(curve.size)
    size = np.full(len(counts), 36.0) if counts.min() == counts.max() else 20 + 120 * counts / counts.max()
    ax.plot(curve.stated, curve.observed, color=EPISTEMIC, linewidth=1.2, zorder=3)
    ax.scatter(
        curve.stated, curve.observed, s=size, color=EPISTEMIC, edgecolors="white", linewidths=0.6, label="observed", zorder=4, clip_on=False
    )
    ax.set(xlabel="stated probability", ylabel="observed share", xlim=(0, 1), ylim=(0, 1))
    _clean(ax)
    return ax


def pit(values: Any, num_bins: int = 20, level: float = 0.95, ax: Any = None) -> Any:
    """Histogram of PIT values (see `calibration.pit`) with the band that uniform ones would stay in: a hump is underconfident, a bowl overconfident."""
    from scipy.stats import binom

    values = np.ravel(values)
    ax = axes(ax)
    low, high = (binom.ppf(q, len(values), 1 / num_bins) for q in (0.5 - level / 2, 0.5 + level / 2))
    ax.axhspan(low, high, color=EPISTEMIC_FILL, linewidth=0, label=f"{100 * level:g} % of calibrated predictions", zorder=1)
    ax.hist(values, np.linspace(0, 1, num_bins + 1), color=EPISTEMIC, alpha=0.75, rwidth=0.9, zorder=2)
    ax.axhline(len(values) / num_bins, color=DATA, linewidth=1, linestyle=(0, (4, 2)), zorder=3)
    ax.set(xlabel="F(y), share of the predictive below y", ylabel="rows", xlim=(0, 1))
    _clean(ax)
    return ax


def risk_coverage(losses: Any, uncertainties: Mapping[str, Any], level: float = 0.9, ax: Any = None) -> Any:
    """Mean loss of the rows kept, against the share kept when the most uncertain are refused; one line for each uncertainty, with its error band."""
    from statistics import NormalDist

    from aleator.criteria import risk_coverage as curve

    ax, z, losses = axes(ax), NormalDist().inv_cdf(0.5 + level / 2), np.asarray(losses, float)
    for number, (name, unsure) in enumerate(uncertainties.items()):
        coverage, risk = curve(losses, unsure)
        kept = np.arange(1, len(losses) + 1)
        _, square = curve(losses**2, unsure)
        error = z * np.sqrt(np.maximum(square - risk**2, 0) / kept)
        shown = kept >= max(10, len(kept) // 50)  # a mean of a few rows is noise
        colour = SERIES[number % len(SERIES)]
        ax.fill_between(coverage[shown], (risk - error)[shown], (risk + error)[shown], color=colour, alpha=0.15, linewidth=0)
        ax.plot(coverage[shown], risk[shown], color=colour, linestyle=DASHES[number % len(DASHES)], linewidth=1.8, label=name)
    ax.axhline(losses.mean(), color=DATA, linewidth=1, linestyle=(0, (1, 2)), label="refusing at random")
    ax.set(xlabel="share of rows kept", ylabel="mean loss of rows kept (lower is better)", xlim=(0, 1), ylim=(0, None))
    _clean(ax)
    return ax


def strangeness(inside: Any, outside: Any, threshold: float | None = None, name: str = "score", ax: Any = None) -> Any:
    """Histograms of a detector's scores on rows like the data and on others, with its threshold and the AUROC between the two."""
    from aleator.criteria import auroc

    inside, outside = np.ravel(inside), np.ravel(outside)
    ax = axes(ax)
    both = np.concatenate([inside, outside])
    low, high = np.quantile(both, [0.0, 0.995])
    bins = np.linspace(low, high, 41)
    clip = lambda values: np.clip(values, bins[0], bins[-1])
    ax.hist(clip(inside), bins, density=True, color=EPISTEMIC, alpha=0.6, label="like the data")
    ax.hist(clip(outside), bins, density=True, histtype="step", linewidth=1.8, color="#D55E00", label="others")
    if threshold is not None and np.isfinite(threshold):
        ax.axvline(threshold, color=MEAN, linewidth=1.2, linestyle=(0, (4, 2)), label="threshold")
    area = auroc(both, np.arange(len(both)) >= len(inside))
    ax.set(xlabel=f"{name} (higher is stranger)", ylabel="density", title=f"AUROC {area.value:.3f} ± {area.stderr:.3f}")
    _clean(ax)
    return ax


def roc(inside: Any, outsides: Mapping[str, Any], ax: Any = None) -> Any:
    """Share of strange rows caught against false alarms, one line for each set of strange rows."""
    from aleator.criteria import auroc

    ax, inside = axes(ax), np.sort(np.ravel(inside))
    for number, (name, scores) in enumerate(outsides.items()):
        scores = np.sort(np.ravel(scores))
        cuts = np.unique(np.concatenate([inside, scores, [np.inf]]))[::-1]
        alarms = 1 - np.searchsorted(inside, cuts, side="left") / len(inside)
        caught = 1 - np.searchsorted(scores, cuts, side="left") / len(scores)
        area = auroc(np.concatenate([inside, scores]), np.arange(len(inside) + len(scores)) >= len(inside))
        label = f"{name}, AUROC {area.value:.3f} ± {area.stderr:.3f}"
        ax.plot(alarms, caught, color=SERIES[number % len(SERIES)], linestyle=DASHES[number % len(DASHES)], linewidth=1.8, label=label)
    ax.plot([0, 1], [0, 1], color=DATA, linewidth=1, linestyle=(0, (1, 2)))
    ax.set(xlabel="false alarms", ylabel="caught", xlim=(0, 1), ylim=(0, 1.01))
    _clean(ax)
    return ax


def learning_curves(histories: Mapping[str, Sequence[Any]], score: str, ax: Any = None) -> Any:
    """A held-out score against the number of labels: mean over runs, and the standard error over runs as a band (one run: its own over test rows)."""
    if not histories:
        raise DataError(message("There are no curves.", "nothing", "histories of al.active.loop by name", "pass al.active.curves(…)"))
    ax = axes(ax)
    for number, (name, runs) in enumerate(histories.items()):
        runs = [runs] if hasattr(runs, "curve") else list(runs)
        labels, _, own = runs[0].curve(score)
        values = np.stack([run.curve(score)[1] for run in runs])
        error = values.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else own
        mean, colour = values.mean(axis=0), SERIES[number % len(SERIES)]
        ax.fill_between(labels, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        ax.plot(labels, mean, color=colour, linestyle=DASHES[number % len(DASHES)], marker="o", markersize=3.5, linewidth=1.6, label=name)
    ax.set(xlabel="labels", ylabel=score.replace("_", " "))
    _clean(ax)
    return ax


def field(x1: Any, x2: Any, values: Any, data: tuple[Any, Any] | None = None, label: str = "", ax: Any = None, **style: Any) -> Any:
    """Values over a grid of two inputs, x1 (n,), x2 (m,), values (m·n,) or (m, n), with the data on top; for maps of entropy, information or decisions."""
    ax, x1, x2 = axes(ax), np.ravel(x1), np.ravel(x2)
    table = np.asarray(values, float).reshape(len(x2), len(x1))
    drawn = ax.pcolormesh(x1, x2, table, shading="auto", rasterized=True, **({"cmap": "viridis"} | style))
    ax.figure.colorbar(drawn, ax=ax, label=label)
    if data is not None:
        points, y = np.asarray(data[0]), np.ravel(data[1])
        for number, name in enumerate(np.unique(y)):
            own = points[y == name]
            ax.scatter(
                own[:, 0], own[:, 1], s=13, marker="os^Dv"[number % 5], color="white", edgecolors=MEAN, linewidths=0.7, label=f"{name}"
            )
    ax.set(xlabel="x₁", ylabel="x₂")
    return ax


def decisions(x1: Any, x2: Any, decision: Any, data: tuple[Any, Any] | None = None, ax: Any = None) -> Any:
    """The best action over a grid of two inputs, as areas named in a legend; deferred rows are grey."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    ax, x1, x2 = axes(ax), np.ravel(x1), np.ravel(x2)
    names = [*map(str, decision.actions), "defer"]
    colours = [*(SERIES[i % len(SERIES)] for i in range(len(decision.actions))), "#BBBBBB"]
    number = np.where(decision.number < 0, len(decision.actions), decision.number).reshape(len(x2), len(x1))
    ax.pcolormesh(
        x1, x2, number, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, shading="auto", alpha=0.55, rasterized=True
    )
    if data is not None:
        points = np.asarray(data[0])
        ax.scatter(points[:, 0], points[:, 1], s=12, color="white", edgecolors=MEAN, linewidths=0.6)
    shown = sorted(set(number.ravel().tolist()))
    ax.legend(handles=[Patch(color=colours[int(i)], alpha=0.55, label=names[int(i)]) for i in shown], fontsize=8)
    ax.set(xlabel="x₁", ylabel="x₂")
    return ax
