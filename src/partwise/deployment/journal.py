"""The journal: the coordinator's rows in a SQL database, SQLite in a file or PostgreSQL by URL.

Each decision of the coordinator is part of one transaction; `deployment.clerk` puts several of them into one. On
SQLite, a transaction has the database for itself. On PostgreSQL, several processes work at the same time.
Transactions that accept reports lock the round's row together; one that opens or closes a round locks it alone.
So no report is acknowledged that a closing round does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from partwise.deployment.book import ClientRow, HasLeft, Kind, Lock, RoundRow, TaskCounts, TaskRow, VersionRow
from partwise.deployment.sql_letters import MANY, SMALL, TO_DO, SqlLetters
from partwise.deployment.tables import (
    ABOUT,
    CLIENTS,
    DEVICES,
    KEYS,
    NONCES,
    ROUND,
    TASKS,
    TURNS,
    VERSION,
    VERSIONS,
    prepare_tables,
)
from partwise.types import UserError

BUFFERED = sa.and_(TASKS.c.kind == "train", TASKS.c.state == "reported", TASKS.c.counted.is_(None))
IN_ORDER = (TASKS.c.number, TASKS.c.attempt, TASKS.c.place, TASKS.c.id)


class JournalDownError(Exception):
    """The database does not answer now: what was asked did not happen, and can be tried again."""


class Journal:
    """A run's rows in a database, which `found_journal` has made. Raises `UserError` if it is not there, or of
    another run.

    Args:
        url: `sqlite:///FILE`, or `postgresql+psycopg://USER:PASSWORD@HOST/NAME`.
        run: The run's identity. A database holds one run.
    """

    def __init__(self, url: str, run: str):
        self.url, self.run = url, run
        with _telling(url):
            self._engine = _engine(url)
            file = self._engine.url.database
            if self._engine.dialect.name == "sqlite" and not (file and Path(file).is_file()):
                raise UserError(f"there is no journal '{shown(url)}'")  # SQLite would make an empty one
            with self._engine.begin() as connection:
                _alone(connection)
                found = _run_in(connection)
                if found is None:
                    raise UserError(f"the journal '{shown(url)}' is empty")
                if found != run:
                    raise UserError(f"the journal '{shown(url)}' is of run '{found}', not of '{run}'")
                prepare_tables(connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[SqlBook]:
        """A book whose writes are all on the disk when the block ends, or none of them if it raises."""
        try:
            with self._engine.begin() as connection:
                yield SqlBook(connection)
        except (exc.OperationalError, exc.InterfaceError, exc.InternalError) as error:
            told = f"the journal '{shown(self.url)}' does not answer: {_first_line(error)}"
            raise JournalDownError(told) from error

    def close(self) -> None:
        """Give back all connections."""
        self._engine.dispose()


class SqlBook(SqlLetters):
    """`deployment.book.Book` in a transaction of a database. Methods are as there."""

    def __init__(self, connection: sa.Connection):
        self.connection, self.insert = connection, _insert(connection.dialect.name)
        self._shared: RoundRow | None = None

    def round(self, lock: Lock = "none") -> RoundRow:
        """The round. If it is locked, it is read once in a transaction."""
        if lock != "alone" and self._shared is not None:
            return self._shared
        found = self.connection.execute(_ROUNDS[lock]).one()
        row = RoundRow(*found[1:])
        if lock != "none":
            self._shared = row
        return row

    def put_round(self, row: RoundRow) -> None:
        """Replace it."""
        self._shared = None
        self.connection.execute(sa.update(ROUND).values(row._asdict()))

    def join(self, clients: Sequence[ClientRow], has_left: HasLeft) -> list[str]:
        """Add clients, or return the names of those that are another device's."""
        others = []
        for begin in range(0, len(clients), MANY):
            rows = {row.name: row.device for row in clients[begin : begin + MANY]}
            query = sa.select(CLIENTS.c.name, CLIENTS.c.device).where(CLIENTS.c.name.in_(rows))
            found = [
                (name, device) for name, device in self.connection.execute(query) if device != rows[name]
            ]
            others += [name for name, device in found if not has_left(device)]
        for begin in range(0, 0 if others else len(clients), MANY):
            values = [row._asdict() for row in clients[begin : begin + MANY]]
            self.connection.execute(_put(self.insert, CLIENTS), values)
        return others

    def see(self, device: str, now: float, ready: bool) -> None:
        """A device has asked for work."""
        values = {"name": device, "seen": now, "ready": ready}
        self.connection.execute(_put(self.insert, DEVICES), values)

    def num_present(self, since: float) -> int:
        """How many clients are present."""
        return self.connection.execute(_NUM_PRESENT, {"since": since}).scalar_one()

    def present(self, since: float) -> list[ClientRow]:
        """Clients on devices that are there and ready, sorted by name."""
        return [ClientRow(*row) for row in self.connection.execute(_PRESENT, {"since": since})]

    def task(self, task: str) -> TaskRow | None:
        """One task with all its bytes, locked."""
        found = self.connection.execute(_TASK, {"task": task}).one_or_none()
        return None if found is None else TaskRow(*found)

    def whole(self, task: str) -> TaskRow | None:
        """One task with all its bytes."""
        found = self.connection.execute(_WHOLE, {"task": task}).one_or_none()
        return None if found is None else TaskRow(*found)

    def put_tasks(self, rows: Iterable[TaskRow]) -> None:
        """Add or replace tasks."""
        values = [row._asdict() for row in rows]
        if values:
            self.connection.execute(_put(self.insert, TASKS), values)

    def tasks(self, kind: Kind, number: int, attempt: int) -> list[TaskRow]:
        """The tasks of a round, by place, without bytes."""
        query = sa.select(*SMALL).where(*_of_round(kind, number, attempt)).order_by(*IN_ORDER)
        return [TaskRow(*row) for row in self.connection.execute(query)]

    def tally(self, kind: Kind, number: int, attempt: int, now: float) -> TaskCounts:
        """How many clients these tasks have, have reported, and are lost."""
        given = {"kind": kind, "number": number, "attempt": attempt, "now": now}
        return TaskCounts(*self.connection.execute(_TALLY, given).one())

    def tasks_of(self, device: str, most: int) -> list[TaskRow]:
        """Tasks that one device has to do."""
        found = self.connection.execute(_TASKS_OF, {"device": device, "most": most})
        return [TaskRow(*row) for row in found]

    def devices_with_tasks(self) -> set[str]:
        """The devices that have something to do."""
        return set(self.connection.execute(sa.select(TASKS.c.device).where(TO_DO).distinct()).scalars())

    def lease(self, device: str, tasks: Sequence[str], until: float) -> None:
        """Lease these tasks to a device until then."""
        self.connection.execute(_HOLD_ALL, {"of": device, "until": until})
        self.connection.execute(_LEASE, [{"task": task} for task in tasks])

    def close_tasks(self, kind: Kind, number: int, attempt: int) -> None:
        """Those of a round that have not reported will not any more."""
        query = sa.update(TASKS).where(*_of_round(kind, number, attempt), TO_DO)
        self.connection.execute(query.values(state="closed"))

    def buffered(self, most: int) -> list[TaskRow]:
        """Training tasks that have reported and were not counted, without bytes."""
        query = sa.select(*SMALL).where(BUFFERED).order_by(*IN_ORDER).limit(most)
        return [TaskRow(*row) for row in self.connection.execute(query)]

    def num_buffered(self) -> int:
        """How many such tasks there are."""
        return self.connection.execute(sa.select(sa.func.count()).where(BUFFERED)).scalar_one()

    def busy(self, now: float) -> set[str]:
        """Clients whose training task is being worked on, or whose report was not counted yet."""
        at_work = sa.and_(TASKS.c.kind == "train", TO_DO, TASKS.c.lease_until > now)
        return set(
            self.connection.execute(sa.select(TASKS.c.client).where(sa.or_(at_work, BUFFERED))).scalars()
        )

    def count(self, tasks: Iterable[str], version: int) -> None:
        """Note that these reports are in a version, and delete their bytes."""
        done, names = {"counted": version, "keys": None, "report": None}, list(tasks)
        for begin in range(0, len(names), MANY):
            query = sa.update(TASKS).where(TASKS.c.id.in_(names[begin : begin + MANY]))
            self.connection.execute(query.values(done))

    def forget(self, before: int) -> None:
        """Delete the tasks of versions before this one."""
        self.connection.execute(sa.delete(TASKS).where(TASKS.c.number < before))

    def put_turns(self, clients: Iterable[str], number: int) -> None:
        """These clients took part in a round."""
        values = [{"client": client, "number": number} for client in clients]
        if values:
            self.connection.execute(_put(self.insert, TURNS), values)

    def turns_since(self, number: int) -> set[str]:
        """The clients that took part in this round or in a later one."""
        return set(
            self.connection.execute(sa.select(TURNS.c.client).where(TURNS.c.number >= number)).scalars()
        )

    def put_version(self, row: VersionRow) -> None:
        """Add or change a version of the model."""
        self.connection.execute(_put(self.insert, VERSIONS), row._asdict())

    def version(self, number: int) -> VersionRow | None:
        """The version that so many rounds made."""
        found = self.connection.execute(_VERSION, {"number": number}).one_or_none()
        return None if found is None else VersionRow(*found)

    def unevaluated(self) -> list[VersionRow]:
        """Versions whose evaluation was begun and has no metrics yet."""
        query = sa.select(VERSIONS).where(VERSIONS.c.metrics == "").order_by(VERSIONS.c.number)
        return [VersionRow(*row) for row in self.connection.execute(query)]

    def is_new(self, device: str, nonce: str, now: float) -> bool:
        """Whether a device uses this number for the first time, which it then has."""
        query = _new_nonce(self.insert)
        return (
            self.connection.execute(query, {"device": device, "nonce": nonce, "time": now}).first()
            is not None
        )

    def forget_nonces(self, before: float) -> None:
        """Forget numbers that were used before then."""
        self.connection.execute(sa.delete(NONCES).where(NONCES.c.time < before))


