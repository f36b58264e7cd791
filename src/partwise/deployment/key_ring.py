"""Who may take part: the keys of devices and operators in the journal, and the log of who did what.

Every process keeps all keys in memory. A counter in the journal says when they have changed. So a key that is
revoked in one process is refused by the others as soon as they look, which they do several times a second.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import sqlalchemy as sa

from partwise.deployment.auth import KeyRow
from partwise.deployment.journal import Journal, SqlBook
from partwise.deployment.tables import ABOUT, AUDIT, KEYS
from partwise.types import UserError


class Act(NamedTuple):
    """A line of the audit log."""

    time: float
    who: str
    what: str


class KeyRing:
    """The keys of a run."""

    def __init__(self, journal: Journal):
        self._journal, self._known, self._seen = journal, {}, -1
        self.look()

    def get(self, name: str) -> KeyRow | None:
        """The key of a device or an operator, as of the last look."""
        return self._known.get(name)

    def look(self, book: SqlBook | None = None) -> None:
        """Read the keys again, if they have changed."""
        if book is None:
            with self._journal.transaction() as book:
                return self.look(book)
        changes = book.connection.execute(sa.select(ABOUT.c["keys"])).scalar_one()
        if changes != self._seen:
            rows = [KeyRow(*row) for row in book.connection.execute(sa.select(KEYS))]
            self._known, self._seen = {row.device: row for row in rows}, changes
        return None

    def enroll(self, row: KeyRow, who: str = "host") -> None:
        """Let a device or an operator take part, or change what is known of its key."""
        with self._journal.transaction() as book:
            changes = {name: value for name, value in row._asdict().items() if name != "device"}
            query = book.insert(KEYS).values(row._asdict())
            book.connection.execute(query.on_conflict_do_update(index_elements=["device"], set_=changes))
            self._changed(book, who, f"enrolled {row.role} {row.device} '{row.label}'")

    def revoke(self, name: str, who: str = "host") -> KeyRow:
        """Let a device or an operator take part no longer. `name` is its id or its label."""
        with self._journal.transaction() as book:
            match = sa.or_(KEYS.c.device == name, KEYS.c.label == name)
            found = [KeyRow(*row) for row in book.connection.execute(sa.select(KEYS).where(match))]
            if len(found) != 1:
                several = (
                    f"is the label of {len(found)} keys: give the id of one" if found else "is not enrolled"
                )
                raise UserError(f"'{name}' {several}")
            now = time.time()
            query = sa.update(KEYS).where(KEYS.c.device == found[0].device).values(revoked=now)
            book.connection.execute(query)
            self._changed(book, who, f"revoked {found[0].role} {found[0].device} '{found[0].label}'")
        return found[0]._replace(revoked=now)

    def all(self) -> list[KeyRow]:
        """All keys, by role and label."""
        self.look()
        return sorted(self._known.values(), key=lambda row: (row.role, row.label, row.device))

    def _changed(self, book: SqlBook, who: str, what: str) -> None:
        note(book, who, what)
        book.connection.execute(sa.update(ABOUT).values({"keys": ABOUT.c["keys"] + 1}))
        self.look(book)


def note(book: SqlBook, who: str, what: str) -> None:
    """Add a line to the audit log."""
    book.connection.execute(sa.insert(AUDIT).values(time=time.time(), who=who, what=what))


def acts(book: SqlBook, most: int = 1000) -> list[Act]:
    """The last lines of the audit log, the newest first."""
    query: Any = sa.select(AUDIT.c.time, AUDIT.c.who, AUDIT.c.what).order_by(AUDIT.c.id.desc()).limit(most)
    return [Act(*row) for row in book.connection.execute(query)]
