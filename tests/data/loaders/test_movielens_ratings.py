from __future__ import annotations

import zipfile

import numpy as np
import pytest

from partwise.data.loaders import movielens_ratings as movielens
from partwise.types import UserError

RATINGS = b"1::1193::5::978300760\n1::661::3::978302109\n3::1193::4::978298413\n"
LINES = RATINGS.splitlines(keepends=True)


@pytest.fixture
def folder(tmp_path):
    """An unpacked `ml-1m` with three ratings."""
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ratings.dat").write_bytes(RATINGS)
    return tmp_path / "ml-1m"


@pytest.mark.parametrize(
    ("size", "counts"), [("1m", (6040, 3706, 1_000_209)), ("100k", (943, 1682, 100_000))]
)
def test_the_published_counts(data_root, size, counts):
    store = movielens.load(data_root, size)
    assert (store.num_clients, store.num_keys("item"), store.num_examples) == counts
    assert (store.info["users"], store.info["items"], store.info["ratings"]) == counts
    assert store.info["published_counts"] is True
    assert store.info["official_zip"] is False  # data/README.md: the times differ from the official file
    assert store.counts.min() == 20
    assert store.columns["item"].dtype == np.int32
    assert store.columns["rating"].dtype == np.float32
    assert store.columns["time"].dtype == np.int64
    assert set(np.unique(store.columns["rating"])) == {1, 2, 3, 4, 5}
    assert len(np.unique(store.columns["item"])) == counts[1]


def test_rows_of_1m_are_those_of_the_file(data_root):
    store = movielens.load(data_root / "movielens-1m" / "ml-1m.zip")
    first = store.examples(store.find(1))
    assert store.vocabularies["item"][first["item"][:3]].tolist() == [1193, 661, 914]
    assert first["rating"][:3].tolist() == [5, 3, 3]
    assert first["time"][:3].tolist() == [978300760, 978302109, 978301968]
    _, times = np.unique(store.columns["rating"], return_counts=True)
    assert times.tolist() == [56_174, 107_557, 261_197, 348_971, 226_310]
    assert np.median(store.counts) == 96
    assert store.counts.max() == 2314


def test_every_way_to_point_at_the_data(folder, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "renamed.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", RATINGS)
    root = tmp_path / "root" / "movielens-1m"
    root.mkdir(parents=True)
    (root / "ml-1m.zip").write_bytes((tmp_path / "renamed.zip").read_bytes())
    monkeypatch.setenv("PARTWISE_DATA", str(tmp_path))
    places = [
        None,
        folder,
        str(tmp_path),
        folder / "ratings.dat",
        tmp_path / "renamed.zip",
        root,
        root.parent,
    ]
    for place in places:
        store = movielens.load(place)
        assert store.client_ids.tolist() == [1, 3]
        assert store.vocabularies["item"].tolist() == [661, 1193]
        assert store.examples(0)["item"].tolist() == [1, 0]
        assert store.info["published_counts"] is False
        assert store.info["sha256"] == movielens.load(folder).info["sha256"]


def test_half_stars_and_windows_line_ends_are_read(folder):
    (folder / "ratings.dat").write_bytes(RATINGS.replace(b"\n", b"\r\n").replace(b"::3::", b"::3.5::"))
    assert movielens.load(folder).columns["rating"].tolist() == [5, 3.5, 4]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [LINES[0], b"1::661::3\n", LINES[2]],
            r"ratings.dat, line 2: '1::661::3'; expected user, item",
        ),
        ([LINES[0], b"1::661::3::9::9\n"], "line 2: '1::661::3::9::9'; expected"),
        ([LINES[0], b"one::661::3::9\n"], "line 2: 'one::661::3::9'; expected .* all numbers"),
        ([LINES[0], b"1::661::good::9\n"], "line 2: '1::661::good::9'"),
        ([LINES[0], b"1::661::3::\n"], "line 2: '1::661::3::'"),
        ([LINES[0], b"\n", LINES[1]], "line 2: ''"),
        ([LINES[0], b"1::661::6::9\n"], "line 2: '1::661::6::9'; expected a rating from 0.5 to 5"),
        ([LINES[0], b"1::661::0::9\n"], "line 2: .*expected a rating from 0.5 to 5"),
        ([LINES[0], b"1::661::nan::9\n"], "line 2: '1::661::nan::9'; expected a rating from 0.5 to 5"),
        (
            [*LINES, LINES[1]],
            r"line 4: '1::661::3::978302109'; expected one rating per .*\(line 2 has the same",
        ),
        ([LINES[0], LINES[1][:-6]], r"line 2: '1::661::3::9783'; expected a line end .*truncated"),
        ([], "ratings.dat is empty"),
        (
            [b"user,item,rating,time\n", b"1,2,3,4\n"],
            "line 1: 'user,item,rating,time'; expected .* with ::",
        ),
    ],
)
def test_bad_lines_are_named(folder, lines, message):
    (folder / "ratings.dat").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=message):
        movielens.load(folder)


def test_bad_places_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    with pytest.raises(
        UserError, match=r"download https://files.grouplens.org/.*/ml-1m.zip .*set PARTWISE_DATA"
    ):
        movielens.load()
    with pytest.raises(UserError, match=r"nowhere does not exist: give the path of ml-100k.zip"):
        movielens.load(tmp_path / "nowhere", "100k")
    with pytest.raises(UserError, match=r"unknown MovieLens size '10m'"):
        movielens.load(tmp_path, "10m")
    (tmp_path / "Mine.CSV").write_text("user,item,rating\n1,2,3\n")
    with pytest.raises(UserError, match=r"is a table, .*`partwise train ratings --data \S+Mine.CSV`"):
        movielens.load(tmp_path / "Mine.CSV")
    (tmp_path / "Mine.CSV").unlink()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds no ml-1m: looked for ratings.dat, .*found notes.txt"):
        movielens.load(tmp_path)


def test_bad_zips_are_named(tmp_path):
    file = tmp_path / "ml-1m.zip"
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match=r"ml-1m.zip cannot be read .*Download it again"):
        movielens.load(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ml-1m/movies.dat", "")
    with pytest.raises(UserError, match=r"holds no ratings.dat, but ml-1m/movies.dat: give ml-1m.zip"):
        movielens.load(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ml-1m/ratings.dat", RATINGS * 50)
    content = bytearray(file.read_bytes())
    content[70:80] = bytes(10)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read"):
        movielens.load(file)
