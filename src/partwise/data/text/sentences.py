"""Next-word prediction (FedRecon, section 5.2 and appendix): each sentence is a row of token ids.

Column `tokens` int32 [N, length + 1]: BOS, up to `length` words, EOS if there are fewer, then padding. A
model's inputs are `tokens[:, :-1]`, its targets `tokens[:, 1:]`. `TokenIds` says what each id means.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from partwise.data.holdout import FRACTIONS
from partwise.data.store import ClientStore
from partwise.data.text.corpus import Corpus, Example, Text, collect, cut_clients, take_parts
from partwise.data.text.words import Vocabulary, vocabulary
from partwise.types import UserError

PAD = 0


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Padding 0, words 1..V, buckets of other words V+1..V+B, BOS V+B+1, EOS V+B+2."""

    num_words: int
    num_buckets: int

    def __post_init__(self):
        _check_sizes(num_buckets=self.num_buckets)

    @property
    def first_bucket(self) -> int:
        return self.num_words + 1

    @property
    def bos(self) -> int:
        return self.num_words + self.num_buckets + 1

    @property
    def eos(self) -> int:
        return self.bos + 1

    @property
    def num_ids(self) -> int:
        return self.eos + 1

    def bucket(self, word: str) -> int:
        """The id of a word that is not in the vocabulary. It comes from the word's CRC-32, so it is the same
        on every machine."""
        return self.first_bucket + zlib.crc32(word.encode("utf-8", "replace")) % self.num_buckets

    def names(self, words: Vocabulary) -> list[str]:
        """The name of each id."""
        buckets = [f"<oov {k}>" for k in range(self.num_buckets)]
        return ["<pad>", *words.words, *buckets, "<bos>", "<eos>"]


def encode(words: Sequence[str], known: Vocabulary, ids: TokenIds, length: int = 20) -> list[int]:
    """The row [length + 1] of one sentence. The sentence is cut after `length` words."""
    places = known.ids
    found = [places[word] + 1 if word in places else ids.bucket(word) for word in words[:length]]
    row = [ids.bos, *found, *([ids.eos] if len(found) < length else [])]
    return row + [PAD] * (length + 1 - len(row))


def sentence_vocabulary(texts: Iterable[Text], num_words: int = 10_000) -> Vocabulary:
    """The most frequent words of the sentences, without the titles. If there are fewer than `num_words`, all
    of them.

    Give it only the training clients' texts.
    """
    _check_sizes(num_words=num_words)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(" ".join(text.sentences).split())
    return vocabulary(counts, num_words)


def sentence_store(
    corpus: Corpus,
    words: Vocabulary,
    num_buckets: int = 500,
    length: int = 20,
    max_sentences: int = 1000,
    out: str | Path | None = None,
) -> ClientStore:
    """One store of all clients, in memory or in the new folder `out`.

    Each client has the first `max_sentences` sentences, in the order in which they were written. A sentence
    without a word is ignored. A client may have only one sentence; if it is split into halves, its query set
    is then empty. Sentences that were cut, words seen and words outside the vocabulary are counted in the
    store's info.
    """
    _check_sizes(num_buckets=num_buckets, length=length, max_sentences=max_sentences)
    ids = TokenIds(len(words), num_buckets)
    counts: Counter[str] = Counter(
        dict.fromkeys(
            ("texts", "without_sentence", "empty_sentences", "sentences_cut", "words", "unknown"), 0
        )
    )
    info = {"source": corpus.source, "num_words": len(words), "num_buckets": num_buckets}
    examples = _examples(corpus, words, ids, length, counts)
    return collect(examples, {"tokens": np.array(ids.names(words))}, info, counts, max_sentences, out)


def split_sentence_stores(
    corpus: Corpus,
    num_words: int = 10_000,
    num_buckets: int = 500,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 42,
    length: int = 20,
    max_sentences: int = 1000,
    out: str | Path | None = None,
    min_sentences: int = 1,
) -> tuple[ClientStore, ...]:
    """Training, validation and test stores. Clients who have enough sentences are divided as in `by_client`.

    The stores are views of one store. The corpus is read three times: `hold()` it if it fits into memory. For
    TFF's own splits use `sentence_vocabulary` on `train` and `sentence_store` on each split.

    Args:
        corpus: The texts.
        num_words: The size of the vocabulary. Words are counted over the training clients only. If there are
            fewer, all are taken; the stores' info and the number of keys of `tokens` say how many.
        num_buckets: The number of buckets for words outside the vocabulary.
        fractions: The share of clients of each store.
        seed: The seed of the division.
        length: The most words of a sentence.
        max_sentences: The most sentences of a client.
        out: A new folder for the store; None for memory.
        min_sentences: Clients with fewer sentences are left out.
    """
    _check_sizes(num_words=num_words, num_buckets=num_buckets, length=length, max_sentences=max_sentences)
    parts = cut_clients(speaking(corpus, min_sentences), fractions, seed, corpus.source)
    words = sentence_vocabulary((text for text in corpus if text.client in parts[0]), num_words)
    return take_parts(sentence_store(corpus, words, num_buckets, length, max_sentences, out), parts)


def speaking(corpus: Corpus, min_sentences: int = 1) -> list[str]:
    """The clients who have at least so many sentences. A sentence without a word is none."""
    _check_sizes(min_sentences=min_sentences)
    held: Counter[str] = Counter()
    for text in corpus:
        held[text.client] += sum(map(bool, map(str.strip, text.sentences)))
    found = [client for client, number in held.items() if number >= min_sentences]
    if held and not found and min_sentences > 1:
        raise UserError(
            f"none of the {len(held):,} clients of {corpus.source} has {min_sentences} sentences; the largest has "
            f"{max(held.values())}: set data.min_sentences (in Python, min_sentences) to at most that"
        )
    return found


def _examples(
    texts: Iterable[Text], known: Vocabulary, ids: TokenIds, length: int, counts: Counter[str]
) -> Iterator[Example]:
    for text in texts:
        counts["texts"] += 1
        counts["without_sentence"] += not text.sentences
        for sentence in text.sentences:
            words = sentence.split()
            if not words:
                counts["empty_sentences"] += 1
                continue
            counts["sentences_cut"] += len(words) > length
            words = words[:length]
            counts["words"] += len(words)
            counts["unknown"] += len(words) - sum(map(known.ids.__contains__, words))
            yield Example(text.client, text.time, {"tokens": encode(words, known, ids, length)})


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise UserError(f"{name} is {size}: give a whole number, at least 1")
