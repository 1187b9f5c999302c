"""Velocities of 82 galaxies: how many components, by three roads.

    python benchmarks/galaxies.py --data DIR [--most 8] [--samples 4000] [--picture FILE] [--json FILE]

Gaussian components with the default prior, the same for every number of them; velocities in 1,000 km/s. A uniform prior on the number K gives
p(K | y) ∝ K!·exp(bound) by coordinate ascent, whose bound sits on one of K! mirror images (an approximation: a bound is no evidence). A
Dirichlet process truncated at 15 gives the number of components in use at each draw, by coordinate ascent and by collapsed Gibbs sampling.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

import aleator as al
from aleator import datasets
from aleator.latent import Mixture, Sticks, log_prob, parts

TRUNCATION = 15


def by_bound(y: np.ndarray, most: int) -> dict[int, float]:
    """p(K | y), K = 1 … most."""
    logs = {k: al.fit(0, Mixture(k), y, al.CAVI(num_restarts=10)).log_evidence.value + math.lgamma(k + 1) for k in range(1, most + 1)}
    level = max(logs.values())
    total = sum(math.exp(value - level) for value in logs.values())
    return {k: math.exp(value - level) / total for k, value in logs.items()}


def in_use(key: int, fit: Any, y: np.ndarray, num_samples: int) -> np.ndarray:
    """How many components own a row, at posterior draws of parameters and labels; (num_samples,)."""
    key_params, key_labels = jax.random.split(jax.random.key(key))
    params = fit.sample(key_params, num_samples)
    with jax.enable_x64(True):

        def labels(params: Any, key: Any) -> Any:
            return jax.random.categorical(key, jax.numpy.log(fit.model.responsibilities(params, y[:, None])))

        drawn = np.asarray(jax.jit(jax.vmap(labels))(params, jax.random.split(key_labels, num_samples)))
    return np.array([len(np.unique(row)) for row in drawn])


def shares(numbers: np.ndarray) -> dict[int, float]:
    values, counts = np.unique(numbers, return_counts=True)
    return {int(v): float(c) / len(numbers) for v, c in zip(values, counts, strict=True)}


def draw(path: Path, y: np.ndarray, fit: Any) -> None:
    """The histogram beside the posterior mean density of the Dirichlet-process mixture."""
    import matplotlib.pyplot as plt

    grid = np.linspace(5.0, 38.0, 400)
    figure, axis = plt.subplots(figsize=(7, 3.2))
    axis.hist(y, bins=40, density=True, color="0.8", label="82 galaxies")
    axis.plot(grid, np.exp(log_prob(0, fit, grid)), color="C0", label="posterior mean density")
    axis.set_xlabel("velocity, 1,000 km/s")
    axis.set_ylabel("density")
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    y = np.asarray(datasets.load("small/regression_1d", args.data)["galaxies82_kms"], float) / 1000.0
    process = Mixture(TRUNCATION, parts.Gaussian(), Sticks(1.0))
    cavi = al.fit(0, process, y, al.CAVI(num_restarts=10))
    gibbs = al.fit(1, process, y, al.Gibbs(num_samples=args.samples, num_warmup=args.samples // 2, collapsed=True))
    results = {
        "K by bound": by_bound(y, args.most),
        "in use, process by coordinate ascent": shares(in_use(2, cavi, y, 1000)),
        "in use, process by Gibbs": shares(in_use(3, gibbs, y, 1000)),
        "Gibbs": gibbs.status,
    }
    for name, value in results.items():
        print(f"{name:38}", value if isinstance(value, str) else "  ".join(f"{k}: {p:.3f}" for k, p in value.items() if p > 0.0005))
    if args.picture is not None:
        draw(args.picture, y, gibbs)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
