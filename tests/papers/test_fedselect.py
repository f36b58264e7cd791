"""Federated Select's tables and figures run to the end, quick and on small files, with the same clients for all."""

from __future__ import annotations

import json

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.algorithms.registry import settings_for
from partwise.config.settings import Config
from partwise.data.generated.writers import generate_writers
from partwise.papers import fedselect as select
from partwise.papers import reproduce as papers
from partwise.papers import study
from partwise.runs.train import silent
from partwise.tasks import load_task

TAGS = [f"tag{k}" for k in range(8)]


@pytest.fixture(scope="module")
def stackexchange(tmp_path_factory):
    """A dump of 60 users with three questions each, and a comment, as Parquet."""
    rng, rows = np.random.default_rng(0), []
    for number in range(180):
        words = [f"w{k}" for k in np.minimum(rng.zipf(1.3, 30), 400)]
        body = f"<p>{' '.join(words[:15])}. {' '.join(words[15:])}.</p>"
        tags = "".join(f"<{tag}>" for tag in rng.choice(TAGS, 2, replace=False))
        rows.append((number, 1, None, "2020-01-01T00:00:00.000", body, number % 60 + 1, "a title", tags))
    names = ("Id", "PostTypeId", "ParentId", "CreationDate", "Body", "OwnerUserId", "Title", "Tags")
    columns = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    columns["ParentId"] = pa.array(columns["ParentId"], pa.int64())
    folder = tmp_path_factory.mktemp("stackexchange")
    pyarrow.parquet.write_table(pa.table({"Site": ["beer"] * 180, **columns}), folder / "posts.parquet")
    comment = {"Site": ["beer"], "Id": [1], "CreationDate": ["2021-01-01T00:00:00.000"], "Text": ["so it is"]}
    pyarrow.parquet.write_table(pa.table({**comment, "UserId": [1]}), folder / "comments.parquet")
    return folder


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """`mnist_by_writer.npz` of 40 generated writers, the last ten of them for the test."""
    store = generate_writers(40, 20, 10, min_examples=10, max_examples=20)
    writer = np.repeat(np.arange(40), store.counts).astype(np.int16)
    folder = tmp_path_factory.mktemp("mnist")
    np.savez_compressed(
        folder / "mnist_by_writer.npz",
        images=store.columns["pixels"],
        labels=store.columns["label"].astype(np.uint8),
        writer=writer,
        split=(writer >= 30).astype(np.uint8),
    )
    return folder


@pytest.fixture(scope="module")
def femnist(tmp_path_factory):
    """`femnist_leaf_sample.npz` of 40 generated writers."""
    store = generate_writers(40, 60, 62, min_examples=50, max_examples=60)
    folder = tmp_path_factory.mktemp("femnist")
    np.savez_compressed(
        folder / "femnist_leaf_sample.npz",
        images=store.columns["pixels"],
        labels=store.columns["label"].astype(np.uint8),
        writer=np.repeat(np.arange(40), store.counts).astype(np.int16),
        writer_ids=np.array([f"f{k}" for k in range(40)]),
        complete=np.ones(40, bool),
    )
    return folder


@pytest.fixture
def trainings(recorded_cohorts):
    """The clients of every round, a list for each training."""
    with recorded_cohorts() as drawn:
        yield drawn


def check(name, data, out, trainings, rows):
    """The JSON's rows, a picture that can be read, and the same clients in every row's trials."""
    result = papers.reproduce(name, str(data), out, seeds=2, quick=True)
    written = json.loads((out / f"{name}.json").read_text())
    assert [row["row"] for row in written["rows"]] == rows
    for row in written["rows"]:
        assert 0 <= row["ours"] <= 100
        assert row["seeds"] == 2
        assert 0 < row["relative_size"] <= 1.2  # keys are counted too
        assert np.array(row["validation"]).shape == (2, len(row["rounds"])) == (2, 2)
    assert written["quick"] is True
    assert result["rows"][0]["row"] == rows[0]
    assert matplotlib.image.imread(out / f"{name}.png").ndim == 3
    first, second = trainings[:2]
    assert first != second  # two trials
    assert len(trainings) == 2 * len(rows)
    assert all(trainings[k : k + 2] == [first, second] for k in range(0, len(trainings), 2))
    return written


def test_figures_2_and_3_are_one_training(stackexchange, tmp_path, trainings):
    cells = [(n, m) for n in (100, 297) for m in ("m = 10", "no selection")]
    rows = [f"n = {n}, {m}" for n, m in cells]
    told = check("select-figure2", stackexchange, tmp_path, trainings, rows)
    done = len(trainings)
    turned = papers.reproduce("select-figure3", str(stackexchange), tmp_path, seeds=2, quick=True)
    assert len(trainings) == done
    assert [(row["m"], row["n"]) for row in turned["rows"]] == [
        (10, 100),
        (10, 297),
        (None, 100),
        (None, 297),
    ]
    assert sorted(row["ours"] for row in turned["rows"]) == sorted(row["ours"] for row in told["rows"])
    assert matplotlib.image.imread(tmp_path / "select-figure3.png").ndim == 3
    assert json.loads((tmp_path / "select-figure3.json").read_text())["name"] == "select-figure3"


