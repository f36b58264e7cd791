"""What each single party sees of a client says nothing of its keys: neither in its size nor in its bytes. Both
servers together would know them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
from scipy import stats

pytest.importorskip("numba", reason="the extra `privacy` is not installed")
from partwise.model.partition import keyed, partition
from partwise.privacy import two_servers
from partwise.privacy.aes import BLOCK
from partwise.privacy.sealing import new_sealing_key, unseal
from partwise.privacy.selection_bits import POINTS, STRINGS, way_of
from partwise.privacy.sparse_sum import accumulate
from partwise.privacy.sum_words import SumWords
from partwise.privacy.two_servers import Agreement, Parts, TableForm, for_helper, make_parts
from partwise.server import private_slices
from partwise.server.messages import About
from partwise.server.private_slices import ask_privately, bucketed, helper_answer, plain_rows, read_question
from partwise.tasks.matrix_factorization import matrix_factorization

ITEMS, DIM, MOST = 80, 2, 4
VERSION, TRANSCRIPTS = 3, 200
SURE = 1e-6  # chance of a false alarm
AGREEMENT = Agreement("run", 6, 2, {"item": TableForm(ITEMS, MOST, DIM, 4 * DIM)})
LAYOUT = AGREEMENT.layout("item")
MANY = 6200  # items, so that questions are point functions
LARGE = AGREEMENT._replace(run="large", tables={"item": TableForm(MANY, MOST, DIM, 4 * DIM)})
PRIVATE, PUBLIC = new_sealing_key()
CLIENTS = {"low": [0, 1, 2, 3], "high": [40, 55, 60, 79], "none": []}  # their keys


class Views(NamedTuple):
    """What is seen of one client, from the question for its slices to its report.

    first:   what both are told, seed, box, the helper's answer under its pad; masked words, write, its roots, box
    helper:  what both are told, box, and what is in it; digest, write, box, and the seed and its roots in it
    both:    the bits of one server xor those of the other: only the two together have them
    """

    first: bytes
    helper: bytes
    both: bytes


def made_tables(agreement: Agreement):
    model = matrix_factorization(agreement.tables["item"].num_keys, DIM)
    parts = partition(model, {"item": keyed("item")})
    return bucketed(agreement, VERSION, plain_rows(parts, model.init(jax.random.key(0))))


def question(agreement: Agreement, tables, task: str, keys: np.ndarray) -> Views:
    asking = ask_privately(agreement, PUBLIC, About("run", VERSION, task), {"item": keys})
    asked = read_question(agreement, asking.message)
    answer = helper_answer(agreement, PRIVATE, tables, VERSION, task, asked.public, asked.sealed)
    bound = private_slices._bound(agreement, VERSION, task, asked.public)
    inside, mine = unseal(PRIVATE, asked.sealed, bound), asked.to_first["item"]
    layout = agreement.layout("item")
    bits = [
        way_of(layout).bits(layout, asked.public, secret, party)
        for party, secret in enumerate((mine, inside[BLOCK:]))
    ]
    helper = asked.public + asked.sealed + inside
    return Views(asked.public + mine + asked.sealed + answer, helper, (bits[0] ^ bits[1]).tobytes())


def sent(task: str, keys: np.ndarray) -> Parts:
    """The report of a client. Its numbers have to do with its keys."""
    rows = np.repeat(keys[:, None] + 1, DIM, axis=1).astype(np.uint32) * np.uint32(1 << 16)
    words = SumWords(np.full(6, keys.sum(), np.uint32), {"item": rows})
    return make_parts(AGREEMENT, PUBLIC, VERSION, task, words, {"item": keys})


def opened(parts: Parts) -> list[bytes]:
    """What the helper finds in a report's box: the seed of the mask, and its roots."""
    return two_servers._opened(AGREEMENT, PRIVATE, VERSION, for_helper(parts))


def views(tables, task: str, keys: np.ndarray) -> Views:
    asked, parts = question(AGREEMENT, tables, task, keys), sent(task, keys)
    mine = [parts.masked.tobytes(), parts.writes["item"], parts.roots["item"], parts.sealed]
    theirs = [for_helper(parts).digest, parts.writes["item"], parts.sealed, *opened(parts)]
    return Views(asked.first + b"".join(mine), asked.helper + b"".join(theirs), asked.both)


@pytest.fixture(scope="module", params=[AGREEMENT, LARGE], ids=["small", "large"])
def agreement(request):
    return request.param


