"""The cryptography under the masks: published vectors, and masks that look like noise and never come twice."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from partwise.types import UserError

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from partwise.privacy import masks

hexed = bytes.fromhex
ALICE = hexed("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = hexed("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = hexed("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = hexed("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
AGREED = hexed("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")


def test_the_keys_of_rfc_7748():
    alice, bob = masks.private_key(ALICE), masks.private_key(BOB)
    assert (masks.public_bytes(alice), masks.public_bytes(bob)) == (ALICE_PUBLIC, BOB_PUBLIC)
    assert masks.agreed(alice, BOB_PUBLIC) == masks.agreed(bob, ALICE_PUBLIC) == AGREED


def plain_hkdf(secret: bytes, info: bytes, length: int, salt: bytes = bytes(32)) -> bytes:
    """RFC 5869 with SHA-256, as it is written there."""
    key, block, found = hmac.digest(salt, secret, "sha256"), b"", b""
    for number in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        found += block
    return found[:length]


def test_the_derivation_of_rfc_5869():
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert HKDF(hashes.SHA256(), 42, salt, info).derive(b"\x0b" * 22).hex() == expected
    assert plain_hkdf(b"\x0b" * 22, info, 42, salt).hex() == expected
    found = masks.derived(AGREED, "use", b"context", b"a", b"b", length=40)
    info = masks.packed(b"partwise secure sum 1", b"use", b"context", b"a", b"b")
    assert found == plain_hkdf(AGREED, info, 40)


def test_the_generator_is_aes_in_counter_mode():
    """The well-known first block of the key of zeros, and the counter in big-endian order."""
    first = masks.mask_of(bytes(16), 8).tobytes()
    assert first.hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e58e2fccefa7e3061367f1d57a4e7455a"


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_parts_are_never_taken_for_others(some, others):
    assert (masks.packed(*some) == masks.packed(*others)) == (some == others)


@pytest.mark.parametrize("change", ["secret", "use", "context", "first", "second"])
def test_every_part_of_a_derivation_matters(change):
    parts = {"secret": b"s", "use": "u", "context": b"c", "first": b"1", "second": b"2"}
    other = parts | {change: "x" if change == "use" else b"x"}
    found = [masks.derived(*each.values()) for each in (parts, other)]  # type: ignore[arg-type]
    assert found[0] != found[1]


def test_a_changed_context_gives_other_masks():
    """Round 2 of the same secrets shares nothing with round 1: no key and no mask."""
    seed = os.urandom(16)
    keys = [masks.public_bytes(masks.mask_key(seed, context)) for context in (b"round 1", b"round 2")]
    assert keys[0] != keys[1]
    alice = masks.private_key(ALICE)
    pair = [masks.pair_seed(alice, ALICE_PUBLIC, BOB_PUBLIC, c) for c in (b"round 1", b"round 2")]
    own = [masks.self_seed(seed, c) for c in (b"round 1", b"round 2")]
    for one, two in (pair, own):
        assert (masks.mask_of(one, 10_000) == masks.mask_of(two, 10_000)).mean() < 0.01


def test_both_neighbours_find_the_same_mask():
    alice, bob = masks.private_key(ALICE), masks.private_key(BOB)
    one = masks.pair_seed(alice, ALICE_PUBLIC, BOB_PUBLIC, b"c")
    assert one == masks.pair_seed(bob, BOB_PUBLIC, ALICE_PUBLIC, b"c")
    assert len(one) == 16


@pytest.mark.parametrize("key", [bytes(32), bytes([1]) + bytes(31), bytes(31)])
def test_keys_that_give_no_secret_are_refused(key):
    with pytest.raises(UserError, match="public key is not one of X25519"):
        masks.agreed(masks.private_key(ALICE), key)


def test_letters_between_clients():
    sealed = masks.sealed(bytes(16), True, b"text", b"about")
    assert masks.unsealed(bytes(16), True, sealed, b"about") == b"text"
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    assert masks.unsealed(bytes(16), True, changed, b"about") is None
    assert masks.unsealed(bytes(16), False, sealed, b"about") is None
    assert masks.unsealed(bytes(16), True, sealed, b"other") is None
    assert masks.unsealed(b"k" * 16, True, sealed, b"about") is None


@given(st.integers(0, 70), st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 4, 16, 64]))
def test_masks_in_pieces_are_masks_in_one(words, adding, subtracting, chunk):
    seeds = [bytes([n]) * 16 for n in range(adding + subtracting)]
    vector = np.arange(words, dtype=np.uint32) * np.uint32(77_777_777)
    expected = vector.copy()
    for number, seed in enumerate(seeds):
        mask = masks.mask_of(seed, words)
        expected = expected + mask if number < adding else expected - mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_CHUNK", chunk)
        masks.apply_masks(vector, seeds[:adding], seeds[adding:])
    np.testing.assert_array_equal(vector, expected)


def test_vectors_longer_than_a_piece():
    words = 2 * masks._CHUNK + 7
    found = masks.mask_of(b"k" * 16, words)
    np.testing.assert_array_equal(found[:100], masks.mask_of(b"k" * 16, 100))
    assert len(np.unique(found)) > 0.999 * words
    masks.apply_masks(found, [], [b"k" * 16])
    assert not found.any()


def test_a_mask_is_uniform():
    found = masks.mask_of(hashlib.sha256(b"seed").digest()[:16], 200_000)
    for byte in (found >> np.uint32(24), found & np.uint32(255)):
        assert chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-4


def seeds_that_collide(generate: Callable[[bytes], bytes], num_bytes: int) -> int:
    """Of seeds that differ from one in the same bit of two places, how many give the same mask. A generator that
    folds its seed to some words gives one for all of them."""
    seed = hashlib.shake_256(b"any").digest(num_bytes)
    mask = generate(seed)
    found = 0
    for one, two in itertools.combinations(range(num_bytes), 2):
        other = bytearray(seed)
        other[one] ^= 4
        other[two] ^= 4
        found += generate(bytes(other)) == mask
    return found


def test_different_seeds_have_different_masks():
    assert seeds_that_collide(lambda seed: masks.mask_of(seed, 4).tobytes(), 16) == 0
    folded = lambda seed: np.bitwise_xor.reduce(np.frombuffer(seed, "<u4")).tobytes()
    assert seeds_that_collide(folded, 16) > 0


def test_a_generator_of_32_bits_fails_the_same_test():
    """Flower's, to which seeds of 32 bytes (as base64, which varies in 28 of the 32 bits) are given."""
    flower = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_utils")
    generate = lambda seed: flower.pseudo_rand_gen(seed, 2**32, [(4,)])[0].tobytes()
    assert seeds_that_collide(generate, 32) == 4 * 28  # all pairs of the same place in two of eight words
    texts = [base64.urlsafe_b64encode(os.urandom(32)) for _ in range(2000)]
    words = np.stack([np.bitwise_xor.reduce(np.frombuffer(text, "<u4")) for text in texts])
    varying = np.bitwise_or.reduce(words) ^ np.bitwise_and.reduce(words)
    assert int(varying).bit_count() <= 28


WITHOUT = """
import sys
sys.modules["cryptography"] = None
import partwise.privacy, partwise.privacy.graphs, partwise.privacy.masked_letters, partwise.privacy.sharing
try:
    import partwise.privacy.masks
except partwise.UserError as error:
    print(error)
"""


def test_without_the_library_the_error_says_how_to_get_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cryptography is not installed: pip install 'partwise[privacy]'"
