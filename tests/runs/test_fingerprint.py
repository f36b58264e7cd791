"""Other data under an old name is noticed, and named, before anything goes on with it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from partwise.cli import main
from partwise.data.store import ClientStore, open_store
from partwise.papers.study import PARTS, once
from partwise.runs import fingerprint as prints
from partwise.runs.evaluation import evaluate_run
from partwise.runs.fingerprint import differences, digest_of, fingerprint
from partwise.runs.train import train
from partwise.tasks import load_task
from partwise.tasks.ratings import ratings_task
from partwise.types import RunWarning, UserError

SETTINGS = {
    "rounds": 2,
    "cohort.size": 4,
    "simulation.lanes": 2,
    "data.dim": 2,
    "server.schedule": "constant",
}
SETTINGS |= {"server.schedule": "constant"}


def table(changes=()):
    """Ratings of 12 users: 10 items each, some changed."""
    rows = [(user, item, 1 + (user * item) % 5) for user in range(12) for item in range(10)]
    rows = dict.fromkeys(rows) if not changes else [*changes(rows)]
    return "user,item,rating\n" + "".join(f"{u},{i},{r}\n" for u, i, r in rows)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run on a table, and the table."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "table.csv").write_text(table())
    train("ratings", data=str(folder / "table.csv"), out=folder / "run", changes=SETTINGS)
    return folder / "run", folder / "table.csv"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda rows: [(u, i, 6 - r) for u, i, r in rows],
            r"column 'rating' of (train|validation|test) has other values",
        ),
        (lambda rows: rows[:-10], r"train had 10 clients and has 9|had [\d,]+ clients and has"),
        (lambda rows: rows[:-1], r"(train|validation|test) had \d+ examples and has \d+"),
        (lambda rows: [(u + 1, i, r) for u, i, r in rows], "has other client ids"),
    ],
    ids=["values", "clients", "examples", "ids"],
)
def test_changed_data_is_named_by_resume_and_evaluate(recorded, tmp_path, change, says, capsys):
    run, _ = recorded
    other = tmp_path / "other.csv"
    other.write_text(table(change))
    for go_on in (
        lambda: train(out=run, resume=True, data=str(other), rounds=3),
        lambda: evaluate_run(run, data=str(other)),
    ):
        with pytest.raises(UserError, match=f"the data is not that of the run.*{says}.*--data"):
            go_on()
    assert main(["evaluate", str(run), "--data", str(other)]) == 2
    assert "is not that of the run" in " ".join(capsys.readouterr().err.split())


def test_the_same_data_elsewhere_is_the_same(recorded, tmp_path):
    run, file = recorded
    (tmp_path / "moved.csv").write_text(file.read_text())
    assert evaluate_run(run, data=str(tmp_path / "moved.csv")) == evaluate_run(run)


def test_other_options_ask_for_other_data(recorded):
    run, _ = recorded
    assert evaluate_run(run, changes={"data.max_examples": 4})["rmse"] != evaluate_run(run)["rmse"]


def planted(**options):
    return load_task("planted", num_clients=20, num_items=12, mean_examples=10, dim=2, **options)


def test_what_differs_is_told_by_part_and_column():
    task = planted()
    before = fingerprint(task)
    assert differences(before, fingerprint(planted())) == []
    test = task.test.gather()
    rating = test.columns["rating"].copy()
    rating[-1] += 1e-6
    changed = dataclasses.replace(test, columns={**test.columns, "rating": rating})
    assert differences(before, fingerprint(task._replace(test=changed))) == [
        "column 'rating' of test has other values"
    ]
    words = {name: ids + 1 for name, ids in task.train.vocabularies.items()}
    renamed = dataclasses.replace(task.train, vocabularies=words)
    assert differences(before, fingerprint(task._replace(train=renamed))) == [
        "column 'item' of train has other ids"
    ]
    assert differences(before, fingerprint(task._replace(options={**task.options, "dim": 3}))) == [
        "the option dim was 2 and is 3"
    ]
    newer = [{**task.options, "attention": value} for value in (False, True)]
    told = [differences(before, fingerprint(task._replace(options=options))) for options in newer]
    assert told == [[], ["the option attention was None and is True"]]  # of a version that did not know it
    swapped = task.train.take(np.arange(task.train.num_clients)[::-1])
    assert "train has other client ids" in differences(before, fingerprint(task._replace(train=swapped)))


def test_a_view_and_its_copy_are_the_same():
    task = planted()
    assert fingerprint(task._replace(train=task.train.gather())) == fingerprint(task)


def test_a_large_store_is_sampled_and_not_read_whole(tmp_path, monkeypatch):
    counts = np.full(5000, 4)
    columns = {"item": np.arange(20_000, dtype=np.int32) % 50, "rating": np.ones(20_000, np.float32)}
    store = ClientStore(
        columns, np.arange(5000) * 4, counts, np.arange(5000), {"item": np.arange(50)}, {"from": "here"}
    )
    store.save(tmp_path / "store")
    task = ratings_task(open_store(tmp_path / "store"), dim=2, order="as is")
    monkeypatch.setattr(prints, "WHOLE_BYTES", 1000)
    read = []
    gather = ClientStore.gather
    monkeypatch.setattr(ClientStore, "gather", lambda self, p=None: read.append(len(p)) or gather(self, p))
    before = fingerprint(task)
    assert 0 < max(read) <= prints.SAMPLED_CLIENTS
    assert sum(read) < 2500
    assert fingerprint(task) == before
    fewer = task.train.take(np.arange(task.train.num_clients - 1))
    assert differences(before, fingerprint(task._replace(train=fewer)))


def test_finished_parts_of_a_reproduction_hang_on_the_data(tmp_path):
    task, made = planted(), []

    def make():
        made.append(1)
        return {"value": len(made), "curve": [1.0, float("nan")]}

    assert once(tmp_path, ["row", task], make) == {"value": 1, "curve": [1.0, None]}
    assert once(tmp_path, ["row", planted()], make)["value"] == 1
    other = task._replace(test=task.test.cap(3))
    assert repr(other.train) == repr(task.train)
    assert once(tmp_path, ["row", other], make)["value"] == 2
    assert digest_of(other) != digest_of(task)
    with pytest.raises(TypeError, match="give the task"):
        once(tmp_path, ["row", task.train], make)


def test_a_damaged_part_is_made_again_and_told(tmp_path):
    once(tmp_path, ["row"], lambda: 1.25)
    (file,) = (tmp_path / PARTS).iterdir()
    file.write_text(file.read_text().replace("1.25", "1.26"))
    with pytest.warns(RunWarning, match="does not fit its digest.*made again"):
        assert once(tmp_path, ["row"], lambda: 1.5) == 1.5
    assert once(tmp_path, ["row"], lambda: 1.75) == 1.5
