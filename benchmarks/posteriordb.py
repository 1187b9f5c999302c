"""Reference posteriors (posteriordb): every mean and standard deviation by NUTS, against 10,000 reference draws.

    python benchmarks/posteriordb.py --data DIR [--names kidiq …] [--samples 2000] [--out benchmarks/results/posteriordb.json]

DIR (or ALEATOR_DATA) holds posteriordb/*.npz. Each model is a bare log density on unconstrained parameters, through
`al.target_from_log_density`. The bar: |error| ≤ 5·√(MCSE² + se²) for means and standard deviations, MCSE ≤ 2 % of the standard deviation.
"""

from __future__ import annotations

import argparse
import itertools
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
from aleator import convergence, datasets

Case = tuple[Callable[[Any], Any], int, Callable[[np.ndarray], np.ndarray]]


def normal(x: Any, loc: Any, scale: Any) -> Any:
    """Σ log N(x; loc, scale²), without constants."""
    scale = jnp.broadcast_to(scale, jnp.shape(x))
    return jnp.sum(-0.5 * ((x - loc) / scale) ** 2 - jnp.log(scale))


def half_cauchy(log_scale: Any, width: float) -> Any:
    """log density of log σ for σ ~ HalfCauchy(width)."""
    return log_scale - jnp.log1p(jnp.exp(2.0 * (log_scale - np.log(width).item())))


def half_normal(log_scale: Any, width: float) -> Any:
    return log_scale - 0.5 * jnp.exp(2.0 * log_scale) / width**2


def last_positive(q: np.ndarray) -> np.ndarray:
    return np.concatenate([q[..., :-1], np.exp(q[..., -1:])], axis=-1)


def regression(x: np.ndarray, y: np.ndarray, prior: Callable[[Any, Any], Any]) -> Case:
    """y ~ N(Xβ, σ); prior(β, log σ). Sampled in the coordinates of X = QR, which cost nothing and are not correlated."""
    basis, triangle = np.linalg.qr(x)
    root = np.sqrt(len(x))
    basis, inverse = basis * root, np.linalg.inv(triangle / root)

    def density(q: Any) -> Any:
        return prior(inverse @ q[:-1], q[-1]) + normal(y, basis @ q[:-1], jnp.exp(q[-1]))

    return density, x.shape[1] + 1, lambda q: np.concatenate([q[..., :-1] @ inverse.T, np.exp(q[..., -1:])], axis=-1)


def arma(z: Any) -> Case:
    y = z["data_y"]

    def density(q: Any) -> Any:
        mu, phi, theta, log_sigma = q
        first = y[0] - (mu + phi * mu)

        def step(error: Any, pair: Any) -> tuple[Any, Any]:
            now, before = pair
            error = now - (mu + phi * before + theta * error)
            return error, error

        errors = jnp.concatenate([first[None], jax.lax.scan(step, first, (y[1:], y[:-1]))[1]])
        prior = normal(mu, 0.0, 10.0) + normal(phi, 0.0, 2.0) + normal(theta, 0.0, 2.0) + half_cauchy(log_sigma, 2.5)
        return prior + normal(errors, 0.0, jnp.exp(log_sigma))

    return density, 4, last_positive


def diamonds(z: Any) -> Case:
    x, y = z["data_X"][:, 1:] - z["data_X"][:, 1:].mean(axis=0), z["data_Y"]

    def prior(beta: Any, log_sigma: Any) -> Any:
        student = -2.0 * jnp.log1p(((beta[-1] - 8.0) / 10.0) ** 2 / 3.0) - 2.0 * jnp.log1p(jnp.exp(2.0 * log_sigma) / 300.0)
        return -0.5 * jnp.sum(beta[:-1] ** 2) + student + log_sigma

    return regression(np.column_stack([x, np.ones(len(y))]), y, prior)


def earnings(z: Any) -> Case:
    height, male = z["data_height"].astype(float), z["data_male"].astype(float)
    x = np.column_stack([np.ones_like(height), height, male, height * male])
    return regression(x, np.log(z["data_earn"].astype(float)), lambda beta, log_sigma: log_sigma)


def eight_schools(z: Any) -> Case:
    y, sigma = z["data_y"].astype(float), z["data_sigma"].astype(float)

    def density(q: Any) -> Any:
        effects = q[8] + jnp.exp(q[9]) * q[:8]
        return normal(q[:8], 0.0, 1.0) + normal(q[8], 0.0, 5.0) + half_cauchy(q[9], 5.0) + normal(y, effects, sigma)

    def constrain(q: np.ndarray) -> np.ndarray:
        tau = np.exp(q[..., 9:])
        return np.concatenate([q[..., 8:9] + tau * q[..., :8], q[..., 8:9], tau], axis=-1)

    return density, 10, constrain


