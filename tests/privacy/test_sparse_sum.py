"""Sparse secure sums: exactly the plain sum of the writes that both servers have."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.privacy.buckets import make_layout
from partwise.privacy.sparse_sum import (
    Write,
    accumulate,
    common,
    make_write,
    opened,
    write_sizes,
)
from partwise.types import UserError

SEED, CONTEXT, WORDS = bytes(range(32)), b"round 7", 3
LAYOUT = make_layout(120, 8, SEED)


def seeded(number: int):
    return np.random.default_rng(number).bytes


class Client:
    """A client with some keys: what it adds in plain, and its write."""

    def __init__(self, number: int, count: int):
        draw = np.random.default_rng(number)
        keys = draw.permutation(LAYOUT.num_keys)[:count]
        words = draw.integers(0, 2**32, (count, WORDS), dtype=np.uint32)
        self.nonce = draw.bytes(16)
        self.write, kept = make_write(LAYOUT, keys, words, CONTEXT, self.nonce, draw.bytes)
        self.plain = np.zeros((LAYOUT.num_keys, WORDS + 1), np.uint32)
        chosen = np.isin(keys, kept)
        self.plain[keys[chosen], :WORDS], self.plain[keys[chosen], WORDS] = words[chosen], 1

    def at(self, party: int) -> tuple[bytes, bytes, bytes]:
        return self.nonce, self.write.public, self.write[1 + party]


def summed(clients: Sequence[Client]) -> np.ndarray:
    parts = (accumulate(LAYOUT, WORDS, CONTEXT, [c.at(p) for c in clients], p) for p in (0, 1))
    return opened(*parts)


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(0, 8), max_size=5), seed=st.integers(0, 10**6))
def test_the_sum_is_exact(counts, seed):
    clients = [Client(seed + number, count) for number, count in enumerate(counts)]
    expected = sum((c.plain for c in clients), np.zeros((120, WORDS + 1), np.uint32))
    np.testing.assert_array_equal(summed(clients), expected)


def test_every_key_can_be_written():
    for start in range(0, LAYOUT.num_keys, 8):
        keys = np.arange(start, start + 8)
        words = np.repeat(keys[:, None], WORDS, axis=1).astype(np.uint32)
        nonce = os.urandom(16)
        write, kept = make_write(LAYOUT, keys, words, CONTEXT, nonce)
        np.testing.assert_array_equal(kept, keys)
        parts = (accumulate(LAYOUT, WORDS, CONTEXT, [(nonce, write.public, write[1 + p])], p) for p in (0, 1))
        total = opened(*parts)
        np.testing.assert_array_equal(total[keys], np.column_stack([words, np.ones(8, np.uint32)]))
        assert not np.delete(total, keys, axis=0).any()


@settings(deadline=None, max_examples=20)
@given(lost=st.lists(st.sampled_from(["none", "first", "second", "both"]), min_size=1, max_size=6))
def test_writes_that_one_server_lacks_are_left_out_by_both(lost):
    """And a write that a server was sent twice counts once."""
    clients = [Client(number, 5) for number in range(len(lost))]
    lists = [
        [c.nonce for c, gone in zip(clients, lost, strict=True) if gone not in (name, "both")]
        for name in ("first", "second")
    ]
    lists[0] += lists[0][:2]
    both = common(*lists)
    assert both == common(lists[1], lists[0])
    expected = [c for c, gone in zip(clients, lost, strict=True) if gone == "none"]
    assert sorted(both) == sorted(c.nonce for c in expected)
    by_nonce = {c.nonce: c for c in clients}
    total = summed([by_nonce[nonce] for nonce in both])
    np.testing.assert_array_equal(
        total, sum((c.plain for c in expected), np.zeros((120, WORDS + 1), np.uint32))
    )


def test_a_write_that_only_one_server_counts_spoils_the_sum():
    """This is why both must take the same."""
    clients = [Client(1, 4), Client(2, 4)]
    first = accumulate(LAYOUT, WORDS, CONTEXT, [c.at(0) for c in clients], 0)
    second = accumulate(LAYOUT, WORDS, CONTEXT, [clients[0].at(1)], 1)
    assert (opened(first, second) != clients[0].plain).mean() > 0.9


def test_negative_numbers_and_wraparound():
    keys, total = np.array([5, 9]), np.zeros((120, 2), np.uint32)
    updates = np.array([[-7], [2**31 - 1]]), np.array([[3], [1]]), np.array([[-1], [0]])
    writes = []
    for number, update in enumerate(updates):
        nonce = bytes([number]) * 16
        write, _ = make_write(LAYOUT, keys, (update % 2**32).astype(np.uint32), CONTEXT, nonce)
        writes.append((nonce, write))
    total = opened(
        *(accumulate(LAYOUT, 1, CONTEXT, [(n, w.public, w[1 + p]) for n, w in writes], p) for p in (0, 1))
    )
    assert total[keys].view(np.int32).tolist() == [[-5, 3], [-(2**31), 3]]


def test_writes_have_the_same_sizes_for_any_number_of_keys():
    sizes = write_sizes(LAYOUT, WORDS)
    depth = (LAYOUT.size - 1).bit_length()
    assert sizes == (LAYOUT.num_buckets * (17 * depth + 4 * (WORDS + 1)), 16 * LAYOUT.num_buckets)
    assert sizes.total == LAYOUT.num_buckets * (17 * depth + 32 + 4 * (WORDS + 1))
    for count in (0, 1, 8):
        write = Client(3, count).write
        assert [*map(len, write)] == [sizes.public, sizes.roots, sizes.roots]


def test_the_sizes_of_the_design():
    """100,000 rows of 96 words and a count, 1,000 keys: at most 0.9 MB."""
    assert write_sizes(make_layout(100_000, 1000, SEED), 96).total == 842_896


def test_a_key_without_a_place_is_left_out():
    """Planted: keys 0 to 4 have the buckets of key 0, which are three at most."""
    positions = LAYOUT.positions.copy()
    positions[:, :5] = positions[:, :1]
    crowded = LAYOUT._replace(positions=positions)
    write, kept = make_write(crowded, np.arange(8), np.ones((8, WORDS), np.uint32), CONTEXT, bytes(16))
    assert len(kept) <= 6
    assert {5, 6, 7} <= set(kept)
    assert [*map(len, write)] == [*map(len, Client(0, 8).write)]


def test_one_servers_sum_says_nothing():
    client = Client(4, 8)
    for party in (0, 1):
        share = accumulate(LAYOUT, WORDS, CONTEXT, [client.at(party)], party)
        bits = np.unpackbits(share.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
        assert (share == client.plain).sum() <= 1


def test_no_writes_are_a_sum_of_zero():
    assert not summed([]).any()
    assert summed([]).shape == (120, WORDS + 1)


def test_the_round_and_the_nonce_belong_to_a_write():
    client = Client(5, 3)
    wrong = (
        accumulate(LAYOUT, WORDS, b"round 8", [client.at(0)], 0),
        accumulate(LAYOUT, WORDS, CONTEXT, [(bytes(16), *client.at(0)[1:])], 0),
    )
    right = accumulate(LAYOUT, WORDS, CONTEXT, [client.at(0)], 0)
    assert all((each != right).mean() > 0.9 for each in wrong)


@pytest.mark.parametrize("part", ["public", "first", "second"])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b""])
def test_parts_of_a_wrong_length_are_refused(part, change):
    client = Client(6, 2)
    broken = client.write._replace(**{part: change(getattr(client.write, part))})
    party = int(part == "second")
    with pytest.raises(UserError, match="bytes, and must have"):
        accumulate(LAYOUT, WORDS, CONTEXT, [(client.nonce, broken.public, broken[1 + party])], party)


def test_other_mistakes_are_refused():
    client, words = Client(6, 2), np.zeros((2, WORDS), np.uint32)
    with pytest.raises(UserError, match="comes twice"):
        accumulate(LAYOUT, WORDS, CONTEXT, [client.at(0)] * 2, 0)
    with pytest.raises(UserError, match="nonce has 3 bytes"):
        accumulate(LAYOUT, WORDS, CONTEXT, [(b"abc", *client.at(0)[1:])], 0)
    with pytest.raises(UserError, match="nonce has 0 bytes"):
        make_write(LAYOUT, np.arange(2), words, CONTEXT, b"")
    with pytest.raises(UserError, match="0 or 1, not 2"):
        accumulate(LAYOUT, WORDS, CONTEXT, [], 2)
    with pytest.raises(
        UserError, match="words must be uint32 \\[3, words\\], not uint32 of shape \\(2, 3\\)"
    ):
        make_write(LAYOUT, np.arange(3), words, CONTEXT, bytes(16))
    with pytest.raises(UserError, match="not float32"):
        make_write(LAYOUT, np.arange(2), words.astype(np.float32), CONTEXT, bytes(16))
    with pytest.raises(UserError, match="at most 8"):
        make_write(LAYOUT, np.arange(9), np.zeros((9, WORDS), np.uint32), CONTEXT, bytes(16))
    with pytest.raises(UserError, match="must have the same"):
        opened(words, words[:1])


def test_random_bytes_in_the_place_of_a_write_break_nothing():
    """A server that gets such adds noise, and goes on."""
    sizes = write_sizes(LAYOUT, WORDS)
    noise = Write(os.urandom(sizes.public), os.urandom(sizes.roots), os.urandom(sizes.roots))
    share = accumulate(LAYOUT, WORDS, CONTEXT, [(bytes(16), noise.public, noise.first)], 0)
    assert share.shape == (120, WORDS + 1)
