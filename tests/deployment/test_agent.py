"""An agent's rules: what it does when the server, the network, its data or its clock is not as it should be."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from partwise.deployment.agent import Agent, run_agent
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.coordinator import Wait, Work
from partwise.deployment.http_link import HttpLink
from partwise.deployment.link import UnreachableError
from partwise.deployment.own_store import OwnStore
from partwise.deployment.resident import LONGEST_WAIT, Pace, Resident
from partwise.deployment.workplace import Workplace
from partwise.server.round import Refused
from partwise.types import UserError

FEW = "user,item,rating\nann,1,2.0\nann,2,5.0\nbob,3,1.0\nbob,4,2.0\n"


@pytest.fixture(autouse=True)
def _says_everything(caplog):
    caplog.set_level(logging.INFO, "partwise.agent")


@pytest.fixture
def mine(tmp_path):
    """A table of two clients."""
    (tmp_path / "mine.csv").write_text(FEW)
    return tmp_path / "mine.csv"


def life(link, data, own=None, **pace):
    """An agent like that of `run_agent`, whose waits are noted and short."""
    from partwise.deployment.agent import _begin

    waits = []
    sleep = lambda seconds: (waits.append(seconds), time.sleep(min(seconds, 0.02)))
    begin = lambda: _begin(link, str(data), None, own or OwnStore(), 10)
    return Resident(link, begin, Pace(sleep=sleep, **pace)), waits


def warned(caplog, words):
    """How often the agent has said it. In the same process, the server may say so too."""
    mine = [record.getMessage() for record in caplog.records if record.name == "partwise.agent"]
    return sum(words in said for said in mine)


# Journeys


def write_table(folder, lines, kind):
    """These lines as a table of some kind."""
    if kind == "csv":
        (folder / "mine.csv").write_text("\n".join(lines))
        return str(folder / "mine.csv")
    with sqlite3.connect(folder / "mine.db") as base:
        base.execute("CREATE TABLE ratings (user TEXT, item INTEGER, rating REAL)")
        base.executemany("INSERT INTO ratings VALUES (?, ?, ?)", [line.split(",") for line in lines[1:]])
    return f"sqlite:{folder}/mine.db?table=ratings"


def together(run, works):
    """What agents did, side by side."""
    done = []
    threads = [threading.Thread(target=lambda work=work: done.extend(work())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 12
    assert all(each.accepted for each in done)
    return run.hub.state(3).params


@pytest.mark.slow
def test_tables_on_two_devices_train_the_model_of_stores_in_memory(federate, tmp_path):
    halves = np.array_split(np.arange(24), 2)
    run = federate("memory", {"cohort.size": 4}, quorum=4, population=24)
    build, store = run.prepared.build(run.prepared.rates), run.prepared.store
    agents = [Agent(run.link(), build, store.gather(half)) for half in halves]
    memory = together(run, [agent.run for agent in agents])
    run = federate("tables", {"cohort.size": 4}, quorum=4, population=24)
    places = [
        write_table(tmp_path, run.lines(half), kind)
        for half, kind in zip(halves, ("csv", "sqlite"), strict=True)
    ]
    each = lambda n: lambda: run_agent(run.link(), places[n], tmp_path / f"own {n}", most=2)
    tables = together(run, [each(0), each(1)])
    for path, leaf in memory.items():
        np.testing.assert_array_equal(np.asarray(tables[path]), np.asarray(leaf))


def test_new_clients_join_and_clients_that_are_gone_are_declined(federate, mine, caplog):
    run = federate(settings={"rounds": 30}, lease=0.3, deadline=1.0)
    agent, _ = life(run.link(), mine, most=2)
    done = []
    for each in agent.run():
        done.append(each)
        if each.accepted and "cid" not in mine.read_text():
            mine.write_text(FEW.replace("bob", "cid"))
        if each.client == "cid" and {"bob"} <= {each.client for each in done if each.reason == "client"}:
            break
    assert warned(caplog, "the data has changed") == 1
    for each in done:
        assert each.reason in ("", "closed") or (each.client, each.reason) == ("bob", "client")
    assert ("bob", "client") in {(each.client, each.reason) for each in done}


def test_one_client_of_many_and_a_table_without_clients(federate, mine, tmp_path):
    run = federate(settings={"rounds": 1, "cohort.size": 1})
    assert [done.client for done in run_agent(run.link(), str(mine), tmp_path / "own", id="bob")] == ["bob"]
    (tmp_path / "plain.csv").write_text("item,rating\n1,2.0\n")
    other = federate("other", settings={"rounds": 1, "cohort.size": 1, "seed": 7})
    done = list(run_agent(other.link(), str(tmp_path / "plain.csv"), tmp_path / "own", id="zoe"))
    assert [each.client for each in done] == ["zoe"]
    assert (tmp_path / "own" / "aside-1").exists()


# What cannot begin


def test_what_a_person_must_mend_ends_an_agent_that_begins(federate, mine, tmp_path):
    run = federate()
    own = tmp_path / "own"
    for data, message in (
        (tmp_path / "none.csv", "does not exist"),
        ("sqlite:x", "does not say what to read"),
    ):
        with pytest.raises(UserError, match=message):
            next(run_agent(run.link(), str(data), own))
    with pytest.raises(UserError, match="is not enrolled"):
        next(run_agent(HttpLink(run.url, DeviceKey.new()), str(mine), own))
    key = DeviceKey.new()
    run.hub.keys.enroll(KeyRow(key.device, key.public, revoked=1.0))
    with pytest.raises(UserError, match="was revoked"):
        next(run_agent(HttpLink(run.url, key), str(mine), own))
    run.link().join(["ann", "bob"])
    with pytest.raises(UserError, match=r"2 clients of 2 could not join \(ann, bob\)"):
        next(run_agent(run.link(), str(mine), own))
    web = run.link()
    web._good = lambda *request, **more: b"[]"  # of some other server
    with pytest.raises(UserError, match="does not speak protocol 1 of partwise"):
        next(run_agent(web, str(mine), own))
    with pytest.raises(UserError, match="unknown policy"):
        next(run_agent(run.link(), str(mine), own, "sunny"))
    with pytest.raises(UserError, match="at least 1"):
        next(run_agent(run.link(), str(mine), own, most=0))


# Clients that may not join


@pytest.mark.parametrize("taken", [(), (3,), (0, 4, 11), tuple(range(11))])
def test_clients_join_together_as_each_would_alone(federate, tmp_path, taken, caplog):
    """One that is on another device, or has a name that is not allowed, keeps no other from joining."""
    run, names = federate(population=1000), [f"client {number:02d}" for number in range(12)]
    wrong = "x" * 201
    (tmp_path / "mine.csv").write_text(
        "user,item,rating\n" + "".join(f"{each},1,2.0\n" for each in [*names, wrong])
    )
    others = [names[place] for place in taken]
    if others:
        run.link().join(others)
    alone, link = run.link(), run.link()
    agent, waits = life(link, tmp_path / "mine.csv", stopped=lambda: len(waits) > 0)
    assert list(agent.run()) == []
    joined = present(run, link)
    assert joined == {name for name in [*names, wrong] if name not in others and name != wrong}
    run.hub.keys.revoke(link.key.device)  # so that they can move
    assert joined == {name for name in [*names, wrong] if alone.join([name]) == []} == present(run, alone)
    assert warned(caplog, f"{len(others) + 1} clients" if others else "1 client of 13 could not join") == 1


def present(run, link):
    run.hub.poll(link.key.device).result()
    there = run.hub.clerk.do(lambda book: book.present(0.0))
    return {row.name for row in there if row.device == link.key.device}


# The network


class Nowhere(HttpLink):
    """A server that does not answer the first so many requests."""

    def __init__(self, url, key, tries):
        super().__init__(url, key)
        self.tries = tries

    def _request(self, *request):
        self.tries -= 1
        if self.tries >= 0:
            raise UnreachableError("nobody there")
        return super()._request(*request)


def test_a_server_that_is_away_for_days_is_tried_forever(mine, caplog):
    link = Nowhere("http://127.0.0.1:9", DeviceKey.new(), 10**9)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3000:
            raise KeyboardInterrupt

    begin = lambda: (link.offer(), None)[1]
    with pytest.raises(KeyboardInterrupt):
        list(Resident(link, begin, Pace(sleep=sleep)).run())
    assert waits[0] < 2
    assert max(waits) <= LONGEST_WAIT
    assert all(wait >= LONGEST_WAIT / 2 for wait in waits[10:])
    assert len({round(wait, 3) for wait in waits[10:]}) > 100  # devices do not come back all at once
    assert warned(caplog, "the server does not answer") == 1


def test_an_agent_comes_back_after_the_server(federate, mine, caplog):
    run = federate()
    agent, _ = life(Nowhere(run.url, run.key(), 5), mine, most=2)
    assert [each.accepted for each in agent.run()] == [True] * 6
    assert warned(caplog, "the server does not answer") == 1
    assert warned(caplog, "all is well again") == 1


class LateKey(DeviceKey):
    """The key of a device whose clock is behind for the first requests."""

    requests = 0

    def headers(self, method, path, body, now=None):
        self.requests += 1
        return super().headers(method, path, body, now or time.time() - (1000 if self.requests <= 4 else 0))


def test_a_wrong_clock_is_named_and_tried_every_minute(federate, mine, caplog):
    run = federate()
    key = LateKey.new()
    run.hub.keys.enroll(KeyRow(key.device, key.public))
    agent, waits = life(HttpLink(run.url, key), mine, most=2)
    assert [each.accepted for each in agent.run()] == [True] * 6
    assert all(LONGEST_WAIT / 2 <= wait <= LONGEST_WAIT for wait in waits[:4])
    assert warned(caplog, "the clock of this device is wrong") == 1
    assert warned(caplog, "is 1000 seconds off, and 300 are allowed") == 1


def test_a_refused_report_is_a_line_and_the_agent_goes_on(federate, mine, caplog):
    run = federate(deadline=0.5)

    class Late(HttpLink):
        sent = 0

        def report(self, report):
            self.sent += 1
            return Refused("closed", "came too late") if self.sent == 1 else super().report(report)

    agent, _ = life(Late(run.url, run.key()), mine, most=2)
    done = list(agent.run())
    assert {each.reason for each in done} == {"closed", ""}
    assert warned(caplog, "came to nothing (closed): came too late") == 1
    assert run.hub.round().phase == "ended"


# Another run, another model


@pytest.mark.parametrize("change", [{"seed": 7}, {"data.dim": 3}])
@pytest.mark.slow
def test_a_server_with_another_run_or_model_is_followed(federate, mine, tmp_path, caplog, change):
    first = federate(settings={"rounds": 50})
    second = federate("second", settings={"rounds": 2} | change)
    key = first.key()
    second.hub.keys.enroll(KeyRow(key.device, key.public))
    second.hub.join(key.device, ["ann", "bob"])
    link, done = HttpLink(first.url, key), []
    for each in run_agent(link, str(mine), tmp_path / "own", refresh=1):
        done.append(each)
        if len(done) == 3:
            link.url = second.url
    assert [each.accepted for each in done[3:]] == [True] * 4
    assert second.hub.round().phase == "ended"
    assert warned(caplog, "the server now has another run or model") == 1
    assert warned(caplog, "it is set aside") == 1
    assert len(list((tmp_path / "own" / "aside-1" / "clients").iterdir())) == 2
    assert len(list((tmp_path / "own" / "clients").iterdir())) == 2


# A server that lies


class Liar(HttpLink):
    """A link that lies once for every lie that it was given, and tells the truth afterwards. The agent lives on in
    between, so it compiles once for all of them. `reasons` has what came of the tasks since each lie."""

    def __init__(self, run, lies):
        super().__init__(run.url, run.key(), hold=0.2)
        self.lies, self.told = lies, 0

    def bend(self, truth):
        if self.told == len(self.lies):
            return truth
        self.told += 1
        return self.lies[self.told - 1](truth)

    def reasons(self, mine):
        found = {}
        for each in life(self, mine, most=1)[0].run():
            found.setdefault(self.told, []).append(each.reason)
        assert self.told == len(self.lies)
        return found


TASKS = [
    (lambda task: task._replace(client="eve"), "client"),
    (lambda task: task._replace(client=None), "malformed"),
    (lambda task: task._replace(client="x" * 10**6), "malformed"),
    (lambda task: task._replace(seed="1"), "malformed"),
    (lambda task: task._replace(seed=-1), "malformed"),
    (lambda task: task._replace(seed=2**70), "malformed"),
    (lambda task: task._replace(round=True), "malformed"),
    (lambda task: task._replace(about=task.about._replace(version="a")), "malformed"),
    (lambda task: task._replace(about=task.about._replace(task="none")), "task"),
    (lambda task: task._replace(about=task.about._replace(task=5)), "malformed"),
    (lambda task: task._replace(about=task.about._replace(run="other")), "model"),
    (lambda task: task._replace(about=task.about._replace(model="other")), "model"),
    (lambda task: task._replace(about=task.about._replace(version=9)), "malformed"),
]


def test_malformed_tasks_are_declined(federate, mine, caplog):
    run = federate(settings={"rounds": 2}, deadline=0.2)

    class Bent(Liar):
        def poll(self, *said):
            given = super().poll(*said)
            if isinstance(given, Wait):
                return given
            return Work(
                [job._replace(invitation=self.bend(job.invitation)) for job in given.jobs], given.lease
            )

    found = Bent(run, [change for change, _ in TASKS]).reasons(mine)
    for number, (_, reason) in enumerate(TASKS, 1):
        assert found[number][0] == reason, number
        assert warned(caplog, f"came to nothing ({reason})") >= 1
    assert set(found[len(TASKS)][1:]) - {"closed"} == {""}
    assert run.hub.round().phase == "ended"


SLICES = [
    lambda data: b"",
    lambda data: b"nonsense",
    lambda data: data[:-1],
    lambda data: data + b"\0",
    lambda data: data.replace(b'\\"rng\\": [', b'\\"rnk\\": ['),
    lambda data: data.replace(b'\\"rng\\": [', b'\\"rng\\": [7, '),
    lambda data: data.replace(b'\\"kind\\": \\"slices\\"', b'\\"kind\\": \\"report\\"'),
    lambda data: b"\xff" * 8 + data[8:],
    lambda data: (10**6).to_bytes(8, "little") + data[8:],
]


def test_malformed_slices_are_declined(federate, mine):
    run = federate(settings={"rounds": 1}, deadline=0.2)

    class Bent(Liar):
        def slices(self, task, keys):
            found = super().slices(task, keys)
            return self.bend(found) if isinstance(found, bytes) else found

    found = Bent(run, SLICES).reasons(mine)
    for number in range(1, len(SLICES) + 1):
        assert found[number][0] == "malformed", number
    assert set(found[len(SLICES)][1:]) - {"closed"} == {""}
    assert run.hub.round().phase == "ended"


@pytest.mark.parametrize("path", ["/v1/join", "/v1/poll", "/v1/reports"])
def test_answers_that_make_no_sense_are_tried_again(federate, mine, path):
    answers = [b"", b"[]", b'{"a": 1}', b"\xff", b'{"wait": "x"}', b'{"wait": -1e308, "ended": false}']
    run = federate(settings={"rounds": 1})

    class Garbled(Liar):
        def _request(self, method, where, *more):
            found = super()._request(method, where, *more)
            return (200, self.bend(found[1])) if where == path else found

    lies = [lambda _, answer=answer: answer for answer in answers]
    lies = lies[:1] if path == "/v1/join" else lies * 2  # of joining, only the success counts
    found = Garbled(run, lies).reasons(mine)
    assert list(found.values())[-1].count("") == 2


# The device itself


def test_data_that_cannot_be_read_for_a_while_is_waited_for(federate, mine, caplog):
    run = federate(settings={"rounds": 4})
    agent, waits = life(run.link(), mine, most=1)
    done, whole = [], mine.with_suffix(".whole")
    whole.write_text(FEW)

    def mend():
        first = len(waits)
        while not warned(caplog, "this cannot be done now") or len(waits) < first + 3:
            time.sleep(0.01)
        whole.replace(mine)

    for each in agent.run():
        done.append(each)
        if len(done) == 3:
            mine.write_text("user,item,rating\nann,1,")
            threading.Thread(target=mend, daemon=True).start()
    assert [each.accepted for each in done] == [True] * 8
    assert warned(caplog, "this cannot be done now") == 1
    assert warned(caplog, "all is well again") == 1


def test_a_device_that_may_not_work_is_given_nothing(federate, mine, caplog):
    run = federate(settings={"rounds": 1})
    answers = iter([False, False, False])
    agent, _ = life(run.link(), mine, most=2, ready=lambda: next(answers, True))
    assert len(list(agent.run())) == 2
    assert next(answers, None) is None
    assert warned(caplog, "its policy says so") == 1
    assert warned(caplog, "the device may work") == 1


def test_examples_that_are_not_finite_give_a_report_that_says_so(federate):
    run = federate(settings={"rounds": 1})
    store = run.prepared.store.gather([0, 1])
    store.columns["rating"][:] = np.nan
    algorithm = run.prepared.build(run.prepared.rates)
    assert [each.accepted for each in Agent(run.link(), algorithm, store).run()] == [True, True]
    assert json.loads(run.hub.version(1).record)["clients"] == 0


def test_a_local_part_that_is_not_finite_is_not_kept(federate, caplog):
    run = federate(settings={"rounds": 1})
    store, own = run.prepared.store.gather([0, 1]), OwnStore()
    store.columns["rating"][:] = np.nan
    place = Workplace(
        link := run.link(), run.prepared.build(run.prepared.rates), lambda: store, own, refresh=1
    )
    assert len(list(Resident(link, lambda: place, Pace()).run())) == 2
    assert warned(caplog, "is not finite, and is not kept") == 2
    assert own.get("local", str(store.client_ids[0])) is None


PROGRAM = """
import logging, sys
from partwise.deployment.agent import run_agent
from partwise.deployment.auth import DeviceKey
from partwise.deployment.http_link import HttpLink
logging.basicConfig(level=logging.INFO)
url, key, data, own = sys.argv[1:]
for done in run_agent(HttpLink(url, DeviceKey.load(key)), data, own):
    print(done.version, done.accepted, flush=True)
