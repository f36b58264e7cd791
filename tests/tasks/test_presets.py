"""A preset takes the place of a task's settings, and is recorded as what it says."""

from __future__ import annotations

import json

import pytest

from partwise.cli import main
from partwise.config.settings import read_toml
from partwise.tasks import PAPER, find_task, load_task

SHORT = ["--rounds", "2", "--cohort", "4", "--set", "simulation.lanes=1", "--json"]


@pytest.fixture(scope="module")
def paper_run(tmp_path_factory, liked_folder):
    folder = tmp_path_factory.mktemp("runs") / "paper"
    command = ["train", "movielens", "--preset", "paper", "--data", str(liked_folder), *SHORT]
    assert main([*command, "--out", str(folder)]) == 0
    return folder, command


def test_it_is_recorded_as_what_it_says(paper_run):
    written = read_toml(paper_run[0] / "config.toml")
    preset = find_task("movielens").presets[PAPER]
    changed = {"rounds", "cohort.size"}
    own = {**preset, **preset["fed_recon"]}
    plain = {key: v for key, v in own.items() if not isinstance(v, dict) and key not in changed}
    assert {key: written[key] for key in plain} == plain
    assert "preset" not in written


def test_a_run_with_a_preset_is_used_as_any_other(paper_run, tmp_path, capsys):
    folder, command = paper_run
    assert main(["evaluate", str(folder), "--json"]) == 0
    assert main([*command, "--out", str(folder), "--resume"]) == 0  # the same command once more
    assert main(["train", "--resume", "--out", str(folder), "--json"]) == 0
    record = ["train", "--config", str(folder / "config.toml"), "--out", str(tmp_path / "again"), "--json"]
    capsys.readouterr()
    assert main(record) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["test"] == json.loads((folder / "summary.json").read_text())["test"]
    assert main([*record[:-3], "--out", str(tmp_path / "other"), "--preset", "paper"]) == 2
    assert "says all settings already" in capsys.readouterr().err


def test_another_preset_is_not_resumed(tmp_path, liked_folder, capsys):
    train = ["train", "movielens", "--data", str(liked_folder), *SHORT, "--out", str(tmp_path / "run")]
    assert main(train) == 0
    assert main([*train, "--resume", "--preset", "paper"]) == 2
    assert "a resumed run keeps its configuration" in capsys.readouterr().err


def test_sentiment_has_a_validation_part_of_its_own(tmp_path):
    rows = [
        {
            "reviewerID": f"A{k % 8}",
            "overall": 1 + k % 5,
            "unixReviewTime": k,
            "reviewText": f"w{k % 9} w{k % 7}",
        }
        for k in range(160)
    ]
    file = tmp_path / "reviews_Some_5.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("sentiment", str(file))
    assert [part.num_examples for part in (task.train, task.validation, task.test)] == [112, 16, 32]
    assert not task.notes
    paper = load_task("sentiment", str(file), preset=PAPER)
    assert paper.validation is paper.test
    assert "There is no validation part" in paper.notes[0]
