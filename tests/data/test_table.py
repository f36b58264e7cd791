from __future__ import annotations

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.data import ClientStore, delimited, read_rows, read_table, table
from partwise.types import UserError

CSV = "user,item,rating,title,when\nb,10,1.5,one,2020-01-02\na,30,2,two,2020-01-03\na,20,4,three,2020-01-01\n"


@pytest.fixture(params=["memory", "disk"])
def out(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "out"


def test_csv(tmp_path, out):
    file = tmp_path / "ratings.csv"
    file.write_text(CSV)
    store = read_table(file, "user", columns=["rating"], ids=("item",), out=out, order_by="when")
    assert store.client_ids.tolist() == ["a", "b"]
    assert store.vocabularies["item"].tolist() == [10, 20, 30]
    assert store.examples(0)["item"].tolist() == [1, 2]
    assert store.examples(0)["rating"].tolist() == [4, 2]
    assert list(store.columns) == ["rating", "item"]
    assert store.info["source"] == str(file)


def test_columns_default_to_all_and_text_may_be_ids(tmp_path, out):
    (tmp_path / "r.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    store = read_table(tmp_path / "r.csv.gz", "user", ids=("title", "item"), out=out)
    assert list(store.columns) == ["item", "rating", "title", "when"]
    assert store.vocabularies["title"].tolist() == ["one", "three", "two"]


def test_a_column_may_change_its_type_after_the_first_block(tmp_path, out, monkeypatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 64)
    lines = [f"{k % 3},{k},{k}" for k in range(50)] + ["x,y,0.5"]
    (tmp_path / "late.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    store = read_table(tmp_path / "late.csv", "user", ids=("item",), out=out)
    assert store.client_ids.tolist() == ["0", "1", "2", "x"]
    assert store.examples(3)["rating"].tolist() == [0.5]
    assert store.num_keys("item") == 51


def test_a_nameless_index_column_does_no_harm(tmp_path, out):
    (tmp_path / "pandas.csv").write_text(",user,rating\n0,a,1.5\n1,b,2.5\n")
    store = read_table(tmp_path / "pandas.csv", "user", out=out)
    assert store.columns[""].tolist() == [0, 1]
    assert store.client_ids.tolist() == ["a", "b"]


def test_parquet_file_and_folder(tmp_path, out):
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        rows = {"user": np.arange(4) % 2, "item": np.arange(4) * 10, "rating": np.full(4, float(part))}
        pyarrow.parquet.write_table(pa.table(rows), folder / f"part-{part}.parquet")
    store = read_table(folder, "user", ids=("item",), out=out)
    assert store.examples(1)["rating"].tolist() == [0, 0, 1, 1, 2, 2]
    assert store.examples(1)["item"].tolist() == [1, 3] * 3
    assert read_table(folder / "part-2.parquet", "user").examples(0)["item"].tolist() == [0, 20]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "user,item,rating\n1,2,3\n1,5,good\n",
            "r.csv, line 3, column 'rating': 'good'; expected a finite number",
        ),
        ("user,item,rating\n1,2,3\n1,5,\n", "r.csv, line 3, column 'rating': ''; expected a finite number"),
        ("user,item,rating\n1,2,3\n1,5,NaN\n", "line 3, column 'rating': 'NaN'"),
        ("user,item,rating\n1,2,3\n1,5,inf\n", "line 3, column 'rating': 'inf'"),
        ("user,item,rating\n1,2,3\n,5,1\n", "line 3, column 'user': ''; expected an id"),
        ("user,item,rating\na,2,3\n,5,1\n", "line 3, column 'user': ''; expected an id"),
        ("user,item,rating\n1,2,3\n1,5\n", r"line 3: 2 fields, expected 3 \(user, item, rating\)"),
        (
            "user,item,rating\n1,2,3\n1,5,1,1\n",
            r"line 3: 4 fields, expected 3 .*Mend or remove the line .*quotes",
        ),
        ("user,item,rating\n", "no rows"),
        ("", "line 1: ''; expected a header"),
        ("user,user,rating\n1,2,3\n", "line 1: 'user,user,rating'; expected a header"),
        ("user,item,ratings\n1,2,3\n", "unknown column 'rating' .nearest: ratings"),
        ("usr,item,rating\n1,2,3\n", "unknown column 'user' .nearest: usr"),
        ("1,2,3\n1,3,4\n", r"unknown column 'user' \(known: 1, 2, 3\); the first line of the file must name"),
    ],
)
def test_bad_text_is_named_by_line(tmp_path, out, text, message):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / "r.csv", "user", columns=["item", "rating"], ids=("item",), out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"user,item,rating\nann,tea,3\nann,caf\xe9,3\n",
            r"line 3, column 'item': .*; expected text in UTF-8",
        ),
        (
            b"user,item,rating\nann,tea,3\nzo\xeb,tea,3\n",
            r"line 3, column 'user': .*; expected text in UTF-8",
        ),
        (b"user,item,rating\n1,2,3\xff\n", r"line 2, column 'rating': .*; expected a finite number"),
        (b"us\xe9r,item,rating\n1,2,3\n", "unknown column 'user' .nearest: us\ufffdr"),
        ("user,item,rating\n1,2,3\n".encode("utf-16"), "unknown column 'user'"),
    ],
)
def test_text_that_is_not_utf8_is_named(tmp_path, out, content, message, packed):
    file = tmp_path / ("r.csv.gz" if packed else "r.csv")
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError, match=message):
        read_table(file, "user", columns=["item", "rating"], ids=("item",), out=out)


