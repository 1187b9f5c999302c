"""Variational: the closest member of a family of distributions to the posterior, by stochastic gradients of the evidence lower bound."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, noise, sites
from aleator._errors import MethodError, message, nearest
from aleator._random import noise_key
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.families import Family, MeanField, MixtureOfGaussians, as_family
from aleator.linalg import Diagonal
from aleator.loop import TRACE_POINTS, Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import BYTE_BUDGET, Gaussian, Mixture, Posterior, Score, Transformed, row_bytes

LOG_EVERY = 20  # steps between looks at a closed KL: its value, unlike its gradient, is needed for nothing but the log
ESTIMATORS = ("auto", "weight", "local", "flipout", "stl", "score", "analytic")
DIVERGENCES = ("elbo", "importance_weighted", "forward_kl")
EVIDENCE_ROWS = 1000  # rows per step of the pass that evaluates the bound
GOOD, USABLE = 0.5, 0.7  # Pareto k̂ below which importance weights have a finite variance, and below which they still serve
CLOSE = 0.1  # nats between the bound and the importance-weighted evidence that nobody would notice
LINEAR = 1e-3  # relative difference that counts as a curve when linearity is tested in float32


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


class Terms(NamedTuple):
    """What one draw gives. log_q is None where the entropy is used in closed form."""

    data: Array
    prior: Array
    log_q: Array | None


class Layout(NamedTuple):
    """Which leaves are in q (chosen, one flag a leaf), and the ways between the parameter tree and (parts for the family, other leaves)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    chosen: tuple[bool, ...]
    structure: Any
    flat: bool

    def split(self, params: Tree) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        leaves = jax.tree.leaves(params)
        picked = tuple(leaf for leaf, take in zip(leaves, self.chosen, strict=True) if take)
        rest = tuple(leaf for leaf, take in zip(leaves, self.chosen, strict=True) if not take)
        return ((jnp.concatenate([jnp.ravel(leaf) for leaf in picked]),) if self.flat else picked), rest

    def leaves(self, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        """One array per chosen leaf."""
        if not self.flat:
            return parts
        shapes = [shape for shape, take in zip(self.shapes, self.chosen, strict=True) if take]
        bounds = np.cumsum([0] + [int(np.prod(shape)) for shape in shapes])
        return tuple(parts[0][a:b].reshape(shape) for a, b, shape in zip(bounds[:-1], bounds[1:], shapes, strict=True))

    def join(self, parts: tuple[Array, ...], rest: tuple[Array, ...]) -> Tree:
        first, second = iter(self.leaves(parts)), iter(rest)
        return jax.tree.unflatten(self.structure, [next(first) if take else next(second) for take in self.chosen])

    def spread(self, parts: tuple[Array, ...], rest: tuple[Array, ...]) -> Tree:
        """Like `join`, with zeros for the leaves that are not random."""
        return self.join(parts, tuple(jnp.zeros_like(leaf) for leaf in rest))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A method made concrete for one target. local: names of the leaves whose noise is drawn at sites; found: the network's sites."""

    method: Variational
    target: Any
    family: Family
    layout: Layout
    packing: _optimise.Packing
    estimator: str
    closed_prior: bool
    closed_entropy: bool
    local: frozenset[str]
    moments: bool

    @property
    def doubly(self) -> bool:
        """Whether the gradient of a Rényi bound is doubly reparameterised: only φ is trained, and draws are not stratified."""
        renyi = self.method.divergence not in ("elbo", "forward_kl")
        return renyi and self.family.strata == 1 and (all(self.layout.chosen) or self.method.rest == "fixed")

    def unpack(self, state: State) -> tuple[Tree, tuple[Array, ...]]:
        """(φ, point parameters)."""
        moved = self.packing.unpack(state.moved)
        return moved["q"], (moved["rest"] if self.method.rest == "joint" else state.fixed)


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
            state.step % LOG_EVERY == 0, lambda: _closed_kl(*plan.unpack(state), plan).astype(state.kl.dtype), lambda: state.kl
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
    log_weight, terms = _draws(key, q, rest, batch, plan)
    entropy = family.entropy(q) if plan.closed_entropy else None
    weight = jnp.exp(log_weight)
    average = lambda values: jnp.sum(weight * values)
    minus_entropy = average(terms.log_q) if entropy is None else -entropy
    data, kl = average(terms.data), minus_entropy - average(terms.prior)
    if method.divergence == "elbo" and plan.estimator != "score":
        return (data + ramp * average(terms.prior)) / temperature - ramp * minus_entropy, data, kl
    same_draw = (terms.data + ramp * terms.prior) / temperature
    if plan.estimator == "score":
        return _score(same_draw, terms.log_q, ramp, entropy), data, kl
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
    block = int(np.clip(BYTE_BUDGET // cost, 1, number))
    # A key may be used once; the same draws meet every batch on purpose.
    data, prior, log_q, closed = jax.lax.map(one, (keys, jax.random.clone(network_keys)), batch_size=block)
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
        _optimise.optimizer(self)

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
        optimizer, (plan, treatments) = _optimise.optimizer(self), _plan(self, target)
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


# ---- the draws of a step ----------------------------------------------------------------------------------------------------------


def _draws(key: Key, q: Tree, rest: tuple[Array, ...], batch: Batch | None, plan: Plan) -> tuple[Array, Terms]:
    """Log weights (M,) and terms (M,) of M = num_draws × strata draws; scalars in place of (1,) for a single one."""
    family, number = plan.family, plan.method.num_draws
    one = lambda k, z, stratum: _terms(k, z, stratum, q, rest, batch, plan)
    key_noise, key_rest = jax.random.split(key)
    if plan.estimator == "score":
        # Draws from the mixture itself: their density is all that the estimator uses.
        parts = jax.vmap(lambda k: family.sample(k, q))(jax.random.split(key_noise, number))
        terms = jax.vmap(one, in_axes=(0, 0, None))(jax.random.split(key_rest, number), jax.lax.stop_gradient(parts), 0)
        return jnp.full((number,), -np.log(number)), terms
    total = number * family.strata
    if total == 1:
        return jnp.zeros(()), one(key_rest, None if plan.local or plan.estimator == "analytic" else family.noise(key_noise, q), 0)
    strata = np.tile(np.arange(family.strata), number)
    if plan.local or plan.estimator == "analytic":
        noises = None
        del key_noise
    else:
        fresh = total // 2 if plan.method.antithetic else total
        noises = jax.vmap(lambda k: family.noise(k, q))(jax.random.split(key_noise, fresh))
        if plan.method.antithetic:
            noises = jax.tree.map(lambda z: jnp.concatenate([z, -z]), noises)
    log_weight = jnp.tile(family.log_weights(q), number) - np.log(number)
    return log_weight, jax.vmap(one, in_axes=(0, None if noises is None else 0, 0))(jax.random.split(key_rest, total), noises, strata)


def _closed_kl(q: Tree, rest: tuple[Array, ...], plan: Plan) -> Array:
    """−E log p(θ) − H(q), with parameters of the likelihood and the prior's scales at q's centre. For the log."""
    means, variances = plan.family.marginals(q)
    centre = plan.layout.join(plan.family.centre(q), rest)
    prior = plan.target.expected_log_prior(plan.layout.join(means, rest), plan.layout.spread(variances, rest), centre)
    return -prior - plan.family.entropy(q)


def _terms(key: Key, z: Tree, stratum: Any, q: Tree, rest: tuple[Array, ...], batch: Batch | None, plan: Plan) -> Terms:
    """Data, prior and log q of one draw. z: the family's noise, or for the score function the draw itself."""
    family, target, layout = plan.family, plan.target, plan.layout
    key_sites, key_network, key_prior = jax.random.split(key, 3)
    key_network = key_network if target.stochastic else None
    parts = None
    if plan.local:
        params, data = _at_sites(key_sites, key_network, q, rest, batch, plan)
    elif plan.estimator == "analytic":
        params, data = _expected(key_sites, key_network, q, rest, batch, plan)
    else:
        parts = z if plan.estimator == "score" else family.draw(q, z, stratum)
        if plan.method.divergence == "forward_kl":
            parts = jax.lax.stop_gradient(parts)
        params = layout.join(parts, rest)
        prior, data = target.parts(params, batch, key_network)
    if plan.closed_prior:
        means, variances = family.marginals(q)
        prior = target.expected_log_prior(layout.join(means, rest), layout.spread(variances, rest), params)
    elif parts is None:
        # Noise was drawn elsewhere than on the weights: the prior needs a draw of its own.
        prior = target.log_prior(layout.join(family.draw(q, family.noise(key_prior, q)), rest))
    if plan.closed_entropy and plan.estimator != "score":
        return Terms(data, prior, None)
    return Terms(data, prior, family.log_prob(jax.lax.stop_gradient(q) if plan.estimator == "stl" or plan.doubly else q, parts))


def _at_sites(key: Key, key_network: Key | None, q: Tree, rest: tuple[Array, ...], batch: Batch, plan: Plan) -> tuple[Tree, Array]:
    """Noise on the outputs of the sites; leaves without one are drawn. Returns (parameters: means at sites, draws elsewhere; data)."""
    model, layout = plan.target.model, plan.layout
    names = [name for name, take in zip(layout.names, layout.chosen, strict=True) if take]
    key_weights, key_sites = jax.random.split(key)
    keys = jax.random.split(key_weights, len(names))
    means, scales = layout.leaves(q["mean"]), [jnp.exp(rho) for rho in layout.leaves(q["rho"])]
    flip = plan.estimator == "flipout"
    drawn, companions = [], []
    for k, name, mean, scale in zip(keys, names, means, scales, strict=True):
        here = name in plan.local
        shift = scale * jax.random.normal(k, mean.shape, mean.dtype) if flip or not here else None
        drawn.append(mean if here else mean + shift)
        companions.append((shift if flip else scale) if here else jnp.zeros_like(mean))
    join = lambda leaves, others: jax.tree.unflatten(layout.structure, _interleave(layout.chosen, leaves, others))
    params = join(drawn, rest)
    # The prior's rescaling of weights is linear, so standard deviations and perturbations go through it as the means do.
    companion = model.weights({**params, "network": join(companions, [jnp.zeros_like(leaf) for leaf in rest])["network"]})
    companion = companion if flip else jax.tree.map(jnp.square, companion)
    handle = noise.flipout if flip else noise.local

    def handler(k: Key, site: sites.Site, inputs: Array, weights: sites.Operands, compute: Callable) -> tuple[Array, Any]:
        # A weight that is not random must not meet √0, whose slope is infinite.
        chosen = handle if f"network.{site.path}" in plan.local else sites.identity
        return chosen(k, site, inputs, weights, compute)

    def apply(weights: Tree, x: Tree, k: Key | None) -> Tree:
        return sites.replay(key_sites, model.apply, weights, x, handler, (companion,), (1 if flip else 2,), k)[0]

    return params, plan.target.parts(params, batch, key_network, apply)[1]


def _expected(key: Key, key_network: Key | None, q: Tree, rest: tuple[Array, ...], batch: Batch, plan: Plan) -> tuple[Tree, Array]:
    """E log N(y; f, σ²) = log N(y; E f, σ²) − ½ Σ Var f/σ²: network weights at their means, other leaves of q drawn."""
    target, layout = plan.target, plan.layout
    drawn = layout.join(plan.family.draw(q, plan.family.noise(key, q)), rest)
    centre = layout.join(plan.family.centre(q), rest)
    params = {**drawn, "network": centre["network"]}
    variance = _output_variance(q, rest, params, batch.x, plan)
    log_density = target.parts(params, batch, key_network)[1]
    scale = target.model.extra(params)["scale"]
    spread = batch.weighted_sum(jnp.sum(variance / scale**2, axis=-1)) * (target.num_data / batch.size)
    return params, log_density - 0.5 * spread


def _output_variance(q: Tree, rest: tuple[Array, ...], params: Tree, x: Tree, plan: Plan) -> Array:
    """Var f(x) under q where f is linear in q's network weights, (n, k): at the one site, or column by column of a factor of Σ."""
    model, layout = plan.target.model, plan.layout
    if plan.moments:
        scales = layout.spread(tuple(jnp.exp(rho) for rho in q["rho"]), rest)
        companion = jax.tree.map(jnp.square, model.weights({**params, "network": scales["network"]}))
        _, records = sites.replay(None, model.apply, model.weights(params), x, noise.moments, (companion,), (2,))
        return next(reversed(records.values()))
    operator = plan.family.operator(q)

    def slope(z: Array) -> Array:
        shift = operator.sqrt_matvec(z)
        parts = (shift,) if layout.flat else _cut(shift, [leaf.shape for leaf in q["mean"]])
        direction = {**jax.tree.map(jnp.zeros_like, params), "network": layout.spread(parts, rest)["network"]}
        return jax.jvp(lambda p: model.outputs(p, x), (params,), (direction,))[1]

    dtype = jax.tree.leaves(q["mean"])[0].dtype
    total = lambda carry, z: (carry + slope(z) ** 2, None)
    zero = jnp.zeros(jax.eval_shape(lambda: model.outputs(params, x)).shape, dtype)
    return jax.lax.scan(total, zero, jnp.eye(operator.num_noise, dtype=dtype))[0]


def _score(values: Array, log_q: Array, ramp: Any, entropy: Array | None) -> Array:
    """Σ (f − mean of the others)·log q/S, f held fixed; f's own gradient (point parameters) and what is closed are added as they are."""
    number = values.shape[0]
    total = values if entropy is not None else values - ramp * log_q
    fixed = jax.lax.stop_gradient(total)
    fixed = fixed - jnp.mean(fixed)  # large values would lose the digits that matter; no difference changes
    advantage = fixed * (number / (number - 1))
    surrogate = jnp.mean(advantage * log_q) + jnp.mean(values)
    return surrogate if entropy is None else surrogate + ramp * entropy


def _interleave(chosen: Sequence[bool], first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    a, b = iter(first), iter(second)
    return [next(a) if take else next(b) for take in chosen]


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    bounds = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return tuple(part.reshape(shape) for part, shape in zip(jnp.split(flat, bounds), shapes, strict=True))


# ---- what is random and how: decided once per target ------------------------------------------------------------------------------


def _plan(method: Variational, target: Any) -> tuple[Plan, list[dict[str, Any]]]:
    family = as_family(method.family)
    template = jax.eval_shape(target.init, jax.random.key(0))
    names = tuple(_tree.paths(template))
    network = isinstance(template, dict) and "network" in template and hasattr(target.model, "apply")
    found = _find(target, template) if network and target.rows() is not None else None
    chosen = _chosen(method.over, names, found)
    shapes = tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(template))
    layout = Layout(names, shapes, chosen, jax.tree.structure(template), family.flat is True)
    estimator, local = _estimator(method, family, layout, found)
    if network and target.rows() is not None and estimator != "score" and method.divergence != "forward_kl":
        _check_differentiable(target, template)
    outside = any(take and not name.startswith("network.") for name, take in zip(names, chosen, strict=True))
    parts = jax.eval_shape(lambda: layout.split(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), template)))
    q = jax.eval_shape(lambda p: family.init(jax.random.key(0), p, 1.0), parts[0])
    packing = _optimise.packing({"q": q, "rest": parts[1] if method.rest == "joint" else ()})
    elbo = method.divergence == "elbo"
    closed_prior = (
        elbo and estimator != "stl" and _closed_prior(target, family, layout, q, parts[1]) and (estimator != "score" or not outside)
    )
    closed_entropy = elbo and estimator != "stl" and jax.eval_shape(family.entropy, q) is not None
    if (local or estimator == "analytic") and not closed_entropy:  # families of these estimators have one
        raise AssertionError(f"{family} has no entropy")
    plan = Plan(method, target, family, layout, packing, estimator, closed_prior, closed_entropy, local, False)
    if estimator == "analytic":
        plan = _check_analytic(plan, outside)
    return plan, _treatments(layout, plan, found)


def _find(target: Any, template: Tree) -> sites.Found:
    weights = jax.eval_shape(target.model.weights, template)
    key = jax.random.key(0) if target.stochastic else None
    return sites.find(target.model.apply, weights, target.rows(), key)


def _chosen(over: Any, names: tuple[str, ...], found: sites.Found | None) -> tuple[bool, ...]:
    """One flag a leaf: is it in q?"""
    if over == "all":
        return (True,) * len(names)
    if over == "last_layer":
        if found is None or not found.sites:
            got = "no site" if found is not None else "a target without a network"
            raise MethodError(message("There is no last layer.", got, "a network with a site", "pass over= patterns of paths"))
        last = found.sites[-1]
        patterns: tuple[str, ...] = tuple(f"network.{path}" for path in (last.path, last.bias_path) if path is not None)
    else:
        patterns = (over,) if isinstance(over, str) else tuple(over)
    fits = lambda name, pattern: fnmatch.fnmatch(name, pattern) or name == pattern or name.startswith(pattern + ".")
    unused = [pattern for pattern in patterns if not any(fits(name, pattern) for name in names)]
    if unused or not patterns:
        raise MethodError(
            message(
                "over= names no parameters.", f"{unused or patterns}", f"patterns of {list(names)}, 'all' or 'last_layer'", "check them"
            )
        )
    return tuple(any(fits(name, pattern) for pattern in patterns) for name in names)


def _estimator(method: Variational, family: Family, layout: Layout, found: sites.Found | None) -> tuple[str, frozenset[str]]:
    """The estimator that "auto" stands for, and the leaves whose noise is drawn at sites."""
    chosen = {name for name, take in zip(layout.names, layout.chosen, strict=True) if take}
    wanted, local = method.estimator, frozenset()
    if found is not None:
        here = [site for site in found.sites if f"network.{site.path}" in chosen]
        paths = {site.path for site in here} | {site.bias_path for site in here if site.bias_path is not None}
        local = frozenset(f"network.{path}" for path in paths) & frozenset(chosen)
    possible = isinstance(family, MeanField) and local and method.divergence == "elbo" and not method.antithetic
    if wanted == "auto":
        return ("local", local) if possible else ("weight", frozenset())
    if wanted not in ("local", "flipout"):
        return wanted, frozenset()
    if not isinstance(family, MeanField):
        got = f"family={method.family!r} with estimator={wanted!r}"
        raise MethodError(message("Noise at sites needs independent weights.", got, "family='mean_field'", "use estimator='weight'"))
    if not local:
        reasons = "no network, or one that takes no x" if found is None else f"no site among them: {found.rest or 'not in over='}"
        raise MethodError(
            message("There is no site to put noise on.", reasons, "a dense, convolution or embedding", "use estimator='weight'")
        )
    return wanted, local


def _closed_prior(target: Any, family: Family, layout: Layout, q: Tree, rest: Tree) -> bool:
    """Whether the target has E log p(θ) in closed form under the family's marginals."""
    if jax.eval_shape(family.marginals, q) is None:
        return False

    def ask(q: Tree, rest: Tree) -> Any:
        means, variances = family.marginals(q)
        mean = layout.join(means, rest)
        return target.expected_log_prior(mean, layout.spread(variances, rest), mean)

    return jax.eval_shape(ask, q, rest) is not None


def _random_rows(key: Key, rows: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(rows)
    draw = lambda k, leaf: (
        jax.random.normal(k, leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jax.random.randint(k, leaf.shape, 0, 2).astype(leaf.dtype)
    )
    return jax.tree.unflatten(structure, [draw(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)])


def _check_differentiable(target: Any, template: Tree) -> None:
    """Refuse a network whose outputs have no slope anywhere in its weights, at two random starts."""

    def largest(key: Key) -> Array:
        key_init, key_x, key_direction, key_network = jax.random.split(key, 4)
        params, x = target.init(key_init), _random_rows(key_x, target.rows())

        def projected(network: Tree) -> Array:
            outputs = target.outputs({**params, "network": network}, x, key_network if target.stochastic else None)
            leaves = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
            keys = jax.random.split(key_direction, max(len(leaves), 1))
            return sum((jnp.sum(leaf * jax.random.normal(k, leaf.shape)) for k, leaf in zip(keys, leaves, strict=False)), jnp.zeros(()))

        slopes = jax.tree.leaves(jax.grad(projected)(params["network"]))
        return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in slopes]))

    if not np.any(np.asarray(jax.jit(jax.vmap(largest))(jax.random.split(jax.random.key(0), 2))) != 0.0):
        raise MethodError(
            message(
                "The network's outputs have no gradient in any weight.",
                "exact zeros at two random starts",
                "a differentiable network",
                "use estimator='score' with num_draws=8 or more, which needs only values",
            )
        )


