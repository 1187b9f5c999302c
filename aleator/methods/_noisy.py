"""What the dropout family shares: point parameters, noise at the sites of the network, and one bound to ascend.

A member of the family says which noise parameters it has, what they do at a site, what they cost (KL), and which posterior they leave.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aleator import _tree, sites
from aleator._errors import MethodError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.loop import Algorithm, Phase
from aleator.methods import _optimise
from aleator.methods._method import Method, check_positive
from aleator.posterior import Posterior, Sampled, Score

EVIDENCE_ROWS = 1000  # rows per step while the bound is evaluated
LOG_EVERY = 20  # steps between looks at the KL: its value, unlike its gradient, is needed for nothing but the log


class State(NamedTuple):
    """params: {"model": the model's parameters, "noise": the family's}; count: steps taken; kl: as last looked at; totals (S,): Σ log p(y|x)
    of S passes, for the bound; seed: data of the key these passes share over all rows."""

    params: Tree
    optimizer: Any
    count: Array
    kl: Array
    totals: Array
    seed: Array


class Info(NamedTuple):
    """log_likelihood: (N/n)·Σ log p(yᵢ|xᵢ,θ) under this step's noise. kl: the cost of the noise, up to a constant, every few steps."""

    log_likelihood: Array
    kl: Array


class Noise(NamedTuple):
    """Noise made concrete for one network.

    init(params) → noise parameters. handler(key, params, noise) → (handler, companions, powers) for `sites.replay`, on the scale of the
    network's weights; or (key, (), ()) where the network makes its own noise. kl(params, noise) → scalar, with the part of the prior that
    applies to point parameters in it. posterior(params, noise) → Posterior. notes: for the manifest.
    """

    init: Callable[[Tree], Tree]
    handler: Callable[[Key, Tree, Tree], tuple[Callable, tuple, tuple]]
    kl: Callable[[Tree, Tree], Array]
    posterior: Callable[[Tree, Tree], Sampled]
    notes: dict[str, Any]


def step(
    key: Key, state: State, batch: Batch, target: Any, noise: Noise, optimizer: Any, packing: _optimise.Packing, warmup: int, speed: float
) -> tuple[State, Info]:
    """Ascend log p(D | θ ⊙ noise) − KL by one mini-batch and one draw of the noise, whose parameters move `speed` times as far."""
    import optax

    ramp = 1.0 if not warmup else jnp.minimum(1.0, (state.count + 1) / warmup)

    def loss(tree: Tree) -> tuple[Array, Array]:
        apply = _replayed(key, target, noise, tree)
        data = target.parts(tree["model"], batch, None, apply)[1]
        kl = noise.kl(tree["model"], tree["noise"])
        return -(data / target.temperature - ramp * kl) / max(target.num_data, 1), data

    tree = packing.unpack(state.params)
    gradient, data = jax.grad(loss, has_aux=True)(tree)
    updates, optimizer_state = optimizer.update(packing.pack(gradient), state.optimizer, state.params)
    if speed != 1.0:
        moves = packing.unpack(updates)
        updates = packing.pack(moves | {"noise": jax.tree.map(lambda move: speed * move, moves["noise"])})
    kl = jax.lax.cond(state.count % LOG_EVERY == 0, lambda: noise.kl(tree["model"], tree["noise"]), lambda: state.kl)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, optimizer=optimizer_state, count=state.count + 1, kl=kl), Info(data, kl)


def judge(key: Key, state: State, batch: Batch, target: Any, noise: Noise, packing: _optimise.Packing) -> tuple[State, Info]:
    """Add one batch's log-likelihood under S functions of the posterior, the same ones for every batch."""
    tree = packing.unpack(state.params)
    keys = jax.random.split(jax.random.wrap_key_data(state.seed, impl="philox2x32"), len(state.totals))
    posterior = noise.posterior(tree["model"], tree["noise"])

    def one(k: Key) -> tuple[Array, Array]:
        outputs, extra = posterior.function(k, target.model, batch.x)
        terms = target.model.likelihood.log_prob(outputs, batch.y, extra)
        return batch.weighted_sum(terms), target.total(terms, batch)

    here, scaled = jax.lax.map(one, keys)
    # Logged in the units of the steps before, so that one trace holds both.
    return state._replace(totals=state.totals + here), Info(jnp.mean(scaled), noise.kl(tree["model"], tree["noise"]))


