"""How far each method's predictions are from the posterior's own, on small networks where that can be sampled.

    python benchmarks/fidelity.py --data DIR --oracles DIR [--sets yacht boston energy] [--methods map ensemble …] [--budget 600]
        [--out benchmarks/results/fidelity.json]

DIR (or the environment variable ALEATOR_DATA) holds uci/NAME.npz. The model is a ReLU network with 50 hidden units, weights N(0, 1/fan-in),
noise learned under log σ ~ N(0, 1.5²); data are the training rows of Gal's first split, standardised. `al.oracle` samples its posterior
(`--budget` seconds) and is kept under --oracles; `al.fidelity` then compares predictions at the test rows. All distances are in standardised
units of y; the last row of a set is what the oracle's own halves show. Finished (set, method) pairs are kept in the JSON file and skipped when
the script is run again. PBP has priors of its own and so another posterior; its distance includes that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator import datasets

SETS = ("yacht", "boston", "energy")
FIELDS = {"agreement": "↑", "total_variation": "↓", "wasserstein": "↓", "log_predictive": "↓"}
STRUCTURES = ("full", "kron", "ekfac", "diag", "lowrank")
SEARCH = al.MAP(num_steps=3000)


def network(num_features: int) -> al.BNN:
    return al.BNN(al.networks.MLP(num_features, (50,), 1), al.Gaussian(), al.Normal(1.0, scaling="fan_in"))


def plain(method: Any) -> Callable:
    return lambda key, model, rows, mode: al.fit(key, model, rows, method, progress=False)


def laplace(structure: str, linear: bool, tune: str = "none") -> Callable:
    def run(key: int, model: al.BNN, rows: tuple, mode: Any) -> al.Fit:
        method = al.Laplace(structure, predictive="linearised" if linear else "sampled", tune=tune, tune_noise=tune != "none")
        return al.fit(key, model, rows, method, init=mode(), progress=False)

    return run


def own_noise(method: Any) -> Callable:
    """A method with priors of its own."""
    return lambda key, model, rows, mode: al.fit(key, al.BNN(model.network, al.Gaussian()), rows, method, progress=False)


SWAG = al.SWAG(num_steps=4000, num_warmup=3000)
METHODS: dict[str, tuple[str, Callable]] = {
    "map": ("MAP", lambda key, model, rows, mode: mode()),
    "ensemble": ("deep ensemble of 10", plain(al.Ensemble(SEARCH, 10))),
    "bootstrap": ("bootstrap ensemble of 10", plain(al.Ensemble(SEARCH, 10, bootstrap=True))),
    "bayesian_bootstrap": ("Bayesian bootstrap of 10", plain(al.BayesianBootstrap(SEARCH, 10))),
    "mean_field": ("mean-field variational", plain(al.Variational(num_steps=5000, num_evidence=8))),
    "dropout": ("MC dropout, p = 0.05", plain(al.Dropout(0.05, num_steps=3000, num_evidence=0))),
    **{f"laplace_{s}": (f"Laplace {s}, linearised", laplace(s, True)) for s in STRUCTURES},
    **{f"laplace_{s}_sampled": (f"Laplace {s}, sampled", laplace(s, False)) for s in STRUCTURES},
    "laplace_full_tuned": ("Laplace full, linearised, tuned by layer", laplace("full", True, "layer")),
    "swag": ("SWAG", plain(SWAG)),
    "multi_swag": ("multi-SWAG of 5", plain(al.Ensemble(SWAG, 5))),
    "pbp": ("PBP (its own priors)", own_noise(al.PBP(num_epochs=40))),
    "sgld": ("SGLD", plain(al.SGLD(num_samples=500, thin=20, num_warmup=2000))),
    "psgld": ("SGLD, preconditioned", plain(al.SGLD(step_size=1e-4, num_samples=500, thin=20, num_warmup=2000, preconditioner="rmsprop"))),
    "sghmc": ("SGHMC", plain(al.SGHMC(num_samples=500, thin=20, num_warmup=2000))),
    "cyclical": ("SGHMC, 5 cycles", plain(al.SGHMC(num_samples=500, thin=20, num_warmup=2000, cycles=5))),
    "svgd": ("SVGD, 20 particles", plain(al.SVGD(20, num_steps=3000))),
    "repulsive": ("repulsive ensemble of 10", plain(al.RepulsiveEnsemble(10, num_steps=3000))),
    "refined": ("refined (VIS), 5 steps", plain(al.Refined(num_steps=1500, num_start=1500))),
}


def problem(name: str, data: Path) -> tuple[tuple, np.ndarray, np.ndarray]:
    """((x, y) of the training rows, x and y of the test rows), standardised by the former."""
    held = datasets.load(f"uci/{name}", data)
    train, test = held["train_idx"][0], held["test_idx"][0]
    scale_x, scale_y = al.Standardiser.fit(held["X"][train]), al.Standardiser.fit(held["y"][train])
    x, y = scale_x.apply(held["X"]).astype(np.float32), scale_y.apply(held["y"]).astype(np.float32)
    return (x[train], y[train]), x[test], y[test]


def gold(name: str, model: al.BNN, rows: tuple, folder: Path, budget: float) -> al.Fit:
    """The oracle, from its folder where it is there already."""
    path = folder / name
    if (path / "fit.json").exists():
        return al.load(path)
    fit = al.oracle(0, model, rows, budget=budget, progress=False)
    fit.save(path)
    return fit


def run_set(name: str, args: argparse.Namespace, results: dict) -> None:
    rows, x, y = problem(name, args.data)
    model = network(rows[0].shape[1])
    wanted = [method for method in args.methods if method not in results.get(name, {})]
    if not wanted:
        return
    reference = gold(name, model, rows, args.oracles, args.budget)
    found: list[al.Fit] = []

    def mode() -> al.Fit:
        """One MAP fit, shared by all that start from it."""
        if not found:
            found.append(al.fit(1, model, rows, SEARCH, progress=False))
        return found[0]

    for method in wanted:
        begin = time.process_time()
        fit = METHODS[method][1](2, model, rows, mode)
        seconds = time.process_time() - begin
        score = al.fidelity(fit, reference, x, y)
        own = results.setdefault(name, {})
        own["oracle"] = {**score.floor._asdict(), "status": reference.status}
        own[method] = {**score.distance._asdict(), "seconds": seconds}
        print(name, method, {k: round(v, 4) for k, v in own[method].items()}, flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(part, args.out)


def table(results: dict) -> str:
    lines = []
    for name, own in results.items():
        lines += [f"{name}: {own['oracle']['status']}", ""]
        lines += ["| method | " + " | ".join(f"{field.replace('_', ' ')} {sign}" for field, sign in FIELDS.items()) + " | processor s |"]
        lines += ["|---|" + "---|" * (len(FIELDS) + 1)]
        for method in sorted((m for m in own if m != "oracle"), key=lambda m: own[m]["total_variation"]):
            numbers = " | ".join(f"{own[method][field]:.3f}" for field in FIELDS)
            lines.append(f"| {METHODS[method][0]} | {numbers} | {own[method]['seconds']:.0f} |")
        lines += ["| oracle's own halves | " + " | ".join(f"{own['oracle'][field]:.3f}" for field in FIELDS) + " | |", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("ALEATOR_DATA"))
    parser.add_argument("--oracles", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each oracle")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fidelity.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.sets:
        run_set(name, args, results)
    args.out.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
