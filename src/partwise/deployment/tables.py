"""The tables of a journal, and how older ones are brought up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from partwise.types import UserError

VERSION = 5  # of the tables

TABLES = sa.MetaData()
ABOUT = sa.Table(
    "about",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),  # one row
    sa.Column("tables", sa.Integer, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("keys", sa.Integer, nullable=False, server_default="0"),  # how often keys were changed
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
    sa.Column("stage", sa.Integer, nullable=False, server_default="0"),
    sa.Column("staged", sa.Double, nullable=False, server_default="0"),
)
TASKS = sa.Table(
    "tasks",
    TABLES,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False, server_default="train"),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("client", sa.Text, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.Column("keys", sa.LargeBinary),
    sa.Column("report", sa.LargeBinary),
    sa.Column("digest", sa.Text),
    sa.Column("counted", sa.Integer),
    sa.Column("clients", sa.Integer, nullable=False, server_default="1"),
    sa.Index("tasks_of_round", "number", "attempt", "device"),
    sa.Index("tasks_to_do", "state", "device"),
)
LETTERS = sa.Table(
    "letters",
    TABLES,
    sa.Column("task", sa.Text, primary_key=True),
    sa.Column("stage", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
TURNS = sa.Table(  # apart from `clients`, which a device that joins again replaces
    "turns",
    TABLES,
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False, index=True),  # the last round that it took part in
)
VERSIONS = sa.Table(
    "versions",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("file", sa.Text, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("slices", sa.Text, nullable=False, server_default=""),
    sa.Column("metrics", sa.Text),
)
KEYS = sa.Table(
    "keys",
    TABLES,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("public", sa.LargeBinary, nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("expires", sa.Double),
    sa.Column("revoked", sa.Double),
    sa.Column("role", sa.Text, nullable=False, server_default="device"),
)
NONCES = sa.Table(
    "nonces",
    TABLES,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("nonce", sa.Text, primary_key=True),
    sa.Column("time", sa.Double, nullable=False, index=True),
)
AUDIT = sa.Table(
    "audit",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("time", sa.Double, nullable=False, index=True),
    sa.Column("who", sa.Text, nullable=False),
    sa.Column("what", sa.Text, nullable=False),
)

# What makes tables of one version into those of the next. New tables and indexes need no line here.
MIGRATIONS: Mapping[int, Sequence[sa.Column[Any]]] = {
    1: (
        ABOUT.c["keys"],
        TASKS.c.kind,
        TASKS.c.digest,
        TASKS.c.counted,
        VERSIONS.c.slices,
        VERSIONS.c.metrics,
        KEYS.c.role,
    ),
    2: (TASKS.c.clients,),
    3: (ROUND.c.stage, ROUND.c.staged),
    4: (),
}


def prepare_tables(connection: sa.Connection) -> None:
    """Make the tables that are missing, and bring older ones up to date, all in one transaction."""
    found = _version(connection)
    if found is not None and found > VERSION:
        raise UserError(
            f"the journal has tables of version {found}, and this partwise knows {VERSION}: go on with the version "
            f"of partwise that wrote it, or a later one"
        )
    for version in range(found or VERSION, VERSION):
        for column in MIGRATIONS[version]:
            told = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(sa.text(f"ALTER TABLE {column.table.name} ADD COLUMN {told}"))
    TABLES.create_all(connection)
    for table in TABLES.sorted_tables:
        for index in table.indexes:
            index.create(connection, checkfirst=True)
    if found is not None:
        connection.execute(sa.update(ABOUT).values(tables=VERSION))


def _version(connection: sa.Connection) -> int | None:
    """The version of the tables that are there; None if there are none."""
    if not sa.inspect(connection).has_table("about"):
        return None
    return connection.execute(sa.text("SELECT tables FROM about")).scalar()
