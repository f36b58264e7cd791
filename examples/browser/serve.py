"""A small run for the page in this folder: a server that also gives out the page, and three clients in Python.

python serve.py FOLDER                    serve the run in this folder at http://localhost:8000
python serve.py FOLDER --enroll KEY       let the device with this public key take part
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from starlette.staticfiles import StaticFiles

from partwise.deployment.agent import Agent
from partwise.deployment.auth import DeviceKey, KeyRow, device_of
from partwise.deployment.federation import algorithm_of, found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.http_server import application
from partwise.deployment.hub import Hub
from partwise.runs.resolve import resolve
from partwise.tasks import Task

PYTHON_CLIENTS = 3
SETTINGS = {
    "data.num_clients": 60,
    "data.num_items": 100,
    "data.dim": 4,
    "cohort.size": PYTHON_CLIENTS + 1,  # so it waits for a browser
    "rounds": 100,
    "deploy.quorum": 0.75,  # and goes on without it if it leaves
    "deploy.deadline": 60,
}


def main() -> None:
    """Serve the run, or enroll a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--enroll", metavar="KEY", type=public_key)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    task, config = resolve("planted", None, SETTINGS)
    if not given.folder.exists():
        found_run(task, config, given.folder)
    hub, offer, _ = open_run(given.folder)
    if given.enroll:
        hub.keys.enroll(KeyRow(device_of(given.enroll), given.enroll))
        print(f"device {device_of(given.enroll)} may take part")
        return
    app = application(hub, offer)
    app.mount("/", StaticFiles(directory=Path(__file__).parent, html=True))  # the page has the run's origin
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=given.port, log_level="warning"))
    threading.Thread(target=work, args=(server, hub, task), daemon=True).start()
    server.run()


def public_key(text: str) -> bytes:
    """The key that a page shows: 32 bytes in 64 hexadecimal digits."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise argparse.ArgumentTypeError("a public key has 64 hexadecimal digits: copy it from the page")
    return found


def work(server: uvicorn.Server, hub: Hub, task: Task) -> None:
    """Three clients on a device in Python, until the run ends."""
    while not server.started:
        time.sleep(0.05)
    url = f"http://localhost:{server.config.port}"
    print(f"open {url}/", flush=True)
    file = hub.folder.parent / "python.pem"
    key = DeviceKey.load(file) if file.exists() else DeviceKey.new()
    key.save(file)
    hub.keys.enroll(KeyRow(key.device, key.public, label="python"))
    store = task.train.select(task.personal.columns).gather(np.arange(PYTHON_CLIENTS))
    link = HttpLink(url, key)
    for done in Agent(link, algorithm_of(link.offer(), store), store, most=PYTHON_CLIENTS).run():
        print(f"client {done.client} took part in round {done.version + 1}: {done.accepted}", flush=True)


if __name__ == "__main__":
    main()
