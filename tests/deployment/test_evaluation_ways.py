"""Evaluations by devices are the same however they get their slices."""

from __future__ import annotations

import json

import numpy as np
import pytest

from partwise.deployment.agent import run_agent
from partwise.deployment.shares import sums_of
from partwise.device import Device
from partwise.metrics import Pairs, Sums
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.server.messages import About, send

# Steps from random starts: every client's metrics depend on the randomness.
RANDOM = {"data.initial": "random", "reconstruct.method": "steps", "reconstruct.max_steps": 1}


def evaluated(federate, folder, way):
    """A run whose held-out clients have evaluated all versions, and these metrics."""
    settings = RANDOM | {"serving.way": way, "deploy.evaluate_every": 1, "deploy.held_out": 0.4}
    run = federate(way, settings, population=24)
    (folder / "all.csv").write_text("\n".join(run.lines(range(24))))
    done = list(run_agent(run.link(), str(folder / "all.csv"), folder / f"own {way}", most=30))
    assert all(each.accepted for each in done)
    return run, [json.loads(run.hub.version(number).metrics) for number in (1, 2, 3)]


def loss_at_home(run, number, rng):
    """The mean squared error of the clients that evaluated a version, from the plain code of a device."""
    algorithm, store = run.prepared.build(run.prepared.rates), run.prepared.store
    device, params = Device(algorithm), run.hub.state(number).params
    with run.hub.journal.transaction() as book:
        clients = {task.client for task in book.tasks("evaluate", number, 0)}
    total = np.zeros(2)
    for place in np.flatnonzero(np.isin(store.client_ids.astype(str), list(clients))):
        mine = store.gather([place])
        asked = device.ask_whole(mine)
        message = send(
            algorithm.partition, params, asked.keys, rng, About("run", number, "", algorithm.partition.digest)
        )
        found = device.evaluate(message, mine, asked)["loss"]
        assert isinstance(found, Sums)
        total += float(found.value), float(found.weight)
    return total


def test_metrics_are_the_same_on_demand_from_a_file_and_from_pages(federate, tmp_path):
    run, wanted = evaluated(federate, tmp_path, "on_demand")
    for way in ("broadcast", "pregenerated"):
        assert evaluated(federate, tmp_path, way)[1] == wanted
    seed = run.hub.coordinator.rules.seed
    of_evaluation, of_training = (round_rng(seed, number) for number in (EVALUATION_ROUND, 3))
    assert wanted[2]["loss"] == pytest.approx(loss_at_home(run, 3, of_evaluation))
    assert wanted[2]["loss"] != pytest.approx(loss_at_home(run, 3, of_training))  # it matters


def test_what_is_no_sum_stays_on_the_device():
    """The scores of an `auc`, the items of a coverage: they would tell of single examples."""
    ten = Pairs(np.zeros((3, 10), np.int32), np.zeros(3), np.ones(3, bool))
    assert sums_of({"loss": Sums(1.0, 2.0), "coverage@10": ten}) == {"loss": Sums(1.0, 2.0)}
