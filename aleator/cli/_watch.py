"""Several methods at work and compared, as people see them: a bar over the budget, a line per method as it ends, a table at the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from aleator.cli._scores import as_text

WIDE = 110  # characters from which on all columns are shown


@contextlib.contextmanager
def watching(screen: Any, budget: float) -> Iterator[tuple[Callable[[Any], None], Callable[[str, float], None]]]:
    """(report, watch) for `auto`: what is being run, time used and left of the budget; nothing but finished lines outside of a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f} s used, at most {task.fields[left]:.0f} s left"),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )

    def watch(words: str, seconds: float) -> None:
        bar.update(task, description=escape(words), completed=min(seconds, budget), left=max(0.0, budget - seconds))

    def report(entry: Any) -> None:
        told = (
            entry.note
            if not math.isfinite(entry.score)
            else f"{as_text(entry.score, entry.stderr)} nats per held-out row (higher is better)"
        )
        screen.print(escape(f"  {entry.name:<12} {entry.seconds:6.1f} s  {told}"), soft_wrap=True)

    with bar:
        task = bar.add_task("starting", total=budget, left=budget)
        yield report, watch


def table(found: Any, screen: Any) -> Any:
    """The table of an Auto. In a narrow terminal the less important columns are left out; --json has them all."""
    from rich.markup import escape
    from rich.table import Table

    entries = [*found.entries, *([found.whole] if found.whole is not None and len(found.weights) > 1 else [])]
    metric = next((e.metric for e in entries if e.metric), "")
    second = {"accuracy": "accuracy\n%, ↑", "RMSE": "RMSE\nunits of y, ↓"}.get(metric, metric)
    share = 100.0 if metric == "accuracy" else 1.0
    text = lambda value, error, factor=1.0: as_text(factor * value, factor * error) if math.isfinite(value) else "–"
    evidence = any(e.evidence is not None for e in entries)
    columns: list[tuple[str, Callable[[Any], str], bool]] = [
        ("log score\nnats per row, ↑", lambda e: text(e.score, e.stderr), True),
        (second, lambda e: text(e.second, e.second_stderr, share), True),
        ("90 % covers\n% of rows", lambda e: text(e.coverage, e.coverage_stderr, 100.0), False),
        ("calibrated\np-value", lambda e: f"{e.calibration:.3f}" if math.isfinite(e.calibration) else "–", False),
        ("evidence\nnats", lambda e: "–" if e.evidence is None else f"{e.evidence:.1f} {SHORT.get(e.evidence_kind, '')}".strip(), False),
        ("time\ns", lambda e: f"{e.seconds:.1f}", True),
        ("stacking\nweight", lambda e: f"{e.weight:.2f}", True),
    ]
    shown = [c for c in columns if (screen.width >= WIDE or c[2]) and (c[0] != "evidence\nnats" or evidence) and c[0]]
    made = Table(title="Held-out rows, value ± standard error", title_justify="left")
    made.add_column("method", no_wrap=True)
    for heading, _, _ in shown:
        made.add_column(heading, justify="right", no_wrap=screen.width >= WIDE, overflow="fold")
    for entry in entries:
        if math.isfinite(entry.score):
            made.add_row(escape(entry.name), *(cell(entry) for _, cell, _ in shown), end_section=entry is found.entries[-1])
    return made


SHORT = {"exact": "", "lower bound": "≥", "upper bound": "≤", "estimate": "~"}


def print_found(screen: Any, found: Any) -> None:
    """Table, then what is to be said about single methods, then the verdict."""
    from rich.markup import escape

    screen.print(table(found, screen))
    if screen.width < WIDE:
        screen.print("A wider terminal (or --json) also shows coverage, calibration and evidence.", soft_wrap=True)
    elif any(e.evidence is not None for e in found.entries):
        numbers = any(e.metric == "RMSE" for e in found.entries)
        screen.print(f"Evidence: {'of y in standard deviations; ' * numbers}~ estimate, ≥ lower bound, bare: exact.", soft_wrap=True)
    for entry in found.entries:
        if entry.note:
            screen.print(escape(f"  {entry.name}: {entry.note}"), soft_wrap=True)
    if found.held_out:
        screen.print(escape(f"Verdict: {found.verdict}"), soft_wrap=True)
