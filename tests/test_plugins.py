"""A task and an algorithm of an installed package, used by name: entry points, as docs/adding.md says."""

import json
import os
import subprocess
import sys

import pytest

from partwise.plugins import find, names
from partwise.types import UserError

MODULE = """
from partwise.algorithms.entry import AlgorithmEntry
from partwise.algorithms.registry import find_algorithm
from partwise.data import planted_ratings
from partwise.tasks import Entry
from partwise.tasks.ratings import ratings_task
from partwise.tasks.ratings import settings


def load(data=None, *, num_clients: int = 40, dim: int = 2):
    store = planted_ratings(num_clients, 20, mean_examples=12).store
    return ratings_task(store, "mine", dim=dim, defaults={"rounds": 2, "cohort.size": 4, "simulation.lanes": 2})


TASK = Entry("a task of mine", load, settings)
ALGORITHM = AlgorithmEntry("an algorithm of mine", find_algorithm("fed_recon").prepare)
"""
POINTS = """
[partwise.tasks]
mine = my_package:TASK
broken = my_package:MISSING

[partwise.algorithms]
my_algorithm = my_package:ALGORITHM
"""
COMMANDS = """
import sys
from partwise.cli import main

run = ["--out", "run", "--algorithm", "my_algorithm", "--set", "data.dim=3"]
assert main(["train", "mine", *run, "--json"]) == 0
assert main(["evaluate", "run", "--json"]) == 0
assert main(["personalize", "run", "--client", "mine.csv", "--out", "local.safetensors", "--json"]) == 0
assert main(["predict", "run", "--client", "mine.csv", "--local", "local.safetensors", "--json"]) == 0
assert main(["settings", "mine", "--json"]) == 0
assert main(["train", "broken"]) == 2
assert main(["train", "miner"]) == 2
"""


@pytest.fixture
def package(tmp_path):
    """A distribution on a path, as pip would install it."""
    about = tmp_path / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (tmp_path / "my_package.py").write_text(MODULE)
    (tmp_path / "mine.csv").write_text("item,rating\n1,4.5\n2,3.0\n7,2.0\n")
    return tmp_path


def test_tasks_and_algorithms_of_an_installed_package_work_by_name(package):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    decoder, told, text = json.JSONDecoder(), [], done.stdout
    while text.strip():
        value, end = decoder.raw_decode(text.lstrip())
        told, text = [*told, value], text.lstrip()[end:]
    trained, evaluated, personalized, predicted, settings = told
    assert (trained["task"], trained["algorithm"], trained["rounds"]) == ("mine", "my_algorithm", 2)
    assert evaluated["rmse"] == pytest.approx(trained["test"]["rmse"], rel=1e-6)
    assert personalized["leaves"] == {"user": [3], "user_bias": []}
    assert len(predicted["predictions"]) == 3
    assert {line["key"]: line["value"] for line in settings["settings"]}["cohort.size"] == 4
    assert "of the installed package my-package" in " ".join(done.stderr.split())
    assert "nearest: mine" in done.stderr


def test_the_librarys_own_names_come_first():
    registry = {"mine": 1}
    assert names(registry, "partwise.nothing") == ["mine"]
    assert find(registry, "partwise.nothing", "thing", "mine") == 1
    with pytest.raises(UserError, match=r"unknown thing 'mino' \(nearest: mine\)"):
        find(registry, "partwise.nothing", "thing", "mino")
