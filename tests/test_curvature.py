"""Curvature against slow, literal definitions, on networks of every kind; operators against the matrices they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _tree, curvature, linalg
from aleator.data import Batch
from aleator.model import signature

N, K = 5, 2


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _attention(p: dict, x: jax.Array) -> jax.Array:
    """x (n, 3, 2): queries and keys from one projection, values from another, averaged over positions."""
    queries, values = x @ p["q"], x @ p["v"]
    mixed = jax.nn.softmax(queries @ jnp.swapaxes(queries, 1, 2), axis=-1) @ values
    return mixed.mean(axis=1) @ p["out"] + p["bias"]


def _shared(p: dict, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ p["w"] + p["b"])
    return jnp.tanh(hidden @ p["w"] + p["b"])[:, :K] * p["gain"]


def _convolution(p: dict, x: jax.Array) -> jax.Array:
    out = jax.lax.conv_general_dilated(x, p["kernel"], (2, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return jnp.tanh(out + p["b"][:, None, None]).mean(axis=(2, 3)) @ p["out"]


def _equinox() -> Any:
    import equinox as eqx

    return eqx.nn.MLP(3, K, 4, 1, activation=jnp.tanh, key=jax.random.key(0))


def _recurrent(p: dict, x: jax.Array) -> jax.Array:
    """x (n, 4, 2), read backwards in time; the read-out is shared with nothing."""

    def step(h: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(now @ p["in"] + h @ p["again"] + p["b"]), None

    return jax.lax.scan(step, jnp.zeros((len(x), 3)), jnp.swapaxes(x, 0, 1), reverse=True)[0] @ p["out"]


def _grouped(p: dict, x: jax.Array) -> jax.Array:
    """Two groups of two channels each, three outputs a group; then one kernel a channel."""
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2) + p["b"]
    out = jax.lax.conv_general_dilated(jnp.tanh(out), p["deep"], (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=6)
    return out.mean(axis=(1, 2)) @ p["out"]


def _table(p: dict, x: jax.Array) -> jax.Array:
    """x (n, 3) in (0, 5): rows of a table of 5."""
    return jnp.tanh(p["table"][jnp.clip(jnp.abs(x) * 2, 0, 4).astype(jnp.int32)]).sum(axis=1) @ p["out"]


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int, int]] = {
    # network, shape of a row, weights in blocks, weights outside
    "dense": (lambda: al.networks.MLP(3, (4, 3), K, activation="tanh"), (3,), 39, 0),
    "equinox": (_equinox, (3,), 26, 0),
    "convolution": (lambda: (_convolution, {"kernel": normal(1, 3, 2, 3, 2), "b": normal(2, 3), "out": normal(3, 3, K)}), (2, 4, 4), 45, 0),
    "attention": (
        lambda: (_attention, {"q": normal(1, 2, 3), "v": normal(2, 2, 3), "out": normal(3, 3, K), "bias": normal(4, K)}),
        (3, 2),
        20,
        0,
    ),
    "shared": (lambda: (_shared, {"w": normal(1, 3, 3), "b": normal(2, 3), "gain": normal(3, K)}), (3,), 12, 2),
}
OTHERS = {  # the same, with the Gaussian likelihood alone
    "recurrent": (
        lambda: (_recurrent, {"in": normal(1, 2, 3), "again": normal(2, 3, 3), "b": normal(3, 3), "out": normal(4, 3, K)}),
        (4, 2),
        21,
        3,
    ),
    "grouped": (
        lambda: (_grouped, {"kernel": normal(1, 2, 2, 2, 6), "b": normal(2, 6), "deep": normal(3, 2, 1, 1, 6), "out": normal(4, 6, K)}),
        (3, 3, 4),
        78,
        0,
    ),
    "table": (lambda: (_table, {"table": normal(1, 5, 3), "out": normal(2, 3, K)}), (3,), 21, 0),
}
LIKELIHOODS = {"gaussian": al.Gaussian(0.5), "categorical": al.Categorical(K)}


def problem(network: str, likelihood: str) -> tuple[Any, Any, Batch, curvature.Layout, dict]:
    make, shape, *_ = (NETWORKS | OTHERS)[network]
    x = normal(7, N, *shape)
    y = np.arange(N) % K if likelihood == "categorical" else np.asarray(normal(8, N, K))
    model = al.BNN(make(), LIKELIHOODS[likelihood], al.Normal(1.0)).bind(x, np.asarray(y))
    params = model.start(jax.random.key(3))
    batch = Batch(x, jnp.asarray(y, jnp.int32 if likelihood == "categorical" else jnp.float32), None, jnp.arange(N))
    return model, model.weights(params), batch, curvature.layout(model, signature(x)), model.extra(params)


def literal(model: Any, weights: Any, batch: Batch, extra: dict) -> tuple[np.ndarray, np.ndarray]:
    """(Jacobians (n, k, P), GGN (P, P)): one row and one entry of the Hessian of −log p in f at a time, no root."""
    vector = _tree.flat(weights)
    jacobians, total = [], np.zeros((vector.size, vector.size))
    for i in range(N):
        f = lambda v, i=i: model.apply(_tree.unflat(v, weights), batch.x[i : i + 1], None)[0]
        jacobian = np.asarray(jax.jacfwd(f)(vector), np.float64)
        loss = lambda out, i=i: -model.likelihood.log_prob(out[None], batch.y[i : i + 1], extra)[0]
        inner = np.asarray(jax.hessian(loss)(f(vector)), np.float64)
        total += jacobian.T @ inner @ jacobian
        jacobians.append(jacobian)
    return np.stack(jacobians), total


@pytest.mark.parametrize(
    ("network", "likelihood"), [(network, kind) for network in NETWORKS for kind in LIKELIHOODS] + [(name, "gaussian") for name in OTHERS]
)
def test_curvature_equals_its_definition(network: str, likelihood: str) -> None:
    """Dense, diagonal, products and the gradients at sites; for these likelihoods the Fisher information is the Hessian."""
    model, weights, batch, plan, extra = problem(network, likelihood)
    jacobians, matrix = literal(model, weights, batch, extra)
    index = np.arange(plan.size, dtype=np.int32)
    close = lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5 * np.abs(wanted).max())
    close(curvature.jacobian(model, weights, batch.x, plan)[1], jacobians)
    close(curvature.dense(model, weights, batch, extra, plan, "ggn"), matrix)
    some = index[::3]
    close(curvature.dense(model, weights, batch, extra, plan, "ggn", some), matrix[np.ix_(some, some)])
    close(curvature.diagonal(model, weights, batch, extra, plan, "ggn"), np.diagonal(matrix))
    vectors = normal(5, plan.size, 3)
    close(curvature.product(model, weights, batch, extra, index, "ggn", vectors), matrix @ np.asarray(vectors, np.float64))
    in_blocks, outside = (NETWORKS | OTHERS)[network][2:]
    assert sum(block.numbers.size for block in plan.blocks) == in_blocks
    assert len(plan.rest) == outside
    seen = curvature.tap(model, weights, batch.x, plan)
    pulled = seen.pull(jnp.broadcast_to(jnp.eye(K)[:, None], (K, N, K)))
    for block, inputs, cotangents in zip(plan.blocks, seen.inputs, pulled, strict=True):
        close(np.moveaxis(np.asarray(curvature.gradients(inputs, cotangents)), 0, 1), jacobians[:, :, block.numbers])


def test_kronecker_factors_equal_their_definitions() -> None:
    """Expand: every position a row. Reduce: means of inputs and sums of cotangents. Both from the network's own patches and cotangents."""
    model, weights, batch, plan, extra = problem("attention", "gaussian")
    queries = next(b for b in plan.blocks if b.names == ("q",))
    number = plan.blocks.index(queries)
    assert queries.positions == 3
    x = np.asarray(batch.x, np.float64)
    root = 1.0 / 0.5

    def pushed(z: jax.Array, row: jax.Array) -> jax.Array:
        """Outputs of one row with z (3, 3) added to its queries."""
        q = row @ weights["q"] + z
        mixed = jax.nn.softmax(q @ q.T, axis=-1) @ (row @ weights["v"])
        return mixed.mean(axis=0) @ weights["out"] + weights["bias"]

    cotangents = np.stack([np.asarray(jax.jacrev(pushed)(jnp.zeros((3, 3)), row)) for row in batch.x]) * root  # (n, k, t, b)
    for reduce in (False, True):
        found = curvature.factors(model, weights, batch, extra, plan, "ggn", reduce)
        a = x.mean(axis=1, keepdims=True) if reduce else x
        g = cotangents.sum(axis=2, keepdims=True) if reduce else cotangents
        np.testing.assert_allclose(found.inputs[number], np.einsum("nta,ntc->ac", a, a), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.outputs[number], np.einsum("nktb,nktc->bc", g, g), rtol=1e-4, atol=1e-5)


