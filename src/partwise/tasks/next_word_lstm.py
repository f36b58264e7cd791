"""Next word with an LSTM and local out-of-vocabulary embeddings (FedRecon, sections 5.1.2 and C.2).

The vocabulary is shared. With `words = "input"`, its embeddings are keyed: a client has the rows of its own
words, and the result is the same. With `"keyed"`, the embeddings and the output layer are keyed: the client
then predicts among its own words. A word outside the vocabulary falls into one of a number of buckets. The
embeddings of the buckets are local, so that each client's buckets stand for its own words. The output layer
scores words and buckets.

A sentence has two columns: `word` holds what is shared, `bucket` what is local. Each is -1 where the other is
not, and both are -1 in the padding. If words are keyed, `word` holds positions among a client's rows. So the
next word is in a third column. The exception is keyed outputs, where the target is such a position too.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from partwise.data import holdout
from partwise.data.checks import check_memory
from partwise.data.generated.planted_sentences import planted_sentences
from partwise.data.store import ClientStore
from partwise.data.text.sentences import TokenIds
from partwise.model.lstm import ALIGNED, dense, init_lstm, lstm
from partwise.model.nnx import nnx_model
from partwise.model.partition import Role, keyed, local, partition
from partwise.model.roles import Initial
from partwise.model.softmax import NOTHING
from partwise.model.spec import Batch, Metric, lookup
from partwise.tasks.base import (
    COUNTS,
    PAPER,
    SEEDS,
    SIZES,
    Entry,
    Setting,
    Task,
    fitted,
    on_accelerator,
    refuse_data,
    sized_for_device,
)
from partwise.tasks.language import accuracy, cross_entropy, has_long_clients, load_sentences
from partwise.types import UserError, unknown

Words = Literal["shared", "input", "keyed"]
Layout = Literal["plain", "authors"]
Precision = Literal["float32", "bfloat16"]

AVERAGING = ("fed_avg", "fed_select", "fed_sub_avg", "fed_prox", "scaffold")
AVERAGING += ("fed_adam", "fed_adagrad", "central")
ON_SERVER = {"evaluation.local": "trained"}  # these algorithms also train what is local for others
DEFAULTS = {  # the paper's, except the rates, which were searched on Stack Exchange
    "algorithm": "fed_recon",
    "rounds": 500,
    "cohort.size": 200,
    "split.kind": "halves",
    "reconstruct.rate": 1.0,
    "reconstruct.epochs": 5,
    "reconstruct.max_steps": 100,
    "reconstruct.batch_size": 16,
    "update.rate": 1.0,
    "update.epochs": 1,
    "update.max_steps": 100,
    "update.batch_size": 16,
    "fine_tune.batch_size": 16,
    "server.optimizer": "yogi",
    "server.rate": 0.03,
    "simulation.rounds_per_call": 5,
    **dict.fromkeys(AVERAGING, ON_SERVER),
    "fed_yogi": {**ON_SERVER, "server.rate": 0.03, "update.rate": 0.3},
}
# With hundreds of sentences, clients take many steps, and the rates above diverge. These were found on blogs.
LONG = {"update.rate": 0.3, "reconstruct.rate": 0.3}
LONG |= {"fed_yogi": {**ON_SERVER, "server.rate": 0.03, "update.rate": 0.3}}
MANY = 100  # clients in a round, from which on the server takes larger steps
LONG_SENTENCES = {"max_sentences": 300}  # on an accelerator
SHORT = {"rounds": 200, "cohort.size": 20}  # for generated sentences
WIDE = {"num_words": 10_000, "embedding": 96, "units": 670, "max_sentences": 1000}  # the paper's
NARROW = {
    "num_words": 1000,
    "embedding": 32,
    "units": 64,
    "max_sentences": 64,
}  # trains in minutes on two cores
FEWER = {"cohort.size": 20, "rounds": 300}  # for NARROW
PRESETS = {PAPER: {**DEFAULTS, **{f"data.{name}": value for name, value in WIDE.items()}}}
EXAMPLE = {"num_words": 2, "num_buckets": 1, "embedding": 1, "units": 1}


class Layouts(NamedTuple):
    """Which ids of `TokenIds` are in which column.

    plain:   words, BOS and EOS are shared, all buckets local
    authors: as in the authors' code, which takes ids from V + 3 on as local. That is wrong by two: the first two
             buckets are shared, BOS and EOS local (with one bucket: it and BOS shared, EOS local)
    """

    ids: TokenIds
    name: Layout = "plain"

    @property
    def num_shared(self) -> int:
        return self.ids.num_words + 2

    def columns(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Token ids as the two columns."""
        ids, words = self.ids, self.ids.num_words
        if self.name == "authors":
            own = tokens >= words + 3
            shared, place = (tokens > 0) & ~own, tokens - 1
            bucket = tokens - words - 3
        else:
            own = (tokens >= ids.first_bucket) & (tokens < ids.bos)
            shared = (tokens > 0) & ~own
            place = np.where(tokens >= ids.bos, tokens - ids.num_buckets, tokens) - 1
            bucket = tokens - ids.first_bucket
        column = lambda there, value: np.where(there, value, -1).astype(np.int32)
        return {"word": column(shared, place), "bucket": column(own, bucket)}

    def tokens(self, word: Any, bucket: Any) -> Any:
        """The token ids from the two columns, for whole vocabularies; 0 for nothing."""
        ids, words = self.ids, self.ids.num_words
        if self.name == "authors":
            shared, own = word + 1, bucket + words + 3
        else:
            shared = jnp.where(word >= words, word + ids.num_buckets, word) + 1
            own = bucket + ids.first_bucket
        return jnp.where(word >= 0, shared, jnp.where(bucket >= 0, own, 0))


