"""`partwise store`: a table as a client store."""

from __future__ import annotations

import json

import pytest

from partwise.cli import main
from partwise.data import open_store, read_table
from partwise.tasks import load_task
from partwise.types import UserError

TABLE = "who,film,seen before,stars,when\nann,a,,3,2\nbob,b,,4,1\nann,c,,5,1\n"


@pytest.fixture
def table(tmp_path):
    (tmp_path / "films.csv").write_text(TABLE.replace(",seen before", "").replace(",,", ","))
    return tmp_path / "films.csv"


def test_a_table_becomes_a_store(table, tmp_path, capsys):
    options = ["--client", "who", "--columns", "film,stars", "--ids", "film", "--order-by", "when"]
    assert main(["store", str(table), *options, "--out", str(tmp_path / "store"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "out": str(tmp_path / "store"),
        "clients": 2,
        "examples": 3,
        "columns": {"film": "int32", "stars": "int64"},
    }
    store = open_store(tmp_path / "store")
    assert store.examples(store.find("ann"))["stars"].tolist() == [5, 3]
    assert main(["store", str(table), *options, "--out", str(tmp_path / "again")]) == 0
    assert "2 clients, 3 examples" in " ".join(capsys.readouterr().out.split())


def test_options_name_the_columns_of_a_store_too(table, tmp_path):
    read_table(table, "who", ["film", "stars"], ["film"], out=tmp_path / "store")
    task = load_task("ratings", str(tmp_path / "store"), item="film", rating="stars", seen=True)
    assert set(task.train.columns) == {"item", "rating", "user"}


def test_mistakes(mistake, table, tmp_path):
    out = ["--out", str(tmp_path / "store")]
    assert "who" in mistake("store", str(table), "--client", "whom", *out)
    assert "--lists film=20" in mistake("store", str(table), "--client", "who", "--lists", "film", *out)
    assert "does not exist" in mistake("store", str(tmp_path / "none.csv"), "--client", "who", *out)
    with pytest.raises(UserError, match=r"read on this machine only: copy 's3://films/ml-1m.zip' here"):
        load_task("movielens", "s3://films/ml-1m.zip")
