from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.data import ClientStore, build, build_store, open_store, spool, write_store
from partwise.data.build import join_blocks
from partwise.types import UserError


def table(seed: int, num_rows: int, text: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(-5, 20, num_rows), rng.integers(0, 30, num_rows)
    return {
        "user": np.char.add("u", user.astype(str)) if text else user,
        "item": np.char.add("i", item.astype(str)) if text else item,
        "rating": rng.standard_normal(num_rows).astype(np.float32),
        "pair": rng.standard_normal((num_rows, 2)),
        "time": rng.integers(0, 9, num_rows),
    }


def to_arrow(batch: dict[str, np.ndarray]) -> pa.Table:
    flat = {name: values for name, values in batch.items() if name != "pair"}
    pair = pa.FixedSizeListArray.from_arrays(pa.array(batch["pair"].reshape(-1)), 2)
    return pa.table({**flat, "pair": pair}).select(list(batch))


def assert_same(one: ClientStore, other: ClientStore) -> None:
    for name in ("client_ids", "starts", "counts"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert list(one.columns) == list(other.columns)
    for name, values in one.columns.items():
        assert values.dtype == other.columns[name].dtype, name
        assert np.array_equal(values, other.columns[name]), name
    for name, values in one.vocabularies.items():
        assert np.array_equal(values, other.vocabularies[name]), name


@given(
    st.integers(0, 10_000),
    st.integers(1, 200),
    st.booleans(),
    st.booleans(),
    st.integers(1, 70),
    st.integers(1, 50),
)
@settings(max_examples=30, deadline=None)
def test_out_of_core_equals_in_memory(
    tmp_path_factory, seed, num_rows, text, ordered, batch_rows, rows_at_once
):
    rows = table(seed, num_rows, text)
    cuts = [slice(k, k + batch_rows) for k in range(0, num_rows, batch_rows)]
    batches = [{name: values[cut] for name, values in rows.items()} for cut in cuts]
    batches = [to_arrow(batch) if k % 2 else batch for k, batch in enumerate(batches)]
    folder = tmp_path_factory.mktemp("build") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ROWS_AT_ONCE", rows_at_once)
        built = build_store(
            folder, iter(batches), "user", ids=("item",), order_by="time" if ordered else None
        )
    columns = {name: values for name, values in rows.items() if name != "user"}
    expected = ClientStore.from_arrays(rows["user"], ids=("item",), **columns)
    assert_same(built, expected.reorder(by="time") if ordered else expected)
    assert sorted(path.name for path in folder.iterdir()) == [
        "clients.arrow",
        "examples.arrow",
        "store.json",
        "vocabularies.arrow",
    ]


def test_blocks_already_grouped_are_written_as_they_come(tmp_path):
    blocks = [
        (np.array([7, 3]), np.array([2, 0]), {"x": np.array([1.0, 2.0])}),
        (np.array([5]), np.array([1]), {"x": np.array([3.0])}),
    ]
    store = write_store(tmp_path / "store", blocks, info={"made": "here"})
    assert store.client_ids.tolist() == [7, 3, 5]
    assert [store.examples(k)["x"].tolist() for k in range(3)] == [[1, 2], [], [3]]
    assert store.info == {"made": "here"}


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there are no rows to store"),
        ([{"user": [], "x": []}], "there are no rows to store"),
        ([{"user": [1], "x": [1.0]}, {"user": [2, 3], "x": [1.0, np.nan]}], "nan in row 2 of client 3"),
        (
            [{"user": [1], "x": [1]}, {"user": [1], "x": [1.5]}],
            "rows from 1 on have columns .*give every batch the",
        ),
        ([{"usr": [1], "x": [1]}], "unknown column 'user' .nearest: usr"),
        ([{"user": [1], "x": [1, 2]}], "column 'x' has 2 rows, the client column has 1"),
        ([pa.table({"user": [1, 2], "x": [1, None]})], "column 'x' has 1 missing values, the first: row 1"),
        ([pa.table({"user": [1, 1], "x": [[1, 2], [1]]})], r"different lengths \(2 in row 0, 1 in row 1\)"),
        ([pa.table({"user": [1], "x": [{"a": 1}]})], "column 'x' holds struct<.*one number or id per row"),
        ([pa.table({"user": [1], "x": ["a"]})], "column 'x' holds .*'a', row 0"),
        ([[1, 2]], "a batch is a list: give pyarrow RecordBatches"),
    ],
)
def test_bad_batches_are_refused_and_leave_nothing(tmp_path, batches, message):
    with pytest.raises(UserError, match=message):
        build_store(tmp_path / "store", batches, "user")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([([1], [1], {"x": [1.0]}), ([1], [1], {"x": [1.0]})], "client 1 turns up twice"),
        ([([1, 2], [1], {"x": [1.0]})], "2 client ids and 1 counts"),
        ([([1], [2], {"x": [1.0]})], "column 'x' has 1 rows, the client column has 2"),
        ([([1], [1], {"x": [np.inf]})], "column 'x' has 1 values that are not finite"),
        ([], "there are no rows to store"),
    ],
)
def test_bad_blocks_are_refused_and_leave_nothing(tmp_path, blocks, message):
    with pytest.raises(UserError, match=message):
        write_store(tmp_path / "store", blocks)
    assert list(tmp_path.iterdir()) == []


