"""Have the chains converged? Rank-normalised split R-hat, effective sample sizes and what else can go wrong with a Markov chain.

All take draws (chains, n, …) and treat every trailing element as a quantity of its own. Formulas: Vehtari, Gelman, Simpson, Carpenter and
Bürkner, Rank-normalization, folding, and localization, 2021; E-BFMI: Betancourt 2016.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RHAT = 1.01  # above this, chains are not taken to agree
RHAT_FUNCTIONS = 1.05  # for functions of networks, whose posteriors are wide and many-modal
MIN_ESS = 100.0  # per chain of four: enough for a mean to 10 % of a standard deviation
FEW_DIVERGENCES = 5e-4  # share of transitions that may diverge by the chance of a far tail
EBFMI = 0.3  # below this, the energy is explored too slowly
FAR = 1e12  # no parameter of a proper posterior in sane units is there
MAX_QUANTITIES = 2000  # coordinates looked at in a large network


def rhat(draws: np.ndarray) -> np.ndarray:
    """Rank-normalised split R-hat: the larger of the one of the draws and the one of their distance from the median. 1 is best."""
    draws = np.asarray(draws, np.float64)
    folded = np.abs(draws - np.median(draws, axis=(0, 1)))
    return np.maximum(_split_rhat(_normal_scores(draws)), _split_rhat(_normal_scores(folded)))


def ess_bulk(draws: np.ndarray) -> np.ndarray:
    """Effective number of draws for the centre of the distribution: ESS of the rank-normalised split chains."""
    return ess(_normal_scores(np.asarray(draws, np.float64)))


def ess_tail(draws: np.ndarray) -> np.ndarray:
    """Effective number of draws for the 5 % and 95 % quantiles, the smaller of the two."""
    draws = np.asarray(draws, np.float64)
    low, high = np.quantile(draws, [0.05, 0.95], axis=(0, 1))
    return np.minimum(ess((draws <= low).astype(np.float64)), ess((draws <= high).astype(np.float64)))


def mcse(draws: np.ndarray) -> np.ndarray:
    """Monte Carlo standard error of the mean: sd/√ESS."""
    draws = np.asarray(draws, np.float64)
    return draws.std(axis=(0, 1), ddof=1) / np.sqrt(ess(draws))


def ess(draws: np.ndarray) -> np.ndarray:
    """Effective number of draws for the mean: C·n / (1 + 2 Σ ρ̂_t), chains split in halves, the sum cut by Geyer's initial monotone
    sequence. Chains that do not move have none: NaN."""
    halves = _split(np.asarray(draws, np.float64))
    chains, n = halves.shape[:2]
    if n < 4:
        return np.full(halves.shape[2:], np.nan)
    flat = halves.reshape(chains, n, -1)
    gamma = _autocovariance(flat)  # (chains, n, Q), biased
    within = gamma[:, 0].mean(axis=0) * n / (n - 1)
    plus = within * (n - 1) / n + (flat.mean(axis=1).var(axis=0, ddof=1) if chains > 1 else 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = 1.0 - (within - gamma.mean(axis=0)) / plus
    rho[0] = 1.0
    pairs = rho[: n // 2 * 2].reshape(n // 2, 2, -1).sum(axis=1)
    alive = np.cumprod(pairs > 0, axis=0).astype(bool)
    monotone = np.minimum.accumulate(np.where(alive, pairs, 0.0), axis=0)
    # The pair at which the sequence turns negative still lends its first term, as Stan and ArviZ do.
    cut = alive.sum(axis=0)
    tail = np.maximum(np.take_along_axis(rho, np.minimum(2 * cut, n - 1)[None], axis=0)[0], 0.0)
    tau = np.maximum(-1.0 + 2.0 * monotone.sum(axis=0) + tail, 1.0 / np.log10(chains * n))
    out = np.where(plus > 0, chains * n / tau, np.nan)
    return out.reshape(halves.shape[2:])


def ebfmi(energy: np.ndarray) -> np.ndarray:
    """Energy Bayesian fraction of missing information of each chain, energy (chains, n): E[(ΔE)²]/Var(E). Below 0.3, heavy tails are not
    explored."""
    energy = np.asarray(energy, np.float64)
    spread = energy.var(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread > 0, np.mean(np.diff(energy, axis=1) ** 2, axis=1) / spread, np.nan)


def verdict(result: Any, method: Any, names: list[str], network: bool) -> tuple[str, bool, dict[str, Any]]:
    """A sentence on the chains with the next thing to do, whether they can be trusted, and the numbers behind it.

    Networks are judged by their functions: hidden units are exchangeable, so weights may differ between chains that agree.
    """
    kept = result.kept
    positions, functions, stats = np.asarray(kept["position"], np.float64), np.asarray(kept["functions"], np.float64), kept["stats"]
    chosen = np.unique(np.linspace(0, len(names) - 1, min(len(names), MAX_QUANTITIES)).astype(int))
    positions, names = positions[..., chosen], [names[i] for i in chosen]
    log_density = np.asarray(stats.log_density, np.float64)
    in_functions = network and functions.shape[-1] > 0
    judged = functions if in_functions else positions
    judged = np.concatenate([judged, log_density[..., None]], axis=-1)
    watch = _watch(result.state, chosen)
    health = _numbers(judged, positions, stats, method)
    health["judged"] = "functions at the data and beyond" if in_functions else "parameters"
    limit = RHAT_FUNCTIONS if in_functions else RHAT
    sentence, healthy = _sentence(health, positions, stats, names, method, limit, judged, watch)
    return sentence, healthy, health


def _numbers(judged: np.ndarray, positions: np.ndarray, stats: Any, method: Any) -> dict[str, Any]:
    chains, n = judged.shape[:2]
    few = chains * n < 8
    none = np.full(1, np.nan)
    sizes = {"ess_bulk": ess_bulk(judged), "ess_tail": ess_tail(judged)} if not few else {"ess_bulk": none, "ess_tail": none}
    depth, energy = np.asarray(stats.depth), np.asarray(stats.energy)
    limit = getattr(method, "max_depth", None)
    return {
        "rhat": _extreme(np.max, rhat(judged)) if not few else np.nan,
        "rhat_parameters": _extreme(np.max, rhat(positions)) if not few else np.nan,
        **{name: _extreme(np.min, values) for name, values in sizes.items()},
        "acceptance": float(np.mean(stats.acceptance)),
        "evaluations": int(np.sum(stats.evaluations)),
        "divergences": int(np.sum(stats.diverging)),
        "outside": int(np.sum(stats.outside)),
        "undefined": int(np.sum(stats.undefined)),
        "saturated": float(np.mean(depth >= limit)) if limit else 0.0,
        "ebfmi": _extreme(np.min, ebfmi(energy)) if np.any(np.ptp(energy, axis=1) > 0) else None,
        "draws": chains * n,
    }


def _sentence(
    health: dict[str, Any], positions: np.ndarray, stats: Any, names: list[str], method: Any, limit: float, judged: np.ndarray, watch: Any
) -> tuple[str, bool]:
    """The worst finding first; each names its cause and what to do."""
    chains = positions.shape[0]
    spread = np.ptp(positions, axis=1)  # (chains, D)
    frozen = np.flatnonzero(np.all(spread == 0.0, axis=1))
    if frozen.size:
        return f"Chain {frozen[0]} never moved ({_list(frozen)} of {chains} frozen): {_why_stuck(stats)}", False
    unmoved = [names[i] for i in np.flatnonzero(np.all(spread == 0.0, axis=0))]
    if unmoved:
        return (
            f"{unmoved[0]} never moved ({len(unmoved)} of {len(names)} parameters): the density may not depend on it; check the model.",
            False,
        )
    far = np.max(np.where(np.isfinite(positions), np.abs(positions), np.inf), axis=(0, 1))
    if far.max() > FAR:
        farthest = int(np.argmax(far))
        said = (
            f"{names[farthest]} has run off to {far[farthest]:.0e} ({np.sum(far > FAR)} of {len(names)} parameters): "
            "the density does not fall there and may be improper; give it a proper prior, or rescale it."
        )
        return said, False
    if chains > 1 and any(np.array_equal(positions[i], positions[j]) for i in range(chains) for j in range(i)):
        return "Two chains are identical: their keys or starts are the same; this is a defect, please report it.", False
    # Weights of a network wander among its exchangeable units and away from where training left them, under any prior.
    flat = _flat_directions(watch, positions) if health["judged"] == "parameters" else np.empty(0, int)
    if flat.size and not health["rhat_parameters"] < 1.1:
        said = (
            f"{names[flat[0]]} wanders with nothing to hold it ({len(flat)} of {len(names)} parameters): "
            "the density may be improper; give it a proper prior, or run much longer."
        )
        return said, False
    if health["undefined"]:
        share = health["undefined"] / max(1, health["evaluations"])
        where = _where(positions, stats.undefined, names, watch)
        said = (
            f"The log density was NaN at {health['undefined']} of {health['evaluations']} evaluations ({share:.1%}), {where}: "
            "these points were treated as impossible; guard the log, root or division that fails there."
        )
        return said, False
    # Without gradients a refusal at the edge is all that is needed; trajectories are lost there.
    if watch is not None and health["outside"] > 0.001 * health["evaluations"]:
        share = health["outside"] / health["evaluations"]
        where = _where(positions, stats.outside, names, watch)
        said = (
            f"{share:.1%} of the evaluations fell outside the support (log density −∞), {where}: "
            "move on an unconstrained scale with its Jacobian (a NumPyro program does this by itself)."
        )
        return said, False
    if health["divergences"] > FEW_DIVERGENCES * health["draws"]:
        share = health["divergences"] / health["draws"]
        where = _where(positions, stats.diverging, names, watch)
        said = (
            f"{health['divergences']} of {health['draws']} transitions diverged ({share:.1%}), {where}: draws there are missing; "
            "use a non-centred form, a narrower prior, or a higher target_acceptance."
        )
        return said, False
    # The mean of (q − q̄)·∂log π/∂q says something of chains that have arrived; those of networks are still on their way where functions disagree.
    arrived = health["judged"] == "parameters" or health["rhat"] < limit
    broken = _broken_gradients(watch, positions) if arrived else np.empty(0, int)
    if broken.size:
        said = (
            f"The gradient does not belong to the density along {names[broken[0]]} ({len(broken)} of {len(names)} parameters): "
            "the density jumps there, or its gradient is stopped or wrong; use a sampler without gradients (al.Slice), or mend it."
        )
        return said, False
    stiff = health["ebfmi"] is not None and health["ebfmi"] < EBFMI
    if not health["rhat"] < limit:
        also = "" if limit == RHAT else f" in {health['judged']}"
        which = _worst(judged, names, limit)
        advice = _funnel(health, positions, stats, names) if stiff else "run longer, or start from a fit (init=)."
        return f"The chains do not agree{also}: R-hat {health['rhat']:.3f}{which} (1 is best, below {limit} is wanted): {advice}", False
    if stiff:
        return f"The energy is explored too slowly: {_funnel(health, positions, stats, names)}", False
    wanted = MIN_ESS * max(1, chains) / 4 if chains >= 4 else MIN_ESS / 4
    if not min(health["ess_bulk"], health["ess_tail"]) >= wanted:
        return (
            f"Too few effective draws: {health['ess_bulk']:.0f} in the bulk, {health['ess_tail']:.0f} in the tails, {wanted:.0f} wanted: raise num_samples.",
            False,
        )
    if health["saturated"] > 0.05:
        return (
            f"{health['saturated']:.0%} of the trees reached max_depth={method.max_depth}: correct, but slow; raise max_depth or rescale.",
            True,
        )
    said = (
        f"Converged: R-hat {health['rhat']:.3f}, effective draws {health['ess_bulk']:.0f} (bulk) and {health['ess_tail']:.0f} (tail), "
        f"judged by {health['judged']}."
    )
    if health["outside"] > 0.001 * health["evaluations"]:
        said += f" {health['outside'] / health['evaluations']:.1%} of the proposals fell outside the support (log density −∞) and were refused, which is exact."
    return said, True


def _extreme(pick: Any, values: np.ndarray) -> float:
    """The largest or smallest of those that are numbers."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(pick(known)) if known.size else float("nan")


