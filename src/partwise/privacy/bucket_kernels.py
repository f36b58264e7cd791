"""The loops of private slices that take the time: compiled by `numba` if it is installed, and in NumPy otherwise.

Both give the same bytes. A compiled loop lets other threads run. None branches on what is secret of a client: what
a server reads here is random whatever the client's keys are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Kernels(NamedTuple):
    """What is compiled.

    scan:     table [b, s, r], bits, out [b, r]: xor of the rows of each bucket whose bit is set
    spread:   seeds [n, 2], out [n x count, 2]: sigma(seed xor number), for the numbers below `count`
    children: the two children of each node of a level; see `children_of_nodes`
    add:      leaves to the sums of their slots; see `add_leaves`
    """

    scan: Callable[..., None]
    spread: Callable[..., None]
    children: Callable[..., None]
    add: Callable[..., None]


@lru_cache(1)
def kernels() -> Kernels:
    """The compiled ones, if there is a compiler."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return numpy_kernels()
    return compiled_kernels()


def numpy_kernels() -> Kernels:
    return Kernels(scan_numpy, spread_numpy, children_numpy, add_numpy)


@lru_cache(1)
def compiled_kernels() -> Kernels:
    return Kernels(*map(_compiled, (scan_rows, spread_seeds, children_of_nodes, add_leaves)))


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    from numba import njit

    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # there is no folder for the cache that can be written to
        return njit(nogil=True)(function)


def scan_rows(table: np.ndarray, bits: np.ndarray, out: np.ndarray) -> None:
    buckets, size, width = table.shape
    for bucket in range(buckets):
        for column in range(width):
            out[bucket, column] = 0
        for offset in range(size):
            slot = bucket * size + offset
            mask = np.uint8(0) - np.uint8((bits[slot >> 3] >> np.uint8(slot & 7)) & np.uint8(1))
            for column in range(width):
                out[bucket, column] ^= table[bucket, offset, column] & mask


def scan_numpy(table: np.ndarray, bits: np.ndarray, out: np.ndarray) -> None:
    buckets, size, _ = table.shape
    chosen = np.unpackbits(bits, count=buckets * size, bitorder="little").view(bool).reshape(buckets, size)
    for bucket in range(buckets):
        np.bitwise_xor.reduce(table[bucket][chosen[bucket]], axis=0, out=out[bucket])


def spread_seeds(seeds: np.ndarray, count: int, out: np.ndarray) -> None:
    for index in range(len(seeds)):
        first = seeds[index, 0]
        for number in range(count):
            out[index * count + number, 0] = first ^ seeds[index, 1] ^ np.uint64(number)
            out[index * count + number, 1] = first


def spread_numpy(seeds: np.ndarray, count: int, out: np.ndarray) -> None:
    shaped = out.reshape(len(seeds), count, 2)
    shaped[:, :, 0] = (seeds[:, 0] ^ seeds[:, 1])[:, None] ^ np.arange(count, dtype=np.uint64)
    shaped[:, :, 1] = seeds[:, :1]


def children_of_nodes(inputs, left, right, flags, fixes, fix_flags, out, out_flags) -> None:
    """The next level of the trees of all buckets.

    inputs, left, right: [b x n, 2], sigma of the nodes, and it encrypted with the keys of the two sides
    flags:               [b x n], the control bits of the nodes
    fixes, fix_flags:    [b, 2] and [b], the correction words: bit 0 for the left side, bit 1 for the right
    out, out_flags:      [b x n', 2] and [b x n'], where n' is 2n, or 2n - 1 where the last is of no slot
    """
    buckets = len(fixes)
    wide, narrow = len(out) // buckets, len(flags) // buckets
    one = np.uint64(1)
    for bucket in range(buckets):
        for child in range(wide):
            node = bucket * narrow + (child >> 1)
            side = left if child & 1 == 0 else right
            flag = np.uint64(flags[node])
            mask = np.uint64(0) - flag
            first = side[node, 0] ^ inputs[node, 0]
            fix_flag = np.uint64(fix_flags[bucket] >> np.uint8(child & 1)) & one
            place = bucket * wide + child
            out[place, 0] = (first & ~one) ^ (fixes[bucket, 0] & mask)
            out[place, 1] = side[node, 1] ^ inputs[node, 1] ^ (fixes[bucket, 1] & mask)
            out_flags[place] = (first & one) ^ (flag & fix_flag)


def children_numpy(inputs, left, right, flags, fixes, fix_flags, out, out_flags) -> None:
    buckets, one = len(fixes), np.uint64(1)
    wide, narrow = len(out) // buckets, len(flags) // buckets
    flag = flags.reshape(buckets, narrow)
    for number, side in enumerate((left, right)):
        share = (side ^ inputs).reshape(buckets, narrow, 2)
        fix_flag = ((fix_flags >> number) & 1)[:, None]
        wanted = slice(None) if number == 0 else slice(wide // 2)
        bits = (share[:, :, 0] & one).astype(np.uint8) ^ (flag & fix_flag)
        out_flags.reshape(buckets, wide)[:, number::2] = bits[:, wanted]
        share[:, :, 0] &= ~one
        share ^= fixes[:, None] * flag[:, :, None].astype(np.uint64)
        out.reshape(buckets, wide, 2)[:, number::2] = share[:, wanted]


def add_leaves(inputs, encrypted, flags, finals, sums, start, size, party) -> None:
    """Add the shares of some leaves to the sums of their slots, mod 2**32.

    inputs, encrypted: [n, words], what was encrypted and what came out; a leaf's words are their xor
    flags:             [n], the control bits of the leaves
    finals:            [b, words], the final words of the buckets
    sums:              [b x size, words], of this party
    start:             the slot of the first leaf
    party:             0 adds, 1 subtracts
    """
    words = sums.shape[1]
    for leaf in range(len(flags)):
        slot = start + leaf
        bucket = slot // size
        mask = np.uint32(0) - np.uint32(flags[leaf])
        if party == 0:
            for word in range(words):
                sums[slot, word] += (inputs[leaf, word] ^ encrypted[leaf, word]) + (
                    finals[bucket, word] & mask
                )
        else:
            for word in range(words):
                sums[slot, word] -= (inputs[leaf, word] ^ encrypted[leaf, word]) + (
                    finals[bucket, word] & mask
                )


def add_numpy(inputs, encrypted, flags, finals, sums, start, size, party) -> None:
    stop, words = start + len(flags), sums.shape[1]
    values = inputs[:, :words] ^ encrypted[: len(flags), :words]
    values += finals[np.arange(start, stop) // size] * flags[:, None].astype(np.uint32)
    if party == 0:
        sums[start:stop] += values
    else:
        sums[start:stop] -= values
