"""Stores in an object store: the same clients, read by range, from a server that may fail."""

from __future__ import annotations

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from partwise.data import ClientStore, by_client, byte_ranges, object_store, open_store, read_table
from partwise.data.heat import count_heat
from partwise.data.store import is_store
from partwise.types import UserError

NUM_CLIENTS = 200


@pytest.fixture(scope="module")
def population() -> ClientStore:
    """Clients of 0 to 40 rows; rows of a column take 4, 12 and 1 bytes."""
    rng = np.random.default_rng(3)
    owner = np.repeat([f"client {k:03}" for k in range(NUM_CLIENTS)], rng.integers(1, 40, NUM_CLIENTS))
    return ClientStore.from_arrays(
        owner,
        ids=("item",),
        item=rng.integers(0, 50, len(owner)),
        place=rng.random((len(owner), 3)).astype(np.float32),
        liked=rng.random(len(owner)) < 0.5,
    )


@pytest.fixture
def patient(monkeypatch):
    """No long waits before another try."""
    monkeypatch.setattr(object_store, "WAITS", (0.01, 0.01))


@pytest.fixture
def exact(monkeypatch):
    """Nothing is read that is not asked for."""
    monkeypatch.setattr(byte_ranges, "CLOSE_BYTES", 0)


@pytest.fixture
def far(population, s3, s3_server, between):
    """The population behind the proxy, and its address. `between.asked` is empty."""

    def make(bucket: str) -> tuple[ClientStore, str]:
        url = s3(bucket)
        population.save(url)
        opened = open_store(url.replace(s3_server, between.host))
        between.asked.clear()
        return opened, url.replace(s3_server, between.host)

    return make


def assert_same(found: ClientStore, expected: ClientStore) -> None:
    assert found.client_ids.tolist() == expected.client_ids.tolist()
    assert found.counts.tolist() == expected.counts.tolist()
    for name, values in expected.columns.items():
        assert found.columns[name].dtype == values.dtype
        np.testing.assert_array_equal(found.columns[name], values)


@given(st.data())
@settings(max_examples=25)
def test_gathered_rows_are_those_of_the_memory_map(population, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("store") / "store"
    population.save(folder)
    near, remote = open_store(folder), open_store(f"file://{folder}")
    positions = data.draw(st.lists(st.integers(0, NUM_CLIENTS - 1), min_size=1, max_size=12))
    cap, close = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([0, 50, 1 << 16]))
    before, byte_ranges.CLOSE_BYTES = byte_ranges.CLOSE_BYTES, close
    try:
        view = lambda store: store.cap(cap).take(positions).select(["liked", "place"])
        assert_same(view(remote).gather(), view(near).gather())
        assert_same(remote.gather(positions).reorder(seed=1), near.gather(positions).reorder(seed=1))
        assert_same(remote.take(positions).reorder(by="item"), near.take(positions).reorder(by="item"))
    finally:
        byte_ranges.CLOSE_BYTES = before


def test_a_store_in_a_bucket_is_the_store_on_disk(population, far, tmp_path):
    population.save(tmp_path / "store")
    near, (remote, url) = open_store(tmp_path / "store"), far("same")
    assert remote.remote
    assert not near.remote
    assert repr(remote) == repr(near)
    assert not remote.packed()
    assert is_store(url)
    assert not is_store(url.replace("one", "two"))
    assert remote.vocabularies["item"].tolist() == near.vocabularies["item"].tolist()
    assert_same(remote.gather(), near.gather())
    for name, values in remote.examples(7).items():
        np.testing.assert_array_equal(values, near.examples(7)[name])
    for ours, theirs in zip(by_client(remote), by_client(near), strict=True):
        assert_same(ours.gather(), theirs.gather())
    assert count_heat(remote, "item").counts.tolist() == count_heat(near, "item").counts.tolist()
    with pytest.raises(UserError, match=r"gather\(\) them"):
        np.asarray(remote.columns["item"])
    for rows in ([1, 2], slice(0, 9, 2)):
        with pytest.raises(UserError, match="only consecutive rows are read"):
            remote.columns["item"][rows]
    np.testing.assert_array_equal(remote.columns["place"][5:9], near.columns["place"][5:9])
    with pytest.raises(UserError, match="already has a store"):
        population.save(url)


