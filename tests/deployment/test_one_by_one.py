"""Rounds that are closed with one report in memory at a time: the same bits, whatever the size of the cohort."""

from __future__ import annotations

import contextlib
import tracemalloc
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_server
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.deployment import one_by_one
from partwise.deployment.coordinator import Coordinator
from partwise.deployment.hub import Hub
from partwise.deployment.journal import found_journal
from partwise.deployment.memory_book import MemoryBook
from partwise.deployment.one_by_one import TakenOverError, whole_tasks
from partwise.deployment.rules import Rules
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.server.cohort import Recruiting
from partwise.server.messages import write_metrics
from partwise.server.round import Server
from partwise.server.total import Contribution
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

NUM_ITEMS, DIM = 400, 16
SMALL = Rules(Recruiting(3), seed=1, rounds=9, quorum=1, deadline=1e6, lease=1e6, fresh=1e6)


def make_server(num_items=NUM_ITEMS, roles=None):
    model = matrix_factorization(num_items, DIM, num_users=6, scale=0.5)
    return Server(
        fed_avg(
            model,
            partition(model, roles or {"item": keyed("item")}),
            update=update.by_steps(Batches(4), 0.1),
            optimizer=optimizers.Adam(0.5).on_server(),
        ),
        "run",
    )


SERVER = make_server()
START = init_server(SERVER.algorithm, jax.random.key(0))


class Memory:
    """A run's rows in memory, used as a journal."""

    url = "sqlite:///"

    def __init__(self, book=None):
        self.book = book or MemoryBook()

    def transaction(self):
        return contextlib.nullcontext(self.book)


@pytest.fixture
def made(request, tmp_path):
    """A function that gives a new, empty journal of a kind."""
    made = []

    def new(kind):
        if kind == "memory":
            return Memory()
        url = f"sqlite:///{tmp_path}/{len(made)}.db"
        made.append(
            found_journal(url if kind == "sqlite" else request.getfixturevalue("new_postgres")(), "run")
        )
        return made[-1]

    yield new
    for journal in made:
        journal.close()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def new_journal(request, made):
    """A function that gives a new, empty journal, in each of the three places."""
    return lambda: made(request.param)


class Desk:
    """A coordinator on a journal, whose clients report what only they would."""

    def __init__(self, journal, rules=SMALL, server=SERVER):
        self.journal, self.deciding, self.rng = journal, Coordinator(server, rules), np.random.default_rng(0)

    def ask(self, decide):
        with self.journal.transaction() as book:
            return decide(book)

    def do(self, name, *given):
        return self.ask(lambda book: getattr(self.deciding, name)(book, *given))

    def report(self, job):
        server, draw = self.deciding.server, lambda shape: self.rng.normal(size=shape).astype(np.float32)
        keys = {
            space: np.sort(self.rng.permutation(4)[:2]) * 3 for space in server.algorithm.partition.spaces
        }
        shapes = server.form.shapes(dict.fromkeys(keys, 2))
        leaves = {path: draw(each.shape) for path, each in shapes.items() if path != "#sums"}
        one = np.float32(1)
        sent = Contribution(leaves, np.float32(self.rng.random()), one, Sums(one, one), np.asarray(True))
        return server.form.write(job.invitation.about, sent, keys)

    def round_of(self, number, now=0.0):
        """As many clients report as there may be; the round is open until it is asked for."""
        for name in (f"c{place:03}" for place in range(number)):
            self.do("join", name, [name])
            self.do("poll", name, now)
        self.do("open", now)
        self.all_report(now)
        return self

    def all_report(self, now=0.0):
        for name in sorted(self.ask(lambda book: book.devices_with_tasks()), reverse=True):
            for job in self.do("poll", name, now).jobs:
                assert self.do("accept", name, self.report(job), now).valid


def buffered(desk):
    """Versions of four reports, the second of which has reports for both versions."""
    desk.round_of(6)
    desk.do("commit", desk.do("due", "p", 1.0), 1.0, "file")
    desk.do("open", 1.0)
    desk.all_report()
    return desk


