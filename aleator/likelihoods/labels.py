"""Likelihoods of yes or no, and of classes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key
from aleator.likelihoods._likelihood import Extra, Likelihood, match, matrix
from aleator.likelihoods._targets import check_range, check_several_classes, encode_integers


@dataclasses.dataclass(frozen=True)
class Bernoulli(Likelihood):
    """P(y = 1 | f) = 1/(1 + e^{−f}), independently for each of k binary columns; f are logits. link="probit": P(y = 1 | f) = Φ(f)."""

    link: str = "logit"
    support: ClassVar[str] = "binary"

    def __post_init__(self) -> None:
        if self.link not in ("logit", "probit"):
            raise ModelError(message("Bernoulli(link=…) cannot be used.", repr(self.link), "'logit' or 'probit'", "choose one of them"))

    def encode(self, y: Any, fitting: bool = True) -> np.ndarray:
        """(n, k) int32 of 0 and 1; when fitting, each column must show both."""
        values = encode_integers(y, "Bernoulli", "y.astype(int)")
        check_range(values, 2, "Bernoulli", "use Categorical(num_classes) for more than two classes")
        for column in range(values.shape[1] if fitting else 0):
            check_several_classes(values[:, column], "Bernoulli" if values.shape[1] == 1 else f"Bernoulli, column {column}")
        return values

    def logits(self, outputs: jax.Array) -> jax.Array:
        """log P(y = 1 | f) − log P(y = 0 | f), (n, k): f itself, or log Φ(f) − log Φ(−f)."""
        f = matrix(self, outputs)
        return f if self.link == "logit" else jax.scipy.special.log_ndtr(f) - jax.scipy.special.log_ndtr(-f)

    def distribution(self, outputs: jax.Array, extra: Extra) -> Any:
        """Bernoulli with these logits and batch shape (n, k)."""
        import numpyro.distributions as dist

        return dist.Bernoulli(logits=self.logits(outputs))

    def log_terms(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        y = match(self, outputs, y)
        return self.distribution(outputs, extra).log_prob(jnp.asarray(y, outputs.dtype))

    def mean(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        return jax.nn.sigmoid(self.logits(outputs))

    def variance(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        # σ(f) σ(−f), not p (1 − p): the latter rounds to zero from f ≈ 17 on in float32.
        logits = self.logits(outputs)
        return jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits)

    def entropy(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        """log(1 + e^{−|f|}) + |f| σ(−|f|): no overflow and no cancellation at large |f|."""
        size = jnp.abs(self.logits(outputs))
        return jax.nn.softplus(-size) + size * jax.nn.sigmoid(-size)

    def sample(self, key: Key, outputs: jax.Array, extra: Extra) -> jax.Array:
        return self.distribution(outputs, extra).sample(key).astype(jnp.int32)

    def cdf(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        y = match(self, outputs, y)
        return jnp.where(y < 0, 0.0, jnp.where(y < 1, jax.nn.sigmoid(-self.logits(outputs)), 1.0)).astype(outputs.dtype)


@dataclasses.dataclass(frozen=True)
class Categorical(Likelihood):
    """P(y = c | f) = softmax(f)_c over num_classes = K classes, labels 0…K−1 of shape (n,); f are logits (n, K).

    `mean` is the vector of class probabilities, `variance` p(1 − p) of each class.
    """

    num_classes: int
    support: ClassVar[str] = "label"

    def __post_init__(self) -> None:
        whole = isinstance(self.num_classes, (int, np.integer)) and not isinstance(self.num_classes, bool)
        if not (whole and self.num_classes >= 2):
            raise ModelError(
                message(
                    "Categorical(num_classes=…) cannot be used.", repr(self.num_classes), "an integer ≥ 2", "pass the number of classes"
                )
            )

    def num_outputs(self, k: int) -> int:
        return self.num_classes

    def encode(self, y: Any, fitting: bool = True) -> np.ndarray:
        """(n,) int32 labels; when fitting, at least two classes must appear."""
        values = encode_integers(y, "Categorical", "y.astype(int)")
        if values.shape[1] != 1:
            raise DataError(
                message(
                    "Categorical takes one label per row.",
                    f"y of shape {values.shape}",
                    "(n,) or (n, 1)",
                    "for one-hot rows pass y.argmax(1)",
                )
            )
        check_range(values, self.num_classes, f"Categorical({self.num_classes})", "number the classes from 0, or raise num_classes")
        if fitting:
            check_several_classes(values[:, 0], "Categorical")
        return values[:, 0]

    def distribution(self, outputs: jax.Array, extra: Extra) -> Any:
        """Categorical(logits = f) with batch shape (n,)."""
        import numpyro.distributions as dist

        if matrix(self, outputs).shape[1] != self.num_classes:
            raise ModelError(
                message(
                    "The network returns the wrong number of outputs for Categorical.",
                    f"outputs of shape {outputs.shape}",
                    f"(n, {self.num_classes}): one logit per class",
                    f"give the network out_size={self.num_classes}",
                )
            )
        return dist.Categorical(logits=outputs)

    def log_terms(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        distribution = self.distribution(outputs, extra)
        if jnp.shape(y) != outputs.shape[:1] or not jnp.issubdtype(jnp.asarray(y).dtype, jnp.integer):
            raise ModelError(
                message(
                    "Labels do not match the network's outputs.",
                    f"outputs {outputs.shape}, y {jnp.shape(y)} {jnp.asarray(y).dtype}",
                    f"y of shape ({outputs.shape[0]},), integers",
                    "pass y through likelihood.encode first",
                )
            )
        return distribution.log_prob(y)[:, None]

    def mean(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        return self.distribution(outputs, extra).probs

    def variance(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        probs = self.distribution(outputs, extra).probs
        return probs * (1 - probs)

    def entropy(self, outputs: jax.Array, extra: Extra) -> jax.Array:
        """−Σ p log p from normalised log p, where numpyro's logsumexp(f) − Σ p f cancels at large logits."""
        logits = jax.nn.log_softmax(self.distribution(outputs, extra).logits)
        return -jnp.sum(jnp.where(logits > -jnp.inf, jnp.exp(logits) * logits, 0.0), axis=-1)

    def sample(self, key: Key, outputs: jax.Array, extra: Extra) -> jax.Array:
        return self.distribution(outputs, extra).sample(key).astype(jnp.int32)

    def cdf(self, outputs: jax.Array, y: Array, extra: Extra) -> jax.Array:
        raise ModelError(
            message("Class labels have no order.", "cdf of a Categorical", "class probabilities", "use mean (the probabilities)")
        )

    def information_root(self, outputs: Any, extra: Extra) -> jax.Array:
        """diag(√p) − p√pᵀ, whose square is diag(p) − ppᵀ."""
        probs = self.mean(outputs, extra)
        root = jnp.sqrt(probs)
        return root[:, :, None] * jnp.eye(probs.shape[1], dtype=probs.dtype) - probs[:, :, None] * root[:, None, :]

    def total_information(self, outputs: Any, extra: Extra, weight: Array) -> jax.Array:
        """Σ weight·(diag(p) − ppᵀ) without a matrix a row: there may be thousands of classes."""
        probs = self.mean(outputs, extra)
        return jnp.diag(weight @ probs) - (weight[:, None] * probs).T @ probs
