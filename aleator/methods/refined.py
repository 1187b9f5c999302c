"""Refined: a variational start that a few steps of a sampler refine, trained together (the variationally inferred sampler).

Three bounds, of which two are bounds. π(z) = p(D, z); q₀ = N(μ, S), S diagonal; T steps lead from z₀ ~ q₀ to z_T.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import diagnostics
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.families import LOG_2PI
from aleator.loop import TRACE_POINTS, Algorithm, Phase
from aleator.methods import _chains, _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Draws, Posterior, Score

KINDS = ("langevin", "particle", "approximate")
MAX_EXACT = 200  # parameters up to which the determinant of a deterministic refinement is taken
FOLDED = 1e-3  # an eigenvalue of its Jacobian below this means that the map is about to fold over
BLOCK = 16  # draws refined at once at the end


class State(NamedTuple):
    """values: {"mean", "rho" (D,): of q₀, S = e^{2ρ}; "log_step" (T,): log η; "anneal" (T,): logits of the steps of β}. search, optimizer:
    states of the optimisers of q₀ alone and of all. draws (S, D) and
    log_weight (S,), with the smallest eigenvalue of the Jacobians they met (1 for kinds without): filled at the end."""

    values: Tree
    search: Any
    optimizer: Any
    draws: Array
    log_weight: Array
    folded: Array


class Info(NamedTuple):
    """bound: what the step ascends, its mean over the draws of the step."""

    bound: Array


class Path(NamedTuple):
    """Refinement made concrete: sizes η (T,) and temperatures β (T,), β_T = 1."""

    sizes: Array
    betas: Array


def path(values: Tree, num_refine: int) -> Path:
    """η and β of each step; stretched where more steps are asked for than were trained: β follows the same curve, η its own."""
    trained = values["log_step"].shape[0]
    betas = jnp.cumsum(jax.nn.softmax(values["anneal"])) if trained else jnp.zeros(0, values["mean"].dtype)
    sizes = jnp.exp(values["log_step"])
    if num_refine == trained or not trained:
        return Path(sizes, betas)
    old = jnp.arange(trained + 1, dtype=sizes.dtype) / trained
    new = jnp.arange(1, num_refine + 1, dtype=sizes.dtype) / num_refine
    return Path(jnp.interp(new, old[1:], sizes), jnp.interp(new, old, jnp.concatenate([jnp.zeros(1, betas.dtype), betas])))


def start(key: Key, values: Tree) -> tuple[Array, Array]:
    """z₀ ~ q₀ and log q₀(z₀)."""
    noise = jax.random.normal(key, values["mean"].shape, values["mean"].dtype)
    z = values["mean"] + jnp.exp(values["rho"]) * noise
    return z, log_start(values, z)


def log_start(values: Tree, z: Array) -> Array:
    return -0.5 * jnp.sum(((z - values["mean"]) * jnp.exp(-values["rho"])) ** 2) - jnp.sum(values["rho"]) - 0.5 * z.size * LOG_2PI


def langevin(key: Key, values: Tree, density: Callable[[Array], Array], steps: Path) -> tuple[Array, Array, Array]:
    """z_T, log w and 1. Langevin steps through log π_t = (1 − β_t)·log q₀ + β_t·log π,

    z_t ~ F_t = N(z_{t−1} + η_t S∇log π_t(z_{t−1}), 2η_t S),  undone by B_t(z_{t−1}|z_t) = N(z_t + η_t S∇log π_t(z_t), 2η_t S),

    log w = log π(z_T) − log q₀(z₀) + Σ_t [log B_t(z_{t−1}|z_t) − log F_t(z_t|z_{t−1})]. The numerator is a density of the whole path with
    normaliser p(D), whatever η and β are, so that E[w] = p(D) and E[log w] ≤ log p(D).
    """
    key_start, key_steps = jax.random.split(key)
    z, log_q = start(key_start, values)
    scale = jnp.exp(values["rho"])

    def drift(z: Array, beta: Array) -> Array:
        """S^{½}∇log π_t."""
        return scale * jax.grad(lambda q: (1.0 - beta) * log_start(values, q) + beta * density(q))(z)

    def one(carry: tuple[Array, Array], step: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        z, total = carry
        noise, eta, beta = step
        move = eta * drift(z, beta) + jnp.sqrt(2.0 * eta) * noise
        new = z + scale * move
        back = (move + eta * drift(new, beta)) / jnp.sqrt(2.0 * eta)
        return (new, total + 0.5 * jnp.sum(noise**2) - 0.5 * jnp.sum(back**2)), None

    # All noise at once: a key inside the loop would be used again on the way back.
    noise = jax.random.normal(key_steps, (steps.sizes.shape[0], *z.shape), z.dtype)
    (z, total), _ = jax.lax.scan(one, (z, jnp.zeros((), z.dtype)), (noise, steps.sizes, steps.betas))
    return z, density(z) - log_q + total, jnp.ones((), z.dtype)


def particle(key: Key, values: Tree, density: Callable[[Array], Array], steps: Path) -> tuple[Array, Array, Array]:
    """z_T, log w and the smallest eigenvalue met. Deterministic steps z ← z + ηS∇log π(z) push q₀ forward, and

    log w = log π(z_T) − log q₀(z₀) + Σ_t log det(I + η_t S^{½}∇²log π(z_{t−1})S^{½}),

    an evidence lower bound of the pushed density as long as the map is one to one: where all eigenvalues are positive. Below FOLDED the
    logarithm goes on as its tangent, whose slope leads training back.
    """
    z, log_q = start(key, values)
    scale = jnp.exp(values["rho"])

    def one(carry: tuple[Array, Array, Array], eta: Array) -> tuple[tuple[Array, Array, Array], None]:
        z, total, least = carry
        gradient, hessian = jax.grad(density)(z), jax.hessian(density)(z)
        eigenvalues = 1.0 + eta * jnp.linalg.eigvalsh(scale[:, None] * hessian * scale)
        flat = FOLDED * jnp.ones_like(eigenvalues)
        total = total + jnp.sum(
            jnp.where(eigenvalues > FOLDED, jnp.log(jnp.maximum(eigenvalues, flat)), jnp.log(flat) + eigenvalues / flat - 1.0)
        )
        return (z + eta * scale**2 * gradient, total, jnp.minimum(least, jnp.min(eigenvalues))), None

    begin = (z, jnp.zeros((), z.dtype), jnp.ones((), z.dtype))
    (z, total, least), _ = jax.lax.scan(one, begin, steps.sizes)
    return z, density(z) - log_q + total, least


def approximate(key: Key, values: Tree, density: Callable[[Array], Array], steps: Path) -> tuple[Array, Array, Array]:
    """z_T, log π(z_T) − log q₀(z₀) and 1: Langevin steps at β = 1 whose effect on the entropy is left out, as in the cheap forms of the paper.
    No bound: refinement contracts, and what that takes from the entropy is not paid for."""
    key_start, key_steps = jax.random.split(key)
    z, log_q = start(key_start, values)
    scale = jnp.exp(values["rho"])

    def one(z: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        noise, eta = step
        return z + eta * scale**2 * jax.grad(density)(z) + jnp.sqrt(2.0 * eta) * scale * noise, None

    noise = jax.random.normal(key_steps, (steps.sizes.shape[0], *z.shape), z.dtype)
    z, _ = jax.lax.scan(one, z, (noise, steps.sizes))
    return z, density(z) - log_q, jnp.ones((), z.dtype)


def init(key: Key, position: Array, method: Refined, search: Any, optimizer: Any) -> State:
    number = method.num_refine
    values = {
        "mean": position,
        "rho": jnp.full_like(position, np.log(method.initial_scale)),
        "log_step": jnp.full((number,), np.log(method.step_size), position.dtype),
        "anneal": jnp.zeros((number,), position.dtype),
    }
    draws = jnp.zeros((method.num_samples, position.shape[0]), position.dtype)
    return State(values, search.init(values), optimizer.init(values), draws, draws[:, 0], jnp.ones((), position.dtype))


def step(
    key: Key, state: State, density: Callable[[Array], Array], run: Callable, optimizer: Any, method: Refined, scale: float
) -> tuple[State, Info]:
    """(φ, η) ← (φ, η) + update(∇E[log w]), by differentiating through the whole refinement."""
    steps = lambda values: path(values, method.num_refine)
    values, optimizer_state, bound = _ascend(key, state.values, density, run, steps, optimizer, state.optimizer, method.num_draws, scale)
    return state._replace(values=values, optimizer=optimizer_state), Info(bound)


def approach(key: Key, state: State, density: Callable[[Array], Array], search: Any, method: Refined, scale: float) -> tuple[State, Info]:
    """The same without refinement: steps begin where q₀ has found the scales of the posterior, in whose units they are taken."""
    nothing = Path(jnp.zeros(0, state.values["mean"].dtype), jnp.zeros(0, state.values["mean"].dtype))
    values, search_state, bound = _ascend(
        key, state.values, density, langevin, lambda values: nothing, search, state.search, method.num_draws, scale
    )
    return state._replace(values=values, search=search_state), Info(bound)


def _ascend(
    key: Key,
    values: Tree,
    density: Callable[[Array], Array],
    run: Callable,
    steps: Callable[[Tree], Path],
    optimizer: Any,
    state: Any,
    num_draws: int,
    scale: float,
) -> tuple[Tree, Any, Array]:
    import optax

    keys = jax.random.split(key, num_draws)

    def loss(values: Tree) -> tuple[Array, Array]:
        bound = jnp.mean(jax.vmap(lambda k: run(k, values, density, steps(values))[1])(keys))
        return -bound / scale, bound

    gradient, bound = jax.grad(loss, has_aux=True)(values)
    updates, state = optimizer.update(gradient, state, values)
    return optax.apply_updates(values, updates), state, bound


def judge(key: Key, state: State, density: Callable[[Array], Array], run: Callable, method: Refined) -> tuple[State, Info]:
    """The draws of the posterior and their log w, on all rows, with as many steps as are asked for at the end."""
    steps = path(state.values, method.num_refine if method.num_final is None else method.num_final)
    keys = jax.random.split(key, method.num_samples)
    draws, weight, least = jax.lax.map(lambda k: run(k, state.values, density, steps), keys, batch_size=BLOCK)
    return state._replace(draws=draws, log_weight=weight, folded=jnp.min(least)), Info(jnp.mean(weight))


@dataclasses.dataclass(frozen=True)
class Refined(Method):
    """The variationally inferred sampler (Gallego and Ríos Insua 2021): q₀ = N(μ, diag e^{2ρ}) and the step sizes of num_refine = T steps of a
    sampler after it, trained together by differentiating through the steps. num_refine=0 is mean-field variational inference.

    kind: "langevin" (default), annealed Langevin steps with reverse kernels: log_evidence is a lower bound that closes as T grows;
    "particle", gradient steps with the determinant of their Jacobian: a lower bound as long as the steps do not fold, up to MAX_EXACT = 200 parameters;
    "approximate", the cheap form of the paper, Langevin steps with the entropy of their start: no bound, log_evidence is None.

    num_start steps train q₀ alone before num_steps train everything. step_size: η at the start, in units of the variances of q₀, one for each step; β of the annealing is learned too. num_final: steps at the end, for the num_samples
    draws that make up the posterior (None: num_refine); more of them along the same path come closer. num_draws: of each training step. Mini-batches (batch_size)
    are for training only, where each drives its own refinement; draws and bound are made on all rows. The other arguments are as in `al.MAP`.
    """

    kind: str = "langevin"
    num_refine: int = 5
    num_steps: int = 2000
    num_start: int = 1000
    num_draws: int = 4
    batch_size: int | None = None
    learning_rate: float = 1e-2
    step_size: float = 0.1
    initial_scale: float = 0.1
    num_samples: int = 500
    num_final: int | None = None
    optimizer: Any = "adam"
    schedule: str = "cosine"
    clip: float | None = None
    precision: str = "auto"

    card: ClassVar[Card] = Card(
        name="Refined",
        summary="Variational inference whose draws are refined by a few steps of a sampler, both trained by one bound.",
        model_class="any model with a log joint that is differentiable twice",
        criterion="evidence lower bound over whole paths (langevin), of the pushed density (particle); an approximation of it (approximate)",
        search="stochastic gradients through T steps of Langevin dynamics or gradient flow",
        cost="about T + 1 gradients and as many Hessian products per draw and step",
        needs="a posterior of moderate size: T activations of the model are held at once",
        references=(
            "Gallego and Ríos Insua, Variationally inferred sampling through a refined bound, 2021",
            "Thin et al., Monte Carlo variational auto-encoders, 2021",
            "Geffner and Domke, MCMC variational inference via uncorrected Hamiltonian annealing, 2021",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "num_draws", "num_samples", "batch_size", "num_final", whole=True)
        check_positive(self, "learning_rate", "step_size", "initial_scale", "clip")
        for name in ("num_refine", "num_start"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise MethodError(message(f"Refined.{name} cannot be used.", repr(value), "a whole number ≥ 0", f"pass e.g. {name}=5"))
        if self.kind not in KINDS:
            raise MethodError(message("Unknown kind.", repr(self.kind), f"one of {KINDS}", "choose one of them"))
        if self.num_final is not None and not self.num_refine:
            got = f"num_refine=0, num_final={self.num_final}"
            raise MethodError(message("There are no steps to take more of.", got, "num_refine ≥ 1", "raise num_refine, or drop num_final"))
        if self.optimizer == "lbfgs":
            raise MethodError(message("L-BFGS needs exact gradients.", "'lbfgs'", "a stochastic optimiser", "use 'adam'"))
        _chains.check_precision(self)
        _optimise.check_optimizer(self)

    def build(self, target: Any) -> Algorithm:
        x64, layout = _chains.prepare(self, target)
        size = len(layout.names)
        if self.kind == "particle" and size > MAX_EXACT:
            got = f"{size} parameters"
            raise MethodError(message("The determinant is too large.", got, f"at most {MAX_EXACT}", "pass kind='langevin'"))
        search = _optimise.optimizer(dataclasses.replace(self, num_steps=max(self.num_start, 1)))
        optimizer, run = _optimise.optimizer(self), {"langevin": langevin, "particle": particle, "approximate": approximate}[self.kind]
        density = lambda batch: lambda q: target.log_joint(layout.unravel(q), batch)
        scale = float(max(target.num_data, 1))

        def train(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            return step(key, state, density(batch), run, optimizer, self, scale)

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            evidence = None
            if self.kind != "approximate" and target.temperature == 1.0 and (self.kind != "particle" or float(state.folded) > FOLDED):
                weight = np.asarray(state.log_weight, np.float64)
                error = float(weight.std(ddof=1) / np.sqrt(len(weight))) if len(weight) > 1 else float("nan")
                evidence = Score(float(weight.mean()), error, "lower bound")
            return Draws(layout.unravel_all(np.asarray(state.draws)), log_evidence=evidence)

        batches = None if target.model is None else "full" if self.batch_size is None else "random"
        last = None if target.model is None else "full"
        first = lambda key, state, batch: approach(key, state, density(batch), search, self, scale)
        phases = [Phase("start", first, self.num_start, batches, self.batch_size)] if self.num_start else []
        phases.append(Phase("Refined", train, self.num_steps, batches, self.batch_size))
        phases.append(Phase("draws", lambda key, state, batch: judge(key, state, density(batch), run, self), 1, last))
        return Algorithm(
            init=lambda key, params: init(key, layout.ravel(params), self, search, optimizer),
            phases=tuple(phases),
            position=lambda state: layout.unravel(state.values["mean"]),
            finish=finish,
            watch="bound",
            verdict=lambda result: _verdict(result, self),
            x64=x64,
            notes={"departures": _departures(self) + _chains.tempered(target)},
        )


def _departures(method: Refined) -> list[str]:
    found = []
    if method.kind == "approximate":
        found.append("the entropy of the start stands for that of the refined draws: no bound")
    if method.batch_size is not None and method.num_refine:
        found.append("trained on mini-batches that refine their own draws: the training objective is biased")
    return found


def _verdict(result: Any, method: Refined) -> tuple[str, bool, dict[str, float]]:
    """How the optimisation went, and what the weights of the draws say."""
    points = len(range(0, method.num_steps, max(1, method.num_steps // TRACE_POINTS)))
    bound = result.traces["bound"][-points - 1 : -1]  # of the steps that train everything
    weight = np.asarray(result.state.log_weight, np.float64)
    health = {"log_weight": float(weight.mean()), "smallest_eigenvalue": float(result.state.folded)}
    health["step_size"] = float(np.mean(np.exp(np.asarray(result.state.values["log_step"], np.float64)))) if method.num_refine else 0.0
    if not np.all(np.isfinite(weight)):
        return "Some refined draws have no finite log joint: lower step_size or raise num_steps.", False, health
    if method.kind == "particle" and health["smallest_eigenvalue"] <= FOLDED:
        return "The refinement folds over: its score is no bound and is not reported; lower step_size.", False, health
    said = diagnostics.levelled("objective", bound, method.num_steps)
    if method.kind == "langevin":
        top = weight.max()
        health["weighted_log_evidence"] = float(top + np.log(np.mean(np.exp(weight - top))))
        health["pareto_k"] = float(diagnostics.pareto_k(weight))
        said += f" Importance-weighted log evidence {health['weighted_log_evidence']:.4g}, Pareto k̂ = {health['pareto_k']:.2f}."
    return said, True, health
