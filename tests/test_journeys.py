"""The journeys of docs/concepts.md name the files that are entered, in their order, so that the page cannot rot."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import partwise
from partwise import Personal, train
from partwise.algorithms.registry import prepare
from partwise.runs.backends import make_simulation
from partwise.runs.resolve import resolve

ROOT = Path(partwise.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text()
EVERYWHERE = {"types.py", "tree.py", "randomness.py", "metrics.py", "__init__.py", "plugins.py"}
ELSEWHERE = {"simulation/clock.py"}  # it listens to all that JAX compiles, whoever asked for it
SMALL = {
    "data.num_clients": 40,
    "data.num_items": 30,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 4,
    "rounds": 2,
    "simulation.lanes": 2,
}


def entered(journey: Callable[[], object]) -> list[str]:
    """The library's files in which a function is called, in order of the first time."""
    files: dict[str, None] = {}

    def look(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.setdefault(path.relative_to(ROOT).as_posix())

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        journey()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [file for file in files if file not in EVERYWHERE | ELSEWHERE]


def told(title: str) -> list[str]:
    """The files that a section of the page names, in its order."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"`([\w/]+\.py)`", section)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train("planted", out=tmp_path_factory.mktemp("journey") / "run", changes=SMALL)


def test_a_round():
    task, config = resolve("planted", None, SMALL)
    simulation = make_simulation(prepare(task, config), config)
    assert entered(lambda: list(simulation.run(1))) == told("A round")


def test_a_client_on_its_own(run):
    mine = run.task.test.take([0]).select(("item", "rating"))
    folder = run.recorded.folder.path

    def journey():
        me = Personal.open(folder)
        return me.predict(me.personalize(mine), mine)

    assert entered(journey) == told("A client on its own")


def test_what_a_phone_imports():
    """No simulation, no pictures, no tables, no framework; and no setting of JAX is changed."""
    code = """
import sys, jax
before = dict(jax.config.values)
import partwise.device
from partwise import Personal
heavy = ("matplotlib", "rich", "flax", "keras", "torch", "partwise.simulation", "partwise.papers")
heavy += ("cryptography", "numba", "dp_accounting", "sqlalchemy", "starlette")
heavy += ("partwise.privacy.retrieval", "partwise.deployment", "partwise.runs.train", "partwise.runs.cause")
assert Personal and not [name for name in sys.modules if name.startswith(heavy)]
assert dict(jax.config.values) == before
assert not jax._src.xla_bridge.backends_are_initialized()
print(len([name for name in sys.modules if name.startswith("partwise")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 135