def gp(z: Any) -> Case:
    x, y = z["data_x"].astype(float), z["data_y"]
    square = (x[:, None] - x) ** 2

    def density(q: Any) -> Any:
        rho, alpha, sigma = jnp.exp(q)
        factor = jnp.linalg.cholesky(alpha**2 * jnp.exp(-0.5 * square / rho**2) + sigma * jnp.eye(len(x)))
        white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        prior = 25.0 * q[0] - 4.0 * rho + half_normal(q[1], 2.0) + half_normal(q[2], 1.0)
        return prior - 0.5 * jnp.sum(white**2) - jnp.sum(jnp.log(jnp.diagonal(factor)))

    return density, 3, np.exp


def hmm(z: Any) -> Case:
    """Our hidden Markov model with its states summed out, under the program's own prior: first state uniform, ordered positive means."""
    y = z["data_y"]
    model = al.latent.HMM(2, al.latent.parts.KnownGaussian(1.0)).bind(None, y)

    def density(q: Any) -> Any:
        low, high = jnp.exp(q[2]), jnp.exp(q[2]) + jnp.exp(q[3])
        params = {"initial": jnp.zeros(1), "transition": q[:2, None], "parts": {"mean": jnp.stack([low, high])[:, None]}}
        data = jnp.sum(model.log_likelihood(params, al.Batch(None, jnp.asarray(y))))
        jacobian = jnp.sum(jax.nn.log_sigmoid(q[:2]) + jax.nn.log_sigmoid(-q[:2])) + q[2] + q[3]
        return data + normal(low, 3.0, 1.0) + normal(high, 10.0, 1.0) + jacobian

    def constrain(q: np.ndarray) -> np.ndarray:
        p = 1.0 / (1.0 + np.exp(-q[..., :2]))
        low = np.exp(q[..., 2])
        return np.stack([p[..., 0], 1 - p[..., 0], p[..., 1], 1 - p[..., 1], low, low + np.exp(q[..., 3])], axis=-1)

    return density, 4, constrain


def kidiq(z: Any) -> Case:
    x = np.column_stack([np.ones(len(z["data_mom_iq"])), z["data_mom_hs"], z["data_mom_iq"]])
    return regression(x, z["data_kid_score"].astype(float), lambda beta, log_sigma: half_cauchy(log_sigma, 2.5))


def kilpisjarvi(z: Any) -> Case:
    x = np.column_stack([np.ones(len(z["data_x"])), z["data_x"]]).astype(float)
    loc, scale = (np.array([float(z[f"data_p{what}alpha"]), float(z[f"data_p{what}beta"])]) for what in ("mu", "s"))
    return regression(x, z["data_y"], lambda beta, log_sigma: normal(beta, loc, scale) + log_sigma)


def mixture(z: Any) -> Case:
    """Our mixture with its labels summed out, under the program's own prior."""
    y = z["data_y"]
    model = al.latent.Mixture(2, al.latent.parts.Gaussian("spherical", mean=0.0, spread=1.0)).bind(None, y)

    def density(q: Any) -> Any:
        low, high, share = q[0], q[0] + jnp.exp(q[1]), q[4]
        params = {"weights": share[None], "parts": {"mean": jnp.stack([low, high])[:, None], "log_precision": -2.0 * q[2:4]}}
        terms = model.log_likelihood(params, al.Batch(None, jnp.asarray(y)))
        prior = normal(low, 0.0, 2.0) + normal(high, 0.0, 2.0) + half_normal(q[2], 2.0) + half_normal(q[3], 2.0)
        return prior + q[1] + 5.0 * (jax.nn.log_sigmoid(share) + jax.nn.log_sigmoid(-share)) + jnp.sum(terms)

    def constrain(q: np.ndarray) -> np.ndarray:
        return np.stack(
            [q[..., 0], q[..., 0] + np.exp(q[..., 1]), np.exp(q[..., 2]), np.exp(q[..., 3]), 1 / (1 + np.exp(-q[..., 4]))], axis=-1
        )

    return density, 5, constrain


def mesquite(z: Any) -> Case:
    logs = [np.log(z[f"data_{name}"].astype(float)) for name in ("diam1", "diam2", "canopy_height", "total_height", "density")]
    x = np.column_stack([np.ones(len(logs[0])), *logs, z["data_group"]])
    return regression(x, np.log(z["data_weight"]), lambda beta, log_sigma: log_sigma)


