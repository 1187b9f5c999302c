"""Linear dynamics with Gaussian noise: z_t = F z_{t−1} + q_t, y_t = H z_t + r_t; and structural series made of level, trend and seasons."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import gammaln

from aleator._errors import DataError, ModelError, message
from aleator._random import as_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.data import Batch
from aleator.latent._conjugate import Family
from aleator.latent._model import ConjugateLatent, in_double, observations
from aleator.latent.autoregressive import Regression, pseudo_counts
from aleator.latent.hmm import asked, check_seen, check_sequences, check_weights, double, ends, host, sequence_begins
from aleator.latent.mixture import rows_of
from aleator.latent.parts import LOG_2PI, Gaussian, _factor, _moments, check_finite, spread_out
from aleator.latent.weights import check_concentration

NOISES = ("diagonal", "full")


class System(NamedTuple):
    """z_1 ~ N(mean, covariance), z_t = dynamics z_{t−1} + N(0, drift), y_t = emission z_t + N(0, noise). emission (d, K), or (T, d, K)."""

    mean: Array
    covariance: Array
    dynamics: Array
    drift: Array
    emission: Array
    noise: Array


class Kalman(NamedTuple):
    """The forward pass. mean, covariance: of z_t | y_≤t, (T, K) and (T, K, K); predicted_…: of z_t | y_<t. log_terms: log p(y_t | y_<t), (T,)."""

    predicted_mean: Array
    predicted_covariance: Array
    mean: Array
    covariance: Array
    log_terms: Array


class Smoothed(NamedTuple):
    """mean, covariance: of z_t | y. lagged: Cov(z_{t+1}, z_t | y), (T, K, K), 0 at the end of a sequence."""

    mean: Array
    covariance: Array
    lagged: Array


def kalman(system: System, y: Array, begins: Array, bend: Array | None = None) -> Kalman:
    """Filter y (T, d), NaN where missing; covariances in Joseph's form stay positive. bend (T, K, K): further factors exp(−½zᵀSz) of each z_t,
    the spread of F and H around their means in coordinate ascent (Barber and Chiappa 2006)."""
    num, eye = len(system.mean), jnp.eye(len(system.mean))
    steady = system.emission.ndim == 2

    def one(before: Any, item: Any) -> tuple[Any, Kalman]:
        row, begin, emission, curvature = item
        emission = system.emission if emission is None else emission
        mean = jnp.where(begin, system.mean, system.dynamics @ before[0])
        spread = jnp.where(begin, system.covariance, system.dynamics @ before[1] @ system.dynamics.T + system.drift)
        seen = jnp.isfinite(row)
        emission = jnp.where(seen[:, None], emission, 0.0)
        noise: Any = jnp.where(seen[:, None] & seen, system.noise, jnp.eye(len(row)))
        left = jnp.where(seen, jnp.where(seen, row, 0.0) - emission @ mean, 0.0)
        root = jnp.linalg.cholesky(emission @ spread @ emission.T + noise)
        gain = cho_solve((root, True), emission @ spread).T
        scaled = solve_triangular(root, left, lower=True)
        term = -0.5 * (jnp.sum(scaled**2) + jnp.sum(seen) * LOG_2PI) - jnp.sum(jnp.log(jnp.diagonal(root)))
        rest = eye - gain @ emission
        now, covariance = mean + gain @ left, rest @ spread @ rest.T + gain @ noise @ gain.T
        if curvature is not None:
            bent = eye + covariance @ curvature
            shrunk = jnp.linalg.solve(bent, jnp.concatenate([now[:, None], covariance], axis=1))
            term = term - 0.5 * jnp.linalg.slogdet(bent)[1] - 0.5 * now @ curvature @ shrunk[:, 0]
            now, covariance = shrunk[:, 0], _symmetric(shrunk[:, 1:])
        return (now, covariance), Kalman(mean, spread, now, covariance, term)

    start = jnp.zeros(num), jnp.zeros((num, num))
    return jax.lax.scan(one, start, (y, begins, None if steady else system.emission, bend))[1]


def smooth(system: System, passed: Kalman, begins: Array) -> Smoothed:
    """Rauch, Tung and Striebel's backward pass, its covariances as sums of squares."""
    eye = jnp.eye(len(system.mean))
    later = jax.tree.map(lambda leaf: jnp.concatenate([leaf[1:], leaf[-1:]]), (passed.predicted_mean, passed.predicted_covariance))

    def one(after: Any, item: Any) -> tuple[Any, Smoothed]:
        mean, covariance, ahead, spread, end = item
        root = jnp.linalg.cholesky(spread)
        gain = jnp.where(end, 0.0, cho_solve((root, True), system.dynamics @ covariance).T)
        rest = eye - gain @ system.dynamics
        now = mean + gain @ (after[0] - ahead)
        whole = rest @ covariance @ rest.T + gain @ (after[1] + system.drift) @ gain.T
        return (now, whole), Smoothed(now, whole, after[1] @ gain.T)

    start = passed.mean[-1], passed.covariance[-1]
    return jax.lax.scan(one, start, (passed.mean, passed.covariance, *later, ends(begins)), reverse=True)[1]


