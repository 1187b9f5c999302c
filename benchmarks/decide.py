"""Strange images, calibration and batches of labels: AUROC of every detector, temperature scaling with its test, seconds of BatchBALD.

    python benchmarks/decide.py --data DIR [--steps 3000] [--tasks ood signs calibration batch] [--cifar DIR] [--work DIR]

DIR (or ALEATOR_DATA) holds mnist.npz, fashion_mnist.npz, notmnist_test.npz and gtsrb_ood.npz. One LeNet-5 by MAP on MNIST sees Fashion-MNIST and notMNIST; another on Fashion-MNIST
is recalibrated on 5,000 held-out images. signs: a small VGG-like network by MAP on CIFAR-10 (--cifar: where `cifar10.py` reads it) sees traffic signs (GTSRB). --work: trained networks are kept there; a training that was stopped goes on.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import cifar10
import numpy as np

import aleator as al
from aleator import criteria, datasets
from aleator.decide import acquisition, calibration, ood

BATCH = 128


def images(pixels: np.ndarray) -> np.ndarray:
    return (pixels.reshape(-1, 28, 28, 1) / 255.0).astype(np.float32)


def trained(name: str, net: Any, x: np.ndarray, y: np.ndarray, args: argparse.Namespace) -> al.Fit:
    kept = None if args.work is None else Path(args.work) / f"{name}-{args.steps}"
    if kept is not None and kept.exists():
        return al.load(kept)
    model, method = al.BNN(net, al.Categorical(10), al.Normal(1.0)), al.MAP(num_steps=args.steps, batch_size=BATCH)
    if kept is None:
        return al.fit(0, model, (x, y), method)
    begun = kept.with_suffix(".begun")
    fit = al.fit(0, model, (x, y), method, checkpoint=begun, checkpoint_every=10.0, resume=begun.exists())
    fit.save(kept)
    return fit


def strange(args: argparse.Namespace) -> None:
    data = datasets.load("mnist", args.data)
    x, y = images(data["x_train"][: args.train + args.held]), data["y_train"][: args.train + args.held].astype(int)
    others = {name: images(datasets.load(name, args.data)["x_test"][: args.test]) for name in ("fashion_mnist", "notmnist_test")}
    inside = images(data["x_test"][: args.test]), data["y_test"][: args.test].astype(int)
    detected("MNIST", trained("mnist", al.networks.LeNet5(), x[: args.train], y[: args.train], args), (x, y), inside, others, args)


def signs(args: argparse.Namespace) -> None:
    (x, y), (test, truth) = cifar10.read(Path(args.cifar))
    x, y = x[: args.train + args.held], y[: args.train + args.held]
    others = {"gtsrb": ((datasets.load("gtsrb_ood", args.data)["x"] / 255.0).astype(np.float32) - cifar10.MEAN) / cifar10.STD}
    net = al.networks.VGG((32, 32, 3), 10, widths=((32,), (64,), (128,)), dense=(128,))
    fit = trained("cifar10", net, x[: args.train], y[: args.train], args)
    detected("CIFAR-10", fit, (x, y), (test[: args.test], truth[: args.test]), others, args)


def detected(name: str, fit: al.Fit, data: tuple, inside: tuple, others: dict[str, np.ndarray], args: argparse.Namespace) -> None:
    """AUROC of every score, test images against others. The last args.held rows of the data set the threshold."""
    (x, y), (test, truth) = data, inside
    accuracy = criteria.accuracy(fit.predict(1, test), truth)
    print(f"one network on {name}, {args.steps} steps: accuracy {accuracy.value:.4f} ± {accuracy.stderr:.4f}")
    print(f"{'score':<22}  " + "  ".join(f"{other + ' AUROC [↑]':>26}" for other in others) + "  false alarms (asked 0.05)")
    for score in args.scores:
        detector = ood.detector(2, fit, x[-args.held :], score, train=(x[: args.features], y[: args.features]))
        known = detector.score(3, test)
        cells = []
        for outside in others.values():
            scores = detector.score(4, outside)
            area = criteria.auroc(np.concatenate([known, scores]), np.arange(len(known) + len(scores)) >= len(known))
            cells.append(f"{100 * area.value:>16.2f} ± {100 * area.stderr:.2f} %")
        print(f"{score:<22}  " + "  ".join(f"{cell:>26}" for cell in cells) + f"  {np.mean(known > detector.threshold):.3f}", flush=True)


def calibrated(args: argparse.Namespace) -> None:
    data = datasets.load("fashion_mnist", args.data)
    x, y = images(data["x_train"]), data["y_train"].astype(int)
    test, truth = images(data["x_test"]), data["y_test"].astype(int)
    fit = trained("fashion", al.networks.LeNet5(), x[:55_000], y[:55_000], args)
    before = fit.predict(1, test)
    print(
        f"Fashion-MNIST, LeNet-5, {args.steps} steps, log score {criteria.log_score(before, truth).value:.4f}: {calibration.calibration_test(2, before, truth)}"
    )
    for how in ("temperature", "vector", "isotonic", "beta"):
        after = al.decide.recalibrate(3, fit, (x[55_000:], y[55_000:]), how).predict(4, test)
        gain = criteria.paired(criteria.log_score(after, truth), criteria.log_score(before, truth))
        print(f"{how:<12} log score {gain.value:+.4f} ± {gain.stderr:.4f} nats; {calibration.calibration_test(5, after, truth)}")


def batches(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    for spread in (1.0, 3.0):
        z = 2 * rng.normal(size=(1, 10_000, 10)) + spread * rng.normal(size=(100, 10_000, 10))
        draws = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        began = time.monotonic()
        found = acquisition.batch_bald(0, draws, 10)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"BatchBALD, batch 10, pool 10,000, 100 draws, spread {spread:g}: {time.monotonic() - began:.1f} s, {found.value[-1]:.3f} nats, peak {peak:.2f} GB"
        )


TASKS = {"batch": batches, "ood": strange, "calibration": calibrated, "signs": signs}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--train", type=int, default=50_000, help="images to train on; --features of them make the feature scores")
    parser.add_argument("--features", type=int, default=20_000)
    parser.add_argument("--held", type=int, default=5_000, help="images that set the threshold")
    parser.add_argument("--test", type=int, default=10_000, help="test images of each set")
    parser.add_argument("--cifar", help="the directory of CIFAR-10's PNG files, for the task signs")
    parser.add_argument("--work")
    parser.add_argument("--scores", nargs="+", default=["entropy", "max_prob", "energy", *ood.FEATURE_SCORES])
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=["batch", "ood", "calibration"])
    arguments = parser.parse_args()
    for task in arguments.tasks:
        TASKS[task](arguments)
