"""al.auto on UCI regression: the stack against its members and against MC dropout, split by split.

    python benchmarks/auto.py --data DIR [--sets yacht boston] [--splits 5] [--budget 10m] [--work .cache/auto] [--out benchmarks/results/auto.json]

DIR (or ALEATOR_DATA) holds uci/NAME.npz. Every split is standardised with its training statistics only; one network (50 tanh units, Gaussian noise of unknown scale) and the methods that
`al.auto` chooses for it. Test log-likelihood in nats per row, in the data's own units. Bars: at least the best single member − .01, and above the split's MC-dropout
reference. Members are all methods that came through, fitted to all training rows, those that weigh nothing too. The best is told in two ways: the method that is best on average over
a set's splits, and the one that is best on each split's test rows in hindsight, which no choice could beat. A run that is stopped goes on with the method it was at; finished splits are kept in the
JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator import datasets
from aleator._auto import default_methods

SETS = ("yacht", "boston", "energy", "wine_red", "kin8nm", "naval", "protein")


def run_split(name: str, data: dict, number: int, args: argparse.Namespace) -> dict[str, Any]:
    x, y = data["X"], data["y"]
    train, test = data["train_idx"][number], data["test_idx"][number]
    scale_x, scale_y = al.Standardiser.fit(x[train]), al.Standardiser.fit(y[train])
    model = al.BNN(al.networks.MLP(x.shape[1], (50,), 1, activation="tanh"), al.Gaussian(), al.Normal(1.0, scaling="fan_in"))
    rows, unit = (scale_x.apply(x[train]).astype(np.float32), scale_y.apply(y[train])), scale_y.scale[0]
    began = time.monotonic()

    def show(entry: Any) -> None:
        print(f"{name} {number} {entry.name}: {entry.score:.3f} held out, {entry.seconds:.0f} s {entry.note}", flush=True)

    found = al.auto(
        number,
        model,
        rows,
        args.budget,
        unit=unit,
        checkpoint=Path(args.work) / f"{name}-{number}",
        resume=True,
        progress=False,
        report=show,
    )
    seconds = time.monotonic() - began
    new, truth = scale_x.apply(x[test]).astype(np.float32), scale_y.apply(y[test])
    density = lambda fit: np.asarray(fit.predict(number, new).log_prob(truth), float) - np.log(unit)
    stack = density(found)
    each = {name: density(fit) for name, fit in found.fits.items()}
    for name in set(found.held_out) - set(each):  # what weighs nothing was not fitted to all rows
        each[name] = density(al.fit(number, model, rows, default_methods(model, al.Data(*rows))[name], progress=False))
    best = max(each, key=lambda member: each[member].mean())
    gap = stack - each[best]
    return {
        "log_likelihood": float(stack.mean()),
        "held_out": found.stacked[0],
        "held_out_members": {member: float(values.mean()) for member, values in found.held_out.items()},
        "best": best,
        "members": {member: float(values.mean()) for member, values in each.items()},
        "minus_best": [float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap)))],
        "weights": found.weights,
        "reference": float(data["ref_mcdropout_ll"][number]),
        "rmse": float(unit * np.sqrt(np.mean((np.asarray(found.predict(number, new).mean) - truth) ** 2))),
        "rmse_reference": float(data["ref_mcdropout_rmse"][number]),
        "seconds": seconds,
        "left_out": {entry.name: entry.note for entry in found.entries if not np.isfinite(entry.score)},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| set | splits | log-likelihood ↑ | best member | − best member (bar −.01) | − best in hindsight | − MC dropout, paired | RMSE ↓ | MC dropout | minutes a split | weights of the first split |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    error = lambda values: f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
    for name, splits in results.items():
        rows = list(splits.values())
        pick = lambda key: np.array([row[key] for row in rows], float)  # noqa: B023
        stack = pick("log_likelihood")
        common = set.intersection(*(set(row["members"]) for row in rows))
        member = lambda which: np.array([row["members"][which] for row in rows])  # noqa: B023
        best = max(common, key=lambda which: member(which).mean())
        hindsight = np.array([row["minus_best"][0] for row in rows])
        shares = ", ".join(f"{which} {weight:.2f}" for which, weight in rows[0]["weights"].items())
        cells = [name, len(rows), error(stack), best, error(stack - member(best)), error(hindsight), error(stack - pick("reference"))]
        cells += [f"{pick('rmse').mean():.3f}", f"{pick('rmse_reference').mean():.3f}", f"{pick('seconds').mean() / 60:.1f}", shares]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--work", default=".cache/auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/auto.json"))
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.sets:
        data = datasets.load(f"uci/{name}", args.data)
        for number in range(min(args.splits, len(data["train_idx"]))):
            if str(number) in results.get(name, {}):
                continue
            results.setdefault(name, {})[str(number)] = run_split(name, data, number, args)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1))
            print(json.dumps({name: results[name][str(number)]}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
