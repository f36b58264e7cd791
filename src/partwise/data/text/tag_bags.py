"""Tag prediction (Federated Select, section 5.2): each text is a binary bag of its words, with its tags.

Column `words` int32 [N, width]: the distinct words of the example's title and sentences, as ids in ascending
order (0 is the most frequent word of the training clients), padded with -1. Column `tags` int32 [N,
max_tags]: likewise. A text without a known tag or without a known word gives no example; the store's info
counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from partwise.data.holdout import FRACTIONS
from partwise.data.store import ClientStore
from partwise.data.text.corpus import Corpus, Example, Text, collect, count, cut_clients, take_parts
from partwise.data.text.words import Vocabulary, vocabulary
from partwise.types import UserError

PAD = -1


class TagVocabularies(NamedTuple):
    """The words and tags that a model knows."""

    words: Vocabulary
    tags: Vocabulary


def tag_vocabularies(texts: Iterable[Text], num_words: int = 10_000, num_tags: int = 500) -> TagVocabularies:
    """The most frequent words and tags of the texts that have tags. If there are fewer, all of them.

    Give it only the training clients' texts.
    """
    words, tags = count(text for text in texts if text.tags)
    if not tags:
        raise UserError("no text has a tag: give questions, or answers with the tags of their questions")
    return TagVocabularies(vocabulary(words, num_words), vocabulary(tags, num_tags))


def tag_store(
    corpus: Corpus,
    vocabularies: TagVocabularies,
    width: int = 256,
    max_tags: int = 5,
    out: str | Path | None = None,
) -> ClientStore:
    """One store of all clients, in memory or in the new folder `out`. Each client's examples are sorted by
    time.

    If an example has more than `width` words, it keeps the words it uses most often (then the words most
    frequent overall). If it has more than `max_tags` tags, it keeps the tags most frequent overall. Both
    cases are counted.
    """
    if width < 1 or max_tags < 1:
        raise UserError(f"width is {width} and max_tags {max_tags}: give at least 1 of each")
    counts: Counter[str] = Counter(
        dict.fromkeys(("texts", "without_tag", "without_word", "words_cut", "tags_cut"), 0)
    )
    names = {"words": np.array(vocabularies.words.words), "tags": np.array(vocabularies.tags.words)}
    info = {"source": corpus.source, "pad": PAD}
    examples = _examples(corpus, vocabularies, width, max_tags, counts)
    return collect(examples, names, info, counts, out=out)


def split_tag_stores(
    corpus: Corpus,
    num_words: int = 10_000,
    num_tags: int = 500,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 42,
    width: int = 256,
    max_tags: int = 5,
    out: str | Path | None = None,
) -> tuple[ClientStore, ...]:
    """Training, validation and test stores. Clients who have a tagged text are divided as in `by_client`.

    Words and tags are counted over the training clients only. The stores are views of one store. The corpus
    is read three times: `hold()` it if it fits into memory. For TFF's own splits use `tag_vocabularies` on
    `train` and `tag_store` on each split.
    """
    parts = cut_clients((text.client for text in corpus if text.tags), fractions, seed, corpus.source)
    known = tag_vocabularies((text for text in corpus if text.client in parts[0]), num_words, num_tags)
    return take_parts(tag_store(corpus, known, width, max_tags, out), parts)


def _examples(
    texts: Iterable[Text], known: TagVocabularies, width: int, max_tags: int, counts: Counter[str]
) -> Iterator[Example]:
    for text in texts:
        counts["texts"] += 1
        tags = sorted(set(known.tags.find(text.tags)))
        if not tags:
            counts["without_tag"] += 1
            continue
        words = Counter(known.words.find(text.words()))
        if not words:
            counts["without_word"] += 1
            continue
        counts["words_cut"] += len(words) > width
        counts["tags_cut"] += len(tags) > max_tags
        columns = {"words": _padded(_top(words, width), width), "tags": _padded(tags[:max_tags], max_tags)}
        yield Example(text.client, text.time, columns)


def _top(words: Counter[int], width: int) -> list[int]:
    """The `width` words that occur most often, in ascending order."""
    if len(words) <= width:
        return sorted(words)
    return sorted(sorted(words, key=lambda word: (-words[word], word))[:width])


def _padded(ids: list[int], width: int) -> list[int]:
    return ids + [PAD] * (width - len(ids))
