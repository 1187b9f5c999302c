"""Reading tables and the stored pipeline: every kind of column, every kind of mistake, exact round trips."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import gzip
import json

import numpy as np
import pandas as pd
import pytest

from aleator import _columns
from aleator._errors import DataError, StoreError
from aleator.tables import Preprocessor, read_table


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def frame_of(n=40, seed=0):
    """Numbers, whole numbers, booleans, text, with and without missing values, and a number to predict."""
    rng = np.random.default_rng(seed)
    size = rng.normal(50.0, 8.0, n)
    holes = rng.normal(size=n) * 1e-3
    holes[::7] = np.nan
    return pd.DataFrame(
        {
            "size": size,
            "holes": holes,
            "rooms": rng.integers(1, 9, n),
            "garden": rng.random(n) < 0.5,
            "colour": rng.choice(["red", "green", "blue"], n),
            "kind": [None if i % 9 == 0 else ("a", "b")[i % 2] for i in range(n)],
            "price": 1000.0 + 3.0 * size + rng.normal(size=n),
        }
    )


def fit(frame, target="price", **options):
    return Preprocessor.fit(frame, target, **options)


def column(values, **options):
    """x of a table whose one column beside the target holds these values, and the pipeline."""
    preprocessor, x, _ = fit(pd.DataFrame({"v": values, "price": np.arange(len(values)) + 0.5}), **options)
    return preprocessor, x


# ---- reading ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ","), ("t.tsv", "\t"), ("t.TAB", "\t")])
def test_reads_text_by_extension(tmp_path, name, delimiter):
    frame = read_table(write(tmp_path / name, f"a{delimiter}b\n1{delimiter}x\n0.1{delimiter}y\n"))
    assert frame.columns.tolist() == ["a", "b"]
    assert frame["a"].tolist() == [1.0, 0.1]


def test_reads_gzip_and_parquet(tmp_path):
    frame = frame_of()
    with gzip.open(tmp_path / "t.csv.gz", "wt", encoding="utf-8") as file:
        frame.to_csv(file, index=False)
    pd.testing.assert_frame_equal(read_table(tmp_path / "t.csv.gz"), read_table(write(tmp_path / "t.csv", frame.to_csv(index=False))))
    frame.to_parquet(tmp_path / "t.parquet")
    back = read_table(tmp_path / "t.parquet")
    np.testing.assert_array_equal(fit(back)[1], fit(frame)[1])


def test_numbers_are_read_to_the_last_bit(tmp_path):
    values = np.random.default_rng(0).normal(size=200)
    frame = read_table(write(tmp_path / "t.csv", "a\n" + "\n".join(map(repr, values.tolist()))))
    np.testing.assert_array_equal(frame["a"], values)


def test_unicode_quotes_and_a_byte_order_mark(tmp_path):
    text = 'größe,"name, with comma","say ""hi""", 数\n1,"a,b",é,3\n2,c,d,4\n'
    for encoding in ("utf-8", "utf-8-sig"):
        frame = read_table(write(tmp_path / "t.csv", text, encoding))
        assert frame.columns.tolist() == ["größe", "name, with comma", 'say "hi"', "数"]
        assert frame["name, with comma"].tolist() == ["a,b", "c"]


def test_nan_words_are_missing(tmp_path):
    frame = read_table(write(tmp_path / "t.csv", "a,b\n1,x\nNaN,NA\n,null\n4,y\n"))
    assert frame["a"].isna().tolist() == frame["b"].isna().tolist() == [False, True, True, False]


def test_a_first_column_without_a_name_holds_row_names(tmp_path):
    frame = pd.DataFrame({"a": [1, 2], "b": [3, 4]}, index=["p", "q"])
    back = read_table(write(tmp_path / "t.csv", frame.to_csv()))
    assert back.columns.tolist() == ["a", "b"]
    assert back.index.tolist() == ["p", "q"]