def test_a_header_that_is_not_utf8_is_named(tmp_path, out):
    """Unless nothing is read of that column."""
    (tmp_path / "r.csv").write_bytes(b"user,rating,caf\xe9\n1,3,2\n")
    assert read_table(tmp_path / "r.csv", "user", columns=["rating"]).num_clients == 1
    with pytest.raises(
        UserError, match=r"r.csv, line 1: 'caf\\xe9'; expected text in UTF-8. Save the file as"
    ):
        read_table(tmp_path / "r.csv", "user", out=out)


def test_arrow_text_that_is_not_utf8_is_named(tmp_path, out):
    offsets = pa.py_buffer(np.array([0, 3, 7], np.int32))
    item = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"teacaf\xe9"))  # Arrow does not look
    rows = pa.table({"user": ["ann", "bob"], "item": item, "rating": [1.0, 2.0]})
    pyarrow.parquet.write_table(rows, tmp_path / "r.parquet")
    with pytest.raises(UserError, match=r"r.parquet: column 'item' has 1 texts that are not UTF-8.* row 1"):
        read_table(tmp_path / "r.parquet", "user", ids=("item",), out=out)
    with pytest.raises(UserError, match=r"column 'item' has 1 texts that are not UTF-8.* row 1"):
        read_rows(rows, "user", ids=("item",), out=out)
    with pytest.raises(UserError, match=r"'client' has b'zo.*' in row 1, which is not UTF-8"):
        ClientStore.from_arrays([b"ann", b"zo\xeb"], x=[1, 2])


def test_a_bad_value_in_a_later_block_is_named(tmp_path, out, monkeypatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 64)
    (tmp_path / "r.csv").write_text("user,rating\n" + "1,2\n" * 98 + "1,bad\n")
    with pytest.raises(UserError, match="line 100, column 'rating': 'bad'"):
        read_table(tmp_path / "r.csv", "user", out=out)


@pytest.mark.parametrize("left", ["", "user\n", None])
def test_a_file_that_is_rewritten_while_it_is_read_is_named(tmp_path, monkeypatch, left):
    file = tmp_path / "ratings.csv"
    file.write_text("user,item\nann,1\n")

    def rewritten(*args):
        file.unlink() if left is None else file.write_text(left)
        yield from delimited.stream_delimited(*args)

    monkeypatch.setattr(table, "stream_delimited", rewritten)
    with pytest.raises(UserError, match=r"ratings\.csv"):
        read_table(file, "user")


