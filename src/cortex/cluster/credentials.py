"""Credentials of one cluster: two certificate authorities, and the keys that are derived from the cluster's secret.

The first operator of a database creates the cluster's secret; only operators know it. Mutual TLS uses two authorities,
whose private keys are derived from the secret:

    authority   its private key is known to   it signs the certificates of
    operators   operators                     operators
    nodes       operators and node agents     node agents

Each process signs a certificate for itself, with its address, when it starts. An agent accepts only peers that the
operators' authority has signed, so that an agent can't act as an operator. An operator accepts only peers that the
nodes' authority has signed, and, when it connects, only the address that it connects to.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import ipaddress
import json
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex.home import write_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: Certificates are as good as the keys; machines with a wrong clock must still connect.
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


def derive_key(secret: str, purpose: str) -> str:
    """Return the key for one purpose. It reveals neither the secret nor the keys for other purposes."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class TlsIdentity:
    """A process in mutual TLS: the key of the authority that signs for it, and the authority of its peers."""

    role: str  #: "operator" or "node"
    host: str  #: address in its certificate
    authority_key: str = field(repr=False)
    peer_authority: str  #: certificate, as PEM

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a listener, which requires a certificate of its clients."""
        return _context(self, ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Return the context of connections, which verifies authority and address of the listener."""
        return _context(self, ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True)
class ClusterCredentials:
    """Credentials and address of one operator."""

    secret: str = field(repr=False)  #: of the cluster
    host: str  #: address at which nodes reach the operator
    port: int  #: on which the operator accepts connections of nodes; 0: any free port
    epoch: int = 1  #: fencing token: nodes obey the operator with the highest epoch

    @property
    def identity(self) -> TlsIdentity:
        """Identity of the operator."""
        nodes = authority_certificate(derive_key(self.secret, "node"), "node")
        return TlsIdentity("operator", self.host, derive_key(self.secret, "operator"), nodes)

    @property
    def for_nodes(self) -> str:
        """Credentials of node agents, one line of text: keep it secret. See `node_identity`."""
        operators = authority_certificate(derive_key(self.secret, "operator"), "operator")
        return json.dumps({"key": derive_key(self.secret, "node"), "operators": operators})

    @property
    def gateway_secret(self) -> str:
        """Secret with which gateways authenticate at replicas."""
        return derive_key(self.secret, "gateway")


def node_identity(credentials: str, host: str) -> TlsIdentity:
    """Return the identity of a node agent from `ClusterCredentials.for_nodes`. Raises: ValueError."""
    try:
        data = json.loads(credentials)
        return TlsIdentity("node", host, str(data["key"]), str(data["operators"]))
    except (KeyError, TypeError) as error:
        raise ValueError("these are not the credentials of a cluster") from error


@functools.lru_cache(maxsize=64)
def authority_certificate(key: str, role: str) -> str:
    """Return the self-signed certificate of the authority with this key, as PEM."""
    from cryptography import x509  # noqa: PLC0415 - only the extra `ray` installs it
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    private = _authority_key(key)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(_name(f"cortex {role} authority"), _name(f"cortex {role} authority"), private.public_key(), 1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
    )
    return str(builder.sign(private, None).public_bytes(Encoding.PEM).decode())


@functools.lru_cache(maxsize=64)
def _context(identity: TlsIdentity, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED  # that of a client checks the host name, too
    context.load_verify_locations(cadata=identity.peer_authority)
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:  # `ssl` reads private keys from files only
        file = Path(folder, "pem")
        write_private(file, _certificate_with_key(identity))
        context.load_cert_chain(file)
    return context


def _certificate_with_key(identity: TlsIdentity) -> str:
    """Return a new private key and its certificate, signed by the identity's authority, as PEM."""
    from cryptography import x509  # noqa: PLC0415 - only the extra `ray` installs it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415

    authority, private = _authority_key(identity.authority_key), Ed25519PrivateKey.generate()
    host: x509.GeneralName
    try:
        host = x509.IPAddress(ipaddress.ip_address(identity.host))
    except ValueError:
        host = x509.DNSName(identity.host)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer, number = _name(f"cortex {identity.role} authority"), x509.random_serial_number()
    certificate = (
        _builder(issuer, _name(f"cortex {identity.role}"), private.public_key(), number)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([host]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, None)
    )
    key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return str((key + certificate.public_bytes(Encoding.PEM)).decode())


def _authority_key(key: str) -> Ed25519PrivateKey:
    """Return the private key of an authority: any 32 bytes are an Ed25519 private key (RFC 8032, 5.1.5)."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(derive_key(key, "certificate authority")))


def _builder(issuer: Any, subject: Any, public_key: Any, number: int) -> Any:
    from cryptography import x509  # noqa: PLC0415 - only the extra `ray` installs it

    return x509.CertificateBuilder(issuer, subject, public_key, number, _VALID_FROM, _VALID_UNTIL)


def _name(text: str) -> Any:
    from cryptography import x509  # noqa: PLC0415 - only the extra `ray` installs it

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
