"""Several decisions in one transaction: what waits while the disk is busy is written together.

A report is acknowledged when it is on the disk, and that takes a disk some milliseconds. So one thread of a process
does all its transactions. While it waits for the disk, decisions pile up, and the next transaction has them all. If
one of them fails, the transaction is undone, and each is tried by itself. If the database does not answer, none is
tried again here: it may have happened, and whoever asked finds out by asking again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from partwise.deployment.journal import JournalDownError, SqlBook

MOST = 256  # decisions in a transaction
Answer = TypeVar("Answer")
Transaction = Callable[[], contextlib.AbstractContextManager[SqlBook]]


class _Asked(NamedTuple):
    decide: Callable[[SqlBook], Any]
    alone: bool
    answer: Future[Any]


class Clerk:
    """Does transactions, one after the other, in a thread of its own."""

    def __init__(self, transaction: Transaction):
        self._transaction = transaction
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="partwise clerk", daemon=True)
        self._thread.start()

    def submit(self, decide: Callable[[SqlBook], Answer], alone: bool = False) -> Future[Answer]:
        """Have a decision made. The answer comes when its writes are on the disk. A decision that locks the round
        for itself must be `alone` in its transaction."""
        answer: Future[Answer] = Future()
        self._asked.put(_Asked(decide, alone, answer))
        return answer

    def do(self, decide: Callable[[SqlBook], Answer], alone: bool = False) -> Answer:
        """The same, waiting for the answer."""
        return self.submit(decide, alone).result()

    def close(self) -> None:
        """Finish what was asked for, and stop."""
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        waiting: list[_Asked | None] = []
        while True:
            asked = waiting.pop() if waiting else self._asked.get()
            if asked is None:
                return
            together = self._with_others(asked, waiting)
            # Who does not wait any more (a device that hung up) is not answered.
            self._answer([each for each in together if each.answer.set_running_or_notify_cancel()])
            del asked, together  # they have reports, which would be kept until the next decision

    def _with_others(self, asked: _Asked, waiting: list[_Asked | None]) -> list[_Asked]:
        """A decision, and those that can be made in its transaction. What comes after them goes to `waiting`."""
        together = [asked]
        while not asked.alone and len(together) < MOST and not self._asked.empty():
            following = self._asked.get()
            if following is None or following.alone:
                waiting.append(following)
                break
            together.append(following)
        return together

    def _answer(self, together: list[_Asked]) -> None:
        if not together:
            return
        try:
            with self._transaction() as book:
                answers = [each.decide(book) for each in together]
        except Exception as error:
            if len(together) == 1 or isinstance(error, JournalDownError):
                for each in together:
                    each.answer.set_exception(error)
            else:
                for each in together:
                    self._answer([each])
            return
        for each, answer in zip(together, answers, strict=True):
            each.answer.set_result(answer)
