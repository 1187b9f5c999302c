"""Mean-field steps and MC dropout predictions against peers, and the noise of gradient estimators: ratios measured in one run.

    python benchmarks/variational.py [--torch-python PATH] [--data DIR] [--steps 300] [--repeats 5] [--json FILE]

MLP 784-300-100-10, batch 128. Speed uses random images; the variance of gradients uses MNIST where there is --data (or ALEATOR_DATA), and
random images otherwise. Arms are interleaved and medians reported, because the machines are noisy. --torch-python: an interpreter with
torch and bayesian-torch, for those two peers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets
from aleator.methods import variational
from aleator.methods._plan import make_plan
from aleator.model import signature
from aleator.target import Target

SIZES, BATCH, ROWS = (784, 300, 100, 10), 128, 10_000
PASSES = 100

TORCH = """
import sys, time, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0); torch.set_num_threads({threads})
S, N, B = (784, 300, 100, 10), 10000, 128
x, y = torch.randn(N, 784), torch.randint(0, 10, (N,))
which = sys.argv[1]
if which == "dropout":
    net = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Dropout(.5), nn.Linear(300, 100), nn.ReLU(), nn.Dropout(.5), nn.Linear(100, 10)).train()
    with torch.no_grad():
        net(x); begin = time.perf_counter()
        for _ in range(10): F.softmax(net(x), -1)
    print((time.perf_counter() - begin) * 10); sys.exit()
from bayesian_torch.layers import LinearReparameterization as Layer
class Net(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.ModuleList(Layer(a, b) for a, b in zip(S[:-1], S[1:]))
    def forward(self, h):
        total = 0
        for i, layer in enumerate(self.l):
            h, kl = layer(h); total = total + kl
            if i < 2: h = F.relu(h)
        return h, total
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
def step(i):
    rows = torch.randint(0, N, (B,)); opt.zero_grad(); out, kl = net(x[rows])
    (F.cross_entropy(out, y[rows]) + kl / N).backward(); opt.step()
for i in range(5): step(i)
begin = time.perf_counter()
for i in range(60): step(i)
print(60 / (time.perf_counter() - begin))
"""


def images(data: str | None) -> tuple[np.ndarray, np.ndarray]:
    if data is not None or "ALEATOR_DATA" in os.environ:
        found = datasets.load("mnist", data)
        return (found["x_train"][:ROWS].reshape(-1, 784) / 255.0).astype(np.float32), found["y_train"][:ROWS].astype(int)
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 784)).astype(np.float32), rng.integers(0, 10, ROWS)


def model() -> al.BNN:
    return al.BNN(al.networks.MLP(784, (300, 100), 10), al.Categorical(10), al.Normal(1.0))


def numpyro_step(steps: int, x: np.ndarray, y: np.ndarray) -> Callable[[], float]:
    """NumPyro's mean field on the same network: AutoNormal, Trace_ELBO, Adam, in one compiled loop."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def program(rows: Any, labels: Any) -> None:
        for i, (a, b) in enumerate(itertools.pairwise(SIZES)):
            weight = numpyro.sample(f"w{i}", dist.Normal(0.0, 1.0).expand([a, b]).to_event(2))
            rows = rows @ weight + numpyro.sample(f"b{i}", dist.Normal(0.0, 1.0).expand([b]).to_event(1))
            rows = jax.nn.relu(rows) if i < 2 else rows
        with numpyro.plate("N", ROWS, subsample_size=BATCH):
            numpyro.sample("y", dist.Categorical(logits=rows), obs=labels)

    svi = SVI(program, AutoNormal(program, init_scale=0.01), numpyro.optim.Adam(1e-3), Trace_ELBO())
    xs, ys = jnp.asarray(x), jnp.asarray(y)
    state = svi.init(jax.random.key(0), xs[:BATCH], ys[:BATCH])
    order = jax.random.randint(jax.random.key(1), (steps, BATCH), 0, ROWS)

    @jax.jit
    def run(state: Any) -> Any:
        return jax.lax.scan(lambda s, rows: (svi.update(s, xs[rows], ys[rows])[0], None), state, order)[0]

    jax.block_until_ready(jax.tree.leaves(run(state))[0])

    def timed() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(run(state))[0])
        return steps / (time.perf_counter() - begin)

    return timed


