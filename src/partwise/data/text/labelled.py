"""Sentiment of texts (Federated Submodel Averaging, section 5.1): each text is a row of words, positive or
not.

Column `word` int32 [N, length]: the text's first tokens as ids (0 is the most frequent word of the training
part), padded with -1. Words outside the vocabulary are -1 too, and a model skips them. (LEAF also gives them
the same id as the padding, but there this id has an embedding.) Column `label` int32 [N]: 1 positive, 0
negative.

The clients of all parts are the same: of every user, some examples, drawn at random, are held out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from partwise.data.holdout import by_example
from partwise.data.store import ClientStore
from partwise.data.text.corpus import POSITIVE, Corpus, Example, Text, collect
from partwise.data.text.words import vocabulary
from partwise.types import UserError

PAD = -1


def split_sentiment_stores(
    corpus: Corpus,
    min_texts: int = 41,
    num_words: int | None = None,
    length: int = 25,
    held_out: float = 0.2,
    validation: float = 0.0,
    seed: int = 42,
) -> tuple[ClientStore, ClientStore, ClientStore]:
    """Training, validation and test parts of the users who have at least `min_texts` texts.

    The share `held_out` of each user's texts, at random by `seed`, is for the test. The paper has no
    validation part. So without a share `validation` (taken from training), the validation part is the test
    part again. The vocabulary is that of the training part: its `num_words` most frequent words, or all
    words. Counted in the stores' info are: users and texts left out, texts cut to `length`, texts without a
    known word, and words outside the vocabulary. The corpus is read twice.
    """
    if length < 1 or min_texts < 2:
        raise UserError(
            f"length is {length} and min_texts {min_texts}: give at least 1 word, and at least 2 texts of a user "
            "(one to train on, one to test on)"
        )
    if not 0 < held_out < 1 or not 0 <= validation < 1 - held_out:
        raise UserError(
            f"held_out is {held_out} and validation {validation}: give shares that leave something for training"
        )
    numbers: dict[str, int] = {}
    counts: Counter[str] = Counter()
    examples = _examples(corpus, _large_users(corpus, min_texts, counts), numbers, length, counts)
    info = {"source": corpus.source, "pad": PAD}
    store = collect(examples, {}, info, counts)
    _check_labels(store, corpus.source)
    parts = by_example(store, (1 - held_out - validation, validation, held_out), seed)
    train, kept, test = _known(parts, numbers, num_words, corpus.counts)
    return train, kept if validation else test, test


def _large_users(corpus: Corpus, min_texts: int, counts: Counter[str]) -> frozenset[str]:
    texts = Counter(text.client for text in corpus)
    kept = frozenset(client for client, number in texts.items() if number >= min_texts)
    if not kept:
        most = max(texts.values(), default=0)
        raise UserError(
            f"none of the {len(texts):,} users of {corpus.source} has {min_texts} texts; the largest has {most}: "
            f"set data.min_texts (in Python, min_texts) to at most {most}, or give more data"
            if texts
            else f"{corpus.source} has no text: give a file with at least two texts of one user"
        )
    counts["dropped_small_users"] = len(texts) - len(kept)
    counts["dropped_texts_of_small_users"] = sum(n for client, n in texts.items() if client not in kept)
    return kept


def _examples(
    texts: Iterable[Text], clients: frozenset[str], numbers: dict[str, int], length: int, counts: Counter[str]
) -> Iterator[Example]:
    """Words are numbered as they appear, because the vocabulary is not known yet."""
    for text in texts:
        if text.client in clients:
            words = text.words()
            counts["texts_cut"] += len(words) > length
            row = [numbers.setdefault(word, len(numbers)) for word in words[:length]]
            label = int(POSITIVE in text.tags)
            yield Example(text.client, text.time, {"word": row + [PAD] * (length - len(row)), "label": label})


def _check_labels(store: ClientStore, source: str) -> None:
    labels = store.columns["label"]
    if labels.min() == labels.max():
        kind = "positive" if labels[0] else "negative"
        raise UserError(
            f"all {len(labels):,} texts of {source} that are used are {kind}, so there is nothing to learn: give a "
            "file with both kinds (the rows of Sentiment140 are sorted by polarity: part of it may have one only)"
        )


def _known(
    parts: tuple[ClientStore, ...], numbers: dict[str, int], num_words: int | None, read: dict[str, int]
) -> tuple[ClientStore, ...]:
    """The parts, which share their columns, with words as positions in the vocabulary of the first part."""
    column = parts[0].columns["word"]
    trained = parts[0].gather().columns["word"]
    uses = np.bincount(trained[trained >= 0], minlength=len(numbers)).tolist()
    used = {word: number for word, number in zip(numbers, uses, strict=True) if number}
    known = vocabulary(used, len(numbers) if num_words is None else num_words)
    place = np.array([*(known.ids.get(word, PAD) for word in numbers), PAD], np.int32)  # the last is for -1
    words = place[column]
    found = {
        "words": int((column >= 0).sum()),
        "unknown": int(((column >= 0) & (words < 0)).sum()),
        "without_known_word": int((words < 0).all(axis=1).sum()),
    }
    info = dict(parts[0].info)
    info["counts"] = {**read, **info["counts"], **found}
    columns = {**parts[0].columns, "word": words}
    names = {"word": np.array(known.words)}
    return tuple(dataclasses.replace(part, columns=columns, vocabularies=names, info=info) for part in parts)
