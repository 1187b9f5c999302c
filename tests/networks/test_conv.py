"""The convolution primitives against XLA's convolution in value, every derivative and every vmap; the networks on top of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aleator._errors import ModelError
from aleator.networks import _conv
from aleator.networks._conv import conv2d
from aleator.networks.conv import VGG, LeNet5, LeNet5Caffe, ResNet, default_groups, filter_response_norm, group_norm, max_pool

# name: (n, h, w, c), (kh, kw, out), stride, padding, dilation, groups
CASES = {
    "3x3 same": ((2, 6, 6, 3), (3, 3, 4), 1, "SAME", 1, 1),
    "many images": ((17, 5, 5, 2), (3, 3, 3), 1, "SAME", 1, 1),
    "many images, stride": ((16, 8, 7, 2), (3, 3, 3), 2, "VALID", 1, 1),
    "lenet first": ((2, 8, 8, 1), (5, 5, 6), 1, "SAME", 1, 1),
    "lenet second": ((16, 6, 6, 3), (5, 5, 4), 1, "VALID", 1, 1),
    "full vectors": ((2, 5, 5, 32), (3, 3, 8), 1, "SAME", 1, 1),
    "full vectors, tall": ((2, 8, 5, 16), (3, 2, 17), 1, "SAME", (2, 1), 1),
    "prime width": ((2, 5, 7, 1), (3, 3, 2), 1, "SAME", 1, 1),
    "1x1": ((2, 4, 5, 3), (1, 1, 4), 1, "SAME", 1, 1),
    "1x1 stride": ((2, 5, 5, 3), (1, 1, 4), 2, "SAME", 1, 1),
    "stride": ((2, 7, 6, 3), (3, 3, 4), 2, "SAME", 1, 1),
    "even kernel, uneven stride": ((2, 9, 8, 4), (2, 4, 6), (2, 3), "VALID", 1, 2),
    "dilation": ((2, 8, 8, 2), (3, 3, 3), 1, "SAME", 2, 1),
    "stride meets dilation": ((2, 11, 10, 2), (3, 2, 3), 2, ((2, 0), (1, 3)), 2, 1),
    "stride past the kernel": ((2, 9, 9, 2), (2, 2, 2), 4, "VALID", (1, 3), 1),
    "wide padding": ((2, 4, 4, 2), (3, 3, 3), 1, 5, 1, 1),
    "negative padding": ((16, 6, 6, 2), (3, 3, 2), 1, ((-1, 0), (1, -1)), 1, 1),
    "groups": ((2, 5, 5, 4), (3, 3, 6), 1, "SAME", 1, 2),
    "depthwise": ((2, 5, 5, 4), (3, 3, 4), 1, "SAME", 1, 4),
    "depthwise, multiplier, stride": ((2, 6, 6, 3), (3, 3, 6), 2, "SAME", 1, 3),
}
# One of each lowering: the rest of the table differs from these in numbers only.
DEEP = ["many images", "stride meets dilation", "groups", "depthwise", "1x1"]

# Small arrays, many programs: compiling is what takes the time, so the compiler's own optimisation is left out.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})


def pair(name):
    """Ours, XLA's, and arguments x, w with the cotangent's shape."""
    shape, (kh, kw, out), stride, padding, dilation, groups = CASES[name]
    twice = lambda v: (v, v) if isinstance(v, int) else v
    ours = functools.partial(conv2d, stride=stride, padding=padding, dilation=dilation, groups=groups)

    def xla(x, w):
        sides = padding if isinstance(padding, str) else ((padding, padding),) * 2 if isinstance(padding, int) else padding
        return jax.lax.conv_general_dilated(
            x, w, twice(stride), sides, rhs_dilation=twice(dilation), dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    rng = np.random.default_rng(0)
    return ours, xla, rng.normal(size=shape), rng.normal(size=(kh, kw, shape[3] // groups, out))


def agree(ours, reference, digits):
    """Both sum the same products in another order, so they differ by rounding: a multiple of the dtype's ε times the largest value."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=digits * np.finfo(b.dtype).eps * max(np.abs(b).max(initial=0), 1))


def loss(f):
    return lambda x, w: jnp.sum(jnp.tanh(0.3 * f(x, w)) ** 2)


def first_order(f, x, w):
    y, pull = jax.vjp(f, x, w)
    g = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    return y, pull(g), jax.jvp(f, (x, w), (jnp.sin(x), jnp.sin(w)))


@pytest.mark.parametrize("name", CASES)
def test_value_and_first_derivatives_agree_with_xla(name):
    ours, xla, x, w = pair(name)
    with jax.enable_x64(True):
        run = lambda f: quick(functools.partial(first_order, f))(x, w)
        agree(run(ours), run(xla), 200)


