from __future__ import annotations

import gzip
import zipfile

import numpy as np
import pytest

from partwise.data.loaders import amazon_clicks
from partwise.types import UserError

# user 1 likes items 7, 9 and 4; user 3 nothing; item 12 is in a history only
EXAMPLES = "1\t1\t7\t0\n1\t1\t9\t7\n0\t3\t7\t0\n0\t1\t5\t7,9\n1\t1\t4\t7,9\n1\t1\t2\t12,7,9,4\n"
RATINGS = [
    ("ann", "pen", 5, 30),
    ("bob", "cup", 4, 5),
    ("ann", "cup", 5.0, 10),
    ("ann", "hat", 2, 20),
    ("bob", "pen", 1, 6),
    ("ann", "bag", 5, 30),
    ("eve", "cup", 5, 1),
    ("ann", "tin", 3, 40),
]


def write(path, rows=RATINGS, header=""):
    path.write_text(header + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "amazon_train.tsv"
    path.write_text(EXAMPLES)
    return path


def words(store, position):
    """A client's rows as (item, history, label), with the ids of the source."""
    own, names = store.examples(position), store.vocabularies["item"].tolist()
    history = [[names[key] for key in keys if key >= 0] for keys in own["history"]]
    return [
        (names[i], h, label) for i, h, label in zip(own["item"], history, own["label"].tolist(), strict=True)
    ]


def test_rows_with_their_histories(file):
    store = amazon_clicks.load(file, length=3)
    assert store.client_ids.tolist() == [1, 3]
    assert store.vocabularies["item"].tolist() == [2, 4, 5, 7, 9, 12]
    assert words(store, 0) == [(7, [], 1), (9, [7], 1), (5, [7, 9], 0), (4, [7, 9], 1), (2, [7, 9, 4], 1)]
    assert words(store, 1) == [(7, [], 0)]
    assert store.columns["history"][1].tolist() == [3, -1, -1]
    assert store.columns["user"].tolist() == [0] * 5 + [1]
    told = store.info
    assert (told["histories_cut"], told["longest_history"], told["users_without_history"]) == (1, 4, 1)
    whole = amazon_clicks.load(file)
    assert whole.columns["history"].shape == (6, 50)
    assert whole.info["histories_cut"] == 0


def test_every_way_to_point_at_the_data(file, tmp_path, monkeypatch):
    folder = tmp_path / "root" / "amazon-electronics-fedsubavg"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "amazon_electronics_fedsubavg.zip", "w") as archive:
        archive.writestr("amazon_train.tsv", EXAMPLES.replace("\n", "\r\n"))
    monkeypatch.setenv("PARTWISE_DATA", str(folder.parent))
    for place in (None, file, tmp_path, folder, folder / "amazon_electronics_fedsubavg.zip"):
        assert words(amazon_clicks.load(place), 0)[1] == (9, [7], 1)


def test_histories_of_raw_ratings_are_the_likes_before(tmp_path):
    for header in ("", "user,item,rating,timestamp\n"):
        store = amazon_clicks.load(write(tmp_path / "ratings.csv", header=header), min_ratings=2)
        assert store.client_ids.tolist() == ["ann", "bob"]
        assert store.vocabularies["item"].tolist() == ["bag", "cup", "hat", "pen", "tin"]
        assert words(store, 0) == [
            ("cup", [], 1),
            ("hat", ["cup"], 0),
            ("pen", ["cup"], 1),
            ("bag", ["cup", "pen"], 1),  # the same second: in the file's order
            ("tin", ["cup", "pen", "bag"], 0),
        ]
        assert words(store, 1) == [("cup", [], 0), ("pen", [], 0)]
        assert store.columns["time"].tolist() == [10, 20, 30, 30, 40, 5, 6]
        assert store.info["dropped_ratings"] == 1  # eve has only one
        assert store.info["users_without_history"] == 1


def test_packed_ratings(tmp_path):
    plain = write(tmp_path / "ratings.csv")
    packed = tmp_path / "ratings.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    first, second = (amazon_clicks.load(path, min_ratings=2) for path in (plain, packed))
    np.testing.assert_array_equal(first.columns["history"], second.columns["history"])