class Network(nnx.Module):
    """Embedding, LSTM, dense layer, output layer over words and buckets. The sizes come from the arrays."""

    def __init__(
        self,
        num_shared: int,
        num_buckets: int,
        embedding: int,
        units: int,
        precision: Precision,
        apart: bool,
        rngs: nnx.Rngs,
    ):
        """`apart`: whether the outputs of words and of buckets are separate leaves. If they are one leaf, it
        is padded to whole rows of memory with outputs that are never the answer and are never trained."""
        uniform = lambda *shape: jax.random.uniform(
            rngs.params(), shape, minval=-0.05, maxval=0.05
        )  # Keras's
        glorot = lambda *shape: nnx.initializers.glorot_uniform()(rngs.params(), shape)
        self.precision = precision
        self.embedding = nnx.Param(uniform(num_shared, embedding))
        self.oov = nnx.Param(uniform(num_buckets, embedding))
        for name, value in init_lstm(rngs.params(), embedding, units).items():
            setattr(self, name, nnx.Param(value))
        self.dense = nnx.Param(glorot(units, embedding))
        self.dense_bias = nnx.Param(jnp.zeros(embedding))
        num_out = num_shared if apart else num_shared + num_buckets
        fill = 0 if apart else -num_out % ALIGNED
        self.out = nnx.Param(glorot(embedding, num_out + fill))
        self.out_bias = nnx.Param(jnp.zeros(num_out + fill).at[num_out:].set(NOTHING))
        self.oov_out = nnx.Param(glorot(embedding, num_buckets)) if apart else None
        self.oov_out_bias = nnx.Param(jnp.zeros(num_buckets)) if apart else None

    def __call__(self, batch: Batch) -> jax.Array:
        word, bucket = (batch[name][:, :-1].T for name in ("word", "bucket"))  # time first
        x = lookup(self.embedding[...], word) + lookup(self.oov[...], bucket)
        weights = {name: getattr(self, name)[...] for name in ("input", "recurrent", "bias")}
        dtype = jnp.dtype(self.precision)
        states = lstm(weights, x, (word >= 0) | (bucket >= 0), dtype)
        hidden = dense(states, self.dense[...], self.dense_bias[...], dtype)
        out, bias = self.out[...], self.out_bias[...]
        if self.oov_out is not None and self.oov_out_bias is not None:
            out = jnp.concatenate([out, self.oov_out[...]], axis=1)
            bias = jnp.concatenate([bias, self.oov_out_bias[...]])
        return dense(hidden.swapaxes(0, 1), out, bias, dtype)


def _next(batch: Batch, num_held: int) -> jax.Array:
    """The index of the next word's score, [B, length]. Words come first, then buckets; -1 means nothing."""
    if "next" in batch:
        return batch["next"]
    word, bucket = batch["word"][:, 1:], batch["bucket"][:, 1:]
    return jnp.where(word >= 0, word, jnp.where(bucket >= 0, num_held + bucket, -1))


def tokens(batch: Batch) -> jax.Array:
    """The weight of a sentence: the number of its targets that are not padding."""
    return (_next(batch, 0) >= 0).sum(axis=-1) * 1.0


def _metrics(layout: Layouts) -> dict[str, Metric]:
    """Four top-1 accuracies. The first three are over all scores and count different targets. The first is
    the paper's, which ignores padding, words outside the vocabulary and the end of a sentence. The fourth
    chooses among words alone. This matters because in the other three, a model that spreads its
    out-of-vocabulary scores over more buckets predicts a word more often."""
    ids, shared = layout.ids, layout.num_shared
    targets = lambda batch: _next(batch, shared)

    def kind(batch: Batch) -> jax.Array:
        number = targets(batch)
        return layout.tokens(jnp.where(number < shared, number, -1), number - shared)

    is_word = lambda batch: (kind(batch) > 0) & (kind(batch) <= ids.num_words)
    only_words = lambda scores: scores[..., : ids.num_words]
    return {
        "accuracy_no_oov_or_eos": accuracy(targets, is_word),
        "accuracy_no_oov": accuracy(targets, lambda batch: is_word(batch) | (kind(batch) == ids.eos)),
        "accuracy_with_oov": accuracy(targets, lambda batch: kind(batch) > 0),
        "accuracy_among_words": accuracy(targets, is_word, only_words),
    }


