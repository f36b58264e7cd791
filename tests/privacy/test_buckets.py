"""Permutation buckets: where keys are, and that a client's keys find places."""

from __future__ import annotations

from hashlib import blake2s

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.privacy.buckets import make_layout, place
from partwise.types import UserError

SEED = b"seed of a round, 32 bytes of it."


def seeded(number: int):
    return np.random.default_rng(number).bytes


@given(num_keys=st.integers(1, 400), most=st.integers(1, 60))
def test_every_key_has_three_slots_in_buckets_of_one_size(num_keys, most):
    layout = make_layout(num_keys, most, SEED)
    assert layout.num_buckets >= max(1.5 * most, most + 40)
    assert len(layout.slots) == layout.num_buckets * layout.size == layout.num_slots
    assert layout.size == 3 * max(1, num_keys // max(-(-3 * most // 2), most + 40))
    for positions in layout.positions:
        np.testing.assert_array_equal(layout.slots[positions], np.arange(num_keys))
    filled = layout.slots[layout.slots >= 0]
    np.testing.assert_array_equal(np.bincount(filled, minlength=num_keys), 3)


def test_pieces_are_rounded_down_so_that_buckets_are_never_fewer_than_wanted():
    """Rounded up, 10,000 keys in 1,500 buckets would have got 1,429."""
    layout = make_layout(10_000, 1000, SEED)
    assert (layout.num_buckets, layout.size) == (1667, 18)


def test_the_layout_is_the_same_in_every_process():
    layout = make_layout(1000, 30, SEED)
    digests = [
        blake2s(each.astype("<i8").tobytes(), digest_size=8).hexdigest()
        for each in (layout.positions, layout.slots)
    ]
    assert digests == ["d59c9f2a4f5a0e2b", "ec2c4996f60ebf78"]
    assert make_layout(1000, 30, SEED) is layout
    other = make_layout(1000, 30, SEED[::-1])
    assert (other.positions != layout.positions).mean() > 0.9


def test_the_permutations_differ_and_look_random():
    """The mean of |a - b| of two independent permutations of n numbers is (n**2 - 1) / 3n."""
    layout = make_layout(20_000, 1, SEED)
    buckets = layout.positions // layout.size
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.abs(buckets[one] - buckets[other]).mean() / layout.num_buckets - 1 / 3) < 0.02


@given(data=st.data(), num_keys=st.integers(1, 300), most=st.integers(1, 50))
def test_each_placed_key_is_alone_in_its_bucket_and_found_there(data, num_keys, most):
    layout = make_layout(num_keys, most, SEED)
    keys = data.draw(st.lists(st.integers(0, num_keys - 1), max_size=most, unique=True))
    placed = place(layout, np.array(keys, int), seeded(data.draw(st.integers(0, 99))))
    assert sorted([*placed.keys, *placed.dropped]) == sorted(keys)
    assert [key for key in keys if key in set(placed.keys)] == list(placed.keys)
    assert len(set(placed.buckets)) == len(placed.buckets) == len(placed.keys)
    assert placed.offsets.shape == (layout.num_buckets,)
    assert ((placed.offsets >= 0) & (placed.offsets < layout.size)).all()
    slots = placed.buckets * layout.size + placed.offsets[placed.buckets]
    np.testing.assert_array_equal(layout.slots[slots], placed.keys)


@pytest.mark.parametrize(("num_keys", "most"), [(10_000, 1000), (5000, 200), (3000, 10)])
def test_all_keys_find_a_place(num_keys, most):
    layout, draw = make_layout(num_keys, most, SEED), np.random.default_rng(5)
    for _ in range(20):
        assert not len(place(layout, draw.permutation(num_keys)[:most], seeded(1)).dropped)


def test_a_key_without_a_place_is_dropped():
    """Planted: five keys have the same three buckets."""
    layout = make_layout(100, 10, SEED)
    positions = layout.positions.copy()
    positions[:, :5] = positions[:, :1]
    crowded = layout._replace(positions=positions)
    placed = place(crowded, np.arange(10), seeded(2))
    own = len(set(positions[:, 0] // layout.size))
    assert own == 3
    assert len(placed.dropped) == 5 - own
    assert set(placed.dropped) < set(range(5))


def test_targets_without_a_key_are_uniform():
    layout = make_layout(1000, 10, SEED)
    counts = np.bincount(
        np.concatenate([place(layout, np.arange(0), seeded(n)).offsets for n in range(200)]),
        minlength=layout.size,
    )
    expected = counts.sum() / layout.size
    assert ((counts - expected) ** 2 / expected).sum() < layout.size + 5 * np.sqrt(2 * layout.size)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (np.arange(11), "11 keys, and the layout is for at most 10"),
        ([3, 3], "distinct"),
        ([-1], "from 0 to 99, not -1"),
        ([100], "from 0 to 99, not 100"),
    ],
)
def test_keys_that_cannot_be_placed_are_refused(keys, words):
    with pytest.raises(UserError, match=words):
        place(make_layout(100, 10, SEED), np.array(keys), seeded(0))


def test_a_layout_of_nothing_is_refused():
    with pytest.raises(UserError, match="not 0 keys"):
        make_layout(0, 3, SEED)
