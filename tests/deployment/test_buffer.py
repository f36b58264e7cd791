"""Rounds without waiting (FedBuff), on real ratings and a clock of our own: devices differ tenfold in speed."""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from partwise.algorithms.registry import prepare
from partwise.checkpoint import from_bytes
from partwise.deployment.coordinator import Work
from partwise.deployment.federation import found_run, open_run
from partwise.device import Device
from partwise.randomness import hash64
from partwise.runs.backends import make_evaluator
from partwise.runs.resolve import resolve

pytestmark = pytest.mark.slow
COHORT, BUFFER, TARGET, MOST = 40, 10, 0.9, 2000
SETTINGS = {"cohort.size": COHORT, "rounds": MOST, "data.dim": 8}


class Trial(NamedTuple):
    """When the target was reached, on the devices' clock, and what the versions were made of."""

    seconds: float
    versions: int
    records: list


def seconds_of(name):
    """How long a client takes for a task: from 1 to 10 seconds, evenly on a logarithmic scale."""
    return 10 ** (hash64(f"speed of {name}") / 2**64)


def trained(folder, setting, kills=(), **changes):
    """Train until the target is reached. At these versions the server is thrown away and opened again."""
    task, config, prepared, evaluate = setting
    found_run(task, config.changed(changes), folder)
    now, kills = [0.0], list(kills)
    reopen = lambda: open_run(folder, clock=lambda: now[0], fresh=1e9, lease=1e6, deadline=1e9).hub
    hub, device = reopen(), Device(prepared.build(prepared.rates))
    names = [str(name) for name in prepared.store.client_ids.tolist()]
    places = {name: place for place, name in enumerate(names)}
    for name in names:
        hub.join(name, [name]).result()
        hub.poll(name).result()
    at_work, version = [], 0
    while True:
        while hub.tick():
            pass
        number = hub.round().number
        if number >= version + max(1, 40 // (BUFFER if changes else COHORT)):
            version = number
            if evaluate(hub.state(number).params)["rmse"] <= TARGET:
                records = hub.records()
                hub.close()
                return Trial(now[0], number, records)
        if kills and number >= kills[0]:
            kills.pop(0)
            buffered = hub.clerk.do(lambda book: book.num_buffered())
            hub.close()
            hub = reopen()
            assert hub.clerk.do(lambda book: book.num_buffered()) == buffered
        busy = {each[1] for each in at_work}
        for name in sorted(hub.clerk.do(lambda book: book.devices_with_tasks()) - busy):
            work = hub.poll(name).result()
            assert isinstance(work, Work)
            given = work.jobs[0].invitation
            asked = device.ask(prepared.store.gather([places[name]]), given.seed, given.round)
            row = hub.grant(name, given.about.task, asked.keys).result()
            heapq.heappush(at_work, (now[0] + seconds_of(name), name, hub.message(row, asked.keys), asked))
        now[0], name, message, asked = heapq.heappop(at_work)
        report = device.report(message, prepared.store.gather([places[name]]), asked)
        assert hub.report(name, report).result().valid
        assert from_bytes(report)[0]


@pytest.fixture(scope="module")
def setting():
    data = os.environ.get("PARTWISE_DATA")
    zipped = Path(data or "") / "movielens-1m" / "ml-1m.zip"
    if not data or not zipped.exists():
        pytest.skip("PARTWISE_DATA has no movielens-1m/ml-1m.zip")
    task, config = resolve("movielens", str(zipped), SETTINGS)
    prepared = prepare(task, config)
    return task, config, prepared, make_evaluator(prepared, config, task.validation)


def test_a_buffer_reaches_the_target_in_half_the_time_of_rounds(setting, tmp_path):
    """And the server is thrown away twice on the way."""
    rounds = trained(tmp_path / "rounds", setting)
    change = {"deploy.buffer": BUFFER, "deploy.concurrency": COHORT}
    buffered = trained(tmp_path / "buffer", setting, kills=(4, 9), **change)
    print(
        f"rounds: {rounds.seconds:.0f} s, {rounds.versions} versions; "
        f"buffer: {buffered.seconds:.0f} s, {buffered.versions} versions; "
        f"ratio {buffered.seconds / rounds.seconds:.2f}; stalest {max(r['staleness'] for r in buffered.records)}"
    )
    assert buffered.seconds <= 0.5 * rounds.seconds
    assert all(record["clients"] == BUFFER for record in buffered.records)
    assert max(record["staleness"] for record in buffered.records) > 0
    assert np.isfinite([record["loss"] for record in buffered.records]).all()
