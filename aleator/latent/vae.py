"""Variational autoencoders: a decoder p(y | z), and an inference network q(z | y) that learns to invert it (D7)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from aleator._cache import cached
from aleator._errors import DataError, ModelError, message
from aleator._random import as_key, noise_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._model import Latent
from aleator.latent.parts import check_values
from aleator.latent.pixels import Levels, Symbols
from aleator.latent.posteriors import Diagonal, as_posterior, standard_normal
from aleator.likelihoods import Bernoulli, Likelihood
from aleator.networks import MLP, as_network

ROWS_AT_ONCE = 20_000  # rows × draws of z that go through the decoder at a time
DRAWS_AT_ONCE = 200  # of them draws of one row


class Seen(NamedTuple):
    """What the networks see of x, (n, x_size)."""

    features: Array


class Weights(NamedTuple):
    """log p(y | z), log p(z) and log q(z | y) of draws of z, each (k, n); shown: y as the decoder was to explain it, (n, D)."""

    data: Array
    prior: Array
    posterior: Array
    shown: Array


@dataclasses.dataclass(frozen=True)
class VAE(Latent):
    """z ~ N(0, I), y | z ~ likelihood(decoder(z)), q(z | y) from encoder(y).

    latent_dim: of z; several make a chain of stochastic layers, the first next to y. encoder, decoder: hidden widths of a dense network, or a
    network of your own (one a layer): encoder y (n, …) → what `posterior` wants (2·latent_dim for "diagonal"), decoder z → outputs of the
    likelihood. posterior: "diagonal", "full", "coupling", "autoregressive", or an object of `al.latent.posteriors`. likelihood:
    `al.Bernoulli()`, `al.Gaussian(…)`, `al.HeteroscedasticGaussian()`, `al.latent.Levels(256)` or `al.latent.Symbols(C)`. binarise: y in
    [0, 1] are probabilities of a fresh Bernoulli draw at every step (stochastic binarisation). With x in the data, al.fit(key, model, (x, y),
    …), all networks also see x, and z has the prior N(m(x), s(x)²): a conditional autoencoder. context: a network x (n, …) → features (n, p)
    that the others see in place of x (`al.latent.FeatureMap` of an image, `al.latent.Pooled` of a set); prior_network: (m, log s) from them, by
    default with the decoder's widths. prior: of the decoder's weights, or None (flat).
    """

    latent_dim: Any
    encoder: Any = (200, 200)
    decoder: Any = (200, 200)
    likelihood: Any = Bernoulli()
    posterior: Any = "diagonal"
    binarise: bool = False
    prior: Any = None
    activation: str = "tanh"
    context: Any = None
    prior_network: Any = None
    y_shape: tuple[int, ...] | None = None
    x_shape: tuple[int, ...] | None = None
    x_size: int = 0  # of what the networks see of x
    networks: Any = None

    stochastic = True
    double = False

    def __post_init__(self) -> None:
        dims = (self.latent_dim,) if isinstance(self.latent_dim, (int, np.integer)) else tuple(self.latent_dim)
        if not dims or any(isinstance(d, bool) or not isinstance(d, (int, np.integer)) or d < 1 for d in dims):
            raise ModelError(message("z needs dimensions.", repr(self.latent_dim), "whole numbers ≥ 1", "pass e.g. VAE(latent_dim=50)"))
        object.__setattr__(self, "latent_dim", tuple(int(d) for d in dims))
        object.__setattr__(self, "posterior", as_posterior(self.posterior))
        object.__setattr__(self, "encoder", _networks(self.encoder))
        object.__setattr__(self, "decoder", _networks(self.decoder))
        for name in ("context", "prior_network"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else as_network(given))
        if not isinstance(self.likelihood, (Likelihood, Levels, Symbols)):
            raise ModelError(
                message("This is not a likelihood of y.", repr(self.likelihood), "e.g. al.Bernoulli()", "see the docstring of VAE")
            )
        if self.binarise and not isinstance(self.likelihood, Bernoulli):
            raise ModelError(message("Only zeros and ones are binarised.", repr(self.likelihood), "al.Bernoulli()", "drop binarise"))

    def bind(self, x: Tree, y: Tree) -> VAE:
        if y is None or not hasattr(y, "shape") or len(y.shape) < 2:
            raise DataError(
                message("An autoencoder observes rows.", f"y of shape {np.shape(y)}", "(N, D) or (N, …)", "pass al.fit(key, model, y, …)")
            )
        shape = tuple(int(s) for s in y.shape[1:])
        values = np.asarray(y, np.float64).reshape(len(y), -1)
        if np.isnan(values).any():
            raise DataError(
                message("An autoencoder sees whole rows.", "NaN in y", "finite numbers", "drop or impute them, or use FactorModel")
            )
        if self.binarise and (values.min() < 0 or values.max() > 1):
            raise DataError(
                message("y cannot be binarised.", f"{values.min():g} to {values.max():g}", "values in [0, 1]", "divide by the largest")
            )
        if isinstance(self.likelihood, Bernoulli):
            whole = self.binarise or np.isin(values, (0.0, 1.0))
            check_values(
                values,
                np.broadcast_to(whole, values.shape),
                "zeros and ones",
                "pass binarise=True for grey values in [0, 1], or round them",
            )
        else:
            self.likelihood.encode(values)
        given = None if x is None else tuple(int(s) for s in x.shape[1:])
        made = dataclasses.replace(self, y_shape=shape, x_shape=given, x_size=self._seen_size(given), networks=None)
        return dataclasses.replace(made, networks=made._networks())

    # ---- parameters ----

    def _networks(self) -> tuple[tuple[str, Any], ...]:
        """Every network by name: encoder0 … (y or the layer below → h), decoder0 … (z → y or the layer below), prior (x → p(z | x))."""
        dims, columns = self.latent_dim, math.prod(self.y_shape)  # type: ignore[arg-type]
        below = (columns, *dims[:-1])
        made: list[tuple[str, Any]] = []
        for layer, (d, size) in enumerate(zip(dims, below, strict=True)):
            out = self.posterior.num_outputs(d)
            back = self.likelihood.num_outputs(columns) if layer == 0 else 2 * size
            encoder, decoder = (given if _one(given) else given[layer] for given in (self.encoder, self.decoder))
            if layer == 0 and isinstance(self.likelihood, Symbols):
                size *= self.likelihood.num_symbols
            made.append((f"encoder{layer}", self._network(encoder, size + self.x_size, out)))
            made.append((f"decoder{layer}", self._network(decoder, d + self.x_size, back)))
        if self.x_size:
            widths = _hidden(self.decoder)
            made.append(("prior", self.prior_network or MLP(self.x_size, widths, 2 * dims[-1], self.activation)))
        if self.x_size and self.context is not None:
            made.append(("context", self.context))
        return tuple(made)

    def _seen_size(self, shape: tuple[int, ...] | None) -> int:
        """How many numbers a row of x is to the other networks."""
        if shape is None:
            return 0
        if self.context is None:
            return math.prod(shape)
        params = jax.eval_shape(self.context.init, jax.random.key(0))
        seen = jax.eval_shape(lambda p: self.context.apply(p, jnp.zeros((1, *shape), jnp.float32), None), params)
        return math.prod(seen.shape[1:])

    def _network(self, given: Any, size: int, out: int) -> Any:
        return MLP(size, given, out, self.activation) if _widths(given) else given

    def init(self, key: Key) -> Tree:
        *keys, key_flows = jax.random.split(key, len(self.networks) + 1)
        params = {name: network.init(k) for (name, network), k in zip(self.networks, keys, strict=True)}
        each = zip(self.latent_dim, jax.random.split(key_flows, len(self.latent_dim)), strict=True)
        flows = {f"flow{i}": self.posterior.init(k, d) for i, (d, k) in enumerate(each)}
        learned = self.likelihood.init_extra(math.prod(self.y_shape)) if isinstance(self.likelihood, Likelihood) else {}  # type: ignore[arg-type]
        return params | {"flows": flows, "likelihood": learned}

    def sample_prior(self, key: Key) -> Tree:
        return self.init(key)

    def log_prior(self, params: Tree) -> Array:
        """Of the decoder's weights and the likelihood's parameters; the inference network is no part of the model."""
        total = self.likelihood.log_prior_extra(params["likelihood"]) if isinstance(self.likelihood, Likelihood) else jnp.zeros(())
        if self.prior is None:
            return total
        decoders = {name: params[name] for name, _ in self.networks if name.startswith("decoder")}
        return total + self.prior.log_prob(decoders, {}, jax.tree.map(lambda leaf: leaf.shape[0], decoders))

    def extra(self, params: Tree) -> dict:
        return self.likelihood.constrain(params["likelihood"]) if isinstance(self.likelihood, Likelihood) else {}

    # ---- the two directions ----

    def encoded(self, params: Tree, layer: int, inputs: Array, x: Any) -> Array:
        """h of one layer's q, from y or the layer below; (…, n, num_outputs). A dense network sees symbols as indicators, levels on ±½."""
        if layer == 0 and isinstance(dict(self.networks)["encoder0"], MLP):
            if isinstance(self.likelihood, Symbols):
                inputs = jax.nn.one_hot(inputs.astype(jnp.int32), self.likelihood.num_symbols).reshape(*inputs.shape[:-1], -1)
            elif isinstance(self.likelihood, Levels):
                inputs = (inputs + 0.5) / self.likelihood.num_levels - 0.5
        return self._apply(params, f"encoder{layer}", inputs, x, images=layer == 0)

    def decoded(self, params: Tree, layer: int, z: Array, x: Any) -> Array:
        """Outputs for y, or (mean, log scale) of the layer below."""
        return self._apply(params, f"decoder{layer}", z, x)

    def seen(self, params: Tree, x: Any) -> Seen | None:
        """x (n, …, flat) as the networks see it. Who asks several networks asks this once: features of an image are the costly part."""
        if x is None or isinstance(x, Seen):
            return x
        if self.context is None:
            return Seen(x)
        return Seen(self.context.apply(params["context"], x.reshape(-1, *self.x_shape), None).reshape(len(x), -1))  # type: ignore[misc]

    def _apply(self, params: Tree, name: str, inputs: Array, x: Any, images: bool = False) -> Array:
        network = dict(self.networks)[name]
        lead = inputs.shape[:-1]
        seen = self.seen(params, x)
        if seen is not None:
            inputs = jnp.concatenate([inputs, jnp.broadcast_to(seen.features, (*lead, self.x_size))], axis=-1)
        flat = inputs.reshape(-1, inputs.shape[-1])
        if images and not isinstance(network, MLP) and seen is None:
            flat = flat.reshape(-1, *self.y_shape)  # type: ignore[misc]
        out = network.apply(params[name], flat, None)
        return out.reshape(*lead, -1)

    def draw_hidden(self, params: Tree, shown: Array, x: Any, noise: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        """z of every layer from q, each (k, n, d), and log q, (k, n). noise: e of every layer."""
        hidden, log_q, inputs = [], 0.0, shown
        for layer, e in enumerate(noise):
            z, term = self.posterior.draw(params["flows"][f"flow{layer}"], self.encoded(params, layer, inputs, x), e)
            hidden.append(z)
            log_q, inputs = log_q + term, z
        return tuple(hidden), log_q  # type: ignore[return-value]

    def log_q(self, params: Tree, shown: Array, x: Any, hidden: tuple[Array, ...]) -> Array:
        """log q(z | y) of given z, (k, n)."""
        total, inputs = 0.0, shown
        for layer, z in enumerate(hidden):
            total = total + self.posterior.log_prob(params["flows"][f"flow{layer}"], self.encoded(params, layer, inputs, x), z)
            inputs = z
        return total  # type: ignore[return-value]

    def log_hidden(self, params: Tree, hidden: tuple[Array, ...], x: Any) -> Array:
        """log p(z), all layers, (k, n)."""
        total = self._top(params, hidden[-1], x)
        for layer in range(len(hidden) - 1, 0, -1):
            total = total + Diagonal().log_prob({}, self.decoded(params, layer, hidden[layer], x), hidden[layer - 1])
        return total

    def log_shown(self, params: Tree, hidden: tuple[Array, ...], shown: Array, x: Any) -> Array:
        """log p(y | z), (k, n)."""
        outputs = self.decoded(params, 0, hidden[0], x)
        lead = outputs.shape[:-1]
        y = jnp.broadcast_to(shown, (*lead, shown.shape[-1])).reshape(-1, shown.shape[-1])
        return self.likelihood.log_prob(outputs.reshape(-1, outputs.shape[-1]), y, self.extra(params)).reshape(lead)

    def _top(self, params: Tree, z: Array, x: Any) -> Array:
        return standard_normal(z) if x is None else Diagonal().log_prob({}, self.top(params, x), z)

    def top(self, params: Tree, x: Any) -> Array:
        """Mean and log scale of the last layer's prior p(z | x), (n, 2d)."""
        return self._apply(params, "prior", self.seen(params, x).features, None)  # type: ignore[union-attr]

    def hidden(self, key: Key, params: Tree, x: Any, num: int) -> tuple[Array, ...]:
        """Draws of z of every layer from the prior, each (num, d), the first next to y."""
        keys = jax.random.split(key, len(self.latent_dim))
        z = jax.random.normal(keys[-1], (num, self.latent_dim[-1]))
        drawn = [z if x is None else Diagonal().draw({}, self.top(params, x), z)[0]]
        for layer in range(len(self.latent_dim) - 1, 0, -1):
            e = jax.random.normal(keys[layer - 1], (num, self.latent_dim[layer - 1]))
            drawn.insert(0, Diagonal().draw({}, self.decoded(params, layer, drawn[0], x), e)[0])
        return tuple(drawn)

    def ancestral(self, key: Key, params: Tree, x: Any, num: int) -> tuple[tuple[Array, ...], Array]:
        """Draws of z of every layer and of y given them, (num, D)."""
        key_hidden, key_y = jax.random.split(key)
        x = self.seen(params, x)
        hidden = self.hidden(key_hidden, params, x, num)
        return hidden, self.likelihood.sample(key_y, self.decoded(params, 0, hidden[0], x), self.extra(params))

    def noise(self, key: Key, num: int, rows: int) -> tuple[Array, ...]:
        """e of every layer, (num, rows, d)."""
        keys = jax.random.split(noise_key(key), len(self.latent_dim))
        return tuple(jax.random.normal(k, (num, rows, d)) for k, d in zip(keys, self.latent_dim, strict=True))

    def shown(self, key: Key | None, batch: Batch) -> tuple[Array, Array | None]:
        """y (n, D), binarised where that is asked for and there is a key, and x (n, p) or None."""
        y = batch.y.reshape(batch.y.shape[0], -1)
        y = y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)
        if self.binarise and key is not None:
            y = (jax.random.uniform(noise_key(key), y.shape, y.dtype) < y).astype(y.dtype)
        return y, None if not self.x_size else batch.x.reshape(y.shape[0], -1).astype(y.dtype)

    def weights(self, key: Key, params: Tree, batch: Batch, num: int = 1) -> Weights:
        """The three densities of `num` draws of z from q, by reparameterisation."""
        key_shown, key_noise = jax.random.split(key)
        shown, x = self.shown(key_shown, batch)
        x = self.seen(params, x)
        hidden, log_q = self.draw_hidden(params, shown, x, self.noise(key_noise, num, shown.shape[0]))
        return Weights(self.log_shown(params, hidden, shown, x), self.log_hidden(params, hidden, x), log_q, shown)

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """A draw of the evidence lower bound of each row, (n,): log p(y | z) + log p(z) − log q(z | y)."""
        weights = self.weights(jax.random.key(0) if key is None else key, params, batch)
        return (weights.data + weights.prior - weights.posterior)[0]

    # ---- questions, at one parameter tree ----

    def encode(self, params: Tree, y: Any, x: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Centre and scale of q(z | y) next to y, each (n, d), before any flow bends it."""
        shown, x = self.asked(y, x)
        h = compiled(self, _encode)(params, shown, x)
        d = self.latent_dim[0]
        return np.asarray(h[..., :d]), np.exp(np.asarray(h[..., d : 2 * d]))

    def decode(self, params: Tree, z: Any, x: Any = None) -> np.ndarray:
        """E[y | z], in y's shape; z (n, d) next to y."""
        x = None if x is None else jnp.asarray(x, jnp.float32).reshape(len(x), -1)
        mean = compiled(self, _decode)(params, jnp.asarray(z, jnp.float32), x)
        return np.asarray(mean).reshape(-1, *self.y_shape)  # type: ignore[misc]

    def simulate(self, key: KeyLike, params: Tree, num_samples: int, x: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Ancestral draws: z next to y (n, d), then y (n, …). With x: one draw a row of x, num_samples of them in turn (num_samples, rows, …)."""
        if (x is None) != (self.x_size == 0):
            raise ModelError(
                message("Simulation needs what the model is conditioned on.", f"x={type(x).__name__}", "x as in the fit", "pass x=…")
            )
        if x is None:
            z, y = compiled(self, _simulate, num_samples)(as_key(key), params, None)
            return np.asarray(z), np.asarray(y).reshape(-1, *self.y_shape)  # type: ignore[misc]
        x = jnp.asarray(x, jnp.float32).reshape(len(x), -1)
        drawn = [compiled(self, _simulate, len(x))(k, params, x) for k in jax.random.split(as_key(key), num_samples)]
        z, y = (np.stack([np.asarray(pair[i]) for pair in drawn]) for i in (0, 1))
        return z, y.reshape(num_samples, len(x), *self.y_shape)  # type: ignore[misc]

    def reconstruct(self, key: KeyLike, params: Tree, y: Any, x: Any = None) -> np.ndarray:
        """E[y′ | z], z ~ q(z | y): what the decoder makes of one draw of the code; y's shape."""
        shown, x = self.asked(y, x)
        return np.asarray(compiled(self, _reconstruct)(as_key(key), params, shown, x)).reshape(np.shape(y))

    def log_prob(self, key: KeyLike, params: Tree, y: Any, num_samples: int = 5000, x: Any = None) -> np.ndarray:
        """log p(y) of each row by num_samples importance-weighted draws: a lower bound in expectation, tighter with every draw; (n,), nats.

        y is taken as it is: binarise it first. num_samples above 200 are rounded up to whole blocks of equal size.
        """
        shown, x = self.asked(y, x)
        blocks = -(-num_samples // DRAWS_AT_ONCE)
        block = -(-num_samples // blocks)
        ask = compiled(self, _log_prob, blocks, block)
        wide = max(1, (shown.shape[1] + self.x_size) // 1000)  # a map of an image beside every draw of z
        return by_pieces(as_key(key), lambda k, given: ask(k, params, *given), (shown, x), max(1, ROWS_AT_ONCE // (block * wide)))

    def asked(self, y: Any, x: Any) -> tuple[Array, Array | None]:
        """Rows of a question, checked: y (n, D), x (n, p) or None, flat."""
        y = np.asarray(y)
        if self.y_shape is None or y.shape[1:] != self.y_shape:
            expected = f"(n, {', '.join(map(str, self.y_shape or ()))})"
            raise DataError(message("y does not look like the data of the fit.", y.shape, expected, "pass rows of the same shape"))
        if (x is None) != (self.x_size == 0):
            raise ModelError(message("The model is conditioned on x.", f"x={type(x).__name__}", "x as in the fit", "pass x=…"))
        flat = jnp.asarray(y, jnp.float32).reshape(len(y), -1)
        return flat, None if x is None else jnp.asarray(x, jnp.float32).reshape(len(y), -1)


def log_mean(logs: Array) -> Array:
    """log of the mean of exp over the first axis."""
    return logsumexp(logs, axis=0) - math.log(logs.shape[0])


def _encode(model: VAE, params: Tree, shown: Array, x: Array | None) -> Array:
    return model.encoded(params, 0, shown, x)


def _decode(model: VAE, params: Tree, z: Array, x: Array | None) -> Array:
    return model.likelihood.mean(model.decoded(params, 0, z, x), model.extra(params))


def _simulate(model: VAE, key: Key, params: Tree, x: Array | None, num: int) -> tuple[Array, Array]:
    hidden, y = model.ancestral(key, params, x, num)
    return hidden[0], y


def _reconstruct(model: VAE, key: Key, params: Tree, shown: Array, x: Array | None) -> Array:
    hidden, _ = model.draw_hidden(params, shown, x, model.noise(key, 1, shown.shape[0]))
    return _decode(model, params, hidden[0][0], x)


def _log_prob(model: VAE, key: Key, params: Tree, shown: Array, x: Array | None, blocks: int, block: int) -> Array:
    x = model.seen(params, x)

    def one(k: Key) -> Array:
        hidden, log_q = model.draw_hidden(params, shown, x, model.noise(k, block, shown.shape[0]))
        return log_mean(model.log_shown(params, hidden, shown, x) + model.log_hidden(params, hidden, x) - log_q)

    return log_mean(jax.lax.map(one, jax.random.split(key, blocks)))


@cached
def compiled(model: VAE, question: Callable, *static: Any) -> Callable:
    """question(model, *given, *static), compiled once for a model."""
    return jax.jit(lambda *given: question(model, *given, *static))


def by_pieces(key: Key, ask: Callable, rows: Any, size: int) -> Any:
    """ask(key, rows) → arrays with the rows last, for `size` rows at a time, put together. The last rows come again until there are `size`:
    one compiled shape for all pieces."""
    number = len(jax.tree.leaves(rows)[0])
    size = min(size, number)
    starts = range(0, number, size)

    def piece(start: int) -> Any:
        index = np.minimum(np.arange(start, start + size), number - 1).astype(np.int32)
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), rows)

    out = [ask(k, piece(start)) for k, start in zip(jax.random.split(key, len(starts)), starts, strict=True)]
    return jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves], axis=-1)[..., :number], *out)


def _widths(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and all(isinstance(w, (int, np.integer)) for w in given)


def _one(given: Any) -> bool:
    """Whether this is one network, or the widths of one, and not one a layer: (function, params) is one."""
    return _widths(given) or not isinstance(given, (tuple, list)) or callable(given[0])


def _networks(given: Any) -> Any:
    """Widths as tuples, networks as networks, one or one a layer."""
    if not _one(given):
        return tuple(_networks(one) for one in given)
    return tuple(int(width) for width in given) if _widths(given) else as_network(given)


def _hidden(given: Any) -> tuple[int, ...]:
    if _widths(given):
        return tuple(given)
    return tuple(given[0]) if isinstance(given, (tuple, list)) and _widths(given[0]) else (200, 200)
