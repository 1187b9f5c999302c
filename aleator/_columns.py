"""One column of a table: its kind, what is learned about it, and how its values become numbers. `tables` tells the rules in words."""

from __future__ import annotations

import dataclasses
import decimal
import math
import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aleator._errors import DataError, message

if TYPE_CHECKING:
    import pandas as pd

Label: TypeAlias = str | int | float | bool

MAX_LEVELS = 100
IDENTIFIER_LEVELS, IDENTIFIER_SHARE = 50, 0.5
ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
USABLE = "numbers, booleans, dates or text"


@dataclasses.dataclass(frozen=True)
class Column:
    """How one column becomes features.

    kind: numeric, date, boolean, categorical, or presence (one value besides missing ones: only whether it is missing counts).
    missing: training had missing values, so a feature tells where. fill, loc, scale: of numbers and dates. levels: of categories, in
    order; pooled: how many further levels share the all-zero code.
    """

    name: str
    kind: str
    missing: bool = False
    fill: float = 0.0
    loc: float = 0.0
    scale: float = 1.0
    levels: tuple[Label, ...] = ()
    pooled: int = 0

    @property
    def feature_names(self) -> tuple[str, ...]:
        values = {"presence": (), "categorical": tuple(f"{self.name}={level}" for level in self.levels)}.get(self.kind, (self.name,))
        return (*values, f"{self.name} (missing)") if self.missing else values

    def features(self, series: pd.Series) -> tuple[np.ndarray, list[str]]:
        """(n, len(feature_names)) float64, and notes."""
        absent = missing_in(series)
        notes = []
        if absent.any() and not self.missing:
            instead = "the training median is used" if self.kind in ("numeric", "date") else "coded as 0"
            notes.append(f"column {self.name!r}: {absent.sum()} missing, none in training; {instead}")
        if self.kind == "presence":
            values = np.empty((len(series), 0))
        elif self.kind == "categorical":
            values, unseen = self._one_hot(series)
            notes += unseen
        elif self.kind == "boolean":
            values = _as_booleans(series)[:, None]
        else:
            read = as_numbers if self.kind == "numeric" else _as_days
            values = ((np.where(absent, self.fill, read(series)) - self.loc) / self.scale)[:, None]
        return np.hstack([values, absent[:, None].astype(np.float64)]) if self.missing else values, notes

    def _one_hot(self, series: pd.Series) -> tuple[np.ndarray, list[str]]:
        codes, found = distinct(series)
        place = find(found, self.levels)
        if found and (place < 0).all() and are_text(self.levels) and not any(isinstance(value, str) for value in found):
            raise _wrong_type(self.name, found[0], f"text such as {self.levels[0]!r}")
        at = np.append(place, -1)[codes]  # missing has code −1, the last entry
        values = np.zeros((len(series), len(self.levels)))
        rows = np.flatnonzero(at >= 0)
        values[rows, at[rows]] = 1.0
        counts = np.bincount(codes[codes >= 0], minlength=len(found))
        unseen = [f"{value!r} ({n})" for value, n, i in zip(found, counts, place, strict=True) if i < 0]
        if not unseen or self.pooled:
            return values, []
        few = ", ".join(unseen[:5]) + (f" and {len(unseen) - 5} more levels" if len(unseen) > 5 else "")
        return values, [f"column {self.name!r}: unseen in training: {few}; coded as none of the known levels"]


def learn(series: pd.Series) -> tuple[Column | None, str | None]:
    """The rule for one training column, or None if it is dropped; and a note, if there is something to say."""
    name = str(series.name)
    absent = missing_in(series)
    missing = bool(absent.any())
    if absent.all():
        return None, f"column {name!r} has no values: dropped"
    kind = kind_of(series)
    values = as_numbers(series) if kind == "numeric" else _as_days(series) if kind == "date" else None
    if series[~absent].nunique() == 1:
        if not missing:
            return None, f"column {name!r} is constant ({plain(series[~absent].iloc[0])!r}): dropped"
        return Column(name, "presence", True), f"column {name!r} has one value besides missing ones: only whether it is missing is used"
    if kind == "boolean":
        return Column(name, kind, missing), None
    if values is None:
        return _learn_levels(series, missing)
    fill = float(np.median(values[~absent]))
    loc, scale = spread(np.where(absent, fill, values))
    if scale == 0:
        return None, f"column {name!r} is constant to within rounding: dropped"
    return Column(
        name, kind, missing, fill, loc, scale
    ), f"column {name!r} holds dates: used as days since 1970-01-01" if kind == "date" else None


