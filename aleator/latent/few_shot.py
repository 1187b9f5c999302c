"""One-shot generalisation: a conditional autoencoder that sees a few examples of a class it has not met (D12).

A row's x is a set of examples, its y one more of the same class. `Pooled` makes features of the set in which the order of the examples does not
count; with it as `context`, `al.latent.VAE` is a neural process with one hidden variable a row (Garnelo et al. 2018), and p(y | set) its
prediction for new members, from none to several examples.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, message
from aleator._random import as_key, seed_of
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.networks import MLP


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Features of sets: the mean over a set's examples of a network's outputs, and how many examples there are.

    x (n, S, size + 1): up to S examples a set, in each last column 1 where there is one and 0 where there is none. → (n, num_features + 1).
    """

    size: int
    hidden: tuple[int, ...] = (128,)
    num_features: int = 64
    activation: str = "tanh"

    @property
    def network(self) -> MLP:
        return MLP(self.size, self.hidden, self.num_features, self.activation)

    def init(self, key: Key) -> Tree:
        return self.network.init(key)

    def apply(self, params: Tree, x: Array, key: Key | None = None) -> Array:
        there = x[..., -1]
        features = self.network.apply(params, x[..., :-1].reshape(-1, self.size)).reshape(*there.shape, -1)
        number = jnp.sum(there, axis=-1, keepdims=True)
        mean = jnp.sum(features * there[..., None], axis=-2) / jnp.maximum(number, 1.0)
        return jnp.concatenate([mean, number / there.shape[-1]], axis=-1)

    def rebuild(self, params: Tree) -> Tree:
        return params


def episodes(
    key: KeyLike, y: Any, labels: Any, num_rows: int, num_shots: int | tuple[int, int] = (0, 5), max_shots: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows (x, y) for `Pooled`: x (num_rows, max_shots, D + 1) examples of one class, y (num_rows, …) another row of it.

    num_shots: examples a set, a number or a range (first, last) drawn from evenly. max_shots: room for examples, by default as many as there
    can be; the same for all sets that one model is to see.
    """
    y, labels = np.asarray(y), np.asarray(labels)
    first, last = (num_shots, num_shots) if isinstance(num_shots, (int, np.integer)) else num_shots
    room = last if max_shots is None else max_shots
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if len(y) != len(labels) or not 0 <= first <= last <= room or room < 1 or min(len(rows) for rows in members) <= last:
        got = f"{len(y)} rows, {len(labels)} labels, num_shots={num_shots}, max_shots={room}, {min(map(len, members))} rows in a class"
        expected = "a label a row, shots that fit, and a class more rows than shots"
        raise DataError(message("No sets can be drawn.", got, expected, "lower num_shots, or drop small classes"))
    rng = np.random.default_rng(seed_of(as_key(key)))
    rows = y.reshape(len(y), -1).astype(np.float32)
    x = np.zeros((num_rows, room, rows.shape[1] + 1), np.float32)
    chosen = np.zeros(num_rows, int)
    for number in range(num_rows):
        shots = int(rng.integers(first, last + 1))
        chosen[number], *given = rng.choice(members[rng.integers(len(members))], shots + 1, replace=False)
        x[number, :shots, :-1], x[number, :shots, -1] = rows[given], 1.0
    return x, y[chosen]
