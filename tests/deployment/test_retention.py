"""What is deleted while a run goes on: files of old versions, and never those that are being written."""

from __future__ import annotations

import time

import pytest

from partwise.algorithms.registry import prepare
from partwise.deployment.agent import run_agent
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.files import open_place
from partwise.deployment.http_link import HttpLink
from partwise.deployment.manifest import files_of
from partwise.runs.resolve import resolve

SMALL = {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
SMALL |= {"cohort.size": 2, "rounds": 6, "deploy.keep": 2, "deploy.page_rows": 4}


@pytest.mark.parametrize("way", ["broadcast", "pregenerated"])
def test_a_process_deletes_nothing_that_another_one_writes(tmp_path, serve, enroll, way):
    """The second process forgets whenever the first one has written files that are in no version yet."""
    task, config = resolve("planted", None, SMALL | {"serving.way": way})
    found_run(task, config, tmp_path / "run")
    one, offer, files = open_run(tmp_path / "run", fresh=1e6, poll=0.02)
    other, *_ = open_run(tmp_path / "run", fresh=1e6)
    publish, written = one._published, []

    def published(number, state):
        written.append(publish(number, state))
        other._forget(time.time())
        return written[-1]

    one._published = published
    store = prepare(task, config).store.gather()
    store.save(tmp_path / "examples")
    with serve(one, offer, files=files) as url:
        link = HttpLink(url, enroll(one), hold=0.2)
        done = list(run_agent(link, f"store:{tmp_path / 'examples'}", tmp_path / "own"))
    assert [each.accepted for each in done] == [True] * 12
    place, partition = open_place(files), one.coordinator.server.algorithm.partition
    other._forget(time.time())
    kept = written[-3:]
    if way == "pregenerated":
        kept = set().union(*(files_of(partition, name, place.read) for name in kept))
    assert place.names() == set(kept)
    assert len(list((tmp_path / "run" / "versions").iterdir())) == 3
    one.close(), other.close()
