"""Generated sentences in which clients have words of their own, for next-word prediction at any size.

Words follow a Zipf distribution. After one word out of two comes the word that always follows it in the
language, the same for all clients. The other words are drawn again. Some of them are the client's own words.
Each own word falls into a bucket and has one of a few kinds, which only the client knows. After it comes the
word that follows this kind for all clients. So a shared model learns what follows a word and a kind, and the
client learns which kind a bucket has.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from partwise.data.generated.streams import check_numbers, stream
from partwise.data.ragged import owners
from partwise.data.store import ClientStore, group_rows
from partwise.data.text.sentences import TokenIds
from partwise.data.text.words import Vocabulary
from partwise.types import UserError

KINDS = 8
FOLLOWED = 0.5  # probability that a word is followed by its fixed next word
OWN = 0.3  # probability that another word is one of the client's own


def planted_sentences(
    num_clients: int = 300,
    sentences: int = 32,
    num_words: int = 100,
    num_buckets: int = 20,
    length: int = 10,
    seed: int = 0,
) -> ClientStore:
    """A store with the column `tokens` [N, length + 1], as `data.text.sentences` makes it. All sentences have
    full length."""
    sizes = {"num_clients": num_clients, "sentences": sentences, "num_buckets": num_buckets, "length": length}
    check_numbers(sizes, positive=set(sizes))
    if num_words < KINDS:
        raise UserError(
            f"num_words is {num_words}: give at least {KINDS}, one for every kind of word of one's own"
        )
    ids, rng = TokenIds(num_words, num_buckets), stream(seed, 0)
    counts = np.full(num_clients, sentences)
    client = owners(counts)
    after = rng.permutation(num_words) + 1
    after_kind = rng.choice(num_words, KINDS, replace=False) + 1
    kind = rng.integers(0, KINDS, (num_clients, num_buckets))
    popularity = np.cumsum(1 / np.arange(1, num_words + 1))
    tokens = np.empty((len(client), length + 1), np.int32)
    tokens[:, 0] = before = np.full(len(client), ids.bos, np.int32)
    for place in range(1, length + 1):
        drawn = np.searchsorted(popularity, rng.random(len(client)) * popularity[-1]) + 1
        own = ids.first_bucket + rng.integers(0, num_buckets, len(client))
        now = np.where(rng.random(len(client)) < OWN, own, drawn)
        is_word = (before >= 1) & (before <= num_words)
        follows = is_word & (rng.random(len(client)) < FOLLOWED)
        now = np.where(follows, after[np.where(is_word, before, 1) - 1], now)
        is_own = (before >= ids.first_bucket) & (before < ids.bos)
        bucket = np.where(is_own, before - ids.first_bucket, 0)
        now = np.where(is_own, after_kind[kind[client, bucket]], now)
        tokens[:, place] = before = now
    names = ids.names(Vocabulary(tuple(f"w{i}" for i in range(num_words))))
    info = {"source": "planted sentences", "num_words": num_words, "num_buckets": num_buckets}
    store = group_rows(client, {"tokens": tokens}, (), info)
    return dataclasses.replace(store, vocabularies={"tokens": np.array(names)})
