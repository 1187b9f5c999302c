"""Batch ensembles: members are literal W ∘ (r sᵀ) networks on every kind of network, and take the memory they say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _tree
from aleator.data import Data
from aleator.methods.batch_ensemble import BatchEnsemble, RankOne, effective, init, make_plan, replayed
from aleator.model import signature
from aleator.target import Target
from tests.conformance import cases

X, Y = cases.regression()
MEMBERS = 3


def images(size: int, channels: int, count: int = 4) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(count, size, size, channels)).astype(np.float32)


def equinox_convolution() -> Any:
    import equinox as eqx

    class Net(eqx.Module):
        conv: eqx.nn.Conv2d
        out: eqx.nn.Linear

        def __init__(self) -> None:
            self.conv = eqx.nn.Conv2d(2, 3, 3, key=jax.random.key(0))
            self.out = eqx.nn.Linear(3 * 4 * 4, 1, key=jax.random.key(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(jnp.tanh(self.conv(jnp.moveaxis(x, -1, 0))).reshape(-1))

    return Net()


def scanned() -> Any:
    """Three hidden layers as one stacked leaf, walked by a scan; the second map has its weight on the left."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (3, 3, 3)),
        "b": jax.random.normal(keys[1], (3, 3)),
        "v": jax.random.normal(keys[2], (1, 3)),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"]), None), x, {"w": p["w"], "b": p["b"]})
        return (p["v"] @ hidden.T).T

    return apply, params


