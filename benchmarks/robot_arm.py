"""The robot arm: test error of a shallow net whose number of units is inferred by reversible jump.

    python benchmarks/robot_arm.py [--sets 5] [--units 20] [--samples 2000] [--warmup 1000] [--chains 4] [--json FILE]

Two joints, lengths 2.0 and 1.3, noise sd 0.05, 200 rows to learn from and 200 to test on; the error is the sum of the squared errors of the
two outputs, averaged over the test rows, whose floor is 2 × 0.05² = 0.005. One test set of 200 rows has a standard error of 0.00035 from
its own noise; "clean" is the error against the arm without noise, on 10,000 rows, plus 0.005: the same expectation without that noise.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator.methods.reversible_jump import ReversibleJump, units
from aleator.shallow import ShallowNet

NOISE = 0.05
FLOOR = 2 * NOISE**2


def arm(x: np.ndarray) -> np.ndarray:
    """Where the hand is, (n, 2), for the two angles x (n, 2)."""
    first, both = x[:, 0], x[:, 0] + x[:, 1]
    return np.stack([2.0 * np.cos(first) + 1.3 * np.cos(both), 2.0 * np.sin(first) + 1.3 * np.sin(both)], axis=1)


def inputs(rng: np.random.Generator, rows: int) -> np.ndarray:
    """x1 uniform on [−1.932, −0.453] ∪ [0.453, 1.932], x2 uniform on [0.534, 3.142] (MacKay's ranges)."""
    side = rng.choice([-1.0, 1.0], rows)
    return np.stack([side * rng.uniform(0.453, 1.932, rows), rng.uniform(0.534, 3.142, rows)], axis=1)


def one_set(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, x_test, x_clean = inputs(rng, 200), inputs(rng, 200), inputs(rng, 10_000)
    y, y_test = arm(x) + NOISE * rng.normal(size=(200, 2)), arm(x_test) + NOISE * rng.normal(size=(200, 2))
    method = ReversibleJump(num_samples=args.samples, num_warmup=args.warmup, num_chains=args.chains, thin=args.thin, alpha=args.alpha)
    model = ShallowNet(args.units, activation=args.activation, linear_term=True, likelihood=al.Gaussian(al.InverseGamma(1.0, 0.001)))
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(seed, model, (x, y), method)
    seconds = time.perf_counter() - began
    error = lambda rows, truth: float(np.mean(np.sum((fit.predict(0, rows).mean - truth) ** 2, axis=1)))
    return {
        "seed": seed,
        "error": error(x_test, y_test),
        "clean": error(x_clean, arm(x_clean)) + FLOOR,
        "units": units(fit).round(3).tolist(),
        "noise": float(np.mean(np.exp(fit.posterior.params["likelihood"]["log_scale"]) * np.asarray(fit.model.y_scale))),
        "seconds": seconds,
        "status": fit.status,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"sets": 5, "units": 20, "samples": 2000, "warmup": 1000, "chains": 4, "thin": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--activation", default="sin")
    parser.add_argument("--alpha", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in range(args.sets):
        rows.append(one_set(seed, args))
        print(json.dumps(rows[-1]), flush=True)
    mean = {name: float(np.mean([row[name] for row in rows])) for name in ("error", "clean", "seconds")}
    spread = float(np.std([row["error"] for row in rows], ddof=1) / np.sqrt(len(rows))) if len(rows) > 1 else float("nan")
    print(f"mean error {mean['error']:.5f} ± {spread:.5f}, clean {mean['clean']:.5f} (floor {FLOOR:.5f}), {mean['seconds']:.0f} s a set")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "mean": mean}, indent=1))


if __name__ == "__main__":
    main()
