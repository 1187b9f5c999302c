"""Several drawings of one image, strings, an adversarial generator: distances by hand, moments of known distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aleator as al
from aleator.latent import VAE, Strings, Symbols, adversarial, energy_distance, segmenter, strings

RNG = np.random.default_rng(0)


class TestEnergyDistance:
    def test_by_hand(self) -> None:
        left, right, both, none = [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]
        samples = np.array([[left], [both]])  # d(left, both) = ½
        annotations = np.array([[left], [right], [none]])  # 1 from one another
        across = np.mean([0, 1, 1, 0.5, 0.5, 1])
        np.testing.assert_allclose(energy_distance(samples, annotations), [2 * across - 0.5 - 1])
        np.testing.assert_allclose(energy_distance(np.array([[none]]), np.array([[none], [none]])), [0.0])  # two empty ones agree

    def test_is_zero_in_expectation_for_the_annotators_themselves_and_above_it_for_others(self) -> None:
        """One of two drawings with even odds: draws of the same law have distance 0, whatever their number; pixels drawn alone have more."""
        rng = np.random.default_rng(1)
        n = 4000
        kinds = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
        annotations, samples = (kinds[rng.integers(0, 2, (number, n))] for number in (3, 4))
        same = energy_distance(samples, annotations)
        assert abs(same.mean()) < 5 * same.std() / np.sqrt(n)
        alone = energy_distance(rng.integers(0, 2, (4, n, 6)), annotations)
        assert alone.mean() > 0.1
        mode = energy_distance(np.broadcast_to(kinds[:1], (1, n, 6)), annotations)  # E = 2·½ − 0 − ½
        assert abs(mode.mean() - 0.5) < 5 * mode.std() / np.sqrt(n)

    def test_probabilities_are_refused(self) -> None:
        with pytest.raises(al.DataError, match="zeros and ones"):
            energy_distance(np.full((2, 3, 4), 0.5), np.ones((2, 3, 4)))


def test_drawings_of_an_ambiguous_image_are_whole() -> None:
    """A bright and a dim square: every annotator marks the bright one, and half of them the dim one, all of it or nothing."""
    n, side = 80, 8
    images, drawings = np.zeros((n, side, side, 1), np.float32), np.zeros((n, side, side), np.float32)
    bright, dim = np.s_[1:4, 1:4], np.s_[4:7, 4:7]
    images[:, 4:7, 4:7] = 0.5
    images[:, 1:4, 1:4] = 1.0
    images += 0.05 * RNG.normal(size=images.shape).astype(np.float32)
    drawings[(slice(None), *bright)] = 1.0
    drawings[(slice(0, None, 2), *dim)] = 1.0
    fit = al.fit(0, segmenter((side, side, 1), 2, (6,)), (images, drawings), al.Amortised(400, 20, 1e-2))
    drawn = fit.model.simulate(1, fit.posterior.params, 40, x=images[:10])[1]
    assert drawn.shape == (40, 10, side, side)
    assert drawn[(..., *bright)].mean() > 0.95
    pixels = RNG.uniform(size=drawn.shape) < drawn.mean(axis=0)
    whole = lambda drawn: np.mean(np.abs(drawn[(..., *dim)].mean(axis=(2, 3)) - 0.5) > 0.3)  # all of the dim square, or next to nothing
    assert whole(drawn) > 0.7
    assert whole(pixels) < 0.2  # 9 pixels alone: 4 % of draws
    assert 0.3 < drawn[(..., *dim)].mean() < 0.7
    truth = drawings[RNG.integers(0, n, (6, 10))]  # images differ by noise alone, so that any drawing may be of any of them
    gain = energy_distance(pixels, truth) - energy_distance(drawn, truth)
    assert gain.mean() > 3 * gain.std() / np.sqrt(len(gain))


class TestStrings:
    def test_there_and_back(self) -> None:
        texts = ["CCO", "BrCCl", "[NH4+]C", ""]
        table = Strings.of(texts, strings.SMILES)
        rows = table.encode(texts)
        assert rows.shape == (4, 3)
        assert table.decode(rows) == texts
        for bad in ("CCCC", "CN"):  # too long, unknown
            with pytest.raises(al.DataError, match="does not fit"):
                table.encode([bad])
        with pytest.raises(al.DataError, match="no symbols"):
            Strings.of([""])

    def test_an_autoencoder_writes_what_it_has_read(self, tmp_path: Any) -> None:
        texts = ["AB", "BA", "AAC", "CCA", "C"]
        table = Strings.of(texts)
        rows = np.tile(table.encode(texts), (20, 1))
        fit = al.fit(0, VAE(2, (32,), (32,), Symbols(table.num_symbols)), rows, al.Amortised(1200, 50, 1e-2))
        centre, _ = fit.model.encode(fit.posterior.params, rows[:5])
        assert table.decode(fit.model.decode(fit.posterior.params, centre)) == texts
        drawn = table.decode(al.latent.simulate(1, fit, 400))
        assert np.mean([text in texts for text in drawn]) > 0.6
        fit.save(tmp_path / "fit")
        again = al.load(tmp_path / "fit")
        np.testing.assert_array_equal(again.model.encode(again.posterior.params, rows[:5])[0], centre)


class TestAdversarial:
    def test_moments_of_a_gaussian(self) -> None:
        """Means to .15 and covariances to .25 of the spread: what so small a game reaches."""
        mix = np.array([[2.0, 0.0], [1.0, 0.5]])
        y = RNG.normal(size=(3000, 2)) @ mix.T + [5.0, -3.0]
        made = adversarial(0, y, 4, generator=(32, 32), critic=(32, 32), num_steps=4000)
        assert made.losses.shape == (4000, 2)
        drawn = made.simulate(1, 5000)
        spread = y.std(axis=0)
        assert np.all(np.abs(drawn.mean(axis=0) - y.mean(axis=0)) < 0.15 * spread)
        assert np.all(np.abs(np.cov(drawn.T) - np.cov(y.T)) < 0.25 * np.outer(spread, spread))

    def test_images_keep_their_shape_and_constant_pixels(self) -> None:
        y = RNG.uniform(size=(50, 3, 3)).astype(np.float32)
        y[:, 0, 0] = 2.0
        made = adversarial(0, y, 2, generator=(8,), critic=(8,), num_steps=5)
        assert made.simulate(0, 4).shape == (4, 3, 3)
        with pytest.raises(al.DataError, match="rows"):
            adversarial(0, y[0, 0], 2)