def test_columns_kept_as_text_are_not_read_as_numbers(tmp_path):
    path = write(tmp_path / "t.csv", "code,a\n007,1\n010,2\n")
    assert read_table(path)["code"].tolist() == [7, 10]
    assert read_table(path, text=("code", "not there"))["code"].tolist() == ["007", "010"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("t.csv", b"", r"t.csv is empty"),
        ("t.csv", b"\n\n", r"t.csv is empty"),
        ("t.csv", b"a,b\n", r"t.csv has no rows. Got: 2 columns, 0 rows"),
        ("t.csv", b"a,b,a\n1,2,3\n", r"Column names occur twice in t.csv. Got: 'a'"),
        ("t.csv", b"a,,b\n1,2,3\n", r"Column 2 of t.csv has no name"),
        ("t.csv", b"a;b\n1;2\n", r"looks separated by semicolons"),
        ("t.csv", b"a,b\n1,2,3\n", r"t.csv cannot be read"),
        ("t.csv", b"a,b\n1,2\n3,4,5,6\n", r"t.csv cannot be read"),
        ("t.csv", b"a,b\n\xff\xfe,2\n", r"t.csv is not UTF-8"),
        ("t.csv.gz", b"not gzip", r"t.csv.gz cannot be read"),
        ("t.parquet", b"not parquet", r"t.parquet cannot be read"),
        ("t.parquet", b"", r"t.parquet cannot be read"),
        ("t.xlsx", b"x", r"t.xlsx is of an unknown kind. Got: '.xlsx'. Expected: .csv"),
        ("t", b"x", r"t is of an unknown kind"),
    ],
)
def test_unreadable_files_are_refused_by_name(tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=error):
        read_table(tmp_path / name)


def test_a_path_without_a_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"There is no file .*t.csv. Got: nothing there"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(DataError, match=r"There is no file .*d.csv. Got: a folder"):
        read_table(tmp_path / "d.csv")


# ---- columns ----------------------------------------------------------------------------------------------------------------------


