"""The journal: the coordinator's rows in a SQL database, SQLite in a file or PostgreSQL by URL.

Each decision of the coordinator is one transaction. On SQLite, a transaction has the database for itself. On
PostgreSQL, several processes work at the same time. Transactions that accept reports lock the round's row together;
one that opens or closes a round locks it alone. So no report is acknowledged that a closing round does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from partwise.deployment.auth import KeyRow
from partwise.deployment.book import ClientRow, Lock, RoundRow, TaskRow, VersionRow
from partwise.types import UserError

VERSION = 1  # of the tables
MANY = 500  # rows in a statement

TABLES = sa.MetaData()
ABOUT = sa.Table(
    "about",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),  # one row
    sa.Column("tables", sa.Integer, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
)
DEVICES = sa.Table(
    "devices",
    TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("seen", sa.Double, nullable=False),
    sa.Column("ready", sa.Boolean, nullable=False),
)
CLIENTS = sa.Table(
    "clients",
    TABLES,
    sa.Column("name", sa.Text(collation="C").with_variant(sa.Text(), "sqlite"), primary_key=True),
    sa.Column("device", sa.Text, nullable=False, index=True),
)
ROUND = sa.Table(
    "round",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),  # one row
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("opened", sa.Double, nullable=False),
    sa.Column("closer", sa.Text, nullable=False),
    sa.Column("closing_until", sa.Double, nullable=False),
)
TASKS = sa.Table(
    "tasks",
    TABLES,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("client", sa.Text, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.Column("keys", sa.LargeBinary),
    sa.Column("report", sa.LargeBinary),
    sa.Index("tasks_of_round", "number", "attempt", "device"),
)
VERSIONS = sa.Table(
    "versions",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("file", sa.Text, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)
KEYS = sa.Table(
    "keys",
    TABLES,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("public", sa.LargeBinary, nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("expires", sa.Double),
    sa.Column("revoked", sa.Double),
)
NONCES = sa.Table(
    "nonces",
    TABLES,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("nonce", sa.Text, primary_key=True),
    sa.Column("time", sa.Double, nullable=False, index=True),
)
SMALL = [column for column in TASKS.columns if column.name not in ("keys", "report")]


class Journal:
    """A run's rows in a database.

    Args:
        url: `sqlite:///FILE`, or `postgresql+psycopg://USER:PASSWORD@HOST/NAME`.
        run: The run's name. A database holds one run.
    """

    def __init__(self, url: str, run: str):
        self.url, self.run = url, run
        try:
            self._engine = _engine(url)
            with self._engine.begin() as connection:
                TABLES.create_all(connection)
                self._begin(connection)
        except (exc.SQLAlchemyError, ImportError) as error:
            raise UserError(f"the journal '{_shown(url)}' cannot be opened: {_first_line(error)}") from None

    def _begin(self, connection: sa.Connection) -> None:
        """The first rows of a new run; of one that is there, a check that it is this one."""
        insert = _insert(connection)
        connection.execute(insert(ABOUT).values(id=1, tables=VERSION, run=self.run).on_conflict_do_nothing())
        first = {"id": 1, **RoundRow()._asdict()}
        connection.execute(insert(ROUND).values(first).on_conflict_do_nothing())
        found = connection.execute(sa.select(ABOUT.c.tables, ABOUT.c.run)).one()
        if found.run != self.run:
            raise UserError(
                f"the journal '{_shown(self.url)}' is of run '{found.run}', not '{self.run}': give another database"
            )
        if found.tables != VERSION:
            raise UserError(
                f"the journal '{_shown(self.url)}' has tables of version {found.tables}, and this partwise writes "
                f"{VERSION}: go on with the version of partwise that began the run"
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[SqlBook]:
        """A book whose writes are all on the disk when the block ends, or none of them if it raises."""
        try:
            with self._engine.begin() as connection:
                yield SqlBook(connection)
        except exc.OperationalError as error:
            raise UserError(
                f"the journal '{_shown(self.url)}' does not answer: {_first_line(error)}"
            ) from error

    def enroll(self, row: KeyRow) -> None:
        """Let a device take part, or change what is known of its key."""
        with self.transaction() as book:
            book._put(KEYS, [row._asdict()], ["device"], ["public", "label", "expires", "revoked"])

    def key(self, device: str) -> KeyRow | None:
        """The key of a device that was enrolled."""
        with self.transaction() as book:
            found = book._connection.execute(sa.select(KEYS).where(KEYS.c.device == device)).one_or_none()
        return None if found is None else KeyRow(*found)

    def keys(self) -> list[KeyRow]:
        """All keys, by label."""
        with self.transaction() as book:
            return [KeyRow(*row) for row in book._connection.execute(sa.select(KEYS).order_by(KEYS.c.label))]

    def first_time(self, device: str, nonce: str, now: float, forget: float) -> bool:
        """Whether a device uses this number for the first time; those from before `forget` are forgotten."""
        with self.transaction() as book:
            book._connection.execute(sa.delete(NONCES).where(NONCES.c.time < forget))
            row = {"device": device, "nonce": nonce, "time": now}
            query = book._insert(NONCES).values(row).on_conflict_do_nothing().returning(NONCES.c.nonce)
            return book._connection.execute(query).first() is not None

    def close(self) -> None:
        """Give back all connections."""
        self._engine.dispose()


class SqlBook:
    """`deployment.book.Book` in a transaction of a database."""

    def __init__(self, connection: sa.Connection):
        self._connection, self._insert = connection, _insert(connection)

    def round(self, lock: Lock = "none") -> RoundRow:
        """As `Book.round`."""
        query = sa.select(ROUND)
        if lock != "none":
            query = query.with_for_update(read=lock == "share")
        return RoundRow(*self._connection.execute(query).one()[1:])

    def put_round(self, row: RoundRow) -> None:
        """As `Book.put_round`."""
        self._connection.execute(sa.update(ROUND).values(row._asdict()))

    def join(self, clients: Sequence[ClientRow]) -> list[str]:
        """As `Book.join`."""
        others = []
        for begin in range(0, len(clients), MANY):
            rows = {row.name: row.device for row in clients[begin : begin + MANY]}
            values = [{"name": name, "device": device} for name, device in rows.items()]
            self._connection.execute(self._insert(CLIENTS).values(values).on_conflict_do_nothing())
            query = sa.select(CLIENTS.c.name, CLIENTS.c.device).where(CLIENTS.c.name.in_(rows))
            found = self._connection.execute(query)
            others += [name for name, device in found if device != rows[name]]
        return others

    def see(self, device: str, now: float, ready: bool) -> None:
        """As `Book.see`."""
        self._put(DEVICES, [{"name": device, "seen": now, "ready": ready}], ["name"], ["seen", "ready"])

    def present(self, since: float) -> list[ClientRow]:
        """As `Book.present`."""
        there = sa.and_(DEVICES.c.ready, DEVICES.c.seen >= since)
        query = sa.select(CLIENTS.c.name, CLIENTS.c.device).join(DEVICES, DEVICES.c.name == CLIENTS.c.device)
        rows = self._connection.execute(query.where(there).order_by(CLIENTS.c.name))
        return [ClientRow(*row) for row in rows]

    def task(self, task: str) -> TaskRow | None:
        """As `Book.task`."""
        found = self._connection.execute(
            sa.select(TASKS).where(TASKS.c.id == task).with_for_update()
        ).one_or_none()
        return None if found is None else TaskRow(*found)

    def tasks(self, number: int, attempt: int) -> list[TaskRow]:
        """As `Book.tasks`."""
        return self._tasks(SMALL, number, attempt)

    def filled_tasks(self, number: int, attempt: int) -> list[TaskRow]:
        """As `Book.filled_tasks`."""
        return self._tasks(list(TASKS.columns), number, attempt)

    def tasks_of(self, device: str, number: int, attempt: int) -> list[TaskRow]:
        """As `Book.tasks_of`."""
        return self._tasks(SMALL, number, attempt, TASKS.c.device == device)

    def put_tasks(self, rows: Iterable[TaskRow]) -> None:
        """As `Book.put_tasks`."""
        names = [name for name in TaskRow._fields if name != "id"]
        self._put(TASKS, [row._asdict() for row in rows], ["id"], names)

    def lease(self, tasks: Iterable[str], until: float) -> None:
        """As `Book.lease`."""
        query = sa.update(TASKS).where(TASKS.c.id.in_(list(tasks)))
        self._connection.execute(query.values(state="leased", lease_until=until))

    def put_version(self, row: VersionRow) -> None:
        """As `Book.put_version`."""
        self._connection.execute(sa.insert(VERSIONS).values(row._asdict()))

    def version(self, number: int) -> VersionRow | None:
        """As `Book.version`."""
        found = self._connection.execute(sa.select(VERSIONS).where(VERSIONS.c.number == number)).one_or_none()
        return None if found is None else VersionRow(*found)

    def _tasks(self, columns: list[Any], number: int, attempt: int, *more: Any) -> list[TaskRow]:
        query = sa.select(*columns).where(TASKS.c.number == number, TASKS.c.attempt == attempt, *more)
        return [TaskRow(*row) for row in self._connection.execute(query.order_by(TASKS.c.place))]

    def _put(self, table: sa.Table, rows: list[dict[str, Any]], key: list[str], others: list[str]) -> None:
        """Insert rows; of those whose key is there already, replace the other columns."""
        for begin in range(0, len(rows), MANY):
            query = self._insert(table).values(rows[begin : begin + MANY])
            changes = {name: query.excluded[name] for name in others}
            self._connection.execute(query.on_conflict_do_update(index_elements=key, set_=changes))


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


def _insert(connection: sa.Connection) -> Any:
    """The dialect's INSERT, which knows what to do with rows that are there already."""
    return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[connection.dialect.name]


def _shown(url: str) -> str:
    """The URL without its password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except exc.ArgumentError:
        return url


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
