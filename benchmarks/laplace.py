"""Laplace approximations beside laplace-torch: time to fit, predict and tune, peak memory; and whether both find the same numbers.

    python benchmarks/laplace.py [--torch-python PATH] [--networks mlp lenet] [--cases last_layer/full all/kron] [--rows 10000]
        [--repeats 3] [--one-core] [--check] [--json FILE]

mlp: 784-300-100-10; lenet: LeNet-5 with ReLU and max pooling. 10 classes, synthetic images (class means in noise). Both libraries get the
same data and the same trained weights. fit: curvature and its factorisation at those weights; predict: linearised (GLM), probit link, 10,000
rows; tune: 100 gradient steps on one prior precision. Each library and case runs in a process of its own on two threads, ours and theirs in
turn. The first call of each (compilation, lazy imports) is reported apart from the median of the later ones; peak memory is the process's
largest resident set after fits and predictions less what it was before the first fit (library imported and its backend started, data loaded). --one-core pins both to one core and counts processor seconds,
which other jobs on the machine hardly move.

--check compares diagonal, Kronecker factors, dense curvature of the last layer and predictive variances of the two libraries.
laplace-torch lives in an environment of its own: pip install laplace-torch, and pass its interpreter. Without one, only ours is run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH, FEW = 100, 128, 200  # tuning steps; the peer's rows a batch, and rows it predicts with all weights: the time is scaled
BARS = {"fit": 5.0, "predict": 10.0, "tune": 20.0}

PEER = """
import json, os, resource, sys, time
cores = len(os.sched_getaffinity(0)); clock = time.process_time if cores == 1 else time.perf_counter
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from laplace import Laplace
torch.set_num_threads(min(cores, 2)); torch.manual_seed(0)
network, subset, structure, file, repeats, steps, batch, few, out = sys.argv[1:]
repeats, steps, batch, few = int(repeats), int(steps), int(batch), int(few)
held = np.load(file)
x, y = torch.tensor(held["x"]), torch.tensor(held["y"]).long()
dense = lambda sizes: [m for i, o in zip(sizes[:-1], sizes[1:]) for m in (nn.Linear(i, o), nn.ReLU())][:-1]
if network == "mlp": net = nn.Sequential(*dense([784, 300, 100, 10]))
else: net = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *dense([400, 120, 84, 10]))
with torch.no_grad():
    for number, leaf in enumerate(net.parameters()): leaf.copy_(torch.tensor(held[f"w{number}"]))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def timed(call):
    begin = clock(); value = call(); return clock() - begin, value
def fitted(subset=subset, structure=structure, data=None, rows=batch):
    la = Laplace(net, "classification", subset_of_weights=subset, hessian_structure=structure, prior_precision=1.0)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=rows)); return la
if out != "-":
    found = {}
    diag = fitted("all", "diag", rows=20); found["diag"] = diag.H.detach().numpy()
    last = fitted("last_layer", "full"); found["last"] = last.H.detach().numpy()
    kron = fitted("all", "kron")
    for number, parts in enumerate(kron.H_facs.kfacs):
        for side, part in enumerate(parts): found[f"kron{number}_{side}"] = part.detach().numpy()
    for name, la in (("diag", diag), ("last", last), ("kron", kron)):
        mean, variance = la._glm_predictive_distribution(x[:20])
        found[f"{name}_mean"], found[f"{name}_variance"] = mean.detach().numpy(), variance.detach().numpy()
        found[f"{name}_probs"] = la(x[:20], pred_type="glm", link_approx="probit").detach().numpy()
        found[f"{name}_evidence"] = la.log_marginal_likelihood().detach().numpy()
    np.savez(out, **found); sys.exit()
base = peak(); times = {"fit": [], "tune": [], "predict": []}
for _ in range(repeats):
    seconds, la = timed(fitted); times["fit"].append(seconds)
    if seconds > 60: break
