"""A whole federation on one machine: a server with TLS, devices in processes of their own, each with its share of a
task's clients. `partwise deploy` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.book import VersionRow
from partwise.deployment.certificates import make_certificates
from partwise.deployment.federation import JOURNAL_FILE, found_run
from partwise.deployment.journal import Journal
from partwise.deployment.key_ring import KeyRing
from partwise.runs.folder import Folder
from partwise.tasks import Task
from partwise.types import UserError

LOOK = 0.2  # seconds between looks at the run
PATIENCE = 20  # seconds for a process to end when it is told to


class Processes(NamedTuple):
    """The processes of a trial, and its folder."""

    folder: Folder
    server: subprocess.Popen[bytes]
    devices: Sequence[subprocess.Popen[bytes]]


class HowFar(NamedTuple):
    """How far a trial is."""

    round: int
    records: Sequence[Mapping[str, Any]]  # of the rounds since the last look


def run_trial(
    task: Task,
    config: Config,
    out: str | Path,
    num_devices: int,
    watch: Callable[[HowFar], None] = lambda progress: None,
    told: Callable[[str], None] = lambda text: None,
) -> Folder:
    """Train a task with a server and devices in processes of their own, until the run ends.

    Args:
        task: The task.
        config: All settings; `deploy.population` should be the number of clients.
        out: The folder of the run; `devices/` in it has what the devices have.
        num_devices: How many devices there are. Clients are dealt out evenly.
        watch: Called whenever there is something new.
        told: Called with sentences about what happens.
    """
    store = prepare(task, config).store
    if not 1 <= num_devices <= store.num_clients:
        raise UserError(
            f"{num_devices} devices cannot share {store.num_clients:,} clients: give --devices from 1 to as many"
        )
    folder = found_run(task, config, out)
    keys = _equip(folder, store, num_devices)
    told(f"{store.num_clients:,} clients on {num_devices} devices")
    with _processes(folder, keys) as federation:
        _follow(federation, config.rounds, watch)
    return folder


def _equip(folder: Folder, store: ClientStore, num_devices: int) -> list[Path]:
    """Give every device its share of the clients, and a key that the server knows. Returns the devices' folders."""
    journal = Journal(f"sqlite:///{folder.path / JOURNAL_FILE}", folder.run)
    ring, places = KeyRing(journal), []
    for number, share in enumerate(np.array_split(np.arange(store.num_clients), num_devices)):
        place = folder.path / "devices" / f"{number:03d}"
        place.mkdir(parents=True, mode=0o700)
        store.gather(share).save(place / "examples")
        key = DeviceKey.new()
        key.save(place / "key.pem")
        ring.enroll(KeyRow(key.device, key.public, f"device {number}"), "deploy")
        places.append(place)
    journal.close()
    return places


@contextlib.contextmanager
def _processes(folder: Folder, places: Sequence[Path]) -> Iterator[Processes]:
    """Start all processes, and stop them at the end."""
    certificates = make_certificates(folder.path / "certificates")
    with contextlib.ExitStack() as stack:
        server, url = _start_server(stack, folder, certificates.server, certificates.key)
        devices = [
            _start(
                stack,
                place / "log",
                "join",
                {
                    "--data": f"store:{place / 'examples'}",
                    "--key": place / "key.pem",
                    "--authority": certificates.authority,
                    "--store": place / "own",
                    "--most": 100,
                },
                url,
            )
            for place in places
        ]
        yield Processes(folder, server, devices)


def _start_server(
    stack: contextlib.ExitStack, folder: Folder, certificate: Path, key: Path
) -> tuple[subprocess.Popen[bytes], str]:
    log = folder.path / "server.log"
    server = _start(
        stack,
        log,
        "serve",
        {"--out": folder.path, "--port": 0, "--certificate": certificate, "--key": key},
        "--until-end",
    )
    while True:
        found = [line for line in log.read_text().splitlines() if line.startswith("https://")]
        if found:
            return server, found[0].strip()
        _check_alive(server, log)
        time.sleep(0.05)


def _start(
    stack: contextlib.ExitStack, log: Path, command: str, options: Mapping[str, Any], *more: str
) -> subprocess.Popen[bytes]:
    """A partwise process that writes to a file, and is stopped at the end."""
    given = [text for option in options.items() for text in map(str, option)]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "partwise.cli", command, *more, *given],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the one that started it, which then stops it
        )
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _follow(federation: Processes, rounds: int, watch: Callable[[HowFar], None]) -> None:
    """Look at the run until it ends."""
    folder = federation.folder
    journal, seen = Journal(f"sqlite:///{folder.path / JOURNAL_FILE}", folder.run), 0
    try:
        while True:
            with journal.transaction() as book:
                number = book.round().number
                rows = [book.version(each) for each in range(seen + 1, number + 1)]
            if number > seen:
                watch(HowFar(number, [_record(row) for row in rows if row]))
                seen = number
            if federation.server.poll() is not None and number >= rounds:
                return
            _check_alive(federation.server, folder.path / "server.log", ended=number >= rounds)
            for place, device in enumerate(federation.devices):
                log = folder.path / "devices" / f"{place:03d}" / "log"
                _check_alive(device, log, ended=number >= rounds)
            time.sleep(LOOK)
    finally:
        journal.close()


def _record(row: VersionRow) -> dict[str, Any]:
    return json.loads(row.record)


def _check_alive(process: subprocess.Popen[bytes], log: Path, ended: bool = False) -> None:
    """Raise `UserError` if a process has ended before the run has."""
    code = process.poll()
    if code is not None and not ended:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise UserError(f"a process of the federation has ended (code {code}): {' '.join(last)} See '{log}'")
