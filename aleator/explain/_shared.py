"""What the three questions share: names, bands, errors and tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aleator import convergence
from aleator._errors import DataError, message

NUM_SAMPLES = 200
LEVEL = 0.9


def named(names: Sequence[str] | None, number: int, default: list[str] | None = None) -> tuple[str, ...]:
    if names is None:
        return tuple(default if default is not None else [f"x{j}" for j in range(number)])
    if len(names) != number:
        raise DataError(message("The names do not fit the inputs.", f"{len(names)} names", f"{number}", "pass one name per input"))
    return tuple(str(name) for name in names)


def tails(level: float) -> list[float]:
    if not 0 < level < 1:
        raise DataError(message("The band cannot be given.", f"level={level!r}", "a number in (0, 1)", "pass e.g. level=0.9"))
    return [0.5 - level / 2, 0.5 + level / 2]


def stderr(values: np.ndarray, num_chains: int) -> np.ndarray:
    """Monte Carlo standard error of the mean over the leading axis: by chains where there are any; 0 where nothing moves."""
    values = np.asarray(values, np.float64)
    if len(values) < 8 * num_chains:
        return values.std(axis=0) / np.sqrt(len(values))
    return np.nan_to_num(convergence.mcse(values.reshape(num_chains, -1, *values.shape[1:])))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    return "\n".join(line(row) for row in (head, *rows))
