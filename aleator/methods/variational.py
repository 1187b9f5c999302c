"""Variational: the closest member of a family of distributions to the posterior, by stochastic gradients of the evidence lower bound."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, diagnostics
from aleator._errors import MethodError, message, nearest
from aleator._random import noise_key
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.families import MixtureOfGaussians, as_family
from aleator.linalg import Diagonal
from aleator.loop import TRACE_POINTS, Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods._estimators import Plan, closed_kl, draws, score_surrogate
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._plan import make_plan
from aleator.posterior import Gaussian, Mixture, Posterior, Score, Transformed, at_once, row_bytes

LOG_EVERY = 20  # steps between looks at a closed KL: its value, unlike its gradient, is needed for nothing but the log
ESTIMATORS = ("auto", "weight", "local", "flipout", "stl", "score", "analytic")
DIVERGENCES = ("elbo", "importance_weighted", "forward_kl")
EVIDENCE_ROWS = 1000  # rows per step of the pass that evaluates the bound
GOOD, USABLE = 0.5, 0.7  # Pareto k̂ below which importance weights have a finite variance, and below which they still serve
CLOSE = 0.1  # nats between the bound and the importance-weighted evidence that nobody would notice


@dataclasses.dataclass(frozen=True)
class Renyi:
    """The Rényi bound L_α = log E_q[(p(θ, D)/q(θ))^(1−α)]/(1 − α), from K = num_draws draws (Li and Turner 2016).

    α → 1 is the ELBO, α = 0 the importance-weighted bound; smaller α covers more of the posterior.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not np.isfinite(self.alpha):
            raise MethodError(message("Renyi needs an order.", repr(self.alpha), "a finite number", "pass e.g. al.Renyi(0.5)"))


class State(NamedTuple):
    """moved: what the optimiser moves (φ, and the point parameters trained with it), packed; fixed: parameters kept at their start.

    kl: as last looked at. key: key data of the draws that evaluate the bound; evidence: their running sums (an Evidence), or ().
    """

    moved: Tree
    fixed: Tree
    optimizer: Any
    step: Array
    kl: Array
    key: Array
    evidence: Any


class Evidence(NamedTuple):
    """Per draw s ~ q, (S,): Σᵢ log p(yᵢ|xᵢ,θₛ) over the rows seen, log p(θₛ), log q(θₛ), and E log p + H in closed form (NaN where it is
    not); rows: how many were seen."""

    log_likelihood: Array
    log_prior: Array
    log_q: Array
    closed: Array
    rows: Array


class Info(NamedTuple):
    """log_likelihood: (N/n)·E_q Σ log p(yᵢ|xᵢ,θ), estimated from the step's batch and draws. kl: KL(q, prior) = −E log p(θ) − H(q),
    every few steps where it is closed."""

    log_likelihood: Array
    kl: Array


def init(key: Key, start: Tree, plan: Plan, optimizer: Any) -> State:
    key_family, key_draws = jax.random.split(key)
    parts, rest = plan.layout.split(start)
    q = plan.family.init(key_family, parts, plan.method.initial_scale)
    joint = plan.method.rest == "joint"
    moved = plan.packing.pack({"q": q, "rest": rest if joint else ()})
    number, dtype = plan.method.num_evidence, parts[0].dtype
    zeros = jnp.zeros((number,), dtype)
    evidence = Evidence(zeros, zeros, zeros, zeros, jnp.zeros((), jnp.int32)) if number else ()
    none = jnp.zeros((), dtype)
    return State(
        moved, () if joint else rest, optimizer.init(moved), jnp.zeros((), jnp.int32), none, jax.random.key_data(key_draws), evidence
    )


def step(key: Key, state: State, batch: Batch | None, plan: Plan, optimizer: Any) -> tuple[State, Info]:
    """φ ← φ − update(∇[−bound/N])."""
    import optax

    scale = max(plan.target.num_data, 1)

    def loss(moved: Tree) -> tuple[Array, tuple[Array, Array]]:
        rest = moved["rest"] if plan.method.rest == "joint" else state.fixed
        value, data, kl = objective(key, moved["q"], rest, batch, plan, state.step)
        return -value / scale, (data, kl)

    # As in MAP, the gradient is taken by leaf and then packed.
    gradient, (data, kl) = jax.grad(loss, has_aux=True)(plan.packing.unpack(state.moved))
    updates, optimizer_state = optimizer.update(plan.packing.pack(gradient), state.optimizer, state.moved)
    if plan.closed_prior and plan.closed_entropy:
        kl = jax.lax.cond(
            state.step % LOG_EVERY == 0, lambda: closed_kl(*plan.unpack(state), plan).astype(state.kl.dtype), lambda: state.kl
        )
    moved = optax.apply_updates(state.moved, updates)
    return state._replace(moved=moved, optimizer=optimizer_state, step=state.step + 1, kl=kl.astype(state.kl.dtype)), Info(data, kl)


