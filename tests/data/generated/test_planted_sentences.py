"""Generated sentences: their shape, and what follows a word and a word of one's own."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.data.generated.planted_sentences import FOLLOWED, KINDS, OWN, planted_sentences
from partwise.data.text.sentences import TokenIds
from partwise.types import UserError

CLIENTS, SENTENCES, WORDS, BUCKETS, LENGTH = 30, 40, 25, 6, 12
IDS = TokenIds(WORDS, BUCKETS)


@pytest.fixture(scope="module")
def store():
    return planted_sentences(CLIENTS, SENTENCES, WORDS, BUCKETS, LENGTH, seed=3)


@pytest.fixture(scope="module")
def pairs(store):
    """(client, token, the next one) of all sentences, the beginnings left out."""
    tokens = store.columns["tokens"]
    client = np.repeat(np.arange(CLIENTS), SENTENCES * (LENGTH - 1))
    return client, tokens[:, 1:-1].ravel(), tokens[:, 2:].ravel()


def test_shape_and_ids(store):
    tokens = store.columns["tokens"]
    assert (tokens.shape, tokens.dtype) == ((CLIENTS * SENTENCES, LENGTH + 1), np.int32)
    assert store.counts.tolist() == [SENTENCES] * CLIENTS
    assert (tokens[:, 0] == IDS.bos).all()
    assert set(tokens[:, 1:].ravel()) == set(
        range(1, IDS.bos)
    )  # every word and bucket, never BOS, EOS, padding
    names = store.vocabularies["tokens"]
    assert len(names) == store.num_keys("tokens") == IDS.num_ids
    assert [names[k] for k in (0, 1, WORDS, WORDS + 1, IDS.eos)] == ["<pad>", "w0", "w24", "<oov 0>", "<eos>"]
    assert store.info["num_words"] == WORDS


def test_a_seed_is_one_population(store):
    again = planted_sentences(CLIENTS, SENTENCES, WORDS, BUCKETS, LENGTH, seed=3)
    np.testing.assert_array_equal(again.columns["tokens"], store.columns["tokens"])
    other = planted_sentences(CLIENTS, SENTENCES, WORDS, BUCKETS, LENGTH, seed=4)
    assert np.any(other.columns["tokens"] != store.columns["tokens"])


def test_the_same_word_comes_after_a_word_for_all_clients(pairs):
    """Half of the time that of the language, a word of its own for each; and sometimes by chance."""
    _, now, after = pairs
    follower, shares = [], []
    for word in range(1, WORDS + 1):
        counts = np.bincount(after[now == word])
        follower.append(int(counts.argmax()))
        shares.append(counts.max() / counts.sum())
    assert sorted(follower) == [*range(1, WORDS + 1)]
    assert FOLLOWED < np.mean(shares) < FOLLOWED + 0.15
    is_word = now <= WORDS
    own = (after[is_word] > WORDS).mean()
    assert own == pytest.approx((1 - FOLLOWED) * OWN, abs=0.02)


def test_a_word_of_ones_own_is_of_a_kind_that_the_client_alone_knows(pairs):
    client, now, after = pairs
    mine = now > WORDS
    client, bucket, after = client[mine], now[mine], after[mine]
    kinds = set(after)
    assert len(kinds) == KINDS
    assert max(kinds) <= WORDS
    for k in range(5):
        for b in range(IDS.first_bucket, IDS.bos):
            assert len(set(after[(client == k) & (bucket == b)])) == 1  # always the same word
    per_bucket = [set(after[bucket == b]) for b in range(IDS.first_bucket, IDS.bos)]
    assert all(len(each) > 1 for each in per_bucket)  # another one for other clients


def test_words_follow_a_zipf_law():
    """Those that are drawn anew, as all are at the beginning."""
    first = planted_sentences(2000, 5, 50, 3, 1).columns["tokens"][:, 1]
    words = first[first <= 50]
    expected = 1 / np.arange(1, 51)
    found = np.bincount(words, minlength=51)[1:] / len(words)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.02)
    assert (first > 50).mean() == pytest.approx(OWN, abs=0.02)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_words": KINDS - 1}, r"num_words is 7: give at least 8, one for every kind"),
        ({"num_clients": 0}, "num_clients"),
        ({"sentences": 0}, "sentences"),
        ({"num_buckets": 0}, "num_buckets"),
        ({"length": -1}, "length"),
    ],
)
def test_bad_sizes_are_refused(sizes, says):
    with pytest.raises(UserError, match=says):
        planted_sentences(**sizes)
