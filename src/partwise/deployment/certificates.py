"""Certificates for a local federation and for trials: an authority, and a server's certificate signed by it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from partwise.checkpoint import write_file

LOCAL = ("localhost", "127.0.0.1")
DAY = datetime.timedelta(days=1)


class Certificates(NamedTuple):
    """Where the files are."""

    authority: Path  # the certificate that devices trust
    server: Path
    key: Path  # of the server, readable by its owner alone


def make_certificates(folder: str | Path, hosts: tuple[str, ...] = LOCAL, days: int = 30) -> Certificates:
    """Make an authority and a server's certificate for these hosts. The authority's key is not kept."""
    folder = Path(folder)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "partwise local authority")])
    own = _begun(issuer, issuer, authority.public_key(), days)
    own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    names = x509.SubjectAlternativeName([_name(host) for host in hosts])
    issued = _begun(subject, issuer, server.public_key(), days).add_extension(names, critical=False)
    files = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    for path, certificate in ((files.authority, own), (files.server, issued)):
        signed = certificate.sign(authority, hashes.SHA256())
        write_file(path, signed.public_bytes(serialization.Encoding.PEM))
    private = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_file(files.key, private, mode=0o600)
    return files


def _begun(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + days * DAY)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