def tune():
    log = torch.zeros(1, requires_grad=True); optimizer = torch.optim.Adam([log], 0.1); number = min(steps, 20) if subset == "all" else steps
    for _ in range(number): optimizer.zero_grad(); (-la.log_marginal_likelihood(log.exp())).backward(); optimizer.step()
    return number
def predict():
    number = min(len(x), few) if subset == "all" else len(x)
    with torch.no_grad():
        for first in range(0, number, 100): la(x[first:first + 100], pred_type="glm", link_approx="probit")
    return number
for _ in range(max(repeats, 2)):
    begin = clock(); number = tune(); times["tune"].append((clock() - begin) * steps / number)
la.prior_precision = 1.0
for _ in range(2 if subset == "all" else max(repeats, 2)):
    begin = clock(); number = predict(); times["predict"].append((clock() - begin) * len(x) / number)
print(json.dumps({"times": times, "base": base, "peak": peak()}))
"""


# ---- the problem, the same for both -----------------------------------------------------------------------------------------------------


def images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, 784) and labels: means of the classes in unit noise, learnable but not trivial."""
    rng = np.random.default_rng(0)
    means = np.random.default_rng(123).normal(size=(10, 784)).astype(np.float32)
    y = rng.integers(0, 10, size=rows)
    return 0.15 * means[y] + rng.standard_normal((rows, 784), dtype=np.float32), y


def model_of(network: str) -> Any:
    import aleator as al

    net = al.networks.MLP(784, (300, 100), 10) if network == "mlp" else al.networks.LeNet5()
    return al.BNN(net, al.Categorical(10), al.Normal(1.0))


def as_ours(network: str, x: np.ndarray) -> np.ndarray:
    return x if network == "mlp" else x.reshape(-1, 28, 28, 1)


def as_theirs(network: str, params: dict) -> list[np.ndarray]:
    """Our weights in PyTorch's order and layout: (outputs, inputs) and (outputs, channels, height, width); LeNet's first dense layer reads
    pixels by channel and not channels by pixel."""
    leaves = []
    for name, layer in params.items():
        weight = np.asarray(layer["weight"])
        if weight.ndim == 4:
            weight = weight.transpose(3, 2, 0, 1)
        elif network == "lenet" and name == "dense1":
            weight = weight.reshape(5, 5, 16, -1).transpose(3, 2, 0, 1).reshape(-1, 400)
        else:
            weight = weight.T
        leaves += [np.ascontiguousarray(weight), np.asarray(layer["bias"])]
    return leaves


def prepare(network: str, rows: int, file: Path) -> None:
    """Train for 60 steps and write data and weights, for both libraries."""
    import aleator as al

    x, y = images(rows)
    fit = al.fit(0, model_of(network), (as_ours(network, x), y), al.MAP(num_steps=60, batch_size=BATCH, learning_rate=1e-3), progress=False)
    params = fit.posterior.params["network"]
    shaped = x if network == "mlp" else x.reshape(-1, 1, 28, 28)
    np.savez(file, x=shaped, y=y, **{f"w{i}": leaf for i, leaf in enumerate(as_theirs(network, params))})
    np.savez(file.with_suffix(".ours.npz"), **{f"{layer}/{name}": leaf for layer, part in params.items() for name, leaf in part.items()})


def load(network: str, file: Path) -> tuple[np.ndarray, np.ndarray, dict]:
    """(x, y, parameters) for ours."""
    held, flat = np.load(file), np.load(file.with_suffix(".ours.npz"))
    params: dict = {}
    for path in flat.files:
        layer, name = path.split("/")
        params.setdefault(layer, {})[name] = flat[path]
    return as_ours(network, held["x"].reshape(-1, 784)), held["y"], {"network": params, "likelihood": {}, "prior": {}}


# ---- one case in a process of its own ---------------------------------------------------------------------------------------------------


