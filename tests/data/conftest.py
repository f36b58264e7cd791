from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from partwise.data import ClientStore


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the real data sets."""
    if "PARTWISE_DATA" not in os.environ:
        pytest.skip("PARTWISE_DATA is not set: the real MovieLens files are needed")
    return Path(os.environ["PARTWISE_DATA"])


@pytest.fixture
def small() -> ClientStore:
    """Three clients 'a', 'b', 'c' with 3, 1 and 2 rows, given in a mixed order."""
    return ClientStore.from_arrays(
        ["b", "a", "c", "a", "a", "c"],
        ids=("item",),
        item=[10, 30, 10, 20, 40, 20],
        rating=np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], np.float32),
        time=[7, 9, 2, 5, 1, 8],
        info={"source": "test"},
    )
