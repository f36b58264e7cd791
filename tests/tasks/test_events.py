"""Implicit feedback: hold-outs, models, keyed rows with negatives, and learning from events."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import partwise as pw
from partwise.algorithms.registry import prepare
from partwise.data.generated.planted_events import planted_events
from partwise.data.store import ClientStore
from partwise.device import Device
from partwise.metrics import Pairs
from partwise.papers.next_items import baseline
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.resolve import resolve
from partwise.server.messages import send
from partwise.simulation import evaluator
from partwise.tasks import Task
from partwise.tasks.events import events_task, settings
from partwise.types import UserError

SMALL = {"dim": 4, "length": 4}
QUICK = {"rounds": 2, "cohort.size": 6, "simulation.lanes": 2, "simulation.rounds_per_call": 2}


@pytest.fixture(scope="module")
def events() -> ClientStore:
    return planted_events(num_clients=40, num_items=30, num_groups=3, mean_events=8, seed=1)


def items_of(store: ClientStore, client: int) -> list[int]:
    return store.examples(client)["item"].tolist()


def test_planted_clients_are_the_same_for_any_number_of_clients():
    few, many = planted_events(5, seed=3), planted_events(5000, seed=3)
    for client in range(5):
        np.testing.assert_array_equal(items_of(few, client), items_of(many, client))


def test_the_last_event_is_for_the_test_and_the_one_before_it_for_validation(events):
    task, seen = events_task(events, **SMALL), events_task(events, seen=True, **SMALL)
    for client in range(events.num_clients):
        items = items_of(events, client)
        assert items_of(task.train, client) == items[:-2] == items_of(seen.train, client)
        assert items_of(task.validation, client) == items[:-1]
        assert items_of(task.test, client) == items
        assert items_of(seen.validation, client) == [items[-2]]
        assert items_of(seen.test, client) == [items[-1]]
        history = seen.test.examples(client)["history"][0]
        assert history[history >= 0].tolist() == items[:-1][-4:]  # what came before, however it is held out
    assert task.defaults["evaluation_split.kind"] == "last"
    assert seen.defaults["algorithm"] == "fed_per"


def test_other_hold_outs(events):
    time = events_task(events, holdout="time", **SMALL)
    for client in range(events.num_clients):
        items = items_of(events, client)
        before = items[: -(-len(items) * 80 // 100)]
        assert items_of(time.validation, client) == before
        assert items_of(time.train, client) == before[: -(-len(before) * 80 // 100)]
    clients = events_task(events, holdout="clients", **SMALL)
    assert not set(clients.train.client_ids) & set(clients.test.client_ids)
    with pytest.raises(UserError, match="never seen"):
        events_task(events, holdout="clients", seen=True, **SMALL)


def test_events_are_ordered_by_time_if_there_is_one():
    store = ClientStore.from_arrays([1] * 4, item=["a", "b", "c", "d"], time=[3, 1, 2, 9], ids=["item"])
    task = events_task(store, **SMALL)
    assert store.vocabularies["item"][items_of(task.test, 0)].tolist() == ["b", "c", "a", "d"]


def test_items_come_again_if_clients_take_them_again(events):
    once = ClientStore.from_arrays(np.repeat(np.arange(3), 4), item=np.tile(np.arange(4), 3), ids=["item"])
    assert events_task(once, **SMALL).options["again"] is False
    assert events_task(once, **SMALL).notes == events_task(once, again=False, **SMALL).notes
    often = events_task(events, **SMALL)
    assert often.options["again"] is often.loaded["again"] is True
    assert "so items are recommended again" in often.notes[-1]
    assert events_task(events, again=False, **SMALL).options["again"] is False


def test_one_event_that_is_there_twice_changes_its_client_alone():
    """Any row of a hundred and more is copied: what is decided, and what others are found, stay."""
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.permutation(12)[:6] for _ in range(24)])
    columns = {"user": np.repeat(np.arange(24), 6), "item": items, "time": np.tile(np.arange(6.0), 24)}
    found = []
    for copied in (None, 7, 65):
        rows = np.append(np.arange(len(items)), [] if copied is None else copied).astype(int)
        own = {name: values[rows] for name, values in columns.items()}
        store = ClientStore.from_arrays(own.pop("user"), ids=["item"], **own)
        task, config = resolve(events_task(store, model="two_tower", **SMALL), None, {})
        assert config.data["again"] is task.options["again"] is False
        assert ("1 of 145 events" in task.notes[-1]) == (copied is not None)
        shapes = task.personal.partition.server_shapes
        params = {path: np.full(leaf.shape, 0.1, np.float32) for path, leaf in shapes.items()}
        params["item_bias"] = np.arange(12, dtype=np.float32)
        found.append(make_evaluator(prepare(task, config), config, task.test)(params))
    for other in found[1:]:
        for name in ("hit@10", "ndcg@10", "mrr", "loss"):
            assert abs(other[name] - found[0][name]) <= max(1, found[0][name]) / 24, name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "rnn"}, "model of events"),
        ({"loss": "hinge"}, "the loss is 'hinge'"),
        ({"negatives": "best"}, "way to draw negatives"),
        ({"holdout": "first"}, "hold-out"),
        ({"dim": 1}, "dim"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_options_are_named(events, given, told):
    with pytest.raises(UserError, match=told):
        events_task(events, **{**SMALL, **given})


def test_wrong_stores_are_named():
    with pytest.raises(UserError, match="events_task takes a store"):
        events_task([1, 2, 3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="a column of ids named item"):
        events_task(ClientStore.from_arrays([1], thing=["a"], ids=["thing"]))
    with pytest.raises(UserError, match="at least 3 events"):
        events_task(ClientStore.from_arrays([1, 1, 2], item=["a", "b", "a"], ids=["item"]), **SMALL)


@pytest.mark.parametrize("model", ["two_tower", "transformer"])
def test_scores_do_not_depend_on_padding_or_on_what_comes_later(model):
    """A history in a longer room has the same scores, and items of the history have none."""
    setting = settings(num_items=6, num_users=2, model=model, dim=4, length=5)[0]
    params = setting.model.init(jax.random.key(0))
    batch = {"history": np.array([[2, 4, -1, -1, -1], [-1] * 5]), "item": np.array([1, 1])}
    scores = setting.model.predict(params, batch, jax.random.key(1))
    assert scores.shape == (2, 6)
    assert (scores[0, np.array([2, 4])] < -1e8).all()
    assert (np.asarray(scores)[1] > -1e8).all()
    alone = setting.model.predict(
        params, {name: value[:1] for name, value in batch.items()}, jax.random.key(2)
    )
    np.testing.assert_allclose(alone[0], scores[0], rtol=1e-5)
    other = batch | {"history": np.array([[4, 2, -1, -1, -1], [-1] * 5])}
    swapped = setting.model.predict(params, other, jax.random.key(1))
    same = np.allclose(swapped[0], scores[0], atol=1e-6)
    assert same == (model == "two_tower")  # attention knows the order, a mean does not


def trained(task: Task, changes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The server's parameters after two rounds, and the bytes that were sent to clients."""
    plain_server = {
        "server.optimizer": "sgd",
        "server.rate": 1.0,
    }  # Adam would turn rounding errors into steps
    task, config = resolve(task, None, {**QUICK, **plain_server, **changes})
    simulation = make_simulation(prepare(task, config), config, 2)
    records = [record for call in simulation.run(2) for record in call]
    return dict(simulation.state.params), sum(record.bytes_down or 0 for record in records)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=2e-4, atol=2e-6, err_msg=path)


