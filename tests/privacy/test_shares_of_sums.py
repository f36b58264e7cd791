"""A sum by two servers: exact whatever clients send, of those reports that both can read, and no sooner."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.privacy.sealing import new_sealing_key
from partwise.privacy.sum_words import SumWords, added
from partwise.privacy.two_servers import (
    Agreement,
    TableForm,
    first_share,
    for_helper,
    helper_share,
    make_parts,
    read_agreement,
    sealed_size,
    with_noise,
)
from partwise.types import UserError

AGREEMENT = Agreement("run", 7, 2, {"item": TableForm(30, 5, 3, 12), "tag": TableForm(9, 2, 1, 4)})
PRIVATE, PUBLIC = new_sealing_key()
VERSION = 4


def client(rng, most=5):
    """A client's words and keys."""
    keys = {
        "item": np.sort(rng.choice(30, rng.integers(0, most + 1), replace=False)),
        "tag": np.sort(rng.choice(9, rng.integers(0, 3), replace=False)),
    }
    words = lambda *shape: rng.integers(0, 2**32, shape, dtype=np.uint32)
    return SumWords(words(7), {"item": words(len(keys["item"]), 3), "tag": words(len(keys["tag"]), 1)}), keys


def plain_sum(clients):
    """The sum, without any cryptography."""
    total = SumWords(
        np.zeros(7, np.uint32), {"item": np.zeros((30, 3), np.uint32), "tag": np.zeros((9, 1), np.uint32)}
    )
    for words, keys in clients:
        total.dense[:] += words.dense
        for space, rows in words.tables.items():
            total.tables[space][keys[space]] += rows
    return total


def sent(clients):
    return [
        make_parts(AGREEMENT, PUBLIC, VERSION, f"task-{place}", words, keys)
        for place, (words, keys) in enumerate(clients)
    ]


def check_equal(found, wanted):
    np.testing.assert_array_equal(found.dense, wanted.dense)
    for space, rows in wanted.tables.items():
        np.testing.assert_array_equal(found.tables[space], rows)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_both_shares_are_the_plain_sum(seed, number):
    rng = np.random.default_rng(seed)
    clients = [client(rng) for _ in range(number)]
    reports = sent(clients)
    mine = first_share(AGREEMENT, VERSION, reports)
    theirs, refused = helper_share(AGREEMENT, PRIVATE, VERSION, map(for_helper, reports))
    assert refused == []
    check_equal(added(mine, theirs), plain_sum(clients))


def test_a_share_alone_is_not_the_sum():
    clients = [client(np.random.default_rng(seed)) for seed in range(3)]
    reports, whole = sent(clients), plain_sum(clients)
    theirs, _ = helper_share(AGREEMENT, PRIVATE, VERSION, map(for_helper, reports))
    for share in (first_share(AGREEMENT, VERSION, reports), theirs):
        assert (share.dense != whole.dense).all()
        assert (share.tables["item"] != whole.tables["item"]).all()
        assert (share.tables["item"] != 0).all()  # also rows that nobody wrote to


def test_reports_that_the_helper_cannot_read_are_left_out_by_both():
    clients = [client(np.random.default_rng(seed)) for seed in range(5)]
    good = sent(clients)
    other, _ = client(np.random.default_rng(9))
    bad = [
        good[1]._replace(sealed=good[2].sealed),  # of another task
        good[2]._replace(masked=other.dense),  # the box is bound to the other words
        good[3]._replace(writes=good[4].writes),
    ]
    asked = [good[0], *bad, good[4]]
    theirs, refused = helper_share(AGREEMENT, PRIVATE, VERSION, map(for_helper, asked))
    assert refused == [1, 2, 3]
    mine = first_share(AGREEMENT, VERSION, [good[0], good[4]])
    check_equal(added(mine, theirs), plain_sum([clients[0], clients[4]]))
    assert helper_share(AGREEMENT, PRIVATE, VERSION + 1, map(for_helper, good))[1] == [0, 1, 2, 3, 4]


def test_a_report_says_nothing_by_its_size():
    sizes = set()
    for keys in (0, 1, 5):
        rng = np.random.default_rng(keys)
        words = SumWords(
            np.zeros(7, np.uint32),
            {"item": np.zeros((keys, 3), np.uint32), "tag": np.zeros((0, 1), np.uint32)},
        )
        chosen = {"item": np.sort(rng.choice(30, keys, replace=False)), "tag": np.zeros(0, int)}
        parts = make_parts(AGREEMENT, PUBLIC, VERSION, "task", words, chosen)
        sizes.add(
            (
                parts.masked.nbytes,
                len(parts.sealed),
                *(len(parts.writes[s]) + len(parts.roots[s]) for s in parts.writes),
            )
        )
        assert len(parts.sealed) == sealed_size(AGREEMENT)
    assert len(sizes) == 1


def test_noise_is_in_every_word_and_counts_have_their_own():
    noisy = AGREEMENT._replace(noise=50.0, count_noise=5000.0, tables={"item": TableForm(4000, 5, 3, 12)})
    zero = SumWords(np.zeros(7, np.uint32), {"item": np.zeros((4000, 3), np.uint32)})
    rows = with_noise(noisy, zero).tables["item"].view(np.int32)
    assert abs(rows.std() / 50 - 1) < 0.05
    assert (rows == 0).mean() < 0.02
    counts = np.concatenate([with_noise(noisy, zero).dense[-2:].view(np.int32) for _ in range(200)])
    assert abs(counts.std() / 5000 - 1) < 0.3
    check_equal(with_noise(AGREEMENT, zero), zero)


def test_an_agreement_is_text_and_back():
    assert read_agreement(AGREEMENT.to_json()) == AGREEMENT
    for text in (
        b"",
        b"{}",
        b"[]",
        AGREEMENT.to_json().replace("30", "-30"),
        AGREEMENT.to_json().replace('"run"', "5"),
    ):
        with pytest.raises(UserError, match="no agreement of two servers"):
            read_agreement(text)
