"""Priors against SciPy, patterns, fan-in scaling, hierarchical scales."""

from __future__ import annotations

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats as st

import aleator as al

WEIGHTS = {"a": {"weight": np.linspace(-1, 1, 6).reshape(3, 2), "bias": np.array([0.3, -0.2])}, "b": {"weight": np.ones((2, 1))}}
FANS = {"a": {"weight": 3, "bias": 1}, "b": {"weight": 2}}
WEIGHTS = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), WEIGHTS)
FLAT = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(WEIGHTS)])


@pytest.mark.parametrize(
    ("prior", "reference"),
    [
        (al.Normal(0.7, loc=0.1), st.norm(0.1, 0.7)),
        (al.priors.Laplace(0.7, loc=0.1), st.laplace(0.1, 0.7)),
        (al.priors.StudentT(3.0, 0.7, loc=0.1), st.t(3.0, 0.1, 0.7)),
        (al.priors.from_distribution(dist.Cauchy(0.1, 0.7)), st.cauchy(0.1, 0.7)),
        (al.priors.from_distribution(dist.Logistic(0.1, 0.7)), st.logistic(0.1, 0.7)),
    ],
)
def test_densities_and_draws_are_scipys(prior, reference) -> None:
    np.testing.assert_allclose(prior.log_prob(WEIGHTS, {}, FANS), reference.logpdf(FLAT).sum(), rtol=1e-5)
    draws = jax.vmap(lambda key: prior.sample(key, WEIGHTS, FANS)[0])(jax.random.split(jax.random.key(0), 2000))
    assert st.kstest(np.asarray(draws["a"]["bias"]).ravel(), reference.cdf).pvalue > 1e-4


def test_scales_by_layer_and_fan_in() -> None:
    prior = al.Normal({"a.bias": 3.0, "a": 2.0, "*": 1.0}, scaling="fan_in")
    scales = prior.scales(WEIGHTS, FANS)
    assert scales == {"a": {"weight": pytest.approx(2 / 3**0.5), "bias": 3.0}, "b": {"weight": pytest.approx(1 / 2**0.5)}}
    parts = (
        st.norm(0, 2 / 3**0.5).logpdf(np.ravel(WEIGHTS["a"]["weight"])).sum() + st.norm(0, 3.0).logpdf(np.ravel(WEIGHTS["a"]["bias"])).sum()
    )
    parts += st.norm(0, 1 / 2**0.5).logpdf(np.ravel(WEIGHTS["b"]["weight"])).sum()
    np.testing.assert_allclose(prior.log_prob(WEIGHTS, {}, FANS), parts, rtol=1e-5)


@pytest.mark.parametrize("per", ["leaf", "layer", "global"])
def test_hierarchical_groups_and_forms(per: str) -> None:
    """Centred and non-centred forms are the same density after the change of variables w = s·z."""
    centred, free = (al.priors.Hierarchical(al.HalfNormal(1.0), per=per, scaling="fan_in", centred=c) for c in (True, False))
    hyper = centred.init(WEIGHTS, FANS)
    assert len(hyper["log_scale"]) == {"leaf": 3, "layer": 2, "global": 1}[per]
    hyper = jax.tree.map(lambda u: u + 0.4, hyper)
    raw = free.raw(WEIGHTS, hyper, FANS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), free.weights(raw, hyper, FANS), WEIGHTS)
    scales = jax.tree.leaves(free.log_scales(WEIGHTS, hyper, FANS))
    jacobian = sum(leaf.size * float(u) for leaf, u in zip(jax.tree.leaves(WEIGHTS), scales, strict=True))
    np.testing.assert_allclose(free.log_prob(raw, hyper, FANS), centred.log_prob(WEIGHTS, hyper, FANS) + jacobian, rtol=1e-5)


