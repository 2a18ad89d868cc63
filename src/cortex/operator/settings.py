"""Command-line settings of the operator process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cortex.gateway.addresses import numeric
from cortex.tls import CertificateFiles, ServerCertificate, shown_name

#: Listening addresses that other machines can't use to call this one.
_NOT_CALLABLE = frozenset({"127.0.0.1", "::1", "localhost", "0.0.0.0", "::"})
_ALL = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True)
class OperatorSettings:
    """Listening addresses, ports and TLS files of operator and gateway."""

    host: str = "127.0.0.1"
    operator_port: int = 8889
    gateway_port: int = 8888
    autoscaler_speed: float = 1.0  #: factor by which time passes faster for the autoscaler
    tls: CertificateFiles | None = None  #: served by operator and gateway; None: plain HTTP
    name: str = ""  #: host name of this machine in URLs; "": the listening address
    stop_all: bool = False  #: stop gateway, replicas and agents, too, when a signal stops the operator
    drain_s: float = 10.0  #: time for requests in progress when everything stops

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> OperatorSettings:
        """Parse a command line; an invalid one ends the process with exit code 2."""
        parser = argparse.ArgumentParser(prog="cortex.operator.main", description="Run the cortex operator.")
        parser.add_argument("--host", default=cls.host)
        parser.add_argument("--operator-port", type=int, default=cls.operator_port)
        parser.add_argument("--gateway-port", type=int, default=cls.gateway_port)
        parser.add_argument("--tls-cert", type=Path)
        parser.add_argument("--tls-key", type=Path)
        parser.add_argument(
            "--autoscaler-speed",
            type=float,
            default=cls.autoscaler_speed,
            help="factor by which time passes faster for the autoscaler, to try a policy without waiting",
        )
        parser.add_argument("--stop-all", action="store_true", help="at SIGTERM, drain and stop everything")
        parser.add_argument("--drain", type=float, default=cls.drain_s, help="drain time in seconds, then")
        parsed = parser.parse_args(arguments)
        if bool(parsed.tls_cert) != bool(parsed.tls_key):
            parser.error("--tls-cert and --tls-key must be given together")
        return cls(
            parsed.host,
            parsed.operator_port,
            parsed.gateway_port,
            parsed.autoscaler_speed,
            CertificateFiles(parsed.tls_cert.absolute(), parsed.tls_key.absolute()) if parsed.tls_cert else None,
            stop_all=parsed.stop_all,
            drain_s=parsed.drain,
        )

    def with_certificate_name(self, certificate: ServerCertificate) -> OperatorSettings:
        """Return these settings with the certificate's host name in URLs, unless `host` is callable from elsewhere."""
        return replace(self, name=shown_name(certificate) or self.name) if self.host in _NOT_CALLABLE else self

    def with_address(self, address: str) -> OperatorSettings:
        """Return these settings with an IP address of this machine in URLs, if operator and gateway listen on all.

        A host name is ignored: `AuthMiddleware` might reject requests to it.
        """
        return replace(self, name=address) if self.host in _ALL and numeric(address) else self

    @property
    def address(self) -> str:
        """Address to connect to from this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    def url(self, port: int) -> str:
        """Return the URL of a port on `name`, or else on `address`."""
        scheme, host = "https" if self.tls else "http", self.name or self.address
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
