"""A client's file and the ids of the training data: the same by their texts, from the table to the prediction."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.cli import main
from partwise.data.ids import typed
from partwise.randomness import client_numbers
from partwise.runs.folder import Folder
from partwise.runs.personal import Personal
from partwise.types import UserError

ITEMS = ["10", "0010", "007", "7", "8"]
SMALL = [
    "--rounds",
    "2",
    "--cohort",
    "4",
    "--set",
    "data.dim=2",
    "--set",
    "simulation.lanes=2",
    "--set",
    "split.batch_size=1",
]


def train(folder, items):
    lines = [
        f"{user:03d},{items[(user + k) % len(items)]},{1 + (user * k) % 5}"
        for user in range(20)
        for k in range(5)
    ]
    (folder / "t.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    assert (
        main(["train", "ratings", "--data", str(folder / "t.csv"), *SMALL, "--out", str(folder / "run")]) == 0
    )
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained on items of which one is called 10 and another one 0010."""
    return train(tmp_path_factory.mktemp("texts"), ITEMS)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return train(tmp_path_factory.mktemp("numbers"), ["10", "7", "8", "9", "11"])


@pytest.fixture
def predicted(output, tmp_path):
    def predict(run, client, *more):
        local = str(tmp_path / "local.safetensors")
        output("personalize", str(run), "--client", str(client), "--out", local, *more)
        told = output("predict", str(run), "--local", local, "--client", str(client), *more)
        return {row["item"]: row["output"] for row in told["predictions"]}, told["unknown"]

    return predict


def test_items_are_those_that_are_written_so(run, predicted, tmp_path):
    mine = tmp_path / "mine.csv"
    mine.write_text("item,rating\n0010,4\n10,1\n010,3\n")
    outputs, unknown = predicted(run, mine)
    assert list(outputs) == ["0010", "10"]
    assert outputs["0010"] != outputs["10"]
    assert unknown == {"item": 1}


def test_numbers_of_parquet_match_their_texts(run, numbered, predicted, tmp_path):
    pyarrow.parquet.write_table(
        pa.table({"item": [10, 7, 8], "rating": [4.0, 1.0, 3.0]}), tmp_path / "m.parquet"
    )
    (tmp_path / "m.csv").write_text("item,rating\n10,4\n7,1\n8,3\n")
    for trained in (run, numbered):
        assert predicted(trained, tmp_path / "m.parquet") == predicted(trained, tmp_path / "m.csv")


def test_a_text_that_only_looks_like_a_number_is_unknown(numbered, mistake, tmp_path):
    mine = tmp_path / "mine.csv"
    mine.write_text("item,rating\n0010,4\n007,1\n")
    arguments = ("personalize", str(numbered), "--client", str(mine), "--out", str(tmp_path / "local"))
    assert "of its 2 rows none names anything that the model knows" in mistake(*arguments)


def test_vocabularies_come_back_with_their_types(run, numbered):
    assert Folder(run).source().vocabularies["item"].tolist() == sorted(ITEMS)
    again = Folder(numbered).source().vocabularies["item"]
    assert again.dtype == np.int64
    assert again.tolist() == [7, 8, 9, 10, 11]
    assert json.loads((run / "vocabularies.json").read_text())["ids"]["item"] == sorted(ITEMS)


def test_a_client_keeps_its_id(run, tmp_path):
    personal, mine = Personal.open(run), tmp_path / "mine.csv"
    read = lambda *given: personal.read(mine, ("item", "rating"), *given).examples.client_ids.tolist()
    mine.write_text("user,item,rating\n012,10,4\n012,7,1\n")
    assert read() == ["012"]
    mine.write_text("user,item,rating\n012,10,4\n12,7,1\nann,7,1\n")
    assert read("12") == [12]
    assert read("012") == ["012"]
    with pytest.raises(UserError, match="unknown client '0012'"):
        read("0012")
    mine.write_text("item,rating\n10,4\n")
    assert read() == [0]


