"""Two processes with a device each give what one process with two devices gives, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partwise.checkpoint import digest_of, load_arrays
from partwise.runs.folder import Folder
from partwise.runs.train import train

TRAIN = """
import json, sys
import partwise as pw
from partwise.simulation import loop

task, changes, out, staged, several = json.loads(sys.argv[1])
if several:
    pw.join_processes()
if staged:
    loop.RESIDENT_BYTES = 0
run = pw.train(task, out=out, changes=changes, resume=task is None)
print(len(run.records), run.summary["device"])
"""
READ = """
import collections, json, sys
import partwise as pw
from partwise.data.store import ClientStore
from partwise.simulation import loop

changes, several = json.loads(sys.argv[1])
if several:
    pw.join_processes()
loop.RESIDENT_BYTES = 0
gather, rows = ClientStore.gather, collections.Counter()

def counted(store, positions=None):
    found = gather(store, positions)
    rows[sys._getframe(1).f_globals["__name__"]] += found.num_examples
    return found

ClientStore.gather = counted
pw.train("planted", changes=changes)
print(json.dumps([rows["partwise.simulation.staging"], rows["partwise.simulation.evaluator"]]))
"""
SMALL = {"data.num_clients": 40, "data.num_items": 30, "data.mean_examples": 12, "data.dim": 2}
SMALL |= {"cohort.size": 7, "rounds": 6, "simulation.rounds_per_call": 2, "simulation.evaluate_every": 3}
POSTS = {"data.num_clients": 60, "data.num_words": 120, "data.num_tags": 6, "data.mean_examples": 8}
POSTS |= {"data.words_per_example": 5, "cohort.size": 9, "rounds": 10, "simulation.rounds_per_call": 4}
PRIVATE = {"privacy.clip": 1.0, "privacy.noise": 0.5, "privacy.delta": 1e-5, "server.weighting": "uniform"}
SKELLAM = {"privacy.mechanism": "skellam", "privacy.sums": "masked"}


def words(
    task: str | None, changes: dict, out: Path, staged: bool = False, several: bool = True
) -> list[str]:
    """The words of Python for a training."""
    return ["-c", TRAIN, json.dumps([task, changes, str(out), staged, several])]


def together(start, task: str | None, changes: dict, out: Path, staged: bool = False, **environment: str):
    """Train in two processes of one device each."""
    running = start(*2 * [words(task, changes, out, staged)], **environment)
    told = [each.communicate(timeout=1500) for each in running]
    for process, (said, err) in zip(running, told, strict=True):
        assert process.returncode == 0, err
        assert said.endswith(" 2 x cpu in 2 processes\n")
    return out


def alone(task: str | None, changes: dict, out: Path, staged: bool = False) -> Path:
    """Train in one process of two devices."""
    said_alone(words(task, changes, out, staged, several=False))
    return out


def said_alone(given: list[str]) -> str:
    """What one process of two devices prints."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same(one: Path, other: Path) -> None:
    """The same models and states, with what clients keep, bit for bit, and the same records except for seconds."""
    assert digests(one) == digests(other)
    assert len(digests(one)) > 1  # a model and a checkpoint
    assert [told(record) for record in Folder(one).records()] == [
        told(record) for record in Folder(other).records()
    ]
    first, second = Folder(one).summary(), Folder(other).summary()
    for name in ("test", "rounds", "stopped", "best_model", "lanes", "bytes_down_per_client", "privacy"):
        assert first[name] == second[name], name


def digests(run: Path) -> dict[str, str]:
    """Of every file with arrays: models and checkpoints. How long the arrays of a checkpoint's last call were
    is left out, because a process that reads its own clients alone has shorter ones."""
    found = {}
    for file in run.rglob("*.safetensors"):
        arrays, header = load_arrays(file)
        said = {name: value for name, value in header.items() if name != "capacity"}
        found[str(file.relative_to(run))] = digest_of(arrays, said)
    return found


