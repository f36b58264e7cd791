"""Next word with an LSTM: where ids lie, what counts, and that it is one model whichever rows travel."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.algorithms.registry import prepare, settings_for
from partwise.config.settings import Config
from partwise.data.text.sentences import TokenIds, encode
from partwise.data.text.words import Vocabulary
from partwise.model.softmax import NOTHING
from partwise.runs.backends import make_simulation
from partwise.tasks import load_task
from partwise.tasks.next_word_lstm import Layouts, next_word_lstm_task, settings
from partwise.testing import check_task
from partwise.types import UserError

WORDS, BUCKETS, LENGTH = 11, 4, 5
IDS = TokenIds(WORDS, BUCKETS)
SHAPE = {"embedding": 4, "units": 6}
SMALL = {"rounds": 1, "cohort.size": 4, "simulation.lanes": 1}
SMALL |= {"server.optimizer": "sgd", "server.rate": 1.0, "update.rate": 5.0, "reconstruct.rate": 5.0}
SMALL |= {f"{part}.batch_size": 2 for part in ("reconstruct", "update")}
SHARED = WORDS + 2  # words, BOS and EOS


@pytest.fixture(scope="module")
def store(make_store):
    """Four clients; sentences of one word to LENGTH, whose words are often outside the vocabulary."""
    rng, known = np.random.default_rng(0), Vocabulary(tuple(f"w{k}" for k in range(WORDS)))
    counts = [4, 7, 5, 6]
    lengths = [1, *rng.integers(1, LENGTH + 3, sum(counts) - 1)]
    rows = [encode([f"w{k}" for k in rng.integers(0, 2 * WORDS, n)], known, IDS, LENGTH) for n in lengths]
    store = make_store(counts, tokens=np.array(rows, np.int32))
    return dataclasses.replace(store, vocabularies={"tokens": np.array(IDS.names(known))})


@pytest.fixture(scope="module")
def make_task(store):
    return cache(
        lambda words, **more: next_word_lstm_task(
            store, store, store, num_buckets=BUCKETS, words=words, **SHAPE, **more
        )
    )


@pytest.mark.parametrize("words", ["shared", "input", "keyed"])
def test_the_task_keeps_the_contract(make_task, words):
    task = make_task(words)
    check_task(task)
    assert task.personal.partition.local_paths == ("oov",)
    assert task.stateful.partition.local_paths == ()
    keyed = {"shared": (), "input": ("embedding",), "keyed": ("embedding", "out", "out_bias")}[words]
    assert set(task.personal.partition.of("keyed")) == set(keyed)
    assert task.defaults.get("select.word") == ("own" if words == "keyed" else None)
    names = task.train.vocabularies
    assert [*names["word"]] == [*(f"w{k}" for k in range(WORDS)), "<bos>", "<eos>"]
    assert [*names["bucket"]] == [f"<oov {k}>" for k in range(BUCKETS)]


def as_keyed(params):
    """One output layer, as two: of words and of buckets, rows first; what fills it up falls away."""
    out, bias = params["out"], params["out_bias"]
    apart = {
        "out": out[:, :SHARED].T,
        "out_bias": bias[:SHARED],
        "oov_out": out[:, SHARED : SHARED + BUCKETS],
        "oov_out_bias": bias[SHARED : SHARED + BUCKETS],
    }
    return {path: np.array(leaf) for path, leaf in {**params, **apart}.items()}


def one_round(task, algorithm, begin=None, **changes):
    """(parameters before, parameters after) a compiled round."""
    given = settings_for(task.defaults, algorithm) | SMALL | changes
    config = Config(task=task.name).changed(given)
    simulation = make_simulation(prepare(task, config), config)
    if begin is not None:
        state, kept = simulation.snapshot()
        simulation.resume((state._replace(params=begin), kept), 0)
    before = {path: np.array(leaf) for path, leaf in simulation.state.params.items()}
    (records,) = simulation.run(1)
    assert records[0].clients == 4
    return before, {path: np.array(leaf) for path, leaf in simulation.state.params.items()}


@pytest.fixture(scope="module")
def shared_round(make_task):
    """A round in which all rows travel, by algorithm."""
    return cache(lambda algorithm: one_round(make_task("shared"), algorithm))


@pytest.mark.parametrize("algorithm", ["fed_recon", "fed_avg"])
def test_it_is_one_model_whichever_rows_travel(make_task, shared_round, algorithm):
    before, whole = shared_round(algorithm)
    assert all(np.abs(whole[path] - before[path]).max() > 1e-3 for path in whole)
    _, rows = one_round(make_task("input"), algorithm)
    assert rows.keys() == whole.keys()
    for path, leaf in whole.items():
        np.testing.assert_allclose(rows[path], leaf, atol=1e-5, err_msg=path)
    select = {"select.word": "all"} if algorithm == "fed_recon" else {}
    _, keyed = one_round(make_task("keyed"), algorithm, as_keyed(before), **select)
    expected = as_keyed(whole)
    assert keyed.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(keyed[path], leaf, atol=1e-5, err_msg=path)


def test_what_fills_the_output_layer_up_never_moves(make_task, shared_round):
    before, after = shared_round("fed_avg")
    filled = SHARED + BUCKETS
    assert before["out"].shape[1] > filled
    np.testing.assert_array_equal(after["out"][:, filled:], before["out"][:, filled:])
    np.testing.assert_array_equal(after["out_bias"][filled:], np.float32(NOTHING))
    assert np.all(after["out_bias"][:filled] != 0)
    setting = make_task("shared").personal
    batch = {name: jnp.asarray(make_task("shared").train.columns[name]) for name in setting.columns}
    scores = setting.model.predict(setting.model.init(jax.random.key(0)), batch, jax.random.key(1))
    assert scores.shape == (22, LENGTH, before["out"].shape[1])
    assert int(jnp.argmax(scores, -1).max()) < filled


def test_clients_that_hold_their_own_words_move_only_those(store):
    """words = keyed: rows, columns and biases of words that nobody has stay as they are."""
    tokens = np.where(
        (store.columns["tokens"] > 6) & (store.columns["tokens"] <= WORDS), 3, store.columns["tokens"]
    )
    few = dataclasses.replace(store, columns={"tokens": tokens})
    task = next_word_lstm_task(few, few, few, num_buckets=BUCKETS, words="keyed", **SHAPE)
    before, after = one_round(task, "fed_recon")
    for path in ("embedding", "out", "out_bias"):
        np.testing.assert_array_equal(after[path][6:WORDS], before[path][6:WORDS])
        assert np.abs(after[path][:6] - before[path][:6]).max() > 1e-4


@pytest.mark.parametrize("layout", ["plain", "authors"])
@pytest.mark.parametrize("buckets", [1, 4])
def test_columns_and_tokens_are_inverse(layout, buckets):
    ids = TokenIds(WORDS, buckets)
    here, every = Layouts(ids, layout), np.arange(ids.num_ids)
    columns = here.columns(every)
    np.testing.assert_array_equal(here.tokens(columns["word"], columns["bucket"]), every)
    assert sorted(columns["word"][columns["word"] >= 0]) == [*range(here.num_shared)]
    assert sorted(columns["bucket"][columns["bucket"] >= 0]) == [*range(buckets)]
    assert ((columns["word"] >= 0) ^ (columns["bucket"] >= 0))[1:].all()
    assert (columns["word"][0], columns["bucket"][0]) == (-1, -1)  # padding
    np.testing.assert_array_equal(columns["word"][1 : WORDS + 1], np.arange(WORDS))
    local = set(every[columns["bucket"] >= 0])
    names = ids.names(Vocabulary(tuple(f"w{k}" for k in range(WORDS))))
    expected = {
        ("plain", 1): ["<oov 0>"],
        ("plain", 4): ["<oov 0>", "<oov 1>", "<oov 2>", "<oov 3>"],
        ("authors", 1): ["<eos>"],
        ("authors", 4): ["<oov 2>", "<oov 3>", "<bos>", "<eos>"],
    }[layout, buckets]
    assert [names[token] for token in sorted(local)] == expected


def rows_of(layout, sentences):
    """The columns of some rows of ids, filled up."""
    tokens = np.array([row + [0] * (LENGTH + 1 - len(row)) for row in sentences])
    columns = layout.columns(tokens)
    word, bucket = columns["word"][:, 1:], columns["bucket"][:, 1:]
    columns["next"] = np.where(word >= 0, word, np.where(bucket >= 0, layout.num_shared + bucket, -1))
    return {name: jnp.asarray(column) for name, column in columns.items()}


@pytest.mark.parametrize("layout", ["plain", "authors"])
@pytest.mark.parametrize("words", ["shared", "keyed"])
def test_four_ways_to_count_by_hand(layout, words):
    """Two sentences: w0 <oov 2> w1 w2 EOS, and w3 EOS and padding."""
    here = Layouts(IDS, layout)
    model = settings(WORDS, BUCKETS, words=words, layout=layout, **SHAPE)[0].model
    oov = IDS.first_bucket + 2
    batch = rows_of(here, [[IDS.bos, 1, oov, 2, 3, IDS.eos], [IDS.bos, 4, IDS.eos]])
    if words == "keyed":
        del batch["next"]

    def number(token):
        word, bucket = (int(here.columns(np.array([token]))[name][0]) for name in ("word", "bucket"))
        return word if word >= 0 else here.num_shared + bucket

    # best by far, and second to it: right, OOV right, OOV before the right word, wrong, EOS right; wrong, EOS wrong
    best = [[1, oov, IDS.first_bucket, 9, IDS.eos], [9, 4, 1, 1, 1]]
    second = [[2, 2, 2, 3, 2], [4, IDS.eos, 2, 2, 2]]
    scores = np.zeros((2, LENGTH, SHARED + BUCKETS), np.float32)
    for b in range(2):
        for t in range(LENGTH):
            scores[b, t, number(best[b][t])] = 2
            scores[b, t, number(second[b][t])] = 1
    found = {
        name: (metric.values(scores, batch).tolist(), metric.weight(batch).tolist())
        for name, metric in model.metrics.items()
    }
    assert found == {
        "accuracy_no_oov_or_eos": ([1, 0], [3, 1]),
        "accuracy_no_oov": ([2, 0], [4, 2]),
        "accuracy_with_oov": ([3, 0], [5, 2]),
        "accuracy_among_words": ([2, 0], [3, 1]),  # w1 is the best of the words
    }
    assert next(iter(model.metrics)) == "accuracy_no_oov_or_eos"
    assert model.weight(batch).tolist() == [5, 2]
    surprises = -jax.nn.log_softmax(jnp.asarray(scores))
    targets = [[1, oov, 2, 3, IDS.eos], [4, IDS.eos]]
    expected = [sum(surprises[b, t, number(x)] for t, x in enumerate(row)) for b, row in enumerate(targets)]
    np.testing.assert_allclose(model.loss(jnp.asarray(scores), batch), expected, rtol=1e-5)


def test_sentences_that_are_cut_and_sentences_of_one_word(store, make_task):
    """Cut ones have no end; every row says BOS first; a client weighs the tokens of its query set."""
    task = make_task("shared")
    tokens, columns = store.columns["tokens"], task.train.columns
    assert (columns["word"][:, 0] == WORDS).all()
    cut = tokens[:, -1] > 0
    cut &= tokens[:, -1] != IDS.eos
    assert cut.any()
    assert not (columns["next"][cut] == WORDS + 1).any()
    assert ((columns["next"][~cut] == WORDS + 1).sum(axis=1) == 1).all()
    assert (columns["next"][0] >= 0).sum() == 2  # a word and the end
    config = Config().changed(settings_for(task.defaults, "fed_avg") | SMALL)
    weights = []
    for position in range(4):
        alone = task._replace(train=task.train.take(np.array([position])))
        ready = prepare(alone, config.changed({"cohort.size": 1}))
        weight = alone.personal.model.weight(ready.store.examples(0))
        weights.append(float(weight.sum()))
    starts = np.cumsum([0, 4, 7, 5])
    np.testing.assert_array_equal(weights, np.add.reduceat((tokens[:, 1:] > 0).sum(axis=1), starts))


@pytest.mark.parametrize("layout", ["plain", "authors"])
def test_predictions_look_back_only(make_task, layout):
    """A later word changes no earlier score, and what is behind the end none at all."""
    task = make_task("shared", layout=layout)
    model, here = task.personal.model, Layouts(IDS, layout)
    params = model.init(jax.random.key(0))
    rows = [[IDS.bos, 1, 2, 3, 4, 5], [IDS.bos, 1, 2, 13, 14, IDS.eos]]
    scores = model.predict(params, rows_of(here, rows), jax.random.key(1))
    np.testing.assert_allclose(scores[0, :3], scores[1, :3], atol=1e-6)
    assert np.abs(scores[0, 3:] - scores[1, 3:]).max() > 1e-5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"words": "x"}, r"unknown value of words 'x'.*shared"),
        ({"layout": "papers"}, r"unknown value of layout 'papers'.*plain"),
        ({"precision": "float16"}, r"unknown value of precision 'float16'.*float32"),
        ({"embedding": 0}, r"embedding is 0 and units 6: give at least 1"),
        ({"units": -1}, r"embedding is 4 and units -1: give at least 1"),
        ({"num_buckets": 0}, r"num_buckets is 0: give a whole number, at least 1"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        settings(**{"num_words": WORDS, "num_buckets": BUCKETS, **SHAPE, **options})


def test_generated_sentences_are_a_task_by_name():
    shape = {"num_clients": 20, "sentences": 4, "num_words": 12, "num_buckets": 3, "length": 4}
    task = load_task("next-word-planted", **shape, **SHAPE)
    check_task(task)
    assert task.train.num_clients == 16
    with pytest.raises(UserError, match="unknown value of words 'own'"):
        load_task("next-word-planted", **shape, words="own")
