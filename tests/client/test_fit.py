"""Gradient steps against a loop written out in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise.client.batches import Batches
from partwise.client.fit import fit
from partwise.client.split import everything
from partwise.client.state import begin
from partwise.model.partition import keyed, local, partition
from partwise.randomness import child

NUM_ITEMS, DIM, RATE = 6, 2, 0.1
ALL = ("shared", "keyed", "local")
ITEMS = np.array(
    [4, 1, 1, 1, 3, 4, 0, 5, 4], np.int32
)  # item 1 fills a whole batch of 2; 2 is never asked for
RATINGS = np.array([3, 1, 4, 1, 5, 2, 2, 4, 3], np.float32)


@pytest.fixture(scope="module")
def model(biased_model):
    return biased_model(NUM_ITEMS, DIM)


@pytest.fixture(scope="module")
def parts(model):
    return partition(model, {"user": local(), "item/*": keyed("item")})


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(7))


@pytest.fixture(scope="module")
def train(model, parts, params, make_store, make_client):
    """(count, schedule, optimizer, groups) -> (tables after training by key, local, shared, sums)."""

    def run(count, schedule, optimizer, groups=ALL, roles=parts, **changes):
        store = make_store([count], item=ITEMS[:count], rating=RATINGS[:count])
        client = make_client(model, roles, params, store)
        client = client._replace(examples=client.examples._replace(**changes))
        go = jax.jit(lambda p: fit(client, p, everything, schedule, optimizer, groups))
        trained = go(begin(client))
        tables = {path: np.array(leaf) for path, leaf in client.received.tables.items()}
        for space, keys in client.examples.keys.items():
            for path in roles.spaces[space]:
                if trained.progress.keyed:
                    own = np.asarray(keys.rows)[: int(keys.count)]
                    tables[path][own] += trained.progress.keyed[path][: len(own)]
        return tables | dict(trained.progress.shared) | dict(trained.progress.local), trained.loss

    return run


def by_hand(params, start_user, count, schedule, groups=ALL):
    """SGD on the mean squared error of each batch's real examples, in double precision."""
    user = np.array(start_user, np.float64)
    table, offset = (np.array(params["item"][name], np.float64) for name in ("table", "offset"))
    base, losses, seen = np.array(params["base"], np.float64), 0.0, 0
    batches = [range(i, min(i + schedule.batch_size, count)) for i in range(0, count, schedule.batch_size)]
    batches = batches * (schedule.epochs if schedule.epochs is not None else 99)
    for batch in batches[: schedule.max_steps]:
        d_user, d_table, d_offset, d_base = (np.zeros_like(x) for x in (user, table, offset, base))
        for j in batch:
            item = ITEMS[j]
            error = table[item] @ user + offset[item] + base[0] - RATINGS[j]
            slope = 2 * error / len(batch)
            d_user += slope * table[item]
            d_table[item] += slope * user
            d_offset[item] += slope
            d_base += slope
            losses, seen = losses + error**2, seen + 1
        if "local" in groups:
            user = user - RATE * d_user
        if "keyed" in groups:
            table, offset = table - RATE * d_table, offset - RATE * d_offset
        if "shared" in groups:
            base = base - RATE * d_base
    return {"user": user, "item/table": table, "item/offset": offset, "base": base}, (losses, seen)


def first_user(model):
    return model.init(child(jax.random.key(0), "init"))["user"]  # of a client made with seed 0


def assert_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


CASES = [
    pytest.param(9, Batches(2, 1), id="the last batch is not full"),
    pytest.param(9, Batches(4, 3), id="epochs cycle"),
    pytest.param(9, Batches(4, 3, 5), id="max_steps ends it"),
    pytest.param(9, Batches(4, None, 7), id="max_steps alone"),
    pytest.param(3, Batches(8, 2), id="one batch, partly filled"),
    pytest.param(9, Batches(4, 0), id="no epoch"),
    pytest.param(9, Batches(4, 2, 0), id="no step"),
    pytest.param(0, Batches(4, 2, 5), id="no example"),
]


@pytest.mark.parametrize(("count", "schedule"), CASES)
def test_sgd_equals_the_loop_by_hand(model, params, train, count, schedule):
    found, loss = train(count, schedule, RATE)
    expected, (value, weight) = by_hand(params, first_user(model), count, schedule)
    assert_equal(found, expected)
    np.testing.assert_allclose(loss.value, value, rtol=1e-4)
    assert loss.weight == weight


