"""A server's round without I/O: whom it serves, what it accepts, what it refuses and why."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_server
from partwise.algorithms.fed_recon import fed_recon
from partwise.checkpoint import from_bytes, to_bytes
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.metrics import Sums
from partwise.model.partition import keyed, local, partition
from partwise.server.mean import mean
from partwise.server.messages import read_invitation
from partwise.server.report_form import SUMS
from partwise.server.round import Accepted, Refused, Server
from partwise.server.total import Contribution
from partwise.types import UserError

NUM_ITEMS, DIM = 10, 3
RNG = jax.random.key(4)


@pytest.fixture(scope="module")
def algorithm(biased_model):
    model = biased_model(NUM_ITEMS, DIM)
    return fed_recon(
        model,
        partition(model, {"user": local(), "item/*": keyed("item")}),
        split=split.none(),
        reconstruct=reconstruct.skip(),
        update=update.by_steps(Batches(4), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )


@pytest.fixture(scope="module")
def server(algorithm):
    return Server(algorithm, "run a")


@pytest.fixture(scope="module")
def device(algorithm):
    return Device(algorithm)


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([5, 6, 0, 7], NUM_ITEMS, seed=5)


@pytest.fixture
def state(algorithm):
    return init_server(algorithm, jax.random.key(0))


def report_of(now, device, store, position, task):
    """What a client would send for its task."""
    examples = store.gather([position])
    asked = device.ask(examples, task.seed, task.round)
    return device.report(now.serve(task.about.task, asked.keys), examples, asked)


@pytest.fixture
def begun(server, device, store, state):
    """A round with clients a and b, their tasks, and a's report."""
    now = server.begin(state, 3, RNG)
    a, b = map(read_invitation, now.invite(["a", "b"]))
    return now, a, b, report_of(now, device, store, 0, a)


def changed(report, header=None, **arrays):
    """The report with other things in it."""
    had, told = from_bytes(report)
    return to_bytes({**had, **arrays}, told | (header or {}))


def params_of(closed):
    return {path: np.asarray(leaf) for path, leaf in closed.state.params.items()}


def test_a_round_from_invitation_to_the_next_version(server, device, store, state):
    now = server.begin(state, 3, RNG)
    names = ["a", "b", "c", "d"]
    tasks = [read_invitation(data) for data in now.invite(names)]
    assert {task.about.version for task in tasks} == {3}
    assert len({task.about.task for task in tasks}) == 4
    for position in (3, 0, 2):  # the second never answers, the third has no example
        verdict = now.accept(report_of(now, device, store, position, tasks[position]))
        assert verdict == Accepted(names[position], valid=True)
    closed = now.close()
    assert (int(closed.total.clients), closed.empty, closed.missing) == (2, 1, 1)
    assert closed.total.weight == 12
    asked = [np.unique(store.examples(i)["item"]) for i in (3, 0)]
    assert closed.demands["item"].distinct == len(np.union1d(*asked))
    moved = np.flatnonzero((params_of(closed)["item/table"] != state.params["item/table"]).any(axis=1))
    assert set(moved) <= set(np.union1d(*asked))
    assert len(moved) > 0


def test_the_order_of_reports_and_who_else_was_invited_do_not_matter(server, device, store, state):
    versions = []
    for names, order in ((["a", "b", "d"], (0, 2)), (["a", "b", "d"], (2, 0))):
        now = server.begin(state, 3, RNG)
        tasks = [read_invitation(data) for data in now.invite(names)]
        for i in order:
            assert now.accept(report_of(now, device, store, (0, 1, 3)[i], tasks[i]))
        versions.append(params_of(now.close()))
    for path, leaf in versions[0].items():
        np.testing.assert_allclose(versions[1][path], leaf, rtol=1e-6, atol=1e-7)


def test_nobody_reports_and_nothing_moves(begun, state):
    closed = begun[0].close()
    assert (int(closed.total.clients), closed.missing) == (0, 2)
    for path, leaf in params_of(closed).items():
        np.testing.assert_array_equal(leaf, state.params[path])