def test_recurrent_weights_count_every_step_as_a_row() -> None:
    model, weights, batch, plan, extra = problem("recurrent", "gaussian")
    found = curvature.factors(model, weights, batch, extra, plan, "ggn", False)
    again = next(i for i, block in enumerate(plan.blocks) if block.names == ("again",))
    inputs, outputs = np.zeros((3, 3)), np.zeros((3, 3))
    for row in batch.x:

        def unrolled(pushes: jax.Array, row: jax.Array = row) -> tuple[jax.Array, jax.Array]:
            h, seen = jnp.zeros(3), []
            for t in (3, 2, 1, 0):
                seen.append(h)
                h = jnp.tanh(row[t] @ weights["in"] + h @ weights["again"] + pushes[t] + weights["b"])
            return h @ weights["out"], jnp.stack(seen)

        slopes, hidden = jax.jacrev(unrolled, has_aux=True)(jnp.zeros((4, 3)))
        inputs += np.einsum("ta,tc->ac", hidden, hidden)
        outputs += np.einsum("ktb,ktc->bc", slopes, slopes) / 0.5**2
    assert plan.blocks[again].positions == 4
    np.testing.assert_allclose(found.inputs[again], inputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.outputs[again], outputs, rtol=1e-4, atol=1e-4 * outputs.max())


