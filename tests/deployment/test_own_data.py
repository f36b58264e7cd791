"""A device's own table: of any kind, of one client or of many, read as the run's model needs it."""

from __future__ import annotations

import csv
import logging
import sqlite3

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from partwise.data import sqlite_table
from partwise.data.store import ClientStore
from partwise.deployment.federation import algorithm_of, found_run, open_run
from partwise.deployment.own_data import OwnTable, open_store, stamp_of
from partwise.runs.resolve import resolve
from partwise.types import UserError

ROWS = [("ann", 3, 4.0), ("bob", 5, 1.5), ("ann", 1, 2.0), ("7", 3, 5.0), ("ann", 4, 3.0)]
SMALL = {
    "data.num_clients": 30,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 4,
}


def offered(folder, settings, name="planted", data=None):
    task, config = resolve(name, data, settings)
    found_run(task, config, folder)
    run = open_run(folder)
    run.hub.close()
    return run.offer


@pytest.fixture(scope="module")
def offer(tmp_path_factory):
    return offered(tmp_path_factory.mktemp("hub") / "run", SMALL)


def write_csv(path, rows=ROWS, header=("user", "item", "rating")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def write_sqlite(path, rows=ROWS, name="ratings"):
    with sqlite3.connect(path) as base:
        base.execute(f'CREATE TABLE "{name}" (user TEXT, item INTEGER, rating REAL)')
        base.executemany(f'INSERT INTO "{name}" VALUES (?, ?, ?)', rows)
    base.close()
    return f"sqlite:{path}?table={name}"


def table():
    return pa.table(dict(zip(("user", "item", "rating"), map(list, zip(*ROWS, strict=True)), strict=True)))


def write_folder(path):
    path.mkdir()
    pyarrow.parquet.write_table(table(), path / "part.parquet")
    return str(path)


WRITERS = {
    "csv": lambda folder: write_csv(folder / "mine.csv"),
    "parquet": lambda folder: (
        pyarrow.parquet.write_table(table(), folder / "m.parquet"),
        f"{folder}/m.parquet",
    )[1],
    "arrow": lambda folder: (pyarrow.feather.write_feather(table(), folder / "m.arrow"), f"{folder}/m.arrow")[
        1
    ],
    "folder": lambda folder: write_folder(folder / "parts"),
    "sqlite": lambda folder: write_sqlite(folder / "a ? b.db"),
    "query": lambda folder: (
        write_sqlite(folder / "m.db").split("?")[0]
        + "?query=SELECT rating, item, user FROM ratings WHERE user != '?' ORDER BY rowid"
    ),
}


def rows_of(store: ClientStore):
    return {
        str(name): [
            tuple(row) for row in zip(*(v.tolist() for v in store.examples(place).values()), strict=True)
        ]
        for place, name in enumerate(store.client_ids.tolist())
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_tables_of_all_kinds_give_the_same_clients(offer, tmp_path, kind):
    place = WRITERS[kind](tmp_path)
    store = open_store(offer, place)
    assert rows_of(store) == {"7": [(3, 5.0)], "ann": [(3, 4.0), (1, 2.0), (4, 3.0)], "bob": [(5, 1.5)]}
    assert store.columns["item"].dtype == np.int32
    assert algorithm_of(offer, store).partition.digest == offer.model
    assert rows_of(open_store(offer, place, "ann")) == {"ann": [(3, 4.0), (1, 2.0), (4, 3.0)]}
    assert stamp_of(place)
    with pytest.raises(UserError, match="unknown client 'cid'"):
        open_store(offer, place, "cid")


def test_a_table_without_clients_is_of_the_one_that_is_named(offer, tmp_path):
    place = write_csv(tmp_path / "m.csv", [(3, 4.0), (2, 1.0)], ("item", "rating"))
    assert rows_of(open_store(offer, place, "007")) == {"007": [(3, 4.0), (2, 1.0)]}
    with pytest.raises(UserError, match=r"has no column 'user': say whose rows these are, as in --id"):
        open_store(offer, place)


def test_columns_have_the_names_of_the_configuration(tmp_path):
    rows = [(f"c{k % 20}", f"film {k % 7}", 1 + k % 5) for k in range(100)]
    names = {"data.client": "who", "data.item": "film", "data.rating": "stars", "cohort.size": 4}
    data = write_csv(tmp_path / "all.csv", rows, ("who", "film", "stars"))
    offer = offered(tmp_path / "hub", names, "ratings", data)
    place = write_csv(tmp_path / "m.csv", [("x", "film 3", 2), ("x", "film 5", 4)], ("who", "film", "stars"))
    assert rows_of(open_store(offer, place)) == {"x": [(3, 2.0), (5, 4.0)]}


def test_unknown_ids_are_left_out_and_counted(offer, tmp_path, caplog):
    rows = [*ROWS, ("ann", 999, 1.0), ("zoe", 1000, 1.0)]
    with caplog.at_level(logging.WARNING, "partwise.agent"):
        store = open_store(offer, write_sqlite(tmp_path / "m.db", rows))
    assert sorted(rows_of(store)) == ["7", "ann", "bob"]
    assert "2 rows of" in caplog.text
    assert "with a value of 'item' that the model does not know are left out" in caplog.text


def test_a_query_reads_and_nothing_else(offer, tmp_path):
    place = write_sqlite(tmp_path / "m.db")
    for query in (
        "DELETE FROM ratings",
        "DROP TABLE ratings",
        "CREATE TABLE x (y)",
        "SELECT 1; DELETE FROM ratings",
    ):
        with pytest.raises(UserError, match=r"m\.db"):
            open_store(offer, f"sqlite:{tmp_path}/m.db?query={query}")
    assert len(rows_of(open_store(offer, place))) == 3
    assert not (tmp_path / "m.db-journal").exists()


def broken_sqlite(folder):
    (folder / "m.db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)
    return f"sqlite:{folder}/m.db?table=ratings"


def cut_sqlite(folder):
    write_sqlite(folder / "m.db", ROWS * 2000)
    whole = (folder / "m.db").read_bytes()
    (folder / "m.db").write_bytes(whole[: len(whole) // 2])
    return f"sqlite:{folder}/m.db?table=ratings"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: write_csv(f / "m.csv", []), "no rows"),
        (lambda f: write_sqlite(f / "m.db", []), r"m\.db\?table=ratings has no rows"),
        (
            lambda f: write_csv(f / "m.csv", [("ann", 77, 1), ("bob", 78, 1)]),
            "of its 2 rows none names anything",
        ),
        (lambda f: write_sqlite(f / "m.db", [("ann", 77, 1)]), "of its 1 row none names anything"),
        (lambda f: write_csv(f / "m.csv", header=("user", "thing", "rating")), "unknown column 'item'"),
        (lambda f: write_sqlite(f / "m.db") + "s", r"unknown table 'ratingss' \(nearest: ratings\)"),
        (
            lambda f: write_sqlite(f / "m.db").replace("table=ratings", "query=SELECT 3"),
            "unknown column 'item'",
        ),
        (
            lambda f: write_sqlite(f / "m.db").replace("table=", "query=SELECT *, user FROM "),
            "two columns are called 'user'",
        ),
        (lambda f: write_sqlite(f / "m.db", [("ann", None, 1.0)]), "'item' has a missing value in row 0"),
        (lambda f: write_sqlite(f / "m.db", [(None, 3, 1.0)]), "'user' has a missing value in row 0"),
        (lambda f: write_sqlite(f / "m.db", [("ann", 3, None)]), "column 'rating'"),
        (lambda f: write_sqlite(f / "m.db", [("ann", 3, "good")]), "column 'rating'"),
        (lambda f: write_sqlite(f / "m.db", [("ann", 3, float("inf"))]), "column 'rating'"),
        (lambda f: write_sqlite(f / "m.db", [("ann", b"\xff\xfe", 1.0)]), "not UTF-8"),
        (broken_sqlite, r"m\.db\?table=ratings cannot be read"),
        (cut_sqlite, r"m\.db\?table=ratings cannot be read"),
        (lambda f: f"sqlite:{f}/none.db?table=ratings", r"none\.db does not exist"),
        (lambda f: f"sqlite:{f}?table=ratings", "is a folder"),
        (lambda f: f"sqlite:{f}/m.db", "does not say what to read"),
        (lambda f: f"sqlite:{f}/m.db?tabel=x", "does not say what to read"),
        (lambda f: f"{f}/none.csv", "does not exist"),
        (lambda f: f"{f}", "holds no .parquet file"),
    ],
)
def test_tables_that_cannot_be_used_are_refused_in_words(offer, tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        open_store(offer, make(tmp_path))


def test_a_locked_file_is_an_error_that_passes(offer, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_table, "WAIT", 0.05)
    place = write_sqlite(tmp_path / "m.db")
    other = sqlite3.connect(tmp_path / "m.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="database is locked"):
        open_store(offer, place)
    other.execute("COMMIT")
    other.close()
    assert len(rows_of(open_store(offer, place))) == 3


def test_lists_are_wanted_where_the_model_has_lists(offer, tmp_path):
    listed = offer._replace(shapes={**offer.shapes, "item": [2]})
    for place in (write_csv(tmp_path / "m.csv"), write_sqlite(tmp_path / "m.db")):
        with pytest.raises(
            UserError, match="'item' has one value in a row, and the model was trained with lists"
        ):
            open_store(listed, place)


def test_models_that_no_table_can_feed_are_refused(offer, tmp_path):
    place = write_csv(tmp_path / "m.csv")
    words = offer._replace(vocabularies={"item": ["the", "of", "and"]})
    with pytest.raises(UserError, match="column 'item' of this model was made of text"):
        open_store(words, place)
    stateful = offer._replace(config=offer.config.replace("fed_recon", "fed_avg"))
    with pytest.raises(
        UserError, match=r"fed_avg trains a table on the server with a row for every client \('user'\)"
    ):
        open_store(stateful, place)


@pytest.mark.parametrize(
    "change",
    [
        {"config": "nonsense ["},
        {"config": "task = 3"},
        {"config": 'task = "nothing"'},
        {"config": 7},
        {"options": {"dim": 2}},
        {"options": []},
        {"shapes": {"item": 3}},
        {"vocabularies": {"item": [[1], 2]}},
        {"vocabularies": 3},
    ],
)
def test_an_offer_of_a_server_that_lies_is_refused(offer, tmp_path, change):
    with pytest.raises(UserError):
        open_store(offer._replace(**change), write_csv(tmp_path / "m.csv"))


def test_a_table_is_read_anew_when_it_has_changed(offer, tmp_path):
    place = write_csv(tmp_path / "m.csv")
    mine = OwnTable(offer, place)
    first = mine.now()
    assert mine.now() is first
    write_csv(tmp_path / "m.csv", [*ROWS, ("zoe", 2, 1.0)])
    assert sorted(rows_of(mine.now())) == ["7", "ann", "bob", "zoe"]
    second = mine.now()
    (tmp_path / "m.csv").write_text("user,item,rating\nann,3,x\n")
    with pytest.raises(UserError, match="line 2"):
        mine.now()
    with pytest.raises(UserError, match="line 2"):  # and not the old rows
        mine.now()
    write_csv(tmp_path / "m.csv", [("bob", 2, 1.0)])
    assert (sorted(rows_of(mine.now())), len(second.client_ids)) == (["bob"], 4)


def test_what_sqlite_has_not_yet_moved_into_its_file_is_seen(offer, tmp_path):
    place = write_sqlite(tmp_path / "m.db")
    base = sqlite3.connect(tmp_path / "m.db", isolation_level=None)
    base.execute("PRAGMA journal_mode=WAL")
    mine = OwnTable(offer, place)
    size = (tmp_path / "m.db").stat().st_size
    base.execute("INSERT INTO ratings VALUES ('zoe', 2, 1.0)")
    assert (tmp_path / "m.db").stat().st_size == size
    assert sorted(rows_of(mine.now())) == ["7", "ann", "bob", "zoe"]
    base.execute("DELETE FROM ratings WHERE user = 'ann'")
    assert sorted(rows_of(mine.now())) == ["7", "bob", "zoe"]
    base.close()
