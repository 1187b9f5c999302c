"""Models: a network or a basis, a likelihood and a prior, as one log joint with its terms kept apart.

The parameters of every model here are {"network": raw weights, "likelihood": {…}, "prior": {…}}: learned likelihood parameters and
hierarchical scales are parameters like any other, on the whole real line.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from aleator import networks
from aleator._cache import cached
from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.hyperpriors import InverseGamma
from aleator.likelihoods import Gaussian, Likelihood
from aleator.networks._network import check_params, fan_in
from aleator.priors import Normal, Prior


@runtime_checkable
class Model(Protocol):
    """All the rest of the library asks of a model.

    bind(x, y) returns the model fitted to the shapes of the data (and checks them); minibatch: the log-likelihood is a sum over rows;
    stochastic: it wants a key (dropout layers of its own).
    """

    likelihood: Any
    minibatch: bool
    stochastic: bool

    def bind(self, x: Tree, y: Tree) -> Model: ...

    def init(self, key: Key) -> Tree: ...

    def start(self, key: Key) -> Tree: ...

    def sample_prior(self, key: Key) -> Tree: ...

    def log_prior(self, params: Tree) -> Array: ...

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array: ...

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> Tree: ...

    def extra(self, params: Tree) -> dict: ...


class Supervised(abc.ABC):
    """Weights → outputs → y, shared by `BNN` and `LinearModel`."""

    likelihood: Likelihood
    prior: Prior
    num_targets: int | None
    minibatch = True

    @abc.abstractmethod
    def init_weights(self, key: Key) -> Tree:
        """Fresh weights of the network."""

    @abc.abstractmethod
    def apply(self, weights: Tree, x: Tree, key: Key | None = None) -> Tree:
        """Outputs f(x), (n, num_outputs)."""

    @abc.abstractmethod
    def fan_in(self, weights: Tree) -> Tree:
        """Fan-ins, as priors use them."""

    def targets(self) -> int:
        """Number k of target columns; known once the model has met data, or from the network's own output size."""
        if self.num_targets is None:
            raise ModelError(
                message(
                    "The model has not met data yet.",
                    "num_targets=None",
                    "the number of target columns",
                    "pass num_targets=1, or call model.bind(x, y)",
                )
            )
        return self.num_targets

    def init(self, key: Key) -> Tree:
        """Fresh parameters: the network's own initialisation, likelihood and prior parameters at their prior medians."""
        return self.assemble(self.init_weights(key))

    def assemble(self, weights: Tree) -> Tree:
        """The full parameter tree around given network weights."""
        fans = self.fan_in(weights)
        hyper = self.prior.init(weights, fans)
        return {"network": self.prior.raw(weights, hyper, fans), "likelihood": self.likelihood.init_extra(self.targets()), "prior": hyper}

    @abc.abstractmethod
    def rescale(self, weights: Tree, extra: dict) -> Tree:
        """What the noise scale does to the weights: nothing, unless the prior is stated in its units."""

    def weights(self, params: Tree) -> Tree:
        """The network's weights within a parameter tree."""
        weights = self.prior.weights(params["network"], params["prior"], self.fan_in(params["network"]))
        return self.rescale(weights, self.extra(params))

    def extra(self, params: Tree) -> dict:
        """The likelihood's parameters on their own scale."""
        return self.likelihood.constrain(params["likelihood"])

    def sample_prior(self, key: Key) -> Tree:
        key_weights, key_extra = jax.random.split(key)
        template = jax.eval_shape(self.init_weights, key_weights)
        raw, hyper = self.prior.sample(key_weights, template, self.fan_in(template))
        return {"network": raw, "likelihood": self.likelihood.sample_extra(key_extra, self.targets()), "prior": hyper}

    def log_prior(self, params: Tree) -> Array:
        network = self.prior.log_prob(params["network"], params["prior"], self.fan_in(params["network"]))
        return network + self.likelihood.log_prior_extra(params["likelihood"])

    def expected_log_prior(self, mean: Tree, variance: Tree, draw: Tree) -> Array | None:
        """E[log p(w | h)] + log p(h) + log p(extra): weights in closed form under independent marginals N(mean, variance) given in the
        "network" part, hyper-parameters and likelihood parameters at `draw`. None where the prior has no closed form."""
        network = self.prior.expected_log_prob(mean["network"], variance["network"], draw["prior"], self.fan_in(mean["network"]))
        return None if network is None else network + self.likelihood.log_prior_extra(draw["likelihood"])

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> Tree:
        return (self.apply if apply is None else apply)(self.weights(params), x, key)

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(yᵢ | xᵢ, params), (n,)."""
        return self.likelihood.log_prob(self.outputs(params, batch.x, key, apply), batch.y, self.extra(params))

    def check_outputs(self, rows: Tree, k: int) -> None:
        """Refuse a network whose outputs at two rows do not have the shape the likelihood needs, before anything runs."""
        weights = jax.eval_shape(self.init_weights, jax.random.key(0))
        out = jax.eval_shape(lambda w, x: self.apply(w, x, None), weights, rows)
        expected = (2, self.likelihood.num_outputs(k))
        if getattr(out, "shape", None) != expected:
            got = f"(n, {', '.join(map(str, out.shape[1:]))})" if hasattr(out, "shape") and out.shape[:1] == (2,) else f"{out}"
            raise ModelError(
                message(
                    f"The network's outputs do not fit {type(self.likelihood).__name__} with {k} target column{'s' * (k > 1)}.",
                    got,
                    f"(n, {expected[1]})",
                    f"give the network out_size={expected[1]}",
                )
            )


@dataclasses.dataclass(frozen=True)
class BNN(Supervised):
    """A Bayesian neural network: any network, likelihood p(y | f(x)), prior p(w).

    network: a built-in, an Equinox or NNX module, or (function, params). num_targets is filled in from the data.
    """

    network: Any
    likelihood: Likelihood = Gaussian()
    prior: Prior = Normal(1.0)
    num_targets: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", networks.as_network(self.network))
        _check_parts(self.likelihood, self.prior)
        if self.num_targets is None and hasattr(self.network, "out_size"):
            one, two = self.likelihood.num_outputs(1), self.likelihood.num_outputs(2)
            object.__setattr__(self, "num_targets", 1 if one == two else max(1, self.network.out_size // one))

    @property
    def stochastic(self) -> bool:
        return getattr(self.network, "stochastic", False)

    def bind(self, x: Tree, y: Tree) -> BNN:
        return _bound_network(self, signature(x), _target_columns(y))

    def init_weights(self, key: Key) -> Tree:
        return self.network.init(key)

    def start(self, key: Key) -> Tree:
        """Where one fit begins: the parameters the user's network came with, else a fresh initialisation."""
        given = getattr(self.network, "params", None)
        return self.init(key) if given is None else self.assemble(check_params(given, "user's"))

    def apply(self, weights: Tree, x: Tree, key: Key | None = None) -> Tree:
        return self.network.apply(weights, x, key)

    def fan_in(self, weights: Tree) -> Tree:
        return fan_in(self.network, weights)

    def rescale(self, weights: Tree, extra: dict) -> Tree:
        return weights