def test_opening_reads_no_example(far, between):
    _, url = far("opening")
    open_store(url)
    assert {asked.name for asked in between.asked if asked.method == "GET"} == {
        "store.json",
        "clients.arrow",
        "vocabularies.arrow",
    }


def test_only_the_rows_of_the_clients_that_are_asked_for_are_read(population, far, between, exact):
    remote, _ = far("ranges")
    some = [150, 3, 77, 3]
    assert_same(remote.gather(some), population.gather(some))
    rows = int(population.counts[[150, 3, 77]].sum())
    assert between.bytes_of("examples.arrow") == rows * (4 + 12 + 1)
    assert sum(asked.method == "GET" for asked in between.asked) == 3 * 3  # clients, columns
    between.asked.clear()
    remote.select(["item"]).take([8]).cap(2).gather()
    assert between.bytes_of("examples.arrow") == 2 * 4


def test_only_the_rows_of_the_clients_that_are_asked_for_are_touched_on_disk(population):
    touched = []

    class Watched(np.ndarray):
        def __getitem__(self, rows):
            touched.append(np.asarray(rows))
            return np.asarray(self)[rows]

    columns = {name: values.view(Watched) for name, values in population.columns.items()}
    watched = ClientStore(columns, population.starts, population.counts, population.client_ids)
    watched.gather([150, 3])
    mine = {row for k in (150, 3) for row in range(*population.starts[k] + [0, population.counts[k]])}
    assert len(touched) == 3
    assert all(set(rows.tolist()) == mine for rows in touched)


def test_all_requests_of_a_gathering_are_made_together(far, between, exact):
    """Of sixty requests for rows, none is answered before more than sixteen are made."""
    remote, _ = far("together")
    running, many = [], threading.Event()

    def waits(asked):
        if asked.method == "GET" and asked.name == "examples.arrow":
            running.append(asked)
            if len(running) > 16:
                many.set()
            many.wait(120)

    between.fault = waits
    remote.gather(np.arange(0, NUM_CLIENTS, 10))
    assert many.is_set()


@pytest.mark.parametrize("fault", [500, 503, "cut"])
def test_what_passes_is_tried_again(population, far, between, patient, fault):
    remote, _ = far(f"passes-{fault}")
    failed = []

    def fails_twice(asked):
        if len(failed) < 2:
            failed.append(asked)
            return fault
        return None

    between.fault = fails_twice
    assert_same(remote.gather([5, 90]), population.gather([5, 90]))
    assert len(failed) == 2


def test_what_does_not_pass_ends_with_the_cause(far, between, patient):
    remote, url = far("stays")
    between.fault = lambda asked: 500 if asked.method == "GET" else None
    with pytest.raises(UserError, match=r"s3://stays/models/one/examples.arrow.*HTTP status 500") as caught:
        remote.gather([5])
    assert isinstance(caught.value.__cause__, OSError)
    between.fault = lambda asked: 403
    with pytest.raises(UserError, match=r"s3://stays/models/one.*Give keys that may read"):
        open_store(url)
    with pytest.raises(UserError, match=r"s3://stays/models/one.*Check the address"):
        open_store(url.replace(between.host, "127.0.0.1:1"))


def test_an_answer_that_does_not_come_is_given_up(population, far, between, patient, monkeypatch):
    monkeypatch.setattr(object_store, "TIMEOUTS", {"connect_timeout": 1.0, "request_timeout": 1.0})
    remote, _ = far("hangs")
    hung = []

    def hangs_once(asked):
        if hung:
            return None
        hung.append(asked)
        return 3.0

    between.fault = hangs_once
    assert_same(remote.gather([5]), population.gather([5]))


def put(url: str, name: str, data: bytes) -> None:
    system, path = fs.FileSystem.from_uri(url)
    with system.open_output_stream(f"{path}/{name}") as file:
        file.write(data)


def get(url: str, name: str) -> bytes:
    system, path = fs.FileSystem.from_uri(url)
    with system.open_input_stream(f"{path}/{name}") as file:
        return file.read()