def _learn_levels(series: pd.Series, missing: bool) -> tuple[Column | None, str | None]:
    import pandas as pd

    name = str(series.name)
    codes, found = distinct(series)
    counts = np.bincount(codes[codes >= 0], minlength=len(found))
    if len(found) > IDENTIFIER_LEVELS:
        numeric = pd.to_numeric(pd.Series(found, dtype=object), errors="coerce").notna().to_numpy()
        if 0.5 <= numeric.mean() < 1:  # dropping or pooling this would lose a column of numbers over a few odd entries
            odd = found[int(np.flatnonzero(~numeric)[0])]
            got, do = f"{odd!r} among {len(found)} values", "correct these values or leave them empty"
            raise DataError(message(f"Column {name!r} is mostly numbers, but not all.", got, "numbers", do))
        if len(found) > IDENTIFIER_SHARE * counts.sum():
            return None, f"column {name!r} looks like an identifier ({len(found)} different values in {counts.sum()} rows): dropped"
    frequent = sorted(range(len(found)), key=lambda i: (-counts[i], label_order(found[i])))[:MAX_LEVELS]
    levels = tuple(sorted((found[i] for i in frequent), key=label_order))
    pooled = len(found) - len(levels)
    note = f"column {name!r} has {len(found)} levels: the {MAX_LEVELS} most frequent are kept, the others pooled" if pooled else None
    return Column(name, "categorical", missing, levels=levels, pooled=pooled), note


