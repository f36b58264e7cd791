"""The letters of masked sums in a SQL database, and what the stages of a round do to its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from partwise.deployment.tables import LETTERS, TASKS

MANY = 500  # rows in a statement
TO_DO = TASKS.c.state.in_(("open", "leased"))
SMALL = [sa.null() if column.name in ("keys", "report") else column for column in TASKS.columns]


class SqlLetters:
    """Part of `deployment.journal.SqlBook`. Methods are as in `deployment.book.Book`."""

    connection: sa.Connection

    def close_some(self, tasks: Iterable[str]) -> None:
        """These tasks will not report any more."""
        for some in _parts(tasks):
            query = sa.update(TASKS).where(TO_DO, TASKS.c.id.in_(some))
            self.connection.execute(query.values(state="closed"))

    def hold(self, number: int, attempt: int, until: float) -> None:
        """The training tasks of a round are their devices' until then."""
        going_on = sa.or_(TO_DO, TASKS.c.state == "reported")
        query = sa.update(TASKS).where(*_of_round(number, attempt), going_on)
        self.connection.execute(query.values(lease_until=until))

    def put_letter(self, task: str, stage: int, body: bytes) -> None:
        """Add the letter of a task in a stage."""
        self.connection.execute(sa.insert(LETTERS).values(task=task, stage=stage, body=body))

    def letter(self, task: str, stage: int) -> bytes | None:
        """The letter of a task in a stage."""
        query = sa.select(LETTERS.c.body).where(LETTERS.c.task == task, LETTERS.c.stage == stage)
        return self.connection.execute(query).scalar_one_or_none()

    def letters(self, number: int, attempt: int, stage: int) -> dict[str, bytes]:
        """The letters of a round in a stage, by task."""
        query = sa.select(LETTERS.c.task, LETTERS.c.body).where(*_letters_of(number, attempt, stage))
        return {row.task: row.body for row in self.connection.execute(query)}

    def writers(self, number: int, attempt: int, stage: int) -> set[str]:
        """The tasks of these letters."""
        query = sa.select(LETTERS.c.task).where(*_letters_of(number, attempt, stage))
        return set(self.connection.execute(query).scalars())

    def drop_letters(self, tasks: Iterable[str] | None = None) -> None:
        """Delete the letters of these tasks, or all."""
        if tasks is None:
            self.connection.execute(sa.delete(LETTERS))
            return
        for some in _parts(tasks):
            self.connection.execute(sa.delete(LETTERS).where(LETTERS.c.task.in_(some)))


def _of_round(number: int, attempt: int) -> tuple[Any, ...]:
    return TASKS.c.kind == "train", TASKS.c.number == number, TASKS.c.attempt == attempt


def _letters_of(number: int, attempt: int, stage: int) -> tuple[Any, ...]:
    return LETTERS.c.task == TASKS.c.id, LETTERS.c.stage == stage, *_of_round(number, attempt)


def _parts(tasks: Iterable[str]) -> list[list[str]]:
    names = list(tasks)
    return [names[begin : begin + MANY] for begin in range(0, len(names), MANY)]
