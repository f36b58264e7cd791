"""Folders of runs: gone on with, interrupted, taken for something else."""

from __future__ import annotations

from partwise.cli import main


def test_resuming_what_is_not_there_or_is_another_task(mistake, tmp_path, run_folder):
    assert "holds no run to go on with" in mistake("train", "--resume", "--out", str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()
    text = mistake("train", "movielens", "--resume", "--out", str(run_folder))
    assert "is of task 'planted', not 'movielens'" in text
    assert "already has 4 rounds" in mistake("train", "--resume", "--out", str(run_folder), "--rounds", "3")
    assert "neither longer nor shorter" in mistake(
        "train", "--resume", "--out", str(run_folder), "--rounds", "9"
    )


def test_an_interrupted_run_says_how_to_go_on(small, capsys, tmp_path, monkeypatch):
    out = tmp_path / "my run"

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("partwise.runs.folder.Folder.save_checkpoint", interrupt)
        assert main(["train", *small, "--out", str(out)]) == 130
    text = " ".join(capsys.readouterr().err.split())
    assert f"partwise train --resume --out '{out}'" in text
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("partwise.runs.train.prepare", interrupt)
        assert main(["train", *small, "--out", str(tmp_path / "other")]) == 130
    assert "nothing was recorded" in capsys.readouterr().err


def test_folders_that_hold_no_run(mistake, small, tmp_path, run_folder):
    assert "holds no run" in mistake("evaluate", str(tmp_path))
    for place in (run_folder.parent, run_folder.parent / "nosuch"):
        assert f"Give one of the runs that are there: {run_folder}" in mistake("evaluate", str(place))
    assert "already holds a run" in mistake("train", *small, "--out", str(run_folder))
    file = tmp_path / "file"
    file.write_text("")
    assert "could not" in mistake("train", *small, "--out", str(file / "run"))


def test_places_that_cannot_be_folders(mistake, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, says in (
        ("", "name is empty"),
        ("x" * 100_000, "File name too long"),
        ("/dev/null", "is not a folder"),
        ("/proc/partwise", "could not use '/proc/partwise' as a folder"),  # not even root may write there
    ):
        assert says in mistake("train", *small, "--out", place)
        assert says in mistake("reproduce", "fedrecon-table1", "--quick", "--out", place)
    assert "name is empty" in mistake("evaluate", "")
    assert "File name too long" in mistake("evaluate", "x" * 100_000)
    assert not list(tmp_path.iterdir())
