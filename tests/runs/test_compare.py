"""Comparisons of runs, by their files: rows over seeds, settings that differ, and intervals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from partwise.checkpoint import load_json, load_text, save_json, save_text
from partwise.cli import main
from partwise.runs.compare import compare
from partwise.runs.records import to_line
from partwise.runs.significance import difference, holm
from partwise.types import UserError


def made(run, path, rmse, seed=0, task="planted", **settings):
    """A copy of a run with other settings and another result."""
    shutil.copytree(run, path)
    text = load_text(path / "config.toml").replace("seed = 0\n", f"seed = {seed}\n", 1)
    text = text.replace('task = "planted"', f'task = "{task}"')
    for key, (before, now) in settings.items():
        assert f"{key} = {before}\n" in text
        text = text.replace(f"{key} = {before}\n", f"{key} = {now}\n")
    save_text(path / "config.toml", text)
    summary = load_json(path / "summary.json")
    summary["test"]["rmse"] = rmse
    save_json(path / "summary.json", summary | {"seed": seed})
    return path


ONE, TWO = (0.9, 1.0, 1.1), (0.8, 0.85, 1.05)
SIZE = {"size": (4, 5)}  # of the cohort


@pytest.fixture
def runs(tiny_run, tmp_path):
    """Two sets of settings with three seeds each."""
    first = [made(tiny_run, tmp_path / f"a{seed}", rmse, seed) for seed, rmse in enumerate(ONE)]
    return first + [
        made(tiny_run, tmp_path / f"b{seed}", rmse, seed, **SIZE) for seed, rmse in enumerate(TWO)
    ]


def test_runs_that_differ_in_the_seed_are_one_row(runs):
    compared = compare(runs)
    assert [row["seeds"] for row in compared.rows] == [[0, 1, 2], [0, 1, 2]]
    assert compared.settings == {"cohort.size": [4, 5]}
    assert [row["name"] for row in compared.rows] == ["cohort.size=4", "cohort.size=5"]
    told = compared.rows[0]["test"]["rmse"]
    assert told["mean"] == pytest.approx(np.mean(ONE))
    assert told["spread"] == pytest.approx(np.std(ONE, ddof=1))
    assert compared.rows[0]["rounds"] == 6
    assert compared.rows[0]["bytes_down_per_client"] > 0


def test_the_same_seeds_are_paired(runs):
    (told,) = compare(runs).differences
    known = stats.ttest_rel(TWO, ONE)
    low, high = known.confidence_interval(0.95)
    assert told["p"] == pytest.approx(known.pvalue)
    assert (told["low"], told["high"]) == (pytest.approx(low), pytest.approx(high))
    assert told["method"] == "paired by 3 seeds"


def test_other_seeds_are_compared_by_their_means():
    told = difference(dict(enumerate(ONE)), dict(zip((5, 6, 7), TWO, strict=True)))
    known = stats.ttest_ind(TWO, ONE, equal_var=False)
    low, high = known.confidence_interval(0.95)
    assert told.p == pytest.approx(known.pvalue)
    assert (told.low, told.high) == (pytest.approx(low), pytest.approx(high))
    assert told.method == "Welch, 3 and 3 seeds"


def test_one_seed_tells_nothing():
    told = difference({0: 1.0}, {0: 0.5})
    assert told.difference == -0.5
    assert (told.low, told.high, told.p) == (None, None, None)
    assert "one seed" in told.why
    assert difference({0: None}, {0: 1.0}).difference is None
    same = difference({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert (same.low, same.high, same.p) == (0.0, 0.0, None)


def test_several_comparisons_are_corrected():
    assert holm([0.01, None, 0.04, 0.03]) == [
        pytest.approx(0.03),
        None,
        pytest.approx(0.06),
        pytest.approx(0.06),
    ]


def test_unfinished_and_failed_runs_are_labelled(runs, tiny_run, tmp_path, capsys):
    (runs[0] / "summary.json").unlink()
    save_json(runs[3] / "failed.json", {"error": "it diverged"})
    (runs[3] / "summary.json").unlink()
    assert main(["compare", *map(str, runs)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a0 has not ended (round 6 of 6)" in told
    assert "b0 failed (it diverged)" in told
    assert compare(runs).rows[0]["seeds"] == [1, 2]


def test_other_data_and_tasks_are_not_compared(tiny_run, tmp_path):
    one, other = made(tiny_run, tmp_path / "one", 1.0), made(tiny_run, tmp_path / "two", 0.9, task="tags")
    begun = load_json(other / "start.json")
    begun["data"]["test"]["ids"] = "another"
    save_json(other / "start.json", begun)
    compared = compare([one, other])
    (told,) = compared.differences
    assert told["difference"] is None
    assert "test clients are not the same" in told["why"]
    assert any("different tasks" in note for note in compared.result["notes"])


def test_what_is_no_run_or_is_damaged_is_named(tiny_run, copied, tmp_path, flip, capsys):
    assert main(["compare", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"unknown metric 'rsme' \(nearest: rmse\)"):
        compare([tiny_run], metric="rsme")
    for name in ("config.toml", "summary.json", "start.json"):
        whole = (copied / name).read_bytes()
        flip(copied / name, 400)
        with pytest.raises(UserError, match=f"{name}' is damaged"):
            compare([copied])
        (copied / name).write_bytes(whole)
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(lines[0] + to_line({"round": 2}, "other") + lines[2])
    with pytest.raises(UserError, match=r"metrics.jsonl' is damaged: line 2"):
        compare([copied])


def test_the_command_writes_a_picture_and_needs_no_jax(runs, tmp_path):
    code = (
        "import sys; from partwise.cli import main\n"
        f"code = main(['compare', *{[str(run) for run in runs]!r}, '--out', {str(tmp_path / 'out')!r}, '--json'])\n"
        "sys.exit(code or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["metric"] == "rmse"
    assert told == load_json(tmp_path / "out" / "compare.json")
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