def settings(
    num_words: int,
    num_buckets: int,
    words: Words = "shared",
    layout: Layout = "plain",
    embedding: int = 96,
    units: int = 670,
    precision: Precision = "float32",
    initial: Initial = "random",
) -> tuple[Setting, Setting]:
    """The setting with local embeddings of buckets, and the setting with all of them on the server."""
    for name, value, known in (
        ("words", words, Words),
        ("layout", layout, Layout),
        ("precision", precision, Precision),
    ):
        if value not in get_args(known):
            raise unknown(f"value of {name}", value, get_args(known))
    if min(embedding, units) < 1:
        raise UserError(f"embedding is {embedding} and units {units}: give at least 1 of each")
    here, apart = Layouts(TokenIds(num_words, num_buckets), layout), words == "keyed"
    held = lambda scores: scores.shape[-1] - num_buckets if apart else here.num_shared
    model = nnx_model(
        lambda rngs: Network(here.num_shared, num_buckets, embedding, units, precision, apart, rngs),
        lambda scores, batch: cross_entropy(scores, _next(batch, held(scores))),
        _metrics(here),
        weight=tokens,
    )
    rules: dict[str, Role] = {} if words == "shared" else {"embedding": keyed("word")}
    if apart:
        rules |= {"out": keyed("word", axis=1, whole=True), "out_bias": keyed("word", fill=NOTHING)}
    columns = ("word", "bucket") if apart else ("word", "bucket", "next")
    make = lambda more: Setting(model, partition(model, rules | more), columns)
    return make({"oov": local(initial)}), make({})


def load(
    data: str | None = None,
    *,
    num_words: Annotated[
        int | None, "most frequent words of the training clients; none: 10,000, or on a CPU 1,000", COUNTS
    ] = None,
    num_buckets: Annotated[int, "buckets of words outside the vocabulary", SIZES] = 500,
    words: Annotated[
        Words,
        "layers of which a client has its own words' rows alone: none (shared), the input, both (keyed)",
    ] = "shared",
    layout: Annotated[Layout, "which ids are local: plain, or those of the authors' code"] = "plain",
    length: Annotated[int, "words of a sentence, at most", SIZES] = 20,
    max_sentences: Annotated[
        int | None, "sentences of a client, at most; none: 1,000, of blogs 300, or on a CPU 64", COUNTS
    ] = None,
    min_sentences: Annotated[int, "clients with fewer sentences are left out", COUNTS] = 1,
    comments: Annotated[bool, "whether comments are read too"] = True,
    embedding: Annotated[
        int | None, "size of a word's embedding, and of the dense layer; none: 96, or on a CPU 32", SIZES
    ] = None,
    units: Annotated[int | None, "size of the LSTM; none: 670, or on a CPU 64", SIZES] = None,
    precision: Annotated[
        Precision, "of what products read and write; sums and parameters are float32"
    ] = "float32",
    initial: Annotated[Initial, "where embeddings of buckets start, before they are rebuilt"] = "random",
    seed: Annotated[int, "of the cut into training, validation and test clients", SEEDS] = 42,
) -> Task:
    """Stack Exchange dumps (a folder), or TFF's Stack Overflow (`stackoverflow.sqlite`, also `.lzma`; the
    older `stackoverflow_train.h5` and `_held_out.h5`), or Shakespeare's roles
    (`shakespeare_by_character.jsonl`, or TFF's files), or the Blog Authorship Corpus (its folder or a zip), or
    a table of sentences (`blog_sentences.parquet`, or any with the columns `user` and `text`); or the folder
    of any of these. Test clients are unseen. Sentences are in the order in which they were written, so that
    halves are by time."""
    asked = {"num_words": num_words, "embedding": embedding, "units": units, "max_sentences": max_sentences}
    long = has_long_clients(data)
    sizes, notes = sized_for_device(asked, WIDE | (LONG_SENTENCES if long else {}), NARROW)
    shape: Any = {"num_buckets": num_buckets, "length": length, "max_sentences": sizes["max_sentences"]}
    shape |= {"comments": comments, "min_sentences": min_sentences, "seed": seed}
    stores = load_sentences(data, sizes["num_words"], **shape)
    model: dict[str, Any] = {name: sizes[name] for name in ("embedding", "units")}
    model |= {"words": words, "layout": layout, "precision": precision}
    model |= {} if initial == "random" else {"initial": initial}
    task = next_word_lstm_task(*stores, num_buckets=num_buckets, **model)
    given = task.defaults if on_accelerator() else fitted({**task.defaults, **FEWER}, task.train)
    task = task._replace(defaults=given, loaded=sizes, notes=notes)
    return for_long_clients(task) if long else task