# Statements that are used often are made once: making them takes longer than they do.
_ROUNDS = {
    "none": sa.select(ROUND),
    "share": sa.select(ROUND).with_for_update(read=True),
    "alone": sa.select(ROUND).with_for_update(),
}
_WHOLE = sa.select(TASKS).where(TASKS.c.id == sa.bindparam("task"))
_TASK = _WHOLE.with_for_update()
_VERSION = sa.select(VERSIONS).where(VERSIONS.c.number == sa.bindparam("number"))
_HOLD_ALL = (  # a device that works on some of its tasks is not late with the others
    sa.update(TASKS)
    .where(TO_DO, TASKS.c.device == sa.bindparam("of"))
    .values(lease_until=sa.bindparam("until"))
)
_LEASE = sa.update(TASKS).where(TASKS.c.id == sa.bindparam("task")).values(state="leased")
_TASKS_OF = (
    sa.select(*SMALL)
    .where(TO_DO, TASKS.c.device == sa.bindparam("device"))
    .order_by(*IN_ORDER)
    .limit(sa.bindparam("most"))
)
_LOST = sa.and_(TASKS.c.state != "reported", TASKS.c.lease_until <= sa.bindparam("now"))
_TALLY = sa.select(
    sa.func.coalesce(sa.func.sum(TASKS.c.clients), 0),
    sa.func.coalesce(sa.func.sum(TASKS.c.clients).filter(TASKS.c.state == "reported"), 0),
    sa.func.coalesce(sa.func.sum(TASKS.c.clients).filter(_LOST), 0),
).where(
    TASKS.c.kind == sa.bindparam("kind"),
    TASKS.c.number == sa.bindparam("number"),
    TASKS.c.attempt == sa.bindparam("attempt"),
)
_THERE = sa.and_(DEVICES.c.ready, DEVICES.c.seen >= sa.bindparam("since"))
_PRESENT = (
    sa.select(CLIENTS.c.name, CLIENTS.c.device)
    .join(DEVICES, DEVICES.c.name == CLIENTS.c.device)
    .where(_THERE)
    .order_by(CLIENTS.c.name)
)
_NUM_PRESENT = (
    sa.select(sa.func.count())
    .select_from(CLIENTS.join(DEVICES, DEVICES.c.name == CLIENTS.c.device))
    .where(_THERE)
)