def _why_stuck(stats: Any) -> str:
    if np.sum(stats.undefined) > 0:
        return "the log density was NaN at its proposals; guard the operation that fails, or start elsewhere (init=)."
    if np.sum(stats.outside) > 0:
        return "every proposal fell outside the support (log density −∞); move on an unconstrained scale, or start elsewhere (init=)."
    return "every proposal was rejected; lower step_size, lengthen num_warmup, or start elsewhere (init=)."


def _watch(state: Any, chosen: np.ndarray) -> Any:
    """What the sampler saw of the density (`_hamiltonian.Watch`), for the coordinates looked at; None where it keeps no such record."""
    kernel = getattr(state, "kernel", None)
    seen = getattr(getattr(kernel, "core", kernel), "watch", None)
    return None if seen is None else type(seen)(*(np.asarray(part) if np.ndim(part) < 2 else np.asarray(part)[:, chosen] for part in seen))


def _virial(watch: Any) -> np.ndarray:
    """Mean of (q − q̄)·∂log π/∂q, (chains, D): −1 for every proper, continuous density."""
    return watch.cross / np.maximum(watch.count, 1)[:, None]


def _flat_directions(watch: Any, positions: np.ndarray) -> np.ndarray:
    """Coordinates along which the density hardly changes over all that the chains have seen, and on which they disagree."""
    if watch is None or positions.shape[1] < 20:
        return np.zeros(0, int)
    return np.flatnonzero(np.all(np.abs(_virial(watch)) < 0.2, axis=0) & (rhat(positions) > 1.1))