def test_every_kind_of_column_has_its_features():
    frame = frame_of()
    preprocessor, x, y = fit(frame)
    names = (
        "size",
        "holes",
        "holes (missing)",
        "rooms",
        "garden",
        "colour=blue",
        "colour=green",
        "colour=red",
        "kind=a",
        "kind=b",
        "kind (missing)",
    )
    assert preprocessor.feature_names == names
    assert x.shape == (40, 11)
    assert x.dtype == y.dtype == np.float64
    assert y.shape == (40,)
    by_name = dict(zip(names, x.T, strict=True))
    np.testing.assert_array_equal(by_name["holes (missing)"], frame["holes"].isna())
    np.testing.assert_array_equal(by_name["garden"], frame["garden"])
    np.testing.assert_array_equal(by_name["colour=green"], frame["colour"] == "green")
    np.testing.assert_array_equal(by_name["kind (missing)"], frame["kind"].isna())
    np.testing.assert_array_equal(x[:, 5:8].sum(1), 1.0)
    np.testing.assert_array_equal(x[:, 8:11].sum(1), 1.0)
    filled = frame["holes"].fillna(frame["holes"].median())
    np.testing.assert_allclose(by_name["holes"], (filled - filled.mean()) / filled.std(ddof=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_training_columns_have_mean_zero_and_sd_one_and_the_target_comes_back(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 300))
    frame = pd.DataFrame({f"v{i}": rng.normal(10.0 ** rng.uniform(-6, 6), 10.0 ** rng.uniform(-6, 6), n) for i in range(3)})
    frame["y"] = rng.normal(rng.normal() * 10.0 ** rng.uniform(-5, 5), 10.0 ** rng.uniform(-5, 5), n) * (1 + rng.integers(0, 2, n))
    preprocessor, x, y = fit(frame, "y", task="regression")
    limit = 1e-9 + np.finfo(float).eps * np.array([abs(c.loc) / c.scale for c in preprocessor.columns])
    assert (np.abs(x.mean(0)) <= limit).all()
    np.testing.assert_allclose(x.std(0), 1.0, rtol=1e-9)
    np.testing.assert_allclose(
        [y.mean(), y.std()], [0.0, 1.0], atol=1e-9 + np.finfo(float).eps * abs(preprocessor.y_loc) / preprocessor.y_scale
    )
    values = frame["y"].to_numpy()
    # One unit in the last place of the largest number on the way back; a sum cannot be finer than its terms.
    unit = np.spacing(np.max([np.abs(values), np.abs(values - preprocessor.y_loc), np.full(n, abs(preprocessor.y_loc))], axis=0))
    assert (np.abs(preprocessor.invert_target(y) - values) <= unit).all()
    again, notes = preprocessor.transform(frame)
    np.testing.assert_array_equal(again, x)
    assert notes == ()


def test_huge_numbers_do_not_overflow():
    preprocessor, x = column([1e300, -1e300, 3e300, 0.0])
    np.testing.assert_allclose([x.mean(), x.std()], [0.0, 1.0], atol=1e-12)
    assert np.isfinite(preprocessor.columns[0].scale)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pd.array([1, None, 3, 4], dtype="Int64"), "numeric"),
        (pd.array([1.5, None, 3, 4], dtype="Float64"), "numeric"),
        (pd.array([1, None, 3, 4], dtype="int64[pyarrow]"), "numeric"),
        (np.array([1, 2, 3, 4], dtype="uint8"), "numeric"),
        (np.array([1, 2, 3, 4], dtype="float32"), "numeric"),
        ([decimal.Decimal("1.5"), None, 3, 4.0], "numeric"),
        (pd.array([True, None, False, True], dtype="boolean"), "boolean"),
        (pd.array([True, None, False, True], dtype="bool[pyarrow]"), "boolean"),
        ([True, None, False, True], "boolean"),
        (pd.array(["a", None, "b", "a"], dtype="string"), "categorical"),
        (pd.array(["a", None, "b", "a"], dtype="string[pyarrow]"), "categorical"),
        (pd.Categorical(["a", None, "b", "a"], categories=["b", "a", "never"]), "categorical"),
        (pd.Categorical([1, None, 2, 1]), "categorical"),
        (["a", 1, True, "a"], "categorical"),
        (pd.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-04"]), "date"),
        (pd.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-04"]).tz_localize("Europe/Paris"), "date"),
        (["2024-01-01", None, "2024-01-03T10:00:00Z", "2024-01-04 10:00"], "date"),
        ([datetime.date(2024, 1, 1), None, datetime.date(2024, 1, 2), datetime.date(2024, 1, 4)], "date"),
    ],
    ids=str,
)
def test_types_are_recognised_in_all_their_forms(values, kind):
    preprocessor, x = column(values)
    assert preprocessor.columns[0].kind == kind
    assert np.isfinite(x).all()
    missing = pd.Series(values).isna().to_numpy()
    assert preprocessor.columns[0].missing == missing.any()
    if missing.any():
        np.testing.assert_array_equal(x[:, -1], missing)


def test_nan_inside_a_nullable_column_is_missing():
    values = pd.Series([1.0, 2.0, 0.0], dtype="Float64")
    preprocessor, x = column(values / pd.Series([1.0, 1.0, 0.0], dtype="Float64"))
    assert preprocessor.columns[0].missing
    assert np.isfinite(x).all()


def test_dates_count_in_days():
    preprocessor, x = column(["1970-01-02", "1970-01-03", "1970-01-05T12:00:00+12:00"])
    assert preprocessor.columns[0].fill == 2.0
    np.testing.assert_allclose(preprocessor.columns[0].loc + preprocessor.columns[0].scale * x[:, 0], [1, 2, 4])
    assert preprocessor.notes == ("column 'v' holds dates: used as days since 1970-01-01",)
    typed = pd.DataFrame({"v": pd.to_datetime(["1970-01-03"])})
    np.testing.assert_allclose(preprocessor.transform(typed)[0], x[1:2])
    with pytest.raises(DataError, match=r"Column 'v' has another type than in training. Got: 'soon'"):
        preprocessor.transform(pd.DataFrame({"v": ["soon"]}))
    with pytest.raises(DataError, match=r"Column 'v' holds a date that does not exist"):
        preprocessor.transform(pd.DataFrame({"v": ["2024-02-30"]}))


