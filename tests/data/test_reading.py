"""Foreign files never crash us: what is no file, lies about itself, or is packed in strange ways."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from partwise.data import ClientStore, open_store, read_table, reading
from partwise.data.loaders import (
    amazon_clicks,
    amazon_reviews,
    mnist_writers,
    movielens_ratings,
    sentiment140,
    shakespeare,
    stackexchange,
    stackoverflow,
)
from partwise.data.text.words import read_vocabulary
from partwise.runs.personal import load_local
from partwise.tasks import load_task
from partwise.types import UserError

READERS = {
    "table": lambda path: read_table(path, "user"),
    "store": open_store,
    "movielens": movielens_ratings.load,
    "clicks": amazon_clicks.load,
    "reviews": lambda path: list(amazon_reviews.load(path)),
    "tweets": lambda path: list(sentiment140.load(path)),
    "speeches": lambda path: list(shakespeare.load(path)),
    "posts": lambda path: list(stackexchange.load(path)),
    "sentences": lambda path: list(stackoverflow.load(path)),
    "mnist": mnist_writers.load_mnist_by_writer,
    "emnist": mnist_writers.load_emnist,
    "words": read_vocabulary,
    "local": load_local,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused(tmp_path, reader):
    """A pipe would wait for ever; the name of a folder or a file may be too long for any."""
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "folder.csv").mkdir()
    places = [
        tmp_path / "pipe.csv",
        tmp_path / "folder.csv",
        "/dev/null",
        "/dev/zero",
        tmp_path / "nowhere.csv",
    ]
    for place in (*places, tmp_path / ("x" * 100_000), tmp_path / "a\0b"):
        with pytest.raises(UserError) as caught:
            READERS[reader](place)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name", ["movielens", "clicks", "tags", "sentiment", "next-word-lstm", "handwriting"]
)
def test_a_device_is_no_file_of_any_task(name):
    with pytest.raises(UserError, match="/dev/null is not a regular file"):
        load_task(name, "/dev/null")


METHODS = {"stored": 0, "deflated": 8, "bz2": 12, "lzma": 14}


def pack(path, member, content, method=8):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(member, content)
    return path


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_damaged_members_of_all_methods_are_named(tmp_path, method):
    lines = "".join(f"{user}::{item}::4::9\n" for user in range(40) for item in range(20))
    file = pack(tmp_path / "ml-1m.zip", "ml-1m/ratings.dat", lines, method)
    store, refused = movielens_ratings.load(file), 0
    whole = file.read_bytes()
    for place in range(60, len(whole) - 60, max(len(whole) // 20, 1)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            assert np.array_equal(movielens_ratings.load(file).columns["item"], store.columns["item"])
        except UserError as error:
            refused += "ml-1m.zip" in str(error)
    assert refused > 10


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [(6, 1, "encrypted"), (8, 99, "compression method"), (8, 97, "compression method")],
)
def test_encrypted_and_unknown_zips_are_named(tmp_path, field, value, message):
    file = pack(tmp_path / "ml-1m.zip", "ml-1m/ratings.dat", "1::2::3::4\n")
    data = bytearray(file.read_bytes())
    central = data.index(b"PK\x01\x02")
    data[field], data[central + field + 2] = value, value
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"ml-1m.zip cannot be read .*{message}"):
        movielens_ratings.load(file)


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(reading, "FREE_BYTES", 1 << 16)


ZEROS = b"0" * (1 << 22)


def test_files_that_unpack_without_measure_are_refused(tmp_path, small_limits):
    pack(tmp_path / "ml-1m.zip", "ratings.dat", ZEROS)
    pack(tmp_path / "clicks.zip", "amazon_train.tsv", ZEROS)
    pack(tmp_path / "tweets.zip", "training.csv", ZEROS)
    for name in ("t.csv.gz", "speeches.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"user,x\n" + ZEROS))
    (tmp_path / "s.sqlite.lzma").write_bytes(lzma.compress(ZEROS))
    np.savez_compressed(tmp_path / "mnist.npz", images=np.zeros(1 << 22, np.uint8))
    opened = {"movielens": "ml-1m.zip", "clicks": "clicks.zip", "tweets": "tweets.zip", "table": "t.csv.gz"}
    opened |= {"speeches": "speeches.jsonl.gz", "sentences": "s.sqlite.lzma", "mnist": "mnist.npz"}
    for reader, name in opened.items():
        with pytest.raises(UserError, match=rf"{name}.*unpacks to more than 200 times its [0-9,]+ bytes"):
            READERS[reader](tmp_path / name)


def test_a_zip_may_not_lie_about_its_size(tmp_path, small_limits):
    file = pack(tmp_path / "ml-1m.zip", "ratings.dat", ZEROS)
    data = bytearray(file.read_bytes())
    central = data.index(b"PK\x01\x02")
    for place in (22, central + 24):  # the sizes once unpacked
        data[place : place + 4] = (100).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"ml-1m.zip"):
        movielens_ratings.load(file)


def array_file(header: str, content: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': ()}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000,)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '|u1', 'shape': (1,",
        "((((((((",
        "'''",
    ],
)
def test_headers_of_arrays_that_cannot_be_are_refused(tmp_path, header):
    file = tmp_path / "mnist_by_writer.npz"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("images", "labels", "writer", "split"):
            archive.writestr(f"{name}.npy", array_file(header, b"\0"))
    with pytest.raises(UserError, match=r"mnist_by_writer\.npz"):
        mnist_writers.load_mnist_by_writer(file)


def test_packed_tables_that_are_damaged_are_named(tmp_path):
    whole = gzip.compress(b"user,x\n" + b"a,1\n" * 5000)
    for data in (
        whole[:-3],
        whole[:40],
        whole[:20] + b"\xff\xff" + whole[22:],
        b"user,x\na,1\n",
        bz2.compress(b"x"),
    ):
        (tmp_path / "t.csv.gz").write_bytes(data)
        with pytest.raises(UserError, match=r"t\.csv\.gz"):
            read_table(tmp_path / "t.csv.gz", "user")


def test_endless_fields_are_read_or_named(tmp_path):
    field = "y" * 200_000
    file = tmp_path / "t.csv"
    file.write_text(f"user,x,note\na,1,{field}\n")
    assert read_table(file, "user", columns=["x"]).num_examples == 1
    file.write_text(f"user,x\n{field},1\n")
    with pytest.raises(UserError, match=r"t\.csv: id column 'user' has an id of 200,000 letters"):
        read_table(file, "user")
    file.write_text(f"user,{field}\na,1\n")
    with pytest.raises(UserError, match=r"t\.csv cannot be read .*field larger than field limit"):
        read_table(file, "user")
    file.write_text(f'"0","1","Mon Apr 06 22:19:45 PDT 2009","q","ann","{field}"\n')
    with pytest.raises(UserError, match=r"t\.csv, line 1: field larger than field limit"):
        list(sentiment140.load(file))


DAMAGED = """
import sys
from partwise.data import read_table
from partwise.types import UserError
try:
    read_table(sys.argv[1], "user", ids=["item"])
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("offset", [2**30, -(2**30), 2**31 - 1])
def test_a_wrong_offset_in_an_arrow_file_does_not_kill(tmp_path, offset):
    """Of a text column; Arrow itself believes it, and reads there."""
    file = tmp_path / "t.feather"
    table = pa.table({"user": ["ann", "bob", "cy"], "item": ["tea", "oil", "rice"], "x": [1.0, 2.0, 3.0]})
    pyarrow.feather.write_feather(table, file, compression="uncompressed")
    data, offsets = file.read_bytes(), np.array([0, 3, 6, 10], np.int32)
    damaged = offsets.copy()
    damaged[2] = offset
    assert data.count(offsets.tobytes()) == 1
    file.write_bytes(data.replace(offsets.tobytes(), damaged.tobytes()))
    done = subprocess.run([sys.executable, "-c", DAMAGED, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "t.feather: column 'item' is damaged" in done.stdout


RECORD = {"format": "partwise-store", "version": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda record: RECORD,
        lambda record: record | {"columns": {"nowhere": {"dtype": "<i4", "shape": []}}},
        lambda record: record | {"columns": {"item": {"dtype": "|O", "shape": []}}},
        lambda record: record | {"columns": {"item": {"dtype": "<i4", "shape": [7]}}},
        lambda record: record | {"columns": {"item": {"dtype": "nonsense", "shape": []}}},
        lambda record: record | {"columns": []},
        lambda record: record | {"columns": {"item": 3}},
        lambda record: record | {"columns": {}},
        lambda record: record | {"num_clients": None},
        lambda record: record | {"info": 5},
        lambda record: record | {"version": {}},
        lambda record: [1],
        lambda record: "[" * 100_000,
    ],
)
def test_records_of_stores_that_cannot_be_are_refused(tmp_path, change):
    ClientStore.from_arrays([1, 2], ids=["item"], item=["a", "b"]).save(tmp_path / "store")
    file = tmp_path / "store" / "store.json"
    changed = change(json.loads(file.read_text()))
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(UserError, match="store"):
        open_store(tmp_path / "store")


def test_bytes_of_a_record_that_are_no_text_are_refused(tmp_path):
    ClientStore.from_arrays([1], x=[1]).save(tmp_path / "store")
    (tmp_path / "store" / "store.json").write_bytes(b'{"format": "\xff"}')
    with pytest.raises(UserError, match=r"store\.json cannot be read"):
        open_store(tmp_path / "store")


def test_reading_names_the_place_once_and_lets_other_errors_pass():
    for error in (KeyError("x"), MemoryError(), RecursionError("deep"), zipfile.BadZipFile("no"), EOFError()):
        with (
            pytest.raises(UserError, match=r"^file\.x cannot be read \(.+\): is it whole"),
            reading.reading("file.x"),
        ):
            raise error
    with pytest.raises(UserError, match=r"^file\.x: bad$"), reading.reading("file.x"):
        raise UserError("bad")
    with pytest.raises(UserError, match=r"^file\.x, line 3: bad$"), reading.reading("file.x"):
        raise UserError("file.x, line 3: bad")
    with pytest.raises(KeyboardInterrupt), reading.reading("file.x"):
        raise KeyboardInterrupt


def test_a_limited_stream_is_the_stream():
    content = os.urandom(3 << 20)
    assert reading.limited(io.BytesIO(content), 10, "here").read() == content
