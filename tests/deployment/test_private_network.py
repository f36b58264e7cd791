"""Differential privacy over a network: the model is the plain backend's with the same noise, bit for bit."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.algorithms.registry import prepare
from partwise.deployment.agent import Agent
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.offered import algorithm_of
from partwise.runs.resolve import resolve
from partwise.server.cohort import Cohort
from partwise.simulation import plain as simulation
from partwise.simulation.plain import PlainSimulation

PRIVATE = {
    "data.num_clients": 30,
    "data.num_items": 15,
    "data.mean_examples": 10,
    "data.dim": 2,
    "cohort.size": 4,
    "rounds": 3,
    "server.schedule": "constant",
    "server.weighting": "uniform",
    "privacy.clip": 0.5,
    "privacy.noise": 0.0,
}
APART = {"cohort.sampling": "apart:3"}


class Promised(NamedTuple):
    """A run that promises privacy, on a real server."""

    prepared: Any
    config: Any
    hub: Any
    offer: Any
    url: str
    server: Any  # what stops it
    again: Any  # starts another one in the same folder

    @property
    def store(self):
        return self.prepared.store

    def take_part(self, enroll, number=2) -> None:
        """Devices that share the clients, in threads, until the run ends."""
        threads = []
        for share in np.array_split(np.arange(self.store.num_clients), number):
            link, mine = HttpLink(self.url, enroll(self.hub), hold=0.2), self.store.gather(share)
            agent = Agent(link, algorithm_of(self.offer, mine), mine, most=100)
            threads.append(threading.Thread(target=lambda agent=agent: list(agent.run()), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
            assert not thread.is_alive()
        assert self.hub.round().phase == "ended"

    def counted(self, number) -> list[str]:
        """The clients in the sum of a round."""
        attempt = self.hub.records()[number]["attempt"]
        tasks = self.hub.clerk.do(lambda book: book.tasks("train", number, attempt))
        return [name for task in tasks if task.counted is not None for name in task.names]

    def check(self) -> None:
        """That the model, and all that the server carries, is the plain backend's over the same cohorts."""
        places = {str(name): place for place, name in enumerate(self.store.client_ids.tolist())}
        cohorts = [[places[name] for name in self.counted(number)] for number in range(self.config.rounds)]
        prepared, seed = self.prepared, self.config.seed
        plain = PlainSimulation(prepared.build, prepared.rates, self.store, prepared.recruiting, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            cohort = lambda wanted, counts, seed, number: Cohort(np.array(cohorts[number]), 0, 0, 0)
            patch.setattr(simulation, "recruit", cohort)
            list(plain.run(self.config.rounds))
        found = self.hub.state(self.config.rounds)
        for path, leaf in plain.state.params.items():
            np.testing.assert_array_equal(np.asarray(found.params[path]), np.asarray(leaf))
        for name, words in plain.state.aggregator.items():
            for word, value in words.items():
                np.testing.assert_array_equal(np.asarray(found.aggregator[name][word]), np.asarray(value))


@pytest.fixture
def promised(tmp_path, serve):
    """A function that founds a run and serves it; all servers are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(settings=(), **rules):
            found, config = resolve("planted", None, PRIVATE | dict(settings))
            found = found._replace(train=found.train.take(np.argsort(found.train.client_ids.astype(str))))
            folder = found_run(found, config, tmp_path / "run")
            return go_on(prepare(found, folder.config()), folder.config(), **rules)

        def go_on(prepared, config, **rules):
            opened = open_run(tmp_path / "run", **{"fresh": 1e6, "poll": 0.02} | rules)
            server = stack.enter_context(contextlib.ExitStack())
            server.callback(opened.hub.close)
            url = server.enter_context(serve(opened.hub, opened.offer, files=opened.files))
            again = lambda: go_on(prepared, config, **rules)
            return Promised(prepared, config, opened.hub, opened.offer, url, server, again)

        yield start


def test_clients_wait_for_their_next_round(promised, enroll):
    run = promised(APART | {"rounds": 4, "cohort.size": 6})
    run.take_part(enroll)
    cohorts = [set(run.counted(number)) for number in range(4)]
    for first in (0, 1):
        assert len(set().union(*cohorts[first : first + 3])) == 18
    run.check()
