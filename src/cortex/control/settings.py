"""What the operator is told when it starts: its command line, as data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Where operator and gateway listen."""

    host: str = "127.0.0.1"
    operator_port: int = 8889
    gateway_port: int = 8888

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Settings:
        """Read a command line; a wrong one ends the process with exit code 2."""
        parser = argparse.ArgumentParser(prog="cortex.control.main", description="Run the cortex operator.")
        parser.add_argument("--host", default=cls.host)
        parser.add_argument("--operator-port", type=int, default=cls.operator_port)
        parser.add_argument("--gateway-port", type=int, default=cls.gateway_port)
        parsed = parser.parse_args(arguments)
        return cls(parsed.host, parsed.operator_port, parsed.gateway_port)

    def url(self, port: int) -> str:
        """Return the address to call; where all addresses are listened on, the loopback one."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
