"""Private retrieval: the rows are right, and neither server's message depends on the keys."""

from __future__ import annotations

import os

import numpy as np
import pytest

from partwise.privacy import retrieval
from partwise.privacy.buckets import make_layout
from partwise.privacy.retrieval import (
    answer_first,
    answer_second,
    bucket_table,
    joined,
    make_query,
    padded,
    query_sizes,
    read_joined,
    read_rows,
)
from partwise.types import UserError

SEED, LABEL = bytes(range(32)), b"round 7"


def seeded(number: int):
    return np.random.default_rng(number).bytes


def some_rows(num_keys: int, width: int = 12) -> np.ndarray:
    return np.random.default_rng(num_keys).integers(0, 256, (num_keys, width), dtype=np.uint8)


def answers(table, layout, query) -> tuple[bytes, bytes]:
    first = answer_first(table, layout, query.to_both, query.to_first)
    return first, answer_second(table, layout, query.to_both, query.to_second)


def fetched(layout, rows, keys, random=os.urandom):
    table = bucket_table(layout, rows, LABEL)
    query = make_query(layout, keys, random)
    return read_rows(query, layout, LABEL, *answers(table, layout, query))


@pytest.mark.parametrize("num_keys", [*range(1, 20), 31, 32, 33, 63, 64])
def test_every_key_of_small_tables_is_found(num_keys):
    layout, rows = make_layout(num_keys, 4, SEED), some_rows(num_keys)
    for start in range(0, num_keys, 4):
        keys = np.arange(start, min(start + 4, num_keys))[::-1]
        found, values = fetched(layout, rows, keys)
        np.testing.assert_array_equal(found, keys)
        np.testing.assert_array_equal(values, rows[keys])


@pytest.mark.parametrize(("num_keys", "most", "width"), [(977, 50, 1), (5000, 300, 96), (100_000, 100, 5)])
def test_keys_of_large_tables_are_found(num_keys, most, width):
    layout, rows = make_layout(num_keys, most, SEED), some_rows(num_keys, width)
    keys = np.random.default_rng(3).permutation(num_keys)[:most]
    found, values = fetched(layout, rows, keys)
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(values, rows[keys])


