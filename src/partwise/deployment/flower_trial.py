"""A whole federation on one machine through Flower: a SuperLink with TLS, nodes that stay, and partwise's app."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from partwise.deployment.certificates import Certificates, make_certificates
from partwise.deployment.trial import Processes, check_alive, start_device, start_process
from partwise.runs.folder import Folder
from partwise.types import UserError

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "partwise-app"
version = "1.0.0"
description = "Serves a run of partwise to the nodes of a SuperLink"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "partwise"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
"""
APP = 'from partwise.deployment.flower_app import client, server\n\n__all__ = ["client", "server"]\n'
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def through_flower(stack: contextlib.ExitStack, folder: Folder, places: Sequence[Path]) -> Processes:
    """A SuperLink, nodes that stay, and a run of partwise's app. It is an engine of `trial.run_trial`."""
    own = folder.path / "flower"
    certificates = make_certificates(folder.path / "certificates")
    port = _free_port()
    env = {**QUIET, "PATH": _path(), "FLWR_HOME": str(own / "home")}
    _start_superlink(stack, own, port, certificates, env)
    url = f"flower+https://127.0.0.1:{port}"
    nodes = [start_device(stack, url, place, certificates.authority) for place in places]
    run = _start_run(stack, folder, own, f"127.0.0.1:{port}", certificates, env)
    return Processes(folder, run, nodes)


def write_app(out: Path, **given: str | None) -> Path:
    """Partwise's app for `flwr run`, in the folder of a run. Returns the app's folder.

    Args:
        out: The run's folder.
        **given: `journal`, `files` and `place`, as for `federation.open_run`.
    """
    app = out / "app"
    app.mkdir(parents=True, exist_ok=True)
    config = {"out": str(out.absolute()), **{name: value or "" for name, value in given.items()}}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in config.items()]
    (app / "pyproject.toml").write_text(PYPROJECT + "".join(lines))
    (app / "app.py").write_text(APP)
    return app


def _start_superlink(
    stack: contextlib.ExitStack, own: Path, port: int, certificates: Certificates, env: dict[str, str]
) -> None:
    own.mkdir(parents=True)
    tls = {
        "--ssl-ca-certfile": certificates.authority,
        "--ssl-certfile": certificates.server,
        "--ssl-keyfile": certificates.key,
    }
    command = [_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation", "--database", str(own / "superlink.db")]
    command += [text for option in tls.items() for text in map(str, option)]
    superlink = start_process(stack, own / "superlink.log", command, env)
    while not _listens(port):
        check_alive(superlink, own / "superlink.log")
        time.sleep(0.1)


def _start_run(
    stack: contextlib.ExitStack,
    folder: Folder,
    own: Path,
    address: str,
    certificates: Certificates,
    env: dict[str, str],
) -> subprocess.Popen[bytes]:
    """The command that starts the run and follows it to its end."""
    home = Path(env["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    trusted = json.dumps(str(certificates.authority.absolute()))
    connection = f'[superlink.trial]\naddress = "{address}"\nroot-certificates = {trusted}\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "trial"\n\n{connection}')
    command = [_program("flwr"), "run", str(write_app(folder.path)), "trial", "--stream"]
    return start_process(stack, folder.path / "server.log", command, env)


def _program(name: str) -> str:
    """A program of Flower, from the environment that this process runs in."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise UserError(f"there is no program '{name}': `pip install 'partwise[flower]'`")
    return found


def _path() -> str:
    """The environment's programs first: those of Flower start each other by name, also if nobody activated it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