def fused() -> Any:
    """One matrix cut in two by its outputs, transposed and scaled on its way; a tied weight used twice."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "ab": jax.random.normal(keys[0], (8, 3)),
        "tied": jax.random.normal(keys[1], (4, 4)),
        "v": jax.random.normal(keys[2], (4, 1)),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        a, b = jnp.split(-0.5 * p["ab"].T, 2, axis=1)
        hidden = jnp.tanh(x @ a) * jax.nn.sigmoid(x @ b)
        return jnp.tanh(jnp.tanh(hidden @ p["tied"]) @ p["tied"]) @ p["v"]

    return apply, params


def looked_up() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"table": jax.random.normal(keys[0], (5, 4)), "v": jax.random.normal(keys[1], (4, 1))}
    return lambda p, x: jnp.tanh(p["table"][x[:, 0]]) @ p["v"], params


NETWORKS: dict[str, tuple[Any, Any]] = {
    "mlp": (lambda: al.networks.MLP(cases.D, (8, 5), 1), X),
    "convolution": (lambda: al.networks.VGG((4, 4, 3), 1, widths=((4,),), dense=(6,), norm="group"), images(4, 3)),
    "equinox": (lambda: cases.NETWORKS["equinox"].make(), X),
    "equinox convolution": (equinox_convolution, images(6, 2, 2)),
    "nnx": (lambda: cases.NETWORKS["nnx"].make(), X),
    "function": (lambda: cases.NETWORKS["function"].make(), X),
    "scan": (scanned, X),
    "fused": (fused, X),
    "embedding": (looked_up, np.arange(5, dtype=np.int32)[:, None]),
}


def target_of(name: str, prior: Any = None) -> tuple[Target, np.ndarray, np.ndarray]:
    make, x = NETWORKS[name]
    y = np.random.default_rng(3).normal(size=(len(x), 1)).astype(np.float32)
    model = al.BNN(make(), al.Gaussian(), prior or al.Normal(1.0)).bind(x, y)
    return Target(model, len(x), signature=signature(x)), x, y


def started(target: Target, spread: float = 0.5) -> tuple[Any, Any]:
    plan = make_plan(target)
    start = jax.jit(target.init)(jax.random.key(0))
    # Away from zero, so that biases and gains show.
    rng = np.random.default_rng(4)
    start = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.3 * rng.normal(size=leaf.shape).astype(np.float32), start)
    method = BatchEnsemble(num_members=MEMBERS, spread=spread)
    return plan, jax.tree.map(np.asarray, jax.jit(lambda p: init(jax.random.key(1), p, plan, method))(start))


def literal(tree: Any, plan: Any, number: int) -> Any:
    """W ∘ (r sᵀ) written out entry by entry with NumPy."""
    structure = jax.tree.structure(plan.template)
    leaves, factors, own = [], iter(zip(tree["left"], tree["right"], plan.axes, strict=True)), iter(tree["own"])
    for leaf, kind in zip(tree["shared"], plan.shared, strict=True):
        if kind == "own":
            leaves.append(next(own)[number])
        elif kind == "all":
            leaves.append(leaf)
        else:
            r, s, (ins, outs) = next(factors)
            value = np.array(leaf, np.float64)
            for index in np.ndindex(*value.shape):
                at = lambda axes, index=index: tuple(i if axis in axes else 0 for axis, i in enumerate(index))
                value[index] *= float(r[number][at(ins)]) * float(s[number][at(outs)])
            leaves.append(value.astype(np.float32))
    return jax.tree.unflatten(structure, leaves)


def joined(tree: Any, plan: Any, number: int) -> Any:
    own = iter(tree["own"])
    leaves = [next(own)[number] if kind == "own" else leaf for leaf, kind in zip(tree["shared"], plan.shared, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(plan.template), leaves)


@pytest.mark.parametrize("name", NETWORKS)
def test_members_equal_literal_networks(name: str) -> None:
    target, x, _ = target_of(name)
    plan, tree = started(target)
    assert "rank_one" in plan.shared
    model = target.model
    plainly = jax.jit(model.outputs)

    @jax.jit
    def at_sites(bare: Any, left: Any, right: Any) -> Any:
        return model.outputs(bare, x, None, lambda w, rows, key: replayed(model.apply, w, rows, left, right, plan, key))

    for number in range(MEMBERS - 1):
        left, right, own = (tuple(leaf[number] for leaf in tree[side]) for side in ("left", "right", "own"))
        member, bare = literal(tree, plan, number), joined(tree, plan, number)
        expected = plainly(member, x)
        assert np.abs(expected - plainly(bare, x)).max() > 1e-2  # the factors matter
        np.testing.assert_allclose(at_sites(bare, left, right), expected, rtol=2e-4, atol=2e-5)
        ones = (tuple(np.ones_like(factor) for factor in side) for side in (left, right))
        np.testing.assert_allclose(at_sites(bare, *ones), plainly(bare, x), rtol=1e-5, atol=1e-6)
        for a, b in zip(jax.tree.leaves(effective(bare, left, right, own, plan.shared)), jax.tree.leaves(member), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_factors_of_one_leave_a_posterior_of_the_shared_network() -> None:
    target, x, _ = target_of("mlp")
    plan, tree = started(target)
    bare = joined(tree, plan, 0)
    left, right = (tuple(jnp.ones_like(factor[:2]) for factor in tree[side]) for side in ("left", "right"))
    posterior = RankOne(bare, left, right, tuple(jnp.stack([leaf[0]] * 2) for leaf in tree["own"]), plan.shared)
    draws = posterior.outputs(jax.random.key(0), target.model, x, 7).draws
    np.testing.assert_allclose(draws, np.stack([jax.jit(target.outputs)(bare, x)] * 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "prior"),
    [
        ("mlp", al.priors.Hierarchical()),
        ("equinox convolution", al.Normal(0.7)),
        ("fused", al.priors.Laplace(0.7)),
        ("scan", al.Normal(0.7)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_ascends_the_mean_log_joint_of_the_members(name: str, prior: Any) -> None:
    """With SGD at rate 1 a step is the gradient of (1/M)Σ log joint(θₘ)/N, here taken through the written-out weights."""
    target, x, y = target_of(name, prior)
    method = BatchEnsemble(num_members=MEMBERS, optimizer="sgd", learning_rate=1.0, schedule="constant", num_steps=1)
    algorithm, plan = method.build(target), make_plan(target)
    batch = Data(x, y, np.random.default_rng(0).uniform(0.5, 2.0, len(x))).batch()
    start = target.init(jax.random.key(0))
    state = jax.jit(algorithm.init)(jax.random.key(1), start)
    after, _ = jax.jit(algorithm.phases[0].step)(jax.random.key(2), state, batch)
    tree = jax.jit(lambda p: init(jax.random.key(1), p, plan, method))(start)

    def objective(tree: Any) -> Any:
        total = 0.0
        for m in range(MEMBERS):
            left, right, own = (tuple(leaf[m] for leaf in tree[side]) for side in ("left", "right", "own"))
            total = total + target.log_joint(effective(joined(tree, plan, m), left, right, own, plan.shared), batch)
        return total / MEMBERS / target.num_data

    slope = jax.jit(jax.grad(objective))(tree)
    first, second = (algorithm.finish(jax.random.key(3), s, None) for s in (state, after))
    for side in ("left", "right", "own"):
        for old, new, expected in zip(getattr(first, side), getattr(second, side), slope[side], strict=True):
            np.testing.assert_allclose(new - old, expected, rtol=2e-3, atol=2e-4 * max(1.0, float(jnp.abs(expected).max())))
    shared = [leaf for leaf, kind in zip(jax.tree.leaves(second.params), plan.shared, strict=True) if kind != "own"]
    before = [leaf for leaf, kind in zip(jax.tree.leaves(first.params), plan.shared, strict=True) if kind != "own"]
    expected = [leaf for leaf, kind in zip(slope["shared"], plan.shared, strict=True) if kind != "own"]
    for old, new, slopes in zip(before, shared, expected, strict=True):
        np.testing.assert_allclose(new - old, slopes, rtol=2e-3, atol=2e-4 * max(1.0, float(jnp.abs(slopes).max())))


def test_predictions_are_the_members() -> None:
    fit = al.fit(0, cases.network_model(), (X, Y), BatchEnsemble(num_members=4, num_steps=300, learning_rate=0.03))
    predictive = fit.predict(0, X)
    assert predictive.draws.shape[:2] == (4, cases.N)
    members = [fit.posterior.member(m) for m in range(4)]
    outputs = jax.jit(fit.model.outputs)
    for m in range(4):
        np.testing.assert_allclose(predictive.draws[m], np.asarray(outputs(members[m], X))[:, 0], rtol=1e-5, atol=1e-5)
    assert (predictive.epistemic > 0).all() and predictive.log_prob(Y).mean() > -0.5
    draws = np.asarray(fit.sample(1, 200)["network"]["layer0"]["weight"])
    kernels = np.stack([np.asarray(member["network"]["layer0"]["weight"]) for member in members])
    off = np.abs(draws[:, None] - kernels).max(axis=(2, 3))
    assert set(off.argmin(axis=1).tolist()) == {0, 1, 2, 3} and off.min(axis=1).max() < 1e-6
    assert fit.functions(2, X, 6).shape == (6, cases.N)
    assert [row["treatment"] for row in fit.manifest["sites"]] == ["one per member"] + [
        "one per member",
        "shared, rank-one factor per member",
    ] * 2


def test_memory_is_stated_and_small() -> None:
    """Posterior bytes as stated and near those of one network; training makes nothing of the size of a weight per member."""
    width, members = 400, 16
    model = al.BNN(al.networks.MLP(cases.D, (width, width), 1), al.Gaussian(), al.Normal(1.0)).bind(X, Y[:, None])
    target = Target(model, cases.N, signature=signature(X))
    algorithm = BatchEnsemble(num_members=members, num_steps=1, optimizer="sgd").build(target)
    state = jax.jit(algorithm.init)(jax.random.key(0), target.init(jax.random.key(1)))
    posterior = algorithm.finish(jax.random.key(2), state, None)
    stated, one = algorithm.notes["memory"], _tree.nbytes(posterior.params)
    assert _tree.nbytes(posterior) == stated["posterior_bytes"] < 1.3 * one and stated["bytes_of_as_many_copies"] == members * one
    batch = Data(X[:2], Y[:2, None]).batch()
    compiled = jax.jit(algorithm.phases[0].step).lower(jax.random.key(3), state, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * one < members * one


def test_ensembles_of_batch_ensembles_mix() -> None:
    fit = al.fit(0, cases.network_model(), (X, Y), al.Ensemble(BatchEnsemble(num_members=2, num_steps=100), 2))
    assert isinstance(fit.posterior, al.posterior.Mixture)
    draws = fit.predict(0, X, num_samples=100).draws
    assert len(np.unique(draws[:, 0].round(5))) == 4 and np.isfinite(draws).all()


def test_what_has_no_units_is_refused() -> None:
    with pytest.raises(al.MethodError, match="needs a network"):
        al.fit(0, al.target_from_log_density(lambda p: -(p**2), 1.0), None, BatchEnsemble(num_steps=2))
    elementwise = al.BNN((lambda p, x: x[:, :1] * p["a"] + p["b"], {"a": jnp.ones(1), "b": jnp.zeros(1)}))
    with pytest.raises(al.MethodError, match="no linear map"):
        al.fit(0, elementwise, (X, Y), BatchEnsemble(num_steps=2))
    for settings, match in (
        ({"num_members": 0}, "num_members"),
        ({"spread": 0.0}, "spread"),
        ({"optimizer": "addam"}, "Unknown optimiser"),
    ):
        with pytest.raises(al.MethodError, match=match):
            BatchEnsemble(**settings)