def draw_states(key: Key, system: System, y: Array, begins: Array) -> Array:
    """z ~ p(z | y), (T, K): a simulated path, corrected by smoothing what y differs from its own observations (Durbin and Koopman 2002)."""
    key_path, key_noise = jax.random.split(key)
    path = walk(key_path, system, begins)
    emitted = jnp.einsum("...ij,...j->...i", system.emission, path) + jax.random.normal(key_noise, y.shape) @ root(system.noise).T
    centred = system._replace(mean=jnp.zeros_like(system.mean))
    return path + smooth(centred, kalman(centred, y - emitted, begins), begins).mean


def walk(key: Key, system: System, begins: Array, state: Array | None = None) -> Array:
    """A path of the states, (T, K), from the first ones or from `state`."""
    noise = jax.random.normal(key, (len(begins), len(system.mean)))
    first, drift = root(system.covariance), root(system.drift)

    def one(state: Any, item: Any) -> tuple[Any, Any]:
        begin, noise = item
        new = jnp.where(begin, system.mean + first @ noise, system.dynamics @ state + drift @ noise)
        return new, new

    return jax.lax.scan(one, jnp.zeros_like(system.mean) if state is None else state, (begins, noise))[1]


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


class StateSpace(ConjugateLatent):
    """What both models of this file share: everything that follows from a `System` at one parameter tree."""

    minibatch = False
    num_invariants = 16

    @abc.abstractmethod
    def system(self, params: Tree, x: Any, num_rows: int) -> System:
        """The matrices of the model at one parameter tree, for so many rows."""

    @abc.abstractmethod
    def laid(self, batch: Batch) -> tuple[Array, Array]:
        """Where sequences begin, and y in the model's units (T, d)."""

    @abc.abstractmethod
    def scale_of(self) -> tuple[Array, Array]:
        """(centre, scale): y = centre + scale·(model's units), each (d,)."""

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        """log p(y_t | y_<t, θ), states summed out, in y's units; (T,)."""
        begins, y = self.laid(batch)
        return kalman(self.system(params, batch.x, len(y)), y, begins).log_terms - self._units(y)

    def invariants(self, params: Tree, batch: Batch) -> Array:
        """log p(y_t | y_<t, θ) at some of the rows."""
        terms = self.log_likelihood(params, batch)
        return terms[np.linspace(0, len(terms) - 1, self.num_invariants).astype(np.int32)]

    def _units(self, y: Array) -> Array:
        """The log of the volume a unit of the model has in y's units, for what is seen of each row."""
        return jnp.isfinite(y) @ jnp.log(self.scale_of()[1])

    # ---- questions, at one parameter tree ----

    @in_double
    def filter(self, params: Tree, y: Any, x: Any = None) -> Kalman:
        """Mean and covariance of z_t given y_<t and given y_≤t, and log p(y_t | y_<t)."""
        return host(_filter(self, double(params), self._asked(x, y)))

    @in_double
    def smooth(self, params: Tree, y: Any, x: Any = None) -> Smoothed:
        """Mean (T, K) and covariance (T, K, K) of z_t given all of y."""
        return host(_smooth(self, double(params), self._asked(x, y)))

    @in_double
    def sample_states(self, key: KeyLike, params: Tree, y: Any, num_samples: int, x: Any = None) -> Array:
        """Paths from p(z | y), (num_samples, T, K)."""
        return host(_sample_states(self, jax.random.split(as_key(key), num_samples), double(params), self._asked(x, y)))

    @in_double
    def simulate(self, key: KeyLike, params: Tree, num_steps: int, x: Any = None) -> tuple[Array, Array]:
        """One sequence by ancestral sampling: z (T, K), y (T, d)."""
        return host(_simulate(self, num_steps, as_key(key), double(params), None if x is None else jnp.asarray(x)))

    @in_double
    def forecast(
        self, key: KeyLike, draws: Tree, y: Any, horizon: int, x: Any = None, future: Any = None, units: str = "units of the series"
    ) -> Any:
        """Simulated futures of the (last) sequence in y, one for each parameter tree stacked in `draws` (`fit.sample(key, n)`): an
        `al.series.Forecast` with paths (n, horizon), or (n, horizon, d) where y has several columns. future: inputs of the steps to come."""
        from aleator.series import Forecast

        draws = double(draws)
        keys = jax.random.split(as_key(key), len(jax.tree.leaves(draws)[0]))
        paths = np.asarray(_futures(self, horizon, keys, draws, self._asked(x, y), self._future(future, horizon)))
        return Forecast(paths[..., 0] if paths.shape[-1] == 1 else paths, units)

    def _asked(self, x: Any, y: Any) -> Batch:
        return asked(x, y)

    def _future(self, future: Any, horizon: int) -> Array | None:
        if future is not None:
            raise DataError(message("The model has no inputs.", "future=…", "None", "drop them"))
        return None


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
        centre, scale = _moments(rows)
        scale = spread_out(scale)
        spread = np.ones(rows.shape[1]) if self.spread is None else np.broadcast_to(np.asarray(self.spread, float), scale.shape) / scale
        if not np.all(spread > 0):
            raise ModelError(
                message("A standard deviation must be positive.", f"spread={self.spread}", "numbers > 0", "pass e.g. spread=1.0")
            )
        return dataclasses.replace(
            self, spread=tuple((spread * scale).tolist()), centre=tuple(centre.tolist()), scale=tuple(scale.tolist())
        )

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

    def scale_of(self) -> tuple[Array, Array]:
        return jnp.asarray(self.centre), jnp.asarray(self.scale)

    def laid(self, batch: Batch) -> tuple[Array, Array]:
        check_weights(batch)
        centre, scale = self.scale_of()
        y = (rows_of(batch.y) - centre) / scale
        return sequence_begins(batch.x, len(y)), y

    def system(self, params: Tree, x: Any = None, num_rows: int = 0) -> System:
        emission, noise = params["emission"]["weights"], _inverse(_factor(params["emission"]))
        if self.noise == "diagonal":
            emission, noise = emission[:, 0], jnp.diag(noise[:, 0, 0])
        else:
            emission, noise = emission[0], noise[0]
        dynamics, drift = params["dynamics"]["weights"][0], _inverse(_factor(params["dynamics"]))[0]
        return System(params["initial"]["mean"][0], _inverse(_factor(params["initial"]))[0], dynamics, drift, emission, noise)

    def e_step(self, natural: dict[str, Tree], batch: Batch) -> tuple[dict[str, Tree], Array]:
        begins, y = self.laid(batch)
        system, bend, level = self._expected_system(natural, y, begins)
        passed = kalman(system, y, begins, bend)
        smoothed = smooth(system, passed, begins)
        return self._counts(smoothed, y, begins), passed.log_terms + level - self._units(y)

    def draw_step(self, key: Key, natural: dict[str, Tree], batch: Batch) -> dict[str, Tree]:
        begins, y = self.laid(batch)
        path = draw_states(key, self._expected_system(natural, y, begins)[0], y, begins)
        return self._counts(_certain(path), y, begins)

    def seed(self, key: Key, batch: Batch) -> dict[str, Tree]:
        """States from the principal components of the rows beside the rows before them, blurred so that starts differ."""
        begins, y = self.laid(batch)
        filled = jnp.where(jnp.isfinite(y), y, 0.0)
        shifts = -(-self.state_dim // y.shape[1])
        table = jnp.concatenate([jnp.roll(filled, i, axis=0) for i in range(shifts + 1)], axis=1)
        scores = table @ jnp.linalg.eigh(table.T @ table)[1][:, ::-1][:, : self.state_dim]
        scores = scores / jnp.sqrt(jnp.mean(scores**2, axis=0) + 1e-12)
        return self._counts(_certain(scores + 0.3 * jax.random.normal(key, scores.shape)), y, begins)

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


# ---- structural series ----


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
        centre, scale = _moments(rows)
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

    def scale_of(self) -> tuple[Array, Array]:
        return jnp.asarray(self.centre), jnp.asarray(self.scale)

    def laid(self, batch: Batch) -> tuple[Array, Array]:
        check_weights(batch)
        centre, scale = self.scale_of()
        y = (rows_of(batch.y) - centre) / scale
        return sequence_begins(None, len(y)), y

    def system(self, params: Tree, x: Any = None, num_rows: int = 0) -> System:
        return self._system(jnp.exp(params["precisions"]), x)

    def _system(self, precisions: Array, x: Any) -> System:
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
        return self._counts(system, _certain(draw_states(key, system, y, begins)), y)

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
        """Mean and standard deviation (T,) of every component's contribution to y, given all of y and in its units; the level has c."""
        batch, params = self._asked(x, y), double(params)
        system, smoothed = self._system(jnp.exp(params["precisions"]), batch.x), _smooth(self, params, batch)
        emission = jnp.broadcast_to(system.emission, (len(smoothed.mean), 1, smoothed.mean.shape[1]))[:, 0]
        found, start, centre = {}, 0, self.centre[0]
        for part, block in zip(self.components, self.blocks, strict=True):
            here = slice(start, start := start + len(block.reads))
            reads = emission[:, here]
            mean = self.scale[0] * jnp.sum(reads * smoothed.mean[:, here], axis=1)
            if isinstance(part, (Level, Trend)):
                mean, centre = mean + centre, 0.0
            spread = jnp.einsum("tk,tkl,tl->t", reads, smoothed.covariance[:, here, here], reads)
            found[type(part).__name__.lower()] = mean, self.scale[0] * jnp.sqrt(jnp.maximum(spread, 0.0))
        return host(found)

    def _asked(self, x: Any, y: Any) -> Batch:
        rows = observations(y)
        if (x is None) != (self.inputs is None):
            raise DataError(
                message("Inputs and components do not agree.", f"x={x if x is None else '…'}", "as in the fit", "pass x as there")
            )
        return Batch(None if x is None else jnp.asarray(x, float), jnp.asarray(rows), None, jnp.arange(len(rows)))

    def _future(self, future: Any, horizon: int) -> Array | None:
        if self.inputs is None:
            return super()._future(future, horizon)
        m = len(self.inputs[0])
        if future is None or np.size(future) != horizon * m:
            got = None if future is None else np.shape(future)
            raise DataError(message("The forecast needs the inputs of its steps.", got, f"future of shape ({horizon}, {m})", "pass them"))
        return jnp.asarray(future, float).reshape(horizon, m)


# Compiled once a model and shape, however often they are asked.


@functools.partial(jax.jit, static_argnums=0)
def _filter(model: StateSpace, params: Tree, batch: Batch) -> Kalman:
    begins, y = model.laid(batch)
    passed = kalman(model.system(params, batch.x, len(y)), y, begins)
    return passed._replace(log_terms=passed.log_terms - model._units(y))


@functools.partial(jax.jit, static_argnums=0)
def _smooth(model: StateSpace, params: Tree, batch: Batch) -> Smoothed:
    begins, y = model.laid(batch)
    system = model.system(params, batch.x, len(y))
    return smooth(system, kalman(system, y, begins), begins)


@functools.partial(jax.jit, static_argnums=0)
def _sample_states(model: StateSpace, keys: Array, params: Tree, batch: Batch) -> Array:
    begins, y = model.laid(batch)
    system = model.system(params, batch.x, len(y))
    return jax.vmap(lambda key: draw_states(key, system, y, begins))(keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _simulate(model: StateSpace, num_steps: int, key: Key, params: Tree, x: Array | None) -> tuple[Array, Array]:
    key_path, key_noise = jax.random.split(key)
    system = model.system(params, x, num_steps)
    path = walk(key_path, system, jnp.arange(num_steps) == 0)
    return path, _emit(key_noise, model, system, path)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _futures(model: StateSpace, horizon: int, keys: Array, draws: Tree, batch: Batch, future: Array | None) -> Array:
    begins, y = model.laid(batch)

    def one(item: tuple[Key, Tree]) -> Array:
        key, params = item
        key_now, key_path, key_noise = jax.random.split(key, 3)
        passed = kalman(model.system(params, batch.x, len(y)), y, begins)
        now = passed.mean[-1] + root(passed.covariance[-1]) @ jax.random.normal(key_now, passed.mean[-1].shape)
        system = model.system(params, future, horizon)
        return _emit(key_noise, model, system, walk(key_path, system, jnp.zeros(horizon, bool), now))

    return jax.lax.map(one, (keys, draws))


def _emit(key: Key, model: StateSpace, system: System, path: Array) -> Array:
    """y (T, d) in its own units along a path of states."""
    centre, scale = model.scale_of()
    noise = jax.random.normal(key, (len(path), len(system.noise))) @ root(system.noise).T
    return centre + scale * (jnp.einsum("...ij,...j->...i", system.emission, path) + noise)


def _means(table: Tree) -> tuple[Array, Array, Array, Array]:
    """Of each member: W̄, Λ̄⁻¹, E[WᵀΛW] − W̄ᵀΛ̄W̄, ½(E log|Λ| − log|Λ̄|)."""
    precision = -2.0 * table["square"]
    noise = _symmetric(jnp.linalg.inv(precision))
    weights = noise @ table["cross"]
    bend = -2.0 * table["gram"] - jnp.swapaxes(weights, -1, -2) @ table["cross"]
    return weights, noise, _symmetric(bend), table["df"] - 0.5 * jnp.linalg.slogdet(precision)[1]


def _certain(path: Array) -> Smoothed:
    """A path that is known."""
    nothing = jnp.zeros((*path.shape, path.shape[-1]))
    return Smoothed(path, nothing, nothing)


def root(covariance: Array) -> Array:
    """A with AAᵀ = covariance, singular ones too."""
    values, vectors = jnp.linalg.eigh(covariance)
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))


def _inverse(factor: Array) -> Array:
    """(LLᵀ)⁻¹."""
    inverse = solve_triangular(factor, jnp.broadcast_to(jnp.eye(factor.shape[-1]), factor.shape), lower=True)
    return jnp.swapaxes(inverse, -1, -2) @ inverse


def _symmetric(matrix: Array) -> Array:
    return 0.5 * (matrix + jnp.swapaxes(matrix, -1, -2))


def _diagonal(blocks: list[np.ndarray]) -> np.ndarray:
    """Blocks along the diagonal, rectangular ones too."""
    rows, columns = np.cumsum([0] + [len(b) for b in blocks]), np.cumsum([0] + [b.shape[1] for b in blocks])
    whole = np.zeros((rows[-1], columns[-1]))
    for i, block in enumerate(blocks):
        whole[rows[i] : rows[i + 1], columns[i] : columns[i + 1]] = block
    return whole
