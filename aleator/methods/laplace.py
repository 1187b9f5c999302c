"""Laplace: a Gaussian at the mode, with the curvature of the log joint there as its precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, curvature
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.likelihoods import Gaussian as GaussianLikelihood
from aleator.linalg import Root
from aleator.loop import Algorithm, Phase
from aleator.methods import _memory, _optimise
from aleator.methods._method import Card, Method, check_positive
from aleator.methods._passes import COPIES, OVERSAMPLE, SMALL, Plan, Sums, add, check_bytes, empty, make_plan, num_bytes, rows_per_batch
from aleator.methods._whitened import (
    climb,
    data_of,
    free_factors,
    groups,
    log_evidence,
    positive,
    prior_at,
    prior_curvature,
    proper,
    row_scales,
    tune,
    whiten,
)
from aleator.methods.map import MAP
from aleator.methods.map import step as mode_step
from aleator.model import Supervised
from aleator.posterior import Gaussian, Linearised, Posterior, Score
from aleator.priors import Normal

STRUCTURES = ("full", "kron", "ekfac", "diag", "lowrank")
CURVATURES = ("auto", "ggn", "empirical", "hessian")
TUNE = ("none", "prior", "layer", "parameter")
NEWTON = (5, 100)  # steps of that polish, at least and at most
NEWTON_WORK = 5e11  # multiplications its passes over the data may take beyond the least
SHORT = 0.1  # nats a parameter by which a search may end below its mode; draws of the posterior lie ½ below it
HESSIANS = 30  # steps of the polish by exact Hessians
PASSES = 3  # of that search over the data


class Best(NamedTuple):
    """The best point of the polish so far, and what is known there; damping of the next step."""

    params: Tree
    log_joint: Array
    sums: Sums
    damping: Array


class State(NamedTuple):
    """inner: of the search for the mode. params: where curvature is taken. basis: directions learned between passes. best: with a polish.
    logs (G,): log factors of the prior's precision, where they are learned during the training. memory: (parameters, Taylor term) of rows
    that an earlier fit has seen, or ()."""

    inner: Any
    params: Tree
    sums: Sums
    basis: Any
    best: Any
    logs: Any = ()
    memory: Any = ()


class Info(NamedTuple):
    """log_likelihood: of the rows so far, in a pass; of all rows (estimated) on the way to the mode."""

    log_likelihood: Array


# ---- steps ------------------------------------------------------------------------------------------------------------------------------


def gathered(state: State, batch: Batch, model: Any, plan: Plan, second: bool = False) -> tuple[State, Info]:
    """One batch more."""
    sums = add(state.sums, state.params, state.basis, batch, model, plan, second)
    return state._replace(sums=sums), Info(sums.log_likelihood)


def fresh(state: State, model: Any, plan: Plan) -> State:
    """The same state with the sums before any row: zero, or what an earlier fit remembers of its rows."""
    if not state.memory:
        return state._replace(sums=jax.tree.map(jnp.zeros_like, state.sums))
    return state._replace(sums=_memory.remembered(state.params, state.basis, state.memory, plan, model))


def keep(best: Best, params: Tree, log_joint: Array, sums: Sums) -> Best:
    """The better of two points; steps are damped after a failure, less and less after successes. In small factors: in the narrow valleys of
    networks that fit well, factors of ten go to and fro between steps that fail and steps that lead nowhere."""
    better = log_joint >= best.log_joint
    damping = jnp.where(better, 0.3 * best.damping, jnp.maximum(4.0 * best.damping, 1.0))
    new = jax.tree.map(lambda a, b: jnp.where(better, a, b), (params, log_joint, sums), tuple(best[:3]))
    return Best(new[0], new[1], new[2], damping)


def newton(state: State, target: Any, plan: Plan, last: bool) -> tuple[State, Info]:
    """Keep the point if it is better than the best, then step from the best one: θ + (H + Π + μ·diag Π)⁻¹∇log joint, μ raised where a step
    failed. For a linear model with Gaussian noise one step ends at the mode."""
    best = keep(state.best, state.params, state.sums.log_likelihood + target.log_prior(state.params), state.sums)
    if last:
        return state._replace(params=best.params, sums=best.sums, best=best), Info(best.sums.log_likelihood)
    precision, slope = prior_curvature(target, best.params, plan.index)
    gradient = best.sums.gradient[plan.index] + slope
    matrix = best.sums.curvature + jnp.diag(precision * (1.0 + best.damping))
    step = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), gradient)
    network = best.params["network"]
    moved = _tree.unflat(_tree.flat(network).at[plan.index].add(jnp.where(jnp.isfinite(step), step, 0.0)), network)
    state = state._replace(params=best.params | {"network": moved}, best=best)
    return fresh(state, target.model, plan), Info(best.sums.log_likelihood)


class Rescaled:
    """A target whose prior precisions have factors τ: log p(w) − ½ Σ (τ − 1)((w − m)/s)². Likelihood parameters do not move where the
    evidence sets them."""

    def __init__(self, target: Any, factors: Array, index: np.ndarray, fixed_noise: bool):
        self.target, self.factors, self.index, self.fixed_noise = target, factors, index, fixed_noise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def parts(self, params: Tree, batch: Batch | None, key: Key | None = None) -> tuple[Array, Array]:
        if self.fixed_noise:
            params = params | {"likelihood": jax.lax.stop_gradient(params["likelihood"])}
        prior, data = self.target.parts(params, batch, key)
        precision = jax.lax.stop_gradient(prior_curvature(self.target, params, self.index)[0])
        offset = _tree.flat(params["network"])[self.index] - self.target.model.prior.loc
        return prior - 0.5 * jnp.sum((self.factors - 1.0) * precision * offset**2), data


def online(
    key: Key, state: State, batch: Batch, method: Laplace, target: Any, plan: Plan, group: np.ndarray, packing: _optimise.Packing
) -> tuple[State, Info]:
    """One step of the training under the factors found so far."""
    seen = _memory.Remembering(target, state.memory, plan) if state.memory else target
    rescaled = Rescaled(seen, jnp.exp(state.logs)[group], plan.index, method.tune_noise)
    base: Any = method.base
    moved, info = mode_step(key, state.inner, batch, rescaled, _optimise.optimizer(base), packing, base.adversarial)
    return state._replace(inner=moved), Info(info.log_likelihood)


def renew(state: State, method: Laplace, target: Any, plan: Plan, packing: _optimise.Packing) -> tuple[State, Info]:
    """After a pass: the factors climb the evidence at the present weights, whose mode is that of the old ones."""
    params, sums = state.params, state.sums
    scale = 1.0 / jnp.sqrt(prior_curvature(target, params, plan.index)[0])
    offset = _tree.flat(params["network"])[plan.index] - target.model.prior.loc
    white = whiten(method, plan, sums, state.basis, plan.index, offset, scale, target.model)
    data = data_of(target, sums, jnp.exp(state.logs))
    first = {"prior": state.logs, "noise": jnp.zeros_like(sums.mass)}
    logs = climb(lambda at: log_evidence(at, white.spectrum, data), first, free_factors(method), method.num_tune_steps, 0.1)
    good = jnp.all(jnp.isfinite(logs["prior"])) & jnp.isfinite(logs["noise"])
    logs = jax.tree.map(lambda new, old: jnp.where(good, new, old), logs, first)
    if method.tune_noise:
        moved = params["likelihood"]["log_scale"] + logs["noise"].astype(params["likelihood"]["log_scale"].dtype)
        params = params | {"likelihood": params["likelihood"] | {"log_scale": moved}}
    inner = state.inner._replace(params=packing.pack(params))
    return fresh(state._replace(inner=inner, params=params, logs=logs["prior"]), target.model, plan), Info(sums.log_likelihood)


def turn(state: State, model: Any, plan: Plan, scale: Callable[[Tree], Array]) -> tuple[State, Info]:
    """Between passes: eigenvectors of the whitened factors (ekfac), or an orthonormal basis of what the curvature made of the last one."""
    info = Info(state.sums.log_likelihood)
    if plan.number is not None:
        if state.memory:  # a subnetwork stays the one that was chosen
            return state, info
        variance = 1.0 / (state.sums.curvature[1][plan.index] + scale(state.params) ** -2)
        chosen = jnp.asarray(plan.index)[jax.lax.top_k(variance, plan.number)[1]]
        return state._replace(basis=jnp.sort(chosen)), info
    if plan.structure == "ekfac":
        s = scale(state.params)
        sides, _ = state.sums.curvature
        bases = []
        for block, inner, outer in zip(plan.layout.blocks, sides.inputs, sides.outputs, strict=True):
            rows = row_scales(s, block, plan.layout.size, plan.index)
            bases.append((rows[:, None] * jnp.linalg.eigh(rows[:, None] * inner * rows)[1], jnp.linalg.eigh(outer)[1]))
        turned = state._replace(basis=tuple(bases))
        old = fresh(turned, model, plan).sums.curvature[1]
        return turned._replace(sums=state.sums._replace(curvature=(sides, old))), info
    vectors = jnp.linalg.qr(state.sums.curvature)[0]
    return fresh(state._replace(basis=(vectors, state.basis[1])), model, plan), info


# ---- the method -----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Laplace(Method):
    """q(θ) = N(θ*, (H + Π)⁻¹): H the curvature of −log p(D|θ) at the mode θ*, Π that of −log p(θ).

    structure: "full", "kron" (a Kronecker product a layer), "ekfac" (its eigenvalues corrected in a second pass), "diag", "lowrank" (the
    `rank` leading directions; the prior elsewhere). subset: "all", "last_layer", patterns of paths, or al.Subnetwork(n): the n weights
    with the largest marginal variance. curvature: "ggn" (Gauss–Newton with the Fisher information of the likelihood), "empirical"
    (squared gradients), "hessian" (exact; full structure, over all parameters), "auto": ggn for networks, hessian for bare densities and
    programs. predictive: "linearised" (of the network linearised at θ*, Gaussian in its outputs) or "sampled" (draws of weights). link: how
    linearised class logits become probabilities: "monte_carlo", "probit" or "bridge". tune: what the marginal likelihood sets after the
    fit: "none", one factor of the "prior" precision, one a "layer", or one a "parameter" (diag); tune_noise: the Gaussian noise as well.
    num_rounds > 0 sets them during the training instead, after each of so many equal parts of it (Immer et al. 2021), so that mode and
    prior belong together; base must be al.MAP and the prior al.Normal.

    Without `init` the mode is searched by `base` first. A full Laplace of up to 2,000 parameters polishes its mode by damped Newton steps.
    `fit.update(more)` searches the mode of prior, new rows and the quadratic that is left of the old ones, and adds up their curvatures.
    """

    structure: str = "kron"
    subset: Any = "all"
    curvature: str = "auto"
    predictive: str = "linearised"
    link: str = "monte_carlo"
    tune: str = "none"
    tune_noise: bool = False
    num_tune_steps: int = 200
    num_rounds: int = 0
    rank: int = 50
    reduce: bool = False
    batch_size: int | None = None
    byte_budget: int = 2**32
    base: Method = dataclasses.field(default_factory=MAP)

    card: ClassVar[Card] = Card(
        name="Laplace",
        summary="A Gaussian at the mode: cheap uncertainty for a network that is already trained, and an estimate of its evidence.",
        model_class="any network and likelihood; bare densities and programs with the exact Hessian",
        criterion="the second derivatives of the log joint at its mode",
        search="MAP, then one pass over the data",
        cost="one backward pass an output and row; P² memory (full), Σ a² + b² (kron), P (diag)",
        needs="a mode: a differentiable log joint, trained until its gradient is small",
        references=(
            "MacKay, A practical Bayesian framework for backpropagation networks, 1992",
            "Ritter, Botev and Barber, A scalable Laplace approximation for neural networks, 2018",
            "Daxberger et al., Laplace redux: effortless Bayesian deep learning, 2021",
            "Immer et al., Scalable marginal likelihood estimation for model selection in deep learning, 2021",
        ),
    )

    def __post_init__(self) -> None:
        choices = {"structure": STRUCTURES, "curvature": CURVATURES, "predictive": ("linearised", "sampled"), "tune": TUNE}
        for name, allowed in (choices | {"link": ("monte_carlo", "probit", "bridge")}).items():
            if getattr(self, name) not in allowed:
                raise MethodError(
                    message(f"Laplace({name}=…) cannot be used.", repr(getattr(self, name)), f"one of {allowed}", "choose one")
                )
        check_positive(self, "num_tune_steps", "rank", "batch_size", "byte_budget", whole=True)
        if isinstance(self.num_rounds, bool) or not isinstance(self.num_rounds, int) or self.num_rounds < 0:
            raise MethodError(message("Laplace.num_rounds cannot be used.", repr(self.num_rounds), "a whole number ≥ 0", "pass e.g. 10"))
        if not isinstance(self.base, Method) or self.base.holdout:
            raise MethodError(
                message(
                    "Laplace cannot search its mode this way.",
                    repr(self.base),
                    "a method without held-out rows, such as al.MAP()",
                    "fit it first and pass init=fit",
                )
            )
        if self.tune == "parameter" and self.structure != "diag":
            raise MethodError(
                message("A factor for each parameter needs a diagonal.", f"structure={self.structure!r}", "'diag'", "use tune='layer'")
            )
        if self.tune == "layer" and self.structure == "lowrank":
            raise MethodError(message("A low-rank Laplace has one prior factor.", "tune='layer'", "'prior'", "use tune='prior'"))
        if self.num_rounds and (not isinstance(self.base, MAP) or self.tune == "none" or self.structure in ("ekfac", "lowrank")):
            raise MethodError(
                message(
                    "Factors cannot be learned during this training.",
                    f"base={type(self.base).__name__}, tune={self.tune!r}, structure={self.structure!r}",
                    "al.MAP, a tune other than 'none', and structure 'full', 'kron' or 'diag'",
                    "change them, or use num_rounds=0",
                )
            )
        if self.curvature == "hessian" and (self.structure != "full" or self.subset != "all" or self.tune != "none" or self.tune_noise):
            raise MethodError(
                message(
                    "The exact Hessian is taken of all parameters.",
                    f"structure={self.structure!r}, subset={self.subset!r}, tune={self.tune!r}",
                    "structure='full', subset='all', tune='none'",
                    "use curvature='ggn'",
                )
            )

    def build(self, target: Any) -> Algorithm:
        network = isinstance(target.model, Supervised) and target.model.minibatch
        kind = self.curvature if self.curvature != "auto" else "ggn" if network else "hessian"
        if kind != "hessian" and not network:
            raise MethodError(
                message(
                    f"curvature={kind!r} needs a network and a likelihood.",
                    "a bare density or a program",
                    "al.BNN or al.LinearModel",
                    "use curvature='hessian'",
                )
            )
        return self._exact(target) if kind == "hessian" else self._network(target, kind)

    def _network(self, target: Any, kind: str) -> Algorithm:
        model = target.model
        plan = make_plan(self, target, kind)
        if self.num_rounds:
            plan = plan._replace(polish=False)
        _check_model(model, target, self, plan)
        double = plan.structure == "full" and plan.layout.size <= SMALL
        with jax.enable_x64(double or jax.config.read("jax_enable_x64")):
            inner = self.base.build(target)
            packing = _optimise.packing(jax.eval_shape(target.init, jax.random.key(0)))
        group = groups(self, plan, model, plan.index)

        def blank(dtype: Any) -> Sums:
            return Sums(
                empty(plan, dtype),
                *(jnp.zeros(shape, dtype) for shape in ((), (plan.layout.size if plan.structure == "full" else 0,), (), ())),
            )

        def scale(params: Tree) -> Array:
            return 1.0 / jnp.sqrt(positive(prior_curvature(target, params, plan.index)[0], 1.0))

        def init(key: Key, start: Any) -> State:
            key_inner, key_basis = jax.random.split(key)
            start = jax.tree.map(jnp.asarray, start)
            start = _tree.as_float64(start) if double else start  # a user's own parameters are single
            start, memory = _memory.begin(start)
            dtype = _tree.first_dtype(start)
            basis: Any = ()
            if plan.structure == "lowrank":
                width = min(len(plan.index), plan.rank + OVERSAMPLE)
                basis = (jnp.linalg.qr(jax.random.normal(key_basis, (len(plan.index), width), dtype))[0], scale(start))
            if plan.number is not None:
                basis = memory[1].basis if memory else jnp.arange(plan.number, dtype=jnp.int32)
            elif plan.structure == "ekfac":
                basis = tuple(tuple(jnp.zeros((size, size), dtype) for size in block.numbers.shape) for block in plan.layout.blocks)
            best = Best(start, jnp.asarray(-jnp.inf, dtype), blank(dtype), jnp.zeros((), dtype)) if plan.polish else ()
            logs = jnp.zeros(int(group.max(initial=0)) + 1, dtype) if self.num_rounds else ()
            return State(inner.init(key_inner, start), start, blank(dtype), basis, best, logs, memory)

        def arrive(key: Key, state: State, batch: None) -> tuple[State, Info]:
            params = inner.position(state.inner)
            params = _memory.pinned(params, state.memory, plan, model) if state.memory else params
            basis = (state.basis[0], scale(params)) if plan.structure == "lowrank" else state.basis
            state = fresh(state._replace(params=params, basis=basis), model, plan)
            return state, Info(state.sums.log_likelihood)

        rows = self.batch_size or rows_per_batch(plan, target)
        gather = lambda key, state, batch: gathered(state, batch, model, plan)
        pass_over = Phase("curvature", gather, None, "once", rows)
        between = Phase("turning", lambda key, state, batch: turn(state, model, plan, scale), 1, None)
        with_memory = lambda memory: self.base.build(_memory.Remembering(target, memory, plan))
        phases = [*_search(inner, with_memory), Phase("arrival", arrive, 1, None)]
        preliminary = len(phases)
        # The driver times its ways of running on the first phase, by steps that are thrown away: not on a pass over the data.
        phases += [Phase("start", lambda key, state, batch: (state, Info(state.sums.log_likelihood)), 1, None)]
        if self.num_rounds:
            train = lambda key, state, batch: online(key, state, batch, self, target, plan, group, packing)
            new = lambda key, state, batch: renew(state, self, target, plan, packing)
            part = phases[0]._replace(step=train, num_steps=-(-int(phases[0].num_steps or 1) // self.num_rounds))
            phases = [part, phases[-2], pass_over, Phase("evidence", new, 1, None)] * self.num_rounds + [pass_over]
            preliminary = 0
        elif plan.polish:
            steps = [lambda key, state, batch, last=last: newton(state, target, plan, last) for last in (False, True)]
            polishing = int(np.clip(NEWTON_WORK / (target.num_data * len(plan.index) ** 2), *NEWTON))
            for number in range(polishing):
                phases += [pass_over, Phase("Newton", steps[number == polishing - 1], 1, None)]
        elif plan.structure == "lowrank":
            phases += [pass_over, between] * (PASSES - 1) + [pass_over]
        else:
            phases += [pass_over]
            if plan.structure == "ekfac" or plan.number is not None:
                again = lambda key, state, batch: gathered(state, batch, model, plan, second=True)
                phases += [between, Phase("second pass", again, None, "once", rows)]
        return Algorithm(
            init=init,
            phases=tuple(phases),
            position=lambda state: state.params,
            finish=lambda key, state, kept: _finish(self, target, plan, state),
            preliminary=preliminary,
            watch="log_likelihood",
            verdict=lambda result: _verdict(result, target, plan),
            x64=double,
            notes=_notes(self, plan, target),
        )

    def _exact(self, target: Any) -> Algorithm:
        """The Hessian of the whole log joint, over all parameters."""
        template = jax.eval_shape(target.init, jax.random.key(0))
        size = _tree.size(template)
        check_bytes(8 * COPIES * size**2, self, f"the Hessian of {size} parameters")
        with jax.enable_x64(True):
            inner = self.base.build(target)
        batches = None if target.model is None else "full"

        def init(key: Key, start: Tree) -> State:
            start = _tree.as_float64(start)
            number = _tree.size(start)
            zero = jnp.zeros((), jnp.float64)
            sums = Sums(jnp.zeros((number, number)), zero, jnp.zeros(number), zero, zero)
            return State(inner.init(key, start), start, sums, (), Best(start, -jnp.inf + zero, sums, zero))

        def arrive(key: Key, state: State, batch: None) -> tuple[State, Info]:
            return state._replace(params=inner.position(state.inner)), Info(state.sums.log_likelihood)

        def look(key: Key, state: State, batch: Batch | None, last: bool = False) -> tuple[State, Info]:
            joint = lambda vector: target.log_joint(_tree.unflat(vector, state.params), batch)
            at = _tree.flat(state.params)
            value, slope = jax.value_and_grad(joint)(at)
            hessian = -jax.hessian(joint)(at)
            sums = Sums(0.5 * (hessian + hessian.T), value, slope, state.sums.residual, state.sums.mass)
            best = keep(state.best, state.params, value, sums)
            if last:
                return state._replace(params=best.params, sums=best.sums, best=best), Info(best.log_joint)
            # A direction in which the log joint curves up is climbed by the size of its curvature.
            eigenvalues, vectors = jnp.linalg.eigh(best.sums.curvature)
            size_of = jnp.maximum(jnp.abs(eigenvalues), 1e-8) * (1.0 + best.damping)
            step = vectors @ ((vectors.T @ best.sums.gradient) / size_of)
            moved = _tree.flat(best.params) + jnp.where(jnp.isfinite(step), step, 0.0)
            return state._replace(params=_tree.unflat(moved, best.params), best=best), Info(best.log_joint)

        once = Phase("Newton", look, HESSIANS, batches)
        end = Phase("curvature", lambda key, state, batch: look(key, state, batch, True), 1, batches)
        phases = [*_search(inner), Phase("arrival", arrive, 1, None)]
        return Algorithm(
            init=init,
            phases=(*phases, once, end),
            position=lambda state: state.params,
            finish=lambda key, state, kept: _finish_exact(target, state),
            preliminary=len(phases),
            watch="log_likelihood",
            verdict=lambda result: ("Complete: the mode was found and its Hessian taken, all finite.", True),
            x64=True,
            notes={"treatment": "Gaussian over all parameters, exact Hessian"},
        )


@dataclasses.dataclass(frozen=True)
class Subnetwork:
    """The `size` weights whose marginal variance under a diagonal Laplace is largest (Daxberger et al. 2021)."""

    size: int


# ---- before -----------------------------------------------------------------------------------------------------------------------------


def _search(inner: Algorithm, with_memory: Callable[[Any], Algorithm] | None = None) -> list[Phase]:
    """The phases of the search for the mode, on its part of the state. with_memory: the same search where rows are remembered."""

    def wrap(number: int) -> Callable:
        def wrapped(key: Key, state: State, batch: Batch | None) -> tuple[State, Info]:
            search = with_memory(state.memory) if with_memory is not None and state.memory else inner
            moved, info = search.phases[number].step(key, state.inner, batch)
            return state._replace(inner=moved), Info(getattr(info, "log_likelihood", jnp.zeros(())))

        return wrapped

    if inner.members is not None or inner.keep is not None:
        raise MethodError(
            message("The mode is searched by one run.", "a base with members or draws", "e.g. al.MAP()", "put Laplace inside the ensemble")
        )
    return [phase._replace(step=wrap(number)) for number, phase in enumerate(inner.phases)]


def _check_model(model: Any, target: Any, method: Laplace, plan: Plan) -> None:
    """Refuse what a Laplace over weights cannot do, and what does not fit into memory."""
    template = jax.eval_shape(target.init, jax.random.key(0))
    same = lambda a, b: all(x.shape == y.shape for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    weights = jax.eval_shape(model.weights, template)
    probe = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), template)
    plain = same(weights, template["network"]) and all(
        bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(model.weights(probe)), jax.tree.leaves(probe["network"]), strict=True)
    )
    if method.num_rounds and not isinstance(model.prior, Normal):
        raise MethodError(
            message("Factors are learned for a normal prior.", repr(model.prior), "al.Normal(…)", "change the prior, or use num_rounds=0")
        )
    if not plain:
        raise MethodError(
            message(
                "A Laplace over weights needs the weights themselves as parameters.",
                "a non-centred prior, or weights in units of the noise",
                "a centred form",
                "use centred=True, or curvature='hessian'",
            )
        )
    if method.tune_noise and not (isinstance(model.likelihood, GaussianLikelihood) and "log_scale" in template["likelihood"]):
        raise MethodError(
            message(
                "There is no noise to tune.",
                repr(model.likelihood),
                "al.Gaussian() with a learned scale",
                "drop tune_noise, or learn the scale",
            )
        )
    check_bytes(num_bytes(plan), method, f"{plan.structure} curvature of {len(plan.index):,} weights")


def _notes(method: Laplace, plan: Plan, target: Any) -> dict[str, Any]:
    weights = jax.eval_shape(lambda: target.model.weights(target.model.init(jax.random.key(0))))
    in_blocks, chosen = np.zeros(plan.layout.size + 1, bool), np.zeros(plan.layout.size + 1, bool)
    chosen[plan.index] = True
    for block in plan.layout.blocks:
        in_blocks[block.numbers] = True
    rows = []
    for path, (start, shape) in curvature.offsets(weights).items():
        size = int(np.prod(shape))
        kron = plan.structure in ("kron", "ekfac") and (size == 0 or in_blocks[start])
        how = "at its mode" if not chosen[start] else plan.structure if kron or plan.structure not in ("kron", "ekfac") else "diag"
        rows.append({"path": path, "shape": list(shape), "treatment": how})
    return {"sites": rows, "bytes": num_bytes(plan)}


# ---- after ------------------------------------------------------------------------------------------------------------------------------


def _finish(method: Laplace, target: Any, plan: Plan, state: State) -> Posterior:
    model, params = target.model, jax.tree.map(np.asarray, state.params)
    sums = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) if np.asarray(leaf).dtype.kind == "f" else np.asarray(leaf), state.sums)
    index = plan.index if plan.number is None else np.asarray(state.basis)
    with jax.enable_x64(True):
        precision, slope, vector, log_prior = (np.asarray(part) for part in prior_at(target)(_tree.as_float64(params)))
        precision, replaced = proper(precision[index], target, index)
        scale = 1.0 / np.sqrt(precision)
        offset = vector[index] - getattr(model.prior, "loc", 0.0)
        white = whiten(method, plan, sums, state.basis, index, offset, scale, model)
        number = len(white.spectrum.counts)
        data = data_of(target, sums, np.exp(np.asarray(state.logs, np.float64)) if method.num_rounds else np.ones(number))
        factors, noise, shift, evidence = tune(method, plan, white, data, precision, float(log_prior), searching=not method.num_rounds)
        operator = white.operator(factors / target.temperature, 1.0 / (noise**2 * target.temperature))
    score = None if target.temperature != 1.0 else Score(evidence, 0.0, "estimate")
    # At a mode the log-likelihood falls as fast as the log prior rises. A full Laplace has added up its gradient.
    trained = data.trained[groups(method, plan, model, index)]
    gradient = np.asarray(state.sums.gradient)[index] if plan.structure == "full" else -trained * slope[index]
    memory = _memory.taylor(plan, state, gradient, _rows(state, target))
    if noise != 1.0:
        moved = params["likelihood"]["log_scale"] + np.log(noise).astype(params["likelihood"]["log_scale"].dtype)
        params = params | {"likelihood": params["likelihood"] | {"log_scale": moved}}
    dtype = np.asarray(state.sums.log_likelihood).dtype
    operator = jax.tree.map(lambda leaf: np.asarray(leaf, dtype if np.asarray(leaf).dtype.kind == "f" else None), operator)
    tuned = {"prior_factor": np.asarray(factors), "noise_factor": np.asarray(noise), "replaced": np.asarray(replaced)}
    return Linearised(
        params,
        operator,
        index,
        (np.asarray(scale) * shift).astype(dtype),
        tuned,
        plan.paths,
        method.link,
        method.predictive == "linearised",
        score,
        memory,
    )


def _finish_exact(target: Any, state: State) -> Posterior:
    sums = jax.tree.map(np.asarray, state.sums)
    hessian = np.asarray(sums.curvature)
    values, vectors = np.linalg.eigh(hessian)
    floor = 1e-10 * max(values.max(initial=0.0), 1e-300)
    if values.min() <= floor:
        raise MethodError(
            message(
                "The log joint has no strict maximum where the search ended.",
                f"smallest curvature {values.min():.3g}",
                "all positive",
                "raise num_steps of base, start elsewhere (init=), or give every parameter a proper prior",
            )
        )
    spread = 1.0 / np.sqrt(values)
    log_det = 2.0 * float(np.sum(np.log(spread)))
    evidence = float(sums.log_likelihood) + 0.5 * len(values) * np.log(2 * np.pi) + 0.5 * log_det
    score = Score(evidence, 0.0, "estimate") if target.temperature == 1.0 else None
    params = jax.tree.map(np.asarray, state.params)
    chosen = (True,) * len(jax.tree.leaves(params))
    return Gaussian(params, Root(vectors * spread, np.asarray(log_det)), chosen, score)


def _rows(state: State, target: Any) -> int:
    """N: of the rows now and of those remembered."""
    return target.num_data + (state.memory[1].rows if state.memory else 0)


def _nats_below_mode(params: Tree, sums: Sums, target: Any, plan: Plan) -> float:
    """½ bᵀ(H + Π)⁻¹b: by how much a quadratic log joint with slope b would still rise."""
    with jax.enable_x64(True):
        precision, slope = (np.asarray(part)[plan.index] for part in prior_at(target)(_tree.as_float64(params))[:2])
    b = np.asarray(sums.gradient, np.float64)[plan.index] + slope
    matrix = np.asarray(sums.curvature, np.float64) + np.diag(proper(precision, target, plan.index)[0])
    return 0.5 * float(b @ np.linalg.solve(matrix, b))


def _verdict(result: Any, target: Any, plan: Plan) -> tuple[str, bool, dict[str, float]]:
    """How near the mode the search has come, where the slope there is known."""
    number = int(np.max(_rows(result.state, target)))
    health: dict[str, float] = {}
    if number == 1:
        return "Only one row of data: the posterior is mostly the prior; add rows before trusting it.", False, health
    if plan.polish:
        ends = (result.state.params, result.state.sums)
        members = (
            [ends] if np.ndim(ends[1].mass) == 0 else [jax.tree.map(lambda leaf, i=i: leaf[i], ends) for i in range(len(ends[1].mass))]
        )
        left = max(_nats_below_mode(params, sums, target, plan) for params, sums in members)
        health = {"nats_below_mode": left}
        if left > SHORT * len(plan.index):
            said = f"The search ended about {left:.3g} nats below the mode of {len(plan.index)} parameters"
            return f"{said}: raise num_steps of base, or pass init=fit.", False, health
    more = f" Updated by {target.num_data:,} rows to N = {number:,}." if number > target.num_data else ""
    return f"Complete: mode and curvature found in {result.steps} steps, all finite.{more}", True, health
