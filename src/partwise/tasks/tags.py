"""Tag prediction (Federated Select, section 5.2): from a bag of words to tags, one-vs-rest logistic
regression.

The weight matrix is keyed by word: a client is sent the rows of the words it chose. The bias is shared.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from partwise.data import holdout
from partwise.data.checks import check_memory
from partwise.data.generated.planted_tags import best_recall, generate_tags
from partwise.data.loaders import stackexchange, stackoverflow
from partwise.data.store import ClientStore
from partwise.data.text.tag_bags import split_tag_stores, tag_store, tag_vocabularies
from partwise.model.partition import keyed, partition
from partwise.model.spec import Batch, Metric, Model, bag, indicators
from partwise.tasks.base import (
    COUNTS,
    PAPER,
    SEEDS,
    SELECT_DEFAULTS,
    SIZES,
    Entry,
    Setting,
    Task,
    fitted,
    refuse_data,
)

TOP = 5
# Section 5.2; the rates were searched on Stack Exchange, as the paper's on its data.
PAPER_SETTINGS = {
    **SELECT_DEFAULTS,
    "update.rate": 1.0,
    "update.batch_size": 16,
    "server.optimizer": "adagrad",
    "server.rate": 0.3,
    "select.word": "top:1000",
}
DEFAULTS = {
    **PAPER_SETTINGS,
    "fed_adagrad": {"server.rate": 0.3},
    # a control variate of every client's words would take gigabytes, and most of the time
    "scaffold": {"scaffold.control": "server"},
    "central": {
        "update.max_steps": 1,
        "update.batch_size": 1000,
        "server.optimizer": "adagrad",
        "server.rate": 0.3,
    },
}
PRESETS = {PAPER: PAPER_SETTINGS}
EXAMPLE = {"num_words": 2, "num_tags": 2}


def logistic_regression(num_words: int, num_tags: int) -> Model:
    """The model. It scores all tags; the loss of an example is the sum over tags."""

    def init(rng: jax.Array) -> dict[str, jax.Array]:
        return {"weights": jnp.zeros((num_words, num_tags)), "bias": jnp.zeros(num_tags)}

    def predict(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        return bag(params["weights"], batch["words"]) + params["bias"]

    def losses(scores: jax.Array, batch: Batch) -> jax.Array:
        # The cross-entropy of sigmoids, with one logarithm for a score instead of two.
        return (jax.nn.softplus(scores) - scores * indicators(batch["tags"], num_tags)).sum(axis=-1)

    def hits(scores: jax.Array, batch: Batch) -> jax.Array:
        _, best = jax.lax.top_k(scores, min(TOP, num_tags))
        return (batch["tags"][:, :, None] == best[:, None, :]).any(axis=-1).sum(axis=-1) * 1.0

    recall = Metric(hits, higher_is_better=True, weight=lambda batch: (batch["tags"] >= 0).sum(axis=-1) * 1.0)
    return Model(init, predict, losses, {"recall_at_5": recall})


def settings(num_words: int, num_tags: int) -> tuple[Setting, Setting]:
    """One setting, used for both, because nothing is local."""
    model = logistic_regression(num_words, num_tags)
    parts = partition(model, {"weights": keyed("word", summed=True)}, columns={"word": ("words",)})
    setting = Setting(model, parts, ("words", "tags"))
    return setting, setting


def load(
    data: str | None = None,
    *,
    num_words: Annotated[int, "most frequent words of the training clients: n", COUNTS] = 10_000,
    num_tags: Annotated[int, "most frequent tags: t", SIZES] = 500,
    width: Annotated[int, "most different words of an example", SIZES] = 256,
    seed: Annotated[
        int, "of the cut into training, validation and test clients, or of what is generated", SEEDS
    ] = 42,
) -> Task:
    """Stack Exchange dumps (a folder), or TFF's Stack Overflow (`stackoverflow.sqlite`, also `.lzma`; the
    older `stackoverflow_train.h5` and `_held_out.h5`; or their folder). Test clients are unseen. Stack
    Overflow's `test` split has the training users, so its held-out users are divided into validation and test
    clients."""
    if source := stackoverflow.locate(data):
        with stackoverflow.open_unseen(source) as corpora:
            vocabularies = tag_vocabularies(corpora[0], num_words, num_tags)
            train, unseen = (tag_store(corpus, vocabularies, width) for corpus in corpora)
        validation, test = holdout.by_client(unseen, (0.5, 0.5), seed=seed)
        return tags_task("tags", train, validation, test)
    corpus = stackexchange.load(data).hold()
    parts = split_tag_stores(corpus, num_words, num_tags, seed=seed, width=width)
    return tags_task("tags", *parts)


def load_generated(
    data: str | None = None,
    *,
    num_clients: Annotated[int, "clients that are generated", COUNTS] = 2000,
    num_words: Annotated[int, "most frequent words of the training clients: n", COUNTS] = 10_000,
    num_tags: Annotated[int, "most frequent tags: t", SIZES] = 500,
    mean_examples: Annotated[float, "posts of a client, on average", COUNTS] = 100,
    words_per_example: Annotated[int, "different words of a post, on average", SIZES] = 60,
    seed: Annotated[
        int, "of the cut into training, validation and test clients, or of what is generated", SEEDS
    ] = 0,
) -> Task:
    """Posts whose tags depend on their words through a planted model; the best reachable recall is known."""
    refuse_data("tags-planted", data)
    size = 4.0 * num_clients * mean_examples * words_per_example
    check_memory(size, "so many posts", "lower data.num_clients or data.mean_examples")
    store = generate_tags(num_clients, num_words, num_tags, mean_examples, words_per_example, seed=seed)
    train, validation, test = holdout.by_client(store, (0.8, 0.1, 0.1), seed=seed)
    task = tags_task("tags-planted", train, validation, test)
    best = {"recall_at_5": best_recall(test)}
    return task._replace(best=lambda split: best, presets={})


def tags_task(name: str, train: ClientStore, validation: ClientStore, test: ClientStore) -> Task:
    """A task from stores with the columns `words` and `tags`."""
    options = {"num_words": train.num_keys("words"), "num_tags": train.num_keys("tags")}
    personal, stateful = settings(**options)
    presets = {preset: fitted(each, train) for preset, each in PRESETS.items()}
    task = Task(name, train, validation, test, personal, stateful, options, fitted(DEFAULTS, train))
    return task._replace(presets=presets)


TAGS = Entry("posts to tags", load, settings, DEFAULTS, PRESETS, EXAMPLE)
PLANTED = Entry("generated posts to tags", load_generated, settings, DEFAULTS, example=EXAMPLE)
