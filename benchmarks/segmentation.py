"""Per-pixel uncertainty of boundaries in natural images (lecture B13): where a fully convolutional network does not know.

    python benchmarks/segmentation.py --data DIR [--steps 2000] [--picture docs/images/segmentation.png]

DIR (or the environment variable ALEATOR_DATA) holds bsds500_multiannotator.npz (80 training and 40 test images, five annotators each) and
gtsrb_ood.npz. Images are halved to 40 × 60. An annotator's drawing of an image is one row with 2,400 Bernoulli targets, so 80 × 5 = 400 rows.
One network is fitted by dropout; entropy and mutual information come from the same draws. Printed: mutual information by how many of the five
annotators mark a pixel; on the test scenes and on scenes unlike training; and with one annotator per training image in place of five. Errors
are standard errors over images, of paired differences where the images are paired. The tables are also written as JSON beside --out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets, plots
from aleator.networks._conv import conv2d

HEIGHT, WIDTH, ANNOTATORS = 40, 60, 5
LAYERS = ((5, 3, 16, 1), (3, 16, 24, 2), (3, 24, 24, 4), (3, 24, 24, 1), (1, 24, 1, 1))  # kernel, channels in and out, dilation
NUM_SAMPLES = 100


def network(params: dict, x: Any) -> Any:
    """Logits of a boundary at every pixel: x (n, 40, 60, 3) → (n, 2400). Dilated convolutions see 23 pixels across and keep the size."""
    for number, (_, _, _, dilation) in enumerate(LAYERS):
        layer = params[f"layer{number}"]
        x = conv2d(x if number == 0 else jax.nn.relu(x), layer["weight"], dilation=dilation) + layer["bias"]
    return x.reshape(x.shape[0], -1)


def init(key: Any) -> dict:
    params = {}
    for number, (k, (size, before, after, _)) in enumerate(zip(jax.random.split(key, len(LAYERS)), LAYERS, strict=True)):
        scale = np.sqrt(2.0 / (size * size * before))
        params[f"layer{number}"] = {"weight": scale * jax.random.normal(k, (size, size, before, after)), "bias": jnp.zeros(after)}
    return params


def halve(x: np.ndarray, boundary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images averaged, boundaries joined, over 2 × 2 blocks: (n, 40, 60, 3) about standardised, (n, 5, 40, 60) of 0 and 1."""
    small = x.reshape(len(x), HEIGHT, 2, WIDTH, 2, 3).mean(axis=(2, 4)) / 255.0
    marks = boundary.reshape(len(x), ANNOTATORS, HEIGHT, 2, WIDTH, 2).max(axis=(3, 5))
    return ((small - 0.45) / 0.25).astype(np.float32), marks.astype(np.int32)


def unlike(x: np.ndarray, signs: np.ndarray) -> dict[str, np.ndarray]:
    """Scenes made from the test images, and mosaics of traffic signs: as many of each."""
    rng = np.random.default_rng(0)
    n = len(x)
    shuffled = rng.permuted(x.reshape(n, -1, 3), axis=1).reshape(x.shape)
    chosen = signs[rng.choice(len(signs), 4 * n, replace=False)] / 255.0
    mosaic = chosen.reshape(n, 2, 2, 32, 32, 3).transpose(0, 1, 3, 2, 4, 5).reshape(n, 64, 64, 3)
    return {
        "negative": (0.1 / 0.25 - x),  # 1 − image, on the standardised scale
        "mosaic of traffic signs": ((mosaic[:, 12 : 12 + HEIGHT, 2 : 2 + WIDTH] - 0.45) / 0.25).astype(np.float32),
        "pixels shuffled": shuffled,
        "contrast doubled": 2.0 * x - x.mean(axis=(1, 2, 3), keepdims=True),
    }


