"""SVGP: stochastic variational inference for sparse Gaussian processes, natural gradients for q(v), Adam for the hyper-parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from aleator import _tree
from aleator._cache import cached
from aleator._errors import MethodError, message
from aleator._outputs import columns_of
from aleator._typing import Array, Key, Tree
from aleator.gp._factor import factor
from aleator.gp.sparse import Inducing, SparseGP
from aleator.likelihoods import Gaussian
from aleator.loop import Algorithm, Phase
from aleator.methods._method import Card, Method, check_positive
from aleator.posterior import Point, Score

NODES = 20  # of Gauss–Hermite quadrature of E[log p(y | f)], where each target has an f of its own
DRAWS = 16  # of f, where they share them
ABSORBING = 50  # natural steps that take new rows into q(v), for likelihoods that are not Gaussian
RAMP = 50  # steps over which the natural step grows to its size


class State(NamedTuple):
    """params: hyper-parameters; optimizer: Adam's; shift (o, M) and precision (o, M, M): natural parameters S⁻¹μ and S⁻¹ of q(v); number: steps; bound: a running
    mean of the bound."""

    params: Tree
    optimizer: Any
    shift: Array
    precision: Array
    number: Array
    bound: Array


class Info(NamedTuple):
    """bound: the evidence lower bound before the step, an estimate from its batch."""

    bound: Array


def init(key: Key, start: Tree, model: SparseGP, optimizer: Any) -> State:
    """q(v) is the prior."""
    size, inducing = model.num_processes(), model.num_inducing
    precision = jnp.broadcast_to(jnp.eye(inducing), (size, inducing, inducing))
    return State(start, optimizer.init(start), jnp.zeros((size, inducing)), precision, jnp.zeros((), jnp.int32), jnp.zeros(()))


def step(key: Key, state: State, batch: Any, target: Any, optimizer: Any, rate: float, num_steps: int, learn: bool) -> tuple[State, Info]:
    """With A = a(x) of the batch, and αᵢ, βᵢ the slopes of (N/n)·E[log p(yᵢ | f)] in the mean and variance of f(xᵢ):

    S⁻¹ ← (1 − ρ)S⁻¹ + ρ(I − 2 Σ βᵢ aᵢaᵢᵀ),   S⁻¹μ ← (1 − ρ)S⁻¹μ + ρ Σ aᵢ(αᵢ − 2βᵢ aᵢᵀμ)

    is a natural gradient step of length ρ (exact, in one step, for Gaussian noise and all rows); βᵢ ≤ 0 is kept, as it is for log-concave likelihoods.
    """
    import optax

    model = target.model
    location, spread = _moments(state.shift, state.precision)
    less = spread @ jnp.swapaxes(spread, 1, 2) - jnp.eye(model.num_inducing)

    def bound(params: Tree, given: tuple[Array, Array]) -> tuple[Array, tuple]:
        """The data's part of the bound as a function of the hyper-parameters and of additions to the moments of f."""
        a = model.project(params, batch.x)
        # aᵀ(S − I)a and its slope 2(S − I)a from one product: differentiated as it stands it would take two more.
        product = jax.lax.stop_gradient(jax.vmap(lambda matrix: matrix @ a)(less))
        change = jnp.sum(2.0 * a * product, axis=1) - jax.lax.stop_gradient(jnp.sum(a * product, axis=1))
        variance = model.kernel.diag(params["kernel"], _tree.as_float64(batch.x))[:, None] + change.T
        mean = a.T @ location.T
        f = mean + model.offset(params, batch.x) + given[0], jnp.maximum(variance, 1e-12) + given[1]
        terms = expected(key, model.likelihood, *f, batch.y, model.extra(params))
        data = target.total(terms, batch)
        return data + model.log_prior(params), (data, a, mean)

    zero = jnp.zeros((batch.index.shape[0], model.num_processes()))
    (_, (data, a, mean)), (slope, (alpha, beta)) = jax.value_and_grad(bound, (0, 1), has_aux=True)(state.params, (zero, zero))
    beta = jnp.minimum(beta, 0.0)
    rho: Any = rate * jnp.minimum((state.number + 1) / RAMP, 1.0) if num_steps > RAMP else rate
    rho = rho * (1.0 - 0.9 * state.number / num_steps)
    weigh = jax.vmap(lambda b: (a * b) @ a.T, in_axes=1)(beta)
    precision = (1 - rho) * state.precision + rho * (jnp.eye(len(a)) - 2.0 * weigh)
    shift = (1 - rho) * state.shift + rho * (a @ (alpha - 2.0 * beta * mean)).T
    params, optimizer_state = state.params, state.optimizer
    if learn:
        updates, optimizer_state = optimizer.update(jax.tree.map(jnp.negative, slope), state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
    total = data - divergence(location, spread)
    running = jnp.where(state.number == 0, total, state.bound + (total - state.bound) * jnp.maximum(0.01, 1.0 / (state.number + 1)))
    return State(params, optimizer_state, shift, precision, state.number + 1, running), Info(total)


@dataclasses.dataclass(frozen=True)
class SVGP(Method):
    """q(v) = N(μ, S) of full covariance at the inducing inputs, by stochastic natural gradients; hyper-parameters by Adam on the same bound (Hensman et al. 2013,
    2015; Salimbeni et al. 2018). natural_rate: ρ, the share of each step that is new, falling to a tenth; learning_rate=0 keeps the hyper-parameters.

    The bound reported is a running mean over the last hundred or so batches, while the hyper-parameters still move: an estimate of a lower bound.
    """

    num_steps: int = 2000
    batch_size: int | None = 256
    learning_rate: float = 1e-2
    natural_rate: float = 0.1

    card: ClassVar[Card] = Card(
        name="SVGP",
        summary="Sparse Gaussian processes with any likelihood, from mini-batches.",
        model_class="al.gp.SparseGP with any likelihood",
        criterion="evidence lower bound",
        search="stochastic natural gradients for the inducing values, Adam for the hyper-parameters",
        cost="O(n M² + o M³) a step for n rows a batch, M inducing inputs and o outputs; O(o M²) memory",
        needs="al.gp.SparseGP",
        references=(
            "Hensman, Fusi and Lawrence, Gaussian Processes for Big Data, UAI 2013",
            "Salimbeni, Eleftheriadis and Hensman, Natural Gradients in Practice, AISTATS 2018",
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", whole=True)
        check_positive(self, "natural_rate")
        if self.learning_rate < 0 or self.natural_rate > 1:
            got = f"learning_rate={self.learning_rate}, natural_rate={self.natural_rate}"
            raise MethodError(
                message("SVGP cannot use these rates.", got, "learning_rate ≥ 0, 0 < natural_rate ≤ 1", "pass e.g. 0.01, 0.1")
            )

    def build(self, target: Any) -> Algorithm:
        import optax

        model = target.model
        if not isinstance(model, SparseGP) or target.temperature != 1.0:
            raise MethodError(message("SVGP fits sparse Gaussian processes.", type(model).__name__, self.card.needs, "use another method"))
        optimizer = (
            optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.num_steps, 0.01)) if self.learning_rate else optax.identity()
        )

        def one_step(key: Key, state: State, batch: Any) -> tuple[State, Info]:
            return step(key, state, batch, target, optimizer, self.natural_rate, self.num_steps, self.learning_rate > 0)

        def finish(key: Key, state: State, kept: Any) -> Inducing:
            with jax.enable_x64(True):
                location, spread = _moments(jnp.asarray(state.shift), jnp.asarray(state.precision))
                params = jax.tree.map(np.asarray, state.params)
            score = Score(float(state.bound), 0.0, "lower bound")
            return Inducing(Point(params), np.asarray(location)[None], np.asarray(spread)[None], score)

        return Algorithm(
            init=lambda key, start: init(key, start, model, optimizer),
            phases=(Phase("SVGP", one_step, self.num_steps, "full" if self.batch_size is None else "random", self.batch_size),),
            position=lambda state: state.params,
            finish=finish,
            watch="bound",
            x64=True,
        )


def expected(key: Key, likelihood: Any, mean: Array, variance: Array, y: Array, extra: Any) -> Array:
    """E[log p(y | f)] for f ~ N(mean, variance), columns apart: (n,). In closed form for Gaussian noise, by quadrature where each target column has one f, else over draws."""
    if isinstance(likelihood, Gaussian):
        return likelihood.log_prob(mean, y, extra) - 0.5 * jnp.sum(variance / extra["scale"] ** 2, axis=-1)
    scale = jnp.sqrt(variance)
    if columns_of(likelihood) == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        at = lambda node: likelihood.log_prob(mean + scale * node, y, extra)
        return jnp.asarray(weights / weights.sum()) @ jax.vmap(at)(jnp.asarray(nodes))
    half = jax.random.normal(key, (DRAWS // 2, *mean.shape))
    return jnp.mean(jax.vmap(lambda z: likelihood.log_prob(mean + scale * z, y, extra))(jnp.concatenate([half, -half])), axis=0)


def divergence(location: Array, spread: Array) -> Array:
    """KL(N(μ, RRᵀ) ‖ N(0, I)), summed over processes; R upper triangular."""
    logdet = 2.0 * jnp.sum(jnp.log(jnp.abs(jnp.diagonal(spread, axis1=1, axis2=2))))
    return 0.5 * (jnp.sum(spread**2) + jnp.sum(location**2) - location.size - logdet)


def _moments(shift: Array, precision: Array) -> tuple[Array, Array]:
    """μ and R with RRᵀ = S from S⁻¹μ and S⁻¹."""

    def one(shift: Array, precision: Array) -> tuple[Array, Array]:
        lower, _ = factor(precision)
        spread = solve_triangular(lower, jnp.eye(len(shift), dtype=shift.dtype), lower=True).T
        return spread @ (spread.T @ shift), spread

    if len(shift) == 1:  # the loop inside `factor` costs more under vmap
        return jax.tree.map(lambda leaf: leaf[None], one(shift[0], precision[0]))
    return jax.vmap(one)(shift, precision)


@cached
def absorb(model: SparseGP) -> Callable:
    """q(v) with more rows in it, the q(v) so far being the prior: natural steps on the new rows alone, one that is exact for Gaussian noise, else many half ones. Also what the new rows
    add to the bound, E[log p(y | f)] − KL(q ‖ q before), and the share of the prior variance at them that the inducing inputs leave open."""
    exact = isinstance(model.likelihood, Gaussian)
    rate, number = (1.0, 1) if exact else (0.5, ABSORBING)

    def one(args: tuple, x: Tree, y: Array, weight: Array) -> tuple[Array, Array, Array, Array]:
        params, location, spread = args
        a = model.project(params, x)
        prior = model.kernel.diag(params["kernel"], _tree.as_float64(x))
        left = prior - jnp.sum(a**2, axis=0)
        inverse = jax.vmap(jnp.linalg.inv)(spread)
        before = jnp.swapaxes(inverse, 1, 2) @ inverse
        first = jnp.einsum("omn,on->om", before, location)

        def total(mean: Array, variance: Array) -> Array:
            f = mean + model.offset(params, x), jnp.maximum(variance, 1e-12)
            key = jax.random.key(0)  # the same draws at every step, so that it settles
            return jnp.sum(weight * expected(key, model.likelihood, *f, y, model.extra(params)))

        def moments(at: Array, wide: Array) -> tuple[Array, Array]:
            return a.T @ at.T, left[:, None] + jax.vmap(lambda r: jnp.sum((r.T @ a) ** 2, axis=0))(wide).T

        def step(i: Array, q: tuple[Array, Array]) -> tuple[Array, Array]:
            shift, precision = q
            mean, variance = moments(*_moments(shift, precision))
            alpha, beta = jax.grad(total, (0, 1))(mean, variance)
            beta = jnp.minimum(beta, 0.0)
            weigh = jax.vmap(lambda b: (a * b) @ a.T, in_axes=1)(beta)
            shift = (1 - rate) * shift + rate * (first + (a @ (alpha - 2.0 * beta * mean)).T)
            return shift, (1 - rate) * precision + rate * (before - 2.0 * weigh)

        at, wide = _moments(*jax.lax.fori_loop(0, number, step, (first, before)))
        gain = total(*moments(at, wide)) - divergence(jnp.einsum("omn,on->om", inverse, at - location), inverse @ wide)
        return at, wide, gain, jnp.sum(left) / jnp.sum(prior)

    return jax.jit(lambda params, location, spread, x, y, weight: jax.lax.map(lambda s: one(s, x, y, weight), (params, location, spread)))
