"""MNIST, active learning from 20 balanced labels: how many labels to 90 and 95 % accuracy, for several acquisitions and random.

    python benchmarks/active.py --data DIR [--seeds 3] [--budget 200] [--acquisitions batch_bald bald random] [--repeated] [--looked 2000] [--tested 2000] [--draws 30] [--out FILE]

DIR (or ALEATOR_DATA) holds mnist.npz. LeNet-size convolutional network, MC dropout (its own: a key drops channels and units and moves the image by up to two pixels, the same
for all rows of a pass, so that a pass is one function) or an ensemble of LeNet-5, batches of 10 from a pool of 10,000 images (60,000 with --whole), tested on
10,000; --looked: so many rows of the pool are judged in a round, --tested: so many test images, --draws: functions drawn for either. --repeated: every image of the pool three times with noise of standard deviation 0.1, where choosing rows one by one fails. Every loop is
resumable (--work DIR), with a larger --budget too; curves are kept in the JSON file. Labels to a level are told as the numbers of the first round that reaches it, one a seed, in order.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets
from aleator.networks.conv import conv, conv_init, max_pool
from aleator.networks.mlp import dense, dense_init

PUBLISHED = {"batch_bald": (90, 200), "bald": (120, 250), "random": (255, 835)}  # labels to 90 and 95 %
REACH = 2  # pixels an image is moved by at most: few labels go further where the network has seen them in several places
RATES = (0.125, 0.125, 0.25)  # of channels, channels and units dropped


def init(key: jax.Array) -> dict:
    keys = jax.random.split(key, 4)
    return {
        "conv1": conv_init(keys[0], 5, 1, 16, 2.0),
        "conv2": conv_init(keys[1], 5, 16, 32, 2.0),
        "dense1": dense_init(keys[2], 512, 128, 2.0),
        "dense2": dense_init(keys[3], 128, 10),
    }


def apply(params: dict, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Two convolutions with pooling and relu, two dense layers. A key moves all images alike and drops channels and units, the same for all."""
    drop = lambda values, number: values
    if key is not None:
        key_move, *keys = jax.random.split(key, 4)
        down, across = jax.random.randint(key_move, (2,), 0, 2 * REACH + 1)
        wide = jnp.pad(x, ((0, 0), (REACH, REACH), (REACH, REACH), (0, 0)))
        x = jax.lax.dynamic_slice(wide, (0, down, across, 0), x.shape)
        drop = lambda values, number: (
            values * jax.random.bernoulli(keys[number], 1.0 - RATES[number], values.shape[-1:]) / (1.0 - RATES[number])
        )
    for number, name in enumerate(("conv1", "conv2")):
        x = drop(jax.nn.relu(max_pool(conv(params[name], x, padding="VALID"))), number)
    x = drop(jax.nn.relu(dense(params["dense1"], x.reshape(len(x), -1))), 2)
    return dense(params["dense2"], x)


def model_and_method(kind: str, steps: int) -> tuple[al.BNN, al.Method]:
    if kind == "dropout":
        network = al.networks.as_network((apply, init(jax.random.key(0))), init=init)
        method = al.Dropout(existing=True, num_steps=steps, batch_size=32, learning_rate=2e-3, num_evidence=0)
        return al.BNN(network, al.Categorical(10), al.Normal(1.0)), method
    return al.BNN(al.networks.LeNet5(), al.Categorical(10), al.Normal(1.0)), al.Ensemble(
        al.MAP(num_steps=steps, batch_size=32, learning_rate=4e-3), 5
    )


def balanced(rng: np.random.Generator, y: np.ndarray, each: int = 2) -> np.ndarray:
    return np.concatenate([rng.choice(np.flatnonzero(y == c), each, replace=False) for c in range(10)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--looked", type=int, default=10_000)
    parser.add_argument("--tested", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--posterior", choices=("dropout", "ensemble"), default="dropout")
    parser.add_argument("--acquisitions", nargs="+", default=["batch_bald", "bald", "random"])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--repeated", action="store_true")
    parser.add_argument("--work", default=".cache/active")
    parser.add_argument("--out", default="benchmarks/results/active.json")
    args = parser.parse_args()
    data = datasets.load("mnist", args.data)
    image = lambda pixels: (pixels.reshape(-1, 28, 28, 1) / 255.0).astype(np.float32)
    x, y, test = (
        image(data["x_train"]),
        data["y_train"].astype(int),
        (image(data["x_test"][: args.tested]), data["y_test"][: args.tested].astype(int)),
    )
    out = Path(args.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for seed in range(args.seeds):
        rng = np.random.default_rng(seed)
        pool = np.arange(len(x)) if args.whole else rng.choice(len(x), 3000 if args.repeated else 10_000, replace=False)
        images, labels = x[pool], y[pool]
        if args.repeated:
            images = np.concatenate([images + 0.1 * rng.normal(size=images.shape).astype(np.float32) for _ in range(3)])
            labels = np.tile(labels, 3)
        first = balanced(rng, labels)
        for name in args.acquisitions:
            tag = f"{args.posterior}{'-repeated' if args.repeated else ''}-{name}-{seed}-{args.steps}-{args.looked}"
            if tag in results and results[tag]["curve"][0][-1] >= args.budget:
                continue
            model, method = model_and_method(args.posterior, args.steps)
            began = time.monotonic()

            def show(round: al.active.Round, tag: str = tag) -> None:
                print(f"{tag}: {round.num_labels:4d} labels, accuracy {round.scores['accuracy'][0]:.4f}, {round.seconds:.1f} s", flush=True)

            history = al.active.loop(
                seed, model, method, images, labels, args.batch, args.budget, acquisition=name, initial=first, test=test,
                scores=("accuracy",), num_samples=args.draws, max_rows=args.looked, directory=Path(args.work) / tag, report=show,
            )  # fmt: skip
            results[tag] = {
                "name": name, "seed": seed, "minutes": (time.monotonic() - began) / 60,
                "curve": [history.curve("accuracy")[0].tolist(), history.curve("accuracy")[1].tolist()],
                "to_90": history.labels_to("accuracy", 0.9), "to_95": history.labels_to("accuracy", 0.95),
            }  # fmt: skip
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1))
    start = f"{args.posterior}{'-repeated' if args.repeated else ''}-"
    print(table({name: [r for tag, r in results.items() if tag.startswith(f"{start}{name}-")] for name in args.acquisitions}, args.budget))


def table(runs: dict[str, list[dict]], budget: int) -> str:
    lines = [
        "| acquisition | seeds | labels to 90 % | to 95 % | published | accuracy at 50, 90, 150, 200 labels, % |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in runs.items():
        reached = [", ".join(str(r[level] or f"> {min(budget, r['curve'][0][-1])}") for r in rows) for level in ("to_90", "to_95")]
        shown = []
        for labels in (50, 90, 150, 200):
            values = np.array([100 * r["curve"][1][r["curve"][0].index(labels)] for r in rows if labels in r["curve"][0]])
            error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
            shown.append(f"{values.mean():.1f}{error}" if len(values) else "–")
        published = ", ".join(map(str, PUBLISHED.get(name, ("–",))))
        lines.append(f"| {name} | {len(rows)} | {' | '.join(reached)} | {published} | {', '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
