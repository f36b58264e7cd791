"""A softmax over a client's own keys: rows that only fill its slice up are no classes, in no backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_select import fed_select
from partwise.checkpoint import from_bytes
from partwise.client import update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model.partition import keyed, partition
from partwise.model.spec import Metric, Model
from partwise.randomness import round_rng
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting
from partwise.server.messages import send
from partwise.simulation.loop import Simulation
from partwise.testing import check_algorithm
from partwise.types import UserError

ITEMS, DIM = 30, 4
HELD = ([0, 1, 2], list(range(30)), [5] * 7, [3, 9, 27, 9, 3], list(range(22)))


def log_softmax_loss(outputs, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["item"][:, None], axis=1)[:, 0]


def scoring(dtype=jnp.float32, **more) -> Model:
    """Scores of all items for a user vector; no bias that a `fill` could use."""

    def init(rng):
        item, user = jax.random.split(rng)
        return {
            "item": jax.random.normal(item, (ITEMS, DIM)).astype(dtype),
            "user": jax.random.normal(user, (DIM,)).astype(dtype),
        }

    predict = lambda params, batch, rng: (params["user"] + batch["x"][:, None]) @ params["item"].T
    hit = lambda outputs, batch: jnp.argmax(outputs, axis=1) == batch["item"]
    return Model(init, predict, log_softmax_loss, {"hit": Metric(hit)}, **more)


@pytest.fixture(scope="module")
def store(make_store):
    counts = list(map(len, HELD))
    x = np.random.default_rng(0).normal(size=sum(counts)).astype(np.float32)
    return make_store(counts, item=np.concatenate(HELD), x=x)


def build_for(model, role, choice="own"):
    parts = partition(model, {"item": role})

    def build(rates):
        return fed_select(
            model,
            parts,
            choose={"item": parse_choice(choice)},
            update=update.by_steps(Batches(4), rates["update"]),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
        )

    return build


RATES = {"update": 0.1, "server": 1.0}


@pytest.mark.parametrize(
    "choice",
    [
        "own",
        "random:5",
        "all",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("top:3", "sample:2", "random:5@0.5,9@0.5")),
    ],
)
def test_plain_and_compiled_agree_whatever_keys_clients_have(store, choice):
    check_algorithm(build_for(scoring(), keyed("item", whole=True), choice), RATES, store, lanes=(1, 3))


def test_the_first_loss_is_a_softmax_over_the_clients_own_keys(store):
    """By hand: three classes, not thirty."""
    build = build_for(scoring(), keyed("item", whole=True))
    alone = store.gather([0, 1])  # the second has all thirty
    simulation = Simulation(build, RATES | {"update": 0.0}, alone, Recruiting(2), lanes=2)
    params = {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
    [[record]] = simulation.run(1)
    expected = []
    for held, x in zip(HELD[:2], (alone.examples(0)["x"], alone.examples(1)["x"]), strict=True):
        own = np.unique(held)
        scores = (params["user"] + x[:, None]) @ params["item"][own].T
        right = scores[np.arange(len(held)), np.searchsorted(own, held)]
        expected.extend(np.log(np.exp(scores).sum(axis=1)) - right)
    assert record.loss == pytest.approx(np.mean(expected), rel=1e-4)


def test_a_report_has_own_rows_alone_and_all_of_them_moved(store):
    build = build_for(scoring(), keyed("item", whole=True))
    algorithm = build(RATES)
    device, params = Device(algorithm), init_params(algorithm, jax.random.key(0))
    examples, rng = store.gather([0]), round_rng(0, 0)
    asked = device.ask(examples)
    report = device.report(send(algorithm.partition, params, asked.keys, rng), examples, asked)
    update_, _ = from_bytes(report)
    assert update_["item"].shape == (3, DIM)
    assert np.all(np.any(update_["item"] != 0, axis=1))


def test_float16_scores_can_be_masked_too(store):
    check_algorithm(
        build_for(scoring(jnp.float16), keyed("item", whole=True)), RATES, store, lanes=(2,), tol=2e-2
    )


def test_scores_that_cannot_be_told_apart_need_a_fill(store):
    inner = scoring()
    more = lambda params, batch, rng: jnp.pad(inner.predict(params, batch, rng), [(0, 0), (0, 2)])
    build = build_for(inner._replace(predict=more), keyed("item", whole=True))
    with pytest.raises(UserError, match=r"fill=-1e9.*select\.item = all"):
        list(Simulation(build, RATES, store, Recruiting(2)).run(1))


def checked(model, role, store, choice="own"):
    algorithm = build_for(model, role, choice)(RATES)
    device, params = Device(algorithm), init_params(algorithm, jax.random.key(0))
    examples = store.gather([3])
    message = send(algorithm.partition, params, device.ask(examples).keys, round_rng(0, 0))
    device.check(message, examples)


def test_a_model_that_scores_all_items_must_say_so(store):
    with pytest.raises(UserError, match=r"keyed\('item', whole=True\)"):
        checked(scoring(), keyed("item"), store)
    checked(scoring(), keyed("item", whole=True), store)


def test_so_must_one_whose_outputs_do_not_show_it(store):
    """The softmax is inside `predict`: one number for every example, of all rows."""

    def predict(params, batch, rng):
        scores = (params["user"] + batch["x"][:, None]) @ params["item"].T
        return log_softmax_loss(scores, batch)

    hidden = scoring()._replace(predict=predict, loss=lambda outputs, batch: outputs, metrics={})
    with pytest.raises(UserError, match=r"whole=True"):
        checked(hidden, keyed("item"), store)
    with pytest.raises(UserError, match="filled up with rows that are no keys"):
        checked(hidden, keyed("item", whole=True), store)
    checked(hidden, keyed("item", whole=True), store, "all")


def test_a_plain_index_of_minus_one_is_found(make_store):
    """-1 is nothing, and `table[-1]` is the last row."""
    history = np.array([[0, 4], [2, -1], [1, 3]], np.int32)
    store = make_store([1, 1, 1, 3], history=np.concatenate([history, history]), x=np.ones(6, np.float32))

    def predict(params, batch, rng):
        return params["item"][batch["history"]].sum(axis=(1, 2)) + batch["x"]

    model = scoring()._replace(predict=predict, loss=lambda outputs, batch: outputs**2, metrics={})
    for role in (keyed("item"), keyed("item", whole=True)):
        parts = partition(model, {"item": role}, columns={"item": "history"})
        algorithm = fed_select(
            model,
            parts,
            choose={"item": parse_choice("own")},
            update=update.by_steps(Batches(4), 0.1),
            optimizer=optimizers.Sgd(1.0).on_server(),
        )
        device, examples = Device(algorithm), store.gather([3])
        message = send(
            parts, init_params(algorithm, jax.random.key(0)), device.ask(examples).keys, round_rng(0, 0)
        )
        with pytest.raises(UserError, match="lookup"):
            device.check(message, examples)


def test_evaluation_refuses_outputs_that_grow_with_the_rows(store):
    algorithm = build_for(scoring(), keyed("item"))(RATES)
    device, examples = Device(algorithm), store.gather([0])
    params = init_params(algorithm, jax.random.key(0))
    message = send(algorithm.partition, params, device.ask_whole(examples).keys, round_rng(0, 0))
    with pytest.raises(UserError, match=r"whole=True"):
        device.evaluate(message, examples)


def test_a_message_of_other_keys_is_refused(store):
    algorithm = build_for(scoring(), keyed("item", whole=True), "top:2")(RATES)
    device, examples = Device(algorithm), store.gather([0])
    params = init_params(algorithm, jax.random.key(0))
    message = send(algorithm.partition, params, device.ask(examples).keys, round_rng(0, 0))
    with pytest.raises(UserError, match=r"'item:rows' in the slices is float32 .*, and must be"):
        device.evaluate(message, examples)
