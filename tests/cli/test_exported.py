"""From a run to a folder that answers without partwise: what run.py prints is what `partwise predict` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

NEEDED = ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy", "safetensors", "flatbuffers")
WITHOUT = (
    "import runpy, sys; sys.modules['partwise'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture
def personal(output, run_folder, tmp_path) -> dict[str, str]:
    """The files of one client: its local part, its model, and what it asks for."""
    mine, wanted = tmp_path / "mine.csv", tmp_path / "wanted.csv"
    mine.write_text("item,rating\n1,4.5\n2,3.0\n7,2.0\n")
    wanted.write_text("item\n3\n999\n4\n21\n3\n")
    local, model = str(tmp_path / "local.safetensors"), str(tmp_path / "model")
    output("personalize", str(run_folder), "--client", str(mine), "--out", local)
    told = output("export", str(run_folder), "--local", local, "--out", model)
    assert told["rows"] == {"model.stablehlo": None}
    return {"local": local, "model": model, "wanted": str(wanted), "run": str(Path(model) / "run.py")}


def answers(done: subprocess.CompletedProcess) -> list[dict]:
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def without(*arguments: str) -> subprocess.CompletedProcess:
    """A Python in which `import partwise` fails."""
    command = [sys.executable, "-I", "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def as_predicted(output, run_folder, personal) -> list[tuple]:
    told = output("predict", str(run_folder), "--local", personal["local"], "--client", personal["wanted"])
    return [(row["row"], str(row["item"]), row["output"]) for row in told["predictions"]]


def test_the_script_prints_the_numbers_of_predict(output, run_folder, personal):
    expected = as_predicted(output, run_folder, personal)
    done = without(personal["run"], personal["wanted"])
    assert [(row["row"], row["item"], row["output"]) for row in answers(done)] == expected
    assert done.stderr.strip() == "row 2 is left out: the model does not know '999'"
    asked = without(personal["run"], "--item", "4", "--item", "21")
    assert [row["output"] for row in answers(asked)] == [expected[1][2], expected[2][2]]
    fixed = str(Path(personal["model"]).with_name("fixed"))
    output("export", str(run_folder), "--local", personal["local"], "--out", fixed, "--rows", "2")
    rows = answers(without(str(Path(fixed) / "run.py"), personal["wanted"]))  # in two parts
    assert [row["row"] for row in rows] == [1, 3, 4, 5]
    assert [row["output"] for row in rows] == pytest.approx([each[2] for each in expected], rel=1e-6)


def test_the_script_says_what_is_missing(personal, tmp_path):
    done = without(personal["run"])
    assert done.returncode == 2
    assert "as many values of each of these columns: item" in done.stderr
    other = tmp_path / "other.csv"
    other.write_text("film\n3\n")
    done = without(personal["run"], str(other))
    assert done.returncode == 2
    assert "has no column 'item'" in done.stderr
    assert answers(without(personal["run"], "--item", "999")) == []


def test_mistakes_on_the_command_line(mistake, run_folder, personal, tmp_path):
    out = str(tmp_path / "new")
    given = ("export", str(run_folder), "--local", personal["local"])
    assert "unknown format 'tflite'" in mistake(*given, "--out", out, "--format", "stablehlo,tflite")
    assert "has other things in it" in mistake(*given, "--out", str(run_folder))
    assert "--rows (rows) is -1" in mistake(*given, "--out", out, "--rows", "-1")
    assert "has a local part (user)" in mistake("export", str(run_folder), "--out", out)
    assert "holds no run" in mistake("export", str(tmp_path), "--out", out)
    assert not Path(out).exists()


@pytest.mark.slow
def test_the_script_runs_in_a_fresh_environment_that_has_no_partwise(output, run_folder, personal, tmp_path):
    """The environment has jax, what jax needs, safetensors and flatbuffers, and nothing else."""
    venv.create(tmp_path / "fresh", with_pip=False)
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    for name in NEEDED:
        found = metadata.distribution(name)
        for top in {
            file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (packages / top).exists():
                os.symlink(Path(str(found.locate_file(top))), packages / top)
    python = str(tmp_path / "fresh" / "bin" / "python")
    missing = subprocess.run([python, "-I", "-c", "import partwise"], capture_output=True, check=False)
    assert b"No module named 'partwise'" in missing.stderr
    command = [python, "-I", personal["run"], personal["wanted"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = as_predicted(output, run_folder, personal)
    assert [(row["row"], row["item"], row["output"]) for row in answers(done)] == expected
