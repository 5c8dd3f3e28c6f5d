"""Authorities and certificates, made for one test."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate and of its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; its own is in the file ``path``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, *, days: int = 1) -> Certificate:
        """For loopback; with negative ``days`` one whose time is over."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key, days)
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), loopback]), critical=False
        )
        made = Certificate(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        made.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        plain = serialization.NoEncryption()
        made.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        made.key.chmod(0o600)
        return made


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - 2 * DAY).not_valid_after(now + days * DAY)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def rest_options(made: Certificate) -> dict[str, str]:
    return {
        "security.ssl.rest.enabled": "true",
        "security.ssl.rest.certificate": str(made.certificate),
        "security.ssl.rest.key-file": str(made.key),
    }


def internal_options(made: Certificate, authority: Authority) -> dict[str, str]:
    return {
        "security.ssl.internal.enabled": "true",
        "security.ssl.internal.certificate": str(made.certificate),
        "security.ssl.internal.key-file": str(made.key),
        "security.ssl.internal.ca": str(authority.path),
    }
