"""Samplers on a Bayesian neural network, beside NumPyro's NUTS: gradients per second, compilation, effective draws per second.

    python benchmarks/samplers.py [--draws 300] [--repeats 3] [--samplers nuts hmc …] [--out benchmarks/results/samplers.json]

A 1×50 tanh network on 500 rows of 8 inputs, noise 0.1 known, prior N(0, 1) on weights that are divided by √fan-in: 501 weights. Every
sampler sees the same posterior from the same starts, trees of depth 8 at most. Gradients per second: one chain, all gradients of warm-up
and sampling over the whole time. Effective draws: two chains on two cores, median bulk ESS of the predictions at 20 test points over the
time of warm-up and sampling. First calls (compilation) are timed apart. Runs alternate between the samplers; ratios are of medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # for NumPyro's parallel chains; ours need none

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al
from aleator import convergence

N, D, H, NOISE, DEPTH = 500, 8, 50, 0.1, 8


def data(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D)).astype(np.float32)
    direction = np.random.default_rng(7).normal(size=D)
    return x, (np.sin(2.0 * x @ direction / np.sqrt(D)) + NOISE * rng.normal(size=rows)).astype(np.float32)


def function(params: dict, x: Any) -> Any:
    return (jnp.tanh(x @ params["w1"] / np.sqrt(D).item() + params["b1"]) @ params["w2"] / np.sqrt(H).item())[:, None] + params["b2"]


def start(key: Any) -> dict:
    keys = jax.random.split(key, 4)
    shapes = {"w1": (D, H), "b1": (H,), "w2": (H,), "b2": (1,)}
    return {name: 0.3 * jax.random.normal(k, shape) for (name, shape), k in zip(shapes.items(), keys, strict=True)}


MODEL = al.BNN((function, start(jax.random.key(0))), al.Gaussian(NOISE), al.Normal(1.0))


def samplers(draws: int) -> dict[str, Any]:
    common = {"num_samples": draws, "num_warmup": draws}
    return {
        "NUTS": lambda chains: al.NUTS(num_chains=chains, max_depth=DEPTH, **common),
        "HMC": lambda chains: al.HMC(num_chains=chains, **common),
        "Microcanonical": lambda chains: al.Microcanonical(num_chains=chains, **common),
    }


def ours(method: Any, seed: int, train: tuple, test: np.ndarray) -> dict[str, Any]:
    starts = jax.vmap(start)(jax.random.split(jax.random.key(seed), method.num_chains))
    clock = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = al.fit(
            seed, MODEL, train, method, progress=False, init=al.posterior.Draws({"network": starts, "likelihood": {}, "prior": {}})
        )
    seconds = time.perf_counter() - clock
    predictions = fit.predict(0, test).draws.reshape(method.num_chains, -1, len(test))
    return {"seconds": seconds, "gradients": float(fit.info["evaluations"].sum()), "predictions": predictions}


def numpyro(seed: int, train: tuple, test: np.ndarray, draws: int, chains: int, cache: dict) -> dict[str, Any]:
    from numpyro.infer import MCMC, NUTS

    x, y = jnp.asarray(train[0]), jnp.asarray(train[1])

    def potential(params: dict) -> Any:
        prior = sum(0.5 * jnp.sum(leaf**2) for leaf in params.values())
        return prior + 0.5 * jnp.sum((y - function(params, x)[:, 0]) ** 2) / NOISE**2

    if chains not in cache:
        kernel = NUTS(potential_fn=potential, max_tree_depth=DEPTH)
        how = "parallel" if chains > 1 else "sequential"
        # Warm-up is collected too, so that its gradients are counted and not guessed.
        cache[chains] = MCMC(kernel, num_warmup=draws, num_samples=draws, num_chains=chains, chain_method=how, progress_bar=False)
    sampler = cache[chains]
    starts = jax.vmap(start)(jax.random.split(jax.random.key(seed), chains))
    starts = starts if chains > 1 else jax.tree.map(lambda leaf: leaf[0], starts)
    clock = time.perf_counter()
    sampler.warmup(jax.random.key(seed), init_params=starts, extra_fields=("num_steps",), collect_warmup=True)
    warm = float(np.sum(sampler.get_extra_fields()["num_steps"]))
    sampler.run(jax.random.key(seed + 1), extra_fields=("num_steps",))
    samples = jax.block_until_ready(sampler.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - clock
    sampler._warmup_state = sampler._last_state = None  # the next call warms up again
    predictions = jax.vmap(jax.vmap(lambda p: function(p, test)[:, 0]))(samples)
    steps = float(np.sum(sampler.get_extra_fields()["num_steps"]))
    return {"seconds": seconds, "gradients": warm + steps, "predictions": np.asarray(predictions)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    train, test = data(N, 0), data(20, 1)[0]
    cache: dict = {}
    made = samplers(args.draws)
    runs = {name: (lambda seed, chains, name=name: ours(made[name](chains), seed, train, test)) for name in args.samplers}
    runs["NumPyro NUTS"] = lambda seed, chains: numpyro(seed, train, test, args.draws, chains, cache)
    out: dict[str, Any] = {name: {"rate": [], "ess": [], "gradients_per_ess": [], "rate2": []} for name in runs}
    for chains in (1, 2):
        for name, run in runs.items():
            clock = time.perf_counter()
            run(1, chains)
            out[name][f"first_{chains}"] = time.perf_counter() - clock
        for seed in range(2, 2 + args.repeats):
            for name, run in runs.items():
                result = run(seed, chains)
                rate = result["gradients"] / result["seconds"]
                if chains == 1:
                    out[name]["rate"].append(rate)
                    out[name]["seconds_1"] = result["seconds"]
                else:
                    ess = float(np.median(convergence.ess_bulk(result["predictions"])))
                    out[name]["rate2"].append(rate)
                    out[name]["ess"].append(ess / result["seconds"])
                    out[name]["gradients_per_ess"].append(result["gradients"] / ess)
                    out[name]["rhat"] = float(np.max(convergence.rhat(result["predictions"])))
                print(
                    name,
                    chains,
                    f"{rate:.0f} gradients/s",
                    {k: np.round(v[-1], 2) for k, v in out[name].items() if isinstance(v, list) and v},
                    flush=True,
                )
    return out


def table(results: dict) -> str:
    base = {key: np.median(results["NumPyro NUTS"][key]) for key in ("rate", "ess")}
    lines = [
        "| sampler | gradients/s, 1 chain ↑ | ÷ NumPyro | gradients/s, 2 chains | first call s ↓ | ESS/s of predictions, 2 chains ↑ | ÷ NumPyro | gradients per ESS ↓ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        rate, ess = np.median(row["rate"]), np.median(row["ess"])
        lines.append(
            f"| {name} | {rate:,.0f} | {rate / base['rate']:.2f} | {np.median(row['rate2']):,.0f} | {row['first_1'] - row['seconds_1']:.1f} | {ess:.1f} | "
            f"{ess / base['ess']:.2f} | {np.median(row['gradients_per_ess']):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samplers", nargs="+", default=list(samplers(1)), choices=list(samplers(1)))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/samplers.json"))
    args = parser.parse_args()
    results = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    text = table(results)
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
