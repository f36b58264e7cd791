"""Reports that a server leaves out because one of them would undo the training, and steps that it does not take."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

from partwise.checkpoint import from_bytes, to_bytes
from partwise.deployment.book import RoundRow
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.jobs import Due
from partwise.device import Device
from partwise.runs.resolve import resolve
from partwise.server.messages import about, write_message

SMALL = {
    "data.num_clients": 12,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 5,
    "rounds": 4,
    "server.optimizer": "adagrad",
    "server.rate": 0.1,
}


class Federation:
    """A server, and a device for every client, which does as it is told with its reports."""

    def __init__(self, folder, **changes):
        self.task, config = resolve("planted", None, SMALL | changes)
        found_run(self.task, config, folder)
        self.folder, self.open = folder, open_run(folder, poll=0.01)
        self.device, self.store = Device(self.hub.coordinator.server.algorithm), self.task.train
        for name in self.names():
            self.hub.join(name, [name]).result()

    @property
    def hub(self):
        return self.open.hub

    def names(self):
        return [str(name) for name in self.store.client_ids.tolist()]

    def round(self, spoil=lambda name, report: report):
        """All clients of a round report; returns its record."""
        for name in self.names():
            self.hub.poll(name).result()
        self.hub.tick()
        for place, name in enumerate(self.names()):
            for job in getattr(self.hub.poll(name).result(), "jobs", ()):
                examples, there = self.store.gather([place]), job.invitation
                asked = self.device.ask(examples, there.seed, there.round)
                row = self.hub.grant(name, there.about.task, asked.keys).result()
                report = self.device.report(self.hub.message(row, asked.keys), examples, asked)
                assert self.hub.report(name, spoil(name, report)).result().client == name
        self.hub.tick()
        return self.hub.records()[-1]

    def state(self):
        return [
            np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(self.hub.state(self.hub.round().number))
        ]

    def reopened(self):
        self.hub.close()
        self.open = open_run(self.folder, poll=0.01)
        return self


@pytest.fixture
def federation(tmp_path):
    made = []

    def make(**changes):
        made.append(Federation(tmp_path / f"run {len(made)}", **changes))
        return made[-1]

    yield make
    for each in made:
        each.hub.close()


def multiplied(report, update=1.0, weight=1.0):
    """The report of a client that multiplies its update, or says that it weighs more."""
    arrays, told = from_bytes(report)
    sums = arrays["#sums"] * np.array([weight, 1, 1, 1], np.float32)
    update = {name: np.float32(update) * leaf for name, leaf in arrays.items() if not name.startswith("#")}
    return to_bytes({**arrays, **update, "#sums": sums}, told)


def without_update(report):
    """What a client sends whose update is not finite."""
    return write_message("report", about(report), {}, {"valid": False})


LIES = {
    "a million times": {"update": 1e6},
    "1e15 times": {"update": 1e15},
    "a weight of 1e36": {"weight": 1e36},
    "a weight and an update": {"update": 1e10, "weight": 1e8},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_the_model_is_as_if_the_liar_had_sent_nothing(federation, lie):
    """To the last bit, with its optimizer's state, in the round of the lie and in later ones."""
    with_lie, without = federation(), federation()
    with_lie.round()
    without.round()
    liars = []

    def spoil(name, report):
        liars[:] = liars or [name]
        return multiplied(report, **lie) if name in liars else report

    told = with_lie.round(spoil)
    wanted = without.round(lambda name, report: without_update(report) if name in liars else report)
    assert told["outliers"] == liars == wanted["broken"]
    assert (told["clients"], told["norms"]) == (wanted["clients"], wanted["norms"])
    before = with_lie.state()
    assert with_lie.round()["outliers"] == without.round()["outliers"] == []
    for mine, other in zip(with_lie.state(), without.state(), strict=True):
        np.testing.assert_array_equal(mine, other)
    moved = [np.abs(a - b).max() for a, b in zip(with_lie.state(), before, strict=True)]
    assert max(moved) > 1e-4


@pytest.mark.parametrize("lie", [{"update": 1e25}, {"update": 3e38}, {"weight": 1e37, "update": 1e37}])
def test_an_update_whose_squares_are_too_large_is_refused_at_once(federation, lie):
    here, answers = federation(), []

    def spoil(name, report):
        if not answers:
            with np.errstate(over="ignore", invalid="ignore"):
                answers.append(here.hub.report(name, multiplied(report, **lie)).result())
        return report

    assert (here.round(spoil)["clients"], answers[0].reason) == (5, "not finite")


def test_the_record_has_the_norms_of_what_was_reported(federation):
    here, found = federation(), []

    def look(name, report):
        arrays, _ = from_bytes(report)
        update = [np.sum(np.square(leaf, dtype=float)) for path, leaf in arrays.items() if path[0] != "#"]
        found.append(np.sqrt(sum(update)) / arrays["#sums"][0])
        return report

    told = here.round(look)
    assert told["outliers"] == []
    assert told["norms"]["largest"] == pytest.approx(max(found), rel=1e-5)
    assert told["norms"]["median"] == pytest.approx(np.median(found), rel=1e-5)


def test_what_was_usual_is_remembered_by_a_server_that_is_started_again(federation):
    """Of clients that learn almost nothing any more, the one that still does is no outlier."""
    here = federation()
    first = here.round()
    here.reopened()
    chosen = []

    def spoil(name, report):
        chosen[:] = chosen or [name]
        return report if name in chosen else multiplied(report, update=1e-5)

    told = here.round(spoil)
    assert told["norms"]["largest"] > 1000 * told["norms"]["median"]
    assert told["outliers"] == []
    assert told["usual_norm"] == first["usual_norm"] == first["norms"]["median"]


def test_a_step_that_is_not_finite_is_not_taken_and_logged(federation, caplog):
    here = federation(
        **{"server.optimizer": "sgd", "server.rate": 1e30, "update.rate": 1e10, "update.max_steps": 1}
    )
    before = here.state()
    with caplog.at_level(logging.ERROR, "partwise.server"):
        told = here.round()
    assert (told["finite"], told["clients"], len(told["outliers"])) == (False, 0, 5)
    assert "the step was not finite, so the model is that of before" in caplog.text
    for mine, other in zip(here.state(), before, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_nor_is_one_that_a_sum_makes_that_the_server_cannot_take_apart(federation):
    """Of sealed or masked reports."""
    coordinator, state = federation().hub.coordinator, federation().hub.state(0)
    due = Due(RoundRow(), ())
    for size, finite in ((1e-3, True), (3e38, False)):
        total = coordinator.server.zero(state.params)
        update = {path: leaf + np.float32(size) for path, leaf in total.update.items()}
        total = total._replace(update=update, weight=total.weight + 1, clients=total.clients + 1)
        done = coordinator.close_sum(state, due, total, 0)
        assert (done.finite, int(done.total.clients)) == (finite, int(finite))
        assert (done.state is state) != finite
