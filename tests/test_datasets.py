"""aleator/datasets.py: bundled data, and benchmark files from a directory of the user's."""

import numpy as np
import pytest

from aleator import DataError, datasets


@pytest.mark.parametrize(
    ("name", "shape", "num_classes"),
    [("diabetes", (442, 10), None), ("breast_cancer", (569, 30), 2), ("wine", (178, 13), 3), ("digits", (1797, 64), 10)],
)
def test_bundled_sets_have_their_published_shapes(name, shape, num_classes):
    x, y, names = getattr(datasets, name)()
    assert x.shape == shape
    assert x.dtype == np.float64
    assert y.shape == shape[:1]
    assert len(names) == len(set(names)) == shape[1]
    assert all(type(column) is str for column in names)
    if num_classes is None:
        assert y.dtype == np.float64
    else:
        assert y.dtype.kind == "i"
        assert np.unique(y).tolist() == list(range(num_classes))


def test_diabetes_is_in_its_own_units():
    x, y, names = datasets.diabetes()
    age = x[:, names.index("age")]
    assert (age.min(), age.max()) == (19, 79)
    assert (y.min(), y.max()) == (25, 346)


def test_load_reads_from_a_directory_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", X=np.ones((3, 2)), y=np.arange(3.0))
    monkeypatch.delenv("ALEATOR_DATA", raising=False)
    assert datasets.load("uci/yacht", tmp_path)["X"].shape == (3, 2)
    monkeypatch.setenv("ALEATOR_DATA", str(tmp_path))
    assert datasets.load("uci/yacht.npz")["y"].tolist() == [0.0, 1.0, 2.0]


def test_load_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("ALEATOR_DATA", raising=False)
    with pytest.raises(DataError, match=r"no directory.*ALEATOR_DATA"):
        datasets.load("uci/yacht")
    with pytest.raises(DataError, match="does not exist"):
        datasets.load("uci/yacht", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \.npz file"):
        datasets.load("uci/yacht", tmp_path)
    np.savez(tmp_path / "yacht.npz", y=np.arange(3.0))
    with pytest.raises(DataError, match="did you mean 'yacht'"):
        datasets.load("yatch", tmp_path)


def test_load_refuses_broken_and_pickled_files(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK not really a zip file")
    with pytest.raises(DataError, match="cannot be read"):
        datasets.load("broken", tmp_path)
    np.savez(tmp_path / "objects.npz", y=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="cannot be read"):
        datasets.load("objects", tmp_path)
