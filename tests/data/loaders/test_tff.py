from __future__ import annotations

import errno
import lzma
import shutil
import sqlite3
import sys
import tempfile

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.data.loaders import tff
from partwise.types import UserError

POST = {"tokens": b"how to sort", "title": "naïve".encode(), "tags": b"python|sorting", "score": -3,
        "creation_date": b"2008-08-01 00:00:00.1 UTC", "type": b"question"}  # fmt: skip
DATA = {
    "train": {"7": [POST, POST | {"score": 2**40, "tokens": b""}], "10": [POST | {"type": b"answer"}]},
    "heldout": {"9": [POST]},
    "test": {"7": [POST | {"tokens": b"later"}]},
}


@pytest.fixture
def database(tmp_path, write_sqlite):
    return write_sqlite(tmp_path / "stackoverflow.sqlite", DATA)


def test_clients_of_a_split_come_one_after_the_other(database):
    clients = dict(tff.read_clients(database, "train"))
    assert list(clients) == ["10", "7"]  # text order
    assert sorted(clients["7"]) == sorted(POST)
    assert clients["7"]["tokens"] == [b"how to sort", b""]
    assert clients["7"]["title"][0].decode() == "naïve"
    assert clients["7"]["score"].tolist() == [-3, 2**40]
    assert clients["7"]["score"].dtype == np.int64
    assert clients["10"]["type"] == [b"answer"]
    assert [client for client, _ in tff.read_clients(database, "heldout")] == ["9"]
    assert next(tff.read_clients(database, "test"))[1]["tokens"] == [b"later"]
    assert tff.splits(database) == ["heldout", "test", "train"]


def test_only_the_features_asked_for(database):
    _, examples = next(tff.read_clients(str(database), "train", ["tokens", "tags"]))
    assert examples == {"tokens": [b"how to sort"], "tags": [b"python|sorting"]}


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.binary(max_size=300),
                "texts": st.lists(st.binary(max_size=3), min_size=2, max_size=3),
                "whole": st.integers(-(2**63), 2**63 - 1),
                "ragged": st.lists(st.integers(-9, 9), min_size=1, max_size=3),
                "image": st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=40, deadline=None)
def test_what_was_serialised_comes_back(tmp_path_factory, write_sqlite, examples):
    path = write_sqlite(tmp_path_factory.mktemp("tff") / "data.sqlite", {"train": {"a": examples}})
    ((client, columns),) = tff.read_clients(path)
    assert client == "a"
    assert columns["text"] == [e["text"] for e in examples]
    assert columns["texts"] == [e["texts"] for e in examples]
    assert columns["whole"].tolist() == [e["whole"] for e in examples]
    assert [np.atleast_1d(x).tolist() for x in columns["ragged"]] == [e["ragged"] for e in examples]
    assert columns["image"].dtype == np.float32
    assert np.array_equal(columns["image"], np.array([e["image"] for e in examples], np.float32))


def test_numbers_that_are_not_packed_are_read_too(database):
    """Legal, and what protobuf 2 wrote: every value with a tag of its own."""
    value = b"\x0d\x00\x00\x80\x3f" * 2  # field 1, 32 bits, 1.0
    entry = b"\x0a\x01x\x12" + bytes([len(value) + 2]) + b"\x12" + bytes([len(value)]) + value
    features = b"\x0a" + bytes([len(entry)]) + entry
    blob = b"\x0a" + bytes([len(features)]) + features
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE examples SET serialized_example_proto = ?", (blob,))
    connection.close()
    assert next(tff.read_clients(database, "train"))[1]["x"].tolist() == [[1.0, 1.0]]


