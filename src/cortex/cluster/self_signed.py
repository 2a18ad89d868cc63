"""Makes a certificate that nobody vouches for. The only module that imports `cryptography`, of the extra `ray`."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cortex")])
#: Nobody looks at it: a clock that is wrong by years must not matter.
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


def self_signed() -> tuple[str, bytes]:
    """Return a new key with its certificate as PEM, and the certificate as DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    certificate = x509.CertificateBuilder(_NAME, _NAME, key.public_key(), number, _FROM, _UNTIL).sign(
        key, hashes.SHA256()
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return (private + public).decode(), certificate.public_bytes(serialization.Encoding.DER)
