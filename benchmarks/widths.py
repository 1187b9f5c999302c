"""How many hidden units? The evidence of a tuned Laplace against held-out rows and against cross-validation.

    python benchmarks/widths.py simulated [--problems 10] [--out FILE]
    python benchmarks/widths.py uci --data DIR [--sets yacht] [--splits 3] [--folds 10] [--out FILE]

simulated: data from tanh networks of 1 to 4 units that all matter, 100 rows, noise 0.1. Widths 1 to 6 are fitted by Laplace("full") with one
prior factor a layer and the noise set by the evidence, from five starts, the best of which counts. The evidence of one mode is multiplied by the h!·2ʰ
modes that permuted and reflected units have. The rival holds out a fifth of the rows, fits the rest in the same way and takes the width with
the best log-likelihood there. A problem is won where the evidence finds the true number of units, or where its choice has a higher
log-likelihood of 2,000 new rows than the rival's choice; both chosen networks see all 100 rows.

uci: widths 5, 15, 50 on Gal's splits by the same method from one start, with one prior factor; the rival is cross-validation. Test log-likelihood in nats a row in the
data's own units, processor seconds of all fits behind each choice. Finished problems and splits are kept in the JSON file and skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator import datasets

WIDTHS, TRUE, ROWS, NOISE, STARTS = (1, 2, 3, 4, 5, 6), (1, 2, 3, 4), 100, 0.1, 5
UCI_WIDTHS = (5, 15, 50)


def network(num_features: int, width: int) -> al.BNN:
    return al.BNN(al.networks.MLP(num_features, (width,), 1, activation="tanh"), al.Gaussian(), al.Normal(1.0))


def modes(width: int) -> float:
    """log of the number of networks that are the same function: units in any order, each with or without a change of signs."""
    return math.lgamma(width + 1) + width * math.log(2.0)


def fitted(key: int, width: int, rows: tuple, starts: int = 1, tune: str = "prior", num_steps: int = 2000) -> tuple[al.Fit, float]:
    """The start with the most evidence, and the log evidence of its width."""
    method = al.Laplace("full", tune=tune, tune_noise=True, base=al.MAP(num_steps=num_steps, learning_rate=0.02))
    fits = [al.fit(100 * key + start, network(rows[0].shape[1], width), rows, method, progress=False) for start in range(starts)]
    best = max(fits, key=lambda fit: fit.log_evidence.value)
    return best, best.log_evidence.value + modes(width)


def score(fit: al.Fit, rows: tuple) -> float:
    return float(np.mean(fit.predict(0, rows[0]).log_prob(rows[1])))


def simulate(number: int) -> tuple[int, tuple, tuple]:
    """(true width, training rows, new rows): units at different places of two inputs, steep enough to be told apart."""
    rng = np.random.default_rng(number)
    width = TRUE[number % len(TRUE)]
    directions = rng.normal(size=(2, width))
    directions *= rng.uniform(1.5, 3.0, width) / np.linalg.norm(directions, axis=0)
    offsets, output = rng.uniform(-1.5, 1.5, width), rng.choice([-1.0, 1.0], width) * rng.uniform(0.7, 1.5, width)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.uniform(-2.0, 2.0, size=(n, 2)).astype(np.float32)
        return x, (np.tanh(x @ directions + offsets) @ output + NOISE * rng.normal(size=n)).astype(np.float32)

    return width, draw(ROWS), draw(2000)


def simulated(number: int) -> dict[str, Any]:
    true, rows, new = simulate(number)
    whole = {width: fitted(number, width, rows, STARTS, "layer") for width in WIDTHS}
    cut = ROWS * 4 // 5
    part, held = (rows[0][:cut], rows[1][:cut]), (rows[0][cut:], rows[1][cut:])
    validation = {width: score(fitted(number, width, part, STARTS, "layer")[0], held) for width in WIDTHS}
    by_evidence = max(WIDTHS, key=lambda width: whole[width][1])
    by_validation = max(WIDTHS, key=lambda width: validation[width])
    scores = [score(whole[width][0], new) for width in (by_evidence, by_validation)]
    return {
        "true": true,
        "evidence": by_evidence,
        "validation": by_validation,
        "log_likelihood": scores[0],
        "log_likelihood_validation": scores[1],
        "won": by_evidence == true or scores[0] > scores[1],
        "log_evidence": {width: value for width, (_, value) in whole.items()},
    }


def uci(name: str, data: Path, number: int, folds: int) -> dict[str, Any]:
    held = datasets.load(f"uci/{name}", data)
    train, test = held["train_idx"][number], held["test_idx"][number]
    scale_x, scale_y = al.Standardiser.fit(held["X"][train]), al.Standardiser.fit(held["y"][train])
    x, y = scale_x.apply(held["X"]).astype(np.float32), scale_y.apply(held["y"]).astype(np.float32)
    rows, new = (x[train], y[train]), (x[test], y[test])
    # Folds of one size, so that they share compiled steps.
    order = np.random.default_rng(number).permutation(len(train))
    each = len(train) // folds
    for width in UCI_WIDTHS:  # compiled before the clock starts
        for part in (rows, (rows[0][each:], rows[1][each:])):
            score(fitted(number, width, part)[0], new)
    clock = time.process_time()
    whole = {width: fitted(number, width, rows) for width in UCI_WIDTHS}
    cost = time.process_time() - clock
    clock = time.process_time()
    across = {}
    for width in UCI_WIDTHS:
        scores = []
        for fold in range(folds):
            out = order[fold * each : (fold + 1) * each]
            keep = np.setdiff1d(order, out)
            scores.append(score(fitted(number, width, (rows[0][keep], rows[1][keep]))[0], (rows[0][out], rows[1][out])))
        across[width] = float(np.mean(scores))
    chosen = [max(UCI_WIDTHS, key=lambda width: table[width]) for table in ({w: v for w, (_, v) in whole.items()}, across)]
    units = math.log(float(np.ravel(scale_y.scale)[0]))
    return {
        "evidence": chosen[0],
        "cross_validation": chosen[1],
        "log_likelihood": score(whole[chosen[0]][0], new) - units,
        "log_likelihood_cross_validation": score(whole[chosen[1]][0], new) - units,
        "seconds": cost,
        "seconds_cross_validation": time.process_time() - clock,
    }


def summary(results: dict[str, dict]) -> str:
    problems = [r for name, r in results.items() if name.startswith("simulated")]
    lines = []
    if problems:
        found = sum(r["evidence"] == r["true"] for r in problems), sum(r["validation"] == r["true"] for r in problems)
        lines.append(f"{sum(r['won'] for r in problems)} of {len(problems)} simulated problems won (bar: 8 of 10);")
        lines.append(f"true number of units found by the evidence {found[0]}, by held-out rows {found[1]} times")
    for name in sorted({name.split("/")[0] for name in results if not name.startswith("simulated")}):
        own = [r for key, r in results.items() if key.startswith(f"{name}/")]
        gain = np.array([r["log_likelihood"] - r["log_likelihood_cross_validation"] for r in own])
        error = gain.std(ddof=1) / math.sqrt(len(own)) if len(own) > 1 else float("nan")
        cost = sum(r["seconds_cross_validation"] for r in own) / sum(r["seconds"] for r in own)
        lines.append(
            f"{name}: evidence less cross-validation {gain.mean():+.3f} ± {error:.3f} nats a row over {len(own)} splits (bar: −0.02),"
        )
        lines.append(f"at 1/{cost:.1f} of its cost (bar: 1/5)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulated", "uci"])
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--data", type=Path, default=os.environ.get("ALEATOR_DATA"))
    parser.add_argument("--sets", nargs="+", default=["yacht"])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "widths.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    jobs: list[tuple[str, Any]]
    if args.what == "simulated":
        jobs = [(f"simulated/{number}", lambda number=number: simulated(number)) for number in range(args.problems)]
    else:
        jobs = [
            (f"{name}/{number}", lambda name=name, number=number: uci(name, args.data, number, args.folds))
            for name in args.sets
            for number in range(args.splits)
        ]
    for name, job in jobs:
        if name not in results:
            results[name] = job()
            print(name, results[name], flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            part = args.out.with_suffix(".part")
            part.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(part, args.out)
    print(summary(results))


if __name__ == "__main__":
    main()
