"""Distributed point functions: a table that is zero but for one row, as two short keys that each look random.

Each of two parties grows a binary tree from its own seed. Where a path leaves that to the wanted leaf, correction
words make both trees the same from there on, so that all other leaves cancel; at the wanted one, the final words
leave exactly the payload (Boyle, Gilboa and Ishai 2016, figure 1). Many functions, one for each bucket, are made
and evaluated together. Payloads are words mod 2**32, and the two parties' shares add up to them; or they are
blocks, and the xor of the shares is the payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partwise.privacy.aes import BLOCK, Encrypt, block_cipher, derived, framed, room
from partwise.privacy.bucket_kernels import kernels
from partwise.privacy.buckets import Random

WORDS = BLOCK // 4  # in a block
TREES = 1 << 15  # leaves of trees that are grown together
LEAVES = 1 << 10  # leaves whose words are made together: they stay in the processor's cache


class Hashes(NamedTuple):
    """The fixed-key ciphers of one client: for left children, for right children, and for the words of leaves."""

    left: Encrypt
    right: Encrypt
    value: Encrypt


class Corrections(NamedTuple):
    """What both parties get of n functions.

    seeds:  [depth, n, 2], 64-bit words; the lowest bit of the first is zero
    flags:  [depth, n]: bit 0 for left children, bit 1 for right ones
    finals: [n, words]
    """

    seeds: np.ndarray
    flags: np.ndarray
    finals: np.ndarray


def make_hashes(context: bytes, nonce: bytes) -> Hashes:
    """Keys follow from a client's public nonce, so that no two clients have the same: what is computed against one
    client's fixed keys is of no use against another's."""
    keys = derived(framed(context, nonce), b"partwise point functions", 3 * BLOCK)
    return Hashes(*(block_cipher(keys[start : start + BLOCK]) for start in range(0, len(keys), BLOCK)))


def depth_of(size: int) -> int:
    """Levels of a tree with so many leaves."""
    return max(1, (size - 1).bit_length())


def make_points(
    places: np.ndarray, payloads: np.ndarray, depth: int, hashes: Hashes, random: Random
) -> tuple[Corrections, np.ndarray]:
    """Functions with the payloads [n, words] at the places [n], and the seeds [party, n, 2] of their trees."""
    roots = np.frombuffer(random(2 * len(places) * BLOCK), np.uint64).reshape(2, -1, 2)
    fixes, fix_flags, seeds, flags = _paths(places, depth, hashes, roots)
    first, second = (_words(each, payloads.shape[1], hashes) for each in seeds)
    finals = payloads.astype(np.uint32) - first + second
    finals = np.where(flags[1][:, None] == 1, -finals, finals)
    return Corrections(fixes, fix_flags, finals), roots


def make_block_points(
    places: np.ndarray, payloads: np.ndarray, depth: int, hashes: Hashes, roots: np.ndarray
) -> Corrections:
    """Functions with the blocks [n, 4] (32-bit words) at the places [n], for trees with the given seeds."""
    fixes, fix_flags, seeds, _ = _paths(places, depth, hashes, roots)
    first, second = (_words(each, WORDS, hashes) for each in seeds)
    return Corrections(fixes, fix_flags, payloads ^ first ^ second)


def _paths(
    places: np.ndarray, depth: int, hashes: Hashes, roots: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The correction words of all levels and their flags, and both parties' leaves at the places [party, n, 2] and
    their flags."""
    count = len(places)
    seeds, flags = roots, np.stack([np.zeros(count, np.uint8), np.ones(count, np.uint8)])
    levels = []
    for level in range(depth):
        right = ((places >> (depth - 1 - level)) & 1).astype(np.uint8)
        fix, fix_flags, seeds, flags = _grow(seeds, flags, right, hashes)
        levels.append((fix, fix_flags))
    return np.stack([fix for fix, _ in levels]), np.stack([bits for _, bits in levels]), seeds, flags


