"""The coordinator's decisions, one by one and as a state machine: every report counts once."""

from __future__ import annotations

import contextlib
import hashlib
import json

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from partwise import optimizers
from partwise.algorithm import init_server
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.deployment.coordinator import Coordinator, Wait, Work
from partwise.deployment.journal import found_journal
from partwise.deployment.memory_book import MemoryBook
from partwise.deployment.one_by_one import TakenOverError, whole_tasks
from partwise.deployment.rules import Rules, make_rules, parse_needs
from partwise.device import Device
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.resolve import resolve
from partwise.server.cohort import Recruiting, poisson
from partwise.server.messages import send, write_metrics
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
        update=update.by_steps(Batches(4), rates["update"]),
        optimizer=optimizers.Adagrad(rates["server"]).on_server(),
    )


RATES = {"update": 0.1, "server": 0.5}
ALGORITHM = make_algorithm(RATES)
SERVER = Server(ALGORITHM, "run")


class Deciding:
    """A coordinator whose every decision is a transaction of its own."""

    def __init__(self, transaction, **changes):
        rules = Rules(Recruiting(3), seed=1, rounds=2, quorum=2, deadline=100, lease=10, fresh=1000)
        self.deciding, self.transaction = Coordinator(SERVER, rules._replace(**changes)), transaction
        self.rng, self.rules = self.deciding.rng, self.deciding.rules

    def __getattr__(self, decision):
        def decide(*given, **named):
            with self.transaction() as book:
                return getattr(self.deciding, decision)(book, *given, **named)

        return decide

    def round(self):
        with self.transaction() as book:
            return book.round()

    def look(self, at):
        with self.transaction() as book:
            return at(book)

    def close(self, state, due):
        return self.deciding.close(state, due, lambda: whole_tasks(self.look, due))

    def tasks(self, number=None, attempt=None, kind="train"):
        row = self.round()
        with self.transaction() as book:
            tasks = book.tasks(
                kind, row.number if number is None else number, row.attempt if attempt is None else attempt
            )
            return [book.whole(task.id) for task in tasks]

    def present(self, device, clients, now):
        """A device joins, and asks for work."""
        assert self.join(device, clients) == []
        self.poll(device, now)

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
        journals.append(found_journal(url, "run"))
        return journals[-1].transaction

    yield fresh
    for journal in journals:
        journal.close()


def report_for(invitation, value=1.0, keys=None, **wrong):
    """What an honest client with those two keys might send."""
    leaves = {"user": np.full((1, 2), value, np.float32), "item": np.full((2, 2), value, np.float32)}
    number = lambda x: np.float32(x)
    sent = Contribution(leaves, number(2), number(1), Sums(number(3), number(2)), np.asarray(True))
    return SERVER.form.write(invitation.about._replace(**wrong), sent, keys)


def begun(transactions, now=0.0, names="abcd", **changes):
    """One client on each device, and a round that is open."""
    desk = Deciding(transactions(), **changes)
    for name in names:
        desk.present(f"device {name}", [name], now)
    assert desk.open(now)
    assert desk.round().phase == "open"
    return desk


def work(desk, client, now=0.0, value=1.0):
    """The client of this name does all of its work; what the coordinator says to its report."""
    given = desk.poll(f"device {client}", now)
    assert isinstance(given, Work)
    [(_, invitation, *_)] = given.jobs
    assert invitation.client == client
    desk.grant(f"device {client}", invitation.about.task, KEYS, now)
    return desk.accept(f"device {client}", report_for(invitation, value), now)


def closed(desk, now, state=None):
    """The round, closed by one process."""
    due = desk.due("p", now)
    assert due is not None
    done = desk.close(state or init_server(ALGORITHM, jax.random.key(0)), due)
    assert desk.commit(due, now, "file")
    return done