class NoisyMethod(Method):
    """Base of the dropout family: everything but the noise itself."""

    num_steps: int
    batch_size: int | None
    learning_rate: float
    kl_warmup: int = 0
    num_evidence: int = 0
    noise_speed: float = 1.0

    def check(self) -> None:
        check_positive(self, "num_steps", "batch_size", whole=True)
        check_positive(self, "learning_rate", "clip", "noise_speed")
        for name in ("kl_warmup", "num_evidence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise MethodError(
                    message(f"{type(self).__name__}.{name} cannot be used.", repr(value), "a whole number ≥ 0", f"pass e.g. {name}=0")
                )
        _optimise.check_optimizer(self)

    @abc.abstractmethod
    def noise(self, target: Any) -> Noise:
        """The noise for one target; raises MethodError where there is nowhere to put it."""

    def build(self, target: Any) -> Algorithm:
        noise, optimizer = self.noise(target), _optimise.optimizer(self)
        start = jax.eval_shape(target.init, jax.random.key(0))
        packing = _optimise.packing({"model": start, "noise": jax.eval_shape(noise.init, start)})

        def init(key: Key, params: Tree) -> State:
            packed = packing.pack({"model": params, "noise": noise.init(params)})
            seed = jax.random.key_data(jax.random.key(jax.random.bits(key, dtype=jnp.uint32), impl="philox2x32"))
            dtype = jax.tree.leaves(params)[0].dtype
            none, totals = jnp.zeros((), dtype), jnp.zeros(self.num_evidence, dtype)
            return State(packed, optimizer.init(packed), jnp.zeros((), jnp.int32), none, totals, seed)

        def finish(key: Key, state: State, kept: Any) -> Posterior:
            tree = packing.unpack(state.params)
            posterior = noise.posterior(tree["model"], tree["noise"])
            if not self.num_evidence or target.temperature != 1.0:
                return posterior
            bound = state.totals - noise.kl(tree["model"], tree["noise"])
            error = float(jnp.std(bound, ddof=1) / len(bound) ** 0.5) if len(bound) > 1 else float("nan")
            return dataclasses.replace(posterior, log_evidence=Score(float(jnp.mean(bound)), error, "relative"))  # type: ignore[type-var]

        batches = "full" if self.batch_size is None else "random"
        train = lambda key, state, batch: step(key, state, batch, target, noise, optimizer, packing, self.kl_warmup, self.noise_speed)
        phases = [Phase(type(self).__name__, train, self.num_steps, batches, self.batch_size)]
        if self.num_evidence:
            rows = max(1, min(EVIDENCE_ROWS, target.num_data))
            phases.append(Phase("bound", lambda k, s, b: judge(k, s, b, target, noise, packing), None, "once", rows))
        departures = [f"KL ramped up over the first {self.kl_warmup} steps"] if self.kl_warmup else []
        departures += [f"temperature {target.temperature}"] if target.temperature != 1.0 else []
        return Algorithm(
            init=init,
            phases=tuple(phases),
            position=lambda state: packing.unpack(state.params)["model"],
            finish=finish,
            watch="log_likelihood",
            notes=noise.notes | {"departures": departures + noise.notes.get("departures", [])},
        )


def find_sites(target: Any, method: str) -> sites.Found:
    """The sites of the target's network, or an error that says why there are none."""
    model = target.model
    rows = target.rows()
    if model is None or rows is None or not hasattr(model, "apply"):
        raise MethodError(
            message(
                f"{method} needs a network.",
                "a target without one",
                "al.BNN or al.LinearModel with inputs x",
                "use al.Variational() for densities and programs",
            )
        )
    weights = jax.eval_shape(lambda k: model.weights(model.init(k)), jax.random.key(0))
    found = sites.find(model.apply, weights, rows)
    if not found.sites:
        raise MethodError(
            message(
                f"{method} finds nowhere to put its noise.",
                "no linear map in the network: " + "; ".join(f"{path} {why}" for path, why in found.rest.items()),
                "a matrix product, convolution or look-up with a parameter",
                "use al.Variational(estimator='weight'), which works on the weights themselves",
            )
        )
    return found


def all_paths(target: Any) -> list[str]:
    """Paths of all parameters of the model."""
    return _tree.paths(jax.eval_shape(target.init, jax.random.key(0)))


def full_path(path: str) -> str:
    """A path within the network as one within the model's parameters; "" where the network is a single array."""
    return f"network.{path}" if path else "network"


def treatments(target: Any, treat: Callable[[str], str]) -> list[dict[str, Any]]:
    """How each parameter is treated, for the manifest. treat: path → words."""
    start = jax.eval_shape(target.init, jax.random.key(0))
    leaves = zip(_tree.paths(start), jax.tree.leaves(start), strict=True)
    return [{"path": path, "shape": list(leaf.shape), "treatment": treat(path)} for path, leaf in leaves]


def _replayed(key: Key, target: Any, noise: Noise, tree: Tree) -> Callable:
    key_noise, key_sites = jax.random.split(key)
    handler, companions, powers = noise.handler(key_noise, tree["model"], tree["noise"])
    if not callable(handler):  # a key: the network brings its own noise
        return lambda weights, x, k: target.model.apply(weights, x, handler)
    return lambda weights, x, k: sites.replay(key_sites, target.model.apply, weights, x, handler, companions, powers)[0]
