"""Samplers on a Bayesian neural network, beside NumPyro's NUTS: gradients per second, compilation, effective draws per second.

    python benchmarks/samplers.py [--draws 300] [--repeats 3] [--samplers NUTS HMC …] [--out benchmarks/results/samplers.json]

A 1×50 tanh network on 500 rows of 8 inputs, noise 0.1 known, prior N(0, 1) on weights that are divided by √fan-in: 501 weights. Every
sampler sees the same posterior from the same starts, trees of depth 8 at most. Gradients per second: one chain, all gradients of warm-up
and sampling over the whole time, by the clock and by processor time, which a busy machine leaves alone. Effective draws: two chains on two
cores, median bulk ESS of the predictions at 20 test points over the time of warm-up and sampling. Runs alternate between the samplers;
ratios are of medians.

First calls are timed apart, one chain, in processor seconds beyond a later call. NumPyro's is a plain `MCMC.run`, which compiles again in
every call; its later calls are put into one compiled function, a thread a chain, so that none of that is counted against its rates.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
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
    clock, processor = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = al.fit(
            seed, MODEL, train, method, progress=False, init=al.posterior.Draws({"network": starts, "likelihood": {}, "prior": {}})
        )
    spent = {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}
    predictions = fit.predict(0, test).draws.reshape(method.num_chains, -1, len(test))
    return spent | {"gradients": float(fit.info["evaluations"].sum()), "predictions": predictions}


def numpyro(seed: int, train: tuple, test: np.ndarray, draws: int, chains: int, cache: dict, first: bool) -> dict[str, Any]:
    from numpyro.infer import MCMC, NUTS

    x, y = jnp.asarray(train[0]), jnp.asarray(train[1])

    def potential(params: dict) -> Any:
        prior = sum(0.5 * jnp.sum(leaf**2) for leaf in params.values())
        return prior + 0.5 * jnp.sum((y - function(params, x)[:, 0]) ** 2) / NOISE**2

    def sampler() -> Any:
        kernel = NUTS(potential_fn=potential, max_tree_depth=DEPTH)
        return MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)

    def chain(key: Any, begin: dict) -> tuple[dict, Any, Any]:
        mcmc = sampler()
        # Warm-up is collected too, so that its gradients are counted and not guessed.
        mcmc.warmup(key, init_params=begin, extra_fields=("num_steps",), collect_warmup=True)
        warm = mcmc.get_extra_fields()["num_steps"]
        mcmc.run(mcmc.last_state.rng_key, extra_fields=("num_steps",))
        return mcmc.get_samples(), warm, mcmc.get_extra_fields()["num_steps"]

    keys, starts = jax.random.split(jax.random.key(seed), chains), jax.vmap(start)(jax.random.split(jax.random.key(seed), chains))
    each = [(keys[i], jax.tree.map(lambda leaf, i=i: leaf[i], starts)) for i in range(chains)]
    clock, processor = time.perf_counter(), time.process_time()
    if first:
        plain = sampler()
        plain.run(each[0][0], init_params=each[0][1])
        jax.block_until_ready(plain.get_samples())
        return {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}
    run = cache.setdefault("chain", jax.jit(chain))
    with ThreadPoolExecutor(chains) as pool:
        outs = list(pool.map(lambda args: jax.block_until_ready(run(*args)), each))
    spent = {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}
    samples = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[out[0] for out in outs])
    predictions = jax.vmap(jax.vmap(lambda p: function(p, test)[:, 0]))(samples)
    steps = float(sum(np.sum(warm) + np.sum(sampled) for _, warm, sampled in outs))
    return spent | {"gradients": steps, "predictions": np.asarray(predictions)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    train, test = data(N, 0), data(20, 1)[0]
    cache: dict = {}
    made = samplers(args.draws)
    runs = {name: (lambda seed, chains, first=False, name=name: ours(made[name](chains), seed, train, test)) for name in args.samplers}
    runs["NumPyro NUTS"] = lambda seed, chains, first=False: numpyro(seed, train, test, args.draws, chains, cache, first)
    out: dict[str, Any] = {
        name: {"rate": [], "rate_processor": [], "rate2": [], "ess": [], "ess_processor": [], "gradients_per_ess": []} for name in runs
    }
    jax.block_until_ready(jax.vmap(start)(jax.random.split(jax.random.key(0), 1)))  # the starts are nobody's first call
    for chains in (1, 2):
        for name, run in runs.items():
            if chains == 1:
                out[name]["first"] = run(1, 1, True)["processor"]
            run(1, chains)
        for seed in range(2, 2 + args.repeats):
            for name, run in runs.items():
                result = run(seed, chains)
                rate, row = result["gradients"] / result["seconds"], out[name]
                row["rate" if chains == 1 else "rate2"].append(rate)
                if chains == 1:
                    row["later"] = result["processor"]
                    row["rate_processor"].append(result["gradients"] / result["processor"])
                else:
                    ess = float(np.median(convergence.ess_bulk(result["predictions"])))
                    row["ess"].append(ess / result["seconds"])
                    row["ess_processor"].append(ess / result["processor"])
                    row["gradients_per_ess"].append(result["gradients"] / ess)
                    row["rhat"] = float(np.max(convergence.rhat(result["predictions"])))
                newest = {k: np.round(v[-1], 2) for k, v in row.items() if isinstance(v, list) and v}
                print(name, chains, f"{rate:.0f} gradients/s", newest, flush=True)
    return out


def table(results: dict) -> str:
    keys = ("rate", "rate_processor", "ess", "ess_processor")
    base = {key: np.median(results["NumPyro NUTS"][key]) for key in keys}
    lines = [
        "| sampler | gradients/s, 1 chain ↑ | ÷ NumPyro | per processor s ↑ | ÷ NumPyro | gradients/s, 2 chains | first call, processor s ↓ | ESS/s of predictions, 2 chains ↑ | ÷ NumPyro | ESS per processor s ↑ | ÷ NumPyro | gradients per ESS ↓ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        rate, rate_processor, ess, processor = (np.median(row[key]) for key in keys)
        lines.append(
            f"| {name} | {rate:,.0f} | {rate / base['rate']:.2f} | {rate_processor:,.0f} | {rate_processor / base['rate_processor']:.2f} | {np.median(row['rate2']):,.0f} | {row['first'] - row['later']:.1f} | {ess:.1f} | "
            f"{ess / base['ess']:.2f} | {processor:.1f} | {processor / base['ess_processor']:.2f} | {np.median(row['gradients_per_ess']):.0f} |"
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
