"""Texts of many clients, from any source, and what all stores made from texts have in common."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.data.build import build_store, write_store
from partwise.data.holdout import by_client
from partwise.data.store import ClientStore, group_rows
from partwise.types import UserError

ROWS_AT_ONCE = 200  # with 4,096, Python's collector runs again and again for them: 1.6 times the time
POSITIVE, NEGATIVE = "positive", "negative"  # the tags of texts with a sentiment


class Text(NamedTuple):
    """What a client wrote at one time. Tokens are separated by spaces, as `text.tokens` makes them."""

    client: str
    time: int  # milliseconds since 1970, UTC; of speeches, their order
    kind: str  # question, answer, comment, tweet, review or speech
    title: str
    sentences: tuple[str, ...]
    tags: tuple[str, ...]

    def words(self) -> list[str]:
        """All tokens, those of the title first."""
        return " ".join((self.title, *self.sentences)).split()


class Example(NamedTuple):
    """One row of a store that will be made."""

    client: str
    time: int
    columns: Mapping[str, Sequence[int] | int]


class Corpus:
    """Texts that can be read many times. Each time is a new pass over the source.

    `counts` is about the last complete pass: how many texts and clients there were, and what was left out and
    why.
    """

    def __init__(self, source: str, read: Callable[[Counter[str]], Iterable[Text]]):
        """`read` starts a pass. It adds what it leaves out to the counter that it is given."""
        self.source = source
        self.counts: dict[str, int] = {}
        self._read = read

    @classmethod
    def of(cls, texts: Iterable[Text], source: str = "texts in memory") -> Corpus:
        held = list(texts)
        return cls(source, lambda counts: held)

    def __iter__(self) -> Iterator[Text]:
        counts: Counter[str] = Counter()
        clients: set[str] = set()
        for number, text in enumerate(self._read(counts), start=1):
            if not text.client:
                raise UserError(
                    f"text {number} of {self.source} has no client: give every text the id of who wrote it"
                )
            clients.add(text.client)
            counts["texts"] += 1
            yield text
        self.counts = {"texts": counts["texts"], "clients": len(clients), **counts}

    def hold(self) -> Corpus:
        """The same texts in memory, so that further passes are fast."""
        texts = list(self)
        left_out = Counter({k: n for k, n in self.counts.items() if k not in ("texts", "clients")})
        return Corpus(self.source, lambda counts: counts.update(left_out) or texts)


class Counts(NamedTuple):
    """How often each word and each tag occurs."""

    words: Counter[str]
    tags: Counter[str]


def count(texts: Iterable[Text]) -> Counts:
    """Count words and tags in one pass. Memory grows with the number of different words, not with the texts."""
    counts = Counts(Counter(), Counter())
    for text in texts:
        counts.words.update(text.words())
        counts.tags.update(text.tags)
    return counts


def milliseconds(date: str, where: str) -> int:
    """An ISO date as milliseconds since 1970; UTC if it has no time zone. `where` is used only in the
    message."""
    try:
        moment = datetime.fromisoformat(date.removesuffix(" UTC"))
    except ValueError as error:
        raise UserError(f"{where}: date {date!r}; expected one like 2016-08-02T15:39:14.947") from error
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def cut_clients(
    clients: Iterable[str], fractions: Sequence[float], seed: int, source: str = "the corpus"
) -> list[frozenset[str]]:
    """Divide clients like `by_client`, before there is a store. Vocabularies are counted over the first part,
    so it must not be empty. `source` is for messages."""
    distinct = sorted(set(clients))
    if not distinct:
        raise UserError(
            f"there is no text to cut by client in {source}: give texts that have what the examples need"
        )
    store = ClientStore.from_arrays(distinct, row=np.arange(len(distinct)))
    parts = [frozenset(part.client_ids.astype(str).tolist()) for part in by_client(store, fractions, seed)]
    if not parts[0]:
        raise UserError(
            f"{source} has {len(distinct)} clients with a text that can be used, and cut into parts of "
            f"{', '.join(map(str, fractions))} none of them is left for training: give texts of more clients"
        )
    return parts


def take_parts(store: ClientStore, parts: Sequence[Collection[str]]) -> tuple[ClientStore, ...]:
    """For each part, a view of the store with the part's clients that have an example."""
    ids = store.client_ids.astype(str).tolist()
    return tuple(store.take(np.array([client in part for client in ids], bool)) for part in parts)


def collect(
    examples: Iterable[Example],
    vocabularies: Mapping[str, np.ndarray],
    info: Mapping[str, Any],
    counts: Counter[str],
    max_examples: int | None = None,
    out: str | Path | None = None,
) -> ClientStore:
    """A store of each client's examples by time, at most the first `max_examples`: in memory, or in folder
    `out`.

    `counts` goes into the store's info at the end. It may still change while the examples are made.
    """
    if out is None:
        return _named(_by_time(_batches(examples)), vocabularies, info, counts, max_examples).gather()
    if Path(out).exists():
        raise UserError(f"{out} already exists: remove it first, or choose another folder")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rows.", dir=Path(out).parent) as folder:
        rows = build_store(Path(folder) / "rows", _batches(examples), "client", order_by="time")
        store = _named(rows, vocabularies, info, counts, max_examples)
        return write_store(out, store.blocks(), store.vocabularies, store.info)


def _by_time(batches: Iterable[dict[str, np.ndarray]]) -> ClientStore:
    parts = list(batches)
    if not parts:
        raise UserError("no text gave an example: give more texts, or a larger vocabulary")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return group_rows(columns.pop("client"), columns, (), {}).reorder(by="time")


def _named(
    store: ClientStore,
    vocabularies: Mapping[str, np.ndarray],
    info: Mapping[str, Any],
    counts: Counter[str],
    max_examples: int | None,
) -> ClientStore:
    kept = store.select([name for name in store.columns if name != "time"])
    if max_examples is not None:
        kept = kept.cap(max_examples)
        counts["examples_over_max"] = store.num_examples - kept.num_examples
    said = {**info, "counts": dict(counts)}
    return dataclasses.replace(kept, vocabularies=dict(vocabularies), info=said)


def _batches(examples: Iterable[Example]) -> Iterator[dict[str, np.ndarray]]:
    stream = iter(examples)
    while rows := list(itertools.islice(stream, ROWS_AT_ONCE)):
        columns = {name: np.array([row.columns[name] for row in rows], np.int32) for name in rows[0].columns}
        yield {
            "client": np.array([row.client for row in rows]),
            "time": np.array([row.time for row in rows], np.int64),
            **columns,
        }
