"""Training steps of two convolutional networks: our convolution, XLA's own, and PyTorch, as ratios measured in one run.

    python benchmarks/conv_micro.py [lenet] [vgg] [--torch-python PATH] [--repeats 5] [--one-core] [--json FILE]

lenet: LeNet-5 on 128 images of 28 × 28 × 1. vgg: convolutions 32-32-M-64-64-M-128-128-M and dense 2048-128-10 on 128 images of
32 × 32 × 3. A step is loss, gradient and Adam. JAX arms run several steps in one `scan` ("scan") or one jitted step from Python
("loop"); XLA's convolution only has a loop arm, because its kernel gradient in a `scan` takes minutes. PyTorch runs eagerly, contiguous
and channels_last, in a process of its own that waits for its turn. Arms take turns within a repeat; medians over repeats are printed,
with the best beside them, because a busy machine moves the median. cpu is the processor time of a step over all threads, which other
jobs on the machine move less, and with --one-core (one thread on one core, both libraries) hardly at all. PyTorch's threads spin while
they wait, so on a busy machine only --one-core compares fairly. GFLOP/s counts 3 · 2 · multiply-adds of the forward pass · 128.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

BATCH = 128
STEPS = {"lenet": 20, "vgg": 2}
MACS = {
    "lenet": 25 * 6 * 28 * 28 + 25 * 6 * 16 * 10 * 10 + 400 * 120 + 120 * 84 + 84 * 10,
    "vgg": 9 * (3 * 32 * 1024 + 32 * 32 * 1024 + 32 * 64 * 256 + 64 * 64 * 256 + 64 * 128 * 64 + 128 * 128 * 64) + 2048 * 128 + 1280,
}

# Reads "network steps" lines, answers with "wall cpu" per arm: seconds per step.
TORCH = """
import sys, time, torch
import torch.nn.functional as F
from torch import nn
torch.set_num_threads(len(__import__('os').sched_getaffinity(0))); torch.manual_seed(0)
def lenet():
    return nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
def vgg():
    layers = []
    for a, b, pool in ((3, 32, 0), (32, 32, 1), (32, 64, 0), (64, 64, 1), (64, 128, 0), (128, 128, 1)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()] + [nn.MaxPool2d(2)] * pool
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10))
made = {}
def arm(name, last):
    if (name, last) not in made:
        net = lenet() if name == "lenet" else vgg()
        x = torch.randn(128, *((1, 28, 28) if name == "lenet" else (3, 32, 32))); y = torch.randint(0, 10, (128,))
        if last: net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        def step():
            optimizer.zero_grad(set_to_none=True); F.cross_entropy(net(x), y).backward(); optimizer.step()
        for _ in range(3): step()
        made[name, last] = step
    return made[name, last]
for line in sys.stdin:
    name, layout, steps = line.split(); step = arm(name, layout == "channels_last")
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(int(steps)): step()
    print((time.perf_counter() - wall) / int(steps), (time.process_time() - cpu) / int(steps), flush=True)
"""


def jax_arms(name: str) -> dict:
    """{arm: function that runs STEPS steps}; every arm has the same parameters and data."""
    from unittest import mock

    import jax
    import jax.numpy as jnp
    import optax

    from aleator.networks import conv

    net = conv.LeNet5() if name == "lenet" else conv.VGG(norm=None)
    steps = STEPS[name]
    x = jax.random.normal(jax.random.key(0), (steps, BATCH, *net.in_shape))
    y = jax.random.randint(jax.random.key(1), (steps, BATCH), 0, 10)
    optimizer = optax.adam(1e-3)
    params = net.init(jax.random.key(2))
    start = (params, optimizer.init(params))

    def xla_conv2d(x, w, stride=1, padding="SAME"):
        return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def step(carry, batch):
        params, state = carry

        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch[0]), batch[1]).mean()

        value, grad = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), value

    def loop(one):
        def run():
            carry = start
            for i in range(steps):
                carry, _ = one(carry, (x[i], y[i]))
            jax.block_until_ready(carry)

        return run

    whole = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches)).lower(start, (x, y)).compile()
    single = jax.jit(step).lower(start, (x[0], y[0])).compile()
    with mock.patch.object(conv, "conv2d", xla_conv2d):  # while tracing only: the program keeps what it was traced with
        native = jax.jit(lambda carry, batch: step(carry, batch)).lower(start, (x[0], y[0])).compile()
    agree = [
        float(jnp.abs(a - b).max()) for a, b in zip(*(jax.tree.leaves(f(start, (x[0], y[0]))[0][0]) for f in (single, native)), strict=True)
    ]
    if max(agree) > 3e-3:  # Adam's first step is ±learning rate whatever the gradient: only a sign could differ
        raise SystemExit(f"our step and XLA's disagree: {agree}")
    return {"ours, scan": lambda: jax.block_until_ready(whole(start, (x, y))), "ours, loop": loop(single), "XLA, loop": loop(native)}


def timed(function, steps: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["lenet", "vgg"], help="lenet, vgg or both")
    parser.add_argument("--torch-python", help="a Python that has PyTorch; ours, where it has")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one-core", action="store_true", help="pin everything to one core (Linux)")
    parser.add_argument("--json", help="also write the table to this file")
    args = parser.parse_args()
    if args.one_core:  # before JAX or PyTorch counts the cores
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    python = args.torch_python or (sys.executable if importlib.util.find_spec("torch") else None)
    peer = subprocess.Popen([python, "-c", TORCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) if python else None

    def ask(name: str, layout: str) -> tuple[float, float]:
        peer.stdin.write(f"{name} {layout} {STEPS[name]}\n")
        peer.stdin.flush()
        wall, cpu = peer.stdout.readline().split()
        return float(wall), float(cpu)

    report = {}
    for name in args.networks:
        arms = {arm: lambda run=run, name=name: timed(run, STEPS[name]) for arm, run in jax_arms(name).items()}
        if peer is not None:
            for layout in ("contiguous", "channels_last"):
                arms[f"torch, {layout}"] = lambda name=name, layout=layout: ask(name, layout)
        for arm in arms.values():
            arm()
        times = {arm: [] for arm in arms}
        for _ in range(args.repeats):
            for arm, measure in arms.items():
                times[arm].append(measure())
        ours = statistics.median(wall for wall, _ in times["ours, scan"])
        ours_cpu = statistics.median(cpu for _, cpu in times["ours, scan"])
        print(f"{name}: {BATCH} images a step, {6 * MACS[name] * BATCH / 1e9:.2f} GFLOP")
        print(f"  {'arm':22s} {'ms/step':>9s} {'best':>9s} {'cpu':>9s} {'GFLOP/s':>8s} {'÷ ours':>7s} {'cpu ÷ ours':>10s}")
        report[name] = {}
        for arm, pairs in times.items():
            wall, best, cpu = statistics.median(w for w, _ in pairs), min(w for w, _ in pairs), statistics.median(c for _, c in pairs)
            speed = 6 * MACS[name] * BATCH / wall / 1e9
            print(
                f"  {arm:22s} {wall * 1e3:9.2f} {best * 1e3:9.2f} {cpu * 1e3:9.2f} {speed:8.1f} {wall / ours:7.2f} {cpu / ours_cpu:10.2f}",
                flush=True,
            )
            row = {"ms": wall * 1e3, "best_ms": best * 1e3, "cpu_ms": cpu * 1e3, "gflops": speed}
            report[name][arm] = row | {"over_ours": wall / ours, "cpu_over_ours": cpu / ours_cpu}
    if peer is not None:
        peer.stdin.close()
        peer.wait()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
