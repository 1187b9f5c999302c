"""Latent Dirichlet allocation: against enumeration of all assignments, and the promise that no step lowers the bound."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from scipy.special import digamma, gammaln, logsumexp

import aleator as al
from aleator.data import Data
from aleator.latent.lda import LDA, Proportions, _special, coherence, collapsed_gibbs, documents, perplexity, top_words, topics_of

TINY = [[0, 0, 1], [2, 1, 2, 2]]


def corpus(num: int = 40, length: int = 30, num_words: int = 12) -> list[list[int]]:
    """Three topics of separate words."""
    rng = np.random.default_rng(0)
    share = num_words // 3
    return [[int(rng.integers(share) + share * rng.choice(3, p=theta)) for _ in range(length)] for theta in rng.dirichlet([0.3] * 3, num)]


def dirichlet_multinomial(counts: np.ndarray, alpha: np.ndarray) -> float:
    return float(gammaln(alpha.sum()) - gammaln(alpha.sum() + counts.sum()) + np.sum(gammaln(alpha + counts) - gammaln(alpha)))


def dirichlet_log(alpha: np.ndarray) -> float:
    """log of the normaliser B(α)."""
    return float(np.sum(gammaln(alpha)) - gammaln(alpha.sum()))


def test_the_bound_and_collapsed_gibbs_against_all_assignments() -> None:
    """K = 2, seven words: 128 assignments z, summed."""
    model, alpha, flat = LDA(2, alpha=(0.5, 0.7), concentration=0.6, num_words=3), np.array([0.5, 0.7]), np.full(3, 0.6)
    doc, word = np.repeat([0, 1], [3, 4]), np.concatenate(TINY)
    logs, alike = [], []
    for labels in itertools.product([0, 1], repeat=7):
        z = np.array(labels)
        by_doc = np.array([np.bincount(z[doc == d], minlength=2) for d in range(2)])
        by_topic = np.array([np.bincount(word[z == k], minlength=3) for k in range(2)])
        logs.append(sum(dirichlet_multinomial(row, alpha) for row in by_doc) + sum(dirichlet_multinomial(row, flat) for row in by_topic))
        shares = (by_doc + alpha) / (by_doc + alpha).sum(1, keepdims=True)
        alike.append(shares[0] @ shares[1])
    logs, weights = np.array(logs), np.exp(np.array(logs) - logsumexp(logs))
    fit = al.fit(0, model, documents(TINY), al.CAVI(num_restarts=1))
    assert logsumexp(logs) - 3.0 < fit.log_evidence.value < logsumexp(logs)
    chains = collapsed_gibbs(0, model, TINY, num_samples=4000, num_warmup=100, num_chains=2, thin=3)
    found = np.einsum("csk,csk->cs", chains.proportions[:, :, 0], chains.proportions[:, :, 1])
    for values, want in ((found, weights @ np.array(alike)), (chains.log_joint, weights @ logs)):
        error = float(al.convergence.mcse(values[..., None])[0])
        assert abs(values.mean() - want) < 5 * error and error < 0.05


def test_the_bound_of_a_document_is_a_bound_at_its_fixed_point() -> None:
    rng = np.random.default_rng(0)
    alpha, topics = np.array([0.4, 0.9, 0.2]), rng.dirichlet(np.ones(4), 3)
    model = LDA(3, alpha=alpha, num_words=4)
    params = {"topics": np.log(topics[:, :-1] / topics[:, -1:])}
    docs = [[0, 1, 1, 3], [], [2]]
    value, gamma = np.asarray(model.log_prob(params, docs)), np.asarray(model.encode(params, docs))
    for n, words in enumerate(docs):
        terms = []
        for z in itertools.product(range(3), repeat=len(words)):
            terms.append(
                dirichlet_multinomial(np.bincount(np.array(z, int), minlength=3), alpha)
                + sum(np.log(topics[k, w]) for k, w in zip(z, words, strict=True))
            )
        assert value[n] <= logsumexp(terms) + 1e-12
        mean_log = digamma(gamma[n]) - digamma(gamma[n].sum())
        shares = np.array([np.exp(mean_log) * topics[:, w] for w in words]).reshape(-1, 3)
        np.testing.assert_allclose(gamma[n], alpha + (shares / shares.sum(1, keepdims=True)).sum(0), rtol=1e-6)
        own = np.sum((gamma[n] - alpha) * mean_log) - dirichlet_log(gamma[n]) + dirichlet_log(alpha)  # KL of two Dirichlets
        assert abs(value[n] - (np.log(shares.sum(1)).sum() - own)) < 1e-9
    assert abs(value[1]) < 1e-12  # no words, nothing learned
    with jax.enable_x64(True):  # the gradient, γ moving along: by finite differences
        batch = Data(None, documents(docs)).batch()
        total = jax.jit(lambda p: jnp.sum(model.log_likelihood({"topics": p}, batch)))
        at, way = jnp.asarray(params["topics"]), jnp.asarray(rng.normal(size=(3, 3)))
        bound = model.bind(None, documents(docs))
        total = jax.jit(lambda p: jnp.sum(bound.log_likelihood({"topics": p}, batch)))
        numeric = (total(at + 1e-5 * way) - total(at - 1e-5 * way)) / 2e-5
        assert abs(float(jnp.vdot(jax.grad(total)(at), way) - numeric)) < 1e-5


def test_lengths_and_forms_of_documents_do_not_matter() -> None:
    """Long and short documents are met in groups of like length; the same counts come of lists, sparse and dense matrices."""
    rng = np.random.default_rng(0)
    dense = rng.poisson(rng.uniform(0.01, 2.0, size=(37, 1)) * np.ones((1, 90)))
    dense[5] = 0
    rows = documents(sparse.csr_matrix(dense))
    lists = [np.repeat(np.arange(90), row).tolist() for row in dense]
    assert rows["word"].shape[1] > 40
    for other in (documents(dense), documents(lists)):
        assert np.array_equal(other["word"], rows["word"]) and np.array_equal(other["count"], rows["count"])
    model = LDA(3).bind(None, rows)
    with jax.enable_x64(True):
        natural = model.expected({"topics": jnp.asarray(rng.gamma(1.0, 1.0, (3, 90)))})
        weight = rng.uniform(size=37)
        sums, terms = jax.jit(model.e_step)(natural, Data(None, rows, weight).batch())
        want, others = jax.jit(model.e_step)(natural, Data(None, dense, weight).batch())
    np.testing.assert_allclose(terms, others, rtol=1e-9)
    np.testing.assert_allclose(sums["topics"], want["topics"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(sums["topics"]).sum(), weight @ dense.sum(1), rtol=1e-9)


def test_no_step_lowers_the_bound_and_topics_are_found() -> None:
    y = documents(corpus())
    fits = {
        "bound": al.fit(0, LDA(3, alpha=0.3, concentration=0.2, learn_alpha=True), y, al.CAVI(num_restarts=2)),
        "objective": al.fit(0, LDA(3, alpha=0.3, concentration=1.0), y, al.EM(num_restarts=2)),
    }
    for name, fit in fits.items():
        assert "never falling" in fit.status, fit.status
        trace = fit.info[name][0]  # of the first start
        trace = trace[np.isfinite(trace) & (trace != 0.0)]  # without the steps before the first value, and after it stopped
        rounding = np.finfo(np.float32).eps * np.abs(trace).max()  # of the trace; the status judges in double precision
        assert np.diff(trace).min() >= -rounding and trace[-1] > trace[0] + 10.0
        found = {frozenset(words) for words in top_words(fit, None, 4)}
        assert found == {frozenset(range(4 * k, 4 * k + 4)) for k in range(3)}
    assert perplexity(1, fits["bound"], y) < 9.0
    mixed = np.zeros((1, 12))
    mixed[0, [0, 1, 4, 8]] = 0.25
    assert np.all(coherence(fits["bound"], y, num=4) > coherence(mixed, y, num=4))


def test_online_from_arrays_and_from_a_stream() -> None:
    docs = corpus()
    y = documents(docs)
    method = al.CAVI(num_steps=60, num_restarts=1, batch_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", al.HealthWarning)
        fit = al.fit(0, LDA(3, alpha=0.3, concentration=0.2), y, method)

        def make(epoch: int, start: int):
            for first in range(10 * start, 40, 10):
                yield None, documents(docs[first : first + 10], num_words=12, length=12)

        streamed = al.fit(0, LDA(3, alpha=0.3, concentration=0.2, num_words=12), al.Stream(make, 40), method)
    for one in (fit, streamed):
        assert np.isfinite(one.log_evidence.value) and perplexity(1, one, y) < 11.0


def test_special_functions_and_alpha() -> None:
    with jax.enable_x64(True):
        x = np.geomspace(1e-4, 1e7, 400)
        np.testing.assert_allclose(_special.digamma(jnp.asarray(x)), digamma(x), rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(_special.gammaln(jnp.asarray(x)), gammaln(x), rtol=1e-11, atol=1e-11)
        family, truth = Proportions((1.0, 1.0, 1.0)), np.array([0.05, 2.0, 30.0])
        mean_log = digamma(truth) - digamma(truth.sum())
        found = np.exp(family.mode({"log": jnp.asarray(50.0 * mean_log), "number": jnp.asarray(50.0)}))
    np.testing.assert_allclose(found, truth, rtol=1e-8)


def test_judgements_by_hand() -> None:
    y = documents([[0, 1], [0, 1, 2], [2], []])
    uniform = np.full((2, 4), 0.25)
    assert abs(perplexity(0, (uniform, 0.5), y) - 4.0) < 1e-9
    topic = np.array([[0.5, 0.3, 0.2, 0.0]])  # words 0 and 1 meet twice, others once, in four documents
    umass = np.mean(np.log([3 / 2, 2 / 2, 2 / 2]))
    assert abs(coherence(topic, y, "umass", 3)[0] - umass) < 1e-12
    npmi = np.mean([np.log(0.5 / 0.25) / -np.log(0.5), 0.0, 0.0])
    assert abs(coherence(topic, y, "npmi", 3)[0] - npmi) < 1e-12
    assert top_words(topic, ["a", "b", "c", "d"], 2) == [["a", "b"]]


def test_bad_input_is_refused() -> None:
    for source, match in (
        (np.array([[1.0, -1.0]]), "whole numbers"),
        (np.array([[0.5, 1.0]]), "whole numbers"),
        (sparse.csr_matrix([[0.0, 1.5]]), "whole numbers"),
        ([[0, -2]], "not a list of word numbers"),
        ([], "no documents"),
    ):
        with pytest.raises(al.DataError, match=match):
            documents(source)
    with pytest.raises(al.DataError, match="No document has a word"):
        al.fit(0, LDA(2), documents([[], []]), al.CAVI())
    with pytest.raises(al.DataError, match="whole numbers"):
        al.fit(0, LDA(2), np.array([[1.0, -1.0]]), al.CAVI())
    with pytest.raises(al.DataError, match="not in the vocabulary"):
        al.fit(0, LDA(2, num_words=2), documents([[0, 5]]), al.CAVI())
    with pytest.raises(al.DataError, match="not documents"):
        al.fit(0, LDA(2), np.ones(4), al.CAVI())
    with pytest.raises(al.ModelError, match="most probable"):
        al.fit(0, LDA(2), documents(TINY), al.EM())
    with pytest.raises(al.ModelError, match="collapsed_gibbs"):
        al.fit(0, LDA(2), documents(TINY), al.Gibbs(num_samples=2, num_warmup=1, num_chains=1))
    for bad in ({"num_topics": 0}, {"num_topics": 2, "alpha": -1.0}, {"num_topics": 2, "concentration": 0.0}):
        with pytest.raises(al.ModelError):
            LDA(**bad)


def test_more_topics_than_documents_and_one_document() -> None:
    fit = al.fit(0, LDA(5), documents([[0, 1, 1]]), al.CAVI(num_restarts=1))
    assert np.isfinite(fit.log_evidence.value) and np.allclose(topics_of(fit).sum(1), 1.0)
