"""The server as a process of its own, killed again and again: every report counts once."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import urllib3

from partwise.algorithms.registry import prepare
from partwise.deployment.agent import Agent
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.coordinator import Rules
from partwise.deployment.federation import open_hub
from partwise.deployment.http_link import HttpLink
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation

pytestmark = pytest.mark.slow

SETTINGS = {
    "data.num_clients": 30,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 5,
    "rounds": 100,
}
PROGRAM = """
import json, sys
import numpy as np
import uvicorn
from partwise.algorithms.registry import prepare
from partwise.deployment.coordinator import Rules
from partwise.deployment.federation import open_hub
from partwise.deployment.http_server import application
from partwise.runs.resolve import resolve

settings, folder, port, journal = json.loads(sys.argv[1])
task, config = resolve("planted", None, settings)
task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
rules = Rules(prepare(task, config).recruiting, config.seed, config.rounds, quorum=5, poll=0.02, closing=1)
rules = rules._replace(fresh=1e6, at_least=task.train.num_clients)
hub, offer = open_hub(task, config, rules, folder, journal)
uvicorn.run(application(hub, offer), port=port, log_level="error")
"""


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def start(folder, port, journal):
    """A server process that answers."""
    given = json.dumps([SETTINGS, str(folder), port, journal])
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, given])
    for _ in range(600):
        try:
            urllib3.request("GET", f"http://127.0.0.1:{port}/healthz", retries=False)
            return process
        except urllib3.exceptions.HTTPError:
            assert process.poll() is None
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_server_killed_twenty_times_trains_the_same_model(tmp_path, database, request):
    journal = None if database == "sqlite" else request.getfixturevalue("new_postgres")()
    task, config = resolve("planted", None, SETTINGS)
    task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
    prepared = prepare(task, config)
    rules = Rules(prepared.recruiting, config.seed, config.rounds, quorum=5)
    hub, _ = open_hub(task, config, rules, tmp_path, journal)
    keys = [DeviceKey.new() for _ in range(4)]
    for key in keys:
        hub.journal.enroll(KeyRow(key.device, key.public))
    port, done = free_port(), []
    process = start(tmp_path, port, journal)

    def work(key, places):
        link = HttpLink(f"http://127.0.0.1:{port}", key)
        agent = Agent(
            link,
            prepared.build(prepared.rates),
            prepared.store.gather(places),
            sleep=lambda s: time.sleep(min(s, 0.2)),
        )
        done.extend(agent.run())

    shares = np.array_split(np.arange(prepared.store.num_clients), 4)
    agents = [threading.Thread(target=work, args=pair) for pair in zip(keys, shares, strict=True)]
    for agent in agents:
        agent.start()
    moments = random.Random(7)
    for _ in range(20):
        time.sleep(moments.uniform(0.05, 1.0))
        assert hub.round().phase != "ended"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process = start(tmp_path, port, journal)
    for agent in agents:
        agent.join(timeout=300)
        assert not agent.is_alive()
    process.kill()
    process.wait()
    plain = PlainSimulation(
        prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    records = [record for call in plain.run(config.rounds) for record in call]
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(config.rounds).params[path]), np.asarray(leaf))
    with hub.journal.transaction() as book:
        told = [json.loads(book.version(number + 1).record) for number in range(config.rounds)]
        counted = [len([t for t in book.tasks(n, 0) if t.state == "reported"]) for n in range(config.rounds)]
    assert [each["clients"] for each in told] == [record.clients for record in records]
    assert counted == [5] * config.rounds
    hub.journal.close()
