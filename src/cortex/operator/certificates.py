"""The certificate that operator and gateway serve: loaded from files, and loaded again once these are written anew."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from cortex.operator.settings import Settings
from cortex.telemetry import Logger
from cortex.tls import CertificateError, CertificateFiles, ServerCertificate, has_name


class ServedCertificate:
    """What is served now, nothing without `files`. Raises: CertificateError if the files can't be served.

    `fingerprints` is a file that tells commands on this machine which certificates to believe.
    """

    def __init__(self, files: CertificateFiles | None, fingerprints: Path, logger: Logger) -> None:
        self._files = files
        self._fingerprints = fingerprints
        self._logger = logger
        self._state: object = None
        self._newest: ServerCertificate | None = None
        self._names: tuple[str, ...] = ()  # of all that were served
        self.context: ssl.SSLContext | None = None  #: of the operator's server; None: plain HTTP
        if files is not None:
            self._state = files.state()
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.minimum_version = ssl.TLSVersion.TLSv1_2
            self.context.set_alpn_protocols(["http/1.1"])
            self._use(files, files.load(), self.context)

    @property
    def pem(self) -> str:
        """Certificate, chain and key; empty without TLS."""
        return self._newest.pem if self._newest else ""

    def is_name(self, host: str) -> bool:
        """Tell whether the certificate names a host, or one did that was served: addresses stay what they are."""
        return has_name(self._names, host)

    def named(self, settings: Settings) -> Settings:
        """Return settings with the name that URLs have."""
        return settings.named(self._newest) if self._newest else settings

    def renew(self) -> bool:
        """Serve what the files have now, and tell whether it is new. Files that don't fit are told of, and left."""
        files, context = self._files, self.context
        state = files.state() if files else None
        if files is None or context is None or state is None or state == self._state:
            return False  # while a file is replaced there may be none
        self._state = state
        try:
            found = files.load()
            if found.pem == self.pem:
                return False
            self._use(files, found, context)
        except (CertificateError, OSError) as error:
            self._logger.error("the new certificate can't be served, the last one is", reason=str(error))
            return False
        self._logger.info("certificate renewed", names=",".join(found.names), ends_at=found.ends_at.isoformat())
        return True

    def _use(self, files: CertificateFiles, certificate: ServerCertificate, context: ssl.SSLContext) -> None:
        # The gateway may show the one before for a moment yet: both are believed.
        before = self._fingerprints.read_text().split()[:1] if self._fingerprints.exists() else []
        part = self._fingerprints.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in dict.fromkeys([certificate.fingerprint, *before])))
        part.replace(self._fingerprints)
        certificate.install(context)
        self._newest = certificate
        self._names = tuple(dict.fromkeys(self._names + certificate.names))
        for text in files.warnings(certificate, datetime.now(UTC)):
            self._logger.warning("certificate", reason=text)
