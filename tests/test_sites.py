"""Sites: found wherever a network applies a weight, listed with a reason where it does something else, and replayed without a trace."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aleator import noise, sites
from aleator.networks import MLP, LeNet5, ResNet, as_network
from aleator.networks._conv import conv2d


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def params(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: normal(seed, *shape) * 0.5 for seed, (name, shape) in enumerate(shapes.items())}


# ---- networks: name → (apply(params, x, key), params, x, names of the sites, the rest) -----------------------------------------------

Case = tuple[Callable, Any, Any, list[str], list[str]]


def _user(module: Any, x: Any, names: list[str], rest: list[str]) -> Case:
    network = as_network(module)
    return network.apply, network.params, x, names, rest


def _built(network: Any, x: Any, names: list[str], rest: list[str]) -> Case:
    return network.apply, network.init(jax.random.key(0)), x, names, rest


def _plain(function: Callable, tree: Any, x: Any, names: list[str], rest: tuple[str, ...] | list[str] = ()) -> Case:
    return (lambda p, rows, key=None: function(p, rows)), tree, x, names, list(rest)


def _equinox_mlp() -> Case:
    import equinox as eqx

    return _user(eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0)), normal(9, 5, 3), ["layers.0.weight", "layers.1.weight"], [])


def _equinox_grouped() -> Case:
    import equinox as eqx

    class Net(eqx.Module):
        c: eqx.nn.Conv2d
        o: eqx.nn.Linear

        def __init__(self) -> None:
            self.c = eqx.nn.Conv2d(2, 4, 3, groups=2, key=jax.random.key(0))
            self.o = eqx.nn.Linear(4 * 16, 3, key=jax.random.key(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.o(jnp.ravel(jnp.tanh(self.c(x))))

    return _user(Net(), normal(9, 4, 2, 6, 6), ["c.weight", "o.weight"], ["c.bias"])


def _lstm() -> Case:
    import equinox as eqx

    class Net(eqx.Module):
        cell: eqx.nn.LSTMCell
        o: eqx.nn.Linear

        def __init__(self) -> None:
            self.cell, self.o = eqx.nn.LSTMCell(3, 5, key=jax.random.key(0)), eqx.nn.Linear(5, 1, key=jax.random.key(1))

        def __call__(self, xs: jax.Array) -> jax.Array:
            h, _ = jax.lax.scan(lambda c, x: (self.cell(x, c), None), (jnp.zeros(5), jnp.zeros(5)), xs)
            return self.o(h[0])

    return _user(Net(), normal(9, 4, 6, 3), ["cell.weight_ih", "cell.weight_hh", "o.weight"], ["cell.bias"])


def _attention() -> Case:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.e, self.n, self.o = nnx.Embed(11, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
            self.a = nnx.MultiHeadAttention(num_heads=2, in_features=8, qkv_features=8, decode=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.o(self.n(self.a(self.e(x))).mean(1))

    tokens = jax.random.randint(jax.random.key(3), (4, 6), 0, 11)
    names = ["e.embedding", "a.query.kernel", "a.key.kernel", "a.value.kernel", "a.out.kernel", "o.kernel"]
    return _user(Net(nnx.Rngs(0)), tokens, names, ["n.bias", "n.scale"])


def _stacked() -> Case:
    def run(p: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["w"])
        return h

    return _plain(run, params(w=(3, 4, 4)), normal(9, 5, 4), ["w"])


def _custom(p: Any, x: jax.Array) -> jax.Array:
    @jax.custom_jvp
    def apply(w: jax.Array, h: jax.Array) -> jax.Array:
        return h @ w

    apply.defjvp(lambda primals, tangents: (apply(*primals), primals[1] @ tangents[0] + tangents[1] @ primals[0]))
    return jnp.tanh(apply(p["w"], x)) @ p["v"]


def _lax_conv(layout: str, groups: int = 1, tree: Any = None) -> Case:
    spec = (layout, "HWIO", layout)
    x = normal(9, 3, 6, 6, 2) if layout == "NHWC" else normal(9, 3, 2, 6, 6)
    axis = (1, 2) if layout == "NHWC" else (2, 3)

    def run(p: Any, x: jax.Array) -> jax.Array:
        bias = p["b"] if layout == "NHWC" else p["b"][:, None, None]
        out = jax.lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=spec, feature_group_count=groups)
        return jnp.tanh(out + bias).mean(axis)

    return _plain(run, params(w=(3, 3, 2 // groups, 4), b=(4,)), x, ["w"])


def _two_outputs(p: Any, x: jax.Array) -> Any:
    h = jnp.tanh(x @ p["w"])
    return {"a": h @ p["v"], "b": (h, x @ p["u"])}


def _one_draw(p: Any, x: jax.Array) -> Any:
    y = jax.jit(lambda w, rows: rows @ w)(p["w"], x)
    return y, y


X = (5, 3)
CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: _built(MLP(3, (8,), 2), normal(9, *X), ["layer0.weight", "layer1.weight"], []),
    "equinox": _equinox_mlp,
    "equinox, grouped": _equinox_grouped,
    "attention": _attention,
    "lstm": _lstm,
    "stacked": _stacked,
    "weight on the right": lambda: _plain(lambda p, x: x @ p["w"], params(w=(3, 4)), normal(9, *X), ["w"]),
    "weight on the left": lambda: _plain(lambda p, x: (p["w"] @ x.T + p["b"][:, None]).T, params(w=(4, 3), b=(4,)), normal(9, *X), ["w"]),
    "batched einsum": lambda: _plain(lambda p, x: jnp.einsum("nhi,hio->nho", x, p["w"]), params(w=(2, 3, 4)), normal(9, 5, 2, 3), ["w"]),
    "two contracted axes": lambda: _plain(lambda p, x: jnp.einsum("nhi,hio->no", x, p["w"]), params(w=(2, 3, 4)), normal(9, 5, 2, 3), ["w"]),
    "conv2d, depthwise": lambda: _plain(
        lambda p, x: conv2d(x, p["w"], groups=2).mean((1, 2)), params(w=(3, 3, 1, 2)), normal(9, 3, 6, 6, 2), ["w"]
    ),
    "lax conv, NHWC": lambda: _lax_conv("NHWC"),
    "lax conv, NCHW": lambda: _lax_conv("NCHW"),
    "lax conv, depthwise": lambda: _lax_conv("NHWC", 2),
    "embedding, gather": lambda: _plain(lambda p, x: jnp.tanh(p["e"][x]).mean(1), params(e=(7, 4)), jnp.arange(10).reshape(5, 2) % 7, ["e"]),
    "embedding, one-hot": lambda: _plain(
        lambda p, x: jnp.tanh(jax.nn.one_hot(x, 7) @ p["e"]).mean(1), params(e=(7, 4)), jnp.arange(10).reshape(5, 2) % 7, ["e"]
    ),
    "custom_jvp": lambda: _plain(_custom, params(w=(3, 4), v=(4, 2)), normal(9, *X), ["v"], ["w"]),
    "cond": lambda: _plain(
        lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: -x @ w, p["w"]) @ p["v"],
        params(w=(3, 4), v=(4, 2)),
        normal(9, *X),
        ["v"],
        ["w"],
    ),
    "product of weights": lambda: _plain(lambda p, x: x @ (p["w"] @ p["v"]), params(w=(3, 4), v=(4, 2)), normal(9, *X), [], ["v", "w"]),
    "used elsewhere too": lambda: _plain(
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + jnp.sum(jnp.tanh(p["w"])), params(w=(3, 4), b=(4,), v=(4, 2)), normal(9, *X),
        ["v"], ["b", "w"],
    ),
    "multiplied by constants": lambda: _plain(lambda p, x: x @ (-3.0 * p["w"] / 2.0), params(w=(3, 4)), normal(9, *X), ["w"]),
    "tied": lambda: _plain(lambda p, x: jnp.tanh(x @ (p["w"] / 2.0)) @ p["w"].T, params(w=(3, 4)), normal(9, *X), ["w#1", "w#2"]),
    "jit inside": lambda: _plain(
        lambda p, x: jax.jit(lambda q, h: jnp.tanh(h @ q["w"] + q["b"]) @ q["v"])(p, x), params(w=(3, 4), b=(4,), v=(4, 2)), normal(9, *X),
        ["w", "v"],
    ),
    "remat": lambda: _plain(
        lambda p, x: jax.checkpoint(lambda w, h: jnp.tanh(h @ w))(p["w"], x) @ p["v"], params(w=(3, 4), v=(4, 2)), normal(9, *X), ["w", "v"]
    ),
    "several outputs": lambda: _plain(_two_outputs, params(w=(3, 4), v=(4, 2), u=(3, 2)), normal(9, *X), ["w", "v", "u"]),
    "one output twice": lambda: _plain(_one_draw, params(w=(3, 4)), normal(9, *X), ["w"]),
    "parameters at the root": lambda: _plain(lambda w, x: jnp.tanh(x @ w), normal(0, 3, 4), normal(9, *X), [""]),
    "one row": lambda: _built(MLP(3, (8,), 1), normal(9, 1, 3), ["layer0.weight", "layer1.weight"], []),
    "as many rows as features": lambda: _built(MLP(3, (3,), 3), normal(9, 3, 3), ["layer0.weight", "layer1.weight"], []),
    "cut from a flat vector": lambda: _plain(lambda p, x: x @ p["w"].reshape(3, 4), params(w=(12,)), normal(9, *X), ["w"]),
    "fused and split": lambda: _plain(
        lambda p, x: (lambda q, k: jnp.tanh(x @ q) * (x @ k))(*jnp.split(p["w"], 2, axis=1)), params(w=(3, 8)), normal(9, *X), ["w#1", "w#2"]
    ),
}  # fmt: skip


@functools.cache
def case(name: str) -> Case:
    with jax.debug_key_reuse(False):
        return CASES[name]()


def replayed(apply: Callable, tree: Any, x: Any) -> Any:
    return sites.replay(None, apply, tree, x, sites.identity)[0]


@pytest.mark.parametrize("name", CASES)
def test_sites_are_found_and_the_others_listed(name: str) -> None:
    apply, tree, x, names, rest = case(name)
    found = sites.find(apply, tree, x)
    assert [site.name for site in found.sites] == names
    assert sorted(found.rest) == rest and all(found.rest.values())
    for site in found.sites:
        assert site.example_axis == 0 or name == "weight on the left"
        assert site.name in found.table()


@pytest.mark.parametrize("name", CASES)
def test_identity_is_the_network_in_value_and_gradient(name: str) -> None:
    apply, tree, x, *_ = case(name)

    def both(run: Callable) -> Any:
        loss = lambda p: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(p)))
        return jax.jit(lambda p: (run(p), jax.grad(loss)(p)))(tree)

    (value, gradient), (value2, gradient2) = both(lambda p: apply(p, x, None)), both(lambda p: replayed(apply, p, x))
    assert jax.tree.structure(value) == jax.tree.structure(value2)
    jax.tree.map(np.testing.assert_array_equal, value, value2)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * max(1.0, float(jnp.max(jnp.abs(a)))))
    jax.tree.map(close, gradient, gradient2)


@pytest.mark.parametrize("name", ["equinox", "stacked", "lax conv, NCHW", "embedding, gather", "custom_jvp"])
def test_identity_under_jvp_and_vmap_over_parameters(name: str) -> None:
    apply, tree, x, *_ = case(name)
    direction = jax.tree.map(lambda leaf: jnp.cos(3.0 * leaf), tree)
    tangents = [jax.jvp(run, (tree,), (direction,))[1] for run in (lambda p: apply(p, x, None), lambda p: replayed(apply, p, x))]
    np.testing.assert_allclose(*tangents, rtol=1e-5, atol=1e-6)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, -0.3 * leaf]), tree)
    mapped = jax.vmap(lambda p: replayed(apply, p, x))(several)
    for i in range(2):
        np.testing.assert_allclose(mapped[i], apply(jax.tree.map(lambda leaf: leaf[i], several), x, None), rtol=1e-5, atol=1e-6)  # noqa: B023


@pytest.mark.parametrize("name", ["equinox", "attention", "stacked", "lax conv, NCHW", "jit inside"])
def test_identity_costs_nothing_once_compiled(name: str) -> None:
    apply, tree, x, *_ = case(name)

    def counts(run: Callable) -> dict[str, int]:
        text = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(run(p))))).lower(tree).compile().as_text()
        return {op: text.count(f" {op}(") for op in ("dot", "convolution", "gather", "transpose", "rng-bit-generator")}

    plain = counts(lambda p: apply(p, x, None))
    assert sum(plain.values()) > 0
    assert counts(lambda p: replayed(apply, p, x)) == plain


def test_lenet_is_replayed() -> None:
    network = LeNet5(out_size=3)
    tree, x = network.init(jax.random.key(0)), normal(9, 2, 28, 28, 1)
    found = sites.find(network.apply, tree, x)
    assert [site.kind for site in found.sites] == ["conv", "conv", "dense", "dense", "dense"] and not found.rest
    np.testing.assert_array_equal(jax.jit(lambda p: replayed(network.apply, p, x))(tree), jax.jit(lambda p: network.apply(p, x))(tree))


def test_resnet_is_replayed_equation_by_equation() -> None:
    network = ResNet((8, 8, 3), 3, depth=8, width=4, norm="frn")
    tree, x = jax.eval_shape(network.init, jax.random.key(0)), jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    found = sites.find(network.apply, tree, x)
    assert {site.kind for site in found.sites} == {"conv", "dense"} and all("norm" in path for path in found.rest)

    def count(jaxpr: Any) -> Counter:
        total: Counter = Counter()
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
            total += Counter([eqn.primitive.name]) if inner is None else count(inner.jaxpr)
        return total

    plain = jax.make_jaxpr(lambda p, rows: network.apply(p, rows))(tree, x)
    again = jax.make_jaxpr(lambda p, rows: replayed(network.apply, p, rows))(tree, x)
    assert count(plain.jaxpr) == count(again.jaxpr)


def test_a_network_with_its_own_randomness() -> None:
    import equinox as eqx

    class Net(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear
        drop: eqx.nn.Dropout

        def __init__(self) -> None:
            self.a, self.b = eqx.nn.Linear(3, 8, key=jax.random.key(0)), eqx.nn.Linear(8, 2, key=jax.random.key(1))
            self.drop = eqx.nn.Dropout(0.5)

        def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
            return self.b(self.drop(jnp.tanh(self.a(x)), key=key))

    network, x = as_network(Net()), normal(9, 5, 3)
    key = jax.random.key(4)
    found = sites.find(network.apply, network.params, x, jax.random.clone(key))
    assert [site.name for site in found.sites] == ["a.weight", "b.weight"] and found.sites[0].first and not found.sites[1].first
    out, _ = sites.replay(None, network.apply, network.params, x, sites.identity, network_key=jax.random.clone(key))
    np.testing.assert_array_equal(out, network.apply(network.params, x, key))
    assert (np.asarray(out) != np.asarray(network.apply(network.params, x, None))).any()


# ---- what is said about a site ------------------------------------------------------------------------------------------------------


def site(name: str, which: int = 0) -> sites.Site:
    apply, tree, x, *_ = case(name)
    return sites.find(apply, tree, x).sites[which]


@pytest.mark.parametrize(
    ("name", "leaf_axes", "out_axes", "positions"),
    [
        ("mlp", (0,), (1,), 1),
        ("equinox", (1,), (0,), 1),
        ("weight on the left", (1,), (0,), 1),
        ("batched einsum", (0, 1), (0, 2), 1),
        ("two contracted axes", (0, 1), (2,), 1),
        ("lax conv, NHWC", (2,), (3,), 36),
        ("lax conv, NCHW", (2,), (3,), 36),
        ("lax conv, depthwise", (), (3,), 36),
        ("equinox, grouped", (), (0,), 16),
        ("embedding, gather", (), (1,), 2),
        ("embedding, one-hot", (0,), (1,), 2),
        ("lstm", (1,), (0,), 6),
        ("stacked", (0, 1), (0, 2), 1),
        ("cut from a flat vector", (), (), 1),
        ("tied", (0,), (1,), 2),
        ("one row", (0,), (1,), 1),
        ("as many rows as features", (0,), (1,), 1),
        ("parameters at the root", (0,), (1,), 1),
    ],
)
def test_axes_and_positions(name: str, leaf_axes: tuple, out_axes: tuple, positions: int) -> None:
    found = site(name)
    assert (found.leaf_axes, found.out_axes, found.positions) == (leaf_axes, out_axes, positions)


def test_shapes_of_noise() -> None:
    inputs, outputs = jnp.zeros((3, 6, 6, 2)), jnp.zeros((3, 6, 6, 4))
    conv = site("lax conv, NHWC")
    assert conv.input_noise_shape(inputs) == (3, 1, 1, 2)
    assert conv.output_noise_shape(outputs) == (3, 1, 1, 4)
    turned = site("lax conv, NCHW")
    assert turned.input_noise_shape(jnp.zeros((3, 2, 6, 6))) == (3, 2, 1, 1) and turned.output_order() == (0, 2, 3, 1)
    left = site("weight on the left")
    assert left.output_order() == (1, 0) and left.bias_path == "b"
    assert site("stacked").num_units == 12 and site("two contracted axes").num_units == 6
    assert site("lstm").shared_steps and not site("stacked").shared_steps


def test_biases_are_fused_or_listed() -> None:
    assert site("mlp").bias_path == "layer0.bias" and site("lax conv, NCHW").bias_path == "b" and site("jit inside").bias_path == "b"
    # A bias that multiplies, or that varies over rows' positions, is no bias.
    tree, x = {"w": normal(0, 3, 4), "b": normal(1, 6, 4)}, normal(2, 5, 6, 3)
    found = sites.find(lambda p, rows, key=None: rows @ p["w"] + p["b"], tree, x)
    assert found.sites[0].bias_path is None and "b" in found.rest


def test_companions_go_the_way_of_their_weights() -> None:
    """Through y = −3/2·xWᵀ a perturbation (power 1) is multiplied by −3/2 and a variance (power 2) by 9/4."""
    tree, x = {"w": normal(0, 4, 3)}, normal(1, 5, 3)
    shift, variance = {"w": normal(2, 4, 3)}, {"w": jnp.abs(normal(3, 4, 3))}

    def handler(key: Any, site: sites.Site, inputs: Any, weights: sites.Operands, compute: Callable) -> Any:
        _, one, two = weights.weight
        return compute(inputs, weights.weight[0]), (compute(inputs, one), compute(site.square(inputs), two))

    out, records = sites.replay(None, lambda p, r, key=None: r @ (-3.0 * p["w"] / 2.0).T, tree, x, handler, (shift, variance), (1, 2))
    np.testing.assert_allclose(out, -1.5 * x @ tree["w"].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(records["w"][0], -1.5 * x @ shift["w"].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(records["w"][1], 2.25 * x**2 @ variance["w"].T, rtol=1e-5, atol=1e-6)


def test_a_weight_put_among_constants_keeps_its_site() -> None:
    """Entries around it belong to the map but have neither perturbation nor variance; a weight that may meet itself has no site."""
    tree, x, at = {"w": normal(0, 3)}, normal(1, 5, 2), np.array([0, 3, 2])
    run = lambda p, r, key=None: r @ jnp.ones(6).at[at].set(p["w"], unique_indices=True).reshape(2, 3)
    seen = lambda key, site, inputs, weights, compute: (compute(inputs, weights.weight[0]), weights.weight[1:])
    out, records = sites.replay(None, run, tree, x, seen, ({"w": jnp.full(3, 5.0)}, {"w": jnp.full(3, 7.0)}), (1, 2))
    np.testing.assert_array_equal(out, run(tree, x))
    held = np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(records["w"][0], 5.0 * held)
    np.testing.assert_array_equal(records["w"][1], 7.0 * held)
    found = sites.find(lambda p, r, key=None: r @ jnp.ones(6).at[at].set(p["w"]).reshape(2, 3), tree, x)
    assert not found.sites and "scatter" in found.rest["w"]


def test_companions_in_single_precision_when_double_is_enabled() -> None:
    with jax.enable_x64(True):
        tree, x = {"w": jnp.ones((3, 4), jnp.float32)}, jnp.ones((5, 3), jnp.float32)
        run = lambda p, r, key=None: r @ (p["w"] * 2.0)
        _, records = sites.replay(None, run, tree, x, noise.moments, (tree,), (2,))
    assert records["w"].dtype == jnp.float32 and float(records["w"][0, 0]) == 12.0


def test_records_are_stacked_along_scans() -> None:
    apply, tree, x, *_ = case("stacked")
    seen = lambda key, site, inputs, weights, compute: (compute(inputs, weights.weight[0]), jnp.sum(inputs))
    _, records = sites.replay(None, apply, tree, x, seen)
    assert records["w"].shape == (3,)
    np.testing.assert_allclose(records["w"][0], jnp.sum(x), rtol=1e-5)


@pytest.mark.parametrize("run", [lambda p, x: (lambda y: (y * y, y))(x @ p["w"]), _one_draw], ids=["read twice", "returned twice"])
def test_every_reader_of_an_output_sees_one_draw(run: Callable) -> None:
    calls = []

    def handler(key: Any, site: sites.Site, *rest: Any) -> Any:
        calls.append(site.name)
        return noise.local(key, site, *rest)

    tree, x = {"w": normal(0, 3, 4)}, normal(1, 5, 3)
    apply = lambda p, rows, key=None: run(p, rows)
    (a, b), _ = sites.replay(jax.random.key(0), apply, tree, x, handler, (jax.tree.map(jnp.ones_like, tree),), (2,))
    np.testing.assert_array_equal(a, b if run is _one_draw else b * b)
    assert calls == ["w"]


def test_how_a_network_is_written_does_not_change_its_noise() -> None:
    """Five ways to write xW + b: same key, same draw."""
    w, b, x = normal(0, 3, 4), normal(1, 4), normal(2, 5, 3)
    ways = {
        "right": lambda p, r, key=None: r @ p["w"] + p["b"],
        "scaled first": lambda p, r, key=None: (r * 2.0 / 2.0) @ p["w"] + p["b"],
        "jit": lambda p, r, key=None: jax.jit(lambda w, b, r: r @ w + b)(p["w"], p["b"], r),
        "left": lambda p, r, key=None: (p["w"].T @ r.T + p["b"][:, None]).T,
        "mapped": lambda p, r, key=None: jax.vmap(lambda row: p["w"].T @ row + p["b"])(r),
    }
    tree = {"w": w, "b": b}
    other = jax.tree.map(lambda leaf: leaf**2, tree)
    for handler, power in ((noise.local, 2), (noise.flipout, 1), (noise.masked(jax.random.key(8), {"w": 0.5}), None)):
        given = ((), ()) if power is None else ((other,), (power,))
        draws = {name: sites.replay(jax.random.key(3), way, tree, x, handler, *given)[0] for name, way in ways.items()}
        for out in draws.values():
            np.testing.assert_allclose(out, draws["right"], rtol=1e-5, atol=1e-5)


def test_shapes_are_enough() -> None:
    apply, tree, x, *_ = case("mlp")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (tree, x))
    assert sites.find(apply, *shapes) == sites.find(apply, tree, x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_casts_move_no_entry(dtype: Any) -> None:
    """Mixed precision: the sites of a network that rounds its weights are those of the network that does not."""
    tree = params(w=(3, 300), b=(300,), v=(300, 1))

    def network(p: dict, x: jax.Array, cast: Any) -> jax.Array:
        rounded = {name: leaf.astype(cast) for name, leaf in p.items()}
        return (jnp.tanh(x.astype(cast) @ rounded["w"].T.T + rounded["b"]) @ rounded["v"]).astype(jnp.float32)

    same, cast = (sites.find(lambda p, x, key, to=to: network(p, x, to), tree, normal(9, 5, 3)) for to in (jnp.float32, dtype))
    facts = lambda found: [(s.name, s.bias_path, s.leaf_axes, s.out_axes, s.positions, s.kind) for s in found.sites]
    assert facts(cast) == facts(same) and len(cast.sites) == 2
