"""Our training step against a hand-written JAX scan and, when there is one, the PyTorch peer: ratios measured in one run.

    python benchmarks/speed.py [--torch-python PATH] [--steps 20000] [--repeats 5] [--json FILE]

All arms are interleaved and the median over repeats is reported, because the machines are noisy. Higher is better for steps per second;
lower is better for seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

BATCH, ROWS, COLUMNS, HIDDEN = 32, 500, 13, 50

TORCH = """
import sys, time, torch
torch.manual_seed(0); torch.set_num_threads(2)
x = torch.randn({rows}, {columns}); y = torch.sin(x.sum(1) / 2)
net = torch.nn.Sequential(torch.nn.Linear({columns}, {hidden}), torch.nn.ReLU(), torch.nn.Linear({hidden}, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
def steps(n):
    done = 0
    while done < n:
        order = torch.randperm({rows})
        for i in range(0, {rows} - {batch} + 1, {batch}):
            rows = order[i:i + {batch}]
            loss = torch.nn.functional.mse_loss(net(x[rows])[:, 0], y[rows])
            opt.zero_grad(); loss.backward(); opt.step(); done += 1
            if done == n: return
steps(50)
begin = time.perf_counter(); steps(600); print(600 / (time.perf_counter() - begin))
"""


def data():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return x, (np.sin(x.sum(1) / 2) + 0.1 * rng.normal(size=ROWS)).astype(np.float32)


def hand_written(steps: int):
    """The plain thing: squared error, Adam, permutations per epoch, one jitted scan over everything."""
    import jax
    import jax.numpy as jnp
    import optax

    x, y = (jnp.asarray(a) for a in data())
    optimizer, per_epoch = optax.adam(1e-3), ROWS // BATCH

    def init(key):
        first, second = jax.random.split(key)
        return [
            (jax.random.normal(first, (COLUMNS, HIDDEN)) / COLUMNS**0.5, jnp.zeros(HIDDEN)),
            (jax.random.normal(second, (HIDDEN, 1)) / HIDDEN**0.5, jnp.zeros(1)),
        ]

    def loss(params, rows):
        (w, b), (v, c) = params
        return jnp.mean(((jax.nn.relu(x[rows] @ w + b) @ v + c)[:, 0] - y[rows]) ** 2)

    @jax.jit
    def run(params, state, key):
        def step(carry, rows):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, rows)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        def epoch(carry, key):
            order = jax.random.permutation(key, ROWS)[: per_epoch * BATCH].reshape(per_epoch, BATCH)
            return jax.lax.scan(step, carry, order)

        return jax.lax.scan(epoch, (params, state), jax.random.split(key, steps // per_epoch))

    params = init(jax.random.key(0))
    state = optimizer.init(params)
    call = lambda seed: jax.block_until_ready(run(params, state, jax.random.key(seed)))
    return call, (steps // per_epoch) * per_epoch


def ours(steps: int, members: int | None = None):
    import aleator as al

    x, y = data()
    model = al.BNN(al.networks.MLP(COLUMNS, (HIDDEN,), 1), al.Gaussian(), al.Normal(1.0))
    method = al.MAP(num_steps=steps, batch_size=BATCH, learning_rate=1e-3, schedule="constant")
    method = method if members is None else al.Ensemble(method, members)
    return lambda seed: al.fit(seed, model, (x, y), method, progress=False)


def timed(function, *args) -> float:
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def in_new_process(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="a Python with PyTorch, for the peer")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()

    peer, count = hand_written(args.steps)
    fit, ensemble = ours(count), ours(count, members=10)
    for warm in (peer, fit, ensemble):
        warm(0)
    times: dict[str, list[float]] = {"hand": [], "ours": [], "ensemble": [], "torch": [], "import": [], "first fit": []}
    for repeat in range(args.repeats):
        times["hand"].append(timed(peer, repeat))
        times["ours"].append(timed(fit, repeat))
        times["ensemble"].append(timed(ensemble, repeat))
        if args.torch_python:
            code = TORCH.format(rows=ROWS, columns=COLUMNS, hidden=HIDDEN, batch=BATCH)
            rate = subprocess.run([args.torch_python, "-c", code], capture_output=True, text=True, check=True).stdout
            times["torch"].append(count / float(rate))
        times["import"].append(
            in_new_process("import jax, time\nimport jax.numpy\nb = time.perf_counter()\nimport aleator\nprint(time.perf_counter() - b)")
        )
        first = "import sys, time\nsys.path.insert(0, 'benchmarks')\nimport speed\nf = speed.ours(600)\nb = time.perf_counter()\nf(0)\nprint(time.perf_counter() - b)"
        times["first fit"].append(in_new_process(first))
    median = {name: statistics.median(values) for name, values in times.items() if values}
    # Ratios are taken repeat by repeat: neighbours in time share the machine's mood.
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
    result = {
        "steps per second, hand-written scan (higher is better)": count / median["hand"],
        "steps per second, al.fit with MAP (higher is better)": count / median["ours"],
        "ours / hand-written (bar: at least 0.8)": ratio("hand", "ours"),
        "ensemble of 10 / one net, time (bar: at most 5.5)": ratio("ensemble", "ours"),
        "import aleator beyond import jax, s (bar: at most 0.4)": median["import"],
        "first fit of a small net with compilation, s (bar: at most 3)": median["first fit"],
    }
    if args.torch_python:
        result["ours / PyTorch eager (bar: at least 25)"] = ratio("torch", "ours")
    for name, value in result.items():
        print(f"{name:<70} {value:>12.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"results": result, "raw seconds": times, "steps": count}, file, indent=1)


if __name__ == "__main__":
    main()
