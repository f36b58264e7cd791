"""A hook of mkdocs: pages of the site that are files outside docs/, with their links turned to the site's own."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {  # file -> page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "examples/browser/README.md": "browser.md",
}
OTHERS = ("CITATION.cff", "examples/tour.ipynb")  # files that are linked to and are shown as they are


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=moved(name, (ROOT / name).read_text())))
    for name in OTHERS:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"{path.stem}.txt", content=path.read_text()))
    return files


def on_page_markdown(markdown: str, *, page, config: MkDocsConfig, files: Files) -> str:
    """Pages of docs/ that link to files outside."""
    return re.sub(r"\]\(\.\./([^)#]+)", lambda found: f"]({PAGES.get(found[1], found[1])}", markdown)


def moved(name: str, text: str) -> str:
    """The links of a file that becomes a page beside those of docs/."""
    folder = Path(name).parent

    def target(found: re.Match[str]) -> str:
        path = found[1]
        if re.match(r"[a-z]+:|#", path):
            return found[0]
        inside = (folder / path).as_posix()
        inside = PAGES.get(inside, inside.removeprefix("docs/"))
        return "](" + re.sub(r"^examples/(.*)[.]py$", r"\1.txt", inside)

    return re.sub(r"\]\(([^)#\s]+)", target, text)
