"""The benchmark of private slices measures real messages."""

from __future__ import annotations

from partwise import bench
from partwise.privacy.buckets import make_layout
from partwise.privacy.retrieval import query_sizes
from partwise.privacy.slices_cost import COLUMNS, measure_slices
from partwise.privacy.sparse_sum import write_sizes


def test_figures_are_of_one_client():
    found, layout = measure_slices(300, 5, 4), make_layout(300, 5, bytes(32))
    assert found["asked_bytes"] == query_sizes(layout, 16).asked
    assert found["read_bytes"] == query_sizes(layout, 16).total
    assert found["write_bytes"] == write_sizes(layout, 4).total
    assert found["table_bytes"] == 300 * 16
    assert found["read_server_ms"] > 0
    assert all(column(found) for column in COLUMNS.values())


def test_the_benchmark_is_listed_with_the_case_of_the_design():
    cases = bench.BENCHMARKS["private-slices"].cases(False)
    of = {case.name: case.changes["of"] for case in cases}
    assert of["1,000 of 100,000"] == (100_000, 1000, 96)
    assert of["100 of 1,000,000"] == (1_000_000, 100, 96)
