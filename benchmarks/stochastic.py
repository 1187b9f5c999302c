"""Stochastic-gradient samplers: steps per second beside a hand-written scan and BlackJAX, control variates beside NUTS, MNIST.

    python benchmarks/stochastic.py [speed] [logistic [--nuts]] [mnist --data DIR] [--steps 2000] [--repeats 5] [--out benchmarks/results/stochastic.json]

speed: SGLD steps on an MLP 784-300-100-10, batches of 128 of 4,096 random rows. Arms run one after the other, `repeats` times round, on
steps that are compiled already; ratios are of medians. Ours is a whole `al.fit` with one draw kept in 20 steps.
logistic: N = 100,000, d = 50, batches of 1 %: variance of the gradient with and without control variates at draws of the posterior, and the
posterior means in units of posterior standard deviations, beside the mode (at this N the posterior is Gaussian to a thousandth of them)
and, with --nuts, beside NUTS; with the passes over the rows that each took.
mnist: a 784-1200-1200-10 network by SGLD and preconditioned SGLD, 100 draws, beside the published rows; checkpointed, minutes to hours.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import datasets

ROWS, BATCH, STEP = 4096, 128, 1e-6
PUBLISHED = {"SGLD": (-828, 1.76), "preconditioned SGLD": (-661, 1.76)}  # JavierAntoran/Bayesian-Neural-Networks


def mlp() -> tuple[al.BNN, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    model = al.BNN(al.networks.MLP(784, (300, 100), 10), al.Categorical(10), al.Normal(1.0))
    return model, (rng.normal(size=(ROWS, 784)).astype(np.float32), rng.integers(0, 10, ROWS))


def arms(steps: int) -> dict[str, Callable[[int], Any]]:
    """name → run(seed), each making `steps` steps."""
    import blackjax

    model, (x, y) = mlp()
    bound = model.bind(x, y[:, None])
    network = bound.init(jax.random.key(0))["network"]
    x_all, y_all = jnp.asarray(x), jnp.asarray(y)

    def log_joint(net: Any, rows: Any) -> Any:
        logits = jax.nn.log_softmax(bound.apply(net, x_all[rows], None))
        prior = -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(net))
        return jnp.sum(jnp.take_along_axis(logits, y_all[rows][:, None], 1)) * (ROWS / BATCH) + prior

    def scan(step: Callable, impl: str) -> Callable[[int], Any]:
        whole = jax.jit(lambda net, keys, rows: jax.lax.scan(step, net, (keys, rows)))

        def run(seed: int) -> Any:
            rows = jnp.asarray(np.random.default_rng(seed).integers(0, ROWS, (steps, BATCH)))
            return jax.block_until_ready(whole(network, jax.random.split(jax.random.key(seed, impl=impl), steps), rows))

        return run

    def by_hand(net: Any, inputs: Any) -> Any:
        key, rows = inputs
        value, gradient = jax.value_and_grad(log_joint)(net, rows)
        leaves, structure = jax.tree.flatten(net)
        keys = jax.random.split(key, len(leaves))
        moved = [
            leaf + 0.5 * STEP * g + STEP**0.5 * jax.random.normal(k, leaf.shape)
            for leaf, g, k in zip(leaves, jax.tree.leaves(gradient), keys, strict=True)
        ]
        return jax.tree.unflatten(structure, moved), value

    def plain(net: Any, inputs: Any) -> Any:
        value, gradient = jax.value_and_grad(log_joint)(net, inputs[1])
        return jax.tree.map(lambda leaf, g: leaf + 0.5 * STEP * g, net, gradient), value

    peer = blackjax.sgld(lambda net, rows: jax.grad(log_joint)(net, rows))
    theirs = lambda net, inputs: (peer.step(inputs[0], net, inputs[1], 0.5 * STEP), 0.0)
    settings = {"num_warmup": 0, "num_chains": 1, "thin": 20, "batch_size": BATCH, "num_search": 0, "num_samples": steps // 20}
    ours = lambda make: lambda seed: al.fit(seed, model, (x, y), make(**settings), progress=False)
    return {
        "plain gradient step, scan": scan(plain, "threefry2x32"),
        "SGLD by hand, scan": scan(by_hand, "threefry2x32"),
        "SGLD by hand, scan, philox": scan(by_hand, "philox2x32"),
        "SGLD, BlackJAX in a scan": scan(theirs, "threefry2x32"),
        "SGLD, ours": ours(lambda **given: al.SGLD(STEP, **given)),
        "SGLD, ours, noise not corrected": ours(lambda **given: al.SGLD(STEP, correct_noise=False, **given)),
        "SGHMC, ours": ours(lambda **given: al.SGHMC(STEP, 0.1, **given)),
    }


def speed(steps: int, repeats: int) -> dict[str, Any]:
    runs = arms(steps)
    for run in runs.values():
        run(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            clock = time.perf_counter()
            run(1 + repeat)
            seconds[name].append(time.perf_counter() - clock)
    rates = {name: steps / float(np.median(values)) for name, values in seconds.items()}
    reference = ("SGLD by hand, scan", "SGLD by hand, scan, philox", "SGLD, BlackJAX in a scan", "plain gradient step, scan")
    ratios = {f"ours / {name}": rates["SGLD, ours"] / rates[name] for name in reference}
    return {"steps per second": rates, "ratios": ratios, "steps": steps, "repeats": repeats}


def logistic(nuts: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows, width, batch = 100_000, 50, 1000
    x = rng.normal(size=(rows, width)).astype(np.float32)
    y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-x @ rng.normal(size=width) / np.sqrt(width)))).astype(int)
    model = al.LinearModel(al.features.Identity(), al.Bernoulli(), al.Normal(1.0))
    mode = al.fit(0, model, (x, y), al.MAP(num_steps=60, optimizer="lbfgs"), progress=False)
    laplace = al.fit(0, model, (x, y), al.Laplace("full"), init=mode, progress=False)
    drawn = np.asarray(laplace.sample(0, 4000)["network"]["weight"], np.float64).reshape(4000, -1)
    mean, sd = np.ravel(mode.posterior.params["network"]["weight"]), drawn.std(axis=0)
    weights = lambda fit: np.asarray(fit.posterior.params["network"]["weight"], np.float64).reshape(2, -1, width + 1)
    methods: dict[str, tuple[Any, int]] = {}
    common = {"friction": 0.3, "num_samples": 1500, "num_warmup": 300, "num_chains": 2, "thin": 4, "batch_size": batch, "num_search": 0}
    methods["Underdamped, control variates"] = al.Underdamped(control_variates="mode", **common), 2
    methods["Underdamped"] = al.Underdamped(**common), 1
    if nuts:
        methods["NUTS"] = al.NUTS(num_samples=400, num_warmup=300, num_chains=2), 0
    out: dict[str, Any] = {}
    for name, (method, gradients) in methods.items():
        clock = time.perf_counter()
        fit = al.fit(2, model, (x, y), method, init=mode, progress=False)
        seconds, health = time.perf_counter() - clock, fit.manifest["health"]
        error, own = np.abs(weights(fit).mean(axis=(0, 1)) - mean) / sd, al.convergence.mcse(weights(fit)) / sd
        out[name] = {
            "seconds": seconds,
            "passes over the rows": health["gradients"] * gradients * batch / rows if gradients else float(fit.info["evaluations"].sum()),
            "mean and largest error of the means, posterior sd": [float(error.mean()), float(error.max())],
            "Monte Carlo error of the means, posterior sd": float(own.mean()),
            "sd / Laplace's": float(np.mean(weights(fit).std(axis=(0, 1)) / sd)),
            "status": fit.status,
        }
        if gradients:
            out[name]["noise of the gradient / step size"] = health["gradient_noise"] / health["step_size"]
    return out


def mnist(folder: str | None, epochs: int) -> dict[str, Any]:
    data = datasets.load("mnist", folder)
    scale = lambda pixels: (pixels.reshape(-1, 784) / 255.0).astype(np.float32)
    train, test = ((scale(data[f"x_{part}"]), data[f"y_{part}"].astype(int)) for part in ("train", "test"))
    model = al.BNN(al.networks.MLP(784, (1200, 1200), 10), al.Categorical(10), al.Normal(1.0))
    steps = epochs * 60_000 // 256
    common = {"num_samples": 100, "thin": steps // 200, "num_warmup": steps // 4, "num_search": steps // 4, "search_rate": 1e-3}
    common |= {"num_chains": 1, "batch_size": 256}
    methods = {"SGLD": al.SGLD(2e-6, **common), "preconditioned SGLD": al.SGLD(1e-6, preconditioner="rmsprop", **common)}
    out = {}
    for name, method in methods.items():
        work = Path("stochastic_work") / name
        fit = al.fit(0, model, train, method, checkpoint=work, resume=(work / "checkpoint.safetensors").exists())
        predictive = fit.predict(1, test[0])
        wrong = np.asarray(predictive.probs.argmax(-1) != test[1])
        score = float(np.sum(predictive.log_prob(test[1])))
        out[name] = {"log_likelihood": score, "error": 100.0 * float(wrong.mean()), "minutes": fit.manifest["seconds"] / 60}
        out[name] |= {"published": PUBLISHED[name], "settings": repr(method), "status": fit.status}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["speed"], choices=["speed", "logistic", "mnist"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--nuts", action="store_true", help="minutes more")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stochastic.json"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    makers = {
        "speed": lambda: speed(args.steps, args.repeats),
        "logistic": lambda: logistic(args.nuts),
        "mnist": lambda: mnist(args.data, args.epochs),
    }
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        results[part] = makers[part]()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
        print(json.dumps({part: results[part]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
