"""The stages of a round with masked sums (SecAgg+, Bell et al. 2020), decided without any I/O.

    0  advertise   clients send keys                    -> each is answered with those of its neighbours
    1  share       shares of two secrets, encrypted     -> each gets what its neighbours sent to it
    2  mask        the report: the masked line          -> each gets the list of those who uploaded
    3  unmask      shares that open the sum over these

A participant is a task, and its name is the task's id. A stage ends when all who are in it have sent their letter,
or the others are lost, or at its deadline. Then the set is frozen for ever: tasks that did not send are closed, so
that nobody is in two lists of those who uploaded. If too few have sent, the round is repeated with other clients,
and nothing is published. Letters are in the book until the round ends, so that another process can go on with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from typing import NamedTuple

from partwise.deployment.book import Book, RoundRow, TaskRow
from partwise.deployment.jobs import ADVERTISE, MASK, SHARE, UNMASK, Verdict
from partwise.deployment.rules import Rules
from partwise.privacy import masked_server
from partwise.privacy.graphs import MaskSettings, mask_settings
from partwise.server.masked_form import masked_context
from partwise.server.refusals import Refused
from partwise.types import UserError

logger = logging.getLogger("partwise.server")
FEWEST = 2  # clients of a sum: of one, it would be the client's own line
REMEMBERED = 8  # stages whose answers are kept

Answers = dict[str, bytes]  # by task


class Collected(NamedTuple):
    """What a sum is unmasked with, besides the reports."""

    context: bytes
    settings: MaskSettings
    advertised: dict[str, bytes]
    shared: dict[str, bytes]
    unmasking: dict[str, bytes]


class MaskedRounds:
    """The decisions of a run with masked sums. Every method that has a book is part of one transaction of it.

    Args:
        run: The run's name.
        rules: Its rules.
    """

    def __init__(self, run: str, rules: Rules):
        self._run, self._rules = run, rules
        self._answers: OrderedDict[tuple[int, int, int], Answers] = OrderedDict()

    # Devices

    def take(self, book: Book, device: str, task: str, stage: int, letter: bytes) -> Refused | None:
        """A device sends a letter. The one that it sent before is taken again, without effect: it may not have
        heard."""
        if stage not in (ADVERTISE, SHARE, UNMASK):
            return Refused(
                "malformed", f"there is no letter of stage {stage}: that of stage {MASK} is a report"
            )
        here, row = book.round("share"), book.task(task)
        if row is None or row.device != device or row.kind != "train":
            return Refused("task", f"this device has no task {task}")
        before = book.letter(task, stage)
        if before == letter or (stage == UNMASK and row.counted is not None):
            return None
        refused = not_now(here, row, stage)
        if refused:
            return refused
        if before is not None:
            return Refused("duplicate", f"task {task} has sent another letter of stage {stage} before")
        try:
            self._check(book, here, task, stage, letter)
        except UserError as error:
            return Refused("malformed", str(error))
        book.put_letter(task, stage, letter)
        return None

    def answer(self, book: Book, device: str, task: str, stage: int) -> bytes | Refused | None:
        """What a device is answered to its letter of a stage; None until the stage has ended."""
        if stage not in (ADVERTISE, SHARE, MASK):
            return Refused("malformed", f"a letter of stage {stage} has no answer")
        here, row = book.round("share"), book.task(task)
        if row is None or row.device != device or row.kind != "train":
            return Refused("task", f"this device has no task {task}")
        refused = not_now(here, row, here.stage)
        if refused:
            return refused
        if here.stage <= stage:
            return None
        return self._answered(book, here, stage).get(task) or _closed(task, stage)

    def _check(self, book: Book, here: RoundRow, task: str, stage: int, letter: bytes) -> None:
        """Raise `UserError` if a letter is not that of this task and stage."""
        context = self._context(here)
        if stage == ADVERTISE:
            masked_server.check_advertised(context, task, letter)
        elif stage == SHARE:
            number = len(self._answered(book, here, ADVERTISE))
            masked_server.check_shared(context, task, letter, number, self._settings(here, number))
        else:
            masked_server.check_unmasking(
                context, task, letter, self._answered(book, here, MASK).get(task, b"")
            )

    # Rounds

    def verdict(self, book: Book, row: RoundRow, now: float) -> Verdict:
        """Whether the stage of an open round ends, and how."""
        tasks = book.tasks("train", row.number, row.attempt)
        if len(tasks) < max(FEWEST, self._rules.least):
            return "repeat"
        sent = self._sent(book, row, tasks, row.stage)
        states = ("reported",) if row.stage == UNMASK else ("open", "leased")
        waiting = any(
            task.state in states and task.lease_until > now and task.id not in sent for task in tasks
        )
        over = now >= row.staged + self._rules.deadline
        if waiting and not over and not (row.stage == ADVERTISE and self._is_full(len(sent))):
            return "open"
        if len(sent) < self._least(book, row, len(tasks)):
            return "repeat" if over else "open"
        return "close" if row.stage == UNMASK else "next"

    def advance(self, book: Book, row: RoundRow, now: float) -> None:
        """End a stage, in a transaction that has the round for itself: nobody else can get into it from now on.
        If its letters do not fit together, the round is repeated."""
        number, attempt, tasks = row.number, row.attempt, book.tasks("train", row.number, row.attempt)
        if row.stage == ADVERTISE:
            self._drop_spare(book, row, tasks)
        sent = self._sent(book, row, tasks, row.stage)
        book.close_some(task.id for task in tasks if task.id not in sent)
        try:
            self._make(book, row, row.stage)
        except UserError as error:
            logger.warning("round %d, attempt %d, is tried again: %s", number, attempt, error)
            try_again(book, row)
            return
        book.hold(number, attempt, now + self._rules.lease)
        book.put_round(row._replace(stage=row.stage + 1, staged=now))

    def collected(self, book: Book, row: RoundRow) -> Collected:
        """What the sum of a round is unmasked with."""
        advertised, shared, unmasking = (
            book.letters(row.number, row.attempt, stage) for stage in (ADVERTISE, SHARE, UNMASK)
        )
        settings = self._settings(row, len(advertised))
        return Collected(self._context(row), settings, advertised, shared, unmasking)

    # Parts

    def _context(self, row: RoundRow) -> bytes:
        return masked_context(self._run, row.number)

    def _settings(self, row: RoundRow, num_advertised: int) -> MaskSettings:
        """The graph is drawn by what cohorts are drawn by, which clients do not know."""
        drawing = self._rules.seed if self._rules.drawing is None else self._rules.drawing
        text = f"graph/{drawing!r}/{self._run}/{row.number}/{row.attempt}"
        return mask_settings(num_advertised, hashlib.sha256(text.encode()).digest())

    def _is_full(self, number: int) -> bool:
        wanted = self._rules.recruiting
        return wanted.over_selection > 1 and number >= wanted.size

    def _drop_spare(self, book: Book, row: RoundRow, tasks: list[TaskRow]) -> None:
        """With over-selection, no more clients go on than the cohort needs: the sum has room for no more."""
        sent = self._sent(book, row, tasks, row.stage)
        if self._is_full(len(sent)):
            book.drop_letters([task.id for task in tasks if task.id in sent][self._rules.recruiting.size :])

    def _sent(self, book: Book, row: RoundRow, tasks: list[TaskRow], stage: int) -> set[str]:
        """The tasks that have sent their letter of a stage."""
        if stage == MASK:
            return {task.id for task in tasks if task.state == "reported"}
        return book.writers(row.number, row.attempt, stage)

    def _least(self, book: Book, row: RoundRow, num_tasks: int) -> int:
        """The fewest letters with which a stage ends well."""
        quorum = max(FEWEST, min(self._rules.quorum, num_tasks))
        if row.stage == ADVERTISE:
            return quorum
        settings = self._settings(row, len(book.writers(row.number, row.attempt, ADVERTISE)))
        if row.stage == UNMASK:
            return settings.threshold
        return max(quorum, settings.least, settings.threshold)

    def _answered(self, book: Book, here: RoundRow, stage: int) -> Answers:
        """The answers to a stage that has ended, which do not change any more."""
        key = (here.number, here.attempt, stage)
        if key not in self._answers:
            self._answers[key] = self._make(book, here, stage)
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return self._answers[key]

    def _make(self, book: Book, row: RoundRow, stage: int) -> Answers:
        """The answers to the letters of a stage."""
        context, letters = self._context(row), lambda stage: book.letters(row.number, row.attempt, stage)
        advertised = letters(ADVERTISE)
        settings = self._settings(row, len(advertised))
        if stage == ADVERTISE:
            return masked_server.directories(context, advertised, settings)
        shared = letters(SHARE)
        if stage == SHARE:
            return masked_server.deliveries(context, advertised, shared, settings)
        uploaded = self._sent(book, row, book.tasks("train", row.number, row.attempt), MASK)
        return masked_server.survivors(context, advertised, shared, uploaded, settings)


def try_again(book: Book, row: RoundRow) -> None:
    """Repeat a round with other clients. Nothing of this attempt is used."""
    book.close_tasks("train", row.number, row.attempt)
    book.drop_letters()
    book.put_round(RoundRow(row.number, row.attempt + 1))


def not_now(here: RoundRow, row: TaskRow, stage: int) -> Refused | None:
    """Why a task cannot send something in a stage now, if it cannot."""
    if row.state == "declined":
        return Refused("declined", f"this device has declined task {row.id}")
    current = (here.number, here.attempt, here.phase) == (row.number, row.attempt, "open")
    if row.state == "closed" or not current or stage < here.stage:
        return _closed(row.id, stage)
    if stage > here.stage:
        return Refused("early", f"task {row.id} is at stage {here.stage}, and this is for stage {stage}")
    return None


def _closed(task: str, stage: int) -> Refused:
    return Refused("closed", f"task {task} came too late: its round, or stage {stage} of it, is closed")
