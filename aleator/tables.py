"""Tables: reading them, and the stored pipeline from named columns to numbers and back.

What becomes of a column:

- numbers: missing values take the training median, a 0/1 column says where (if training had any); then (v − mean)/sd of training;
- dates (date types, or text that is all ISO dates): days since 1970-01-01, then as numbers;
- booleans: 0/1, and a 0/1 column "(missing)" if training had missing values;
- text and pandas categories: one 0/1 column per level, "(missing)" being a level of its own; unseen levels are all zeros;
- dropped with a note: constant columns, columns without any value, text that looks like an identifier (more than 50 levels, more than
  half of the rows unique). Of more than 100 levels the rarest are pooled (all zeros).

What becomes of the target: text, booleans and categories are class labels; so are whole numbers with two distinct values, or with at most
20 distinct values that are at most 5 % of the rows; every other number is a regression target, standardised. `task=` overrules this.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aleator._columns import Column, Label, are_text, as_numbers, distinct, find, kind_of, label_order, learn, missing_in, plain, spread
from aleator._errors import DataError, StoreError, message, nearest

if TYPE_CHECKING:
    import pandas as pd

DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
FORMATS = ".csv, .tsv or .tab (also with .gz), .parquet"
SCHEMA = 1
CLASS_VALUES, CLASS_SHARE = 20, 0.05


def read_table(path: str | os.PathLike[str], text: Iterable[str] = ()) -> pd.DataFrame:
    """Read CSV, TSV (both also gzipped) or Parquet, chosen by the file's name.

    Empty fields and NA, NaN, null and the like count as missing. A first column without a name is taken as row names, which are not data.
    text: columns whose values are kept as written ("007" stays "007"); at predict time pass `preprocessor.text_columns`.
    """
    import pandas as pd

    path = Path(path)
    suffix = next((s.lower() for s in reversed(path.suffixes) if s.lower() != ".gz"), "")
    if suffix not in DELIMITERS and suffix != ".parquet":
        raise DataError(message(f"{path.name} is of an unknown kind.", f"'{suffix}'", FORMATS, "rename or convert the file"))
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise DataError(message(f"There is no file {path}.", got, "a table", "check the path"))
    try:
        frame = pd.read_parquet(path) if suffix == ".parquet" else _read_text(path, DELIMITERS[suffix], text)
    except DataError:
        raise
    except pd.errors.EmptyDataError as error:
        raise DataError(message(f"{path.name} is empty.", "no header", "a header and rows", "export the table again")) from error
    except UnicodeDecodeError as error:
        raise DataError(message(f"{path.name} is not UTF-8 text.", error, "UTF-8", "save the table again as UTF-8")) from error
    except Exception as error:  # pandas and pyarrow raise many kinds; to the reader they all mean this
        got = f"{type(error).__name__}: {str(error).strip()}"
        raise DataError(
            message(f"{path.name} cannot be read.", got, FORMATS, "check that the file is whole and what its name says")
        ) from error
    _check_names([str(name) for name in frame.columns], path.name)
    if len(frame) == 0:
        raise DataError(
            message(f"{path.name} has no rows.", f"{frame.shape[1]} columns, 0 rows", "at least one row", "export the table again")
        )
    return frame


def _read_text(path: Path, delimiter: str, text: Iterable[str]) -> pd.DataFrame:
    import pandas as pd

    options: dict[str, Any] = {"sep": delimiter, "encoding": "utf-8", "skipinitialspace": True}
    # pandas would rename a second column 'a' to 'a.1' without a word: the header is read by itself first.
    header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **options).iloc[0].tolist()
    _check_names(header, path.name)
    if len(header) == 1 and ";" in header[0]:
        do = "save it with commas, or with tabs as .tsv"
        raise DataError(message(f"{path.name} looks separated by semicolons.", repr(header[0]), "commas", do))
    if "" in header[1:]:
        raise DataError(message(f"Column {header.index('', 1) + 1} of {path.name} has no name.", "''", "a name", "name it in the header"))
    if tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1):
        exact: dict[str, Any] = {"float_precision": "round_trip"}  # from 3.1 on pandas reads numbers exactly by itself
    else:
        exact = {}
    with warnings.catch_warnings():
        # Rows longer than the header: pandas would only warn, and drop what does not fit.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        kept: Any = {name: str for name in text if name in header}
        frame = pd.read_csv(path, index_col=False, low_memory=False, dtype=kept, **exact, **options)
    return frame.set_index(frame.columns[0]).rename_axis(None) if header[0] == "" else frame


def _check_names(names: list[str], where: str) -> None:
    twice = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if twice:
        raise DataError(message(f"Column names occur twice in {where}.", _listed(twice), "one name per column", "rename them"))


def _listed(names: Iterable[Any]) -> str:
    names = [repr(name) for name in names]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@dataclasses.dataclass(frozen=True)
class Preprocessor:
    """From a table to (x, y) and back, learned on training rows and stored with the fit. Frames are never changed.

    task: regression (y = (target − y_loc)/y_scale) or classification (y = position in `labels`, which are sorted). notes: what was
    decided about the training table. dropped: columns that were there and are not used.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"size": [1.0, 2.0, 3.0], "colour": ["red", "blue", "red"], "price": [10.0, 20.0, 40.5]})
    >>> preprocessor, x, y = Preprocessor.fit(table, "price")
    >>> preprocessor.task, preprocessor.feature_names, x.shape
    ('regression', ('size', 'colour=blue', 'colour=red'), (3, 3))
    >>> preprocessor.invert_target(y).tolist()
    [10.0, 20.0, 40.5]
    >>> x_new, notes = preprocessor.transform(pd.DataFrame({"colour": ["green"], "size": [2.0]}))
    >>> x_new.tolist(), notes
    ([[0.0, 0.0, 0.0]], ("column 'colour': unseen in training: 'green' (1); coded as none of the known levels",))
    """

    target: str
    task: str
    columns: tuple[Column, ...]
    dropped: tuple[str, ...] = ()
    y_loc: float = 0.0
    y_scale: float = 1.0
    labels: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def fit(cls, frame: pd.DataFrame, target: str, task: str | None = None) -> tuple[Preprocessor, np.ndarray, np.ndarray]:
        """Learn the pipeline; returns it with x (N, D) float64 and y: (N,) float64 standardised, or (N,) int32 labels 0…K−1.

        Rows without a target are left out of x and y.
        """
        frame, target = _check_frame(frame), str(target)
        if task not in (None, "regression", "classification"):
            do = "leave it out to have it inferred"
            raise DataError(message("Unknown task.", f"{task!r}", "'regression', 'classification' or None", do))
        if target not in frame.columns:
            do = f"choose one of the columns{nearest(target, frame.columns)}"
            raise DataError(message(f"There is no column {target!r} to predict.", _listed(frame.columns), repr(target), do))
        notes = []
        gone = missing_in(frame[target])
        if gone.all():
            raise DataError(
                message(f"The target {target!r} has no values.", f"{len(frame)} missing", "one per row", "choose another target")
            )
        if gone.any():
            notes.append(f"{gone.sum()} of {len(frame)} rows have no value of {target!r}: dropped")
            frame = frame[~gone]
        if task is None:
            task, why = _infer_task(frame[target])
            notes += [why] if why else []
        scaling = _learn_target(frame[target], task, had_missing=bool(gone.any()))
        columns, dropped = [], []
        for name in frame.columns.drop(target):
            column, note = learn(frame[name])
            notes += [note] if note else []
            if column is None:
                dropped.append(name)
            else:
                columns.append(column)
        if not columns:
            got = "; ".join(notes) or "no other column"
            raise DataError(message("No column is left to predict from.", got, "a column that varies", "add columns to the table"))
        self = cls(target, task, tuple(columns), tuple(dropped), notes=tuple(notes), **scaling)
        x, _ = self.transform(frame)
        return self, x, self.encode_target(frame)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the D columns of x."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns that `read_table` has to leave as text, for the levels to be found again."""
        text = [column.name for column in self.columns if are_text(column.levels)]
        return (*text, self.target) if are_text(self.labels) else tuple(text)

    def transform(self, frame: pd.DataFrame) -> tuple[np.ndarray, tuple[str, ...]]:
        """x (n, D) float64 and notes. Columns are found by name; one that lacks or has another type is refused, extra ones are ignored."""
        frame = _check_frame(frame)
        wanted = [column.name for column in self.columns]
        known, given = {*wanted, *self.dropped, self.target}, set(frame.columns)
        extra = [name for name in frame.columns if name not in known]
        if lacking := [name for name in wanted if name not in given]:
            do = f"add the column{'s' if len(lacking) > 1 else ''}{nearest(lacking[0], extra)}, with empty fields where unknown"
            raise DataError(message(f"The table lacks {_listed(lacking)}.", _listed(frame.columns), _listed(wanted), do))
        notes = [f"ignored, not there in training: {_listed(extra)}"] if extra else []
        parts = []
        for column in self.columns:
            values, more = column.features(frame[column.name])
            parts.append(values)
            notes += more
        return np.hstack(parts), tuple(notes)

    def encode_target(self, frame: pd.DataFrame) -> np.ndarray:
        """y of every row: (n,) float64 standardised, or (n,) int32 labels."""
        frame = _check_frame(frame)
        if self.target not in frame.columns:
            do = f"add the column{nearest(self.target, frame.columns)}"
            raise DataError(message(f"The table lacks the target {self.target!r}.", _listed(frame.columns), repr(self.target), do))
        series = frame[self.target]
        if len(rows := np.flatnonzero(missing_in(series))):
            got, do = f"no value in row {rows[0] + 1} (counting from 1)", "drop these rows, or predict without the target"
            raise DataError(message(f"The target {self.target!r} is missing.", got, "a value in every row", do))
        if self.task == "regression":
            values = as_numbers(series)
            z = (values - self.y_loc) / self.y_scale
            # One step of correction leaves nothing to the way back but its own rounding.
            return z - (self.invert_target(z) - values) / self.y_scale
        codes, found = distinct(series)
        place = find(found, self.labels)
        if (place < 0).any():
            got = repr(found[int(np.flatnonzero(place < 0)[0])])
            raise DataError(
                message(
                    f"The target {self.target!r} has a label unseen in training.", got, _listed(self.labels), "drop or relabel these rows"
                )
            )
        return place[codes].astype(np.int32)

    def invert_target(self, y: Any) -> np.ndarray:
        """Standardised values to the target's own units, y_loc + y_scale·y; or labels 0…K−1 to the classes' names."""
        if self.task == "regression":
            return self.y_loc + self.y_scale * np.asarray(y, np.float64)
        same = len({type(label) for label in self.labels}) == 1
        return np.array(self.labels, dtype=None if same else object)[np.asarray(y)]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for `json.dumps`; floats survive to the last bit and labels keep their type."""
        return {"schema": SCHEMA, **_lists(dataclasses.asdict(self))}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Preprocessor:
        """The inverse of `to_json`."""
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if schema != SCHEMA:
            do = "load it with the version of aleator that wrote it"
            raise StoreError(message("The stored preprocessing is of another version.", schema, SCHEMA, do))
        try:
            columns = tuple(Column(**{**column, "levels": tuple(column["levels"])}) for column in stored["columns"])
            rest: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
            del rest["schema"], rest["columns"]
            return cls(columns=columns, **rest)
        except (KeyError, TypeError) as error:
            raise StoreError(message("The stored preprocessing is damaged.", error, "what to_json wrote", "fit again")) from error


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _check_frame(frame: Any) -> pd.DataFrame:
    """The same table with names as text and rows numbered from 0; the user's frame is not touched."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise DataError(message("This is not a table.", type(frame).__name__, "a pandas DataFrame", "use read_table or pandas.DataFrame"))
    if frame.columns.nlevels > 1:
        raise DataError(message("The columns have several levels of names.", frame.columns.nlevels, 1, "join the names of each column"))
    names = [str(name) for name in frame.columns]
    _check_names(names, "the table")
    if len(frame) == 0:
        raise DataError(message("The table has no rows.", f"{len(names)} columns, 0 rows", "at least one row", "check how it was made"))
    return frame.set_axis(names, axis=1).reset_index(drop=True)


