"""What the operator is told when it starts: its command line, as data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cortex.gateway.addresses import numeric
from cortex.tls import CertificateFiles, ServerCertificate, shown_name

#: Addresses that lead to this machine from itself only, or to nothing in particular.
_SAY_NOTHING = frozenset({"127.0.0.1", "::1", "localhost", "0.0.0.0", "::"})
_ALL = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True)
class Settings:
    """Where operator and gateway listen."""

    host: str = "127.0.0.1"
    operator_port: int = 8889
    gateway_port: int = 8888
    autoscaler_speed: float = 1.0  #: how many times faster time passes for the autoscaler
    tls: CertificateFiles | None = None  #: what both serve; None: plain HTTP
    name: str = ""  #: what others call this machine, in URLs; "": by the address

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Settings:
        """Read a command line; a wrong one ends the process with exit code 2."""
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
            help="how many times faster time passes for the autoscaler, to try a policy without waiting",
        )
        parsed = parser.parse_args(arguments)
        if bool(parsed.tls_cert) != bool(parsed.tls_key):
            parser.error("--tls-cert and --tls-key belong together")
        return cls(
            parsed.host,
            parsed.operator_port,
            parsed.gateway_port,
            parsed.autoscaler_speed,
            CertificateFiles(parsed.tls_cert.absolute(), parsed.tls_key.absolute()) if parsed.tls_cert else None,
        )

    def named(self, certificate: ServerCertificate) -> Settings:
        """Return these settings with the name in a certificate, unless one address says where both are."""
        return replace(self, name=shown_name(certificate) or self.name) if self.host in _SAY_NOTHING else self

    def reached_at(self, address: str) -> Settings:
        """Return these settings for URLs with this address of the machine, where all of them are listened on.

        Not with a name, which need not be one that requests may come to.
        """
        return replace(self, name=address) if self.host in _ALL and numeric(address) else self

    @property
    def address(self) -> str:
        """Where to connect to from this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    def url(self, port: int) -> str:
        """Return the address to call; without a name the loopback one where all are listened on."""
        scheme, host = "https" if self.tls else "http", self.name or self.address
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
