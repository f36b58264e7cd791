"""FedPer, LG-FedAvg and FedRep: clients go on from the local part that they kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_per import BEGAN, fed_per
from partwise.client import reconstruct, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model.partition import keyed, local, partition, shared
from partwise.model.spec import Metric, Model
from partwise.randomness import INIT_ROUND, round_rng
from partwise.server.cohort import Recruiting, recruit
from partwise.server.mean import mean
from partwise.server.messages import send
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.testing import check_algorithm
from partwise.types import UserError

BATCH, ROUNDS, COHORT = 2, 3, 2
RATES = {"update": 0.1, "local": 0.2, "server": 0.7}
START = {"head": 0.5, "body": -1.0}


def squared(outputs, batch):
    return jnp.square(outputs - batch["y"])


@pytest.fixture(scope="module")
def product():
    """y ~ body * head * x + head: two numbers, either of which may be local."""

    def predict(params, batch, rng):
        return params["body"] * params["head"] * batch["x"] + params["head"]

    init = lambda rng: {path: jnp.asarray(value) for path, value in START.items()}
    return Model(init, predict, squared, {"mse": Metric(squared)})


@pytest.fixture(scope="module")
def lines(make_store):
    """Clients of 3, 5, 2 and 4 examples."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 14)).astype(np.float32)
    return make_store([3, 5, 2, 4], x=x, y=y)


def personal(model, roles, apart=False):
    """FedPer, or FedRep if the local part is trained apart (two epochs of it)."""
    rebuild = lambda rates: reconstruct.by_steps(Batches(BATCH, 2), rates["local"]) if apart else None
    return lambda rates: fed_per(
        model,
        roles,
        update=update.by_steps(Batches(BATCH), rates["update"], joint=not apart),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        local=rebuild(rates),
    )


def gradient(theta, x, y):
    error = 2 * (theta["body"] * theta["head"] * x + theta["head"] - y) / len(y)
    return {"head": (error * (theta["body"] * x + 1)).sum(), "body": (error * theta["head"] * x).sum()}


def steps(theta, columns, parts, rate, epochs=1):
    for _ in range(epochs):
        for first in range(0, len(columns["y"]), BATCH):
            found = gradient(theta, columns["x"][first : first + BATCH], columns["y"][first : first + BATCH])
            theta = {part: value - rate * found[part] * (part in parts) for part, value in theta.items()}
    return theta


def by_hand(store, own, apart=False, learned=False):
    """(what is shared, what clients keep) after the rounds; `own` names the local part. A learned default moves on
    a client as the local part would in its update."""
    (other,) = set(START) - {own}
    value, default, kept = START[other], START[own], {}
    for t in range(ROUNDS):
        changes, moves, weights = [], [], []
        for i in recruit(Recruiting(COHORT), store.counts, 1, t).clients.tolist():
            columns, theta = store.examples(i), {own: kept.get(i, default), other: value}
            if apart:
                theta = steps(theta, columns, (own,), RATES["local"], epochs=2)
            begun = theta
            theta, followed = update_by_hand(theta, columns, own, other, joint=not apart)
            kept[i] = theta[own]
            changes.append(theta[other] - value)
            moves.append(followed - begun[own])
            weights.append(store.counts[i])
        value += RATES["server"] * np.average(changes, weights=weights)
        default += learned * RATES["server"] * np.average(moves, weights=weights)
    return value, kept


def update_by_hand(theta, columns, own, other, joint):
    """The parameters after the update, and where the local part would be if the gradients had moved it."""
    followed = theta[own]
    for first in range(0, len(columns["y"]), BATCH):
        batch = {name: column[first : first + BATCH] for name, column in columns.items()}
        found = gradient(theta, batch["x"], batch["y"])
        followed -= RATES["update"] * found[own]
        theta = steps(theta, batch, (own, other) if joint else (other,), RATES["update"])
    return theta, followed


def run(build, store, rounds=ROUNDS, cohort=COHORT, rates=RATES):
    simulation = Simulation(build, rates, store, Recruiting(cohort), seed=1)
    list(simulation.run(rounds))
    return simulation


@pytest.mark.parametrize("initial", ["random", "learned"])
@pytest.mark.parametrize(
    ("own", "apart"),
    [("head", False), ("body", False), ("head", True)],
    ids=["FedPer", "LG-FedAvg", "FedRep"],
)
def test_rounds_by_hand(product, lines, own, apart, initial):
    (other,) = set(START) - {own}
    roles = partition(product, {own: local(initial), other: shared()})
    found = run(personal(product, roles, apart), lines)
    value, kept = by_hand(lines, own, apart, initial == "learned")
    assert 1 < len(kept) < 4  # somebody came back, and somebody never came
    np.testing.assert_allclose(found.state.params[other], value, rtol=1e-5)
    np.testing.assert_allclose(found.kept.arrays[own], [kept.get(i, 0) for i in range(4)], rtol=1e-5)
    np.testing.assert_array_equal(found.kept.arrays[BEGAN], [i in kept for i in range(4)])


