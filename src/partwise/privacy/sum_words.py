"""Sums as words of 32 bits, in which masks and shares cancel to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class SumWords(NamedTuple):
    """A contribution, a sum of several, or a share of one. Of a client, tables have the rows of its keys; of a sum,
    all rows."""

    dense: np.ndarray  # uint32 [words]
    tables: Mapping[str, np.ndarray]  # key space -> uint32 [keys, words]


def added(first: SumWords, second: SumWords) -> SumWords:
    """The sum of two sums, modulo 2^32."""
    tables = {space: rows + second.tables[space] for space, rows in first.tables.items()}
    return SumWords(first.dense + second.dense, tables)
