"""Next word with a transformer (Federated Select, section 5.4): structured keys for words, random keys for
units.

A word's key owns its row of the embedding, its column of the output layer and its bias. A unit's key owns its
column of the wide dense layer, its bias and its row of the next layer. A client's softmax is over the words
it holds, or in training over a sample of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from partwise.data.store import ClientStore
from partwise.data.text.sentences import PAD, TokenIds
from partwise.model.nnx import nnx_model
from partwise.model.partition import keyed, partition
from partwise.model.softmax import NOTHING, sampled_softmax
from partwise.model.spec import Batch, Metric, lookup
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
    sized_for_device,
)
from partwise.tasks.language import accuracy, cross_entropy, load_sentences
from partwise.types import Limits, UserError

DEFAULTS = {
    **SELECT_DEFAULTS,
    "update.rate": 0.1,
    "update.batch_size": 16,
    "server.optimizer": "adam",
    "server.rate": 0.01,
    "select.word": "own",
    "select.unit": "all",
}
WIDE = {"num_words": 10_000, "width": 96, "heads": 8, "units": 2048}  # the paper's
NARROW = {"num_words": 2000, "width": 32, "heads": 4, "units": 256}  # a round takes a second on two cores
PRESETS = {PAPER: {**DEFAULTS, **{f"data.{name}": value for name, value in WIDE.items()}}}
EXAMPLE = {"num_ids": 8, "num_words": 4, "width": 2, "heads": 1, "units": 2, "length": 2}


class Wide(nnx.Module):
    """width -> units -> width. The sizes come from the arrays."""

    def __init__(self, width: int, units: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.into = nnx.Param(init(rngs.params(), (width, units)))
        self.into_bias = nnx.Param(jnp.zeros(units))
        self.back = nnx.Param(init(rngs.params(), (units, width)))
        self.back_bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.into[...] + self.into_bias[...]) @ self.back[...] + self.back_bias[...]


class Transformer(nnx.Module):
    """Embedding, one block of causal attention and a wide dense layer, an output layer over all words."""

    def __init__(self, num_ids: int, width: int, heads: int, units: int, length: int, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(nnx.initializers.normal(width**-0.5)(rngs.params(), (num_ids, width)))
        self.position = nnx.Param(small(rngs.params(), (length, width)))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.wide = Wide(width, units, rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(3)])
        self.out = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (width, num_ids)))
        self.out_bias = nnx.Param(jnp.zeros(num_ids))

    def __call__(self, batch: Batch) -> jax.Array:
        return self.hidden(batch) @ self.out[...] + self.out_bias[...]

    def hidden(self, batch: Batch) -> jax.Array:
        """The input of the output layer: [B, length, width]."""
        tokens = batch["tokens"][:, :-1]
        x = lookup(self.embedding[...], tokens) * self.embedding.shape[-1] ** 0.5
        x = x + self.position[: tokens.shape[1]]
        causal = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1]), bool))
        x = x + self.attention(self.norms[0](x), mask=causal)
        x = x + self.wide(self.norms[1](x))
        return self.norms[2](x)


def _targets(batch: Batch) -> jax.Array:
    return batch["tokens"][:, 1:]


def _losses(scores: jax.Array, batch: Batch) -> jax.Array:
    """The loss of each sentence, summed over its words that are in the slice."""
    return cross_entropy(scores, _targets(batch))


def _sampled_losses(num_sampled: int) -> Callable[[Transformer, Batch, jax.Array], jax.Array]:
    """Like `_losses`, with each word scored against `num_sampled` other words of the slice."""

    def losses(module: Transformer, batch: Batch, rng: jax.Array) -> jax.Array:
        out = (module.out[...].T, module.out_bias[...])
        return sampled_softmax(module.hidden(batch), *out, _targets(batch), num_sampled, rng).sum(axis=-1)

    return losses


def tokens(batch: Batch) -> jax.Array:
    return (_targets(batch) >= 0).sum(axis=-1) * 1.0


def _accuracy(num_words: int) -> Metric:
    """Top-1 accuracy over words. Targets that are padding, out of vocabulary or the end of a sentence are not
    counted. Scores are not masked (FedRecon's definition)."""
    return accuracy(_targets, lambda batch: (_targets(batch) >= 0) & (_targets(batch) <= num_words))


def settings(
    num_ids: int,
    num_words: int,
    width: int = 96,
    heads: int = 8,
    units: int = 2048,
    length: Annotated[int, "words of a sentence, at most"] = 20,
    sampled: Annotated[int, "outputs sampled for the training loss; 0: all that a client holds"] = 0,
) -> tuple[Setting, Setting]:
    """One setting, used for both, because nothing is local. `sampled` is the number of words in the softmax
    of a training step; 0 means all that the client holds."""
    if sampled < 0:
        raise UserError(f"sampled is a number of words, or 0 for all that a client holds; not {sampled}")
    model = nnx_model(
        lambda rngs: Transformer(num_ids, width, heads, units, length, rngs),
        _losses,
        {"accuracy": _accuracy(num_words)},
        weight=tokens,
        train_loss=_sampled_losses(sampled) if sampled else None,
    )
    rules = {
        "embedding": keyed("word"),
        "out": keyed("word", axis=1, whole=True),
        "out_bias": keyed("word", fill=NOTHING),
        "wide/into": keyed("unit", axis=1),
        "wide/into_bias": keyed("unit"),
        "wide/back": keyed("unit"),
    }
    parts = partition(model, rules, columns={"word": ("tokens",), "unit": ()})
    setting = Setting(model, parts, ("tokens",))
    return setting, setting


def load(
    data: str | None = None,
    *,
    num_words: Annotated[
        int | None, "most frequent words of the training clients; none: 10,000, or on a CPU 2,000", COUNTS
    ] = None,
    num_buckets: Annotated[int, "buckets of words outside the vocabulary", SIZES] = 1,
    length: Annotated[int, "words of a sentence, at most", SIZES] = 20,
    max_sentences: Annotated[int, "sentences of a client, at most", COUNTS] = 1000,
    min_sentences: Annotated[int, "clients with fewer sentences are left out", COUNTS] = 1,
    comments: Annotated[bool, "whether comments are read too"] = True,
    sampled: Annotated[
        int, "outputs sampled for the training loss; 0: all that a client holds", Limits(0, 10**8)
    ] = 0,
    width: Annotated[int | None, "size of a word's embedding; none: 96, or on a CPU 32", SIZES] = None,
    heads: Annotated[int | None, "heads of attention; none: 8, or on a CPU 4", Limits(1, 1024)] = None,
    units: Annotated[int | None, "units of the wide layer; none: 2,048, or on a CPU 256", SIZES] = None,
    seed: Annotated[int, "of the cut into training, validation and test clients", SEEDS] = 42,
) -> Task:
    """Stack Exchange dumps (a folder), or TFF's Stack Overflow (`stackoverflow.sqlite`, also `.lzma`; the
    older `stackoverflow_train.h5` and `_held_out.h5`; or their folder), or blogs or a table of sentences as for
    `next-word-lstm`. Test clients are unseen."""
    asked = {"num_words": num_words, "width": width, "heads": heads, "units": units}
    sizes, notes = sized_for_device(asked, WIDE, NARROW)
    given: Any = {"num_buckets": num_buckets, "length": length, "max_sentences": max_sentences}
    given |= {"comments": comments, "min_sentences": min_sentences, "seed": seed}
    parts = load_sentences(data, sizes["num_words"], **given)
    train, validation, test = map(_without_padding, parts)
    shape = {name: value for name, value in sizes.items() if name != "num_words"}
    shape |= {"num_buckets": num_buckets, "length": length, "sampled": sampled}
    task = next_word_task(train, validation, test, **shape)
    return task._replace(loaded=sizes, notes=notes)


def _without_padding(store: ClientStore) -> ClientStore:
    """The store with -1 for padding, which is then no key."""
    packed = store.gather(np.arange(store.num_clients))
    tokens = packed.columns["tokens"]
    cleaned = np.where(tokens == PAD, -1, tokens).astype(np.int32)
    return dataclasses.replace(packed, columns={**packed.columns, "tokens": cleaned})


def next_word_task(
    train: ClientStore,
    validation: ClientStore,
    test: ClientStore,
    num_buckets: Annotated[int, "buckets of words outside the vocabulary"] = 1,
    length: Annotated[int, "words of a sentence, at most"] = 20,
    **shape: Any,
) -> Task:
    """A task from stores with the column `tokens`."""
    num_ids = train.num_keys("tokens")
    num_words = num_ids - TokenIds(0, num_buckets).num_ids
    options = {"num_ids": num_ids, "num_words": num_words, "length": length, **shape}
    personal, stateful = settings(**options)
    presets = {name: fitted(each, train) for name, each in PRESETS.items()}
    given = fitted(DEFAULTS, train)
    task = Task("next-word", train, validation, test, personal, stateful, options, given)
    return task._replace(presets=presets)


NEXT_WORD = Entry("next word", load, settings, DEFAULTS, PRESETS, EXAMPLE)
