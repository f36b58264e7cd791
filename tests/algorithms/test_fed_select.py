"""Federated Select: slices train as the paper's Algorithm 2 says, whatever is chosen, and however it is run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise import optimizers
from partwise.algorithm import choices, init_params
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_select import fed_select
from partwise.client import update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model.partition import keyed, partition
from partwise.model.softmax import sampled_softmax
from partwise.model.spec import Metric, Model, lookup
from partwise.randomness import client_numbers
from partwise.selection.choose import choose_all, parse_choice
from partwise.selection.keys import own_keys
from partwise.selection.select import deselect, keyed_leaves, select
from partwise.server.cohort import Recruiting
from partwise.server.mean import mean, uniform
from partwise.server.round import Server
from partwise.server.step import init_state
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import Simulation
from partwise.simulation.many_runs import Sweep
from partwise.simulation.plain import plain_round
from partwise.testing import check_algorithm
from partwise.types import UserError

WORDS, DIM, UNITS, LENGTH = 7, 3, 8, 4
RATES = {"update": 0.3, "server": 1.0}
COUNTS = [5, 1, 7, 0, 8, 6, 5]  # sizes that share programs of the plain loop


def next_word() -> Model:
    """Embedding, a hidden layer, softmax over words; a sentence's loss is the sum over its words."""

    def init(rng):
        shapes = {
            "embedding": (WORDS, DIM),
            "hidden": (DIM, UNITS),
            "hidden_bias": (UNITS,),
            "narrow": (UNITS, DIM),
            "out": (DIM, WORDS),
            "out_bias": (WORDS,),
        }
        rngs = jax.random.split(rng, len(shapes))
        return {
            name: 0.5 * jax.random.normal(r, shape)
            for r, (name, shape) in zip(rngs, shapes.items(), strict=True)
        }

    def predict(params, batch, rng):
        x = lookup(params["embedding"], batch["tokens"])
        x = jax.nn.sigmoid(x @ params["hidden"] + params["hidden_bias"]) @ params["narrow"]
        return x @ params["out"] + params["out_bias"]

    def losses(logits, batch):
        seen = (batch["target"] >= 0) & (batch["tokens"] >= 0)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["target"], 0))
        return jnp.where(seen, each, 0).sum(-1)

    def weight(batch):
        return ((batch["target"] >= 0) & (batch["tokens"] >= 0)).sum(-1) * 1.0

    return Model(init, predict, losses, {"loss_": Metric(losses)}, weight)


RULES = {
    "embedding": keyed("word"),
    "out": keyed("word", axis=1, whole=True),
    "out_bias": keyed("word", fill=-1e9),
    "hidden": keyed("unit", axis=1),
    "hidden_bias": keyed("unit"),
    "narrow": keyed("unit"),
}
COLUMNS = {"word": ("tokens", "target"), "unit": ()}


def sentences(make_store, counts):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, WORDS, (sum(counts), LENGTH + 1)) // rng.integers(1, 4, (sum(counts), 1))
    tokens[rng.random(tokens.shape) < 0.1] = -1
    return make_store(counts, tokens=tokens[:, :-1], target=tokens[:, 1:])


@pytest.fixture(scope="module")
def store(make_store):
    return sentences(make_store, COUNTS)


@pytest.fixture(scope="module")
def even(make_store):
    """Clients of one size, for which the plain loop needs one program."""
    return sentences(make_store, [8, 7, 6, 8, 7])


