"""What the server of a secure sum refuses: letters that are not what they should be, and forged shares."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.types import UserError

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
from partwise.privacy import masked_server
from partwise.privacy.masked_letters import TooFewError, stamped
from partwise.privacy.masked_round import Drops, RoundLetters, default_settings, masked_letters

CONTEXT = b"round 7"
VECTORS = {
    name: np.full(3, n, np.uint32) for n, name in enumerate(["ann", "ben", "cas", "dan", "eve", "fay"])
}
KNOWN = default_settings(VECTORS, CONTEXT)  # all pairs; four of six must stay
STAGES = {"advertised": "advertise", "shared": "share", "masked": "mask", "unmasking": "unmask"}


@pytest.fixture(scope="module")
def sent() -> RoundLetters:
    """Fay has shared and has not uploaded."""
    return masked_letters(VECTORS, CONTEXT, Drops(mask=["fay"]), KNOWN)


@pytest.fixture(scope="module")
def other() -> RoundLetters:
    return masked_letters(VECTORS, b"round 8", Drops(mask=["fay"]), KNOWN)


def unmasked(sent: RoundLetters, **changes: dict[str, bytes]) -> np.ndarray:
    changed = {field: getattr(sent, field) | letters for field, letters in changes.items()}
    return masked_server.unmasked_sum(CONTEXT, *sent._replace(**changed), KNOWN)


def changed_body(letter: bytes, stage: str, name: str, at: int) -> bytes:
    """A letter with another byte, and the right stamp: made so, not changed on the way."""
    body = bytearray(letter[16:])
    body[at] ^= 1
    return stamped(CONTEXT, stage, name, bytes(body))


def test_the_sum(sent):
    assert unmasked(sent).tolist() == [10, 10, 10]
    assert unmasked(sent).dtype == np.uint32


@pytest.mark.parametrize("field", RoundLetters._fields)
def test_letters_that_were_changed_are_refused_by_name(sent, other, field):
    good = getattr(sent, field)["ben"]
    bad = [good[:-1], good[:10], b"", good + b"\0", getattr(sent, field)["cas"], getattr(other, field)["ben"]]
    bad += [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(0, len(good), 7)]
    for letter in bad:
        with pytest.raises(UserError, match=f"'ben': this is not the letter '{STAGES[field]}'"):
            unmasked(sent, **{field: {"ben": letter}})


@pytest.mark.parametrize("field", RoundLetters._fields)
def test_letters_of_another_length_are_refused_by_name(sent, field):
    body = getattr(sent, field)["ben"][16:]
    for other in (body + b"\0", body + bytes(64), body[:-4]):
        with pytest.raises(UserError, match=f"'ben': the letter '{STAGES[field]}' has {len(other)} bytes"):
            unmasked(sent, **{field: {"ben": stamped(CONTEXT, STAGES[field], "ben", other)}})


def test_a_forged_share_of_a_key_is_found(sent):
    """Of fay, who dropped out: the last share of every letter."""
    letter = changed_body(sent.unmasking["ben"], "unmask", "ben", -17)
    with pytest.raises(
        UserError, match=r"shares of client 'fay' do not fit together .*key that it advertised"
    ):
        unmasked(sent, unmasking={"ben": letter})


def test_a_forged_share_of_an_own_mask_is_found(sent):
    """Of ann, who uploaded: the first share of every letter."""
    letter = changed_body(sent.unmasking["ben"], "unmask", "ben", 16)
    with pytest.raises(UserError, match="shares of client 'ann' do not fit together"):
        unmasked(sent, unmasking={"ben": letter})


def test_a_share_outside_the_field_is_found(sent):
    letter = stamped(CONTEXT, "unmask", "ben", sent.unmasking["ben"][16:-17] + b"\xff" * 17)
    with pytest.raises(UserError, match="a share has 17 bytes and is below"):
        unmasked(sent, unmasking={"ben": letter})
    asked = masked_server.survivors(CONTEXT, sent.advertised, sent.shared, sent.masked, KNOWN)["ben"]
    with pytest.raises(UserError, match="a share has 17 bytes"):
        masked_server.check_unmasking(CONTEXT, "ben", letter, asked)


def test_keys_come_once(sent):
    for copied in (sent.advertised["ann"][16:], sent.advertised["ann"][16:48] + sent.advertised["ben"][48:]):
        advertised = sent.advertised | {"ben": stamped(CONTEXT, "advertise", "ben", copied)}
        with pytest.raises(UserError, match="two clients of this round have the same key"):
            masked_server.directories(CONTEXT, advertised, KNOWN)


def test_strangers_are_refused_by_name(sent):
    letters = {"zoe": b""}
    with pytest.raises(UserError, match="'zoe' has sent shares, but has not advertised"):
        masked_server.deliveries(CONTEXT, sent.advertised, sent.shared | letters, KNOWN)
    with pytest.raises(UserError, match="'zoe' has uploaded, but has not advertised"):
        masked_server.survivors(CONTEXT, sent.advertised, sent.shared, [*sent.masked, "zoe"], KNOWN)
    with pytest.raises(UserError, match="'zoe' has sent shares to unmask"):
        unmasked(sent, unmasking=letters)
    with pytest.raises(UserError, match="'fay' has sent shares to unmask, but has not uploaded"):
        unmasked(sent, unmasking={"fay": b""})
    fewer = {name: letter for name, letter in sent.shared.items() if name != "ann"}
    with pytest.raises(UserError, match="'ann' has uploaded, but has not sent shares"):
        masked_server.survivors(CONTEXT, sent.advertised, fewer, sent.masked, KNOWN)


def test_an_upload_after_the_list_was_sent_is_found(sent):
    """Ann's upload came, but clients were asked without it (or the other way round)."""
    fewer = {name: letter for name, letter in sent.masked.items() if name != "ann"}
    unmasking = {name: letter for name, letter in sent.unmasking.items() if name != "ann"}
    late = sent._replace(masked=fewer, unmasking=unmasking)
    with pytest.raises(UserError, match="'ben' has answered another list of those who uploaded"):
        masked_server.unmasked_sum(CONTEXT, *late, KNOWN)