def test_levels_of_different_types_stay_apart():
    preprocessor, x = column([1, "1", True, "x"])
    assert preprocessor.columns[0].levels == ("1", "True", "x")  # a column with text is text: 1 and "1" are the same then
    np.testing.assert_array_equal(x, [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    preprocessor, _ = column(pd.Categorical([3, 1, 2, 1]))
    assert preprocessor.columns[0].levels == (1, 2, 3)
    assert preprocessor.transform(pd.DataFrame({"v": [2]}))[0].tolist() == [[0, 1, 0]]
    x, notes = preprocessor.transform(pd.DataFrame({"v": [True]}))  # to Python True is 1, to a table it is not
    assert x.sum() == 0
    assert "unseen in training: True (1)" in notes[0]


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ([None] * 4, "column 'v' has no values: dropped"),
        ([np.nan] * 4, "column 'v' has no values: dropped"),
        ([0.1] * 4, "column 'v' is constant (0.1): dropped"),
        (["a"] * 4, "column 'v' is constant ('a'): dropped"),
        ([True] * 4, "column 'v' is constant (True): dropped"),
        (["2024-01-01"] * 4, "column 'v' is constant ('2024-01-01'): dropped"),
        ([f"id{i}" for i in range(60)], "column 'v' looks like an identifier (60 different values in 60 rows): dropped"),
    ],
)
def test_useless_columns_are_dropped_with_a_note(values, note):
    frame = pd.DataFrame({"w": np.arange(len(values)), "v": values, "price": np.arange(len(values)) + 0.5})
    preprocessor, x, _ = fit(frame)
    assert preprocessor.notes == (note,)
    assert preprocessor.dropped == ("v",)
    assert x.shape[1] == 1
    # It may be there or not when predicting, and nobody is told again.
    assert preprocessor.transform(frame)[1] == preprocessor.transform(frame[["w"]])[1] == ()
    with pytest.raises(DataError, match=r"No column is left to predict from. Got: column 'v'"):
        fit(frame[["v", "price"]])


@pytest.mark.parametrize("value", [7.0, "a", True])
def test_one_value_besides_missing_ones_leaves_whether_it_is_missing(value):
    preprocessor, x = column([value, None, value, None])
    assert preprocessor.feature_names == ("v (missing)",)
    assert x.ravel().tolist() == [0, 1, 0, 1]
    assert "only whether it is missing is used" in preprocessor.notes[0]
    assert preprocessor.transform(pd.DataFrame({"v": [value]}))[0].tolist() == [[0.0]]


def test_many_levels_that_repeat_are_kept_and_the_rarest_pooled():
    values = [f"c{i % 60}" for i in range(240)]
    assert column(values)[1].shape == (240, 60)
    preprocessor, x = column([f"c{i % 150:03d}" for i in range(3 * 150 - 50)])
    assert x.shape[1] == _columns.MAX_LEVELS
    assert preprocessor.columns[0].pooled == 50
    assert preprocessor.notes == ("column 'v' has 150 levels: the 100 most frequent are kept, the others pooled",)
    assert preprocessor.columns[0].levels == tuple(f"c{i:03d}" for i in range(100))
    x, notes = preprocessor.transform(pd.DataFrame({"v": ["c149", "new"]}))
    assert x.sum() == 0
    assert notes == ()


