"""Secret noise: it is normal to the tails, no two calls have anything in common, and two servers add theirs up."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
from partwise.privacy import secret_noise
from partwise.privacy.secret_noise import noise_words, secret_normals
from partwise.privacy.sum_words import SumWords, added
from partwise.privacy.two_servers import Agreement, TableForm, with_noise

SURE = 1e-6  # chance of a false alarm
COUNT = 400_000


def seeded(number: int):
    return np.random.default_rng(number).bytes


def signed(words: np.ndarray) -> np.ndarray:
    return words.view(np.int32).astype(np.float64)


def check_spread(numbers: np.ndarray, deviation: float) -> None:
    """The mean is zero and the variance is right (chi-square)."""
    count, squares = numbers.size, float(np.sum(np.square(numbers / deviation)))
    assert abs(numbers.mean()) < stats.norm.isf(SURE / 2) * deviation / math.sqrt(count)
    assert stats.chi2.ppf(SURE / 2, count) < squares < stats.chi2.isf(SURE / 2, count)


@pytest.mark.parametrize("count", [COUNT, COUNT - 1])
def test_they_are_standard_normal(count):
    numbers = secret_normals(count, seeded(1))
    assert numbers.shape == (count,)
    check_spread(numbers, 1.0)
    assert stats.kstest(numbers, "norm").pvalue > SURE


@pytest.mark.parametrize("far", [2.0, 3.0, 4.0, 4.5])
def test_the_tails_are_as_heavy_as_they_should_be(far):
    """An outlier of a client hides behind one of the noise."""
    for sign in (1, -1):
        beyond = int((sign * secret_normals(COUNT, seeded(2)) > far).sum())
        assert stats.binomtest(beyond, COUNT, stats.norm.sf(far)).pvalue > SURE


def test_the_halves_of_a_pair_tell_nothing_of_each_other():
    """Two numbers come from the same two uniform ones, by a cosine and a sine: their squares are independent."""
    first, second = secret_normals(COUNT, seeded(3)).reshape(2, -1)
    for one, two in ((first, second), (first**2, second**2), (np.abs(first), second)):
        assert stats.pearsonr(one, two).pvalue > SURE
    assert stats.pearsonr(first[1:], first[:-1]).pvalue > SURE


def test_no_two_calls_have_anything_in_common():
    calls = np.stack([secret_normals(2000) for _ in range(20)])
    between = np.corrcoef(calls)[np.triu_indices(20, 1)]
    assert np.abs(between).max() < stats.norm.isf(SURE / 2 / len(between)) / math.sqrt(2000)
    assert len(np.unique(calls)) == calls.size


def test_the_key_is_asked_for_anew_for_every_chunk(monkeypatch):
    """A key stream that is used twice would show the difference of two sums."""
    monkeypatch.setattr(secret_noise, "CHUNK", 100)
    asked = []

    def random(length: int) -> bytes:
        asked.append(os.urandom(length))
        return asked[-1]

    words = noise_words((25, 10), 1e6, random).reshape(-1)
    assert [len(key) for key in asked] == [16, 16, 16]
    assert len(set(asked)) == 3
    assert len(np.unique(words)) > 240  # with one key, the chunks would be the same


@pytest.mark.parametrize("deviation", [0.4, 3.0, 1000.0, 1e7])
def test_words_have_the_right_spread(deviation):
    """Rounding adds a twelfth to the variance, if the noise is not much smaller than the grid."""
    numbers = signed(noise_words((COUNT // 100, 100), deviation, seeded(4)))
    grid = np.arange(-8, 9)
    chances = stats.norm.cdf((grid + 0.5) / deviation) - stats.norm.cdf((grid - 0.5) / deviation)
    exact = np.sum(grid**2 * chances) if deviation < 1 else deviation**2 + 1 / 12
    kurtosis = np.sum(grid**4 * chances) / exact**2 if deviation < 1 else 3.0
    close = stats.norm.isf(SURE / 2) * math.sqrt((kurtosis - 1) / numbers.size)
    assert np.mean(numbers**2) == pytest.approx(exact, rel=close)
    assert abs(numbers.mean()) < stats.norm.isf(SURE / 2) * math.sqrt(exact / numbers.size)


def test_words_wrap_around():
    """Noise far beyond 32 bits is uniform modulo 2^32, and below zero is the upper half."""
    tops = (noise_words((COUNT,), 2.0**34, seeded(5)) >> np.uint32(24)).astype(np.intp)
    assert stats.chisquare(np.bincount(tops, minlength=256)).pvalue > SURE
    words = noise_words((COUNT,), 1000.0, seeded(6))
    assert words.dtype == np.uint32
    below = int((words >= 2**31).sum())
    assert (
        stats.binomtest(
            below, COUNT, 0.5 - 0.5 * stats.norm.cdf(0.5e-3) + 0.5 * stats.norm.cdf(-0.5e-3)
        ).pvalue
        > SURE
    )
    assert not noise_words((7,), 0.0).any()


def test_the_noise_of_two_servers_adds_up_in_every_word():
    """Each adds enough alone, so that the other one may be curious: together they have sqrt(2) times as much, also
    in rows that nobody wrote to."""
    forms = {"item": TableForm(1000, 5, 12, 4)}
    agreement = Agreement("run", 4002, 2, forms, noise=500.0, count_noise=20.0)
    secret = np.random.default_rng(0).integers(0, 2**32, 16_002, np.uint32)
    first = SumWords(secret[:4002], {"item": secret[4002:].reshape(1000, 12)})
    second = SumWords(-first.dense, {"item": -first.tables["item"]})  # the sum is zero
    total = added(with_noise(agreement, first, seeded(7)), with_noise(agreement, second, seeded(8)))
    wide = math.sqrt(2 * (500**2 + 1 / 12))
    check_spread(signed(total.dense[:-2]), wide)
    check_spread(signed(total.tables["item"]), wide)
    rows = np.sum(np.square(signed(total.tables["item"]) / wide), axis=1)
    assert rows.min() > stats.chi2.ppf(SURE / 2000, 12)  # every row
    assert rows.max() < stats.chi2.isf(SURE / 2000, 12)
    counts = [
        signed(with_noise(agreement, first, seeded(9 + n)).dense[-2:] - first.dense[-2:]) for n in range(300)
    ]
    check_spread(np.array(counts), math.sqrt(400 + 1 / 12))