@pytest.mark.parametrize("name", ["lenet second", "full vectors", "stride"])
def test_float32_agrees_and_stays_float32(name):
    ours, xla, x, w = pair(name)
    run = lambda f: quick(functools.partial(first_order, f))(x.astype(np.float32), w.astype(np.float32))
    agree(run(ours), run(xla), 50)


@pytest.mark.parametrize("name", DEEP)
def test_second_derivatives_agree_with_xla(name):
    ours, xla, x, w = pair(name)

    def second(f, x, w):
        gradient = jax.grad(loss(f), (0, 1))
        forward_over_reverse = jax.jvp(gradient, (x, w), (jnp.cos(x), jnp.cos(w)))
        reverse_over_reverse = jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(part)) for part in gradient(x, w)), (0, 1))(x, w)
        return forward_over_reverse, reverse_over_reverse

    with jax.enable_x64(True):
        run = lambda f: quick(functools.partial(second, f))(x, w)
        agree(run(ours), run(xla), 2000)


@pytest.mark.parametrize("name", DEEP)
def test_vmap_agrees_with_xla(name):
    ours, xla, x, w = pair(name)

    def mapped(f, x, w):
        def both(x, w):
            return f(x, w), jax.grad(loss(f), (0, 1))(x, w)

        xs, ws = jnp.stack([x, 2 * x, jnp.sin(x)], axis=1), jnp.stack([w, -w, jnp.cos(w)])
        over_x, over_w, over_both = (jax.vmap(both, axes) for axes in ((1, None), (None, 0), (1, 0)))
        nested = jax.vmap(jax.vmap(both, (1, 0)), (None, 0))(xs, jnp.stack([ws, 2 * ws]))
        return over_x(xs, w), over_w(x, ws), over_both(xs, ws), nested

    with jax.enable_x64(True):
        run = lambda f: quick(functools.partial(mapped, f))(x, w)
        agree(run(ours), run(xla), 500)


@pytest.mark.parametrize("name", ["lenet first", "groups"])
def test_one_operand_mapped_through_every_primitive(name):
    """Jacobians map each primitive over one operand at a time: every fold is met."""
    ours, xla, x, w = pair(name)
    x = x[:, :5, :5]

    def jacobians(f, x, w):
        # The second argument's own Jacobian, and the Jacobian of a gradient: cotangents mapped, operands not.
        mixed = jax.jacfwd(jax.grad(loss(f), 1), 0)(x[:1], w)
        return jax.jacrev(f, 1)(x, w), jax.jacfwd(f, 1)(x, w), jax.jacrev(f, 0)(x[:1], w), mixed

    with jax.enable_x64(True):
        run = lambda f: quick(functools.partial(jacobians, f))(x, w)
        agree(run(ours), run(xla), 500)