def _grow(
    seeds: np.ndarray, flags: np.ndarray, right: np.ndarray, hashes: Hashes
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One level of the paths of both parties: the correction words, and the next nodes [party, n, 2] with their
    flags [party, n]. `right` says for each function whether its path goes right."""
    sides = np.stack([_hashed(seeds, hashes.left), _hashed(seeds, hashes.right)])  # [side, party, n, 2]
    bits = (sides[..., 0] & np.uint64(1)).astype(np.uint8)
    sides[..., 0] &= ~np.uint64(1)
    each = np.arange(len(right))
    kept, kept_bits = sides[right, :, each], bits[right, :, each]  # [n, party, ...]
    lost = sides[1 - right, :, each]
    fix = lost[:, 0] ^ lost[:, 1]
    fix_bits = bits[:, 0] ^ bits[:, 1] ^ np.stack([right ^ 1, right])  # [side, n]
    on = flags.T
    following = kept ^ fix[:, None] * on[:, :, None].astype(np.uint64)
    next_flags = kept_bits ^ (on & fix_bits[right, each][:, None])
    return fix, fix_bits[0] | fix_bits[1] << 1, following.swapaxes(0, 1), next_flags.T


def _hashed(seeds: np.ndarray, encrypt: Encrypt, count: int = 1) -> np.ndarray:
    """The hashes of seeds [..., 2]; with a count, of each seed xor 0, 1, 2 ..."""
    inputs = np.empty((seeds.size // 2 * count, 2), np.uint64)
    kernels().spread(np.ascontiguousarray(seeds).reshape(-1, 2), count, inputs)
    encrypted = room(len(inputs))
    encrypt(inputs, encrypted)
    return (encrypted[:-1] ^ inputs).reshape(*seeds.shape[:-1], -1)


def _words(seeds: np.ndarray, words: int, hashes: Hashes) -> np.ndarray:
    """The words [n, words] of leaves."""
    return _hashed(seeds, hashes.value, -(-words // WORDS)).view(np.uint32)[:, :words]


def add_points(
    sums: np.ndarray, size: int, points: Corrections, roots: np.ndarray, hashes: Hashes, party: int
) -> None:
    """Add one party's shares of n functions over `size` places to `sums` [n x size, words], mod 2**32."""
    blocks = -(-sums.shape[1] // WORDS)
    inputs, encrypted = np.empty((LEAVES * blocks, 2), np.uint64), room(LEAVES * blocks)
    for start, seeds, flags in _leaves(size, points, roots, hashes, party):
        for low in range(0, len(seeds), LEAVES):
            some = seeds[low : low + LEAVES]
            used = inputs[: len(some) * blocks]
            kernels().spread(some, blocks, used)
            hashes.value(used, encrypted)
            shaped = (each.view(np.uint32)[: len(used)].reshape(len(some), -1) for each in (used, encrypted))
            bits = flags[low : low + LEAVES]
            kernels().add(*shaped, bits, points.finals, sums, start * size + low, size, party)


def block_shares(size: int, points: Corrections, roots: np.ndarray, hashes: Hashes, party: int) -> np.ndarray:
    """One party's shares of n functions over `size` places whose payloads are blocks: [n x size, 4]."""
    shares = np.empty((len(roots) * size, WORDS), np.uint32)
    for start, seeds, flags in _leaves(size, points, roots, hashes, party):
        some = np.arange(start * size, start * size + len(seeds))
        fixes = points.finals[some // size] * flags[:, None].astype(np.uint32)
        shares[some] = _words(seeds, WORDS, hashes) ^ fixes
    return shares


def corrections_size(count: int, depth: int, words: int) -> int:
    """Bytes of the corrections of so many functions."""
    return count * ((BLOCK + 1) * depth + 4 * words)


def pack_corrections(points: Corrections) -> bytes:
    """Seeds, flags and final words, one after the other."""
    return b"".join(part.tobytes() for part in points)


def unpack_corrections(packed: bytes, count: int, depth: int, words: int) -> Corrections:
    """The inverse of `pack_corrections`. Flags have two bits, and a seed's lowest bit is zero. Other bits are
    ignored."""
    seeds, flags = count * depth * BLOCK, count * depth
    return Corrections(
        np.frombuffer(packed, np.uint64, seeds // 8).reshape(depth, count, 2),
        np.frombuffer(packed, np.uint8, flags, seeds).reshape(depth, count),
        np.frombuffer(packed[seeds + flags :], np.uint32).reshape(count, words),
    )


def _leaves(
    size: int, points: Corrections, roots: np.ndarray, hashes: Hashes, party: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The seeds and flags of all leaves, for some functions at a time: the number of the first, and both."""
    step = max(1, TREES // size)
    for start in range(0, len(roots), step):
        part = slice(start, start + step)
        seeds = np.array(roots[part])
        flags = np.full(len(seeds), party, np.uint8)
        for level in range(len(points.seeds)):
            width = -(-size >> (len(points.seeds) - 1 - level))  # nodes above no leaf are left out
            fixes = points.seeds[level, part], points.flags[level, part]
            seeds, flags = _level(seeds, flags, *fixes, width, hashes)
        yield start, seeds, flags


def _level(
    seeds: np.ndarray,
    flags: np.ndarray,
    fixes: np.ndarray,
    fix_flags: np.ndarray,
    width: int,
    hashes: Hashes,
) -> tuple[np.ndarray, np.ndarray]:
    """The next level of some trees, with so many nodes each."""
    inputs = np.empty_like(seeds)
    kernels().spread(seeds, 1, inputs)
    left, right = room(len(seeds)), room(len(seeds))
    hashes.left(inputs, left)
    hashes.right(inputs, right)
    out = np.empty((len(fixes) * width, 2), np.uint64)
    out_flags = np.empty(len(out), np.uint8)
    kernels().children(inputs, left[:-1], right[:-1], flags, fixes, fix_flags, out, out_flags)
    return out, out_flags