def told(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def test_a_script_that_is_started_twice(start_together, tmp_path):
    """Process 0 alone writes; the other has the same records, read from the folder."""
    changes = SMALL | {"simulation.lanes": 2, "keep.best": "rmse", "server.optimizer": "adam"}
    train("planted", out=tmp_path / "one", changes=changes)
    together(start_together, "planted", changes, tmp_path / "two")
    assert_same(tmp_path / "one", tmp_path / "two")
    assert not list(tmp_path.rglob("*.tmp"))


KEPT = {"algorithm": "scaffold", "scaffold.control": "clients"}
CASES = {
    "tags": ("tags-planted", POSTS | {"algorithm": "fed_select"}),
    "choices": (
        "tags-planted",
        POSTS | {"algorithm": "fed_select", "select.word": "with_random:10", "server.optimizer": "lazy_adam"},
    ),
    "scaffold": ("tags-planted", POSTS | KEPT | {"rounds": 6}),
    "next word": ("next-word-planted", {"data.num_clients": 30, "cohort.size": 5, "rounds": 4}),
    "noise": ("planted", SMALL | PRIVATE | {"data.num_items": 3000}),
    "whole numbers": ("planted", SMALL | PRIVATE | {"privacy.noise": 0.0, "privacy.sums": "masked"}),
    "noise in whole numbers": ("planted", SMALL | PRIVATE | SKELLAM),
    "heat": ("tags-planted", POSTS | {"algorithm": "fed_sub_avg"}),
    "shards": (
        "planted",
        SMALL | {"data.num_items": 2001, "server.optimizer": "adagrad", "simulation.tables": "shards"},
    ),
    "one client": ("planted", SMALL | {"cohort.size": 1}),
    "stops": (
        "planted",
        SMALL
        | {"rounds": 60, "server.rate": 3.0, "stop.metric": "rmse", "stop.patience": 2, "keep.best": "rmse"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "staged"),
    [
        *((case, False) for case in CASES),
        *((case, True) for case in CASES if case != "next word"),
    ],
)
def test_two_processes_equal_two_devices(start_together, tmp_path, case, staged):
    """Also if each process reads the clients of its own devices only."""
    task, changes = CASES[case]
    changes = changes | {"simulation.lanes": 2}
    alone(task, changes, tmp_path / "one", staged)
    together(start_together, task, changes, tmp_path / "two", staged)
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
def test_clicks_with_heat(start_together, tmp_path, staged):
    """Two spaces of keys, histories, and metrics of all examples together."""
    rows = [
        f"u{u},i{(7 * u + t * t) % 40},{1 + 4 * ((u + t) % 2)},{t}\n" for u in range(30) for t in range(12)
    ]
    (tmp_path / "ratings.csv").write_text("".join(rows))
    data = {"path": str(tmp_path / "ratings.csv"), "min_ratings": 5, "split_time": 7, "length": 3, "dim": 4}
    changes = {f"data.{name}": value for name, value in data.items()} | {"algorithm": "fed_sub_avg"}
    changes |= {"rounds": 10, "cohort.size": 9, "simulation.rounds_per_call": 4, "simulation.lanes": 2}
    alone("clicks", changes, tmp_path / "one", staged)
    together(start_together, "clicks", changes, tmp_path / "two", staged)
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
@pytest.mark.parametrize(("task", "rounds"), [("movielens", 300), ("clicks", 20)])
def test_real_data(start_together, tmp_path, task, rounds):
    changes = {"rounds": rounds, "simulation.lanes": 8}
    changes |= {"algorithm": "fed_sub_avg"} if task == "clicks" else {}
    alone(task, changes, tmp_path / "one")
    together(start_together, task, changes, tmp_path / "two")
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_process_reads_half_of_the_rows(start_together):
    """Those of its own devices' clients, in rounds and in evaluations: together what one process reads."""
    changes = {"data.num_clients": 2000, "data.num_items": 300, "data.mean_examples": 30, "data.dim": 2}
    changes |= {"cohort.size": 100, "rounds": 40, "simulation.rounds_per_call": 10, "simulation.lanes": 4}
    given = lambda several: ["-c", READ, json.dumps([changes | {"simulation.evaluate_every": 20}, several])]
    all_rows = np.array(json.loads(said_alone(given(False))))
    running = start_together(given(True), given(True))
    rows = np.array([json.loads(each.communicate(timeout=600)[0]) for each in running])
    assert rows.sum(0).tolist() == all_rows.tolist()
    assert min(all_rows) > 0
    assert max(rows.sum(1)) <= 0.55 * all_rows.sum()