def test_numbers_spoiled_by_a_few_words_are_refused_not_dropped():
    with pytest.raises(DataError, match=r"Column 'v' is mostly numbers, but not all. Got: 'unknown' among 80 values"):
        column([str(i / 7) for i in range(79)] + ["unknown"])


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([1.0, np.inf, 2.0], r"Column 'v' is not finite. Got: inf in row 2 \(counting from 1\)"),
        ([1.0, 2.0, -np.inf], r"Column 'v' is not finite. Got: -inf in row 3"),
        ([np.inf, np.nan, np.inf], r"Column 'v' is not finite"),
        ([1j, 2j, 3j], r"Column 'v' has a type that cannot be used. Got: complex128"),
        (pd.to_timedelta([1, 2, 3], unit="s"), r"Column 'v' has a type that cannot be used. Got: timedelta64"),
        ([[1], [2], [3]], r"Column 'v' holds values that cannot be used. Got: list '\[1\]'"),
        ([{"a": 1}, "b", 2], r"Column 'v' holds values that cannot be used. Got: dict"),
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(values, error):
    with pytest.raises(DataError, match=error):
        column(values)


def test_rows_in_messages_count_all_rows_of_the_table():
    frame = pd.DataFrame({"v": [1.0, 2.0, 3.0, np.inf], "price": [None, None, 0.5, 1.5]}, index=list("abcd"))
    with pytest.raises(DataError, match=r"Column 'v' is not finite. Got: inf in row 4"):
        fit(frame)


# ---- target -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (np.linspace(0, 1, 100), "regression"),
        ([0.5, 1.5] * 50, "regression"),
        (list(range(100)), "regression"),
        ([0, 1] * 5, "classification"),
        ([0.0, 1.0] * 50, "classification"),
        ([0, 1, 2, 3] * 25, "classification"),
        ([0, 1, 2, 3] * 10, "regression"),
        (list(range(20)) * 20, "classification"),
        (list(range(21)) * 100, "regression"),
        (["a", "b"] * 2, "classification"),
        ([True, False] * 2, "classification"),
        (pd.Categorical([1.5, 2.5] * 2), "classification"),
        (pd.array([0, 1] * 4, dtype="Int64"), "classification"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_task_is_inferred(values, task):
    frame = pd.DataFrame({"v": np.arange(len(values)) + 0.5, "t": values})
    assert fit(frame, "t")[0].task == task


def test_whole_numbers_taken_as_classes_leave_a_note_and_task_overrules():
    frame = pd.DataFrame({"v": np.arange(100) + 0.5, "t": [3, 4, 5, 6] * 25})
    preprocessor, _, y = fit(frame, "t")
    assert preprocessor.notes == ("the target 't' has 4 different whole numbers: taken as classes (task='regression' overrules)",)
    assert y.dtype == np.int32
    assert y[:4].tolist() == [0, 1, 2, 3]
    preprocessor, _, y = fit(frame, "t", task="regression")
    assert (preprocessor.task, preprocessor.y_loc, preprocessor.notes) == ("regression", 4.5, ())
    np.testing.assert_allclose(y.std(), 1)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["no", "yes", "no", "ja"], ("ja", "no", "yes")),
        ([True, False, True, True], (False, True)),
        ([5, -3, 5, 5], (-3, 5)),
        ([0.5, 2.0, 0.5, 0.5], (0.5, 2.0)),
        (pd.Categorical(["b", "a", "b", "b"], categories=["z", "b", "a"]), ("a", "b")),
        ([2.0, 10.0, None, 2.0], (2, 10)),
        (pd.array([2, 10, None, 2], dtype="Int64"), (2, 10)),
    ],
    ids=str,
)
def test_labels_are_sorted_and_keep_their_type(values, labels):
    frame = pd.DataFrame({"v": [1.0, 2.0, 3.0, 4.0], "t": values})
    preprocessor, x, y = fit(frame, "t", task="classification")
    assert preprocessor.labels == labels
    assert [type(a) for a in preprocessor.labels] == [type(b) for b in labels]
    kept = frame[frame["t"].notna()]
    assert len(x) == len(y) == len(kept)
    assert y.dtype == np.int32
    assert preprocessor.invert_target(y).tolist() == kept["t"].tolist()
    again = Preprocessor.from_json(json.loads(json.dumps(preprocessor.to_json())))
    assert again == preprocessor
    assert [type(a) for a in again.labels] == [type(b) for b in labels]
    np.testing.assert_array_equal(again.encode_target(kept), y)