def elimination(z: Any) -> Case:
    """The concentration by fourth-order Runge–Kutta, `inner` steps between two times: one scan, the dose that is taken up worked out for all of its times at once.
    Large k_m and v_m mean the same together: the third coordinate is log v_m − log(k_m + c) with c about the data's."""
    times, observed, dose, volume = z["data_times"], z["data_C_hat"], float(z["data_D"]), float(z["data_V"])
    edges = np.concatenate([[float(z["data_t0"])], times])
    inner = 20
    width = np.repeat(np.diff(edges) / inner, inner)
    begin = np.concatenate([np.linspace(a, b, inner, endpoint=False) for a, b in itertools.pairwise(edges)])
    stages = begin[:, None] + width[:, None] * np.array([0.0, 0.5, 1.0])

    middle = float(np.median(observed))

    def density(q: Any) -> Any:
        q = jnp.stack([q[0], q[1], q[2] + jnp.log(jnp.exp(q[1]) + middle), q[3]])
        k_a, k_m, v_m, sigma = jnp.exp(q)
        taken = jnp.exp(-k_a * stages) * dose * k_a / volume
        gone = lambda c: v_m / volume * c / (k_m + c)

        def step(c: Any, now: Any) -> tuple[Any, Any]:
            h, (first, half, last) = now
            a = first - gone(c)
            b = half - gone(c + h / 2 * a)
            d = half - gone(c + h / 2 * b)
            e = last - gone(c + h * d)
            c = c + h / 6 * (a + 2 * b + 2 * d + e)
            return c, c

        found = jax.lax.scan(step, jnp.zeros(()), (jnp.asarray(width), taken))[1][inner - 1 :: inner]
        return sum(half_cauchy(u, 1.0) for u in q) + normal(np.log(observed), jnp.log(found), sigma)

    def constrain(q: np.ndarray) -> np.ndarray:
        k_a, k_m, ratio, sigma = np.moveaxis(np.exp(q), -1, 0)
        return np.stack([k_a, k_m, ratio * (k_m + middle), sigma], axis=-1)

    return density, 4, constrain


def blr(z: Any) -> Case:
    return regression(z["data_X"], z["data_y"], lambda beta, log_sigma: normal(beta, 0.0, 10.0) + half_normal(log_sigma, 10.0))


CASES: dict[str, Callable[[Any], Case]] = {
    "arma-arma11": arma,
    "diamonds-diamonds": diamonds,
    "earnings-logearn_interaction": earnings,
    "eight_schools-eight_schools_noncentered": eight_schools,
    "gp_pois_regr-gp_regr": gp,
    "hmm_example-hmm_example": hmm,
    "kidiq-kidscore_momhsiq": kidiq,
    "kilpisjarvi_mod-kilpisjarvi": kilpisjarvi,
    "low_dim_gauss_mix-low_dim_gauss_mix": mixture,
    "mesquite-logmesquite": mesquite,
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": elimination,
    "sblrc-blr": blr,
    "sblri-blr": blr,
}


def judge(draws: np.ndarray, z: Any) -> dict[str, float]:
    """Errors of means and standard deviations in units of their joint standard error. The reference draws are nearly independent."""
    reference = z["draws"].reshape(-1, z["draws"].shape[-1]).astype(float)
    sd, size = z["sd"], len(reference)
    error_mean = np.sqrt(convergence.mcse(draws) ** 2 + sd**2 / size)
    spread = (draws - draws.mean(axis=(0, 1))) ** 2
    kurtosis = ((reference - reference.mean(axis=0)) ** 4).mean(axis=0) / reference.var(axis=0) ** 2
    error_sd = np.sqrt((convergence.mcse(spread) / (2 * sd)) ** 2 + sd**2 * (kurtosis - 1) / (4 * size))
    return {
        "mean": float(np.max(np.abs(draws.mean(axis=(0, 1)) - z["mean"]) / error_mean)),
        "sd": float(np.max(np.abs(draws.std(axis=(0, 1)) - sd) / error_sd)),
        "mcse": float(np.max(convergence.mcse(draws) / sd)),
    }


def run(name: str, z: Any, samples: int, seed: int) -> dict[str, Any]:
    density, size, constrain = CASES[name](z)
    target = al.target_from_log_density(density, np.zeros(size))
    clock = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(seed, target, None, al.NUTS(num_samples=samples, num_warmup=1000), progress=False)
    seconds = time.perf_counter() - clock
    draws = np.asarray(fit.posterior.params, float).reshape(4, -1, size)
    return judge(constrain(draws), z) | {"seconds": seconds, "status": fit.status, "evaluations": fit.manifest["health"]["evaluations"]}


def table(results: dict) -> str:
    lines = [
        "| posterior | worst mean, joint standard errors ↓ (bar 5) | worst sd ↓ (bar 5) | MCSE, % of sd ↓ (bar 2) | seconds |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(
        lines + [f"| {n} | {r['mean']:.1f} | {r['sd']:.1f} | {100 * r['mcse']:.1f} | {r['seconds']:.0f} |" for n, r in results.items()]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--names", nargs="+", default=list(CASES))
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/posteriordb.json"))
    args = parser.parse_args()
    results = {}
    for name in [full for full in CASES if any(full.startswith(part) for part in args.names)]:
        results[name] = run(name, datasets.load(f"posteriordb/{name}", args.data), args.samples, args.seed)
        print(name, json.dumps(results[name]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    text = table(results)
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
