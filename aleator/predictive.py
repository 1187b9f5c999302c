"""The predictive distribution: one set of outputs f(x), and every statistic of y as a view of it.

p(y | x) = Σ_s w_s p(y | f_s) for weighted draws, ∫ p(y | f) N(f; m, v) df for Gaussian outputs. The law of total variance splits

    Var[y] = E_f[Var(y | f)] + Var_f[E(y | f)]        (aleatoric + epistemic)

and the same draws give both terms, so they add up by construction. Numbers are computed in float64 in compiled calls, rows in blocks that
keep within a byte budget, and are returned as NumPy arrays in the data's own units and in y's shape.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, logsumexp

from aleator._errors import DataError, HealthWarning, ModelError, message
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood

MAX_BYTES = 256 * 2**20
_BLOCK = 64  # values of y per row handled at once; keeps memory at _BLOCK · draws · columns numbers a row


@functools.partial(jax.tree_util.register_dataclass, data_fields=["draws", "weights", "mean", "variance", "df", "extra"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outputs:
    """A distribution over the outputs f at some rows: draws, or independent Gaussians.

    draws: tree with leaves (S, rows, ...), usually one array (S, rows, outputs); `weights` (S,), None for equal.
    Gaussian: `mean`, `variance` (rows, outputs) of f; `df` (k,) when a conjugate noise variance was integrated out, so that
    y ~ t_df(mean, variance + scale²).
    extra: the likelihood's constrained parameters drawn jointly with f: leaves (S, ...) for draws, (...) for Gaussian. A leaf of shape ()
    is shared by all draws.
    """

    draws: Tree = None
    weights: Array | None = None
    mean: Array | None = None
    variance: Array | None = None
    df: Array | None = None
    extra: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def gaussian(self) -> bool:
        """True for Gaussian outputs, False for draws."""
        return self.mean is not None

    @property
    def num_rows(self) -> int:
        """Number of rows the outputs are given at."""
        if self.gaussian:
            return int(np.shape(self.mean)[0])  # type: ignore[arg-type]
        return next(int(leaf.shape[1]) for leaf in jax.tree.leaves(self.draws) if np.ndim(leaf) > 1)

    @property
    def num_draws(self) -> int:
        """Number of draws S; 1 for Gaussian outputs."""
        return 1 if self.gaussian else int(jax.tree.leaves(self.draws)[0].shape[0])

    def rows(self, index: slice) -> Outputs:
        """The same distribution at some of the rows."""
        if self.gaussian:
            return dataclasses.replace(self, mean=self.mean[index], variance=self.variance[index])  # type: ignore[index]
        total = self.num_rows

        def per_row(leaf: Array) -> Array:
            return leaf[:, index] if np.ndim(leaf) > 1 and leaf.shape[1] == total else leaf

        draws = jax.tree.map(per_row, self.draws)
        return dataclasses.replace(self, draws=rebatch(draws, total, len(range(total)[index])))


def rebatch(tree: Tree, old: int, new: int) -> Tree:
    """NumPyro distributions in a tree keep their batch shape beside their arrays: after rows were taken or joined, set it from `old` to
    `new` rows, inside nested distributions too. Other trees come back as they are."""

    def is_distribution(node: Any) -> bool:
        return hasattr(node, "_batch_shape")

    def fix(node: Any) -> Any:
        if not is_distribution(node):
            return node
        node = copy.copy(node)
        if node._batch_shape[:1] == (old,):
            node._batch_shape = (new, *node._batch_shape[1:])
        for name, child in vars(node).items():
            if is_distribution(child):
                setattr(node, name, fix(child))
        return node

    return jax.tree.map(fix, tree, is_leaf=is_distribution)


class PredictiveViews(abc.ABC):
    """Every statistic of a predictive distribution, written once over a few primitives.

    Shapes: k target columns; results are (rows, k), or (rows,) when the user's y was (n,). For class labels `mean`, `variance`,
    `aleatoric` and `epistemic` are per class, (rows, K).
    """

    squeeze: bool
    labels: tuple | None
    max_bytes: int

    # ------------------------------------------------------------------------------------------------------------ primitives
    # In the data's units and canonical shapes: per column (rows, k), many values of y stacked in front, (m, rows, k).

    @property
    @abc.abstractmethod
    def support(self) -> str:
        """One of "real", "count", "binary", "label"."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """Number of rows predicted."""

    @property
    @abc.abstractmethod
    def num_columns(self) -> int:
        """Number of target columns k; the number of classes K for labels."""

    @abc.abstractmethod
    def rows(self, index: slice) -> PredictiveViews:
        """The predictive distribution at some of the rows."""

    @abc.abstractmethod
    def encode(self, y: Any) -> np.ndarray:
        """y in canonical form: (rows, k), or (rows,) class numbers; wrong lengths and columns raise `DataError`."""

    @abc.abstractmethod
    def _row_bytes(self) -> int:
        """Bytes one row needs while one value of y is evaluated."""

    @abc.abstractmethod
    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean, aleatoric and epistemic variance."""

    @abc.abstractmethod
    def _log_prob(self, y: np.ndarray) -> np.ndarray:
        """log p(y), jointly over columns: (rows,)."""

    @abc.abstractmethod
    def _log_columns(self, y: np.ndarray) -> np.ndarray:
        """log p(y_j) of each column by itself: (m, rows, k)."""

    @abc.abstractmethod
    def _cdf(self, y: np.ndarray) -> np.ndarray:
        """P(Y_j ≤ y_j): (m, rows, k)."""

    @abc.abstractmethod
    def _expected_entropy(self) -> np.ndarray:
        """E_f H[y | f]: (rows, k), (rows,) for labels."""

    @abc.abstractmethod
    def _cloud(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the mass is: centres and spreads (C, rows, k) of the components, and their weights (C,)."""

    @abc.abstractmethod
    def _sample(self, key: Key, num_samples: int) -> np.ndarray:
        """Draws of canonical y: (num_samples, rows, ...)."""

    @abc.abstractmethod
    def gaussian_components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Weights (C,), means and standard deviations (C, rows, k) when y is exactly a mixture of Gaussians, else None."""

    # ----------------------------------------------------------------------------------------------------------------- views

    @property
    def mean(self) -> np.ndarray:
        """E[y], in y's shape; class probabilities (rows, K) for labels."""
        return self._shape(self._by_rows(lambda part: part._moments()[0]))

    @property
    def variance(self) -> np.ndarray:
        """Var[y] = aleatoric + epistemic; infinite where the distribution has none."""
        return self._shape(self._by_rows(lambda part: sum(part._moments()[1:])))

    @property
    def std(self) -> np.ndarray:
        """√Var[y]."""
        return np.sqrt(self.variance)

    @property
    def aleatoric(self) -> np.ndarray:
        """E_f[Var(y | f)]: the part that more data would not remove."""
        return self._shape(self._by_rows(lambda part: part._moments()[1]))

    @property
    def epistemic(self) -> np.ndarray:
        """Var_f[E(y | f)]: the part that comes from not knowing f."""
        return self._shape(self._by_rows(lambda part: part._moments()[2]))

    @property
    def probs(self) -> np.ndarray:
        """Class probabilities: (rows, K); for binary targets (rows, 2), columns P(0), P(1), and (rows, k, 2) for several columns."""
        if self.support == "label":
            return self.mean
        if self.support != "binary":
            got = f"a predictive over {self.support} targets"
            raise ModelError(
                message("There are no class probabilities here.", got, "Bernoulli or Categorical", "use mean, std or interval")
            )
        p = self._by_rows(lambda part: part._moments()[0])
        probs = np.stack([1 - p, p], axis=-1)
        return probs[:, 0] if probs.shape[1] == 1 else probs

    @property
    def entropy(self) -> np.ndarray:
        """H[y] in nats, per column; (rows,) for labels. Differential entropy for real targets, in the data's own units."""
        if self.support == "label":
            return _discrete_entropy(self.mean)
        if self.support == "binary":
            p = self._by_rows(lambda part: part._moments()[0])
            return self._shape(_discrete_entropy(np.stack([1 - p, p], axis=-1)))
        return self._shape(_entropy(self))

    @property
    def aleatoric_entropy(self) -> np.ndarray:
        """E_f H[y | f]: the entropy left if f were known."""
        values = self._by_rows(lambda part: part._expected_entropy())
        return values if self.support == "label" else self._shape(values)

    @property
    def mutual_information(self) -> np.ndarray:
        """I[y; f] = H[y] − E_f H[y | f] ≥ 0, per column: what observing y would tell about f."""
        total, given = self.entropy, self.aleatoric_entropy
        information = total - given
        # Both terms are exact to about 1e-6; only noise of that size is clipped, a larger negative value would be a defect to see.
        return np.where((information < 0) & (information > -1e-5 * (1 + np.abs(total))), 0.0, information)

    def log_prob(self, y: Any) -> np.ndarray:
        """log p(y) of each row, (rows,), in the data's own units, jointly over target columns."""
        return self._by_rows(lambda part, values: part._log_prob(values), self.encode(y))

    def cdf(self, y: Any) -> np.ndarray:
        """P(Y ≤ y), per column, in y's shape."""
        self._ordered("cdf")
        return self._shape(self._by_rows(lambda part, values: part._cdf(values[None])[0], self.encode(y)))

    def quantile(self, q: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """The smallest y with P(Y ≤ y) ≥ q, per column: q's shape, then y's shape.

        Guarded Newton steps (bisection for counts) on the exact mixture cdf, from the bracket that Cantelli's inequality guarantees:
        mean − std·√((1−q)/q) ≤ y_q ≤ mean + std·√(q/(1−q)).
        """
        self._ordered("quantile")
        levels = np.asarray(q, float)
        if levels.size == 0 or not np.all((levels > 0) & (levels < 1)):
            raise DataError(message("quantile(q) cannot be computed.", f"q = {q!r}", "numbers strictly between 0 and 1", "pass e.g. 0.9"))
        # Rows go first while blocks are joined; the levels come back to the front afterwards.
        values = self._by_rows(lambda part: np.moveaxis(_quantile(part, levels.ravel()), 0, 1), many=levels.size)
        values = np.moveaxis(values, 1, 0)
        if self.support != "real":
            values = values.astype(np.int64)
        return np.stack([self._shape(value) for value in values]).reshape(*levels.shape, *self._shape(values[0]).shape)

    def interval(self, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval holding y with probability `level`: (lower, upper)."""
        if not 0 < level < 1:
            raise DataError(
                message("interval(level) cannot be computed.", f"{level!r}", "a number strictly between 0 and 1", "pass e.g. 0.9")
            )
        lower, upper = self.quantile(np.array([0.5 - level / 2, 0.5 + level / 2]))
        return lower, upper

    def sample(self, key: KeyLike, num_samples: int = 1) -> np.ndarray:
        """Draws of y: (num_samples, rows) or (num_samples, rows, k); class labels where they are named."""
        values = self._sample(as_key(key), num_samples)
        if self.support == "label" or (self.squeeze and values.shape[-1] == 1):
            values = values if self.support == "label" else values[..., 0]
        named = self.labels is not None and self.support in ("label", "binary")
        return np.asarray(self.labels)[values] if named else values

    # --------------------------------------------------------------------------------------------------------------- helpers

    def _shape(self, values: np.ndarray) -> np.ndarray:
        """(rows, 1) → (rows,) when the user's y was (n,)."""
        return values[:, 0] if self.squeeze and self.support != "label" and values.shape[1] == 1 else values

    def _ordered(self, what: str) -> None:
        if self.support == "label":
            raise ModelError(message("Class labels have no order.", f"{what} of a Categorical", "class probabilities", "use probs"))

    def _by_rows(self, view: Callable[..., Any], *values: np.ndarray, many: int = 1, panels: int = 0) -> np.ndarray:
        """`view(part, *values)` on blocks of rows within the byte budget, joined along rows.

        many: how many values of y per row it evaluates (64 at a time at most); panels: of the integration rule it makes, if any.
        """
        rule = 8 * self.num_columns * (6 * 8 * (panels + 180)) + 28 * self._row_bytes() if panels else 0
        size = int(max(1, self.max_bytes // (self._row_bytes() * min(many, _BLOCK) + rule)))
        blocks = [slice(start, min(start + size, self.num_rows)) for start in range(0, self.num_rows, size)]
        return np.concatenate([view(self.rows(block), *(value[block] for value in values)) for block in blocks])


@dataclasses.dataclass(frozen=True)
class Predictive(PredictiveViews):
    """The distribution of y at some rows: outputs f, carried to y by the likelihood.

    outputs: draws or Gaussians over f. likelihood: p(y | f). y_loc, y_scale (k,): when targets were standardised, y = y_loc + y_scale·z
    for the z the model sees. squeeze: the user's y was (n,), results are (rows,). labels: the classes' names, in the order of their
    numbers; y is then passed, and sampled, by name. max_bytes: how much memory a view may use at a time.

    >>> f = np.array([[[0.0]], [[2.0]]])                                     # two draws at one row
    >>> pred = Predictive(Outputs(draws=f, extra={"scale": np.ones(2)}), Gaussian(1.0), squeeze=True)
    >>> pred.mean, pred.aleatoric, pred.epistemic, pred.variance
    (array([1.]), array([1.]), array([1.]), array([2.]))
    """

    outputs: Outputs
    likelihood: Likelihood
    y_loc: np.ndarray | None = None
    y_scale: np.ndarray | None = None
    squeeze: bool = False
    labels: tuple | None = None
    max_bytes: int = MAX_BYTES

    @property
    def support(self) -> str:
        return self.likelihood.support

    @property
    def num_rows(self) -> int:
        return self.outputs.num_rows

    @property
    def num_columns(self) -> int:
        with jax.enable_x64(True):
            one = self.outputs.rows(slice(0, 1))
            return int(jax.eval_shape(functools.partial(_moments, self.likelihood, nodes=2), one)[0].shape[-1])

    def rows(self, index: slice) -> Predictive:
        return dataclasses.replace(self, outputs=self.outputs.rows(index))

    def encode(self, y: Any) -> np.ndarray:
        if self.labels is not None and self.support in ("label", "binary"):
            y = _class_numbers(y, self.labels)
        values = self.likelihood.encode(y, fitting=False)
        expected = (self.num_rows,) if self.support == "label" else (self.num_rows, self.num_columns)
        if values.shape != expected:
            raise DataError(
                message(
                    "y does not match the predictions.",
                    f"y of shape {np.shape(y)}",
                    f"{expected[0]} rows" + (f" of {expected[1]} columns" if len(expected) > 1 else " of one label"),
                    "pass the targets of the rows that were predicted",
                )
            )
        return values

    @property
    def draws(self) -> np.ndarray:
        """E[y | f_s] of each draw, in the data's units: (S, rows) or (S, rows, k); weights, if any, are in `outputs.weights`."""
        if self.outputs.gaussian:
            advice = "call draw(key, n) for draws of the function, sample(key, n) for draws of y"
            raise ModelError(message("These predictions hold no draws.", "Gaussian outputs in closed form", "draws", advice))
        means = np.moveaxis(self._by_rows(lambda part: np.moveaxis(_run(_conditional_means, part), 0, 1)), 1, 0)
        return self._squeezed(self._to_data(means))

    def draw(self, key: KeyLike, num_samples: int = 1) -> np.ndarray:
        """E[y | f] for draws of f: (num_samples, rows) or (num_samples, rows, k). Gaussian outputs are drawn row by row."""
        with jax.enable_x64(True):
            means = np.asarray(_sample_means(self.likelihood, self.outputs, as_key(key), num_samples=num_samples))
        return self._squeezed(self._to_data(means))

    def gaussian_components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Weights (C,), means and standard deviations (C, rows, k) when y is exactly a mixture of Gaussians, else None."""
        if type(self.likelihood) not in (Gaussian, HeteroscedasticGaussian) or self.outputs.df is not None:
            return None
        weights, means, stds = _run(_normal_components, self)
        return weights, self._to_data(means), stds * self._scale

    # ------------------------------------------------------------------------------------------------------------ primitives

    def _row_bytes(self) -> int:
        # About four float64 temporaries for each draw (or quadrature node) and output.
        if self.outputs.gaussian:
            nodes = {0: 1024, 1: self._nodes(), 2: (_FEW_NODES // 2) ** 2}.get(_columns_of(self.likelihood), 1024)
            return 8 * 4 * nodes * int(np.shape(self.outputs.mean)[1])  # type: ignore[arg-type]
        per_row = max(int(np.prod(leaf.shape[2:])) for leaf in jax.tree.leaves(self.outputs.draws))
        return 8 * 4 * self.outputs.num_draws * max(per_row, 1)

    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mean, aleatoric, epistemic = _run(_moments, self, nodes=_FEW_NODES)
        return self._to_data(mean), aleatoric * self._scale**2, epistemic * self._scale**2

    def _log_prob(self, y: np.ndarray) -> np.ndarray:
        return _run(_log_joint, self, self._to_model(y)) - np.sum(np.log(self._scale) * np.ones(self._width))

    def _log_columns(self, y: np.ndarray) -> np.ndarray:
        return _run(_log_columns, self, self._to_model(y)) - np.log(self._scale)

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        return _run(_cdf, self, self._to_model(y))

    def _expected_entropy(self) -> np.ndarray:
        values = _run(_expected_entropy, self, nodes=_FEW_NODES)
        return values if self.support == "label" else values + np.log(self._scale)

    def _cloud(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centres, spreads, weights = _run(_cloud, self)
        return self._to_data(centres), spreads * self._scale, weights

    def _sample(self, key: Key, num_samples: int) -> np.ndarray:
        with jax.enable_x64(True):
            values = np.asarray(_sample_targets(self.likelihood, self.outputs, key, num_samples=num_samples))
        return self._to_data(values) if self.support == "real" else values

    # ----------------------------------------------------------------------------------------------------------------- units

    @property
    def _scale(self) -> np.ndarray:
        return np.ones(1) if self.y_scale is None else np.asarray(self.y_scale, np.float64)

    @property
    def _width(self) -> int:
        return 0 if self.y_scale is None else len(self._scale)

    def _to_data(self, z: np.ndarray) -> np.ndarray:
        return z if self.y_scale is None and self.y_loc is None else self._loc + self._scale * z

    def _to_model(self, y: np.ndarray) -> np.ndarray:
        return y if self.y_scale is None and self.y_loc is None else (np.asarray(y, np.float64) - self._loc) / self._scale

    @property
    def _loc(self) -> np.ndarray:
        return np.zeros(1) if self.y_loc is None else np.asarray(self.y_loc, np.float64)

    def _squeezed(self, values: np.ndarray) -> np.ndarray:
        return values[..., 0] if self.squeeze and self.support != "label" and values.shape[-1] == 1 else values

    def _nodes(self) -> int:
        """How many quadrature nodes over f Gaussian outputs need here: 64, or more where p(y | f) is narrow against the spread of f."""
        if not self.outputs.gaussian or _columns_of(self.likelihood) != 1 or _closed(self.likelihood, self.outputs):
            return _FEW_NODES
        with jax.enable_x64(True):
            ratio = float(_narrowness(self.likelihood, self.outputs))
        needed = 2 * 15.0 * np.sqrt(1.0 + ratio**2)  # half a width apart over ±7.5 standard deviations
        return next((nodes for nodes in (_FEW_NODES, 256, 1024) if needed <= nodes), _MANY_NODES)


@dataclasses.dataclass(frozen=True)
class PredictiveMixture(PredictiveViews):
    """Σ_m π_m p_m(y): several predictives of the same rows as one, with the same views. Make it with `mix`.

    Not knowing which model is right counts as epistemic: Var[y] = Σ π_m (aleatoric_m + epistemic_m) + Var_m[mean_m].
    """

    members: tuple[PredictiveViews, ...]
    weights: tuple[float, ...]

    @property
    def squeeze(self) -> bool:  # type: ignore[override]
        return self.members[0].squeeze

    @property
    def labels(self) -> tuple | None:  # type: ignore[override]
        return self.members[0].labels

    @property
    def max_bytes(self) -> int:  # type: ignore[override]
        return min(member.max_bytes for member in self.members)

    @property
    def support(self) -> str:
        return self.members[0].support

    @property
    def num_rows(self) -> int:
        return self.members[0].num_rows

    @property
    def num_columns(self) -> int:
        return self.members[0].num_columns

    def rows(self, index: slice) -> PredictiveMixture:
        return dataclasses.replace(self, members=tuple(member.rows(index) for member in self.members))

    def encode(self, y: Any) -> np.ndarray:
        return self.members[0].encode(y)

    def gaussian_components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        parts = [member.gaussian_components() for member in self.members]
        if any(part is None for part in parts):
            return None
        weights = np.concatenate([weight * part[0] for weight, part in zip(self.weights, parts, strict=True)])  # type: ignore[index]
        return weights, np.concatenate([part[1] for part in parts]), np.concatenate([part[2] for part in parts])  # type: ignore[index]

    def _row_bytes(self) -> int:
        return max(member._row_bytes() for member in self.members)

    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        means, aleatoric, epistemic = zip(*(member._moments() for member in self.members), strict=True)
        mean = self._average(means)
        return mean, self._average(aleatoric), self._average(epistemic) + self._average([(one - mean) ** 2 for one in means])

    def _log_prob(self, y: np.ndarray) -> np.ndarray:
        return self._log_average([member._log_prob(y) for member in self.members])

    def _log_columns(self, y: np.ndarray) -> np.ndarray:
        return self._log_average([member._log_columns(y) for member in self.members])

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        return self._average([member._cdf(y) for member in self.members])

    def _expected_entropy(self) -> np.ndarray:
        return self._average([member._expected_entropy() for member in self.members])

    def _cloud(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centres, spreads, weights = zip(*(member._cloud() for member in self.members), strict=True)
        scaled = [weight * part for weight, part in zip(self.weights, weights, strict=True)]
        return np.concatenate(centres), np.concatenate(spreads), np.concatenate(scaled)

    def _sample(self, key: Key, num_samples: int) -> np.ndarray:
        key_choice, key_members = jax.random.split(key)
        choice = np.asarray(jax.random.choice(key_choice, len(self.members), (num_samples,), p=jnp.asarray(self.weights)))
        keys = jax.random.split(key_members, len(self.members))
        every = [member._sample(keys[i], max(int(np.sum(choice == i)), 1)) for i, member in enumerate(self.members)]
        values = np.empty((num_samples, *every[0].shape[1:]), np.result_type(*every))
        for i, drawn in enumerate(every):
            values[choice == i] = drawn[: int(np.sum(choice == i))]
        return values

    def _average(self, values: Sequence[np.ndarray]) -> np.ndarray:
        # A member of weight 0 takes no part, even where it is infinite.
        return sum(weight * value for weight, value in zip(self.weights, values, strict=True) if weight > 0)  # type: ignore[return-value]

    def _log_average(self, values: Sequence[np.ndarray]) -> np.ndarray:
        terms = [np.log(weight) + value for weight, value in zip(self.weights, values, strict=True) if weight > 0]
        return functools.reduce(np.logaddexp, terms)


def mix(predictives: Sequence[PredictiveViews], weights: Sequence[float] | np.ndarray | None = None) -> PredictiveMixture:
    """The mixture Σ π_m p_m(y) of predictives of the same rows; equal weights unless given.

    Raises `ModelError` when the predictives do not describe the same targets.
    """
    members = tuple(predictives)
    if not members:
        raise ModelError(message("Nothing to average.", "no predictives", "at least one", "pass a sequence of predictives"))
    pi = np.full(len(members), 1 / len(members)) if weights is None else np.asarray(weights, float)
    if pi.shape != (len(members),) or not np.all(np.isfinite(pi)) or np.any(pi < 0) or pi.sum() <= 0:
        expected = f"{len(members)} numbers ≥ 0, not all 0"
        raise ModelError(message("These weights cannot be used.", f"{weights!r}", expected, "pass one weight per predictive"))
    kinds = {(m.support, m.num_rows, m.num_columns, m.squeeze, m.labels) for m in members}
    if len(kinds) > 1:
        got = "; ".join(f"{m.support} targets, {m.num_rows} rows, {m.num_columns} columns, labels {m.labels}" for m in members)
        raise ModelError(
            message("These predictives are not of the same targets.", got, "the same rows and targets", "predict at the same x")
        )
    return PredictiveMixture(members, tuple(float(p) for p in pi / pi.sum()))


def concatenate(predictives: Sequence[Predictive]) -> Predictive:
    """Predictives of successive rows, made from the same draws, as one."""
    first = predictives[0]
    every = [part.outputs for part in predictives]
    if any(part.likelihood != first.likelihood or part.outputs.gaussian != first.outputs.gaussian for part in predictives):
        got = "different likelihoods or kinds of outputs"
        raise ModelError(message("These predictives cannot be joined.", got, "parts of one prediction", "use mix for several models"))
    _same_across([(outputs.extra, outputs.weights, outputs.df) for outputs in every])
    if first.outputs.gaussian:
        mean, variance = (np.concatenate([np.asarray(getattr(o, name)) for o in every]) for name in ("mean", "variance"))
        return dataclasses.replace(first, outputs=dataclasses.replace(first.outputs, mean=mean, variance=variance))
    totals = [outputs.num_rows for outputs in every]

    def join(*leaves: Array) -> Array:
        if all(np.ndim(leaf) > 1 and leaf.shape[1] == total for leaf, total in zip(leaves, totals, strict=True)):
            return np.concatenate([np.asarray(leaf) for leaf in leaves], axis=1)
        _same_across(leaves)
        return leaves[0]

    parts = [rebatch(outputs.draws, rows, sum(totals)) for outputs, rows in zip(every, totals, strict=True)]
    draws = jax.tree.map(join, *parts)
    return dataclasses.replace(first, outputs=dataclasses.replace(first.outputs, draws=draws))


def _same_across(trees: Sequence[Tree]) -> None:
    first = jax.tree.leaves(trees[0])
    for tree in trees[1:]:
        leaves = jax.tree.leaves(tree)
        if len(leaves) != len(first) or not all(np.array_equal(a, b) for a, b in zip(first, leaves, strict=True)):
            got = "parts with different draws of the shared parameters"
            raise ModelError(
                message("These predictives cannot be joined.", got, "the same draws at other rows", "use mix for several models")
            )


def _class_numbers(y: Any, labels: tuple) -> np.ndarray:
    values = np.asarray(y)
    table = {label: number for number, label in enumerate(labels)}
    try:
        return np.array([table[value] for value in values.ravel().tolist()], np.int32).reshape(values.shape)
    except KeyError as error:
        row = next(i for i, value in enumerate(values.ravel().tolist()) if value not in table)
        got = f"{error.args[0]!r} in row {row}"
        raise DataError(message("y has a class that was not in the training data.", got, f"one of {labels}", "drop these rows")) from None


# ------------------------------------------------------------------------------------------------------------- compiled primitives
# Each takes (likelihood, outputs, [y], nodes) in the model's units, computes in float64, and sees the likelihood only through its methods.

_FEW_NODES, _MANY_NODES = 64, 2048


def _run(function: Callable[..., Any], predictive: Predictive, *args: np.ndarray, nodes: int | None = None) -> Any:
    """Call a compiled primitive in float64 and bring the result to the host. `nodes` overrides the number that densities need: averages
    of functions of f that are smooth whatever the noise take few."""
    with jax.enable_x64(True):
        nodes = predictive._nodes() if nodes is None else nodes
        return jax.tree.map(np.asarray, function(predictive.likelihood, predictive.outputs, *args, nodes=nodes))


_compiled = functools.partial(jax.jit, static_argnums=(0,), static_argnames=("nodes",))


def _columns_of(likelihood: Likelihood) -> int:
    """Network outputs per target column, when columns have outputs of their own; 0 when they share them (class logits)."""
    one = likelihood.num_outputs(1)
    return one if likelihood.num_outputs(2) == 2 * one else 0


def _closed(likelihood: Likelihood, outputs: Outputs) -> bool:
    """True when the Gaussian outputs integrate in closed form; told from shapes alone."""
    if outputs.mean is None:
        return False
    shape = (1, np.shape(outputs.mean)[1])
    return likelihood.marginal(jnp.zeros(shape), jnp.ones(shape), outputs.extra) is not None


def _double(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf, tree)


def _as_draws(likelihood: Likelihood, outputs: Outputs, nodes: int) -> tuple[Tree, jax.Array, Tree]:
    """(draws (S, rows, ...), log weights (S,), extra (S, ...)): the draws themselves, or quadrature nodes of the Gaussian.

    Gauss–Hermite with 64 nodes for an output, 32 × 32 for two (columns are independent, so they may share nodes: every use is per column);
    an equally spaced rule over ±7.5 standard deviations when more are asked for; for outputs shared between columns, such as class
    logits, a fixed shifted Sobol set of 1024 points, which is not exact (error about 1e-3) but the same at every call.
    """
    if not outputs.gaussian:
        draws, extra = _double(outputs.draws), _double(outputs.extra)
        num = jax.tree.leaves(draws)[0].shape[0]
        extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num,)) if jnp.ndim(leaf) == 0 else leaf, extra)
        weights = jnp.full((num,), 1 / num) if outputs.weights is None else _double(jnp.asarray(outputs.weights))
        return draws, jnp.log(weights / jnp.sum(weights)), extra
    mean, std, extra = _double(outputs.mean), jnp.sqrt(_double(outputs.variance)), _double(outputs.extra)
    per_column = _columns_of(likelihood)
    if per_column == 1 and nodes > _FEW_NODES:
        points = np.linspace(-7.5, 7.5, nodes)[:, None]
        weights = np.exp(-0.5 * points[:, 0] ** 2)
    elif per_column in (1, 2):
        x, w = np.polynomial.hermite_e.hermegauss(min(nodes, _FEW_NODES // per_column))
        points = np.stack(np.meshgrid(*[x] * per_column, indexing="ij"), axis=-1).reshape(-1, per_column)
        weights = np.prod(np.stack(np.meshgrid(*[w] * per_column, indexing="ij"), axis=-1), axis=-1).ravel()
    else:
        from scipy.special import ndtri
        from scipy.stats import qmc

        per_column = mean.shape[1]
        shift = np.random.default_rng(0).random(per_column)  # one fixed random shift keeps the points off 0 and 1
        points = ndtri((qmc.Sobol(per_column, scramble=False).random_base2(10) + shift) % 1)
        weights = np.ones(len(points))
    points = np.repeat(points, mean.shape[1] // per_column, axis=1)  # layout: first outputs of all columns, then second outputs
    extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(points), *jnp.shape(leaf))), extra)
    return mean + std * jnp.asarray(points)[:, None, :], jnp.log(jnp.asarray(weights / weights.sum())), extra


def _average(log_weights: jax.Array, values: jax.Array) -> jax.Array:
    """Σ_s w_s values_s; a draw of weight 0 takes no part even where it is infinite."""
    weights = jnp.exp(log_weights).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * values, 0.0), axis=0)


def _student_factor(outputs: Outputs) -> Any:
    """E[σ²]/scale² = df/(df − 2) when the noise variance was integrated out, infinite for df ≤ 2."""
    if outputs.df is None:
        return 1.0
    df = _double(jnp.asarray(outputs.df))
    return jnp.where(df > 2, df / jnp.maximum(df - 2, 1e-300), jnp.inf)


@_compiled
def _moments(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)
    means = jax.vmap(likelihood.mean)(f, extra)
    mean = _average(log_weights, means)
    factor = _student_factor(outputs)
    return (
        mean,
        factor * _average(log_weights, jax.vmap(likelihood.variance)(f, extra)),
        factor * _average(log_weights, (means - mean) ** 2),
    )


@_compiled
def _conditional_means(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> jax.Array:
    f, _, extra = _as_draws(likelihood, outputs, nodes)
    return jax.vmap(likelihood.mean)(f, extra)


def _marginal(likelihood: Likelihood, outputs: Outputs) -> Any:
    if not outputs.gaussian:
        return None
    df = None if outputs.df is None else _double(jnp.asarray(outputs.df))
    return likelihood.marginal(_double(outputs.mean), _double(outputs.variance), _double(outputs.extra), df)


def _over_values(at: Callable[[jax.Array], jax.Array], y: jax.Array) -> jax.Array:
    """`at` for each of m stacked values of y, 64 at a time; the last block is padded, so that its body is compiled once."""
    m = y.shape[0]
    if m <= _BLOCK:
        return jax.vmap(at)(y)
    blocks = jnp.concatenate([y, jnp.repeat(y[-1:], -m % _BLOCK, axis=0)]).reshape(-1, _BLOCK, *y.shape[1:])
    values = jax.lax.map(jax.vmap(at), blocks)
    return values.reshape(-1, *values.shape[2:])[:m]


@_compiled
def _log_joint(likelihood: Likelihood, outputs: Outputs, y: jax.Array, *, nodes: int) -> jax.Array:
    if outputs.gaussian and (_columns_of(likelihood) or _marginal(likelihood, outputs) is not None):
        return jnp.sum(_log_columns(likelihood, outputs, y[None], nodes=nodes)[0], axis=-1)  # independent columns
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)
    terms = jax.vmap(likelihood.log_prob, (0, None, 0))(f, y, extra)
    return logsumexp(terms + log_weights[:, None], axis=0)


@_compiled
def _log_columns(likelihood: Likelihood, outputs: Outputs, y: jax.Array, *, nodes: int) -> jax.Array:
    distribution = _marginal(likelihood, outputs)
    if distribution is not None:
        return _over_values(distribution.log_prob, y)
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)

    def at(value: jax.Array) -> jax.Array:
        return logsumexp(jax.vmap(likelihood.log_terms, (0, None, 0))(f, value, extra) + log_weights[:, None, None], axis=0)

    return _over_values(at, y)


@_compiled
def _cdf(likelihood: Likelihood, outputs: Outputs, y: jax.Array, *, nodes: int) -> jax.Array:
    distribution = _marginal(likelihood, outputs)
    if distribution is not None:
        return _over_values(distribution.cdf, y)
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)
    return _over_values(lambda value: _average(log_weights, jax.vmap(likelihood.cdf, (0, None, 0))(f, value, extra)), y)


@_compiled
def _expected_entropy(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> jax.Array:
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)
    entropy = _average(log_weights, jax.vmap(likelihood.entropy)(f, extra))
    if outputs.df is None:
        return entropy
    # σ² ~ InverseGamma(df/2, df/2 · scale²): ½ E[log σ²] replaces ½ log scale².
    half = 0.5 * _double(jnp.asarray(outputs.df))
    return entropy + 0.5 * (jnp.log(half) - digamma(half))


@_compiled
def _cloud(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Centres and spreads of components; the spread is that of a Gaussian with the same entropy, finite for every tail."""
    if _marginal(likelihood, outputs) is not None:
        mean, aleatoric, epistemic = _moments(likelihood, dataclasses.replace(outputs, df=None), nodes=nodes)
        return mean[None], jnp.sqrt(aleatoric + epistemic)[None], jnp.ones(1)
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)
    try:
        spread = jnp.exp(jax.vmap(likelihood.entropy)(f, extra) - 0.5 * np.log(2 * np.pi * np.e))
    except (ModelError, NotImplementedError):  # a program's distribution may have no entropy in closed form
        spread = jnp.sqrt(jax.vmap(likelihood.variance)(f, extra))
    return jax.vmap(likelihood.mean)(f, extra), spread, jnp.exp(log_weights)


@_compiled
def _normal_components(likelihood: Likelihood, outputs: Outputs, *, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    distribution = _marginal(likelihood, outputs)
    if distribution is not None:  # a Normal, or a mixture of Normals over the nodes of the raw scale
        component = getattr(distribution, "component_distribution", None)
        if component is None:
            return jnp.ones(1), distribution.mean[None], jnp.sqrt(distribution.variance)[None]
        means, stds = jnp.broadcast_to(component.loc, component.batch_shape), jnp.broadcast_to(component.scale, component.batch_shape)
        return distribution.mixing_distribution.probs[0, 0], jnp.moveaxis(means, -1, 0), jnp.moveaxis(stds, -1, 0)
    f, log_weights, extra = _as_draws(likelihood, outputs, nodes)
    return jnp.exp(log_weights), jax.vmap(likelihood.mean)(f, extra), jnp.sqrt(jax.vmap(likelihood.variance)(f, extra))


@functools.partial(jax.jit, static_argnums=(0,))
def _narrowness(likelihood: Likelihood, outputs: Outputs) -> jax.Array:
    """Largest std(f) / (width of p(y | f) as a function of f), width = std(y | f) / |dE[y | f]/df|, at the mean and 2 std around."""
    mean, std, extra = _double(outputs.mean), jnp.sqrt(_double(outputs.variance)), _double(outputs.extra)
    ratios = []
    for shift in (-2.0, 0.0, 2.0):
        f = mean + shift * std
        slope = jax.jvp(lambda at: likelihood.mean(at, extra), (f,), (jnp.ones_like(f),))[1]
        noise = likelihood.variance(f, extra)
        # Infinite variance (heavy tails) says nothing about the width of the peak: the entropy does.
        power = jnp.exp(2 * likelihood.entropy(f, extra) - np.log(2 * np.pi * np.e))
        ratios.append(jnp.max(std * jnp.abs(slope) / jnp.sqrt(jnp.maximum(jnp.where(jnp.isfinite(noise), noise, power), 1e-300))))
    return jnp.max(jnp.stack(ratios))


def _draw_outputs(key: Key, outputs: Outputs, num_samples: int) -> tuple[Tree, Tree]:
    """num_samples outputs f and extra: whole draws by weight (all rows of one function), or from the Gaussian, each row by itself."""
    key_f, key_noise = jax.random.split(key)
    if not outputs.gaussian:
        f, extra = _double(outputs.draws), _double(outputs.extra)
        num = outputs.num_draws
        weights = None if outputs.weights is None else jnp.asarray(outputs.weights) / jnp.sum(jnp.asarray(outputs.weights))
        index = jax.random.choice(key_f, num, (num_samples,), p=weights)
        extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num,)) if jnp.ndim(leaf) == 0 else leaf, extra)
        return jax.tree.map(lambda leaf: leaf[index], f), jax.tree.map(lambda leaf: leaf[index], extra)
    mean, std, extra = _double(outputs.mean), jnp.sqrt(_double(outputs.variance)), _double(outputs.extra)
    extra = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_samples, *jnp.shape(leaf))), extra)
    if outputs.df is not None:
        # σ²/scale² = df/χ²_df, one for each sample and column, scales f and the noise alike.
        df = jnp.broadcast_to(_double(jnp.asarray(outputs.df)), mean.shape[1:])
        ratio = jnp.sqrt(0.5 * df / jax.random.gamma(key_noise, 0.5 * df, (num_samples, *df.shape)))
        std = std * ratio[:, None]
        extra = {**extra, "scale": jnp.broadcast_to(extra["scale"].reshape(num_samples, -1), ratio.shape) * ratio}
    return mean + std * jax.random.normal(key_f, (num_samples, *mean.shape)), extra


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("num_samples",))
def _sample_means(likelihood: Likelihood, outputs: Outputs, key: Key, *, num_samples: int) -> jax.Array:
    f, extra = _draw_outputs(key, outputs, num_samples)
    return jax.vmap(likelihood.mean)(f, extra)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("num_samples",))
