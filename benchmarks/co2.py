"""The seasonal dynamic linear model on Mauna Loa CO₂, variances by the variationally inferred sampler, states summed out exactly.

    python benchmarks/co2.py --data co2_monthly_637.npy [--steps 150] [--out benchmarks/results/co2.json]

637 monthly values, standardised with all of them as in the published experiment; fitted on the first 120 months, 24 forecast. Scores are in
standardised units: mean absolute error of the predictive mean, score of the central 95 % interval (both lower is better), mean entropy of the
months' Gaussians with the forecast's moments (lower is sharper), and the log score of the months under them (higher is better).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator.latent.linear_dynamics import Seasonal, Structural, Trend

IN, OUT = 120, 24
PUBLISHED = {"T = 0": (0.270, 2.537, 15.247), "T = 5": (0.239, 2.401, 13.461)}  # MAE, entropy, interval score of the paper
# Guesses in standard deviations of the fitted decade, 2 ppm: months differ by 0.2 ppm from a curve; a slope of 0.02 a month turns by a
# twentieth of itself a month; the season changes by a hundredth.
MODEL = Structural((Trend(0.05, 0.001), Seasonal(12, 0.01)), spread=0.1)


def scores(mean: np.ndarray, std: np.ndarray, lower: np.ndarray, upper: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    outside = np.maximum(lower - truth, 0.0) + np.maximum(truth - upper, 0.0)
    logs = -0.5 * ((truth - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return {
        "mae": float(np.mean(np.abs(mean - truth))),
        "entropy": float(np.mean(np.log(std) + 0.5 * np.log(2 * np.pi * np.e))),
        "interval_score": float(np.mean(upper - lower + 2.0 / 0.05 * outside)),
        "log_score": float(np.mean(logs)),
        "covered": float(np.mean(outside == 0.0)),
    }


def refined(series: np.ndarray, steps: int, num_refine: int, draws: int) -> dict[str, Any]:
    past, truth = series[:IN], series[IN : IN + OUT]
    method = al.Refined(num_refine=num_refine, num_steps=steps, num_start=200, num_draws=2, num_samples=300, learning_rate=0.05)
    clock = time.process_time()
    fit = al.fit(0, MODEL, past, method, progress=False)
    forecast = fit.model.forecast(1, fit.sample(2, draws), past, OUT)
    score = scores(forecast.mean, forecast.std, *forecast.interval(0.95), truth)
    bound = {"bound": fit.log_evidence.value, "bound_stderr": fit.log_evidence.stderr}
    return score | bound | {"processor_seconds": time.process_time() - clock, "status": fit.status}


def naive(series: np.ndarray) -> float:
    """MAE of last year's month plus the mean yearly rise."""
    past, truth = series[:IN], series[IN : IN + OUT]
    rise = np.mean(past[12:] - past[:-12])
    ahead = np.arange(OUT)
    return float(np.mean(np.abs(past[IN - 12 + ahead % 12] + rise * (1 + ahead // 12) - truth)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/co2.json"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    raw = np.load(args.data).astype(float)
    series = (raw - raw.mean()) / raw.std()
    results: dict[str, Any] = {"published": PUBLISHED, "seasonal naive with drift, mae": naive(series)}
    for num_refine in (0, 5):
        results[f"Refined, T = {num_refine}"] = refined(series, args.steps, num_refine, args.draws)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False))
        print(json.dumps(results, indent=1, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