def same(state, other):
    for a, b in zip(*map(jax.tree_util.tree_leaves, (state, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_round_opens_when_enough_clients_are_there(transactions):
    desk = Deciding(transactions())
    desk.present("x", ["a", "b"], 0.0)
    assert not desk.open(0.0)
    assert desk.poll("x", 0.0) == Wait(desk.rules.poll)
    assert desk.round().phase == "waiting"
    desk.present("y", ["c"], 0.0)
    assert desk.open(0.0)
    assert not desk.open(0.0)
    assert isinstance(desk.poll("x", 0.0), Work)
    assert sorted(desk.invited()) == ["a", "b", "c"]


def test_devices_that_are_silent_or_not_ready_are_not_invited(transactions):
    desk = Deciding(transactions(), fresh=10)
    for name, when in (("a", 0.0), ("b", 95.0), ("c", 95.0), ("d", 95.0), ("e", 96.0)):
        desk.present(f"device {name}", [name], when)
    assert isinstance(desk.poll("device b", 97.0, ready=False), Wait)
    assert desk.open(97.0)
    assert sorted(desk.invited()) == ["c", "d", "e"]


def test_a_client_stays_on_its_device(transactions):
    desk = begun(transactions)
    assert desk.join("device a", ["a", "e"]) == []
    assert desk.join("thief", ["f", "a"]) == ["a"]
    desk.poll("thief", 1.0)
    with desk.transaction() as book:
        assert dict(book.present(0.0))["a"] == "device a"
        assert "f" not in dict(book.present(0.0))


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
    task = first.jobs[0].invitation.about.task
    assert desk.grant("somebody else", task, KEYS, 1.0).reason == "task"
    assert desk.accept("somebody else", report_for(first.jobs[0].invitation), 1.0).reason == "task"


def test_a_report_that_comes_twice_counts_once_and_another_one_is_refused(transactions):
    desk = begun(transactions)
    a, b, c = desk.invited()
    given = desk.poll(f"device {a}", 0.0).jobs[0].invitation
    desk.grant(f"device {a}", given.about.task, KEYS, 0.0)
    report = report_for(given)
    for _ in range(2):
        assert desk.accept(f"device {a}", report, 0.0) == Accepted(a, valid=True)
    assert desk.accept(f"device {a}", report_for(given, 9.0), 0.0).reason == "duplicate"
    work(desk, b), work(desk, c)
    assert closed(desk, 1.0).total.weight == 6
    assert desk.accept(f"device {a}", report_for(given, 9.0), 2.0).reason == "duplicate"


def test_a_device_that_has_much_to_do_is_not_lost_while_it_works(transactions):
    desk = Deciding(transactions(), lease=10)
    desk.present("site", ["a", "b", "c"], 0.0)
    desk.open(0.0)
    for now in (0.0, 8.0, 16.0):
        assert desk.due("p", now) is None
        [(_, given, *_)] = desk.poll("site", now).jobs
        desk.grant("site", given.about.task, KEYS, now)
        desk.accept("site", report_for(given), now)
    assert int(closed(desk, 17.0).total.clients) == 3


SITES = {"device x": ["a", "b", "c"], "device y": ["d", "e"]}


def sums_begun(transactions, **changes):
    """Two devices of several clients that report sums, and a round that is open."""
    desk = Deciding(transactions(), reports="sum", **changes)
    for device, names in SITES.items():
        desk.present(device, names, 0.0)
    assert desk.open(0.0)
    return desk


def sum_for(job, keys=KEYS):
    """What a device might report for its clients, each of weight 2."""
    number = np.float32(len(job.clients))
    leaves = {space: np.full((len(each), 2), number, np.float32) for space, each in keys.items()}
    sent = Contribution(leaves, 2 * number, number, Sums(3 * number, 2 * number), np.asarray(True))
    return SERVER.form.write(job.invitation.about, sent, keys)


def test_a_device_has_one_task_for_all_of_its_clients_that_report_a_sum(transactions):
    everyone = {"recruiting": Recruiting(5), "quorum": 5}
    alone, desk = Deciding(transactions(), **everyone), sums_begun(transactions, **everyone)
    for device, names in SITES.items():
        alone.present(device, names, 0.0)
    alone.open(0.0)
    drawn = alone.invited()
    wanted = {device: tuple(name for name in drawn if name in names) for device, names in SITES.items()}
    assert {task.device: task.names for task in desk.tasks()} == wanted
    assert [task.clients for task in desk.tasks()] == [len(wanted[task.device]) for task in desk.tasks()]
    for device in SITES:
        assert desk.due("p", 0.0) is None
        [job] = desk.poll(device, 0.0, most=10).jobs
        assert (job.invitation.client, job.clients) == ("", wanted[device])
        assert desk.accept(device, sum_for(job), 0.0) == Accepted("", valid=True)
        assert desk.accept(device, sum_for(job), 0.0) == Accepted("", valid=True)
    done = closed(desk, 1.0)
    assert (int(done.total.clients), done.total.weight, done.empty, done.missing) == (5, 10, 0, 0)


def test_quorum_and_losses_are_counted_in_clients_of_sums(transactions):
    for device, quorum, verdict in (("device x", 3, "close"), ("device y", 3, "repeat")):
        desk = sums_begun(transactions, recruiting=Recruiting(5), quorum=quorum)
        [job] = desk.poll(device, 0.0, most=10).jobs
        desk.accept(device, sum_for(job), 0.0)
        assert desk.due("p", 9.9) is None
        if verdict == "close":
            done = closed(desk, 10.0)
            assert (int(done.total.clients), done.missing) == (3, 2)
        else:
            assert desk.due("p", 10.0) is None
            assert desk.due("p", 100.0) is None
            assert (desk.round().attempt, desk.round().phase) == (1, "waiting")


def test_over_selection_ends_with_the_sums_that_fill_the_cohort(transactions):
    desk = sums_begun(transactions, recruiting=Recruiting(3, over_selection=1.6), quorum=3)
    assert sum(task.clients for task in desk.tasks()) == 5
    [job] = desk.poll("device x", 0.0, most=10).jobs
    desk.accept("device x", sum_for(job), 0.0)
    assert int(closed(desk, 1.0).total.clients) == 3


def test_sums_that_are_not_finite_name_all_of_their_clients(transactions):
    desk = sums_begun(transactions, recruiting=Recruiting(5), quorum=5)
    for device in SITES:
        [job] = desk.poll(device, 0.0, most=10).jobs
        report = sum_for(job)
        if device == "device y":
            nothing = Contribution({}, 0, 0, Sums(0, 0), np.asarray(False))
            report = SERVER.form.write(job.invitation.about, nothing)
        assert desk.accept(device, report, 0.0).valid == (device == "device x")
    done = closed(desk, 1.0)
    assert (sorted(done.broken), int(done.total.clients)) == (["d", "e"], 3)


def test_a_client_whose_name_looks_like_a_list_has_its_own_task(transactions):
    desk = Deciding(transactions(), reports="sum", recruiting=Recruiting(4), quorum=4)
    desk.present("device x", ["a", "b"], 0.0)
    names = [json.dumps(["a", "b"]), json.dumps(["b", "a"])]
    for place, name in enumerate(names):
        desk.present(f"device {place}", [name], 0.0)
    assert desk.open(0.0)
    assert {name for task in desk.tasks() for name in task.names} == {"a", "b", *names}


def test_lost_devices_do_not_hold_up_a_round_that_has_its_quorum(transactions):
    desk = begun(transactions)
    a, b, c = desk.invited()
    work(desk, a), work(desk, b)
    late = desk.poll(f"device {c}", 0.0).jobs[0].invitation
    assert desk.due("p", 9.9) is None
    done = closed(desk, 10.0)
    assert (int(done.total.clients), done.missing) == (2, 1)
    desk.grant(f"device {c}", late.about.task, KEYS, 11.0)
    assert desk.accept(f"device {c}", report_for(late), 11.0).reason == "closed"


def test_a_task_that_is_declined_is_lost_at_once(transactions):
    desk = begun(transactions)
    a, b, c = desk.invited()
    work(desk, a), work(desk, b)
    task = desk.poll(f"device {c}", 0.0).jobs[0].invitation
    assert desk.decline(f"device {a}", task.about.task).reason == "task"
    assert desk.decline("nobody", task.about.task).reason == "task"
    assert desk.decline(f"device {c}", "nothing").reason == "task"
    assert desk.due("p", 1.0) is None
    for _ in range(2):  # it may not have heard
        assert desk.decline(f"device {c}", task.about.task) is None
    assert isinstance(desk.poll(f"device {c}", 1.0), Wait)
    assert desk.grant(f"device {c}", task.about.task, KEYS, 1.0).reason == "declined"
    assert desk.accept(f"device {c}", report_for(task), 1.0).reason == "declined"
    done = closed(desk, 1.0)
    assert (int(done.total.clients), done.missing) == (2, 1)
    assert desk.decline(f"device {c}", task.about.task) is None


def test_what_has_reported_or_is_closed_cannot_be_declined(transactions):
    desk = begun(transactions, quorum=1)
    a, b, c = desk.invited()
    given = {name: desk.poll(f"device {name}", 0.0).jobs[0].invitation.about.task for name in (a, b)}
    work(desk, a)
    assert desk.decline(f"device {a}", given[a]).reason == "duplicate"
    closed(desk, 50.0)
    assert desk.decline(f"device {b}", given[b]).reason == "closed"
    assert {task.client: task.state for task in desk.tasks(0, 0)} == {a: "reported", b: "closed", c: "closed"}


def test_a_round_whose_tasks_are_declined_is_tried_again_at_its_deadline(transactions):
    desk = begun(transactions)
    for task in desk.tasks():
        assert desk.decline(task.device, task.id) is None
    assert desk.due("p", 1.0) is None
    assert desk.round().phase == "open"
    assert desk.due("p", 100.0) is None
    assert (desk.round().attempt, desk.round().phase) == (1, "waiting")


def test_a_sum_that_is_declined_is_lost_with_all_of_its_clients(transactions):
    desk = sums_begun(transactions, recruiting=Recruiting(5), quorum=3)
    [job] = desk.poll("device x", 0.0, most=10).jobs
    desk.accept("device x", sum_for(job), 0.0)
    assert desk.due("p", 1.0) is None
    [job] = desk.poll("device y", 0.0, most=10).jobs
    assert desk.decline("device y", job.invitation.about.task) is None
    done = closed(desk, 1.0)
    assert (int(done.total.clients), done.missing) == (3, 2)


def test_an_evaluation_ends_without_those_who_decline(transactions):
    desk = Deciding(transactions(), held_out=0.5, evaluate_every=1, rounds=1)
    for name in (f"client {i}" for i in range(30)):
        desk.present(f"device {name}", [name], 0.0)
    desk.open(0.0)
    for client in desk.invited():
        work(desk, client)
    closed(desk, 1.0)
    for task in desk.tasks(1, 0, "evaluate"):
        assert desk.evaluated(1.0) == []
        assert desk.decline(task.device, task.id) is None
    assert [row.metrics for row in desk.evaluated(1.0)] == ["{}"]
    assert desk.round().phase == "ended"


def test_at_the_deadline_a_quorum_closes_the_round_and_less_repeats_it(transactions):
    desk = begun(transactions, lease=1000)
    a, b, _ = desk.invited()
    work(desk, a), work(desk, b)
    assert desk.due("p", 99.0) is None
    assert closed(desk, 100.0).missing == 1
    desk = begun(transactions)
    first = desk.poll(f"device {a}", 0.0).jobs[0].invitation
    assert desk.due("p", 100.0) is None
    assert (desk.round().attempt, desk.round().number) == (1, 0)
    assert desk.open(100.0)
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
    dead, state = desk.due("p", 1.0), init_server(ALGORITHM, jax.random.key(0))
    first = desk.close(state, dead)
    assert desk.due("q", 30.0) is None
    taken = desk.due("q", 61.0)
    same(first.state, desk.close(state, taken).state)
    with pytest.raises(TakenOverError, match="round 0 is closed by another process"):
        desk.close(state, dead)
    assert desk.commit(taken, 62.0, "file")
    with pytest.raises(TakenOverError):
        desk.close(state, dead)
    assert not desk.commit(dead, 62.0, "file")
    assert desk.round().number == 1


def test_how_long_a_process_may_take_to_close_a_round_is_a_setting():
    config = resolve("planted", None, {"deploy.closing": 5.0})[1]
    assert make_rules(config).closing == 5.0
    assert make_rules(resolve("planted", None, {})[1]).closing == 60.0
    desk = begun(in_memory, closing=make_rules(config).closing)
    for client in desk.invited():
        work(desk, client)
    assert desk.due("p", 1.0)
    assert desk.due("q", 5.9) is None
    assert desk.due("q", 6.0)
    with pytest.raises(UserError, match=r"deploy.closing"):
        resolve("planted", None, {"deploy.closing": 0})


def test_a_process_that_could_not_close_a_round_tries_again_at_once(transactions):
    desk = begun(transactions)
    for client in desk.invited():
        work(desk, client)
    first = desk.due("p", 1.0)
    assert desk.due("q", 2.0) is None
    again = desk.due("p", 2.0)
    assert again.tasks == first.tasks
    assert desk.commit(again, 3.0, "file")
    assert desk.due("p", 4.0) is None


def test_the_last_round_ends_the_run(transactions):
    desk = begun(transactions, rounds=1)
    for client in desk.invited():
        work(desk, client)
    closed(desk, 1.0)
    assert desk.poll("device a", 2.0) == Wait(desk.rules.poll, ended=True)
    assert desk.due("p", 3.0) is None


def test_real_devices_give_the_plain_backends_model_bit_for_bit(make_ratings, transactions):
    """In whatever order they report."""
    store = make_ratings([5, 3, 6, 4, 7, 2], NUM_ITEMS, seed=4, distinct=4)
    plain = PlainSimulation(make_algorithm, RATES, store, Recruiting(3), seed=1)
    list(plain.run(2))
    desk, device = Deciding(transactions()), Device(ALGORITHM)
    names = [str(name) for name in store.client_ids.tolist()]
    for name in names:
        desk.present(f"device {name}", [name], 0.0)
    state = init_server(ALGORITHM, round_rng(1, INIT_ROUND))
    while desk.round().phase != "ended":
        assert desk.open(0.0)
        for name in reversed(desk.invited()):
            [(_, given, *_)] = desk.poll(f"device {name}", 0.0).jobs
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
        Deciding(in_memory(), **changes)


def test_what_a_device_says_of_itself(transactions):
    needs = parse_needs("charging, unmetered,battery:0.3,load:0.8")
    good = {"charging": True, "metered": False, "battery": 0.5, "load": 0.1}
    rules = Deciding(in_memory(), needs=needs).rules
    assert rules.may_work(good)
    for name, value in (("charging", False), ("metered", True), ("battery", 0.2), ("load", 0.9)):
        assert not rules.may_work({**good, name: value})
        assert not rules.may_work({**good, name: None})
        assert not rules.may_work({key: said for key, said in good.items() if key != name})
    assert not rules.may_work({**good, "battery": "full"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chargin", "charging"),
        ("battery", "battery:NUMBER"),
        ("charging:1", "write charging"),
        ("load:x", "from 0 to 1"),
    ],
)
def test_needs_that_cannot_be(text, words):
    with pytest.raises(UserError, match=words):
        parse_needs(text)


def test_held_out_clients_evaluate_and_never_train(transactions):
    names = [f"client {i}" for i in range(40)]
    desk = Deciding(transactions(), held_out=0.4, evaluate_every=2, rounds=2)
    apart = {name for name in names if desk.rules.is_held_out(name)}
    assert 5 < len(apart) < 30
    for name in names:
        desk.present(f"device {name}", [name], 0.0)
    for number in range(2):
        assert desk.open(0.0)
        assert not apart & set(desk.invited())
        for client in desk.invited():
            work(desk, client)
        closed(desk, 1.0)
        assert desk.round().phase == ("waiting" if number == 0 else "evaluating")
    tasks = desk.tasks(2, 0, "evaluate")
    assert len(tasks) == 3
    assert {task.client for task in tasks} <= apart
    for place, task in enumerate(tasks[:2]):
        [(kind, invitation, *_)] = desk.poll(task.device, 1.0).jobs
        assert kind == "evaluate"
        assert desk.evaluated(1.0) == []
        sums = {"loss": Sums(np.float32(2 + place), np.float32(4))}
        assert desk.accept(task.device, write_metrics(invitation.about._replace(version=7), sums), 1.0).reason
        assert desk.accept(task.device, write_metrics(invitation.about, sums), 1.0) == Accepted(
            task.client, True
        )
    assert desk.evaluated(100.0) == []
    [row] = desk.evaluated(101.0)  # the third one never came
    assert json.loads(row.metrics) == {"loss": [5.0, 8.0]}
    assert desk.round().phase == "ended"
    assert desk.evaluated(102.0) == []


def test_clients_that_evaluate_are_as_many_as_a_cohort_however_cohorts_are_drawn(transactions):
    sizes = {"train": set(), "evaluate": set()}
    for seed in range(6):
        recruiting = Recruiting(3, sampling=poisson())
        desk = Deciding(transactions(), recruiting=recruiting, held_out=0.5, evaluate_every=1, seed=seed)
        for name in (f"client {i}" for i in range(30)):
            desk.present(f"device {name}", [name], 0.0)
        assert desk.open(0.0)
        for client in desk.invited():
            work(desk, client)
        sizes["train"].add(len(desk.invited()))
        closed(desk, 1.0)
        sizes["evaluate"].add(len(desk.tasks(1, 0, "evaluate")))
    assert len(sizes["train"]) > 1
    assert sizes["evaluate"] == {3}


def test_a_report_that_is_counted_leaves_no_bytes(transactions):
    desk = begun(transactions)
    sent = {}
    for client in desk.invited():
        given = desk.poll(f"device {client}", 0.0).jobs[0].invitation
        desk.grant(f"device {client}", given.about.task, KEYS, 0.0)
        sent[client] = report_for(given)
        desk.accept(f"device {client}", sent[client], 0.0)
    closed(desk, 1.0)
    for task in desk.tasks(0, 0):
        assert (task.report, task.keys, task.counted) == (None, None, 1)
        assert desk.accept(task.device, sent[task.client], 2.0) == Accepted(task.client, valid=True)
    assert desk.round().number == 1


def buffering(transactions, buffer, concurrency, names="abcdef", **changes):
    desk = Deciding(
        transactions(),
        recruiting=Recruiting(concurrency),
        quorum=1,
        buffer=buffer,
        concurrency=concurrency,
        **changes,
    )
    for name in names:
        desk.present(f"device {name}", [name], 0.0)
    return desk


def at_work(desk, now=0.0):
    with desk.transaction() as book:
        return sorted(book.busy(now))


def test_a_buffer_keeps_so_many_tasks_out(transactions):
    """Tasks that are worked on, and reports that are not in the model yet, are as many as the concurrency."""
    desk = buffering(transactions, 2, 4, rounds=3)
    assert desk.open(0.0)
    first = at_work(desk)
    assert len(first) == 4
    assert not desk.open(0.0)
    a, b, c, d = first
    old = desk.poll(f"device {d}", 0.0).jobs[0].invitation
    work(desk, a)
    assert not desk.open(0.0)
    work(desk, b)
    done = closed(desk, 1.0)
    assert int(done.total.clients) == 2
    assert (desk.round().number, desk.round().phase) == (1, "open")
    assert desk.open(1.0)
    assert len(at_work(desk, 1.0)) == 4
    assert {c, d} <= set(at_work(desk, 1.0))
    work(desk, c, 1.0)
    desk.grant(f"device {d}", old.about.task, KEYS, 1.0)
    assert desk.accept(f"device {d}", report_for(old), 1.0) == Accepted(d, valid=True)
    assert int(closed(desk, 2.0).total.clients) == 2


def test_stale_updates_count_less_and_too_stale_ones_are_refused(transactions):
    state = init_server(ALGORITHM, jax.random.key(0))
    moved = {}
    for power in (0.0, 1.0):
        desk = buffering(transactions, 1, 2, rounds=9, staleness=power, stalest=1, lease=50)
        desk.open(0.0)
        a, b = at_work(desk)
        late = desk.poll(f"device {b}", 0.0).jobs[0].invitation
        desk.grant(f"device {b}", late.about.task, KEYS, 0.0)
        work(desk, a)
        closed(desk, 1.0, state)
        assert desk.accept(f"device {b}", report_for(late), 1.0) == Accepted(b, valid=True)
        after = closed(desk, 2.0, state).state
        moved[power] = np.asarray(after.params["item"]) - np.asarray(state.params["item"])
        desk.open(2.0)
        c = next(name for name in at_work(desk, 2.0) if name != b)
        stale = desk.poll(f"device {c}", 2.0).jobs[0].invitation
        desk.grant(f"device {c}", stale.about.task, KEYS, 2.0)
        for now in (3.0, 4.0):
            desk.open(now)
            other = next(name for name in at_work(desk, now) if name != c)
            work(desk, other, now)
            closed(desk, now, state)
        assert desk.accept(f"device {c}", report_for(stale), 5.0).reason == "stale"
    assert np.abs(moved[0.0]).max() > 0
    assert np.abs(moved[1.0]).max() < np.abs(moved[0.0]).max()


def test_a_device_that_declines_makes_room_for_another(transactions):
    """Even if its task is of a version that is too old to report."""
    desk = buffering(transactions, 1, 2, rounds=9, stalest=0, lease=50)
    desk.open(0.0)
    a, b = at_work(desk)
    late = desk.poll(f"device {b}", 0.0).jobs[0].invitation.about.task
    work(desk, a)
    closed(desk, 1.0)
    assert desk.grant(f"device {b}", late, KEYS, 1.0).reason == "stale"
    assert b in at_work(desk, 1.0)
    assert desk.decline(f"device {b}", late) is None
    assert at_work(desk, 1.0) == []
    assert desk.open(1.0)
    assert len(at_work(desk, 1.0)) == 2


def test_a_lost_device_makes_room_for_another(transactions):
    desk = buffering(transactions, 1, 2, lease=10)
    desk.open(0.0)
    assert len(at_work(desk, 9.9)) == 2
    assert at_work(desk, 10.0) == []
    assert desk.open(10.0)
    assert len(at_work(desk, 10.0)) == 2


def test_buffer_concurrency_and_cohort_of_one_size_are_the_synchronous_run(make_ratings, transactions):
    store = make_ratings([5, 3, 6, 4, 7, 2], NUM_ITEMS, seed=4, distinct=4)
    plain = PlainSimulation(make_algorithm, RATES, store, Recruiting(3), seed=1)
    list(plain.run(3))
    device, names = Device(ALGORITHM), [str(name) for name in store.client_ids.tolist()]
    desk = buffering(transactions, 3, 3, names, rounds=3)
    state = init_server(ALGORITHM, round_rng(1, INIT_ROUND))
    while desk.round().phase != "ended":
        assert desk.open(0.0)
        for name in reversed(at_work(desk)):
            [(_, given, *_)] = desk.poll(f"device {name}", 0.0).jobs
            mine = store.gather([names.index(name)])
            asked = device.ask(mine, given.seed, given.round)
            desk.grant(f"device {name}", given.about.task, asked.keys, 0.0)
            message = send(ALGORITHM.partition, state.params, asked.keys, desk.rng(given.round), given.about)
            desk.accept(f"device {name}", device.report(message, mine, asked), 0.0)
            assert not desk.open(0.0)
        state = closed(desk, 0.0, state).state
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(np.asarray(state.params[path]), np.asarray(leaf))


def test_slices_that_are_files_need_no_request_for_keys(transactions):
    """The report then names its keys."""
    desk = begun(transactions)
    client = desk.invited()[0]
    given = desk.poll(f"device {client}", 0.0).jobs[0].invitation
    assert desk.accept(f"device {client}", report_for(given), 0.0).reason == "malformed"
    keys = KEYS | {"item": np.array([2, 99])}
    assert desk.accept(f"device {client}", report_for(given, keys=keys), 0.0).reason == "keys"
    assert desk.accept(f"device {client}", report_for(given, keys=KEYS), 0.0) == Accepted(client, valid=True)


class Federation(RuleBasedStateMachine):
    """Devices poll, ask, report, repeat themselves and vanish; processes close rounds, die and come back."""

    def __init__(self):
        super().__init__()
        self.book, self.now = MemoryBook(), 0.0
        self.deciding = Deciding(lambda: contextlib.nullcontext(self.book), rounds=4)
        self.held: dict[str, object] = {}  # device -> what it was last given
        self.sent: dict[str, bytes] = {}  # task -> the report that was accepted
        self.declined: set[str] = set()
        self.due: list = []
        self.counted: dict[int, set[str]] = {}
        self.state = init_server(ALGORITHM, jax.random.key(0))
        for name in "abcde":
            self.deciding.present(f"device {name}", [name], 0.0)

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 70.0, 101.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from("abcde"), ready=st.booleans())
    def polls(self, name, ready):
        given = self.deciding.poll(f"device {name}", self.now, ready)
        if isinstance(given, Work):
            assert ready
            self.held[name] = given.jobs[0].invitation

    @rule()
    def draws(self):
        self.deciding.open(self.now)

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

    @rule(name=st.sampled_from("abcde"), other=st.sampled_from("abcde"))
    def declines(self, name, other):
        if name not in self.held:
            return
        task = self.held[name].about.task
        answer = self.deciding.decline(f"device {other}", task)
        if answer is None:
            assert name == other
            assert task not in self.sent
            self.declined.add(task)
        elif name == other:
            assert (answer.reason == "duplicate") == (task in self.sent)
            assert task not in self.declined

    @rule(process=st.sampled_from("pq"))
    def begins_to_close(self, process):
        due = self.deciding.due(process, self.now)
        if due is not None:
            self.due.append(due)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def closes(self, data):
        due = data.draw(st.sampled_from(self.due))
        try:
            done = self.deciding.close(self.state, due)
        except TakenOverError:
            assert not self.deciding.commit(due, self.now, "file")
            return
        if self.deciding.commit(due, self.now, "file"):
            number = due.round.number
            assert number not in self.counted
            self.counted[number] = {task.id for task in due.tasks if task.reported}
            assert int(done.total.clients) == len(self.counted[number]) >= self.deciding.rules.quorum
            self.due.clear()

    @invariant()
    def what_was_accepted_is_what_counts(self):
        """Each accepted report is counted once, or waits, and is the one that was accepted."""
        for task in self.book._tasks.values():
            assert (task.state == "reported") == (task.id in self.sent)
            assert (task.state == "declined") == (task.id in self.declined)
            if task.state == "reported":
                assert task.digest == hashlib.sha256(self.sent[task.id]).hexdigest()
                assert (task.report is None) == (task.counted is not None)
        for number, tasks in self.counted.items():
            assert tasks == {task.id for task in self.book._tasks.values() if task.counted == number + 1}

    @invariant()
    def rounds_follow_one_another(self):
        assert set(self.counted) == set(range(self.deciding.round().number))
        assert (self.deciding.round().phase == "ended") == (self.deciding.round().number == 4)


Federation.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFederation = Federation.TestCase