def test_a_client_has_one_number_whatever_the_others_are_called():
    among = client_numbers(np.array(["7", "ann", "007", "-1"]))
    assert among[0] == client_numbers(np.array([7]))[0]
    assert among[3] == client_numbers(typed(["-1"]))[0]
    assert len(set(among.tolist())) == 4


def test_a_client_column_that_cannot_be_read_is_not_taken_for_none(run, mistake, tmp_path):
    """Or the rows of all clients would be taken for one client's."""
    mine = tmp_path / "mine.csv"
    mine.write_text("user,item,rating\nann,10,4\n,7,1\n")
    arguments = ("personalize", str(run), "--client", str(mine), "--out", str(tmp_path / "local"))
    assert "line 3, column 'user': ''; expected an id" in mistake(*arguments)


def test_other_columns_of_a_clients_store_do_no_harm(run, make_store):
    personal = Personal.open(run)
    times = np.array([1_700_000_000_000, 1_700_000_000_001])
    store = make_store([2], item=np.array([0, 1], np.int32), rating=np.array([1.0, 5.0]), time=times)
    assert personal.predict(personal.personalize(store), store).shape == (2,)


def test_whole_numbers_that_do_not_fit_are_refused_before_training(mistake, tmp_path):
    lines = [f"{user},{item},{5_000_000_000 + item}" for user in range(10) for item in range(4)]
    (tmp_path / "t.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    arguments = (
        "train",
        "ratings",
        "--data",
        str(tmp_path / "t.csv"),
        *SMALL,
        "--out",
        str(tmp_path / "run"),
    )
    assert "column 'rating' holds whole numbers from 5000000000 to 5000000003" in mistake(*arguments)


def test_large_times_are_only_sorted_by(tmp_path):
    lines = [f"{user},{item},3,{1_700_000_000_000 + item}" for user in range(20) for item in range(5)]
    (tmp_path / "t.csv").write_text("user,item,rating,when\n" + "\n".join(lines) + "\n")
    arguments = [
        "train",
        "ratings",
        "--data",
        str(tmp_path / "t.csv"),
        *SMALL,
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*arguments, "--set", "data.time=when", "--set", "data.order=time"]) == 0


def test_lists_where_the_model_has_single_values_are_the_files_fault(numbered, mistake, output, tmp_path):
    mine, local = tmp_path / "mine.parquet", str(tmp_path / "local")
    columns = {"item": [10, 7], "rating": [1.0, 2.0]}
    pyarrow.parquet.write_table(pa.table(columns), mine)
    output("personalize", str(numbered), "--client", str(mine), "--out", local)
    for name, lists in (("item", [[10, 7], [8, 9]]), ("rating", [[1.0, 2.0], [3.0, 4.0]])):
        pyarrow.parquet.write_table(pa.table(columns | {name: lists}), mine)
        told = f"column '{name}' has lists in a row, and the model was trained with one value"
        assert told in mistake("personalize", str(numbered), "--client", str(mine), "--out", local)
        assert told in mistake("predict", str(numbered), "--local", local, "--client", str(mine))


def test_a_clients_file_is_of_the_dialect_of_the_training_data(predicted, output, tmp_path):
    lines = [f"{user};{(user + k) % 7};{1 + k}" for user in range(20) for k in range(5)]
    (tmp_path / "t.csv").write_text("\n".join(["user;item;rating", *lines]))
    asked = ["train", "ratings", "--data", str(tmp_path / "t.csv"), "--set", "data.delimiter=;", *SMALL]
    output(*asked, "--out", str(tmp_path / "run"))
    (tmp_path / "mine.csv").write_text("item;rating\n1;4\n2;3\n")
    pyarrow.parquet.write_table(pa.table({"item": [1, 2], "rating": [4, 3]}), tmp_path / "mine.parquet")
    outputs, _ = predicted(tmp_path / "run", tmp_path / "mine.csv")
    assert list(outputs) == [1, 2]
    assert predicted(tmp_path / "run", tmp_path / "mine.parquet")[0] == outputs
