"""Structural series: a level, a trend, seasons and effects of inputs, whose variances are unknown."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family
from aleator.latent._model import in_double, observations
from aleator.latent.hmm import check_seen, double, host
from aleator.latent.linear_dynamics._kalman import Smoothed, System, certain, draw_states, kalman, smooth
from aleator.latent.linear_dynamics._state_space import StateSpace, smooth_at
from aleator.latent.mixture import rows_of
from aleator.latent.parts import moments, spread_out
from aleator.latent.weights import check_concentration


class Block(NamedTuple):
    """A component's share of the state. dynamics (k, k), moves (k, r): which coordinates have their own noise, reads (k,): what y sees of
    them, first (k,): prior standard deviations of the first state, spread (r,): of each step's noise; all in standard deviations of y."""

    dynamics: np.ndarray
    moves: np.ndarray
    reads: np.ndarray
    first: np.ndarray
    spread: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Level:
    """μ_t = μ_{t−1} + N(0, σ²): a random walk. spread: prior guess of σ, in standard deviations of y."""

    spread: float = 0.1

    def block(self, num_inputs: int) -> Block:
        return Block(np.eye(1), np.eye(1), np.ones(1), np.full(1, 10.0), (self.spread,))


@dataclasses.dataclass(frozen=True)
class Trend:
    """μ_t = μ_{t−1} + β_{t−1} + N(0, σ²), β_t = β_{t−1} + N(0, σ′²): a level whose slope wanders. spread, slope_spread: prior guesses of σ, σ′."""

    spread: float = 0.1
    slope_spread: float = 0.01

    def block(self, num_inputs: int) -> Block:
        dynamics = np.array([[1.0, 1.0], [0.0, 1.0]])
        return Block(dynamics, np.eye(2), np.array([1.0, 0.0]), np.array([10.0, 1.0]), (self.spread, self.slope_spread))


@dataclasses.dataclass(frozen=True)
class Seasonal:
    """γ_t = −(γ_{t−1} + … + γ_{t−s+1}) + N(0, σ²), s = period: effects that sum to about zero over a period and may change slowly."""

    period: int
    spread: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.period, bool) or not isinstance(self.period, (int, np.integer)) or self.period < 2:
            raise ModelError(message("A season needs a period.", repr(self.period), "a whole number ≥ 2", "pass e.g. Seasonal(12)"))

    def block(self, num_inputs: int) -> Block:
        k = self.period - 1
        dynamics = np.eye(k, k=-1)
        dynamics[0] = -1.0
        return Block(dynamics, np.eye(k, 1), np.eye(k)[0], np.full(k, 3.0), (self.spread,))


@dataclasses.dataclass(frozen=True)
class Effects:
    """β_tᵀx_t of inputs x (T, m), standardised: constant (spread None), or wandering with β_t = β_{t−1} + N(0, σ²)."""

    spread: float | None = None

    def block(self, num_inputs: int) -> Block:
        k = num_inputs
        moves = np.zeros((k, 0)) if self.spread is None else np.eye(k)
        return Block(np.eye(k), moves, np.zeros(k), np.full(k, 10.0), () if self.spread is None else (self.spread,) * k)


COMPONENTS = (Level, Trend, Seasonal, Effects)


@dataclasses.dataclass(frozen=True)
class Variances(Family):
    """Precisions λ_j ~ Gamma(ν/2 + 1, νs_j²/2), whose mode is 1/s_j². t = (½log λ, −½λ), counts "df", "square". Parameters: log λ.

    spread: s, one each. strength: ν, in steps."""

    spread: tuple[float, ...]
    strength: float = 1.0

    def prior(self, num: int) -> Tree:
        return {"df": jnp.full(num, self.strength), "square": self.strength * jnp.asarray(self.spread) ** 2}

    def log_partition(self, counts: Tree) -> Array:
        shape = 0.5 * counts["df"] + 1.0
        return jnp.sum(gammaln(shape) - shape * jnp.log(0.5 * counts["square"]))

    def natural(self, params: Array) -> Tree:
        return {"df": 0.5 * params, "square": -0.5 * jnp.exp(params)}

    def log_jacobian(self, params: Array) -> Array:
        return jnp.sum(params)

    def mode(self, counts: Tree) -> Array:
        return jnp.log(counts["df"]) - jnp.log(counts["square"])

    def draw(self, key: Key, counts: Tree) -> Array:
        return jax.random.loggamma(key, 0.5 * counts["df"] + 1.0) - jnp.log(0.5 * counts["square"])