def peak() -> float:
    """The largest resident set so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(network: str, subset: str, structure: str, file: Path, repeats: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import aleator as al

    x, y, params = load(network, file)
    model = model_of(network)
    plain = al.Laplace(structure, subset=subset, link="probit")
    tuned = al.Laplace(structure, subset=subset, link="probit", tune="prior", num_tune_steps=STEPS)
    times: dict[str, list[float]] = {"fit": [], "fit and tune": [], "predict": []}

    clock = time.process_time if len(os.sched_getaffinity(0)) == 1 else time.perf_counter

    def timed(name: str, call: Any) -> Any:
        begin = clock()
        value = call()
        times[name].append(clock() - begin)
        return value

    jax.block_until_ready(jnp.ones(2) + 1.0)  # the backend starts here, and PyTorch's when it is imported
    base = peak()
    for _ in range(repeats + 1):
        fit = timed("fit", lambda: al.fit(0, model, (x, y), plain, init=params, progress=False))
    for _ in range(repeats + 1):
        timed("predict", lambda: fit.predict(1, x).probs)
    largest = peak()  # before the other method, with tuning, is compiled as well
    for _ in range(repeats + 1):
        timed("fit and tune", lambda: al.fit(0, model, (x, y), tuned, init=params, progress=False))
    times["tune"] = [max(a - statistics.median(times["fit"][1:]), 1e-3) for a in times["fit and tune"]]
    return {"times": times, "base": base, "peak": largest}


def in_process(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def peer(python: str, network: str, subset: str, structure: str, file: Path, repeats: int, out: str = "-") -> list[str]:
    return [python, "-c", PEER, network, subset, structure, str(file), str(repeats), str(STEPS), str(BATCH), str(FEW), out]


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Later calls (median), first calls, and MB beyond the start. A call that took minutes was made once, and stands for both."""
    later = {name: statistics.median(values[1:] or values) for name, values in result["times"].items()}
    first = {f"first {name}": values[0] for name, values in result["times"].items()}
    return later | first | {"MB": result["peak"] - result["base"], "total MB": result["peak"]}


# ---- the same numbers? --------------------------------------------------------------------------------------------------------------------