def test_messages_have_the_same_sizes_for_any_number_of_keys():
    layout, rows = make_layout(500, 20, SEED), some_rows(500)
    table, sizes = bucket_table(layout, rows, LABEL), query_sizes(layout, 12)
    assert sizes == (0, 16, -(-layout.num_buckets * layout.size // 8), layout.num_buckets * (12 + 8))
    assert sizes.total == 16 + sizes.to_second + 2 * sizes.answer
    assert sizes.relayed == 32 + sizes.to_second + sizes.answer
    for count in (0, 1, 20):
        query = make_query(layout, np.arange(count))
        lengths = [len(each) for each in (*query[:3], *answers(table, layout, query))]
        assert lengths == [*sizes, sizes.answer]
        pad = os.urandom(16)
        first, second = answers(table, layout, query)
        assert len(joined(first, padded(second, pad))) == sizes.answer


def test_the_sizes_of_the_design():
    """100,000 rows of 384 bytes, 1,000 keys: at most 1.3 MB in all."""
    assert query_sizes(make_layout(100_000, 1000, SEED), 384).total == 1_226_081


def test_no_keys_give_no_rows():
    found, values = fetched(make_layout(50, 3, SEED), some_rows(50), np.arange(0))
    assert found.shape == (0,)
    assert values.shape == (0, 12)


def bits_of(layout, keys, count: int, random) -> np.ndarray:
    """The second server's strings of many queries: [query, slot]."""
    strings = [np.frombuffer(make_query(layout, keys, random).to_second, np.uint8) for _ in range(count)]
    return np.unpackbits(np.array(strings), axis=1, count=layout.num_slots, bitorder="little")


def test_what_the_second_server_sees_is_random_for_any_keys():
    """Every bit is a fair coin for each of two sets of keys, and so is the number of ones."""
    layout, count = make_layout(300, 6, SEED), 2000
    for number, keys in enumerate((np.arange(6), np.array([200]))):
        bits = bits_of(layout, keys, count, seeded(number))
        scores = (bits.sum(0) - count / 2) / np.sqrt(count / 4)
        assert np.abs(scores).max() < 4.9  # of 846; the chance of more is below one in a thousand
        assert abs((scores**2).mean() - 1) < 5 * np.sqrt(2 / len(scores))
        ones = (bits.sum(1) - layout.num_slots / 2) / np.sqrt(layout.num_slots / 4)
        assert abs(ones.mean()) < 5 / np.sqrt(count)
        assert abs(ones.var() - 1) < 5 * np.sqrt(2 / count)


def test_the_test_of_randomness_can_fail():
    """With a seed that is always the same, the second server's bits are nearly constant."""
    layout = make_layout(300, 6, SEED)
    bits = bits_of(layout, np.arange(6), 100, lambda length: bytes(length))
    assert np.abs(bits.mean(0) - 0.5).max() == 0.5


def test_what_the_first_server_sees_is_drawn_and_nothing_else():
    drawn = []

    def random(length: int) -> bytes:
        drawn.append(os.urandom(length))
        return drawn[-1]

    layout = make_layout(300, 6, SEED)
    seeds = {make_query(layout, np.arange(6), random).to_first for _ in range(20)}
    assert len(seeds) == 20
    assert seeds < set(drawn)


def test_a_key_without_a_place_changes_no_message():
    """Planted: keys 0 to 4 have the buckets of key 0, which are three at most."""
    layout = make_layout(100, 10, SEED)
    positions = layout.positions.copy()
    positions[:, :5] = positions[:, :1]
    crowded = make_query(layout._replace(positions=positions), np.arange(10), seeded(0))
    assert len(crowded.placed.dropped) >= 2
    plain = make_query(layout, np.arange(10), seeded(0))
    assert not len(plain.placed.dropped)
    assert [*map(len, crowded[:3])] == [*map(len, plain[:3])]


def test_rows_are_found_when_others_have_no_place(monkeypatch):
    """Planted: keys are given up at once where all their buckets are taken."""
    monkeypatch.setattr("partwise.privacy.buckets.MOST_KICKS", 1)
    layout, rows = make_layout(2000, 200, SEED), some_rows(2000)
    query = make_query(layout, np.arange(200), seeded(4))
    assert 0 < len(query.placed.dropped) < 100
    table = bucket_table(layout, rows, LABEL)
    found, values = read_rows(query, layout, LABEL, *answers(table, layout, query))
    assert set(found) == set(range(200)) - set(query.placed.dropped)
    np.testing.assert_array_equal(values, rows[found])


def test_servers_with_different_tables_are_found_out():
    layout, rows = make_layout(200, 5, SEED), some_rows(200)
    query = make_query(layout, np.arange(5))
    first, second = bucket_table(layout, rows, LABEL), bucket_table(layout, rows, b"round 8")
    mixed = answers(first, layout, query)[0], answers(second, layout, query)[1]
    with pytest.raises(UserError, match="different versions"):
        read_rows(query, layout, LABEL, *mixed)
    with pytest.raises(UserError, match="different versions"):
        read_rows(query, layout, LABEL, *answers(second, layout, query))
    read_rows(query, layout, b"round 8", *answers(second, layout, query))


@pytest.mark.parametrize("num_keys_asked", [0, 5])
def test_one_changed_bit_is_found_out_in_any_bucket(num_keys_asked):
    """With and without keys: whether a client complains does not depend on them."""
    layout, rows = make_layout(200, 5, SEED), some_rows(200)
    table = bucket_table(layout, rows, LABEL)
    query = make_query(layout, np.arange(num_keys_asked))
    first, second = answers(table, layout, query)
    for bucket in range(layout.num_buckets):
        damaged = bytearray(first)
        damaged[bucket * 20 + bucket % 20] ^= 1 << bucket % 8
        with pytest.raises(UserError, match="1 of 50 rows have a wrong checksum"):
            read_rows(query, layout, LABEL, bytes(damaged), second)


def test_the_first_server_can_carry_the_seconds_answer_without_reading_it():
    layout, rows = make_layout(200, 5, SEED), some_rows(200)
    table, keys, pad = bucket_table(layout, rows, LABEL), np.array([7, 3]), os.urandom(16)
    query = make_query(layout, keys)
    first, second = answers(table, layout, query)
    carried = padded(second, pad)
    same = np.frombuffer(carried, np.uint8) == np.frombuffer(second, np.uint8)
    assert same.mean() < 0.05
    found, values = read_joined(query, layout, LABEL, joined(first, carried), pad)
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(values, rows[keys])
    with pytest.raises(UserError, match="wrong checksum"):
        read_joined(query, layout, LABEL, joined(first, carried), os.urandom(16))


def test_messages_of_a_wrong_length_are_refused():
    layout, rows = make_layout(200, 5, SEED), some_rows(200)
    table, query = bucket_table(layout, rows, LABEL), make_query(layout, np.arange(5))
    first, second = answers(table, layout, query)
    with pytest.raises(UserError, match="first server has 15 bytes, and must have 16"):
        answer_first(table, layout, b"", query.to_first[:-1])
    for wrong in (query.to_second[:-1], query.to_second + b"x", b""):
        with pytest.raises(UserError, match="second server has"):
            answer_second(table, layout, b"", wrong)
    with pytest.raises(UserError, match="must have the same"):
        read_rows(query, layout, LABEL, first, second[:-1])
    with pytest.raises(UserError, match="not rows for 50 buckets"):
        read_rows(query, layout, LABEL, first[:-1], second[:-1])
    with pytest.raises(UserError, match="not rows for 50 buckets"):
        read_rows(query, layout, LABEL, b"", b"")
    with pytest.raises(UserError, match="make it with bucket_table"):
        answer_first(table[:-1], layout, b"", query.to_first)
    with pytest.raises(UserError, match="uint8 with 200 rows"):
        bucket_table(layout, rows[:-1], LABEL)
    with pytest.raises(UserError, match="must have 16"):
        padded(first, b"short")


def test_checksums_are_of_the_label_the_key_and_the_row():
    rows = np.zeros((3, 4), np.uint8)
    sums = retrieval._checksums(b"a", np.array([0, 1, 0]), rows)
    assert (sums[0] == sums[2]).all()
    assert (sums[0] != sums[1]).any()
    assert (retrieval._checksums(b"b", np.array([0, 1, 0]), rows) != sums).any(1).all()
