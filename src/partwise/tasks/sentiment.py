"""Sentiment (Federated Submodel Averaging, section 5.1): from words to positive or not, with two layers of
LSTM.

The embedding is keyed by word; the LSTM and the output are shared. The data are tweets (Sentiment140) or
Amazon reviews. The first character of the file tells which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from partwise.data.loaders import amazon_reviews, json_lines, sentiment140
from partwise.data.loaders.locate import data_root, held_by
from partwise.data.loaders.packed import open_packed
from partwise.data.reading import regular
from partwise.data.store import ClientStore
from partwise.data.text.labelled import split_sentiment_stores
from partwise.model.lstm import init_lstm, lstm
from partwise.model.partition import keyed, partition
from partwise.model.spec import Batch, Metric, Model, auc, lookup
from partwise.tasks.base import COUNTS, PAPER, SEEDS, SIZES, SUBMODEL_DEFAULTS, Entry, Setting, Task, fitted
from partwise.types import Limits, UserError

# The paper's batch size and rate are in an appendix that is not at hand. Ours were tried on musical instruments.
DEFAULTS = {
    **SUBMODEL_DEFAULTS,
    "cohort.size": 50,
    "update.rate": 1.0,
    "update.batch_size": 5,
    "simulation.rounds_per_call": 5,
}
PRESETS = {PAPER: {**DEFAULTS, "data.validation": 0.0}}  # no separate validation part
EXAMPLE = {"num_words": 2, "dim": 1, "units": 1}
SHARES = Limits(0, 1)
SAME = "There is no validation part (data.validation = 0): what is told on the way is of the test part."
MIN_TWEETS, MIN_REVIEWS = 41, 5  # the paper's "more than 40"; the published 5-core sets
PLACES = (
    "training.1600000.processed.noemoticon.csv*",
    "trainingandtestdata.zip",
    "reviews_*.json*",
    "*.csv*",
    "*.json*",
    "sentiment140/*.*",
    "amazon-musical-instruments/*.json*",
    "sentiment140-sample/*.csv*",
)


def two_layer_lstm(num_words: int, dim: int = 25, units: int = 100) -> Model:
    """The model. It has one score for a text, computed from the state after the last word: how positive it
    is, as log-odds.

    Words that are -1 are skipped. Embeddings start standard normal (PyTorch's choice; with much smaller ones,
    SGD stays at the majority class for hundreds of rounds). The LSTM starts as in `init_lstm`, the output
    Glorot-uniform with bias 0.
    """

    def init(rng: jax.Array) -> dict[str, Any]:
        words, first, second, out = jax.random.split(rng, 4)
        return {
            "embedding": jax.random.normal(words, (num_words, dim)),
            "first": init_lstm(first, dim, units),
            "second": init_lstm(second, units, units),
            "out": jax.nn.initializers.glorot_uniform()(out, (units, 1)),
            "out_bias": jnp.zeros(1),
        }

    def predict(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        words = batch["word"].T  # time first
        states = lstm(params["first"], lookup(params["embedding"], words), words >= 0)
        states = lstm(params["second"], states, words >= 0)
        return (states[-1] @ params["out"] + params["out_bias"])[:, 0]

    def losses(scores: jax.Array, batch: Batch) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(scores, batch["label"] * 1.0)

    def right(scores: jax.Array, batch: Batch) -> jax.Array:
        return ((scores > 0) == (batch["label"] > 0)) * 1.0

    metrics = {"auc": auc("label"), "accuracy": Metric(right, higher_is_better=True)}
    return Model(init, predict, losses, metrics)


def settings(num_words: int, dim: int = 25, units: int = 100) -> tuple[Setting, Setting]:
    """One setting, used for both, because nothing is local."""
    model = two_layer_lstm(num_words, dim, units)
    setting = Setting(model, partition(model, {"embedding": keyed("word")}), ("word", "label"))
    return setting, setting


def load(
    data: str | None = None,
    *,
    min_texts: Annotated[
        int | None, "texts that a user must have; none: 41 tweets, 5 reviews", COUNTS
    ] = None,
    num_words: Annotated[int | None, "most frequent words of the training part; none: all", COUNTS] = None,
    length: Annotated[int, "words of a text that are read, from its beginning", SIZES] = 25,
    summary: Annotated[bool, "whether a review's headline is read before its text"] = True,
    held_out: Annotated[float, "share of each user's texts that is kept for the test", SHARES] = 0.2,
    validation: Annotated[
        float,
        "share for validation, taken from training; 0: none, the test part is looked at on the way",
        SHARES,
    ] = 0.1,
    dim: Annotated[int, "size of a word's embedding", SIZES] = 25,
    units: Annotated[int, "size of the two LSTM layers", SIZES] = 100,
    seed: Annotated[int, "of the cut of each user's texts into training and test", SEEDS] = 42,
) -> Task:
    """Sentiment140's CSV file or zip, or Amazon reviews (.json, .json.gz). Users are seen: the test uses
    other texts of the same users."""
    file = _locate(data)
    reviews = _is_json(file)
    corpus = amazon_reviews.load(file, summary) if reviews else sentiment140.load(file)
    fewest = min_texts if min_texts is not None else MIN_REVIEWS if reviews else MIN_TWEETS
    parts = split_sentiment_stores(corpus, fewest, num_words, length, held_out, validation, seed)
    task = sentiment_task(*parts, dim=dim, units=units)
    return task if validation else task._replace(notes=(SAME,))


def sentiment_task(
    train: ClientStore, validation: ClientStore, test: ClientStore, dim: int = 25, units: int = 100
) -> Task:
    """A task from stores with the columns `word` and `label`."""
    options = {"num_words": train.num_keys("word"), "dim": dim, "units": units}
    personal, stateful = settings(**options)
    presets = {name: fitted(each, train) for name, each in PRESETS.items()}
    given = fitted(DEFAULTS, train)
    task = Task("sentiment", train, validation, test, personal, stateful, options, given, seen=True)
    return task._replace(presets=presets)


def _locate(data: str | None) -> Path:
    known = f"Sentiment140 ({sentiment140.DOWNLOAD}) or Amazon reviews ({amazon_reviews.DOWNLOAD})"
    root = data_root(data, "texts with a sentiment", f"download {known} and pass its path", f"give {known}")
    if not root.is_dir():
        return regular(root, f"give {known}")
    for pattern in PLACES:
        found = sorted(root.glob(pattern))
        if len(found) > 1:
            named = ", ".join(file.name for file in found[:8])
            raise UserError(f"{root} holds {len(found)} files that would do ({named}): give one of them")
        if found:
            return found[0]
    raise UserError(f"{root} holds no .csv, .zip or .json file of texts, but {held_by(root)}: give {known}")


def _is_json(file: Path) -> bool:
    """Whether a file has JSON objects; otherwise it should be CSV."""
    choose = lambda names: sentiment140.training_member(names) or json_lines.only_member(names)
    with open_packed(file, choose, f"{sentiment140.MEMBER} or {json_lines.MEMBER}") as source:
        return source.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


SENTIMENT = Entry("sentiment", load, settings, DEFAULTS, PRESETS, EXAMPLE)
