"""Clients that wait between their rounds (`cohort.sampling = apart:ROUNDS`), whatever happens on a network."""

from __future__ import annotations

import contextlib
import sqlite3
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.deployment.coordinator import Coordinator
from partwise.deployment.jobs import Work
from partwise.deployment.journal import Journal, found_journal
from partwise.deployment.memory_book import MemoryBook
from partwise.deployment.rules import Rules
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.server.cohort import Recruiting, apart
from partwise.server.round import Accepted, Server
from partwise.server.total import Contribution
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

WAIT, SIZE = 3, 2
MODEL = matrix_factorization(4, 2, num_users=3, scale=0.5)
ALGORITHM = fed_avg(
    MODEL,
    partition(MODEL, {"user": keyed("user"), "item": keyed("item")}),
    update=update.by_steps(Batches(4), 0.1),
    optimizer=optimizers.Sgd(1.0).on_server(),
)
SERVER = Server(ALGORITHM, "run")
RULES = Rules(
    Recruiting(SIZE, sampling=apart(WAIT)),
    seed=1,
    rounds=50,
    quorum=SIZE,
    deadline=100,
    lease=10,
    fresh=1000,
    keep=1,
    drawing=7,
)


class Turns:
    """A coordinator on a book, whose clients are each on a device of its own."""

    def __init__(self, transaction, **changes):
        self.transaction, self.coordinator = transaction, Coordinator(SERVER, RULES._replace(**changes))

    def do(self, decision, *given):
        with self.transaction() as book:
            return getattr(self.coordinator, decision)(book, *given)

    def present(self, client, now=0.0, device=None):
        device = device or f"device {client}"
        assert self.do("join", device, [client], lambda _: True) == []
        self.do("poll", device, now)

    def round(self):
        with self.transaction() as book:
            return book.round()

    def tasks(self, number, attempt):
        with self.transaction() as book:
            return book.tasks("train", number, attempt)

    def invited(self):
        row = self.round()
        return [task.client for task in self.tasks(row.number, row.attempt)]

    def report(self, device, now=0.0):
        """A device works on its oldest task; what it is told, if it has one."""
        given = self.do("poll", device, now)
        if not isinstance(given, Work):
            return None
        leaves = {"user": np.ones((1, 2), np.float32), "item": np.ones((1, 2), np.float32)}
        one, keys = np.float32(1), {"user": np.array([1]), "item": np.array([2])}
        sent = Contribution(leaves, one, one, Sums(one, one), np.asarray(True))
        report = SERVER.form.write(given.jobs[0].invitation.about, sent, keys)
        return self.do("accept", device, report, now)

    def go(self, now=0.0):
        """A round in which all report; its clients."""
        assert self.do("open", now)
        clients = self.invited()
        for client in clients:
            assert self.report(f"device {client}", now) == Accepted(client, valid=True)
        due = self.do("due", "p", now)
        assert self.do("commit", due, now, "file")
        return clients


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def turns(request, tmp_path):
    """A function that gives coordinators, all on one journal: each time it is opened anew."""
    if request.param == "memory":
        book = MemoryBook()
        yield lambda **changes: Turns(lambda: contextlib.nullcontext(book), **changes)
        return
    url = f"sqlite:///{tmp_path}/journal.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("new_postgres")()
    found_journal(url, "run").close()
    with contextlib.ExitStack() as stack:

        def again(**changes):
            journal = Journal(url, "run")
            stack.callback(journal.close)
            return Turns(journal.transaction, **changes)

        yield again


def test_the_smallest_population_goes_on_for_ever(turns):
    """Three cohorts: then there is always exactly one that may be drawn, also after restarts, and although tasks of
    old rounds are forgotten."""
    for name in "abcdef":
        turns().present(name)
    cohorts = [sorted(turns().go()) for _ in range(3 * WAIT)]
    assert sorted(chain(*cohorts[:WAIT])) == list("abcdef")
    assert cohorts == cohorts[:WAIT] * 3


def test_if_too_few_may_be_drawn_the_round_waits_for_new_clients(turns):
    desk = turns()
    for name in "abcde":
        desk.present(name)
    first, second = desk.go(), desk.go()
    assert not turns().do("open", 0.0)
    desk.present("new")
    assert sorted(first + second + desk.go()) == [*"abcde", "new"]


def test_only_those_in_a_version_wait(turns):
    """An attempt that failed, and reports that came too late, use up nobody."""
    desk = turns()
    for name in "abcdef":
        desk.present(name)
    assert desk.do("open", 0.0)
    early, late = desk.invited()
    assert desk.report(f"device {early}") == Accepted(early, valid=True)
    assert desk.do("due", "p", 101.0) is None
    assert (desk.round().attempt, desk.round().phase) == (1, "waiting")
    assert desk.report(f"device {late}", 101.0) is None
    cohorts = [desk.go(101.0) for _ in range(WAIT)]
    assert sorted(chain(*cohorts)) == list("abcdef")