@dataclasses.dataclass(frozen=True)
class LinearModel(Supervised):
    """f(x) = W Φ(x): linear in the weights for any basis Φ; W (k, p).

    features: one of `al.features` or any function x → (n, p). With scaled_by_noise=True the prior scale of W is in units of the noise
    standard deviation, W | σ ~ N(0, σ²S): the conjugate form for unknown noise, with Gaussian(InverseGamma(a, b)).
    """

    features: Any
    likelihood: Likelihood = Gaussian()
    prior: Prior = Normal(1.0)
    scaled_by_noise: bool = False
    num_targets: int | None = None
    num_features: int | None = None

    stochastic = False

    def __post_init__(self) -> None:
        if not callable(self.features):
            raise ModelError(
                message("features must be a function.", type(self.features).__name__, "x → (n, p)", "pass e.g. al.features.Polynomial(3)")
            )
        _check_parts(self.likelihood, self.prior)
        if self.scaled_by_noise and not isinstance(self.likelihood, Gaussian):
            raise ModelError(
                message(
                    "scaled_by_noise needs a Gaussian likelihood.", type(self.likelihood).__name__, "al.Gaussian", "drop scaled_by_noise"
                )
            )

    def bind(self, x: Tree, y: Tree) -> LinearModel:
        return _bound_linear(self, signature(x), _target_columns(y))

    def init_weights(self, key: Key) -> Tree:
        if self.num_features is None:
            raise ModelError(
                message("The model has not met data yet.", "num_features=None", "the number of features", "call model.bind(x, y)")
            )
        return {"weight": jnp.zeros((self.likelihood.num_outputs(self.targets()), self.num_features))}

    def start(self, key: Key) -> Tree:
        return self.init(key)

    def apply(self, weights: Tree, x: Tree, key: Key | None = None) -> Tree:
        return self.features(x) @ weights["weight"].T

    def fan_in(self, weights: Tree) -> Tree:
        return {"weight": weights["weight"].shape[1]}

    def rescale(self, weights: Tree, extra: dict) -> Tree:
        # The inferred parameter is W/σ, whose prior does not depend on σ: no Jacobian is needed.
        return {"weight": weights["weight"] * extra["scale"][:, None]} if self.scaled_by_noise else weights


