"""Sparse variational dropout on MNIST: how many weights a network can do without, beside the published rows.

    python benchmarks/sparse.py --data DIR [--networks lenet300 lenet5] [--out benchmarks/results/sparse.json]

DIR (or ALEATOR_DATA) holds mnist.npz. al.SparseDropout in stages: fit, prune, fit what is left, prune again (fit.prune gives a network like
any other), at last fine-tuned by al.MAP. LeNet-5-Caffe sees each image moved by up to a pixel, another way each epoch (al.Stream), which the published
rows did not: 2,000 weights overfit without it. The last 5,000 training images are held out of all of it: the thresholds of the last pruning are compared on
them and the smallest network within TOLERATED of the best is the row (LeNet-5-Caffe: the mildest threshold that leaves no more weights than the published
row has is the only one, and no stage before takes away more than its share of that); it is fine-tuned once more on all 60,000, and its error on the 10,000
test images is looked at once, from a single forward pass, with standard error √(e(1−e)/10,000). |W|/|W≠0| counts weights of linear maps, biases left out, as the published table does. A
run that is stopped goes on from its checkpoints and from its finished stages (--work DIR); finished networks are kept in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import aleator as al
from aleator import datasets

# Molchanov et al. 2017 and the rows it quotes: error %, sparsity per layer %, |W|/|W≠0|.
PUBLISHED = {
    "lenet300": [
        ("dense", "1.64", "–", "1"),
        ("Pruning (Han)", "1.59", "92.0 – 91.0 – 74.0", "12"),
        ("DNS (Guo)", "1.99", "98.2 – 98.2 – 94.5", "56"),
        ("SWS (Ullrich)", "1.94", "–", "23"),
        ("Sparse VD", "1.92", "98.9 – 97.2 – 62.0", "68"),
    ],
    "lenet5": [
        ("dense", "0.80", "–", "1"),
        ("Pruning", "0.77", "34 – 88 – 92.0 – 81", "12"),
        ("DNS", "0.91", "86 – 97 – 99.3 – 96", "111"),
        ("SWS", "0.97", "–", "200"),
        ("Sparse VD", "0.75", "67 – 98 – 99.8 – 95", "280"),
    ],
}
HELD_OUT = 5_000  # training images that settings are judged by
TOLERATED = 0.1  # per cent of held-out errors above the best, one standard error of a rate near half a per cent


class Stage(NamedTuple):
    """Epochs of al.SparseDropout, and the log α beyond which weights go after them, as far as `most` times fewer weights are left. learning_rate: of
    θ; noise_speed: of log σ², as a multiple of it; warmup: epochs over which the KL is ramped up."""

    epochs: int
    threshold: float
    learning_rate: float = 2e-3
    noise_speed: float = 20.0
    warmup: float = 0.0
    most: float | None = None


# reach: pixels by which images are moved. pretrain: epochs of MAP before the noise comes in. last: thresholds after the last stage, or the mildest one
# that leaves at_least times fewer weights. tune: epochs of MAP after it.
RECIPES = {
    "lenet300": {
        "reach": 0,
        "pretrain": 3,
        "stages": [Stage(150, 0.0, 1.5e-3, 25.0, 5.0)],
        "last": [3.0, 1.0, 0.0],
        "tune": 20,
        "tune_rate": 1e-3,
    },
    "lenet5": {
        "reach": 1,
        "pretrain": 5,
        "stages": [
            Stage(18, 1.5, noise_speed=6.0, warmup=2.0),
            Stage(12, 0.5, noise_speed=10.0),
            Stage(12, 0.0, noise_speed=15.0),
            Stage(15, -0.25, most=240.0),
            Stage(15, -0.25, most=262.0),
            Stage(30, 0.0, most=280.0),
        ],
        "at_least": 280.0,
        "tune": 40,
        "tune_rate": 3e-3,
    },
}
TITLES = {"lenet300": "LeNet-300-100", "lenet5": "LeNet-5-Caffe"}


def network(name: str) -> al.networks.Network:
    return al.networks.MLP(784, (300, 100), 10) if name == "lenet300" else al.networks.LeNet5Caffe(out_size=10)


def images(pixels: np.ndarray, name: str) -> np.ndarray:
    scaled = (pixels / 255.0).astype(np.float32)
    return scaled.reshape(-1, 784) if name == "lenet300" else scaled.reshape(-1, 28, 28, 1)


def moved(x: np.ndarray, y: np.ndarray, batch: int, reach: int) -> al.Stream:
    """Batches in random order, each image moved by up to `reach` pixels down and across; batch b of epoch e is the same however it is come to."""
    padded, pixels = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0))), np.arange(x.shape[1])

    def make(epoch: int, start: int):
        order = np.random.default_rng([0, epoch]).permutation(len(y))
        for number in range(start, -(-len(y) // batch)):
            rows = order[number * batch : (number + 1) * batch]
            down, across = np.random.default_rng([1, epoch, number]).integers(0, 2 * reach + 1, (2, len(rows), 1)) + pixels
            yield padded[rows[:, None, None], down[:, :, None], across[:, None, :]], y[rows]

    return al.Stream(make, len(y))


def mildest(fit: al.Fit, wanted: float) -> float:
    """The highest log α, to a hundredth, beyond which weights can go for `wanted` times fewer to be left: the one cut that keeps the most of them."""
    low, high = -2.0, 6.0
    while high - low > 0.01:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fit.prune(middle).manifest["pruning"]["compression"] >= wanted else (low, middle)
    return low


def error(fit: al.Fit, x: np.ndarray, y: np.ndarray) -> float:
    """Misclassified, in per cent."""
    return 100.0 * float((fit.predict(0, x, num_samples=1).probs.argmax(-1) != y).mean())


def run(name: str, data: dict, args: argparse.Namespace) -> dict:
    whole, test = ((images(data[f"x_{part}"], name), data[f"y_{part}"].astype(int)) for part in ("train", "test"))
    train, held = tuple(part[:-HELD_OUT] for part in whole), tuple(part[-HELD_OUT:] for part in whole)
    recipe, work = RECIPES[name], Path(args.work) / name
    per_epoch = -(-len(train[1]) // args.batch)
    shown = lambda rows: moved(*rows, args.batch, recipe["reach"]) if recipe["reach"] else rows
    clock = time.process_time()

    def fitted(label: str, key: int, model: al.BNN, method: al.Method, init: al.Fit | None = None, rows: tuple = train) -> al.Fit:
        """A fit kept in a directory of its own: loaded if it is there, resumed if it was stopped."""
        where = work / label
        if not (where / "fit").exists():
            resume = (where / "checkpoint.safetensors").exists()
            fit = al.fit(key, model, shown(rows), method, init=init, checkpoint=where, checkpoint_every=60.0, resume=resume)
            fit.save(where / "fit")
        return al.load(where / "fit")

    def point(epochs: int, rate: float = 1e-3) -> al.MAP:
        return al.MAP(num_steps=epochs * per_epoch, batch_size=args.batch, learning_rate=rate)

    fits = [fitted("start", 2, al.BNN(network(name), al.Categorical(10), al.Normal(1.0)), point(recipe["pretrain"]))]
    model = fits[0].model
    for number, stage in enumerate(recipe["stages"]):
        method = al.SparseDropout(
            num_steps=stage.epochs * per_epoch,
            batch_size=args.batch,
            learning_rate=stage.learning_rate,
            initial_log_variance=-8.0,
            kl_warmup=int(stage.warmup * per_epoch),
            noise_speed=stage.noise_speed,
        )
        fits.append(fitted(f"stage{number}", number, model, method, None if number else fits[0]))
        threshold = stage.threshold if stage.most is None else max(stage.threshold, mildest(fits[-1], stage.most))
        small = fits[-1].prune(threshold)
        model = small.model
        print(f"{name}, stage {number}: {small.status} Held-out error {error(small, *held):.2f} %", flush=True)
    rows = []
    for threshold in recipe.get("last") or [mildest(fits[-1], recipe["at_least"])]:
        small = fits[-1].prune(threshold)
        report = small.manifest["pruning"]
        tuned = fitted(f"tuned{threshold:g}", 9, small.model, point(recipe["tune"], recipe["tune_rate"]))
        row = {
            "threshold": threshold,
            "compression": report["compression"],
            "sparsity": [100.0 * value for value in report["sparsity"].values()],
            "held_out_pruned": error(small, *held),
            "held_out": error(tuned, *held),
            "tune_seconds": tuned.manifest["seconds"],
            **{key: report[key] for key in ("bytes_before", "bytes_after", "seconds_before", "seconds_after", "difference", "rows")},
        }
        rows.append(row)
        print(json.dumps({"network": name} | row), flush=True)
    best = min(row["held_out"] for row in rows)
    chosen = max((row for row in rows if row["held_out"] <= best + TOLERATED), key=lambda row: row["compression"])
    # Now that all is chosen, the images that were held out are trained on as well.
    final = fitted("final", 9, fits[-1].prune(chosen["threshold"]).model, point(recipe["tune"], recipe["tune_rate"]), rows=whole)
    chosen["error"] = error(final, *test)
    seconds = sum(fit.manifest["seconds"] for fit in fits)
    return {"rows": rows, "seconds": seconds, "processor_seconds": time.process_time() - clock, "recipe": repr(recipe)}


def table(results: dict) -> str:
    lines = ["| network | method | error % ↓ | sparsity per layer % | \\|W\\|/\\|W≠0\\| ↑ | minutes |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        lines += [f"| {TITLES[name]} | {m} | {e} | {s} | {c} | |" for m, e, s, c in PUBLISHED[name]]
        for row in result["rows"]:
            layers = " – ".join(f"{value:.1f}" for value in row["sparsity"])
            minutes = (result["seconds"] + row["tune_seconds"]) / 60
            label = f"Aleator, log α > {row['threshold']:.3g}, fine-tuned"
            shown = f"held out {row['held_out']:.2f}"
            if "error" in row:  # the one that was chosen
                shown = f"**{row['error']:.2f}** ± {(row['error'] * (100.0 - row['error']) / 10_000) ** 0.5:.2f} ({shown})"
            lines.append(f"| {TITLES[name]} | {label} | {shown} | {layers} | {row['compression']:.0f} | {minutes:.0f} |")
    lines += [
        "",
        "| network | log α > | bytes before → after | ms per 256 rows before → after | largest difference of outputs |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for row in result["rows"]:
            size = f"{row['bytes_before']:,} → {row['bytes_after']:,}"
            speed = f"{1e3 * row['seconds_before']:.2f} → {1e3 * row['seconds_after']:.2f}"
            lines.append(f"| {TITLES[name]} | {row['threshold']:.3g} | {size} | {speed} | {row['difference']:.0e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--networks", nargs="+", default=["lenet300", "lenet5"], choices=list(TITLES))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--work", default="sparse_work", help="checkpoints and fits")
    parser.add_argument("--out", default="benchmarks/results/sparse.json")
    args = parser.parse_args()
    data = datasets.load("mnist", args.data)
    out = Path(args.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in args.networks:
        if name not in results:
            results[name] = run(name, data, args)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1))
    text = table({name: results[name] for name in TITLES if name in results})
    out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
