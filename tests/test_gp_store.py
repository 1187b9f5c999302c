"""Gaussian processes on the common road: al.Exact, saving and loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import aleator as al
from aleator import gp

RNG = np.random.default_rng(3)
X = RNG.uniform(-2, 2, (12, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * RNG.standard_normal(12)


def test_exact_is_maximum_evidence() -> None:
    model = gp.GP(gp.RBF((0.7, 1.0), 1.0), gp.Zero(), al.Gaussian(0.1))
    ours, same = (al.fit(0, model, (X, Y), method) for method in (al.Exact(), gp.Evidence()))
    assert ours.log_evidence == same.log_evidence
    assert ours.log_evidence.kind == "exact"


def test_a_point_comes_back_with_its_data(tmp_path: Path) -> None:
    fit = al.fit(0, gp.GP(gp.RBF(columns=0) + gp.Linear() * gp.Periodic()), (X, Y), gp.Evidence(num_restarts=1))
    fit.save(tmp_path / "gp")
    back = al.load(tmp_path / "gp")
    assert back.model == fit.model and back.method == fit.method and back.log_evidence == fit.log_evidence
    np.testing.assert_array_equal(back.predict(1, X[:3] + 0.1).mean, fit.predict(1, X[:3] + 0.1).mean)
    assert gp.extend(back, (X[:2] + 0.2, Y[:2])).manifest["data"]["num_data"] == 14


def test_draws_come_back_with_their_data(tmp_path: Path) -> None:
    fit = al.fit(0, gp.GP(gp.RBF(), gp.Zero()), (X, Y), al.Ensemble(al.MAP(num_steps=20), num_members=2))
    fit.save(tmp_path / "gp")
    back = al.load(tmp_path / "gp")
    np.testing.assert_array_equal(back.predict(1, X[:3]).mean, fit.predict(1, X[:3]).mean)


def test_sparse_deep_and_wide_ones_come_back(tmp_path: Path) -> None:
    models = {
        "sparse": (gp.SparseGP(gp.RBF(), 5), gp.SVGP(num_steps=3, batch_size=None)),
        "deep": (gp.DeepGP(gp.RBF(), (1,), 4), gp.DSVI(num_steps=3, batch_size=None)),
        "wide": (gp.GP(gp.wide.NNGP(2, weight=1.2, bias=0.1), gp.Zero(), al.Gaussian(0.1)), gp.Evidence()),
        "series": (gp.SeriesGP(gp.Matern32(1.0, 1.0), gp.Zero(), al.Gaussian(0.1)), gp.Evidence()),
    }
    for name, (model, method) in models.items():
        x = X[:, 0] if name == "series" else X
        fit = al.fit(0, model, (x, Y), method)
        fit.save(tmp_path / name)
        back = al.load(tmp_path / name)
        assert back.model == fit.model, name
        np.testing.assert_array_equal(back.predict(1, x[:3]).mean, fit.predict(1, x[:3]).mean, err_msg=name)
