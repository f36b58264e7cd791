"""Boxes that one server carries to the other and cannot open: HPKE (RFC 9180) with X25519 and AES-128-GCM.

A client seals to the second server what the first one must not read. What belongs to it in the open, such as the
round and the rest of the message, is bound to the box: it does not open with anything else.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from partwise.privacy.aes import framed, needs_package
from partwise.types import UserError

KEY = 32  # bytes of an X25519 key, private or public
OVERHEAD = 48  # bytes of a box beside what is in it: a public key and a tag


def new_sealing_key() -> tuple[bytes, bytes]:
    """A private key, which the second server keeps, and its public key, 32 bytes each."""
    private = _curve().X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def bound_to(context: bytes, nonce: bytes, public: bytes) -> bytes:
    """What a write's box is bound to: the round, the write's nonce, and a digest of its public part."""
    return framed(context, nonce, blake2b(public, digest_size=32).digest())


def seal(public_key: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """A box for the owner of the key, bound to `associated`. It has 48 bytes more than the plaintext."""
    suite, key = _suite(), _curve().X25519PublicKey.from_public_bytes(_checked(public_key))
    return suite.encrypt(plaintext, key, associated)


def unseal(private_key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """What is in a box."""
    suite, key = _suite(), _curve().X25519PrivateKey.from_private_bytes(_checked(private_key))
    from cryptography.exceptions import InvalidTag

    try:
        return suite.decrypt(sealed, key, associated)
    except (InvalidTag, ValueError):
        raise UserError(
            "a sealed message cannot be opened: it is for another key, of another round or write, or damaged. "
            "Refuse this write at both servers"
        ) from None


def _checked(key: bytes) -> bytes:
    if len(key) != KEY:
        raise UserError(f"a sealing key has {len(key)} bytes, and must have {KEY}: see new_sealing_key")
    return key


def _curve() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ImportError:
        raise needs_package() from None
    return x25519


def _suite() -> Any:
    try:
        from cryptography.hazmat.primitives import hpke
    except ImportError:
        raise needs_package("cryptography 47 or later (HPKE)") from None
    return hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_128_GCM)