def compare(network: str, file: Path, theirs: dict[str, np.ndarray]) -> list[tuple[str, float, float]]:
    """(quantity, largest difference, largest value) of ours against laplace-torch's, in double precision.

    laplace-torch gives the bias of a layer a block of its own, Σ ggᵀ, next to (Σ aaᵀ/N) ⊗ Σ ggᵀ of the weight; we give both one Kronecker
    product whose input factor has a row for the constant 1, so that they covary. Its factors are brought to ours by setting that covariance
    to zero ("no bias covariance"); the rows without it are what ours predicts by default. Both expand shared weights: each position of a
    convolution counts as a row, and the input factor is divided by rows and positions.
    """
    import jax
    import jax.numpy as jnp

    import aleator as al
    from aleator import _tree, curvature
    from aleator.linalg import Blocks, KroneckerEigen
    from aleator.model import signature

    x, y, params = load(network, file)
    bound = model_of(network).bind(x, y)
    rows: list[tuple[str, float, float]] = []

    def note(name: str, a: Any, b: Any) -> None:
        rows.append((name, float(np.max(np.abs(np.asarray(a) - np.asarray(b)))), float(np.max(np.abs(np.asarray(b))))))

    with jax.enable_x64(True):
        x, weights = x.astype(np.float64), _tree.as_float64(params["network"])
        batch = al.Data(x, bound.likelihood.encode(y)).batch()
        plan = curvature.layout(bound, signature(x), None)
        extra: dict = {}
        # Where each of our weights is in PyTorch's vector: our numbers, sent along the way the weights take to its layout.
        number = jax.tree.unflatten(jax.tree.structure(weights), _numbered(weights))
        theirs_from_ours = np.concatenate([leaf.ravel() for leaf in as_theirs(network, number)]).astype(int)
        diagonal = np.asarray(jax.jit(lambda w, rows: curvature.diagonal(bound, w, rows, extra, plan, "ggn"))(weights, batch))
        note("diagonal of the Gauss–Newton matrix", diagonal[theirs_from_ours], theirs["diag"])
        factors = jax.jit(lambda w, rows: curvature.factors(bound, w, rows, extra, plan, "ggn", False))(weights, batch)
        parts, separate = [], []
        for i, (block, a, b) in enumerate(zip(plan.blocks, factors.inputs, factors.outputs, strict=True)):
            a = np.asarray(a) / (len(x) * block.positions)
            order = _window_order(network, i, block)
            note(f"layer {i}, input factor", a[:-1, :-1][np.ix_(order, order)], theirs[f"kron{2 * i}_1"])
            note(f"layer {i}, output factor", b, theirs[f"kron{2 * i}_0"])
            note(f"layer {i}, bias", a[-1, -1] * b, theirs[f"kron{2 * i + 1}_0"])
            parts.append(_posterior(a, np.asarray(b), KroneckerEigen))
            alone = a.copy()
            alone[-1, :-1] = alone[:-1, -1] = 0.0
            separate.append(_posterior(alone, np.asarray(b), KroneckerEigen))
        few = jnp.asarray(x[:20])
        where = tuple(block.numbers.ravel() for block in plan.blocks)
        for name, operators in (("no bias covariance", separate), ("ours", parts)):
            covariance = jax.jit(lambda w, rows, op: curvature.function_covariance(bound, w, rows, plan, op))
            mean, spread = covariance(weights, few, Blocks(tuple(operators), where))
            note(f"kron: covariance of outputs, {name}", spread, theirs["kron_variance"])
        note("outputs", mean, theirs["kron_mean"])
        last = curvature.layout(bound, signature(x), curvature.choose(bound, signature(x), "last_layer"))
        dense = np.asarray(jax.jit(lambda w, rows: curvature.dense(bound, w, rows, extra, last, "ggn"))(weights, batch))
        # Ours are numbered along the leaves (bias, then weight by inputs), theirs weight by outputs, then bias.
        matrix = np.argsort(curvature.order(last)).reshape(last.blocks[0].numbers.shape)
        index = np.concatenate([matrix[:-1].T.ravel(), matrix[-1]])
        note("last layer: dense Gauss–Newton matrix", dense[np.ix_(index, index)], theirs["last"])
    for name, structure, subset in (("last", "full", "last_layer"), ("diag", "diag", "all")):
        x32, y32, start = load(network, file)
        fit = al.fit(0, model_of(network), (x32, y32), al.Laplace(structure, subset=subset, link="probit"), init=start, progress=False)
        _, spread = fit.posterior.moments(fit.model, x32[:20])
        note(f"{name}: covariance of outputs by al.fit", spread, theirs[f"{name}_variance"])
        note(f"{name}: probabilities by al.fit, probit", fit.predict(0, x32[:20]).probs, theirs[f"{name}_probs"])
    return rows


def _numbered(weights: Any) -> list[np.ndarray]:
    """The flattened leaves' own numbers, in their shapes."""
    import jax

    leaves = jax.tree.leaves(weights)
    starts = np.cumsum([0] + [leaf.size for leaf in leaves])
    return [start + np.arange(leaf.size).reshape(leaf.shape) for start, leaf in zip(starts, leaves, strict=False)]


def _window_order(network: str, layer: int, block: Any) -> np.ndarray:
    """Rows of a block in PyTorch's order of inputs: channels before places of the window or image."""
    inputs = block.numbers.shape[0] - 1
    if network == "mlp" or layer > 2:
        return np.arange(inputs)
    if layer == 2:
        return np.arange(inputs).reshape(5, 5, 16).transpose(2, 0, 1).ravel()
    # Numbers of the weight (h, w, c, out) at the first output tell which place a row is.
    first = np.argsort(np.argsort(block.numbers[:-1, 0]))
    place = np.empty(inputs, int)
    place[first] = np.arange(inputs)  # row of each (h, w, c)
    return place.reshape(5, 5, -1).transpose(2, 0, 1).ravel()


