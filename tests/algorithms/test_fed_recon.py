"""FedRecon and FedAvg: rounds written out in numpy, and the equivalences the papers claim."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.client.state import begin
from partwise.device import Device
from partwise.model.partition import keyed, local, partition
from partwise.randomness import child, client_numbers, client_rng, words
from partwise.server.round import Server
from partwise.server.step import init_state
from partwise.simulation.plain import plain_round
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

NUM_ITEMS, DIM = 9, 3
RECON_RATE, UPDATE_RATE, SERVER_RATE = 0.2, 0.3, 0.7
COUNTS = [11, 2, 5]  # query sets of 5, 0 and 2 examples
ROUND = jax.random.key(12)


@pytest.fixture(scope="module")
def model():
    return matrix_factorization(NUM_ITEMS, DIM, scale=0.5)


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=3, ids=[41, 7, 260], distinct=4)


@pytest.fixture(scope="module")
def users_model():
    return matrix_factorization(NUM_ITEMS, DIM, num_users=5, scale=0.5)


def recon(model, item=None, **changes):
    settings = {
        "split": split.alternate(2),
        "reconstruct": reconstruct.by_steps(Batches(4, 2), RECON_RATE),
        "update": update.by_steps(Batches(3), UPDATE_RATE),
        "optimizer": optimizers.Sgd(SERVER_RATE).on_server(),
    }
    rules = {"user": local()} | ({} if item is None else {"item": item})
    return fed_recon(model, partition(model, rules), **settings | changes)


def one_round(algorithm, store, clients=None):
    """(parameters before, parameters after) a round with these clients, bytes in and bytes out."""
    params = init_params(algorithm, jax.random.key(0))
    state = init_state(algorithm.partition, algorithm.optimizer, params)
    clients = range(store.num_clients) if clients is None else clients
    after = plain_round(Server(algorithm), Device(algorithm), state, store, list(clients), ROUND).closed
    as_numpy = lambda leaves: {path: np.array(leaf) for path, leaf in leaves.items()}
    return as_numpy(params), as_numpy(after.state.params)


@pytest.fixture(scope="module")
def keyed_round(model, store):
    return one_round(recon(model, keyed("item")), store)


def first_user(model, store, position):
    """The l^(t,0) of a client: the model's own draw with the round's randomness and the client's number."""
    rng = client_rng(ROUND, words(client_numbers(store.client_ids)[position]))
    return np.array(model.init(child(rng, "init"))["user"], np.float64)


def batches(rows, size):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def deal(count, size):
    """Batches in turn to support and query."""
    dealt = batches(list(range(count)), size)
    return [j for b in dealt[0::2] for j in b], [j for b in dealt[1::2] for j in b]


def test_a_round_by_hand(model, store, keyed_round):
    """Algorithm 1 for three clients; the second has an empty query set and does not count."""
    before, after = keyed_round
    start, summed, weights = before["item"].astype(np.float64), 0.0, []
    for position in range(3):
        columns = store.examples(position)
        items, ratings = columns["item"], columns["rating"]
        support, query = deal(len(items), 2)
        user, item = first_user(model, store, position), start.copy()
        for batch in batches(support, 4) * 2:  # k_r: two epochs over the support set
            errors = item[items[batch]] @ user - ratings[batch]
            user = user - RECON_RATE * 2 * (errors @ item[items[batch]]) / len(batch)
        for batch in batches(query, 3):  # k_u: one epoch over the query set, the user's vector frozen
            errors = item[items[batch]] @ user - ratings[batch]
            slope = np.zeros_like(item)
            np.add.at(slope, items[batch], 2 * np.outer(errors, user) / len(batch))
            item = item - UPDATE_RATE * slope
        summed = summed + len(query) * (item - start)
        weights.append(len(query))
    assert weights == [5, 0, 2]
    np.testing.assert_allclose(after["item"], start + SERVER_RATE * summed / 7, rtol=1e-4, atol=1e-5)
    assert np.abs(after["item"] - before["item"]).max() > 0.1


def test_a_client_with_an_empty_query_set_weighs_nothing(model, store, keyed_round):
    _, without = one_round(recon(model, keyed("item")), store, clients=[0, 2])
    np.testing.assert_allclose(keyed_round[1]["item"], without["item"], rtol=1e-6)
    before, alone = one_round(recon(model, keyed("item")), store, clients=[1])
    np.testing.assert_array_equal(before["item"], alone["item"])


def test_item_rows_on_slices_equal_the_whole_matrix(model, store, keyed_round):
    before, whole = one_round(recon(model), store)
    np.testing.assert_array_equal(before["item"], keyed_round[0]["item"])
    np.testing.assert_allclose(whole["item"], keyed_round[1]["item"], rtol=1e-5, atol=1e-6)


def test_one_update_step_is_first_order_meta_learning(model, store):
    """Appendix B: k_u = 1 is SGD with rate eta_s * eta_u on the meta-objective, R held constant."""
    algorithm = recon(
        model,
        keyed("item"),
        reconstruct=reconstruct.by_steps(Batches(16, 3), RECON_RATE),
        update=update.by_steps(Batches(16), UPDATE_RATE),
    )
    before, after = one_round(algorithm, store)

    def loss(item, user, position, rows):
        batch = {name: jnp.asarray(column[rows]) for name, column in store.examples(position).items()}
        return jnp.mean(model.loss(model.predict({"user": user, "item": item}, batch, None), batch))

    def objective(item):
        total = 0.0
        for position in (0, 2):
            support, query = deal(COUNTS[position], 2)
            user = jnp.asarray(first_user(model, store, position), jnp.float32)
            for _ in range(3):
                user = user - RECON_RATE * jax.grad(loss, 1)(item, user, position, np.array(support))
            rebuilt = jax.lax.stop_gradient(user)
            total = total + len(query) / 7 * loss(item, rebuilt, position, np.array(query))
        return total

    expected = before["item"] - SERVER_RATE * UPDATE_RATE * jax.grad(objective)(jnp.asarray(before["item"]))
    np.testing.assert_allclose(after["item"], expected, rtol=1e-5, atol=1e-6)