def _infer_task(series: pd.Series) -> tuple[str, str | None]:
    """The task and, where somebody may disagree, a note."""
    name, kind = series.name, kind_of(series)
    num_values = int(series.nunique())
    if kind == "date":
        do = "turn it into a number, such as days"
        raise DataError(message(f"The target {name!r} is a date.", repr(str(series.iloc[0])), "a number or a class", do))
    if kind != "numeric":
        if num_values > max(CLASS_VALUES, 0.5 * len(series)):
            got = f"{num_values} different values in {len(series)} rows"
            raise DataError(
                message(f"The target {name!r} looks like an identifier.", got, "classes that occur repeatedly", "choose another target")
            )
        return "classification", None
    values = as_numbers(series)
    few = num_values == 2 or num_values <= min(CLASS_VALUES, CLASS_SHARE * len(series))
    if few and num_values > 1 and bool((values == np.round(values)).all()):
        note = f"the target {name!r} has {num_values} different whole numbers: taken as classes (task='regression' overrules)"
        return "classification", note
    return "regression", None


def _learn_target(series: pd.Series, task: str, had_missing: bool) -> dict[str, Any]:
    """y_loc and y_scale, or labels."""
    name = series.name
    if task == "regression":
        if kind_of(series) != "numeric":
            raise DataError(
                message(f"The target {name!r} is not a number.", repr(plain(series.iloc[0])), "numbers", "leave out task='regression'")
            )
        loc, scale = spread(as_numbers(series))
        if scale == 0:
            got = f"{plain(series.iloc[0])!r} in all {len(series)} rows"
            raise DataError(message(f"The target {name!r} is constant.", got, "values that differ", "choose another target"))
        return {"y_loc": loc, "y_scale": scale}
    _, labels = distinct(series)
    if had_missing and all(isinstance(label, float) and label.is_integer() for label in labels):
        labels = [int(label) for label in labels]  # whole numbers became floats only because some were missing
    if len(labels) < 2:
        got = f"{labels[0]!r} in all {len(series)} rows"
        raise DataError(
            message(f"The target {name!r} has a single class.", got, "at least two classes", "choose another target or add rows")
        )
    return {"labels": tuple(sorted(labels, key=label_order))}
