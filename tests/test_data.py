"""Data at the door: wrapping, splitting, standardising."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import aleator as al
from aleator.data import as_data, check_arrays

X = np.arange(12.0).reshape(6, 2)


def test_arrays_are_kept_as_given() -> None:
    y = np.arange(6.0)
    data = as_data((X, y))
    assert data.x is X and data.y is y and data.num_data == 6
    assert as_data(data).x is X


def test_frames_lists_and_trees() -> None:
    assert as_data((pd.DataFrame(X), pd.Series(np.arange(6)))).num_data == 6
    assert as_data((X.tolist(), list(range(6)))).y.shape == (6,)
    tree = as_data(({"image": X, "age": np.arange(6)}, np.arange(6)))
    assert tree.num_data == 6 and tree.take(np.array([1, 3])).x["image"].shape == (2, 2)
    assert as_data((None, np.arange(4))).num_data == 4


@pytest.mark.parametrize(
    ("x", "said"), [([[1, 2], [3]], "ragged"), (np.float64(3), "single number"), ({}, "no arrays"), (np.array(["a"]), "not numeric")]
)
def test_arrays_that_cannot_be_used(x, said: str) -> None:
    with pytest.raises(al.DataError, match=said):
        check_arrays(x, "x")


def test_standardiser_inverts_and_guards_constants() -> None:
    rng = np.random.default_rng(0)
    x = np.c_[rng.normal(5, 3, 50), np.full(50, 7.1), rng.normal(1e6, 1e-3, 50)]
    scaler = al.Standardiser.fit(x)
    z = scaler.apply(x)
    np.testing.assert_allclose(z[:, [0, 2]].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(z[:, [0, 2]].std(0), 1, rtol=1e-9)
    np.testing.assert_array_equal(z[:, 1], 0.0)
    np.testing.assert_allclose(scaler.invert(z), x, rtol=1e-14)


def test_split_and_folds_partition_the_rows() -> None:
    data = al.Data(X, np.arange(6))
    rest, held = al.split(0, data, 0.3)
    assert sorted([*rest.y, *held.y]) == list(range(6)) and held.num_data == 2
    tests = [test for _, test in al.folds(1, 10, 3)]
    assert sorted(np.concatenate(tests)) == list(range(10))
    assert all(len(np.intersect1d(train, test)) == 0 and len(train) + len(test) == 10 for train, test in al.folds(1, 10, 3))
    with pytest.raises(al.DataError, match="folds"):
        al.folds(0, 3, 5)
    with pytest.raises(al.DataError, match="split"):
        al.split(0, data, 1.5)
    with pytest.raises(al.DataError, match="split"):
        al.split(0, data.take(np.array([0])), 0.5)