def test_each_primitive_maps_over_either_operand():
    """`input` and `kernel` with only one operand mapped, directly: (g, w) and (x, g)."""
    geometry = _conv.Geometry((5, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2)

    @quick
    def mapped_and_one_by_one(x, w, g):
        pairs = []
        for primitive, left, right in ((_conv.conv_p, x, w), (_conv.input_p, g, w), (_conv.kernel_p, x, g)):
            f = functools.partial(primitive.bind, geometry=geometry)
            lefts, rights = jnp.stack([left, jnp.sin(left)]), jnp.stack([right, jnp.sin(right)], axis=2)
            pairs += [
                (jax.vmap(f, (0, None))(lefts, right), jnp.stack([f(part, right) for part in lefts])),
                (jax.vmap(f, (None, 2))(left, rights), jnp.stack([f(left, rights[:, :, i]) for i in range(2)])),
                (jax.vmap(f, (0, 2))(lefts, rights), jnp.stack([f(lefts[i], rights[:, :, i]) for i in range(2)])),
            ]
        return pairs

    rng = np.random.default_rng(0)
    for mapped, one_by_one in mapped_and_one_by_one(
        *(rng.normal(size=s).astype(np.float32) for s in ((2, 5, 5, 4), (3, 3, 2, 6), (2, 5, 5, 6)))
    ):
        agree(mapped, one_by_one, 50)


def test_each_examples_gradient_is_the_mapped_one():
    ours, xla, x, w = pair("many images")
    each = lambda f: quick(jax.vmap(jax.grad(lambda w, image: loss(f)(image[None], w)), (None, 0)))(w, x)
    with jax.enable_x64(True):
        agree(each(ours), each(xla), 200)


def test_the_kernel_gradient_in_chunks_of_images(monkeypatch):
    """A cache for one image only: chunks of eight, with (20 = 8 + 8 + 4) and without a rest."""
    monkeypatch.setattr(_conv, "CACHE", 1)
    ours, xla, x, w = pair("many images, stride")
    with jax.enable_x64(True):
        for images in (16, 20):
            more = np.concatenate([x, np.cos(x)])[:images]
            run = lambda f, more=more: quick(jax.grad(loss(f), 1))(more, w)
            agree(run(ours), run(xla), 200)


def test_no_images_give_no_outputs_and_a_zero_gradient():
    y, pull = jax.vjp(conv2d, jnp.ones((0, 5, 5, 2)), jnp.ones((3, 3, 2, 4)))
    assert y.shape == (0, 5, 5, 4)
    assert [leaf.shape for leaf in pull(y)] == [(0, 5, 5, 2), (3, 3, 2, 4)] and not pull(y)[1].any()


def test_scan_remat_and_loop():
    ours, xla, x, w = pair("lenet second")
    x, w = x.astype(np.float32), w.astype(np.float32)

    def descend(f, w):
        step = lambda w, scale: (w - 1e-3 * jax.grad(lambda w: loss(jax.checkpoint(f))(x * scale, w))(w), jnp.sum(w))
        w, sums = jax.lax.scan(step, w, jnp.linspace(0.5, 1.0, 3))
        return jax.lax.fori_loop(0, 2, lambda _, w: step(w, 1.0)[0], w), sums

    agree(quick(functools.partial(descend, ours))(w), quick(functools.partial(descend, xla))(w), 200)


def test_the_other_platforms_lowering_agrees():
    """What runs on accelerators, called by hand: no CPU runs it otherwise."""
    geometry = _conv.Geometry((5, 5), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 2)
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((3, 2, 5, 5, 4), (3, 3, 3, 2, 6), (3, 2, 3, 3, 6)))
    rows = (
        (_conv.conv_p, _conv._reference, x, w),
        (_conv.input_p, _conv._reference_input, g, w),
        (_conv.kernel_p, _conv._reference_kernel, x, g),
    )
    for primitive, plain, left, right in rows:
        fast, slow = (quick(functools.partial(f, geometry=geometry)) for f in (primitive.bind, _conv._parallel(plain)))
        agree(fast(left, right), slow(left, right), 50)
    lowered = jax.jit(lambda x, w: conv2d(x, w, groups=2)).trace(x[0], w[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.convolution") == 1


@pytest.mark.parametrize(
    ("x", "w", "options", "match"),
    [
        ((2, 5, 5, 3), (3, 3, 2, 4), {}, "do not fit"),
        ((5, 5, 3), (3, 3, 3, 4), {}, "do not fit"),
        ((2, 5, 5, 3), (3, 3, 1, 4), {"groups": 3}, "do not fit"),
        ((2, 5, 5, 3), (3, 3, 3, 4), {"stride": 0}, "stride"),
        ((2, 5, 5, 3), (3, 3, 3, 4), {"padding": "FULL"}, "padding"),
        ((2, 5, 5, 3), (3, 3, 3, 4), {"padding": (1, 2, 3)}, "padding"),
        ((2, 2, 2, 3), (3, 3, 3, 4), {"padding": "VALID"}, "larger than"),
    ],
)
def test_what_cannot_be_convolved_is_refused(x, w, options, match):
    with pytest.raises(ModelError, match=match):
        conv2d(jnp.ones(x), jnp.ones(w), **options)


def test_integers_are_refused():
    with pytest.raises(ModelError, match="floating"):
        conv2d(jnp.ones((1, 3, 3, 1), jnp.int32), jnp.ones((3, 3, 1, 1), jnp.int32))


def test_max_pool_agrees_with_reduce_window():
    def window(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def derivatives(f, x, t):
        grad = jax.grad(lambda x: jnp.sum(f(x) ** 3))
        return f(x), jax.jvp(f, (x,), (t,)), grad(x), jax.jvp(grad, (x,), (t,)), jax.vmap(grad)(x[:, None])

    rng = np.random.default_rng(0)
    x, t = (rng.normal(size=(2, 5, 6, 3)).astype(np.float32) for _ in range(2))  # an odd height: the last row is left out
    agree(*(quick(functools.partial(derivatives, f))(x, t) for f in (max_pool, window)), 4)


def test_max_pool_gives_the_whole_derivative_to_the_first_of_equals():
    grad = jax.grad(lambda x: jnp.sum(max_pool(x, 3)))(jnp.ones((1, 3, 3, 1)))
    assert grad.ravel().tolist() == [1.0] + [0.0] * 8


def test_group_norm_and_filter_response_norm_are_their_formulas():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(2, 4, 3, 6)) * np.arange(1, 7) + rng.normal(size=(2, 4, 1, 6))).astype(np.float32)  # channels and rows differ
    scale, bias = rng.normal(size=(2, 6)).astype(np.float32)
    group, filtered = np.empty_like(x), np.empty_like(x)
    for image in range(2):
        for c in range(6):
            block = x[image, :, :, c // 2 * 2 : c // 2 * 2 + 2]
            group[image, :, :, c] = (x[image, :, :, c] - block.mean()) / np.sqrt(block.var() + 1e-5) * scale[c] + bias[c]
            filtered[image, :, :, c] = x[image, :, :, c] / np.sqrt((x[image, :, :, c] ** 2).mean() + 1e-6) * scale[c] + bias[c]
    np.testing.assert_allclose(quick(group_norm, static_argnums=3)(x, scale, bias, 3), group, atol=1e-5)
    np.testing.assert_allclose(quick(filter_response_norm)(x, scale, bias), filtered, atol=1e-5)
    assert [default_groups(c) for c in (16, 50, 11)] == [8, 5, 1]


NETWORKS = {
    "lenet": (LeNet5(), 61_706),
    "lenet gelu": (LeNet5(in_shape=(16, 20, 3), out_size=4, activation="gelu"), None),
    "caffe": (LeNet5Caffe(), 431_080),
    "vgg": (VGG(norm=None), 550_570),
    "vgg frn": (VGG(in_shape=(8, 8, 1), widths=((4,), (6, 6)), dense=(), norm="frn"), None),
    "vgg group": (VGG(in_shape=(8, 8, 1), widths=((4,), (6, 6)), norm="group", groups=2), None),
    "resnet": (ResNet(), 272_282),
    "resnet frn": (ResNet(in_shape=(8, 8, 3), depth=8, width=4, norm="frn"), None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    net, count = NETWORKS[name]
    assert hash(net) == hash(type(net)(**vars(net)))
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes)} <= {"weight", "bias", "scale", "threshold"}
    if count is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
    x = np.random.default_rng(0).normal(size=(3, *net.in_shape)).astype(np.float32)
    with pytest.raises(ModelError, match=r"cannot take this x.*Expected: \(n, "):
        jax.eval_shape(net.apply, shapes, x[..., 0])
    if name in ("vgg", "resnet"):  # their shapes and counts; a small relative stands for the rest
        assert jax.eval_shape(net.apply, shapes, x).shape == (3, net.out_size)
        return

    @quick
    def run(keys, x):
        members = jax.vmap(net.init)(keys)
        second = jax.tree.map(lambda leaf: leaf[1], members)
        return jax.vmap(net.apply, (0, None))(members, x), net.apply(second, x), jax.grad(energy)(second, x)

    def energy(params, x):
        return jnp.sum(net.apply(params, x) ** 2)

    mapped, alone, grad = run(jax.random.split(jax.random.key(1), 2), x)
    assert mapped.shape == (2, 3, net.out_size)
    np.testing.assert_allclose(mapped[1], alone, rtol=0, atol=1e-4 * np.abs(alone).max())
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grad))


