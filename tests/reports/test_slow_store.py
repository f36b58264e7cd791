"""The object store of benchmarks is read like one of S3, and counts."""

from __future__ import annotations

import numpy as np

from partwise.data import ClientStore, open_store
from partwise.reports.remote_seconds import cases
from partwise.reports.slow_store import Answered, serve_slowly


def test_a_folder_is_served_by_range(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    values = np.arange(300_000, dtype=np.int32)
    store = ClientStore.from_arrays(np.repeat(np.arange(3000), 100), x=values)
    store.save(tmp_path / "store")
    with serve_slowly(tmp_path / "store", 0.01) as server:
        far = open_store(server.url)
        before = server.served()
        np.testing.assert_array_equal(
            far.gather([7, 2900]).columns["x"], store.gather([7, 2900]).columns["x"]
        )
        asked = server.served()
    assert Answered(*np.subtract(asked, before)) == Answered(3, 2 * 100 * 4)  # two ranges, and the mark


def test_every_task_is_measured_at_every_place():
    assert [name for name, *_ in cases(quick=True)] == [
        "writers, local disk",
        "writers, object store",
        "writers, 50 ms away",
    ]
    assert len(cases(quick=False)) == 6
