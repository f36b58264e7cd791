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
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation

POOL = urllib3.PoolManager(timeout=120)

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
import uvicorn
from partwise.deployment.federation import open_run
from partwise.deployment.http_server import application

folder, port, journal, rules = json.loads(sys.argv[1])
hub, offer, _ = open_run(folder, journal, **rules)
uvicorn.run(application(hub, offer), port=port, log_level="error")
"""
RULES = {"poll": 0.02, "closing": 1.0, "fresh": 1e6, "population": 24}


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def start(folder, port, journal):
    """A server process that answers."""
    given = json.dumps([str(folder), port, journal, RULES])
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, given])
    for _ in range(6000):
        try:
            POOL.request("GET", f"http://127.0.0.1:{port}/healthz", retries=False)
            return process
        except urllib3.exceptions.HTTPError:
            assert process.poll() is None
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_server_killed_twenty_times_trains_the_same_model(tmp_path, database, request, enroll):
    journal = None if database == "sqlite" else request.getfixturevalue("new_postgres")()
    task, config = resolve("planted", None, SETTINGS)
    task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
    prepared = prepare(task, config)
    found_run(task, config, tmp_path, journal)
    hub, *_ = open_run(tmp_path, journal, **RULES)
    keys = [enroll(hub) for _ in range(4)]
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
    pairs = zip(keys, shares, strict=True)
    agents = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
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
    told = [json.loads(hub.version(number + 1).record) for number in range(config.rounds)]
    assert [each["clients"] for each in told] == [record.clients for record in records]
    assert [each["loss"] for each in told] == [record.loss for record in records]
    hub.close()