def _broken_gradients(watch: Any, positions: np.ndarray) -> np.ndarray:
    """Coordinates on which the chains agree although (q − q̄)·∂log π/∂q is far from −1: by a quarter in every chain, and over all of them by
    four standard errors (its variance is 2 for a Gaussian; 8 leaves room for other shapes)."""
    if watch is None or positions.shape[1] < 100:
        return np.zeros(0, int)
    error = _virial(watch) + 1.0
    same = np.all(error > 0.25, axis=0) | np.all(error < -0.25, axis=0)
    far = np.abs(error.mean(axis=0)) > 4.0 * np.sqrt(8.0 / ess_bulk(positions))
    return np.flatnonzero(same & far & (rhat(positions) < 1.05))


def _where(positions: np.ndarray, flags: Any, names: list[str], watch: Any) -> str:
    """Around which value of which coordinate it happened: the one that differs most from the draws."""
    everything = positions.reshape(-1, positions.shape[-1])
    if watch is not None and np.any(watch.num_lost > 0):
        weight = watch.num_lost / watch.num_lost.sum()
        place = weight @ watch.lost
    else:
        flagged = np.asarray(flags) > 0
        if not flagged.any() or flagged.all():
            return "everywhere"
        place = positions[flagged].mean(axis=0)
    worst = int(np.argmax(np.abs(place - everything.mean(axis=0)) / (everything.std(axis=0) + 1e-12)))
    return f"mostly about {names[worst]} = {place[worst]:.3g} (draws have {np.median(everything[:, worst]):.3g} ± {everything[:, worst].std():.2g})"


