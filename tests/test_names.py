"""What `import partwise as pw` gives: names that can be listed, imported and type-checked."""

from __future__ import annotations

import ast
import importlib.resources
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import partwise

FRAMEWORKS = {"keras", "nnx", "torch"}


def test_names_are_listed():
    assert {"train", "Model", "Personal", "keras", "__version__"} <= set(dir(partwise))
    assert not {"Any", "importlib", "annotations"} & set(dir(partwise))
    assert all(hasattr(partwise, name) for name in set(partwise.__all__) - FRAMEWORKS)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        partwise.trian  # noqa: B018


def test_the_lists_of_names_agree():
    """Those that Python finds, those that a star imports, and those that a type checker sees."""
    source = ast.parse(Path(partwise.__file__).read_text())
    imported = {
        name.asname
        for block in source.body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }
    assert imported == set(partwise.__all__) == set(partwise._HOME_OF)


def test_types_are_shipped():
    assert (importlib.resources.files("partwise") / "py.typed").is_file()


USER = """
import partwise as pw

run: pw.Run = pw.train("planted", rounds=3)
model: pw.Model = pw.keras(lambda: None, lambda outputs, batch: outputs)
pw.nnx, pw.torch, pw.Task, pw.UserError
wrong: pw.Model = 3
pw.trian
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_a_type_checker_sees_them_in_a_project_of_a_user(tmp_path):
    (tmp_path / "mine.py").write_text(USER)
    source = str(Path(partwise.__file__).parents[1])
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [source]}))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [
        (each["range"]["start"]["line"], each["rule"]) for each in found if "Unused" not in each["rule"]
    ]
    assert errors == [(6, "reportAssignmentType"), (7, "reportAttributeAccessIssue")]


def test_no_two_files_and_no_two_classes_have_the_same_name():
    """A newcomer who looks for one finds it at the first try."""
    files = [p for p in Path(partwise.__file__).parent.rglob("*.py") if p.name != "__init__.py"]
    classes = [
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for names in ([path.name for path in files], classes):
        assert sorted(names) == sorted(set(names))
