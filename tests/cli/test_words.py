"""What people read: one clock, labels, plurals, numbers, and what they named as they named it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from partwise.cli import main, progress, show, show_sweep
from partwise.runs import train as runs
from partwise.runs.sanity import LEFT_OUT, tell_left_out
from partwise.types import counted


@pytest.fixture
def late(monkeypatch):
    """A clock on which loading the task takes 1,000 seconds."""
    offset, now, resolve = [0], time.perf_counter, runs.resolve

    def slow(*arguments):
        offset[0] += 1000
        return resolve(*arguments)

    monkeypatch.setattr(time, "perf_counter", lambda: now() + offset[0])
    monkeypatch.setattr(runs, "resolve", slow)


def test_seconds_in_all_are_those_of_the_progress_and_include_loading(late, small, capsys, tmp_path):
    assert main(["train", *small, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    total = json.loads((tmp_path / "run" / "summary.json").read_text())["seconds_total"]
    shown = float(re.search(r"([\d.]+) s in all, from the start of the command", told.out).group(1))
    running = int(re.search(r"\((\d+) s\)", told.err).group(1))
    assert 1000 <= running <= round(total)
    assert shown == pytest.approx(total, abs=0.06)


def test_a_command_counts_from_the_start_of_its_process():
    code = (
        "import time; began = time.perf_counter(); time.sleep(0.3)\n"
        "from partwise.cli.progress import process_start\n"
        "print(process_start() <= began + 0.02)"  # the system's clock ticks in hundredths
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert progress.process_start() <= time.perf_counter()


def test_losses_and_metrics_say_whose_they_are(small, capsys, tmp_path):
    assert main(["train", *small, "--out", str(tmp_path / "run")]) == 0
    line = capsys.readouterr().err
    assert re.search(r"round 4 of 4, training loss \d+\.\d{4}, validation rmse \d+\.\d{4} \(", line)


def test_a_model_without_metrics_is_judged_by_its_loss():
    only = {"loss": 0.5, "clients": 7, "over_clients": {"loss": {}}}
    assert progress._metric(only) == "validation loss 0.5000"
    assert progress._metric({"kappa": 2.0}) == "kappa 2.0000"
    assert progress._metric({"auc": None, "over_clients": {"auc": {}}}) == "validation auc undefined"


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 clients"), (1, "1 client"), (2, "2 clients"), (1234, "1,234 clients")]
)
def test_one_is_not_several(number, words):
    assert counted(number, "client") == words


def test_one_update_is_not_several():
    assert tell_left_out(dict.fromkeys(LEFT_OUT, 1)) == (
        "1 update that was not finite, 1 client without query examples that count, "
        "1 client with fewer than cohort.min_examples examples, 1 client that never reported"
    )


def test_one_round_one_row_and_one_example(small, capsys, tmp_path):
    run, table, local = tmp_path / "run", tmp_path / "mine.csv", tmp_path / "local.safetensors"
    assert main(["train", *small[:-1], "1", "--out", str(run)]) == 0
    assert "fed_recon on planted: 1 round\n" in "\n".join(
        map(str.rstrip, capsys.readouterr().out.splitlines())
    )
    table.write_text("item,rating\n1,3\n777777,4\n")
    assert main(["personalize", str(run), "--client", str(table), "--out", str(local)]) == 0
    told = capsys.readouterr()
    assert "Rebuilt user from 1 example; kept in" in told.out
    assert told.err.count("with a value of 'item' that the model does not know is left out") == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (-0.49611642956733704, "-0.4961"),
        ([-0.49611642956733704], "-0.4961"),
        ([[2.0]], "2.0000"),
        (3, "3"),
        ([0.25, 1], "0.2500 1"),
        ([0.5] * 62, "0.5000 0.5000 0.5000 0.5000 0.5000 0.5000 ... (62 numbers)"),
        ([[0.5] * 7] * 3, "3 x 7 numbers (--json has them)"),
    ],
)
def test_outputs_are_shown_as_people_read_them(output, words):
    assert show.output_words(output) == words


def test_json_keeps_all_digits(run_folder, output, capsys, tmp_path):
    table, local = tmp_path / "mine.csv", str(tmp_path / "local.safetensors")
    table.write_text("item,rating\n1,3\n2,4\n")
    assert main(["personalize", str(run_folder), "--client", str(table), "--out", local]) == 0
    asked = ["predict", str(run_folder), "--client", str(table), "--local", local]
    capsys.readouterr()
    exact = output(*asked)["predictions"][0]["output"]
    assert main(asked) == 0
    assert f" {exact:.4f} " in capsys.readouterr().out
    assert exact != round(exact, 4)


def test_what_users_name_is_shown_as_it_is(small, capsys, mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = os.path.join(
        "runs", "[x] :smile: [bold]with a name that is longer than any line of eighty characters[/]"
    )
    monkeypatch.setattr(show, "out", Console(width=80, **show.AS_IT_IS))
    assert main(["train", *small, "--out", run]) == 0
    assert f"Recorded in {run} (" in capsys.readouterr().out
    assert main(["evaluate", run]) == 0
    assert f"{run}: test clients\n" in capsys.readouterr().out
    assert "'runs/[y]' holds no run" in mistake("evaluate", "runs/[y]")
    row = {"row": 1, "item": "[red]", "output": 1.0}
    show.predictions([row], ["item"])
    assert "│ [red] │" in capsys.readouterr().out


COMMANDS = [
    ["tasks"],
    ["algorithms"],
    ["bench"],
    ["settings", "planted"],
    ["describe", "planted"],
    ["serving", "planted"],
    ["heat", "planted"],
    ["privacy", "planted"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_tables_fit_80_characters_and_nothing_in_them_is_cut(command, small, capsys, monkeypatch):
    monkeypatch.setattr(show, "out", Console(width=80, **show.AS_IT_IS))
    changes = [] if command[0] in ("tasks", "algorithms", "bench", "settings") else small[:8]
    if command[0] == "privacy":
        pytest.importorskip("numba", reason="the extra `privacy` is not installed")
        monkeypatch.setattr("partwise.reports.privacy_noise.TARGETS", (8.0,))
    more = ["--set", "cohort.size=5"] if command[0] in ("serving", "privacy") else []
    more += ["--set", "rounds=2"] if command[0] == "privacy" else []
    assert main([*command, *changes, *more]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    lines = [line for line in text.splitlines() if line.startswith(("│", "┏", "└", " "))]
    assert lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "metrics", [["rmse", "accuracy", "loss"], ["ndcg@10", "hit@10", "hit@5", "mrr", "loss"]]
)
def test_a_comparison_cuts_no_figure_in_80_characters(metrics, monkeypatch, capsys):
    monkeypatch.setattr(show_sweep, "out", Console(width=80, **show.AS_IT_IS))
    costs = {"rounds": 3000, "seconds": 1234.5, "bytes_down_per_client": 1e6, "bytes_up_per_client": 1e6}
    row = {"name": "run", "test": {name: {"mean": 0.1234, "spread": 0.0567} for name in metrics}, **costs}
    rows = [row | {"seeds": [0, 1], "unfinished": {}}] * 2
    show_sweep.comparison({"rows": rows, "settings": {}, "differences": [], "notes": []}, None)
    text = capsys.readouterr().out
    assert "…" not in text
    assert text.count("0.1234") == text.count("±0.0567") == 2 * len(metrics)
    assert text.count("kB") == 2  # the column, once, and what it is
