"""Tasks by name. To add one to the library, write a module with `load`, and add a line here. Another package
adds one with an entry point of the group `partwise.tasks`. `module:function` names code of the user's own."""

from __future__ import annotations

from typing import Any

from partwise.plugins import Lazy, find, find_all, is_code, names
from partwise.tasks.base import (
    PAPER,
    Entry,
    OwnRows,
    Setting,
    Task,
    algorithm_of,
    check_limits,
    data_options,
    defaults_for,
    find_preset,
    fitting,
    keyword_options,
    refuse_unread,
    takes_any_option,
    with_preset,
)
from partwise.tasks.own_code import find_code
from partwise.types import UserError, nearest

GROUP = "partwise.tasks"  # the group of entry points

TASKS: dict[str, Entry | Lazy] = {
    "planted": Lazy("ratings from a planted truth; needs no data", "partwise.tasks.planted:PLANTED"),
    "movielens": Lazy(
        "MovieLens ratings, unseen users (FedRecon, Table 1)", "partwise.tasks.movielens:MOVIELENS"
    ),
    "movielens-seen": Lazy("MovieLens ratings, seen users, by time", "partwise.tasks.movielens:SEEN"),
    "movielens-liked": Lazy(
        "MovieLens: does a user like a movie? (FedSubAvg, section 5)", "partwise.tasks.liked:LIKED"
    ),
    "ratings": Lazy("your own table of user, item, rating", "partwise.tasks.ratings:RATINGS"),
    "events": Lazy(
        "your own table of user, item and perhaps time: the next item", "partwise.tasks.events:EVENTS"
    ),
    "events-planted": Lazy(
        "generated events: the next item, at any size", "partwise.tasks.next_item:PLANTED"
    ),
    "next-item": Lazy(
        "Amazon Beauty, Sports, Toys or Yelp as sequences: the next item",
        "partwise.tasks.next_item:SEQUENCES",
    ),
    "check-ins": Lazy("Foursquare New York: the next place", "partwise.tasks.next_item:CHECK_INS"),
    "listening": Lazy("Last.fm: artists that a user listens to", "partwise.tasks.next_item:LISTENING"),
    "tags": Lazy(
        "Stack Exchange or Stack Overflow posts to tags (Federated Select, Figure 2)",
        "partwise.tasks.tags:TAGS",
    ),
    "tags-planted": Lazy("generated posts to tags, at any size", "partwise.tasks.tags:PLANTED"),
    "sentiment": Lazy(
        "tweets (Sentiment140) or Amazon reviews, positive or not, LSTM (FedSubAvg, section 5.1)",
        "partwise.tasks.sentiment:SENTIMENT",
    ),
    "clicks": Lazy(
        "Amazon ratings as clicks, deep interest network (FedSubAvg, section 5)",
        "partwise.tasks.clicks:CLICKS",
    ),
    "handwriting": Lazy(
        "MNIST by writer, CNN or 2NN (Federated Select, Tables 2 and 3)",
        "partwise.tasks.handwriting:MNIST",
        "flax",
    ),
    "emnist": Lazy("TFF's federated EMNIST, CNN or 2NN", "partwise.tasks.handwriting:EMNIST", "flax"),
    "femnist": Lazy("LEAF's FEMNIST, 62 classes, CNN or 2NN", "partwise.tasks.handwriting:FEMNIST", "flax"),
    "writers": Lazy("generated handwriting, at any size", "partwise.tasks.handwriting:WRITERS", "flax"),
    "next-word": Lazy(
        "Stack Exchange or Stack Overflow sentences, transformer (Federated Select, Figure 7)",
        "partwise.tasks.next_word:NEXT_WORD",
        "flax",
    ),
    "next-word-lstm": Lazy(
        "the same sentences, LSTM with local embeddings of rare words (FedRecon, Table 2)",
        "partwise.tasks.next_word_lstm:NEXT_WORD_LSTM",
        "flax",
    ),
    "next-word-planted": Lazy(
        "generated sentences with words of clients' own, at any size",
        "partwise.tasks.next_word_lstm:PLANTED",
        "flax",
    ),
}


def find_task(name: str) -> Entry:
    """The task with this name, from the library, from an installed package, or from the user's own code
    (`module:function`), which is run. A name that a file says must not come here unasked; see `runs.reopen`."""
    return find_code(name) if is_code(name) else find(TASKS, GROUP, "task", name)


def is_named(name: str) -> bool:
    """Whether there is a task of that name. That of code is not looked for."""
    return is_code(name) or name in TASKS or name in names(TASKS, GROUP)


def all_tasks() -> dict[str, Entry | Lazy]:
    """Every named task, for lists. `find_task` returns a task that is ready for use."""
    return find_all(TASKS, GROUP, "task")


def load_task(name: str, data: str | None = None, *, preset: str | None = None, **options: Any) -> Task:
    """Load a task by name.

    Args:
        name: The name; `partwise tasks` lists them. Or `module:function`, for a function of yours that returns
            a Task.
        data: Where its data is; None for the task's own place.
        preset: A named set of settings and data options that replaces the task's own: "paper".
        **options: Options of the data, such as dim=8 for --set data.dim=8; `partwise settings NAME` lists
            them. They override the preset's.

    Returns:
        The task.
    """
    entry, asked = find_task(name), list(options)
    if preset is not None:
        options = data_options(find_preset(name, entry.presets, preset)) | options
    known = keyword_options(entry.load)
    for option in options:
        if option not in known and not takes_any_option(entry.load):
            raise UserError(
                f"task '{name}' has no option '{option}' ({nearest(option, known)}); "
                f"`partwise settings {name}` lists them all"
            )
    check_limits(entry.load, options)
    task = entry.load(data, **options)
    refuse_unread(task, asked, options)
    resolved = {option: value for option, value in task.loaded.items() if option in known}
    task = task._replace(loaded=resolved | options | ({"path": str(data)} if data else {}))
    task = task._replace(name=name) if is_code(name) else task
    return task if preset is None else with_preset(task, preset)


__all__ = [
    "PAPER",
    "TASKS",
    "Entry",
    "OwnRows",
    "Setting",
    "Task",
    "algorithm_of",
    "all_tasks",
    "data_options",
    "defaults_for",
    "find_preset",
    "find_task",
    "fitting",
    "is_code",
    "is_named",
    "keyword_options",
    "load_task",
    "with_preset",
]
