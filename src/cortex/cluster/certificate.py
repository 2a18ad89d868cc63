"""The certificate of a process that other machines of the cluster connect to: made by itself, for as long as it runs.

Nobody vouches for it. `wire.py` has both sides show that they know the secret of the cluster, and which certificate
they see: so nobody can be between them.
"""

from __future__ import annotations

import functools
import hashlib
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cortex.home import write_private


@dataclass(frozen=True)
class Certificate:
    """What a listener shows."""

    context: ssl.SSLContext
    fingerprint: str


@functools.cache
def own_certificate() -> Certificate:
    """Return the one of this process."""
    return make_certificate()


def make_certificate() -> Certificate:
    """Return a new one."""
    from cortex.cluster.self_signed import self_signed  # noqa: PLC0415 - needs cryptography

    pem, der = self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:  # the standard library reads it from files only
        file = Path(folder, "pem")
        write_private(file, pem)
        context.load_cert_chain(file)
    return Certificate(context, fingerprint(der))


@functools.cache
def any_certificate() -> ssl.SSLContext:
    """Return what connects to a listener whatever it shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(der: bytes) -> str:
    """Return what a certificate is told by."""
    return hashlib.sha256(der).hexdigest()
