"""The line that follows a run in a notebook."""

import sys
import types

import pytest

from partwise.runs import notebook
from partwise.runs.rounds import Status
from partwise.runs.train import train
from partwise.types import UserError


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, content, raw):
        assert raw
        self.shown.append(content)


def pretended(monkeypatch, shell: str) -> Handle:
    """A module IPython whose shell has this name."""
    handle = Handle()

    def display(content, raw, display_id):
        assert display_id
        handle.update(content, raw)
        return handle

    package, inside = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython = type(shell, (), {}) if shell else lambda: None
    inside.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", inside)
    return handle


def test_a_notebook_shows_one_line_that_changes(monkeypatch, tiny):
    handle = pretended(monkeypatch, "ZMQInteractiveShell")
    run = train("planted", changes=tiny)
    texts = [content["text/plain"] for content in handle.shown]
    assert texts[0].startswith("loading (")
    assert texts[-1].startswith(
        f"round 6 of 6, training loss {run.records[-1]['train']['loss']:.4f}, validation rmse"
    )
    assert '<progress value="6" max="6"></progress>' in handle.shown[-1]["text/html"]


@pytest.mark.parametrize("shell", ["TerminalInteractiveShell", ""])
def test_elsewhere_nothing_is_shown(monkeypatch, shell):
    handle = pretended(monkeypatch, shell)
    notebook.make_progress("auto", 0.0)(Status(1, 2, 0.5, None))
    assert not handle.shown


def test_in_a_notebook_it_can_be_turned_off_or_replaced(monkeypatch):
    handle, seen = pretended(monkeypatch, "ZMQInteractiveShell"), []
    notebook.make_progress("none", 0.0)(Status(1, 2, 0.5, None))
    mine = notebook.make_progress(seen.append, 0.0)
    mine("a sentence")
    mine(Status(1, 2, 0.5, None))
    assert (handle.shown, seen) == ([], [Status(1, 2, 0.5, None)])
    with pytest.raises(UserError, match="unknown value of progress 'bar'"):
        notebook.make_progress("bar", 0.0)
    with pytest.raises(UserError, match="must be auto, none or a function"):
        notebook.make_progress(3, 0.0)


def test_the_real_display_of_ipython_is_updated():
    shells = pytest.importorskip("IPython.core.interactiveshell")
    capture = pytest.importorskip("IPython.utils.capture")
    try:
        shells.InteractiveShell.instance()
        with capture.capture_output() as captured:
            show = notebook.make_progress("auto", 0.0)
            show("compiling")
            show(Status(1, 2, 0.5, {"rmse": None, "over_clients": {"rmse": {}}}))
        first, second = captured.outputs
        assert first.data["text/plain"].startswith("compiling")
        assert "validation rmse undefined" in second.data["text/plain"]
        assert "<progress" in second.data["text/html"]
    finally:
        shells.InteractiveShell.clear_instance()