def test_too_few_at_each_stage(sent):
    few = lambda letters: {name: letters[name] for name in ("ann", "ben", "cas")}
    arguments = CONTEXT, sent.advertised, sent.shared
    with pytest.raises(TooFewError, match="only 3 clients have advertised keys, and 4 are needed"):
        masked_server.directories(CONTEXT, few(sent.advertised), KNOWN)
    with pytest.raises(TooFewError, match="only 3 clients have sent shares"):
        masked_server.deliveries(CONTEXT, sent.advertised, few(sent.shared), KNOWN)
    with pytest.raises(TooFewError, match="only 3 clients have uploaded"):
        masked_server.survivors(*arguments, few(sent.masked), KNOWN)
    with pytest.raises(TooFewError, match="only 3 shares of client 'ann' have come"):
        masked_server.unmasked_sum(*arguments, sent.masked, few(sent.unmasking), KNOWN)
    with pytest.raises(TooFewError, match="only 5 clients have uploaded, and 6 are needed"):
        masked_server.unmasked_sum(*arguments, sent.masked, sent.unmasking, KNOWN._replace(least=6))


def test_too_few_around_one_client():
    """With neighbours only, enough may be there in all, and too few around one."""
    names = [f"{n:02}" for n in range(12)]
    vectors = {name: np.zeros(2, np.uint32) for name in names}
    known = KNOWN._replace(degree=2, threshold=3, least=3)
    with pytest.raises(TooFewError, match=r"only 2 of client '..' and its neighbours have sent shares"):
        masked_letters(vectors, CONTEXT, Drops(share=names[:1]), known)


def test_letters_are_checked_as_they_come(sent, other):
    asked = masked_server.survivors(CONTEXT, sent.advertised, sent.shared, sent.masked, KNOWN)["ben"]
    checks = {
        "advertised": lambda letter: masked_server.check_advertised(CONTEXT, "ben", letter),
        "shared": lambda letter: masked_server.check_shared(CONTEXT, "ben", letter, 6, KNOWN),
        "masked": lambda letter: masked_server.check_masked(CONTEXT, "ben", letter, 3),
        "unmasking": lambda letter: masked_server.check_unmasking(CONTEXT, "ben", letter, asked),
    }
    for field, check in checks.items():
        check(getattr(sent, field)["ben"])
        for bad in (getattr(other, field)["ben"], getattr(sent, field)["cas"], b""):
            with pytest.raises(UserError, match="'ben'"):
                check(bad)