@pytest.mark.parametrize(
    ("model", "loss", "negatives"),
    [
        ("two_tower", "bpr:3", "popular"),
        pytest.param("two_tower", "sampled:5", "uniform", marks=pytest.mark.slow),
        pytest.param("transformer", "softmax", "uniform", marks=pytest.mark.slow),
    ],
)
def test_compiled_rounds_with_keyed_negatives_equal_the_plain_loop(events, model, loss, negatives):
    """Own items and the rows of negatives, dropout and drawing included."""
    task = events_task(events, model=model, loss=loss, negatives=negatives, **SMALL)
    some = {"select.item": "with_random:7"}
    compiled, bytes_down = trained(task, some)
    plain, plain_down = trained(task, {**some, "simulation.backend": "plain"})
    assert_same(compiled, plain)
    assert bytes_down == plain_down


def test_holding_all_rows_is_the_full_softmax(events):
    """with_random of all keys gives what select = all gives."""
    task = events_task(events, model="two_tower", loss="softmax", dropout=0.0, **SMALL)
    every, whole = trained(task, {"select.item": "all"})
    same, _ = trained(task, {"select.item": "with_random:30"})
    assert_same(every, same)
    _, fewer = trained(task, {"select.item": "with_random:3"})
    assert fewer < whole


@pytest.mark.parametrize("again", [True, False])
def test_a_model_of_popularity_has_the_metrics_of_the_baseline(events, again):
    """Full ranking in the evaluator against a loop over clients: biases as counts, vectors of zero. What is not
    recommended again is not found."""
    task, config = resolve(
        events_task(events, model="two_tower", dim=4, length=30, again=again),
        None,
        {"reconstruct.method": "skip"},
    )
    server, _ = task.personal.partition.split(task.personal.model.init(jax.random.key(0)))
    counts = np.bincount(
        np.concatenate([items_of(task.train, c) for c in range(task.train.num_clients)]), minlength=30
    )
    params = {path: np.zeros_like(leaf) for path, leaf in server.items()} | {"item_bias": counts * 1.0}
    found = make_evaluator(prepare(task, config), config, task.test)(params)
    expected = baseline(task, own=False)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def by_hand(params: Any, items: list[int]) -> list[int]:
    """The ten best after all but the last event, of a two-tower model whose own vector is zero."""
    history = items[:-1][-4:]
    hidden = params["item"][history].mean(axis=0) @ params["history/kernel"] + params["history/bias"]
    scores = params["item"] @ hidden + params["item_bias"]
    return [item for item in np.argsort(-scores, kind="stable").tolist() if item not in history][:10]


