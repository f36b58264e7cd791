"""Every name of the library that a page mentions is there: `algorithms.fed_avg.fed_avg`, `client/fit.py`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import partwise
from partwise.config.settings import shared_keys
from partwise.types import UserError

ROOT = Path(__file__).parents[1]
PACKAGE = Path(partwise.__file__).parent
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__init__"}
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SETTINGS = ("data.", "select.", "server.settings")
FILES = re.compile(r".*\.(py|toml|json|jsonl|npz|onnx|safetensors|stablehlo)")
OBJECTS = {
    "client.kept",
    "client.rng",
    "config.own",
    "simulation.run",
}  # of a variable that a page has introduced


def is_there(dotted: str) -> bool:
    """Whether it is a module of the library, or a name in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["partwise", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        except UserError:  # an adapter of a framework that is not installed
            return True
        try:
            for name in parts[cut:]:
                fields = getattr(found, "__annotations__", {})
                found = fields[name] if name in fields else getattr(found, name)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_names_of_the_library_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    rooms = "|".join(sorted(ROOMS))
    dotted = set(re.findall(rf"`(?:partwise\.)?((?:{rooms})(?:\.\w+)+)", text))
    dotted -= {name for name in dotted if name.startswith(SETTINGS) or FILES.fullmatch(name)}
    dotted -= OBJECTS | set(shared_keys())
    files = set(re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text))
    missing = [name for name in sorted(dotted) if not is_there(name)]
    missing += [file for file in sorted(files) if not (PACKAGE / file).exists()]
    assert not missing