def make(choose, rules=RULES, columns=COLUMNS, model=None, **options):
    model = model or next_word()
    parts = partition(model, rules, columns)
    chosen = {space: parse_choice(text) for space, text in choose.items()}
    return lambda rates: fed_select(
        model,
        parts,
        choose=chosen,
        update=update.by_steps(Batches(2), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        **options,
    )


MIXES = {
    "own words, random units": {"word": "own", "unit": "random:3"},
    "top words, the same units": {"word": "top:3", "unit": "same:3"},
    "random own words, all units": {"word": "sample:3", "unit": "all"},
    "random top words, random units": {"word": "sample_top:3", "unit": "random:3"},
    "random words of all": {"word": "random:3", "unit": "random:3"},
    "device classes": {"word": "top:4@0.5,2@0.5", "unit": "random:6@0.5,3@0.5"},
}  # as many keys of each, so that some share programs


@pytest.mark.parametrize("name", MIXES)
def test_lanes_equal_the_plain_loop(store, even, name):
    """Every way of choosing, structured and random mixed; bytes and ids left out are told alike."""
    clients, lanes = (store, 1) if name == next(iter(MIXES)) else (even, 2)
    check_algorithm(make(MIXES[name]), RATES, clients, cohort=4, lanes=(lanes,))


def test_encoded_slices_equal_the_plain_loop(even):
    """Words' slices in 8 bits, units' in 16."""
    psi = {"word": "int8", "unit": "float16"}
    rules = {
        path: keyed(role.space, role.axis, whole=role.whole, fill=role.fill, psi=psi[role.space])
        for path, role in RULES.items()
    }
    build = make({"word": "top:4", "unit": "random:3"}, rules)
    check_algorithm(build, RATES, even, cohort=4, lanes=(2,), tol=2e-5)


def test_a_sampled_softmax_equals_the_plain_loop(even):
    """Steps minimise `train_loss`. Slices are padded differently in lanes, and the samples are the same."""

    def sampled_losses(params, batch, rng):
        x = lookup(params["embedding"], batch["tokens"])
        x = jax.nn.sigmoid(x @ params["hidden"] + params["hidden_bias"]) @ params["narrow"]
        target = jnp.where(batch["tokens"] >= 0, batch["target"], -1)
        return sampled_softmax(x, params["out"].T, params["out_bias"], target, 3, rng).sum(-1)

    build = make({"word": "own", "unit": "random:3"}, model=next_word()._replace(train_loss=sampled_losses))
    check_algorithm(build, RATES, even, cohort=4, lanes=(2,))


def test_buckets_of_words_equal_the_plain_loop(make_store):
    """8 words in 4 buckets of two, looked up, and in a softmax over buckets' members."""
    model = next_word()._replace(
        init=lambda rng: {
            name: jnp.pad(leaf, [(0, 1 if n == WORDS else 0) for n in leaf.shape])
            for name, leaf in next_word().init(rng).items()
        }
    )
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, WORDS + 1, (8, 3))
    data = make_store([4, 4], tokens=tokens[:, :-1], target=tokens[:, 1:])
    block = {"block": 2}
    rules = {
        "embedding": keyed("word", **block),
        "out": keyed("word", axis=1, whole=True, **block),
        "out_bias": keyed("word", fill=-1e9, **block),
    }
    parts = partition(model, rules, {"word": ("tokens", "target")})
    assert parts.num_keys("word") == 4
    for text in ("own", "sample:3"):
        build = lambda rates, text=text: fed_select(
            model,
            parts,
            choose={"word": parse_choice(text)},
            update=update.by_steps(Batches(2), rates["update"]),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
        )
        check_algorithm(build, RATES, data, cohort=2, rounds=1, lanes=(2,))


def finish(simulation, rounds):
    records = [record for call in simulation.run(rounds) for record in call]
    return {path: np.array(leaf) for path, leaf in simulation.state.params.items()}, records


