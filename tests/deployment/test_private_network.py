"""Differential privacy over a network: the model is the plain backend's with the same noise, bit for bit."""

from __future__ import annotations

import json
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.algorithm import init_server
from partwise.algorithms.registry import prepare
from partwise.checkpoint import from_bytes
from partwise.config.protection import protection
from partwise.deployment import server_noise
from partwise.deployment.agent import Agent
from partwise.deployment.federation import found_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.offered import algorithm_of
from partwise.device import Device
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.resolve import resolve
from partwise.server.cohort import Cohort
from partwise.server.messages import send
from partwise.server.private_sum import BUFFER
from partwise.server.round import Server
from partwise.server.total import PUBLIC
from partwise.simulation import plain as simulation
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

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

    def begin(self, enroll):
        """Two devices that share the clients: their threads, and links."""
        links = [HttpLink(self.url, enroll(self.hub), hold=0.2) for _ in range(2)]
        threads = []
        for link, share in zip(links, np.array_split(np.arange(self.store.num_clients), 2), strict=True):
            mine = self.store.gather(share)
            agent = Agent(link, algorithm_of(self.offer, mine), mine, most=100)
            threads.append(threading.Thread(target=lambda agent=agent: list(agent.run()), daemon=True))
            threads[-1].start()
        return threads, links

    def finish(self, threads) -> None:
        """Wait until the run ends."""
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive()
        assert self.hub.round().phase == "ended"

    def take_part(self, enroll) -> None:
        self.finish(self.begin(enroll)[0])

    def counted(self, number) -> list[str]:
        """The clients in the sum of a round."""
        attempt = self.hub.records()[number]["attempt"]
        tasks = self.hub.clerk.do(lambda book: book.tasks("train", number, attempt))
        return [name for task in tasks if task.counted is not None for name in task.names]

    def check(self, drawn=None, exactly=True) -> None:
        """That the model, and all that the server carries, is the plain backend's over the same cohorts, with the
        same noise."""
        places = {str(name): place for place, name in enumerate(self.store.client_ids.tolist())}
        cohorts = [[places[name] for name in self.counted(number)] for number in range(self.config.rounds)]
        prepared, seed = self.prepared, self.config.seed
        plain = PlainSimulation(prepared.build, prepared.rates, self.store, prepared.recruiting, seed=seed)
        plain._server = Server(plain.algorithm, noise=self.hub.coordinator.server.noise)
        with pytest.MonkeyPatch.context() as patch:
            if drawn:
                patch.setattr(server_noise, "secret_normals", lambda count: drawn.pop(0))
            cohort = lambda wanted, counts, seed, number: Cohort(np.array(cohorts[number]), 0, 0, 0)
            patch.setattr(simulation, "recruit", cohort)
            list(plain.run(self.config.rounds))
        found, rtol = self.hub.state(self.config.rounds), 0 if exactly else 1e-4
        for path, leaf in plain.state.params.items():
            np.testing.assert_allclose(np.asarray(found.params[path]), np.asarray(leaf), rtol, rtol)
        for name, words in plain.state.aggregator.items():
            for word, value in words.items():
                np.testing.assert_allclose(found.aggregator[name][word], np.asarray(value), rtol, rtol)


@pytest.fixture
def drawn(monkeypatch):
    """All secret numbers that are drawn, in this order."""
    every, draw = [], server_noise.secret_normals

    def remembered(count):
        every.append(draw(count))
        return every[-1]

    monkeypatch.setattr(server_noise, "secret_normals", remembered)
    return every


@pytest.fixture
def promised(founded):
    """A function that founds a run and serves it."""
    return lambda settings=(), **rules: founded(Promised, PRIVATE | dict(settings), **rules)


def test_clients_wait_for_their_next_round(promised, enroll):
    run = promised(APART | {"rounds": 4, "cohort.size": 6})
    run.take_part(enroll)
    cohorts = [set(run.counted(number)) for number in range(4)]
    for first in (0, 1):
        assert len(set().union(*cohorts[first : first + 3])) == 18
    run.check()


CORRELATED = APART | {"privacy.noise": 0.5, "privacy.mechanism": "blt"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"privacy.mechanism": "banded", "deploy.reports": "sum"},
        {"privacy.sums": "masked", "serving.way": "broadcast"},
    ],
)
def test_noise_takes_back_noise_of_earlier_rounds(promised, enroll, drawn, more):
    run = promised(CORRELATED | more)
    run.take_part(enroll)
    assert len({name for number in range(3) for name in run.counted(number)}) == 12  # clients wait
    found = run.hub.state(run.config.rounds).aggregator
    assert np.abs(found[f"{BUFFER}0"]["item"]).min() > 0
    run.check(drawn, exactly="deploy.reports" not in more)  # sites add up in another order


def test_buffers_of_noise_are_kept_once_for_every_version(promised, enroll, drawn, monkeypatch, wait_until):
    """A server cannot publish what it has made, draws other noise, and is started again. Only the noise of
    published versions is taken back."""
    run = promised(CORRELATED)
    lost, numbers, once = [], len(run.hub.state(0).params) + 3, threading.Lock()
    commit = run.hub.coordinator.commit

    def fails(book, due, *given):
        if due.round.number == 1 and once.acquire(blocking=False):
            lost.extend(drawn[-numbers:])
            raise RuntimeError("killed")
        return commit(book, due, *given)

    monkeypatch.setattr(run.hub.coordinator, "commit", fails)
    threads, links = run.begin(enroll)
    wait_until(lambda: run.hub.round().number == 2)
    run.server.close()
    now = run.again()
    for link in links:
        link.url = now.url
    now.finish(threads)
    assert len(lost) == numbers
    assert len(drawn) == 4 * numbers
    now.check([each for each in drawn if not any(each is other for other in lost)])


