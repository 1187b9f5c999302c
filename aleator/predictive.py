"""The predictive distribution: one set of outputs f(x), and every statistic of y as a view of it.

p(y | x) = Σ_s w_s p(y | f_s) for weighted draws, ∫ p(y | f) N(f; m, v) df for Gaussian outputs. The law of total variance splits

    Var[y] = E_f[Var(y | f)] + Var_f[E(y | f)]        (aleatoric + epistemic)

and the same draws give both terms, so they add up by construction. Numbers are computed in float64 in compiled calls, rows in blocks that
keep within a byte budget, and are returned as NumPy arrays in the data's own units and in y's shape.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _closed, _outputs, _quadrature
from aleator._errors import DataError, ModelError, message
from aleator._outputs import Outputs
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood

MAX_BYTES = 256 * 2**20


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
            return _quadrature.discrete_entropy(self.mean)
        if self.support == "binary":
            p = self._by_rows(lambda part: part._moments()[0])
            return self._shape(_quadrature.discrete_entropy(np.stack([1 - p, p], axis=-1)))
        return self._shape(_quadrature.entropy(self))

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

        Closed for one Gaussian or Student-t, else guarded Newton steps (bisection for counts) on the exact mixture cdf, from the bracket that
        Cantelli's inequality guarantees:
        mean − std·√((1−q)/q) ≤ y_q ≤ mean + std·√(q/(1−q)).
        """
        self._ordered("quantile")
        levels = np.asarray(q, float)
        if levels.size == 0 or not np.all((levels > 0) & (levels < 1)):
            raise DataError(message("quantile(q) cannot be computed.", f"q = {q!r}", "numbers strictly between 0 and 1", "pass e.g. 0.9"))
        # Rows go first while blocks are joined; the levels come back to the front afterwards.
        values = self._by_rows(lambda part: np.moveaxis(part._quantile(levels.ravel()), 0, 1), many=levels.size)
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

    def _quantile(self, levels: np.ndarray) -> np.ndarray:
        """(m, rows, k); `levels` (m,), or (m, rows, k) where each has its own, strictly inside (0, 1)."""
        return _quadrature.quantile(self, levels)

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
        size = int(max(1, self.max_bytes // (self._row_bytes() * min(many, _outputs.BLOCK) + rule)))
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
            return int(jax.eval_shape(functools.partial(_outputs.moments, self.likelihood, nodes=2), one)[0].shape[-1])

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
        means = np.moveaxis(self._by_rows(lambda part: np.moveaxis(_outputs.run(_outputs.conditional_means, part), 0, 1)), 1, 0)
        return self._squeezed(self._to_data(means))

    def draw(self, key: KeyLike, num_samples: int = 1) -> np.ndarray:
        """E[y | f] for draws of f: (num_samples, rows) or (num_samples, rows, k). Gaussian outputs are drawn row by row."""
        with jax.enable_x64(True):
            means = np.asarray(_outputs.sample_means(self.likelihood, self.outputs, as_key(key), num_samples=num_samples))
        return self._squeezed(self._to_data(means))

    def gaussian_components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Weights (C,), means and standard deviations (C, rows, k) when y is exactly a mixture of Gaussians, else None."""
        if type(self.likelihood) not in (Gaussian, HeteroscedasticGaussian) or self.outputs.df is not None:
            return None
        weights, means, stds = _outputs.run(_outputs.normal_components, self)
        return weights, self._to_data(means), stds * self._scale

    # ------------------------------------------------------------------------------------------------------------ primitives

    def _row_bytes(self) -> int:
        # About four float64 temporaries for each draw (or quadrature node) and output.
        if self.outputs.gaussian:
            nodes = {0: 1024, 1: self._nodes(), 2: (_outputs.FEW_NODES // 2) ** 2}.get(_outputs.columns_of(self.likelihood), 1024)
            return 8 * 4 * nodes * int(np.shape(self.outputs.mean)[1])  # type: ignore[arg-type]
        per_row = max(int(np.prod(leaf.shape[2:])) for leaf in jax.tree.leaves(self.outputs.draws))
        return 8 * 4 * self.outputs.num_draws * max(per_row, 1)

    def _closed(self) -> _closed.Closed | None:
        """y in closed form, in the model's units, where it has one."""
        return _closed.of(self.likelihood, self.outputs)

    def _quantile(self, levels: np.ndarray) -> np.ndarray:
        closed = self._closed()
        if closed is None:
            return super()._quantile(levels)
        return self._to_data(closed.quantile(levels[:, None, None] if levels.ndim == 1 else levels))

    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        closed = self._closed()
        mean, aleatoric, epistemic = closed.moments() if closed else _outputs.run(_outputs.moments, self, nodes=_outputs.FEW_NODES)
        return self._to_data(mean), aleatoric * self._scale**2, epistemic * self._scale**2

    def _log_prob(self, y: np.ndarray) -> np.ndarray:
        closed, z = self._closed(), self._to_model(y)
        log_p = np.sum(closed.log_density(z), axis=-1) if closed else _outputs.run(_outputs.log_joint, self, z)
        return log_p - np.sum(np.log(self._scale) * np.ones(self._width))

    def _log_columns(self, y: np.ndarray) -> np.ndarray:
        closed, z = self._closed(), self._to_model(y)
        return (closed.log_density(z) if closed else _outputs.run(_outputs.log_columns, self, z)) - np.log(self._scale)

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        closed, z = self._closed(), self._to_model(y)
        return closed.cdf(z) if closed else _outputs.run(_outputs.cdf, self, z)

    def _expected_entropy(self) -> np.ndarray:
        values = _outputs.run(_outputs.expected_entropy, self, nodes=_outputs.FEW_NODES)
        return values if self.support == "label" else values + np.log(self._scale)

    def _cloud(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centres, spreads, weights = _outputs.run(_outputs.cloud, self)
        return self._to_data(centres), spreads * self._scale, weights

    def _sample(self, key: Key, num_samples: int) -> np.ndarray:
        with jax.enable_x64(True):
            values = np.asarray(_outputs.sample_targets(self.likelihood, self.outputs, key, num_samples=num_samples))
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
        if self._closed() or not self.outputs.gaussian or _outputs.columns_of(self.likelihood) != 1:
            return _outputs.FEW_NODES
        if _outputs.closed(self.likelihood, self.outputs):
            return _outputs.FEW_NODES
        with jax.enable_x64(True):
            ratio = float(_outputs.narrowness(self.likelihood, self.outputs))
        needed = 2 * 15.0 * np.sqrt(1.0 + ratio**2)  # half a width apart over ±7.5 standard deviations
        return next((nodes for nodes in (_outputs.FEW_NODES, 256, 1024) if needed <= nodes), _outputs.MANY_NODES)


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

    def _quantile(self, levels: np.ndarray) -> np.ndarray:
        counting = [member for member, weight in zip(self.members, self.weights, strict=True) if weight > 0]
        return counting[0]._quantile(levels) if len(counting) == 1 else super()._quantile(levels)

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

    parts = [_outputs.rebatch(outputs.draws, rows, sum(totals)) for outputs, rows in zip(every, totals, strict=True)]
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