def test_arrow_types_that_numpy_lacks(tmp_path):
    moment = pa.array([86_400, 0], pa.timestamp("s"))
    kind = pa.array(["x", "y"]).dictionary_encode()
    batch = pa.table(
        {"user": kind, "time": moment, "day": pa.array([1, 2], pa.date32()), "like": [True, False]}
    )
    store = build_store(tmp_path / "store", [batch], "user", order_by="time")
    assert store.client_ids.tolist() == ["x", "y"]
    assert store.columns["time"].tolist() == [86_400 * 10**9, 0]
    assert store.columns["day"].tolist() == [86_400 * 10**9, 2 * 86_400 * 10**9]
    assert store.columns["like"].dtype == bool


def test_images_and_bags_of_words_are_built_a_few_at_a_time(tmp_path, monkeypatch):
    """From arrays, or from Arrow's lists of lists."""
    rng = np.random.default_rng(1)
    user, row = rng.integers(0, 9, 80), np.arange(80)
    words = rng.integers(-1, 30, (80, 6)).astype(np.int32)
    pixels = rng.integers(0, 256, (80, 28, 28)).astype(np.uint8)
    lines = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 28)
    rows = {"user": user, "words": words, "pixels": pixels, "row": row}
    bags = pa.FixedSizeListArray.from_arrays(pa.array(words.reshape(-1)), 6)
    images = pa.FixedSizeListArray.from_arrays(lines, 28)
    arrow = pa.table({"user": user, "words": bags, "pixels": images, "row": row})
    monkeypatch.setattr(spool, "BYTES_AT_ONCE", 9000)
    expected = ClientStore.from_arrays(user, words=words, pixels=pixels, row=row)
    for name, batch in (("arrays", rows), ("arrow", arrow)):
        assert_same(build_store(tmp_path / name, [batch], "user", order_by="row"), expected)
    with pytest.raises(
        UserError, match=r"cannot be sorted by column 'words', which has \(6,\) values per row"
    ):
        build_store(tmp_path / "bad", [rows], "user", order_by="words")


KILLED = """
import signal, sys, time, numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # even where the parent ignores it
from partwise.data import build_store
def batches():
    for k in range(10**9):
        yield {"user": np.arange(1000), "x": np.arange(1000.0)}
        if k == 3:
            print("spooling", flush=True)
            time.sleep(600)
build_store(sys.argv[1], batches(), "user")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_leaves_no_half_store(tmp_path, how):
    target = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"spooling\n"
    process.send_signal(how)
    process.wait(timeout=120)
    process.stdout.close()
    assert process.returncode != 0
    assert not target.exists()
    left = [path.name for path in tmp_path.iterdir()]
    assert left == [] if how == signal.SIGINT else all(name.endswith(".partial") for name in left)
    with pytest.raises(UserError, match="does not exist: check the path"):
        open_store(target)
    assert build_store(target, [{"user": [1], "x": [2.0]}], "user").num_examples == 1


def test_a_failing_source_leaves_nothing(tmp_path):
    def batches():
        yield {"user": [1], "x": [1.0]}
        raise RuntimeError("the network went away")

    with pytest.raises(RuntimeError, match="the network went away"):
        build_store(tmp_path / "store", batches(), "user")
    assert list(tmp_path.iterdir()) == []


def test_gathering_a_few_clients_reads_only_their_rows(tmp_path):
    """Resident memory stays far below the columns' size."""
    rows = 20_000
    blocks = ((np.arange(k * 100, k * 100 + 100), np.full(100, rows // 100), {"x": np.full(rows, k, np.float64)})
              for k in range(400))  # 64 MB  # fmt: skip
    store = write_store(tmp_path / "store", blocks)
    before = psutil.Process().memory_info().rss
    gathered = store.gather(np.arange(0, 40_000, 4000))
    assert gathered.columns["x"].tolist() == np.repeat(np.arange(0, 400, 40.0), 200).tolist()
    assert psutil.Process().memory_info().rss - before < 16e6


def test_blocks_joined_in_memory_equal_those_on_disk(tmp_path):
    rng = np.random.default_rng(2)
    blocks = []
    for k in range(5):
        counts = rng.integers(0, 6, 4)
        pixels = rng.integers(0, 256, (counts.sum(), 28, 28)).astype(np.uint8)
        columns = {"pixels": pixels, "x": rng.random(counts.sum()), "like": rng.random(counts.sum()) > 0.5}
        blocks.append((np.arange(4) + 4 * k, counts, columns))
    vocabularies = {"x": np.arange(3)}
    joined = join_blocks(iter(blocks), vocabularies, {"made": "here"})
    assert_same(joined, write_store(tmp_path / "store", blocks, vocabularies))
    assert joined.info == {"made": "here"}
    assert joined.packed()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([([1], [1], {"x": [1.0]}), ([1], [1], {"x": [1.0]})], "client 1 turns up twice"),
        ([([1], [1], {"x": [1.0]}), ([2], [1], {"x": [1]})], "rows from 1 on have columns x int64"),
        ([([1], [1], {"x": [np.nan]})], "column 'x' has 1 values that are not finite"),
        ([], "there are no rows to store"),
    ],
)
def test_bad_blocks_are_not_joined(blocks, message):
    with pytest.raises(UserError, match=message):
        join_blocks(blocks)
