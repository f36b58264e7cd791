"""Selection bits: those of two servers differ in the wanted slots alone, in either way; one server's are random."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, modes
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from partwise.privacy.aes import BLOCK, keystream
from partwise.privacy.bucket_kernels import numpy_kernels
from partwise.privacy.buckets import BucketLayout, LayoutShape, layout_shape, make_layout
from partwise.privacy.point_functions import WORDS, unpack_corrections
from partwise.privacy.retrieval import (
    answer_first,
    answer_second,
    bucket_table,
    make_query,
    query_sizes,
    read_rows,
)
from partwise.privacy.selection_bits import POINTS, STRINGS, way_of
from partwise.types import UserError

SEED, LABEL = bytes(range(32)), b"round 7"
LARGE = make_layout(20_000, 3, SEED)  # buckets of 1,395 slots: 11 leaves
WAYS = pytest.mark.parametrize("way", [STRINGS, POINTS], ids=["strings", "points"])


def seeded(number: int):
    return np.random.default_rng(number).bytes


def bucketed(num_buckets: int, size: int) -> BucketLayout:
    """A layout of any shape, without keys."""
    nothing = np.zeros(0, np.int64)
    return BucketLayout(0, 0, SEED, num_buckets, size, nothing, nothing)


def slots(layout: BucketLayout, packed: np.ndarray) -> np.ndarray:
    """The bits of slots: [bucket, offset]."""
    assert packed.dtype == np.uint8
    return np.unpackbits(packed, count=layout.num_slots, bitorder="little").reshape(layout.num_buckets, -1)


def both(way, layout: BucketLayout, told) -> list[np.ndarray]:
    secrets = (told.to_first, told.to_second)
    return [slots(layout, way.bits(layout, told.to_both, mine, party)) for party, mine in enumerate(secrets)]


def differing(way, layout: BucketLayout, told) -> np.ndarray:
    first, second = both(way, layout, told)
    return first ^ second


@WAYS
@pytest.mark.parametrize("size", [1, 2, 7, 8, 127, 128, 129, 255, 256, 257, 384, 385, 700])
def test_bits_differ_in_the_wanted_slot_for_every_slot(way, size):
    """A bucket for each slot: all offsets at once."""
    layout = bucketed(size, size)
    told = way.tell(layout, np.arange(size), seeded(size))
    assert tuple(map(len, told)) == way.sizes(layout)
    np.testing.assert_array_equal(differing(way, layout, told), np.eye(size, dtype=np.uint8))


@WAYS
def test_bits_of_random_layouts_differ_in_the_wanted_slots(way):
    draw = np.random.default_rng(5)
    for _ in range(20):
        layout = bucketed(int(draw.integers(1, 60)), int(draw.integers(1, 3000)))
        offsets = draw.integers(0, layout.size, layout.num_buckets)
        found = differing(way, layout, way.tell(layout, offsets, os.urandom))
        assert (found.sum(1) == 1).all()
        np.testing.assert_array_equal(found.argmax(1), offsets)


def test_bits_are_the_leaves_of_the_paper():
    """One function of one bucket with four leaves."""
    layout = bucketed(1, 500)
    told = POINTS.tell(layout, np.array([300]), seeded(1))
    for party, (secret, bits) in enumerate(zip(told[1:], both(POINTS, layout, told), strict=True)):
        leaves = [walked(layout.seed, told.to_both, secret, party, leaf) for leaf in range(4)]
        np.testing.assert_array_equal(bits[0], np.concatenate(leaves)[:500])


def walked(context: bytes, to_both: bytes, secret: bytes, party: int, leaf: int) -> np.ndarray:
    """The bits of a leaf of two levels, by a walk from the root: figure 1 of Boyle, Gilboa and Ishai."""
    nonce, seeds, flags, final = to_both[:16], to_both[16:48], to_both[48:50], to_both[50:]
    frame = b"".join(len(each).to_bytes(8, "little") + each for each in (context, nonce))
    keys = HKDF(SHA256(), 48, None, b"partwise point functions").derive(frame)
    seed, flag = Cipher(AES(secret), modes.CTR(bytes(16))).encryptor().update(bytes(16)), party
    for level in range(2):
        side = leaf >> (1 - level) & 1
        child = plain_hash(keys[16 * side : 16 * (side + 1)], seed)
        child_flag, seed = child[0] & 1, bytes([child[0] & 254]) + child[1:]
        if flag:
            seed = xor(seed, seeds[16 * level : 16 * (level + 1)])
            child_flag ^= flags[level] >> side & 1
        flag = child_flag
    block = plain_hash(keys[32:], seed)
    return np.unpackbits(np.frombuffer(xor(block, final) if flag else block, np.uint8), bitorder="little")


def plain_hash(key: bytes, seed: bytes) -> bytes:
    """Guo et al. 2020, as it is written."""
    block = xor(seed[:8], seed[8:]) + seed[:8]
    return xor(Cipher(AES(key), modes.ECB()).encryptor().update(block), block)


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def test_numpy_and_compiled_loops_give_the_same_bits(monkeypatch):
    layout = bucketed(9, 1000)
    told = POINTS.tell(layout, np.arange(9), seeded(3))
    compiled = both(POINTS, layout, told)
    monkeypatch.setattr("partwise.privacy.point_functions.kernels", numpy_kernels)
    np.testing.assert_array_equal(both(POINTS, layout, told), compiled)
    assert POINTS.tell(layout, np.arange(9), seeded(3)) == told


@pytest.mark.parametrize("num_keys", [*range(1, 20), 64, 300])
@WAYS
def test_every_key_of_small_tables_is_found(way, num_keys, monkeypatch):
    monkeypatch.setattr("partwise.privacy.retrieval.way_of", lambda layout: way)
    layout = make_layout(num_keys, 4, SEED)
    rows = np.random.default_rng(num_keys).integers(0, 256, (num_keys, 5), dtype=np.uint8)
    for start in range(0, num_keys, 4):
        keys = np.arange(start, min(start + 4, num_keys))[::-1]
        found, values = fetched(layout, rows, keys)
        np.testing.assert_array_equal(found, keys)
        np.testing.assert_array_equal(values, rows[keys])


def test_both_ways_return_the_same_rows(monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (20_000, 7), dtype=np.uint8)
    keys, got = np.array([19_999, 0, 777]), []
    for way in (STRINGS, POINTS):
        monkeypatch.setattr("partwise.privacy.retrieval.way_of", lambda layout, way=way: way)
        got.append(fetched(LARGE, rows, keys))
    for found, values in got:
        np.testing.assert_array_equal(found, keys)
        np.testing.assert_array_equal(values, rows[keys])


def fetched(layout, rows, keys):
    table, query = bucket_table(layout, rows, LABEL), make_query(layout, keys)
    first = answer_first(table, layout, query.to_both, query.to_first)
    second = answer_second(table, layout, query.to_both, query.to_second)
    return read_rows(query, layout, LABEL, first, second)


def test_sizes_are_those_of_the_formulas():
    """17 bytes a level and 16 more for every bucket, a nonce and two seeds; against a bit a slot and a seed."""
    for shape in (LayoutShape(150, 2000), LayoutShape(7, 3), LayoutShape(41, 129), LayoutShape(41, 128)):
        depth = max(1, int(np.ceil(np.log2(np.ceil(shape.size / 128)))))
        assert POINTS.sizes(shape) == (16 + shape.num_buckets * (17 * depth + 16), 16, 16)
        assert STRINGS.sizes(shape) == (0, 16, -(-shape.num_slots // 8))


@pytest.mark.parametrize(
    ("num_keys", "most", "way", "asked"),
    [
        (10**6, 100, POINTS, 23_000),
        (10**5, 100, POINTS, 12_732),
        (10**6, 1000, POINTS, 126_216),
        (10**5, 1000, STRINGS, 37_537),
        (10**4, 100, STRINGS, 3_778),
        (1, 1, STRINGS, 32),
    ],
)
def test_the_layout_says_which_way(num_keys, most, way, asked):
    shape = layout_shape(num_keys, most)
    assert way_of(shape) is way
    assert query_sizes(shape, 384).asked == asked


def test_the_way_has_the_fewest_bytes_for_all_shapes():
    for size in range(1, 3000, 7):
        shape = LayoutShape(60, size)
        assert sum(way_of(shape).sizes(shape)) == min(sum(way.sizes(shape)) for way in (STRINGS, POINTS))


def test_messages_have_the_same_sizes_for_any_number_of_keys():
    assert way_of(LARGE) is POINTS
    sizes = query_sizes(LARGE, 12)
    for count in (0, 1, 3):
        query = make_query(LARGE, np.arange(count))
        assert [len(each) for each in query[:3]] == [sizes.to_both, sizes.to_first, sizes.to_second]


@pytest.mark.parametrize("party", [0, 1])
@pytest.mark.parametrize("offset", [0, 255, 499])
def test_what_one_server_sees_is_random_for_any_slot(party, offset):
    """Corrections, root and selection bits of many buckets: every bit is a fair coin, but for those that are always
    zero: one of a seed, and six of a byte of flags."""
    layout, count = bucketed(4000, 500), 4000
    told = POINTS.tell(layout, np.full(count, offset), seeded(offset))
    points = unpack_corrections(told.to_both[BLOCK:], count, 2, WORDS)
    seeds, flags = (np.ascontiguousarray(each.swapaxes(0, 1)) for each in points[:2])
    views = [each.reshape(count, -1).view(np.uint8) for each in (seeds, flags, points.finals)]
    views.append(keystream(told[1 + party], BLOCK * count).reshape(count, -1))
    bits = np.concatenate(
        [np.unpackbits(np.hstack(views), axis=1), both(POINTS, layout, told)[party]], axis=1
    )
    sums = bits.sum(0, dtype=int)
    assert (sums == 0).sum() == 2 * (1 + 6)
    scores = (sums[sums > 0] - count / 2) / np.sqrt(count / 4)
    assert np.abs(scores).max() < 5  # of 1,014; the chance of more is below one in a thousand
    assert abs((scores**2).mean() - 1) < 5 * np.sqrt(2 / len(scores))


def test_two_questions_have_nothing_in_common():
    """Nonce, seeds and roots are drawn anew, so correction words are never used twice."""
    asked = [make_query(LARGE, np.arange(3)) for _ in range(20)]
    for part in (
        lambda query: query.to_both[:BLOCK],
        lambda query: query.to_first,
        lambda query: query.to_second,
    ):
        assert len({part(query) for query in asked}) == 20
    assert all(query.to_first != query.to_second for query in asked)


def test_questions_of_a_wrong_length_are_refused():
    table = np.zeros((LARGE.num_buckets, LARGE.size, 9), np.uint8)
    query = make_query(LARGE, np.arange(3))
    with pytest.raises(UserError, match="to both servers has"):
        answer_first(table, LARGE, query.to_both[:-1], query.to_first)
    with pytest.raises(UserError, match="to both servers has"):
        answer_second(table, LARGE, b"", query.to_second)
    with pytest.raises(UserError, match="to the second server has 17 bytes, and must have 16"):
        answer_second(table, LARGE, query.to_both, query.to_second + b"x")
