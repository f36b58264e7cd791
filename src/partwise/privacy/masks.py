"""The cryptography of the secure sum, all of it from `cryptography`: X25519 (RFC 7748), HKDF with SHA-256
(RFC 5869), AES-128 in counter mode as the generator of masks, and AES-128-GCM for letters between clients.

Every key is derived for one use in one round: the use and the context (run, round, attempt) go into the
derivation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partwise.types import UserError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:  # pragma: no cover - without the extra
    raise UserError("cryptography is not installed: pip install 'partwise[privacy]'") from None

WORD = np.dtype("<u4")  # of vectors and masks; little-endian, so that all machines make the same bytes
PUBLIC_BYTES = 32
SEED_BYTES = 16  # of AES-128
TAG_BYTES = 16
_CHUNK = 1 << 15  # words that are masked at a time: they and a mask stay in a core's cache
_VERSION = b"partwise secure sum 1"


def packed(*parts: bytes) -> bytes:
    """Parts with their lengths, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def derived(secret: bytes, use: str, context: bytes, *parts: bytes, length: int = SEED_BYTES) -> bytes:
    """A key from a secret, for one use in one round and, where `parts` name them, between two clients."""
    info = packed(_VERSION, use.encode(), context, *parts)
    return HKDF(hashes.SHA256(), length, salt=None, info=info).derive(secret)


def private_key(data: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(data)


def mask_key(seed: bytes, context: bytes) -> X25519PrivateKey:
    """The key of a client's masks. It comes from 16 bytes, which is what is shared among neighbours."""
    return private_key(derived(seed, "mask key", context, length=32))


def public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def agreed(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret of two key pairs."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise UserError("a public key is not one of X25519, or is one that gives no secret") from None


def pair_seed(own: X25519PrivateKey, own_public: bytes, other: bytes, context: bytes) -> bytes:
    """The seed of the mask of two neighbours: both find the same."""
    return derived(agreed(own, other), "pair mask", context, *sorted((own_public, other)))


def self_seed(secret: bytes, context: bytes) -> bytes:
    """The seed of a client's own mask."""
    return derived(secret, "self mask", context)


def sealed(key: bytes, first: bool, text: bytes, about: bytes) -> bytes:
    """Text that only the other client can read. A key is used once in each direction, so one bit is nonce
    enough."""
    return AESGCM(key).encrypt(_nonce(first), text, about)


def unsealed(key: bytes, first: bool, data: bytes, about: bytes) -> bytes | None:
    """What the other client wrote. None if it was changed, or was written about something else."""
    try:
        return AESGCM(key).decrypt(_nonce(first), data, about)
    except InvalidTag:
        return None


def _nonce(first: bool) -> bytes:
    return bytes([first]) + bytes(11)


def apply_masks(vector: np.ndarray, add: Sequence[bytes], subtract: Sequence[bytes]) -> None:
    """Add the masks of some seeds and subtract those of others, modulo 2^32, in place."""
    streams = [(_stream(seed), np.add) for seed in add]
    streams += [(_stream(seed), np.subtract) for seed in subtract]
    zeros = bytes(_CHUNK * WORD.itemsize)
    room = np.empty(len(zeros) + 16, np.uint8)  # the interface asks for a block more than is written
    mask = room[: len(zeros)].view(WORD)
    for start in range(0, len(vector), _CHUNK):
        part = vector[start : start + _CHUNK]
        source = zeros if len(part) == _CHUNK else bytes(part.nbytes)
        for stream, combine in streams:
            stream.update_into(source, room.data)
            combine(part, mask[: len(part)], out=part)


def _stream(seed: bytes):
    return Cipher(algorithms.AES128(seed), modes.CTR(bytes(16))).encryptor()


def mask_of(seed: bytes, num_words: int) -> np.ndarray:
    """The mask of a seed: uint32, uniform to anyone who has not the seed."""
    vector = np.zeros(num_words, WORD)
    apply_masks(vector, [seed], [])
    return vector