def test_histories_of_many_ratings_equal_a_plain_loop(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(f"u{rng.integers(6)}", f"i{k}", rng.integers(1, 6), rng.integers(50)) for k in range(300)]
    store = amazon_clicks.load(write(tmp_path / "r.csv", rows), length=8, min_ratings=30)
    for position, user in enumerate(store.client_ids):
        liked, expected = [], []
        for _, item, stars, _ in sorted((row for row in rows if row[0] == user), key=lambda row: row[3]):
            expected.append((item, liked[-8:], float(stars == 5)))
            liked += [item] if stars == 5 else []
        assert words(store, position) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t1\t7\n", r"amazon_train.tsv, line 1: '1\\t1\\t7'; expected 'label\\tuser\\titem\\thistory'"),
        (EXAMPLES + "1\tone\t7\t0\n", "line 7: .*'1.*one"),
        (EXAMPLES + "\n1\t1\t7\t0\n", "line 7: ''; expected"),
        (EXAMPLES + "2\t1\t7\t0\n", "line 7: .*expected label 0 or 1"),
        (EXAMPLES + "1\t0\t7\t0\n", "line 7: .*user and item from 1 on"),
        (EXAMPLES + "1\t1\t0\t0\n", "line 7: .*user and item from 1 on"),
        (EXAMPLES + "1\t1\t7\t3,,4\n", "line 7: .*expected a history of items like 4,1,5"),
        (EXAMPLES + "1\t1\t7\t3,0\n", "line 7: .*expected a history"),
        (EXAMPLES + "1\t1\t7\t\n", "line 7: .*expected a history"),
        ("", "is empty: expected lines of 'label"),
        ("label\tuser\titem\thistory\n", "holds no rows"),
        ("label\tuser\titem\thistory\n1\t1\t7\tx\n", "line 2: "),
    ],
)
def test_bad_lines_of_examples_are_named(file, text, message):
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        amazon_clicks.load(file)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("ann", "pen", 5)], "ratings.csv, line 1: 'ann,pen,5'; expected 'user,item,rating,timestamp'"),
        ([*RATINGS, ("ann", "pen", "good", 3)], "line 9: 'ann,pen,good,3'"),
        ([*RATINGS, ("ann", "pen", 6, 3)], "line 9: .*expected a rating from 0 to 5"),
        ([*RATINGS, ("ann", "pen", "nan", 3)], "line 9: .*expected a rating from 0 to 5"),
        ([*RATINGS, ("", "pen", 5, 3)], "line 9: ',pen,5,3'; expected an id of a user"),
        ([*RATINGS, ("ann", "", 5, 3)], "line 9: 'ann,,5,3'; expected an id of a user and one of an item"),
        ([*RATINGS, ("ann", "pen", 5, -3)], "line 9: .*expected a time in seconds"),
        (RATINGS, "no user has at least 40 ratings, the most is 5; lower min_ratings"),
        ([], "is empty: expected lines of 'user,item,rating,timestamp'"),
    ],
)
def test_bad_lines_of_ratings_are_named(tmp_path, rows, message):
    path = write(tmp_path / "ratings.csv", rows)
    with pytest.raises(UserError, match=message):
        amazon_clicks.load(path)


def test_ratings_that_are_not_utf8_name_the_line(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_bytes(b"ann,pen,5,1\nzo\xeb,pen,5,1\n")
    with pytest.raises(
        UserError, match=r"ratings.csv, line 2: 'zoë,pen,5,1'; expected text in UTF-8: save the"
    ):
        amazon_clicks.load(path)


def test_bad_places_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    with pytest.raises(UserError, match=r"give amazon_train.tsv, .*or set PARTWISE_DATA"):
        amazon_clicks.load()
    with pytest.raises(
        UserError, match=r"holds no Amazon clicks: looked for amazon_train.tsv, .*found nothing"
    ):
        amazon_clicks.load(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("other.tsv", "")
    with pytest.raises(UserError, match=r"x.zip holds other.tsv: give a zip with amazon_train.tsv"):
        amazon_clicks.load(tmp_path / "x.zip")
    (tmp_path / "y.zip").write_bytes(b"PK not a zip")
    with pytest.raises(UserError, match=r"y.zip cannot be read"):
        amazon_clicks.load(tmp_path / "y.zip")
    with pytest.raises(UserError, match="length is 0: a history has room for at least 1 item"):
        amazon_clicks.load(tmp_path, length=0)


def test_the_papers_training_part(data_root):
    store = amazon_clicks.load(data_root)
    assert (store.num_clients, store.num_examples) == (1859, 99_710)
    assert store.num_keys("item") == 29_303
    assert store.columns["label"].mean() == pytest.approx(0.555, abs=0.001)
    assert (store.info["histories_cut"], store.info["longest_history"]) == (7726, 229)
    assert amazon_clicks.load(data_root, length=229).info["histories_cut"] == 0