def test_more_than_twenty_classes():
    labels = [f"class {i:02d}" for i in range(25)]
    preprocessor, _, y = fit(pd.DataFrame({"v": np.arange(100) + 0.5, "t": labels * 4}), "t")
    assert preprocessor.labels == tuple(labels)
    assert y.tolist() == list(range(25)) * 4


def test_rows_without_a_target_are_dropped_with_a_count():
    frame = frame_of()
    frame.loc[[0, 5, 6], "price"] = np.nan
    preprocessor, x, y = fit(frame)
    assert preprocessor.notes[0] == "3 of 40 rows have no value of 'price': dropped"
    assert len(x) == len(y) == 37
    np.testing.assert_array_equal(x, preprocessor.transform(frame.dropna(subset="price"))[0])
    with pytest.raises(DataError, match=r"The target 'price' is missing. Got: no value in row 1 "):
        preprocessor.encode_target(frame)


@pytest.mark.parametrize(
    ("values", "options", "error"),
    [
        ([None] * 4, {}, r"The target 't' has no values"),
        ([0.1] * 3 + [None], {}, r"The target 't' is constant. Got: 0.1 in all 3 rows"),
        (["a"] * 4, {}, r"The target 't' has a single class. Got: 'a' in all 4 rows"),
        ([1, 1, 1, 1], {"task": "classification"}, r"The target 't' has a single class"),
        (["a", "b", "a", "b"], {"task": "regression"}, r"The target 't' is not a number. Got: 'a'"),
        ([1.0, np.inf, 2.0, 3.0], {}, r"Column 't' is not finite. Got: inf in row 2"),
        (["2024-01-01", "2024-01-02"] * 2, {}, r"The target 't' is a date"),
        ([1.0, 2.0, 3.5, 4.0], {"task": "clustering"}, r"Unknown task. Got: 'clustering'"),
        ([f"id{i}" for i in range(40)], {}, r"The target 't' looks like an identifier. Got: 40 different values in 40 rows"),
    ],
)
def test_targets_that_cannot_be_predicted_are_refused(values, options, error):
    with pytest.raises(DataError, match=error):
        fit(pd.DataFrame({"v": np.arange(len(values)) + 0.5, "t": values}), "t", **options)


def test_a_target_that_is_not_there_suggests_the_nearest():
    with pytest.raises(DataError, match=r"There is no column 'prise' to predict.*did you mean 'price'"):
        fit(frame_of(), "prise")


# ---- predicting -------------------------------------------------------------------------------------------------------------------


def test_columns_are_found_by_name_and_one_row_is_enough():
    frame = frame_of()
    preprocessor, x, y = fit(frame)
    shuffled = frame[frame.columns[::-1]].set_index(np.arange(40) * 3)
    np.testing.assert_array_equal(preprocessor.transform(shuffled)[0], x)
    for i in (0, 1, 39):
        row, notes = preprocessor.transform(frame.iloc[[i]].drop(columns="price"))
        np.testing.assert_array_equal(row, x[[i]])
        assert notes == ()
    np.testing.assert_array_equal(preprocessor.encode_target(frame.iloc[[3]]), y[[3]])


def test_one_row_through_a_file(tmp_path):
    frame = frame_of()
    preprocessor, x, _ = fit(read_table(write(tmp_path / "train.csv", frame.to_csv(index=False))))
    for i in range(10):
        path = write(tmp_path / "row.csv", frame.iloc[[i]].to_csv(index=False))
        row, notes = preprocessor.transform(read_table(path, text=preprocessor.text_columns))
        np.testing.assert_array_equal(row, x[[i]])
        assert notes == ()