def _posterior(a: np.ndarray, b: np.ndarray, kind: Any) -> Any:
    """(a ⊗ b + I)⁻¹."""
    (left_values, left), (right_values, right) = np.linalg.eigh(a), np.linalg.eigh(b)
    values = np.maximum(left_values, 0.0)[:, None] * np.maximum(right_values, 0.0)
    return kind(left, right, 1.0 / (values + 1.0), np.ones(len(a)))


# ---- everything -------------------------------------------------------------------------------------------------------------------------------


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| case | | ours | first call | laplace-torch | first call | ÷ ours ↑ | bar |", "|---|---|---|---|---|---|---|---|"]
    for case, both in results.items():
        own, other = both["ours"], both.get("laplace-torch")
        for name, bar in BARS.items():
            right = (
                ["", "", ""] if other is None else [f"{other[name]:.3g}", f"{other[f'first {name}']:.3g}", f"{other[name] / own[name]:.1f}"]
            )
            lines.append(f"| {case} | {name}, s | {own[name]:.3g} | {own[f'first {name}']:.3g} | " + " | ".join(right) + f" | ≥ {bar:g} |")
        right = ["", ""] if other is None else [f"{other['MB']:.0f} ({other['total MB']:.0f})", f"{other['MB'] / own['MB']:.1f}"]
        lines.append(f"| {case} | peak, MB (in all) | {own['MB']:.0f} ({own['total MB']:.0f}) | | {right[0]} | | {right[-1]} | ≥ 1 |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="a Python that has laplace-torch; this one, where it has")
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet"], choices=["mlp", "lenet"])
    parser.add_argument("--cases", nargs="+", default=["last_layer/full", "all/kron"])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one-core", action="store_true", help="one core for both libraries, and processor seconds (Linux)")
    parser.add_argument("--check", action="store_true", help="compare numbers on 200 rows instead of times")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_core:  # before any process counts its cores
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if args.worker:
        network, subset, structure, file = args.worker
        if structure == "-":
            return prepare(network, args.rows, Path(file))
        print(json.dumps(ours(network, subset, structure, Path(file), args.repeats)))
        return None
    python = (
        args.torch_python or os.environ.get("ALEATOR_TORCH_PYTHON") or (sys.executable if importlib.util.find_spec("laplace") else None)
    )
    if python is None:
        print("laplace-torch was not found: pass --torch-python to compare with it.")
    here = [sys.executable, __file__, "--repeats", str(args.repeats), "--worker"]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for network in args.networks:
            file, rows = Path(directory) / f"{network}.npz", 200 if args.check else args.rows
            subprocess.run([sys.executable, __file__, "--rows", str(rows), "--worker", network, "-", "-", str(file)], check=True)
            if args.check:
                if python is None:
                    continue
                out = Path(directory) / "theirs.npz"
                subprocess.run(peer(python, network, "all", "kron", file, 1, str(out)), check=True)
                for name, difference, size in compare(network, file, dict(np.load(out))):
                    print(f"{network:6} {name:50} {difference:10.2e} of {size:.3g}")
                continue
            for case in args.cases:
                subset, structure = case.split("/")
                own = in_process([*here, network, subset, structure, str(file)])
                results[f"{network} {case}"] = {"ours": summary(own)}
                if python is not None:
                    other = in_process(peer(python, network, subset, structure, file, args.repeats))
                    results[f"{network} {case}"]["laplace-torch"] = summary(other)
                print(json.dumps({f"{network} {case}": results[f"{network} {case}"]}), flush=True)
    if results:
        print(table(results))
    if args.json and results:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
