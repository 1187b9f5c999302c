"""Pictures of predictions, posteriors and comparisons, and what all pictures share: colours, axes, files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import numpy as np

from aleator import _tree
from aleator._errors import DataError, message
from aleator._random import as_key, split
from aleator._typing import KeyLike
from aleator.loop import TRACE_POINTS

EPISTEMIC = "#0072B2"
ALEATORIC = "#E69F00"
MEAN = "#1A1A1A"
DATA = "#4D4D4D"
HIGHLIGHT = "#009E73"
OTHER = "#CC79A7"  # for what is neither noise nor ignorance

# Opaque tints: two half-transparent bands on top of each other would mix into a third colour that is in no legend.
EPISTEMIC_FILL = "#9CC8E3"
ALEATORIC_FILL = "#FBE3B0"

LOW_ALPHA = -5.0  # log α from which a weight counts as known: its noise is below a tenth of it


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
    _lines(ax, grid, _curves(fit.functions(key, _inputs(fit, x), num_draws))[:, order])
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


def functions(key: KeyLike, fit: Any, x: Any, data: Any = None, num_draws: int = 12, level: float = 0.9, ax: Any = None) -> Any:
    """Bands, mean and some functions of a Fit's posterior, one θ (for dropout one mask) a curve (B12); x (rows,) or (rows, 1).

    `regression` with the predictions and draws made here; data: the (x, y) that was seen.
    """
    key_bands, key_curves = split(as_key(key), 2)
    rows = _inputs(fit, x)
    draws = _curves(fit.functions(key_curves, rows, num_draws))
    return regression(ax, x, fit.predict(key_bands, rows), data, draws, level)


def elbo(fit: Any, ax: Any = None) -> Any:
    """The bound over the steps and its two parts, E log p(D|θ) and −KL, in nats, from fit.info: every point is one step's own estimate.

    The bound is drawn as a running median over a twentieth of the points, so that its trend shows through the noise of the steps.
    """
    if not {"log_likelihood", "kl"} <= set(fit.info):
        raise DataError(
            message(
                "There is no bound to draw.",
                f"traces {sorted(fit.info)}",
                "log_likelihood and kl",
                "fit with al.Variational() or a method of the dropout family",
            )
        )
    # What comes after the steps are sums for the evidence, which are not estimates of the whole.
    steps = np.arange(0, fit.method.num_steps, max(1, fit.method.num_steps // TRACE_POINTS))
    data, kl = (np.asarray(fit.info[name], np.float64)[: len(steps)] for name in ("log_likelihood", "kl"))
    width = max(1, len(steps) // 20)
    bound = _running_median(data - kl, width)
    ax = axes(ax)
    ax.plot(steps, data, color=HIGHLIGHT, linewidth=0.7, alpha=0.8, label="data term, E log p(D|θ)")
    ax.plot(steps, -kl, color=OTHER, linewidth=1.8, linestyle=(0, (5, 1.5)), label="−KL")
    ax.plot(steps, bound, color=MEAN, linewidth=1.8, label="bound, their sum")
    # The first steps are orders of magnitude worse and would flatten all that follows.
    late = np.concatenate([data[width:], -kl, bound[width:]])
    low, high = float(np.min(late)), float(np.max(late))
    ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    ax.set(xlabel="step", ylabel="nats")
    _clean(ax)
    return ax


def weights(key: KeyLike, fit: Any, chosen: Any = None, num_weights: int = 6, num_samples: int = 2000, ax: Any = None) -> Any:
    """Posterior densities of a few weights, one row each, scaled to the same height, with a dot at the mean and a line of ± 2 standard
    deviations.

    chosen: (path, index) pairs such as ("network.layer0.weight", (0, 3)); else num_weights spread evenly over all parameters. Histograms of
    draws, so that every kind of posterior has them, those with a lump at 0 (dropout) too.
    """
    draws = jax.tree.map(np.asarray, fit.sample(key, num_samples))
    leaves = dict(zip(_tree.paths(draws), jax.tree.leaves(draws), strict=True))
    chosen = _spread_out(leaves, num_weights) if chosen is None else list(chosen)
    if unknown := [path for path, _ in chosen if path not in leaves]:
        raise DataError(message("There is no such parameter.", unknown[0], f"one of {list(leaves)}", "pass (path, index) pairs"))
    ax = axes(ax)
    for row, (path, index) in enumerate(chosen):
        values = leaves[path][(slice(None), *index)].astype(np.float64)
        heights, edges = np.histogram(values, bins=40)
        ax.stairs(row - 0.8 * heights / heights.max(), edges, baseline=row, fill=True, color=EPISTEMIC_FILL, zorder=1)
        mean, std = values.mean(), values.std()
        ax.plot([mean - 2 * std, mean + 2 * std], [row, row], color=EPISTEMIC, linewidth=1.6, zorder=2)
        ax.plot(mean, row, "o", color=EPISTEMIC, markersize=4, zorder=3)
    ax.axvline(0.0, color=DATA, linewidth=0.6, linestyle=":", zorder=0)
    names = [f"{path.removeprefix('network.')}[{', '.join(map(str, index))}]" for path, index in chosen]
    ax.set_yticks(range(len(chosen)), names, fontsize=8)
    ax.set_ylim(len(chosen) - 0.6, -1.0)
    ax.set_xlabel("weight")
    _clean(ax)
    return ax


def alphas(fit: Any, site: str, threshold: float = 3.0, ax: Any = None) -> Any:
    """log α of every weight of a site (C8): grey above the threshold (noise, to be pruned), the darker the more precisely it is kept.

    site: a path such as "layer0.weight". A dense weight is an image, its longer side across. Convolution kernels
    (height, width, in, out) are tiles, input channels down and output channels across; with one input channel, in a square.
    """
    posterior = fit.posterior
    if not hasattr(posterior, "log_alpha"):
        raise DataError(message("This posterior has no α.", type(posterior).__name__, "Gaussian dropout", "fit with al.SparseDropout()"))
    names = [path for path, take in zip(_tree.paths(posterior.params), posterior.chosen, strict=True) if take]
    found = dict(zip([name.removeprefix("network.") for name in names], zip(names, posterior.log_alpha, strict=True), strict=True))
    if (site := site.removeprefix("network.")) not in found:
        raise DataError(message("There is no such site.", site, f"one of {list(found)}", "pass its path"))
    name, log_alpha = found[site]
    shape = dict(zip(_tree.paths(posterior.params), jax.tree.leaves(posterior.params), strict=True))[name].shape
    values = np.broadcast_to(np.asarray(log_alpha, np.float64), shape)
    down, across = ("input channel", "output channel") if values.ndim == 4 else ("input unit", "output unit")
    image = _tiles(values) if values.ndim == 4 else values.reshape(-1, values.shape[-1])
    if values.ndim != 4 and image.shape[0] > image.shape[1]:
        image, down, across = image.T, across, down
    if values.ndim == 4 and values.shape[2] == 1:
        down, across = "", "kernels"
    ax = axes(ax)
    from matplotlib import colormaps

    colours = colormaps["cividis"].with_extremes(over="#E8E8E8", bad="white")
    drawn = ax.imshow(image, cmap=colours, vmin=LOW_ALPHA, vmax=threshold, interpolation="nearest", aspect="equal")
    ax.set(xticks=[], yticks=[], xlabel=across, ylabel=down)
    ax.spines[:].set_visible(False)
    ax.set_title(f"{site}: {100 * np.mean(values > threshold):.1f} % above log α = {threshold:g}", fontsize=9, loc="left")
    ax.get_figure().colorbar(drawn, ax=ax, extend="both", shrink=0.8, label="log α")
    return ax


def gradient_variance(results: Any, ax: Any = None) -> Any:
    """Variances of gradient estimators as bars on a logarithmic axis, each with its ratio to the first of its kind (C7).

    results: {estimator: variance}, or {estimator: {part: variance}} for several kinds of parameter ("means", "scales").
    """
    rows = {name: dict(value) if isinstance(value, Mapping) else {"": value} for name, value in results.items()}
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    values = np.array([float(value) for row in rows.values() for value in row.values()])
    if not len(values) or not np.all(np.isfinite(values) & (values > 0)) or any(list(row) != parts for row in rows.values()):
        raise DataError(
            message("These variances cannot be drawn.", repr(results), "positive numbers, the same parts for each", "leave out exact ones")
        )
    ax = axes(ax)
    height = 0.8 / len(parts)
    low = float(values.min()) / 3
    for number, (part, colour) in enumerate(zip(parts, itertools.cycle((EPISTEMIC_FILL, "#EBD0DF", "#BFE3D6")))):
        first = next(iter(rows.values()))[part]
        for place, row in enumerate(rows.values()):
            at = place + (number - (len(parts) - 1) / 2) * height
            label = part if place == 0 and part else "_"
            ax.barh(at, row[part] - low, left=low, height=0.9 * height, color=colour, label=label)
            ratio = "" if place == 0 else f"   {_ratio(row[part] / first)}"
            shown = f"{row[part]:.3g}" if row[part] < 1000 else f"{row[part]:,.0f}"
            ax.annotate(f"{shown}{ratio}", (row[part], at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_xscale("log")
    ax.set_xlim(low, float(values.max()) * 8)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlabel("variance of the gradient")
    _clean(ax)
    return ax


def prior(simulated: Any, num_draws: int = 12, level: float = 0.9, data: tuple[Any, Any] | None = None, ax: Any = None) -> Any:
    """Draws of `al.elicit.simulate` over one input (A11): the central `level` of functions and of y at each x, and some of the functions.

    The bounds that were given are dashed lines; data: an (x, y) to look at the prior beside.
    """
    order, grid = _sorted(simulated.x)
    curves, values = _curves(simulated.functions)[:, order], _curves(simulated.y)[:, order]
    tails, percent = [0.5 - level / 2, 0.5 + level / 2], f"{100 * level:g} %"
    ax = axes(ax)
    for drawn, colour, label, rank in (
        (values, ALEATORIC_FILL, f"{percent} of y: with the noise", 1.0),
        (curves, EPISTEMIC_FILL, f"{percent} of functions", 1.1),
    ):
        ax.fill_between(grid, *np.quantile(drawn, tails, axis=0), color=colour, linewidth=0, label=label, zorder=rank)
    _lines(ax, grid, curves[:num_draws])
    for number, bound in enumerate(simulated.bounds or ()):
        ax.axhline(bound, color=MEAN, linewidth=1.0, linestyle=(0, (5, 2)), label="bounds" if number == 0 else "_", zorder=2.5)
    if data is not None:
        ax.scatter(np.ravel(data[0]), np.ravel(data[1]), s=14, color=DATA, edgecolors="white", linewidths=0.4, label="data", zorder=4)
    _clean(ax)
    return ax


def sensitivity(found: Any, level: float = 0.9, ax: Any = None) -> Any:
    """Predictions over one input under each prior scale of `al.elicit.sensitivity` (A11): the mean, and mean ± z·sd as thin lines.

    Colours run from narrow priors (light) to wide ones (dark).
    """
    from matplotlib import colormaps

    order, grid = _sorted(found.x)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    ax = axes(ax)
    shades = colormaps["viridis_r"](np.linspace(0.15, 0.95, len(found.factors)))
    for factor, mean, std, colour in zip(found.factors, found.mean, found.std, shades, strict=True):
        middle, half = _column(mean, "mean")[order], z * _column(std, "std")[order]
        ax.plot(grid, middle, color=colour, linewidth=2.0, label=f"prior scale × {factor:g}", zorder=3)
        for edge in (middle - half, middle + half):
            ax.plot(grid, edge, color=colour, linewidth=0.9, linestyle=(0, (4, 1.5)), zorder=2)
    _clean(ax)
    return ax


def _ratio(value: float) -> str:
    return f"÷ {1 / value:.3g}" if value < 1 else f"× {value:.3g}"


def _running_median(values: np.ndarray, width: int) -> np.ndarray:
    """Median over the last `width` values, fewer at the start."""
    return np.array([np.median(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)])


def _spread_out(leaves: dict[str, np.ndarray], number: int) -> list[tuple[str, tuple[int, ...]]]:
    """(path, index) of entries at even distances in the flattened parameters; leaves (S, …)."""
    places = [(path, index) for path, leaf in leaves.items() for index in np.ndindex(leaf.shape[1:])]
    return [places[i] for i in np.linspace(0, len(places) - 1, min(number, len(places))).round().astype(int)]


def _tiles(kernels: np.ndarray) -> np.ndarray:
    """(h, w, in, out) → one image of all kernels, a line of NaN between them."""
    height, width, down, across = kernels.shape
    if down == 1:  # one row of many kernels would be a stripe
        down = int(np.ceil(np.sqrt(across)))
        padded = np.full((height, width, down * -(-across // down)), np.nan)
        padded[:, :, :across] = kernels[:, :, 0]
        kernels, across = padded.reshape(height, width, down, -1), -(-across // down)
    framed = np.full((height + 1, width + 1, down, across), np.nan)
    framed[:height, :width] = kernels
    return framed.transpose(2, 0, 3, 1).reshape(down * (height + 1), across * (width + 1))[:-1, :-1]


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


def _inputs(fit: Any, x: Any) -> Any:
    """x (rows,) as the column that the fit was trained on, where it was one."""
    column = np.ndim(x) == 1 and fit.manifest["data"].get("x_shape") == [[1]]
    return np.asarray(x)[:, None] if column else x


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
