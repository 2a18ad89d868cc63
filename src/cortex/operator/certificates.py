"""TLS certificate of operator and gateway: loaded from files, and reloaded when they change."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from cortex.errors import CertificateError
from cortex.operator.settings import OperatorSettings
from cortex.telemetry import Logger
from cortex.tls import CertificateFiles, ServerCertificate, has_name


class ServedCertificate:
    """The current certificate, or plain HTTP if `files` is None. Raises: CertificateError for unusable files.

    `fingerprints` is the file with the fingerprints that commands on this machine trust.
    """

    def __init__(self, files: CertificateFiles | None, fingerprints: Path, logger: Logger) -> None:
        self._files = files
        self._fingerprints = fingerprints
        self._logger = logger
        self._files_state: object = None
        self._current: ServerCertificate | None = None
        self._names: tuple[str, ...] = ()  # of all certificates served so far
        self.context: ssl.SSLContext | None = None  #: of the operator's server; None: plain HTTP
        if files is not None:
            self._files_state = files.state()
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.minimum_version = ssl.TLSVersion.TLSv1_2
            self.context.set_alpn_protocols(["http/1.1"])
            self._install(files, files.load(), self.context)

    @property
    def pem(self) -> str:
        """Certificate, chain and key; empty without TLS."""
        return self._current.pem if self._current else ""

    @property
    def ends_at(self) -> datetime | None:
        """Time at which the current certificate expires; None without TLS."""
        return self._current.ends_at if self._current else None

    def has_name(self, host: str) -> bool:
        """Return True if a certificate served so far is valid for a host: a renewal does not invalidate URLs."""
        return has_name(self._names, host)

    def apply_name(self, settings: OperatorSettings) -> OperatorSettings:
        """Return the settings with the certificate's host name in URLs."""
        return settings.with_certificate_name(self._current) if self._current else settings

    def reload(self) -> bool:
        """Reload the files if they changed; return True if there is a new certificate.

        Unusable files are logged, and the current certificate stays in use.
        """
        files, context = self._files, self.context
        state = files.state() if files else None
        if files is None or context is None or state is None or state == self._files_state:
            return False  # no state: a file is missing while it is being replaced
        self._files_state = state
        try:
            loaded = files.load()
            if loaded.pem == self.pem:
                return False
            self._install(files, loaded, context)
        except (CertificateError, OSError) as error:
            self._logger.error("new certificate is unusable; the previous one stays in use", reason=str(error))
            return False
        self._logger.info("certificate renewed", names=",".join(loaded.names), ends_at=loaded.ends_at.isoformat())
        return True

    def _install(self, files: CertificateFiles, certificate: ServerCertificate, context: ssl.SSLContext) -> None:
        # The gateway may serve the previous certificate for another moment: keep its fingerprint trusted.
        previous = self._fingerprints.read_text().split()[:1] if self._fingerprints.exists() else []
        part = self._fingerprints.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in dict.fromkeys([certificate.fingerprint, *previous])))
        part.replace(self._fingerprints)
        certificate.install(context)
        self._current = certificate
        self._names = tuple(dict.fromkeys(self._names + certificate.names))
        for text in files.warnings(certificate, datetime.now(UTC)):
            self._logger.warning("certificate", reason=text)
