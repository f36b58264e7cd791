"""A run opens again: by its name, with the user's own task or setting, and never with code that nobody named."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest

import partwise
from partwise.checkpoint import load_json
from partwise.data import by_client, planted_ratings
from partwise.runs import resolve, trust
from partwise.runs.evaluation import evaluate_run
from partwise.runs.export import export
from partwise.runs.personal import Personal, save_local
from partwise.runs.train import train
from partwise.tasks import Setting, Task
from partwise.tasks.ratings import settings
from partwise.types import UserError

SHORT = {"rounds": 3, "cohort.size": 4, "simulation.lanes": 2, "simulation.evaluate_every": 3}
CODE = """
from partwise.data import by_client, planted_ratings
from partwise.tasks import Task
from partwise.tasks.ratings import settings

def make_task(dim: int = 2):
    store = planted_ratings(num_clients=30, num_items=12, rank=2, mean_examples=11).store
    return Task("mine", *by_client(store), settings(12, 30, dim)[0])
"""


def own_task(dim: int = 2) -> Task:
    store = planted_ratings(num_clients=30, num_items=12, rank=2, mean_examples=11).store
    return Task("mine", *by_client(store), settings(12, 30, dim)[0])


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """The folder of a run of a Task that was made in Python, and the run."""
    out = tmp_path_factory.mktemp("own") / "run"
    return out, train(own_task(), out=out, changes=SHORT)


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A current folder with code of the user's, who has a key of their own."""
    (tmp_path / "reopen_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path
    sys.modules.pop("reopen_code", None)


def same(one, other):
    assert set(one) == set(other)
    for path in one:
        np.testing.assert_array_equal(one[path], other[path])


def test_a_run_of_a_named_task_is_the_same_again_without_its_data(tiny_run, monkeypatch):
    before = evaluate_run(tiny_run)
    loaded = []
    monkeypatch.setattr(resolve, "load_task", lambda *a, **k: loaded.append(a) or partwise.load_task(*a, **k))
    again = partwise.load(tiny_run)
    assert again.summary == load_json(tiny_run / "summary.json")
    assert again.test["rmse"] == again.summary["test"]["rmse"]
    assert [each["round"] for each in again.records] == list(range(1, 7))
    assert repr(again).startswith("Run(fed_recon on planted, 6 rounds, test {'rmse'")
    assert again.personal.digest == Personal.open(tiny_run).digest
    same(again.params, again.personal.params)
    assert not loaded
    assert again.evaluate()["rmse"] == before["rmse"]
    assert len(loaded) == 1
    assert again.evaluate("validation")["clients"] == again.task.validation.num_clients
    assert len(loaded) == 1


def test_a_run_of_ones_own_task(own_run):
    folder, run = own_run
    with pytest.raises(
        UserError, match=r"task 'mine' that was made in Python.*--task MODULE:FUNCTION.*setting"
    ):
        Personal.open(folder)
    mine = run.task.test.gather([0])
    expected = run.personal.personalize(mine)
    for given in (own_task(), own_task().personal):
        again = partwise.load(folder, given)
        same(again.params, run.params)
        same(again.personal.personalize(mine), expected)
        same(Personal.open(folder, given).personalize(mine), expected)
    assert partwise.load(folder, own_task()).evaluate()["rmse"] == pytest.approx(run.test["rmse"])
    with pytest.raises(UserError, match="opened with a setting, which has no data"):
        _ = partwise.load(folder, own_task().personal).task
    with pytest.raises(UserError, match="made in Python"):
        partwise.load(folder).evaluate()


def test_an_export_of_ones_own_model(own_run, tmp_path):
    folder, run = own_run
    me, mine = run.personal, run.task.test.gather([0])
    kept = me.personalize(mine)
    save_local(tmp_path / "local", kept, me.digest)
    formats = ["stablehlo", "numpy"]
    about = export(folder, tmp_path / "out", tmp_path / "local", formats=formats, task=own_task().personal)
    assert set(about["rows"]) == {"model.stablehlo", "model.npz"}
    with np.load(tmp_path / "out" / "model.npz") as arrays:  # numpy alone
        user, item = arrays["local/user"], arrays["server/item"]
    found = item[mine.columns["item"]] @ user
    np.testing.assert_allclose(found, me.predict(kept, mine), rtol=1e-5, atol=1e-6)
    about = export(me, tmp_path / "alone", kept, formats=["numpy"])
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == [
        "ids.json",
        "model.json",
        "model.npz",
        "model.safetensors",
    ]
    assert (about["rows"], about["output"]["shape"]) == ({"model.npz": None}, [])
    assert (tmp_path / "alone" / "model.npz").stat().st_mode & 0o777 == 0o600
    export(me, tmp_path / "alone", kept)  # an earlier export is replaced


def test_a_setting_of_another_model_is_refused_with_names_and_shapes(own_run):
    folder, _ = own_run
    other = own_task(dim=5)
    told = r"'item' \(12, 2\) in the folder and \(12, 5\) in the setting"
    for given in (other, other.personal):
        with pytest.raises(UserError, match=told):
            partwise.load(folder, given)
    with pytest.raises(UserError, match=told):
        Personal.open(folder, other)
    biased = settings(12, 30, 2, biases=True)[0]
    with pytest.raises(
        UserError, match=r"'item_bias' \(12,\) in the setting only; 'mean' \(\) in the setting only"
    ):
        Personal.open(folder, biased)


def test_a_run_without_a_folder_is_not_evaluated_again():
    run = train(own_task(), changes=SHORT | {"rounds": 1, "simulation.evaluate_every": 1})
    with pytest.raises(UserError, match="train with out="):
        run.evaluate()


def test_code_is_found_again_by_who_trained_it(code):
    run = train("reopen_code:make_task", out="run", changes=SHORT | {"data.dim": 3})
    assert run.config.task == "reopen_code:make_task"
    assert run.config.data == {"dim": 3}
    again = partwise.load("run")
    assert again.personal.digest == run.personal.digest
    assert again.evaluate()["rmse"] == pytest.approx(run.test["rmse"])
    assert evaluate_run("run")["rmse"] == pytest.approx(run.test["rmse"])
    longer = train(out="run", resume=True, rounds=4)
    assert longer.records[-1]["round"] == 4
    assert (code / "state" / "partwise" / "run-key").stat().st_mode & 0o777 == 0o600


def test_code_that_a_foreign_folder_names_is_not_run(code, monkeypatch):
    train("reopen_code:make_task", out="run", changes=SHORT)
    shutil.copytree("run", "copied")
    assert Personal.open("copied")  # it is still one's own
    sys.modules.pop("reopen_code")
    (code / "reopen_code.py").write_text("raise SystemExit('code was run')\n" + CODE)
    monkeypatch.setenv("XDG_STATE_HOME", str(code / "somebody else"))
    for call in (
        lambda: Personal.open("run"),
        lambda: partwise.load("run").personal,
        lambda: partwise.load("run").evaluate(),
        lambda: evaluate_run("run"),
        lambda: export("run", "out"),
        lambda: train(out="run", resume=True, rounds=5),
    ):
        with pytest.raises(
            UserError, match=r"was not made by you on this machine.*--task reopen_code:make_task"
        ):
            call()
    assert not (code / "somebody else").exists()
    start = json.loads((code / "run" / "start.json").read_text())
    assert "signed" in start
    with pytest.raises(SystemExit):  # now the user has named it
        Personal.open("run", "reopen_code:make_task")


def test_a_name_for_a_run_that_was_made_of_a_task(own_run, code):
    folder, run = own_run
    again = Personal.open(folder, "reopen_code:make_task")
    assert again.digest == run.personal.digest
    assert evaluate_run(folder, task="reopen_code:make_task")["rmse"] == pytest.approx(run.test["rmse"])


def test_a_signature_of_another_run_is_none(code):
    signed = {"run": "a", "signed": trust.sign("a")}
    trust.check_own(code, "films:make", signed)
    for other in (signed | {"run": "b"}, signed | {"signed": ""}, {"run": "a"}, {}):
        with pytest.raises(UserError, match="not made by you"):
            trust.check_own(code, "films:make", other)


def test_without_a_place_for_a_key_code_must_be_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert trust.sign("a") == ""
    with pytest.raises(UserError, match="not made by you"):
        trust.check_own(tmp_path, "films:make", {"run": "a", "signed": ""})


def test_named_tasks_need_no_key(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    train("planted", out=tmp_path / "run", changes=tiny | {"rounds": 2})
    assert not (tmp_path / "state").exists()
    assert isinstance(Personal.open(tmp_path / "run").setting, Setting)
