"""Skellam noise from secret randomness: its distribution at every size, in sums, and to the tails."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
from partwise.privacy import secret_noise, skellam
from partwise.privacy.skellam import _log_chance, secret_skellam, skellam_words

SURE = 1e-6  # chance of a false alarm
COUNT = 300_000


def seeded(number: int):
    return np.random.default_rng(number).bytes


def check_chances(numbers: np.ndarray, variance: float) -> None:
    """A chi-square test against the exact chances, of numbers that occur often enough."""
    far = math.ceil(4 * math.sqrt(variance)) + 2
    inner = np.arange(-far, far + 1)
    width = max(1, far // 60)
    cells = np.append(stats.skellam.cdf(inner[::width], variance / 2, variance / 2), 1.0)
    expected = np.diff(np.append(0.0, cells)) * len(numbers)
    found = np.bincount(np.searchsorted(inner[::width], numbers), minlength=len(expected))
    often = expected > 20
    kept, hoped = (
        np.append(found[often], found[~often].sum()),
        np.append(expected[often], expected[~often].sum()),
    )
    assert stats.chisquare(kept, hoped * kept.sum() / hoped.sum()).pvalue > SURE


def check_spread(numbers: np.ndarray, variance: float) -> None:
    """Mean and variance are right; the kurtosis of a Skellam number is 3 + 1 / variance."""
    close = stats.norm.isf(SURE / 2) * math.sqrt((2 + 1 / variance) / numbers.size)
    assert np.mean(numbers**2) == pytest.approx(variance, rel=close)
    assert abs(np.mean(numbers)) < stats.norm.isf(SURE / 2) * math.sqrt(variance / numbers.size)


@pytest.mark.parametrize("variance", [0.3, 7.0, 199.9, 200.1, 437.3, 3000.0])
def test_they_have_the_chances_of_skellam_numbers(variance):
    """On both sides of where the table ends and rejection begins."""
    numbers = secret_skellam(COUNT, variance, seeded(1))
    assert numbers.dtype == np.int64
    check_chances(numbers, variance)
    check_spread(numbers.astype(float), variance)


@pytest.mark.parametrize("variance", [1e6, 1e9 + 0.5, 1e13])
def test_large_ones_are_as_normal_numbers(variance):
    """The difference is of the order of 1 / variance. Numbers are whole, and all rests are as likely."""
    numbers = secret_skellam(COUNT, variance, seeded(2))
    check_spread(numbers.astype(float), variance)
    assert stats.kstest(numbers / math.sqrt(variance), "norm").pvalue > SURE
    assert stats.chisquare(np.bincount(numbers % 16, minlength=16)).pvalue > SURE


@pytest.mark.parametrize("far", [2.0, 3.0, 4.0])
def test_the_tails_are_as_heavy_as_they_should_be(far):
    numbers = secret_skellam(COUNT, 400.0, seeded(3))
    for sign in (1, -1):
        beyond = int((sign * numbers > far * 20).sum())
        assert stats.binomtest(beyond, COUNT, stats.skellam.sf(far * 20, 200, 200)).pvalue > SURE


@pytest.mark.parametrize("rate", [100.0, 777.7, 1e4])
def test_the_chance_of_a_poisson_number(rate):
    numbers = np.arange(max(1, int(rate - 9 * math.sqrt(rate))), int(rate + 9 * math.sqrt(rate)))
    found = _log_chance((numbers - math.floor(rate)).astype(float), rate)
    np.testing.assert_allclose(found, stats.poisson.logpmf(numbers, rate), atol=2e-9)


@pytest.mark.parametrize("rate", [1e8 + 0.25, 3e15])
def test_the_chances_of_large_rates_add_up(rate):
    """Where k log(rate) - rate - log(k!) has no digits left."""
    spread = math.sqrt(rate)
    numbers = np.rint(np.linspace(-9 * spread, 9 * spread, 20_001))
    chances = np.exp(_log_chance(numbers, rate))
    assert np.trapezoid(chances, numbers) == pytest.approx(1.0, abs=1e-8)
    assert np.trapezoid(chances * (numbers - rate % 1), numbers) / spread == pytest.approx(0.0, abs=1e-6)


def test_the_noise_of_clients_adds_up_to_that_of_a_sum():
    shares = [skellam_words(COUNT // 2, 5.0, seeded(10 + client)) for client in range(6)]
    total = np.sum(shares, 0, dtype=np.uint32).view(np.int32).astype(np.int64)
    check_chances(total, 30.0)
    check_spread(total.astype(float), 30.0)


def test_words_wrap_around():
    words = skellam_words(COUNT, 1e6, seeded(4))
    assert words.dtype == np.uint32
    check_spread(words.view(np.int32).astype(float), 1e6)
    assert not skellam_words(7, 0.0).any()
    assert skellam_words(0, 1e6).shape == (0,)


@pytest.mark.parametrize("variance", [20.0, 1e6])
def test_no_key_is_used_twice(monkeypatch, variance):
    """The stream of a key that is used twice would show the difference of two lines."""
    monkeypatch.setattr(skellam, "CHUNK", 100)
    asked = []

    def random(length: int) -> bytes:
        asked.append(os.urandom(length))
        return asked[-1]

    words = skellam_words(250, variance, random)
    assert len(set(asked)) == len(asked) >= 6
    assert len(np.unique(words)) > 10
    assert secret_noise.CHUNK > skellam.CHUNK


def test_no_two_calls_have_anything_in_common():
    calls = np.stack([secret_skellam(2000, 1e6) for _ in range(20)])
    between = np.corrcoef(calls)[np.triu_indices(20, 1)]
    assert np.abs(between).max() < stats.norm.isf(SURE / 2 / len(between)) / math.sqrt(2000)
