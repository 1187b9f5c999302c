"""DeepGP: Gaussian processes of Gaussian processes (A10), by doubly stochastic variational inference (Salimbeni and Deisenroth 2017).

f¹ ~ GP at x, f² ~ GP at f¹(x), …, y ~ likelihood(fᴸ(x)). Each layer is a sparse process with inducing values of its own, q(v) = N(μ, RRᵀ). The marginals of a
layer at one input depend on the layer below at that input only, so that a row is drawn through all layers by itself, and mini-batches are enough:

    bound = (N/n) Σᵢ E[log p(yᵢ | fᴸ(xᵢ))] − Σ_layers KL(q(v) ‖ N(0, I)).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import DataError, MethodError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.gp.conditioned import root
from aleator.gp.kernels import RBF, Kernel
from aleator.gp.layered import Layered
from aleator.gp.means import Projection
from aleator.gp.sparse import SparseGP, _as_tuple, greedy, sparse_joint, sparse_moments
from aleator.gp.svgp import divergence, expected
from aleator.gp.weighted import latent_start, weighted_terms
from aleator.likelihoods import Gaussian, Likelihood
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Point, Posterior, Score

FIXED = 8  # draws of the inner layers behind the likelihood of sampled values
QUIET = 0.1  # share of its usual scale that noise begins with beside latent inputs
INNER = 1e-2  # the first standard deviation of inner layers' inducing values: noise that is learned, not begun with


@dataclasses.dataclass(frozen=True)
class DeepGP:
    """Layers of sparse processes with one kernel of their own each, all begun from `kernel`.

    hidden: number of processes of each inner layer; inner layers are processes around a linear mean (the identity where sizes are equal, else the leading
    principal components, or zeros added), without which functions of many layers forget their inputs (Duvenaud et al. 2014). An empty `hidden` is a sparse GP.

    sampled: the whitened inducing values v ~ N(0, I) of all layers are parameters themselves, in the place of a Gaussian q(v), and inducing inputs stay where they
    are: then any sampler applies, al.SGHMC above all (Havasi et al. 2018). Its target is exp{Σᵢ E[log p(yᵢ | f(xᵢ)) | v]}·p(v), the best q(v) of any form; the expectation
    is over what v leaves open of the inner layers, by 8 fixed draws, so that the density does not change between evaluations.

    num_latent: inputs w ~ N(0, I) of each row that are not observed, beside x, for targets whose noise has a shape of its own: two modes, say. Predictions average over w, and count its
    part as epistemic; curves of `fit.functions` keep one w all along. See `gp.weighted` for the bound, and DSVI(num_importance) to tighten it.
    """

    kernel: Kernel = RBF()
    hidden: tuple[int, ...] = (2,)
    num_inducing: int = 100
    likelihood: Likelihood = Gaussian()
    layers: tuple[SparseGP, ...] = ()
    num_targets: int | None = None
    sampled: bool = False
    num_latent: int = 0
    num_rows: int | None = None

    minibatch = True
    stochastic = False
    double = True
    always_double = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", (self.hidden,) if isinstance(self.hidden, int) else tuple(self.hidden))
        if not isinstance(self.likelihood, Likelihood) or not isinstance(self.kernel, Kernel):
            got = f"{self.kernel!r}, {self.likelihood!r}"
            raise ModelError(message("A deep process needs a kernel and a likelihood.", got, "al.gp.RBF() and al.Gaussian()", "pass both"))
        if self.num_latent < 0 or (self.num_latent and self.sampled):
            got = f"num_latent={self.num_latent}, sampled={self.sampled}"
            raise ModelError(
                message("Latent inputs need a variational posterior.", got, "num_latent ≥ 0, sampled=False", "drop one of them")
            )

    def bind(self, x: Tree, y: Tree) -> DeepGP:
        if x is None or y is None or np.ndim(x) not in (1, 2):
            raise DataError(
                message("A deep process needs a table and targets.", f"x of {np.shape(x)}", "(n,) or (n, D), and y", "pass both")
            )
        k = int(np.shape(y)[1]) if np.ndim(y) == 2 else 1
        self = dataclasses.replace(self, num_targets=k, num_rows=len(x) if self.num_latent else None)
        if self.layers:
            return self
        inputs = np.asarray(x, np.float64).reshape(len(x), -1)
        inputs = np.concatenate([inputs, np.random.default_rng(0).standard_normal((len(x), self.num_latent))], axis=1)
        places = greedy(self.kernel.bind(inputs), inputs, self.num_inducing)
        layers = []
        for size in self.hidden:
            mean = Projection(_as_tuple(_principal(inputs, size)))
            layers.append(SparseGP(self.kernel.bind(inputs), len(places), mean, Gaussian(1.0), not self.sampled, _as_tuple(places), size))
            places, inputs = (values @ np.asarray(mean.matrix) for values in (places, inputs))
        layers.append(
            SparseGP(
                self.kernel.bind(inputs), len(places), Projection(_as_tuple(np.zeros((inputs.shape[1], self.likelihood.num_outputs(k))))),
                Gaussian(1.0), not self.sampled, _as_tuple(places), self.likelihood.num_outputs(k),
            )
        )  # fmt: skip
        return dataclasses.replace(self, layers=tuple(layers))

    def targets(self) -> int:
        if self.num_targets is None:
            raise ModelError(
                message("The model has not met data yet.", "num_targets=None", "the number of columns", "call model.bind(x, y)")
            )
        return self.num_targets

    def start(self, key: Key) -> Tree:
        """Hyper-parameters, inducing inputs, and q: that of the last layer begins at its prior, those below near their means."""
        latent: dict[str, Tree] = {}
        if self.num_latent:
            key, key_latent = jax.random.split(key)
            real = self.likelihood.support == "real"
            latent = {"latent": latent_start(key_latent, self.num_rows or 0, self.num_latent, self.targets(), real)}
        keys, extra = jax.random.split(key, len(self.layers)), self.likelihood.init_extra(self.targets())
        if self.num_latent and "log_scale" in extra:  # what w can explain must not be noise from the beginning
            extra = extra | {"log_scale": extra["log_scale"] + math.log(QUIET)}
        return latent | {"layers": {str(i): self._layer(k, i) for i, k in enumerate(keys)}, "likelihood": extra}

    def init(self, key: Key) -> Tree:
        return self.start(key)

    def _layer(self, key: Key, number: int) -> Tree:
        layer = self.layers[number]
        size, inducing = layer.num_processes(), layer.num_inducing
        # With latent inputs the last layer begins near its mean too: from the prior it would shrink to nothing before it has met w.
        scale = 1.0 if number == len(self.layers) - 1 and not self.num_latent else INNER
        middle = {"process": layer.start(key), "location": jnp.zeros((size, inducing))}
        return middle if self.sampled else middle | {"spread": jnp.broadcast_to(scale * jnp.eye(inducing), (size, inducing, inducing))}

    def sample_prior(self, key: Key) -> Tree:
        """Of hyper-parameters, and of the inducing values where they are parameters; q is as it begins."""
        key_start, key_likelihood, key_layers, key_values = jax.random.split(key, 4)
        params = self.start(key_start)
        keys, values = (jax.random.split(k, len(self.layers)) for k in (key_layers, key_values))
        drawn = {str(i): params["layers"][str(i)] | {"process": layer.sample_prior(keys[i])} for i, layer in enumerate(self.layers)}
        if self.sampled:
            drawn = {i: part | {"location": jax.random.normal(values[int(i)], part["location"].shape)} for i, part in drawn.items()}
        return params | {"layers": drawn, "likelihood": self.likelihood.sample_extra(key_likelihood, self.targets())}

    def log_prior(self, params: Tree) -> Array:
        parts = [layer.log_prior(params["layers"][str(i)]["process"]) for i, layer in enumerate(self.layers)]
        if self.sampled:
            values = [params["layers"][str(i)]["location"] for i in range(len(self.layers))]
            parts += [-0.5 * jnp.sum(v**2) - 0.5 * v.size * math.log(2 * math.pi) for v in values]
        return sum(parts, self.likelihood.log_prior_extra(params["likelihood"]))

    def extra(self, params: Tree) -> dict:
        return self.likelihood.constrain(params["likelihood"])

    def divergence(self, params: Tree) -> Array:
        """KL of all layers' q(v) from N(0, I)."""
        each = [params["layers"][str(i)] for i in range(len(self.layers))]
        return sum((divergence(part["location"], jnp.tril(part["spread"])) for part in each), jnp.zeros(()))

    def moments(self, key: Key | None, params: Tree, x: Tree, given: Any = None) -> tuple[Array, Array]:
        """Mean and variance of the last layer at each row, (n, o), given one draw of the layers below, rows apart, or the normals behind it, [(o₁,), …]."""
        key, f = self._beside(key, x, len(x))
        keys = None if key is None else jax.random.split(key, len(self.layers))
        for i, layer in enumerate(self.layers):
            part = params["layers"][str(i)]
            mean, variance = sparse_moments(layer, part["process"], part["location"], _spread(part), f)
            if i + 1 < len(self.layers):
                z = given[i] if keys is None else jax.random.normal(keys[i], mean.shape)
                f = mean + jnp.sqrt(jnp.maximum(variance, 1e-12)) * z
        return mean, jnp.maximum(variance, 1e-12)

    def _beside(self, key: Any, x: Tree, number: int) -> tuple[Any, Array]:
        """x with draws of the latent inputs beside it, one a row or one for all, and a key for what follows."""
        f = _tree.as_float64(jnp.asarray(x)).reshape(len(x), -1)
        if not self.num_latent:
            return key, f
        key, key_w = jax.random.split(key)
        w = jax.random.normal(key_w, (number, self.num_latent))
        return key, jnp.concatenate([f, jnp.broadcast_to(w, (len(f), self.num_latent))], axis=1)

    def function(self, key: Key, params: Tree, x: Tree) -> list[Array]:
        """One draw of every layer as functions, jointly over all rows: [(n, o₁), …]."""
        key, f = self._beside(key, x, 1)
        drawn = []
        keys = jax.random.split(key, len(self.layers))
        for i, layer in enumerate(self.layers):
            part = params["layers"][str(i)]
            mean, covariance = sparse_joint(layer, part["process"], part["location"], _spread(part), f)
            f = mean + jnp.einsum("kij,jk->ik", jax.vmap(root)(covariance), jax.random.normal(keys[i], mean.shape))
            drawn.append(f)
        return drawn

    def bound_terms(self, key: Key, params: Tree, batch: Batch, num_samples: int = 1, num_importance: int = 1) -> tuple[Array, Array]:
        """E[log p(yᵢ | f(xᵢ))] of each row, (n,), over num_samples draws of the inner layers, and the divergence; with latent inputs by num_importance weighted draws of them."""
        if self.num_latent:
            return weighted_terms(key, self, params, batch, num_samples, num_importance), self.divergence(params)

        def one(key: Key) -> Array:
            key_inner, key_last = jax.random.split(key)
            mean, variance = self.moments(key_inner, params, batch.x)
            return expected(key_last, self.likelihood, mean, variance, batch.y, self.extra(params))

        return jnp.mean(jax.vmap(one)(jax.random.split(key, num_samples)), axis=0), self.divergence(params)

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """E[log p(yᵢ | f(xᵢ)) | v], (n,), for sampled=True."""
        if not self.sampled:
            raise ModelError(
                message(
                    "A deep process has a bound, no likelihood.",
                    "model.log_likelihood",
                    "al.gp.DSVI()",
                    "fit it with al.gp.DSVI, or take DeepGP(…, sampled=True) for samplers",
                )
            )
        sizes = self.hidden if isinstance(self.hidden, tuple) else ()
        half = np.random.default_rng(0).standard_normal((FIXED // 2 if sizes else 1, sum(sizes)))
        normals = np.concatenate([half, -half]) if sizes else half
        normals = normals / np.sqrt(np.mean(normals**2, axis=0))  # mean 0 and variance 1 exactly

        def one(z: Array) -> Array:
            mean, variance = self.moments(None, params, batch.x, jnp.split(z, np.cumsum(sizes)[:-1]) if sizes else [])
            return expected(
                jax.random.key(0), self.likelihood, mean, variance, batch.y, self.extra(params)
            )  # fixed draws here too, for labels

        return jnp.mean(jax.lax.map(one, jnp.asarray(normals)), axis=0)

    def condition(self, posterior: Posterior, data: Any) -> Posterior:
        """Draws of inducing values as draws of functions."""
        return posterior if isinstance(posterior, Layered) else Layered(posterior, posterior.log_evidence)

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> NoReturn:
        raise ModelError(message("Parameters alone do not make a function.", "model.outputs", "draws", "use fit.predict(key, x)"))


def _spread(part: Tree) -> Array | None:
    """R of a layer's q(v), None where v is a parameter."""
    return jnp.tril(part["spread"]) if "spread" in part else None


class State(NamedTuple):
    """params with q in them, the optimiser's state, steps, and a running mean of the bound."""

    params: Tree
    optimizer: Any
    number: Array
    bound: Array


class Info(NamedTuple):
    """bound: the evidence lower bound before the step, an estimate from its batch."""

    bound: Array


def step(key: Key, state: State, batch: Any, target: Any, optimizer: Any, num_samples: int, num_importance: int) -> tuple[State, Info]:
    """One step of Adam on bound + log p(hyper-parameters), per row."""
    import optax

    def loss(params: Tree) -> tuple[Array, Array]:
        terms, kl = target.model.bound_terms(key, params, batch, num_samples, num_importance)
        bound = target.total(terms, batch) - kl
        return -(bound + target.model.log_prior(params)) / target.num_data, bound

    (_, bound), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    running = jnp.where(state.number == 0, bound, state.bound + (bound - state.bound) * jnp.maximum(0.01, 1.0 / (state.number + 1)))
    return State(optax.apply_updates(state.params, updates), optimizer_state, state.number + 1, running), Info(bound)


@dataclasses.dataclass(frozen=True)
class DSVI(Method):
    """Doubly stochastic variational inference for al.gp.DeepGP: mini-batches of rows, draws of the layers; Adam on everything.

    num_samples: draws of the inner layers a row and step. num_importance: weighted draws of the latent inputs behind each of them, for models that have some: the bound is tighter with every one.
    """

    num_steps: int = 5000
    batch_size: int | None = 256
    learning_rate: float = 1e-2
    num_samples: int = 1
    num_importance: int = 1

    card: ClassVar[Card] = Card(
        name="DSVI",
        summary="Deep Gaussian processes from mini-batches.",
        model_class="al.gp.DeepGP with any likelihood",
        criterion="evidence lower bound",
        search="stochastic gradients through draws of the layers",
        cost="O(n M² o) a step, layer and draw, and o·M² numbers a layer",
        needs="al.gp.DeepGP",
        references=(
            "Salimbeni and Deisenroth, Doubly Stochastic Variational Inference for Deep Gaussian Processes, NeurIPS 2017",
            "Salimbeni et al., Deep Gaussian Processes with Importance-Weighted Variational Inference, ICML 2019",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "num_samples", "num_importance", whole=True)
        check_positive(self, "learning_rate")

    def build(self, target: Any) -> Algorithm:
        import optax

        model = target.model
        if not isinstance(model, DeepGP) or model.sampled or target.temperature != 1.0:
            raise MethodError(message("DSVI fits deep Gaussian processes.", type(model).__name__, self.card.needs, "use another method"))
        if self.num_importance > 1 and not model.num_latent:
            got, wanted = f"num_importance={self.num_importance}, num_latent=0", "DeepGP(…, num_latent=1)"
            raise MethodError(message("There is nothing to weigh.", got, wanted, "give the rows latent inputs, or raise num_samples"))
        if model.num_latent and model.num_rows != target.num_data:
            got = f"{model.num_rows} of {target.num_data} rows at the start"
            raise MethodError(message("Latent inputs belong to rows.", got, "data in memory", "pass (x, y) in place of a stream"))
        optimizer = optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.num_steps, 0.01))

        def finish(key: Key, state: State, kept: Any) -> Layered:
            return Layered(Point(jax.tree.map(np.asarray, state.params)), Score(float(state.bound), 0.0, "lower bound"))

        return Algorithm(
            init=lambda key, start: State(start, optimizer.init(start), jnp.zeros((), jnp.int32), jnp.zeros(())),
            phases=(
                Phase(
                    "DSVI",
                    lambda key, state, batch: step(key, state, batch, target, optimizer, self.num_samples, self.num_importance),
                    self.num_steps,
                    "full" if self.batch_size is None else "random",
                    self.batch_size,
                ),
            ),
            position=lambda state: state.params,
            finish=finish,
            watch="bound",
            x64=True,
        )


def _principal(x: np.ndarray, size: int) -> np.ndarray:
    """(D, size): the identity, the leading principal directions, or the identity with zeros added."""
    if size >= x.shape[1]:
        return np.eye(x.shape[1], size)
    return np.linalg.svd(x - x.mean(0), full_matrices=False)[2][:size].T if len(x) >= size else np.eye(x.shape[1], size)
