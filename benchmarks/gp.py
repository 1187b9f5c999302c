"""Gaussian processes: exact ones on Gal's UCI splits, an infinitely wide network on MNIST, conjugate gradients beside the factor, steps beside scikit-learn
(`gp_peers.py`: beside GPyTorch).

    python benchmarks/gp.py uci --data DIR [--sets yacht boston] [--splits 20] [--out benchmarks/results/gp.json]
    python benchmarks/gp.py large --data DIR [--sets kin8nm] [--splits 1] [--model sparse|deep] [--inducing 100] [--steps 8000]
    python benchmarks/gp.py mnist --data DIR [--rows 10000]
    python benchmarks/gp.py gradients
    python benchmarks/gp.py speed

DIR (or the environment variable ALEATOR_DATA) holds uci/NAME.npz. uci: an ARD kernel, the better of two (RBF, Matérn 3/2) by evidence on each split's training rows,
hyper-parameters by maximum evidence; log-likelihood in nats per test row in the data's own units. Splits of a set have equal shapes and share one compiled
step. Where test rows have the inputs of a training row (wine: one in four), the score of the others is given too. large: for sets of many rows, the collapsed bound of a sparse process (RBF, M inducing inputs,
L-BFGS from one start) or a deep one (RBF, one inner layer as wide as x, M each, mini-batches of 256). Finished splits are kept in the JSON file and skipped when the script is run again. mnist: regression on labels with the NNGP of `depth` rectified layers,
unit-norm images, σ_w, σ_b and noise by evidence on 1,000 of the rows; the posterior probability of error is 1 − P(the class predicted has the largest f).
gradients: evidence and slopes at N=5,000 by conjugate gradients and by the factor. Times are of the processor.
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
from aleator.linalg import cholesky

KERNELS = {"rbf": gp.RBF(), "matern32": gp.Matern32()}
FLOOR = {"boston": -2.37, "energy": -0.34, "yacht": -0.20, "kin8nm": 1.30, "naval": 9.3, "protein": -2.85}  # what others reach


def run_split(data: dict, number: int, args: argparse.Namespace) -> dict:
    """Fit both kernels to the training rows of one split, score the better one on its test rows."""
    x, y = data["X"], data["y"]
    train, test = data["train_idx"][number], data["test_idx"][number]
    scale_x, scale_y = al.Standardiser.fit(x[train]), al.Standardiser.fit(y[train])
    began = time.process_time()
    fits, rows = {}, (scale_x.apply(x[train]), scale_y.apply(y[train]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        if args.what == "uci":
            for name, kernel in KERNELS.items():
                fits[name] = al.fit(number, gp.GP(kernel), rows, gp.Evidence(num_restarts=2))
        elif args.model == "sparse":
            fits["rbf"] = al.fit(
                number, gp.SparseGP(gp.RBF(), args.inducing), rows, gp.Evidence(num_restarts=1, num_steps=args.steps, tolerance=1.0)
            )
        else:
            deep, method = gp.DeepGP(gp.RBF(), (x.shape[1],), args.inducing), gp.DSVI(num_steps=args.steps, batch_size=256)
            fits["rbf"] = al.fit(number, deep, rows, method)
    best = max(fits, key=lambda name: fits[name].log_evidence.value)
    predictive = fits[best].predict(0, scale_x.apply(x[test]), num_samples=200)
    scores = np.asarray(predictive.log_prob(scale_y.apply(y[test]))) - np.log(scale_y.scale[0])
    rmse = float(np.sqrt(np.mean((scale_y.invert(predictive.mean[:, None])[:, 0] - y[test]) ** 2)))
    known = {row.tobytes() for row in x[train]}
    new = np.array([row.tobytes() not in known for row in x[test]])
    result = {"log_likelihood": float(scores.mean()), "rmse": rmse, "kernel": best, "seconds": time.process_time() - began}
    return result | ({} if new.all() else {"log_likelihood_new": float(scores[new].mean()), "share_new": float(new.mean())})


def uci(args: argparse.Namespace) -> None:
    out = Path(args.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in args.sets:
        data = datasets.load(f"uci/{name}", args.data)
        label = name if args.what == "uci" else f"{name}, {args.model}, M={args.inducing}, {args.steps} steps"
        done = results.setdefault(label, {})
        for number in range(min(args.splits, len(data["train_idx"]))):
            if str(number) not in done:
                done[str(number)] = run_split(data, number, args)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1))
        rows = list(done.values())
        mean = lambda values: (
            f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else "")
        )
        rmse, seconds = np.mean([row["rmse"] for row in rows]), sum(row["seconds"] for row in rows)
        new = [row["log_likelihood_new"] for row in rows if "log_likelihood_new" in row]
        print(
            f"{label}: {len(rows)} splits: LL {mean([row['log_likelihood'] for row in rows])} (floor {FLOOR.get(name)})"
            + (f", of rows whose inputs are new {mean(new)}" if new else "")
            + f", RMSE {rmse:.4g}, {seconds:.0f} s"
        )


def mnist(args: argparse.Namespace) -> None:
    """Ten processes with one kernel, one for each label (1 for it, 0 for others, their means taken out)."""
    from scipy.linalg import cho_solve, solve_triangular

    data, began = datasets.load("mnist", args.data), time.process_time()
    unit = lambda images: (flat := images.reshape(len(images), -1).astype(np.float64)) / np.linalg.norm(flat, axis=1, keepdims=True)
    chosen = np.random.default_rng(0).permutation(len(data["x_train"]))[: args.rows]
    x, labels, new, truth = unit(data["x_train"][chosen]), data["y_train"][chosen], unit(data["x_test"]), data["y_test"]
    y = np.eye(10)[labels]
    y, level = y - y.mean(0), y.mean(0)
    scaled = 784**0.5  # unit norm → mean square one, as the recursion's x·x′/d wants it
    few = gp.GP(gp.wide.NNGP(args.depth), gp.Zero(), al.Gaussian(al.LogNormal(-2.0, 1.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        small = al.fit(0, few, (scaled * x[:1000], y[:1000]), gp.Evidence(num_restarts=1, num_steps=60, tolerance=0.1))
    params = small.posterior.params
    noise = float(np.mean(np.exp(2 * params["likelihood"]["log_scale"])))
    print(
        {name: float(np.exp(value)) for name, value in params["kernel"].items()},
        f"noise {noise**0.5:.4f}, {time.process_time() - began:.0f} s",
        flush=True,
    )
    kernel = small.model.kernel
    matrix = gp.matrix(kernel, params["kernel"], scaled * x)
    matrix[np.diag_indices(len(x))] += noise
    lower, _ = cholesky(matrix, "covariance of the targets")
    del matrix
    weights = cho_solve((lower, True), y)
    mean, spread = np.empty((len(new), 10)), np.empty(len(new))
    with jax.enable_x64(True):
        own = np.asarray(kernel.diag(params["kernel"], jnp.asarray(scaled * new)))
    for first in range(0, len(new), 2000):
        part = slice(first, first + 2000)
        cross = gp.matrix(kernel, params["kernel"], scaled * x, scaled * new[part])
        mean[part] = cross.T @ weights + level
        spread[part] = own[part] - np.sum(solve_triangular(lower, cross, lower=True) ** 2, axis=0)
    wrong = mean.argmax(1) != truth
    doubt = probability_of_error(mean, np.sqrt(spread + noise))
    print(
        f"MNIST, NNGP depth {args.depth}, {len(x)} rows: accuracy {100 * (1 - wrong.mean()):.2f} %, AUROC of errors: posterior probability "
        f"{al.criteria.auroc(doubt, wrong).value:.4f}, variance alone {al.criteria.auroc(spread, wrong).value:.4f}; "
        f"errors promised {100 * doubt.mean():.2f} %; {time.process_time() - began:.0f} s of the processor"
    )


def probability_of_error(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """1 − P(the class with the largest mean is the largest), independent Gaussians of one spread a row: ∫ φ(t) Π Φ(t + (m* − mⱼ)/s) dt by 40 nodes."""
    from scipy.special import ndtr

    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    best = mean.argmax(1)
    gaps = (mean[np.arange(len(mean)), best][:, None] - mean) / std[:, None]
    gaps[np.arange(len(mean)), best] = np.inf
    return 1 - np.stack([np.prod(ndtr(t + gaps), axis=1) for t in nodes], axis=1) @ (weights / weights.sum())


def gradients(args: argparse.Namespace) -> None:
    """Evidence and slopes at N=5,000, D=8, with the lengths, scale and noise of a rough and of a smooth function."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (5000, 8))
    y = (np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.2 * rng.standard_normal(5000))[:, None]
    for name, kernel in KERNELS.items():
        model = gp.GP(kernel, gp.Zero()).bind(x, y)
        others = {"held": gp.Iterative(), "in blocks of 64 MB": gp.Iterative(byte_budget=2**26)}
        with jax.enable_x64(True):
            on = jnp.asarray(x), jnp.asarray(y)
            compute = lambda m: jax.jit(jax.value_and_grad(m.log_evidence))
            exact = compute(model)
            found = {who: compute(gp.GP(kernel, gp.Zero(), solver=solver).bind(x, y)) for who, solver in others.items()}
            for length, noise in ((1.0, 0.2), (3.0, 0.05)):
                params = model.start(jax.random.key(0)) | {"likelihood": {"log_scale": jnp.log(jnp.array([noise]))}}
                params["kernel"]["log_length"] = jnp.full(8, np.log(length))
                results = {}
                for who, call in {"factor": exact, **found}.items():
                    jax.block_until_ready(call(params, *on))
                    began = time.process_time()
                    value, slope = jax.block_until_ready(call(params, *on))
                    results[who] = (
                        float(value),
                        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(slope)]),
                        time.process_time() - began,
                    )
                truth = results.pop("factor")
                for who, (value, slope, seconds) in results.items():
                    apart = np.linalg.norm(slope - truth[1]) / np.linalg.norm(truth[1])
                    print(
                        f"{name}, length {length}, noise {noise}, {who}: log evidence {value:.2f}, factor {truth[0]:.2f} "
                        f"({100 * abs(value / truth[0] - 1):.3f} % apart), slopes {100 * apart:.2f} % apart; {seconds:.1f} s, factor {truth[2]:.1f} s",
                        flush=True,
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
    parser.add_argument("what", choices=("uci", "large", "mnist", "gradients", "speed"))
    parser.add_argument("--data")
    parser.add_argument("--sets", nargs="+", default=["yacht", "boston", "energy"])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--model", choices=("sparse", "deep"), default="deep")
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/results/gp.json")
    args = parser.parse_args()
    {"uci": uci, "large": uci, "mnist": mnist, "gradients": gradients, "speed": speed}[args.what](args)


if __name__ == "__main__":
    main()