def test_buffers_of_noise_are_in_no_file_that_others_read(promised, enroll, tmp_path):
    run = promised(CORRELATED | {"serving.way": "broadcast"})
    run.take_part(enroll)
    run.hub.tick()
    paths = [path for path in (tmp_path / "run" / "files").rglob("*") if path.is_file()]
    paths.append(tmp_path / "run" / "model.safetensors")
    leaves = set(run.prepared.build(run.prepared.rates).partition.server_paths)
    assert len(paths) > run.config.rounds
    for path in paths:
        arrays, _ = from_bytes(path.read_bytes())
        assert {name.split(":")[0] for name in arrays} <= leaves
    assert (tmp_path / "run" / "versions").stat().st_mode & 0o777 == 0o700
    for number in range(1, run.config.rounds + 1):
        kept = run.hub.state(number).aggregator
        secret = np.asarray(kept[f"{BUFFER}0"]["item"]).tobytes()
        assert all(secret not in path.read_bytes() for path in paths)
        assert any(secret in path.read_bytes() for path in (tmp_path / "run" / "versions").iterdir())


def test_two_servers_have_no_common_noise_to_take_back(tmp_path):
    changes = CORRELATED | {"privacy.sums": "two_servers", "privacy.keys": 5}
    task, config = resolve("planted", None, PRIVATE | changes)
    with pytest.raises(UserError, match="of two servers each has its own"):
        found_run(task, config, tmp_path / "run")


FOLLOWING = {"privacy.clip_quantile": 0.5, "privacy.clip_rate": 1.0, "privacy.noise": 0.3}


@pytest.mark.parametrize("way", ["on_demand", "broadcast", "pregenerated"])
def test_devices_are_told_the_clip_that_follows_the_norms(promised, enroll, drawn, way):
    run = promised(FOLLOWING | {"serving.way": way})
    run.take_part(enroll)
    clips = [float(run.hub.state(number).aggregator[PUBLIC]["clip"]) for number in range(4)]
    assert clips[0] == 0.5
    assert len(set(clips)) == 4
    run.check(drawn)


def test_a_site_is_told_the_clip_too(promised, enroll):
    run = promised(FOLLOWING | {"privacy.noise": 0.0, "deploy.reports": "sum"})
    run.take_part(enroll)
    run.check(exactly=False)


def test_a_device_that_is_not_told_the_clip_declines():
    task, config = resolve("planted", None, PRIVATE | FOLLOWING)
    prepared = prepare(task, config)
    algorithm = prepared.build(prepared.rates)
    device, state = Device(algorithm), init_server(algorithm, round_rng(0, INIT_ROUND))
    mine = prepared.store.gather([0])
    asked = device.ask(mine)
    given = (algorithm.partition, state.params, asked.keys, round_rng(0, 0))
    assert device.report(send(*given, public={"clip": 0.5}), mine, asked)
    with pytest.raises(UserError, match="the slices do not say that of this round"):
        device.report(send(*given), mine, asked)


FILTERED = {
    "privacy.rows": "filtered",
    "privacy.rows_share": 0.5,
    "privacy.rows_threshold": 1.0,
    "privacy.noise": 0.2,
}


def test_rows_are_filtered_by_secret_counts(promised, enroll, drawn):
    run = promised(FILTERED | {"cohort.size": 8})
    run.take_part(enroll)
    before, after = (np.asarray(run.hub.state(number).params["item"]) for number in (0, 3))
    moved = (before != after).any(axis=1)
    assert moved.any()
    run.check(drawn)


def test_a_site_filters_rows_as_its_clients_would(promised, enroll):
    run = promised(FILTERED | {"privacy.noise": 0.0, "deploy.reports": "sum"})
    run.take_part(enroll)
    run.check(exactly=False)


def test_a_filtered_clip_follows_the_norms(promised, enroll, drawn):
    run = promised(FILTERED | FOLLOWING | {"rounds": 2})
    run.take_part(enroll)
    assert float(run.hub.state(2).aggregator[PUBLIC]["clip"]) != 0.5
    run.check(drawn)


def test_held_out_clients_evaluate_and_are_promised_nothing(promised, enroll, drawn):
    """The population of the promise are those who can be drawn."""
    run = promised(
        {
            "privacy.noise": 0.5,
            "cohort.sampling": "poisson",
            "deploy.held_out": 0.3,
            "deploy.evaluate_every": 1,
        }
    )
    rules, names = run.hub.coordinator.rules, [str(name) for name in run.store.client_ids.tolist()]
    apart = {name for name in names if rules.is_held_out(name)}
    assert 2 < len(apart) < 20
    assert run.config.deploy.population == rules.drawn_from == len(names) - len(apart)
    run.take_part(enroll)
    for number in range(3):
        assert not apart & set(run.counted(number))
        record, version = run.hub.records()[number], run.hub.version(number + 1)
        assert record["privacy"] == protection(run.config, 0).spent(number + 1)
        assert json.loads(version.metrics)
    run.check(drawn)


def test_a_round_waits_until_chances_are_as_small_as_was_promised(promised):
    run = promised({"privacy.noise": 0.5, "cohort.sampling": "poisson", "deploy.held_out": 0.3})
    rules, hub = run.hub.coordinator.rules, run.hub
    train = [str(name) for name in run.store.client_ids.tolist() if not rules.is_held_out(str(name))]
    apart = [name for name in map(str, range(10_000, 10_100)) if rules.is_held_out(name)]
    for device, names in {"many": apart, "most": train[1:]}.items():
        hub.join(device, names).result()
        hub.poll(device).result()
    hub.tick()
    assert hub.round().phase == "waiting"
    hub.join("last", train[:1]).result()
    hub.poll("last").result()
    hub.tick()
    assert hub.round().phase == "open"
