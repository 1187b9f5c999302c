"""Quantiles and integrals over y of a predictive distribution, by its exact cdf and density."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from aleator._errors import HealthWarning
from aleator._outputs import BLOCK


def quantile(part: Any, levels: np.ndarray) -> np.ndarray:
    """(m, rows, k); `levels` (m,), or (m, rows, k) where each has its own, strictly inside (0, 1)."""
    mean, aleatoric, epistemic = part._moments()
    std = np.sqrt(aleatoric + epistemic)
    if not np.all(np.isfinite(std)):
        std = np.where(np.isfinite(std), std, np.max(part._cloud()[1], axis=0))
    q = levels[:, None, None] if levels.ndim == 1 else levels
    whole = part.support != "real"
    lower = mean - std * np.sqrt((1 - q) / q) * (1 + 1e-9)
    upper = mean + std * np.sqrt(q / (1 - q)) * (1 + 1e-9)
    if whole:
        lower, upper = np.full_like(lower, -1.0), np.maximum(np.ceil(upper), 0.0)
    # Cantelli's bracket holds when the variance is finite, up to rounding; otherwise step out until it does.
    step = np.maximum(np.maximum(upper - lower, np.abs(mean) * 1e-12), 1e-300)
    for _ in range(1100):
        low, high = (part._cdf(lower) >= q) & (not whole), part._cdf(upper) < q
        if not (low.any() or high.any()):
            break
        lower, upper, step = np.where(low, lower - step, lower), np.where(high, upper + step, upper), 2 * step
        upper = np.ceil(upper) if whole else upper
    return bisect_counts(part, q, lower, upper) if whole else solve_cdf(part, q, lower, upper, mean, std)


def bisect_counts(part: Any, q: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The smallest whole number with cdf ≥ q, for whole brackets with cdf(lower) < q ≤ cdf(upper)."""
    while np.any(upper - lower > 1):
        middle = np.floor(0.5 * (lower + upper))
        above = part._cdf(middle) >= q
        # Where the bracket is closed, the middle is its lower end and nothing moves.
        upper, lower = np.where(above & (middle > lower), middle, upper), np.where(above, lower, middle)
    return upper