def _check_analytic(plan: Plan, outside: bool) -> Plan:
    """Refuse what has no closed expected log-likelihood; decide how variances of outputs are had."""
    from aleator.likelihoods import Gaussian as GaussianLikelihood

    target, family, layout = plan.target, plan.family, plan.layout
    wrong = None
    if target.model is None or not isinstance(getattr(target.model, "likelihood", None), GaussianLikelihood):
        wrong = f"likelihood {getattr(target.model, 'likelihood', None)!r}"
    elif target.rows() is None:
        wrong = "a model without x"
    elif jax.eval_shape(family.operator, jax.eval_shape(lambda: _random_q(jax.random.key(0), plan)[0])) is None:
        wrong = f"family {plan.method.family!r}"
    elif outside and not isinstance(family, MeanField):
        wrong = f"family {plan.method.family!r} over parameters outside the network"
    elif not _linear(plan):
        wrong = "outputs that are not linear in the weights of q"
    if wrong is not None:
        raise MethodError(
            message(
                "The expected log-likelihood has no closed form here.",
                wrong,
                "al.Gaussian noise and outputs linear in q's weights: al.LinearModel, or over='last_layer'",
                "use estimator='auto'",
            )
        )
    fast = dataclasses.replace(plan, moments=True)
    return fast if isinstance(family, MeanField) and not layout.flat and _moments_agree(plan, fast) else plan


