"""Gaussian processes: exact ones on Gal's UCI splits, and what a step costs beside scikit-learn (and GPyTorch, where it is installed).

    python benchmarks/gp.py uci --data DIR [--sets yacht boston] [--splits 20] [--out benchmarks/results/gp.json]
    python benchmarks/gp.py speed

DIR (or the environment variable ALEATOR_DATA) holds uci/NAME.npz. uci: an ARD kernel, the better of two (RBF, Matérn 3/2) by evidence on each split's training rows,
hyper-parameters by maximum evidence; log-likelihood in nats per test row in the data's own units. Splits of a set have equal shapes and share one compiled
step. Finished splits are kept in the JSON file and skipped when the script is run again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets, gp

KERNELS = {"rbf": gp.RBF(), "matern32": gp.Matern32()}
FLOOR = {"boston": -2.37, "energy": -0.34, "yacht": -0.20}  # what an exact GP of sixty lines reaches


def run_split(data: dict, number: int) -> dict:
    """Fit both kernels to the training rows of one split, score the better one on its test rows."""
    x, y = data["X"], data["y"]
    train, test = data["train_idx"][number], data["test_idx"][number]
    scale_x, scale_y = al.Standardiser.fit(x[train]), al.Standardiser.fit(y[train])
    began = time.process_time()
    fits = {}
    for name, kernel in KERNELS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", al.HealthWarning)
            fits[name] = al.fit(number, gp.GP(kernel), (scale_x.apply(x[train]), scale_y.apply(y[train])), gp.Evidence(num_restarts=2))
    best = max(fits, key=lambda name: fits[name].log_evidence.value)
    predictive = fits[best].predict(0, scale_x.apply(x[test]))
    log_likelihood = float(np.mean(predictive.log_prob(scale_y.apply(y[test])))) - float(np.log(scale_y.scale[0]))
    rmse = float(np.sqrt(np.mean((scale_y.invert(predictive.mean[:, None])[:, 0] - y[test]) ** 2)))
    return {"log_likelihood": log_likelihood, "rmse": rmse, "kernel": best, "seconds": time.process_time() - began}


def uci(args: argparse.Namespace) -> None:
    out = Path(args.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in args.sets:
        data = datasets.load(f"uci/{name}", args.data)
        done = results.setdefault(name, {})
        for number in range(min(args.splits, len(data["train_idx"]))):
            if str(number) not in done:
                done[str(number)] = run_split(data, number)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1))
        rows = list(done.values())
        score = np.array([row["log_likelihood"] for row in rows])
        error = score.std(ddof=1) / len(score) ** 0.5 if len(score) > 1 else np.nan
        rmse, seconds = np.mean([row["rmse"] for row in rows]), sum(row["seconds"] for row in rows)
        print(
            f"{name:8} {len(rows)} splits: LL {score.mean():.3f} ± {error:.3f} (floor {FLOOR.get(name)}), RMSE {rmse:.3f}, {seconds:.0f} s"
        )


def timed(call: Callable[[], object], repeats: int = 5) -> float:
    """The median seconds of a call, after one that may compile."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def speed(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 8))
    y = np.sin(x[:, 0]) + 0.1 * rng.standard_normal(2000)
    with jax.enable_x64(True):
        model = gp.GP(gp.RBF(), gp.Zero()).bind(x, y[:, None])
        params = model.start(jax.random.key(0))
        ours = jax.jit(jax.value_and_grad(model.log_evidence))
        on = jnp.asarray(x), jnp.asarray(y[:, None])
        print(f"exact, N=2000, D=8, evidence and gradient: {timed(lambda: ours(params, *on)):.3f} s")
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    theirs = GaussianProcessRegressor(ConstantKernel(1.0) * RBF(np.ones(8)) + WhiteKernel(0.1), alpha=0.0, optimizer=None).fit(x, y)
    theta = theirs.kernel_.theta
    print(f"  scikit-learn: {timed(lambda: theirs.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False), 3):.3f} s")
    x, y = rng.standard_normal((10_000, 8)), rng.standard_normal(10_000)
    sparse = gp.SparseGP(gp.RBF(), 128).bind(x, y[:, None])
    for batch in (256, 1024):
        runs = [al.fit(0, sparse, (x, y), gp.SVGP(num_steps=steps, batch_size=batch)).manifest["seconds"] for steps in (20, 20, 320)]
        print(f"SVGP, N=10000, M=128, batch {batch}: {1e3 * (runs[2] - runs[1]) / 300:.2f} ms a step")
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    began = time.perf_counter()
    gp.matrix(gp.wide.NNGP(5, weight=2**0.5, bias=0.1), {}, unit)
    print(f"NNGP, depth 5, 10000 × 10000: {time.perf_counter() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("uci", "speed"))
    parser.add_argument("--data")
    parser.add_argument("--sets", nargs="+", default=["yacht", "boston", "energy"])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--out", default="benchmarks/results/gp.json")
    args = parser.parse_args()
    {"uci": uci, "speed": speed}[args.what](args)


if __name__ == "__main__":
    main()