@cache
def _put(insert: Any, table: sa.Table) -> Any:
    """Insert rows; of those whose key is there already, replace the other columns."""
    query, keys = insert(table), [column.name for column in table.primary_key]
    changes = {
        column.name: query.excluded[column.name] for column in table.columns if column.name not in keys
    }
    return query.on_conflict_do_update(index_elements=keys, set_=changes)


@cache
def _new_nonce(insert: Any) -> Any:
    return insert(NONCES).on_conflict_do_nothing().returning(NONCES.c.nonce)


def _of_round(kind: Kind, number: int, attempt: int) -> tuple[Any, ...]:
    return TASKS.c.kind == kind, TASKS.c.number == number, TASKS.c.attempt == attempt


def found_journal(url: str, run: str) -> Journal:
    """The journal of a new run, made in a database that holds no other. A run that was never served and has no keys
    is no other: its folder was not completed."""
    with _telling(url):
        engine = _engine(url)
        with engine.begin() as connection:
            _alone(connection)
            prepare_tables(connection)
            found = _run_in(connection)
            begun = sa.union_all(sa.select(VERSIONS.c.number), sa.select(sa.literal(0)).select_from(KEYS))
            if found is not None and connection.execute(begun).first() is not None:
                raise UserError(
                    f"the journal '{shown(url)}' is of another run ('{found}'), and a new run needs a new one: "
                    f"move it away, or give another database with --journal"
                )
            insert = _insert(connection.dialect.name)
            about = {"id": 1, "tables": VERSION, "run": run, "keys": 0}
            connection.execute(_put(insert, ABOUT), about)
            connection.execute(_put(insert, ROUND), {"id": 1, **RoundRow()._asdict()})
        engine.dispose()
    return Journal(url, run)