def test_a_client_that_moves_to_another_device_waits_all_the_same(turns):
    desk = turns()
    for name in "abcd":
        desk.present(name)
    moved = desk.go()[0]
    desk.present(moved, device="another")
    assert moved not in desk.go()
    assert not desk.do("open", 0.0)


def test_every_client_of_a_sum_waits(turns):
    desk = turns(reports="sum")
    for device, clients in {"x": ["a", "b", "c"], "y": ["d", "e", "f"]}.items():
        assert desk.do("join", device, clients) == []
        desk.do("poll", device, 0.0)
    asked = []
    for _ in range(WAIT):
        assert desk.do("open", 0.0)
        row = desk.round()
        asked += [name for task in desk.tasks(row.number, row.attempt) for name in task.names]
        for device in "xy":
            desk.report(device)
        assert desk.do("commit", desk.do("due", "p", 0.0), 0.0, "file")
    assert sorted(asked) == list("abcdef")


def test_a_buffer_has_no_rounds_to_wait_for():
    with pytest.raises(UserError, match="apart:3 counts rounds"):
        RULES._replace(buffer=2, concurrency=2).check()


def test_turns_come_with_version_5_of_the_journal(tmp_path):
    url = f"sqlite:///{tmp_path}/journal.db"
    found_journal(url, "run").close()
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        for line in ("DROP TABLE turns", "UPDATE about SET tables = 4"):
            connection.execute(line)
    journal = Journal(url, "run")
    with journal.transaction() as book:
        book.put_turns(["ann", "bob"], 3)
        book.put_turns(["bob"], 5)
        assert book.turns_since(4) == {"bob"}
        assert book.turns_since(3) == {"ann", "bob"}
    journal.close()


class Waiting(RuleBasedStateMachine):
    """Clients come, move, vanish and report; two servers draw, close, die between closing and publishing, and are
    started again. Nobody is in two versions that are less than WAIT rounds apart."""

    def __init__(self):
        super().__init__()
        self.book, self.now, self.due = MemoryBook(), 0.0, []
        self.rounds: dict[str, list[int]] = {}
        self.devices = {name: f"device {name}" for name in "abcdefg"}
        self.restart()
        for name, device in self.devices.items():
            self.desk.present(name, self.now, device)

    @rule()
    def restart(self):
        self.desk = Turns(lambda: contextlib.nullcontext(self.book))

    @rule(seconds=st.sampled_from([1.0, 11.0, 101.0, 1001.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from("abcdefghij"), device=st.sampled_from("xyz"))
    def comes_or_moves(self, name, device):
        self.devices[name] = device
        self.desk.present(name, self.now, device)

    @rule()
    def all_are_there(self):
        for device in set(self.devices.values()):
            self.desk.do("poll", device, self.now)

    @rule()
    def draws(self):
        self.desk.do("open", self.now)

    @precondition(lambda self: self.desk.round().phase == "open")
    @rule(data=st.data())
    def reports(self, data):
        row = self.desk.round()
        tasks = self.desk.tasks(row.number, row.attempt)
        self.desk.report(data.draw(st.sampled_from(tasks)).device, self.now)

    @rule(process=st.sampled_from("pq"))
    def begins_to_close(self, process):
        due = self.desk.do("due", process, self.now)
        if due is not None:
            self.due.append(due)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def publishes(self, data):
        self.publish(data.draw(st.sampled_from(self.due)))

    def publish(self, due):
        if self.desk.do("commit", due, self.now, "file"):
            for task in due.tasks:
                if task.reported:
                    self.rounds.setdefault(task.client, []).append(due.round.number)

    @precondition(lambda self: self.desk.round().phase == "waiting")
    @rule()
    def nobody_waits_for_ever(self):
        self.all_are_there()
        assert self.desk.do("open", self.now)

    @rule()
    def a_round_goes_well(self):
        """Such rounds are what makes clients wait."""
        self.all_are_there()
        self.desk.do("open", self.now)
        for device in set(self.devices.values()):
            while self.desk.report(device, self.now):
                pass
        self.begins_to_close("p")
        for due in self.due[-1:]:
            self.publish(due)

    @invariant()
    def clients_wait(self):
        for rounds in self.rounds.values():
            assert all(later - earlier >= WAIT for earlier, later in pairwise(rounds))


Waiting.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestWaiting = Waiting.TestCase
