"""What a server and an agent cost, measured: `partwise bench deployment`.

The server is a process of the command line. Polling devices are connections of this process, which train nothing:
each polls, asks for slices and reports the same numbers, as fast as it is answered. An agent is a process that
trains. The first rounds, in which the server compiles, are not in the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import sqlalchemy as sa

from partwise.algorithms.registry import prepare
from partwise.checkpoint import to_bytes
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.hub import Hub
from partwise.deployment.jobs import Wait
from partwise.deployment.link import read_answer
from partwise.deployment.tables import ABOUT, KEYS
from partwise.metrics import Sums
from partwise.runs.resolve import resolve
from partwise.server.messages import About
from partwise.server.round import Server
from partwise.server.total import Contribution

NUM_KEYS = 12  # of a client
WARM = 3  # rounds after which nothing is compiled; a case needs more
NEVER = 100_000  # requests of a device in a minute
PARTS = ("poll", "slices", "report")


class Trip(NamedTuple):
    """One client-round of a polling device: when its report was accepted, and the seconds of its requests."""

    done: float
    poll: float
    slices: float
    report: float


class BusyServer(NamedTuple):
    """A server process."""

    port: int
    process: psutil.Process


def measure_polling(task: str, changes: Mapping[str, Any], rounds: int, registered: int) -> dict[str, Any]:
    """Let as many devices as a cohort has poll and report; `registered` are all devices that may."""
    with tempfile.TemporaryDirectory() as folder:
        found, config = resolve(task, None, {**changes, "rounds": rounds, "deploy.requests": NEVER})
        size = config.cohort.size
        found_run(found, config.changed({"deploy.population": size}), folder)
        hub, *_ = open_run(folder)
        keys = [DeviceKey.new() for _ in range(size)]
        _enroll(hub, keys, registered)
        with _server(folder) as server:
            trips = asyncio.run(_all(server.port, keys, hub))
            memory = server.process.memory_info().rss
        counted = sum(record["clients"] for record in hub.records())
        hub.close()
    warm = sorted(trip for each in trips for trip in each[WARM:])
    return {
        "reports_per_second": (len(warm) - 1) / (warm[-1].done - warm[0].done),
        "client_round_ms": _quantiles([sum(trip[1:]) for trip in warm]),
        **{f"{part}_ms": _quantiles([getattr(trip, part) for trip in warm]) for part in PARTS},
        "reports": sum(map(len, trips)),
        "lost": sum(map(len, trips)) - counted,
        "server_mb": memory / 2**20,
        "agent_mb": None,
    }


def measure_agent(task: str, changes: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Let one agent with all clients train; its rounds are those of a client, from their opening to the next
    version."""
    with tempfile.TemporaryDirectory() as folder:
        found, config = resolve(task, None, {**changes, "rounds": rounds, "deploy.requests": NEVER})
        found_run(found, config, folder)
        place, key = Path(folder) / "device", DeviceKey.new()
        place.mkdir()
        prepare(found, config).store.save(place / "examples")
        key.save(place / "key.pem")
        hub, *_ = open_run(folder)
        hub.keys.enroll(KeyRow(key.device, key.public))
        with _server(folder) as server:
            agent = _memory_of_agent(server.port, place)
            memory = server.process.memory_info().rss
        records = hub.records()
        hub.close()
    seconds = [record["seconds"] for record in records[WARM:]]
    return {
        "reports_per_second": len(seconds) / sum(seconds),
        "client_round_ms": _quantiles(seconds),
        **dict.fromkeys((f"{part}_ms" for part in PARTS), None),
        "reports": sum(record["reports"] for record in records),
        "lost": rounds * config.cohort.size - sum(record["clients"] for record in records),
        "server_mb": memory / 2**20,
        "agent_mb": agent / 2**20,
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{part}": 1e3 * float(np.percentile(seconds, part)) for part in (50, 99)}


def _enroll(hub: Hub, keys: Sequence[DeviceKey], registered: int) -> None:
    """All keys at once, and others of devices that never come."""
    others = (KeyRow(f"{number:032x}", os.urandom(32)) for number in range(registered - len(keys)))
    rows = [row._asdict() for row in (*(KeyRow(key.device, key.public) for key in keys), *others)]
    with hub.journal.transaction() as book:
        book.connection.execute(sa.insert(KEYS), rows)
        book.connection.execute(sa.update(ABOUT).values({"keys": ABOUT.c["keys"] + 1}))


@contextlib.contextmanager
def _process(log: Path, *command: object) -> Iterator[subprocess.Popen[str]]:
    """A process of the command line, which is killed at the end."""
    given = [sys.executable, "-u", "-m", "partwise.cli", *map(str, command)]
    with (
        open(log, "wb") as file,
        subprocess.Popen(given, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _server(folder: str) -> Iterator[BusyServer]:
    log = Path(folder) / "server.log"
    with _process(log, "serve", "--out", folder, "--port", 0) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the server did not start: {log.read_text()[-1000:]}")
        yield BusyServer(int(url.rpartition(":")[2]), psutil.Process(process.pid))


def _memory_of_agent(port: int, place: Path) -> int:
    """Let an agent work until its run ends. Returns the bytes that it has in memory in the second half of its life
    (median)."""
    given = ("--data", f"store:{place}/examples", "--key", place / "key.pem", "--store", place / "own")
    sizes = []
    with _process(place / "log", "join", f"http://127.0.0.1:{port}", *given) as agent:
        while agent.poll() is None:
            with contextlib.suppress(psutil.Error):
                sizes.append(psutil.Process(agent.pid).memory_info().rss)
            time.sleep(0.05)
    if agent.returncode:
        raise RuntimeError(f"the agent failed: {(place / 'log').read_text()[-1000:]}")
    return int(np.median(sizes[len(sizes) // 2 :]))


# Polling devices


async def _all(port: int, keys: Sequence[DeviceKey], hub: Hub) -> list[list[Trip]]:
    return await asyncio.gather(*(_device(port, key, hub) for key in keys))


async def _device(port: int, key: DeviceKey, hub: Hub) -> list[Trip]:
    """One device, until the run ends."""
    connection = await asyncio.open_connection("127.0.0.1", port)
    ask = lambda path, body: _asked(connection, key, path, body)
    await ask("/v1/join", json.dumps({"clients": [key.device]}).encode())
    keys, trips, server = to_bytes({"item": np.arange(NUM_KEYS, dtype=np.int32)}), [], hub.coordinator.server
    while True:
        polled, body = await ask("/v1/poll", b'{"hold": 20}')
        given = read_answer(body)
        if isinstance(given, Wait):
            if given.ended:
                connection[1].close()
                return trips
            await asyncio.sleep(given.seconds)
            continue
        about = given.jobs[0].invitation.about
        sliced, _ = await ask(f"/v1/tasks/{about.task}/slices", keys)
        reported, _ = await ask("/v1/reports", _report(server, about))
        trips.append(Trip(time.perf_counter(), polled, sliced, reported))


def _report(server: Server, about: About) -> bytes:
    """A report of ones."""
    partition = server.algorithm.partition
    ones: Any = lambda shape: np.ones(shape, np.float32)
    update = {
        path: ones((NUM_KEYS, *leaf.shape[1:]) if path in partition.of("keyed") else leaf.shape)
        for path, leaf in partition.server_shapes.items()
        if path in partition.trained_paths
    }
    sent = Contribution(update, ones(()), ones(()), Sums(ones(()), ones(())), ones(()) > 0)
    return server.form.write(about, sent)


async def _asked(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], key: DeviceKey, path: str, body: bytes
) -> tuple[float, bytes]:
    """Seconds until a request was answered, and the answer's body."""
    began = time.perf_counter()
    headers = {"host": "bench", "content-length": len(body), **key.headers("POST", path, body)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection[1].write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    head = (await connection[0].readuntil(b"\r\n\r\n")).lower()
    size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    answer = await connection[0].readexactly(size)
    if head.split()[1] != b"200":
        raise RuntimeError(f"{path} was refused: {answer.decode()}")
    return time.perf_counter() - began, answer