IN_ROUNDS, BUFFERED = SMALL._replace(recruiting=Recruiting(6)), SMALL._replace(buffer=4, concurrency=6)


def in_memory(deciding, state, due, tasks):
    """All reports are read, and then added up by a plain loop."""
    number = due.round.number
    now = deciding.server.begin(state, number, deciding.rng(number), deciding.rules.seed)
    read = [(task, deciding.server.read(deciding.about(task), None, task.report)) for task in tasks]
    for task, found in read:
        factor = (1.0 + number - task.number) ** -deciding.rules.staleness
        now.include(task.names, deciding.about(task), found, len(task.report), factor)
    return now.close()


@pytest.mark.parametrize("part", [1, 3000, one_by_one.PART])
@pytest.mark.parametrize("rules", [IN_ROUNDS, BUFFERED])
def test_reports_that_are_read_one_by_one_give_the_bits_of_those_in_memory(
    new_journal, rules, part, monkeypatch
):
    desk = Desk(new_journal(), rules)
    buffered(desk) if rules.buffer else desk.round_of(6)
    due = desk.do("due", "p", 2.0)
    assert len({task.number for task in due.tasks}) == (2 if rules.buffer else 1)
    assert all(task.reported and task.report is None and task.keys is None for task in due.tasks)
    monkeypatch.setattr(one_by_one, "PART", part)
    tasks = desk.ask(lambda book: [book.whole(task.id) for task in due.tasks])
    assert [task.id for task in tasks] == [task.id for task in whole_tasks(desk.ask, due)]
    wanted = in_memory(desk.deciding, START, due, tasks)
    found = desk.deciding.close(START, due, partial(whole_tasks, desk.ask, due))
    assert found.bytes_up == wanted.bytes_up == sum(len(task.report) for task in tasks)
    for a, b in zip(*map(jax.tree_util.tree_leaves, (found.state, wanted.state)), strict=True):
        np.testing.assert_array_equal(a, b)


class Alive:
    """How many reports are in memory that a book was asked for, now and at most."""

    def __init__(self):
        self.now = self.most = self.asked = 0


class Counting:
    """A book that counts the reports which it gives."""

    def __init__(self, book, alive):
        self._book, self._alive = book, alive

    def __getattr__(self, name):
        return getattr(self._book, name)

    def whole(self, task):
        row = self._book.whole(task)
        return row._replace(report=self.counted(row.report))

    def counted(self, report):
        alive = self._alive

        class Counted(bytes):
            def __del__(self):
                alive.now -= 1

        alive.now, alive.asked = alive.now + 1, alive.asked + 1
        alive.most = max(alive.most, alive.now)
        return Counted(report)


class Watched:
    """A journal whose books count."""

    def __init__(self, journal):
        self.journal, self.alive, self.url = journal, Alive(), journal.url

    @contextlib.contextmanager
    def transaction(self):
        with self.journal.transaction() as book:
            yield Counting(book, self.alive)


@pytest.mark.parametrize("rules", [IN_ROUNDS, BUFFERED._replace(buffer=6)])
def test_closing_asks_a_book_for_one_report_at_a_time(new_journal, rules, monkeypatch):
    desk = Desk(Watched(new_journal()), rules).round_of(6)
    monkeypatch.setattr(one_by_one, "PART", 1)
    due = desk.do("due", "p", 2.0)
    assert int(desk.deciding.close(START, due, partial(whole_tasks, desk.ask, due)).total.clients) == 6
    alive = desk.journal.alive
    assert (alive.asked, alive.most, alive.now) == (6, 1, 0)


@pytest.mark.parametrize("rules", [IN_ROUNDS, BUFFERED._replace(buffer=6)])
def test_a_server_has_one_report_in_memory_when_it_closes_a_round(made, rules, tmp_path, monkeypatch):
    desk = Desk(made("sqlite"), rules).round_of(6)
    monkeypatch.setattr(one_by_one, "PART", 1)
    (tmp_path / "versions").mkdir()
    watched = Watched(desk.journal)
    hub = Hub(desk.deciding, watched, tmp_path / "versions", START, clock=lambda: 2.0)
    assert hub.tick()
    assert hub.round().number == 1
    hub.clerk.close()
    assert (watched.alive.asked, watched.alive.most, watched.alive.now) == (6, 1, 0)


