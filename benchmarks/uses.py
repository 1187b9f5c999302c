"""What autoencoders are good for, measured: drawings of boundaries, letters never met, molecules.

    python benchmarks/uses.py --data DIR [--rows segments one_shot molecules] [--minutes 10] [--out benchmarks/results/uses.json] [--check]

DIR (or ALEATOR_DATA) holds bsds500_multiannotator.npz, notmnist_test.npz and molecules/*.csv.gz.
segments: boundaries by five annotators at 40 × 60, 80 training and 40 test images. Generalised energy distance (1 − IoU, different pairs) of
16 draws of `al.latent.segmenter`, of an ensemble of five deterministic networks at the threshold that marks as many pixels as the annotators,
and of pixels drawn alone from their mean probability; and of one half of the annotators to the other, the yardstick.
one_shot: trained on letters A … G, turned and mirrored into 56 classes; log-likelihood of letters H, I, J given 0, 1, 2, 5 examples, at 14 × 14.
molecules: SELFIES of ZINC; share of draws that rdkit calls valid, reconstruction of held-out molecules, and log-solubility (ESOL) from the code
by a linear model and by NUTS on a small network: RMSE and coverage of 90 % intervals. Needs the packages selfies and rdkit.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets
from aleator.latent import VAE, FeatureMap, Pooled, Strings, Symbols, energy_distance, episodes, log_prob, segmenter, strings

HEIGHT, WIDTH, ANNOTATORS = 40, 60, 5


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def fitted(model: Any, data: Any, minutes: float, method: Any) -> al.Fit:
    """As many steps as go into the time: method(num_steps), measured by a short run. No time: 50 steps."""
    if not minutes:
        return al.fit(0, model, data, method(50))

    def took(steps: int) -> float:
        begin = time.perf_counter()
        al.fit(0, model, data, method(steps))
        return time.perf_counter() - begin

    base, steps = took(2), 20
    while (whole := took(steps)) < 2.0 * base + 2.0:
        steps *= 4
    steps = max(20, int(60 * minutes * steps / (whole - base)))
    print(f"{type(model).__name__}: {steps} steps", flush=True)
    return al.fit(0, model, data, method(steps))


# ---- drawings -------------------------------------------------------------------------------------------------------------------------


def halve(x: np.ndarray, boundary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images averaged and about standardised, (n, 40, 60, 3); boundaries joined over 2 × 2 blocks, (annotators, n, 40, 60)."""
    small = x.reshape(len(x), HEIGHT, 2, WIDTH, 2, 3).mean(axis=(2, 4)) / 255.0
    marks = boundary.reshape(len(x), ANNOTATORS, HEIGHT, 2, WIDTH, 2).max(axis=(3, 5))
    return ((small - 0.45) / 0.25).astype(np.float32), np.swapaxes(marks, 0, 1).astype(np.float32)


def segments(args: argparse.Namespace) -> dict[str, Any]:
    data = datasets.load("bsds500_multiannotator", args.data)
    x, marks = halve(data["x_train"], data["boundary_train"])
    x_test, marks_test = halve(data["x_test"], data["boundary_test"])
    rows = np.tile(np.arange(len(x)), ANNOTATORS)
    method = lambda steps: al.Amortised(steps, batch_size=16, learning_rate=2e-3, warmup=max(1, steps // 4))
    widths = (16, 24, 24, 12)
    model = segmenter((HEIGHT, WIDTH, 3), latent_dim=8, widths=widths)
    fit = fitted(model, (x[rows], marks.reshape(-1, HEIGHT, WIDTH)), args.minutes / 2, method)
    drawn = np.concatenate(
        [fit.model.simulate(i, fit.posterior.params, 16, x=x_test[i : i + 8])[1] for i in range(0, len(x_test), 8)], axis=1
    )

    features = FeatureMap(3, widths, tuple(2**i for i in range(len(widths))))
    out = {"map": features.init(jax.random.key(0)), "out": 0.3 * jax.random.normal(jax.random.key(1), (12, 1)), "bias": jnp.zeros(1)}
    network = lambda params, x, key=None: (features.apply(params["map"], x) @ params["out"] + params["bias"]).reshape(len(x), -1)
    plain = al.BNN((network, out), al.Bernoulli(), al.Normal(1.0, scaling="fan_in"))
    targets = marks.reshape(len(rows), -1).astype(np.int32)  # every pixel is marked by somebody
    member = lambda steps: al.Ensemble(al.MAP(num_steps=steps, batch_size=16, learning_rate=3e-3), 5)
    ensemble = fitted(plain, (x[rows], targets), args.minutes / 2, member)
    each = jax.jit(jax.vmap(network, (0, None)))(ensemble.posterior.params["network"], jnp.asarray(x_test))
    probability = np.asarray(jax.nn.sigmoid(each)).reshape(5, len(x_test), HEIGHT, WIDTH)
    cut = np.quantile(probability, 1.0 - marks.mean())
    alone = np.random.default_rng(0).uniform(size=(16, *marks_test.shape[1:])) < probability.mean(axis=0)
    score = lambda samples: mean_and_error(energy_distance(samples, marks_test))
    return {
        "one z": score(drawn),
        "ensemble of 5, thresholded": score((probability > cut).astype(np.float32)),
        "pixels alone": score(alone.astype(np.float32)),
        "two annotators to three": mean_and_error(energy_distance(marks_test[:2], marks_test[2:])),
        "marked": {"drawn": float(drawn.mean()), "annotators": float(marks_test.mean())},
    }


# ---- letters --------------------------------------------------------------------------------------------------------------------------


def one_shot(args: argparse.Namespace) -> dict[str, Any]:
    data = datasets.load("notmnist_test", args.data)
    grey = data["x_test"].reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)) / 255.0
    images, labels = (grey > 0.5).astype(np.float32), data["y_test"].astype(int)
    turned = np.concatenate([np.rot90(flip, k, axes=(1, 2)) for flip in (images, images[:, :, ::-1]) for k in range(4)])
    kinds = np.concatenate([labels + 10 * k for k in range(8)])
    known = kinds % 10 < 7
    x, y = episodes(0, turned[known], kinds[known], num_rows=500 if args.check else 40_000, num_shots=(0, 5))
    model = VAE(24, (300,), (300,), al.Bernoulli(), context=Pooled(196, (300,), 100))
    fit = fitted(model, (x, y), args.minutes, lambda steps: al.Amortised(steps, batch_size=100))
    new = labels >= 7
    found: dict[str, Any] = {}
    scores = {}
    for shots in (0, 1, 2, 5):
        sets, target = episodes(9, images[new], labels[new], num_rows=50 if args.check else 2000, num_shots=shots, max_shots=5)
        scores[shots] = log_prob(1, fit, target, 50 if args.check else 500, x=sets)
        found[f"{shots} examples"] = mean_and_error(scores[shots])
    return found


