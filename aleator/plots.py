"""Pictures of predictions and comparisons. Every function draws on the Axes it is given, or makes one, and returns it.

Colours are from the palette of Okabe and Ito, told apart by readers with any kind of colour vision, and fixed: blue is always what more
data would remove (epistemic), orange always what it would not (aleatoric).
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from aleator._errors import DataError, message
from aleator._typing import KeyLike

EPISTEMIC = "#0072B2"
ALEATORIC = "#E69F00"
MEAN = "#1A1A1A"
DATA = "#4D4D4D"
HIGHLIGHT = "#009E73"

# Opaque tints: two half-transparent bands on top of each other would mix into a third colour that is in no legend.
EPISTEMIC_FILL = "#9CC8E3"
ALEATORIC_FILL = "#FBE3B0"


def axes(ax: Any = None) -> Any:
    """The Axes given, or new ones on a figure of their own."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # Not pyplot: it keeps every figure alive and needs to know about windows.
    return Figure(figsize=(6.4, 4.0), layout="constrained").add_subplot()


def regression(ax: Any, x: Any, predictive: Any, data: tuple[Any, Any] | None = None, draws: Any = None, level: float = 0.9) -> Any:
    """Mean, epistemic band and total band of a one-dimensional regression.

    x (rows,) or (rows, 1): where `predictive` was made; data: the (x, y) that was seen; draws (S, rows): functions to draw thinly. Bands
    are mean ± z·√epistemic and mean ± z·√(epistemic + aleatoric), z the Gaussian quantile of `level`: variances add, so the bands nest.
    """
    if not 0 < level < 1:
        raise DataError(
            message("The bands cannot be drawn.", f"level={level!r}", "a number strictly between 0 and 1", "pass e.g. level=0.9")
        )
    order, grid = _sorted(x)
    mean, epistemic, aleatoric = (
        _column(view, name)[order]
        for view, name in ((predictive.mean, "mean"), (predictive.epistemic, "epistemic"), (predictive.aleatoric, "aleatoric"))
    )
    z, percent = NormalDist().inv_cdf(0.5 + level / 2), f"{100 * level:g} %"
    ax = axes(ax)
    for variance, colour, label, rank in (
        (epistemic + aleatoric, ALEATORIC_FILL, f"{percent} of y: with the noise (aleatoric)", 1.0),
        (epistemic, EPISTEMIC_FILL, f"{percent} of the function (epistemic)", 1.1),
    ):
        half = z * np.sqrt(variance)
        ax.fill_between(grid, mean - half, mean + half, color=colour, linewidth=0, label=label, zorder=rank)
    if draws is not None:
        _lines(ax, grid, np.asarray(draws)[..., order])
    ax.plot(grid, mean, color=MEAN, linewidth=1.8, label="mean", zorder=3)
    if data is not None:
        # The white rim keeps points apart where they are dense and visible on the bands.
        ax.scatter(np.ravel(data[0]), np.ravel(data[1]), s=14, color=DATA, edgecolors="white", linewidths=0.4, label="data", zorder=4)
    _clean(ax)
    return ax


def uncertainty(ax: Any, x: Any, predictive: Any) -> Any:
    """The two parts as standard deviations over x: √epistemic and √aleatoric, in the units of y."""
    order, grid = _sorted(x)
    ax = axes(ax)
    ax.plot(grid, np.sqrt(_column(predictive.epistemic, "epistemic")[order]), color=EPISTEMIC, linewidth=2.0, label="epistemic")
    ax.plot(
        grid,
        np.sqrt(_column(predictive.aleatoric, "aleatoric")[order]),
        color=ALEATORIC,
        linewidth=2.0,
        linestyle=(0, (5, 1.5)),
        label="aleatoric",
    )
    ax.set_ylim(bottom=0.0)
    _clean(ax)
    return ax


