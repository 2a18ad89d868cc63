"""Makes certificates while tests run: a certificate in the repository would expire, or be mistaken for a secret."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


def write_pair(
    folder: Path, *names: str, days: float = 30, passphrase: str = "", stem: str = "server"
) -> tuple[Path, Path]:
    """Write a self-signed certificate for names and addresses, and its key; return both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate, file = folder / f"{stem}.pem", folder / f"{stem}-key.pem"
    certificate.write_bytes(_signed(names, key, days).public_bytes(serialization.Encoding.PEM))
    encryption = (
        serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    )
    form = serialization.PrivateFormat.PKCS8
    file.touch(mode=0o600)
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
    return certificate, file


def _signed(names: tuple[str, ...], key: Key, days: float) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
