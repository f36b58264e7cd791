"""The documentation site: every page is reached, every public name is on the API page, nothing is fetched."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import partwise

ROOT = Path(__file__).parent.parent


def test_the_api_page_has_every_public_name():
    shown = re.findall(r"heading: partwise\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(shown) == sorted(partwise.__all__)


def test_what_the_api_page_shows_is_where_it_says():
    for name in re.findall(r"^::: partwise\.(\S+)$", (ROOT / "docs/api.md").read_text(), re.M):
        module, _, last = name.rpartition(".")
        file = ROOT / "src/partwise" / f"{module.replace('.', '/')}.py"
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        assert re.search(rf"^(?:def|class) {last}\(?", file.read_text(), re.M), name


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    made = set(re.findall(r'": "(\w+\.md)"', (ROOT / "docs/hooks.py").read_text()))
    assert set(re.findall(r": (\w+\.md)$", navigation, re.M)) == pages | made


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="mkdocs not installed")
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        fetched = re.findall(
            r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert not fetched, page
    assert "Federated" in (tmp_path / "site/search/search_index.js").read_text()