def test_a_packed_file_is_read_and_its_copy_removed(database, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    for name, kind in (("a.sqlite.lzma", lzma.FORMAT_ALONE), ("b.sqlite.lzma", lzma.FORMAT_XZ)):
        packed = tmp_path / name
        packed.write_bytes(lzma.compress(database.read_bytes(), kind))
        clients = tff.read_clients(packed, "train")
        assert next(clients)[0] == "10"
        assert len(list((tmp_path / "scratch").iterdir())) == 1
        assert next(clients)[0] == "7"
        assert list(clients) == []
        assert list((tmp_path / "scratch").iterdir()) == []
        left = tff.read_clients(packed, "train")
        next(left)
        left.close()
        assert list((tmp_path / "scratch").iterdir()) == []


def test_bad_packed_files_are_named(database, tmp_path, monkeypatch):
    packed = tmp_path / "stackoverflow.sqlite.lzma"
    whole = lzma.compress(database.read_bytes(), lzma.FORMAT_ALONE)
    for content in (whole[: len(whole) // 2], b"<html>not found</html>"):
        packed.write_bytes(content)
        with pytest.raises(UserError, match=r"sqlite.lzma cannot be read .*download it again"):
            next(tff.read_clients(packed, "train"))
    packed.write_bytes(lzma.compress(b"notes"))
    with pytest.raises(UserError, match=r"stackoverflow.sqlite.lzma is neither an SQLite nor an HDF5"):
        next(tff.read_clients(packed, "train"))
    packed.write_bytes(whole)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(UserError, match=r"does not fit into .* once unpacked .*set TMPDIR .*unlzma"):
        next(tff.read_clients(packed, "train"))


def test_rows_are_not_all_read_before_the_first_client(tmp_path, write_sqlite):
    """A client that cannot be read is met only when it is its turn."""
    path = write_sqlite(tmp_path / "a.sqlite", {"train": {"a": [POST], "b": [POST]}})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE examples SET serialized_example_proto = x'ff' WHERE client_id = 'b'")
        plan = " ".join(
            row[-1]
            for row in connection.execute(
                "EXPLAIN QUERY PLAN SELECT client_id, serialized_example_proto FROM examples "
                "WHERE split_name = ? ORDER BY client_id, rowid",
                ("train",),
            )
        )
    connection.close()
    assert "idx_examples_client_id_split" in plan
    assert "TEMP B-TREE" not in plan
    clients = tff.read_clients(path)
    assert next(clients)[0] == "a"
    with pytest.raises(UserError, match=r"split 'train', client b, example 0: not a tf.train.Example"):
        next(clients)


def test_bad_splits_and_features_are_named(database):
    with pytest.raises(UserError, match=r"has no split 'held_out': it has heldout, test, train"):
        next(tff.read_clients(database, "held_out"))
    with pytest.raises(
        UserError, match=r"has 3 splits \(heldout, test, train\): name one of them with split="
    ):
        next(tff.read_clients(database))
    with pytest.raises(UserError, match=r"client 10, example 0: unknown feature 'token' \(nearest: tokens"):
        next(tff.read_clients(database, "train", ["token"]))


def test_a_feature_missing_or_changing_within_a_client(tmp_path, write_sqlite):
    path = write_sqlite(tmp_path / "a.sqlite", {"train": {"a": [{"x": 1, "y": 2}, {"x": 1}]}})
    with pytest.raises(UserError, match=r"client a, example 1: unknown feature 'y'"):
        next(tff.read_clients(path))
    path = write_sqlite(tmp_path / "b.sqlite", {"train": {"a": [{"x": 1}, {"x": b"1"}]}})
    with pytest.raises(UserError, match=r"client a: feature 'x' is of several types, bytes_list, int64_list"):
        next(tff.read_clients(path))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE examples", r"no table 'examples' \(known: client_metadata\)"),
        ("DROP TABLE client_metadata", "no table 'client_metadata'"),
        ("ALTER TABLE examples RENAME COLUMN client_id TO client",
         r"table 'examples' has no column 'client_id' \(nearest: client.*expected split_name"),
        ("UPDATE client_metadata SET client_id = x'ff37' WHERE client_id = '7'",
         r"the client id b'.xff7' is not UTF-8; download"),
        ("UPDATE client_metadata SET client_id = CAST(x'ff37' AS TEXT) WHERE client_id = '7'",
         r"cannot be read \(OperationalError Could not decode to UTF-8"),
        ("DELETE FROM examples WHERE client_id = '7'", "client 7: 0 examples, but client_metadata says 2"),
        ("DELETE FROM client_metadata WHERE client_id = '7'", "client 7: 2 examples, .* says 0"),
        ("UPDATE examples SET serialized_example_proto = x'0aff' WHERE rowid = 3",
         r"client 7, example 1: not a tf.train.Example .*download it again"),
        ("UPDATE examples SET serialized_example_proto = 'text'", "example 0: not a tf.train.Example"),
    ],
)  # fmt: skip
def test_foreign_and_damaged_databases_are_named(database, statement, message):
    with sqlite3.connect(database) as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(UserError, match=message):
        list(tff.read_clients(database, "train"))


def test_a_truncated_database_is_named(tmp_path, write_sqlite):
    many = {str(k): [POST] * 40 for k in range(40)}
    path = write_sqlite(tmp_path / "a.sqlite", {"train": many})
    content = path.read_bytes()
    for share in (0.9, 0.5, 0.02):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(
            UserError, match=r"a.sqlite cannot be read \(.*damaged or truncated; download it again"
        ):
            list(tff.read_clients(path, "train"))


def test_foreign_files_are_named(tmp_path):
    (tmp_path / "a.sqlite").write_text("<html>not found</html>")
    with pytest.raises(UserError, match=r"neither an SQLite nor an HDF5 file \(it begins with b'<html>"):
        tff.read_clients(tmp_path / "a.sqlite")
    (tmp_path / "a.h5").write_bytes(b"")
    with pytest.raises(UserError, match=r"neither an SQLite nor an HDF5 file"):
        tff.read_clients(tmp_path / "a.h5")
    with pytest.raises(UserError, match=r"nowhere does not exist: give a .sqlite"):
        tff.read_clients(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is a folder: give a .sqlite"):
        tff.read_clients(tmp_path)


def test_hdf5_gives_what_sqlite_gives(tmp_path, write_sqlite, write_hdf5):
    examples = [
        {"text": b"a|b", "score": 3, "pixels": [0.5, 1.0]},
        {"text": b"", "score": -1, "pixels": [0.0, 2.0]},
    ]
    stored = {name: [e[name] for e in examples] for name in examples[0]}
    stored = {
        **stored,
        "pixels": np.array(stored["pixels"], np.float32),
        "score": np.array([3, -1], np.int32),
    }
    path = write_hdf5(tmp_path / "train.h5", {"f0_2": stored, "f0_1": stored})
    ((_, expected),) = tff.read_clients(write_sqlite(tmp_path / "a.sqlite", {"train": {"a": examples}}))
    assert [client for client, _ in tff.read_clients(path)] == ["f0_1", "f0_2"]
    for _, found in tff.read_clients(path):
        assert found["text"] == expected["text"]
        for name in ("score", "pixels"):
            assert found[name].dtype == expected[name].dtype
            assert np.array_equal(found[name], expected[name])
    assert list(next(tff.read_clients(path, features=["score"]))[1]) == ["score"]


def test_bad_hdf5_files_are_named(tmp_path, write_hdf5):
    path = write_hdf5(tmp_path / "train.h5", {str(k): {"x": np.arange(300.0)} for k in range(20)})
    with pytest.raises(UserError, match=r"holds one split and does not name it: .*\.\.\._test.h5"):
        tff.read_clients(path, "test")
    with pytest.raises(UserError, match=r"client 0: unknown feature 'xs' \(nearest: x\)"):
        next(tff.read_clients(path, features=["xs"]))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        UserError, match=r"train.h5 cannot be read \(.*damaged or truncated; download it again"
    ):
        list(tff.read_clients(path))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["photos/a"] = [1]
    with pytest.raises(UserError, match=r"no group 'examples' \(known: photos\)"):
        next(tff.read_clients(tmp_path / "other.h5"))
    uneven = write_hdf5(tmp_path / "uneven.h5", {"a": {"x": [1, 2], "y": [1]}})
    with pytest.raises(UserError, match=r"client a: features of different lengths {'x': 2, 'y': 1}"):
        next(tff.read_clients(uneven))
    with h5py.File(tmp_path / "flat.h5", "w") as file:
        file["examples/x"] = [1]
    with pytest.raises(UserError, match=r"client x: a data set, where a group"):
        next(tff.read_clients(tmp_path / "flat.h5"))


def test_the_extra_is_named_where_it_is_not_installed(database, tmp_path, write_hdf5, monkeypatch):
    path = write_hdf5(tmp_path / "a.h5", {"a": {"x": [1]}})
    for name in ("h5py", "google.protobuf.message"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"need h5py .*pip install partwise\[tff\]"):
        next(tff.read_clients(path))
    with pytest.raises(UserError, match=r"need protobuf .*pip install partwise\[tff\]"):
        next(tff.read_clients(database, "train"))


def test_a_heap_that_would_never_end_is_refused(tmp_path, write_hdf5):
    """The HDF5 library itself reads on for ever."""
    texts = [f"a text of its own, number {k}".encode() for k in range(300)]
    file = write_hdf5(tmp_path / "train.h5", {"7": {"tokens": texts}})
    assert len(dict(tff.read_clients(file))["7"]["tokens"]) == 300
    data = bytearray(file.read_bytes())
    heap = data.index(b"GCOL")
    data[heap + 16 : heap + 18] = bytes(2)  # the first object's number: free space
    data[heap + 24 : heap + 32] = bytes(8)  # and its size
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"train\.h5 cannot be read .*an object of 0 bytes in the heap"):
        list(tff.read_clients(file))
