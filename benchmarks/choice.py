"""Every method on one small network, as `aleator fit --method NAME` sets it up: speed, fidelity, calibration and memory, for docs/choose_a_method.md.

    python benchmarks/choice.py [--methods map ensemble …] [--budget 60] [--limit 120] [--out benchmarks/results/choice.json]

Scikit-learn's diabetes table, standardised: 300 rows to fit, 142 to judge. The model is a tanh network with 20 hidden units, weights N(0, 1/fan-in), noise learned
under log σ ~ N(0, 1.5²). `al.oracle` samples its posterior for --budget seconds; fidelity is the mean total variation distance between a method's predictive
distribution of a row and the oracle's (0 … 1, ↓), whose own halves differ by `oracle`. Each method runs in a process of its own, with all programs compiled anew: processor
seconds of the fit, compilation included, and the peak of memory beyond what the process held before. One that needs more than --limit processor seconds, or another kind
of model, is told so. Finished methods are kept in the JSON file and skipped when the script is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

LEVEL = 0.9
ROWS = 300


def problem() -> tuple[tuple, np.ndarray, np.ndarray]:
    """((x, y) of the training rows, x and y of the others), standardised by the former."""
    import aleator as al
    from aleator import datasets

    x, y, _ = datasets.diabetes()
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:ROWS], order[ROWS:]
    scale_x, scale_y = al.Standardiser.fit(x[train]), al.Standardiser.fit(y[train])
    x, y = scale_x.apply(x).astype(np.float32), scale_y.apply(y).astype(np.float32)
    return (x[train], y[train]), x[test], y[test]


def network(num_features: int) -> Any:
    import aleator as al

    return al.BNN(al.networks.MLP(num_features, (20,), 1, "tanh"), al.Gaussian(), al.Normal(1.0, scaling="fan_in"))


def memory(what: str) -> float:
    """Resident memory of this process in MB, as Linux tells it: VmRSS now (which starts the search for a peak anew), VmHWM at most since then."""
    if what == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / 1e6


def one(name: str, oracle: Path) -> dict[str, Any]:
    """What is told of one method, measured in this process."""
    import aleator as al
    from aleator import defaults

    warnings.simplefilter("ignore", al.HealthWarning)
    rows, x, y = problem()
    model, reference = network(x.shape[1]), al.load(oracle)
    held, began = memory("VmRSS"), time.process_time()
    try:
        fit = al.fit(1, model, rows, defaults.method(name, [], ROWS), progress=False)
    except al.AleatorError as error:
        return {"refused": str(error).partition(" Got:")[0]}
    seconds, peak = time.process_time() - began, memory("VmHWM")
    predicted = fit.predict(2, x)
    lower, upper = predicted.interval(LEVEL)
    score = predicted.log_prob(y)
    return {
        "rows": len(y),
        "seconds": seconds,
        "megabytes": peak - held,
        "total_variation": al.fidelity(fit, reference, x, y).distance.total_variation,
        "coverage": float(np.mean((y >= lower) & (y <= upper))),
        "log_score": [float(score.mean()), float(score.std(ddof=1) / np.sqrt(len(y)))],
        "status": fit.status,
    }


def apart(name: str, oracle: Path, limit: int) -> dict[str, Any]:
    """`one` in a process that may use `limit` processor seconds."""
    words = [sys.executable, __file__, "--one", name, "--oracle", str(oracle), "--limit", str(limit)]
    ended = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""},
    )
    if ended.returncode == 0:
        return json.loads(ended.stdout.splitlines()[-1])
    if ended.returncode < 0:
        return {"refused": f"More than {limit} processor seconds."}
    raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the oracle")
    parser.add_argument("--limit", type=int, default=120, help="processor seconds for a method")
    parser.add_argument("--oracle", type=Path, help="where the oracle is, or is to be kept")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "choice.json")
    args = parser.parse_args()
    if args.one:
        resource.setrlimit(resource.RLIMIT_CPU, (args.limit, args.limit))
        print(json.dumps(one(args.one, args.oracle)))
        return
    import aleator as al

    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        oracle = args.oracle or Path(place) / "oracle"
        if not oracle.exists():
            rows, x, y = problem()
            reference = al.oracle(0, network(x.shape[1]), rows, budget=args.budget, progress=False)
            reference.save(oracle)
        if "oracle" not in results:
            _, x, y = problem()
            reference = al.load(oracle)
            results["oracle"] = {
                "total_variation": al.fidelity(reference, reference, x, y).floor.total_variation,
                "status": reference.status,
            }
            print("oracle", results["oracle"], flush=True)
        for name in args.methods or al.METHODS:
            if name in results:
                continue
            results[name] = apart(name, oracle, args.limit)
            print(name, results[name], flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