def _sample_targets(likelihood: Likelihood, outputs: Outputs, key: Key, *, num_samples: int) -> jax.Array:
    key_outputs, key_y = jax.random.split(key)
    f, extra = _draw_outputs(key_outputs, outputs, num_samples)
    return jax.vmap(likelihood.sample)(jax.random.split(key_y, num_samples), f, extra)


# ----------------------------------------------------------------------------------------------------- quantiles and integrals over y


def _quantile(part: PredictiveViews, levels: np.ndarray) -> np.ndarray:
    """(m, rows, k); `levels` (m,) strictly inside (0, 1)."""
    mean, aleatoric, epistemic = part._moments()
    std = np.sqrt(aleatoric + epistemic)
    if not np.all(np.isfinite(std)):
        std = np.where(np.isfinite(std), std, np.max(part._cloud()[1], axis=0))
    q = levels[:, None, None]
    whole = part.support != "real"
    lower = mean - std * np.sqrt((1 - q) / q) * (1 + 1e-9)
    upper = mean + std * np.sqrt(q / (1 - q)) * (1 + 1e-9)
    if whole:
        lower, upper = np.full_like(lower, -1.0), np.maximum(np.ceil(upper), 0.0)
    # Cantelli's bracket holds when the variance is finite, up to rounding; otherwise step out until it does.
    step = np.maximum(np.maximum(upper - lower, np.abs(mean) * 1e-12), 1e-300)
    for _ in range(1100):
        low, high = (part._cdf(lower) >= q) & (not whole), part._cdf(upper) < q
        if not (low.any() or high.any()):
            break
        lower, upper, step = np.where(low, lower - step, lower), np.where(high, upper + step, upper), 2 * step
        upper = np.ceil(upper) if whole else upper
    return _bisect_counts(part, q, lower, upper) if whole else _solve_cdf(part, q, lower, upper, mean, std)


