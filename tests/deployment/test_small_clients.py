"""Clients with fewer examples than `cohort.min_examples` do not take part, until they have more."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from partwise.deployment.agent import Agent, _begin, run_agent
from partwise.deployment.own_store import OwnStore
from partwise.deployment.resident import Pace, Resident
from partwise.simulation.plain import PlainSimulation

LEAST, COHORT = 12, 4
SETTINGS = {"cohort.min_examples": LEAST, "cohort.size": COHORT}
FEW = "user,item,rating\nann,1,2.0\nann,2,5.0\nbob,3,1.0\n"
MORE = FEW + "bob,4,2.0\n"


@pytest.fixture(autouse=True)
def _says_everything(caplog):
    caplog.set_level(logging.INFO, "partwise.agent")


@pytest.fixture
def mine(tmp_path):
    """A table of two clients, of whom one has a single example."""
    (tmp_path / "mine.csv").write_text(FEW)
    return tmp_path / "mine.csv"


def said(caplog, words):
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def plain_params(run, store):
    """What the plain backend makes of these clients."""
    store = store.take(np.argsort(store.client_ids.astype(str)))
    recruiting = run.prepared.recruiting
    assert recruiting.min_examples == LEAST
    plain = PlainSimulation(run.prepared.build, run.prepared.rates, store, recruiting, seed=0)
    list(plain.run(3))
    return plain.state.params


@pytest.mark.parametrize("kind", ["memory", "table"])
def test_the_model_is_the_plain_backends_with_the_clients_that_are_large_enough(
    federate, tmp_path, kind, caplog
):
    run = federate(settings=SETTINGS, quorum=COHORT)
    store = run.prepared.store
    large = store.filter(LEAST)
    assert COHORT < large.num_clients < store.num_clients
    if kind == "memory":
        done = list(Agent(run.link(), run.prepared.build(run.prepared.rates), store, most=3).run())
    else:
        (tmp_path / "all.csv").write_text("\n".join(run.lines(range(store.num_clients))))
        done = list(run_agent(run.link(), str(tmp_path / "all.csv"), tmp_path / "own", most=3))
    assert all(each.accepted for each in done)
    assert {each.client for each in done} <= set(large.client_ids.astype(str).tolist())
    for path, leaf in plain_params(run, large).items():
        np.testing.assert_array_equal(np.asarray(run.hub.state(3).params[path]), np.asarray(leaf))
    small = store.num_clients - large.num_clients
    assert (
        len(said(caplog, f"{small} clients of {store.num_clients} have fewer than the run's 12 examples"))
        == 1
    )


def resident(run, data, **pace):
    """An agent that waits only shortly."""
    link = run.link()
    sleep = lambda seconds: time.sleep(min(seconds, 0.02))
    return Resident(link, lambda: _begin(link, str(data), None, OwnStore(), 10), Pace(sleep=sleep, **pace))


def test_a_client_joins_when_it_has_enough_examples(federate, mine, caplog):
    run = federate(settings={"cohort.min_examples": 2, "cohort.size": 1, "rounds": 40})
    done = []
    for each in resident(run, mine).run():
        done.append(each)
        if len(done) == 3:
            assert {each.client for each in done} == {"ann"}
            mine.write_text(MORE)
        if each.client == "bob":
            break
    assert done[-1] == ("bob", done[-1].version, True, "")
    assert said(caplog, "1 client of 2 has fewer than the run's 2 examples: they join when they have more")


def test_an_agent_whose_clients_are_all_too_small_waits_for_examples(federate, mine, caplog):
    run = federate(settings={"cohort.min_examples": 2, "cohort.size": 1, "rounds": 2})
    mine.write_text("user,item,rating\nann,1,2.0\nbob,3,1.0\n")
    turns = []

    def ready():
        turns.append(run.hub.round().phase)
        if len(turns) == 4:
            mine.write_text(MORE)
        return True

    done = list(resident(run, mine, ready=ready).run())
    assert turns[:4] == ["waiting"] * 4
    assert [each.accepted for each in done] == [True, True]
    told = said(caplog, "fewer than the run's 2 examples")
    assert told == ["2 clients of 2 have fewer than the run's 2 examples: waiting until there are more"]


def test_a_task_of_a_client_that_has_too_few_examples_now_is_declined(federate, mine, caplog):
    run = federate(settings={"cohort.min_examples": 2, "rounds": 20})
    mine.write_text(MORE)
    done = []
    for each in resident(run, mine, most=2).run():
        done.append(each)
        if len(done) == 2:
            mine.write_text(FEW)
        if not each.accepted:
            break
    assert (done[-1].client, done[-1].reason) == ("bob", "client")
    assert said(caplog, "this device does not have its client, or too few examples of it")


def test_a_sum_leaves_out_clients_that_have_too_few_examples_now(federate, mine, caplog):
    run = federate(settings={"cohort.min_examples": 2, "deploy.reports": "sum"})
    mine.write_text(MORE)
    done = []
    for each in resident(run, mine).run():
        done.append(each)
        mine.write_text(FEW)
    assert [each.accepted for each in done] == [True] * 3
    assert [record["clients"] for record in run.hub.records()] == [2, 1, 1]
    assert len(said(caplog, "not here any more, or with too few examples")) == 2