def test_hierarchical_scales_are_learned() -> None:
    """Small true weights pull the inferred scale below that of large ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 20)).astype(np.float32)
    found = []
    for size in (0.05, 3.0):
        y = x @ (size * rng.normal(size=20)) + 0.1 * rng.normal(size=300)
        model = al.LinearModel(
            al.features.Identity(bias=False), al.Gaussian(0.1), al.priors.Hierarchical(al.LogNormal(0.0, 2.0), per="global")
        )
        fit = al.fit(0, model, (x, y), al.MAP(num_steps=3000, learning_rate=0.05))
        found.append(float(fit.posterior.params["prior"]["log_scale"]["global"]))
    assert found[0] < found[1] - 0.5


def test_what_cannot_be_a_prior() -> None:
    with pytest.raises(al.ModelError, match="real line"):
        al.priors.from_distribution(dist.Gamma(1.0, 1.0))
    with pytest.raises(al.ModelError, match="scalar"):
        al.priors.from_distribution(dist.Normal(np.zeros(2), 1.0))
    with pytest.raises(al.ModelError, match="degrees of freedom"):
        al.priors.StudentT(0.0)
    with pytest.raises(al.ModelError, match="per="):
        al.priors.Hierarchical(per="neuron")
    with pytest.raises(al.ModelError, match="per="):
        al.priors.Hierarchical(per={})
    with pytest.raises(al.ModelError, match="local="):
        al.priors.Horseshoe(local="layer")
    with pytest.raises(al.ModelError, match="slab"):
        al.priors.Horseshoe(slab=-1.0)
    with pytest.raises(al.ModelError, match="HalfNormal"):
        al.priors.Hierarchical(1.0)
    with pytest.raises(al.ModelError, match="centred="):
        al.priors.Hierarchical(centred="yes")
    with pytest.raises(al.ModelError, match="order="):
        al.priors.Hierarchical(order="rows")
    with pytest.raises(al.ModelError, match="no such group"):
        al.priors.Hierarchical(centred=("c",)).init(WEIGHTS, FANS)
    with pytest.raises(al.ModelError, match="nothing to shrink"):
        al.priors.Horseshoe().init({"bias": jnp.zeros(3)}, {"bias": 1})
    with pytest.raises(al.ModelError, match="fit nothing"):
        al.priors.Hierarchical(per={"c": "input", "*": "leaf"}).init(WEIGHTS, FANS)
    with pytest.raises(al.ModelError, match="scaling"):
        al.Normal(1.0, scaling="fan_out")


HYPERPRIORS = [al.HalfNormal(0.7), al.HalfCauchy(0.7), al.InverseGamma(3.0, 2.0), al.LogNormal(0.1, 0.5)]
# A weight of one row and one column, so that integrals over everything can be done on a grid.
ONE, ONE_FAN = {"w": jnp.asarray([[0.4, -0.9]])}, {"w": 1}


def weights_of(network) -> tuple:
    network = al.as_network(network)
    weights = network.init(jax.random.key(0))
    return weights, al.BNN(network).fan_in(weights)


def numpy_tree(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


FORMS = [("input", False), ("unit", False), ("input", True), ("unit", True)]


@pytest.mark.parametrize(("per", "centred", "hyperprior"), [(*form, h) for form, h in zip(FORMS, HYPERPRIORS, strict=True)])
def test_grouped_density_is_numpyros(per: str, centred: bool, hyperprior) -> None:
    """log p(w, s) written out with NumPyro, and the change of variables to (raw, log s) by automatic differentiation."""
    prior = al.priors.Hierarchical(hyperprior, per=per, centred=centred, scaling="fan_in")
    with jax.enable_x64(True):
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), WEIGHTS)
        hyper = jax.tree.map(lambda u: u + 0.3 * jnp.cos(jnp.arange(u.size, dtype=float)).reshape(u.shape), prior.init(weights, FANS))
        axis = {"input": 1, "unit": 0}[per]  # of the sum: scales go along the other one

        def scale(name: str, fan: int):
            s = jnp.exp(hyper["log_scale"][name]) / fan**0.5
            return jnp.expand_dims(s, axis) if name.endswith("weight") else s

        named = {"a.weight": weights["a"]["weight"], "a.bias": weights["a"]["bias"], "b.weight": weights["b"]["weight"]}
        fans = {"a.weight": 3, "a.bias": 1, "b.weight": 2}
        assert {name: u.shape for name, u in hyper["log_scale"].items()} == {
            "a.weight": (3,) if per == "input" else (2,),
            "a.bias": (),
            "b.weight": (2,) if per == "input" else (1,),
        }
        expected = 0.0
        for name, w in named.items():
            expected += dist.Normal(0.0, jnp.broadcast_to(scale(name, fans[name]), w.shape)).log_prob(w).sum()
            u = hyper["log_scale"][name]
            sigma = jnp.exp(u)
            squared = isinstance(hyperprior, al.InverseGamma)
            base = hyperprior.distribution().log_prob(sigma**2 if squared else sigma)
            expected += (base + (jnp.log(2.0) + 2 * u if squared else u)).sum()
        raw = prior.raw(weights, hyper, FANS)
        flat, unravel = jax.flatten_util.ravel_pytree(raw)
        forward = lambda v: jax.flatten_util.ravel_pytree(prior.weights(unravel(v), hyper, FANS))[0]
        expected += jnp.linalg.slogdet(jax.jacobian(forward)(flat))[1]
        np.testing.assert_allclose(prior.log_prob(raw, hyper, FANS), expected, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), prior.weights(raw, hyper, FANS), weights)


PRIORS = {
    "input": al.priors.Hierarchical(al.HalfNormal(0.8), per="input"),
    "unit, centred": al.priors.Hierarchical(al.InverseGamma(3.0, 2.0), per="unit", centred=True),
    "some centred": al.priors.Hierarchical(al.LogNormal(0.0, 0.4), per="input", centred=("a.weight",)),
    "mixed": al.priors.Hierarchical(al.HalfNormal(1.0), per={"a.weight": "input", "*": "layer"}),
    "horseshoe": al.priors.Horseshoe(al.LogNormal(0.0, 0.3)),
    "horseshoe, inputs, slab": al.priors.Horseshoe(local="input", slab=2.0, scaling="fan_in"),
    "horseshoe, units, random slab": al.priors.Horseshoe(local="unit", per="leaf", slab=al.InverseGamma(2.0, 8.0)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_expected_log_prob_is_the_mean_over_draws(name: str) -> None:
    prior = PRIORS[name]
    hyper = prior.init(WEIGHTS, FANS)
    mean, variance = prior.raw(WEIGHTS, hyper, FANS), jax.tree.map(lambda w: 0.1 + 0.2 * jnp.abs(w), WEIGHTS)
    flat, unravel = jax.flatten_util.ravel_pytree(mean)
    sd = jnp.sqrt(jax.flatten_util.ravel_pytree(variance)[0])
    z = jax.random.normal(jax.random.key(1), (20_000, flat.size))
    values = np.asarray(jax.jit(jax.vmap(lambda row: prior.log_prob(unravel(flat + sd * row), hyper, FANS)))(z), np.float64)
    found = float(prior.expected_log_prob(mean, variance, hyper, FANS))
    assert abs(found - values.mean()) < 5 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("name", PRIORS)
def test_draws_have_the_density(name: str) -> None:
    """E[∂ᵢ log p] = 0 and E[θᵢ ∂ᵢ log p] = −1 for every coordinate: integration by parts, at 5 standard errors."""
    prior = PRIORS[name]
    raws, hypers = jax.vmap(lambda key: prior.sample(key, WEIGHTS, FANS))(jax.random.split(jax.random.key(0), 20_000))
    scores = jax.jit(jax.vmap(jax.grad(lambda both: prior.log_prob(*both, FANS))))((raws, hypers))
    for value, score in zip(jax.tree.leaves((raws, hypers)), jax.tree.leaves(scores), strict=True):
        value, score = (np.asarray(leaf, np.float64).reshape(20_000, -1) for leaf in (value, score))
        for statistic, expected in ((score, 0.0), (value * score, -1.0)):
            assert np.all(np.abs(statistic.mean(0) - expected) < 5 * statistic.std(0) / np.sqrt(20_000))


def test_prior_integrates_to_one() -> None:
    """Quadrature over (z, log τ, log λ, log c) of the regularised horseshoe of one weight."""
    prior = al.priors.Horseshoe(al.HalfCauchy(0.5), slab=al.InverseGamma(2.0, 2.0))
    weight, fan = {"w": jnp.zeros((1, 1))}, {"w": 1}
    with jax.enable_x64(True):
        axes = [jnp.linspace(-9, 9, 19), jnp.linspace(-22, 22, 99), jnp.linspace(-22, 22, 99), jnp.linspace(-5, 9, 57)]
        volume = np.prod([float(a[1] - a[0]) for a in axes])

        def density(z, tau, lam, slab):
            hyper = {"log_tau": {"global": tau}, "log_lambda": {"w": lam.reshape(1, 1)}, "log_slab": slab}
            return jnp.exp(prior.log_prob({"w": z.reshape(1, 1)}, hyper, fan))

        over = lambda f, number: jax.vmap(f, tuple(0 if i == number else None for i in range(4)))
        for number in (3, 2, 1, 0):
            density = over(density, number)
        total = float(jnp.sum(jax.jit(density)(*axes))) * volume
    assert jax.tree.structure(prior.init(weight, fan)) == jax.tree.structure(
        {"log_tau": {"global": 0}, "log_lambda": {"w": 0}, "log_slab": 0}
    )
    # The half-Cauchys have 2·(2/π)e⁻²² beyond the grid; the trapezoid rule on smooth, decaying functions converges exponentially.
    assert abs(total - 1.0) < 1e-6


def test_marginal_of_the_horseshoe() -> None:
    """p(w) = ∫ N(w; 0, τ²λ²) dλ by quadrature, against draws of w = τλz with τ nearly known."""
    prior = al.priors.Horseshoe(al.LogNormal(np.log(0.5).item(), 1e-4))
    raws, hypers = jax.vmap(lambda key: prior.sample(key, ONE, ONE_FAN))(jax.random.split(jax.random.key(3), 10_000))
    w = np.asarray(jax.vmap(lambda raw, hyper: prior.weights(raw, hyper, ONE_FAN))(raws, hypers)["w"]).ravel()
    u = np.linspace(-20, 20, 2001)
    mass = np.exp(np.asarray(al.HalfCauchy(1.0).log_prob_unconstrained(jnp.asarray(u, jnp.float32)), np.float64)) * (u[1] - u[0])
    cdf = lambda at: (mass[:, None] * st.norm.cdf(np.atleast_1d(at)[None] / (0.5 * np.exp(u[:, None])))).sum(0)
    assert st.kstest(w[::7], cdf).pvalue > 1e-4
    # The slab bounds the scale: τλ̃ < c whatever λ.
    slab = al.priors.Horseshoe(slab=2.0)
    huge = {"log_tau": {"global": jnp.asarray(20.0)}, "log_lambda": {"w": jnp.full((1, 2), 20.0)}}
    rounding = 40 * np.finfo(np.float32).eps  # of log τ + log λ
    np.testing.assert_allclose(slab.log_scales(ONE, huge, ONE_FAN)["w"], np.log(2.0), rtol=0, atol=rounding)
    small = jax.tree.map(lambda leaf: -leaf / 5, huge)
    np.testing.assert_allclose(slab.log_scales(ONE, small, ONE_FAN)["w"], -8.0, rtol=1e-6)


def _equinox():
    import equinox as eqx

    return eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))


def _nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.second = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(jnp.tanh(self.first(x)))

    return Net(nnx.Rngs(0))


NETWORKS = {
    "mlp": (lambda: al.networks.MLP(3, (4,), 1, "tanh"), "layer0.weight"),
    "equinox": (_equinox, "layers.0.weight"),
    "nnx": (_nnx, "first.kernel"),
    "function": (lambda: (lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], {"w": jnp.ones((3, 4)), "v": jnp.ones((4, 1))}), "w"),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("per", ["input", "unit"])
def test_groups_are_inputs_and_units_of_every_framework(kind: str, per: str) -> None:
    """Scaling group j of the first weight must change the function only through input j (or unit j): shown on the function itself."""
    make, path = NETWORKS[kind]
    network = al.as_network(make())
    weights, fans = weights_of(network)
    prior = al.priors.Hierarchical(per=per)
    raw = jax.tree.map(jnp.ones_like, weights)
    hyper = prior.init(weights, fans)
    assert hyper["log_scale"][path].shape == ((3,) if per == "input" else (4,))
    x = jnp.asarray([[0.3, -0.2, 0.5]])
    # Switch group 1 off: its derivative with respect to input 1 vanishes, or one of four equal units goes.
    off = {"log_scale": {**hyper["log_scale"], path: hyper["log_scale"][path].at[1].set(-jnp.inf)}}
    f = lambda h, rows: network.apply(prior.weights(raw, h, fans), rows).sum()
    slope, before = jax.grad(f, argnums=1)(off, x)[0], jax.grad(f, argnums=1)(hyper, x)[0]
    if per == "input":
        assert slope[1] == 0 and np.all(np.abs(np.asarray(slope)[[0, 2]]) > 0)
    else:
        np.testing.assert_allclose(slope, 0.75 * before, rtol=1e-5)


def test_convolution_channels_and_square_weights() -> None:
    weights, fans = weights_of(al.networks.LeNet5(out_size=3))
    shapes = {g.name: (g.shape, g.view) for g in al.priors.Hierarchical(per="input").groups(weights, fans)}
    kernels = {name: leaf.shape for name, leaf in zip(al._tree.paths(weights), jax.tree.leaves(weights), strict=True) if leaf.ndim == 4}
    assert kernels and all(shapes[name] == ((shape[2],), (1, 1, shape[2], 1)) for name, shape in kernels.items())
    square, square_fans = weights_of(al.networks.MLP(3, (3,), 3))
    with pytest.raises(al.ModelError, match="order='in_out'"):
        al.priors.Hierarchical(per="input").init(square, square_fans)
    views = [g.view for g in al.priors.Hierarchical(per="input", order="out_in").groups(square, square_fans)]
    assert (1, 3) in views and (3, 1) not in views
    model = al.LinearModel(al.features.Identity(), al.Gaussian(0.3), al.priors.Hierarchical(per="input"))
    bound = model.bind(np.zeros((5, 4)), np.zeros((5, 1)))
    assert bound.init(jax.random.key(0))["prior"]["log_scale"]["weight"].shape == (5,)


def relevance(n: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Five inputs, of which 0 and 2 matter."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    return x, (np.sin(1.5 * x[:, 0]) + 0.7 * x[:, 2] + 0.1 * rng.normal(size=n)).astype(np.float32)


RELEVANCE = {
    "hierarchical": al.priors.Hierarchical(al.HalfCauchy(0.5), per={"layer0.weight": "input", "*": "layer"}),
    "horseshoe": al.priors.Horseshoe(al.HalfCauchy(0.3), local="input", per="leaf", slab=3.0),
}


@pytest.mark.parametrize("kind", RELEVANCE)
def test_variational_inference_finds_the_inputs_that_matter(kind: str) -> None:
    """The weights that leave an input which does not matter end up at least five times smaller than those of one that does."""
    model = al.BNN(al.networks.MLP(5, (8,), 1, "tanh"), al.Gaussian(), RELEVANCE[kind])
    fit = al.fit(0, model, relevance(), al.Variational(num_steps=2000, learning_rate=0.02, num_evidence=0))
    weights = jax.vmap(fit.model.weights)(jax.tree.map(jnp.asarray, fit.sample(1, 200)))["layer0"]["weight"]
    sizes = np.sqrt(np.mean(np.asarray(weights) ** 2, axis=(0, 2)))
    assert min(sizes[[0, 2]]) > 5 * max(sizes[[1, 3, 4]]), sizes.round(3)


@pytest.mark.parametrize("kind", ["hierarchical", "horseshoe"])
def test_map_ranks_the_inputs(kind: str) -> None:
    """Few rows, twenty inputs, three of which matter: at the mode theirs are the largest scales."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, 20)).astype(np.float32)
    y = x @ np.r_[2.0, -1.5, 1.0, np.zeros(17)] + 0.5 * rng.normal(size=30)
    prior, name = {
        "hierarchical": (al.priors.Hierarchical(al.HalfNormal(0.3), per="input"), "log_scale"),
        "horseshoe": (al.priors.Horseshoe(al.HalfCauchy(0.05), local="input", slab=al.InverseGamma(2.0, 8.0)), "log_lambda"),
    }[kind]
    model = al.LinearModel(al.features.Identity(bias=False), al.Gaussian(0.5), prior)
    fit = al.fit(0, model, (x, y), al.MAP(num_steps=2000, learning_rate=0.03))
    scales = np.asarray(fit.posterior.params["prior"][name]["weight"])
    assert min(scales[:3]) > max(scales[3:]), scales.round(2)