def test_groups_and_look_ups_have_factors_of_their_own() -> None:
    """A group sees its own channels alone; the input factor of a table is diagonal: how often each row is used."""
    model, weights, batch, plan, extra = problem("grouped", "gaussian")
    first = [i for i, block in enumerate(plan.blocks) if block.names == ("kernel",)]
    assert [plan.blocks[i].numbers.shape for i in first] == [(9, 3), (9, 3)]
    found = curvature.factors(model, weights, batch, extra, plan, "ggn", False)
    padded = np.pad(np.asarray(batch.x), ((0, 0), (0, 1), (0, 1), (0, 0)))
    for number, group in enumerate(first):
        own = padded[:, :, :, 2 * number : 2 * number + 2]
        windows = [own[n, i : i + 2, j : j + 2].reshape(-1) for n in range(N) for i in range(3) for j in range(3)]
        rows = np.concatenate([np.stack(windows), np.ones((len(windows), 1))], axis=1)
        np.testing.assert_allclose(found.inputs[group], rows.T @ rows, rtol=1e-4, atol=1e-4)
    model, weights, batch, plan, extra = problem("table", "gaussian")
    used = np.bincount(np.clip(np.abs(batch.x) * 2, 0, 4).astype(int).ravel(), minlength=5)
    table = next(i for i, block in enumerate(plan.blocks) if block.names == ("table",))
    np.testing.assert_array_equal(curvature.factors(model, weights, batch, extra, plan, "ggn", False).inputs[table], np.diag(used))


