"""Sparse variational dropout on MNIST: how many weights a network can do without, beside the published rows.

    python benchmarks/sparse.py --data DIR [--networks lenet300 lenet5] [--epochs N] [--out benchmarks/results/sparse.json]

DIR (or ALEATOR_DATA) holds mnist.npz. One recipe per network: al.SparseDropout on all 60,000 training images, weights with log α > 3
(and at lower thresholds) pruned, the rest fine-tuned by al.MAP. Errors are of the 10,000 test images, from the pruned network's single forward pass; the standard
error of an error rate e is √(e(1−e)/10,000). |W|/|W≠0| counts weights of linear maps, biases left out, as the published table does. A run
that is stopped goes on from its checkpoint (--work DIR); finished networks are kept in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax

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
EPOCHS = {"lenet300": 150, "lenet5": 24}
NOISE_SPEED = 25.0
TITLES = {"lenet300": "LeNet-300-100", "lenet5": "LeNet-5-Caffe"}


def network(name: str) -> al.networks.Network:
    return al.networks.MLP(784, (300, 100), 10) if name == "lenet300" else al.networks.LeNet5Caffe(out_size=10)


def images(pixels: np.ndarray, name: str) -> np.ndarray:
    scaled = (pixels / 255.0).astype(np.float32)
    return scaled.reshape(-1, 784) if name == "lenet300" else scaled.reshape(-1, 28, 28, 1)


def error(fit: al.Fit, x: np.ndarray, y: np.ndarray) -> float:
    """Misclassified, in per cent."""
    return 100.0 * float((fit.predict(0, x, num_samples=1).probs.argmax(-1) != y).mean())


def eager_noise(rate: Any) -> optax.GradientTransformation:
    """Adam, with log σ² moving NOISE_SPEED times as fast as θ: Adam's steps are of the size of the rate, and log σ² has to travel
    from −8 to beyond log θ² + 3, which at the rate of the weights would take most of the epochs."""
    faster = optax.masked(optax.scale(NOISE_SPEED), {"model": False, "noise": True})
    return optax.chain(optax.adam(rate), faster)


def run(name: str, data: dict, args: argparse.Namespace) -> dict:
    train, test = ((images(data[f"x_{part}"], name), data[f"y_{part}"].astype(int)) for part in ("train", "test"))
    per_epoch = -(-60_000 // args.batch)
    epochs = args.epochs or EPOCHS[name]
    model = al.BNN(network(name), al.Categorical(10), al.Normal(1.0))
    method = al.SparseDropout(
        num_steps=epochs * per_epoch,
        batch_size=args.batch,
        learning_rate=args.learning_rate,
        initial_log_variance=-8.0,
        kl_warmup=args.warmup * per_epoch,
        optimizer=eager_noise,
    )
    clock = time.monotonic()
    work = Path(args.work) / name
    start = al.fit(2, model, train, al.MAP(num_steps=args.pretrain * per_epoch, batch_size=args.batch, learning_rate=1e-3))
    fit = al.fit(
        0, model, train, method, init=start, checkpoint=work, checkpoint_every=60.0, resume=(work / "checkpoint.safetensors").exists()
    )
    fit.save(work / "fit")
    seconds = start.manifest["seconds"] + fit.manifest["seconds"]
    rows = []
    for threshold in args.thresholds:
        small = fit.prune(threshold)
        report = small.manifest["pruning"]
        began = time.monotonic()
        tuned = al.fit(1, small.model, train, al.MAP(num_steps=args.tune * per_epoch, batch_size=args.batch, learning_rate=1e-3))
        row = {
            "threshold": threshold,
            "compression": report["compression"],
            "sparsity": [100.0 * value for value in report["sparsity"].values()],
            "error_pruned": error(small, *test),
            "error": error(tuned, *test),
            "tune_seconds": time.monotonic() - began,
            **{key: report[key] for key in ("bytes_before", "bytes_after", "seconds_before", "seconds_after", "difference", "rows")},
        }
        rows.append(row)
        print(json.dumps({"network": name} | row), flush=True)
    return {"rows": rows, "seconds": seconds, "total_seconds": time.monotonic() - clock, "epochs": epochs, "settings": repr(method)}


def table(results: dict) -> str:
    lines = ["| network | method | error % ↓ | sparsity per layer % | \\|W\\|/\\|W≠0\\| ↑ | minutes |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        lines += [f"| {TITLES[name]} | {m} | {e} | {s} | {c} | |" for m, e, s, c in PUBLISHED[name]]
        for row in result["rows"]:
            layers = " – ".join(f"{value:.1f}" for value in row["sparsity"])
            stderr = (row["error"] * (100.0 - row["error"]) / 10_000) ** 0.5
            minutes = (result["seconds"] + row["tune_seconds"]) / 60
            label = f"Aleator, log α > {row['threshold']:g}, fine-tuned"
            lines.append(
                f"| {TITLES[name]} | {label} | {row['error']:.2f} ± {stderr:.2f} | {layers} | {row['compression']:.0f} | {minutes:.0f} |"
            )
    lines += [
        "",
        "| network | log α > | bytes before → after | ms per 256 rows before → after | largest difference of outputs |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for row in result["rows"]:
            size = f"{row['bytes_before']:,} → {row['bytes_after']:,}"
            speed = f"{1e3 * row['seconds_before']:.2f} → {1e3 * row['seconds_after']:.2f}"
            lines.append(f"| {TITLES[name]} | {row['threshold']:g} | {size} | {speed} | {row['difference']:.0e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--networks", nargs="+", default=["lenet300", "lenet5"], choices=list(TITLES))
    parser.add_argument("--epochs", type=int, help="default: 150 for LeNet-300-100, 24 for LeNet-5-Caffe")
    parser.add_argument("--pretrain", type=int, default=3, help="epochs of MAP before the noise comes in")
    parser.add_argument("--warmup", type=int, default=5, help="epochs over which the KL is ramped up")
    parser.add_argument("--tune", type=int, default=20, help="epochs of fine-tuning after pruning")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[3.0, 1.0, 0.0])
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
