"""The reports of a round that is being closed, read one after the other: all of them may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from partwise.deployment.book import Book, TaskRow
from partwise.deployment.jobs import Due
from partwise.server.messages import read_metrics
from partwise.types import UserError

PART = 1 << 20  # bytes of small reports that are read together

Ask = Callable[[Callable[[Book], list[TaskRow]]], list[TaskRow]]


class TakenOverError(Exception):
    """Another process closes the round now, or has closed it."""


def whole_tasks(ask: Ask, due: Due) -> Iterator[TaskRow]:
    """The tasks of a due round with all their bytes, in the order of the cohort. `ask` has something read in a
    transaction. Who lets go of a task before the next one has one report in memory, or some small ones."""
    place = 0
    while place < len(due.tasks):
        some = ask(lambda book, place=place: _next(book, due, place))
        place += len(some)
        some.reverse()
        while some:
            yield some.pop()


def is_closed_by(book: Book, due: Due) -> bool:
    """Whether the process that this round is due for still closes it."""
    row = book.round()
    return (row.number, row.phase, row.closer) == (due.round.number, "closing", due.round.closer)


def summed_metrics(book: Book, tasks: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Metrics of several clients, which these tasks have reported, as sums of values and of weights."""
    total: dict[str, tuple[float, float]] = {}
    for task in tasks:
        row = book.whole(task)
        for name, each in read_metrics(row.report).items() if row and row.report else ():
            value, weight = total.get(name, (0.0, 0.0))
            total[name] = (value + float(each.value), weight + float(each.weight))
    return total


def _next(book: Book, due: Due, place: int) -> list[TaskRow]:
    """The task at this place of the cohort, and those after it while they are small."""
    some, size = [], 0
    for task in due.tasks[place:]:
        row = book.whole(task.id)
        if row is None or row.reported != (row.report is not None):
            some = []
            break
        some.append(row)
        size += len(row.keys or b"") + len(row.report or b"")
        if size >= PART:
            break
    if not is_closed_by(book, due):  # asked last: until now, nobody has deleted what was read
        raise TakenOverError(f"round {due.round.number} is closed by another process")
    if not some:
        raise UserError(f"the journal lacks a report of round {due.round.number}, which it had before")
    return some