@dataclasses.dataclass(frozen=True)
class Structural(StateSpace):
    """y_t = sum of components + N(0, σ²): a dynamic linear model whose variances are unknown (D6).

    components: of `Level`, `Trend`, `Seasonal(period)` and `Effects` (of inputs x), e.g. (Trend(), Seasonal(12)). spread: prior guess of σ, in
    standard deviations of y. strength: of each variance's prior, in steps. Data: y (T,), NaN where missing, or (x, y) with inputs x (T, m).
    Inside, y has mean 0 and standard deviation 1; every answer but the states is in its own units.
    """

    components: Any
    spread: float = 0.3
    strength: float = 1.0
    centre: Any = None
    scale: Any = None
    inputs: Any = None

    def __post_init__(self) -> None:
        parts = self.components if isinstance(self.components, (tuple, list)) else (self.components,)
        if not parts or not all(isinstance(part, COMPONENTS) for part in parts) or sum(isinstance(part, Effects) for part in parts) > 1:
            names = [kind.__name__ for kind in COMPONENTS]
            raise ModelError(
                message("These are not components.", repr(parts), f"of {names}, Effects once", "pass e.g. (Trend(), Seasonal(12))")
            )
        check_concentration(self.spread)
        check_concentration(self.strength)
        object.__setattr__(self, "components", tuple(parts))

    def bind(self, x: Tree, y: Tree) -> Structural:
        rows = observations(y)
        if rows.shape[1] != 1:
            raise DataError(
                message("A structural series has one column.", f"{rows.shape[1]} columns", "y of shape (T,)", "fit them one by one")
            )
        check_seen(rows)
        effects = any(isinstance(part, Effects) for part in self.components)
        if effects != (x is not None):
            got = "no x" if x is None else "x without Effects()"
            raise DataError(
                message("Inputs and components do not agree.", got, "(x, y) with Effects(), or y alone", "add or drop one of them")
            )
        centre, scale = moments(rows)
        inputs = None
        if x is not None:
            columns = np.asarray(x, float).reshape(len(rows), -1)
            means, spreads = columns.mean(axis=0), columns.std(axis=0)
            inputs = tuple(means.tolist()), tuple(np.where(spreads > 0, spreads, 1.0).tolist())
        scale = spread_out(scale)
        return dataclasses.replace(self, centre=tuple(centre.tolist()), scale=tuple(scale.tolist()), inputs=inputs)

    @property
    def blocks(self) -> list[Block]:
        return [part.block(0 if self.inputs is None else len(self.inputs[0])) for part in self.components]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the unknown standard deviations, the noise first."""
        found = ["noise"]
        for part, block in zip(self.components, self.blocks, strict=True):
            kind = type(part).__name__.lower()
            many = len(block.spread) > 1
            own = ("trend", "slope") if isinstance(part, Trend) else tuple(f"{kind}{i}" if many else kind for i in range(len(block.spread)))
            found += [name if name not in found else f"{name}{sum(other.startswith(name) for other in found) + 1}" for name in own]
        return tuple(found)

    @property
    def families(self) -> dict[str, Family]:
        spread = (self.spread, *(value for block in self.blocks for value in block.spread))
        return {"precisions": Variances(spread, self.strength)}

    def prior_counts(self) -> dict[str, Tree]:
        family: Any = self.families["precisions"]
        return {"precisions": family.prior(len(family.spread))}

    def _ids(self, x: Any) -> None:
        return None  # x are inputs, of one sequence

    def system(self, params: Tree, x: Any = None) -> System:
        return self._system(jnp.exp(params["precisions"]), x)

    def _system(self, precisions: Array, x: Any) -> System:
        if x is None and self.inputs is not None:  # effects of no inputs would pass for effects of none
            raise DataError(message("The effects need inputs.", "x=None", f"{len(self.inputs[0])} columns", "pass x as in the fit"))
        blocks = self.blocks
        moves = _diagonal([block.moves for block in blocks])
        first = jnp.diag(jnp.asarray(np.concatenate([block.first for block in blocks])) ** 2)
        emission = jnp.asarray(np.concatenate([block.reads for block in blocks]))[None]
        if x is not None:
            means, spreads = self.inputs
            columns = (rows_of(x) - jnp.asarray(means)) / jnp.asarray(spreads)
            wide = [columns if isinstance(part, Effects) else jnp.broadcast_to(block.reads, (len(columns), len(block.reads)))
                    for part, block in zip(self.components, blocks, strict=True)]  # fmt: skip
            emission = jnp.concatenate(wide, axis=1)[:, None, :]
        drift = (moves / precisions[1:]) @ moves.T
        dynamics = jnp.asarray(_diagonal([block.dynamics for block in blocks]))
        return System(jnp.zeros(len(first)), first, dynamics, drift, emission, jnp.eye(1) / precisions[0])

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        begins, y = self.laid(batch)
        table = natural["precisions"]
        precisions = -2.0 * table["square"]
        system = self._system(precisions, batch.x)
        passed = kalman(system, y, begins)
        level = table["df"] - 0.5 * jnp.log(precisions)  # 0 at one θ, E log λ beyond log E λ in coordinate ascent
        terms = passed.log_terms + jnp.isfinite(y[:, 0]) * level[0] + jnp.where(begins, 0.0, jnp.sum(level[1:]))
        return self._counts(system, smooth(system, passed, begins), y), terms - self._units(y)

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        begins, y = self.laid(batch)
        system = self._system(-2.0 * natural["precisions"]["square"], batch.x)
        return self._counts(system, certain(draw_states(key, system, y, begins)), y)

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """Counts of states drawn at variances drawn from their prior."""
        key_params, key_states = jax.random.split(key)
        return self.draw_step(key_states, self.natural(self.sample_prior(key_params)), batch)

    def _counts(self, system: System, smoothed: Smoothed, y: Array) -> dict[str, Tree]:
        """Squares of the noise in y and of each moving coordinate's steps, expected."""
        moves = jnp.asarray(_diagonal([block.moves for block in self.blocks]))
        seen = jnp.isfinite(y[:, 0])
        emission = jnp.broadcast_to(system.emission, (len(y), *system.emission.shape[-2:]))[:, 0]
        left = jnp.where(seen, jnp.where(seen, y[:, 0], 0.0) - jnp.sum(emission * smoothed.mean, axis=1), 0.0)
        read = jnp.where(seen, jnp.einsum("tk,tkl,tl->t", emission, smoothed.covariance, emission), 0.0)
        forward = system.dynamics
        steps = (smoothed.mean[1:] - smoothed.mean[:-1] @ forward.T) @ moves
        carried = forward @ jnp.swapaxes(smoothed.lagged[:-1], 1, 2)  # F Cov(z_{t−1}, z_t)
        spread = smoothed.covariance[1:] + forward @ smoothed.covariance[:-1] @ forward.T - carried - jnp.swapaxes(carried, 1, 2)
        squares = jnp.sum(steps**2, axis=0) + jnp.einsum("tkl,kj,lj->j", spread, moves, moves)
        df = jnp.full(moves.shape[1], len(y) - 1.0)
        return {
            "precisions": {
                "df": jnp.concatenate([jnp.sum(seen)[None], df]),
                "square": jnp.concatenate([jnp.sum(left**2 + read)[None], squares]),
            }
        }

    @in_double
    def constrain(self, params: Tree) -> dict[str, Array]:
        """The standard deviations by name, in y's units."""
        deviations = jnp.asarray(self.scale) * jnp.exp(-0.5 * double(params)["precisions"])
        return host({name: deviations[..., i] for i, name in enumerate(self.names)})

    @in_double
    def decompose(self, params: Tree, y: Any, x: Any = None) -> dict[str, tuple[Array, Array]]:
        """Mean and standard deviation (T,) of every component's contribution to y, given all of y and in its units; the level has c. Of
        several components of one kind the names are numbered: "seasonal", "seasonal2"."""
        batch, params = self._asked(x, y), double(params)
        system, smoothed = self._system(jnp.exp(params["precisions"]), batch.x), smooth_at(self, params, batch)
        emission = jnp.broadcast_to(system.emission, (len(smoothed.mean), 1, smoothed.mean.shape[1]))[:, 0]
        found, start, centre = {}, 0, self.centre[0]
        for part, block in zip(self.components, self.blocks, strict=True):
            here = slice(start, start := start + len(block.reads))
            reads = emission[:, here]
            mean = self.scale[0] * jnp.sum(reads * smoothed.mean[:, here], axis=1)
            if isinstance(part, (Level, Trend)):
                mean, centre = mean + centre, 0.0
            spread = jnp.einsum("tk,tkl,tl->t", reads, smoothed.covariance[:, here, here], reads)
            name = type(part).__name__.lower()
            number = sum(other.startswith(name) for other in found) + 1  # a week and a year are both seasons
            found[name if number == 1 else f"{name}{number}"] = mean, self.scale[0] * jnp.sqrt(jnp.maximum(spread, 0.0))
        return host(found)

    def _asked(self, x: Any, y: Any) -> Batch:
        rows = self.observed(y)
        if (x is None) != (self.inputs is None):
            raise DataError(
                message("Inputs and components do not agree.", f"x={x if x is None else '…'}", "as in the fit", "pass x as there")
            )
        inputs = None if x is None else self._columns(x, len(rows), "The inputs do not match the rows.", "x")
        return Batch(inputs, jnp.asarray(rows), None, jnp.arange(len(rows)))

    def _future(self, future: Any, horizon: int) -> Array | None:
        if self.inputs is None:
            return super()._future(future, horizon)
        return self._columns(future, horizon, "The forecast needs the inputs of its steps.", "future")

    def _columns(self, x: Any, num: int, what: str, name: str) -> Array:
        """Inputs of `num` steps, (num, m): never turned or broadcast into that shape; one step or one input may come as a row of numbers."""
        m = len(self.inputs[0])
        shape = None if x is None else np.shape(x)
        if shape != (num, m) and not (1 in (num, m) and shape == (num * m,)):
            raise DataError(message(what, shape, f"{name} of shape ({num}, {m})", "pass them"))
        return jnp.asarray(x, float).reshape(num, m)


def _diagonal(blocks: list[np.ndarray]) -> np.ndarray:
    """Blocks along the diagonal, rectangular ones too."""
    rows, columns = np.cumsum([0] + [len(b) for b in blocks]), np.cumsum([0] + [b.shape[1] for b in blocks])
    whole = np.zeros((rows[-1], columns[-1]))
    for i, block in enumerate(blocks):
        whole[rows[i] : rows[i + 1], columns[i] : columns[i + 1]] = block
    return whole