def spread(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation; scaled by a power of two, which is exact, so that sums and squares cannot overflow."""
    unit = math.ldexp(1.0, math.frexp(float(np.abs(values).max()))[1] - 1)
    loc = float((values / unit).mean())
    return loc * unit, float((values / unit - loc).std()) * unit


# ---- values -----------------------------------------------------------------------------------------------------------------------


def missing_in(series: pd.Series) -> np.ndarray:
    """(n,) bool. NaN counts as missing also where pandas keeps it apart from NA."""
    from pandas.api import types

    if types.is_float_dtype(series.dtype):
        return np.isnan(series.to_numpy(np.float64, na_value=np.nan))
    return series.isna().to_numpy(dtype=bool)


def kind_of(series: pd.Series) -> str:
    """numeric, boolean, date or categorical, of a column with at least one value; refuses everything else by name."""
    import pandas as pd
    from pandas.api import types

    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return "categorical"
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_datetime64_any_dtype(dtype):
        return "date"
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        return "numeric"
    if not (types.is_object_dtype(dtype) or types.is_string_dtype(dtype)):
        raise DataError(message(f"Column {series.name!r} has a type that cannot be used.", dtype, USABLE, "convert or drop the column"))
    values = list(series.dropna().to_numpy(dtype=object))
    if all(isinstance(v, (bool, np.bool_)) for v in values):
        return "boolean"
    if all(_is_number(v) for v in values):
        return "numeric"
    if all(isinstance(v, str) for v in values):
        return "date" if bool(series.dropna().astype("string").str.fullmatch(ISO_DATE).all()) else "categorical"
    if all(hasattr(v, "isoformat") and hasattr(v, "year") for v in values):
        return "date"
    odd = next((v for v in values if not isinstance(v, (str, bool, np.bool_)) and not _is_number(v)), None)
    if odd is not None:
        got = f"{type(odd).__name__} {str(odd)[:60]!r}"
        raise DataError(message(f"Column {series.name!r} holds values that cannot be used.", got, USABLE, "convert or drop the column"))
    return "categorical"


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, decimal.Decimal)) and not isinstance(value, (bool, np.bool_))


def _wrong_type(name: Any, example: Any, expected: str) -> DataError:
    do = "write the column as it was when the model was fitted"
    return DataError(message(f"Column {name!r} has another type than in training.", f"{example!r}", expected, do))


def as_numbers(series: pd.Series) -> np.ndarray:
    """(n,) float64 with NaN where missing; refuses text, booleans and infinities, by column and example."""
    absent = missing_in(series)
    present = series[~absent]
    if len(present) and kind_of(present) != "numeric":
        values = [plain(v) for v in present.to_numpy(dtype=object)]
        raise _wrong_type(series.name, next((v for v in values if not _is_number(v)), values[0]), "numbers")
    result = np.full(len(series), np.nan)
    result[~absent] = present.to_numpy(np.float64)
    infinite = np.flatnonzero(np.isinf(result))
    if len(infinite):
        got = f"{result[infinite[0]]} in row {series.index[infinite[0]] + 1} (counting from 1)"
        raise DataError(
            message(f"Column {series.name!r} is not finite.", got, "finite numbers", "correct these values or leave them empty")
        )
    return result


def _as_days(series: pd.Series) -> np.ndarray:
    """(n,) days since 1970-01-01 (UTC where a zone is given), NaN where missing."""
    import pandas as pd

    absent = missing_in(series)
    present = series[~absent]
    result = np.full(len(series), np.nan)
    if len(present):
        if kind_of(present) != "date":
            raise _wrong_type(series.name, plain(present.iloc[0]), "dates such as 2024-05-31")
        try:
            typed = pd.api.types.is_datetime64_any_dtype(present.dtype)
            stamps = pd.to_datetime(present, utc=True) if typed else pd.to_datetime(present.astype(str), utc=True, format="ISO8601")
        except ValueError as error:
            what = f"Column {series.name!r} holds a date that does not exist."
            raise DataError(message(what, error, "dates such as 2024-05-31", "correct it or leave it empty")) from error
        result[~absent] = (stamps - pd.Timestamp(0, tz="UTC")).dt.total_seconds().to_numpy(np.float64) / 86400
    return result


def _as_booleans(series: pd.Series) -> np.ndarray:
    """(n,) 0/1, with 0 where missing; also takes the numbers 0 and 1 and the words true and false."""
    words = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
    codes, found = distinct(series)
    odd = next((value for value in found if str(value).lower() not in words), None)
    if odd is not None:
        raise _wrong_type(series.name, odd, "True or False")
    return np.array([*(words[str(value).lower()] for value in found), 0.0])[codes]


# ---- labels -----------------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Label:
    """A str, int, float or bool; anything else as text."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, (str, bool, int, float)) else str(value)


def label_order(label: Label) -> tuple[bool, Any]:
    """Sorts numbers before text."""
    return (isinstance(label, str), label)


def are_text(labels: tuple[Label, ...]) -> bool:
    return len(labels) > 0 and all(isinstance(label, str) for label in labels)


def distinct(series: pd.Series) -> tuple[np.ndarray, list[Label]]:
    """Codes (n,), −1 where missing, and the values they stand for in order of appearance."""
    import pandas as pd

    if series.dtype == object:
        values = [None if gone else plain(value) for value, gone in zip(series.to_numpy(dtype=object), series.isna(), strict=True)]
        kinds = {float if isinstance(v, (int, float)) and not isinstance(v, bool) else type(v) for v in values if v is not None}
        if len(kinds) > 1:  # 1, True and "1" in one column: to pandas the first two are equal, so all become text
            values = [None if v is None else str(v) for v in values]
        series = pd.Series(values, dtype=object)
    codes, found = pd.factorize(series)
    return codes, [plain(value) for value in found]


def find(values: list[Label], levels: tuple[Label, ...]) -> np.ndarray:
    """The position of each value among the levels, −1 if it is none of them."""
    known = {_key(level): i for i, level in enumerate(levels)}

    def place(value: Label) -> int:
        if _key(value) in known or isinstance(value, str):
            return known.get(_key(value), -1)
        # A reader may have turned text into numbers or booleans because this table holds fewer kinds of values.
        forms = [str(value), str(value).lower(), str(value).upper()]
        forms += [str(int(value))] if isinstance(value, float) and value.is_integer() else []
        return next((known[form] for form in forms if form in known), -1)

    return np.array([place(value) for value in values], dtype=np.int64)


def _key(label: Label) -> Any:
    return ("bool", label) if isinstance(label, bool) else label
