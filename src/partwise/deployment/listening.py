"""Whether a server can listen as it is told: the address, the port, the certificate and its key. It is asked before
a run is begun, so that a mistake leaves nothing behind."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from pathlib import Path

from partwise.types import UserError

LARGEST_PORT = 65_535


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise `UserError` unless these are a certificate and its key, or neither is given."""
    if (certificate is None) != (key is None):
        raise UserError("a certificate and its key belong together: give --certificate and --key, or neither")
    if certificate is None:
        return
    for path in filter(None, (certificate, key)):
        if not Path(path).is_file():
            raise UserError(f"there is no file '{path}': give PEM files with --certificate and --key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"'{certificate}' and '{key}' are not a certificate and its key ({error}): give PEM files that belong "
            f"together with --certificate and --key, the key without a password"
        ) from None


def check_address(host: str, port: int) -> None:
    """Raise `UserError` if no server can listen there."""
    if not 0 <= port <= LARGEST_PORT:
        raise UserError(
            f"a port is from 1 to {LARGEST_PORT:,}, or 0 for any that is free, not {port}: give --port"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in found:
            _try(family, kind, address)
    except OSError as error:
        raise UserError(
            f"the server cannot listen on {host}:{port} ({error.strerror or error}): choose another --port (0: any "
            f"that is free) or --host, or stop what listens there"
        ) from None


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def _try(family: int, kind: int, address: tuple) -> None:
    """Listen for a moment, as the server will."""
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)
