"""Every view of a predictive against scipy, enumeration or quadrature, and the identities that tie the views together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from aleator._errors import DataError, HealthWarning, ModelError
from aleator._outputs import Outputs
from aleator.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, NegativeBinomial, Poisson, StudentT
from aleator.predictive import Predictive, concatenate, mix

RNG = np.random.default_rng(1)
S, N, K = 5, 4, 2
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
F = RNG.normal(size=(S, N, K))
SCALE = RNG.uniform(0.3, 1.2, (S, K))
Y = RNG.normal(size=(N, K))
ALL = [
    ("gaussian", Gaussian(), F, {"scale": SCALE}),
    ("heteroscedastic", HeteroscedasticGaussian(), np.concatenate([F, RNG.normal(size=(S, N, K))], axis=-1), {}),
    ("student", StudentT(5.0), F, {"scale": SCALE}),
    ("bernoulli", Bernoulli(), F, {}),
    ("categorical", Categorical(3), RNG.normal(size=(S, N, 3)), {}),
    ("poisson", Poisson(), F, {}),
    ("negative binomial", NegativeBinomial(), F, {"concentration": 3 * SCALE}),
]
FEW = [case for case in ALL if case[0] in ("gaussian", "student", "categorical", "poisson")]


def gaussian_draws(**changes) -> Predictive:
    return dataclasses.replace(Predictive(Outputs(draws=F, weights=WEIGHTS, extra={"scale": SCALE}), Gaussian()), **changes)


def mixture_cdf(y: float, row: int, column: int, weights: np.ndarray = WEIGHTS) -> float:
    return float(weights @ stats.norm.cdf(y, F[:, row, column], SCALE[:, column]))


def mixture_pdf(y: float, row: int, column: int, weights: np.ndarray = WEIGHTS) -> float:
    return float(weights @ stats.norm.pdf(y, F[:, row, column], SCALE[:, column]))


# ------------------------------------------------------------------------------------------------------------ Gaussian mixtures, exactly


def test_moments_and_their_split_of_weighted_draws():
    pred = gaussian_draws()
    mean = np.einsum("s,snk->nk", WEIGHTS, F)
    aleatoric = np.broadcast_to(np.einsum("s,sk->k", WEIGHTS, SCALE**2), mean.shape)
    epistemic = np.einsum("s,snk->nk", WEIGHTS, (F - mean) ** 2)
    np.testing.assert_allclose(pred.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(pred.aleatoric, aleatoric, rtol=1e-12)
    np.testing.assert_allclose(pred.epistemic, epistemic, rtol=1e-12)
    np.testing.assert_allclose(pred.variance, aleatoric + epistemic, rtol=1e-12)
    np.testing.assert_allclose(pred.std**2, pred.variance, rtol=1e-12)
    np.testing.assert_allclose(pred.draws, F)


def test_log_prob_is_joint_over_columns():
    terms = stats.norm.logpdf(Y, F, SCALE[:, None]).sum(-1)
    np.testing.assert_allclose(gaussian_draws().log_prob(Y), np.log(np.einsum("s,sn->n", WEIGHTS, np.exp(terms))), rtol=1e-12)


def test_cdf_quantiles_and_intervals_of_a_mixture():
    pred = gaussian_draws()
    np.testing.assert_allclose(pred.cdf(Y), [[mixture_cdf(Y[i, j], i, j) for j in range(K)] for i in range(N)], rtol=1e-12)
    levels = np.array([1e-6, 0.05, 0.5, 0.95])
    quantiles = pred.quantile(levels)
    assert quantiles.shape == (4, N, K)
    for m, level in enumerate(levels):
        exact = [
            [optimize.brentq(lambda y, i=i, j=j, q=level: mixture_cdf(y, i, j) - q, -60, 60, xtol=1e-14) for j in range(K)]
            for i in range(N)
        ]
        np.testing.assert_allclose(quantiles[m], exact, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.stack(pred.interval(0.9)), quantiles[[1, 3]], rtol=1e-12)
    np.testing.assert_allclose(pred.quantile(0.5), quantiles[2], rtol=1e-12)


def test_entropy_of_a_mixture_against_adaptive_quadrature():
    pred = gaussian_draws()
    exact = np.empty((N, K))
    for i in range(N):
        for j in range(K):
            exact[i, j] = integrate.quad(lambda y, i=i, j=j: _plogp(mixture_pdf(y, i, j)), -15, 15, limit=500)[0]
    np.testing.assert_allclose(pred.entropy, exact, atol=1e-7)
    given = np.broadcast_to(WEIGHTS @ (0.5 * np.log(2 * np.pi * np.e * SCALE**2)), (N, K))
    np.testing.assert_allclose(pred.aleatoric_entropy, given, rtol=1e-10)
    np.testing.assert_allclose(pred.mutual_information, exact - given, atol=1e-7)


def _plogp(p: float) -> float:
    return -p * np.log(p) if p > 0 else 0.0


def test_entropy_of_separated_components_of_very_different_widths():
    # Far apart, H = Σ w (H_s − log w): 1e-4 beside 10 is resolved, and so are 20 narrow spikes.
    for centres, scales in ((np.array([0.0, 1e3]), np.array([1e-4, 10.0])), (10.0 * np.arange(20), np.full(20, 1e-3))):
        weights = np.full(len(centres), 1 / len(centres))
        pred = Predictive(Outputs(draws=centres[:, None, None], extra={"scale": scales[:, None]}), Gaussian(), squeeze=True)
        expected = weights @ (0.5 * np.log(2 * np.pi * np.e * scales**2) - np.log(weights))
        np.testing.assert_allclose(pred.entropy, [expected], atol=1e-6)
        np.testing.assert_allclose(pred.mutual_information, [np.log(len(centres))], atol=1e-6)


def test_standardised_targets_come_back_in_their_own_units():
    loc, scale = np.array([100.0, -3.0]), np.array([20.0, 0.5])
    plain, scaled = gaussian_draws(), gaussian_draws(y_loc=loc, y_scale=scale)
    y = loc + scale * Y
    np.testing.assert_allclose(scaled.mean, loc + scale * plain.mean, rtol=1e-12)
    for view in ("variance", "aleatoric", "epistemic"):
        np.testing.assert_allclose(getattr(scaled, view), scale**2 * getattr(plain, view), rtol=1e-12)
    np.testing.assert_allclose(scaled.log_prob(y), plain.log_prob(Y) - np.log(scale).sum(), rtol=1e-10)
    np.testing.assert_allclose(scaled.cdf(y), plain.cdf(Y), rtol=1e-10)
    np.testing.assert_allclose(scaled.quantile(0.3), loc + scale * plain.quantile(0.3), rtol=1e-10)
    np.testing.assert_allclose(scaled.entropy, plain.entropy + np.log(scale), atol=1e-7)
    np.testing.assert_allclose(scaled.mutual_information, plain.mutual_information, atol=1e-7)
    np.testing.assert_allclose(scaled.sample(3, 7), loc + scale * plain.sample(3, 7), rtol=1e-12)
    np.testing.assert_allclose(scaled.draws, loc + scale * F, rtol=1e-12)


# --------------------------------------------------------------------------------------------------------- identities, all likelihoods


TARGETS = {"real": Y, "binary": (Y > 0).astype(int), "count": np.abs(np.round(4 * Y)).astype(int), "label": np.array([0, 2, 1, 1])}


@pytest.mark.parametrize(("name", "likelihood", "f", "extra"), ALL, ids=[case[0] for case in ALL])
def test_one_draw_is_that_distribution(name, likelihood, f, extra):
    one = jax.tree.map(lambda leaf: leaf[0], extra)
    y = likelihood.encode(TARGETS[likelihood.support], fitting=False)
    enumerated = name == "negative binomial"  # its entropy is enumerated below
    with jax.enable_x64(True):
        mean = jax.jit(likelihood.mean)(f[0], one)
        variance = jax.jit(likelihood.variance)(f[0], one)
        log_prob = jax.jit(likelihood.log_prob)(f[0], y, one)
        entropy = None if enumerated else jax.jit(likelihood.entropy)(f[0], one)
    pred = Predictive(Outputs(draws=f[:1], extra=jax.tree.map(lambda leaf: leaf[:1], extra)), likelihood)
    np.testing.assert_allclose(pred.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(pred.variance, variance, rtol=1e-12)
    np.testing.assert_allclose(pred.aleatoric, variance, rtol=1e-12)
    np.testing.assert_allclose(pred.epistemic, 0.0, atol=1e-20)
    np.testing.assert_allclose(pred.log_prob(y), log_prob, rtol=1e-9)
    if not enumerated:
        np.testing.assert_allclose(pred.entropy, entropy, atol=3e-6)
        np.testing.assert_allclose(pred.mutual_information, 0.0, atol=3e-6)


@pytest.mark.parametrize(("name", "likelihood", "f", "extra"), FEW, ids=[case[0] for case in FEW])
def test_weights_repeat_draws_and_float32_agrees(name, likelihood, f, extra):
    index = [0, 0, 1, 2]  # draw 0 counts twice
    repeated = Predictive(Outputs(draws=f[index], extra=jax.tree.map(lambda leaf: leaf[index], extra)), likelihood)
    weighted = Predictive(
        Outputs(draws=f[:4], weights=np.array([2.0, 1.0, 1.0, 0.0]), extra=jax.tree.map(lambda leaf: leaf[:4], extra)), likelihood
    )
    single = Predictive(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), repeated.outputs), likelihood)
    y = TARGETS[likelihood.support]
    for view in ("mean", "variance", "epistemic"):
        np.testing.assert_allclose(getattr(weighted, view), getattr(repeated, view), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(getattr(single, view), getattr(repeated, view), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weighted.log_prob(y), repeated.log_prob(y), rtol=1e-9)
    np.testing.assert_allclose(repeated.variance, repeated.aleatoric + repeated.epistemic, rtol=1e-14)
    if likelihood.support == "label":
        np.testing.assert_allclose(weighted.mutual_information, repeated.mutual_information, atol=1e-12)
        assert np.all(repeated.mutual_information >= 0)
        assert np.all(repeated.mutual_information <= repeated.entropy)


def test_blocks_of_rows_change_nothing():
    whole = gaussian_draws()
    blocks = dataclasses.replace(whole, max_bytes=1)  # one row at a time
    for view in ("mean", "variance", "entropy", "mutual_information", "draws"):
        np.testing.assert_allclose(getattr(blocks, view), getattr(whole, view), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(blocks.log_prob(Y), whole.log_prob(Y), rtol=1e-12)
    np.testing.assert_allclose(blocks.cdf(Y), whole.cdf(Y), rtol=1e-12)
    np.testing.assert_allclose(blocks.quantile([0.1, 0.9]), whole.quantile([0.1, 0.9]), rtol=1e-12)


def test_memory_stays_within_the_budget(monkeypatch):
    seen = []
    pred = Predictive(Outputs(draws=np.zeros((50, 1000, 1)), extra={"scale": np.ones((50, 1))}), Gaussian(), max_bytes=10**5)
    original = Predictive._moments
    monkeypatch.setattr(Predictive, "_moments", lambda self: seen.append(self.num_rows) or original(self))
    assert pred.mean.shape == (1000, 1)
    assert sum(seen) == 1000
    assert max(seen) * 50 * 8 <= 10**5


@pytest.mark.parametrize(("name", "likelihood", "f", "extra"), FEW, ids=[case[0] for case in FEW])
def test_sample_moments_agree_with_the_views(name, likelihood, f, extra):
    pred = Predictive(Outputs(draws=f, weights=WEIGHTS, extra=extra), likelihood)
    n = 4000
    y = pred.sample(5, n)
    values = (y[..., None] == np.arange(3)).astype(float) if name == "categorical" else y
    # Six standard errors: the whole table fails for fewer than one seed in 10⁶ (more often for the t's squares, hence means only).
    assert np.all(np.abs(values.mean(0) - pred.mean) < 6 * pred.std / np.sqrt(n))


def test_shapes_follow_the_users_y():
    flat = Predictive(Outputs(draws=F[..., :1], extra={"scale": SCALE[:, :1]}), Gaussian(), squeeze=True)
    table = dataclasses.replace(flat, squeeze=False)
    for view in ("mean", "variance", "std", "aleatoric", "epistemic", "entropy", "mutual_information", "aleatoric_entropy"):
        assert getattr(flat, view).shape == (N,)
        np.testing.assert_array_equal(getattr(flat, view)[:, None], getattr(table, view))
    y = Y[:, 0]
    for given in (y, y[:, None], y.tolist()):
        assert flat.log_prob(given).shape == (N,)
        np.testing.assert_array_equal(flat.log_prob(given), table.log_prob(y))
        assert flat.cdf(given).shape == (N,)
    assert flat.quantile(0.5).shape == (N,)
    assert flat.quantile([0.1, 0.5, 0.9]).shape == (3, N)
    assert flat.quantile(np.full((2, 3), 0.4)).shape == (2, 3, N)
    assert flat.interval(0.5)[0].shape == (N,)
    assert flat.sample(0, 3).shape == (3, N)
    assert table.sample(0, 3).shape == (3, N, 1)
    assert flat.draws.shape == (S, N)
    assert flat.draw(0, 7).shape == (7, N)
    one = flat.rows(slice(0, 1))
    assert one.mean.shape == one.log_prob(y[:1]).shape == (1,)


def test_targets_of_other_rows_or_columns_are_refused():
    pred = gaussian_draws()
    for wrong in (Y[:-1], Y[:, :1], Y[:, 0], np.ones((N, 3))):
        with pytest.raises(DataError, match="4 rows of 2 columns"):
            pred.log_prob(wrong)
    with pytest.raises(DataError, match="NaN"):
        pred.cdf(np.full((N, K), np.nan))
    for q in (0.0, 1.0, -0.1, []):
        with pytest.raises(DataError, match="strictly between"):
            pred.quantile(q)
    with pytest.raises(DataError, match="strictly between"):
        pred.interval(1.0)
    with pytest.raises(ModelError, match="no class probabilities"):
        _ = pred.probs


# ------------------------------------------------------------------------------------------------------------------- classes and counts


def test_categorical_by_enumeration():
    f = ALL[4][2]
    p = np.exp(f) / np.exp(f).sum(-1, keepdims=True)
    probs = np.einsum("s,snk->nk", WEIGHTS, p)
    pred = Predictive(Outputs(draws=f, weights=WEIGHTS), Categorical(3), labels=("red", "green", "blue"), squeeze=True)
    entropy = -(probs * np.log(probs)).sum(1)
    given = np.einsum("s,sn->n", WEIGHTS, -(p * np.log(p)).sum(-1))
    np.testing.assert_allclose(pred.probs, probs, rtol=1e-12)
    np.testing.assert_allclose(pred.variance, probs * (1 - probs), rtol=1e-10)
    np.testing.assert_allclose(pred.entropy, entropy, rtol=1e-12)
    np.testing.assert_allclose(pred.mutual_information, entropy - given, atol=1e-12)
    names = np.array(["green", "red", "blue", "blue"])
    np.testing.assert_allclose(pred.log_prob(names), np.log(probs[np.arange(N), [1, 0, 2, 2]]), rtol=1e-12)
    assert set(pred.sample(0, 20).ravel()) <= {"red", "green", "blue"}
    with pytest.raises(DataError, match="'pink' in row 1"):
        pred.log_prob(["red", "pink", "red", "red"])
    for call in (lambda: pred.quantile(0.5), lambda: pred.cdf(names)):
        with pytest.raises(ModelError, match="no order"):
            call()


def test_bernoulli_by_enumeration():
    p = WEIGHTS @ (1 / (1 + np.exp(-F[..., 0])))
    pred = Predictive(Outputs(draws=F[..., :1], weights=WEIGHTS), Bernoulli(), squeeze=True)
    np.testing.assert_allclose(pred.mean, p, rtol=1e-12)
    np.testing.assert_allclose(pred.probs, np.stack([1 - p, p], axis=1), rtol=1e-12)
    np.testing.assert_allclose(pred.variance, p * (1 - p), rtol=1e-10)
    np.testing.assert_allclose(pred.entropy, stats.bernoulli(p).entropy(), rtol=1e-10)
    np.testing.assert_allclose(pred.log_prob([0, 1, 1, 0]), np.log(np.where([0, 1, 1, 0], p, 1 - p)), rtol=1e-10)
    np.testing.assert_array_equal(pred.quantile(0.5), p > 0.5)
    two = Predictive(Outputs(draws=F), Bernoulli())
    assert two.probs.shape == (N, K, 2)


@pytest.mark.parametrize("name", ["poisson", "negative binomial"])
def test_counts_by_enumeration(name):
    _, likelihood, f, extra = next(case for case in ALL if case[0] == name)
    f = f + np.array([0.0, 3.0])  # means about 1 and about 20
    pred = Predictive(Outputs(draws=f, weights=WEIGHTS, extra=extra), likelihood)
    grid = np.arange(3000)[:, None, None, None]
    mean = np.exp(f)
    if name == "poisson":
        pmf = stats.poisson.pmf(grid, mean)
    else:
        r = extra["concentration"][:, None]
        pmf = stats.nbinom.pmf(grid, r, r / (r + mean))
    pmf = np.einsum("s,gsnk->gnk", WEIGHTS, pmf)
    cdf = np.cumsum(pmf, axis=0)
    np.testing.assert_allclose(pred.entropy, -np.sum(pmf * np.log(np.where(pmf > 0, pmf, 1)), axis=0), atol=1e-7)
    quantiles = pred.quantile([0.01, 0.5, 0.99])
    assert quantiles.dtype == np.int64
    for q, value in zip([0.01, 0.5, 0.99], quantiles, strict=True):
        np.testing.assert_array_equal(value, np.argmax(cdf >= q, axis=0))
    y = quantiles[1]
    np.testing.assert_allclose(pred.cdf(y), np.take_along_axis(cdf, y[None], axis=0)[0], rtol=1e-9)


# -------------------------------------------------------------------------------------------------------------------- Gaussian outputs

MEAN, VARIANCE = F[0], np.abs(F[1]) + 0.1
NOISE = np.array([0.5, 1.3])


def test_gaussian_outputs_in_closed_form():
    pred = Predictive(Outputs(mean=MEAN, variance=VARIANCE, extra={"scale": NOISE}), Gaussian())
    exact = stats.norm(MEAN, np.sqrt(VARIANCE + NOISE**2))
    np.testing.assert_allclose(pred.mean, MEAN, rtol=1e-10)
    np.testing.assert_allclose(pred.epistemic, VARIANCE, rtol=1e-10)
    np.testing.assert_allclose(pred.aleatoric, np.broadcast_to(NOISE**2, MEAN.shape), rtol=1e-10)
    np.testing.assert_allclose(pred.log_prob(Y), exact.logpdf(Y).sum(1), rtol=1e-10)
    np.testing.assert_allclose(pred.cdf(Y), exact.cdf(Y), rtol=1e-10)
    np.testing.assert_allclose(pred.quantile(0.025), exact.ppf(0.025), rtol=1e-10)
    np.testing.assert_allclose(pred.entropy, exact.entropy(), atol=1e-8)
    np.testing.assert_allclose(pred.mutual_information, 0.5 * np.log1p(VARIANCE / NOISE**2), atol=1e-8)
    with pytest.raises(ModelError, match=r"draw\(key, n\)"):
        _ = pred.draws
    drawn = pred.draw(0, 4000)
    np.testing.assert_allclose(drawn.std(0), np.sqrt(VARIANCE), rtol=6 / np.sqrt(8000))  # six standard errors


def test_integrated_noise_gives_student_t():
    df = np.array([3.0, 8.0])
    pred = Predictive(Outputs(mean=MEAN, variance=VARIANCE, df=df, extra={"scale": NOISE}), Gaussian())
    exact = stats.t(df, MEAN, np.sqrt(VARIANCE + NOISE**2))
    np.testing.assert_allclose(pred.log_prob(Y), exact.logpdf(Y).sum(1), rtol=1e-10)
    np.testing.assert_allclose(pred.variance, exact.var(), rtol=1e-10)
    np.testing.assert_allclose(pred.aleatoric, np.broadcast_to(NOISE**2 * df / (df - 2), MEAN.shape), rtol=1e-10)
    np.testing.assert_allclose(pred.quantile(0.9), exact.ppf(0.9), rtol=1e-9)
    np.testing.assert_allclose(pred.entropy, exact.entropy(), atol=1e-6)
    # E H[y | f, σ] over σ² ~ InverseGamma(df/2, df/2 · scale²), by quadrature.
    given = [
        integrate.quad(
            lambda v, d=d, s=s: 0.5 * np.log(2 * np.pi * np.e * v) * stats.invgamma.pdf(v, d / 2, scale=d / 2 * s**2), 0, np.inf, limit=400
        )[0]
        for d, s in zip(df, NOISE, strict=True)
    ]
    np.testing.assert_allclose(pred.aleatoric_entropy[0], given, atol=1e-5)
    assert np.all(pred.mutual_information > 0)
    share = np.mean(pred.sample(1, 4000) <= exact.ppf(0.9), axis=0)
    np.testing.assert_allclose(share, 0.9, atol=6 * np.sqrt(0.09 / 4000))
    heavy = Predictive(Outputs(mean=MEAN, variance=VARIANCE, df=np.array([1.5, 2.0]), extra={"scale": NOISE}), Gaussian())
    assert np.all(np.isinf(heavy.variance))
    np.testing.assert_allclose(heavy.quantile(0.9), stats.t([1.5, 2.0], MEAN, np.sqrt(VARIANCE + NOISE**2)).ppf(0.9), rtol=1e-8)


@pytest.mark.parametrize(
    ("likelihood", "extra", "y", "density"),
    [
        (Bernoulli(), {}, np.array([1, 0, 1, 1]), lambda y, f: stats.bernoulli.pmf(y, 1 / (1 + np.exp(-f)))),
        (Poisson(), {}, np.array([0, 2, 5, 1]), lambda y, f: stats.poisson.pmf(y, np.exp(f))),
        (StudentT(), {"scale": np.array([0.05])}, np.array([0.1, -0.3, 0.5, 0.2]), lambda y, f: stats.t.pdf(y, 4.0, f, 0.05)),
    ],
    ids=["bernoulli", "poisson", "narrow student"],
)
def test_gaussian_outputs_by_quadrature_over_f(likelihood, extra, y, density):
    mean, variance = MEAN[:, :1], 4 * VARIANCE[:, :1]
    pred = Predictive(Outputs(mean=mean, variance=variance, extra=extra), likelihood, squeeze=True)
    exact = []
    for m, v, target in zip(mean[:, 0], variance[:, 0], y, strict=True):
        points = [m, float(target)] if likelihood.support == "real" else [m]
        weighed = lambda f, m=m, v=v, target=target: density(target, f) * stats.norm.pdf(f, m, np.sqrt(v))
        exact.append(np.log(integrate.quad(weighed, m - 10 * np.sqrt(v), m + 10 * np.sqrt(v), points=points, limit=500)[0]))
    np.testing.assert_allclose(pred.log_prob(y), exact, rtol=1e-6, atol=1e-6)
    if likelihood.support == "count":  # the log-normal mean and variance
        rate = np.exp(mean + variance / 2)[:, 0]
        np.testing.assert_allclose(pred.mean, rate, rtol=1e-8)
        np.testing.assert_allclose(pred.epistemic, rate**2 * np.expm1(variance[:, 0]), rtol=1e-6)


def test_columns_of_gaussian_outputs_are_independent():
    both = Predictive(Outputs(mean=MEAN, variance=VARIANCE), Bernoulli())
    y = np.array([[1, 0], [0, 0], [1, 1], [0, 1]])
    apart = [Predictive(Outputs(mean=MEAN[:, [j]], variance=VARIANCE[:, [j]]), Bernoulli()).log_prob(y[:, j]) for j in range(K)]
    np.testing.assert_allclose(both.log_prob(y), sum(apart), rtol=1e-12)


def test_heteroscedastic_gaussian_outputs():
    mean, variance = np.hstack([MEAN, F[2]]), np.hstack([VARIANCE, np.full((N, K), 0.3)])
    pred = Predictive(Outputs(mean=mean, variance=variance), HeteroscedasticGaussian())
    np.testing.assert_allclose(pred.epistemic, VARIANCE, rtol=1e-9)
    noise = [
        [
            integrate.quad(lambda r, m=m: (1e-3 + np.log1p(np.exp(r))) ** 2 * stats.norm.pdf(r, m, np.sqrt(0.3)), m - 8, m + 8)[0]
            for m in row
        ]
        for row in F[2]
    ]
    np.testing.assert_allclose(pred.aleatoric, noise, rtol=1e-8)
    assert np.all(pred.mutual_information > 0)
    assert pred.draw(0, 10).shape == (10, N, K)

    class Open(HeteroscedasticGaussian):
        """The same without its closed form: two outputs a column go through the product rule over f."""

        def marginal(self, mean, variance, extra, df=None):
            return None

    smooth = dataclasses.replace(pred.outputs, variance=0.2 * variance)
    closed, open_ = (Predictive(smooth, likelihood) for likelihood in (HeteroscedasticGaussian(min_scale=1.0), Open(min_scale=1.0)))
    np.testing.assert_allclose(open_.log_prob(Y), closed.log_prob(Y), rtol=1e-6)


def test_categorical_gaussian_outputs_are_deterministic_and_close():
    mean, variance = RNG.normal(size=(N, 3)), RNG.uniform(0.2, 2.0, (N, 3))
    pred = Predictive(Outputs(mean=mean, variance=variance), Categorical(3))
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3)
    mass = np.prod(np.stack(np.meshgrid(weights, weights, weights, indexing="ij"), -1), -1).ravel()
    f = mean + np.sqrt(variance) * grid[:, None]
    p = np.exp(f) / np.exp(f).sum(-1, keepdims=True)
    np.testing.assert_allclose(pred.probs, np.einsum("q,qnk->nk", mass / mass.sum(), p), atol=3e-3)
    np.testing.assert_allclose(pred.probs.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(pred.probs, pred.probs)
    np.testing.assert_allclose(pred.log_prob([0, 1, 2, 0]), np.log(pred.probs[np.arange(N), [0, 1, 2, 0]]), rtol=1e-10)


# ------------------------------------------------------------------------------------------------------- distributions as outputs; joining


def test_outputs_that_are_numpyro_distributions():
    import numpyro.distributions as dist

    @dataclasses.dataclass(frozen=True)
    class Given(Gaussian):
        """A likelihood whose outputs already are distributions of y, as those of probabilistic programs are."""

        def log_terms(self, outputs, y, extra):
            return outputs.log_prob(y[:, 0])[:, None]

        def mean(self, outputs, extra):
            return outputs.mean[:, None]

        def variance(self, outputs, extra):
            return outputs.variance[:, None]

        def cdf(self, outputs, y, extra):
            return outputs.cdf(y[:, 0])[:, None]

        def entropy(self, outputs, extra):
            return outputs.entropy()[:, None]

        def sample(self, key, outputs, extra):
            return outputs.sample(key)[:, None]

    draws = jax.vmap(lambda f, s: dist.Normal(f, jnp.full(f.shape, s)))(jnp.asarray(F[..., 0]), jnp.asarray(SCALE[:, 0]))
    pred = Predictive(Outputs(draws=draws, weights=WEIGHTS), Given(1.0), squeeze=True)
    same = Predictive(Outputs(draws=F[..., :1], weights=WEIGHTS, extra={"scale": SCALE[:, :1]}), Gaussian(), squeeze=True)
    assert pred.num_rows == N
    for view in ("mean", "variance", "epistemic", "entropy"):
        np.testing.assert_allclose(getattr(pred, view), getattr(same, view), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pred.log_prob(Y[:, 0]), same.log_prob(Y[:, 0]), rtol=1e-5)
    np.testing.assert_allclose(pred.rows(slice(1, 3)).quantile(0.2), same.quantile(0.2)[1:3], rtol=1e-5)
    assert pred.sample(0, 2).shape == (2, N)
    joined = concatenate([pred.rows(slice(0, 1)), pred.rows(slice(1, 4))])
    np.testing.assert_allclose(joined.mean, pred.mean, rtol=1e-12)


def test_concatenate_restores_the_whole():
    pred = gaussian_draws()
    joined = concatenate([pred.rows(slice(0, 1)), pred.rows(slice(1, 4))])
    np.testing.assert_array_equal(joined.outputs.draws, F)
    np.testing.assert_array_equal(joined.log_prob(Y), pred.log_prob(Y))
    closed = Predictive(Outputs(mean=MEAN, variance=VARIANCE, extra={"scale": NOISE}), Gaussian())
    np.testing.assert_array_equal(concatenate([closed.rows(slice(0, 2)), closed.rows(slice(2, 4))]).variance, closed.variance)
    other = gaussian_draws(outputs=Outputs(draws=F, weights=WEIGHTS, extra={"scale": 2 * SCALE}))
    with pytest.raises(ModelError, match="cannot be joined"):
        concatenate([pred, other])
    with pytest.raises(ModelError, match="cannot be joined"):
        concatenate([pred, closed])


def test_mix_of_draws_is_the_predictive_of_all_draws():
    first = Predictive(Outputs(draws=F[:2], extra={"scale": SCALE[:2]}), Gaussian())
    second = Predictive(Outputs(draws=F[2:4], extra={"scale": SCALE[2:4]}), Gaussian())
    weights = np.array([0.125, 0.125, 0.375, 0.375, 0.0])
    whole = Predictive(Outputs(draws=F, weights=weights, extra={"scale": SCALE}), Gaussian())
    mixed = mix([first, second], [1.0, 3.0])
    for view in ("mean", "variance", "aleatoric", "epistemic", "std"):
        np.testing.assert_allclose(getattr(mixed, view), getattr(whole, view), rtol=1e-10)
    for view in ("entropy", "mutual_information", "aleatoric_entropy"):
        np.testing.assert_allclose(getattr(mixed, view), getattr(whole, view), atol=1e-7)
    np.testing.assert_allclose(mixed.log_prob(Y), whole.log_prob(Y), rtol=1e-10)
    np.testing.assert_allclose(mixed.cdf(Y), whole.cdf(Y), rtol=1e-10)
    np.testing.assert_allclose(mixed.quantile([0.05, 0.95]), whole.quantile([0.05, 0.95]), rtol=1e-9)
    np.testing.assert_allclose(mixed.rows(slice(1, 3)).mean, whole.mean[1:3], rtol=1e-10)
    drawn = mixed.sample(4, 4000)
    assert np.all(np.abs(drawn.mean(0) - whole.mean) < 6 * whole.std / np.sqrt(4000))
    for ours, theirs in zip(mixed.gaussian_components(), whole.gaussian_components(), strict=True):
        np.testing.assert_allclose(ours, theirs[:4], rtol=1e-10)


def test_mix_of_different_models_and_of_classes():
    gauss = Predictive(Outputs(mean=MEAN, variance=VARIANCE, extra={"scale": NOISE}), Gaussian())
    student = Predictive(Outputs(draws=F, extra={"scale": SCALE}), StudentT(5.0))
    mixed = mix([gauss, student])
    np.testing.assert_allclose(
        mixed.variance, 0.5 * (gauss.variance + student.variance) + 0.25 * (gauss.mean - student.mean) ** 2, rtol=1e-10
    )
    np.testing.assert_allclose(mixed.log_prob(Y), np.logaddexp(gauss.log_prob(Y), student.log_prob(Y)) - np.log(2), rtol=1e-10)
    lower, upper = mixed.interval(0.8)
    np.testing.assert_allclose(mixed.cdf(lower), 0.1, rtol=1e-9)
    np.testing.assert_allclose(mixed.cdf(upper), 0.9, rtol=1e-9)
    assert mixed.gaussian_components() is None
    one = Predictive(Outputs(draws=ALL[4][2][:2]), Categorical(3))
    two = Predictive(Outputs(draws=ALL[4][2][2:]), Categorical(3))
    classes = mix([one, two], [0.4, 0.6])
    np.testing.assert_allclose(classes.probs, 0.4 * one.probs + 0.6 * two.probs, rtol=1e-12)
    assert np.all(classes.mutual_information <= classes.entropy)
    np.testing.assert_allclose(mix([one, two], [1.0, 0.0]).probs, one.probs)
    with pytest.raises(ModelError, match="not of the same targets"):
        mix([gauss, one])
    for wrong in ([1.0], [-1.0, 2.0], [0.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(ModelError, match="weights cannot be used"):
            mix([one, two], wrong)
    with pytest.raises(ModelError, match="Nothing to average"):
        mix([])


def test_an_unresolved_entropy_warns(monkeypatch):
    import aleator._quadrature

    def coarse(part, panels, split=None):
        nodes = np.broadcast_to(np.linspace(-1, 1, 3)[:, None, None], (3, part.num_rows, part.num_columns)).copy()
        return nodes, np.full_like(nodes, 0.1)

    monkeypatch.setattr(aleator._quadrature, "integration_rule", coarse)
    with pytest.warns(HealthWarning, match=r"integrates to 1 only within"):
        _ = gaussian_draws().entropy
