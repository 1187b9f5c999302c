"""Linear dynamics whose matrices are unknown."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family
from aleator.latent._model import in_double, observations
from aleator.latent._precision import factor_of, inverse_of, symmetric
from aleator.latent.autoregressive import Regression, pseudo_counts
from aleator.latent.hmm import check_seen, check_sequences, double, ends, host
from aleator.latent.linear_dynamics._kalman import Smoothed, System, certain, draw_states, kalman, smooth
from aleator.latent.linear_dynamics._state_space import StateSpace
from aleator.latent.parts import Gaussian, check_finite, moments, spread_out
from aleator.latent.weights import check_concentration

NOISES = ("diagonal", "full")


@dataclasses.dataclass(frozen=True)
class Coefficients(Regression):
    """Regressions with `outputs` rows of weights over `inputs` columns: prior W ~ MN(mean·I, Λ⁻¹, 1/strength), Λ ~ Wishart(df, ·) with
    standard deviations `spread` (members × outputs) of the noise."""

    outputs: int
    inputs: int
    mean: float
    strength: float
    spread: tuple[float, ...]
    df: float

    def prior(self, num: int) -> Tree:
        mean = self.mean * jnp.eye(self.outputs, self.inputs)
        squares = self.df * jnp.asarray(self.spread).reshape(num, self.outputs) ** 2
        return jax.vmap(lambda square: pseudo_counts(mean, jnp.full(self.inputs, self.strength), square, self.df))(squares)


@dataclasses.dataclass(frozen=True)
class LinearDynamics(StateSpace):
    """z_1 ~ N(m, P), z_t = F z_{t−1} + N(0, Q), y_t = c + H z_t + N(0, R), all of them unknown but c, the mean of the data (D6).

    noise: R "diagonal" (single entries may be missing) or "full" (whole rows may be). persistence: prior mean of the diagonal of F;
    strength: of the priors of F and H, in steps; spread: prior standard deviation of r, a number or d of them, None for that of the data.
    The prior of Q has standard deviations 1, which is what sets the scale of z. The likelihood knows z up to an invertible map: judge a fit by
    F's eigenvalues, forecasts and log p(y), not by the entries of F and H.
    Data: y (T,) or (T, d), NaN where missing; several sequences as for `HMM`: (ids, y).
    """

    state_dim: int
    noise: str = "diagonal"
    persistence: float = 0.9
    strength: float = 1.0
    spread: Any = None
    centre: Any = None
    scale: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.state_dim, bool) or not isinstance(self.state_dim, (int, np.integer)) or self.state_dim < 1:
            raise ModelError(message("Dynamics need a state.", repr(self.state_dim), "a whole number ≥ 1", "pass e.g. LinearDynamics(2)"))
        if self.noise not in NOISES:
            raise ModelError(message("Unknown noise.", repr(self.noise), f"one of {NOISES}", "choose one of them"))
        check_concentration(self.strength)

    def bind(self, x: Tree, y: Tree) -> LinearDynamics:
        rows = observations(y)
        check_sequences(x, len(rows))
        check_finite(rows[check_seen(rows)], missing=self.noise == "diagonal")
        centre, scale = moments(rows)
        scale = spread_out(scale)
        spread = np.ones(rows.shape[1]) if self.spread is None else np.broadcast_to(np.asarray(self.spread, float), scale.shape) / scale
        if not np.all(spread > 0):
            raise ModelError(
                message("A standard deviation must be positive.", f"spread={self.spread}", "numbers > 0", "pass e.g. spread=1.0")
            )
        return dataclasses.replace(
            self, spread=tuple((spread * scale).tolist()), centre=tuple(centre.tolist()), scale=tuple(scale.tolist())
        )

    def observed(self, y: Any) -> np.ndarray:
        rows = super().observed(y)
        check_finite(rows[~np.isnan(rows).all(axis=1)], missing=self.noise == "diagonal")
        return rows

    @property
    def families(self) -> dict[str, Family]:
        k, d = self.state_dim, len(self.centre)
        spread = tuple((np.asarray(self.spread) / np.asarray(self.scale)).tolist())
        outputs = 1 if self.noise == "diagonal" else d
        return {
            "initial": Gaussian(mean=(0.0,) * k, strength=0.1, df=k + 2.0, spread=(1.0,) * k, dim=k),
            "dynamics": Coefficients(k, k, self.persistence, self.strength, (1.0,) * k, k + 2.0),
            "emission": Coefficients(outputs, k, 0.0, self.strength, spread, outputs + 2.0),
        }

    def prior_counts(self) -> dict[str, Tree]:
        members = {"initial": 1, "dynamics": 1, "emission": len(self.centre) if self.noise == "diagonal" else 1}
        return {name: family.prior(members[name]) for name, family in self.families.items()}

    def system(self, params: Tree, x: Any = None) -> System:
        emission, noise = params["emission"]["weights"], inverse_of(factor_of(params["emission"]))
        if self.noise == "diagonal":
            emission, noise = emission[:, 0], jnp.diag(noise[:, 0, 0])
        else:
            emission, noise = emission[0], noise[0]
        dynamics, drift = params["dynamics"]["weights"][0], inverse_of(factor_of(params["dynamics"]))[0]
        return System(params["initial"]["mean"][0], inverse_of(factor_of(params["initial"]))[0], dynamics, drift, emission, noise)

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        begins, y = self.laid(batch)
        system, bend, level = self._expected_system(natural, y, begins)
        passed = kalman(system, y, begins, bend)
        smoothed = smooth(system, passed, begins)
        return self._counts(smoothed, y, begins), passed.log_terms + level - self._units(y)

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        begins, y = self.laid(batch)
        path = draw_states(key, self._expected_system(natural, y, begins)[0], y, begins)
        return self._counts(certain(path), y, begins)

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """States from the principal components of the rows beside the rows before them, blurred so that starts differ."""
        begins, y = self.laid(batch)
        filled = jnp.where(jnp.isfinite(y), y, 0.0)
        shifts = -(-self.state_dim // y.shape[1])
        table = jnp.concatenate([jnp.roll(filled, i, axis=0) for i in range(shifts + 1)], axis=1)
        scores = table @ jnp.linalg.eigh(table.T @ table)[1][:, ::-1][:, : self.state_dim]
        scores = scores / jnp.sqrt(jnp.mean(scores**2, axis=0) + 1e-12)
        return self._counts(certain(scores + 0.3 * jax.random.normal(key, scores.shape)), y, begins)

    def _expected_system(self, natural: dict[str, Tree], y: Array, begins: Array) -> tuple[System, Array, Array]:
        """The system at the means Λ̄ = E[Λ], F̄ = Λ̄⁻¹E[ΛF], what E[FᵀΛF] and E[HᵀΛH] have beyond them (bend), and E log|Λ| beyond log|Λ̄|."""
        first, seen = natural["initial"], jnp.isfinite(y).astype(y.dtype)
        precision = -2.0 * first["square"][0]
        mean = jnp.linalg.solve(precision, first["sum"][0])
        start = first["number"][0] + 0.5 * mean @ precision @ mean + first["df"][0] - 0.5 * jnp.linalg.slogdet(precision)[1]
        dynamics, drift, bend_dynamics, level_dynamics = _means(natural["dynamics"])
        emission, noise, bend_emission, level_emission = _means(natural["emission"])
        if self.noise == "diagonal":
            emission, noise = emission[:, 0], jnp.diag(noise[:, 0, 0])
        else:
            emission, noise, seen = emission[0], noise[0], seen[:, :1]
        follows = ~ends(begins)
        bend = jnp.einsum("ti,ikl->tkl", seen, bend_emission) + jnp.where(follows[:, None, None], bend_dynamics[0], 0.0)
        level = seen @ level_emission + jnp.where(begins, start, level_dynamics[0])
        return System(mean, jnp.linalg.inv(precision), dynamics[0], drift[0], emission, noise), bend, level

    def _counts(self, smoothed: Smoothed, y: Array, begins: Array) -> dict[str, Tree]:
        mean = smoothed.mean
        square = smoothed.covariance + mean[:, :, None] * mean[:, None, :]
        cross = smoothed.lagged[:-1] + mean[1:, :, None] * mean[:-1, None, :]
        seen = jnp.isfinite(y)
        filled, first, later = jnp.where(seen, y, 0.0), begins.astype(y.dtype), (~begins[1:]).astype(y.dtype)
        over = lambda weight, values: jnp.tensordot(weight, values, axes=(0, 0))
        if self.noise == "diagonal":
            weight = seen.astype(y.dtype)
            emission = {
                "gram": over(weight, square),
                "cross": over(filled, mean)[:, None, :],
                "square": jnp.sum(filled**2, axis=0)[:, None, None],
                "df": jnp.sum(weight, axis=0),
            }
        else:
            weight = seen[:, 0].astype(y.dtype)
            emission = {
                "gram": over(weight, square)[None],
                "cross": (filled.T @ mean)[None],
                "square": (filled.T @ filled)[None],
                "df": jnp.sum(weight)[None],
            }
        number = jnp.sum(first)[None]
        return {
            "initial": {"number": number, "sum": over(first, mean)[None], "square": over(first, square)[None], "df": number},
            "dynamics": {
                "gram": over(later, square[:-1])[None],
                "cross": over(later, cross)[None],
                "square": over(later, square[1:])[None],
                "df": jnp.sum(later)[None],
            },
            "emission": emission,
        }

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        """F, Q, m, P of the states, H, c and R, the latter in y's units."""
        system, (centre, scale) = self.system(double(params)), self.scale_of()
        named = {
            "dynamics": system.dynamics,
            "drift": system.drift,
            "mean": system.mean,
            "covariance": system.covariance,
            "emission": scale[:, None] * system.emission,
            "offset": centre,
            "noise": scale[:, None] * system.noise * scale,
        }
        return host(named)


def _means(table: Tree) -> tuple[Array, Array, Array, Array]:
    """Of each member: W̄, Λ̄⁻¹, E[WᵀΛW] − W̄ᵀΛ̄W̄, ½(E log|Λ| − log|Λ̄|)."""
    precision = -2.0 * table["square"]
    noise = symmetric(jnp.linalg.inv(precision))
    weights = noise @ table["cross"]
    bend = -2.0 * table["gram"] - jnp.swapaxes(weights, -1, -2) @ table["cross"]
    return weights, noise, symmetric(bend), table["df"] - 0.5 * jnp.linalg.slogdet(precision)[1]
