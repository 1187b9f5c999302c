"""Who labels: an array of all labels, a function of row numbers, or a person with a CSV file between calls."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from aleator._errors import DataError, message
from aleator._files import write_atomic
from aleator._typing import Tree


def oracle_of(oracle: Any, x: Tree, rows: int) -> Callable[[np.ndarray], Sequence | None]:
    """Row numbers → labels, or None where they are still to come."""
    if isinstance(oracle, (str, os.PathLike)):
        return Sheet(Path(oracle), x)
    if callable(oracle):

        def ask(index: np.ndarray) -> Sequence:
            answers = list(oracle(index))
            if len(answers) != len(index):
                raise DataError(message("The oracle did not answer.", f"{len(answers)} labels", f"{len(index)}", "return one label a row"))
            return answers

        return ask
    values = np.asarray(oracle)
    if len(values) != rows:
        raise DataError(message("The oracle does not match the pool.", f"{len(values)} labels", f"{rows} rows", "pass one label a row"))
    return lambda index: list(values[index])


class Sheet:
    """A CSV file that a person fills in: row, label, and the inputs for them to look at."""

    def __init__(self, path: Path, x: Tree):
        self.path, self.x = path, x

    def __call__(self, index: np.ndarray) -> Sequence | None:
        known = self.read()
        missing = [int(row) for row in index if int(row) not in known]
        if not missing:
            return [known[int(row)] for row in index]
        leaves = [np.asarray(leaf)[missing].reshape(len(missing), -1) for leaf in jax.tree.leaves(self.x)]
        inputs = np.concatenate(leaves, axis=1)
        text = io.StringIO()
        writer = csv.writer(text)
        shown = range(inputs.shape[1] if inputs.shape[1] <= 50 else 0)
        writer.writerow(["row", "label", *(f"x{j}" for j in shown)])
        writer.writerows([row, label, *[""] * len(shown)] for row, label in known.items())
        writer.writerows([row, "", *(f"{inputs[i, j]:.6g}" for j in shown)] for i, row in enumerate(missing))
        write_atomic(self.path, text.getvalue().encode())
        return None

    def read(self) -> dict[int, Any]:
        """Labels by row; blank ones are still to come. Numbers are read as numbers."""
        if not self.path.exists():
            return {}
        with open(self.path, newline="", encoding="utf-8-sig") as file:
            table = list(csv.DictReader(file))
        if table and not {"row", "label"} <= set(table[0]):
            raise DataError(
                message("This is no sheet of labels.", f"columns {list(table[0])}", "row and label", f"repair {self.path.name}")
            )
        try:
            return {int(line["row"]): _value(line["label"]) for line in table if (line["label"] or "").strip()}
        except ValueError as error:
            raise DataError(message("A row number cannot be read.", str(error), "whole numbers", f"repair {self.path.name}")) from None


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()
