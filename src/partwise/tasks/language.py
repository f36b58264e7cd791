"""What the tasks of next-word prediction share: sentences from any of the sources, a loss, and accuracies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from partwise.data import holdout
from partwise.data.loaders import blogs, sentence_table, shakespeare, stackexchange, stackoverflow
from partwise.data.store import ClientStore
from partwise.data.text.corpus import Corpus
from partwise.data.text.sentences import sentence_store, sentence_vocabulary, split_sentence_stores
from partwise.model.spec import Batch, Metric
from partwise.tasks.base import noting_unread

NO_COMMENTS = "only dumps of Stack Exchange have comments"


def load_sentences(
    data: str | None,
    num_words: int,
    *,
    comments: bool = True,
    min_sentences: int = 1,
    seed: int = 42,
    **shape: Any,
) -> tuple[ClientStore, ...]:
    """Training, validation and test clients with the column `tokens` (see data.text.sentences). The source is
    TFF's Stack Overflow if `data` is this, otherwise that of `find_corpus`. `shape` is num_buckets, length and
    max_sentences."""
    if source := stackoverflow.locate(data):
        with stackoverflow.open_unseen(source) as corpora:
            words = sentence_vocabulary(corpora[0], num_words)
            stores = [sentence_store(corpus, words, **shape) for corpus in corpora]
        train, unseen = (store.filter(min_sentences) for store in stores)
        train = noting_unread(train, ("comments",), NO_COMMENTS)
        return (train, *holdout.by_client(unseen, (0.5, 0.5), seed=seed))
    corpus = find_corpus(data, comments).hold()
    train, *others = split_sentence_stores(corpus, num_words, seed=seed, min_sentences=min_sentences, **shape)
    train = noting_unread(train, ("comments",), NO_COMMENTS) if _corpus_in(data) else train
    return (train, *others)


def find_corpus(data: str | None, comments: bool = True) -> Corpus:
    """The texts that are there: Shakespeare, blogs, a table of sentences, otherwise Stack Exchange dumps."""
    if found := _corpus_in(data):
        loader, source = found
        return loader.load(source)
    sentence_table.refuse_others(data)
    return stackexchange.load(data, comments=comments)


def _corpus_in(data: str | None) -> tuple[Any, Path] | None:
    """The loader of what `data` holds, and its file or folder; None if it is neither Shakespeare nor blogs nor a
    table of sentences."""
    each = ((loader, loader.locate(data)) for loader in (shakespeare, blogs, sentence_table))
    return next(((loader, source) for loader, source in each if source), None)


def has_long_clients(data: str | None) -> bool:
    """Whether `data` is texts of people who wrote hundreds of sentences each."""
    return any(loader.locate(data) for loader in (blogs, sentence_table))


def cross_entropy(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss [B], summed over the targets of a sentence. The target -1 is ignored."""
    return _surprise(scores, targets).sum(axis=-1)


@jax.custom_vjp
def _surprise(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The negative log-probability of each target. Its gradient needs only one pass over the scores, which
    are many."""
    return _surprise_forward(scores, targets)[0]


def _surprise_forward(scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
    total = jax.nn.logsumexp(scores, axis=-1)
    own = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets >= 0, total - own, 0), (scores, targets, total)


def _surprise_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    scores, targets, total = kept
    softmax = jnp.exp(scores - total[..., None])
    weight = jnp.where(targets >= 0, gradient, 0)[..., None]
    return weight * (softmax - (jnp.arange(scores.shape[-1]) == targets[..., None])), None


_surprise.defvjp(_surprise_forward, _surprise_backward)


def accuracy(
    targets: Callable[[Batch], jax.Array],
    counted: Callable[[Batch], jax.Array],
    allowed: Callable[[jax.Array], jax.Array] = lambda scores: scores,
) -> Metric:
    """The share of the `counted` targets [B, L] whose score is the largest of the `allowed` scores."""

    def right(scores: jax.Array, batch: Batch) -> jax.Array:
        return ((jnp.argmax(allowed(scores), axis=-1) == targets(batch)) & counted(batch)).sum(axis=-1) * 1.0

    return Metric(right, higher_is_better=True, weight=lambda batch: counted(batch).sum(axis=-1) * 1.0)