def test_extra_columns_are_ignored_with_a_note():
    frame = frame_of()
    preprocessor, x, _ = fit(frame)
    more, notes = preprocessor.transform(frame.assign(shoe=1, ß="x"))
    np.testing.assert_array_equal(more, x)
    assert notes == ("ignored, not there in training: 'shoe', 'ß'",)


def test_missing_columns_are_refused_by_name():
    preprocessor, _, _ = fit(frame_of())
    with pytest.raises(DataError, match=r"The table lacks 'colour', 'kind'\."):
        preprocessor.transform(frame_of().drop(columns=["colour", "kind"]))
    with pytest.raises(DataError, match=r"The table lacks 'colour'\..*did you mean 'color'"):
        preprocessor.transform(frame_of().rename(columns={"colour": "color"}))
    with pytest.raises(DataError, match=r"The table lacks the target 'price'.*did you mean 'prices'"):
        preprocessor.encode_target(frame_of().rename(columns={"price": "prices"}))


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("size", ["big", "small"], r"Column 'size' has another type than in training. Got: 'big'. Expected: numbers"),
        ("size", [1.0, "small"], r"Column 'size' has another type than in training. Got: 'small'"),
        ("size", ["1.5", "2.5"], r"Column 'size' has another type than in training. Got: '1.5'"),
        ("size", [True, False], r"Column 'size' has another type than in training. Got: True"),
        ("size", pd.to_datetime(["2024-01-01"] * 2), r"Column 'size' has another type than in training. Got: '2024-01-01"),
        ("size", [1.0, np.inf], r"Column 'size' is not finite. Got: inf in row 2"),
        ("garden", ["maybe", "true"], r"Column 'garden' has another type than in training. Got: 'maybe'. Expected: True or False"),
        ("garden", [0, 2], r"Column 'garden' has another type than in training. Got: 2"),
        ("colour", [1.0, 2.0], r"Column 'colour' has another type than in training. Got: 1.0. Expected: text such as 'blue'"),
    ],
)
def test_columns_of_another_type_are_refused_by_name(name, values, error):
    preprocessor, _, _ = fit(frame_of())
    with pytest.raises(DataError, match=error):
        preprocessor.transform(frame_of(2).assign(**{name: values}))


def test_unseen_levels_are_noted_with_their_count_and_coded_as_none():
    preprocessor, _, _ = fit(frame_of())
    x, notes = preprocessor.transform(frame_of(4).assign(colour=["red", "pink", "pink", "ocker"], kind=["a", "b", "c", None]))
    np.testing.assert_array_equal(x[:, 5:8], [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(x[:, 8:11], [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]])
    assert notes == (
        "column 'colour': unseen in training: 'pink' (2), 'ocker' (1); coded as none of the known levels",
        "column 'kind': unseen in training: 'c' (1); coded as none of the known levels",
    )
    _, notes = preprocessor.transform(frame_of(8).assign(colour=list("abcdefgh")))
    assert "and 3 more levels" in notes[0]


def test_values_missing_for_the_first_time_are_noted():
    preprocessor, _, _ = fit(frame_of())
    x, notes = preprocessor.transform(frame_of(1).assign(size=[None], colour=[None], garden=[np.nan], holes=[np.nan]))
    fill = preprocessor.columns[0]
    assert x[0, 0] == (fill.fill - fill.loc) / fill.scale
    assert (x[0, 2], x[0, 4], x[0, 5:8].tolist()) == (1.0, 0.0, [0, 0, 0])
    assert notes == (
        "column 'size': 1 missing, none in training; the training median is used",
        "column 'garden': 1 missing, none in training; coded as 0",
        "column 'colour': 1 missing, none in training; coded as 0",
    )


@pytest.mark.parametrize("values", [[1, 0], [1.0, 0.0], ["True", "false"], pd.array([True, False], dtype="boolean")])
def test_booleans_are_taken_in_their_usual_forms(values):
    preprocessor, _, _ = fit(frame_of())
    assert preprocessor.transform(frame_of(2).assign(garden=values))[0][:, 4].tolist() == [1.0, 0.0]


def test_text_that_a_reader_took_for_numbers_or_booleans_is_found_again():
    preprocessor, _ = column(["1", "2", "x", "true"])
    assert preprocessor.columns[0].levels == ("1", "2", "true", "x")
    for values, place in [([2, 1], [1, 0]), ([2.0, 1.0], [1, 0]), ([True], [2])]:
        x, notes = preprocessor.transform(pd.DataFrame({"v": values}))
        assert x.argmax(1).tolist() == place
        assert x.sum() == len(values)
        assert notes == ()


def test_labels_unseen_in_training_are_refused():
    preprocessor, _, _ = fit(pd.DataFrame({"v": [1.0, 2.0, 3.0], "t": ["a", "b", "a"]}), "t")
    assert preprocessor.text_columns == ("t",)
    with pytest.raises(DataError, match=r"The target 't' has a label unseen in training. Got: 'c'. Expected: 'a', 'b'"):
        preprocessor.encode_target(pd.DataFrame({"t": ["a", "c"]}))


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (frame_of().iloc[:0], r"The table has no rows"),
        (np.zeros((3, 7)), r"This is not a table. Got: ndarray"),
        (pd.concat([frame_of(), frame_of()[["size"]]], axis=1), r"Column names occur twice in the table. Got: 'size'"),
        (pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")])), r"several levels of names"),
    ],
)
def test_frames_that_are_no_tables_are_refused(frame, error):
    preprocessor, _, _ = fit(frame_of())
    for use in (preprocessor.transform, preprocessor.encode_target, fit):
        with pytest.raises(DataError, match=error):
            use(frame)


