"""Data to try things on: the sets bundled with scikit-learn, and benchmark files from a directory of the user's.

Nothing is downloaded and no path is built in: benchmark files are looked for where the caller, or the variable ALEATOR_DATA, says.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aleator._errors import DataError, message, nearest

VARIABLE = "ALEATOR_DATA"


class Dataset(NamedTuple):
    """x (N, D) float64 in the data's own units; y (N,) float64, or int labels 0…K−1; names of the D columns."""

    x: np.ndarray
    y: np.ndarray
    names: tuple[str, ...]


def diabetes() -> Dataset:
    """442 patients, 10 measurements, progression of the disease after one year (25…346). Small and noisy: R² near .5 is all there is.

    >>> x, y, names = diabetes()
    >>> x.shape, y.shape, names[:3]
    ((442, 10), (442,), ('age', 'sex', 'bmi'))
    """
    from sklearn.datasets import load_diabetes

    found = load_diabetes(scaled=False)  # the scaled version has seen all rows, test rows included
    return _dataset(found, found.target.astype(np.float64))


def breast_cancer() -> Dataset:
    """569 tumours, 30 measurements, two classes: 0 malignant, 1 benign."""
    from sklearn.datasets import load_breast_cancer

    return _labelled(load_breast_cancer())


def wine() -> Dataset:
    """178 wines, 13 measurements, three cultivars 0, 1, 2."""
    from sklearn.datasets import load_wine

    return _labelled(load_wine())


def digits() -> Dataset:
    """1797 handwritten digits of 8 × 8 pixels as rows of 64 numbers 0…16, ten classes."""
    from sklearn.datasets import load_digits

    return _labelled(load_digits())


def load(name: str, directory: str | os.PathLike | None = None) -> dict[str, np.ndarray]:
    """The arrays of the benchmark file `<directory>/<name>.npz`, by their names; directory defaults to the variable ALEATOR_DATA.

    `load("uci/yacht")` gives X, y and the published splits. Pickled contents are refused.
    """
    given = directory if directory is not None else os.environ.get(VARIABLE)
    if not given:
        raise DataError(
            message(
                f"There is no directory to read {name!r} from.",
                f"directory=None, {VARIABLE} not set",
                "a directory with .npz files",
                f"pass --data DIR or directory=…, or set {VARIABLE}",
            )
        )
    root = Path(given)
    if not root.is_dir():
        raise DataError(
            message(
                "The data directory does not exist.", str(root), "a directory with .npz files", f"check --data, directory= or {VARIABLE}"
            )
        )
    relative = name.removesuffix(".npz")
    path = root / f"{relative}.npz"
    if not path.is_file():
        known = sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.npz"))
        shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
        raise DataError(
            message(
                "There is no such data file.",
                repr(relative) + nearest(relative, known),
                f"one of: {shown or 'nothing, the directory holds no .npz file'}",
                "check the name and the directory",
            )
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(message(f"{path} cannot be read.", str(error), "an .npz file of plain arrays", "copy it again")) from error


def _dataset(found: Any, y: np.ndarray) -> Dataset:
    return Dataset(np.asarray(found.data, np.float64), y, tuple(str(name) for name in found.feature_names))


def _labelled(found: Any) -> Dataset:
    return _dataset(found, found.target.astype(np.int64))
