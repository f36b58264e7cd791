"""Devices with tables of events: histories are made where the events are, and the model is the simulator's."""

from __future__ import annotations

import csv
import logging

import numpy as np
import pytest

from partwise.algorithms.registry import prepare
from partwise.deployment.agent import run_agent
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.own_data import open_store
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

HEADER = ("who", "place", "when")
SETTINGS = {"data.client": "who", "data.item": "place", "data.time": "when", "data.dim": 2, "data.length": 3}
SETTINGS |= {
    "data.model": "two_tower",
    "data.dropout": 0,
    "data.loss": "sampled:2",
    "select.item": "with_random:3",
}
SETTINGS |= {"cohort.size": 3, "rounds": 2, "server.schedule": "constant", "reconstruct.max_steps": 2}


def write(path, rows, header=HEADER):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.fixture(scope="module")
def rows():
    """Events of twelve clients in any order; some have too few to train on."""
    rng = np.random.default_rng(5)
    owners = rng.permutation(np.repeat(np.arange(12), rng.integers(1, 9, 12)))
    places, times = rng.integers(0, 15, len(owners)), rng.permutation(len(owners))
    return [
        (f"c{who}", f"place {place}", 10**9 + when)
        for who, place, when in zip(owners.tolist(), places.tolist(), times.tolist(), strict=True)
    ]


@pytest.fixture(scope="module")
def alike():
    """Events of six clients in any order, seven of each, so that they share a compiled program."""
    rng = np.random.default_rng(6)
    places = np.concatenate([rng.permutation(15)[:7] for _ in range(6)])
    order, whose = rng.permutation(42), np.repeat(np.arange(6), 7)
    times = rng.permutation(42)
    return [(f"c{whose[k]}", f"place {places[k]}", 10**9 + int(times[k])) for k in order]


def founded(folder, rows, settings=()):
    """A run on a table of events: what the simulator has of it, and the run."""
    task, config = resolve("events", write(folder / "all.csv", rows), SETTINGS | dict(settings))
    task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
    found_run(task, config, folder / "run")
    return prepare(task, config), config


@pytest.fixture(scope="module")
def offer(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    founded(folder, rows)
    run = open_run(folder / "run")
    run.hub.close()
    return run.offer


def test_the_model_is_the_plain_backends_with_tables_of_events(alike, tmp_path, serve):
    prepared, config = founded(tmp_path, alike)
    population = prepared.store.num_clients
    hub, offer, _ = open_run(tmp_path / "run", population=population, fresh=1e6, poll=0.02)
    key = DeviceKey.new()
    hub.keys.enroll(KeyRow(key.device, key.public))
    with serve(hub, offer) as url:
        mine = write(tmp_path / "mine.csv", alike)
        done = list(run_agent(HttpLink(url, key, hold=0.2), mine, tmp_path / "own", most=4))
    assert [each.accepted for each in done] == [True] * 6
    plain = PlainSimulation(
        prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    list(plain.run(2))
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(2).params[path]), np.asarray(leaf))
    hub.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"data.holdout": "time"},
        {"data.holdout": "clients"},
        {"data.seen": True, "algorithm": "fed_per"},
        {"data.time": None},
    ],
    ids=str,
)
def test_histories_are_those_of_the_simulator(rows, tmp_path, settings):
    prepared, _ = founded(tmp_path, rows, settings)
    run = open_run(tmp_path / "run")
    run.hub.close()
    found, wanted = open_store(run.offer, write(tmp_path / "mine.csv", rows)), prepared.store
    places = {str(name): place for place, name in enumerate(found.client_ids.tolist())}
    for position, name in enumerate(wanted.client_ids.astype(str).tolist()):
        mine, theirs = found.examples(places[name]), wanted.examples(position)
        for column in ("item", "history"):
            np.testing.assert_array_equal(mine[column], theirs[column])


def test_places_that_the_model_does_not_know_are_left_out_of_histories_too(offer, tmp_path, caplog):
    known = [("zoe", f"place {k}", k) for k in (3, 1, 4, 2)]
    new = [("zoe", "moon", 2.5), ("ann", "moon", 1)]
    with caplog.at_level(logging.WARNING, "partwise.agent"):
        found = open_store(offer, write(tmp_path / "new.csv", [*known, *new]))
    assert "2 rows of" in caplog.text
    assert "with a value of 'item' that the model does not know are left out" in caplog.text
    without = open_store(offer, write(tmp_path / "known.csv", known))
    assert found.client_ids.tolist() == ["zoe"]
    for column, values in without.examples(0).items():
        np.testing.assert_array_equal(found.examples(0)[column], values)
    assert without.num_examples == 2  # by time; the last two are held out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["who,thing,when", "ann,place 1,1"], "unknown column 'place'"),
        (["who,place", "ann,place 1"], "unknown column 'when'"),
        (["who,place,when", "ann,place 1,nan"], "line 2, column 'when'.*expected a finite number"),
        (["who,place,when", "ann,place 1,"], "line 2, column 'when'.*expected a finite number"),
        (["who,place,when", "ann,place 1,soon"], "line 2, column 'when'.*expected a finite number"),
        (["who,place,when", "ann,,1"], "line 2, column 'place'.*expected an id"),
        (["who,place,when", "ann,moon,1"], "of its 1 row none names anything that the model knows"),
        (["who,place,when"], "has no rows"),
    ],
)
def test_tables_that_are_no_events_are_refused_in_words(offer, tmp_path, lines, message):
    (tmp_path / "m.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message):
        open_store(offer, str(tmp_path / "m.csv"))
