"""Rows of tables on the host, copied by threads, against plain indexing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from partwise.simulation import host_rows
from partwise.simulation.host_rows import read_rows, write_rows

SHAPES = [(), (3,), (2, 2)]
TYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int32]


@pytest.fixture(params=[1, 40, 1 << 22])
def block_bytes(request, monkeypatch):
    """Every row a block, some blocks, and one block."""
    monkeypatch.setattr(host_rows, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 30])
def test_rows_are_read_and_written_as_by_plain_indexing(shape, dtype, count):
    rng = np.random.default_rng(count)
    table = rng.integers(-9, 9, (50, *shape)).astype(dtype)
    rows = np.sort(rng.choice(50, count, replace=False))
    found = read_rows(table, rows, 32)
    np.testing.assert_array_equal(found[:count], table[rows])
    assert (found.dtype, found.shape) == (table.dtype, (32, *shape))
    assert not found[count:].astype(np.float32).any()
    expected = table.copy()
    expected[rows] = (found + found.dtype.type(1))[:count]
    write_rows(table, rows, found + found.dtype.type(1))
    np.testing.assert_array_equal(table, expected)


def test_what_goes_wrong_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(host_rows, "BLOCK_BYTES", 4)
    with pytest.raises(IndexError):
        write_rows(np.zeros(3), np.array([0, 5]), np.ones(2))
