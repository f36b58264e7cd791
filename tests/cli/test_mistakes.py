"""Every mistake in what was asked gets one paragraph and exit code 2; a bug, 1."""

from __future__ import annotations

import argparse
import json

import pytest

from partwise.cli import main, outcome
from partwise.papers.reproduce import REPRODUCTIONS
from partwise.tasks import all_tasks
from partwise.types import UserError


def test_unknown_names_come_with_the_nearest(mistake, small):
    assert "unknown task 'movielen' (nearest: movielens" in mistake("train", "movielen")
    assert "nearest: fed_avg" in mistake("train", "--algorithm", "fedavg", *small)
    assert "nearest: reconstruct.rate" in mistake("train", "--set", "reconstruct.rat=1")
    assert (
        "nearest: reconstruct.rate, update.rate, fine_tune.rate, server.rate); `partwise settings planted`"
        in (mistake("train", "--set", "learning_rate=0.1"))
    )
    assert "nearest: data.dim); `partwise settings planted` lists" in mistake("train", "--set", "dim=16")
    assert "key 'qqq'; `partwise settings planted` lists" in mistake("train", "--set", "qqq=1")
    assert "nearest: fedrecon-table1" in mistake("reproduce", "fedrecon-tabel1")
    assert "fedrecon-movielens" in mistake("bench", "fedrecon-movielns")
    assert "adagrad" in mistake("train", *small, "--set", "server.optimizer=adagrd")
    assert "nearest: sample" in mistake("train", *small, "--set", "select.item=smaple:9@0.5,3@0.5")
    assert "as in 1000@0.8,100@0.2, not '9@half'" in mistake(
        "train", *small, "--set", "select.item=top:9@half"
    )
    assert "'colour'" in mistake("train", "--set", "data.colour=red")
    assert "nearest: fed_avg" in mistake("settings", "--algorithm", "fedavg")
    assert "update.optimizer 'adamm' (nearest: adam" in mistake(
        "train", *small, "--set", "update.optimizer=adamm"
    )
    assert "value of evaluation_split.kind 'halfs' (nearest: halves" in mistake(
        "train", *small, "--set", "evaluation_split.kind=halfs"
    )


def test_a_name_that_is_near_to_none_lists_them_all(mistake):
    assert all(name in mistake("reproduce", "qqq") for name in REPRODUCTIONS)
    assert all(name in mistake("train", "qqq") for name in all_tasks())


def test_values_of_the_wrong_kind(mistake, small, tmp_path):
    assert "must be a number, not 'fast'" in mistake("train", "--set", "server.rate=fast")
    assert "dotted.key=value" in mistake("train", "--set", "server.rate")
    assert "is a section" in mistake("train", "--set", "server=3")
    assert "could not read the configuration" in mistake("train", "--config", str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    assert "is not a TOML file" in mistake("train", "--config", str(broken))
    assert "only 40" in mistake("train", *small[:-4], "--cohort", "41", "--rounds", "1")
    assert "--out DIR" in mistake("train", "--resume")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rounds", "-5"], "'rounds' must be between 1 and 100,000,000, not -5"),
        (["--rounds", "0"], "'rounds' must be between 1 and"),
        (["--rounds", "many"], "'rounds' must be a whole number, not 'many'"),
        (["--seed", "-1"], "'seed' must be between 0 and"),
        (["--seed", "99999999999999999999"], "'seed' must be between 0 and"),
        (["--cohort", "0"], "'cohort.size' must be between 1 and"),
        (["--set", "simulation.lanes=-1"], "'simulation.lanes' must be between 0 and"),
        (["--set", "simulation.rounds_per_call=0"], "'simulation.rounds_per_call' must be between 1 and"),
        (["--set", "data.num_clients=abc"], "'data.num_clients' must be a whole number, not 'abc'"),
        (["--set", "data.num_clients=-3"], "num_clients"),
        (["--set", "data.dim=0"], "'data.dim' must be between 1 and 4,096, not 0"),
        (["--set", "data.num_clients=1e12"], "'data.num_clients' must be between 1 and 100,000,000"),
        (["--set", "simulation.rounds_per_call=1e9"], "must be between 1 and 10,000"),
        (["--set", "update.batch_size=1e9"], "must be between 1 and 100,000"),
        (["--set", "server.settings.b1=2"], "unknown setting of the optimizer 'adagrad' 'b1'"),
        (
            ["--set", "data.nope=3"],
            "task 'planted' has no option 'nope' (nearest: noise); `partwise settings planted`",
        ),
        (["--set", "cohort.over_selection=999"], "Use --cohort 4 or fewer (cohort.size)"),
        (["--preset", "paper"], "task 'planted' has no preset 'paper': it comes from no paper"),
        (["movielens", "--preset", "papers"], "unknown preset of task 'movielens' 'papers' (nearest: paper)"),
        (["planted", "--set", "task=movielens"], "two tasks were given"),
        (
            ["--set", "fine_tune.max_steps=1", "--set", "fine_tune.optimizer=adamm"],
            "unknown value of fine_tune.optimizer 'adamm'",
        ),
        (["--set", "evaluation.local=kept"], "unknown value of evaluation.local 'kept'"),
        (
            ["--set", "fine_tune.max_steps=none", "--set", "fine_tune.epochs=none"],
            "fine_tune: give epochs, max_steps or both",
        ),
    ],
)
def test_values_out_of_range(mistake, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in mistake("train", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_table_without_a_task_is_sent_to_the_right_one(mistake, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("user,item,rating\n1,2,3\n")
    assert f"partwise train ratings --data {table}" in mistake("train", "--data", str(table))


def test_every_client_broken_is_a_mistake(mistake, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = mistake("train", *small, "--set", "update.rate=1e30")
    assert "no client counted in 4 rounds" in text
    assert "20 updates that were not finite" in text
    assert not (tmp_path / "runs").exists()


def test_a_bug_says_that_it_is_one(capsys, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("partwise.reports.describe.list_settings", broken)
    monkeypatch.delenv("PARTWISE_DEBUG", raising=False)
    assert main(["settings", "my task"]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "this is a bug in partwise" in text
    assert "ZeroDivisionError: oh" in text
    assert "`partwise settings 'my task'`" in text
    assert "Traceback" not in text
    assert main(["settings", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_errors_are_json_too(capsys):
    assert main(["train", "movielen", "--json"]) == 2
    assert "nearest: movielens" in json.loads(capsys.readouterr().out)["error"]


def test_of_several_processes_the_first_tells_what_all_have(capsys):
    def ended(silent: bool, everywhere: bool) -> tuple[int, str]:
        def fails(options):
            error = UserError("no such file")
            error.everywhere = everywhere
            raise error

        code = outcome._ended(argparse.Namespace(run=fails, json=True, debug=False, silent=silent), [])
        return code, capsys.readouterr().out

    assert ended(silent=True, everywhere=True) == (2, "")
    for silent, everywhere in [(False, True), (True, False)]:
        assert ended(silent, everywhere) == (2, '{"error": "no such file"}\n')


def test_evaluating_with_settings_that_change_the_model_is_refused(mistake, run_folder):
    assert "data.dim = 4 would make another model" in mistake(
        "evaluate", str(run_folder), "--set", "data.dim=4"
    )
    assert "other ids" in mistake("evaluate", str(run_folder), "--set", "data.num_items=30")
    assert "must be one of train, validation, test" in mistake("evaluate", str(run_folder), "--split", "tset")