def test_a_file_that_changes_is_noticed(far, s3_server, between):
    remote, url = far("changes")
    url = url.replace(between.host, s3_server)
    data = get(url, "examples.arrow")
    put(url, "examples.arrow", data[:-500] + bytes(500))
    with pytest.raises(
        UserError, match=r"examples.arrow has changed while it was read: .*under another name"
    ):
        remote.gather([5])
    fs.FileSystem.from_uri(url)[0].delete_file("changes/models/one/examples.arrow")
    with pytest.raises(UserError, match=r"no such file in 's3://changes/models/one/examples.arrow"):
        remote.gather([5])


def test_a_store_that_was_not_copied_completely(far, s3_server, between):
    _, url = far("truncated")
    url = url.replace(between.host, s3_server)
    for name in ("examples.arrow", "clients.arrow"):
        data = get(url, name)
        put(url, name, data[:-1])
        with pytest.raises(UserError, match=rf"{name} has .* bytes, and its store.json says .*copy it again"):
            open_store(url)
        put(url, name, data)
    record = json.loads(get(url, "store.json"))
    put(url, "store.json", json.dumps({**record, "files": {}}).encode())
    with pytest.raises(UserError, match="save it again"):
        open_store(url)
    record["columns"]["item"]["offset"] = record["files"]["examples.arrow"]
    put(url, "store.json", json.dumps(record).encode())
    with pytest.raises(UserError, match=r"column 'item' is not inside examples.arrow"):
        open_store(url)
    put(url, "store.json", b"{")
    with pytest.raises(UserError, match=r"store.json cannot be read"):
        open_store(url)


def test_addresses_that_lead_nowhere(s3):
    url = s3("nowhere")
    with pytest.raises(UserError, match=r"no bucket 'nowhere-else'\. Make the bucket first"):
        open_store(url.replace("nowhere", "nowhere-else"))
    with pytest.raises(
        UserError, match=r"no store.json.*`partwise store TABLE --client COLUMN --out s3://nowhere"
    ):
        open_store(url)
    with pytest.raises(UserError, match="no address of a bucket"):
        open_store(f"{url}&nonsense=1")
    for secret in (url.replace("s3://", "s3://key:secret@"), f"{url}&secret_key=secret"):
        with pytest.raises(UserError, match="runs record addresses") as caught:
            open_store(secret)
        assert "secret@" not in str(caught.value)
        assert "=secret" not in str(caught.value)


def test_rows_that_do_not_fit_into_memory_are_not_fetched(far, between, monkeypatch):
    remote, _ = far("large")
    monkeypatch.setattr("os.sysconf", lambda name: 8)
    with pytest.raises(UserError, match=r"rows would take .* of memory.*order=as is"):
        remote.reorder(seed=1)
    assert between.asked == []


def test_a_parquet_table_in_a_bucket(s3, tmp_path, monkeypatch):
    url = s3("tables")
    table = pa.table(
        {"user": ["b", "a", "b"], "item": [7, 9, 9], "rating": [1.0, 2.0, 3.0], "text": ["x", "y", "z"]}
    )
    system, path = fs.FileSystem.from_uri(url)
    for part in (0, 1):
        pq.write_table(table, f"{path}/part-{part}.parquet", filesystem=system)
        pq.write_table(table, tmp_path / f"part-{part}.parquet")
    form = {"client": "user", "columns": ["item", "rating"], "ids": ["item"]}
    expected = read_table(tmp_path, **form)
    assert_same(read_table(url, **form), expected)
    one = url.replace("/one", "/one/part-0.parquet")
    assert_same(read_table(one, **form), read_table(tmp_path / "part-0.parquet", **form))
    assert_same(read_table(url, **form, out=url).gather(), expected)
    monkeypatch.setattr("os.sysconf", lambda name: 4)
    with pytest.raises(UserError, match=r"tables.*this table would take.*`partwise store TABLE"):
        read_table(url, **form)
    with pytest.raises(UserError, match="unknown column 'film'"):
        read_table(url, client="user", columns=["film"])
    put(url, "other.csv", b"user,item\n")
    with pytest.raises(UserError, match=r"other.csv is no Parquet file.*`partwise store"):
        read_table(url.replace("/one", "/one/other.csv"), client="user")
    with pytest.raises(UserError, match="holds no Parquet file, and no client store"):
        read_table(url.replace("/one", "/two"), client="user")
