"""A quick check of a reproduction says that it is one, and never takes the place of a full result."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from partwise.papers import reproduce as papers
from partwise.papers import study
from partwise.papers.fedrecon import MovieLensRuns
from partwise.runs.picture import QUICK
from partwise.runs.train import Status
from partwise.types import DivergedError, UserError

ROW = {"row": "a", "metric": "rmse", "paper": 1.0, "ours": 1.1, "spread": 0.0, "seeds": 1}


@pytest.fixture(autouse=True)
def table(monkeypatch, tmp_path):
    made = papers.Reproduction("a table", lambda *_: {"rows": [ROW]})
    monkeypatch.setitem(papers.REPRODUCTIONS, "table", made)
    monkeypatch.chdir(tmp_path)


def shown(result) -> str:
    screen = io.StringIO()
    papers.show_table(Console(file=screen, width=100), result)
    return screen.getvalue()


def test_a_quick_check_has_a_folder_of_its_own_and_says_what_it_is(tmp_path):
    quick, full = papers.reproduce("table", quick=True), papers.reproduce("table")
    assert (quick["folder"], full["folder"]) == ("runs/table-quick", "runs/table")
    assert QUICK in shown(quick)
    assert QUICK not in shown(full)


def test_a_full_result_is_not_overwritten_silently(tmp_path):
    papers.reproduce("table", out="here", quick=True)
    assert not papers.reproduce("table", out="here")["replaced"]
    with pytest.raises(UserError, match="'here' holds a full reproduction"):
        papers.reproduce("table", out="here", quick=True)
    assert json.loads((tmp_path / "here" / "table.json").read_text())["quick"] is False
    assert "was replaced" in shown(papers.reproduce("table", out="here"))


@pytest.mark.parametrize(
    ("message", "other"),
    [
        ("use a smaller --cohort, or let clients wait", True),
        ("no writer has 50 images; lower min_images", True),
        ("set data.min_texts to at most 3.", True),
        ("r.csv, line 3: 'x'; expected a number", False),
        ("/my/data.csv, line 3: 'x'; expected a number", False),
        ("data.csv has no such column; set data.file to another", True),
        ("choose another folder with --out, or --data", False),
    ],
)
def test_an_error_that_advises_settings_says_what_reproduce_takes(monkeypatch, message, other):
    def fails(*given):
        raise DivergedError(message)

    monkeypatch.setitem(papers.REPRODUCTIONS, "fails", papers.Reproduction("fails", fails))
    with pytest.raises(DivergedError) as caught:
        papers.reproduce("fails")
    assert str(caught.value) == (f"{message.removesuffix('.')}. {papers.OWN}" if other else message)


def test_parts_of_others_stay(tmp_path, monkeypatch):
    """A reproduction has its own parts, which go when it is done. Those that several share stay, and so do those of
    one that was killed."""

    def made(data, folder, seeds, quick, progress, fails=False):
        found = study.once(folder, ("a",), lambda: 1)
        if fails:
            raise KeyboardInterrupt
        return {"rows": [ROW], "found": found}

    killed = lambda *given: made(*given, fails=True)
    for name, function, shares in (("shared", made, True), ("killed", killed, False), ("other", made, False)):
        entry = papers.Reproduction(name, function, shares=shares)
        monkeypatch.setitem(papers.REPRODUCTIONS, name, entry)
    papers.reproduce("shared", out="here")
    with pytest.raises(KeyboardInterrupt):
        papers.reproduce("killed", out="here")
    papers.reproduce("other", out="here")
    files = [
        path.relative_to(tmp_path / "here" / "parts") for path in (tmp_path / "here").rglob("parts/**/*.json")
    ]
    assert sorted(len(file.parts) for file in files) == [1, 2]
    assert {file.parts[0] for file in files if len(file.parts) == 2} == {"killed"}
    papers.reproduce("other", out="alone")
    assert not (tmp_path / "alone" / "parts").exists()


def test_progress_says_which_row_of_how_many():
    told = []
    runs = MovieLensRuns(None, [0], True, told.append)
    runs.of = 2
    for name in ("first", "second"):
        runs.show(name)(Status(1, 2, 0.5, None))
    assert [status.part for status in told] == ["row 1 of 2: first", "row 2 of 2: second"]


@pytest.mark.parametrize("name", ["fedrecon-table1", "paper-settings"])
def test_a_quick_check_says_which_movielens_it_reads(name, tmp_path):
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ratings.dat").write_text("1::1193::5::978300760\n")
    with pytest.raises(
        UserError, match=r"holds no ml-100k.*With --quick \(quick=True\) MovieLens-100k is read"
    ):
        papers.reproduce(name, str(tmp_path), quick=True)


def test_reproductions_are_there_without_the_packages_of_some():
    """Flax is an extra: only what trains a model of it needs it."""
    program = (
        "import sys; sys.modules['flax'] = None; from partwise.papers.reproduce import REPRODUCTIONS as all"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print(len(all))"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(len(papers.REPRODUCTIONS) - 1), done.stderr  # one is this file's
