"""Decisions that share a transaction: all are on the disk, one that fails undoes no other, nobody is forgotten."""

from __future__ import annotations

import contextlib
import threading

import pytest

from partwise.deployment.clerk import Clerk
from partwise.deployment.journal import JournalDownError, found_journal

LONG = 120  # seconds; only a test that is broken waits for so long


@pytest.fixture
def journal(tmp_path):
    journal = found_journal(f"sqlite:///{tmp_path}/journal.db", "run")
    yield journal
    journal.close()


@pytest.fixture
def clerk(journal):
    clerk = Clerk(journal.transaction)
    yield clerk
    clerk.close()


def held_up(clerk):
    """An event; until it is set, the clerk is busy, so that what is asked meanwhile shares a transaction."""
    go, busy = threading.Event(), threading.Event()
    clerk.submit(lambda book: (busy.set(), go.wait(LONG)))
    busy.wait(LONG)
    return go


def seen(book, name):
    book.see(name, 1.0, True)
    return name


def test_what_is_asked_meanwhile_shares_a_transaction(journal, clerk):
    books, go = [], held_up(clerk)
    answers = [
        clerk.submit(lambda book, i=i: (books.append(book), seen(book, f"d{i}"))[1]) for i in range(20)
    ]
    go.set()
    assert [answer.result(LONG) for answer in answers] == [f"d{i}" for i in range(20)]
    assert len({id(book) for book in books}) == 1


def test_one_that_fails_undoes_no_other(journal, clerk):
    go = held_up(clerk)

    def fails(book):
        book.see("bad", 1.0, True)
        raise ValueError("no")

    good, bad = clerk.submit(lambda book: seen(book, "good")), clerk.submit(fails)
    more = clerk.submit(lambda book: seen(book, "more"))
    go.set()
    assert (good.result(LONG), more.result(LONG)) == ("good", "more")
    with pytest.raises(ValueError, match="no"):
        bad.result(LONG)
    names = clerk.do(
        lambda book: {row[0] for row in book.connection.exec_driver_sql("SELECT name FROM devices")}
    )
    assert names == {"good", "more"}


def test_who_hangs_up_is_not_answered_and_stops_nobody(clerk):
    go = held_up(clerk)
    gone, still = (
        clerk.submit(lambda book: seen(book, "gone")),
        clerk.submit(lambda book: seen(book, "still")),
    )
    assert gone.cancel()
    go.set()
    assert still.result(LONG) == "still"
    assert clerk.do(lambda book: 7) == 7


def test_a_database_that_goes_away_is_not_asked_for_each(journal):
    """What was decided may be on the disk although the database did not say so: it is not decided twice."""
    decided = []

    @contextlib.contextmanager
    def broken():
        with journal.transaction() as book:
            yield book
        raise JournalDownError("gone")

    clerk = Clerk(broken)
    go = held_up(clerk)
    answers = [clerk.submit(lambda book, i=i: decided.append(i)) for i in range(5)]
    go.set()
    for answer in answers:
        with pytest.raises(JournalDownError, match="gone"):
            answer.result(LONG)
    assert decided == [0, 1, 2, 3, 4]
    clerk.close()


def test_alone_is_alone(clerk):
    books, go = {}, held_up(clerk)
    asked = [
        clerk.submit(lambda book, name=name: books.setdefault(name, book), alone=name == "b")
        for name in "abc"
    ]
    go.set()
    for each in asked:
        each.result(LONG)
    assert len({id(book) for book in books.values()}) == 3
