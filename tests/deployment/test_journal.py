"""The journal's tables: made once, brought up to date, refused if they are of another run or of the future."""

from __future__ import annotations

import sqlite3
import sys

import pytest
import sqlalchemy as sa

from partwise.deployment.book import RoundRow, TaskRow, VersionRow
from partwise.deployment.journal import Journal, JournalDownError, found_journal
from partwise.deployment.tables import VERSION
from partwise.types import UserError

# The tables as version 1 had them.
FIRST = """
CREATE TABLE about (id INTEGER PRIMARY KEY, tables INTEGER NOT NULL, run TEXT NOT NULL);
CREATE TABLE devices (name TEXT PRIMARY KEY, seen DOUBLE PRECISION NOT NULL, ready BOOLEAN NOT NULL);
CREATE TABLE clients (name TEXT PRIMARY KEY, device TEXT NOT NULL);
CREATE TABLE round (id INTEGER PRIMARY KEY, number INTEGER NOT NULL, attempt INTEGER NOT NULL,
  phase TEXT NOT NULL, opened DOUBLE PRECISION NOT NULL, closer TEXT NOT NULL,
  closing_until DOUBLE PRECISION NOT NULL);
CREATE TABLE tasks (id TEXT PRIMARY KEY, number INTEGER NOT NULL, attempt INTEGER NOT NULL,
  place INTEGER NOT NULL, client TEXT NOT NULL, device TEXT NOT NULL, state TEXT NOT NULL,
  lease_until DOUBLE PRECISION NOT NULL, keys BLOB, report BLOB);
CREATE TABLE versions (number INTEGER PRIMARY KEY, file TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE keys (device TEXT PRIMARY KEY, public BLOB NOT NULL, label TEXT NOT NULL,
  expires DOUBLE PRECISION, revoked DOUBLE PRECISION);
CREATE TABLE nonces (device TEXT NOT NULL, nonce TEXT NOT NULL, time DOUBLE PRECISION NOT NULL,
  PRIMARY KEY (device, nonce));
INSERT INTO about VALUES (1, 1, 'run');
INSERT INTO round VALUES (1, 3, 0, 'open', 5.0, '', 0.0);
INSERT INTO clients VALUES ('ann', 'phone');
INSERT INTO tasks VALUES ('t1', 3, 0, 0, 'ann', 'phone', 'open', 0.0, NULL, NULL);
INSERT INTO versions VALUES (3, 'file', '{}');
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def first(request, tmp_path):
    """The URL of a journal that version 1 began."""
    url = f"sqlite:///{tmp_path}/journal.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("new_postgres")()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in filter(str.strip, FIRST.split(";")):
            connection.execute(sa.text(statement.replace("BLOB", "BYTEA") if "psycopg" in url else statement))
    engine.dispose()
    return url


def test_an_older_journal_is_brought_up_to_date(first):
    for _ in range(2):  # the second time there is nothing to do
        journal = Journal(first, "run")
        with journal.transaction() as book:
            assert book.round() == RoundRow(3, 0, "open", 5.0)
            assert book.letters(3, 0, 0) == {}
            assert book.task("t1") == TaskRow("t1", "train", 3, 0, 0, "ann", "phone")
            assert book.version(3) == VersionRow(3, "file", "{}")
            assert book.connection.execute(sa.text("SELECT tables FROM about")).scalar() == VERSION
        journal.close()


def test_the_stage_of_a_round_and_its_letters_come_with_version_4(tmp_path):
    """The table of rounds as version 3 had it."""
    url = f"sqlite:///{tmp_path}/journal.db"
    found_journal(url, "run").close()
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        for line in ("DROP TABLE letters", "UPDATE about SET tables = 3", "UPDATE round SET number = 7"):
            connection.execute(line)
        for column in ("stage", "staged"):
            connection.execute(f"ALTER TABLE round DROP COLUMN {column}")
    journal = Journal(url, "run")
    with journal.transaction() as book:
        assert book.round() == RoundRow(7)
        book.put_round(RoundRow(7, stage=2, staged=5.0))
        book.put_tasks([TaskRow("t1", "train", 7, 0, 0, "ann", "phone")])
        book.put_letter("t1", 0, b"letter")
    with journal.transaction() as book:
        assert book.round() == RoundRow(7, stage=2, staged=5.0)
        assert book.letters(7, 0, 0) == {"t1": b"letter"}
        assert (book.letters(7, 1, 0), book.letters(7, 0, 1)) == ({}, {})
    journal.close()


def test_journals_of_others_and_of_the_future_are_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/journal.db"
    found_journal(url, "run").close()
    with pytest.raises(UserError, match="is of run 'run', not of 'other'"):
        Journal(url, "other")
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        connection.execute("UPDATE about SET tables = 99")
    with pytest.raises(UserError, match="version 99"):
        Journal(url, "run")


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////nowhere/at/all.db",
        "mysql://here/there",
        "nonsense",
        "postgresql+psycopg://u:secret@127.0.0.1:1/x",
    ],
)
def test_journals_that_cannot_be_opened(url):
    for opened in (Journal, found_journal):
        with pytest.raises(UserError) as error:
            opened(url, "run")
        assert "secret" not in str(error.value)


def test_a_file_that_is_no_database_is_told(tmp_path):
    (tmp_path / "journal.db").write_text("nothing of the kind, but long enough to be looked at" * 20)
    with pytest.raises(UserError, match="cannot be opened"):
        Journal(f"sqlite:///{tmp_path}/journal.db", "run")


def test_a_journal_that_goes_away_is_an_error_that_passes(tmp_path):
    """Here somebody else holds the database for longer than the journal waits."""
    journal = found_journal(f"sqlite:///{tmp_path}/journal.db", "run")
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    with journal.transaction() as book:
        book.connection.exec_driver_sql("PRAGMA busy_timeout = 50")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(JournalDownError, match="does not answer"), journal.transaction() as book:
        book.round()
    other.execute("ROLLBACK")
    with journal.transaction() as book:
        assert book.round() == RoundRow()
    journal.close()


def test_a_number_is_new_once(tmp_path):
    journal = found_journal(f"sqlite:///{tmp_path}/journal.db", "run")
    with journal.transaction() as book:
        assert book.is_new("phone", "7", 1.0)
        assert not book.is_new("phone", "7", 2.0)
        assert book.is_new("other", "7", 2.0)
        book.forget_nonces(1.5)
        assert book.is_new("phone", "7", 3.0)
    journal.close()


def test_the_extra_of_a_database_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match=r"partwise\[postgres\]"):
        Journal("postgresql+psycopg://ann:secret@localhost/run", "run")
