"""A client's own table is read as the training data was: its client column, its lists, its dialect."""

from __future__ import annotations

import jax.numpy as jnp
import pyarrow as pa
import pyarrow.parquet
import pytest

import partwise as pw
from partwise.cli import main
from partwise.data import by_client, open_store, read_rows, read_table
from partwise.runs.personal import Personal

QUICK = {"rounds": 1, "simulation.lanes": 2, "cohort.size": 4, "split.batch_size": 1}
FEW = [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
LINES = [f"{k % 20},{k % 7},{1 + k % 5}" for k in range(100)]
ITEMS = ("ale", "tea", "rice")


def write(path, columns):
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def who(tmp_path_factory):
    """A run on a table whose clients are in the column `who`."""
    folder = tmp_path_factory.mktemp("who")
    (folder / "who.csv").write_text("\n".join(["who,item,rating", *LINES]))
    store = read_table(folder / "who.csv", "who", columns=["item", "rating"], ids=["item"])
    run = pw.train(pw.ratings_task(store, dim=2), changes=QUICK, out=folder / "run")
    return folder, run


def past_task(client: str) -> pw.Task:
    """The next item by the last two."""
    rows = [{client: k % 20, "past": list(ITEMS[: k % 4]), "next": k % 3, "two": [k, 1.0]} for k in range(80)]
    store = read_rows(rows, client, ids=["past"], lists={"past": 2})
    init = lambda rng: {"item": jnp.zeros((3, 2)), "own": jnp.zeros(2)}
    past = lambda params, batch: params["item"][batch["past"]] * (batch["past"] >= 0)[..., None]
    predict = lambda params, batch, rng: past(params, batch).sum(axis=(1, 2)) + params["own"].sum()
    model = pw.Model(init, predict, lambda outputs, batch: jnp.square(outputs - batch["next"]))
    roles = {"item": pw.keyed("past"), "own": pw.local("zero")}
    return pw.Task(
        "past", *by_client(store), pw.Setting(model, pw.partition(model, roles), ("past", "next", "two"))
    )


@pytest.fixture(scope="module")
def past():
    return pw.train(past_task("who"), changes=QUICK).personal


def test_a_store_knows_its_client_column(who, tmp_path):
    table = pa.table({"who": ["a", "b"], "x": [1, 2]})
    held, kept = read_rows(table, "who"), read_rows(table, "who", out=tmp_path / "store")
    held.save(tmp_path / "saved")
    stores = [held, kept, open_store(tmp_path / "store"), open_store(tmp_path / "saved"), by_client(held)[0]]
    assert {store.info["client_column"] for store in stores} == {"who"}


def test_clients_are_told_apart_by_the_column_of_the_training_data(who):
    folder, run = who
    for personal in (run.personal, Personal.open(folder / "run")):
        with pytest.raises(pw.UserError, match=r"holds rows of 20 clients \(column 'who'\)"):
            personal.read(folder / "who.csv", ("item", "rating"))
        mine = personal.read(folder / "who.csv", ("item", "rating"), "3").examples
        assert (mine.client_ids.tolist(), mine.num_examples) == ([3], 5)


def test_a_store_on_disk_hands_its_client_column_on(who, tmp_path):
    folder, _ = who
    read_table(folder / "who.csv", "who", ["item", "rating"], ["item"], out=tmp_path / "store")
    assert (
        main(["train", "ratings", "--data", str(tmp_path / "store"), *FEW, "--out", str(tmp_path / "run")])
        == 0
    )
    with pytest.raises(pw.UserError, match=r"\(column 'who'\)"):
        Personal.open(tmp_path / "run").read(folder / "who.csv", ("item", "rating"))


def test_lists_have_the_room_that_they_had_in_training(past, tmp_path):
    lists = [["ale", "tea", "rice"], ["tea"], [], ["rice", "ale"]]
    columns = {"past": lists, "next": [1, 2, 0, 1], "two": [[1.0, 2.0]] * 4}
    mine = past.read(write(tmp_path / "m.parquet", columns), ("past", "next", "two")).examples
    words = past.vocabularies["past"].tolist()
    found = [[words[key] if key >= 0 else None for key in row] for row in mine.columns["past"].tolist()]
    assert found == [["tea", "rice"], ["tea", None], [None, None], ["rice", "ale"]]


def test_clients_of_ones_own_task_are_told_apart(past, tmp_path):
    columns = {"who": ["a", "b"], "past": [["ale"]] * 2, "next": [1, 2], "two": [[1.0, 2.0]] * 2}
    file = write(tmp_path / "m.parquet", columns)
    with pytest.raises(pw.UserError, match=r"2 clients \(column 'who'\)"):
        past.read(file, ("past", "next", "two"))
    assert past.read(file, ("past", "next", "two"), "b").examples.columns["next"].tolist() == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past": ["ale", "tea"]}, "'past' has one value in a row, and the model was trained with lists"),
        ({"next": [[1], [2]]}, "'next' has lists in a row, and the model was trained with one value"),
        ({"next": [[1], [2, 3]]}, "'next' has lists in a row, and the model was trained with one value"),
        ({"two": [1.0, 2.0]}, "'two' has one value in a row, and the model was trained with lists"),
        ({"two": [[1.0, 2.0, 3.0]] * 2}, r"'two' has \(3,\) numbers in a row, .*trained with \(2,\)"),
    ],
)
def test_columns_of_other_widths_are_refused(past, tmp_path, change, message):
    columns = {"past": [["ale"], []], "next": [1, 2], "two": [[1.0, 2.0]] * 2} | change
    with pytest.raises(pw.UserError, match=message):
        past.read(write(tmp_path / "m.parquet", columns), ("past", "next", "two"))