def test_without_local_leaves_and_without_a_split_it_is_fed_avg(users_model, store):
    steps = update.by_steps(Batches(3, 2), UPDATE_RATE)
    parts = partition(users_model, {})
    shared = {"update": steps, "optimizer": optimizers.Sgd(SERVER_RATE).on_server()}
    whole = fed_recon(users_model, parts, split=split.none(), reconstruct=reconstruct.skip(), **shared)
    _, by_recon = one_round(whole, store)
    before, by_average = one_round(fed_avg(users_model, parts, **shared), store)
    for path in before:
        np.testing.assert_array_equal(by_recon[path], by_average[path])
        assert np.abs(by_average[path] - before[path]).max() > 1e-3


def test_fed_avg_with_a_user_table_moves_only_the_users_who_took_part(users_model, store):
    """Each by its own training alone, scaled by its weight: a row travels to one client only."""
    parts = partition(users_model, {"user": keyed("user"), "item": keyed("item")})
    algorithm = fed_avg(
        users_model,
        parts,
        update=update.by_steps(Batches(16), UPDATE_RATE),
        optimizer=optimizers.Sgd(SERVER_RATE).on_server(),
    )
    before, after = one_round(algorithm, store, clients=[0, 2])
    np.testing.assert_array_equal(after["user"][[1, 3, 4]], before["user"][[1, 3, 4]])
    for position in (0, 2):
        columns = store.examples(position)
        rows, user = before["item"][columns["item"]], before["user"][position]
        slope = 2 * (rows @ user - columns["rating"]) @ rows / len(rows)
        expected = user - SERVER_RATE * COUNTS[position] / 16 * UPDATE_RATE * slope
        np.testing.assert_allclose(after["user"][position], expected, rtol=1e-4, atol=1e-5)
    unseen = np.setdiff1d(np.arange(NUM_ITEMS), store.gather([0, 2]).columns["item"])
    np.testing.assert_array_equal(after["item"][unseen], before["item"][unseen])


def test_fed_avg_refuses_local_leaves(model):
    with pytest.raises(UserError, match=r"FedAvg has no local parameters, but user is local.*use fed_recon"):
        fed_avg(
            model, partition(model, {"user": local()}), update=None, optimizer=optimizers.Sgd(1.0).on_server()
        )


def test_two_passes_repeat_both_halves_from_where_the_other_ended(model, store, make_client):
    solving = {
        "split": split.none(),
        "reconstruct": reconstruct.by_solving(0.1),
        "update": update.by_solving(0.1),
    }
    algorithm = recon(model, keyed("item"), passes=2, **solving)
    client = make_client(model, algorithm.partition, model.init(jax.random.key(0)), store)

    @jax.jit
    def by_hand():
        progress = begin(client)
        for _ in range(2):
            progress = solving["reconstruct"](client, progress, split.everything)
            progress = solving["update"](client, progress, split.everything).progress
        return progress

    report = jax.jit(lambda: algorithm.client(client))()
    np.testing.assert_allclose(report.update["item"], by_hand().keyed["item"], rtol=1e-4, atol=1e-5)
    assert report.weight == COUNTS[0]


def test_evaluation_may_split_otherwise_than_training(model, store, make_client):
    algorithm = recon(model, keyed("item"), evaluation_split=split.halves(20))
    client = make_client(model, algorithm.partition, model.init(jax.random.key(0)), store)
    sums = jax.jit(lambda: algorithm.evaluate(client))()
    assert sums["rmse"].weight == 8  # of 11, 3 to support
    assert set(sums) == {"loss", "rmse", "accuracy"}


@pytest.mark.parametrize("name", ["fed_recon", "fed_avg"])
def test_a_client_weighs_what_its_examples_weigh(users_model, make_store, make_client, name):
    """An example may count for several (its tokens): in the mean of a batch, and in n_i."""
    heavy = users_model._replace(weight=lambda batch: batch["tokens"])
    columns = {"user": [0] * 4, "item": [0, 1, 2, 3], "rating": np.ones(4, np.float32)}
    store = make_store([4], **columns, tokens=np.array([1, 2, 4, 8], np.float32))
    parts = partition(heavy, {"user": keyed("user"), "item": keyed("item")})
    shared = {"update": update.by_steps(Batches(2), 0.1), "optimizer": optimizers.Sgd(1.0).on_server()}
    algorithm = (
        fed_avg(heavy, parts, **shared)
        if name == "fed_avg"
        else fed_recon(heavy, parts, split=split.alternate(1), reconstruct=reconstruct.skip(), **shared)
    )
    client = make_client(heavy, parts, heavy.init(jax.random.key(0)), store)
    report = jax.jit(lambda: algorithm.client(client))()
    assert report.weight == (15 if name == "fed_avg" else 2 + 8)
