"""Sentences as numbers of words, from which stores with any vocabulary are made without reading the text again.

A word's number is its place in the vocabulary of all words of the training clients; words that only others use
come after them. So the vocabulary of V words is the numbers below V. What comes out is the same as from
`split_sentence_stores`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from partwise.data.holdout import FRACTIONS
from partwise.data.store import ClientStore
from partwise.data.text.corpus import Corpus, Example, Text, collect, cut_clients, take_parts
from partwise.data.text.sentences import PAD, TokenIds, sentence_vocabulary, speaking
from partwise.data.text.words import Vocabulary

NOTHING = -1  # after the last word of a sentence
EVERY = 1 << 40  # words of a vocabulary without a limit


def number_sentences(
    corpus: Corpus,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 42,
    length: int = 20,
    max_sentences: int = 1000,
    min_sentences: int = 1,
) -> ClientStore:
    """A store with the column `word` [N, length]. Its info has the clients of every part, and how many words
    training clients use. Arguments are those of `split_sentence_stores`."""
    parts = cut_clients(speaking(corpus, min_sentences), fractions, seed, corpus.source)
    trained = sentence_vocabulary((text for text in corpus if text.client in parts[0]), EVERY)
    numbers, counts = dict(trained.ids), Counter[str]()
    known = frozenset().union(*parts)
    examples = _examples((text for text in corpus if text.client in known), numbers, length)
    info = {"source": corpus.source, "trained_words": len(trained), "parts": [sorted(part) for part in parts]}
    store = collect(examples, {}, info, counts, max_sentences)
    return dataclasses.replace(store, vocabularies={"word": np.array(list(numbers))})


def _examples(texts: Iterable[Text], numbers: dict[str, int], length: int) -> Iterator[Example]:
    for text in texts:
        for words in filter(None, map(str.split, text.sentences)):
            row = [numbers.setdefault(word, len(numbers)) for word in words[:length]]
            yield Example(text.client, text.time, {"word": row + [NOTHING] * (length - len(row))})


def with_vocabulary(numbered: ClientStore, num_words: int, num_buckets: int) -> tuple[ClientStore, ...]:
    """Training, validation and test stores with the column `tokens`, for the most frequent `num_words`."""
    names = numbered.vocabularies["word"].tolist()
    known = Vocabulary(tuple(names[: min(num_words, numbered.info["trained_words"])]))
    ids = TokenIds(len(known), num_buckets)
    place = [*range(1, len(known) + 1), *(ids.bucket(word) for word in names[len(known) :]), PAD]
    rows = np.array(place, np.int32)[np.asarray(numbered.columns["word"])]  # the last is for NOTHING
    first = np.full((len(rows), 1), ids.bos, np.int32)
    tokens = np.concatenate([first, rows], axis=1)
    sizes = (rows != PAD).sum(axis=1)
    ends = sizes < rows.shape[1]
    tokens[np.flatnonzero(ends), sizes[ends] + 1] = ids.eos
    info = {"source": numbered.info["source"], "num_words": len(known), "num_buckets": num_buckets}
    store = dataclasses.replace(
        numbered,
        columns={"tokens": tokens},
        vocabularies={"tokens": np.array(ids.names(known))},
        info=info,
    )
    return take_parts(store, [frozenset(part) for part in numbered.info["parts"]])
