"""Noisy heat: what a client adds is bounded, counts are unbiased, and their noise is of the stated size."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.data.heat_gaussian import Counted, count_limited, deviation, gaussian_heats
from partwise.privacy.secret_draws import draws_of
from partwise.types import UserError

KEYS = {"item": 20, "word": 9}


def pairs_of(rng, clients, chance):
    held = {space: np.nonzero(rng.random((clients, keys)) < chance) for space, keys in KEYS.items()}
    return {space: (client, key) for space, (client, key) in held.items()}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.floats(0, 1))
def test_a_client_adds_no_more_than_the_noise_is_made_for(seed, most, chance):
    """The counts of one client are what a neighbouring population differs by."""
    rng = np.random.default_rng(seed)
    counted = count_limited(pairs_of(rng, 1, chance), KEYS, 1, most, rng)
    added = np.concatenate([*counted.counts.values(), [counted.clients]])
    assert np.linalg.norm(added) <= deviation(1.0, most) * (1 + 1e-9)


def test_without_a_bound_that_matters_counts_are_exact():
    rng = np.random.default_rng(0)
    pairs = pairs_of(rng, 40, 0.3)
    counted = count_limited(pairs, KEYS, 40, 100, rng)
    for space, (_, key) in pairs.items():
        np.testing.assert_array_equal(counted.counts[space], np.bincount(key, minlength=KEYS[space]))
    assert counted.clients == 40


def test_a_random_part_of_many_keys_is_counted():
    """Every client holds all 29 keys and counts 10: each key is counted by 10 / 29 of them."""
    rng = np.random.default_rng(0)
    pairs = pairs_of(rng, 3000, 2.0)
    counted = count_limited(pairs, KEYS, 3000, 10, rng)
    assert sum(int(counts.sum()) for counts in counted.counts.values()) == 30_000
    assert counted.clients == pytest.approx(3000 * 10 / 29)
    heats = gaussian_heats(counted, 1e-9, 10, rng)
    for heat in heats.values():
        np.testing.assert_allclose(heat.counts, 3000, rtol=0.1)


def test_the_noise_is_unbiased_and_of_the_stated_size():
    counted = Counted({"item": np.full(2000, 500)}, 1000.0, 1000)
    noise, most = 0.5, 99
    sd = deviation(noise, most)
    assert sd == pytest.approx(5.0)
    found = [gaussian_heats(counted, noise, most, np.random.default_rng(seed)) for seed in range(50)]
    counts = np.stack([each["item"].counts for each in found])
    # N_eff has noise too: 5 of 1000, which moves all counts of a seed by half a percent
    assert counts.mean() == pytest.approx(500, rel=0.005)
    within = (counts - counts.mean(1, keepdims=True)).var()
    assert within == pytest.approx(sd**2, rel=0.05)


def test_counts_below_the_noise_are_raised_to_it():
    counted = Counted({"item": np.zeros(500, int)}, 1000.0, 1000)
    heat = gaussian_heats(counted, 1.0, 99, np.random.default_rng(0))["item"]
    assert heat.counts.min() >= math.floor(2 * 10 * 0.95)
    assert heat.counts.max() <= 1000


def test_at_least_one_key_is_counted():
    with pytest.raises(UserError, match="at least 1 key"):
        count_limited(pairs_of(np.random.default_rng(0), 3, 0.5), KEYS, 3, 0, np.random.default_rng(0))


def test_secret_noise_is_that_of_the_formula():
    """Over a network the noise comes from a secret: its spread, and nothing of numpy's generators."""
    counted = Counted({"word": np.full(4000, 5000)}, 10_000.0, 10_000)
    heat = gaussian_heats(counted, 3.0, 8, draws_of(bytes(32), 1))["word"]
    sd = deviation(3.0, 8)
    scale = heat.counts.mean() / 5000  # of the noisy number of clients
    assert abs(scale - 1) < 6 * sd / 10_000 + 1e-3
    assert (heat.counts / scale - 5000).std() == pytest.approx(sd, rel=0.1)
    again = gaussian_heats(counted, 3.0, 8, draws_of(bytes(32), 1))["word"]
    np.testing.assert_array_equal(heat.counts, again.counts)
