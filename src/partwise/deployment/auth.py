"""Who a device is: an Ed25519 key of its own, with which it signs every request.

A signature covers the method, the path, a digest of the body, the time and a number that is used once. The server
knows the public keys of the devices that were enrolled. It refuses keys that it does not know, that were revoked or
have expired, times too far from its own, and requests that it has seen before.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from partwise.checkpoint import read_file, write_file
from partwise.types import UserError

WINDOW = 300.0  # seconds by which the clocks of a device and the server may differ
LONGEST_NONCE = 64  # characters
DEVICE, TIME, NONCE, SIGNATURE = (f"partwise-{name}" for name in ("device", "time", "nonce", "signature"))


class KeyRow(NamedTuple):
    """A key, as the server knows it: of a device, or of an operator (then `device` is the operator's name, and
    `public` the digest of a token)."""

    device: str
    public: bytes  # 32 bytes
    label: str = ""
    expires: float | None = None
    revoked: float | None = None
    role: Literal["device", "operator"] = "device"


class Signed(NamedTuple):
    """Who signed a request, and the number that it uses once."""

    device: str
    nonce: str


Why = Literal["not signed", "not enrolled", "signature", "clock", "revoked", "expired", "token", "https"]


class NotAllowedError(Exception):
    """A request that its sender may not make. `status` is 401 if nobody knows who it is, else 403."""

    def __init__(self, status: int, reason: Why, what: str):
        super().__init__(what)
        self.status, self.reason = status, reason


class DeviceKey:
    """A device's private key."""

    def __init__(self, private: Ed25519PrivateKey):
        self._private = private
        self.public = private.public_key().public_bytes_raw()
        self.device = device_of(self.public)

    @classmethod
    def new(cls) -> DeviceKey:
        """A key that nobody has had before."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | Path) -> DeviceKey:
        """The key in a file that `save` wrote."""
        try:
            private = serialization.load_pem_private_key(read_file(Path(path)), password=None)
        except (ValueError, TypeError) as error:
            raise UserError(f"'{path}' is no device key: {error}. `partwise enroll` writes one") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(f"'{path}' is no Ed25519 key. `partwise enroll` writes one")
        return cls(private)

    def save(self, path: str | Path) -> None:
        """Write the key to a file that only its owner may read."""
        pem = self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_file(Path(path), pem, mode=0o600)

    def headers(self, method: str, path: str, body: bytes, now: float | None = None) -> dict[str, str]:
        """The headers that sign a request."""
        moment, nonce = f"{time.time() if now is None else now:.3f}", os.urandom(16).hex()
        signature = self._private.sign(_signed(method, path, body, moment, nonce))
        return {
            DEVICE: self.device,
            TIME: moment,
            NONCE: nonce,
            SIGNATURE: base64.b64encode(signature).decode(),
        }


def device_of(public: bytes) -> str:
    """A device's name: a digest of its public key."""
    return hashlib.sha256(public).hexdigest()[:32]


def verify(
    request: tuple[str, str, Mapping[str, str], bytes], key_of: Callable[[str], KeyRow | None], now: float
) -> Signed:
    """Who signed a request. Whether its number was used before, the journal knows.

    Args:
        request: Method, path, headers and body.
        key_of: The key of a device; None if it was not enrolled.
        now: The server's time.

    Raises:
        NotAllowedError: The request is not signed by a device that may make it now.
    """
    method, path, headers, body = request
    given = [headers.get(name, "") for name in (DEVICE, TIME, NONCE, SIGNATURE)]
    if not all(given):
        raise NotAllowedError(401, "not signed", "the request is not signed by a device")
    device, moment, nonce, signature = given
    row = key_of(device)
    if row is None or row.role != "device":
        raise NotAllowedError(401, "not enrolled", f"device {device} is not enrolled")
    try:
        proof = base64.b64decode(signature, validate=True)
        _public(row.public).verify(proof, _signed(method, path, body, moment, nonce))
        skew = abs(float(moment) - now)
    except (InvalidSignature, ValueError):
        raise NotAllowedError(
            401, "signature", f"the signature of device {device} does not fit the request"
        ) from None
    check_valid(row, f"device {device}", now)
    if not skew <= WINDOW:
        raise NotAllowedError(
            401,
            "clock",
            f"the clock of device {device} is {skew:.0f} seconds off, and {WINDOW:.0f} are allowed: the server's "
            f"time is {now:.3f}",
        )
    if len(nonce) > LONGEST_NONCE:
        raise NotAllowedError(
            401, "signature", f"a number that is used once has at most {LONGEST_NONCE} characters"
        )
    return Signed(device, nonce)


def verify_operator(headers: Mapping[str, str], key_of: Callable[[str], KeyRow | None], now: float) -> str:
    """The operator who makes a request: `Authorization: Bearer NAME.SECRET`, as `new_token` makes it.

    Raises:
        NotAllowedError: Nobody who may do so.
    """
    kind, _, token = headers.get("authorization", "").partition(" ")
    name = token.rpartition(".")[0]
    row = key_of(operator_id(name)) if kind.lower() == "bearer" and name else None
    digest = hashlib.sha256(token.encode()).digest()
    if row is None or row.role != "operator" or not hmac.compare_digest(row.public, digest):
        raise NotAllowedError(401, "token", "this needs the token of an operator")
    check_valid(row, f"operator {name}", now)
    return name


def new_token(name: str) -> tuple[str, KeyRow]:
    """A token for an operator of this name, and what the server keeps of it."""
    if not (name.isidentifier() and name.isascii()):
        raise UserError(f"an operator's name has letters, digits and _, not '{name}'")
    token = f"{name}.{secrets.token_urlsafe(32)}"
    public = hashlib.sha256(token.encode()).digest()
    return token, KeyRow(operator_id(name), public, name, role="operator")


def read_token(path: str | Path) -> str:
    """The token in a file, as `new_token` makes it."""
    token = read_file(Path(path)).decode(errors="replace").strip()
    if not re.fullmatch(r"\w+\.[\w-]+", token, re.ASCII):
        raise UserError(
            f"'{path}' holds no operator's token: `partwise enroll RUN --operator NAME` writes one"
        )
    return token


def operator_id(name: str) -> str:
    """Under which an operator's key is kept. No device has such a name."""
    return f"operator:{name}"


def check_valid(row: KeyRow, who: str, now: float) -> None:
    """Raise `NotAllowedError` if a key was revoked or has expired."""
    if row.revoked is not None:
        raise NotAllowedError(403, "revoked", f"{who} was revoked")
    if row.expires is not None and row.expires <= now:
        raise NotAllowedError(403, "expired", f"the key of {who} has expired")


@lru_cache(maxsize=16_384)
def _public(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key)


def _signed(method: str, path: str, body: bytes, moment: str, nonce: str) -> bytes:
    """What a signature is of."""
    return "\n".join([method.upper(), path, hashlib.sha256(body).hexdigest(), moment, nonce]).encode()