def test_metrics_are_read_one_by_one_too(new_journal):
    rules = SMALL._replace(evaluate_every=1, held_out=0.5, rounds=1, recruiting=Recruiting(2))
    desk = Desk(Watched(new_journal()), rules).round_of(12)
    desk.do("commit", desk.do("due", "p", 1.0), 1.0, "file")
    names = sorted(desk.ask(lambda book: book.devices_with_tasks()))
    assert len(names) == 2
    for name, value in zip(names, (1.0, 2.0), strict=True):
        [job] = desk.do("poll", name, 1.0).jobs
        metrics = {"rmse": Sums(np.float32(value), np.float32(3))}
        assert desk.do("accept", name, write_metrics(job.invitation.about, metrics), 1.0).valid
    [version] = desk.do("evaluated", 2.0)
    assert version.metrics == '{"rmse": [3.0, 6.0]}'
    alive = desk.journal.alive
    assert (alive.asked, alive.most <= 2, alive.now) == (2, True, 0)


class Large(NamedTuple):
    num_reports: int
    peak: int
    report: int


def test_memory_of_closing_does_not_grow_with_the_cohort(made):
    """That is memory of Python and of arrays. A report is there in a few copies."""
    server, found = make_server(30_000, {}), []
    start = init_server(server.algorithm, jax.random.key(0))
    for number in (3, 12):
        desk = Desk(made("sqlite"), SMALL._replace(recruiting=Recruiting(number)), server).round_of(number)
        due = desk.do("due", "p", 1.0)
        tracemalloc.start()
        desk.deciding.close(start, due, partial(whole_tasks, desk.ask, due))
        found.append(Large(number, tracemalloc.get_traced_memory()[1], server.largest))
        tracemalloc.stop()
    few, many = found
    assert many.peak < few.peak + many.report < 6 * many.report


def test_a_process_whose_round_is_taken_over_stops_reading(new_journal):
    desk = Desk(new_journal(), IN_ROUNDS).round_of(6)
    due, patch = desk.do("due", "p", 1.0), pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(one_by_one, "PART", 1)
        tasks = whole_tasks(desk.ask, due)
        assert next(tasks).reported
        taken = desk.do("due", "q", 99.0)
        with pytest.raises(TakenOverError, match="round 0 is closed by another process"):
            next(tasks)
        assert desk.do("commit", taken, 99.0, "file")
        with pytest.raises(TakenOverError):
            next(whole_tasks(desk.ask, due))
    assert not desk.do("commit", due, 99.0, "file")


def test_a_server_that_is_overtaken_leaves_the_round_to_the_other(made, tmp_path, caplog):
    """It neither fails nor publishes."""
    desk = Desk(made("sqlite"), IN_ROUNDS).round_of(6)
    (tmp_path / "versions").mkdir()
    hub = Hub(desk.deciding, desk.journal, tmp_path / "versions", START, clock=lambda: 2.0)
    due = desk.do("due", hub.process, 2.0)
    assert desk.do("commit", desk.do("due", "q", 99.0), 99.0, "of q")
    with caplog.at_level("INFO", "partwise.server"):
        assert hub._close(due) is False
    assert "round 0 is closed by another process" in caplog.text
    assert (hub.round().number, hub.version(1).file) == (1, "of q")
    assert not list((tmp_path / "versions").iterdir())
    hub.clerk.close()


def test_a_report_that_the_journal_has_lost_is_not_left_out(new_journal):
    desk = Desk(new_journal(), IN_ROUNDS).round_of(6)
    due = desk.do("due", "p", 1.0)
    desk.ask(lambda book: book.put_tasks([book.whole(due.tasks[3].id)._replace(report=None)]))
    with pytest.raises(UserError, match="the journal lacks a report of round 0"):
        list(whole_tasks(desk.ask, due))