def _random_q(key: Key, plan: Plan) -> tuple[Tree, tuple[Array, ...], Tree]:
    """Random variational parameters, point parameters and the tree of their centre."""
    key_start, key_family, key_jitter = jax.random.split(key, 3)
    start = plan.target.init(key_start)
    leaves, structure = jax.tree.flatten(start)
    keys = jax.random.split(key_jitter, len(leaves))
    start = jax.tree.unflatten(
        structure, [leaf + jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    )
    parts, rest = plan.layout.split(start)
    q = plan.family.init(key_family, parts, 0.5)
    return q, rest, plan.layout.join(plan.family.centre(q), rest)


def _linear(plan: Plan) -> bool:
    """f(μ + d) + f(μ − d) = 2 f(μ) for a random d over q's network weights, at random rows."""

    def difference(key: Key) -> tuple[Array, Array]:
        key_q, key_d, key_x = jax.random.split(key, 3)
        q, rest, centre = _random_q(key_q, plan)
        moved = plan.layout.join(plan.family.draw(q, plan.family.noise(key_d, q)), rest)["network"]
        x = _random_rows(key_x, plan.target.rows())
        at = lambda sign: plan.target.outputs(
            {**centre, "network": jax.tree.map(lambda m, w: m + sign * (w - m), centre["network"], moved)}, x
        )
        up, down, middle = at(1.0), at(-1.0), at(0.0)
        return jnp.max(jnp.abs(up + down - 2 * middle)), jnp.max(jnp.abs(up - down))

    curve, slope = (np.asarray(value) for value in jax.jit(jax.vmap(difference))(jax.random.split(jax.random.key(1), 2)))
    return bool(np.all(curve <= LINEAR * slope))


def _moments_agree(plan: Plan, fast: Plan) -> bool:
    """Whether the variance at the last site is that of the outputs."""
    names = {name for name, take in zip(plan.layout.names, plan.layout.chosen, strict=True) if take and name.startswith("network.")}
    found = _find(plan.target, jax.eval_shape(plan.target.init, jax.random.key(0)))
    last = found.sites[-1] if found.sites else None
    if last is None or not names <= {f"network.{last.path}", f"network.{last.bias_path}"}:
        return False

    def both(key: Key) -> tuple[Array, Array]:
        key_q, key_x = jax.random.split(key)
        q, rest, centre = _random_q(key_q, plan)
        x = _random_rows(key_x, plan.target.rows())
        return _output_variance(q, rest, centre, x, plan), _output_variance(q, rest, centre, x, fast)

    slow, quick = jax.jit(both)(jax.random.key(2))
    return slow.shape == quick.shape and bool(np.allclose(slow, quick, rtol=1e-3))


def _treatments(layout: Layout, plan: Plan, found: sites.Found | None) -> list[dict[str, Any]]:
    """One line per leaf for the manifest."""
    positions: dict[str, int] = {}
    for site in found.sites if found is not None else ():
        for path in (site.path, site.bias_path):
            positions[f"network.{path}"] = max(site.positions, positions.get(f"network.{path}", 0))

    def say(name: str, take: bool) -> str:
        if not take:
            return "point, trained with q" if plan.method.rest == "joint" else "point, fixed"
        if name in plan.local:
            if plan.estimator == "flipout":
                return "flipout"
            number = positions[name]
            return "local, exact" if number == 1 else f"local, approximate: used at {number} positions"
        if plan.local:
            reason = found.rest.get(name.removeprefix("network."), "not a weight of the network") if found is not None else ""
            return f"weight space: {reason}"
        return "in closed form" if plan.estimator == "analytic" and name.startswith("network.") else "weight space"

    return [
        {"path": name, "shape": list(shape), "treatment": say(name, take)}
        for name, shape, take in zip(layout.names, layout.shapes, layout.chosen, strict=True)
    ]


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
    from aleator.diagnostics import _still_rising

    bound = result.traces["log_likelihood"] - result.traces["kl"]
    bound = bound[..., : len(range(0, plan.method.num_steps, max(1, plan.method.num_steps // TRACE_POINTS)))]  # without the evidence's
    rising = bound.shape[-1] >= 20 and _still_rising(bound)
    said = f"Still improving after {plan.method.num_steps} steps: raise num_steps or learning_rate." if rising else ""
    said = said or f"Complete: the bound has levelled off after {plan.method.num_steps} steps, all finite."
    if result.state.evidence == () or plan.target.temperature != 1.0:
        return said, True
    ratios = _log_ratios(result.state.evidence, plan.target.num_data)[0]
    if not np.all(np.isfinite(ratios)):
        return f"{said} Some draws of q have no finite log joint: lower initial_scale or check the support.", False
    each = ratios.reshape(-1, ratios.shape[-1])
    tail = max(pareto_k(row) for row in each)
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


def pareto_k(log_ratios: np.ndarray) -> float:
    """Shape k̂ of a generalised Pareto tail fitted to importance ratios (Vehtari et al. 2024; fit by Zhang and Stephens 2009).

    Ratios with k < ½ have a finite variance, with k < 1 a finite mean. log_ratios (S,); the largest min(S/5, 3√S) make the tail, at least
    5 of them. Equal ratios have no tail: −∞.
    """
    log_ratios = np.sort(np.asarray(log_ratios, np.float64) - np.max(log_ratios))
    size = len(log_ratios)
    number = int(np.ceil(min(0.2 * size, 3 * np.sqrt(size))))
    if number < 5:
        return float("nan")
    cut = log_ratios[-number - 1]
    excess = np.exp(log_ratios[-number:]) - np.exp(cut)
    if not excess[-1] > 1e-12 or excess[0] <= 0:
        return -np.inf if not excess[-1] > 1e-12 else _pareto_shape(excess[excess > 0])
    return _pareto_shape(excess)


def _pareto_shape(excess: np.ndarray) -> float:
    """Posterior mean of k under the profile likelihood of θ = −k/σ, shrunk to ½ by ten observations' worth."""
    number = len(excess)
    if number < 2:
        return float("nan")
    grid = 30 + int(np.sqrt(number))
    theta = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    theta = theta / (3.0 * excess[int(number / 4 + 0.5) - 1]) + 1 / excess[-1]
    shape = np.mean(np.log1p(-theta[:, None] * excess), axis=1)
    profile = number * (np.log(-theta / shape) - shape - 1)
    weight = 1 / np.sum(np.exp(np.clip(profile - profile[:, None], -700, 700)), axis=1)
    best = np.sum(theta * weight) / np.sum(weight)
    k = np.mean(np.log1p(-best * excess))
    return float((number * k + 10 * 0.5) / (number + 10))