@pytest.mark.parametrize("groups", [("local",), ("shared", "keyed"), ("keyed",)], ids=str)
def test_groups_that_are_not_named_stay(model, params, train, groups):
    found, _ = train(9, Batches(4, 2), RATE, groups)
    assert_equal(found, by_hand(params, first_user(model), 9, Batches(4, 2), groups)[0])


@pytest.mark.parametrize(("count", "schedule"), [CASES[0].values, CASES[1].values, CASES[7].values])
def test_optax_sgd_equals_a_plain_rate(train, count, schedule):
    """Also where one id occurs several times in a batch."""
    plain, plain_loss = train(count, schedule, RATE)
    general, loss = train(count, schedule, optax.sgd(RATE))
    assert_equal(general, plain, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(loss.value, plain_loss.value, rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(0.05), optax.sgd(0.1, momentum=0.9), optax.adamw(0.05, weight_decay=0.5)],
    ids=["adam", "momentum", "adamw"],
)
def test_any_optimizer_on_a_slice_equals_it_on_the_table(model, params, train, optimizer):
    """The same steps with the item leaves whole (role shared): the client's rows end up the same."""
    whole = partition(model, {"user": local()})
    on_slice, _ = train(9, Batches(4, 3), optimizer)
    on_table, _ = train(9, Batches(4, 3), optimizer, ("shared", "local"), whole)
    asked = np.unique(ITEMS)
    for path in ("item/table", "item/offset"):
        np.testing.assert_allclose(on_slice[path][asked], on_table[path][asked], rtol=1e-5, atol=1e-6)
    assert_equal({k: on_slice[k] for k in ("user", "base")}, {k: on_table[k] for k in ("user", "base")})
    never = np.setdiff1d(np.arange(NUM_ITEMS), asked)
    np.testing.assert_array_equal(on_slice["item/table"][never], params["item"]["table"][never])


@pytest.mark.parametrize("optimizer", [RATE, optax.adam(0.05)], ids=["rate", "adam"])
def test_a_longer_neighbour_changes_nothing(train, optimizer):
    """A lane that is done goes on with empty batches, which move neither parameters nor optimizer state."""
    alone, _ = train(3, Batches(2, 2), optimizer)
    beside, loss = train(3, Batches(2, 2), optimizer, longest=jnp.asarray(9))
    assert_equal(beside, alone, rtol=0, atol=0)
    assert loss.weight == 6


@pytest.mark.parametrize("optimizer", [RATE, optax.adam(0.05)], ids=["rate", "adam"])
def test_a_neighbours_broken_value_does_not_reach_an_empty_client(params, train, model, optimizer):
    """An empty client (or an empty lane) looks at a row that is not its own; a NaN there is not its own."""
    poisoned = {"item": jnp.zeros(1, jnp.int32), "rating": jnp.full(1, jnp.nan)}
    found, loss = train(0, Batches(2, 2), optimizer, columns=poisoned, longest=jnp.asarray(9))
    assert_equal(found, by_hand(params, first_user(model), 0, Batches(2, 2))[0])
    assert float(loss.value) == 0


def test_weighted_examples_count_by_weight(model, params, parts, make_store, make_client):
    """The mean of a batch is over weights (tokens, say), once: sum of losses over sum of weights."""
    heavy = model._replace(weight=lambda batch: batch["tokens"])
    store = make_store([3], item=ITEMS[:3], rating=RATINGS[:3], tokens=np.array([1, 5, 2], np.float32))
    client = make_client(heavy, parts, params, store)
    trained = jax.jit(lambda p: fit(client, p, everything, Batches(4), RATE, ("shared",)))(begin(client))
    table, offset, user = params["item"]["table"], params["item"]["offset"], first_user(model)
    errors = table[ITEMS[:3]] @ user + offset[ITEMS[:3]] + params["base"][0] - RATINGS[:3]
    expected = params["base"][0] - RATE * 2 * np.sum(errors) / 8
    np.testing.assert_allclose(trained.progress.shared["base"][0], expected, rtol=1e-5)
    assert trained.loss.weight == 8
