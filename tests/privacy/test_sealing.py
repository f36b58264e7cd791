"""Boxes for the second server: they open with its key and what they are bound to, and with nothing else."""

from __future__ import annotations

import sys

import pytest
from cryptography.hazmat import primitives

from partwise.privacy.aes import keystream
from partwise.privacy.sealing import OVERHEAD, bound_to, new_sealing_key, seal, unseal
from partwise.types import UserError

PRIVATE, PUBLIC = new_sealing_key()


@pytest.mark.parametrize("text", [b"", b"roots", bytes(24_256)])
def test_a_box_opens_with_its_key(text):
    box = seal(PUBLIC, text, b"bound")
    assert len(box) == len(text) + OVERHEAD
    assert unseal(PRIVATE, box, b"bound") == text
    assert seal(PUBLIC, text, b"bound") != box


def test_a_box_opens_with_nothing_else():
    box = seal(PUBLIC, b"roots", b"bound")
    other, _ = new_sealing_key()
    changed = bytearray(box)
    changed[40] ^= 1
    for key, sealed, associated in (
        (other, box, b"bound"),
        (PRIVATE, box, b"other"),
        (PRIVATE, box, b""),
        (PRIVATE, bytes(changed), b"bound"),
        (PRIVATE, box[:-1], b"bound"),
        (PRIVATE, box[:20], b"bound"),
        (PRIVATE, b"", b"bound"),
    ):
        with pytest.raises(UserError, match="cannot be opened"):
            unseal(key, sealed, associated)


def test_what_a_box_is_bound_to_has_one_meaning():
    whole = {bound_to(b"ab", b"c", b"d"), bound_to(b"a", b"bc", b"d"), bound_to(b"ab", b"c", b"e")}
    assert len(whole) == 3


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_keys_of_a_wrong_length_are_refused(key):
    with pytest.raises(UserError, match="must have 32"):
        seal(key, b"", b"")
    with pytest.raises(UserError, match="must have 32"):
        unseal(key, b"", b"")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.delattr(primitives, "hpke", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hpke", None)
    with pytest.raises(UserError, match=r"cryptography 47 or later.*partwise\[privacy\]"):
        seal(PUBLIC, b"", b"")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(UserError, match=r"need cryptography,.*partwise\[privacy\]"):
        keystream(bytes(16), 3)
