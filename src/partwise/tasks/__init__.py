"""Tasks by name. To add one: a module with `load`, and a line here."""

from __future__ import annotations

from typing import Any

from partwise.tasks import movielens, planted, ratings
from partwise.tasks.base import Entry, Setting, Task, defaults_of
from partwise.tasks.ratings import ratings_task
from partwise.types import UserError, unknown

TASKS: dict[str, Entry] = {
    "planted": Entry("ratings from a planted truth; needs no data", planted.load, ratings.settings),
    "movielens": Entry(
        "MovieLens ratings, unseen users (FedRecon, Table 1)", movielens.load, ratings.settings
    ),
    "movielens-seen": Entry("MovieLens ratings, seen users, by time", movielens.load_seen, ratings.settings),
    "ratings": Entry("your own table of user, item, rating", ratings.load, ratings.settings),
}


def load_task(name: str, data: str | None = None, **options: Any) -> Task:
    """A task by name, from the data at `data` (a task's own default if None)."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    try:
        return TASKS[name].load(data, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"task '{name}': {str(error).split(') ')[-1].removeprefix('got an ')}") from None


__all__ = ["TASKS", "Entry", "Setting", "Task", "defaults_of", "load_task", "ratings_task"]
