"""NumPyro programs as models: conjugate answers, transforms with their Jacobians, predictions."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats as st

import aleator as al


def coin(x, y=None):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("flips", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(p), obs=y)


def line(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


FLIPS = np.array([1, 1, 1, 0, 1, 0, 1, 1, 0, 1])


def test_unconstrained_density_has_the_jacobian() -> None:
    """∫ exp(log joint) du over the real line is the evidence of 7 heads in 10, −7.185387."""
    model = al.from_numpyro(coin).bind(np.zeros((10, 1)), FLIPS)
    target = al.Target(model, 10)
    batch = al.Data(np.zeros((10, 1), np.float32), FLIPS[:, None]).batch()
    u = np.linspace(-12, 12, 4001)
    values = np.asarray(jax.jit(jax.vmap(lambda v: target.log_joint({"p": v}, batch)))(u.astype(np.float32)), float)
    assert abs(np.log(np.trapezoid(np.exp(values), u)) + 7.185387) < 1e-4


def test_mode_and_prediction() -> None:
    """On the logit scale the mode of Beta(8, 4) with its Jacobian is p = 8/12."""
    x = np.zeros((10, 1))
    fit = al.fit(0, al.from_numpyro(coin), (x, FLIPS), al.MAP(num_steps=800, learning_rate=0.05))
    assert abs(float(fit.model.constrain(fit.posterior.params)["p"]) - 8 / 12) < 1e-3
    predictive = fit.predict(0, x[:3])
    np.testing.assert_allclose(predictive.mean, 8 / 12, atol=1e-3)
    np.testing.assert_allclose(predictive.log_prob(np.ones(3)), np.log(8 / 12), atol=2e-3)


def test_regression_with_batches_and_several_members() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = x @ np.array([1.0, -2.0]) + 0.5 * rng.normal(size=60)
    model = al.from_numpyro(line)
    fit = al.fit(0, model, (x, y), al.Ensemble(al.MAP(num_steps=1500, batch_size=20, learning_rate=0.02), 2))
    assert fit.model.minibatch
    predictive = fit.predict(0, x)
    assert np.abs(predictive.mean - x @ [1.0, -2.0]).max() < 0.5
    members = fit.model.outputs
    loc, scale = (np.stack([np.asarray(getattr(members(p, x), name)) for p in _members(fit)]) for name in ("loc", "scale"))
    np.testing.assert_allclose(predictive.log_prob(y), np.log(st.norm(loc, scale).pdf(y).mean(axis=0)), atol=1e-4)
    np.testing.assert_allclose(predictive.variance, predictive.aleatoric + predictive.epistemic, rtol=1e-5)
    lower, upper = predictive.interval(0.9)
    assert 0.75 < np.mean((lower < y) & (y < upper)) <= 1.0


def _members(fit: al.Fit) -> list:
    return [jax.tree.map(lambda leaf: leaf[m], fit.posterior.params) for m in range(2)]  # noqa: B023


def test_prior_draws_follow_the_program() -> None:
    model = al.from_numpyro(line).bind(np.zeros((5, 2), np.float32), np.zeros((5, 1)))
    draws = jax.vmap(model.sample_prior)(jax.random.split(jax.random.key(0), 4000))
    assert st.kstest(np.exp(np.asarray(draws["sigma"])), st.halfnorm.cdf).pvalue > 1e-4
    assert st.kstest(np.asarray(draws["w"]).ravel(), st.norm.cdf).pvalue > 1e-4


def no_observation(x, y=None):
    numpyro.sample("p", dist.Beta(1.0, 1.0))


def discrete(x, y=None):
    z = numpyro.sample("z", dist.Bernoulli(0.5))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def summed(x, y=None):
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(m, 1.0).expand([x.shape[0]]).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("program", "said"), [(no_observation, "0 observed"), (discrete, "discrete latent"), (summed, "not one term per row")]
)
def test_programs_that_do_not_fit_are_refused(program, said: str) -> None:
    with pytest.raises(al.ModelError, match=said):
        al.fit(0, al.from_numpyro(program), (np.zeros((4, 1)), np.zeros(4)), al.MAP(num_steps=2))


def test_not_a_program() -> None:
    with pytest.raises(al.ModelError, match="not a program"):
        al.from_numpyro(3)
    with pytest.raises(al.ModelError, match="has not met data"):
        al.from_numpyro(coin).init(jax.random.key(0))


def test_programs_reload_unbound(tmp_path) -> None:
    """After a restart there is only the program itself."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 2)).astype(np.float32)
    fit = al.fit(0, al.from_numpyro(line), (x, x[:, 0]), al.MAP(num_steps=20))
    assert fit.predict(0, x).num_rows == 20
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit", model=al.from_numpyro(line))
    np.testing.assert_array_equal(again.predict(0, x).log_prob(x[:, 0]), fit.predict(0, x).log_prob(x[:, 0]))


