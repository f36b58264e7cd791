"""The coordinator's decisions, one by one and as a state machine: every report counts once."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from partwise.algorithm import init_server
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Schedule
from partwise.deployment.book import MemoryBook
from partwise.deployment.coordinator import Coordinator, Rules, Wait, Work
from partwise.deployment.journal import Journal
from partwise.device import Device
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.randomness import INIT_ROUND, round_rng
from partwise.server import optimizers
from partwise.server.cohort import Recruiting
from partwise.server.messages import send, write_report
from partwise.server.round import Accepted, Refused, Server
from partwise.server.total import Contribution
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

NUM_ITEMS, USERS = 8, 6
KEYS = {"user": np.array([1]), "item": np.array([2, 5])}


def make_algorithm(rates):
    model = matrix_factorization(NUM_ITEMS, 2, num_users=USERS, scale=0.5)
    return fed_avg(
        model,
        partition(model, {"user": keyed("user"), "item": keyed("item")}),
        update=update.by_steps(Schedule(4), rates["update"]),
        optimizer=optimizers.adagrad(rates["server"]),
    )


RATES = {"update": 0.1, "server": 0.5}
ALGORITHM = make_algorithm(RATES)
SERVER = Server(ALGORITHM, "run")


class Desk:
    """A coordinator whose every decision is a transaction of its own."""

    def __init__(self, transaction, **changes):
        rules = Rules(Recruiting(3), seed=1, rounds=2, quorum=2, deadline=100, lease=10, fresh=1000)
        self.deciding, self.transaction = Coordinator(SERVER, rules._replace(**changes)), transaction
        self.close, self.rng, self.rules = self.deciding.close, self.deciding.rng, self.deciding.rules

    def __getattr__(self, decision):
        def decide(*given, **named):
            with self.transaction() as book:
                return getattr(self.deciding, decision)(book, *given, **named)

        return decide

    def round(self):
        with self.transaction() as book:
            return book.round()

    def tasks(self, number=None, attempt=None):
        row = self.round()
        with self.transaction() as book:
            return book.tasks(
                row.number if number is None else number, row.attempt if attempt is None else attempt
            )

    def invited(self):
        return [task.client for task in self.tasks()]


def in_memory():
    book = MemoryBook()
    return lambda: contextlib.nullcontext(book)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def transactions(request, tmp_path):
    """Every call gives a new, empty journal, in each of the three places."""
    if request.param == "memory":
        yield in_memory
        return
    journals = []

    def fresh():
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path}/journal-{len(journals)}.db"
        else:
            url = request.getfixturevalue("new_postgres")()
        journals.append(Journal(url, "run"))
        return journals[-1].transaction

    yield fresh
    for journal in journals:
        journal.close()


def report_for(invitation, value=1.0, **wrong):
    """What an honest client with those two keys might send."""
    leaves = {"user": np.full((1, 2), value, np.float32), "item": np.full((2, 2), value, np.float32)}
    number = lambda x: np.float32(x)
    sent = Contribution(leaves, number(2), number(1), Sums(number(3), number(2)), np.asarray(True))
    return write_report(invitation.about._replace(**wrong), sent)


def begun(transactions, now=0.0, names="abcd", **changes):
    """One client on each device, and a round that is open."""
    desk = Desk(transactions(), **changes)
    for name in names:
        desk.join(f"device {name}", [name], now)
    desk.poll("nobody", now)
    assert desk.round().phase == "open"
    return desk


def work(desk, client, now=0.0, value=1.0):
    """The client of this name does all of its work; what the coordinator says to its report."""
    given = desk.poll(f"device {client}", now)
    assert isinstance(given, Work)
    [invitation] = given.invitations
    assert invitation.client == client
    desk.grant(f"device {client}", invitation.about.task, KEYS, now)
    return desk.accept(f"device {client}", report_for(invitation, value), now)


def closed(desk, now, state=None):
    """The round, closed by one process."""
    due = desk.due("p", now)
    assert due is not None
    done = desk.close(state or init_server(ALGORITHM, jax.random.key(0)), due)
    assert desk.commit(due, "file")
    return done


def test_a_round_opens_when_enough_clients_are_there(transactions):
    desk = Desk(transactions())
    desk.join("x", ["a", "b"], 0.0)
    assert desk.poll("x", 0.0) == Wait(1.0)
    assert desk.round().phase == "waiting"
    desk.join("y", ["c"], 0.0)
    assert isinstance(desk.poll("x", 0.0), Work)
    assert sorted(desk.invited()) == ["a", "b", "c"]


def test_devices_that_are_silent_or_not_ready_are_not_invited(transactions):
    desk = Desk(transactions(), fresh=10)
    for name, when in (("a", 0.0), ("b", 95.0), ("c", 95.0), ("d", 95.0), ("e", 96.0)):
        desk.join(f"device {name}", [name], when)
    assert isinstance(desk.poll("device b", 97.0, ready=False), Wait)
    assert sorted(desk.invited()) == ["c", "d", "e"]


def test_a_client_stays_on_its_device(transactions):
    desk = begun(transactions)
    assert desk.join("device a", ["a", "e"], 1.0) is None
    assert desk.join("thief", ["f", "a"], 1.0).reason == "client"
    with desk.transaction() as book:
        assert dict(book.present(0.0))["a"] == "device a"


def test_a_round_in_which_all_report(transactions):
    desk = begun(transactions)
    for client in desk.invited():
        assert desk.due("p", 1.0) is None
        assert work(desk, client) == Accepted(client, valid=True)
    done = closed(desk, 1.0)
    assert int(done.total.clients) == 3
    assert desk.round().number == 1


def test_a_task_is_for_its_device_alone_which_is_given_it_again_until_it_reports(transactions):
    desk = begun(transactions)
    client = desk.invited()[0]
    first = desk.poll(f"device {client}", 0.0)
    assert desk.poll(f"device {client}", 5.0) == first
    assert desk.due("p", 14.9) is None  # the lease has begun anew
    task = first.invitations[0].about.task
    assert desk.grant("somebody else", task, KEYS, 1.0).reason == "task"
    assert desk.accept("somebody else", report_for(first.invitations[0]), 1.0).reason == "task"


def test_a_report_that_comes_twice_counts_once_and_another_one_is_refused(transactions):
    desk = begun(transactions)
    a, b, c = desk.invited()
    given = desk.poll(f"device {a}", 0.0).invitations[0]
    desk.grant(f"device {a}", given.about.task, KEYS, 0.0)
    report = report_for(given)
    for _ in range(2):
        assert desk.accept(f"device {a}", report, 0.0) == Accepted(a, valid=True)
    assert desk.accept(f"device {a}", report_for(given, 9.0), 0.0).reason == "duplicate"
    work(desk, b), work(desk, c)
    assert closed(desk, 1.0).total.weight == 6
    assert desk.accept(f"device {a}", report_for(given, 9.0), 2.0).reason == "duplicate"


def test_lost_devices_do_not_hold_up_a_round_that_has_its_quorum(transactions):
    desk = begun(transactions)
    a, b, c = desk.invited()
    work(desk, a), work(desk, b)
    late = desk.poll(f"device {c}", 0.0).invitations[0]
    assert desk.due("p", 9.9) is None
    done = closed(desk, 10.0)
    assert (int(done.total.clients), done.missing) == (2, 1)
    desk.grant(f"device {c}", late.about.task, KEYS, 11.0)
    assert desk.accept(f"device {c}", report_for(late), 11.0).reason == "closed"


def test_at_the_deadline_a_quorum_closes_the_round_and_less_repeats_it(transactions):
    desk = begun(transactions, fresh=1000)
    a, b, _ = desk.invited()
    work(desk, a), work(desk, b)
    assert desk.due("p", 99.0) is None
    assert closed(desk, 100.0).missing == 1
    desk = begun(transactions)
    first = desk.poll(f"device {a}", 0.0).invitations[0]
    assert desk.due("p", 100.0) is None
    assert (desk.round().attempt, desk.round().number) == (1, 0)
    desk.poll("device a", 100.0)
    assert first.about.task not in {task.id for task in desk.tasks(0, 1)}
    assert desk.grant(f"device {a}", first.about.task, KEYS, 101.0).reason == "closed"


def test_over_selection_closes_when_the_cohort_is_full(transactions):
    desk = begun(transactions, recruiting=Recruiting(2, over_selection=1.5))
    clients = desk.invited()
    assert len(clients) == 3
    work(desk, clients[2])
    assert desk.due("p", 0.0) is None
    work(desk, clients[0])
    assert int(closed(desk, 0.0).total.clients) == 2


def test_one_process_closes_a_round_and_another_takes_over_if_it_dies(transactions):
    desk = begun(transactions)
    for client in desk.invited():
        work(desk, client)
    dead = desk.due("p", 1.0)
    assert desk.due("q", 30.0) is None
    taken = desk.due("q", 61.0)
    state = init_server(ALGORITHM, jax.random.key(0))
    for a, b in zip(
        *(jax.tree_util.tree_leaves(desk.close(state, x).state) for x in (dead, taken)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert desk.commit(taken, "file")
    assert not desk.commit(dead, "file")
    assert desk.round().number == 1


def test_the_last_round_ends_the_run(transactions):
    desk = begun(transactions, rounds=1)
    for client in desk.invited():
        work(desk, client)
    closed(desk, 1.0)
    assert desk.poll("device a", 2.0) == Wait(1.0, ended=True)
    assert desk.due("p", 3.0) is None


def test_real_devices_give_the_plain_backends_model_bit_for_bit(make_ratings, transactions):
    """In whatever order they report."""
    store = make_ratings([5, 3, 6, 4, 7, 2], NUM_ITEMS, seed=4, distinct=4)
    plain = PlainSimulation(make_algorithm, RATES, store, Recruiting(3), seed=1)
    list(plain.run(2))
    desk, device = Desk(transactions()), Device(ALGORITHM)
    names = [str(name) for name in store.client_ids.tolist()]
    for name in names:
        desk.join(f"device {name}", [name], 0.0)
    state = init_server(ALGORITHM, round_rng(1, INIT_ROUND))
    while desk.round().phase != "ended":
        desk.poll("nobody", 0.0)
        for name in reversed(desk.invited()):
            [given] = desk.poll(f"device {name}", 0.0).invitations
            mine = store.gather([names.index(name)])
            asked = device.ask(mine, given.seed, given.round)
            row = desk.grant(f"device {name}", given.about.task, asked.keys, 0.0)
            assert row.id == given.about.task
            message = send(ALGORITHM.partition, state.params, asked.keys, desk.rng(given.round), given.about)
            desk.accept(f"device {name}", device.report(message, mine, asked), 0.0)
        state = closed(desk, 0.0, state).state
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(np.asarray(state.params[path]), np.asarray(leaf))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"quorum": 4}, "from 1 to the cohort's 3"), ({"lease": 0}, "lease must be more than 0")],
)
def test_rules_that_cannot_be(changes, words):
    with pytest.raises(UserError, match=words):
        Desk(in_memory(), **changes)


class Federation(RuleBasedStateMachine):
    """Devices poll, ask, report, repeat themselves and vanish; processes close rounds, die and come back."""

    def __init__(self):
        super().__init__()
        self.book, self.now = MemoryBook(), 0.0
        self.deciding = Desk(lambda: contextlib.nullcontext(self.book), rounds=4)
        self.held: dict[str, object] = {}  # device -> what it was last given
        self.sent: dict[str, bytes] = {}  # task -> the report that was accepted
        self.due: list = []
        self.counted: dict[int, set[str]] = {}
        self.state = init_server(ALGORITHM, jax.random.key(0))
        for name in "abcde":
            self.deciding.join(f"device {name}", [name], 0.0)

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 70.0, 101.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from("abcde"), ready=st.booleans())
    def polls(self, name, ready):
        given = self.deciding.poll(f"device {name}", self.now, ready)
        if isinstance(given, Work):
            assert ready
            self.held[name] = given.invitations[0]

    @rule(name=st.sampled_from("abcde"), other=st.sampled_from("abcde"))
    def asks(self, name, other):
        if name in self.held:
            answer = self.deciding.grant(f"device {other}", self.held[name].about.task, KEYS, self.now)
            assert isinstance(answer, Refused) or name == other

    @rule(name=st.sampled_from("abcde"), value=st.sampled_from([1.0, 2.0]), wrong=st.booleans())
    def reports(self, name, value, wrong):
        if name not in self.held:
            return
        invitation = self.held[name]
        report = report_for(invitation, value, **({"version": 99} if wrong else {}))
        answer = self.deciding.accept(f"device {name}", report, self.now)
        task = invitation.about.task
        if isinstance(answer, Accepted):
            assert not wrong
            assert self.sent.setdefault(task, report) == report

    @rule(process=st.sampled_from("pq"))
    def begins_to_close(self, process):
        due = self.deciding.due(process, self.now)
        if due is not None:
            self.due.append(due)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def closes(self, data):
        due = data.draw(st.sampled_from(self.due))
        done = self.deciding.close(self.state, due)
        if self.deciding.commit(due, "file"):
            number = due.round.number
            assert number not in self.counted
            self.counted[number] = {task.id for task in due.tasks if task.report is not None}
            assert int(done.total.clients) == len(self.counted[number]) >= self.deciding.rules.quorum
            self.due.clear()

    @invariant()
    def what_was_accepted_is_what_counts(self):
        for number, tasks in self.counted.items():
            assert (
                tasks
                == {
                    task.id
                    for task in self.book._tasks.values()
                    if task.number == number and task.report is not None
                }
                & tasks
            )
        for task in self.book._tasks.values():
            assert (task.report is not None) == (task.id in self.sent)
            if task.report is not None:
                assert task.report == self.sent[task.id]

    @invariant()
    def rounds_follow_one_another(self):
        assert set(self.counted) == set(range(self.deciding.round().number))
        assert (self.deciding.round().phase == "ended") == (self.deciding.round().number == 4)


Federation.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFederation = Federation.TestCase
