"""Runs on clients in an object store: the local run, bit for bit, also through faults."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import partwise as pw
from partwise.algorithms.registry import prepare
from partwise.data import byte_ranges, object_store
from partwise.runs.backends import make_simulation
from partwise.runs.resolve import resolve
from partwise.simulation import loop
from partwise.types import UserError

SETTINGS = {
    "rounds": 16,  # more than are staged before the first evaluation
    "cohort.size": 4,
    "simulation.lanes": 2,
    "simulation.rounds_per_call": 2,
    "simulation.evaluate_every": 4,
    "simulation.checkpoint_every": 4,
    "data.dim": 2,
    "data.order": "as is",
    "data.biases": False,
    "data.normalize": False,
    "data.initial": "random",
}
NUM_CLIENTS, NUM_ITEMS, EACH = 60, 40, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Clients with as many ratings as one another, so that calls share a program."""
    rng = np.random.default_rng(5)
    items = np.concatenate([rng.permutation(NUM_ITEMS)[:EACH] for _ in range(NUM_CLIENTS)])
    clients, ratings = np.repeat(np.arange(NUM_CLIENTS), EACH), rng.normal(size=len(items))
    path = tmp_path_factory.mktemp("ratings") / "store"
    pw.ClientStore.from_arrays(clients, ids=["item"], item=items, rating=ratings.astype(np.float32)).save(
        path
    )
    return path


@pytest.fixture
def address(folder, s3, s3_server, between, monkeypatch):
    """The store behind the proxy. Populations are staged call by call."""
    monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(object_store, "WAITS", (0.01,))

    def make(bucket):
        url = s3(bucket)
        pw.open_store(folder).save(url)
        return url.replace(s3_server, between.host)

    return make


def assert_same(ours, theirs):
    assert ours.test == theirs.test
    for path, leaf in theirs.params.items():
        np.testing.assert_array_equal(ours.params[path], leaf)
    untimed = lambda run: [{k: v for k, v in record.items() if k != "seconds"} for record in run.records]
    assert untimed(ours) == untimed(theirs)


def test_a_run_from_a_bucket_is_the_local_run_also_if_the_bucket_is_away_for_a_while(
    folder, address, between, tmp_path
):
    local = pw.train("ratings", data=str(folder), changes=SETTINGS)
    url, away = address("away"), []
    between.fault = lambda asked: 500 if away and asked.name == "examples.arrow" else None
    leave = lambda status: away.append(status) if status.evaluation else None
    with pytest.raises(UserError, match=r"s3://away/models/one/examples.arrow.*HTTP status 500"):
        pw.train("ratings", data=url, out=tmp_path / "run", changes=SETTINGS, progress=leave)
    away.clear()
    assert_same(pw.train(out=tmp_path / "run", resume=True), local)


def test_a_round_reads_its_cohort_and_nothing_else(folder, address, between, monkeypatch):
    monkeypatch.setattr(byte_ranges, "CLOSE_BYTES", 0)
    task, config = resolve("ratings", address("cohort"), SETTINGS)
    prepared = prepare(task, config)
    simulation = make_simulation(prepared, config)
    between.asked.clear()
    records = [record for call in simulation.run(4) for record in call]
    read = between.bytes_of("examples.arrow")
    rows = sum(record.examples for record in records)  # of a client in two rounds of a call, only once
    assert 0.5 * 8 * rows < read <= 8 * rows
    assert read < 8 * pw.open_store(folder).num_examples / 2


def test_a_run_that_is_closed_stops_reading(address, between):
    task, config = resolve("ratings", address("closed"), SETTINGS)
    simulation = make_simulation(prepare(task, config), config)
    calls = simulation.run(1000)
    next(calls)
    calls.close()
    asked = len(between.asked)
    assert asked < 1000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("partwise-ahead")]
    next(simulation.run(2))
