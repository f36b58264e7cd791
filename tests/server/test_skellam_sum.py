"""Skellam noise in simulated sums, and in the lines of clients: in every word, and as much whoever comes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.privacy.skellam import NoiseShare
from partwise.server.encoding import fixed_point
from partwise.server.masked_form import LineForm, MaskingForm
from partwise.server.mean import mean, uniform
from partwise.server.messages import About
from partwise.server.private_sum import Door, private
from partwise.server.skellam_sum import skellam, skellam_sum
from partwise.server.total import Contribution, zero_total
from partwise.server.word_form import WordForm
from partwise.tasks.matrix_factorization import matrix_factorization

SURE = 1e-6  # chance of a false alarm
BITS = 16
SHARE = NoiseShare(update=3e6, numbers=5e8, most=8)
MODEL = matrix_factorization(900, 5, num_users=7, scale=0.5)
PARTS = partition(MODEL, {"user": keyed("user"), "item": keyed("item")})
DOOR = Door(clip=0.5, noise=1.0, cohort=3.0)
WORDS = fixed_point(private(mean(uniform), DOOR), BITS)


def check_spread(numbers, variance):
    """Mean and variance are right."""
    numbers = np.ravel(numbers).astype(float)
    close = stats.norm.isf(SURE / 2) * math.sqrt((2 + 1 / variance) / numbers.size)
    assert np.mean(numbers**2) == pytest.approx(variance, rel=close)
    assert abs(np.mean(numbers)) < stats.norm.isf(SURE / 2) * math.sqrt(variance / numbers.size)


@pytest.mark.parametrize("variance", [4.0, 990.0, 1010.0, 4000.0])
def test_simulated_noise_has_the_chances_of_skellam_numbers(variance):
    """On both sides of where Poisson numbers end."""
    numbers = np.asarray(skellam(jax.random.key(1), (400_000,), variance))
    assert numbers.dtype == np.int32
    far = math.ceil(4 * math.sqrt(variance))
    cells = np.arange(-far, far + 1, max(1, far // 50))
    below = stats.skellam.cdf(cells, variance / 2, variance / 2)
    expected = np.diff(np.concatenate([[0.0], below, [1.0]])) * numbers.size
    found = np.bincount(np.searchsorted(cells, numbers), minlength=len(expected))
    assert stats.chisquare(found, expected).pvalue > SURE
    check_spread(numbers, variance)


def test_simulated_noise_that_is_large():
    check_spread(skellam(jax.random.key(2), (300_000,), 2.0**50), 2.0**50)
    assert not np.asarray(skellam(jax.random.key(2), (5,), 0.0)).any()


def revealed(total, rng, share=SHARE):
    return skellam_sum(WORDS, share).reveal(total, {}, rng)[0]


def test_every_word_of_a_sum_has_all_shares_of_the_noise():
    """Rows that nobody touched included. Nothing else has any: the number by which sums are divided is fixed."""
    shapes = {path: jnp.zeros(shape.shape) for path, shape in PARTS.server_shapes.items()}
    total = zero_total(WORDS, PARTS, shapes)
    told = revealed(total, jax.random.key(3))
    for leaf in told.update.values():
        check_spread(np.asarray(leaf) * 2**BITS, 8 * SHARE.update)
    rows = np.square(np.asarray(told.update["item"]) * 2**BITS).sum(1) / (8 * SHARE.update)
    assert stats.chi2.ppf(SURE / 900, 5) < rows.min()
    assert rows.max() < stats.chi2.isf(SURE / 900, 5)
    assert float(told.weight) == DOOR.cohort
    told = jax.vmap(lambda rng: revealed(total, rng))(jax.random.split(jax.random.key(4), 100))
    numbers = np.stack([told.clients, told.loss.value / DOOR.loss_bound]) * 2**BITS
    check_spread(numbers, 8 * SHARE.numbers)


def test_noise_that_is_in_the_sum_already_is_not_added_again():
    shapes = {path: jnp.zeros(shape.shape) for path, shape in PARTS.server_shapes.items()}
    told = revealed(zero_total(WORDS, PARTS, shapes), None)
    assert not any(np.asarray(leaf).any() for leaf in told.update.values())


def contribution(rows):
    """Of a client without an update, as words."""
    none = np.zeros((), np.uint32)
    update = {"user": np.zeros((1, 5), np.uint32), "item": np.zeros((rows, 5), np.uint32)}
    return Contribution(update, none, none, Sums(none, none), np.asarray(True))


def test_a_client_has_noise_in_every_word_of_its_line():
    """Also of rows that it has not, and its numbers have their own."""
    words = WordForm(WORDS, PARTS)
    keys = {"user": np.array([2]), "item": np.arange(3)}
    belongs = About("run", 0, "task", "model")
    write = lambda share: np.frombuffer(
        MaskingForm(words, share).write(belongs, contribution(3), keys), np.int32
    )
    assert not write(None).any()
    assert not write(NoiseShare(0.0, 0.0, 8)).any()
    lines = np.stack([write(SHARE) for _ in range(50)])
    check_spread(lines[:, :2], SHARE.numbers)  # the model has no shared leaves, so these are its dense words
    check_spread(lines[:, 2:], SHARE.update)
    check_spread(lines[:, -5:], SHARE.update)  # a row that it has not


@pytest.mark.parametrize("clients", [2, 5, 8])
def test_the_noise_of_a_sum_does_not_tell_how_many_came(clients):
    """The server adds the shares of those who did not."""
    lines = LineForm(WordForm(WORDS, PARTS))
    total = np.sum([lines.noise(SHARE, 1) for _ in range(clients)], 0, dtype=np.uint32)
    alone = total.view(np.int32)[2:]
    check_spread(alone, clients * SHARE.update)
    total += lines.noise(SHARE, SHARE.most - clients)
    check_spread(total.view(np.int32)[2:], SHARE.most * SHARE.update)
