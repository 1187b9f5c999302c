"""A progress line on the host, drawn between compiled chunks."""

from __future__ import annotations

import sys
import time
from typing import Any

QUIET_SECONDS = 1.0  # shorter runs draw nothing


class Progress:
    """Shows phase, steps, time left and the watched number; `show` None means: only in a terminal or a notebook."""

    def __init__(self, show: bool | None, total: int):
        self.show = (sys.stderr.isatty() or "ipykernel" in sys.modules) if show is None else show
        self.total, self.began = total, time.monotonic()
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        return self

    def update(self, phase: str, steps: int, note: str) -> None:
        if not self.show or (self.bar is None and time.monotonic() - self.began < QUIET_SECONDS):
            return
        if self.bar is None:
            self.bar = _make_bar()
            self.bar.start()
            self.task = self.bar.add_task(phase, total=self.total, note=note)
        self.bar.update(self.task, description=phase, completed=steps, note=note)

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Bar(*columns, console=Console(stderr=True))
