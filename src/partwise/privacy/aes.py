"""AES from `cryptography`: key streams, and fixed-key hashing of blocks (Guo, Katz, Wang and Yu 2020).

A hash of a block x is AES(sigma(x)) xor sigma(x) with a public key, where sigma(left, right) is (left xor right,
left). It is circular correlation robust, which is what trees of point functions need. Blocks are pairs of
little-endian 64-bit words. This module only encrypts: `bucket_kernels` has sigma and the xor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from partwise.types import UserError

BLOCK = 16  # bytes of a block, of a key and of a seed
Encrypt = Callable[[np.ndarray, np.ndarray], None]  # blocks, and where the encrypted ones go


def needs_package(wanted: str = "cryptography") -> UserError:
    """The error of a package that is not installed."""
    return UserError(
        f"private slices need {wanted}, which is not installed: pip install 'partwise[privacy]' installs it"
    )


def keystream(key: bytes, length: int) -> np.ndarray:
    """So many bytes of AES-CTR that starts at zero. A key must not be used for two streams."""
    stream = np.empty(length + BLOCK - 1, np.uint8)  # the cipher wants room for one more block
    encryptor = _cipher(key, counter=True).encryptor()
    encryptor.update_into(np.zeros(length, np.uint8), stream)
    return stream[:length]


def block_cipher(key: bytes) -> Encrypt:
    """Encrypts each of many blocks by itself. The room for the result has a spare block: see `room`."""
    encryptor = _cipher(key, counter=False).encryptor()

    def encrypt(blocks: np.ndarray, out: np.ndarray) -> None:
        encryptor.update_into(blocks.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8))

    return encrypt


def room(count: int) -> np.ndarray:
    """Space for so many encrypted blocks, and the spare one that the cipher wants."""
    return np.empty((count + 1, 2), np.uint64)


def derived(secret: bytes, label: bytes, length: int) -> bytes:
    """Bytes that follow from others: HKDF with SHA-256 (RFC 5869)."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise needs_package() from None
    return HKDF(SHA256(), length, None, label).derive(secret)


def framed(*parts: bytes) -> bytes:
    """The parts in a row, each after its length, so that no two lists of parts look the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _cipher(key: bytes, counter: bool) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, modes
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
    except ImportError:
        raise needs_package() from None
    if len(key) != BLOCK:
        raise UserError(f"a key has {len(key)} bytes, and must have {BLOCK}")
    return Cipher(AES(key), modes.CTR(bytes(BLOCK)) if counter else modes.ECB())
