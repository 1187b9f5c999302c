"""Predictive distributions that are one Gaussian or one Student-t per row and column: NumPy alone, nothing to compile or to search for.

f ~ N(m, v) and y = f + σε give y ~ N(m, v + σ²); with σ² integrated out against its inverse gamma law y ~ t_df(m, v + σ²), whose variance
is the squared scale times df/(df − 2), infinite for df ≤ 2. In the model's units; (rows, k), many values of y stacked in front.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln, ndtr, ndtri, stdtr, stdtrit

from aleator.likelihoods import Gaussian, Likelihood


class Closed(NamedTuple):
    """y = mean + scale·t, t standard normal (df None) or Student-t with df (k,); scale² = variance + noise²."""

    mean: np.ndarray
    variance: np.ndarray
    noise: np.ndarray
    df: np.ndarray | None

    @property
    def scale(self) -> np.ndarray:
        return np.sqrt(self.variance + self.noise**2)

    def moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean, aleatoric and epistemic variance, (rows, k)."""
        factor = np.ones(1) if self.df is None else np.where(self.df > 2, self.df / np.maximum(self.df - 2, 1e-300), np.inf)
        return self.mean, factor * np.broadcast_to(self.noise**2, self.mean.shape), factor * self.variance

    def log_density(self, y: np.ndarray) -> np.ndarray:
        z = (y - self.mean) / self.scale
        if self.df is None:
            return -0.5 * (z**2 + np.log(2 * np.pi)) - np.log(self.scale)
        half = 0.5 * (self.df + 1)
        constant = gammaln(half) - gammaln(0.5 * self.df) - 0.5 * np.log(np.pi * self.df)
        return constant - half * np.log1p(z**2 / self.df) - np.log(self.scale)

    def cdf(self, y: np.ndarray) -> np.ndarray:
        z = (y - self.mean) / self.scale
        return ndtr(z) if self.df is None else stdtr(self.df, z)

    def quantile(self, q: np.ndarray) -> np.ndarray:
        return self.mean + self.scale * (ndtri(q) if self.df is None else stdtrit(self.df, q))


def of(likelihood: Likelihood, outputs: Any) -> Closed | None:
    """The closed form, where there is one: a Gaussian likelihood on Gaussian outputs."""
    if type(likelihood) is not Gaussian or not outputs.gaussian:
        return None
    double = lambda value: np.asarray(value, np.float64)
    return Closed(
        double(outputs.mean), double(outputs.variance), double(outputs.extra["scale"]), None if outputs.df is None else double(outputs.df)
    )
