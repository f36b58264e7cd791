"""The programs in examples/, run as they are."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# name -> what it needs, and the bounds of the first number that is printed after these words
EXPECTED = {
    "fedrecon_in_100_lines": ((), "users never seen in training: RMSE", (0.3, 0.45)),
    "own_model_jax": ((), "accuracy on unseen clients:", (0.75, 1.0)),
    "flax_nnx": (("flax",), "accuracy on unseen clients:", (0.6, 1.0)),
    "keras_model": (("keras",), "rmse on unseen clients:", (0.3, 0.6)),
    "optuna_search": (("optuna",), "best validation RMSE:", (0.3, 0.9)),
    "torch_model": (("torch", "torchax"), "accuracy on unseen clients:", (0.6, 1.0)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_and_learns(name, tmp_path):
    packages, words, (least, most) = EXPECTED[name]
    if not all(importlib.util.find_spec(package) for package in packages):
        pytest.skip(f"{' and '.join(packages)} not installed")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(rf"{words} (\d+\.\d+)", done.stdout)
    assert found, done.stdout
    assert least <= float(found[1]) <= most
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_every_example_is_tested_and_has_a_line_in_the_readme():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.M)
    assert names == set(EXPECTED) == set(listed)


def test_fedrecon_has_at_most_100_lines():
    assert len((EXAMPLES / "fedrecon_in_100_lines.py").read_text().splitlines()) <= 100


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    """Its cells, one after the other, in one new process, as a kernel runs them."""
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")  # none of an old version
    done = subprocess.run(
        [sys.executable, "-c", "\n\n".join(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"never seen: 0\.\d+\n(.*\n)+median 0\.\d+, worst tenth \d\.\d+\n", done.stdout), (
        done.stdout
    )
    assert len(re.findall(r"^item \d+: -?\d", done.stdout, re.M)) == 3
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