def fit(key: int, x: np.ndarray, marks: np.ndarray, rate: float, steps: int) -> al.Fit:
    """marks (n, annotators, 40, 60): one row per drawing."""
    rows = np.repeat(np.arange(len(x)), marks.shape[1])
    y = marks.reshape(len(rows), HEIGHT * WIDTH)
    model = al.BNN((network, init(jax.random.key(0))), al.Bernoulli(), al.Normal(1.0, scaling="fan_in"))
    method = al.Dropout(rate, placement="hidden", num_steps=steps, batch_size=8, learning_rate=5e-3, num_evidence=0)
    return al.fit(key, model, (x[rows], y), method)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard error over images, without those that have no such pixel (NaN)."""
    values = values[np.isfinite(values)]
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def by_marks(values: np.ndarray, count: np.ndarray) -> list[tuple[float, float]]:
    """Mean of a map over the pixels that 0, 1, …, 5 annotators mark; (n, 2400) each."""
    where = [np.where(count == m, values, np.nan) for m in range(ANNOTATORS + 1)]
    return [mean_and_error(np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in part])) for part in where]


def table(results: dict[str, Any]) -> str:
    show = lambda pair, digits=4: f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"
    lines = ["| annotators that mark the pixel | probability | entropy [nats] | mutual information [nats] |", "|---|---|---|---|"]
    for m, (p, h, i) in enumerate(zip(*(results["marks"][name] for name in ("probability", "entropy", "mutual_information")), strict=True)):
        lines.append(f"| {m} of {ANNOTATORS} | {show(p)} | {show(h)} | {show(i)} |")
    lines += ["", "| scenes | entropy [nats] | mutual information [nats] | more than on test scenes |", "|---|---|---|---|"]
    for name, row in results["scenes"].items():
        more = "" if row["difference"] is None else show(row["difference"])
        lines.append(f"| {name} | {show(row['entropy'])} | {show(row['mutual_information'])} | {more} |")
    lines += [
        "",
        "| fitted to | log score per pixel (constant rate) | mutual information [nats] | more than with five |",
        "|---|---|---|---|",
    ]
    for name, row in results["fits"].items():
        more = "" if row["difference"] is None else show(row["difference"])
        lines.append(f"| {name} | {show(row['log_score'])} ({row['constant']:.4f}) | {show(row['mutual_information'])} | {more} |")
    return "\n".join(lines) + "\n"


def picture(images: list[tuple[str, np.ndarray, np.ndarray | None, np.ndarray, np.ndarray, np.ndarray]], photos: bool) -> Any:
    """One row per scene: probability, entropy, mutual information; before them the image and the share of annotators, if wanted."""
    from matplotlib.figure import Figure

    titles = ("image", "share of annotators", "probability", "entropy [nats]", "mutual information [nats]")
    figure = Figure(figsize=(10.4 if photos else 6.6, 1.5 * len(images) + 0.5), layout="constrained")
    first = 0 if photos else 2
    titles = titles[first:]
    *axes, bars = figure.subplots(len(images) + 1, len(titles), height_ratios=[1.0] * len(images) + [0.07])
    limits = (None, 1.0, 1.0, np.log(2.0), max(float(np.quantile(row[5], 0.995)) for row in images))[first:]
    for across, (name, *maps) in zip(axes, images, strict=True):
        for ax, values, limit, title in zip(across, maps[first:], limits, titles, strict=True):
            ax.set(xticks=[], yticks=[])
            if across is axes[0]:
                ax.set_title(title, fontsize=9)
            if values is None:
                ax.axis("off")
                continue
            shown = np.clip(0.45 + 0.25 * values, 0, 1) if values.ndim == 3 else values
            colours = {"image": None, "entropy [nats]": "cividis", "mutual information [nats]": "cividis"}.get(title, "gray_r")
            drawn = ax.imshow(shown, cmap=colours, vmin=0.0, vmax=limit, interpolation="nearest")
            ax.spines[:].set_visible(False)
            if across is axes[0]:
                bar = bars[titles.index(title)]
                if limit is None:
                    bar.axis("off")
                else:
                    figure.colorbar(drawn, cax=bar, orientation="horizontal").ax.tick_params(labelsize=7)
        across[0].set_ylabel(name, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with the two files; default: ALEATOR_DATA")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/segmentation.png"))
    parser.add_argument(
        "--photos", action="store_true", help="show the data too; they come without a licence, so do not commit such a picture"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/segmentation.json"))
    args = parser.parse_args()

    data = datasets.load("bsds500_multiannotator", args.data)
    x, marks = halve(data["x_train"], data["boundary_train"])
    x_test, marks_test = halve(data["x_test"], data["boundary_test"])
    flat = marks_test.reshape(len(x_test), ANNOTATORS, -1)
    count, others = flat.sum(axis=1), unlike(x_test, datasets.load("gtsrb_ood", args.data)["x"])
    rate = marks.mean()
    constant = float(np.mean(flat * np.log(rate) + (1 - flat) * np.log1p(-rate)))

    results: dict[str, Any] = {"fits": {}, "scenes": {}}
    predictions = {}
    for number, (name, drawings) in enumerate({"5 drawings per image": marks, "1 drawing per image": marks[:, :1]}.items()):
        began = time.perf_counter()
        result = fit(number, x, drawings, args.rate, args.steps)
        pred = predictions[name] = result.predict(10 + number, x_test, NUM_SAMPLES)
        p = np.clip(pred.mean, 1e-6, 1 - 1e-6)[:, None]
        score = (flat * np.log(p) + (1 - flat) * np.log1p(-p)).mean(axis=(1, 2))
        information = pred.mutual_information.mean(axis=1)
        if number == 0:
            first, seen = result, information
        results["fits"][name] = {
            "log_score": mean_and_error(score),
            "constant": constant,
            "mutual_information": mean_and_error(information),
            "difference": None if number == 0 else mean_and_error(information - seen),
            "seconds": time.perf_counter() - began,
        }
        print(f"{name}: {results['fits'][name]['seconds']:.0f} s; {result.status}", flush=True)

    pred = predictions["5 drawings per image"]
    views = {"probability": pred.mean, "entropy": pred.entropy, "mutual_information": pred.mutual_information}
    results["marks"] = {name: by_marks(values, count) for name, values in views.items()}
    rows = []
    for at in (3, 17, 28):
        maps = [values[at].reshape(HEIGHT, WIDTH) for values in views.values()]
        rows.append(("test scene", x_test[at], (count[at] / ANNOTATORS).reshape(HEIGHT, WIDTH), *maps))
    for number, (name, scenes) in enumerate({"test scenes": x_test, **others}.items()):
        other = pred if name == "test scenes" else first.predict(20 + number, scenes, NUM_SAMPLES)
        entropy, information = other.entropy, other.mutual_information
        results["scenes"][name] = {
            "entropy": mean_and_error(entropy.mean(axis=1)),
            "mutual_information": mean_and_error(information.mean(axis=1)),
            "difference": None if name == "test scenes" else mean_and_error(information.mean(axis=1) - seen),
        }
        if name in ("mosaic of traffic signs", "pixels shuffled"):
            maps = [values[17].reshape(HEIGHT, WIDTH) for values in (other.mean, entropy, information)]
            rows.append((name, scenes[17], None, *maps))

    print(table(results))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    plots.save(picture(rows, args.photos), args.picture, dpi=110)


if __name__ == "__main__":
    main()