def test_bad_parquet_is_named(tmp_path, out):
    file = tmp_path / "r.parquet"
    pyarrow.parquet.write_table(pa.table({"user": [1, 2], "rating": [1.0, None]}), file)
    with pytest.raises(UserError, match=r"r.parquet: column 'rating' has 1 missing values, the first: row 1"):
        read_table(file, "user", out=out)
    pyarrow.parquet.write_table(pa.table({"user": [1, 2], "rating": [1.0, float("nan")]}), file)
    with pytest.raises(
        UserError, match=r"r.parquet: column 'rating' has 1 values .*nan in row 1 of client 2"
    ):
        read_table(file, "user", out=out)
    pyarrow.parquet.write_table(pa.table({"user": [1], "title": ["x"]}), file)
    with pytest.raises(UserError, match=r"r.parquet: column 'title' holds .*leave it out"):
        read_table(file, "user", out=out)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UserError, match=r"r.parquet cannot be read"):
        read_table(file, "user", out=out)


def test_files_that_are_not_tables(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.csv does not exist"):
        read_table(tmp_path / "nowhere.csv", "user")
    with pytest.raises(UserError, match=r"holds no .parquet file"):
        read_table(tmp_path, "user")
    (tmp_path / "r.xlsx").write_text("")
    with pytest.raises(UserError, match=r"neither .csv, .tsv, .parquet, .arrow nor .feather"):
        read_table(tmp_path / "r.xlsx", "user")


def test_a_number_too_large_for_devices_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("user,rating\na,1\nb,1e300\n")
    with pytest.raises(UserError, match=r"rating.*too large for 32-bit numbers"):
        read_table(tmp_path / "t.csv", client="user", columns=["rating"])


def test_other_separators_are_named(tmp_path):
    (tmp_path / "t.csv").write_text("user;rating\na;1\n")
    with pytest.raises(UserError, match=r"line 1: 'user;rating' is a single name, with ';' in it"):
        read_table(tmp_path / "t.csv", client="user", columns=["rating"])


@pytest.mark.parametrize("suffix", [".arrow", ".feather"])
@pytest.mark.parametrize("write", ["new_file", "new_stream"])
def test_arrow_files_and_streams(tmp_path, out, suffix, write):
    whole = pa.table(
        {"user": ["b", "a", "a"], "item": [10, 30, 20], "rating": [1.5, 2.0, 4.0], "text": ["x", "y", "z"]}
    )
    file = tmp_path / f"ratings{suffix}"
    with getattr(pa.ipc, write)(file, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=2)
    store = read_table(file, "user", columns=["rating"], ids=["item"], out=out)
    assert store.client_ids.tolist() == ["a", "b"]
    assert store.examples(0)["item"].tolist() == [2, 1]
    assert store.examples(0)["rating"].tolist() == [2, 4]
    alone = read_table(file, None, columns=["rating"])
    assert alone.examples(0)["rating"].tolist() == [1.5, 2, 4]


def test_a_broken_arrow_file_is_refused(tmp_path):
    (tmp_path / "broken.arrow").write_bytes(b"not arrow at all")
    with pytest.raises(UserError, match=r"broken\.arrow cannot be read .*is it a whole \.arrow file"):
        read_table(tmp_path / "broken.arrow", "user")


@pytest.mark.parametrize("name", ["columns", "ids"])
def test_one_text_in_place_of_a_list_of_columns_is_refused(tmp_path, name):
    (tmp_path / "r.csv").write_text("user,item\n1,2\n")
    with pytest.raises(UserError, match=rf"{name} is the text 'item': .*{name}=\['item'\]"):
        read_table(tmp_path / "r.csv", "user", **{name: "item"})
    with pytest.raises(UserError, match=rf"{name} has the column 'item' twice: name it once"):
        read_table(tmp_path / "r.csv", "user", **{name: ["item", "item"]})


def test_the_column_of_the_client_is_no_column_of_ids(tmp_path):
    (tmp_path / "r.csv").write_text("user,item\n1,2\n")
    with pytest.raises(UserError, match=r"r.csv: ids names 'user', the column of the client: leave it out"):
        read_table(tmp_path / "r.csv", "user", ids=["user"])