print("over", flush=True)
"""


@pytest.mark.slow
def test_sigterm_ends_an_agent_cleanly_and_sigkill_leaves_it_able_to_go_on(federate, mine, tmp_path):
    run = federate(settings={"rounds": 10**5}, lease=1)
    run.key().save(tmp_path / "unused.pem")
    key = run.key()
    key.save(tmp_path / "key.pem")
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        run.url,
        *map(str, (tmp_path / "key.pem", mine, tmp_path / "own")),
    ]
    for sign, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 0)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert [process.stdout.readline().split()[1] for _ in range(3)] == ["True"] * 3
        os.kill(process.pid, sign)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, err
    assert out.endswith("over\n")
    assert "the agent ends: it was told to stop" in err
    assert not (tmp_path / "own" / ".partwise.lock").exists()


def test_clients_that_are_held_out_evaluate_and_report_sums(federate):
    run = federate(held_out=0.4, evaluate_every=1, population=10)
    algorithm = run.prepared.build(run.prepared.rates)
    done = list(Agent(run.link(), algorithm, run.prepared.store, most=30).run())
    assert all(each.accepted for each in done)
    assert len({each.client for each in done}) > 6
    told = [json.loads(run.hub.version(number).metrics or "{}") for number in range(1, 4)]
    assert any(0 < value / weight < 100 for each in told for value, weight in each.values())