# ---- molecules ------------------------------------------------------------------------------------------------------------------------


def read(args: argparse.Namespace, name: str) -> list[dict[str, str]]:
    directory = args.data or os.environ[datasets.VARIABLE]
    with gzip.open(Path(directory) / "molecules" / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def molecules(args: argparse.Namespace) -> dict[str, Any]:
    zinc = [row["smiles"] for row in read(args, "zinc20k")][: 300 if args.check else None]
    esol = read(args, "esol_delaney")[: 200 if args.check else None]
    column = next(name for name in esol[0] if name.startswith("measured"))
    texts = strings.selfies_of([*zinc, *(row["smiles"] for row in esol)])
    length = [text.count("[") for text in texts]
    usable = [i for i, size in enumerate(length) if 0 < size <= 72]
    table = Strings.of([texts[i] for i in usable], strings.BRACKETS)
    rows = table.encode([texts[i] for i in usable])
    from_zinc = np.array([i < len(zinc) for i in usable])
    test = np.arange(len(rows)) % 20 == 0
    model = VAE(56, (400,), (400, 400), Symbols(table.num_symbols))
    method = lambda steps: al.Amortised(steps, batch_size=100, warmup=max(1, steps // 3))
    fit = fitted(model, rows[~test], args.minutes, method)
    params = fit.posterior.params
    drawn = strings.smiles_of(table.decode(fit.model.simulate(1, params, 1000)[1]))
    centre, _ = fit.model.encode(params, rows)
    again = fit.model.decode(params, centre[test & from_zinc])
    solubility = np.array([float(esol[i - len(zinc)][column]) for i in usable if i >= len(zinc)])
    codes = centre[~from_zinc]
    fold = np.arange(len(codes)) % 5 == 0
    place, scale = solubility[~fold].mean(), solubility[~fold].std()
    targets = (solubility - place) / scale
    spread = codes[~fold].std(axis=0) + 1e-6
    inputs = (codes - codes[~fold].mean(axis=0)) / spread
    result: dict[str, Any] = {
        "valid": float(strings.valid(drawn).mean()),
        "distinct": len(set(drawn)) / len(drawn),
        "symbols rebuilt": float((again == rows[test & from_zinc]).mean()),
        "molecules rebuilt": float((again == rows[test & from_zinc]).all(axis=1).mean()),
        "spread of log-solubility": float(solubility[fold].std()),
    }
    predictors = {
        "linear, exact": (al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.6), al.Normal(0.3)), al.Exact()),
        "ensemble of networks": (
            al.BNN(al.networks.MLP(56, (50,), 2), al.HeteroscedasticGaussian(), al.Normal(1.0, scaling="fan_in")),
            al.Ensemble(al.MAP(num_steps=2000, batch_size=64), 5),
        ),
    }
    for name, (predictor, how) in predictors.items():
        found = al.fit(2, predictor, (inputs[~fold], targets[~fold]), how).predict(3, inputs[fold])
        mean, std = (np.ravel(np.asarray(value)) for value in (found.mean, found.std))
        error = mean - targets[fold]
        inside = np.abs(error) < 1.645 * std
        result[name] = {
            "rmse": float(scale * np.sqrt(np.mean(error**2))),
            "covered at 90 %": float(inside.mean()),
            "test rows": int(fold.sum()),
        }
    return result


ROWS = {"segments": segments, "one_shot": one_shot, "molecules": molecules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, a row")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/uses.json"))
    parser.add_argument("--check", action="store_true", help="a few steps of everything")
    args = parser.parse_args()
    args.minutes = 0.0 if args.check else args.minutes
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for row in args.rows:
        results[row] = ROWS[row](args)
        print(json.dumps({row: results[row]}, indent=1), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
