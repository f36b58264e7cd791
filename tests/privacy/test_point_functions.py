"""Distributed point functions: shares add up to the point, and one party's key says nothing of it."""

from __future__ import annotations

import sys
from hashlib import blake2s

import numpy as np
import pytest

from partwise.privacy.aes import block_cipher, keystream, room
from partwise.privacy.bucket_kernels import compiled_kernels, kernels, numpy_kernels
from partwise.privacy.point_functions import add_points, depth_of, make_hashes, make_points

CONTEXT, NONCE = b"round 3", bytes(range(16))
HASHES = make_hashes(CONTEXT, NONCE)


def seeded(number: int):
    return np.random.default_rng(number).bytes


def shares(size: int, points, roots) -> list[np.ndarray]:
    """Of both parties: [n, size, words]."""
    found = []
    for party in (0, 1):
        sums = np.zeros((roots.shape[1] * size, points.finals.shape[1]), np.uint32)
        add_points(sums, size, points, roots[party], HASHES, party)
        found.append(sums.reshape(roots.shape[1], size, -1))
    return found


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("words", [1, 4, 5])
def test_shares_add_up_to_the_point_for_every_place(depth, words):
    """All places at once, in trees that are full and in trees that lack the last leaves."""
    for size in {1 << depth, (1 << depth) - 1, (1 << depth - 1) + 1} - {1}:
        assert depth_of(size) == depth
        payloads = np.random.default_rng(depth).integers(0, 2**32, (size, words), dtype=np.uint32)
        points, roots = make_points(np.arange(size), payloads, depth, HASHES, seeded(depth))
        first, second = shares(size, points, roots)
        expected = np.zeros_like(first)
        expected[np.arange(size), np.arange(size)] = payloads
        np.testing.assert_array_equal(first + second, expected)


def test_payloads_wrap_around():
    payloads = np.array([[0, 1, 2**31, 2**32 - 1], [-5 % 2**32, 0, 0, 0]], np.uint32)
    points, roots = make_points(np.array([2, 0]), payloads, 2, HASHES, seeded(1))
    total = np.zeros((8, 4), np.uint32)
    for party in (0, 1, 0, 1, 0, 1):
        add_points(total, 4, points, roots[party], HASHES, party)
    np.testing.assert_array_equal(total[2], payloads[0] * np.uint32(3))
    np.testing.assert_array_equal(total[4].view(np.int32), [-15, 0, 0, 0])
    assert not np.delete(total, (2, 4), axis=0).any()


def plain_hash(key: bytes, seed: bytes) -> bytes:
    """Guo et al. 2020, as it is written: left and right are the halves of a block."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    left, right = seed[:8], seed[8:]
    block = bytes(a ^ b for a, b in zip(left, right, strict=True)) + left
    return xor(Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block), block)


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def plain_share(place: int, depth: int, points, number: int, root: bytes, party: int) -> np.ndarray:
    """One value of one function, by a walk from the root: figure 1 of Boyle, Gilboa and Ishai."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    frame = b"".join(len(each).to_bytes(8, "little") + each for each in (CONTEXT, NONCE))
    derived = HKDF(SHA256(), 48, None, b"partwise point functions").derive(frame)
    keys = [derived[:16], derived[16:32], derived[32:]]
    seed, flag = root, party
    for level in range(depth):
        side = place >> (depth - 1 - level) & 1
        child = plain_hash(keys[side], seed)
        child_flag, seed = child[0] & 1, bytes([child[0] & 254]) + child[1:]
        if flag:
            seed = xor(seed, points.seeds[level, number].tobytes())
            child_flag ^= points.flags[level, number] >> side & 1
        flag = child_flag
    words, blocks = points.finals.shape[1], -(-points.finals.shape[1] // 4)
    counted = [seed[:8] + xor(seed[8:], n.to_bytes(8, "little")) for n in range(blocks)]
    value = np.frombuffer(b"".join(plain_hash(keys[2], each) for each in counted), "<u4")[:words]
    value = value + flag * points.finals[number]
    return -value if party else value


def test_shares_are_those_of_the_paper():
    points, roots = make_points(np.array([4, 0, 2]), np.full((3, 6), 7, np.uint32), 3, HASHES, seeded(2))
    for party, share in enumerate(shares(5, points, roots)):
        for number in range(3):
            for place in range(5):
                expected = plain_share(place, 3, points, number, roots[party, number].tobytes(), party)
                np.testing.assert_array_equal(share[number, place], expected)


def public_bits(place: int, payload: int, number: int) -> np.ndarray:
    """What both parties get of many functions with one point, as bits: [function, bit]."""
    count = 4000
    places, payloads = np.full(count, place), np.full((count, 2), payload, np.uint32)
    points, _ = make_points(places, payloads, 4, HASHES, seeded(number))
    seeds = np.unpackbits(points.seeds.swapaxes(0, 1).reshape(count, -1).view(np.uint8), axis=1)
    flags = np.unpackbits(points.flags.T.copy(), axis=1)
    return np.concatenate([seeds, flags, np.unpackbits(points.finals.view(np.uint8), axis=1)], axis=1)


def test_what_both_parties_get_is_random_for_any_point():
    """Every bit is a fair coin, but for those that are always zero: one of a seed, and six of a byte of flags."""
    for number, (place, payload) in enumerate([(0, 0), (15, 0), (6, 2**32 - 1)]):
        bits = public_bits(place, payload, number)
        sums = bits.sum(0)
        assert (sums == 0).sum() == 4 * (1 + 6)
        scores = (sums[sums > 0] - 2000.0) / np.sqrt(1000)
        assert np.abs(scores).max() < 4.9
        assert abs((scores**2).mean() - 1) < 5 * np.sqrt(2 / len(scores))


def test_pairs_of_public_bits_are_not_tied():
    """Neighbouring bits differ half of the time: what is random bit by bit could still be so together."""
    bits = public_bits(9, 1, 7)
    bits = bits[:, bits.any(0)]
    scores = ((bits[:, 1:] ^ bits[:, :-1]).sum(0) - 2000.0) / np.sqrt(1000)
    assert np.abs(scores).max() < 4.9


def test_one_partys_share_looks_uniform():
    payloads = np.zeros((300, 9), np.uint32)
    points, roots = make_points(np.zeros(300, int), payloads, 5, HASHES, seeded(3))
    for share in shares(32, points, roots):
        counts = np.bincount(share.view(np.uint8).reshape(-1), minlength=256)
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)


