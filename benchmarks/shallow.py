"""MarginalGibbs beside NUTS on a shallow net: sweeps per second, and effective draws of predictions per second.

    python benchmarks/shallow.py [--draws 4000] [--nuts-draws 200] [--out benchmarks/results/shallow.json]

Ten logistic units under the hierarchical prior with its data-scaled defaults, 200 rows of 3 inputs from a four-unit net with noise 0.1.
Both samplers see the same posterior, two chains on two cores. Effective draws: median bulk ESS of the predictions at 20 test points, over
the time of warm-up and sampling; the first call (compilation) is timed apart. Also given per second of processor time, which a busy
machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import convergence
from aleator.methods.marginal_gibbs import MarginalGibbs
from aleator.methods.nuts import NUTS
from aleator.shallow import ShallowNet

N, D, UNITS, CHAINS, NOISE = 200, 3, 10, 2, 0.1


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N + 20, D))
    gamma, bias, beta = 1.5 * rng.normal(size=(4, D)), rng.normal(size=4), 2.0 * rng.normal(size=4)
    f = (1.0 / (1.0 + np.exp(-(x @ gamma.T + bias)))) @ beta
    y = (f - f.mean()) / f.std() + NOISE * rng.normal(size=N + 20)
    return x[:N], y[:N], x[N:]


def measure(method: Any) -> dict[str, float]:
    """One fit to compile, one that counts."""
    x, y, test = data()
    first = time.perf_counter()
    al.fit(0, ShallowNet(UNITS), (x, y), method)
    first = time.perf_counter() - first
    wall, processor = time.perf_counter(), time.process_time()
    fit = al.fit(1, ShallowNet(UNITS), (x, y), method)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    outputs = jax.jit(jax.vmap(lambda params: fit.model.outputs(params, jnp.asarray(test))[:, 0]))
    draws = np.asarray(outputs(jax.tree.map(jnp.asarray, fit.posterior.params))).reshape(CHAINS, method.num_samples, len(test))
    ess = convergence.ess_bulk(draws)
    steps = CHAINS * (method.num_samples * method.thin + method.num_warmup)
    return {
        "first_call": first,
        "seconds": wall,
        "processor_seconds": processor,
        "steps_per_second": steps / wall,
        "steps_per_processor_second": steps / processor,
        "rhat": float(np.max(convergence.rhat(draws))),
        "ess_median": float(np.median(ess)),
        "ess_least": float(np.min(ess)),
        "ess_per_second": float(np.median(ess) / wall),
        "ess_per_processor_second": float(np.median(ess) / processor),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--nuts-draws", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    found = {
        "MarginalGibbs": measure(MarginalGibbs(num_samples=args.draws, num_warmup=1000, num_chains=CHAINS)),
        "NUTS": measure(NUTS(num_samples=args.nuts_draws, num_warmup=args.nuts_draws, num_chains=CHAINS)),
    }
    for name, row in found.items():
        print(name, {key: float(f"{value:.4g}") for key, value in row.items()})
    ratios = {key: found["MarginalGibbs"][key] / found["NUTS"][key] for key in ("ess_per_second", "ess_per_processor_second")}
    print("ratios", {key: round(value, 1) for key, value in ratios.items()})
    per_sweep = 1.0 / found["MarginalGibbs"]["steps_per_processor_second"]
    print(f"10,000 sweeps of one chain: {1e4 * per_sweep:.1f} s of one core")
    if args.out:
        args.out.write_text(json.dumps(found | {"ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
