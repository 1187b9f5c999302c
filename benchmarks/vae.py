"""Autoencoders on MNIST: negative log-likelihood of test images, certified by annealing, and completion of quadrants.

    python benchmarks/vae.py --data DIR [--rows vae iwae quadrant1 …] [--minutes 90] [--out benchmarks/results/vae.json] [--check]

DIR (or ALEATOR_DATA) holds mnist.npz. vae, iwae: 50 hidden numbers, two hidden layers of 200 tanh units each way, pixels binarised afresh at
every step, the test images once; scored by 5,000 importance-weighted draws on all 10,000 test images, and by forward annealing on 500 of them;
the sandwich on 500 images simulated from the model says what either score may leave out. Training takes --minutes a row: a short run measures
a step, the number of steps follows. The importance-weighted row begins with the plain bound, which costs a twentieth, and goes on with k = 50.
quadrant1…3: that many quadrants are seen (lower left, upper left, lower right), the others predicted: −log p(y | x) by 1,000 draws.
speed: one training step beside NumPyro's on the same networks. A run that is stopped goes on where it was (--work DIR); finished rows are kept
in the JSON file. --check: seconds, not hours, on few images, to see that all parts work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets
from aleator.latent import VAE

# Burda et al. (2016) after 3,280 epochs; Pyro's tutorial of conditional autoencoders. Nats, lower is better.
PUBLISHED = {"vae": 86.76, "iwae": 84.78, "quadrant1": 71.8, "quadrant2": 51.0, "quadrant3": 24.2}
BARS = {"vae": 87.5, "iwae": 86.2, "quadrant1": 71.8, "quadrant2": 51.0, "quadrant3": 24.2}
TITLES = {
    "vae": "VAE",
    "iwae": "IWAE, k = 50",
    "quadrant1": "one quadrant seen",
    "quadrant2": "two quadrants seen",
    "quadrant3": "three quadrants seen",
}
QUADRANTS = (np.s_[14:, :14], np.s_[:14, :14], np.s_[14:, 14:], np.s_[:14, 14:])  # in the order in which they are seen
EPOCH = 60_000


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training: its share of the time, and how it goes."""

    share: float
    estimator: str
    num_importance: int
    batch_size: int
    learning_rate: float

    def method(self, num_steps: int) -> al.Method:
        return al.Amortised(num_steps, self.batch_size, self.learning_rate, self.estimator, self.num_importance)


STAGES = {
    "vae": (Stage(1.0, "elbo", 1, 100, 1e-3),),
    "iwae": (Stage(0.15, "elbo", 1, 100, 1e-3), Stage(0.85, "dreg", 50, 20, 5e-4)),
    "quadrant": (Stage(1.0, "iwae", 5, 100, 1e-3),),
}


def first(model: VAE, data: Any) -> Any:
    """Parameters to start from: the decoder's last bias at the log odds of each pixel's mean."""
    x, y = data
    bound = model.bind(x, y)
    params = jax.jit(bound.init)(jax.random.key(0))
    mean = np.clip(y.reshape(len(y), -1).mean(axis=0), 1e-3, 1 - 1e-3)
    last = params["decoder0"][f"layer{len(bound.decoder)}"]
    last["bias"] = jnp.asarray(np.log(mean / (1 - mean)), jnp.float32)
    return params