def function_draws(ax: Any, key: KeyLike, fit: Any, x: Any, num_draws: int = 12) -> Any:
    """Functions x → E[y | x, θ] for draws of θ from the posterior of a Fit, as thin lines; x (rows,) or (rows, 1)."""
    order, grid = _sorted(x)
    ax = axes(ax)
    _lines(ax, grid, _curves(fit.functions(key, x, num_draws))[:, order])
    _clean(ax)
    return ax


def evidence(comparison: Any, ax: Any = None) -> Any:
    """Log evidence of each model of a Comparison relative to the best, in nats, with p(model | data) beside the bars.

    A range of more than 30 nats is drawn on an axis that is linear to 1 nat and logarithmic beyond, so that close rivals stay visible.
    """
    ax = axes(ax)
    gaps = np.asarray(comparison.log_evidence) - np.max(comparison.log_evidence)
    places = np.arange(len(gaps))
    best = None if comparison.posterior is None else int(np.argmax(comparison.posterior))
    ax.barh(places, gaps, height=0.6, xerr=comparison.stderr if np.any(comparison.stderr) else None, color=EPISTEMIC_FILL)
    if best is not None:
        ax.plot(gaps[best], best, "o", color=HIGHLIGHT, markersize=9, clip_on=False, label="most probable")
    for place, gap in zip(places, gaps, strict=True):
        chance = "" if comparison.posterior is None else f"   {_chance(comparison.posterior[place])}"
        style = {"color": HIGHLIGHT, "fontweight": "bold"} if place == best else {"color": MEAN}
        ax.annotate(
            f"{gap:.1f}{chance}", (1.0, place), (8, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=9, **style
        )
    if gaps.min() < -30.0:
        ax.set_xscale("symlog", linthresh=1.0)
        ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(right=max(0.0, float(np.max(gaps + comparison.stderr))))
    ax.set_yticks(places, [f"{name} ({kind})" for name, kind in zip(comparison.names, comparison.kinds, strict=True)])
    ax.invert_yaxis()
    ax.set_xlabel("log evidence, difference to the best (nats, higher is better)")
    if comparison.note:
        ax.set_title(comparison.note, fontsize=9, loc="left")
    _clean(ax)
    return ax


def _chance(probability: float) -> str:
    return f"p = {probability:.3f}" if probability >= 0.0005 else "p < 0.001"


def save(figure: Any, path: str | os.PathLike, dpi: int = 130) -> Path:
    """Write a figure (or the figure of some Axes) to a file by its extension, directories made as needed; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure = figure if hasattr(figure, "savefig") else figure.get_figure()
    # Without the version stamp of matplotlib the same picture is the same bytes.
    metadata = {"Software": None} if target.suffix.lower() == ".png" else None
    figure.savefig(target, dpi=dpi, metadata=metadata)
    return target


def _curves(draws: np.ndarray) -> np.ndarray:
    """(S, rows) from (S, rows) or (S, rows, 1)."""
    if draws.ndim == 3 and draws.shape[2] != 1:
        raise DataError(
            message("Curves are drawn for one target.", f"{draws.shape[2]} columns", "one target column", "plot one column at a time")
        )
    return draws.reshape(draws.shape[:2])


def _lines(ax: Any, grid: np.ndarray, curves: np.ndarray) -> None:
    for number, curve in enumerate(np.atleast_2d(curves)):
        ax.plot(grid, curve, color=EPISTEMIC, linewidth=0.8, alpha=0.75, label="functions drawn" if number == 0 else "_", zorder=2)


def _sorted(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Row order and sorted values of a one-dimensional input."""
    values = np.asarray(x, np.float64)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(
            message(
                "A curve needs one input.",
                f"x of shape {values.shape}",
                "(rows,) or (rows, 1)",
                "vary one column and keep the others fixed",
            )
        )
    order = np.argsort(values, kind="stable")
    return order, values[order]


def _column(values: Any, name: str) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(
            message(
                "A band needs one target.",
                f"{name} of shape {values.shape}",
                "(rows,) or (rows, 1)",
                "plot one target column of a regression at a time",
            )
        )
    return values


def _clean(ax: Any) -> None:
    ax.spines[["top", "right"]].set_visible(False)