def objective(
    key: Key, q: Tree, rest: tuple[Array, ...], batch: Batch | None, plan: Plan, number: Array | int = 0
) -> tuple[Array, Array, Array]:
    """(what is maximised, E log-likelihood, KL). For all but the ELBO only the gradient of the first means anything.

    ELBO: (E log lik + E log prior)/T + H(q), with KL warm-up (E log lik)/T + r·(E log prior/T + H).
    Rényi: Σ w̄ ∇log w with w̄ ∝ w^(1−α). Where q alone is trained, the part of it that acts through log q's own φ is replaced by its
    mean, Σ [αw̄ + (1 − α)w̄²] ∂log w/∂θ ∂θ/∂φ (doubly reparameterised; Tucker et al. 2019), whose noise vanishes where q is exact.
    """
    method, family, temperature = plan.method, plan.family, plan.target.temperature
    ramp = jnp.minimum(1.0, (number + 1) / method.kl_warmup) if method.kl_warmup else 1.0
    log_weight, terms = draws(key, q, rest, batch, plan)
    entropy = family.entropy(q) if plan.closed_entropy else None
    weight = jnp.exp(log_weight)
    average = lambda values: jnp.sum(weight * values)
    minus_entropy = average(terms.log_q) if entropy is None else -entropy
    data, kl = average(terms.data), minus_entropy - average(terms.prior)
    if method.divergence == "elbo" and plan.estimator != "score":
        return (data + ramp * average(terms.prior)) / temperature - ramp * minus_entropy, data, kl
    same_draw = (terms.data + ramp * terms.prior) / temperature
    if plan.estimator == "score":
        return score_surrogate(same_draw, terms.log_q, ramp, entropy), data, kl
    log_ratio = same_draw - ramp * terms.log_q
    if method.divergence == "forward_kl":
        share = jax.lax.stop_gradient(jax.nn.softmax(log_weight + log_ratio))
        return jnp.sum(share * (terms.log_q + same_draw)), data, kl
    order = 1.0 - method.order
    if not plan.doubly:
        return jax.nn.logsumexp(log_weight + order * log_ratio) / order, data, kl
    share = jax.nn.softmax(log_weight + order * log_ratio)
    return jnp.sum(jax.lax.stop_gradient(method.order * share + order * share**2) * log_ratio), data, kl


def evaluate(key: Key, state: State, batch: Batch | None, plan: Plan) -> tuple[State, Info]:
    """Add one batch to the log-likelihoods of the evidence's draws: always draws of weights, whatever the estimator of the steps."""
    q, rest = plan.unpack(state)
    family, target, number = plan.family, plan.target, plan.method.num_evidence
    entropy, marginals = family.entropy(q), family.marginals(q)
    keys = jax.random.split(noise_key(jax.random.wrap_key_data(state.key)), number)
    network_keys = jax.random.split(key, number) if target.stochastic else keys

    def one(pair: tuple[Key, Key]) -> tuple[Array, ...]:
        parts = family.sample(pair[0], q)
        params = plan.layout.join(parts, rest)
        if batch is None:
            prior, data = target.parts(params, None)
        else:
            data = batch.weighted_sum(target.log_likelihood(params, batch, pair[1] if target.stochastic else None))
            prior = target.log_prior(params)
        closed = None
        if entropy is not None and marginals is not None:
            closed = target.expected_log_prior(plan.layout.join(marginals[0], rest), plan.layout.spread(marginals[1], rest), params)
        dtype = state.evidence.log_q.dtype
        values = (data, prior, family.log_prob(q, parts), jnp.nan if closed is None else closed + entropy)
        return tuple(jnp.asarray(value, dtype) for value in values)

    rows = (
        1 if batch is None else (batch.index.shape[0] if batch.index is not None else _tree.rows(batch.y if batch.x is None else batch.x))
    )
    cost = 4 * _tree.size(q) + rows * (1 if batch is None or batch.x is None else row_bytes(target.model, batch.x))
    # A key may be used once; the same draws meet every batch on purpose.
    data, prior, log_q, closed = jax.lax.map(one, (keys, jax.random.clone(network_keys)), batch_size=at_once(cost, number))
    seen = 0 if batch is None else jnp.asarray(batch.size, jnp.int32)
    evidence = Evidence(state.evidence.log_likelihood + data, prior, log_q, closed, state.evidence.rows + seen)
    factor = 1.0 if batch is None else target.num_data / batch.size
    return state._replace(evidence=evidence), Info(jnp.mean(data) * factor, jnp.mean(log_q - prior))