@contextlib.contextmanager
def _telling(url: str) -> Iterator[None]:
    """Errors of the database as sentences, without the password."""
    try:
        yield
    except (exc.SQLAlchemyError, ImportError) as error:
        hint = ""
        if getattr(error, "name", "") == "psycopg":
            hint = ": pip install 'partwise[postgres]'"
        elif url.startswith("postgresql") and "password" in str(error):
            hint = (
                ". A password is given with the whole URL (--journal), or as for all programs of PostgreSQL "
                "(PGPASSWORD, ~/.pgpass)"
            )
        told = f"the journal '{shown(url)}' cannot be opened: {_first_line(error)}{hint}"
        raise UserError(told) from None


def _run_in(connection: sa.Connection) -> str | None:
    """The run that a database holds."""
    if not sa.inspect(connection).has_table("about"):
        return None
    return connection.execute(sa.select(ABOUT.c.run)).scalar()


def _engine(url: str) -> sa.Engine:
    engine = sa.create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    elif engine.dialect.name != "postgresql":
        raise UserError(f"a journal is in SQLite or PostgreSQL, not in {engine.dialect.name}")
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """A log that survives kills and power cuts, and waiting for other writers instead of failing."""
    connection.isolation_level = None  # transactions begin where this file begins them
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 30000"):
        connection.execute(f"PRAGMA {pragma}")


def _alone(connection: sa.Connection) -> None:
    """Let nobody else make or change tables until this transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(7261527)"))


def _insert(dialect: str) -> Any:
    """The dialect's INSERT, which knows what to do with rows that are there already."""
    return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[dialect]


def shown(url: str) -> str:
    """The URL without its password."""
    try:
        bare = sa.make_url(url)._replace(password=None).difference_update_query(["password", "sslpassword"])
    except exc.ArgumentError:
        return url
    return bare.render_as_string(hide_password=False)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