def test_keys_of_other_clients_and_rounds_give_other_hashes():
    found = set()
    for context, nonce in (
        (b"a", bytes(16)),
        (b"b", bytes(16)),
        (b"a", bytes(15) + b"b"),
        (b"ab", bytes(16)),
    ):
        for encrypt in make_hashes(context, nonce):
            out = room(1)
            encrypt(np.zeros((1, 2), np.uint64), out)
            found.add(out[0].tobytes())
    assert len(found) == 12


@pytest.mark.parametrize(
    ("key", "block", "expected"),
    [  # FIPS 197: appendices C.1 and B
        (
            "000102030405060708090a0b0c0d0e0f",
            "00112233445566778899aabbccddeeff",
            "69c4e0d86a7b0430d8cdb78070b4c55a",
        ),
        (
            "2b7e151628aed2a6abf7158809cf4f3c",
            "3243f6a8885a308d313198a2e0370734",
            "3925841d02dc09fbdc118597196a0b32",
        ),
    ],
)
def test_the_cipher_is_aes(key, block, expected):
    blocks = np.frombuffer(bytes.fromhex(block) * 3, np.uint64).reshape(3, 2)
    out = room(3)
    block_cipher(bytes.fromhex(key))(blocks, out)
    assert out[:-1].tobytes().hex() == expected * 3


def test_a_key_stream_is_the_cipher_of_a_counter():
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    counters = np.frombuffer(b"".join(n.to_bytes(16, "big") for n in range(3)), np.uint64).reshape(3, 2)
    out = room(3)
    block_cipher(key)(counters, out)
    assert keystream(key, 41).tobytes() == out[:-1].tobytes()[:41]
    assert keystream(bytes(16), 16).tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"


def test_the_functions_of_one_seed_stay_the_same():
    points, roots = make_points(np.array([1, 2]), np.ones((2, 3), np.uint32), 2, HASHES, seeded(9))
    everything = b"".join(each.tobytes() for each in (*points, *shares(4, points, roots)))
    assert blake2s(everything, digest_size=8).hexdigest() == "3b6638fcffa0b4b6"


@pytest.mark.parametrize(("buckets", "size", "words"), [(1, 3, 1), (5, 6, 4), (7, 33, 9)])
def test_compiled_and_plain_loops_are_equal(buckets, size, words):
    pytest.importorskip("numba")
    draw = np.random.default_rng(size)
    whole = lambda kind, *shape: draw.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    bits = lambda most, *shape: draw.integers(0, most, shape, dtype=np.uint8)
    table, strings = whole(np.uint8, buckets, size, words), whole(np.uint8, -(-buckets * size // 8))
    seeds = whole(np.uint64, buckets * size, 2)
    narrow = -(-size // 2)
    nodes = [whole(np.uint64, buckets * narrow, 2) for _ in range(3)]
    fixes = bits(2, buckets * narrow), whole(np.uint64, buckets, 2), bits(4, buckets)
    leaves = whole(np.uint32, 6, words + 3), whole(np.uint32, 6, words + 3), bits(2, 6)
    finals, sums = whole(np.uint32, buckets, words), whole(np.uint32, buckets * max(size, 6), words)
    found = []
    for each in (numpy_kernels(), compiled_kernels()):
        rows, spread = np.empty((buckets, words), np.uint8), np.empty((len(seeds) * 3, 2), np.uint64)
        children, flags = np.empty((buckets * size, 2), np.uint64), np.empty(buckets * size, np.uint8)
        each.scan(table, strings, rows)
        each.spread(seeds, 3, spread)
        each.children(*nodes, *fixes, children, flags)
        totals = [sums.copy(), sums.copy()]
        for party in (0, 1):
            each.add(*leaves, finals, totals[party], 0, max(size, 6), party)
        found.append([rows, spread, children, flags, *totals])
    for plain, compiled in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, compiled)


def test_without_a_compiler_plain_loops_are_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels.cache_clear()
    try:
        assert kernels() == numpy_kernels()
        points, roots = make_points(np.array([4]), np.full((1, 5), 3, np.uint32), 3, HASHES, seeded(2))
        total = sum(shares(7, points, roots))
        assert total[0, 4].tolist() == [3] * 5
        assert total.sum() == 15
    finally:
        kernels.cache_clear()
