"""A real server and agents that talk to it over HTTP: the model is the plain backend's, bit for bit."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest
import urllib3

from partwise.algorithms.registry import prepare
from partwise.deployment import federation
from partwise.deployment.agent import Agent
from partwise.deployment.auth import DeviceKey
from partwise.deployment.certificates import make_certificates
from partwise.deployment.federation import algorithm_of, found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.http_server import TICK, _Application
from partwise.deployment.jobs import Wait
from partwise.deployment.link import UnreachableError
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

POOL = urllib3.PoolManager(timeout=120)

ROUNDS, COHORT = 3, 4
SMALL = {
    "data.num_clients": 30,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": COHORT,
    "rounds": ROUNDS,
    "server.schedule": "constant",
}


@pytest.fixture(scope="module")
def setting():
    """Task and configuration, clients sorted by name, as a coordinator draws them."""
    task, config = resolve("planted", None, SMALL)
    names = [str(name) for name in task.train.client_ids.tolist()]
    task = task._replace(train=task.train.take(np.argsort(names)))
    return task, config, prepare(task, config)


@pytest.fixture(scope="module")
def plain(setting):
    _, config, prepared = setting
    simulation = PlainSimulation(
        prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    return [record for call in simulation.run(ROUNDS) for record in call], simulation.state


@pytest.fixture(params=["sqlite", "postgresql"])
def journal(request):
    return None if request.param == "sqlite" else request.getfixturevalue("new_postgres")()


def opened(setting, folder, journal=None, **rules):
    """The hub and the offer of a run in this folder, which is founded if it is not there."""
    task, config, prepared = setting
    if not (folder / "config.toml").exists():
        found_run(task, config, folder, journal)
    rules = {"fresh": 1e6, "poll": 0.02, "population": prepared.store.num_clients, **rules}
    return open_run(folder, journal, **rules)[:2]


def test_two_agents_train_the_plain_backends_model(setting, plain, tmp_path, journal, serve, enroll):
    prepared = setting[2]
    hub, offer = opened(setting, tmp_path, journal)
    done, certificates = [], make_certificates(tmp_path)

    def work(url, places):
        store = prepared.store.gather(places)
        link = HttpLink(url, enroll(hub), certificates.authority)
        algorithm = algorithm_of(link.offer(), store)
        done.extend(Agent(link, algorithm, store, most=3).run())

    with serve(hub, offer, certificates) as url:
        halves = np.array_split(np.arange(prepared.store.num_clients), 2)
        agents = [threading.Thread(target=work, args=(url, half), daemon=True) for half in halves]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join(timeout=300)
            assert not agent.is_alive()
        with pytest.raises(urllib3.exceptions.HTTPError):  # nobody signed the server's certificate
            POOL.request("GET", f"{url}/healthz", retries=False)
        trusting = urllib3.PoolManager(ca_certs=str(certificates.authority))
        health = json.loads(trusting.request("GET", f"{url}/healthz").data)
    records, state = plain
    assert health == {"run": offer.run, "version": ROUNDS, "phase": "ended"}
    assert len(done) == ROUNDS * COHORT
    assert all(each.accepted for each in done)
    for path, leaf in state.params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(ROUNDS).params[path]), np.asarray(leaf))
    told = [json.loads(hub.version(number + 1).record) for number in range(ROUNDS)]
    assert [each["loss"] for each in told] == [record.loss for record in records]
    assert [each["clients"] for each in told] == [record.clients for record in records]
    hub.close()


def test_a_hub_goes_on_where_another_was_killed(setting, plain, tmp_path, serve, enroll):
    """Whatever the first one knew is in the journal and in the folder."""
    prepared, key = setting[2], None
    algorithm = prepared.build(prepared.rates)
    for stop in (1, 5, ROUNDS * COHORT):
        hub, offer = opened(setting, tmp_path)
        key = key or enroll(hub)
        with serve(hub, offer) as url:
            agent = Agent(HttpLink(url, key), algorithm, prepared.store)
            for number, _ in enumerate(agent.run(), 1):
                if number == stop and hub.round().number < ROUNDS - 1:
                    break
        hub.close()
    hub, _ = opened(setting, tmp_path)
    assert hub.round().phase == "ended"
    for path, leaf in plain[1].params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(ROUNDS).params[path]), np.asarray(leaf))


@pytest.fixture(scope="module")
def quiet(setting, tmp_path_factory, serve):
    """A server at which nobody works."""
    hub, offer = opened(setting, tmp_path_factory.mktemp("quiet"))
    with serve(hub, offer) as url:
        yield url, hub


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/poll", b"", 400, "malformed"),
        ("/v1/poll", b'{"ready": 1, "most": 1}', 400, "malformed"),
        ("/v1/poll", b"[]", 400, "malformed"),
        ("/v1/join", b"{}", 400, "malformed"),
        ("/v1/join", b'{"clients": "a"}', 400, "malformed"),
        ("/v1/join", b'{"clients": [""]}', 400, "malformed"),
        ("/v1/join", b'{"clients": [' + b'"a",' * 300_000 + b'"a"]}', 413, "too large"),
        ("/v1/reports", b"nothing", 400, "malformed"),
        ("/v1/reports", bytes(4 << 20), 413, "too large"),
        ("/v1/tasks/none/slices", b"nothing", 400, "malformed"),
    ],
)
def test_bad_requests_are_refused_by_name(quiet, enroll, path, body, status, reason):
    url, hub = quiet
    answer = POOL.request("POST", url + path, body=body, headers=enroll(hub).headers("POST", path, body))
    assert (answer.status, json.loads(answer.data)["reason"]) == (status, reason)


BODY = b'{"ready": true, "most": 1}'


def polled(url, headers, body=BODY):
    """Status and words of the answer to a poll."""
    answer = POOL.request("POST", f"{url}/v1/poll", body=body, headers=headers)
    return answer.status, json.loads(answer.data).get("what", "")


def test_who_may_not_ask_is_refused(quiet, enroll):
    url, hub = quiet
    key, other = enroll(hub), DeviceKey.new()
    sign = lambda key, **more: key.headers("POST", "/v1/poll", BODY, **more)
    assert polled(url, sign(key))[0] == 200
    revoked, expired = enroll(hub, revoked=1.0), enroll(hub, expires=1.0)
    once = sign(key)
    assert polled(url, once)[0] == 200
    for headers, status, words in (
        ({}, 401, "not signed"),
        (sign(other), 401, "not enrolled"),
        (sign(other) | {"partwise-device": key.device}, 401, "does not fit"),
        (sign(key) | {"partwise-signature": "@"}, 401, "does not fit"),
        (sign(key, now=time.time() - 400), 401, "seconds off"),
        (sign(key) | {"partwise-time": "soon"}, 401, "does not fit"),
        (sign(revoked), 403, "was revoked"),
        (sign(expired), 403, "has expired"),
        (once, 409, "before"),
        (key.headers("POST", "/v1/join", BODY), 401, "does not fit"),
        (key.headers("GET", "/v1/poll", BODY), 401, "does not fit"),
        (key.headers("POST", "/v1/poll", b"{}"), 401, "does not fit"),
    ):
        found = polled(url, headers)
        assert found[0] == status, words
        assert words in found[1]


def test_a_client_of_another_device_is_refused_and_nothing_joins(quiet, enroll):
    url, hub = quiet
    HttpLink(url, enroll(hub)).join(["mine"])
    assert HttpLink(url, enroll(hub)).join(["new", "mine"]) == ["mine"]
    assert HttpLink(url, enroll(hub)).join(["new"]) == []


def test_names_that_are_not_allowed_are_named_and_nothing_joins(quiet, enroll):
    url, hub = quiet
    link, wrong = HttpLink(url, enroll(hub)), ["", "a\nb", "\ud800", "x" * 201]
    assert link.join(["fine", *wrong]) == wrong
    assert all(link.join([name]) == [name] for name in wrong)
    assert HttpLink(url, enroll(hub)).join(["fine"]) == []
    with pytest.raises(UserError, match="one of client"):
        link._good("POST", "/v1/tasks/none/decline", b'{"reason": "\\ud800"}')


def test_clients_move_to_a_new_device_when_the_key_of_the_old_one_is_revoked(quiet, enroll):
    url, hub = quiet
    lost, found = enroll(hub), enroll(hub)
    HttpLink(url, lost).join(["moves"])
    hub.keys.revoke(lost.device)
    HttpLink(url, found).join(["stays", "moves"])
    hub.poll(found.device).result()
    there = hub.clerk.do(lambda book: book.present(0.0))
    assert [row.name for row in there if row.device == found.device] == ["moves", "stays"]


def test_a_key_survives_its_file_and_others_are_refused(tmp_path):
    key = DeviceKey.new()
    key.save(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    assert DeviceKey.load(tmp_path / "key.pem").device == key.device
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(UserError, match="is no device key"):
        DeviceKey.load(tmp_path / "text")


def test_a_server_that_is_not_there_is_tried_again(setting, quiet, enroll):
    """First it does not answer, then it does."""
    _, _, prepared = setting
    waits = []

    class Flaky(HttpLink):
        def _request(self, method, path, body=b"", most=1 << 20):
            if path == "/v1/poll" and len(waits) < 3:
                raise UnreachableError("not yet")
            if path == "/v1/poll":
                raise KeyboardInterrupt
            return super()._request(method, path, body, most)

    url, hub = quiet
    agent = Agent(Flaky(url, enroll(hub)), prepared.build(prepared.rates), prepared.store, sleep=waits.append)
    with pytest.raises(KeyboardInterrupt):
        list(agent.run())
    assert len(waits) == 3
    assert waits[2] > waits[0]


def test_a_certificate_that_is_not_trusted_is_a_mistake_at_first_and_waited_for_later(
    setting, tmp_path, serve, enroll
):
    _, _, prepared = setting
    hub, offer = opened(setting, tmp_path / "run")
    good, other = (make_certificates(tmp_path / name) for name in ("good", "other"))
    begin = lambda link, sleep: Agent(link, prepared.build(prepared.rates), prepared.store, sleep=sleep).run()
    with serve(hub, offer, good) as url:
        key = enroll(hub)
        with pytest.raises(UserError, match=r"cannot be trusted .*: give --authority"):
            next(begin(HttpLink(url, key, other.authority), time.sleep))
        with pytest.raises(UnreachableError, match=r"URL begins with https://"):
            HttpLink(url.replace("https", "http"), key).offer()
        link, distrusting, waits = HttpLink(url, key, good.authority), HttpLink(url, key, other.authority), []

        def wait(seconds):
            waits.append(seconds)
            link._pool = trusted

        trusted = link._pool
        agent = begin(link, wait)
        assert next(agent).accepted
        link._pool = distrusting._pool
        assert next(agent).accepted
        assert len(waits) == 1
    hub.close()


@pytest.mark.parametrize("hold", [0.05, 20.0, 45.0])
def test_every_poll_may_wait_for_as_long_as_the_run_says(federate, monkeypatch, hold):
    """Also longer than by default, and whatever a device asks for; here nobody waits."""
    run, waited = federate(settings={"deploy.hold": hold, "deploy.fresh": 90.0}, fresh=90.0), []
    truly = asyncio.wait_for

    async def wait_for(what, seconds):
        if seconds == TICK:
            return await truly(what, seconds)
        waited.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    for link in (HttpLink(run.url, run.key()), HttpLink(run.url, run.key(), hold=60.0)):
        assert link.offer().settings["deploy.hold"] == hold
        assert link.poll(True, 1) == Wait(0.02)
    assert waited == [hold, hold]


def test_a_wait_that_would_make_devices_count_as_gone_is_refused(tmp_path, monkeypatch):
    ask = lambda hold: resolve("planted", None, {"deploy.hold": hold, "deploy.fresh": 30.0})
    with pytest.raises(
        UserError, match=r"set deploy.hold to at most 15, or raise deploy.fresh to at least 32"
    ):
        found_run(*ask(16.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    found_run(*ask(15.0), tmp_path / "run")
    monkeypatch.setattr(federation, "check_hold", lambda config: None)  # as it was
    found_run(*ask(16.0), tmp_path / "older")
    holds = []
    for name in ("run", "older"):
        hub, offer, _ = open_run(tmp_path / name)
        holds.append(_Application(hub, offer, tls=False, files=None).hold)
        hub.close()
    assert holds == [15.0, 15.0]
