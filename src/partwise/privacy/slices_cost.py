"""What private slices cost, measured: `partwise bench private-slices`.

One client asks for as many keys as it may and writes to all of them. A server's time is that of one of the two, for
one client, on one core, without the first call, in which loops are compiled. Tables have random bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from partwise.privacy import retrieval, sparse_sum
from partwise.privacy.buckets import BucketLayout, make_layout

REPEATS = 5
ROUND = b"measured"
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "read\nserver": lambda line: f"{line['read_server_ms']:.1f}",
    "read\nclient": lambda line: f"{line['read_client_ms']:.1f}",
    "ask\nkB": lambda line: f"{line['asked_bytes'] / 1e3:,.0f}",
    "read\nkB": lambda line: f"{line['read_bytes'] / 1e3:,.0f}",
    "whole\nkB": lambda line: f"{line['table_bytes'] / 1e3:,.0f}",
    "write\nserver": lambda line: f"{line['write_server_ms']:.1f}",
    "write\nclient": lambda line: f"{line['write_client_ms']:.1f}",
    "write\nkB": lambda line: f"{line['write_bytes'] / 1e3:,.0f}",
}
NOTE = (
    "Milliseconds of one client, and of one of two servers for it; kB of the "
    "question, and of all messages; whole: a plain table."
)


def measure_slices(num_keys: int, most: int, num_words: int) -> dict[str, Any]:
    """Bytes and milliseconds for one client with `most` keys of a table with rows of so many 4-byte words."""
    draw = np.random.default_rng(1)
    layout = make_layout(num_keys, most, bytes(32))
    keys = draw.permutation(num_keys)[:most]
    return {
        "buckets": layout.num_buckets,
        "table_bytes": num_keys * num_words * 4,
        **_reading(layout, keys, draw.integers(0, 256, (num_keys, num_words * 4), np.uint8)),
        **_writing(layout, keys, draw.integers(0, 2**32, (most, num_words), np.uint32)),
    }


def _reading(layout: BucketLayout, keys: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    began = time.perf_counter()
    table = retrieval.bucket_table(layout, rows, ROUND)
    made = 1e3 * (time.perf_counter() - began)
    client, query = _timed(lambda: retrieval.make_query(layout, keys))
    server, second = _timed(lambda: retrieval.answer_second(table, layout, query.to_both, query.to_second))
    first = retrieval.answer_first(table, layout, query.to_both, query.to_first)
    reading, (found, values) = _timed(lambda: retrieval.read_rows(query, layout, ROUND, first, second))
    assert np.array_equal(values, rows[found])
    sizes = retrieval.query_sizes(layout, rows.shape[1])
    return {
        "asked_bytes": sizes.asked,
        "read_bytes": sizes.total,
        "read_relayed_bytes": sizes.relayed,
        "read_client_ms": client + reading,
        "read_server_ms": server,
        "table_ms": made,
    }


def _writing(layout: BucketLayout, keys: np.ndarray, words: np.ndarray) -> dict[str, Any]:
    """A server's time is that which one more write takes."""
    nonces = [os.urandom(sparse_sum.NONCE) for _ in range(REPEATS)]
    client, (write, _) = _timed(lambda: sparse_sum.make_write(layout, keys, words, ROUND, nonces[0]))
    writes = [(nonce, write.public, write.first) for nonce in nonces]  # with wrong nonces they cost as much
    share = lambda some: sparse_sum.accumulate(layout, words.shape[1], ROUND, some, 0)
    (one, _), (all_of_them, _) = _timed(lambda: share(writes[:1])), _timed(lambda: share(writes))
    return {
        "write_bytes": sparse_sum.write_sizes(layout, words.shape[1]).total,
        "write_client_ms": client,
        "write_server_ms": (all_of_them - one) / (REPEATS - 1),
    }


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """The least milliseconds of some calls after the first, and what the last one returned."""
    function()
    seconds, result = [], None
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - began)
    return 1e3 * min(seconds), result
