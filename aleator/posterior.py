"""Posteriors: few kinds for many methods. The one required skill is a distribution over the outputs f(x).

`outputs(key, model, x, num_samples)` → Outputs. Weight draws are made once and then applied to all rows, in pieces that fit a byte
budget: how rows are cut cannot change which functions were drawn.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._outputs import Outputs
from aleator._quick import quick
from aleator._random import noise_key
from aleator._typing import Array, Key, Tree
from aleator.linalg import Blocks, DensePrecision, Root
from aleator.model import rows_of, signature
from aleator.noise import keep

MANY_OUTPUTS = 64  # outputs beyond which only their variances are kept, not their covariances
BYTE_BUDGET = 256 * 2**20  # bytes of weights and activations (estimated) alive at once while predicting
MOMENTS_BUDGET = 64 * 2**20  # the same where gradients are taken: smaller pieces stay in the caches


class Score(NamedTuple):
    """A log evidence in nats. kind: "exact", "lower bound", "upper bound" or "estimate"; stderr 0 for exact ones."""

    value: float
    stderr: float
    kind: str


class Posterior(abc.ABC):
    """What a Fit asks of a posterior."""

    log_evidence: Score | None

    @abc.abstractmethod
    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """The distribution of f at the rows of x."""

    @abc.abstractmethod
    def sample(self, key: Key, num_samples: int) -> Tree:
        """Parameter draws, leaves (num_samples, …)."""

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """Draws of f, each one function at all rows, where `outputs` may know the rows one by one only."""
        with jax.enable_x64(True):  # exact posteriors are held in double precision
            return _draw_outputs(model, self.sample(key, num_samples), x, None)

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean (rows, k) and covariance (rows, k, rows, k) of f at all rows together: of draws, unless it is known in closed form."""
        draws = np.asarray(self.functions(key, model, x, num_samples).draws, np.float64)
        if draws.ndim != 3:
            raise ModelError(message("f is no table here.", f"shape {draws.shape[1:]}", "(rows, k)", "use fit.functions(key, x)"))
        check_joint(draws.shape[1] * draws.shape[2])
        flat = (draws - draws.mean(axis=0)).reshape(len(draws), -1)
        return draws.mean(axis=0), (flat.T @ flat / max(len(flat) - 1, 1)).reshape(*draws.shape[1:], *draws.shape[1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Point(Posterior):
    """All mass on one parameter tree (MAP)."""

    params: Tree
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return _draw_outputs(model, _lifted(self.params), x, None)

    def sample(self, key: Key, num_samples: int) -> Tree:
        repeat = lambda leaf: (np if isinstance(leaf, np.ndarray) else jnp).repeat(leaf[None], num_samples, axis=0)
        return jax.tree.map(repeat, self.params)  # host arrays stay on the host, in their own precision


@dataclasses.dataclass(frozen=True, eq=False)
class Draws(Posterior):
    """Parameter draws, leaves (S, …), with weights (S,) summing to one, or None for equal ones. All are used at every prediction.

    num_chains: the draws are those of so many Markov chains, one after the other."""

    params: Tree
    weights: np.ndarray | None = None
    log_evidence: Score | None = None
    num_chains: int = 1

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return _draw_outputs(model, self.params, x, self.weights)

    def sample(self, key: Key, num_samples: int) -> Tree:
        chosen = jax.random.choice(
            key, _tree.rows(self.params), (num_samples,), p=None if self.weights is None else jnp.asarray(self.weights)
        )
        return _tree.take(self.params, chosen)


class Sampled(Posterior):
    """A posterior that makes its draws as they are needed. Subclasses are frozen dataclasses and pytrees (`sampled`).

    A draw is a function: `function(key, model, x)` is one draw's outputs at all rows of x and its likelihood parameters, so that one
    key is one function whatever the rows. Where a draw is a parameter tree, `draw(key)` gives it.
    """

    log_evidence: Score | None

    def draw(self, key: Key) -> Tree:
        """One parameter tree; the key is on the fast generator."""
        raise ModelError(
            message(
                f"{type(self).__name__} has no draws of weights.",
                "noise that is not a function of the weights alone",
                "draws of functions",
                "use fit.functions(key, x) or fit.predict(key, x)",
            )
        )

    def function(self, key: Key, model: Any, x: Tree) -> tuple[Tree, dict]:
        params = self.draw(key)
        return model.outputs(params, x, None), model.extra(params)

    def sample(self, key: Key, num_samples: int) -> Tree:
        return _draws(num_samples)(self.bare(), key)

    def bare(self) -> Any:
        """What of it compiled code needs: another evidence must not compile it again."""
        return dataclasses.replace(self, log_evidence=None)  # type: ignore[type-var]

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        return self.functions(key, model, x, num_samples)

    def functions(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        bare = self.bare()
        per_draw, per_row = 2 * _tree.nbytes(bare), row_bytes(model, x)
        fixed = lambda rows: per_draw + rows * per_row
        keys = jax.random.split(key, num_samples)

        def piece(rows: Tree) -> tuple[Tree, dict]:
            count = 1 if rows is None else _tree.rows(rows)
            block = int(np.clip(BYTE_BUDGET // fixed(count), 1, num_samples))
            # All pieces of rows meet the same functions: the same keys, on purpose.
            return _functions(model)(bare, jax.random.clone(keys), rows, block)

        draws, extra = _by_rows(piece, x, fixed, axis=1, whole=True)
        return Outputs(draws=draws, extra=extra)


def sampled(data_fields: tuple[str, ...], meta_fields: tuple[str, ...] = ()) -> Callable[[type], type]:
    """Make a Sampled subclass a pytree: arrays in data_fields, hashable settings in meta_fields."""
    return lambda cls: jax.tree_util.register_dataclass(cls, list(data_fields), [*meta_fields, "log_evidence"])


@sampled(("mean", "operator"), ("chosen",))
@dataclasses.dataclass(frozen=True, eq=False)
class Gaussian(Sampled):
    """θ ~ N(mean, Σ) over the flattened leaves with chosen[i] = True; the others stay at their mean.

    mean: the full parameter tree. operator: Σ as in `aleator.linalg` (num_noise, sqrt_matvec, diagonal, logdet). chosen: one flag a leaf.
    """

    mean: Tree
    operator: Any
    chosen: tuple[bool, ...]
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        leaves, structure = jax.tree.flatten(self.mean)
        picked = [leaf for leaf, take in zip(leaves, self.chosen, strict=True) if take]
        spread = self.operator.sqrt_matvec(jax.random.normal(key, (self.operator.num_noise,), picked[0].dtype))
        parts = iter(jnp.split(spread, np.cumsum([leaf.size for leaf in picked])[:-1]))
        moved = [leaf + next(parts).reshape(leaf.shape) if take else leaf for leaf, take in zip(leaves, self.chosen, strict=True)]
        return jax.tree.unflatten(structure, moved)

    def variance(self) -> Tree:
        """Marginal variances, a tree like the mean; 0 for leaves that are not random."""
        leaves, structure = jax.tree.flatten(self.mean)
        sizes = [leaf.size for leaf, take in zip(leaves, self.chosen, strict=True) if take]
        parts = iter(jnp.split(self.operator.diagonal(), np.cumsum(sizes)[:-1]))
        filled = [next(parts).reshape(leaf.shape) if take else jnp.zeros_like(leaf) for leaf, take in zip(leaves, self.chosen, strict=True)]
        return jax.tree.unflatten(structure, filled)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["likelihood", "value", "gradient", "residual", "mass", "curvature", "basis"],
    meta_fields=["rows"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Taylor:
    """The log-likelihood of rows that are gone, to second order around w*: value + gᵀd − ½dᵀHd, d = w − w*.

    likelihood: its parameters then. gradient g (m,). residual: Σ((y − f)/σ)², where there is a Gaussian noise. mass: Σ weights. curvature: H as
    the structure of the fit has it, along `basis` where that is learned. rows: N.
    """

    likelihood: dict[str, Array]
    value: Array
    gradient: Array
    residual: Array
    mass: Array
    curvature: Any
    basis: Any
    rows: int


@sampled(("mean", "operator", "index", "shift", "tuned", "memory"), ("paths", "link", "linear"))
@dataclasses.dataclass(frozen=True, eq=False)
class Linearised(Sampled):
    """w ~ N(w* + shift, Σ) over the weights with numbers `index`, seen through the network linearised at w*: f(x) = f(x, w*) + J(x)(w − w*).

    mean: the parameters at w*. shift (m,): how far a tuned prior or noise moves their mean. operator: Σ (m, m) as in `aleator.linalg`.
    paths: the leaves that vary (None: all of the network). link: how Gaussian class logits become probabilities, "monte_carlo", "probit"
    (logits divided by √(1 + πv/8)) or "bridge" (the Dirichlet whose logits have these moments). linear=False: draws of weights go through
    the network itself. tuned: what the marginal likelihood has set. memory: what is left of the rows, so that more can be added.
    """

    mean: Tree
    operator: Any
    index: Array
    shift: Array
    tuned: dict[str, Array]
    paths: tuple[str, ...] | None
    link: str
    linear: bool
    log_evidence: Score | None = None
    memory: Taylor | None = None

    @property
    def stats(self) -> tuple[Tree, Taylor] | None:
        """What `fit.update` goes on from: the parameters before anything was tuned, and the Taylor term there."""
        return None if self.memory is None else (self.mean | {"likelihood": self.memory.likelihood}, self.memory)

    def bare(self) -> Linearised:
        return dataclasses.replace(self, log_evidence=None, tuned={}, memory=None)

    def draw(self, key: Key) -> Tree:
        network = self.mean["network"]
        vector = _tree.flat(network)
        noise = jax.random.normal(key, (self.operator.num_noise,), vector.dtype)
        moved = vector.at[self.index].add((self.shift + self.operator.sqrt_matvec(noise)).astype(vector.dtype))
        return self.mean | {"network": _tree.unflat(moved, network)}

    def function(self, key: Key, model: Any, x: Tree) -> tuple[Tree, dict]:
        if not self.linear:
            return super().function(key, model, x)
        mean = self.mean["network"]
        step = jax.tree.map(jnp.subtract, self.draw(key)["network"], mean)
        value, change = jax.jvp(lambda weights: model.apply(weights, x, None), (mean,), (step,))
        return value + change, model.extra(self.mean)

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        if not self.linear:
            return self.functions(key, model, x, num_samples)
        likelihood, double = model.likelihood, _tree.first_dtype(self.operator) == np.float64
        with jax.enable_x64(double or jax.config.read("jax_enable_x64")):
            extra = jax.tree.map(np.asarray, model.extra(jax.tree.map(jnp.asarray, self.mean)))
            linked = likelihood.support == "label" or (self.link == "probit" and likelihood.support == "binary")
            mean, spread = self.moments(model, _tree.as_float64(x) if double else x, variance=self.link == "probit" or not linked)
            if linked:
                logits = _linked(jax.random.clone(key), mean, spread, self.link, num_samples)
                return Outputs(draws=logits, extra=jax.tree.map(lambda leaf: np.broadcast_to(leaf, (len(logits), *leaf.shape)), extra))
            variance = spread if spread.ndim == 2 else np.diagonal(spread, axis1=1, axis2=2)
            return Outputs(mean=mean, variance=np.maximum(variance, 0.0), extra=extra)

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """f(x, w*) + J·shift and JΣJᵀ over all rows, one column at a time: back through the network, Σ, and forward; J is never formed."""
        if not self.linear:
            return super().joint(key, model, x, num_samples)
        double = _tree.first_dtype(self.operator) == np.float64
        check_joint(_tree.rows(x) * model.likelihood.num_outputs(model.targets()))
        with jax.enable_x64(double or jax.config.read("jax_enable_x64")):
            mean, covariance = _joint(model)(self.bare(), _tree.as_float64(x) if double else x)
            return np.asarray(mean, np.float64), np.asarray(covariance, np.float64).reshape(*mean.shape, *mean.shape)

    def moments(self, model: Any, x: Tree, variance: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Mean (rows, k) and covariance (rows, k, k) of f at each row; with `variance`, or where there are many outputs, only (rows, k)."""
        bare = self.bare()
        compute, plan = _moments(model, signature(x), self.paths, _kind(self.operator), variance)
        outputs = model.likelihood.num_outputs(model.targets())
        numbers = curvature.numbers_per_row(plan, outputs, isinstance(self.operator, Blocks))
        return _by_rows(lambda rows: compute(bare, rows), x, lambda rows: rows * (8 * numbers + row_bytes(model, x)), budget=MOMENTS_BUDGET)


@sampled(("mean", "values"), ("family", "chosen"))
@dataclasses.dataclass(frozen=True, eq=False)
class Transformed(Sampled):
    """θ = g(φ, z), z ~ N(0, I), over the flattened leaves with chosen[i] = True, g a family of `aleator.families` (a flow); the others
    stay at their mean. values: φ."""

    mean: Tree
    values: Tree
    family: Any
    chosen: tuple[bool, ...]
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        leaves, structure = jax.tree.flatten(self.mean)
        (flat,) = self.family.sample(key, jax.tree.map(jnp.asarray, self.values))
        sizes = [leaf.size for leaf, take in zip(leaves, self.chosen, strict=True) if take]
        parts = iter(jnp.split(flat, np.cumsum(sizes)[:-1]))
        moved = [next(parts).reshape(leaf.shape) if take else leaf for leaf, take in zip(leaves, self.chosen, strict=True)]
        return jax.tree.unflatten(structure, moved)


@sampled(("params", "left", "right", "own"), ("shared",))
@dataclasses.dataclass(frozen=True, eq=False)
class RankOne(Sampled):
    """θₘ, m = 1…M, with equal weights: leaves W ∘ (rₘ sₘᵀ) around one shared W, leaves of each member's own, leaves shared as they are.

    params: the shared parameters (means over members where each has its own). shared: for each leaf "rank_one", "own" or "all". left,
    right: r and s of each rank-one leaf in order, (M, …) with extent 1 along the axes they do not number. own: the leaves of that kind,
    (M, …). Memory |W| + M·(units in + units out), not M·|W|; members are put together one by one where they are used.
    """

    params: Tree
    left: tuple[Array, ...]
    right: tuple[Array, ...]
    own: tuple[Array, ...]
    shared: tuple[str, ...]
    log_evidence: Score | None = None

    @property
    def num_members(self) -> int:
        return int((*self.left, *self.own)[0].shape[0])

    def member(self, number: Any) -> Tree:
        """The parameter tree of one member."""
        pick = lambda arrays: tuple(jnp.asarray(array)[number] for array in arrays)
        return effective(self.params, pick(self.left), pick(self.right), pick(self.own), self.shared)

    def draw(self, key: Key) -> Tree:
        return self.member(jax.random.randint(key, (), 0, self.num_members))

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        """All members at all rows, each once."""
        bare = dataclasses.replace(self, log_evidence=None)
        cost = lambda rows: 2 * _tree.nbytes(self.params) + rows * row_bytes(model, x)

        def piece(rows: Tree) -> tuple[Tree, dict]:
            count = 1 if rows is None else _tree.rows(rows)
            return _every_member(model)(bare, rows, int(np.clip(BYTE_BUDGET // cost(count), 1, self.num_members)))

        draws, extra = _by_rows(piece, x, cost, axis=1, whole=True)
        return Outputs(draws=draws, extra=extra)


@sampled(("params", "rates"), ("axes",))
@dataclasses.dataclass(frozen=True, eq=False)
class Masked(Sampled):
    """W = M·diag(z)/(1 − p), z ~ Bernoulli(1 − p): dropout as a posterior over weights (B8), one mask per draw for all inputs (B12).

    params: the weights M and everything else, at their point. axes: for each leaf the axes that number its input units, () where nothing
    is dropped. rates: p of each leaf with axes, in order.
    """

    params: Tree
    rates: Array
    axes: tuple[tuple[int, ...], ...]
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        leaves, structure = jax.tree.flatten(self.params)
        dropped = [i for i, axes in enumerate(self.axes) if axes]
        for number, (i, k) in enumerate(zip(dropped, jax.random.split(key, max(len(dropped), 1)), strict=False)):
            shape = tuple(size if axis in self.axes[i] else 1 for axis, size in enumerate(leaves[i].shape))
            rate = self.rates[number]
            leaves[i] = leaves[i] * (keep(k, rate, shape, leaves[i].dtype) / (1.0 - rate).astype(leaves[i].dtype))
        return jax.tree.unflatten(structure, leaves)


@sampled(("params",))
@dataclasses.dataclass(frozen=True, eq=False)
class Passes(Sampled):
    """Stochastic passes through a network with randomness of its own (its dropout layers): one seed per draw, shared by all inputs."""

    params: Tree
    log_evidence: Score | None = None

    def function(self, key: Key, model: Any, x: Tree) -> tuple[Tree, dict]:
        # Row by row under one key: the network draws the same noise for every row, whatever its own batch conventions.
        row = lambda one: jax.tree.map(lambda out: out[0], model.outputs(self.params, jax.tree.map(lambda leaf: leaf[None], one), key))
        return jax.vmap(row)(x), model.extra(self.params)

    def sample(self, key: Key, num_samples: int) -> Tree:
        """The weights, repeated: they are not random here, the passes are."""
        return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], num_samples, axis=0), self.params)


@sampled(("params", "log_alpha", "log_variance"), ("chosen",))
@dataclasses.dataclass(frozen=True, eq=False)
class GaussianDropout(Sampled):
    """w ~ N(θ, αθ²) on the leaves with chosen[i] = True, the others at their point (C3). log_alpha: log α of each chosen leaf, in order,
    broadcastable to it. log_variance: log σ² in the same way, where it is the parameter and α follows from it: w ~ N(θ, σ²), which also
    holds for α bounded or shared by a group."""

    params: Tree
    log_alpha: tuple[Array, ...]
    chosen: tuple[bool, ...]
    log_variance: tuple[Array, ...] | None = None
    log_evidence: Score | None = None

    def draw(self, key: Key) -> Tree:
        leaves, structure = jax.tree.flatten(self.params)
        places = [i for i, take in enumerate(self.chosen) if take]
        additive = self.log_variance is not None
        halves = [jnp.exp(0.5 * value) for value in (self.log_variance if self.log_variance is not None else self.log_alpha)]
        for i, half, k in zip(places, halves, jax.random.split(key, max(len(places), 1)), strict=False):
            noise = jax.random.normal(k, leaves[i].shape, leaves[i].dtype)
            leaves[i] = leaves[i] + (half if additive else half * leaves[i]) * noise
        return jax.tree.unflatten(structure, leaves)

    def sparsity(self, threshold: float = 3.0) -> dict[str, float]:
        """Share of each noisy leaf's weights with log α > threshold: those that are all noise and can go (C6)."""
        return {path: float(1.0 - mask.mean()) for path, mask in self.masks(threshold).items()}

    def compression(self, threshold: float = 3.0) -> float:
        """|W| / |W≠0| over the noisy leaves."""
        masks = self.masks(threshold).values()
        return sum(mask.size for mask in masks) / max(1, sum(int(mask.sum()) for mask in masks))

    def masks(self, threshold: float = 3.0) -> dict[str, np.ndarray]:
        """True where a weight stays (log α ≤ threshold), by path."""
        leaves, paths = jax.tree.leaves(self.params), _tree.paths(self.params)
        places = [i for i, take in enumerate(self.chosen) if take]
        return {
            paths[i]: np.broadcast_to(np.asarray(log_alpha) <= threshold, leaves[i].shape)
            for i, log_alpha in zip(places, self.log_alpha, strict=True)
        }


@dataclasses.dataclass(frozen=True, eq=False)
class LinearGaussian(Posterior):
    """The exact posterior of a `LinearModel`, in float64.

    mean (k, p) and operator (k blocks of p × p): wⱼ ~ N(meanⱼ, Σⱼ), noise scale (k,) known; or, with concentration a and rate b (k,):
    σⱼ² ~ InvGamma(a, bⱼ), wⱼ | σⱼ ~ N(meanⱼ, σⱼ²Σⱼ), so that outputs and y are Student-t with 2a degrees of freedom.
    stats: the sufficient statistics, kept so that more data can be added.
    """

    mean: np.ndarray
    operator: DensePrecision
    scale: np.ndarray | None
    concentration: np.ndarray | None
    rate: np.ndarray | None
    stats: Tree
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        with jax.enable_x64(True):
            features = _by_rows(_features(model), x, lambda rows: rows * self.operator.size * 8)
        mean = features @ self.mean.T
        if self.scale is not None:
            return Outputs(mean=mean, variance=self.operator.quadratic(features), extra={"scale": self.scale})
        variance = self.operator.quadratic(features) * (self.rate / self.concentration)
        return Outputs(mean=mean, variance=variance, df=2.0 * self.concentration, extra={"scale": np.sqrt(self.rate / self.concentration)})

    def joint(self, key: Key, model: Any, x: Tree, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """ΦM and ΦΣΦᵀ for each output; with unknown noise Σ is that of a Student-t, infinite where its degrees of freedom are 2 or fewer."""
        with jax.enable_x64(True):
            features = _by_rows(_features(model), x, lambda rows: rows * self.operator.size * 8)
        rows, k = len(features), len(self.mean)
        check_joint(rows * k)
        scale = np.ones(k) if self.scale is not None else self.rate / np.maximum(self.concentration - 1.0, 0.0)
        each = np.einsum(
            "np,kpq,mq,k->knm",
            features,
            np.broadcast_to(self.operator.covariance(), (k, *self.operator.covariance().shape[1:])),
            features,
            scale,
        )
        covariance = np.zeros((rows, k, rows, k))
        covariance[:, np.arange(k), :, np.arange(k)] = each
        return features @ self.mean.T, covariance

    def sample(self, key: Key, num_samples: int) -> Tree:
        """Draws in the model's own parameters; with unknown noise the weights are in units of it, as `scaled_by_noise` has them."""
        key_noise, key_weights = jax.random.split(key)
        with jax.enable_x64(True):
            z = np.asarray(jax.random.normal(key_weights, (num_samples, *self.mean.shape), jnp.float64))
            spread = self.operator.sqrt_matvec(z)
            if self.scale is not None:
                return {"network": {"weight": self.mean + spread}, "likelihood": {}, "prior": {}}
            gamma = np.asarray(jax.random.gamma(key_noise, self.concentration, (num_samples, *self.rate.shape), jnp.float64))
        sigma = np.sqrt(self.rate / gamma)
        return {"network": {"weight": self.mean / sigma[..., None] + spread}, "likelihood": {"log_scale": np.log(sigma)}, "prior": {}}


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Posterior):
    """A weighted mixture of posteriors over the same parameters; num_samples is shared among the components."""

    components: tuple[Posterior, ...]
    weights: np.ndarray | None = None
    log_evidence: Score | None = None

    def outputs(self, key: Key, model: Any, x: Tree, num_samples: int) -> Outputs:
        keys = jax.random.split(key, len(self.components))
        share = max(1, num_samples // len(self.components))
        weights = None if self.weights is None else np.repeat(np.asarray(self.weights) / share, share)
        if all(isinstance(component, Sampled) for component in self.components):
            parts = [component.functions(k, model, x, share) for component, k in zip(self.components, keys, strict=True)]
            join = lambda *leaves: np.concatenate(leaves)
            return Outputs(
                draws=jax.tree.map(join, *[p.draws for p in parts]), weights=weights, extra=jax.tree.map(join, *[p.extra for p in parts])
            )
        draws = [component.sample(k, share) for component, k in zip(self.components, keys, strict=True)]
        params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *draws)
        return _draw_outputs(model, params, x, weights)

    def sample(self, key: Key, num_samples: int) -> Tree:
        key_which, key_draw = jax.random.split(key)
        weights = None if self.weights is None else jnp.asarray(self.weights)
        which = np.asarray(jax.random.choice(key_which, len(self.components), (num_samples,), p=weights))
        draws = _tree.stack(
            [c.sample(k, num_samples) for c, k in zip(self.components, jax.random.split(key_draw, len(self.components)), strict=True)]
        )
        return jax.tree.map(lambda leaf: leaf[which, np.arange(num_samples)], draws)


_lifted = quick(lambda params: jax.tree.map(lambda leaf: leaf[None], params))


def _draw_outputs(model: Any, params: Tree, x: Tree, weights: Array | None) -> Outputs:
    """Outputs of every draw at every row: leaves (S, rows, …)."""
    num_draws = _tree.rows(params)
    params = jax.tree.map(jnp.asarray, params)
    apply, per_row = _evaluator(model), row_bytes(model, x)
    draws = _by_rows(lambda rows: apply(params, rows), x, lambda rows: num_draws * rows * per_row, axis=1)
    extra = jax.tree.map(np.asarray, _extras(model)(params))
    return Outputs(draws=draws, weights=None if weights is None else np.asarray(weights), extra=extra)


@cached
def _evaluator(model: Any) -> Callable:
    """outputs(params with leading axis, x), compiled once per model."""
    return jax.jit(lambda params, x: jax.vmap(lambda p: model.outputs(_computable(p), x, None))(params))


@cached
def _functions(model: Any) -> Callable:
    """Outputs and likelihood parameters of one function per key; `block` of them at a time."""

    def evaluate(posterior: Any, keys: Key, x: Tree, block: int) -> tuple[Tree, dict]:
        one = lambda key: posterior.function(noise_key(key), model, x)
        return jax.vmap(one)(keys) if block >= len(keys) else jax.lax.map(one, keys, batch_size=block)

    return jax.jit(evaluate, static_argnums=3)


@cached
def _joint(model: Any) -> Callable:
    def compute(posterior: Any, x: Tree) -> tuple[Array, Array]:
        network = posterior.mean["network"]
        start = _tree.flat(network)
        outputs = lambda part: model.apply(_tree.unflat(start.at[posterior.index].add(part), network), x, None)
        zero = jnp.zeros(posterior.index.shape, start.dtype)
        value, forward = jax.linearize(outputs, zero)
        back = jax.linear_transpose(forward, zero)

        def column(unit: Array) -> Array:
            spread = posterior.operator.matvec(back(unit.reshape(value.shape))[0])
            return forward(spread.astype(start.dtype)).ravel()

        return value + forward(posterior.shift.astype(start.dtype)), jax.lax.map(column, jnp.eye(value.size, dtype=value.dtype))

    return jax.jit(compute)


def check_joint(size: int) -> None:
    """Refuse a joint covariance that does not fit the budget for predictions."""
    if 8 * size**2 > BYTE_BUDGET:
        most = int((BYTE_BUDGET / 8) ** 0.5)
        raise ModelError(
            message(
                "The joint covariance is too large.",
                f"{size} rows × outputs, {8 * size**2 / 2**30:.1f} GiB",
                f"at most {most}",
                "ask for fewer rows at a time",
            )
        )


@functools.lru_cache(maxsize=64)
def _draws(num_samples: int) -> Callable:
    return jax.jit(lambda posterior, key: jax.lax.map(lambda k: posterior.draw(noise_key(k)), jax.random.split(key, num_samples)))


def row_bytes(model: Any, x: Tree) -> int:
    """Bytes of everything computed between one row of x and its outputs: an upper bound on what a row keeps alive."""
    return 1 if x is None else _row_bytes(model, signature(x))


@cached
def _row_bytes(model: Any, shapes: Any) -> int:
    params = jax.eval_shape(model.init, jax.random.key(0))
    try:
        two, three = (jax.make_jaxpr(lambda p, rows: model.outputs(p, rows, None))(params, rows_of(shapes, n)).jaxpr.eqns for n in (2, 3))
    except TypeError:  # a model whose outputs are not arrays
        return 64 * sum(int(np.prod(shape)) * 4 for shape, _ in shapes[1])
    total = lambda eqns: sum(int(np.prod(v.aval.shape)) * 4 for eqn in eqns for v in eqn.outvars if hasattr(v.aval, "shape"))
    return max(1, total(three) - total(two))


def _kind(operator: Any) -> str:
    return "blocks" if isinstance(operator, Blocks) else "root" if isinstance(operator, Root) else "other"


@cached
def _moments(model: Any, shapes: Any, paths: tuple[str, ...] | None, kind: str, variance: bool) -> tuple[Callable, curvature.Layout]:
    """Mean and covariance of linearised outputs, compiled once per model and choice of weights; and how these are laid out."""
    plan = curvature.layout(model, shapes, paths)
    many = model.likelihood.num_outputs(model.targets()) > MANY_OUTPUTS
    size = len(plan.rest) + sum(block.numbers.size for block in plan.blocks)

    def moments(posterior: Any, x: Tree) -> tuple[Array, Array]:
        weights, operator = posterior.mean["network"], posterior.operator
        if kind == "blocks":  # never shifted: that needs the curvature in full
            return curvature.function_covariance(model, weights, x, plan, operator, variance, many)
        if kind == "root" and plan.direct and len(posterior.index) == size:
            seen = curvature.tap(model, weights, x, plan)
            rows, places = seen.inputs[0][:, 0], np.argsort(curvature.order(plan)).reshape(plan.blocks[0].numbers.shape)
            return seen.outputs + rows @ posterior.shift[places], operator.rows(rows, places, variance or many)
        mean, slopes = curvature.jacobian(model, weights, x, plan)
        slopes = slopes if len(posterior.index) == size else slopes[:, :, posterior.index]
        spread = operator.sandwich(slopes)
        return mean + slopes @ posterior.shift, jnp.diagonal(spread, axis1=1, axis2=2) if variance or many else spread

    return jax.jit(moments), plan


def _linked(key: Key, mean: np.ndarray, spread: np.ndarray, link: str, num_samples: int) -> np.ndarray:
    """Gaussian logits as draws (S, rows, k): one of them where a closed rule stands for the average."""
    variance = spread if spread.ndim == 2 else np.diagonal(spread, axis1=1, axis2=2)
    if link == "probit":
        return (mean / np.sqrt(1.0 + np.pi / 8.0 * variance))[None]
    if link == "bridge":
        return _bridge(np.asarray(mean, np.float64), np.asarray(spread, np.float64))[None].astype(mean.dtype)
    noise = np.asarray(jax.random.normal(key, (num_samples, *mean.shape), mean.dtype))
    if spread.ndim == 2:
        return mean + np.sqrt(np.maximum(variance, 0.0)) * noise
    values, vectors = np.linalg.eigh(spread)  # of k × k: singular where classes move together
    root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    return mean + np.einsum("nij,snj->sni", root, noise)


def _bridge(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """log α of the Dirichlet whose logits, on the plane Σ f = 0, have these moments (Hobbhahn, Kristiadi and Hennig 2022).

    The rule is made for spreads up to about one and fails for wider ones: means and wide variances are brought to that size first, as its authors
    do in practice.
    """
    k = mean.shape[1]
    if spread.ndim == 2:
        spread = spread[:, :, None] * np.eye(k)
    rows, total, trace = spread.sum(axis=2), spread.sum(axis=(1, 2))[:, None], np.trace(spread, axis1=1, axis2=2)[:, None]
    share = np.where(total > 1e-9 * trace, 1.0 / np.maximum(total, 1e-300), 0.0)  # nothing to take away where f is on the plane already
    mean = mean - rows * mean.sum(axis=1, keepdims=True) * share
    variance = np.maximum(np.diagonal(spread, axis1=1, axis2=2) - rows**2 * share, 1e-12)
    size = np.maximum(variance.mean(axis=1, keepdims=True) / np.sqrt(0.5 * k), 1.0)
    mean, variance = mean / np.sqrt(size), variance / size
    inner = np.exp(mean) / k**2 * np.sum(np.exp(-mean), axis=1, keepdims=True)
    return np.log(np.maximum((1.0 - 2.0 / k + inner) / variance, 1e-300))


@cached
def _every_member(model: Any) -> Callable:
    """Outputs and likelihood parameters of every member, `block` of them at a time."""

    def evaluate(posterior: RankOne, x: Tree, block: int) -> tuple[Tree, dict]:
        def one(number: Array) -> tuple[Tree, dict]:
            params = posterior.member(number)
            return model.outputs(params, x, None), model.extra(params)

        return jax.lax.map(one, jnp.arange(posterior.num_members), batch_size=block)

    return jax.jit(evaluate, static_argnums=2)


def effective(params: Tree, left: tuple[Array, ...], right: tuple[Array, ...], own: tuple[Array, ...], shared: tuple[str, ...]) -> Tree:
    """One member's parameter tree: W ∘ (r sᵀ) where rank-one, its own leaf where it has one."""
    leaves, structure = jax.tree.flatten(params)
    factors, others = iter(zip(left, right, strict=True)), iter(own)

    def one(leaf: Array, kind: str) -> Array:
        if kind == "rank_one":
            r, s = next(factors)
            return leaf * r * s
        return next(others) if kind == "own" else leaf

    return jax.tree.unflatten(structure, [one(leaf, kind) for leaf, kind in zip(leaves, shared, strict=True)])


@cached
def _features(model: Any) -> Callable:
    """Φ(x) in double precision, for the exact posterior."""
    return jax.jit(lambda x: model.features(_tree.as_float64(x)))


@cached
def _extras(model: Any) -> Callable:
    return jax.jit(jax.vmap(lambda p: model.extra(_computable(p))))


def _computable(params: Tree) -> Tree:
    """Draws stored in half precision are read in single."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf, params)


def _by_rows(
    function: Callable, x: Tree, cost: Callable[[int], int], axis: int = 0, budget: int | None = None, whole: bool = False
) -> Tree:
    """function(x) in pieces of rows whose estimated cost in bytes fits the budget, put together on the host.

    With `whole`, function returns (per row, the same for all rows) and the second part is taken from the first piece.
    """
    budget = BYTE_BUDGET if budget is None else budget
    if x is None:
        return jax.tree.map(np.asarray, function(None))
    num_rows = _tree.rows(x)
    step = num_rows
    while step > 1 and cost(step) > budget:
        step = -(-step // 2)
    if step == num_rows:
        return jax.tree.map(np.asarray, function(jax.tree.map(jnp.asarray, x)))
    pieces = []
    for first in range(0, num_rows, step):
        # The last piece is filled up with repeated rows, so that all pieces share one compiled call.
        index = np.minimum(np.arange(first, first + step), num_rows - 1)
        real = min(step, num_rows - first)
        cut = (slice(None),) * axis + (slice(real),)
        out = function(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), x))  # noqa: B023
        if whole:
            out, same = out
        pieces.append(jax.tree.map(lambda leaf: np.asarray(leaf)[cut], out))  # noqa: B023
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=axis), *pieces)
    return (joined, jax.tree.map(np.asarray, same)) if whole else joined


def mixture(posteriors: list[Any], weights: np.ndarray | None = None) -> Posterior:
    """Points and draws of equal number join into Draws; other kinds into a Mixture."""
    if not posteriors:
        raise ModelError(message("There is nothing to mix.", "0 posteriors", "at least one", "pass the members' posteriors"))
    if len(posteriors) == 1:
        return posteriors[0]
    if all(isinstance(p, Point) for p in posteriors):
        return Draws(_tree.stack([p.params for p in posteriors]), weights)
    if (
        all(isinstance(p, Draws) and p.weights is None for p in posteriors)
        and weights is None
        and len({_tree.rows(p.params) for p in posteriors}) == 1
    ):
        return Draws(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[p.params for p in posteriors]))
    return Mixture(tuple(posteriors), weights)