@dataclasses.dataclass(frozen=True)
class Variational(Method):
    """q* = argmin KL(q, posterior) over a family, by maximising the bound E_q log p(D|θ) − KL(q, prior) ≤ log p(D).

    family: "mean_field", "full_rank", "matrix_normal", or an object of `al.families` (LowRank, MixtureOfGaussians, Flow).

    estimator of the gradient: "weight" draws weights (num_draws of them, antithetic: in pairs ±z); "local" draws the outputs of each layer
    (exact for weights used once per example, an approximation where they are used at several positions: see manifest["sites"]); "flipout"
    gives each example its own signs; "stl" (sticking the landing) leaves out the part of the gradient whose mean is zero, so that its noise
    vanishes where q is exact; "score" needs no gradient of the network (num_draws ≥ 2, each draw's baseline is the mean of the others);
    "analytic" takes E log N(y; f, σ²) in closed form where outputs are linear in q's weights; "auto" is local for the mean-field family
    on networks with sites, else weight.

    over: "all", "last_layer", or patterns of paths ("network.layer1.*", "likelihood.*"): the leaves in q. The others are point parameters:
    rest="joint" trains them by the same bound, their log prior included; rest="fixed" keeps them at their start (init= a MAP fit).
    A point "prior.*" under a hierarchical prior is empirical Bayes; a point "likelihood.*" is the noise by (penalised) maximum likelihood.

    divergence: "elbo", "importance_weighted" (K = num_draws), al.Renyi(α) or "forward_kl" (KL(posterior, q) by self-normalised weights).
    kl_warmup: steps over which the KL term grows from 0 to 1. Warm-up, and importance-weighted bounds on mini-batches, are noted in
    manifest["departures"]. num_evidence: draws for log_evidence, a lower bound with its standard error, always of weights. The other
    arguments are as in `al.MAP`.
    """

    family: Any = "mean_field"
    estimator: str = "auto"
    num_steps: int = 2000
    batch_size: int | None = None
    learning_rate: float = 1e-2
    optimizer: Any = "adam"
    schedule: str = "cosine"
    num_draws: int = 1
    antithetic: bool = False
    over: Any = "all"
    rest: str = "joint"
    divergence: Any = "elbo"
    kl_warmup: int = 0
    initial_scale: float = 0.05
    num_evidence: int = 64
    clip: float | None = None

    card: ClassVar[Card] = Card(
        name="Variational",
        summary="The best approximation within a family of distributions, at the price of an optimisation.",
        model_class="any model with a log joint; differentiable for all estimators but the score function",
        criterion="evidence lower bound (or a Rényi or importance-weighted bound, or the forward KL)",
        search="stochastic gradients of the bound",
        cost="mean-field: about two MAP steps each and twice its memory; full rank: memory quadratic in the weights",
        needs="a log joint that is finite where q puts its mass",
        references=(
            "Blundell et al., Weight uncertainty in neural networks, 2015",
            "Kingma, Salimans and Welling, Variational dropout and the local reparameterization trick, 2015",
            "Wen et al., Flipout, 2018",
            "Tucker et al., Doubly reparameterized gradient estimators for Monte Carlo objectives, 2019",
            "Roeder, Wu and Duvenaud, Sticking the landing, 2017",
            "Kucukelbir et al., Automatic differentiation variational inference, 2017",
            "Yao et al., Yes, but did it work? Evaluating variational inference, 2018",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "num_draws", whole=True)
        check_positive(self, "learning_rate", "clip", "initial_scale")
        if isinstance(self.over, (list, tuple)):
            object.__setattr__(self, "over", tuple(str(pattern) for pattern in self.over))
        as_family(self.family)
        for name, allowed in (("estimator", ESTIMATORS), ("rest", ("joint", "fixed"))):
            value = getattr(self, name)
            if value not in allowed:
                raise MethodError(
                    message(f"Unknown {name}.", repr(value) + nearest(str(value), allowed), f"one of {allowed}", "choose one")
                )
        if not isinstance(self.divergence, Renyi) and self.divergence not in DIVERGENCES:
            raise MethodError(message("Unknown divergence.", repr(self.divergence), f"one of {DIVERGENCES} or al.Renyi(α)", "choose one"))
        if isinstance(self.divergence, Renyi) and self.divergence.alpha == 1.0:
            object.__setattr__(self, "divergence", "elbo")
        for name in ("kl_warmup", "num_evidence"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise MethodError(message(f"Variational.{name} cannot be used.", repr(getattr(self, name)), "a whole number ≥ 0", "pass 0"))
        self._check_draws()
        if self.optimizer == "lbfgs":
            raise MethodError(message("L-BFGS needs exact gradients.", "'lbfgs'", "a stochastic optimiser", "use 'adam'"))
        _optimise.check_optimizer(self)

    def _check_draws(self) -> None:
        if self.antithetic and (self.num_draws % 2 or self.estimator in ("local", "flipout", "analytic")):
            got = f"antithetic=True with estimator={self.estimator!r}, num_draws={self.num_draws}"
            expected = "an even num_draws and noise on the weights"
            raise MethodError(message("Antithetic draws come in pairs of weights.", got, expected, "use estimator='weight', num_draws=2"))
        if self.estimator == "score" and self.num_draws < 2:
            got = f"num_draws={self.num_draws}"
            raise MethodError(message("The score function needs a baseline.", got, "num_draws ≥ 2", "pass e.g. num_draws=8"))
        if self.divergence != "elbo" and self.estimator not in ("auto", "weight"):
            got = f"divergence={self.divergence!r} with estimator={self.estimator!r}"
            raise MethodError(message("This divergence needs draws of weights.", got, "estimator='weight'", "leave estimator='auto'"))
        if self.divergence != "elbo" and self.num_draws < 2:
            got = f"num_draws={self.num_draws}"
            raise MethodError(message("This divergence compares several draws.", got, "num_draws ≥ 2", "pass e.g. num_draws=16"))

    @property
    def order(self) -> float:
        """α of the Rényi bound; 0 for the importance-weighted one."""
        return self.divergence.alpha if isinstance(self.divergence, Renyi) else 0.0

    def build(self, target: Any) -> Algorithm:
        optimizer, (plan, treatments) = _optimise.optimizer(self), make_plan(self, target)
        has_data = target.model is not None
        batches = None if not has_data else "full" if self.batch_size is None else "random"
        phases = [
            Phase("Variational", lambda key, s, batch: step(key, s, batch, plan, optimizer), self.num_steps, batches, self.batch_size)
        ]
        if self.num_evidence:
            splits = has_data and getattr(target.model, "minibatch", True)
            kind = "once" if splits else "full" if has_data else None
            count = None if splits else 1
            phases.append(Phase("evidence", lambda key, s, batch: evaluate(key, s, batch, plan), count, kind, EVIDENCE_ROWS))

        def position(state: State) -> Tree:
            q, rest = plan.unpack(state)
            return plan.layout.join(plan.family.centre(q), rest)

        return Algorithm(
            init=lambda key, start: init(key, start, plan, optimizer),
            phases=tuple(phases),
            position=position,
            finish=lambda key, state, kept: _posterior(state, plan, position(state)),
            watch="log_likelihood",
            verdict=lambda result: _verdict(result, plan),
            notes={"sites": treatments, "estimator": plan.estimator, "departures": _departures(self, target)},
        )


def _departures(method: Variational, target: Any) -> list[str]:
    """Everything by which the answer differs from Bayes, by name."""
    found = []
    if target.temperature != 1.0:
        found.append(f"temperature {target.temperature}: q approximates the posterior raised to 1/temperature")
    if method.kl_warmup:
        found.append(f"KL warm-up over the first {method.kl_warmup} steps")
    if method.divergence != "elbo":
        name = f"Rényi bound of order {method.order:g}" if method.divergence != "forward_kl" else "forward KL"
        found.append(f"{name} from {method.num_draws} draws in place of the ELBO")
        if method.batch_size is not None and target.model is not None:
            found.append(f"{name} on mini-batches, whose estimates are biased")
    return found


# ---- what comes out ---------------------------------------------------------------------------------------------------------------


def _posterior(state: State, plan: Plan, mean: Tree) -> Posterior:
    q, rest = plan.unpack(state)
    family, chosen = plan.family, plan.layout.chosen
    evidence = _log_evidence(state, plan)
    operator = family.operator(q)
    if operator is not None:
        return Gaussian(mean, operator, chosen, evidence)
    if isinstance(family, MixtureOfGaussians):
        parts = [Gaussian(plan.layout.join((m,), rest), Diagonal(jnp.exp(rho)), chosen) for m, rho in zip(q["mean"], q["rho"], strict=True)]
        return Mixture(tuple(parts), np.asarray(jax.nn.softmax(q["logits"])), evidence)
    return Transformed(mean, q, family, chosen, evidence)


def _log_ratios(evidence: Evidence, num_data: int) -> tuple[np.ndarray, np.ndarray]:
    """log p(D, θₛ) − log q(θₛ), and log p(D|θₛ) + E log p + H with the KL in closed form (NaN where it is not); (…, S), float64."""
    data, prior, log_q, closed = (np.asarray(part, np.float64) for part in evidence[:4])
    rows = np.asarray(evidence.rows)[..., None]
    data = np.where(rows > 0, data * num_data / np.maximum(rows, 1), data)  # a stream may not give each row exactly once
    return data + prior - log_q, data + closed


def _log_evidence(state: State, plan: Plan) -> Score | None:
    """The ELBO, by the one of its two unbiased estimates with the smaller standard error: near the posterior the draws' own log q cancels
    the noise of the log joint; far from it the closed KL has none of its own."""
    if state.evidence == () or plan.target.temperature != 1.0:
        return None
    estimates = [(float(v.mean()), float(v.std(ddof=1) / np.sqrt(len(v)))) for v in _log_ratios(state.evidence, plan.target.num_data)]
    finite = [pair for pair in estimates if np.isfinite(pair).all()]
    if not finite:
        return None
    value, error = min(finite, key=lambda pair: pair[1])
    return Score(value, error, "lower bound")


def _verdict(result: Any, plan: Plan) -> tuple[str, bool]:
    """How the optimisation went, and how far q is from the posterior by the tail of its importance weights."""
    bound = result.traces["log_likelihood"] - result.traces["kl"]
    bound = bound[..., : len(range(0, plan.method.num_steps, max(1, plan.method.num_steps // TRACE_POINTS)))]  # without the evidence's
    said = diagnostics.levelled("bound", bound, plan.method.num_steps)
    if result.state.evidence == () or plan.target.temperature != 1.0:
        return said, True
    ratios = _log_ratios(result.state.evidence, plan.target.num_data)[0]
    if not np.all(np.isfinite(ratios)):
        return f"{said} Some draws of q have no finite log joint: lower initial_scale or check the support.", False
    each = ratios.reshape(-1, ratios.shape[-1])
    tail = max(diagnostics.pareto_k(row) for row in each)
    weighted = float(np.mean([np.logaddexp.reduce(row) - np.log(len(row)) for row in each]))
    size = sum(int(np.prod(shape)) for shape, take in zip(plan.layout.shapes, plan.layout.chosen, strict=True) if take)
    away = weighted - float(np.mean(each))  # KL(q, posterior), as far as the weights can tell
    if tail < GOOD:
        quality = "q is close to the posterior"
    elif tail < USABLE:
        quality = "q is near the posterior; importance weights still correct it"
    elif away < CLOSE:
        quality = "q is close to the posterior but too light in its tails"
    else:
        quality = "q misses part of the posterior" + (" (usual for a network)" if size > 50 else "; try a richer family")
    return f"{said} Pareto k̂ = {tail:.2f}: {quality}; importance-weighted log evidence {weighted:.4g}, {away:.2g} above the bound.", True
