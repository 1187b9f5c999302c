"""Scores of predictions on rows whose targets are known, as the command line shows them: value ± standard error, unit, direction."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

LEVEL = 0.9


class Line(NamedTuple):
    """One score. better: "higher", "lower" or "near 90 %"."""

    name: str
    value: float
    stderr: float
    unit: str
    better: str


def scores(predictive: Any, y: Any, task: str, target: str, level: float = LEVEL) -> list[Line]:
    """Log score, then RMSE and interval coverage (regression) or accuracy and Brier score (classification); y in the table's own terms."""
    from aleator import criteria

    log_score = _line(criteria.log_score(predictive, y), "log score", "nats per row")
    if task == "classification":
        accuracy = _line(criteria.accuracy(predictive, y), "accuracy", "% of rows", 100.0)
        return [log_score, accuracy, _line(criteria.brier(predictive, y), "Brier score", "0 is perfect")]
    coverage = _line(criteria.coverage(predictive, y, level), f"{100 * level:g} % interval coverage", "% of rows", 100.0)
    return [
        log_score,
        _line(criteria.rmse(predictive, y), "RMSE", f"units of {target}"),
        coverage._replace(better=f"near {100 * level:g} %"),
    ]


def stacked(whole: Any, target: str) -> list[Line]:
    """The same of a mixture whose rows were held out in turn (an Entry of `auto`); without what is not known of it."""
    lines = [Line("log score", whole.score, whole.stderr, "nats per row", "higher")]
    if whole.metric == "accuracy":
        lines.append(Line("accuracy", 100 * whole.second, 100 * whole.second_stderr, "% of rows", "higher"))
        lines.append(Line("90 % set coverage", 100 * whole.coverage, 100 * whole.coverage_stderr, "% of rows", "near 90 %"))
    elif whole.metric == "RMSE":
        lines.append(Line("RMSE", whole.second, whole.second_stderr, f"units of {target}", "lower"))
        lines.append(Line("90 % interval coverage", 100 * whole.coverage, 100 * whole.coverage_stderr, "% of rows", "near 90 %"))
    return lines


def _line(score: Any, name: str, unit: str, factor: float = 1.0) -> Line:
    return Line(name, factor * score.value, factor * score.stderr, unit, "higher" if score.higher_is_better else "lower")


def as_text(value: float, stderr: float) -> str:
    """value ± standard error, with as many digits as the error makes meaningful (its first two); a power of ten apart where both are tiny or
    the value is huge.

    >>> as_text(54.0217, 1.7763), as_text(-5.40812, 0.0452), as_text(3.0, float("nan"))
    ('54.0 ± 1.8', '-5.408 ± 0.045', '3.000 ± ?')
    >>> as_text(6.663e-10, 2.04e-11), as_text(-2.5e9, 3.1e7), as_text(4e-8, float("nan"))
    ('(6.66 ± 0.20)e-10', '(-2.500 ± 0.031)e+09', '(4.000 ± ?)e-08')
    """
    size = max(abs(value), stderr if math.isfinite(stderr) else 0.0)
    if math.isfinite(size) and size and not 1e-4 <= size < 1e7:
        power = math.floor(math.log10(size))
        return f"({as_text(value / 10.0**power, stderr / 10.0**power)})e{power:+03d}"
    if not math.isfinite(stderr):
        return f"{value:.3f} ± ?"
    digits = 3 if stderr <= 0 else min(6, max(0, 1 - math.floor(math.log10(stderr))))
    return f"{value:.{digits}f} ± {stderr:.{digits}f}"


def as_json(lines: list[Line]) -> dict[str, dict[str, Any]]:
    """The scores by name; standard errors that one row cannot give are null."""
    return {
        line.name: {
            "value": line.value,
            "stderr": line.stderr if math.isfinite(line.stderr) else None,
            "unit": line.unit,
            "better": line.better,
        }
        for line in lines
    }


def table(lines: list[Line], title: str) -> Any:
    """The scores as a table for people."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=escape(title), title_justify="left")
    made.add_column("score")
    made.add_column("value ± standard error", justify="right", no_wrap=True)
    made.add_column("unit")
    made.add_column("better")
    for line in lines:
        made.add_row(line.name, as_text(line.value, line.stderr), escape(line.unit), line.better)
    return made
