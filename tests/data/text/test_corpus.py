from __future__ import annotations

import numpy as np
import pytest

from partwise.data import ClientStore, by_client
from partwise.data.text.corpus import Corpus, Text, count, cut_clients, milliseconds
from partwise.types import UserError


def text(client="a", time=0, title="", body=(), tags=(), kind="question") -> Text:
    return Text(client, time, kind, title, tuple(body), tuple(tags))


def test_a_corpus_can_be_read_again_and_says_what_it_left_out():
    passes = []

    def read(counts):
        passes.append(1)
        counts["dropped"] += 2
        yield text("a", body=["x"])
        yield text("b", body=["y"])
        yield text("a", body=["z"])

    corpus = Corpus("here", read)
    assert corpus.counts == {}
    assert [t.client for t in corpus] == [t.client for t in corpus] == ["a", "b", "a"]
    assert corpus.counts == {"texts": 3, "clients": 2, "dropped": 2}
    held = corpus.hold()
    assert len(passes) == 3
    assert list(held) == list(held) == list(corpus)
    assert (held.counts, held.source, len(passes)) == (corpus.counts, "here", 4)


def test_every_text_needs_a_client():
    corpus = Corpus.of([text("a"), text("")], "somewhere")
    with pytest.raises(UserError, match="text 2 of somewhere has no client: give every text the id"):
        list(corpus)


def test_words_and_tags_are_counted():
    texts = [text(title="the cat", body=["the dog .", "a cat"], tags=["pets"]), text(body=["the"])]
    words, tags = count(texts)
    assert words == {"the": 3, "cat": 2, "dog": 1, ".": 1, "a": 1}
    assert tags == {"pets": 1}


@pytest.mark.parametrize(
    ("date", "expected"),
    [
        ("1970-01-01T00:00:01.5", 1500),
        ("2016-08-02T15:39:14.947", 1_470_152_354_947),
        ("2016-08-02 15:39:14.947 UTC", 1_470_152_354_947),
        ("2016-08-02T17:39:14.947+02:00", 1_470_152_354_947),
        ("1969-12-31", -86_400_000),
    ],
)
def test_dates_are_milliseconds_in_utc(date, expected):
    assert milliseconds(date, "here") == expected


def test_bad_dates_are_named():
    with pytest.raises(UserError, match="row 7: date 'yesterday'; expected one like 2016"):
        milliseconds("yesterday", "row 7")


def test_clients_are_cut_as_in_a_store():
    clients = [f"site/{k}" for k in range(50)]
    parts = cut_clients(clients * 2, (0.8, 0.1, 0.1), 3)
    stores = by_client(ClientStore.from_arrays(clients, row=np.arange(50)), seed=3)
    assert [set(part) for part in parts] == [set(store.client_ids.tolist()) for store in stores]
    with pytest.raises(UserError, match="there is no text to cut by client"):
        cut_clients([], (1.0,), 3)
