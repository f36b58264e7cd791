"""Devices decline tasks that they cannot do: nobody waits for their leases."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest
import urllib3

from partwise.deployment.agent import _begin
from partwise.deployment.coordinator import Wait
from partwise.deployment.http_link import HttpLink
from partwise.deployment.own_store import OwnStore
from partwise.deployment.resident import Pace, Resident
from partwise.server.round import Refused

POOL = urllib3.PoolManager(timeout=120)

FEW = "user,item,rating\nann,1,2.0\nann,2,5.0\nbob,3,1.0\nbob,4,2.0\n"
LONG = {"lease": 1e6, "deadline": 1e6}  # a task that is not declined would hold up the round for ever


@pytest.fixture(autouse=True)
def _says_everything(caplog):
    caplog.set_level(logging.INFO, "partwise.agent")
    caplog.set_level(logging.INFO, "partwise.server")


@pytest.fixture
def mine(tmp_path):
    """A table of two clients."""
    (tmp_path / "mine.csv").write_text(FEW)
    return tmp_path / "mine.csv"


def resident(link, data, most=2, waits=None):
    """An agent that waits only shortly; its waits are noted."""
    noted = [] if waits is None else waits
    sleep = lambda seconds: (noted.append(seconds), time.sleep(min(seconds, 0.02)))
    return Resident(link, lambda: _begin(link, str(data), None, OwnStore(), 10), Pace(sleep=sleep, most=most))


def given_task(run, names=("ann", "bob")):
    """A device, and one of the tasks that it was given."""
    link = run.link()
    link.join(names)
    link.poll(True, 2)
    run.hub.tick()
    while isinstance(work := link.poll(True, 2), Wait):
        time.sleep(0.02)
    return link, work.jobs[0].invitation.about.task


def posted(link, task, body):
    path = f"/v1/tasks/{task}/decline"
    answer = POOL.request("POST", link.url + path, body=body, headers=link.key.headers("POST", path, body))
    return answer.status, json.loads(answer.data)


def test_declining_over_http(federate, caplog):
    run = federate(**LONG)
    link, task = given_task(run)
    assert run.link().decline(task, "client") == Refused("task", f"this device has no task {task}")
    assert link.decline("nothing", "client").reason == "task"
    for _ in range(2):
        assert link.decline(task, "client") is None
    assert task not in {job.invitation.about.task for job in link.poll(True, 9).jobs}
    assert f"device {link.key.device} declines task {task} (client)" in caplog.text
    assert posted(link, task, b'{"reason": "model"}') == (200, {"task": task})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b"{}",
        b'{"reason": 5}',
        b'{"reason": null}',
        b'{"reason": "tired"}',
        b"\xff" * 9,
    ],
)
def test_reasons_that_make_no_sense_are_refused(federate, body):
    run = federate(**LONG)
    link, task = given_task(run)
    status, told = posted(link, task, body)
    assert (status, told["reason"]) == (400, "malformed")
    assert link.decline(task, "client") is None  # it was not declined


def test_declining_is_signed_and_bounded(federate):
    run = federate(**LONG)
    link, task = given_task(run)
    path, body = f"/v1/tasks/{task}/decline", b'{"reason": "client"}'
    post = lambda body, headers: POOL.request("POST", link.url + path, body=body, headers=headers)
    assert post(body, {}).status == 401
    headers = link.key.headers("POST", path, body)
    assert post(b'{"reason": "model"}', headers).status == 401
    assert post(body, headers).status == 200
    assert post(body, headers).status == 409  # replayed
    large = b" " * (2 << 20)
    assert post(large, link.key.headers("POST", path, large)).status == 413


def test_a_client_that_is_gone_does_not_hold_up_a_round(federate, mine):
    run = federate(**LONG)
    done = []
    for each in resident(run.link(), mine).run():
        done.append(each)
        mine.write_text(FEW.replace("bob", "ann"))
    assert {(each.client, each.reason) for each in done if not each.accepted} == {("bob", "client")}
    missing = [record["missing"] for record in run.hub.records()]
    assert missing[1:] == [1, 1]
    assert sum(missing) == [each.accepted for each in done].count(False)


def test_a_sum_whose_clients_are_all_gone_does_not_hold_up_a_round(federate, mine, tmp_path):
    run = federate(settings={"deploy.reports": "sum", "cohort.size": 4}, **LONG)
    other = tmp_path / "other.csv"
    other.write_text(FEW.replace("ann", "cid").replace("bob", "dan"))
    first, second = (resident(run.link(), data, most=1).run() for data in (mine, other))
    done = {"first": [], "second": []}

    def work(name, lives, after):
        for each in lives:
            done[name].append(each)
            after()

    threads = [
        threading.Thread(target=work, args=given, daemon=True)
        for given in (
            ("first", first, lambda: None),
            ("second", second, lambda: other.write_text(FEW.replace("ann", "eve"))),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    assert run.hub.round().phase == "ended"
    assert all(each.accepted for each in done["first"])


def test_what_the_server_refuses_is_declined(federate, mine):
    """A report that will be refused again is not tried again."""
    run = federate(settings={"rounds": 2}, **LONG)

    class Wrong(HttpLink):
        sent = 0

        def report(self, report):
            self.sent += 1
            return Refused("weight", "no such weight") if self.sent == 1 else super().report(report)

    done = list(resident(Wrong(run.url, run.key(), hold=0.2), mine).run())
    assert [each.reason for each in done].count("weight") == 1
    assert [record["missing"] for record in run.hub.records()] == [1, 0]


def test_a_server_that_names_no_real_task_is_asked_nothing(federate, mine):
    run = federate(settings={"rounds": 1})
    asked = []

    class Bent(HttpLink):
        left = 2

        def poll(self, *said):
            given = super().poll(*said)
            self.left -= not isinstance(given, Wait)
            if isinstance(given, Wait) or self.left < 0:
                return given
            bend = lambda told, task: told._replace(client="eve", about=told.about._replace(task=task))
            names = ("../../healthz", 7, "", "a b")
            bent = [bend(job.invitation, names[2 * self.left + n]) for n, job in enumerate(given.jobs)]
            return given._replace(
                jobs=[job._replace(invitation=told) for job, told in zip(given.jobs, bent, strict=True)]
            )

        def decline(self, task, reason):
            asked.append(task)
            return super().decline(task, reason)

    done = list(resident(Bent(run.url, run.key(), hold=0.2), mine).run())
    assert len({each.client for each in done if each.accepted}) == 2
    assert asked == []