def seconds_per_step(model: VAE, data: Any, stage: Stage, params: Any) -> float:
    """Of a run long enough for compilation, and its noise, not to matter, less that of two steps."""

    def took(steps: int) -> float:
        begin = time.perf_counter()
        al.fit(0, model, data, stage.method(steps), init=params)
        return time.perf_counter() - begin

    base, steps = took(2), max(8, 200 // stage.num_importance)
    while (whole := took(steps)) < 2.0 * base + 2.0:
        steps *= 4
    return (whole - base) / steps


def train(row: str, model: VAE, data: Any, stages: tuple[Stage, ...], args: argparse.Namespace) -> tuple[al.Fit, dict[str, float]]:
    """All stages in turn, each from where the last one ended. What was planned is kept beside the checkpoints, so that a rerun agrees."""
    at: Any = first(model, data)
    record = {"minutes": 0.0, "epochs": 0.0}
    for number, stage in enumerate(stages):
        work = Path(args.work) / f"{row}{number}"
        plan = work / "plan.json"
        if plan.exists():
            steps = json.loads(plan.read_text())["num_steps"]
        else:
            steps = 50 if args.check else args.epochs and int(args.epochs * stage.share * len(data[1]) / stage.batch_size)
            steps = steps or max(50, int(60 * args.minutes * stage.share / seconds_per_step(model, data, stage, at)))
            work.mkdir(parents=True, exist_ok=True)
            plan.write_text(json.dumps({"num_steps": steps}))
        resume = (work / "checkpoint.safetensors").exists()
        print(f"{row}: {stage.estimator} k={stage.num_importance}, {steps} steps of {stage.batch_size}", flush=True)
        at = al.fit(number, model, data, stage.method(steps), init=at, checkpoint=work, checkpoint_every=20.0, resume=resume)
        record["minutes"] += at.manifest["seconds"] / 60
        record["epochs"] += steps * stage.batch_size / len(data[1])
    return at, record


def densities(row: str, images: dict[str, np.ndarray], args: argparse.Namespace) -> dict[str, Any]:
    train_images, test = images["train"], images["test"]
    model = VAE(50, (200, 200), (200, 200), al.Bernoulli(), binarise=True)
    fit, record = train(row, model, (None, train_images), STAGES[row], args)
    scores = -al.latent.log_prob(1, fit, test, args.draws)
    few = test[: args.annealed]
    below = -al.latent.ais(2, fit, few, num_steps=args.temperatures)
    found = al.latent.sandwich(3, fit, args.annealed, num_steps=args.temperatures)
    simulated = -al.latent.log_prob(4, fit, found.y, args.draws)
    return record | {
        "nll": mean_and_error(scores),
        "draws": args.draws,
        "ais": mean_and_error(below),
        "same_by_draws": mean_and_error(scores[: args.annealed]),
        "sandwich_width": (found.width, found.stderr),
        "simulated": {"draws": mean_and_error(simulated), "lower": mean_and_error(-found.upper), "upper": mean_and_error(-found.lower)},
    }


def quadrants(row: str, images: dict[str, np.ndarray], args: argparse.Namespace) -> dict[str, Any]:
    number = int(row[-1])
    cut = lambda pictures, which: np.concatenate([pictures[(slice(None), *q)].reshape(len(pictures), -1) for q in which], axis=1)
    x, y = cut(images["train"], QUADRANTS[:number]), cut(images["train"], QUADRANTS[number:])
    model = VAE(50, (400, 400), (400, 400), al.Bernoulli(), binarise=True, activation="relu")
    fit, record = train(row, model, (x, y), STAGES["quadrant"], args)
    # Seen pixels are grey, as in the tutorial; those to be predicted are binarised.
    seen, hidden = cut(images["grey"], QUADRANTS[:number]), cut(images["test"], QUADRANTS[number:])
    scores = -al.latent.log_prob(1, fit, hidden, min(args.draws, 1000), x=seen)
    return record | {"nll": mean_and_error(scores), "draws": min(args.draws, 1000)}


def speed(images: dict[str, np.ndarray]) -> dict[str, float]:
    """Milliseconds of a step of the plain bound, batches of 100: ours and NumPyro's, in turn."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.optim import Adam

    y = images["train"]
    model, stage = VAE(50, (200, 200), (200, 200), al.Bernoulli(), binarise=True), Stage(1.0, "elbo", 1, 100, 1e-3)
    bound = model.bind(None, y)
    nets = dict(bound.networks)
    start = bound.init(jax.random.key(0))

    def generate(batch: Any) -> None:
        params = numpyro.param("decoder", start["decoder0"])
        with numpyro.plate("rows", len(batch)):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([50]).to_event(1))
            numpyro.sample("y", dist.Bernoulli(logits=nets["decoder0"].apply(params, z)).to_event(1), obs=batch)

    def guide(batch: Any) -> None:
        h = nets["encoder0"].apply(numpyro.param("encoder", start["encoder0"]), batch)
        with numpyro.plate("rows", len(batch)):
            numpyro.sample("z", dist.Normal(h[:, :50], jnp.exp(h[:, 50:])).to_event(1))

    svi = SVI(generate, guide, Adam(1e-3), Trace_ELBO())
    rows = jnp.asarray(y.reshape(len(y), -1))

    @jax.jit
    def update(state: Any, key: Any) -> Any:
        key_rows, key_pixels = jax.random.split(key)
        batch = rows[jax.random.randint(key_rows, (100,), 0, len(rows))]
        batch = (jax.random.uniform(key_pixels, batch.shape) < batch).astype(jnp.float32)
        return svi.update(state, batch)[0]

    state = svi.init(jax.random.key(0), rows[:100])
    keys = jax.random.split(jax.random.key(1), 1000)
    state = update(state, keys[0])
    ours, theirs = [], []
    for _ in range(3):
        ours.append(seconds_per_step(model, (None, y), stage, None))
        begin = time.perf_counter()
        for key in keys:
            state = update(state, key)
        jax.block_until_ready(state)
        theirs.append((time.perf_counter() - begin) / len(keys))
    return {"aleator_ms": 1e3 * min(ours), "numpyro_ms": 1e3 * min(theirs), "ratio": min(theirs) / min(ours)}


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def load(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """train, grey: images in [0, 1]; test: the same as grey, binarised once."""
    data = datasets.load("mnist", args.data)
    grey = (data["x_test"] / 255.0).astype(np.float32)
    binary = (np.random.default_rng(0).uniform(size=grey.shape) < grey).astype(np.float32)
    rows, images = (64, 2000) if args.check else (min(args.test, len(grey)), EPOCH)
    return {"train": (data["x_train"][:images] / 255.0).astype(np.float32), "grey": grey[:rows], "test": binary[:rows]}


def table(results: dict[str, Any]) -> str:
    show = lambda pair: f"{pair[0]:.2f} ± {pair[1]:.2f}"
    lines = [
        "| model | −log p, nats ↓ | bar | published | by annealing, 500 images | the same by draws | sandwich, nats wide | minutes | epochs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in TITLES:
        if row in results:
            r = results[row]
            more = [show(r[name]) if name in r else "" for name in ("ais", "same_by_draws", "sandwich_width")]
            cells = [TITLES[row], show(r["nll"]), BARS[row], PUBLISHED[row], *more, f"{r['minutes']:.0f}", f"{r['epochs']:.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    if "speed" in results:
        s = results["speed"]
        lines.append(f"\nA step: {s['aleator_ms']:.2f} ms, NumPyro {s['numpyro_ms']:.2f} ms, {s['ratio']:.1f} times as fast.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--rows", nargs="+", default=[*TITLES, "speed"], choices=[*TITLES, "speed"])
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--epochs", type=float, help="of training, in place of --minutes")
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--test", type=int, default=10_000, help="test images scored, from the first")
    parser.add_argument("--annealed", type=int, default=500, help="images whose density is annealed")
    parser.add_argument("--temperatures", type=int, default=500)
    parser.add_argument("--work", default="vae_work", help="checkpoints")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vae.json"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        args.draws, args.annealed, args.temperatures = 50, 10, 20
    images = load(args)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for row in args.rows:
        if row in results:
            continue
        if row == "speed":
            results[row] = speed(images)
        else:
            results[row] = (quadrants if row.startswith("quadrant") else densities)(row, images, args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
        print(json.dumps({row: results[row]}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