def solve_cdf(part: Any, q: np.ndarray, lower: np.ndarray, upper: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """cdf(y) = q by Newton steps from the Gaussian guess; a step that leaves the bracket, or is not half the one before, halves the
    bracket instead. Newton's error is squared at every step: one of 1e-10 std is the last."""
    from scipy.special import ndtri

    y = np.clip(mean + std * ndtri(q), lower, upper)
    before, done = upper - lower, np.zeros(y.shape, bool)
    for _ in range(300):
        excess = part._cdf(y) - q
        upper, lower = np.where(excess >= 0, y, upper), np.where(excess >= 0, lower, y)
        with np.errstate(all="ignore"):
            newton = y - excess / np.exp(part._log_columns(y))
        inside = (newton >= lower) & (newton <= upper)
        rounding = 1e-15 * np.maximum(np.abs(lower), np.abs(upper))
        last = (inside & (np.abs(newton - y) <= 1e-10 * std + rounding)) | (upper - lower <= rounding)
        quick = inside & (last | (np.abs(newton - y) <= 0.5 * before))
        following = np.where(quick, newton, lower + 0.5 * (upper - lower))
        before, y, done = np.abs(following - y), np.where(done, y, following), done | last
        if np.all(done):
            break
    return y


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_OFFSETS = np.array([0.1, 0.3, 0.5, 0.7, 0.9, 1.15, 1.4, 1.7, 2.1, 2.6, 3.3, 4.3, 5.8, 8.0])
_OFFSETS = np.concatenate([-_OFFSETS[::-1], _OFFSETS])
_TAIL = 0.3 * 1.7 ** np.arange(48)


def integration_rule(part: Any, panels: int, split: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (m, rows, k) with Σ w g(node) ≈ ∫ g dy, or Σ_y g(y) for counts, for functions as smooth as the mixture's density.

    Edges are quantiles of a cloud that puts 28 points on every component, and geometric steps beyond it; 8 Gauss–Legendre nodes on each
    panel; for counts Gauss's rule for sums, exact on panels of at most 8 integers. `split` (rows, k) becomes an edge, for integrands
    that jump there.
    """
    centres, spreads, weights = part._cloud()
    cloud = (centres[:, None] + spreads[:, None] * _OFFSETS[:, None, None]).reshape(-1, *centres.shape[1:])
    mass = np.repeat(weights / len(_OFFSETS), len(_OFFSETS))
    order = np.argsort(cloud, axis=0)
    cloud = np.take_along_axis(cloud, order, axis=0)
    cumulative = np.cumsum(mass[order], axis=0)
    # Levels crowd towards 0 and 1: beyond the bulk may lie components of little weight at any distance.
    ends = 0.5 ** np.arange(1, 41) / panels
    levels = np.sort(np.concatenate([np.linspace(0, 1, panels + 1), ends, 1 - ends]))
    flat, points = cumulative.reshape(len(cloud), -1), cloud.reshape(len(cloud), -1)
    inner = np.stack([np.interp(levels, flat[:, j], points[:, j]) for j in range(flat.shape[1])], axis=1).reshape(-1, *cloud.shape[1:])
    first = np.take_along_axis(spreads, np.argmin(centres - 8 * spreads, axis=0)[None], axis=0)
    last = np.take_along_axis(spreads, np.argmax(centres + 8 * spreads, axis=0)[None], axis=0)
    tail = _TAIL[:, None, None]
    edges = [cloud[:1] - first * tail[::-1], cloud[:1], inner, cloud[-1:], cloud[-1:] + last * tail]
    if split is not None:
        edges.append(split[None])
    joined = np.concatenate(edges)
    if part.support == "real":
        joined = np.sort(joined, axis=0)
        half = 0.5 * np.diff(joined, axis=0)[:, None]
        nodes = 0.5 * (joined[1:] + joined[:-1])[:, None] + half * _NODES[:, None, None]
        rule = half * _WEIGHTS[:, None, None]
    else:
        joined = np.sort(np.maximum(np.ceil(joined), 0.0), axis=0)
        joined[0] = 0.0
        width = np.diff(joined, axis=0)
        every, where = np.unique(width, return_inverse=True)
        places, masses = gauss_sum(every)
        where = where.reshape(width.shape)
        nodes = joined[:-1, None] + np.moveaxis(places[where], -1, 1)
        rule = np.moveaxis(masses[where], -1, 1)
    return nodes.reshape(-1, *cloud.shape[1:]), rule.reshape(-1, *cloud.shape[1:])


def gauss_sum(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (..., 8) with Σ w g(x) = Σ_{y=0}^{n−1} g(y) for polynomials of degree ≤ 15; every term itself for n ≤ 8.

    Gauss's rule for the uniform measure on n points, from the recurrence of the discrete Chebyshev polynomials,
    b_j = ½ j √((n² − j²)/(4j² − 1)), by the eigenvalues of its Jacobi matrix (Golub and Welsch).
    """
    n = np.maximum(count, 8.0)[..., None]
    j = np.arange(1.0, 8.0)
    off = 0.5 * j * np.sqrt((n**2 - j**2) / (4 * j**2 - 1))
    jacobi = np.zeros((*count.shape, 8, 8))
    jacobi[..., np.arange(1, 8), np.arange(7)] = off / n  # in units of n: well scaled at any size; eigh reads the lower triangle
    values, vectors = np.linalg.eigh(jacobi)
    few, place = (count <= 8)[..., None], np.arange(8.0)
    return np.where(few, place, 0.5 * (n - 1) + n * values), np.where(few, place < count[..., None], n * vectors[..., 0, :] ** 2)


def entropy(whole: Any) -> np.ndarray:
    """−∫ p log p per column, (rows, k); panels are refined until ∫ p = 1 within 1e-7, row by row."""

    def at(part: Any, panels: int) -> np.ndarray:
        nodes, rule = integration_rule(part, panels)
        log_p = part._log_columns(nodes)
        p = np.exp(log_p)
        entropy = -np.sum(rule * p * np.where(p > 0, log_p, 0.0), axis=0)
        return np.stack([entropy, np.abs(np.sum(rule * p, axis=0) - 1)], axis=-1)

    panels = 64
    result = whole._by_rows(functools.partial(at, panels=panels), many=BLOCK, panels=panels)
    while panels < 4096 and np.any(result[..., 1] > 1e-7):
        panels *= 4
        finer = whole._by_rows(functools.partial(at, panels=panels), many=BLOCK, panels=panels)
        # A row settled at a coarser rule keeps its value, so that a row's result does not depend on its neighbours.
        result = np.where(result[..., 1:] > 1e-7, finer, result)
    entropy, error = result[..., 0], result[..., 1]
    if np.any(error > 1e-3):
        warnings.warn(
            f"The entropy of {int(np.sum(np.any(error > 1e-3, axis=1)))} row(s) is uncertain: the density integrates to 1 only within "
            f"{np.nanmax(error):.1e}. Components much narrower than their distances are the usual cause; look at variances instead.",
            HealthWarning,
            stacklevel=3,
        )
    return entropy


def discrete_entropy(probs: np.ndarray) -> np.ndarray:
    """−Σ p log p over the last axis, 0 log 0 = 0."""
    return -np.sum(np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1.0)), 0.0), axis=-1)