def _bisect_counts(part: PredictiveViews, q: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The smallest whole number with cdf ≥ q, for whole brackets with cdf(lower) < q ≤ cdf(upper)."""
    while np.any(upper - lower > 1):
        middle = np.floor(0.5 * (lower + upper))
        above = part._cdf(middle) >= q
        # Where the bracket is closed, the middle is its lower end and nothing moves.
        upper, lower = np.where(above & (middle > lower), middle, upper), np.where(above, lower, middle)
    return upper


def _solve_cdf(part: PredictiveViews, q: np.ndarray, lower: np.ndarray, upper: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """cdf(y) = q by Newton steps from the Gaussian guess; a step that leaves the bracket, or is not half the one before, halves the
    bracket instead. Newton's error is squared at every step: one of 1e-10 std is the last."""
    from scipy.special import ndtri

    y = np.clip(mean + std * ndtri(q), lower, upper)
    before, done = upper - lower, np.zeros(y.shape, bool)
    for _ in range(300):
        excess = part._cdf(y) - q
        upper, lower = np.where(excess >= 0, y, upper), np.where(excess >= 0, lower, y)
        with np.errstate(all="ignore"):
            newton = y - excess / np.exp(part._log_columns(y))
        inside = (newton >= lower) & (newton <= upper)
        rounding = 1e-15 * np.maximum(np.abs(lower), np.abs(upper))
        last = (inside & (np.abs(newton - y) <= 1e-10 * std + rounding)) | (upper - lower <= rounding)
        quick = inside & (last | (np.abs(newton - y) <= 0.5 * before))
        following = np.where(quick, newton, lower + 0.5 * (upper - lower))
        before, y, done = np.abs(following - y), np.where(done, y, following), done | last
        if np.all(done):
            break
    return y


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_OFFSETS = np.array([0.1, 0.3, 0.5, 0.7, 0.9, 1.15, 1.4, 1.7, 2.1, 2.6, 3.3, 4.3, 5.8, 8.0])
_OFFSETS = np.concatenate([-_OFFSETS[::-1], _OFFSETS])
_TAIL = 0.3 * 1.7 ** np.arange(48)


def integration_rule(part: PredictiveViews, panels: int, split: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (m, rows, k) with Σ w g(node) ≈ ∫ g dy, or Σ_y g(y) for counts, for functions as smooth as the mixture's density.

    Edges are quantiles of a cloud that puts 28 points on every component, and geometric steps beyond it; 8 Gauss–Legendre nodes on each
    panel; for counts Gauss's rule for sums, exact on panels of at most 8 integers. `split` (rows, k) becomes an edge, for integrands
    that jump there.
    """
    centres, spreads, weights = part._cloud()
    cloud = (centres[:, None] + spreads[:, None] * _OFFSETS[:, None, None]).reshape(-1, *centres.shape[1:])
    mass = np.repeat(weights / len(_OFFSETS), len(_OFFSETS))
    order = np.argsort(cloud, axis=0)
    cloud = np.take_along_axis(cloud, order, axis=0)
    cumulative = np.cumsum(mass[order], axis=0)
    # Levels crowd towards 0 and 1: beyond the bulk may lie components of little weight at any distance.
    ends = 0.5 ** np.arange(1, 41) / panels
    levels = np.sort(np.concatenate([np.linspace(0, 1, panels + 1), ends, 1 - ends]))
    flat, points = cumulative.reshape(len(cloud), -1), cloud.reshape(len(cloud), -1)
    inner = np.stack([np.interp(levels, flat[:, j], points[:, j]) for j in range(flat.shape[1])], axis=1).reshape(-1, *cloud.shape[1:])
    first = np.take_along_axis(spreads, np.argmin(centres - 8 * spreads, axis=0)[None], axis=0)
    last = np.take_along_axis(spreads, np.argmax(centres + 8 * spreads, axis=0)[None], axis=0)
    tail = _TAIL[:, None, None]
    edges = [cloud[:1] - first * tail[::-1], cloud[:1], inner, cloud[-1:], cloud[-1:] + last * tail]
    if split is not None:
        edges.append(split[None])
    joined = np.concatenate(edges)
    if part.support == "real":
        joined = np.sort(joined, axis=0)
        half = 0.5 * np.diff(joined, axis=0)[:, None]
        nodes = 0.5 * (joined[1:] + joined[:-1])[:, None] + half * _NODES[:, None, None]
        rule = half * _WEIGHTS[:, None, None]
    else:
        joined = np.sort(np.maximum(np.ceil(joined), 0.0), axis=0)
        joined[0] = 0.0
        width = np.diff(joined, axis=0)
        every, where = np.unique(width, return_inverse=True)
        places, masses = _gauss_sum(every)
        where = where.reshape(width.shape)
        nodes = joined[:-1, None] + np.moveaxis(places[where], -1, 1)
        rule = np.moveaxis(masses[where], -1, 1)
    return nodes.reshape(-1, *cloud.shape[1:]), rule.reshape(-1, *cloud.shape[1:])


def _gauss_sum(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (..., 8) with Σ w g(x) = Σ_{y=0}^{n−1} g(y) for polynomials of degree ≤ 15; every term itself for n ≤ 8.

    Gauss's rule for the uniform measure on n points, from the recurrence of the discrete Chebyshev polynomials,
    b_j = ½ j √((n² − j²)/(4j² − 1)), by the eigenvalues of its Jacobi matrix (Golub and Welsch).
    """
    n = np.maximum(count, 8.0)[..., None]
    j = np.arange(1.0, 8.0)
    off = 0.5 * j * np.sqrt((n**2 - j**2) / (4 * j**2 - 1))
    jacobi = np.zeros((*count.shape, 8, 8))
    jacobi[..., np.arange(1, 8), np.arange(7)] = off / n  # in units of n: well scaled at any size; eigh reads the lower triangle
    values, vectors = np.linalg.eigh(jacobi)
    few, place = (count <= 8)[..., None], np.arange(8.0)
    return np.where(few, place, 0.5 * (n - 1) + n * values), np.where(few, place < count[..., None], n * vectors[..., 0, :] ** 2)


def _entropy(whole: PredictiveViews) -> np.ndarray:
    """−∫ p log p per column, (rows, k); panels are refined until ∫ p = 1 within 1e-7, row by row."""

    def at(part: PredictiveViews, panels: int) -> np.ndarray:
        nodes, rule = integration_rule(part, panels)
        log_p = part._log_columns(nodes)
        p = np.exp(log_p)
        entropy = -np.sum(rule * p * np.where(p > 0, log_p, 0.0), axis=0)
        return np.stack([entropy, np.abs(np.sum(rule * p, axis=0) - 1)], axis=-1)

    panels = 64
    result = whole._by_rows(functools.partial(at, panels=panels), many=_BLOCK, panels=panels)
    while panels < 4096 and np.any(result[..., 1] > 1e-7):
        panels *= 4
        finer = whole._by_rows(functools.partial(at, panels=panels), many=_BLOCK, panels=panels)
        # A row settled at a coarser rule keeps its value, so that a row's result does not depend on its neighbours.
        result = np.where(result[..., 1:] > 1e-7, finer, result)
    entropy, error = result[..., 0], result[..., 1]
    if np.any(error > 1e-3):
        warnings.warn(
            f"The entropy of {int(np.sum(np.any(error > 1e-3, axis=1)))} row(s) is uncertain: the density integrates to 1 only within "
            f"{np.nanmax(error):.1e}. Components much narrower than their distances are the usual cause; look at variances instead.",
            HealthWarning,
            stacklevel=3,
        )
    return entropy


def _discrete_entropy(probs: np.ndarray) -> np.ndarray:
    """−Σ p log p over the last axis, 0 log 0 = 0."""
    return -np.sum(np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1.0)), 0.0), axis=-1)