def conjugate_noise(likelihood: Any) -> Any:
    """How `Exact` may treat the noise: a fixed scale (float), an InverseGamma on the variance, or None."""
    if not isinstance(likelihood, Gaussian):
        return None
    return likelihood.scale if isinstance(likelihood.scale, (float, int, InverseGamma)) else None


def _check_parts(likelihood: Any, prior: Any) -> None:
    if not isinstance(likelihood, Likelihood):
        raise ModelError(
            message(
                "This is not a likelihood.",
                repr(likelihood),
                "an object such as al.Gaussian()",
                "call it: al.Gaussian() and not al.Gaussian",
            )
        )
    if not isinstance(prior, Prior):
        raise ModelError(message("This is not a prior.", repr(prior), "an object such as al.Normal(1.0)", "see al.priors"))


@cached
def _bound_network(model: BNN, shapes: Any, k: int) -> BNN:
    """The model for k target columns, once its outputs are known to fit: traced once per model and shape."""
    model.check_outputs(rows_of(shapes), k)
    return dataclasses.replace(model, num_targets=k)


@cached
def _bound_linear(model: LinearModel, shapes: Any, k: int) -> LinearModel:
    rows = rows_of(shapes)
    shape = jax.eval_shape(model.features, rows).shape
    if len(shape) != 2 or shape[0] != 2:
        raise ModelError(
            message("The features have a wrong shape.", f"{shape} for 2 rows", "(2, p)", "return one row of features per row of x")
        )
    model = dataclasses.replace(model, num_targets=k, num_features=shape[1])
    model.check_outputs(rows, k)
    return model


def signature(x: Tree) -> Any:
    """Structure, row shapes and dtypes of x: all that tracing needs, and hashable."""
    leaves, structure = jax.tree.flatten(x)
    return structure, tuple((tuple(leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves)


def rows_of(shapes: Any, num_rows: int = 2) -> Tree:
    """Shapes of a batch of x from its signature: enough to trace a network without touching the data."""
    structure, leaves = shapes
    return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((num_rows, *shape), dtype) for shape, dtype in leaves])


def random_rows(key: Key, rows: Tree) -> Tree:
    """Values for shapes of x, to try a network on: standard normals, and zeros and ones where x is whole numbers."""
    leaves, structure = jax.tree.flatten(rows)
    draw = lambda k, leaf: (
        jax.random.normal(k, leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jax.random.randint(k, leaf.shape, 0, 2).astype(leaf.dtype)
    )
    return jax.tree.unflatten(structure, [draw(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)])


def _target_columns(y: Tree) -> int:
    if y is None:
        raise DataError(message("A supervised model needs targets.", "y=None", "y of shape (N,) or (N, k)", "pass (x, y)"))
    return int(np.shape(y)[1]) if np.ndim(y) == 2 else 1
