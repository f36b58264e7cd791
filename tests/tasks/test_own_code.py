"""Tasks of a user's own code: found by `module:function`, with its arguments as options; what is said if they are
wrong."""

from __future__ import annotations

import sys

import pytest

from partwise.tasks import find_task, is_named, load_task
from partwise.types import UserError

CODE = """
from typing import Annotated
from partwise.data import planted_ratings
from partwise.tasks import Entry
from partwise.tasks.ratings import ratings_task, settings

print("imported")

def make_task(data=None, *, dim: Annotated[int, "size of the vectors"] = 2, clients: int = 20):
    \"\"\"Ratings of a few.\"\"\"
    store = planted_ratings(num_clients=clients, num_items=12, rank=2, mean_examples=11).store
    return ratings_task(store, "inner", dim=dim)._replace(notes=(str(data),))

def needy(path):
    return make_task(path)

def wrong():
    return {"a": "task"}

def broken():
    raise RuntimeError("no such table")

NUMBER = 7
ENTRY = Entry("an entry", lambda data=None, **options: make_task(data), settings)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a module of the user's, which is the current one."""
    (tmp_path / "my_tasks.py").write_text(CODE)
    (tmp_path / "my_broken.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_tasks", "my_broken"):
        sys.modules.pop(name, None)


def test_a_function_is_a_task_and_its_arguments_are_options(capsys):
    entry = find_task("my_tasks:make_task")
    assert entry.summary == "Ratings of a few."
    task = load_task("my_tasks:make_task", "a.csv", dim=3)
    assert task.name == "my_tasks:make_task"
    assert task.loaded == {"dim": 3, "clients": 20, "path": "a.csv"}  # as a run records them
    assert task.options == {"dim": 3, "clients": 20, "data": "a.csv"}  # with these it is made again
    assert task.notes == ("a.csv",)
    again, _ = entry.settings(**task.options)
    assert again.partition.digest == task.personal.partition.digest
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "imported\n")  # the output of a command may be JSON


def test_an_entry_may_be_named_too():
    assert load_task("my_tasks:ENTRY").name == "my_tasks:ENTRY"
    assert find_task("my_tasks:ENTRY").summary == "an entry"


def test_names_of_code_are_not_looked_for_to_know_that_they_are_names():
    assert is_named("nowhere:at_all")
    assert "nowhere" not in sys.modules


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "nowhere:make_task",
            r"module 'nowhere' that is neither in the current folder \(.*\) nor .*PYTHONPATH",
        ),
        ("my_tasks:mak_task", r"unknown function of module 'my_tasks' 'mak_task' \(nearest: make_task"),
        ("my_tasks:NUMBER", "is a int: it must be a function that returns a Task"),
        ("my_tasks:wrong", "returned a dict: it must return a Task"),
        ("my_tasks:broken", "calling my_tasks:broken .*RuntimeError: no such table"),
        ("my_tasks:needy", r"cannot be called with no arguments: missing .*'path'.*--set data\.NAME=VALUE"),
        ("my_broken:make_task", "importing my_broken .*No module named 'not_there_at_all'"),
        ("my_tasks.py:make_task", "module 'my_tasks.py' that is neither|importing my_tasks.py"),
        ("C:/my/tasks:f", "name code as module:function"),
        (":make_task", "name code as module:function"),
        ("my_tasks:", "name code as module:function"),
    ],
)
def test_what_is_wrong_with_a_name(name, told):
    with pytest.raises(UserError, match=told):
        load_task(name)


def test_options_that_it_has_not():
    with pytest.raises(UserError, match=r"has no option 'dims' \(nearest: dim\)"):
        load_task("my_tasks:make_task", dims=3)
    with pytest.raises(UserError, match="takes no argument `data`"):
        load_task("my_tasks:wrong", "a.csv")