@pytest.fixture(scope="module")
def seen(agreement):
    """Many transcripts of every client: {client: {view: uint8 [transcript, byte]}}. Of the large table, only the
    questions."""
    see = views if agreement is AGREEMENT else partial(question, LARGE)
    tables, found = made_tables(agreement), {}
    for name, keys in CLIENTS.items():
        many = [see(tables, f"task {n}", np.array(keys, np.int64)) for n in range(TRANSCRIPTS)]
        stacked = lambda part, many=many: np.array([np.frombuffer(each, np.uint8) for each in part(many)])
        found[name] = {
            view: stacked(lambda many, view=view: (getattr(each, view) for each in many))
            for view in Views._fields
        }
    return found


def test_the_two_tables_are_asked_in_the_two_ways():
    assert (way_of(LAYOUT), way_of(LARGE.layout("item"))) == (STRINGS, POINTS)


def guesses(one: np.ndarray, two: np.ndarray) -> tuple[int, int]:
    """How often a linear classifier (ridge regression on all bits) that learned from half of the transcripts tells
    from the other half which client it was, and of how many."""
    bits = np.unpackbits(np.concatenate([one, two]), axis=1).astype(np.float32) * 2 - 1
    labels = np.repeat([1.0, -1.0], [len(one), len(two)])
    learned = np.arange(len(bits)) % 2 == 0
    products = bits @ bits[learned].T / bits.shape[1]
    weights = np.linalg.solve(products[learned] + 0.1 * np.eye(learned.sum()), labels[learned])
    return int((np.sign(products[~learned] @ weights) == labels[~learned]).sum()), int((~learned).sum())


def differences(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """For every bit, by how many standard deviations it is more often set for one client than for the other."""
    first, second = (np.unpackbits(each, axis=1).mean(0, dtype=np.float64) for each in (one, two))
    pooled = (first + second) / 2
    spread = np.sqrt(np.maximum(pooled * (1 - pooled), 1e-12) * (1 / len(one) + 1 / len(two)))
    return (first - second) / spread


@pytest.mark.parametrize("other", ["high", "none"])
@pytest.mark.parametrize("view", ["first", "helper"])
def test_one_party_cannot_tell_two_clients_apart(seen, view, other):
    one, two = seen["low"][view], seen[other][view]
    assert one.shape == two.shape
    right, trials = guesses(one, two)
    assert stats.binomtest(right, trials).pvalue > SURE
    gaps = differences(one, two)
    free = np.abs(gaps) > 0  # some bits are always zero
    assert np.abs(gaps).max() < stats.norm.isf(SURE / 2 / len(gaps)) + 0.5  # a binomial is not quite normal
    assert free.mean() > 0.8
    counts = np.stack([np.bincount(each.reshape(-1), minlength=256) for each in (one, two)])
    assert stats.chi2_contingency(counts).pvalue > SURE


@pytest.mark.parametrize("other", ["high", "none"])
def test_both_parties_together_can(seen, other):
    """The same test, of what no single party has: it is strong enough to find keys."""
    one, two = seen["low"]["both"], seen[other]["both"]
    right, trials = guesses(one, two)
    assert stats.binomtest(right, trials, alternative="greater").pvalue < SURE
    assert np.abs(differences(one, two)).max() > 10


def test_both_parties_together_read_the_keys(seen, agreement):
    """The bits in which the two strings differ are one slot of every bucket, the keys' slots among them."""
    layout = agreement.layout("item")
    for name, keys in CLIENTS.items():
        bits = np.unpackbits(seen[name]["both"], axis=1, bitorder="little", count=layout.num_slots)
        assert (bits.reshape(TRANSCRIPTS, layout.num_buckets, -1).sum(2) == 1).all()
        always = [key for key in range(layout.num_keys) if bits[:, layout.positions[:, key]].any(1).all()]
        assert always == keys


@pytest.mark.parametrize("name", CLIENTS)
def test_both_parties_together_read_the_report(name):
    parts, keys = sent("task", np.array(CLIENTS[name], np.int64)), CLIENTS[name]
    seed, theirs = opened(parts)
    nonce, context = two_servers._nonce("task"), AGREEMENT.context(VERSION, "item")
    shares = [
        accumulate(LAYOUT, DIM, context, [(nonce, parts.writes["item"], roots)], party)
        for party, roots in enumerate((parts.roots["item"], theirs))
    ]
    rows = shares[0] + shares[1]
    assert np.flatnonzero(rows[:, -1]).tolist() == keys
    assert (rows[keys, 0] >> 16).tolist() == [key + 1 for key in keys]
    assert all(
        (np.count_nonzero(share, axis=1) > 0).all() for share in shares
    )  # each alone: every row is noise
    assert (parts.masked - two_servers._mask(seed, 6) == sum(keys)).all()