@pytest.mark.parametrize("room", [1 << 28, 2 * 8])
def test_clients_are_judged_with_what_they_kept(product, lines, room, monkeypatch):
    """In any order, matched by id, all at once or two a call; who never took part, and a stranger, with initial
    values."""
    monkeypatch.setattr("partwise.simulation.evaluator.KEPT_BYTES", room)
    roles = partition(product, {"head": local()})
    build = personal(product, roles)
    found = run(build, lines)
    body, kept = by_hand(lines, "head")
    order = np.array([2, 0, 3, 1])
    judged = lines.take(np.append(order, 0))
    judged.client_ids[-1] = 999
    sums = Evaluator(build, RATES, judged, seed=1).sums(found.state.params, kept=found.kept_of)
    heads = [*(kept.get(i, START["head"]) for i in order.tolist()), START["head"]]
    for i, (position, head) in enumerate(zip([*order.tolist(), 0], heads, strict=True)):
        columns = lines.examples(position)
        expected = ((body * head * columns["x"] + head - columns["y"]) ** 2).sum()
        np.testing.assert_allclose(sums["mse"].value[i], expected, rtol=1e-4)
    with pytest.raises(UserError, match=r"judged with what they keep.*kept=simulation\.kept_of"):
        Evaluator(build, RATES, lines).sums(found.state.params)


def test_one_device_evaluates_as_all_do(product, lines):
    build = personal(product, partition(product, {"head": local()}))
    plain = PlainSimulation(build, RATES, lines, Recruiting(COHORT), seed=1)
    list(plain.run(ROUNDS))
    sums = Evaluator(build, RATES, lines, seed=1).sums(plain.state.params, kept=plain.kept_of)
    device = Device(plain.algorithm)
    for position in range(4):
        examples = lines.gather([position])
        message = send(plain.algorithm.partition, plain.state.params, {}, round_rng(1, 0))
        found = device.evaluate(message, examples, kept=plain.kept.get(position))
        np.testing.assert_allclose(found["mse"].value, sums["mse"].value[position], rtol=1e-5)


@pytest.mark.parametrize(("apart", "initial"), [(False, "random"), (True, "learned")])
def test_lanes_equal_the_plain_loop(biased_model, make_ratings, apart, initial):
    """Random initial values or a learned default, keyed rows, and a client with no example, who keeps nothing."""
    model = biased_model(6, 3)
    store = make_ratings([7, 5, 0, 5, 8, 6], 6, distinct=4)
    build = personal(model, partition(model, {"user": local(initial), "item/*": keyed("item")}), apart)
    check_algorithm(build, RATES, store, cohort=4, rounds=3, lanes=(2,))
    assert run(build, store, cohort=6).kept.arrays[BEGAN].tolist() == [1, 1, 0, 1, 1, 1]


def test_it_equals_averaging_with_users_on_the_server(make_ratings):
    """FedRecon, footnote 4: rows that only their own user holds, from equal initial values."""
    store, users = make_ratings([7, 3, 6, 5, 9, 4], 8), 6
    rng = np.random.default_rng(0)
    item = rng.normal(size=(8, 3)).astype(np.float32) / 2
    user = np.array([0.3, -0.2, 0.5], np.float32)
    own, tables = matrix_factorization(8, 3), matrix_factorization(8, 3, users)
    own = own._replace(init=lambda rng: {"user": jnp.asarray(user), "item": jnp.asarray(item)})
    tables = tables._replace(init=lambda rng: {"user": jnp.tile(user, (users, 1)), "item": jnp.asarray(item)})
    rates = {"update": 0.05, "server": 1.0}
    joint = personal(own, partition(own, {"user": local(), "item": keyed("item")}))
    averaged = lambda rates: fed_avg(
        tables,
        partition(tables, {"user": keyed("user"), "item": keyed("item")}),
        update=update.by_steps(Batches(BATCH), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=mean(over_holders=("user",)),
    )
    kept = run(joint, store.select(["item", "rating"]), rounds=5, cohort=3, rates=rates)
    there = run(averaged, store, rounds=5, cohort=3, rates=rates)
    np.testing.assert_allclose(kept.state.params["item"], there.state.params["item"], rtol=1e-4, atol=1e-6)
    began = kept.kept.arrays[BEGAN] > 0
    assert began.sum() > 3
    found = np.where(began[:, None], kept.kept.arrays["user"], user)
    np.testing.assert_allclose(found, there.state.params["user"], rtol=1e-4, atol=1e-6)


def test_a_new_client_personalizes_from_initial_values(product, lines):
    build = personal(product, partition(product, {"head": local()}), apart=True)
    algorithm = build(RATES)
    params = init_params(algorithm, round_rng(0, INIT_ROUND))
    message = send(algorithm.partition, params, {}, jax.random.key(0))
    head = Device(algorithm).personalize(message, lines.gather([1]))["head"]
    expected = steps(START, lines.examples(1), ("head",), RATES["local"], epochs=2)["head"]
    np.testing.assert_allclose(head, expected, rtol=1e-5)


def test_nothing_local_and_a_name_that_is_taken_are_refused(product):
    with pytest.raises(UserError, match=r"nothing of this model is local.*or use fed_avg"):
        personal(product, partition(product, {}))(RATES)
    taken = product._replace(init=lambda rng: {"body": jnp.zeros(()), BEGAN: jnp.zeros(())})
    with pytest.raises(UserError, match=r"'began'.*rename it"):
        personal(taken, partition(taken, {"body": local()}))(RATES)
