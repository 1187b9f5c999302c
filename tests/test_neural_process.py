"""Examples of classes never met, against the exact prediction: classes are random patterns, members copies of them with bits flipped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator.latent import VAE, Pooled, episodes

BITS, FLIP, SHOTS = 6, 0.1, 5


def classes(seed: int, num: int, members: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2, (num, BITS))
    flips = rng.uniform(size=(num, members, BITS)) < FLIP
    return (patterns[:, None] ^ flips).reshape(-1, BITS).astype(np.float32), np.repeat(np.arange(num), members)


def exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log p(y | examples): every bit of the pattern is 0 or 1 with even odds, and each example votes with weight log((1 − f)/f)."""
    there = x[..., -1:]
    votes = np.sum(there * (2 * x[..., :-1] - 1), axis=1)
    one = 1 / (1 + (FLIP / (1 - FLIP)) ** votes)  # P(the pattern's bit is 1 | examples)
    p = one * (1 - FLIP) + (1 - one) * FLIP
    return np.sum(np.where(y == 1, np.log(p), np.log1p(-p)), axis=1)


def test_pooling_knows_no_order_and_passes_over_empty_places() -> None:
    pool = Pooled(BITS, (8,), 4)
    params = pool.init(jax.random.key(0))
    x, _ = episodes(0, *classes(0, 3, 10), num_rows=4, num_shots=3, max_shots=SHOTS)
    got = np.asarray(pool.apply(params, jnp.asarray(x)))
    np.testing.assert_allclose(pool.apply(params, jnp.asarray(x[:, [4, 2, 0, 1, 3]])), got, atol=1e-6)
    x[:, 3:, :-1] = 7.0  # what lies in an empty place does not matter
    np.testing.assert_allclose(pool.apply(params, jnp.asarray(x)), got, atol=1e-6)
    np.testing.assert_allclose(got[:, -1], 3 / SHOTS)
    np.testing.assert_allclose(np.asarray(pool.apply(params, jnp.zeros((1, SHOTS, BITS + 1)))), 0.0)


def test_sets_are_of_one_class_and_leave_out_the_row_itself() -> None:
    y = np.arange(40.0)[:, None]
    x, target = episodes(0, y, np.repeat(np.arange(4), 10), num_rows=300, num_shots=(0, SHOTS))
    there = x[..., 1] == 1
    assert set(there.sum(axis=1)) == set(range(SHOTS + 1))
    for members, ok, own in zip(x[..., 0], there, target[:, 0], strict=True):
        assert np.all(members[ok] // 10 == own // 10)
        assert own not in members[ok]
        assert len(set(members[ok])) == ok.sum()
    with pytest.raises(al.DataError, match="more rows than shots"):
        episodes(0, y, np.repeat(np.arange(8), 5), num_rows=3, num_shots=5)


@pytest.fixture(scope="module")
def fit() -> Any:
    x, y = episodes(0, *classes(1, 400, 20), num_rows=6000, num_shots=(0, SHOTS))
    model = VAE(4, (48,), (48,), al.Bernoulli(), context=Pooled(BITS, (48,), 24))
    return al.fit(0, model, (x, y), al.Amortised(num_steps=4000, batch_size=100, learning_rate=3e-3))


def test_more_examples_of_a_new_class_predict_it_better(fit: Any) -> None:
    found, truth = {}, {}
    for shots in (0, 1, 5):
        x, y = episodes(9, *classes(2, 300, 20), num_rows=1000, num_shots=shots, max_shots=SHOTS)
        found[shots] = al.latent.log_prob(1, fit, y, 100, x=x)
        truth[shots] = exact(x, y)
    assert found[0].mean() + 0.5 < found[1].mean()
    assert found[1].mean() + 0.5 < found[5].mean()
    for shots in found:
        gap = truth[shots] - found[shots]
        error = gap.std() / np.sqrt(len(gap))
        assert -5 * error < gap.mean() < 0.3, shots  # no better than the exact prediction, and not much worse


def test_saved_and_loaded(fit: Any, tmp_path: Any) -> None:
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit")
    x, y = episodes(9, *classes(2, 3, 20), num_rows=5, num_shots=2, max_shots=SHOTS)
    np.testing.assert_array_equal(al.latent.log_prob(1, again, y, 10, x=x), al.latent.log_prob(1, fit, y, 10, x=x))


def test_new_members_look_like_the_examples(fit: Any) -> None:
    pattern = np.array([1, 0, 1, 1, 0, 0], np.float32)
    x = np.concatenate([np.tile(pattern, (1, SHOTS, 1)), np.ones((1, SHOTS, 1))], axis=2)
    drawn = fit.model.simulate(0, fit.posterior.params, 400, x=x)[1][:, 0]
    agree = (drawn == pattern).mean()
    assert abs(agree - (1 - FLIP)) < 0.06