def load_generated(
    data: str | None = None,
    *,
    num_clients: Annotated[int, "clients that are generated", COUNTS] = 300,
    sentences: Annotated[int, "sentences of a client", COUNTS] = 32,
    num_words: Annotated[int, "words of the vocabulary", COUNTS] = 100,
    num_buckets: Annotated[int, "buckets of words outside the vocabulary", SIZES] = 20,
    words: Annotated[
        Words,
        "layers of which a client has its own words' rows alone: none (shared), the input, both (keyed)",
    ] = "shared",
    length: Annotated[int, "words of a sentence", SIZES] = 10,
    embedding: Annotated[int, "size of a word's embedding, and of the dense layer", SIZES] = 16,
    units: Annotated[int, "size of the LSTM", SIZES] = 32,
    precision: Annotated[
        Precision, "of what products read and write; sums and parameters are float32"
    ] = "float32",
    seed: Annotated[int, "of what is generated, and of the cut into parts", SEEDS] = 0,
) -> Task:
    """Sentences in which a client's own words decide what follows (see data.generated.planted_sentences). By
    default, the language and the model are learned in seconds on a CPU."""
    refuse_data("next-word-planted", data)
    size = 16.0 * num_clients * sentences * length
    check_memory(size, "so many sentences", "lower data.num_clients or data.sentences")
    store = planted_sentences(num_clients, sentences, num_words, num_buckets, length, seed)
    stores = holdout.by_client(store, (0.8, 0.1, 0.1), seed=seed)
    model = {"words": words, "embedding": embedding, "units": units, "precision": precision}
    task = next_word_lstm_task(*stores, num_buckets=num_buckets, **model)
    given = fitted({**task.defaults, **SHORT}, task.train)
    return task._replace(name="next-word-planted", defaults=given, presets={})


def next_word_lstm_task(
    train: ClientStore, validation: ClientStore, test: ClientStore, num_buckets: int, **model: Any
) -> Task:
    """A task from stores with the column `tokens`, made by `data.text.sentences` with the same number of
    buckets."""
    made = train.info.get("num_buckets", num_buckets)
    if made != num_buckets:
        raise UserError(
            f"num_buckets is {num_buckets}, and the sentences were made with {made}: give the same number"
        )
    num_words = train.num_keys("tokens") - TokenIds(0, num_buckets).num_ids
    options = {"num_words": num_words, "num_buckets": num_buckets, **model}
    personal, stateful = settings(**options)
    here = Layouts(TokenIds(num_words, num_buckets), model.get("layout", "plain"))
    train, validation, test = (_in_columns(store, here) for store in (train, validation, test))
    more = (
        {"select.word": "own"} if options.get("words") == "keyed" else {}
    )  # otherwise all keys, because the softmax is over all words
    presets = {name: fitted(each, train) | more for name, each in PRESETS.items()}
    given = fitted(DEFAULTS, train) | more
    task = Task("next-word-lstm", train, validation, test, personal, stateful, options, given)
    return task._replace(presets=presets)


def for_long_clients(task: Task) -> Task:
    """The task with rates for clients of hundreds of sentences."""
    rate = lambda given: 0.1 if given["cohort.size"] >= MANY else 0.03
    suited = lambda given: {**given, **LONG, "server.rate": rate(given)}
    presets = {name: suited(each) for name, each in task.presets.items()}
    return task._replace(defaults=suited(task.defaults), presets=presets)


def _in_columns(store: ClientStore, layout: Layouts) -> ClientStore:
    packed = store.gather(np.arange(store.num_clients))
    names = np.asarray(packed.vocabularies["tokens"])
    columns = layout.columns(packed.columns["tokens"])
    word, bucket = columns["word"][:, 1:], columns["bucket"][:, 1:]
    columns["next"] = np.where(word >= 0, word, np.where(bucket >= 0, layout.num_shared + bucket, -1))
    every = layout.columns(np.arange(layout.ids.num_ids))
    vocabularies = {
        name: names[column >= 0][np.argsort(column[column >= 0])] for name, column in every.items()
    }
    others = {name: column for name, column in packed.columns.items() if name != "tokens"}
    return dataclasses.replace(packed, columns={**others, **columns}, vocabularies=vocabularies)


NEXT_WORD_LSTM = Entry("next word", load, settings, DEFAULTS, PRESETS, EXAMPLE)
PLANTED = Entry("next word", load_generated, settings, DEFAULTS | SHORT, example=EXAMPLE)
