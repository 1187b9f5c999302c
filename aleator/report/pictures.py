"""The pictures of a report as SVG: text stays text, so that it is found, read aloud and set in the reader's own fonts."""

from __future__ import annotations

import io
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from aleator.plots import _check, _decide
from aleator.plots._road import MEAN
from aleator.report.document import Picture, number, percent
from aleator.report.facts import LEVEL, Facts, Judged, Member

WIDTH, HEIGHT = 4.4, 3.1  # inches: narrow, so that letters stay legible on a telephone
STYLE: Any = {
    "font.size": 10,
    "text.color": MEAN,
    "axes.labelcolor": MEAN,
    "axes.edgecolor": MEAN,
    "xtick.color": MEAN,
    "ytick.color": MEAN,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "aleator",  # the same picture is the same bytes
}


def draw(name: str, alt: str, caption: str, paint: Callable[[Any], Any], height: float = HEIGHT, legend: bool = True) -> Picture:
    """One picture; paint(ax) draws it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Fonts of the reader are not those of this machine: letters that matplotlib lacks are none of its business.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        ax = figure.add_subplot()
        paint(ax)
        if legend and ax.get_legend_handles_labels()[1]:
            figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, columnspacing=1.2, handlelength=1.6)
        out = io.BytesIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Picture(name, out.getvalue(), alt, caption)


def truth(facts: Facts, judged: Judged) -> Picture:
    """Predictions against what was true."""
    scores = {line.name: line for line in judged.scores}
    paint = lambda ax: _check.truth(judged.held.predictive, judged.held.y, LEVEL, ax=ax)
    if judged.held.classes:
        right = scores["accuracy"].value
        alt = f"Matrix of true against most probable classes of {judged.held.size} rows: {right:.0f} % are on the diagonal."
        caption = "Each row is a true class; the stronger a cell's colour, the larger the share that was given that class. Right ones are on the diagonal."
        size = len(judged.held.predictive.labels or (0, 1))
        return draw("truth", alt, caption, paint, 3.4 if size <= 10 else 4.4)
    inside = next(line.value for line in judged.scores if "coverage" in line.name)
    alt = (
        f"Predicted against true values of {judged.held.size} rows with {100 * LEVEL:g} % intervals; {inside:.0f} % of the intervals "
        f"hold the truth, and the typical error is {number(scores['RMSE'].value)}."
    )
    caption = f"Dots on the dashed line are right. Bars are {100 * LEVEL:g} % intervals: nine of ten should cross it."
    return draw("truth", alt, caption, paint)


def reliability(judged: Judged) -> Picture:
    """Stated against observed probabilities."""
    curve = judged.curve
    out = int(np.sum((curve.observed < curve.lower) | (curve.observed > curve.upper)))
    alt = f"Reliability: {out} of {len(curve.stated)} points are outside the band that calibrated predictions stay in."
    what = "how often the most probable class was right" if judged.held.classes else "the share of truths below each predicted quantile"
    caption = f"Stated probability against {what}. A calibrated prediction stays in the band, on the dashed line but for chance."
    return draw("reliability", alt, caption, lambda ax: _decide.reliability(curve, ax=ax))


def split(judged: Judged) -> Picture:
    """The two parts of the uncertainty over rows."""
    share = judged.split.share
    told = f"the epistemic part is {percent(share)} of the whole" if np.isfinite(share) else "the parts are not finite"
    alt = f"Aleatoric and epistemic uncertainty stacked, rows sorted from sure to unsure; {told}."
    unit = "in nats" if judged.held.classes else "variances, in squared units of the target"
    caption = (
        f"Rows from the surest to the least sure, averaged in groups; {unit}. Orange stays whatever is added; blue shrinks with more rows."
    )
    return draw("split", alt, caption, lambda ax: _check.split(judged.held.predictive, ax=ax))


def relevance(judged: Judged, most: int = 15) -> Picture:
    """What each column is worth."""
    found = judged.importances
    alt = "What the log score loses without each column: " + "; ".join(f"{one.name} {number(one.value, 2)}" for one in found[:5]) + "."
    caption = "Log score lost, in nats per row, when a column is that of another row. Lines: ± 2 standard errors; one that reaches 0 may be noise."
    unit = "nats per row lost without it"
    return draw("relevance", alt, caption, lambda ax: _check.relevance(found, most, unit, ax), 1.0 + 0.26 * max(3, min(most, len(found))))


def effects(judged: Judged, target: str, most: int = 15) -> Picture:
    """What one standard deviation more of a column does."""
    found = judged.effects
    alt = "Average effect of one standard deviation more: " + "; ".join(
        f"{one.name} {number(one.value, 2)} ({number(one.lower, 2)} … {number(one.upper, 2)})" for one in found[:5]
    )
    kind = "probability" if judged.held.classes else f"units of {target}"
    caption = f"Average change of the prediction ({kind}) with one standard deviation more of a column, and its {100 * LEVEL:g} % posterior interval."
    unit = "change with 1 sd more"
    return draw("effects", f"{alt}.", caption, lambda ax: _check.effects(found, most, unit, ax), 1.0 + 0.26 * max(3, min(most, len(found))))


def trace(member: Member, name: str) -> Picture | None:
    """How a run went; None where nothing was followed."""
    followed = _check.trace_name(member.traces)
    if followed is None:
        return None
    values = member.traces[followed]
    lines = "" if len(values) == 1 else f", {len(values)} runs"
    alt = f"{followed.replace('_', ' ')} of {member.name} over its steps{lines}: from {number(values[0, 0])} to {number(values[0, -1])}."
    caption = f"{member.name}: {followed.replace('_', ' ')} over the steps. Level and overlapping at the end is what one wants."
    source = types.SimpleNamespace(info=member.traces, manifest={"steps": member.steps}, method=member.chosen)
    return draw(name, alt, caption, lambda ax: _check.traces(source, followed, ax), 2.6)
