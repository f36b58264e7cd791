"""Devices that repeat, forge, delay, inflate: each is refused by name, and nothing changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import urllib3
import zstandard

from partwise.checkpoint import from_bytes, to_bytes
from partwise.deployment.coordinator import Work
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.device import Device
from partwise.metrics import Sums
from partwise.runs.resolve import resolve
from partwise.server.messages import write_metrics

POOL = urllib3.PoolManager(timeout=120)

SMALL = {
    "data.num_clients": 12,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 3,
    "rounds": 3,
}


@pytest.fixture(scope="module")
def task():
    return resolve("planted", None, SMALL)


@pytest.fixture
def run(task, tmp_path):
    found_run(*task, tmp_path / "run")
    opened = open_run(tmp_path / "run", poll=0.01)
    yield opened
    opened.hub.close()


@pytest.fixture
def url(run, serve):
    with serve(run.hub, run.offer) as url:
        yield url


def snapshot(hub):
    """All that the server knows of the round."""
    row = hub.round()

    def tasks(book):
        return [book.whole(task.id) for task in book.tasks("train", row.number, row.attempt)]

    return row, hub.clerk.do(tasks)


def given_work(hub, url, key, task):
    """A device with all clients that has been given a task: its link, the task, its slices and honest report."""
    link, store = HttpLink(url, key), task[0].train
    link.join([str(name) for name in store.client_ids.tolist()])
    work = link.poll(True, 1)
    assert isinstance(work, Work)
    [(_, invitation, *_)] = work.jobs
    device = Device(hub.coordinator.server.algorithm)
    place = [str(name) for name in store.client_ids.tolist()].index(invitation.client)
    asked = device.ask(store.gather([place]), invitation.seed, invitation.round)
    message = link.slices(invitation.about.task, asked.keys)
    return link, invitation, asked, device.report(message, store.gather([place]), asked)


def changed(report, header=None, **arrays):
    """A report with other values."""
    found, told = from_bytes(report)
    return to_bytes({**found, **arrays}, {**told, **(header or {})})


def nan_in(report):
    arrays, _ = from_bytes(report)
    name = next(name for name in arrays if not name.startswith("#"))
    return changed(report, **{name: np.full_like(arrays[name], np.nan)})


def sums(report, *values):
    return changed(report, **{"#sums": np.array(values, np.float32)})


FORGERIES = {
    "another run": (lambda r: changed(r, {"run": "f" * 32}), "run"),
    "another version": (lambda r: changed(r, {"version": 7}), "version"),
    "another model": (lambda r: changed(r, {"model": "f" * 32}), "model"),
    "a task of nobody": (lambda r: changed(r, {"task": "f" * 32}), "task"),
    "another format": (lambda r: changed(r, {"format": 2}), "malformed"),
    "another kind": (lambda r: changed(r, {"kind": "slices"}), "malformed"),
    "no header": (lambda r: to_bytes(from_bytes(r)[0]), "malformed"),
    "another shape": (lambda r: changed(r, **{"#sums": np.zeros(5, np.float32)}), "malformed"),
    "another type": (lambda r: changed(r, **{"#sums": np.zeros(4, np.float64)}), "malformed"),
    "an array too many": (lambda r: changed(r, more=np.zeros(3, np.float32)), "malformed"),
    "NaN": (nan_in, "not finite"),
    "a negative weight": (lambda r: sums(r, -5, 1, 0, 0), "weight"),
    "an infinite weight": (lambda r: sums(r, np.inf, 1, 0, 0), "not finite"),
    "ten clients": (lambda r: sums(r, 5, 10, 0, 0), "weight"),
    "a weight of nobody": (lambda r: sums(r, 5, 0, 0, 0), "weight"),
    "truncated": (lambda r: r[:-7], "malformed"),
    "nothing": (lambda r: b"", "malformed"),
    "metrics": (lambda r: write_metrics_like(r), "malformed"),
}


def write_metrics_like(report):
    from partwise.server.messages import about

    return write_metrics(about(report), {"loss": Sums(np.float32(1), np.float32(1))})


def test_forged_reports_are_refused_by_name_and_change_nothing(run, url, enroll, task):
    link, invitation, _, honest = given_work(run.hub, url, enroll(run.hub), task)
    before = snapshot(run.hub)
    for what, (forge, reason) in FORGERIES.items():
        found = link.report(forge(honest))
        assert getattr(found, "reason", None) == reason, what
        assert snapshot(run.hub) == before, what
    other = HttpLink(url, enroll(run.hub))
    assert other.report(honest).reason == "task"
    assert snapshot(run.hub) == before
    assert link.report(honest).client == invitation.client
    counted = snapshot(run.hub)
    assert link.report(honest).client == invitation.client  # it may not have heard
    assert link.report(sums(honest, 1, 1, 0, 0)).reason == "duplicate"
    assert snapshot(run.hub) == counted


def test_keys_cannot_be_changed_or_invented(run, url, enroll, task):
    link, invitation, asked, _ = given_work(run.hub, url, enroll(run.hub), task)
    before = snapshot(run.hub)
    for keys in (
        {"item": np.array([0, 99])},
        {"item": np.array([-1, 3])},
        {"item": np.array([3, 3])},
        {"item": np.array([5, 3])},
        {"item": np.array([0.5])},
        {"item": np.zeros((2, 2), int)},
        {"other": np.array([1])},
        {},
        {"item": np.setdiff1d(np.arange(20), asked.keys["item"])},
    ):
        body = to_bytes(
            {
                space: each.astype(np.float32 if each.dtype.kind == "f" else np.int32)
                for space, each in keys.items()
            }
        )
        path = f"/v1/tasks/{invitation.about.task}/slices"
        answer = POOL.request("POST", url + path, body=body, headers=link.key.headers("POST", path, body))
        assert (answer.status, json.loads(answer.data)["reason"]) == (400, "keys"), keys
    assert snapshot(run.hub) == before


def test_a_replayed_request_is_refused(run, url, enroll, task):
    link, _, _, honest = given_work(run.hub, url, enroll(run.hub), task)
    headers = link.key.headers("POST", "/v1/reports", honest)
    post = lambda: POOL.request("POST", f"{url}/v1/reports", body=honest, headers=headers)
    assert post().status == 200
    after = snapshot(run.hub)
    again = post()
    assert (again.status, json.loads(again.data)["reason"]) == (409, "replayed")
    assert snapshot(run.hub) == after


def bomb(size):
    """A small body that unpacks to a large one, without saying so."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=False)
    return packer.compress(bytes(size))