def test_slices_may_be_asked_for_again_but_not_others(begun, device, store):
    now, a, _, _ = begun
    keys = device.ask(store.gather([0])).keys
    assert now.serve(a.about.task, keys) == now.serve(a.about.task, keys)
    other = now.serve(a.about.task, {"item": np.arange(2)})
    assert isinstance(other, Refused)
    assert other.reason == "keys"
    assert now.close().demands["item"].counts.tolist() == [len(keys["item"])]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"item": np.array([1, 10])},
        {"item": np.array([-1, 2])},
        {"item": np.array([2, 1])},
        {"item": np.array([1, 1])},
        {"item": np.array([1.0])},
        {"item": np.array([[1]])},
        {"item": np.array([1]), "user": np.array([0])},
    ],
)
def test_keys_that_are_none_are_refused(begun, keys):
    now, _, b, _ = begun
    assert now.serve(b.about.task, keys).reason == "keys"
    assert now.serve("no such task", {"item": np.array([1])}).reason == "task"


FORGED = {
    "bytes that are nothing": (lambda r: b"\x00" * 40, "malformed"),
    "no bytes": (lambda r: b"", "malformed"),
    "cut off": (lambda r: r[:-3], "malformed"),
    "too long": (lambda r: r + bytes(2 << 20), "malformed"),
    "a header that is too long": (lambda r: (1 << 40).to_bytes(8, "little") + r[8:], "malformed"),
    "another run": (lambda r: changed(r, {"run": "run b"}), "run"),
    "an old version": (lambda r: changed(r, {"version": 2}), "version"),
    "another model": (lambda r: changed(r, {"model": "0" * 32}), "model"),
    "a version in words": (lambda r: changed(r, {"version": "3"}), "malformed"),
    "another format": (lambda r: changed(r, {"format": 2}), "malformed"),
    "another kind": (lambda r: changed(r, {"kind": "slices"}), "malformed"),
    "nobody's task": (lambda r: changed(r, {"task": "f" * 32}), "task"),
    "a leaf too many": (lambda r: changed(r, more=np.zeros(3, np.float32)), "malformed"),
    "another shape": (lambda r: changed(r, base=np.zeros(2, np.float32)), "malformed"),
    "another type": (lambda r: changed(r, base=np.zeros(1, np.float64)), "malformed"),
    "not a number": (lambda r: changed(r, base=np.full(1, np.nan, np.float32)), "not finite"),
    "no weight": (lambda r: changed(r, **{SUMS: np.array([0, 1, 0, 0], np.float32)}), "weight"),
    "a weight below zero": (lambda r: changed(r, **{SUMS: np.array([-2, 0, 0, 0], np.float32)}), "weight"),
    "many clients at once": (lambda r: changed(r, **{SUMS: np.array([2, 9, 0, 0], np.float32)}), "weight"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_report_is_refused_by_name_and_changes_nothing(begun, name):
    now, _, _, report = begun
    forge, reason = FORGED[name]
    verdict = now.accept(forge(report))
    assert isinstance(verdict, Refused)
    assert verdict.reason == reason, verdict.what
    assert now.accept(report) == Accepted("a", valid=True)
    assert now.accept(report).reason == "duplicate"
    closed = now.close()
    assert (int(closed.total.clients), closed.bytes_up) == (1, len(report))


def test_who_was_not_served_must_name_its_keys(begun):
    now, _, b, report = begun
    assert now.accept(changed(report, {"task": b.about.task})).reason == "malformed"


def test_an_update_that_is_not_finite_is_counted_and_not_added(begun, state):
    now, _, _, report = begun
    told = from_bytes(report)[1]
    assert now.accept(to_bytes({}, told | {"valid": False})) == Accepted("a", valid=False)
    closed = now.close()
    assert (closed.broken, closed.empty, int(closed.total.clients)) == (("a",), 0, 0)
    for path, leaf in params_of(closed).items():
        np.testing.assert_array_equal(leaf, state.params[path])


def test_what_comes_after_the_end_is_refused_and_nothing_is_closed_twice(begun):
    now, _, b, report = begun
    now.close()
    assert now.accept(report).reason == "closed"
    assert now.serve(b.about.task, {"item": np.array([1])}).reason == "closed"
    for again in (now.close, lambda: now.invite(["c"])):
        with pytest.raises(UserError, match="round 3 is closed already"):
            again()


def test_a_client_is_invited_once(begun):
    with pytest.raises(UserError, match="'a' was invited to this round already"):
        begun[0].invite(["c", "a"])


def test_no_two_tasks_have_the_same_name_whatever_clients_are_called(server):
    clients = ["x", "x/1", "1/x", "x/evaluate", "x.1", ""]
    tasks = [
        server.about(number, client, attempt, kind).task
        for client in clients
        for number in (1, 11)
        for attempt in (0, 1, 11)
        for kind in ("train", "evaluate")
    ]
    assert len(set(tasks)) == len(tasks)


def test_clients_of_similar_sizes_share_programs(algorithm, device, store, state):
    """Sum and step are compiled once for sizes of up to the same power of two."""
    server = Server(algorithm)
    for number in range(3):
        now = server.begin(state, number, RNG)
        for position, data in zip((0, 1, 3), now.invite("abd"), strict=True):
            now.accept(report_of(now, device, store, position, read_invitation(data)))
        state = now.close().state
    assert server.add._cache_size() <= 2
    assert server.finish._cache_size() == 1


@pytest.fixture(scope="module")
def holding(biased_model):
    """A server whose mean is over the holders of a row, so that sums say who holds it."""
    model = biased_model(NUM_ITEMS, DIM)
    return Server(
        fed_recon(
            model,
            partition(model, {"user": local(), "item/*": keyed("item")}),
            split=split.none(),
            reconstruct=reconstruct.skip(),
            update=update.by_steps(Batches(4), 0.1),
            optimizer=optimizers.Sgd(1.0).on_server(),
            aggregator=mean(over_holders=("item",)),
        ),
        "run a",
    )


def sum_of_four(server, task, weight=12.0, clients=3.0, held=(12.0, 5.0)):
    """The report of a site for its task, on two rows."""
    keys, rng = {"item": np.array([2, 7])}, np.random.default_rng(0)
    shapes = server.form.shapes({"item": 2}, clients=4)
    leaves = {path: rng.normal(size=x.shape).astype(x.dtype) for path, x in shapes.items() if path[0] != "#"}
    number = np.float32
    held = {} if held is None else {"item": np.array(held, np.float32)}
    sums = Sums(number(3), number(weight))
    sent = Contribution(leaves, number(weight), number(clients), sums, np.asarray(True), held)
    return server.form.write(task.about, sent, keys)


def test_the_sum_of_a_site_is_divided_by_the_holders_of_each_row(holding):
    state = init_server(holding.algorithm, jax.random.key(0))
    now = holding.begin(state, 3, RNG)
    (task,) = map(read_invitation, now.invite(["site"], {"site": 4}))
    report = sum_of_four(holding, task)
    assert now.accept(report) == Accepted("site", valid=True)
    assert now.accept(report).reason == "duplicate"
    closed = now.close()
    assert (int(closed.total.clients), closed.empty, closed.missing) == (3, 1, 0)
    table = from_bytes(report)[0]["item/table"]
    moved = params_of(closed)["item/table"] - np.asarray(state.params["item/table"])
    np.testing.assert_allclose(moved[[2, 7]], table / np.array([[12.0], [5.0]]), rtol=1e-4, atol=1e-6)
    assert not np.any(np.delete(moved, [2, 7], axis=0))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"clients": 5.0}, "weight"),
        ({"clients": 2.5}, "weight"),
        ({"clients": -1.0}, "weight"),
        ({"clients": np.nan}, "weight"),
        ({"clients": 0.0}, "weight"),
        ({"weight": 0.0, "held": (0.0, 0.0)}, "weight"),
        ({"weight": -12.0, "held": (0.0, 0.0)}, "weight"),
        ({"weight": np.inf}, "not finite"),
        ({"held": (np.nan, 5.0)}, "not finite"),
        ({"held": (-1.0, 5.0)}, "weight"),
        ({"held": (13.0, 5.0)}, "weight"),
        ({"held": (12.0, 5.0, 5.0)}, "malformed"),
        ({"held": None}, "malformed"),
    ],
    ids=str,
)
def test_a_sum_that_no_site_sends_is_refused_by_name(holding, lie, reason):
    now = holding.begin(init_server(holding.algorithm, jax.random.key(0)), 3, RNG)
    (task,) = map(read_invitation, now.invite(["site"], {"site": 4}))
    verdict = now.accept(sum_of_four(holding, task, **lie))
    assert isinstance(verdict, Refused)
    assert verdict.reason == reason, verdict.what
    assert now.accept(sum_of_four(holding, task, weight=0.0, clients=0.0, held=(0.0, 0.0))).valid


def test_who_is_one_client_sends_no_sum(holding):
    now = holding.begin(init_server(holding.algorithm, jax.random.key(0)), 3, RNG)
    (task,) = map(read_invitation, now.invite(["a"]))
    assert "no business with '#held:item'" in now.accept(sum_of_four(holding, task, clients=1.0)).what
    assert now.accept(sum_of_four(holding, task, clients=3.0, held=None)).reason == "weight"
    with pytest.raises(UserError, match="invited for 0 clients"):
        now.invite(["site"], {"site": 0})