def test_coverage_is_what_ten_places_of_every_judged_client_hold(monkeypatch):
    """All clients at once equal one device after the other, and both equal a sorted list without the history."""
    monkeypatch.setattr(evaluator, "CLIENTS_PER_CALL", 4)  # in two calls
    rng, counts = np.random.default_rng(2), [4, 20, 4, 17, 4, 4]
    items = np.concatenate([rng.permutation(40)[:count] for count in counts])
    store = ClientStore.from_arrays(np.repeat(np.arange(6), counts), item=items, ids=["item"])
    task, config = resolve(
        events_task(store, model="two_tower", **SMALL), None, {"reconstruct.method": "skip"}
    )
    prepared, parts = prepare(task, config), task.personal.partition
    params = {path: rng.standard_normal(leaf.shape, np.float32) for path, leaf in parts.server_shapes.items()}
    evaluate = make_evaluator(prepared, config, task.test)
    device, message_rng = Device(evaluate.algorithm), round_rng(config.seed, EVALUATION_ROUND)
    one_by_one = []
    for client in range(store.num_clients):
        mine = evaluate.store.gather([client])
        message = send(parts, params, device.ask_whole(mine).keys, message_rng)
        found = device.evaluate(message, mine)["coverage@10"]
        assert isinstance(found, Pairs)
        one_by_one += np.asarray(found.scores)[np.asarray(found.held)].tolist()
    assert one_by_one == [by_hand(params, items_of(task.test, client)) for client in range(store.num_clients)]
    together = evaluate.measure(params)[1]["coverage@10"].scores
    assert together.dtype == np.int32
    assert sorted(together.tolist()) == sorted(one_by_one)
    told, num_items = evaluate(params), store.num_keys("item")
    assert told["coverage@10"] == len({item for ten in one_by_one for item in ten}) / num_items < 1
    assert told["over_clients"]["coverage@10"] == {"clients": store.num_clients}


def test_one_step_of_adam_in_one_place_is_adam_on_the_batch(events):
    """central with update.max_steps = 1 and update.rate = 1 gives the server the gradient of a batch."""
    task = events_task(events, model="two_tower", dropout=0.0, seen=True, **SMALL)
    assert task.defaults["central"]["server.optimizer"] == "adam"
    run = pw.train(
        task, changes={"algorithm": "central", "rounds": 1, "update.batch_size": 10_000, "server.rate": 0.01}
    )
    setting = task.stateful
    assert setting is not None
    start, _ = setting.partition.split(setting.model.init(jax.random.fold_in(jax.random.key(0), 0xFFFFFFFE)))
    moved = np.abs(np.asarray(run.params["item"]) - np.asarray(start["item"]))
    assert moved.max() == pytest.approx(
        0.01, rel=0.01
    )  # Adam's first step is the rate, in every coordinate that moves


@pytest.mark.slow
def test_events_are_learned_and_the_own_part_finds_more():
    """Planted events: far above popularity. Of a history of one item, the client's taste is not to be seen; its own
    part finds more of what it takes then. (A history of ten items shows the taste itself.)"""
    short = {"rounds": 200, "data.model": "two_tower", "data.length": 1, "simulation.evaluate_every": 200}
    run = pw.train("events-planted", changes=short)
    assert run.test["ndcg@10"] > 2 * baseline(run.task, own=False)["ndcg@10"]
    without = pw.train("events-planted", changes=short | {"reconstruct.method": "skip"})
    assert run.test["hit@10"] > without.test["hit@10"] + 0.02