@pytest.mark.parametrize(
    ("body", "encoding", "status", "reason"),
    [
        (bytes(8 << 20), "", 413, "too large"),
        (zstandard.compress(bytes(1 << 28)), "zstd", 413, "too large"),
        (bomb(1 << 28), "zstd", 413, "too large"),
        (b"no zstd at all", "zstd", 400, "malformed"),
        (b"", "zstd", 400, "malformed"),
        (b"\x1f\x8b", "gzip", 400, "malformed"),
        (b"", "deflate", 400, "malformed"),
    ],
)
def test_large_and_packed_bodies(run, url, enroll, body, encoding, status, reason):
    key = enroll(run.hub)
    headers = key.headers("POST", "/v1/reports", body) | ({"content-encoding": encoding} if encoding else {})
    answer = POOL.request("POST", f"{url}/v1/reports", body=body, headers=headers)
    assert (answer.status, json.loads(answer.data)["reason"]) == (status, reason)


def test_a_packed_report_is_read_as_the_plain_one(run, url, enroll, task):
    link, invitation, _, honest = given_work(run.hub, url, enroll(run.hub), task)
    packed = zstandard.compress(honest)
    headers = link.key.headers("POST", "/v1/reports", packed) | {"content-encoding": "zstd"}
    answer = POOL.request("POST", f"{url}/v1/reports", body=packed, headers=headers)
    assert json.loads(answer.data) == {"client": invitation.client, "valid": True}
    [task_row] = [row for row in snapshot(run.hub)[1] if row.client == invitation.client]
    assert run.hub.clerk.do(lambda book: book.whole(task_row.id)).report == honest


def test_clients_cannot_be_named_strangely(run, url, enroll):
    link = HttpLink(url, enroll(run.hub))
    for names in ([], ["a\nb"], ["x" * 201], [7], ["ok", ""]):
        body = json.dumps({"clients": names}).encode()
        answer = POOL.request(
            "POST", f"{url}/v1/join", body=body, headers=link.key.headers("POST", "/v1/join", body)
        )
        assert answer.status == 400, names
