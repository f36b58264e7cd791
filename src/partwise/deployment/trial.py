"""A whole federation on one machine: a server with TLS, devices in processes of their own, each with its share of a
task's clients. `partwise deploy` runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.count_heat import counting
from partwise.algorithms.registry import prepare
from partwise.config.parts import HEATS
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.book import VersionRow
from partwise.deployment.certificates import Certificates, make_certificates
from partwise.deployment.federation import found_run
from partwise.deployment.helper import TOKEN_FILE
from partwise.deployment.journal_place import journal_of
from partwise.deployment.key_ring import KeyRing
from partwise.runs.folder import Folder
from partwise.runs.heat_counts import with_counts
from partwise.tasks import Task
from partwise.types import UserError

COUNTS = "counts"  # folder of the run that counts heat, in that of the run that trains
LOOK = 0.2  # seconds between looks at the run
PATIENCE = 20  # seconds for a process to end when it is told to
PARTWISE = (sys.executable, "-m", "partwise.cli")


class Processes(NamedTuple):
    """The processes of a trial, and its folder."""

    folder: Folder
    server: subprocess.Popen[bytes]  # it ends when the run has ended
    devices: Sequence[subprocess.Popen[bytes]]


# Starts all processes, given the folder of the run and those of the devices; the stack stops them.
Engine = Callable[[contextlib.ExitStack, Folder, Sequence[Path]], Processes]


class HowFar(NamedTuple):
    """How far a trial is."""

    round: int
    records: Sequence[Mapping[str, Any]]  # of the rounds since the last look


def over_http(stack: contextlib.ExitStack, folder: Folder, places: Sequence[Path]) -> Processes:
    """A server with TLS, and devices whose keys it knows."""
    certificates = make_certificates(folder.path / "certificates")
    _enroll(folder, places)
    helper = _start_helper(stack, folder, certificates)
    server, url = _start_server(stack, folder, certificates, helper)
    keys = [{"--key": place / "key.pem"} for place in places]
    joined = [
        start_device(stack, url, place, certificates.authority, key)
        for place, key in zip(places, keys, strict=True)
    ]
    return Processes(folder, server, joined)


def run_trial(
    task: Task,
    config: Config,
    out: str | Path,
    num_devices: int,
    watch: Callable[[HowFar], None] = lambda progress: None,
    told: Callable[[str], None] = lambda text: None,
    engine: Engine = over_http,
) -> Folder:
    """Train a task with a server and devices in processes of their own, until the run ends. If heat is to be
    counted with noise, the devices count it first, in a run of its own.

    Args:
        task: The task.
        config: All settings; `deploy.population` should be the number of clients.
        out: The folder of the run; `devices/` in it has what the devices have.
        num_devices: How many devices there are. Clients are dealt out evenly.
        watch: Called whenever there is something new.
        told: Called with sentences about what happens.
        engine: What carries the messages: `over_http`, or `deployment.flower_trial.through_flower`.
    """
    store = prepare(task, config).store
    if not 1 <= num_devices <= store.num_clients:
        raise UserError(
            f"{num_devices} devices cannot share {store.num_clients:,} clients: give --devices from 1 to as many"
        )
    if config.privacy.heat == "gaussian" and HEATS not in task.train.info:
        told("counting heat")
        place = Path(out) / COUNTS
        run_trial(task, counting(task, config), place, num_devices, told=told, engine=engine)
        task, config = with_counts(task, config.changed({"server.counts": str(place)}))
    folder = found_run(task, config, out)
    places = deal(folder, store, num_devices)
    told(f"{store.num_clients:,} clients on {num_devices} devices")
    with contextlib.ExitStack() as stack:
        _follow(engine(stack, folder, places), config.rounds, watch)
    return folder


def deal(folder: Folder, store: ClientStore, num_devices: int) -> list[Path]:
    """Give every device its share of the clients. Returns the devices' folders."""
    places = []
    for number, share in enumerate(np.array_split(np.arange(store.num_clients), num_devices)):
        place = folder.path / "devices" / f"{number:03d}"
        place.mkdir(parents=True, mode=0o700)
        mine = store.gather(share)
        about = {name: value for name, value in mine.info.items() if name != HEATS}
        dataclasses.replace(mine, info=about).save(place / "examples")
        places.append(place)
    return places


def _enroll(folder: Folder, places: Sequence[Path]) -> None:
    """Give every device a key that the server knows."""
    journal = journal_of(folder)
    ring = KeyRing(journal)
    for place in places:
        key = DeviceKey.new()
        key.save(place / "key.pem")
        ring.enroll(KeyRow(key.device, key.public, f"device {place.name}"), "deploy")
    journal.close()


def start_device(
    stack: contextlib.ExitStack, url: str, place: Path, authority: Path, more: Mapping[str, Any] | None = None
) -> subprocess.Popen[bytes]:
    """A device with what is in its folder."""
    given = {
        "--data": f"store:{place / 'examples'}",
        "--authority": authority,
        "--store": place / "own",
        "--most": 100,
        **(more or {}),
    }
    return start_process(stack, place / "log", [*PARTWISE, "join", url, *_flat(given)])


def _start_server(
    stack: contextlib.ExitStack, folder: Folder, certificates: Certificates, more: Mapping[str, Any]
) -> tuple[subprocess.Popen[bytes], str]:
    log, given = folder.path / "server.log", {"--certificate": certificates.server, "--key": certificates.key}
    options = _flat({"--out": folder.path, "--port": 0, **given, **more})
    server = start_process(stack, log, [*PARTWISE, "serve", *options, "--until-end"])
    return server, _url(server, log)


def _start_helper(stack: contextlib.ExitStack, folder: Folder, certificates: Certificates) -> dict[str, Any]:
    """The second server, if the run has two. Returns what the first one is told of it."""
    if folder.config().privacy.sums != "two_servers":
        return {}
    place = folder.path / "helper"
    place.mkdir(mode=0o700)
    given = {"--certificate": certificates.server, "--key": certificates.key, "--out": place, "--port": 0}
    helper = start_process(stack, place / "log", [*PARTWISE, "helper", *_flat(given), "--least", "1"])
    url = _url(helper, place / "log")
    token = {"--helper-token": place / TOKEN_FILE, "--helper-authority": certificates.authority}
    return {"--helper": url, **token}


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server listens, once it does."""
    while True:
        found = [line for line in log.read_text().splitlines() if line.startswith("https://")]
        if found:
            return found[0].strip()
        check_alive(process, log)
        time.sleep(0.05)


def _flat(options: Mapping[str, Any]) -> list[str]:
    return [text for option in options.items() for text in map(str, option)]


def start_process(
    stack: contextlib.ExitStack, log: Path, command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process that writes to a file, and is stopped at the end."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
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
    journal, seen = journal_of(folder), 0
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
            check_alive(federation.server, folder.path / "server.log", ended=number >= rounds)
            for place, device in enumerate(federation.devices):
                log = folder.path / "devices" / f"{place:03d}" / "log"
                check_alive(device, log, ended=number >= rounds)
            time.sleep(LOOK)
    finally:
        journal.close()


def _record(row: VersionRow) -> dict[str, Any]:
    return json.loads(row.record)


def check_alive(process: subprocess.Popen[bytes], log: Path, ended: bool = False) -> None:
    """Raise `UserError` if a process has ended before the run has."""
    code = process.poll()
    if code is not None and not ended:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise UserError(f"a process of the federation has ended (code {code}): {' '.join(last)} See '{log}'")