def test_column_names_need_not_be_text():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 3)))
    preprocessor, x, _ = fit(frame, 2)
    assert preprocessor.feature_names == ("0", "1")
    np.testing.assert_array_equal(preprocessor.transform(frame)[0], x)


def test_nothing_changes_the_users_frame():
    frame = frame_of().set_index(pd.Index(range(100, 140)))
    before = frame.copy(deep=True)
    preprocessor, x, y = fit(frame)
    preprocessor.transform(frame)[0][:] = 0
    preprocessor.encode_target(frame)[:] = 0
    x[:], y[:] = 0, 0
    pd.testing.assert_frame_equal(frame, before)


# ---- storing ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_json_round_trip_is_exact(seed):
    frame = frame_of(seed=seed)
    frame["when"] = pd.date_range("2020-01-01", periods=40, freq="37h")
    frame["code"] = pd.Categorical(np.arange(40) % 3)
    frame["名前"] = "same"
    preprocessor, x, y = fit(frame)
    text = json.dumps(preprocessor.to_json(), allow_nan=False)
    again = Preprocessor.from_json(json.loads(text))
    assert again == preprocessor
    assert hash(again) == hash(preprocessor)
    assert json.dumps(again.to_json()) == text
    assert repr(again) == repr(preprocessor)  # equality alone would take 1 for True
    np.testing.assert_array_equal(again.transform(frame)[0], x)
    np.testing.assert_array_equal(again.encode_target(frame), y)
    assert Preprocessor.from_json(preprocessor.to_json()) == preprocessor


def test_other_versions_and_damage_are_refused():
    stored = fit(frame_of())[0].to_json()
    for schema in (None, 2, "1"):
        with pytest.raises(StoreError, match="another version"):
            Preprocessor.from_json({**stored, "schema": schema})
    with pytest.raises(StoreError, match="another version"):
        Preprocessor.from_json("text")
    for name in ("columns", "target"):
        with pytest.raises(StoreError, match="damaged"):
            Preprocessor.from_json({k: v for k, v in stored.items() if k != name})
    with pytest.raises(StoreError, match="damaged"):
        Preprocessor.from_json({**stored, "surprise": 1})


def test_a_fitted_pipeline_cannot_be_changed():
    preprocessor, _, _ = fit(frame_of())
    with pytest.raises(dataclasses.FrozenInstanceError):
        preprocessor.y_loc = 0.0
