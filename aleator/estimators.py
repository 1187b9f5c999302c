"""scikit-learn estimators: networks and linear models with a posterior, in pipelines, searches and cross-validation.

Imported by name (`from aleator.estimators import BayesianRegressor`), never by `import aleator`: scikit-learn costs a second.

    model = make_pipeline(ColumnTransformer(…), BayesianRegressor()).fit(X, y)
    mean, std = model.predict(X_new, return_std=True)

Columns and numeric targets are standardised inside, so that defaults fit all tables; everything returned is in the data's own units.

All pass scikit-learn's `check_estimator`, networks with two exceptions (EXPECTED_FAILURES): a row of weight two is a row twice in the log joint, but a
short run of an optimiser ends near the optimum only; and single-precision sums depend on the order of rows in the last digit.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_random_state, column_or_1d, validate_data

from aleator import _random, defaults
from aleator._auto import Auto, auto
from aleator._errors import HealthWarning, MethodError, message
from aleator._fit import fit
from aleator.data import Data, Standardiser
from aleator.decide import ood
from aleator.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from aleator.methods import Ensemble, Exact, Method
from aleator.model import BNN
from aleator.networks import MLP, as_network
from aleator.predictive import PredictiveViews
from aleator.priors import Normal

NUM_SAMPLES = 200
HIDDEN = (50,)
NEIGHBOUR = 5
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "an optimiser stops near the optimum, not at it",
    "check_sample_weight_equivalence_on_sparse_data": "an optimiser stops near the optimum, not at it",
    "check_methods_sample_order_invariance": "single-precision sums depend on the order of rows in the last digit",
}


class _Estimator(BaseEstimator):
    """What all three share: validation, standardising, fitting, predictions."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = False
        return tags

    # ------------------------------------------------------------------------------------------------------------------ fitting

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        self._seen, X = None, _dense(X)
        before = getattr(self, "fit_", None) if self.warm_start else None
        init = None if isinstance(before, Auto) else before
        weight = None if sample_weight is None else _weights(sample_weight, X)
        self._scaler = _weighted_standardiser(X, weight)
        x = self._scaler.apply(X).astype(np.float32)
        y = self._encode(y, weight)
        key, self._key_predict = _random.split(_random.as_key(_seed(self.random_state)), 2)
        data = Data(x, y, weight)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HealthWarning)
            self.fit_ = self._infer(key, data, init)
        for one in caught:
            category = ConvergenceWarning if issubclass(one.category, HealthWarning) else one.category
            warnings.warn(str(one.message), category, stacklevel=3)
        self._remember(X)
        self.n_iter_ = max(1, int(np.sum(getattr(self.fit_, "manifest", {}).get("steps", 1))))

    def _infer(self, key: Any, data: Data, init: Any) -> Any:
        chosen = self._method(data.num_data)
        model = self._model(chosen, data)
        if chosen == "auto":
            return auto(key, model, data, self.budget)
        return fit(key, model, data, chosen, init=init)

    def _method(self, num_rows: int) -> Any:
        if isinstance(self.method, Method) or self.method == "auto":
            return self.method
        return defaults.method(self.method, (), num_rows)

    def _inputs(self, X: Any, reset: bool = False) -> np.ndarray:
        return _dense(validate_data(self, X, reset=reset, accept_sparse=True, dtype=np.float64))

    # -------------------------------------------------------------------------------------------------------------- predictions

    def predictive(self, X: Any) -> PredictiveViews:
        """The predictive distribution at the rows of X, in y's units and labels: mean, std, interval, log_prob, aleatoric, epistemic, …"""
        check_is_fitted(self)
        x = self._scaler.apply(self._inputs(X)).astype(np.float32)
        return self._units(self.fit_.predict(self._key_predict, x, NUM_SAMPLES))

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of y, (rows, n_samples)."""
        return np.moveaxis(self.predictive(X).sample(_seed(random_state), n_samples), 0, -1)

    def uncertainty(self, X: Any, level: float = 0.9) -> Any:
        """A DataFrame, one row each: the prediction, its standard deviation or probability, its aleatoric and epistemic parts, and `ood`, how far the inputs are from the
        training rows as a share of training rows that are nearer (1: farther than all)."""
        import pandas as pd

        predictive, values = self.predictive(X), self._inputs(X)
        columns = self._columns(predictive, level)
        distance = ood.neighbour_distance(self._near, self._scaler.apply(values), NEIGHBOUR)
        columns["ood"] = np.searchsorted(self._distances, distance) / len(self._distances)
        return pd.DataFrame(columns, index=getattr(X, "index", None))

    def _remember(self, X: np.ndarray) -> None:
        """A few training rows and how far apart they are, for `uncertainty`."""
        rows = self._scaler.apply(X)
        kept = rows if len(rows) <= 2000 else rows[np.random.default_rng(0).choice(len(rows), 2000, replace=False)]
        self._near = kept
        self._distances = np.sort(ood.neighbour_distance(kept, kept, NEIGHBOUR + 1))  # a row is its own nearest one


class BayesianRegressor(RegressorMixin, _Estimator):
    """Regression by a network with a posterior.

    method: a name (see `aleator methods`), an `al.Method`, or "auto" (several within `budget`, stacked). network: widths of hidden layers, a
    network of your own (Equinox, Flax NNX, (function, params); its outputs are those the likelihood takes), or "auto". prior_scale: of the weights, times 1/√fan-in. likelihood: e.g.
    al.StudentT(); by default Gaussian noise, learned for each row by ensembles. warm_start: `fit` begins where the last one ended.
    """

    def __init__(
        self,
        method: Any = "ensemble",
        network: Any = "auto",
        likelihood: Any = None,
        prior_scale: float = 1.0,
        budget: Any = "1m",
        warm_start: bool = False,
        random_state: Any = None,
    ):
        self.method = method
        self.network = network
        self.likelihood = likelihood
        self.prior_scale = prior_scale
        self.budget = budget
        self.warm_start = warm_start
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianRegressor:
        """Infer the posterior given the rows of X (numbers; NumPy, pandas or sparse) and y."""
        X, y = validate_data(self, X, y, accept_sparse=True, dtype=np.float64, y_numeric=True, multi_output=True, ensure_min_samples=2)
        self._fit(X, y, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianRegressor:
        """More rows: the ones seen are kept, and the fit to all of them begins where the last one ended."""
        return _partial_fit(self, X, y, sample_weight)

    def predict(self, X: Any, return_std: bool = False, return_interval: float | None = None) -> Any:
        """Mean (rows,); with return_std also the standard deviation; with return_interval=0.9 also (lower, upper)."""
        predictive = self.predictive(X)
        found: list[Any] = [predictive.mean]
        if return_std:
            found.append(predictive.std)
        if return_interval is not None:
            found.append(predictive.interval(return_interval))
        return found[0] if len(found) == 1 else tuple(found)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _encode(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        self._target = _weighted_standardiser(y.reshape(len(y), -1), weight)
        return self._target.apply(y.reshape(len(y), -1)).reshape(y.shape).astype(np.float32)

    def _model(self, chosen: Any, data: Data) -> Any:
        columns = 1 if data.y.ndim == 1 else data.y.shape[1]
        varying = isinstance(chosen, Ensemble) or chosen == "auto"
        likelihood = self.likelihood if self.likelihood is not None else (HeteroscedasticGaussian() if varying else Gaussian())
        if isinstance(chosen, Exact):
            return defaults.models(chosen, "regression", data.x.shape[1], 0, (), self.prior_scale)[0]
        return _network_model(self.network, data.x.shape[1], likelihood, columns, self.prior_scale)

    def _units(self, predictive: Any) -> PredictiveViews:
        return _rescaled(predictive, np.asarray(self._target.loc), np.asarray(self._target.scale))

    def _columns(self, predictive: PredictiveViews, level: float) -> dict[str, np.ndarray]:
        lower, upper = predictive.interval(level)
        return {
            "mean": predictive.mean,
            "std": predictive.std,
            "aleatoric": np.sqrt(predictive.aleatoric),
            "epistemic": np.sqrt(predictive.epistemic),
            "lower": lower,
            "upper": upper,
        }


class BayesianLinearRegressor(BayesianRegressor):
    """Linear regression with its posterior in closed form; the prior scale is chosen by evidence. `partial_fit` is exact."""

    def __init__(self, random_state: Any = None):
        self.random_state = random_state

    method = "exact"
    network = "auto"
    likelihood = None
    prior_scale = None  # type: ignore[assignment]
    budget = "1m"
    warm_start = False

    def _infer(self, key: Any, data: Data, init: Any) -> Any:
        candidates = defaults.models(Exact(), "regression", data.x.shape[1], 0, (), None)
        keys = _random.split(key, len(candidates))
        fits = [fit(k, model, data, Exact()) for k, model in zip(keys, candidates, strict=True)]
        return max(fits, key=lambda one: one.log_evidence.value)  # type: ignore[union-attr]


class BayesianClassifier(ClassifierMixin, _Estimator):
    """Classification, two classes or more, by a network with a posterior; arguments as for `BayesianRegressor`."""

    def __init__(
        self,
        method: Any = "ensemble",
        network: Any = "auto",
        prior_scale: float = 1.0,
        budget: Any = "1m",
        warm_start: bool = False,
        random_state: Any = None,
    ):
        self.method = method
        self.network = network
        self.prior_scale = prior_scale
        self.budget = budget
        self.warm_start = warm_start
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianClassifier:
        """Infer the posterior given the rows of X and their classes y (any labels)."""
        X, y = validate_data(self, X, y, accept_sparse=True, dtype=np.float64, multi_output=True)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present. Got: {self.classes_[0]!r} in every row. Do this: pass rows of two classes."
            )
        self._fit(X, y, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> BayesianClassifier:
        """More rows: the ones seen are kept, and the fit to all of them begins where the last one ended."""
        return _partial_fit(self, X, y, sample_weight)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probs = self.predict_proba(X)  # says so where nothing was fitted, before the classes are looked for
        return self.classes_[np.argmax(probs, axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (rows, K), averaged over the posterior, in the order of `classes_`."""
        return np.asarray(self.predictive(X).probs)

    def _encode(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        return np.searchsorted(self.classes_, y).astype(np.int32)

    def _model(self, chosen: Any, data: Data) -> Any:
        if isinstance(chosen, Exact):
            raise MethodError(
                message("Exact has no closed form for classes.", "method='exact'", "e.g. 'ensemble' or 'laplace'", "pass another method")
            )
        return _network_model(self.network, data.x.shape[1], Categorical(len(self.classes_)), 1, self.prior_scale)

    def _units(self, predictive: Any) -> PredictiveViews:
        return _labelled(predictive, tuple(self.classes_.tolist()))

    def _columns(self, predictive: PredictiveViews, level: float) -> dict[str, np.ndarray]:
        probs = np.asarray(predictive.probs)
        return {
            "class": self.classes_[np.argmax(probs, axis=1)],
            "probability": probs.max(axis=1),
            "entropy": predictive.entropy,
            "aleatoric": predictive.aleatoric_entropy,
            "epistemic": predictive.mutual_information,
        }


# --------------------------------------------------------------------------------------------------------------------------- helpers


def _partial_fit(estimator: Any, X: Any, y: Any, sample_weight: Any) -> Any:
    before = getattr(estimator, "_seen", None)
    rows, values = validate_data(estimator, X, y, reset=before is None, accept_sparse=True, dtype=np.float64, multi_output=True)
    rows = _dense(rows)
    weight = np.ones(len(rows)) if sample_weight is None else _weights(sample_weight, rows)
    seen = (rows, np.asarray(values), weight)
    if before is not None:
        seen = tuple(np.concatenate(pair) for pair in zip(before, seen, strict=True))  # type: ignore[assignment]
    asked = estimator.warm_start
    try:
        estimator.warm_start = before is not None
        estimator.fit(seen[0], seen[1], None if np.all(seen[2] == 1) else seen[2])
    finally:
        estimator.warm_start = asked
    estimator._seen = seen
    return estimator


def _network_model(network: Any, in_size: int, likelihood: Any, columns: int, prior_scale: float) -> BNN:
    if (
        isinstance(network, str)
        or network is None
        or (isinstance(network, (tuple, list)) and all(isinstance(n, (int, np.integer)) for n in network))
    ):
        if isinstance(network, str) and network != "auto":
            raise MethodError(
                message("There is no such network.", repr(network), "'auto', widths of hidden layers, or a network", "pass e.g. (50, 50)")
            )
        hidden = HIDDEN if network is None or isinstance(network, str) else tuple(int(n) for n in network)
        made: Any = MLP(in_size, hidden, likelihood.num_outputs(columns))
    else:
        made = as_network(network)
    return BNN(made, likelihood, Normal(prior_scale, scaling="fan_in"))


def _dense(X: Any) -> np.ndarray:
    return X.toarray() if hasattr(X, "toarray") else X


def _weighted_standardiser(values: np.ndarray, weight: np.ndarray | None) -> Standardiser:
    """As `Standardiser.fit`, rows counted by their weights: a row of weight two is two rows, one of weight zero is none."""
    if weight is None:
        return Standardiser.fit(values)
    some = weight > 0
    plain = Standardiser.fit(values[some])
    loc = np.average(values[some], axis=0, weights=weight[some])
    scale = np.sqrt(np.average((values[some] - loc) ** 2, axis=0, weights=weight[some]))
    constant = np.all(values[some] == values[some][:1], axis=0)
    return Standardiser(
        tuple(np.where(constant, plain.loc, loc).tolist()), tuple(np.where(constant, 1.0, np.maximum(scale, 1e-300)).tolist())
    )


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray:
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not weight.sum() > 0:
        raise ValueError(
            message("The sample weights cannot be used.", "every weight is zero", "at least one weight above zero", "fix sample_weight")
        )
    return np.array(weight)


def _seed(random_state: Any) -> int:
    if random_state is None:
        return 0
    return (
        int(check_random_state(random_state).randint(2**31 - 1))
        if not isinstance(random_state, (int, np.integer))
        else int(random_state) % 2**31
    )


def _rescaled(predictive: Any, loc: np.ndarray, scale: np.ndarray) -> Any:
    if hasattr(predictive, "members"):
        return dataclasses.replace(predictive, members=tuple(_rescaled(member, loc, scale) for member in predictive.members))
    return dataclasses.replace(predictive, y_loc=loc, y_scale=scale)


def _labelled(predictive: Any, labels: tuple) -> Any:
    if hasattr(predictive, "members"):
        return dataclasses.replace(predictive, members=tuple(_labelled(member, labels) for member in predictive.members))
    return dataclasses.replace(predictive, labels=labels)


__all__ = ["BayesianClassifier", "BayesianLinearRegressor", "BayesianRegressor"]
