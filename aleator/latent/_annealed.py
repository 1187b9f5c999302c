"""log p(y) of an autoencoder between two stochastic bounds, by annealed importance sampling of z (Neal 2001; Wu et al. 2017).

π_β(z) ∝ r(z)^{1−β} p(y, z)^β leads from r, the inference network's q(z | y) or the prior p(z), to the posterior of z. Upwards, from r:
E[w] = p(y), so that E[log w] ≤ log p(y). Downwards, from an exact draw of p(z | y): E[1/w] = 1/p(y), so that E[log w] ≥ log p(y). Who has
simulated y from the model has such a draw: the z that it came from (Grosse, Ghahramani and Adams 2015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import ModelError, message
from aleator._random import as_key, noise_key
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.latent.questions import one_draw
from aleator.latent.vae import VAE, by_pieces, compiled, log_mean

CHAINS_AT_ONCE = 2_000  # rows × chains: what the decoder makes of them stays in the cache
PILOT = 100  # steps of the run that finds step sizes
WANTED, RATE = 0.7, 0.3  # acceptance that the pilot goes for, and how fast log ε follows it
JITTER = 0.3  # of ε, so that no trajectory comes back to where it began


class Bounds(NamedTuple):
    """log p(y) of each row from below and from above, nats, (n,) each; y: the rows, simulated from the model."""

    lower: np.ndarray
    upper: np.ndarray
    y: np.ndarray

    @property
    def width(self) -> float:
        """Mean of upper − lower: how much is left to doubt."""
        return float(np.mean(self.upper - self.lower))

    @property
    def stderr(self) -> float:
        """Of the width, over rows."""
        return float(np.std(self.upper - self.lower, ddof=1) / np.sqrt(len(self.lower)))


class Along(NamedTuple):
    """z (C, n, D), all layers side by side; start, end (C, n): log r(z) and log p(y, z)."""

    z: Array
    start: Array
    end: Array


def ais(
    key: KeyLike,
    fit: Any,
    y: Any,
    *,
    x: Any = None,
    num_steps: int = 500,
    num_chains: int = 16,
    num_leapfrog: int = 5,
    start: str = "encoder",
) -> np.ndarray:
    """log p(y) of each row from below, nats, (n,): log of the mean weight of num_chains chains from q(z | y) ("encoder") or from the prior of
    z ("prior"), each moved by a Hamiltonian trajectory at each of num_steps temperatures. y is taken as it is: binarise it first."""
    key_params, key_run = jax.random.split(as_key(key))
    model, params = _asked(key_params, fit, start)
    shown, x = model.asked(y, x)
    ask = compiled(model, _bound, start, num_steps, num_chains, num_leapfrog, False)
    rows = (shown, x, tuple(jnp.zeros((len(shown), d)) for d in model.latent_dim))
    return by_pieces(key_run, lambda k, given: ask(k, params, *given)[0], rows, max(1, CHAINS_AT_ONCE // num_chains))


def sandwich(
    key: KeyLike,
    fit: Any,
    num_rows: int = 100,
    *,
    x: Any = None,
    num_steps: int = 500,
    num_chains: int = 16,
    num_leapfrog: int = 5,
    start: str = "encoder",
) -> Bounds:
    """Both bounds on rows simulated from the model, num_rows of them or one a row of x: what `log_prob` and `ais` leave out, measured."""
    key_params, key_rows, key_run = jax.random.split(as_key(key), 3)
    model, params = _asked(key_params, fit, start)
    if (x is None) != (model.x_size == 0):
        raise ModelError(message("Rows are simulated given x.", f"x={type(x).__name__}", "x as in the fit", "pass x=… if the fit has it"))
    x = None if x is None else jnp.asarray(x, jnp.float32).reshape(len(x), -1)
    hidden, shown = compiled(model, VAE.ancestral, num_rows if x is None else len(x))(key_rows, params, x)
    ask = compiled(model, _bound, start, num_steps, num_chains, num_leapfrog, True)
    lower, upper = by_pieces(key_run, lambda k, given: ask(k, params, *given), (shown, x, hidden), max(1, CHAINS_AT_ONCE // num_chains))
    return Bounds(lower, upper, np.asarray(shown).reshape(-1, *model.y_shape))


def _bound(
    model: VAE,
    key: Key,
    params: Tree,
    shown: Array,
    x: Any,
    hidden: tuple[Array, ...],
    start: str,
    num_steps: int,
    num_chains: int,
    num_leapfrog: int,
    both: bool,
) -> tuple[Array, Array]:
    """Bounds (n,) and (n,) of some rows: upwards from r, and, if wanted, downwards from hidden."""
    key_pilot, key_begin, key_up, key_down = jax.random.split(noise_key(key), 4)
    x = model.seen(params, x)
    ends = _ends(model, params, shown, x, start)
    scales = _scales(model, params, shown, x, start)
    ladder = jnp.asarray(_ladder(num_steps, start), jnp.float32)
    begin = lambda k: ends(_begin(model, k, params, shown, x, start, num_chains))
    key_first, key_pilot = jax.random.split(key_pilot)
    log_step = _pilot(key_pilot, begin(key_first), ends, scales, _ladder(PILOT, start), num_leapfrog)
    # Step t moves at β_t with the ε that the pilot had there; the last move, at β = 1, would weigh nothing.
    at = np.minimum(np.arange(1, num_steps) * PILOT // num_steps, PILOT - 1).astype(np.int32)

    def run(key: Key, here: Along, betas: Array, at: np.ndarray) -> Array:
        def one(carry: tuple[Along, Array], now: tuple[Key, Array, Array, Array]) -> tuple[tuple[Along, Array], None]:
            here, log_weight = carry
            k, beta, change, steps = now
            log_weight = log_weight + change * (here.end - here.start)
            return (_move(k, here, beta, steps, ends, scales, num_leapfrog)[0], log_weight), None

        inner = betas[1:-1]
        keys = jax.random.split(key, len(inner))
        (here, log_weight), _ = jax.lax.scan(one, (here, jnp.zeros_like(here.end)), (keys, inner, jnp.diff(betas[:-1]), log_step[at]))
        return log_weight + (betas[-1] - betas[-2]) * (here.end - here.start)

    lower = log_mean(run(key_up, begin(key_begin), ladder, at))
    if not both:
        return lower, lower
    exact = jnp.broadcast_to(jnp.concatenate(hidden, axis=-1), (num_chains, len(shown), sum(model.latent_dim)))
    return lower, -log_mean(run(key_down, ends(exact), ladder[::-1], at[::-1]))


def _pilot(key: Key, here: Along, ends: Callable, scales: Callable, betas: np.ndarray, num_leapfrog: int) -> Array:
    """log ε of every step and row, (PILOT, n), by a run of its own: in the runs that count, nothing depends on where their chains have been."""
    limit = np.log(0.5 * np.pi / num_leapfrog)  # a quarter of a turn: as far as a trajectory in a Gaussian can usefully go

    def one(carry: tuple[Along, Array], now: tuple[Key, Array]) -> tuple[tuple[Along, Array], Array]:
        here, log_step = carry
        here, acceptance = _move(now[0], here, now[1], log_step, ends, scales, num_leapfrog)
        return (here, jnp.minimum(log_step + RATE * (jnp.mean(acceptance, axis=0) - WANTED), limit)), log_step

    first = jnp.full(here.end.shape[1:], min(limit, np.log(0.3)))
    keys = jax.random.split(key, len(betas) - 1)
    return jax.lax.scan(one, (here, first), (keys, jnp.asarray(betas[1:], jnp.float32)))[1]


def _move(key: Key, here: Along, beta: Array, log_step: Array, ends: Callable, scales: Callable, num_leapfrog: int) -> tuple[Along, Array]:
    """One Hamiltonian trajectory of every chain at β, and with which probability it was taken, (C, n)."""
    key_step, key_momentum, key_accept = jax.random.split(key, 3)
    scale = scales(beta)
    jitter = 1.0 + JITTER * jax.random.uniform(key_step, log_step.shape, minval=-1.0)
    step = (jnp.exp(log_step) * jitter)[:, None] * scale

    def density(z: Array) -> tuple[Array, Along]:
        there = ends(z)
        return jnp.sum((1.0 - beta) * there.start + beta * there.end), there

    slope = jax.grad(density, has_aux=True)

    def leap(_: Any, at: tuple[Array, Array, Array, Along]) -> tuple[Array, Array, Array, Along]:
        z, momentum, gradient, _ = at
        momentum = momentum + 0.5 * step * gradient
        z = z + step * momentum
        gradient, there = slope(z)
        return z, momentum + 0.5 * step * gradient, gradient, there

    momentum = jax.random.normal(key_momentum, here.z.shape)
    gradient, now = slope(here.z)
    _, last, _, there = jax.lax.fori_loop(0, num_leapfrog, leap, (here.z, momentum, gradient, now))
    energy = lambda at, p: (1.0 - beta) * at.start + beta * at.end - 0.5 * jnp.sum(p**2, axis=-1)
    change = energy(there, last) - energy(here, momentum)
    change = jnp.where(jnp.isfinite(change), change, -jnp.inf)
    taken = jnp.log(jax.random.uniform(key_accept, change.shape)) < change
    pick = lambda new, old: jnp.where(taken.reshape(*taken.shape, *[1] * (new.ndim - 2)), new, old)
    return jax.tree.map(pick, there, here), jnp.exp(jnp.minimum(change, 0.0))


def _ends(model: VAE, params: Tree, shown: Array, x: Any, start: str) -> Callable:
    """z (C, n, D) → log r and log p(y, z) with it."""
    cuts = np.cumsum(model.latent_dim)[:-1].tolist()

    def ends(z: Array) -> Along:
        hidden = tuple(jnp.split(z, cuts, axis=-1))
        prior = model.log_hidden(params, hidden, x)
        first = prior if start == "prior" else model.log_q(params, shown, x, hidden)
        return Along(z, first, prior + model.log_shown(params, hidden, shown, x))

    return ends


def _begin(model: VAE, key: Key, params: Tree, shown: Array, x: Any, start: str, num_chains: int) -> Array:
    """Draws of r, (C, n, D)."""
    if start == "encoder":
        hidden, _ = model.draw_hidden(params, shown, x, model.noise(key, num_chains, len(shown)))
    else:
        one = lambda k: model.hidden(k, params, x, len(shown))
        hidden = jax.vmap(one)(jax.random.split(key, num_chains))
    return jnp.concatenate(hidden, axis=-1)


def _scales(model: VAE, params: Tree, shown: Array, x: Any, start: str) -> Callable:
    """β → how far each coordinate reaches at β, (n, D): precisions in proportion, 1 in the prior and those of the encoder in the posterior."""
    inputs, found = shown, []
    for layer, d in enumerate(model.latent_dim):
        h = model.encoded(params, layer, inputs, x)
        inputs = h[..., :d]
        found.append(jnp.exp(h[..., d : 2 * d]))
    narrow = jnp.concatenate(found, axis=-1)
    if start == "encoder":
        return lambda beta: narrow
    return lambda beta: jax.lax.rsqrt((1.0 - beta) + beta / narrow**2)


def _ladder(num_steps: int, start: str) -> np.ndarray:
    """β from 0 to 1, (num_steps + 1,): even from q, which is near the posterior; closer together at both ends from the prior."""
    place = np.linspace(-1.0, 1.0, num_steps + 1)
    if start == "encoder":
        return 0.5 * (place + 1.0)
    curve = np.tanh(2.0 * place)
    return 0.5 * (curve / curve[-1] + 1.0)


def _asked(key: Key, fit: Any, start: str) -> tuple[VAE, Tree]:
    """The model and one draw of its parameters."""
    model = getattr(fit, "model", None)
    if not isinstance(model, VAE):
        raise ModelError(
            message("Only z of an autoencoder is annealed.", type(model or fit).__name__, "a fit of al.latent.VAE", "use al.evidence.ais")
        )
    if start not in ("encoder", "prior"):
        raise ModelError(message("Chains start from one of two.", repr(start), "'encoder' or 'prior'", "choose one of them"))
    if start == "encoder" and not model.posterior.closed:
        raise ModelError(message("This q has no closed density at a given z.", repr(model.posterior), "start='prior'", "use start='prior'"))
    return model, one_draw(key, fit)
