"""`compare` and `report` have the same idea of which runs are one training with several seeds."""

from __future__ import annotations

from pathlib import Path

from partwise.checkpoint import load_json, load_text, save_json, save_text
from partwise.pages.details import read_detailed
from partwise.pages.run_groups import group_runs
from partwise.runs.compare import compare


def compared(folders) -> list[list[str]]:
    """The names of the runs of every row of a comparison."""
    return [[Path(run).name for run in row["runs"]] for row in compare(folders).rows]


def reported(folders) -> list[list[str]]:
    """The names of the runs of every line of a report."""
    return [[run.name for run in group.runs] for group in group_runs(read_detailed(folders))]


def reset(folder: Path, before: str, now: str) -> Path:
    """Change a line of the settings."""
    text = load_text(folder / "config.toml")
    assert f"\n{before}\n" in text
    save_text(folder / "config.toml", text.replace(f"\n{before}\n", f"\n{now}\n"))
    return folder


def test_seeds_paths_and_how_rounds_are_run_make_no_group_of_their_own(copy, runs):
    folders = [runs["plain-2"], reset(copy("plain-1"), "lanes = 2", "lanes = 4"), runs["plain-0"]]
    assert compared(folders) == reported(folders) == [["plain-0", "plain-1", "plain-2"]]


def test_other_settings_and_other_data_do(copy, runs):
    moved = copy("plain-1")
    begun = load_json(moved / "start.json")
    begun["data"]["train"]["ids"] = "another"
    save_json(moved / "start.json", begun)
    slower = reset(copy("plain-2", "slower"), "size = 8", "size = 9")
    folders = [runs["plain-0"], moved, slower, runs["plain-2"], runs["private"]]
    expected = [["plain-0", "plain-2"], ["plain-1"], ["slower"], ["private"]]
    assert compared(folders) == reported(folders) == expected


def test_a_seed_that_was_run_twice_is_no_second_seed(copy, runs):
    folders = [runs["plain-0"], copy("plain-0", "again"), runs["plain-1"]]
    assert compared(folders) == reported(folders) == [["plain-0", "plain-1"], ["again"]]


def test_a_run_that_was_given_up_and_begun_anew_takes_no_place(copy, runs):
    """A row names it, and has the seeds that finished; a page draws it beside them."""
    given_up = copy("plain-0", "given up")
    (given_up / "summary.json").unlink()
    folders = [given_up, runs["plain-0"], runs["plain-1"]]
    (row,) = compare(folders).rows
    assert row["seeds"] == [0, 1]
    assert row["unfinished"] == {str(given_up): "has not ended (round 24 of 24)"}
    assert reported(folders) == [["plain-0", "plain-1"], ["given up"]]


def test_the_folder_of_a_sweep_is_all_its_runs(copy, tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for name in ("plain-0", "plain-1"):
        copy(name).rename(sweep / name)
    (sweep / "sweep.json").write_text("{}")
    folders = [sweep, sweep / "plain-0"]
    assert compared(folders) == reported(folders) == [["plain-0", "plain-1"]]
