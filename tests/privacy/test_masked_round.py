"""The secure sum of all parties: it is the sum, whoever leaves when, or there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from partwise.types import UserError

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
from partwise.privacy.graphs import MaskSettings, mask_settings
from partwise.privacy.masked_letters import TooFewError
from partwise.privacy.masked_round import Drops, default_settings, masked_letters, masked_sum, measure_round
from partwise.privacy.masked_server import unmasked_sum

CONTEXT = b"run 1, round 2, attempt 3"


def vectors(number: int, words: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"client {n}": rng.integers(0, 2**32, words, np.uint32) for n in range(number)}


def plain_sum(given: dict[str, np.ndarray], *dropped: set[str]) -> np.ndarray:
    left = set().union(*dropped)
    return np.sum([vector for name, vector in given.items() if name not in left], axis=0, dtype=np.uint32)


def stages(draw: st.DrawFn, names: list[str]) -> list[set[str]]:
    """Before which of the four stages each client leaves; 4: it stays. Most stay."""
    when = draw(st.lists(st.sampled_from([0, 1, 2, 3, *[4] * 12]), min_size=len(names), max_size=len(names)))
    return [{name for name, stage in zip(names, when, strict=True) if stage == n} for n in range(4)]


@settings(max_examples=60)
@given(st.integers(2, 11), st.integers(1, 40), st.data())
def test_it_is_the_sum_or_there_is_none(number, words, data):
    given = vectors(number, words)
    dropped = stages(data.draw, list(given))
    threshold = mask_settings(number, b"").threshold
    if number - len(set().union(*dropped)) < threshold:
        with pytest.raises(TooFewError, match="needed"):
            masked_sum(given, CONTEXT, Drops(*dropped))
    else:
        found = masked_sum(given, CONTEXT, Drops(*dropped))
        np.testing.assert_array_equal(found, plain_sum(given, *dropped[:3]))


@settings(max_examples=40)
@given(st.integers(8, 16), st.sampled_from([4, 6]), st.data())
def test_with_neighbours_only(number, degree, data):
    """Where everyone has a few neighbours, the sum is right whenever there is one."""
    given = vectors(number, 5)
    dropped = stages(data.draw, list(given))
    known = MaskSettings(b"seed", degree, degree // 2 + 1, 2)
    try:
        found = masked_sum(given, CONTEXT, Drops(*dropped), known)
    except TooFewError:
        assert set().union(*dropped)
    else:
        np.testing.assert_array_equal(found, plain_sum(given, *dropped[:3]))


def test_more_than_a_hundred_clients():
    given = vectors(110, 50)
    names = list(given)
    found = masked_sum(given, CONTEXT, Drops(share=names[:4], mask=names[4:12], unmask=names[12:15]))
    np.testing.assert_array_equal(found, plain_sum(given, set(names[:12])))


@pytest.mark.parametrize("stage", Drops._fields)
def test_below_the_threshold_there_is_no_sum(stage):
    """Of nine, six must stay."""
    given = vectors(9, 3)
    names = list(given)
    assert len(masked_sum(given, CONTEXT, Drops(**{stage: names[:3]}))) == 3
    with pytest.raises(TooFewError, match=r"only 5 .* 6 are needed"):
        masked_sum(given, CONTEXT, Drops(**{stage: names[:4]}))


def test_any_names_will_do():
    given = dict(zip(["", "ü", "a b", "10", "9"], vectors(5, 4).values(), strict=True))
    np.testing.assert_array_equal(masked_sum(given, CONTEXT, Drops(mask=["ü"])), plain_sum(given, {"ü"}))


@pytest.fixture(scope="module")
def letters():
    """Of zeros, the most telling of vectors."""
    given = {name: np.zeros(50_000, np.uint32) for name in vectors(5, 1)}
    known = default_settings(given, CONTEXT)
    return [masked_letters(given, CONTEXT, Drops(), known) for _ in range(2)]


def test_what_is_uploaded_looks_like_noise(letters):
    for letter in letters[0].masked.values():
        words = np.frombuffer(letter[16:], "<u4")
        for byte in (words >> np.uint32(24), words & np.uint32(255)):
            assert chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-5


def test_a_second_run_shares_nothing_with_the_first(letters):
    one, two = (np.frombuffer(each.masked["client 0"][16:], "<u4") for each in letters)
    assert (one == two).mean() < 1e-3
    assert len({letter for each in letters for letter in each.advertised.values()}) == 10


def test_without_the_last_letters_the_sum_is_hidden(letters):
    """What the server can add up by itself: pairs cancel, own masks do not."""
    total = sum(np.frombuffer(letter[16:], "<u4") for letter in letters[0].masked.values())
    assert chisquare(np.bincount(np.asarray(total) & np.uint32(255), minlength=256)).pvalue > 1e-5


def test_letters_are_small():
    """A vector of 20,000 words among ten clients, and what comes on top of it."""
    given = vectors(10, 20_000)
    sent = masked_letters(given, CONTEXT, Drops(), default_settings(given, CONTEXT))
    sizes = [len(letters["client 3"]) for letters in sent]
    assert sizes == [16 + 64, 16 + 16 + 9 * 50, 16 + 80_000, 16 + 16 + 10 * 17]
    assert sum(sizes) < 1.02 * 80_000


def test_the_sum_is_a_function_of_the_letters():
    """So a server that starts again with its journal finds the same; a late answer more changes nothing."""
    given = vectors(6, 10)
    known = default_settings(given, CONTEXT)
    sent = masked_letters(given, CONTEXT, Drops(mask=["client 1"]), known)
    fewer = sent._replace(unmasking=dict(list(sent.unmasking.items())[1:]))
    backwards = [dict(reversed(letters.items())) for letters in sent]
    for letters in (sent, fewer, backwards):
        found = unmasked_sum(CONTEXT, *letters, known)
        np.testing.assert_array_equal(found, plain_sum(given, {"client 1"}))


def test_it_is_measured():
    told = measure_round(20, 100)
    assert (told["degree"], told["threshold"]) == (19, 14)
    assert told["seconds"] >= told["unmask_seconds"] > 0


def test_one_client_has_nobody_to_hide_among():
    with pytest.raises(UserError, match="at least 2 clients"):
        masked_sum(vectors(1, 3), CONTEXT)
