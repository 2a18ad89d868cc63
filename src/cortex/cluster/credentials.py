"""Credentials of one cluster: keys derived from its secret, and the certificate of a listener.

The first operator of a database creates the cluster's secret. Each direction of communication uses a key of its own,
derived from the secret, so that a leaked key is of no use in another direction.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cortex.home import write_private

#: Nobody checks these dates, so a wrong clock is harmless.
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class ClusterCredentials:
    """The identity of one operator towards the nodes."""

    secret: str  #: of the cluster
    host: str  #: address at which nodes reach the operator
    port: int  #: on which the operator accepts connections of nodes; 0: any free port
    epoch: int = 1  #: fencing token: nodes obey the operator with the highest epoch

    @property
    def gateway_secret(self) -> str:
        """Secret with which gateways authenticate at replicas."""
        return derive_key(self.secret, "gateway")


def derive_key(secret: str, purpose: str) -> str:
    """Return the key for one purpose. It reveals neither the secret nor the keys for other purposes."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class ListenerCertificate:
    """A self-signed certificate that a listener presents."""

    context: ssl.SSLContext
    fingerprint: str


@functools.cache
def own_certificate() -> ListenerCertificate:
    """Return the certificate of this process."""
    return make_certificate()


def make_certificate() -> ListenerCertificate:
    """Return a new self-signed certificate. Raises: ImportError without the extra `ray`."""
    pem, der = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:  # `ssl` reads certificates from files only
        file = Path(folder, "pem")
        write_private(file, pem)
        context.load_cert_chain(file)
    return ListenerCertificate(context, fingerprint(der))


@functools.cache
def unverified_context() -> ssl.SSLContext:
    """Return the context of a client; `transport.connect` verifies the certificate by its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate."""
    return hashlib.sha256(der).hexdigest()


def _self_signed() -> tuple[str, bytes]:
    """Return a new key with its certificate as PEM, and the certificate as DER."""
    from cryptography import x509  # noqa: PLC0415 - only the extra `ray` installs it
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cortex")])
    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(name, name, key.public_key(), number, _VALID_FROM, _VALID_UNTIL)
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return (private + public).decode(), certificate.public_bytes(serialization.Encoding.DER)