def test_all_keys_are_the_whole_model(store):
    """Federated Averaging of all parameters, shared, is the select of all keys; and evaluation too."""
    everything = make({"word": "all", "unit": "all"})
    model = next_word()
    parts = partition(model, {})
    shared = lambda rates: fed_avg(
        model,
        parts,
        update=update.by_steps(Batches(2), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=mean(uniform),
    )
    selecting, _ = finish(Simulation(everything, RATES, store, Recruiting(4), seed=2), 2)
    averaging, _ = finish(Simulation(shared, RATES, store, Recruiting(4), seed=2), 2)
    merged = everything(RATES).partition.merge(selecting, {})
    for path, leaf in averaging.items():
        np.testing.assert_allclose(merged[path], leaf, rtol=2e-5, atol=1e-6)
    found = Evaluator(everything, RATES, store, seed=2).sums(selecting)
    expected = Evaluator(shared, RATES, store, seed=2).sums(averaging)
    np.testing.assert_allclose(found["loss"].value, expected["loss"].value, rtol=1e-4)
    np.testing.assert_array_equal(found["loss"].weight, expected["loss"].weight)


def test_a_round_by_hand(store):
    """Algorithm 2 with `select`, the loss itself on what arrives, `deselect`, and eq. 5."""
    build = make({"word": "top:4", "unit": "random:3"})
    algorithm = build(RATES)
    parts, model = algorithm.partition, algorithm.model
    params = init_params(algorithm, jax.random.key(5))
    state = init_state(parts, algorithm.optimizer, params)
    clients, rng = [0, 4, 5], jax.random.key(9)
    done = plain_round(Server(algorithm), Device(algorithm), state, store, clients, rng, 1, 6).closed
    total = {path: jnp.zeros_like(leaf) for path, leaf in params.items()}

    @jax.jit
    @jax.grad
    def gradient(values, part):
        losses = model.loss(model.predict(parts.merge(values, {}), part, rng), part)
        return losses.sum() / jnp.maximum(model.weight(part).sum(), 1)

    for c in clients:
        mine = store.gather([c])
        own, _ = own_keys(mine, parts)
        keys = choose_all(own, parts.all_keys, algorithm.choose, client_numbers(mine.client_ids), 1, 6)
        sent = {
            k: v
            for space, each in keys.items()
            for k, v in select(params, each.keys, keyed_leaves(parts, space)).items()
        }
        where = {int(k): i for i, k in enumerate(keys["word"].keys)}
        batch = {
            n: np.vectorize(lambda v, where=where: where.get(int(v), -1))(mine.columns[n])
            for n in ("tokens", "target")
        }
        now = sent
        for first in range(0, mine.num_examples, 2):
            part = {n: jnp.asarray(column[first : first + 2]) for n, column in batch.items()}
            now = jax.tree_util.tree_map(lambda v, g: v - 0.3 * g, now, gradient(now, part))
        for space, each in keys.items():
            for path in parts.spaces[space]:
                total[path] += deselect(now[path] - sent[path], each.keys, parts.num_keys(space)) / len(
                    clients
                )
    for path, leaf in params.items():
        np.testing.assert_allclose(done.state.params[path], leaf + total[path], rtol=1e-4, atol=1e-6)


def test_means_over_holders(store):
    """A row moves by the mean over those who hold it, however many do not."""
    over = make({"word": "own", "unit": "random:3"}, aggregator=mean(uniform, ("word", "unit")))
    check_algorithm(over, RATES, store, cohort=4, rounds=1, lanes=(2,))


def test_ids_outside_the_slice_are_counted(store):
    build = make({"word": "top:2", "unit": "all"})
    call = Simulation(build, RATES, store, Recruiting(len(COUNTS)), seed=0)._stage(0, 1)
    columns = [store.columns[name] for name in ("tokens", "target")]
    expected = 0
    for start, count in zip(store.starts, store.counts, strict=True):
        ids = np.concatenate([c[start : start + count].ravel() for c in columns])
        ids = ids[ids >= 0]
        values, uses = np.unique(ids, return_counts=True)
        kept = values[np.lexsort((values, -uses))[:2]]
        expected += int((~np.isin(ids, kept)).sum())
    assert call.staged.wanted.missed[0] == expected > 0


def test_slices_in_rooms_of_their_size_equal_slices_in_one(make_store, monkeypatch):
    """One client with all words makes the others work in its room, or they have a smaller one."""
    counts = [6, 2, 3, 1, 4, 2]
    tokens = np.repeat(np.arange(len(counts)) % 2, counts)[:, None] * np.ones(LENGTH + 1, int)
    tokens[:6] = np.arange(6 * (LENGTH + 1)).reshape(6, -1) % WORDS
    store = make_store(counts, tokens=tokens[:, :-1], target=tokens[:, 1:])
    build, recruiting = make({"word": "own", "unit": "random:3"}), Recruiting(5)
    alone = [finish(Simulation(build, RATES, store, recruiting, seed=s, lanes=1), 3) for s in (1, 4)]
    monkeypatch.setattr("partwise.simulation.stage.SMALL_SLICE", 0)
    roomy = Simulation(build, RATES, store, recruiting, seed=1, lanes=1)
    assert [room["word"] for room in roomy._rooms] == [7, 2]
    found = finish(roomy, 3)[0]
    sweep = Sweep(build, [RATES, RATES], [1, 4], store, recruiting, lanes=1)
    list(sweep.run(3))
    for expected, other in ((alone[0][0], found), *((alone[run][0], sweep.params(run)) for run in (0, 1))):
        for path, leaf in expected.items():
            np.testing.assert_allclose(other[path], leaf, rtol=1e-4, atol=1e-6)


CHANGING = make({"word": "sample:3", "unit": "random:3"})  # keys are chosen anew in every round


@pytest.fixture(scope="module")
def resident(store):
    return finish(Simulation(CHANGING, RATES, store, Recruiting(4), seed=1), 3)


def test_runs_side_by_side_equal_runs_alone(store, resident):
    """A sweep whose seeds choose different keys in every round."""
    build, slow = CHANGING, {**RATES, "update": 0.1}
    rates, seeds = [RATES, slow], [1, 4]
    sweep = Sweep(build, rates, seeds, store, Recruiting(4), rounds_per_call=2)
    list(sweep.run(3))
    other = finish(Simulation(build, slow, store, Recruiting(4), seed=4), 3)
    for run, (alone, _) in enumerate([resident, other]):
        for path, leaf in alone.items():
            np.testing.assert_allclose(sweep.params(run)[path], leaf, rtol=1e-4, atol=1e-6)


def test_staged_and_cut_equals_resident(store, resident, monkeypatch):
    expected, told = resident
    monkeypatch.setattr("partwise.simulation.loop.RESIDENT_BYTES", 0)
    monkeypatch.setattr(Simulation, "_whole_tables", lambda self: False)
    found, records = finish(Simulation(CHANGING, RATES, store, Recruiting(4), seed=1, rounds_per_call=2), 3)
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-5, atol=1e-6)
    alike = [r._replace(seconds=0, loss=0) for r in records]
    assert alike == [r._replace(seconds=0, loss=0) for r in told]


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        ({"unit": "random:3", "wrod": "own"}, "unknown key space 'wrod'.*nearest: word"),
        ({"unit": "own"}, "no column names keys of space 'unit'"),
    ],
)
def test_choices_that_do_not_fit_are_refused(choose, message):
    with pytest.raises(UserError, match=message):
        make(choose)(RATES)


def test_where_nothing_is_said_a_client_has_all_that_could_matter(sparse_parts):
    """Its own rows where its examples are about those alone; else, under a softmax over all words, all."""
    assert {each.name for each in make({})(RATES).choose.values()} == {"all"}
    assert choices(sparse_parts)["item"].name == "own"


def test_more_random_keys_than_there_are(store):
    with pytest.raises(UserError, match="cannot choose 9 of 8 keys"):
        Simulation(make({"unit": "random:9"}), RATES, store, Recruiting(2))


def test_a_model_without_keys_is_refused():
    with pytest.raises(UserError, match="needs keyed parameters"):
        make({}, rules={}, columns={})(RATES)
