"""Families of distributions and covariance operators: densities, draws, entropies and marginals say the same thing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st

import aleator as al
from aleator import families, linalg

SHAPES = [(3, 2), (2,), ()]  # a matrix, a vector and a number: D = 9
FAMILIES = {
    "mean_field": families.MeanField(),
    "full_rank": families.FullRank(),
    "low_rank": families.LowRank(2),
    "matrix_normal": families.MatrixNormal(),
    "mixture": families.MixtureOfGaussians(3),
    "flow": families.Flow(3, 4),
}
FAMILY = pytest.mark.parametrize("name", FAMILIES)
CLOSED = pytest.mark.parametrize("name", ["mean_field", "full_rank", "low_rank", "matrix_normal"])
DRAWS = 20_000


def random_q(name: str, seed: int = 0) -> dict:
    """Variational parameters away from their start, so that every entry matters."""
    family = FAMILIES[name]
    rng = np.random.default_rng(seed)
    parts = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES)
    if family.flat is True:
        parts = (jnp.concatenate([part.ravel() for part in parts]),)
    q = family.init(jax.random.key(seed), parts, 0.5)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), q)


def flat(parts: tuple) -> jax.Array:
    return jnp.concatenate([jnp.ravel(part) for part in parts])


def draws(name: str, q: dict, number: int = DRAWS) -> tuple:
    return jax.jit(jax.vmap(lambda key: FAMILIES[name].sample(key, q)))(jax.random.split(jax.random.key(1), number))


def covariance(operator) -> np.ndarray:
    root = np.asarray(jax.vmap(operator.sqrt_matvec)(jnp.eye(operator.num_noise)), np.float64)
    return root.T @ root


@CLOSED
def test_operator_is_the_covariance_of_the_density(name: str) -> None:
    q = random_q(name)
    operator = FAMILIES[name].operator(q)
    sigma = covariance(operator)
    np.testing.assert_allclose(operator.diagonal(), np.diag(sigma), rtol=1e-4)
    np.testing.assert_allclose(operator.logdet(), np.linalg.slogdet(sigma)[1], rtol=1e-4, atol=1e-4)
    normal = st.multivariate_normal(np.asarray(flat(q["mean"]), float), sigma)
    points = draws(name, q, 5)
    ours = jax.vmap(lambda parts: FAMILIES[name].log_prob(q, parts))(points)
    theirs = normal.logpdf(np.asarray(jax.vmap(flat)(points), float))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(FAMILIES[name].entropy(q), normal.entropy(), rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "flow"])
def test_draws_have_the_marginals(name: str) -> None:
    q = random_q(name)
    marginals = FAMILIES[name].marginals(q)
    samples = np.asarray(jax.vmap(flat)(draws(name, q)), float)
    mean, variance = (np.asarray(flat(part), float) for part in marginals)
    assert np.all(np.abs(samples.mean(0) - mean) < 5 * np.sqrt(variance / DRAWS))
    fourth = np.mean((samples - mean) ** 4, axis=0)
    assert np.all(np.abs(samples.var(0) - variance) < 5 * np.sqrt((fourth - variance**2) / DRAWS))


@FAMILY
def test_density_integrates_to_one(name: str) -> None:
    """E_q[r/q] = 1 for any density r with thinner tails: here a narrow normal around a draw's middle."""
    q = random_q(name)
    samples = draws(name, q)
    points = np.asarray(jax.vmap(flat)(samples), float)
    inside = st.multivariate_normal(points.mean(0), 0.5 * np.cov(points.T))
    log_q = np.asarray(jax.vmap(lambda parts: FAMILIES[name].log_prob(q, parts))(samples), float)
    ratio = np.exp(inside.logpdf(points) - log_q)
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / np.sqrt(DRAWS)
    assert ratio.std() / np.sqrt(DRAWS) < 0.1


def test_flow_density_is_the_change_of_variables() -> None:
    family, q = FAMILIES["flow"], random_q("flow")
    z = jax.random.normal(jax.random.key(3), (9,))
    jacobian = jax.jacobian(lambda noise: family.draw(q, noise)[0])(z)
    expected = st.norm.logpdf(np.asarray(z, float)).sum() - np.linalg.slogdet(np.asarray(jacobian, float))[1]
    np.testing.assert_allclose(family.log_prob(q, family.draw(q, z)), expected, rtol=1e-4)


def test_mixture_density() -> None:
    family, q = FAMILIES["mixture"], random_q("mixture")
    point = np.asarray(family.sample(jax.random.key(3), q)[0], float)
    weight = np.asarray(jax.nn.softmax(q["logits"]), float)
    each = [st.norm(m, np.exp(r)).logpdf(point).sum() for m, r in zip(q["mean"], q["rho"], strict=True)]
    np.testing.assert_allclose(family.log_prob(q, (jnp.asarray(point, jnp.float32),)), np.log(weight @ np.exp(each)), rtol=1e-4)


@FAMILY
def test_starts_with_the_given_spread(name: str) -> None:
    family = FAMILIES[name]
    parts = (jnp.zeros(9),) if family.flat is True else tuple(jnp.zeros(shape) for shape in SHAPES)
    q = family.init(jax.random.key(0), parts, 0.1)
    spread = np.asarray(jax.vmap(flat)(jax.vmap(lambda k: family.sample(k, q))(jax.random.split(jax.random.key(1), 4000))))
    centre = 0.15 if name == "mixture" else 0.1  # components begin apart
    assert 0.5 * centre < spread.std() < 2 * centre


@CLOSED
def test_double_precision_is_kept(name: str) -> None:
    with jax.enable_x64(True):
        q = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), random_q(name))
        operator = FAMILIES[name].operator(q)
        assert operator.sqrt_matvec(jnp.ones(operator.num_noise)).dtype == operator.diagonal().dtype == jnp.float64


def test_memory_of_low_rank_is_linear() -> None:
    q = families.LowRank(3).init(jax.random.key(0), (jnp.zeros(50_000),), 0.1)
    assert sum(leaf.size for leaf in jax.tree.leaves(q)) == 5 * 50_000
    assert isinstance(families.LowRank(3).operator(q), linalg.LowRank)


def test_names_and_refusals() -> None:
    assert families.as_family("full_rank") == families.FullRank()
    for wrong, said in (("fullrank", "full_rank"), (3, "object of al.families")):
        with pytest.raises(al.MethodError, match=said):
            families.as_family(wrong)
    for make in (lambda: families.LowRank(0), lambda: families.Flow(2, 1.5), lambda: families.MixtureOfGaussians(True)):
        with pytest.raises(al.MethodError, match="whole number"):
            make()