def _funnel(health: dict[str, Any], positions: np.ndarray, stats: Any, names: list[str]) -> str:
    """What a low E-BFMI says. A funnel shows itself by it in every run, by divergences only in those that come near its neck; the
    coordinate that sets the scale of the others is the one that the energy follows."""
    energy = np.asarray(stats.energy, np.float64)
    apart = lambda values: values - values.mean(axis=1, keepdims=True)
    off, moved = apart(energy)[..., None], apart(positions)
    with np.errstate(divide="ignore", invalid="ignore"):
        follows = np.abs(np.sum(off * moved, axis=(0, 1))) / np.sqrt(np.sum(off**2) * np.sum(moved**2, axis=(0, 1)))
    first = int(np.nanargmax(follows))
    return (
        f"E-BFMI {health['ebfmi']:.2f} is below {EBFMI}, the energy goes with {names[first]} (correlation {follows[first]:.2f}), "
        f"{health['divergences']} of {health['draws']} transitions diverged: a funnel or a heavy tail that trajectories do not enter, or a run "
        "far too short; use a non-centred form, a narrower prior, or a higher target_acceptance."
    )


def _worst(judged: np.ndarray, names: list[str], limit: float) -> str:
    values = rhat(judged)
    worst = int(np.nanargmax(values)) if np.any(np.isfinite(values)) else 0
    if limit != RHAT:
        return ""
    return " for the log density" if worst == len(names) else f" for {names[worst]}"


def _list(numbers: np.ndarray) -> str:
    return str(len(numbers))


def _split(draws: np.ndarray) -> np.ndarray:
    """(chains, n, …) → (2·chains, n//2, …). Chains of fewer than four draws, as many short ones have, stay whole."""
    if draws.shape[1] < 4:
        return draws
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, draws.shape[1] - half :]])


def _normal_scores(draws: np.ndarray) -> np.ndarray:
    """Φ⁻¹ of the ranks over all chains, ties sharing their mean rank (Blom's offsets)."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    size = draws.shape[0] * draws.shape[1]
    ranks = rankdata(draws.reshape(size, -1), axis=0).reshape(draws.shape)
    return ndtri((ranks - 0.375) / (size + 0.25))


def _split_rhat(draws: np.ndarray) -> np.ndarray:
    """√(((n−1)/n·W + B/n)/W) over split chains; NaN where nothing moves or one draw is all there is, ∞ where only chains differ."""
    halves = _split(draws)
    n = halves.shape[1]
    if n < 2 or len(halves) < 2:
        return np.full(draws.shape[2:], np.nan)
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    between = halves.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((n - 1) / n + between / within)


def _autocovariance(draws: np.ndarray) -> np.ndarray:
    """Biased autocovariances by FFT along axis 1, (chains, n, Q)."""
    from scipy.fft import irfft, next_fast_len, rfft

    n = draws.shape[1]
    centred = draws - draws.mean(axis=1, keepdims=True)
    spectrum = rfft(centred, next_fast_len(2 * n), axis=1)
    return irfft(np.abs(spectrum) ** 2, next_fast_len(2 * n), axis=1)[:, :n] / n