@pytest.mark.parametrize(
    "change", [{"quick": False}, {"contents": "others"}, {"rows": [{"seeds": 3}]}, {"rows": 0}]
)
def test_figure_3_takes_only_the_same_training(tmp_path, monkeypatch, change):
    """Of another kind, of other data, of other trials, or not what was expected: it is trained anew."""
    row = {
        "row": "n = 9, m = 3",
        "n": 9,
        "m": 3,
        "ours": 1.0,
        "spread": 0.1,
        "relative_size": 0.5,
        "seeds": 2,
    }
    data = tmp_path / "data.csv"
    data.write_text("a")
    monkeypatch.setattr(select, "_contents", lambda *_: data.read_text())
    told = {"quick": True, "contents": "a", "rows": [row]}
    told |= dict.fromkeys(("rates", "grid", "clients", "task", "data"))
    trained = []
    monkeypatch.setattr(select, "_tag_grid", lambda *given: ({}, trained.append(given) or told))
    for written, times in ((told, 0), (told | change, 1)):
        (tmp_path / "select-figure2.json").write_text(json.dumps(written))
        result = select.figure3(str(data), tmp_path, range(2), True, silent)
        assert len(trained) == times
        assert result["rows"] == [row]
    (tmp_path / "select-figure2.json").write_text(json.dumps(told))
    data.write_text("b")
    select.figure3(str(data), tmp_path, range(2), True, silent)
    assert len(trained) == 2


def test_figure_4(stackexchange, tmp_path, trainings):
    rows = [f"n = 297, {way}" for way in ("top", "random", "random top")]
    check("select-figure4", stackexchange, tmp_path, trainings, rows)


@pytest.mark.parametrize(
    ("name", "rows"), [("table2", ["m = 32", "m = 64"]), ("table3", ["m = 100", "m = 200"])]
)
def test_tables_2_and_3(mnist, tmp_path, trainings, name, rows):
    told = check(f"select-{name}", mnist, tmp_path, trainings, rows)
    assert all(row["paper"] for row in told["rows"])
    assert told["rows"][0]["relative_size"] < told["rows"][1]["relative_size"]


def test_femnist_is_recognised(femnist, tmp_path, trainings):
    """Where the data is FEMNIST, there are 62 classes, and training is longer."""
    told = check("select-table3", femnist, tmp_path, trainings, ["m = 100", "m = 200"])
    assert (told["task"], told["clients"]) == ("femnist", {"train": 32, "validation": 4, "test": 4})
    for given, network, rounds in ((select.CNN, "cnn", 600), (select.TWO_LAYERS, "2nn", 300)):
        setup = select.Setup(select._handwriting(given, str(femnist)), str(femnist), tmp_path, False, silent)
        assert setup.task.options == {"num_classes": 62, "network": network}
        assert setup.config.rounds == rounds


@pytest.mark.slow
def test_table_2_on_femnist(femnist, tmp_path, trainings):
    check("select-table2", femnist, tmp_path, trainings, ["m = 32", "m = 64"])


@pytest.mark.slow
def test_figure_6(mnist, tmp_path, trainings):
    keys = ("independent keys", "the same keys")
    check(
        "select-figure6",
        mnist,
        tmp_path,
        trainings,
        [f"{of}, {k}" for of in ("cnn, m = 8", "2nn, m = 50") for k in keys],
    )


@pytest.mark.slow
def test_figure_7(stackexchange, tmp_path, trainings):
    rows = ["alpha = 1", "mixed, alpha = 0.1"]
    told = check("select-figure7", stackexchange, tmp_path, trainings, rows)
    assert told["rows"][1]["relative_size"] < 0.5 * told["rows"][0]["relative_size"]


def test_rates_are_tuned_by_the_validation_clients():
    task = load_task(
        "tags-planted", num_clients=30, num_words=60, num_tags=6, mean_examples=8, words_per_example=8
    )
    config = Config(task=task.name).changed(settings_for(task.defaults, "fed_select"))
    config = config.changed({"rounds": 3, "cohort.size": 4, "simulation.lanes": 1, "select.word": "own"})
    grid = {"update.rate": (0.0, 1.0), "server.rate": (0.3,)}
    rates, tried = study.tune(task, config, grid, "recall_at_5", silent)
    assert rates == {"update.rate": 1.0, "server.rate": 0.3}
    assert tried[1]["validation"] > tried[0]["validation"]
    assert study.tune(task, config, {"update.rate": (0.5,)}, "recall_at_5", silent) == (
        {"update.rate": 0.5},
        [],
    )
