"""Estimators pass scikit-learn's own checks, go through pipelines and searches, and say what they know in the data's units."""

from __future__ import annotations

import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator

import aleator as al
from aleator._errors import MethodError
from aleator.estimators import EXPECTED_FAILURES, BayesianClassifier, BayesianLinearRegressor, BayesianRegressor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 3))
Y = 50 + 10 * X[:, 0] - 5 * X[:, 1] + 2 * RNG.normal(size=80)
QUICK = al.MAP(num_steps=200)


@pytest.mark.parametrize(
    "estimator",
    [BayesianLinearRegressor(), pytest.param(BayesianRegressor(QUICK), marks=pytest.mark.long), BayesianClassifier(QUICK)],
    ids=lambda e: type(e).__name__,
)
def test_scikit_learns_own_checks(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {} if isinstance(estimator, BayesianLinearRegressor) else EXPECTED_FAILURES
        results = check_estimator(estimator, expected_failed_checks=expected, on_skip=None, on_fail=None)
    assert not {r["check_name"]: repr(r["exception"])[:200] for r in results if r["status"] == "failed"}
    assert sum(r["status"] == "passed" for r in results) >= 50


def test_linear_regression_is_the_exact_one_in_the_datas_units():
    model = BayesianLinearRegressor().fit(X[:60], Y[:60])
    mean, std, (lower, _) = model.predict(X[60:], return_std=True, return_interval=0.9)
    assert mean.shape == std.shape == lower.shape == (20,)
    assert np.corrcoef(mean, Y[60:])[0, 1] > 0.95
    assert 1.5 < std.mean() < 3.0  # the noise is 2
    predictive = model.predictive(X[60:])
    np.testing.assert_allclose(predictive.variance, predictive.aleatoric + predictive.epistemic)
    assert predictive.log_prob(Y[60:]).mean() > -3.0
    twice = BayesianLinearRegressor().partial_fit(X[:30], Y[:30]).partial_fit(X[30:60], Y[30:60])
    np.testing.assert_allclose(twice.predict(X[60:]), mean, rtol=1e-6)
    assert model.sample_y(X[60:], 7).shape == (20, 7)


def test_weights_are_repeated_rows():
    weight = RNG.integers(0, 3, 80)
    repeated = BayesianLinearRegressor().fit(np.repeat(X, weight, axis=0), np.repeat(Y, weight))
    weighted = BayesianLinearRegressor().fit(X, Y, sample_weight=weight)
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), rtol=1e-3)


def test_uncertainty_is_a_table_that_knows_strange_rows():
    frame = pd.DataFrame(X, columns=["a", "b", "c"], index=np.arange(100, 180))
    model = BayesianLinearRegressor().fit(frame, Y)
    table = model.uncertainty(frame.iloc[:5])
    assert table.index.tolist() == list(range(100, 105))
    assert {"mean", "std", "aleatoric", "epistemic", "lower", "upper", "ood"} == set(table.columns)
    np.testing.assert_allclose(table["std"] ** 2, table["aleatoric"] ** 2 + table["epistemic"] ** 2)
    far = model.uncertainty(pd.DataFrame([[30.0, 0.0, 0.0]], columns=["a", "b", "c"]))
    assert far["ood"][0] == 1.0
    assert far["epistemic"][0] > table["epistemic"].max()
    names = np.array(["no", "yes"])[(X[:, 0] > 0).astype(int)]
    classes = BayesianClassifier(QUICK, random_state=0).fit(X, names)
    table = classes.uncertainty(X[:4])
    assert set(table["class"]) <= {"no", "yes"}
    np.testing.assert_allclose(table["entropy"], table["aleatoric"] + table["epistemic"], atol=1e-9)


def test_a_table_with_strings_and_gaps_goes_through_a_searched_pipeline():
    table = pd.DataFrame({"size": X[:, 0], "age": X[:, 1], "town": np.where(X[:, 2] > 0, "north", "south")})
    table.loc[::9, "age"] = np.nan
    columns = ColumnTransformer([("numbers", SimpleImputer(), ["size", "age"]), ("names", OneHotEncoder(), ["town"])])
    search = GridSearchCV(
        make_pipeline(columns, BayesianRegressor(random_state=0)),
        {"bayesianregressor__method": [QUICK, al.Laplace("kron", base=QUICK)], "bayesianregressor__network": [(8,)]},
        cv=2,
        error_score="raise",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        search.fit(table, Y)
    assert search.best_score_ > 0.5
    mean, std = search.predict(table), search.best_estimator_.predict(table, return_std=True)[1]
    assert mean.shape == std.shape == (80,)


def test_clones_files_sparse_input_and_seeds(tmp_path):
    model = BayesianClassifier(QUICK, network=(6,), random_state=3)
    y = (X[:, 0] + X[:, 1] > 0).astype(int)
    first = model.fit(scipy.sparse.csr_array(X), y).predict_proba(X)
    np.testing.assert_array_equal(clone(model).fit(X, y).predict_proba(X), first)
    joblib.dump(model, tmp_path / "model.joblib")
    np.testing.assert_array_equal(joblib.load(tmp_path / "model.joblib").predict_proba(X), first)
    other = clone(model).set_params(random_state=4).fit(X, y).predict_proba(X)
    assert not np.array_equal(other, first)
    warm = clone(model).set_params(warm_start=True).fit(X, y)
    again = warm.fit(X, y).predictive(X).log_prob(y).mean()
    assert again >= model.predictive(X).log_prob(y).mean()


def test_bad_settings_are_named():
    with pytest.raises(MethodError, match="no such network"):
        BayesianRegressor(QUICK, network="big").fit(X, Y)
    with pytest.raises(MethodError, match="closed form"):
        BayesianClassifier("exact").fit(X, Y > 50)
    with pytest.raises(ValueError, match="one class"):
        BayesianClassifier(QUICK).fit(X, np.zeros(80))
