"""Server certificates in PEM files: validate them, read their names, and detect renewals."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cortex.errors import CertificateError

_BLOCK = r"-----BEGIN {0}-----.*?-----END {0}-----"
_CERTIFICATE = re.compile(_BLOCK.format("CERTIFICATE"), re.DOTALL)
_KEY = re.compile(_BLOCK.format("(?:[A-Z]+ )*PRIVATE KEY"), re.DOTALL)
#: The decoder behind `getpeercert`; the standard library has no public function to decode a local certificate.
_decode_file: Callable[[str], dict[str, Any]] = ssl._ssl._test_decode_cert  # type: ignore[attr-defined]
_OTHERS_READ = 0o077
#: A certificate chain is a few kilobytes.
_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ServerCertificate:
    """A certificate with its chain and matching key."""

    pem: str  #: certificate, chain and private key
    names: tuple[str, ...]  #: DNS names in the certificate's order, including wildcards
    ends_at: datetime
    fingerprint: str  #: SHA-256 of the certificate alone, hexadecimal

    def install(self, context: ssl.SSLContext) -> None:
        """Use the certificate for new connections of a server's context; open connections are unaffected."""
        _install(self.pem, context, None)

    def __repr__(self) -> str:
        return f"ServerCertificate({self.fingerprint[:16]})"


@dataclass(frozen=True)
class CertificateFiles:
    """The files of a certificate and its key, renewed by other programs."""

    certificate: Path
    key: Path

    def load(self) -> ServerCertificate:
        """Read and validate both files. Raises: CertificateError."""
        chain = _CERTIFICATE.findall(_read(self.certificate, "certificate"))
        keys = _KEY.findall(_read(self.key, "key"))
        for path, blocks, what in ((self.certificate, chain, "certificate"), (self.key, keys, "private key")):
            if not blocks:
                raise CertificateError(f"{path}: contains no {what} in PEM format")
        pem = "\n".join([*chain, keys[0], ""])
        with tempfile.TemporaryDirectory(prefix="cortex-tls-") as folder:  # mode 0700
            first = Path(folder) / "first.pem"
            first.write_text(chain[0])
            decoded = _decode(first, self.certificate)
        self._check_pair(pem)
        names = decoded.get("subjectAltName", ())
        return ServerCertificate(
            pem,
            tuple(value.lower() for kind, value in names if kind == "DNS"),
            datetime.fromtimestamp(ssl.cert_time_to_seconds(decoded["notAfter"]), UTC),
            fingerprint_of(ssl.PEM_cert_to_DER_cert(chain[0])),
        )

    def warnings(self, certificate: ServerCertificate, now: datetime) -> list[str]:
        """Return warnings about a certificate that is served nevertheless."""
        found = []
        if certificate.ends_at <= now:
            found.append(
                f"{self.certificate}: the certificate expired at {certificate.ends_at:%Y-%m-%d %H:%M} UTC; renew it: "
                "clients reject it"
            )
        if self.key.stat().st_mode & _OTHERS_READ:
            found.append(f"{self.key}: other users of this machine can read the private key; `chmod 600` it")
        return found

    def state(self) -> object:
        """Return a value that changes when a file is replaced; None while a file is missing."""
        try:
            stats = [path.stat() for path in (self.certificate, self.key)]
        except OSError:
            return None
        # ctime, so that changed permissions count too.
        return tuple((each.st_ctime_ns, each.st_size, each.st_ino, each.st_dev) for each in stats)

    def _check_pair(self, pem: str) -> None:
        def no_password() -> str:
            raise CertificateError(f"{self.key}: the key is encrypted; use one without a passphrase")

        try:
            _install(pem, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise CertificateError(
                    f"{self.key}: the key does not match the certificate {self.certificate}"
                ) from None
            raise CertificateError(
                f"{self.key} can't be served with {self.certificate} ({error.reason or error})"
            ) from None


def fingerprint_of(der: bytes) -> str:
    """Return the SHA-256 of a certificate in DER form, hexadecimal."""
    return hashlib.sha256(der).hexdigest()


def shown_name(certificate: ServerCertificate) -> str | None:
    """Return the first name of a certificate that can be used in a URL."""
    return next((name for name in certificate.names if "*" not in name), None)


def has_name(names: tuple[str, ...], name: str) -> bool:
    """Return True if `name` matches a certificate's names; `*` stands for one label (RFC 6125, 6.4.3)."""
    return name in names or f"*.{name.partition('.')[2]}" in names


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CertificateError(f"{path}: the {what} can't be read ({(error.strerror or str(error)).lower()})") from None
    if len(data) > _MAX_BYTES:
        raise CertificateError(f"{path}: is too large for a {what} in PEM format")
    return data.decode(errors="replace")


def _decode(file: Path, path: Path) -> Mapping[str, Any]:
    try:
        decoded: Mapping[str, Any] = _decode_file(os.fspath(file))
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(f"{path}: its first certificate can't be read ({error})") from None
    return decoded


def _install(pem: str, context: ssl.SSLContext, password: Callable[[], str] | None) -> None:
    with tempfile.TemporaryDirectory(prefix="cortex-tls-") as folder:  # mode 0700
        file = Path(folder) / "both.pem"
        file.write_text(pem)
        context.load_cert_chain(file, password=password)
