"""Which hidden units are needed: the posterior of what each contributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _functions, _tree, sites
from aleator._cache import cached
from aleator._errors import ModelError, message
from aleator._fit import Fit
from aleator._random import as_key
from aleator._typing import Array, KeyLike
from aleator.explain._shared import LEVEL, NUM_SAMPLES, stderr, table, tails
from aleator.model import rows_of, signature

NEEDED = 0.1  # a unit is needed when its contribution exceeds this share of the noise's standard deviation


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """What each unit feeding the weight at `path` adds to the function.

    contributions (S, m): root mean square over rows of E[y | x] minus the same without the unit, constants aside, as a share of the noise's
    standard deviation. A unit is needed in a draw where it exceeds `threshold`. Draws of a sampler may exchange units: then only what does
    not depend on their labels means anything, `number` and `ranked`.
    """

    path: str
    contributions: np.ndarray
    threshold: float
    num_chains: int = 1

    @property
    def probability(self) -> np.ndarray:
        """P(unit j is needed | D) by label, (m,)."""
        return np.mean(self.contributions > self.threshold, axis=0)

    @property
    def stderr(self) -> np.ndarray:
        """Monte Carlo standard errors of `probability`, (m,)."""
        return stderr(self.contributions > self.threshold, self.num_chains)

    @property
    def ranked(self) -> np.ndarray:
        """Contributions of each draw from the largest to the smallest, (S, m)."""
        return -np.sort(-self.contributions, axis=1)

    @property
    def number(self) -> np.ndarray:
        """Probabilities that 0, 1, … m units are needed, (m + 1,)."""
        counts = np.sum(self.contributions > self.threshold, axis=1)
        return np.bincount(counts, minlength=self.contributions.shape[1] + 1) / len(counts)

    def __str__(self) -> str:
        head = ("rank", "contribution / noise", f"{100 * LEVEL:g} % interval", f"P(> {self.threshold:g})")
        ranked = self.ranked
        lower, upper = np.quantile(ranked, tails(LEVEL), axis=0)
        chance, error = np.mean(ranked > self.threshold, axis=0), stderr(ranked > self.threshold, self.num_chains)
        rows = [
            (str(j + 1), f"{ranked[:, j].mean():.3g}", f"{lower[j]:.3g} … {upper[j]:.3g}", f"{chance[j]:.3f} ± {error[j]:.2g}")
            for j in range(ranked.shape[1])
        ]
        mean = np.arange(len(self.number)) @ self.number
        return "\n".join([f"units feeding {self.path}", table(head, rows), f"needed: {mean:.2f} of {ranked.shape[1]} on average"])


def units(key: KeyLike, fit: Fit, x: Any, path: str | None = None, num_samples: int = NUM_SAMPLES, threshold: float = NEEDED) -> Units:
    """Posterior of every hidden unit's contribution to the function over the rows of x.

    path: the weight that the units feed, such as "layer1.weight" (default: the last one of the network). Unit j is taken out by setting the
    weights that leave it to zero; what that changes by the same amount at every row is left out, a bias can do it.
    """
    key, x = as_key(key), jax.tree.map(jnp.asarray, fit._inputs(x))
    functions = _functions.draw(key, fit, num_samples, ordered=True)
    model = fit.model
    if not functions.drawn or not hasattr(model, "network"):
        got = f"{type(model).__name__} with {type(fit.posterior).__name__}"
        raise ModelError(message("There are no hidden units to take out.", got, "draws of the weights of an al.BNN", "fit a network"))
    template = jax.eval_shape(model.weights, _tree.take(functions.given, 0))
    found = [s for s in sites.find(model.apply, template, rows_of(signature(x))).sites if not s.first and len(s.leaf_axes) == 1]
    known = {s.path: s for s in found}
    if not known or (path is not None and path not in known):
        raise ModelError(
            message("There is no such layer of units.", path, f"one of {list(known)}", "pass the path of a weight that hidden units feed")
        )
    site = known[path] if path is not None else found[-1]
    values = _contributions(model, _tree.paths(template).index(site.path), site.leaf_axes[0])(functions.given, x)
    return Units(site.path, np.asarray(values, np.float64), float(threshold), functions.num_chains)


@cached
def _contributions(model: Any, leaf: int, axis: int) -> Callable:
    """(params (S, …), x) → (S, m)."""

    def one(params: Any, x: Any) -> Array:
        weights, extra = model.weights(params), model.extra(params)
        leaves, structure = jax.tree.flatten(weights)
        number = leaves[leaf].shape[axis]
        f = model.apply(weights, x, None)
        mean = model.likelihood.mean(f, extra)
        noise = jnp.sqrt(jnp.mean(model.likelihood.variance(f, extra)))

        def without(j: Array) -> Array:
            mask = (jnp.arange(number) != j).reshape([-1 if i == axis else 1 for i in range(leaves[leaf].ndim)])
            cut = [value * mask.astype(value.dtype) if i == leaf else value for i, value in enumerate(leaves)]
            change = mean - model.likelihood.mean(model.apply(jax.tree.unflatten(structure, cut), x, None), extra)
            return jnp.sqrt(jnp.mean((change - jnp.mean(change, axis=0)) ** 2))

        return jax.lax.map(without, jnp.arange(number)) / noise

    return jax.jit(lambda given, x: jax.lax.map(lambda params: one(params, x), given))