def test_pooling_before_a_monotone_activation_changes_nothing():
    net = LeNet5(in_shape=(16, 16, 1), activation="tanh")

    @quick
    def both(key, x):
        params, h = net.init(key), x
        for name, padding in (("conv1", "SAME"), ("conv2", "VALID")):
            h = max_pool(jnp.tanh(conv2d(h, params[name]["weight"], padding=padding) + params[name]["bias"]))
        h = h.reshape(2, -1)
        for name in ("dense1", "dense2"):
            h = jnp.tanh(h @ params[name]["weight"] + params[name]["bias"])
        return net.apply(params, x), h @ params["dense3"]["weight"] + params["dense3"]["bias"]

    ours, by_hand = both(jax.random.key(0), np.random.default_rng(0).normal(size=(2, 16, 16, 1)).astype(np.float32))
    np.testing.assert_allclose(ours, by_hand, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeNet5(in_shape=(28, 28)),
        lambda: LeNet5(in_shape=(8, 8, 1)),
        lambda: LeNet5Caffe(in_shape=(15, 15, 1)),
        lambda: VGG(in_shape=(4, 4, 3)),
        lambda: VGG(norm="batch"),
        lambda: VGG(groups=5),
        lambda: ResNet(depth=18),
        lambda: ResNet(norm=None),
        lambda: LeNet5(activation="rleu"),
        lambda: max_pool(jnp.ones((1, 1, 4, 1))),
    ],
)
def test_impossible_networks_are_refused(make):
    with pytest.raises(ModelError, match="Do this"):
        make()