def speeds(args: argparse.Namespace, x: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    shared = {"num_steps": args.steps, "batch_size": BATCH, "learning_rate": 1e-3}
    ours = {
        "MAP": al.MAP(**shared),
        "mean field, local": al.Variational(**shared, estimator="local", num_evidence=0),
        "mean field, weights": al.Variational(**shared, estimator="weight", num_evidence=0),
        "mean field, flipout": al.Variational(**shared, estimator="flipout", num_evidence=0),
        "SparseDropout": al.SparseDropout(**shared),
        "Dropout": al.Dropout(0.5, **shared, num_evidence=0),
        "IVON": al.IVON(**shared),
    }

    def timed(method: al.Method) -> float:
        begin = time.perf_counter()
        al.fit(0, model(), (x, y), method, driver="loop", progress=False)
        return args.steps / (time.perf_counter() - begin)

    arms: dict[str, Callable[[], float]] = {name: lambda m=method: timed(m) for name, method in ours.items()}
    for arm in arms.values():
        arm()  # compile
    arms["NumPyro"] = numpyro_step(args.steps, x, y)
    if args.torch_python:
        for name, threads in (("bayesian-torch", 2), ("bayesian-torch, one thread", 1)):
            code = TORCH.format(threads=threads)
            arms[name] = lambda c=code: float(
                subprocess.run([args.torch_python, "-c", c, "vi"], capture_output=True, text=True, check=True).stdout
            )
    results: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(args.repeats):
        for name, arm in arms.items():
            results[name].append(arm())
    return results


def predictions(args: argparse.Namespace, x: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """Seconds for 100 passes over 10,000 rows, dropout after both hidden layers."""
    fit = al.fit(0, model(), (x, y), al.Dropout(0.5, placement="hidden", num_steps=20, batch_size=BATCH, num_evidence=0), progress=False)
    fit.posterior.outputs(jax.random.key(0), fit.model, x, PASSES)
    a, b = jnp.ones((ROWS, 300)), jnp.ones((300, 100 * 5))
    c, d = jnp.ones((5, ROWS, 100)), jnp.ones((5, 100, 10))
    product = jax.jit(lambda a, b, c, d: (a @ b, c @ d))
    jax.block_until_ready(product(a, b, c, d))
    results: dict[str, list[float]] = {"ours": [], "its matrix products alone": []}
    if args.torch_python:
        results["PyTorch loop"] = []
    for number in range(args.repeats):
        begin = time.perf_counter()
        fit.posterior.outputs(jax.random.key(number), fit.model, x, PASSES)
        results["ours"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(PASSES // 5):
            jax.block_until_ready(product(a, b, c, d))
        results["its matrix products alone"].append(time.perf_counter() - begin)
        if args.torch_python:
            command = [args.torch_python, "-c", TORCH.format(threads=2), "dropout"]
            results["PyTorch loop"].append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return results


def gradient_variance(x: np.ndarray, y: np.ndarray, repeats: int = 200) -> dict[str, dict[str, float]]:
    """Σ over parameters of the variance of ∂ELBO/∂μ and ∂ELBO/∂log σ at a fixed batch, at the start (σ = 0.05)."""
    bound = model().bind(x, y[:, None])
    target = Target(bound, 60_000, 1.0, signature(x))
    batch = al.Data(x[:BATCH], bound.likelihood.encode(y[:BATCH])).batch()
    start = bound.init(jax.random.key(0))
    results = {}
    for estimator in ("weight", "local", "flipout"):
        plan, _ = make_plan(al.Variational(estimator=estimator, initial_scale=0.05, batch_size=BATCH), target)
        parts, rest = plan.layout.split(start)
        q = plan.family.init(jax.random.key(1), parts, 0.05)
        slope = jax.grad(lambda q, key, plan=plan, rest=rest: variational.objective(key, q, rest, batch, plan)[0])

        @jax.jit
        def moments(keys: Any, q: Any = q, slope: Any = slope) -> Any:
            def add(carry: Any, key: Any) -> Any:
                g = slope(q, key)
                return jax.tree.map(
                    lambda s, v: (s[0] + v, s[1] + v**2),
                    carry,
                    g,
                    is_leaf=lambda n: isinstance(n, tuple) and len(n) == 2 and not isinstance(n[0], tuple),
                ), None

            zero = jax.tree.map(lambda leaf: (jnp.zeros_like(leaf), jnp.zeros_like(leaf)), q)
            return jax.lax.scan(add, zero, keys)[0]

        keys = jax.random.split(jax.random.key(2, impl="philox2x32"), repeats)
        sums = moments(keys)
        is_pair = lambda n: isinstance(n, tuple) and len(n) == 2 and not isinstance(n[0], tuple)
        var = jax.tree.map(lambda s: float(jnp.sum(s[1] / repeats - (s[0] / repeats) ** 2)), sums, is_leaf=is_pair)
        results[estimator] = {"means": sum(jax.tree.leaves(var["mean"])), "scales": sum(jax.tree.leaves(var["rho"]))}
    return results


def table(results: dict) -> str:
    lines = []
    if "speed" in results:
        median = {name: statistics.median(values) for name, values in results["speed"].items()}
        lines += ["| step | steps per second ↑ (median) | time in units of MAP ↓ |", "|---|---|---|"]
        lines += [f"| {name} | {value:.0f} | {median['MAP'] / value:.2f} |" for name, value in median.items()]
    if "predictions" in results:
        lines += ["", "| 100 passes × 10,000 rows | seconds ↓ (median) |", "|---|---|"]
        lines += [f"| {name} | {statistics.median(values):.2f} |" for name, values in results["predictions"].items()]
    if "variance" in results:
        base = results["variance"]["weight"]
        lines += ["", "| estimator | variance of ∂/∂μ ↓ | of weights' | variance of ∂/∂log σ ↓ | of weights' |", "|---|---|---|---|---|"]
        for name, value in results["variance"].items():
            lines.append(
                f"| {name} | {value['means']:.3g} | 1/{base['means'] / value['means']:.1f} | {value['scales']:.3g} | 1/{base['scales'] / value['scales']:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python")
    parser.add_argument("--data")
    parser.add_argument("--only", nargs="+", default=["speed", "predictions", "variance"], choices=["speed", "predictions", "variance"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    x, y = images(args.data)
    made = {
        "speed": lambda: speeds(args, x, y),
        "predictions": lambda: predictions(args, x, y),
        "variance": lambda: gradient_variance(x, y),
    }
    results = {name: made[name]() for name in args.only}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