def test_the_form_is_chosen_from_a_fit() -> None:
    """Many weights that the data know are centred; those they say nothing about, and small groups, are not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 24)).astype(np.float32)
    x[:, 12:] *= 1e-3  # nothing can be learned about these weights
    y = x[:, :12] @ rng.normal(size=12) + 0.1 * rng.normal(size=400)
    function = lambda p, rows: rows[:, :12] @ p["known"] + rows[:, 12:] @ p["unknown"] + p["bias"]
    start = {"known": jnp.zeros((12, 1)), "unknown": jnp.zeros((12, 1)), "bias": jnp.zeros(1)}
    prior = al.priors.Hierarchical(per="leaf", centred="auto")
    model = al.BNN((function, start), al.Gaussian(0.1), prior)
    fit = al.fit(0, model, (x, y), al.Variational(num_steps=2000, num_evidence=0))
    assert al.priors.centre(jax.random.key(1), fit).centred == ("known",)
    with pytest.raises(al.ModelError, match="centred='auto'"):
        al.priors.centre(jax.random.key(2), al.fit(0, al.BNN((function, start)), (x, y), al.MAP(num_steps=2)))


# ---- spike and slab -----------------------------------------------------------------------------------------------------------------------


def test_scale_mixture_is_its_two_normals() -> None:
    import scipy.stats as st

    prior = al.priors.ScaleMixture(2.0, narrow=0.1, share=0.3, loc=0.5)
    w = np.array([-3.0, 0.4, 0.5, 0.9, 4.0])
    expected = np.sum(np.log(0.3 * st.norm(0.5, 2.0).pdf(w) + 0.7 * st.norm(0.5, 0.2).pdf(w)))
    with jax.enable_x64(True):
        found = prior.log_prob({"w": jnp.asarray(w)}, {}, {"w": 1})
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    drawn, _ = prior.sample(jax.random.key(0), {"w": jax.ShapeDtypeStruct((200_000,), jnp.float32)}, {"w": 1})
    z = np.asarray(drawn["w"], np.float64) - 0.5
    variance, fourth = 0.3 * 4.0 + 0.7 * 0.04, 3 * (0.3 * 16.0 + 0.7 * 0.0016)
    assert abs(np.mean(z**2) - variance) < 5 * np.sqrt((fourth - variance**2) / 200_000)


def test_the_scale_mixtures_expectation_is_a_bound_that_becomes_exact() -> None:
    """Below E[log p] always, and equal to log p where q is a point."""
    prior = al.priors.ScaleMixture(1.0, narrow=0.05)
    mean = {"w": jnp.array([0.0, 0.03, 0.2, -1.0])}
    expected = lambda v: float(prior.expected_log_prob(mean, {"w": jnp.full(4, v)}, {}, {"w": 1}))
    np.testing.assert_allclose(expected(0.0), float(prior.log_prob(mean, {}, {"w": 1})), rtol=1e-6)
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    for v in (1e-4, 0.01, 0.2):
        exact = sum(
            w / np.sqrt(2 * np.pi) * float(prior.log_prob({"w": mean["w"] + np.sqrt(v) * z}, {}, {"w": 1}))
            for z, w in zip(nodes, weights, strict=True)
            if w > 1e-12
        )
        assert exact - 4.0 < expected(v) < exact + 1e-3


@pytest.mark.parametrize("settings", [{"narrow": 0.0}, {"narrow": 1.0}, {"share": 1.5}])
def test_scale_mixtures_that_are_none_are_refused(settings: dict) -> None:
    with pytest.raises(al.ModelError, match="between 0 and 1"):
        al.priors.ScaleMixture(1.0, **settings)