def site_program(make):
    """w ~ N(0, 1)², s ~ half-normal, one site make(x @ w, s) a row."""

    def program(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", make(x @ w, s), obs=y)

    return program


ROWS = np.random.default_rng(3).normal(size=(12, 2)).astype(np.float32)
PARTS = dist.Categorical(probs=np.array([0.3, 0.7]))


@pytest.mark.parametrize(
    "make",
    [
        lambda mean, s: dist.TruncatedNormal(mean, s, low=0.0),
        lambda mean, s: dist.TruncatedNormal(mean, 1.0, low=0.0, high=9.0),
        lambda mean, s: dist.MixtureSameFamily(PARTS, dist.Normal(jax.numpy.stack([mean, -mean], -1), s)),
    ],
    ids=["truncated", "truncated twice", "mixture"],
)
def test_sites_made_of_other_distributions(make) -> None:
    y = np.abs(ROWS[:, 0]) + 0.1
    fit = al.fit(0, al.from_numpyro(site_program(make)), (ROWS, y), al.MAP(num_steps=5), progress=False)
    values = fit.model.constrain(fit.posterior.params)
    site = make(ROWS @ values["w"], values["s"])
    for rows in (slice(0, 12), slice(4, 5)):  # one row by itself is the row it was among others
        predictive = fit.predict(0, ROWS[rows])
        np.testing.assert_allclose(predictive.mean, site.mean[rows], rtol=1e-5)
        np.testing.assert_allclose(predictive.log_prob(y[rows]), site.log_prob(y)[rows], rtol=1e-4, atol=1e-5)


def columns(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)


def test_columns_joined_by_to_event() -> None:
    """The scale is shared by all rows and columns; each column has its interval."""
    y = np.random.default_rng(4).normal(size=(12, 3)).astype(np.float32)
    fit = al.fit(0, al.from_numpyro(columns), (ROWS, y), al.MAP(num_steps=5), progress=False)
    predictive = fit.predict(0, ROWS)
    mean = ROWS @ np.asarray(fit.posterior.params["w"])
    np.testing.assert_allclose(predictive.mean, mean, atol=1e-5)
    np.testing.assert_allclose(predictive.log_prob(y), st.norm(mean, 0.5).logpdf(y).sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(predictive.interval(0.9)[1], st.norm(mean, 0.5).ppf(0.95), atol=1e-4)


def scaled_rows(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]), numpyro.handlers.scale(scale=3.0):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def scaled_prior(x, y=None):
    with numpyro.handlers.scale(scale=3.0):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def learned(x, y=None):
    offset = numpyro.param("offset", 1.0)
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + offset, 0.5), obs=y)


@pytest.mark.parametrize(
    ("program", "said"), [(scaled_rows, r"scales log densities.*'y'"), (scaled_prior, r"scales log densities.*'w'"), (learned, "'offset'")]
)
def test_what_would_be_left_out_silently_is_refused(program, said: str) -> None:
    with pytest.raises(al.ModelError, match=said):
        al.fit(0, al.from_numpyro(program), (ROWS, ROWS[:, 0]), al.MAP(num_steps=2))


def of_a_plate(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", 24, subsample_size=x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def test_the_target_alone_scales_a_plate_of_more_rows() -> None:
    plain = site_program(lambda mean, s: dist.Normal(mean, 0.5))
    terms = []
    params = {"w": np.ones(2, np.float32), "s": np.zeros((), np.float32)}
    with jax.debug_key_reuse(False):  # NumPyro's own choice of rows uses a key twice
        for program in (of_a_plate, plain):
            model = al.from_numpyro(program).bind(ROWS, ROWS[:, :1])
            terms.append(model.log_likelihood(params, al.Data(ROWS, ROWS[:, :1]).batch()))
    np.testing.assert_allclose(*terms)


def improper(x, y=None):
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def test_improper_priors_have_modes_and_no_draws() -> None:
    y = ROWS @ np.array([1.0, -2.0]) + 0.1
    fit = al.fit(0, al.from_numpyro(improper), (ROWS, y), al.MAP(num_steps=600, learning_rate=0.05), progress=False)
    np.testing.assert_allclose(fit.posterior.params["w"], np.linalg.lstsq(ROWS, y)[0], atol=1e-3)
    with pytest.raises(al.ModelError, match="cannot be drawn from"):
        al.fit(0, al.from_numpyro(improper), (ROWS, y), al.SMC(num_particles=8))


def test_a_statistic_that_numpyro_lacks_is_named() -> None:
    transformed = site_program(lambda mean, s: dist.TransformedDistribution(dist.Normal(mean, s), dist.transforms.ExpTransform()))
    fit = al.fit(0, al.from_numpyro(transformed), (ROWS, np.ones(12)), al.MAP(num_steps=2), progress=False)
    with pytest.raises(al.ModelError, match="mean of this site has no closed form"):
        fit.predict(0, ROWS).mean  # noqa: B018