def test_padding_and_weights_count_as_they_should() -> None:
    """A row of weight 2 is two rows; padding is none, whatever it holds."""
    model, weights, batch, plan, extra = problem("dense", "gaussian")
    twice = jnp.asarray([0, 1, 1, 2, 3, 4])
    doubled = Batch(batch.x[twice], batch.y[twice], None, jnp.arange(6))
    weighted = Batch(batch.x, batch.y, jnp.asarray([1.0, 2.0, 1.0, 1.0, 1.0]), jnp.arange(N))
    index = jnp.asarray([0, 1, 2, 3, 4, -1])
    padded = Batch(jnp.concatenate([batch.x, jnp.full((1, 3), 50.0)]), batch.y[jnp.minimum(index, 4)], None, index, padded=True)
    for one, other in ((doubled, weighted), (batch, padded)):
        for sums in (
            lambda b: curvature.factors(model, weights, b, extra, plan, "ggn", False).outputs,
            lambda b: curvature.diagonal(model, weights, b, extra, plan, "ggn"),
        ):
            a, b = jax.tree.leaves(sums(one)), jax.tree.leaves(sums(other))
            for left, right in zip(a, b, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


INFORMED = {
    "gaussian": (al.Gaussian(0.7), 1, {"scale": 0.7}),
    "heteroscedastic": (al.HeteroscedasticGaussian(), 2, {}),
    "student": (al.StudentT(5.0, 0.7), 1, {"scale": 0.7}),
    "bernoulli": (al.Bernoulli(), 1, {}),
    "probit": (al.Bernoulli(link="probit"), 1, {}),
    "categorical": (al.Categorical(4), 4, {}),
    "poisson": (al.Poisson(), 1, {}),
    "negative binomial": (al.NegativeBinomial(3.0), 1, {"concentration": 3.0}),
}


@pytest.mark.parametrize("name", INFORMED)
def test_fisher_information(name: str) -> None:
    """RRᵀ = E[∇log p ∇log pᵀ]: summed over counts and classes, integrated over the line."""
    likelihood, outputs, extra = INFORMED[name]
    with jax.enable_x64(True):
        f = jnp.asarray(np.random.default_rng(0).normal(size=(1, outputs)))
        if likelihood.support == "label":
            y, mass = np.arange(outputs)[:, None], np.ones(outputs)
        elif likelihood.support in ("binary", "count"):
            y, mass = np.arange(2 if likelihood.support == "binary" else 400)[:, None, None], np.ones(400)
        else:
            points, width = np.linspace(-600.0, 600.0, 2_400_001, retstep=True)
            y, mass = points[:, None, None], np.full(len(points), width)
        extra = {key: jnp.asarray(value) for key, value in extra.items()}

        def terms(value: jax.Array) -> tuple[jax.Array, jax.Array]:
            density = lambda at: likelihood.log_prob(at, value, extra)[0]
            return jnp.exp(density(f)), jax.grad(density)(f)[0]

        chance, score = jax.vmap(terms)(jnp.asarray(y))
        wanted = jnp.einsum("y,yi,yj->ij", chance * mass[: len(y)], score, score)
        root = likelihood.information_root(f, extra)[0]
        np.testing.assert_allclose(root @ root.T, wanted, rtol=2e-6, atol=1e-9)
        weight = jnp.asarray([1.5])
        np.testing.assert_allclose(likelihood.total_information(f, extra, weight), 1.5 * wanted, rtol=2e-6, atol=1e-9)


def _rotation(seed: int, size: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def _operators() -> dict[str, tuple[Any, np.ndarray]]:
    """Operators of size 6, and the covariances they stand for."""
    rng = np.random.default_rng(0)
    scale, factor = rng.uniform(0.5, 2.0, 6), rng.normal(size=(6, 6)) + 3.0 * np.eye(6)
    vectors, shrink = _rotation(1, 6)[:, :2], np.array([0.9, 0.3])
    rows, variance, left, right = rng.uniform(0.5, 2.0, 3), rng.uniform(0.1, 1.0, (3, 2)), _rotation(2, 3), _rotation(3, 2)
    kron = linalg.KroneckerEigen(left, right, variance, rows)
    whole = np.kron(rows[:, None] * left, right)
    kron_matrix = whole @ np.diag(variance.ravel()) @ whole.T
    split = linalg.Blocks(
        (linalg.Diagonal(scale[:2]), linalg.Root(factor[:4, :4], np.linalg.slogdet(factor[:4, :4])[1] * 2)), ((0, 3), (1, 2, 4, 5))
    )
    split = linalg.Blocks(split.operators, tuple(np.array(i) for i in split.index))
    split_matrix = np.zeros((6, 6))
    split_matrix[np.ix_([0, 3], [0, 3])] = np.diag(scale[:2] ** 2)
    split_matrix[np.ix_([1, 2, 4, 5], [1, 2, 4, 5])] = factor[:4, :4] @ factor[:4, :4].T
    return {
        "diagonal": (linalg.Diagonal(scale), np.diag(scale**2)),
        "root": (linalg.Root(factor, 2.0 * np.linalg.slogdet(factor)[1]), factor @ factor.T),
        "complement": (
            linalg.Complement(scale, vectors, shrink),
            np.diag(scale) @ (np.eye(6) - vectors * shrink @ vectors.T) @ np.diag(scale),
        ),
        "kronecker": (kron, kron_matrix),
        "blocks": (split, split_matrix),
    }


@pytest.mark.parametrize("name", ["diagonal", "root", "complement", "kronecker", "blocks"])
def test_operators_are_their_matrices(name: str) -> None:
    operator, matrix = _operators()[name]
    with jax.enable_x64(True):
        operator = jax.tree.map(jnp.asarray, operator)
        v, jacobian = np.random.default_rng(5).normal(size=6), np.random.default_rng(6).normal(size=(4, 2, 6))
        root = np.stack([operator.sqrt_matvec(z) for z in jnp.eye(operator.num_noise)], axis=1)
        for got, wanted in (
            (root @ root.T, matrix),
            (operator.matvec(v), matrix @ v),
            (operator.solve(v), np.linalg.solve(matrix, v)),
            (operator.diagonal(), np.diagonal(matrix)),
            (operator.logdet(), np.linalg.slogdet(matrix)[1]),
            (operator.sandwich(jacobian), jacobian @ matrix @ np.swapaxes(jacobian, 1, 2)),
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)


def test_outer_products_are_never_formed_and_still_right() -> None:
    operator, matrix = _operators()["kronecker"]
    rng = np.random.default_rng(9)
    inputs, cotangents = rng.normal(size=(4, 3)), rng.normal(size=(4, 5, 2))
    jacobian = np.einsum("na,nkb->nkab", inputs, cotangents).reshape(4, 5, 6)
    wanted = jacobian @ matrix @ np.swapaxes(jacobian, 1, 2)
    with jax.enable_x64(True):
        operator = jax.tree.map(jnp.asarray, operator)
        one = (jnp.asarray(inputs)[:, None], jnp.asarray(np.swapaxes(cotangents, 0, 1))[:, :, None])
        np.testing.assert_allclose(operator.shared(*one), wanted, rtol=1e-10)
        np.testing.assert_allclose(operator.shared(*one, variance=True), np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-10)
        for positions in (2, 40):  # the sides are turned, or the gradients
            a, g = rng.normal(size=(4, positions, 3)), rng.normal(size=(5, 4, positions, 2))
            jacobian = np.einsum("nta,kntb->nkab", a, g).reshape(4, 5, 6)
            several = jacobian @ matrix @ np.swapaxes(jacobian, 1, 2)
            np.testing.assert_allclose(operator.shared(jnp.asarray(a), jnp.asarray(g)), several, rtol=1e-8, atol=1e-9)
            variances = operator.shared(jnp.asarray(a), jnp.asarray(g), variance=True)
            np.testing.assert_allclose(variances, np.diagonal(several, axis1=1, axis2=2), rtol=1e-8, atol=1e-9)
        direct = np.einsum("na,kb->nkab", inputs, np.eye(2)).reshape(4, 2, 6)
        wanted = direct @ matrix @ np.swapaxes(direct, 1, 2)
        np.testing.assert_allclose(operator.rows(jnp.asarray(inputs)), wanted, rtol=1e-10)
        np.testing.assert_allclose(operator.rows(jnp.asarray(inputs), many=True), np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-10)


def test_choices_of_weights() -> None:
    model = al.BNN(al.networks.MLP(3, (4,), 2), al.Gaussian(0.5), al.Normal(1.0)).bind(np.zeros((2, 3), np.float32), np.zeros((2, 2)))
    shape = signature(np.zeros((2, 3), np.float32))
    assert curvature.choose(model, shape, "all") is None
    assert curvature.choose(model, shape, "last_layer") == ("layer1.bias", "layer1.weight")
    assert curvature.choose(model, shape, ("*.bias",)) == ("layer0.bias", "layer1.bias")
    assert curvature.layout(model, shape, ("layer1.bias", "layer1.weight")).direct
    assert not curvature.layout(model, shape, ("layer0.bias", "layer0.weight")).direct
    with pytest.raises(al.MethodError, match="No weights are chosen"):
        curvature.choose(model, shape, "nothing.*")


def test_a_last_layer_forms_nothing_of_all_weights() -> None:
    """Its dense curvature and its Jacobian are made without rows × outputs × weights of the layers below."""
    x = np.ones((50, 20), np.float32)
    model = al.BNN(al.networks.MLP(20, (200, 6), 3), al.Categorical(3), al.Normal(1.0)).bind(x, np.arange(50) % 3)
    weights = jax.eval_shape(lambda: model.weights(model.init(jax.random.key(0))))
    plan = curvature.layout(model, signature(x), curvature.choose(model, signature(x), "last_layer"))
    batch = Batch(jnp.asarray(x), jnp.zeros(50, jnp.int32), None, jnp.arange(50))
    assert plan.direct
    for made in (
        lambda w: curvature.dense(model, w, batch, {}, plan, "ggn"),
        lambda w: curvature.jacobian(model, w, batch.x, plan),
        lambda w: curvature.dense(model, w, batch, {}, plan, "empirical"),
    ):
        assert largest(jax.make_jaxpr(made)(weights).jaxpr) <= 50 * 3 * 200  # P = 5,427 weights, 21 of them in the last layer


def largest(jaxpr: Any) -> int:
    """The most numbers in one array that a program makes, inner programs included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) for v in equation.outvars if hasattr(v.aval, "shape")]
        sizes += [largest(inner.jaxpr) for inner in jax.tree.leaves(list(equation.params.values())) if hasattr(inner, "jaxpr")]
    return max(sizes)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_rounded_weights_keep_their_places(structure: str) -> None:
    """900 entries are more than bfloat16 can number: the curvature of a network in mixed precision is that of the network, but for rounding."""
    x, y = np.asarray(normal(1, 20, 3)), np.asarray(normal(2, 20))
    tree = {"w": 0.5 * normal(3, 3, 300), "v": 0.1 * normal(4, 300, 1)}

    def variance(cast: Any) -> np.ndarray:
        network = lambda p, rows: (jnp.tanh(rows.astype(cast) @ p["w"].astype(cast)) @ p["v"].astype(cast)).astype(jnp.float32)
        method = al.Laplace(structure, base=al.MAP(num_steps=1, learning_rate=1e-9))
        model = al.BNN((network, tree), al.Gaussian(0.5), al.Normal(0.1))
        return al.fit(0, model, (x, y), method, progress=False).predict(1, x).epistemic

    np.testing.assert_allclose(variance(jnp.bfloat16), variance(jnp.float32), rtol=0.02)
